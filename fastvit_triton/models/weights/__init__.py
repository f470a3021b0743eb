"""Checkpoints of our models: loads and saves them, and says which model one holds.

`load` renames and copies the tensors of a checkpoint, by the tables of `models.plain` and of each family.
"""

from .create import create_model
from .load import load_model, load_weights, save_weights
from .pretrained import list_models

__all__ = ["create_model", "list_models", "load_model", "load_weights", "save_weights"]
