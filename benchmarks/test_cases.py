"""Ops, and whole models, in all phases: every variant of a case in one table. Oracle: float64."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from . import model_runs, op_cases
from .conftest import DEVICE

DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32


def cases(full: bool) -> Iterator[tuple[str, str, Callable, str, tuple[str, ...]]]:
    """(name of the table, prefix of identifiers, what builds the case, phase, its variants)."""
    for shape in op_cases.FULL if full else (op_cases.SMALL,):
        for name in op_cases.NAMES:
            build = partial(op_cases.case, name, shape, DTYPE, DEVICE)
            for phase in ("forward", "backward"):
                names = op_cases.variant_names(name)
                yield f"{name}, {shape.name}, {phase}", f"{name}-{shape.name}-{phase}", build, phase, names
    for run in model_runs.FULL if full else model_runs.SMALL:
        build = partial(model_runs.case, run, torch.bfloat16 if full else torch.float32, DEVICE)
        phase = "training" if run.training else "forward"
        yield run.name, run.name, build, phase, model_runs.variant_names(run)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Lets the variant vary fastest, so that each case is measured once for all variants."""
    parameters = [
        pytest.param(build, phase, variant, table, id=f"{prefix}-{variant}")
        for table, prefix, build, phase, variants in cases(metafunc.config.getoption("--full"))
        for variant in variants
    ]
    metafunc.parametrize("build, phase, variant, table", parameters)


def test_case(tabulate, build, phase, variant, table):
    """Reports time, memory and match of one variant."""
    tabulate(build, phase, variant, table)
