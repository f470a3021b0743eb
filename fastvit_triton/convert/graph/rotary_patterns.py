"""Norms of heads and rotary positions between a packed projection and its attention, in whatever way they are written.

Every tensor between the two is computed from columns of the projection. For each of its channels the terms of a sum
are recorded: a factor, a column, and an entry of a table by which it is multiplied. A reshape, slice, join, negation or
sum of tensors is done to these records, so no spelling of a rotation has to be known. If those of the queries and keys
are y = z ∘ cos + J z ∘ sin of `kernels.attention_qkv`, attention on the packed projection computes the same.
"""

import itertools
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import fx

from ...kernels.argument import group_of
from .nodes import Argument, equal, kind, known, operands, order, read, same, shape, value
from .norm_patterns import norm_of
from .patterns import PatternCall

VIEWS = "chunk contiguous getitem permute reshape split squeeze to transpose unbind unsqueeze".split()
# Functions of tables: two calls of one with the same arguments have the same result.
TABLES = "add arange cat complex cos div einsum embedding expand flatten float getitem linspace mul neg outer permute "
TABLES += (
    "polar pow repeat repeat_interleave reshape sin squeeze stack sub tile to transpose truediv type unsqueeze view"
)
NAMES = frozenset(TABLES.split())
IN_PLACE = {f for name, f in vars(operator).items() if name.startswith("i") and name not in ("index", "inv", "invert")}
IN_PLACE |= {operator.setitem, operator.delitem}


class Terms(NamedTuple):
    """A sum for each channel: arrays [terms, *channels]; `table` is −1 where a term has none."""

    factor: np.ndarray
    column: np.ndarray
    table: np.ndarray
    entry: np.ndarray


class RotaryRun(NamedTuple):
    """Consecutive tokens, and the sums that their channels are."""

    start: Any
    stop: Any
    terms: Terms


class Heads(NamedTuple):
    """A tensor computed from the projection [B, N, columns]."""

    # "B", "N", or "" for channels, for each of its axes; a complex tensor has one more, of its two parts
    axes: tuple[str, ...]
    runs: tuple[RotaryRun, ...]  # its tokens
    norm: tuple[tuple, int] | None = None  # (parameters, channels) of the norm that its columns have passed, or None


class Table(NamedTuple):
    """What multiplies channels: a tensor, or a part of a complex one, its shape, and the axes that it is aligned to."""

    tensor: fx.Node | PatternCall
    sizes: tuple
    axes: tuple[str, ...]


class Rotation(NamedTuple):
    """What `attention_qkv` is to do to queries or keys."""

    norm: tuple | None
    rope: tuple[Argument, Argument, bool | int] | None
    prefix: Any


def attention_of_packed(pattern: Any, core: fx.Node) -> tuple[fx.Node, dict, list[fx.Node]] | str | None:
    """(packed projection [B, N, 3·H·D], arguments of `attention_qkv`, nodes skipped) of an attention with q, k, v."""
    packed: Argument = pattern.v
    while kind(packed) in VIEWS:
        packed = read(packed)["input"]
    (B, H, N, D), columns = shape(pattern.q), shape(packed)
    if not (isinstance(H, int) and isinstance(D, int) and equal(columns, (B, N, 3 * H * D))):
        return None
    reader = _Reader(packed, core)
    found = [reader.values.get(t) for t in (pattern.q, pattern.k, pattern.v)]
    parts = [t if isinstance(t, Heads) and t.axes == ("B", "", "N", "") else None for t in found]
    rotations = [None if t is None else reader.rotation(t, i, (H, D), N) for i, t in enumerate(parts)]
    q, k, v = rotations
    if q is None or k is None or v != Rotation(None, None, 0):
        return None
    inner = reader.above((pattern.q, pattern.k, pattern.v))
    if q[1:] != k[1:]:
        if not (known(q.prefix == k.prefix) and _alike(q.rope, k.rope)):
            return "its queries and keys are rotated by different tables"
        inner += _unread(k.rope, inner)
    if any(value(t).requires_grad for t in operands(q.rope)):
        return "its rotary positions are learned"
    options: dict[str, Any] = {
        name: norm for name, norm in (("q_norm", q.norm), ("k_norm", k.norm)) if norm is not None
    }
    if q.rope is not None:
        prefix = q.prefix if isinstance(q.prefix, int) else reader.number(q.prefix)
        if prefix is None:
            return None
        options |= {"rope": q.rope, "prefix_tokens": prefix}
    return packed, options, inner


