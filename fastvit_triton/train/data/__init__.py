"""Training and test batches: the digits of scikit-learn, image folders, CIFAR-10, IDX, webdataset shards, boxes."""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..augment import random_affine
from ..augment.policy import policy_by_name
from ..distributed import World
from ..ranges import NonNegativeInt, PositiveInt, checked
from ..recipes import Recipe
from .cifar import is_cifar, scan_cifar
from .custom import CustomTransform
from .folder import FolderBatches, ImageFiles, UnreadableImages, class_folders, is_divided, scan_folder
from .hf import is_hf, scan_hf, source_of
from .idx import is_idx, scan_idx
from .sampler import batch_count
from .shards import is_shards, scan_shards
from .split import Split
from .transform import MAX_PIXELS, Transform, join_names

# Mean and standard deviation of the digits' training split, pixels in [0, 1].
DIGITS_MEAN, DIGITS_STD = 0.3054, 0.3762


class Batches(Protocol):
    """Iterable of batches for `fit` and `evaluate`: images [B, C, H, W] and class numbers [B].

    Attributes:
        per_rank: each rank gets its own part of a batch; if False all ranks get the whole batch.
        bad: skipped files, with the reason.
        indices: indices of the images in the last batch.
        targets: class numbers of all images.
    """

    per_rank: bool
    bad: dict[Path, str]
    indices: list[int]
    targets: Any

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


@checked
def load(
    name: str,
    recipe: Recipe,
    *,
    workers: NonNegativeInt = 0,
    skip_bad_images: bool = False,
    max_pixels: PositiveInt = MAX_PIXELS,
    custom: str | None = None,
    world: World | None = None,
    split: Split | None = None,
) -> Data:
    """Loads a data set by name.

    A path is one of: an image folder with `train/<class>/` and `val/<class>/`, or with `split` only `<class>/`, images
    of any size, grey or colour, whose sorted folder names are the classes; webdataset shards, see shards.py; CIFAR-10's
    own files `data_batch_1` … `test_batch`; IDX files of the MNIST family, see idx.py.

    Args:
        name: "digits", a path, or a data set of the library `datasets` as hf:NAME, see hf.py; with the recipe of a
            detector "scenes", or a folder with boxes, see detection/coco.py.
        recipe: image size, batch size and augmentation.
        workers: processes that decode images; 0 decodes in this process.
        skip_bad_images: leave out images that cannot be read; `train.bad` and `test.bad` list them.
        max_pixels: images with more pixels count as images that cannot be read.
        custom: `module:attribute` of a transform of training images, see custom.py; None crops and mirrors.
        world: processes among which each batch of image files is divided.
        split: divides an image folder `<class>/`, or the training split of `hf:` data, which is then read whole.

    Raises:
        ValueError: the path is none of these, an image cannot be read and `skip_bad_images` is False, a class has no
            training or no test images, the recipe's augmentation or `custom` does not apply to the digits, `custom`
            fails on the first image, or the data set has test images of its own and `split` is given.
    """
    options: dict[str, Any] = {"workers": workers, "skip_bad_images": skip_bad_images, "world": world}
    if recipe.loss == "detection":
        from ..detection.load import load_detection  # which imports this module

        return load_detection(name, recipe, custom=custom, split=split, max_pixels=max_pixels, **options)
    size = (recipe.img_size, recipe.img_size)
    _check_divisible(name, split)
    if name == "digits":
        if recipe.policy or recipe.repeats > 1 or custom:
            what = "the recipe's policy" if recipe.policy else "the recipe's repeated augmentation"
            what = f"transform {custom}" if custom else what
            raise ValueError(f"{what} needs image files, and the digits are arrays in memory; give --data a folder")
        classes = tuple("0123456789")
        transform = Transform(size, (DIGITS_MEAN,), (DIGITS_STD,))
        load_train: Callable[[], Batches] = partial(
            TensorBatches, *digits("train", size), transform, recipe.batch_size, affine_augmentation(recipe)
        )
    else:
        files = _scan(name, "train", None, world, max_pixels, split)
        classes = files.classes
        transform = Transform(size, recipe.mean, recipe.std, recipe.eval_crop, recipe.crop_mode, recipe.interpolation)
        crop: dict[str, Any] = {"min_area": recipe.min_area, "flip": recipe.flip}
        crop["policy"] = policy_by_name(recipe.policy)
        if custom:
            crop = {"custom": CustomTransform(custom)}
            crop["custom"].check(files, transform)
        fixed: dict[str, Any] = dict(batch_size=recipe.batch_size, crop=crop, repeats=recipe.repeats)
        load_train = partial(FolderBatches, Path(name), files, transform, **fixed, **options)
    test_options: dict[str, Any] = options | dict(max_pixels=max_pixels, split=split)
    train, test = load_both(load_train, partial(load_test, name, classes, transform, recipe.batch_size, **test_options))
    data = Data(name, classes, transform, train, test, test_once=name == "digits", split=split)
    if recipe.loss in ("softmax", "sigmoid", "bce"):  # the others need no labels
        _check_classes(data)
    return data


