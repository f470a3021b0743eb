"""Whole models, inference and training step: every arm of one model in one table. Oracle: the model in float64."""

import functools

import pytest
import torch

from . import models
from .conftest import DEVICE


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Arms vary fastest: a case is measured once for all of them."""
    full = metafunc.config.getoption("--full")
    found = [
        pytest.param(build, "training" if run.training else "forward", arm, id=f"{run.name}-{arm}")
        for run in (models.FULL if full else models.SMALL)
        for build in [functools.partial(models.case, run, torch.bfloat16 if full else torch.float32, DEVICE)]
        for arm in models.arms_of(run)
    ]
    metafunc.parametrize("build, phase, arm", found)


def test_model(tabulate, build, phase, arm):
    """Time, memory and match of one arm."""
    tabulate(build, phase, arm, build.args[0].name)
