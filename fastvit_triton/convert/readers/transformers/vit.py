"""Fused forwards for transformers: ViT, DeiT, ViT-MAE, DINOv2 (with registers), DINOv3, CLIP and SigLIP (1 and 2)."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from ....engine.attention import attention_body
from ....engine.body import Body
from ....engine.branch import Branch, add_branches
from ....engine.hooks import has_hooks
from ....engine.leaves import Foreign, activation_of
from ....engine.mlp import MlpBody, gated_mlp_body
from ...forwards import arguments, fused_body, fused_forward
from ...third_party import four_axes
from ..torch import STEMS, cross_attend, multihead_reason
from .attention_interface import NAME, function_reason


def classes(*names: str) -> list[str]:
    """Full names from "model.Class", or "folder.model.Class" where the folder has another name."""
    split = (name.split(".") for name in names)
    return [f"transformers.models.{m[0]}.modeling_{m[-1]}.{c}" for *m, c in split]


PLAIN = classes(
    "vit.ViTAttention",
    "deit.DeiTAttention",
    "vit_mae.ViTMAEAttention",
    "dinov2.Dinov2Attention",
    "dinov2_with_registers.Dinov2WithRegistersAttention",
)


@fused_body(
    *PLAIN,
    *classes("dinov3_vit.DINOv3ViTAttention", "clip.CLIPAttention", "beit.BeitAttention"),
    *classes("siglip.SiglipAttention", "siglip2.Siglip2Attention"),
    needs="q_proj k_proj v_proj o_proj|out_proj num_attention_heads|num_heads scaling|scale attention_dropout|dropout "
    "is_causal config",
    takes="attention_mask position_embeddings is_causal causal_attention_mask output_attentions",
    call=lambda self: {"is_causal": True} if type(self.config).__name__ == "CLIPTextConfig" else {},
    after=(None,),
)
def attention_parts(
    self: Foreign,
    attention_mask: Tensor | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    is_causal: bool | None = None,
    **more: object,
) -> Body | str:
    """Parts of an attention with separate q, k, v; for DINOv3 with RoPE on all but the prefix tokens."""
    drop = self.attention_dropout if hasattr(self, "attention_dropout") else self.dropout
    why = attention_reason(self, drop, attention_mask, False, more)
    kind = self.config._attn_implementation
    causal = (self.is_causal if is_causal is None else is_causal) and attention_mask is None and kind != "eager"
    if causal and kind not in ("sdpa", NAME):  # a mask holds causality, and "eager" has only that of masks
        why = why or "causal mask"
    if why is None and more.get("output_attentions") and "output_attentions" in arguments(type(self)):
        why = "its attention weights are requested"  # in older releases
    if why is not None:
        return why
    rope = None if position_embeddings is None else (*position_embeddings, False)
    return attention_body(
        (self.q_proj, self.k_proj, self.v_proj),
        self.o_proj if hasattr(self, "o_proj") else self.out_proj,
        self.num_attention_heads if hasattr(self, "num_attention_heads") else self.num_heads,
        self.scaling if hasattr(self, "scaling") else self.scale,
        four_axes(attention_mask),
        rope,
        causal=causal,
    )


def heads_reason(self: Foreign) -> str | None:
    """Why an attention whose heads have another width than its projection gives them must run its own forward."""
    facts = self.__dict__
    layers = self.__dict__["_modules"]
    heads = facts.get("num_attention_heads", facts.get("num_heads", facts.get("n_heads")))
    size = facts.get("head_dim", facts.get("attention_head_size", facts.get("key_value_proj_dim")))
    width = next((getattr(layers[n], "out_features", None) for n in ("q_proj", "query", "q") if n in layers), None)
    if width is None and "qkv" in layers and facts.get("q_dim") == facts.get("kv_dim"):
        width = getattr(layers["qkv"], "out_features", 0) // 3 or None
    if heads is None or size is None or width is None or heads * size == width:
        return None
    return f"{heads} heads of {size} channels for a projection to {width}"


def attention_reason(
    self: Foreign, drop: float, attention_mask: object, is_causal: bool | None, more: dict[str, object]
) -> str | None:
    """Why an attention must run its own forward now, or None."""
    if (why := function_reason(self) or heads_reason(self)) is not None:
        return why
    if self.training and drop > 0:
        return f"attention dropout {drop}"
    if self.is_causal if is_causal is None else is_causal:
        return "causal mask"
    if self.config._attn_implementation == "eager" and (self._forward_hooks or has_hooks(self)):
        return "its attention weights have a hook"
    if attention_mask is not None and not (isinstance(attention_mask, Tensor) and attention_mask.dim() == 4):
        return "a mask that is not [B, H, N, N]"
    odd = [n for n, v in more.items() if v is not None and v is not False and not n.startswith(("output_", "return_"))]
    return f"called with {', '.join(odd)}" if odd else None


@fused_body(
    *classes("vit.ViTMLP", "deit.DeiTMLP", "vit_mae.ViTMAEMLP", "dinov2.Dinov2MLP", "clip.CLIPMLP", "siglip.SiglipMLP"),
    *classes("dinov2_with_registers.Dinov2WithRegistersMLP", "siglip2.Siglip2MLP", "beit.BeitMLP", "swin.SwinMLP"),
    needs="fc1 activation_fn|activation fc2",
)
def mlp_parts(self: Foreign) -> MlpBody:
    """Parts of an MLP: fc1, activation, fc2."""
    act = self.activation_fn if hasattr(self, "activation_fn") else self.activation
    return MlpBody((self.fc1,), activation_of(act), self.fc2)


@fused_body(*classes("dinov3_vit.DINOv3ViTMLP"), needs="up_proj act_fn down_proj")
def up_down_parts(self: Foreign) -> MlpBody:
    """Parts of an MLP with DINOv3's names."""
    return MlpBody((self.up_proj,), activation_of(self.act_fn), self.down_proj)


