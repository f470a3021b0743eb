"""Models that are not ours: fused forwards for their modules, and a compile backend for their graphs."""

import importlib
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

# Loaded on first use: the backend brings all of Dynamo, and `modules` reads every family.
_PUBLIC = {"optimize": "modules", "revert": "modules", "report": "backend", "Report": "reporting", "Row": "reporting"}

__all__ = ["Report", "Row", "optimize", "report", "revert"]

if TYPE_CHECKING:
    from .backend import report
    from .modules import optimize, revert
    from .reporting import Report, Row


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)


# torch.compile finds an installed package by its entry point; in a source tree the backend registers itself, here.
if not entry_points(group="torch_dynamo_backends", name="fastvit_triton"):
    importlib.import_module(".backend", __name__)
