"""Fused forwards for transformers' detectors: layers of DETR and others, and of Mask2Former; masks and sine positions.

Positions are added to queries and keys, not to values. A part of a layer that was replaced or hooked is called. The sum
with the residual belongs to the last product of a branch. Mask2Former's layers of queries hold [N, B, D], and their
attention to the image sees the places that the previous mask of a query covers. Masks and sine positions take half as
many launches, have the values of the originals, and need no kernel.
"""

from collections.abc import Collection
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....engine.body import finish, normalize, project
from ....engine.freeze import derived, keeps
from ....engine.hooks import are_plain_tensors, can_fuse, has_hooks, has_type, is_recorded
from ....engine.leaves import Foreign, activation_of, is_readable
from ....engine.mlp import MlpBody
from ....kernels.attention import attention
from ....kernels.backend import kernels_available
from ....kernels.linear import linear
from ...forwards import INNER, fused_body, fused_forward, inner_reason, known_type, original
from ...third_party import can_run, classes, four_axes, is_fusable, runs_original
from ..torch import multihead_reason, projected
from ..two_branches import fused_layer
from .deformable import PADDED, WHOLE, sampled, sampled_padded
from .vit import attention_reason

SELF = frozenset(classes("detr.DetrSelfAttention"))
CROSS = frozenset(classes("detr.DetrCrossAttention"))
OLD = frozenset(classes("table_transformer.TableTransformerAttention"))
MLPS = frozenset(classes("detr.DetrMLP"))
INNER |= SELF | CROSS | OLD | MLPS


def attended(owner: Foreign, inputs: tuple[Tensor, Tensor, Tensor], head_dim: int, mask: Any) -> Tensor:
    """Attention of queries, keys and values before the output projection."""
    x, y, z = inputs
    if x is y:
        q, k = projected_together(owner, x, owner.q_proj, owner.k_proj)
    else:
        q, k = project(x, (owner.q_proj,)), project(y, (owner.k_proj,))
    q, k, v = (t.unflatten(-1, (-1, head_dim)).transpose(1, 2) for t in (q, k, project(z, (owner.v_proj,))))
    return attention(q, k, v, mask, owner.scaling).transpose(1, 2).flatten(2)


def projected_together(owner: Foreign, x: Tensor, first: Foreign, second: Foreign) -> tuple[Tensor, Tensor]:
    """Two projections of x, as one product if packed weights are kept, see `freeze`."""
    tensors = first.weight, second.weight, first.bias, second.bias
    readable = is_readable(first) and is_readable(second) and all(t is not None for t in tensors)
    if not readable or not kernels_available(x) or not keeps(owner, *tensors):
        return project(x, (first,)), project(x, (second,))
    weight = derived(owner, "queries and keys", tensors[:2], lambda: torch.cat(tensors[:2]))
    bias = derived(owner, "biases of queries and keys", tensors[2:], lambda: torch.cat(tensors[2:]))
    q, k = linear(x, weight, bias).chunk(2, -1)
    return q, k


def _plus(x: Tensor, positions: Tensor | None) -> Tensor:
    return x if positions is None else x + positions


def added(layer: Foreign, y: Tensor, x: Tensor, self: Foreign) -> Tensor:
    """x + dropout(layer(y)), where the dropout is that of a layer `self`."""
    if self.training and self.dropout > 0:
        return x + F.dropout(layer(y), self.dropout, True)
    return finish(y, layer, residual=x)


def _attend(
    self: Foreign, inner: Foreign, types: Collection[str], x: Tensor, call: dict[str, Any], more: dict[str, Any]
) -> Tensor:
    """x + dropout(attention of x by a module of these types, which is called with these arguments)."""
    mask, memory = call.get("attention_mask"), call.get("key_value_states")
    why = inner_reason((inner, types)) or attention_reason(inner, inner.attention_dropout, mask, None, more)
    if why is not None:
        y, _ = inner(hidden_states=x, **call, **more)
        return x + F.dropout(y, self.dropout, self.training)
    placed = _plus(x, call["position_embeddings"])
    inputs = (placed, placed, x)
    if memory is not None:
        inputs = placed, _plus(memory, call["encoder_position_embeddings"]), memory
    return added(inner.o_proj, attended(inner, inputs, inner.head_dim, four_axes(mask)), x, self)


