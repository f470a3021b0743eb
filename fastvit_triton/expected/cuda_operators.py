"""Context in which a model on the CPU calls the operators that it would call on a CUDA device.

Differences between the devices: autocast computes norms, softmax and powers in float32 on CUDA
(aten/src/ATen/autocast_mode.h, AT_FORALL_FP32); scaled_dot_product_attention is one kernel for a mask, too, and is
written out for tensors that have not four axes, or whose last axis is strided; RMSNorm is one kernel.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

# functions whose floating-point arguments CUDA's autocast converts to float32
FLOAT32 = frozenset(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__ softplus "
    "layer_norm native_layer_norm group_norm cosine_similarity cdist dist renorm logsumexp softmax log_softmax softmin "
    "prod cumprod cumsum sum norm vector_norm normalize".split()
)


class _AsOnCuda(TorchFunctionMode):
    def __init__(self, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.autocast = autocast

    def __torch_function__(self, function: Callable, types: object, arguments: tuple = (), named: dict | None = None):
        named = named or {}
        name = getattr(function, "__name__", "")
        casts = self.autocast is not None and torch.is_autocast_enabled("cpu")
        if function is F.scaled_dot_product_attention:
            return _attention(self.autocast if casts else None, *arguments, **named)
        if name == "rms_norm":
            return _rms_norm(*arguments, **named)
        if casts and name in FLOAT32:
            arguments, named = tree_map_only(Tensor, _single, (arguments, named))
        return function(*arguments, **named)


@contextmanager
def as_on_cuda(autocast: torch.dtype | None = None) -> Iterator[None]:
    """Context in which calls on CPU tensors reach the operators of a CUDA device."""
    with torch.autocast("cpu", autocast, enabled=autocast is not None), _AsOnCuda(autocast):
        yield


def _single(t: Tensor) -> Tensor:
    return t.float() if t.is_floating_point() else t


def _rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """A stand-in for PyTorch's kernel: LayerNorm, which moves the same bytes."""
    return F.layer_norm(x, tuple(shape), weight, None, eps or 1e-6)


def _attention(
    autocast: torch.dtype | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The operator that PyTorch chooses on CUDA: FlashAttention, the memory-efficient kernel, or written out."""
    if autocast is not None:
        query, key, value = (t.to(autocast) for t in (query, key, value))
        attn_mask = attn_mask.to(autocast) if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -math.inf)
    # sdp_utils_cpp.h, check_last_dim_stride_equals_1
    if query.dim() != 4 or any(t.stride(-1) != 1 for t in (query, key, value) if t.shape[-1] > 1):
        return _written_out(query, key, value, attn_mask, scale)
    operators = torch.ops.aten
    if attn_mask is None and query.dtype != torch.float32 and query.shape[-1] == value.shape[-1] <= 256:
        return operators._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    return operators._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, False, dropout_p, is_causal, scale=scale
    )[0]


def _written_out(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """PyTorch's own composition, which computes 16-bit inputs in float32."""
    root = math.sqrt(scale or query.shape[-1] ** -0.5)
    with torch.autocast("cpu", enabled=False):
        scores = (query.float() * root) @ (key.float() * root).transpose(-2, -1)
        scores = scores if mask is None else scores + mask
        return (scores.softmax(-1) @ value.float()).to(value.dtype)
