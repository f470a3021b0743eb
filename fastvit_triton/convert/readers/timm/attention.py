"""Fused forwards for timm's attention and MLPs: VisionTransformer and its variants, BEiT, EVA and DINOv3, Swin.

Also MLPs gated by a GELU (ViTamin, Gemma 4) or with a global response normalization (ConvNeXt V2, CSATv2), and the
attention of Gemma 4. Supports timm 0.4 and later; attributes that older releases lack (norms, gates, a second dropout)
are optional.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....engine.attention import attention_body
from ....engine.body import Body, finish, project
from ....engine.freeze import derived
from ....engine.hooks import are_plain_tensors, has_hooks, type_name
from ....engine.leaves import Foreign, Layer, Packed, activation_of, is_identity, is_readable, softmax_reason
from ....engine.mlp import MlpBody, gated_mlp_body
from ....kernels.attention import attention
from ....kernels.attention_qkv import attention_qkv
from ....layers.fusable import Fusable
from ...forwards import declared, fused_body, fused_forward
from ...third_party import dropout_reason, four_axes, head_norms
from ...windows import table_bias


def dropped(module: Foreign) -> str | None:
    """Why this attention needs dropout on its probabilities, which no kernel has; None if it does not."""
    return dropout_reason(module.attn_drop, "attn_drop has a hook")


def fused_heads(
    *names: str,
    needs: str,
    kind: str = "attention",
    heads: str = "num_heads",
    reason: Callable[[Any], str | None] | None = dropped,
    keys: Callable[[Any], int] | None = None,
    first: str = "",
    decomposed: str = "",
) -> Callable[[Callable[..., Tensor]], Callable]:
    """Decorator: registers, as `fused_body`, the attention of these types between packed projections and the last one.

    The module's own forward runs if there is a reason; for the further arguments, functions of the module or names of
    attributes, see `Body`.
    """

    def decorate(attend: Callable[..., Tensor]) -> Callable:
        taken = declared(attend, 2) or ""

        @wraps(attend)
        def parts(self: Foreign, *inputs: Any, **named: Any) -> Body | str:
            if reason is not None and (why := reason(self)) is not None:
                return why
            between = partial(attend, self, **dict(zip(taken.split(), inputs, strict=False)), **named)
            number = getattr(self, heads)
            norm, drop = getattr(self, first) if first else None, getattr(self, "proj_drop", None)
            seen, by_axis = 0 if keys is None else keys(self), bool(decomposed and getattr(self, decomposed))
            return Body(kind, (self.qkv,), between, self.proj, number, seen, norm, None, (drop,), by_axis)

        return fused_body(*names, needs=needs, takes=taken)(parts)

    return decorate


def is_own(module: Foreign) -> bool:
    """True for a layer of this package."""
    return isinstance(module, Fusable)


def scale_of(module: Foreign) -> float | None:
    """Scale of the scores; None for 1 / √D, which timm's fused attention takes whatever the attribute says."""
    return None if getattr(module, "fused_attn", False) else module.scale


def _reason(module: Foreign, mask: Tensor | None, is_causal: bool) -> str | None:
    """Why an attention must run its own forward now, or None."""
    if is_causal and mask is not None:
        return "a mask, and causal"
    if getattr(module, "gate", None) is not None:
        return "gated attention"
    if mask is not None and not module.fused_attn:  # releases interpret such a mask differently
        return "a mask without timm's fused attention"
    return dropped(module)


@fused_body(
    "timm.layers.attention.Attention",
    "timm.models.vision_transformer.Attention",
    "timm.models.metaformer.Attention",
    needs="qkv num_heads scale attn_drop proj proj_drop",
)
def attention_parts(self: Foreign, attn_mask: Tensor | None = None, is_causal: bool = False) -> Body | str:
    """Parts of an attention with packed qkv and optional norms of queries, keys and output."""
    return _reason(self, attn_mask, is_causal) or attention_body(
        (self.qkv,),
        self.proj,
        self.num_heads,
        scale_of(self),
        bias=four_axes(attn_mask),
        norms=head_norms(self),
        last=_present(self),
        drops=(self.proj_drop,),
        causal=is_causal,
    )