def _attend_itself(
    self: Foreign, x: Tensor, mask: Tensor | None, positions: Tensor | None, more: dict[str, Any]
) -> Tensor:
    """The norm of x + dropout(self-attention of x)."""
    call = dict(attention_mask=mask, position_embeddings=positions)
    return normalize(_attend(self, self.self_attn, SELF, x, call, more), self.self_attn_layer_norm)


def _sample(self: Foreign, name: str, x: Tensor, call: dict[str, Any]) -> Tensor:
    """x + dropout(deformable attention of x), by the attention of that name in a layer."""
    inner = getattr(self, name)
    read = has_type(inner, WHOLE) and not has_hooks(inner) and not is_recorded(inner)
    y = sampled(inner, x, call) if read else None
    if y is None:
        found, _ = inner(hidden_states=x, **call)
        return x + F.dropout(found, self.dropout, self.training)
    return added(inner.output_proj, y, x, self)


def _mlp_reason(self: Foreign) -> str | None:
    """Why an MLP with dropouts must run its own forward now, or None."""
    dropped = self.training and max(self.activation_dropout, self.dropout) > 0
    return f"dropout {max(self.activation_dropout, self.dropout)}" if dropped else None


@fused_body(*classes("detr.DetrMLP"), needs="fc1 fc2 activation_fn activation_dropout dropout")
def mlp_parts(self: Foreign) -> MlpBody | str:
    """Parts of an MLP with dropouts."""
    return _mlp_reason(self) or MlpBody((self.fc1,), activation_of(self.activation_fn), self.fc2)


def _with_mlp(self: Foreign, x: Tensor) -> Tensor:
    """x + MLP of x."""
    mlp = self.mlp
    if inner_reason((mlp, MLPS)) is not None or _mlp_reason(mlp) is not None:
        return x + mlp(x)
    return MlpBody((mlp.fc1,), activation_of(mlp.activation_fn), mlp.fc2)(x, residual=x)


def finite(self: Foreign, x: Tensor) -> Tensor:
    """In training, large values in place of infinite ones, as the encoder layers have it."""
    if self.training and not torch.isfinite(x).all():
        limit = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-limit, max=limit)
    return x


ENCODER = "self_attn self_attn_layer_norm dropout mlp final_layer_norm"
DECODER = f"{ENCODER} encoder_attn encoder_attn_layer_norm"
PLACES = "reference_points spatial_shapes spatial_shapes_list level_start_index"
TO_IMAGE = "object_queries_position_embeddings encoder_hidden_states encoder_attention_mask"


@fused_layer(
    "post-norm encoder layer",
    *classes("detr.DetrEncoderLayer", "rt_detr.RTDetrEncoderLayer"),
    needs=ENCODER,
    reason=lambda self: "its norms come before its parts" if getattr(self, "normalize_before", False) else None,
)
def encoder_layer(
    self: Foreign, x: Tensor, *, attention_mask: Any = None, spatial_position_embeddings: Any = None, **more: Any
) -> Tensor:
    """Self-attention with positions, norm, MLP, norm; [B, N, D] → [B, N, D]."""
    x = _attend_itself(self, x, attention_mask, spatial_position_embeddings, more)
    return finite(self, normalize(_with_mlp(self, x), self.final_layer_norm))


def _after_cross(self: Foreign, x: Tensor) -> Tensor:
    """The rest of a decoder layer after its attention to the image."""
    x = normalize(x, self.encoder_attn_layer_norm)
    return normalize(_with_mlp(self, x), self.final_layer_norm)


