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
        return _bound(other, self)

    def _replicate_for_data_parallel(self) -> Any:
        return _bound(super()._replicate_for_data_parallel(), self)


def _bound(other: nn.Module, module: nn.Module) -> nn.Module:
    """The copy, with attributes that are bound to the module bound to the copy instead."""
    for name, value in list(other.__dict__.items()):
        if type(value) is partial and value.args == (module,):
            other.__dict__[name] = partial(value.func, other)
    return other
