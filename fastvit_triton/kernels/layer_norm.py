"""LayerNorm, alone or with the residual addition before it.

Math      μ = mean(x)    σ² = mean((x − μ)²)    x̂ = (x − μ) / √(σ² + ε)                  (1)
          y = γ·x̂ + β                                                                     (2)
          s = residual + sample_scale·gamma·x,  y = LN(s)        for add_layer_norm       (3)
Cost      8·M·D flops; bytes = x + y.
Sources   Ba et al., Layer normalization, arXiv:1607.06450, eq. 4; LayerScale: Touvron et al., CaiT, arXiv:2103.17239,
          eq. 6; stochastic depth: Huang et al., arXiv:1603.09382.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .op import Op, expect, make


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm over the last axis, equations (1) and (2).

    Args:
        x: [..., D].
        weight: γ [D], or None.
        bias: β [D], or None.
        eps: ε, added to the variance.

    Returns:
        [..., D].

    Raises:
        ValueError: weight or bias is not of size D.
    """
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            expect(name, tensor, D=x.shape[-1])
    return reference(x, weight, bias, eps)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    gamma: Tensor | None = None,
    sample_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Adds a residual branch and normalises the sum, equation (3).

    Args:
        x: [B, ..., D], the branch.
        residual: [B, ..., D], what it is added to.
        weight: γ [D], or None.
        bias: β [D], or None.
        eps: ε, added to the variance.
        gamma: [D], LayerScale of the branch.
        sample_scale: [B], drop-path factor of each image: 0 or 1 / (1 − p).

    Returns:
        (s, LN(s)), both [B, ..., D].

    Raises:
        ValueError: a size does not fit.
    """
    if x.shape != residual.shape:
        raise ValueError(f"residual must have x's shape {list(x.shape)}, got {list(residual.shape)}")
    for name, tensor in (("weight", weight), ("bias", bias), ("gamma", gamma)):
        if tensor is not None:
            expect(name, tensor, D=x.shape[-1])
    if sample_scale is not None:
        expect("sample_scale", sample_scale, B=x.shape[0])
    return reference_add(x, residual, weight, bias, eps, gamma, sample_scale)


def reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Equations (1) and (2)."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def reference_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    gamma: Tensor | None = None,
    sample_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Equation (3)."""
    total = residual + scaled(x, gamma, sample_scale)
    return total, reference(total, weight, bias, eps)


def scaled(x: Tensor, gamma: Tensor | None, sample_scale: Tensor | None) -> Tensor:
    """sample_scale · gamma · x for x [B, ..., D]: the end of every residual branch."""
    if gamma is not None:
        x = x * gamma
    if sample_scale is not None:
        x = x * sample_scale.view(-1, *[1] * (x.dim() - 1))
    return x


def _inputs(case: dict[str, int], dtype: torch.dtype, device: torch.device | str) -> dict:
    randn, D = make(device, dtype), case["D"]
    x = randn(case["B"], case["N"], D, shift=case.get("shift", 0))
    return {"x": x, "weight": randn(D), "bias": randn(D), "eps": 1e-6}


def _inputs_add(case: dict[str, int], dtype: torch.dtype, device: torch.device | str) -> dict:
    randn, B, D = make(device, dtype, seed=1), case["B"], case["D"]
    keep = torch.tensor([b % 2 / 0.5 for b in range(B)], dtype=dtype, device=device)
    return _inputs(case, dtype, device) | {"residual": randn(B, case["N"], D), "gamma": randn(D), "sample_scale": keep}


OP = Op(
    name="layer_norm",
    run=layer_norm,
    reference=reference,
    cases={"ragged": dict(B=2, N=3, D=5), "shifted": dict(B=2, N=3, D=9, shift=30)},
    inputs=_inputs,
)
OP_ADD = Op(
    name="add_layer_norm",
    run=add_layer_norm,
    reference=reference_add,
    cases={"ragged": dict(B=3, N=2, D=5)},
    inputs=_inputs_add,
)
