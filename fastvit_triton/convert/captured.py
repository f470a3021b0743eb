"""Blocks that run as captured and rewritten graphs: which capture a call takes, and when one is made.

A call takes a capture whose guards hold, one of its own or of another module with the same forward; Dynamo's guards
decide, see `capture`. In front of them stands what Dynamo does not guard: patched code of classes, global hooks, and
tracing. Where nothing fits, the module's own forward runs, and is captured if that was asked for. Copies share the
captures of the original, and make none themselves.
"""

import contextlib
import itertools
import re
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from ..engine import replay, ways
from ..engine.hooks import PACKAGE, has_global_hooks, has_hooks, is_our_forward, runs_other_code
from ..kernels import launch, plan, settings
from ..kernels.backend import kernels_available, transparent
from .example import arguments, unchanged
from .flop_shares import enclosing
from .third_party import can_run, gives_proxies

if TYPE_CHECKING:
    from .capture import Capture

LAYERS = (nn.Linear, nn.MultiheadAttention, nn.modules.conv._ConvNd)
STACKS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
NAMES = re.compile("(?<!Batch)Norm|Attention|Attn|M[Ll][Pp]|F[Ff][Nn]|Feed[Ff]orward|Glu|GLU")
NO_MODES = contextlib.nullcontext()
REPLAYED = 8  # images, up to which the graph is replayed on a GPU
MAX_CAPTURES = 4  # of one module in one mode, for the branches that sizes and attributes select


class Captures:
    """The captures that a module runs in one mode.

    Attributes:
        mode: see `_mode`.
        found: at most MAX_CAPTURES.
        why: why the last attempt failed; None if it did not.
        refused: True if it would fail again.
    """

    def __init__(self, mode: Hashable) -> None:
        self.mode = mode
        self.found: list[Capture] = []
        self.why: str | None = None
        self.refused = False


_captures: "weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Captures]]" = weakref.WeakKeyDictionary()
_by_forward: "weakref.WeakKeyDictionary[Callable, weakref.WeakSet[Capture]]" = weakref.WeakKeyDictionary()
# module whose calls may be captured → whether Inductor compiles the graphs; None for those on a GPU
_asked: "weakref.WeakKeyDictionary[nn.Module, bool | None]" = weakref.WeakKeyDictionary()
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
def run(module: nn.Module, /, *args: Any, **named: Any) -> Any:
    """Forward that `optimize` binds: runs a capture, or the forward of the module's class, which it may capture."""
    if torch.compiler.is_compiling() or (ways.state.inside_plain and not state.example):
        return type(module).forward(module, *args, **named)
    given = first_tensor((*args, *named.values()))
    # positions may be computed from sizes alone
    x = next(itertools.chain(module.parameters(), module.buffers()), None) if given is None else given
    traced = has_global_hooks() or gives_proxies(module)
    if type(x) is not Tensor or not (state.example or can_run(x)) or traced:
        return type(module).forward(module, *args, **named)
    captures = _captures_in(module, _mode(module, x))
    capture = _fitting(captures, module, args, named)
    if capture is None and module in _asked and _is_checkpointed():
        with torch.no_grad(), torch.random.fork_rng():
            type(module).forward(module, *args, **named)
        _capture(module, captures, args, named)  # before the call, as its graph must run when it is repeated
        capture = _fitting(captures, module, args, named)
    if capture is None:
        outputs = type(module).forward(module, *args, **named)
        if module in _asked:
            _capture(module, captures, args, named)
        return outputs
    if _takes_region(capture, x, 0 if given is None else given.shape[0]):
        return capture.call_region(module, args, named)
    if given is None:
        return capture(module, *args, **named)
    # on a CPU a record has no second derivatives, which the graph has
    if kernels_available(x) or (plan.has_ways(x) and not torch.is_grad_enabled()):
        return replay.call((capture, settings.choices(x.device.type)), capture, module, *args, **named)
    return capture(module, *args, **named)


