"""Device functions, launch parameters and arguments of the window attention kernels, forward and backward.

Names     m and n are places of queries and keys in a window, 0 … N − 1 row by row; `layout` is (H, W, rows of windows,
          columns of windows, sy, sx). A token is real if it lies in the image, and padded otherwise.
Flags     SHIFTED, PADDED: windows are shifted; some tokens are padded. PAD_FIRST: see `window_attention`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .launch import cdiv, config, power_of_2, precision
from .tile import jit, tl

WIDEST = 64  # channels of a head; wider heads take the PyTorch path
ONE_TILE = 64  # places of a window that one tile holds
PROGRAMS = 1024  # least number of programs, if there are as many windows; the same on all GPUs, as sums depend on it

# Default launch parameters, which fit every architecture; rows of tuned/ override them.
SPACE = {
    "fwd": dict(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=1),
    "fwd.large": dict(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=1),
    "fwd.fp32": dict(BLOCK_M=32, BLOCK_N=16, num_warps=4, num_stages=1),
    "bwd": dict(BLOCK_M=64, BLOCK_N=64, num_warps=8, num_stages=1),
    "bwd.large": dict(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=1),
    "bwd.fp32": dict(BLOCK_M=16, BLOCK_N=16, num_warps=4, num_stages=1),
    "bwd_dq.large": dict(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=1),
    "bwd_dq.fp32": dict(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=1),
    "bwd_dbias.large": dict(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=1),
    "bwd_dbias.fp32": dict(BLOCK_M=16, BLOCK_N=32, num_warps=4, num_stages=1),
}


@jit
def places(
    n, window, layout, h: tl.constexpr, w: tl.constexpr,
    SHIFTED: tl.constexpr, PADDED: tl.constexpr, PAD_FIRST: tl.constexpr,
):  # fmt: skip
    """(image, row, column, whether real) of places n of a window, counted over all images. Equation (1)."""
    H, W, rows, columns, sy, sx = layout
    b = (window // columns // rows).to(tl.int64)
    y = window // columns % rows * h + n // w
    x = window % columns * w + n % w
    real = n < h * w
    if SHIFTED and PAD_FIRST:
        y, x = (y + sy) % (rows * h), (x + sx) % (columns * w)
    if PADDED:
        real = real & (y < H) & (x < W)
    if SHIFTED and not PAD_FIRST:
        y, x = (y + sy) % H, (x + sx) % W
    return b, y.to(tl.int64), x.to(tl.int64), real


@jit
def load_tokens(ptr, pad_ptr, at, real, padded, d, D: tl.constexpr, WIDTH: tl.constexpr):
    """Loads channels d of a head of the tokens at `at`, which broadcast; of padded ones from pad_ptr, if not None."""
    inside = real & (d < D) if WIDTH > D else real
    x = tl.load(ptr + at + d, mask=inside, other=0.0)
    if pad_ptr is not None:
        pad = tl.load(pad_ptr + d, mask=d < D, other=0.0).to(x.dtype) if WIDTH > D else tl.load(pad_ptr + d).to(x.dtype)
        x = tl.where(padded, pad, x)
    return x


@jit
def store_tokens(ptr, x, at, real, D: tl.constexpr, WIDTH: tl.constexpr):
    """Stores x [tokens, WIDTH] where `load_tokens` reads real tokens."""
    d = tl.arange(0, WIDTH)[None, :]
    inside = real[:, None] & (d < D) if WIDTH > D else real[:, None]
    tl.store(ptr + at[:, None] + d, x.to(ptr.dtype.element_ty), mask=inside)


@jit
def unit(x, axis: tl.constexpr):
    """(x / max(‖x‖₂, 1e-12) along an axis, in the dtype of x; max(‖x‖₂, 1e-12)). Equation (3)."""
    wide = x.to(tl.float32)
    norm = tl.maximum(tl.sqrt(tl.sum(wide * wide, axis)), 1e-12)
    return (wide / tl.expand_dims(norm, axis)).to(x.dtype), norm


@jit
def unit_grad(dy, y, norm):
    """(gradient of x, y·dy) for y, norm = unit(x, 1) and the gradient dy of y."""
    along = tl.sum(y.to(tl.float32) * dy, 1)
    inner = tl.where(norm > 1e-12, along, 0.0)
    return (dy - y.to(tl.float32) * inner[:, None]) / norm[:, None], along


@jit
def load_bias(bias_ptr, bias_strides, head, m, n, N: tl.constexpr):
    """The bias of queries m and keys n, 0 without a bias; −inf for keys past the end. m and n broadcast."""
    bias = 0.0
    if bias_ptr is not None:
        at = bias_ptr + head.to(tl.int64) * bias_strides[0] + m.to(tl.int64) * bias_strides[1]
        bias = tl.load(at + n.to(tl.int64) * bias_strides[2], mask=(m < N) & (n < N), other=0.0).to(tl.float32)
    return tl.where((n < N) & (m >= 0), bias, float("-inf"))


@jit
def scores(product, scale, bias, m, n, window, layout, h: tl.constexpr, w: tl.constexpr, SHIFTED: tl.constexpr):
    """Equation (2) from q kᵀ or its transpose, and `load_bias`; m and n broadcast."""
    s = product * scale + bias
    if SHIFTED:  # only the last row and the last column of windows have more than one region
        _, _, rows, columns, sy, sx = layout
        last_row, last_column = window // columns % rows == rows - 1, window % columns == columns - 1
        if last_row | last_column:
            apart = ((m // w >= h - sy) != (n // w >= h - sy)) & last_row
            apart |= ((m % w >= w - sx) != (n % w >= w - sx)) & last_column
            s += tl.where(apart, -100.0, 0.0)
    return s


@jit
def exp_minus(s, shift):
    """exp(s − shift). The difference is taken first: it is exact for the largest scores."""
    return tl.exp2((s - shift) * 1.4426950408889634)  # log₂e


@jit
def lse_place(b, head, y, x, heads, H, W, bias_ptr):
    """Where L is stored; if there is a bias, the row's maximum is, and the logarithm of its sum one plane further."""
    planes: tl.constexpr = 1 if bias_ptr is None else 2
    return ((b * heads + head) * planes * H + y) * W + x


