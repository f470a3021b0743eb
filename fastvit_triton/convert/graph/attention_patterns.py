"""Attention in a graph by what it computes: softmax(scale · q kᵀ + bias) v, however it is spelled.

It is read upwards from the product with the values, by the identity of axes (see `graph.axes`): the two products may be
any of two tensors whose axes fit, the softmax may be over any axis, and views, casts to another floating-point dtype
and inactive dropout may stand anywhere. What is done to the scores S between the products is brought into the form
above:

    c · S, S / c     a number c becomes part of the scale; a tensor is moved to q, if it is the same for all keys, or to
                     k, if it is the same for all queries
    S + b            b becomes part of the bias, times what multiplies the sum
    S − max S        is S, as the softmax is the same
    f where m, else S
                     f = −inf: the bias is −inf where m, and NaN for queries without keys, as their softmax is
                     f < −1000: the same, but for queries without keys, for which S does not count: their q is 0,
                     and their bias what f + b is more than f
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ...kernels.attention import attention
from ...kernels.attention_qkv import attention_qkv
from .axes import Axes, Axis, Product, above, applied, arranged, broadcast, flat, fresh, leaves, product, regrouped
from .nodes import Argument, equal, kind, part_of, read, shape, value
from .patterns import Match, PatternCall, Reason
from .rotary_patterns import attention_of_packed

LOWEST = -1e3  # scores below it have no weight beside others
FUSED = "scaled_dot_product_attention"
PRODUCTS = "matmul", "bmm", "baddbmm", "einsum"
UNKNOWN = "its scores are not a product of two tensors"


class Factor(NamedTuple):
    """A tensor or a symbolic number by which scores are multiplied, or divided."""

    tensor: fx.Node
    axes: Axes
    divides: bool


class Term(NamedTuple):
    """A tensor that is added to the scores, times a number and factors."""

    tensor: Argument
    axes: Axes
    scale: float = 1.0
    factors: tuple[Factor, ...] = ()


class Fill(NamedTuple):
    """A mask of scores that are filled with a number where it is true, or where it is false if it `keeps`."""

    tensor: fx.Node
    axes: Axes
    keeps: bool
    filling: float


class Scores(NamedTuple):
    """What is done to the scores, the last first, and their product."""

    scale: float = 1.0
    factors: tuple[Factor, ...] = ()
    layers: tuple[Term | Fill, ...] = ()
    inner: tuple[fx.Node, ...] = ()
    product: Product | None = None


class Operand(NamedTuple):
    """A tensor with its axes, and the nodes passed over to reach it: views, and products with numbers."""

    tensor: fx.Node
    axes: Axes
    views: tuple[fx.Node, ...] = ()


class Core(NamedTuple):
    """An attention before its operands have the axes [B, H, N, D]; each is given with views of it from below."""

    q: list[Operand]
    k: list[Operand]
    v: list[Operand]
    keys: tuple[Axis, ...]
    channels: tuple[Axis, ...]
    scale: float | None
    inner: tuple[fx.Node, ...]
    factors: tuple[Factor, ...] = ()
    layers: tuple[Term | Fill, ...] = ()
    causal: bool = False


class Groups(NamedTuple):
    """The axes of an attention's operands: images, heads, queries, keys, channels of q and k, channels of v."""

    images: tuple[Axis, ...]
    heads: tuple[Axis, ...]
    queries: tuple[Axis, ...]
    keys: tuple[Axis, ...]
    channels: tuple[Axis, ...]
    outputs: tuple[Axis, ...]


class AttentionPattern(NamedTuple):
    """softmax(scale · q kᵀ + bias) v as matched in a graph."""

    q: Argument
    k: Argument
    v: Argument
    options: dict[str, Any]  # further arguments of `attention`
    bare: bool  # True if q and k are as they stand in the graph
    groups: Groups  # which axes are which of [B, H, N, D]
    views: list[fx.Node]  # nodes that were passed over above q, k and v


