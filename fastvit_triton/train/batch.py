"""Batches whose targets are tensors [B, …] or, for detectors, a list of B dicts: moved, divided, and completed."""

from typing import Any

import torch
from torch import Tensor


def to_device(values: Any, device: torch.device) -> Any:
    """The same with each tensor on the device; lists and dicts are followed, and other values stay."""
    if isinstance(values, Tensor):
        return values.to(device, non_blocking=True)
    if isinstance(values, dict):
        return {name: to_device(value, device) for name, value in values.items()}
    return [to_device(value, device) for value in values] if isinstance(values, list) else values


def divide(values: Any, count: int) -> list[Any]:
    """Divides a tensor along its first axis, or a list, into `count` parts whose sizes differ by at most one."""
    if isinstance(values, Tensor):
        return list(values.tensor_split(count))
    parts = torch.arange(len(values)).tensor_split(count)
    return [[values[i] for i in part.tolist()] for part in parts]


def blank_target(targets: Any) -> Any:
    """The target of one dummy image, for a rank without images: class 0, or no objects."""
    if isinstance(targets, Tensor):
        return targets.new_zeros(1, *targets.shape[1:])
    return [dict(labels=torch.zeros(0, dtype=torch.long), boxes=torch.zeros(0, 4))]
