"""Captures the call of a module by Dynamo, as code with guards; the graph is rewritten with the patterns of `graph`.

A capture is what Dynamo compiles for a call: its guards, all of which Dynamo evaluates before each later call, and its
code, which calls the graph. The graph holds PyTorch calls on the parameters and inputs, and sizes as symbols, so that
one capture serves every batch and image size, and every module for which its guards hold.

The rewritten graph runs as it is, and autograd records its operators. If it is asked for, Inductor compiles the graph
beside that, see `region`: what the kernels do not compute becomes few launches, forward and backward.
"""

import contextlib
import itertools
import logging
import os
import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.exc import RestartAnalysis, TorchDynamoException
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.torch import tracing_state_functions
from torch.fx.experimental import _config as shapes_config
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from ..engine.freeze import all_derived, keeps
from ..engine.hooks import PACKAGE, is_our_forward
from ..engine.source import facts_of, hold
from ..kernels import settings
from ..kernels.backend import kernels_available
from . import host_values
from .backend import copied, path_of, rewrite
from .flop_shares import ATTENTION_FLOPS, enclosing
from .graph.nodes import kind, read, same, up, value
from .graph.regions import SDPA_KERNEL, Memory, memory, written
from .graph.weights import WeightSplit, split
from .region import Region, first_line, region
from .reporting import Row
from .third_party import is_rate

log = logging.getLogger(__name__)

OURS = f"{PACKAGE}.kernels."
PRODUCTS = {"addmm": 1, "encoder_layer": 5, "linear": 1, "matmul": 1, "scaled_dot_product_attention": 1}
# private: the setting `specialize_float` is for all numbers, and a softmax whose scale is an input is not fused
WRAP = getattr(VariableBuilder, "wrap_symfloat", None)
RATES = f"its rates are constants, as torch {torch.__version__} has no VariableBuilder.wrap_symfloat"
STATES = tracing_state_functions()  # the dictionary that Dynamo reads: function → what it returns while traced
COMPILING = {f: False for f in STATES if f.__name__ in ("is_compiling", "is_dynamo_compiling")}
FAILURES = (
    *(TorchDynamoException, ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError),
    *(RuntimeError, TypeError, ValueError),
)
MIN_LAUNCHES = 3  # of a graph that only Inductor fuses
IGNORED = re.compile(r"\['__import_einops|\.backends\.cuda\.sdp_kernel\b")  # places of guards, see `_are_kept`
ABSENT = "NOT_PRESENT_IN_GENERIC_DICT"  # Dynamo's guard that an instance does not have an attribute
# what Dynamo reads once, and does not guard: names in code, and facts of tensors
UNGUARDED = {"__dict__", "environ", "getenv", "vars"}
DATA_DEPENDENT = "data-dependent"  # in Dynamo's errors where code depends on a number that it read from a tensor
FACTS = {"_backward_hooks", "_base", "_grad_fn", "_version", "grad_fn", "is_leaf", "output_nr", "retains_grad"}
PACKAGES = ("torch", "timm", "transformers", "torchvision", PACKAGE)  # whose code may read these


class CaptureRefusal(RuntimeError):
    """Raised if a call cannot be captured; the message completes "it cannot be captured: "."""


class _Stop(Exception):
    """Ends the compiled call before it computes anything."""


class Launches(NamedTuple):
    """Operators of a captured graph that write memory of their own, about one launch each."""

    original: Counter[str]  # number of them in the block's own forward, by the path of the module that calls them
    products: Counter[str]  # number of linear layers and attention in these
    rewritten: int  # number of them in the rewritten graph, where an MLP counts as its two linear layers

    def beside(self, fused: Collection[str]) -> int:
        """Launches of the block's own forward if the modules at these paths run their fused forwards.

        Of these, one is counted for each linear layer and attention.
        """
        inside = {path for path in self.original if not {*enclosing(path)}.isdisjoint(fused)}
        apart = sum(n for path, n in self.original.items() if path not in inside)
        return apart + sum(self.products[path] for path in inside)


