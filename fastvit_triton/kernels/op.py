"""The `Op` record, registration with torch.library, autocast casts and shape checks."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Op:
    """Description of one public function, for tests, benchmarks and `fastvit-triton doctor`.

    Attributes:
        name: name of the public function.
        run: the public, differentiable function.
        reference: the same in PyTorch: CPU path and test oracle.
        cases: small shapes by name, for finite differences.
        inputs: (case, dtype, device) → keyword arguments of `run`; floating-point tensors require gradients.
        ragged: larger shapes by name, to test the Triton kernels; may be empty.
    """

    name: str
    run: Callable
    reference: Callable
    cases: dict[str, dict[str, int]]
    inputs: Callable[..., dict]
    ragged: dict[str, dict[str, int]] = field(default_factory=dict)


LIBRARY = torch.library.Library("fastvit_triton", "DEF")
REGISTERED: dict[str, tuple[Callable, Callable]] = {}  # op → (launch, fake); see `register`
ONCE = (
    b"fastvit_triton's kernels can be differentiated once; FASTVIT_TRITON_BACKEND=torch under "
    b"torch.nn.attention.sdpa_kernel(SDPBackend.MATH) gives second derivatives"
)


def cast(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors in autocast's dtype if autocast is enabled for the device of the first one, else unchanged."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    return [t.to(torch.get_autocast_dtype(kind)) for t in tensors]


def distinct(tensor: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor, or a view of it if it is `other`: Dynamo does not allow a Function to receive a tensor twice."""
    return tensor if tensor is None or tensor is not other else tensor.view_as(tensor)


def can_fold_norm(x: torch.Tensor) -> bool:
    """True if a LayerNorm of x can be folded into the next matmul: x has the matmul's dtype."""
    kind = x.device.type
    return not torch.is_autocast_enabled(kind) or torch.get_autocast_dtype(kind) == x.dtype


def register(name: str, schema: str, launch: Callable, fake: Callable) -> Callable:
    """Registers torch.ops.fastvit_triton.<name> as one opaque op and returns its overload.

    Args:
        name: of the op.
        schema: arguments and results in torch.library's syntax, without the name.
        launch: allocates outputs and launches kernels; called with the first tensor's device as the current one.
        fake: returns outputs of the same shapes, dtypes and strides without data.
    """

    @functools.wraps(launch)
    def on_device(*arguments):
        # kernels assume that vectors are contiguous; launchers handle the strides of larger tensors
        arguments = [a.contiguous() if isinstance(a, torch.Tensor) and a.dim() == 1 else a for a in arguments]
        device = _first_device(arguments)
        if device.type == "cuda":
            with torch.cuda.device(device):
                return launch(*arguments)
        try:
            return launch(*arguments)
        except RuntimeError as error:
            if "active drivers" not in str(error):
                raise
            raise RuntimeError(
                f"{name} cannot run its Triton kernel on {device}; "
                "set TRITON_INTERPRET=1 for the interpreter, or FASTVIT_TRITON_BACKEND=auto for PyTorch"
            ) from error

    REGISTERED[name] = on_device, fake
    LIBRARY.define(name + schema)
    for key in ("CUDA", "CPU"):
        LIBRARY.impl(name, on_device, key)
    torch.library.register_fake(f"fastvit_triton::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.fastvit_triton, name).default


def _first_device(arguments: list) -> torch.device:
    """Device of the first tensor among the arguments, which may be in a list."""
    for argument in arguments:
        for tensor in argument if isinstance(argument, (list, tuple)) else (argument,):
            if isinstance(tensor, torch.Tensor):
                return tensor.device
    raise TypeError("an op needs at least one tensor")


def once_differentiable(backward: Callable) -> Callable:
    """Decorator for a Function's backward pass: differentiating its gradients again raises RuntimeError.

    Unlike PyTorch's decorator of the same name it also raises if the incoming gradients do not require gradients.
    """

    @functools.wraps(backward)
    def wrapper(ctx, *grads):
        with torch.no_grad():
            outputs = backward(ctx, *grads)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():  # enabled only with create_graph=True
            return outputs
        refuse = torch._C._functions.DelayedError(ONCE, len(outputs))
        return refuse(*(t if t is None else t.detach().requires_grad_() for t in outputs))

    return wrapper


def make_randn(device: torch.device | str, dtype: torch.dtype, seed: int = 0) -> Callable[..., torch.Tensor]:
    """A function for `Op.inputs` that makes normally distributed tensors: `make_randn(device, dtype)(2, 3)` is [2, 3].

    The tensors require gradients. Values are drawn in float64 on the CPU, so a case has the same values for every dtype
    and device.
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale + shift
        return values.to(device, dtype).requires_grad_()

    return randn


def expect(argument: str, tensor: torch.Tensor, beside: torch.Tensor | None = None, /, **axes: int | None) -> None:
    """Checks that an argument is a dense tensor, on the device of `beside`, with these axes.

    Args:
        argument: its name, for the message.
        tensor: its value.
        beside: a tensor that must be on the same device; None for any device.
        axes: size by axis name; None accepts any size.

    Raises:
        TypeError: it is not a dense tensor.
        ValueError: its device, rank or a size differs.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        actual = f"one of layout {tensor.layout}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(f"{argument} must be a dense tensor, got {actual}")
    if beside is not None and tensor.device != beside.device:
        raise ValueError(f"{argument} is on {tensor.device}, the arguments before it on {beside.device}; move it there")
    shape = tensor.shape
    if len(shape) == len(axes):
        for length, size in zip(shape, axes.values(), strict=True):
            if size is not None and size != length:
                break
        else:
            return
    if len(shape) != len(axes):
        raise ValueError(f"{argument} must have axes [{', '.join(axes)}], got shape {list(shape)}")
    for (axis, size), length in zip(axes.items(), shape, strict=True):
        if size is not None and length != size:
            raise ValueError(f"axis {axis} of {argument} must be {size}, got {length} in shape {list(shape)}")
