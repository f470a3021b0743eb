"""CIFAR-10 in its original format: pickled batches of 32 x 32 colour images (Krizhevsky, 2009)."""

import io
import pickle
from pathlib import Path

import numpy as np

from .folder import ImageFiles, array_files
from .transform import MAX_PIXELS

FILES = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "val": ("test_batch",)}
META = "batches.meta"
# The only objects that these pickles need; others could execute code.
_NUMPY = {("_reconstruct", "multiarray"), ("ndarray", "numpy"), ("dtype", "numpy")}


def is_cifar(root: Path | str) -> bool:
    """True if a folder holds the files of CIFAR-10's "python version", `cifar-10-batches-py`."""
    root = Path(root)
    return (root / META).is_file() and all((root / name).is_file() for names in FILES.values() for name in names)


def scan_cifar(
    root: Path | str, split: str, classes: tuple[str, ...] | None = None, max_pixels: int = MAX_PIXELS
) -> ImageFiles:
    """Reads one split into memory; the 50,000 training images take 154 MB."""
    root = Path(root)
    data_classes = tuple(name.decode() for name in _unpickle(root / META)[b"label_names"])
    if classes is not None and classes != data_classes:
        raise ValueError(f"data {str(root)!r} has the classes of CIFAR-10, but the model has {', '.join(classes[:10])}")
    arrays: dict[Path, np.ndarray] = {}
    targets: list[int] = []
    for file in FILES[split]:
        batch = _unpickle(root / file)
        targets += batch[b"labels"]
        arrays[root / file] = np.ascontiguousarray(batch[b"data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return array_files(arrays, targets, data_classes)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (name, module.split(".")[-1]) not in _NUMPY or module.split(".")[0] != "numpy":
            raise pickle.UnpicklingError(f"it would import {module}.{name}")
        return super().find_class(module, name)


def _unpickle(path: Path) -> dict:
    try:
        return _Unpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except (pickle.UnpicklingError, EOFError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged or not a batch of CIFAR-10: {error}") from error
