"""Values that a forward reads on the host, such as the largest position: constants of a capture, compared in each call.

Dynamo does not trace code that uses them, such as a table of as many rows. So a call is run once to see them, traced
with these constants, and the capture fits only calls in which the operators that compute them, from integers alone,
give the same.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch.utils._python_dispatch import TorchDispatchMode

from .example import unchanged
from .graph.nodes import value
from .graph.regions import Memory, memory

READ = "_local_scalar_dense"
RANDOM = re.compile("rand|bernoulli|multinomial|dropout|normal|poisson|uniform|exponential|geometric|cauchy")


class _Recorder(TorchDispatchMode):
    """Records the numbers that are read from tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[Any] = []

    def __torch_dispatch__(self, function: Any, kinds: object, arguments: tuple = (), named: dict | None = None) -> Any:
        result = function(*arguments, **named or {})
        if function.overloadpacket.__name__ == READ:
            self.numbers.append(result)
        return result


def recorded(module: nn.Module, args: tuple, named: dict[str, Any]) -> list[Any]:
    """The numbers that a call of a module's own forward reads, in order; the module is left as it is."""
    with unchanged(module), torch.no_grad(), _Recorder() as recorder:
        type(module).forward(module, *args, **named)
    return recorder.numbers


def equals(t: Tensor, number: Any) -> None:
    """Marks, in Dynamo's graph, that a tensor was read as this number."""


@contextlib.contextmanager
def constant(numbers: Sequence[Any]) -> Iterator[None]:
    """Context in which Dynamo takes the numbers that it would read, in order, for these constants."""

    def item(variable: TensorVariable, tx: Any, *args: Any, **named: Any) -> Any:
        place = len(tx.output.graph.find_nodes(op="call_function", target=equals))
        if place >= len(numbers):
            return read(variable, tx, *args, **named)
        tx.output.create_proxy("call_function", equals, (variable.as_proxy(), numbers[place]), {})
        return ConstantVariable.create(numbers[place])

    read = TensorVariable.method_item
    with patch.object(TensorVariable, "method_item", item):
        yield


def comparison(graph: fx.GraphModule, writes: Sequence[Memory]) -> Callable[..., bool] | None:
    """Tells whether a call reads what was read when it was traced, from the graph's inputs; None if it reads nothing.

    The marks are removed from the graph. A ValueError says why values cannot be compared before the graph runs.
    """
    marks = graph.graph.find_nodes(op="call_function", target=equals)
    if not marks:
        return None
    twin = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {n: twin.node_copy(n) for n in graph.graph.find_nodes(op="placeholder")}
    same: dict[str, fx.Node] = {}  # as queries and keys read the same
    above: list[fx.Node] = []

    def copy(node: fx.Node) -> fx.Node:
        if node not in copies:
            key = str((node.op, node.target, *fx.map_arg((node.args, node.kwargs), copy)))
            copies[node] = same[key] if key in same else same.setdefault(key, twin.node_copy(node, copy))
            above.append(node)
        return copies[node]

    pairs = {(copy(node.args[0]), node.args[1]): None for node in marks}
    read = [value(node) for node in above]
    if any(RANDOM.search(str(getattr(node.target, "__name__", node.target))) for node in above):
        raise ValueError("it reads a random number")  # which a comparison would draw once more
    if any(t is not None and (t.is_floating_point() or t.is_complex()) for t in read):
        raise ValueError("it reads a value that depends on floating-point numbers")
    if any(not where.isdisjoint(memory(read)) for where in writes):
        raise ValueError("it reads a value that it wrote")
    twin.output([t for t, _ in pairs])
    numbers = [number for _, number in pairs]
    tensors = fx.GraphModule(graph, twin)
    for node in marks + above[::-1]:
        if not node.users:
            graph.graph.erase_node(node)

    def holds(*inputs: Any) -> bool:
        return all(t.item() == number for t, number in zip(tensors(*inputs), numbers, strict=True))

    return holds
