"""Attention patterns: scaled_dot_product_attention or written-out softmax, with or without the split of heads."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ...kernels.attention import attention
from ...kernels.attention_qkv import attention_qkv
from .nodes import Argument, equal, kind, known, order, read, shape, up, value
from .patterns import Call, Match
from .rotary_patterns import attention_of_packed


class AttentionPattern(NamedTuple):
    """softmax(scale · q kᵀ + bias) v as matched in a graph; `axis_bias` as in `attention_of_axes`."""

    q: fx.Node
    k: fx.Node
    v: fx.Node
    bias: fx.Node | Call | None
    scale: float | None
    inner: list[fx.Node]
    axis_bias: tuple[Call, Call] | None = None
    causal: bool = False

    @property
    def mask(self) -> dict[str, bool]:
        """The argument that makes a call causal, or none."""
        return dict(causal=True) if self.causal else {}


class Scores(NamedTuple):
    """Scores written out: scale · q kᵀ with what is added to it."""

    q: fx.Node
    k: fx.Node
    scale: float
    bias: fx.Node | None
    windows: fx.Node | None
    axis_bias: tuple[Call, Call] | None


def attention_of_axes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    axis_bias: tuple[Tensor, Tensor] | None = None,
    causal: bool = False,
) -> Tensor:
    """`attention` for tensors with three axes [B, N, D] or five [B, H, W, N, D]; returns [B, Nq, Dv] or [B, H, W, …].

    Args:
        q: queries.
        k: keys.
        v: values.
        scale: as in `attention`.
        axis_bias: for three axes, (row [B, Nq, h], column [B, Nq, w]).
        causal: as in `attention`.
    """
    if q.dim() == 3:
        axes = None if axis_bias is None else (axis_bias[0].unsqueeze(1), axis_bias[1].unsqueeze(1))
        q, k, v = (t.unsqueeze(1) for t in (q, k, v))
        return attention(q, k, v, scale=scale, axis_bias=axes, causal=causal).squeeze(1)
    sizes = q.shape[1:3]
    q, k, v = (t.flatten(1, 2) for t in (q, k, v))
    return attention(q, k, v, scale=scale, causal=causal).unflatten(1, sizes)


attention_of_axes.__name__ = "attention"  # in reports


def attend(anchor: fx.Node) -> Iterator[Match | str]:
    """Matches of attention: scaled_dot_product_attention, or matmul, softmax, matmul."""
    pattern = _attention(anchor)
    if isinstance(pattern, AttentionPattern) and len(shape(pattern.q)) == 4:
        options = dict(bias=pattern.bias, scale=pattern.scale) | pattern.mask
        yield Match(anchor, attention, pattern[:3], options, pattern.inner, _head_dim(pattern))
    elif isinstance(pattern, AttentionPattern):
        axes = dict(scale=pattern.scale, axis_bias=pattern.axis_bias) | pattern.mask
        yield Match(anchor, attention_of_axes, pattern[:3], axes, pattern.inner, _head_dim(pattern))
    elif pattern is not None:
        yield pattern


def attend_packed(anchor: fx.Node) -> Iterator[Match | str]:
    """Matches of attention with heads split from a packed projection and merged: [B, N, 3·H·D] → [B, N, H·D]."""
    inner: list[fx.Node] = []
    if kind(anchor) != "reshape" or len(shape(anchor)) != 3:
        return
    merged = up(read(anchor)["input"], inner)
    if order(merged) != (0, 2, 1, 3):
        return
    core = up(read(merged)["input"], inner)
    pattern = _attention(core) if isinstance(core, fx.Node) else None
    if not isinstance(pattern, AttentionPattern) or len(shape(pattern.q)) != 4:
        return
    skipped = list(inner)
    B, H, N, D = shape(pattern.q)
    split, heads = _unpacked(pattern, inner), dict[str, Any]()
    if split is None and (found := attention_of_packed(pattern, core)) is not None:
        if isinstance(found, str):
            yield found
            return
        split, heads, inner = found[0], found[1], [*found[2], *skipped]
    if split is not None and equal(shape(split), (B, N, 3 * H * D)) and equal(shape(anchor), (B, N, H * D)):
        options = dict(bias=pattern.bias, scale=pattern.scale) | pattern.mask | heads
        inner += [merged, core, *pattern.inner]
        yield Match(anchor, attention_qkv, (split, H), options, inner, _head_dim(pattern))


def _head_dim(pattern: AttentionPattern) -> int:
    widths = [shape(t)[-1] for t in (pattern.q, pattern.v)]
    return max(w if isinstance(w, int) else 257 for w in widths)  # a symbolic width has no tile


def _attention(node: fx.Node) -> AttentionPattern | str | None:
    """The attention whose output is this node; a reason (str) if it is unsupported; None if it is not attention."""
    causal = False
    if kind(node) == "scaled_dot_product_attention":
        arguments = read(node)
        inner: list[fx.Node] = []
        q, k, v = (arguments[name] for name in ("query", "key", "value"))
        bias = arguments.get("attn_mask")
        windows: fx.Node | Call | None = None
        axes = None
        scale = arguments.get("scale")
        if arguments.get("dropout_p", 0.0) != 0.0:
            return "it drops attention probabilities"
        if arguments.get("enable_gqa", False) is not False:
            return "it uses grouped-query attention"
        causal = arguments.get("is_causal", False) is not False
        if causal and (bias is not None or not equal(shape(q)[-2:-1], shape(k)[-2:-1])):
            return "it is causal, and has a mask or other queries than keys"  # whose first is PyTorch's first key
    elif kind(node) == "matmul":
        parts = _written_out(node)
        if parts is None:
            return None
        scores, v, inner = parts
        q, k, scale, bias, windows, axes = scores
    else:
        return None
    if not (scale is None or isinstance(scale, (int, float))):
        return "its scale is not a constant"
    sizes = [shape(t) for t in (q, k, v)]
    if len({len(s) for s in sizes}) > 1 or not 3 <= len(sizes[0]) <= 5:
        return "its tensors have no axes [B, H, N, D]"
    (*outer, Nq, D), (*_, Nk, _), (*_, Dv) = sizes
    if not (equal(sizes[1], (*outer, Nk, D)) and equal(sizes[2], (*outer, Nk, Dv))):
        return "its keys or values are broadcast"
    if len(outer) != 2:
        if bias is not None or windows is not None:
            return "its tensors have no axes [B, H, N, D], and it has a mask"
        return AttentionPattern(q, k, v, None, scale, inner, axes, causal)
    B, H = outer
    summands = [t for t in (bias, windows) if t is not None]
    if kind(node) == "matmul" and not all(_is_float(t, like=q) for t in summands):
        return "it adds a tensor that is not of a floating-point dtype to the scores"  # a boolean bias is a mask
    if bias is not None:
        bias = _bias(bias, (B, H, Nq, Nk))
        if bias is None:
            return "its mask does not broadcast to [B, H, Nq, Nk]"
    if windows is not None:
        windows = Call(torch.flatten, (windows, 0, 1))  # [W, 1, Nq, Nk]: image b of the batch is in window b mod W
        bias = windows if bias is None else Call(torch.add, (bias, windows))
    return AttentionPattern(q, k, v, bias, scale, inner, causal=causal)


def _written_out(node: fx.Node) -> tuple[Scores, fx.Node, list[fx.Node]] | None:
    """Matches dropout(softmax(scale · q kᵀ + bias)) v with inactive dropout: (scores, v, nodes skipped).

    If all keys of a row are masked by −inf, the written-out form gives NaN, and the kernel gives 0.
    """
    inner: list[fx.Node] = []
    weights = read(node)["input"]
    v = read(node)["other"]
    weights = up(weights, inner)
    if kind(weights) == "to":  # a softmax in float32 is cast back
        inner.append(weights)
        weights = up(read(weights)["input"], inner)
    if kind(weights) != "softmax" or read(weights).get("dim") not in (-1, len(shape(weights)) - 1):
        return None
    inner.append(weights)
    scores = up(read(weights)["input"], inner)
    if value(scores) is None or value(weights).dtype not in (value(scores).dtype, torch.float32):
        return None
    scores, windows = _windows(scores, inner)
    scores, axis_bias = _decomposed(scores, inner)
    scale, bias = 1.0, None
    if kind(scores) == "add" and read(scores).get("alpha", 1) == 1:
        inner.append(scores)
        a = read(scores)["input"]
        b = read(scores)["other"]
        above: list[fx.Node] = []
        if _product(a, above) is not None and equal(shape(a), shape(scores)):
            scores, bias = a, b
        else:
            scores, bias = b, a
    factored = _product(scores, inner)
    if factored is None or not equal(shape(scores), shape(weights)):
        return None
    product, scale = factored
    inner.append(product)
    q = read(product)["input"]
    kt = read(product)["other"]
    q = _scaled_by(q, inner)
    kt = _scaled_by(kt, inner)
    scale *= q[1] * kt[1]
    last = len(shape(kt[0])) - 1
    if order(kt[0]) != (*range(last - 1), last, last - 1):
        return None
    inner.append(kt[0])
    k = _scaled_by(read(kt[0])["input"], inner)
    return Scores(q[0], k[0], scale * k[1], bias, windows, axis_bias), v, inner


def _decomposed(scores: Argument, inner: list[fx.Node]) -> tuple[fx.Node, tuple[Call, Call] | None]:
    """(scores [B, Nq, Nk], (row, column) added to them by axis or None), as in SAM's image encoder.

    The scores are viewed as [B, qh, qw, kh, kw], to which [B, qh, qw, kh, 1] and [B, qh, qw, 1, kw] are added.
    """
    skipped: list[fx.Node] = []
    added: Argument = up(read(scores)["input"], skipped) if kind(scores) == "reshape" else None
    if len(shape(scores)) != 3 or len(shape(added)) != 5:
        return scores, None
    terms: list[Argument] = [added]
    sums: list[fx.Node] = []
    while (total := next((t for t in terms if kind(t) == "add" and read(t).get("alpha", 1) == 1), None)) is not None:
        terms.remove(total)
        terms += [read(total)["input"], read(total)["other"]]
        sums.append(total)
    if len(terms) != 3 or any(value(term) is None for term in terms):
        return scores, None
    B, qh, qw, kh, kw = shape(added)
    if not equal(shape(scores), (B, qh * qw, kh * kw)):
        return scores, None
    by_size = [(shape(term), term) for term in terms]
    split = next((t for size, t in by_size if kind(t) == "reshape" and equal(size, shape(added))), None)
    row = next((t for size, t in by_size if t is not split and equal(size, (B, qh, qw, kh, 1))), None)
    column = next((t for size, t in by_size if t is not split and equal(size, (B, qh, qw, 1, kw))), None)
    if split is None or row is None or column is None or not equal(shape(read(split)["input"]), shape(scores)):
        return scores, None
    inner += [scores, *skipped, *sums, split]
    rows = Call(torch.flatten, (Call(torch.flatten, (row, 3, 4)), 1, 2))
    columns = Call(torch.flatten, (Call(torch.flatten, (column, 3, 4)), 1, 2))
    return up(read(split)["input"], inner), (rows, columns)


def _windows(scores: Argument, inner: list[fx.Node]) -> tuple[fx.Node, fx.Node | None]:
    """(scores [B, H, Nq, Nk] before masking, window masks [1, W, 1, Nq, Nk] or None), as in Swin's shifted windows."""
    skipped: list[fx.Node] = []
    added: Argument = up(read(scores)["input"], skipped) if kind(scores) == "reshape" else None
    if kind(added) != "add" or read(added).get("alpha", 1) != 1 or len(shape(added)) != 5:
        return scores, None
    summands, (_, W, H, Nq, Nk) = read(added), shape(added)
    for split, masks in ((summands["input"], summands["other"]), (summands["other"], summands["input"])):
        if (
            kind(split) != "reshape"
            or not equal(shape(split), shape(added))
            or not equal(shape(masks), (1, W, 1, Nq, Nk))
        ):
            continue
        before = read(split)["input"]
        if equal(shape(before), shape(scores)) and equal(shape(before)[1:], (H, Nq, Nk)):
            inner += [scores, *skipped, added, split]
            return up(before, inner), masks
    return scores, None


