"""Training and test batches of detectors by the name of their data: composed images, or a folder with boxes.

A folder has one of these layouts:

X/annotations/instances_train2017.json with X/train2017/       COCO; the same for test images
X/train/_annotations.coco.json beside its images               Roboflow
X/train.json with X/images/                                    one file for each split
X/data.yaml, X/images/train/ and X/labels/train/*.txt, or X/train/images/ and X/train/labels/     YOLO

Splits are named train or training, and val, valid, validation, test or testing, in any case.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..data import Batches
from ..data.findings import warn_of
from ..data.folder import SPLITS, ImageFiles, find_split, nfc
from ..data.transform import MAX_PIXELS, Header, Transform, join_names, read_image
from ..recipes import IMAGENET_MEAN, IMAGENET_STD, Recipe
from .batches import BoxBatches, SceneBatches
from .coco import load_coco
from .objects import DetectionFiles, Ids
from .scenes import CLASSES, scenes
from .shapes import CLASSES as SHAPE_CLASSES
from .shapes import shapes
from .yolo import find_description, load_yolo

ROBOFLOW = "_annotations.coco.json"
SCENES, SHAPES = "scenes", "shapes"
COMPOSED = {SCENES: CLASSES, SHAPES: SHAPE_CLASSES}  # classes of data that need no files
TRAINING, TEST = (12_800, 0), (400, 1)  # number of scenes, and seed
SHAPES_TRAINING, SHAPES_TEST = (2_400, 0), (400, 1)  # likewise


def has_boxes(name: str) -> bool:
    """True if a data set is for detectors: "scenes" or "shapes", or a folder in one of the layouts."""
    root = Path(name)
    return name in COMPOSED or (
        root.is_dir() and (find_description(root) is not None or any(_find_coco(root, split) for split in SPLITS))
    )


def scan_detection(
    root: Path, split: Literal["train", "val"], ids: Ids = "compact", max_pixels: int = MAX_PIXELS
) -> DetectionFiles:
    """Reads one split of a folder in one of the layouts above."""
    if root.is_dir() and (paths := _find_coco(root, split)) is not None:
        return load_coco(*paths, ids, max_pixels)
    if root.is_dir() and (description := find_description(root)) is not None:
        return load_yolo(description, split, max_pixels)
    raise ValueError(
        f"data {str(root)!r} has no boxes for {split!r}; give a folder with annotations/instances_{split}2017.json, "
        f"{split}/_annotations.coco.json, {split}.json and images/, or data.yaml of YOLO"
    )


def _find_coco(root: Path, split: str) -> tuple[Path, Path] | None:
    """(annotation file, folder of images)."""
    for group in SPLITS[split]:
        names = "|".join(group)
        choices = {root / "annotations": rf"instances_((?:{names})(?:\d{{4}})?)\.json", root: rf"({names})\.json"}
        for folder, pattern in choices.items():
            files = sorted(folder.iterdir()) if folder.is_dir() else []
            found = [(file, match[1]) for file in files if (match := re.fullmatch(pattern, file.name, re.IGNORECASE))]
            if len(found) > 1:
                shown = join_names([file.name for file, _ in found])
                raise ValueError(f"data {str(folder)!r} has {shown} for one split; move one away")
            for file, name in found:
                images = [root / name, root / "images" / name, root / "images"][folder == root :]
                return file, next((place for place in images if place.is_dir()), images[0])
    beside = find_split(root, split, lambda folder: (folder / ROBOFLOW).exists())
    return None if beside is None else (beside / ROBOFLOW, beside)


def open_detection(
    name: str, recipe: Recipe, custom: str | None, levels: float | None, *, max_pixels: int = MAX_PIXELS, **options: Any
) -> tuple[tuple[str, ...], Transform, Callable[[], Batches]]:
    """Classes, preprocessing, and what loads the training images."""
    if custom:
        raise ValueError(f"transform {custom} would not move the boxes of data {name!r}; leave --transform out")
    size = (recipe.img_size, recipe.img_size)
    if name in COMPOSED:
        if levels is not None:
            raise ValueError(f"data {name!r} are composed in [0, 1]; leave --levels out")
        transform = Transform(size, *((0.0,), (1.0,)) if name == SCENES else (IMAGENET_MEAN, IMAGENET_STD))
        return COMPOSED[name], transform, partial(_composed, name, "train", transform, recipe.batch_size)
    transform = Transform(size, recipe.mean, recipe.std, levels=levels)
    found = scan_detection(Path(name), "train", max_pixels=max_pixels)
    _check_objects(name, found, "training")
    return (
        found.classes,
        transform,
        partial(_boxes, name, found, transform, recipe.batch_size, {}, max_pixels, **options),
    )


def load_detection_test(
    name: str, classes: tuple[str, ...], transform: Transform, batch_size: int, **options: Any
) -> Batches:
    """Loads the test images only; the arguments are those of `data.load_test`."""
    if name in COMPOSED:
        return _composed(name, "test", transform, batch_size)
    found = scan_detection(Path(name), "val", max_pixels=options.get("max_pixels", MAX_PIXELS))
    _check_objects(name, found, "test")
    known = {nfc(label): i for i, label in enumerate(classes) if label}
    unknown = [label for label in found.classes if label and label not in known]
    if unknown:
        raise ValueError(
            f"data {name!r} has {join_names(unknown)} among its test images, which are not among the {len(classes)} "
            f"classes of training ({join_names([label for label in classes if label])}); rename or remove them"
        )
    numbers = [known.get(label, -1) for label in found.classes]
    for target in found.targets:
        target["labels"].apply_(lambda label: numbers[int(label)])
    return _boxes(name, found, transform, batch_size, None, **options)


def _composed(name: str, split: str, transform: Transform, batch_size: int) -> SceneBatches:
    trains = split == "train"
    if name == SCENES:
        images, targets = scenes(split, *(TRAINING if trains else TEST), side=transform.size[0])
    else:
        images, targets = shapes(*(SHAPES_TRAINING if trains else SHAPES_TEST), side=transform.size[0])
    return SceneBatches(images, targets, transform, batch_size, shuffled=trains)


def _check_objects(name: str, found: DetectionFiles, kind: str) -> None:
    """Raises ValueError if there are no objects: the average precision of such test images is undefined."""
    if all(bool(target["crowd"].all()) for target in found.targets):
        lost = found.findings.sentence("objects left out")
        advice = f"of those annotated, {lost}" if lost else "annotate some"
        raise ValueError(f"data {name!r} has no objects in its {kind} images; {advice}")


def _boxes(
    name: str,
    found: DetectionFiles,
    transform: Transform,
    batch_size: int,
    crop: dict | None,
    max_pixels: int = MAX_PIXELS,
    **options: Any,
) -> BoxBatches:
    decode = partial(_decode, found.headers, max_pixels, transform.levels)
    files = ImageFiles(found.files, found.targets, found.classes, decode, found.defects.get, found.findings)
    warn_of(name, found.findings)
    return BoxBatches(Path(name), files, transform, batch_size=batch_size, crop=crop, **options)


def _decode(headers: dict[Path, Header], max_pixels: int, levels: float | None, path: Path) -> Any:
    """The image, whose size has to be that of the header for which its boxes were read."""
    image = read_image(path, max_pixels, levels)
    if path in headers and image.size != headers[path].size:
        (width, height), (wide, high) = image.size, headers[path].size
        raise ValueError(f"has {width} x {height} pixels, and its header said {wide} x {high}, for which its boxes are")
    return image
