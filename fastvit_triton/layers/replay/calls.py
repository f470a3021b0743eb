"""Calls a block, or replays what it did when it was called with the same inputs and settings before."""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...kernels import launch, plan
from .. import ways
from ..freeze import PROGRAMS
from ..hooks import has_global_hooks
from .guard import Uncompared
from .record import Record, record

MAX_PROGRAMS = 32  # of a module: one for each layout of its inputs and each global setting
MAX_ATTEMPTS = 4  # calls until one of them must be recorded; the first is not
MAX_CHANGES = 16  # of a module that is recorded anew

_call_of_modules = nn.Module.__call__


class Programs(Uncompared):
    """What is known of a module's calls; never copied or pickled with it.

    Attributes:
        owner: reference to the module; shallow copies, such as replicas of DataParallel, come with the same `Programs`.
        found: inputs and settings → a `Recorded`, or how often the call was not replayed.
        changes: how often what a `Recorded` depends on had changed.
    """

    __slots__ = ("changes", "found", "owner")

    def __init__(self, owner: nn.Module | None = None) -> None:
        self.owner = None if owner is None else weakref.ref(owner)
        self.found: dict[tuple, Recorded | int] = {}
        self.changes = 0

    def __reduce__(self) -> tuple:
        return Programs, ()


class Recorded:
    """A program, and what must be as it was for it to be replayed.

    Attributes:
        program: of the call.
        guard: the modules.
        held: tensors that the program is given after the inputs.
        layouts: of these.
        alignments: of their addresses.
        sources: tensors that kept folds were made from.
        versions: of these.
        kernels: those that are launched directly.
        direct: state of Triton in which they may be, see `launch.direct_state`.
        sdpa: PyTorch's settings for attention; None without operators of PyTorch.
    """

    def __init__(self, made: Record) -> None:
        self.program, self.guard, self.held = program, *_ = made.program, made.guard, made.held
        self.layouts, self.alignments = _layouts(made.held), [t.data_ptr() % 16 for t in made.held]
        sources = {id(t): t for kept in made.folds for ref in kept.sources if (t := ref()) is not None}
        self.sources = [(t, not t.is_inference()) for t in sources.values()]
        self.versions = self._versions()
        self.kernels = tuple({k: None for part in (program.forward, program.backward) if part for k in part.kernels})
        self.direct = self._direct()
        self.sdpa = _sdpa_settings() if made.operators else None

    def addresses(self, module: nn.Module) -> list[int] | None:
        """Addresses of the tensors held; None if the modules, their tensors or the launcher are not as they were."""
        addresses = [t.data_ptr() for t in self.held]
        same = (
            self.guard.holds(module)
            and _layouts(self.held) == self.layouts
            and [a % 16 for a in addresses] == self.alignments
            and (not self.kernels or self._direct() == self.direct is not None)
            and (not self.sources or self._versions() == self.versions)
            and (self.sdpa is None or _sdpa_settings() == self.sdpa)
        )
        return addresses if same else None

    def _direct(self) -> tuple | None:
        index = self.program.device.index
        return launch.direct_state(-1 if index is None else index, self.kernels) if self.kernels else None

    def _versions(self) -> list[tuple]:
        """Address, counted writes, dtype and device of the sources; writes to inference tensors are not counted."""
        return [(t.data_ptr(), t._version if counts else 0, t.dtype, t.device) for t, counts in self.sources]


def _layouts(tensors: list[Tensor]) -> list[tuple]:
    """All that a launch or an operator of these tensors depends on but addresses and values."""
    return [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors]


def call(settings: tuple, forward: Callable, module: nn.Module, *inputs: object, **named: object) -> object:
    """forward(module, *inputs, **named), for a module that runs fused or mixed; for `settings` see `ways.known_way`."""
    if not (ways.REPLAYS and _is_quiet()):
        return forward(module, *inputs, **named)
    tensors: list[Tensor] = []
    try:
        given = [_described(value, tensors) for value in (*inputs, *named.values())]
    except TypeError:
        return forward(module, *inputs, **named)
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return call(settings, forward, module, *inputs, **named)
    addresses = [t.data_ptr() for t in tensors]
    key = settings, launch.run, *given, *named, *_layouts(tensors), *[a % 16 for a in addresses]
    programs = module.__dict__.get(PROGRAMS)
    if programs is None or programs.owner is None or programs.owner() is not module:
        programs = module.__dict__[PROGRAMS] = Programs(module)
    known = programs.found.get(key, 0)
    if type(known) is Recorded:
        if (held := known.addresses(module)) is not None:
            return known.program(tensors + known.held, addresses + held)
        programs.found.clear()  # others hold what this one held
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


def _sdpa_settings() -> tuple:
    """What PyTorch chooses a backend of scaled_dot_product_attention by, besides its inputs."""
    return (
        torch._C._get_flash_sdp_enabled(), torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(), torch._C._get_cudnn_sdp_enabled(), *torch._C._get_sdp_priority_order(),
    )  # fmt: skip


def _is_quiet() -> bool:
    """No mode, transform or tracer sees the operators of this call, and nothing expects every module's call."""
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        or ways.state.inside_plain
        or plan._observer is not None
        or launch._overrides is not None
        or has_global_hooks()
        or nn.Module.__call__ is not _call_of_modules
    )


def _described(value: object, tensors: list[Tensor]) -> object:
    """A hashable description of an argument; its tensors are appended to the list. TypeError for what is not known."""
    kind = type(value)
    if kind is Tensor:
        tensors.append(value)
        return Tensor
    if value is None or kind in (bool, int, float, str) or isinstance(value, nn.Module):
        return value
    if isinstance(value, tuple):
        return kind, *[_described(part, tensors) for part in value]
    raise TypeError(kind)
