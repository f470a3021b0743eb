"""Whole models, inference and training step: all variants of a model in one table. Oracle: the model in float64."""

import functools

import pytest
import torch

from . import model_runs
from .conftest import DEVICE


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Lets the variant vary fastest, so that each case is measured once for all variants."""
    full = metafunc.config.getoption("--full")
    parameters = [
        pytest.param(build, "training" if run.training else "forward", variant, id=f"{run.name}-{variant}")
        for run in (model_runs.FULL if full else model_runs.SMALL)
        for build in [functools.partial(model_runs.case, run, torch.bfloat16 if full else torch.float32, DEVICE)]
        for variant in model_runs.variant_names(run)
    ]
    metafunc.parametrize("build, phase, variant", parameters)


def test_model(tabulate, build, phase, variant):
    """Reports time, memory and match of one variant."""
    tabulate(build, phase, variant, build.args[0].name)
