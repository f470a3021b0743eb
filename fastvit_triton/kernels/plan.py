"""Chooses how a branch or an op runs, before any of its ops is called: "fused", "mixed" or "plain", see `cost`.

On a CPU the choice is between "onednn" and "plain", see `onednn`: by measurements on this machine, else by the row of
this CPU in tuned/cpu.json, else plain.

The first of these decides: a context (`forcing`) or the backend switch; measurements on this GPU (see `measured`); a
measured row "ways" in tuned/<architecture>.json; the least max(expected GPU time, host time), with the pessimistic
rates of our kernels. IEEE float32 matmuls always run in PyTorch; under autocast matmuls and attention have autocast's
dtype, whatever that of the residual. All ways compute the same function.

While a graph is traced, choices must not depend on the number of images or tokens, so those for `TRACED` sizes are
used. Mixed and plain are then both PyTorch operators, which the compiler fuses, and are called plain.
"""

import contextlib
import functools
import json
import math
import operator
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from . import backend, launch, measured, onednn, settings
from .cost import WAYS, Branch, Gpu, Launch, gpu_of, launch_us, launches, table
from .op_cost import OPS

TRACED = (256, 197)  # (images, tokens) assumed while tracing
MAX_CHOICES = 4096  # cached choices
NORMS = ("layer_norm", "add_layer_norm")  # ops
# ops whose operands autocast does not cast
KEEP_DTYPE = ("layer_norm", "add_layer_norm", "depthwise", "deformable_attention", "batch_norm_act")


def has_ways(x: Tensor) -> bool:
    """True if a block with input x can run otherwise than plain: the kernels are available, or oneDNN on a CPU."""
    return backend.kernels_available(x) or onednn.usable(x)


class Choice(NamedTuple):
    """How the branches of a block, or an op, run, and why.

    Attributes:
        name: kinds of the branches, "attention + mlp", or name of the op.
        way: "fused", "mixed", "onednn" or "plain".
        why: "asked for", "measured", "empty" (there are no tokens) or "expected" (the least time).
        shapes: names in tables of measurements, most exact first.
        branches: of the block; empty for an op.
        us: way → expected microseconds on the GPU, with the pessimistic rates of our kernels, and on the host; empty
            if they did not decide.
        refused: way → why it could not be chosen.
        replayed: True if calls of the block are replayed, which takes less host time.
        path: of the module that made it, if observed in `locating`; else None.
    """

    name: str
    way: str
    why: str
    shapes: tuple[str, ...]
    branches: tuple[Branch, ...]
    us: dict[str, tuple[float, float]]
    refused: dict[str, str]
    replayed: bool = False
    path: str | None = None


_choices: dict[tuple, str] = {}


