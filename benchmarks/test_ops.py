"""Ops, forward and backward: every arm of one op and shape in one table. Oracle: float64."""

import functools

import pytest
import torch

from . import op_cases
from .conftest import DEVICE

DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Arms vary fastest: a case is measured once for all of them."""
    shapes = op_cases.FULL if metafunc.config.getoption("--full") else (op_cases.SMALL,)
    found = [
        pytest.param(build, phase, arm, id=f"{name}-{shape.name}-{phase}-{arm}")
        for shape in shapes
        for name in op_cases.NAMES
        for build in [functools.partial(op_cases.case, name, shape, DTYPE, DEVICE)]
        for phase in ("forward", "backward")
        for arm in op_cases.arms_of(name)
    ]
    metafunc.parametrize("build, phase, arm", found)


def test_op(tabulate, build, phase, arm):
    """Time, memory and match of one arm."""
    name, shape, *_ = build.args
    tabulate(build, phase, arm, f"{name}, {shape.name}, {phase}")
