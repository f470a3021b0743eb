"""Stages of `fastvit-triton check`: their time budgets, the comparisons, the verdict and the file.

A stage that fails or does not end within its budget leaves the reason, and the next one runs. Speeds are ratios: the
variants alternate in one process, host time included, and ratios are paired by round.
"""

import copy
import importlib.util
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..convert import optimize
from ..convert.frozen import freeze
from ..deploy import export
from ..deploy.export import export_model
from ..kernels import launch, onednn
from ..kernels.backend import using_backend
from ..kernels.choose import Choice
from ..kernels.settings import observing
from .compare import Named, leaves
from .libraries import MEDIUM, ModelCall, build_variant, medium_variant, optimized_variant
from .machine import busy_machine
from .timeout import Deadline, capturing, is_late
from .timing import Timing
from .variants import Case, Variant, compiled, measure, without_times

BUDGETS = {"selftest": 40.0, "tune": 80.0, "compare": 60.0, "max-autotune": 100.0}  # seconds
ON_A_CPU = {"runtimes": 60.0}  # a stage more
FORMAT = 1  # of contributed files, see benchmarks/results/community/schema.json
COMPILE = "torch.compile"
AUTOTUNE = "torch.compile max-autotune"
LATE = "did not finish in"
STOPPED = "was stopped"
WRONG = "gives a wrong result"
LESS = "a smaller --model or --batch, or an idle machine"  # what makes a stage finish
NOT_FINITE = ", but its result is not finite"
FEWEST = 3  # rounds of a ratio with a spread
OPTIMIZED = "optimized by us"
OURS = ("ours eager", OPTIMIZED)  # variants: a model of ours, and one of another package
FROZEN = "ours frozen"
FROZEN_BF16 = "ours frozen in bfloat16"
BESIDE = (FROZEN, FROZEN_BF16, MEDIUM)  # variants on a CPU that are compared with eager PyTorch alone
# name → its package, what loads an ONNX file, and the format and suffix of its own file
RUNTIMES: dict[str, tuple[str, Callable[..., export.Run | None], str, str]] = {
    "ONNX Runtime": ("onnxruntime", export.load_onnx, "onnx", "onnx"),
    "OpenVINO": ("openvino", export.load_openvino, "openvino", "xml"),
}
AUTO = partial(using_backend, "auto")


@dataclass(frozen=True)
class CheckStage:
    """A step of the command."""

    name: str  # in messages and in the file
    seconds: float  # its time budget
    # (budget) → its result, with "said": what it found, in one line, or "skipped": why it did not run, or "error": why
    # it failed. It may raise, and raises `TimedOut` if it does not end in time.
    run: Callable[[float], dict]


def run_stages(
    stages: Iterable[CheckStage],
    say: Callable[[str], object],
    on_end: Callable[[dict[str, dict]], object] = lambda rows: None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, dict]:
    """Runs stages one after another, also after one that failed or was late; the last is one that Ctrl-C ends."""
    rows: dict[str, dict] = {}
    for stage in stages:
        if any(row.get("error") == STOPPED for row in rows.values()):
            break
        say(f"{stage.name}: started, at most {stage.seconds:.0f} s")
        row: dict[str, Any] = dict(budget=stage.seconds)
        begun = clock()
        rows[stage.name] = row
        try:
            with capturing(row, "error"):
                row |= stage.run(stage.seconds)
        except KeyboardInterrupt:
            row["error"] = STOPPED
        row["seconds"] = round(clock() - begun, 1)
        if is_late(row):
            row["error"] = _not_in(stage.seconds)
        elif "error" in row and row["error"] != STOPPED:
            row["error"] = f"failed: {row['error']}"
        say(_ended(stage.name, row))
        on_end(rows)
    return rows


def _ended(name: str, row: dict) -> str:
    """One line on how a stage ended."""
    if "error" in row:
        return f"{name} {row['error']}"
    if "skipped" in row:
        return f"{name}: skipped, because {row['skipped']}"
    return f"{name}: {row['said']} ({row['seconds']:.0f} of {row['budget']:.0f} s)"