class Capture:
    """A call as Dynamo compiled it, with a rewritten graph, see `_Found`."""

    def __init__(self, module: nn.Module, call: FunctionType, found: "_Found", key: tuple) -> None:
        (entry,) = _debug_get_cache_entry_list(call.__code__)
        classes = {type(m) for m in module.modules()}
        namespaces = (vars(base) for base in {base for cls in classes for base in cls.__mro__})
        # no class has gained an attribute, which might hide an inherited one
        self._facts = facts_of(classes) + [(len, names, len(names)) for names in namespaces]
        self._guards = entry.guard_manager
        forwards = "".join(f"{place}.__dict__.get('forward'), " for place in dict.fromkeys(running.places))
        self._forwards = eval(f"lambda L: ({forwards})", {})
        self._call = FunctionType(entry.code, call.__globals__, call.__name__)
        self.compiles = running.compiles  # whether Inductor was to compile the graph
        self.key, self.mode = key  # of the module, to find it for modules alike, and of the call
        self.repeatable, self.reads, self.calls, self.left, self.launches, self.replaced, self.region, _ = found
        # whether what Inductor compiles depends on whether the weights are final, which `key` ends with
        self.freezes = found.freezes and self.region.counted is not None

    def fits(self, module: nn.Module, args: tuple, named: dict[str, Any]) -> bool:
        """True if all of Dynamo's guards hold for a call, and the classes run the code that they ran."""
        call = dict(module=module, args=args, named=named)
        if not (hold(self._facts) and self._guards.check(call)):
            return False
        if not all(map(is_our_forward, [forward for forward in self._forwards(call) if forward is not None])):
            return False
        return not self.reads or self._reads_the_same(call)

    def _reads_the_same(self, call: dict[str, Any]) -> bool:
        running.comparing = True
        try:
            self._call(**call)
        except _Stop:
            pass
        finally:
            running.comparing = False
        return running.same

    def __call__(self, module: nn.Module, /, *args: Any, **named: Any) -> Any:
        """The outputs of a call that it fits. If the module is frozen, what is computed from weights alone is kept."""
        return self._run(module, False, args, named)

    def call_region(self, module: nn.Module, args: tuple, named: dict[str, Any]) -> Any:
        """The outputs of a call that it fits, from the graph that Inductor compiled."""
        return self._run(module, True, args, named)

    def _run(self, module: nn.Module, in_region: bool, args: tuple, named: dict[str, Any]) -> Any:
        before = running.module, running.in_region
        running.module, running.in_region = module, in_region
        try:
            return self._call(module, args, named)
        finally:
            running.module, running.in_region = before


class _Found(NamedTuple):
    """What a graph is."""

    repeatable: bool  # its operators may be recorded and repeated: it writes no tensor in place
    reads: bool  # its forward reads values on the host, see `host_values`
    calls: Counter[str]  # to the kernels' public functions, by name
    left: tuple[Row, ...]  # what the patterns look for and did not fuse, with the reasons
    launches: Launches  # before and after it was rewritten
    replaced: float  # the part of its FLOPs that its calls to the kernels' public functions do, in [0, 1]
    region: Region  # what Inductor made of it, or why there is nothing
    freezes: bool  # if the weights are final, what is computed from these alone is left out for Inductor


class _Running(threading.local):
    """Thread-local state."""

    def __init__(self) -> None:
        self.module: nn.Module | None = None  # whose capture runs
        self.in_region = False  # whether the region of its capture runs
        self.comparing = False  # whether it only compares the values that it reads
        self.same = False  # whether these were the same
        self.compiles = False  # whether Inductor compiles the graph that is captured
        self.counts_only = False  # whether that is left out
        self.found: _Found | CaptureRefusal | None = None  # what is compiled now, or why it is refused; None before
        self.training = False  # whether the module that is captured is in training mode
        self.rates = False  # whether it then has attributes that are rates
        self.frozen = False  # whether its weights are final
        self.keeps = False  # whether what is computed from weights alone is then kept, and left out for Inductor
        self.device = "cpu"  # type of that of the call that is captured
        self.places: list[str] = []  # Python texts of modules in which Dynamo looked for a forward of the instance


