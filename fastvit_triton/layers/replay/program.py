"""What a recorded call does, with its tensors as parts of those in a table, which each replay fills anew."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch as functorch

from ...kernels.launch import Binary, stream
from ...kernels.op import once_differentiable

BATCHED = "blocks that are replayed take one gradient at a time; FASTVIT_TRITON_REPLAY=0 allows batched ones"


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor of a replay: the one in a slot of the table, or a part of it.

    Attributes:
        slot: in the table.
        nbytes: distance from the start of the tensor in the slot.
        start: the same in elements.
        shape: sizes; None for the tensor in the slot as it is.
        stride: strides in elements.
    """

    slot: int
    nbytes: int = 0
    start: int = 0
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()

    def tensor(self, table: list[Tensor | None]) -> Tensor:
        """The tensor itself."""
        base = table[self.slot]
        if self.shape is None:
            return base
        return base.as_strided(self.shape, self.stride, base.storage_offset() + self.start)

    def output(self, table: list[Tensor | None]) -> Tensor:
        """The tensor for the caller, who may write to it: if it is all of its storage, no view in autograd's sense."""
        base, part = table[self.slot], self.tensor(table)
        if part is base or self.nbytes or part.numel() != base.numel():
            return part
        return torch.ops.aten._unsafe_view(base, self.shape) if part.is_contiguous() and base.is_contiguous() else part


class Refs(tuple):
    """A tuple or list among the arguments that holds a `Ref`."""


class DirectLaunch(NamedTuple):
    """A launch whose binary is known.

    Attributes:
        grid: three numbers of programs.
        binary: what is launched.
        arguments: all of them, compile-time ones included.
        addresses: (position, slot, bytes from there) of those that are addresses.
        tuples: (position, arguments) of those that are tuples with addresses.
    """

    grid: tuple[int, int, int]
    binary: Binary
    arguments: list
    addresses: tuple[tuple[int, int, int], ...]
    tuples: tuple[tuple[int, Refs], ...]

    @classmethod
    def of(cls, grid: tuple[int, ...], binary: Binary, arguments: tuple) -> "DirectLaunch":
        """The launch with these run-time arguments, a `Ref` for each tensor."""
        addresses = tuple((i, a.slot, a.nbytes) for i, a in enumerate(arguments) if type(a) is Ref)
        tuples = tuple((i, a) for i, a in enumerate(arguments) if type(a) is Refs)
        return cls((*grid, 1, 1)[:3], binary, [*arguments, *binary.constants], addresses, tuples)


class Call(NamedTuple):
    """An operator, or a launch whose binary Triton chooses.

    Attributes:
        function: to call.
        arguments: with a `Ref` for each tensor.
        named: without tensors.
        results: (slot, position) of what it makes.
    """

    function: Callable
    arguments: tuple
    named: dict[str, object]
    results: tuple[tuple[int, int], ...]


class Segment(NamedTuple):
    """Steps that run one after another, and the memory that is allocated for them first.

    Attributes:
        buffers: (slot, bytes).
        views: (slot, slot of a buffer, dtype).
        outputs: (slot, shape, stride, dtype) of tensors that are returned.
        steps: in order.
        kernels: those that are launched directly.
        last: step → slots of results that no later one reads.
    """

    buffers: tuple[tuple[int, int], ...]
    views: tuple[tuple[int, int, torch.dtype], ...]
    outputs: tuple[tuple, ...]
    steps: tuple[DirectLaunch | Call, ...]
    kernels: tuple[Callable, ...]
    last: dict[int, list[int]]

    def run(self, table: list[Tensor | None], address: list[int], device: torch.device) -> None:
        """Runs the steps on a table that holds what was given, and the addresses of its tensors."""
        for slot, nbytes in self.buffers:
            table[slot] = torch.empty(nbytes, dtype=torch.uint8, device=device)
            address[slot] = table[slot].data_ptr()
        for slot, buffer, dtype in self.views:
            table[slot], address[slot] = table[buffer].view(dtype), address[buffer]
        for slot, shape, stride, dtype in self.outputs:
            table[slot] = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            address[slot] = table[slot].data_ptr()
        queue = stream(-1 if device.index is None else device.index) if self.kernels else None
        for i, step in enumerate(self.steps):
            if type(step) is DirectLaunch:
                (x, y, z), (run, function, metadata, _), arguments, addresses, tuples = step
                arguments = arguments[:]
                for at, slot, nbytes in addresses:
                    arguments[at] = address[slot] + nbytes
                for at, refs in tuples:
                    arguments[at] = tuple([address[a.slot] + a.nbytes if type(a) is Ref else a for a in refs])
                run(x, y, z, queue, function, metadata, None, None, None, *arguments)
            else:
                function, arguments, named, results = step
                made = function(*_tensors(arguments, table), **named)
                for slot, position in results:
                    table[slot] = made if isinstance(made, Tensor) else made[position]
                    address[slot] = table[slot].data_ptr()
                made = None
            for slot in self.last.get(i, ()):
                table[slot] = None


