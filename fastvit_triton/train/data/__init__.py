"""Training and test batches: `Data`, of image files or in memory.

Paths go in; batches of images [B, C, H, W] and labels [B] come out. `..sources` opens a data set by its name;
`inspection` looks at it before training and refuses what would be wrong; an image file becomes a tensor in `transform`.

Begin with `folder`, then `transform`.
"""

import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..augment import random_affine
from ..ranges import PositiveInt, checked
from ..recipes import Recipe
from .findings import Findings
from .folder import FolderBatches
from .sampler import batch_count
from .split import Split
from .transform import DECODE_ERRORS, Transform

# Mean and standard deviation of the digits' training split, pixels in [0, 1].
DIGITS_MEAN, DIGITS_STD = 0.3054, 0.3762
SATURATED = 64  # of 255; a grey photo with a tint has less


class Batches(Protocol):
    """Iterable of batches for `fit` and `evaluate`: images [B, C, H, W] and class numbers [B]."""

    per_rank: bool  # each rank gets its own part of a batch; if False all ranks get the whole batch
    bad: dict[Path, str]  # skipped files, with the reason
    findings: Findings  # what the reader left out
    indices: list[int]  # indices of the images in the last batch
    targets: Any  # class numbers of all images

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]: ...

    def leave_out_single(self) -> None:
        """Leaves a last batch of one image out of each epoch: BatchNorm has no statistics of it."""

    def iter_from(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterates without the first `count` batches, with the same random draws as a whole epoch."""

    def display_image(self, i: int) -> Tensor:
        """Image i for display, [C, H, W] in [0, 1]."""

    def digest(self) -> str:
        """The number of images and a checksum, which changes with the data."""


@dataclass(frozen=True)
class Data:
    """Training and test batches of one task.

    Attributes:
        name: "digits" or a path.
        classes: names, in the order of the model's logits.
        transform: preprocessing from an image file to the model's input; `predict` uses the same.
        train: training batches, shuffled and augmented.
        test: test batches, in order.
        test_once: evaluate after the last epoch only.
        split: how one list of images was divided; None if the data set has test images of its own.
    """

    name: str
    classes: tuple[str, ...]
    transform: Transform
    train: Batches
    test: Batches
    test_once: bool = False
    split: Split | None = None

    @cached_property
    def identity(self) -> dict[str, list[str] | str]:
        """Class names and a digest of each split, which a training state keeps to see that the data have changed."""
        return {"classes": list(self.classes), "training": self.train.digest(), "test": self.test.digest()}

    def loses_colours(self) -> bool:
        """True if images are read in grey, and one of the first eight training files has colours."""
        train: Any = self.train
        if len(self.transform.mean) > 1 or not isinstance(train, FolderBatches):
            return False
        for path in islice(train.files, 8):
            with suppress(*DECODE_ERRORS):
                saturation: Any = train.decode(path).convert("HSV").getchannel("S")
                if saturation.getextrema()[1] > SATURATED:
                    return True
        return False


class TensorBatches:
    """Batches of in-memory images; with `augment`, shuffled and augmented one batch at a time.

    Args:
        images: [N, C, H, W] in [0, 1].
        targets: [N] class numbers.
        transform: preprocessing; only its normalisation is used.
        batch_size: images per batch; the last batch may be smaller.
        augment: function applied to each batch [B, C, H, W] in [0, 1] before normalisation; None disables augmentation
            and shuffling.
    """

    per_rank = False

    @checked
    def __init__(
        self,
        images: Tensor,
        targets: Tensor,
        transform: Transform,
        batch_size: PositiveInt,
        augment: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.images = images
        self.targets = targets
        self.transform = transform
        self.batch_size = batch_size
        self.augment = augment
        self.fewest = 1
        self.bad: dict[Path, str] = {}
        self.findings = Findings()
        self.indices: list[int] = []

    def leave_out_single(self) -> None:
        """Leaves a last batch of one image out of each epoch: BatchNorm has no statistics of it."""
        self.fewest = 2

    def __len__(self) -> int:
        return batch_count(len(self.images), self.batch_size, self.fewest)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.iter_from(0)

    def iter_from(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterates over an epoch without its first `count` batches."""
        order = torch.randperm(len(self.images)) if self.augment else torch.arange(len(self.images))
        return self._stream(order.split(self.batch_size)[count : len(self)])

    def _stream(self, batches: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in batches:
            self.indices = chosen.tolist()
            images = self.augment(self.images[chosen]) if self.augment else self.images[chosen]
            yield self.transform.normalise(images), self.targets[chosen]

    def display_image(self, i: int) -> Tensor:
        """Image i, [C, H, W] in [0, 1], not augmented."""
        return self.images[i]

    def digest(self) -> str:
        """The number of images, and a CRC-32 of their pixels and class numbers."""
        pixels = self.images.contiguous().numpy()
        targets = self.targets.contiguous().numpy()
        return f"{len(targets)} images, {zlib.crc32(targets.data, zlib.crc32(pixels.data)):08x}"


def affine_augmentation(recipe: Recipe) -> Callable[[Tensor], Tensor]:
    """The recipe's `random_affine`, as a function of images [B, C, H, W] in [0, 1]."""
    return partial(random_affine, degrees=recipe.degrees, zoom=recipe.zoom, shear=recipe.shear, shift=recipe.shift)


def digits(split: str, size: tuple[int, int] = (8, 8)) -> tuple[Tensor, Tensor]:
    """The 1,797 handwritten digits that ship with scikit-learn: 8 x 8 pixels, white on black, 17 levels of grey.

    Source: Alpaydin & Kaynak, UCI Optical Recognition of Handwritten Digits, 1998. The split is fixed and stratified:
    1,437 training and 360 test images.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        advice = "pip install 'fastvit_triton[demo]', or give a folder"
        raise ValueError(f"data 'digits' needs scikit-learn; {advice}") from error
    bunch = load_digits()
    rows = train_test_split(range(len(bunch.target)), test_size=0.2, random_state=0, stratify=bunch.target)
    chosen = rows[("train", "test").index(split)]
    images = torch.tensor(bunch.images[chosen] / 16, dtype=torch.float32)[:, None]  # [N, 1, 8, 8]
    if size != (8, 8):
        images = F.interpolate(images, size, mode="bilinear", antialias=True)
    return images, torch.tensor(bunch.target[chosen])
