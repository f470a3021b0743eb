"""Launches kernels on CPU tensors as if they were on a GPU, without compiling or running anything.

The host does everything it does for a real launch, in this package and in Triton, up to the call of the driver. This
measures host time without a GPU (`benchmarks.host`) and lets tests compare what launches pass to the driver.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest.mock import patch

from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.launch import targeting

TARGETS = {f"sm_{n}": GPUTarget("cuda", n, 32) for n in (80, 86, 89, 90, 100, 120)}
TARGETS["gfx942"] = GPUTarget("hip", "gfx942", 64)


def ignore(*arguments: object) -> None:
    """A launcher that does nothing."""


class Driver:
    """A Triton driver for a GPU, by default an H200, whose memory is the CPU's.

    The device is the key of Triton's cache of compiled kernels; a CPU tensor's has the index -1.
    """

    utils = SimpleNamespace(get_device_properties=lambda device: dict(max_shared_mem=232448, warpSize=32))

    def __init__(self, device: int | str = -1, arch: str = "sm_90") -> None:
        self.device, self.target = device, TARGETS[arch]

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int | str:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def no_device(launcher: Callable[..., None] = ignore, device: int = -1) -> Iterator[None]:
    """In this context the package runs its kernels on CPU tensors, and each launch calls `launcher` instead.

    It takes what Triton's launcher takes: the grid's three sizes, stream, function, metadata, launch metadata, two
    hooks, and the kernel's arguments. The function is an integer that identifies the binary.
    """
    numbers, kernels, binaries = itertools.count(1), [], []

    def compile_nothing(kernel, key, signature, where, *rest):
        binary = CompiledKernel.__new__(CompiledKernel)
        binary.__dict__.update(name=kernel.__name__, function=next(numbers), packed_metadata=(4, 1, 0), module=1)
        binary.__dict__.update(src=None, _run=launcher)
        assert kernel.cache_key  # computing it records the globals that the kernel reads
        kernel.device_caches[where][0][key] = binary
        kernels.append((kernel, where))  # inside, another driver may be active
        binaries.append(binary)
        return binary

    active = patch.object(driver, "_active", Driver(device))
    try:
        with active, patch.object(JITFunction, "_do_compile", compile_nothing):
            with targeting("sm_90"), using_backend("triton"):
                yield
    finally:
        for kernel, where in kernels:
            kernel.device_caches.pop(where, None)
        for binary in binaries:
            binary.module = None  # nothing to unload
