"""Fused forwards for transformers' attention with rotary positions: Llama 4, SAM 3, V-JEPA 2, Gemma 4, DeepSeek-OCR 2.

Pixtral's has the reader of `towers`. Where the pairs of channels are none that the kernel rotates, or where keys and
values have fewer heads, PyTorch rotates or repeats them before the attention kernel.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ....engine.attention import attention_body, merged_heads
from ....engine.body import Body
from ....engine.hooks import is_plain_module
from ....engine.leaves import Foreign, activation_of, is_inactive
from ....engine.mlp import MlpBody, gated_mlp_body
from ....kernels.attention import attention
from ....kernels.attention_qkv import attention_qkv, rotate
from ...forwards import fused_body, fused_forward
from ...third_party import classes, four_axes
from .vit import attention_reason

Tables = tuple[Tensor, Tensor] | None
CLIPPABLE = classes("gemma4.Gemma4ClippableLinear", "diffusion_gemma.DiffusionGemmaClippableLinear")


@fused_body(
    *classes("llama4.Llama4VisionAttention"),
    needs="q_proj k_proj v_proj o_proj num_heads head_dim attention_dropout config",
    after=(None,),
)
def llama4_parts(
    self: Foreign,
    freqs_ci: Tensor | None = None,
    attention_mask: object = None,
    past_key_values: object = None,
    **more: object,
) -> Body | str:
    """Parts of Llama 4's attention, which ignores masks and caches; its rotations are complex numbers [N, 1, d / 2]."""
    why = attention_reason(self, self.attention_dropout, None, False, more) or weights_reason(self)
    if why is None and freqs_ci is not None and not freqs_ci.is_complex():
        why = "rotations that are not complex numbers"  # as after model.to(dtype)
    if why is not None:
        return why
    rope = None
    if freqs_ci is not None:
        cos, sin = (t.flatten(1).repeat_interleave(2, -1) for t in (freqs_ci.real, freqs_ci.imag))
        rope = cos, sin, True
    projections = self.q_proj, self.k_proj, self.v_proj
    return attention_body(projections, self.o_proj, self.num_heads, self.head_dim**-0.5, rope=rope)


def weights_reason(self: Foreign) -> str | None:
    """Why an attention must run its own forward if a module around it may return its weights, or None."""
    return "its attention weights may be returned" if self.config._attn_implementation == "eager" else None


@fused_forward(
    "MLP with an activation after it",
    *classes("llama4.Llama4VisionMLP2"),
    needs="fc1 fc2 activation_fn dropout",
    reason=lambda self: f"dropout {self.dropout}" if self.training and self.dropout > 0 else None,
)
def llama4_adapter(self: Foreign, hidden_states: Tensor) -> Tensor:
    """Two layers, each with an activation; [..., K] → [..., F]."""
    return self.activation_fn(MlpBody((self.fc1,), activation_of(self.activation_fn), self.fc2)(hidden_states))


@fused_body(
    *classes("sam3.Sam3ViTRoPEAttention"),
    needs="q_proj k_proj v_proj o_proj num_attention_heads scaling attention_dropout is_causal config",
    after=(None,),
)
def sam3_parts(self: Foreign, position_embeddings: Tables = None, **more: object) -> Body | str:
    """Parts of SAM 3's attention on a map [B, height, width, D]."""
    why = attention_reason(self, self.attention_dropout, None, None, more)
    heads = self.num_attention_heads
    rope = None if position_embeddings is None else (*position_embeddings, True)

    def attend(qkv: Tensor) -> Tensor:
        return attention_qkv(qkv.flatten(1, -2), heads, self.scaling, rope=rope).unflatten(1, qkv.shape[1:-1])

    return why or Body("attention", (self.q_proj, self.k_proj, self.v_proj), attend, self.o_proj, heads)


@fused_body(*classes("sam3.Sam3MLP"), needs="fc1 dropout activation_fn fc2")
def sam3_mlp_parts(self: Foreign) -> MlpBody | str:
    """Parts of SAM 3's MLP."""
    if not is_inactive(self.dropout):
        return "dropout before its activation"
    return MlpBody((self.fc1,), activation_of(self.activation_fn), self.fc2)


@fused_body(
    *classes("vjepa2.VJEPA2RopeAttention"),
    needs="query key value proj num_attention_heads attention_head_size d_dim h_dim w_dim get_position_ids scaling "
    "dropout_prob is_causal config",
    after=(None,),
)
def vjepa2_parts(self: Foreign, position_mask: Tensor | None = None) -> Body | str:
    """Parts of V-JEPA 2's attention, whose tokens may be those of `position_mask` [B, N] only."""
    why = attention_reason(self, self.dropout_prob, None, None, {})
    if why is None and self.attention_head_size % 2:
        why = "heads of odd width"
    heads = self.num_attention_heads

    def attend(qkv: Tensor) -> Tensor:
        return attention_qkv(qkv, heads, self.scaling, rope=(*_video_tables(self, qkv, position_mask), True))

    return why or Body("attention", (self.query, self.key, self.value), attend, self.proj, heads)


