"""Registry: module type → fused forward, with the attributes that it requires, which differ between releases.

A name says little about the parts: packages rename them, nest them and pass them other arguments from release to
release. So a forward declares what it reads and takes; `optimize` compares that with the instance once, and no call
needs to ask again.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import signature
from operator import attrgetter
from types import FunctionType
from typing import NamedTuple

from torch import Tensor, nn

from ..kernels.backend import kernels_available
from ..layers import replay, ways
from ..layers.body import AttentionParts, MlpParts
from ..layers.hooks import type_name
from .third_party import is_fusable

Reader = Callable[..., AttentionParts | MlpParts | str]
Folds = Callable[[nn.Module], Iterable[tuple[nn.Module | None, nn.Module | None]]]


class Forward(NamedTuple):
    """A fused forward of some types.

    Attributes:
        run: what `optimize` binds to an instance.
        needs: attributes that it reads, "a b.c d|e": a, c of b, and d or else e.
        takes: arguments after the first that it knows, "a b"; None where its types have always had the same.
        read: reads a body, called with it and the rest of its arguments; None for types that are no bodies.
        became: what a report calls it; None where the parts say so.
        reason: why a module must run its own forward now; None where it need not.
        call: named arguments that every call of this module has, as far as its own facts tell.
        folds: pairs of a norm and the body or layer behind it, which takes the norm in where it can be read.
    """

    run: Callable
    needs: str = ""
    takes: str | None = None
    read: Reader | None = None
    became: str | None = None
    reason: Callable[[nn.Module], str | None] | None = None
    call: Callable[[nn.Module], dict[str, object]] | None = None
    folds: Folds | None = None

    def lacks(self, module: nn.Module) -> str | None:
        """What it would read and this instance does not have; None where that is nothing."""
        missing = (n for n in self.needs.split() if not any(_has(module, path) for path in n.split("|")))
        name = next(missing, None)
        return None if name is None else f"it has no {name.replace('|', ' or ')}, which its fused forward reads"

    def ignores(self, module: nn.Module) -> str | None:
        """What the instance's own forward takes and this one does not know; None where that is nothing."""
        if self.takes is None:
            return None
        name = next((n for n in _arguments(type(module)) if n not in self.takes.split()), None)
        return None if name is None else f"it takes {name}, which its fused forward does not know"


def arguments(cls: type[nn.Module]) -> tuple[str, ...]:
    """The names of what a class's own forward takes after its first input; a lookup from the second time."""
    if cls not in _taken:
        _taken[cls] = _arguments(cls)
    return _taken[cls]


def _arguments(cls: type[nn.Module]) -> tuple[str, ...]:
    if not isinstance(cls.forward, FunctionType):  # a patch, which runs in any case
        return ()
    rest = list(signature(cls.forward).parameters.values())[2:]  # after the module and its first input
    return tuple(p.name for p in rest if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))


arguments._dynamo_marked_constant = True  # torch.compiler.assume_constant_result, which would import all of Dynamo
_taken: dict[type[nn.Module], tuple[str, ...]] = {}
FORWARDS: dict[str, list[Forward]] = {}  # type → what its instances may be given, the newest release's first


def register(names: tuple[str, ...], forward: Forward) -> None:
    """Adds what instances of these types may be given."""
    for name in names:
        FORWARDS.setdefault(name, []).append(forward)


def forward_for(module: nn.Module) -> Forward | str | None:
    """The fused forward that fits this instance, in one sentence why none does, or None for unknown types."""
    known = FORWARDS.get(type_name(module))
    if known is None:
        return None
    forward = next((f for f in known if f.lacks(module) is None), None)
    return known[0].lacks(module) if forward is None else forward.ignores(module) or forward


def fused_forward(
    became: str,
    *names: str,
    needs: str = "",
    takes: str | None = None,
    reason: Callable[[nn.Module], str | None] | None = None,
    folds: Folds | None = None,
) -> Callable[[Callable], Callable]:
    """Declares the fused forward of these types; for the arguments see `Forward`."""

    def decorate(forward: Callable) -> Callable:
        chosen = _chosen(forward)
        register(names, Forward(chosen, needs, takes, None, became, reason, None, folds))
        return chosen

    return decorate


def _chosen(forward: Callable) -> Callable:
    """The fused forward, or the original's where the module runs plain or stands in a block that does."""

    @functools.wraps(forward)
    def run(module: nn.Module, *inputs: object, **named: object) -> object:
        if ways.state.inside_plain:
            return type(module).forward(module, *inputs, **named)
        x = inputs[0] if inputs else None
        way, settings = ways.known_way(module, x) if type(x) is Tensor else (None, None)
        if way == "plain":
            return ways.plainly(type(module).forward, module, *inputs, **named)
        if way is None:
            return forward(module, *inputs, **named)
        return replay.call(settings, forward, module, *inputs, **named)

    return run


@dataclass(frozen=True)
class FusedBody:
    """Runs a body by its parts where they can be read, else its own forward.

    Attributes:
        read: gives the parts of a module, called with it and its arguments after the first, or why there are none.
        weights: the module returns (y, attention weights or None).
    """

    read: Reader
    weights: bool = False

    def __call__(self, module: nn.Module, *inputs: object, **named: object) -> Tensor | tuple[Tensor, None]:
        """The module of its inputs; [B, N, D] → [B, N, D]."""
        if ways.state.inside_plain:
            return type(module).forward(module, *inputs, **named)
        if not inputs and "hidden_states" in named:
            inputs = (named["hidden_states"],)
            named = {name: value for name, value in named.items() if name != "hidden_states"}
        if inputs and isinstance(inputs[0], Tensor):
            way, settings = ways.known_way(module, inputs[0])
            if way == "plain":
                return ways.plainly(type(module).forward, module, *inputs, **named)
            if way is not None:
                return replay.call(settings, self._fused, module, *inputs, **named)
        return self._fused(module, *inputs, **named)

    def _fused(self, module: nn.Module, *inputs: object, **named: object) -> Tensor | tuple[Tensor, None]:
        x = inputs[0] if inputs and isinstance(inputs[0], Tensor) else None
        if x is not None and is_fusable(module, x):
            parts = self.read(module, *inputs[1:], **named)
            if not isinstance(parts, str):
                way = "reference"
                if kernels_available(x):
                    way = ways.choose_way(module, x, (parts.sizes(),), replays=True)
                if way == "plain":
                    return ways.plainly(type(module).forward, module, *inputs, **named)
                y = parts(x, way=way)
                return (y, None) if self.weights else y
        return original(module, *inputs, **named)


def fused_body(
    *names: str,
    needs: str = "",
    takes: str | None = None,
    call: Callable[[nn.Module], dict[str, object]] | None = None,
    weights: bool = False,
) -> Callable[[Reader], Reader]:
    """Declares a reader of these types, see `Forward`; `weights` for bodies that return (y, weights or None)."""

    def decorate(read: Reader) -> Reader:
        register(names, Forward(FusedBody(read, weights), needs, takes, read, call=call))
        return read

    return decorate


def original(module: nn.Module, *inputs: object, **named: object) -> object:
    """The forward of the module's own class."""
    return type(module).forward(module, *inputs, **named)


def _has(module: nn.Module, path: str) -> bool:
    try:
        attrgetter(path)(module)
    except AttributeError:
        return False
    return True
