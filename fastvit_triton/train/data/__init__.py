"""Images to learn from: the digits that ship inside scikit-learn, and image folders."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .augment import random_affine
from .cifar import cifar, is_cifar
from .folder import FolderBatches, scan
from .image import Transform
from .parallel import World
from .policy import policy_of
from .ranges import Count, Number, checked
from .recipes import Recipe
from .shards import is_shards, shards

# Mean and deviation of the digits' training split, of pixels in [0, 1].
DIGITS_MEAN, DIGITS_STD = 0.3054, 0.3762


class Batches(Protocol):
    """What `fit` and `evaluate` iterate over: images [B, C, H, W] and targets [B].

    `bad` maps each file that was left out to the reason; `picture(i)` is image i as it is shown; `after(n)` iterates
    without the first n batches, with the same draws; `indices` are the images of the last batch; `dealt` says that of
    several processes each gets its part, not the whole batch.
    """

    dealt: bool

    bad: dict[Path, str]
    indices: list[int]

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]: ...

    def after(self, count: int) -> Iterator[tuple[Tensor, Tensor]]: ...

    def picture(self, i: int) -> Tensor: ...


@dataclass(frozen=True)
class Data:
    """Training and test batches of one task, and what `predict` needs to treat a new picture alike.

    `test_once` keeps the test split unread until the last epoch is over.
    """

    name: str
    classes: tuple[str, ...]
    transform: Transform
    train: Batches
    test: Batches
    test_once: bool = False


class TensorBatches:
    """Batches of images that fit in memory; shuffled, and augmented a batch at a time, when `augment` is given.

    Args:
        images: [N, C, H, W] in [0, 1].
        targets: [N] class numbers.
        transform: normalises.
        batch_size: images per batch; the last batch may be smaller.
        augment: of a batch in [0, 1], before normalisation; None keeps order and images.
    """

    dealt = False

    @checked
    def __init__(
        self,
        images: Tensor,
        targets: Tensor,
        transform: Transform,
        batch_size: Count,
        augment: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.images, self.targets, self.transform = images, targets, transform
        self.batch_size, self.augment = batch_size, augment
        self.bad: dict[Path, str] = {}
        self.indices: list[int] = []

    def __len__(self) -> int:
        return -(-len(self.images) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.after(0)

    def after(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """An epoch without its first `count` batches."""
        order = torch.randperm(len(self.images)) if self.augment else torch.arange(len(self.images))
        return self._stream(order.split(self.batch_size)[count:])

    def _stream(self, parts: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in parts:
            self.indices = chosen.tolist()
            images = self.augment(self.images[chosen]) if self.augment else self.images[chosen]
            yield self.transform.normalise(images), self.targets[chosen]

    def picture(self, i: int) -> Tensor:
        """Image i as it is shown, [C, H, W] in [0, 1]."""
        return self.images[i]


@checked
def load(
    name: str, recipe: Recipe, *, workers: Number = 0, skip_bad_images: bool = False, world: World | None = None
) -> Data:
    """The data set of that name: "digits", or the path of an image folder or of shards.

    A folder holds `train/<class>/` and `val/<class>/` with pictures of any size, grey or colour; the names of the class
    folders, sorted, are the classes. Or it holds webdataset shards, see shards.py, or is CIFAR-10's own, with
    `data_batch_1` … `test_batch`. Refuses a folder that is none of these, and unreadable pictures unless told to skip
    them.

    Args:
        name: "digits" or a path.
        recipe: image size, batch size and augmentation.
        workers: processes that decode pictures; 0 decodes in this one.
        skip_bad_images: leave unreadable pictures out; `train.bad` and `test.bad` name them.
        world: processes that share each batch of pictures in files.

    Raises:
        ValueError: the recipe changes pictures in a way that is not for the digits.
    """
    size = (recipe.img_size, recipe.img_size)
    if name == "digits":
        if recipe.policy or recipe.repeats > 1:
            raise ValueError(
                f"the recipe's {'policy' if recipe.policy else 'repeated augmentation'} is for pictures in files, and "
                "the digits are tables of 8 x 8 numbers; give --data a folder"
            )
        classes, transform = tuple("0123456789"), Transform(size, (DIGITS_MEAN,), (DIGITS_STD,))
        train = TensorBatches(*digits("train", size), transform, recipe.batch_size, pose(recipe))
    else:
        files, targets, classes, options = _pictures(Path(name), "train", world=world)
        transform = Transform(size, recipe.mean, recipe.std, crop=recipe.eval_crop)
        crop = {"min_area": recipe.min_area, "flip": recipe.flip, "policy": policy_of(recipe.policy)}
        options |= {"batch_size": recipe.batch_size, "workers": workers, "skip_bad_images": skip_bad_images}
        train = FolderBatches(Path(name), files, targets, transform, crop=crop, repeats=recipe.repeats, **options)
    options = {"workers": workers, "skip_bad_images": skip_bad_images, "world": world}
    test = load_test(name, classes, transform, recipe.batch_size, **options)
    return Data(name, classes, transform, train, test, test_once=name == "digits")


@checked
def load_test(
    name: str,
    classes: tuple[str, ...],
    transform: Transform,
    batch_size: Count,
    *,
    workers: Number = 0,
    skip_bad_images: bool = False,
    world: World | None = None,
) -> Batches:
    """The test images alone, for a model whose classes and transform are known. Refuses classes it does not know.

    Args:
        name: "digits" or the path of an image folder, of which `val/` is read.
        classes: names, in the order of the model's logits.
        transform: as in training.
        batch_size: images per batch.
        workers: processes that decode pictures.
        skip_bad_images: leave unreadable pictures out.
        world: processes that share each batch of pictures in files.
    """
    if name == "digits":
        return TensorBatches(*digits("test", transform.size), transform, batch_size)
    files, targets, _, options = _pictures(Path(name), "val", classes, world)
    options |= {"batch_size": batch_size, "workers": workers, "skip_bad_images": skip_bad_images}
    return FolderBatches(Path(name), files, targets, transform, **options)


def _pictures(
    root: Path, split: str, classes: tuple[str, ...] | None = None, world: World | None = None
) -> tuple[Sequence, list, tuple, dict]:
    """Files, targets, classes, and how `FolderBatches` decodes and checks the files."""
    if is_shards(root):
        files, targets, classes, decode = shards(root, split, classes, world)
        return files, targets, classes, {"decode": decode, "check": None, "world": world}
    if not is_cifar(root):
        return *scan(root, split, classes), {"world": world}
    files, targets, classes, decode = cifar(root, split, classes)
    return files, targets, classes, {"decode": decode, "check": None, "world": world}


def pose(recipe: Recipe) -> Callable[[Tensor], Tensor]:
    """The recipe's augmentation of a batch of images [B, C, H, W] in [0, 1]."""
    return partial(random_affine, degrees=recipe.degrees, zoom=recipe.zoom, shear=recipe.shear, shift=recipe.shift)


def digits(split: str, size: tuple[int, int] = (8, 8)) -> tuple[Tensor, Tensor]:
    """The 1,797 handwritten digits inside scikit-learn: 8 x 8 pixels, white on black, 17 levels of grey.

    Real images without a download (Alpaydin & Kaynak, UCI Optical Recognition of Handwritten Digits, 1998). The split
    is fixed and stratified: 1,437 to train, 360 to test. Refuses to work without scikit-learn.

    Args:
        split: "train" or "test".
        size: (height, width); other sizes than 8 x 8 are interpolated.

    Returns:
        Images [N, 1, H, W] in [0, 1] and class numbers [N].
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise ValueError("data 'digits' needs scikit-learn; pip install scikit-learn, or give a folder") from error
    bunch = load_digits()
    rows = train_test_split(range(len(bunch.target)), test_size=0.2, random_state=0, stratify=bunch.target)
    chosen = rows[("train", "test").index(split)]
    images = torch.tensor(bunch.images[chosen] / 16, dtype=torch.float32)[:, None]  # [N, 1, 8, 8]
    if size != (8, 8):
        images = F.interpolate(images, size, mode="bilinear", antialias=True)
    return images, torch.tensor(bunch.target[chosen])