class _Reader:
    """The tensors computed from a packed projection, up to a node."""

    def __init__(self, packed: fx.Node, end: fx.Node) -> None:
        _, N, columns = shape(packed)
        start = Terms(*(np.full((1, columns), number) for number in (1.0, 0, -1, 0)))
        start.column[:] = np.arange(columns)
        self.packed = packed
        self.tables: list[Table] = []
        # node → what it is, for tensors that have records, and tuples of these
        self.values: dict[fx.Node, Any] = {packed: Heads(("B", "N", ""), (RotaryRun(0, N, start),))}
        self.others: set[fx.Node] = set()  # further nodes that are computed from the projection
        node = packed.next
        while node is not end and node.op != "output":
            if any(n in self.values or n in self.others for n in node.all_input_nodes):
                if (result := self._read(node)) is not None:
                    self.values[node] = result
                else:
                    self.others.add(node)
            node = node.next

    def above(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """These tensors, what they are computed from, below the projection, and sizes that only these nodes read."""
        below = self.values.keys() | self.others
        todo, seen = list(nodes), dict[fx.Node, None]()
        while todo:
            node = todo.pop()
            if node not in seen and node is not self.packed and node in below and not _is_number(node):
                seen[node] = None
                todo += node.all_input_nodes
        for node in reversed(self.packed.graph.nodes):
            if node in self.others and _is_number(node) and seen.keys() >= node.users.keys():
                seen[node] = None
        return list(seen)

    def number(self, size: Any) -> fx.Node | None:
        """A node of the graph that computes a symbolic size."""
        numbers = (n for n in self.packed.graph.nodes if isinstance(n.meta.get("example_value"), torch.SymInt))
        return next((n for n in numbers if known(n.meta["example_value"] == size)), None)

    def _read(self, node: fx.Node) -> Any:
        """What a node computes, or None."""
        if (norm := norm_of(node, [])) is not None:
            return self._normed(*norm)
        if (before := self.values.get(same(node))) is not None:
            return before
        name = kind(node)
        function = getattr(self, f"_{name}", None) if name is not None else None
        is_complex = value(node) is not None and value(node).is_complex()
        if function is None or (is_complex and name not in ("mul", "view_as_complex")):
            return None
        return function(node, **read(node))

    def _normed(self, x: fx.Node, norm: tuple) -> Heads | None:
        heads = self.values.get(x)
        if not isinstance(heads, Heads) or heads.norm is not None or heads.axes[-1:] != ("",):
            return None
        if any((run.terms.table >= 0).any() or (run.terms.factor != 1).any() for run in heads.runs):
            return None
        return heads._replace(norm=(norm, shape(x)[-1]))

    def _to(self, node, input, **_):
        before, after = value(self.packed), value(node)
        wide = (before.dtype, torch.float64) + ((torch.float32,) if before.dtype != torch.float64 else ())
        return self.values.get(input) if after is not None and after.dtype in wide else None

    def _neg(self, node, input):
        return self._scaled(input, -1.0)

    def _mul(self, node, input, other):
        for x, y in ((input, other), (other, input)):
            if isinstance(y, (int, float)):
                return self._scaled(x, y)
            if x in self.values and value(y) is not None and y not in self.values and y not in self.others:
                return self._tabled(node, x, y)
        return None

    def _div(self, node, input, other, rounding_mode=None):
        usable = isinstance(other, (int, float)) and other != 0 and rounding_mode is None
        return self._scaled(input, 1 / other) if usable else None

    def _scaled(self, x: Argument, factor: float) -> Heads | None:
        return self._of(x, lambda terms: terms._replace(factor=terms.factor * factor))

    def _tabled(self, node: fx.Node, x: fx.Node, y: fx.Node) -> Heads | None:
        """x times a table: its entries are recorded, one for each term."""
        heads, example = self.values[x], value(y)
        if not isinstance(heads, Heads) or len(heads.runs) > 1 or not equal(shape(node), shape(x)):
            return None
        terms, turns = heads.runs[0].terms, value(x).is_complex()
        if (terms.table >= 0).any() or example.is_complex() != turns or not (turns or example.is_floating_point()):
            return None
        sizes, axes = shape(y), heads.axes[: len(shape(x))][len(shape(x)) - len(shape(y)) :]
        if "N" not in axes or not equal((sizes[axes.index("N")],), (shape(x)[heads.axes.index("N")],)):
            return None
        rows = tuple(n for n, axis in zip(sizes, axes, strict=True) if not axis)
        if not all(isinstance(n, int) for n in rows):
            return None
        entry = np.arange(math.prod(rows)).reshape(rows)
        if not turns:
            table = np.full(terms.table.shape, self._table(Table(y, sizes, axes)))
            new = terms._replace(table=table, entry=np.broadcast_to(entry, terms.entry.shape))
            return heads._replace(runs=(heads.runs[0]._replace(terms=new),))
        real, imag = (self._table(Table(PatternCall(part, (y,)), sizes, axes)) for part in (torch.real, torch.imag))
        entry = np.broadcast_to(entry[..., None], terms.entry.shape)
        straight = Terms(terms.factor, terms.column, np.full(entry.shape, real), entry)
        crossed = Terms(terms.factor[..., ::-1] * [-1, 1], terms.column[..., ::-1], np.full(entry.shape, imag), entry)
        return heads._replace(runs=(heads.runs[0]._replace(terms=_added(straight, crossed)),))

    def _table(self, table: Table) -> int:
        if table not in self.tables:
            self.tables.append(table)
        return self.tables.index(table)

    def _add(self, node, input, other, alpha=1):
        a, b = self.values.get(input), self.values.get(other)
        if not (isinstance(a, Heads) and isinstance(b, Heads) and a._replace(runs=()) == b._replace(runs=())):
            return None
        if alpha != 1 or not equal(shape(input), shape(other)) or not _aligned([a, b]):
            return None
        runs = (x._replace(terms=_added(x.terms, y.terms)) for x, y in zip(a.runs, b.runs, strict=True))
        return a._replace(runs=tuple(runs))

    def _sub(self, node, input, other, alpha=1):
        b = self.values.get(other)
        if not isinstance(b, Heads) or alpha != 1:
            return None
        self.values[node] = self._scaled(other, -1.0)
        return self._add(node, input, node)

    def _of(self, x: Argument, change: Callable[[Terms], Terms], axes: tuple[str, ...] | None = None) -> Heads | None:
        """A tensor whose records are changed ones of x."""
        heads = self.values.get(x)
        if not isinstance(heads, Heads):
            return None
        runs = tuple(run._replace(terms=change(run.terms)) for run in heads.runs)
        return heads._replace(runs=runs, axes=heads.axes if axes is None else axes)

    def _view(self, x: Argument, change: Callable[[np.ndarray], np.ndarray], axes: tuple[str, ...]) -> Heads | None:
        return self._of(x, lambda terms: Terms(*map(change, terms)), axes)

    def _reshape(self, node, input, **_):
        heads = self.values.get(input)
        axes = _reshaped(heads, shape(input), shape(node)) if isinstance(heads, Heads) else None
        if axes is None:
            return None
        sizes = tuple(n for n, axis in zip(shape(node), axes, strict=True) if not axis)
        return self._view(input, lambda t: t.reshape(len(t), *sizes), axes)

    def _permute(self, node, input, **_):
        heads, dims = self.values.get(input), order(node)
        if not isinstance(heads, Heads) or dims is None:
            return None
        channels = [i for i, axis in enumerate(heads.axes) if not axis]
        places = [0, *(1 + channels.index(i) for i in dims if i in channels)]
        return self._view(input, lambda t: t.transpose(places), tuple(heads.axes[i] for i in dims))

    _transpose = _permute

    def _unsqueeze(self, node, input, dim):
        dim %= len(shape(node))
        index = (slice(None),) * dim + (None,)
        return self._getitem(node, input, index)

    def _squeeze(self, node, input, dim=None):
        heads = self.values.get(input)
        if not isinstance(dim, int) or not isinstance(heads, Heads) or len(shape(node)) == len(shape(input)):
            return None
        return self._getitem(node, input, (slice(None),) * (dim % len(shape(input))) + (0,))

    def _view_as_complex(self, node, input):
        return self.values.get(input)

    _view_as_real = _view_as_complex

    def _chunk(self, node, input, dim=0, **_):
        """Parts along an axis, of the sizes that the example has."""
        heads = self.values.get(input)
        parts = [tuple(t.shape) for t in node.meta["example_value"]]
        if not isinstance(heads, Heads) or not isinstance(dim, int):
            return None
        dim %= len(shape(input))
        ends = [0]
        for sizes in parts:
            ends.append(ends[-1] + sizes[dim])
        before = (slice(None),) * dim
        cuts = [(*before, slice(a, b)) for a, b in itertools.pairwise(ends)]
        return tuple(self._sliced(input, cut, sizes) for cut, sizes in zip(cuts, parts, strict=True))

    _split = _chunk

    def _unbind(self, node, input, dim=0):
        parts = node.meta["example_value"]
        before = (slice(None),) * (dim % len(shape(input)))
        return tuple(self._sliced(input, (*before, i), tuple(t.shape)) for i, t in enumerate(parts))

    def _getitem(self, node, input, index):
        found = self.values.get(input)
        if isinstance(found, tuple) and not isinstance(found, Heads):
            return found[index] if isinstance(index, int) else None
        return self._sliced(input, index if isinstance(index, tuple) else (index,), shape(node))

    def _sliced(self, x: fx.Node, index: tuple, sizes: tuple) -> Heads | None:
        """x[index] with these sizes; tokens may be sliced between runs, and within one that has no tables."""
        heads = self.values.get(x)
        plain = all(i is None or i is Ellipsis or isinstance(i, (int, slice)) for i in index)
        if not isinstance(heads, Heads) or value(x).is_complex() or not plain:
            return None
        if Ellipsis in index:
            place = index.index(Ellipsis)
            rest = len(shape(x)) - sum(i is not None for i in index) + 1
            index = (*index[:place], *(slice(None),) * rest, *index[place + 1 :])
        left, inside, axes, runs = list(heads.axes), [slice(None)], list[str](), heads.runs
        for i in index:
            axis = "" if i is None else left.pop(0)
            if axis == "B" and i != slice(None):
                return None
            if axis == "N" and i != slice(None):
                whole = isinstance(i, slice) and i.step in (None, 1)
                found = _tokens(runs, i, shape(x)[len(heads.axes) - len(left) - 1]) if whole else None
                if found is None:
                    return None
                runs = found
            if axis == "":
                if isinstance(i, slice) and not all(e is None or isinstance(e, int) for e in (i.start, i.stop, i.step)):
                    return None
                inside.append(i)
            if not isinstance(i, int):
                axes.append(axis)
        axes += left
        cut = tuple(inside)
        runs = tuple(run._replace(terms=Terms(*(t[cut] for t in run.terms))) for run in runs)
        new = heads._replace(axes=tuple(axes), runs=runs)
        return new if _fits(new, sizes) else None

    def _cat(self, node, tensors, dim=0):
        return self._joined(node, [self.values.get(t) for t in tensors], dim)

    def _stack(self, node, tensors, dim=0):
        dim %= len(shape(node))
        index = (slice(None),) * dim + (None,)
        sizes = (*shape(node)[:dim], 1, *shape(node)[dim + 1 :])
        return self._joined(node, [self._sliced(t, index, sizes) for t in tensors], dim)

    def _joined(self, node: fx.Node, parts: list, dim: int) -> Heads | None:
        if not all(isinstance(t, Heads) and t._replace(runs=()) == parts[0]._replace(runs=()) for t in parts):
            return None
        axes = parts[0].axes
        dim %= len(axes)
        if axes[dim] == "N":
            new = parts[0]._replace(runs=tuple(run for t in parts for run in t.runs))
            return new if all(known(a.stop == b.start) for a, b in itertools.pairwise(new.runs)) else None
        if axes[dim] == "B" or not _aligned(parts):
            return None
        place = 1 + sum(not axis for axis in axes[:dim])
        runs = []
        for same_tokens in zip(*(t.runs for t in parts), strict=True):
            most = max(len(run.terms.factor) for run in same_tokens)
            padded = [[_padded(t, most, -1 * (i == 2)) for i, t in enumerate(run.terms)] for run in same_tokens]
            terms = Terms(*(np.concatenate(t, place) for t in zip(*padded, strict=True)))
            runs.append(same_tokens[0]._replace(terms=terms))
        return parts[0]._replace(runs=tuple(runs))

    def rotation(self, heads: Heads, part: int, sizes: tuple[int, int], tokens: Any) -> Rotation | None:
        """Norm and rotation of queries (part 0), keys (1) or values (2) of [H, D] channels; None if another."""
        own: np.ndarray = np.arange(math.prod(sizes)).reshape(sizes) + part * math.prod(sizes)
        if heads.runs[0].terms.factor.shape[1:] != sizes or (heads.norm is not None and heads.norm[1] != sizes[1]):
            return None
        norm = None if heads.norm is None else heads.norm[0]
        runs = [(run, _is_plain(run.terms, own)) for run in heads.runs]
        if not (known(runs[0][0].start == 0) and known(runs[-1][0].stop == tokens)):
            return None
        prefix: Any = 0
        while runs and runs[0][1]:
            prefix = runs.pop(0)[0].stop
        if not runs:
            return Rotation(norm, None, 0)
        last: Any = 0  # tokens at the end
        while runs[-1][1]:
            run = runs.pop()[0]
            last += run.stop - run.start
        if not isinstance(last, int) or any(plain for _, plain in runs):
            return None
        D = own.shape[1]
        for pairs in (True, False, *(g for g in range(4, D, 2) if D % g == 0)):
            ropes = [rope for run, _ in runs if (rope := self._rope(run, own, pairs)) is not None]
            if len(ropes) == len(runs):
                cos, sin = (_extended(_cat([rope[i] for rope in ropes], -2), (0, 0, 0, last), 1.0 - i) for i in (0, 1))
                return Rotation(norm, (cos, sin, pairs), prefix)
        return None

    def _rope(self, run: RotaryRun, own: np.ndarray, pairs: bool | int) -> tuple[Argument, Argument] | None:
        """(cos, sin) of a run, or None if it is not rotated in such pairs."""
        D, (factor, column, table, entry) = own.shape[1], run.terms
        if D % 2:
            return None
        half = group_of(pairs, D) // 2
        first = np.arange(D) % (2 * half) < half
        other = own + np.where(first, half, -half)
        maps = []
        for source, sign in ((own, np.ones(D)), (other, np.where(first, -1.0, 1.0))):
            hits = (column == source) & (factor != 0)
            at = hits.argmax(0)[None]
            found = [np.take_along_axis(t, at, 0)[0] for t in (factor, table, entry)]
            turned = [np.where(hits.any(0), t, missing) for t, missing in zip(found, (sign, -1, 0), strict=True)]
            if (hits.sum(0) > 1).any() or (turned[0] != sign).any():
                return None
            maps.append((turned[1], turned[2], hits.any(0)))
        (straight, _, there), (crossed, _, turns) = maps
        known_terms = ((factor != 0).sum(0) == there.astype(int) + turns).all() and there.all()
        if not known_terms or ((straight >= 0) != turns).any() or ((crossed >= 0) != turns).any():
            return None
        cos, sin = (self._channels(*maps[i][:2], fill) for i, fill in ((0, 1.0), (1, 0.0)))
        return None if cos is None or sin is None else (cos, sin)

    def _channels(self, table: np.ndarray, entry: np.ndarray, fill: float) -> Argument:
        """The table [..., N, D] that has these entries for all heads, and `fill` for the last channels without any."""
        if (table != table[:1]).any():
            return None
        ends = [0, *(1 + np.flatnonzero(np.diff(table[0]))).tolist(), table.shape[1]]
        cuts = [(a, b) for a, b in itertools.pairwise(ends) if table[0, a] >= 0]
        parts = [_selected(self.tables[table[0, a]], entry[:, a:b]) for a, b in cuts]
        if any(part is None for part in parts) or cuts[0][0] != 0 or len(cuts) < len(ends) - 2:
            return None
        return _extended(_cat(parts, -1), (0, table.shape[1] - cuts[-1][1]), fill)


def _alike(a: Argument, b: Argument) -> bool:
    """True if two arguments are equal, or computed by the same calls."""
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, slice) and isinstance(b, slice):
        return _alike((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)) or a is b:
        return a is b or (not isinstance(a, fx.Node) and type(a) is type(b) and bool(a == b))
    calls = a.op in ("call_function", "call_method") and (a.op, a.target) == (b.op, b.target) and _name(a) in NAMES
    return calls and not _written(a) and not _written(b) and a.kwargs == b.kwargs and _alike(a.args, b.args)


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _written(node: fx.Node) -> bool:
    """True if an operator that reads a node may write into it."""
    return any(_name(user).endswith("_") or user.target in IN_PLACE for user in node.users)


