"""Captures the call of a module as a graph by Dynamo, rewrites it with the patterns of `graph`, and makes it callable.

The graph holds PyTorch calls on the parameters and inputs, and sizes as symbols, so that one graph serves every batch
and image size, and every module with the same structure. It is not compiled: the rewritten graph runs as it is, and
autograd records its operators. What the graph depends on besides the structure is returned with it, see `Capture`.
"""

import contextlib
import itertools
import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting
from torch._dynamo.variables.builder import VariableBuilder
from torch.fx.experimental import _config as shapes_config
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten
from torch.utils._sympy.symbol import SymT, symbol_is_type
from torch.utils.flop_counter import FlopCounterMode

from ..engine.freeze import all_derived, keeps
from ..engine.hooks import PACKAGE
from ..kernels.backend import kernels_available
from .backend import copied, path_of, rewrite
from .flop_shares import ATTENTION_FLOPS, enclosing
from .graph.nodes import kind, read, same, up
from .graph.regions import Memory, memory
from .graph.weights import Split, split
from .reporting import Row
from .third_party import is_rate

log = logging.getLogger(__name__)

OURS = f"{PACKAGE}."
ATTRIBUTE = re.compile(r"L\['module'\](\.\w+|\['\w+'\]|\[\d+\])*$")  # compared by the caller
HELD = re.compile(r"module(\._modules\['\w+'\])*(\.\w+|\._(parameters|buffers)\['\w+'\])$")  # sizes, by the caller
PRODUCTS = {"addmm": 1, "encoder_layer": 5, "linear": 1, "matmul": 1, "scaled_dot_product_attention": 1}
COMPARED = ("CONSTANT_MATCH", "EQUALS_MATCH", "ID_MATCH")
# private: the setting `specialize_float` is for all numbers, and a softmax whose scale is an input is not fused
WRAP = getattr(VariableBuilder, "wrap_symfloat", None)
RATES = f"its rates are constants, as torch {torch.__version__} has no VariableBuilder.wrap_symfloat"
PYTORCH = re.compile(r"G\['__import_torch(_dot_|'\])|G\['__builtins|__import__\('torch'\)|G\['torch'\]")


class Refusal(RuntimeError):
    """Raised if a call cannot be captured; the message completes "it cannot be captured: "."""


class _Stop(Exception):
    """Ends the compiled call before it computes anything."""


class Launches(NamedTuple):
    """Operators of a captured graph that write memory of their own, about one launch each.

    Attributes:
        original: number of them in the block's own forward, by the path of the module that calls them.
        products: number of linear layers and attention in these.
        rewritten: number of them in the rewritten graph, where an MLP counts as its two linear layers.
    """

    original: Counter[str]
    products: Counter[str]
    rewritten: int

    def beside(self, fused: Collection[str]) -> int:
        """Launches of the block's own forward if the modules at these paths run their fused forwards.

        Of these, one is counted for each linear layer and attention.
        """
        inside = {path for path in self.original if not {*enclosing(path)}.isdisjoint(fused)}
        apart = sum(n for path, n in self.original.items() if path not in inside)
        return apart + sum(self.products[path] for path in inside)


class Capture(NamedTuple):
    """A rewritten graph and what it holds for.

    Attributes:
        run: (module, positional arguments, keyword arguments) → its outputs. If the module is frozen, what the graph
            computes from weights alone is kept.
        fits: the same arguments → True if the graph holds for their sizes.
        constants: globals and attributes of classes that the graph has as constants: (how to read it, its value).
        writes: True if it writes any tensor in place.
        calls: of the graph to the kernels' public functions, by name.
        left: what the patterns look for and did not fuse, with the reasons.
        launches: of the graph before and after it was rewritten.
        replaced: the part of the graph's FLOPs that its calls to the kernels' public functions do, in [0, 1].
    """

    run: Callable[[nn.Module, tuple, dict], Any]
    fits: Callable[[nn.Module, tuple, dict], bool]
    constants: list[tuple[Callable[[nn.Module], Any], Any]]
    writes: bool
    calls: Counter[str]
    left: tuple[Row, ...]
    launches: Launches
    replaced: float


