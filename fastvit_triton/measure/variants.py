"""Benchmark cases and their variants; missing variants carry a reason, incorrect ones no timing."""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..convert.backend import backend as rewriting  # the import registers the backend's name
from ..kernels.backend import using_backend
from ..kernels.compiling import Collector, Launch
from ..kernels.compiling import compiling as compiling_ahead
from .compare import Named, Verdict, converted, cotangents, leaves, named_leaves, outcome, verdict
from .timeout import Deadline, capturing
from .timing import Setup, peak_bytes, rate, samples_of, saved_bytes, timing_columns

_compiler = "inductor"


@dataclass(frozen=True)
class Variant:
    """One way to compute a case.

    Attributes:
        name: name in tables; the first variant of a case is the baseline, eager PyTorch.
        reason: why it cannot run here, or None.
        call: function of the case's arguments by name; None if it cannot run.
        reduced: True if it computes with lower precision on request: it is timed also if its result does not match.
    """

    name: str
    reason: str | None
    call: Any = None
    reduced: bool = False


@dataclass(frozen=True)
class Case:
    """A computation that is measured in several variants.

    Attributes:
        name: unique name in a result file.
        dtype: of the arguments, for the budget.
        inputs: seed → arguments by name; tensors whose gradients are measured require gradients.
        variants: ways to compute it, the baseline first.
        truth: computes the expected result from arguments in float64.
        phases: of "forward" (without gradients), "backward" (the backward pass alone) and "training" (both passes).
        facts: columns of every row, such as op, model and batch.
        work: flops and bytes that any implementation of the forward pass needs; None if not counted.
        deep: a whole model; see `verdict`.
        learning: (call, arguments) → the tensors whose gradients are measured, by name.
    """

    name: str
    dtype: torch.dtype
    inputs: Callable[[int], dict]
    variants: list[Variant]
    truth: Any
    phases: tuple[str, ...] = ("forward", "backward")
    facts: dict = field(default_factory=dict)
    work: tuple[float, float | None] | None = None
    deep: bool = False
    learning: Callable[[Any, dict], Named] = lambda call, arguments: named_leaves(arguments)


def with_backend(backend: str, function: Callable) -> Callable:
    """Wraps a function so that it runs with `set_backend(backend)`."""

    def call(*arguments: object, **named: object) -> object:
        with using_backend(backend):
            return function(*arguments, **named)

    return call


