"""Records kernel launches of the public functions on CPU tensors and compiles them for GPUs that are not present.

`record` runs a function and records its launches instead of running them: sizes, alignments and launch parameters,
without values. `compiled` compiles a launch for another target, specialised like a real launch.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from unittest.mock import patch

import numpy
import torch
from torch.overrides import TorchFunctionMode
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from fastvit_triton.kernels import launch as launcher
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.descriptor import given
from fastvit_triton.kernels.launch import targeting

from .no_device import Driver


class Pointer:
    """A tensor in a recorded launch: its size and the properties that Triton specialises on."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.shape = tensor.dtype, tuple(tensor.shape)
        self.nbytes, self._address = tensor.numel() * tensor.element_size(), tensor.data_ptr()
        self._range = tensor.untyped_storage().nbytes()
        strides = tuple(stride * tensor.element_size() for stride in tensor.stride())
        self.__array_interface__ = dict(
            version=3,
            typestr=f"|V{tensor.element_size()}",
            shape=self.shape,
            strides=strides,
            data=(self._address, True),
        )

    def data_ptr(self) -> int:
        """Address of the tensor."""
        return self._address

    def ptr_range(self) -> int:
        """Bytes of its storage; below 2 GiB the AMD compiler uses 32-bit offsets."""
        return self._range

    def overlaps(self, other: "Pointer") -> bool:
        """True if an element of both is at the same address; their memory is not read, and may have been freed."""
        return numpy.shares_memory(numpy.asarray(self), numpy.asarray(other))


@dataclass(frozen=True)
class Launch:
    """One recorded launch: `values` are the kernel's arguments by name, `options` are Triton's."""

    kernel: JITFunction
    grid: tuple[int, ...]
    values: dict
    options: dict

    @property
    def name(self) -> str:
        """Name of the operation and of the function, as in "linear._fwd_kernel"."""
        return f"{self.kernel.fn.__module__.rsplit('.', 1)[-1].removesuffix('_backward')}.{self.kernel.fn.__name__}"

    @property
    def programs(self) -> int:
        """Number of programs in the grid."""
        return math.prod(self.grid)

    @property
    def tensors(self) -> list[Pointer]:
        """All tensors among the arguments, including those in tuples."""
        arguments = (t for v in self.values.values() for t in (v if isinstance(v, tuple) else (v,)))
        return [t for t in arguments if isinstance(t, Pointer)]

    @property
    def overlaps(self) -> list[tuple[int, int]]:
        """Places in `tensors` of two that share an element."""
        return [(i, j) for (i, a), (j, b) in combinations(enumerate(self.tensors), 2) if a.overlaps(b)]

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors, each counted once."""
        return sum({(t.data_ptr(), t.shape): t.nbytes for t in self.tensors}.values())

    @property
    def config(self) -> str:
        """Launch options and the compile-time arguments that are neither None nor False, as text."""
        fixed = {p.name: self.values[p.name] for p in self.kernel.params if p.is_constexpr and p.name in self.values}
        named = [n if v is True else f"{n}={v}" for n, v in fixed.items() if v is not None and v is not False]
        return " ".join(named + [f"{n}={v}" for n, v in self.options.items() if n != "enable_fp_fusion"])


def launch_of(kernel: JITFunction, grid: tuple[int, ...], arguments: tuple, fixed: dict[str, object]) -> Launch:
    """The launch of these arguments of `launch.run`; tensors are not kept."""
    options = {n: value for n, value in fixed.items() if n not in kernel.arg_names}
    values = fixed | dict(zip(kernel.arg_names, arguments, strict=False))
    return Launch(kernel, grid, {n: _pointers(v) for n, v in values.items() if n not in options}, options)


@contextlib.contextmanager
def recording(arch: str) -> Iterator[list[Launch]]:
    """In this context launches are recorded as on `arch` and not run.

    PyTorch's matrix products are not computed, because their values are not used.
    """
    launches: list[Launch] = []

    def product(a, b, out_dtype=None):
        return a.new_empty(*a.shape[:-1], b.shape[-1], dtype=out_dtype)

    def widened(a):
        return a.new_empty(a.shape, dtype=torch.float32)

    recorded = patch.object(launcher, "run", lambda *given: launches.append(launch_of(*given)))
    products = patch.multiple(torch.Tensor, __matmul__=product, float=widened), patch.object(torch, "mm", product)
    with recorded, products[0], products[1], targeting(arch), using_backend("triton"), _NoLinear():
        yield launches


class _NoLinear(TorchFunctionMode):
    """Context in which F.linear returns memory without values; a patched F.linear would end the conversion."""

    def __torch_function__(self, function: Callable, types: object, arguments: tuple = (), named: dict | None = None):
        """The result of a function of torch, or memory of its shape."""
        if function is torch.nn.functional.linear and not torch.is_grad_enabled():
            x, weight = arguments[:2]
            return x.new_empty(*x.shape[:-1], len(weight))
        return function(*arguments, **named or {})


def _pointers(value: object) -> object:
    """A tensor, or each tensor of a tuple, as a `Pointer`."""
    if isinstance(value, tuple):
        return tuple(map(_pointers, value))
    return Pointer(value) if isinstance(value, torch.Tensor) else value


def record(arch: str, function: Callable, *arguments: object, **options: object) -> dict[str, list[Launch]]:
    """Launches of one call on `arch` by phase: "inference" (no gradients), "forward" (with gradients), "backward"."""
    phases = {}
    with recording(arch) as phases["inference"], torch.no_grad():
        function(*arguments, **options)
    with recording(arch) as phases["forward"]:
        outputs = function(*arguments, **options)
    outputs = [t for t in _leaves(outputs) if t.requires_grad]
    inputs = [t for t in _leaves((arguments, tuple(options.values()))) if t.requires_grad]
    with recording(arch) as phases["backward"]:
        torch.autograd.grad(outputs, inputs, [torch.empty_like(t) for t in outputs], allow_unused=True)
    return phases


def _leaves(value) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)


def _on(arch: str) -> contextlib.AbstractContextManager[Driver]:
    """Context in which a GPU of this architecture, by whose name Triton caches kernels, is Triton's device."""
    return patch.object(driver, "_active", Driver(arch, arch))


def compiled(launch: Launch, arch: str):
    """The compiled kernel of a launch on `arch`; Triton's errors are raised."""
    with _on(arch):
        return launch.kernel.run(grid=launch.grid, warmup=True, **_given(launch), **launch.options)


def _given(launch: Launch) -> dict:
    """The arguments of a launch as Triton takes them."""
    return {name: given(name, value) for name, value in launch.values.items()}


def specialization(launch: Launch, arch: str) -> tuple[str, str]:
    """What determines the binary of a launch on `arch`: the arguments' types and properties, and the options."""
    with _on(arch):
        *_, binder = launch.kernel.device_caches[arch]
    _, facts, options = binder(**_given(launch), **launch.options)
    return str(facts), str(sorted(options.items()))


def least_of_windows(launch: Launch) -> tuple[float, float]:
    """(bytes, flops) that window attention needs at least; listed with the first kernel of a pass."""
    a, kernel = launch.values, launch.name.removeprefix("window.")
    three = kernel == "_bwd_kernel" and a["N"] > min(a["BLOCK_M"], a["BLOCK_N"])
    if three or kernel == "_bwd_dbias_kernel":
        return 0.0, 0.0
    nbytes, backward = a["qkv_ptr"].nbytes / 3, "_bwd_" in kernel
    values = nbytes / a["qkv_ptr"].dtype.itemsize
    return (8 if backward else 4) * nbytes, (10 if backward else 4) * values * a["N"]
