"""Stages of `fastvit-triton check`: their time budgets, the comparison with torch.compile, the verdict and the file.

A stage that fails or does not end within its budget leaves the reason, and the next one runs. Speeds are ratios: the
variants alternate in one process, host time included, and ratios are paired by round.
"""

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..convert import optimize
from ..kernels import launch
from ..kernels.backend import using_backend
from ..kernels.choose import Choice
from ..kernels.settings import observing
from .compare import Named
from .libraries import MEDIUM, ModelCall, build_variant, medium_variant, optimized_variant
from .timeout import Deadline, capturing
from .timing import Timing
from .variants import Case, Variant, compiled, measure, without_times

BUDGETS = {"selftest": 40.0, "tune": 80.0, "compare": 60.0, "max-autotune": 100.0}  # seconds
FORMAT = 1  # of contributed files, see benchmarks/results/community/schema.json
COMPILE = "torch.compile"
AUTOTUNE = "torch.compile max-autotune"
LATE = "did not finish in"
STOPPED = "was stopped"
WRONG = "gives a wrong result"
LESS = "a smaller --model or --batch, or an idle machine"  # what makes a stage finish
FEWEST = 3  # rounds of a ratio with a spread
OURS = ("ours eager", "optimized by us")  # variants: a model of ours, and one of another package
FROZEN = "ours frozen"


@dataclass(frozen=True)
class Stage:
    """A step of the command.

    Attributes:
        name: in messages and in the file.
        seconds: its time budget.
        run: (budget) → its result, with "said": what it found, in one line, or "skipped": why it did not run, or
            "error": why it failed. It may raise, and raises `TimedOut` if it does not end in time.
    """

    name: str
    seconds: float
    run: Callable[[float], dict]


def run_stages(
    stages: Iterable[Stage],
    say: Callable[[str], object],
    on_end: Callable[[dict[str, dict]], object] = lambda rows: None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, dict]:
    """Runs stages one after another, also after one that failed or ran out of time; the last is one that Ctrl-C ends.

    Args:
        stages: what to run.
        say: called with one line when a stage starts, and one when it ends.
        on_end: called with the rows so far when a stage ends.
        clock: seconds.

    Returns:
        Name → row: what the stage returned, or "error"; its "budget" and the "seconds" that it took.
    """
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
        if _is_late(row):
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


def _is_late(row: dict) -> bool:
    return row.get("error", "").startswith("TimedOut")


def _not_in(seconds: float) -> str:
    return f"{LATE} {seconds:.0f} s"


@dataclass(frozen=True)
class Subject:
    """A model, and how it is called.

    Attributes:
        name: of the model, in rows.
        model: in its dtype, on its device, in training or evaluation mode; its dropout and stochastic depth are
            switched off.
        inputs: seed → arguments by name; "image" is positional.
        batch: number of images.
        dtype: of weights and images.
        device: where it is.
        ours: it is from `create_model` and calls the kernels without conversion.
    """

    name: str
    model: nn.Module
    inputs: Callable[[int], dict]
    batch: int
    dtype: torch.dtype
    device: torch.device
    ours: bool


def compare(subject: Subject, mode: str | None, deadline: Deadline, seconds: float, budget: float) -> dict:
    """Compares eager PyTorch, ours and torch.compile with float64, and times those that match side by side.

    Args:
        subject: the model.
        mode: of torch.compile.
        deadline: of comparisons and timing.
        seconds: at the end, in which torch.compile must be ready and the variants are timed.
        budget: of the stage, for messages.

    Returns:
        "rows" by variant; "ratios": other variant → median and quartiles of ours' speed relative to it; "missing":
        variant → why it has none; "ways": how the blocks of ours run, most frequent first; and "said". On a CPU also
        "beside": `FROZEN` and `MEDIUM` → median and quartiles of their speed relative to eager PyTorch.
    """
    case = _case(subject, mode)
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
    samples = {name: times for name, times in measured.samples.items() if name not in (FROZEN, MEDIUM)}
    result = dict(rows=rows, ratios=_ratios(samples, ours.name), missing=missing, ways=ways)
    beside = {name: measured.samples[name] for name in (FROZEN, MEDIUM) if name in measured.samples}
    if beside:
        eager = measured.samples.get(case.variants[0].name, ())
        result["beside"] = {
            name: ratio for name, times in beside.items() if (ratio := _ratio(eager, times)) is not None
        }
    return result | dict(said=_compared(result))