def capture(module: nn.Module, args: tuple, named: dict[str, Any], outputs: Any) -> Capture:
    """Captures and rewrites the call of a module's own forward; nothing is computed.

    Gradients, autocast and the training mode are those of the moment.

    Args:
        module: it and its submodules must run the code of their classes, without hooks.
        args: positional arguments: tensors, numbers, None, and containers of these.
        named: keyword arguments of the same kinds.
        outputs: what the call returns for these arguments.

    Raises:
        Refusal: with the reason, for example a graph break.
    """
    results: list[Capture | Refusal] = []
    scope: dict[str, Any] = {"__builtins__": __builtins__}

    def compiler(graph: fx.GraphModule, inputs: list) -> Callable:
        try:
            results.append(_captured(graph, scope, module, args, named, outputs))
        except Refusal as refusal:
            results.append(refusal)
        # Any error of the rewriting: the module runs as it is written, and the report has the error.
        except Exception as error:
            log.debug("the rewriting of %s failed", type(module).__name__, exc_info=True)
            results.append(Refusal(f"its rewriting failed with {error!r}"))

        def stop(*inputs: Any) -> Any:
            raise _Stop

        return stop

    # a function of its own, as Dynamo keeps compiled code by code object, and names of modules in its globals
    call = FunctionType(_call.__code__.replace(), scope, "call")
    leaves: dict[int, Tensor] = {}  # without history; what was one tensor remains one

    def leaf(t: Tensor) -> Tensor:
        return leaves.setdefault(id(t), t.detach().requires_grad_(t.requires_grad))

    inputs = tree_map_only(Tensor, leaf, (args, named))
    failure: Exception | None = None
    for ones in (True, False):
        try:
            with _settings(ones):
                torch.compile(call, backend=compiler, fullgraph=True, dynamic=True)(module, *inputs)
        except _Stop:
            break
        # Any error of Dynamo or of the user's code under it: the module then runs as it is written.
        except (TorchDynamoException, RuntimeError, TypeError, ValueError, AttributeError) as error:
            failure = failure or error
    if not results and failure is not None:
        raise Refusal(f"{type(failure).__name__}: {_first_line(failure)}") from failure
    if not results:
        raise Refusal("Dynamo is disabled")
    if isinstance(results[0], Refusal):
        raise results[0]
    return results[0]


def _call(module, args, named):
    return type(module).forward(module, *args, **named)


@contextlib.contextmanager
def _settings(ones: bool) -> Iterator[None]:
    """Context in which rates and all sizes are symbols, with `ones` also those of 1, and other numbers are constants.

    A tensor that is broadcast has a size of 1 that must be a constant. `sdp_kernel`, which Dynamo does not trace, only
    chooses among PyTorch's implementations of an attention. Without `WRAP` rates are constants, too.
    """

    def wrapped(builder: VariableBuilder, value: float) -> Any:
        assert WRAP is not None  # as it is replaced
        with torch._dynamo.config.patch(specialize_float=not is_rate(builder.source.name, value)):
            return WRAP(builder, value)

    wrapping = contextlib.nullcontext() if WRAP is None else patch.object(VariableBuilder, "wrap_symfloat", wrapped)

    with (
        warnings.catch_warnings(),
        wrapping,
        patch.object(torch.backends.cuda, "sdp_kernel", lambda *flags, **named: contextlib.nullcontext()),
        torch._dynamo.config.patch(specialize_float=WRAP is None),
        shapes_config.patch(  # type: ignore[attr-defined]
            use_duck_shape=False, backed_size_oblivious=ones
        ),
    ):
        warnings.simplefilter("ignore")
        yield


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else ""


