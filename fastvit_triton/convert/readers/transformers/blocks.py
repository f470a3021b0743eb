"""Fused forwards for the blocks of transformers' models: pre-norm blocks in a table, and nested ones."""

from typing import Any

from torch import Tensor

from ....engine.attention import attention_body
from ....engine.body import Body
from ....engine.branch import Branch, add_branches
from ....engine.hooks import has_hooks
from ....engine.leaves import Foreign, Layer, Packed, is_inactive
from ...forwards import INNER, fused_body, inner_reason
from ...third_party import classes, dropout_reason, four_axes
from ..two_branches import Names, added, fused_layer, register_blocks
from .vit import attention_reason, heads_reason, nested_mlp

CLIP = Names("layer_norm1", "self_attn", "layer_norm2", "mlp")
VIT = Names("layernorm_before", "attention", "layernorm_after", "mlp")
LAMBDAS = VIT._replace(scales=("lambda_1", "lambda_2"))
DROPPED = VIT._replace(takes="attention_mask", drops=("dropout", "dropout"), further="gradient_checkpointing")
DINO = Names(
    "norm1",
    "attention",
    "norm2",
    "mlp",
    takes="attention_mask position_embeddings head_mask",
    layer_scales=("layer_scale1", "layer_scale2"),
    drop_paths=("drop_path", "drop_path"),
    further="gradient_checkpointing",
)
BLOCKS = {
    **dict.fromkeys(("vit.ViTLayer", "deit.DeiTLayer", "vit_mae.ViTMAELayer"), DROPPED),
    **dict.fromkeys(
        ("dinov2.Dinov2Layer", "dinov2_with_registers.Dinov2WithRegistersLayer", "dinov3_vit.DINOv3ViTLayer"), DINO
    ),
    **dict.fromkeys(
        ("clip.CLIPEncoderLayer", "siglip.SiglipEncoderLayer", "siglip2.Siglip2EncoderLayer"),
        CLIP._replace(takes="attention_mask causal_attention_mask output_attentions", further="gradient_checkpointing"),
    ),
    "blip.BlipEncoderLayer": CLIP,
    "blip_2.Blip2EncoderLayer": CLIP,
    "mlcd.MLCDEncoderLayer": CLIP,
    "internvl.InternVLVisionLayer": LAMBDAS._replace(drops=("", "dropout")),
    "qianfan_ocr.QianfanOCRVisionLayer": LAMBDAS._replace(
        drops=("", "dropout"), drop_paths=("drop_path1", "drop_path2")
    ),
    "step3p7.Step3p7VisionEncoderLayer": LAMBDAS._replace(attn="self_attn"),
    "mllama.MllamaVisionEncoderLayer": Names(
        "input_layernorm", "self_attn", "post_attention_layernorm", "mlp", gates=("gate_attn", "gate_ffn")
    ),
    "phi4_multimodal.Phi4MultimodalVisionEncoderLayer": CLIP,
    "pixtral.PixtralAttentionLayer": Names("attention_norm", "attention", "ffn_norm", "feed_forward"),
    "aimv2.Aimv2EncoderLayer": Names("rms_norm1", "attention", "rms_norm2", "ffn"),
    "pixio.PixioLayer": VIT._replace(drops=("dropout", "dropout"), drop_paths=("drop_path", "drop_path")),
}  # block → names of its parts


def register_transformers(blocks: dict[str, Names]) -> None:
    """As `register_blocks`, for names "model.Class"."""
    register_blocks(dict(zip(classes(*blocks), blocks.values(), strict=True)))


register_transformers(BLOCKS)
register_transformers({"pixio.PixioLayer": DINO._replace(layer_scales=("", ""), takes=CLIP.takes, further="")})


@fused_layer(
    "pre-norm block",
    *classes("rf_detr.RfDetrDinov2Layer"),
    needs=f"{DINO.needs()} num_windows global_attention",
    takes="attention_mask",
    folds=lambda self: [(self.norm1, self.attention), (self.norm2, self.mlp)],
)
def windowed_dino_layer(self: Foreign, x: Tensor, **call: Any) -> Tensor:
    """As DINOv2's for windows [B·W², N, D]; a layer with global attention reads the W² of an image as one."""
    if self.global_attention and _sees_windows(self):
        return NotImplemented
    y = self.window_unpartition_before_attention(x) if self.global_attention else x
    return added(self, y, DINO, **call).view_as(x)


