"""LayerNorm and RMSNorm over the last axis in a captured graph: PyTorch's functions, or written out in any form.

A norm is read where a linear layer, MLP or attention reads it. One over other axes stays with the compiler, which reads
them in place, while our kernels would need a transposed copy.
"""

from collections.abc import Iterator

import torch
from torch import fx

from .algebra import Polynomial, Unlike, above, agree, between, casts, polynomial, source, widens
from .nodes import Argument, equal, kind, read, same, shape, up, value

NORMS = "layer_norm", "rms_norm"
MEANS = "mean", "sum"
X, MEAN, SPREAD, ROOT = "<x>", "<mean of x>", "<mean square>", "<1 / root>"  # factors


def norm_of(node: Argument, inner: list[fx.Node]) -> tuple[fx.Node, tuple] | None:
    """(x, its norm as `linear` takes it) if a node is a LayerNorm or RMSNorm of x over the last axis, or None."""
    found = _norm(node, inner)
    return None if isinstance(found, str) else found


def why_no_norm(node: Argument) -> str | None:
    """Why a node with the statistics of a norm is none that kernels compute; None for others."""
    found = _norm(node, [])
    return found if isinstance(found, str) else None


def _norm(node: Argument, inner: list[fx.Node]) -> tuple[fx.Node, tuple] | str | None:
    reason = ""
    called = casts(node)[-1]
    for x in (called,) if kind(called) in NORMS else _inputs(node):
        skipped: list[fx.Node] = []
        try:
            x, norm = _called(node, x, skipped) if x is called else _Written(node, source(x, node), skipped).norm()
        except Unlike as unlike:
            reason = reason or str(unlike)
        else:
            if widens(skipped, x) and equal(shape(x), shape(node)):
                while kind(x) == "to" and (before := same(x)) is not None:
                    skipped += [x] if {*x.users} <= {*skipped} else []
                    x = before
                inner += skipped
                return x, norm
    return reason or None


def _inputs(node: fx.Node) -> Iterator[fx.Node]:
    """Yields what a node may be the norm of: what it reads a variance, mean square or length of, also before a mean."""
    for base in above(node):
        if kind(base) not in (*MEANS, "norm", "var"):
            continue
        x: Argument = casts(read(base)["input"])[-1]
        if kind(base) in MEANS and kind(x) not in ("mul", "pow", "square"):
            continue
        x = casts(read(x)["input"])[-1] if kind(base) in MEANS else x
        mean: Argument = next((n for n in above(x) if kind(n) in MEANS), None)
        found: list[Argument] = [read(mean)["input"]] if mean is not None else []
        yield from (n for n in (*found, x) if value(n) is not None)


def _called(node: fx.Node, base: fx.Node, inner: list[fx.Node]) -> tuple[fx.Node, tuple]:
    """(x, norm) of a call of PyTorch's function, whose input and result may be cast."""
    arguments = read(base)
    if not equal(tuple(arguments["normalized_shape"]), shape(base)[-1:]):
        raise Unlike("it normalises more than the last axis")
    x = between(node, base, inner)
    weight, bias, eps = (arguments.get(name) for name in ("weight", "bias", "eps"))
    if kind(base) == "layer_norm":
        return x, (weight, bias, arguments.get("eps", 1e-5))
    wide = torch.promote_types(value(x).dtype, torch.float32)
    return x, (weight, None, torch.finfo(wide).eps if eps is None else eps, "rms_norm")


