"""The onednn way of `linear` and `mlp` on a CPU: oneDNN's products, and PyTorch for what their post-operations lack.

Math      equations (1) to (3) of `linear`, (1) and (2) of `mlp`.
Kernels   one product with its activation, or with the residual or the gate, see `onednn`; PyTorch's norm before it;
          with a LayerScale one more pass, unless it is multiplied into packed weights.
Backward  that of `onednn.product`, and PyTorch's of the rest; it can be differentiated again.
Saved     as eager PyTorch.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from . import launch, layer_norm, onednn, rms_norm
from .activation import GATED
from .argument import NormLike, Pair
from .fold import Folded
from .op import cast


def takes(x: Tensor, weight: Tensor | Pair | Folded) -> bool:
    """True if the public functions run a product of x [..., K] with this weight by oneDNN."""
    if isinstance(weight, Folded) or not onednn.usable(x):
        return False
    weights = (weight,) if isinstance(weight, Tensor) else weight
    if any(type(t) not in onednn.PLAIN for t in weights):
        return False
    outputs = sum(map(len, weights))
    phase = "training" if torch.is_grad_enabled() else "inference"
    return 0 < x.numel() and (onednn.forced() or onednn.pays(launch.product_dtype(x), x.numel() * outputs, phase))


def linear(
    x: Tensor,
    weight: Tensor | Pair | Folded | onednn.PackedWeight,
    bias: Tensor | Pair | None = None,
    norm: NormLike | None = None,
    activation: str | None = None,
    layer_scale: Tensor | None = None,
    sample_scale: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    reduced: bool = False,
) -> Tensor:
    """`kernels.linear.linear` without argument checks and statistics, or with a packed weight.

    Args:
        x: [..., K].
        weight: as in `kernels.linear`, not folded; or packed.
        bias: as in `kernels.linear`; that of a packed weight is its own.
        norm, activation, layer_scale, sample_scale, residual: as in `kernels.linear`.
        reduced: the result may have the dtype of a weight packed in bfloat16, instead of x's.
    """
    if norm is not None:
        x = rms_norm.reference_either(x, norm)
    (operand,) = cast(x)
    with torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else contextlib.nullcontext():
        y = _linear(operand, weight, bias, activation, layer_scale, sample_scale, residual)
    return y.to(x.dtype) if isinstance(weight, onednn.PackedWeight) and residual is None and not reduced else y


def _linear(
    x: Tensor,
    weight: Any,
    bias: Any,
    activation: str | None,
    layer_scale: Tensor | None,
    sample_scale: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    """`linear` after the norm, with x in the dtype of the product."""
    if isinstance(weight, onednn.PackedWeight):
        layer_scale = None if weight.scaled else layer_scale
    if activation in GATED and not isinstance(weight, onednn.PackedWeight):
        (gate, up), (gate_bias, up_bias) = _halves(weight, bias)
        h = onednn.product(x, *_in_dtype(x, gate, gate_bias), GATED[activation])
        y = onednn.product(x, *_in_dtype(x, up, up_bias), gate=h)
    else:
        weight, bias = _in_dtype(x, weight, bias)
        bare = layer_scale is None and sample_scale is None and activation is None
        if bare and residual is not None and residual.dtype == x.dtype:
            return onednn.product(x, weight, bias, residual=residual)
        y = onednn.product(x, weight, bias, activation)
    if residual is not None and sample_scale is None and layer_scale is not None and not torch.is_grad_enabled():
        return torch.addcmul(residual, y, layer_scale)
    y = layer_norm.scaled(y, layer_scale, sample_scale)
    return y if residual is None else y + residual


def _in_dtype(x: Tensor, weight: Any, bias: Any) -> tuple[Tensor | onednn.PackedWeight, Tensor | None]:
    """Weight and bias in x's dtype, as autocast casts them."""
    if isinstance(weight, onednn.PackedWeight) or weight.dtype == x.dtype:
        return weight, bias
    return weight.to(x.dtype), None if bias is None else bias.to(x.dtype)


def _halves(weight: Any, bias: Any) -> tuple[Any, Any]:
    """((gate, up), their biases) of a pair, or of one weight [2F, K] with the gate first."""
    if isinstance(weight, Tensor):
        return weight.chunk(2), (None, None) if bias is None else bias.chunk(2)
    return weight, (None, None) if bias is None else bias


def mlp(
    x: Tensor,
    fc1: tuple[Tensor | Pair | Folded | onednn.PackedWeight, Any],
    fc2: tuple[Tensor | onednn.PackedWeight, Any],
    norm: NormLike | None = None,
    activation: str = "gelu",
    layer_scale: Tensor | None = None,
    sample_scale: Tensor | None = None,
    residual: Tensor | None = None,
    recompute: bool = False,
) -> Tensor:
    """`kernels.mlp.mlp` without argument checks and statistics, or with packed weights; for the arguments see there."""

    def hidden_to_out(x: Tensor) -> Tensor:
        h = linear(x, *fc1, norm, activation, reduced=True)
        y = linear(h, *fc2, None, None, layer_scale, sample_scale, residual, reduced=True)
        return y.to(x.dtype) if isinstance(fc2[0], onednn.PackedWeight) and residual is None else y

    return checkpoint(hidden_to_out, x, use_reentrant=False) if recompute else hidden_to_out(x)
