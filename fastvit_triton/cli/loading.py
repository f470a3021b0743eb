"""Loads trained models and finds the image files in a command's arguments."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .checks import check_checkpoint
from .console import print_error

if TYPE_CHECKING:
    from torch import nn

    from ..models.transformer import VisionTransformer
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
        ValueError: there is no checkpoint, its checksum is wrong, or its header is not what `train` writes.
    """
    from ..train.checkpoint import checksum
    from ..weights import load_model

    model, header = load_model(path)
    try:
        trained, crc32 = _read_training(model, header.get("training", "{}"))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} has a header that train did not write: {str(error)[:300]}") from error
    if crc32 is not None and crc32 != checksum(model):
        raise ValueError(f"{path} is damaged: the checksum of its tensors is wrong")
    return trained


def _read_training(model: "VisionTransformer", text: str) -> tuple[TrainedModel, int | None]:
    """The header's entry `training`, with defaults, and the checksum in it."""
    from ..models.config import sides
    from ..train.data.transform import Transform
    from ..train.ranges import PositiveInt, check
    from ..train.recipes import IMAGENET_MEAN, IMAGENET_STD

    config, entries = model.config, json.loads(text)
    check("training", entries, dict)
    kinds: dict[str, Any] = {"classes": tuple[str, ...], "transform": dict, "data": str | None}
    kinds |= {"batch_size": PositiveInt, "skip_bad_images": bool}
    for name in kinds.keys() & entries.keys():
        check(name, entries[name], kinds[name])
    channels, size = config.in_chans, sides(config.img_size)
    default = {"size": size, "mean": IMAGENET_MEAN[:channels], "std": IMAGENET_STD[:channels]}
    classes = tuple(entries.get("classes", map(str, range(config.num_classes))))
    transform = Transform(**entries.get("transform", default))
    if len(classes) != config.num_classes and config.num_classes:  # pre-training saves no head
        raise ValueError(f"it names {len(classes):,} classes, and the head has {config.num_classes:,}")
    if transform.size != size or len(transform.mean) != channels:
        found = f"its images have size {transform.size} and {len(transform.mean)} channels"
        raise ValueError(f"{found}, the model's {size} and {channels}")
    rest = entries.get("data"), entries.get("batch_size", 64), entries.get("skip_bad_images", False)
    return TrainedModel(model, classes, transform, *rest), entries.get("crc32")


def find_images(paths: list[Path]) -> list[Path]:
    """The given files, and all image files inside given folders in sorted order.

    Raises:
        ValueError: there are no files, or a folder cannot be read.
    """
    from ..train.data.folder import list_images

    found = [file for path in paths for file in (list_images(path) if path.is_dir() else [path])]
    if not found:
        raise ValueError(f"there is no image in {', '.join(map(str, paths))}")
    return found


def readable_images(files: list[Path], max_pixels: int) -> Iterator[Path]:
    """Yields the files that can be decoded; prints one line on stderr for each of the others."""
    from ..train.data.transform import find_defect

    for file in files:
        if defect := find_defect(file, True, max_pixels):
            print_error(f"{file} cannot be read as an image: {defect}", 2)
        else:
            yield file
