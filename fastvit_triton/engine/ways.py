"""Caches how each block runs ("fused", "mixed", "onednn" or "plain"), as `kernels.choose` decides.

In a plain block the original modules run, and modules inside it do not select again. A block's sizes are read on its
first call and cached. Modules that are replaced, hooked or patched later change what can be fused: every fused or mixed
call checks for that, and the plain way is always correct.
"""

import functools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import choose, launch, settings
from ..kernels.layer_norm import MAX_D
from ..kernels.sizes import Branch
from .freeze import SIZES, precision_of
from .hooks import are_plain_tensors, is_repeatable

REPLAYS = os.environ.get("FASTVIT_TRITON_REPLAY", "1") not in ("", "0")
MAX_WAYS = 4096  # cached answers


@dataclass(frozen=True, eq=False, slots=True)
class Sizes:
    """What the selection depends on besides the input. `sizes_of` creates it: equal ones are one object.

    So it hashes by identity, in a key of every call.
    """

    branches: tuple[Branch, ...]  # sizes, for any number of images and tokens
    replayed: bool  # its calls can be replayed, see `replay`; found on the first call, as it affects only speed
    training: bool  # mode of the module, as BatchNorms update their statistics in training and are not replayed
    frozen: str | None  # the precision with which it was frozen; None if it was not

    def __reduce__(self) -> tuple:
        return sizes_of, (self.branches, self.replayed, self.training, self.frozen)


@functools.cache
def sizes_of(branches: tuple[Branch, ...], replayed: bool, training: bool, frozen: str | None) -> Sizes:
    """The one `Sizes` with these attributes."""
    return Sizes(branches, replayed, training, frozen)


class PlainState(threading.local):
    """Thread-local state.

    Attributes:
        inside_plain: True while a plain block runs.
    """

    def __init__(self) -> None:
        self.inside_plain = False  # of each thread, as Dynamo's guards read its attributes


state = PlainState()
_ways: dict[tuple, str] = {}


def known_way(module: nn.Module, x: Tensor) -> tuple[str | None, Any]:
    """(way, key) for a module that has run before; (None, None) on its first call, or if this call is not replayed.

    The key is that of the cache: sizes of the module, shape, dtype and device of x, and global settings.
    """
    if SIZES not in module.__dict__ or settings.observer is not None or torch.compiler.is_compiling():
        return None, None  # an observer must see each choice, once
    facts = module.__dict__
    if facts[SIZES].training is not facts["training"]:
        return None, None
    kind = "cpu" if x.is_cpu else x.device.type  # `device.type` makes a string
    key = facts[SIZES], x.shape, x.dtype, x.device, settings.choices(kind)
    try:
        way = _ways[key]
    except KeyError:
        if not choose.has_ways(x):
            return None, None
        if len(_ways) >= MAX_WAYS:
            _ways.clear()
        sizes = facts[SIZES]
        way = _ways[key] = _way(x, sizes.branches, sizes.replayed, sizes.frozen)
    # a record has no second derivatives, which oneDNN's products have
    return (None, None) if way == "onednn" and torch.is_grad_enabled() else (way, key)


def choose_way(module: nn.Module | None, x: Tensor, branches: tuple[Branch, ...], replays: bool = False) -> str:
    """Selects the way for these branches of x [B, ..., C]; the kernels must be available.

    Args:
        module: the block that they belong to, which caches their sizes; or None.
        x: the residual.
        branches: their sizes; the numbers of images and tokens come from x.
        replays: True if calls of the module go through `replay`.
    """
    if torch.compiler.is_compiling() or module is None:
        return _way(x, branches, False, None)
    sizes = module.__dict__.get(SIZES)
    frozen = precision_of(module)
    now = branches, module.training, frozen
    if sizes is None or (sizes.branches, sizes.training, sizes.frozen) != now:
        sizes = sizes_of(branches, replays and is_repeatable(module), module.training, frozen)
        module.__dict__[SIZES] = sizes
    return _way(x, sizes.branches, sizes.replayed, frozen)


def _way(x: Tensor, branches: tuple[Branch, ...], replayed: bool, frozen: str | None) -> str:
    for b in branches:
        if max(b.channels, b.width, b.inner) > MAX_D:
            return "plain"
    if not torch.compiler.is_compiling():
        tokens = x.numel() // max(x.shape[0] * x.shape[-1], 1)
        size = launch.product_dtype(x).itemsize
        branches = tuple([b._replace(images=x.shape[0], tokens=tokens, itemsize=size) for b in branches])
    way = choose.way_of(x, branches, torch.is_grad_enabled(), replayed and REPLAYS, frozen)
    return "plain" if way == "mixed" and not are_plain_tensors(x) else way  # traced tensors need registered ops


def plainly(forward: Callable, *inputs: object, **named: object) -> Any:
    """Runs forward(*inputs, **named) with all modules inside it plain."""
    before = state.inside_plain
    state.inside_plain = True
    try:
        return forward(*inputs, **named)
    finally:
        state.inside_plain = before
