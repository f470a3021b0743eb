"""Launches kernels, looks up their parameters (rows of the tables in tuned/), and computes tile sizes."""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from . import descriptor, measured
from .tile import TRITON, Kernel

TUNED = Path(__file__).parent / "tuned"
target: str | None = None  # architecture used instead of the device's; see `targeting`
_overrides: tuple[dict, dict] | None = None  # (rows used instead of the tables, rows looked up); see `overriding`


def launch(kernel: Kernel, grid: tuple[int, ...], *arguments: Any, **fixed: object) -> None:
    """Launches a kernel on the device of its first argument. All launches of the package go through this function.

    A launch with a known key is made directly, others by `run`. The key contains everything by which JITFunction.run
    selects a binary: device, compile-time arguments, options, the knobs that it reads, and Triton's specialisation of
    the arguments (dtypes, addresses and integers divisible by 16, integers that are 1 or need 64 bits, storage below 2
    GiB on AMD). Both paths read the arguments in the same way, so PyTorch subclasses and modes behave the same.
    JITFunction.run is used if it would do more than launch; see `_is_plain` and `_is_repeatable`.

    Args:
        kernel: a function decorated by `jit`.
        grid: one to three numbers of programs.
        arguments: run-time arguments in order: tensors, numbers, None and tuples of these, including strides and
            descriptors (see `descriptor`); the first is a tensor or a tuple that starts with one.
        fixed: compile-time arguments and launch options, by name.
    """
    if torch._C._len_torch_dispatch_stack() and (recorder := _current_recorder()) is not None:
        if recorder.launched(kernel, grid, arguments, fixed):
            return
        with _disable_current_modes():  # the interpreter copies tensors
            return launch(kernel, grid, *arguments, **fixed)
    if run is not _run or not _is_plain(kernel):
        return run(kernel, grid, arguments, fixed)
    global _direct
    if _direct is None or _direct.driver is not TRITON.driver._active:
        _direct = _Direct(TRITON.driver._active)
    device = (arguments[0][0] if type(arguments[0]) is tuple else arguments[0]).get_device()
    if device != _direct.current_device():
        if device < 0:
            return _run(kernel, grid, arguments, fixed)
        with torch.cuda.device(device):
            return launch(kernel, grid, *arguments, **fixed)
    key = _key(kernel, device, arguments, fixed)
    try:
        compiled_run, function, metadata, constants, _ = _direct.found[key]
    except KeyError:
        compiled = _run(kernel, grid, arguments, fixed)
        if _is_repeatable(kernel, compiled, len(arguments), fixed):
            constants = tuple(fixed[p.name] for p in kernel.params[len(arguments) :])
            run_of = descriptor.launcher(kernel, compiled) if descriptor.takes_descriptors(kernel) else compiled.run
            _direct.found[key] = Binary(run_of, compiled.function, compiled.packed_metadata, constants, compiled)
        return
    x, y, z = (*grid, 1, 1)[:3]
    compiled_run(x, y, z, _direct.stream(device), function, metadata, None, None, None, *arguments, *constants)


def _key(kernel: Kernel, device: int, arguments: tuple, fixed: dict[str, object]) -> tuple:
    if descriptor.takes_descriptors(kernel):
        arguments = descriptor.bases(kernel, arguments)
    specialization = TRITON.specialize(_direct.backend, arguments, False, True, True)
    return kernel.fn, device, kernel.debug, *binaries(), specialization, *fixed, *fixed.values()


def binaries() -> tuple:
    """Settings of Triton by which it selects a binary; see `settings` for all others."""
    compilation = TRITON.knobs.compilation
    mode = compilation.instrumentation_mode
    casts = mode and getattr(compilation, "fpsan_homomorphic_casts", None)  # triton 3.9's; a mode's, and slow to read
    return TRITON.knobs.runtime.debug, mode, casts


class LaunchRecorder(TorchDispatchMode):
    """A dispatch mode that is also notified of each kernel launch, including those in autograd's threads."""

    def launched(
        self, kernel: Kernel, grid: tuple[int, ...], arguments: tuple, fixed: dict[str, object]
    ) -> bool | None:
        """Called with the arguments of `launch`, before the launch; returns True to skip the launch."""
        raise NotImplementedError


def _current_recorder() -> LaunchRecorder | None:
    stack = range(torch._C._len_torch_dispatch_stack())
    return next((m for m in map(torch._C._get_dispatch_stack_at, stack) if isinstance(m, LaunchRecorder)), None)


