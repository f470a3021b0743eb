"""Changes that users make to a model, and comparison of the changed model before and after `optimize`.

A mutant is a model with one change: a submodule that is wrapped, subclassed or hooked, a method, helper function or
`__call__` that is patched, an attribute with another value, another attention function. The change is made before or
after `optimize`. The converted model runs on PyTorch (`set_backend("torch")`) in float64, so that its outputs and
gradients must be those of the changed original; an exception that the original does not raise counts as a difference.
"""

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import research
import torch
from catalogue import MODELS, build, inputs, joined, outputs
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fastvit_triton import optimize
from fastvit_triton.convert import Report
from fastvit_triton.kernels.backend import using_backend

WHEN = "before", "after"
TOLERANCE = 1e-6  # of the largest output: some originals round values to float32, 6e-8 each
KNOWN = (
    "timm",
    "transformers",
    "vit_pytorch",
    "torchvision",
    "research",
)  # packages whose classes and functions are patched


class Model(NamedTuple):
    """A small model.

    Attributes:
        build: () → the model in float64, with random weights.
        call: model → its outputs for inputs of its dtype, as one vector.
        convert: `optimize`, with an example for models whose blocks are captured.
    """

    build: Callable[[], nn.Module]
    call: Callable[[nn.Module], Tensor]
    convert: Callable[[nn.Module], Report] = optimize


class Change(NamedTuple):
    """One change.

    Attributes:
        kind: a key of `CHANGES`.
        path: of the module that is changed.
        name: of the attribute, method or function.
    """

    kind: str
    path: str
    name: str = ""


def models() -> dict[str, Model]:
    """The models of the catalogue, and those of research.py, whose blocks are captured, by name."""

    def row(name: str) -> Model:
        return Model(lambda: build(name), lambda model: joined(outputs(model, _drawn(model, name))).double())

    return {name: row(name) for name in MODELS} | {f"captured_{name}": _captured(name) for name in research.MODELS}


def _captured(name: str) -> Model:
    model = research.MODELS[name]

    def example() -> tuple:
        torch.manual_seed(5)
        return model.inputs(2, model.sizes[0])

    return Model(model.build, lambda m: joined(m(*example())), lambda m: optimize(m, example=example()))


def _drawn(model: nn.Module, name: str) -> Any:
    """The same random inputs for each call, in the dtype of the model."""
    torch.manual_seed(5)
    dtype = next(model.parameters()).dtype
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, inputs(name))


# ---- changes: each is a context, which restores what it changed outside of the model


def changed(y: Any) -> Any:
    """Another value of the same form: the first floating-point tensor times 1.25, plus 0.05."""
    if isinstance(y, Tensor):
        return y * 1.25 + 0.05 if y.is_floating_point() else y
    if type(y) in (tuple, list):
        return type(y)([changed(y[0]), *y[1:]])
    return y


class Wrapper(nn.Module):
    """A module around another one, which has its attributes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        """An attribute of this module or of the inner one."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Another value than the inner module's."""
        return changed(self.inner(*inputs, **named))