def _not_in(seconds: float) -> str:
    return f"{LATE} {seconds:.0f} s"


@dataclass(frozen=True)
class CheckedModel:
    """A model, and how it is called."""

    name: str  # of the model, in rows
    # in its dtype, on its device, in training or evaluation mode; its dropout and stochastic depth are switched off
    model: nn.Module
    inputs: Callable[[int], dict]  # seed → arguments by name; "image" is positional
    batch: int  # number of images
    dtype: torch.dtype  # of weights and images
    device: torch.device  # where it is
    ours: bool  # it is from `create_model` and calls the kernels without conversion


def compare(subject: CheckedModel, mode: str | None, deadline: Deadline, seconds: float, budget: float) -> dict:
    """Compares eager PyTorch, ours and torch.compile with float64, and times those that match side by side."""
    case = _case(subject, _compilers(subject, mode))
    ours = case.variants[1]
    share = max(1 - seconds / max(deadline.left, 1e-9), 0.0)
    measured = measure(case, case.phases[0], subject.device, deadline, seconds, 2, latency=True, share=share)
    rows = list(measured.rows.values())
    missing = {
        row["arm"]: why
        for row in rows
        if ("us" not in row or row["arm"] == ours.name) and (why := _why_missing(row, budget)) is not None
    }
    ways = _ways(ours.call, subject) if ours.name in measured.samples else []
    samples = {name: times for name, times in measured.samples.items() if name not in BESIDE}
    result = dict(rows=rows, ratios=_ratios(samples, ours.name), missing=missing, ways=ways)
    if subject.device.type == "cpu":
        speeds = _speeds(measured.samples, case.variants[0].name)
        result["beside"] = {name: speed for name, speed in speeds.items() if name in BESIDE}
        result["over"] = {name: _over(measured.samples, name) for name in (FROZEN, FROZEN_BF16) if name in speeds}
    return result | dict(said=_compared(result))


def runtimes_skipped(train: bool, dtype: str) -> str | None:
    """Why `runtimes` has nothing to measure, for the name of a dtype; None if it has."""
    if train:
        return "ONNX Runtime and OpenVINO are for inference"
    if dtype != "float32":
        return "ONNX Runtime and OpenVINO are compared in float32"
    if not any(map(importlib.util.find_spec, (package for package, *_ in RUNTIMES.values()))):
        return "no other runtime is installed; pip install 'fastvit_triton[export]' 'fastvit_triton[openvino]'"
    return None


def runtimes(subject: CheckedModel, deadline: Deadline, seconds: float, budget: float) -> dict:
    """Times ONNX Runtime and OpenVINO beside eager PyTorch and ours, in float32 and with PyTorch's number of threads.

    Each runs the program that `export_model` writes, and is compared with float64 first.
    """
    eager, ours, *_ = (case := _case(subject, _other_runtimes(subject))).variants
    measured = measure(case, "forward", subject.device, deadline, seconds, 2, latency=True)
    samples = measured.samples
    speeds = _speeds(samples, eager.name)
    best = max((name for name in (ours.name, FROZEN) if name in speeds), key=lambda name: speeds[name][0], default=None)
    ratios = {} if best is None else {name: ratio for name, ratio in _speeds(samples, best).items() if name in RUNTIMES}
    rows = list(measured.rows.values())
    missing = {row["arm"]: why for row in rows if row["arm"] in RUNTIMES and (why := _why_missing(row, budget))}
    said = [f"{_who(name)} is {_speed(speed, ' eager PyTorch')}" for name, speed in speeds.items()]
    said += [f"{name} {why}" for name, why in missing.items()]
    result = dict(rows=rows, best=best, speeds=speeds, ratios=ratios, missing=missing)
    if (busy := busy_machine()) is not None:
        result["note"] = busy
    return result | dict(said="; ".join([*said, busy] if busy else said))


