"""Folds BatchNorms into the linear layers and convolutions before them, in inference after `freeze`.

A frozen BatchNorm, whose parameters and statistics are buffers, is the same map in training.

To fold one in each call would take more launches than it saves. PyTorch does not count the writes of a training forward
to the running statistics, but counts those to `num_batches_tracked`, which is therefore one of the fold's sources.
"""

from typing import NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.batch_norm import batch_norm_act
from .body import activate
from .freeze import derived, keeps
from .hooks import are_plain_tensors, can_fuse, has_hooks, has_type, type_name
from .leaves import CONVOLUTIONS, Foreign, Layer, Packed, activation_of, is_plain_module, is_readable

BATCH_NORMS = tuple(f"torch.nn.modules.batchnorm.BatchNorm{axes}d" for axes in (1, 2))
FROZEN_BATCH_NORMS: dict[str, float | None] = {  # type → ε, or None for its attribute; `convert` adds those of others
    "fastvit_triton.layers.frozen_resnet.FrozenBatchNorm2d": None,
}
NORMED = {  # modules of a linear layer and the BatchNorm after it → their names; `convert` adds those of others
    "fastvit_triton.layers.normed.LinearNorm": ("linear", "bn"),
}


class Shifted(NamedTuple):
    """A map [B, C, H, W] without the shift [C] of its channels, and what that was computed from."""

    map: Tensor
    shift: Tensor
    sources: tuple[Tensor, ...]

    def added_to(self, owner: nn.Module, bias: Tensor) -> Tensor:
        """The shift plus a bias [C], kept for the owner if it is frozen."""
        return derived(owner, "bias and shift of the shortcut", (bias, *self.sources), lambda: bias + self.shift)


def convolve_shifted(x: Tensor, owner: nn.Module, conv: Foreign, norm: Foreign) -> Tensor | Shifted:
    """As `convolve`; a folded convolution leaves its bias to what is launched next."""
    if not can_fuse(x) or not _is_plain(conv) or (fold := folded(owner, conv, norm)) is None or fold.bias is None:
        return convolve(x, owner, conv, norm)
    y = F.conv2d(x, fold.weight, None, conv.stride, conv.padding, conv.dilation, conv.groups)
    return Shifted(y, fold.bias, fold.sources or ())


def _is_plain(conv: nn.Module) -> bool:
    return is_plain_module(conv, CONVOLUTIONS) and conv.padding_mode == "zeros"


def convolve(x: Tensor, owner: nn.Module, conv: Foreign, norm: Foreign) -> Tensor:
    """A convolution of x [B, C, H, W] and the BatchNorm after it, as one convolution where `folded` allows it."""
    if _is_plain(conv) and can_fuse(x) and (fold := folded(owner, conv, norm)) is not None:
        return F.conv2d(x, fold.weight, fold.bias, conv.stride, conv.padding, conv.dilation, conv.groups)
    return norm(conv(x))


def convolve_act(
    x: Tensor,
    owner: nn.Module,
    conv: Foreign,
    norm: Foreign,
    act: str | nn.Module,
    residual: Tensor | Shifted | None = None,
) -> Tensor:
    """act(norm(conv(x)) + residual), of which all after the convolution is one launch where the norm may be read.

    Args:
        x: [B, C, H, W].
        owner: the module that contains the layers.
        conv: a convolution, which is called.
        norm: a BatchNorm that uses its stored statistics, frozen or not; others are called.
        act: name of an activation, or its module.
        residual: of the shape of the convolution's output, perhaps without a shift of its channels.
    """
    late = residual if isinstance(residual, Shifted) else None
    added = residual.map if isinstance(residual, Shifted) else residual
    act = act if isinstance(act, str) else activation_of(act)
    if isinstance(act, str) and can_fuse(x) and (is_frozen_norm(norm) or is_constant(norm)):
        y = conv(x)
        if _fits(y, norm, added):
            bias = norm.bias if late is None else late.added_to(owner, norm.bias)
            vectors = norm.running_mean, norm.running_var, norm.weight, bias
            return batch_norm_act(y, *vectors, eps_of(norm), activation=act, residual=added)
        y = norm(y)
    else:
        y = convolve(x, owner, conv, norm)
    if added is not None:
        y += added if late is None else added + late.shift[:, None, None]
    return activate(y, act)


def _fits(y: Tensor, norm: Foreign, residual: Tensor | None) -> bool:
    """True if a norm of y, which may be read, and the residual have its dtype, which a norm of another one converts."""
    vectors = norm.running_mean, norm.running_var, norm.weight, norm.bias
    plain = are_plain_tensors(*vectors) and y.dim() == 4 and all(t.dtype == y.dtype for t in vectors)
    return plain and (residual is None or (residual.dtype, residual.shape) == (y.dtype, y.shape))


def normalize_frozen(x: Tensor, norm: Foreign) -> Tensor:
    """A frozen BatchNorm of x [B, C, H, W] in one operator; statistics and result have the dtype of the original's."""
    x = x.to(torch.promote_types(x.dtype, norm.weight.dtype))
    return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, eps_of(norm))


def folded(owner: nn.Module, layer: Foreign, norm: Foreign) -> Packed | None:
    """A layer and the BatchNorm after it as one map, whose weight has the layer's shape; None if they are to be called.

    Args:
        owner: the module that contains both; the folded tensors are kept for it.
        layer: a linear layer or a convolution, whose weight may be read.
        norm: BatchNorm1d or BatchNorm2d.
    """
    if (sources := sources_of(owner, layer, norm)) is None:
        return None
    shape = (-1, *[1] * (layer.weight.dim() - 1))
    weight = derived(owner, f"weight {eps_of(norm)}", sources, lambda: layer.weight * factor(norm).view(shape))
    bias = derived(owner, f"bias {eps_of(norm)}", sources, lambda: shift(layer, norm))
    return Packed(weight, bias, tuple(t for t in sources if t is not None))