@fused_layer(
    "post-norm decoder layer",
    *classes("detr.DetrDecoderLayer"),
    needs=DECODER,
    takes=f"attention_mask spatial_position_embeddings {TO_IMAGE}",
)
def decoder_layer(
    self: Foreign, x: Tensor, *, attention_mask: Any = None, spatial_position_embeddings: Any = None, **more: Any
) -> Tensor:
    """Self-attention of queries, attention to the image, MLP, with a norm after each; [B, Nq, D] → [B, Nq, D]."""
    positions, memory, mask = (more.pop(name, None) for name in TO_IMAGE.split())
    x = _attend_itself(self, x, attention_mask, positions, more)
    if memory is None:
        return normalize(_with_mlp(self, x), self.final_layer_norm)
    call = dict(key_value_states=memory, attention_mask=mask, position_embeddings=positions)
    call |= dict(encoder_position_embeddings=spatial_position_embeddings)
    return _after_cross(self, _attend(self, self.encoder_attn, CROSS, x, call, more))


def _places(call: dict[str, Any]) -> dict[str, Any]:
    """Reference points and shapes of maps, which are removed from these arguments."""
    return {name: call.pop(name, None) for name in PLACES.split()}


@fused_layer(
    "deformable encoder layer",
    *classes("deformable_detr.DeformableDetrEncoderLayer"),
    needs=ENCODER,
    takes=f"attention_mask spatial_position_embeddings {PLACES}",
)
def deformable_encoder_layer(
    self: Foreign, x: Tensor, *, attention_mask: Any = None, spatial_position_embeddings: Any = None, **more: Any
) -> Tensor:
    """As `encoder_layer`, with deformable attention."""
    call = dict(attention_mask=attention_mask, encoder_hidden_states=x, encoder_attention_mask=attention_mask)
    call |= dict(position_embeddings=spatial_position_embeddings, **_places(more))
    x = normalize(_sample(self, "self_attn", x, call), self.self_attn_layer_norm)
    return finite(self, normalize(_with_mlp(self, x), self.final_layer_norm))


@fused_layer(
    "deformable decoder layer",
    *classes("deformable_detr.DeformableDetrDecoderLayer"),
    needs=DECODER,
    takes=f"{TO_IMAGE} {PLACES}",
)
def deformable_decoder_layer(self: Foreign, x: Tensor, **more: Any) -> Tensor:
    """As `decoder_layer`, with deformable attention to the image."""
    positions, memory, mask = (more.pop(name, None) for name in TO_IMAGE.split())
    call = dict(attention_mask=mask, encoder_hidden_states=memory, encoder_attention_mask=mask)
    call |= dict(position_embeddings=positions, **_places(more))
    return _after_cross(self, _sample(self, "encoder_attn", _attend_itself(self, x, None, positions, more), call))


@fused_layer(
    "deformable decoder layer", *classes("rt_detr.RTDetrDecoderLayer"), needs=DECODER, takes=f"{TO_IMAGE} {PLACES}"
)
def masked_decoder_layer(self: Foreign, x: Tensor, **more: Any) -> Tensor:
    """As `deformable_decoder_layer`, where the mask is that of the queries."""
    positions, memory, mask = (more.pop(name, None) for name in TO_IMAGE.split())
    call = dict(encoder_hidden_states=memory, position_embeddings=positions, **_places(more))
    x = _attend_itself(self, x, mask, positions, more)
    return _after_cross(self, _sample(self, "encoder_attn", x, call | more))


@fused_forward("", *classes("deformable_detr.DeformableDetrDecoder"), checked=False)
def deformable_decoder(self: Foreign, *inputs: Any, **named: Any) -> Any:
    """The queries after each layer, [B, L, Nq, D], lie one layer after another, as the heads read them."""
    found = original(self, *inputs, **named)
    queries = getattr(found, "intermediate_hidden_states", None)
    if isinstance(queries, Tensor) and can_run(queries, self):
        found.intermediate_hidden_states = queries.transpose(0, 1).contiguous().transpose(0, 1)
    return found


def _old_reason(inner: Foreign, x: Tensor, call: dict[str, Any]) -> str | None:
    """Why an attention of Table Transformer must be called now, or None."""
    if (why := inner_reason((inner, OLD))) is not None:
        return why
    memory = call.get("key_value_states")
    if call.get("object_queries") is None or (memory is None) != (call.get("spatial_position_embeddings") is None):
        return "positions are missing"  # its own forward then fails
    if call.get("output_attentions") or (inner.training and inner.dropout > 0):
        return "its attention weights are requested or dropped"
    mask, keys = call.get("attention_mask"), x if memory is None else memory
    fits = mask is None or mask.shape == (x.shape[0], 1, x.shape[1], keys.shape[1])
    return None if fits else "its mask is not [B, 1, N, M]"