def _case(subject: CheckedModel, more: Iterable[Variant]) -> Case:
    """Eager PyTorch, ours and more variants."""
    model, training = subject.model, subject.model.training
    _remove_chance(model)
    model.requires_grad_(training)
    baseline = "eager (timm)" if subject.name.startswith("timm:") else "eager"
    eager = Variant(baseline, None, ModelCall(model, *_plain(subject)))
    ours = Variant(OURS[0], None, ModelCall(model, AUTO)) if subject.ours else optimized_variant(model)
    variants = [eager, ours, *more]
    truth = ModelCall(copy.deepcopy(model).double(), *_plain(subject))
    facts = dict(model=subject.name, batch=subject.batch)
    phase = "training" if training else "forward"
    name = f"{subject.name} batch {subject.batch}"

    def learning(call: ModelCall, arguments: dict) -> Named:
        return dict(call.module.named_parameters())

    return Case(name, subject.dtype, subject.inputs, variants, truth, (phase,), facts, deep=True, learning=learning)


def _plain(subject: CheckedModel) -> tuple[Callable, ...]:
    """The contexts in which the model runs PyTorch's operators."""
    return (partial(using_backend, "torch"),) if subject.ours else ()


def _compilers(subject: CheckedModel, mode: str | None) -> Iterator[Variant]:
    """Yields on a CPU ours frozen and PyTorch in lower precision; last torch.compile, because it takes longest."""
    if subject.device.type == "cpu" and mode is None and launch.target is None:
        wide = subject.dtype == torch.float32
        if not subject.model.training:
            yield _frozen(subject)
        if not subject.model.training and wide and onednn.why_not(subject.device, torch.bfloat16) is None:
            yield replace(_frozen(subject, FROZEN_BF16, "bf16"), reduced=True)
        if wide:
            yield medium_variant(subject.model, subject.dtype, *_plain(subject))
    compiling = ModelCall(subject.model, *_plain(subject), run=compiled(subject.model, mode, fullgraph=False))
    yield Variant(AUTOTUNE if mode else COMPILE, None, compiling)


def _frozen(subject: CheckedModel, name: str = FROZEN, precision: str = "float32") -> Variant:
    """Ours frozen in inference, whose linear layers keep packed weights."""

    def build() -> ModelCall:
        optimize(model := copy.deepcopy(subject.model))
        freeze(model, precision)
        return ModelCall(model, *[AUTO] * subject.ours)

    return build_variant(name, None, build)


def _other_runtimes(subject: CheckedModel) -> Iterator[Variant]:
    """Yields ours frozen, and each runtime with the exported program."""
    yield _frozen(subject)
    ((name, images),) = subject.inputs(0).items()
    errors: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        with capturing(errors, "export"):
            size = {"input_size": tuple(images.shape[1:])}
            export_model(_FirstOutput(subject.model, name), path, "onnx", preparation=size)
        for runtime, (package, load, *_) in RUNTIMES.items():
            why = None if importlib.util.find_spec(package) else f"{package} is not installed"
            built = build_variant(runtime, why or errors.get("export"), partial(_loaded, load, path))
            yield replace(built, factor=export.FACTOR)


