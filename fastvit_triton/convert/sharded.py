"""`as_gathered`: modules that FSDP2 sharded, shown to readers as they are inside their forward."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def as_gathered(model: nn.Module) -> Iterator[None]:
    """Context in which modules that FSDP2 sharded have the class and the kind of parameters that their forward sees.

    `fully_shard` gives a module a class of its own, made from the original, and keeps a shard of each parameter as a
    DTensor outside of the forward. Readers look for exact types, so that they would decline all of this. Here the class
    is the original one, and parameters are plain and have no values: nothing is communicated.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        yield
        return
    from torch.distributed.fsdp import FSDPModule

    classes = [(module, type(module)) for module in model.modules() if isinstance(module, FSDPModule)]
    tables = [(m._parameters, dict(m._parameters)) for m in model.modules()] if classes else []
    try:
        for module, cls in classes:
            own_class: Any = next(c for c in cls.__mro__ if not issubclass(c, FSDPModule))
            module.__class__ = own_class
        for table, shards in tables:
            table.update({name: _gathered(p) for name, p in shards.items() if _is_gathered_in_forward(p)})
        yield
    finally:
        for module, cls in classes:
            module.__class__ = cls
        for table, shards in tables:
            table.update(shards)


def _is_gathered_in_forward(parameter: Tensor | None) -> bool:
    """True for a shard of FSDP2, also replicated; what tensor parallelism splits as well stays split in the forward."""
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return False
    *outer, last = parameter.placements
    return last.is_shard() and all(placement.is_replicate() for placement in outer)


def _gathered(parameter: Any) -> nn.Parameter:
    """A parameter of the whole shape, without values."""
    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)