class Binary(NamedTuple):
    """A compiled kernel, with what a direct launch needs besides grid, stream and run-time arguments."""

    run: Callable  # Triton's launcher, or for a kernel with descriptors that of `descriptor.launcher`
    function: object  # handle of the compiled kernel
    metadata: object  # launch metadata
    constants: tuple  # compile-time arguments, which follow the others
    compiled: object  # the compiled kernel, which from triton 3.8 on is unloaded when nothing refers to it


def binary_of(kernel: Kernel, arguments: tuple, fixed: dict[str, object]) -> Binary | None:
    """The binary of a launch that was made before; None if Triton must select it at each launch.

    It is valid for launches with the same numbers and the same remainders of addresses modulo 16.
    """
    if run is not _run or not _is_plain(kernel) or _direct is None or _direct.backend_name != "cuda":
        return None
    device = (arguments[0][0] if type(arguments[0]) is tuple else arguments[0]).get_device()
    return _direct.found.get(_key(kernel, device, arguments, fixed))


def direct_state(device: int, kernels: tuple[Kernel, ...]) -> tuple | None:
    """Triton's global state under which a binary stays valid; None if direct launches are not allowed now."""
    if run is not _run or _direct is None or _direct.driver is not TRITON.driver._active:
        return None
    if device != _direct.current_device() or not _is_plain(kernels[0]):
        return None
    for kernel in kernels:
        if kernel.pre_run_hooks:
            return None
    return _direct, *binaries(), [kernel.debug for kernel in kernels]


def current_stream() -> Callable[[int], int]:
    """The driver's function from a device to the handle of its current stream; valid as long as `direct_state`."""
    return _direct.stream


def _run(kernel: Kernel, grid: tuple[int, ...], arguments: tuple, fixed: dict[str, object]) -> Any:
    """Launches by JITFunction.run, or the interpreter's; returns the compiled kernel."""
    device = (arguments[0][0] if type(arguments[0]) is tuple else arguments[0]).get_device()
    with torch.cuda.device(device) if device >= 0 else contextlib.nullcontext():
        return kernel.run(*descriptor.described(kernel, arguments), grid=grid, warmup=False, **fixed)


run = _run  # looked up at each launch, as the interpreter and the tests' recorder replace it


def _is_plain(kernel: Kernel) -> bool:
    """True if JITFunction.run only selects a binary for this kernel and launches it.

    That is: it is not patched, no hook is set, the interpreter is off, and this Triton release's launcher is known.
    """
    if TRITON is None or TRITON.driver._active is None:
        return False
    knobs = TRITON.knobs.runtime
    return (
        type(kernel) is TRITON.JITFunction
        and TRITON.JITFunction.run is TRITON.run
        and not kernel.pre_run_hooks
        and knobs.launch_enter_hook is TRITON.enter_hooks
        and knobs.launch_exit_hook is TRITON.exit_hooks
        and not TRITON.enter_hooks.calls
        and not TRITON.exit_hooks.calls
        and knobs.add_stages_inspection_hook is None
    )


