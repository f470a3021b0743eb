"""Blocks that run as captured and rewritten graphs: which capture a call takes, and when one is made.

A call takes a capture whose guards hold, one of its own or of another module with the same forward; Dynamo's guards
decide, see `capture`. In front of them stands what Dynamo does not guard: patched code of classes, global hooks, and
tracing. Where nothing fits, the module's own forward runs, and is captured if that was asked for. Copies share the
captures of the original, and make none themselves.
"""

import contextlib
import itertools
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
from ..engine.freeze import keeps
from ..engine.hooks import PACKAGE, has_global_hooks, has_hooks, is_our_forward, runs_other_code
from ..kernels import choose, launch, settings
from ..kernels.backend import kernels_available, transparent
from .example import arguments, unchanged
from .third_party import can_run, gives_proxies

if TYPE_CHECKING:
    from .capture import Capture

NO_MODES = contextlib.nullcontext()
REPLAYED = 8  # images, up to which the graph is replayed on a GPU
MAX_CAPTURES = 4  # of one module in one mode, for the branches that sizes and attributes select


class Captures:
    """The captures that a module runs in one mode."""

    def __init__(self, mode: Hashable, on_gpu: bool) -> None:
        self.mode = mode  # see `_mode`
        self.on_gpu = on_gpu  # True if it is that of calls on a GPU
        self.found: list[Capture] = []  # at most MAX_CAPTURES
        self.why: str | None = None  # why the last attempt failed; None if it did not
        self.refused = False  # True if it would fail again


_captures: "weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Captures]]" = weakref.WeakKeyDictionary()
_by_forward: "weakref.WeakKeyDictionary[Callable, weakref.WeakSet[Capture]]" = weakref.WeakKeyDictionary()
# module whose calls may be captured → whether Inductor compiles the graphs; None for those on a GPU
_asked: "weakref.WeakKeyDictionary[nn.Module, bool | None]" = weakref.WeakKeyDictionary()
_lock = threading.RLock()


class CaptureState(threading.local):
    """Thread-local state."""

    def __init__(self) -> None:
        self.example = False  # True while `optimize` runs an example, whose calls are captured on every device
        self.counts_only = False  # True while what Inductor would compile is only to be counted, see `counting`
        self.seconds: list[float] = []  # how long Inductor took for each graph that it compiled since `optimize` began


state = CaptureState()


@transparent
def run(module: nn.Module, /, *args: Any, **named: Any) -> Any:
    """Forward that `optimize` binds: runs a capture, or the forward of the module's class, which it may capture."""
    if torch.compiler.is_compiling() or (ways.state.inside_plain and not state.example):
        return type(module).forward(module, *args, **named)
    given = first_tensor((*args, *named.values()))
    # positions may be computed from sizes alone
    x = next(itertools.chain(module.parameters(), module.buffers()), None) if given is None else given
    traced = has_global_hooks() or gives_proxies(module)
    x = x.detach() if given is None and x is not None else x
    if type(x) is not Tensor or traced or not (state.example or can_run(x) or _asked.get(module)):
        return type(module).forward(module, *args, **named)
    captures = _captures_in(module, _mode(module, x), not x.is_cpu)
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
    images = given.shape[0] if given is not None and given.dim() else 0
    if _takes_region(capture, x, images):
        return capture.call_region(module, args, named)
    if given is None:
        return capture(module, *args, **named)
    # on a CPU a record has no second derivatives, which the graph has
    if kernels_available(x) or (choose.has_ways(x) and not torch.is_grad_enabled()):
        return replay.call((capture, settings.choices(x.device.type)), capture, module, *args, **named)
    return capture(module, *args, **named)


def _takes_region(capture: "Capture", x: Tensor, images: int) -> bool:
    """True if a call runs what Inductor compiled; in a trace, whether it would on a GPU.

    Recorders and transforms see operators, so for these the graph runs, as under other settings than those that were
    compiled. On a GPU, a few images without gradients take the least time on the host if the graph is replayed.
    """
    on_gpu = launch.target is not None or not x.is_cpu
    if on_gpu and not torch.is_grad_enabled() and 0 < images <= REPLAYED:
        return False
    if _is_traced():
        compiles = capture.key[1] is not False and capture.region.counted is not None
        return compiles and launch.target is not None and settings.forced is None
    return capture.region.call is not None and _is_current(capture) and not settings.is_observed()


def _is_current(capture: "Capture") -> bool:
    """True if a capture was not compiled, or for the settings of now."""
    return capture.region.call is None or capture.region.settings == settings.compiled(capture.mode[1])