def _video_tables(self: Foreign, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """cos and sin for x [B, N, ...]: [N, d], or [B, 1, N, d]; time, height and width rotate a third of the channels."""
    angles = []
    dims = self.d_dim, self.h_dim, self.w_dim
    for dim, ids in zip(dims, self.get_position_ids(x, mask), strict=True):
        omega = torch.arange(dim // 2, dtype=x.dtype, device=x.device) / (dim / 2.0)
        angle = (ids if mask is None else ids[:, :1])[..., None] * (1.0 / 10000**omega)
        angles += [angle, angle]  # not pairs of equal angles, as in the original
    angle = torch.cat(angles, -1)
    padding = 0, self.attention_head_size - sum(dims)
    return nn.functional.pad(angle.cos(), padding, value=1.0), nn.functional.pad(angle.sin(), padding)


def grouped(qkv: Tensor, head_dim: int, groups: int, scale: float, rope: Tables, bias: Tensor | None) -> Tensor:
    """Attention with `groups` heads of queries for each of keys and values; [B, N, F] → [B, N, H·d]."""
    fewer = qkv.shape[-1] // (head_dim * (groups + 2))
    heads = qkv.unflatten(-1, (-1, head_dim)).transpose(1, 2)  # [B, heads of q, k and v, N, d]
    q, k, v = heads.split((groups * fewer, fewer, fewer), 1)
    if rope is not None:
        q, k = (rotate(t, (*rope, False), 0) for t in (q, k))
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    return merged_heads(attention(q, k, v, bias, scale), qkv.shape[1:-1])


def _groups_reason(self: Foreign) -> str | None:
    """Why an attention whose groups of heads are not those of its projections must run its own forward, or None."""
    q, k, v = (getattr(layer, "out_features", None) for layer in (self.q_proj, self.k_proj, self.v_proj))
    groups = self.num_key_value_groups
    if None not in (q, k, v) and k == v and q == groups * k and k % self.head_dim == 0:
        return None
    return f"groups of {groups} heads of {self.head_dim} channels for projections to {q}, {k} and {v}"


@fused_body(
    *classes("deepseek_ocr2.DeepseekOcr2VisionAttention"),
    needs="q_proj k_proj v_proj o_proj head_dim num_key_value_groups scaling attention_dropout config",
    takes="position_embeddings attention_mask past_key_values",
    call=lambda self: {"attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)},  # the encoder always has one
    after=(None,),
)
def deepseek_parts(
    self: Foreign,
    position_embeddings: Tables = None,
    attention_mask: Tensor | None = None,
    past_key_values: object = None,
    position_ids: object = None,
    use_cache: object = None,
    **more: object,
) -> Body | str:
    """Parts of DeepSeek-OCR 2's attention, causal without a mask; it has fewer heads of keys and values."""
    more["past_key_values"] = past_key_values
    why = attention_reason(self, self.attention_dropout, attention_mask, attention_mask is None, more)
    why = why or _groups_reason(self)
    if why is not None:
        return why
    rope = None if position_embeddings is None else (position_embeddings[0][:, None], position_embeddings[1][:, None])
    bias = four_axes(attention_mask)
    groups = self.num_key_value_groups
    width = self.head_dim

    def attend(qkv: Tensor) -> Tensor:
        return grouped(qkv, width, groups, self.scaling, rope, bias)

    projections = (self.q_proj, self.k_proj, self.v_proj)
    heads = self.config.num_attention_heads
    return Body("attention", projections, attend, self.o_proj, heads)


def _unclipped(layer: Foreign) -> Any:
    """The linear layer inside one of Gemma 4's that clips neither inputs nor outputs; else the module itself."""
    plain = is_plain_module(layer, CLIPPABLE) and not layer.use_clipped_linears
    return layer.linear if plain else layer


@fused_body(
    *classes("gemma4.Gemma4VisionAttention"),
    needs="q_proj k_proj v_proj o_proj q_norm k_norm v_norm head_dim num_key_value_groups scaling attention_dropout "
    "is_causal config",
    after=(None,),
)
def gemma4_parts(
    self: Foreign,
    position_embeddings: Tables = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    **more: object,
) -> Body | str:
    """Parts of Gemma 4's attention: norms of queries, keys and values, and positions by axis."""
    why = attention_reason(self, self.attention_dropout, attention_mask, None, more)
    if why is None and self.num_key_value_groups != 1:
        why = "grouped-query attention"
    if why is not None:
        return why
    bias = four_axes(attention_mask)
    norms = (self.q_norm, self.k_norm, self.v_norm)

    def attend(qkv: Tensor) -> Tensor:
        heads = qkv.unflatten(-1, (3, -1, self.head_dim)).unbind(2)
        q, k, v = (norm(t).transpose(1, 2) for norm, t in zip(norms, heads, strict=True))  # [B, H, N, d]
        if position_embeddings is not None and position_ids is not None:
            q, k = (_rotated_by_axis(t, position_embeddings, position_ids.shape[-1]) for t in (q, k))
        return merged_heads(attention(q, k, v, bias, self.scaling), qkv.shape[1:-1])

    projections = tuple(_unclipped(layer) for layer in (self.q_proj, self.k_proj, self.v_proj))
    last = _unclipped(self.o_proj)
    heads = self.config.num_attention_heads
    return Body("attention", projections, attend, last, heads)


def _rotated_by_axis(x: Tensor, tables: tuple[Tensor, Tensor], axes: int) -> Tensor:
    """x [B, H, N, d], of which each axis rotates a part by tables [B, N, d]."""
    cos, sin = (t[:, None] for t in tables)
    first, second = x.unflatten(-1, (axes, -1)).chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1).flatten(-2) * sin


@fused_body(*classes("gemma4.Gemma4VisionMLP"), needs="gate_proj up_proj act_fn down_proj")
def gemma4_mlp_parts(self: Foreign) -> MlpBody | Body:
    """Parts of Gemma 4's gated MLP."""
    gate, up, down = (_unclipped(layer) for layer in (self.gate_proj, self.up_proj, self.down_proj))
    return gated_mlp_body((gate, up), self.act_fn, down)