def _parent(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    above, _, name = path.rpartition(".")
    return model.get_submodule(above), name


def wrap(model: nn.Module, change: Change) -> None:
    """Replaces the module by one around it."""
    parent, name = _parent(model, change.path)
    setattr(parent, name, Wrapper(getattr(parent, name)))


def other_softmax(model: nn.Module, change: Change) -> None:
    """Replaces a softmax by one along another axis."""
    parent, name = _parent(model, change.path)
    setattr(parent, name, nn.Softmax(dim=-2))


def subclass(model: nn.Module, change: Change) -> None:
    """Gives the module a class whose forward calls the original one's."""
    module = model.get_submodule(change.path)
    base = type(module)

    def patched(self: nn.Module, *inputs: Any, **named: Any) -> Any:
        return changed(getattr(base, change.name)(self, *inputs, **named))

    module.__class__ = type(f"My{base.__name__}", (base,), {change.name: patched, "__module__": __name__})


def hook(model: nn.Module, change: Change) -> None:
    """Registers a hook that changes the output."""
    model.get_submodule(change.path).register_forward_hook(lambda module, inputs, y: changed(y))


def pre_hook(model: nn.Module, change: Change) -> None:
    """Registers a hook that changes the first input."""

    def before(module: nn.Module, inputs: tuple) -> tuple | None:
        return (changed(inputs[0]), *inputs[1:]) if inputs and isinstance(inputs[0], Tensor) else None

    model.get_submodule(change.path).register_forward_pre_hook(before)


def instance(model: nn.Module, change: Change) -> None:
    """Replaces a method on the instance."""
    module = model.get_submodule(change.path)
    inner = getattr(module, change.name)
    setattr(module, change.name, lambda *inputs, **named: changed(inner(*inputs, **named)))


def attribute(model: nn.Module, change: Change) -> None:
    """Gives an attribute another value of its type."""
    module = model.get_submodule(change.path)
    setattr(module, change.name, other(getattr(module, change.name)))


def other(value: Any) -> Any:
    """Another value of the same type; None if there is none to try."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return value * 1.5 + 0.1
    if isinstance(value, int):
        return value // 2 if value > 1 else value + 1
    if isinstance(value, Tensor):
        return value * 1.5 + 0.1 if value.is_floating_point() else None
    if callable(value) and not isinstance(value, (nn.Module, type)):
        return lambda *inputs, **named: changed(value(*inputs, **named))
    return None


@contextmanager
def patched(home: Any, name: str) -> Iterator[None]:
    """Context in which a function of a class or module returns another value."""
    own = vars(home).get(name)
    inner = getattr(own, "__func__", own)

    @functools.wraps(inner)
    def patch(*inputs: Any, **named: Any) -> Any:
        return changed(inner(*inputs, **named))

    kind = type(own) if isinstance(own, (staticmethod, classmethod)) else lambda function: function
    setattr(home, name, kind(patch))
    try:
        yield
    finally:
        setattr(home, name, own)


def method(model: nn.Module, change: Change) -> Any:
    """Patches a method of the module's class, or of the base class that defines it."""
    cls = type(model.get_submodule(change.path))
    return patched(next(base for base in cls.__mro__ if change.name in vars(base)), change.name)


def function(model: nn.Module, change: Change) -> Any:
    """Patches a function of the file of the module's class."""
    return patched(sys.modules[type(model.get_submodule(change.path)).__module__], change.name)


@contextmanager
def attention(model: nn.Module, change: Change) -> Iterator[None]:
    """Uses a registered attention function, or registers another one under the name in use."""
    registry = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    masks = sys.modules["transformers.masking_utils"].ALL_MASK_ATTENTION_FUNCTIONS
    shipped = registry["sdpa"]

    def mine(*inputs: Any, **named: Any) -> Any:
        return changed(shipped(*inputs, **named))

    name = change.name
    before = registry._global_mapping.get(name)
    type(registry).register(name, mine)
    if name != "sdpa":
        type(masks).register(name, masks["sdpa"])
        model.set_attn_implementation(name)
    try:
        yield
    finally:
        if before is None:
            del registry._global_mapping[name], masks._global_mapping[name]
        else:
            type(registry).register(name, before)


CHANGES: dict[str, Callable[[nn.Module, Change], Any]] = {
    f.__name__: f
    for f in (wrap, other_softmax, subclass, hook, pre_hook, instance, attribute, method, function, attention)
}


@contextmanager
def applied(model: nn.Module, change: Change) -> Iterator[None]:
    """Context in which the model has this change."""
    context = CHANGES[change.kind](model, change)
    if context is None:
        yield
        return
    with context:
        yield


# ---- which changes a model has


def changes(model: nn.Module, convert: Callable[[nn.Module], Report] = optimize) -> list[Change]:
    """All changes of this model's converted modules: one module of each class, and its submodules to depth 2."""
    converted = copy.deepcopy(model)
    paths: dict[type, str] = {}
    for row in convert(converted).rows:
        if row.became is not None:
            paths.setdefault(type(model.get_submodule(row.path)), row.path)
    found: dict[Change, None] = {}
    for path in paths.values():
        top = model.get_submodule(path)
        inside = [f"{path}.{name}" if path else name for name, _ in top.named_modules() if name and name.count(".") < 2]
        for one in (path, *inside):
            found |= dict.fromkeys(_module_changes(model, one))
    if hasattr(model, "set_attn_implementation"):
        found |= dict.fromkeys((Change("attention", "", "mine"), Change("attention", "", "sdpa")))
    return list(found)


def _module_changes(model: nn.Module, path: str) -> Iterator[Change]:
    module = model.get_submodule(path)
    if path:
        yield from (Change(kind, path) for kind in ("wrap", "hook", "pre_hook"))
        yield from (Change("subclass", path, name) for name in ("forward", "__call__"))
    if isinstance(module, nn.Softmax):
        yield Change("other_softmax", path)
    for name, value in vars(module).items():
        if not name.startswith("_") and name not in ("training", "forward") and other(value) is not None:
            yield Change("attribute", path, name)
    cls = type(module)
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in KNOWN:
            for name, value in vars(base).items():
                if isinstance(getattr(value, "__func__", value), FunctionType) and name in _used(cls):
                    yield Change("method", path, name)
                    yield Change("instance", path, name)
    home = sys.modules[cls.__module__]
    if cls.__module__.partition(".")[0] in KNOWN:
        for name in sorted(_used(cls) - {"forward"}):
            value = vars(home).get(name)
            if isinstance(value, FunctionType) and value.__module__.partition(".")[0] in KNOWN:
                yield Change("function", path, name)


@functools.cache
def _used(cls: type) -> frozenset[str]:
    """`forward`, and the names that it and the methods of the class read."""
    own = [f for base in cls.__mro__ if base.__module__.partition(".")[0] in KNOWN for f in vars(base).values()]
    names = {"forward"}
    for code in (getattr(getattr(f, "__wrapped__", f), "__code__", None) for f in own):
        names |= _names(code) if code is not None and code.co_name != "__init__" else set()
    return frozenset(names)


def _names(code: CodeType) -> set[str]:
    inside = (_names(inner) for inner in code.co_consts if isinstance(inner, CodeType))
    return set(code.co_names).union(*inside)


# ---- comparison


def results(model: nn.Module, call: Callable[[nn.Module], Tensor]) -> Tensor:
    """Outputs, and the gradients of all parameters for fixed random cotangents, in one vector."""
    for parameter in model.parameters():
        parameter.grad = None
    torch.manual_seed(7)  # of MAE's masks and the like
    y = call(model).double().flatten()
    cotangents = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    if not y.requires_grad:
        return y.detach()
    parameters = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(y, parameters, cotangents, allow_unused=True)
    parts = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]
    return torch.cat([y.detach(), *(part.flatten() for part in parts)])


