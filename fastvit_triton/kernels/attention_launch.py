"""Launch parameters and arguments of the attention kernels, forward and backward."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import launch as launcher
from . import settings
from .launch import config, hint, launch, power_of_2, precision, split_tiles
from .tile import Kernel

ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? kv_lens, Tensor? cu_seqlens, SymInt max_seqlen, float scale"
)
MAX_PREPARED = 4096  # cached launches, by layout of the tensors
WIDTHS = (64, 128, 160, 192, 256, 320, 512, 1024)  # head widths in bytes in row names of tuned/

Tensors = dict[str, Any]  # by name: a tensor, or None

_prepared: dict[tuple, list] = {}  # by layout of the tensors; see `prepared`

# Default launch parameters by kernel, with separate entries for a bias, for a bias and a causal mask, for biases of
# rows and columns ("axes"), and for IEEE float32 products. The first row whose limit, in bytes, is at least the wider
# of q's and v's heads is used. Every row fits every architecture; only rows for fp32 heads of more than 64 channels
# spill registers, and with axes those for fp32 heads of more than 32, and for 256 channels.
SPACE = {
    "fwd": (
        (64, dict(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=1)),
        (192, dict(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2)),
        (256, dict(BLOCK_M=128, BLOCK_N=32, num_warps=8, num_stages=1)),
        (512, dict(BLOCK_M=32, BLOCK_N=32, num_warps=8, num_stages=1)),
        (1024, dict(BLOCK_M=16, BLOCK_N=32, num_warps=8, num_stages=1)),
    ),
    "fwd_bias": (
        (64, dict(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2)),
        (192, dict(BLOCK_M=64, BLOCK_N=64, num_warps=8, num_stages=2)),
        (256, dict(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=2)),
        (512, dict(BLOCK_M=16, BLOCK_N=32, num_warps=4, num_stages=1)),
        (1024, dict(BLOCK_M=16, BLOCK_N=32, num_warps=8, num_stages=1)),
    ),
    "fwd_bias_causal": (
        (128, dict(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=2)),
        (192, dict(BLOCK_M=32, BLOCK_N=16, num_warps=4, num_stages=2)),
        (256, dict(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=2)),
        (512, dict(BLOCK_M=16, BLOCK_N=32, num_warps=4, num_stages=1)),
        (1024, dict(BLOCK_M=16, BLOCK_N=32, num_warps=8, num_stages=1)),
    ),
    "fwd_axes": (
        (192, dict(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2)),
        (256, dict(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=2)),
        (512, dict(BLOCK_M=16, BLOCK_N=32, num_warps=4, num_stages=1)),
        (1024, dict(BLOCK_M=16, BLOCK_N=32, num_warps=8, num_stages=1)),
    ),
    "fwd_axes_ieee": (
        (256, dict(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=2)),
        (1024, dict(BLOCK_M=16, BLOCK_N=32, num_warps=8, num_stages=1)),
    ),
    "fwd_ieee": (
        (256, dict(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=1)),
        (1024, dict(BLOCK_M=16, BLOCK_N=32, num_warps=8, num_stages=1)),
    ),
    "bwd_dq": (
        (128, dict(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=3)),
        (192, dict(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2)),
        (256, dict(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=2)),
        (320, dict(BLOCK_M=32, BLOCK_N=16, num_warps=8, num_stages=1)),
        (512, dict(BLOCK_M=16, BLOCK_N=16, num_warps=4, num_stages=1)),
        (1024, dict(BLOCK_M=16, BLOCK_N=16, num_warps=8, num_stages=1)),
    ),
    "bwd_dq_bias": (
        (64, dict(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=3)),
        (192, dict(BLOCK_M=64, BLOCK_N=32, num_warps=8, num_stages=2)),
        (256, dict(BLOCK_M=16, BLOCK_N=32, num_warps=4, num_stages=1)),
        (320, dict(BLOCK_M=32, BLOCK_N=16, num_warps=8, num_stages=1)),
        (512, dict(BLOCK_M=16, BLOCK_N=32, num_warps=8, num_stages=1)),
        (1024, dict(BLOCK_M=16, BLOCK_N=16, num_warps=8, num_stages=1)),
    ),
    "bwd_dq_bias_causal": (
        (128, dict(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=2)),
        (192, dict(BLOCK_M=32, BLOCK_N=32, num_warps=8, num_stages=1)),
        (256, dict(BLOCK_M=16, BLOCK_N=32, num_warps=4, num_stages=1)),
        (320, dict(BLOCK_M=32, BLOCK_N=16, num_warps=8, num_stages=1)),
        (512, dict(BLOCK_M=16, BLOCK_N=32, num_warps=8, num_stages=1)),
        (1024, dict(BLOCK_M=16, BLOCK_N=16, num_warps=8, num_stages=1)),
    ),
    "bwd_dq_axes": (
        (128, dict(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=1)),
        (160, dict(BLOCK_M=64, BLOCK_N=32, num_warps=8, num_stages=1)),
        (192, dict(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=1)),
        (256, dict(BLOCK_M=32, BLOCK_N=16, num_warps=8, num_stages=1)),
        (512, dict(BLOCK_M=16, BLOCK_N=32, num_warps=8, num_stages=1)),
        (1024, dict(BLOCK_M=16, BLOCK_N=16, num_warps=8, num_stages=1)),
    ),
    "bwd_dq_ieee": (
        (128, dict(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=1)),
        (1024, dict(BLOCK_M=16, BLOCK_N=16, num_warps=8, num_stages=1)),
    ),
    "bwd_dq_bias_ieee": (
        (128, dict(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=1)),
        (256, dict(BLOCK_M=16, BLOCK_N=32, num_warps=8, num_stages=1)),
        (1024, dict(BLOCK_M=16, BLOCK_N=16, num_warps=8, num_stages=1)),
    ),
    "bwd_dkdv": (
        (128, dict(BLOCK_M=32, BLOCK_N=64, num_warps=4, num_stages=2)),
        (192, dict(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=2)),
        (256, dict(BLOCK_M=32, BLOCK_N=32, num_warps=8, num_stages=1)),
        (1024, dict(BLOCK_M=16, BLOCK_N=16, num_warps=8, num_stages=1)),
    ),
    "bwd_dkdv_bias": (
        (192, dict(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=1)),
        (256, dict(BLOCK_M=16, BLOCK_N=32, num_warps=8, num_stages=1)),
        (1024, dict(BLOCK_M=16, BLOCK_N=16, num_warps=8, num_stages=1)),
    ),
    "bwd_dkdv_bias_causal": (
        (128, dict(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=1)),
        (192, dict(BLOCK_M=16, BLOCK_N=16, num_warps=4, num_stages=1)),
        (256, dict(BLOCK_M=16, BLOCK_N=32, num_warps=8, num_stages=1)),
        (1024, dict(BLOCK_M=16, BLOCK_N=16, num_warps=8, num_stages=1)),
    ),
    "bwd_dkdv_axes": (
        (160, dict(BLOCK_M=16, BLOCK_N=32, num_warps=4, num_stages=1)),
        (1024, dict(BLOCK_M=16, BLOCK_N=16, num_warps=8, num_stages=1)),
    ),
    "bwd_dkdv_axes_ieee": (
        (128, dict(BLOCK_M=16, BLOCK_N=32, num_warps=4, num_stages=1)),
        (1024, dict(BLOCK_M=16, BLOCK_N=16, num_warps=8, num_stages=1)),
    ),
    "bwd_dkdv_ieee": (
        (128, dict(BLOCK_M=16, BLOCK_N=16, num_warps=4, num_stages=1)),
        (1024, dict(BLOCK_M=16, BLOCK_N=16, num_warps=8, num_stages=1)),
    ),
    "bwd": ((128, dict(BLOCK_M=16, BLOCK_N=128, num_warps=8, num_stages=1)),),
    "bwd_dbias": (
        (128, dict(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=1)),
        (512, dict(BLOCK_M=16, BLOCK_N=32, num_warps=4, num_stages=1)),
        (1024, dict(BLOCK_M=16, BLOCK_N=32, num_warps=8, num_stages=1)),
    ),
    "bwd_axes": (  # by the wider of the heads and of all rows and columns
        (160, dict(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=1)),
        (256, dict(BLOCK_M=128, BLOCK_N=32, num_warps=8, num_stages=1)),
        (512, dict(BLOCK_M=32, BLOCK_N=32, num_warps=8, num_stages=1)),
        (1024, dict(BLOCK_M=16, BLOCK_N=16, num_warps=8, num_stages=1)),
    ),
    "bwd_axes_ieee": (
        (256, dict(BLOCK_M=32, BLOCK_N=32, num_warps=8, num_stages=1)),
        (1024, dict(BLOCK_M=16, BLOCK_N=16, num_warps=8, num_stages=1)),
    ),
    "bwd_dbias_ieee": (
        (256, dict(BLOCK_M=16, BLOCK_N=32, num_warps=4, num_stages=1)),
        (1024, dict(BLOCK_M=16, BLOCK_N=16, num_warps=8, num_stages=1)),
    ),
}


def bias_kind(bias: Tensor | None, columns: int, causal: bool) -> str:
    """ "_bias", "_bias_causal", "_axes" for biases of rows and columns, or "" without: part of a row's name."""
    if bias is None:
        return ""
    return "_axes" if columns else "_bias_causal" if causal else "_bias"


