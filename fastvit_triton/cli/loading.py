"""Loads trained models and finds the image files in a command's arguments."""

import argparse
import glob
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..files import replacing
from .checks import channels, check_channels, check_checkpoint
from .console import print_skipped, print_warning

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..models.transformer import VisionTransformer
    from ..train.data import Batches
    from ..train.data.split import Split
    from ..train.data.transform import Transform


DECODING_THREADS = 4  # each holds one decoded image, of at most --max-pixels
RUN = ("img_size", "in_chans", "num_classes", "grad_checkpointing", "weight_init")  # options that each run chooses


class TrainedModel(NamedTuple):
    """A model with the training settings that evaluation needs; missing settings have defaults.

    Attributes:
        model: on the CPU.
        classes: names, in the order of the logits.
        transform: from an image file to the model's input.
        data: training data, "digits" or a path; None if the file does not name it.
        batch_size: batch size of the training.
        skip_bad_images: unreadable images were skipped in training.
        split: how the training data were divided; None if they have test images of their own.
        tested: digest of the test images of a split.
    """

    model: "nn.Module"
    classes: tuple[str, ...]
    transform: "Transform"
    data: str | None
    batch_size: int
    skip_bad_images: bool
    split: "Split | None" = None
    tested: str | None = None


def add_checkpoint_option(parser: argparse.ArgumentParser) -> None:
    """Adds the required --checkpoint, and --mean and --std, which `load_trained` reads."""
    text = "output folder of a run, a file, timm/NAME or hf-hub:ORG/NAME of the Hub, or NAME.TAG"
    parser.add_argument("--checkpoint", required=True, check=check_checkpoint, help=text)
    for option in ("mean", "std"):
        text = f"{option} of each channel, such as 0.5,0.5,0.5 (default: that of the checkpoint)"
        parser.add_argument(f"--{option}", check=check_channels, help=text)


def load_trained(source: str, mean: str | None = None, std: str | None = None) -> TrainedModel:
    """Loads a checkpoint that says which model it holds; a NaFlex model as the plain ViT for images of one size.

    Args:
        source: as for `load_model`.
        mean: replaces the mean of the checkpoint, such as "0.5,0.5,0.5"; a warning names both.
        std: likewise.

    Raises:
        ValueError: there is no checkpoint, its checksum is wrong, or its header is not what `train` writes.
    """
    from ..models.naflex import NaFlexVisionTransformer
    from ..models.weights.load import load_model
    from ..models.weights.pretrained import find_location
    from ..preparation import data_config
    from ..train.checkpoint import checksum
    from ..train.data.split import SPLIT, read_split
    from .other_models import load_other, origin_of

    location = find_location(source)
    if (recorded := origin_of(location)) is not None:
        origin, header = recorded
        loaded = load_other(location, origin)
    else:
        loaded, header = load_model(location)
    model = loaded
    if isinstance(loaded, NaFlexVisionTransformer):
        model = loaded.for_images(data_config(loaded)["input_size"][1:])
    try:
        trained, crc32 = _read_training(model, header.get("training", "{}"))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{source} has a header that train did not write: {str(error)[:300]}") from error
    if crc32 is not None and crc32 != checksum(loaded):
        raise ValueError(f"{source} is damaged: the checksum of its tensors is wrong")
    if trained.split is not None and Path(source).exists():
        folder = Path(source) if Path(source).is_dir() else Path(source).parent
        trained = trained._replace(split=read_split(folder / SPLIT, trained.split))
    statistics = {"mean": mean, "std": std}
    return trained._replace(transform=_override(trained.transform, statistics, source))


def save_pixels(image: "Tensor", path: Path) -> None:
    """Writes an image [C, H, W] of pixels in [0, 1] to a file; ValueError if its suffix is that of no image."""
    from PIL import Image

    pixels = (255 * image.clamp(0, 1)).round().byte().movedim(0, -1)
    try:
        with replacing(path) as temporary:
            Image.fromarray(pixels.squeeze(-1).numpy()).save(temporary)
    except ValueError as error:
        raise ValueError(f"--out is {path}, which is no image file; use a name such as {path.stem}.png") from error


def trained_for(task: str, trained: TrainedModel, source: str) -> TrainedModel:
    """The trained model, whose task is this one.

    Raises:
        ValueError: it is another one; the message names the command for it.
    """
    commands = {"classify": "predict", "detect": "predict", "generate": "generate", "restore": "restore"}
    trained_task = getattr(trained.model, "task", "classify")
    if trained_task != task:
        use = f"; use fastvit-triton {commands[trained_task]}" if trained_task in commands else ""
        raise ValueError(f"{source} holds a {type(trained.model).__name__}, whose task is to {trained_task}{use}")
    return trained