class _FirstOutput(nn.Module):
    """A model that takes images and returns the first tensor of its output."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model = model
        self._name = name

    def forward(self, images: Tensor) -> Tensor:
        outputs = self.model(images) if self._name == "image" else self.model(**{self._name: images})
        return next(leaves(outputs))


def _loaded(load: Callable, path: Path) -> Callable[..., Tensor]:
    """The program in a runtime, as a function of the images under any name."""
    run = load(path)
    return lambda **images: run(*images.values())


def _remove_chance(model: nn.Module) -> None:
    """Sets the probabilities of dropout and stochastic depth to 0, because random results cannot be compared."""
    for module in model.modules():
        if "Drop" in type(module).__name__ or "StochasticDepth" in type(module).__name__:
            for name in {"p", "drop_prob"} & vars(module).keys():
                setattr(module, name, 0.0)


def _why_missing(row: dict, budget: float) -> str | None:
    """Why a variant has no time, or too few for a ratio with a spread; None if it has enough."""
    if "us" in row:
        rounds = "1 round" if row["rounds"] == 1 else f"{row['rounds']} rounds"
        return None if row["rounds"] >= FEWEST else f"was timed in {rounds} only, which says nothing"
    if is_late(row):
        return _not_in(budget)
    if why := row.get("error") or row.get("reason"):
        return f"was not measured: {why}" if why.endswith("is not installed") else f"failed: {why}"
    times = "not finite" if row["within"] is None else f"{row['within']:g} times the limit"
    return f"{WRONG}: the error of {row['worst']} is {times}"


def _ratios(samples: Mapping[str, Sequence[float]], ours: str) -> dict[str, list[float]]:
    """Other variant → [median, first quartile, third quartile] of its time over that of `ours`, as `_ratio`."""
    ratios = {name: _ratio(times, samples.get(ours, ())) for name, times in samples.items() if name != ours}
    return {name: ratio for name, ratio in ratios.items() if ratio is not None}


def _speeds(samples: Mapping[str, Sequence[float]], than: str) -> dict[str, list[float]]:
    """Other variant → [median, first quartile, third quartile] of its speed relative to that of `than`."""
    speeds = {name: _ratio(samples.get(than, ()), times) for name, times in samples.items() if name != than}
    return {name: speed for name, speed in speeds.items() if speed is not None}


def _over(samples: Mapping[str, Sequence[float]], name: str) -> dict[str, list[float]]:
    """Rival → speed of a frozen variant relative to it, paired by round: ours, torch.compile, and less frozen ones."""
    rivals = [*OURS, *([FROZEN] if name == FROZEN_BF16 else []), *(other for other in samples if COMPILE in other)]
    ratios = {rival: _ratio(samples[rival], samples[name]) for rival in rivals if rival in samples}
    return {rival: ratio for rival, ratio in ratios.items() if ratio is not None}


def _ratio(slow: Sequence[float], fast: Sequence[float]) -> list[float] | None:
    """[median, first quartile, third quartile] of slow / fast, paired by round; None with too few rounds."""
    if min(len(slow), len(fast)) < FEWEST:
        return None
    pairs = Timing.of([theirs / us for theirs, us in zip(slow, fast, strict=True)])
    return [round(value, 3) for value in (pairs.us, pairs.q1, pairs.q3)]


def _ways(call: ModelCall, subject: CheckedModel) -> list[str]:
    """The ways in which the blocks of a model run, most frequent first; empty where the kernels do not run."""
    choices: list[Choice] = []
    with observing(choices.append), torch.set_grad_enabled(call.module.training):
        call(**subject.inputs(0))
    return [way for way, _ in Counter(choice.way for choice in choices if choice.branches).most_common()]


def _compared(result: dict) -> str:
    """What a comparison found, in one line."""
    speeds = [_speed(ratio, f" {_rival(name)}") for name, ratio in result["ratios"].items()]
    text = [f"ours is {', '.join(speeds)}"] if speeds else []
    rows = {row["arm"]: row for row in result["rows"]}
    for name, ratio in result.get("beside", {}).items():
        text.append(f"{name.removeprefix('ours ')} is {_speed(ratio, ' eager PyTorch')}{_error_said(rows[name])}")
    text += [f"{_who(name)} {why}" for name, why in result["missing"].items()]
    ways = ["by oneDNN" if way == "onednn" else way for way in result["ways"]]
    return "; ".join(text + [f"blocks run {' and '.join(ways)}"] * bool(ways))


def _speed(ratio: Sequence[float], rival: str = "") -> str:
    """A ratio with its quartiles: "1.12 × torch.compile (1.08 to 1.15)"."""
    median, low, high = ratio
    return f"{median:.2f} ×{rival} ({low:.2f} to {high:.2f})"


def _rival(name: str) -> str:
    return "eager PyTorch" if name.startswith("eager") else name


def _who(name: str) -> str:
    """A variant's name in a sentence."""
    return "ours" if name in OURS else _rival(name)


