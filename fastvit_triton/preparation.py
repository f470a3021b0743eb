"""How the images of a model are prepared, from what is known of its weights; for any model with timm's attributes."""

from collections.abc import Mapping
from typing import Any

from torch import nn

# Where nothing is known, as in timm.
DEFAULTS: dict[str, Any] = dict(interpolation="bicubic", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
DEFAULTS |= dict(crop_pct=0.875, crop_mode="center")


def bare(model: nn.Module) -> nn.Module:
    """The model inside the wrappers of torch.compile, DataParallel and DistributedDataParallel."""
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def data_config(model: nn.Module) -> dict[str, Any]:
    """How the model's images are prepared: timm's `resolve_data_config`, but with the model's own size and channels.

    The size is that of its options, timm's `patch_embed` or torchvision's `image_size`, else that of the weights.

    Args:
        model: a model with `pretrained_cfg`, ours or timm's.

    Returns:
        input_size (C, H, W), interpolation, mean, std, crop_pct and crop_mode. If the weights were made for another
        number of channels, mean and std are the averages of theirs, as in timm. Weights that were trained with
        `levels` also have these, see `read_image`.

    Raises:
        TypeError: the model is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is of type {type(model).__name__}; give a model, such as create_model returns")
    model = bare(model)
    if not hasattr(model, "pretrained_cfg"):  # a feature extractor holds its model
        model = getattr(model, "model", model)
    pretrained: Any = getattr(model, "pretrained_cfg", None) or {}
    size = _own_size(model, tuple(pretrained.get("input_size", (3, 224, 224))), pretrained)
    settings = {"input_size": size} | {key: pretrained.get(key) or value for key, value in DEFAULTS.items()}
    for key in ("mean", "std"):
        values = tuple(settings[key])
        settings[key] = values if len(values) == size[0] else (sum(values) / len(values),) * size[0]
    levels = pretrained.get("levels")
    known = {key: settings[key] for key in ("input_size", "interpolation", "mean", "std", "crop_pct", "crop_mode")}
    return known if levels is None else known | {"levels": levels}


def _own_size(model: Any, known: tuple[int, ...], pretrained: Mapping[str, Any]) -> tuple[int, ...]:
    """(C, H, W) of the images that the model was built for; `known`, of its weights, where the model says nothing."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "in_chans"):  # ours; models of transformers have configurations of their own
        return (config.in_chans, *(config.img_size if pretrained.get("fixed_input_size", True) else known[1:]))
    sides = getattr(getattr(model, "patch_embed", None), "img_size", None) or getattr(model, "image_size", None)
    sides = (sides, sides) if isinstance(sides, int) else sides
    first = pretrained.get("first_conv")  # timm's name of the layer that takes the image
    weight = None if first is None else dict(model.named_parameters()).get(f"{first}.weight")
    channels = known[0] if weight is None or weight.dim() != 4 else weight.shape[1]
    return (channels, *(sides if isinstance(sides, tuple | list) and len(sides) == 2 else known[1:]))
