"""Checkpoints as bytes, locations, names and tensors; which model they are of is known to `models` only.

A path or a name of the Hub goes in; checked tensors come out, under the names of a model's parameters.

Begin with `reading`, then `renaming`, which has the layouts in which others name the same tensors.
"""

from .renaming import CheckpointFormats, Layout
from .tensors import State, WeightsError

__all__ = ["CheckpointFormats", "Layout", "State", "WeightsError"]
