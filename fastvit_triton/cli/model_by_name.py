"""What the name of a model means in a command, and how it is built; downloads no weights.

| name | of | built by |
|---|---|---|
| NAME of `fastvit-triton models` | this package | `build_model`; `train` |
| a file or folder | a checkpoint of this package | `build_model`, with random weights; `loading` |
| timm:NAME | timm | `build_model`; `train`, by `other_models` |
| torchvision:NAME, hf-config:PATH_OR_CLASS | torchvision, transformers | `build_model` |
| hf:FOLDER, hf:NAME | transformers, on a disk or the Hub | `train`, by `other_models` |
| NAME.TAG, timm/NAME, hf-hub:ORG/NAME | pretrained weights on the Hub | `loading` |
"""

import contextlib
import difflib
import importlib
import inspect
import json
import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from .arguments import check_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

TIMM = "pip install 'fastvit_triton[timm]'"
Size = tuple[int, int]  # height and width in pixels
OURS, SAVED = "ours", "saved"
PACKAGES = {"timm": "timm", "hf": "transformers"}  # prefix of a name → package whose models `train` builds
PREFIXED = "timm:NAME, torchvision:NAME and hf-config:PATH_OR_CLASS"
PREFIXES = f"{PREFIXED.replace(' and', ',')}, a name that `fastvit-triton models` lists, or the folder of a run"


class Patches(NamedTuple):
    """How a tower takes images: as rows of patches, of all images in one sequence, and their grids."""

    names: tuple[str, str]  # of forward's arguments: patches [T, K], and grids (frames, rows, columns) [B, 3]
    side: int  # pixels of a side of a patch
    frames: int  # of a patch
    merged: int  # patches of a side of a token; rows and columns of a grid are its multiples


class NamedModel(NamedTuple):
    """A model with random weights, or without storage on the meta device."""

    model: "nn.Module"  # in evaluation mode
    shape: tuple[int, int, int]  # shape of an image, [C, H, W]
    input: str | None = None  # name of forward's argument for images; None if it is the first positional argument
    ours: bool = False  # the model is from `create_model` and calls the kernels without conversion
    patches: Patches | None = None  # how it takes images if not as a tensor [B, C, H, W], else None

    def inputs(self, batch: int, make: "Callable[..., torch.Tensor]") -> "tuple[tuple[torch.Tensor, ...], dict]":
        """(positional, named) arguments of a call; `make(*shape)` makes images [B, C, H, W], or rows of patches."""
        import torch

        (channels, height, width), patches = self.shape, self.patches
        if patches is None:
            images = make(batch, *self.shape)
            return ((images,), {}) if self.input is None else ((), {self.input: images})
        rows = height // patches.side
        columns = width // patches.side
        flat = make(batch * rows * columns, channels * patches.frames * patches.side**2)
        grids = torch.tensor([[1, rows, columns]] * batch, device="cpu" if flat.is_meta else flat.device)
        return (), dict(zip(patches.names, (flat, grids), strict=True))


def check_name(option: str, name: str) -> None:
    """Raises ValueError if no model is called so, or its package is not installed; builds nothing.

    Configurations of transformers are read by `build_model`.
    """
    from ..models import model_config

    prefix, rest = parse_name(name)
    if prefix == SAVED:
        check_checkpoint(option, name)
    elif prefix == OURS:
        try:
            model_config(name)
        except ValueError as error:
            raise ValueError(f"{error}; models of other packages are {PREFIXED}") from error
    elif prefix in ("timm", "torchvision"):
        library = package(prefix)
        names = library.list_models() if prefix == "timm" else library.models.list_models(module=library.models)
        if rest not in names and not (prefix == "timm" and library.is_model(rest)):  # which knows tags, too
            near = difflib.get_close_matches(rest, names, n=3, cutoff=0.0)
            raise ValueError(f"{prefix} has no model called {rest!r}; the nearest are {', '.join(near)}")
    elif prefix == "hf-config":
        package("transformers")
    else:
        raise ValueError(f"{option} {name} begins with {prefix!r}; use {PREFIXES}")


def parse_name(name: str) -> tuple[str, str]:
    """Splits a name into its prefix and the rest; the prefix is SAVED for a path, and OURS without a colon."""
    from ..models.catalogue import CATALOGUE

    if name not in CATALOGUE and os.path.exists(name):
        return SAVED, name
    prefix, colon, rest = name.partition(":")
    return (prefix, rest) if colon else (OURS, name)


def is_built(name: str) -> bool:
    """True for a name of another library's model, which `build_model` builds with random weights."""
    return parse_name(name)[0] in BUILDERS


