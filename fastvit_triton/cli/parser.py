"""The argument parser: errors of one sentence, in the order typed, and help with examples and short placeholders."""

import argparse
import difflib
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

KINDS = {"int": "an integer", "float": "a number"}
PLACEHOLDERS: dict[Any, str] = {int: "N", float: "X", Path: "FILE"}  # of values in --help; NAME of others
Options = argparse.ArgumentParser | argparse._ArgumentGroup  # what options are added to


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises ValueError, and whose options take `check=`, a function of (option, value).

    Options are written out, and converted and checked one after another, as typed, before the command runs.
    """

    examples: Sequence[str] = ()  # command lines at the end of the help

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.allow_abbrev = False
        self.formatter_class = _Help
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
        if self._subparsers is None:  # else most of them are for the command
            self._refuse_unknown(words)
        parsed, rest = super().parse_known_args(words, namespace)
        self._refuse_unknown(rest)
        return parsed, rest

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        """Raises ValueError for an option that does not exist; not for what follows "--"."""
        known = [name for name in self._option_string_actions if name[:2] == "--"]
        for word in takewhile(lambda word: word != "--", words):
            option = word.partition("=")[0]
            if option[:2] == "--" and option not in known and " " not in word:
                near = difflib.get_close_matches(option, known, n=1)
                self.error(f"there is no option {option}" + (f"; the nearest is {near[0]}" if near else ""))

    def format_usage(self) -> str:
        """One line: what is required, and that there are options."""
        self.usage = self._short_usage()
        return super().format_usage()

    def format_help(self) -> str:
        """The help of all options, and `examples`."""
        self.usage = self._short_usage()
        lines = ["", "examples:", *(f"  {line}" for line in self.examples), ""] if self.examples else []
        return super().format_help() + "\n".join(lines)

    def _short_usage(self) -> str:
        words = [self.prog.replace("%", "%%"), "[OPTIONS]"]
        for action in sorted(self._actions, key=lambda action: not action.option_strings):
            value = str(action.metavar or action.dest.upper())
            if not action.option_strings:
                more = {"+": f"{value} [{value} …]", "?": f"[{value}]"}
                words.append(more.get(str(action.nargs), value))
            elif action.required:
                words.append(f"{action.option_strings[0]} {value}")
        return " ".join(words)


def _dashed(word: str, known: Collection[str]) -> str:
    """The option with dashes for underscores, if only that one is known."""
    option, equals, value = word.partition("=")
    dashed = option.replace("_", "-")
    return f"{dashed}{equals}{value}" if option[:2] == "--" and option not in known and dashed in known else word


class _Help(argparse.HelpFormatter):
    """Help whose lines do not end inside names with hyphens, such as hf-hub:ORG/NAME."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class _Checked(argparse.Action):
    """Stores a value after its check; without a `metavar` or choices, the type of the value chooses the placeholder."""

    def __init__(
        self,
        option_strings: Sequence[str],
        dest: str,
        check: Callable[[str, object], None] | None = None,
        metavar: str | None = None,
        **options: Any,
    ) -> None:
        if metavar is None and not options.get("choices"):
            metavar = PLACEHOLDERS.get(options.get("type"), "NAME") if option_strings else dest.upper()
        super().__init__(option_strings, dest, metavar=metavar, **options)
        self.check = check

    def __call__(self, parser, namespace, value, option=None) -> None:
        if self.check is not None:
            self.check(option or str(self.metavar), value)
        setattr(namespace, self.dest, value)
