"""Attention of one query: pooling of tokens, and attention of the class token. Parameter names are timm's."""

import torch
from torch import Tensor, nn

from ..kernels.attention import attention
from .hooks import can_fuse
from .module_parts import is_readable


def sequence_pool(x: Tensor, score: nn.Linear) -> Tensor:
    """Sequence pooling: softmax(x w + b)ᵀ x over the tokens (CCT, arXiv:2104.05704, equation 5), [B, N, D] → [B, D].

    It is attention of the query w to x, with scale 1; b has no effect, and its gradient is 0.

    Args:
        x: [B, N, D].
        score: D → 1.
    """
    if not (can_fuse(x) and is_readable(score)):
        return (score(x).softmax(1).mT @ x)[:, 0]
    query = score.weight.to(x.dtype)[None, None].expand(len(x), 1, 1, -1)
    pooled = attention(query, x[:, None], x[:, None], scale=1.0)[:, 0, 0]
    return pooled + 0 * score.bias if torch.is_grad_enabled() else pooled
