"""Object references, `module:attribute`, as in entry points: a user's own optimiser or transform by name."""

import importlib
import os
import sys
import traceback
from typing import Any

# what the code of a module raises when it is imported
FAILURES: tuple[type[Exception], ...] = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError)
FAILURES += (NameError, OSError, RuntimeError, SyntaxError, TypeError, ValueError)


def resolve(option: str, reference: str) -> Any:
    """The object that a reference names; modules in the working directory are found too."""
    module_name, _, attribute = reference.partition(":")
    if not attribute or not all(part.isidentifier() for part in [*module_name.split("."), *attribute.split(".")]):
        raise ValueError(f"{option} is {reference!r}; use module:attribute, such as my_module:my_function")
    if (folder := os.getcwd()) not in sys.path:  # as `python -m` does
        sys.path.append(folder)
    try:
        target = importlib.import_module(module_name)
    except FAILURES as error:
        why = str(error).partition("\n")[0]
        if not isinstance(error, (ImportError, SyntaxError)):  # which say where
            place = traceback.extract_tb(error.__traceback__)[-1]
            why = f"{type(error).__name__}: {why} ({os.path.basename(place.filename)}, line {place.lineno})"
        raise ValueError(f"{option} is {reference}, and {module_name} cannot be imported: {why}") from error
    for name in attribute.split("."):
        if not hasattr(target, name):
            raise ValueError(f"{option} is {reference}, but {module_name} has no attribute {attribute}")
        target = getattr(target, name)
    return target