def _takes_region(capture: "Capture", x: Tensor, images: int) -> bool:
    """True if a call runs what Inductor compiled; in a trace, what it would compile on a GPU.

    Recorders and transforms see operators, so for these the graph runs. A few images without gradients take the least
    time on the host, which a replay of the graph saves.
    """
    on_gpu = launch.target is not None or not x.is_cpu
    if on_gpu and not torch.is_grad_enabled() and 0 < images <= REPLAYED:
        return False
    if settings.region is not None:
        compiles = capture.key[1] is not False and capture.region.counted is not None
        return compiles and launch.target is not None and settings.forced is None
    return capture.region.call is not None and not settings.is_observed()


def _mode(module: nn.Module, x: Tensor) -> Hashable:
    """What most captures differ in; their guards compare it, too."""
    kind = x.device.type
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled(kind)
    return x.dtype, kind, module.training, modes


def _captures_in(module: nn.Module, mode: Hashable) -> Captures:
    by_mode = _captures.get(module)
    if by_mode is None:
        by_mode = _captures.setdefault(module, {})
    found = by_mode.get(mode)
    return by_mode.setdefault(mode, Captures(mode)) if found is None else found


def _fitting(captures: Captures, module: nn.Module, args: tuple, named: dict[str, Any]) -> "Capture | None":
    """The capture that fits a call: of the module, or of another one with the same forward; None if there is none."""
    with _without_modes():
        for capture in captures.found:
            if capture.fits(module, args, named):
                return capture
        if len(captures.found) < MAX_CAPTURES:
            for capture in _alike(module, captures.mode):
                if capture not in captures.found and capture.fits(module, args, named):
                    captures.found.append(capture)
                    return capture
    # tensors that a trace makes are no views, which guards of tensors kept from earlier calls may compare
    alike = _alike(module, captures.mode) if settings.region is not None else []
    return alike[0] if len(alike) == 1 else None


def _without_modes() -> contextlib.AbstractContextManager:
    """Context without modes that only see operators, as a counter's: guards would compare these."""
    functions = _get_current_function_mode_stack() if torch._C._len_torch_function_stack() else ()
    counting = functions and all(type(m).__module__.startswith(f"{PACKAGE}.") for m in functions)
    if not (counting or torch._C._len_torch_dispatch_stack()):
        return NO_MODES
    stack = contextlib.ExitStack()
    stack.enter_context(_disable_current_modes())
    for _ in functions if counting else ():
        stack.enter_context(_pop_mode_temporarily())
    if counting and not torch.backends.mha.get_fastpath_enabled():  # as counters count the operators of its Python code
        torch.backends.mha.set_fastpath_enabled(True)
        stack.callback(torch.backends.mha.set_fastpath_enabled, False)
    return stack


def _alike(module: nn.Module, mode: Hashable = None) -> "list[Capture]":
    """The captures, in one mode or in all, of modules with the same forward, and parameters of the same sizes."""
    captures = _by_forward.get(type(module).forward, ())
    if not captures:
        return []
    sizes, compiles = _key(module)
    found = [c for c in captures if c.key[0] == sizes and mode in (None, c.mode)]
    return [c for c in found if c.key[1] == compiles] if module in _asked else found  # else it is a copy


def _key(module: nn.Module) -> tuple[Hashable, bool | None]:
    """Types and sizes of the parameters of a module and its submodules, and whether its graphs are compiled."""
    sizes = tuple(
        (type(m).__qualname__, *(None if p is None else p.shape for p in m._parameters.values()))
        for m in module.modules()
    )
    return sizes, _asked.get(module)


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


def ask(module: nn.Module, compiles: bool | None = None) -> None:
    """Lets calls of a module be captured, where no graph fits, and compiled; None to compile those on a GPU."""
    if _asked.setdefault(module, compiles) is not compiles:
        _asked[module] = compiles
        _captures.pop(module, None)


def ask_if_new(module: nn.Module) -> None:
    """As `ask`, for a module that was not asked in this process, such as a copy, which is compiled as the original."""
    if module not in _asked:
        ask(module, next((capture.key[1] for capture in _alike(module)), None))


