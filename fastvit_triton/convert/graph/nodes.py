"""Reads a graph captured by torch.compile: operations, arguments and example values of nodes."""

import inspect
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ...kernels.linear import linear
from ...kernels.mlp import mlp

Argument = Any  # of a node: another node, a value, or a tuple of these; a pattern checks its kind before it reads it

# Operation name, as used by patterns → names of its arguments in order, None for those that the function declares, and
# functions. A name with an asterisk takes all further arguments, positional or by keyword; patterns read them only
# where `order` does.
OPERATIONS: dict[str, tuple] = {
    "add": ("input other alpha", operator.add, torch.add),
    "addcmul": ("input tensor1 tensor2 value", torch.addcmul),
    "addmm": ("input mat1 mat2 beta alpha", torch.addmm),
    "amax": ("input dim keepdim", torch.amax),
    "attribute": ("input name", getattr),
    "baddbmm": ("input batch1 batch2 beta alpha", torch.baddbmm),
    "bmm": ("input mat2", torch.bmm),
    "cat": ("tensors dim", torch.cat, torch.concat),
    "chunk": ("input chunks dim", torch.chunk),
    "contiguous": ("input *others",),
    "constant": ("value *others", torch.tensor, torch.as_tensor, torch.scalar_tensor),
    "conv2d": ("input weight bias stride padding dilation groups", F.conv2d),
    "detach": ("input", torch.detach),
    "div": ("input other rounding_mode", operator.truediv, torch.div),
    "dropout": ("input p training inplace", F.dropout),
    "einsum": ("equation *operands", torch.einsum, torch.functional.einsum),
    "encoder_layer": (  # of nn.TransformerEncoderLayer in inference
        "src embed_dim_to_check num_heads in_proj_weight in_proj_bias out_proj_weight out_proj_bias use_gelu "
        "norm_first eps gain1 shift1 gain2 shift2 weight1 bias1 weight2 bias2 mask mask_type",
        torch._transformer_encoder_layer_fwd,
    ),
    "erf": ("input", torch.erf, torch.special.erf),
    "exp": ("input", torch.exp),
    "expand": ("input *others",),
    "fused_linear": (None, linear),
    "fused_mlp": (None, mlp),
    "gelu": ("input approximate", F.gelu),
    "getitem": ("input index", operator.getitem),
    "hardswish": ("input inplace", F.hardswish),
    "layer_norm": ("input normalized_shape weight bias eps", F.layer_norm),
    "linear": ("input weight bias", F.linear),
    "masked_fill": ("input mask value", torch.masked_fill),
    "matmul": ("input other", operator.matmul, torch.matmul),
    "max": ("input dim keepdim", torch.max),
    "mean": ("input dim keepdim dtype", torch.mean),
    "movedim": ("input source destination", torch.movedim, torch.moveaxis),
    "mul": ("input other", operator.mul, torch.mul),
    "multi_head_attention": (None, F.multi_head_attention_forward),
    "neg": ("input", operator.neg, torch.neg),
    "norm": ("input p dim keepdim dtype", torch.norm, torch.linalg.norm, torch.linalg.vector_norm),
    "permute": ("input *dims", torch.permute),
    "pow": ("input exponent", operator.pow, torch.pow),
    "reciprocal": ("input", torch.reciprocal),
    "relu": ("input inplace", F.relu, torch.relu),
    "relu6": ("input inplace", F.relu6),
    "reshape": ("input *others", torch.reshape, torch.flatten, torch.unflatten),
    "rms_norm": ("input normalized_shape weight eps", F.rms_norm, torch.rms_norm),
    "rsqrt": ("input", torch.rsqrt),
    "scaled_dot_product_attention": (
        "query key value attn_mask dropout_p is_causal scale enable_gqa",
        F.scaled_dot_product_attention,
    ),
    "sigmoid": ("input", torch.sigmoid, F.sigmoid),
    "silu": ("input inplace", F.silu),
    "softmax": ("input dim dtype", torch.softmax, F.softmax),
    "split": ("input sizes dim", torch.split, torch.functional.split, torch.split_with_sizes),
    "sqrt": ("input", torch.sqrt),
    "square": ("input", torch.square),
    "squeeze": ("input dim", torch.squeeze),
    "stack": ("tensors dim", torch.stack),
    "sub": ("input other alpha", operator.sub, torch.sub, torch.subtract),
    "sum": ("input dim keepdim dtype", torch.sum),
    "tanh": ("input", torch.tanh, F.tanh),
    "to": ("input *others",),
    "transpose": ("input dim0 dim1", torch.transpose, torch.swapaxes),
    "unbind": ("input dim", torch.unbind),
    "unsqueeze": ("input dim", torch.unsqueeze),
    "var": ("input dim unbiased keepdim correction", torch.var),
    "view_as_complex": ("input", torch.view_as_complex),
    "view_as_real": ("input", torch.view_as_real),
    "where": ("condition input other", torch.where),
}
ARGUMENTS: dict[str | None, tuple[str, ...]] = {
    kind: tuple(inspect.signature(functions[0]).parameters if names is None else names.split())
    for kind, (names, *functions) in OPERATIONS.items()
}
KINDS: dict[Any, str] = {function: kind for kind, (_, *functions) in OPERATIONS.items() for function in functions}
METHODS: dict[Any, str | None] = {kind: kind for kind in ARGUMENTS} | {
    **dict.fromkeys(("bfloat16", "double", "float", "half", "type", "type_as"), "to"),
    **dict.fromkeys(("flatten", "reshape_as", "unflatten", "view", "view_as"), "reshape"),
    **dict.fromkeys(("attribute", "constant")),
    "swapaxes": "transpose",
    "split_with_sizes": "split",
    "where": None,  # its condition comes second
}
# Other names that PyTorch accepts for arguments, as NumPy calls them.
ALIASES = {
    **dict.fromkeys(("A", "a", "tensor", "x", "x1"), "input"),
    **{"axis": "dim", "ord": "p", "x2": "other"},
    **dict.fromkeys(("split_size", "split_size_or_sections", "split_sizes"), "sizes"),
}


