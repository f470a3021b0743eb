"""Data sets of YOLO: `data.yaml`, and beside each folder `images` a folder `labels` with a text file for each image.

A line of a text file is an object: `class x y width height`, or `class x1 y1 x2 y2 x3 y3 …` of a polygon, in fractions
of the upright image. Source: https://docs.ultralytics.com/datasets/detect
"""

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..data.findings import UNLABELLED, Findings
from ..data.folder import find_split, list_images
from ..data.transform import MAX_PIXELS, SUFFIXES, join_names
from .objects import MAX_CLASS, Corners, DetectionFiles, Objects, class_name, find_corners, read_headers

DESCRIPTIONS = ("data.yaml", "data.yml")
KINDS = {"train": "training", "val": "test"}
NOTHING = ("", "~", "null", "Null", "NULL")  # what YAML takes for no value
PIXELS = 2.0  # coordinates above this are no fractions: a box that reaches beyond its image has less


class Description(NamedTuple):
    """What `data.yaml` says."""

    path: Path  # the file
    root: Path  # the folder that `path` names, or that of the file
    classes: tuple[str, ...]  # names by class number; an empty name is a number that no class has
    splits: dict[str, list[str]]  # by "train" and "val", the folders or lists of images; empty if the file does not say
    keypoints: bool  # lines have key points after the four numbers of the box
    moved: bool  # the folder that `path` names does not exist, and that of the file is read


def find_description(root: Path) -> Path | None:
    """The file `data.yaml` of a folder."""
    return next((root / name for name in DESCRIPTIONS if (root / name).exists()), None)


def load_yolo(description: Path, split: str = "train", max_pixels: int = MAX_PIXELS) -> DetectionFiles:
    """Reads one split."""
    about = read_description(description)
    findings = Findings()
    if about.moved:
        findings.add("odd", "the folder of `path` does not exist, that of data.yaml is read", str(description))
    images = sorted({image for place in _places(about, split) for image in _images(place, findings)})
    if not images:
        raise ValueError(f"{description} names a split {split!r} without images; add some ({', '.join(SUFFIXES)})")
    texts = {image: _label_file(image, about.root) for image in images}
    lines = {image: list(_lines(text)) for image, text in texts.items() if text.exists()}
    if not lines:
        raise ValueError(
            f"{description} has no label file for any of its {len(images):,} {KINDS[split]} images, the first of which "
            f"would be {texts[images[0]]}; put them there, empty ones for images without objects"
        )
    labelled = Counter(texts[image].parent for image in lines)
    for image in images:
        if image not in lines:
            empty = not labelled[texts[image].parent]
            reason = UNLABELLED if empty else "without a label file"
            findings.add("images without labels", reason, str(image))
    headers, defects = read_headers(images, max_pixels)
    targets = []
    boxes = []
    for image in images:
        target = Objects(headers[image].size if image in headers else (1, 1), findings)
        for number, line in lines.get(image, []) if image in headers else []:
            where = f"line {number} of {texts[image]}"
            label, numbers, corners = _object(line, where, about, findings)
            corners = _in_pixels(corners, target.size)
            target.add(corners, label, where)
            if numbers is not None:
                boxes.append((_in_pixels(numbers, target.size), corners, target.size, where))
        targets.append(target.tensors())
    find_corners(boxes, findings)
    findings.labels += len(lines)
    findings.label_folders |= {text.parent: image.parent for image, text in texts.items()}
    findings.image_folders |= set(findings.label_folders.values())
    return DetectionFiles(images, targets, about.classes, "compact", headers, defects, findings)


def read_description(path: Path) -> Description:
    """Reads `data.yaml`; raises ValueError as `load_yolo`."""
    try:
        import yaml
    except ImportError as error:
        raise ValueError(f"{path} is read by PyYAML; pip install 'fastvit_triton[detect]'") from error
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    try:
        # The base loader leaves all values texts: a class may be named no, 1 or null.
        node = yaml.compose(path.read_bytes().decode("utf-8-sig"), Loader=yaml.BaseLoader)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} cannot be read as YAML: {reason}") from error
    if not isinstance(node, yaml.MappingNode):
        raise ValueError(f"{path} holds no names; expected names: [cat, dog], or a line for each class")
    fields = _mapping(node, path)
    splits = {}
    for split, keys in (("train", ("train",)), ("val", ("val", "valid", "validation", "test"))):
        given = next((fields[key] for key in keys if key in fields and fields[key].value not in NOTHING), None)
        splits[split] = [] if given is None else _texts(given, split, path)
    named = "path" in fields and fields["path"].value not in NOTHING
    root = path.parent / (_texts(fields["path"], "path", path)[0] if named else "")
    moved = not root.is_dir()
    root = path.parent if moved else root
    classes = _names(fields.get("names"), path)
    if "nc" in fields and fields["nc"].value != str(len([name for name in classes if name])):
        raise ValueError(f"{path} has nc {fields['nc'].value!r}, but names {len(classes)} classes; correct one of them")
    return Description(path, root, classes, splits, "kpt_shape" in fields, moved)


def _mapping(node: Any, path: Path) -> dict[str, Any]:
    """The values of a mapping by key; a key that stands twice would hide the first."""
    found: dict[str, Any] = {}
    for key, value in node.value:
        if not isinstance(key.value, str):
            raise ValueError(f"{path}, line {key.start_mark.line + 1}, has a key that is no text")
        if key.value in found:
            raise ValueError(f"{path}, line {key.start_mark.line + 1}, has {key.value!r} a second time; remove one")
        found[key.value] = value
    return found


