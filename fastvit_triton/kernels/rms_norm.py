"""RMSNorm, alone or after a residual addition; by the kernels of `layer_norm`, which then take 0 for the mean.

Math      y = γ·x / √(mean(x²) + ε)                                                       (1)
          s = residual + sample_scale·layer_scale·x,  y = RMSNorm(s)    for add_rms_norm  (2)
Backward  with x̂ = x / √(mean(x²) + ε) and g = dy·γ:
          dx = (g − x̂·mean(g·x̂)) / √(mean(x²) + ε)    dγ = Σ_rows dy·x̂                    (3)
          dresidual and dlayer_scale as in `layer_norm_backward`.
Cost      forward 5·M·D flops; bytes as `layer_norm`.
Saved     as `layer_norm`, with 0 for μ.
Sources   Zhang and Sennrich, Root mean square layer normalization, arXiv:1910.07467, eq. 4. Models that multiply by
          1 + w (Gemma) pass 1 + w as the weight.
"""

import math
from operator import index

import torch
import torch.nn.functional as F
from torch import Tensor

from . import choose, layer_norm
from .argument import NormLike, expect_addable, expect_norm, expect_rows, expect_scales, is_autocast_on, kind_of
from .backend import kernels_available
from .op import Op


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm over the last axis, equation (1).

    Args:
        x: [..., D].
        weight: γ [D], or None.
        eps: ε, added to the mean square.

    Returns:
        [..., D].

    Raises:
        ValueError: a size or device does not fit, or eps is negative or not finite.
        TypeError: an argument is of another type or dtype.
    """
    expect_rows("x", x, "D")
    expect_norm(x, x.dtype, (weight, None, eps), D=x.shape[-1])
    if kernels_available(x) and x.shape[-1] <= layer_norm.MAX_D:
        mixable = weight is None or weight.dtype == x.dtype
        rows = choose.rows_of(math.prod(x.shape[:-1]))
        if not mixable or choose.prefers_kernel(x, "layer_norm", rows, index(x.shape[-1])):
            return layer_norm.run(x, weight, None, eps, rms=True)
    return reference(x, weight, eps)


def run_either(x: Tensor, norm: NormLike, dtype: torch.dtype) -> Tensor:
    """LayerNorm or RMSNorm of x [..., D] in a dtype, by our kernel, without argument checks or plan."""
    return layer_norm.run(x, *norm[:3], rms=kind_of(norm) == "rms_norm", dtype=dtype)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    layer_scale: Tensor | None = None,
    sample_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Adds a residual branch and normalises the sum: equation (2).

    Args:
        x: [B, ..., D], the branch.
        residual: [B, ..., D], the residual stream.
        weight: γ [D], or None.
        eps: ε, added to the mean square.
        layer_scale: [D], LayerScale of the branch.
        sample_scale: [B], drop-path factor of each image, 0 or 1 / (1 − p); it gets no gradient.

    Returns:
        (s, RMSNorm(s)), both [B, ..., D].

    Raises:
        ValueError: a size or device does not fit, or eps is negative or not finite.
        TypeError: an argument is of another type or dtype.
    """
    expect_rows("x", x, "D")
    expect_addable("residual", residual, x, x.shape)
    expect_scales(x, layer_scale, sample_scale, D=x.shape[-1])
    expect_norm(x, layer_norm.output_dtype(x, layer_scale, residual), (weight, None, eps), D=x.shape[-1])
    if kernels_available(x) and kernels_available(residual) and x.shape[-1] <= layer_norm.MAX_D:
        return layer_norm._Fn.apply(x, residual, weight, None, eps, layer_scale, sample_scale, True)
    return reference_add(x, residual, weight, eps, layer_scale, sample_scale)


def reference(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Equation (1)."""
    if weight is None or weight.dtype == x.dtype or is_autocast_on(x):
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)  # a float32 weight for a 16-bit x


def reference_either(x: Tensor, norm: NormLike) -> Tensor:
    """LayerNorm or RMSNorm of x [..., D] in PyTorch."""
    return reference(x, norm[0], norm[2]) if kind_of(norm) == "rms_norm" else layer_norm.reference(x, *norm[:3])


def reference_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    layer_scale: Tensor | None = None,
    sample_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Equation (2)."""
    s = residual + layer_norm.scaled(x, layer_scale, sample_scale)
    return s, reference(s, weight, eps)


def _inputs(case: dict[str, int], dtype: torch.dtype, device: torch.device | str) -> dict:
    arguments = layer_norm._inputs(case, dtype, device)
    del arguments["bias"]
    return arguments


def _inputs_add(case: dict[str, int], dtype: torch.dtype, device: torch.device | str) -> dict:
    arguments = layer_norm._inputs_add(case, dtype, device)
    del arguments["bias"]
    return arguments


OP = Op(
    name="rms_norm",
    run=rms_norm,
    reference=reference,
    cases={"ragged": dict(B=2, N=3, D=5), "shifted": dict(B=2, N=3, D=9, shift=30)},
    inputs=_inputs,
    ragged=layer_norm.OP.ragged,
)
OP_ADD = Op(
    name="add_rms_norm",
    run=add_rms_norm,
    reference=reference_add,
    cases=layer_norm.OP_ADD.cases,
    inputs=_inputs_add,
    ragged=layer_norm.OP_ADD.ragged,
)
