"""Whether modules are as they were: everything that their calls depend on, compared in a few microseconds.

A module's state is its type, the forward of that type, and its `__dict__`: parameters and buffers by identity, hooks,
children, settings, an instance's own forward. Of objects that it holds, such as a configuration, the attributes count.
Other methods of a class, its attributes and global variables are not compared.
"""

import weakref
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

from torch import Tensor, nn

_FUNCTIONS = FunctionType, MethodType, BuiltinFunctionType
_PLAIN = (int, float, str, bytes, type(None), type, Tensor, nn.Module, ModuleType, *_FUNCTIONS)


class Guard:
    """What was found of some modules.

    Args:
        root: the module that is called; it is not kept alive.
        inside: those in it, and others that the call is given.

    Attributes:
        root: a reference.
        inside: as given.
        tensors: parameters, buffers and other tensors of all of them, each once.
    """

    def __init__(self, root: nn.Module, inside: list[nn.Module]) -> None:
        self.root, self.inside, modules = weakref.ref(root), inside, [root, *inside]
        self.facts = [(type(module), _copied(module.__dict__)) for module in modules]
        self.forwards = [(cls, cls.forward) for cls in {cls for cls, _ in self.facts}]
        objects: dict[int, object] = {}
        for module in modules:
            _collect(module.__dict__, objects)
        self.objects = [(value, _copied(value.__dict__)) for value in objects.values()]
        self.tensors = list({id(t): t for module in modules for t in _tensors(module)}.values())

    def holds(self, root: nn.Module) -> bool:
        """Nothing has changed since."""
        try:
            for module, (cls, facts) in zip((root, *self.inside), self.facts, strict=True):
                if module.__class__ is not cls or module.__dict__ != facts:
                    return False
            for cls, forward in self.forwards:
                if cls.forward is not forward:
                    return False
            for value, facts in self.objects:
                if value.__dict__ != facts:
                    return False
        except (RuntimeError, ValueError, TypeError):  # tensors and arrays that do not compare
            return False
        return True


class Uncompared:
    """What a module holds and its calls do not depend on: it equals every other, and copies of facts do not keep it."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Uncompared)

    __hash__ = None


def _copied(value: object) -> object:
    """A copy for comparison: what may be changed in place is copied, at any depth, and all else is the same object."""
    if isinstance(value, dict):
        return {name: _copied(v) for name, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if isinstance(value, Uncompared):
        return Uncompared()
    return value.copy() if isinstance(value, set) else value


def _collect(value: object, objects: dict[int, object]) -> None:
    """Adds the objects that a value holds, at any depth, and that have attributes."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple, set)):
        if not isinstance(value, (*_PLAIN, Uncompared)) and id(value) not in objects and hasattr(value, "__dict__"):
            objects[id(value)] = value
            _collect(value.__dict__, objects)
        return
    for part in value:
        _collect(part, objects)


def _tensors(module: nn.Module) -> list[Tensor]:
    facts = module.__dict__
    found = (*facts["_parameters"].values(), *facts["_buffers"].values(), *facts.values())
    return [t for t in found if isinstance(t, Tensor)]
