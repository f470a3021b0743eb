"""`pytest benchmarks [--full]`: one table per case, all arms in it.

The arms of a case are measured together, in turn (`arms.measure`); each test then hands its arm's samples to
pytest-benchmark, which tabulates, saves and compares them. An arm that disagrees with float64 fails and has no time.
"""

import functools
from collections.abc import Callable

import pytest
import torch

from fastvit_triton.measure.machine import provenance
from fastvit_triton.measure.timeout import Deadline
from fastvit_triton.measure.variants import Case, Measured, measure

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --full."""
    parser.addoption("--full", action="store_true", help="real sizes; needs a GPU")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Other libraries' warnings are theirs here."""
    if config.getoption("--full") and DEVICE.type != "cuda":
        raise pytest.UsageError("--full needs a GPU; without it the shapes are small")
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("default"))


class Replay:
    """A clock that tells each sample in turn: 0 at the start of a round, the sample at its end, seconds."""

    def __init__(self, samples: list[float]) -> None:
        self._times = iter([t for us in samples for t in (0.0, us * 1e-6)])

    def __call__(self) -> float:
        return next(self._times)


@functools.lru_cache(maxsize=1)  # the tests of a case follow each other
def measured(build: Callable[[], Case], phase: str) -> Measured:
    """All arms of a case, measured once."""
    return measure(build(), phase, DEVICE, Deadline(600), 1.0 if DEVICE.type == "cuda" else 0.3)


@pytest.fixture
def tabulate(benchmark) -> Callable:
    """Hands one arm's samples and columns to pytest-benchmark; skips absent arms, fails wrong ones."""

    def tell(build: Callable[[], Case], phase: str, arm: str, group: str) -> None:
        found = measured(build, phase)
        row = found.rows.get(arm, dict(reason="no such arm here"))
        if "reason" in row:
            pytest.skip(row["reason"])
        assert "error" not in row, row["error"]
        assert row["match"], f"{row['worst']} is {row['within']} times the error that it may have"
        benchmark.group, benchmark._timer = group, Replay(found.samples[arm])
        benchmark.extra_info |= row
        benchmark.pedantic(lambda: None, rounds=len(found.samples[arm]))

    return tell


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict) -> None:
    """GPU, driver, clocks, versions and commit into saved JSON."""
    machine_info |= provenance()
