"""Attention modules. Parameter names are timm's: qkv, q_norm, k_norm, proj."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.attention import attention
from .fusable import Fusable
from .mlp import Mlp


class Attention(Fusable):
    """Multi-head self-attention with packed qkv projection (ViT, arXiv:2010.11929, eq. 5-8, and biases as in its code).

    Args:
        dim: D, channels per token.
        num_heads: H.
        head_dim: channels per head; None means D / H. H · head_dim may differ from D.
        qkv_bias: bias on the packed projection.
        proj_bias: bias on the output projection.
        scale: softmax scale; None means head_dim^-0.5.
        qk_norm: epsilon of a LayerNorm on every head's queries and keys; None for no norm.
        attn_drop: dropout on the attention probabilities.
        proj_drop: dropout after the output projection.
        position: module that maps queries [B, H, N, d] to a bias [B, H, N, N], such as `RelativePosition`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        head_dim: int | None = None,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        scale: float | None = None,
        qk_norm: float | None = None,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        position: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim or dim // num_heads
        self.scale = self.head_dim**-0.5 if scale is None else scale
        inner = num_heads * self.head_dim
        self.qkv = nn.Linear(dim, 3 * inner, bias=qkv_bias)
        self.q_norm = nn.Identity() if qk_norm is None else nn.LayerNorm(self.head_dim, eps=qk_norm)
        self.k_norm = nn.Identity() if qk_norm is None else nn.LayerNorm(self.head_dim, eps=qk_norm)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(inner, dim, bias=proj_bias)
        self.proj_drop = nn.Dropout(proj_drop)
        self.position = position

    def forward(self, x: Tensor) -> Tensor:
        """x [B, N, D] → [B, N, D]."""
        return self.proj_drop(self.proj(self.attend(self.qkv(x))))

    def attend(self, qkv: Tensor) -> Tensor:
        """Packed projections [B, N, 3·H·d] → the heads' outputs [B, N, H·d]; a subclass may override it."""
        q, k, v = self.heads(qkv)
        bias = None if self.position is None else self.scale * self.position(q)
        dropout = self.attn_drop.p if self.attn_drop.training else 0.0
        o = F.scaled_dot_product_attention(q, k, v, bias, dropout, scale=self.scale)
        return o.transpose(1, 2).flatten(2)

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Packed projections [B, N, 3·H·d] → queries, keys and values [B, H, N, d]."""
        heads = qkv.reshape(*qkv.shape[:2], 3, self.num_heads, self.head_dim)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        return self.q_norm(q), self.k_norm(k), v

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}"


class RelativePosition(nn.Module):
    """Relative position embeddings r of 1-D offsets between at most N patches; q · r is added to q · k.

    Source: ViT, arXiv:2010.11929, appendix D.4; the heads share the table, as in Shaw et al., arXiv:1803.02155,
    section 3.2. Prefix tokens have no position and get no bias.
    """

    def __init__(self, num_patches: int, head_dim: int, prefix_tokens: int) -> None:
        super().__init__()
        self.num_patches = num_patches
        self.prefix_tokens = prefix_tokens
        self.weight = nn.Parameter(torch.empty(2 * num_patches - 1, head_dim))  # row i: offset i − (N − 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(self, q: Tensor) -> Tensor:
        """q [B, H, T + N, d] → [B, H, T + N, T + N]."""
        N = q.shape[2] - self.prefix_tokens
        if N > self.num_patches:
            raise ValueError(f"relative positions were built for {self.num_patches} patches, got {N}")
        n = torch.arange(N, device=q.device)
        offset = n[:, None] - n[None, :] + self.num_patches - 1  # [N, N]
        logits = q[:, :, self.prefix_tokens :] @ self.weight.T  # [B, H, N, 2N − 1]
        logits = logits.gather(-1, offset.expand(*logits.shape[:2], N, N))
        return F.pad(logits, (self.prefix_tokens, 0, self.prefix_tokens, 0))


class AttentionPool(Fusable):
    """Attention pooling: a learned query attends to all tokens, then an MLP (SigLIP's "map")."""

    def __init__(self, dim: int, num_heads: int, mlp: Mlp, eps: float = 1e-6) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.latent = nn.Parameter(torch.empty(1, 1, dim))
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim, eps=eps)
        self.mlp = mlp
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.latent, std=self.latent.shape[-1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, D] → [B, D]."""
        q = self.q(self.latent).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [1, H, 1, d]
        k, v = self.kv(x).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, N, d]
        o = attention(q.expand(x.shape[0], -1, -1, -1), k, v).transpose(1, 2).flatten(2)
        x = self.proj(o)  # [B, 1, D]
        return (x + self.mlp(self.norm(x)))[:, 0]
