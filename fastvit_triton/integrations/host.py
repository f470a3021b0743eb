"""The package that an integration works in: imported when the integration is, in a version that it knows."""

import importlib
import re
from typing import Any


def need(name: str, least: str, package: str | None = None) -> Any:
    """Imports the host of an integration.

    Args:
        name: the module to import.
        least: the oldest version whose interface the integration uses.
        package: its name for pip, if it has another.

    Raises:
        ImportError: it is not installed, or older.
    """
    package = package or name
    works = f"this integration works with {package} {least} and newer"
    try:
        host = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != name.split(".")[0]:  # something that the host itself needs
            raise
        raise ImportError(f"{package} is not installed; {works}") from error
    seen = str(getattr(host, "__version__", "unknown"))
    if (numbers := _numbers(seen)) and numbers < _numbers(least):
        raise ImportError(f"{package} is of version {seen}; {works}")
    return host


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version; empty if there are none."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(n) for n in match[0].split(".")) if match else ()
