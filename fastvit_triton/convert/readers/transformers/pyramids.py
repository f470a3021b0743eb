"""Fused forwards for transformers' SegFormer, GLPN, PVT and PVT v2: keys of a smaller map, MLPs with a convolution.

GLPN, PVT, and SegFormer before release 5.10 nest the submodules of an attention: `attention.self`, `attention.output`.
"""

from typing import Any

from torch import Tensor, nn

from ....engine.attention import reduced_body
from ....engine.body import Body
from ....engine.branch import Branch, add_branches
from ....engine.hooks import is_plain_module, type_name
from ....engine.leaves import DROPOUTS, Foreign, Layer, activation_of, is_identity, is_inactive
from ....engine.mlp import MlpBody, depthwise_mlp_body
from ...forwards import INNER, arguments, fused_body, fused_forward
from ..torch import STEMS
from .vit import attention_reason, checkpointed, classes, heads_reason

SEGFORMER, GLPN, PVT, PVT_V2 = classes("segformer.Segformer", "glpn.GLPN", "pvt.Pvt", "pvt_v2.PvtV2")
INNER.update(f"{family}EfficientSelfAttention" for family in (SEGFORMER, GLPN, PVT))
CONVOLUTIONS = [f"{family}{name}Conv" for family in (SEGFORMER, GLPN, PVT_V2) for name in ("DW", "DepthWise")]
STEMS[f"{PVT}PatchEmbeddings"] = "projection"

Grid = tuple[int, int] | None


def _grid(height: int | None, width: int | None) -> Grid:
    """Height and width; None if `optimize` reads the parts, without an input."""
    return None if height is None or width is None else (height, width)


@fused_body(
    f"{SEGFORMER}Attention",
    needs="q_proj k_proj v_proj o_proj num_attention_heads scaling attention_dropout is_causal config "
    "sequence_reduction_ratio",
    takes="height width attention_mask",
    after=(None,),
    by_name=True,
    attention=True,
)
def attention_parts(
    self: Foreign,
    height: int | None = None,
    width: int | None = None,
    attention_mask: Tensor | None = None,
    **more: object,
) -> Body | str:
    """Parts of SegFormer's attention."""
    small: Any = getattr(self, "sequence_reduction", None)
    ratio = self.sequence_reduction_ratio
    if attention_mask is not None:
        return "a mask"
    if ratio > 1 and not is_plain_module(small, (f"{SEGFORMER}SequenceReduction",)):
        return "sequence_reduction was replaced or has a hook"
    if (why := attention_reason(self, self.attention_dropout, None, None, more)) is not None:
        return why
    reduce, norm = (small.sequence_reduction, small.layer_norm) if ratio > 1 else (None, None)
    keys = (self.k_proj, self.v_proj)
    heads = self.num_attention_heads
    grid = _grid(height, width)
    return reduced_body(self.q_proj, keys, self.o_proj, heads, self.scaling, reduce, norm, ratio, grid=grid)


@fused_body(
    f"{SEGFORMER}Attention",
    f"{GLPN}Attention",
    f"{PVT}Attention",
    needs="self.query self.key self.value self.num_attention_heads self.attention_head_size self.dropout "
    "self.sr_ratio|self.sequences_reduction_ratio output.dense output.dropout",
    takes="height width output_attentions",
    after=(),
    by_name=True,
    attention=True,
)
def nested_parts(
    self: Foreign, height: int | None = None, width: int | None = None, output_attentions: bool = False
) -> Body | str:
    """Parts of an attention with nested submodules."""
    family = type_name(self).removesuffix("Attention")
    inner = self.self
    outer = self.output
    types = (f"{family}EfficientSelfAttention",), (f"{family}SelfOutput",)
    if not (is_plain_module(inner, types[0]) and is_plain_module(outer, types[1])):
        return "self or output was replaced or has a hook"
    if (why := _reason(inner, inner.dropout, output_attentions)) is not None:
        return why
    older = hasattr(inner, "sr_ratio")
    ratio = inner.sr_ratio if older else inner.sequences_reduction_ratio
    reduce, norm = (inner.sr if older else inner.sequence_reduction, inner.layer_norm) if ratio > 1 else (None, None)
    return _parts(inner, outer.dense, outer.dropout, reduce, norm, ratio, _grid(height, width))


@fused_body(
    f"{PVT_V2}SelfAttention",
    needs="query key value proj proj_drop attn_drop num_attention_heads attention_head_size spatial_reduction_ratio "
    "linear_attention",
    takes="height width output_attentions",
    after=(),
    by_name=True,
    attention=True,
)
def pvt_v2_parts(
    self: Foreign, height: int | None = None, width: int | None = None, output_attentions: bool = False
) -> Body | str:
    """Parts of PVT v2's attention; with linear attention the map is pooled to 7×7."""
    if (why := _reason(self, self.attn_drop, output_attentions)) is not None:
        return why
    reduce: Any = None
    norm, ratio = None, self.spatial_reduction_ratio
    if self.linear_attention:
        reduce = _Pooled(self.pool, self.spatial_reduction, self.layer_norm, self.act)
    elif ratio > 1:
        reduce, norm = self.spatial_reduction, self.layer_norm
    return _parts(self, self.proj, self.proj_drop, reduce, norm, ratio, _grid(height, width))