def attend(anchor: fx.Node) -> Iterator[Match | Reason]:
    """Matches of attention: with what its operands are views of, then with the operands themselves."""
    axes = fresh(shape(anchor))
    for upwards in (True, False):
        core = _core(anchor, axes, upwards)
        found = _pattern(core, axes) if isinstance(core, Core) else core
        if isinstance(core, Core) and isinstance(found, AttentionPattern):
            steps = arranged((*found.groups[:3], found.groups.outputs), axes)
            head_dim = _head_dim(found.groups)
            if steps is not None:
                yield Match(anchor, attention, found[:3], found.options, [*core.inner], found.views, steps, head_dim)
        elif isinstance(found, Reason):
            yield found


def attend_packed(anchor: fx.Node) -> Iterator[Match | Reason]:
    """Matches of attention with heads split from a packed projection and merged: [B, N, 3·H·D] → [B, N, H·D]."""
    axes = fresh(shape(anchor))
    node, of_core, merged = anchor, axes, []
    while kind(node) not in (FUSED, *PRODUCTS):
        if (found := above(node, of_core)) is None:
            return
        merged.append(node)
        node, of_core = found
    core = _core(node, of_core)
    pattern = _pattern(core, of_core) if isinstance(core, Core) else None
    if not isinstance(core, Core) or not isinstance(pattern, AttentionPattern) or not pattern.bare:
        return
    groups = pattern.groups
    H = math.prod(axis.size for axis in groups.heads)
    steps = arranged((groups.images, groups.queries, groups.heads + groups.outputs), axes)
    if steps is None or not isinstance(H, int):
        return
    options, inner = pattern.options, [*merged, node, *core.inner]
    if (packed := _packed(core, groups)) is not None:
        qkv, views = packed
        yield Match(anchor, attention_qkv, (qkv, H), options, inner, views, steps, _head_dim(groups))
    elif all(isinstance(t, fx.Node) and len(shape(t)) == 4 for t in pattern[:3]):
        rotated = attention_of_packed(pattern, node)
        if isinstance(rotated, str):
            yield Reason(node, rotated)
        elif rotated is not None:
            projection, positions, between = rotated
            inner, options = [*inner, *pattern.views, *between], options | positions
            yield Match(anchor, attention_qkv, (projection, H), options, inner, [], steps, _head_dim(groups))


def _head_dim(groups: Groups) -> int:
    widths = [math.prod(axis.size for axis in group) for group in (groups.channels, groups.outputs)]
    return max(w if isinstance(w, int) else 257 for w in widths)  # a symbolic width has no tile


def _core(node: fx.Node, axes: Axes, upwards: bool = True) -> Core | Reason | None:
    """The attention whose output, with these axes, is this node; None if it is not attention.

    With `upwards` its operands are also what they are views or multiples of, which may be computed in other modes.
    """
    if kind(node) == FUSED:
        return _fused(node, axes)
    found = product(node, axes)
    if not isinstance(found, Product) or (found.addend is not None and found.beta != 0) or found.alpha != 1:
        return None
    sides = (found.a, found.a_axes), (found.b, found.b_axes)
    for (weights, its_axes), values in (sides, sides[::-1]):
        read_off = _weights(weights, its_axes)
        if read_off is not None:
            softmax, of, inner, drops = read_off
            core = _written_out(softmax, of, values, found.over, inner, drops, upwards)
            return Reason(softmax, core) if isinstance(core, str) else core
    return None