class Verdict(NamedTuple):
    """What a comparison found.

    Attributes:
        same: True if converted and original agree, or both raise.
        what: the difference, or the exception.
    """

    same: bool
    what: str


def compare(
    original: nn.Module,
    converted: nn.Module,
    call: Callable,
    change: Change,
    when: str,
    convert: Callable[[nn.Module], Report] = optimize,
) -> Verdict | None:
    """Compares the changed original with the changed and converted model.

    Args:
        original: the model.
        converted: a copy of it after `optimize`, which has been called.
        call: see `Model`.
        change: the change, which is made to copies.
        when: "before": it is made before `optimize`; "after": to a copy of `converted`.
        convert: see `Model`.

    Returns:
        The verdict; None if the change cannot be made, or the changed original cannot be run.
    """
    plain = copy.deepcopy(original)
    with using_backend("torch"):
        try:
            with applied(plain, change):
                want = results(plain, call)
        except Exception:
            return None
        ours = copy.deepcopy(original if when == "before" else converted)
        try:
            with applied(ours, change):
                if when == "before":
                    convert(ours)
                got = results(ours, call)
        except Exception as error:
            return Verdict(False, f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}")
    if not want.isfinite().all():
        return None
    if got.shape != want.shape:
        return Verdict(False, f"shape {list(got.shape)} instead of {list(want.shape)}")
    size = max(float(want.abs().max()), 1e-300)
    difference = float((got - want).abs().max()) / size
    return Verdict(difference <= TOLERANCE, f"{difference:.1e}")


def judged(model: Model, chosen: Callable[[int], bool] = lambda i: True) -> Iterator[tuple[Change, str, Verdict]]:
    """Yields the verdict of each chosen mutant of a model; mutants are numbered from 0, two for each change."""
    torch.manual_seed(0)
    original = model.build().eval()
    converted = copy.deepcopy(original)
    model.convert(converted)
    with using_backend("torch"):
        results(converted, model.call)
    mutants = ((change, when) for change in changes(original, model.convert) for when in WHEN)
    for i, (change, when) in enumerate(mutants):
        if chosen(i):
            verdict = compare(original, converted, model.call, change, when, model.convert)
            if verdict is not None:
                yield change, when, verdict
