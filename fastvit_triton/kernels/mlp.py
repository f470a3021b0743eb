"""The MLP half of a Transformer block: LayerNorm, two linear layers with an activation between, scales, residual.

Math      h = act(LN(x) W₁ᵀ + b₁)                                   [M, F]      (1)
          y = sample_scale · gamma · (h W₂ᵀ + b₂) + residual        [M, D]      (2)
Cost      4·M·D·F flops; bytes = x + W₁ + W₂ + y (+ residual), and 2·h where the hidden layer is written.
Saved     x and h (10·D values per token with what autograd keeps of the block); with `recompute` only x.
Sources   Vaswani et al., arXiv:1706.03762, eq. 2; Dosovitskiy et al., ViT, arXiv:2010.11929, eq. 3.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from . import linear
from .linear import Norm, Pair
from .op import Op, expect, make

Layer = tuple[Tensor | Pair, Tensor | Pair | None]  # weight and bias


def mlp(
    x: Tensor,
    fc1: Layer,
    fc2: Layer,
    *,
    norm: Norm | None = None,
    stats: Tensor | None = None,
    activation: str = "gelu",
    gamma: Tensor | None = None,
    sample_scale: Tensor | None = None,
    residual: Tensor | None = None,
    recompute: bool = False,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """sample_scale · gamma · fc2(act(fc1(LN(x)))) + residual.

    Args:
        x: [..., D].
        fc1: (weight [F, D], bias [F]); for "swiglu" as in `linear`.
        fc2: (weight [D, F], bias [D]).
        norm: (weight [D], bias [D], eps) of a LayerNorm on x.
        stats: [M, tiles, 2] fp32, row statistics of x; see `linear`.
        activation: as in `linear`.
        gamma: [D], LayerScale.
        sample_scale: [B], drop-path factor of each image.
        residual: [..., D], added last.
        recompute: do not keep the hidden layer for the backward pass, compute it again there.
        return_stats: also return the output's row statistics.

    Returns:
        [..., D]; with `return_stats` also [M, tiles, 2] fp32.

    Raises:
        ValueError: a size does not fit, or the activation is unknown.
    """
    linear.check(x, *fc1, activation)
    expect("fc2 weight", fc2[0], D=None, F=linear.outputs(fc1[0], activation))
    return reference(
        x,
        fc1,
        fc2,
        norm=norm,
        stats=stats,
        activation=activation,
        gamma=gamma,
        sample_scale=sample_scale,
        residual=residual,
        recompute=recompute,
        return_stats=return_stats,
    )


def reference(
    x: Tensor,
    fc1: Layer,
    fc2: Layer,
    *,
    norm: Norm | None = None,
    stats: Tensor | None = None,
    activation: str = "gelu",
    gamma: Tensor | None = None,
    sample_scale: Tensor | None = None,
    residual: Tensor | None = None,
    recompute: bool = False,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Equations (1) and (2)."""

    def hidden_to_out(x: Tensor) -> Tensor:
        h = linear.reference(x, *fc1, norm=norm, activation=activation)  # (1)
        return linear.reference(h, *fc2, gamma=gamma, sample_scale=sample_scale, residual=residual)  # (2)

    y = checkpoint(hidden_to_out, x, use_reentrant=False) if recompute else hidden_to_out(x)
    return (y, linear.row_stats(y)) if return_stats else y


def _inputs(case: dict[str, int], dtype: torch.dtype, device: torch.device | str) -> dict:
    randn, (B, N, D, F) = make(device, dtype), (case[a] for a in ("B", "N", "D", "F"))
    keep = torch.tensor([b % 2 / 0.5 for b in range(B)], dtype=dtype, device=device)
    return {
        "x": randn(B, N, D),
        "fc1": (randn(F, D, scale=D**-0.5), randn(F)),
        "fc2": (randn(D, F, scale=F**-0.5), randn(D)),
        "norm": (randn(D), randn(D), 1e-6),
        "gamma": randn(D),
        "sample_scale": keep,
        "residual": randn(B, N, D),
        "recompute": bool(case.get("recompute")),
    }


OP = Op(
    name="mlp",
    run=mlp,
    reference=reference,
    cases={"ragged": dict(B=2, N=3, D=5, F=9), "recompute": dict(B=2, N=2, D=3, F=4, recompute=1)},
    inputs=_inputs,
)