def compiled(function: Callable, mode: str | None = None, ours: bool = False, fullgraph: bool = True) -> Callable:
    """Compiles a function with torch.compile for static shapes; `ours` selects our backend.

    Graph breaks raise an error, unless `fullgraph` is False.
    """
    backend: str | Callable = _compiler
    if ours:
        inner = None if _compiler == "inductor" else torch._dynamo.lookup_backend(_compiler)
        backend = "fastvit_triton" if inner is None else functools.partial(rewriting, inner=inner)
    return torch.compile(function, backend=backend, mode=mode, dynamic=False, fullgraph=fullgraph)


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
    """Set-up of a variant for one phase, which does the untimed work and returns the call to time."""
    grads: list[torch.Tensor] = []

    def outputs(copy: int) -> list[torch.Tensor]:
        differentiable = [t for t in leaves(call(**sets[copy])) if t.requires_grad]
        grads[:] = grads or cotangents(differentiable)
        return differentiable

    def gradients(copy: int, of: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(of, list(case.learning(call, sets[copy]).values()), grads, allow_unused=True)

    def forward(copy: int) -> Callable[[], object]:
        def timed() -> object:
            with torch.no_grad():
                return call(**sets[copy])

        return timed

    def backward(copy: int) -> Callable[[], object]:
        results = outputs(copy)
        return lambda: gradients(copy, results)

    def training(copy: int) -> Callable[[], object]:
        return lambda: gradients(copy, outputs(copy))

    return {"forward": forward, "backward": backward, "training": training}[phase]


def compare_variants(
    case: Case, arguments: dict, phase: str, deadline: Deadline, on_progress: Callable[[str], None] = lambda stage: None
) -> tuple[dict[str, Verdict], dict[str, str]]:
    """Compares all variants of a case with float64.

    Args:
        case: the computation.
        arguments: arguments of its variants.
        phase: one of its phases.
        deadline: variants that are not finished by then fail.
        on_progress: called with "float64" and then with each variant's name when its comparison begins.

    Returns:
        Verdicts by variant, and the errors of variants that failed. Errors of the truth or the baseline are raised.
    """

    def outcome_of(call: Callable, inputs: dict) -> Named:
        return outcome(call, inputs, None if phase == "forward" else case.learning(call, inputs))

    on_progress("float64")
    truth = outcome_of(case.truth, converted(arguments, torch.float64))
    on_progress(case.variants[0].name)
    baseline = outcome_of(case.variants[0].call, arguments)
    verdicts = {case.variants[0].name: verdict(baseline, truth, baseline, case.dtype, case.deep)}
    errors: dict[str, str] = {}
    for variant in (a for a in case.variants[1:] if a.reason is None):
        on_progress(variant.name)
        with capturing(errors, variant.name), deadline:
            verdicts[variant.name] = verdict(
                outcome_of(variant.call, arguments), truth, baseline, case.dtype, case.deep
            )
    return verdicts, errors


@dataclass
class Measured:
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
    on_progress: Callable[[str], None] = lambda stage: None,
    share: float = 0.8,
) -> Measured:
    """Compares every variant with float64, then times those that match, and those of reduced precision.

    Args:
        case: the computation.
        phase: one of its phases.
        device, deadline, seconds, copies, latency: as in `samples_of`.
        on_progress: called with "compiling kernels" on a GPU, "float64", the name of each variant as its comparison
            begins, and "timing".
        share: fraction of the remaining time after which comparisons end; variants not compared by then are not timed.
    """
    sets = [case.inputs(seed) for seed in range(copies)]
    rows = {variant.name: _row(case, phase, variant) for variant in case.variants}
    calls = {a.name: a.call for a in case.variants}
    if device.type == "cuda":
        on_progress("compiling kernels")
        compile_kernels(case, sets[0], phase)
    torch.compiler.reset()  # Dynamo limits recompilations of one function, and cases share functions
    verdicts, errors = compare_variants(case, sets[0], phase, deadline.sooner(share * deadline.left), on_progress)
    for name, compared in verdicts.items():
        rows[name] |= compared.columns() | _memory(case, calls[name], sets[0], device, phase)
    reduced = {a.name for a in case.variants if a.reduced}
    timed = [name for name, compared in verdicts.items() if compared.match or name in reduced]
    right = {name: step_of(case, calls[name], sets, phase) for name in timed}
    on_progress("timing")
    samples, failed = samples_of(right, device, deadline, seconds, copies=copies, latency=latency)
    for name, text in (errors | failed).items():
        rows[name]["error"] = text
    for name, times in samples.items():
        rows[name] |= _timing_columns(case, times, samples.get(case.variants[0].name), phase)
    return Measured(rows, samples)


def without_times(rows: list[dict]) -> list[dict]:
    """The rows without absolute times, which mean little on a CPU, whose clocks and load vary; ratios are kept."""
    return [{name: v for name, v in row.items() if name not in ("us", "q1", "q3", "tflops")} for row in rows]


def compile_kernels(case: Case, arguments: dict, phase: str) -> int:
    """Compiles, in threads, the kernels of all variants without torch.compile or CUDA graphs; returns their number."""
    launches: dict[tuple, Launch] = {}
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
    run = step_of(case, call, [arguments], "training" if backward else "forward")(0)
    columns = dict(peak_bytes=peak_bytes(run, device))
    if backward:
        inputs = [*named_leaves(arguments).values(), *case.learning(call, arguments).values()]
        columns["saved_bytes"] = saved_bytes(lambda: call(**arguments), inputs)
    return columns


def _timing_columns(case: Case, times: list[float], baseline: list[float] | None, phase: str) -> dict:
    """Timing columns of a row, with rates if flops and bytes are known."""
    columns = timing_columns(times, baseline)
    if case.work and phase == "forward":
        flops, nbytes = case.work
        columns |= dict(flops=flops, tflops=round(rate(flops, columns["us"]), 2))
        columns |= {} if nbytes is None else dict(bytes=nbytes, tbs=round(rate(nbytes, columns["us"]), 3))
    return columns
