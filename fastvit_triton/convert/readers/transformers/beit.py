"""Fused forwards for transformers' BEiT and its copy in data2vec: LayerScale, and biases by relative position.

The copy, and BEiT before release 5.10, nest their submodules: `attention.attention`, `attention.output`,
`intermediate`, `output`.
"""

from typing import Any

import torch
from torch import Tensor

from ....engine.attention import attention_body
from ....engine.body import Body
from ....engine.branch import Branch, add_branches
from ....engine.freeze import derived, index_of
from ....engine.hooks import has_hooks, is_plain_module, type_name
from ....engine.leaves import Foreign
from ...forwards import INNER, fused_body, fused_forward
from ...third_party import classes, dropout_reason, four_axes
from ...windows import expanded
from ..torch import STEMS
from ..two_branches import checkpointed, fused_layer
from .vit import attention_parts, heads_reason, nested_mlp, parts_reason

BEIT, DATA2VEC = FAMILIES = classes("beit.Beit", "data2vec.data2vec_vision.Data2VecVision")
INNER.update(f"{family}{kind}SelfAttention" for family in FAMILIES for kind in ("", "Sdpa"))
BIASES = tuple(f"{family}RelativePositionBias" for family in FAMILIES)
STEMS.update({f"{family}PatchEmbeddings": "projection" for family in FAMILIES})


def _bias(module: Foreign, resolution: tuple[int, int], patch: int, interpolate: bool, tokens: int) -> Tensor:
    """The bias [1, heads, N, N] by relative position; kept while the model is frozen."""
    grid = resolution[0] // patch, resolution[1] // patch
    if has_hooks(module):
        return module(grid, interpolate, dim_size=tokens)
    name = f"bias {grid} {tokens if interpolate else ''}"
    table = module.relative_position_bias_table
    if interpolate or torch.compiler.is_compiling() or not _has_size(module, grid):
        return derived(module, name, (table,), lambda: module(grid, interpolate, dim_size=tokens))
    # the original resizes the table to its own size, and copies the index to the device, in each call
    index = index_of(("BEiT", grid), table.device, lambda: module.generate_relative_position_index(grid))
    return derived(module, name, (table,), lambda: expanded(table, index)[None])


def _has_size(module: Foreign, grid: tuple[int, int]) -> bool:
    """True if the table of biases is that of this square grid."""
    if not is_plain_module(module, BIASES) or grid[0] != grid[1] or grid != tuple(module.window_size):
        return False
    offsets: int = module.num_relative_distance
    return offsets == len(module.relative_position_bias_table) == (2 * grid[0] - 1) ** 2 + 3


@fused_body(
    *(f"{family}Attention" for family in FAMILIES),
    needs="attention.query attention.key attention.value attention.num_attention_heads attention.attention_head_size "
    "attention.dropout attention.has_relative_position_bias attention.config output.dense output.dropout",
    takes="head_mask output_attentions relative_position_bias interpolate_pos_encoding resolution",
    after=(None,),
    by_name=True,
)
def nested_parts(self: Foreign, **call: Any) -> Body | str:
    """Parts of an attention with nested submodules; biases of the block and of the model are added."""
    inner = self.attention
    outer = self.output
    family = type_name(self).removesuffix("Attention")
    why = parts_reason(self, family, attention="SelfAttention|SdpaSelfAttention", output="SelfOutput")
    if (why := why or heads_reason(inner) or dropout_reason(inner.dropout)) is not None:
        return why
    if call.get("output_attentions") or call.get("head_mask") is not None:
        return "its weights are requested, or heads are masked"
    bias = call.get("relative_position_bias")
    resolution = call.get("resolution")
    if inner.has_relative_position_bias and resolution is not None:  # no resolution while `optimize` reads the parts
        if call.get("interpolate_pos_encoding"):
            return "its positions are interpolated"
        own_bias = _bias(inner.relative_position_bias, resolution, inner.config.patch_size, False, 0)
        bias = own_bias if bias is None else own_bias + bias
    projections = (inner.query, inner.key, inner.value)
    scale = inner.attention_head_size**-0.5
    heads = inner.num_attention_heads
    drops = (outer.dropout,)
    return attention_body(projections, outer.dense, heads, scale, four_axes(bias), drops=drops)


@fused_layer(
    "pre-norm block",
    f"{BEIT}Layer",
    needs="attention.q_proj layernorm_before layernorm_after mlp dropout drop_path lambda_1 lambda_2 patch_size "
    "relative_position_bias",
    folds=lambda self: [(self.layernorm_before, self.attention), (self.layernorm_after, self.mlp)],
    by_name=True,
)
def layer(
    self: Foreign,
    x: Tensor,
    *,
    attention_mask: Tensor | None = None,
    interpolate_pos_encoding: bool = False,
    resolution: Any = None,
    **more: Any,
) -> Tensor:
    """Pre-norm block with LayerScale and a bias by relative position; [B, N, D] → [B, N, D]."""
    bias = None
    if self.relative_position_bias is not None:
        bias = _bias(self.relative_position_bias, resolution, self.patch_size, interpolate_pos_encoding, x.shape[1])
    attention = self.attention
    call = dict(more)
    forward = getattr(attention.__dict__.get("forward"), "func", None)
    ours = attention_mask is None and not has_hooks(attention) and getattr(forward, "reader", None) is attention_parts
    parts = attention_parts(attention, **more) if ours else ""
    if isinstance(parts, str):
        both = bias if attention_mask is None else attention_mask if bias is None else bias + attention_mask
        call |= {} if both is None else {"attention_mask": both}
    else:  # a bias holds no mask, whose values would be replaced
        attention = parts.having(bias=bias)
        call = {}
    lambdas = (t if isinstance(t, Tensor) else None for t in (self.lambda_1, self.lambda_2))
    drop, outer = self.drop_path, self.dropout
    attn = Branch(attention, self.layernorm_before, None, drop, next(lambdas), outer, call)
    return add_branches(x, attn, Branch(self.mlp, self.layernorm_after, None, drop, next(lambdas), outer), block=self)


def _nested_reason(self: Foreign) -> str | None:
    family = type_name(self).removesuffix("Layer")
    return parts_reason(self, family, intermediate="Intermediate", output="Output")


@fused_forward(
    "pre-norm block",
    *(f"{family}Layer" for family in FAMILIES),
    needs="attention.attention layernorm_before layernorm_after intermediate.dense intermediate.intermediate_act_fn "
    "output.dense output.dropout drop_path lambda_1 lambda_2",
    takes="head_mask output_attentions relative_position_bias interpolate_pos_encoding resolution",
    reason=_nested_reason,
    folds=lambda self: [(self.layernorm_before, self.attention), (self.layernorm_after, self.intermediate.dense)],
    by_name=True,
)
def nested_layer(self: Foreign, hidden_states: Tensor, **call: Any) -> tuple[Tensor | None, ...]:
    """As `layer`, with nested submodules; [B, N, D] → ([B, N, D],), or with None where weights are never returned."""
    if call.get("output_attentions") or call.get("head_mask") is not None:
        return NotImplemented
    y = checkpointed(self, _nested_layer, hidden_states, **call)
    return (y, None) if type_name(self.attention.attention).endswith("SdpaSelfAttention") else (y,)


def _nested_layer(self: Foreign, x: Tensor, **call: Any) -> Tensor:
    drop = self.drop_path
    mlp = nested_mlp(self.intermediate, self.output)
    attn = Branch(self.attention, self.layernorm_before, None, drop, self.lambda_1, call=call)
    return add_branches(x, attn, Branch(mlp, self.layernorm_after, None, drop, self.lambda_2), block=self)