@jit
def next_plane(at, H, W):
    """Where the logarithms of sums are stored, for places of maxima; in 64 bits."""
    return at + tl.cast(H, tl.int64) * W


@jit
def load_lse(l_ptr, at, real, H, W, bias_ptr):
    """Loads (row maximum, log of row sum), or (L, 0); +inf, so that P = 0, for padded queries and rows without keys."""
    lse = tl.load(l_ptr + at, mask=real, other=float("inf"))
    log_sum = tl.zeros(at.shape, tl.float32)
    if bias_ptr is not None:
        log_sum = tl.load(l_ptr + next_plane(at, H, W), mask=real, other=0.0)
    return tl.where(lse == float("-inf"), float("inf"), lse), log_sum


def tuned_row(kernel: str, qkv: Tensor, arguments: dict[str, Any]) -> tuple[str, dict[str, int]]:
    """(row name in tuned/, default launch parameters); "large" needs smaller tiles, or has several for a window."""
    large = arguments["D"] > 32 or arguments["N"] > ONE_TILE or arguments["COSINE"] or arguments["PADDED"]
    large = large or kernel in ("bwd_dq", "bwd_dbias")
    kind = ".fp32" if qkv.dtype == torch.float32 else ".large" if large else ""
    return f"window.{kernel}{kind}", SPACE[kernel + kind]


def blocks_of(kernel: str, qkv: Tensor, arguments: dict[str, Any]) -> dict[str, int]:
    """Launch parameters: from measurements or tuned/ if present, else from SPACE; tiles are no larger than a window."""
    sizes = (arguments[name] for name in ("windows", "heads", "N"))
    blocks = config(*tuned_row(kernel, qkv, arguments), qkv.device, *sizes)
    largest = power_of_2(max(arguments["N"], 16))
    return blocks | {name: min(blocks[name], largest) for name in ("BLOCK_M", "BLOCK_N")}


def runs_of(windows: int, programs: int, most: int) -> int:
    """Number of programs that share the windows, each with at most `most`, if each is repeated `programs` times."""
    return min(windows, max(cdiv(windows, most), cdiv(PROGRAMS, programs)))


def readable(qkv: Tensor, bias: Tensor | None, window_size: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """qkv and bias, copied if their layout does not suit the kernels.

    The bias of a window that fits one tile is read once by each program, in any layout; larger ones are read for every
    window, so their keys must be adjacent.
    """
    small = window_size[0] * window_size[1] <= ONE_TILE
    if bias is not None and not small and bias.stride(2) != 1:
        bias = bias.contiguous()
    return qkv if qkv.stride(-1) == 1 else qkv.contiguous(), bias


def arguments_of(
    tensors: dict[str, Any], heads: int, window_size: Sequence[int], shift_size: Sequence[int], scale: float,
    pad_first: bool,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of the kernels by name, except pointers: strides, sizes and flags."""
    qkv = tensors["qkv"]
    bias = tensors["bias"]
    (B, H, W, width), (h, w) = qkv.shape, window_size
    rows = cdiv(H, h)
    columns = cdiv(W, w)
    D = width // (3 * heads)
    unit = 16 // qkv.element_size()
    unit = unit if all(stride % unit == 0 for stride in qkv.stride()[:3]) else 1
    return dict(
        qkv_strides=tuple(stride // unit for stride in qkv.stride()[:3]), UNIT=unit,
        bias_strides=(0, 0, 0) if bias is None else bias.stride(),
        layout=(H, W, rows, columns, *shift_size), windows=B * rows * columns, heads=heads, scale=scale,
        h=h, w=w, N=h * w, D=D, WIDTH=power_of_2(max(D, 16)), SHIFTED=any(shift_size),
        PADDED=(rows * h, columns * w) != (H, W), PAD_FIRST=pad_first, COSINE=tensors["scales"] is not None,
        PRECISION=precision(qkv),
    )  # fmt: skip
