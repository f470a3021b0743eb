"""Fused forwards for transformers' Swin: Swin, Swin V2, Swin2SR, and the copies of Swin in Donut, MaskFormer and CLAP.

The copies, Swin V2, Swin2SR, and Swin before release 5.10 nest their submodules: `attention.self`, `attention.output`,
`intermediate`, `output`. A layer lowers its own window and shift for a grid that is no larger than its window.

transformers subtracts 200 from the scores between regions of a shifted window of Swin V2, all others 100, as here. The
difference is a weight of e⁻¹⁰⁰ times the exponential of how far such a score exceeds those of the own region.
"""

import math
from typing import Any

from torch import Tensor, nn

from ....engine.attention import window_body
from ....engine.body import Body
from ....engine.branch import Branch, add_branches
from ....engine.hooks import has_hooks, is_plain_module, type_name
from ....engine.leaves import Foreign, is_inactive
from ....engine.ways import plainly
from ....kernels.argument import Window
from ...forwards import INNER, arguments, fused_body, fused_forward, original
from ...third_party import classes, is_fusable
from ...windows import continuous_bias, cosine_scale, merge, table_bias
from ..torch import STEMS
from ..two_branches import checkpointed
from .vit import attention_reason, heads_reason, nested_mlp, parts_reason

SWIN, *V2 = classes("swin.Swin", "swinv2.Swinv2", "swin2sr.Swin2SR")
COPIES = classes("clap.ClapAudio", "donut.donut_swin.DonutSwin", "maskformer.maskformer_swin.MaskFormerSwin")
FAMILIES = (SWIN, *V2, *COPIES)
NESTED = "self.query self.key self.value self.num_attention_heads self.dropout self.relative_position_index "
NESTED += "output.dense output.dropout "
PASSED = ("output_hidden_states", "return_dict", "use_cache")  # arguments that a layer ignores

INNER.update(f"{family}SelfAttention" for family in FAMILIES)
STEMS.update({f"{family}PatchEmbeddings": "projection" for family in FAMILIES})
STEMS.update({f"{family}PatchEmbed": "proj" for family in COPIES[:1]})


@fused_body(
    *(f"{family}Attention" for family in (SWIN, *COPIES)),
    needs=NESTED + "self.attention_head_size self.relative_position_bias_table",
    takes="attention_mask head_mask output_attentions",
    after=(),
)
@fused_body(
    *(f"{family}Attention" for family in V2),
    needs=NESTED + "self.logit_scale self.continuous_position_bias_mlp self.relative_coords_table",
    takes="attention_mask head_mask output_attentions",
    after=(),
)
@fused_body(
    f"{SWIN}Attention",
    needs="q_proj k_proj v_proj o_proj num_attention_heads scaling attention_dropout is_causal config "
    "relative_position_bias.relative_position_bias_table relative_position_bias.relative_position_index",
    takes="attention_mask",
    after=(None,),
    by_name=True,
)
def attention_parts(self: Foreign, *inputs: Any, **named: Any) -> Body | str:
    """Parts of the attention in separate windows [B · windows, n, D]; shifted ones have a mask and run the original."""
    if any(value is not None and value is not False for value in (*inputs, *named.values())):
        return "it has a mask, or its weights are requested"
    return _attention_reason(self) or _attention(self)


def _attention_reason(self: Foreign) -> str | None:
    """Why an attention must run its own forward now, or None."""
    if hasattr(self, "q_proj"):
        plain = is_plain_module(self.relative_position_bias, (f"{SWIN}RelativePositionBias",))
        replaced = None if plain else "its position bias was replaced or has a hook"
        return attention_reason(self, self.attention_dropout, None, None, {}) or replaced
    family = type_name(self).removesuffix("Attention")
    inner = self.self
    if (why := parts_reason(self, family, self="SelfAttention", output="SelfOutput")) is not None:
        return why
    if any(map(has_hooks, getattr(inner, "continuous_position_bias_mlp", nn.Identity()).modules())):
        return "its position bias has a hook"
    if (why := heads_reason(inner)) is not None:
        return why
    return None if is_inactive(inner.dropout) else f"attention {_name(inner.dropout)}"


def _name(dropout: Foreign) -> str:
    return f"dropout {dropout.p}" if isinstance(dropout, nn.Dropout) else "dropout was replaced"


def _attention(self: Foreign) -> Body:
    """The parts of an attention in one window, given as tokens."""
    scale: float | Tensor
    if hasattr(self, "q_proj"):
        layers = (self.q_proj, self.k_proj, self.v_proj)
        heads = self.num_attention_heads
        drop = None
        last = self.o_proj
        scale = self.scaling
        bias = table_bias(self.relative_position_bias)
    else:
        inner = self.self
        layers = (inner.query, inner.key, inner.value)
        heads = inner.num_attention_heads
        drop = self.output.dropout
        cosine = hasattr(inner, "logit_scale")
        last = self.output.dense
        scale = cosine_scale(inner) if cosine else inner.attention_head_size**-0.5
        bias = continuous_bias(inner) if cosine else table_bias(inner)
    size = (math.isqrt(math.isqrt(bias[0].numel())),) * 2
    return window_body(layers, last, heads, scale, Window(size), bias, (drop,), size)


