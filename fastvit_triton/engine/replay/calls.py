"""Calls a block, or replays its recording for the same input layouts and settings."""

import linecache
import weakref
from collections.abc import Callable
from functools import partial
from textwrap import indent
from typing import Any, final

import torch
from torch import Tensor, nn

from ...kernels import backend, launch, settings
from .. import packing, ways
from ..freeze import PROGRAMS, SIZES
from ..hooks import has_hooks, is_repeatable
from ..ways import Sizes
from .emit import TensorNames, wrapped
from .guard import Uncompared
from .record import CallRecord, record

MAX_PROGRAMS = 32  # per module: one for each combination of input layouts and settings
MAX_ATTEMPTS = 4  # calls that ran without a recording, after which none is tried
MAX_CHANGES = 16  # of a module, after which it is not recorded again
MODULES = range(6, 65)  # in a plain module that is replayed: to check fewer takes as long as to call them
MAX_PLAIN = 8  # recordings of a plain module; each takes as long as 30 calls
MAX_VALUES = 2**20  # of the input of a plain module that is replayed: with more, Python is below 1 % of the time
SCALARS = (bool, int, float, str)
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
        pays: True if replays of the module's own forward are worth it, as it has many modules and can be recorded; None
            before it was asked.
        found: input layouts and settings → a `Recorded`, or the number of calls that were not replayed.
        latest: of calls of the module itself with one tensor, by a key that holds nothing of the module: a `Recorded`,
            or the sizes of a module that runs plain.
        changes: number of times that a `Recorded` was found stale, or that there were too many.
    """

    __slots__ = ("changes", "found", "latest", "owner", "pays")

    def __init__(self, owner: nn.Module | None = None) -> None:
        self.owner = None if owner is None else weakref.ref(owner)
        self.pays: bool | None = None
        self.found: dict[tuple, Recorded | int] = {}
        self.latest: dict[tuple, Recorded | Sizes] = {}
        self.changes = 0

    def forget(self) -> None:
        """Drops all recordings."""
        self.found.clear()
        self.latest.clear()
        self.changes += 1

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
        addresses: the generated function that returns the addresses of the held tensors, or [] if nothing is launched;
            None if the module that it takes, its tensors, or settings have changed.
    """

    def __init__(self, recording: CallRecord, device: torch.device) -> None:
        self.run, self.guard, self.folds = recording.replay.run, recording.guard, recording.folds
        self.held = [t for _, t in recording.held]
        self.addresses = self._compiled(recording, -1 if device.index is None else device.index)

    def _compiled(self, recording: CallRecord, index: int) -> Callable[[nn.Module], list[int] | None]:
        """Compiles `addresses(module)`."""
        names = TensorNames("addresses", "module")
        checks = [names.call(self.guard.holds, "module")]
        if kernels := recording.replay.kernels:
            direct = names.call(launch.direct_state, str(index), names.bind("kernels", kernels))
            checks.append(f"{direct} == {names.bind('direct', launch.direct_state(index, kernels))} is not None")
        if recording.replay.operators:
            checks.append(f"{names.call(settings.operators)} == {names.bind('operators_then', settings.operators())}")
        for store, key, entry in self.folds:  # those that `freeze` holds now
            checks.append(f"{names.bind('store', store)}.get({names.bind('key', key)}) is {names.bind('kept', entry)}")
        for t in recording.sources:
            name = names.bind("source", t)
            checks.append(f"{name}.data_ptr() == {t.data_ptr()} and {_kind(names, name, t)}")
            if not t.is_inference():  # inference tensors have no version
                checks.append(f"{name}._version == {t._version}")
        variables = []
        for title, t in recording.held:
            name = names.bind(title, t)
            checks.append(f"{name}.__class__ is {names.bind(type(t).__name__, type(t))}")
            checks.append(f"{name}.shape == {tuple(t.shape)} and {name}.stride() == {t.stride()}")
            if recording.replay.launches:
                variables.append(names.unique(f"{name}_at"))
                checks.append(f"({variables[-1]} := {name}.data_ptr()) % 16 == {t.data_ptr() % 16}")
                checks.append(_kind(names, name, t))
            else:  # operators check the device themselves
                checks.append(f"{name}.dtype is {names.value(t.dtype)}")
            if torch.is_grad_enabled():
                checks.append(f"{name}.requires_grad is {t.requires_grad}")
        end = indent("\n".join(wrapped("return [", variables, "]")), "    ")
        return names.compiled(ADDRESSES.format("\n        and ".join(checks), end), "addresses")


def _kind(names: TensorNames, name: str, t: Tensor) -> str:
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


def repeated(module: nn.Module, x: Tensor) -> Any:
    """Result of a call of the module with x alone that was recorded or ran plain before; None if there was none.

    It makes one lookup, where `call_module` makes several: small models spend their time on such Python code.
    """
    if torch.compiler.is_compiling():
        return None
    facts = module.__dict__
    programs = facts.get(PROGRAMS)
    if programs is None or not programs.latest or programs.owner() is not module:
        return None
    try:
        found = programs.latest.get(_key_of(x))
    except RuntimeError:  # nested and sparse tensors have no strides
        return None
    if found is None:
        return None
    if isinstance(found, Sizes):
        holds = found.training is facts["training"] and found is facts.get(SIZES) and settings.observer is None
        return ways.plainly(type(module).forward, module, x) if holds else None
    if not ways.REPLAYS or packing.state.lengths or settings.is_observed():
        return None
    if x.is_cuda and x.get_device() != torch._C._cuda_getDevice():
        return None
    held_addresses = found.addresses(module)
    if held_addresses is None:
        return None
    return found.run([x, *found.held], [x.data_ptr(), *held_addresses])


