"""Fused forwards for the deformable sampling of transformers' detectors (Deformable DETR, RT-DETR, Mask2Former, …).

About ten models have the same module without parameters, which `recognition` finds. The modules with projections around
it, or around a function that does the same, call the projections as they are.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from ....engine.freeze import derived
from ....engine.hooks import has_hooks
from ....engine.leaves import Foreign
from ....kernels.deformable import deformable_attention
from ...forwards import arguments, fused_forward
from ...third_party import classes, is_fusable

WHOLE = frozenset(
    classes(
        "deformable_detr.DeformableDetrMultiscaleDeformableAttention",
        "lw_detr.LwDetrMultiscaleDeformableAttention",
        "pp_doclayout_v2.PPDocLayoutV2MultiscaleDeformableAttention",
        "pp_doclayout_v3.PPDocLayoutV3MultiscaleDeformableAttention",
        "pp_doclayout_v4.PPDocLayoutV4MultiscaleDeformableAttention",
        "rf_detr.RfDetrMultiscaleDeformableAttention",
        "rt_detr.RTDetrMultiscaleDeformableAttention",
    )
)  # modules with projections around one for the sampling
PADDED = frozenset(
    classes(
        "mask2former.Mask2FormerPixelDecoderEncoderMultiscaleDeformableAttention",
        "oneformer.OneFormerPixelDecoderEncoderMultiscaleDeformableAttention",
    )
)  # modules with projections around a function, whose mask is True where a cell is padding

TAKES = "attention_mask encoder_hidden_states encoder_attention_mask position_embeddings reference_points "
TAKES += "spatial_shapes spatial_shapes_list level_start_index"


@fused_forward("deformable sampling", *classes("deformable_detr.MultiScaleDeformableAttention"))
def sampling(
    self: Foreign,
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_spatial_shapes_list: list[tuple[int, int]],
    level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    im2col_step: int,
) -> Tensor:
    """Weighted sum of sampled points; value [B, N, H, D] → [B, Nq, H·D]."""
    shapes = value_spatial_shapes_list
    y = deformable_attention(value, _pairs(shapes), sampling_locations, attention_weights)
    return y.to(_promoted(value, sampling_locations, attention_weights))


def _pairs(shapes: Any) -> tuple[tuple[int, int], ...]:
    return tuple((shape[0], shape[1]) for shape in shapes)


def _promoted(value: Tensor, *others: Tensor) -> torch.dtype:
    """Dtype of the original's result; under autocast that of its widest operand."""
    dtype = value.dtype
    for other in others:
        dtype = torch.promote_types(dtype, other.dtype)
    return dtype


@fused_forward(
    "deformable attention",
    *sorted(PADDED),
    needs="value_proj sampling_offsets attention_weights output_proj d_model n_heads n_levels n_points with_pos_embed",
    takes=f"{TAKES} output_attentions",
    by_name=True,
)
def attention(self: Foreign, hidden_states: Tensor, **call: Any) -> tuple[Tensor, Tensor]:
    """Deformable attention with its projections; [B, Nq, D] → [B, Nq, D], and its weights [B, Nq, H, L, P]."""
    return _projected(self, sampled_padded(self, hidden_states, call))