class _Direct:
    """State of direct launches for one Triton driver: its functions, and compiled kernels by key."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.stream = driver.get_current_stream
        self.current_device = driver.get_current_device
        if self.current_device is torch.cuda.current_device:
            self.current_device = torch._C._cuda_getDevice  # does not check that CUDA is initialised
        self.backend = TRITON.make_backend(driver.get_current_target())
        self.backend_name = driver.get_current_target().backend
        self.found: dict[tuple, Binary] = {}


def _is_repeatable(kernel: Kernel, compiled: Any, runtime: int, fixed: dict[str, object]) -> bool:
    """True if a binary may be launched directly: arguments are passed in order, and the kernel reads no globals.

    Triton compares the values of globals at each launch.
    """
    return (
        type(compiled) is TRITON.CompiledKernel
        and not kernel.used_global_vals
        and all(p.is_constexpr == (p.num >= runtime) and (p.num < runtime or p.name in fixed) for p in kernel.params)
    )


_direct: Any = None  # a `_Direct` after the first launch


def config(row: str, default: dict[str, int], device: torch.device, *sizes: int | torch.SymInt) -> dict[str, int]:
    """Launch parameters of a kernel: from this GPU's measurements, else the architecture's table, else the default.

    Tables are committed files whose rows are marked "measured" or "predicted". This function times nothing.

    Args:
        row: row name.
        default: launch parameters if there is no such row.
        device: selects the table by its architecture.
        *sizes: sizes of the operands, of symbolic ones those of the example; rows for them take precedence over the
            general row, see `measured.names`.
    """
    numbers = tuple(map(hint, sizes))
    parameters = _row(row, numbers, device, target, measured.in_use) or default
    if _overrides is not None:
        rows, looked_up = _overrides
        row_names = measured.names(row, numbers)
        parameters = next((rows[name] for name in row_names if name in rows), parameters)
        looked_up.setdefault(row_names[0], parameters)
    return dict(parameters, enable_fp_fusion=True)


def hint(size: int | torch.SymInt) -> int:
    """A size, or that of the example for a symbolic one, which int() would fix: for choices that suit any size."""
    return size if isinstance(size, int) else size.node.hint


@functools.lru_cache(4096)
def _row(
    row: str, sizes: tuple[int, ...], device: torch.device, target: str | None, in_use: object
) -> dict[str, int] | None:
    tables = measured.of(device, target is not None).rows, table(architecture(device))
    row_names = measured.names(row, sizes)
    return next((rows[name] for rows in tables for name in row_names if name in rows), None)


def forget() -> None:
    """Clears cached tables and files, which are read again when needed."""
    measured.forget()
    table.cache_clear()
    measured_ways.cache_clear()
    _row.cache_clear()


@contextlib.contextmanager
def overriding(rows: dict[str, dict[str, int]]) -> Iterator[dict[str, dict[str, int]]]:
    """Context in which `rows` replace those of the tables; can be nested.

    Yields the launch parameters that kernels look up in it, by row name with sizes.
    """
    global _overrides
    before = _overrides
    looked_up: dict[str, dict[str, int]] = {}
    _overrides = (rows if before is None else before[0] | rows), looked_up
    try:
        yield looked_up
    finally:
        _overrides = before


@contextlib.contextmanager
def targeting(architecture: str) -> Iterator[None]:
    """Context in which CPU tensors count as tensors on a GPU of `architecture`; no GPU is needed."""
    global target
    before, target = target, architecture
    try:
        yield
    finally:
        target = before


@functools.cache
def table(architecture: str) -> dict[str, dict[str, int]]:
    """Launch parameters by row name, from tuned/<architecture>.json; empty if there is no such file."""
    return {name: row["config"] for name, row in _committed(architecture).items() if "config" in row}


@functools.cache
def measured_ways(architecture: str) -> dict[str, str]:
    """Measured ways in tuned/<architecture>.json: name of a branch and phase → way."""
    return _committed(architecture).get("ways", {}).get("measured", {})


def _committed(architecture: str) -> dict[str, Any]:
    path = TUNED / f"{architecture}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def architecture(device: torch.device) -> str:
    """Architecture of the device, such as "sm_90", "gfx942" or "cpu"; `target` if that is set."""
    return target or _architecture(device.type, device.index)


@functools.cache
def _architecture(kind: str, index: int | None) -> str:
    return "cpu" if kind != "cuda" else measured.architecture_of(torch.cuda.get_device_properties(index))


def precision(x: torch.Tensor) -> str:
    """input_precision of tl.dot for operands like x."""
    return "ieee" if is_ieee(x.dtype) else "tf32"


def is_ieee(dtype: torch.dtype) -> bool:
    """True if products of this dtype are in IEEE float32: float32, for which PyTorch does not allow TF32.

    It is allowed by torch.set_float32_matmul_precision, torch.backends.cuda.matmul.allow_tf32 or fp32_precision;
    torch.get_float32_matmul_precision raises if the last of these was set.
    """
    return dtype == torch.float32 and torch._C._get_fp32_precision_getter("cuda", "matmul") != "tf32"


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """Dtype of matmuls and attention of x: autocast's if it is enabled for the device, else that of x."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def cdiv(a: int, b: int) -> int:
    """⌈a / b⌉."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def split_tiles(D: int) -> tuple[int, int]:
    """Widths of two tiles for D channels, powers of two of at least 16; the second is 0 if one tile is no wider.

    80 → (64, 16); 64 → (64, 0); 100 → (128, 0).
    """
    one_tile = power_of_2(max(D, 16))
    half = one_tile // 2
    second = power_of_2(max(D - one_tile // 2, 16))
    return (half, second) if half >= 16 and half + second < one_tile and D > half else (one_tile, 0)


def whole_row_blocks(K: int) -> tuple[int, int, dict[str, int]]:
    """(rows per program, tile width, launch options) for kernels whose programs hold whole rows of K values.

    One warp per 1024 values makes all accesses 16 bytes wide, and rows of up to 1024 values need no barrier.
    """
    block = power_of_2(K)
    return max(1, 1024 // block), block, dict(num_warps=min(max(block // 1024, 1), 16), enable_fp_fusion=True)
