"""Which tests a change needs, read from the table "you change, run" of CONTRIBUTING.md.

    python -m benchmarks.affected FILE ...

A row has files and folders in backticks in its first column, and commands of pytest in its second. Of those that hold
a file the longest counts, in each row that has it.
"""

import functools
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"


class Row(NamedTuple):
    """A row of the table."""

    paths: set[str]  # files and folders, relative to the root
    tests: dict[str, str | None]  # test file → its `-k` expression, None for the whole file


def quoted(cell: str) -> list[str]:
    """The parts of a cell that stand between backticks."""
    return re.findall(r"`([^`]+)`", cell)


def parsed(command: str) -> dict[str, str | None]:
    """Test file → `-k` expression, of a command; a placeholder in capitals, as in "-k FAMILY", selects all tests."""
    words = shlex.split(command)
    chosen = words[words.index("-k") + 1] if "-k" in words else None
    if chosen is not None and chosen.isupper():
        chosen = None
    return {word: chosen for word in words if re.fullmatch(r"tests/test_\w+\.py", word)}


def joined(parts: Iterable[dict[str, str | None]]) -> dict[str, str | None]:
    """All test files of the parts; a file that two parts name runs what either of them selects."""
    tests: dict[str, str | None] = {}
    for part in parts:
        for file, chosen in part.items():
            other = tests.get(file, chosen)
            both = other if other == chosen else f"({other}) or ({chosen})"
            tests[file] = None if None in (other, chosen) else both
    return tests


def read(text: str) -> list[Row]:
    """The rows of the table "you change, run" in a text; ValueError without such a table."""
    found = re.search(r"^\| you change \| run \|\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    if found is None:
        raise ValueError('text must have a table whose head is "| you change | run |"')
    cells = [line.strip().strip("|").split(" | ") for line in found[1].splitlines()]
    return [
        Row({path.rstrip("/") for path in quoted(change)}, joined(parsed(word) for word in quoted(run)))
        for change, run in cells
    ]


@functools.cache
def rows() -> list[Row]:
    """The rows of CONTRIBUTING.md."""
    return read(PAGE.read_text(encoding="utf-8"))


def rows_of(path: str, table: list[Row]) -> list[Row]:
    """The rows that have a file, else the innermost folder that holds it."""
    for place in (path, *map(str, PurePosixPath(path).parents)):
        if found := [row for row in table if place in row.paths]:
            return found
    return []


def test_files(paths: Iterable[str], table: list[Row] | None = None) -> dict[str, str | None]:
    """Test file → `-k` expression or None (whole file), for files that changed; changed tests are run whole."""
    table, parts = rows() if table is None else table, []
    for path in paths:
        parts += [row.tests for row in rows_of(path, table)]
        parts.append({path: None} if re.fullmatch(r"tests/test_\w+\.py", path) else {})
    return joined(parts)


if __name__ == "__main__":
    for name, expression in test_files(sys.argv[1:]).items():
        print(name if expression is None else f"{name} -k {shlex.quote(expression)}")