def _unread(tables: Argument, inner: list[fx.Node]) -> list[fx.Node]:
    """What computes these tables and nothing else is read for."""
    gone, todo = dict.fromkeys(inner), list(operands(tables))
    found = []
    while todo:
        node = todo.pop()
        if node not in gone and _name(node) in NAMES and node.op != "placeholder" and gone.keys() >= node.users.keys():
            gone[node] = None
            found.append(node)
            todo += node.all_input_nodes
    return found


def _is_number(node: fx.Node) -> bool:
    """True for sizes and what is computed from them."""
    example = node.meta.get("example_value")
    return isinstance(example, (int, float, torch.SymInt, torch.SymFloat, torch.Size)) or _name(node)[:8] == "wrapped_"


def _fits(heads: Heads, sizes: tuple) -> bool:
    """True if a tensor with these records has these sizes."""
    if not heads.runs or len(sizes) != len(heads.axes):
        return False
    channels = iter(heads.runs[0].terms.factor.shape[1:])
    tokens: Any = sum(run.stop - run.start for run in heads.runs)
    wanted = [tokens if axis == "N" else size if axis else next(channels) for size, axis in zip(sizes, heads.axes)]  # noqa: B905
    return equal(tuple(wanted), sizes)


def _tokens(runs: tuple[RotaryRun, ...], cut: slice, length: Any) -> tuple[RotaryRun, ...] | None:
    """The tokens [start, stop) of runs; None if tokens that tables belong to are divided."""
    ends = []
    for end, default in ((cut.start, 0), (cut.stop, length)):
        end = end.meta.get("example_value") if isinstance(end, fx.Node) else end
        end = default if end is None else end
        ends.append(end if not isinstance(end, int) or end >= 0 else length + end)
    start, stop = ends
    found, first = [], 0
    for run in runs:
        last = first + run.stop - run.start
        if known(start <= first) and known(last <= stop):
            found.append(run)
        elif not (known(last <= start) or known(stop <= first)):
            if (run.terms.table >= 0).any():
                return None
            low = first if known(start <= first) else start
            high = last if known(last <= stop) else stop
            found.append(run._replace(start=run.start + low - first, stop=run.start + high - first))
        first = last
    return tuple(found)


