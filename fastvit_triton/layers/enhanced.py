"""Layers of CeiT: a feed-forward layer with a depthwise convolution, and its stem. Parameter names are the authors'.

Source: CeiT, arXiv:2103.11816, sections 3.2 to 3.4.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..engine.batch_norm import folded
from ..engine.branch import Branch, add_branches
from ..engine.hooks import can_fuse
from ..engine.leaves import CONVOLUTIONS, activation_of, is_depthwise_conv, is_plain_module
from ..engine.replay import call_block
from ..kernels.depthwise import depthwise
from ..kernels.linear import linear
from .drop_path import DropPath

Grid = tuple[int, int]


class ImageToTokens(nn.Module):
    """A convolution, a BatchNorm and a maximum of the image, then patches; [B, C, H, W] → [B, N, D].

    Args:
        in_chans: C.
        dim: D.
        patch: side of a patch in pixels of the image, a multiple of 4.
        width: channels of the convolution.
    """

    def __init__(self, in_chans: int, dim: int, patch: int, width: int = 64) -> None:
        super().__init__()
        self.backbone: Any = nn.Module()
        self.backbone.conv = nn.Conv2d(in_chans, width, 7, 2, 3, bias=False)
        self.backbone.bn = nn.BatchNorm2d(width)
        self.backbone.maxpool = nn.MaxPool2d(3, 2, 1)
        self.proj = nn.Conv2d(width, dim, patch // 4, patch // 4)

    def forward(self, image: Tensor) -> Tensor:
        """[B, C, H, W] → [B, N, D]."""
        part = self.backbone
        x = self.proj(part.maxpool(part.bn(part.conv(image))))
        return x.flatten(2).transpose(1, 2)


class EnhancedFeedForward(nn.Module):
    """Linear layer, 3 x 3 depthwise convolution and linear layer on the patches, each with a BatchNorm (eq. 4-9).

    The class token stays as it is. In inference after `freeze` the norms are folded into the layers.

    Args:
        dim: D, channels.
        hidden: inner channels.
        grid: (rows, columns) of patches.
    """

    def __init__(self, dim: int, hidden: int, grid: Grid) -> None:
        super().__init__()
        self.grid = grid
        self.conv1: Any = nn.Conv2d(dim, hidden, 1)
        self.conv2: Any = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.conv3: Any = nn.Conv2d(hidden, dim, 1)
        self.act = nn.GELU()
        self.bn1, self.bn2, self.bn3 = nn.BatchNorm2d(hidden), nn.BatchNorm2d(hidden), nn.BatchNorm2d(dim)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 1 + N, D] → [B, 1 + N, D]."""
        patches = x[:, 1:]
        fused = self._fused(patches) if can_fuse(x) else None
        if fused is None:
            y = patches.unflatten(1, self.grid).permute(0, 3, 1, 2)
            y = self.act(self.bn1(self.conv1(y)))
            y = self.bn3(self.conv3(self.act(self.bn2(self.conv2(y)))))
            fused = y.flatten(2).transpose(1, 2)
        return torch.cat((x[:, :1], fused), 1)

    def _fused(self, x: Tensor) -> Tensor | None:
        """The patches [B, N, D] after all layers; None where a layer must be called."""
        pairs = (self.conv1, self.bn1), (self.conv2, self.bn2), (self.conv3, self.bn3)
        if not all(is_plain_module(conv, CONVOLUTIONS) for conv, _ in pairs) or not is_depthwise_conv(self.conv2):
            return None
        if activation_of(self.act) != "gelu":
            return None
        folds = [folded(conv, conv, norm) for conv, norm in pairs]
        if not (folds[0] and folds[1] and folds[2]):
            return None
        h = linear(x, folds[0].weight.flatten(1), folds[0].bias, activation="gelu")
        h = depthwise(h.unflatten(1, self.grid), folds[1].weight, folds[1].bias, activation="gelu").flatten(1, 2)
        return linear(h, folds[2].weight.flatten(1), folds[2].bias)


class EnhancedBlock(nn.Module):
    """Pre-norm block with an `EnhancedFeedForward`.

    Args:
        dim: D.
        attn: its attention.
        leff: its feed-forward layer.
        eps: LayerNorm epsilon.
        drop_path: probability of skipping each branch.
    """

    def __init__(self, dim: int, attn: nn.Module, leff: nn.Module, eps: float = 1e-6, drop_path: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim, eps=eps), attn
        self.norm2, self.leff = nn.LayerNorm(dim, eps=eps), leff
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 1 + N, D] → [B, 1 + N, D]."""
        return call_block(EnhancedBlock._run, self, x)

    def _run(self, x: Tensor) -> Tensor:
        attn = Branch(self.attn, self.norm1, None, self.drop_path)
        return add_branches(x, attn, Branch(self.leff, self.norm2, None, self.drop_path), block=self)


class LayerAttention(nn.Module):
    """Attention and MLP of the class tokens of all layers, of which the last is returned (eq. 10)."""

    def __init__(self, dim: int, attn: nn.Module, feedforward: nn.Module, eps: float = 1e-6) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim, eps=eps), attn
        self.norm2, self.feedforward = nn.LayerNorm(dim, eps=eps), feedforward

    def forward(self, x: Tensor) -> Tensor:
        """[B, layers, D] → [B, 1, D]."""
        return call_block(LayerAttention._run, self, x)[:, -1:]

    def _run(self, x: Tensor) -> Tensor:
        return add_branches(x, Branch(self.attn, self.norm1), Branch(self.feedforward, self.norm2), block=self)
