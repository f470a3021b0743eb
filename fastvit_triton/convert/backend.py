"""`torch.compile(model, backend="fastvit_triton")`: the kernels where they are the same, Inductor for everything else.

The graph that Dynamo captured is rewritten before autograd is traced, so gradients flow through the kernels' own; the
rest goes to Inductor with the caller's mode and options. A graph in which no kernel would run is handed on untouched.
Every decision is in the log "fastvit_triton.convert.backend" at level INFO, and in `report`.
"""

import copy
import logging
import re
import sys
import types
from collections.abc import Callable

import torch
from torch import fx, nn

from ..kernels.backend import why_not
from .graph import kind, value
from .reporting import Report, Row
from .rewrite import Rewriter

NAME = "fastvit_triton"
UNFUSED = "left to the compiler"
CANDIDATES = ("conv2d", "encoder_layer", "gelu", "layer_norm", "linear", "multi_head_attention", "relu", "silu")
CANDIDATES += ("scaled_dot_product_attention", "softmax")

log = logging.getLogger(__name__)

Compile = Callable[[fx.GraphModule, list], Callable]


def backend(
    graph: fx.GraphModule,
    inputs: list,
    *,
    mode: str | None = None,
    options: dict | None = None,
    inner: Compile | None = None,
) -> Callable:
    """Compiles a captured graph; what `torch.compile` calls.

    Args:
        graph: as Dynamo captured it, with the traced values in its nodes; rewritten in place.
        inputs: its inputs, traced.
        mode: Inductor's, as `torch.compile` takes it.
        options: Inductor's.
        inner: compiles the rewritten graph in Inductor's place; called with graph and inputs.

    Returns:
        The compiled function.
    """
    found = rewrite(graph)
    if found.rows and log.isEnabledFor(logging.INFO):
        log.info("%s", found)
    if inner is not None:
        return inner(graph, inputs)
    return torch._TorchCompileInductorWrapper(mode, options, None)(graph, inputs)


def _reset() -> None:
    """What `torch._dynamo.reset` does for Inductor: forget recorded CUDA graphs, where there are any."""
    if (trees := sys.modules.get("torch._inductor.cudagraph_trees")) is not None:
        trees.reset_cudagraph_trees()


backend.reset = _reset


def rewrite(graph: fx.GraphModule) -> Report:
    """Rewrites a captured graph in place, and the checkpointed parts in it; leaves alone what no kernel could run."""
    rows = [row for part in _bodies(graph) for row in rewrite(part).rows]
    candidates = [(node.name, _path(node), kind(node)) for node in graph.graph.nodes if kind(node) in CANDIDATES]
    found = [t for node in graph.graph.nodes if (t := value(node)) is not None and t.is_floating_point()]
    reasons = [why_not(device, dtype) for device, dtype in dict.fromkeys((t.device, t.dtype) for t in found)]
    if not candidates or all(reasons):
        why = next(iter(reasons), "it computes nothing in floating point")
        return Report((*rows, *(Row(path, call, why=why) for _, path, call in candidates)), unfused=UNFUSED)
    rewriter = Rewriter(graph.graph)
    rewriter.run()
    if rewriter.became:
        graph.recompile()
    for name, path, call in candidates:
        became = rewriter.became.get(name)
        why = rewriter.why.get(name, "nothing it could be fused with")
        rows.append(Row(path, call, became, why=None if became else why))
    return Report(tuple(rows), unfused=UNFUSED)


def _bodies(graph: fx.GraphModule) -> list[fx.GraphModule]:
    """The parts that `torch.utils.checkpoint` runs, each a graph of its own."""
    calls = graph.graph.find_nodes(op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint)
    return [graph.get_submodule(node.args[0].target) for node in calls]


def _path(node: fx.Node) -> str:
    """The innermost module that a node comes from, by its name in the model."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return re.sub(r"^L\['\w+'\]\.?|^.*__closure__\S*\.?", "", stack[-1][0]) if stack else ""


def report(model: nn.Module, *inputs: object, **options: object) -> Report:
    """What the backend would do with a model, found by one call of model(*inputs, **options) that compiles nothing.

    Kernels are chosen for the device, dtype and autocast of that call, and for training where gradients are on.
    """
    found: list[Row] = []

    def look(graph, _):
        twin = fx.GraphModule(graph, copy.deepcopy(graph.graph))
        found.extend(rewrite(twin).rows)
        return graph.forward

    def call(*inputs, **options):
        return model(*inputs, **options)

    fresh = call.__code__.replace()  # Dynamo keeps what it compiled by code object
    run = types.FunctionType(fresh, call.__globals__, "call", None, call.__closure__)
    torch.compile(run, backend=look)(*inputs, **options)
    return Report(tuple(found), unfused=UNFUSED)


# An installed package is found by its entry point; one in a source tree registers itself.
if NAME not in torch._dynamo.list_backends(exclude_tags=()):
    torch._dynamo.register_backend(backend, name=NAME)