def way_of(x: Tensor, branches: tuple[Branch, ...], training: bool, replayed: bool, frozen: str | None = None) -> str:
    """Chooses the way of a block's residual branches: "fused", "mixed", "onednn" or "plain".

    Args:
        x: [B, ..., C], the residual, for which the kernels are available; only its device and dtype are used.
        branches: of the block; while tracing, numbers of images and tokens are those of `TRACED`.
        training: True if gradients are enabled.
        replayed: True if calls of the block are replayed, see `engine.replay`.
        frozen: the precision with which it was frozen, see `engine.freeze`; None if it was not.
    """
    traced = torch.compiler.is_compiling()
    dtypes = x.dtype, launch.product_dtype(x)
    return _way(x.device, dtypes, tuple(tuple(b) for b in branches), training, traced, replayed, frozen)


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
        forced = settings.forced
        switch = backend.backend()
        exact = launch.is_ieee(dtypes[1])
        if device.type == "cpu" and launch.target is None and switch != "triton":
            phase = "training" if training else "frozen" if frozen else "inference"
            reduced = frozen not in (None, "float32") and phase == "frozen" and forced is None
            reduced = reduced and dtypes[1] == torch.float32  # not after `.half()`
            choice = _choose_on_cpu(dtypes[1], branches, phase, traced, "onednn" if reduced else forced, switch)
        else:
            choice = choose(device, branches, training, traced, replayed, forced, switch, exact)
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
    training: bool,
    traced: bool,
    replayed: bool,
    forced: str | None,
    switch: str,
    exact: bool,
) -> Choice:
    """Makes the choice for the branches of a block.

    Args:
        device: device of the GPU, see `gpu_on`.
        branches: of the block.
        training: True if gradients are enabled.
        traced: True while a graph is traced; host time is then ignored.
        replayed: True if calls of the block are replayed.
        forced: the way set by `forcing`, or None.
        switch: `backend.backend()`.
        exact: True if matmuls are in IEEE float32.
    """
    name = " + ".join(branch.kind for branch in branches)
    shapes = block_names(branches, "training" if training else "inference")
    if forced is not None or switch == "triton":
        return Choice(name, "plain" if forced == "onednn" else forced or "fused", "asked for", shapes, branches, {}, {})
    if not all(branch.images * branch.tokens for branch in branches):
        return Choice(name, "plain", "empty", shapes, branches, {}, {})
    way = None if exact else measured_way(device, shapes, replayed or traced)
    if way is not None:
        return Choice(name, way, "measured", shapes, branches, {}, {}, replayed)
    gpu = gpu_on(device)
    every = {way: launches(gpu, branches, way, training, False) for way in WAYS}
    us = {
        way: (
            sum(launch_us(gpu, one) for one in way_launches),
            0.0 if traced else host_us(way, len(branches), training, replayed),
        )
        for way, way_launches in every.items()
    }
    refusals = {way: refusal(way_launches, every["plain"], training, exact) for way, way_launches in every.items()}
    return _least(name, shapes, us, refusals)._replace(branches=branches, replayed=replayed)


def _choose_on_cpu(
    dtype: torch.dtype, branches: tuple[Branch, ...], phase: str, traced: bool, forced: str | None, switch: str
) -> Choice:
    """`choose` on a CPU, where only oneDNN can replace PyTorch's products: by the block's mean product.

    Args:
        dtype: of the products.
        branches: of the block.
        phase: one of `onednn.PHASES`.
        traced: True while a graph is traced, which oneDNN's operator does not enter.
        forced: the way set by `forcing`, or None.
        switch: `backend.backend()`.
    """
    name = " + ".join(branch.kind for branch in branches)
    shapes = block_names(branches, phase)
    if traced or not all(branch.images * branch.tokens for branch in branches):
        return Choice(name, "plain", "asked for" if traced else "empty", shapes, branches, {}, {})
    if forced is not None or switch == "onednn":
        way = "onednn" if forced in (None, "onednn") else "plain"
        return Choice(name, way, "asked for", shapes, branches, {}, {})
    lookups = shapes if phase != "frozen" else (*shapes, *block_names(branches, "inference"))
    measured_choice = measured_way(torch.device("cpu"), lookups)
    if measured_choice is not None:
        return Choice(name, measured_choice, "measured", shapes, branches, {}, {})
    macs = [b.images * b.tokens * b.channels * size for b in branches for size in (b.width, b.inner)]
    way = "onednn" if onednn.pays(dtype, sum(macs) / len(macs), phase) else "plain"
    return Choice(name, way, "measured", shapes, branches, {}, {})


def _least(
    name: str, shapes: tuple[str, ...], us: dict[str, tuple[float, float]], refusals: dict[str, str | None]
) -> Choice:
    """Chooses the way with the least expected time among those not refused; the first one of equals."""
    refused = {way: why for way, why in refusals.items() if why is not None}
    way = min((way for way in us if way not in refused), key=lambda way: max(us[way]))
    return Choice(name, way, "expected", shapes, (), us, refused)


