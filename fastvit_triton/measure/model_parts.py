"""Finds what can be tuned in a model: launches of our ops, and blocks and stems that can run in several ways."""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ..engine.ways import SIZES
from ..kernels import measured, settings
from ..kernels.backend import using_backend
from ..kernels.choose import Choice
from ..kernels.launch import overriding
from ..kernels.measured import Measured
from ..kernels.op import REGISTERED
from ..kernels.patch_embed import patch_embed
from ..kernels.settings import observing
from .compare import Named, Verdict, outcome, verdict
from .timeout import capturing
from .timing import Context

OPS_OF = {"mixed": ("attention", "fc1"), "fused": ("attention",)}  # way of a block → ops with a choice of their own
ARMS = {  # of these ops → their ways
    "attention": {"our attention": "fused", "SDPA": "plain"},
    "fc1": {"our fc1": "fused", "BLAS": "plain"},
}


@dataclass
class RecordedCall:
    """A distinct call of one of our ops."""

    op: str  # name of the op
    arguments: tuple  # of the first such call
    rows: dict[str, dict[str, int]]  # row name with exact sizes → launch parameters in use
    count: int = 1  # number of such calls

    def __call__(self) -> object:
        """Runs the call, in this thread and without autograd."""
        with torch.no_grad():
            return REGISTERED[self.op][0](*self.arguments)


