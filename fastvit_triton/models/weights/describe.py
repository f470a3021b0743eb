"""Which model a checkpoint holds, and how images are prepared for it: from our header, the table, or a config.json."""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from ...checkpoints.locations import Location
from ...checkpoints.reading import header_of
from ...checkpoints.tensors import WeightsError
from ..catalogue import CATALOGUE
from . import timm_config, transformers_config


class Description(NamedTuple):
    """What `create_model` needs to build the model of a checkpoint."""

    name: str  # a name of `list_models()`
    options: dict[str, Any]  # arguments of `create_model`, with JSON's types
    pretrained_cfg: dict[str, Any]  # facts of the checkpoint with timm's keys, see `model.pretrained_cfg`


def describe(location: Location) -> Description | None:
    """The description of the checkpoint at a location; downloads no weights. None if nothing describes it."""
    if location.cfg:
        return Description(location.cfg["architecture"], {"num_classes": location.cfg["num_classes"]}, location.cfg)
    with suppress(ValueError, RecursionError):  # the error comes when the file is read
        if (description := from_metadata(header_of(location))) is not None:
            return description
    if (config := location.config()) is None:
        return None
    try:
        if "model_type" in config:
            name, options, cfg = transformers_config.read(config, location.config("preprocessor_config.json") or {})
        elif "architecture" in config:
            name, options, cfg = timm_config.read(config)
        else:
            raise ValueError('it has neither "architecture", as of timm, nor "model_type", as of transformers')
        if name not in CATALOGUE:
            raise ValueError(f"its architecture {name!r} is none of ours, which list_models() lists")
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise WeightsError(f"the config.json of {location.text} describes no model of ours: {why[:300]}") from error
    return Description(name, options, cfg)


def from_metadata(metadata: Mapping[str, str]) -> Description | None:
    """The description in the header of a file of `save_weights`; None if it has none."""
    if not {"variant", "config"} <= metadata.keys():
        return None
    options, cfg = (json.loads(metadata.get(key, "{}")) for key in ("config", "pretrained_cfg"))
    if not isinstance(options, dict) or not isinstance(cfg, dict):
        raise ValueError("its config and pretrained_cfg must be objects")
    return Description(metadata["variant"], options, timm_config.tuples(cfg))


def with_size(metadata: Mapping[str, str], description: Description | None) -> Mapping[str, str]:
    """The metadata of a file with the size of its model's images, from a description beside it if it states none."""
    if "config" in metadata or description is None:
        return metadata
    size = description.options.get("img_size") or description.pretrained_cfg.get("input_size", ())[1:]
    return {**metadata, "config": json.dumps({"img_size": size})} if size else metadata
