"""The argument parser: errors of one sentence, in the order typed, and help that is computed when it is asked for."""

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Collection
from typing import Any, NoReturn

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
        if wrong := re.fullmatch(r"(\w+): invalid choice: '(.*?)' \(choose from (.*)\)", message):
            choices = re.findall(r"[\w-]+", wrong[3])
            near = difflib.get_close_matches(wrong[2], choices, n=1, cutoff=0.0)
            message = f"{wrong[1]} is {wrong[2]!r}; the nearest is {near[0]}"
        if wrong := re.fullmatch(r"(\S+): invalid (int|float) value: (.*)", message):
            raise ValueError(f"{wrong[1]} is {wrong[3]}; use {KINDS[wrong[2]]}")
        raise ValueError(f"{message}; see {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; `--batch_size` is `--batch-size`, and of an unknown option the error names the nearest."""
        options = self._option_string_actions
        words = [_dashed(word, options) for word in (sys.argv[1:] if args is None else args)]
        parsed, rest = super().parse_known_args(words, namespace)
        for word in rest:
            option = word.partition("=")[0]
            near = difflib.get_close_matches(option, [name for name in options if name[:2] == "--"], n=1)
            if option[:2] == "--" and len(option) > 2:
                self.error(f"there is no option {option}" + (f"; the nearest is {near[0]}" if near else ""))
        return parsed, rest

    def format_help(self) -> str:
        """The help of all options, and `more`."""
        return super().format_help() + (f"\n{self.more()}\n" if self.more else "")


def _dashed(word: str, known: Collection[str]) -> str:
    """The option with dashes for underscores, if only that one is known."""
    option, equals, value = word.partition("=")
    dashed = option.replace("_", "-")
    return f"{dashed}{equals}{value}" if option[:2] == "--" and option not in known and dashed in known else word


class _Checked(argparse.Action):
    """Stores a value after its check."""

    def __init__(self, *arguments, check: Callable[[str, object], None] | None = None, **options) -> None:
        super().__init__(*arguments, **options)
        self.check = check

    def __call__(self, parser, namespace, value, option=None) -> None:
        if self.check is not None:
            self.check(option or self.dest, value)
        setattr(namespace, self.dest, value)
