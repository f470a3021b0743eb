"""The base class of layers that a fused forward may be attached to."""

from functools import partial
from typing import Any

from torch import nn


class Fusable(nn.Module):
    """A module whose shallow copies run on themselves.

    A fused forward is an attribute of an instance, which holds the instance. `copy.copy` and the replicas of
    nn.DataParallel copy attributes, so the copy's are bound again.
    """

    def __copy__(self) -> Any:
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        return bound_as(other, self)

    def _replicate_for_data_parallel(self) -> Any:
        return bound_as(super()._replicate_for_data_parallel(), self)


def bound_as(other: nn.Module, module: nn.Module) -> nn.Module:
    """The other module, with the functions that are bound to the module as attributes bound to it instead."""
    for name, value in module.__dict__.items():
        if type(value) is partial and value.args == (module,):
            other.__dict__[name] = partial(value.func, other)
    return other
