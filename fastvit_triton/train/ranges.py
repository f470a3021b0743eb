"""What the values of training may be, stated once: in the annotation of the field or argument that holds one.

    clip: Positive | None               a number above 0, or None
    decay: Literal["cosine", "linear"]  one of these
    betas: tuple[Share, Share]          two numbers in [0, 1)

`Annotated[float, "(0, 1]"]` is a number in that interval. NaN lies in no interval, and infinity in none of these.
`check` compares one value with an annotation, `check_fields` a dataclass, and `checked` the arguments of each call.
"""

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

Count = Annotated[int, "[1, inf)"]  # of images, steps, looks, …
Number = Annotated[int, "[0, inf)"]  # of a step, a seed, or processes besides this one
Seed = Annotated[int, "[0, 2^63)"]
Side = Annotated[int, "[1, 16384]"]  # of an image, in pixels
Finite = Annotated[float, "(-inf, inf)"]
Positive = Annotated[float, "(0, inf)"]
NotNegative = Annotated[float, "[0, inf)"]
Share = Annotated[float, "[0, 1)"]  # decay of an average, dropped or smoothed part
Part = Annotated[float, "(0, 1]"]  # of an area or a rate; 1 is all of it
Hidden = Annotated[float, "(0, 1)"]  # part of the patches; neither none nor all
Probability = Annotated[float, "[0, 1]"]
Turn = Annotated[float, "[0, 180]"]  # in degrees, either way

_KINDS = {float: Real, int: Integral}  # NumPy's numbers among them
_WORDS = {float: "a number", int: "an integer", bool: "True or False", str: "a string", dict: "a dictionary"}
_Called = TypeVar("_Called", bound=Callable)


def check(name: str, value: object, allowed: Any) -> None:
    """Compares a value with an annotation. A type that is none of Python's numbers, bool, str and dict is not compared.

    Args:
        name: of the value; the message starts with it.
        value: whatever was given.
        allowed: such as `Positive | None` or `Literal["cosine", "linear"]`.

    Raises:
        ValueError: the value is of another type or outside the range; the message names both.
    """
    if _plain(allowed) and not _fits(value, allowed):
        raise ValueError(f"{name} is {value!r}; use {_wanted(allowed)}")


def check_fields(record: type | object, given: Mapping[str, object] | None = None) -> None:
    """Compares the fields of a dataclass with their annotations; raises ValueError as `check` does.

    Args:
        record: an instance, or a class whose fields `given` names.
        given: values by field; None takes those of the instance.
    """
    hints = _hints(record if isinstance(record, type) else type(record))
    values = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)} if given is None else given
    for name, value in values.items():
        if name in hints:
            check(name, value, hints[name])


def checked(function: _Called) -> _Called:
    """A function that first compares its arguments with their annotations; raises ValueError as `check` does."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*arguments, **options):
        for name, value in signature.bind(*arguments, **options).arguments.items():
            if name in (hints := _hints(function)):
                check(name, value, hints[name])
        return function(*arguments, **options)

    return call


@functools.cache
def _hints(annotated: Callable) -> dict[str, Any]:
    """Annotations that can be compared, by name."""
    return {name: hint for name, hint in inspect.get_annotations(annotated).items() if _plain(hint)}


@functools.cache
def _plain(hint: Any) -> bool:
    """Whether an annotation is about numbers, bool, str, dict and None alone."""
    if get_origin(hint) in (Annotated, Literal):
        return True
    if get_origin(hint) in (Union, UnionType, tuple):
        return all(_plain(part) for part in get_args(hint) if part is not ...)
    return hint in _WORDS or hint is NoneType


def _fits(value: object, hint: Any) -> bool:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _fits(value, parts[0]) and (_is_union(parts[0]) or _inside(value, parts[1]))
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin is tuple:
        if not isinstance(value, (tuple, list)) or not value:
            return False
        kinds = parts[:1] * len(value) if parts[-1] is ... else parts
        return len(value) == len(kinds) and all(map(_fits, value, kinds))
    if _is_union(hint):
        return any(_fits(value, part) for part in parts)
    return isinstance(value, _KINDS.get(hint, hint)) and (hint is bool or not isinstance(value, bool))


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)


def _inside(value: Any, interval: str) -> bool:
    low, high, start, end = _ends(interval)
    return (low <= value if start == "[" else low < value) and (value <= high if end == "]" else value < high)


@functools.cache
def _ends(interval: str) -> tuple[float, float, str, str]:
    """Lower and upper end of an interval such as "(0, 1]", and its brackets."""
    start, low, high, end = re.fullmatch(r"([\[(])(\S+), (\S+)([\])])", interval).groups()
    return _number(low), _number(high), start, end


def _number(text: str) -> float:
    base, _, exponent = text.partition("^")
    return float(base) ** int(exponent or 1)


def _wanted(hint: Any) -> str:
    """What would do, in words."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated and _is_union(parts[0]):  # the second part is what None means
        return f"{_wanted(parts[0])} for {parts[1]}"
    if origin is Annotated:
        low, high, start, _ = _ends(parts[1])
        if math.isfinite(high):
            return f"{_WORDS[parts[0]]} in {parts[1]}"
        if math.isfinite(low):
            return f"{_WORDS[parts[0]]} {'above' if start == '(' else 'of at least'} {low:g}"
        return f"a finite {_WORDS[parts[0]].split()[-1]}"
    if origin is Literal:
        return " or ".join(", ".join(map(repr, parts)).rsplit(", ", 1))
    if origin is tuple:
        return f"{'one or more values' if parts[-1] is ... else f'{len(parts)} values'}, each {_wanted(parts[0])}"
    if _is_union(hint):
        first, *rest = map(_wanted, parts)
        return ", or ".join([first, *rest])
    return "None" if hint is NoneType else _WORDS[hint]
