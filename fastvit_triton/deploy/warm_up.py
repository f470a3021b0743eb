"""Warm-up: compiles, in threads, the kernels that a model will launch."""

import time
from collections.abc import Callable
from concurrent.futures import as_completed
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..convert.captured import ask_if_new, is_bound
from ..convert.example import unchanged
from ..kernels.compiling import Collector, compiling


class Warmed(NamedTuple):
    """Result of a warm-up: number of kernels, and seconds; kernels in Triton's disk cache take little time."""

    kernels: int
    seconds: float


def warmup(
    model: nn.Module,
    example: Tensor | tuple | dict,
    train: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, all_: None,
) -> Warmed:
    """Compiles, in parallel, the kernels that a model launches for inputs like the example, before its first call.

    The model runs once without launching kernels; the undefined results are discarded. One with captured blocks runs
    twice before that. Buffers and random states are
    restored, and gradients are not written, but hooks of parameters run. Triton caches compiled kernels on disk for
    other processes. Under DDP or FSDP pass the wrapped module. Without a GPU nothing
    is compiled. Captured blocks (see `optimize`) that have no graph, as in an unpickled model, are captured.

    Args:
        model: one of ours, or one that `optimize` converted.
        example: its input, a tuple of its inputs, or a dict of them by name, on its device.
        train: also compile the backward pass.
        on_progress: called with the number of kernels compiled so far and the total.

    Raises:
        TypeError: model is not an nn.Module, or the example is of another type.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}; give an nn.Module")
    start, inputs, named = time.perf_counter(), *given(example)
    if blocks := list(filter(is_bound, model.modules())):
        for module in blocks:
            ask_if_new(module)
        with unchanged(model):  # Dynamo captures nothing under a mode such as the collector's
            run(model, inputs, named, train)
    with unchanged(model), Collector() as collector:
        run(model, inputs, named, train)
    with compiling(collector.launches) as futures:
        for done, future in enumerate(as_completed(futures), 1):
            future.result()
            on_progress(done, len(futures))
    return Warmed(len(futures), time.perf_counter() - start)


def given(example: Tensor | tuple | dict) -> tuple[tuple, dict]:
    """(positional, keyword) inputs from an example."""
    if isinstance(example, dict):
        return (), example
    if not isinstance(example, (Tensor, tuple)):
        raise TypeError(f"example is {type(example).__name__}; give a tensor, a tuple of inputs, or a dict of them")
    return (example if isinstance(example, tuple) else (example,)), {}


def run(model: nn.Module, inputs: tuple, named: dict, train: bool) -> object:
    """Calls a model, if `train` with a backward pass that writes no gradients; returns its outputs."""
    with torch.set_grad_enabled(train):
        outputs = model(*inputs, **named)
        if train:
            differentiable = [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
            learn = [p for p in model.parameters() if p.requires_grad]
            if differentiable and learn:
                torch.autograd.grad(
                    differentiable, learn, [torch.ones_like(t) for t in differentiable], allow_unused=True
                )
    return outputs
