"""Detects hooks and patched forwards; without them a module's weights may be read instead of calling it.

Three things change a call without changing a weight: hooks of the module, global hooks (of profilers and counters), and
a `forward` patched on the instance or the class. Types are compared by exact name, so that no package is imported to
recognise its modules; a LoRA, quantised or parametrised layer has another type.
"""

from collections.abc import Callable, Collection
from functools import partial
from types import FunctionType

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import _has_any_global_hook as has_global_hooks

from ..kernels.backend import constant, kernels_available

__all__ = [
    "can_fuse", "has_global_hooks", "has_hooks", "is_our_forward", "is_patched", "is_plain_module", "is_repeatable",
    "runs_known_code", "type_name",
]  # fmt: skip

PACKAGE = __package__.partition(".")[0]
# packages whose modules call only PyTorch operators and depend only on their inputs and attributes
KNOWN = tuple(
    f"{name}."
    for name in (
        "torch.nn.modules", "torch.nn.functional", "torch._C", "torch.distributed.fsdp", "timm.layers", "timm.models",
        "transformers.models", "transformers.activations", "transformers.configuration_utils", "torchvision.models",
        "torchvision.ops", "vit_pytorch", "einops", "builtins", "collections", PACKAGE,
    )
)  # fmt: skip
ATTENTIONS = None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", PACKAGE  # in transformers
PASSIVE = "transformers.utils.output_capturing"  # its hooks stay registered but read outputs only on request

_forwards: dict[type, Callable] = {}  # class → its original forward, cached
_names: dict[type, str] = {}


def can_fuse(x: Tensor) -> bool:
    """True if our modules may run fused on x: the kernels are available and there are no global hooks."""
    return kernels_available(x) and not has_global_hooks()


def type_name(module: nn.Module) -> str:
    """The module's exact type, as "package.module.Class"."""
    return _name(type(module))


@constant
def _name(cls: type) -> str:
    name = _names.get(cls)
    if name is None:
        name = _names[cls] = f"{cls.__module__}.{cls.__qualname__}"
    return name


def is_plain_module(module: nn.Module, names: Collection[str]) -> bool:
    """True if the module's exact type is listed, its parameters are plain tensors, and it has no hooks or patches."""
    if _name(type(module)) not in names:
        return False
    return are_plain_tensors(*module.__dict__["_parameters"].values()) and not has_hooks(module)


def are_plain_tensors(*tensors: Tensor | None) -> bool:
    """True for plain tensors and parameters; False for subclasses (quantised, sharded, traced)."""
    for t in tensors:
        if t is not None and type(t) is not nn.Parameter and type(t) is not Tensor:
            return False
    return True


def has_hooks(module: nn.Module) -> bool:
    """True if the module has hooks, or its forward is patched on the instance or the class."""
    facts = module.__dict__  # each call checks about twenty modules, and nn.Module's attribute access is slow
    if facts["_forward_pre_hooks"] or facts["_backward_hooks"] or facts["_backward_pre_hooks"]:
        return True
    if facts["_forward_hooks"] and any(
        getattr(hook, "__module__", None) != PASSIVE for hook in facts["_forward_hooks"].values()
    ):
        return True
    return ("forward" in facts and not is_our_forward(facts["forward"])) or is_patched(type(module))


def is_repeatable(module: nn.Module) -> bool:
    """True if this module and all its submodules pass `runs_known_code`."""
    return all(runs_known_code(m, hooks_count=m is not module) for m in module.modules())


def runs_known_code(module: nn.Module, hooks_count: bool = True) -> bool:
    """True if the module has only plain tensors and known packages' code and, if `hooks_count`, no hooks or patches.

    False also for BatchNorms that update their statistics, because a recorded call must write to nothing else.
    """
    facts = module.__dict__
    if isinstance(module, _BatchNorm) and facts["training"] and facts["track_running_stats"]:
        return False
    if not are_plain_tensors(*facts["_parameters"].values(), *facts["_buffers"].values()):
        return False
    if hooks_count and (facts["_forward_hooks"] or has_hooks(module)):  # passive hooks count here, too
        return False
    return _is_known(type(module).__module__) and all(map(_is_known_value, facts.values()))


def _is_known_value(value: object) -> bool:
    """True if an attribute of a module is a function or an object of a known package."""
    while isinstance(value, partial):
        value = value.func
    value = getattr(value, "__func__", value)
    if getattr(value, "_attn_implementation", None) not in ATTENTIONS:  # registered by the user
        return False
    return _is_known(_home(value) if isinstance(value, FunctionType) else type(value).__module__)


def _is_known(package: str) -> bool:
    return f"{package}.".startswith(KNOWN)


def is_our_forward(forward: object) -> bool:
    """True if `optimize` set this instance's forward."""
    return type(forward) is partial and str(getattr(forward.func, "__module__", "")).partition(".")[0] == PACKAGE


@constant
def is_patched(cls: type[nn.Module]) -> bool:
    """True if the class's forward is not the original one; cached until it changes."""
    return _forwards.get(cls) is not cls.forward and not _is_defined(cls)


def _is_defined(cls: type[nn.Module]) -> bool:
    """True if the forward was defined in the body of its class; decorators of the same package are allowed.

    Names do not prove it, as functools.wraps copies them; a function's globals do: they are those of its defining
    module and read-only. Torch's decorators can wrap any function, so they count as a patch.
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
    """Name of the module that defines a Python function; "" for other callables."""
    return getattr(function, "__globals__", {}).get("__name__", "")
