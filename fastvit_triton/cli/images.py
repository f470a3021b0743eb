"""The image files that a command names: found, read in batches, and written."""

import glob
import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ..files import printable, replacing
from .console import print_error, print_skipped

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

Item = TypeVar("Item")
DECODING_THREADS = 4  # each holds one decoded image, of at most --max-pixels


def find_images(paths: list[Path]) -> list[Path]:
    """The given files, and all image files inside given folders in sorted order, recursively.

    A path that does not exist may be a pattern (`*`, `?`, `[…]`, and `**` for folders in between); what it matches is
    taken in sorted order.
    """
    from ..train.data.folder import list_images

    matches = [match for path in paths for match in _matches(path)]
    files = [file for path in matches for file in (list_images(path) if path.is_dir() else [path])]
    if not files:
        raise ValueError(f"there is no image in {', '.join(map(str, paths))}")
    return files


def _matches(path: Path) -> list[Path]:
    """What a pattern matches, without hidden files; the path itself if it exists, is no pattern or matches nothing."""
    if path.exists() or not glob.has_magic(str(path)):
        return [path]
    return sorted(map(Path, glob.glob(str(path), recursive=True))) or [path]


def names_of(files: list[Path], classes: tuple[str, ...] = ()) -> list[str]:
    """Names for a reader: with the last folder if that is the name of a class, or if the files are in several."""
    several = len({file.parent for file in files}) > 1
    return [
        printable(f"{file.parent.name}/{file.name}" if several or class_of(file, classes) is not None else file.name)
        for file in (file.absolute() for file in files)
    ]


def class_of(file: Path, classes: tuple[str, ...]) -> int | None:
    """The number of the class whose name the file's folder has; None if there is none."""
    from ..train.data.folder import nfc

    folder = nfc(file.absolute().parent.name)
    return classes.index(folder) if folder in classes else None


def unreadable(file: Path, defect: str) -> str:
    """A sentence on a file that does not exist or is no image, or on a pattern that matches nothing."""
    if file.exists():
        return f"{file} cannot be read as an image: {defect}"
    return f"no file matches {file}" if glob.has_magic(str(file)) else f"{file} does not exist"


def read_only(file: Path, option: str, max_pixels: int, levels: float | None) -> "Image":
    """The image of an option that takes one; raises ValueError, which begins with `option`, if it cannot be read."""
    from ..train.data.transform import find_defect, read_image

    if defect := find_defect(file, True, max_pixels, levels):
        raise ValueError(f"{option}{unreadable(file, defect)}")
    return read_image(file, max_pixels, levels)


def _without_defects(results: Iterable[tuple[Path, Item | str]]) -> Iterator[tuple[Path, Item]]:
    """Yields the results that are no defect; prints a line for each other, called skipped once a file is not."""
    defects: list[str] = []
    used = False
    for file, result in results:
        if isinstance(result, str):
            (print_skipped if used else defects.append)(unreadable(file, result))
            continue
        while defects:
            print_skipped(defects.pop(0))
        used = True
        yield file, result
    for text in defects:
        print_error(text, 2)


def readable_images(files: Iterable[Path], max_pixels: int, levels: float | None = None) -> Iterator[Path]:
    """Yields the files that can be decoded; prints one line on stderr for each of the others; see `read_image`."""
    from ..train.data.transform import find_defect

    results = ((file, find_defect(file, True, max_pixels, levels)) for file in files)
    return (file for file, _ in _without_defects(results))


def decoded(
    files: Iterable[Path], read: Callable[[Path], "Tensor"], size: int, max_pixels: int
) -> Iterator[tuple[list[Path], "Tensor"]]:
    """Yields files that can be decoded and their inputs [B, C, H, W], in the given order, at most `size` at a time.

    Prints one line on stderr for each of the other files.
    """
    import torch

    from ..train.data.transform import DECODE_ERRORS, find_defect, reason_of

    def attempt(file: Path) -> "Tensor | str":
        try:
            return find_defect(file, max_pixels=max_pixels) or read(file)
        except DECODE_ERRORS as error:
            return reason_of(error)

    def results() -> Iterator[tuple[Path, "Tensor | str"]]:
        rest = iter(files)
        with ThreadPoolExecutor(DECODING_THREADS) as pool:
            while chosen := list(itertools.islice(rest, size)):
                yield from zip(chosen, pool.map(attempt, chosen), strict=True)

    good = _without_defects(results())
    while batch := list(itertools.islice(good, size)):
        yield [file for file, _ in batch], torch.stack([image for _, image in batch])


def save_pixels(image: "Tensor", path: Path) -> None:
    """Writes an image [C, H, W] of pixels in [0, 1] to a file; ValueError if its suffix is that of no image."""
    from PIL import Image

    pixels = (255 * image.clamp(0, 1)).round().byte().movedim(0, -1)
    try:
        with replacing(path) as temporary:
            Image.fromarray(pixels.squeeze(-1).numpy()).save(temporary)
    except ValueError as error:
        raise ValueError(f"--out is {path}, which is no image file; use a name such as {path.stem}.png") from error
