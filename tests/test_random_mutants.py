"""Tests of `benchmarks.random_mutants`, on a repository of one module and one test."""

import ast
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks import random_mutants
from benchmarks.claim_mutants import Trials
from benchmarks.random_mutants import Edit

MODULE = """import math
from typing import Annotated


def area(side: Annotated[int, 8] = 2, scale: float = 0.5, *, flat: bool = True) -> Annotated[float, 9]:
    if side < 0 or not flat:
        raise ValueError(f"side is {side + 0}; use 0 or more", 1)
    total = side * side if flat else 1  # rows * columns
    total += 1
    print(total)
    return math.sqrt(total) - scale
"""
TEST = """import sys

from fastvit_triton.toy import area


def test_area():
    assert area(3) == 10**0.5 - 0.5


def test_sign():
    try:
        area(-1)
    except ValueError:
        return
    raise AssertionError
"""
FILE = "fastvit_triton/toy.py"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with a module and its test."""
    root = tmp_path / "tree"
    for file, text in ((FILE, MODULE), ("fastvit_triton/__init__.py", ""), ("tests/test_toy.py", TEST)):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    return root


def edit_of(old: str, new: str) -> Edit:
    """The edit of the toy that replaces this text, once."""
    start = MODULE.index(old)
    return Edit(FILE, MODULE[:start].count("\n") + 1, start, start + len(old), new)


def test_edits_by_hand():
    """Oracle: the edits of a module, by hand; none of annotations, texts of errors, or a line's comment."""
    found = {edit.shown(MODULE) for edit in random_mutants.edits(FILE, MODULE)}
    default, check, product = (MODULE.splitlines()[i] for i in (4, 5, 7))
    wanted = {
        (default, "= 2", "= 3"),
        (default, "0.5", "1.0"),
        (default, "True", "False"),
        (product, "else 1", "else 2"),
    }
    wanted |= {(check, "<", "<="), (check, " or ", " and "), (check, "not flat", "flat"), (check, "0", "1")}
    wanted |= {(product, "if flat", "if not flat"), (product, "side * side", "side + side")}
    shown = {f"{line} → {line.replace(old, new, 1)}".replace("    ", "") for line, old, new in wanted}
    shown |= {'raise ValueError(f"side is {side + 0}; use 0 or more", 1) → pass', "print(total) → pass"}
    shown |= {"total += 1 → pass", "total += 1 → total += 2"}
    shown |= {"return math.sqrt(total) - scale → return math.sqrt(total) + scale"}
    assert found == shown


def test_equal_seeds_draw_equal_edits(tree: Path):
    """Oracle: the edits of another call; of the lines that are given, one of each; they are Python."""
    lines = {FILE: {5, 6, 8}}
    drawn = random_mutants.draw(lines, 30, 3, tree)
    assert drawn == random_mutants.draw(lines, 30, 3, tree) and {edit.line for edit in drawn} == lines[FILE]
    assert len({tuple(random_mutants.draw(lines, 2, seed, tree)) for seed in range(20)}) > 5
    for edit in drawn:
        assert ast.unparse(ast.parse(edit.applied(MODULE))) != ast.unparse(ast.parse(MODULE))


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_changed_lines(tree: Path):
    """Oracle: by hand: a line that was changed, two that were added, and a new file; none that was removed."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"]):
        subprocess.run([*git, *words], cwd=tree, check=True)
    rows = MODULE.splitlines()
    rows[5], rows[9:10] = rows[5].replace("0", "1"), ["    x = 1", "    y = 2"]
    (tree / FILE).write_text("\n".join(rows[1:]) + "\n")
    (tree / "tests/test_toy.py").write_text(TEST + "\n")
    (tree / "fastvit_triton/new.py").write_text("x = 1\n")
    subprocess.run(["git", "add", "."], cwd=tree, check=True)
    assert random_mutants.changed_lines("HEAD", tree) == {FILE: {5, 9, 10}, "fastvit_triton/new.py": {1}}
    with pytest.raises(ValueError, match="since is 'nowhere'; git says: "):
        random_mutants.changed_lines("nowhere", tree)


@pytest.mark.parametrize(
    "old, new, expression, killed",
    [
        ("total += 1", "pass", None, "tests/test_toy.py::test_area"),
        ("print(total)", "pass", None, None),
        ("raise ValueError", "ValueError", "area", None),
        ("import math", "import maths", None, "tests/test_toy.py"),
    ],
    ids=["seen", "not seen", "seen by another test", "not imported"],
)
def test_an_edit_that_a_test_sees_is_killed(old, new, expression, killed, tree: Path):
    """Oracle: by hand: which test of the toy fails; the file is as before."""
    row = random_mutants.examine(edit_of(old, new), {"tests/test_toy.py": expression}, Trials(tree, 60, []))
    assert (row["killed"], row["error"]) == (killed, None)
    assert (tree / FILE).read_text() == MODULE


def test_a_test_that_fails_anyway_is_left_out(tree: Path):
    """Oracle: by hand: a test after the one that fails without the edit; none without tests."""
    (tree / "tests/test_toy.py").write_text(TEST.replace("0.5 - 0.5", "0.5"))
    trials = Trials(tree, 60, [])
    row = random_mutants.examine(edit_of("side < 0", "side < -1"), {"tests/test_toy.py": None}, trials)
    assert row["killed"] == "tests/test_toy.py::test_sign" and row["error"] is None and row["ran"] == 2
    assert (trials.passing, trials.failing) == ({"tests/test_toy.py::test_sign"}, {"tests/test_toy.py::test_area"})
    row = random_mutants.examine(edit_of("print(total)", "pass"), {}, trials)
    assert row["error"] == "CONTRIBUTING.md names no tests"