def _override(transform: "Transform", statistics: dict[str, str | None], source: str) -> "Transform":
    """The transform with given means and deviations; warns where they differ from those of the checkpoint."""
    for name, text in statistics.items():
        if text is not None:
            stored = getattr(transform, name)
            values = channels(text)
            values = values * len(stored) if len(values) == 1 else values
            if len(values) != len(stored):
                raise ValueError(
                    f"--{name} has {len(values)} values, and the images of {source} {len(stored)} channels"
                )
            warn_of_clash(name, values, stored)
            transform = replace(transform, mean=values) if name == "mean" else replace(transform, std=values)
    return transform


def warn_of_clash(name: str, values: tuple[float, ...], own: tuple[float, ...]) -> None:
    """Prints a warning if a given mean or standard deviation is not that of the weights."""
    if tuple(values) != tuple(own):
        chosen, theirs = (",".join(f"{value:g}" for value in numbers) for numbers in (values, own))
        print_warning(f"--{name} is {chosen}, but the weights were trained with {theirs}; {chosen} is used")


def follow_weights(source: str, given: dict[str, Any]) -> dict[str, Any]:
    """Adds what a new run needs to start from weights: their model, mean and std and, without a recipe, their image
    size, crop and interpolation. Options that were given stay; a warning names a mean or std that differs.

    Args:
        source: as for `load_weights`.
        given: options of `resolve_settings`.
    """
    from ..models import model_config
    from ..models.config import sides
    from ..models.weights.describe import describe
    from ..models.weights.pretrained import find_location
    from ..preparation import DEFAULTS
    from ..train.settings import RECIPES
    from .other_models import start_of

    if (start := start_of(source)) is not None:
        model, options, size, pretrained_cfg = start
    elif (description := describe(find_location(source))) is not None:
        model, pretrained_cfg = description.name, description.pretrained_cfg
        theirs = model_config(model, **description.options)
        usual = model_config(model)
        changed = {key: value for key, value in vars(theirs).items() if value != getattr(usual, key)}
        options = {key: value for key, value in changed.items() if key not in RUN and not key.endswith("_rate")}
        size = sides(theirs.img_size)
    else:
        return given
    preprocessing = {key: pretrained_cfg[key] for key in DEFAULTS if pretrained_cfg.get(key) is not None}
    for name in {"mean", "std"} & given.keys() & preprocessing.keys():
        warn_of_clash(name, given[name], preprocessing[name])
    needed = {name: preprocessing[name] for name in ("mean", "std") if len(preprocessing.get(name, ())) == 3}
    if given.get("model", model) == model:
        recipe_options = RECIPES[given["recipe"]].options if "recipe" in given else {}
        needed |= {"model": model, "options": options | recipe_options}
    if "recipe" not in given:
        height, width = size
        needed |= {"img_size": height} if height == width else {}
        names = {"crop_pct": "eval_crop", "crop_mode": "crop_mode", "interpolation": "interpolation"}
        needed |= {ours: preprocessing[key] for key, ours in names.items() if key in preprocessing}
    return {**needed, **given}


def _read_training(model: "VisionTransformer", text: str) -> tuple[TrainedModel, int | None]:
    """The header's entry `training`, with the checksum in it; what it lacks comes from `model.pretrained_cfg`."""
    from ..models.config import sides
    from ..models.weights.pretrained import class_names
    from ..preparation import data_config
    from ..train.data.model_input import transform_of
    from ..train.data.split import Split
    from ..train.data.transform import Transform
    from ..train.ranges import OpenFraction, PositiveInt, Seed, check

    origin = getattr(model, "origin", None)
    config: Any = model.config if origin is None else SimpleNamespace(**origin["options"])
    entries = json.loads(text)
    check("training", entries, dict)
    kinds: dict[str, Any] = {"classes": tuple[str, ...], "transform": dict, "data": str | None}
    kinds |= {"batch_size": PositiveInt, "skip_bad_images": bool, "split": dict | None}
    for name in kinds.keys() & entries.keys():
        check(name, entries[name], kinds[name])
    channels = config.in_chans
    size = sides(config.img_size)
    names = class_names(model) or tuple(map(str, range(config.num_classes)))
    classes = tuple(entries.get("classes", names))
    transform = Transform(**entries["transform"]) if "transform" in entries else transform_of(data_config(model))
    if len(classes) != config.num_classes and config.num_classes:  # pre-training saves no head
        raise ValueError(f"it names {len(classes):,} classes, and the head has {config.num_classes:,}")
    tiles = getattr(model, "task", "classify") == "restore"  # its images are larger than the tiles that it restores
    if (transform.size != size and not tiles) or len(transform.mean) != channels:
        images = f"its images have size {transform.size} and {len(transform.mean)} channels"
        raise ValueError(f"{images}, the model's {size} and {channels}")
    rest = entries.get("data"), entries.get("batch_size", 64), entries.get("skip_bad_images", False)
    split, tested = None, None
    if division := entries.get("split"):
        check("val_split", division.get("val_split"), OpenFraction)
        check("seed", division.get("seed"), Seed)
        split, tested = Split(division["val_split"], division["seed"]), str(division.get("test"))
    return TrainedModel(model, classes, transform, *rest, split, tested), entries.get("crc32")


