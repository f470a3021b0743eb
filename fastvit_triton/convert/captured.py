"""Blocks that run as captured and rewritten graphs: which graph a call takes, and the guard in front of it.

Graphs are kept by structure: the types, code, attributes and forms of the tensors of a module and its submodules. A
call enters a graph only if the module is as it was when its structure was read (see `engine.replay.guard`), no
submodule has a hook, and the arguments have the form, and the sizes, that the graph was captured for. Otherwise the
module's own forward runs. Modules of the same structure share graphs; copies do too, and capture none themselves.
"""

import contextlib
import gc
import re
import threading
import weakref
from collections.abc import Hashable, Iterator
from enum import Enum
from functools import partial
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..engine import replay, ways
from ..engine.hooks import has_global_hooks, has_hooks, is_our_forward, runs_other_code
from ..engine.replay.guard import Guard, is_distributed
from ..engine.replay.record import Condition
from ..engine.source import code_of
from ..kernels import plan, settings
from ..kernels.backend import constant, kernels_available, transparent
from .example import arguments, unchanged
from .flop_shares import enclosing
from .third_party import can_run, gives_proxies, is_rate

if TYPE_CHECKING:
    from .capture import Capture

PRIVATE = "_fastvit_triton"  # attributes that the engine sets
INTERNAL = frozenset(vars(nn.Module())) - {"training"}  # hooks, and tables of what is read apart
ATOMS = (bool, int, str, bytes, complex, type(None), type(...), torch.dtype, torch.device, torch.layout, Enum)
CODE = (type, FunctionType, BuiltinFunctionType, ModuleType)
LAYERS = (nn.Linear, nn.MultiheadAttention, nn.modules.conv._ConvNd)
STACKS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
NAMES = re.compile("(?<!Batch)Norm|Attention|Attn|M[Ll][Pp]|F[Ff][Nn]|Feed[Ff]orward|Glu|GLU")
MAX_GRAPHS = 4  # of one structure and form of call, for the branches that sizes select

form_of = attrgetter("shape", "dtype", "device")


class Unreadable(ValueError):
    """Raised for a module whose attributes cannot be compared; stands for an argument that cannot."""


class Reading(NamedTuple):
    """A module as it was when its structure was read.

    Attributes:
        guard: snapshot of the module and its submodules.
        tensors: their parameters and buffers, with the forms that they had.
        graphs: by form of call; None if the module must run as it is written.
        why: the reason for that.
    """

    guard: Guard
    tensors: tuple[list[Tensor], list[tuple]]
    graphs: "dict[Form, Graphs] | None"
    why: str | None = None

    def holds(self, module: nn.Module) -> bool:
        """True if the module is unchanged."""
        tensors, forms = self.tensors
        return self.guard.holds(module) and list(map(form_of, tensors)) == forms


class Form(NamedTuple):
    """What a graph depends on besides the module, sizes and whole numbers.

    Attributes:
        dtype: of the first tensor.
        grad: True if gradients are enabled.
        autocast: its dtype; None if it is off.
        values: description of the arguments.
    """

    dtype: torch.dtype | None
    grad: bool
    autocast: torch.dtype | None
    values: tuple


class Graphs:
    """The captures of one structure and form of call.

    Attributes:
        captures: at most MAX_GRAPHS.
        why: why the last attempt failed; None if it did not.
    """

    def __init__(self) -> None:
        self.captures: list[Capture] = []
        self.why: str | None = None

    def fitting(self, module: nn.Module, args: tuple, named: dict) -> "Capture | None":
        """The capture that holds for a call; None if there is none."""
        for capture in self.captures:
            with contextlib.suppress(AttributeError):  # of what another module made in its first call
                if capture.fits(module, args, named) and _has_constants(module, capture):
                    return capture
        return None


def _has_constants(module: nn.Module, capture: "Capture") -> bool:
    """True if the globals that a graph has as constants are as they were; torch.compile guards what is read here."""
    return all(read(module) == value for read, value in capture.constants)


_table: dict[Hashable, dict[Form, Graphs]] = {}  # by structure, then by form of call
_readings: "weakref.WeakKeyDictionary[nn.Module, Reading]" = weakref.WeakKeyDictionary()
_asked: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # modules whose calls may be captured
_lock = threading.RLock()


class State(threading.local):
    """Thread-local state.

    Attributes:
        example: True while `optimize` runs an example, whose calls are captured on every device.
    """

    def __init__(self) -> None:
        self.example = False


state = State()


