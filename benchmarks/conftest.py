"""`pytest benchmarks [--full]`: one table per case, its variants in it, and at the end ours against torch.compile.

The variants of a case are measured together, in alternation (`variants.measure`); each test then passes the samples of
its variant to pytest-benchmark, which tabulates, saves and compares them. Variants that do not match float64 fail.
"""

import dataclasses
import functools
import gc
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pytest_benchmark.session import PerformanceRegression

from fastvit_triton.measure.libraries import MEDIUM
from fastvit_triton.measure.machine import provenance
from fastvit_triton.measure.timeout import Deadline
from fastvit_triton.measure.timing import WARM_UP, timing_columns
from fastvit_triton.measure.variants import Case, VariantTimes, compare_variants, measure

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DEFAULTS = dict(
    columns=["median", "iqr", "rounds"], sort="name", name="short", max_time="0.2" if DEVICE.type == "cuda" else "0.1"
)
FIXED = ("min_time", "calibration_precision", "precision", "timer", "cprofile")  # options that cannot be followed
COMPILED = ("ours compiled", "optimized, compiled", "compiled, our backend")  # the first of a case is ours
MOMENTARY = ("command", "date", "commit", "clocks.sm", "clocks.mem", "temperature.gpu")
registered = pytest.StashKey[dict]()
verdicts = pytest.StashKey[dict]()


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Adds --full, and replaces defaults of pytest-benchmark, which the command line overrides."""
    parser.addoption("--full", action="store_true", help="real sizes; needs a GPU")
    config = pluginmanager.getplugin("pytestconfig")
    config.stash[registered] = {name: getattr(config.option, f"benchmark_{name}", None) for name in FIXED}
    for name, value in DEFAULTS.items():
        setattr(config.option, f"benchmark_{name}", value)
    # such as that there is nothing to compare with; an error would end the run before the first test
    config.addinivalue_line("filterwarnings", "default::pytest_benchmark.logger.PytestBenchmarkWarning")


def pytest_configure(config: pytest.Config) -> None:
    """Refuses options of pytest-benchmark that cannot be followed."""
    config.stash[verdicts] = {}
    for name, default in config.stash[registered].items():
        if getattr(config.option, f"benchmark_{name}", None) != default:
            raise pytest.UsageError(
                f"--benchmark-{name.replace('_', '-')} has no effect here: a round is one call, timed by "
                "fastvit_triton.measure; use --benchmark-min-rounds, --benchmark-max-time or --benchmark-warmup"
            )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Turns warnings of other libraries back into warnings; checks that --full has a GPU."""
    if config.getoption("--full") and DEVICE.type != "cuda":
        raise pytest.UsageError("--full needs a GPU; without it the shapes are small")
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))


class Replay:
    """A timer that replays samples: 0 at the start of each round and the sample at its end, in seconds."""

    def __init__(self, samples: list[float]) -> None:
        self._times = iter([t for us in samples for t in (0.0, us * 1e-6)])

    def __call__(self) -> float:
        return next(self._times)


@functools.lru_cache(maxsize=1)  # tests of the same case run consecutively
def measured(build: Callable[[], Case], phase: str, session: pytest.Session, timed: bool) -> VariantTimes:
    """The baseline of a case and those of its variants whose tests run, compared with float64 and timed together."""
    every = [item.callspec.params for item in session.items if hasattr(item, "callspec")]
    names = {p["variant"] for p in every if p.get("build") is build and p["phase"] == phase}
    case = build()
    variants = [case.variants[0], *(variant for variant in case.variants[1:] if variant.name in names)]
    case = dataclasses.replace(case, variants=variants)
    result = timings(case, phase, session.config) if timed else comparisons(case, phase)
    for variant in variants:
        if variant.reduced:
            result.rows[variant.name]["reduced"] = True
    return result


def comparisons(case: Case, phase: str) -> VariantTimes:
    """Compares each variant with float64, and times none."""
    torch.compiler.reset()  # Dynamo limits recompilations of one function, and cases share functions
    rows: dict[str, dict] = {v.name: {} if v.reason is None else dict(reason=v.reason) for v in case.variants}
    for name, result in compare_variants(case, case.inputs(0), phase, Deadline(600)):
        rows[name] = dict(error=result) if isinstance(result, str) else result.columns()
    return VariantTimes(rows, {})


