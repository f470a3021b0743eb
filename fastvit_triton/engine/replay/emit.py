"""Writes a recorded call as Python source: one flat function for the forward pass, and one for the backward pass.

Tensors are local variables, named after parameters and operators; `x_at` is the address of `x`. Launches are calls of
Triton's launcher, with the grid, numbers and compile-time arguments of the recorded launch. To see the functions of a
module, after its third call:

    from fastvit_triton.engine import replay
    print(*replay.sources(module), sep="\\n\\n")

The source is registered in `linecache`, so that tracebacks and debuggers show its lines.
"""

import ast
import itertools
import keyword
import linecache
import math
import re
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch as functorch

from ...kernels.launch import Binary, binary_of, current_stream, launch
from ...kernels.op import once_differentiable
from .build import Plan, Ref
from .recorder import Place, RecordedStep, ReplayRefusal, tensors_in

BATCHED = "replayed blocks take one gradient at a time; FASTVIT_TRITON_REPLAY=0 allows batched ones"
WIDTH = 116  # of lines, without the indentation of a function
_numbers = itertools.count(1)


class TensorNames:
    """Names in generated functions: local variables, and global variables of objects.

    Args:
        *reserved: names that are not given to others.

    Attributes:
        globals: objects by name.
    """

    def __init__(self, *reserved: str) -> None:
        self.globals: dict[str, Any] = {}
        self._taken = {*reserved}
        self._bound: dict[object, str] = {}

    def unique(self, name: str) -> str:
        """A valid name that is not taken, which it then is."""
        name = re.sub(r"\W|^(?=\d)", "_", name, flags=re.ASCII) + "_" * keyword.iskeyword(name)
        numbered = itertools.chain([name], (f"{name}_{i}" for i in itertools.count(2)))
        free = next(candidate for candidate in numbered if candidate not in self._taken)
        self._taken.add(free)
        return free

    def bind(self, name: str, value: object, key: object = None) -> str:
        """The global variable of an object; of those with the same key, if there is one."""
        key = id(value) if key is None else key
        if key not in self._bound:
            self._bound[key] = self.unique(name)
            self.globals[self._bound[key]] = value
        return self._bound[key]

    def call(self, function: Callable, *arguments: str) -> str:
        """Expression of a call."""
        return f"{self.bind(function.__name__.lstrip('_'), function)}({', '.join(arguments)})"

    def value(self, value: Any, of: Callable[[Tensor], str] | None = None) -> str:
        """Expression of a value: a literal, or a global variable; `of` gives that of a tensor."""
        kind = type(value)
        if isinstance(value, Tensor) and value.is_mkldnn:
            return self.bind("packed", value)
        if isinstance(value, Tensor) and of is not None:
            return of(value)
        if kind in (tuple, list, torch.Size):
            parts = [self.value(part, of) for part in value]
            return _tuple(parts) if kind is not list else f"[{', '.join(parts)}]"
        if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
            return repr(value)
        if isinstance(value, (float, torch.dtype, torch.device, torch.layout, torch.memory_format)):
            return self.bind(str(value).removeprefix("torch."), value, (kind, str(value)))
        if next(tensors_in(value), None) is not None:
            raise ReplayRefusal("a tensor is in an argument that is not a tuple or list")
        return self.bind(kind.__name__.lower(), value)

    def compiled(self, text: str, name: str) -> Callable:
        """The function of this name in a text, which becomes a file of `linecache`."""
        filename = f"<{name} {next(_numbers)}>"
        exec(compile(text, filename, "exec"), self.globals)
        function: Callable = self.globals[name]
        if name not in function.__code__.co_names:
            del self.globals[name]  # a reference cycle otherwise, of a function that may hold weights
        linecache.cache[filename] = len(text), None, text.splitlines(keepends=True), filename
        weakref.finalize(function, linecache.cache.pop, filename, None).atexit = False
        return function


class Emitted(NamedTuple):
    """A replay."""

    # from the given tensors and their addresses to what the call returned
    run: Callable[[list[Tensor], list[int]], Any]
    kernels: tuple[Callable, ...]  # those whose binaries it launches
    operators: bool  # True if it calls operators of PyTorch
    launches: bool  # True if it launches kernels, with or without binaries


def emit(plan: Plan) -> Emitted:
    """Compiles a plan; raises Refusal if an argument is not one that can be replayed."""
    source = _Source(plan)
    run = source.compiled("\n".join(source.functions()) + "\n", "replay")
    launched = {step.grid is not None for part in plan.steps for step in part}
    return Emitted(run, tuple(source.kernels), operators=False in launched, launches=True in launched)


