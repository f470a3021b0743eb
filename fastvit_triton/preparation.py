"""How the images of a model are prepared, from what is known of its weights; for any model with timm's attributes."""

from typing import Any

from torch import nn

# Where nothing is known, as in timm.
DEFAULTS: dict[str, Any] = dict(interpolation="bicubic", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
DEFAULTS |= dict(crop_pct=0.875, crop_mode="center")


def data_config(model: nn.Module) -> dict[str, Any]:
    """How the model's images are prepared: timm's `resolve_data_config`, but with the model's own size and channels.

    Args:
        model: a model with `pretrained_cfg`, ours or timm's.

    Returns:
        input_size (C, H, W), interpolation, mean, std, crop_pct and crop_mode. If the weights were made for another
        number of channels, mean and std are the averages of theirs, as in timm.

    Raises:
        TypeError: the model is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is of type {type(model).__name__}; give a model, such as create_model returns")
    if not hasattr(model, "pretrained_cfg"):  # a feature extractor holds its model
        model = getattr(model, "model", model)
    pretrained: Any = getattr(model, "pretrained_cfg", None) or {}
    config: Any = getattr(model, "config", None)
    size = tuple(pretrained.get("input_size", (3, 224, 224)))
    if hasattr(config, "in_chans"):  # ours; models of transformers have configurations of their own
        size = (config.in_chans, *(config.img_size if pretrained.get("fixed_input_size", True) else size[1:]))
    settings = {"input_size": size} | {key: pretrained.get(key) or value for key, value in DEFAULTS.items()}
    for key in ("mean", "std"):
        values = tuple(settings[key])
        settings[key] = values if len(values) == size[0] else (sum(values) / len(values),) * size[0]
    return {key: settings[key] for key in ("input_size", "interpolation", "mean", "std", "crop_pct", "crop_mode")}
