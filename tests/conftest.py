"""What all tests share: oracles that import on a machine without CUDA, and the same random numbers each time."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads do not spin: a busy machine stays usable

import pytest
import torch

import benchmarks  # noqa: F401  (before timm)
from fastvit_triton.kernels import fold, op


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test draws the same numbers, alone or in the suite."""
    torch.manual_seed(0)


@pytest.fixture
def references():
    """Fused forwards run on PyTorch, as FASTVIT_TRITON_BACKEND=torch asks."""
    op.set_backend("torch")
    yield
    op.set_backend(None)


@pytest.fixture
def always_folded(monkeypatch):
    """LayerNorms are folded into products whatever the number of rows, so that small cases take that path."""
    monkeypatch.setitem(fold.SPACE, "border", dict(ROWS_PER_OUTPUT=0))