def host_us(way: str, branches: int, training: bool, replayed: bool) -> float:
    """Expected host time in microseconds for this number of residual branches; a block has two."""
    phase = "training" if training else "inference"
    row = table()["host_us"]
    return row["eager"][phase] * row["replayed" if replayed else "called"][phase][way] * branches / 2


def refusal(ours: list[Launch], plain: list[Launch], training: bool, exact: bool) -> str | None:
    """Why a way is excluded regardless of its speed, or None.

    It is excluded if it moves more bytes or has more launches than the plain way, or runs our matmul in IEEE float32.
    In training it must move 2 % less, since casts and partial sums are not counted.
    """
    if ours is plain:
        return None
    if exact and any(one.kind == "fused product" for one in ours):
        return "products in IEEE float32 are PyTorch's"
    if sum(one.nbytes for one in ours) > sum(one.nbytes for one in plain) * (0.98 if training else 1.0):
        return "moves more bytes than plain"
    return "has more launches than plain" if len(ours) > len(plain) else None


def block_names(branches: tuple[Branch, ...], phase: str) -> tuple[str, str]:
    """Names of a block's shape in tables of measurements: with exact and with rounded sizes.

    Args:
        branches: of the block.
        phase: "inference" or "training"; on a CPU one of `onednn.PHASES`.
    """
    pair = branches, [branch.rounded for branch in branches]
    exact, near = (f"{' + '.join(branch.name for branch in sizes)} {phase}" for sizes in pair)
    return exact, f"~{near}"


def op_names(op: str, size: int, training: bool, sizes: tuple[int, ...]) -> tuple[str, str]:
    """As `block_names`, for an op with arguments of `size` bytes per value."""
    phase = f"{'training' if training else 'inference'}{' fp32' if size == 4 else ''}"
    exact, near, *_ = measured.names(f"{op} {phase}", tuple(map(int, sizes)))
    return exact, near


def measured_way(device: torch.device, shapes: tuple[str, ...], replayed: bool = True) -> str | None:
    """The way measured for one of these shapes, on this GPU or else on its architecture; or None.

    Blocks of the tables of architectures were replayed; they say nothing of others, which take the host longer.
    """
    pretended = launch.target is not None or settings.assumed is not None
    tables = [measured.of(device, pretended).ways]
    if replayed:
        tables.append(measured_ways(launch.architecture(device)))
    return next((ways[shape] for ways in tables for shape in shapes if shape in ways), None)


