"""Types of grouped arguments, and checks of single arguments: rank, device, dtype, range.

Every error message is one sentence that names the argument and its value.
"""

import math
import os
from typing import NamedTuple

import torch
from torch import Tensor

from .op import expect

Pair = tuple[Tensor, Tensor]  # gate and up projections of SwiGLU, [F, K] each, or their biases [F]
Rope = tuple[Tensor, Tensor, bool | int]  # cos and sin, up to [B, H, N - prefix, D], and the pairs, see `attention_qkv`

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
LARGEST = 2.0**62  # its square is finite in float32, and as an int it has 64 bits
CHECK = os.environ.get("FASTVIT_TRITON_CHECK", "0") not in ("", "0")  # also check values of GPU tensors


class Norm(NamedTuple):
    """Parameters of the normalisation before a projection. A plain tuple (weight, bias, eps) is also accepted.

    Attributes:
        weight: γ [K], or None.
        bias: β [K], or None.
        eps: ε, added to the variance.
        kind: "layer_norm" or "rms_norm", which has no β and does not subtract the mean.
    """

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    kind: str = "layer_norm"


class Varlen(NamedTuple):
    """Boundaries of images of different sizes in one sequence of T tokens (NaFlex, NaViT).

    Attributes:
        cu_seqlens: [B + 1] non-decreasing integers from 0 to at most T; image b is tokens cu_seqlens[b] to
            cu_seqlens[b + 1] − 1.
        max_seqlen: at least the number of tokens of the longest image; sets the size of the launch. None means T.
    """

    cu_seqlens: Tensor
    max_seqlen: int | None


class Window(NamedTuple):
    """Windows of a feature map; see `kernels.window`.

    Attributes:
        size: (height, width) in tokens.
        shift: rows and columns by which the map is rolled first.
        pad_first: pad to whole windows, then roll (torchvision, transformers); else roll, then pad (timm).
        still: do not shift along an axis with a single window (torchvision).
    """

    size: tuple[int, int]
    shift: tuple[int, int] = (0, 0)
    pad_first: bool = True
    still: bool = False

    def shift_on(self, grid: tuple[int, ...]) -> tuple[int, int]:
        """The shift on a map of (H, W) tokens."""
        rows, columns = self.shift
        if not self.still:
            return rows, columns
        return rows * (grid[0] > self.size[0]), columns * (grid[1] > self.size[1])


NormLike = Norm | tuple[Tensor | None, Tensor | None, float]


def group_of(pairs: bool | int, D: int) -> int:
    """Channels of a head in which the first half is rotated with the second one, for the `pairs` of a `Rope`."""
    return (2 if pairs else D) if isinstance(pairs, bool) else pairs


def kind_of(norm: NormLike) -> str:
    """ "layer_norm", also for a plain tuple, or "rms_norm"."""
    return norm[3] if len(norm) == 4 else "layer_norm"


class Normalized(NamedTuple):
    """LN(x) for the next matmul, computed in the pass that wrote x."""

    y: Tensor  # LN(x) [B, ..., D], in the matmul's dtype
    mean: Tensor | None  # [M] fp32, for the backward pass, or None
    rstd: Tensor | None  # [M] fp32
    # bias of the branch's last matmul if it was already added to x, or to `pending`; the matmul then accumulates into x
    late_bias: Tensor | None = None
    pending: Tensor | None = None  # [D] fp32, what x lacks, see `Lent`; or None


class Lent(NamedTuple):
    """What the next block must know of a residual stream x [B, ..., D] that it may overwrite, in inference."""

    pending: Tensor | None  # [D] fp32, biases that matmuls left out, to be added to each row; None for zero

    def complete(self, x: Tensor) -> Tensor:
        """The stream with all biases."""
        return x if self.pending is None else (x + self.pending).to(x.dtype)


class NextNorm(NamedTuple):
    """The LayerNorm of the next branch, which a mixed call applies to its output."""

    norm: Norm  # parameters of the LayerNorm
    late_bias: Tensor | None = None  # bias [D] to add to the sum after the norm, or None; see `Normalized`
    lent: Lent | None = None  # given if the matmul is to accumulate into the residual, which was lent; else None
    lends: bool = False  # the sum may stay without its biases, which `Normalized` hands on as `pending`


