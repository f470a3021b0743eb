"""Reads images with boxes: COCO's annotation files in three layouts of folders, and the text files of YOLO.

X/annotations/instances_train2017.json with X/train2017/       COCO; the same with val
X/train/_annotations.coco.json beside its images               Roboflow; val or valid
X/train.json with X/images/                                    the same with val
X/data.yaml, X/images/train/ and X/labels/train/*.txt, or X/train/images/ and X/train/labels/     YOLO
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..data.transform import DECODE_ERRORS, SUFFIXES, read_image

Ids = Literal["compact", "kept"]
Target = dict[str, Tensor]
SPLITS = {"train": ("train", "train2017"), "val": ("val", "val2017", "valid")}


class DetectionFiles(NamedTuple):
    """One split of a data set with boxes.

    Attributes:
        files: one path per image, sorted.
        targets: for each image `boxes` [n, 4], corners in pixels, float32; `labels` [n], class numbers; `crowd` [n],
            True for boxes around many objects, which are for evaluation only; `areas` [n], of masks if known.
        classes: names by class number; an empty name is a number that no class has.
        ids: "compact", numbers from 0 without gaps, or "kept", the numbers of the file.
        skipped: boxes without area in the image, which are left out: one description each.
    """

    files: list[Path]
    targets: list[Target]
    classes: tuple[str, ...]
    ids: Ids
    skipped: tuple[str, ...] = ()


def find_detection(root: Path) -> bool:
    """True if a folder has one of the layouts."""
    return any(find(root, "train") is not None for find in (_find_coco, _find_yolo))


def scan_detection(root: Path, split: Literal["train", "val"], ids: Ids = "compact") -> DetectionFiles:
    """Reads one split of a folder in one of the layouts above.

    Args:
        root: the folder.
        split: "train" or "val".
        ids: "compact" for a new head; "kept" for a head that was trained with the numbers of the file, such as the 91
            of COCO, of which 80 are classes.

    Raises:
        ValueError: the folder has no such layout, or a file is damaged; the message says which and where.
    """
    if (paths := _find_coco(root, split)) is not None:
        return load_coco(*paths, ids)
    if (folder := _find_yolo(root, split)) is not None:
        return load_yolo(root / "data.yaml", *folder)
    raise ValueError(
        f"data {str(root)!r} has no boxes for {split!r}; give a folder with annotations/instances_{split}2017.json, "
        f"{split}/_annotations.coco.json, {split}.json and images/, or data.yaml of YOLO"
    )


def load_coco(annotations: Path, folder: Path, ids: Ids = "compact") -> DetectionFiles:
    """Reads an annotation file of COCO; boxes that reach beyond an image are cut at its border.

    Args:
        annotations: JSON with `images`, `annotations` and `categories`.
        folder: holds the images.
        ids: as for `scan_detection`.

    Raises:
        ValueError: the file is not such JSON, or refers to an image or category that it lacks.
    """
    try:
        content = json.loads(annotations.read_text(encoding="utf-8"))
        images = {image["id"]: image for image in content["images"]}
        names = {int(category["id"]): str(category["name"]) for category in content["categories"]}
        rows: dict[Any, list[Any]] = {key: [] for key in images}
        for row in content["annotations"]:
            rows[row["image_id"]].append(row)
        numbers = {key: i for i, key in enumerate(sorted(names))} if ids == "compact" else {key: key for key in names}
        records = []
        skipped: list[str] = []
        for key, image in images.items():
            where = f"image {_printable(image['file_name'])} in {annotations}"
            size = (int(image["width"]), int(image["height"]))
            target = _Objects(size, skipped)
            for row in rows[key]:
                x, y, w, h = row["bbox"]
                crowd = bool(row.get("iscrowd", 0))
                target.add((x, y, x + w, y + h), numbers[row["category_id"]], where, crowd, row.get("area"))
            records.append((folder / image["file_name"], target.tensors()))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{annotations} cannot be read as JSON: {error}") from error
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{annotations} is no annotation file of COCO: it lacks {error}") from error
    table = {numbers[key]: _printable(name) for key, name in names.items()}
    classes = tuple(table.get(i, "") for i in range(max(table, default=-1) + 1))
    return _sorted(records, classes, ids, skipped)


def load_yolo(description: Path, images: Path, labels: Path) -> DetectionFiles:
    """Reads YOLO's text files: a line `class x y width height` per object, in fractions of the image.

    Args:
        description: data.yaml, whose `names` are the classes.
        images, labels: folders; labels/a.txt belongs to images/a.jpg, and may be missing if there is no object.

    Raises:
        ValueError: a file is missing or damaged; the message names it and the line.
    """
    classes = _yolo_names(description)
    records = []
    skipped: list[str] = []
    for path in (path for path in images.rglob("*") if path.suffix.lower() in SUFFIXES):
        text = labels / path.relative_to(images).with_suffix(".txt")
        lines = text.read_text(encoding="utf-8").splitlines() if text.is_file() else []
        try:
            width, height = read_image(path).size if lines else (0, 0)
        except DECODE_ERRORS as error:
            raise ValueError(f"{path} cannot be decoded: {error}") from error
        target = _Objects((width, height), skipped)
        for i, line in enumerate(lines, 1):
            where = f"line {i} of {text}"
            try:
                label, x, y, w, h = (float(word) for word in line.split())
            except ValueError:
                raise ValueError(f"{where} is {line[:60]!r}; expected five numbers: class x y width height") from None
            if label not in range(len(classes)):
                raise ValueError(f"{where} has class {label:g}; {description} names {len(classes)}")
            corners = ((x - w / 2) * width, (y - h / 2) * height, (x + w / 2) * width, (y + h / 2) * height)
            target.add(corners, int(label), where)
        records.append((path, target.tensors()))
    if not records:
        raise ValueError(f"{images} holds no images ({', '.join(SUFFIXES)})")
    return _sorted(records, classes, "compact", skipped)


def fractions(target: Target, size: tuple[int, int]) -> Target:
    """A target as the losses take it: `labels`, and `boxes` as centre and size in fractions of the image.

    Args:
        target: boxes as corners in pixels; those of crowds and without area are left out.
        size: (width, height) of the image in pixels.
    """
    boxes = target["boxes"]
    keep = (boxes[:, 2:] > boxes[:, :2]).all(1)
    if "crowd" in target:
        keep &= ~target["crowd"]
    low, high = (boxes[keep] / torch.tensor([*size, *size])).split(2, 1)
    return dict(labels=target["labels"][keep], boxes=torch.cat(((low + high) / 2, high - low), 1))


def _find_coco(root: Path, split: str) -> tuple[Path, Path] | None:
    """(annotation file, folder of images)."""
    for name in SPLITS[split]:
        choices = [(root / "annotations" / f"instances_{name}.json", root / name)]
        choices += [(root / name / "_annotations.coco.json", root / name), (root / f"{name}.json", root / "images")]
        for annotations, folder in choices:
            if annotations.is_file():
                return annotations, folder
    return None


def _find_yolo(root: Path, split: str) -> tuple[Path, Path] | None:
    """(folder of images, folder of labels)."""
    if not (root / "data.yaml").is_file():
        return None
    for name in SPLITS[split]:
        for images, labels in ((f"images/{name}", f"labels/{name}"), (f"{name}/images", f"{name}/labels")):
            if (root / images).is_dir():
                return root / images, root / labels
    return None


def _yolo_names(path: Path) -> tuple[str, ...]:
    """The classes of data.yaml, whose `names` are [a, b], or lines "- a" or "0: a"."""
    text = path.read_text(encoding="utf-8")
    if match := re.search(r"^names:\s*\[(.*?)\]", text, re.MULTILINE | re.DOTALL):
        words: Iterable[str] = match[1].split(",")
    elif match := re.search(r"^names:\s*\n((?:[ \t]*(?:-|\d+:)[^\n]*\n?)+)", text, re.MULTILINE):
        words = (re.sub(r"^\s*(-|\d+:)", "", line) for line in match[1].splitlines())
    else:
        raise ValueError(f"{path} has no names; expected names: [cat, dog], or a line for each class")
    return tuple(_printable(word.strip().strip("'\"")) for word in words if word.strip())


class _Objects:
    """The objects of one image; those without area within it are described in `skipped` instead."""

    def __init__(self, size: tuple[int, int], skipped: list[str]) -> None:
        self.size = size
        self.skipped = skipped
        self.rows: list[tuple[tuple[float, ...], int, bool, float]] = []

    def add(
        self, corners: tuple[float, ...], label: int, where: str, crowd: bool = False, area: float | None = None
    ) -> None:
        left, top, right, bottom = (float(value) for value in corners)
        cut = (max(left, 0.0), max(top, 0.0), min(right, float(self.size[0])), min(bottom, float(self.size[1])))
        width = cut[2] - cut[0]
        height = cut[3] - cut[1]
        if width > 0 and height > 0:
            self.rows.append((cut, label, crowd, width * height if area is None else float(area)))
        else:
            self.skipped.append(f"{where}: corners {left:g}, {top:g}, {right:g}, {bottom:g} of {self.size}")

    def tensors(self) -> Target:
        boxes, labels, crowd, areas = zip(*self.rows, strict=True) if self.rows else ((), (), (), ())
        corners = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
        numbers = torch.tensor(labels, dtype=torch.int64)
        return dict(
            boxes=corners, labels=numbers, crowd=torch.tensor(crowd, dtype=torch.bool), areas=torch.tensor(areas)
        )


def _sorted(
    records: list[tuple[Path, Target]], classes: tuple[str, ...], ids: Ids, skipped: list[str]
) -> DetectionFiles:
    ordered = sorted(records, key=lambda record: record[0])
    files = [path for path, _ in ordered]
    return DetectionFiles(files, [target for _, target in ordered], classes, ids, tuple(skipped))


def _printable(name: str) -> str:
    """The name without control characters, which a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in name)
