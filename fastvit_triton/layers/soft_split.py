"""Layers of T2T-ViT: tokens of overlapping patches, which attend to each other before they are split again.

Parameter names are the authors'. Source: T2T-ViT, arXiv:2101.11986, section 3.1; Performer, arXiv:2009.14794, eq. 5-9.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..engine.body import finish, fold_or_normalize, project
from ..engine.branch import Branch, add_branches
from ..engine.hooks import can_fuse, has_hooks
from ..engine.leaves import activation_of
from ..engine.mlp import MlpBody
from ..kernels.attention_qkv import attention_qkv
from .mlp import Mlp

Grid = tuple[int, int]
SPLITS = ((7, 4, 2), (3, 2, 1), (3, 2, 1))  # kernel, stride, padding


class NarrowAttention(nn.Module):
    """Self-attention of one head, narrower than its input; the values are added to the result instead of the input.

    Args:
        dim: K, channels of the input, of whose root the scores are divided.
        out: D.
    """

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.scale = dim**-0.5
        self.qkv = nn.Linear(dim, 3 * out, bias=False)
        self.proj = nn.Linear(out, out)

    def forward(self, x: Tensor, norm: Any = None) -> Tensor:
        """x [B, N, K] and the norm to fold into the projection → [B, N, D]."""
        if not can_fuse(x):
            q, k, v = self.qkv(x).chunk(3, -1)
            o = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], scale=self.scale)
            return v + self.proj(o[:, 0])
        qkv = project(x, (self.qkv,), norm)
        return finish(attention_qkv(qkv, 1, self.scale), self.proj, residual=qkv.chunk(3, -1)[2])


class TokenTransformer(nn.Module):
    """Attention and MLP of one head, K → D channels; its rates are 0 in the authors' models."""

    def __init__(self, dim: int, out: int, drop: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = NarrowAttention(dim, out)
        self.norm2 = nn.LayerNorm(out)
        self.mlp = Mlp(out, out)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, K] → [B, N, D]."""
        if can_fuse(x) and not has_hooks(self.attn):
            x, norm = fold_or_normalize(x, self.norm1, (self.attn.qkv,))
            x = self.attn(x, norm)
        else:
            x = self.attn(self.norm1(x))
        return add_branches(x, Branch(self.mlp, self.norm2))


class TokenPerformer(nn.Module):
    """As `TokenTransformer`, with linear attention by positive random features of keys and queries.

    Args:
        dim: K, channels of the input.
        out: D.
        drop: dropout after the attention's projection and after the MLP.
    """

    def __init__(self, dim: int, out: int, drop: float = 0.1) -> None:
        super().__init__()
        self.kqv = nn.Linear(dim, 3 * out)
        self.dp = nn.Dropout(drop)
        self.proj = nn.Linear(out, out)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(out)
        self.mlp: Any = nn.Sequential(nn.Linear(out, out), nn.GELU(), nn.Linear(out, out), nn.Dropout(drop))
        m = out // 2
        self.w = nn.Parameter(torch.empty(m, out), requires_grad=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if not self.w.is_meta:
            nn.init.orthogonal_(self.w).mul_(math.sqrt(len(self.w)))

    def features(self, x: Tensor) -> Tensor:
        """exp(w · x − |x|² / 2) / √m of keys or queries [B, N, D], [B, N, m]."""
        return (x @ self.w.to(x.dtype).T - x.square().sum(-1, keepdim=True) / 2).exp() / math.sqrt(len(self.w))

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, K] → [B, N, D]."""
        if can_fuse(x):
            x, norm = fold_or_normalize(x, self.norm1, (self.kqv,))
            kqv = project(x, (self.kqv,), norm)
        else:
            kqv = self.kqv(self.norm1(x))
        k, q, v = kqv.chunk(3, -1)
        wide = [t if t.dtype == torch.float64 else t.float() for t in (k, q, v)]
        with torch.autocast(x.device.type, enabled=False):
            keys, queries = self.features(wide[0]), self.features(wide[1])  # [B, N, m]
            total = queries @ keys.sum(1).unsqueeze(-1)  # [B, N, 1]
            y = (queries @ (keys.mT @ wide[2]) / (total + 1e-8)).to(v.dtype)
        y = finish(y, self.proj, drop=self.dp, residual=v) if can_fuse(v) else v + self.dp(self.proj(y))
        if has_hooks(self.mlp):
            return y + self.mlp(self.norm2(y))
        parts = MlpBody((self.mlp[0],), activation_of(self.mlp[1]), self.mlp[2], (None, self.mlp[3]))
        return add_branches(y, Branch(parts, self.norm2))


class TokensToToken(nn.Module):
    """Three soft splits with two token layers between them, and a projection; [B, C, H, W] → [B, N, D].

    Args:
        kind: class of the token layers.
        in_chans: C.
        token_dim: channels of the token layers.
        dim: D.
        drop: their dropout.
    """

    def __init__(self, kind: Any, in_chans: int, token_dim: int, dim: int, drop: float) -> None:
        super().__init__()
        self.attention1 = kind(in_chans * 49, token_dim, drop)
        self.attention2 = kind(token_dim * 9, token_dim, drop)
        self.project = nn.Linear(token_dim * 9, dim)

    def forward(self, image: Tensor) -> Tensor:
        """[B, C, H, W] → [B, N, D]."""
        x, size = image, (image.shape[2], image.shape[3])
        for attention, split in zip((self.attention1, self.attention2), SPLITS, strict=False):
            size = split_size(size, split)
            x = attention(soft_split(x, split)).transpose(1, 2).unflatten(2, size)
        x = soft_split(x, SPLITS[2])
        return project(x, (self.project,)) if can_fuse(x) else self.project(x)


def soft_split(x: Tensor, split: tuple[int, int, int]) -> Tensor:
    """Overlapping patches of a map [B, C, H, W] as tokens [B, N, C · K · K]."""
    kernel, stride, padding = split
    return F.unfold(x, kernel, 1, padding, stride).transpose(1, 2)


def split_size(size: Grid, *splits: tuple[int, int, int]) -> Grid:
    """(rows, columns) of patches after these splits of a map of (height, width)."""
    for kernel, stride, padding in splits:
        size = ((size[0] + 2 * padding - kernel) // stride + 1, (size[1] + 2 * padding - kernel) // stride + 1)
    return size
