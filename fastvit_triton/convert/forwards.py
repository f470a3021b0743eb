"""Registry: module type → fused forward, with the attributes that it requires; and what a call of one goes through.

A bound forward is a `FusedBody`, or a function in `_chosen`: it replays, chooses, or runs the original. Between
releases, packages rename and nest submodules and change their arguments. So a forward declares the attributes that it
reads and the arguments that it takes, and `optimize` checks them against each instance once.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial, wraps
from inspect import CO_VARARGS, CO_VARKEYWORDS, signature
from operator import attrgetter
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ..engine import replay, ways
from ..engine.body import Body
from ..engine.hooks import PACKAGE, has_hooks, has_watched_child
from ..engine.mlp import MlpBody
from ..engine.source import code_of, defines
from ..kernels import backend, choose, launch
from ..kernels.backend import constant, transparent
from .recognition import recognised
from .third_party import FUSED, can_run, inherited, is_fusable, runs_original

NO_KERNELS = ("auto", "onednn")  # switches with which no Triton kernel, and no reference instead of it, runs on a CPU
Parts = Body | MlpBody
Reader = Callable[..., Parts | str]
R = TypeVar("R", bound=Reader)
Folds = Callable[[Any], Iterable[tuple[nn.Module | None, nn.Module | None]]]


class Forward(NamedTuple):
    """A fused forward for some module types."""

    run: Callable  # the function that `optimize` binds to an instance
    needs: str = ""  # attributes that it reads; "a b.c d|e" means a, b.c, and d or else e
    # supported arguments after the first, "a b"; None for all; by default those that its function declares, or all if
    # that declares none and takes any. What it takes by keyword only it gets by the names of the module's own forward
    takes: str | None = None
    # extracts the parts of a body from the module and its further arguments; None for other types
    read: Reader | None = None
    # its name in reports; None to derive it from the parts; "" for a model that is no candidate itself
    became: str | None = None
    reason: Callable[[Any], str | None] | None = None  # returns why a module must run its own forward now, or None
    # returns the keyword arguments that every call of the module has, as known from its attributes
    call: Callable[[Any], dict[str, object]] | None = None
    # returns pairs of a norm and the body or layer after it, into which it is folded where possible
    folds: Folds | None = None
    # True if it depends on the names of types, so that copies of the class need names of their own here
    by_name: bool = False
    by_call: bool = False  # True if only the arguments of a call, such as the size of a map, tell the parts

    def lacks(self, module: nn.Module) -> str | None:
        """Message that names a required attribute this instance lacks; None if it has all."""
        for name in self.needs.split():
            if not any(map(partial(_has, module), name.split("|"))):
                return f"it has no {name.replace('|', ' or ')}, which its fused forward reads"
        return None

    def ignores(self, module: nn.Module) -> str | None:
        """Message that names an argument of the instance's own forward that is not supported; None if all are."""
        if self.takes is None:
            return None
        for name in _arguments(type(module)):
            if name not in self.takes.split():
                return f"it takes {name}, which its fused forward does not support"
        return None


@constant
def arguments(cls: type[nn.Module]) -> tuple[str, ...]:
    """Names of the arguments of a class's own forward after the first input; cached."""
    if cls not in _taken:
        _taken[cls] = _arguments(cls)
    return _taken[cls]


def _arguments(cls: type[nn.Module]) -> tuple[str, ...]:
    if not isinstance(cls.forward, FunctionType):  # a patch, which always runs
        return ()
    parameters = list(signature(cls.forward).parameters.values())[2:]  # after the module and its first input
    return tuple([p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)])


_taken: dict[type[nn.Module], tuple[str, ...]] = {}
FORWARDS: dict[str, list[Forward]] = {}  # type → its fused forwards, the newest release's first
INNER: set[str] = set()  # types of submodules whose code a fused forward replaces together with its own


METHODS: dict[str, tuple[str, Callable]] = {}  # type → a method that is not `forward`, and its fused form


def fused_method(method: str, *names: str) -> Callable[[Callable], Callable]:
    """Decorator: registers the fused form of a method of these types; only types of this package have any.

    A method that the user patched on the class runs instead.
    """

    def decorate(run: Callable) -> Callable:
        @wraps(run)
        def unless_patched(module: nn.Module, *inputs: Any, **named: Any) -> Any:
            function = run if _is_written(type(module), method) else getattr(type(module), method)
            return function(module, *inputs, **named)

        METHODS.update(dict.fromkeys(names, (method, unless_patched)))
        return unless_patched

    return decorate


_written: dict[tuple[type, str], Callable | None] = {}


@constant
def _is_written(cls: type[nn.Module], method: str) -> bool:
    """True if a method of a class is the one that its source file defines, as first seen."""
    current = getattr(cls, method)
    if (cls, method) not in _written:
        _written[cls, method] = current if defines(cls, method) else None
    return current is _written[cls, method]


def bind(module: nn.Module, method: str, run: Callable) -> None:
    """Makes calls of a method of this instance run `run`, whose first argument is the module."""
    setattr(module, method, partial(run, module))


