"""Fused forwards of TNT, timm's and ours: pixels attend within their patch, and are added to the patch's token."""

from typing import Any

import torch
from torch import Tensor, nn

from ....engine import replay, ways
from ....engine.attention import attend, attention_body, heads_of
from ....engine.body import Body, finish, normalize
from ....engine.branch import Branch, add_branches, runs_plain
from ....engine.hooks import PACKAGE, can_fuse
from ....engine.leaves import Foreign, Layer
from ...forwards import fused_body, fused_forward, fused_method, original
from .attention import dropped, scale_of

OURS = f"{PACKAGE}.models.tnt"


@fused_body("timm.models.tnt.Attention", needs="qk v num_heads scale attn_drop proj proj_drop")
def tnt_parts(self: Foreign) -> Body | str:
    """Parts of TNT's attention, which projects queries and keys together."""
    hidden = getattr(self, "hidden_dim", None)
    if hidden is not None and hidden != getattr(self.v, "out_features", hidden):
        return "queries of another width than the values"
    layers = self.qk, self.v
    return dropped(self) or attention_body(layers, self.proj, self.num_heads, scale_of(self), drops=(self.proj_drop,))


def _tnt_folds(self: Foreign) -> list[tuple[nn.Module, nn.Module | None]]:
    pairs = [((norm1, attn), (norm2, mlp)) for attn, norm1, mlp, norm2, _ in _inner_outer(self)]
    return [*pairs[0], *pairs[1], (self.norm1_proj, None if self.norm2_proj is None else self.proj)]


@fused_body(f"{OURS}.SplitAttention", needs="qk v num_heads scale attn_drop proj proj_drop")
def split_parts(self: Foreign) -> Body | str:
    """Parts of our attention, whose projections are fused also while probabilities are dropped."""
    if not (self.attn_drop.training and self.attn_drop.p > 0):
        return tnt_parts(self)

    def between(qkv: Tensor) -> Tensor:
        q, k, v = heads_of(qkv, self.num_heads)
        return attend(q, k, v, self.scale, self.attn_drop)

    layers = self.qk, self.v
    return Body("attention", layers, between, self.proj, self.num_heads, drops=(self.proj_drop,))


@fused_forward(
    "pre-norm block",
    "timm.models.tnt.Block",
    f"{OURS}.InnerBlock",
    needs="norm_in attn_in norm_mlp_in mlp_in norm1_proj proj norm2_proj norm_out attn_out norm_mlp mlp drop_path",
    folds=_tnt_folds,
)
def tnt_block(self: Foreign, pixel_embed: Tensor, patch_embed: Tensor) -> tuple[Tensor, Tensor]:
    """TNT's block: pixels [B·N, n, D'] attend within patches, then tokens [B, 1 + N, D] that receive them attend."""
    if _is_plain(self, pixel_embed, patch_embed):
        return ways.plainly(original, self, pixel_embed, patch_embed)
    return _add_inner_outer(self, pixel_embed, patch_embed)


def _inner_outer(block: Any) -> tuple[tuple, tuple]:
    """(attention, its norm, MLP, its norm, stochastic depth) of the pixels and of the patches of a TNT block."""
    inner = block.attn_in, block.norm_in, block.mlp_in, block.norm_mlp_in, block.drop_path
    return inner, (block.attn_out, block.norm_out, block.mlp, block.norm_mlp, block.drop_path)


def _is_plain(block: Any, pixels: Tensor, patches: Tensor) -> bool:
    """True if the branches of the pixels and those of the patches are both plain."""
    return all(
        runs_plain(x, *_branches(attn, *others), block=attn)
        for (attn, *others), x in zip(_inner_outer(block), (pixels, patches), strict=True)
    )


def _add_inner_outer(block: Any, pixels: Tensor, patches: Tensor) -> tuple[Tensor, Tensor]:
    """A TNT block: pixels [B · N, n, c] and tokens [B, 1 + N, D] → the same.

    Without gradients it is replayed as a whole; two outputs with gradients are not replayed, but each pair of branches.
    """
    choices = [ways.known_way(attn, x) for (attn, *_), x in zip(_inner_outer(block), (pixels, patches), strict=True)]
    plain = any(way is None for way, _ in choices) or all(way == "plain" for way, _ in choices)
    if torch.is_grad_enabled() or ways.state.inside_plain or plain:
        return _add_both(block, pixels, patches)
    return replay.call(tuple(settings for _, settings in choices), _add_both, block, pixels, patches)


def _add_both(block: Any, pixels: Tensor, patches: Tensor) -> tuple[Tensor, Tensor]:
    inner, outer = _inner_outer(block)
    pixels = replay.call_branches(_add, inner[0], pixels, *inner[1:])
    added = merged_pixels(pixels, patches.shape[1] - 1, block.norm1_proj, block.proj, block.norm2_proj)
    patches = torch.cat((patches[:, :1], patches[:, 1:] + added), 1)
    return pixels, replay.call_branches(_add, outer[0], patches, *outer[1:])


def _add(attn: nn.Module, x: Tensor, *others: nn.Module) -> Tensor:
    return add_branches(x, *_branches(attn, *others), block=attn)


def _branches(attn: nn.Module, norm1: Any, mlp: Any, norm2: Any, drop_path: Any) -> tuple[Branch, Branch]:
    return Branch(attn, norm1, None, drop_path), Branch(mlp, norm2, None, drop_path)


def merged_pixels(x: Tensor, patches: int, before: nn.Module, proj: Layer, after: nn.Module | None) -> Tensor:
    """Pixels x [B · N, n, c] of N patches → [B, N, D]: a norm, of a pixel or of all together, a projection, a norm."""
    if not can_fuse(x):
        x = before(x) if after is None else x
        x = x.reshape(-1, patches, x.shape[1] * x.shape[2])
        return proj(x) if after is None else after(proj(before(x)))
    x = normalize(x, before) if after is None else x
    x = finish(x.reshape(-1, patches, x.shape[1] * x.shape[2]), proj, None if after is None else before)
    return x if after is None else normalize(x, after)


@fused_method("merge", f"{OURS}.TransformerInTransformer")
def merge(self: Foreign, pixels: Tensor) -> Tensor:
    """Pixels [B · N, n, c] → patches [B, N, D]."""
    return merged_pixels(pixels, self.pixel_embed.num_patches, self.norm1_proj, self.proj, self.norm2_proj)
