"""The switch between Triton kernels and PyTorch, and the conditions under which the kernels run."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from . import launch, tile

F = TypeVar("F", bound=Callable)

BACKENDS = ("auto", "triton", "onednn", "torch")


def _environment() -> str:
    return os.environ.get("FASTVIT_TRITON_BACKEND", "auto")


_switch: str = _environment()  # an invalid value raises on first use


def backend() -> str:
    """Value of the switch: from `set_backend`, else from FASTVIT_TRITON_BACKEND at import, else "auto".

    With "auto", `choose` selects fused, mixed or plain if the kernels can run, and on a CPU oneDNN's products where
    `fastvit-triton tune` or a measured row of this CPU says that they are faster. "onednn" takes these for every
    product on a CPU, and is "auto" on a GPU. "torch" always takes the PyTorch path. "triton" always runs fused, also
    for CPU tensors, which needs Triton's interpreter (TRITON_INTERPRET=1): slow, for tests.

    Raises:
        ValueError: the environment variable has another value.
    """
    return _switch if _switch in BACKENDS else _checked(_switch, "FASTVIT_TRITON_BACKEND")


def set_backend(name: str | None) -> None:
    """Sets the switch of `backend` for this process; None reads the environment variable again.

    Raises:
        ValueError: the name is not "auto", "triton", "onednn" or "torch".
    """
    global _switch
    _switch = _environment() if name is None else _checked(name, "name")


@contextlib.contextmanager
def using_backend(name: str | None) -> Iterator[None]:
    """Context manager: `set_backend(name)` inside, the previous switch afterwards.

    Raises:
        ValueError: the name is not "auto", "triton", "onednn" or "torch".
    """
    global _switch
    before = _switch
    set_backend(name)
    try:
        yield
    finally:
        _switch = before


def _checked(name: str, setting: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{setting} is {name!r}; use one of {', '.join(BACKENDS)}")
    return name


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int = 0) -> str | None:
    """Reason why an op takes the PyTorch path on this device and dtype; None if its Triton kernel runs.

    Args:
        device: of the tensors.
        dtype: of the tensors.
        head_dim: channels of a head, for attention.
    """
    switch = _switch if _switch in BACKENDS else backend()  # one call less
    if switch == "torch":
        return "FASTVIT_TRITON_BACKEND is torch"
    if tile.MISSING is not None:
        return f"Triton is not installed ({tile.MISSING})"
    if _is_transformed() or torch.autograd.forward_ad._current_level >= 0:
        return "torch.func transforms (grad, vmap, jvp) and forward-mode AD support PyTorch operations only"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace records PyTorch operations only"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"{dtype} always runs on PyTorch"
    if head_dim > 256:
        return f"head dimension {head_dim} is above 256"
    if device.type == "cuda":
        return _floor(device.index)
    if device.type == "cpu" and (switch == "triton" or launch.target is not None):
        return None
    return f"Triton kernels need a CUDA or ROCm GPU, this is {device.type}"


def constant(function: F) -> F:
    """Marks a function as torch.compiler.assume_constant_result does, which would import all of Dynamo."""
    vars(function)["_dynamo_marked_constant"] = True
    return function


def transparent(function: F) -> F:
    """Marks a function that only calls another, so that torch.compile inlines it but never compiles it by itself.

    After a graph break the functions inside are then compiled as if they had been called directly.
    """
    frames = torch._C._dynamo.eval_frame  # torch._dynamo.eval_frame.skip_code calls it, and would import all of Dynamo
    skipped = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, skipped)
    return function


@constant
def _is_transformed() -> bool:
    """True inside a transform of torch.func. Dynamo guards on them, but would record this call in the graph."""
    return torch._C._are_functorch_transforms_active()


@constant
def _floor(index: int | None) -> str | None:
    """Reason why this GPU is below the minimum, NVIDIA 8.0 or AMD gfx942; None if it is not."""
    return _too_old(index)  # Dynamo would ignore the mark on the cached function, and trace it


@functools.cache
def _too_old(index: int | None) -> str | None:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        name = properties.gcnArchName.split(":")[0]
        return None if name.startswith("gfx94") else f"{name} is not gfx942"
    if properties.major >= 8:
        return None
    return f"compute capability {properties.major}.{properties.minor} is below 8.0"


def kernels_available(x: torch.Tensor, head_dim: int = 0) -> bool:
    """True if the Triton kernels run for x, with heads of `head_dim` channels.

    It depends only on device, dtype, head_dim and the switch, so Dynamo treats it as a constant.
    """
    if x.device.type == "cpu" and _switch != "triton" and launch.target is None:  # fast path
        return False
    return why_not(x.device, x.dtype, head_dim) is None
