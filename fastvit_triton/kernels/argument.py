"""What one argument of a public function must be: a rank, a device, a dtype, a number.

A message is one sentence that names the argument and what was given.
"""

import math
import os

import torch
from torch import Tensor

from .op import expect

Norm = tuple[Tensor | None, Tensor | None, float]  # weight [K], bias [K], eps

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
LARGEST = 2.0**62  # of a number: its square is finite in float32, and as an int it is one of 64 bits
CHECK = os.environ.get("FASTVIT_TRITON_CHECK", "0") not in ("", "0")  # values that lie on a GPU are checked too


def fits(tensor: Tensor, like: Tensor, *shape: int) -> bool:
    """A tensor of that shape with the dtype and device of `like`: the usual case, which needs no further look."""
    return (
        isinstance(tensor, Tensor)
        and tensor.shape == shape
        and tensor.dtype == like.dtype
        and tensor.device == like.device
        and tensor.layout is torch.strided
    )


def filled(argument: str, axis: str, size: int) -> None:
    """Raises ValueError when an axis that must not be empty is."""
    if size < 1:
        raise ValueError(f"axis {axis} of {argument} must be at least 1, got {size}")


def expect_rows(argument: str, x: Tensor, axis: str) -> None:
    """Raises where x is no tensor [..., axis] of floating point numbers with at least one channel."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided or not x.shape:
        expect(argument, x, **{"...": None, axis: None})
    if x.shape[-1] < 1 or x.dtype not in FLOATS:
        filled(argument, axis, x.shape[-1])
        floating(argument, x)


def floating(argument: str, tensor: Tensor, like: Tensor | None = None) -> None:
    """Raises TypeError when a tensor is not floating point, or is multiplied with `like` and has another dtype.

    Autocast, where it is on, gives both one dtype; it leaves float64 alone.
    """
    dtype = tensor.dtype
    if dtype not in FLOATS:
        raise TypeError(f"{argument} must be float32, bfloat16, float16 or float64, got {dtype}")
    if like is not None and dtype != like.dtype and not (autocasts(like) and _mixes(dtype, like.dtype)):
        raise TypeError(f"{argument} is {dtype}, what it is multiplied with {like.dtype}; give both one dtype")


def mixing(argument: str, tensor: Tensor, like: Tensor) -> None:
    """Raises TypeError when a tensor is not floating point, or one of the two alone is float64."""
    floating(argument, tensor)
    if not _mixes(tensor.dtype, like.dtype):
        raise TypeError(f"{argument} is {tensor.dtype}, x is {like.dtype}; float64 goes with float64 only")


def normalizing(argument: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raises TypeError when a LayerNorm's parameter has neither the dtype of its input nor, beside 16 bits, float32."""
    if tensor.dtype == dtype:
        return
    floating(argument, tensor)
    narrow = dtype in (torch.bfloat16, torch.float16) and tensor.dtype == torch.float32
    if not narrow and not (autocasts(tensor) and _mixes(tensor.dtype, dtype)):
        raise TypeError(f"{argument} is {tensor.dtype}, what is normalised {dtype}; give both one dtype")


def _mixes(a: torch.dtype, b: torch.dtype) -> bool:
    return a == b or torch.float64 not in (a, b)


def autocasts(x: Tensor) -> bool:
    """Autocast is on for x's device."""
    kind = x.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)  # which does not know the meta device


def number(argument: str, value: float, least: float = -math.inf) -> None:
    """Raises TypeError when a value is no number, ValueError when it is below `least`, not finite or huge."""
    if type(value) is not float and not isinstance(value, (float, int, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{argument} must be a number, got {type(value).__name__}")
    if not (least <= value <= LARGEST and value >= -LARGEST):
        limit = "" if least == -math.inf else f", at least {least}"
        raise ValueError(f"{argument} must be finite{limit} and at most 2^62, got {value}")


def whole(argument: str, value: int, least: int, most: int | None = None) -> None:
    """Raises TypeError when a value is no int, ValueError when it is not between `least` and `most`."""
    if type(value) is not int and (not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool)):
        raise TypeError(f"{argument} must be an int, got {type(value).__name__}")
    if value < least or (most is not None and value > most):
        limits = f"at least {least}" if most is None else f"between {least} and {most}"
        raise ValueError(f"{argument} must be {limits}, got {value}")


def flag(argument: str, value: bool) -> None:
    """Raises TypeError when a value is neither True nor False."""
    if not isinstance(value, bool):
        raise TypeError(f"{argument} must be True or False, got {type(value).__name__}")


def readable(tensor: Tensor) -> bool:
    """The values of a tensor may be checked: nothing is traced, and they lie on a CPU or FASTVIT_TRITON_CHECK is 1."""
    if torch.compiler.is_compiling() or type(tensor) is not Tensor:  # a fake tensor is of a subclass
        return False
    if tensor.device.type != "cpu" and not (
        CHECK and tensor.device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
    ):
        return False
    traced = torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active()
    return not traced and not torch.jit.is_tracing()


def norm_parameters(x: Tensor, dtype: torch.dtype, given: Norm, name: str = "", **axis: int) -> None:
    """Raises where (weight, bias, eps) are not those of a LayerNorm of rows like x's, in that dtype, over one axis."""
    weight, bias, eps = given
    usual = x.dtype == dtype
    if weight is not None and not (usual and fits(weight, x, *axis.values())):
        expect(f"{name}weight", weight, x, **axis)
        normalizing(f"{name}weight", weight, dtype)
    if bias is not None and not (usual and fits(bias, x, *axis.values())):
        expect(f"{name}bias", bias, x, **axis)
        normalizing(f"{name}bias", bias, dtype)
    number(f"{name}eps", eps, 0)


def factors(x: Tensor, layer_scale: Tensor | None, sample_scale: Tensor | None, **axis: int) -> None:
    """Raises where LayerScale, a value for each channel, or drop-path, one for each image of x, do not fit."""
    if layer_scale is not None and not fits(layer_scale, x, *axis.values()):
        expect("layer_scale", layer_scale, x, **axis)
        mixing("layer_scale", layer_scale, x)
    if sample_scale is not None:
        if x.dim() < 2:
            raise ValueError(f"x must have axes [B, ..., D] where sample_scale is given, got shape {list(x.shape)}")
        if not fits(sample_scale, x, x.shape[0]):
            expect("sample_scale", sample_scale, x, B=x.shape[0])
            mixing("sample_scale", sample_scale, x)


def added(argument: str, tensor: Tensor, x: Tensor, shape: tuple[int, ...]) -> None:
    """Raises where a tensor does not have that shape, or cannot be added to x."""
    if fits(tensor, x, *shape):
        return
    if not isinstance(tensor, Tensor) or tensor.dim() != len(shape):
        expect(argument, tensor, None, **{f"axis {i}": None for i in range(len(shape))})
    if tensor.shape != shape:
        raise ValueError(f"{argument} must have shape {list(shape)}, got {list(tensor.shape)}")
    if tensor.layout is not torch.strided or tensor.device != x.device:
        expect(argument, tensor, x)
    mixing(argument, tensor, x)


def integers(argument: str, tensor: Tensor) -> None:
    """Raises TypeError when a tensor of sizes does not hold integers."""
    if tensor.dtype not in INTEGERS:
        raise TypeError(f"{argument} must be int64, int32, int16, int8 or uint8, got {tensor.dtype}")
