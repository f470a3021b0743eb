"""Annotation files of COCO: JSON with `images`, `annotations` and `categories`.

Their boxes are in pixels of an image of the listed `width` and `height`. The file may have been resized since, or hold
pixels that EXIF turns; the frame of the boxes is chosen by these sizes alone, never by where a box lies.
"""

import json
import math
import os.path
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..data.findings import Findings
from ..data.transform import MAX_PIXELS, Header
from .objects import MAX_CLASS, Corners, DetectionFiles, Ids, Objects, class_name, find_corners, read_headers

Frame = Literal["upright", "stored"]


def load_coco(annotations: Path, folder: Path, ids: Ids = "compact", max_pixels: int = MAX_PIXELS) -> DetectionFiles:
    """Reads an annotation file of COCO; boxes that reach beyond an image are cut at its border.

    If the listed size of an image is not that of the file, boxes are scaled where one ratio explains both sides, to
    within a pixel, and turned where the listed size is that of the image before EXIF turns it.
    """
    content = _read(annotations)
    images = [_image(row, i, annotations, folder) for i, row in enumerate(content["images"])]
    _refuse_twice((image.id for image in images), "image id", annotations, "its boxes cannot be told apart")
    _refuse_twice(
        (image.path.relative_to(folder).as_posix() for image in images),
        "image file",
        annotations,
        "list each image once",
    )
    categories = [_category(row, i, annotations) for i, row in enumerate(content["categories"])]
    names = dict(categories)
    _refuse_twice((number for number, _ in categories), "category id", annotations, "give each its own")
    _refuse_twice(names.values(), "category name", annotations, "merge these categories, or rename one")
    numbers = {key: i for i, key in enumerate(sorted(names))} if ids == "compact" else {key: key for key in names}
    rows: dict[Any, list[_Box]] = {image.id: [] for image in images}
    findings = Findings()
    seen: set[Any] = set()
    places: set[tuple[Any, Any, Corners]] = set()
    for i, row in enumerate(content["annotations"]):
        box = _box(row, i, annotations)
        if box.image not in rows:
            raise ValueError(f"{box.where} is of image {box.image!r}, which `images` does not list; add it there")
        if box.category not in numbers:
            raise ValueError(
                f"{box.where} has category {box.category!r}, which `categories` does not list; add it there"
            )
        if box.id is not None and box.id in seen:
            findings.add("odd", "annotation ids that stand twice", box.where)
        seen.add(box.id)
        if (place := (box.image, box.category, box.corners)) in places:
            findings.add("odd", "objects that stand twice", box.where)
        places.add(place)
        rows[box.image].append(box)
    boxes = ((image.size, box) for image in images for box in rows[image.id])
    find_corners(((box.numbers, box.corners, size, box.where) for size, box in boxes), findings)
    headers, defects = read_headers([image.path for image in images], max_pixels)
    frames = _frames([image for image in images if image.path in headers], headers, annotations, findings)
    records = {}
    for image in images:
        header = headers.get(image.path, Header(image.size, 1))  # of an unreadable image nothing is used
        target = Objects(header.size, findings)
        for box in rows[image.id]:
            corners, scale = _moved(box.corners, image.size, header, frames.get(image.path, "upright"))
            where = f"{box.where}, image {class_name(image.path.name)}"
            target.add(corners, numbers[box.category], where, box.crowd, box.area and box.area * scale)
        records[image.path] = target.tensors()
    table = {numbers[key]: name for key, name in names.items()}
    classes = tuple(table.get(i, "") for i in range(max(table, default=-1) + 1))
    findings.image_folders.add(folder)
    files = sorted(records)
    return DetectionFiles(files, [records[path] for path in files], classes, ids, headers, defects, findings)


class _Image(NamedTuple):
    id: int | str
    path: Path
    size: tuple[int, int]  # width and height as listed


class _Box(NamedTuple):
    id: Any
    image: Any
    category: Any
    numbers: Corners  # left, top, width, height
    crowd: bool
    area: float | None
    where: str

    @property
    def corners(self) -> Corners:
        x, y, w, h = self.numbers
        return x, y, x + w, y + h


