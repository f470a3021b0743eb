"""Other people's models: `optimize` and `revert` in place, and a backend for torch.compile.

A model goes in; its modules get fused forwards, and a `Report` says what each became or why not. `conversion.optimize`
goes through the modules: for a type that one of `readers` has registered in `forwards`, `bind` sets the instance's
forward, which repeats a recorded call (`engine.replay`), or asks `third_party.is_fusable` and runs fused or as written.
Blocks that no reader knows are captured from an example (`capture`, `captured`) and rewritten by the patterns of
`graph`, as the backend's graphs are.

Begin with `conversion`; then `forwards` and `readers`, or `backend` and `graph`.
"""

import importlib
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

# Imported on first use: the backend imports Dynamo, and `conversion` imports every family.
_PUBLIC = {
    "optimize": "conversion",
    "revert": "conversion",
    "report": "backend",
    "Report": "reporting",
    "Row": "reporting",
}

__all__ = ["Report", "Row", "optimize", "report", "revert"]

if TYPE_CHECKING:
    from .backend import report
    from .conversion import optimize, revert
    from .reporting import Report, Row


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)


# torch.compile finds the backend of an installed package by its entry point; in a source tree it is registered here.
if not entry_points(group="torch_dynamo_backends", name="fastvit_triton"):
    importlib.import_module(".backend", __name__)
