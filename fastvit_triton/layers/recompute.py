"""Blocks that are computed again in the backward pass instead of storing their activations."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


def recomputed(block: nn.Module, *inputs: Any) -> Any:
    """block(*inputs), computed again in the backward pass, which leaves the running statistics of BatchNorms alone.

    Under torch.compile the statistics are updated as `torch.utils.checkpoint` does.
    """
    norms = [m for m in block.modules() if isinstance(m, _BatchNorm) and m.training and m.track_running_stats]
    if not norms or torch.compiler.is_compiling():
        return checkpoint(block, *inputs, use_reentrant=False)
    return checkpoint(block, *inputs, use_reentrant=False, context_fn=lambda: (nullcontext(), _untracked(norms)))


@contextmanager
def _untracked(norms: list[Any]) -> Iterator[None]:
    """The norms use the statistics of the batch, as in training; the running ones keep their values."""
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
        norm.num_batches_tracked = None
    try:
        yield
    finally:
        for norm, momentum, batches in before:
            norm.momentum = momentum
            norm.num_batches_tracked = batches
