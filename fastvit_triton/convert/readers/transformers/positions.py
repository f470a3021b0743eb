"""Fused forwards for the masks and sine positions of transformers' detectors, in half as many launches.

The values are those of the originals; no kernel is needed.
"""

from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from ....engine.freeze import derived
from ....engine.hooks import are_plain_tensors, can_fuse
from ....engine.leaves import Foreign
from ...forwards import fused_forward
from ...third_party import runs_original
from .vit import classes

EPS = 1e-6  # the original's


def _reads(mask: Any, self: Foreign, features: int, dtype: torch.dtype) -> TypeGuard[Tensor]:
    """True if the positions of a mask may be computed here; those without a mask are cached by the original."""
    plain = isinstance(mask, Tensor) and mask.dim() == 3 and are_plain_tensors(mask) and features % 2 == 0
    return plain and can_fuse(mask.new_empty(0, dtype=dtype)) and runs_original(self)


def _positions(self: Foreign, mask: Tensor, dtype: torch.dtype, features: int, centre: float) -> Tensor:
    """Sines and cosines of the place of each pixel among those that are True; [B, H, W] → [B, 2·features, H, W].

    Args:
        self: has normalize, scale and temperature.
        mask: True, or 1, where the image is not padded.
        dtype: of the positions.
        features: sines and cosines of a row; those of the column follow.
        centre: place of the first pixel, subtracted where places are normalised.
    """
    inside = mask.to(dtype)
    y, x = inside.cumsum(1), inside.cumsum(2)
    places = torch.stack((y, x), -1)
    if self.normalize:
        last = torch.stack((y[:, -1:].expand_as(y), x[:, :, -1:].expand_as(x)), -1)
        places = (places - centre if centre else places) / (last + EPS) * self.scale

    def divisors() -> Tensor:
        return self.temperature ** (torch.arange(0, features, 2, dtype=dtype, device=mask.device) / features)

    name = f"divisors {self.temperature} {features} {dtype} {mask.device}"
    angles = places[..., None] / derived(self, name, (), divisors)
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(3).permute(0, 3, 1, 2)


FEATURES = "num_position_features normalize scale temperature"


@fused_forward(
    "sine positions",
    *classes("detr.DetrSinePositionEmbedding"),
    needs=FEATURES,
    takes="device dtype mask",
    checked=False,
)
def sine_positions(
    self: Foreign, shape: torch.Size, device: Any, dtype: torch.dtype, mask: Tensor | None = None
) -> Tensor:
    """Positions in a map of this shape [B, C, H, W]; → [B, D, H, W]."""
    if not _reads(mask, self, self.num_position_features, dtype) or torch.device(device) != mask.device:
        return NotImplemented
    return _positions(self, mask, dtype, self.num_position_features, 0.0)


@fused_forward(
    "sine positions",
    *classes("deformable_detr.DeformableDetrSinePositionEmbedding"),
    needs=FEATURES,
    takes="device dtype mask",
    checked=False,
)
def centred_sine_positions(
    self: Foreign, shape: torch.Size, device: Any, dtype: torch.dtype, mask: Tensor | None = None
) -> Tensor:
    """As `sine_positions`, from the centres of pixels."""
    if not _reads(mask, self, self.num_position_features, dtype) or torch.device(device) != mask.device:
        return NotImplemented
    return _positions(self, mask, dtype, self.num_position_features, 0.5)


@fused_forward(
    "sine positions",
    *classes("table_transformer.TableTransformerSinePositionEmbedding"),
    needs="embedding_dim normalize scale temperature",
    takes="pixel_mask",
    checked=False,
)
def float32_sine_positions(self: Foreign, pixel_values: Tensor, pixel_mask: Tensor | None) -> Tensor:
    """As `sine_positions`, in float32."""
    if not _reads(pixel_mask, self, self.embedding_dim, torch.float32):
        return NotImplemented
    return _positions(self, pixel_mask, torch.float32, self.embedding_dim, 0.0)


@fused_forward(
    "",
    *classes("detr.DetrConvEncoder", "rt_detr.RTDetrConvEncoder"),
    needs="model",
    takes="pixel_mask",
)
def masked_maps(self: Foreign, pixel_values: Tensor, pixel_mask: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Maps of a backbone, each with the mask of its pixels; masks of whole steps are views before their conversion."""
    if not are_plain_tensors(pixel_mask) or pixel_mask.dim() != 3:
        return NotImplemented
    found = self.model(pixel_values)
    maps = getattr(found, "feature_maps", found)
    return [(each, _mask_of(pixel_mask, each.shape[2], each.shape[3])) for each in maps]


def _mask_of(mask: Tensor, height: int, width: int) -> Tensor:
    """Every n-th row and column of a mask [B, H, W], or its nearest values; [B, height, width], boolean."""
    _, H, W = mask.shape
    if H % height or W % width:
        return F.interpolate(mask[None].float(), size=(height, width)).to(torch.bool)[0]
    return mask[:, :: H // height, :: W // width].to(torch.bool, memory_format=torch.contiguous_format)
