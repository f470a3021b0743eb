"""Chooses how a block or an op runs, before any of its ops is called: a lookup in tables, without arithmetic.

Ways      fused: our kernels, with the LayerNorm folded into the first matmul.
          mixed: BLAS matmuls, and one pass for the operations between them: activation; LayerScale, stochastic depth,
          residual and the next LayerNorm. Attention by the kernel that is expected to be faster. In inference without
          LayerScale, the last matmul of a block adds to the residual in place, and no pass follows it. In inference,
          where BLAS does not compute the activation, the row of "fc1" says whether our kernel computes fc1 with it.
          plain: PyTorch's modules, operator by operator.
          onednn: on a CPU, oneDNN's products.

The first of these decides: a context (`settings.forcing`) or the backend switch; measurements on this GPU (see
`measured`); a measured row "ways" in tuned/<architecture>.json; a predicted row (see `predicted`); plain. On a CPU:
measurements on this machine; the row of this CPU in tuned/cpu.json; plain. All ways compute the same function, except
that GELU may be its tanh form, see `mixed`.

While a graph is traced, choices must not depend on the number of images or tokens, so those of `TRACED` are used. Mixed
and plain are then both PyTorch operators, which the compiler fuses, and are called plain.
"""

import math
import operator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from . import backend, launch, measured, onednn, predicted, settings
from .launch import measured_ways
from .measured import block_names, op_names
from .predicted import KEEP_DTYPE, gpu_on, op_row, predicted_way, row_of
from .settings import TRACED
from .sizes import Branch

MAX_CHOICES = 4096  # cached choices
NORMS = ("layer_norm", "add_layer_norm")  # ops


def has_ways(x: Tensor) -> bool:
    """True if a block with input x can run otherwise than plain: the kernels are available, or oneDNN on a CPU."""
    return backend.kernels_available(x) or onednn.usable(x)


class Choice(NamedTuple):
    """How the branches of a block, or an op, run, and why."""

    name: str  # kinds of the branches, "attention + mlp"; or name of the op
    way: str  # "fused", "mixed", "onednn" or "plain"
    # "asked for", "empty" (there are no tokens), or "measured" or "predicted", with the row that decided
    why: str
    shapes: tuple[str, ...]  # names in tables of measurements, most exact first
    branches: tuple[Branch, ...]  # of the block; empty for an op
    replayed: bool = False  # calls of the block are replayed, which takes less host time
    path: str | None = None  # of the module that made it, if observed in `settings.locating`


_choices: dict[tuple, str] = {}


def way_of(x: Tensor, branches: tuple[Branch, ...], training: bool, replayed: bool, frozen: str | None = None) -> str:
    """Chooses the way of a block's residual branches: "fused", "mixed", "onednn" or "plain".

    Of the residual x [B, ..., C], for which the kernels are available, only device and dtype are used. `training` is
    whether gradients are enabled, `frozen` the precision of a frozen block (see `engine.freeze`), else None.
    """
    traced = torch.compiler.is_compiling()
    dtypes = x.dtype, launch.product_dtype(x)
    return _way(x.device, dtypes, tuple(map(tuple, branches)), training, traced, replayed, frozen)


@backend.constant
def _way(
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype],
    sizes: tuple[tuple, ...],
    training: bool,
    traced: bool,
    replayed: bool,
    frozen: str | None,
) -> str:
    """`way_of`, for the dtypes of the residual and of the matmuls."""
    key = (device, dtypes, sizes, training, traced, replayed, frozen, *settings.choices(device.type))
    way = _choices.get(key)
    if way is None or settings.observer is not None:
        branches = tuple(Branch(*fields) for fields in sizes)
        if dtypes[0] == torch.float32 != dtypes[1]:
            branches = tuple(b._replace(wide=1) for b in branches)
        if traced:
            branches = tuple(b._replace(images=TRACED[0], tokens=TRACED[1]) for b in branches)
        switch = backend.backend()
        if device.type == "cpu" and launch.target is None and switch != "triton":
            choice = _choose_on_cpu(dtypes[1], branches, training, traced, frozen)
        else:
            choice = choose(device, branches, dtypes[1], training, traced, replayed, settings.forced, switch)
        way = "plain" if traced and choice.way != "fused" else choice.way
        _remember(key, choice._replace(way=way))
    return way


def _remember(key: tuple, choice: Choice) -> None:
    if len(_choices) >= MAX_CHOICES:
        _choices.clear()
    _choices[key] = choice.way
    if settings.observer is not None:
        settings.observer(choice if settings.locator is None else choice._replace(path=settings.locator()))


def choose(
    device: torch.device,
    branches: tuple[Branch, ...],
    dtype: torch.dtype,
    training: bool,
    traced: bool,
    replayed: bool,
    forced: str | None,
    switch: str,
) -> Choice:
    """The choice for a block's branches on a GPU, from the dtype of the matmuls and the settings; see `way_of`."""
    shapes = block_names(branches, "training" if training else "inference")
    choice = partial(Choice, " + ".join(b.kind for b in branches), shapes=shapes, branches=branches)
    if forced is not None or switch == "triton":
        return choice("plain" if forced == "onednn" else forced or "fused", "asked for")
    if not all(b.images * b.tokens for b in branches):
        return choice("plain", "empty")
    found = None if launch.is_ieee(dtype) else measured_way(device, shapes, replayed or traced)
    if found is None:
        mode = "compiled" if traced else "replayed" if replayed else "called"
        found = predicted_way(gpu_on(device), branches, dtype, training, mode)
    return choice(*found, replayed=replayed)


