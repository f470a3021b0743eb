"""Training and test batches: `Data`, of image files or in memory.

Paths go in; batches of images [B, C, H, W] and labels [B] come out. `..sources` opens a data set by its name;
`inspection` looks at it before training and refuses what would be wrong; an image file becomes a tensor in `transform`,
or in the user's transform by `custom`.

Begin with `folder`, then `transform`.
"""

import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..augment import random_affine
from ..ranges import PositiveInt, checked
from ..recipes import Recipe
from .folder import FolderBatches
from .sampler import Batches as Batches
from .sampler import batch_count
from .split import Split
from .transform import DECODE_ERRORS, Transform

# Mean and standard deviation of the digits' training split, pixels in [0, 1].
DIGITS_MEAN, DIGITS_STD = 0.3054, 0.3762
SATURATED = 64  # of 255; a grey photo with a tint has less


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


class TensorBatches(Batches):
    """Batches of in-memory images; with `augment`, shuffled and augmented one batch at a time.

    Args:
        images: [N, C, H, W] in [0, 1], or bytes.
        targets: [N] class numbers.
        transform: preprocessing; only its normalisation is used.
        batch_size: images per batch; the last batch may be smaller.
        augment: function applied to each batch [B, C, H, W] in [0, 1] before normalisation; None disables augmentation
            and shuffling.
    """

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
        super().__init__()

    def __len__(self) -> int:
        return batch_count(len(self.images), self.batch_size, self.fewest)

    def iter_from(self, count: int) -> Iterator[tuple[Tensor, Any]]:
        """Iterates over an epoch without its first `count` batches."""
        order = torch.randperm(len(self.images)) if self.augment else torch.arange(len(self.images))
        return self._stream(order.split(self.batch_size)[count : len(self)])

    def _stream(self, batches: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, Any]]:
        for chosen in batches:
            self.indices = chosen.tolist()
            images = self._values(chosen)
            images = self.augment(images) if self.augment else images
            of_tensor = isinstance(self.targets, Tensor)
            targets = self.targets[chosen] if of_tensor else [self.targets[i] for i in self.indices]
            yield self.transform.normalise(images), targets

    def _values(self, chosen: Tensor | int) -> Tensor:
        """Images in [0, 1], also if they are bytes."""
        images = self.images[chosen]
        return images if images.is_floating_point() else images / 255

    def display_image(self, i: int) -> Tensor:
        """Image i, [C, H, W] in [0, 1], not augmented."""
        return self._values(i).clamp(0, 1)

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
