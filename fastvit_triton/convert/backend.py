"""`torch.compile(model, backend="fastvit_triton")`: our kernels for matching subgraphs, Inductor for the rest.

The graph captured by Dynamo is rewritten before autograd is traced, so the kernels' own backward passes run; the rest
goes to Inductor with the caller's mode and options. A graph in which no kernel can run is passed on unchanged.
Every decision is logged to "fastvit_triton.convert.backend" at level INFO, and is in `report`.
"""

import copy
import logging
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from ..kernels.backend import why_not
from .graph.nodes import kind, value
from .graph.rewrite import Rewriter
from .reporting import Report, Row

NAME = "fastvit_triton"
UNFUSED = "left to the compiler"
CANDIDATES = (
    *("conv2d", "encoder_layer", "gelu", "layer_norm", "linear", "multi_head_attention", "relu", "silu"),
    *("scaled_dot_product_attention", "softmax"),
)

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
    """Compiles a captured graph; called by `torch.compile`.

    Args:
        graph: as captured by Dynamo, with example values in its nodes; rewritten in place.
        inputs: its example inputs (fake tensors).
        mode: Inductor's mode, as in `torch.compile`.
        options: Inductor's options.
        inner: compiler of the rewritten graph, called with graph and inputs; None for Inductor.

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
    """Drops Inductor's recorded CUDA graphs, as `torch._dynamo.reset` does for backend "inductor"."""
    if (trees := sys.modules.get("torch._inductor.cudagraph_trees")) is not None:
        trees.reset_cudagraph_trees()


vars(backend)["reset"] = _reset


def rewrite(graph: fx.GraphModule) -> Report:
    """Rewrites a captured graph and its checkpointed subgraphs in place, where kernels can run."""
    rows = [row for part in _bodies(graph) for row in rewrite(part).rows]
    candidates = [(node.name, _path(node), name) for node in graph.graph.nodes if (name := kind(node)) in CANDIDATES]
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
        why = rewriter.why.get(name, "it has nothing to be fused with")
        rows.append(Row(path, call, became, why=None if became else why))
    return Report(tuple(rows), unfused=UNFUSED)


def _bodies(graph: fx.GraphModule) -> list[Any]:
    """The subgraphs that `torch.utils.checkpoint` runs."""
    calls = graph.graph.find_nodes(op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint)
    return [graph.get_submodule(node.args[0].target) for node in calls]


def _path(node: fx.Node) -> str:
    """Path in the model of the innermost module that a node comes from."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return re.sub(r"^L\['\w+'\]\.?|^.*__closure__\S*\.?", "", stack[-1][0]) if stack else ""


def report(model: nn.Module, *inputs: object, **options: object) -> Report:
    """Reports what the backend would do with a model, from one call of model(*inputs, **options) without compilation.

    Kernels are chosen for the device, dtype and autocast of that call, and for training if gradients are enabled.
    """
    found: list[Row] = []

    def look(graph, _):
        twin = fx.GraphModule(graph, copy.deepcopy(graph.graph))
        found.extend(rewrite(twin).rows)
        return graph.forward

    def call(*inputs, **options):
        return model(*inputs, **options)

    fresh = call.__code__.replace()  # Dynamo caches compiled code by code object
    run = types.FunctionType(fresh, call.__globals__, "call", None, call.__closure__)
    torch.compile(run, backend=look)(*inputs, **options)
    return Report(tuple(found), unfused=UNFUSED)


# The backend of an installed package is found by its entry point; in a source tree it is registered here.
if NAME not in torch._dynamo.list_backends(exclude_tags=()):
    torch._dynamo.register_backend(backend, name=NAME)
