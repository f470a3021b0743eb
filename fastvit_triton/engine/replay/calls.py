"""Calls a block, or replays its recording for the same input layouts and settings."""

import linecache
import weakref
from collections.abc import Callable
from functools import partial
from textwrap import indent
from typing import Any, final

import torch
from torch import Tensor, nn

from ...kernels import launch, settings
from .. import packing, ways
from ..freeze import PROGRAMS
from ..hooks import has_hooks
from .emit import Names, wrapped
from .guard import Uncompared
from .record import Record, record

MAX_PROGRAMS = 32  # per module: one for each combination of input layouts and settings
MAX_ATTEMPTS = 4  # calls that ran without a recording, after which none is tried
MAX_CHANGES = 16  # of a module, after which it is not recorded again
ADDRESSES = """\
def addresses(module):
    if not (
        {}
    ):
        return None
{}
"""


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
    """A recorded call and the state in which it may be replayed.

    Attributes:
        run: the generated function, see `emit`.
        guard: checks the modules.
        held: tensors passed to it after the inputs.
        folds: cached folds that it reads: the dict of `freeze` that holds them, key and `Kept`.
        addresses: the generated function that returns the addresses of the held tensors; None if the module that it
            takes, its tensors, or settings have changed.
    """

    def __init__(self, recording: Record, device: torch.device) -> None:
        self.run, self.guard, self.folds = recording.replay.run, recording.guard, recording.folds
        self.held = [t for _, t in recording.held]
        self.addresses = self._compiled(recording, -1 if device.index is None else device.index)

    def _compiled(self, recording: Record, index: int) -> Callable[[nn.Module], list[int] | None]:
        """Compiles `addresses(module)`."""
        names = Names("addresses", "module")
        checks = [names.call(self.guard.holds, "module")]
        if kernels := recording.replay.kernels:
            direct = names.call(launch.direct_state, str(index), names.bind("kernels", kernels))
            checks.append(f"{direct} == {names.bind('direct', launch.direct_state(index, kernels))} is not None")
        if recording.replay.operators:
            checks.append(f"{names.call(settings.operators)} == {names.bind('operators_then', settings.operators())}")
        for read, value in recording.conditions:
            checks.append(f"{names.bind('condition', read)}(module) == {names.bind('value', value, object())}")
        for store, key, entry in self.folds:  # those that `freeze` holds now
            checks.append(f"{names.bind('store', store)}.get({names.bind('key', key)}) is {names.bind('kept', entry)}")
        sources = {id(t): t for *_, entry in self.folds for ref in entry.sources if (t := ref()) is not None}
        for t in sources.values():
            name = names.bind("source", t)
            checks.append(f"{name}.data_ptr() == {t.data_ptr()} and {_kind(names, name, t)}")
            if not t.is_inference():  # inference tensors have no version
                checks.append(f"{name}._version == {t._version}")
        variables = []
        for title, t in recording.held:
            name = names.bind(title, t)
            variables.append(names.unique(f"{name}_at"))
            checks.append(f"({variables[-1]} := {name}.data_ptr()) % 16 == {t.data_ptr() % 16}")
            checks.append(f"{name}.shape == {tuple(t.shape)} and {name}.stride() == {t.stride()}")
            checks.append(f"{_kind(names, name, t)} and {name}.requires_grad is {t.requires_grad}")
        end = indent("\n".join(wrapped("return [", variables, "]")), "    ")
        return names.compiled(ADDRESSES.format("\n        and ".join(checks), end), "addresses")


def _kind(names: Names, name: str, t: Tensor) -> str:
    """Expression that compares dtype and device."""
    return f"{name}.dtype is {names.value(t.dtype)} and {name}.device == {names.value(t.device)}"


def sources(module: nn.Module) -> list[str]:
    """Source of the functions that check the state of this module's recorded calls and replay them; see `emit`."""
    programs = module.__dict__.get(PROGRAMS, Programs())
    recordings = [recorded for recorded in programs.found.values() if type(recorded) is Recorded]
    functions = [f for recorded in recordings for f in (recorded.guard.holds, recorded.addresses, recorded.run)]
    return ["".join(linecache.getlines(f.__code__.co_filename)) for f in functions]


def _layouts(tensors: list[Tensor]) -> list[tuple]:
    """Everything about these tensors that a launch or an operator depends on, except addresses and values."""
    return [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors]


def call(way_key: tuple, forward: Callable, module: nn.Module, *inputs: object, **named: object) -> Any:
    """Runs or replays forward(module, *inputs, **named), fused or mixed; for `way_key` see `ways.known_way`."""
    if not ways.REPLAYS or ways.state.inside_plain or settings.is_observed():
        return forward(module, *inputs, **named)
    tensors: list[Tensor] = []
    try:
        described = [_described(value, tensors) for value in (*inputs, *named.values())]
    except TypeError:
        return forward(module, *inputs, **named)
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return call(way_key, forward, module, *inputs, **named)
    addresses = [t.data_ptr() for t in tensors]
    lengths = packing.known_lengths(tensors) if packing.state.lengths else ()
    key = way_key, launch.run, lengths, *described, *named, *_layouts(tensors), *[a % 16 for a in addresses]
    programs = module.__dict__.get(PROGRAMS)
    if programs is None or programs.owner is None or programs.owner() is not module:
        programs = module.__dict__[PROGRAMS] = Programs(module)
    entry = programs.found.get(key, 0)
    if type(entry) is Recorded:
        if (held_addresses := entry.addresses(module)) is not None:
            return entry.run(tensors + entry.held, addresses + held_addresses)
        programs.found.clear()  # the others depend on the same state
        programs.changes += 1
        entry = 0 if programs.changes <= MAX_CHANGES else MAX_ATTEMPTS
    if len(programs.found) >= MAX_PROGRAMS:
        programs.found.clear()
    if 0 < entry < MAX_ATTEMPTS and (recording := record(forward, module, inputs, named, tensors)) is not None:
        recorded = programs.found[key] = Recorded(recording, device)
        if recording.result is not None:
            return recording.result
        if (held_addresses := recorded.addresses(module)) is not None:
            return recorded.run(tensors + recorded.held, addresses + held_addresses)
        return forward(module, *inputs, **named)
    programs.found[key] = entry + 1  # the first call compiles kernels and fills caches
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