def old_attended(inner: Foreign, x: Tensor, call: dict[str, Any]) -> Tensor:
    """Attention of Table Transformer before its output projection, [B, N, D] → [B, N, D]."""
    memory, mask = call.get("key_value_states"), call.get("attention_mask")
    q = x + call["object_queries"]
    k = q if memory is None else memory + call["spatial_position_embeddings"]
    if mask is not None:
        mask = ~mask if mask.dtype == torch.bool else four_axes(mask)  # True is a masked key
    return attended(inner, (q, k, x if memory is None else memory), inner.head_dim, mask)


@fused_forward(
    "attention",
    *classes("table_transformer.TableTransformerAttention"),
    needs="q_proj k_proj v_proj out_proj head_dim scaling dropout",
    takes="attention_mask object_queries key_value_states spatial_position_embeddings output_attentions",
)
def old_attention(self: Foreign, hidden_states: Tensor, **call: Any) -> tuple[Tensor, None]:
    """Self-attention or attention to the image, with positions; ([B, N, D] → [B, N, D], no weights)."""
    if _old_reason(self, hidden_states, call) is not None:
        return NotImplemented
    return finish(old_attended(self, hidden_states, call), self.out_proj), None


def _attend_old(self: Foreign, inner: Foreign, x: Tensor, norm: nn.Module, call: dict[str, Any]) -> Tensor:
    """x + dropout(attention of norm(x))."""
    before = normalize(x, norm)
    if _old_reason(inner, before, call) is not None:
        y, _ = inner(hidden_states=before, **call)
        return x + F.dropout(y, self.dropout, self.training)
    return added(inner.out_proj, old_attended(inner, before, call), x, self)


def own_mlp(self: Foreign, x: Tensor, residual: Tensor) -> Tensor:
    """residual + MLP of x, by the layers of a block."""
    if self.training and max(self.activation_dropout, self.dropout) > 0:
        h = F.dropout(self.activation_fn(self.fc1(x)), self.activation_dropout, True)
        return residual + F.dropout(self.fc2(h), self.dropout, True)
    act = self.activation_fn  # a module, or a function
    act = activation_of(act) if isinstance(act, nn.Module) else "relu" if act is F.relu else act
    return MlpBody((self.fc1,), act, self.fc2)(x, residual=residual)


OWN_MLP = "activation_fn activation_dropout fc1 fc2 final_layer_norm dropout"


@fused_layer(
    "pre-norm encoder layer",
    *classes("table_transformer.TableTransformerEncoderLayer"),
    needs=f"self_attn self_attn_layer_norm {OWN_MLP}",
    takes="attention_mask object_queries output_attentions",
)
def pre_norm_encoder_layer(self: Foreign, x: Tensor, **call: Any) -> Tensor:
    """Norm, self-attention with positions, norm, MLP; [B, N, D] → [B, N, D]."""
    x = _attend_old(self, self.self_attn, x, self.self_attn_layer_norm, call)
    return finite(self, own_mlp(self, normalize(x, self.final_layer_norm), x))


@fused_layer(
    "pre-norm decoder layer",
    *classes("table_transformer.TableTransformerDecoderLayer"),
    needs=f"self_attn self_attn_layer_norm encoder_attn encoder_attn_layer_norm {OWN_MLP}",
    takes="attention_mask object_queries query_position_embeddings encoder_hidden_states encoder_attention_mask "
    "output_attentions",
)
def pre_norm_decoder_layer(
    self: Foreign, x: Tensor, *, encoder_hidden_states: Any = None, encoder_attention_mask: Any = None, **call: Any
) -> Tensor:
    """Self-attention, attention to the image, MLP, with a norm before each; [B, Nq, D] → [B, Nq, D]."""
    if encoder_hidden_states is None:
        return NotImplemented
    mine = dict(object_queries=call.get("query_position_embeddings"), attention_mask=call.get("attention_mask"))
    x = _attend_old(self, self.self_attn, x, self.self_attn_layer_norm, mine)
    mine |= dict(key_value_states=encoder_hidden_states, attention_mask=encoder_attention_mask)
    mine |= dict(spatial_position_embeddings=call.get("object_queries"))
    x = _attend_old(self, self.encoder_attn, x, self.encoder_attn_layer_norm, mine)
    return own_mlp(self, normalize(x, self.final_layer_norm), x)


