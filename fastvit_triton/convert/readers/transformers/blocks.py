"""Fused forwards for the blocks of transformers' vision towers: pre-norm blocks in a table, and nested ones.

A pre-norm block is norm, attention, residual, norm, MLP, residual; the names of its parts differ.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn

from ....engine.attention import attention_body
from ....engine.body import Body
from ....engine.branch import Branch, add_branches
from ....engine.leaves import Foreign, activation_of, is_inactive
from ....engine.mlp import MlpBody
from ...forwards import (
    INNER,
    Forward,
    arguments,
    fused_body,
    fused_forward,
    inner_reason,
    known_type,
    register,
)
from ...third_party import dropout_reason, four_axes
from .vit import attention_reason, checkpointed, classes, heads_reason


class Names(NamedTuple):
    """Names of a block's parts; "" for none, and of two the first is that of the attention's branch.

    Attributes:
        norm1: norm before the attention.
        attn: attention.
        norm2: norm before the MLP.
        mlp: MLP.
        takes: arguments after the first, which the block passes on to its attention with all others that it is given.
        scales: parameters [D] that scale the branches.
        gates: parameters [1] whose tanh scales the branches of a block that `is_gated`.
        drops: dropouts after the branches.
        drop_paths: stochastic depth.
    """

    norm1: str
    attn: str
    norm2: str
    mlp: str
    takes: str = "attention_mask position_embeddings"
    scales: tuple[str, str] = ("", "")
    gates: tuple[str, str] = ("", "")
    drops: tuple[str, str] = ("", "")
    drop_paths: tuple[str, str] = ("", "")

    def needs(self) -> str:
        """The attributes, as `Forward.needs`."""
        parts = self.norm1, self.attn, self.norm2, self.mlp, "is_gated" if any(self.gates) else ""
        return " ".join(filter(None, (*parts, *self.scales, *self.drops, *self.drop_paths)))


CLIP = Names("layer_norm1", "self_attn", "layer_norm2", "mlp")
VIT = Names("layernorm_before", "attention", "layernorm_after", "mlp")
LAMBDAS = VIT._replace(scales=("lambda_1", "lambda_2"))
BLOCKS = {
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
_names: dict[str, list[Names]] = {}  # type → names of its parts, those of the newest release first


@fused_forward("pre-norm block")
def tower_layer(self: Foreign, hidden_states: Tensor, *inputs: Any, **named: Any) -> Tensor:
    """Pre-norm block; [B, N, D] → [B, N, D]."""
    return checkpointed(self, _tower_layer, hidden_states, *inputs, **named)


def _tower_layer(self: Foreign, x: Tensor, *inputs: Any, **named: Any) -> Tensor:
    names = _names_of(self)
    call = dict(zip(arguments(type(self)), inputs, strict=False)) | named
    gates = names.gates if any(names.gates) and self.is_gated else ("", "")
    branches = []
    for i, (norm, body) in enumerate(((names.norm1, names.attn), (names.norm2, names.mlp))):
        scale = getattr(self, gates[i]).tanh().expand(x.shape[-1]) if gates[i] else _part(self, names.scales[i])
        drop = _part(self, names.drops[i])
        drop_path = _part(self, names.drop_paths[i])
        body_call = None if i else call
        branches.append(Branch(_part(self, body), _part(self, norm), None, drop_path, scale, drop, body_call))
    return add_branches(x, *branches, block=self)


def _names_of(self: Foreign) -> Names:
    return next(names for names in _names[known_type(self)] if hasattr(self, names.norm1))


def _part(self: Foreign, name: str) -> Any:
    return getattr(self, name) if name else None


def _folds(self: Foreign) -> list[tuple[nn.Module, nn.Module]]:
    names = _names_of(self)
    return [(_part(self, names.norm1), _part(self, names.attn)), (_part(self, names.norm2), _part(self, names.mlp))]


def register_blocks(blocks: dict[str, Names]) -> None:
    """Registers pre-norm blocks, "model.Class", with the names of their parts."""
    for block, names in blocks.items():
        (name,) = classes(block)
        _names.setdefault(name, []).append(names)
        register((name,), Forward(tower_layer, names.needs(), names.takes, None, "pre-norm block", folds=_folds))


register_blocks(BLOCKS)
register_blocks(
    {"pixio.PixioLayer": Names("norm1", "attention", "norm2", "mlp", drop_paths=("drop_path", "drop_path"))}
)

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


class Biased(NamedTuple):
    """A linear layer whose bias is a parameter of the module around it; it is called."""

    layer: Foreign
    bias: Tensor

    @property
    def weight(self) -> Tensor:
        """That of the linear layer, whose shape is read."""
        return self.layer.weight

    def __call__(self, x: Tensor) -> Tensor:
        """[..., K] → [..., F]."""
        return nn.functional.linear(x, self.layer.weight, self.bias)


def _attention_parts(self: Foreign, *inputs: Any, **named: Any) -> Body | str:
    """Parts of an attention with nested submodules, the second with dropout."""
    call = dict(zip(arguments(type(self)), inputs, strict=False)) | named
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
    q = inner.query
    k = inner.key
    v = inner.value
    if getattr(inner, "q_bias", None) is not None:  # VideoMAE in older releases; keys have none
        q = Biased(q, inner.q_bias)
        v = Biased(v, inner.v_bias)
    return attention_body((q, k, v), outer.dense, heads, scale, mask, drops=(outer.dropout,))


fused_body(*(f"{family}Attention" for family in FAMILIES), needs=PARTS, takes="head_mask")(_attention_parts)
fused_body(
    *(f"{family}Attention" for family in WEIGHTED),
    needs=PARTS,
    takes="attention_mask head_mask output_attentions",
    after=(),
)(_attention_parts)


def _nested_reason(self: Foreign) -> str | None:
    return inner_reason((self.intermediate, INTERMEDIATE), (self.output, OUTPUT))


@fused_forward(
    "pre-norm block",
    *(f"{family}Layer" for family in (*FAMILIES, *WEIGHTED)),
    needs="attention.attention layernorm_before layernorm_after intermediate.dense intermediate.intermediate_act_fn "
    "output.dense output.dropout",
    takes="attention_mask head_mask output_attentions",
    reason=_nested_reason,
    folds=lambda self: [(self.layernorm_before, self.attention), (self.layernorm_after, self.intermediate.dense)],
)
def nested_layer(self: Foreign, hidden_states: Tensor, *inputs: Any, **named: Any) -> Tensor | tuple[Tensor]:
    """Pre-norm block with nested submodules; [B, N, D] → [B, N, D], or a tuple with it."""
    call = dict(zip(arguments(type(self)), inputs, strict=False)) | named
    if call.get("output_attentions"):
        return NotImplemented
    y = checkpointed(self, _nested_layer, hidden_states, **call)
    return (y,) if "output_attentions" in arguments(type(self)) else y


def _nested_layer(self: Foreign, x: Tensor, **call: Any) -> Tensor:
    inner, outer = self.intermediate, self.output
    drops = getattr(inner, "dropout", None), outer.dropout
    mlp = MlpBody((inner.dense,), activation_of(inner.intermediate_act_fn), outer.dense, drops)
    attn = Branch(self.attention, self.layernorm_before, call=call)
    return add_branches(x, attn, Branch(mlp, self.layernorm_after), block=self)