def kind(node: object) -> str | None:
    """The operation of a node, a key of `ARGUMENTS`; None for other operations, and for calls with other arguments."""
    name = _name(node)
    if name is None or (arguments := _bind(node, name)) is None:
        return None
    if name == "reshape" and (value(node) is None or value(arguments["input"]) is None):
        return None
    if name == "reshape" and value(node).dtype != value(arguments["input"]).dtype:
        return None  # x.view(dtype)
    return name


def read(node: fx.Node) -> dict:
    """The arguments of a node of some kind by name, however the call gives them; omitted arguments are missing."""
    return _bind(node, _name(node)) or {}


def _name(node: Argument) -> str | None:
    if not isinstance(node, fx.Node):
        return None
    if node.op == "call_method":
        return METHODS.get(node.target)
    return KINDS.get(node.target) if node.op == "call_function" else None


def _bind(node: Argument, name: str | None) -> dict | None:
    """The arguments of a call by name; None if it has an argument that its kind does not name."""
    *names, last = ARGUMENTS[name]
    if name == "softmax" and node.target is F.softmax:
        names = ["input", "dim", "_stacklevel"]
        last = "dtype"
    names.append(last.lstrip("*"))
    args: Argument = node.args
    if last.startswith("*") and len(args) > 1 and not (len(args) == 2 and isinstance(args[1], (tuple, list))):
        first, *rest = args
        args = first, rest
    arguments = dict(zip(names, args, strict=False))
    arguments |= {key if key in names else ALIASES.get(key, key): argument for key, argument in node.kwargs.items()}
    if last.startswith("*"):
        return arguments
    return arguments if len(args) <= len(names) and arguments.keys() <= {*names} else None


def value(node: object) -> FakeTensor | Any:
    """The example value of a node (sizes, dtype, device); None unless it is a plain tensor."""
    example = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return example if type(example) is FakeTensor else None


def shape(node: object) -> tuple:
    """The shape of a node's tensor; () if it has none. Sizes that a guard has made constant are integers."""
    example = value(node)
    return () if example is None else tuple(map(_number, example.shape))


def _number(size: Any) -> Any:
    constant = None if isinstance(size, int) else size.node.maybe_as_int()
    return size if constant is None else constant


def known(condition: Any) -> bool:
    """True if the condition holds for all values of the graph's symbolic sizes."""
    return condition if isinstance(condition, bool) else statically_known_true(condition)


def equal(a: tuple, b: tuple) -> bool:
    """True if two shapes are equal for all values of the graph's symbolic sizes."""
    return len(a) == len(b) and all(known(x == y) for x, y in zip(a, b, strict=True))


