"""Compiles a captured graph with Inductor: calls of the kernels where these pay, with PyTorch's operators between."""

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch._functorch.config
from torch import Tensor, fx
from torch._dynamo.exc import RestartAnalysis
from torch._functorch._aot_autograd import graph_compile

from ..kernels import settings
from .backend import compiled, compiling, copied, rewrite
from .graph.nodes import value
from .graph.weights import WeightSplit, split

log = logging.getLogger(__name__)

_numbers = itertools.count(1)


class Region(NamedTuple):
    """A captured graph for Inductor."""

    # runs its operators one by one, as one region of a trace of `expected`; None if it cannot be compiled
    counted: Callable | None = None
    call: Callable | None = None  # the compiled function; None if it was not compiled
    seconds: float = 0.0  # how long Inductor took
    why: str | None = None  # why it was not compiled; None if it was, or was not to be
    settings: Hashable = None  # with which it was compiled, see `kernels.settings.compiled`
    # the graph in two parts, of which both functions compute the second one; None if they compute it whole
    parts: WeightSplit | None = None


def region(
    owner: fx.GraphModule, graph: fx.Graph, examples: list, compiles: bool, weights: Collection[str] = ()
) -> Region:
    """The region of a graph as it was captured; called within Dynamo's compilation.

    With the names of inputs that are `weights` of a frozen module, what is computed from these alone is left out.
    """
    part = fx.GraphModule(owner, graph)
    rewrite(part, anywhere=True)
    parts = split(copied(part.graph), {*weights}) if weights else None
    if parts is not None:
        inputs = [value(node) for node in part.graph.find_nodes(op="placeholder")]  # without memory
        with torch.no_grad():
            kept = fx.GraphModule(owner, parts.kept)(*(inputs[i] for i in parts.reads))
        examples = [*examples, *(t.contiguous() for t in kept)]  # as `all_derived` keeps them
        part = fx.GraphModule(owner, parts.rest)
    operators = fx.GraphModule(owner, copied(part.graph))
    for node in operators.graph.nodes:
        node.meta.clear()  # fake tensors and stack traces

    def counted(*inputs: Any) -> Any:
        return _Counted.apply(operators, *inputs) if torch.is_grad_enabled() else _in_region(operators, inputs)

    if not compiles:
        return Region(counted, parts=parts)
    start = time.perf_counter()
    try:
        with _settings():
            # with PyTorch's generators dropout draws what it draws in an eager call
            call = compiled(part, examples, None, {"fallback_random": True})
    except RestartAnalysis:  # Dynamo traces again
        raise
    # Any error of Inductor or of a compiler under it: the graph runs as it is, and the report has the error.
    except Exception as error:
        log.debug("Inductor failed", exc_info=True)
        return Region(counted, why=f"Inductor failed with {type(error).__name__}: {first_line(error)}", parts=parts)
    return Region(counted, call, time.perf_counter() - start, parts=parts)


def first_line(error: Exception) -> str:
    """The first line of an error's message that has text; "" if there is none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """Context in which the backward pass is compiled at once, so that errors are seen, and keeps what it reads.

    AOTAutograd lets the code of the backward pass write over saved tensors, which then can run only once. Its cache on
    disk does not compare that, and is not used.
    """
    options = {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True}
    known = {name: value for name, value in options.items() if hasattr(torch._functorch.config, name)}
    donated = "collect_bw_donated_buffer_idxs"
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._functorch.config.patch(known))
        if hasattr(graph_compile, donated):
            stack.enter_context(patch.object(graph_compile, donated, lambda *_: []))
        yield


def _in_region(function: Callable, inputs: tuple) -> Any:
    """The outputs of a function whose operators belong to one region."""
    before = settings.region
    settings.region = next(_numbers)
    try:
        with compiling():
            return function(*inputs)
    finally:
        settings.region = before


class _Counted(torch.autograd.Function):
    """Autograd of a region in a trace: the operators of its backward pass belong to one region, too."""

    @staticmethod
    def forward(ctx, function, *inputs):
        ctx.inputs = [t.detach().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t for t in inputs]
        with torch.enable_grad():
            outputs = _in_region(function, tuple(ctx.inputs))
        ctx.places = [i for i, t in enumerate(outputs) if isinstance(t, Tensor) and t.requires_grad]
        ctx.outputs = [outputs[i] for i in ctx.places]
        results = tuple(t.detach() if isinstance(t, Tensor) else t for t in outputs)
        others = (t for i, t in enumerate(results) if i not in ctx.places and isinstance(t, Tensor))
        ctx.mark_non_differentiable(*others)
        return results

    @staticmethod
    def backward(ctx, *grads):
        wanted = [t for t in ctx.inputs if isinstance(t, Tensor) and t.requires_grad]
        given = [grads[i] for i in ctx.places]

        def gradients(*outputs: Tensor) -> tuple[Tensor | None, ...]:
            return torch.autograd.grad(outputs, wanted, given, allow_unused=True)

        found = iter(_in_region(gradients, tuple(ctx.outputs)))
        return None, *(next(found) if isinstance(t, Tensor) and t.requires_grad else None for t in ctx.inputs)