class _CallRecorder(TorchDispatchMode):
    """Records each distinct call of our ops, including those in autograd's threads."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[tuple, RecordedCall] = {}

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        if function.namespace != "fastvit_triton":
            return function(*arguments, **named or {})
        with overriding({}) as rows:
            result = function(*arguments)
        op = function.name().split("::")[1]
        key = op, *rows, *map(_layout, tree_leaves(arguments))
        if key in self.calls:
            self.calls[key].count += 1
        else:
            self.calls[key] = RecordedCall(op, tree_map(_detached, arguments), dict(rows))
        return result


def calls_of(step: Callable[[], object]) -> list[RecordedCall]:
    """Distinct calls of our ops in a step that read launch parameters, most frequent first."""
    with _CallRecorder() as recorder:
        step()
    return sorted((call for call in recorder.calls.values() if call.rows), key=lambda call: -call.count)


def calls_of_variants(
    parts: list["Part"], table: Measured, train: bool, known: list[RecordedCall]
) -> Iterator[RecordedCall]:
    """Yields calls in the variants of parts that read other rows than the known calls, as fc1 of a one-launch MLP."""
    rows = {row for call in known for row in call.rows}
    for part in parts:
        for ways in part.variants().values():
            with capturing({}, part.name), measured.using(table.with_ways(ways)):
                for call in calls_of(part.step(train)):
                    if not rows.issuperset(call.rows):
                        rows.update(call.rows)
                        call.count *= part.count
                        yield call


@dataclass
class Part:
    """A block or stem, with its inputs in the model."""

    name: str  # class of the block, or "stem"
    count: int  # number of such parts in the model
    shapes: tuple[str, ...]  # its names in tables of measurements
    call: Callable  # module or function
    inputs: tuple  # positional inputs
    named: dict  # keyword inputs
    autocast: torch.dtype | None = None  # autocast's dtype in the model; None if it is off
    ops: dict[str, tuple[str, ...]] = field(default_factory=dict)  # op of `ARMS` → names of its shape
    ways: tuple[str, ...] = ("mixed", "fused")  # of a block, besides plain

    def variants(self) -> dict[str, dict[str, str]]:
        """Variant → {shape: way}; "plain" comes first."""
        variants = {"plain": dict.fromkeys(self.shapes, "plain")}
        if not isinstance(self.call, nn.Module):
            return variants | {"fused": dict.fromkeys(self.shapes, "fused")}
        for way in self.ways:
            ops = [op for op in self.ops if op in OPS_OF.get(way, ())]
            for kernels in itertools.product(*(ARMS[op].items() for op in ops)):
                ways = dict.fromkeys(self.shapes, way)
                for op, (_, kernel) in zip(ops, kernels, strict=True):
                    ways |= dict.fromkeys(self.ops[op], kernel)
                variants[", ".join([way, *(name for name, _ in kernels)])] = ways
        return variants

    def rule(self, table: Measured, train: bool) -> str:
        """Name of the variant that the plan chooses, given these measurements."""
        choices = _choices(self, table, train)
        ways = {shape: choice.way for choice in choices for shape in choice.shapes}
        for name, variant in self.variants().items():
            if all(ways.get(shape, way) == way for shape, way in variant.items()):
                return name
        return "plain"

    def step(self, train: bool) -> Callable[[], None]:
        """A function that runs one call, if `train` with its backward pass."""
        learn = list(self._learning().values())
        along: list[Tensor] = []

        def call() -> None:
            with torch.set_grad_enabled(train):
                outputs = [t for t in self._outputs() if t.requires_grad]
                if train and outputs and learn:
                    if not along:
                        along.extend(map(torch.ones_like, outputs))
                    torch.autograd.grad(outputs, learn, along, allow_unused=True)

        return call

    def compare(self, tables: dict[str, Measured], train: bool) -> tuple[dict[str, Verdict], dict[str, str]]:
        """Compares the results with each table to a wider dtype; the baseline is "plain", the part's original code."""
        verdicts: dict[str, Verdict] = {}
        errors: dict[str, str] = {}
        with capturing(errors, "plain"):
            compared = self.comparison(partial(measured.using, tables["plain"]), train)
            for name, table in tables.items():
                with capturing(errors, name):
                    verdicts[name] = compared(partial(measured.using, table))
        return verdicts, errors

    def comparison(self, plain: Context, train: bool) -> Callable[[Context], Verdict]:
        """What compares the results in a context to a wider dtype; the baseline is the part's original code in `plain`.

        Dropout and stochastic depth are disabled.
        """
        dtype = self.autocast or _stream(self).dtype

        def results(context: Context) -> Named:
            with _evaluating(self.call), context():
                return self._outcome(train)

        with _evaluating(self.call), using_backend("torch"):
            truth = self._widened(torch.float64 if dtype == torch.float32 else torch.float32)._outcome(train)
        baseline = results(plain)
        return lambda context: verdict(results(context), truth, baseline, dtype)

    def _outputs(self) -> list[Tensor]:
        with torch.autocast(_stream(self).device.type, self.autocast, enabled=self.autocast is not None):
            return [t for t in tree_leaves(self.call(*self.inputs, **self.named)) if isinstance(t, Tensor)]

    def _learning(self) -> Named:
        parameters = self.call.named_parameters() if isinstance(self.call, nn.Module) else ()
        inputs = {f"input {i}": t for i, t in enumerate(_floating(self.inputs, self.named))}
        return {name: t for name, t in (dict(parameters) | inputs).items() if t.requires_grad}

    def _outcome(self, train: bool) -> Named:
        return outcome(self._outputs, {}, self._learning() if train else None)

    def _widened(self, dtype: torch.dtype) -> "Part":
        """A copy of the part in another dtype."""
        moved = tree_map(partial(_moved, dtype=dtype), (self.inputs, self.named))
        call = copy.deepcopy(self.call).to(dtype) if isinstance(self.call, nn.Module) else self.call
        return Part(self.name, self.count, self.shapes, call, *moved)


def parts_of(
    model: nn.Module, inputs: tuple, named: dict, train: bool, table: Measured, ways: tuple[str, ...]
) -> list[Part]:
    """The distinct blocks and stems of a model, most frequent first."""
    by_key: dict[tuple, Part] = {}
    on_cpu = "onednn" in ways
    modules = [module for module in model.modules() if SIZES in module.__dict__]
    handles = [m.register_forward_pre_hook(partial(_keep, by_key, train), with_kwargs=True) for m in modules]
    try:
        with measured.using(table), torch.no_grad():
            model(*inputs, **named)
    finally:
        for handle in handles:
            handle.remove()
    for part in by_key.values():
        with settings.forcing("onednn") if on_cpu else nullcontext():  # else a CPU without measurements chooses nothing
            block = next((choice for choice in _choices(part, table, train) if choice.branches), None)
        if block is None:
            continue
        part.shapes, part.name, part.ways = block.shapes, type(part.call).__name__, ways
        part.ops = {} if on_cpu else ops_of(part, table, train)
    parts = [part for part in by_key.values() if part.shapes]
    return [*sorted(parts, key=lambda part: -part.count), *_stems(model, inputs, named, train, table)]


