"""Checkpoints of our models: loads and saves them, and says which model one holds."""

from .create import create_model
from .load import load_model, load_weights, save_weights
from .pretrained import list_models

__all__ = ["create_model", "list_models", "load_model", "load_weights", "save_weights"]
