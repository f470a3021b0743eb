"""The host half of every op: what it is, and whether a Triton kernel would run it here."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Op:
    """One public function's contract. Tests, benchmarks and `fastvit-triton doctor` read this and nothing else.

    Attributes:
        name: name of the public function.
        run: the public, differentiable function.
        reference: plain PyTorch with the same arguments; the CPU path and the oracle.
        cases: shapes by name, smallest and most ragged first.
        inputs: (case, dtype, device) to keyword arguments of `run`; floating tensors require gradients.
    """

    name: str
    run: Callable
    reference: Callable
    cases: dict[str, dict[str, int]]
    inputs: Callable[..., dict]


BACKENDS = ("auto", "torch")


def backend() -> str:
    """The one switch: FASTVIT_TRITON_BACKEND, "auto" unless set. "torch" always takes the PyTorch path.

    Raises:
        ValueError: the variable holds another word.
    """
    chosen = os.environ.get("FASTVIT_TRITON_BACKEND", "auto")
    if chosen not in BACKENDS:
        raise ValueError(f"FASTVIT_TRITON_BACKEND is {chosen!r}; use one of {', '.join(BACKENDS)}")
    return chosen


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why an op would take the PyTorch path on this device and dtype; None when its Triton kernel would run."""
    if backend() == "torch":
        return "FASTVIT_TRITON_BACKEND=torch asks for PyTorch"
    if device.type != "cuda":
        return f"Triton kernels need a CUDA or ROCm GPU, this is {device.type}"
    if dtype == torch.float64:
        return "float64 always runs on PyTorch"
    return "version 0.1 holds the references only; its Triton kernels are not written yet"


def make(device: torch.device | str, dtype: torch.dtype, seed: int = 0) -> Callable[..., torch.Tensor]:
    """A maker of random tensors for `Op.inputs`: `make(...)(2, 3)` is N(0, 1) of shape [2, 3] that requires gradients.

    Values are drawn in float64 on the CPU, so one case means the same numbers for every dtype and device.
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale + shift
        return values.to(device, dtype).requires_grad_()

    return randn


def expect(argument: str, tensor: torch.Tensor, **axes: int | None) -> None:
    """Raises ValueError when a tensor's axes are not those given; None accepts any size.

    The sentence names the argument, the axis and both sizes.
    """
    if tensor.dim() != len(axes):
        raise ValueError(f"{argument} must have axes [{', '.join(axes)}], got shape {list(tensor.shape)}")
    for (axis, size), got in zip(axes.items(), tensor.shape, strict=True):
        if size is not None and got != size:
            raise ValueError(f"axis {axis} of {argument} must be {size}, got {got} in shape {list(tensor.shape)}")
