"""A recorded call as a program on a table of tensors, which each replay fills anew."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch._C import _functorch as functorch

from ...kernels.launch import Binary, stream
from ...kernels.op import once_differentiable

BATCHED = "replayed blocks take one gradient at a time; FASTVIT_TRITON_REPLAY=0 allows batched ones"
Table = list[Any]  # by slot: a tensor, or None before it is made and after it is freed


@dataclass(frozen=True, slots=True)
class Ref:
    """Reference to the tensor in a slot of the table, or to a view of it.

    Attributes:
        slot: index in the table.
        nbytes: offset from the start of the tensor in the slot.
        start: the same in elements.
        shape: sizes; None for the whole tensor in the slot.
        stride: strides in elements.
    """

    slot: int
    nbytes: int = 0
    start: int = 0
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()

    def tensor(self, table: Table) -> Tensor:
        """Looks up the tensor."""
        base = table[self.slot]
        if self.shape is None:
            return base
        return base.as_strided(self.shape, self.stride, base.storage_offset() + self.start)

    def output(self, table: Table) -> Tensor:
        """The tensor to return; not a view for autograd if it covers its storage, so the caller may write to it."""
        base = table[self.slot]
        part = self.tensor(table)
        if part is base or self.nbytes or part.numel() != base.numel():
            return part
        return torch.ops.aten._unsafe_view(base, self.shape) if part.is_contiguous() and base.is_contiguous() else part


class Refs(tuple):
    """A tuple or list argument that contains a `Ref`."""


@final
class DirectLaunch(NamedTuple):
    """A launch of a known binary, without Triton's dispatch.

    Attributes:
        grid: three numbers of programs.
        binary: the compiled kernel.
        arguments: all arguments, including compile-time ones.
        addresses: (position, slot, offset in bytes) of pointer arguments.
        tuples: (position, elements) of tuple arguments that contain pointers.
    """

    grid: tuple[int, int, int]
    binary: Binary
    arguments: list
    addresses: tuple[tuple[int, int, int], ...]
    tuples: tuple[tuple[int, Refs], ...]

    @classmethod
    def of(cls, grid: tuple[int, ...], binary: Binary, arguments: tuple) -> "DirectLaunch":
        """Builds the launch from run-time arguments, with a `Ref` for each tensor."""
        addresses = tuple((i, a.slot, a.nbytes) for i, a in enumerate(arguments) if type(a) is Ref)
        tuples = tuple((i, a) for i, a in enumerate(arguments) if type(a) is Refs)
        x, y, z, *_ = *grid, 1, 1
        return cls((x, y, z), binary, [*arguments, *binary.constants], addresses, tuples)


@final
class Call(NamedTuple):
    """A call of an operator, or a launch for which Triton selects the binary.

    Attributes:
        function: to call.
        arguments: positional, with a `Ref` for each tensor.
        named: keyword arguments, without tensors.
        results: (slot, position) of its new tensors.
    """

    function: Callable
    arguments: tuple
    named: dict[str, object]
    results: tuple[tuple[int, int], ...]


class Segment(NamedTuple):
    """Steps that run in order, and the memory allocated before them.

    Attributes:
        buffers: (slot, bytes).
        views: (slot, slot of a buffer, dtype).
        outputs: (slot, shape, stride, dtype) of returned tensors.
        steps: in order.
        kernels: those launched directly.
        freed: for each step, slots that can be freed after it.
    """

    buffers: tuple[tuple[int, int], ...]
    views: tuple[tuple[int, int, torch.dtype], ...]
    outputs: tuple[tuple, ...]
    steps: tuple[DirectLaunch | Call, ...]
    kernels: tuple[Callable, ...]
    freed: tuple[tuple[int, ...], ...]

    def run(self, table: Table, address: list[int], device: torch.device) -> None:
        """Runs the steps; `table` holds the input tensors by slot, `address` their addresses; both are filled in."""
        for slot, nbytes in self.buffers:
            table[slot] = torch.empty(nbytes, dtype=torch.uint8, device=device)
            address[slot] = table[slot].data_ptr()
        for slot, buffer, dtype in self.views:
            table[slot], address[slot] = table[buffer].view(dtype), address[buffer]
        for slot, shape, stride, dtype in self.outputs:
            table[slot] = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            address[slot] = table[slot].data_ptr()
        queue = stream(-1 if device.index is None else device.index) if self.kernels else None
        for step, freed in zip(self.steps, self.freed, strict=True):
            if type(step) is DirectLaunch:
                (x, y, z), (run, function, metadata, _), arguments, addresses, tuples = step
                arguments = arguments[:]
                for at, slot, nbytes in addresses:
                    arguments[at] = address[slot] + nbytes
                for at, refs in tuples:
                    arguments[at] = tuple([address[a.slot] + a.nbytes if type(a) is Ref else a for a in refs])
                run(x, y, z, queue, function, metadata, None, None, None, *arguments)
            else:
                function, given, named, results = step
                made = function(*_tensors(given, table), **named)
                for slot, position in results:
                    table[slot] = made if isinstance(made, Tensor) else made[position]
                    address[slot] = table[slot].data_ptr()
                made = None
            for slot in freed:
                table[slot] = None


def _tensors(held: Sequence[object], table: Table) -> list[object]:
    """The arguments with each `Ref` replaced by its tensor."""
    return [
        (table[a.slot] if a.shape is None else a.tensor(table)) if type(a) is Ref
        else tuple(_tensors(a, table)) if type(a) is Refs else a
        for a in held
    ]  # fmt: skip


class Program(NamedTuple):
    """A recorded call, with its backward pass if it has gradients.

    Attributes:
        forward: the forward segment; the first slots hold the input tensors.
        outputs: tensors that the call returns, in order.
        structure: what the call returns, with the position of each tensor in `outputs`.
        backward: the backward segment, or None; it reads the gradient of the one differentiable output.
        saved: slots saved for the backward pass.
        gradients: those of the input tensors, in order; None for tensors without one.
        slots: length of the table.
        incoming: slot of the output's gradient.
        learns: position of the differentiable output.
        unused: positions of inputs that require a gradient but are not used; they are detached.
        device: of all tensors.
    """

    forward: Segment
    outputs: tuple[Ref, ...]
    structure: Any
    backward: Segment | None
    saved: tuple[int, ...]
    gradients: tuple[Ref | None, ...]
    slots: int
    incoming: int
    learns: int
    unused: tuple[int, ...]
    device: torch.device

    def __call__(self, given: list[Tensor], addresses: list[int]) -> object:
        """Replays the call and returns its result.

        Args:
            given: inputs of the call, then the held tensors of the modules.
            addresses: of the given tensors.
        """
        if self.backward is not None:
            for i in self.unused:
                given[i] = given[i].detach()
            return _rebuilt(self.structure, _Function.apply(self, addresses, *given))
        table = self.run(self.forward, given, addresses)
        return _rebuilt(self.structure, [ref.output(table) for ref in self.outputs])

    def run(self, segment: Segment, table: Table, addresses: list[int]) -> Table:
        """Runs a segment on the filled first slots; returns the full table. Autocast is off, as casts were recorded."""
        rest = self.slots - len(table)
        table = table + [None] * rest
        addresses = addresses + [0] * rest
        kind = self.device.type
        if not torch.is_autocast_enabled(kind):
            segment.run(table, addresses, self.device)
            return table
        torch.set_autocast_enabled(kind, False)
        try:
            segment.run(table, addresses, self.device)
        finally:
            torch.set_autocast_enabled(kind, True)
        return table


def _rebuilt(structure: Any, outputs: Sequence[Tensor]) -> object:
    if type(structure) is int:
        return outputs[structure]
    if structure is None:
        return None
    values = [_rebuilt(part, outputs) for part in structure]
    return type(structure)._make(values) if hasattr(structure, "_make") else tuple(values)


class _Function(torch.autograd.Function):
    """Autograd node of a program: its forward and backward pass."""

    @staticmethod
    def forward(ctx, program, addresses, *given):
        ctx.program = program
        table = program.run(program.forward, list(given), addresses)
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
        return None, None, *_gradients(program, program.backward, ctx.saved_tensors, dy)


def _gradients(program: Program, backward: Segment, saved: Sequence[Tensor], dy: Tensor) -> list[Tensor | None]:
    """Gradients of the input tensors from the output's gradient dy."""
    table: Table = [None] * program.slots
    dy = dy.contiguous()
    table[program.incoming] = dy if dy.data_ptr() % 16 == 0 else dy.clone()
    for slot, t in zip(program.saved, saved, strict=True):
        table[slot] = t
    table = program.run(backward, table, [0 if t is None else t.data_ptr() for t in table])
    return [None if ref is None else ref.tensor(table) for ref in program.gradients]