def _read(annotations: Path) -> dict[str, list[dict[str, Any]]]:
    """The JSON, of which `images`, `annotations` and `categories` are lists of objects."""
    if not annotations.is_file():  # opening a named pipe would wait for a writer
        raise ValueError(f"{annotations} is not a regular file; remove it")
    try:
        content = json.loads(annotations.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{annotations} cannot be read as JSON: {error}") from error
    for name in ("images", "annotations", "categories"):
        rows = content.get(name) if isinstance(content, dict) else None
        if not isinstance(rows, list):
            raise ValueError(f"{annotations} is no annotation file of COCO: it lacks a list {name!r}")
        for i, row in enumerate(rows):
            if not isinstance(row, dict):
                raise ValueError(f"{annotations} has {_short(row)} as {name}[{i}]; expected an object")
    return content


def _image(row: dict[str, Any], i: int, annotations: Path, folder: Path) -> _Image:
    where = f"images[{i}] in {annotations}"
    number = _id(_get(row, "id", where), "id", where)
    where = f"image {number} in {annotations}"
    name = _get(row, "file_name", where)
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where} has file_name {_short(name)}; expected the name of a file")
    name = os.path.normpath(name)
    if os.path.isabs(name) or name.split(os.sep)[0] == os.pardir:
        raise ValueError(f"{where} has file_name {_short(name)}, which is outside {folder}; name a file in it")
    size = []
    for side in ("width", "height"):
        value = _number(_get(row, side, where), side, where)
        if not 1 <= value < 2**31 or value != int(value):
            raise ValueError(f"{where} has {side} {_short(row[side])}; expected pixels, an integer of at least 1")
        size.append(int(value))
    return _Image(number, folder / name, (size[0], size[1]))


def _category(row: dict[str, Any], i: int, annotations: Path) -> tuple[int, str]:
    where = f"categories[{i}] in {annotations}"
    number = _id(_get(row, "id", where), "id", where)
    if isinstance(number, str) or not 0 <= number < MAX_CLASS:
        raise ValueError(f"{where} has id {_short(number)}; expected an integer from 0 to {MAX_CLASS - 1:,}")
    name = _get(row, "name", where)
    if isinstance(name, bool) or not isinstance(name, str | int) or not str(name).strip():
        raise ValueError(f"category {number} in {annotations} has name {_short(name)}; expected a text")
    return number, class_name(str(name))


def _box(row: dict[str, Any], i: int, annotations: Path) -> _Box:
    where = f"annotations[{i}] in {annotations}"
    number = row.get("id")
    if number is not None:
        where = f"annotation {_id(number, 'id', where)} in {annotations}"
    image = _id(_get(row, "image_id", where), "image_id", where)
    category = _id(_get(row, "category_id", where), "category_id", where)
    box = _get(row, "bbox", where)
    if not isinstance(box, list) or len(box) != 4:
        raise ValueError(f"{where} has bbox {_short(box)}; expected four numbers: left, top, width, height")
    x, y, w, h = (_number(value, "bbox", where) for value in box)
    if any(map(math.isinf, (x, y, w, h))):
        raise ValueError(f"{where} has bbox {_short(box)}, which is infinite; correct it, or remove the annotation")
    area = row.get("area")
    if area is not None:
        area = _number(area, "area", where)
        area = area if area >= 0 and math.isfinite(area) else None  # that of the box
    crowd = row.get("iscrowd", 0)
    if crowd is None or not isinstance(crowd, int) or crowd not in (0, 1):
        raise ValueError(f"{where} has iscrowd {_short(crowd)}; expected 0 or 1")
    return _Box(number, image, category, (x, y, w, h), bool(crowd), area, where)


def _get(row: dict[str, Any], name: str, where: str) -> Any:
    if name not in row:
        raise ValueError(f"{where} lacks {name!r}")
    return row[name]


def _id(value: Any, name: str, where: str) -> int | str:
    """An id: an integer, or a text that another row has exactly so."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{where} has {name} {_short(value)}; expected an integer")
    return value


def _number(value: Any, name: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where} has {name} {_short(value)}; expected numbers")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _short(value: Any) -> str:
    """The value as JSON has it, cut after 60 characters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:60] + "…"


def _refuse_twice(values: Iterable[Any], what: str, annotations: Path, remedy: str) -> None:
    seen: set[Any] = set()
    for value in values:
        if value in seen:
            raise ValueError(f"{annotations} has {what} {_short(value)} twice; {remedy}")
        seen.add(value)


