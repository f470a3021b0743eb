"""Fused forwards for transformers' towers with plain attention in modules of their own shape.

TimeSformer, MGP-STR, BridgeTower, Phi-4 multimodal, Pix2Struct and Kosmos-2.5, MLPs of Granite Docling and LFM 3 VL
and the Q-Former of BLIP-2: post-norm attention, to its own tokens or to the image's, and MLPs.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from ....engine.attention import attention_body
from ....engine.body import Body, finish, normalize, project
from ....engine.branch import Branch, add_branches
from ....engine.hooks import has_hooks, is_plain_module
from ....engine.leaves import DROP_PATHS, Foreign, activation_of
from ....engine.mlp import MlpBody, gated_mlp_body
from ....engine.replay import call_block
from ....kernels.attention import attention
from ...forwards import INNER, fused_body, fused_forward
from ...third_party import classes, dropout_reason, four_axes, is_fusable
from ..torch import multihead_reason, packed_attention
from ..two_branches import fused_layer
from .rotary import weights_reason
from .vit import attention_reason, nested_mlp, parts_reason

TIMESFORMER, MGP_STR = classes("timesformer.Timesformer", "mgp_str.Mgpstr")
INNER |= {f"{TIMESFORMER}SelfAttention", f"{TIMESFORMER}SelfOutput", f"{MGP_STR}Attention"}
DROP_PATHS |= {f"{TIMESFORMER}DropPath", *classes("mgp_str.MgpStrDropPath")}


@fused_body(
    *classes("timesformer.TimeSformerAttention"),
    needs="attention.qkv attention.num_heads attention.scale attention.attn_drop output.dense output.dropout",
    after=(),
    by_name=True,
)
def timesformer_parts(self: Foreign, output_attentions: bool = False) -> Body | str:
    """Parts of TimeSformer's attention."""
    inner, outer = self.attention, self.output
    why = parts_reason(self, TIMESFORMER, attention="SelfAttention", output="SelfOutput")
    if why is None and output_attentions:
        why = "its weights are requested"
    why = why or dropout_reason(inner.attn_drop)
    return why or attention_body((inner.qkv,), outer.dense, inner.num_heads, inner.scale, drops=(outer.dropout,))


def _timesformer_folds(self: Foreign) -> list[tuple[Foreign, Foreign]]:
    last = self.layernorm_after, self.intermediate.dense
    divided = self.attention_type == "divided_space_time"
    return [last] if divided else [(self.layernorm_before, self.attention), last]


@fused_layer(
    "pre-norm block",
    f"{TIMESFORMER}Layer",
    needs="attention layernorm_before layernorm_after intermediate.dense intermediate.intermediate_act_fn "
    "intermediate.dropout output.dense output.dropout drop_path attention_type config",
    takes="output_attentions",
    reason=lambda self: parts_reason(self, TIMESFORMER, intermediate="Intermediate", output="Output"),
    folds=_timesformer_folds,
    by_name=True,
)
def timesformer_layer(self: Foreign, x: Tensor) -> Tensor:
    """Block with attention over time and then over space, or over both; [B, 1 + h·w·T, D] → [B, 1 + h·w·T, D]."""
    drop = self.drop_path
    mlp = Branch(nested_mlp(self.intermediate, self.output), self.layernorm_after, None, drop)
    if self.attention_type != "divided_space_time":
        return add_branches(x, Branch(self.attention, self.layernorm_before, None, drop), mlp, block=self)
    B = len(x)
    frames = self.config.num_frames
    D = x.shape[-1]
    first = x[:, :1]
    tokens = x[:, 1:]
    pieces = tokens.reshape(-1, frames, D)  # [B·h·w, T, D]
    change = drop(self.temporal_attention(self.temporal_layernorm(pieces))[0])
    tokens = tokens + self.temporal_dense(change.reshape(B, -1, D))
    pieces = tokens.unflatten(1, (-1, frames)).transpose(1, 2).flatten(0, 1)  # [B·T, h·w, D]
    pieces = torch.cat((first.expand(-1, frames, -1).reshape(-1, 1, D), pieces), 1)
    change = drop(self.attention(self.layernorm_before(pieces))[0]).unflatten(0, (B, frames))
    spatial = change[:, :, 1:].transpose(1, 2).flatten(1, 2)
    return add_branches(torch.cat((first + change[:, :, 0].mean(1, True), tokens + spatial), 1), mlp)


def _mgp_str_reason(self: Foreign) -> str | None:
    """Why MGP-STR's encoder must run its own forward now, or None."""
    for block in self.blocks:
        plain = is_plain_module(block, (f"{MGP_STR}Layer",)) and is_plain_module(block.attn, (f"{MGP_STR}Attention",))
        if not plain:
            return "a block or its attention was replaced or has a hook"
        if (why := dropout_reason(block.attn.attn_drop)) is not None:
            return why
    return None


