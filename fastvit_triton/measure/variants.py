"""One thing measured in several ways: arms of the same case, absent ones with a reason, wrong ones without a time."""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

import torch

from ..convert.backend import backend as rewriting  # whose import registers the name, installed or not
from ..kernels import dispatch
from ..kernels.backend import using_backend
from .compare import Named, Verdict, converted, cotangents, leaves, named_leaves, outcome, verdict
from .timeout import Deadline, noting
from .timing import Step, Timing, peak_bytes, rate, samples_of, saved_bytes

_compiler = "inductor"


@dataclass(frozen=True)
class Arm:
    """One way to compute a case.

    Attributes:
        name: as the tables show it; the first arm of a case is the baseline, eager PyTorch.
        reason: why it is absent; None where it can run.
        call: takes the case's arguments by name.
    """

    name: str
    reason: str | None
    call: Callable | None = None


@dataclass(frozen=True)
class Case:
    """What arms compete at.

    Attributes:
        name: unique among the rows of a file.
        dtype: of the arguments, for the budget.
        inputs: seed → arguments by name, never zeros; floating tensors that learn require gradients.
        arms: the baseline first.
        truth: what the arms should compute, for arguments in float64.
        phases: "forward" (no gradients kept), "backward" (it alone), "training" (both).
        facts: columns that every row carries: op or model, batch, and so on.
        work: flops and bytes of the forward pass that nobody can avoid, None where they were not counted.
        deep: it is a whole model, for the budget.
        learning: (call, arguments) → the tensors that gradients are asked of, by name.
    """

    name: str
    dtype: torch.dtype
    inputs: Callable[[int], dict]
    arms: list[Arm]
    truth: Callable
    phases: tuple[str, ...] = ("forward", "backward")
    facts: dict = field(default_factory=dict)
    work: tuple[float, float | None] | None = None
    deep: bool = False
    learning: Callable[[Callable, dict], Named] = lambda call, arguments: named_leaves(arguments)


@contextlib.contextmanager
def forcing(kernels: bool = True) -> Iterator[None]:
    """Inside, ops that launch on a GPU take our kernels (or never do), whatever the dispatcher would choose."""
    before, dispatch.forced = dispatch.forced, kernels
    try:
        yield
    finally:
        dispatch.forced = before


def on(backend: str, function: Callable) -> Callable:
    """The function under the package's switch."""

    def call(*arguments: object, **named: object) -> object:
        with using_backend(backend):
            return function(*arguments, **named)

    return call


def compiled(function: Callable, mode: str | None = None, ours: bool = False) -> Callable:
    """torch.compile, one static graph, by `compiling`'s compiler; `ours` rewrites the graph for it first."""
    backend: str | Callable = _compiler
    if ours:
        inner = None if _compiler == "inductor" else torch._dynamo.lookup_backend(_compiler)
        backend = "fastvit_triton" if inner is None else functools.partial(rewriting, inner=inner)
    return torch.compile(function, backend=backend, mode=mode, dynamic=False, fullgraph=True)


@contextlib.contextmanager
def compiling(backend: str) -> Iterator[None]:
    """Inside, arms are compiled by this backend: dry runs take "aot_eager", the same graphs without a C++ compiler."""
    global _compiler
    before, _compiler = _compiler, backend
    try:
        yield
    finally:
        _compiler = before