def _fused(node: fx.Node, axes: Axes) -> Core | Reason:
    """A call of `F.scaled_dot_product_attention`."""
    arguments = read(node)
    q, k, v = (arguments[name] for name in ("query", "key", "value"))
    sizes = [shape(t)[:-2] for t in (q, k, v)]
    mask, causal = arguments.get("attn_mask"), arguments.get("is_causal", False) is not False
    if arguments.get("dropout_p", 0.0) != 0.0:
        return Reason(node, "it drops attention probabilities")
    if causal and (mask is not None or not equal(shape(q)[-2:-1], shape(k)[-2:-1])):
        # its first query is PyTorch's first key
        return Reason(node, "it is causal, and has a mask or other queries than keys")
    channels, keys = fresh(shape(q)[-1:]), fresh(shape(k)[-2:-1])
    outer, of_keys, full = axes[:-2], axes[:-2], shape(node)[:-2]
    scale = arguments.get("scale")
    if scale is not None and (scale := _number(scale, shape(q)[-1:])) is None:
        return Reason(node, "its scale is not a constant")
    if arguments.get("enable_gqa", False) is not False and not equal(sizes[0][-1:], sizes[1][-1:]):
        heads, groups = sizes[0][-1], sizes[1][-1]
        if not (isinstance(heads, int) and isinstance(groups, int)):
            return Reason(node, "its numbers of heads are not constants")
        shared = regrouped(outer[-1], (groups, heads // groups)) or ((), ())
        of_keys, full = (*outer[:-1], shared[0]), (*full[:-1], groups)
    parts = [broadcast(outer, sizes[0], shape(node)[:-2]), *(broadcast(of_keys, size, full) for size in sizes[1:])]
    layers: tuple[Term | Fill, ...] = ()
    if mask is not None:
        of_mask = broadcast((*outer, axes[-2], *keys), shape(mask), (*shape(node)[:-1], *shape(k)[-2:-1]))
        parts.append(of_mask)
        layers = (Term(mask, of_mask or ()),)
    if any(part is None for part in parts):
        return Reason(node, "its tensors do not broadcast to [B, H, N, D]")
    of_q, of_k, of_v = (part or () for part in parts[:3])
    operands = (
        [Operand(q, (*of_q, axes[-2], *channels))],
        [Operand(k, (*of_k, *keys, *channels))],
        [Operand(v, (*of_v, *keys, axes[-1]))],
    )
    return Core(*operands, flat(keys), flat(channels), scale, (), layers=layers, causal=causal)


def _weights(node: Argument, axes: Axes) -> tuple[fx.Node, Axes, list[fx.Node], bool] | None:
    """(softmax, its axes, nodes from there to this one, whether any drops probabilities); None if there is none."""
    inner: list[fx.Node] = []
    drops = False
    while _softmax(node) is None:
        if kind(node) == "dropout":
            drops = drops or above(node, axes) is None
            source, above_it = read(node)["input"], axes
        elif (found := above(node, axes, casts=True)) is not None:
            source, above_it = found
        else:
            return None
        inner.append(node)
        node, axes = source, above_it
    return node, axes, inner, drops


def _softmax(node: Argument) -> tuple[Argument, int, list[fx.Node]] | None:
    """(scores, axis, inner nodes) of a softmax, which may be written as exp(S) / Σ exp(S); None for other nodes."""
    dim: object
    if kind(node) == "softmax":
        scores, dim, inner = read(node)["input"], read(node).get("dim"), []
    elif kind(node) == "div" and kind(exp := read(node)["input"]) == "exp" and kind(read(node)["other"]) == "sum":
        total = read(node)["other"]
        arguments = read(total)
        dim = arguments.get("dim")
        dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
        if arguments["input"] is not exp or arguments.get("keepdim") is not True or "dtype" in arguments:
            return None
        scores, inner = read(exp)["input"], [exp, total]
    else:
        return None
    return (scores, dim % len(shape(node)), inner) if isinstance(dim, int) and shape(node) else None


def _written_out(
    softmax: fx.Node,
    axes: Axes,
    values: tuple[fx.Node, Axes],
    over: tuple[Axis, ...],
    inner: list[fx.Node],
    drops: bool,
    upwards: bool,
) -> Core | str:
    """The attention with the probabilities of a softmax, which are summed with values over the axes `over`."""
    scores, dim, parts = _softmax(softmax) or (None, 0, [])
    dtypes = [t.dtype for t in (value(scores), value(softmax)) if t is not None]
    if drops:
        return "it drops attention probabilities"
    if leaves(axes[dim]) != leaves(over):
        return "its probabilities are summed over another axis than that of the softmax"
    if len(dtypes) < 2 or dtypes[1] not in (dtypes[0], torch.float32):
        return "its softmax is computed in another dtype"
    found = _scores(scores, axes, axes[dim], Scores(inner=(*inner, softmax, *parts)))
    if isinstance(found, str):
        return found
    assert found.product is not None
    a, b = (found.product.a, found.product.a_axes), (found.product.b, found.product.b_axes)
    keys, channels = leaves(over), leaves(found.product.over)
    (q, of_q), (k, of_k) = (b, a) if not set(keys).isdisjoint(flat(a[1])) else (a, b)
    if not set(keys).isdisjoint(flat(of_q)):
        return "its keys are not those of one tensor"
    q_scale, queries = _passed(q, of_q) if upwards else (1.0, [Operand(q, of_q)])
    k_scale, of_keys = _passed(k, of_k) if upwards else (1.0, [Operand(k, of_k)])
    of_values = _passed(*values, factors=False)[1] if upwards else [Operand(*values)]
    scale = found.scale * q_scale * k_scale
    return Core(queries, of_keys, of_values, keys, channels, scale, found.inner, found.factors, found.layers)


def _passed(node: fx.Node, axes: Axes, factors: bool = True) -> tuple[float, list[Operand]]:
    """(product of the numbers that multiply a tensor, that tensor and what it is a view of)."""
    scale, views = 1.0, []
    found = [Operand(node, axes)]
    while True:
        number = _scaled(node) if factors else None
        source = above(node, axes)
        if number is not None:
            source, scale, found = (number[0], axes), scale * number[1], []
        if source is None:
            return scale, found
        views.append(node)
        node, axes = source
        found.append(Operand(node, axes, tuple(views)))


def _scaled(node: Argument) -> tuple[fx.Node, float] | None:
    """(tensor, number) whose product a node is; None for other nodes."""
    if kind(node) not in ("mul", "div") or read(node).get("rounding_mode") is not None:
        return None
    a, b = read(node)["input"], read(node)["other"]
    if value(a) is None and kind(node) == "mul":
        a, b = b, a
    number = None if value(a) is None else _number(b, shape(a)[-1:])
    if number is None or number == 0 or value(a).dtype != value(node).dtype:
        return None
    return a, number if kind(node) == "mul" else 1 / number


def _number(argument: Argument, width: tuple = ()) -> float | None:
    """A number, also one that is computed from the width of heads, which is then a constant of the graph; or None."""
    if isinstance(argument, (int, float)):
        return argument
    example = argument.meta.get("example_value") if isinstance(argument, fx.Node) else None
    if not isinstance(example, (torch.SymInt, torch.SymFloat)):
        return None
    of_width = {symbol for size in width if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols}
    return float(example) if example.node.expr.free_symbols <= of_width else None


def _constant(argument: Argument) -> float | None:
    """The value of a number, or of a tensor made of one; None for others."""
    if kind(argument) == "constant":
        argument = read(argument)["value"]
    return argument if isinstance(argument, (int, float)) else None


def _scores(node: Argument, axes: Axes, keys: tuple[Axis, ...], done: Scores) -> Scores | str:
    """What is done to the product of queries and keys to make this node; a reason (str) for other nodes."""
    name = kind(node)
    if value(node) is None:
        return UNKNOWN
    done = done._replace(inner=(*done.inner, node))
    if (source := above(node, axes, casts=True)) is not None:
        return _scores(*source, keys, done)
    if name in ("masked_fill", "where"):
        return _filled(node, axes, keys, done)
    if name in ("add", "sub", "mul", "div"):
        return _computed(node, axes, keys, done)
    found = product(node, axes)
    if not isinstance(found, Product):
        return found or UNKNOWN
    beta, alpha = (_number(number, shape(found.a)[-1:]) for number in (found.beta, found.alpha))
    if found.addend is not None and beta != 0:
        of_addend = broadcast(axes, shape(found.addend), shape(node))
        if beta is None or of_addend is None:
            return UNKNOWN
        term = Term(found.addend, of_addend, done.scale * beta, done.factors)
        done = done._replace(layers=(*done.layers, term))
    if alpha is None:
        return done._replace(product=found, factors=(*done.factors, Factor(found.alpha, (), False)))
    return done._replace(product=found, scale=done.scale * alpha)


def _computed(node: fx.Node, axes: Axes, keys: tuple[Axis, ...], done: Scores) -> Scores | str:
    """`_scores` for a sum or a product of scores and something else."""
    name, arguments = kind(node), read(node)
    if arguments.get("alpha", 1) != 1 or arguments.get("rounding_mode") is not None:
        return UNKNOWN
    pair = arguments["input"], arguments["other"]
    reasons = []
    for scores, other in (pair, pair[::-1])[: 2 if name in ("add", "mul") else 1]:
        if value(scores) is None or not equal(shape(scores), shape(node)):
            continue
        changed = _with(name, node, scores, other, axes, keys, done)
        found = changed if isinstance(changed, str) else _scores(scores, axes, keys, changed)
        if not isinstance(found, str):
            return found
        reasons.append(found)
    return next((reason for reason in reasons if reason != UNKNOWN), UNKNOWN)


def _with(
    name: str | None, node: fx.Node, scores: fx.Node, other: Argument, axes: Axes, keys: tuple[Axis, ...], done: Scores
) -> Scores | str:
    """What is done to scores, with the sum or product of them and another argument before it."""
    number = _number(other)
    symbol = isinstance(other, fx.Node) and isinstance(other.meta.get("example_value"), (torch.SymInt, torch.SymFloat))
    if number is None and value(other) is None and not symbol:
        return UNKNOWN
    of_other = () if number is not None else broadcast(axes, shape(other), shape(node))
    if of_other is None:
        return UNKNOWN
    constant = set(leaves(keys)).isdisjoint(flat(of_other))
    if name in ("mul", "div"):
        if number == 0:
            return "it multiplies its scores by 0"
        if number is not None:
            return done._replace(scale=done.scale * number if name == "mul" else done.scale / number)
        factor = Factor(other, of_other, name == "div")
        return done._replace(factors=(*done.factors, factor))
    if number is not None or symbol:
        return done if symbol or math.isfinite(number or 0) else UNKNOWN  # the softmax is the same
    if name == "sub" and constant and (maximum := _maximum(other)):
        return done._replace(inner=(*done.inner, *maximum))
    sign = -1.0 if name == "sub" else 1.0
    return done._replace(layers=(*done.layers, Term(other, of_other, sign * done.scale, done.factors)))


def _maximum(node: fx.Node) -> list[fx.Node]:
    """The nodes that compute a maximum down to this one; none if it is something else."""
    inner = [node]
    while kind(inner[-1]) in ("detach", "getitem", "attribute"):
        source = read(inner[-1])["input"]
        *_, item = read(inner[-1]).values()
        if kind(source) == "max" and value(source) is None and item not in (0, "values"):
            return []  # its indices
        inner.append(source)
    return inner if kind(inner[-1]) in ("amax", "max") else []


def _filled(node: fx.Node, axes: Axes, keys: tuple[Axis, ...], done: Scores) -> Scores | str:
    """`_scores` for scores that are filled with a number where a mask says so."""
    arguments = read(node)
    if kind(node) == "masked_fill":
        scores, mask, filling, keeps = arguments["input"], arguments["mask"], arguments["value"], False
    else:
        keeps = _constant(arguments.get("other")) is not None
        scores, filling = (arguments.get(name) for name in (("input", "other") if keeps else ("other", "input")))
        mask = arguments["condition"]
    number = _constant(filling)
    of_mask = broadcast(axes, shape(mask), shape(node))
    if number is None:
        return "it fills its scores with what is not a constant"
    if value(mask) is None or value(mask).dtype != torch.bool or of_mask is None:
        return "it fills its scores by a mask of another kind"
    if not (number * done.scale < LOWEST) or done.factors:
        return f"it fills its scores with {number}, which is not negligible"
    if value(scores) is None or not equal(shape(scores), shape(node)):
        return UNKNOWN
    number *= done.scale
    finite = number != -math.inf
    before = [layer for layer in done.layers if isinstance(layer, Fill)]
    if before and (any(fill.filling != number for fill in before) or (finite and done.layers[-1] is not before[-1])):
        return "it fills its scores more than once"
    fill = Fill(mask, of_mask, keeps, number)
    return _scores(scores, axes, keys, done._replace(layers=(*done.layers, fill)))


def _pattern(core: Core, axes: Axes) -> AttentionPattern | Reason:
    """An attention with operands [B, H, N, D]; a reason if its axes do not allow it."""
    of_q, of_k, of_v = (set(flat(operands[0].axes)) for operands in core[:3])
    keys, channels = leaves(core.keys), leaves(core.channels)
    result = flat(axes)
    outputs = tuple(axis for axis in result if axis in of_v and axis not in of_q | of_k)
    batch = [axis for axis in result if axis in of_k or (axis in of_v and axis not in outputs)]
    queries = tuple(axis for axis in result if axis not in {*outputs, *batch})
    node = next((n for n in core.inner if _softmax(n) is not None), core.q[0].tensor)
    if not of_q | of_k | of_v <= {*keys, *channels, *result}:
        return Reason(node, "it sums over other axes than those of keys and channels")
    found, reason = [], None
    for heads in range(len(batch) + 1):
        groups = Groups(tuple(batch[:heads]), tuple(batch[heads:]), queries, keys, channels, outputs)
        cost, pattern = _arranged(core, groups)
        if isinstance(pattern, str):
            reason = pattern
        else:
            found.append((cost, heads != 1, heads, pattern))
    if not found:
        return Reason(node, reason or UNKNOWN)
    return min(found, key=lambda item: item[:3])[-1]


def _arranged(core: Core, groups: Groups) -> tuple[int, AttentionPattern | str]:
    """(number of calls that give its operands the axes [B, H, N, D], the attention); a reason if there are none."""
    images, heads, queries, keys, channels, outputs = groups
    tensors: list[Argument] = []
    views: list[fx.Node] = []
    cost = 0
    wanted = (queries, channels), (keys, channels), (keys, outputs)
    shared = [False, False, False]
    for i, (operands, own) in enumerate(zip(core[:3], wanted, strict=True)):
        options = [(arranged(operand.axes, (images, heads, *own)), operand) for operand in operands]
        possible = [(steps, operand) for steps, operand in options if steps is not None]
        if not possible:
            return 0, "its axes cannot be brought into the order [B, H, N, D]"
        steps, operand = min(possible, key=lambda option: len(option[0]))
        cost += len(steps)
        views += operand.views
        tensors.append(applied(steps, operand.tensor))
        present = set(flat(operand.axes))
        shared[i] = any(group and present.isdisjoint(group) for group in (images, heads))
    if any(shared):
        if all(shared):
            return 0, "none of its tensors has all images and heads"
        like = tensors[shared.index(False)]
        tensors = [PatternCall(_for_all, (t, like)) if s else t for t, s in zip(tensors, shared, strict=True)]
        cost += 10
    biases = _biases(core, groups)
    if isinstance(biases, str):
        return 0, biases
    arguments, empty = biases
    q, k, v = tensors
    for factor in core.factors:
        of = set(flat(factor.axes))
        if of.isdisjoint(keys):
            q = _times(q, factor, groups, queries)
        elif of.isdisjoint(queries):
            k = _times(k, factor, groups, keys)
        else:
            return 0, "it multiplies its scores by a tensor with the axes of queries and keys"
        if q is None or k is None:
            return 0, "the axes of its scale cannot be brought into the order [B, H, N, D]"
    if empty is not None:
        q = PatternCall(_without, (q, empty))
    arguments |= dict(scale=core.scale) | (dict(causal=True) if core.causal else {})
    bare = not core.factors and empty is None and not any(shared)
    return cost, AttentionPattern(q, k, v, arguments, bare, groups, views)


def _times(t: Argument, factor: Factor, groups: Groups, tokens: tuple[Axis, ...]) -> PatternCall | None:
    """Queries or keys [B, H, N, D] times a factor."""
    if value(factor.tensor) is None:
        return PatternCall(_multiplied, (t, factor.tensor, factor.divides))
    steps = arranged(factor.axes, (groups.images, groups.heads, tokens, ()))
    return None if steps is None else PatternCall(_multiplied, (t, applied(steps, factor.tensor), factor.divides))


def _biases(core: Core, groups: Groups) -> tuple[dict[str, Any], Argument] | str:
    """(the arguments `bias` or `axis_bias`, a mask [B, H, Nq, Nk] whose queries without keys see all keys, or None)."""
    dtype = value(core.q[0].tensor).dtype
    if len(core.layers) == 2 and (axes := _axis_bias(core, groups)) is not None:
        return dict(axis_bias=axes), None
    bias: Argument = None
    empty: Argument = None
    masks: Argument = None
    filling = 0.0
    for layer in reversed(core.layers):
        t = _grouped(layer.tensor, layer.axes, groups)
        if t is None:
            return "its mask does not broadcast to [B, H, Nq, Nk]"
        if isinstance(layer, Fill):
            t = PatternCall(torch.logical_not, (t,)) if layer.keeps else t
            masks = t if masks is None else PatternCall(torch.logical_or, (masks, t))
            filling = layer.filling
            bias = PatternCall(_masked, (bias, masks, dtype, math.nan if filling == -math.inf else filling))
            empty = None if filling == -math.inf else masks
            continue
        of = value(layer.tensor).dtype
        if of == torch.bool and not core.inner:  # of `F.scaled_dot_product_attention`: True keeps a key
            return dict(bias=t), None
        if of == torch.float64 != dtype:
            return "it adds a tensor of float64 to scores of another dtype"
        if not of.is_floating_point or of != torch.float64 == dtype:
            t = PatternCall(_cast, (t, dtype))
        if layer.scale != 1:
            t = PatternCall(torch.mul, (t, layer.scale))
        for factor in layer.factors:
            f = _grouped(factor.tensor, factor.axes, groups) if value(factor.tensor) is not None else factor.tensor
            if f is None:
                return "its mask does not broadcast to [B, H, Nq, Nk]"
            t = PatternCall(_multiplied, (t, f, factor.divides))
        bias = t if bias is None else PatternCall(torch.add, (bias, t))
    if empty is not None:
        bias = PatternCall(_shifted, (bias, empty, filling))
    return {} if bias is None else dict(bias=bias), empty


def _grouped(tensor: Argument, axes: Axes, groups: Groups) -> Argument:
    """A tensor as it is added to scores [B, H, Nq, Nk]; it may have the last ones of the axes of images alone."""
    images = tuple(axis for axis in groups.images if axis in flat(axes))
    if images != groups.images[len(groups.images) - len(images) :]:
        images = groups.images
    steps = arranged(axes, (images, groups.heads, groups.queries, groups.keys))
    return None if steps is None else applied(steps, tensor)


def _axis_bias(core: Core, groups: Groups) -> tuple[Argument, Argument] | None:
    """The two tensors added to the scores, if one is for rows and one for columns of a map of keys; None if not."""
    found: dict[bool, Argument] = {}
    for layer in core.layers:
        of = flat(layer.axes)
        mine = tuple(axis for axis in groups.keys if axis in of)
        is_row = mine == groups.keys[: len(mine)]
        steps = arranged(layer.axes, (*groups[:3], mine))
        whole = {*groups.images, *groups.heads, *groups.queries} <= set(of) and 0 < len(mine) < len(groups.keys)
        plain = isinstance(layer, Term) and layer.scale == 1 and not layer.factors
        if not whole or not plain or steps is None or not (is_row or mine == groups.keys[-len(mine) :]):
            return None
        found[is_row] = applied(steps, layer.tensor)
    sizes = sum(axis in flat(layer.axes) for layer in core.layers for axis in groups.keys)
    return (found[True], found[False]) if len(found) == 2 and sizes == len(groups.keys) else None


def _packed(core: Core, groups: Groups) -> tuple[Argument, list[fx.Node]] | None:
    """(packed projection [B, N, 3·H·D], ordered as [3, H, D], of which q, k and v are parts; nodes passed over)."""
    images, heads, queries, keys, channels, outputs = groups
    sources = []
    views: list[fx.Node] = []
    for i, (operands, own) in enumerate(
        zip(core[:3], ((queries, channels), (keys, channels), (keys, outputs)), strict=True)
    ):
        tokens, width = own
        found = _part(operands[-1], i)
        steps = [(node, arranged(axes, (images, tokens, (third, *heads, *width)))) for third, node, axes in found[0]]
        # a permutation would be a copy
        sources.append({n: tuple(s) for n, s in steps if s is not None and torch.permute not in dict(s)})
        views += [*operands[-1].views, *found[1]]
    common = [node for node in sources[0] if all(source.get(node) == sources[0][node] for source in sources)]
    if not common:
        return None
    node = min(common, key=lambda n: len(sources[0][n]))
    return applied(sources[0][node], node), views


def _part(operand: Operand, number: int) -> tuple[list[tuple[Axis, fx.Node, Axes]], list[fx.Node]]:
    """([(axis of three parts, tensor whose part of this number an operand is, its axes)], nodes passed over)."""
    node, axes = operand.tensor, operand.axes
    third: Axis | None = None
    found: list[tuple[Axis, fx.Node, Axes]] = []
    passed: list[fx.Node] = []
    while True:
        source: tuple[fx.Node, Axes] | None = above(node, axes)
        if source is None and third is None:
            selected = _selected(node, axes, number)
            if selected is not None:
                third, tensor, of_tensor, between = selected
                source = tensor, of_tensor
                passed += between
        if source is None:
            return found, passed
        passed.append(node)
        node, axes = source
        if third is not None:
            found.append((third, node, axes))


def _selected(node: fx.Node, axes: Axes, number: int) -> tuple[Axis, fx.Node, Axes, list[fx.Node]] | None:
    """(axis of three parts, tensor, its axes, nodes between) if a node is the part of this number of a tensor."""
    part = part_of(node, 3)
    if part is None or part[2] != number:
        return None
    third, (tensor, dim, _, alone, between) = Axis(3), part
    rest = ((third,), *axes[dim:]) if alone else ((third, *axes[dim]), *axes[dim + 1 :])
    return third, tensor, (*axes[:dim], *rest), between


def _for_all(t: Tensor, like: Tensor) -> Tensor:
    """A tensor [1 or B, 1 or H, N, D] for all images and heads of another."""
    return t.expand(*like.shape[:2], -1, -1)


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.to(dtype)


def _multiplied(t: Tensor, factor: Tensor, divides: bool) -> Tensor:
    """A tensor times a factor, or divided by it, in the tensor's dtype."""
    return (t / factor if divides else t * factor).to(t.dtype)


def _masked(bias: Tensor | None, mask: Tensor, dtype: torch.dtype, empty: float) -> Tensor:
    """A bias that is −inf where the mask is true, and `empty` for queries whose keys are all masked."""
    bias = torch.zeros((), dtype=dtype, device=mask.device) if bias is None else bias
    return torch.where(mask.all(-1, keepdim=True), empty, torch.where(mask, -math.inf, bias))


def _shifted(bias: Tensor, mask: Tensor, filling: float) -> Tensor:
    """A bias less a number for queries whose keys are all masked, so that it is near 0."""
    return torch.where(mask.all(-1, keepdim=True), bias - filling, bias)


def _without(q: Tensor, mask: Tensor) -> Tensor:
    """Queries [B, H, N, D], and 0 for those whose keys are all masked."""
    return q.masked_fill(mask.all(-1, keepdim=True), 0)


def why_not_attention(softmax: fx.Node) -> str:
    """Why the softmax that no product of attention was found to read is not fused."""
    nodes = [softmax]
    for node in nodes:
        for user in node.users:
            if above(user, fresh(shape(user)), casts=True) is not None or kind(user) == "dropout":
                nodes.append(user)
            elif user.op != "output" and kind(user) not in PRODUCTS:
                return f"its probabilities are read by {getattr(user.target, '__name__', user.target)}"
    return "its probabilities are not summed with values"


def why_not_expanded(node: fx.Node) -> str | None:
    """Why a call of `F.multi_head_attention_forward` is not rewritten; None if it may be."""
    arguments = read(node)
    query = arguments["query"]
    E = arguments["embed_dim_to_check"]
    weight = arguments["in_proj_weight"]
    if len(shape(query)) != 3 or weight is None:
        return "its queries have not the axes [N, B, D], or it has separate projections"
    if any(arguments.get(name) is not None for name in ("bias_k", "static_k", "static_v")):
        return "it has keys or values of its own"
    masks = [m for name in ("attn_mask", "key_padding_mask") if (m := arguments.get(name)) is not None]
    dtypes = {value(m).dtype for m in masks}
    if any(len(shape(m)) != 2 for m in masks) or len(dtypes) > 1 or not dtypes <= {torch.bool, value(query).dtype}:
        return "its masks have not the axes [Nq, Nk] and [B, Nk], or another dtype"
    if arguments.get("is_causal") and arguments.get("attn_mask") is None:
        return "it is causal without a mask"
    if arguments.get("add_zero_attn") or arguments.get("use_separate_proj_weight"):
        return "it has separate projections, or added keys"
    if arguments["dropout_p"] != 0 and arguments.get("training", True):
        return "it drops attention probabilities"
    if any(kind(user) != "getitem" or read(user)["index"] != 0 for user in node.users):
        return "its attention weights are used"
    if not isinstance(E, int) or not equal(shape(weight), (3 * E, E)):
        return "its projection is not one of [3, H, D]"
    return None
