"""Detects hooks and patched forwards; without them a module's weights may be read instead of calling it.

Three things change a call without changing a weight: hooks of the module, global hooks (of profilers and counters), and
code patched on the instance, on the class, or in what it calls (see `source`). Types are compared by exact name, so
that no package is imported to recognise its modules; a LoRA, quantised or parametrised layer has another type.
"""

import sys
from collections.abc import Callable, Collection
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import _has_any_global_hook as has_global_hooks

from ..kernels.backend import constant, kernels_available
from .source import methods_of

__all__ = [
    "Foreign", "can_fuse", "has_global_hooks", "has_hooks", "has_type", "has_watched_child", "is_our_forward",
    "is_plain_module", "is_recorded", "is_repeatable", "replaces", "runs_known_code", "runs_other_code", "type_name",
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
ATTENTIONS = (  # attention functions of transformers, and ours
    None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", PACKAGE, f"{PACKAGE}_flash"
)  # fmt: skip
PASSIVE = "transformers.utils.output_capturing"  # its hooks stay registered but read outputs only on request

OURS = f"{PACKAGE}."

_names: dict[type, str] = {}

if TYPE_CHECKING:

    class _Foreign(type):
        def __getattr__(cls, name: str) -> Any: ...

    class Foreign(nn.Module, metaclass=_Foreign):
        """A module of any library whose type, or what it has, is known: its attributes are read by name."""

        def __getattr__(self, name: str) -> Any: ...

else:
    Foreign = nn.Module


def can_fuse(x: Tensor) -> bool:
    """True if our modules may run fused on x: the kernels are available and there are no global hooks."""
    return kernels_available(x) and not has_global_hooks()


def type_name(module: object) -> str:
    """The module's exact type, as "package.module.Class"."""
    return _name(type(module))


def has_type(module: object, names: Collection[str]) -> TypeGuard[Foreign]:
    """True if the module's exact type is listed."""
    return _name(type(module)) in names


@constant
def _name(cls: type) -> str:
    name = _names.get(cls)
    if name is None:
        name = _names[cls] = f"{cls.__module__}.{cls.__qualname__}"
    return name


def is_plain_module(module: object, names: Collection[str]) -> TypeGuard[Foreign]:
    """True if the module's exact type is listed, its parameters are plain tensors, and it has no hooks or patches."""
    if _name(type(module)) not in names:
        return False
    parameters = module.__dict__["_parameters"]
    if parameters and not are_plain_tensors(*parameters.values()):
        return False
    return not has_hooks(module)  # type: ignore[arg-type]  # a module, as its type is listed


def are_plain_tensors(*tensors: Tensor | None) -> bool:
    """True for plain tensors and parameters; False for subclasses (quantised, sharded, traced)."""
    for t in tensors:
        if t is not None and type(t) is not nn.Parameter and type(t) is not Tensor:
            return False
    return True


def has_hooks(module: nn.Module) -> bool:
    """True if the module has hooks, or its code is patched."""
    facts = module.__dict__  # each call checks about twenty modules, and nn.Module's attribute access is slow
    if facts["_forward_pre_hooks"] or facts["_backward_hooks"] or facts["_backward_pre_hooks"]:
        return True
    if facts["_forward_hooks"] and not _are_passive(facts["_forward_hooks"]):
        return True
    if "forward" in facts and not is_our_forward(facts["forward"]):
        return True
    methods = methods_of(type(module))  # as `runs_other_code`
    return replaces(facts, methods) if methods else methods is None


def runs_other_code(module: nn.Module) -> bool:
    """True if a call runs other code than the source files of the module's class define, or an attribute of it."""
    methods = methods_of(type(module))
    return replaces(module.__dict__, methods) if methods else methods is None


def replaces(facts: dict[str, Any], methods: tuple[str, ...]) -> bool:
    """True if an attribute of an instance replaces one of these methods."""
    return any(name in facts and not is_our_forward(facts[name]) for name in methods)


def has_watched_child(module: nn.Module) -> bool:
    """True if a direct submodule has hooks that see its inputs or outputs."""
    for child in module.__dict__["_modules"].values():
        if child is not None and (child.__dict__["_forward_pre_hooks"] or child.__dict__["_forward_hooks"]):
            if child.__dict__["_forward_pre_hooks"] or not _are_passive(child.__dict__["_forward_hooks"]):
                return True
    return False


def is_recorded(module: nn.Module) -> bool:
    """True if transformers collects outputs of this module in this call, so that it must be called."""
    if not module._forward_hooks or torch.compiler.is_compiling():
        return bool(module._forward_hooks)
    capturing = sys.modules.get(PASSIVE)
    return capturing is not None and capturing._active_collector.get() is not None


def _are_passive(hooks: dict[int, Callable]) -> bool:
    return all(getattr(hook, "__module__", None) == PASSIVE for hook in hooks.values())


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
    if runs_other_code(module):
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
    return type(forward) is partial and (forward.func.__module__ or "")[: len(OURS)] == OURS


def _home(function: Callable) -> str:
    """Name of the module that defines a Python function; "" for other callables."""
    return getattr(function, "__globals__", {}).get("__name__", "")