running = _Running()


def capture(
    module: nn.Module, args: tuple, named: dict[str, Any], key: tuple, compiles: bool = False, counts_only: bool = False
) -> Capture:
    """Captures and rewrites the call of a module's own forward; nothing is computed.

    Gradients, autocast and the training mode are those of the moment. The module and its submodules must run the code
    of their classes, without hooks. `key` is kept as `Capture.key` and `Capture.mode`. Inductor is asked to compile the
    graph, too, if it `compiles` and nothing is only counted. `CaptureRefusal` has the reason, such as a graph break.
    """
    running.compiles, running.counts_only = compiles, counts_only
    try:
        return _capture(module, args, named, key, [])
    except CaptureRefusal as refusal:
        if DATA_DEPENDENT not in str(refusal.__cause__) or not (numbers := host_values.recorded(module, args, named)):
            raise
    return _capture(module, args, named, key, numbers)


def _capture(module: nn.Module, args: tuple, named: dict[str, Any], key: tuple, numbers: list[Any]) -> Capture:
    """`capture`, with the numbers that the forward reads, if it reads any."""
    # a function of its own, as Dynamo keeps compiled code by code object, and names of modules in its globals
    call = FunctionType(_call.__code__.replace(), {"__builtins__": __builtins__}, "call")
    leaves: dict[int, Tensor] = {}  # without history; what was one tensor remains one

    def leaf(t: Tensor) -> Tensor:
        return leaves.setdefault(id(t), t.detach().requires_grad_(t.requires_grad))

    inputs = tree_map_only(Tensor, leaf, (args, named))
    failure: Exception | None = None
    running.found, running.training, running.places = None, module.training, []
    running.device = key[1][1]
    weight = next(module.parameters(), None)
    with_kernels = weight is not None and (running.counts_only or kernels_available(weight))
    running.frozen, running.keeps = keeps(module), with_kernels and not torch.is_grad_enabled()
    running.rates = module.training and any(is_rate(*fact) for m in module.modules() for fact in vars(m).items())
    for ones in (True, False):
        try:
            with _settings(ones), host_values.constant(numbers):
                options: dict[str, Any] = dict(guard_filter_fn=_are_kept)
                torch.compile(call, backend=_compiled, fullgraph=True, dynamic=True, options=options)(module, *inputs)
        except _Stop:
            break
        except FAILURES as error:  # of Dynamo, or of the user's code under it: the module then runs as it is written
            failure, running.found = failure or error, None
    found, running.found = running.found, None
    if found is None:
        why = "Dynamo is disabled" if failure is None else f"{type(failure).__name__}: {first_line(failure)}"
        raise CaptureRefusal(why) from failure
    if isinstance(found, CaptureRefusal):
        raise found
    return Capture(module, call, found, key)


def _call(module, args, named):
    return type(module).forward(module, *args, **named)


def _are_kept(guards: Sequence[Any]) -> list[bool]:
    """Tells Dynamo which guards to keep: not those on forwards of instances, as ours are none; `Capture` compares them.

    Nor those on what `_settings` replaces, and on einops, whose table of types grows with each new one.
    """
    ours = [guard.guard_type == ABSENT and guard.orig_guard.create_fn.keywords["attr"] == "forward" for guard in guards]
    names = [guard.orig_guard.name for guard in guards]
    running.places = [name for name, is_ours in zip(names, ours, strict=True) if is_ours]
    return [not (is_ours or IGNORED.search(name)) for name, is_ours in zip(names, ours, strict=True)]


