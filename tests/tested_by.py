"""Which test files belong to a file, by the table of CONTRIBUTING.md."""

import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PATH = re.compile(r"`([\w./-]+)`")
TEST_FILE = re.compile(r"tests/test_\w+\.py")


@functools.cache
def rows() -> list[tuple[set[str], set[str]]]:
    """(files and folders, test files) of each row of the table."""
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("| you change | run |\n|---|---|\n")[2]
    cells = [line.split("|")[1:3] for line in table.partition("\n\n")[0].splitlines()]
    return [(set(PATH.findall(changed)), set(TEST_FILE.findall(run))) for changed, run in cells]


def tests_of(path: str) -> set[str]:
    """The test files of the rows that name the file itself, else the innermost folder that holds it.

    Args:
        path: relative to the root, such as "fastvit_triton/kernels/plan.py".
    """
    for name in (path, *map(str, Path(path).parents)):
        if found := [tests for changed, tests in rows() if name in changed]:
            return set().union(*found)
    return set()