def product_refusal(x: Tensor, weight: Tensor, training: bool) -> str | None:
    """Why a linear layer of a captured graph stays PyTorch's; None if oneDNN's product replaces it.

    Args:
        x: [..., K]; for a symbolic number of rows, that of `TRACED` is used, so that the choice adds no guard.
        weight: [F, K].
        training: True if gradients of its output are wanted.
    """
    dtype = launch.product_dtype(x)
    reason = onednn.unlisted(x.device, dtype) or onednn.why_not(x.device, dtype)
    if reason is None and not all(t.layout is torch.strided for t in (x, weight)):
        reason = "it is not dense"
    if reason is not None or onednn.forced():
        return reason
    if not all(isinstance(size, int) for size in weight.shape):
        return "its weight has symbolic sizes"
    rows = math.prod(x.shape[:-1] if all(isinstance(size, int) for size in x.shape) else TRACED)
    pays = onednn.pays(dtype, rows * math.prod(weight.shape), "training" if training else "inference")
    return None if pays else "no measurement says that oneDNN's product of this size is faster on this CPU"


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

    Norms of a traced inference call are left to the compiler, which fuses them with what is around them.

    Args:
        x: tensor of the operation's device and dtype.
        op: a name in `op_cost.OPS`.
        sizes: arguments of its function in `op_cost.OPS`.
    """
    if op in NORMS and torch.compiler.is_compiling() and not (torch.is_grad_enabled() or is_asked_for()):
        return False
    dtype = x.dtype if op in KEEP_DTYPE else launch.product_dtype(x)
    fixed = tuple(map(operator.index, sizes))  # of weights, which may be symbolic
    return _prefers(x.device, dtype, dtype.itemsize, torch.is_grad_enabled(), op, fixed)


@backend.constant
def _prefers(device: torch.device, dtype: torch.dtype, size: int, training: bool, op: str, sizes: tuple) -> bool:
    if settings.forced is not None or backend.backend() == "triton":
        return settings.forced not in ("plain", "onednn")
    key = (device, dtype, training, op, sizes, *settings.choices(device.type))
    way = _choices.get(key)
    if way is None or settings.observer is not None:
        choice = _choose_op(device, size, training, launch.is_ieee(dtype), op, sizes)
        way = choice.way
        _remember(key, choice)
    return way == "fused"


def _choose_op(device: torch.device, size: int, training: bool, exact: bool, op: str, sizes: tuple) -> Choice:
    shapes = op_names(op, size, training, sizes)
    way = None if exact else measured_way(device, shapes)
    if way is not None:
        return Choice(op, way, "measured", shapes, (), {}, {})
    gpu, (ours, theirs) = gpu_on(device), OPS[op](size, training, *sizes)
    pair = dict(plain=theirs, fused=ours).items()
    us = {way: (sum(launch_us(gpu, one) for one in op_launches), 0.0) for way, op_launches in pair}
    return _least(op, shapes, us, dict(fused=refusal(ours, theirs, training, exact)))


def gpu_on(device: torch.device) -> Gpu:
    """The rates of this device's GPU, or of the one set by `assuming` or `launch.targeting`."""
    real = launch.target is None and device.type == "cuda"
    return settings.assumed or _gpu_on(launch.architecture(device), real, device.index)


@functools.cache
def _gpu_on(architecture: str, real: bool, index: int | None) -> Gpu:
    return gpu_of(architecture, torch.cuda.get_device_name(index) if real else "")


@contextlib.contextmanager
def forcing(way: str) -> Iterator[None]:
    """Context in which every branch runs in this way if possible, and ops run our kernels unless it is "plain".

    Raises:
        ValueError: the way is not "fused", "mixed", "onednn" or "plain".
    """
    if way not in (*WAYS, "onednn"):
        raise ValueError(f"way is {way!r}; use one of {', '.join(WAYS)} or onednn")
    before = settings.forced
    settings.forced = way
    try:
        yield
    finally:
        settings.forced = before


@contextlib.contextmanager
def assuming(gpu: Gpu) -> Iterator[None]:
    """Context in which choices are made for `gpu` on any device; see `launch.targeting` for its architecture."""
    before = settings.assumed
    settings.assumed = gpu
    try:
        yield
    finally:
        settings.assumed = before


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Context in which no observer is called, because the choices are not followed."""
    before = settings.observer
    settings.observer = None
    try:
        yield
    finally:
        settings.observer = before


@contextlib.contextmanager
def observing(observer: Callable[[Choice], None]) -> Iterator[None]:
    """Context in which `observer` is called with each choice."""
    before = settings.observer
    settings.observer = observer
    try:
        yield
    finally:
        settings.observer = before


@contextlib.contextmanager
def locating(locator: Callable[[], str | None]) -> Iterator[None]:
    """Context in which observed choices have the path that `locator` returns, which is called where one is made."""
    before = settings.locator
    settings.locator = locator
    try:
        yield
    finally:
        settings.locator = before


@functools.cache
def measured_ways(architecture: str) -> dict[str, str]:
    """Measured ways in the table of an architecture: name of a branch and phase → way."""
    path = launch.TUNED / f"{architecture}.json"
    rows = json.loads(path.read_text()) if path.exists() else {}
    return rows.get("ways", {}).get("measured", {})


def forget() -> None:
    """Clears the caches, so that tables and files are read again."""
    launch.forget()
    _choices.clear()
    measured_ways.cache_clear()
    _gpu_on.cache_clear()