def _compiled(graph: fx.GraphModule, inputs: list, options: object = None) -> Callable:
    """Dynamo's backend: a function that raises `_Stop` in its first call, and then runs the rewritten graph."""
    run: Callable | None = None
    holds: Callable[..., bool] | None = None
    apart = Region()
    try:
        running.found, run, holds = _rewritten(graph, inputs)
        apart = running.found.region
    except CaptureRefusal as refusal:
        running.found = refusal
    except RestartAnalysis:  # Dynamo traces again
        raise
    # Any error of the rewriting: the module runs as it is written, and the report has the error.
    except Exception as error:
        log.debug("the rewriting failed", exc_info=True)
        running.found = CaptureRefusal(f"its rewriting failed with {error!r}")
    first = [True]

    def call(*inputs: Any) -> Any:
        if first:
            first.clear()
            raise _Stop
        if running.comparing:
            running.same = holds is None or holds(*inputs)
            raise _Stop
        if holds is not None and settings.region is not None:
            holds(*inputs)  # it is counted
        if running.in_region:
            function = apart.counted if apart.call is None or settings.is_observed() else apart.call
            assert function is not None  # as `captured.run` asked for it
            return function(*inputs)
        assert run is not None
        return run(*inputs)

    return call


@contextlib.contextmanager
def _settings(ones: bool) -> Iterator[None]:
    """Context in which rates and all sizes are symbols, with `ones` also those of 1, and other numbers are constants.

    A tensor that is broadcast has a size of 1 that must be a constant. `sdp_kernel`, which Dynamo does not trace, only
    chooses among PyTorch's implementations of an attention. Without `WRAP` rates are constants, too. Code that asks
    whether it is compiled is answered as in an eager call, and hooks are guarded.
    """

    def wrapped(builder: VariableBuilder, value: float) -> Any:
        assert WRAP is not None  # as it is replaced
        with torch._dynamo.config.patch(specialize_float=not is_rate(builder.source.name, value)):
            return WRAP(builder, value)

    def guarded(variable: TensorVariable, tx: Any, name: str) -> Any:
        if name in FACTS and not _is_known(tx.f_code):
            raise CaptureRefusal(f"its code reads {name} of a tensor, which is not known to stay as it is")
        return read_fact(variable, tx, name)

    read_fact = TensorVariable.var_getattr
    wrapping = contextlib.nullcontext() if WRAP is None else patch.object(VariableBuilder, "wrap_symfloat", wrapped)

    with (
        compile_lock,
        warnings.catch_warnings(),
        wrapping,
        patch.dict(STATES, COMPILING),
        patch.object(TensorVariable, "var_getattr", guarded),
        patch.object(torch.backends.cuda, "sdp_kernel", lambda *flags, **named: contextlib.nullcontext()),
        torch._dynamo.config.patch(
            specialize_float=WRAP is None,
            skip_nnmodule_hook_guards=False,
            skip_no_tensor_aliasing_guards_on_parameters=False,
            optimize_ddp=False,  # else DDP would split the graph by its buckets
        ),
        shapes_config.patch(  # type: ignore[attr-defined]
            use_duck_shape=False, backed_size_oblivious=ones
        ),
    ):
        warnings.simplefilter("ignore")
        yield


