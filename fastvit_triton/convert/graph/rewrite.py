"""Rewrites a graph captured by torch.compile: PyTorch calls become calls of the kernels' public functions.

A match is rewritten only if its inner values have no other readers, no node in between writes memory that it reads,
the kernels run for its device and dtype, and the new call has the same output shape and dtype as the traced one.
"""

import itertools
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ...kernels import linear, mlp, onednn
from ...kernels.argument import Reader
from ...kernels.backend import why_not
from .activation_patterns import gated
from .attention_patterns import attend, attend_packed, why_not_attention, why_not_expanded
from .nodes import equal, kind, operands, order, outside, read, shape, tensors, value
from .norm_patterns import norm_of
from .patterns import (
    Match,
    PatternCall,
    Reason,
    branch,
    copy_pays,
    embed,
    multiply,
    normalize,
    normalize_written,
    single,
)
from .regions import Regions, memory

FUSED = ("fused_linear", "fused_mlp")
IN_PLACE: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.imul: operator.mul,
    operator.isub: operator.sub,
    operator.itruediv: operator.truediv,
    **{f"{name}_": name for name in ("add", "div", "masked_fill", "mul", "sub")},
}


class Rewriter:
    """Rewrites a graph in place."""

    def __init__(self, graph: fx.Graph, refuses: Callable[..., str | None] = why_not) -> None:
        self.graph = graph
        self.refuses = refuses  # (device, dtype, head dimension) → why the kernels do not run, or None
        self.became: dict[str, str] = {}  # name of each removed node → the function that replaced it
        self.why: dict[str, str] = {}  # name of a node → why it was not rewritten
        self.fake = next(tensors(*graph.nodes)).fake_mode  # infers shapes and dtypes without computing
        _write_anew(graph)
        self.regions = Regions(graph, self.fake)

    def run(self, compiled: bool = True) -> None:
        """Makes all rewrites to kernels, in an order in which none prevents another."""
        for node in self.graph.find_nodes(op="call_method", target="new_empty"):
            self._unbind(node)
        self._forget_sizes()
        for node in self.graph.find_nodes(op="call_method", target="type_as"):
            self._state_dtype(node)
        for node in self._all("multi_head_attention"):
            self._expand(node)
        for node in self._all("encoder_layer"):
            self._expand_layer(node)
        for node in self._all("mul") if compiled else ():
            if (layers := gated(node)) is not None and copy_pays(layers[0]):
                self._pack(layers)
        for node in list(self.graph.nodes):
            users = sorted(node.users, key=self.regions.place)
            if len(users) > 1 and all(kind(n) == "linear" and read(n)["input"] is node for n in users):
                if norm_of(node, []) is not None:
                    self._pack(users)
        for patterns in ((attend_packed, attend), (branch, embed)):
            for node in reversed(list(self.graph.nodes)):
                self._first(node, patterns)
        for node in self._all("softmax"):
            self.why.setdefault(node.name, why_not_attention(node))
        for node in self._all("layer_norm"):
            if self.became:
                self._first(node, (normalize,))
            else:
                self.why[node.name] = "no neighbour runs on a kernel, so Inductor fuses it"
        self._hand_on_statistics()
        self.graph.lint()

    def insert_layers(self) -> None:
        """Replaces linear layers and norms that nothing was fused with, for graphs that no compiler receives."""
        for node in reversed(list(self.graph.nodes)):
            self._first(node, (single, normalize_written))
        self.graph.lint()

    def insert_products(self) -> None:
        """Replaces linear layers, also those inside PyTorch's attention, by oneDNN's product, where it is chosen."""
        for name, expand in (("multi_head_attention", self._expand), ("encoder_layer", self._expand_layer)):
            for node in self._all(name):
                arguments = read(node)
                x = arguments["query" if name == "multi_head_attention" else "src"]
                reason = self._product_refusal(node, x, arguments["in_proj_weight"])
                if reason is None:
                    expand(node, kernels=False)
                else:
                    self.why[node.name] = reason
        for node in (*self._all("linear"), *self._all("addmm")):
            self._first(node, (multiply,))
        self.graph.lint()

    def _all(self, name: str) -> list[fx.Node]:
        return [node for node in self.graph.nodes if kind(node) == name]

    def _first(self, node: fx.Node, patterns: tuple[Callable, ...]) -> None:
        """Makes the first possible rewrite at a node."""
        if node.name in self.became or value(node) is None:
            return
        for pattern in patterns:
            for match in pattern(node):
                if isinstance(match, Reason):
                    self.why.setdefault(match.node.name, match.text)
                elif isinstance(match, str):
                    self.why.setdefault(node.name, match)
                elif self._make(match):
                    return

    def _make(self, match: Match) -> bool:
        """Rewrites a match; if it may not, records the reason and returns False."""
        anchor = match.anchor
        inner = [n for n in dict.fromkeys(match.inner) if n is not match.anchor]
        name = match.name or match.function.__name__
        reason = self._hindrance(match, inner)
        if reason is not None:
            for node in (anchor, *inner):
                self.why.setdefault(node.name, f"not {name}: {reason}")
            return False
        new = self._insert(anchor, match.function, *match.args, **match.kwargs)
        for function, arguments in match.steps:
            new = self._insert(anchor, function, new, *arguments)
        new.meta = {**anchor.meta, **new.meta}
        self._replace(anchor, new)
        doomed = {anchor, *inner}
        for node in reversed(list(self.graph.nodes)):
            if node in doomed or (node in match.views and not node.users):
                self.became[node.name] = name
                self.graph.erase_node(node)
        return True

    def _hindrance(self, match: Match, inner: list[fx.Node]) -> str | None:
        """Why a rewrite is not allowed (not equivalent, or not run by a kernel); None if it is."""
        anchor = match.anchor
        expected = value(match.anchor)
        read_nodes = {n for node in (anchor, *inner) for n in node.all_input_nodes} - {anchor, *inner}
        if any(isinstance(n.meta.get("example_value"), torch.Tensor) and value(n) is None for n in read_nodes):
            return "it reads a subclass of Tensor"
        if (reason := self._refusal(match)) is not None:
            return reason
        reader = next((n for n in operands(match.args, match.kwargs) if n in inner), None) or outside(inner, anchor)
        if reader is not None:
            return f"{reader.name} is also read by other operators"
        if not self.regions.together([anchor, *inner, *match.views], anchor):
            return "between its operators memory is written or a mode of PyTorch changes"
        if len({t.device for t in tensors(match.args, match.kwargs)}) > 1:
            return "its tensors are on several devices"
        try:
            with self.fake, self.regions.modes(anchor):
                result = match.function(*_values(match.args), **_values(match.kwargs))
                for function, arguments in match.steps:
                    result = function(result, *arguments)
        except (TypeError, ValueError, RuntimeError) as error:  # of an argument check, by the function or PyTorch
            return str(error).partition("\n")[0]
        if result.dtype != expected.dtype or not equal(tuple(result.shape), tuple(expected.shape)):
            shapes = list(result.shape), list(expected.shape)
            return f"it would return {shapes[0]} of {result.dtype}, not {shapes[1]} of {expected.dtype}"
        return None

    def _refusal(self, match: Match) -> str | None:
        """Why the kernel or the product that a match calls does not run; None if it does."""
        x, *others = match.args
        if match.function is onednn.product_in_graph:
            return self._product_refusal(match.anchor, x, next(iter(others)))
        example = next(tensors(x))
        return self.refuses(example.device, example.dtype, match.head_dim)

    def _product_refusal(self, node: fx.Node, x: fx.Node, weight: fx.Node | PatternCall | None) -> str | None:
        """Why oneDNN's product of x and a weight, of which the node computes a result, does not run."""
        source = next(iter(weight.args)) if isinstance(weight, PatternCall) else weight  # of its transpose
        if value(x) is None or value(source) is None:
            return "it reads a subclass of Tensor"
        outputs = [t for t in (node, *node.users) if value(t) is not None]
        with self.regions.modes(node):
            return onednn.product_refusal(value(x), value(source), any(value(t).requires_grad for t in outputs))

    def _insert(self, anchor: fx.Node, function: Callable, *args: Any, **kwargs: Any) -> fx.Node:
        """Inserts a call before the anchor, with its example value."""

        def made(argument):
            if isinstance(argument, PatternCall):
                return self._insert(anchor, argument.function, *argument.args)
            return type(argument)(made(a) for a in argument) if isinstance(argument, (tuple, list)) else argument

        args, kwargs = made(args), {k: made(v) for k, v in kwargs.items()}
        with self.graph.inserting_before(anchor):
            new = self.graph.call_function(function, args, kwargs)
        with self.fake, self.regions.modes(anchor):
            new.meta["example_value"] = function(*_values(args), **_values(kwargs))
        self.regions.moved(new, anchor)
        return new

    def _replace(self, old: fx.Node, new: fx.Node) -> None:
        """Replaces all uses of the old node; if the strides differ, its views become reshapes."""
        before = value(old)
        after = value(new)
        old.replace_all_uses_with(new)
        self.regions.replaced(old, new)
        if after.is_contiguous() or after.stride() == before.stride():
            return
        readers = [new]
        while readers:
            node = readers.pop()
            if node.op == "call_method" and node.target == "view":
                node.target = "reshape"
            if node is new or kind(node) in ("transpose", "permute", "reshape"):
                readers += node.users

    def _unbind(self, node: fx.Node) -> None:
        """Makes drop-path's `new_empty` read a graph input, not the branch output, so the branch can be fused."""
        like = value(node)
        inputs = (n for n in self.graph.find_nodes(op="placeholder") if value(n) is not None)
        source = next((n for n in inputs if like is not None and value(n).device == like.device), None)
        if source is not None:
            _, *sizes = node.args
            node.args = (source, *sizes)
            node.kwargs = {"dtype": like.dtype, **node.kwargs}

    def _forget_sizes(self) -> None:
        """Lets readers of sizes read numbers or graph inputs, so that what computes the tensor may be fused."""
        examples = ((n, n.meta.get("example_value")) for n in self.graph.find_nodes(op="placeholder"))
        inputs = {str(example): n for n, example in examples if isinstance(example, torch.SymInt)}
        for node in self.graph.find_nodes(op="call_method", target="size"):
            for item in [item for item in node.users if kind(item) == "getitem"]:
                size = str(item.meta.get("example_value"))
                known_as = int(size) if size.isdigit() else inputs.get(size)
                if known_as is not None:
                    replaced = partial(_replaced, item, known_as)
                    for user in list(item.users):
                        user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), replaced)
                    self.graph.erase_node(item)
            if not node.users:
                self.graph.erase_node(node)

    def _unusable(self, node: fx.Node, x: fx.Node, arguments: dict, kernels: bool) -> str | None:
        operands = {name: t for name, t in arguments.items() if name not in ("attn_mask", "key_padding_mask")}
        dtypes = {t.dtype for t in tensors(operands)}
        if dtypes - {torch.float32, torch.bfloat16, torch.float16} if self.regions.casts(node) else len(dtypes) > 1:
            return "its tensors differ in dtype"
        if not kernels:
            return None
        return self.refuses(value(x).device, value(x).dtype, arguments["embed_dim_to_check"] // arguments["num_heads"])

    def _state_dtype(self, node: fx.Node) -> None:
        """Gives `x.type_as(other)` the dtype itself, so that what computes `other` may be fused."""
        x, other = (value(n) for n in node.all_input_nodes) if len(node.all_input_nodes) == 2 else (None, None)
        if x is not None and other is not None and x.device == other.device:
            node.target = "to"
            node.args = (read(node)["input"], other.dtype)

    def _attention(self, before: fx.Node, x: fx.Node, arguments: dict, *memory: fx.Node) -> fx.Node:
        """Inserts, before a node, an attention as `F.multi_head_attention_forward` computes it."""
        call = partial(self._insert, before)
        weight, bias = arguments["in_proj_weight"], arguments["in_proj_bias"]
        E, heads = arguments["embed_dim_to_check"], arguments["num_heads"]

        def project(t: fx.Node, first: int, last: int) -> list[fx.Node]:
            """The projections of these numbers, with their heads: [B, H, N, D] each."""
            rows = slice(first * E, last * E)
            part = [w if last - first == 3 or w is None else call(operator.getitem, w, rows) for w in (weight, bias)]
            split = call(torch.unflatten, call(F.linear, t, *part), -1, (last - first, heads, E // heads))
            parts = call(torch.unbind, call(torch.permute, split, (2, 0, 3, 1, 4)), 0)
            return [call(operator.getitem, parts, i) for i in range(last - first)]

        sources = (x, *memory) if memory else (x, x, x)
        runs = [(source, list(numbers)) for source, numbers in itertools.groupby(range(3), sources.__getitem__)]
        q, k, v = (part for source, numbers in runs for part in project(source, numbers[0], numbers[-1] + 1))
        mask, padding = arguments.get("attn_mask"), arguments.get("key_padding_mask")
        causal = bool(arguments.get("is_causal")) and not arguments.get("need_weights", True) and padding is None
        if causal:  # PyTorch does not read the mask
            mask = None
        mask = self._joined(before, mask, padding)
        masks = {} if mask is None else dict(attn_mask=mask)
        o = call(F.scaled_dot_product_attention, q, k, v, **masks, **(dict(is_causal=True) if causal else {}))
        merged = call(torch.flatten, call(torch.transpose, o, 1, 2), 2)
        return call(F.linear, merged, arguments["out_proj_weight"], arguments["out_proj_bias"])

    def _joined(self, before: fx.Node, mask: fx.Node | None, padding: fx.Node | None) -> fx.Node | None:
        """Inserts the mask of `F.scaled_dot_product_attention`, whose True keeps a key, for two whose True drops it."""
        call = partial(self._insert, before)
        if padding is not None:
            padding = call(torch.unsqueeze, call(torch.unsqueeze, padding, 1), 2)
        masks = [m for m in (mask, padding) if m is not None]
        if not masks:
            return None
        if value(masks[0]).dtype != torch.bool:
            return masks[0] if len(masks) == 1 else call(torch.add, *masks)
        return call(torch.logical_not, masks[0] if len(masks) == 1 else call(torch.logical_or, *masks))

    def _expand(self, node: fx.Node, kernels: bool = True) -> None:
        """Expands a call of `F.multi_head_attention_forward` into its inner calls, for kernels or oneDNN's products."""
        arguments = read(node)
        query = arguments["query"]
        reason = why_not_expanded(node) or self._unusable(node, query, arguments, kernels)
        if reason is not None:
            self.why[node.name] = reason
            return

        def images_first(t: fx.Node) -> fx.Node:
            return read(t)["input"] if order(t) == (1, 0, 2) else self._insert(node, torch.transpose, t, 0, 1)

        sources = [arguments[name] for name in ("query", "key", "value")]
        first = {t: images_first(t) for t in dict.fromkeys(sources)}
        x, *memory = map(first.__getitem__, sources)
        alone = all(t is x for t in memory)
        y = self._attention(node, x, arguments, *(() if alone else memory))
        for item in list(node.users):
            for reader in list(item.users):
                if order(reader) == (1, 0, 2):  # transposes to [B, N, D], y's layout
                    self._replace(reader, y)
                    self.graph.erase_node(reader)
            if item.users:
                self._replace(item, self._insert(node, torch.transpose, y, 0, 1))
            self.graph.erase_node(item)
        attended = "attention_qkv" if alone else "attention"
        self.became[node.name] = attended if kernels else "products by oneDNN"
        self.graph.erase_node(node)
        for operand in first:
            if not operand.users and operand.op != "placeholder":
                self.graph.erase_node(operand)

    def _expand_layer(self, node: fx.Node, kernels: bool = True) -> None:
        """Expands the single op of `nn.TransformerEncoderLayer` in inference into the calls made in training."""
        arguments = read(node)
        call = partial(self._insert, node)
        x = arguments["src"]
        width = arguments["embed_dim_to_check"]
        masked = arguments.get("mask") is not None or len(shape(x)) != 3
        reason = "it has a mask, or no axes [B, N, D]" if masked else self._unusable(node, x, arguments, kernels)
        if self.regions.casts(node):
            reason = "autocast is enabled, which casts within it"
        if reason is not None:
            self.why[node.name] = reason
            return

        def norm(x, i):
            return call(F.layer_norm, x, (width,), arguments[f"gain{i}"], arguments[f"shift{i}"], arguments["eps"])

        def hidden(x):
            h = call(F.linear, x, arguments["weight1"], arguments["bias1"])
            h = call(F.gelu if arguments["use_gelu"] else F.relu, h)
            return call(F.linear, h, arguments["weight2"], arguments["bias2"])

        if arguments["norm_first"]:
            x = call(operator.add, x, self._attention(node, norm(x, 1), arguments))
            x = call(operator.add, x, hidden(norm(x, 2)))
        else:
            x = norm(call(operator.add, x, self._attention(node, x, arguments)), 1)
            x = norm(call(operator.add, x, hidden(x)), 2)
        self._replace(node, x)
        self.became[node.name] = "attention_qkv, mlp" if kernels else "products by oneDNN"
        self.graph.erase_node(node)

    def _pack(self, users: Sequence[fx.Node]) -> None:
        """Merges linear layers of the same input into one: queries, keys and values, or gate and up projection."""
        layers = [read(n) for n in users]
        source = layers[0]["input"]
        if value(source) is None or self.refuses(value(source).device, value(source).dtype) is not None:
            return
        first = min(users, key=self.regions.place)
        weights = tuple(n["weight"] for n in layers)
        biases = tuple(n.get("bias") for n in layers)
        fits = all(shape(w) and equal(shape(w), shape(weights[0])) for w in weights)
        dtypes = {t.dtype for t in tensors(weights, biases)}
        plain = len(dtypes) == 1 and (dtypes == {torch.float32} or not self.regions.casts(first))  # as `cat` needs
        if not fits or not plain or not self.regions.together([*users], first):
            self.why[source.name] = "the layers that follow differ in size or dtype, or a mode changes between them"
            return
        if any(self.regions.is_written(user) for user in users):
            return  # autograd forbids writing one of several views
        if any(self.regions.place(n) > self.regions.place(first) for n in operands(weights, biases)):
            return
        bias = None
        if any(b is not None for b in biases):
            filled = (PatternCall(zeros_for, (w,)) if b is None else b for w, b in zip(weights, biases, strict=True))
            bias = _joined_rows(tuple(filled))
        packed = self._insert(first, F.linear, source, _joined_rows(weights), bias)
        chunks = self._insert(first, torch.chunk, packed, len(users), -1)
        parts = [self._insert(first, operator.getitem, chunks, i) for i in range(len(users))]
        for node, part in zip(users, parts, strict=True):
            self._replace(node, part)
            self.became[node.name] = "linear"
            self.graph.erase_node(node)

    def _hand_on_statistics(self) -> None:
        """Passes the row statistics of a linear layer's or MLP's output to the first call that normalises it."""
        stats: dict[fx.Node, fx.Node] = {}
        for node in list(self.graph.nodes):
            if kind(node) not in FUSED or read(node).get("norm") is None or self.regions.casts(node):
                continue
            x = read(node)["x"]
            if kind(x) in FUSED and self.regions.alike(x, node) and not self.regions.writes(x, x, node):
                x, stats[x] = self._with_statistics(x, self._reader(node))
            if x in stats:
                node.kwargs = {**node.kwargs, "stats": stats[x]}

    def _reader(self, node: fx.Node) -> Reader:
        """What the call that makes x asks before it returns the statistics that this call reads."""
        with self.fake, self.regions.modes(node):
            call = _values(read(node))
            ends = [call.get(name) for name in ("layer_scale", "sample_scale", "residual")]
            if kind(node) == "fused_linear":
                layer = call["weight"], call["norm"], call.get("activation")
                return Reader("linear", linear.plan_sizes(call["x"], *layer, *ends))
            layers = call["fc1"][0], call["fc2"][0], call["norm"], call.get("activation", "gelu")
            return Reader("mlp", mlp.plan_sizes(call["x"], *layers, *ends))

    def _with_statistics(self, maker: Any, reader: Reader) -> tuple[fx.Node, fx.Node]:
        """Makes a call return row statistics; returns (output node, statistics node) and updates all readers."""
        users = list(maker.users)
        maker.kwargs = {**maker.kwargs, "return_stats": reader}
        with self.fake, self.regions.modes(maker):
            maker.meta["example_value"] = maker.target(*_values(maker.args), **_values(maker.kwargs))
        pair = []
        for i in (1, 0):  # the last one inserted comes first
            with self.graph.inserting_after(maker):
                node = self.graph.call_function(operator.getitem, (maker, i))
            node.meta["example_value"] = maker.meta["example_value"][i]
            self.regions.moved(node, maker)
            pair.append(node)
        stats, y = pair
        self.regions.replaced(maker, y)
        for user in users:
            user.replace_input_with(maker, y)
        return y, stats


def _write_anew(graph: fx.Graph) -> None:
    """Makes `scores *= scale` and the like return a new tensor, if what they write over is not read any more."""
    nodes = list(graph.nodes)
    writers = [node for node in nodes if node.op != "placeholder" and node.target in IN_PLACE]
    if not writers:
        return
    place = {node: i for i, node in enumerate(nodes)}
    held = {node: memory(node.meta.get("example_value")) for node in nodes}
    given = memory([node.meta.get("example_value") for node in nodes if node.op in ("placeholder", "get_attr")])
    for node in writers:
        written, *others = node.args
        if not isinstance(written, fx.Node) or not (mine := held[written]) or mine & given:
            continue
        aliases = (n for n in nodes[: place[node]] if n is not written and not mine.isdisjoint(held[n]))
        if any(place[user] >= place[node] for alias in aliases for user in alias.users):
            continue
        if any(t.dim() and t.dtype not in (value(node).dtype, torch.bool) for t in tensors(*others)):
            continue
        node.target = IN_PLACE[node.target]
        for user in [user for user in written.users if place[user] > place[node]]:
            user.replace_input_with(written, node)


def _replaced(old: fx.Node, new: Any, node: fx.Node) -> Any:
    """The new argument for the old node, and other nodes as they are."""
    return new if node is old else node


def _joined_rows(parts: tuple) -> fx.Node | PatternCall:
    """Tensors one after the other along the first axis: the tensor of which they are all rows, or `torch.cat`."""
    whole, *others = map(_sliced, parts)
    if (t := value(whole)) is None or not t.is_contiguous() or any(other is not whole for other in others):
        return PatternCall(torch.cat, (parts,))
    place = t.storage_offset()
    for part in parts:
        rows = value(part)
        follows = rows is not None and rows.is_contiguous() and rows.storage_offset() == place
        if not follows or rows.shape[1:] != t.shape[1:]:
            return PatternCall(torch.cat, (parts,))
        place += rows.numel()
    return whole if place == t.storage_offset() + t.numel() else PatternCall(torch.cat, (parts,))


def _sliced(part: fx.Node | PatternCall) -> Any:
    """The node of which this is a slice, or a slice of a slice; itself otherwise."""
    while isinstance(part, fx.Node) and kind(part) in ("getitem", "chunk", "split") and len(part.all_input_nodes) == 1:
        (part,) = part.all_input_nodes
    return part


def zeros_for(weight: torch.Tensor) -> torch.Tensor:
    """A zero bias [F] for a layer without one, merged with layers that have one."""
    return weight.new_zeros(weight.shape[0])


def _values(argument: Any) -> Any:
    """An argument of a node with nodes replaced by their example values."""
    if isinstance(argument, fx.Node):
        return argument.meta["example_value"]
    if isinstance(argument, PatternCall):
        return argument.function(*_values(argument.args))
    if isinstance(argument, dict):
        return {name: _values(a) for name, a in argument.items()}
    if isinstance(argument, Reader):
        return argument
    return type(argument)(_values(a) for a in argument) if isinstance(argument, (tuple, list)) else argument
