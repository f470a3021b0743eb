"""Benchmark cases and their variants; missing variants carry a reason, incorrect ones no timing."""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..convert.backend import backend as rewriting  # the import registers the backend's name
from ..kernels import settings
from ..kernels.backend import using_backend
from ..kernels.compiling import Collector, CompiledLaunch
from ..kernels.compiling import compiling as compiling_ahead
from .compare import FACTOR, Named, Verdict, converted, cotangents, leaves, named_leaves, outcome, verdict
from .timeout import Deadline, capturing
from .timing import WARM_UP, Setup, add_times, peak_bytes, rate, samples_of, saved_bytes

_compiler = "inductor"


@dataclass(frozen=True)
class Variant:
    """One way to compute a case."""

    name: str  # name in tables; the first variant of a case is the baseline, eager PyTorch
    reason: str | None  # why it cannot run here, or None
    call: Any = None  # function of the case's arguments by name; None if it cannot run
    # True if it computes with lower precision on request: it is timed also if its result does not match
    reduced: bool = False
    eager: Any = None  # call that launches the same kernels of ours without compiling; None: `call`
    factor: float = FACTOR  # of its error budget, see `compare.verdict`


@dataclass(frozen=True)
class Case:
    """A computation that is measured in several variants."""

    name: str  # unique name in a result file
    dtype: torch.dtype  # of the arguments, for the budget
    inputs: Callable[[int], dict]  # seed → arguments by name; tensors whose gradients are measured require gradients
    variants: list[Variant]  # ways to compute it, the baseline first
    truth: Any  # computes the expected result from arguments in float64
    # of "forward" (without gradients), "backward" (the backward pass alone), "training" (both passes) and "step" (both,
    # and AdamW)
    phases: tuple[str, ...] = ("forward", "backward")
    facts: dict = field(default_factory=dict)  # columns of every row, such as op, model and batch
    # flops and bytes that any implementation of the forward pass needs; None if not counted
    work: tuple[float, float | None] | None = None
    deep: bool = False  # a whole model; see `verdict`
    # (call, arguments) → the tensors whose gradients are measured, by name
    learning: Callable[[Any, dict], Named] = lambda call, arguments: named_leaves(arguments)


def with_backend(backend: str, function: Callable) -> Callable:
    """Wraps a function so that it runs with `set_backend(backend)`."""

    def call(*arguments: object, **named: object) -> object:
        with using_backend(backend):
            return function(*arguments, **named)

    return call


def compiled(
    function: Callable, mode: str | None = None, ours: bool = False, fullgraph: bool = True, direct: bool | None = None,
    dynamic: bool | None = False,
) -> Callable:  # fmt: skip
    """Compiles a function with torch.compile, for static shapes by default; `ours` selects our backend.

    With it, `direct` is whether compiled code launches kernels itself; None leaves the setting. Graph breaks raise an
    error, unless `fullgraph` is False.
    """
    backend: str | Callable = _compiler
    if ours:
        inner = None if _compiler == "inductor" else torch._dynamo.lookup_backend(_compiler)
        backend = "fastvit_triton" if inner is None else functools.partial(rewriting, inner=inner)
        # Dynamo shares code between equal backends, and partial objects are not equal
        backend = backend if direct is None else functools.partial(_with_direct, direct, inner=inner)
    return torch.compile(function, backend=backend, mode=mode, dynamic=dynamic, fullgraph=fullgraph)


def _with_direct(direct: bool, graph: torch.fx.GraphModule, inputs: list, **options: Any) -> Callable:
    """Our backend with a value of `settings.direct`."""
    before, settings.direct = settings.direct, direct
    try:
        return rewriting(graph, inputs, **options)
    finally:
        settings.direct = before


@contextlib.contextmanager
def compiling(backend: str) -> Iterator[None]:
    """Context in which `compiled` uses this backend; "aot_eager" needs no C++ compiler."""
    global _compiler
    before, _compiler = _compiler, backend
    try:
        yield
    finally:
        _compiler = before


