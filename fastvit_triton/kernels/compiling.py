"""Compiles kernels before their first launch, in threads: Triton's compiler releases the interpreter's lock."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from . import launch
from .op import REGISTERED

THREADS = min(os.cpu_count() or 1, 16)


class Pointer:
    """Stands for a tensor: what Triton chooses a binary by."""

    def __init__(self, t: torch.Tensor) -> None:
        self.dtype, self._address, self._range = t.dtype, t.data_ptr(), t.untyped_storage().nbytes()

    def data_ptr(self) -> int:
        """Address of the tensor; its remainder by 16 counts."""
        return self._address

    def ptr_range(self) -> int:
        """Bytes of its storage; below 2 GiB the compiler for AMD uses 32-bit offsets."""
        return self._range


class Launch(NamedTuple):
    """A launch to compile for: the arguments of `launch.launch`, with pointers for tensors, and its device."""

    kernel: Callable
    grid: tuple[int, ...]
    arguments: tuple
    fixed: dict[str, object]
    device: int

    @property
    def key(self) -> tuple:
        """Equal for launches of one binary."""
        return self.kernel, self.device, *map(_kind, self.arguments), *self.fixed.items()


class Collector(launch.Recorder):
    """A dispatch mode in which kernels are not launched.

    What the launches would have written stays as it was, so results are undefined.

    Attributes:
        launches: one for each binary that they need.
    """

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[tuple, Launch] = {}

    @property
    def launches(self) -> list[Launch]:
        return list(self._found.values())

    def launched(self, kernel: Callable, grid: tuple[int, ...], arguments: tuple, fixed: dict[str, object]) -> bool:
        first = arguments[0][0] if type(arguments[0]) is tuple else arguments[0]
        one = Launch(kernel, grid, tuple(map(_pointers, arguments)), fixed, first.get_device())
        self._found.setdefault(one.key, one)
        return True

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        """Runs an operator; one of ours is entered."""
        if function.namespace != "fastvit_triton":
            return function(*arguments, **named or {})
        with self:
            return REGISTERED[function.name().split("::")[1]][0](*arguments, **named or {})


@contextlib.contextmanager
def compiling(launches: Sequence[Launch], threads: int = THREADS) -> Iterator[list[Future]]:
    """Compiles in the background; yields one future for each launch, of Triton's compiled kernel.

    The end of the context cancels those that have not begun and waits for the others. Kernels in the interpreter need
    no compiling: their result is None.
    """
    pool = ThreadPoolExecutor(max(threads, 1), "fastvit_triton compiles")
    try:
        yield [pool.submit(_compile, one) for one in launches]
    finally:
        pool.shutdown(cancel_futures=True)


def _compile(one: Launch) -> object:
    kernel, grid, arguments, fixed, device = one
    if launch.run is not launch._run or not hasattr(kernel, "device_caches"):  # the interpreter
        return None
    with torch.cuda.device(device) if device >= 0 else contextlib.nullcontext():
        return kernel.run(*arguments, grid=grid, warmup=True, **fixed)


def _pointers(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return Pointer(value)
    return tuple(map(_pointers, value)) if isinstance(value, tuple) else value


def _kind(value: object) -> object:
    """What an argument's value changes in a binary."""
    if isinstance(value, tuple):
        return tuple(map(_kind, value))
    if isinstance(value, Pointer):
        return value.dtype, value.data_ptr() % 16 == 0, value.ptr_range() < 2**31
    if isinstance(value, int):
        return type(value), value == 1, value % 16 == 0, abs(value) < 2**31
    return type(value)