def _scaled_by(node: Argument, inner: list[fx.Node]) -> tuple[fx.Node, float]:
    """(the node without scalar factors, product of these factors)."""
    factor = 1.0
    while kind(node) in ("mul", "div"):
        a = read(node)["input"]
        b = read(node)["other"]
        if isinstance(a, (int, float)) and kind(node) == "mul":
            a, b = b, a
        if not isinstance(b, (int, float)) or b == 0 or read(node).get("rounding_mode") is not None:
            break
        inner.append(node)
        node, factor = a, factor * b if kind(node) == "mul" else factor / b
    return node, factor


def _product(node: fx.Node, inner: list[fx.Node]) -> tuple[fx.Node, float] | None:
    """(the matmul node, its scalar factor); None if this node is not a matmul."""
    skipped: list[fx.Node] = []
    node, factor = _scaled_by(up(node, skipped), skipped)
    node = up(node, skipped)
    if kind(node) != "matmul":
        return None
    inner += skipped
    return node, factor


def _is_float(node: Argument, like: fx.Node) -> bool:
    """True for a floating-point tensor that is in float64 if and only if `like` is."""
    example = value(node)
    double = [t is not None and t.dtype == torch.float64 for t in (example, value(like))]
    return example is not None and example.is_floating_point() and double[0] == double[1]


