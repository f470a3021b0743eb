"""Fused forwards for the blocks of transformers' vision towers: pre-norm blocks in a table, and nested ones.

A pre-norm block is norm, attention, residual, norm, MLP, residual; the names of its parts differ.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn

from ...layers.body import AttentionParts, MlpParts
from ...layers.branch import Branch, add_branches
from ...layers.hooks import has_hooks, type_name
from ...layers.module_parts import DROPOUTS, Foreign, activation_of, is_inactive
from ..forwards import INNER, Forward, arguments, fused_body, fused_forward, known_type, original, register
from ..third_party import is_fusable, scores_mask
from .vit import attention_reason, checkpointed, classes


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
_names: dict[str, Names] = {}  # type → names of its parts


@fused_forward("pre-norm block")
def tower_layer(self: Foreign, hidden_states: Tensor, *inputs: Any, **named: Any) -> Tensor:
    """Pre-norm block; [B, N, D] → [B, N, D]."""
    if not is_fusable(self, hidden_states):
        return original(self, hidden_states, *inputs, **named)
    return checkpointed(self, _tower_layer, hidden_states, *inputs, **named)


def _tower_layer(self: Foreign, x: Tensor, *inputs: Any, **named: Any) -> Tensor:
    names = _names[known_type(self)]
    call = dict(zip(arguments(type(self)), inputs, strict=False)) | named
    gates = names.gates if any(names.gates) and self.is_gated else ("", "")
    branches = []
    for i, (norm, body) in enumerate(((names.norm1, names.attn), (names.norm2, names.mlp))):
        scale = getattr(self, gates[i]).tanh().expand(x.shape[-1]) if gates[i] else _part(self, names.scales[i])
        drop, drop_path = _part(self, names.drops[i]), _part(self, names.drop_paths[i])
        given = None if i else call
        branches.append(Branch(_part(self, body), _part(self, norm), None, drop_path, scale, drop, given))
    return add_branches(x, *branches, block=self)


def _part(self: Foreign, name: str) -> Any:
    return getattr(self, name) if name else None


def _folds(self: Foreign) -> list[tuple[nn.Module, nn.Module]]:
    names = _names[known_type(self)]
    return [(_part(self, names.norm1), _part(self, names.attn)), (_part(self, names.norm2), _part(self, names.mlp))]


def register_blocks(blocks: dict[str, Names]) -> None:
    """Registers pre-norm blocks, "model.Class", with the names of their parts."""
    for block, names in blocks.items():
        (name,) = classes(block)
        _names[name] = names
        register((name,), Forward(tower_layer, names.needs(), names.takes, None, "pre-norm block", folds=_folds))


register_blocks(BLOCKS)

PREFIXES = classes("dpt.DPT", "videomae.VideoMAE", "yolos.Yolos", "vilt.Vilt", "flava.Flava", "dpt.DPTViT")
INNER.update(f"{prefix}{kind}" for prefix in PREFIXES for kind in ("SelfAttention", "SelfOutput"))
PLAIN, TUPLE = [PREFIXES[i] for i in (5, 1, 2)], PREFIXES[3:5]  # those that return a tensor, and those a tuple
PARTS = "attention.query attention.key attention.value attention.num_attention_heads attention.attention_head_size "
PARTS += "output.dense output.dropout attention.dropout_prob|attention.dropout"


def _attention_parts(self: Foreign, *given: Any, **named: Any) -> AttentionParts | str:
    """Parts of an attention with nested submodules, the second with dropout."""
    call = dict(zip(arguments(type(self)), given, strict=False)) | named
    inner, outer, home = self.attention, self.output, type(self).__module__
    if not all(type_name(p) in INNER and type(p).__module__ == home and not has_hooks(p) for p in (inner, outer)):
        return "attention or output was replaced or has a hook"
    if hasattr(inner, "dropout_prob"):
        why = attention_reason(inner, inner.dropout_prob, None, None, call)
    elif is_inactive(inner.dropout):
        why = "its attention weights are requested" if call.pop("output_attentions", None) else None
    else:
        known = type_name(inner.dropout) in DROPOUTS
        why = f"attention dropout {inner.dropout.p}" if known else "dropout was replaced or has a hook"
    if why is not None:
        return why
    heads, scale = inner.num_attention_heads, inner.attention_head_size**-0.5
    mask = scores_mask(call.get("attention_mask"))
    return AttentionParts(
        (inner.query, inner.key, inner.value), outer.dense, heads, scale, mask, drops=(outer.dropout,)
    )


fused_body(*(f"{p}Attention" for p in PLAIN), needs=PARTS, takes="", by_name=True)(_attention_parts)
fused_body(
    *(f"{p}Attention" for p in TUPLE), needs=PARTS, takes="attention_mask output_attentions", after=(), by_name=True
)(_attention_parts)


def _nested_reason(self: Foreign) -> str | None:
    home = type(self).__module__
    plain = all(type(p).__module__ == home and not has_hooks(p) for p in (self.intermediate, self.output))
    return None if plain else "intermediate or output was replaced or has a hook"


@fused_forward(
    "pre-norm block",
    *(f"{p}Layer" for p in (*PLAIN, *TUPLE)),
    needs="attention.attention layernorm_before layernorm_after intermediate.dense intermediate.intermediate_act_fn "
    "output.dense output.dropout",
    takes="attention_mask output_attentions",
    reason=_nested_reason,
    folds=lambda self: [(self.layernorm_before, self.attention), (self.layernorm_after, self.intermediate.dense)],
    by_name=True,
)
def nested_layer(self: Foreign, hidden_states: Tensor, *inputs: Any, **named: Any) -> Tensor | tuple[Tensor]:
    """Pre-norm block with nested submodules; [B, N, D] → [B, N, D], or a tuple with it."""
    call = dict(zip(arguments(type(self)), inputs, strict=False)) | named
    if call.get("output_attentions") or not is_fusable(self, hidden_states) or _nested_reason(self) is not None:
        return original(self, hidden_states, *inputs, **named)
    y = checkpointed(self, _nested_layer, hidden_states, **call)
    return (y,) if "output_attentions" in arguments(type(self)) else y


def _nested_layer(self: Foreign, x: Tensor, **call: Any) -> Tensor:
    inner, outer = self.intermediate, self.output
    mlp = MlpParts((inner.dense,), activation_of(inner.intermediate_act_fn), outer.dense, (None, outer.dropout))
    attn = Branch(self.attention, self.layernorm_before, call=call)
    return add_branches(x, attn, Branch(mlp, self.layernorm_after), block=self)
