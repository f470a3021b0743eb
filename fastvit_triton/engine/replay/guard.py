"""Detects changes of modules: compares everything that their calls depend on, in a few microseconds.

A module's state is its type, the code that calls of the type run (see `engine.source`), and its `__dict__`: parameters
and buffers by identity, hooks, children, settings, a forward set on the instance. Objects in it, such as a
configuration, are compared by attributes, except for the state of FSDP2, which changes in each call and decides when
parameters are gathered, not what a forward computes. Constants of classes and modules are not compared.
"""

import weakref
from collections.abc import Callable
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from ..source import facts_of
from .emit import TensorNames

_FUNCTIONS = FunctionType, MethodType, BuiltinFunctionType, partial  # a partial's call reads no attribute of it
_UNREAD = {  # attributes of a module or a configuration that a call without hooks does not read
    "_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs", "id2label", "label2id",
}  # fmt: skip
_ORDERED = nn.Sequential, nn.ModuleList, nn.ModuleDict  # call their children in order
_EMPTY: dict = {}  # a snapshot of each empty dictionary, so that comparing reads less memory
_PLAIN = (int, float, str, bytes, type(None), type, Tensor, nn.Module, ModuleType, *_FUNCTIONS)
HOLDS = """\
def holds(module):
    try:
        return (
            {}
        )
    except (RuntimeError, ValueError, TypeError):  # tensors and arrays that cannot be compared
        return False
    except (KeyError, AttributeError):  # what the calls look up was removed
        return False
"""


class Guard:
    """Snapshot of the state of some modules.

    Args:
        root: the module that is called; held by a weak reference.
        inside: its submodules, and modules among the call's arguments.

    Attributes:
        root: weak reference.
        inside: as in Args.
        holds: the generated function that returns True if nothing has changed since the snapshot; takes the root.
        tensors: parameters, buffers and other tensors of all modules, each once.
        single: (number of the module, "_parameters" or "_buffers", name, tensor) of those with one element, because ==
            compares a replaced one by its value.
    """

    def __init__(self, root: nn.Module, inside: list[nn.Module]) -> None:
        self.root = weakref.ref(root)
        self.inside = inside
        modules = [root, *inside]
        facts = [(type(module), _snapshot(module.__dict__)) for module in modules]
        objects: dict[int, object] = {}
        for module in modules:
            _collect(module.__dict__, objects)
        self.tensors = list({id(t): t for module in modules for t in _tensors(module)}.values())
        self.single = [
            (i, kind, name, t)
            for i, module in enumerate(modules)
            for kind in ("_parameters", "_buffers")
            for name, t in module.__dict__[kind].items()
            if t is not None and t.numel() < 2
        ]
        self.holds: Callable[[nn.Module | None], bool] = self._compiled(root, facts, list(objects.values()))

    def _compiled(self, root: nn.Module, facts: list[tuple[type, dict]], objects: list[object]) -> Callable:
        """Compiles `holds(module)`."""
        names = TensorNames("holds", "module")
        titles = {id(module): title for title, module in root.named_modules()}
        conditions = []
        for i, (module, (cls, before)) in enumerate(zip((root, *self.inside), facts, strict=True)):
            variable = "module" if i == 0 else names.bind(titles.get(id(module), cls.__name__.lower()), module)
            state = names.bind(f"{variable}_state", before)
            conditions.append(
                f"{variable}.__class__ is {names.bind(cls.__name__, cls)} and {variable}.__dict__ == {state}"
            )
            if isinstance(module, _ORDERED):  # equal dictionaries may differ in order
                conditions.append(f"[*{variable}.__dict__['_modules']] == {[*module._modules]}")
            for kind, name, t in (entry[1:] for entry in self.single if entry[0] == i):
                conditions.append(f"{variable}.__dict__[{kind!r}][{name!r}] is {names.bind(name, t)}")
        for get, place, values in facts_of({cls for cls, _ in facts}):
            place_name = place.__name__ if isinstance(place, type) else str(place.get("__name__", "table"))
            code = names.bind(f"{place_name}_code", values)
            conditions.append(f"{names.bind(f'code_of_{place_name}', get)}({names.bind(place_name, place)}) == {code}")
        for value in objects:
            variable = names.bind(type(value).__name__.lower(), value)
            conditions.append(f"{variable}.__dict__ == {names.bind(f'{variable}_state', _snapshot(value.__dict__))}")
        return names.compiled(HOLDS.format("\n            and ".join(conditions)), "holds")


class Uncompared:
    """Base of attributes that calls do not depend on: all instances are equal, and snapshots store an empty one."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Uncompared)


def is_distributed(value: object) -> bool:
    """True for an object of torch.distributed, such as FSDP2's state, which gathers parameters before the forward."""
    return type(value).__module__.startswith("torch.distributed.")


def _snapshot(facts: dict[str, Any]) -> dict[str, Any]:
    """A copy of attributes for comparison; what calls do not read is shared, so equal by identity."""
    return {name: v if name in _UNREAD else _copied(v) for name, v in facts.items()}


def _copied(value: Any) -> Any:
    """A copy for comparison: copies dicts, lists, tuples and sets at any depth, and shares all other objects."""
    if isinstance(value, dict):
        return {name: _copied(v) for name, v in value.items()} or _EMPTY
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if isinstance(value, Uncompared):
        return Uncompared()
    return value.copy() if isinstance(value, set) else value


def _collect(value: Any, objects: dict[int, object]) -> None:
    """Adds the objects with attributes that a value contains, at any depth."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple, set)):
        compared = not isinstance(value, (*_PLAIN, Uncompared)) and not is_distributed(value)
        if compared and id(value) not in objects and hasattr(value, "__dict__"):
            objects[id(value)] = value
            _collect(value.__dict__, objects)
        return
    for part in value:
        _collect(part, objects)


def _tensors(module: nn.Module) -> list[Tensor]:
    facts = module.__dict__
    values = (*facts["_parameters"].values(), *facts["_buffers"].values(), *facts.values())
    return [t for t in values if isinstance(t, Tensor)]