@transparent
def run(module: nn.Module, *args: Any, **named: Any) -> Any:
    """Forward that `optimize` binds: runs a captured graph, or the forward of the module's class."""
    if ways.state.inside_plain and not state.example:
        return type(module).forward(module, *args, **named)
    if torch.compiler.is_compiling():
        return _traced(module, args, named)
    x = first_tensor((*args, *named.values()))
    traced = has_global_hooks() or gives_proxies(module)
    if type(x) is not Tensor or not (state.example or can_run(x)) or traced:
        return type(module).forward(module, *args, **named)
    # on a CPU a record has no second derivatives, which the graph has
    if kernels_available(x) or (plan.has_ways(x) and not torch.is_grad_enabled()):
        return replay.call((run, settings.choices(x.device.type)), _run, module, *args, **named)
    return _run(module, *args, **named)


def _run(module: nn.Module, *args: Any, **named: Any) -> Any:
    """Runs a captured graph, or the forward of the module's class, which is then captured if that was asked for."""
    graphs = _graphs(module, args, named)
    if graphs is None:
        return type(module).forward(module, *args, **named)
    capture = graphs.fitting(module, args, named)
    if capture is None and module in _asked and _is_checkpointed():
        with torch.no_grad(), torch.random.fork_rng():
            outputs = type(module).forward(module, *args, **named)
        _capture(module, graphs, args, named, outputs)  # before the call, as its graph must run when it is repeated
        capture = graphs.fitting(module, args, named)
    if capture is not None:
        return capture.run(module, args, named)
    outputs = type(module).forward(module, *args, **named)
    if module in _asked:
        _capture(module, graphs, args, named, outputs)
    return outputs


def _traced(module: nn.Module, args: tuple, named: dict[str, Any]) -> Any:
    """As `_run` under torch.compile, which traces the rewritten graph; nothing is captured."""
    x = first_tensor((*args, *named.values()))
    watched = any(has_hooks(m) for m in module.modules() if m is not module)
    if x is not None and kernels_available(x) and not torch.is_autocast_enabled(x.device.type) and not watched:
        number = _number(id(module), x.dtype, torch.is_grad_enabled())  # a module is no constant before torch 2.13
        if number is not None and _has_constants(module, _numbered[number]):
            if _numbered[number].fits(module, args, named):
                return _numbered[number].run(module, args, named)
    return type(module).forward(module, *args, **named)


@constant
def _number(identity: int, dtype: torch.dtype, grad: bool) -> int | None:
    """Number of a capture of the module with this id, for tensors of this dtype, with or without gradients; or None."""
    module = next((m for m in (*_asked, *_readings) if id(m) == identity), None)
    if module is None:  # a copy that was not called yet
        module = next((o for o in gc.get_objects() if id(o) == identity and isinstance(o, nn.Module)), None)
    if module is None:
        return None
    graphs = read(module).graphs
    for form, same_form in (graphs or {}).items():
        for capture in same_form.captures if (form.dtype, form.grad) == (dtype, grad) else ():
            if form.autocast is not None or not _has_constants(module, capture):
                continue
            if capture not in _numbered:
                _numbered.append(capture)
            return _numbered.index(capture)
    return None


_numbered: "list[Capture]" = []  # those that torch.compile has traced


def _graphs(module: nn.Module, args: tuple, named: dict[str, Any]) -> Graphs | None:
    """The graphs of a module as it is now, for calls of this form; None if it must run as it is written."""
    reading = _readings.get(module)
    if reading is None or not reading.holds(module):
        reading = _readings[module] = read(module)
    form = None if reading.graphs is None else _form_of_call(args, named)
    return None if reading.graphs is None or form is None else reading.graphs.setdefault(form, Graphs())


def _conditions(module: nn.Module, args: tuple, named: dict[str, Any]) -> list[Condition] | None:
    """What the graph that `_run` runs depends on besides the module and its inputs; None if it runs or may run none."""
    graphs = _graphs(module, args, named)
    capture = None if graphs is None else graphs.fitting(module, args, named)
    return None if capture is None or capture.writes else capture.constants


_run.conditions = _conditions  # type: ignore[attr-defined]


