"""The preprocessing of a model's images, as its weights need it."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...preparation import DEFAULTS, data_config
from .transform import Source, Transform

MIN_AREA = 0.08  # of a random crop; Szegedy et al., arXiv:1409.4842, section 6


def transforms(model: nn.Module | Mapping[str, Any], train: bool = False) -> Callable[[Source], Tensor]:
    """The preprocessing of a model, from an image file or a PIL image to its input [C, H, W].

    It decodes as `read_image`, as training and the commands do. For evaluation it then equals timm's
    `create_transform(**data_config(model))`. For training it takes a random crop of at least 8 % of the area and
    mirrors it with probability 1/2; add other augmentations to it.

    Args:
        model: a model with `pretrained_cfg`, ours or timm's; or what `data_config` returns, such as the metadata of an
            exported file.
        train: for training.

    Returns:
        A `Transform`, or a function that calls it with random seeds.

    Raises:
        TypeError: the model is neither.
        ValueError: an entry is missing or out of range.
    """
    transform = transform_of(model if isinstance(model, Mapping) else data_config(model))
    return partial(_random_crop, transform) if train else transform


def transform_of(config: Mapping[str, Any]) -> Transform:
    """Our transform for a configuration with timm's keys."""
    if missing := [key for key in ("input_size", *DEFAULTS) if key not in config]:
        raise ValueError(f"the preparation has no {missing[0]}; give what data_config returns")
    rest = {"crop_mode": config["crop_mode"], "interpolation": config["interpolation"], "levels": config.get("levels")}
    return Transform(tuple(config["input_size"][1:]), config["mean"], config["std"], config["crop_pct"], **rest)


def _random_crop(transform: Transform, image: Source) -> Tensor:
    return transform(image, int(torch.randint(2**31, ())), min_area=MIN_AREA)
