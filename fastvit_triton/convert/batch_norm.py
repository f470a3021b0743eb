"""A BatchNorm folded into the layer before it, in evaluation after `freeze`.

To fold it in each call would take more launches than it saves. PyTorch does not count the writes of a training forward
to the running statistics, but counts those to `num_batches_tracked`, which is therefore one of the fold's sources.
"""

from torch import Tensor, nn

from ..layers.body import MlpParts
from ..layers.freeze import derived, keeps
from ..layers.hooks import are_plain_tensors, has_hooks, is_plain_module, type_name
from ..layers.module_parts import Foreign, Layer, Packed, activation_of, is_readable
from .from_torch import CONV

BATCH_NORMS = tuple(f"torch.nn.modules.batchnorm.BatchNorm{axes}d" for axes in (1, 2))
UNFOLDED = "its BatchNorms are folded in evaluation after `freeze`, if no layer was replaced"
NORMED = {  # modules of a linear layer and the BatchNorm after it → their names
    "timm.models.levit.LinearNorm": ("linear", "bn"),
    "timm.models.levit.ConvNorm": ("linear", "bn"),
    "transformers.models.levit.modeling_levit.MLPLayerWithBN": ("linear", "batch_norm"),
}
Sources = tuple[Tensor | None, ...]


def folded(owner: nn.Module, layer: Foreign, norm: Foreign) -> Packed | None:
    """A linear layer or 1×1 convolution and the BatchNorm after it as one linear map; None if they are to be called.

    Args:
        owner: the module that contains both; the folded tensors are kept for it.
        layer: nn.Linear, or nn.Conv2d with any stride.
        norm: BatchNorm1d or BatchNorm2d.
    """
    if not (is_readable(layer) or is_pointwise(layer)) or (sources := sources_of(owner, layer, norm)) is None:
        return None

    def weight() -> Tensor:
        return layer.weight.flatten(1) * factor(norm)[:, None]

    made = derived(owner, "weight", sources, weight), derived(owner, "bias", sources, lambda: shift(layer, norm))
    return Packed(*made, tuple(t for t in sources if t is not None))


def normed(module: Foreign) -> Layer:
    """A module of NORMED as one linear map, see `folded`; the module itself if it is to be called, or is another."""
    names = NORMED.get(type_name(module))
    if names is None or has_hooks(module):
        return module
    return folded(module, *(getattr(module, name) for name in names)) or module


def folded_mlp(
    fc1: Layer, act: nn.Module, fc2: Layer, drops: tuple[nn.Module | None, nn.Module | None]
) -> MlpParts | str:
    """Parts of an MLP whose BatchNorms are folded into its layers; a reason (str) if they are not."""
    is_folded = type(fc1) is Packed and type(fc2) is Packed
    return MlpParts((fc1,), activation_of(act), fc2, drops) if is_folded else UNFOLDED


def is_pointwise(conv: Foreign) -> bool:
    """True for a 1×1 convolution that may be read."""
    return (
        is_plain_module(conv, (CONV,))
        and conv.kernel_size == (1, 1)
        and conv.padding in ((0, 0), "valid", "same")
        and conv.groups == 1
    )


def sources_of(owner: nn.Module, layer: Foreign, norm: Foreign) -> Sources | None:
    """The tensors that a fold kept for the owner depends on; None if there is none, or the norm must be called."""
    if type_name(norm) not in BATCH_NORMS or has_hooks(norm) or norm.training:
        return None
    if not (norm.affine and norm.track_running_stats):
        return None
    found = layer.weight, layer.bias, *norm._parameters.values(), *norm._buffers.values()
    return found if are_plain_tensors(*found) and keeps(owner, *found) else None


def factor(norm: Foreign) -> Tensor:
    """What the BatchNorm multiplies each channel by, [C]."""
    return norm.weight * (norm.running_var + norm.eps).rsqrt()


def shift(layer: Foreign, norm: Foreign) -> Tensor:
    """What the BatchNorm adds to each channel of the layer's output without its bias, [C]."""
    mean = norm.running_mean if layer.bias is None else norm.running_mean - layer.bias
    return norm.bias - mean * factor(norm)


def folded_taps(owner: nn.Module, conv: Foreign, norm: Foreign) -> tuple[Tensor, Tensor] | None:
    """Weight [C, 1, K, K] and bias [C] of a depthwise convolution with the BatchNorm after it, as `folded`.

    The weight has the memory layout that `depthwise` reads without a copy.
    """
    if (sources := sources_of(owner, conv, norm)) is None:
        return None
    taps = derived(owner, "taps", sources, lambda: (conv.weight.flatten(1) * factor(norm)[:, None]).t())
    bias = derived(owner, "bias", sources, lambda: shift(conv, norm))
    return taps.t().unflatten(1, conv.kernel_size).unsqueeze(1), bias
