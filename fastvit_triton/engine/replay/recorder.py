"""Records the launches and PyTorch operators of a call, and the memory that each reads and writes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from ...kernels import launch
from ...kernels.op import REGISTERED

ALLOCATE = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
READERS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero")  # the host waits for values


class ReplayRefusal(RuntimeError):
    """Raised if a call cannot be replayed."""


@dataclass(frozen=True, slots=True)
class Place:
    """Location and layout of a tensor of the recorded call."""

    storage: int  # identity of its storage
    address: int  # address of its first element
    shape: tuple[int, ...]  # sizes
    stride: tuple[int, ...]  # strides in elements
    dtype: torch.dtype  # dtype


class RecordedStep(NamedTuple):
    """A launch, or a call of an operator."""

    function: Any  # kernel or operator
    grid: tuple[int, ...] | None  # grid of a launch; None for an operator
    arguments: tuple  # positional arguments
    named: dict[str, object]  # compile-time arguments and options of a launch, or keyword arguments of an operator
    results: tuple[tuple[Tensor, int], ...]  # (new tensor, its position among the results) of an operator


class CallRecorder(launch.LaunchRecorder):
    """Context in which launches and operators run and are recorded.

    Args:
        device: of all tensors.
        owned: the input that the call may write to, or None.

    Attributes:
        steps: in order.
        device: of all tensors.
        draws: True if an operator draws random numbers.
        reserved: storage → tensor that was allocated uninitialized, and the number of steps before that.
    """

    def __init__(self, device: torch.device, owned: Tensor | None = None) -> None:
        super().__init__()
        self.device = device
        self.draws = False
        self.steps: list[RecordedStep] = []
        self.reserved: dict[int, tuple[Tensor, int]] = {}
        # storages that the call allocated, or may write to
        self._made: set[int] = set() if owned is None else {storage_of(owned)}
        self._alive: list[object] = []  # so that the allocator does not reuse an address

    def __torch_dispatch__(self, function: OpOverload, kinds: object, arguments: tuple = (), named: dict | None = None):
        """Runs an operator and records it; of our own operators, the launches inside are recorded."""
        named = named or {}
        name = function.name().split("::")[1].split(".")[0]
        if function.namespace == "fastvit_triton":
            if named:
                raise ReplayRefusal(f"{name} is called with keyword arguments")
            with self:
                return REGISTERED[name][0](*arguments)
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            raise ReplayRefusal("the call checkpoints or offloads activations")
        if _reads_values(function, name, arguments):
            raise ReplayRefusal(f"{name} reads values")
        if function._schema.is_mutable and not self._writes_own(function, arguments, named):
            raise ReplayRefusal(f"{name} writes to an existing tensor")
        self.draws |= torch.Tag.nondeterministic_seeded in function.tags
        results = function(*arguments, **named)
        self._alive.append(results)
        if any(t.device != self.device for t in tensors_in(results)):
            raise ReplayRefusal(f"{name} copies to another device")
        several = results if isinstance(results, (tuple, list)) else (results,)
        argument_storages = {storage_of(t) for t in tensors_in((arguments, named))}
        allocated = [
            (t, i) for i, t in enumerate(several) if isinstance(t, Tensor) and storage_of(t) not in argument_storages
        ]
        new = tuple({storage_of(t): (t, i) for t, i in allocated}.values())
        storages = {storage_of(t) for t, _ in new}
        self._made |= storages
        if name in ALLOCATE:
            self.reserved |= {storage_of(t): (t, len(self.steps)) for t, _ in new}
        elif new or function._schema.is_mutable:  # the rest are views
            self.steps.append(RecordedStep(function, None, arguments, named, new))
        return results

    def launched(self, kernel: Callable, grid: tuple[int, ...], arguments: tuple, fixed: dict) -> None:
        """Records a launch, before it runs."""
        self.steps.append(RecordedStep(kernel, grid, arguments, fixed, ()))

    def _writes_own(self, function: OpOverload, arguments: tuple, named: dict) -> bool:
        """True if the operator writes only to memory that this call allocated."""
        values = dict(zip((a.name for a in function._schema.arguments), arguments, strict=False)) | named
        written = [values.get(a.name) for a in function._schema.arguments if a.alias_info and a.alias_info.is_write]
        return all(storage_of(t) in self._made for t in tensors_in(written))


def _reads_values(function: OpOverload, name: str, arguments: tuple) -> bool:
    """True if the host waits for values, or shapes depend on values."""
    if name == "index":
        return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in arguments[1])
    tags = torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output
    return name in READERS or any(tag in function.tags for tag in tags)


def storage_of(t: Tensor) -> int:
    """Identity of a tensor's storage, unique while the storage exists."""
    return t.untyped_storage()._cdata


def place_of(t: Tensor) -> Place:
    """Location and layout of a tensor."""
    return Place(storage_of(t), t.data_ptr(), tuple(t.shape), t.stride(), t.dtype)


def tensors_in(nested: object) -> Iterator[Tensor]:
    """Yields the tensors in nested tuples, lists and dictionaries, except those in oneDNN's layout (no address)."""
    if isinstance(nested, Tensor):
        if not nested.is_mkldnn:
            yield nested
    elif isinstance(nested, (tuple, list, dict)):
        for value in nested.values() if isinstance(nested, dict) else nested:
            yield from tensors_in(value)
