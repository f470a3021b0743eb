"""Support for third-party models: fused forwards for their modules, and a torch.compile backend for their graphs."""

import importlib
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

# Imported on first use: the backend imports Dynamo, and `modules` imports every family.
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


# torch.compile finds the backend of an installed package by its entry point; in a source tree it is registered here.
if not entry_points(group="torch_dynamo_backends", name="fastvit_triton"):
    importlib.import_module(".backend", __name__)
