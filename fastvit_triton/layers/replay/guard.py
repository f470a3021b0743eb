"""Whether modules are as they were: everything that their calls depend on, compared in a few microseconds.

A module's state is its type, the forward of that type, and its `__dict__`: parameters and buffers by identity, hooks,
children, settings, an instance's own forward. Of objects that it holds, such as a configuration, the attributes count.
"""

from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, MethodType

from torch import Tensor, nn

_PLAIN = (int, float, str, bytes, type(None), type, Tensor, nn.Module, FunctionType, MethodType, BuiltinFunctionType)


class Guard:
    """What was found of some modules.

    Attributes:
        tensors: their parameters, buffers and other tensors, each once.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules = [(module, type(module), _copied(module.__dict__)) for module in modules]
        self.forwards = [(cls, cls.forward) for cls in {cls for _, cls, _ in self.modules}]
        held = (value for module, _, _ in self.modules for value in module.__dict__.values())
        objects = {id(v): v for v in held if not isinstance(v, (*_PLAIN, dict, list, tuple, set)) and _attributes(v)}
        self.objects = [(value, _copied(value.__dict__)) for value in objects.values()]
        self.tensors = list({id(t): t for module, _, _ in self.modules for t in _tensors(module)}.values())

    def holds(self) -> bool:
        """Nothing has changed since."""
        try:
            for module, cls, facts in self.modules:
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


def _copied(facts: dict[str, object]) -> dict[str, object]:
    """A copy for comparison: what is changed in place is copied, too."""
    return {name: v.copy() if isinstance(v, (dict, list, set)) else v for name, v in facts.items()}


def _attributes(value: object) -> dict[str, object] | None:
    return getattr(value, "__dict__", None)


def _tensors(module: nn.Module) -> list[Tensor]:
    facts = module.__dict__
    found = (*facts["_parameters"].values(), *facts["_buffers"].values(), *facts.values())
    return [t for t in found if isinstance(t, Tensor)]