def _is_traced() -> bool:
    """True in a trace of `expected` on this thread."""
    return settings.region is not None and torch._C._len_torch_dispatch_stack() > 0


def _mode(module: nn.Module, x: Tensor) -> Hashable:
    """What most captures differ in; their guards compare it, too."""
    kind = x.device.type
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled(kind)
    return x.dtype, kind, module.training, modes


def _captures_in(module: nn.Module, mode: Hashable, on_gpu: bool) -> Captures:
    by_mode = _captures.get(module)
    if by_mode is None:
        by_mode = _captures.setdefault(module, {})
    found = by_mode.get(mode)
    return by_mode.setdefault(mode, Captures(mode, on_gpu)) if found is None else found


def _fitting(captures: Captures, module: nn.Module, args: tuple, named: dict[str, Any]) -> "Capture | None":
    """The capture that fits a call: of the module, or of another one with the same forward; None if there is none."""
    with _without_modes():
        for capture in captures.found:
            if (module not in _asked or _suits(capture, module)) and capture.fits(module, args, named):
                return capture
        if len(captures.found) < MAX_CAPTURES:
            for capture in _alike(module, captures.mode):
                if capture not in captures.found and _is_current(capture) and capture.fits(module, args, named):
                    captures.found.append(capture)
                    return capture
    # tensors that a trace makes are no views, which guards of tensors kept from earlier calls may compare
    if not _is_traced() or captures.refused or any(map(has_hooks, module.modules())):
        return None
    alike = _alike(module, captures.mode)
    alike = [capture for capture in alike if _suits(capture, module)] or alike
    return alike[0] if len(alike) == 1 and not alike[0].reads else None


def _suits(capture: "Capture", module: nn.Module) -> bool:
    """True if a capture was made for weights that are as final as those of the module, or does not depend on that."""
    return not capture.freezes or capture.key[-1] == keeps(module)


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
    key = _key(module)
    found = [c for c in captures if c.key[0] == key[0] and mode in (None, c.mode)]
    found.sort(key=lambda c: not _suits(c, module))
    return [c for c in found if c.key == key] if module in _asked else found  # else it is a copy


def _key(module: nn.Module) -> tuple[Hashable, bool | None, bool, bool]:
    """Types and sizes of the parameters of a module and its submodules; whether its graphs are compiled, counted, and
    its weights final."""
    sizes = tuple(
        (type(m).__qualname__, *(None if p is None else p.shape for p in m._parameters.values()))
        for m in module.modules()
    )
    return sizes, _asked.get(module), state.counts_only, keeps(module)


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
    if module not in _asked or _asked[module] is not compiles:
        _asked[module] = compiles
        _captures.pop(module, None)


def ask_if_new(module: nn.Module) -> None:
    """As `ask`, for a module that was not asked in this process, such as a copy, which is compiled as the original."""
    if module not in _asked:
        ask(module, next((capture.key[1] for capture in _alike(module)), None))


@contextlib.contextmanager
def counting() -> Iterator[None]:
    """Context in which nothing is compiled, but a trace counts what would be."""
    before, state.counts_only = state.counts_only, True
    try:
        yield
    finally:
        state.counts_only = before


def forget(model: nn.Module) -> None:
    """Drops the captures of a model's modules, so that their next calls are captured anew."""
    for module in model.modules():
        _captures.pop(module, None)


def is_bound(module: nn.Module) -> bool:
    """True if a module's forward is `run`."""
    forward = module.__dict__.get("forward")
    return isinstance(forward, partial) and forward.func is run


def captures_of(module: nn.Module) -> "list[Capture]":
    """The captures that a module runs; of a copy that was not called, those that it may run."""
    own = [capture for captures in _captures.get(module, {}).values() for capture in captures.found]
    return own or _alike(module)


def replaced_parts(model: nn.Module) -> dict[str, float]:
    """Path of each block that was captured → the part of its FLOPs that its graph gives to the kernels."""
    bound = {path: module for path, module in model.named_modules() if is_bound(module)}
    parts = {path: [one.replaced for one in captures_of(module)] for path, module in bound.items()}
    return {path: max(found) for path, found in parts.items() if found}


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
        from .capture import CaptureRefusal, capture  # here, as it imports Dynamo, also private parts of it
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
            compiles = captures.on_gpu if key[1] is None else key[1]
            made = capture(module, args, named, (key, captures.mode), compiles, state.counts_only)
        except CaptureRefusal as refusal:
            captures.why, captures.refused = str(refusal), True
        else:
            if made.region.call is not None:
                state.seconds.append(made.region.seconds)
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
