"""Calls a block, or replays its recording for the same input layouts and settings."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from ...kernels import launch, settings
from .. import packing, ways
from ..freeze import PROGRAMS
from ..hooks import has_hooks
from .guard import Uncompared
from .record import Record, record

MAX_PROGRAMS = 32  # per module: one for each combination of input layouts and settings
MAX_ATTEMPTS = 4  # calls that ran without a recording, after which none is tried
MAX_CHANGES = 16  # of a module, after which it is not recorded again


class Programs(Uncompared):
    """Recordings of a module's calls; not copied or pickled with the module.

    Attributes:
        owner: weak reference to the module; shallow copies (DataParallel replicas) share this object but do not own it.
        found: input layouts and settings → a `Recorded`, or the number of calls that were not replayed.
        changes: number of times that a `Recorded` was found stale.
    """

    __slots__ = ("changes", "found", "owner")

    def __init__(self, owner: nn.Module | None = None) -> None:
        self.owner = None if owner is None else weakref.ref(owner)
        self.found: dict[tuple, Recorded | int] = {}
        self.changes = 0

    def __reduce__(self) -> tuple:
        return Programs, ()


@final
class Recorded:
    """A program and the state in which it may be replayed.

    Attributes:
        program: of the call.
        guard: checks the modules.
        held: tensors passed to the program after the inputs.
        layouts: of the held tensors.
        alignments: their addresses modulo 16.
        folds: cached folds that the program reads: the dict of `freeze` that holds them, key and `Kept`.
        sources: tensors that the folds were computed from.
        versions: of the sources.
        kernels: those launched directly.
        direct: state of Triton that direct launches require, see `launch.direct_state`.
        operators: see `settings.operators`; None without operators of PyTorch.
    """

    def __init__(self, made: Record) -> None:
        self.program, self.guard, self.held = program, *_ = made.program, made.guard, made.held
        self.layouts = _layouts(made.held)
        self.alignments = [t.data_ptr() % 16 for t in made.held]
        self.folds = made.folds
        sources = {id(t): t for *_, kept in made.folds for ref in kept.sources if (t := ref()) is not None}
        self.sources = [(t, not t.is_inference()) for t in sources.values()]
        self.versions = self._versions()
        self.kernels = tuple({k: None for part in (program.forward, program.backward) if part for k in part.kernels})
        index = program.device.index
        self.index = -1 if index is None else index
        self.direct = launch.direct_state(self.index, self.kernels) if self.kernels else None
        self.operators = settings.operators() if made.operators else None

    def addresses(self, module: nn.Module) -> list[int] | None:
        """Addresses of the held tensors; None if the modules, their tensors or the launcher's state have changed."""
        addresses = [t.data_ptr() for t in self.held]
        same = (
            self.guard.holds(module)
            and _layouts(self.held) == self.layouts
            and [a % 16 for a in addresses] == self.alignments
            and (not self.kernels or launch.direct_state(self.index, self.kernels) == self.direct is not None)
            and (not self.folds or self._reads_current_folds())
            and (self.operators is None or settings.operators() == self.operators)
        )
        return addresses if same else None

    def _reads_current_folds(self) -> bool:
        """True if `freeze` still holds the same folds, and their sources have not changed."""
        try:
            for store, key, kept in self.folds:
                if store[key] is not kept:
                    return False
        except KeyError:
            return False
        return self._versions() == self.versions

    def _versions(self) -> list[tuple]:
        """(address, version, dtype, device) of each source; inference tensors have no version."""
        return [(t.data_ptr(), t._version if counts else 0, t.dtype, t.device) for t, counts in self.sources]


def _layouts(tensors: list[Tensor]) -> list[tuple]:
    """Everything about these tensors that a launch or an operator depends on, except addresses and values."""
    return [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors]


def call(way_key: tuple, forward: Callable, module: nn.Module, *inputs: object, **named: object) -> Any:
    """Runs or replays forward(module, *inputs, **named), fused or mixed; for `way_key` see `ways.known_way`."""
    if not ways.REPLAYS or ways.state.inside_plain or settings.is_observed():
        return forward(module, *inputs, **named)
    tensors: list[Tensor] = []
    try:
        given = [_described(value, tensors) for value in (*inputs, *named.values())]
    except TypeError:
        return forward(module, *inputs, **named)
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return call(way_key, forward, module, *inputs, **named)
    addresses = [t.data_ptr() for t in tensors]
    lengths = packing.known_lengths(tensors) if packing.state.lengths else ()
    key = way_key, launch.run, lengths, *given, *named, *_layouts(tensors), *[a % 16 for a in addresses]
    programs = module.__dict__.get(PROGRAMS)
    if programs is None or programs.owner is None or programs.owner() is not module:
        programs = module.__dict__[PROGRAMS] = Programs(module)
    known = programs.found.get(key, 0)
    if type(known) is Recorded:
        if (held := known.addresses(module)) is not None:
            return known.program(tensors + known.held, addresses + held)
        programs.found.clear()  # the others depend on the same state
        programs.changes += 1
        known = 0 if programs.changes <= MAX_CHANGES else MAX_ATTEMPTS
    if len(programs.found) >= MAX_PROGRAMS:
        programs.found.clear()
    if 0 < known < MAX_ATTEMPTS and (made := record(forward, module, inputs, named, tensors)) is not None:
        recorded = programs.found[key] = Recorded(made)
        if made.result is not None:
            return made.result
        if (held := recorded.addresses(module)) is not None:
            return recorded.program(tensors + recorded.held, addresses + held)
        return forward(module, *inputs, **named)
    programs.found[key] = known + 1  # the first call compiles kernels and fills caches
    return forward(module, *inputs, **named)


def call_block(forward: Callable, module: nn.Module, x: Tensor, *inputs: object) -> Any:
    """forward(module, x, *inputs), plain, called or replayed.

    Args:
        forward: calls `add_branches` with block=module.
        module: a block, or an nn.ModuleList of the branches' modules; keeps their sizes and recordings.
        x: [B, N, D].
        *inputs: the other modules, tensors and numbers.
    """
    way, key = (None, ()) if ways.state.inside_plain else ways.known_way(module, x)
    if way is None:
        return forward(module, x, *inputs)
    if way == "plain":
        return ways.plainly(forward, module, x, *inputs)
    return call(key, forward, module, x, *inputs)


def call_branches(forward: Callable, module: nn.Module, x: Tensor, *inputs: object) -> Any:
    """As `call_block`, for a module that is one of the branches; its hooks, if any, run in each call."""
    hooked = module.__dict__["_forward_hooks"] or has_hooks(module)
    return (forward if hooked else partial(call_block, forward))(module, x, *inputs)


def _described(value: Any, tensors: list[Tensor]) -> object:
    """A hashable description of an argument; appends its tensors to the list. Raises TypeError for other types."""
    kind = type(value)
    if kind is Tensor:
        tensors.append(value)
        return Tensor
    if value is None or kind in (bool, int, float, str) or isinstance(value, nn.Module):
        return value
    if isinstance(value, tuple):
        return kind, *[_described(part, tensors) for part in value]
    raise TypeError(kind)
