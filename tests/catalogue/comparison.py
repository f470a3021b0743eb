"""Comparison of converted models with their originals: outputs and gradients, and how far these may be apart."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from budget import telling
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from . import MODELS, joined, outputs
from .entry import Given

# Both compute the same sums in another order: at most 84 roundings of the result, as in test_models.py.
EXACT, SINGLE = (84 * torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32))
FEW = 8 * torch.finfo(torch.float32).eps  # a few values of the original are rounded to float32, or one op is in float32
BATCHED = 1e-12  # the statistics of few rows in BatchNorm's backward pass amplify the roundings before it
Results = tuple[Tensor, list[Tensor | None]]


def tolerance(name: str, train: bool) -> float:
    """Largest distance of results of the named model in float64 from those of its original."""
    entry = MODELS[name]
    return FEW if entry.rounded or entry.single else BATCHED if entry.batched and train else EXACT


def run(model: nn.Module, given: Given) -> Results:
    """Outputs, and the gradients of the inputs and of every parameter; random numbers are the same in every call."""
    model.zero_grad()
    given = tree_map_only(Tensor, lambda t: t.clone().requires_grad_() if t.is_floating_point() else t, given)
    torch.manual_seed(2)
    y = outputs(model, given)
    torch.manual_seed(3)
    (y * torch.randn(y.shape, dtype=y.dtype)).sum().backward()
    gradients = [t.grad for t in (*tree_leaves(given), *model.parameters()) if isinstance(t, Tensor)]
    assert any(g is not None for g in gradients)
    return y.detach(), gradients


def distance(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ / ‖b‖ of two tensors."""
    return ((a - b).norm() / telling(b).norm()).item()


def distances(got: Results, want: Results) -> list[float]:
    """Of the outputs, and of all gradients in one vector, as a key's bias has none but rounding; the same have one."""
    assert [g is None for g in got[1]] == [g is None for g in want[1]]
    return [distance(got[0], want[0]), distance(joined(got[1]), joined(want[1]))]


@contextmanager
def unrounded() -> Iterator[None]:
    """Context in which float64 is not cast to float32, as transformers' norms and rotations cast it."""
    narrow, cast = Tensor.float, Tensor.to
    wide = torch.float64

    def to(t: Tensor, *to: Any, **more: Any) -> Tensor:
        return t if t.dtype == wide and to and to[0] is torch.float32 else cast(t, *to, **more)

    Tensor.float, Tensor.to = lambda t, **more: t if t.dtype == wide else narrow(t, **more), to
    try:
        yield
    finally:
        Tensor.float, Tensor.to = narrow, cast