def tuned_row(kernel: str, q: Tensor, kind: str, width: int) -> tuple[str, dict[str, int]]:
    """(row name in tuned/, default launch parameters) by `bias_kind`, for heads of `width` channels, in whole tiles."""
    ieee = "_ieee" if precision(q) == "ieee" else ""
    names = [f"{kernel}{kind}{ieee}", f"{kernel}{ieee}", kernel]
    name = next(name for name in names if name in SPACE)
    size = width * q.element_size()
    kind = "fp32." if q.dtype == torch.float32 else ""
    default = next(row for limit, row in SPACE[name] if size <= limit)
    return f"attention.{name}.{kind}{next(w for w in WIDTHS if size <= w)}", default


def blocks_of(kernel: str, q: Tensor, kind: str, images: int, Nq: int, Nk: int, width: int) -> dict[str, int]:
    """Launch parameters: from measurements or tuned/ if present, else from SPACE."""
    block = config(*tuned_row(kernel, q, kind, width), q.device, images * q.shape[1], Nq, Nk)
    if kernel == "fwd":
        block["BLOCK_M"] = min(block["BLOCK_M"], power_of_2(max(hint(Nq), 16)))
    return block


def whole_head_blocks(
    q: Tensor, bias: Tensor | None, ragged: bool, causal: bool, images: int, Nq: int, Nk: int, width: int
) -> dict[str, int] | None:
    """Launch parameters if one program computes all gradients of a head, None if two kernels do.

    dQ is rounded once per block of keys, so for more than two blocks two kernels are used. A row of tuned/ with
    BLOCK_N = 0 selects two kernels for any Nk. Causal attention has rows of its own: the mask takes registers.
    """
    (limit, default), size = SPACE["bwd"][-1], width * q.element_size()
    if bias is not None or q.dtype == torch.float32 or size > limit or width != power_of_2(width):
        return None
    row = f"attention.bwd.{'causal.' if causal else 'ragged.' if ragged else ''}{size}"
    blocks = config(row, default, q.device, images * q.shape[1], Nq, Nk)
    return blocks if Nk <= 2 * blocks["BLOCK_N"] else None