def convolve_merged(
    x: Tensor, owner: nn.Module, large: tuple[Foreign, Foreign], small: tuple[Foreign, Foreign], act: nn.Module
) -> Tensor | None:
    """act(sum of a 3×3 and a 1×1 convolution, each with its BatchNorm) as one convolution; None if they are called.

    Args:
        x: [B, C, H, W], which both read.
        owner: the module that contains the layers; the merged tensors are kept for it.
        large: the 3×3 convolution and its BatchNorm.
        small: the 1×1 convolution and its BatchNorm.
        act: the activation.
    """
    name = activation_of(act)
    if not isinstance(name, str) or not can_fuse(x):
        return None
    for (conv, _), side in ((large, 3), (small, 1)):
        plain = is_plain_module(conv, CONVOLUTIONS) and conv.padding_mode == "zeros"
        sizes = conv.kernel_size, conv.padding, conv.stride, conv.dilation, conv.groups
        if not plain or sizes != ((side, side), (side // 2, side // 2), (1, 1), (1, 1), 1):
            return None
    first, second = (sources_of(owner, *layer) for layer in (large, small))
    if first is None or second is None:
        return None

    def weight() -> Tensor:
        wide, point = (conv.weight * factor(norm).view(-1, 1, 1, 1) for conv, norm in (large, small))
        return wide + F.pad(point, (1, 1, 1, 1))

    sources, key = (*first, *second), f"merged {eps_of(large[1])} {eps_of(small[1])}"
    kernel = derived(owner, f"{key} weight", sources, weight)
    mean = derived(owner, f"{key} mean", sources, lambda: -shift(*large) - shift(*small))
    variance = derived(owner, f"{key} variance", sources, lambda: torch.zeros_like(large[1].running_var))
    return batch_norm_act(F.conv2d(x, kernel, padding=1), mean, variance, None, None, 1.0, activation=name)


def folded_linear(owner: Foreign, layer: Foreign, norm: Foreign) -> Packed | None:
    """As `folded`, for a linear layer or a 1×1 convolution with any stride: one linear map."""
    if not (is_readable(layer) or is_pointwise(layer)) or (fold := folded(owner, layer, norm)) is None:
        return None
    return fold._replace(weight=fold.weight.flatten(1))


def folded_taps(owner: nn.Module, conv: Foreign, norm: Foreign) -> tuple[Tensor, Tensor] | None:
    """As `folded`, for a depthwise convolution: weight [C, 1, K, K] and bias [C].

    The weight has the memory layout that `depthwise` reads without a copy.
    """
    if (sources := sources_of(owner, conv, norm)) is None:
        return None
    taps = derived(owner, f"taps {norm.eps}", sources, lambda: (conv.weight.flatten(1) * factor(norm)[:, None]).t())
    bias = derived(owner, f"bias {norm.eps}", sources, lambda: shift(conv, norm))
    return taps.t().unflatten(1, conv.kernel_size).unsqueeze(1), bias


def normed(module: Foreign) -> Layer:
    """A module of a linear layer and a BatchNorm (NORMED) as one linear map; the module itself if it must be called."""
    names = NORMED.get(type_name(module))
    if names is None or has_hooks(module):
        return module
    return folded_linear(module, *(getattr(module, name) for name in names)) or module


def sources_of(owner: nn.Module, layer: Layer, norm: nn.Module) -> tuple[Tensor | None, ...] | None:
    """The tensors that a fold kept for the owner depends on; None if there is none, or the norm must be called."""
    frozen = is_frozen_norm(norm)
    if not frozen and (not is_constant(norm) or norm.num_batches_tracked is None):
        return None  # without that counter, a training forward is not noticed
    # a frozen norm promotes the layer's dtype to its own, under autocast too
    if frozen and (norm.weight.dtype != layer.weight.dtype or torch.is_autocast_enabled(layer.weight.device.type)):
        return None
    tensors = layer.weight, layer.bias, *norm._parameters.values(), *norm._buffers.values()
    return tensors if are_plain_tensors(*tensors) and keeps(owner, *tensors) else None


def is_constant(norm: nn.Module) -> TypeGuard[Foreign]:
    """True for a BatchNorm that multiplies by and adds constants, with its running statistics, and may be read."""
    if not has_type(norm, BATCH_NORMS) or has_hooks(norm) or norm.training:
        return False
    return norm.affine and norm.track_running_stats


def is_frozen_norm(norm: nn.Module) -> TypeGuard[Foreign]:
    """True for a frozen BatchNorm that may be read."""
    return has_type(norm, FROZEN_BATCH_NORMS) and not has_hooks(norm)


def eps_of(norm: Foreign) -> float:
    """ε of a BatchNorm, frozen or not."""
    eps = FROZEN_BATCH_NORMS.get(type_name(norm))
    return norm.eps if eps is None else eps


def factor(norm: Foreign) -> Tensor:
    """What the BatchNorm multiplies each channel by, [C]."""
    return norm.weight * (norm.running_var + eps_of(norm)).rsqrt()


def shift(layer: Foreign, norm: Foreign) -> Tensor:
    """What the BatchNorm adds to each channel of the layer's output without its bias, [C]."""
    mean = norm.running_mean if layer.bias is None else norm.running_mean - layer.bias
    return norm.bias - mean * factor(norm)


def is_pointwise(conv: Foreign) -> bool:
    """True for a 1×1 convolution with any stride that may be read."""
    return (
        is_plain_module(conv, CONVOLUTIONS)
        and conv.kernel_size == (1, 1)
        and conv.padding in ((0, 0), "valid", "same")
        and conv.groups == 1
    )