class Reader(NamedTuple):
    """The `linear` or `mlp` that normalises an output, for `return_stats`: statistics it will not read are not made.

    Attributes:
        op: "linear" or "mlp".
        sizes: of the call, as `linear.plan_sizes` or `mlp.plan_sizes` returns them.
    """

    op: str
    sizes: tuple[int, ...]


class Epilogue(NamedTuple):
    """Operations fused after a matmul [..., F]."""

    activation: str | None  # name, or None
    layer_scale: Tensor | None  # [F], or None
    sample_scale: Tensor | None  # [B], the drop-path factor of each image, or None
    residual: Tensor | None  # [..., F], added last, or None
    return_stats: bool  # also return the row statistics of the result


def is_like(tensor: object, like: Tensor, *shape: int) -> bool:
    """True for a dense tensor of that shape with the dtype and device of `like`, which passes all checks."""
    return (
        isinstance(tensor, Tensor)
        and tensor.shape == shape
        and tensor.dtype == like.dtype
        and tensor.device == like.device
        and tensor.layout is torch.strided
    )


def expect_nonempty(argument: str, axis: str, size: int) -> None:
    """Raises ValueError if an axis has size 0."""
    if size < 1:
        raise ValueError(f"axis {axis} of {argument} must be at least 1, got {size}")


def expect_rows(argument: str, x: Tensor, axis: str) -> None:
    """Raises TypeError or ValueError unless x is a floating-point tensor [..., axis] with at least one channel."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided or not x.shape:
        expect(argument, x, **{"...": None, axis: None})
    if x.shape[-1] < 1 or x.dtype not in FLOATS:
        expect_nonempty(argument, axis, x.shape[-1])
        expect_floating(argument, x)


def expect_floating(argument: str, tensor: Tensor, like: Tensor | None = None) -> None:
    """Raises TypeError unless the tensor is floating point and, if `like` is given, has its dtype.

    Under autocast dtypes may differ, because autocast casts both operands of a matmul; it does not cast float64.
    """
    dtype = tensor.dtype
    if dtype not in FLOATS:
        raise TypeError(f"{argument} must be float32, bfloat16, float16 or float64, got {dtype}")
    if like is not None and dtype != like.dtype and not (is_autocast_on(like) and _can_mix(dtype, like.dtype)):
        raise TypeError(f"{argument} is {dtype}, the other operand {like.dtype}; give both the same dtype")


def expect_mixable(argument: str, tensor: Tensor, like: Tensor) -> None:
    """Raises TypeError unless the tensor is floating point, and float64 if and only if `like` is."""
    expect_floating(argument, tensor)
    if not _can_mix(tensor.dtype, like.dtype):
        raise TypeError(f"{argument} is {tensor.dtype}, x is {like.dtype}; float64 cannot be mixed with other dtypes")


def expect_norm_dtype(argument: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raises TypeError unless a LayerNorm's parameter has the dtype of its input, or is float32 for a 16-bit input."""
    if tensor.dtype == dtype:
        return
    expect_floating(argument, tensor)
    narrow = dtype in (torch.bfloat16, torch.float16) and tensor.dtype == torch.float32
    if not narrow and not (is_autocast_on(tensor) and _can_mix(tensor.dtype, dtype)):
        raise TypeError(f"{argument} is {tensor.dtype}, the input of the norm {dtype}; give both the same dtype")


def _can_mix(a: torch.dtype, b: torch.dtype) -> bool:
    return a == b or torch.float64 not in (a, b)


def is_autocast_on(x: Tensor) -> bool:
    """True if autocast is enabled for the device of x."""
    kind = x.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)  # is_autocast_enabled raises for "meta"


