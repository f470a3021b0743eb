"""Builds our models and those of other libraries by name, without downloading weights."""

import difflib
import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from .console import BENCH

if TYPE_CHECKING:
    import torch
    from torch import nn

PREFIXES = "timm:NAME, torchvision:NAME, hf-config:PATH_OR_CLASS, or a name that `fastvit-triton models` lists"


class NamedModel(NamedTuple):
    """A model with random weights, or without storage on the meta device.

    Attributes:
        model: in evaluation mode.
        shape: shape of an image, [C, H, W].
        input: name of forward's argument for images; None if it is the first positional argument.
        ours: the model is from `create_model` and calls the kernels without conversion.
    """

    model: "nn.Module"
    shape: tuple[int, int, int]
    input: str | None = None
    ours: bool = False


def check_name(option: str, name: str) -> None:
    """Raises ValueError if no model is called so, or its package is not installed; builds nothing.

    Configurations of transformers are read by `build_model`.
    """
    from ..models import model_config

    prefix, colon, rest = name.partition(":")
    if not colon:
        try:
            model_config(name)
        except ValueError as error:
            raise ValueError(f"{error}; for models of other packages use {PREFIXES}") from error
    elif prefix in ("timm", "torchvision"):
        package = _package(prefix)
        names = package.list_models() if prefix == "timm" else package.models.list_models(module=package.models)
        if rest not in names and not (prefix == "timm" and package.is_model(rest)):  # which knows tags, too
            near = difflib.get_close_matches(rest, names, n=3, cutoff=0.0)
            raise ValueError(f"{prefix} has no model called {rest!r}; the nearest are {', '.join(near)}")
    elif prefix == "hf-config":
        _package("transformers")
    else:
        raise ValueError(f"{option} {name} begins with {prefix!r}; use {PREFIXES}")


def build_model(name: str, side: int | None = None, device: "torch.device | str" = "meta") -> NamedModel:
    """Builds a model by name, without downloading weights.

    Args:
        name: timm:NAME, torchvision:NAME, hf-config:PATH_OR_CLASS, or one of `list_models()`.
        side: image side in pixels; None means the model's own.
        device: device to build it on; on "meta" it has no weights.

    Raises:
        ValueError: the name is unknown, the package is not installed, or the image size does not fit.
    """
    import torch

    prefix, colon, rest = name.partition(":")
    check_name("--model", name)
    build = {"timm": _timm, "torchvision": _torchvision, "hf-config": _transformers}.get(prefix, _ours)
    with torch.device(device):
        found = build(rest if colon else name, side)
    found.model.eval()
    return found


def _ours(name: str, side: int | None) -> NamedModel:
    from ..models import create_model
    from ..models.config import sides

    model = create_model(name, **({} if side is None else {"img_size": side}))
    return NamedModel(model, (model.config.in_chans, *sides(model.config.img_size)), ours=True)


def _timm(name: str, side: int | None) -> NamedModel:
    model = _package("timm").create_model(name)
    channels, *sides = model.pretrained_cfg["input_size"]
    if side is not None:
        sides = side, side
        if hasattr(model, "set_input_size"):
            _fit(model.set_input_size, side, img_size=(side, side))
    return NamedModel(model, (channels, *sides))


def _torchvision(name: str, side: int | None) -> NamedModel:
    models = _package("torchvision").models
    options = {"image_size": side} if side is not None and name.startswith("vit_") else {}
    model = _fit(models.get_model, side, name, weights=None, **options)
    pixels: Any = side or getattr(model, "image_size", 224)
    return NamedModel(model, (3, pixels, pixels))


def _transformers(name: str, side: int | None) -> NamedModel:
    transformers = _package("transformers")
    config, cls = _read_config(transformers, name)
    if hasattr(config, "vision_config"):
        config, cls = config.vision_config, None
    if side is not None and hasattr(config, "image_size"):
        config.image_size = side
    if cls is None and type(config) not in transformers.AutoModel._model_mapping:
        raise ValueError(f"transformers has no model for {type(config).__name__} alone; name the class of a model")
    model = _fit(transformers.AutoModel.from_config if cls is None else cls._from_config, side, config)
    if model.main_input_name != "pixel_values":
        raise ValueError(f"{type(model).__name__} takes {model.main_input_name}, not images; name a vision model")
    size = getattr(config, "image_size", side or 224)
    size = (size, size) if isinstance(size, int) else tuple(size)
    return NamedModel(model, (getattr(config, "num_channels", 3), *size), "pixel_values")


def _read_config(transformers: ModuleType, name: str) -> tuple[Any, Any]:
    """A configuration, and the model class if the name or the file specifies one."""
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        cls: Any = getattr(transformers, name, None) if name.isidentifier() else None
        if getattr(cls, "config_class", None) is not None:
            return cls.config_class(), cls
        if not getattr(cls, "model_type", None):
            raise ValueError(f"hf-config:{name} is not a file, a folder with config.json, or a class of transformers")
        return cls(), None
    strict = getattr(importlib.import_module("huggingface_hub.errors"), "StrictDataclassError", ValueError)
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        config = transformers.CONFIG_MAPPING[held["model_type"]].from_dict(held)
    except KeyError as error:
        raise ValueError(f"{path} has no model_type that transformers knows: {error} is missing or unknown") from error
    except (ValueError, TypeError, strict) as error:
        raise ValueError(f"{path} is not a configuration of transformers: {str(error).splitlines()[0]}") from error
    return config, getattr(transformers, (held.get("architectures") or [""])[0], None)


def _package(name: str) -> ModuleType:
    """Imports a package; raises ValueError if it cannot be imported."""
    from ..measure.variants import absent

    if (why := absent(name)) is not None:
        raise ValueError(f"{why}; {BENCH if name == 'timm' else 'install it beside this version of torch'}")
    return importlib.import_module(name)


def _fit(make, side: int | None, *inputs: object, **options: object) -> Any:
    """Calls make(*inputs, **options); if an image size is given, converts errors to ValueError."""
    try:
        return make(*inputs, **options)
    except (AssertionError, RuntimeError, ValueError) as error:
        if side is None:
            raise
        why = str(error).splitlines()[0] if str(error) else "its patches do not divide it"
        raise ValueError(f"--img-size {side} does not fit this model: {why}") from error
