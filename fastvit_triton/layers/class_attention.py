"""Attention of the first token to all tokens (CaiT, CrossViT). Parameter names are timm's."""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from .fusable import Fusable


class ClassAttention(Fusable):
    """Attention of the first token to all.

    Sources: CaiT, arXiv:2103.17239, section 3.2, equations 7 to 10; CrossViT, arXiv:2103.14899, equations 3 and 4.
    """

    names: ClassVar = ("q", "k", "v")  # of the projections

    def __init__(
        self, dim: int, num_heads: int, qkv_bias: bool = True, attn_drop: float = 0.0, proj_drop: float = 0.0
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        for name in self.names:
            self.add_module(name, nn.Linear(dim, dim, bias=qkv_bias))
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, D] → [B, 1, D]."""
        to_q, to_k, to_v = (self.get_submodule(name) for name in self.names)
        tokens = to_q(x[:, :1]), to_k(x), to_v(x)
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in tokens)  # [B, H, 1 or N, d]
        dropout = self.attn_drop.p if self.attn_drop.training else 0.0
        o = F.scaled_dot_product_attention(q, k, v, None, dropout, scale=self.scale)
        return self.proj_drop(self.proj(o.transpose(1, 2).flatten(2)))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"