def _tensors(held: Sequence[object], table: list[Tensor | None]) -> list[object]:
    """The arguments with tensors for each `Ref`."""
    return [
        (table[a.slot] if a.shape is None else a.tensor(table)) if type(a) is Ref
        else tuple(_tensors(a, table)) if type(a) is Refs else a
        for a in held
    ]  # fmt: skip


class Program(NamedTuple):
    """A recorded call, with its backward pass if there are gradients.

    Attributes:
        forward: its first slots are those of the given tensors.
        outputs: tensors that the call returns, in order.
        structure: what the call returns, with the position of each tensor in `outputs`.
        backward: None without gradients; gradient of the one output that has one comes in the slot `incoming`.
        saved: slots that the backward pass needs.
        gradients: of the given tensors, in order; None for those without one.
        slots: length of the table.
        incoming: a slot.
        learns: position of the output that has a gradient.
        unused: positions of given tensors that require a gradient and get none: they are no part of the graph.
        device: of all tensors.
    """

    forward: Segment
    outputs: tuple[Ref, ...]
    structure: object
    backward: Segment | None
    saved: tuple[int, ...]
    gradients: tuple[Ref | None, ...]
    slots: int
    incoming: int
    learns: int
    unused: tuple[int, ...]
    device: torch.device

    def __call__(self, given: list[Tensor], addresses: list[int]) -> object:
        """What the call returns.

        Args:
            given: inputs of the call, then what the modules hold.
            addresses: of these.
        """
        if self.backward is not None:
            for i in self.unused:
                given[i] = given[i].detach()
            return _rebuilt(self.structure, _Function.apply(self, addresses, *given))
        table = self.run(self.forward, given, addresses)
        return _rebuilt(self.structure, [ref.output(table) for ref in self.outputs])

    def run(self, segment: Segment, table: list[Tensor | None], addresses: list[int]) -> list[Tensor | None]:
        """Runs a segment on the first slots of a table; returns the whole. Its operators are what autocast called."""
        rest = self.slots - len(table)
        table, addresses, kind = table + [None] * rest, addresses + [0] * rest, self.device.type
        if not torch.is_autocast_enabled(kind):
            segment.run(table, addresses, self.device)
            return table
        torch.set_autocast_enabled(kind, False)
        try:
            segment.run(table, addresses, self.device)
        finally:
            torch.set_autocast_enabled(kind, True)
        return table


def _rebuilt(structure: object, outputs: Sequence[Tensor]) -> object:
    if type(structure) is int:
        return outputs[structure]
    if structure is None:
        return None
    values = [_rebuilt(part, outputs) for part in structure]
    return type(structure)._make(values) if hasattr(structure, "_make") else tuple(values)


class _Function(torch.autograd.Function):
    """A program and its backward pass as one node of the graph."""

    @staticmethod
    def forward(ctx, program, addresses, *given):
        ctx.program, table = program, program.run(program.forward, list(given), addresses)
        ctx.save_for_backward(*[table[slot] for slot in program.saved])
        ctx.set_materialize_grads(False)
        outputs = tuple([ref.output(table) for ref in program.outputs])
        ctx.mark_non_differentiable(*[t for i, t in enumerate(outputs) if i != program.learns])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *incoming):
        program = ctx.program
        dy = incoming[program.learns]
        if dy is None:
            return (None,) * (2 + len(program.gradients))
        if functorch.is_batchedtensor(dy) or functorch.is_legacy_batchedtensor(dy):
            raise RuntimeError(BATCHED)
        return None, None, *_gradients(program, ctx.saved_tensors, dy)


def _gradients(program: Program, saved: Sequence[Tensor], dy: Tensor) -> list[Tensor | None]:
    """Gradients of the given tensors for that of the output."""
    dy, table = dy.contiguous(), [None] * program.slots
    table[program.incoming] = dy if dy.data_ptr() % 16 == 0 else dy.clone()
    for slot, t in zip(program.saved, saved, strict=True):
        table[slot] = t
    table = program.run(program.backward, table, [0 if t is None else t.data_ptr() for t in table])
    return [None if ref is None else ref.tensor(table) for ref in program.gradients]