@fused_body("timm.models.davit.WindowAttention", needs="qkv num_heads scale softmax proj")
def davit_window_parts(self: Foreign) -> Body | str:
    """Parts of DaViT's attention in windows [B · windows, N, D]."""
    return softmax_reason(self.softmax) or attention_body((self.qkv,), self.proj, self.num_heads, scale_of(self))


@fused_forward(
    "attention of a map",
    "timm.models.fastvit.Attention",
    needs="qkv num_heads scale attn_drop proj proj_drop",
    reason=dropped,
)
def map_attention(self: Foreign, x: Tensor) -> Tensor:
    """FastViT's attention among the tokens of a map; [B, D, H, W] → [B, D, H, W]."""
    o = attention_qkv(project(x.flatten(2).transpose(1, 2), (self.qkv,)), self.num_heads, scale_of(self))
    return finish(o, self.proj, drop=self.proj_drop).transpose(1, 2).unflatten(2, x.shape[2:])


@fused_heads("timm.models.nest.Attention", needs="qkv num_heads scale attn_drop proj proj_drop")
def nest_heads(self: Foreign, qkv: Tensor) -> Tensor:
    """NesT's, in blocks: [B, blocks, N, 3 · H · D] → [B, blocks, N, D · H], the heads of a channel side by side."""
    o = attention_qkv(qkv.flatten(0, 1), self.num_heads, scale_of(self)).unflatten(0, qkv.shape[:2])
    return o.unflatten(-1, (self.num_heads, -1)).transpose(-1, -2).flatten(-2)