class _Source(TensorNames):
    """The names in a replay's functions.

    Attributes:
        kernels: those whose binaries are launched.
        names: variables of the tensors, by slot.
        at: variables of their addresses.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__("replay", "forward", "backward", "given", "addresses", "saved", "stream", "_")
        self.plan = plan
        self.kernels: dict[Callable, None] = {}
        self.names = [*map(self.unique, plan.names)]
        self.at = [self.unique(f"{name}_at") for name in self.names]

    def functions(self) -> list[str]:
        """Lines of all functions; `replay` is the one to call."""
        plan, inputs = self.plan, self.plan.inputs
        parameters = dict(given=self.names[:inputs], addresses=self.at[:inputs])
        forward = _Function(self, 0, self.at[:inputs])
        outputs = [forward.output(t) for t in plan.outputs]
        if plan.gradients is None:
            forward.write(f"return {self.result(plan.result, outputs)}")
            return forward.lines("replay", **parameters)
        backward = _Function(self, 1)
        backward.write(*listed("return ", [self.value(t, backward.tensor) for t in plan.gradients]))
        dy = self.names[inputs]
        read_names = set().union(*map(_names_in, backward.groups)) - {dy, *backward.made}
        saved = [name for name in self.names if name in read_names]
        forward.write(*listed("saved = ", saved))
        fixed = [output for i, output in enumerate(outputs) if i != plan.learns]
        forward.write(f"return {_tuple(outputs)}, {_tuple(fixed)}, saved")
        results = [f"y{i}" for i in range(len(outputs))]
        apply = self.call(_apply, "forward", "backward", str(plan.learns), "addresses", "*given")
        return [
            *forward.lines("forward", **parameters), "", "",
            *backward.lines("backward", saved=saved, **{dy: None}), "", "",
            "def replay(given, addresses):",
            *[f"    given[{i}] = given[{i}].detach()" for i in plan.unused],
            *[f"    {line}" for line in listed("", results, f" = {apply}")],
            f"    return {self.result(plan.result, results)}",
        ]  # fmt: skip

    def result(self, result: Any, outputs: list[str]) -> str:
        """Expression of what the call returns, by the variables of the tensors."""
        if result is None:
            return "None"
        if isinstance(result, Tensor):
            return next(name for name, t in zip(outputs, self.plan.outputs, strict=True) if t is result)
        if not isinstance(result, tuple):
            raise ReplayRefusal(f"the call returns {type(result).__name__}")
        parts, kind = [self.result(part, outputs) for part in result], type(result)
        return f"{self.bind(kind.__name__, kind)}({', '.join(parts)})" if hasattr(result, "_make") else _tuple(parts)


class _Function:
    """Lines of one function.

    Args:
        source: the names.
        phase: 0 for the forward pass, 1 for the backward pass.
        addresses: variables of the addresses that the function is given.

    Attributes:
        groups: lines of each step, with the allocations that it is the first to use, and of what the function returns.
        made: variables of the tensors that it allocates or computes.
    """

    def __init__(self, source: _Source, phase: int, addresses: Iterable[str] = ()) -> None:
        self.source, self.plan = source, source.plan
        self.groups: list[list[str]] = []
        self.made = [source.names[slot] for slot in self.plan.allocations[phase]]
        self._unallocated = {*self.plan.allocations[phase]}  # slots
        self._results: list[int] = [*self.plan.allocations[phase]]  # slots of what is deleted after its last use
        self._known = {*addresses}  # variables of addresses that are set
        self._views: dict[tuple[str, str], str] = {}  # buffer and dtype → its variable
        self._switches = False  # whether autocast must be off, as casts were recorded
        for step in self.plan.steps[phase]:
            self.groups.append([])
            binary = None if step.grid is None else binary_of(step.function, step.arguments, step.named)
            self._switches |= binary is None
            if binary is not None:
                self._launch(step, binary)
            else:
                self._call(step)
        self.groups.append([])

    def write(self, *lines: str) -> None:
        """Adds lines."""
        self.groups[-1] += lines

    def lines(self, name: str, **arguments: list[str] | None) -> list[str]:
        """The function; takes the variables out of each argument that has some."""
        parameters, lines = ", ".join(arguments), []
        if self._switches:
            kind = repr(self.plan.device.type)
            lines.append(f"if {self.source.call(torch.is_autocast_enabled, kind)}:")
            lines.append(f"    return {self.source.call(_without_autocast, kind, name, parameters)}")
        names_by_group = list(map(_names_in, self.groups))
        for argument, variables in arguments.items():
            targets = [
                variable if any(variable in names for names in names_by_group) else "_" for variable in variables or ()
            ]
            if {*targets} - {"_"}:
                lines += listed("", targets, f" = {argument}")
        for slot in self._results:
            both = {self.source.names[slot], self.source.at[slot]}
            last = max((i for i, names in enumerate(names_by_group) if names & both), default=len(names_by_group))
            if last < len(names_by_group) - 1:
                self.groups[last].append(f"del {self.source.names[slot]}")
        lines += itertools.chain(*self.groups)
        return [f"def {name}({parameters}):", *[f"    {line}" for line in lines]]

    def _allocate(self, slot: int) -> None:
        """Allocates a tensor of this function before its first use."""
        if slot not in self._unallocated:
            return
        self._unallocated.discard(slot)
        source, new = self.source, self.plan.places[slot]
        options = f"dtype={source.value(new.dtype)}, device={source.value(self.plan.device)}"
        if new.stride == (1,):
            allocation = source.call(torch.empty, str(*new.shape), options)
        else:
            allocation = source.call(torch.empty_strided, str(new.shape), str(new.stride), options)
        self.write(f"{source.names[slot]} = {allocation}")

    def tensor(self, t: Tensor) -> str:
        """Expression of a recorded tensor."""
        ref = self.plan.ref(t)
        self._allocate(ref.slot)
        name, base = self.source.names[ref.slot], self.plan.places[ref.slot]
        if ref.shape is None:
            return name
        if base.dtype != ref.dtype:
            name = self._viewed(name, ref.dtype)
        elif len(ref.shape) == 2 and (0, base.shape, base.stride) == (ref.nbytes, ref.shape[::-1], ref.stride[::-1]):
            return f"{name}.t()"
        elif _covers(ref, base) and _meta(base).view(ref.shape).stride() == ref.stride:
            return f"{name}.view({ref.shape})"
        start = ref.nbytes // ref.dtype.itemsize
        is_new = ref.slot in itertools.chain(*self.plan.allocations)
        offset = start if is_new else f"{name}.storage_offset() + {start}"
        return f"{name}.as_strided({ref.shape}, {ref.stride}, {offset})"

    def output(self, t: Tensor) -> str:
        """Variable of a tensor to return; not a view for autograd if it covers its storage, so it may be written to."""
        ref = self.plan.ref(t)
        self._allocate(ref.slot)
        if ref.shape is None:
            return self.source.names[ref.slot]
        value = self.tensor(t)
        if _covers(ref, self.plan.places[ref.slot]):
            view = self.source.bind("unsafe_view", torch.ops.aten._unsafe_view.default._op)
            value = f"{view}({self.source.names[ref.slot]}, {ref.shape})"
        output = self.source.unique("y")
        self.write(f"{output} = {value}")
        return output

    def _viewed(self, name: str, dtype: torch.dtype) -> str:
        """Variable of a buffer, viewed as a dtype."""
        kind = self.source.value(dtype)
        if (name, kind) not in self._views:
            self._views[name, kind] = self.source.unique(f"{name}_{kind}")
            self.write(f"{self._views[name, kind]} = {name}.view({kind})")
        return self._views[name, kind]

    def _address(self, t: Tensor) -> str:
        """Expression of a tensor's address."""
        ref = self.plan.ref(t)
        self._allocate(ref.slot)
        at = self.source.at[ref.slot]
        if at not in self._known:
            self._known.add(at)
            self.write(f"{at} = {self.source.names[ref.slot]}.data_ptr()")
        return f"{at} + {ref.nbytes}" if ref.nbytes else at

    def _launch(self, step: RecordedStep, binary: Binary) -> None:
        """Launches a binary."""
        source = self.source
        source.kernels[step.function] = None
        run = source.bind(_title(step.function), binary.run, (binary.function, "run"))
        function = source.bind(f"{run}_binary", binary.function, (binary.function, "function"))
        metadata = source.bind(f"{run}_metadata", binary.metadata, (binary.function, "metadata"))
        parts = [source.value(value, self._address) for value in (*step.arguments, *binary.constants)]
        if "stream" not in self._known:
            self._known.add("stream")
            index = -1 if self.plan.device.index is None else self.plan.device.index
            self.write(f"stream = {source.bind('current_stream', current_stream())}({index})")
        x, y, z = (*(step.grid or ()), 1, 1)[:3]
        first = [str(x), str(y), str(z), "stream", function, metadata, "None", "None", "None"]
        self.write(*wrapped(f"{run}(", [*first, *parts], ")"))

    def _call(self, step: RecordedStep) -> None:
        """Calls an operator, or launches a kernel for which Triton selects the binary."""
        source = self.source
        parts = [source.value(value, self.tensor) for value in step.arguments]
        parts += self._named(step.named)
        if step.grid is not None:
            kernel = source.bind(f"{_title(step.function)}_kernel", step.function)
            self.write(*wrapped(f"{source.bind('launch', launch)}(", [kernel, str(step.grid), *parts], ")"))
            return
        slots = {position: self.plan.slot(t) for t, position in step.results}
        self._results += slots.values()
        names = {position: source.names[slot] for position, slot in slots.items()}
        self.made += names.values()
        name = source.bind(f"{step.function.namespace}_{step.function._opname}", step.function._op)
        self.write(*wrapped(f"{_targets(step, names)}{name}(", parts, ")"))

    def _named(self, named: dict[str, object]) -> list[str]:
        """Keyword arguments."""
        values = {name: self.source.value(value, self.tensor) for name, value in named.items()}
        return [f"**{{{n!r}: {v}}}" if keyword.iskeyword(n) else f"{n}={v}" for n, v in values.items()]


