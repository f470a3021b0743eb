"""Our models in timm's registry, as `fvt_<name>`, and our attention in its ViTs, as `attn_layer="fastvit_triton"`.

    python -m fastvit_triton.integrations.timm train.py --model fvt_vit_small_patch16_224 ...

registers them and runs one of timm's scripts.
"""

import dataclasses
import runpy
import sys
from collections import deque
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from ..checkpoints.tensors import WeightsError
from ..convert import optimize
from ..models import CATALOGUE, model_config
from ..models.weights.create import create_model
from ..models.weights.pretrained import list_models, pretrained_cfg
from .host import need

PREFIX = "fvt_"
ATTENTION = "fastvit_triton"  # value of `attn_layer`
MODULE = "fastvit_triton_models"  # where timm looks for their entry points and configurations
SOURCES = ("file", "url", "state_dict", "hf_hub_id")  # of weights, in a configuration of timm


def register() -> list[str]:
    """Adds our classifiers to timm's registry, and "fastvit_triton" to its kinds of attention; its entries stay.

    With `timm.create_model("vit_base_patch16_224", attn_layer="fastvit_triton")` the attention is timm's own module,
    converted by `optimize`; keys, options and `revert` are as usual. `optimize` of the model converts whole blocks.

    Returns:
        The names, each "fvt_" and a name of `fastvit_triton.list_models()`; tags follow as in timm.

    Raises:
        ImportError: timm is not installed, or older than 1.0.
    """
    models = need("timm", "1.0").models
    ours = [name for name in list_models() if _task(name) == "classify"]
    names = [PREFIX + name for name in ours]
    if MODULE in sys.modules:
        return names
    home: Any = ModuleType(MODULE)
    home.default_cfgs = {PREFIX + name: _configurations(name) for name in ours}
    sys.modules[MODULE] = home
    getattr(models.vision_transformer, "ATTN_LAYERS", {})[ATTENTION] = Attention
    for name in names:
        setattr(home, name, models.register_model(_entry(name)))
    return names


class Attention:
    """Makes timm's `Attention` with the given arguments, converted by `optimize`; timm's models call it as a class."""

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        """timm's module."""
        module = need("timm", "1.0").layers.Attention(*arguments, **options)
        optimize(module)
        return module


def _task(name: str) -> str:
    """What a model's output is, see `ImageModel.task`."""
    family = getattr(CATALOGUE[name], "MODEL", None)  # hybrids have functions by name instead
    return getattr(family, "task", "classify")


def _entry(name: str) -> Any:
    """The function that timm calls for a name."""

    def entry(
        pretrained: bool = False,
        pretrained_cfg: Any = None,
        pretrained_cfg_overlay: dict[str, Any] | None = None,
        cache_dir: Any = None,
        **options: Any,
    ) -> nn.Module:
        return _build(name, pretrained, pretrained_cfg, pretrained_cfg_overlay or {}, cache_dir, options)

    entry.__name__ = entry.__qualname__ = name
    entry.__module__ = MODULE
    entry.__doc__ = f"{name.removeprefix(PREFIX)} of fastvit_triton."
    return entry


def _build(name: str, pretrained: bool, cfg: Any, overlay: dict[str, Any], cache_dir: Any, options: Any) -> nn.Module:
    """The model as timm makes it: with `pretrained_cfg` and `default_cfg`.

    Raises:
        WeightsError: weights are asked for from another place than the tag's.
    """
    import timm

    our_name = name.removeprefix(PREFIX)
    resolved = timm.models.resolve_pretrained_cfg(name, cfg, overlay).to_dict()
    elsewhere = [key for key in SOURCES if overlay.get(key)] + (["cache_dir"] if cache_dir else [])
    if pretrained and elsewhere:
        raise WeightsError(f"{name} takes no {elsewhere[0]}; load the weights by checkpoint_path")
    tag = resolved.get("tag")
    accepted = {field.name for field in dataclasses.fields(CATALOGUE[our_name].CONFIG)}
    accepted |= {"features_only", "out_indices"}
    # timm's scripts give every model rates of dropout; 0 asks for nothing
    arguments = {key: value for key, value in options.items() if key in accepted or not key.endswith("rate") or value}
    arguments.pop("scriptable", None)
    model = create_model(f"{our_name}.{tag}" if pretrained and tag else our_name, pretrained=pretrained, **arguments)
    backbone: Any = getattr(model, "model", model)
    config = backbone.config
    size = {"input_size": (config.in_chans, *config.img_size)}
    heads = backbone.head_names
    resolved |= {"num_classes": config.num_classes, "classifier": heads[0] if len(heads) == 1 else heads}
    resolved |= size if resolved.get("fixed_input_size") else {}
    backbone.pretrained_cfg = backbone.default_cfg = resolved
    return model


def _configurations(name: str) -> Any:
    """timm's DefaultCfg of a name: one configuration for each tag of its weights, else one from the model's options."""
    from timm.models import DefaultCfg, PretrainedCfg

    fields = {field.name for field in dataclasses.fields(PretrainedCfg)}
    tags = [full.partition(".")[2] for full in list_models(f"{name}.*", pretrained=True) if full.startswith(f"{name}.")]
    rows = {tag: pretrained_cfg(f"{name}.{tag}") for tag in tags}
    if not rows:
        config: Any = model_config(name)
        rows = {"": {"input_size": (config.in_chans, *config.img_size), "num_classes": config.num_classes}}
        rows[""] |= {"fixed_input_size": True} | pretrained_cfg(name)
    kept = ({key: row[key] for key in row.keys() & fields if key != "architecture"} for row in rows.values())
    configurations = {tag: PretrainedCfg(**row) for tag, row in zip(rows, kept, strict=True)}
    return DefaultCfg(tags=deque(configurations), cfgs=configurations, is_pretrained=bool(tags))


def main(arguments: list[str]) -> None:
    """Registers our models and runs a script of timm with its arguments."""
    if not arguments:
        raise SystemExit("give a script of timm and its arguments, such as train.py --model fvt_vit_small_patch16_224")
    register()
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
