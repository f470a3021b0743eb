"""Visual transformers: a map is read into a few tokens, which attend to each other and are projected back.

Source: Wu et al., arXiv:2006.03677, equations 1 to 5. There are no norms, and scores are not scaled.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..engine.body import project
from ..engine.branch import Branch, add_branches
from ..engine.hooks import can_fuse
from ..kernels.attention import attention
from .drop_path import DropPath
from .mlp import Mlp

Inputs = tuple[Tensor, Tensor, Tensor]


class OneHead(nn.Module):
    """softmax(q kᵀ) v of one head; a subclass computes q [B, N, d], k [B, M, d] and v [B, M, e]."""

    def heads(self, x: Tensor, tokens: Tensor) -> Inputs:
        """Map [B, N, C] and tokens [B, L, D] → q, k, v."""
        raise NotImplementedError

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Map [B, N, C] and tokens [B, L, D] → [B, Nq, e]."""
        q, k, v = (t[:, None] for t in self.heads(x, tokens))
        return (attention if can_fuse(x) else F.scaled_dot_product_attention)(q, k, v, scale=1.0)[:, 0]


class Tokenizer(OneHead):
    """T = softmax(W Xᵀ) X V, a weighted mean of the pixels for each token (equations 1 and 2).

    W [L, C] is learned (filters) or, if `recurrent`, computed from the tokens before, T R. V is learned if tokens have
    another number of channels than the map.

    Args:
        dim: C, channels of the map.
        tokens: L.
        token_dim: D, channels of a token.
        recurrent: compute W.
    """

    def __init__(self, dim: int, tokens: int, token_dim: int, recurrent: bool) -> None:
        super().__init__()
        if recurrent:
            self.recur = nn.Linear(token_dim, dim, bias=False)
        self.filters = None if recurrent else nn.Parameter(torch.empty(tokens, dim))
        self.value = nn.Identity() if dim == token_dim else nn.Linear(dim, token_dim, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.filters is not None:
            nn.init.normal_(self.filters, std=0.01)

    def heads(self, x: Tensor, tokens: Tensor | None) -> Inputs:
        q = apply(tokens, self.recur) if self.filters is None else self.filters.expand(x.shape[0], -1, -1)
        return q.to(x.dtype), x, apply(x, self.value)


class TokenAttention(OneHead):
    """softmax(T K (T Q)ᵀ) T, without a projection of the values (equation 3).

    Args:
        token_dim: D, channels of a token.
        key_dim: channels of a query.
    """

    def __init__(self, token_dim: int, key_dim: int) -> None:
        super().__init__()
        self.key = nn.Linear(token_dim, key_dim, bias=False)
        self.query = nn.Linear(token_dim, key_dim, bias=False)

    def heads(self, x: Tensor, tokens: Tensor) -> Inputs:
        return apply(tokens, self.key), apply(tokens, self.query), tokens


class Projector(OneHead):
    """softmax(X Q (T K)ᵀ) T V, a weighted mean of the tokens for each pixel (equation 5).

    Args:
        dim: C, channels of the map.
        token_dim: D, channels of a token.
        key_dim: channels of a query.
    """

    def __init__(self, dim: int, token_dim: int, key_dim: int) -> None:
        super().__init__()
        self.query = nn.Linear(dim, key_dim, bias=False)
        self.key = nn.Linear(token_dim, key_dim, bias=False)
        self.value = nn.Identity() if dim == token_dim else nn.Linear(token_dim, dim, bias=False)

    def heads(self, x: Tensor, tokens: Tensor) -> Inputs:
        return apply(x, self.query), apply(tokens, self.key), apply(tokens, self.value)


class VisualTransformer(nn.Module):
    """Tokenizer, attention and MLP of the tokens (equations 3 and 4), and a projector.

    Args:
        dim: C, channels of the map.
        tokens: L.
        token_dim: D, channels of a token.
        key_dim: channels of a query.
        recurrent: there are tokens of a module before; the tokenizer reads them.
        projects: add the tokens to the map, for a module after this one.
        drop: dropout after both layers of the MLP.
        drop_path: probability of skipping each residual branch.
    """

    def __init__(
        self,
        dim: int,
        tokens: int,
        token_dim: int,
        key_dim: int,
        recurrent: bool = False,
        projects: bool = True,
        drop: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokenizer = Tokenizer(dim, tokens, token_dim, recurrent)
        self.attn = TokenAttention(token_dim, key_dim)
        self.mlp = Mlp(token_dim, token_dim, "relu", bias=False, drop=drop)
        self.projector = Projector(dim, token_dim, key_dim) if projects else None
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map [B, N, C], and the tokens [B, L, D] of the module before → the same."""
        t = self.tokenizer(x, tokens)
        t = t + self.drop_path(self.attn(x, t))
        t = add_branches(t, Branch(self.mlp, None, None, self.drop_path))
        return x if self.projector is None else x + self.drop_path(self.projector(x, t)), t


def apply(x: Any, layer: Any) -> Tensor:
    """A linear layer, or an Identity, of x [B, N, C]."""
    return project(x, (layer,)) if can_fuse(x) and type(layer) is nn.Linear else layer(x)
