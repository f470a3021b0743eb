"""Shared setup of all tests: file order, one thread per process, fixed seeds, and a check of restored global state.

With workers (`-n auto --dist loadfile`) a file runs in one process, and files are handed out in order, so those that
take longest come first. Workers share Triton's cache safely: its files are named by content and moved into place.
"""

import logging
import os
import tempfile

# must be set before torch is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tensors are small, and workers share the cores
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads do not spin, so the machine stays usable
if "ATEN_CPU_CAPABILITY" in os.environ:  # Inductor caches code for vectors of one width under keys without the width
    folder = os.path.join(tempfile.gettempdir(), f"inductor-{os.environ['ATEN_CPU_CAPABILITY']}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", folder)

import pytest
import torch
from triton.runtime.jit import JITFunction

import benchmarks  # noqa: F401  (must precede timm)
from fastvit_triton.engine import ways
from fastvit_triton.kernels import backend, fold, launch, onednn, op, settings

_cache = tempfile.TemporaryDirectory(prefix="fastvit_triton_tests_")
os.environ["FASTVIT_TRITON_CACHE"] = _cache.name  # what was measured on this machine must not change choices

# sorted by CPU time of the whole file, longest first
LONGEST = """cli backend convert parallel tune replay kernel_graphs pyramids recovery models static candidates export
export_files interpreter freeze selftest odd_graphs rewriting features pressure benchmarks converted masked hub_cli
claims explain plan launches convert_hooks fake_device recipes train shards readme""".split()


def pytest_configure(config: pytest.Config) -> None:
    """Makes xdist hand out files in the order below instead of by their number of tests."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves the longest files to the front; tests within a file keep their order."""
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture(autouse=True)
def seed() -> None:
    """Seeds every test, so that it draws the same random numbers alone and in the suite."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def unknown_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs as on a CPU without a row, so that results and choices do not depend on the machine."""
    monkeypatch.setattr(settings, "cpu_row", onednn.Row({}))
    monkeypatch.setattr(settings, "reduced", False)


def state() -> dict[str, object]:
    """All global state that a test may change and must restore."""
    hooks = torch.nn.modules.module
    held = {name: dict(getattr(hooks, name)) for name in dir(hooks) if name.startswith("_global_") and "hooks" in name}
    return dict(
        switch=backend._switch,
        target=launch.target,
        plan=(settings.forced, settings.assumed, settings.observer, settings.locator, ways.state.inside_plain),
        registered=dict(op.REGISTERED),
        launch=(launch.run, JITFunction.run),
        call=torch.nn.Module.__call__,
        matmul=torch.Tensor.__matmul__,
        default_dtype=torch.get_default_dtype(),
        ieee=launch.is_ieee(torch.float32),
        hooks=held,
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
def always_folded(monkeypatch):
    """Folds LayerNorms into products for any number of rows, so that small cases take that path."""
    monkeypatch.setitem(fold.SPACE, "border", dict(ROWS_PER_OUTPUT=0))
