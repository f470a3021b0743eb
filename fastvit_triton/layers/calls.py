"""Whether calling a module runs what its class defines, so that its weights may be read instead.

Three things change a call without changing a weight: hooks of the module, hooks of all modules (profilers and counters
use those), and another `forward`, put on the instance or on the class.
"""

from collections.abc import Callable

from torch import nn
from torch.nn.modules.module import _has_any_global_hook as all_watched  # the hooks of every module

__all__ = ["all_watched", "patched"]

_known: dict[type, Callable] = {}  # class → the forward that it was defined with, as last found


def patched(cls: type[nn.Module]) -> bool:
    """The class's forward is another one than it was defined with; a lookup, unless it changed since the last call."""
    return _known.get(cls) is not cls.forward and not _defined(cls)


patched._dynamo_marked_constant = True  # torch.compiler.assume_constant_result, which would import all of Dynamo


def _defined(cls: type[nn.Module]) -> bool:
    """The forward found is the one written in the body of the class that holds it, decorators of its package included.

    A copied name proves nothing (functools.wraps copies names): a function's globals are those of the module that
    it was written in, and cannot be changed. Decorators of torch itself wrap anything, so they count as a patch.
    """
    owner = next(base for base in cls.__mro__ if "forward" in base.__dict__)
    forward, package = owner.__dict__["forward"], owner.__module__.partition(".")[0]
    while hasattr(forward, "__wrapped__"):
        if package == "torch" or _home(forward).partition(".")[0] != package:
            return False
        forward = forward.__wrapped__
    defined = _home(forward) == owner.__module__ and forward.__qualname__ == f"{owner.__qualname__}.forward"
    if defined:
        _known[cls] = cls.forward
    return defined


def _home(function: Callable) -> str:
    """The module that a Python function was written in; "" for other callables."""
    return getattr(function, "__globals__", {}).get("__name__", "")
