"""Attention of one query: pooling of tokens, and attention of the class token. Parameter names are timm's."""

import torch
from torch import Tensor, nn

from ..engine import ways
from ..engine.attention import attend
from ..engine.body import normalize, project
from ..engine.branch import Branch, add_branches
from ..engine.hooks import can_fuse
from ..engine.leaves import is_readable
from ..kernels.attention import attention


def sequence_pool(x: Tensor, score: nn.Linear) -> Tensor:
    """Sequence pooling: softmax(x w + b)ᵀ x over the tokens (CCT, arXiv:2104.05704, equation 5), [B, N, D] → [B, D].

    Without gradients it is attention of the query w to x, with scale 1, in which b has no effect. With gradients it
    is composed: that of w is a difference of nearly equal sums, which PyTorch's softmax gives with a smaller error.

    Args:
        x: [B, N, D].
        score: D → 1.
    """
    if torch.is_grad_enabled() or not (can_fuse(x) and is_readable(score)):
        return (score(x).softmax(1).mT @ x)[:, 0]
    query = score.weight.to(x.dtype)[None, None].expand(x.shape[0], 1, 1, -1)
    return attention(query, x[:, None], x[:, None], scale=1.0)[:, 0, 0]


class ClassAttention(nn.Module):
    """Attention of the first token to all (CaiT, arXiv:2103.17239, section 3.2, equations 7 to 10).

    Args:
        dim: D, channels per token.
        num_heads: H.
        qkv_bias: biases on the projections of queries, keys and values.
        attn_drop: dropout on the attention probabilities.
        proj_drop: dropout after the output projection.
    """

    def __init__(
        self, dim: int, num_heads: int, qkv_bias: bool = True, attn_drop: float = 0.0, proj_drop: float = 0.0
    ) -> None:
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=qkv_bias) for _ in range(3))
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, N, D] → queries [B, H, 1, d], keys and values [B, H, N, d]."""
        if can_fuse(x) and not ways.state.inside_plain:
            tokens = project(x[:, :1], (self.q,)), *project(x, (self.k, self.v)).chunk(2, -1)
        else:
            tokens = self.q(x[:, :1]), self.k(x), self.v(x)
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in tokens)
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, D] → [B, 1, D]."""
        fused = can_fuse(x) and not ways.state.inside_plain
        return self.proj_drop(self.proj(attend(*self.heads(x), self.scale, self.attn_drop, fused)))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"


class ClassBlock(nn.Module):
    """c + γ₁ attention(LN [c, x]), then c + γ₂ MLP(LN c) for a class token c (CaiT, section 3.2); x is unchanged.

    Args:
        dim: D, channels per token.
        attn: maps [B, 1 + N, D] to [B, 1, D].
        mlp: maps [B, 1, D] to [B, 1, D].
        eps: LayerNorm epsilon.
        init_values: initial γ; None for none.
    """

    gamma_1: nn.Parameter | None
    gamma_2: nn.Parameter | None

    def __init__(self, dim: int, attn: ClassAttention, mlp: nn.Module, eps: float, init_values: float | None) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim, eps=eps), attn
        self.norm2, self.mlp = nn.LayerNorm(dim, eps=eps), mlp
        self.init_values = init_values
        for name in ("gamma_1", "gamma_2"):
            self.register_parameter(name, None if init_values is None else nn.Parameter(torch.empty(dim)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for gamma in (self.gamma_1, self.gamma_2):
            if gamma is not None and self.init_values is not None:
                nn.init.constant_(gamma, self.init_values)

    def forward(self, x: Tensor, token: Tensor) -> Tensor:
        """Patches [B, N, D], class token [B, 1, D] → class token [B, 1, D]."""
        y = self.attn(normalize(torch.cat((token, x), 1), self.norm1))
        token = token + (y if self.gamma_1 is None else self.gamma_1 * y)
        return add_branches(token, Branch(self.mlp, self.norm2, layer_scale=self.gamma_2))


class ClassBlocks(nn.ModuleList):
    """A list of `ClassBlock`."""

    def forward(self, x: Tensor, token: Tensor) -> Tensor:
        """Patches [B, N, D], class token [1, 1, D] → updated class token and patches [B, 1 + N, D]."""
        token = token.expand(x.shape[0], -1, -1)
        for block in self:
            token = block(x, token)
        return torch.cat((token, x), 1)