def _layer_reason(self: Foreign) -> str | None:
    """Why a layer must run its own forward now, or None."""
    attention = self.attention
    family = type_name(self).removesuffix("Layer")
    if not is_plain_module(attention, (f"{family}Attention",)):
        return "its attention was replaced or has a hook"
    if (why := _attention_reason(attention)) is not None:
        return why
    nested = hasattr(attention, "self")
    if any(map(has_hooks, _projections(attention))):  # they would see a map instead of windows
        return "a layer of its attention has a hook"
    drop = attention.output.dropout if nested else self.dropout
    if not is_inactive(drop):  # draws random numbers in the order of the windows
        return f"{_name(drop)} after its attention"
    return parts_reason(self, family, intermediate="Intermediate", output="Output") if nested else None


def _projections(attention: Foreign) -> tuple[nn.Module, ...]:
    if hasattr(attention, "self"):
        return attention.self.query, attention.self.key, attention.self.value, attention.output.dense
    return attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj


def _folds(self: Foreign) -> list[tuple[nn.Module, nn.Module]]:
    """The norms of a layer and what reads them; the norms of Swin V2 come last."""
    if type_name(self).startswith(tuple(V2)):
        return []
    mlp = self.mlp if hasattr(self, "mlp") else self.intermediate.dense
    return [(self.layernorm_before, _projections(self.attention)[0]), (self.layernorm_after, mlp)]


@fused_forward(
    "block in windows",
    *(f"{family}Layer" for family in FAMILIES),
    needs="attention.self|attention.q_proj layernorm_before layernorm_after drop_path window_size shift_size "
    "mlp|intermediate.dense mlp|intermediate.intermediate_act_fn dropout|output.dense dropout|output.dropout",
    takes="input_dimensions head_mask output_attentions always_partition",
    reason=_layer_reason,
    folds=_folds,
    by_name=True,
    checked=False,
)
def layer(self: Foreign, hidden_states: Tensor, input_dimensions: tuple[int, int], *inputs: Any, **named: Any) -> Any:
    """Block in windows; [B, H·W, D] → ([B, H·W, D], None), or a tuple of one for nested submodules."""
    call = dict(zip(arguments(type(self))[1:], inputs, strict=False)) | named
    if _reads_weights(self, call):  # of every module inside
        return plainly(original, self, hidden_states, input_dimensions, *inputs, **named)
    if not call.pop("always_partition", False) and hasattr(self, "set_shift_and_window_size"):
        self.set_shift_and_window_size(input_dimensions)
    odd = [name for name, value in call.items() if value is not None and value is not False and name not in PASSED]
    if odd or not is_fusable(self, hidden_states) or not _fits(self) or _layer_reason(self) is not None:
        return NotImplemented
    y = checkpointed(self, _layer, hidden_states, grid=tuple(input_dimensions))
    return (y, None) if hasattr(self, "mlp") else (y,)


def _reads_weights(self: Foreign, call: dict[str, object]) -> bool:
    """True if the attention weights that the layer returns may be read."""
    config = getattr(self.attention, "config", None)
    if call.get("output_attentions"):
        return True
    eager = getattr(config, "_attn_implementation", None) == "eager"
    return eager and (getattr(config, "output_attentions", False) or bool(self._forward_hooks) or has_hooks(self))


def _fits(self: Foreign) -> bool:
    """True if the attention was converted, and its bias has the size of the window."""
    forward = self.attention.__dict__.get("forward")
    owner = self.attention.self if hasattr(self.attention, "self") else self.attention.relative_position_bias
    return getattr(getattr(forward, "func", None), "reader", None) is attention_parts and (
        self.window_size**4 == owner.relative_position_index.numel()
    )


def _layer(self: Foreign, x: Tensor, grid: tuple[int, int]) -> Tensor:
    window = Window((self.window_size,) * 2, (self.shift_size,) * 2)
    attention: Any = _attention(self.attention).having(window=window, grid=grid)
    before = self.layernorm_before
    after = self.layernorm_after
    drop = self.drop_path
    if hasattr(self, "mlp"):
        attn = Branch(attention, before, None, drop)
        mlp = Branch(self.mlp, after, drop=self.dropout)
        return add_branches(x, attn, mlp, block=self)
    parts = nested_mlp(self.intermediate, self.output)
    if isinstance(attention.between.scale, Tensor):
        attn, mlp = (Branch(b, None, None, drop, post_norm=n) for b, n in ((attention, before), (parts, after)))
    else:
        attn = Branch(attention, before, None, drop)
        mlp = Branch(parts, after)
    return add_branches(x, attn, mlp, block=self)


@fused_forward(
    "patch merging",
    *(f"{family}PatchMerging" for family in (SWIN, *COPIES)),
    needs="norm reduction",
    folds=lambda self: [(self.norm, self.reduction)],
    by_name=True,
)
def merging(self: Foreign, input_feature: Tensor, input_dimensions: tuple[int, int]) -> Tensor:
    """Joins the channels of 2×2 tokens, normalises and projects them; [B, H·W, D] → [B, ⌈H/2⌉·⌈W/2⌉, 2 D]."""
    return merge(input_feature.unflatten(1, tuple(input_dimensions)), self.norm, self.reduction).flatten(1, 2)
