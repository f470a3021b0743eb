"""`with interpreting():` runs the Triton kernels on CPU tensors in a process that also compiles them.

TRITON_INTERPRET=1 decides at import and then forbids compiling; this context decides at launch. Triton's interpreter
keeps bfloat16 as bit patterns and computes on those: casts and dot products are repaired here, and any other bfloat16
arithmetic raises, because a kernel that needs it is wrong on purpose: values are cast to float32 right after a load.
"""

import contextlib
import math

import numpy as np
import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from fastvit_triton.kernels import op

_MADE = {}


def _interpreted(function):
    return _MADE.setdefault(function.fn, interpreter.InterpretedFunction(function.fn))


def _call(self, *arguments, **options):
    """A device function, as the interpreter calls it, but leaving triton.language as it was found."""
    function = _interpreted(self)
    scope = interpreter._patch_lang(function.fn)
    try:
        return function.rewrite()(*arguments, **options)
    finally:
        scope.restore()


def _indexed(original):
    """triton 3.6's scalars are arrays of one value, which NumPy from 2.4 on takes for no index."""

    def patch(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch


def _is_bf16(handle) -> bool:
    return getattr(handle.dtype, "scalar", handle.dtype) == tl.bfloat16


def _widened(handle):
    """A bfloat16 handle as float32 values."""
    if not _is_bf16(handle):
        return handle
    return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _refusing(what, original):
    def guarded(self, *arguments):
        if any(isinstance(a, interpreter.TensorHandle) and _is_bf16(a) for a in arguments):
            raise NotImplementedError(f"bfloat16 {what}: cast to float32 first")
        return original(self, *arguments)

    return guarded


def _refusing_reduction(original):
    def guarded(self, inputs):
        if any(_is_bf16(x.handle) for x in (inputs if isinstance(inputs, (tuple, list)) else (inputs,))):
            raise NotImplementedError("bfloat16 reduction: cast to float32 first")
        return original(self, inputs)

    return guarded


def _rounding(original):
    """float32 → bfloat16 rounds to nearest even, as a GPU does; the stock interpreter truncates."""

    def cast(self, source, target, *rest):
        if target.scalar == tl.bfloat16 and source.dtype.scalar == tl.float32:
            values = torch.from_numpy(np.ascontiguousarray(source.data, np.float32)).to(torch.bfloat16)
            return interpreter.TensorHandle(values.view(torch.uint16).numpy(), target.scalar)
        return original(self, source, target, *rest)

    return cast


@contextlib.contextmanager
def interpreting():
    """Kernel launches and device calls go to the interpreter, and the package takes its Triton path on CPU tensors."""
    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot
    patches = [
        (
            JITFunction,
            "run",
            lambda self, *a, grid, warmup=False, **k: _interpreted(self).run(*a, grid=grid, warmup=warmup, **k),
        ),
        (JITFunction, "__call__", _call),
        (interpreter, "_patch_lang_tensor", _indexed(interpreter._patch_lang_tensor)),
        (builder, "create_dot", lambda self, a, b, d, *r: dot(self, _widened(a), _widened(b), d, *r)),
        (builder, "binary_op", _refusing("arithmetic", builder.binary_op)),
        (builder, "unary_op", _refusing("arithmetic", builder.unary_op)),
        (builder, "cast_impl", _rounding(builder.cast_impl)),
        (builder, "create_fp_to_fp", _rounding(builder.create_fp_to_fp)),
        (interpreter.ReduceOps, "apply", _refusing_reduction(interpreter.ReduceOps.apply)),
        (interpreter.ScanOps, "apply", _refusing_reduction(interpreter.ScanOps.apply)),
    ]
    before = [(owner, name, owner.__dict__.get(name)) for owner, name, _ in patches]
    for owner, name, function in patches:
        setattr(owner, name, function)
    op.set_backend("triton")
    try:
        with knobs.runtime.scope(), np.errstate(over="ignore"):  # exp2 overflows to infinity without a word on a GPU
            knobs.runtime.interpret = True
            yield
    finally:
        op.set_backend(None)
        for owner, name, function in before:
            setattr(owner, name, function) if function is not None else delattr(owner, name)


@contextlib.contextmanager
def poisoned():
    """Fresh memory is NaN: what a kernel leaves unwritten and somebody reads shows in the results."""
    makers = [(torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")]
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in makers:
            patch.setattr(owner, name, _filling(getattr(owner, name)))
        yield


def _filling(allocate):
    def filled(*arguments, **options):
        made = allocate(*arguments, **options)
        return made.fill_(math.nan) if made.is_floating_point() else made

    return filled
