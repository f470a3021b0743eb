"""What all tests share: the order of files, one thread a process, the same random numbers, and a check of what is left.

With workers (`-n auto --dist loadfile`) a file runs in one process, and files are handed out in order, so those that
take longest come first. Workers share Triton's cache: its files are named by content and moved into place whole.
"""

import os

# before torch is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tensors are small, and workers share the cores
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads do not spin: a busy machine stays usable

import pytest
import torch
from triton.runtime.jit import JITFunction

import benchmarks  # noqa: F401  (before timm)
from fastvit_triton.kernels import backend, dispatch, fold, launch

# as `--durations=0` says
LONGEST = """backend convert parallel cli static export interpreter freeze benchmarks kernel_graphs explain dispatch
models pressure convert_hooks recovery recipes train shards readme masked""".split()


def pytest_configure(config: pytest.Config) -> None:
    """Files are handed out as ordered below, and not by their numbers of tests."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first; tests of a file keep their order."""
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test draws the same numbers, alone or in the suite."""
    torch.manual_seed(0)


def state() -> dict[str, object]:
    """Everything global that a test may change and must put back."""
    hooks = torch.nn.modules.module
    held = {name: dict(getattr(hooks, name)) for name in dir(hooks) if name.startswith("_global_") and "hooks" in name}
    return dict(
        switch=backend._switch,
        target=launch.target,
        forced=dispatch.forced,
        launch=JITFunction.run,
        call=torch.nn.Module.__call__,
        matmul=torch.Tensor.__matmul__,
        default_dtype=torch.get_default_dtype(),
        precision=torch.get_float32_matmul_precision(),
        hooks=held,
    )


@pytest.fixture(autouse=True)
def restored():
    """A test leaves the switch, hooks of every module, and Triton's launcher as it found them."""
    before = state()
    yield
    assert state() == before


@pytest.fixture
def switch():
    """For tests that call `set_backend`: restores the switch."""
    with backend.using_backend(None):
        yield


@pytest.fixture
def references():
    """Fused forwards run on PyTorch, as FASTVIT_TRITON_BACKEND=torch asks."""
    with backend.using_backend("torch"):
        yield


@pytest.fixture
def always_folded(monkeypatch):
    """LayerNorms are folded into products whatever the number of rows, so that small cases take that path."""
    monkeypatch.setitem(fold.SPACE, "border", dict(ROWS_PER_OUTPUT=0))
