"""Training and test batches of detectors by the name of their data: composed scenes, or a folder with boxes."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..data import Batches, Data, load_both
from ..data.folder import ImageFiles
from ..data.split import Split
from ..data.transform import MAX_PIXELS, Transform, find_defect, join_names, read_image
from ..recipes import Recipe
from .batches import BoxBatches, SceneBatches
from .coco import find_detection, scan_detection
from .scenes import CLASSES, scenes

SCENES = "scenes"
TRAINING, TEST = (12_800, 0), (400, 1)  # number of scenes, and seed


def has_boxes(name: str) -> bool:
    """True if a data set is for detectors: "scenes", or a folder in one of the layouts of `coco`."""
    return name == SCENES or find_detection(Path(name))


def load_detection(
    name: str, recipe: Recipe, *, custom: str | None = None, split: Split | None = None, **options: Any
) -> Data:
    """What `data.load` returns for a detector.

    Args:
        name: "scenes", or a folder with boxes.
        recipe: image and batch size.
        custom: None; transforms of images would not move the boxes.
        split: None; the data have test images of their own.
        options: workers, skip_bad_images, max_pixels and world, as of `data.load`.

    Raises:
        ValueError: the data have no boxes, no images or no objects, an image cannot be read and `skip_bad_images` is
            False, training and test data have different classes, or `custom` or `split` is given.
    """
    if custom:
        raise ValueError(f"transform {custom} would not move the boxes of data {name!r}; leave --transform out")
    if split is not None:
        raise ValueError(f"data {name!r} has test images of its own; leave --val-split out")
    size = (recipe.img_size, recipe.img_size)
    if name == SCENES:
        transform = Transform(size, (0.0,), (1.0,))
        load_train: Callable[[], Batches] = partial(_scenes, "train", transform, recipe.batch_size, *TRAINING)
        classes = CLASSES
    else:
        transform = Transform(size, recipe.mean, recipe.std)
        found = scan_detection(Path(name), "train")
        classes = found.classes
        if not any(len(target["labels"]) for target in found.targets):
            raise ValueError(f"data {name!r} has no objects in its training images; annotate some")
        load_train = partial(_boxes, name, found, transform, recipe.batch_size, {}, **options)
    load_test = partial(load_detection_test, name, classes, transform, recipe.batch_size, **options)
    train, test = load_both(load_train, load_test)
    return Data(name, classes, transform, train, test)


def load_detection_test(
    name: str, classes: tuple[str, ...], transform: Transform, batch_size: int, **options: Any
) -> Batches:
    """Loads the test images only; the arguments are those of `data.load_test`.

    Raises:
        ValueError: as for `load_detection`, or the data have a class that is not in `classes`.
    """
    if name == SCENES:
        return _scenes("test", transform, batch_size, *TEST)
    found = scan_detection(Path(name), "val")  # its numbers are replaced below
    unknown = [label for label in found.classes if label and label not in classes]
    if unknown:
        raise ValueError(
            f"data {name!r} has {join_names(unknown)} among its test images, which are not among the {len(classes)} "
            f"classes of training ({join_names([label for label in classes if label])}); rename or remove them"
        )
    numbers = [classes.index(label) if label else -1 for label in found.classes]
    for target in found.targets:
        target["labels"].apply_(lambda label: numbers[int(label)])
    return _boxes(name, found, transform, batch_size, None, **options)


def _scenes(split: str, transform: Transform, batch_size: int, count: int, seed: int) -> SceneBatches:
    images, targets = scenes(split, count, seed, side=transform.size[0])
    return SceneBatches(images, targets, transform, batch_size, shuffled=split == "train")


def _boxes(
    name: str,
    found: Any,
    transform: Transform,
    batch_size: int,
    crop: dict | None,
    max_pixels: int = MAX_PIXELS,
    **options: Any,
) -> BoxBatches:
    decode = partial(read_image, max_pixels=max_pixels)
    check = partial(find_defect, max_pixels=max_pixels)
    files = ImageFiles(found.files, found.targets, found.classes, decode, check)
    return BoxBatches(Path(name), files, transform, batch_size=batch_size, crop=crop, **options)