@functools.cache  # keeps the library alive
def declare_torchvision_ops() -> torch.library.Library:
    """Declares two operators that torchvision built for CUDA needs to be importable with a CPU-only torch."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def absent(module: str, package: str | None = None) -> str | None:
    """Why a module cannot be imported (not installed, or broken); None if it can."""
    for wheel in (
        "torchvision",
        module,
    ):  # timm and transformers import torchvision; its failure would leave them partially imported
        try:
            importlib.import_module(wheel)
        except ImportError as error:
            if wheel == module:
                return f"{package or module} cannot be imported ({error})"[:160]
        except RuntimeError as error:
            if "torchvision::" not in str(error):
                raise
            declare_torchvision_ops()
            importlib.import_module(wheel)
    return None


def step_of(case: Case, call: Callable, sets: list[dict], phase: str) -> Setup:
    """Set-up of a variant for one phase, which does the untimed work and returns the call to time.

    A call that writes to an argument has a method `prepare`, which gets the arguments before each timed call.
    """
    grads: list[torch.Tensor] = []
    optimizers: list[torch.optim.Optimizer] = []

    def outputs(copy: int) -> list[torch.Tensor]:
        differentiable = [t for t in leaves(call(**sets[copy])) if t.requires_grad]
        grads[:] = grads or cotangents(differentiable)
        return differentiable

    def gradients(copy: int, of: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(of, list(case.learning(call, sets[copy]).values()), grads, allow_unused=True)

    def forward(copy: int) -> Callable[[], object]:
        if hasattr(call, "prepare"):
            call.prepare(**sets[copy])

        def timed() -> object:
            with torch.no_grad():
                return call(**sets[copy])

        return timed

    def backward(copy: int) -> Callable[[], object]:
        results = outputs(copy)
        return lambda: gradients(copy, results)

    def training(copy: int) -> Callable[[], object]:
        return lambda: gradients(copy, outputs(copy))

    def step(copy: int) -> Callable[[], object]:
        learning = [t for t in case.learning(call, sets[copy]).values() if isinstance(t, torch.nn.Parameter)]
        if not optimizers:  # a rate of 0 leaves the weights as they are for the variants that share them
            optimizers.append(torch.optim.AdamW(learning, lr=0.0, fused=learning[0].is_cuda))

        def timed() -> None:
            torch.autograd.backward(outputs(copy), grads, inputs=learning)
            optimizers[0].step()
            optimizers[0].zero_grad()

        return timed

    return {"forward": forward, "backward": backward, "training": training, "step": step}[phase]


def compare_variants(
    case: Case, arguments: dict, phase: str, deadline: Deadline
) -> Iterator[tuple[str, Verdict | str]]:
    """Yields each variant's name, and its comparison with float64, or the error of one that failed.

    Errors of the truth or the baseline are raised.
    """

    def outcome_of(call: Callable, inputs: dict) -> Named:
        return outcome(call, inputs, None if phase == "forward" else case.learning(call, inputs))

    truth = outcome_of(case.truth, converted(arguments, torch.float64))
    baseline = outcome_of(case.variants[0].call, arguments)
    yield case.variants[0].name, verdict(baseline, truth, baseline, case.dtype, case.deep)
    for variant in (a for a in case.variants[1:] if a.reason is None):
        errors: dict[str, str] = {}
        compared: Verdict | None = None
        with capturing(errors, variant.name), deadline:
            found = outcome_of(variant.call, arguments)
            compared = verdict(found, truth, baseline, case.dtype, case.deep, factor=variant.factor)
        yield variant.name, errors.get(variant.name, "") if compared is None else compared


@dataclass
class VariantTimes:
    """Result of one phase of a case: rows by variant, and samples in microseconds of timed variants."""

    rows: dict[str, dict]
    samples: dict[str, list[float]]


def measure(
    case: Case,
    phase: str,
    device: torch.device,
    deadline: Deadline,
    seconds: float,
    copies: int = 3,
    latency: bool = False,
    share: float = 0.8,
    rounds: tuple[int, int] = (5, 100),
    warm_up: int = WARM_UP,
) -> VariantTimes:
    """Compares every variant with float64, then times those that match, and those of reduced precision."""
    sets = _prepare(case, phase, device, copies)
    rows = {variant.name: _row(case, phase, variant) for variant in case.variants}
    right = {}
    for variant, row, is_timed in _compared(case, phase, device, deadline.sooner(share * deadline.left), sets):
        rows[variant.name] = row
        if is_timed:
            right[variant.name] = step_of(case, variant.call, sets, phase)
    found = samples_of(right, device, deadline, seconds, rounds, copies, latency, warm_up)
    samples = add_times(rows, found, case.variants[0].name)
    for row in rows.values():
        row |= _rates(case, phase, row)
    return VariantTimes(rows, samples)


def rows_of(
    case: Case,
    phase: str,
    device: torch.device,
    deadline: Deadline,
    seconds: float,
    copies: int = 3,
    latency: bool = False,
    sampler: Callable = samples_of,
) -> Iterator[dict]:
    """Yields the row of each variant as soon as it was compared with float64 and timed beside the baseline.

    Each variant alternates with the baseline, so a row is complete without those that come later; `measure` alternates
    all of them. Variants that cannot run here come first, after the baseline.
    """
    sets = _prepare(case, phase, device, copies)
    base, *others = case.variants
    for variant, row, is_timed in _compared(case, phase, device, deadline, sets):
        name = variant.name
        if is_timed:
            steps = {each.name: step_of(case, each.call, sets, phase) for each in (base, variant)}
            found = sampler(steps, device, deadline, seconds, copies=copies, latency=latency)
            add_times({base.name: {}, name: row}, found, base.name)
        yield row | _rates(case, phase, row)
        if variant is base:
            yield from (_row(case, phase, other) for other in others if other.reason is not None)


def _prepare(case: Case, phase: str, device: torch.device, copies: int) -> list[dict]:
    """Sets of arguments, after the kernels are compiled."""
    sets = [case.inputs(seed) for seed in range(copies)]
    if device.type == "cuda":
        compile_kernels(case, sets[0], phase)
    torch.compiler.reset()  # Dynamo limits recompilations of one function, and cases share functions
    return sets


def _compared(
    case: Case, phase: str, device: torch.device, deadline: Deadline, sets: list[dict]
) -> Iterator[tuple[Variant, dict, bool]]:
    """Yields each variant that can run, its row with the comparison or the error, and True if it is to be timed."""
    variants = {variant.name: variant for variant in case.variants}
    for name, compared in compare_variants(case, sets[0], phase, deadline):
        variant = variants[name]
        row = _row(case, phase, variant)
        if isinstance(compared, str):
            yield variant, row | dict(error=compared), False
        else:
            row |= compared.columns() | _memory(case, variant.call, sets[0], device, phase)
            yield variant, row, compared.match or variant.reduced


def without_times(rows: list[dict]) -> list[dict]:
    """The rows without absolute times, which mean little on a CPU, whose clocks and load vary; ratios are kept."""
    return [{name: v for name, v in row.items() if name not in ("us", "q1", "q3", "tflops")} for row in rows]


def compile_kernels(case: Case, arguments: dict, phase: str) -> int:
    """Compiles, in threads, the kernels of all variants without torch.compile or CUDA graphs; returns their number."""
    launches: dict[tuple, CompiledLaunch] = {}
    for variant in case.variants:
        if variant.reason is None and "compile" not in variant.name and "graph" not in variant.name:
            with Collector() as collector:
                step_of(case, variant.call, [arguments], phase)(0)()
            launches |= {launch.key: launch for launch in collector.launches}
    with compiling_ahead(list(launches.values())) as futures:
        for future in futures:
            future.exception()  # a failure is raised again at the launch
    return len(launches)


def _row(case: Case, phase: str, variant: Variant) -> dict:
    facts = dict(case=case.name, phase=phase, dtype=str(case.dtype).removeprefix("torch."), arm=variant.name)
    return facts | case.facts | ({} if variant.reason is None else dict(reason=variant.reason))


def _memory(case: Case, call: Callable, arguments: dict, device: torch.device, phase: str) -> dict:
    """Peak memory of the phase (for "backward" including the forward pass), and memory saved for the backward pass."""
    backward = phase != "forward"
    run = step_of(case, call, [arguments], "training" if phase == "backward" else phase)(0)
    columns = dict(peak_bytes=peak_bytes(run, device))
    if backward:
        inputs = [*named_leaves(arguments).values(), *case.learning(call, arguments).values()]
        columns["saved_bytes"] = saved_bytes(lambda: call(**arguments), inputs)
    return columns


def _rates(case: Case, phase: str, row: dict) -> dict:
    """Columns of rates for a row with a time, if flops and bytes are known."""
    if case.work is None or phase != "forward" or "us" not in row:
        return {}
    flops, nbytes = case.work
    columns = dict(flops=flops, tflops=round(rate(flops, row["us"]), 2))
    return columns if nbytes is None else columns | dict(bytes=nbytes, tbs=round(rate(nbytes, row["us"]), 3))
