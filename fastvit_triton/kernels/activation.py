"""Activation functions: PyTorch versions by name, and device functions with derivatives.

"swiglu" is silu(gate) · up for the two halves of a matmul's output; the functions here compute only silu(gate).

Sources   GELU: Hendrycks & Gimpel, arXiv:1606.08415, section 2 (erf and tanh forms, and x·sigmoid(1.702 x));
          SwiGLU: Shazeer, arXiv:2002.05202, eq. 6.
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
}


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
    return 1.0 / (1.0 + tl.exp2(x * p))


@jit
def _sigmoid(x):
    """1 / (1 + e⁻ˣ)."""
    return 1.0 / (1.0 + tl.exp2(-1.4426950408889634 * x))  # log₂e


@jit
def activate(x, KIND: tl.constexpr, EXACT: tl.constexpr):
    """GELU (erf or tanh form), x·sigmoid(1.702 x), ReLU or SiLU of fp32 x; KIND "swiglu" gives the SiLU of the gate."""
    if KIND == "gelu":
        return x * _normal_cdf(x, EXACT)
    if KIND == "gelu_tanh":
        return x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # 2·√(2/π); tanh u = 2·sigmoid(2u) − 1
    if KIND == "quick_gelu":
        return x * _sigmoid(1.702 * x)
    if KIND == "relu":
        return tl.where(x < 0, 0.0, x)  # tl.maximum would turn NaN into 0 on a GPU
    if KIND == "silu" or KIND == "swiglu":
        return x * _sigmoid(x)
    return x


@jit
def activate_grad(x, KIND: tl.constexpr, EXACT: tl.constexpr):
    """Derivative of `activate` at fp32 x."""
    if KIND == "gelu":
        return _normal_cdf(x, EXACT) + x * (0.3989422804014327 * tl.exp2(-0.7213475204444817 * x * x))  # φ: 1/√(2π)
    if KIND == "gelu_tanh":
        s = _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        return s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    if KIND == "quick_gelu":
        s = _sigmoid(1.702 * x)
        return s + 1.702 * x * s * (1.0 - s)
    if KIND == "relu":
        return tl.where(x <= 0, 0.0, 1.0)
    if KIND == "silu" or KIND == "swiglu":
        s = _sigmoid(x)
        return s + x * s * (1.0 - s)
    return tl.full(x.shape, 1.0, tl.float32)
