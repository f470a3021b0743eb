"""Plans the replay of a recorded call: numbers its tensors, and reuses the memory of intermediate results.

Numbers ("slots") are given to the inputs, to the gradient of the output, then to what the call allocates and computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .recorder import CallRecorder, Place, ReplayRefusal, place_of, storage_of, tensors_in

ALIGNMENT = 256  # bytes, of tensors in a buffer


@dataclass(frozen=True, slots=True)
class Ref:
    """Reference to a numbered tensor, or to a view of it."""

    slot: int  # number of the tensor
    nbytes: int = 0  # offset from its start
    shape: tuple[int, ...] | None = None  # sizes; None for the whole tensor
    stride: tuple[int, ...] = ()  # strides in elements
    dtype: torch.dtype = torch.uint8  # of the view; a buffer of bytes holds tensors of any dtype


class Plan:
    """What a replay allocates, runs and returns.

    Args:
        recorder: of the call.
        named_tensors: names and tensors that each replay receives.
        result: what the call returned: tensors and None, in tuples.
        marks: numbers of steps and of allocations in the forward pass; None without gradients.
        incoming: input gradient of the recorded backward pass.
        gradients: of these tensors.

    Attributes:
        names: of the tensors, by slot.
        places: their recorded layouts; those of buffers have no address.
        inputs: number of tensors that each replay receives.
        allocations: slots of tensors that are allocated before the forward and before the backward pass.
        steps: of the forward and of the backward pass.
        outputs: tensors that the call returned.
        learns: position of the one that requires a gradient.
        result: as given.
        gradients: as given; None without a backward pass.
        unused: positions of inputs that require a gradient but are not used.
        device: of all tensors.

    Raises:
        Refusal: the call cannot be replayed.
    """

    def __init__(
        self,
        recorder: CallRecorder,
        named_tensors: Sequence[tuple[str, Tensor]],
        result: object,
        marks: tuple[int, int] | None = None,
        incoming: Tensor | None = None,
        gradients: Sequence[Tensor | None] = (),
    ) -> None:
        steps, allocations = marks or (len(recorder.steps), len(recorder.reserved))
        self.result, self.inputs, self.device = result, len(named_tensors), recorder.device
        self.steps = recorder.steps[:steps], recorder.steps[steps:]
        self.outputs = list({id(t): t for t in tensors_in(result)}.values())
        self.learns = next((i for i, t in enumerate(self.outputs) if t.requires_grad), 0)
        self.gradients = None if marks is None else gradients
        pairs = [(*pair, gradient) for pair, gradient in zip(named_tensors, gradients, strict=False)]
        self.unused = [i for i, (_, t, gradient) in enumerate(pairs) if t.requires_grad and gradient is None]
        self.names: list[str] = []
        self.places: list[Place] = []
        self.allocations: tuple[list[int], list[int]] = [], []
        self._known: dict[int, list[int]] = {}  # storage → slots of tensors in it
        self._parts: dict[int, tuple[int, int, int]] = {}  # storage → buffer, offset in it, recorded address
        returned = {storage_of(gradient): f"d_{name}" for name, _, gradient in pairs if gradient is not None}
        returned |= {storage_of(t): "y" for t in self.outputs}
        for name, t in (*named_tensors, *([] if incoming is None else [("dy", incoming)])):
            self._add(name, t)
        last: dict[int, int] = {}  # storage → last step that reads or writes it
        for i, step in enumerate(recorder.steps):
            last |= dict.fromkeys(map(storage_of, tensors_in((step.arguments, step.named))), i)
            for t, _ in step.results:
                self._add(returned.get(storage_of(t), step.function._opname), t)
        saved: list[tuple] = []
        scratch: tuple[list, list] = [], []
        for i, (storage, (t, born)) in enumerate(recorder.reserved.items()):
            phase = int(i >= allocations)
            end = last.get(storage, -1)
            if storage in returned:
                self.allocations[phase].append(self._add(returned[storage], t))
            elif phase == 0 and end >= steps:
                saved.append((t, 0, len(recorder.steps)))
            elif end >= 0:
                scratch[phase].append((t, born, end))
        for name, phase, group in (("kept", 0, saved), ("buffer", 0, scratch[0]), ("buffer", 1, scratch[1])):
            if group:
                self._share(name, phase, group)
        self._refuse_shared()

    def _add(self, name: str, t: Tensor) -> int:
        """Numbers a tensor."""
        self._known.setdefault(storage_of(t), []).append(len(self.places))
        return self._append(name, place_of(t))

    def _append(self, name: str, place: Place) -> int:
        self.names.append(name)
        self.places.append(place)
        return len(self.places) - 1

    def _share(self, name: str, phase: int, group: list[tuple[Tensor, int, int]]) -> None:
        """Places tensors, with the first and the last step that uses each, in one buffer."""
        offsets, nbytes = _pack([(born, end, t.untyped_storage().nbytes()) for t, born, end in group])
        buffer = self._append(name, Place(0, 0, (nbytes,), (1,), torch.uint8))
        self.allocations[phase].append(buffer)
        for (t, *_), offset in zip(group, offsets, strict=True):
            self._parts[storage_of(t)] = buffer, offset, t.data_ptr()

    def _refuse_shared(self) -> None:
        """Raises Refusal if what is returned shares memory."""
        for t, ref in zip(self.outputs, map(self.ref, self.outputs), strict=True):
            if ref.shape is not None and (ref.nbytes or not t.is_contiguous()):
                raise ReplayRefusal("an output is a view of another tensor")  # in-place writes to it would differ
        refs = [self.ref(t) for t in self.gradients or () if t is not None]
        if len({(ref.slot, ref.nbytes) for ref in refs}) < len(refs):
            raise ReplayRefusal("two gradients share memory")  # each parameter would own the same .grad

    def ref(self, t: Tensor) -> Ref:
        """The `Ref` of a recorded tensor in a replay."""
        place = place_of(t)
        if place.storage in self._parts:
            buffer, offset, start = self._parts[place.storage]
            nbytes = offset + (place.address - start if t.numel() else 0)  # empty tensors have no address
            return Ref(buffer, nbytes, place.shape, place.stride, place.dtype)
        if place.storage not in self._known:
            raise ReplayRefusal("a tensor is neither an input nor created by the call")
        candidates = self._known[place.storage]
        exact = next((slot for slot in candidates if self.places[slot] == place), None)
        if exact is not None:
            return Ref(exact)
        slot, *others = candidates
        base = self.places[slot]
        if others or base.dtype != place.dtype:
            raise ReplayRefusal("a tensor is a view of several inputs, or of one with another dtype")
        nbytes = place.address - base.address if t.numel() else 0
        return Ref(slot, nbytes, place.shape, place.stride, place.dtype)

    def slot(self, result: Tensor) -> int:
        """Slot of an operator's result."""
        return self._known[storage_of(result)][0]


def _pack(spans: list[tuple[int, int, int]]) -> tuple[list[int], int]:
    """(offsets of tensors in one buffer, its size in bytes).

    Args:
        spans: (first step, last step, bytes) of each tensor; those whose steps overlap do not share memory.
    """
    placed: list[tuple[int, int, int, int]] = []
    offsets: list[int] = []
    for first, last, nbytes in spans:
        occupied = sorted((at, at + n) for at, n, a, b in placed if a <= last and first <= b)
        offset = 0
        for start, end in occupied:
            if offset + nbytes <= start:
                break
            offset = max(offset, -(-end // ALIGNMENT) * ALIGNMENT)
        offsets.append(offset)
        placed.append((offset, nbytes, first, last))
    size = max((at + n for at, n, *_ in placed), default=0)
    return offsets, -(-size // ALIGNMENT) * ALIGNMENT
