"""Axes of tensors in a graph, followed upwards through views, permutations and products.

The axes of a tensor are named by identity: each dimension consists of none (size 1), one or several `Axis`, outermost
first. A view that divides a dimension splits its axis, for all tensors that have it.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .nodes import Argument, kind, known, order, read, same, shape, value
from .patterns import PatternCall


class Axis:
    """An axis of a tensor or a part of one."""

    __slots__ = ("parts", "size")

    def __init__(self, size: Any) -> None:
        symbolic = isinstance(size, torch.SymInt) and not size.node.expr.is_number
        self.size = size if symbolic else int(size)  # number of elements
        self.parts: tuple[Axis, ...] = ()  # what it was split into; () if it is whole


Axes = tuple[tuple[Axis, ...], ...]  # of a tensor, for each of its dimensions
Step = tuple[Callable, tuple]  # of an arrangement: (function, its arguments after the tensor)


class Product(NamedTuple):
    """A product of two tensors, summed over the axes `over`, with what `baddbmm` adds: beta · addend + alpha · a b."""

    a: fx.Node
    a_axes: Axes
    b: fx.Node
    b_axes: Axes
    over: tuple[Axis, ...]
    addend: Argument = None
    beta: Argument = 0
    alpha: Argument = 1


def fresh(sizes: Iterable) -> Axes:
    """New axes of these sizes."""
    return tuple(() if known(size == 1) else (Axis(size),) for size in sizes)


def leaves(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """These axes, with what was split replaced by its parts."""
    return tuple(leaf for axis in axes for leaf in (leaves(axis.parts) if axis.parts else (axis,)))


def whole(axes: Axes) -> Axes:
    """The axes of a tensor, with what was split replaced by its parts."""
    return tuple(map(leaves, axes))


def flat(axes: Axes) -> tuple[Axis, ...]:
    """All axes of a tensor in the order of its elements."""
    return tuple(leaf for part in whole(axes) for leaf in part)


def regrouped(axes: Sequence[Axis], sizes: Sequence) -> Axes | None:
    """Axes in the order of the elements as dimensions of other sizes, split where it is needed; None if that fails."""
    rest, wanted = list(leaves(axes)), [size for size in sizes if not known(size == 1)]
    found: list[tuple[Axis, ...]] = []
    while rest and wanted:
        counts = sorted(itertools.product(range(1, len(rest) + 1), range(1, len(wanted) + 1)), key=sum)
        alike = ((n, m) for n, m in counts if known(math.prod(a.size for a in rest[:n]) == math.prod(wanted[:m])))
        n, m = next(alike, (0, 0))
        if not n:
            return None
        if n == 1 < m:
            rest[0].parts = tuple(map(Axis, wanted[:m]))
        block, parts = list(leaves(rest[:n])), wanted[:m]
        if n > 1 and m > 1:
            divided = _divided(block, parts)
            if divided is None:
                return None
            found += divided
        else:
            found += [tuple(block)] if m == 1 else [(axis,) for axis in block]
        rest, wanted = rest[n:], wanted[m:]
    if rest or wanted:
        return None
    groups = iter(found)
    return tuple(() if known(size == 1) else next(groups) for size in sizes)


def _divided(axes: list[Axis], sizes: Sequence) -> list[tuple[Axis, ...]] | None:
    """`regrouped` for several axes and sizes of which only all have the same product."""
    found = []
    for size in sizes:
        group: list[Axis] = []
        while not known(size == 1):
            axis = axes.pop(0)
            if not known(size % axis.size == 0):
                if not known(axis.size % size == 0):
                    return None
                axis.parts = (Axis(size), Axis(axis.size // size))
                axis, after = axis.parts
                axes.insert(0, after)
            group.append(axis)
            size = size // axis.size
        found.append(tuple(group))
    return found


def broadcast(axes: Axes, sizes: tuple, of: tuple) -> Axes | None:
    """Axes of a tensor with these sizes that is broadcast to one with `axes` and the sizes `of`; None if it is not."""
    if len(sizes) > len(of):
        return None
    pairs = list(zip(sizes, of[len(of) - len(sizes) :], axes[len(of) - len(sizes) :], strict=True))
    if not all(known(size == 1) or known(size == full) for size, full, _ in pairs):
        return None
    return tuple(() if known(size == 1) else group for size, _, group in pairs)


def above(node: Argument, axes: Axes, casts: bool = False) -> tuple[fx.Node, Axes] | None:
    """(input, its axes) of a view or a no-op with these axes, or of a cast to another floating-point dtype."""
    if (source := same(node)) is not None:
        return source, axes
    name = kind(node)
    if name == "to" and casts:
        source = read(node)["input"]
        dtypes = [t.dtype for t in (value(node), value(source)) if t is not None]
        return (source, axes) if len(dtypes) == 2 and all(d.is_floating_point for d in dtypes) else None
    if (places := order(node)) is not None:
        return read(node)["input"], tuple(axes[places.index(i)] for i in range(len(places)))
    if name in ("reshape", "squeeze", "unsqueeze"):
        source = read(node)["input"]
        grouped = regrouped(flat(axes), shape(source))
        return None if grouped is None else (source, grouped)
    return None


def product(node: Argument, axes: Axes) -> Product | str | None:
    """The product whose result, with these axes, is a node; a reason (str) for another einsum; None for other nodes."""
    name = kind(node)
    if name == "einsum":
        return _einsum(node, axes)
    if name in ("matmul", "bmm"):
        a, b = read(node).values()
        more: tuple = ()
    elif name == "baddbmm":
        addend, a, b = (read(node)[key] for key in ("input", "batch1", "batch2"))
        more = addend, read(node).get("beta", 1), read(node).get("alpha", 1)
    else:
        return None
    sizes = shape(a), shape(b)
    if min(map(len, sizes)) < 2:
        return None
    over = fresh(sizes[0][-1:])
    outer = [broadcast(axes[:-2], size[:-2], shape(node)[:-2]) for size in sizes]
    if outer[0] is None or outer[1] is None:
        return None
    return Product(a, (*outer[0], axes[-2], *over), b, (*outer[1], *over, axes[-1]), flat(over), *more)


def _einsum(node: fx.Node, axes: Axes) -> Product | str | None:
    equation: Argument
    equation, *tensors = node.args
    if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)):
        tensors = list(tensors[0])
    if not isinstance(equation, str) or len(tensors) != 2 or node.kwargs:
        return None
    terms, arrow, result = equation.replace(" ", "").partition("->")
    letters = terms.split(",")
    if not arrow or "." in equation or any(len(set(t)) < len(t) for t in (*letters, result)) or len(letters) != 2:
        return "its einsum has no plain equation of two tensors"
    sizes = [shape(t) for t in tensors]
    if [len(s) for s in sizes] != [len(t) for t in letters] or len(result) != len(axes):
        return None
    by_letter: dict[str, tuple[Axis, ...]] = dict(zip(result, axes, strict=True))
    over: list[Axis] = []
    for letter, size in zip(*letters[:1], *sizes[:1], strict=True):
        if letter not in by_letter:
            if letter not in letters[1]:
                return "its einsum sums over an axis of one tensor"
            by_letter[letter] = flat(fresh((size,)))
            over += by_letter[letter]
    if not set(letters[1]) <= by_letter.keys():
        return "its einsum sums over an axis of one tensor"
    of = [
        tuple(() if known(n == 1) else by_letter[c] for c, n in zip(t, s, strict=True))
        for t, s in zip(letters, sizes, strict=True)
    ]
    a: Argument
    b: Argument
    a, b = tensors
    return Product(a, of[0], b, of[1], tuple(over))


def repeated(t: Tensor, dim: int, size: int) -> Tensor:
    """A tensor with a new dimension of this size, along which it is repeated."""
    return t.unsqueeze(dim).expand(*t.shape[:dim], size, *t.shape[dim:])


def arranged(axes: Axes, groups: Sequence[tuple[Axis, ...]]) -> list[Step] | None:
    """Steps that give a tensor with these axes one dimension for each group of axes.

    A group of which the tensor has nothing becomes a dimension of size 1; along what else it has not it is repeated.
    None if the tensor has other axes, or if the steps need a size that is not a number.
    """
    groups = [leaves(group) for group in groups]
    if whole(axes) == tuple(groups):
        return []
    of = {axis: group for group in groups for axis in group}
    axes = whole(axes)
    if not of.keys() >= set(flat(axes)):
        return None
    steps: list[Step] = []
    runs: list[tuple[Axis, ...]] = []  # the tensor's dimensions, after steps that divide some
    for i, dim in reversed(list(enumerate(axes))):
        group = of[dim[0]] if dim else ()
        start = group.index(dim[0]) if dim else 0
        if not dim:
            steps.append((torch.squeeze, (i,)))
        elif dim == group[start : start + len(dim)]:
            runs.insert(0, dim)
        elif sum(not isinstance(axis.size, int) for axis in dim) > 1:
            return None
        else:
            sizes = tuple(axis.size if isinstance(axis.size, int) else -1 for axis in dim)
            steps.append((torch.unflatten, (i, sizes)))
            runs[:0] = [(axis,) for axis in dim]
    ordered = [
        run for group in groups for run in sorted((r for r in runs if r[0] in group), key=lambda r: group.index(r[0]))
    ]
    if ordered != runs:
        steps.append((torch.permute, (tuple(map(runs.index, ordered)),)))
    for at, group in enumerate(groups):
        present = [run for run in ordered if run[0] in group]
        if not present:
            steps.append((torch.unsqueeze, (at,)))
            continue
        place, number = at, len(present)
        for axis in group:
            run = next((run for run in present if axis in run), None)
            if run is None:
                if not isinstance(axis.size, int):
                    return None
                steps.append((repeated, (place, axis.size)))
                number += 1
            place += run is None or axis is run[-1]
        if number > 1:
            steps.append((torch.flatten, (at, at + number - 1)))
    return steps


def applied(steps: Iterable[Step], t: Argument) -> Argument:
    """The call that takes these steps from a tensor."""
    for function, arguments in steps:
        t = PatternCall(function, (t, *arguments))
    return t
