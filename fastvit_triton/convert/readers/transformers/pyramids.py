"""Fused forwards for transformers' models with smaller maps in later stages.

SegFormer, GLPN, PVT and PVT v2 have keys of a smaller map, and MLPs with a convolution; GLPN, PVT, and SegFormer before
release 5.10 nest the submodules of an attention: `attention.self`, `attention.output`. Then Hiera, SAM 2 and Florence-2
(DaViT); CvT, whose queries, keys and values are projections of depthwise convolutions, one launch each with their
BatchNorms, see `engine.batch_norm`; and LeViT, with the functions of timm's, see readers/timm/levit.py.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....engine.attention import heads_of, merged_heads, reduced_body, window_body
from ....engine.batch_norm import normed
from ....engine.body import Body, finish, project
from ....engine.branch import Branch, add_branches
from ....engine.hooks import has_hooks, is_plain_module, type_name
from ....engine.leaves import DROPOUTS, Foreign, Layer, activation_of, is_depthwise_conv, is_identity, is_inactive
from ....engine.mlp import MlpBody, depthwise_mlp_body
from ....kernels.argument import Window
from ....kernels.attention import attention
from ...batch_norm import convolve_depthwise, folded_mlp
from ...forwards import INNER, fused_body, fused_forward
from ...third_party import classes, dropout_reason
from ...windows import attend_pooled, pooled
from ..timm.levit import attend_fewer, attend_narrow
from ..torch import STEMS
from ..two_branches import fused_layer
from .vit import attention_reason, heads_reason, parts_reason

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
    after=(None,),
    by_name=True,
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
    after=(),
    by_name=True,
)
def nested_parts(
    self: Foreign, height: int | None = None, width: int | None = None, output_attentions: bool = False
) -> Body | str:
    """Parts of an attention with nested submodules."""
    family = type_name(self).removesuffix("Attention")
    inner = self.self
    outer = self.output
    why = parts_reason(self, family, self="EfficientSelfAttention", output="SelfOutput")
    if (why := why or _reason(inner, inner.dropout, output_attentions)) is not None:
        return why
    older = hasattr(inner, "sr_ratio")
    ratio = inner.sr_ratio if older else inner.sequences_reduction_ratio
    reduce, norm = (inner.sr if older else inner.sequence_reduction, inner.layer_norm) if ratio > 1 else (None, None)
    return _parts(inner, outer.dense, outer.dropout, reduce, norm, ratio, _grid(height, width))


@fused_body(
    f"{PVT_V2}SelfAttention",
    needs="query key value proj proj_drop attn_drop num_attention_heads attention_head_size spatial_reduction_ratio "
    "linear_attention",
    after=(),
    by_name=True,
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
        conv = self.spatial_reduction
        reduce = partial(pooled, pool=self.pool, conv=conv, norm=self.layer_norm, act=self.act)
    elif ratio > 1:
        reduce, norm = self.spatial_reduction, self.layer_norm
    return _parts(self, self.proj, self.proj_drop, reduce, norm, ratio, _grid(height, width))


def _reason(self: Foreign, dropout: Foreign, output_attentions: bool) -> str | None:
    """Why an attention must run its own forward now, or None."""
    return heads_reason(self) or ("its weights are requested" if output_attentions else dropout_reason(dropout))


def _parts(
    inner: Foreign, proj: Layer, drop: nn.Module, reduce: Any, norm: nn.Module | None, ratio: int, grid: Grid
) -> Body:
    heads = inner.num_attention_heads
    scale = inner.attention_head_size**-0.5
    keys = inner.key, inner.value
    return reduced_body(inner.query, keys, proj, heads, scale, reduce, norm, ratio, (drop,), grid)


@fused_body(
    f"{SEGFORMER}MixMLP",
    f"{SEGFORMER}MixFFN",
    f"{GLPN}MixFFN",
    f"{PVT_V2}ConvFeedForwardNetwork",
    needs="fc1|dense1 dwconv.dwconv activation_fn|intermediate_act_fn fc2|dense2 dropout",
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


@fused_body(f"{PVT}FFN", needs="dense1 intermediate_act_fn dense2 dropout", by_name=True)
def mlp_parts(self: Foreign) -> MlpBody:
    """Parts of PVT's MLP; one dropout is used twice."""
    return MlpBody((self.dense1,), activation_of(self.intermediate_act_fn), self.dense2, (self.dropout, self.dropout))


