"""The argument parser: errors of one sentence, in the order typed, and help that is computed when it is asked for."""

import argparse
import re
from collections.abc import Callable
from typing import NoReturn

KINDS = {"int": "an integer", "float": "a number"}


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises ValueError, and whose options take `check=`, a function of (option, value).

    Options are converted and checked one after another, as typed, before the command runs.

    Attributes:
        more: returns text that follows the help of all options; None adds nothing.
    """

    more: Callable[[], str] | None = None

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.register("action", None, _Checked)

    def error(self, message: str) -> NoReturn:
        """Raises ValueError; `main` prints it."""
        message = message.removeprefix("argument ")
        if wrong := re.fullmatch(r"(\S+): invalid (int|float) value: (.*)", message):
            raise ValueError(f"{wrong[1]} is {wrong[3]}; use {KINDS[wrong[2]]}")
        raise ValueError(f"{message}; see {self.prog} --help")

    def format_help(self) -> str:
        """The help of all options, and `more`."""
        return super().format_help() + (f"\n{self.more()}\n" if self.more else "")


class _Checked(argparse.Action):
    """Stores a value after its check."""

    def __init__(self, *arguments, check: Callable[[str, object], None] | None = None, **options) -> None:
        super().__init__(*arguments, **options)
        self.check = check

    def __call__(self, parser, namespace, value, option=None) -> None:
        if self.check is not None:
            self.check(option or self.dest, value)
        setattr(namespace, self.dest, value)