def timings(case: Case, phase: str, config: pytest.Config) -> VariantTimes:
    """Compares each variant with float64, and times those that match as the options of pytest-benchmark say."""
    option = config.option
    seconds = float(option.benchmark_max_time) * sum(variant.reason is None for variant in case.variants)
    warm_up = max(WARM_UP, option.benchmark_warmup_iterations) if option.benchmark_warmup else WARM_UP
    rounds = option.benchmark_min_rounds, sys.maxsize
    collects = gc.isenabled()
    if option.benchmark_disable_gc:
        gc.disable()
    try:
        return measure(case, phase, DEVICE, Deadline(600 + 2 * seconds), seconds, rounds=rounds, warm_up=warm_up)
    finally:
        if collects:
            gc.enable()


def against_compile(measurement: VariantTimes) -> str | None:
    """How fast ours is compiled, in multiples of torch.compile's speed, and if it is correct; None if not measured."""
    ours = next((name for name in COMPILED if "reason" not in measurement.rows.get(name, dict(reason=""))), None)
    if ours is None or "torch.compile" not in measurement.rows:
        return None
    row, theirs = measurement.rows[ours], measurement.samples.get("torch.compile")
    if "error" in row:
        return row["error"]
    if not row["match"]:
        return f"incorrect: {row['worst']} has {row['within']} times the allowed error"
    if theirs is None:
        return "correct; torch.compile failed"
    columns = timing_columns(measurement.samples[ours], theirs)
    low, high = columns["speedup_quartiles"]
    return f"{columns['speedup']:.2f} ({low:.2f} to {high:.2f}), correct"


@pytest.fixture
def tabulate(benchmark, request) -> Callable:
    """Passes one variant's samples and columns to pytest-benchmark; skips missing variants, fails incorrect ones."""

    def report(build: Callable[[], Case], phase: str, variant: str, group: str) -> None:
        measurement = measured(build, phase, request.session, not benchmark.disabled)
        row = measurement.rows.get(variant, dict(reason="the case has no such variant"))
        if not benchmark.disabled:
            request.config.stash[verdicts][group] = against_compile(measurement)
        if "reason" in row:
            pytest.skip(row["reason"])

        def check() -> None:
            assert "error" not in row, row["error"]
            assert row["match"] or "reduced" in row, f"{row['worst']} has {row['within']} times the allowed error"

        samples = measurement.samples.get(variant, [0.0])
        benchmark.group, benchmark._timer = group, Replay(samples)
        benchmark.params = dict(case=group, phase=phase, variant=variant)
        benchmark.extra_info |= row
        benchmark.pedantic(check, rounds=len(samples))

    return report


@pytest.hookimpl(wrapper=True)
def pytest_benchmark_group_stats(config: pytest.Config, benchmarks: list[dict], group_by: str):
    """Names the rows of a case by their variants, unless the command line asks for other names or groups."""
    groups = yield
    if (group_by, config.option.benchmark_name) == ("group", "short"):
        for row in (row for _, rows in groups for row in rows):
            row["name"] = row["params"]["variant"].replace(MEDIUM, '"medium"')
    return groups


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config):
    """Writes below the tables how fast ours is compiled; a regression ends in a sentence, without a traceback."""
    try:
        return (yield)
    except PerformanceRegression as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.TESTS_FAILED)
    finally:
        lines = {group: text for group, text in config.stash[verdicts].items() if text}
        if lines and not config.option.benchmark_quiet:
            terminalreporter.section("ours, compiled: times as fast as torch.compile (quartiles)")
            for group, text in lines.items():
                terminalreporter.write_line(f"{group:<{max(map(len, lines))}}  {text}")


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict) -> None:
    """Leaves facts that last from run to run, as pytest-benchmark warns of any that differ when it compares runs."""
    facts = provenance()
    processor = {name: fact for name, fact in machine_info["cpu"].items() if name != "flags" and "actual" not in name}
    machine_info |= {name: fact for name, fact in facts.items() if name not in MOMENTARY}
    machine_info["cpu"] = processor | dict(capability=torch.backends.cpu.get_cpu_capability())


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: list, output_json: dict) -> None:
    """Adds the command, the commit, the date, GPU, driver, clocks and versions to saved JSON."""
    output_json["provenance"] = provenance()
