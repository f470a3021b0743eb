"""Weights of classes in the loss, for data whose classes differ in size."""

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from .data.transform import join_names
from .ranges import Positive, check

BALANCED = "balanced"


def read_class_weights(option: str, text: str) -> str | dict[str, float]:
    """ "balanced", or the weights in a JSON file of class names and numbers above 0."""
    if text == BALANCED:
        return text
    try:
        weights = json.loads(Path(text).read_text(encoding="utf-8"))
        check_class_weights("its content", weights)
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)[:200]
        use = f"use {BALANCED!r}, or a JSON file of class names and weights"
        raise ValueError(f"{option} is {text}, which cannot be read: {why}; {use}") from error
    return dict(weights)


def check_class_weights(name: str, value: object) -> None:
    """Raises ValueError unless the value is None, "balanced", or a dictionary of class names and numbers above 0."""
    if value is None or value == BALANCED:
        return
    check(name, value, Annotated[dict | None, "equal weights"])
    assert isinstance(value, dict)
    for label, weight in value.items():
        check(f"{name}: the weight of {label!r}", weight, Positive)


def class_weights(chosen: str | Mapping[str, float], classes: Sequence[str], targets: Sequence[int]) -> Tensor:
    """Weights of the classes in the loss, float32 [K], whose mean over the training images is 1.

        balanced    w_k = N / (K n_k)
        given g_k   w_k = g_k N / Σ_j n_j g_j

    The learning rate thus keeps its meaning. scikit-learn's `class_weight="balanced"` is the same where every class has
    images.
    """
    counts = torch.bincount(torch.as_tensor(targets), minlength=len(classes)).double()
    if isinstance(chosen, str):
        weights = 1 / counts.clamp(min=1)
    else:
        if unknown := [name for name in chosen if name not in classes]:
            near = difflib.get_close_matches(unknown[0], classes, n=3, cutoff=0.0)
            raise ValueError(f"class_weights names {join_names(unknown)}; the nearest classes are {', '.join(near)}")
        weights = torch.tensor([chosen.get(name, 1.0) for name in classes], dtype=torch.float64)
    return (weights * counts.sum() / (weights * counts).sum()).float()
