"""A user's own transform of training images, by name."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..object_reference import resolve
from .folder import ImageFiles
from .transform import DECODE_ERRORS, Transform

FAILURES = (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)


class CustomTransform:
    """A callable that replaces the random crop, mirroring and policy of training images.

    It is called with an image as Pillow decodes it, in mode RGB, or L for models with one channel, and returns an image
    of the model's size: Pillow's, or a tensor [C, H, W] of integers up to 255 or numbers in [0, 1]. Normalisation by
    mean and std follows, so it must not normalise. Test images are preprocessed as without it.
    """

    def __init__(self, name: str) -> None:
        target = resolve("transform", name)
        if not callable(target):
            kind = type(target).__name__
            raise ValueError(f"transform is {name}, of type {kind}, which cannot be called; use a function")
        try:
            self.function: Callable[[Image.Image], Any] = target() if isinstance(target, type) else target
        except TypeError as error:
            raise ValueError(f"transform {name} needs arguments ({error}); name an instance or a function") from error
        self.name = name

    def __reduce__(self) -> tuple[type["CustomTransform"], tuple[str]]:
        return CustomTransform, (self.name,)

    def __call__(self, image: Image.Image, seed: int, transform: Transform) -> Tensor:
        """The model's input [C, H, W]."""
        with _seeded(seed):
            output = self.function(image.convert("L" if len(transform.mean) == 1 else "RGB"))
        if isinstance(output, Image.Image):
            _check_size((output.height, output.width), transform.size)
            return transform.tensor(output)
        if not isinstance(output, Tensor):
            raise ValueError(f"it returns {type(output).__name__}; return an image or a tensor")
        pixels = output.as_subclass(Tensor)
        if not pixels.is_floating_point():
            pixels = pixels.float() / 255
        _check_size(tuple(pixels.shape), (len(transform.mean), *transform.size))
        low = pixels.min().item()
        high = pixels.max().item()
        if not (-0.01 <= low and high <= 1.01):  # interpolation may exceed the range a little
            text = "return numbers in [0, 1], without normalisation, which follows"
            raise ValueError(f"it returns numbers from {low:.3g} to {high:.3g}; {text}")
        return transform.normalise(pixels.float())

    def check(self, images: ImageFiles, transform: Transform) -> None:
        """Applies it to the first image that can be decoded; raises ValueError if that fails."""
        for path in images.files:
            try:
                image = images.decode(path)
                image.load()
            except DECODE_ERRORS:
                continue
            try:
                self(image, 0, transform)
            except FAILURES as error:
                text = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
                raise ValueError(f"transform {self.name} fails on {path}: {text}") from error
            return


def _check_size(size: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if size != wanted:
        shown, needed = ("x".join(map(str, sides)) for sides in (size, wanted))
        raise ValueError(f"it returns an image of {shown}; the model needs {needed}")


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seeds the generators that transforms use, and restores their states, so that workers change no result."""
    states = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