def _aligned(parts: list[Heads]) -> bool:
    """True if all have the same tokens in the same runs."""
    ends = [tuple(end for run in part.runs for end in run[:2]) for part in parts]
    return all(equal(end, ends[0]) for end in ends)


def _added(a: Terms, b: Terms) -> Terms:
    return Terms(*(np.concatenate(pair) for pair in zip(a, b, strict=True)))


def _padded(array: np.ndarray, terms: int, fill: int) -> np.ndarray:
    return np.concatenate((array, np.full((terms - len(array), *array.shape[1:]), fill)))


def _reshaped(heads: Heads, before: tuple, after: tuple) -> tuple[str, ...] | None:
    """The axes after a reshape that keeps those of images and tokens; None for another."""
    axes, left = list[str](), list(after)
    for label, group in itertools.groupby(zip(heads.axes, before, strict=False), key=lambda pair: pair[0]):
        sizes = [size for _, size in group]  # neighbouring axes of channels are one
        if label:
            if not left or not known(left.pop(0) == sizes[0]):
                return None
            axes.append(label)
            continue
        if not all(isinstance(n, int) for n in sizes):
            return None
        product = 1
        while left and isinstance(left[0], int) and product * left[0] <= max(math.prod(sizes), product):
            product *= left.pop(0)
            axes.append("")
            if product == math.prod(sizes):
                break
        if product != math.prod(sizes):
            return None
    return None if left else tuple(axes)


