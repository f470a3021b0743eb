"""Fused forwards for the layers of transformers' Mask2Former: of its pixel decoder, and of queries.

The layers of queries hold [N, B, D]. Their attention to the image sees the places that the previous mask of a query
covers.
"""

from typing import Any

import torch
from torch import Tensor

from ....engine.body import normalize, project
from ....engine.hooks import has_hooks, has_type
from ....engine.leaves import Foreign, Packed
from ....kernels.attention import attention
from ...forwards import INNER, arguments, fused_forward, inner_reason
from ...third_party import is_fusable
from ..torch import multihead_reason
from .deformable import PADDED, sampled_padded
from .detr import added, finite, own_mlp, projected_together
from .vit import checkpointed, classes

SELF = frozenset(classes("mask2former.Mask2FormerAttention"))
INNER |= SELF
OWN_MLP = "self_attn self_attn_layer_norm fc1 fc2 activation_fn activation_dropout final_layer_norm dropout"


@fused_forward(
    "deformable encoder layer",
    *classes("mask2former.Mask2FormerPixelDecoderEncoderLayer"),  # OneFormer's drops by its configuration's is_training
    needs=OWN_MLP,
    takes="attention_mask position_embeddings reference_points spatial_shapes spatial_shapes_list level_start_index "
    "output_attentions",
    by_name=True,
)
def pixel_encoder_layer(self: Foreign, hidden_states: Tensor, *inputs: Any, **named: Any) -> tuple[Tensor, ...]:
    """Deformable attention and an MLP, with a norm after each; [B, N, D] → ([B, N, D],)."""
    call = dict(zip(arguments(type(self)), inputs, strict=False)) | named
    y = None if call.pop("output_attentions", False) else _sampled(self.self_attn, hidden_states, call)
    if y is None:
        return NotImplemented
    x = normalize(added(self.self_attn.output_proj, y, hidden_states, self), self.self_attn_layer_norm)
    return (finite(self, normalize(own_mlp(self, x, x), self.final_layer_norm)),)


def _sampled(attn: Foreign, x: Tensor, call: dict[str, Any]) -> Tensor | None:
    """What the attention of a layer projects to its output; None if it must be called."""
    if not has_type(attn, PADDED) or has_hooks(attn) or not is_fusable(attn, x):
        return None
    found = sampled_padded(attn, x, call | dict(encoder_hidden_states=x))
    return None if found is None else found[0]


@fused_forward(
    "post-norm decoder layer",
    *classes("mask2former.Mask2FormerMaskedAttentionDecoderLayer"),
    needs=f"{OWN_MLP} pre_norm cross_attn cross_attn_layer_norm",
    takes="level_index attention_mask position_embeddings query_position_embeddings encoder_hidden_states "
    "encoder_attention_mask output_attentions",
)
def masked_decoder_layer(self: Foreign, hidden_states: Tensor, *inputs: Any, **named: Any) -> tuple[Tensor, ...]:
    """Attention to the image, self-attention and an MLP, with a norm after each; [Nq, B, D] → ([Nq, B, D],)."""
    call = dict(zip(arguments(type(self)), inputs, strict=False)) | named
    if call.pop("output_attentions", False) or self.pre_norm or _reason(self, call) is not None:
        return NotImplemented
    return (checkpointed(self, _masked_decoder_layer, hidden_states, **call),)


def _reason(self: Foreign, call: dict[str, Any]) -> str | None:
    """Why a layer of queries must run its own forward now, or None."""
    if (why := inner_reason((self.self_attn, SELF)) or multihead_reason(self.cross_attn)) is not None:
        return why
    if has_hooks(self.cross_attn) or self.cross_attn.batch_first:
        return "its attention to the image has a hook or another order of axes"
    if self.training and self.self_attn.dropout > 0:
        return f"attention dropout {self.self_attn.dropout}"
    mask = call.get("encoder_attention_mask")
    if mask is not None and (mask.dim() != 3 or mask.dtype != torch.bool):
        return "its mask is not boolean [B·H, N, M]"
    given = (call.get(name) for name in ("query_position_embeddings", "position_embeddings", "encoder_hidden_states"))
    return "positions or the image are missing" if any(t is None for t in given) else None


def _masked_decoder_layer(self: Foreign, x: Tensor, **call: Any) -> Tensor:
    positions, level = call["query_position_embeddings"], call["level_index"]
    memory = call["encoder_hidden_states"][level]  # [M, B, D]
    inner: Foreign = self.cross_attn
    weights = inner.in_proj_weight.chunk(3)
    biases = (None, None, None) if inner.in_proj_bias is None else inner.in_proj_bias.chunk(3)
    read = x + positions, memory + call["position_embeddings"][level], memory
    q, k, v = (project(t, (Packed(w, b),)) for t, w, b in zip(read, weights, biases, strict=True))
    y = _attended(q, k, v, inner.num_heads, call.get("encoder_attention_mask"))
    x = normalize(added(inner.out_proj, y, x, self), self.cross_attn_layer_norm)

    attn = self.self_attn
    q, k = projected_together(attn, x + positions, attn.q_proj, attn.k_proj)
    y = _attended(q, k, project(x, (attn.v_proj,)), attn.num_heads, None, attn.scaling)
    x = normalize(added(attn.out_proj, y, x, self), self.self_attn_layer_norm)
    return normalize(own_mlp(self, x, x), self.final_layer_norm)


def _attended(q: Tensor, k: Tensor, v: Tensor, heads: int, masked: Tensor | None, scale: float | None = None) -> Tensor:
    """Attention of queries [Nq, B, D] to keys and values [M, B, D]; True in masked [B·H, Nq, M] hides a key."""
    q, k, v = (t.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3) for t in (q, k, v))
    seen = None if masked is None else ~masked.unflatten(0, (-1, heads))
    return attention(q, k, v, seen, scale).permute(2, 0, 1, 3).flatten(2)
