"""What is made small: from a model and a batch to a loss, and to logits where there are any.

An objective is a function (model, images, targets) → (loss, logits or None); the loss is a mean over images. So one
loop serves classification, distillation and learning from pictures alone.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .masked import colour_loss, mean_colours, pixel_loss
from .ranges import Count, checked

Objective = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def supervised(loss: Callable[[Tensor, Tensor], Tensor]) -> Objective:
    """Classification: a loss of logits [B, classes], in float32 at least, and targets."""

    def objective(model: nn.Module, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = full(model(images))
        return loss(logits, targets), logits

    return objective


def distilled(teacher: nn.Module, loss: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Objective:
    """Learning from a teacher, who sees the same, already blended, images (DeiT, arXiv:2012.12877, section 3).

    Args:
        teacher: any module from images to logits [B, classes], in evaluation mode and on the student's device.
        loss: `hard_distillation` or `soft_distillation`, of (class logits, distillation logits, teacher's logits,
            targets). The student returns the first two as a pair: `model.set_distilled_training()`.
    """

    def objective(model: nn.Module, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            judgement = full(teacher(images))
        answers = model(images)
        if not isinstance(answers, tuple):
            raise ValueError("the student gives one set of logits; distillation needs a deit_*_distilled_* model")
        student, pupil = map(full, answers)
        return loss(student, pupil, judgement, targets), (student + pupil) / 2

    return objective


@checked
def masked_pixels(patch_size: tuple[Count, Count], norm: bool = True) -> Objective:
    """What `MaskedAutoencoder` learns by: `pixel_loss`; targets are not read."""

    def objective(model: nn.Module, images: Tensor, targets: Tensor) -> tuple[Tensor, None]:
        predicted, hidden = model(images)
        return pixel_loss(full(predicted), images, hidden, patch_size, norm), None

    return objective


@checked
def masked_colours(patch_size: tuple[Count, Count], restore: Callable[[Tensor], Tensor], bits: Count = 3) -> Objective:
    """What `MaskedPatchPrediction` learns by: `colour_loss`; targets are not read.

    Args:
        patch_size: (height, width).
        restore: from normalised images to pixels in [0, 1], such as `Transform.restore`.
        bits: per channel; the model has 2^(bits · C) classes.
    """

    def objective(model: nn.Module, images: Tensor, targets: Tensor) -> tuple[Tensor, None]:
        logits, corrupted = model(images)
        return colour_loss(full(logits), mean_colours(restore(images), patch_size, bits), corrupted), None

    return objective


def full(logits: Tensor) -> Tensor:
    """Half-precision numbers in float32; others as they are."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
