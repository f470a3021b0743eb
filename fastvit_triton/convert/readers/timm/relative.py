"""Fused forwards for timm's attention with relative positions: ViT-RelPos, SAM, GCViT, MaxViT, Swin V2 CR."""

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from ....engine.attention import attention_body, heads_of, merged_heads
from ....engine.body import Body, normalize
from ....engine.freeze import derived
from ....engine.hooks import is_plain_module
from ....engine.leaves import Foreign
from ....kernels.attention import attention
from ....kernels.attention_qkv import rotate
from ...forwards import fused_body
from ...third_party import four_axes, head_norms
from ...windows import bias_by_axis
from ..two_branches import TIMM, register_blocks
from .attention import dropped, fused_heads, scale_of

SHARED = TIMM._replace(takes="shared_rel_pos")
POSITIONS = tuple(f"timm.layers.pos_embed_rel.{name}" for name in ("RelPosBias", "RelPosMlp", "RelPosBiasTf"))


def module_bias(rel_pos: Foreign) -> Tensor:
    """The bias [1, H, N, N] of a module that computes it from its parameters."""
    sources = *rel_pos.parameters(), *rel_pos.buffers()
    kind = sources[0].device.type

    def make() -> Tensor:
        with nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False):  # what is kept outlives it
            return rel_pos.get_bias()

    bias = derived(rel_pos, "bias", sources, make)
    return bias if bias.dim() == 4 else bias[None]


def _reason(self: Foreign) -> str | None:
    """Why an attention with `rel_pos` must run its own forward now, or None."""
    plain = self.rel_pos is None or is_plain_module(self.rel_pos, POSITIONS)
    return dropped(self) if plain else "rel_pos was replaced or has a hook"


@fused_body(
    "timm.models.vision_transformer_relpos.RelPosAttention",
    needs="qkv q_norm k_norm num_heads scale rel_pos attn_drop proj proj_drop",
)
def rel_pos_parts(self: Foreign, shared_rel_pos: Tensor | None = None) -> Body | str:
    """Parts of an attention with relative positions, of the module or shared by the model."""
    if (why := _reason(self)) is not None:
        return why
    bias = four_axes(shared_rel_pos) if self.rel_pos is None else module_bias(self.rel_pos)
    norms = head_norms(self)
    return attention_body(
        (self.qkv,), self.proj, self.num_heads, scale_of(self), bias, norms=norms, drops=(self.proj_drop,)
    )


register_blocks(
    {
        "timm.models.vision_transformer_relpos.RelPosBlock": SHARED._replace(layer_scales=("ls1", "ls2")),
        "timm.models.vision_transformer_relpos.ResPostRelPosBlock": SHARED._replace(post_norms=True),
    }
)


@fused_heads(
    "timm.models.maxxvit.AttentionCl",
    needs="qkv num_heads scale rel_pos head_first attn_drop proj proj_drop",
    reason=_reason,
)
def maxvit_heads(self: Foreign, qkv: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
    """MaxViT's, in windows or grids: [B, ..., 3 · H · D], as [H, 3, D] if heads are first, → [B, ..., H · D]."""
    bias = four_axes(shared_rel_pos) if self.rel_pos is None else module_bias(self.rel_pos)
    if self.head_first:
        q, k, v = qkv.flatten(1, -2).unflatten(-1, (self.num_heads, -1)).transpose(1, 2).chunk(3, -1)
    else:
        q, k, v = heads_of(qkv, self.num_heads)
    return merged_heads(attention(q, k, v, bias, scale_of(self)), qkv.shape[1:-1])


@fused_heads(
    "timm.models.gcvit.WindowAttentionGlobal",
    needs="qkv num_heads scale rel_pos use_global attn_drop proj proj_drop",
    reason=_reason,
)
def gcvit_heads(self: Foreign, qkv: Tensor, q_global: Tensor | None = None) -> Tensor:
    """GCViT's: [B · windows, N, 2 or 3 · H · D] → [B · windows, N, H · D]; queries of the image are [B, h, w, C]."""
    if self.use_global and q_global is not None:
        k, v = heads_of(qkv, self.num_heads, 2)
        q = q_global.repeat_interleave(len(qkv) // len(q_global), 0).flatten(1, 2)
        q = q.unflatten(-1, (self.num_heads, -1)).transpose(1, 2).to(k.dtype)
    else:
        q, k, v = heads_of(qkv, self.num_heads)
    return merged_heads(attention(q, k, v, module_bias(self.rel_pos), scale_of(self)), qkv.shape[1:-1])


@fused_heads(
    "timm.models.swin_transformer_v2_cr.WindowMultiHeadAttention",
    needs="qkv num_heads logit_scale meta_mlp relative_coordinates_log attn_drop proj proj_drop window_size",
)
def swin_cr_heads(self: Foreign, qkv: Tensor, mask: Tensor | None = None) -> Tensor:
    """Swin V2 CR's cosine attention: [B · windows, N, 3 · H · D] → [B · windows, N, H · D]; the mask is by window."""
    q, k, v = heads_of(qkv, self.num_heads)
    scale = self.logit_scale.clamp(max=math.log(1 / 0.01)).exp()[:, None, None]
    q = (F.normalize(q, dim=-1) * scale).to(v.dtype)
    k = F.normalize(k, dim=-1).to(v.dtype)
    bias = self._relative_positional_encodings()  # [1, H, N, N]
    bias = bias if mask is None else bias + mask[:, None]
    return merged_heads(attention(q, k, v, bias, 1.0), qkv.shape[1:-1])


@fused_heads(
    "timm.models.vision_transformer_sam.Attention",
    needs="qkv q_norm k_norm num_heads scale use_rel_pos rope attn_drop proj proj_drop",
    decomposed="use_rel_pos",
)
def sam_heads(self: Foreign, qkv: Tensor) -> Tensor:
    """SAM's on a map, with relative positions by axis, or rotary ones: [B, h, w, 3 · H · D] → [B, h, w, H · D]."""
    grid = qkv.shape[1:3]
    q, k, v = heads_of(qkv, self.num_heads)
    q = normalize(q, self.q_norm)
    k = normalize(k, self.k_norm)
    axes = None
    if self.use_rel_pos:
        axes = bias_by_axis(self, q, grid)
    elif self.rope is not None:
        sin, cos = self.rope.get_embed().chunk(2, -1)
        q, k = (rotate(t, (cos, sin, True), 0).to(v.dtype) for t in (q, k))
    return merged_heads(attention(q, k, v, scale=scale_of(self), axis_bias=axes), grid)