def _captured(
    graph: fx.GraphModule, scope: dict, module: nn.Module, args: tuple, named: dict[str, Any], outputs: Any
) -> Capture:
    """Makes a capture of Dynamo's graph; called within Dynamo's compilation."""
    _check_effects(graph)
    _pass_rates(graph.graph)
    sources = {node: _source(node) for node in graph.graph.find_nodes(op="placeholder")}
    fits = _conditions(sources)
    constants = _constants(scope, module)
    (output,) = graph.graph.find_nodes(op="output")
    returned = [n for n in output.args[0] if _maker(n).op != "placeholder"]  # the others are stored, see `_keeps`
    output.args = (tuple(returned),)
    result = _result(outputs, args, named, len(returned))
    writes = any(_is_write(node) for node in graph.graph.nodes)
    before = _launching(graph.graph)
    work = {node.name: _flops(node) for node in before}
    unfused = rewrite(graph, anywhere=True).left
    left = {node.name for node in graph.graph.nodes}
    functions = [node.target for node in graph.graph.nodes if callable(node.target)]
    calls = Counter(f.__name__ for f in functions if (getattr(f, "__module__", None) or "").startswith(OURS))
    if not calls:
        raise Refusal("it has nothing to fuse")
    original, products = Counter[str](), Counter[str]()
    for node in before:
        original[path_of(node)] += 1
        products[path_of(node)] += _products(node)
    launches = Launches(original, products, sum(node.name in left for node in before) + calls.total() + calls["mlp"])
    for node in graph.graph.find_nodes(op="call_function", target=torch.sym_sum):
        node.target = sum  # the same of numbers, which an outer torch.compile traces
    texts = list(sources.values())
    parts = None
    if not (writes or module.training or any(map(_changes_modes, graph.graph.nodes)) or _casts(graph.graph)):
        parts = split(copied(graph.graph), {node.name for node, text in sources.items() if text.startswith("module")})
    for part in (graph.graph, *(parts[1:] if parts else ())):
        for node in part.nodes:
            node.meta.clear()  # fake tensors and stack traces
    if WRAP is None and module.training and any(is_rate(*fact) for m in module.modules() for fact in vars(m).items()):
        unfused += (Row("", "rate", why=RATES),)
    replaced = sum(n for name, n in work.items() if name not in left) / max(sum(work.values()), 1)
    return Capture(_runner(graph, texts, result, parts), fits, constants, writes, calls, unfused, launches, replaced)


def _launching(graph: fx.Graph) -> list[fx.Node]:
    """The operators that write memory of their own: no views, numbers or no-ops, nor copies, which all ways make."""

    def held(nodes: list[fx.Node]) -> Memory:
        return memory([node.meta.get("example_value") for node in nodes])

    calls = (node for node in graph.nodes if node.op.startswith("call_") and same(node) is None)
    new = (node for node in calls if not held([node]) <= held(node.all_input_nodes))
    return [node for node in new if kind(node) not in ("contiguous", "reshape")]


def _flops(node: fx.Node) -> int:
    """FLOPs of an operator for the sizes of the example; 0 for one that does not run without values."""
    args, named = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("example_value"))
    args, named = tree_map(_concrete, (args, named))
    function = node.target if callable(node.target) else getattr(type(args[0]), str(node.target))
    with _disable_current_modes(), FlopCounterMode(display=False, custom_mapping=ATTENTION_FLOPS) as counter:
        try:
            function(*args, **named)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return 0
    return int(counter.get_total_flops())


def _concrete(value: Any) -> Any:
    """A number without its symbol, or a tensor of the sizes of the example on the meta device."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.hint
    if not isinstance(value, Tensor):
        return value
    sizes, strides = ([_concrete(n) for n in each] for each in (value.shape, value.stride()))
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")


def _products(node: fx.Node) -> int:
    """Number of linear layers and attention in an operator; projections of one tensor are one layer."""
    if kind(node) == "multi_head_attention":
        return len({read(node)[name] for name in ("query", "key", "value")}) + 2
    return PRODUCTS.get(kind(node) or "", 0)


def _changes_modes(node: fx.Node) -> bool:
    """True for a call without a result that any other reads, such as one that enables gradients or ends autocast."""
    return node.op.startswith("call_") and node.meta.get("example_value") is None and not node.users


def _casts(graph: fx.Graph) -> bool:
    """True if autocast is enabled on the device of the graph's tensors."""
    tensors = (node.meta.get("example_value") for node in graph.find_nodes(op="placeholder"))
    return any(torch.is_autocast_enabled(t.device.type) for t in tensors if isinstance(t, Tensor))


def _pass_rates(graph: fx.Graph) -> None:
    """Makes rates numbers among the graph's inputs, as the module has them; Dynamo passes a tensor and reads it."""
    for node in graph.find_nodes(op="placeholder"):
        argument = node.meta.get("grapharg")
        for reader in list(node.users) if argument is not None and argument.pass_arg_as_tensor else ():
            number = reader.meta.get("example_value")
            if not isinstance(number, torch.SymFloat):
                raise Refusal("it reads a probability of dropping as a tensor")
            node.meta["example_value"] = number
            reader.replace_all_uses_with(node)
            graph.erase_node(reader)


def _check_effects(graph: fx.GraphModule) -> None:
    """Refuses a call that changes anything but tensors, or whose graph has operators that do not run by themselves."""
    effects = InstructionTranslator.current_tx().output.side_effects
    for variable in effects.id_to_variable.values():
        existing = isinstance(variable.mutation_type, (AttributeMutationExisting, ValueMutationExisting))
        if existing and effects.is_modified(variable) and not _keeps(effects, variable):
            raise Refusal("its forward changes an attribute or a global")
    if effects.tensor_hooks:
        raise Refusal("its forward registers hooks of tensors")
    if any(isinstance(node.target, torch._ops.HigherOrderOperator) for node in graph.graph.nodes):
        raise Refusal("it calls a higher-order operator, such as checkpointing")


