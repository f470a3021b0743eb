"""Shared setup of all tests: order, turns, one thread per process, fixed seeds, and a check of restored global state.

With workers (`-n auto --dist loadfile`) a file runs in one process, and files are handed out in order, so those that
take longest come first. Workers share Triton's cache safely: its files are named by content and moved into place.
"""

import logging
import os
import tempfile
from pathlib import Path

# must be set before torch is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tensors are small, and workers share the cores
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads do not spin, so the machine stays usable
if "ATEN_CPU_CAPABILITY" in os.environ:  # Inductor caches code for vectors of one width under keys without the width
    folder = os.path.join(tempfile.gettempdir(), f"inductor-{os.environ['ATEN_CPU_CAPABILITY']}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", folder)

import cpu_seconds
import pytest
import torch
import turns
from sampling import Few
from triton.runtime.jit import JITFunction

import benchmarks  # noqa: F401  (must precede timm)
from fastvit_triton.engine import ways
from fastvit_triton.engine.replay import record
from fastvit_triton.kernels import backend, fold, launch, onednn, op, settings

_cache = tempfile.TemporaryDirectory(prefix="fastvit_triton_tests_")
os.environ["FASTVIT_TRITON_CACHE"] = _cache.name  # what was measured on this machine must not change choices
TURN_SECONDS = pytest.StashKey[list[float]]()
LEFT = pytest.StashKey[dict[str, float]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options of turns and of the table of CPU seconds."""
    parser.addoption("--in-turn", action="store_true", help="of the full tests, those that are in turn (tests/turn)")
    parser.addoption("--record-cpu", action="store_true", help="bring tests/cpu_seconds.json up to date")


def pytest_configure(config: pytest.Config) -> None:
    """Measures CPU seconds; makes xdist hand out files in the order below instead of by their number of tests."""
    config.option.loadscopereorder = False
    config.pluginmanager.register(cpu_seconds.Recorder(config))
    config.pluginmanager.register(Few())


@pytest.hookimpl(trylast=True)  # after tests were deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests that are in turn, and moves the longest files to the front; within a file the order stays."""
    if config.option.collectonly:
        turn_seconds = [sum(cpu_seconds.expected(i for i in items if turns.runs(i, n)).values()) for n in range(24)]
        config.stash[TURN_SECONDS] = [sum(cpu_seconds.expected(items).values()), min(turn_seconds), max(turn_seconds)]
    if config.getoption("--in-turn"):
        chosen, left = turns.chosen(items)
        getattr(config, "workeroutput", {})["left"] = config.stash[LEFT] = left
        config.hook.pytest_deselected(items=list(set(items).difference(chosen)))
        items[:] = chosen
    seconds = cpu_seconds.expected(items)
    items.sort(key=lambda item: -seconds[item.path.stem])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    """Takes what a worker left out."""
    if left := getattr(node, "workeroutput", {}).get("left"):  # not of a worker that crashed
        node.config.stash[LEFT] = left


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Prints the turn when tests fail, and when they are only collected the CPU seconds that they will take."""
    if config.getoption("--in-turn") and terminalreporter.stats.get("failed"):
        terminalreporter.write_line(f"FASTVIT_TURN={turns.TURN} repeats this turn")
    for file, seconds in config.stash.get(LEFT, {}).items():
        terminalreporter.write_line(f"only in turn, for its length of {seconds:.0f} CPU seconds: {file}")
    if config.option.collectonly:
        every, least, most = config.stash[TURN_SECONDS]
        terminalreporter.write_line(f"expected: {every:.0f} CPU seconds, {least:.0f} to {most:.0f} with --in-turn")


@pytest.fixture(autouse=True)
def seed() -> None:
    """Seeds every test, so that it draws the same random numbers alone and in the suite."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def unknown_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs as on a CPU without a row, in a new process: choices depend on no machine and no other test."""
    monkeypatch.setattr(settings, "cpu_row", onednn.OneDnnRow({}))
    monkeypatch.setattr(settings, "reduced", False)
    monkeypatch.setattr(onednn, "_rows", set())


def state() -> dict[str, object]:
    """All global state that a test may change and must restore."""
    hooks = torch.nn.modules.module
    held = {name: dict(getattr(hooks, name)) for name in dir(hooks) if name.startswith("_global_") and "hooks" in name}
    return dict(
        switch=backend._switch,
        target=launch.target,
        plan=(settings.forced, settings.assumed, settings.observer, settings.locator, ways.state.inside_plain),
        registered=dict(op.REGISTERED),
        launch=(launch.run, JITFunction.run, JITFunction._do_compile),
        call=torch.nn.Module.__call__,
        matmul=torch.Tensor.__matmul__,
        default_dtype=torch.get_default_dtype(),
        ieee=launch.is_ieee(torch.float32),
        hooks=held,
        measured=sorted(Path(_cache.name).glob("*.json")),
    )


@pytest.fixture(autouse=True)
def restored():
    """Checks that a test restores the global state."""
    before = state()
    yield
    assert state() == before


class Raise(logging.Handler):
    """Raises what is logged to it."""

    def emit(self, record):
        raise AssertionError(record.getMessage())


# a graph whose rewriting fails is left to Inductor with a warning; in tests this is an error
logging.getLogger("fastvit_triton.convert.backend").addHandler(Raise(logging.WARNING))


@pytest.fixture
def switch():
    """Restores the switch after tests that call `set_backend`."""
    with backend.using_backend(None):
        yield


@pytest.fixture
def references():
    """Runs fused forwards on PyTorch, like FASTVIT_TRITON_BACKEND=torch."""
    with backend.using_backend("torch"):
        yield


@pytest.fixture
def fresh_dynamo():
    """Resets Dynamo, so that no test sees graphs of another."""
    yield
    torch._dynamo.reset()


@pytest.fixture
def replayed(monkeypatch):
    """Grows with each replay of a record that is made from now on."""
    found, real = [], record.emit

    def emit(plan):
        made = real(plan)
        return made._replace(run=lambda *given: found.append(1) or made.run(*given))

    monkeypatch.setattr(record, "emit", emit)
    return found


@pytest.fixture
def undrawn(monkeypatch):
    """Saves empty files in place of figures, in tests that look at none."""

    def save(figure, file, **options):
        if not hasattr(file, "write"):
            Path(file).touch()

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", save)


@pytest.fixture
def always_folded(monkeypatch):
    """Folds LayerNorms into products for any number of rows, so that small cases take that path."""
    monkeypatch.setitem(fold.SPACE, "border", dict(ROWS_PER_OUTPUT=0))