def _names_in(lines: list[str]) -> set[str]:
    """The variables in these lines."""
    return {node.id for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, ast.Name)}


def _targets(step: RecordedStep, results: dict[int, str]) -> str:
    """Assignment to the variables of an operator's new tensors, by position."""
    returns = step.function._schema.returns
    if not results or (len(returns) == 1 and str(returns[0].type) == "Tensor"):
        return "".join(f"{name} = " for name in results.values())
    names = [results.get(i, "_") for i in range(max(results) + 1)]
    return ", ".join(names if len(names) == len(returns) > 1 else [*names, "*_"]) + " = "


def _title(kernel: Any) -> str:
    """A kernel's file and function, such as linear_fwd."""
    file = kernel.fn.__module__.rpartition(".")[2].removesuffix("_backward")
    name = kernel.fn.__name__.strip("_").removesuffix("_kernel")
    return name if name.startswith(file) else f"{file}_{name}"


def _tuple(parts: list[str]) -> str:
    """A tuple in parentheses."""
    return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"


def listed(start: str, parts: list[str], end: str = "") -> list[str]:
    """A tuple in as many lines as needed."""
    line = f"{start}{', '.join(parts) if len(parts) > 1 else _tuple(parts)}{end}"
    return [line] if len(line) <= WIDTH else wrapped(f"{start}(", parts, f"){end}")