def _projected(self: Foreign, found: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """The output of a module, and its weights [B, Nq, H, L, P], from what was sampled and their logits."""
    if found is None:
        return NotImplemented
    y, logits = found
    return self.output_proj(y), logits.flatten(3).softmax(-1).view_as(logits)


def sampled_padded(self: Foreign, x: Tensor, call: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """(output of a module of PADDED before its projection, logits of the weights); None if it must be called."""
    if not _is_supported(self, x, call):
        return None
    if call.get("position_embeddings") is not None:
        x = self.with_pos_embed(x, call["position_embeddings"])
    value = self.value_proj(call["encoder_hidden_states"])
    if call.get("attention_mask") is not None:
        value = value.masked_fill(call["attention_mask"][..., None], 0.0)
    return _sampled(self, x, call, value)


@fused_forward(
    "deformable attention",
    *sorted(WHOLE),
    needs="attn value_proj sampling_offsets attention_weights output_proj d_model n_heads n_levels n_points",
    takes=TAKES,
    by_name=True,
    checked=False,
)
def whole_attention(self: Foreign, hidden_states: Tensor, **call: Any) -> tuple[Tensor, Tensor]:
    """As `attention`, for a module that holds one for the sampling."""
    return _projected(self, _sampled_whole(self, hidden_states, call))


def sampled(self: Foreign, x: Tensor, call: dict[str, Any]) -> Tensor | None:
    """What a module of WHOLE projects to its output for x [B, Nq, D] and these arguments; None if it must be called."""
    found = _sampled_whole(self, x, {name: value for name, value in call.items() if value is not None})
    return None if found is None or set(call) - set(arguments(type(self))) else found[0]


def _sampled_whole(self: Foreign, x: Tensor, call: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """(output before its projection, logits of the weights); None if the module must run its own forward."""
    fits = is_fusable(self, x) and not has_hooks(self.attn) and is_fusable(self.attn, x)
    if not fits or not _is_supported(self, x, call):
        return None
    if call.get("position_embeddings") is not None:
        x = x + call["position_embeddings"]
    value = self.value_proj(call["encoder_hidden_states"])
    return _sampled(self, x, call, _without_padding(self, value, call.get("attention_mask")))


def _without_padding(self: Foreign, value: Tensor, valid: Tensor | None) -> Tensor:
    """Values [B, N, D], 0 where valid [B, N] is False; one launch after `freeze`, which keeps the zero."""
    if valid is None:
        return value
    zero = derived(
        self, f"zero {value.dtype} {value.device}", (), lambda: torch.zeros((), dtype=value.dtype, device=value.device)
    )
    return torch.where(valid[..., None], value, zero)


def _is_supported(self: Foreign, hidden_states: Tensor, call: dict[str, Any]) -> bool:
    """True if cells, their maps, and reference points of two or four coordinates for each map are given."""
    cells, around, shapes = (call.get(n) for n in ("encoder_hidden_states", "reference_points", "spatial_shapes_list"))
    if cells is None or around is None or shapes is None or around.dim() != 4:
        return False
    B, Nq, _ = hidden_states.shape
    return around.shape[:2] == (B, Nq) and around.shape[2] in (1, self.n_levels) and around.shape[-1] in (2, 4)


def _sampled(self: Foreign, x: Tensor, call: dict[str, Any], value: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted sum of points of queries x [B, Nq, D], before the output projection, and the weights' logits."""
    B, Nq, _ = x.shape
    H, L, P = self.n_heads, self.n_levels, self.n_points
    around = call["reference_points"]
    value = value.view(B, value.shape[1], H, self.d_model // H)
    offsets = self.sampling_offsets(x).view(B, Nq, H, L, P, 2)
    logits = self.attention_weights(x).view(B, Nq, H, L, P)
    shapes = _pairs(call["spatial_shapes_list"])
    y = deformable_attention(value, shapes, offsets, logits, around.expand(-1, -1, L, -1))
    return y.to(_promoted(value, offsets, around, logits)), logits


@fused_forward(
    "deformable attention",
    *classes(
        "d_fine.DFineMultiscaleDeformableAttention",
        "deimv2.Deimv2MultiscaleDeformableAttention",
        "rt_detr_v2.RTDetrV2MultiscaleDeformableAttention",
    ),
    needs="sampling_offsets attention_weights d_model n_heads n_levels offset_scale n_points_scale|num_points_scale "
    "n_points_list|num_points_list method|decoder_method",
    takes=TAKES,
    by_name=True,
)
def scaled_attention(self: Foreign, hidden_states: Tensor, **call: Any) -> tuple[Tensor, Tensor]:
    """Deformable attention whose offsets are relative to boxes; [B, Nq, D] → [B, Nq, D], weights [B, Nq, H, points].

    Layers around it are not captured: no pattern of graphs fuses the sampling.
    """
    old = hasattr(self, "value_proj")  # RT-DETR v2; the others have no projections of values and outputs
    points, scale, method = (
        (self.n_points_list, self.n_points_scale, self.method)
        if old
        else (self.num_points_list, self.num_points_scale, self.decoder_method)
    )
    fits = _is_supported(self, hidden_states, call) and method == "default"
    core = vars(sys.modules[type(self).__module__]).get("multi_scale_deformable_attention_v2")
    if (
        not fits
        or len(points) != self.n_levels
        or call["reference_points"].shape[2:] != (1, 4)
        or not (old or (self.ms_deformable_attn_core is core and call.get("attention_mask") is None))
    ):
        return NotImplemented
    if old and call.get("position_embeddings") is not None:
        hidden_states = hidden_states + call["position_embeddings"]
    B, Nq, _ = hidden_states.shape
    H, P = self.n_heads, sum(points)
    cells, around = call["encoder_hidden_states"], call["reference_points"][:, :, None]
    value = self.value_proj(cells) if old else cells
    value = _without_padding(self, value, call.get("attention_mask"))
    value = value.reshape(B, cells.shape[1], H, self.d_model // H)
    offsets = self.sampling_offsets(hidden_states).reshape(B, Nq, H, P, 2)
    weights = self.attention_weights(hidden_states).reshape(B, Nq, H, P).softmax(-1)
    scale = scale.to(dtype=hidden_states.dtype).unsqueeze(-1)
    places = around[..., :2] + offsets * scale * around[..., 2:] * self.offset_scale
    shapes = _pairs(call["spatial_shapes_list"])
    # added points have no weight and lie outside of the maps, where no value is read
    y = deformable_attention(value, shapes, _by_level(places, points, -1.0), _by_level(weights, points, 0.0))
    y = y.to(_promoted(value, places, weights))
    return self.output_proj(y) if old else y, weights


def _by_level(values: Tensor, points: list[int], fill: float) -> Tensor:
    """[B, Nq, H, points of all levels, ...] → [B, Nq, H, L, P, ...], where levels have P points, some of them added."""
    most = max(points)
    if min(points) < most:
        after = (0, 0) * (values.dim() - 4)
        parts = zip(values.split(points, 3), points, strict=True)
        padded = [
            part if n == most else nn.functional.pad(part, (*after, 0, most - n), value=fill) for part, n in parts
        ]
        values = torch.cat(padded, 3)
    return values.unflatten(3, (len(points), most))
