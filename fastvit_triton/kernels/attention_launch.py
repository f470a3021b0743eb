"""Launch parameters and arguments of the attention kernels, forward and backward."""

import functools
import itertools
import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import launch as launcher
from . import settings
from .descriptor import SUFFIX, boxes, heads_first
from .launch import cdiv, config, hint, launch, power_of_2, precision, split_tiles
from .tile import Kernel

ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? kv_lens, Tensor? cu_seqlens, SymInt max_seqlen, float scale"
)
MAX_PREPARED = 4096  # cached launches, by layout of the tensors
WHOLE = 256  # keys up to which a program can hold whole rows of scores
SHARED = 226 * 1024  # bytes of a block on sm_90, less 1 KiB for barriers
WIDTHS = (64, 128, 160, 192, 256, 320, 512, 1024)  # head widths in bytes in row names of tuned/

HEADS = ("q", "k", "v", "o", "do", "dq", "dk", "dv")

Tensors = dict[str, Any]  # by name: a tensor, or None

_prepared: dict[tuple, list] = {}  # by layout of the tensors; see `prepared`


@functools.cache
def defaults() -> dict[str, list[tuple[int, dict[str, int]]]]:
    """Default launch parameters by kernel: (limit in bytes of the wider of q's and v's heads, parameters), in order.

    A bias, a bias with a causal mask, biases of rows and columns ("axes", for "bwd_axes" limited by the wider of heads
    and axes), and products in IEEE float32 have entries of their own. BLOCK_M = 0: the loop over blocks of keys, "fwd"
    or "bwd", runs instead. Every row fits every architecture; only rows for fp32 heads of more than 64 channels spill
    registers, and with axes those for fp32 heads of more than 32, and for 256 channels.
    """
    kernels = json.loads((launcher.TUNED / "defaults" / "attention.json").read_text())
    return {kernel: [(int(limit), row) for limit, row in rows.items()] for kernel, rows in kernels.items()}


def bias_kind(bias: Tensor | None, columns: int, causal: bool) -> str:
    """ "_bias", "_bias_causal", "_axes" for biases of rows and columns, or "" without: part of a row's name."""
    if bias is None:
        return ""
    return "_axes" if columns else "_bias_causal" if causal else "_bias"


def tuned_row(kernel: str, q: Tensor, kind: str, width: int) -> tuple[str, dict[str, int]]:
    """(row name in tuned/, default launch parameters) by `bias_kind`, for heads of `width` channels, in whole tiles."""
    ieee = "_ieee" if precision(q) == "ieee" else ""
    names = [f"{kernel}{kind}{ieee}", f"{kernel}{ieee}", kernel]
    name = next(name for name in names if name in defaults())
    size = width * q.element_size()
    kind = "fp32." if q.dtype == torch.float32 else ""
    default = next(row for limit, row in defaults()[name] if size <= limit)
    return f"attention.{name}.{kind}{next(w for w in WIDTHS if size <= w)}", default


def blocks_of(kernel: str, q: Tensor, kind: str, images: int, Nq: int, Nk: int, width: int) -> dict[str, int]:
    """Launch parameters: from measurements or tuned/ if present, else the defaults."""
    block = config(*tuned_row(kernel, q, kind, width), q.device, images * q.shape[1], Nq, Nk)
    if kernel == "fwd":
        block["BLOCK_M"] = min(block["BLOCK_M"], power_of_2(max(hint(Nq), 16)))
    return block


def whole_blocks(q: Tensor, images: int, Nq: int, Nk: int, width: int) -> dict[str, int] | None:
    """Launch parameters if a program holds whole rows of scores, with no bias or mask; None if it loops over keys.

    That needs a row "attention.fwd_whole" whose BLOCK_M is not 0, and up to WHOLE keys, whose number must be known. In
    a row with TMA = 1 programs are persistent and read by descriptors; see `reads_boxes`.
    """
    if not isinstance(Nk, int) or not 0 < Nk <= WHOLE:
        return None
    blocks = config(*tuned_row("fwd_whole", q, "", width), q.device, images * q.shape[1], Nq, Nk)
    if not blocks["BLOCK_M"]:
        return None
    blocks["BLOCK_M"] = min(blocks["BLOCK_M"], power_of_2(max(hint(Nq), 16)))
    N0, N1, N2 = pieces_of(Nk)
    return blocks | dict(N0=N0, N1=N1, N2=N2, MASKED=N0 + N1 + N2 != Nk)


