"""Activations and gates in a captured graph: PyTorch's functions, or written out in any form."""

import math
from collections.abc import Iterator

from torch import fx

from ...kernels.activation import GATED
from .algebra import ARITHMETIC, Polynomial, Unlike, above, agree, between, casts, polynomial, widens
from .nodes import Argument, equal, kind, outside, part_of, read, same, shape, up

GATES = {act: name for name, act in GATED.items()}
SIMPLE = "silu", "relu", "hardswish", "relu6"  # activations whose names are those of the kernels
X, F = "<x>", "<f of x>"
TANH = math.sqrt(2 / math.pi)
HALF: Polynomial = {(X,): 0.5, (F, X): 0.5}
TIMES: Polynomial = {(F, X): 1.0}
# activation, function f, its argument as a polynomial in x, the result as a polynomial in x and f
FORMULAS: tuple[tuple[str, str, Polynomial, Polynomial], ...] = (
    ("gelu", "erf", {(X,): math.sqrt(0.5)}, HALF),
    ("gelu_tanh", "tanh", {(X,): TANH, (X, X, X): 0.044715 * TANH}, HALF),
    ("gelu_tanh", "sigmoid", {(X,): 2 * TANH, (X, X, X): 2 * 0.044715 * TANH}, TIMES),
    ("quick_gelu", "sigmoid", {(X,): 1.702}, TIMES),
    ("silu", "sigmoid", {(X,): 1.0}, TIMES),
)


def activated(node: Argument, inner: list[fx.Node]) -> tuple[str | None, Argument, bool]:
    """(activation, its input, True if that has the gate second); without an activation (None, node, False)."""
    node = up(node, inner)
    name, x = _alone(node, inner)
    if name is not None:
        return name, up(x, inner), False
    for name, gate, other, parts in _gates(node):
        first, second = (_half(t, parts) for t in (gate, other))
        if first is not None and second is not None and first[0] is second[0] and first[1] != second[1]:
            inner += parts
            return name, up(first[0], inner), first[1] == 1
    return None, node, False


def gated(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The gate and up projection, linear layers of the same input, of which this is the gated activation; or None."""
    for _, *layers, parts in _gates(node):
        gate, other = layers
        if kind(gate) == kind(other) == "linear" and outside([*layers, *parts], node) is None:
            return (gate, other) if read(gate)["input"] is read(other)["input"] and gate is not other else None
    return None


def _gates(node: Argument) -> Iterator[tuple[str, Argument, Argument, list[fx.Node]]]:
    """Yields (gated activation, input of the gate, what it is multiplied by, nodes between) for a product."""
    a, b = read(node).values() if kind(node) == "mul" else (None, None)
    for gate, other in ((a, b), (b, a)):
        parts = [node]
        name, x = _alone(up(gate, parts), parts)
        if name is not None and name in GATES:
            yield GATES[name], up(x, parts), up(other, parts), parts


def _alone(node: Argument, inner: list[fx.Node]) -> tuple[str | None, Argument]:
    """(activation, its input), without gates; (None, node) for others."""
    call: Argument = casts(node)[-1]
    if kind(call) == "gelu" or kind(call) in SIMPLE:
        approximate = {"none": "gelu", "tanh": "gelu_tanh"}[read(call).get("approximate", "none")]
        parts: list[fx.Node] = []
        x = between(node, call, parts)
        if not widens(parts, x):
            return None, node
        inner += parts
        return approximate if kind(call) == "gelu" else kind(call), x
    for base in above(node) if kind(node) in ARITHMETIC else ():
        for name, function, argument, result in FORMULAS:
            if kind(base) != function:
                continue
            x = read(base)["input"]
            while kind(x) in ARITHMETIC or same(x) is not None:
                x = x.all_input_nodes[0]
            parts = []

            def factor(n: fx.Node, exponent: float, x: fx.Node = x, base: fx.Node = base) -> Polynomial | None:
                names = {x: X, base: F}
                return {(names[n],) * int(exponent): 1.0} if n in names and exponent in (1, 2, 3) else None

            try:
                found = polynomial(read(base)["input"], factor, parts), polynomial(node, factor, parts)
            except Unlike:
                continue
            if agree(found[0], argument) and agree(found[1], result) and widens([base, *parts], x):
                inner += [base, *parts]
                return name, x
    return None, node


def _half(node: Argument, inner: list[fx.Node]) -> tuple[fx.Node, int] | None:
    """(tensor, 0 or 1 for the first or second half of its last axis) if that is this node, or None."""
    node = up(node, inner)
    if (part := part_of(node, 2)) is None:
        return None
    packed: Argument
    packed, dim, number, alone, between = part
    inner += [node, *between]
    *outer, width = shape(node) or (0,)
    if alone:  # of an axis of halves
        inner.append(packed)
        packed = read(packed).get("input") if kind(packed) == "reshape" else None
    return (packed, number) if dim == len(outer) and equal(shape(packed), (*outer, 2 * width)) else None
