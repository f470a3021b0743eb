"""`with interpreting():` runs the Triton kernels on CPU tensors in a process that also compiles them.

TRITON_INTERPRET=1 decides at import and then forbids compiling; this context decides at launch. Triton's interpreter
keeps bfloat16 as bit patterns and computes on those: casts and dot products are repaired here, and any other bfloat16
arithmetic raises, because a kernel that needs it is wrong on purpose: values are cast to float32 right after a load.

Every load and store is held to the memory of the launch's tensors: an unmasked lane outside of it raises.
"""

import contextlib
import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from fastvit_triton.kernels import launch
from fastvit_triton.kernels.backend import using_backend

_MADE = {}
_DTYPES = {}
_PATCHES = []  # (object, name, value) of triton.language in the interpreter


def _interpreted(function):
    if function.fn not in _MADE:
        _MADE[function.fn] = interpreter.InterpretedFunction(function.fn)
    return _MADE[function.fn]


def _call(self, *arguments, **options):
    """A device function, called by a kernel, whose launch has patched triton.language."""
    return _interpreted(self).rewrite()(*arguments, **options)


def _language(patch_lang):
    """`patch_lang` for a function that sees both modules of the language: ours see the first, Triton's own the second.

    The interpreter searches the language at every launch and at every call of a device function, which takes most of
    its time; here it is searched once in a process, and patched for as long as a launch runs.
    """

    sees = SimpleNamespace(__globals__=dict(tl=tl, core=tl.core))

    def patch(_):
        scope = interpreter._LangPatchScope()
        if not _PATCHES:
            found = patch_lang(sees)
            _PATCHES.extend((owner, name, getattr(owner, name)) for owner, name, _ in found._changes)
            found.restore()
        for change in _PATCHES:
            scope.set_attr(*change)
        return scope

    return patch


def _remembered(np_dtype):
    """The dtype of an array by the name of its type; the interpreter's own makes a table of all types in each call."""

    def remembered(kind):
        name = kind.scalar.name
        if name not in _DTYPES:
            _DTYPES[name] = np_dtype(kind)
        return _DTYPES[name]

    return remembered


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


def _mm(a, b, out_dtype=None):
    """PyTorch's mm; with another result dtype, which it has on GPUs alone, accumulated and returned in that."""
    return torch.ops.aten.mm(a, b) if out_dtype is None else torch.ops.aten.mm(a.to(out_dtype), b.to(out_dtype))


class Memory:
    """The bytes that the tensors of the launch at hand cover, each from its first element to its last."""

    def __init__(self):
        self.starts = self.ends = np.empty(0, np.uint64)

    def open(self, arguments):
        """Takes the tensors among the arguments and in tuples; ranges that overlap, as views do, become one."""
        given = (t for a in arguments for t in (a if isinstance(a, tuple) else (a,)))
        spans = sorted(_span(t) for t in given if isinstance(t, torch.Tensor) and t.numel())
        merged = []
        for start, end in spans:
            if merged and start < merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end])
        self.starts, self.ends = np.array(merged, np.uint64).reshape(-1, 2).T

    def hold(self, what, pointers, mask):
        """Raises IndexError when an unmasked lane has an address outside, TypeError on a mask that is not of bools."""
        if mask.data.dtype != bool:  # a block & a scalar, spread as int32, which triton 3.9's interpreter refuses
            raise TypeError(
                f"{what} with a mask of {mask.data.dtype}: move its limit instead, m < tl.where(scalar, M, 0)"
            )
        at = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        if not at.size:
            return
        size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        span = np.searchsorted(self.starts, at, "right").astype(np.int64) - 1
        outside = span < 0 if len(self.ends) else np.ones(at.shape, bool)
        outside |= at + np.uint64(size) > np.append(self.ends, np.uint64(0))[span]
        if outside.any():
            raise IndexError(f"{what} of {size} bytes at {int(at[outside][0])}, outside of the launch's tensors")


def _span(tensor):
    """[first byte, one past the last byte) of a tensor, whatever its strides."""
    start, size = tensor.data_ptr(), tensor.element_size()
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * size


_memory = Memory()


def _run(self, *arguments, grid, warmup=False, **options):
    """A launch in the interpreter, with its tensors as the only memory."""
    _memory.open([*arguments, *options.values()])
    return _interpreted(self).run(*arguments, grid=grid, warmup=warmup, **options)


def _launch(kernel, grid, arguments, fixed):
    """A launch by `launch.run`."""
    _run(kernel, *arguments, grid=grid, **fixed)


def _loading(original):
    def load(self, pointers, mask, *rest):
        _memory.hold("a load", pointers, mask)
        return original(self, pointers, mask, *rest)

    return load


def _storing(original):
    def store(self, pointers, values, mask, *rest):
        _memory.hold("a store", pointers, mask)
        return original(self, pointers, values, mask, *rest)

    return store


@contextlib.contextmanager
def interpreting():
    """Kernel launches and device calls go to the interpreter, and the package takes its Triton path on CPU tensors."""
    builder = interpreter.InterpreterBuilder
    # checks of 32-bit overflow are computed and, without `debug`, thrown away
    unchecked = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    dot = builder.create_dot
    patches = [
        (launch, "run", _launch),
        (JITFunction, "run", _run),
        (torch, "mm", _mm),
        (JITFunction, "__call__", _call),
        (interpreter, "_patch_lang_tensor", _indexed(interpreter._patch_lang_tensor)),
        (interpreter, "_get_np_dtype", _remembered(interpreter._get_np_dtype)),
        (interpreter, "_patch_lang", _language(interpreter._patch_lang)),
        (interpreter.interpreter_builder, "options", unchecked),
        (builder, "create_dot", lambda self, a, b, d, *r: dot(self, _widened(a), _widened(b), d, *r)),
        (builder, "create_masked_load", _loading(builder.create_masked_load)),
        (builder, "create_masked_store", _storing(builder.create_masked_store)),
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
    try:
        # exp2 overflows to infinity without a word on a GPU
        with using_backend("triton"), knobs.runtime.scope(), np.errstate(over="ignore"):
            knobs.runtime.interpret = True
            yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function) if function is not None else delattr(owner, name)


@contextlib.contextmanager
def poisoned():
    """Fresh memory is NaN, so that reading memory that no kernel wrote shows in the results."""
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