def _reason(self: Foreign, dropout: Foreign, output_attentions: bool) -> str | None:
    """Why an attention must run its own forward now, or None."""
    if (why := heads_reason(self)) is not None:
        return why
    if output_attentions:
        return "its weights are requested"
    if is_inactive(dropout):
        return None
    return f"attention dropout {dropout.p}" if type_name(dropout) in DROPOUTS else "attention dropout was replaced"


def _parts(
    inner: Foreign, proj: Layer, drop: nn.Module, reduce: Any, norm: nn.Module | None, ratio: int, grid: Grid
) -> Body:
    heads = inner.num_attention_heads
    scale = inner.attention_head_size**-0.5
    keys = inner.key, inner.value
    return reduced_body(inner.query, keys, proj, heads, scale, reduce, norm, ratio, (drop,), grid)


class _Pooled:
    """Reduction of PVT v2's linear attention: act(norm(conv(pool(x)))); [B, H, W, D] → [B, M, D]."""

    def __init__(self, *modules: nn.Module) -> None:
        self.pool, self.conv, self.norm, self.act = modules

    def __call__(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(self.pool(x.permute(0, 3, 1, 2))).flatten(2).transpose(1, 2)))


@fused_body(
    f"{SEGFORMER}MixMLP",
    f"{SEGFORMER}MixFFN",
    f"{GLPN}MixFFN",
    f"{PVT_V2}ConvFeedForwardNetwork",
    needs="fc1|dense1 dwconv.dwconv activation_fn|intermediate_act_fn fc2|dense2 dropout",
    takes="height width",
    by_name=True,
)
def mix_parts(self: Foreign, height: int | None = None, width: int | None = None) -> Body | str:
    """Parts of an MLP with a depthwise convolution; one dropout is used twice."""
    conv = self.dwconv
    relu = getattr(self, "relu", None)
    if not is_plain_module(conv, CONVOLUTIONS):
        return "dwconv was replaced or has a hook"
    if relu is not None and not is_identity(relu) and activation_of(relu) != "relu":
        return f"{type(relu).__name__} after its first layer"
    new = hasattr(self, "fc1")
    first, last = (self.fc1, self.fc2) if new else (self.dense1, self.dense2)
    act = activation_of(self.activation_fn if new else self.intermediate_act_fn)
    drops = (self.dropout, self.dropout)
    rectified = relu is not None and not is_identity(relu)
    return depthwise_mlp_body(first, conv.dwconv, act, last, drops, rectified, _grid(height, width))


@fused_body(
    f"{PVT}FFN",
    needs="dense1 intermediate_act_fn dense2 dropout",
    takes="",
    by_name=True,
)
def mlp_parts(self: Foreign) -> MlpBody:
    """Parts of PVT's MLP; one dropout is used twice."""
    return MlpBody((self.dense1,), activation_of(self.intermediate_act_fn), self.dense2, (self.dropout, self.dropout))


def _norms(self: Foreign) -> tuple[nn.Module, nn.Module]:
    if hasattr(self, "layernorm_before"):
        return self.layernorm_before, self.layernorm_after
    return self.layer_norm_1, self.layer_norm_2


@fused_forward(
    "pre-norm block",
    *(f"{family}Layer" for family in (SEGFORMER, GLPN, PVT)),
    f"{PVT_V2}BlockLayer",
    needs="attention layernorm_before|layer_norm_1 layernorm_after|layer_norm_2 drop_path mlp",
    takes="height width output_attentions",
    folds=lambda self: zip(_norms(self), (self.attention, self.mlp), strict=True),
    by_name=True,
)
def layer(self: Foreign, hidden_states: Tensor, height: int, width: int, *inputs: Any, **named: Any) -> Any:
    """Pre-norm block on a map given as tokens; [B, H·W, D] → [B, H·W, D], in older releases in a tuple."""
    call = dict(zip(arguments(type(self))[2:], inputs, strict=False)) | named
    new = hasattr(self, "layernorm_before")
    if call.get("output_attentions") and not new:
        return NotImplemented
    x = checkpointed(self, _layer, hidden_states, grid=dict(height=height, width=width), call=call if new else {})
    return x if new else (x,)


def _layer(self: Foreign, x: Tensor, grid: dict[str, int], call: dict[str, Any]) -> Tensor:
    first, second = _norms(self)
    drop = self.drop_path
    outer = getattr(self, "hidden_dropout", None)
    attn = Branch(self.attention, first, None, drop, drop=outer, call=grid | call)
    mlp = Branch(self.mlp, second, None, drop, call={} if type_name(self) == f"{PVT}Layer" else grid)
    return add_branches(x, attn, mlp, block=self)
