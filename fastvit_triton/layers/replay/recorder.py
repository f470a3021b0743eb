"""Records what a call does: its launches and PyTorch's operators, and the memory that each of them reads and writes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from ...kernels import launch
from ...kernels.op import REGISTERED

ALLOCATE = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
READERS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero")  # the host waits for their values


class Refusal(RuntimeError):
    """Why a call cannot be replayed."""


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of the recorded call.

    Attributes:
        storage: identity of its storage.
        address: of its first element.
        shape: sizes.
        stride: strides in elements.
        dtype: of its elements.
    """

    storage: int
    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Step(NamedTuple):
    """A launch or an operator.

    Attributes:
        function: kernel or operator.
        grid: of a launch; None for an operator.
        arguments: as they were given.
        named: compile-time arguments and options of a launch, or named arguments of an operator.
        results: new tensors that an operator made, and the position of each among its results.
    """

    function: Callable
    grid: tuple[int, ...] | None
    arguments: tuple
    named: dict[str, object]
    results: tuple[tuple[Tensor, int], ...]


class Recorder(launch.Recorder):
    """In this context launches and operators run, and are written down.

    Attributes:
        steps: in order.
        device: of all tensors.
        draws: an operator draws random numbers.
        reserved: storage → tensor whose memory was only reserved, and the number of steps before that.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.draws = device, False
        self.steps: list[Step] = []
        self.reserved: dict[int, tuple[Tensor, int]] = {}
        self._made: set[int] = set()  # storages of this call
        self._alive: list[object] = []  # so that no memory is given twice

    def __torch_dispatch__(self, function: OpOverload, kinds: object, arguments: tuple = (), named: dict | None = None):
        """Runs an operator; one of ours is entered."""
        named, name = named or {}, function.name().split("::")[1].split(".")[0]
        if function.namespace == "fastvit_triton":
            if named:
                raise Refusal(f"{name} is called with named arguments")
            with self:
                return REGISTERED[name][0](*arguments)
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            raise Refusal("the call checkpoints or offloads activations")
        if _reads_values(function, name, arguments):
            raise Refusal(f"{name} reads values")
        if function._schema.is_mutable and not self._writes_own(function, arguments, named):
            raise Refusal(f"{name} writes to a tensor that was there before")
        self.draws |= torch.Tag.nondeterministic_seeded in function.tags
        results = function(*arguments, **named)
        self._alive.append(results)
        if any(t.device != self.device for t in tensors_in(results)):
            raise Refusal(f"{name} copies to another device")
        several = results if isinstance(results, (tuple, list)) else (results,)
        given = {storage_of(t) for t in tensors_in((arguments, named))}
        new = [(t, i) for i, t in enumerate(several) if isinstance(t, Tensor) and storage_of(t) not in given]
        new = tuple({storage_of(t): (t, i) for t, i in new}.values())
        storages = {storage_of(t) for t, _ in new}
        self._made |= storages
        if name in ALLOCATE:
            self.reserved |= {storage_of(t): (t, len(self.steps)) for t, _ in new}
        elif new or function._schema.is_mutable:  # others are views
            self.steps.append(Step(function, None, arguments, named, new))
        return results

    def launched(self, kernel: Callable, grid: tuple[int, ...], arguments: tuple, fixed: dict[str, object]) -> None:
        """Takes a launch, which follows."""
        self.steps.append(Step(kernel, grid, arguments, fixed, ()))

    def _writes_own(self, function: OpOverload, arguments: tuple, named: dict) -> bool:
        """The operator writes to memory of this call alone."""
        given = dict(zip((a.name for a in function._schema.arguments), arguments, strict=False)) | named
        written = [given.get(a.name) for a in function._schema.arguments if a.alias_info and a.alias_info.is_write]
        return all(storage_of(t) in self._made for t in tensors_in(written))


def _reads_values(function: OpOverload, name: str, arguments: tuple) -> bool:
    """The host waits for values, or shapes depend on them."""
    if name == "index":
        return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in arguments[1])
    tags = torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output
    return name in READERS or any(tag in function.tags for tag in tags)


def storage_of(t: Tensor) -> int:
    """Identity of a tensor's storage while it lives."""
    return t.untyped_storage()._cdata


def place_of(t: Tensor) -> Place:
    """Where a tensor lies."""
    return Place(storage_of(t), t.data_ptr(), tuple(t.shape), t.stride(), t.dtype)


def tensors_in(held: object) -> Iterator[Tensor]:
    """The tensors in tuples, lists and dictionaries."""
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, (tuple, list, dict)):
        for value in held.values() if isinstance(held, dict) else held:
            yield from tensors_in(value)