@functools.cache  # which also keeps what was declared
def declare() -> torch.library.Library:
    """Gives torchvision's wheel with CUDA operators, beside a CPU-only torch, the two schemas that its import needs."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def absent(module: str, package: str | None = None) -> str | None:
    """Why an arm that needs this module cannot run, also where it is installed and does not import; None if it can."""
    for wheel in ("torchvision", module):  # timm and transformers import it too, and would be left half imported
        try:
            importlib.import_module(wheel)
        except ImportError as error:
            if wheel == module:
                return f"{package or module} cannot be imported ({error})"[:160]
        except RuntimeError as error:
            if "torchvision::" not in str(error):
                raise
            declare()
            importlib.import_module(wheel)
    return None


def step_of(case: Case, call: Callable, sets: list[dict], phase: str) -> Step:
    """What one repetition does before the timed call, and the timed call itself."""
    given: list[torch.Tensor] = []

    def outputs(copy: int) -> list[torch.Tensor]:
        found = [t for t in leaves(call(**sets[copy])) if t.requires_grad]
        given[:] = given or cotangents(found)
        return found

    def gradients(copy: int, of: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(of, list(case.learning(call, sets[copy]).values()), given, allow_unused=True)

    def forward(copy: int) -> Callable[[], object]:
        def timed() -> object:
            with torch.no_grad():
                return call(**sets[copy])

        return timed

    def backward(copy: int) -> Callable[[], object]:
        found = outputs(copy)
        return lambda: gradients(copy, found)

    def training(copy: int) -> Callable[[], object]:
        return lambda: gradients(copy, outputs(copy))

    return {"forward": forward, "backward": backward, "training": training}[phase]


def judge(
    case: Case, arguments: dict, phase: str, deadline: Deadline, tell: Callable[[str], None] = lambda arm: None
) -> tuple[dict[str, Verdict], dict[str, str]]:
    """A verdict by arm, and for arms that failed or were not ready by then the error; `tell` hears whose turn it is.

    Raises what the truth or the baseline raises.
    """

    def found(call: Callable, given: dict) -> Named:
        return outcome(call, given, None if phase == "forward" else case.learning(call, given))

    tell("float64")
    truth = found(case.truth, converted(arguments, torch.float64))
    tell(case.arms[0].name)
    baseline = found(case.arms[0].call, arguments)
    verdicts, errors = {case.arms[0].name: verdict(baseline, truth, baseline, case.dtype, case.deep)}, {}
    for arm in (a for a in case.arms[1:] if a.reason is None):
        tell(arm.name)
        with noting(errors, arm.name), deadline:
            verdicts[arm.name] = verdict(found(arm.call, arguments), truth, baseline, case.dtype, case.deep)
    return verdicts, errors


@dataclass
class Measured:
    """One phase of a case: a row by arm, and the samples behind those with a time, microseconds."""

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
    tell: Callable[[str], None] = lambda stage: None,
) -> Measured:
    """Judges every arm, then times those that are right; see `samples_of` for the arguments.

    `tell` hears "float64", the arms as each is judged for the first time, and "timing".
    """
    sets = [case.inputs(seed) for seed in range(copies)]
    rows, calls = {arm.name: _row(case, phase, arm) for arm in case.arms}, {a.name: a.call for a in case.arms}
    torch.compiler.reset()  # compiled arms of all cases share Dynamo's few entries for one piece of code
    # time is left for those that are ready, where compiling the others takes too long
    verdicts, errors = judge(case, sets[0], phase, deadline.sooner(0.8 * deadline.left), tell)
    for name, found in verdicts.items():
        rows[name] |= found.columns() | _memory(case, calls[name], sets[0], device, phase)
    right = {name: step_of(case, calls[name], sets, phase) for name, found in verdicts.items() if found.match}
    tell("timing")
    samples, failed = samples_of(right, device, deadline, seconds, copies=copies, latency=latency)
    for name, text in (errors | failed).items():
        rows[name]["error"] = text
    for name, taken in samples.items():
        rows[name] |= _timing_columns(case, taken, samples.get(case.arms[0].name), phase)
    return Measured(rows, samples)


def _row(case: Case, phase: str, arm: Arm) -> dict:
    facts = dict(case=case.name, phase=phase, dtype=str(case.dtype).removeprefix("torch."), arm=arm.name)
    return facts | case.facts | ({} if arm.reason is None else dict(reason=arm.reason))


def _memory(case: Case, call: Callable, arguments: dict, device: torch.device, phase: str) -> dict:
    """Peak memory of the phase, for a backward pass with its forward pass, and what the forward pass keeps for it."""
    backward = phase != "forward"
    whole = step_of(case, call, [arguments], "training" if backward else "forward")(0)
    columns = dict(peak_bytes=peak_bytes(whole, device))
    if backward:
        held = [*named_leaves(arguments).values(), *case.learning(call, arguments).values()]
        columns["saved_bytes"] = saved_bytes(lambda: call(**arguments), held)
    return columns


def _timing_columns(case: Case, taken: list[float], baseline: list[float] | None, phase: str) -> dict:
    """Microseconds, how many times faster than the baseline, turn by turn, and rates where the work was counted."""
    timing = Timing.of(taken)
    columns = asdict(timing)
    if baseline is not None:
        pairs = Timing.of([theirs / ours for theirs, ours in zip(baseline, taken, strict=True)])
        columns |= dict(speedup=round(pairs.us, 3), speedup_quartiles=[round(pairs.q1, 3), round(pairs.q3, 3)])
    if case.work and phase == "forward":
        flops, nbytes = case.work
        columns |= dict(flops=flops, tflops=round(rate(flops, timing.us), 2))
        columns |= {} if nbytes is None else dict(bytes=nbytes, tbs=round(rate(nbytes, timing.us), 3))
    return columns
