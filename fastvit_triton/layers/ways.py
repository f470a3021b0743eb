"""How a block runs, "fused", "mixed" or "plain": one lookup in each call, see `kernels.plan`.

In plain blocks the modules run as they are, and what they hold does not ask again. What a block is made of is read when
it first runs, and only its sizes are kept: a module that was replaced, hooked or patched later changes what can be
fused, which every fused or mixed call checks, and the plain way is right for all of them.
"""

import os
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..kernels import backend, launch, measured, plan
from ..kernels.backend import kernels_available
from ..kernels.cost import Branch
from ..kernels.layer_norm import MAX_D
from .hooks import are_plain_tensors, can_fuse, is_repeatable

SIZES = "_fastvit_triton_sizes"  # key in a module's __dict__: its `Sizes`
REPLAYS = os.environ.get("FASTVIT_TRITON_REPLAY", "1") not in ("", "0")
MAX_WAYS = 4096  # cached answers


class Sizes(NamedTuple):
    """What the way of a module depends on besides its input.

    Attributes:
        branches: sizes, for any number of images and tokens.
        replayed: its calls are replayed, see `replay`; as found when it first ran, for it decides on speed alone.
    """

    branches: tuple[Branch, ...]
    replayed: bool


class State(threading.local):
    """What holds for the calls of one thread.

    Attributes:
        inside_plain: a plain block runs.
    """

    inside_plain = False


state = State()
_ways: dict[tuple, str] = {}


def known_way(module: nn.Module, x: Tensor) -> tuple[str | None, tuple | None]:
    """(way, settings) of a call of a module that ran before; None for one that did not, and where no kernel runs.

    The settings are all that the way depends on: sizes of the module and of x, and what is set globally.
    """
    if SIZES not in module.__dict__ or torch.compiler.is_compiling():
        return None, None
    kind = x.device.type
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    precision = torch._C._get_float32_matmul_precision()  # the stream may turn float32 after a 16-bit x
    settings = (
        module.__dict__[SIZES], x.shape, x.dtype, x.device, torch.is_grad_enabled(), autocast, precision,
        plan.forced, plan.assumed, backend._switch, launch.target, measured.in_use,
    )  # fmt: skip
    if settings in _ways and plan._observer is None:  # which is told of each choice
        return _ways[settings], settings
    if not kernels_available(x):
        return None, None
    if len(_ways) >= MAX_WAYS:
        _ways.clear()
    way = _ways[settings] = _way(x, *settings[0])
    return way, settings


def choose_way(module: nn.Module | None, x: Tensor, branches: tuple[Branch, ...], replays: bool = False) -> str:
    """The way of these branches of x [B, ..., C], where the kernels run.

    Args:
        module: the block that they belong to, which keeps their sizes; None for none.
        x: what they are added to.
        branches: their sizes; numbers of images and tokens are those of x.
        replays: calls of the module are given to `replay`.
    """
    if torch.compiler.is_compiling():
        return _way(x, branches, False)
    if module is None:
        return _way(x, branches, False)
    known = module.__dict__.get(SIZES)
    if known is None or known.branches != branches:
        known = module.__dict__[SIZES] = Sizes(branches, replays and is_repeatable(module))
    return _way(x, *known)


def way_alone(body: nn.Module, x: Tensor) -> str:
    """The way of a `layers.body.Body` that is called by itself; "plain" also where the kernels do not run."""
    if state.inside_plain or not can_fuse(x):
        return "plain"
    way, _ = known_way(body, x)
    return choose_way(body, x, (body.sizes(),)) if way is None else way


def _way(x: Tensor, branches: tuple[Branch, ...], replayed: bool) -> str:
    if any(max(b.channels, b.width, b.inner) > MAX_D for b in branches):
        return "plain"
    if not torch.compiler.is_compiling():
        tokens = x.numel() // max(x.shape[0] * x.shape[-1], 1)
        size = 2 if torch.is_autocast_enabled(x.device.type) else x.element_size()
        branches = tuple(b._replace(images=x.shape[0], tokens=tokens, itemsize=size) for b in branches)
    way = plan.way_of(x, branches, torch.is_grad_enabled(), replayed and REPLAYS)
    return "plain" if way == "mixed" and not are_plain_tensors(x) else way  # traced tensors are for registered ops


def plainly(forward: Callable, *inputs: object, **named: object) -> object:
    """forward(*inputs, **named), a block's own code, in which nothing asks for a way."""
    before, state.inside_plain = state.inside_plain, True
    try:
        return forward(*inputs, **named)
    finally:
        state.inside_plain = before
