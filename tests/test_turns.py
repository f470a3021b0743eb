"""Tests of the test system: turns, what a change selects, and CPU seconds."""

import json
from collections import Counter
from pathlib import Path

import cpu_seconds
import pytest
import turns
from sampling import sampled

pytestmark = pytest.mark.fast


def test_every_case_has_one_turn_in_as_many_as_it_says():
    """Oracle: the definition, for 1, 2, 3 and 39 turns in a row from any one on."""
    for one_in in (1, 2, 3, 39):
        found = [sum(turns.in_turn(f"a[{i}]", one_in, turn) for turn in range(7, 7 + one_in)) for i in range(50)]
        assert found == [1] * 50


def test_a_turn_is_used_once():
    """Oracle: the number in the newest commit that is older than four hours."""
    before = turns.before()
    old = before and turns.git("show", f"{before}:tests/turn")
    if old is None:
        pytest.skip("git has no older commit with a turn")
    assert int(turns.FILE.read_text()) != int(old), "raise the number in tests/turn by one"


@pytest.mark.full(one_in=3)
@pytest.mark.parametrize("case", range(3))
def test_full_cases_say_how_often_they_run(case, request):
    """Oracle: the mark; the function of turns decides by the name."""
    chosen = [turns.runs(request.node, turn) for turn in range(3)]
    assert chosen == [turns.in_turn(request.node.nodeid, 3, turn) for turn in range(3)] and sum(chosen) == 1


def test_sampled_cases_rotate():
    """Oracle: by hand, the marks."""
    marks = [[(mark.name, mark.kwargs) for mark in case.marks] for case in sampled("abc", 2, one_in=5)]
    assert marks == [[], [("full", {"one_in": 5})], []]


def test_files_about_a_change_run_whole(monkeypatch):
    """Oracle: CONTRIBUTING's table, a changed test file, and all files where git knows nothing."""
    monkeypatch.setattr(turns, "recent", lambda: ["tests/test_loss.py", "fastvit_triton/engine/body.py"])
    found = turns.whole_files()
    assert {"test_loss.py", "test_block.py", "test_replay.py"} <= found.keys() and "test_hub.py" not in found
    assert found["test_loss.py"] and not found["test_block.py"]
    monkeypatch.undo()
    monkeypatch.setattr(turns, "git", lambda *arguments: None)
    assert turns.before() is None and turns.recent() is None
    assert {"test_loss.py", "test_hub.py", "test_turns.py"} <= turns.whole_files().keys()


class FullCase:
    """What `turns.chosen` reads of a test that runs once in a thousand turns."""

    def __init__(self, file: str, name: str) -> None:
        self.path, self.name, self.nodeid = Path(f"tests/{file}.py"), name, name

    def get_closest_marker(self, name: str) -> pytest.Mark:
        """The mark."""
        return pytest.mark.full(one_in=1000).mark


def test_files_run_whole_while_there_is_time(monkeypatch):
    """Oracle: by hand: the changed file first, then the shortest ones; what is in turn runs and counts anyway."""
    rows = {"test_a": {"x": 40.0}, "test_b": {"x": 30.0}, "test_c": {"x": 20.0}, "test_d": {"x": 25.0}}
    monkeypatch.setattr(cpu_seconds, "read", lambda: {"full": rows})
    monkeypatch.setattr(turns, "whole_files", lambda: {"test_a.py": True, "test_b.py": False, "test_c.py": False})
    monkeypatch.setattr(turns, "LIMIT", 85)
    names = [(file, name) for file in rows for name in ("x", "y")]
    items = [FullCase(*name) for name in names]
    monkeypatch.setattr(turns, "runs", lambda item: item is items[-2])
    found, left = turns.chosen(items)
    assert [(item.path.stem, item.name) for item in found] == [names[i] for i in (0, 1, 4, 5, 6)]
    assert left == {"test_b.py": 30.0}


def test_other_docstrings_are_no_change_of_code():
    """Oracle: by hand."""
    before = '"""A."""\n\ndef f(x):\n    """B."""\n    return x + "c"\n'
    assert turns.code(before) == turns.code('"""Z."""\ndef f(x):  # y\n    return x + "c"\n')
    assert turns.code(before) != turns.code(before.replace('"c"', '"d"'))
    assert turns.code('def f():\n    """A."""\n') == turns.code('def f():\n    """B."""\n')


def test_nightly_runs_are_recent():
    """Oracle: at most sixty commits between what passed, by its own record, and what is checked out."""
    if turns.before() is None:
        pytest.skip("git has no history")
    record = turns.ROOT / ".ci" / "nightly.json"
    if not record.exists():
        pytest.skip("no part of .ci/nightly has passed yet")
    for part, passed in json.loads(record.read_text()).items():
        since = turns.git("rev-list", "--count", f"{passed['commit']}..HEAD")
        assert since is not None and int(since) <= 60, f"run .ci/nightly {part!r}; it last passed at {passed}"


def test_default_cases_are_short(request):
    """Oracle: the committed table: sixty cases and shared fixtures above one CPU second, and the budget of the sum."""
    rows = [
        (seconds, file, name)
        for file, named in cpu_seconds.read()["default"].items()
        for name, seconds in named.items()
    ]
    long = sorted((row for row in rows if row[0] > cpu_seconds.LONG), reverse=True)
    fixtures = sum(seconds for seconds, _, name in rows if name.startswith("fixture "))
    default = [item for item in request.session.items if cpu_seconds.ring(item) == "default"]
    assert len(long) <= 60, long
    assert fixtures + cpu_seconds.expected(default).total() <= cpu_seconds.BUDGET


def test_rows_of_the_table(tmp_path, monkeypatch):
    """Oracle: by hand. Long cases have rows of their own, others the mean; rows of what did not run stay."""
    monkeypatch.setattr(cpu_seconds, "TABLE", tmp_path / "table.json")
    cpu_seconds.TABLE.write_text('{"default": {"test_a": {"test_x[3]": 2.0, "test_y": 0.5}}, "full": {}}')
    measured = {("default", "test_a", "test_x[1]"): 0.4, ("default", "test_a", "test_x[2]"): 0.8}
    measured |= {("default", "test_a", "test_x[3]"): 1.0, ("full", "test_a", "fixture f"): 8.0}
    cpu_seconds.write(Counter(measured) | Counter({("full", "test_b", "test_z[1]"): 6.0}), slower=2.0)
    assert cpu_seconds.read() == {
        "default": {"test_a": {"test_x": 0.37, "test_y": 0.5}},
        "full": {"test_a": {"fixture f": 4.0}, "test_b": {"test_z[1]": 3.0}},
    }


def test_expected_seconds(request, monkeypatch):
    """Oracle: by hand, of this test."""
    monkeypatch.setattr(cpu_seconds, "read", lambda: {"default": {"test_turns": {request.node.name: 1.5}}, "full": {}})
    assert cpu_seconds.expected([request.node, request.node]) == {"test_turns": 3.0}
