"""Reads a graph captured by torch.compile: operations and arguments of nodes, and where nodes may be merged."""

import contextlib
import inspect
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

Argument = Any  # of a node: another node, a value, or a tuple of these; a pattern checks its kind before it reads it

# Operation name, as used by patterns → names of its arguments in order.
ARGUMENTS: dict[str | None, tuple[str, ...]] = {
    "add": ("input", "other", "alpha"),
    "cat": ("tensors", "dim"),
    "chunk": ("input", "chunks", "dim"),
    "contiguous": ("input",),
    "conv2d": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "div": ("input", "other", "rounding_mode"),
    "dropout": ("input", "p", "training", "inplace"),
    "encoder_layer": (
        *("src", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "out_proj_weight"),
        *("out_proj_bias", "use_gelu", "norm_first", "eps", "gain1", "shift1", "gain2", "shift2"),
        *("weight1", "bias1", "weight2", "bias2", "mask", "mask_type"),
    ),
    "expand": ("input",),
    "gelu": ("input", "approximate"),
    "getitem": ("input", "index"),
    "hardswish": ("input", "inplace"),
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "linear": ("input", "weight", "bias"),
    "matmul": ("input", "other"),
    "mul": ("input", "other"),
    "multi_head_attention": tuple(inspect.signature(F.multi_head_attention_forward).parameters),
    "permute": ("input",),
    "relu": ("input", "inplace"),
    "relu6": ("input", "inplace"),
    "reshape": ("input",),
    "scaled_dot_product_attention": (
        *("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
    ),
    "sigmoid": ("input",),
    "silu": ("input", "inplace"),
    "softmax": ("input", "dim", "dtype"),
    "to": ("input",),
    "transpose": ("input", "dim0", "dim1"),
    "unbind": ("input", "dim"),
}
FUNCTIONS = {
    "add": (operator.add, torch.add),
    "cat": (torch.cat, torch.concat),
    "chunk": (torch.chunk,),
    "conv2d": (F.conv2d,),
    "div": (operator.truediv, torch.div),
    "dropout": (F.dropout,),
    "encoder_layer": (torch._transformer_encoder_layer_fwd,),  # of nn.TransformerEncoderLayer in inference
    "gelu": (F.gelu,),
    "getitem": (operator.getitem,),
    "hardswish": (F.hardswish,),
    "layer_norm": (F.layer_norm,),
    "linear": (F.linear,),
    "matmul": (operator.matmul, torch.matmul),
    "mul": (operator.mul, torch.mul),
    "multi_head_attention": (F.multi_head_attention_forward,),
    "permute": (torch.permute,),
    "relu": (F.relu, torch.relu),
    "relu6": (F.relu6,),
    "reshape": (torch.reshape, torch.flatten, torch.unflatten),
    "scaled_dot_product_attention": (F.scaled_dot_product_attention,),
    "sigmoid": (torch.sigmoid, F.sigmoid),
    "silu": (F.silu,),
    "softmax": (torch.softmax, F.softmax),
    "transpose": (torch.transpose, torch.swapaxes),
    "unbind": (torch.unbind,),
}
KINDS: dict[Any, str] = {function: kind for kind, functions in FUNCTIONS.items() for function in functions}
METHODS: dict[Any, str | None] = {kind: kind for kind in ARGUMENTS} | {
    "flatten": "reshape",
    "swapaxes": "transpose",
    "type": "to",
    "unflatten": "reshape",
    "view": "reshape",
}
IN_PLACE = {getattr(operator, f"i{name}") for name in ("add", "sub", "mul", "truediv", "matmul", "pow", "and", "or")}
IN_PLACE |= {operator.setitem, operator.delitem}
FRESH = ("new_empty", "new_ones", "new_zeros", "new_full")
PURE = ("torch", "_operator", "math", "builtins", "fastvit_triton")


def kind(node: object) -> str | None:
    """The operation of a node, a key of `ARGUMENTS`; None for other operations."""
    if not isinstance(node, fx.Node):
        return None
    if node.op == "call_method":
        return METHODS.get(node.target)
    return KINDS.get(node.target) if node.op == "call_function" else None


def read(node: fx.Node) -> dict:
    """The arguments of a node by name; omitted arguments are missing."""
    names = ARGUMENTS[kind(node)]
    if kind(node) == "softmax" and node.op == "call_function" and node.target is F.softmax:
        names = ("input", "dim", "_stacklevel", "dtype")
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def value(node: object) -> FakeTensor | Any:
    """The example value of a node (sizes, dtype, device); None unless it is a plain tensor."""
    found = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return found if type(found) is FakeTensor else None


def shape(node: object) -> tuple:
    """The shape of a node's tensor; () if it has none."""
    found = value(node)
    return () if found is None else tuple(found.shape)


def known(condition: Any) -> bool:
    """True if the condition holds for all values of the graph's symbolic sizes."""
    return condition if isinstance(condition, bool) else statically_known_true(condition)


def equal(a: tuple, b: tuple) -> bool:
    """True if two shapes are equal for all values of the graph's symbolic sizes."""
    return len(a) == len(b) and all(known(x == y) for x, y in zip(a, b, strict=True))


def order(node: fx.Node) -> tuple[int, ...] | None:
    """The axes of a permutation or transposition; None for other nodes."""
    axes = len(shape(node))
    if kind(node) == "permute":
        given: Argument = node.args[1] if len(node.args) == 2 else node.args[1:] or node.kwargs.get("dims", ())
        return tuple(a % axes for a in given) if axes and len(given) == axes else None
    if kind(node) == "transpose" and axes:
        a, b = (read(node)[name] % axes for name in ("dim0", "dim1"))
        swapped = {a: b, b: a}
        return tuple(swapped.get(i, i) for i in range(axes))
    return None


def same(node: Argument) -> Argument:
    """The input of a no-op node (inactive dropout; a cast or reshape without effect); None for other nodes."""
    if kind(node) == "dropout":
        given = read(node)
        active = given.get("training", True) is not False and given.get("p", 0.5) != 0
        return None if active else given["input"]
    if kind(node) == "contiguous":
        return node.args[0]
    if kind(node) in ("to", "reshape") and value(node) is not None and value(node.args[0]) is not None:
        before, after = value(node.args[0]), value(node)
        kept = before.dtype == after.dtype and before.device == after.device and equal(before.shape, after.shape)
        return node.args[0] if kept else None
    return None


def up(node: Argument, inner: list[fx.Node]) -> Argument:
    """The nearest producer that is not a no-op; skipped nodes are appended to `inner`."""
    while (before := same(node)) is not None:
        inner.append(node)
        node = before
    return node


def root(node: Argument) -> fx.Node:
    """The node whose memory a chain of in-place methods writes to."""
    while node.op == "call_method" and _writes(node):
        node = node.args[0]
    return node


def _writes(node: Argument) -> bool:
    """True if the node may write to one of its arguments."""
    if node.op == "call_method":
        return node.target.endswith("_") and not node.target.endswith("__")
    if node.op != "call_function":
        return False
    if kind(node) == "dropout" and same(node) is not None:
        return False  # in place, but inactive
    if node.target in IN_PLACE or "out" in node.kwargs or isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    name = getattr(node.target, "__name__", "")
    if name.endswith("_") and not name.endswith("__"):
        return True
    if inspect.isfunction(node.target) and "inplace" in (names := inspect.signature(node.target).parameters):
        return (dict(zip(names, node.args, strict=False)) | node.kwargs).get("inplace", False) is not False
    return (getattr(node.target, "__module__", None) or "torch").split(".")[0] not in PURE


class Regions:
    """Regions of a graph in which nodes may be merged, separated by nodes that write memory or change a PyTorch mode.

    Writes to memory allocated in the graph, such as drop-path's random numbers, do not end a region: they affect only
    its readers.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._region: dict[fx.Node, int] = {}
        self._place = {node: i for i, node in enumerate(graph.nodes)}
        self._written: dict[fx.Node, int] = {}
        self._autocast: dict[int, tuple[tuple, ...]] = {0: ()}
        region, active = 0, {}
        for node in graph.nodes:
            writes = _writes(node)
            fresh = writes and node.op == "call_method" and root(node).target in FRESH
            silent = node.op == "call_function" and node.meta.get("example_value") is None
            if fresh:
                self._written[root(node)] = self._place[node]
            elif writes or silent or node.op == "call_module":
                region += 1
                if getattr(node.target, "__name__", "") == "_enter_autocast":
                    active[node] = node.args
                elif getattr(node.target, "__name__", "") == "_exit_autocast":
                    active.pop(node.args[0], None)
            self._region[node] = region
            self._autocast[region] = tuple(active.values())

    def moved(self, new: fx.Node, old: fx.Node) -> None:
        """Records that a new node takes the position of an old one."""
        self._region[new], self._place[new] = self._region[old], self._place[old]

    def together(self, nodes: list[fx.Node]) -> bool:
        """True if no node between these writes memory that one of them reads, and all run in the same modes."""
        written = any(self._written.get(root(r), -1) > self._place[n] for n in nodes for r in n.all_input_nodes)
        return not written and len({self._region[n] for n in nodes}) == 1

    def place(self, node: fx.Node) -> int:
        """Position of a node in the captured graph."""
        return self._place[node]

    def casts(self, node: fx.Node) -> bool:
        """True if autocast may be on when this node runs."""
        found = value(node)
        return bool(self._autocast[self._region[node]]) or (
            found is not None and torch.is_autocast_enabled(found.device.type)
        )

    @contextlib.contextmanager
    def modes(self, node: fx.Node) -> Iterator[None]:
        """Context with the modes in which this node runs: autocast as in the graph, and no gradients."""
        with contextlib.ExitStack() as stack:
            for kind_, *rest in self._autocast[self._region[node]]:
                stack.enter_context(torch.autocast(kind_, *rest))
            stack.enter_context(torch.no_grad())
            yield


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
    return (found for node in operands(*items) if (found := value(node)) is not None)