def _texts(node: Any, name: str, path: Path) -> list[str]:
    """A text, or a list of texts."""
    values = [part.value for part in node.value] if node.id == "sequence" else [node.value]
    if node.id == "mapping" or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{path} has no text, and no list of texts, as {name}")
    return values


def _names(node: Any, path: Path) -> tuple[str, ...]:
    """The classes by number: from a list, or a mapping from number to name."""
    if node is not None and node.id == "mapping":
        rows = _mapping(node, path)
    else:
        values = node.value if node is not None and node.id == "sequence" else []
        rows = {str(i): value for i, value in enumerate(values)}
    table: dict[int, str] = {}
    for key, value in rows.items():
        if not key.isdecimal() or not int(key) < MAX_CLASS:
            raise ValueError(f"{path} has a name for class {key!r}; number classes from 0")
        if value.id != "scalar" or not value.value.strip():
            raise ValueError(f"{path}, line {value.start_mark.line + 1}, has no text as name of class {key}")
        if int(key) in table:
            raise ValueError(f"{path} names class {int(key)} twice; remove one")
        table[int(key)] = class_name(value.value.strip())
    if not table:
        raise ValueError(f"{path} has no names; expected names: [cat, dog], or a line for each class")
    if twice := [name for name, count in Counter(table.values()).items() if count > 1]:
        raise ValueError(f"{path} has two classes named {join_names(twice)}; merge them, or rename one")
    return tuple(table.get(i, "") for i in range(max(table) + 1))


def _places(about: Description, split: str) -> list[Path]:
    """The folders and lists of images of a split."""
    if not about.splits[split]:
        for images in (about.root / "images", about.root):
            found = find_split(images, split) if images.is_dir() else None
            if found is not None and (images.name == "images" or (found / "images").is_dir()):
                return [found if images.name == "images" else found / "images"]
        raise ValueError(f"{about.path} names no {split}, and there is no images/{split}/ or {split}/images/; add one")
    places = []
    for name in about.splits[split]:
        # Roboflow writes ../train/images for a folder that lies beside data.yaml.
        choices = [about.root / name, about.path.parent / name, about.path.parent / name.removeprefix("../")]
        place = next((choice for choice in choices if choice.exists()), None)
        if place is None:
            raise ValueError(f"{about.path} has {split}: {name}, which does not exist in {about.root}; correct it")
        places.append(place)
    return places


def _images(place: Path, findings: Findings) -> Iterator[Path]:
    """The images of a folder, or those that a text file lists."""
    if place.is_dir():
        yield from list_images(place, findings)
        return
    for _, line in _lines(place):
        yield place.parent / line


def _label_file(image: Path, root: Path) -> Path:
    """The text file of an image: in `labels` where the image is in `images`, or beside it."""
    inside = list(image.relative_to(root).parts if image.is_relative_to(root) else image.parts)
    for i in reversed(range(len(inside) - 1)):
        if inside[i] == "images":
            return (image.parents[len(inside) - 1 - i] / "labels" / Path(*inside[i + 1 :])).with_suffix(".txt")
    return image.with_suffix(".txt")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of each line that is not blank."""
    if not path.is_file():  # opening a named pipe would wait for a writer
        raise ValueError(f"{path} is not a regular file; remove it")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as text: {error}") from error
    for i, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield i, line.strip()


def _object(line: str, where: str, about: Description, findings: Findings) -> tuple[int, Corners | None, Corners]:
    """Class number of a line, the four numbers of a box (None of a polygon), and corners, in fractions of the image."""
    try:
        label, *numbers = (float(word) for word in line.split())
    except ValueError:
        raise ValueError(f"{where} is {line[:60]!r}; expected numbers: class x y width height") from None
    is_box = len(numbers) == 4 or (about.keypoints and len(numbers) > 4)
    if not is_box and (len(numbers) < 6 or len(numbers) % 2):
        raise ValueError(
            f"{where} is {line[:60]!r}; expected five numbers: class x y width height, or a class and the corners of a "
            "polygon"
        )
    if label not in range(len(about.classes)) or not about.classes[int(label)]:
        raise ValueError(f"{where} has class {label:g}; {about.path} names {len([n for n in about.classes if n])}")
    if is_box:
        numbers = numbers[:4]
    if (largest := max(map(abs, numbers))) > PIXELS and math.isfinite(largest):
        raise ValueError(
            f"{where} has {largest:g}, which is no fraction of the image; divide pixels by its width and height"
        )
    if is_box:
        x, y, w, h = numbers
        return int(label), (x, y, w, h), (x - w / 2, y - h / 2, x + w / 2, y + h / 2)
    findings.add("boxes changed", "around a polygon", where)
    if not all(map(math.isfinite, numbers)):
        return int(label), None, (math.nan,) * 4
    return int(label), None, (min(numbers[::2]), min(numbers[1::2]), max(numbers[::2]), max(numbers[1::2]))


def _in_pixels(numbers: Corners, size: tuple[int, int]) -> Corners:
    """Two pairs of fractions of the width and height of an image, in pixels."""
    a, b, c, d = numbers
    return a * size[0], b * size[1], c * size[0], d * size[1]
