"""Augmentation policies for single images, in Pillow, between crop and tensor: RandAugment and 3-Augment.

A policy is a function of (image, generator); `Transform` applies it to random crops. All random numbers come from the
generator, so an image's seed determines the result in any worker.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from ..ranges import NonNegative, PositiveInt, Probability, checked

Policy = Callable[[Image.Image, torch.Generator], Image.Image]
Level = Annotated[int, "[0, 255]"]


@checked
def rand_augment(
    image: Image.Image,
    generator: torch.Generator,
    layers: PositiveInt = 2,
    magnitude: Annotated[float, "[0, 10]"] = 9.0,
    std: NonNegative = 0.5,
    probability: Probability = 0.5,
    fill: tuple[Level, ...] = (124, 116, 104),
) -> Image.Image:
    """RandAugment: a few random operations of one magnitude (Cubuk et al., arXiv:1909.13719, section 3).

    The defaults are timm's `rand-m9-mstd0.5-inc1`, the policy of DeiT and MAE (timm/data/auto_augment.py,
    `_RAND_INCREASING_TRANSFORMS`): every operation gets stronger with the magnitude. Cutout is not included; use
    `random_erasing`. big_vision's `randaug(2, m)` is `big_vision_augment`.

    Args:
        image: mode L or RGB.
        generator: source of all random numbers.
        layers: number of operations, sampled with replacement.
        magnitude: 0 … 10.
        std: standard deviation of each operation's magnitude, which is clipped to 0 … 10.
        probability: probability of applying each operation.
        fill: colour of pixels from outside the image, per channel, 0 … 255; by default ImageNet's mean.

    Returns:
        An image of the same size and mode.
    """
    names = tuple(OPERATIONS)
    for _ in range(layers):
        name = names[int(torch.randint(len(names), (), generator=generator))]
        chance, side, kernel = torch.rand(3, generator=generator).tolist()
        level = magnitude + std * torch.randn((), generator=generator).item()
        if chance < probability:
            resample = Image.Resampling.BILINEAR if kernel < 0.5 else Image.Resampling.BICUBIC
            options = dict(resample=resample, fillcolor=fill if image.mode == "RGB" else fill[0])
            image = OPERATIONS[name](image, min(max(level / 10, 0.0), 1.0), -1 if side < 0.5 else 1, options)
    return image


@checked
def three_augment(image: Image.Image, generator: torch.Generator, jitter: Probability = 0.3) -> Image.Image:
    """3-Augment: greyscale, solarise or blur, then colour jitter (DeiT III, arXiv:2204.07118, section 3.3).

    As in facebookresearch/deit, augment.py: solarise at 128, blur radius 0.1 to 2 pixels, brightness, contrast and
    saturation each scaled by a factor in 1 ± jitter, in random order (torchvision's ColorJitter).

    Args:
        image: mode L or RGB.
        generator: source of all random numbers.
        jitter: strength of the colour jitter; 0 disables it.

    Returns:
        An image of the same size and mode.
    """
    kind = int(torch.randint(3, (), generator=generator))
    radius = torch.rand((), generator=generator).item()
    if kind == 0:
        image = ImageOps.grayscale(image).convert(image.mode)
    elif kind == 1:
        image = ImageOps.solarize(image, 128)
    else:
        image = image.filter(ImageFilter.GaussianBlur(0.1 + 1.9 * radius))
    enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    order = torch.randperm(3, generator=generator)
    factors = torch.rand(3, generator=generator)
    for i in order.tolist() if jitter else ():
        image = enhancers[i](image).enhance(1 + jitter * (2 * factors[i].item() - 1))
    return image


@checked
def big_vision_augment(
    image: Image.Image,
    generator: torch.Generator,
    layers: PositiveInt = 2,
    magnitude: NonNegative = 15.0,
    grey: Level = 128,
) -> Image.Image:
    """big_vision's `randaug(layers, magnitude)`, of AugReg and SimpleViT (big_vision/pp/autoaugment.py).

    Differences from timm: operations are always applied; the magnitude is constant and may exceed 10; at magnitude 0
    the enhancement factor is 0.1 and solarising is strongest; cutout is included; pixels from outside the image are
    grey; resampling is nearest-neighbour. Contrast is enhanced around (number of pixels / 256) instead of the mean
    level, as in the original code, but a solarising threshold above 255 leaves the image unchanged.

    Args:
        image: mode L or RGB.
        generator: source of all random numbers.
        layers: number of operations, sampled with replacement.
        magnitude: m.
        grey: level of pixels from outside the image, 0 … 255.

    Returns:
        An image of the same size and mode.
    """
    names = tuple(BIG_VISION)
    for _ in range(layers):
        name = names[int(torch.randint(len(names), (), generator=generator))]
        side, y, x = torch.rand(3, generator=generator).tolist()
        options = dict(fillcolor=(grey,) * 3 if image.mode == "RGB" else grey, at=(y, x))
        image = BIG_VISION[name](image, magnitude / 10, -1 if side < 0.5 else 1, options)
    return image


def policy_by_name(name: str) -> Policy | None:
    """The policy of that name: "timm", "three", "randaug(2,m)", or "" for none; raises ValueError for other names."""
    if match := re.fullmatch(r"randaug\(([1-9]\d?),(\d+(?:\.\d+)?)\)", name):
        return partial(big_vision_augment, layers=int(match[1]), magnitude=float(match[2]))
    policies = {"": None, "timm": rand_augment, "three": three_augment}
    if name not in policies:
        raise ValueError(f"policy is {name!r}; use 'timm', 'three', 'randaug(2,15)' or ''")
    return policies[name]


def _enhance(enhancer: type, image: Image.Image, level: float, sign: int, options: dict) -> Image.Image:
    return enhancer(image).enhance(max(0.1, 1 + sign * 0.9 * level))


def _affine(row: int, column: int, image: Image.Image, amount: float, options: dict) -> Image.Image:
    """An affine transform: the identity [1 0 0; 0 1 0] with one entry replaced by `amount`."""
    matrix: list[float] = [1, 0, 0, 0, 1, 0]
    matrix[3 * row + column] = amount
    return image.transform(image.size, Image.Transform.AFFINE, tuple(matrix), **options)


def _shear(axis: int, image: Image.Image, level: float, sign: int, options: dict) -> Image.Image:
    return _affine(axis, 1 - axis, image, sign * 0.3 * level, options)


def _translate(axis: int, image: Image.Image, level: float, sign: int, options: dict) -> Image.Image:
    return _affine(axis, 2, image, sign * 0.45 * level * image.size[axis], options)


def _solarize_add(image: Image.Image, level: float, sign: int, options: dict) -> Image.Image:
    table = [min(255, i + int(level * 110)) if i < 128 else i for i in range(256)]
    return image.point(table * len(image.getbands()))


# Name → function of (image, level in [0, 1], sign, resampling and fill options). Axis 0 is x.
OPERATIONS: dict[str, Callable[[Image.Image, float, int, dict], Image.Image]] = {
    "auto_contrast": lambda image, level, sign, options: ImageOps.autocontrast(image),
    "equalize": lambda image, level, sign, options: ImageOps.equalize(image),
    "invert": lambda image, level, sign, options: ImageOps.invert(image),
    "rotate": lambda image, level, sign, options: image.rotate(sign * 30 * level, **options),
    # newer Pillow raises at 0 bits
    "posterize": lambda image, level, sign, options: ImageOps.posterize(image, max(1, 4 - int(level * 4))),
    "solarize": lambda image, level, sign, options: ImageOps.solarize(image, 256 - min(256, int(level * 256))),
    "solarize_add": _solarize_add,
    "color": partial(_enhance, ImageEnhance.Color),
    "contrast": partial(_enhance, ImageEnhance.Contrast),
    "brightness": partial(_enhance, ImageEnhance.Brightness),
    "sharpness": partial(_enhance, ImageEnhance.Sharpness),
    "shear_x": partial(_shear, 0),
    "shear_y": partial(_shear, 1),
    "translate_x": partial(_translate, 0),
    "translate_y": partial(_translate, 1),
}


def _bv_enhance(enhancer: type, image: Image.Image, level: float, sign: int, options: dict) -> Image.Image:
    return enhancer(image).enhance(0.1 + 1.8 * level)


def _bv_contrast(image: Image.Image, level: float, sign: int, options: dict) -> Image.Image:
    flat = Image.new("L", image.size, int(min(image.size[0] * image.size[1] / 256, 255))).convert(image.mode)
    return Image.blend(flat, image, 0.1 + 1.8 * level)


def _bv_posterize(image: Image.Image, level: float, sign: int, options: dict) -> Image.Image:
    bits = min(int(4 * level), 8)
    return image.point([value >> (8 - bits) << (8 - bits) for value in range(256)] * len(image.getbands()))


def _bv_move(
    row: int, column: int, limit: float, image: Image.Image, level: float, sign: int, options: dict
) -> Image.Image:
    return _affine(row, column, image, sign * limit * level, {"fillcolor": options["fillcolor"]})


def _bv_cutout(image: Image.Image, level: float, sign: int, options: dict) -> Image.Image:
    half, (width, height) = int(40 * level), image.size
    y = int(options["at"][0] * height)
    x = int(options["at"][1] * width)
    image = image.copy()
    image.paste(options["fillcolor"], (max(x - half, 0), max(y - half, 0), min(x + half, width), min(y + half, height)))
    return image


# The same table with big_vision's ranges; level is m / 10.
BIG_VISION = {name: OPERATIONS[name] for name in ("auto_contrast", "equalize", "invert", "solarize_add")} | {
    "rotate": lambda image, level, sign, options: image.rotate(sign * 30 * level, fillcolor=options["fillcolor"]),
    "posterize": _bv_posterize,
    "solarize": lambda image, level, sign, options: ImageOps.solarize(image, int(256 * level)),
    "color": partial(_bv_enhance, ImageEnhance.Color),
    "contrast": _bv_contrast,
    "brightness": partial(_bv_enhance, ImageEnhance.Brightness),
    "sharpness": partial(_bv_enhance, ImageEnhance.Sharpness),
    "shear_x": partial(_bv_move, 0, 1, 0.3),
    "shear_y": partial(_bv_move, 1, 0, 0.3),
    "translate_x": partial(_bv_move, 0, 2, 100.0),
    "translate_y": partial(_bv_move, 1, 2, 100.0),
    "cutout": _bv_cutout,
}
