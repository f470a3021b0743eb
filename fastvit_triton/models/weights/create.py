"""`create_model` with pretrained weights, by the names and tags of timm, from the Hub, or from a folder or file."""

import os
from collections.abc import Mapping
from typing import Any

from ...checkpoints.locations import Location
from ...checkpoints.reading import read, unwrap
from ...checkpoints.tensors import State, WeightsError
from .. import catalogue
from ..features import FeatureGetterNet
from ..transformer import VisionTransformer
from . import pretrained as table
from .describe import Description, describe, with_size
from .load import _load, load_weights
from .pretrained import find_location, find_tagged
from .rebuild import compare

SCHEMES = ("hf-hub", "hf_hub", "local-dir")


def create_model(
    name: str, pretrained: bool = False, *, checkpoint_path: str | os.PathLike | None = None, **overrides: Any
) -> VisionTransformer:
    """Builds a model by timm's name, with random or pretrained weights.

    Args:
        name: a name of `list_models()`, with or without a tag of `list_models(pretrained=True)`; or
            "hf-hub:org/name", "hf-hub:org/name@revision" or "local-dir:PATH" with a config.json of timm or
            transformers.
        pretrained: load the weights of the tag, by default the first, or those of the repository or folder.
        checkpoint_path: a checkpoint to load instead, in any form of `load_weights`.
        **overrides: any field of the family's config, such as num_classes, img_size, in_chans, drop_path_rate, and
            features_only, out_indices and output_fmt. A tag and `pretrained` change the default of num_classes to that
            of the weights; for other in_chans, their first convolution is summed or repeated over channels, as in timm.

    Returns:
        The model, or with features_only a `FeatureGetterNet`, which returns a list of feature maps; `model.variant` is
        its name, `model.config` its configuration, `model.pretrained_cfg` what is known of its weights, with timm's
        keys.

    Raises:
        ValueError: the name or its tag is unknown (the message suggests others), or an option's value is invalid.
        TypeError: an option is unknown, or an argument has another type.
        WeightsError: there are no such weights, they cannot be downloaded, or they do not fit the model.
    """
    if not isinstance(name, str):
        kind = type(name).__name__
        raise TypeError(
            f"name is of type {kind}; give text, such as 'vit_base_patch16_224' or 'local-dir:PATH' of a folder"
        )
    if pretrained not in (True, False):
        raise TypeError(f"pretrained is {pretrained!r}; use True or False, and give a tag as {name.split('.')[0]}.TAG")
    if pretrained and checkpoint_path is not None:
        raise WeightsError(f"pretrained is True and checkpoint_path is {checkpoint_path}; give one of them")
    location, description = _resolve(name, pretrained)
    model = build(description, overrides) if location is None else build_pretrained(location, description, overrides)
    if checkpoint_path is not None:
        load_weights(model, checkpoint_path)
    return model


def build(found: Description, overrides: Mapping[str, Any]) -> VisionTransformer:
    """The model of a description, with random weights."""
    model = catalogue.create_model(found.name, **{**found.options, **overrides})
    backbone = model.model if isinstance(model, FeatureGetterNet) else model
    backbone.pretrained_cfg = found.pretrained_cfg
    return model


def build_pretrained(location: Location, found: Description, overrides: Mapping[str, Any]) -> VisionTransformer:
    """The model of a description with the weights of a location."""
    tensors, metadata = read(location.weights(), True)
    try:
        if not location.cfg:  # a config.json may ask for anything
            compare(unwrap(tensors)[0], found.name, found.options)
    except (ValueError, TypeError, RuntimeError, ArithmeticError) as error:
        raise WeightsError(f"{location.text} holds a model that this version cannot build: {error}") from error
    theirs = found.pretrained_cfg.get("input_size", (3,))[0]
    model = build(found, overrides)
    if overrides.get("in_chans", theirs) == theirs:
        _load(model, tensors, with_size(metadata, found), None, True)
    else:
        source = build(found, {**overrides, "in_chans": theirs})
        _load(source, tensors, with_size(metadata, found), None, True)
        model.load_state_dict(_fit_channels(source.state_dict(), model.state_dict()))
    return model


def _resolve(name: str, weights: bool) -> tuple[Location | None, Description]:
    """Where the weights lie, None if they are not wanted, and the model that the name describes."""
    if name.partition(":")[0] in SCHEMES:
        location = find_location(name)
        if (description := describe(location)) is None:
            raise WeightsError(location.why_missing("config.json, which names the model"))
        return location if weights else None, description
    if "/" in name:
        raise WeightsError(f"name is {name!r}; use hf-hub:{name} for the Hub, or local-dir:{name} for a folder")
    base, tag = table.split_tag(name)
    catalogue.family_of(base)
    cfg = table.pretrained_cfg(name)
    options = {"num_classes": cfg["num_classes"]} if cfg and (tag or weights) else {}
    return find_tagged(name, {}) if weights else None, Description(base, options, cfg)


def _fit_channels(state: State, target: State) -> State:
    """The tensors; convolutions [D, C, P, P] of another C are summed to one channel, or repeated and scaled."""
    fitted = dict(state)
    for key, wanted in target.items():
        if state[key].shape != wanted.shape and wanted.dim() != 4:
            raise WeightsError(
                f"in_chans is not that of the weights, and {key} cannot be converted; leave out in_chans"
            )
        if state[key].shape != wanted.shape:
            weight = state[key]
            channels = wanted.shape[1]
            repeats = -(-channels // weight.shape[1])
            more = weight.repeat(1, repeats, 1, 1)[:, :channels] * (weight.shape[1] / channels)
            fitted[key] = weight.sum(1, keepdim=True) if channels == 1 else more
    return fitted
