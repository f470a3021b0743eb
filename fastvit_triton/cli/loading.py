"""Loads trained models, and what a new run takes over from weights."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from .arguments import channels, select_device
from .console import print_warning
from .tasks import TASKS, task_of
from .tasks.task import TrainedModel

if TYPE_CHECKING:
    from ..models.transformer import VisionTransformer
    from ..train.data.transform import Transform


RUN = ("img_size", "in_chans", "num_classes", "grad_checkpointing", "weight_init")  # options that each run chooses


def load_trained(source: str, mean: str | None = None, std: str | None = None) -> TrainedModel:
    """Loads a checkpoint that says which model it holds; a NaFlex model as the plain ViT for images of one size."""
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


def load_for(args: argparse.Namespace, name: str | None = None) -> TrainedModel:
    """The trained model of --checkpoint on --device, in evaluation mode; if a task is named, of this task."""
    trained = load_trained(args.checkpoint, args.mean, args.std)
    task = task_of(trained.model)
    if name is not None and task is not TASKS[name]:
        task.refuse(trained, args.checkpoint)
    if args.levels is not None:
        trained = trained._replace(transform=replace(trained.transform, levels=args.levels))
    trained.model.to(select_device(args.device)).eval()
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
    if (transform.size != size and not task_of(model).has_tiles) or len(transform.mean) != channels:
        images = f"its images have size {transform.size} and {len(transform.mean)} channels"
        raise ValueError(f"{images}, the model's {size} and {channels}")
    rest = entries.get("data"), entries.get("batch_size", 64), entries.get("skip_bad_images", False)
    split, tested = None, None
    if division := entries.get("split"):
        check("val_split", division.get("val_split"), OpenFraction)
        check("seed", division.get("seed"), Seed)
        split, tested = Split(division["val_split"], division["seed"]), str(division.get("test"))
    return TrainedModel(model, classes, transform, *rest, split, tested), entries.get("crc32")