def is_other(name: str | None) -> bool:
    """True for a model of timm or transformers: timm:NAME, hf:FOLDER and hf:NAME."""
    return name is not None and parse_name(name)[0] in PACKAGES


def check_other(option: str, name: str) -> None:
    """Raises ValueError if there is no such model, or its package is not installed; downloads nothing."""
    from ..checkpoints.locations import REPOSITORY

    prefix, rest = parse_name(name)
    if prefix == "timm":
        check_name(option, name)
        return
    package("transformers")
    folder = Path(rest)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"{option} {name} is a folder without config.json; give one that transformers saved")
    if not folder.is_dir() and (folder.parent.is_dir() or not REPOSITORY.fullmatch(rest)):
        raise ValueError(f"{option} {name} is no folder, and no name on the Hub such as hf:google/vit-base-patch16-224")


def check_model(option: str, name: str) -> None:
    """Raises ValueError if `train` knows no such model, or its package is not installed; downloads nothing."""
    from ..models import model_config
    from ..models.weights.pretrained import split_tag

    if is_other(name):
        check_other(option, name)
        return
    base, tag = split_tag(name)
    model_config(base)
    if tag:
        raise ValueError(f"{option} is {name}; use --weights {name} for pretrained weights, or {option} {base}")


def check_tagged_model(option: str, name: str) -> None:
    """Raises ValueError if `create_model` knows no such name, or if the name has no such tag."""
    from ..models import model_config
    from ..models.weights.pretrained import pretrained_cfg, split_tag

    model_config(split_tag(name)[0])
    pretrained_cfg(name)


def absolute_other(name: str) -> str:
    """The name with an absolute path, if it is that of a folder."""
    folder = Path(name.removeprefix("hf:"))
    return f"hf:{folder.resolve()}" if name.startswith("hf:") and folder.is_dir() else name


def check_weights(option: str, source: str) -> None:
    """As `check_checkpoint`; weights may also be those of a model of timm or transformers, by its name."""
    (check_other if is_other(source) else check_checkpoint)(option, source)


def build_model(name: str, size: Size | None = None, device: "torch.device | str" = "meta") -> NamedModel:
    """Builds a model by name, without downloading weights."""
    import torch

    prefix, rest = parse_name(name)
    check_name("--model", name)
    with torch.device(device):
        named_model = BUILDERS.get(prefix, _ours)(rest, size)
    named_model.model.eval()
    return named_model


def random_model(
    name: str, size: Size | None, device: "torch.device", dtype: "torch.dtype", train: bool = False
) -> NamedModel:
    """As `build_model`, with random values of `dtype` in all parameters, in training or evaluation mode."""
    from ..measure.model_cases import randomized

    built = build_model(name, size, device)
    return built._replace(model=randomized(built.model, dtype).to(dtype).train(train))


def _ours(name: str, size: Size | None) -> NamedModel:
    from ..models import create_model
    from ..models.config import sides

    options = {} if size is None else {"img_size": _side(size)}
    if parse_name(name)[0] == SAVED:
        name, theirs = _described(name)
        options = theirs | options
    model = create_model(name, **options)
    return NamedModel(model, (model.config.in_chans, *sides(model.config.img_size)), ours=True)


def public_name(name: str) -> str:
    """The name of a model for other people, to whom a file of this machine says nothing."""
    return f"a checkpoint of {_described(name)[0]}" if parse_name(name)[0] == SAVED else name


def _described(source: str) -> tuple[str, dict[str, Any]]:
    """The name of the model that a checkpoint holds, and its options."""
    from ..models.weights.describe import describe
    from ..models.weights.pretrained import find_location

    if (description := describe(find_location(source))) is None:
        raise ValueError(f"--model {source} does not say which of our models it holds; give a name of a model")
    return description.name, description.options


def _side(size: Size) -> int | Size:
    """The side of a square, or height and width."""
    return size[0] if size[0] == size[1] else size


def _timm(name: str, size: Size | None) -> NamedModel:
    model = package("timm").create_model(name)
    channels, *sides = model.pretrained_cfg["input_size"]
    if size is not None:
        sides = size
        if hasattr(model, "set_input_size"):
            _fit(model.set_input_size, size, img_size=size)
    return NamedModel(model, (channels, *sides))


def _torchvision(name: str, size: Size | None) -> NamedModel:
    models = package("torchvision").models
    vit = name.startswith("vit_")
    if vit and size is not None and size[0] != size[1]:
        raise ValueError(f"--img-size is {_words(size)}, and torchvision's ViTs take square images; give one side")
    model = _fit(models.get_model, size, name, weights=None, **({"image_size": size[0]} if size and vit else {}))
    side: Any = getattr(model, "image_size", 224)
    return NamedModel(model, (3, *(size or (side, side))))