def _norms(self: Foreign) -> tuple[nn.Module, nn.Module]:
    if hasattr(self, "layernorm_before"):
        return self.layernorm_before, self.layernorm_after
    return self.layer_norm_1, self.layer_norm_2


@fused_layer(
    "pre-norm block",
    *(f"{family}Layer" for family in (SEGFORMER, GLPN, PVT)),
    f"{PVT_V2}BlockLayer",
    needs="attention layernorm_before|layer_norm_1 layernorm_after|layer_norm_2 drop_path mlp",
    takes="height width output_attentions",
    folds=lambda self: zip(_norms(self), (self.attention, self.mlp), strict=True),
    by_name=True,
)
def layer(self: Foreign, x: Tensor, *, height: int, width: int, **more: Any) -> Tensor:
    """Pre-norm block on a map given as tokens; [B, H·W, D] → [B, H·W, D]."""
    grid = dict(height=height, width=width)
    first, second = _norms(self)
    drop = self.drop_path
    outer = getattr(self, "hidden_dropout", None)
    attn = Branch(self.attention, first, None, drop, drop=outer, call=grid | more)
    mlp = Branch(self.mlp, second, None, drop, call={} if type_name(self) == f"{PVT}Layer" else grid)
    return add_branches(x, attn, mlp, block=self)


@fused_body(
    *classes("hiera.HieraMaskUnitAttention"),
    needs="qkv proj num_heads scale query_stride window_size use_mask_unit_attn",
    after=(None,),
)
def hiera_parts(self: Foreign, output_attentions: bool = False) -> Body | str:
    """Parts of Hiera's attention in mask units, whose queries are maxima over `query_stride` tokens."""
    if output_attentions:
        return "its weights are requested"
    heads, stride = self.num_heads, self.query_stride

    def attend(qkv: Tensor) -> Tensor:
        tokens = stride * self.window_size if self.use_mask_unit_attn else qkv.shape[1]
        units = qkv.shape[1] // tokens
        pieces = qkv.unflatten(1, (tokens, units)).transpose(1, 2).flatten(0, 1)  # a unit's tokens are units apart
        q, k, v = heads_of(pieces, heads)
        if stride > 1:
            q = q.unflatten(2, (stride, -1)).max(2).values
        o = attention(q, k, v, None, self.scale).transpose(1, 2).flatten(2)
        return o.unflatten(0, (-1, units)).transpose(1, 2).flatten(1, 2)

    return Body("attention", (self.qkv,), attend, self.proj, heads)


@fused_body(
    *classes("sam2.Sam2MultiScaleAttention"),
    needs="qkv proj num_attention_heads scale query_stride is_causal config",
    takes="",
)
def sam2_parts(self: Foreign, **more: object) -> Body | str:
    """Parts of SAM 2's attention on a map [B, height, width, D], whose queries may be pooled to a smaller one."""
    heads, stride = self.num_attention_heads, self.query_stride
    pool = partial(nn.functional.max_pool2d, kernel_size=stride, stride=stride) if stride else None
    between = partial(attend_pooled, heads=heads, scale=self.scale, pool=pool)
    why = attention_reason(self, 0.0, None, None, more)
    return why or Body("attention", (self.qkv,), between, self.proj, heads)


