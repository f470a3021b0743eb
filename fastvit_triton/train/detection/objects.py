"""The objects of images: boxes in pixels of the upright image, class numbers, and what was left out."""

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..data.findings import CORNERS, Findings
from ..data.folder import nfc
from ..data.transform import DECODE_ERRORS, MAX_PIXELS, Header, read_header, reason_of

Ids = Literal["compact", "kept"]
Target = dict[str, Tensor]
Corners = tuple[float, float, float, float]  # left, top, right, bottom
# A box as its file has it: four numbers, the corners that they mean, width and height of the image, place in the file.
Written = tuple[Corners, Corners, tuple[float, float], str]
MAX_CLASS = 1_000_000  # class numbers are below
FAR = 0.1  # of a side of the image: a box of a correct file reaches beyond a border by less, with rare exceptions


class DetectionFiles(NamedTuple):
    """One split of a data set with boxes."""

    files: list[Path]  # one path per image, sorted
    # for each image `boxes` [n, 4], corners in pixels of the upright image, float32; `labels` [n], class numbers;
    # `crowd` [n], True for boxes around many objects, which are for evaluation only; `areas` [n], of masks if known
    targets: list[Target]
    classes: tuple[str, ...]  # names by class number; an empty name is a number that no class has
    ids: Ids  # "compact", numbers from 0 without gaps, or "kept", the numbers of the file
    headers: dict[Path, Header]  # by path, of the images that can be read
    defects: dict[Path, str]  # by path, why an image cannot be read
    findings: Findings  # what was left out or changed


def read_headers(files: Sequence[Path], max_pixels: int = MAX_PIXELS) -> tuple[dict[Path, Header], dict[Path, str]]:
    """The headers of images, and why the others cannot be read."""

    def read(path: Path) -> Header | str:
        try:
            return read_header(path, max_pixels)
        except DECODE_ERRORS as error:
            return reason_of(error)

    with ThreadPoolExecutor() as pool:
        results = dict(zip(files, pool.map(read, files), strict=True))
    headers = {path: result for path, result in results.items() if isinstance(result, Header)}
    return headers, {path: result for path, result in results.items() if isinstance(result, str)}


class Objects:
    """The objects of one image; what cannot be used is counted in `findings` instead."""

    def __init__(self, size: tuple[int, int], findings: Findings) -> None:
        self.size = size
        self.findings = findings
        self.rows: list[tuple[tuple[float, ...], int, bool, float]] = []

    def add(
        self, corners: tuple[float, ...], label: int, where: str, crowd: bool = False, area: float | None = None
    ) -> None:
        """Adds an object by the corners of its box: left, top, right, bottom."""
        if reason := self._defect(corners):
            shown = ", ".join(f"{value:g}" for value in corners)
            place = f"{where}: corners {shown} in {self.size[0]} x {self.size[1]} pixels"
            self.findings.add("objects left out", reason, place)
            return
        left, top, right, bottom = corners
        cut = (max(left, 0.0), max(top, 0.0), min(right, float(self.size[0])), min(bottom, float(self.size[1])))
        if max(abs(a - b) for a, b in zip(corners, cut, strict=True)) > 1:
            self.findings.add("boxes changed", "cut at the border of the image", where)
        self.rows.append((cut, label, crowd, (cut[2] - cut[0]) * (cut[3] - cut[1]) if area is None else area))

    def _defect(self, corners: tuple[float, ...]) -> str | None:
        """Why a box cannot be used."""
        left, top, right, bottom = corners
        if not all(map(math.isfinite, corners)):
            return "not finite"
        if right < left or bottom < top:
            return "of negative width or height"
        if right == left or bottom == top:
            return "without area"
        if min(right, self.size[0]) <= max(left, 0) or min(bottom, self.size[1]) <= max(top, 0):
            return "outside the image"
        return None

    def tensors(self) -> Target:
        """The target of the image."""
        boxes, labels, crowd, areas = zip(*self.rows, strict=True) if self.rows else ((), (), (), ())
        corners = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
        numbers = torch.tensor(labels, dtype=torch.int64)
        return dict(
            boxes=corners, labels=numbers, crowd=torch.tensor(crowd, dtype=torch.bool), areas=torch.tensor(areas)
        )


def find_corners(boxes: Iterable[Written], findings: Findings) -> None:
    """Counts boxes that reach far beyond their images, if those of the file look like corners, x1, y1, x2, y2.

    They do if as corners all but a hundredth are boxes inside their images, to within a pixel, and as the format has
    them a tenth or more reach beyond their images by more than `FAR`. Correct boxes that cross a border reach less far,
    and correct boxes elsewhere have a width below their x, or a height below their y, and are no corners.
    """
    count = inside = 0
    far = []
    for numbers, corners, size, where in boxes:
        count += 1
        x1, y1, x2, y2 = numbers
        inside += x1 < x2 and y1 < y2 and _reach(numbers, size) * max(size) <= 1
        if _reach(corners, size) > FAR:
            far.append(where)
    if far and len(far) >= 0.1 * count and inside >= 0.99 * count:
        findings.add("odd", CORNERS, far[0], len(far))


def _reach(corners: Corners, size: tuple[float, float]) -> float:
    """How far a box reaches beyond its image, in sides of the image; not above 0 if it lies inside."""
    (left, top, right, bottom), (width, height) = corners, size
    return max(-left / width, -top / height, right / width - 1, bottom / height - 1)


def fractions(target: Target, size: tuple[int, int]) -> Target:
    """A target as the losses take it: `labels`, and `boxes` as centre and size in fractions of the image."""
    boxes = target["boxes"]
    keep = (boxes[:, 2:] > boxes[:, :2]).all(1)
    if "crowd" in target:
        keep &= ~target["crowd"]
    low, high = (boxes[keep] / torch.tensor([*size, *size])).split(2, 1)
    return dict(labels=target["labels"][keep], boxes=torch.cat(((low + high) / 2, high - low), 1))


def class_name(name: str) -> str:
    """The name in NFC, without control characters, which a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in nfc(name))
