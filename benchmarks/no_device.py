"""Kernels launched on CPU tensors as if these were a GPU's: nothing is compiled and nothing runs.

All that the host does for a launch is done, by this package and by Triton, until the driver would be called. So host
time is measured without a GPU (`benchmarks.host`), and what a launch passes to the driver is compared.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace

from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.launch import targeting


def ignore(*arguments: object) -> None:
    """A launcher that does nothing."""


class Driver:
    """A driver of Triton for an H200 whose memory is the CPU's.

    Attributes:
        device: index of the current device; that of a CPU tensor is -1.
    """

    utils = SimpleNamespace(get_device_properties=lambda device: dict(max_shared_mem=232448, warpSize=32))

    def __init__(self, device: int = -1) -> None:
        self.device = device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def no_device(launcher: Callable[..., None] = ignore, device: int = -1) -> Iterator[None]:
    """In this context the package runs its kernels on CPU tensors, and their launches call the launcher instead.

    Args:
        launcher: takes what Triton's launcher takes: the grid's three sizes, stream, function, metadata, launch
            metadata, two hooks, and the kernel's arguments. The function is a number, another for each binary.
        device: index of the current device.
    """
    numbers, kernels = itertools.count(1), []

    def compile_nothing(kernel, key, signature, device, *rest):
        binary = CompiledKernel.__new__(CompiledKernel)
        binary.__dict__.update(name=kernel.__name__, function=next(numbers), packed_metadata=(4, 1, 0), module=1)
        binary.__dict__.update(src=None, _run=launcher, _module_pid=0)  # of another process, so never unloaded
        assert kernel.cache_key  # finds the globals that the kernel reads
        kernel.device_caches[device][0][key] = binary
        kernels.append(kernel)
        return binary

    before = driver._active, JITFunction._do_compile
    driver.set_active(Driver(device))
    JITFunction._do_compile = compile_nothing
    try:
        with targeting("sm_90"), using_backend("triton"):
            yield
    finally:
        driver._active, JITFunction._do_compile = before
        for kernel in kernels:
            kernel.device_caches.pop(device, None)
