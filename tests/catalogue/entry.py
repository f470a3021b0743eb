"""The record of a model of another package, and inputs and random weights of such models."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Sizes = Sequence[tuple[int, int]]
Given = Any  # one tensor, nested lists of tensors, or named inputs
SIDE = 32  # of images, where an entry does not say otherwise


def images(*sides: int) -> Callable[[torch.dtype, Sizes], Tensor]:
    """Inputs of a model that takes two images of this height and width, or as many as there are other sizes."""
    return lambda dtype, sizes=(): torch.randn(len(sizes) or 2, 3, *sides, dtype=dtype)


class Entry(NamedTuple):
    """A small model of another package. Its oracle is the same model before `optimize`.

    Attributes:
        make: () → the model with weights of its package.
        fused: number of rows of the report that are fused.
        inputs: (dtype, sizes) → inputs for `catalogue.outputs`; sizes are rows and columns of patches of packed images.
        left: classes that keep their own forward.
        own: converted classes whose own forward runs, for these inputs.
        rounded: the original rounds some values to float32, whatever its dtype, but not in the context `unrounded`.
        single: its softmax is in float32, whatever its dtype.
        batched: it has statistics of few rows, which amplify roundings in training.
        hooked: ends of paths of submodules on which hooks are tested.
    """

    make: Callable[[], nn.Module]
    fused: int
    inputs: Callable[..., Given] = images(SIDE, SIDE)
    left: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    rounded: bool = False
    single: bool = False
    batched: bool = False
    hooked: tuple[str, ...] = ()


def redraw(model: nn.Module) -> nn.Module:
    """Sets every parameter to random values, so that no zero or one hides an error; returns the model."""
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            spread = 0.3 if parameter.dim() in (0, 1, 3) else parameter[0].numel() ** -0.5
            norm = key.endswith("weight") and parameter.dim() == 1
            parameter.normal_(1.0 if norm else 0.0, spread)
    return model