def expect_number(argument: str, value: float, least: float = -math.inf) -> None:
    """Raises TypeError unless the value is a number, ValueError unless it is finite, ≥ `least` and at most 2^62."""
    if type(value) is not float and not isinstance(value, (float, int, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{argument} must be a number, got {type(value).__name__}")
    if not (least <= value <= LARGEST and value >= -LARGEST):
        limit = "" if least == -math.inf else f", at least {least}"
        raise ValueError(f"{argument} must be finite{limit} and at most 2^62, got {value}")


def expect_int(argument: str, value: int, least: int, most: int | None = None) -> None:
    """Raises TypeError unless the value is an int, ValueError unless `least` ≤ value ≤ `most`."""
    if type(value) is not int and (not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool)):
        raise TypeError(f"{argument} must be an int, got {type(value).__name__}")
    if value < least or (most is not None and value > most):
        limits = f"at least {least}" if most is None else f"between {least} and {most}"
        raise ValueError(f"{argument} must be {limits}, got {value}")


def expect_bool(argument: str, value: bool) -> None:
    """Raises TypeError unless the value is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{argument} must be True or False, got {type(value).__name__}")


def expect_bool_or_reader(argument: str, value: bool | Reader) -> None:
    """Raises TypeError unless the value is True, False or a `Reader`."""
    if not isinstance(value, (bool, Reader)):
        raise TypeError(f"{argument} must be True, False or a Reader, got {type(value).__name__}")


def can_read_values(tensor: Tensor) -> bool:
    """True if a tensor's values may be read for a check: no tracing, and on a CPU or with FASTVIT_TRITON_CHECK=1."""
    if torch.compiler.is_compiling() or type(tensor) is not Tensor:  # fake tensors are a subclass
        return False
    if tensor.device.type != "cpu" and not (
        CHECK and tensor.device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
    ):
        return False
    traced = torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active()
    return not traced and not torch.jit.is_tracing()


def expect_norm(x: Tensor, dtype: torch.dtype, norm: NormLike, name: str = "", **axis: int) -> None:
    """Raises ValueError or TypeError unless the norm fits x [..., axis]; `dtype` is that of the norm's input."""
    weight, bias, eps = norm[:3]
    same_dtype = x.dtype == dtype
    if weight is not None and not (same_dtype and is_like(weight, x, *axis.values())):
        expect(f"{name}weight", weight, x, **axis)
        expect_norm_dtype(f"{name}weight", weight, dtype)
    if bias is not None and not (same_dtype and is_like(bias, x, *axis.values())):
        expect(f"{name}bias", bias, x, **axis)
        expect_norm_dtype(f"{name}bias", bias, dtype)
    expect_number(f"{name}eps", eps, 0)


def expect_scales(x: Tensor, layer_scale: Tensor | None, sample_scale: Tensor | None, **axis: int) -> None:
    """Raises ValueError or TypeError unless layer_scale is [axis] and sample_scale [B] for x [B, ...].

    sample_scale may not require a gradient where gradients are computed: it is taken for a random mask.
    """
    if layer_scale is not None and not is_like(layer_scale, x, *axis.values()):
        expect("layer_scale", layer_scale, x, **axis)
        expect_mixable("layer_scale", layer_scale, x)
    if sample_scale is not None:
        if x.dim() < 2:
            raise ValueError(f"x must have axes [B, ..., D] where sample_scale is given, got shape {list(x.shape)}")
        if not is_like(sample_scale, x, x.shape[0]):
            expect("sample_scale", sample_scale, x, B=x.shape[0])
            expect_mixable("sample_scale", sample_scale, x)
        if sample_scale.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "sample_scale requires a gradient, and none is computed for it; "
                "give sample_scale.detach(), or multiply the branch by it outside of the call"
            )


def expect_addable(argument: str, tensor: Tensor, x: Tensor, shape: tuple[int, ...]) -> None:
    """Raises ValueError or TypeError unless the tensor has that shape and can be added to x."""
    if is_like(tensor, x, *shape):
        return
    if not isinstance(tensor, Tensor) or tensor.dim() != len(shape):
        expect(argument, tensor, None, **{f"axis {i}": None for i in range(len(shape))})
    if tensor.shape != shape:
        raise ValueError(f"{argument} must have shape {list(shape)}, got {list(tensor.shape)}")
    if tensor.layout is not torch.strided or tensor.device != x.device:
        expect(argument, tensor, x)
    expect_mixable(argument, tensor, x)


def expect_integers(argument: str, tensor: Tensor) -> None:
    """Raises TypeError unless the tensor has an integer dtype."""
    if tensor.dtype not in INTEGERS:
        raise TypeError(f"{argument} must be int64, int32, int16, int8 or uint8, got {tensor.dtype}")
