"""What the commands show: one-line messages, and progress."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import Progress, ProgressColumn, track

from ..files import printable

Item = TypeVar("Item")
PACKAGE = Path(__file__).parents[1]
IN_COMMANDS = {  # what errors of the package name in Python → the same as a command
    "list_models(pretrained=True)": "`fastvit-triton models --pretrained`",
    "list_models()": "`fastvit-triton models`",
}


def progress(*columns: ProgressColumn, quiet: bool = False) -> Progress:
    """A context with a progress bar on a terminal, on stderr."""
    console = Console(stderr=True, quiet=quiet)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def tracked(items: Iterable[Item], total: int, label: str) -> Iterator[Item]:
    """Yields the items; shows a progress bar on a terminal, on stderr."""
    console = Console(stderr=True)
    yield from track(items, label, total, console=console, transient=True, disable=not console.is_terminal)


def print_line(text: str) -> None:
    """Prints text on stdout without wrapping, colours or markup."""
    Console(soft_wrap=True).print(printable(text), markup=False, highlight=False)


def print_error(text: str, code: int) -> int:
    """Prints one line on stderr and returns the exit code."""
    for python, command in IN_COMMANDS.items():
        text = text.replace(python, command)
    _print_on_stderr(f"fastvit-triton: {'' if code > 128 else 'error: '}{text}")  # no error: a signal
    return code


def print_skipped(text: str) -> None:
    """Prints one line on stderr about an input that is left out, while the command goes on with the others."""
    _print_on_stderr(f"fastvit-triton: skipped: {text}")


def print_warning(text: str) -> None:
    """Prints one line on stderr, for what does not change the exit code."""
    _print_on_stderr(f"fastvit-triton: warning: {text}")


@contextmanager
def short_warnings() -> Iterator[None]:
    """Context in which warnings of this package are printed as one line, without their place in its source."""
    show: Any = warnings.showwarning

    def show_line(message: Warning | str, category: type[Warning], filename: str, *more: Any) -> None:
        if Path(filename).is_relative_to(PACKAGE):
            print_warning(str(message))
        else:
            show(message, category, filename, *more)

    warnings.showwarning = show_line  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.showwarning = show


def _print_on_stderr(text: str) -> None:
    Console(stderr=True, soft_wrap=True).print(printable(text), markup=False, highlight=False)
