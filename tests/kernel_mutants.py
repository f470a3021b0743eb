"""Faults of a kernel's sums, made in Triton's interpreter for any kernel: each must exceed the budget of an op.

with interpreting(), sums_in(torch.float16): ...     # sums are accumulated and kept in float16
with interpreting(), tf32_operands(): ...            # float32 operands of products keep 10 bits of their fraction
with interpreting(), Contributions(drop=site): ...   # 16 terms of one sum are missing
"""

import contextlib
import linecache
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from interpreter import widened
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle

import fastvit_triton

_FOLDER = str(Path(fastvit_triton.__file__).parent / "kernels")
TERMS = 16  # of a sum, that a matrix instruction adds at once


@contextlib.contextmanager
def patched(*patches):
    """Sets (class, name, function) for the duration of the context."""
    with pytest.MonkeyPatch.context() as patch:
        for change in patches:
            patch.setattr(*change)
        yield


def rounded(values, dtype):
    """float32 numbers rounded to nearest even in a dtype of 16 bits."""
    if dtype == torch.float16:
        return values.astype(np.float16).astype(np.float32)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def summed(handle, dtype):
    """A float32 handle rounded to the dtype of sums; others, such as addresses, are unchanged."""
    return TensorHandle(rounded(handle.data, dtype), handle.dtype) if handle.data.dtype == np.float32 else handle


def sums_in(dtype):
    """Products, sums over an axis and additions of float32 numbers add term by term in a dtype of 16 bits."""
    add, total = InterpreterBuilder.create_fadd, ReduceOps.sum

    def dot(self, a, b, d, *_):
        left, right, found = widened(a).data, widened(b).data, rounded(d.data, dtype)
        for k in range(left.shape[-1]):
            found = rounded(found + np.float32(left[..., :, k, None]) * right[..., k, None, :], dtype)
        return TensorHandle(found, d.dtype.scalar)

    def reduce(self, given):
        values = given.handle.data
        if values.dtype != np.float32:
            return total(self, given)
        values = values.reshape(-1) if self.axis is None else np.moveaxis(values, self.axis, 0)
        found = np.zeros(values.shape[1:], np.float32)
        for term in values:
            found = rounded(found + term, dtype).reshape(found.shape)
        return self.to_tensor(np.expand_dims(found, self.axis) if self.keep_dims else found, given.dtype)

    return patched(
        (InterpreterBuilder, "create_dot", dot),
        (InterpreterBuilder, "create_fadd", lambda self, a, b: summed(add(self, a, b), dtype)),
        (ReduceOps, "sum", reduce),
    )


def tf32(handle):
    """A float32 handle with 10 bits of fraction, to nearest, as a GPU's TF32 instructions read it."""
    bits = np.ascontiguousarray(handle.data, np.float32).view(np.uint32) + np.uint32(1 << 12)
    return TensorHandle((bits & np.uint32(0xFFFFE000)).view(np.float32), handle.dtype)


def tf32_operands():
    """Products of float32 matrices round their operands to TF32."""
    dot = InterpreterBuilder.create_dot
    return patched((InterpreterBuilder, "create_dot", lambda self, a, b, *rest: dot(self, tf32(a), tf32(b), *rest)))


def place():
    """Lines of the kernel that is running, from that of the current operation outwards: "file.function: source < …"."""
    frame, found = sys._getframe(2), []
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_FOLDER):
            line = linecache.getline(code.co_filename, frame.f_lineno).strip()
            found.append(f"{Path(code.co_filename).stem}.{code.co_name}: {line}")
            if code.co_name.endswith("_kernel"):
                break
        frame = frame.f_back
    return " < ".join(found)


class Contributions:
    """A context that counts the contributions to sums at each place of the kernels, or drops one.

    A contribution is the product of two tiles, the sum of a tile over an axis or, with `additions`, the addition of a
    tile. Those of zeros, such as rows past the end, do not count.

    Args:
        drop: (place, number) from `last`: the contribution that loses its first TERMS terms, in every program of the
            kernel with so many.
        additions: whether additions of float32 tiles are sums, as in kernels without products.

    Attributes:
        last: place → number of contributions, in the program with most of them.
        products: places of products.
    """

    def __init__(self, drop=None, additions=False):
        self.drop, self.additions = drop, additions
        self.last, self.products, self._seen = {}, set(), {}

    def __enter__(self):
        dot, total = InterpreterBuilder.create_dot, ReduceOps.sum
        add, move = InterpreterBuilder.create_fadd, InterpreterBuilder.set_grid_idx

        def dropping_dot(builder, a, b, *rest):
            here, without = place(), a.data.copy()
            without[..., :TERMS] = 0
            self.products.add(here)
            left = TensorHandle(without, a.dtype) if self._drops(here, a.data[..., :TERMS]) else a
            return dot(builder, left, b, *rest)

        def dropping_sum(reduction, given):
            values = given.handle.data
            if values.dtype == np.float32:
                here, without = place(), values.copy()
                first = np.moveaxis(without, reduction.axis or 0, 0)[:TERMS]
                if self._drops(here, first):
                    first[...] = 0
                    given = reduction.to_tensor(without, given.dtype)
            return total(reduction, given)

        def dropping_add(builder, a, b):
            tile = self.additions and b.data.dtype == np.float32
            return a if tile and self._drops(place(), b.data) else add(builder, a, b)

        def next_program(builder, *index):
            self._seen.clear()
            return move(builder, *index)

        self._patches = patched(
            (InterpreterBuilder, "create_dot", dropping_dot),
            (InterpreterBuilder, "create_fadd", dropping_add),
            (InterpreterBuilder, "set_grid_idx", next_program),
            (ReduceOps, "sum", dropping_sum),
        )
        self._patches.__enter__()
        return self

    def __exit__(self, *error):
        return self._patches.__exit__(*error)

    def _drops(self, here, terms):
        """Counts a contribution of these terms; True if it is the one to drop."""
        if not terms.any():
            return False
        number = self._seen[here] = self._seen.get(here, 0) + 1
        self.last[here] = max(self.last.get(here, 0), number)
        return self.drop == (here, number)