def _is_write(node: fx.Node) -> bool:
    """True if the name of a node's operator is that of one that may write its operands."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name in ("setitem", "batch_norm")
    return node.op in ("call_function", "call_method") and (in_place or "out" in node.kwargs)


def _keeps(effects: Any, variable: Any) -> bool:
    """True if all that a forward stores in an object is what it had, such as `self.mask = self.mask.to(x.device)`."""
    stored = effects.store_attr_mutations.get(variable)
    if not stored or variable.source is None:
        return False
    for name, value in stored.items():
        if isinstance(value, ConstantVariable):
            if getattr(getattr(variable, "value", None), name, value) is not value.value:
                return False
            continue
        argument = _maker(value.proxy.node).meta.get("grapharg") if isinstance(value, TensorVariable) else None
        if argument is None or argument.source.name != f"{variable.source.name}.{name}":
            return False
    return True


def _maker(node: fx.Node) -> fx.Node:
    """The node whose value this one has: itself, or the first above operators without effect."""
    return up(node, [])


def _source(node: fx.Node) -> str:
    """Python expression of a graph's input, in terms of `module`, `args` and `named`."""
    argument = node.meta.get("grapharg")
    name = "" if argument is None else argument.source.name
    if not name.startswith(("L['module']", "L['args']", "L['named']")):
        raise Refusal(f"it reads {name or 'a value'} besides its inputs and weights")
    return re.sub(r"^L\['(\w+)'\]", r"\1", name)


def _conditions(sources: dict[fx.Node, str]) -> Callable[[nn.Module, tuple, dict], bool]:
    """The function that tells if a graph holds for the sizes of its inputs, and for rates."""
    symbols: dict[str, Any] = {}  # by expression
    static: list[str] = []
    for node, source in sources.items():
        example = node.meta["example_value"]
        if isinstance(example, (torch.SymInt, torch.SymFloat)):
            symbols.setdefault(source, example)
        elif isinstance(example, Tensor):
            sizes: list[tuple[str, int | torch.SymInt]] = [
                (f"{source}.shape[{i}]", size) for i, size in enumerate(example.shape)
            ]
            if not example.is_contiguous():
                sizes += [(f"{source}.stride()[{i}]", size) for i, size in enumerate(example.stride())]
            if isinstance(example.storage_offset(), torch.SymInt):
                sizes.append((f"{source}.storage_offset()", example.storage_offset()))
            for name, size in sizes:
                if isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None:
                    symbols.setdefault(name, size)
                elif not HELD.match(source):
                    static.append(f"{name} == {int(size)}")
    mode = torch._guards.TracingContext.get().fake_mode
    assert mode is not None and mode.shape_env is not None  # as Dynamo traces with symbolic sizes
    env = mode.shape_env
    for symbol in set().union(*(guard.expr.free_symbols for guard in env.guards)):
        places = [s for s in env.var_to_sources.get(symbol, []) if s.name.startswith("L['module']")]
        if places and symbol_is_type(symbol, SymT.FLOAT):  # a rate that is only compared
            rate = env.create_symfloatnode(symbol, hint=None, source=places[0])
            symbols.setdefault(places[0].name.replace("L['module']", "module"), rate)
    input_symbols = set().union(*(size.node.expr.free_symbols for size in symbols.values()))
    guards = [guard for guard in env.guards if guard.expr.free_symbols <= input_symbols]
    for symbol in set().union(*(guard.expr.free_symbols for guard in env.guards)) - input_symbols:
        if not all(source.name.startswith("L['module']") for source in env.var_to_sources.get(symbol, [])):
            if env.replacements.get(symbol) is None:  # a size that is a constant now is compared above
                raise Refusal(f"it depends on the size {symbol}, which no input has")
    text = env.produce_guards_expression(list(symbols.values()), guards=guards) or ""
    names = list(symbols)
    conditions = [c for c in text.split(" and ") if c and not re.fullmatch(r"0 <= L\['t\d+'\]", c)]
    conditions = [re.sub(r"L\['t(\d+)'\]", lambda match: names[int(match[1])], c) for c in conditions]
    return eval(f"lambda module, args, named: {' and '.join([*static, *conditions]) or 'True'}", dict(SYMPY_INTERP))