def _case(subject: Subject, mode: str | None) -> Case:
    """The variants, torch.compile last, because it takes longest."""
    model, training = subject.model, subject.model.training
    _remove_chance(model)
    model.requires_grad_(training)
    plain = partial(using_backend, "torch")
    auto = partial(using_backend, "auto")
    contexts = (plain,) if subject.ours else ()
    eager = Variant(_eager(subject.name), None, ModelCall(model, *contexts))
    ours = Variant(OURS[0], None, ModelCall(model, auto)) if subject.ours else optimized_variant(model)
    compiling = ModelCall(model, *contexts, run=compiled(model, mode, fullgraph=False))
    variants = [eager, ours, Variant(AUTOTUNE if mode else COMPILE, None, compiling)]
    if subject.device.type == "cpu" and mode is None and launch.target is None:
        variants[2:2] = _on_a_cpu(subject, contexts, auto)
    truth = ModelCall(copy.deepcopy(model).double(), *contexts)
    facts = dict(model=subject.name, batch=subject.batch)
    phase = "training" if training else "forward"
    name = f"{subject.name} batch {subject.batch}"
    return Case(name, subject.dtype, subject.inputs, variants, truth, (phase,), facts, deep=True, learning=_learning)


def _on_a_cpu(subject: Subject, contexts: tuple, auto: Callable) -> Iterator[Variant]:
    """Yields ours frozen in inference, whose linear layers keep packed weights, and PyTorch in lower precision."""

    def frozen() -> ModelCall:
        optimize(model := copy.deepcopy(subject.model), freeze=True)
        return ModelCall(model, *[auto] * subject.ours)

    if not subject.model.training:
        yield build_variant(FROZEN, None, frozen)
    if subject.dtype == torch.float32:
        yield medium_variant(subject.model, subject.dtype, *contexts)


def _eager(name: str) -> str:
    """Name of the baseline of a model."""
    return "eager (timm)" if name.startswith("timm:") else "eager"


def _learning(call: ModelCall, arguments: dict) -> Named:
    return dict(call.module.named_parameters())


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
    if _is_late(row):
        return _not_in(budget)
    if why := row.get("error") or row.get("reason"):
        return f"failed: {why}"
    times = "not finite" if row["within"] is None else f"{row['within']:g} times the limit"
    return f"{WRONG}: the error of {row['worst']} is {times}"


def _ratios(samples: Mapping[str, Sequence[float]], ours: str) -> dict[str, list[float]]:
    """Other variant → [median, first quartile, third quartile] of its time over that of `ours`, paired by round.

    Empty with fewer than `FEWEST` rounds.
    """
    ratios = {name: _ratio(times, samples.get(ours, ())) for name, times in samples.items() if name != ours}
    return {name: ratio for name, ratio in ratios.items() if ratio is not None}


def _ratio(slow: Sequence[float], fast: Sequence[float]) -> list[float] | None:
    """[median, first quartile, third quartile] of slow / fast, paired by round; None with too few rounds."""
    if min(len(slow), len(fast)) < FEWEST:
        return None
    pairs = Timing.of([theirs / us for theirs, us in zip(slow, fast, strict=True)])
    return [round(value, 3) for value in (pairs.us, pairs.q1, pairs.q3)]


def _ways(call: ModelCall, subject: Subject) -> list[str]:
    """The ways in which the blocks of a model run, most frequent first; empty where the kernels do not run."""
    choices: list[Choice] = []
    with observing(choices.append), torch.set_grad_enabled(call.module.training):
        call(**subject.inputs(0))
    return [way for way, _ in Counter(choice.way for choice in choices if choice.branches).most_common()]