def _is_checkpointed() -> bool:
    """True if the tensors that autograd saves are watched, as by `torch.utils.checkpoint`."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def first_tensor(values: Any) -> Tensor | None:
    """The first tensor in these arguments, also in a list or tuple; None if there is none."""
    for value in values:
        if isinstance(value, Tensor):
            return value
        if isinstance(value, (list, tuple)) and (inner := first_tensor(value)) is not None:
            return inner
    return None


def ask(module: nn.Module) -> None:
    """Lets calls of a module be captured, where no graph fits."""
    _asked.add(module)


def is_bound(module: nn.Module) -> bool:
    """True if a module's forward is `run`."""
    forward = module.__dict__.get("forward")
    return isinstance(forward, partial) and forward.func is run


def captures_of(module: nn.Module) -> "list[Capture]":
    """All captures that a module can run now."""
    reading = _readings.get(module) or read(module)  # of a copy that was not called
    graphs = () if reading.graphs is None else reading.graphs.values()
    return [capture for each in graphs for capture in each.captures]


def why_none(module: nn.Module) -> str:
    """Why a module that was asked for captures has none."""
    reading = _readings.get(module)
    if reading is None:
        return "the example does not reach it with a tensor"
    reasons = [graphs.why for graphs in (reading.graphs or {}).values() if graphs.why is not None]
    return reading.why or next(iter(reasons), "one of its arguments cannot be compared")


def _capture(module: nn.Module, graphs: Graphs, args: tuple, named: dict, outputs: Any) -> None:
    """Adds a capture of a call to those of its structure and form, or the reason why there is none."""
    try:
        from .capture import Refusal, capture  # here, as it imports Dynamo, also private parts of it
    except ImportError as error:
        graphs.why = f"torch {torch.__version__} does not have what captures use: {error}"
        return
    modes = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    if modes or torch._C._are_functorch_transforms_active():
        return  # Dynamo skips such a call
    with _lock:
        if graphs.why is not None or len(graphs.captures) >= MAX_GRAPHS or graphs.fitting(module, args, named):
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        inside = [(m, m.__dict__["forward"]) for m in module.modules() if is_our_forward(m.__dict__.get("forward"))]
        for m, _ in inside:
            del m.__dict__["forward"]  # Dynamo follows the code of the classes
        try:
            graphs.captures.append(capture(module, args, named, outputs))
        except Refusal as refusal:
            graphs.why = str(refusal)
        finally:
            for m, forward in inside:
                m.__dict__["forward"] = forward


def call(model: nn.Module, example: Any) -> None:
    """Calls a model with an example so that every module that was asked is captured; the model is left unchanged."""
    args, named = arguments(example)
    state.example = True
    try:
        with torch.no_grad(), unchanged(model):
            model(*args, **named)
    finally:
        state.example = False


def candidates(
    model: nn.Module, converted: set[str], called: set[str], within: bool, inside: str | None = None
) -> Iterator[str]:
    """Yields paths of modules to capture: the outermost ones that hold no stack of such modules.

    Each is of a class that is not PyTorch's, holds an `nn.MultiheadAttention` or two linear layers, and a class whose
    name is that of a norm, an attention or an MLP.

    Args:
        model: the model.
        converted: paths of modules with a fused forward, which are passed over with all that they hold.
        called: paths of modules of unknown types, which the fused forward of a module around them calls.
        within: False to count only layers outside of modules with a fused forward.
        inside: path of a module that is passed over itself; None for the model.
    """

    def is_free(path: str) -> bool:
        nearest = next((p for p in enclosing(path) if p in converted or p in called), None)
        return nearest not in converted

    free = {path for path, _ in model.named_modules() if is_free(path)}

    def is_candidate(path: str, module: nn.Module) -> bool:
        below = dict(module.named_modules(prefix=path))
        layers = (m for name, m in below.items() if within or name in free)
        number = sum(2 * isinstance(m, nn.MultiheadAttention) + isinstance(m, nn.Linear) for m in layers)
        parts = (part for m in below.values() if isinstance(m, STACKS) for part in m.children())
        named = any(NAMES.search(type(m).__name__) for m in below.values())
        return is_foreign(module) and number > 1 and named and not any(map(_is_block, parts))

    def visit(path: str, module: nn.Module) -> Iterator[str]:
        if path in free and path != inside and is_candidate(path, module):
            yield path
            return
        for name, child in module.named_children():
            yield from visit(f"{path}.{name}" if path else name, child)

    top = inside or ""
    yield from visit(top, model.get_submodule(top))


def is_foreign(module: nn.Module) -> bool:
    """True for a module whose class is not PyTorch's."""
    return not type(module).__module__.startswith("torch.")


def _is_block(module: nn.Module) -> bool:
    """True for a module with layers whose class is not PyTorch's."""
    return is_foreign(module) and any(isinstance(m, LAYERS) for m in module.modules())


