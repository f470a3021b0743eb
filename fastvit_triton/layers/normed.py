"""Linear layers and convolutions with a BatchNorm, which inference folds into them. Parameter names are timm's.

A training forward writes running statistics in ways that PyTorch does not count; it counts those to
`num_batches_tracked`, which is therefore a source of every fold.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from .freeze import derived
from .hooks import are_plain_tensors, can_fuse, has_hooks, type_name
from .module_parts import CONVOLUTIONS, Foreign, Layer, Packed, is_plain_module, is_readable

BATCH_NORMS = tuple(f"torch.nn.modules.batchnorm.BatchNorm{n}d" for n in (1, 2))


class LinearNorm(nn.Module):
    """A linear layer without bias, and a BatchNorm over all tokens (LeViT, arXiv:2104.01136, section 4.2).

    Args:
        inputs, outputs: features.
        scale: initial weight of the norm; 0 for the last layer of a residual branch.
    """

    def __init__(self, inputs: int, outputs: int, scale: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self.bn = nn.BatchNorm1d(outputs)
        nn.init.constant_(self.bn.weight, scale)

    def forward(self, x: Tensor) -> Tensor:
        """[B, ..., K] → [B, ..., F]."""
        x = self.linear(x)
        return self.bn(x.flatten(0, -2)).view_as(x)


class ConvNorm(nn.Module):
    """A convolution without bias, and a BatchNorm.

    Args:
        inputs, outputs: channels.
        kernel, stride, padding: of the convolution.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, padding: int = 0) -> None:
        super().__init__()
        self.linear = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] → [B, C', H', W']."""
        return convolve(x, self, self.linear, self.bn)


class NormLinear(nn.Module):
    """A BatchNorm, dropout and a linear layer: the head of LeViT.

    Args:
        inputs, outputs: features.
        drop: dropout.
    """

    def __init__(self, inputs: int, outputs: int, drop: float = 0.0) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(inputs)
        self.drop = nn.Dropout(drop)
        self.linear = nn.Linear(inputs, outputs)
        nn.init.trunc_normal_(self.linear.weight, std=0.02)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, K] → [B, F]; [B, N, K] → [B, N, F]."""
        return self.linear(self.drop(self.bn(x.flatten(0, -2)).view_as(x)))


def convolve(x: Tensor, owner: nn.Module, conv: Foreign, norm: Foreign) -> Tensor:
    """A convolution of x [B, C, H, W] and the BatchNorm after it, as one convolution where `folded` allows it."""
    if can_fuse(x) and is_plain_module(conv, CONVOLUTIONS) and (fold := folded(owner, conv, norm)) is not None:
        return F.conv2d(x, fold.weight, fold.bias, conv.stride, conv.padding)
    return norm(conv(x))


def folded(owner: nn.Module, layer: Foreign, norm: Foreign) -> Packed | None:
    """A layer and the BatchNorm after it as one map; None where they must be called.

    Args:
        owner: the module that has both; the fold is cached if it is frozen.
        layer: a linear layer, or a convolution, whose weight may be read.
        norm: the BatchNorm.
    """
    if has_hooks(owner) or type_name(norm) not in BATCH_NORMS or has_hooks(norm) or norm.training:
        return None
    if not norm.affine or not norm.track_running_stats or not are_plain_tensors(layer.weight, layer.bias):
        return None
    given = norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked
    sources: tuple[Tensor, ...] = (*given, layer.weight, *(() if layer.bias is None else (layer.bias,)))
    if not are_plain_tensors(*sources):
        return None

    def factor() -> Tensor:
        return norm.weight * (norm.running_var + norm.eps).rsqrt()

    def shift() -> Tensor:
        mean = norm.running_mean if layer.bias is None else norm.running_mean - layer.bias
        return norm.bias - mean * factor()

    shape = (-1, *[1] * (layer.weight.dim() - 1))
    weight = derived(owner, "weight", sources, lambda: layer.weight * factor().view(shape))
    bias = derived(owner, "bias", sources, shift)
    return Packed(weight, bias, sources)


def folded_linear(layer: Foreign) -> Layer:
    """A `LinearNorm`, ours or timm's, as one linear map; the layer itself where it must be called."""
    if has_hooks(layer) or not hasattr(layer, "linear") or not is_readable(layer.linear):
        return layer
    return folded(layer, layer.linear, layer.bn) or layer
