"""Checkpoints as bytes, places, names and tensors; which model they are of is known to `models` only."""

from .layout import Layout, Spelling
from .tensors import State, WeightsError

__all__ = ["Layout", "Spelling", "State", "WeightsError"]
