"""Layers of maps [B, C, H, W] that act on each pixel: 1×1 convolutions as linear layers, and LayerNorms of channels.

A map that is stored with channels last is a view of tokens [B, H·W, C].
"""

from torch import Tensor, nn

from ..engine.batch_norm import is_pointwise
from ..engine.hooks import has_hooks, is_plain_module, type_name
from ..engine.leaves import DROPOUTS, Foreign, Packed, is_inactive
from ..kernels.layer_norm import layer_norm
from .forwards import fused_forward

NORMS = ("vit_pytorch.cvt.LayerNorm", "vit_pytorch.twins_svt.LayerNorm")
REPLACED = "a layer was replaced or has a hook"
Grid = tuple[int, int]


def tokens_of(image: Tensor) -> Tensor:
    """A map [B, C, H, W] as tokens [B, H·W, C]."""
    return image.flatten(2).transpose(1, 2)


def map_of(tokens: Tensor, grid: Grid) -> Tensor:
    """The reverse of `tokens_of`."""
    return tokens.transpose(1, 2).unflatten(2, grid)


def map_like(x: Tensor, tokens: Tensor, grid: Grid, training: bool) -> Tensor:
    """The map of tokens; in training with the layout of the map x, as dropout draws numbers in the order of memory."""
    y = map_of(tokens, grid)
    return y.contiguous() if training and x.is_contiguous() else y


def layers_of(sequence: Foreign, count: int) -> list[Foreign] | None:
    """The modules of a Sequential of this length without hooks; None for any other module."""
    plain = type(sequence) is nn.Sequential and len(sequence) == count and not has_hooks(sequence)
    return list(sequence) if plain else None


def packed(conv: Foreign) -> Packed | None:
    """A 1×1 convolution of stride 1 as a linear layer; None if it must be called."""
    plain = is_pointwise(conv) and conv.stride == (1, 1)
    return Packed(conv.weight.flatten(1), conv.bias) if plain else None


def dropped(*drops: Foreign) -> str | None:
    """Why modules with these dropouts run their own forwards now (random numbers in the order of a map), or None."""
    drop = next((drop for drop in drops if not is_inactive(drop)), None)
    if drop is None:
        return None
    return f"dropout {drop.p}" if type_name(drop) in DROPOUTS else "dropout was replaced"


def is_norm(norm: Foreign) -> bool:
    """True for a LayerNorm of channels that may be read."""
    return is_plain_module(norm, NORMS)


def normalized(norm: Foreign, tokens: Tensor) -> Tensor:
    """A LayerNorm of channels, of tokens [B, N, C]."""
    return layer_norm(tokens, norm.g.flatten(), norm.b.flatten(), norm.eps)


@fused_forward("LayerNorm", *NORMS, needs="g b eps", takes="", by_name=True, products=False)
def channel_norm(self: Foreign, x: Tensor) -> Tensor:
    """LayerNorm of the channels of a map; [B, C, H, W] → [B, C, H, W]."""
    if not is_norm(self):
        return NotImplemented
    return map_like(x, normalized(self, tokens_of(x)), (x.shape[2], x.shape[3]), self.training)
