"""Batches of images of different sizes: padded to the largest, with a mask of what is no padding."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def pad_images(images: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Puts images of different sizes into one batch; zeros are added below and right.

    Args:
        images: each [C, h, w].

    Returns:
        Images [B, C, H, W], and the mask [B, H, W], True at pixels of an image, or None if all have one size.
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
