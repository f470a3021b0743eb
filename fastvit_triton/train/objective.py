"""Training objectives: (model, images, targets) → (loss, logits or None).

The loss is a mean over images. The same loop trains classification, distillation and self-supervised objectives.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .masked import colour_loss, mean_colours, pixel_loss
from .ranges import PositiveInt, checked

Objective = Callable[[nn.Module, Tensor, Any], tuple[Tensor, Tensor | None]]


def supervised(loss: Callable[[Tensor, Tensor], Tensor]) -> Objective:
    """Classification objective.

    Args:
        loss: function of logits [B, classes], in float32 or float64, and targets [B] or [B, classes]; returns a scalar.
    """

    def objective(model: nn.Module, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = at_least_float32(model(images))
        return loss(logits, targets), logits

    return objective


def distilled(teacher: nn.Module, loss: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Objective:
    """Distillation: the teacher gets the same images as the student, after mixing (DeiT, arXiv:2012.12877, section 3).

    The objective raises ValueError if the student returns only one set of logits.

    Args:
        teacher: from images to logits [B, classes], in evaluation mode and on the student's device.
        loss: `hard_distillation` or `soft_distillation`, of (class-token logits, distillation-token logits, teacher's
            logits, targets). The student returns the first two as a pair: `model.set_distilled_training()`.
    """

    def objective(model: nn.Module, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            teacher_logits = at_least_float32(teacher(images))
        outputs = model(images)
        if not isinstance(outputs, tuple):
            raise ValueError("the student returns one set of logits; distillation needs a deit_*_distilled_* model")
        logits, distillation_logits = map(at_least_float32, outputs)
        return loss(logits, distillation_logits, teacher_logits, targets), (logits + distillation_logits) / 2

    return objective


@checked
def masked_pixels(patch_size: tuple[PositiveInt, PositiveInt], norm: bool = True) -> Objective:
    """`pixel_loss` of a `MaskedAutoencoder`; targets are ignored.

    Args:
        patch_size: (height, width).
        norm: normalise the pixels of each target patch.
    """

    def objective(model: nn.Module, images: Tensor, targets: Tensor) -> tuple[Tensor, None]:
        predicted, hidden = model(images)
        return pixel_loss(at_least_float32(predicted), images, hidden, patch_size, norm), None

    return objective


@checked
def masked_colours(
    patch_size: tuple[PositiveInt, PositiveInt], restore: Callable[[Tensor], Tensor], bits: PositiveInt = 3
) -> Objective:
    """`colour_loss` of a `MaskedPatchPrediction`; targets are ignored.

    Args:
        patch_size: (height, width).
        restore: function from normalised images to pixels in [0, 1], such as `Transform.restore`.
        bits: bits per channel; the model predicts 2^(bits · C) classes.
    """

    def objective(model: nn.Module, images: Tensor, targets: Tensor) -> tuple[Tensor, None]:
        logits, corrupted = model(images)
        colours = mean_colours(restore(images), patch_size, bits)
        return colour_loss(at_least_float32(logits), colours, corrupted), None

    return objective


def mean_of_images(model: nn.Module, images: Tensor, targets: Tensor) -> tuple[Tensor, None]:
    """Objective of a module that returns the loss of each image, [B]; see generative.py."""
    return model(images, targets).mean(), None


def at_least_float32(logits: Tensor) -> Tensor:
    """Converts float16 and bfloat16 to float32; other dtypes are returned unchanged."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
