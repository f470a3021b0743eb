"""Vision Transformers on fused Triton kernels: drop-in, differentiable, and plain PyTorch without a GPU.

Letters for axes:
    B   images in a batch               C   image channels
    N   tokens (Nq queries, Nk keys)    P   patch side, pixels
    D   channels of a token, or of a head if next to H (Dv: of a value)
    H   attention heads                 F   hidden channels of an MLP
    G   groups of an attention bias     M   rows, B·N

Not related to Apple's FastViT, which is another architecture.
"""

import ast
import importlib
import sys
from pathlib import Path

__version__ = "0.2.0.dev0"


def _declared() -> dict[str, str]:
    """Maps public names to their modules, as declared in `__init__.pyi`."""
    tree = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: f".{node.module or ''}" for node in imports for alias in node.names}


_PUBLIC = _declared()
__all__ = sorted(["__version__", *_PUBLIC])


def __getattr__(name: str) -> object:
    """Imports a public name on first use, so that importing the package is fast and needs no Triton."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    where = _PUBLIC[name]
    value = importlib.import_module(f".{name}" if where == "." else where, __name__)
    value = value if where == "." else getattr(value, name)
    setattr(sys.modules[__name__], name, value)
    return value


def __dir__() -> list[str]:
    return __all__
