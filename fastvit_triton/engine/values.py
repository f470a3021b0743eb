"""Tells which tensors have values while a call is counted, so that shapes and branches that depend on them are known.

Integers given on the CPU, constants (`zeros`, `arange`, `tensor`), and what is computed from these alone have values:
masks, grids and positions. Weights, images and all that depends on them are uninitialised.
"""

import mmap
import sys

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only

CONSTANTS = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")  # read shapes only
LARGE = 2**30  # bytes of a tensor from which on Linux is asked for addresses alone, as it refuses more than its memory
MAP_NORESERVE = 0x4000  # of <sys/mman.h>; Python's mmap lacks the name before 3.13
OVERWRITES = ("fill_", "zero_", "copy_")


def mark(t: Tensor, known: bool, empty: bool = False) -> Tensor:
    """Records whether the memory of a tensor holds its values; returns the tensor."""
    vars(t.untyped_storage()).update(values=known, empty=empty)  # of the same Python object while the storage exists
    return t


def has_values(t: Tensor) -> bool:
    """True if the values of a tensor may be read; integers from outside have them, floating-point numbers have not."""
    return not t.is_meta and vars(t.untyped_storage()).get("values", not (t.is_floating_point() or t.is_complex()))


def reserved(t: Tensor) -> Tensor:
    """An uninitialised CPU tensor with the same shape and strides, which may be larger than the memory."""
    nbytes = t.element_size() * (1 + sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True)))
    if nbytes < LARGE or sys.platform != "linux" or not t.numel():
        return mark(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu"), False)
    try:
        addresses = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    except OSError as error:  # a limit of the process
        raise RuntimeError(f"{nbytes:,} bytes of addresses for a tensor {list(t.shape)} are refused") from error
    return mark(torch.frombuffer(addresses, dtype=t.dtype).as_strided(t.shape, t.stride()), False)


def described(t: Tensor) -> Tensor:
    """A meta tensor with the same shape and strides."""
    return t if t.is_meta else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def given(t: Tensor) -> Tensor:
    """The tensor on the CPU if it has values, else an uninitialised one."""
    return t.cpu() if has_values(t) else reserved(t)


def is_known(function: OpOverload, name: str, tensors: list[Tensor]) -> bool:
    """True if the results of this operator are computed from values that are known."""
    if torch.Tag.nondeterministic_seeded in function.tags or any(
        t.untyped_storage().nbytes() >= LARGE for t in tensors
    ):
        return False
    if name in OVERWRITES:
        storage = tensors[0].untyped_storage()
        whole = tensors[0].numel() * tensors[0].element_size() == storage.nbytes()
        if whole or vars(storage).get("empty", False):
            return all(has_values(t) for t in tensors[1:])
    return name in CONSTANTS or all(map(has_values, tensors))


def written_arguments(function: OpOverload, arguments: tuple, named: dict, results: object) -> object:
    """The results of an operator that writes to its arguments: these arguments, and new tensors for other results."""
    schema = function._schema
    by_name = dict(zip((a.name for a in schema.arguments), arguments, strict=False)) | named
    owners = {frozenset(a.alias_info.before_set): by_name.get(a.name) for a in schema.arguments if a.alias_info}
    several = results if isinstance(results, (tuple, list)) else (results,)
    pairs = zip(schema.returns, several, strict=False)
    outputs = tuple(
        owners[frozenset(r.alias_info.before_set)] if r.alias_info else tree_map_only(Tensor, reserved, fresh)
        for r, fresh in pairs
    )
    return outputs if isinstance(results, (tuple, list)) else outputs[0] if outputs else None


def positions(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Boolean indices whose values are known as integers, which index tensors without values, too."""
    integers: list[Tensor | None] = []
    for index in indices:
        integers += index.nonzero().unbind(1) if index is not None and index.dtype == torch.bool else (index,)
    return integers


def without_weights(model: nn.Module) -> nn.Module:
    """Moves a model to the CPU with uninitialised weights, in place; integer buffers that have values keep them."""
    return model._apply(given)
