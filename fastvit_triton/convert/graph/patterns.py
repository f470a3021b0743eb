"""Patterns of PyTorch calls that one of our public functions can replace; for attention see `graph.attention_patterns`.

A pattern is matched from its output node upwards and yields its matches longest first. `rewrite.py` decides whether a
match may be rewritten.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import fx

from ...kernels import onednn
from ...kernels.argument import kind_of
from ...kernels.layer_norm import layer_norm
from ...kernels.linear import linear
from ...kernels.mlp import mlp
from ...kernels.patch_embed import patch_embed
from ...kernels.rms_norm import rms_norm
from .activation_patterns import SIMPLE, activated
from .algebra import ARITHMETIC
from .nodes import Argument, equal, kind, known, order, read, shape, up, value
from .norm_patterns import norm_of, why_no_norm


class PatternCall(NamedTuple):
    """An argument that must be inserted as a call: function(*args)."""

    function: Callable
    args: tuple


class Reason(NamedTuple):
    """Why a node, which need not be the one that was looked at, is not rewritten."""

    node: fx.Node
    text: str


@dataclass
class Match:
    """A call function(*args, **kwargs) that could replace `anchor` and the nodes `inner` above it.

    A report calls it `name`, or by the name of the function. The match skips the nodes `views`, which are erased if
    nothing else reads them. `steps` are calls (function, further arguments) that are applied to the result in turn.
    """

    anchor: fx.Node
    function: Callable
    args: tuple
    kwargs: dict = field(default_factory=dict)
    inner: list[fx.Node] = field(default_factory=list)
    views: list[fx.Node] = field(default_factory=list)
    steps: list[tuple[Callable, tuple]] = field(default_factory=list)
    head_dim: int = 0
    name: str = ""


def branch(anchor: fx.Node) -> Iterator[Match | str]:
    """Matches of a linear layer or MLP with a LayerNorm before it and LayerScale, drop-path and residual after it."""
    if kind(anchor) not in ("add", "addcmul", "div", "mul", "gelu", *SIMPLE, "linear", "to"):
        return
    for node, ends, skipped in _ends(anchor):
        inner = [*skipped, node]
        yield from _layers(anchor, node, ends, inner)
    if kind(anchor) == "linear":
        reason = why_no_norm(read(anchor)["input"])
        yield (
            "a linear layer with nothing to fuse around it is left to Inductor"
            if reason is None
            else (f"a linear layer whose norm is not fused: {reason}")
        )


def _ends(anchor: fx.Node) -> Iterator[tuple[fx.Node, dict, list[fx.Node]]]:
    """Yields (node before the epilogue, its layer_scale, sample_scale and residual, nodes skipped)."""
    arguments = read(anchor)
    if kind(anchor) == "addcmul" and arguments.get("value", 1) == 1:
        if equal(shape(arguments["input"]), shape(anchor)):
            factors = arguments["tensor1"], arguments["tensor2"]
            yield from _scaled(anchor, factors, {"residual": arguments["input"]}, [])
    elif kind(anchor) not in ("add", "addcmul"):
        yield from _scales(anchor, {}, [])
    elif arguments.get("alpha", 1) == 1 and kind(anchor) == "add":
        for body, residual in ((arguments["other"], arguments["input"]), (arguments["input"], arguments["other"])):
            if value(body) is not None and value(residual) is not None and equal(shape(body), shape(residual)):
                yield from _scales(body, {"residual": residual}, [])


def _scales(node: fx.Node, ends: dict, skipped: list[fx.Node]) -> Iterator[tuple[fx.Node, dict, list[fx.Node]]]:
    skipped = list(skipped)
    node = up(node, skipped)
    if kind(node) == "mul":
        yield from _scaled(node, tuple(read(node).values()), ends, [*skipped, node])
    yield node, ends, skipped


def _scaled(
    node: fx.Node, factors: tuple, ends: dict, skipped: list[fx.Node]
) -> Iterator[tuple[fx.Node, dict, list[fx.Node]]]:
    """As `_scales`, for a node that multiplies two factors."""
    for rest, factor in (factors, factors[::-1]):
        size = shape(factor)
        sizes = shape(node)
        if value(factor) is None or value(rest) is None or not equal(shape(rest), sizes):
            continue
        if "layer_scale" not in ends and equal(size, sizes[-1:]):
            yield from _scales(rest, ends | {"layer_scale": factor}, skipped)
        drawn = len(sizes) > 1 and equal(size, (sizes[0], *[1] * (len(sizes) - 1)))
        if "sample_scale" not in ends and drawn and not value(factor).requires_grad:
            scale = PatternCall(torch.flatten, (factor,))
            yield from _scales(rest, ends | {"sample_scale": scale}, skipped)


def _layers(anchor: fx.Node, node: fx.Node, ends: dict, inner: list[fx.Node]) -> Iterator[Match]:
    """Yields matches of the layers whose output is `node`."""
    parts: list[fx.Node] = []
    activation, fc, swapped = activated(node, parts)
    if kind(fc) != "linear" or not _plain(fc) or (swapped and not copy_pays(fc)):
        return
    inner = [*inner, *parts, fc]
    x, *layer = _linear(fc, swapped)
    if activation is None:
        parts = []
        name, first, swapped = activated(x, parts)
        usable = kind(first) == "linear" and _plain(first) and (copy_pays(first) or not swapped)
        if name is not None and usable:
            below, *hidden = _linear(first, swapped)
            for start, norm, before in _norms(below):
                options = {"norm": norm, "activation": name, **ends}
                skipped = [*inner, *parts, first, *before]
                yield Match(anchor, mlp, (start, tuple(hidden), tuple(layer)), options, skipped)
    for start, norm, before in _norms(x):
        if norm is not None or activation is not None or ends:
            options = {"norm": norm, "activation": activation, **ends}
            yield Match(anchor, linear, (start, *layer), options, [*inner, *before])


def _linear(
    node: fx.Node, swapped: bool = False
) -> tuple[fx.Node, fx.Node | PatternCall, fx.Node | PatternCall | None]:
    """(x, weight, bias) of a linear layer, with the halves of its output exchanged if `swapped`."""
    arguments = read(node)
    weight, bias = arguments["weight"], arguments.get("bias")
    if swapped:
        half = shape(weight)[0] // 2
        weight, bias = (None if t is None else PatternCall(torch.roll, (t, half, 0)) for t in (weight, bias))
    return arguments["input"], weight, bias


def copy_pays(layer: fx.Node) -> bool:
    """True if a gate in this linear layer saves more than a copy of its weight moves: from as many rows as inputs."""
    *rows, width = (size if isinstance(size, int) else size.node.hint for size in shape(read(layer)["input"]))
    return None in (*rows, width) or math.prod(rows) >= width


def _plain(node: fx.Node) -> bool:
    """True for a linear layer with x of two or more axes, a 2-D weight, and a 1-D bias or none."""
    x, weight, bias = _linear(node)
    return len(shape(x)) > 1 and len(shape(weight)) == 2 and (bias is None or len(shape(bias)) == 1)


def _norms(x: fx.Node) -> Iterator[tuple[fx.Node, tuple | None, list[fx.Node]]]:
    """Yields (input, norm or None, nodes skipped): with the norm that produced x, if any, and without.

    Without a token axis there are too few rows for folding a norm into the weights to pay.
    """
    inner: list[fx.Node] = []
    if len(shape(x)) > 2 and (found := norm_of(x, inner)) is not None:
        yield *found, inner
    yield x, None, []


def single(anchor: fx.Node) -> Iterator[Match]:
    """Matches of a linear layer by itself."""
    if kind(anchor) == "linear" and _plain(anchor):
        yield Match(anchor, linear, _linear(anchor))


def multiply(anchor: fx.Node) -> Iterator[Match | str]:
    """Matches of a linear layer by itself, or of bias + x Wᵀ as GPT-2 writes it, which oneDNN can run on a CPU."""
    if kind(anchor) == "addmm":
        arguments = read(anchor)
        bias, x, columns = arguments["input"], arguments["mat1"], arguments["mat2"]
        unscaled = arguments.get("alpha", 1) == 1 == arguments.get("beta", 1)
        if unscaled and equal(shape(bias), shape(columns)[1:]):
            weight = PatternCall(torch.t, (columns,))
            yield Match(anchor, onednn.product_in_graph, (x, weight, bias), name="product by oneDNN")
        else:
            yield "it scales its terms, or does not add a bias [F]"
        return
    if kind(anchor) != "linear":
        return
    if _plain(anchor):
        yield Match(anchor, onednn.product_in_graph, _linear(anchor), name="product by oneDNN")
    else:
        yield "its input has one axis, or its weight and bias not the usual ones"


def normalize(anchor: fx.Node) -> Iterator[Match | str]:
    """Matches of a separate LayerNorm."""
    if kind(anchor) != "layer_norm":
        return
    found = norm_of(anchor, [])
    if found is None:
        yield why_no_norm(anchor) or "its dtypes differ"
    elif not value(found[0]).is_contiguous():
        yield "its rows are not contiguous; Inductor's own LayerNorm reads them in one pass"
    else:
        yield Match(anchor, layer_norm, (found[0], *found[1]))


def normalize_written(anchor: fx.Node) -> Iterator[Match]:
    """Matches of a separate RMSNorm, or of a norm that is written out."""
    inner: list[fx.Node] = []
    if kind(anchor) not in (*ARITHMETIC, "rms_norm") or (found := norm_of(anchor, inner)) is None:
        return
    x, norm = found
    if kind_of(norm) == "rms_norm":
        yield Match(anchor, rms_norm, (x, norm[0], norm[2]), inner=inner)
    else:
        yield Match(anchor, layer_norm, (x, *norm), inner=inner)


def embed(anchor: fx.Node) -> Iterator[Match | str]:
    """Matches of a patch convolution flattened to tokens, with positions and prefix tokens."""
    if kind(anchor) == "conv2d":
        conv = _conv(anchor)
        yield conv if isinstance(conv, str) else "its output is not flattened to tokens"
        return
    for tokens, pos, inner in _with_positions(anchor):
        for node, first, before, parts in _with_prefix(tokens):
            operands = _tokens(node, parts)
            if operands is not None and (pos is None or before is None):
                options = dict(pos=pos if before is None else before, prefix=first)
                yield Match(anchor, patch_embed, operands, options, [*inner, *parts])


def _with_positions(anchor: fx.Node) -> Iterator[tuple[fx.Node, fx.Node | PatternCall | None, list[fx.Node]]]:
    if kind(anchor) == "add" and read(anchor).get("alpha", 1) == 1:
        arguments = read(anchor)
        for tokens, pos in ((arguments["input"], arguments["other"]), (arguments["other"], arguments["input"])):
            inner: list[fx.Node] = []
            size = shape(pos)
            sizes = shape(anchor)
            if len(sizes) == 3 and equal(shape(tokens), sizes) and equal(size, (1, *sizes[1:])):
                yield up(tokens, inner), pos, inner
            elif len(sizes) == 3 and equal(shape(tokens), sizes) and equal(size, sizes[1:]):
                yield up(tokens, inner), PatternCall(torch.unsqueeze, (pos, 0)), inner
    else:
        yield anchor, None, []


def _with_prefix(
    node: fx.Node,
) -> Iterator[tuple[fx.Node, fx.Node | PatternCall | None, fx.Node | PatternCall | None, list]]:
    """Yields (patch tokens, prefix tokens, positions added before the prefix, nodes skipped)."""
    yield node, None, None, [node]
    if kind(node) != "cat" or len(shape(node)) != 3 or read(node).get("dim", 0) not in (1, -2):
        return
    *first, last = read(node)["tensors"]
    inner = [node]
    tokens = []
    D = shape(node)[2]
    for part in first:
        part = up(part, inner)
        row = read(part)["input"] if kind(part) == "expand" else None
        size = shape(row)
        if len(size) != 3 or not equal(size, (1, shape(part)[1], D)):
            return
        inner.append(part)
        tokens.append(row)
    prefix = tokens[0] if len(tokens) == 1 else PatternCall(torch.cat, (tuple(tokens), 1))
    for body, pos, skipped in _with_positions(up(last, inner)):
        yield body, prefix, pos, [*inner, up(last, []), *skipped, body]


def _tokens(node: fx.Node, inner: list[fx.Node]) -> tuple | None:
    """(image, weight, bias) of patch tokens [B, N, D]; skipped nodes are appended to `inner`."""
    if order(node) != (0, 2, 1):
        return None
    flat = up(read(node)["input"], inner)
    conv: Argument = up(read(flat)["input"], inner) if kind(flat) == "reshape" else None
    if kind(conv) != "conv2d" or len(shape(conv)) != 4 or not equal(shape(flat)[:2], shape(conv)[:2]):
        return None
    inner += [flat, conv]
    operands = _conv(conv)
    return None if isinstance(operands, str) else operands


def _conv(node: fx.Node) -> tuple | str:
    """(image, weight, bias) of a patch convolution; a reason (str) for other convolutions."""
    arguments = read(node)
    image = arguments["input"]
    weight = arguments["weight"]
    if len(shape(image)) != 4 or len(shape(weight)) != 4:
        return "it has no axes [B, C, H, W]"
    patch = shape(weight)[2:]
    if _pair(arguments.get("stride", 1)) != patch or arguments.get("groups", 1) != 1:
        return "its stride differs from its kernel size, or it has groups"
    if arguments.get("padding", 0) not in (0, (0, 0), [0, 0], "valid") or _pair(arguments.get("dilation", 1)) != (1, 1):
        return "it has padding or dilation"
    if not all(known(side % p == 0) for side, p in zip(shape(image)[2:], patch, strict=True)):
        return "the image's sides are not multiples of the patch's"
    return image, weight, arguments.get("bias")


def _pair(size: object) -> tuple:
    return tuple(size) if isinstance(size, (tuple, list)) else (size, size)