def _mgp_str_block(block: Foreign, x: Tensor) -> Tensor:
    attn = block.attn
    parts = attention_body((attn.qkv,), attn.proj, attn.num_heads, attn.scale, drops=(attn.proj_drop,))
    pair = Branch(parts, block.norm1, None, block.drop_path), Branch(block.mlp, block.norm2, None, block.drop_path)
    return add_branches(x, *pair, block=block)


@fused_forward(
    "encoder of pre-norm blocks",
    f"{MGP_STR}Encoder",
    needs="blocks",
    reason=_mgp_str_reason,
    folds=lambda self: [pair for b in self.blocks for pair in ((b.norm1, b.attn.qkv), (b.norm2, b.mlp))],
    by_name=True,
)
def mgp_str_encoder(
    self: Foreign,
    hidden_states: Tensor,
    output_attentions: bool = False,
    output_hidden_states: bool = False,
    return_dict: bool = True,
) -> Any:
    """All blocks, as an attention does not know whether its weights are requested; [B, N, D] → transformers' output."""
    if output_attentions:
        return NotImplemented
    states = [hidden_states]
    for block in self.blocks:
        states.append(call_block(_mgp_str_block, block, states[-1]))
    all_states = tuple(states) if output_hidden_states else None
    if not return_dict:
        return (states[-1],) if all_states is None else (states[-1], all_states)
    output = sys.modules[type(self).__module__].BaseModelOutput
    return output(last_hidden_state=states[-1], hidden_states=all_states, attentions=None)


def _bridgetower_reason(self: Foreign) -> str | None:
    """Why BridgeTower's block must run its own forward now, or None."""
    mlp = self.mlp
    if type(mlp) is not nn.ModuleDict or tuple(mlp.keys()) != ("c_fc", "gelu", "c_proj"):  # it runs all, in order
        return "mlp was replaced, or has other layers"
    if (why := multihead_reason(self.attn)) is not None:
        return why
    return "batch_first is True, for tokens [N, B, D]" if self.attn.batch_first else None


