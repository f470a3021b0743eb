"""Formulas in a captured graph as polynomials, so that their order, brackets and casts do not matter."""

import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import fx

from .nodes import Argument, kind, read, same, value

# A sum of products: sorted factors → coefficient. A factor is a node, or a name that a pattern gives to equal nodes.
Polynomial = dict[tuple, float]
Factor = Callable[[fx.Node, float], Polynomial | None]

POWERS = {"reciprocal": -1, "rsqrt": -0.5, "sqrt": 0.5, "square": 2}
ARITHMETIC = (*POWERS, "add", "addcmul", "div", "mul", "neg", "pow", "sub", "to")
FAR = 32  # operators above a node among which a pattern looks for one


class Unlike(Exception):
    """A node has not the form that a pattern asks for; the message is a reason for a report, or empty."""


def polynomial(node: Argument, factor: Factor, inner: list[fx.Node], exponent: float = 1) -> Polynomial:
    """A power of a node, or of a number, as a polynomial."""
    natural = exponent in (1, 2, 3)
    if isinstance(node, (int, float)) and (natural or node > 0):
        return {(): float(node) ** exponent}
    if isinstance(node, fx.Node) and (found := factor(node, exponent)) is not None:
        return found
    name = kind(node)
    if name not in ARITHMETIC and same(node) is None:
        raise Unlike
    inner.append(node)
    arguments = read(node)

    def power(argument: str, p: float) -> Polynomial:
        return polynomial(arguments[argument], factor, inner, p)

    if name in POWERS or name == "pow":
        p = POWERS.get(name) or arguments["exponent"]
        if not isinstance(p, (int, float)) or (p % 2 == 0 and exponent % 1):  # √(x²) is not x
            raise Unlike
        return power("input", p * exponent)
    if name == "neg" and natural:
        return times({(): (-1.0) ** exponent}, power("input", exponent))
    if name in ("mul", "div") and arguments.get("rounding_mode") is None:
        return times(power("input", exponent), power("other", exponent if name == "mul" else -exponent))
    if name in ("add", "sub", "addcmul") and natural:
        factors = arguments.get("alpha", 1), arguments.get("value", 1)
        if not all(isinstance(number, (int, float)) for number in factors):
            raise Unlike
        sign = -math.prod(factors) if name == "sub" else math.prod(factors)
        other = times(power("tensor1", 1), power("tensor2", 1)) if name == "addcmul" else power("other", 1)
        first = power("input", 1)
        total = {key: first.get(key, 0.0) + sign * other.get(key, 0.0) for key in {**first, **other}}
        return total if exponent == 1 else times(total, polynomial(node, factor, inner, exponent - 1))
    if name in ARITHMETIC and name != "to":
        raise Unlike
    return power("input", exponent)


def times(a: Polynomial, b: Polynomial) -> Polynomial:
    """The product of two polynomials."""
    product: Polynomial = {}
    for (first, c), (second, d) in itertools.product(a.items(), b.items()):
        key = tuple(sorted((*first, *second), key=str))
        product[key] = product.get(key, 0.0) + c * d
    return product


def agree(a: Polynomial, b: Polynomial) -> bool:
    """True if two polynomials are equal, up to constants that code gives with eight digits, such as √(2/π)."""
    return all(math.isclose(a.get(key, 0.0), b.get(key, 0.0), rel_tol=1e-8, abs_tol=1e-12) for key in {**a, **b})


def above(node: Argument) -> Iterator[fx.Node]:
    """A node and the nearest that it is computed from by arithmetic, from near to far."""
    found = [node] if isinstance(node, fx.Node) else []
    for each in itertools.islice(found, FAR):  # which grows
        yield each
        if kind(each) in ARITHMETIC or same(each) is not None:
            found += [n for n in each.all_input_nodes if n not in found]


def casts(node: Argument) -> list:
    """A node, the one that it was cast from, the one that this was cast from, and so on; also without no-ops."""
    chain = [node]
    while (node := read(node)["input"] if kind(node) == "to" else same(node)) is not None:
        chain.append(node)
    return chain


def source(x: fx.Node, like: fx.Node) -> fx.Node:
    """What x was cast from: the nearest node with the dtype of `like`, or else the farthest."""
    chain = [n for n in casts(x) if value(n) is not None]
    return next((n for n in chain if value(n).dtype == value(like).dtype), chain[-1])


def between(node: fx.Node, call: fx.Node, inner: list[fx.Node]) -> fx.Node:
    """The input of a call of which a node is the result, which both may be cast; the nodes between are appended."""
    x = source(read(call)["input"], node)
    chain = casts(read(call)["input"])
    inner += [*casts(node), *chain[: chain.index(x)]]
    return x


def widens(inner: list[fx.Node], x: fx.Node) -> bool:
    """True if these nodes compute in the dtype of x or, for a 16-bit x, in float32."""
    dtype = value(x).dtype
    found = {t.dtype for node in inner if (t := value(node)) is not None}
    return found <= {dtype, torch.promote_types(dtype, torch.float32)}
