"""Data sets by name, for training and for tests. A further kind of files is a row of `SOURCES`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch

from .augment.policy import policy_by_name
from .data import DIGITS_MEAN, DIGITS_STD, Batches, Data, TensorBatches, affine_augmentation, digits
from .data.cifar import is_cifar, scan_cifar
from .data.custom import CustomTransform
from .data.folder import FolderBatches, ImageFiles, UnreadableImages, has_test_classes, scan_folder
from .data.hf import is_hf, scan_hf, source_of
from .data.idx import is_idx, scan_idx
from .data.shards import is_shards, scan_shards
from .data.split import Split
from .data.transform import MAX_PIXELS, Transform, join_names
from .detection.load import load_detection_test, open_detection
from .distributed import World
from .ranges import NonNegativeInt, Positive, PositiveInt, checked
from .recipes import Recipe


class DataSource(NamedTuple):
    """A kind of data set whose images are decoded one by one."""

    fits: Callable[[str], bool]  # True if a name is of this kind and of none before
    scan: Callable[..., ImageFiles]  # lists "train", "val" or "", all: (name, split, classes, max_pixels)
    has_test: Callable[[str], bool] = lambda name: True  # images of its own, as far as is known without opening it
    deep: bool = True  # images may have more than 8 bits
    collective: bool = False  # the processes divide the work of `scan`, which takes their `world`

    @staticmethod
    def of(name: str) -> "DataSource":
        """The kind of a data set."""
        return next(source for source in SOURCES if source.fits(name))

    def part(
        self,
        name: str,
        part: str,
        classes: tuple[str, ...] | None,
        max_pixels: int,
        world: World | None,
        split: Split | None,
        levels: float | None,
    ) -> ImageFiles:
        """Lists the training or the test images; with `split`, those that it takes of what there is."""
        if levels is not None and not self.deep:
            raise ValueError(f"data {name!r} has pixels of 8 bits; leave --levels out")
        ranks = {"world": world} if self.collective else {}
        files = self.scan(name, part if split is None else "", classes, max_pixels, **ranks).with_levels(levels)
        if split is None:
            return files
        files = split.part(files, Path(name), part)
        return files if part == "train" else files._replace(findings=None)  # which both parts share


SOURCES = (
    DataSource(is_hf, scan_hf, lambda name: bool(source_of(name).test)),
    DataSource(is_shards, scan_shards, collective=True),
    DataSource(is_idx, scan_idx, deep=False),
    DataSource(is_cifar, scan_cifar, deep=False),
    DataSource(lambda name: True, scan_folder, has_test_classes),
)


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
    levels: Annotated[Positive | None, "the usual range"] = None,
) -> Data:
    """Loads a data set by name.

    A path is one of: an image folder with `train/<class>/` and `val/<class>/`, or other names of splits (`SPLITS` in
    folder.py), or with `split` only `<class>/`, images of any size, grey or colour, whose sorted folder names are the
    classes; webdataset shards, see shards.py; CIFAR-10's
    own files `data_batch_1` … `test_batch`; IDX files of the MNIST family, see idx.py.

    Args:
        name: "digits", a path, or a data set of the library `datasets` as hf:NAME, see hf.py; with the recipe of a
            detector "scenes", or a folder with boxes, see detection/load.py.
        recipe: image size, batch size and augmentation.
        workers: processes that decode images; 0 decodes in this process.
        skip_bad_images: leave out images that cannot be read; `train.bad` and `test.bad` list them.
        max_pixels: images with more pixels count as images that cannot be read.
        custom: `module:attribute` of a transform of training images, see custom.py; None crops and mirrors.
        world: processes among which each batch of image files is divided.
        split: divides an image folder `<class>/`, or the training split of `hf:` data, which is then read whole.
        levels: value of white in images of more than 8 bits, see `read_image`.

    Raises:
        ValueError: the path is none of these, an image cannot be read and `skip_bad_images` is False, a class has no
            training or no test images, the recipe's augmentation or `custom` does not apply to the digits, `custom`
            fails on the first image, or the data set has test images of its own and `split` is given.
    """
    options: dict[str, Any] = {"workers": workers, "skip_bad_images": skip_bad_images, "world": world}
    size = (recipe.img_size, recipe.img_size)
    detector = recipe.loss == "detection"
    if split is not None and (detector or has_test_images(name)):
        if is_hf(name) and not detector:
            more = "leave --val-split out, or name the data set only"
            raise ValueError(f"data {name!r} names its test images; {more}")
        raise ValueError(f"data {name!r} has test images of its own; leave --val-split out")
    load_train: Callable[[], Batches]
    if detector:
        options |= {"max_pixels": max_pixels}
        classes, transform, load_train = open_detection(name, recipe, custom, levels, **options)
    elif name == "digits":
        if levels is not None:
            raise ValueError("data 'digits' are arrays in [0, 1]; leave --levels out")
        if recipe.policy or recipe.repeats > 1 or custom:
            what = "the recipe's policy" if recipe.policy else "the recipe's repeated augmentation"
            what = f"transform {custom}" if custom else what
            raise ValueError(f"{what} needs image files, and the digits are arrays in memory; give --data a folder")
        classes = tuple("0123456789")
        transform = Transform(size, (DIGITS_MEAN,), (DIGITS_STD,))
        load_train = partial(
            TensorBatches, *digits("train", size), transform, recipe.batch_size, affine_augmentation(recipe)
        )
    else:
        files = DataSource.of(name).part(name, "train", None, max_pixels, world, split, levels)
        classes = files.classes
        shape = recipe.eval_crop, recipe.crop_mode, recipe.interpolation
        transform = Transform(size, recipe.mean, recipe.std, *shape, levels)
        crop: dict[str, Any] = {"min_area": recipe.min_area, "flip": recipe.flip}
        crop["policy"] = policy_by_name(recipe.policy)
        if custom:
            crop = {"custom": CustomTransform(custom)}
            crop["custom"].check(files, transform)
        fixed: dict[str, Any] = dict(batch_size=recipe.batch_size, crop=crop, repeats=recipe.repeats)
        load_train = partial(FolderBatches, Path(name), files, transform, **fixed, **options)
    if not detector:
        options |= {"max_pixels": max_pixels, "split": split}
    tests = load_detection_test if detector else load_test
    train, test = _load_both(load_train, partial(tests, name, classes, transform, recipe.batch_size, **options))
    data = Data(name, classes, transform, train, test, test_once=name == "digits", split=split)
    if recipe.loss in ("softmax", "sigmoid", "bce"):  # the others need no labels
        _check_classes(data)
    return data


def _load_both(*loaders: Callable[[], Batches]) -> list[Batches]:
    """What the loaders return; the images of all that cannot be read are named in one error."""
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
                text = "if its images are sorted by class, leave slices out and pass --val-split 0.2"
            count = f"{len(missing)} of its {len(data.classes):,} class{'es' if len(data.classes) > 1 else ''}"
            raise ValueError(f"data {data.name!r} has no {kind} images of {count}, {join_names(missing)}; {text}")


def has_test_images(name: str) -> bool:
    """True if a data set has test images of its own, as far as that is known without opening it."""
    return name == "digits" or DataSource.of(name).has_test(name)


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
    """Loads the test images only, for a trained model."""
    if name == "digits":
        return TensorBatches(*digits("test", transform.size), transform, batch_size)
    options: dict[str, Any] = {"batch_size": batch_size, "workers": workers, "skip_bad_images": skip_bad_images}
    files = DataSource.of(name).part(name, "val", classes, max_pixels, world, split, transform.levels)
    return FolderBatches(Path(name), files, transform, world=world, **options)
