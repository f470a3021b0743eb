"""Batches of images of different sizes under a budget of tokens, for a NaFlex model (arXiv:2502.14786, section 2.4).

Each image keeps its shape: it is resized until its patches fill a sequence of L at most, and padded to L. L changes
from batch to batch; the number of images is the budget divided by L, so a step costs about the same each time.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from .masked import patchify
from .ranges import Count, checked


def fitting_grid(size: tuple[int, int], tokens: int, patch_size: tuple[int, int]) -> tuple[int, int]:
    """The largest grid of patches of an image's shape that has so many tokens at most; 1 × 1 at least.

    Args:
        size: (height, width) of the image, in pixels.
        tokens: L.
        patch_size: (height, width).

    Returns:
        (rows, columns).
    """
    rows, columns = size[0] / patch_size[0], size[1] / patch_size[1]
    scale = math.sqrt(tokens / (rows * columns))
    rows, columns = max(1, int(rows * scale)), max(1, int(columns * scale))
    return min(rows, tokens), min(columns, tokens // min(rows, tokens))


def to_patches(image: Tensor, tokens: int, patch_size: tuple[int, int]) -> Tensor:
    """An image [C, H, W], resized to its `fitting_grid`, as patches with places: [L, 2 + P·P·C], padded by −1.

    Each row is (row, column, pixels in the order row, column, channel); padding has place −1 and pixels 0.
    """
    grid = fitting_grid(tuple(image.shape[1:]), tokens, patch_size)
    target = (grid[0] * patch_size[0], grid[1] * patch_size[1])
    if target != tuple(image.shape[1:]):
        image = F.interpolate(image[None], target, mode="bilinear", antialias=True)[0]
    pixels = patchify(image[None], patch_size)[0]  # [N, P·P·C]
    places = torch.cartesian_prod(torch.arange(grid[0]), torch.arange(grid[1])).to(pixels)  # [N, 2]
    rows = torch.cat((places, pixels), 1)
    padding = rows.new_zeros(tokens - rows.shape[0], rows.shape[1])
    padding[:, :2] = -1
    return torch.cat((rows, padding))


class TokenBudgetBatches:
    """Images of any size in batches of about equal cost, for `fit` and `evaluate`.

    The sequence lengths take turns, so that every epoch has the same batches up to order; which images meet which
    length is drawn anew from PyTorch's global generator.

    Args:
        images: N of them, [C, H, W] each, normalised.
        targets: [N] class numbers.
        patch_size: (height, width).
        budget: tokens in a batch, padding among them; at least the longest sequence.
        lengths: L to choose from; one for evaluation.
        shuffle: draw order and lengths; False keeps both.
        augment: of an image [C, H, W] before it is resized; None does not.

    Raises:
        ValueError: a sequence does not fit into the budget.
    """

    @checked
    def __init__(
        self,
        images: Sequence[Tensor],
        targets: Tensor,
        patch_size: tuple[Count, Count],
        budget: Count,
        lengths: tuple[Count, ...] = (128, 256, 576, 784, 1024),
        shuffle: bool = True,
        augment: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        if max(lengths) > budget:
            raise ValueError(f"lengths is {lengths} and budget {budget}; each length must be at most the budget")
        self.images, self.targets, self.patch_size = images, targets, patch_size
        self.shuffle, self.augment = shuffle, augment
        self.bad: dict[Path, str] = {}
        self.indices: list[int] = []
        self.turns, left = [], len(images)  # (L, images) of each batch
        while left > 0:
            length = lengths[len(self.turns) % len(lengths)]
            self.turns.append((length, min(budget // length, left)))
            left -= budget // length

    def __len__(self) -> int:
        return len(self.turns)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.after(0)

    def after(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """An epoch without its first `count` batches."""
        draw = torch.randperm if self.shuffle else torch.arange
        order, turns = draw(len(self.images)), [self.turns[i] for i in draw(len(self.turns)).tolist()]
        parts = order.split([size for _, size in turns])
        return self._stream(list(zip(turns, parts, strict=True))[count:])

    def _stream(self, parts: list[tuple[tuple[int, int], Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        for (length, _), chosen in parts:
            self.indices = chosen.tolist()
            images = [self.images[i] if self.augment is None else self.augment(self.images[i]) for i in self.indices]
            yield torch.stack([to_patches(image, length, self.patch_size) for image in images]), self.targets[chosen]

    def picture(self, i: int) -> Tensor:
        """Image i, [C, H, W], as it was given."""
        return self.images[i]
