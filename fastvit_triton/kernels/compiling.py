"""Compiles kernels in threads before their first launch; Triton's compiler releases the GIL."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from . import descriptor, launch
from .op import REGISTERED
from .tile import Kernel

THREADS = min(os.cpu_count() or 1, 16)


class Pointer:
    """Stands in for a tensor: the properties by which Triton selects a binary."""

    def __init__(self, t: torch.Tensor) -> None:
        self.dtype = t.dtype
        self._address = t.data_ptr()
        self._range = t.untyped_storage().nbytes()

    def data_ptr(self) -> int:
        """Address of the tensor; only its remainder modulo 16 matters."""
        return self._address

    def ptr_range(self) -> int:
        """Size of the storage in bytes; below 2 GiB the AMD compiler uses 32-bit offsets."""
        return self._range


class CompiledLaunch(NamedTuple):
    """A launch to compile: the arguments of `launch.launch`, with `Pointer` for tensors, and its device."""

    kernel: Kernel
    grid: tuple[int, ...]
    arguments: tuple
    fixed: dict[str, object]
    device: int

    @property
    def key(self) -> tuple:
        """Key that is equal for launches of the same binary."""
        return self.kernel, self.device, *map(_kind, self.arguments), *self.fixed.items()


class Collector(launch.LaunchRecorder):
    """A dispatch mode in which kernels are not launched.

    Their outputs are not written, so results are undefined.

    Attributes:
        launches: one launch for each required binary.
    """

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[tuple, CompiledLaunch] = {}

    @property
    def launches(self) -> list[CompiledLaunch]:
        return list(self._found.values())

    def launched(self, kernel: Callable, grid: tuple[int, ...], arguments: tuple, fixed: dict[str, object]) -> bool:
        first = arguments[0][0] if type(arguments[0]) is tuple else arguments[0]
        new = CompiledLaunch(kernel, grid, tuple(map(_pointers, arguments)), fixed, first.get_device())
        self._found.setdefault(new.key, new)
        return True

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        """Runs an operator; for our own, collects the launches inside."""
        if function.namespace != "fastvit_triton":
            return function(*arguments, **named or {})
        with self:
            return REGISTERED[function.name().split("::")[1]][0](*arguments, **named or {})


@contextlib.contextmanager
def compiling(launches: Sequence[CompiledLaunch], threads: int = THREADS) -> Iterator[list[Future]]:
    """Compiles in the background; yields, for each launch, a future of Triton's compiled kernel.

    At exit, compilations that have not started are cancelled, and running ones are awaited. In the interpreter nothing
    is compiled, and results are None.
    """
    pool = ThreadPoolExecutor(max(threads, 1), "fastvit_triton compiles")
    try:
        yield [pool.submit(_compile, pending) for pending in launches]
    finally:
        pool.shutdown(cancel_futures=True)


def _compile(pending: CompiledLaunch) -> object:
    kernel, grid, arguments, fixed, device = pending
    if launch.run is not launch._run or not hasattr(kernel, "device_caches"):  # the interpreter
        return None
    with torch.cuda.device(device) if device >= 0 else contextlib.nullcontext():
        return kernel.run(*descriptor.described(kernel, arguments), grid=grid, warmup=True, **fixed)


def _pointers(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return Pointer(value)
    return tuple(map(_pointers, value)) if isinstance(value, tuple) else value


def _kind(value: object) -> object:
    """The property of an argument on which the binary depends."""
    if isinstance(value, tuple):
        return tuple(map(_kind, value))
    if isinstance(value, Pointer):
        return value.dtype, value.data_ptr() % 16 == 0, value.ptr_range() < 2**31
    if isinstance(value, int):
        return type(value), value == 1, value % 16 == 0, abs(value) < 2**31
    return type(value)
