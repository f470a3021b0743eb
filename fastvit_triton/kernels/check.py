"""Whether the arguments of a public function fit each other: what `linear` and `mlp` share."""

import math

from torch import Tensor

from .eager import ACTIVATIONS
from .fold import Folded
from .op import expect

Norm = tuple[Tensor | None, Tensor | None, float]  # weight [K], bias [K], eps
Pair = tuple[Tensor, Tensor]  # gate and up, [F, K] each, or their biases [F]


def projection(x: Tensor, weight: Tensor | Pair | Folded, bias: Tensor | Pair | None, activation: str | None) -> None:
    """Raises ValueError when weight, bias and x do not fit, or the activation is unknown."""
    if activation is not None and activation != "swiglu" and activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; use one of {', '.join((*ACTIVATIONS, 'swiglu'))} or None")
    if isinstance(weight, Folded):
        if bias is not None:
            raise ValueError(f"bias has shape {list(bias.shape)}, but a folded weight holds its bias; pass None")
        weight = weight.weight
    if not isinstance(weight, Tensor) and activation != "swiglu":
        raise ValueError("weight is a pair; only activation='swiglu' takes a (gate, up) pair")
    weights = (weight,) if isinstance(weight, Tensor) else weight
    biases = (bias,) if isinstance(weight, Tensor) else (None, None) if bias is None else bias
    for w, b in zip(weights, biases, strict=True):
        expect("weight", w, F=weights[0].shape[0], K=x.shape[-1])
        if b is not None:
            expect("bias", b, F=w.shape[0])


def norm(x: Tensor, given: Norm | None, stats: Tensor | None, weight: Tensor | Pair | Folded) -> None:
    """Raises ValueError when the LayerNorm's parameters, the row statistics or a folded weight do not fit x."""
    for name, parameter in zip(("norm weight", "norm bias"), given[:2] if given else (), strict=False):
        if parameter is not None:
            expect(name, parameter, K=x.shape[-1])
    if stats is not None:
        expect("stats", stats, M=math.prod(x.shape[:-1]), tiles=None, **{"2": 2})
    if isinstance(weight, Folded):
        if given is None or given[0] is not None or given[1] is not None:
            raise ValueError("a folded weight holds the LayerNorm's weight and bias; pass norm=(None, None, eps)")
        if weight.weight.dtype != x.dtype:
            raise ValueError(f"weight was folded for {weight.weight.dtype}, x is {x.dtype}; fold it for x")


def branch(
    x: Tensor, channels: int, gamma: Tensor | None, sample_scale: Tensor | None, residual: Tensor | None
) -> None:
    """Raises ValueError when what ends a residual branch does not fit an output of that many channels."""
    if gamma is not None:
        expect("gamma", gamma, F=channels)
    if sample_scale is not None:
        expect("sample_scale", sample_scale, B=x.shape[0])
    if residual is not None and residual.shape != (expected := (*x.shape[:-1], channels)):
        raise ValueError(f"residual must have shape {list(expected)}, got {list(residual.shape)}")
