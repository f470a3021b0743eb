"""Which of many similar cases run by default; the others run with -m full."""

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], step: int) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`, of which all but each step-th are marked full.

    Args:
        cases: values, tuples of values, or `pytest.param`s, whose marks stay.
        step: 1 keeps all.
    """
    found, place = [], 0
    for case in cases:
        values, marks, name = case if isinstance(case, type(pytest.param())) else (case, (), None)
        values = values if isinstance(values, tuple) else (values,)
        if all(mark.name != "full" for mark in marks):
            marks = marks if place % step == 0 else (*marks, pytest.mark.full)
            place += 1
        found.append(pytest.param(*values, marks=marks, id=name))
    return found
