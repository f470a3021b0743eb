"""Random changes of one picture, in Pillow, between crop and tensor: RandAugment and 3-Augment.

A policy is a function of (picture, generator): `Transform` takes one for its random crops. All
randomness is the generator's, so a picture's seed fixes what it becomes, in whatever worker.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from .ranges import Count, NotNegative, Probability, checked

Policy = Callable[[Image.Image, torch.Generator], Image.Image]
Level = Annotated[int, "[0, 255]"]


@checked
def rand_augment(
    picture: Image.Image,
    generator: torch.Generator,
    layers: Count = 2,
    magnitude: Annotated[float, "[0, 10]"] = 9.0,
    std: NotNegative = 0.5,
    probability: Probability = 0.5,
    fill: tuple[Level, ...] = (124, 116, 104),
) -> Image.Image:
    """RandAugment: a few operations, drawn evenly, all of one strength (Cubuk et al., arXiv:1909.13719, section 3).

    The defaults are timm's `rand-m9-mstd0.5-inc1`, the policy of DeiT and MAE (timm/data/auto_augment.py,
    `_RAND_INCREASING_TRANSFORMS`): every operation grows stronger with the magnitude. Cutout is not among them: random
    erasing is its own step. big_vision's `randaug(2, m)` has other ranges and always applies.

    Args:
        picture: mode L or RGB.
        generator: all randomness.
        layers: operations in a row, drawn with replacement.
        magnitude: 0 … 10.
        std: deviation of the magnitude from operation to operation; clipped to 0 … 10.
        probability: of each operation.
        fill: colour of what comes from outside, per channel, 0 … 255; ImageNet's mean.

    Returns:
        A picture of the same size and mode.
    """
    names = tuple(OPERATIONS)
    for _ in range(layers):
        name = names[int(torch.randint(len(names), (), generator=generator))]
        chance, side, kernel = torch.rand(3, generator=generator).tolist()
        level = magnitude + std * torch.randn((), generator=generator).item()
        if chance < probability:
            resample = Image.Resampling.BILINEAR if kernel < 0.5 else Image.Resampling.BICUBIC
            moved = dict(resample=resample, fillcolor=fill if picture.mode == "RGB" else fill[0])
            picture = OPERATIONS[name](picture, min(max(level / 10, 0.0), 1.0), -1 if side < 0.5 else 1, moved)
    return picture


@checked
def three_augment(picture: Image.Image, generator: torch.Generator, jitter: Probability = 0.3) -> Image.Image:
    """3-Augment: one of grey, solarised and blurred, then colour jitter (DeiT III, arXiv:2204.07118, section 3.3).

    As in facebookresearch/deit, augment.py: solarised at 128, blur radius 0.1 to 2 pixels, brightness, contrast and
    saturation each times a factor in 1 ± jitter, in random order (torchvision's ColorJitter).

    Args:
        picture: mode L or RGB.
        generator: all randomness.
        jitter: 0 leaves the colours.

    Returns:
        A picture of the same size and mode.
    """
    kind, radius = int(torch.randint(3, (), generator=generator)), torch.rand((), generator=generator).item()
    if kind == 0:
        picture = ImageOps.grayscale(picture).convert(picture.mode)
    elif kind == 1:
        picture = ImageOps.solarize(picture, 128)
    else:
        picture = picture.filter(ImageFilter.GaussianBlur(0.1 + 1.9 * radius))
    enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    order, factors = torch.randperm(3, generator=generator), torch.rand(3, generator=generator)
    for i in order.tolist() if jitter else ():
        picture = enhancers[i](picture).enhance(1 + jitter * (2 * factors[i].item() - 1))
    return picture


@checked
def big_vision_augment(
    picture: Image.Image,
    generator: torch.Generator,
    layers: Count = 2,
    magnitude: NotNegative = 15.0,
    grey: Level = 128,
) -> Image.Image:
    """big_vision's `randaug(layers, magnitude)`, of AugReg and SimpleViT (big_vision/pp/autoaugment.py).

    Other than timm's: operations always apply, the magnitude is the same each time and may exceed 10, a small one
    weakens enhancements to 0.1 and solarises most, and cutout is among them. What comes from outside is
    grey. It enhances contrast around the number of pixels / 256, not around the mean level; that is repeated here, but
    a solarising threshold above 255 leaves the picture. Pixels that move are the nearest ones.

    Args:
        picture: mode L or RGB.
        generator: all randomness.
        layers: operations in a row, drawn with replacement.
        magnitude: m.
        grey: fills what comes from outside, 0 … 255.

    Returns:
        A picture of the same size and mode.
    """
    names = tuple(BIG_VISION)
    for _ in range(layers):
        name = names[int(torch.randint(len(names), (), generator=generator))]
        side, y, x = torch.rand(3, generator=generator).tolist()
        moved = dict(fillcolor=(grey,) * 3 if picture.mode == "RGB" else grey, at=(y, x))
        picture = BIG_VISION[name](picture, magnitude / 10, -1 if side < 0.5 else 1, moved)
    return picture


def policy_of(name: str) -> Policy | None:
    """The policy that a recipe names: "timm", "three", "randaug(2,m)" or "" for none. Refuses others."""
    if found := re.fullmatch(r"randaug\(([1-9]\d?),(\d+(?:\.\d+)?)\)", name):
        return partial(big_vision_augment, layers=int(found[1]), magnitude=float(found[2]))
    policies = {"": None, "timm": rand_augment, "three": three_augment}
    if name not in policies:
        raise ValueError(f"policy is {name!r}; use 'timm', 'three', 'randaug(2,15)' or ''")
    return policies[name]


def _enhance(enhancer: type, picture: Image.Image, level: float, sign: int, moved: dict) -> Image.Image:
    return enhancer(picture).enhance(max(0.1, 1 + sign * 0.9 * level))


def _affine(row: int, column: int, picture: Image.Image, amount: float, moved: dict) -> Image.Image:
    """The identity [1 0 0; 0 1 0] with one entry in its place."""
    matrix = [1, 0, 0, 0, 1, 0]
    matrix[3 * row + column] = amount
    return picture.transform(picture.size, Image.Transform.AFFINE, tuple(matrix), **moved)


def _shear(axis: int, picture: Image.Image, level: float, sign: int, moved: dict) -> Image.Image:
    return _affine(axis, 1 - axis, picture, sign * 0.3 * level, moved)


def _translate(axis: int, picture: Image.Image, level: float, sign: int, moved: dict) -> Image.Image:
    return _affine(axis, 2, picture, sign * 0.45 * level * picture.size[axis], moved)


def _posterize(picture: Image.Image, level: float, sign: int, moved: dict) -> Image.Image:
    return ImageOps.posterize(picture, max(1, 4 - int(level * 4)))  # newer Pillow refuses to keep 0 bits


def _solarize_add(picture: Image.Image, level: float, sign: int, moved: dict) -> Image.Image:
    table = [min(255, i + int(level * 110)) if i < 128 else i for i in range(256)]
    return picture.point(table * len(picture.getbands()))


# Name → function of (picture, level in [0, 1], sign, how moved pixels are sampled and filled). Axis 0 is x.
OPERATIONS: dict[str, Callable[[Image.Image, float, int, dict], Image.Image]] = {
    "auto_contrast": lambda picture, level, sign, moved: ImageOps.autocontrast(picture),
    "equalize": lambda picture, level, sign, moved: ImageOps.equalize(picture),
    "invert": lambda picture, level, sign, moved: ImageOps.invert(picture),
    "rotate": lambda picture, level, sign, moved: picture.rotate(sign * 30 * level, **moved),
    "posterize": _posterize,
    "solarize": lambda picture, level, sign, moved: ImageOps.solarize(picture, 256 - min(256, int(level * 256))),
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


def _bv_enhance(enhancer: type, picture: Image.Image, level: float, sign: int, moved: dict) -> Image.Image:
    return enhancer(picture).enhance(0.1 + 1.8 * level)


def _bv_contrast(picture: Image.Image, level: float, sign: int, moved: dict) -> Image.Image:
    flat = Image.new("L", picture.size, int(min(picture.size[0] * picture.size[1] / 256, 255))).convert(picture.mode)
    return Image.blend(flat, picture, 0.1 + 1.8 * level)


def _bv_posterize(picture: Image.Image, level: float, sign: int, moved: dict) -> Image.Image:
    bits = min(int(4 * level), 8)
    return picture.point([value >> (8 - bits) << (8 - bits) for value in range(256)] * len(picture.getbands()))


def _bv_solarize(picture: Image.Image, level: float, sign: int, moved: dict) -> Image.Image:
    return ImageOps.solarize(picture, int(256 * level))


def _bv_move(
    row: int, column: int, limit: float, picture: Image.Image, level: float, sign: int, moved: dict
) -> Image.Image:
    return _affine(row, column, picture, sign * limit * level, {"fillcolor": moved["fillcolor"]})


def _bv_cutout(picture: Image.Image, level: float, sign: int, moved: dict) -> Image.Image:
    half, (width, height) = int(40 * level), picture.size
    y, x = int(moved["at"][0] * height), int(moved["at"][1] * width)
    picture = picture.copy()
    picture.paste(moved["fillcolor"], (max(x - half, 0), max(y - half, 0), min(x + half, width), min(y + half, height)))
    return picture


# The same, with big_vision's ranges: level is m / 10.
BIG_VISION = {name: OPERATIONS[name] for name in ("auto_contrast", "equalize", "invert", "solarize_add")} | {
    "rotate": lambda picture, level, sign, moved: picture.rotate(sign * 30 * level, fillcolor=moved["fillcolor"]),
    "posterize": _bv_posterize,
    "solarize": _bv_solarize,
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
