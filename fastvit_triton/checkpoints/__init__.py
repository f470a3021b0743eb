"""Checkpoints as bytes, locations, names and tensors; which model they are of is known to `models` only."""

from .renaming import CheckpointFormats, Layout
from .tensors import State, WeightsError

__all__ = ["CheckpointFormats", "Layout", "State", "WeightsError"]
