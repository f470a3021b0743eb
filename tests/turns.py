"""Turns: which cases of the longest tests run now, so that all run within a few pushes and none of them waits.

`tests/turn` holds a number that each push raises by one; the variable FASTVIT_TURN takes its place, to repeat one.
"""

import ast
import hashlib
import os
import subprocess
from collections import defaultdict
from pathlib import Path

import cpu_seconds
import pytest

from benchmarks.affected import test_files

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_name("turn")
TURN = int(os.environ.get("FASTVIT_TURN") or FILE.read_text())
RECENT = 4 * 3600  # seconds before the newest commit in which a change counts as new
LIMIT = 3600  # CPU seconds of a run in turn, so that .ci/run takes 40 minutes on two cores


def in_turn(name: str, one_in: int, turn: int = TURN) -> bool:
    """True in one of `one_in` consecutive turns, which depends on the name."""
    digest = hashlib.sha256(name.encode()).digest()  # a CRC's parity is alike for names of one pattern
    return int.from_bytes(digest, "big") % one_in == turn % one_in


def git(*arguments: str) -> str | None:
    """What git prints in the checkout; None without git, outside a repository, or if the command fails."""
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def before() -> str | None:
    """The newest commit that is older than recent changes; None without a history that reaches back so far."""
    newest = git("log", "-1", "--format=%ct")
    if newest is None or git("rev-parse", "--is-shallow-repository") != "false\n":
        return None
    return (git("rev-list", "-1", f"--before={int(newest) - RECENT}", "HEAD") or "").strip() or None


def recent() -> list[str] | None:
    """Paths that recent commits or the working tree changed; None without history, where anything may have changed.

    Modules of the package of which only docstrings, comments or layout changed are left out.
    """
    start = before()
    changed = start and git("diff", "--name-only", start)
    if changed is None:
        return None
    return [path for path in changed.splitlines() if not (path.startswith("fastvit_triton/") and is_same(start, path))]


def is_same(commit: str, path: str) -> bool:
    """True if a module has the code that it had at a commit."""
    then, now = git("show", f"{commit}:{path}"), ROOT / path
    return path.endswith(".py") and then is not None and now.exists() and code(then) == code(now.read_text())


def code(source: str) -> str:
    """Source of a module without comments, docstrings and layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
            node.body = node.body[1:]
    return ast.dump(tree)


def runs(item: pytest.Item, turn: int = TURN) -> bool:
    """True for a test that is not marked full or is in turn: each third one, or one in as many as its mark says."""
    mark = item.get_closest_marker("full")
    return mark is None or in_turn(item.nodeid, mark.kwargs.get("one_in", 3), turn)


def whole_files() -> dict[str, bool]:
    """The files that are to run whole in any turn → True if they changed recently, False if they test what did.

    Without history these are all files.
    """
    changed = recent()
    if changed is None:
        return {path.name: False for path in FILE.parent.glob("test_*.py")}
    return {Path(path).name: path in changed for path in (*test_files(changed), *changed)}


def chosen(items: list[pytest.Item]) -> tuple[list[pytest.Item], dict[str, float]]:
    """The tests that are in turn and those of the files that run whole, and the files for which `LIMIT` has no room.

    Changed test files come first, then the shortest ones. The files that are left out have the CPU seconds that they
    would take; their tests in turn run.
    """
    whole, late = whole_files(), defaultdict(list)
    for item in items:
        if not runs(item):
            late[item.path.name].append(item)
    total = cpu_seconds.expected(items).total()
    seconds = {file: cpu_seconds.expected(found).total() for file, found in late.items()}
    spent, left = total - sum(seconds.values()), {}
    for file in sorted(whole.keys() & late.keys(), key=lambda file: (not whole[file], seconds[file])):
        if spent + seconds[file] > LIMIT:
            left[file] = seconds[file]
        else:
            spent += seconds.pop(file)
    return [item for item in items if runs(item) or item.path.name not in seconds], left
