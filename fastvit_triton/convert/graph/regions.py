"""Where nodes of a graph may be merged: which memory each node writes, and in which modes of PyTorch it runs."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from .nodes import value

Memory = set[StorageWeakRef]

# names of functions in `torch.nn.attention.sdpa_kernel`, which only choose among PyTorch's implementations
SDPA_KERNEL = ("_sdpa_kernel", "_backend_from_string")


def memory(item: Any) -> Memory:
    """The storages of the tensors in an example value."""
    return {StorageWeakRef(t.untyped_storage()) for t in tree_iter(item) if isinstance(t, FakeTensor)}


class Writes(TorchDispatchMode):
    """Collects the storages that operators write, as their schemas declare."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Memory = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func._schema.is_mutable:
            for i, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self.found |= memory(args[i] if i < len(args) else (kwargs or {}).get(argument.name))
        return func(*args, **kwargs or {})


@contextlib.contextmanager
def _unchanged(shape_env: ShapeEnv | None) -> Iterator[None]:
    """Lets operators ask for the values of symbolic sizes without a guard on them."""
    if shape_env is None:
        yield
        return
    with shape_env.suppress_guards(), shape_env.ignore_fresh_unbacked_symbols():
        yield


def written(node: fx.Node, fake: FakeTensorMode) -> Memory | None:
    """The storages of its operands that a node writes, from a run on example values; None if that is not known."""
    examples = [n.meta.get("example_value") for n in node.all_input_nodes]
    if isinstance(node.target, torch._ops.HigherOrderOperator) or node.op == "call_module":
        return None
    if any(isinstance(t, torch.Tensor) and type(t) is not FakeTensor for t in tree_iter(examples)):
        return None  # a subclass defines its own operators
    if not (readable := memory(examples)):
        return set()
    values = {n: n.meta.get("example_value") for n in node.all_input_nodes}
    try:
        with torch.no_grad(), fake, _unchanged(fake.shape_env), enable_python_dispatcher():
            # views, so that a node that changes sizes or strides in place leaves those of the example value
            views = tree_map_only(torch.Tensor, torch.Tensor.detach, values)
            args, options = fx.map_arg((node.args, node.kwargs), views.__getitem__)
            target: Any = node.target
            if node.op == "call_method":
                owner, *rest = args
                args = tuple(rest)
                target = getattr(owner, target)
            with Writes() as writes:
                target(*args, **options)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):  # it needs more than example values
        return None
    return writes.found & readable


def _changes(entered: tuple, active: dict[fx.Node, tuple]) -> bool:
    """True if an autocast context (device type, dtype, enabled, …) changes the modes that hold."""
    device, _, enabled, *_ = entered
    others = any(kind_ == device and is_on for kind_, _, is_on, *_ in active.values())
    return bool(enabled or others or torch.is_autocast_enabled(device))


class Regions:
    """Regions of a graph in which nodes may be merged, separated by nodes that change a PyTorch mode.

    A node whose writes are not known also ends a region.
    """

    def __init__(self, graph: fx.Graph, fake: FakeTensorMode) -> None:
        self._region: dict[fx.Node, int] = {}
        self._place = {node: i for i, node in enumerate(graph.nodes)}
        self._memory = {node: memory(node.meta.get("example_value")) for node in graph.nodes}
        self._writes: list[tuple[int, Memory]] = []
        self._autocast: dict[int, tuple[tuple, ...]] = {0: ()}
        region = 0
        active: dict[fx.Node, tuple] = {}
        idle: set[fx.Node] = set()
        for node in graph.nodes:
            calls = node.op in ("call_function", "call_method", "call_module")
            writes = written(node, fake) if calls else set()
            silent = calls and node.meta.get("example_value") is None and not writes
            name = getattr(node.target, "__name__", "")
            if name == "_enter_autocast" and not _changes(node.args, active):
                idle.add(node)  # autocast is off already
            elif name in SDPA_KERNEL:
                pass
            elif (writes is None or silent) and idle.isdisjoint(node.all_input_nodes):
                region += 1
                if name == "_enter_autocast":
                    active[node] = node.args
                elif name == "_exit_autocast":
                    for entered in node.all_input_nodes:
                        active.pop(entered, None)
            if writes:
                self._writes.append((self._place[node], writes))
            self._region[node] = region
            self._autocast[region] = tuple(active.values())

    def moved(self, new: fx.Node, old: fx.Node) -> None:
        """Records that a new node takes the position of an old one."""
        self._region[new], self._place[new] = self._region[old], self._place[old]
        self._memory[new] = memory(new.meta.get("example_value"))

    def replaced(self, old: fx.Node, new: fx.Node) -> None:
        """Records that nodes that read the old node, or write its memory, now use that of the new one."""
        self._memory[new] = self._memory[new] | self._memory[old]

    def together(self, nodes: list[fx.Node], at: fx.Node) -> bool:
        """True if these nodes may run at the position of `at`: in the same modes, reading the same values."""
        return self.alike(*nodes, at) and not any(self.writes(r, n, at) for n in nodes for r in n.all_input_nodes)

    def alike(self, *nodes: fx.Node) -> bool:
        """True if all of these nodes run in the same modes."""
        return len({self._region[n] for n in nodes}) == 1

    def writes(self, read: fx.Node, *ends: fx.Node) -> bool:
        """True if a node writes the memory of `read` from the first to the last of the positions of `ends`."""
        places = [self._place[n] for n in ends]
        return any(min(places) <= p <= max(places) and not m.isdisjoint(self._memory[read]) for p, m in self._writes)

    def is_written(self, node: fx.Node) -> bool:
        """True if any node writes the memory of this one."""
        return any(not m.isdisjoint(self._memory[node]) for _, m in self._writes)

    def place(self, node: fx.Node) -> int:
        """Position of a node in the captured graph."""
        return self._place[node]

    def casts(self, node: fx.Node) -> bool:
        """True if autocast may be on when this node runs."""
        example = value(node)
        return bool(self._autocast[self._region[node]]) or (
            example is not None and torch.is_autocast_enabled(example.device.type)
        )

    @contextlib.contextmanager
    def modes(self, node: fx.Node) -> Iterator[None]:
        """Context with the modes in which this node runs: autocast as in the graph, and no gradients."""
        with contextlib.ExitStack() as stack:
            for kind_, *rest in self._autocast[self._region[node]]:
                stack.enter_context(torch.autocast(kind_, *rest))
            stack.enter_context(torch.no_grad())
            stack.enter_context(enable_python_dispatcher())  # some operators take symbolic sizes only by it
            yield