def load_both(*loaders: Callable[[], Batches]) -> list[Batches]:
    """What the loaders return; the images of all that cannot be read are named in one error.

    Args:
        loaders: of the training and of the test images.

    Raises:
        UnreadableImages: from one of the loaders.
    """
    loaded = []
    errors = []
    for load_part in loaders:
        try:
            loaded.append(load_part())
        except UnreadableImages as error:
            errors.append(error)
    if errors:
        total = sum(part.total for part in (*errors, *loaded) if isinstance(part, UnreadableImages | FolderBatches))
        raise UnreadableImages({k: why for error in errors for k, why in error.bad.items()}, total, errors[0].root)
    return loaded


def _check_classes(data: Data) -> None:
    """Raises ValueError if a class has no training or no test images: its accuracy would be unknown, or zero."""
    for batches, kind in ((data.train, "training"), (data.test, "test")):
        present = set(torch.as_tensor(batches.targets).tolist())
        if missing := [name for i, name in enumerate(data.classes) if i not in present]:
            text = "add some, or remove the class"
            if is_hf(data.name):
                text = "if its images are sorted by class, leave slices out and pass --val-split 0.1"
            count = f"{len(missing)} of its {len(data.classes):,} class{'es' if len(data.classes) > 1 else ''}"
            raise ValueError(f"data {data.name!r} has no {kind} images of {count}, {join_names(missing)}; {text}")


def _check_divisible(name: str, split: Split | None) -> None:
    """Raises ValueError if there is a split for data with test images of their own."""
    if split is None:
        return
    text = "leave --val-split out"
    if is_hf(name):
        if source_of(name).test:
            raise ValueError(f"data {name!r} names its test images; {text}, or name the data set only")
        return
    root = Path(name)
    tested = (root / "val").is_dir() and is_divided(root)
    if tested or name == "digits" or is_shards(root) or is_idx(root) or is_cifar(root):
        raise ValueError(f"data {name!r} has test images of its own; {text}")


@checked
def load_test(
    name: str,
    classes: tuple[str, ...],
    transform: Transform,
    batch_size: PositiveInt,
    *,
    workers: NonNegativeInt = 0,
    skip_bad_images: bool = False,
    max_pixels: PositiveInt = MAX_PIXELS,
    world: World | None = None,
    split: Split | None = None,
) -> Batches:
    """Loads the test images only, for a trained model.

    Args:
        name: as for `load`; in a folder, only `val/` is read, or all its classes if there is neither train/ nor val/.
        classes: names, in the order of the model's logits.
        transform: as in training.
        batch_size: images per batch.
        workers: processes that decode images.
        skip_bad_images: leave out images that cannot be read.
        max_pixels: images with more pixels count as images that cannot be read.
        world: processes among which each batch of image files is divided.
        split: as for `load`.

    Raises:
        ValueError: as for `load`, or the data has a class that is not in `classes`.
    """
    if name == "digits":
        return TensorBatches(*digits("test", transform.size), transform, batch_size)
    options: dict[str, Any] = {"batch_size": batch_size, "workers": workers, "skip_bad_images": skip_bad_images}
    files = _scan(name, "val", classes, world, max_pixels, split)
    return FolderBatches(Path(name), files, transform, world=world, **options)


def _scan(
    name: str,
    split: str,
    classes: tuple[str, ...] | None,
    world: World | None,
    max_pixels: int,
    division: Split | None,
) -> ImageFiles:
    """Lists a split of a data set on disk, or of the library `datasets`."""
    root = Path(name)
    if division is not None:
        whole = partial(scan_hf, name, "train") if is_hf(name) else partial(scan_folder, root, _undivided(root))
        return division.part(whole(classes=classes, max_pixels=max_pixels), root, split)
    if is_hf(name):
        return scan_hf(name, split, classes, max_pixels)
    if is_shards(root):
        return scan_shards(root, split, classes, world, max_pixels)
    if is_idx(root):
        return scan_idx(root, split, classes, max_pixels)
    if is_cifar(root):
        return scan_cifar(root, split, classes)
    flat = split == "val" and root.is_dir() and not is_divided(root) and class_folders(root)
    return scan_folder(root, "" if flat else split, classes, max_pixels)


def _undivided(root: Path) -> str:
    """The folder in `root` that holds the classes: "train" if there is one, else ""."""
    return "train" if root.is_dir() and is_divided(root) else ""


def affine_augmentation(recipe: Recipe) -> Callable[[Tensor], Tensor]:
    """The recipe's `random_affine`, as a function of images [B, C, H, W] in [0, 1]."""
    return partial(random_affine, degrees=recipe.degrees, zoom=recipe.zoom, shear=recipe.shear, shift=recipe.shift)


def digits(split: str, size: tuple[int, int] = (8, 8)) -> tuple[Tensor, Tensor]:
    """The 1,797 handwritten digits that ship with scikit-learn: 8 x 8 pixels, white on black, 17 levels of grey.

    Source: Alpaydin & Kaynak, UCI Optical Recognition of Handwritten Digits, 1998. The split is fixed and stratified:
    1,437 training and 360 test images.

    Args:
        split: "train" or "test".
        size: (height, width); sizes other than 8 x 8 are interpolated.

    Returns:
        Images [N, 1, H, W] in [0, 1] and class numbers [N].

    Raises:
        ValueError: scikit-learn is not installed.
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
