"""Fused forwards for transformers: ViT, DeiT, ViT-MAE, DINOv2 (with registers), DINOv3, CLIP and SigLIP (1 and 2).

The attention of these in transformers 4, which nests two modules, is in `blocks`.
"""

from typing import Any

from torch import Tensor

from ....engine.attention import attention_body
from ....engine.body import Body
from ....engine.branch import Branch, add_branches
from ....engine.hooks import has_hooks, is_plain_module
from ....engine.leaves import Foreign, activation_of
from ....engine.mlp import MlpBody, gated_mlp_body
from ...forwards import arguments, fused_body, fused_forward
from ...third_party import classes, four_axes
from ..torch import STEMS, cross_attend, multihead_reason
from .attention_interface import NAME, function_reason

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


def first_of(self: Foreign, *names: str) -> Any:
    """The first of these attributes that the module has; None if it has none."""
    return next((getattr(self, name) for name in names if hasattr(self, name)), None)


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


def parts_reason(module: Foreign, family: str, /, **kinds: str) -> str | None:
    """Why a module whose submodules are not of these kinds of a family, "A|B", must run its own forward; or None."""
    for name, kind in kinds.items():
        if not is_plain_module(getattr(module, name), tuple(f"{family}{each}" for each in kind.split("|"))):
            return f"{' or '.join(kinds)} was replaced or has a hook"
    return None


def nested_mlp(inner: Foreign, outer: Foreign) -> MlpBody:
    """Parts of an MLP whose layers are those of its submodules "Intermediate" and "Output"."""
    drops = getattr(inner, "dropout", None), outer.dropout
    return MlpBody((inner.dense,), activation_of(inner.intermediate_act_fn), outer.dense, drops)


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
        "dinov2.Dinov2SwiGLUFFN", "dinov2_with_registers.Dinov2WithRegistersSwiGLUFFN", "dinov3_vit.DINOv3ViTGatedMLP"
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


@fused_forward(
    "attention pooling",
    *classes("siglip.SiglipMultiheadAttentionPoolingHead", "siglip2.Siglip2MultiheadAttentionPoolingHead"),
    *classes("phi4_multimodal.Phi4MultimodalVisionMultiheadAttentionPoolingHead"),
    needs="probe attention.in_proj_weight layernorm mlp",
    reason=lambda self: "its attention has a hook" if has_hooks(self.attention) else multihead_reason(self.attention),
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