def reads_boxes(tensors: Tensors) -> bool:
    """True if the kernels with descriptors can read and write these heads.

    That needs sm_90, 16-bit heads of 16, 32 or 64 channels, and layouts that `heads_first` knows: for the output tokens
    first, for the gradients of q, k and v that of the tensor.
    """
    q, v = tensors["q"], tensors["v"]
    D = q.shape[3]
    if q.element_size() != 2 or D not in (16, 32, 64) or v.shape[3] != D or not isinstance(q.shape[2], int):
        return False
    if launcher.architecture(q.device) != "sm_90":
        return False
    first = {name: heads_first(tensors[name]) for name in HEADS if name in tensors}
    wanted = first | dict(o=False) | {f"d{name}": first[name] for name in "qkv"}
    return None not in first.values() and all(wanted[name] == found for name, found in first.items())


def boxes_of(tensors: Tensors, rows: dict[str, int]) -> dict[str, Any]:
    """Arguments by name of a kernel with descriptors that `arguments_of` has not.

    rows: of the box of each descriptor, by its name without "_desc": that of its tensor, or, as "k0", a piece's; 0 for
    no descriptor.
    """
    arguments: dict[str, Any] = {}
    for name, length in rows.items():
        t = name.rstrip("012")
        arguments[f"{name}_desc"] = (t, *boxes(tensors[t], bool(heads_first(tensors[t])), length)) if length else None
    return arguments | {f"{name.upper()}_FIRST": bool(heads_first(t)) for name, t in tensors.items() if name in HEADS}