@fused_body(
    "timm.layers.attention.AttentionRope",
    "timm.models.eva.EvaAttention",
    needs="qkv q_proj k_proj v_proj num_heads scale attn_drop norm proj proj_drop",
)
def rope_parts(
    self: Foreign, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Body | str:
    """Parts of an attention with packed or separate projections and RoPE on all but the prefix tokens."""
    why = _reason(self, attn_mask, is_causal)
    if why is None and getattr(self, "num_kv_groups", 1) > 1:
        why = "grouped-query attention"
    if why is not None:
        return why
    qkv = self.qkv if self.qkv is None else packed_projection(self)
    if isinstance(qkv, str):
        return qkv
    table = None
    if rope is not None:
        sin, cos = rope.chunk(2, -1)
        table = cos, sin, not getattr(self, "rotate_half", False)
    return attention_body(
        (self.q_proj, self.k_proj, self.v_proj) if qkv is None else (qkv,),
        self.proj,
        self.num_heads,
        scale_of(self),
        bias=four_axes(attn_mask),
        rope=table,
        norms=head_norms(self),
        last=_present(self),
        drops=(self.proj_drop,),
        causal=is_causal,
    )


@fused_body(
    "timm.models.beit.Attention",
    needs="qkv q_bias k_bias v_bias num_heads scale relative_position_bias_table relative_position_index attn_drop "
    "proj proj_drop",
)
def beit_parts(self: Foreign, shared_rel_pos_bias: Tensor | None = None) -> Body | str:
    """Parts of an attention with packed qkv and learned relative positions, of the module or shared by the model."""
    why = dropped(self)
    if why is not None:
        return why
    qkv = packed_projection(self)
    if isinstance(qkv, str):
        return qkv
    table = None if self.relative_position_bias_table is None else table_bias(self)[None]
    if shared_rel_pos_bias is not None:
        table = shared_rel_pos_bias if table is None else table + shared_rel_pos_bias
    return attention_body((qkv,), self.proj, self.num_heads, scale_of(self), four_axes(table), drops=(self.proj_drop,))


@fused_body(
    "timm.models.swin_transformer.WindowAttention",
    needs="qkv num_heads scale relative_position_bias_table relative_position_index softmax attn_drop proj proj_drop",
)
def window_parts(self: Foreign, mask: Tensor | None = None) -> Body | str:
    """Parts of a window attention; group g of the bias is window g, with the mask of shifted windows added."""
    why = dropped(self) or softmax_reason(self.softmax)
    if why is not None:
        return why
    bias = table_bias(self)[None]
    bias = bias if mask is None else bias + mask[:, None]  # [windows, H, N, N]
    return attention_body((self.qkv,), self.proj, self.num_heads, scale_of(self), bias, drops=(self.proj_drop,))


@fused_body(
    "timm.layers.mlp.Mlp",
    "timm.models.layers.mlp.Mlp",
    "fastvit_triton.layers.mlp.Mlp",
    "fastvit_triton.models.refiner.ScaledMlp",
    needs="fc1 act drop1|drop fc2 drop2|drop",
)
def mlp_parts(self: Foreign) -> MlpBody | str:
    """Parts of an MLP: fc1, activation, optional norm, fc2; older releases use one dropout twice."""
    drops = (self.drop1, self.drop2) if hasattr(self, "drop1") else (self.drop, self.drop)
    act = self.act if isinstance(self.act, str) else activation_of(self.act)
    return MlpBody((self.fc1,), act, self.fc2, drops, last=_present(self))


@fused_body(
    "timm.layers.mlp.GluMlp", "timm.models.layers.mlp.GluMlp", needs="fc1 act gate_last chunk_dim drop1 fc2 drop2"
)
def glu_parts(self: Foreign) -> MlpBody | Body | str:
    """Parts of a gated MLP with gate and value in one layer, gate first."""
    if self.gate_last or self.chunk_dim != -1:
        return "gated by the last half" if self.gate_last else f"halves of axis {self.chunk_dim}"
    return gated_mlp_body((self.fc1,), self.act, self.fc2, (self.drop1, self.drop2), last_norm=_present(self))


@fused_body("timm.layers.mlp.SwiGLU", needs="fc1_g fc1_x act drop1 norm fc2 drop2")
def swiglu_parts(self: Foreign) -> MlpBody | Body:
    """Parts of a gated MLP with gate and value in two layers, and an optional norm before the last layer."""
    layers = self.fc1_g, self.fc1_x
    return gated_mlp_body(layers, self.act, self.fc2, (self.drop1, self.drop2), last_norm=_present(self))


@fused_body("timm.models.metaformer.MlpHead", needs="fc1 act norm fc2 head_drop")
def head_parts(self: Foreign) -> Body:
    """Parts of CAFormer's head: fc1, activation, norm, dropout, fc2."""
    return Body("MLP head", (self.fc1,), lambda h: self.head_drop(self.norm(self.act(h))), self.fc2)


def _present(self: Foreign) -> nn.Module | None:
    """The norm before the last layer; None in releases without it."""
    norm = getattr(self, "norm", None)
    return None if norm is None or is_identity(norm) else norm


def packed_projection(self: Foreign) -> Layer | str:
    """The packed projection; its bias may be stored as q_bias, k_bias (zeros) and v_bias."""
    if getattr(self, "q_bias", None) is None:
        return self.qkv
    biases = self.q_bias, self.k_bias, self.v_bias
    if not is_readable(self.qkv) or not are_plain_tensors(*biases):
        return "qkv was replaced or has a hook"
    weight = self.qkv.weight
    return Packed(weight, derived(self, "qkv_bias", biases, lambda: torch.cat(biases)), (weight, *biases))


CLIPPABLE = "timm.models.gemma4_vit.Gemma4ClippableLinear"


@fused_body("timm.models.vitamin.GeGluMlp", needs="norm w0 act w1 drop1 w2 drop2")
def vitamin_parts(self: Foreign) -> MlpBody | Body:
    """Parts of ViTamin's gated MLP with its norm."""
    return gated_mlp_body((self.w0, self.w1), self.act, self.w2, (self.drop1, self.drop2), first=self.norm)


def _linears(*layers: Foreign) -> tuple[Layer, ...]:
    """The linear layers inside those of Gemma 4; those that clip, have a hook or are of another type are called."""
    plain = (type_name(layer) == CLIPPABLE and not layer.use_clipped and not has_hooks(layer) for layer in layers)
    return tuple(layer.linear if bare else layer for layer, bare in zip(layers, plain, strict=True))


@fused_body("timm.models.gemma4_vit.Gemma4GatedMlp", needs="gate_proj up_proj down_proj act drop")
def gemma_mlp_parts(self: Foreign) -> MlpBody | Body | str:
    """Parts of Gemma 4's gated MLP."""
    layers = _linears(self.gate_proj, self.up_proj, self.down_proj)
    if not any(map(is_readable, layers)):
        return "its layers are called: they clip their inputs and outputs, were replaced or have a hook"
    return gated_mlp_body(layers[:2], self.act, layers[2], (None, self.drop))


@fused_body(
    "timm.models.gemma4_vit.Gemma4Attention",
    needs="q_proj k_proj v_proj o_proj q_norm k_norm v_norm num_heads num_kv_heads num_kv_groups attn_drop proj_drop",
)
def gemma_parts(
    self: Foreign, rope_cos: Tensor | None = None, rope_sin: Tensor | None = None, attn_mask: Tensor | None = None
) -> Body | str:
    """Parts of Gemma 4's attention, with norms of queries, keys and values, and rotary positions along both axes."""
    if self.num_kv_heads * self.num_kv_groups != self.num_heads:
        return f"{self.num_heads} heads for {self.num_kv_heads} keys of {self.num_kv_groups} heads each"
    *projections, proj = _linears(self.q_proj, self.k_proj, self.v_proj, self.o_proj)
    heads = self.num_heads, self.num_kv_heads, self.num_kv_heads

    def between(qkv: Tensor) -> Tensor:
        """Projections [B, N, (H + 2 · H') · D] → [B, N, H · D], where a key serves H / H' heads."""
        q, k, v = qkv.unflatten(-1, (sum(heads), -1)).split(heads, 2)
        cos, sin = (t.unsqueeze(2) for t in (rope_cos, rope_sin) if t is not None)
        q, k = (_rotated(norm(t), cos, sin).transpose(1, 2) for norm, t in ((self.q_norm, q), (self.k_norm, k)))
        v = self.v_norm(v).transpose(1, 2)
        if self.num_kv_groups > 1:
            k, v = (t.repeat_interleave(self.num_kv_groups, 1) for t in (k, v))
        return attention(q, k, v.to(q.dtype), four_axes(attn_mask), 1.0).transpose(1, 2).flatten(2)

    drops = (self.proj_drop,)
    return dropped(self) or Body("attention", tuple(projections), between, proj, self.num_heads, drops=drops)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of x [B, N, H, D] along two axes, each for half of the channels."""
    first, second = x.unflatten(-1, (2, 2, -1)).unbind(-2)
    return x * cos + torch.stack((-second, first), -2).flatten(-3) * sin


@fused_body("timm.layers.mlp.GlobalResponseNormMlp", needs="fc1 act drop1 grn fc2 drop2")
def response_parts(self: Foreign) -> Body | str:
    """Parts of ConvNeXt V2's MLP of a map [B, H, W, D]: fc1, activation, dropout, normalization, fc2."""
    if not (is_readable(self.fc1) or is_readable(self.fc2)):
        return "its layers are convolutions, were replaced or have a hook"
    return Body("MLP", (self.fc1,), partial(_normalized, self), self.fc2, drops=(self.drop2,))


def _normalized(self: Foreign, h: Tensor) -> Tensor:
    h = self.act(h)
    return self.grn(self.drop1(h) if hasattr(self, "drop1") else h)


@fused_forward(
    "convolution and MLP",
    "timm.models.csatv2.Block",
    needs="dwconv norm pwconv1 act grn pwconv2 ls drop_path attn",
    folds=lambda self: [(self.norm, self.pwconv1)],
)
def csat_block(self: Foreign, x: Tensor) -> Tensor:
    """CSATv2's block: depthwise convolution, MLP, and a map of weights; [B, D, H, W] → [B, D, H, W]."""
    mlp = Body("MLP", (self.pwconv1,), partial(_normalized, self), self.pwconv2, first=self.norm)
    y = mlp(self.dwconv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    weights = F.interpolate(self.attn(y), size=y.shape[2:], mode="bilinear", align_corners=True)
    return x + self.drop_path(self.ls(y * weights))
