"""What an op is, and how torch sees it: the `Op` record, registration, autocast, checks of shapes."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


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


LIBRARY = torch.library.Library("fastvit_triton", "DEF")
ONCE = b"fastvit_triton's kernels can be differentiated once; FASTVIT_TRITON_BACKEND=torch gives second derivatives"


def cast(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors in autocast's dtype where autocast is on for their device; otherwise as they are."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    return [t.to(torch.get_autocast_dtype(kind)) for t in tensors]


def apart(tensor: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor, as a view of itself where it is the other one: Dynamo takes no tensor twice."""
    return tensor if tensor is None or tensor is not other else tensor.view_as(tensor)


def can_fold_norm(x: torch.Tensor) -> bool:
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
