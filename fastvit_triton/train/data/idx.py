"""IDX files, as of MNIST, Fashion-MNIST, KMNIST and EMNIST: grey images in one file, class numbers in another.

Format (LeCun, Cortes, Burges): two zero bytes, the type (8: unsigned bytes), the number of axes; the length of each
axis as a big-endian 32-bit integer; then the values in C order. Files may be compressed with gzip.
"""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from .folder import ImageFiles, array_files
from .shards import class_names
from .transform import MAX_PIXELS

PREFIX = {"train": "train", "val": "t10k"}
UNSIGNED_BYTES = 8
MAX_BYTES = 2**30  # of one file, uncompressed; the largest of the family, EMNIST ByClass, has 547,178,688


def is_idx(root: Path | str) -> bool:
    """True if a folder holds the training images of such a data set."""
    return _find(Path(root), "train", "images-idx3") is not None


def scan_idx(
    root: Path | str, split: str, classes: tuple[str, ...] | None = None, max_pixels: int = MAX_PIXELS
) -> ImageFiles:
    """Reads one split into memory; the 60,000 training images of MNIST take 47 MB."""
    root = Path(root)
    (path, pixels), (labels_path, labels) = (
        _read_part(root, split, part, axes) for part, axes in (("images-idx3", 3), ("labels-idx1", 1))
    )
    if len(pixels) != len(labels):
        raise ValueError(f"{path} has {len(pixels):,} images, and {labels_path} {len(labels):,} labels")
    if math.prod(pixels.shape[1:]) > max_pixels:
        raise ValueError(f"{path} has images of {math.prod(pixels.shape[1:]):,} pixels; --max-pixels is {max_pixels:,}")
    classes = class_names(root, int(labels.max()) + 1, classes)
    if labels.max() >= len(classes):
        raise ValueError(f"{labels_path} has class number {labels.max()}, but there are only {len(classes)} classes")
    return array_files({path: pixels}, labels.tolist(), classes)


def read_idx(path: Path, axes: int) -> np.ndarray:
    """The array of unsigned bytes in an IDX file."""
    if not path.is_file():  # opening a named pipe would wait for a writer
        raise ValueError(f"{path} is not a regular file")
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            zeros, kind, dimensions, *shape = struct.unpack(f">HBB{axes}I", file.read(4 + 4 * axes))
            if (zeros, kind, dimensions) != (0, UNSIGNED_BYTES, axes):
                raise ValueError(f"it does not start as an IDX file of unsigned bytes with {axes} axes")
            size = math.prod(shape)
            if not 0 < size <= MAX_BYTES:
                raise ValueError(f"its header promises {size:,} bytes; 1 to {MAX_BYTES:,} are read")
            content = file.read(size + 1)  # no more, whatever a compressed file holds
    except (OSError, EOFError, ValueError, zlib.error, struct.error) as error:
        raise ValueError(f"{path} is damaged or not an IDX file: {error}") from error
    if len(content) != size:
        more = "more" if len(content) > size else f"{len(content):,}"
        raise ValueError(f"{path} is damaged: its header promises {size:,} bytes, and it holds {more}")
    return np.frombuffer(content, np.uint8).reshape(shape)


def _find(root: Path, split: str, part: str) -> Path | None:
    names = (f"{PREFIX[split]}-{part}-ubyte{suffix}" for suffix in ("", ".gz"))
    return next((root / name for name in names if (root / name).exists()), None)


def _read_part(root: Path, split: str, part: str, axes: int) -> tuple[Path, np.ndarray]:
    if (path := _find(root, split, part)) is None:
        raise ValueError(f"data {str(root)!r} has no {PREFIX[split]}-{part}-ubyte or {PREFIX[split]}-{part}-ubyte.gz")
    return path, read_idx(path, axes)