class Advice(NamedTuple):
    """What `check` recommends."""

    advice: str  # the recommendation, in one sentence
    notes: tuple[str, ...] = ()  # other findings: faster alternatives with restrictions, and stages that did not finish

    def __str__(self) -> str:
        return "; ".join((self.advice, *self.notes))


def verdict(stages: Mapping[str, dict]) -> Advice:
    """Says what to use, from the rows of `run_stages`: another runtime if it is the fastest.

    A runtime is advised if the first quartile of its speed exceeds the speed of the faster one of ours, and the third
    quartile of each torch.compile.
    """
    found, (advice, notes) = stages.get("runtimes", {}), _advice(stages)
    ratios: dict[str, list[float]] = found.get("ratios", {})
    if not ratios:
        return Advice(advice, notes)
    name, ratio = max(ratios.items(), key=lambda item: item[1][0])
    rows = (row for stage in ("compare", "max-autotune") for row in stages.get(stage, {}).get("rows", ()))
    compiled = [row["speedup_quartiles"][1] for row in rows if row["arm"].startswith(COMPILE) and "us" in row]
    speed = found["speeds"][name]
    ours = f" {_who(found['best'])}"
    if ratio[1] <= 1 or any(speed[1] <= third for third in compiled):
        notes = *notes, *(f"{other} is {_speed(slower, ours)}" for other, slower in ratios.items())
    else:
        notes = f"in PyTorch, {advice}", *notes
        kind, suffix = RUNTIMES[name][2:]
        by = f'fastvit_triton.export_model(model, "model.{suffix}", "{kind}")'
        advice = f"use {name}: {_speed(speed, ' eager PyTorch')}, {_speed(ratio, ours)}; {by} writes its file"
    return Advice(advice, (*notes, found["note"]) if "note" in found else notes)


def _advice(stages: Mapping[str, dict]) -> Advice:
    """What to use in PyTorch: ours if the first quartile of its speed relative to the fastest rival exceeds 1."""
    compared = [stages[name] for name in ("compare", "max-autotune") if name in stages]
    ratios: dict[str, list[float]] = {}
    missing: dict[str, str] = {}
    for row in compared:
        ratios |= row.get("ratios", {})
        missing |= row.get("missing", {})
    failed = stages.get("selftest", {}).get("failed", [])
    if failed:
        wrong = "1 check of the kernels" if len(failed) == 1 else f"{len(failed)} checks of the kernels"
        return Advice(f"keep torch.compile: {wrong} failed on this machine, the first is {failed[0]}")
    ways: list[str] = next((row["ways"] for row in compared if row.get("ways")), [])
    by_onednn = ", linear layers run by oneDNN" if "onednn" in ways else ""
    notes = [f"the kernels do not run on this machine{by_onednn}"] * ("skipped" in stages.get("selftest", {}))
    notes += [f"{name} {row['error']}" for name, row in stages.items() if "error" in row]
    notes += [text for text in (_not_used(stages.get("tune", {}), ways),) if text]
    ours_missing = [missing.pop(name) for name in OURS if name in missing]
    wrong_once = any(why.startswith(WRONG) for why in ours_missing)  # also if it was right in another stage
    untimed = not any("ratios" in row for row in compared) or any(name.startswith(COMPILE) for name in missing)
    if not ratios and untimed and not wrong_once:
        if stopped := [name for name, row in stages.items() if row.get("error") == STOPPED]:
            return Advice(f"no verdict: {stopped[0]} {STOPPED}")
        why = [f"ours {text}" for text in ours_missing] + [f"{name} {text}" for name, text in missing.items()] + notes
        reasons = f" ({'; '.join(why)})" if why else ""
        return Advice(f"no verdict: too little was timed{reasons}; try {LESS}")
    if not ratios or wrong_once:
        why = [f"it {text}" for text in ours_missing] + notes
        return Advice(f"keep torch.compile: ours could not be measured ({'; '.join(why)})", _to_finish(why))
    rivals = {name: ratio for name, ratio in ratios.items() if name.startswith(COMPILE)} or ratios  # eager PyTorch
    rival, ratio = min(rivals.items(), key=lambda item: item[1][0])
    ours = "ours" if ways == ["plain"] or by_onednn else " and ".join(ways) or "ours"
    if ratio[1] > 1:
        advice = f"use {ours}: {_speed(ratio, f' {_rival(rival)}')}"
        if any(row["arm"] == OPTIMIZED for stage in compared for row in stage.get("rows", ())):
            advice += ", by fastvit_triton.optimize(model)"
    else:
        tie = ", no measurable difference" if ratio[2] >= 1 else ""
        advice = f"keep {_rival(rival)}: ours is {_speed(ratio)}{tie}"
    notes = [*_faster_frozen(compared), *(f"{name} {why}" for name, why in missing.items()), *notes]
    return Advice(advice, (*notes, *_to_finish(notes)))


