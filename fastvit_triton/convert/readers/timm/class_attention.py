"""Fused forwards of CaiT's, CrossViT's and VOLO's attention of one class token, timm's and ours, and of its blocks."""

import torch
from torch import Tensor

from ....engine.attention import attend, heads_of
from ....engine.body import finish, fold_or_normalize, normalize, project
from ....engine.branch import Branch, add_branches
from ....engine.hooks import PACKAGE, has_hooks, is_our_forward, type_name
from ....engine.leaves import Foreign, Layer, has_sample_scale, is_inactive, is_readable, sample_scale_of
from ....kernels import fold
from ....kernels.attention import attention
from ....kernels.backend import kernels_available
from ....layers.scaled_block import times
from ...forwards import fused_forward
from .attention import dropped, is_own, scale_of
from .blocks import drop_paths, factors

CROSS = ("timm.models.crossvit.CrossAttention", f"{PACKAGE}.models.crossvit.CrossAttention")


def _dropped(module: Foreign) -> str | None:
    """See `dropped`; the projections of our attention are fused also while probabilities are dropped."""
    return None if is_own(module) else dropped(module)


def projections(attn: Foreign) -> tuple[Layer, tuple[Layer, ...]]:
    """The projection of the queries, and those of keys and values."""
    if hasattr(attn, "wq"):
        return attn.wq, (attn.wk, attn.wv)
    return attn.q, (attn.kv,) if hasattr(attn, "kv") else (attn.k, attn.v)


@fused_forward(
    "class attention",
    *CROSS,
    "timm.models.cait.ClassAttn",
    "timm.models.volo.ClassAttention",
    f"{PACKAGE}.layers.class_attention.ClassAttention",
    needs="q|wq k|wk|kv v|wv|kv num_heads scale attn_drop proj proj_drop",
    reason=_dropped,
)
def class_attention(self: Foreign, x: Tensor) -> Tensor:
    """The class token attends to all tokens; [B, N, D] → [B, 1, D]."""
    query, keys = projections(self)
    few = kernels_available(x) and not fold.pays(x, 2 * x.shape[-1])
    if few and torch.is_grad_enabled() and len(keys) > 1:
        return NotImplemented  # packing the weights and splitting their gradient would move more than it saves
    (q,) = heads_of(project(x[:, :1], (query,)), self.num_heads, 1)
    o = _one_query(self, q, *heads_of(project(x, keys), self.num_heads, 2))
    if is_own(self) and hasattr(self, "q"):  # CaiT's, whose last layer, with one row an image, is called
        return self.proj_drop(self.proj(o))
    return finish(o, self.proj, drop=self.proj_drop)


def _one_query(self: Foreign, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of q [B, H, 1, d] to k and v [B, H, N, d], [B, 1, H·d]."""
    if is_own(self):
        return attend(q, k, v, self.scale, self.attn_drop, True)
    return attention(q, k, v, scale=scale_of(self)).transpose(1, 2).flatten(2)


@fused_forward(
    "class-token block",
    "timm.models.cait.LayerScaleBlockClassAttn",
    f"{PACKAGE}.models.cait.ClassBlock",
    needs="norm1 attn gamma_1 drop_path1|drop_path norm2 mlp gamma_2",
    folds=lambda self: [(self.norm2, self.mlp)],
)
def class_block(self: Foreign, x: Tensor, x_cls: Tensor) -> Tensor:
    """CaiT's block of the class token; patches [B, N, D], class token [B, 1, D] → class token [B, 1, D]."""
    first, second = factors(self, x)
    drop1, drop2 = drop_paths(self)
    y = self.attn(normalize(torch.cat((x_cls, x), 1), self.norm1))
    return add_branches(x_cls + drop1(times(first, y)), Branch(self.mlp, self.norm2, None, drop2, second))


def _cross_reason(block: Foreign) -> str | None:
    attn = block.attn
    if type_name(attn) not in CROSS:
        return f"its attention is {type(attn).__name__}"
    return _dropped(attn) or ("attention has a hook" if has_hooks(attn) else None)


@fused_forward(
    "cross-attention block",
    "timm.models.crossvit.CrossAttentionBlock",
    f"{PACKAGE}.models.crossvit.CrossBlock",
    needs="norm1 attn drop_path",
    reason=_cross_reason,
    folds=lambda self: [(self.norm1, self.attn)],
)
def cross_block(self: Foreign, x: Tensor) -> Tensor:
    """The class token attends to all tokens; [B, N, D] → [B, 1, D].

    All three projections are one matmul of all tokens, into which the norm is folded.
    """
    attn = self.attn
    if not is_our_forward(attn.__dict__.get("forward")):
        return NotImplemented
    cls = x[:, :1]
    query, keys = projections(attn)
    layers = (query, *keys)
    drop = attn.proj_drop
    if not all(is_readable(layer) for layer in layers):
        return cls + self.drop_path(attn(normalize(x, self.norm1)))
    x, norm = fold_or_normalize(x, self.norm1, layers)
    q, k, v = project(x, layers, norm).chunk(3, -1)
    o = _one_query(attn, *(t.unflatten(-1, (attn.num_heads, -1)).transpose(1, 2) for t in (q[:, :1], k, v)))
    if not is_inactive(drop) or not has_sample_scale(self.drop_path):
        return cls + self.drop_path(finish(o, attn.proj, drop=drop))
    return finish(o, attn.proj, sample_scale=sample_scale_of(self.drop_path, cls), residual=cls)
