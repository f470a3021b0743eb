"""Fused forwards for timm's attention and MLPs: VisionTransformer and its variants, BEiT, EVA and DINOv3, Swin.

Supports timm 0.4 and later; attributes that older releases lack (norms, gates, a second dropout) are optional.
"""

from functools import partial

import torch
from torch import Tensor, nn

from ....engine.attention import attention_body
from ....engine.body import Body, finish, project
from ....engine.freeze import derived
from ....engine.hooks import are_plain_tensors, type_name
from ....engine.leaves import (
    DROPOUTS,
    Foreign,
    Layer,
    Packed,
    activation_of,
    is_identity,
    is_inactive,
    is_readable,
    softmax_reason,
)
from ....engine.mlp import MlpBody, gated_mlp_body
from ....kernels.attention_qkv import attention_qkv
from ....layers.fusable import Fusable
from ...forwards import fused_body, fused_forward
from ...third_party import four_axes, head_norms
from ...windows import table_bias


def dropped(module: Foreign) -> str | None:
    """Why this attention needs dropout on its probabilities, which no kernel has; None if it does not."""
    drop = module.attn_drop
    return (
        None
        if is_inactive(drop)
        else f"attention dropout {drop.p}"
        if type_name(drop) in DROPOUTS
        else "attn_drop has a hook"
    )


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


def _norms(module: Foreign) -> tuple[nn.Module, nn.Module] | None:
    """Norms of queries and keys; None in releases without them."""
    return head_norms(module.q_norm, module.k_norm) if hasattr(module, "q_norm") else None


@fused_body(
    "timm.layers.attention.Attention",
    "timm.models.vision_transformer.Attention",
    needs="qkv num_heads scale attn_drop proj proj_drop",
    takes="attn_mask is_causal",
    attention=True,
)
def attention_parts(self: Foreign, attn_mask: Tensor | None = None, is_causal: bool = False) -> Body | str:
    """Parts of an attention with packed qkv and optional norms of queries, keys and output."""
    return _reason(self, attn_mask, is_causal) or attention_body(
        (self.qkv,),
        self.proj,
        self.num_heads,
        scale_of(self),
        bias=four_axes(attn_mask),
        norms=_norms(self),
        last=_present(self),
        drops=(self.proj_drop,),
        causal=is_causal,
    )


@fused_body(
    "timm.models.metaformer.Attention", needs="qkv num_heads scale attn_drop proj proj_drop", takes="", attention=True
)
def plain_parts(self: Foreign) -> Body | str:
    """Parts of CAFormer's attention."""
    return dropped(self) or attention_body(
        (self.qkv,), self.proj, self.num_heads, scale_of(self), drops=(self.proj_drop,)
    )


@fused_body("timm.models.davit.WindowAttention", needs="qkv num_heads scale softmax proj", takes="", attention=True)
def davit_window_parts(self: Foreign) -> Body | str:
    """Parts of DaViT's attention in windows [B · windows, N, D]."""
    return softmax_reason(self.softmax) or attention_body((self.qkv,), self.proj, self.num_heads, scale_of(self))


@fused_forward(
    "attention of a map",
    "timm.models.fastvit.Attention",
    needs="qkv num_heads scale attn_drop proj proj_drop",
    takes="",
    reason=dropped,
)
def map_attention(self: Foreign, x: Tensor) -> Tensor:
    """FastViT's attention among the tokens of a map; [B, D, H, W] → [B, D, H, W]."""
    o = attention_qkv(project(x.flatten(2).transpose(1, 2), (self.qkv,)), self.num_heads, scale_of(self))
    return finish(o, self.proj, drop=self.proj_drop).transpose(1, 2).unflatten(2, x.shape[2:])


@fused_body("timm.models.nest.Attention", needs="qkv num_heads scale attn_drop proj proj_drop", takes="")
def nest_parts(self: Foreign) -> Body | str:
    """Parts of NesT's attention in blocks [B, blocks, N, D]."""
    between = partial(_nest_heads, self)
    return dropped(self) or Body("attention", (self.qkv,), between, self.proj, self.num_heads, drops=(self.proj_drop,))


def _nest_heads(self: Foreign, qkv: Tensor) -> Tensor:
    """Packed projections [B, blocks, N, 3 · H · D] → [B, blocks, N, D · H], the heads of a channel side by side."""
    o = attention_qkv(qkv.flatten(0, 1), self.num_heads, scale_of(self)).unflatten(0, qkv.shape[:2])
    return o.unflatten(-1, (self.num_heads, -1)).transpose(-1, -2).flatten(-2)


@fused_body(
    "timm.layers.attention.AttentionRope",
    "timm.models.eva.EvaAttention",
    needs="qkv q_proj k_proj v_proj num_heads scale attn_drop norm proj proj_drop",
    takes="rope attn_mask is_causal",
    attention=True,
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
        norms=_norms(self),
        last=_present(self),
        drops=(self.proj_drop,),
        causal=is_causal,
    )


@fused_body(
    "timm.models.beit.Attention",
    needs="qkv q_bias k_bias v_bias num_heads scale relative_position_bias_table relative_position_index attn_drop "
    "proj proj_drop",
    takes="shared_rel_pos_bias",
    attention=True,
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
    takes="mask",
    attention=True,
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
    takes="",
)
def mlp_parts(self: Foreign) -> MlpBody | str:
    """Parts of an MLP: fc1, activation, optional norm, fc2; older releases use one dropout twice."""
    drops = (self.drop1, self.drop2) if hasattr(self, "drop1") else (self.drop, self.drop)
    act = self.act if isinstance(self.act, str) else activation_of(self.act)
    return MlpBody((self.fc1,), act, self.fc2, drops, last=_present(self))


@fused_body(
    "timm.layers.mlp.GluMlp",
    "timm.models.layers.mlp.GluMlp",
    needs="fc1 act gate_last chunk_dim drop1 fc2 drop2",
    takes="",
)
def glu_parts(self: Foreign) -> MlpBody | Body | str:
    """Parts of a gated MLP with gate and value in one layer, gate first."""
    if self.gate_last or self.chunk_dim != -1:
        return "gated by the last half" if self.gate_last else f"halves of axis {self.chunk_dim}"
    return gated_mlp_body((self.fc1,), self.act, self.fc2, (self.drop1, self.drop2), last_norm=_present(self))


@fused_body("timm.layers.mlp.SwiGLU", needs="fc1_g fc1_x act drop1 norm fc2 drop2", takes="")
def swiglu_parts(self: Foreign) -> MlpBody | Body:
    """Parts of a gated MLP with gate and value in two layers, and an optional norm before the last layer."""
    layers = self.fc1_g, self.fc1_x
    return gated_mlp_body(layers, self.act, self.fc2, (self.drop1, self.drop2), last_norm=_present(self))


@fused_body("timm.models.metaformer.MlpHead", needs="fc1 act norm fc2 head_drop", takes="")
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
