"""Loads trained models and finds the image files in a command's arguments."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .checks import check_checkpoint
from .console import print_error

if TYPE_CHECKING:
    from torch import nn

    from ..train.data.transform import Transform


class TrainedModel(NamedTuple):
    """A model with the training settings that evaluation needs; missing settings have defaults.

    Attributes:
        model: on the CPU.
        classes: names, in the order of the logits.
        transform: from an image file to the model's input.
        data: training data, "digits" or a path; None if the file does not name it.
        batch_size: batch size of the training.
        skip_bad_images: unreadable images were skipped in training.
    """

    model: "nn.Module"
    classes: tuple[str, ...]
    transform: "Transform"
    data: str | None
    batch_size: int
    skip_bad_images: bool


def add_checkpoint_option(parser: argparse.ArgumentParser) -> None:
    """Adds the required --checkpoint, which `load_trained` reads."""
    text = "output folder of a run, or its model.safetensors"
    parser.add_argument("--checkpoint", type=Path, required=True, check=check_checkpoint, help=text)


def load_trained(path: Path) -> TrainedModel:
    """Loads a checkpoint written by `train` or `save_weights`.

    Args:
        path: a file, or the folder of a run.

    Raises:
        ValueError: there is no checkpoint, or its checksum is wrong.
    """
    from ..train.checkpoint import checksum
    from ..train.data.transform import Transform
    from ..train.recipes import IMAGENET_MEAN, IMAGENET_STD
    from ..weights import load_model

    model, header = load_model(path)
    entries = json.loads(header.get("training", "{}"))
    if "crc32" in entries and entries["crc32"] != checksum(model):
        raise ValueError(f"{path} is damaged: the checksum of its tensors is wrong")
    channels = model.config.in_chans
    default = {"size": model.config.img_size, "mean": IMAGENET_MEAN[:channels], "std": IMAGENET_STD[:channels]}
    return TrainedModel(
        model,
        classes=tuple(entries.get("classes", map(str, range(model.config.num_classes)))),
        transform=Transform(**entries.get("transform", default)),
        data=entries.get("data"),
        batch_size=entries.get("batch_size", 64),
        skip_bad_images=entries.get("skip_bad_images", False),
    )


def find_images(paths: list[Path]) -> list[Path]:
    """The given files, and all image files inside given folders in sorted order.

    Raises:
        ValueError: there are no files.
    """
    from ..train.data.folder import is_image

    found = [f for path in paths for f in (sorted(filter(is_image, path.rglob("*"))) if path.is_dir() else [path])]
    if not found:
        raise ValueError(f"there is no image in {', '.join(map(str, paths))}")
    return found


def readable_images(files: list[Path]) -> Iterator[Path]:
    """Yields the files that can be decoded; prints one line on stderr for each of the others."""
    from ..train.data.transform import find_defect

    for file in files:
        if defect := find_defect(file, decode=True):
            print_error(f"{file} cannot be read as an image: {defect}", 2)
        else:
            yield file