def wrapped(start: str, parts: list[str], end: str) -> list[str]:
    """Parts with commas between them, in one line or in as many as needed."""
    line = start + ", ".join(parts) + end
    if len(line) <= WIDTH:
        return [line]
    lines = [""]
    for part in parts:
        if len(lines[-1]) + len(part) + 1 > WIDTH - 4:
            lines.append("")
        lines[-1] += f"{part}, "
    return [start, *[f"    {line.rstrip()}" for line in lines], end]


def _meta(layout: Place | Ref) -> Tensor:
    """A tensor with this layout, without memory."""
    return torch.empty_strided(layout.shape or (), layout.stride, device="meta")


def _covers(ref: Ref, base: Place) -> bool:
    """True if a view and its tensor are contiguous and have the same elements."""
    both = _meta(base), _meta(ref)
    same = not ref.nbytes and base.dtype == ref.dtype and both[0].numel() == both[1].numel()
    return same and all(t.is_contiguous() for t in both)


def _without_autocast(kind: str, function: Callable, *arguments: object) -> Any:
    """function(*arguments) with autocast off."""
    torch.set_autocast_enabled(kind, False)
    try:
        return function(*arguments)
    finally:
        torch.set_autocast_enabled(kind, True)


class _Node(torch.autograd.Function):
    """Autograd node of a replay: its forward and its backward function."""

    @staticmethod
    def forward(ctx, forward, backward, learns, addresses, *tensors):
        outputs, fixed, saved = forward(tensors, addresses)
        ctx.run, ctx.learns = backward, learns
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*fixed)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *incoming):
        dy = incoming[ctx.learns]
        if dy is None:
            return (None,) * len(ctx.needs_input_grad)
        if functorch.is_batchedtensor(dy) or functorch.is_legacy_batchedtensor(dy):
            raise RuntimeError(BATCHED)
        dy = dy.contiguous()
        return None, None, None, None, *ctx.run(ctx.saved_tensors, dy if dy.data_ptr() % 16 == 0 else dy.clone())


# `_Node.apply` without its search for tensors of ended functorch transforms, which have no address
_apply = super(torch.autograd.Function, _Node).apply
