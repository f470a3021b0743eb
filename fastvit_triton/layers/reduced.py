"""Attention to a smaller feature map (PVT, Twins). Parameter names are timm's and the authors'."""

import torch.nn.functional as F
from torch import Tensor, nn

from .fusable import Fusable


class ReducedAttention(Fusable):
    """Self-attention whose keys and values come from a map of 1 / R of the height and width.

    Source: PVT, arXiv:2102.12122, section 3.3 (spatial reduction); Twins, arXiv:2104.13840, section 3.3 (GSA). With a
    ratio R of 1 this is plain self-attention. While probabilities are dropped, PyTorch computes the attention.
    """

    sr: nn.Conv2d | None
    norm: nn.LayerNorm | None

    def __init__(
        self,
        dim: int,
        num_heads: int,
        ratio: int = 1,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        attn_drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.sr_ratio = ratio
        self.scale = (dim // num_heads) ** -0.5
        self.q = nn.Linear(dim, dim, bias=qkv_bias)
        self.kv = nn.Linear(dim, 2 * dim, bias=qkv_bias)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)
        self.sr = nn.Conv2d(dim, dim, ratio, ratio) if ratio > 1 else None
        self.norm = nn.LayerNorm(dim) if ratio > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """x [B, H, W, D] → [B, H, W, D]."""
        small = self.reduce(x)
        return self.proj_drop(self.proj(self.attend(self.q(x), self.kv(small))))

    def reduce(self, x: Tensor) -> Tensor:
        """The smaller map of x [B, H, W, D], or x."""
        if self.sr is None or self.norm is None:
            return x
        return self.norm(self.sr(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))

    def attend(self, q: Tensor, kv: Tensor) -> Tensor:
        """Attention of q [B, H, W, D] to kv [B, H', W', 2·D]."""
        grid = q.shape[1:3]
        dropout = self.attn_drop.p if self.attn_drop.training else 0.0
        q, k, v = (
            t.flatten(1, 2).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, *kv.chunk(2, -1))
        )  # [B, heads, N or M, d]
        o = F.scaled_dot_product_attention(q, k, v, None, dropout, scale=self.scale)
        return o.transpose(1, 2).flatten(2).unflatten(1, grid)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, ratio={self.sr_ratio}"