def tail_block(N: int, block: int, ragged: bool) -> int:
    """Width of the masked block after the full ones; 0 for none, a full block if N is not known."""
    if ragged or not isinstance(N, int):  # a symbol
        return block
    tail = N % block
    return power_of_2(max(tail, 16)) if tail else 0


def arguments_of(
    tensors: Tensors, max_seqlen: int, scale: float, columns: int = 0, causal: bool = False
) -> dict[str, object]:
    """Arguments of the kernels by name, except pointers: strides, sizes and flags.

    Args:
        tensors: q, k, v, bias, kv_lens, cu_seqlens, l, and those that have the layout of q, k or v.
        max_seqlen: of packed images.
        scale: softmax scale.
        columns: of the map of keys, if the bias is that of its rows and columns; else 0.
        causal: True if queries see only earlier keys.
    """
    q, k, v, bias, kv_lens, cu_seqlens = (tensors[n] for n in ("q", "k", "v", "bias", "kv_lens", "cu_seqlens"))
    (_, H, Nq, D), Nk, Dv = q.shape, k.shape[2], v.shape[3]
    (D0, D1), (V0, V1) = split_tiles(D), split_tiles(Dv)
    rows = Nk // columns if columns else 0
    if bias is not None and not columns:
        bias = bias.expand(bias.shape[0], H, Nq, Nk)
    heads = {n: t for n, t in tensors.items() if n in ("q", "k", "v", "o", "do", "dq", "dk", "dv")}
    strides: dict[str, Any] = {name: strides_of(t, cu_seqlens) for name, t in heads.items()}
    unit = 16 // q.element_size()
    unit = unit if all(stride % unit == 0 for triple in strides.values() for stride in triple) else 1
    strides = {f"{name}_strides": tuple(stride // unit for stride in triple) for name, triple in strides.items()}
    return strides | dict(
        bias_strides=(0, 0, 0, 0) if bias is None else bias.stride(), G=1 if bias is None else len(bias),
        l_strides=strides_of(tensors["l"], cu_seqlens)[:2],
        H=H, Nq=Nq if cu_seqlens is None else max_seqlen, Nk=Nk, T=Nq,
        scale=scale * math.log2(math.e), softmax_scale=scale,
        D=D, D0=D0, D1=D1, Dv=Dv, V0=V0, V1=V1, BIAS=0 if bias is None else 2 if bias.dtype == torch.bool else 1,
        ROWS=rows, COLUMNS=columns, WIDTH=power_of_2(max(rows + columns, 16)),
        HAS_KV_LENS=kv_lens is not None, HAS_CU_SEQLENS=cu_seqlens is not None, CAUSAL=causal,
        PRECISION=precision(q), UNIT=unit,
    )  # fmt: skip


class Prepared(NamedTuple):
    """A launch without its tensors: kernel, grid, names of its tensors, its numbers, compile-time arguments."""

    kernel: Kernel
    grid: tuple[int]
    tensors: list[str]
    numbers: list[object]
    fixed: dict[str, object]


def prepare(kernel: Kernel, programs: int, blocks: dict[str, int], **arguments: object) -> Prepared:
    """Prepares a launch of a kernel; uses only the named arguments that it takes. Its pointers come first."""
    at_run_time, constant = _names(kernel.fn)
    tensors = [name.removesuffix("_ptr") for name in at_run_time if name.endswith("_ptr")]
    numbers = [arguments[name] for name in at_run_time[len(tensors) :]]
    fixed = {name: arguments[name] for name in constant if name in arguments}
    return Prepared(kernel, (programs,), tensors, numbers, fixed | blocks)


def prepared(make: Callable[..., list[Prepared]], tensors: Tensors, *arguments: object) -> list[Prepared]:
    """Launches from make(tensors, *arguments), cached by the layout of the tensors; the first one is not None."""
    q = next(iter(tensors.values()))
    layouts = [None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors.values()]
    key = (make, q.device, settings.choices(q.device.type), *arguments, *layouts)
    launches = _prepared.get(key) if launcher._overrides is None else None
    if launches is None:
        launches = make(tensors, *arguments)
        if launcher._overrides is None:
            if len(_prepared) >= MAX_PREPARED:
                _prepared.clear()
            _prepared[key] = launches
    return launches


def start(prepared_launch: Prepared, tensors: Tensors) -> None:
    """Launches a prepared kernel on these tensors."""
    kernel, grid, names, numbers, fixed = prepared_launch
    launch(kernel, grid, *[tensors[name] for name in names], *numbers, **fixed)


def run(kernel: Kernel, programs: int, blocks: dict[str, int], **arguments: object) -> None:
    """Launches a kernel; uses only the named arguments that it takes."""
    tensors = {name.removesuffix("_ptr"): value for name, value in arguments.items()}
    start(prepare(kernel, programs, blocks, **arguments), tensors)


@functools.cache
def _names(function: Callable) -> tuple[list[str], list[str]]:
    """(names of a kernel's run-time parameters, names of its compile-time parameters, which are annotated)."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return [n for n in names if n not in function.__annotations__], list(function.__annotations__)


def strides_of(t: Tensor, cu_seqlens: Tensor | None) -> tuple[int, int, int]:
    """(batch, head, token) strides; the batch stride is 0 for packed images [1, H, T, D]."""
    return (0 if cu_seqlens is not None else t.stride(0), t.stride(1), t.stride(2))


def sizes_of(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, max_seqlen: int) -> tuple[int, int, int, int]:
    """(images, Nq, Nk of the longest image, channels of the wider head rounded up to whole tiles)."""
    width = max(sum(split_tiles(q.shape[3])), sum(split_tiles(v.shape[3])))
    if cu_seqlens is None:
        return q.shape[0], q.shape[2], k.shape[2], width
    return len(cu_seqlens) - 1, max_seqlen, max_seqlen, width
