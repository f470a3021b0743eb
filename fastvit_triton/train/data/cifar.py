"""CIFAR-10 as its authors publish it: pickled batches of 32 x 32 colour images (Krizhevsky, 2009)."""

import io
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

PARTS = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "val": ("test_batch",)}
META = "batches.meta"
# All that those pickles may build; anything else in one could run code.
_NUMPY = {("_reconstruct", "multiarray"), ("ndarray", "numpy"), ("dtype", "numpy")}


def is_cifar(root: Path) -> bool:
    """Whether a folder is what the "python version" unpacks to, `cifar-10-batches-py`."""
    return (root / META).is_file() and all((root / name).is_file() for names in PARTS.values() for name in names)


def cifar(
    root: Path, split: str, classes: tuple[str, ...] | None = None
) -> tuple[list[Path], list[int], tuple[str, ...], Callable[[Path], Image.Image]]:
    """One split, held in memory: 50,000 images to train are 154 MB.

    Args:
        root: holds data_batch_1 … 5, test_batch and batches.meta.
        split: "train" or "val".
        classes: the names that the model knows; None takes the file's.

    Returns:
        A name for each image, its class number, the class names, and what gives the image of a name.

    Raises:
        ValueError: a file is damaged or wants to run code, or the classes are others.
    """
    found = tuple(name.decode() for name in _unpickle(root / META)[b"label_names"])
    if classes is not None and classes != found:
        raise ValueError(f"data {str(root)!r} has the classes of CIFAR-10, and the model has {', '.join(classes[:10])}")
    names, targets, pixels = [], [], []
    for part in PARTS[split]:
        batch = _unpickle(root / part)
        names += [root / part / str(i) for i in range(len(batch[b"labels"]))]
        targets += batch[b"labels"]
        pixels.append(batch[b"data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return names, targets, found, partial(_picture, dict(zip(names, np.concatenate(pixels), strict=True)))


def _picture(images: dict[Path, np.ndarray], name: Path) -> Image.Image:
    return Image.fromarray(images[name])


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (name, module.split(".")[-1]) not in _NUMPY or module.split(".")[0] != "numpy":
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


def _unpickle(path: Path) -> dict:
    try:
        return _Unpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except (pickle.UnpicklingError, EOFError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged or no batch of CIFAR-10: {error}") from error
