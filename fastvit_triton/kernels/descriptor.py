"""Tensor descriptors: how a launch names them, and how they reach a kernel.

A parameter of a kernel whose name ends in `_desc` is a descriptor of TMA, by which one instruction copies a box of a
tensor between global and shared memory: zeros are read outside of the tensor, and nothing is written there. In a launch
its argument is a plain tuple (tensor, shape, strides, box), so that recorders see the tensor as in any other tuple. The
compile-time arguments must determine the box.

Triton's own launch takes a `TensorDescriptor`, which its launcher encodes at each launch. A direct launch encodes it
once per address, shape, strides, and what the binary fixes: box and dtype. An encoding is 128 bytes that the launch
passes by value; it holds no memory and stays right wherever that address is valid, also in CUDA graphs.
"""

import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from .tile import Kernel, tensor_descriptor

SUFFIX = "_desc"
MAX_ENCODED = 4096
_encoded: dict[tuple, list] = {}  # what Triton's launcher takes for a descriptor, by its content


def heads_first(t: Tensor) -> bool | None:
    """Whether [B, H, N, D] is in memory [B·H, N, D], or else [B, N, H·D]; None if it is neither or a stride is odd.

    Strides must be positive multiples of 16 bytes below 2⁴⁰, except those of axes of size 1.
    """
    (B, H, N, D), (image, head, token, channel), size = t.shape, t.stride(), t.element_size()
    used = [stride * size for axis, stride in ((B, image), (H, head), (N, token)) if axis > 1]
    if channel != 1 or D * size % 16 or any(not 0 < stride < 2**40 or stride % 16 for stride in used):
        return None
    if H == 1 or head == D:
        return False
    return True if B == 1 or image == H * head else None


def aligned(*tensors: Tensor) -> bool:
    """True if all tensors start at a multiple of 16 bytes; a fake tensor, which has no address, counts as one."""
    return all(hasattr(t, "fake_mode") or t.data_ptr() % 16 == 0 for t in tensors)


def boxes(t: Tensor, first: bool, rows: int) -> tuple[tuple, tuple, tuple]:
    """(shape, strides, box) of [B, H, N, D] in boxes of so many rows of one head; `first` is that of `heads_first`."""
    (B, H, N, D), (image, head, token, _) = t.shape, t.stride()
    shape, outer = ((B * H, N, D), head) if first else ((B, N, H * D), image)
    strides = (outer if shape[0] > 1 else D, token if N > 1 else D, 1)  # of one row, a stride is not used but checked
    return shape, strides, (1, rows, D)


def described(kernel: Kernel, arguments: tuple) -> tuple:
    """The arguments of a kernel with Triton's `TensorDescriptor` for each descriptor."""
    return tuple(map(given, kernel.arg_names, arguments)) if takes_descriptors(kernel) else arguments


def given(name: str, argument: Any) -> Any:
    """What Triton takes for the argument of this name."""
    return tensor_descriptor(*argument) if name.endswith(SUFFIX) and isinstance(argument, tuple) else argument


def bases(kernel: Kernel, arguments: tuple) -> tuple:
    """The arguments of a kernel with the tensors of descriptors in their place, which select the same binary."""
    return tuple([a[0] if n.endswith(SUFFIX) and a else a for n, a in zip(kernel.arg_names, arguments, strict=False)])


def takes_descriptors(kernel: Kernel) -> bool:
    """True if a kernel has descriptors, which are its first parameters."""
    return kernel.arg_names[0].endswith(SUFFIX)


def launcher(kernel: Kernel, compiled: Any) -> Callable:
    """A function that takes the arguments of a binary's launcher, with addresses or tensors, in tuples for descriptors.

    Where Triton's launcher is known, descriptors are encoded once; else Triton's own launch encodes them each time.
    """
    run, count = compiled.run, sum(name.endswith(SUFFIX) for name in kernel.arg_names)
    try:
        known = inspect.getclosurevars(run.launch).nonlocals
        direct, metas = known["launcher"], known["tensordesc_meta"]
        encode = sys.modules[type(run).__module__].make_tensordesc_arg
        options = run.launch_cooperative_grid, run.launch_pdl
        plain = not run.global_scratch_size and not run.profile_scratch_size and None not in metas
        known_release = plain and len(inspect.signature(encode).parameters) == 2  # three from triton 3.8 on
    except (AttributeError, KeyError, TypeError):
        known_release = False
    if not known_release:
        return lambda *given: run(*given[:9], *[a and _plain(a) for a in given[9 : 9 + count]], *given[9 + count :])
    listed = (run.arg_annotations, run.kernel_signature) if hasattr(run, "kernel_signature") else None  # triton 3.7
    kinds = [(tuple(map(str, meta.items())), meta) for meta in metas]

    def launch(x, y, z, stream, function, metadata, _, enter, leave, *arguments):
        flat, used = [], iter(kinds)
        for argument in arguments[:count]:
            if argument is None:
                flat.append(None)
                continue
            base, shape, strides, _box = argument
            kind, meta = next(used)
            key = base if type(base) is int else base.data_ptr(), shape, strides, kind
            found = _encoded.get(key)
            if found is None:
                if len(_encoded) >= MAX_ENCODED:
                    _encoded.clear()
                found = _encoded[key] = encode(_plain(argument), meta)
            flat += found
        flat += arguments[count:]
        if listed:
            direct(x, y, z, stream, function, *options, metadata, None, None, None, None, None, *listed, flat)
        else:
            direct(x, y, z, stream, function, *options, None, None, metadata, None, None, None, *flat)

    return launch


def _plain(argument: tuple) -> SimpleNamespace:
    """A descriptor as Triton's launcher reads it, of a tensor or an address."""
    base, shape, strides, box = argument
    address = base if type(base) is int else base.data_ptr()
    return SimpleNamespace(
        base=SimpleNamespace(data_ptr=lambda: address), shape=list(shape), strides=list(strides),
        block_shape=list(box), padding="zero", round_f32_to_tf32=False,
    )  # fmt: skip