def _is_plain(terms: Terms, own: np.ndarray) -> bool:
    """True if the channels are these columns themselves."""
    there = terms.factor != 0
    right = (terms.factor == 1) & (terms.column == own) & (terms.table < 0)
    return bool((there.sum(0) == 1).all() and (right == there).all())


def _extended(table: Argument, sizes: tuple[int, ...], fill: float) -> Argument:
    return PatternCall(F.pad, (table, sizes, "constant", fill)) if any(sizes) else table


def _cat(parts: list, dim: int) -> Argument:
    return parts[0] if len(parts) == 1 else PatternCall(torch.cat, (tuple(parts), dim))


def _selected(table: Table, entry: np.ndarray) -> Argument:
    """The channels of a table at entries [H, channels], with axes in the order [B, H, N, D]; None if not possible."""
    found, sizes, axes = table
    n = axes.index("N")
    rows = [i for i, axis in enumerate(axes[:n]) if not axis and sizes[i] != 1]
    by_head = bool((entry != entry[:1]).any())
    H, width = len(entry), math.prod(sizes[i] for i, axis in enumerate(axes) if not axis)
    if by_head:
        width //= H
        entry = entry - np.arange(H)[:, None] * width
        if (entry != entry[:1]).any() or (rows and rows != [n - 1]):
            return None
    elif rows:
        return None
    after = sizes[n + 1 :]
    if after[:1] == (H if by_head else 1,) and len(after) > 1 and not rows:  # [..., N, H, D]
        found = PatternCall(torch.transpose, (found, n, n + 1))
        if len(after) > 2:
            found = PatternCall(torch.flatten, (found, n + 2, -1))
    elif by_head and not rows:
        return None
    else:
        if len(after) > 1:
            found = PatternCall(torch.flatten, (found, n + 1, -1))
        if axes[0] == "B" and n == 1 and not known(sizes[0] == 1):
            found = PatternCall(torch.unsqueeze, (found, 1))
    return _taken(found, entry[0], width)


def _taken(table: Argument, entry: np.ndarray, width: int) -> Argument:
    """table[..., entry] for a table with this many channels; None for entries in no simple order."""
    D = len(entry)
    if (entry == entry[0] + np.arange(D)).all():
        return table if D == width else PatternCall(torch.narrow, (table, -1, int(entry[0]), D))
    if D % 2 == 0 and (entry[: D // 2] == entry[D // 2 :]).all():
        half = _taken(table, entry[: D // 2], width)
        return None if half is None else PatternCall(torch.cat, ((half, half), -1))
    if D % 2 == 0 and (entry[::2] == entry[1::2]).all():
        half = _taken(table, entry[::2], width)
        return None if half is None else PatternCall(torch.repeat_interleave, (half, 2, -1))
    return None