def _constants(scope: dict[str, Any], module: nn.Module) -> list[tuple[Callable[[nn.Module], Any], Any]]:
    """Globals and attributes of classes that Dynamo's graph has as constants: (how to read it, its value).

    Args:
        scope: globals of the compiled function, in which Dynamo puts the modules whose globals it reads.
        module: that was captured.
    """
    names: dict[str, None] = {}
    for guard in torch._guards.TracingContext.get().guards_context.dynamo_guards:
        if guard.create_fn_name() in COMPARED and not PYTORCH.match(guard.name):
            names[guard.name] = None
    found = []
    for name in names:
        text = name.replace("L['module']", "module")
        if "L[" in text:
            continue  # the caller compares arguments
        read = eval(f"lambda module: {text}", {"G": scope, **scope})
        value = read(module)
        if not ATTRIBUTE.match(name) or is_rate(name, value):  # the caller compares other attributes
            found.append((read, value))
    return found


def _result(outputs: Any, args: tuple, named: dict[str, Any], number: int) -> Callable[[tuple, tuple, dict], Any]:
    """The function that makes a call's result: (tensors of the graph, args, named) → as `outputs`.

    Args:
        outputs: of a call; tensors, None, booleans and strings in containers that PyTorch's pytree knows.
        args: of that call.
        named: of that call.
        number: of tensors that the graph returns.
    """
    if type(outputs) is Tensor and number == 1:
        return lambda tensors, args, named: tensors[0]
    inputs = {id(leaf): i for i, leaf in enumerate(tree_leaves((args, named)))}
    leaves, spec = tree_flatten(outputs)
    places: dict[int, int] = {}  # number of a tensor by its identity, in the order of the graph's outputs
    parts: list[tuple[str, Any]] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and id(leaf) in inputs:
            parts.append(("input", inputs[id(leaf)]))
        elif isinstance(leaf, Tensor):
            parts.append(("output", places.setdefault(id(leaf), len(places))))
        elif leaf is None or isinstance(leaf, (bool, str)):
            parts.append(("constant", leaf))
        else:
            raise Refusal(f"it returns a {type(leaf).__name__}")
    if len(places) != number:
        raise Refusal("it returns views or copies that the graph does not have")

    def result(tensors: tuple, args: tuple, named: dict) -> Any:
        sources = dict(output=tensors, input=tree_leaves((args, named)))
        return tree_unflatten([sources[kind][v] if kind in sources else v for kind, v in parts], spec)

    return result


_numbers = itertools.count()  # of split graphs


def _runner(
    graph: fx.GraphModule, sources: list[str], result: Callable, parts: Split | None
) -> Callable[[nn.Module, tuple, dict], Any]:
    """The function that calls a graph with its inputs, each of which a Python expression reads.

    Args:
        graph: the whole graph.
        sources: the expressions.
        result: makes the result of a call, see `_result`.
        parts: the graph in two parts, for frozen modules; None if none is to be kept.
    """
    read_inputs = eval(f"lambda module, args, named: ({''.join(f'{source}, ' for source in sources)})", {})
    body = _callable(graph, graph.graph)

    def run(module: nn.Module, args: tuple, named: dict) -> Any:
        return result(body(*read_inputs(module, args, named)), args, named)

    if parts is None:
        return run
    kept, rest = _callable(graph, parts.kept), _callable(graph, parts.rest)
    name = f"graph {next(_numbers)}"

    def run_in_parts(module: nn.Module, args: tuple, named: dict) -> Any:
        inputs = read_inputs(module, args, named)
        weights = tuple(inputs[i] for i in parts.reads)
        if not (keeps(module, *weights) and kernels_available(weights[0])):
            return result(body(*inputs), args, named)
        constants = all_derived(module, name, weights, lambda: kept(*weights))
        return result(rest(*inputs, *constants), args, named)

    return run_in_parts


def _callable(owner: fx.GraphModule, graph: fx.Graph) -> Callable:
    """The function that a graph computes; what it reads besides its inputs is an attribute of the owner."""
    holds_none = not any(node.op in ("get_attr", "call_module") for node in graph.nodes)
    # without `self`, as torch.compile does not trace a method of a module that the model does not hold
    recompiled = fx.GraphModule(owner, graph)  # Dynamo's own is compiled on its first call
    return partial(type(recompiled).forward, None) if holds_none else recompiled.forward
