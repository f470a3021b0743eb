"""Extracts weights and settings from norm, activation, dropout and LayerScale modules.

The tables list the types of torch and this package; `convert` adds those of timm and transformers.
"""

from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.argument import Norm
from ..kernels.fold import Group
from .freeze import Entry
from .hooks import Foreign, are_plain_tensors, has_hooks, has_type, is_plain_module, type_name

CONVOLUTIONS = {"torch.nn.modules.conv.Conv2d"}
VOLUME_CONVOLUTIONS = {"torch.nn.modules.conv.Conv3d"}
LINEARS = {"torch.nn.modules.linear.Linear", "torch.nn.modules.linear.NonDynamicallyQuantizableLinear"}
LAYER_NORMS = {"torch.nn.modules.normalization.LayerNorm"}
RMS_NORMS = {"torch.nn.modules.normalization.RMSNorm": "eps"}  # type → the name of its ε
RMS_FORWARDS: dict[Callable | None, str] = {}  # the same for the forwards that `optimize` binds to other types
SOFTMAXES = {"torch.nn.modules.activation.Softmax"}
DROPOUTS = {"torch.nn.modules.dropout.Dropout"}
DROP_PATH = "fastvit_triton.layers.drop_path.DropPath"
CONSTANT = "fastvit_triton.engine.leaves.ConstantScale"
DROP_PATHS = {DROP_PATH, CONSTANT}
LAYER_SCALES = {"fastvit_triton.layers.layer_scale.LayerScale": "gamma"}  # type → its parameter
ACTIVATIONS = {  # type → its name in `kernels.activation.ACTIVATIONS`
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.Hardswish": "hardswish",
    "torch.nn.modules.activation.ReLU6": "relu6",
}


class ConstantScale(nn.Module):
    """Multiplies every image by one factor; stands in for `DropPath` when only kept images are computed.

    Args:
        factor: for every image.
    """

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def sample_scale(self, x: Tensor) -> Tensor:
        """The factor of each image of x [B, ...]: [B]."""
        return x.new_full((x.shape[0],), self.factor)

    def forward(self, x: Tensor) -> Tensor:
        """[B, ...] → [B, ...]."""
        return x * self.factor


class Packed(NamedTuple):
    """Weight and bias of a linear map that is not a module."""

    weight: Tensor  # [F, K]
    bias: Tensor | None  # [F], or None
    # the tensors that both were computed from in this call; None if both are parameters
    sources: tuple[Tensor, ...] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[..., K] → [..., F]."""
        return F.linear(x, self.weight, self.bias)


class Layer(Protocol):
    """A linear layer of any library, or `Packed`; its weight and bias are read where `is_readable` is true."""

    @property
    def weight(self) -> Tensor:
        """[F, K]."""

    @property
    def bias(self) -> Tensor | None:
        """[F], or None."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """[..., K] → [..., F]."""


def width_of(layers: tuple[Layer | None, ...]) -> tuple[int, int]:
    """(total output features of these linear layers, input features); 0 where a layer has no weight.

    That of a layer with a BatchNorm is the weight of its linear layer.
    """
    outputs, shapes = 0, []
    for layer in layers:
        shapes.append(getattr(getattr(getattr(layer, "linear", layer), "weight", None), "shape", (0, 0)))
        outputs += shapes[-1][0]
    return outputs, shapes[0][1]


def is_readable(layer: object) -> TypeGuard[Layer]:
    """True if this linear layer's weight and bias may be read instead of calling it."""
    if type(layer) is Packed:
        return are_plain_tensors(layer.weight, layer.bias)
    return is_plain_module(layer, LINEARS)


def norm_of(norm: nn.Module) -> Norm | None:
    """The parameters of a LayerNorm or RMSNorm over the last axis; None where the module must be called."""
    if has_type(norm, LAYER_NORMS):
        return None if has_hooks(norm) else last_axis_norm(norm)
    name = RMS_NORMS.get(type_name(norm)) or RMS_FORWARDS.get(getattr(norm.__dict__.get("forward"), "func", None))
    if name is None or has_hooks(norm):
        return None
    return last_axis_rms_norm(norm, name)  # type: ignore[arg-type]  # its name or its forward is known


def last_axis_norm(norm: Foreign) -> Norm | None:
    """As `norm_of`, for a module known to be a LayerNorm; hooks are not checked."""
    if not are_plain_tensors(norm.weight, norm.bias) or len(norm.normalized_shape) != 1:
        return None
    return None if getattr(norm, "_fast_norm", False) else Norm(norm.weight, norm.bias, norm.eps)


def last_axis_rms_norm(norm: Foreign, name: str = "eps") -> Norm | None:
    """As `norm_of`, for a module known to be an RMSNorm whose ε has that name; hooks are not checked."""
    eps = getattr(norm, name)
    axes = getattr(norm, "normalized_shape", (1,))
    if eps is None or not are_plain_tensors(norm.weight) or len(axes) != 1 or getattr(norm, "_fast_norm", False):
        return None
    return Norm(norm.weight, None, eps, "rms_norm")


