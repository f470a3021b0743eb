"""Batches of images of different sizes under a token budget, for a NaFlex model (arXiv:2502.14786, section 2.4).

Each image keeps its aspect ratio: it is resized so that its patches fill a sequence of at most L tokens, and padded to
L. L varies between batches; the number of images is the budget divided by L, so all steps cost about the same.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..masked import patchify
from ..ranges import PositiveInt, checked
from .sampler import Batches


def fitting_grid(size: tuple[int, int], tokens: int, patch_size: tuple[int, int]) -> tuple[int, int]:
    """The largest patch grid with an image's aspect ratio and at most `tokens` patches; at least 1 × 1."""
    rows = size[0] / patch_size[0]
    columns = size[1] / patch_size[1]
    scale = math.sqrt(tokens / (rows * columns))
    rows = max(1, int(rows * scale))
    columns = max(1, int(columns * scale))
    return min(rows, tokens), min(columns, tokens // min(rows, tokens))


def to_patches(image: Tensor, tokens: int, patch_size: tuple[int, int]) -> Tensor:
    """Resizes an image [C, H, W] to its `fitting_grid` and returns its patches with positions, [L, 2 + P·P·C].

    Each entry is (row, column, pixels in the order row, column, channel). Padding has row and column −1 and pixels 0.
    """
    grid = fitting_grid((image.shape[1], image.shape[2]), tokens, patch_size)
    target = (grid[0] * patch_size[0], grid[1] * patch_size[1])
    if target != tuple(image.shape[1:]):
        image = F.interpolate(image[None], target, mode="bilinear", antialias=True)[0]
    pixels = patchify(image[None], patch_size)[0]  # [N, P·P·C]
    positions = torch.cartesian_prod(torch.arange(grid[0]), torch.arange(grid[1])).to(pixels)  # [N, 2]
    rows = torch.cat((positions, pixels), 1)
    padding = rows.new_zeros(tokens - rows.shape[0], rows.shape[1])
    padding[:, :2] = -1
    return torch.cat((rows, padding))


class TokenBudgetBatches(Batches):
    """Batches of images of any size, of about equal cost, for `fit` and `evaluate`.

    Batches cycle through the sequence lengths, so every epoch has the same batch sizes in a different order. PyTorch's
    global generator assigns images to batches.

    Args:
        images: N normalised images, [C, H, W] each.
        targets: [N] class numbers.
        patch_size: (height, width).
        budget: tokens in a batch, including padding; at least the longest sequence.
        lengths: values of L; use one for evaluation.
        shuffle: randomise the order of images and lengths.
        augment: function applied to each image [C, H, W] before resizing.

    Raises:
        ValueError: a sequence length is above the budget.
    """

    @checked
    def __init__(
        self,
        images: Sequence[Tensor],
        targets: Tensor,
        patch_size: tuple[PositiveInt, PositiveInt],
        budget: PositiveInt,
        lengths: tuple[PositiveInt, ...] = (128, 256, 576, 784, 1024),
        shuffle: bool = True,
        augment: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        if max(lengths) > budget:
            raise ValueError(f"lengths is {lengths} and budget {budget}; each length must be at most the budget")
        super().__init__()
        self.images = images
        self.targets = targets
        self.patch_size = patch_size
        self.shuffle = shuffle
        self.augment = augment
        self.sizes: list[tuple[int, int]] = []  # (L, number of images) of each batch
        remaining = len(images)
        while remaining > 0:
            length = lengths[len(self.sizes) % len(lengths)]
            self.sizes.append((length, min(budget // length, remaining)))
            remaining -= budget // length

    def __len__(self) -> int:
        return len(self.sizes)

    def iter_from(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterates over an epoch without its first `count` batches."""
        draw = torch.randperm if self.shuffle else torch.arange
        order = draw(len(self.images))
        sizes = [self.sizes[i] for i in draw(len(self.sizes)).tolist()]
        groups = order.split([size for _, size in sizes])
        return self._stream(list(zip(sizes, groups, strict=True))[count:])

    def _stream(self, groups: list[tuple[tuple[int, int], Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        for (length, _), chosen in groups:
            self.indices = chosen.tolist()
            images = [self.images[i] if self.augment is None else self.augment(self.images[i]) for i in self.indices]
            yield torch.stack([to_patches(image, length, self.patch_size) for image in images]), self.targets[chosen]

    def display_image(self, i: int) -> Tensor:
        """Image i as passed to the constructor, [C, H, W]."""
        return self.images[i]