@fused_forward(
    "pre-norm block",
    *classes("bridgetower.BridgeTowerResidualAttention"),
    needs="attn.in_proj_weight ln_1 ln_2 mlp.c_fc mlp.gelu mlp.c_proj attn_mask",
    reason=_bridgetower_reason,
    folds=lambda self: [(self.ln_1, self.attn), (self.ln_2, self.mlp.c_fc)],
)
def bridgetower_block(self: Foreign, hidden_state: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Pre-norm block of CLIP; [N, B, D] → [N, B, D]."""
    attn, mlp = self.attn, self.mlp
    watched = any(map(has_hooks, (attn, *mlp.values())))  # the hooks would see [B, N, D]
    if watched or attention_mask is not None or self.attn_mask is not None:
        return NotImplemented
    body = MlpBody((mlp.c_fc,), activation_of(mlp.gelu), mlp.c_proj)
    branches = Branch(packed_attention(attn), self.ln_1), Branch(body, self.ln_2)
    return add_branches(hidden_state.transpose(0, 1), *branches, block=self).transpose(0, 1)


@fused_body(
    *classes("pix2struct.Pix2StructVisionAttention", "kosmos2_5.Kosmos2_5VisionAttention"),
    needs="query key value output n_heads scaling dropout is_causal config",
    after=(None,),
)
def pix2struct_parts(self: Foreign, attention_mask: Tensor | None = None, **more: object) -> Body | str:
    """Parts of an attention with the names of T5's layers."""
    if self._forward_hooks or has_hooks(self):
        return "its attention weights have a hook"
    why = attention_reason(self, self.dropout, attention_mask, None, more) or weights_reason(self)
    projections = self.query, self.key, self.value
    return why or attention_body(projections, self.output, self.n_heads, self.scaling, four_axes(attention_mask))


@fused_body(
    *classes("pix2struct.Pix2StructVisionMlp", "kosmos2_5.Kosmos2_5VisionMlp"), needs="wi_0 wi_1 wo dropout act"
)
def pix2struct_mlp_parts(self: Foreign) -> Any:
    """Parts of T5's gated MLP."""
    if self.wo.weight.dtype != self.wi_0.weight.dtype:
        return "its last layer has another dtype"
    return gated_mlp_body((self.wi_0, self.wi_1), self.act, self.wo, (self.dropout, None))


@fused_body(*classes("granite_docling.GraniteDoclingDeepStackMerger"), needs="layer_norm linear_1 act linear_2")
def merger_parts(self: Foreign) -> MlpBody:
    """Parts of an MLP after a norm."""
    return MlpBody((self.linear_1,), activation_of(self.act), self.linear_2, first=self.layer_norm)


@fused_forward(
    "connector", *classes("granite_docling.GraniteDoclingConnector"), needs="ln_in coarse ln_mid mlp_fc2 ln_out"
)
def docling_connector(
    self: Foreign, image_hidden_states: Tensor, deepstack_hidden_states: Any, fine: bool = False
) -> Any:
    """Joins the channels of k×k tokens for an MLP with a norm inside; ([B·M, F], a list of these for inner layers)."""
    path = self.fine if fine else self.coarse
    plain = is_plain_module(path, classes("granite_docling.GraniteDoclingConnectorPath"))
    if not plain:
        return NotImplemented

    def between(h: Tensor) -> Tensor:
        return nn.functional.gelu(normalize(path.pos_embed(h), self.ln_mid))

    joined = path.pixel_shuffle(normalize(image_hidden_states, self.ln_in), path.scale_factor)
    features = normalize(Body("MLP", (path.projection,), between, self.mlp_fc2)(joined), self.ln_out)
    pairs = zip(path.deepstack_mergers, deepstack_hidden_states, strict=False)
    inner = [merger(path.pixel_shuffle(x.contiguous(), path.scale_factor)).flatten(0, 1) for merger, x in pairs]
    return features.flatten(0, 1), inner


@fused_body(*classes("lfm3_vl.Lfm3VlVisionMLP"), needs="w1 w2 w3")
def numbered_parts(self: Foreign) -> MlpBody:
    """Parts of a SwiGLU with LLaMA's names."""
    return MlpBody((self.w1, self.w3), "swiglu", self.w2)


BLIP2 = classes("blip_2.Blip2QFormer")[0]
INNER |= {f"{BLIP2}MultiHeadAttention"}


def _qformer_attention_reason(
    self: Foreign, mask: Tensor | None = None, encoder_mask: Tensor | None = None, **more: object
) -> str | None:
    """Why an attention must run its own forward now, or None."""
    inner = self.attention
    mask_used = encoder_mask if more.pop("encoder_hidden_states", None) is not None else mask
    why = parts_reason(self, BLIP2, attention="MultiHeadAttention", output="SelfOutput")
    return why or attention_reason(inner, inner.attention_dropout, mask_used, None, more)


@fused_forward(
    "attention with a norm after it",
    f"{BLIP2}Attention",
    needs="attention.query attention.key attention.value attention.num_attention_heads attention.scaling "
    "attention.attention_dropout attention.is_causal attention.config output.dense output.dropout output.LayerNorm",
    reason=_qformer_attention_reason,
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
    unusual = _qformer_attention_reason(self, attention_mask, encoder_attention_mask, **call) is not None
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


def _qformer_reason(self: Foreign) -> str | None:
    """Why a layer must run its own forward now, or None."""
    for inner, outer in _pairs(self):
        if not (is_plain_module(inner, (f"{BLIP2}Intermediate",)) and is_plain_module(outer, (f"{BLIP2}Output",))):
            return "a layer of its MLP was replaced or has a hook"
    return "its MLP runs in chunks" if self.chunk_size_feed_forward else None


@fused_layer(
    "post-norm block",
    f"{BLIP2}Layer",
    needs="attention intermediate_query.dense intermediate_query.intermediate_act_fn output_query.dense "
    "output_query.dropout output_query.LayerNorm has_cross_attention chunk_size_feed_forward",
    reason=_qformer_reason,
    by_name=True,
)
def qformer_layer(
    self: Foreign,
    x: Tensor,
    *,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    query_length: int = 0,
    **more: Any,
) -> Tensor:
    """Attention among queries and text, attention of queries to the image, MLP; [B, N, D] → [B, N, D]."""
    x = self.attention(hidden_states=x, attention_mask=attention_mask, **more)
    if not query_length:
        return _qformer_mlp(x, self.intermediate, self.output)
    queries = x[:, :query_length]
    text = x[:, query_length:]
    if self.has_cross_attention:
        if encoder_hidden_states is None:
            raise ValueError("encoder_hidden_states must be given for cross-attention layers")
        image = dict(encoder_hidden_states=encoder_hidden_states, encoder_attention_mask=encoder_attention_mask)
        queries = self.crossattention(hidden_states=queries, attention_mask=attention_mask, **image, **more)
    queries = _qformer_mlp(queries, self.intermediate_query, self.output_query)
    return torch.cat((queries, _qformer_mlp(text, self.intermediate, self.output)), 1) if text.shape[1] else queries


def _qformer_mlp(x: Tensor, inner: Foreign, outer: Foreign) -> Tensor:
    """norm(x + MLP of x)."""
    return normalize(nested_mlp(inner, outer)(x, residual=x), outer.LayerNorm)
