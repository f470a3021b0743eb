"""A BatchNorm folded into the layer before it, while it uses its running statistics.

Under `freeze` the folded tensors are cached. PyTorch does not count the writes of a training forward to the running
statistics, but counts those to `num_batches_tracked`, which is therefore one of their sources.
"""

from torch import Tensor, nn

from ..layers.freeze import derived
from ..layers.hooks import are_plain_tensors, has_hooks, type_name
from ..layers.module_parts import Foreign, Layer, Packed, is_plain_module, is_readable
from .from_torch import CONV

BATCH_NORMS = tuple(f"torch.nn.modules.batchnorm.BatchNorm{axes}d" for axes in (1, 2))
Sources = tuple[Tensor | None, ...]


def folded(owner: nn.Module, layer: Foreign, norm: Foreign) -> Packed | None:
    """A linear layer or 1×1 convolution and the BatchNorm after it as one linear map; None if they must be called.

    Args:
        owner: the module that contains both; the folded tensors are kept for it.
        layer: nn.Linear, or nn.Conv2d with any stride.
        norm: BatchNorm1d or BatchNorm2d.
    """
    if not (is_readable(layer) or is_pointwise(layer)) or (sources := sources_of(layer, norm)) is None:
        return None

    def weight() -> Tensor:
        return layer.weight.flatten(1) * factor(norm)[:, None]

    made = derived(owner, "weight", sources, weight), derived(owner, "bias", sources, lambda: shift(layer, norm))
    return Packed(*made, tuple(t for t in sources if t is not None))


def folded_or(owner: nn.Module, layer: Foreign, norm: Foreign) -> Layer:
    """As `folded`, but the owner, to be called, instead of None; its hooks are respected."""
    return (None if has_hooks(owner) else folded(owner, layer, norm)) or owner


def is_pointwise(conv: Foreign) -> bool:
    """True for a 1×1 convolution that may be read."""
    return (
        is_plain_module(conv, (CONV,))
        and conv.kernel_size == (1, 1)
        and conv.padding in ((0, 0), "valid", "same")
        and conv.groups == 1
    )


def sources_of(layer: Foreign, norm: Foreign) -> Sources | None:
    """The tensors that a fold depends on; None while the BatchNorm normalises by its batch or must be called."""
    if type_name(norm) not in BATCH_NORMS or has_hooks(norm) or norm.training:
        return None
    if not (norm.affine and norm.track_running_stats):
        return None
    found = layer.weight, layer.bias, *norm._parameters.values(), *norm._buffers.values()
    return found if are_plain_tensors(*found) else None


def factor(norm: Foreign) -> Tensor:
    """What the BatchNorm multiplies each channel by, [C]."""
    return norm.weight * (norm.running_var + norm.eps).rsqrt()


def shift(layer: Foreign, norm: Foreign) -> Tensor:
    """What the BatchNorm adds to each channel of the layer's output without its bias, [C]."""
    mean = norm.running_mean if layer.bias is None else norm.running_mean - layer.bias
    return norm.bias - mean * factor(norm)