def order(node: fx.Node) -> tuple[int, ...] | None:
    """The axes of a permutation or transposition; None for other nodes."""
    axes = len(shape(node))
    name = kind(node)
    if name is None or not axes:
        return None
    arguments = read(node)
    places = [*range(axes)]
    if name == "permute":
        dims = arguments.get("dims", ())
        return tuple(a % axes for a in dims) if len(dims) == axes else None
    if name == "movedim":
        source, destination = arguments["source"], arguments["destination"]
        if not (isinstance(source, int) and isinstance(destination, int)):
            return None
        places.insert(destination % axes, places.pop(source % axes))
        return tuple(places)
    if name == "transpose":
        a, b = arguments["dim0"] % axes, arguments["dim1"] % axes
    elif name == "attribute" and (arguments["name"] == "mT" or (arguments["name"], axes) == ("T", 2)):
        a, b = -2, -1
    else:
        return None
    places[a], places[b] = places[b], places[a]
    return tuple(places)


def same(node: Argument) -> Argument:
    """The input of a no-op node (inactive dropout; a cast or reshape without effect); None for other nodes."""
    if kind(node) == "dropout":
        arguments = read(node)
        active = arguments.get("training", True) is not False and arguments.get("p", 0.5) != 0
        return None if active else arguments["input"]
    if kind(node) == "contiguous":
        return read(node)["input"]
    if kind(node) in ("to", "reshape"):
        source = read(node)["input"]
        before = value(source)
        after = value(node)
        if before is None or after is None:
            return None
        no_op = before.dtype == after.dtype and before.device == after.device and equal(before.shape, after.shape)
        return source if no_op else None
    return None


def up(node: Argument, inner: list[fx.Node]) -> Argument:
    """The nearest producer that is not a no-op; skipped nodes are appended to `inner`."""
    while (before := same(node)) is not None:
        inner.append(node)
        node = before
    return node


def part_of(node: Argument, count: int) -> tuple[fx.Node, int, int, bool, list[fx.Node]] | None:
    """(tensor, axis, number, True for an entry of the axis instead of a part, nodes between) of a part, or None.

    A node is one of this many equal parts by an index or a slice, also of the results of `unbind`, `chunk` or `split`.
    """
    if kind(node) != "getitem":
        return None
    source, index = read(node)["input"], read(node)["index"]
    if kind(source) in ("unbind", "chunk", "split"):
        tensor, alone = read(source)["input"], kind(source) == "unbind"
        sizes, dim = shape(tensor), read(source).get("dim", 0)
        if not sizes or index not in range(count):
            return None
        dim %= len(sizes)
        lengths = [1] * sizes[dim] if alone else [part.shape[dim] for part in source.meta["example_value"]]
        fits = len(lengths) == count and all(known(length * count == sizes[dim]) for length in lengths)
        return (tensor, dim, index, alone, [source]) if fits else None
    items, sizes = list(index) if isinstance(index, tuple) else [index], shape(source)
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (len(sizes) - len(items) + 1)
    items += [slice(None)] * (len(sizes) - len(items))
    chosen = [i for i, item in enumerate(items) if item != slice(None)]
    if len(chosen) != 1 or len(items) != len(sizes):
        return None
    (dim,) = chosen
    item, size = items[dim], sizes[dim]
    if isinstance(item, int) and item in range(count) and known(size == count):
        return source, dim, item, True, []
    if isinstance(item, slice) and item.step in (None, 1) and isinstance(size, int) and size % count == 0:
        start, stop, _ = item.indices(size)
        if size and (stop - start) * count == size and start * count % size == 0:
            return source, dim, start * count // size, False, []
    return None


def outside(nodes: list[fx.Node], anchor: fx.Node) -> fx.Node | None:
    """One of these nodes that is also read outside the match, so it must stay; None if there is none."""
    inside = {*nodes, anchor}
    return next((n for n in nodes if n is not anchor and not inside.issuperset(n.users)), None)


def operands(*items: object) -> Iterator[fx.Node]:
    """Yields the nodes among the arguments of a node."""
    for item in items:
        if isinstance(item, (tuple, list)):
            yield from operands(*item)
        elif isinstance(item, dict):
            yield from operands(*item.values())
        elif isinstance(item, fx.Node):
            yield item


def tensors(*items: object) -> Iterator[FakeTensor]:
    """Example values of the plain tensors among the arguments of a node."""
    return (example for node in operands(*items) if (example := value(node)) is not None)
