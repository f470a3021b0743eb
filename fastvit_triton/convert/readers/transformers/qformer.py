"""Fused forwards for the Q-Former of BLIP-2: post-norm attention, to its own tokens or to the image's, and MLPs."""

from typing import Any

import torch
from torch import Tensor

from ....engine.attention import attention_body
from ....engine.body import finish, normalize, project
from ....engine.hooks import is_plain_module
from ....engine.leaves import Foreign, activation_of
from ....engine.mlp import MlpBody
from ....kernels.attention import attention
from ...forwards import INNER, fused_forward
from ...third_party import four_axes, is_fusable
from .vit import attention_reason, checkpointed, classes

BLIP2 = classes("blip_2.Blip2QFormer")[0]
INNER |= {f"{BLIP2}MultiHeadAttention"}


def _attention_reason(
    self: Foreign, mask: Tensor | None = None, encoder_mask: Tensor | None = None, **more: object
) -> str | None:
    """Why an attention must run its own forward now, or None."""
    inner, outer = self.attention, self.output
    plain = is_plain_module(inner, (f"{BLIP2}MultiHeadAttention",))
    if not (plain and is_plain_module(outer, (f"{BLIP2}SelfOutput",))):
        return "attention or output was replaced or has a hook"
    mask_used = encoder_mask if more.pop("encoder_hidden_states", None) is not None else mask
    return attention_reason(inner, inner.attention_dropout, mask_used, None, more)


@fused_forward(
    "attention with a norm after it",
    f"{BLIP2}Attention",
    needs="attention.query attention.key attention.value attention.num_attention_heads attention.scaling "
    "attention.attention_dropout attention.is_causal attention.config output.dense output.dropout output.LayerNorm",
    takes="attention_mask encoder_hidden_states encoder_attention_mask",
    reason=_attention_reason,
    by_name=True,
    checked=False,
)
def qformer_attention(
    self: Foreign,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    **more: object,
) -> Tensor:
    """norm(x + attention of x to itself or to the image); [B, N, D] → [B, N, D]."""
    call = dict(more, encoder_hidden_states=encoder_hidden_states)
    unusual = _attention_reason(self, attention_mask, encoder_attention_mask, **call) is not None
    images = encoder_hidden_states
    if unusual or not is_fusable(self, hidden_states) or (images is not None and len(images) != len(hidden_states)):
        return NotImplemented
    inner, outer = self.attention, self.output
    heads, scale = inner.num_attention_heads, inner.scaling
    if images is None:
        layers = (inner.query, inner.key, inner.value)
        bias = four_axes(attention_mask)
        parts = attention_body(layers, outer.dense, heads, scale, bias, drops=(outer.dropout,))
        return normalize(parts(hidden_states, residual=hidden_states), outer.LayerNorm)
    k, v = project(images, (inner.key, inner.value)).chunk(2, -1)
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (project(hidden_states, (inner.query,)), k, v))
    o = attention(q, k, v, four_axes(encoder_attention_mask), scale).transpose(1, 2).flatten(2)
    return normalize(finish(o, outer.dense, None, outer.dropout, residual=hidden_states), outer.LayerNorm)


def _pairs(self: Foreign) -> list[tuple[Foreign, Foreign]]:
    """The two layers of each MLP: of the queries, and of text where there is one."""
    pairs = [(self.intermediate_query, self.output_query)]
    return [*pairs, (self.intermediate, self.output)] if hasattr(self, "intermediate") else pairs


def _layer_reason(self: Foreign) -> str | None:
    """Why a layer must run its own forward now, or None."""
    for inner, outer in _pairs(self):
        if not (is_plain_module(inner, (f"{BLIP2}Intermediate",)) and is_plain_module(outer, (f"{BLIP2}Output",))):
            return "a layer of its MLP was replaced or has a hook"
    return "its MLP runs in chunks" if self.chunk_size_feed_forward else None


@fused_forward(
    "post-norm block",
    f"{BLIP2}Layer",
    needs="attention intermediate_query.dense intermediate_query.intermediate_act_fn output_query.dense "
    "output_query.dropout output_query.LayerNorm has_cross_attention chunk_size_feed_forward",
    takes="attention_mask encoder_hidden_states encoder_attention_mask query_length",
    reason=_layer_reason,
    by_name=True,
)
def qformer_layer(self: Foreign, hidden_states: Tensor, *inputs: Any, **named: Any) -> Tensor:
    """Attention among queries and text, attention of queries to the image, MLP; [B, N, D] → [B, N, D]."""
    return checkpointed(self, _qformer_layer, hidden_states, *inputs, **named)


def _qformer_layer(
    self: Foreign,
    x: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    query_length: int = 0,
    **more: Any,
) -> Tensor:
    x = self.attention(hidden_states=x, attention_mask=attention_mask, **more)
    if not query_length:
        return _mlp(x, self.intermediate, self.output)
    queries = x[:, :query_length]
    text = x[:, query_length:]
    if self.has_cross_attention:
        if encoder_hidden_states is None:
            raise ValueError("encoder_hidden_states must be given for cross-attention layers")
        image = dict(encoder_hidden_states=encoder_hidden_states, encoder_attention_mask=encoder_attention_mask)
        queries = self.crossattention(hidden_states=queries, attention_mask=attention_mask, **image, **more)
    queries = _mlp(queries, self.intermediate_query, self.output_query)
    return torch.cat((queries, _mlp(text, self.intermediate, self.output)), 1) if text.shape[1] else queries


def _mlp(x: Tensor, inner: Foreign, outer: Foreign) -> Tensor:
    """norm(x + MLP of x)."""
    parts = MlpBody((inner.dense,), activation_of(inner.intermediate_act_fn), outer.dense, (None, outer.dropout))
    return normalize(parts(x, residual=x), outer.LayerNorm)
