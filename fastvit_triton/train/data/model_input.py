"""The preprocessing of a model's images, as its weights need it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from ...preparation import data_config
from .transform import Transform

MIN_AREA = 0.08  # of a random crop; Szegedy et al., arXiv:1409.4842, section 6


def transforms(model: nn.Module, train: bool = False) -> Callable[[Image.Image], Tensor]:
    """The preprocessing of a model, from an image to its input [C, H, W].

    For evaluation it equals timm's `create_transform(**data_config(model))`. For training it takes a random crop of at
    least 8 % of the area and mirrors it with probability 1/2; add other augmentations to it.

    Args:
        model: a model with `pretrained_cfg`, ours or timm's.
        train: for training.

    Returns:
        A `torchvision.transforms.v2.Compose` if torchvision can be imported and has such a crop, else our own
        `Transform`, or a function that calls it with random seeds.
    """
    config = data_config(model)
    if (pipeline := _torchvision(config, train)) is not None:
        return pipeline
    transform = transform_of(config)
    return transform if not train else lambda image: transform(image, int(torch.randint(2**31, ())), min_area=MIN_AREA)


def check_image(image: Image.Image | Tensor) -> Image.Image | Tensor:
    """The image; raises TypeError for what torchvision would return as it is, such as a path or an array."""
    if not isinstance(image, Image.Image | Tensor):
        raise TypeError(f"image is of type {type(image).__name__}; give a PIL image, as PIL.Image.open returns it")
    return image


def transform_of(config: Mapping[str, Any]) -> Transform:
    """Our transform for a configuration with timm's keys.

    Raises:
        ValueError: a value is out of range.
    """
    rest = {"crop_mode": config["crop_mode"], "interpolation": config["interpolation"]}
    return Transform(tuple(config["input_size"][1:]), config["mean"], config["std"], config["crop_pct"], **rest)


def _torchvision(config: Mapping[str, Any], train: bool) -> Callable[[Image.Image], Tensor] | None:
    """None if torchvision is not installed or was built for another PyTorch, or has no such crop."""
    try:
        from torchvision.transforms import InterpolationMode, v2
    except (ImportError, RuntimeError):
        return None
    channels, *size = config["input_size"]
    mode = InterpolationMode(config["interpolation"])
    tall, wide = (int(side / config["crop_pct"]) for side in size)
    if train:
        steps = [v2.RandomResizedCrop(size, (MIN_AREA, 1.0), interpolation=mode), v2.RandomHorizontalFlip()]
    elif config["crop_mode"] == "squash":
        steps = [v2.Resize((tall, wide), mode), v2.CenterCrop(size)]
    elif config["crop_mode"] == "center" and tall == wide:
        steps = [v2.Resize(tall, mode), v2.CenterCrop(size)]
    else:
        return None
    first = [check_image, *([v2.Grayscale() if channels == 1 else v2.RGB()] if channels in (1, 3) else [])]
    last = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(config["mean"], config["std"])]
    return v2.Compose([*first, *steps, *last])
