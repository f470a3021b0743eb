"""`pytest benchmarks [--full]`: one table per case, all variants in it.

The variants of a case are measured together, in alternation (`variants.measure`); each test then passes the samples of
its variant to pytest-benchmark, which tabulates, saves and compares them. Variants that do not match float64 fail.
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
    """Turns warnings of other libraries back into warnings; checks that --full has a GPU."""
    if config.getoption("--full") and DEVICE.type != "cuda":
        raise pytest.UsageError("--full needs a GPU; without it the shapes are small")
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("default"))


class Replay:
    """A timer that replays samples: 0 at the start of each round and the sample at its end, in seconds."""

    def __init__(self, samples: list[float]) -> None:
        self._times = iter([t for us in samples for t in (0.0, us * 1e-6)])

    def __call__(self) -> float:
        return next(self._times)


@functools.lru_cache(maxsize=1)  # tests of the same case run consecutively
def measured(build: Callable[[], Case], phase: str) -> Measured:
    """All variants of a case, measured once."""
    return measure(build(), phase, DEVICE, Deadline(600), 1.0 if DEVICE.type == "cuda" else 0.3)


@pytest.fixture
def tabulate(benchmark) -> Callable:
    """Passes one variant's samples and columns to pytest-benchmark; skips missing variants, fails incorrect ones."""

    def report(build: Callable[[], Case], phase: str, variant: str, group: str) -> None:
        measurement = measured(build, phase)
        row = measurement.rows.get(variant, dict(reason="the case has no such variant"))
        if "reason" in row:
            pytest.skip(row["reason"])
        assert "error" not in row, row["error"]
        assert row["match"], f"{row['worst']} has {row['within']} times the allowed error"
        benchmark.group, benchmark._timer = group, Replay(measurement.samples[variant])
        benchmark.extra_info |= row
        benchmark.pedantic(lambda: None, rounds=len(measurement.samples[variant]))

    return report


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict) -> None:
    """Adds GPU, driver, clocks, versions and commit to saved JSON."""
    machine_info |= provenance()