QUERIES = frozenset(classes("mask2former.Mask2FormerAttention"))
INNER |= QUERIES
QUERY_MLP = "self_attn self_attn_layer_norm fc1 fc2 activation_fn activation_dropout final_layer_norm dropout"


@fused_layer(
    "deformable encoder layer",
    *classes("mask2former.Mask2FormerPixelDecoderEncoderLayer"),  # OneFormer's drops by its configuration's is_training
    needs=QUERY_MLP,
    takes=f"attention_mask position_embeddings {PLACES} output_attentions",
    by_name=True,
)
def pixel_encoder_layer(self: Foreign, x: Tensor, **call: Any) -> Tensor:
    """Deformable attention and an MLP, with a norm after each; [B, N, D] → [B, N, D]."""
    attn = self.self_attn
    if not has_type(attn, PADDED) or has_hooks(attn) or not is_fusable(attn, x):
        return NotImplemented
    found = sampled_padded(attn, x, call | dict(encoder_hidden_states=x))
    if found is None:
        return NotImplemented
    x = normalize(added(attn.output_proj, found[0], x, self), self.self_attn_layer_norm)
    return finite(self, normalize(own_mlp(self, x, x), self.final_layer_norm))


def _query_reason(self: Foreign) -> str | None:
    """Why a layer of queries must run its own forward now, or None."""
    if (why := inner_reason((self.self_attn, QUERIES)) or multihead_reason(self.cross_attn)) is not None:
        return why
    if has_hooks(self.cross_attn) or self.cross_attn.batch_first:
        return "its attention to the image has a hook or another order of axes"
    if self.training and self.self_attn.dropout > 0:
        return f"attention dropout {self.self_attn.dropout}"
    return "its norms come before its parts" if self.pre_norm else None


@fused_layer(
    "post-norm decoder layer",
    *classes("mask2former.Mask2FormerMaskedAttentionDecoderLayer"),
    needs=f"{QUERY_MLP} pre_norm cross_attn cross_attn_layer_norm",
    takes="level_index attention_mask position_embeddings query_position_embeddings encoder_hidden_states "
    "encoder_attention_mask output_attentions",
    reason=_query_reason,
)
def query_layer(self: Foreign, x: Tensor, *, level_index: int, **call: Any) -> Tensor:
    """Attention to the image, self-attention and an MLP, with a norm after each; [Nq, B, D] → [Nq, B, D]."""
    names = "query_position_embeddings", "position_embeddings", "encoder_hidden_states", "encoder_attention_mask"
    positions, places, images, masked = (call.get(name) for name in names)
    if positions is None or places is None or images is None:
        return NotImplemented
    if masked is not None and (masked.dim() != 3 or masked.dtype != torch.bool):
        return NotImplemented
    memory = images[level_index]  # [M, B, D]
    inner: Any = self.cross_attn
    q, k, v = projected(inner, x + positions, memory + places[level_index], memory)
    y = _crossed(q, k, v, inner.num_heads, masked)
    x = normalize(added(inner.out_proj, y, x, self), self.cross_attn_layer_norm)

    attn = self.self_attn
    q, k = projected_together(attn, x + positions, attn.q_proj, attn.k_proj)
    y = _crossed(q, k, project(x, (attn.v_proj,)), attn.num_heads, None, attn.scaling)
    x = normalize(added(attn.out_proj, y, x, self), self.self_attn_layer_norm)
    return normalize(own_mlp(self, x, x), self.final_layer_norm)


