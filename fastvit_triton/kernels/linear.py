"""A linear layer with what stands before and after it in a Transformer: LayerNorm, activation, scales, residual.

Math      x̂ = LN(x) when `norm` is given, else x                                 [M, K]      (1)
          h = act(x̂ Wᵀ + b)                                                     [M, F]      (2)
          h = silu(x̂ W_gᵀ + b_g) ∘ (x̂ W_uᵀ + b_u)    for activation "swiglu"                (2')
          y = sample_scale · gamma · h + residual                                [M, F]      (3)
          stats = (Σ y, Σ (y − mean y)²)                                         [M, 1, 2]   (4)
Cost      2·M·K·F flops; bytes = x + W + y (+ residual).
Sources   GELU: Hendrycks & Gimpel, arXiv:1606.08415, section 2 (erf and tanh forms, and x·sigmoid(1.702 x));
          SwiGLU: Shazeer, arXiv:2002.05202, eq. 6.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from . import layer_norm
from .op import Op, expect, make

Norm = tuple[Tensor | None, Tensor | None, float]  # weight [K], bias [K], eps
Pair = tuple[Tensor, Tensor]  # gate and up, [F, K] each, or their biases [F]


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
}


def linear(
    x: Tensor,
    weight: Tensor | Pair,
    bias: Tensor | Pair | None = None,
    *,
    norm: Norm | None = None,
    stats: Tensor | None = None,
    activation: str | None = None,
    gamma: Tensor | None = None,
    sample_scale: Tensor | None = None,
    residual: Tensor | None = None,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """sample_scale · gamma · act(LN(x) Wᵀ + b) + residual.

    Args:
        x: [..., K].
        weight: [F, K]; for "swiglu" [2F, K] with the gate first, or the pair (gate, up).
        bias: [F], or as weight; None for no bias.
        norm: (weight [K], bias [K], eps) of a LayerNorm on x.
        stats: [M, tiles, 2] fp32, row statistics of x left by the producer of x, so that LN needs no pass of its own.
        activation: "gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "swiglu" or None.
        gamma: [F], LayerScale.
        sample_scale: [B] with x [B, ..., K], drop-path factor of each image.
        residual: [..., F], added last; the output has the promoted dtype.
        return_stats: also return equation (4) for the output, which carries no gradient.

    Returns:
        [..., F]; with `return_stats` also [M, tiles, 2] fp32.

    Raises:
        ValueError: a size does not fit, or the activation is unknown.
    """
    check(x, weight, bias, activation)
    if gamma is not None:
        expect("gamma", gamma, F=outputs(weight, activation))
    if sample_scale is not None:
        expect("sample_scale", sample_scale, B=x.shape[0])
    if residual is not None and residual.shape != (expected := (*x.shape[:-1], outputs(weight, activation))):
        raise ValueError(f"residual must have shape {list(expected)}, got {list(residual.shape)}")
    return reference(
        x,
        weight,
        bias,
        norm=norm,
        stats=stats,
        activation=activation,
        gamma=gamma,
        sample_scale=sample_scale,
        residual=residual,
        return_stats=return_stats,
    )


def reference(
    x: Tensor,
    weight: Tensor | Pair,
    bias: Tensor | Pair | None = None,
    *,
    norm: Norm | None = None,
    stats: Tensor | None = None,
    activation: str | None = None,
    gamma: Tensor | None = None,
    sample_scale: Tensor | None = None,
    residual: Tensor | None = None,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Equations (1) to (4); `stats` says nothing that x does not, so it is not read here."""
    if norm is not None:
        x = layer_norm.reference(x, *norm)  # (1)
    if activation == "swiglu":
        gate, up = _gate_and_up(x, weight, bias)
        y = F.silu(gate) * up  # (2')
    else:
        y = F.linear(x, weight, bias)
        y = y if activation is None else ACTIVATIONS[activation](y)  # (2)
    y = layer_norm.scaled(y, gamma, sample_scale)
    y = y if residual is None else y + residual  # (3)
    return (y, row_stats(y)) if return_stats else y


@torch.no_grad()
def row_stats(y: Tensor) -> Tensor:
    """Equation (4): y [..., F] to [M, 1, 2] fp32, sum and centred sum of squares of each row."""
    rows = y.flatten(0, -2).float()
    total = rows.sum(-1)
    centred = (rows - rows.mean(-1, keepdim=True)).square().sum(-1)
    return torch.stack((total, centred), -1)[:, None]


def _gate_and_up(x: Tensor, weight: Tensor | Pair, bias: Tensor | Pair | None) -> Pair:
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias).chunk(2, -1)
    bias = (None, None) if bias is None else bias
    return F.linear(x, weight[0], bias[0]), F.linear(x, weight[1], bias[1])


def outputs(weight: Tensor | Pair, activation: str | None) -> int:
    """F, the channels that come out."""
    if not isinstance(weight, Tensor):
        return weight[0].shape[0]
    return weight.shape[0] // 2 if activation == "swiglu" else weight.shape[0]


def check(x: Tensor, weight: Tensor | Pair, bias: Tensor | Pair | None, activation: str | None) -> None:
    """Raises ValueError when weight, bias and x do not fit, or the activation is unknown."""
    if activation is not None and activation != "swiglu" and activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; use one of {', '.join((*ACTIVATIONS, 'swiglu'))} or None")
    if not isinstance(weight, Tensor) and activation != "swiglu":
        raise ValueError("weight is a pair; only activation='swiglu' takes a (gate, up) pair")
    weights = (weight,) if isinstance(weight, Tensor) else weight
    biases = (bias,) if isinstance(weight, Tensor) else (None, None) if bias is None else bias
    for w, b in zip(weights, biases, strict=True):
        expect("weight", w, F=weights[0].shape[0], K=x.shape[-1])
        if b is not None:
            expect("bias", b, F=w.shape[0])


def _inputs(case: dict[str, int], dtype: torch.dtype, device: torch.device | str) -> dict:
    randn, (B, N, K, F_) = make(device, dtype), (case[a] for a in ("B", "N", "K", "F"))
    arguments = {"x": randn(B, N, K), "weight": randn(F_, K, scale=K**-0.5), "bias": randn(F_)}
    if "swiglu" in case:
        arguments["weight"] = (arguments["weight"], randn(F_, K, scale=K**-0.5))
        arguments["bias"] = (arguments["bias"], randn(F_))
        arguments["activation"] = "swiglu"
    if "norm" in case:
        arguments |= {"norm": (randn(K), randn(K), 1e-6), "activation": "gelu"}
    if "branch" in case:
        keep = torch.tensor([b % 2 / 0.5 for b in range(B)], dtype=dtype, device=device)
        arguments |= {"gamma": randn(F_), "sample_scale": keep, "residual": randn(B, N, F_)}
    return arguments


OP = Op(
    name="linear",
    run=linear,
    reference=reference,
    cases={
        "norm_gelu": dict(B=2, N=3, K=5, F=7, norm=1),
        "branch": dict(B=2, N=3, K=5, F=4, branch=1),
        "swiglu": dict(B=2, N=3, K=5, F=4, swiglu=1),
    },
    inputs=_inputs,
)
