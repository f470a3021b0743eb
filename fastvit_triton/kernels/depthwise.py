"""Depthwise convolution of tokens on a grid, with bias, activation and residual; channels are the last axis.

Math      pre[i, j] = Σ_uv w[u, v] ∘ x[s·i + u − P, s·j + v − P] + b         x is 0 outside the grid      (1)
          y = act(pre) (+ x)                     for kernel side K, P = (K − 1) / 2, stride s             (2)
Backward  g = dy ∘ act'(pre)                                                                              (3)
          dx[i, j] = Σ_uv w[u, v] ∘ g[(i + P − u) / s, (j + P − v) / s] (+ dy)    where s divides both    (4)
          dw[u, v] = Σ_ij g[i, j] ∘ x[s·i + u − P, s·j + v − P]    db = Σ_ij g                            (5)
Cost      2·K²·M·C flops; bytes = x + y.
Saved     x.
Sources   Howard et al., MobileNets, arXiv:1704.04861, section 3.1. As a positional encoding: Chu et al., CPVT,
          arXiv:2102.10882, section 4; in an MLP: Wang et al., PVT v2, arXiv:2106.13797, section 3.3.
"""

import torch.nn.functional as F
from torch import Tensor

from . import check
from .activation import ACTIVATIONS
from .argument import expect_bool, expect_floating, expect_int, expect_nonempty
from .op import expect


def depthwise(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int = 1,
    activation: str | None = None,
    residual: bool = False,
) -> Tensor:
    """Depthwise convolution with zero padding K // 2: act(conv(x) + bias) + x.

    Args:
        x: [B, H, W, C]. Tokens [B, N, C] are viewed as such by `x.unflatten(1, (H, W))`, also without their prefix
            tokens; only the last axis must be contiguous to avoid a copy.
        weight: [C, 1, K, K] for an odd K, as in a convolution with C groups.
        bias: [C], or None.
        stride: 1 or 2.
        activation: "gelu" (erf), "gelu_tanh", "quick_gelu", "relu" or "silu"; or None.
        residual: add x at the end; with a stride of 1 only.

    Returns:
        [B, ⌈H / stride⌉, ⌈W / stride⌉, C], contiguous.

    Raises:
        ValueError: a size or device does not fit, the activation is unknown, or a residual has a stride of 2.
        TypeError: an argument is of another type or dtype.
    """
    expect("x", x, B=None, H=None, W=None, C=None)
    expect_floating("x", x)
    for axis, size in zip("HWC", x.shape[1:], strict=True):
        expect_nonempty("x", axis, size)
    expect("weight", weight, x, C=x.shape[-1], **{"1": 1}, K=None, **{"K'": None})
    expect_floating("weight", weight, x)
    if weight.shape[2] != weight.shape[3] or not weight.shape[2] % 2:
        raise ValueError(f"weight must have a square kernel with an odd side, got shape {list(weight.shape)}")
    if bias is not None:
        expect("bias", bias, x, C=x.shape[-1])
        expect_floating("bias", bias, x)
    expect_int("stride", stride, 1, 2)
    check.activation_name(activation)
    if activation == "swiglu":
        raise ValueError(f"activation is 'swiglu', which needs a gate; use one of {', '.join(ACTIVATIONS)} or None")
    expect_bool("residual", residual)
    if residual and stride != 1:
        raise ValueError(f"residual is True with a stride of {stride}; only a stride of 1 keeps the shape of x")
    return reference(x, weight, bias, stride=stride, activation=activation, residual=residual)


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int = 1,
    activation: str | None = None,
    residual: bool = False,
) -> Tensor:
    """Equations (1) and (2)."""
    image, padding = x.permute(0, 3, 1, 2), weight.shape[-1] // 2
    y = F.conv2d(image, weight, bias, stride, padding, groups=x.shape[-1]).permute(0, 2, 3, 1)  # (1)
    y = y if activation is None else ACTIVATIONS[activation](y)
    return (y + x if residual else y).contiguous()  # (2)