def compiles(module: nn.Module, asked: bool | None) -> bool:
    """Whether Inductor compiles captured calls of a module on its device, if `asked` is `optimize`'s argument."""
    if asked is not None:
        return asked
    return any(not t.is_cpu for t in (*module.parameters(), *module.buffers()))


def is_bound(module: nn.Module) -> bool:
    """True if a module's forward is `run`."""
    forward = module.__dict__.get("forward")
    return isinstance(forward, partial) and forward.func is run


def captures_of(module: nn.Module) -> "list[Capture]":
    """The captures that a module runs; of a copy that was not called, those that it may run."""
    own = [capture for captures in _captures.get(module, {}).values() for capture in captures.found]
    return own or _alike(module)


def compiled(model: nn.Module) -> tuple[int, float] | None:
    """The number of graphs that Inductor compiled for a model's modules, and the seconds that it took; None if none."""
    captures = {capture for module in model.modules() if is_bound(module) for capture in captures_of(module)}
    seconds = [capture.region.seconds for capture in captures if capture.region.call is not None]
    return (len(seconds), sum(seconds)) if seconds else None


def why_none(module: nn.Module) -> str:
    """Why a module that was asked for captures has none."""
    by_mode = _captures.get(module)
    if by_mode is None:
        return "the example does not reach it with a tensor"
    return next((captures.why for captures in by_mode.values() if captures.why is not None), "its example did not run")


def _capture(module: nn.Module, captures: Captures, args: tuple, named: dict[str, Any]) -> None:
    """Captures a call, or notes why it cannot."""
    if captures.refused or len(captures.found) >= MAX_CAPTURES:
        return
    try:
        from .capture import Refusal, capture  # here, as it imports Dynamo, also private parts of it
    except ImportError as error:
        captures.why = f"torch {torch.__version__} does not have what captures use: {error}"
        captures.refused = True
        return
    modes = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    if modes or torch._C._are_functorch_transforms_active():
        return  # Dynamo skips such a call
    watched = next((m for m in module.modules() if m is not module and has_hooks(m)), None)
    if watched is not None or runs_other_code(module):
        name = type(module if watched is None else watched).__name__
        captures.why = f"{name} has a hook, or its code was changed"
        return
    with _lock:
        if _fitting(captures, module, args, named) is not None:
            return  # by another thread
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        inside = [(m, m.__dict__["forward"]) for m in module.modules() if is_our_forward(m.__dict__.get("forward"))]
        for m, _ in inside:
            del m.__dict__["forward"]  # Dynamo follows the code of the classes
        try:
            key = _key(module)
            made = capture(module, args, named, (key, captures.mode), compiles(module, key[1]))
        except Refusal as refusal:
            captures.why, captures.refused = str(refusal), True
        else:
            captures.found.append(made)
            _by_forward.setdefault(type(module).forward, weakref.WeakSet()).add(made)
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


def computing(model: nn.Module, taken: set[str]) -> Iterator[str]:
    """Yields paths of modules to compile by Inductor alone: positions, norms and gates that are written out.

    They are the outermost ones of classes that are not PyTorch's or ours, without layers of products inside, and not
    inside a module at the paths `taken`, nor around one.
    """
    found: list[str] = []
    for path, module in model.named_modules():
        if not path or not taken.isdisjoint(enclosing(path)) or not set(found).isdisjoint(enclosing(path)):
            continue
        if not is_foreign(module) or type(module).__module__.partition(".")[0] == PACKAGE:
            continue
        inside = (name for name in taken if name.startswith(f"{path}."))
        if next(inside, None) is None and not any(isinstance(m, (*LAYERS, *STACKS)) for m in module.modules()):
            found.append(path)
            yield path


def is_foreign(module: nn.Module) -> bool:
    """True for a module whose class is not PyTorch's."""
    return not type(module).__module__.startswith("torch.")


def _is_block(module: nn.Module) -> bool:
    """True for a module with layers whose class is not PyTorch's."""
    return is_foreign(module) and any(isinstance(m, LAYERS) for m in module.modules())