def _frames(
    images: list[_Image], headers: dict[Path, Header], annotations: Path, findings: Findings
) -> dict[Path, Frame]:
    """The frame of each image's boxes: the upright image, or the stored one before EXIF turns it.

    Sizes do not tell them apart where EXIF mirrors, turns by 180 degrees, or turns a square. These images are taken as
    the others of the file that EXIF turns, or as upright if there are none.
    """
    frames: dict[Path, Frame] = {}
    unclear = []
    turned: set[Frame] = set()
    wrong = []
    for image in images:
        header = headers[image.path]
        fits = _fits(image.size, header)
        if not fits:
            wrong.append(image)
        elif len(fits) == 2:
            unclear.append(image)
        else:
            frames[image.path] = fits[0]
            if header.orientation > 1:
                turned.add(fits[0])
    if wrong:
        image = wrong[0]
        listed, found = (f"{width} x {height}" for width, height in (image.size, headers[image.path].size))
        others = f" ({len(wrong):,} of {len(images):,} images differ so)" if len(wrong) > 1 else ""
        raise ValueError(
            f"{annotations} lists {image.path.name} as {listed} pixels, and the file has {found}, which is no multiple"
            f"{others}; annotate these files, or restore those that were annotated"
        )
    if unclear and len(turned) == 2:
        raise ValueError(
            f"{annotations} has boxes of upright images and of images before EXIF turns them, and the size of "
            f"{unclear[0].path.name} does not say which it has; save the images upright and annotate those"
        )
    for image in unclear:
        frames[image.path] = next(iter(turned), "upright")
        reason = f"EXIF turns the image, boxes are taken as {frames[image.path]}"
        findings.add("sizes against the annotations", reason, image.path.name)
    for image in images:
        header = headers[image.path]
        whole = header.size if frames[image.path] == "upright" else header.stored
        reasons = []
        place = image.path.name
        if image.size != whole:
            reasons.append("boxes scaled to the file")
            place += f", listed as {image.size[0]} x {image.size[1]}, has {whole[0]} x {whole[1]}"
        if frames[image.path] == "stored" and header.orientation > 1:
            reasons.append("boxes turned as EXIF turns the image")
        findings.add("sizes against the annotations", ", ".join(reasons) or "equal", place)
    return frames


def _fits(listed: tuple[int, int], header: Header) -> list[Frame]:
    """The frames whose size is the listed one, or else a multiple of it to within a pixel on each side."""
    sizes: dict[Frame, tuple[int, int]] = {"upright": header.size}
    if header.orientation > 1:
        sizes["stored"] = header.stored
    exact: list[Frame] = [frame for frame, size in sizes.items() if size == listed]
    return exact or [frame for frame, size in sizes.items() if _is_scaled(listed, size)]


def _is_scaled(listed: tuple[int, int], size: tuple[int, int]) -> bool:
    """True if one ratio makes both listed sides those of the file, each to within a pixel."""
    low = max((side - 1) / whole for side, whole in zip(size, listed, strict=True))
    high = min((side + 1) / whole for side, whole in zip(size, listed, strict=True))
    return low <= high


def _moved(corners: Corners, listed: tuple[int, int], header: Header, frame: Frame) -> tuple[Corners, float]:
    """The corners in pixels of the upright image, and by how much areas grow."""
    width, height = header.size if frame == "upright" else header.stored
    across, down = width / listed[0], height / listed[1]
    left, top, right, bottom = corners
    left, top, right, bottom = left * across, top * down, right * across, bottom * down
    if frame == "stored":
        left, top, right, bottom = turned((left, top, right, bottom), (width, height), header.orientation)
    return (left, top, right, bottom), across * down


def turned(corners: Corners, size: tuple[int, int], orientation: int) -> Corners:
    """The corners of a box after EXIF turned the image."""
    left, top, right, bottom = corners
    width, height = size
    if orientation in (2, 3, 7, 8):
        left, right = width - right, width - left
    if orientation in (3, 4, 6, 7):
        top, bottom = height - bottom, height - top
    return (top, left, bottom, right) if orientation >= 5 else (left, top, right, bottom)
