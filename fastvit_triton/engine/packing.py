"""Numbers of tokens of packed images, read from the device once in a call of a model."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class PackingState(threading.local):
    """Thread-local state."""

    # (cu_seqlens, tokens of its longest image) of the call that runs; None outside of one
    lengths: tuple[tuple[Tensor, int], ...] | None = None


state = PackingState()


@contextmanager
def one_call() -> Iterator[None]:
    """Context of a call that does not write to cu_seqlens: `longest` reads each tensor once."""
    before = state.lengths
    state.lengths = ()
    try:
        yield
    finally:
        state.lengths = before


def longest(cu_seqlens: Tensor) -> int | None:
    """Number of tokens of the longest image of cu_seqlens [B + 1], for which the host waits; None in a trace."""
    if torch.compiler.is_compiling():
        return None
    tokens = next((length for t, length in state.lengths or () if _same(t, cu_seqlens)), None)
    if tokens is None:
        tokens = int((cu_seqlens[1:] - cu_seqlens[:-1]).max()) if len(cu_seqlens) > 1 else 0
        if state.lengths is not None:
            state.lengths += ((cu_seqlens, tokens),)
    return tokens


def known_lengths(tensors: list[Tensor]) -> tuple[int, ...]:
    """What `longest` gives for those of the tensors that it has read in this call."""
    return tuple(length for boundaries, length in state.lengths or () if any(_same(t, boundaries) for t in tensors))


def _same(a: Tensor, b: Tensor) -> bool:
    """True for the same memory, which a recorded call reads through tensors of its own."""
    if a is b or type(a) is not Tensor or type(b) is not Tensor or a.device.type == "meta":
        return a is b
    return a.data_ptr() == b.data_ptr() != 0 and (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
