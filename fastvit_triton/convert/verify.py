"""Compares converted modules with the originals, in float64 on the PyTorch path."""

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..kernels.backend import using_backend
from .example import arguments

TOLERANCE = 1e-6  # ‖ours − original‖ / ‖original‖; models round some values to float32, which gives about 1e-7


def differences(original: nn.Module, converted: nn.Module, paths: Iterable[str], inputs: Any) -> dict[str, float]:
    """Relative difference of the outputs of each converted module, for the inputs that it has in the original model."""
    errors: dict[str, float] = {}
    with torch.no_grad(), using_backend("torch"):
        handles = [
            original.get_submodule(path).register_forward_hook(
                partial(_compare, errors, path, converted.get_submodule(path)), with_kwargs=True
            )
            for path in paths
        ]
        args, named = arguments(tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, inputs))
        try:
            original(*args, **named)
        finally:
            for handle in handles:
                handle.remove()
    return errors


def as_double(model: nn.Module) -> nn.Module:
    """A copy in float64 and in evaluation mode."""
    return copy.deepcopy(model).double().eval()


def _compare(
    errors: dict[str, float],
    path: str,
    converted: nn.Module,
    module: nn.Module,
    inputs: tuple,
    named: dict,
    output: object,
) -> None:
    """Forward hook of an original: runs the converted module on the same inputs."""
    results = [[t for t in tree_leaves(y) if isinstance(t, Tensor)] for y in (converted(*inputs, **named), output)]
    worst = max((_distance(a, b) for a, b in zip(*results, strict=False)), default=0.0)
    errors[path] = max(errors.get(path, 0.0), worst if len(results[0]) == len(results[1]) else float("inf"))


def _distance(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    distance, size = (t.double().norm().item() for t in (a.double() - b.double(), b))
    return distance / size if size else distance
