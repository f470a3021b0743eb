"""Separates what a captured graph computes from weights alone, which a frozen model keeps between calls.

These are LayerNorms, folded into the linear layers and MLPs that follow them, packed projections, and what the block
itself computes from its weights, such as biases from tables of relative positions.
"""

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from ...kernels.fold import Folded, Group, fold
from .nodes import Argument, kind, operands, read, value
from .regions import Memory, memory
from .rewrite import FUSED, zeros_for

RANDOM = ("dropout", "encoder_layer", "multi_head_attention", "scaled_dot_product_attention")
FUNCTIONS = (torch.clamp, torch.exp, torch.roll, torch.unsqueeze)
METHODS = ("clamp", "exp", "float", "t", "type_as", "unsqueeze")


class WeightSplit(NamedTuple):
    """A graph in two parts."""

    reads: list[int]  # numbers of the graph's inputs that the first part reads
    kept: fx.Graph  # the first part: computes a tuple of tensors from weights
    rest: fx.Graph  # computes the results of the graph from all of its inputs and then these tensors


def split(graph: fx.Graph, weights: set[str]) -> WeightSplit | None:
    """The graph in two parts, of which `rest` is the graph itself, changed; None if the first would compute nothing."""
    inputs = graph.find_nodes(op="placeholder")
    parameters = [node for node in inputs if node.name in weights and value(node) is not None]
    constant = set(parameters)
    for node in graph.nodes:
        if _is_pure(node) and constant.issuperset(node.all_input_nodes):
            constant.add(node)
    for node in list(graph.nodes):
        if (folded := _fold(graph, node, constant)) is not None:
            constant.add(folded)
    old = memory([value(node) for node in parameters])
    ends = [node for node in graph.nodes if node in constant and _is_kept(node, constant, old)]
    if not ends:
        return None
    needed = _above(ends)
    kept = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node in needed:
            copies[node] = kept.node_copy(node, copies.__getitem__)
    results: list[Argument] = []
    last = inputs[-1]
    for node in ends:
        parts = [copies[node]]
        if node.target is fold:
            parts = [kept.call_function(operator.getitem, (copies[node], i)) for i in range(3)]
        new = []
        for part in parts:
            with graph.inserting_after(last):
                last = graph.placeholder(f"kept_{len(results)}")
            new.append(last)
            results.append(part)
        with graph.inserting_before(node):
            replacement = new[0] if len(new) == 1 else graph.call_function(Folded, tuple(new))
        node.replace_all_uses_with(replacement, delete_user_cb=lambda user: user not in constant)
    kept.output(tuple(results))
    for node in reversed(list(graph.nodes)):
        if node in constant and node.op != "placeholder" and not node.users:
            graph.erase_node(node)
    return WeightSplit([i for i, node in enumerate(inputs) if node in needed], kept, graph)


def _is_pure(node: fx.Node) -> bool:
    """True for an operator that computes one result from its operands, of which it has some, and does nothing else."""
    if node.op not in ("call_function", "call_method") or not node.all_input_nodes:
        return False
    if (name := kind(node)) is None:
        return node.target in (METHODS if node.op == "call_method" else (*FUNCTIONS, zeros_for))
    arguments = read(node)
    return name not in RANDOM and not (arguments.get("inplace") or arguments.get("return_stats"))


def _fold(graph: fx.Graph, node: fx.Node, constant: set[fx.Node]) -> fx.Node | None:
    """Folds the LayerNorm of a linear layer or MLP, if all that it multiplies by is constant; the new node, or None.

    The layer also gets what was folded, which PyTorch's operators use where these are chosen.
    """
    if kind(node) not in FUSED:
        return None
    arguments = read(node)
    if (norm := arguments.get("norm")) is None:
        return None
    positional: Argument = node.args
    x, second, *others = positional
    weight, bias = second if kind(node) == "fused_mlp" else (second, others[0] if others else arguments.get("bias"))
    parameters = [t for t in (weight, bias, *norm[:2]) if t is not None]
    if not constant.issuperset(parameters) or value(weight).dtype != value(x).dtype:
        return None
    with graph.inserting_before(node):
        source = ((weight,), (bias,), *norm[:2])
        new = graph.call_function(fold, (*source, value(x).dtype))
        layer = graph.call_function(_with_source, (new, *source))
    node.args = (x, (layer, None), *others) if kind(node) == "fused_mlp" else (x, layer)
    node.kwargs = {**node.kwargs, "norm": (None, None, *norm[2:])}
    return new


def _with_source(folded: Folded, *source: Any) -> Folded:
    return folded._replace(source=Group(*source))


def _is_kept(node: fx.Node, constant: set[fx.Node], old: Memory) -> bool:
    """True for a tensor in memory of its own that an operator outside of `constant` reads."""
    if constant.issuperset(node.users):
        return False
    return node.target is fold or (value(node) is not None and memory(value(node)).isdisjoint(old))


def _above(nodes: list[fx.Node]) -> set[fx.Node]:
    """These nodes and all that they are computed from."""
    ancestors: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in ancestors:
            ancestors.add(node)
            todo += operands(*node.args, node.kwargs)
    return ancestors
