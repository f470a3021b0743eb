"""Fused forwards for the deformable sampling of transformers' detectors (Deformable DETR, RT-DETR, Mask2Former, …).

About ten models have the same module without parameters, which `recognition` finds; Mask2Former and OneFormer call a
function in a module with projections, which are called as they are.
"""

from typing import Any

import torch
from torch import Tensor

from ....engine.leaves import Foreign
from ....kernels.deformable import deformable_attention
from ...forwards import arguments, fused_forward, original
from ...third_party import is_fusable
from .vit import classes


@fused_forward(
    "deformable sampling",
    *classes("deformable_detr.MultiScaleDeformableAttention"),
    takes="value_spatial_shapes value_spatial_shapes_list level_start_index sampling_locations attention_weights "
    "im2col_step",
)
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
    if not is_fusable(self, value):
        inputs = shapes, level_start_index, sampling_locations, attention_weights, im2col_step
        return original(self, value, value_spatial_shapes, *inputs)
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
    *classes(
        "mask2former.Mask2FormerPixelDecoderEncoderMultiscaleDeformableAttention",
        "oneformer.OneFormerPixelDecoderEncoderMultiscaleDeformableAttention",
    ),
    needs="value_proj sampling_offsets attention_weights output_proj d_model n_heads n_levels n_points with_pos_embed",
    takes="attention_mask encoder_hidden_states encoder_attention_mask position_embeddings reference_points "
    "spatial_shapes spatial_shapes_list level_start_index output_attentions",
    by_name=True,
)
def attention(self: Foreign, hidden_states: Tensor, *inputs: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """Deformable attention with its projections; [B, Nq, D] → [B, Nq, D], and its weights [B, Nq, H, L, P]."""
    call = dict(zip(arguments(type(self)), inputs, strict=False)) | named
    cells, around, shapes = (call.get(n) for n in ("encoder_hidden_states", "reference_points", "spatial_shapes_list"))
    if not is_fusable(self, hidden_states) or cells is None or around is None or shapes is None:
        return original(self, hidden_states, *inputs, **named)
    B, Nq, _ = hidden_states.shape
    H, L, P = self.n_heads, self.n_levels, self.n_points
    if around.shape[:3] != (B, Nq, L) or around.shape[-1] not in (2, 4):
        return original(self, hidden_states, *inputs, **named)
    if call.get("position_embeddings") is not None:
        hidden_states = self.with_pos_embed(hidden_states, call["position_embeddings"])
    value = self.value_proj(cells)
    if call.get("attention_mask") is not None:  # True where the cell is padding
        value = value.masked_fill(call["attention_mask"][..., None], 0.0)
    value = value.view(B, cells.shape[1], H, self.d_model // H)
    offsets = self.sampling_offsets(hidden_states).view(B, Nq, H, L, P, 2)
    logits = self.attention_weights(hidden_states).view(B, Nq, H, L * P)
    y = deformable_attention(value, _pairs(shapes), offsets, logits.view(B, Nq, H, L, P), around)
    weights = logits.softmax(-1).view(B, Nq, H, L, P)
    return self.output_proj(y.to(_promoted(value, offsets, around, weights))), weights
