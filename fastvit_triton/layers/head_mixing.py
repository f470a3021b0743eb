"""Attention whose maps are mixed across heads (CaiT, DeepViT, Refiner). Parameter names are timm's."""

from torch import Tensor, nn

from .fusable import Fusable


class MixedAttention(Fusable):
    """Self-attention with a packed qkv projection, whose maps a subclass computes."""

    def __init__(
        self, dim: int, num_heads: int, qkv_bias: bool = True, attn_drop: float = 0.0, proj_drop: float = 0.0
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, N, D] → [B, N, D]."""
        return self.proj_drop(self.proj(self.attend(self.qkv(x))))

    def maps(self, scores: Tensor) -> Tensor:
        """Scaled scores [B, H, N, N] → what the values are multiplied by, [B, H, N, N]."""
        raise NotImplementedError

    def attend(self, qkv: Tensor) -> Tensor:
        """Packed projections [B, N, 3·H·d] → the heads' outputs [B, N, H·d]."""
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, N, d]
        return (self.maps((q * self.scale) @ k.mT) @ v).transpose(1, 2).flatten(2)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"
