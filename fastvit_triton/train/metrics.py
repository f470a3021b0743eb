"""Precision, recall and F1 by class, from the class numbers that a classifier predicted."""

from typing import NamedTuple

import torch
from torch import Tensor

from .ranges import PositiveInt, checked


class ClassScore(NamedTuple):
    """Scores of one class. A quotient whose denominator is 0 is None."""

    images: int  # test images of the class
    correct: int  # those of them that were predicted as it
    precision: float | None  # correct ÷ images that were predicted as the class; None if there are none
    recall: float | None  # correct ÷ images of the class; None if there are none
    f1: float | None  # 2 · correct ÷ (images of the class + images predicted as it), the harmonic mean of both


@checked
def confusion_matrix(targets: Tensor, predictions: Tensor, classes: PositiveInt) -> Tensor:
    """Counts of images, int64 [K, K]: a row for each true class, a column for each predicted."""
    return torch.bincount(targets * classes + predictions, minlength=classes**2).view(classes, classes)


@checked
def class_scores(targets: Tensor, predictions: Tensor, classes: PositiveInt) -> list[ClassScore]:
    """The scores of each class; arguments as for `confusion_matrix`, which is not made."""
    members = targets, targets[targets == predictions], predictions
    columns = [torch.bincount(numbers, minlength=classes).tolist() for numbers in members]
    scores = []
    for images, correct, predicted in zip(*columns, strict=True):
        denominators = predicted, images, (images + predicted) / 2
        quotients = [correct / count if count else None for count in denominators]
        scores.append(ClassScore(images, correct, *quotients))
    return scores


def macro_f1(scores: list[ClassScore]) -> float:
    """The mean F1 of all classes that have test images or were predicted; ValueError if there are none."""
    values = [score.f1 for score in scores if score.f1 is not None]
    if not values:
        raise ValueError("there are no test images")
    return sum(values) / len(values)