@fused_body(
    *classes(
        "dinov2.Dinov2SwiGLUFFN",
        "dinov2_with_registers.Dinov2WithRegistersSwiGLUFFN",
        "dinov3_vit.DINOv3ViTGatedMLP",
    ),
    needs="gate_proj up_proj act_fn down_proj",
)
def gated_parts(self: Foreign) -> MlpBody | Body:
    """Parts of a gated MLP with gate and value in two layers."""
    return gated_mlp_body((self.gate_proj, self.up_proj), self.act_fn, self.down_proj)


@fused_body(
    *classes("dinov2.Dinov2SwiGLUFFN", "dinov2_with_registers.Dinov2WithRegistersSwiGLUFFN"),
    needs="weights_in weights_out",
)
def packed_gate_parts(self: Foreign) -> MlpBody:
    """Parts of a SwiGLU in older releases: gate and value in one layer, gate first."""
    return MlpBody((self.weights_in,), "swiglu", self.weights_out)


def checkpointed(self: Foreign, forward: Any, *inputs: Any, **named: Any) -> Any:
    """Runs a layer's forward with its class's activation checkpointing (in older releases part of `__call__`)."""
    active = getattr(self, "gradient_checkpointing", False) and self.training
    if active and type(self).__call__ is nn.Module.__call__:
        return self._gradient_checkpointing_func(partial(forward, self, **named), *inputs)
    return forward(self, *inputs, **named)


def _call(attention_mask: Tensor | None, more: dict[str, object]) -> dict[str, object]:
    """Arguments that a layer passes on to its attention, which in some releases takes no mask."""
    return more if attention_mask is None else dict(more, attention_mask=attention_mask)


@fused_forward(
    "pre-norm block",
    *classes("vit.ViTLayer", "deit.DeiTLayer", "vit_mae.ViTMAELayer"),
    needs="attention mlp layernorm_before layernorm_after dropout gradient_checkpointing",
    takes="attention_mask",
    folds=lambda self: [(self.layernorm_before, self.attention), (self.layernorm_after, self.mlp)],
)
def vit_layer(self: Foreign, hidden_states: Tensor, *inputs: Any, **named: Any) -> Tensor:
    """Pre-norm block with a dropout after each branch; [B, N, D] → [B, N, D]."""
    return checkpointed(self, _vit_layer, hidden_states, *inputs, **named)


def _vit_layer(self: Foreign, x: Tensor, attention_mask: Tensor | None = None, **more: object) -> Tensor:
    attn = Branch(self.attention, self.layernorm_before, drop=self.dropout, call=_call(attention_mask, more))
    return add_branches(x, attn, Branch(self.mlp, self.layernorm_after, drop=self.dropout), block=self)


@fused_forward(
    "pre-norm block",
    *classes("dinov2.Dinov2Layer", "dinov2_with_registers.Dinov2WithRegistersLayer", "dinov3_vit.DINOv3ViTLayer"),
    needs="attention norm1 layer_scale1 drop_path norm2 mlp layer_scale2 gradient_checkpointing",
    takes="attention_mask position_embeddings head_mask",
    folds=lambda self: [(self.norm1, self.attention), (self.norm2, self.mlp)],
)
def dino_layer(self: Foreign, hidden_states: Tensor, *inputs: Any, **named: Any) -> Tensor:
    """Pre-norm block with LayerScale; [B, N, D] → [B, N, D]."""
    call = dict(zip(arguments(type(self)), inputs, strict=False)) | named
    return checkpointed(self, _dino_layer, hidden_states, **call)


