"""The host half of every op: what it is, whether its Triton kernel runs here, and how torch sees it."""

import functools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from . import tile


@dataclass(frozen=True)
class Op:
    """One public function's contract. Tests, benchmarks and `fastvit-triton doctor` read this and nothing else.

    Attributes:
        name: name of the public function.
        run: the public, differentiable function.
        reference: plain PyTorch with the same arguments; the CPU path and the oracle.
        cases: tiny shapes by name, for finite differences.
        inputs: (case, dtype, device) to keyword arguments of `run`; floating tensors require gradients.
        ragged: larger shapes by name, for the Triton kernels; empty where there is none.
    """

    name: str
    run: Callable
    reference: Callable
    cases: dict[str, dict[str, int]]
    inputs: Callable[..., dict]
    ragged: dict[str, dict[str, int]] = field(default_factory=dict)


BACKENDS = ("auto", "triton", "torch")
LIBRARY = torch.library.Library("fastvit_triton", "DEF")
TUNED = Path(__file__).parent / "tuned"
ONCE = b"fastvit_triton's kernels can be differentiated once; FASTVIT_TRITON_BACKEND=torch gives second derivatives"
target: str | None = None  # the compile report names the architecture that it compiles for here


def _environment() -> str:
    return os.environ.get("FASTVIT_TRITON_BACKEND", "auto")


_switch: str = _environment()  # a word that is not known waits for somebody who asks


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


def usable(x: torch.Tensor, head_dim: int = 0) -> bool:
    """The Triton path applies to x. Reads only device, dtype, head dimension and the switch, so Dynamo folds it."""
    if x.device.type == "cpu" and _switch in ("auto", "torch"):  # the commonest answer, asked many times a model
        return False
    return why_not(x.device, x.dtype, head_dim) is None


def config(row: str, default: dict[str, int], device: torch.device) -> dict[str, int]:
    """Launch parameters of a kernel: the row that this GPU's table in tuned/ has by that name, else the default.

    Tables are committed, each row with its provenance, "measured" or "predicted"; nothing is timed in a user's process.
    """
    return dict(_table(target or _architecture(device.type, device.index)).get(row, default), enable_fp_fusion=True)


@functools.cache
def _table(architecture: str) -> dict[str, dict[str, int]]:
    path = TUNED / f"{architecture}.json"
    rows = json.loads(path.read_text()) if path.exists() else {}
    return {name: row["config"] for name, row in rows.items() if "config" in row}


@functools.cache
def _architecture(kind: str, index: int | None) -> str:
    """sm_90, gfx942, or "cpu"."""
    if kind != "cuda":
        return "cpu"
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def precision(x: torch.Tensor) -> str:
    """Of dot products: those of float32 follow torch.set_float32_matmul_precision."""
    return "ieee" if x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest" else "tf32"


