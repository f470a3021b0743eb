"""The mixed way of `linear` and `mlp`: a cuBLAS matmul, and one pass for the operations around it.

Math      equations (1) to (3) of `linear`; LN(y) for the next matmul, by equation (2) of `layer_norm`.
Kernels   cuBLAS; PyTorch's activation; one Triton pass for LayerScale, stochastic depth, residual and the next
          LayerNorm, which writes in the dtype of the next matmul, so that autocast casts nothing.
Backward  that of `linear`.
Saved     as in `linear`: x, the pre-activation if there is an activation, and row statistics in fp32.
Cost      values per token moved outside the matmuls of a ViT block of width C: 16 C in inference; eager PyTorch 18 C.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .activation import apply_activation
from .argument import NextNorm, Norm, Normalized
from .layer_norm import add_and_normalize, output_dtype, scaled


class Call(NamedTuple):
    """Arguments of a mixed call that a fused one does not have.

    Attributes:
        normed: LN(x) from the call that produced x, or None.
        next_norm: the norm of the next call, to apply to the output; or None.
        dtype: of the matmul.
    """

    normed: Normalized | None
    next_norm: NextNorm | None
    dtype: torch.dtype


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    activation: str | None,
    layer_scale: Tensor | None,
    sample_scale: Tensor | None,
    residual: Tensor | None,
    call: Call,
    save: bool,
) -> tuple[Tensor | None, ...]:
    """Equations (1) to (3), without gradients.

    Args:
        x: [..., K].
        weight: [F, K], or [2F, K] for a gated activation.
        bias: [F] or [2F], or None.
        norm: the LayerNorm or RMSNorm of x, or None.
        activation: as in `linear`.
        layer_scale: [F], or None.
        sample_scale: [B], or None.
        residual: [..., F], or None.
        call: see `Call`.
        save: a backward pass follows.

    Returns:
        (y [..., F], pre-activation, mean and rstd of x for the backward pass, then the fields of `Normalized` for y, or
        four None without a next norm).
    """
    normed: Any = call.normed
    dtype = call.dtype
    if norm is None and normed is not None and normed.late_bias is not None:
        return _added_in_place(x, weight, residual)
    if norm is not None and (normed is None or normed.y.dtype != dtype):
        _, normed = add_and_normalize(x, None, None, None, norm, dtype, save)
    with torch.autocast(x.device.type, enabled=False):
        operand = x.to(dtype) if norm is None else normed.y
        h = pre = F.linear(operand, weight.to(dtype), None if bias is None else bias.to(dtype))
        h = h if activation is None else apply_activation(h, activation)
    next_normed = None
    pre = pre.flatten(0, -2) if save and activation is not None else h.new_empty(0)
    next_norm = call.next_norm
    if next_norm is not None and not torch.is_autocast_enabled(x.device.type):
        next_norm = next_norm if output_dtype(h, layer_scale, residual) == dtype else None  # the matmul's dtype
    if residual is not None and not (next_norm is layer_scale is sample_scale is None):
        norm_and_bias = (None, None) if next_norm is None else next_norm
        ends = layer_scale, sample_scale, norm_and_bias[0], dtype, save, norm_and_bias[1]
        h, next_normed = add_and_normalize(h, residual, *ends)
    else:
        h = scaled(h, layer_scale, sample_scale)
        h = h if residual is None else h + residual
    mean, rstd = (None, None) if norm is None else normed[1:3]
    none = h.new_empty(0, dtype=torch.float32)
    return h, pre, none if mean is None else mean, none if rstd is None else rstd, *(next_normed or (None,) * 4)


def _added_in_place(x: Tensor, weight: Tensor, residual: Any) -> tuple[Tensor | None, ...]:
    """`forward` of a branch's last matmul if its bias is already in the residual: one launch, no gradients."""
    residual.view(-1, residual.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), weight.t())
    none = x.new_empty(0)
    return residual, none, none, none, *(None,) * 4