def register(names: tuple[str, ...], forward: Forward) -> None:
    """Registers a fused forward for these types."""
    FUSED.update(names)
    for name in names:
        FORWARDS.setdefault(name, []).append(forward)


def known_type(module: nn.Module) -> str:
    """Name of the module's type, or of the registered type whose forward runs the same code."""
    return _known_type(type(module))


@constant
def _known_type(cls: type[nn.Module]) -> str:
    name = f"{cls.__module__}.{cls.__qualname__}"
    if name.startswith("torch.distributed."):
        cls = code_of(cls).base  # FSDP2 makes a class of another, and changes no method
        name = f"{cls.__module__}.{cls.__qualname__}"
    if name in FORWARDS or name.startswith("torch."):
        return name
    if name.startswith(f"{PACKAGE}."):
        return inherited(cls) or name
    return inherited(cls) or recognised(cls) or name


def inner_reason(*inner: tuple[nn.Module, Collection[str]]) -> str | None:
    """Why submodules of a module, each with types in INNER that run the code to replace, must be called; or None."""
    for module, types in inner:
        if has_hooks(module):
            return f"{type(module).__name__} has a hook, or its forward was replaced"
        if _inner_type(type(module)) not in types:
            return f"the code of {type(module).__name__} is not known"
    return None


@constant
def _inner_type(cls: type[nn.Module]) -> str | None:
    """A type in INNER whose forward runs the same code, or None; the name of a type does not count."""
    return recognised(cls)


def forward_for(module: nn.Module) -> Forward | str | None:
    """The fused forward that fits this instance; a reason (str) if none fits; None for unknown types."""
    forwards = FORWARDS.get(_known_type(type(module)))
    if forwards is None:
        return None
    for forward in forwards:
        if forward.lacks(module) is None:
            return forward.ignores(module) or forward
    return forwards[0].lacks(module)


def fused_forward(
    became: str,
    *names: str,
    needs: str = "",
    takes: str | None = None,
    reason: Callable[[Any], str | None] | None = None,
    folds: Folds | None = None,
    by_name: bool = False,
    products: bool = True,
    checked: bool = True,
) -> Callable[[Callable], Callable]:
    """Decorator: registers the fused forward of these types; for the other arguments see `Forward`.

    The module's own forward runs instead if `is_fusable` is false for the first input, if there is a reason against it,
    or if the fused forward returns NotImplemented.
    """

    def decorate(forward: Callable) -> Callable:
        fused = forward if became else transparent(forward)
        chosen = _chosen(_or_own(fused, reason, checked), products)
        supported = declared(forward, 2) if takes is None else takes
        register(names, Forward(chosen, needs, supported, None, became, reason, None, folds, by_name))
        return chosen

    return decorate


def declared(function: Callable, first: int) -> str | None:
    """Names of the arguments of a function from the `first` on, as `Forward.takes`; None if it accepts any."""
    code = function.__code__
    names = code.co_varnames[first : code.co_argcount + code.co_kwonlyargcount]
    any_name = code.co_flags & CO_VARKEYWORDS and not names
    return None if any_name or code.co_flags & CO_VARARGS else " ".join(names)


def _is_named(function: Callable, first: int) -> bool:
    """True if a function takes all of its arguments from the `first` on by keyword only, and has some."""
    code = function.__code__
    takes_some = code.co_kwonlyargcount or code.co_flags & CO_VARKEYWORDS
    return bool(takes_some) and code.co_argcount == first and not code.co_flags & CO_VARARGS


def _or_own(forward: Callable, reason: Callable[[Any], str | None] | None, checked: bool) -> Callable:
    """Wraps a fused forward: runs the module's own forward where the fused one does not run, see `fused_forward`."""
    first = forward.__code__.co_varnames[1]  # the name of the first input
    is_named = _is_named(forward, 2)

    @wraps(forward)
    def fused_or_own(module: nn.Module, *inputs: Any, **named: Any) -> Any:
        if checked:
            x = inputs[0] if inputs else named.get(first)
            if x is None or not is_fusable(module, x) or (reason is not None and reason(module) is not None):
                return original(module, *inputs, **named)
        if is_named and len(inputs) > 1:
            y = forward(module, inputs[0], **dict(zip(arguments(type(module)), inputs[1:], strict=False)) | named)
        else:
            y = forward(module, *inputs, **named)
        return original(module, *inputs, **named) if y is NotImplemented else y

    return fused_or_own


def _chosen(forward: Callable, products: bool = True) -> Callable:
    """Wraps a fused forward: runs the original if the module, or a block around it, runs plain, or a child has a hook.

    A child with a hook is called with the arguments that the original passes, positional or by keyword; the children
    still run fused.
    """

    def fused(module: nn.Module, *inputs: Any, **named: Any) -> Any:
        if has_watched_child(module):  # its hooks must see the arguments that the original passes
            return original(module, *inputs, **named)
        return forward(module, *inputs, **named)

    @wraps(forward)
    @transparent
    def run(module: nn.Module, *inputs: Any, **named: Any) -> Any:
        if ways.state.inside_plain:
            return type(module).forward(module, *inputs, **named)
        x = inputs[0] if inputs else None
        if not products and type(x) is Tensor and x.is_cpu and launch.target is None and backend._switch in NO_KERNELS:
            return type(module).forward(module, *inputs, **named)
        if type(x) is Tensor and len(inputs) == 1 and not named and (y := replay.repeated(module, x)) is not None:
            return y
        way, key = ways.known_way(module, x) if type(x) is Tensor else (None, None)
        if way == "plain" or (way is None and type(x) is Tensor and _never_fuses(module, x, products)):
            return replay.call_plain(key, module, *inputs, **named)
        if way is None:
            run_now = original if has_watched_child(module) else _own(forward, type(module))
            return run_now(module, *inputs, **named)
        return replay.call_module(key, fused, module, *inputs, **named)

    return run


