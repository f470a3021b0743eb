"""Augmentation of images with boxes: mirror, scale, and crop, as the authors of DETR do.

Source: facebookresearch/detr, datasets/coco.py and datasets/transforms.py. A target has `boxes` [n, 4], corners in
pixels, and any other tensors [n, ...], whose rows follow the boxes. All random numbers come from the generator.
"""

import torch
from PIL import Image, ImageOps
from torch import Tensor

Target = dict[str, Tensor]
SHORTEST = tuple(range(480, 801, 32))  # sides in pixels
LONGEST = 1333
BEFORE_CROP = (400, 500, 600)
CROP = (384, 600)


def augment(
    image: Image.Image,
    target: Target,
    generator: torch.Generator,
    shortest: tuple[int, ...] = SHORTEST,
    longest: int = LONGEST,
    before_crop: tuple[int, ...] = BEFORE_CROP,
    crop: tuple[int, int] = CROP,
) -> tuple[Image.Image, Target]:
    """Mirrors with probability 1/2; then, with probability 1/2, scales and crops; then scales."""
    if torch.rand((), generator=generator).item() < 0.5:
        image, target = mirror(image, target)
    if torch.rand((), generator=generator).item() < 0.5:
        image, target = scale(image, target, _one(before_crop, generator), 10**9)
        sides = [min(_between(crop[0], min(side, crop[1]), generator), side) for side in image.size]
        left, top = (_between(0, whole - part, generator) for whole, part in zip(image.size, sides, strict=True))
        image, target = cut(image, target, (left, top, left + sides[0], top + sides[1]))
    return scale(image, target, _one(shortest, generator), longest)


def mirror(image: Image.Image, target: Target) -> tuple[Image.Image, Target]:
    """Exchanges left and right."""
    left, top, right, bottom = target["boxes"].unbind(1)
    boxes = torch.stack((image.width - right, top, image.width - left, bottom), 1)
    return ImageOps.mirror(image), {**target, "boxes": boxes}


def scale(image: Image.Image, target: Target, shortest: int, longest: int) -> tuple[Image.Image, Target]:
    """Resizes so that the shorter side is `shortest`, or less where the longer one would exceed `longest`."""
    size = scaled_size(image.size, shortest, longest)
    ratios = [new / old for new, old in zip(size, image.size, strict=True)]
    resized = {**target, "boxes": target["boxes"] * torch.tensor([*ratios, *ratios])}
    if "areas" in target:
        resized["areas"] = target["areas"] * ratios[0] * ratios[1]
    return image.resize(size, Image.Resampling.BILINEAR), resized


def scaled_size(size: tuple[int, int], shortest: int, longest: int) -> tuple[int, int]:
    """The (width, height) after `scale`."""
    short = min(size)
    long = max(size)
    if long / short * shortest > longest:
        shortest = round(longest * short / long)
    width, height = (shortest if side == short else int(shortest * side / short) for side in size)
    return width, height


def cut(image: Image.Image, target: Target, box: tuple[int, int, int, int]) -> tuple[Image.Image, Target]:
    """The part (left, top, right, bottom) of an image, with the boxes that reach into it."""
    left, top, right, bottom = box
    limits = torch.tensor([right - left, bottom - top] * 2)
    boxes = torch.minimum((target["boxes"] - torch.tensor([left, top] * 2)).clamp(min=0), limits)
    keep = (boxes[:, 2:] > boxes[:, :2]).all(1)
    rest = {name: values[keep] for name, values in target.items()}
    return image.crop(box), {**rest, "boxes": boxes[keep]}


def _one(sides: tuple[int, ...], generator: torch.Generator) -> int:
    return sides[int(torch.randint(len(sides), (), generator=generator))]


def _between(low: int, high: int, generator: torch.Generator) -> int:
    """A whole number from low to high; low if high is below it."""
    return int(torch.randint(low, max(low, high) + 1, (), generator=generator))
