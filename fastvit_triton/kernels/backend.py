"""The switch between Triton kernels and plain PyTorch, and where the kernels can run."""

import contextlib
import functools
import os
from collections.abc import Iterator

import torch

from . import tile

BACKENDS = ("auto", "triton", "torch")


def _environment() -> str:
    return os.environ.get("FASTVIT_TRITON_BACKEND", "auto")


_switch: str = _environment()  # an invalid value raises when it is first read


def backend() -> str:
    """The one switch: `set_backend`, else FASTVIT_TRITON_BACKEND as it was at import, else "auto".

    "auto" runs the kernels wherever they can run. "torch" always takes the PyTorch path. "triton" takes the kernels on
    CPU tensors too, where only Triton's interpreter can run them (TRITON_INTERPRET=1): slow, and a proof.

    Raises:
        ValueError: the variable holds another word.
    """
    return _switch if _switch in BACKENDS else _checked(_switch, "FASTVIT_TRITON_BACKEND")


def set_backend(name: str | None) -> None:
    """Sets the switch for this process; None goes back to the environment variable, and reads it anew.

    Raises:
        ValueError: the name is not "auto", "triton" or "torch".
    """
    global _switch
    _switch = _environment() if name is None else _checked(name, "name")


@contextlib.contextmanager
def using_backend(name: str | None) -> Iterator[None]:
    """`set_backend(name)` inside a `with` block; restores the switch afterwards.

    Raises:
        ValueError: the name is not "auto", "triton" or "torch".
    """
    global _switch
    before = _switch
    set_backend(name)
    try:
        yield
    finally:
        _switch = before


def _checked(name: str, what: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{what} is {name!r}; use one of {', '.join(BACKENDS)}")
    return name


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int = 0) -> str | None:
    """Why an op would take the PyTorch path on this device and dtype; None when its Triton kernel would run."""
    chosen = backend()
    if chosen == "torch":
        return "the switch FASTVIT_TRITON_BACKEND says torch"
    if tile.MISSING is not None:
        return f"Triton is not installed ({tile.MISSING})"
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        return "torch.func transforms (grad, vmap, jvp) and forward-mode AD see through PyTorch only"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace records PyTorch alone"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"{dtype} always runs on PyTorch"
    if head_dim > 256:
        return f"head dimension {head_dim} is above 256"
    if device.type == "cuda":
        return _floor(device.index)
    if chosen == "triton" and device.type == "cpu":
        return None
    return f"Triton kernels need a CUDA or ROCm GPU, this is {device.type}"


def _too_old(index: int | None) -> str | None:
    """Why this GPU is below the floor: NVIDIA 8.0, AMD gfx942."""
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        name = properties.gcnArchName.split(":")[0]
        return None if name.startswith("gfx94") else f"{name} is not gfx942"
    if properties.major >= 8:
        return None
    return f"compute capability {properties.major}.{properties.minor} is below 8.0"


_too_old._dynamo_marked_constant = True  # torch.compiler.assume_constant_result, which would import all of Dynamo
_floor = functools.cache(_too_old)


def kernels_available(x: torch.Tensor, head_dim: int = 0) -> bool:
    """The Triton path applies to x. Reads only device, dtype, head dimension and the switch, so Dynamo folds it."""
    if x.device.type == "cpu" and _switch in ("auto", "torch"):  # the commonest answer, asked many times a model
        return False
    return why_not(x.device, x.dtype, head_dim) is None
