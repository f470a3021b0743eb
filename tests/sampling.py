"""Which of many similar cases run by default, and which with -m fast; the others run with -m full."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def marked(cases: Iterable[Any], mark: pytest.MarkDecorator, which: Callable[..., bool]) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`, with one more mark for those whose values `which` takes.

    Args:
        cases: values, tuples of values, or `pytest.param`s, whose marks stay.
        mark: such as `pytest.mark.fast`.
        which: the values of a case → True if it gets the mark.
    """
    found = []
    for values, marks, name in map(_parts, cases):
        found.append(pytest.param(*values, marks=(*marks, mark) if which(*values) else marks, id=name))
    return found


def _parts(case: Any) -> tuple[tuple, tuple, str | None]:
    """Values, marks and name of a case."""
    values, marks, name = case if isinstance(case, type(pytest.param())) else (case, (), None)
    return values if isinstance(values, tuple) else (values,), tuple(marks), name


def sampled(cases: Iterable[Any], step: int, one_in: int = 3) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`, of which all but each step-th are marked full.

    Args:
        cases: values, tuples of values, or `pytest.param`s, whose marks stay.
        step: 1 keeps all.
        one_in: number of turns in one of which a full case runs.
    """
    found, place = [], 0
    for values, marks, name in map(_parts, cases):
        if all(mark.name != "full" for mark in marks):
            marks = marks if place % step == 0 else (*marks, pytest.mark.full(one_in=one_in))
            place += 1
        found.append(pytest.param(*values, marks=marks, id=name))
    return found


class Few:
    """pytest plugin: of the cases of a test marked `few(n)`, n at equal distances run by default, the rest is full.

    Keywords of the mark, such as one_in, are those of `full`.
    """

    @pytest.hookimpl(tryfirst=True)  # before -m selects
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Marks the others."""
        cases = defaultdict(list)
        for item in items:
            if item.get_closest_marker("few") and not item.get_closest_marker("full"):
                cases[item.nodeid.partition("[")[0]].append(item)
        for found in cases.values():
            mark = found[0].get_closest_marker("few")
            (count,) = mark.args
            shown = {i * len(found) // count for i in range(count)}
            for i, item in enumerate(found):
                if i not in shown:
                    item.add_marker(pytest.mark.full(**mark.kwargs))