class _Written:
    """A norm written out, as a polynomial in x, its mean and 1 / √(mean square + ε)."""

    def __init__(self, node: fx.Node, x: fx.Node, inner: list[fx.Node]) -> None:
        self.node, self.x, self.inner = node, x, inner
        self.root = up(x, [])
        self.D = shape(node)[-1] if shape(node) else 0
        self.centred = False
        self.eps: float | None = None

    def norm(self) -> tuple[fx.Node, tuple]:
        """(x, norm)."""
        found = polynomial(self.node, self._factor, self.inner)
        weights = {n for product in found if X in product for n in product if isinstance(n, fx.Node)}
        biases = {n for product in found if len(product) == 1 for n in product if isinstance(n, fx.Node)}
        if self.eps is None or len(weights) > 1 or len(biases) > 1:
            raise Unlike
        expected: Polynomial = {_sorted(X, ROOT, *weights): 1.0} | {(bias,): 1.0 for bias in biases}
        if self.centred:
            expected[_sorted(MEAN, ROOT, *weights)] = -1.0
        if not agree(found, expected):
            raise Unlike
        weight, bias = next(iter(weights), None), next(iter(biases), None)
        if self.centred:
            return self.x, (weight, bias, self.eps)
        if bias is not None:
            raise Unlike("it is an RMSNorm with a bias")
        return self.x, (weight, None, self.eps, "rms_norm")

    def _factor(self, node: fx.Node, exponent: float) -> Polynomial | None:
        """The factors of (1): x, its mean, weight and bias [D], and 1 / √(mean square + ε)."""
        if exponent in (1, 2) and up(node, []) is self.root:
            return {(X,) * int(exponent): 1.0}
        if exponent == 1 and kind(node) in MEANS:
            scale = self._mean(node)
            if not agree(self._expanded(node), {(X,): 1.0}):
                raise Unlike
            return {(MEAN,): scale}
        if exponent == 1 and equal(shape(node), (self.D,)):
            return {(node,): 1.0}
        if exponent == -1 and kind(node) == "norm":
            self._mean(node)
            if not agree(self._expanded(node), {(X,): 1.0}) or read(node).get("p", 2) not in (2, None, "fro"):
                raise Unlike
            return self._root({(SPREAD,): self.D})
        if exponent == -0.5:
            return self._root(polynomial(node, self._spread, self.inner))
        if exponent == -1 and kind(node) == "add":
            raise Unlike("its eps is outside of the root")
        return None

    def _expanded(self, node: fx.Node) -> Polynomial:
        """The polynomial of what a statistic is of."""
        self.inner.append(node)
        return polynomial(read(node)["input"], self._factor, self.inner)

    def _mean(self, node: fx.Node) -> float:
        """What a mean over the last axis is times this statistic's kind: 1, or D for a sum."""
        arguments, last = read(node), len(shape(self.node)) - 1
        axis = arguments.get("dim")
        (axis,) = axis if isinstance(axis, (tuple, list)) and len(axis) == 1 else (axis,)
        if axis not in (-1, last) or not equal(shape(node), (*shape(self.node)[:-1], 1)):
            raise Unlike("it normalises other axes than the last")
        if kind(node) in ("norm", "sum") and not isinstance(self.D, int):
            raise Unlike
        return self.D if kind(node) == "sum" else 1

    def _spread(self, node: fx.Node, exponent: float) -> Polynomial | None:
        """The variance or mean square, or a multiple of it."""
        if exponent != 1 or kind(node) not in (*MEANS, "var"):
            return None
        scale = self._mean(node)
        of = self._expanded(node)
        arguments = read(node)
        if kind(node) == "var" and arguments.get("unbiased") is not False and arguments.get("correction") != 0:
            raise Unlike("its variance is that of a sample, which divides by D - 1")
        one, square = ({(X,) * power: 1.0} for power in (1, 2))
        centred = one if kind(node) == "var" else {**square, _sorted(X, MEAN): -2.0, (MEAN, MEAN): 1.0}
        self.centred = agree(of, centred) or (kind(node) == "var" and agree(of, {**one, (MEAN,): -1.0}))
        if not self.centred and (kind(node) == "var" or not agree(of, square)):
            raise Unlike
        return {(SPREAD,): scale}

    def _root(self, total: Polynomial) -> Polynomial:
        """1 / √(scale · mean square + scale · ε)."""
        scale = total.get((SPREAD,), 0.0)
        if not {(SPREAD,), ()} >= total.keys() or scale <= 0:
            raise Unlike
        eps = total.get((), 0.0) / scale
        if self.eps not in (None, eps):
            raise Unlike
        self.eps = eps
        return {(ROOT,): scale**-0.5}


def _sorted(*factors: fx.Node | str) -> tuple:
    return tuple(sorted(factors, key=str))