def _rewritten(graph: fx.GraphModule, examples: list) -> tuple[_Found, Callable, Callable[..., bool] | None]:
    """What Dynamo's graph is, what runs it rewritten, and what compares the values that it reads.

    Called within Dynamo's compilation.
    """
    _check_code()
    _check_effects(graph)
    numbers = _pass_rates(graph.graph)
    inputs = graph.graph.find_nodes(op="placeholder")
    held = memory([node.meta.get("example_value") for node in inputs])
    writes = {node: where for node in graph.graph.nodes if (where := _written(node, held))}
    if any(kind(node) != "batch_norm" and where & held for node, where in writes.items()):
        raise CaptureRefusal("it writes to an argument or a weight")  # which may share memory with another
    try:
        holds = host_values.comparison(graph, [*writes.values()])
    except ValueError as error:
        raise CaptureRefusal(str(error)) from error
    before = _launching(graph.graph)
    work = {node.name: _flops(node) for node in before}
    as_captured = copied(graph.graph)
    unfused = rewrite(graph, anywhere=True, layers=True).left
    left = {node.name for node in graph.graph.nodes}
    functions = [node.target for node in graph.graph.nodes if callable(node.target)]
    calls = Counter(f.__name__ for f in functions if (getattr(f, "__module__", None) or "").startswith(OURS))
    if not calls and not (running.compiles and len(before) >= MIN_LAUNCHES):
        raise CaptureRefusal("it has nothing to fuse")
    original, products = Counter[str](), Counter[str]()
    for node in before:
        original[path_of(node)] += 1
        products[path_of(node)] += _products(node)
    launches = Launches(original, products, sum(node.name in left for node in before) + calls.total() + calls["mlp"])
    changes = any(map(_changes_modes, graph.graph.nodes)) or _casts(graph.graph)
    weights = {node.name for node in inputs if _source(node).startswith("L['module']")}
    weights = set() if writes or numbers or running.training or changes else weights
    parts = split(copied(graph.graph), weights)
    if numbers:
        apart = Region(why="its rates are numbers, which Inductor makes constants")
    elif writes and graph.graph.find_nodes(op="call_method", target="unfold"):
        apart = Region(why="PyTorch's compiler loses what is written through windows of unfold")
    else:
        compiles = running.compiles and not running.counts_only
        apart = region(graph, as_captured, examples, compiles, weights if running.frozen and running.keeps else ())
        if (left_out := apart.parts) is not None:
            counted, call = (f and _in_parts(graph, left_out, f) for f in (apart.counted, apart.call))
            apart = apart._replace(counted=counted, call=call, parts=None)
        if not calls and running.compiles and apart.why is not None:
            raise CaptureRefusal(apart.why)
        apart = apart._replace(settings=settings.compiled(running.device))
    if not calls:
        graph.graph = copied(graph.graph)  # Dynamo reads the facts of its own
    for part in (graph.graph, *(parts[1:] if parts else ())):
        for node in part.nodes:
            node.meta.clear()  # fake tensors and stack traces
    if WRAP is None and running.rates:
        unfused += (Row("", "rate", why=RATES),)
    replaced = sum(n for name, n in work.items() if name not in left) / max(sum(work.values()), 1)
    freezes = running.keeps and parts is not None
    found = _Found(not writes, holds is not None, calls, unfused, launches, replaced, apart, freezes)
    return found, _runner(graph, numbers, parts), holds


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
        return 1 if value.node.hint is None else value.node.hint  # None: it depends on values, as positions do
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
    silent = node.op.startswith("call_") and node.meta.get("example_value") is None and not node.users
    return silent and getattr(node.target, "__name__", "") not in SDPA_KERNEL


def _casts(graph: fx.Graph) -> bool:
    """True if autocast is enabled on the device of the graph's tensors."""
    tensors = (node.meta.get("example_value") for node in graph.find_nodes(op="placeholder"))
    return any(torch.is_autocast_enabled(t.device.type) for t in tensors if isinstance(t, Tensor))


def _pass_rates(graph: fx.Graph) -> list[int]:
    """Makes rates numbers among the graph's inputs; returns their places. Dynamo passes tensors and reads them."""
    places = []
    for i, node in enumerate(graph.find_nodes(op="placeholder")):
        argument = node.meta.get("grapharg")
        for reader in list(node.users) if argument is not None and argument.pass_arg_as_tensor else ():
            number = reader.meta.get("example_value")
            if not isinstance(number, torch.SymFloat):
                raise CaptureRefusal("it reads a probability of dropping as a tensor")
            node.meta["example_value"] = number
            reader.replace_all_uses_with(node)
            graph.erase_node(reader)
            places.append(i)
    return places


def _check_code() -> None:
    """Refuses code that reads what Dynamo does not guard; that of PyTorch and its known packages may."""
    for code in torch._guards.TracingContext.get().traced_code:
        names = UNGUARDED.intersection(code.co_names)
        if names and not _is_known(code):
            raise CaptureRefusal(f"its code reads {', '.join(sorted(names))}, which is not known to stay as it is")


def _is_known(code: CodeType) -> bool:
    return not set(PACKAGES).isdisjoint(Path(code.co_filename).parts)


