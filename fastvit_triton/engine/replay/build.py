"""Builds a program from a recorded call: assigns each tensor a slot in the table, and reuses buffer memory."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels.launch import binary_of, launch
from .program import Call, DirectLaunch, Program, Ref, Refs, Segment
from .recorder import Place, Recorder, Refusal, Step, place_of, storage_of, tensors_in

ALIGNMENT = 256  # bytes, of tensors in a buffer


class _Builder:
    """Assigns each tensor of a recording a slot in the table.

    Args:
        recorder: of the call.
        given: input tensors, which occupy the first slots.
        marks: numbers of steps and of allocations in the forward pass.
        returned: tensors that the forward pass returns, and the gradients.
    """

    def __init__(
        self, recorder: Recorder, given: Sequence[Tensor], marks: tuple[int, int], returned: tuple[list, list]
    ) -> None:
        self.recorder = recorder
        self.steps = recorder.steps
        self.marks = marks
        self.given: dict[int, list[tuple[int, Place]]] = {}
        for slot, t in enumerate(given):
            self.given.setdefault(storage_of(t), []).append((slot, place_of(t)))
        self.slots = len(given)
        self.buffers: tuple[list, list] = [], []  # of the forward and the backward pass, as are the next two
        self.outputs: tuple[list, list] = [], []
        self.viewed: tuple[dict, dict] = {}, {}
        self.bases: dict[int, tuple[int, Place]] = {}  # storage → its slot and tensor
        self.parts: dict[int, tuple[int, int, int]] = {}  # storage → buffer slot, offset in the buffer, address
        self.views: dict[tuple[int, torch.dtype], int] = {}
        self.last: dict[int, int] = {}  # storage → last step that reads or writes it
        for i, step in enumerate(self.steps):
            self.last |= dict.fromkeys(map(storage_of, tensors_in((step.arguments, step.named))), i)
            for t, _ in step.results:
                self.bases[storage_of(t)] = self._slot(), place_of(t)
        leaving = [{storage_of(t) for t in tensors} for tensors in returned]
        self._reserve(leaving)

    def _slot(self) -> int:
        self.slots += 1
        return self.slots - 1

    def _reserve(self, leaving: list[set[int]]) -> None:
        """Places allocations: as an output, in the buffer saved for the backward pass, or in a segment's buffer."""
        steps, reservations = self.marks
        kept: list[tuple] = []
        own: tuple[list, list] = [], []
        for i, (storage, (t, born)) in enumerate(self.recorder.reserved.items()):
            phase = int(i >= reservations)
            last = self.last.get(storage, -1)
            if storage in leaving[0] | leaving[1]:
                slot = self._slot()
                place = place_of(t)
                self.bases[storage] = slot, place
                self.outputs[phase].append((slot, place.shape, place.stride, place.dtype))
            elif phase == 0 and last >= steps:
                kept.append((storage, t, 0, len(self.steps)))
            elif last >= 0:
                own[phase].append((storage, t, born, last))
        for phase, group in ((0, kept), *enumerate(own)):
            if group:
                slot = self._slot()
                offsets, nbytes = _pack([(b, e, t.untyped_storage().nbytes()) for _, t, b, e in group])
                self.buffers[phase].append((slot, nbytes))
                for (storage, t, *_), offset in zip(group, offsets, strict=True):
                    self.parts[storage] = slot, offset, t.data_ptr()

    def ref(self, t: Tensor, phase: int) -> Ref:
        """The `Ref` of a recorded tensor in a replay."""
        place = place_of(t)
        if place.storage in self.parts:
            buffer, offset, start = self.parts[place.storage]
            key = buffer, place.dtype
            if key not in self.views:
                self.views[key] = self._slot()
            slot = self.views[key]
            self.viewed[phase][slot] = key
            nbytes = offset + (place.address - start if t.numel() else 0)  # empty tensors have no address
            return Ref(slot, nbytes, nbytes // t.element_size(), place.shape, place.stride)
        if place.storage in self.bases:
            candidates = [self.bases[place.storage]]
        elif place.storage in self.given:
            candidates = self.given[place.storage]
        else:
            raise Refusal("a tensor is neither an input nor created by the call")
        exact = next((slot for slot, base in candidates if base == place), None)
        if exact is not None:
            return Ref(exact)
        (slot, base), *others = candidates
        if others or base.dtype != place.dtype:
            raise Refusal("a tensor is a view of several inputs, or of one with another dtype")
        nbytes = place.address - base.address if t.numel() else 0
        return Ref(slot, nbytes, nbytes // t.element_size(), place.shape, place.stride)

    def refs(self, held: Sequence[Any], phase: int) -> tuple:
        """The arguments with each tensor replaced by its `Ref`."""
        found = []
        for value in held:
            if isinstance(value, Tensor):
                value = self.ref(value, phase)
            elif type(value) in (tuple, list) and _holds_tensors(value):
                value = Refs(self.refs(value, phase))
            elif _holds_tensors(value):
                raise Refusal("an argument holds tensors outside of tuples and lists")
            found.append(value)
        return tuple(found)

    def fill(self, phase: int, steps: list[Step]) -> Segment:
        """Builds the segment of these steps; the tensors it returns must already have slots."""
        done: list[DirectLaunch | Call] = []
        kernels: dict[Callable, None] = {}
        for step in steps:
            arguments = self.refs(step.arguments, phase)
            if _holds_tensors(step.named):
                raise Refusal("a tensor is a keyword argument")
            if step.grid is None:
                results = tuple((self.bases[storage_of(t)][0], i) for t, i in step.results)
                done.append(Call(step.function._op, arguments, step.named, results))
            elif (binary := binary_of(step.function, step.arguments, step.named)) is not None:
                kernels[step.function] = None
                done.append(DirectLaunch.of(step.grid, binary, arguments))
            else:
                done.append(Call(launch, (step.function, step.grid, *arguments), step.named, ()))
        views = tuple((slot, *key) for slot, key in self.viewed[phase].items())
        return Segment(tuple(self.buffers[phase]), views, tuple(self.outputs[phase]), tuple(done), tuple(kernels), ())


def _holds_tensors(held: object) -> bool:
    return next(tensors_in(held), None) is not None


def _pack(spans: list[tuple[int, int, int]]) -> tuple[list[int], int]:
    """(offsets of tensors in one buffer, its size in bytes).

    Args:
        spans: (first step, last step, bytes) of each tensor; those whose steps overlap do not share memory.
    """
    placed: list[tuple[int, int, int, int]] = []
    offsets: list[int] = []
    for first, last, nbytes in spans:
        taken = sorted((at, at + n) for at, n, a, b in placed if a <= last and first <= b)
        offset = 0
        for start, end in taken:
            if offset + nbytes <= start:
                break
            offset = max(offset, -(-end // ALIGNMENT) * ALIGNMENT)
        offsets.append(offset)
        placed.append((offset, nbytes, first, last))
    size = max((at + n for at, n, *_ in placed), default=0)
    return offsets, -(-size // ALIGNMENT) * ALIGNMENT


def build(
    recorder: Recorder,
    given: Sequence[Tensor],
    result: object,
    marks: tuple[int, int] | None = None,
    incoming: Tensor | None = None,
    gradients: Sequence[Tensor | None] = (),
) -> Program:
    """The program of a recorded call.

    Args:
        recorder: of the call.
        given: tensors that each replay receives.
        result: what the call returned: tensors and None, in tuples.
        marks: numbers of steps and reservations in the forward pass; None without gradients.
        incoming: input gradient of the recorded backward pass.
        gradients: of the given tensors.

    Raises:
        Refusal: the call cannot be replayed.
    """
    training = marks is not None
    marks = marks or (len(recorder.steps), len(recorder.reserved))
    outputs = list({id(t): t for t in tensors_in(result)}.values())
    arriving = [] if incoming is None else [incoming]
    builder = _Builder(recorder, [*given, *arriving], marks, (outputs, list(tensors_in(gradients))))
    returned = tuple(builder.ref(t, 0) for t in outputs)
    if not all(r.shape is None or (t.is_contiguous() and not r.nbytes) for r, t in zip(returned, outputs, strict=True)):
        raise Refusal("an output is a view of another tensor")  # in-place writes to it would differ
    forward = builder.fill(0, recorder.steps[: marks[0]])
    places = {id(t): i for i, t in enumerate(outputs)}
    structure = _mapped(result, places)
    backward: Segment | None = None
    grads: tuple[Ref | None, ...] = ()
    saved: tuple[int, ...] = ()
    if training:
        grads = tuple(None if t is None else builder.ref(t, 1) for t in gradients)
        parts = [(r.slot, r.nbytes) for r in grads if r is not None]
        if len(set(parts)) < len(parts):
            raise Refusal("two gradients share memory")  # each parameter would own the same .grad
        backward = builder.fill(1, recorder.steps[marks[0] :])
        filled = (*backward.buffers, *backward.views, *backward.outputs)
        own = {slot for slot, *_ in filled}
        own |= {slot for step in backward.steps if type(step) is Call for slot, _ in step.results}
        used = {r.slot for step in backward.steps for r in _refs_in(step)} | {r.slot for r in grads if r is not None}
        used |= {slot for step in backward.steps if type(step) is not Call for _, slot, _ in step.addresses}
        used |= {buffer for _, buffer, _ in backward.views}
        saved = tuple(sorted(used - own - {len(given)}))
        backward = backward._replace(freed=_freed(backward, {r.slot for r in grads if r is not None}))
    forward = forward._replace(freed=_freed(forward, {r.slot for r in returned} | set(saved)))
    learns = next((i for i, t in enumerate(outputs) if t.requires_grad), 0)
    unused = tuple(i for i, (t, g) in enumerate(zip(given, gradients, strict=False)) if t.requires_grad and g is None)
    ends = builder.slots, len(given), learns, unused, given[0].device
    return Program(forward, returned, structure, backward, saved, grads, *ends)


def _freed(segment: Segment, kept: set[int]) -> tuple[tuple[int, ...], ...]:
    """For each step, the slots of operator results that can be freed after it; `kept` slots are not freed."""
    last: dict[int, int] = {}
    for i, step in enumerate(segment.steps):
        if type(step) is Call:
            last |= {slot: i for slot, _ in step.results}
            last |= {r.slot: i for r in _refs_in(step.arguments) if r.slot in last}
        else:
            read = [slot for _, slot, _ in step.addresses] + [r.slot for r in _refs_in(step.tuples)]
            last |= {slot: i for slot in read if slot in last}
    freed: list[list[int]] = [[] for _ in segment.steps]
    for slot, i in last.items():
        if slot not in kept:
            freed[i].append(slot)
    return tuple(map(tuple, freed))


def _mapped(result: Any, places: dict[int, int]) -> object:
    if result is None:
        return None
    if isinstance(result, Tensor):
        return places[id(result)]
    if not isinstance(result, tuple):
        raise Refusal(f"the call returns {type(result).__name__}")
    values = [_mapped(part, places) for part in result]
    return type(result)._make(values) if hasattr(result, "_make") else tuple(values)


def _refs_in(held: object) -> Iterable[Ref]:
    if type(held) is Ref:
        yield held
    elif isinstance(held, (tuple, list, dict)):
        for value in held.values() if isinstance(held, dict) else held:
            yield from _refs_in(value)
