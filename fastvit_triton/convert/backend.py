"""`torch.compile(model, backend="fastvit_triton")`: our kernels for matching subgraphs, Inductor for the rest.

The graph captured by Dynamo is rewritten before autograd is traced, so the kernels' own backward passes run; the rest
goes to Inductor with the caller's mode and options. On a CPU, linear layers are replaced by oneDNN's products where
`kernels.choose` says so. A graph in which neither can run is passed on unchanged, and so is one whose rewriting fails,
with a warning. Every decision is logged to "fastvit_triton.convert.backend" at level INFO, and is in `report`.
"""

import contextlib
import copy
import logging
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn

from ..kernels import onednn
from ..kernels.backend import why_not
from .direct import with_lowering
from .graph.nodes import kind, shape, value
from .graph.rewrite import Rewriter
from .reporting import Report, Row

NAME = "fastvit_triton"
UNFUSED = "left to the compiler"
CANDIDATES = (
    *("addmm", "conv2d", "encoder_layer", "gelu", "layer_norm", "linear", "multi_head_attention", "relu", "silu"),
    *("rms_norm", "scaled_dot_product_attention", "softmax"),
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
    try:
        summary = rewrite(graph)
    # Any error: the program ran without us, and Inductor compiles the graph, which is unchanged. The cause is logged.
    except Exception as error:
        traced = log.isEnabledFor(logging.DEBUG)
        identity = f"[{torch._guards.CompileContext.current_compile_id()}]"  # as in PyTorch's own logs
        log.warning("graph %s is left to Inductor: its rewriting failed with %r", identity, error, exc_info=traced)
    else:
        if summary.rows and log.isEnabledFor(logging.INFO):
            log.info("%s", summary)
    if inner is None:
        return compiled(graph, inputs, mode, options)
    with compiling():
        return inner(graph, inputs)


def compiled(graph: fx.GraphModule, inputs: list, mode: str | None = None, options: dict | None = None) -> Callable:
    """A graph compiled by Inductor, with our operators in it; the arguments are those of `backend`."""
    with compiling():
        return torch._TorchCompileInductorWrapper(mode, with_lowering(options), None)(graph, inputs)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Context in which `torch.compiler.is_compiling` is true, as it is for a whole compilation with newer PyTorch.

    AOTAutograd runs our functions, which then make no choice by a number of images or tokens.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def _reset() -> None:
    """Drops Inductor's recorded CUDA graphs, as `torch._dynamo.reset` does for backend "inductor"."""
    if (trees := sys.modules.get("torch._inductor.cudagraph_trees")) is not None:
        trees.reset_cudagraph_trees()


vars(backend)["reset"] = _reset


def rewrite(graph: fx.GraphModule, anywhere: bool = False, layers: bool = False) -> Report:
    """Rewrites a captured graph and its checkpointed subgraphs in place, where kernels or oneDNN's products can run.

    Copies are rewritten first, so if this raises an error, all graphs are unchanged.
    """
    summary, rewritten = _plan(graph, anywhere, layers)
    for part, new in rewritten:
        part.graph = new
    return summary


def _plan(
    graph: fx.GraphModule, anywhere: bool = False, layers: bool = False
) -> tuple[Report, list[tuple[Any, fx.Graph]]]:
    """What a rewriting does, and each module whose graph it changes with the new graph."""
    rows: list[Row] = []
    rewritten = [(part, _rewritten(part.graph, rows, anywhere, layers)) for part in _parts(graph)]
    return Report(tuple(rows), unfused=UNFUSED), [(part, new) for part, new in rewritten if new is not None]


def _rewritten(graph: fx.Graph, rows: list[Row], anywhere: bool, layers: bool) -> fx.Graph | None:
    """A rewritten copy of a graph, or None if nothing is rewritten; adds a row for each candidate."""
    candidates = [(node.name, path_of(node), name) for node in graph.nodes if (name := _candidate(node)) is not None]
    tensors = [t for node in graph.nodes if (t := value(node)) is not None and t.is_floating_point()]
    reasons = [why_not(device, dtype) for device, dtype in dict.fromkeys((t.device, t.dtype) for t in tensors)]
    kernels = anywhere or not all(reasons)
    devices = () if anywhere else {t.device for t in tensors}
    products = any(onednn.unlisted(device, dtype) is None for device in devices for dtype in onednn.DTYPES)
    otherwise = "it has nothing to be fused with"
    if not kernels:
        otherwise = next(iter(reasons), None) or "it computes nothing in floating point"
    if not candidates or not (kernels or products):
        rows += [Row(path, call, why=otherwise) for _, path, call in candidates]
        return None
    rewriter = Rewriter(copied(graph), (lambda *_: None) if anywhere else why_not)
    if kernels:
        rewriter.run(compiled=not layers)
    if layers:
        rewriter.insert_layers()
    if products:
        rewriter.insert_products()
    for name, path, call in candidates:
        became = rewriter.became.get(name)
        why = rewriter.why.get(name, otherwise)
        rows.append(Row(path, call, became, why=None if became else why))
    return rewriter.graph if rewriter.became else None


def _candidate(node: fx.Node) -> str | None:
    """The operation of a node that a report lists; None for others, and for a softmax over classes."""
    name = kind(node)
    return name if name in CANDIDATES and not (name == "softmax" and len(shape(node)) < 3) else None


def copied(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph with all attributes of its nodes, such as those that Dynamo gives to inputs."""
    twin = copy.deepcopy(graph)
    for old, new in zip(graph.nodes, twin.nodes, strict=True):
        vars(new).update({name: attribute for name, attribute in vars(old).items() if name not in vars(new)})
    return twin


def _parts(graph: Any) -> list[Any]:
    """The subgraphs that `torch.utils.checkpoint` runs, and the graph itself, which comes after its own subgraphs."""
    calls = graph.graph.find_nodes(op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint)
    bodies = [graph.get_submodule(body.target) for body, *_ in (node.args for node in calls)]
    return [part for body in bodies for part in _parts(body)] + [graph]


def path_of(node: fx.Node) -> str:
    """Path in the model of the innermost module that a node comes from."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return re.sub(r"^L\['\w+'\]\.?|^.*__closure__\S*\.?", "", stack[-1][0]) if stack else ""


def report(model: nn.Module, *inputs: object, **options: object) -> Report:
    """Reports what the backend would do with a model, from one call of model(*inputs, **options) without compilation.

    Kernels are chosen for the device, dtype and autocast of that call, and for training if gradients are enabled.
    """
    rows: list[Row] = []

    def look(graph, _):
        rows.extend(_plan(graph)[0].rows)
        return graph.forward

    def call(*inputs, **options):
        return model(*inputs, **options)

    fresh = call.__code__.replace()  # Dynamo caches compiled code by code object
    run = types.FunctionType(fresh, call.__globals__, "call", None, call.__closure__)
    torch.compile(run, backend=look)(*inputs, **options)
    return Report(tuple(rows), unfused=UNFUSED)


# The backend of an installed package is found by its entry point; in a source tree it is registered here.
if NAME not in torch._dynamo.list_backends(exclude_tags=()):
    torch._dynamo.register_backend(backend, name=NAME)
