"""Chooses how a branch or an op runs, before any of its ops is called: "fused", "mixed" or "plain", see `cost`.

The choice is, in this order: what a context (`forcing`) or the switch asks for; a measured row "ways" in
tuned/<architecture>.json; the least max(expected GPU time, host time), with the pessimistic rates of our kernels.
Products in IEEE float32 are left to PyTorch. All ways compute the same function.

While a graph is traced nothing depends on the number of images or tokens: the answer is that for `TRACED` rows. Mixed
and plain are then the same, PyTorch operators that the compiler fuses, and are called plain.
"""

import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from . import backend, launch
from .cost import OPS, WAYS, Branch, Gpu, Launch, gpu_of, launch_us, launches, table

TRACED = (256, 197)  # images and tokens that stand for all while tracing
MAX_CHOICES = 4096  # cached choices
HOST_RATIO = {  # host time of a block against timm's, by way; measured by `python -m benchmarks.host`
    "inference": dict(plain=1.05, mixed=4.0, fused=5.0),
    "training": dict(plain=1.05, mixed=4.5, fused=5.0),
}

forced: str | None = None  # overrides the choice, see `forcing`
_choices: dict[tuple, str] = {}
_observer: Callable[[tuple[Branch, ...], str], None] | None = None  # see `observing`


def way_of(x: Tensor, branches: tuple[Branch, ...], training: bool) -> str:
    """The way of the residual branches of a block: "fused", "mixed" or "plain".

    Args:
        x: [B, ..., C], where the kernels run; its device and dtype count.
        branches: of the block.
        training: gradients are on.
    """
    traced = torch.compiler.is_compiling()
    return _way(x.device, x.dtype, tuple(tuple(b) for b in branches), training, traced)


def _way(device: torch.device, dtype: torch.dtype, sizes: tuple[tuple, ...], training: bool, traced: bool) -> str:
    key = (device, dtype, sizes, training, traced, *_asked(dtype))
    way = _choices.get(key)
    if way is None:
        branches = tuple(Branch(*one) for one in sizes)
        if traced:
            branches = tuple(b._replace(images=TRACED[0], tokens=TRACED[1]) for b in branches)
        way = choose(device, branches, training, traced, *key[5:])
        way = "plain" if traced and way != "fused" else way
        _remember(key, way)
    if _observer is not None:
        _observer(tuple(Branch(*one) for one in sizes), way)
    return way


_way._dynamo_marked_constant = True  # as torch.compiler.assume_constant_result does, which would import Dynamo


def _asked(dtype: torch.dtype) -> tuple:
    """Global state that a choice depends on."""
    exact = dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return forced, backend.backend(), launch.target, exact


def _remember(key: tuple, way: str) -> None:
    if len(_choices) >= MAX_CHOICES:
        _choices.clear()
    _choices[key] = way


def choose(
    device: torch.device,
    branches: tuple[Branch, ...],
    training: bool,
    traced: bool,
    asked: str | None,
    switch: str,
    target: str | None,
    exact: bool,
) -> str:
    """The choice; a pure function of its arguments and of the tables."""
    if asked is not None or switch == "triton":
        return asked or "fused"
    measured = measured_ways(launch.architecture(device)).get(block_name(branches, training))
    if measured is not None:
        return measured
    if not all(branch.images * branch.tokens for branch in branches):
        return "plain"
    gpu = gpu_on(device)
    every = {way: launches(gpu, branches, way, training, False) for way in WAYS}
    times = {
        way: sum(launch_us(gpu, one) for one in found)
        for way, found in every.items()
        if within(found, every["plain"], training)
    }
    if not traced:
        host, phase = table()["host_us"]["eager"], "training" if training else "inference"
        for way, us in times.items():
            times[way] = max(us, host[phase] * HOST_RATIO[phase][way] * len(branches) / 2)
    if exact:
        times.pop("fused", None)
    return min(times, key=times.get)