def _key_of(x: Tensor) -> tuple:
    """What a call with x alone depends on, besides the module; of few values, as reading one takes up to 3 µs."""
    if x.is_cpu and launch.target is None and backend._switch != "triton":  # no kernel runs, no gradient is recorded
        return type(x), x.shape, x.stride(), x.dtype, *settings.choices_on_cpu()
    layout = x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.data_ptr() % 16
    return type(x), *layout, launch.run, *settings.choices(x.device.type)


def call(way_key: object, forward: Callable, module: nn.Module, /, *inputs: object, **named: object) -> Any:
    """Runs or replays forward(module, *inputs, **named).

    Args:
        way_key: what `forward` depends on besides the module and the inputs, see `ways.known_way`.
        forward: the function to replay, see `record`.
        module: a module that keeps the recordings.
        *inputs: tensors, numbers, modules and tuples of these; with others it is not replayed.
        **named: keyword arguments of the same types.
    """
    return _call(False, way_key, forward, module, inputs, named)


def call_module(way_key: object, forward: Callable, module: nn.Module, *inputs: object, **named: object) -> Any:
    """As `call`, for the function that a call of the module itself runs; `repeated` finds the recordings."""
    return _call(True, way_key, forward, module, inputs, named)


def _call(own: bool, way_key: object, forward: Callable, module: nn.Module, inputs: tuple, named: dict) -> Any:
    if not ways.REPLAYS or ways.state.inside_plain or settings.is_observed():
        return forward(module, *inputs, **named)
    tensors: list[Tensor] = []
    try:
        described = [_described(value, tensors) for value in (*inputs, *named.values())]
        layouts = _layouts(tensors)
        addresses = [t.data_ptr() for t in tensors]
    except (TypeError, RuntimeError):  # another type; nested, sparse and oneDNN's tensors have no strides or address
        return forward(module, *inputs, **named)
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return _call(own, way_key, forward, module, inputs, named)
    lengths = packing.known_lengths(tensors) if packing.state.lengths else ()
    key = way_key, launch.run, lengths, *described, *named, *layouts, *[a % 16 for a in addresses]
    programs = _programs_of(module)
    entry = programs.found.get(key, 0)
    alone = own and described == [Tensor] and not named and not lengths
    if type(entry) is Recorded:
        if (held_addresses := entry.addresses(module)) is not None:
            if alone:
                programs.latest[_key_of(tensors[0])] = entry
            return entry.run(tensors + entry.held, addresses + held_addresses)
        programs.forget()  # the others depend on the same state
        entry = 0
    if forward is _plain and key not in programs.found and len(programs.found) >= MAX_PLAIN:
        for other in [k for k, v in programs.found.items() if type(v) is not Recorded]:
            del programs.found[other]
        if len(programs.found) >= MAX_PLAIN:
            return forward(module, *inputs, **named)
    if len(programs.found) >= MAX_PROGRAMS:
        programs.forget()
    if programs.changes > MAX_CHANGES:
        entry = MAX_ATTEMPTS
    if 0 < entry < MAX_ATTEMPTS and (recording := record(forward, module, inputs, named, tensors)) is not None:
        recorded = programs.found[key] = Recorded(recording, device)
        if alone:
            programs.latest[_key_of(tensors[0])] = recorded
        if recording.result is not None:
            return recording.result
        if (held_addresses := recorded.addresses(module)) is not None:
            return recorded.run(tensors + recorded.held, addresses + held_addresses)
        return forward(module, *inputs, **named)
    programs.found[key] = entry + 1  # the first call compiles kernels and fills caches
    if entry:
        programs.pays = False  # it could not be recorded
    return forward(module, *inputs, **named)


def call_plain(key: object, module: nn.Module, x: Tensor, *inputs: object, **named: object) -> Any:
    """Runs the module's own forward, with all modules inside it plain; replays it on a CPU in inference if that pays.

    A replay makes the same calls of PyTorch's operators, without the Python code of the modules. A call with other
    tensors, such as lengths, is not replayed: the code of the module may read their values by `tolist`, unseen.
    `key` is that of `ways.known_way`, or None.
    """
    if x.is_cpu and not torch.is_grad_enabled() and torch._C._get_tracing_state() is None:
        others = (*inputs, *named.values())
        alone = type(x) is Tensor and all(value is None or type(value) in SCALARS for value in others)
        if alone and x.numel() <= MAX_VALUES and _pays(module):
            return call_module(key or settings.choices("cpu"), _plain, module, x, *inputs, **named)
    if key is not None and type(x) is Tensor and not inputs and not named:
        latest = _programs_of(module).latest
        if len(latest) >= MAX_PROGRAMS:
            latest.clear()
        latest[_key_of(x)] = module.__dict__[SIZES]
    return ways.plainly(type(module).forward, module, x, *inputs, **named)


def _pays(module: nn.Module) -> bool:
    programs = _programs_of(module)
    if programs.pays is None:
        programs.pays = sum(1 for _ in module.modules()) in MODULES and is_repeatable(module)
    return programs.pays


def _plain(module: nn.Module, *inputs: object, **named: object) -> Any:
    return ways.plainly(type(module).forward, module, *inputs, **named)


def _programs_of(module: nn.Module) -> Programs:
    programs = module.__dict__.get(PROGRAMS)
    if programs is None or programs.owner is None or programs.owner() is not module:
        programs = module.__dict__[PROGRAMS] = Programs(module)
    return programs


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
    if kind in SCALARS:
        return kind, value  # True equals 1
    if value is None or isinstance(value, nn.Module):
        return value
    if isinstance(value, tuple):
        return kind, *[_described(part, tensors) for part in value]
    raise TypeError(kind)