def _dino_layer(self: Foreign, x: Tensor, attention_mask: Tensor | None = None, **more: object) -> Tensor:
    call = _call(attention_mask, more)
    attn = Branch(self.attention, self.norm1, self.layer_scale1, self.drop_path, call=call)
    return add_branches(x, attn, Branch(self.mlp, self.norm2, self.layer_scale2, self.drop_path), block=self)


@fused_forward(
    "pre-norm block",
    *classes("rf_detr.RfDetrDinov2Layer"),
    needs="attention norm1 layer_scale1 drop_path norm2 mlp layer_scale2 num_windows global_attention "
    "gradient_checkpointing",
    takes="attention_mask",
    folds=lambda self: [(self.norm1, self.attention), (self.norm2, self.mlp)],
)
def windowed_dino_layer(self: Foreign, hidden_states: Tensor, *inputs: Any, **named: Any) -> Tensor:
    """As `dino_layer` for windows [B·W², N, D]; a layer with global attention reads the W² of an image as one."""
    if self.global_attention and _sees_windows(self):
        return NotImplemented
    call = dict(zip(arguments(type(self)), inputs, strict=False)) | named
    windows = hidden_states
    if self.global_attention:
        hidden_states = self.window_unpartition_before_attention(windows)
    return checkpointed(self, _dino_layer, hidden_states, **call).view_as(windows)


def _sees_windows(self: Foreign) -> bool:
    """True if something after the attention needs single windows: stochastic depth, or a hook inside the MLP."""
    drops = self.training and getattr(self.drop_path, "drop_prob", 0.0) > 0
    return drops or any(map(has_hooks, self.mlp.children()))


@fused_forward(
    "pre-norm block",
    *classes("clip.CLIPEncoderLayer", "siglip.SiglipEncoderLayer", "siglip2.Siglip2EncoderLayer"),
    needs="self_attn layer_norm1 layer_norm2 mlp gradient_checkpointing",
    takes="attention_mask causal_attention_mask output_attentions",
    folds=lambda self: [(self.layer_norm1, self.self_attn), (self.layer_norm2, self.mlp)],
)
def clip_layer(self: Foreign, hidden_states: Tensor, *inputs: Any, **named: Any) -> Tensor | tuple[Tensor]:
    """Pre-norm block; [B, N, D] → [B, N, D], in older releases a tuple with it."""
    call = dict(zip(arguments(type(self)), inputs, strict=False)) | named
    tupled = "output_attentions" in arguments(type(self))
    if tupled and call.get("output_attentions"):
        return NotImplemented
    y = checkpointed(self, _clip_layer, hidden_states, **call)
    return (y,) if tupled else y


def _clip_layer(self: Foreign, x: Tensor, attention_mask: Tensor | None = None, **more: object) -> Tensor:
    call = dict(more, attention_mask=attention_mask)  # also None: the attention of a copy may require it
    attn = Branch(self.self_attn, self.layer_norm1, call=call)
    return add_branches(x, attn, Branch(self.mlp, self.layer_norm2), block=self)


def _pooling_reason(self: Foreign) -> str | None:
    return "its attention has a hook" if has_hooks(self.attention) else multihead_reason(self.attention)


@fused_forward(
    "attention pooling",
    *classes("siglip.SiglipMultiheadAttentionPoolingHead", "siglip2.Siglip2MultiheadAttentionPoolingHead"),
    *classes("phi4_multimodal.Phi4MultimodalVisionMultiheadAttentionPoolingHead"),
    needs="probe attention.in_proj_weight layernorm mlp",
    takes="attention_mask",
    reason=_pooling_reason,
    folds=lambda self: [(self.layernorm, self.mlp)],
)
def pooling_head(self: Foreign, hidden_state: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """One learned query attends to all tokens, then an MLP; [B, N, D] → [B, D]."""
    if attention_mask is not None and attention_mask.dim() != 2:
        return NotImplemented
    mask = None if attention_mask is None else attention_mask[:, None, None].bool()  # [B, 1, 1, N]
    query = self.probe.expand(hidden_state.shape[0], -1, -1)
    x = cross_attend(self.attention, query, hidden_state, hidden_state, mask)
    return add_branches(x, Branch(self.mlp, self.layernorm))[:, 0]


STEMS.update(
    dict.fromkeys(
        classes(
            "vit.ViTPatchEmbeddings",
            "deit.DeiTPatchEmbeddings",
            "vit_mae.ViTMAEPatchEmbeddings",
            "dinov2.Dinov2PatchEmbeddings",
            "dinov2_with_registers.Dinov2WithRegistersPatchEmbeddings",
        ),
        "projection",
    )
)
STEMS.update(dict.fromkeys(classes("clip.CLIPVisionEmbeddings", "siglip.SiglipVisionEmbeddings"), "patch_embedding"))
STEMS.update(dict.fromkeys(classes("dinov3_vit.DINOv3ViTEmbeddings"), "patch_embeddings"))