@fused_body(*classes("sam2.Sam2FeedForward"), needs="proj_in activation layers proj_out sigmoid_output")
def sam2_mlp_parts(self: Foreign) -> MlpBody | str:
    """Parts of SAM 2's MLP, if it has two layers."""
    if len(self.layers) or self.sigmoid_output:
        return "more than two layers, or a sigmoid after them"
    return MlpBody((self.proj_in,), activation_of(self.activation), self.proj_out)


@fused_forward(
    "window attention",
    *classes("florence2.Florence2VisionWindowAttention"),
    needs="qkv proj num_heads scale window_size is_causal config",
    reason=lambda self: attention_reason(self, 0.0, None, None, {}),
)
def florence2_windows(self: Foreign, hidden_states: Tensor) -> Tensor:
    """Attention in separate windows of a map; [B, H, W, D] → [B, H·W, D]."""
    if has_hooks(self.qkv) or has_hooks(self.proj):  # they would see a map instead of windows
        return NotImplemented
    window = Window((self.window_size,) * 2)
    return window_body((self.qkv,), self.proj, self.num_heads, self.scale, window)(hidden_states).flatten(1, 2)


@fused_body(*classes("florence2.Florence2VisionChannelAttention"), needs="qkv proj groups is_causal config")
def florence2_channel_parts(self: Foreign) -> Body | str:
    """Parts of an attention among the channels of a group, whose vectors are as long as the image has tokens."""

    def attend(qkv: Tensor) -> Tensor:
        q, k, v = (t.mT for t in heads_of(qkv, self.groups))  # [B, groups, d, N]
        return attention(q, k, v, None, qkv.shape[1] ** -0.5).mT.transpose(1, 2).flatten(2)

    why = attention_reason(self, 0.0, None, None, {})
    return why or Body("attention", (self.qkv,), attend, self.proj, self.groups)


(CVT,) = classes("cvt.Cvt")
CVT_NAMES = ("query", "key", "value")
INNER.update(f"{CVT}SelfAttention{name}" for name in ("", "Projection", "ConvProjection", "LinearProjection"))
INNER.add(f"{CVT}SelfOutput")


def _cvt_reason(self: Foreign) -> str | None:
    """Why CvT's attention must run its own forward now, or None."""
    drop = self.attention.dropout
    why = parts_reason(self, CVT, attention="SelfAttention", output="SelfOutput")
    if why is not None or is_inactive(drop):
        return why
    return f"attention dropout {drop.p}" if is_plain_module(drop, DROPOUTS) else "attention dropout was replaced"


@fused_body(
    f"{CVT}Attention",
    needs="attention.scale attention.with_cls_token attention.num_heads attention.dropout output.dense output.dropout "
    + " ".join(f"attention.convolution_projection_{n} attention.projection_{n}" for n in CVT_NAMES),
    by_name=True,
)
def cvt_parts(self: Foreign, height: int = 0, width: int = 0) -> Body | str:
    """Parts of CvT's attention; only its last layer is a linear layer of its own."""
    if (why := _cvt_reason(self)) is not None:
        return why
    inner, outer = self.attention, self.output

    def attended(x: Tensor) -> Tensor:
        first = x[:, : int(inner.with_cls_token)]
        image = x[:, first.shape[1] :].unflatten(1, (height, width))  # [B, H, W, D]
        heads: list[Tensor] = []
        for name in CVT_NAMES:
            y = _convolved(getattr(inner, f"convolution_projection_{name}"), image)
            y = torch.cat((first, y), 1) if inner.with_cls_token else y
            heads += heads_of(project(y, (getattr(inner, f"projection_{name}"),)), inner.num_heads, 1)
        q, k, v = heads
        return merged_heads(attention(q, k, v, scale=inner.scale), x.shape[1:-1])

    return Body("attention", (), attended, outer.dense, inner.num_heads, drops=(outer.dropout,))


