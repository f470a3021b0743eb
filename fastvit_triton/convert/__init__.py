"""Models that are not ours: fused forwards for their modules, and a compile backend for their graphs."""

import importlib
from typing import TYPE_CHECKING

# Loaded on first use: the backend's log needs this package to be cheap to import, and `modules` reads every family.
_PUBLIC = {"optimize": "modules", "revert": "modules", "Report": "report", "Row": "report"}

__all__ = ["Report", "Row", "optimize", "revert"]

if TYPE_CHECKING:
    from .modules import optimize, revert
    from .report import Report, Row


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
