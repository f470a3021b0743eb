"""Batches of images of different sizes: padded to the largest, a mask of what is no padding, and positions in it."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

TEMPERATURE = 10000.0  # of the positions


def pad_images(images: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Images [C, h, w] → a batch [B, C, H, W], with zeros below and right, and the mask [B, H, W].

    The mask is True at pixels of an image; it is None if all have one size.
    """
    if not images:
        raise ValueError("the list of images is empty; give at least one")
    sizes = [tuple(image.shape[1:]) for image in images]
    if len(set(sizes)) == 1:
        return torch.stack(tuple(images)), None
    height = max(h for h, _ in sizes)
    width = max(w for _, w in sizes)
    batch = torch.stack([F.pad(image, (0, width - image.shape[2], 0, height - image.shape[1])) for image in images])
    mask = torch.zeros(len(images), height, width, dtype=torch.bool, device=batch.device)
    for row, (h, w) in zip(mask, sizes, strict=True):
        row[:h, :w] = True
    return batch, mask


def resize_mask(mask: Tensor, size: Sequence[int]) -> Tensor:
    """The mask [B, H, W] at the nearest pixels of a map of this size (h, w)."""
    return F.interpolate(mask[None].float(), tuple(size))[0].bool()


def sine_positions(mask: Tensor, dim: int, offset: float = 0.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Positions [B, h · w, D] of the tokens of a map (DETR, arXiv:2005.12872, appendix A.4); D is a multiple of 4.

    Rows and columns are counted from 1 within the part that is no padding, where the mask [B, h, w] is True, and after
    the offset (−0.5 for centres, Deformable DETR) divided by their number: y and x in (0, 2π]. Channel 2i of a
    coordinate's D/2 is sin(y / 10000^(4i / D)), channel 2i + 1 the cosine; those of y come first. At least float32 is
    used within.
    """
    counted = mask.to(torch.promote_types(dtype, torch.float32))
    channels = []
    for axis in (1, 2):
        count = counted.cumsum(axis)
        total = count.narrow(axis, count.shape[axis] - 1, 1)
        channels.append(sines((count + offset) / (total + 1e-6), dim // 2))
    return torch.cat(channels, -1).flatten(1, 2).to(dtype)


def sines(fractions: Tensor, dim: int) -> Tensor:
    """Fractions [...] of 2π → [..., dim], sines and cosines in turn at dim / 2 frequencies."""
    steps = torch.arange(0, dim, 2, dtype=fractions.dtype, device=fractions.device)
    angles = (2 * math.pi * fractions)[..., None] / TEMPERATURE ** (steps / dim)
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)
