"""Whether calling a module runs what its class defines, so that its weights may be read instead.

Three things change a call without changing a weight: hooks of the module, hooks of all modules (profilers and counters
use those), and another `forward`, put on the instance or on the class. Types are compared by name, so that no package
is imported to recognise its modules, and exactly: a LoRA, quantised or parametrised layer has another type.
"""

from collections.abc import Callable, Collection
from functools import partial
from types import FunctionType

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook as has_global_hooks

from ..kernels.backend import kernels_available

__all__ = [
    "can_fuse", "has_global_hooks", "has_hooks", "is_our_forward", "is_patched", "is_plain_module", "is_repeatable",
    "runs_known_code", "type_name",
]  # fmt: skip

PACKAGE = __package__.partition(".")[0]
# whose modules call PyTorch's operators alone, and keep what they depend on in their attributes
KNOWN = tuple(
    f"{name}."
    for name in (
        "torch.nn.modules", "torch.nn.functional", "torch._C", "torch.distributed.fsdp", "timm.layers", "timm.models",
        "transformers.models", "transformers.activations", "transformers.configuration_utils", "torchvision.models",
        "torchvision.ops", "vit_pytorch", "builtins", "collections", PACKAGE,
    )
)  # fmt: skip
ATTENTIONS = None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", PACKAGE  # of transformers
PASSIVE = "transformers.utils.output_capturing"  # its hooks stay registered, and read outputs only while asked to

_forwards: dict[type, Callable] = {}  # class → the forward that it was defined with, as last found
_names: dict[type, str] = {}


def can_fuse(x: Tensor) -> bool:
    """Our own modules may run fused on x: the kernels are available, and no hook expects every module's call."""
    return kernels_available(x) and not has_global_hooks()


def type_name(module: nn.Module) -> str:
    """The module's exact type, as "package.module.Class"."""
    return _name(type(module))


def _name(cls: type) -> str:
    name = _names.get(cls)
    if name is None:
        name = _names[cls] = f"{cls.__module__}.{cls.__qualname__}"
    return name


def is_plain_module(module: nn.Module, names: Collection[str]) -> bool:
    """The module is exactly of one of these types, holds plain parameters, and its calls run what its class defines."""
    if _name(type(module)) not in names:
        return False
    return are_plain_tensors(*module.__dict__["_parameters"].values()) and not has_hooks(module)


def are_plain_tensors(*tensors: Tensor | None) -> bool:
    """Plain tensors and parameters: not quantised, sharded, traced or otherwise a class of their own."""
    for t in tensors:
        if t is not None and type(t) is not nn.Parameter and type(t) is not Tensor:
            return False
    return True


def has_hooks(module: nn.Module) -> bool:
    """The module has hooks, or another forward is in place of its own: the instance's or its class's."""
    facts = module.__dict__  # every call reads some twenty modules, and nn.Module's attributes are slow
    if facts["_forward_pre_hooks"] or facts["_backward_hooks"] or facts["_backward_pre_hooks"]:
        return True
    if facts["_forward_hooks"] and any(
        getattr(hook, "__module__", None) != PASSIVE for hook in facts["_forward_hooks"].values()
    ):
        return True
    return ("forward" in facts and not is_our_forward(facts["forward"])) or is_patched(type(module))


def is_repeatable(module: nn.Module) -> bool:
    """Calls of the modules in this one run code of known packages on plain tensors: nothing is hooked or patched."""
    return all(runs_known_code(m, hooks_count=m is not module) for m in module.modules())


def runs_known_code(module: nn.Module, hooks_count: bool = True) -> bool:
    """The module's forward does, whatever its children are; its hooks count unless they run around what is asked."""
    facts = module.__dict__
    if not are_plain_tensors(*facts["_parameters"].values(), *facts["_buffers"].values()):
        return False
    if hooks_count and (facts["_forward_hooks"] or has_hooks(module)):  # passive ones are called, too
        return False
    return _is_known(type(module).__module__) and all(map(_is_known_value, facts.values()))


def _is_known_value(value: object) -> bool:
    """A function or an object that a module holds is one of a known package."""
    while isinstance(value, partial):
        value = value.func
    value = getattr(value, "__func__", value)
    if getattr(value, "_attn_implementation", None) not in ATTENTIONS:  # a function that the user registered
        return False
    return _is_known(_home(value) if isinstance(value, FunctionType) else type(value).__module__)


def _is_known(package: str) -> bool:
    return f"{package}.".startswith(KNOWN)


def is_our_forward(forward: object) -> bool:
    """This instance's forward is one that `optimize` put there."""
    return type(forward) is partial and str(getattr(forward.func, "__module__", "")).partition(".")[0] == PACKAGE


def is_patched(cls: type[nn.Module]) -> bool:
    """The class's forward is another one than it was defined with; a lookup, unless it changed since the last call."""
    return _forwards.get(cls) is not cls.forward and not _is_defined(cls)


def _is_defined(cls: type[nn.Module]) -> bool:
    """The forward found is the one written in the body of the class that holds it, decorators of its package included.

    A copied name proves nothing (functools.wraps copies names): a function's globals are those of the module that
    it was written in, and cannot be changed. Decorators of torch itself wrap anything, so they count as a patch.
    """
    owner = next(base for base in cls.__mro__ if "forward" in base.__dict__)
    forward, package = owner.__dict__["forward"], owner.__module__.partition(".")[0]
    while hasattr(forward, "__wrapped__"):
        if package == "torch" or _home(forward).partition(".")[0] != package:
            return False
        forward = forward.__wrapped__
    defined = _home(forward) == owner.__module__ and forward.__qualname__ == f"{owner.__qualname__}.forward"
    if defined:
        _forwards[cls] = cls.forward
    return defined


def _home(function: Callable) -> str:
    """The module that a Python function was written in; "" for other callables."""
    return getattr(function, "__globals__", {}).get("__name__", "")


for _constant in (_name, is_patched):  # torch.compiler.assume_constant_result, which would import all of Dynamo
    _constant._dynamo_marked_constant = True
