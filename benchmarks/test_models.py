"""Whole models, inference and training step: every arm of one model in one table. Oracle: the model in float64."""

import functools

import pytest
import torch

from . import model_runs
from .conftest import DEVICE


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Arms vary fastest: a case is measured once for all of them."""
    full = metafunc.config.getoption("--full")
    found = [
        pytest.param(build, "training" if run.training else "forward", arm, id=f"{run.name}-{arm}")
        for run in (model_runs.FULL if full else model_runs.SMALL)
        for build in [functools.partial(model_runs.case, run, torch.bfloat16 if full else torch.float32, DEVICE)]
        for arm in model_runs.arms_of(run)
    ]
    metafunc.parametrize("build, phase, arm", found)


def test_model(tabulate, build, phase, arm):
    """Time, memory and match of one arm."""
    tabulate(build, phase, arm, build.args[0].name)
