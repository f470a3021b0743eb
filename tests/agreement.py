"""Comparisons of results that differ by the order of sums, random weights, and errors of one sentence."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from budget import telling
from torch import Tensor, nn

ROUNDINGS = 84  # 1e-5 in float32: sums through many blocks, in another order
EPS64 = torch.finfo(torch.float64).eps


def distance(a: Tensor, b: Tensor, least: float = 0.0) -> float:
    """‖a − b‖ / ‖b‖, with at least this norm of b, which may then be constant."""
    assert a.shape == b.shape
    return float((a - b).detach().norm()) / max(float(telling(b, constant=least > 0).detach().norm()), least)


def same(a: Tensor, b: Tensor, eps: float = EPS64) -> bool:
    """True if ‖a − b‖ is at most the roundings of ‖b‖."""
    return a.shape == b.shape and distance(a, b) <= ROUNDINGS * eps


def close64(got: Tensor, truth: Tensor) -> bool:
    """True within 100 roundings of the largest value: both sides are float64 sums of at most a few dozen terms."""
    return bool((got - telling(truth)).abs().max() <= 100 * EPS64 * truth.abs().max().clamp(min=1))


def normal(module: nn.Module, std: float = 0.3) -> nn.Module:
    """The module, after its parameters were drawn from a normal distribution."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    return module


def seeded(call: Callable, *given: Any, seed: int = 1, **named: Any) -> Any:
    """What a call returns that draws the random numbers of this seed."""
    torch.manual_seed(seed)
    return call(*given, **named)


@contextlib.contextmanager
def one_sentence(words: str | None = None, error: type[Exception] = ValueError) -> Iterator[pytest.ExceptionInfo]:
    """Expects an error whose message is one line, and matches a regular expression if one is given."""
    with pytest.raises(error, match=words) as raised:
        yield raised
    assert "\n" not in str(raised.value)


def results(run: Callable, model: nn.Module, given: Any) -> dict[str, Tensor]:
    """Outputs and every gradient in float64, for a fixed random cotangent."""
    y = run(model, given)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(y.dtype)
    learning = {n: p for n, p in model.named_parameters() if p.requires_grad and p.numel()}
    grads = torch.autograd.grad((y * weights).sum(), list(learning.values()), allow_unused=True)
    found = {n: g.double() for n, g in zip(learning, grads, strict=True) if g is not None}
    return {"output": y.detach().double()} | found