def within(ours: list[Launch], plain: list[Launch], training: bool) -> bool:
    """No way is chosen that moves more bytes than the modules, or has more launches (in training a tenth more)."""
    most = len(plain) * (1.1 if training else 1.0)
    return len(ours) <= most and sum(one.nbytes for one in ours) <= sum(one.nbytes for one in plain)


def block_name(branches: tuple[Branch, ...], training: bool) -> str:
    """Name of a block's shape in the tables of measured ways."""
    return f"{' + '.join(branch.name for branch in branches)} {'training' if training else 'inference'}"


def rows_of(rows: int) -> int:
    """Rows of an operand as choices see them."""
    return math.prod(TRACED) if torch.compiler.is_compiling() else rows


def lengths_of(images: int, queries: int, keys: int, heads: int) -> tuple[int, int, int, int]:
    """(images, heads, queries, keys) of an attention as choices see them; a single query stays one."""
    if torch.compiler.is_compiling():
        images, queries, keys = TRACED[0], 1 if isinstance(queries, int) and queries == 1 else TRACED[1], TRACED[1]
    return images, heads, queries, keys


def prefers_kernel(x: Tensor, op: str, *sizes: int) -> bool:
    """True if our kernels are chosen for one public function, whose caller checked that they run.

    Args:
        x: tensor of the operation's device and dtype.
        op: a name in `cost.OPS`.
        sizes: arguments of its function there.
    """
    return _prefers(x.device, x.dtype, x.element_size(), torch.is_grad_enabled(), op, sizes)


def _prefers(device: torch.device, dtype: torch.dtype, size: int, training: bool, op: str, sizes: tuple) -> bool:
    asked, switch, _, exact = state = _asked(dtype)
    if asked is not None or switch == "triton":
        return asked != "plain"
    key = (device, dtype, training, op, sizes, *state)
    way = _choices.get(key)
    if way is None:
        gpu, pair = gpu_on(device), OPS[op](size, training, *sizes)
        ours, theirs = (sum(launch_us(gpu, one) for one in found) for found in pair)
        refused = exact and any(one.kind == "fused product" for one in pair[0])
        way = "fused" if ours < theirs and within(*pair, training) and not refused else "plain"
        _remember(key, way)
    return way == "fused"


_prefers._dynamo_marked_constant = True


def gpu_on(device: torch.device) -> Gpu:
    """The rates of this device's GPU, or of the architecture in its place."""
    return _gpu_on(launch.architecture(device), launch.target is None and device.type == "cuda", device.index)


@functools.cache
def _gpu_on(architecture: str, here: bool, index: int | None) -> Gpu:
    return gpu_of(architecture, torch.cuda.get_device_name(index) if here else "")


@contextlib.contextmanager
def forcing(way: str) -> Iterator[None]:
    """In this context every branch runs in that way wherever it can, and ops run our kernels unless it is "plain".

    Raises:
        ValueError: the way is not "fused", "mixed" or "plain".
    """
    global forced
    if way not in WAYS:
        raise ValueError(f"way is {way!r}; use one of {', '.join(WAYS)}")
    before, forced = forced, way
    try:
        yield
    finally:
        forced = before


@contextlib.contextmanager
def observing(observer: Callable[[tuple[Branch, ...], str], None]) -> Iterator[None]:
    """In this context `observer` is called with the branches and the way of each choice."""
    global _observer
    before, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = before


@functools.cache
def measured_ways(architecture: str) -> dict[str, str]:
    """Measured ways in the table of an architecture: name of a branch and phase → way."""
    path = launch.TUNED / f"{architecture}.json"
    rows = json.loads(path.read_text()) if path.exists() else {}
    return rows.get("ways", {}).get("measured", {})


def forget() -> None:
    """Clears the caches, so that tables are read again."""
    _choices.clear()
    measured_ways.cache_clear()
    _gpu_on.cache_clear()