def _check_effects(graph: fx.GraphModule) -> None:
    """Refuses a call that changes anything but tensors, or whose graph has operators that do not run by themselves."""
    effects = InstructionTranslator.current_tx().output.side_effects
    if os.environ in effects:
        raise CaptureRefusal("its code reads os.environ, which is not known to stay as it is")
    for variable in effects.id_to_variable.values():
        existing = isinstance(variable.mutation_type, (AttributeMutationExisting, ValueMutationExisting))
        if existing and effects.is_modified(variable) and not _keeps(effects, variable):
            raise CaptureRefusal("its forward changes an attribute or a global")
    if effects.tensor_hooks:
        raise CaptureRefusal("its forward registers hooks of tensors")
    if any(isinstance(node.target, torch._ops.HigherOrderOperator) for node in graph.graph.nodes):
        raise CaptureRefusal("it calls a higher-order operator, such as checkpointing")


def _written(node: fx.Node, held: Memory) -> Memory:
    """The storages that a node writes; those of the graph's inputs if it may write and that is not known."""
    if not node.op.startswith("call_"):
        return set()
    fakes = [t.fake_mode for n in node.all_input_nodes if (t := value(n)) is not None]
    if not fakes:
        return set()
    if (where := written(node, fakes[0])) is not None:
        return where
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name == "setitem" or "out" in node.kwargs
    return held if in_place else set()


def _keeps(effects: Any, variable: Any) -> bool:
    """True if all that a forward stores in an object is what it had, such as `self.mask = self.mask.to(x.device)`."""
    stored = effects.store_attr_mutations.get(variable)
    if not stored or variable.source is None:
        return False
    for name, new in stored.items():
        if isinstance(new, ConstantVariable):
            if getattr(getattr(variable, "value", None), name, new) is not new.value:
                return False
            continue
        argument = up(new.proxy.node, []).meta.get("grapharg") if isinstance(new, TensorVariable) else None
        if argument is None or argument.source.name != f"{variable.source.name}.{name}":
            return False
    return True


def _source(node: fx.Node) -> str:
    """Where Dynamo's code reads a graph's input, as Python text."""
    argument = node.meta.get("grapharg")
    return "" if argument is None else argument.source.name


_numbers = itertools.count()  # of split graphs


def _runner(graph: fx.GraphModule, numbers: list[int], parts: WeightSplit | None) -> Callable:
    """The function that runs a graph for a list of inputs."""
    body = _callable(graph, graph.graph)

    def run(*inputs: Any) -> Any:
        with _disable_current_modes():  # a recorder of the call compares the attributes that these are
            inputs = tuple(t.item() if i in numbers else t for i, t in enumerate(inputs))
        return body(*inputs)

    if parts is None:
        return run if numbers else body
    return _in_parts(graph, parts, _callable(graph, parts.rest), body)


def _in_parts(owner: fx.GraphModule, parts: WeightSplit, rest: Callable, whole: Callable | None = None) -> Callable:
    """The function of a graph in two parts: the first is kept while the module is frozen.

    Otherwise, or without kernels, `whole` runs, if it is given.
    """
    kept = _callable(owner, parts.kept)
    name = f"graph {next(_numbers)}"

    def run(*inputs: Any) -> Any:
        module, weights = running.module, tuple(inputs[i] for i in parts.reads)
        assert module is not None
        if not (keeps(module, *weights) and (whole is None or kernels_available(weights[0]))):
            return whole(*inputs) if whole else rest(*inputs, *(t.contiguous() for t in kept(*weights)))
        return rest(*inputs, *all_derived(module, name, weights, lambda: kept(*weights)))

    return run


def _callable(owner: fx.GraphModule, graph: fx.Graph) -> Callable:
    """The function that a graph computes; what it reads besides its inputs is an attribute of the owner."""
    holds_none = not any(node.op in ("get_attr", "call_module") for node in graph.nodes)
    # without `self`, as torch.compile does not trace a method of a module that the model does not hold
    recompiled = fx.GraphModule(owner, graph)  # Dynamo's own is compiled on its first call
    return partial(type(recompiled).forward, None) if holds_none else recompiled.forward
