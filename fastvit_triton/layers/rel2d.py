"""Attention on a map with a bias that depends on the query and on the distance in rows and in columns.

Source: BoTNet, arXiv:2101.11605, figure 4. Parameter names are timm's.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..engine.attention import heads_of
from ..engine.body import project
from ..engine.hooks import can_fuse, has_hooks
from ..engine.leaves import CONVOLUTIONS, Packed, is_plain_module
from ..kernels.attention import attention, sum_of_axes

Grid = tuple[int, int]


class Rel2d(nn.Module):
    """Embeddings of the distances between the rows, and the columns, of two positions of a map.

    Args:
        grid: (rows, columns).
        dim: d, channels of a head.
    """

    def __init__(self, grid: Grid, dim: int) -> None:
        super().__init__()
        self.grid, (rows, columns) = grid, grid
        self.height_rel = nn.Parameter(torch.empty(2 * rows - 1, dim))
        self.width_rel = nn.Parameter(torch.empty(2 * columns - 1, dim))

    def forward(self, q: Tensor) -> Tensor:
        """Queries [B, H, N, d] → their products with the embeddings of every key's distance, [B, H, N, N]."""
        return sum_of_axes(*self.axes(q))

    def axes(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [B, H, N, d] → their products with the embeddings of every row's, and every column's, distance."""
        tables = (pairs(table, n) for table, n in zip((self.height_rel, self.width_rel), self.grid, strict=True))
        return axis_bias(q, tables, self.grid)


class BottleneckAttention(nn.Module):
    """Self-attention on a map: softmax(q kᵀ / √d + q (r_row + r_column)ᵀ / √d) v, without an output projection.

    Args:
        dim: D, channels.
        num_heads: H.
        grid: (rows, columns) of the map.
        stride: 2 takes means of 2 x 2 of the result.
    """

    def __init__(self, dim: int, num_heads: int, grid: Grid, stride: int = 1) -> None:
        super().__init__()
        self.num_heads, self.grid, self.scale = num_heads, grid, (dim // num_heads) ** -0.5
        self.qkv = nn.Conv2d(dim, 3 * dim, 1, bias=False)
        self.pos_embed = Rel2d(grid, dim // num_heads)
        self.pool = nn.AvgPool2d(2, 2) if stride == 2 else nn.Identity()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.qkv.weight, std=self.qkv.in_channels**-0.5)
        for table in self.pos_embed.parameters():
            nn.init.trunc_normal_(table, std=self.scale)

    def forward(self, x: Tensor) -> Tensor:
        """[B, D, H, W] → [B, D, H', W']."""
        q, k, v = self.heads(x)
        if can_fuse(x) and not has_hooks(self.pos_embed):
            o = attention(q, k, v, scale=self.scale, axis_bias=self.pos_embed.axes(self.scale * q))
        else:
            o = F.scaled_dot_product_attention(q, k, v, self.scale * self.pos_embed(q), scale=self.scale)
        return self.merge(o)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Map [B, D, H, W] → queries, keys and values [B, H, N, d]."""
        qkv: Any = self.qkv
        if tuple(x.shape[2:]) != self.grid:
            raise ValueError(f"the map is {tuple(x.shape[2:])}; the embeddings of distances are for {self.grid}")
        if can_fuse(x) and not has_hooks(qkv) and is_plain_module(qkv, CONVOLUTIONS):
            packed = project(x.flatten(2).mT.contiguous(), (Packed(qkv.weight.flatten(1), None),))
        else:
            packed = qkv(x).flatten(2).mT
        return heads_of(packed, self.num_heads)

    def merge(self, o: Tensor) -> Tensor:
        """Outputs of the heads [B, H, N, d] → [B, D, H', W']."""
        return self.pool(o.mT.flatten(1, 2).unflatten(2, self.grid))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"


def pairs(table: Tensor, n: int) -> Tensor:
    """Embeddings [2n − 1, d] of the distances 1 − n to n − 1 from query to key → those of all pairs [n, n, d]."""
    at = torch.arange(n, device=table.device)
    return table[at - at[:, None] + n - 1]


def axis_bias(q: Tensor, tables: Iterable[Tensor], grid: Sequence[int]) -> tuple[Tensor, Tensor]:
    """q · embeddings of the distances in rows and of those in columns, also SAM's and MViT v2's bias.

    Args:
        q: [B, H, h · w, D].
        tables: embeddings of the rows of queries and keys [h, h', D], and of the columns [w, w', D].
        grid: (h, w).

    Returns:
        `axis_bias` of `kernels.attention`: [B, H, h · w, h'] and [B, H, h · w, w'].
    """
    q, (rows, columns) = q.unflatten(2, tuple(grid)), tables
    row, column = torch.einsum("bnhwc,hkc->bnhwk", q, rows), torch.einsum("bnhwc,wkc->bnhwk", q, columns)
    return row.flatten(2, 3), column.flatten(2, 3)
