"""Vision Transformers on fused Triton kernels: drop-in, differentiable, and plain PyTorch wherever there is no GPU.

Axes, the same letters everywhere:
    B   images in a batch               C   image channels
    N   tokens (Nq queries, Nk keys)    P   patch side, pixels
    D   channels of a token, or of a head where H stands beside it (Dv: of a value)
    H   attention heads                 F   hidden channels of an MLP
    G   groups of an attention bias     M   rows, B·N

Apple's FastViT is another architecture, and no model here carries that name.
"""

import ast
import importlib
import sys
from pathlib import Path

__version__ = "0.1.0"


def _declared() -> dict[str, str]:
    """Public name → the module that has it, as `__init__.pyi` imports them for type checkers."""
    tree = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: f".{node.module or ''}" for node in found for alias in node.names}


_PUBLIC = _declared()
__all__ = sorted(["__version__", *_PUBLIC])


def __getattr__(name: str) -> object:
    """Loads a public name on first use: importing the package costs nothing and needs no Triton."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    where = _PUBLIC[name]
    value = importlib.import_module(f".{name}" if where == "." else where, __name__)
    value = value if where == "." else getattr(value, name)
    setattr(sys.modules[__name__], name, value)
    return value


def __dir__() -> list[str]:
    return __all__