def _compared(result: dict) -> str:
    """What a comparison found, in one line."""
    speeds = [_speed(ratio, f" {_rival(name)}") for name, ratio in result["ratios"].items()]
    text = [f"ours is {', '.join(speeds)}"] if speeds else []
    within = {row["arm"]: row.get("within") for row in result["rows"] if row.get("match") is False}
    for name, ratio in result.get("beside", {}).items():
        error = f", with {within[name]:g} times the error allowed" if within.get(name) is not None else ""
        text.append(f"{'frozen' if name == FROZEN else name} is {_speed(ratio, ' eager PyTorch')}{error}")
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


def verdict(stages: Mapping[str, dict]) -> str:
    """One sentence that says what to use, from the rows of `run_stages`.

    Ours is advised if the first quartile of its speed relative to the fastest compiled variant exceeds 1, else the
    rival stays. If torch.compile has no time, eager PyTorch is the rival.
    """
    compared = [stages[name] for name in ("compare", "max-autotune") if name in stages]
    ratios: dict[str, list[float]] = {}
    missing: dict[str, str] = {}
    for row in compared:
        ratios |= row.get("ratios", {})
        missing |= row.get("missing", {})
    failed = stages.get("selftest", {}).get("failed", [])
    if failed:
        wrong = "1 check of the kernels" if len(failed) == 1 else f"{len(failed)} checks of the kernels"
        return f"keep torch.compile: {wrong} failed on this machine, the first is {failed[0]}"
    ways: list[str] = next((row["ways"] for row in compared if row.get("ways")), [])
    by_onednn = ", linear layers run by oneDNN" if "onednn" in ways else ""
    notes = [f"the kernels do not run on this machine{by_onednn}"] * ("skipped" in stages.get("selftest", {}))
    notes += [f"{name} {row['error']}" for name, row in stages.items() if "error" in row]
    notes += [text for text in (_not_used(stages.get("tune", {}), ways),) if text]
    ours_missing = [missing.pop(name) for name in OURS if name in missing]
    wrong_once = any(why.startswith(WRONG) for why in ours_missing)  # also if it was right in another stage
    untimed = not any("ratios" in row for row in compared) or any(name.startswith(COMPILE) for name in missing)
    if not ratios and untimed and not wrong_once:
        why = [f"ours {text}" for text in ours_missing] + [f"{name} {text}" for name, text in missing.items()] + notes
        reasons = f" ({'; '.join(why)})" if why else ""
        return f"no verdict: too little was timed{reasons}; try {LESS}"
    if not ratios or wrong_once:
        why = [f"it {text}" for text in ours_missing] + notes
        return f"keep torch.compile: ours could not be measured ({'; '.join(why)}){_to_finish(why)}"
    rivals = {name: ratio for name, ratio in ratios.items() if name.startswith(COMPILE)} or ratios
    rival, ratio = min(rivals.items(), key=lambda item: item[1][0])
    ours = "ours" if ways == ["plain"] or by_onednn else " and ".join(ways) or "ours"
    if ratio[1] > 1:
        advice = f"use {ours}: {_speed(ratio, f' {_rival(rival)}')}"
    else:
        tie = ", no measurable difference" if ratio[2] >= 1 else ""
        advice = f"keep {_rival(rival)}: ours is {_speed(ratio)}{tie}"
    notes = [*(f"{name} {why}" for name, why in missing.items()), *notes]
    return "; ".join([advice, *notes]) + _to_finish(notes)


def _to_finish(reasons: Sequence[str]) -> str:
    """What makes the stages and variants finish that did not; empty if all did."""
    return f"; to finish, it takes {LESS}" if any(LATE in reason for reason in reasons) else ""


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
    """Content of a file to contribute: what `benchmark`, `selftest` and `tune --export` write, and the stages.

    Args:
        stages: rows of `run_stages`; those missing so far are left out.
        source: machine, software and command, see `machine.provenance`. Without a GPU, absolute times are left out.
        settings: model, batch and other options.
        sentence: the verdict.
        tuned: what `tune --export` would write.
        dry: it was a dry run, whose file `python -m benchmarks.community check` rejects.
    """

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
