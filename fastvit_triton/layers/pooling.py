"""Layers of PiT: overlapping patches, and pooling of tokens between stages. Parameter names are timm's."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .block import Blocks
from .embed import INTERPOLATION


class Tokens(NamedTuple):
    """Tokens x [B, T + N, D], of which the last N are those of a grid of (rows, columns)."""

    x: Tensor
    grid: tuple[int, int]

    def split(self) -> tuple[Tensor, Tensor]:
        """The prefix [B, T, D], and the map [B, rows, columns, D]."""
        T = self.x.shape[1] - self.grid[0] * self.grid[1]
        return self.x[:, :T], self.x[:, T:].unflatten(1, self.grid)


def joined(prefix: Tensor, patches: Tensor) -> Tokens:
    """Prefix [1 or B, T, D] and map [B, D, rows, columns] as tokens."""
    grid = (patches.shape[2], patches.shape[3])
    return Tokens(torch.cat((prefix.expand(patches.shape[0], -1, -1), patches.flatten(2).transpose(1, 2)), 1), grid)


class OverlapEmbed(nn.Module):
    """Projects overlapping patches, without padding (PiT, arXiv:2103.16302, section 3.2).

    Args:
        img_size: (height, width) in pixels.
        patch_size: (height, width) in pixels.
        stride: pixels between patches.
        in_chans: C.
        dim: D.
    """

    def __init__(
        self, img_size: tuple[int, int], patch_size: tuple[int, int], stride: int, in_chans: int, dim: int
    ) -> None:
        super().__init__()
        self.patch_size, self.stride = patch_size, stride
        self.conv = nn.Conv2d(in_chans, dim, patch_size, stride)
        self.grid_size = self.grid_of(img_size)

    def grid_of(self, size: tuple[int, ...]) -> tuple[int, int]:
        """(rows, columns) of patches of an image of (height, width)."""
        (height, width), (h, w) = size, self.patch_size
        return (height - h) // self.stride + 1, (width - w) // self.stride + 1

    def forward(self, image: Tensor, pos: Tensor, mode: str) -> Tensor:
        """image [B, C, H, W], pos [1, D, h, w], which is resized in this mode → [B, D, rows, columns]."""
        x = self.conv(image)
        return x + resize_map(pos, (x.shape[2], x.shape[3]), mode)


class TokenPooling(nn.Module):
    """Halves the map and widens its tokens by a depthwise convolution, and those before it by a linear layer.

    Source: PiT, arXiv:2103.16302, section 3.2 and figure 4.

    Args:
        dim: D.
        out: D', a multiple of D.

    Raises:
        ValueError: it is not.
    """

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        if out % dim:
            raise ValueError(f"a stage has {out} channels, which is no multiple of the {dim} of the stage before")
        self.conv = nn.Conv2d(dim, out, 3, 2, 1, groups=dim)
        self.fc = nn.Linear(dim, out)

    def forward(self, tokens: Tokens) -> Tokens:
        """Tokens [B, T + N, D] → [B, T + N', D']."""
        prefix, patches = tokens.split()
        return joined(self.fc(prefix), self.conv(patches.permute(0, 3, 1, 2)))


class PooledStage(nn.Module):
    """A pooling, None in the first stage, and blocks."""

    def __init__(self, pool: TokenPooling | None, blocks: Blocks) -> None:
        super().__init__()
        self.pool, self.blocks = pool, blocks

    def forward(self, tokens: Tokens, recompute: bool = False) -> Tokens:
        """Tokens [B, T + N, D] → [B, T + N', D']."""
        x, grid = tokens if self.pool is None else self.pool(tokens)
        return Tokens(self.blocks(x, recompute=recompute), grid)


def resize_map(pos: Tensor, grid: tuple[int, int], mode: str) -> Tensor:
    """Interpolates positions [1, D, h, w] to another grid; for the mode see `resize_pos_embed`."""
    if tuple(pos.shape[2:]) == grid:
        return pos
    return F.interpolate(pos.float(), grid, **INTERPOLATION[mode]).to(pos.dtype)