def _sees_windows(self: Foreign) -> bool:
    """True if something after the attention needs single windows: stochastic depth, or a hook inside the MLP."""
    drops = self.training and getattr(self.drop_path, "drop_prob", 0.0) > 0
    return drops or any(map(has_hooks, self.mlp.children()))


# Nested submodules: "FamilyAttention" has a "FamilySelfAttention" and a "FamilySelfOutput"; a "FamilyLayer" also a
# "FamilyIntermediate" and a "FamilyOutput". Other families run the same code.
FAMILIES = classes("dpt.DPT", "dpt.DPTViT", "videomae.VideoMAE", "yolos.Yolos", "vit.ViT", "deit.DeiT")
FAMILIES += classes("vit_mae.ViTMAE", "dinov2.Dinov2", "dinov2_with_registers.Dinov2WithRegisters")
WEIGHTED = classes("vilt.Vilt", "flava.Flava")  # their attention also returns its weights
SELF, SELF_OUTPUT, INTERMEDIATE, OUTPUT = (
    frozenset(f"{family}{kind}" for family in (*FAMILIES, *WEIGHTED))
    for kind in ("SelfAttention", "SelfOutput", "Intermediate", "Output")
)
INTERMEDIATE |= {*classes("vivit.VivitIntermediate")}  # with a dropout
INNER |= SELF | SELF_OUTPUT | INTERMEDIATE | OUTPUT
PARTS = "attention.query attention.key attention.value attention.num_attention_heads attention.attention_head_size "
PARTS += "output.dense output.dropout attention.dropout_prob|attention.dropout"


@fused_body(*(f"{family}Attention" for family in FAMILIES), needs=PARTS, takes="head_mask")
@fused_body(
    *(f"{family}Attention" for family in WEIGHTED),
    needs=PARTS,
    takes="attention_mask head_mask output_attentions",
    after=(),
)
def nested_parts(self: Foreign, **call: Any) -> Body | str:
    """Parts of an attention with nested submodules, the second with dropout."""
    inner, outer = self.attention, self.output
    why = inner_reason((inner, SELF), (outer, SELF_OUTPUT)) or heads_reason(inner)
    if why is not None:
        return why
    if hasattr(inner, "dropout_prob"):
        why = attention_reason(inner, inner.dropout_prob, None, None, call)
    elif is_inactive(inner.dropout):
        why = "its attention weights are requested" if call.pop("output_attentions", None) else None
        why = why or ("called with head_mask" if call.get("head_mask") is not None else None)
    else:
        why = dropout_reason(inner.dropout, "dropout was replaced or has a hook")
    if why is not None:
        return why
    heads = inner.num_attention_heads
    scale = getattr(inner, "scaling", inner.attention_head_size**-0.5)
    mask = four_axes(call.get("attention_mask"))
    q: Layer = inner.query
    k: Layer = inner.key
    v: Layer = inner.value
    if getattr(inner, "q_bias", None) is not None:  # VideoMAE in older releases, which reads weights; keys have none
        q, v = Packed(q.weight, inner.q_bias), Packed(v.weight, inner.v_bias)
    return attention_body((q, k, v), outer.dense, heads, scale, mask, drops=(outer.dropout,))


@fused_layer(
    "pre-norm block",
    *(f"{family}Layer" for family in (*FAMILIES, *WEIGHTED)),
    needs="attention.attention layernorm_before layernorm_after intermediate.dense intermediate.intermediate_act_fn "
    "output.dense output.dropout",
    takes="attention_mask head_mask output_attentions",
    reason=lambda self: inner_reason((self.intermediate, INTERMEDIATE), (self.output, OUTPUT)),
    folds=lambda self: [(self.layernorm_before, self.attention), (self.layernorm_after, self.intermediate.dense)],
)
def nested_layer(self: Foreign, x: Tensor, **call: Any) -> Tensor:
    """Pre-norm block with nested submodules; [B, N, D] → [B, N, D]."""
    attn = Branch(self.attention, self.layernorm_before, call=call)
    mlp = nested_mlp(self.intermediate, self.output)
    return add_branches(x, attn, Branch(mlp, self.layernorm_after), block=self)