def whole_boxes(tensors: Tensors, blocks: dict[str, int]) -> dict[str, Any]:
    """`boxes_of` of the forward pass; adapts `blocks` to few queries and to the shared memory."""
    B, H, Nq, D = tensors["q"].shape
    tile = blocks["BLOCK_M"] = blocks["BLOCK_M"] if Nq > 64 else 64
    blocks["num_warps"] = min(blocks["num_warps"], tile // 16)  # each takes at least 16 rows of a product
    pieces = {f"{name}{i}": blocks[f"N{i}"] for name in "kv" for i in range(3)}
    fitting = (SHARED // (2 * D) - tile) // (sum(pieces.values()) + tile)  # beside the tile that is written
    blocks["num_stages"] = min(blocks["num_stages"], fitting)
    return boxes_of(tensors, dict(q=tile, o=tile) | pieces) | dict(heads=B * H, tiles=cdiv(Nq, tile))


@functools.cache
def units(device: torch.device) -> int:
    """Multiprocessors of a GPU; those of an H100 or H200 where the CPU stands for one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def whole(kernel: str = "fwd_whole", **blocks: int) -> dict[str, dict[str, int]]:
    """Rows for `launch.overriding`, which make programs hold whole rows of scores wherever they can."""
    return {f"attention.{kernel}.{kind}{width}": blocks for kind in ("", "fp32.") for width in WIDTHS}


@functools.cache
def pieces_of(Nk: int) -> tuple[int, int, int]:
    """Up to three powers of two, of which Nk ≤ WHOLE keys fill most: 197 → 128, 64, 16; 50 → 64, 0, 0."""
    descending = itertools.combinations_with_replacement((128, 64, 32, 16, 0), 3)
    enough = (pieces for pieces in descending if sum(pieces) >= Nk)
    return min(enough, key=lambda pieces: (sum(pieces), 3 - pieces.count(0)))


def whole_head_blocks(
    q: Tensor, bias: Tensor | None, ragged: bool, causal: bool, images: int, Nq: int, Nk: int, width: int
) -> dict[str, int] | None:
    """Launch parameters if one program computes all gradients of a head, None if two kernels do.

    dQ is rounded once per block of keys, so for more than two blocks two kernels are used. A row of tuned/ with
    BLOCK_N = 0 selects two kernels for any Nk. Causal attention has rows of its own: the mask takes registers.
    """
    (limit, default), size = defaults()["bwd"][-1], width * q.element_size()
    if bias is not None or q.dtype == torch.float32 or size > limit or width != power_of_2(width):
        return None
    row = f"attention.bwd.{'causal.' if causal else 'ragged.' if ragged else ''}{size}"
    blocks = config(row, default, q.device, images * q.shape[1], Nq, Nk)
    return blocks if Nk <= 2 * blocks["BLOCK_N"] else None


def whole_head_boxes(
    tensors: Tensors, images: int, Nk: int, width: int
) -> tuple[dict[str, int], dict[str, Any]] | None:
    """(launch parameters, `boxes_of`) of the backward pass with all keys at once and by descriptors; or None.

    That needs a row "attention.bwd_whole" whose BLOCK_M is not 0, and up to WHOLE keys, whose number must be known.
    BLOCK_M is for WHOLE keys: with fewer of them, tiles of as many scores have more queries, at most 64.
    """
    q = tensors["q"]
    if not isinstance(Nk, int) or not 0 < Nk <= WHOLE:
        return None
    blocks = config(*tuned_row("bwd_whole", q, "", width), q.device, images * q.shape[1], q.shape[2], Nk)
    if not blocks["BLOCK_M"] or not reads_boxes(tensors):
        return None
    keys = blocks["BLOCK_N"] = power_of_2(max(Nk, 64))
    tile = blocks["BLOCK_M"] = min(blocks["BLOCK_M"] * (WHOLE // keys), 64)
    rows = dict.fromkeys(("q", "o", "do", "dq"), tile) | dict.fromkeys(("k", "v", "dk", "dv"), keys)
    return blocks, boxes_of(tensors, rows) | dict(MASKED=keys != Nk)


def tail_block(N: int, block: int, ragged: bool) -> int:
    """Width of the masked block after the full ones; 0 for none, a full block if N is not known."""
    if ragged or not isinstance(N, int):  # a symbol
        return block
    tail = N % block
    return power_of_2(max(tail, 16)) if tail else 0


def loads_tail_early(blocks: dict[str, int], size: int) -> bool:
    """True if the masked block of keys, which follows the loop, is loaded before it; for heads of `size` bytes.

    Its tiles take registers during the loop. Where that costs a resident block or spills by the compile report, it is
    loaded after the loop: for wide heads, few queries, and one stage, in which each block of keys waits anyway.
    """
    return size <= 160 and blocks["BLOCK_M"] >= 64 and blocks["num_stages"] > 1


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
    heads = {n: t for n, t in tensors.items() if n in HEADS}
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


class PreparedLaunch(NamedTuple):
    """A launch without its tensors: kernel, grid, names of its tensors, its numbers, compile-time arguments.

    For a descriptor there is (name, shape, strides, box), or None, in place of the name.
    """

    kernel: Kernel
    grid: tuple[int]
    tensors: list[Any]
    numbers: list[object]
    fixed: dict[str, object]


def prepare(kernel: Kernel, programs: int, blocks: dict[str, int], **arguments: object) -> PreparedLaunch:
    """Prepares a launch of a kernel; uses only the named arguments that it takes. Tensors come first.

    For a pointer its tensor is named, for a descriptor the argument is as in `PreparedLaunch`.
    """
    at_run_time, constant = _names(kernel.fn)
    tensors = [
        arguments[name] if name.endswith(SUFFIX) else name.removesuffix("_ptr")
        for name in at_run_time
        if name.endswith(("_ptr", SUFFIX))
    ]
    numbers = [arguments[name] for name in at_run_time[len(tensors) :]]
    fixed = {name: arguments[name] for name in constant if name in arguments}
    return PreparedLaunch(kernel, (programs,), tensors, numbers, fixed | blocks)


def prepared(make: Callable[..., list[PreparedLaunch]], tensors: Tensors, *arguments: object) -> list[PreparedLaunch]:
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


def start(prepared_launch: PreparedLaunch, tensors: Tensors) -> None:
    """Launches a prepared kernel on these tensors."""
    kernel, grid, names, numbers, fixed = prepared_launch
    launch(kernel, grid, *[tensors[n] if type(n) is str else _box(tensors, n) for n in names], *numbers, **fixed)


def _box(tensors: Tensors, place: tuple[str, tuple, tuple, tuple] | None) -> tuple | None:
    return None if place is None else (tensors[place[0]], *place[1:])


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