def find_images(paths: list[Path]) -> list[Path]:
    """The given files, and all image files inside given folders in sorted order, recursively.

    A path that does not exist may be a pattern (`*`, `?`, `[…]`, and `**` for folders in between); what it matches is
    taken in sorted order.

    Raises:
        ValueError: there are no files, or a folder cannot be read.
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


def _unreadable(file: Path, defect: str) -> str:
    """A sentence on a file that is no image, or on a pattern that matches nothing."""
    if glob.has_magic(str(file)) and not file.exists():
        return f"no file matches {file}"
    return f"{file} cannot be read as an image: {defect}"


def readable_images(files: Iterable[Path], max_pixels: int) -> Iterator[Path]:
    """Yields the files that can be decoded; prints one line on stderr for each of the others."""
    from ..train.data.transform import find_defect

    for file in files:
        if defect := find_defect(file, True, max_pixels):
            print_skipped(_unreadable(file, defect))
        else:
            yield file


def decoded(
    files: Iterable[Path], read: Callable[[Path], "Tensor"], size: int, max_pixels: int
) -> Iterator[tuple[list[Path], "Tensor"]]:
    """Yields files that can be decoded and their inputs [B, C, H, W], in the given order, at most `size` at a time.

    Prints one line on stderr for each of the other files.

    Args:
        files: image files.
        read: from a file to the model's input [C, H, W], called in threads; raises one of `DECODE_ERRORS`.
        size: images in a batch.
        max_pixels: larger images are refused before they are read.
    """
    import torch

    from ..train.data.transform import DECODE_ERRORS, find_defect, reason_of

    def attempt(file: Path) -> "Tensor | str":
        try:
            return find_defect(file, max_pixels=max_pixels) or read(file)
        except DECODE_ERRORS as error:
            return reason_of(error)

    rest = iter(files)
    with ThreadPoolExecutor(DECODING_THREADS) as pool:
        while chosen := list(itertools.islice(rest, size)):
            good = []
            for file, result in zip(chosen, pool.map(attempt, chosen), strict=True):
                if isinstance(result, str):
                    print_skipped(_unreadable(file, result))
                else:
                    good.append((file, result))
            if good:
                yield [file for file, _ in good], torch.stack([image for _, image in good])


def test_images(trained: TrainedModel, data: str | None, options: dict[str, Any]) -> "Batches":
    """The test images of a data set: those of the run's split, if the data are those that it divided.

    Args:
        trained: from `load_trained`.
        data: a name for `train.data.load`; None means that of the training.
        options: workers, skip_bad_images and max_pixels of `load_test`.

    Raises:
        ValueError: as for `load_test`, or nothing says any more which of the images were not trained on.
    """
    from ..train.data import load_test
    from ..train.data.hf import absolute, is_hf
    from ..train.data.split import SPLIT

    name = data or trained.data
    assert name is not None
    arguments = name, classes_in(trained, name), trained.transform, trained.batch_size
    if trained.split is None:
        return load_test(*arguments, **options)
    same = data is None or trained.data == (absolute(data) if is_hf(data) else str(Path(data).resolve()))
    try:
        test = load_test(*arguments, **options, split=trained.split)
        unchanged = test.digest() == trained.tested
    except ValueError:
        if same:
            raise
        unchanged = False
    if not same and not unchanged:  # other data: all their test images
        return load_test(*arguments, **options)
    if not unchanged and trained.split.test is None:
        raise ValueError(f"the images of {name!r} have changed since training divided them; restore them, or {SPLIT}")
    if not unchanged:
        print_warning(f"the test images of {name!r} have changed since training ({trained.tested})")
    return test


def classes_in(trained: TrainedModel, data: str) -> tuple[str, ...]:
    """The names of the model's classes as the folders of the data have them: ImageNet's are named by WordNet synset."""
    from ..models.weights.pretrained import imagenet_classes

    names = imagenet_classes()
    places = [Path(data) / "val", Path(data)]
    if trained.classes == tuple(names.values()) and any((place / name).is_dir() for place in places for name in names):
        return tuple(names)
    return trained.classes