def _crossed(q: Tensor, k: Tensor, v: Tensor, heads: int, masked: Tensor | None, scale: float | None = None) -> Tensor:
    """Attention of queries [Nq, B, D] to keys and values [M, B, D]; True in masked [B·H, Nq, M] hides a key."""
    q, k, v = (t.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3) for t in (q, k, v))
    seen = None if masked is None else ~masked.unflatten(0, (-1, heads))
    return attention(q, k, v, seen, scale).permute(2, 0, 1, 3).flatten(2)


POSITION_EPS = 1e-6  # the original's


def _reads(mask: Any, self: Foreign, features: int, dtype: torch.dtype) -> TypeGuard[Tensor]:
    """True if the positions of a mask may be computed here; those without a mask are cached by the original."""
    plain = isinstance(mask, Tensor) and mask.dim() == 3 and are_plain_tensors(mask) and features % 2 == 0
    return plain and can_fuse(mask.new_empty(0, dtype=dtype)) and runs_original(self)


def _positions(self: Foreign, mask: Tensor, dtype: torch.dtype, features: int, centre: float) -> Tensor:
    """Sines and cosines of the place of each pixel among those that are True; [B, H, W] → [B, 2·features, H, W]."""
    inside = mask.to(dtype)
    y, x = inside.cumsum(1), inside.cumsum(2)
    places = torch.stack((y, x), -1)
    if self.normalize:
        last = torch.stack((y[:, -1:].expand_as(y), x[:, :, -1:].expand_as(x)), -1)
        places = (places - centre if centre else places) / (last + POSITION_EPS) * self.scale

    def divisors() -> Tensor:
        return self.temperature ** (torch.arange(0, features, 2, dtype=dtype, device=mask.device) / features)

    name = f"divisors {self.temperature} {features} {dtype} {mask.device}"
    angles = places[..., None] / derived(self, name, (), divisors)
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(3).permute(0, 3, 1, 2)


CENTRED = ("deformable_detr.DeformableDetrSinePositionEmbedding",)  # positions are those of the centres of pixels


@fused_forward(
    "sine positions",
    *classes("detr.DetrSinePositionEmbedding", *CENTRED),
    needs="num_position_features normalize scale temperature",
    checked=False,
)
def sine_positions(
    self: Foreign, shape: torch.Size, device: Any, dtype: torch.dtype, mask: Tensor | None = None
) -> Tensor:
    """Positions in a map of this shape [B, C, H, W]; → [B, D, H, W]."""
    if not _reads(mask, self, self.num_position_features, dtype) or torch.device(device) != mask.device:
        return NotImplemented
    centre = 0.5 if known_type(self) in classes(*CENTRED) else 0.0
    return _positions(self, mask, dtype, self.num_position_features, centre)


@fused_forward(
    "sine positions",
    *classes("table_transformer.TableTransformerSinePositionEmbedding"),
    needs="embedding_dim normalize scale temperature",
    checked=False,
)
def float32_sine_positions(self: Foreign, pixel_values: Tensor, pixel_mask: Tensor | None) -> Tensor:
    """As `sine_positions`, in float32."""
    if not _reads(pixel_mask, self, self.embedding_dim, torch.float32):
        return NotImplemented
    return _positions(self, pixel_mask, torch.float32, self.embedding_dim, 0.0)


@fused_forward("", *classes("detr.DetrConvEncoder", "rt_detr.RTDetrConvEncoder"), needs="model")
def masked_maps(self: Foreign, pixel_values: Tensor, pixel_mask: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Maps of a backbone, each with the mask of its pixels; masks of whole steps are views before their conversion."""
    if not are_plain_tensors(pixel_mask) or pixel_mask.dim() != 3:
        return NotImplemented
    found = self.model(pixel_values)
    maps = getattr(found, "feature_maps", found)
    return [(each, _mask_of(pixel_mask, each.shape[2], each.shape[3])) for each in maps]


def _mask_of(mask: Tensor, height: int, width: int) -> Tensor:
    """Every n-th row and column of a mask [B, H, W], or its nearest values; [B, height, width], boolean."""
    _, H, W = mask.shape
    if H % height or W % width:
        return F.interpolate(mask[None].float(), size=(height, width)).to(torch.bool)[0]
    return mask[:, :: H // height, :: W // width].to(torch.bool, memory_format=torch.contiguous_format)
