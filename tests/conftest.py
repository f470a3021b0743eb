"""What all tests share: oracles that import on a machine without CUDA, and the same random numbers each time."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads do not spin: a busy machine stays usable

import pytest
import torch
from triton.runtime.jit import JITFunction

import benchmarks  # noqa: F401  (before timm)
from fastvit_triton.kernels import backend, dispatch, fold, launch


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
