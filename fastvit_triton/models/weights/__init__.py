"""Checkpoints of our models: loads and saves them, and says which model one holds."""

import importlib
from typing import TYPE_CHECKING

# Imported on first use: the modules import the models, whose methods import `publish`.
_PUBLIC = {"load_model": "load", "load_weights": "load", "save_weights": "load"}
_PUBLIC |= {"create_model": "create", "list_models": "pretrained"}

__all__ = ["create_model", "list_models", "load_model", "load_weights", "save_weights"]

if TYPE_CHECKING:
    from .create import create_model
    from .load import load_model, load_weights, save_weights
    from .pretrained import list_models


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
