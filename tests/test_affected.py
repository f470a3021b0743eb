"""Tests of `benchmarks.affected`: which tests a change needs, by the table of CONTRIBUTING.md."""

from pathlib import Path

import pytest

from benchmarks import affected

ROOT = Path(__file__).parents[1]
TABLE = """| you change | run |
|---|---|
| kernels: `a/kernels/`, `a/op.py` | `pytest tests/test_a.py tests/test_b.py`, `pytest tests/test_c.py -k FAMILY` |
| ways: `a/kernels/plan.py`, `a/op.py` | `pytest tests/test_b.py -k "x or y"`, for a tower also `tests/test_d.py` |
| a page: `docs` | `pytest -m 'full or not full' tests/test_b.py -k pages` |

| another table |
"""


def test_rows_that_have_a_file_are_joined():
    """Oracle: selections by hand: the longest path that holds a file counts; a test file runs what any of the rows
    selects, and whole where one row says so."""
    table = affected.read(TABLE)
    assert affected.test_files([], table) == affected.test_files(["a/kernels.py", "b/op.py"], table) == {}
    kernels = dict.fromkeys(f"tests/test_{name}.py" for name in "abc")
    ways = {"tests/test_b.py": "x or y", "tests/test_d.py": None}
    assert affected.test_files(["a/kernels/b/c.json"], table) == kernels
    assert affected.test_files(["a/kernels/plan.py"], table) == ways
    assert affected.test_files(["a/op.py"], table) == ways | kernels
    assert affected.test_files(["a/kernels/plan.py", "docs/a/b.md"], table) == ways | {
        "tests/test_b.py": "(x or y) or (pages)"
    }
    assert affected.test_files(["tests/test_e.py", "tests/e.py"], table) == {"tests/test_e.py": None}
    with pytest.raises(ValueError, match="you change"):
        affected.read("| another table |")


def test_every_file_has_tests():
    """Oracle: the files of the package and of the benchmarks; each is in a row, and the test files of rows exist."""
    files = [path for part in ("fastvit_triton", "benchmarks") for path in (ROOT / part).rglob("*") if path.is_file()]
    names = [path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts]
    assert [name for name in names if not affected.test_files([name])] == []
    for row in affected.rows():
        assert all((ROOT / file).is_file() for file in row.tests), row
        assert all((ROOT / path).exists() for path in row.paths), row