def _faster_frozen(compared: Sequence[dict]) -> Iterator[str]:
    """Yields the ways to freeze the model that were measurably faster on a CPU than ours and default torch.compile."""
    found = next((stage for stage in compared if stage.get("over")), {})
    rows: dict[str, dict] = {row["arm"]: row for row in found.get("rows", ())}
    first = "fastvit_triton.optimize(model), then " * (OPTIMIZED in rows)
    for name, how in ((FROZEN, "freeze(model)"), (FROZEN_BF16, 'freeze(model, "bf16")')):
        over, error = found.get("over", {}).get(name, {}), _error_said(rows.get(name, {}))
        if over and error != NOT_FINITE and all(ratio[1] > 1 for ratio in over.values()):
            speeds = [_speed(found["beside"][name], " eager PyTorch")]
            speeds += [_speed(ratio, f" {rival}") for rival, ratio in over.items() if rival.startswith(COMPILE)]
            yield f"in inference with final weights, {first}fastvit_triton.{how}: {', '.join(speeds)}{error}"


def _error_said(row: dict) -> str:
    """What a variant that is timed in any case has of error, to follow its speed; empty if its result matches."""
    if row.get("match") is not False:
        return ""
    if row["within"] is None:
        return NOT_FINITE
    return f", with outputs off by {100 * (row.get('off') or 1.0):.2g} % of the largest"


def _to_finish(reasons: Sequence[str]) -> tuple[str, ...]:
    """What makes the stages and variants finish that did not; empty if all did."""
    return (f"to finish, it takes {LESS}",) if any(LATE in reason for reason in reasons) else ()


def _not_used(tuned: dict, ways: Sequence[str]) -> str | None:
    """A note if the way that tuning chose for most blocks is none of those in which they ran when compared."""
    chosen: Counter[str] = Counter()
    for part in tuned.get("parts", []):
        if part["after"] is not None:
            chosen[part["after"]] += part["count"]
    if not chosen or not ways:
        return None
    ((way, _),) = chosen.most_common(1)
    return None if way in ways else f"tuning chose {way} blocks, and the comparison ran {' and '.join(ways)} ones"


def contribution(
    stages: Mapping[str, dict],
    source: dict,
    settings: dict,
    sentence: str,
    tuned: dict | None = None,
    dry: bool = False,
) -> dict:
    """Content of a file to contribute: what `benchmark`, `selftest` and `tune --export` write, and the stages."""

    def rows_of(stage: str) -> list[dict]:
        rows = stages.get(stage, {}).get("rows", [])
        return rows if source["gpu"] else without_times(rows)

    content: dict[str, Any] = dict(format=FORMAT, benchmark=source | dict(rows=rows_of("compare")))
    content["benchmark"] |= dict(dry_run=True) if dry else {}
    tests = stages.get("selftest", {})
    if "passed" in tests:
        content["selftest"] = source | {name: tests[name] for name in ("passed", "failed", "not_reached")}
    if tuned is not None:
        content["tune"] = tuned
    without_rows = {name: {n: v for n, v in row.items() if n != "rows"} for name, row in stages.items()}
    if "max-autotune" in without_rows:
        without_rows["max-autotune"]["rows"] = rows_of("max-autotune")
    content["check"] = settings | dict(verdict=sentence, stages=without_rows)
    return content