def _choose_on_cpu(
    dtype: torch.dtype, branches: tuple[Branch, ...], training: bool, traced: bool, frozen: str | None
) -> Choice:
    """`choose` on a CPU, where only oneDNN can replace PyTorch's products: by the block's mean product.

    A block frozen in another precision than float32 has packed weights, unless `.half()` was called since.
    """
    phase = "training" if training else "frozen" if frozen else "inference"
    shapes = block_names(branches, phase)
    choice = partial(Choice, " + ".join(b.kind for b in branches), shapes=shapes, branches=branches)
    packed = phase == "frozen" and frozen != "float32" and dtype == torch.float32 and settings.forced is None
    if traced:  # oneDNN's operator does not enter a graph here
        return choice("plain", "asked for")
    if not all(b.images * b.tokens for b in branches):
        return choice("plain", "empty")
    if settings.forced is not None or packed or onednn.forced():
        return choice("onednn" if packed or onednn.forced() else "plain", "asked for")
    lookups = shapes if phase != "frozen" else (*shapes, *block_names(branches, "inference"))
    if (found := measured_way(torch.device("cpu"), lookups)) is not None:
        return choice(*found)
    macs = [b.images * b.tokens * b.channels * size for b in branches for size in (b.width, b.inner)]
    way = "onednn" if onednn.pays(dtype, sum(macs) / len(macs), phase) else "plain"
    return choice(way, "measured")


def measured_way(device: torch.device, shapes: tuple[str, ...], replayed: bool = True) -> tuple[str, str] | None:
    """(the way measured for one of these shapes, on this GPU or else on its architecture; which row that is); or None.

    Blocks of the tables of architectures were replayed; they say nothing of others, which take the host longer.
    """
    pretended = launch.target is not None or settings.assumed is not None
    architecture = launch.architecture(device)
    tables = {"on this machine": measured.of(device, pretended).ways}
    if replayed:
        tables[f"in tuned/{architecture}.json"] = measured_ways(architecture)
    found = ((ways[shape], f"measured {where}: {shape}") for where, ways in tables.items() for shape in shapes
             if shape in ways)  # fmt: skip
    return next(found, None)


def rows_of(rows: int) -> int:
    """Number of rows by which an operand's path is chosen; constant while tracing."""
    return math.prod(TRACED) if torch.compiler.is_compiling() else rows


def lengths_of(images: int, queries: int, keys: int, heads: int) -> tuple[int, int, int, int]:
    """(images, heads, queries, keys) by which attention's path is chosen; constant while tracing, except one query."""
    if torch.compiler.is_compiling():
        images = TRACED[0]
        queries = 1 if isinstance(queries, int) and queries == 1 else TRACED[1]
        keys = TRACED[1]
    return images, heads, queries, keys


def is_asked_for() -> bool:
    """True if a way is forced, or the backend switch is "triton", so that no expected time decides."""
    return settings.forced is not None or backend.backend() == "triton"


def copies(x: Tensor, residual: Tensor | None) -> bool:
    """True if `linear` and `mlp` would copy an operand first, because its rows are strided; unknown while tracing."""
    if torch.compiler.is_compiling() or is_asked_for():
        return False
    return (x.stride(-1) != 1 and x.shape[-1] > 1) or not (residual is None or residual.is_contiguous())


def prefers_kernel(x: Tensor, op: str, *sizes: int) -> bool:
    """True if our kernels are chosen for a public function; they must be available.

    `OPS` says what the sizes of an op are; of x only device and dtype are used. Norms of a traced inference call are
    left to the compiler, which fuses them with what is around them.
    """
    if op in NORMS and torch.compiler.is_compiling() and not (torch.is_grad_enabled() or is_asked_for()):
        return False
    dtype = x.dtype if op in KEEP_DTYPE else launch.product_dtype(x)
    fixed = tuple(map(operator.index, sizes))  # of weights, which may be symbolic
    return _prefers(x.device, dtype, torch.is_grad_enabled(), op, fixed)


@backend.constant
def _prefers(device: torch.device, dtype: torch.dtype, training: bool, op: str, sizes: tuple) -> bool:
    if settings.forced is not None or backend.backend() == "triton":
        return settings.forced not in ("plain", "onednn")
    return _op_way(device, dtype, training, op, sizes) == "fused"


def computes_fc1(x: Tensor, sizes: tuple[int, ...]) -> bool:
    """True if a mixed call without gradients runs our kernel for fc1, by its row, also in a forced way."""
    return _op_way(x.device, x.dtype, False, "fc1", sizes) == "fused"


def _op_way(device: torch.device, dtype: torch.dtype, training: bool, op: str, sizes: tuple) -> str:
    key = (device, dtype, training, op, sizes, *settings.choices(device.type))
    way = _choices.get(key)
    if way is None or settings.observer is not None:
        choice = _choose_op(device, dtype, training, op, sizes)
        way = choice.way
        _remember(key, choice)
    return way


def _choose_op(device: torch.device, dtype: torch.dtype, training: bool, op: str, sizes: tuple) -> Choice:
    shapes = op_names(op, dtype.itemsize, training, sizes)
    found = None if launch.is_ieee(dtype) else measured_way(device, shapes)
    if found is None:
        way, why = row_of(gpu_on(device), *op_row(op, dtype, training, sizes))
        found = way or "plain", why
    return Choice(op, *found, shapes, ())


def forget() -> None:
    """Clears the caches, so that tables and files are read again."""
    launch.forget()
    _choices.clear()
    predicted.forget()