def _never_fuses(module: nn.Module, x: Tensor, products: bool = True) -> bool:
    """True on a CPU if nothing of ours runs for x: the original runs, and no module inside it has to find out."""
    if torch.compiler.is_compiling() or ways.SIZES in module.__dict__ or not x.is_cpu:
        return False  # with sizes it ran before, and this call asks where it reads the module
    return not can_run(x, module, products)


@transparent
def _own(forward: Callable, cls: type[nn.Module]) -> Callable:
    """The function with a code object for this class alone, as torch.compile limits the graphs of a code object."""
    if torch.compiler.is_compiling():  # it is inlined
        return forward
    if (forward, cls) not in _owned:
        code = forward.__code__
        name = f"{cls.__name__}_{forward.__name__}"
        own_function = FunctionType(
            code.replace(co_name=name), forward.__globals__, name, forward.__defaults__, forward.__closure__
        )
        own_function.__kwdefaults__ = forward.__kwdefaults__
        _owned[forward, cls] = own_function
    return _owned[forward, cls]


_owned: dict[tuple[Callable, type[nn.Module]], Callable] = {}


@dataclass(frozen=True)
class FusedBody:
    """Fused forward of a body: runs its parts if they can be read, else the module's own forward."""

    reader: Reader  # (module, arguments after the first) → its parts, or a reason (str) why there are none
    is_named: bool = False  # True if it takes these arguments by name
    after: tuple | None = None  # what follows y in the tuple that the module returns; None if it returns y itself

    def read(self, module: nn.Module, *inputs: Any, **named: Any) -> Parts | str:
        """The parts of a module, or why there are none."""
        return self.reader(module, *inputs, **named) if runs_original(module) else "its code was changed"

    @transparent
    def __call__(self, module: nn.Module, *inputs: Any, **named: Any) -> Any:
        """Runs the module on its inputs; [B, N, D] → [B, N, D]."""
        if ways.state.inside_plain:
            return type(module).forward(module, *inputs, **named)
        if not inputs and "hidden_states" in named:
            inputs = (named["hidden_states"],)
            named = {name: value for name, value in named.items() if name != "hidden_states"}
        if inputs and isinstance(inputs[0], Tensor):
            if len(inputs) == 1 and not named and (y := replay.repeated(module, inputs[0])) is not None:
                return y
            way, key = ways.known_way(module, inputs[0])
            if way == "plain" or (way is None and _never_fuses(module, inputs[0])):
                return replay.call_plain(key, module, *inputs, **named)
            if way is not None:
                return replay.call_module(key, self._fused, module, *inputs, **named)
        return _own(FusedBody._fused, type(module))(self, module, *inputs, **named)

    def _fused(self, module: nn.Module, *inputs: Any, **named: Any) -> Any:
        x = inputs[0] if inputs and isinstance(inputs[0], Tensor) else None
        if x is not None and is_fusable(module, x):
            if self.is_named and len(inputs) > 1:
                call = dict(zip(arguments(type(module)), inputs[1:], strict=False)) | named
                parts = self.reader(module, **call)
            else:
                parts = self.reader(module, *inputs[1:], **named)
            if not isinstance(parts, str):
                way = "reference"
                if choose.has_ways(x):
                    way = ways.choose_way(module, x, (parts.sizes(),), replays=True)
                if way == "plain":
                    return ways.plainly(type(module).forward, module, *inputs, **named)
                y = parts(x, way=way)
                return y if self.after is None else (y, *self.after)
        return original(module, *inputs, **named)


def fused_body(
    *names: str,
    needs: str = "",
    takes: str | None = None,
    call: Callable[[Any], dict[str, object]] | None = None,
    after: tuple | None = None,
    by_name: bool = False,
    by_call: bool = False,
) -> Callable[[R], R]:
    """Decorator: registers a reader of these types, see `Forward` and `FusedBody`."""

    def decorate(read: R) -> R:
        supported = declared(read, 1) if takes is None else takes
        run = FusedBody(read, _is_named(read, 1), after)
        register(names, Forward(run, needs, supported, read, call=call, by_name=by_name, by_call=by_call))
        return read

    return decorate


@transparent
def original(module: nn.Module, *inputs: Any, **named: Any) -> Any:
    """Runs the forward of the module's own class."""
    return type(module).forward(module, *inputs, **named)


def _has(module: nn.Module, path: str) -> bool:
    try:
        attrgetter(path)(module)
    except AttributeError:
        return False
    return True