def _convolved(self: Foreign, image: Tensor) -> Tensor:
    """Depthwise convolution and BatchNorm of a map [B, H, W, D] → tokens [B, M, D]."""
    inner = self.convolution_projection
    last = self.linear_projection
    plain = all(
        is_plain_module(module, (f"{CVT}SelfAttention{kind}Projection",))
        for module, kind in ((self, ""), (inner, "Conv"), (last, "Linear"))
    )
    conv = inner.convolution
    if not plain or not is_depthwise_conv(conv, (1, 2)):
        return self(image.permute(0, 3, 1, 2))
    return convolve_depthwise(image, inner, conv, inner.normalization).flatten(1, 2)


@fused_forward(
    "pre-norm block",
    f"{CVT}Layer",
    needs="attention layernorm_before layernorm_after intermediate.dense intermediate.activation output.dense "
    "output.dropout drop_path",
    reason=lambda self: parts_reason(self, CVT, intermediate="Intermediate", output="Output"),
    folds=lambda self: [(self.layernorm_before, self.attention), (self.layernorm_after, self.intermediate.dense)],
    by_name=True,
)
def cvt_layer(self: Foreign, hidden_state: Tensor, height: int, width: int) -> Tensor:
    """CvT's block, whose stochastic depth also drops the residual of the second branch; [B, N, D] → [B, N, D]."""
    inner = self.intermediate
    outer = self.output
    drop_path = self.drop_path
    mlp = MlpBody((inner.dense,), activation_of(inner.activation), outer.dense, (None, outer.dropout))
    attn = Branch(self.attention, self.layernorm_before, None, drop_path, call=dict(height=height, width=width))
    x = add_branches(hidden_state, attn, Branch(mlp, self.layernorm_after), block=self)
    return x if is_identity(drop_path) else drop_path(x)


(LEVIT,) = classes("levit.Levit")
INNER.update(classes("levit.MLPLayerWithBN"))
LEVIT_NEEDS = (
    "num_attention_heads scale key_dim attention_ratio attention_biases attention_bias_idxs activation projection"
)


@fused_body(f"{LEVIT}Attention", needs=f"queries_keys_values {LEVIT_NEEDS}", by_name=True)
def levit_parts(self: Foreign) -> Body:
    """Parts of LeViT's attention, with an activation before the last layer."""
    heads, width = self.num_attention_heads, self.attention_ratio * self.key_dim

    def between(qkv: Tensor) -> Tensor:
        return self.activation(attend_narrow(self, qkv, heads, width))

    return Body("attention", (normed(self.queries_keys_values),), between, normed(self.projection), heads)


@fused_forward(
    "attention with fewer queries",
    f"{LEVIT}AttentionSubsample",
    needs=f"keys_values queries_subsample queries {LEVIT_NEEDS}",
    by_name=True,
)
def subsample(self: Foreign, hidden_state: Tensor) -> Tensor:
    """LeViT's attention between stages; [B, N, D] → [B, N', D']."""
    kv = project(hidden_state, (normed(self.keys_values),))
    q = project(self.queries_subsample(hidden_state), (normed(self.queries),))
    o = attend_fewer(self, q, kv, self.num_attention_heads, self.attention_ratio * self.key_dim)
    return finish(self.activation(o), normed(self.projection))


@fused_body(f"{LEVIT}MLPLayer", needs="linear_up activation linear_down", by_name=True)
def levit_mlp_parts(self: Foreign) -> MlpBody | str:
    """Parts of LeViT's MLP, with the BatchNorms folded into its layers."""
    return folded_mlp(normed(self.linear_up), self.activation, normed(self.linear_down), (None, None))


@fused_forward(
    "residual",
    f"{LEVIT}ResidualLayer",
    needs="module drop_rate",
    reason=lambda self: f"stochastic depth {self.drop_rate}" if self.training and self.drop_rate > 0 else None,
)
def residual(self: Foreign, hidden_state: Tensor) -> Tensor:
    """x + module(x); [B, N, D] → [B, N, D]."""
    return add_branches(hidden_state, Branch(self.module), block=self)