def read(module: nn.Module) -> Reading:
    """Reads the structure of a module, and finds the captures of this structure."""
    inside = list(module.modules())[1:]
    guard = Guard(module, inside)
    tensors = guard.tensors, list(map(form_of, guard.tensors))
    watched = next((m for m in inside if has_hooks(m)), None)
    if watched is not None:
        return Reading(guard, tensors, None, f"{type(watched).__name__} has a hook, or its code was changed")
    if runs_other_code(module):
        return Reading(guard, tensors, None, "its code was changed")
    try:
        structure = structure_of(module)
    except Unreadable as error:
        return Reading(guard, tensors, None, str(error))
    return Reading(guard, tensors, _table.setdefault(structure, {}))


# ---- structure of a module, form of a call: hashable descriptions


def structure_of(module: nn.Module) -> Hashable:
    """Types, code, attributes and forms of tensors of a module and its submodules.

    Raises:
        Unreadable: for an attribute whose value cannot be compared.
    """
    numbers: dict[int, int] = {}
    parts: list[Hashable] = []
    for path, m in module.named_modules(remove_duplicate=False):
        facts = m.__dict__
        attributes = {k: v for k, v in facts.items() if k not in INTERNAL and not k.startswith(PRIVATE)}
        attributes |= dict.fromkeys((k for k, v in attributes.items() if is_rate(k, v)), "rate")
        if is_our_forward(attributes.get("forward")):
            del attributes["forward"]
        tensors = [_described(facts[kind], numbers) for kind in ("_parameters", "_buffers")]
        number = numbers.setdefault(id(m), len(numbers))
        parts.append((path, number, type(m), code_of(type(m)), *tensors, _described(attributes, numbers)))
    return tuple(parts)


def _described(value: Any, numbers: dict[int, int]) -> Hashable:
    """A hashable description of an attribute; tensors and objects by form and by the order of their first use."""
    if isinstance(value, ATOMS):
        return type(value), value
    if isinstance(value, float):
        return float, repr(value)
    if isinstance(value, Tensor):
        return type(value), *form_of(value), value.stride(), numbers.setdefault(id(value), len(numbers))
    if isinstance(value, (tuple, list)):
        return type(value), *(_described(v, numbers) for v in value)
    if isinstance(value, dict):
        return type(value), *((_described(k, numbers), _described(v, numbers)) for k, v in value.items())
    if isinstance(value, CODE):
        return value
    if isinstance(value, MethodType):
        return value.__func__, _described(value.__self__, numbers)
    if isinstance(value, partial):
        return partial, _described(value.func, numbers), *(_described(v, numbers) for v in (value.args, value.keywords))
    if isinstance(value, nn.Module):
        return nn.Module, numbers.setdefault(id(value), len(numbers))
    if is_distributed(value):
        return str(type(value))
    if not hasattr(value, "__dict__"):
        raise Unreadable(f"an attribute is a {type(value).__name__}, whose state cannot be compared")
    if id(value) in numbers:
        return type(value), numbers[id(value)]
    numbers[id(value)] = len(numbers)
    return type(value), _described(vars(value), numbers)


def _form_of_call(args: tuple, named: dict[str, Any]) -> Form | None:
    """Form of the arguments, and the modes that a graph depends on; None if an argument cannot be described."""
    x = first_tensor((*args, *named.values()))
    kind = "cpu" if x is None else x.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    numbers: dict[int, int] = {}
    values = [_form(value, numbers) for value in (*args, *named.values())]
    dtype = None if x is None else x.dtype
    return None if Unreadable in values else Form(dtype, torch.is_grad_enabled(), autocast, (*values, *named))


def _form(value: Any, numbers: dict[int, int]) -> Hashable:
    """Form of one argument; sizes and whole numbers do not count. `Unreadable` if it cannot be described."""
    if type(value) is Tensor or type(value) is nn.Parameter:
        order = None if value.is_contiguous() else tuple(sorted(range(value.dim()), key=value.stride))
        number = numbers.setdefault(id(value), len(numbers))
        return value.dtype, value.device, value.dim(), value.requires_grad, order, number
    if isinstance(value, bool) or value is None or isinstance(value, (str, float)):
        return type(value), value
    if isinstance(value, int):
        return int
    if isinstance(value, dict):
        value = tuple(value.items())
    if type(value) in (tuple, list):
        parts = tuple(_form(v, numbers) for v in value)
        return Unreadable if Unreadable in parts else (type(value), *parts)
    return Unreadable