def _transformers(name: str, size: Size | None) -> NamedModel:
    transformers = package("transformers")
    config, cls = read_config(transformers, name)
    if hasattr(config, "vision_config"):
        config, cls = config.vision_config, None
    model_classes = transformers.AutoModel._model_mapping
    cls = cls or (model_classes[type(config)] if type(config) in model_classes else _tower(config))
    if "grid_thw" in inspect.signature(cls.forward).parameters:
        return _packed(cls, config, size)
    if size is not None and hasattr(config, "image_size"):
        config.image_size = _side(size)
    try:
        model = _fit(cls._from_config, size, config)
    except TypeError as error:  # such as a product of two sides
        if size is None or size[0] == size[1]:
            raise
        why = f"{cls.__name__} takes square images; give one side"
        raise ValueError(f"--img-size is {_words(size)}, and {why}") from error
    if model.main_input_name != "pixel_values":
        raise ValueError(f"{type(model).__name__} takes {model.main_input_name}, not images; name a vision model")
    image_size = getattr(config, "image_size", size or 224)
    image_size = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    return NamedModel(model, (getattr(config, "num_channels", 3), *image_size), "pixel_values")


def _tower(config: Any) -> Any:
    """The class of a tower that takes patches and their grids, by its configuration; raises ValueError without one."""
    home = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    for cls in vars(home).values():
        if isinstance(cls, type) and getattr(cls, "config_class", None) is type(config) and hasattr(cls, "forward"):
            if "grid_thw" in inspect.signature(cls.forward).parameters:
                return cls
    raise ValueError(f"transformers has no model for {type(config).__name__} alone; name the class of a model")


def _packed(cls: Any, config: Any, size: Size | None) -> NamedModel:
    """A tower that takes rows of patches; sizes are rounded to whole tokens, as its image processor does."""
    import torch

    from ..expected.count import weightless

    on_meta = torch.empty(0).is_meta
    with weightless() if on_meta else contextlib.nullcontext():  # its rotary positions are computed from values
        model = cls._from_config(config)
    model = model._apply(lambda t: t.to("meta") if on_meta and t.is_floating_point() else t)
    rows = next(iter(list(inspect.signature(cls.forward).parameters)[1:]))
    frames = getattr(config, "temporal_patch_size", 1)
    merged = getattr(config, "spatial_merge_size", 1)
    side = merged * config.patch_size
    image_size = getattr(config, "image_size", 448)
    wanted = size or ((image_size, image_size) if isinstance(image_size, int) else tuple(image_size))
    height, width = (max(round(pixels / side), 1) * side for pixels in wanted)
    channels = getattr(config, "in_channels", getattr(config, "in_chans", getattr(config, "num_channels", 3)))
    patches = Patches((rows, "grid_thw"), config.patch_size, frames, merged)
    return NamedModel(model, (channels, height, width), patches=patches)


def read_config(transformers: ModuleType, name: str) -> tuple[Any, Any]:
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
        entries = json.loads(path.read_text(encoding="utf-8"))
        config = transformers.CONFIG_MAPPING[entries["model_type"]].from_dict(entries)
    except KeyError as error:
        raise ValueError(f"{path} has no model_type that transformers knows: {error} is missing or unknown") from error
    except (ValueError, TypeError, strict) as error:
        raise ValueError(f"{path} is not a configuration of transformers: {str(error).splitlines()[0]}") from error
    return config, getattr(transformers, (entries.get("architectures") or [""])[0], None)


def package(name: str) -> ModuleType:
    """Imports a package; raises ValueError if it cannot be imported."""
    from ..measure.variants import absent

    if (why := absent(name)) is not None:
        raise ValueError(f"{why}; {TIMM if name == 'timm' else 'install it beside this version of torch'}")
    return importlib.import_module(name)


def _words(size: Size) -> str:
    return "x".join(map(str, dict.fromkeys(size)))


def _fit(make, size: Size | None, *inputs: object, **options: object) -> Any:
    """Calls make(*inputs, **options); if an image size is given, converts errors to ValueError."""
    try:
        return make(*inputs, **options)
    except (AssertionError, RuntimeError, ValueError) as error:
        if size is None:
            raise
        why = str(error).splitlines()[0] if str(error) else "its patches do not divide it"
        raise ValueError(f"--img-size {_words(size)} does not fit this model: {why}") from error


BUILDERS = {"timm": _timm, "torchvision": _torchvision, "hf-config": _transformers}
