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
NORMED = {"timm.models.levit.LinearNorm"}  # types of a linear layer with a BatchNorm
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


def folded_or(owner: nn.Module, layer: Foreign, norm: Foreign) -> Layer:
    """As `folded`, but the owner, to be called, instead of None; its hooks are respected."""
    return (None if has_hooks(owner) else folded(owner, layer, norm)) or owner


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
