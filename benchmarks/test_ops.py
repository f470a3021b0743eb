"""Ops, forward and backward: every variant of one op and shape in one table. Oracle: float64."""

import functools

import pytest
import torch

from . import op_cases
from .conftest import DEVICE

DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Lets the variant vary fastest, so that each case is measured once for all variants."""
    shapes = op_cases.FULL if metafunc.config.getoption("--full") else (op_cases.SMALL,)
    parameters = [
        pytest.param(build, phase, variant, id=f"{name}-{shape.name}-{phase}-{variant}")
        for shape in shapes
        for name in op_cases.NAMES
        for build in [functools.partial(op_cases.case, name, shape, DTYPE, DEVICE)]
        for phase in ("forward", "backward")
        for variant in op_cases.variant_names(name)
    ]
    metafunc.parametrize("build, phase, variant", parameters)


def test_op(tabulate, build, phase, variant):
    """Reports time, memory and match of one variant."""
    name, shape, *_ = build.args
    tabulate(build, phase, variant, f"{name}, {shape.name}, {phase}")
