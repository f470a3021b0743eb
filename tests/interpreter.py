"""`with interpreting():` runs the Triton kernels on CPU tensors in a process that also compiles them.

TRITON_INTERPRET=1 takes effect at import and then forbids compiling; this context takes effect at launch. Triton's
interpreter stores bfloat16 as bit patterns and computes on those: casts and dot products are corrected here, and any
other bfloat16 arithmetic raises, because our kernels must cast values to float32 right after a load.

Every load and store is checked against the memory of the launch's tensors: an unmasked lane outside of it raises.
"""

import contextlib
import dataclasses
import functools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from fastvit_triton.kernels import launch
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.descriptor import described

_MADE = {}
_DTYPES = {}
_PATCHES = []  # (object, name, value) of triton.language in the interpreter


def _interpreted(function):
    if function.fn not in _MADE:
        _MADE[function.fn] = interpreter.InterpretedFunction(function.fn)
    return _MADE[function.fn]


def _call(self, *arguments, **options):
    """Calls a device function from a kernel whose launch has already patched triton.language."""
    return _interpreted(self).rewrite()(*arguments, **options)


def _language(patch_lang):
    """`patch_lang` for a function that sees both language modules: our kernels use the first, Triton's own the second.

    The interpreter searches the language at every launch and at every call of a device function, which takes most of
    its time; here it is searched once per process, and patched for the duration of a launch.
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
    """Caches the dtype of an array by its type's name; the interpreter builds a table of all types in each call."""

    def remembered(kind):
        name = kind.scalar.name
        if name not in _DTYPES:
            _DTYPES[name] = np_dtype(kind)
        return _DTYPES[name]

    return remembered


@functools.cache
def _shape(sizes):
    """(number of values, shape) of a tensor, which Triton makes again for each of them."""
    return tl.constexpr(math.prod(sizes)), tl.tuple([tl.constexpr(size) for size in sizes])


def _tensor(self, handle, type):
    """`tl.tensor.__init__` with shared shapes."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _shape(tuple(type.shape.values) if type.is_block() else ())


def _block_type(original):
    """`tl.block_type.__init__`, which checks each shape once; equal shapes are one object."""
    made = {}

    def init(self, element_ty, shape):
        sizes = tuple([getattr(size, "value", size) for size in shape])
        if sizes not in made:
            original(self, element_ty, shape)
            made[sizes] = self.shape, self.numel, f"<{self.shape}, "
        self.element_ty = element_ty
        self.shape, self.numel, start = made[sizes]
        self.name = f"{start}{element_ty}>"

    return init


def _broadcast(original):
    """`broadcast_impl_value`, which compares equal shapes number by number."""

    def broadcast(self, lhs, rhs):
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return original(self, lhs, rhs)

    return broadcast


def _indexed(original):
    """Makes triton 3.6's scalars, which are arrays of one value, usable as indices; NumPy 2.4 rejects them."""

    def patch(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch


def _is_bf16(handle) -> bool:
    return getattr(handle.dtype, "scalar", handle.dtype) == tl.bfloat16


def widened(handle):
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
    """Rounds float32 → bfloat16 to nearest even, like a GPU; the stock interpreter truncates."""

    def cast(self, source, target, *rest):
        if target.scalar == tl.bfloat16 and source.dtype.scalar == tl.float32:
            values = torch.from_numpy(np.ascontiguousarray(source.data, np.float32)).to(torch.bfloat16)
            return interpreter.TensorHandle(values.view(torch.uint16).numpy(), target.scalar)
        return original(self, source, target, *rest)

    return cast


def _mm(a, b, out_dtype=None, *, out=None, _original=torch.mm):
    """PyTorch's mm with `out_dtype` on the CPU (PyTorch has it only on GPUs); accumulates and returns in that dtype."""
    return _original(a, b, out=out) if out_dtype is None else _original(a.to(out_dtype), b.to(out_dtype))


_mm.__name__ = "mm"  # Inductor keeps functions by this name, also if it is imported now


class Memory:
    """The memory of the current launch's tensors, each from its first to its last element."""

    def __init__(self):
        self.starts = self.ends = np.empty(0, np.uint64)

    def open(self, arguments):
        """Registers the tensors among the arguments and in tuples; overlapping ranges, such as views, are merged."""
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
        """Raises IndexError if an unmasked lane is out of bounds, and TypeError if the mask is not boolean."""
        allowed = np.asarray(mask.data)  # a handle's, or a buffer of the array that is a descriptor's mask
        if allowed.dtype != bool:  # block & scalar, broadcast as int32, which triton 3.9 rejects
            raise TypeError(
                f"{what} with a mask of {allowed.dtype}: move its limit instead, m < tl.where(scalar, M, 0)"
            )
        at = pointers.data[np.broadcast_to(allowed, pointers.data.shape)]
        if not at.size:
            return
        size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        span = np.searchsorted(self.starts, at, "right").astype(np.int64) - 1
        outside = span < 0 if len(self.ends) else np.ones(at.shape, bool)
        outside |= at + np.uint64(size) > np.append(self.ends, np.uint64(0))[span]
        if outside.any():
            raise IndexError(f"{what} of {size} bytes at {int(at[outside][0])}, outside of the launch's tensors")


def _span(tensor):
    """[first byte, one past the last byte) of a tensor with any strides."""
    start, size = tensor.data_ptr(), tensor.element_size()
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * size


_memory = Memory()


def _run(self, *arguments, grid, warmup=False, **options):
    """Runs a launch in the interpreter, where only its tensors may be accessed."""
    _memory.open([*arguments, *options.values()])
    return _interpreted(self).run(*described(self, arguments), grid=grid, warmup=warmup, **options)


def _launch(kernel, grid, arguments, fixed):
    """Runs a launch made by `launch.run`."""
    _run(kernel, *arguments, grid=grid, **fixed)


def _loading(original):
    def load(self, pointers, mask, *rest, **named):
        _memory.hold("a load", pointers, mask)
        return original(self, pointers, mask, *rest, **named)

    return load


def _storing(original):
    def store(self, pointers, values, mask, *rest, **named):
        _memory.hold("a store", pointers, mask)
        return original(self, pointers, values, mask, *rest, **named)

    return store


@contextlib.contextmanager
def interpreting():
    """Runs kernels and device functions in the interpreter; the package takes its Triton path on CPU tensors."""
    builder = interpreter.InterpreterBuilder
    # overflow checks are computed and, without `debug`, discarded
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
        (tl.tensor, "__init__", _tensor),
        (tl.block_type, "__init__", _block_type(tl.block_type.__init__)),
        (TritonSemantic, "broadcast_impl_value", _broadcast(TritonSemantic.broadcast_impl_value)),
        (builder, "create_dot", lambda self, a, b, d, *r: dot(self, widened(a), widened(b), d, *r)),
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
        # as on a GPU: exp2 overflows to infinity, and in rows that are not stored infinity times 0 is NaN
        with using_backend("triton"), knobs.runtime.scope(), np.errstate(over="ignore", invalid="ignore"):
            knobs.runtime.interpret = True
            yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function) if function is not None else delattr(owner, name)


@contextlib.contextmanager
def poisoned():
    """Fills newly allocated memory with NaN, so that reading memory that no kernel wrote shows in the results."""
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