def _bias(mask: Argument, sizes: tuple) -> fx.Node | Call | None:
    """The mask with axes [G, H, Nq, Nk], as `attention` takes it; None if its shape does not fit."""
    axes = shape(mask)
    if not 2 <= len(axes) <= 4 or not all(known(a == 1) or known(a == b) for a, b in zip(axes[::-1], sizes[::-1])):  # noqa: B905
        return None
    for _ in range(4 - len(axes)):
        mask = Call(torch.unsqueeze, (mask, 0))
    return mask


def _unpacked(pattern: AttentionPattern, inner: list[fx.Node]) -> fx.Node | None:
    """The packed projection [B, N, 3·H·D], ordered as [3, H, D], from which q, k and v are split; or None."""
    parts = [up(t, inner) for t in pattern[:3]]
    sources = []
    for i, part in enumerate(parts):
        path = [part]
        if order(part) == (0, 2, 1, 3):  # each [B, N, H·D] third to [B, N, H, D] to [B, H, N, D]
            heads = read(part)["input"]
            path += [heads]
            third = read(heads)["input"] if kind(heads) == "reshape" else None
            if len(shape(third)) != 3 or not equal(shape(third)[:2], shape(heads)[:2]):
                return None
            part, axis = third, -1
            path.append(part)
        else:
            axis = 0
        if kind(part) != "getitem" or read(part)["index"] != i:
            return None
        packed = read(part)["input"]
        if kind(packed) in ("unbind", "chunk"):
            arguments = read(packed)
            of = arguments["input"]
            path.append(packed)
            dim = arguments.get("dim", 0) % len(shape(of))
            if kind(packed) == "unbind" and (axis, dim) != (0, 0):
                return None
            if kind(packed) == "chunk" and (arguments["chunks"], axis, dim) != (3, -1, 2):
                return None
            packed = of
        elif axis == -1:
            return None
        sources.append((packed, axis))
        inner += path
    (packed, axis) = sources[0]
    if any(source != sources[0] for source in sources):
        return None
    if axis == -1:
        return packed
    inner.append(packed)
    if order(packed) != (2, 0, 3, 1, 4):  # [B, N, 3, H, D] to [3, B, H, N, D]
        return None
    split = read(packed)["input"]
    B, H, N, D = shape(pattern.q)
    if kind(split) != "reshape" or not equal(shape(split), (B, N, 3, H, D)):
        return None
    inner.append(split)
    return read(split)["input"]


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
