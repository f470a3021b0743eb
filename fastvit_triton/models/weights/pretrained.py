"""The table of pretrained weights: the tags of each name, where their files lie, and how images are prepared for them.

`python -m benchmarks.pretrained_table` writes it from timm's configurations, whose words it keeps.
"""

import difflib
import fnmatch
import functools
import json
import os
from pathlib import Path
from typing import Any

from torch import nn

from ...checkpoints import locations
from ...checkpoints.locations import Location, Repository
from ...checkpoints.tensors import WeightsError
from ...preparation import bare
from .. import catalogue

TABLE = Path(__file__).with_name("pretrained.json")
FIGURES = Path(__file__).with_name("figures.json")
CLASSES = Path(__file__).with_name("imagenet_classes.txt")


@functools.cache
def _table() -> dict[str, dict[str, dict[str, Any]]]:
    """Name → tag → configuration; the first tag is the default."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


@functools.cache
def figures() -> dict[str, dict[str, Any]]:
    """What `python -m benchmarks.figures` wrote."""
    return json.loads(FIGURES.read_text(encoding="utf-8"))


def list_models(pattern: str = "*", pretrained: bool = False) -> list[str]:
    """Names that match a shell pattern, such as "vit_*_224", sorted.

    Args:
        pattern: compared with the names and, with `pretrained`, also with the names with tags.
        pretrained: return names with tags, such as "vit_tiny_patch16_224.augreg_in21k", that have weights on the Hub;
            the default tag of a name comes first.
    """
    if not pretrained:
        return catalogue.list_models(pattern)
    entries = ((name, tag, row) for name, rows in sorted(_table().items()) for tag, row in rows.items())
    tagged = [(name, f"{name}.{tag}") for name, tag, row in entries if row["hf_hub_id"]]
    return [full for name, full in tagged if fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(full, pattern)]


def split_tag(name: str) -> tuple[str, str]:
    """A name and its tag, which is "" if it has none."""
    name, _, tag = name.partition(".")
    return name, tag


def pretrained_cfg(name: str) -> dict[str, Any]:
    """The configuration of a name with a tag, or of its default tag, with timm's keys; {} if timm has no such name."""
    name, tag = split_tag(name)
    rows = _table().get(name, {})
    if tag and tag not in rows:
        near = difflib.get_close_matches(tag, rows, n=5, cutoff=0.0)
        remedy = f"the nearest are {', '.join(near)}" if near else "leave it out"
        raise WeightsError(f"{name} has no tag {tag!r}; {remedy}")
    if not rows:
        return {}
    tag = tag or next(iter(rows))
    row = {key: tuple(value) if isinstance(value, list) else value for key, value in rows[tag].items()}
    return {"architecture": name, "tag": tag, **row}


def find_location(source: str | os.PathLike, **options: Any) -> Location:
    """The location that a source names, see `load_model` for its forms; downloads nothing."""

    def named(text: str) -> Location | None:
        return find_tagged(text, options) if split_tag(text)[0] in catalogue.CATALOGUE else None

    location = locations.find_location(source, named, options)
    if isinstance(location, Repository) and not location.cfg:
        organisation, _, name = location.name.partition("/")
        if organisation == "timm" and name in list_models(pretrained=True):
            location.cfg = pretrained_cfg(name)
    return location


def find_tagged(name: str, options: dict[str, Any]) -> Location:
    """The repository of a name with a tag, or of a name's default tag."""
    cfg = pretrained_cfg(name)
    if not cfg.get("hf_hub_id"):
        others = list_models(split_tag(name)[0], pretrained=True)
        remedy = f"use {' or '.join(others[:3])}" if others else "give checkpoint_path, or leave out pretrained"
        raise WeightsError(f"{name} has no pretrained weights on the Hub; {remedy}")
    location = Repository(cfg["hf_hub_id"], options)
    location.cfg = cfg  # several names may share a repository
    return location


@functools.cache
def imagenet_classes() -> dict[str, str]:
    """The WordNet synset of each class of ImageNet-1k → its name, in the order of the logits."""
    lines = CLASSES.read_text(encoding="utf-8").splitlines()
    return dict(line.split("\t") for line in lines if not line.startswith("#"))


def class_names(model: nn.Module) -> tuple[str, ...] | None:
    """The names of a model's classes in the order of the logits; None if they are unknown.

    They are those of its weights or, if these name none and have 1000 classes, as timm has it, those of ImageNet-1k.
    """
    model = bare(model)
    cfg: Any = getattr(model, "pretrained_cfg", None) or {}
    names = cfg.get("label_names")
    classes = getattr(model, "num_classes", None)
    if not names:
        return tuple(imagenet_classes().values()) if cfg.get("num_classes") == classes == 1000 else None
    if isinstance(names, dict):
        names = [names[key] for key in sorted(names, key=int)]
    described = cfg.get("label_descriptions") or {}
    return tuple(str(described.get(name, name)) for name in names) if len(names) == classes else None