def cast(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors in autocast's dtype where autocast is on for their device; otherwise as they are."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    return [t.to(torch.get_autocast_dtype(kind)) for t in tensors]


def apart(tensor: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor, as a view of itself where it is the other one: Dynamo takes no tensor twice."""
    return tensor if tensor is None or tensor is not other else tensor.view_as(tensor)


def folds(x: torch.Tensor) -> bool:
    """LayerNorm of x can be folded into the product behind it, and takes row statistics: x has the product's dtype."""
    kind = x.device.type
    return not torch.is_autocast_enabled(kind) or torch.get_autocast_dtype(kind) == x.dtype


def register(name: str, schema: str, launch: Callable, fake: Callable) -> Callable:
    """Defines torch.ops.fastvit_triton.<name> as one opaque node; returns the bound overload.

    Args:
        name: of the op.
        schema: arguments and results as torch.library writes them, without the name.
        launch: allocates and launches; runs on the first tensor's device.
        fake: gives outputs of the same shapes, dtypes and strides without data.
    """

    @functools.wraps(launch)
    def on_device(*arguments):
        # kernels step through vectors one by one; matrices are the launchers' business
        vectors = (isinstance(a, torch.Tensor) and a.dim() == 1 for a in arguments)
        arguments = [a.contiguous() if v else a for a, v in zip(arguments, vectors, strict=True)]
        given = (t for a in arguments for t in (a if isinstance(a, (list, tuple)) else (a,)))
        device = next(t.device for t in given if isinstance(t, torch.Tensor))
        if device.type == "cuda":
            with torch.cuda.device(device):
                return launch(*arguments)
        try:
            return launch(*arguments)
        except RuntimeError as error:
            if "active drivers" not in str(error):
                raise
            raise RuntimeError(
                f"{name} was asked to run its Triton kernel on {device}; "
                "set TRITON_INTERPRET=1 for the interpreter, or FASTVIT_TRITON_BACKEND=auto for PyTorch"
            ) from error

    LIBRARY.define(name + schema)
    for key in ("CUDA", "CPU"):
        LIBRARY.impl(name, on_device, key)
    torch.library.register_fake(f"fastvit_triton::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.fastvit_triton, name).default


def once_differentiable(backward: Callable) -> Callable:
    """The backward pass of a Function as one whose gradients refuse to be differentiated again.

    PyTorch's own decorator gives constants, and no error, where the gradients that come in are constants.
    """

    @functools.wraps(backward)
    def wrapper(ctx, *grads):
        with torch.no_grad():
            outputs = backward(ctx, *grads)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():  # on under create_graph=True
            return outputs
        refuse = torch._C._functions.DelayedError(ONCE, len(outputs))
        return refuse(*(t if t is None else t.detach().requires_grad_() for t in outputs))

    return wrapper


def cdiv(a: int, b: int) -> int:
    """⌈a / b⌉."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def split(D: int) -> tuple[int, int]:
    """D as two tiles of powers of two where that is less than one: 80 = 64 + 16, but 64 = 64 + 0 and 100 < 128 + 0."""
    whole = power_of_2(max(D, 16))
    half, rest = whole // 2, power_of_2(max(D - whole // 2, 16))
    return (half, rest) if half >= 16 and half + rest < whole and D > half else (whole, 0)


def whole_rows(K: int) -> tuple[int, int, dict[str, int]]:
    """Rows of a program that holds whole rows of K values, their width as a power of two, and launch parameters."""
    block = power_of_2(K)
    return max(1, 1024 // block), block, dict(num_warps=min(max(block // 1024, 1), 16), enable_fp_fusion=True)


def make(device: torch.device | str, dtype: torch.dtype, seed: int = 0) -> Callable[..., torch.Tensor]:
    """A maker of random tensors for `Op.inputs`: `make(...)(2, 3)` is N(0, 1) of shape [2, 3] that requires gradients.

    Values are drawn in float64 on the CPU, so one case means the same numbers for every dtype and device.
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale + shift
        return values.to(device, dtype).requires_grad_()

    return randn


def expect(argument: str, tensor: torch.Tensor, beside: torch.Tensor | None = None, /, **axes: int | None) -> None:
    """Raises where an argument is no dense tensor, lies elsewhere than `beside`, or has other axes than those given.

    The sentence names the argument and what was given; None accepts any size.

    Raises:
        TypeError: it is no dense tensor.
        ValueError: its device or an axis does not fit.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        given = f"one of layout {tensor.layout}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(f"{argument} must be a dense tensor, got {given}")
    if beside is not None and tensor.device != beside.device:
        raise ValueError(f"{argument} lies on {tensor.device}, the tensors before it on {beside.device}; move it there")
    shape = tensor.shape
    if len(shape) == len(axes):
        for got, size in zip(shape, axes.values(), strict=True):
            if size is not None and size != got:
                break
        else:
            return
    if len(shape) != len(axes):
        raise ValueError(f"{argument} must have axes [{', '.join(axes)}], got shape {list(shape)}")
    for (axis, size), got in zip(axes.items(), shape, strict=True):
        if size is not None and got != size:
            raise ValueError(f"axis {axis} of {argument} must be {size}, got {got} in shape {list(shape)}")
