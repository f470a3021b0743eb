"""Fused forwards of CrossViT, timm's and ours: the class token of a branch attends to the patches of another."""

from torch import Tensor

from ....engine.attention import attend
from ....engine.body import finish, fold_or_normalize, normalize, project
from ....engine.hooks import PACKAGE, has_hooks, is_our_forward, type_name
from ....engine.leaves import Foreign, has_sample_scale, is_inactive, is_readable, sample_scale_of
from ....kernels.attention import attention
from ...forwards import fused_forward, original
from ...third_party import is_fusable
from .attention import dropped, scale_of

TIMM = "timm.models.crossvit.CrossAttention"
OURS = f"{PACKAGE}.models.crossvit.CrossAttention"


def _dropped(module: Foreign) -> str | None:
    """See `dropped`; the projections of our attention are fused also while probabilities are dropped."""
    return None if type_name(module) == OURS else dropped(module)


@fused_forward(
    "cross attention",
    TIMM,
    OURS,
    needs="wq wk wv num_heads scale attn_drop proj proj_drop",
    takes="",
    reason=_dropped,
)
def cross_attention(self: Foreign, x: Tensor) -> Tensor:
    """The class token attends to all tokens; [B, N, D] → [B, 1, D]."""
    if not is_fusable(self, x) or _dropped(self) is not None:
        return original(self, x)
    q = project(x[:, :1], (self.wq,))
    kv = project(x, (self.wk, self.wv))
    return finish(_one_query(self, q, *kv.chunk(2, -1)), self.proj, drop=self.proj_drop)


def _one_query(self: Foreign, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of q [B, 1, D] to k and v [B, N, D]."""
    q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
    if type_name(self) == OURS:
        return attend(q, k, v, self.scale, self.attn_drop, True)
    return attention(q, k, v, scale=scale_of(self)).transpose(1, 2).flatten(2)


def _cross_reason(block: Foreign) -> str | None:
    attn = block.attn
    if type_name(attn) not in (TIMM, OURS):
        return f"its attention is {type(attn).__name__}"
    return _dropped(attn) or ("attention has a hook" if has_hooks(attn) else None)


@fused_forward(
    "cross-attention block",
    "timm.models.crossvit.CrossAttentionBlock",
    f"{PACKAGE}.models.crossvit.CrossBlock",
    needs="norm1 attn drop_path",
    takes="",
    reason=_cross_reason,
    folds=lambda self: [(self.norm1, self.attn)],
)
def cross_block(self: Foreign, x: Tensor) -> Tensor:
    """The class token attends to all tokens; [B, N, D] → [B, 1, D].

    All three projections are one matmul of all tokens, into which the norm is folded.
    """
    attn = self.attn
    if not is_fusable(self, x) or not is_our_forward(attn.__dict__.get("forward")) or _cross_reason(self) is not None:
        return original(self, x)
    cls = x[:, :1]
    layers = (attn.wq, attn.wk, attn.wv)
    drop = attn.proj_drop
    if not all(is_readable(layer) for layer in layers):
        return cls + self.drop_path(attn(normalize(x, self.norm1)))
    x, norm = fold_or_normalize(x, self.norm1, layers)
    q, k, v = project(x, layers, norm).chunk(3, -1)
    o = _one_query(attn, q[:, :1], k, v)
    if not is_inactive(drop) or not has_sample_scale(self.drop_path):
        return cls + self.drop_path(finish(o, attn.proj, drop=drop))
    return finish(o, attn.proj, sample_scale=sample_scale_of(self.drop_path, cls), residual=cls)
