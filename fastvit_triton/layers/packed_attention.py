"""Attention whose projections of queries, keys and values are one weight, and layers of it; names are torch.nn's."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.attention import attention
from .fusable import Fusable


class PackedAttention(Fusable):
    """softmax(q kᵀ / √d) v of H heads, where q, k and v are projections of three inputs."""

    def __init__(self, dim: int, num_heads: int, drop: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.drop = drop
        self.in_proj_weight = nn.Parameter(torch.empty(3 * dim, dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * dim)) if bias else None
        self.out_proj = nn.Linear(dim, dim, bias=bias)
        nn.init.xavier_uniform_(self.in_proj_weight)
        if bias:
            nn.init.zeros_(self.out_proj.bias)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """q [B, M, D], k and v [B, N, D] → [B, M, D].

        The mask is boolean, and broadcasts to [B, H, M, N]: True where a query sees a key. A query without keys gets 0.
        """
        if q is k is v:  # one product
            packed = F.linear(q, self.in_proj_weight, self.in_proj_bias)
            projected = packed.chunk(3, -1)
        else:
            weights = self.in_proj_weight.chunk(3)
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            projected = tuple(F.linear(x, w, b) for x, w, b in zip((q, k, v), weights, biases, strict=True))
        heads = [x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in projected]
        if self.drop and self.training:
            o = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], mask, self.drop)
        else:
            o = attention(heads[0], heads[1], heads[2], mask)
        return self.out_proj(o.transpose(1, 2).flatten(2))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, drop={self.drop}"


class PackedLayer(Fusable):
    """Parts of a layer, with the names of nn.TransformerEncoderLayer or, with `cross`, nn.TransformerDecoderLayer.

    `hidden` is the width of the MLP, whose activation is ReLU; `bias` is that of the projections of attention; `cross`
    adds attention to other tokens, with a norm and a dropout.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        hidden: int,
        drop: float,
        attn_drop: float = 0.0,
        bias: bool = True,
        cross: bool = False,
    ) -> None:
        super().__init__()
        self.self_attn = PackedAttention(dim, num_heads, attn_drop, bias)
        if cross:
            self.multihead_attn = PackedAttention(dim, num_heads, attn_drop, bias)
        self.linear1 = nn.Linear(dim, hidden)
        self.dropout = nn.Dropout(drop)
        self.linear2 = nn.Linear(hidden, dim)
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        if cross:
            self.norm3 = nn.LayerNorm(dim)
        self.dropout1 = nn.Dropout(drop)
        self.dropout2 = nn.Dropout(drop)
        if cross:
            self.dropout3 = nn.Dropout(drop)

    def mlp(self, x: Tensor) -> Tensor:
        """[B, N, D] → [B, N, D]."""
        return self.linear2(self.dropout(F.relu(self.linear1(x))))
