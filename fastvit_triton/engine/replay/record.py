"""Records a call by running it, with its backward pass if it has gradients."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ...kernels.argument import Lent
from ..freeze import CachedFold, kept_folds, kept_indices
from ..hooks import runs_known_code
from .build import Plan
from .emit import Emitted, emit
from .guard import Guard
from .recorder import CallRecorder, ReplayRefusal, storage_of, tensors_in


class CallRecord(NamedTuple):
    """A replay and what it depends on."""

    replay: Emitted  # the generated function
    guard: Guard  # snapshot of the modules
    # tensors passed to it after the inputs: those of the modules, and those that `freeze` keeps, by name
    held: list[tuple[str, Tensor]]
    folds: list[CachedFold]  # those cached by `freeze` that it reads
    sources: list[Tensor]  # the tensors that these are computed from
    result: object  # return value of the recorded call; None if it had gradients


def record(
    forward: Callable, module: nn.Module, inputs: tuple, named: dict[str, object], tensors: list[Tensor]
) -> CallRecord | None:
    """Records forward(module, *inputs, **named) by running it; None if it cannot be replayed.

    If its result is not returned, the state of the random number generators is restored.

    Args:
        forward: the function to record. If it has an attribute `repeatable`, this tells if the call runs only operators
            and writes to nothing; else the code of the modules must be known.
        module: the module that it runs; checked with all its submodules by the guard.
        inputs: tensors, numbers, modules and tuples of these.
        named: keyword arguments of the same types.
        tensors: the tensors in `inputs` and `named`.
    """
    device = tensors[0].device
    modules = [m for m in tree_leaves((inputs, named)) if isinstance(m, nn.Module)]
    inside = list({id(m): m for root in (module, *modules) for m in root.modules()}.values())
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    known = getattr(forward, "repeatable", None)
    if known is None:
        known = all(runs_known_code(m, hooks_count=m is not module) for m in inside)
    if not known:
        return None
    lent = tensors[0] if any(isinstance(value, Lent) for value in inputs) else None  # the call may overwrite it
    try:
        leaves = {id(t): t.clone() if t is lent else t.detach().requires_grad_(t.requires_grad) for t in tensors}
    except RuntimeError:  # an inference tensor that requires a gradient
        return None
    if len(leaves) < len(tensors) or (lent is not None and lent.data_ptr() % 16):
        return None
    inputs, named = tree_map_only(Tensor, lambda t: leaves[id(t)], (inputs, named))
    states = _random_states(device)
    recorder = CallRecorder(device, None if lent is None else leaves[id(lent)])
    try:
        guard = Guard(module, inside[1:])
        _refuse_tensors(guard, tensors)
        all_tensors = [*leaves.values(), *guard.tensors]
        with recorder:
            result = forward(module, *inputs, **named)
        backward = _record_backward(recorder, all_tensors, result)
        recording = _made(recorder, guard, inside, all_tensors, len(tensors), result, *backward)
    except RuntimeError:  # a Refusal, or too little memory for a backward pass now
        recording = None
    if recorder.draws and (recording is None or recording.result is None):
        _restore(states, device)
    return recording


def _refuse_tensors(guard: Guard, inputs: list[Tensor]) -> None:
    """Raises Refusal for tensors that a replay cannot take."""
    module_tensors = guard.tensors
    single = {id(t) for *_, t in guard.single}
    if _share_memory([*inputs, *module_tensors]):
        raise ReplayRefusal("two tensors share memory")  # they would have one slot, also after they are separated
    if any(t.device != inputs[0].device or t._backward_hooks for t in (*inputs, *module_tensors)):
        raise ReplayRefusal("a tensor has hooks or is on another device")
    if any(t.grad_fn is not None for t in module_tensors):
        raise ReplayRefusal("a weight is computed")  # from other tensors, to which gradients would flow
    if any(t.numel() < 2 and id(t) not in single for t in module_tensors):
        raise ReplayRefusal("an attribute is a tensor of one element")  # the guard's == would compare its value


def _share_memory(tensors: list[Tensor]) -> bool:
    """True if the first to the last element of a tensor overlap with those of another."""
    end = 0
    for start, after in sorted(map(_span, (t for t in tensors if t.numel()))):
        if start < end:
            return True
        end = after
    return False


def _span(t: Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte and of the byte after its last element."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + elements * t.element_size()


def _random_states(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _restore(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, device)


def _record_backward(recorder: CallRecorder, tensors: list[Tensor], result: object) -> tuple:
    """((steps, allocations) of the forward pass, incoming gradient, gradients by id); (None, None, {}) for none."""
    ends = list({id(t): t for t in tensors_in(result) if t.requires_grad}.values())
    if not ends:
        return None, None, {}
    if len(ends) > 1 or not ends[0].is_contiguous() or storage_of(ends[0]) in map(storage_of, tensors):
        raise ReplayRefusal("the outputs with gradients are not a single contiguous tensor")
    marks = (len(recorder.steps), len(recorder.reserved))
    incoming = torch.zeros_like(ends[0].detach())
    sources = [t for t in tensors if t.requires_grad]
    with torch.autocast(incoming.device.type, enabled=False), recorder:
        gradients = torch.autograd.grad(ends, sources, incoming, allow_unused=True)
    return marks, incoming, dict(zip(map(id, sources), gradients, strict=True))


def _made(
    recorder: CallRecorder,
    guard: Guard,
    modules: list[nn.Module],
    tensors: list[Tensor],
    inputs: int,
    result: object,
    marks: tuple[int, int] | None,
    incoming: Tensor | None,
    gradients: dict[int, Tensor | None],
) -> CallRecord:
    """The record, reduced to the tensors that a replay depends on; raises Refusal."""
    if not guard.holds(guard.root()):
        raise ReplayRefusal("the call changed its own inputs or settings")
    read_storages = {storage_of(t) for step in recorder.steps for t in tensors_in((step.arguments, step.named))}
    packed = {id(t) for step in recorder.steps for t in step.arguments if isinstance(t, Tensor) and t.is_mkldnn}
    folds = [
        fold
        for fold, parts in ((fold, _parts(fold)) for fold in kept_folds(modules))
        if packed & {*map(id, parts)} or read_storages & {*map(storage_of, tensors_in(parts))}
    ]
    if packed.difference(id(t) for fold in folds for t in _parts(fold)):
        raise ReplayRefusal("a packed weight was not cached")
    state = [t for t in tensors[inputs:] if torch.is_grad_enabled() or storage_of(t) in read_storages]
    state += [t for t in kept_indices() if storage_of(t) in read_storages]
    state += [t for fold in folds for t in tensors_in(_parts(fold))]
    tensors = [*tensors[:inputs], *state]
    names = {id(t): name for m in reversed(modules) for name, t in (*m.named_parameters(), *m.named_buffers())}
    named = [(names.get(id(t), "constant"), t) for t in state]
    grads = [gradients.get(id(t)) for t in tensors]
    plan = Plan(recorder, [*(("x", t) for t in tensors[:inputs]), *named], result, marks, incoming, grads)
    sources = _sources(folds, modules)
    return CallRecord(emit(plan), guard, named, folds, sources, result if marks is None else None)


def _sources(folds: list[CachedFold], modules: list[nn.Module]) -> list[Tensor]:
    """The tensors of these modules that the folds are computed from; raises Refusal if one is not found."""
    wanted = {storage.cdata for fold in folds for storage in fold.kept.sources}
    held = (t for m in modules for t in (*m._parameters.values(), *m._buffers.values(), *vars(m).values()))
    dense = (t for t in held if isinstance(t, Tensor) and t.layout is torch.strided)
    found = {id(t): t for t in dense if storage_of(t) in wanted} if wanted else {}
    if wanted.difference(map(storage_of, found.values())):
        raise ReplayRefusal("a fold is computed from a tensor that no module has")
    return list(found.values())


def _parts(fold: CachedFold) -> list[Tensor]:
    """The tensors of a fold or packed weight."""
    return [t for t in fold.kept.folded if isinstance(t, Tensor)]