def ops_of(part: Part, table: Measured, train: bool) -> dict[str, tuple[str, ...]]:
    """The ops of `ARMS` that a block calls in its ways → names of their shapes."""
    found: dict[str, tuple[str, ...]] = {}
    for way, ops in OPS_OF.items():
        choices = []
        with capturing({}, part.name):  # if memory is insufficient, it does not run in this way
            choices = _choices(part, table.with_ways(dict.fromkeys(part.shapes, way)), train)
        found = {choice.name: choice.shapes for choice in choices[::-1] if choice.name in ops} | found
    return found


def _stems(model: nn.Module, inputs: tuple, named: dict, train: bool, table: Measured) -> Iterator[Part]:
    """Yields the patch projections by our op, which can run fused or plain."""
    choices: list[Choice] = []
    with measured.using(table), observing(choices.append), torch.set_grad_enabled(train):
        model(*inputs, **named)
    shapes = next((choice.shapes for choice in choices if choice.name == "patch_embed"), None)
    if shapes is None:
        return
    fused = table.with_ways(dict.fromkeys(shapes, "fused"))
    with measured.using(fused), torch.set_grad_enabled(train):
        calls = calls_of(lambda: model(*inputs, **named))
    for call in calls:
        if call.op == "patch_embed_fwd":
            image, weight, *optional = call.arguments
            operands = (image, *(_leaf(t, train) for t in (weight, *optional)))
            yield Part("stem", call.count, shapes, _stem, operands, {})


def _stem(
    image: Tensor, weight: Tensor, bias: Tensor, pos: Tensor, prefix: Tensor, mean: Tensor, std: Tensor
) -> Tensor:
    return patch_embed(image, weight, bias, pos, prefix, mean=mean, std=std)


def _choices(part: Part, table: Measured, train: bool) -> list[Choice]:
    choices: list[Choice] = []
    with measured.using(table), observing(choices.append):
        part.step(train)()
    return choices


def _keep(by_key: dict[tuple, Part], train: bool, module: nn.Module, inputs: tuple, named: dict) -> None:
    streams = _floating(inputs, named)
    if not streams:
        return
    kind = streams[0].device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    key = module.__dict__[SIZES], autocast, *map(_layout, tree_leaves((inputs, named)))
    if key in by_key:
        by_key[key].count += 1
        return
    leaf = _leaf(streams[0], train)
    inputs, named = tree_map(lambda value: leaf if value is streams[0] else _detached(value), (inputs, named))
    by_key[key] = Part("", 1, (), module, inputs, named, autocast)


def _stream(part: Part) -> Tensor:
    """The part's first floating-point input, the residual stream."""
    return _floating(part.inputs, part.named)[0]


@contextmanager
def _evaluating(call: Callable) -> Iterator[None]:
    modes = [(m, m.training) for m in call.modules()] if isinstance(call, nn.Module) else []
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _floating(inputs: tuple, named: dict) -> list[Tensor]:
    return [t for t in (*inputs, *named.values()) if isinstance(t, Tensor) and t.is_floating_point()]


def _layout(value: object) -> object:
    """Key that distinguishes calls: layouts of tensors, not their values."""
    return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value


def _detached(value: object) -> object:
    return value.detach() if isinstance(value, Tensor) else value


def _leaf(value: object, learns: bool) -> object:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(learns and value.is_floating_point())


def _moved(value: object, dtype: torch.dtype) -> object:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().to(dtype).requires_grad_(value.requires_grad)