def entry_of(norm: nn.Module | None, layers: tuple[Layer, ...]) -> Entry | None:
    """A norm and the linear layers after it, for `fold_norms`; None if one of them must be called."""
    if norm is None or not layers or (parameters := norm_of(norm)) is None:
        return None
    weights, biases = [], []
    sources: list[Tensor | None] = []
    for layer in layers:
        if not is_readable(layer):
            return None
        weights.append(layer.weight)
        biases.append(layer.bias)
        sources += getattr(layer, "sources", None) or (layer.weight, layer.bias)
    group = Group(tuple(weights), tuple(biases), *parameters[:2])
    kept = [t for t in (*sources, *parameters[:2]) if t is not None]
    return Entry(norm, group, Norm(None, None, *parameters[2:]), tuple(kept))


def activation_of(module: nn.Module) -> str | nn.Module:
    """The kernels' name for this activation; the module itself if it has no such name or has hooks."""
    if has_hooks(module):
        return module
    name = type_name(module)
    if name == "torch.nn.modules.activation.GELU":
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    act = ACTIVATIONS.get(name, module)
    return act if "act" not in module.__dict__ or _calls(module, module.act, act) else module


def _calls(module: nn.Module, function: object, name: object) -> bool:
    """True if an activation that calls `function`, as transformers' do, calls that of its name, or its own method."""
    named = getattr(function, "keywords", {})
    exact = {"gelu": {}, "gelu_tanh": {"approximate": "tanh"}}.get(str(name))
    return getattr(function, "__self__", None) is module or (
        getattr(function, "func", function) is F.gelu and named == exact
    )


def is_identity(module: object) -> bool:
    """True for an nn.Identity without hooks."""
    return type(module) is nn.Identity and not has_hooks(module)


def is_patch_conv(conv: nn.Module, types: Collection[str] = CONVOLUTIONS) -> bool:
    """True for a convolution of these types that may be read and is a patch projection: its stride is its size."""
    return (
        is_plain_module(conv, types)
        and conv.kernel_size == conv.stride
        and (conv.padding == "valid" or not any(conv.padding))
        and conv.groups == 1
        and set(conv.dilation) == {1}
    )


def is_depthwise_conv(conv: nn.Module, strides: tuple[int, ...] = (1,)) -> bool:
    """True for a depthwise convolution with zero padding of half its size and such a stride, which may be read."""
    if not is_plain_module(conv, CONVOLUTIONS):
        return False
    height, width = conv.kernel_size
    return (
        conv.groups == conv.in_channels == conv.out_channels
        and height == width
        and height % 2 == 1
        and conv.padding in ((height // 2, height // 2), "same")
        and conv.stride in [(stride, stride) for stride in strides]
        and conv.dilation == (1, 1)
        and conv.padding_mode == "zeros"
    )


def softmax_reason(module: nn.Module) -> str | None:
    """Why this module must be called, because it is not a softmax over the last axis without hooks; None if it is."""
    plain = is_plain_module(module, SOFTMAXES) and module.dim == -1
    return None if plain else f"{type(module).__name__} is not a softmax over the last axis, or has a hook"


def is_inactive(dropout: object) -> bool:
    """True if there is no dropout, or it is off (evaluation mode or p = 0)."""
    if dropout is None:
        return True
    if is_plain_module(dropout, DROPOUTS):
        return not (dropout.training and dropout.p > 0)
    return is_identity(dropout)


def layer_scale_of(module: nn.Module | None) -> tuple[bool, Tensor | None]:
    """(True if the LayerScale may be read, its factors [D]); an identity has no factors."""
    if module is None or is_identity(module):
        return True, None
    name = type_name(module)
    factors = module._parameters.get(LAYER_SCALES.get(name, ""))
    return (True, factors) if factors is not None and is_plain_module(module, (name,)) else (False, None)


def has_sample_scale(drop_path: nn.Module | None) -> bool:
    """True if `sample_scale_of` supports this stochastic depth."""
    if drop_path is None or is_identity(drop_path):
        return True
    return is_plain_module(drop_path, DROP_PATHS) and getattr(drop_path, "mode", "row") == "row"


def kept_images(drop_path: nn.Module, x: Tensor) -> Tensor | None:
    """Indices of the images of x [B, ...] for which a `DropPath` that skips work computes its branch; None for all."""
    return drop_path.kept_images(x) if has_type(drop_path, (DROP_PATH,)) else None


def sample_scale_of(drop_path: nn.Module | None, x: Tensor) -> Tensor | None:
    """Drop-path factors [B] for the images of x [B, ...], from the same random numbers as the module's own; or None."""
    if drop_path is None:
        return None
    if has_type(drop_path, (DROP_PATH, CONSTANT)):
        return drop_path.sample_scale(x)
    if not drop_path.training:
        return None
    rate = getattr(drop_path, "drop_prob", getattr(drop_path, "p", 0.0))
    if rate == 0.0:
        return None
    keep = 1 - rate
    if hasattr(drop_path, "scale_by_keep") or hasattr(drop_path, "mode"):  # timm's since 0.5, torchvision's
        mask = x.new_empty(x.shape[0]).bernoulli_(keep)
        return mask.div_(keep) if keep > 0 and getattr(drop_path, "scale_by_keep", True) else mask
    return torch.rand(x.shape[0], dtype=x.dtype, device=x.device).add(keep).floor().div(keep)
