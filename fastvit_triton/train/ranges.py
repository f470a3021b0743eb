"""Value ranges as type annotations of fields and arguments, and checks against them.

    clip: Positive | None                                 a number above 0, or None
    decay: Literal["cosine", "linear"]                    one of these
    betas: tuple[FractionBelow1, FractionBelow1]          two numbers in [0, 1)

`Annotated[float, "(0, 1]"]` is a number in that interval; NaN is in no interval. `Annotated[X | None, "text"]` allows
None, and error messages use the text to explain None. `check` checks one value, `check_fields` a dataclass, and
`@checked` the arguments of each call.
"""

import dataclasses
import functools
import inspect
import math
import operator
import re
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

PositiveInt = Annotated[int, "[1, inf)"]  # number of images, steps, repeats, …
NonNegativeInt = Annotated[int, "[0, inf)"]  # step, index, or number of worker processes
Seed = Annotated[int, "[0, 2^63)"]
ImageSide = Annotated[int, "[1, 16384]"]  # in pixels
Finite = Annotated[float, "(-inf, inf)"]
Positive = Annotated[float, "(0, inf)"]
NonNegative = Annotated[float, "[0, inf)"]
FractionBelow1 = Annotated[float, "[0, 1)"]  # EMA decay, drop rate, label smoothing
FractionAbove0 = Annotated[float, "(0, 1]"]  # fraction of an area or a learning rate
OpenFraction = Annotated[float, "(0, 1)"]  # mask ratio
Probability = Annotated[float, "[0, 1]"]
Degrees = Annotated[float, "[0, 180]"]  # largest rotation, in either direction

_KINDS = {float: Real, int: Integral}  # includes NumPy scalars
_WORDS = {float: "a number", int: "an integer", bool: "True or False", str: "a string", dict: "a dictionary"}
_Called = TypeVar("_Called", bound=Callable)


def check(name: str, value: object, allowed: Any) -> None:
    """Checks a value against an annotation. Types other than numbers, bool, str and dict are not checked."""
    if _is_checkable(allowed) and not _is_allowed(value, allowed):
        raise ValueError(f"{name} is {value!r}; use {_describe(allowed)}")


def without_none(allowed: Any) -> Any:
    """The annotation of values that are given, such as options of a command."""
    inner = get_args(allowed)[0] if get_origin(allowed) is Annotated else allowed
    kinds = (kind for kind in get_args(inner) if kind is not NoneType)
    return functools.reduce(operator.or_, kinds) if _is_union(inner) else allowed


def check_fields(record: Any, given: Mapping[str, object] | None = None) -> None:
    """Checks the fields of a dataclass against their annotations; raises ValueError as `check` does."""
    hints = _hints(record if isinstance(record, type) else type(record))
    values = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)} if given is None else given
    for name, value in values.items():
        if name in hints:
            check(name, value, hints[name])


def checked(function: _Called) -> _Called:
    """Decorator: checks the arguments of each call against their annotations; raises ValueError as `check` does."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*arguments, **options):
        for name, value in signature.bind(*arguments, **options).arguments.items():
            if name in (hints := _hints(function)):
                check(name, value, hints[name])
        return function(*arguments, **options)

    return cast(_Called, call)


@functools.cache
def _hints(annotated: Callable) -> dict[str, Any]:
    """The annotations that can be checked, by name."""
    return {name: hint for name, hint in inspect.get_annotations(annotated).items() if _is_checkable(hint)}


@functools.cache
def _is_checkable(hint: Any) -> bool:
    """True if an annotation consists of numbers, bool, str, dict and None only."""
    if get_origin(hint) in (Annotated, Literal):
        return True
    if get_origin(hint) in (Union, UnionType, tuple):
        return all(_is_checkable(kind) for kind in get_args(hint) if kind is not ...)
    return hint in _WORDS or hint is NoneType


def _is_allowed(value: object, hint: Any) -> bool:
    origin = get_origin(hint)
    args = get_args(hint)
    if origin is Annotated:
        return _is_allowed(value, args[0]) and (_is_union(args[0]) or _is_in_interval(value, args[1]))
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in args)
    if origin is tuple:
        if not isinstance(value, (tuple, list)) or not value:
            return False
        kinds = args[:1] * len(value) if args[-1] is ... else args
        return len(value) == len(kinds) and all(map(_is_allowed, value, kinds))
    if _is_union(hint):
        return any(_is_allowed(value, kind) for kind in args)
    return isinstance(value, _KINDS.get(hint, hint)) and (hint is bool or not isinstance(value, bool))


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)


def _is_in_interval(value: Any, interval: str) -> bool:
    low, high, start, end = _ends(interval)
    return (low <= value if start == "[" else low < value) and (value <= high if end == "]" else value < high)


@functools.cache
def _ends(interval: str) -> tuple[float, float, str, str]:
    """Lower and upper end of an interval such as "(0, 1]", and its brackets."""
    match = re.fullmatch(r"([\[(])(\S+), (\S+)([\])])", interval)
    assert match is not None, interval
    start, low, high, end = match.groups()
    return _number(low), _number(high), start, end


def _number(text: str) -> float:
    base, _, exponent = text.partition("^")
    return float(base) ** int(exponent or 1)


def _describe(hint: Any) -> str:
    """The allowed values, in words."""
    origin = get_origin(hint)
    args = get_args(hint)
    if origin is Annotated and _is_union(args[0]):  # the second argument explains None
        return f"{_describe(args[0])} for {args[1]}"
    if origin is Annotated:
        low, high, start, _ = _ends(args[1])
        if math.isfinite(high):
            return f"{_WORDS[args[0]]} in {args[1]}"
        if math.isfinite(low):
            return f"{_WORDS[args[0]]} {'above' if start == '(' else 'of at least'} {low:g}"
        return f"a finite {_WORDS[args[0]].split()[-1]}"
    if origin is Literal:
        return " or ".join(", ".join(map(repr, args)).rsplit(", ", 1))
    if origin is tuple:
        return f"{'one or more values' if args[-1] is ... else f'{len(args)} values'}, each {_describe(args[0])}"
    if _is_union(hint):
        first, *rest = map(_describe, args)
        return ", or ".join([first, *rest])
    return "None" if hint is NoneType else _WORDS[hint]
