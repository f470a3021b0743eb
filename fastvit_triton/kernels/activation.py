"""Activation functions: PyTorch versions by name, and device functions with derivatives.

A gated activation is act(gate) · up for the two halves of a matmul's output; the device functions compute act alone.

Sources   GELU: Hendrycks & Gimpel, arXiv:1606.08415, section 2 (erf and tanh forms, and x·sigmoid(1.702 x));
          SwiGLU and GEGLU: Shazeer, arXiv:2002.05202, eq. 5 and 6; hard swish x·relu6(x + 3) / 6: Howard et al.,
          MobileNetV3, arXiv:1905.02244, section 5.2.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .tile import jit, tl


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
    "hardswish": F.hardswish,
    "relu6": F.relu6,
}
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}  # gated activation → that of its gate
NAMES = (*ACTIVATIONS, *GATED)


def gate_of(activation: str | None) -> str | None:
    """The activation of the gate if the activation is gated; else the activation itself."""
    return activation if activation is None else GATED.get(activation, activation)


def passes_of(activation: str | None) -> int:
    """Passes of PyTorch's operators for an activation: 0, 1, or 2 if it is gated."""
    return 0 if activation is None else 2 if activation in GATED else 1


def apply_activation(h: Tensor, activation: str, up: Tensor | None = None) -> Tensor:
    """The activation of h; act(gate) · up for a gated one, whose gate and up are the halves of h, or h and `up`."""
    if activation not in GATED:
        return ACTIVATIONS[activation](h)
    gate, up = h.chunk(2, -1) if up is None else (h, up)
    return ACTIVATIONS[GATED[activation]](gate) * up


@jit
def _inverse(y, EXACT: tl.constexpr):
    """1 / y of fp32 y ≥ 1; unless EXACT as (y^−½)², three instructions fewer than a division."""
    if EXACT:
        return 1.0 / y
    root = tl.rsqrt(y)
    return root * root


@jit
def _normal_cdf(x, EXACT: tl.constexpr):
    """Φ(x) of fp32 x: by erf if EXACT, else, for results stored in 16 bits, by a logistic function of a polynomial.

    The odd polynomial approximates −log₂e · ln(Φ / (1 − Φ)), with an error of at most 3.4e-6 in x·Φ(x); it takes
    a third of the instructions of erf.
    """
    if EXACT:
        return 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)  # 1/√2
    z = tl.minimum(x * x, 25.0)
    p = -2.3020437e-00 + z * (-0.10522997 + z * (3.6204788e-04 + z * (8.7909797e-05 + z * -3.2103784e-06)))
    return _inverse(1.0 + tl.exp2(x * p), EXACT)


@jit
def _sigmoid(x, EXACT: tl.constexpr):
    """1 / (1 + e⁻ˣ)."""
    return _inverse(1.0 + tl.exp2(-1.4426950408889634 * x), EXACT)  # log₂e


@jit
def activate(x, KIND: tl.constexpr, EXACT: tl.constexpr):
    """The activation KIND of fp32 x; None gives x."""
    if KIND == "gelu":
        return x * _normal_cdf(x, EXACT)
    if KIND == "gelu_tanh":
        return x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x), EXACT)  # 2·√(2/π); tanh u = 2σ(2u) − 1
    if KIND == "quick_gelu":
        return x * _sigmoid(1.702 * x, EXACT)
    if KIND == "relu":
        return tl.where(x < 0, 0.0, x)  # tl.maximum would turn NaN into 0 on a GPU
    if KIND == "silu":
        return x * _sigmoid(x, EXACT)
    if KIND == "hardswish":
        return x * tl.where(x <= -3, 0.0, tl.where(x >= 3, 1.0, x * 0.16666667 + 0.5))
    if KIND == "relu6":
        return tl.where(x < 0, 0.0, tl.where(x > 6, 6.0, x))
    return x


@jit
def activate_grad(x, KIND: tl.constexpr, EXACT: tl.constexpr):
    """Derivative of `activate` at fp32 x."""
    if KIND == "gelu":
        return _normal_cdf(x, EXACT) + x * (0.3989422804014327 * tl.exp2(-0.7213475204444817 * x * x))  # φ: 1/√(2π)
    if KIND == "gelu_tanh":
        s = _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x), EXACT)
        return s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    if KIND == "quick_gelu":
        s = _sigmoid(1.702 * x, EXACT)
        return s + 1.702 * x * s * (1.0 - s)
    if KIND == "relu":
        return tl.where(x <= 0, 0.0, 1.0)
    if KIND == "silu":
        s = _sigmoid(x, EXACT)
        return s + x * s * (1.0 - s)
    if KIND == "hardswish":
        return tl.where(x <= -3, 0.0, tl.where(x < 3, x * 0.33333334 + 0.5, 1.0))
    if KIND == "relu6":
        return tl.where((x <= 0) | (x >= 6), 0.0, 1.0)
    return tl.full(x.shape, 1.0, tl.float32)
