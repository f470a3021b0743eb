"""Compares results with float64: the error may be up to twice PyTorch's error in that dtype plus one rounding."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Named = dict[str, torch.Tensor]

FACTOR = 2  # of the error budget
FLUSHED = torch.finfo(torch.float32).tiny  # kernels sum in float32, and exponentials below it are zero on a GPU


@dataclass(frozen=True)
class Verdict:
    """Comparison of a variant's result with float64."""

    match: bool  # True if every tensor is finite and within its error budget
    # the largest error as a fraction of its budget; infinite if a value is not finite or a tensor is missing
    error: float
    worst: str  # name of the tensor with that error
    off: float = math.inf  # that error relative to the tensor's largest value

    def columns(self) -> dict:
        """Columns of a row: "match", "within" (the error), and "worst" and "off" if there is no match."""
        row = dict(match=self.match, within=round(self.error, 3) if math.isfinite(self.error) else None)
        if self.match:
            return row
        return row | dict(worst=self.worst, off=float(f"{self.off:.2g}") if math.isfinite(self.off) else None)


def leaves(value: object) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested tuples, lists and mappings (transformers' outputs are mappings)."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from leaves(item)


def converted(value: Any, dtype: torch.dtype) -> Any:
    """A copy of the structure with floating-point tensors in another dtype, as leaves of a new autograd graph."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(dtype).requires_grad_(value.requires_grad) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {n: converted(v, dtype) for n, v in value.items()}
    return type(value)(converted(v, dtype) for v in value) if isinstance(value, (tuple, list)) else value


def cotangents(outputs: list[torch.Tensor], seed: int = 7) -> list[torch.Tensor]:
    """Random output gradients, drawn on the outputs' device; they depend only on shapes, not on the dtype."""
    if not outputs:
        return []
    generator = torch.Generator(outputs[0].device).manual_seed(seed)
    return [torch.randn(t.shape, generator=generator, device=t.device).to(torch.bfloat16).to(t.dtype) for t in outputs]


def named_leaves(arguments: dict) -> Named:
    """The tensors in a function's arguments that require gradients, by argument and position."""
    tensors = {f"{n}[{i}]": t for n, v in arguments.items() for i, t in enumerate(leaves(v))}
    return {n: t for n, t in tensors.items() if t.requires_grad}


def outcome(function: Callable, arguments: dict, learning: Named | None, along: Callable = cotangents) -> Named:
    """A function's outputs by name and, unless `learning` is None, gradients for output gradients `along(outputs)`."""
    with torch.set_grad_enabled(learning is not None):
        outputs = [t for t in leaves(function(**arguments)) if t.is_floating_point()]
    results = {f"output {i}": t.detach() for i, t in enumerate(outputs)}
    if learning is None:
        return results
    outputs = [t for t in outputs if t.requires_grad]
    grads = torch.autograd.grad(outputs, list(learning.values()), along(outputs), allow_unused=True)
    return results | {f"gradient of {n}": g for n, g in zip(learning, grads, strict=True) if g is not None}


def largest(tensor: torch.Tensor) -> float:
    """The largest magnitude; NaN if a value is NaN, 0 if there are no values."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference in the dtype of b, computed in slices to save memory."""
    pairs = zip(a.flatten().split(2**26), b.flatten().split(2**26), strict=True)
    distances = [largest(x.to(b.dtype) - y) for x, y in pairs]
    return math.nan if any(map(math.isnan, distances)) else max(distances, default=0.0)


def relative_errors(found: Named, truth: Named) -> dict[str, float]:
    """The largest difference of each tensor from the truth, divided by its largest magnitude."""
    scales = {name: largest(want) for name, want in truth.items()}
    return {name: _distance(found[name], want) / scales[name] for name, want in truth.items() if scales[name]}


def verdict(
    got: Named,
    truth: Named,
    baseline: Named,
    dtype: torch.dtype,
    deep: bool = False,
    usual: Mapping[str, float] | None = None,
    factor: float = FACTOR,
) -> Verdict:
    """Compares the tensors of a variant with the truth."""
    scale = {name: largest(want) for name, want in truth.items()}
    own = {name: _distance(baseline[name], want) for name, want in truth.items() if name in baseline}
    median = statistics.median(error / scale[name] for name, error in own.items() if scale[name]) if deep else 0.0
    floor = {name: max(median, (usual or {}).get(name, 0.0)) for name in truth}
    worst = Verdict(True, 0.0, "")
    for name, want in truth.items():
        if name not in got:
            if name.startswith("output"):
                return Verdict(False, math.inf, name)
            continue
        if got[name].shape != want.shape:
            return Verdict(False, math.inf, name)
        budget = factor * (max(own[name], floor[name] * scale[name]) + torch.finfo(dtype).eps * scale[name])
        budget = max(budget, FLUSHED) if scale[name] else budget
        distance = _distance(got[name], want)
        error = distance / budget if budget else (0.0 if not distance else math.inf)
        if math.isnan(error):
            error = math.inf
        if error > worst.error:
            worst = Verdict(error <= 1, error, name, distance / scale[name] if scale[name] else math.inf)
    return worst
