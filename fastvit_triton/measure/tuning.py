"""Times candidate launch parameters on this GPU; the best are the fastest with correct results."""

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..kernels import measured
from ..kernels.compiling import Collector, CompiledLaunch, compiling
from ..kernels.launch import architecture, overriding
from ..kernels.measured import Measured
from .candidates import CANDIDATES, Config, candidates
from .compare import Named, leaves, verdict
from .model_parts import Part, RecordedCall
from .timeout import Deadline, TimedOut, capturing
from .timing import Setup, add_times, samples_of


@dataclass
class Candidates:
    """The launch parameters to try for one row of a call."""

    row: str  # name of the row; of a call in a model with exact sizes
    configs: dict[str, Config]  # launch parameters by their text, those in use first
    facts: dict[str, Any]  # columns of the result, with the "op"
    outputs: Callable[[], Named]  # runs the call; its outputs, and gradients if it has any, by name
    step: Setup  # set-up of the timed call
    # exact outputs, and those of PyTorch; None: those of the launch parameters in use are both
    truth: Callable[[], tuple[Named, Named]] | None = None
    compiled: dict[str, list[Future]] = field(default_factory=dict)  # futures of their compilation, by text
    errors: dict[str, str] = field(default_factory=dict)  # why some cannot be tried, by text

    def launches(self) -> dict[str, list[CompiledLaunch]]:
        """Launches to compile for each candidate, by text."""
        by_text = {}
        for text, config in self.configs.items():
            with capturing(self.errors, text), overriding({self.row: config}), Collector() as collected:
                self.outputs()
                by_text[text] = collected.launches
        return by_text

    def time(
        self, device: torch.device, deadline: Deadline, seconds: float = 0.1, rounds: tuple[int, int] = (3, 30)
    ) -> dict:
        """Times candidates that compile without register spills and whose results are correct."""
        current = next(iter(self.configs))
        errors = dict(self.errors)
        tried: dict[str, dict] = {text: dict(config=config) for text, config in self.configs.items()}
        steps: dict[str, Setup] = {}
        expected = None if self.truth is None else self.truth()
        for text, config in self.configs.items():
            if text in errors:
                continue
            limit = nullcontext() if text == current else deadline
            with capturing(errors, text), limit, overriding({self.row: config}):
                for future in self.compiled.get(text, ()):
                    refuse_spills(_result(future, None if text == current else deadline.left))
                outputs = self.outputs()
                expected = expected or ({n: t.double() for n, t in outputs.items()}, outputs)
                said = verdict(outputs, *expected, next(iter(outputs.values())).dtype)
                tried[text] |= said.columns()
                if said.match:
                    steps[text] = partial(_step, self.step, {self.row: config})
            if text == current and text in errors and self.truth is None:
                break  # without those in use there is no reference
        samples, late = samples_of(steps, device, deadline, seconds, rounds)
        add_times(tried, (samples, errors | late))
        best = fastest(tried, current)
        row = dict(row=self.row, **self.facts, best=best and self.configs[best], tried=list(tried.values()))
        if best is not None:
            row |= dict(us=tried[best]["us"], us_before=tried[current].get("us"))
        return row


def race(
    choices: Sequence[Candidates],
    device: torch.device,
    deadline: Deadline,
    on_progress: Callable[[str, float], None] = lambda stage, done: None,
    **sampling: Any,
) -> list[dict]:
    """Times the candidates of each row, while others compile, as `timing.samples_of` does; returns a row for each."""
    every = [(one, text, launch) for one in choices for text, group in one.launches().items() for launch in group]
    rows = []
    with compiling([launch for *_, launch in every]) as futures:
        for (one, text, _), future in zip(every, futures, strict=True):
            one.compiled.setdefault(text, []).append(future)
        for i, one in enumerate(choices):
            on_progress(f"launches of {one.facts['op']}", i / len(choices))
            rows.append(one.time(device, deadline.sooner(deadline.left / (len(choices) - i)), **sampling))
    return rows


def tune_launches(
    calls: list[RecordedCall],
    parts: list[Part],
    before: Measured,
    train: bool,
    device: torch.device,
    deadline: Deadline,
    on_progress: Callable[[str, float], None],
) -> tuple[list[dict], Measured]:
    """Times launch parameters; returns a row for each distinct launch, and `before` with the best parameters.

    If these make the results of a part wrong, none is kept: the rows say so, and the measurements are `before`.
    """
    arch = architecture(device)
    launches = race([one for call in calls for one in row_candidates(call, arch)], device, deadline, on_progress)
    after = Measured(before.rows | {name: entry["config"] for name, entry in rows_of(launches).items()}, before.ways)
    for part in parts:
        old, new = (
            part.compare({name: table.with_ways(ways) for name, ways in part.variants().items()}, train)[0]
            for table in (before, after)
        )
        if any(said.match and not (name in new and new[name].match) for name, said in old.items()):
            why = f"{part.name} is incorrect with the new launch parameters"
            return [row | dict(best=None, rejected=why) for row in launches], before
    return launches, after


def rows_of(launches: list[dict]) -> dict[str, dict]:
    """File entries for launch parameters, by row name with exact sizes and with their size class."""
    entries: dict[str, dict] = {}
    for one in reversed(launches):  # of entries with the same name, the most frequent call is written last
        if one["best"] is not None:
            entry = dict(config=one["best"], us=one["us"], us_before=one["us_before"])
            row, _, sizes = one["row"].partition(" ")
            exact, near, _ = measured.names(row, tuple(map(int, sizes.split(","))))
            entries |= {near: entry, exact: entry}  # exact ones are written last
    return entries


def row_candidates(call: RecordedCall, arch: str) -> list[Candidates]:
    """Launch parameters to try on an architecture for each row that a call of an op reads."""

    def outputs() -> Named:
        return {f"output {i}": t for i, t in enumerate(leaves(call())) if t.is_floating_point()}

    choices = []
    for row, used in call.rows.items():
        current, *others = to_try(row, used, arch)
        others = [c for c in others if c.get("BLOCK_F") != 0]  # 0: another op
        if call.op == "linear_fwd" and call.arguments[-1]:  # the shape of row statistics is fixed
            others = [c for c in others if c["BLOCK_F"] == current["BLOCK_F"]]
        if others:
            configs, facts = by_text(current, *others), dict(op=call.op, count=call.count)
            choices.append(Candidates(row, configs, facts, outputs, lambda copy: call))
    return choices


def by_text(*configs: Config) -> dict[str, Config]:
    """Launch parameters by their text."""
    return {json.dumps(config): config for config in configs}


def to_try(row: str, used: Config, arch: str) -> list[Config]:
    """The launch parameters in use for a row, and the candidates."""
    current = {name: value for name, value in used.items() if name != "enable_fp_fusion"}
    return [current, *(c for c in candidates_for(row, arch) if c != current)]


def candidates_for(row: str, arch: str) -> list[Config]:
    """The candidates for a row name that includes sizes and, for attention, the width."""
    name = row.partition(" ")[0]
    rows = [key for key in CANDIDATES if name == key or name.startswith(f"{key}.")]
    return candidates(max(rows, key=len), arch) if rows else []  # "window.fwd.large" has its own


def fastest(rows: Mapping[str, Mapping[str, Any]], current: str) -> str | None:
    """The fastest variant, or the one in use unless the third quartile of the fastest lies below its first quartile.

    None if no row has a time, or time ran out before the one in use, although it matches, was timed.
    """
    timed = [name for name, row in rows.items() if "us" in row]
    best = min(timed, key=lambda name: rows[name]["us"], default=None)
    if best is None or current not in timed:
        return None if rows.get(current, {}).get("match") else best
    return current if rows[best]["q3"] >= rows[current]["q1"] else best


def refuse_spills(compiled: Any) -> None:
    """Raises RuntimeError if a kernel that Triton compiled spills registers; loads it onto the GPU."""
    if compiled is not None:
        compiled._init_handles()
        if compiled.n_spills:
            raise RuntimeError(f"spills {compiled.n_spills} registers")


def _result(future: Future, seconds: float | None) -> Any:
    try:
        return future.result(seconds)
    except FutureTimeout:
        raise TimedOut("it was not compiled in time") from None


def _step(step: Setup, rows: dict[str, Config], copy: int) -> Callable[[], object]:
    """A timed call with these launch parameters."""
    with overriding(rows):
        call = step(copy)

    def timed() -> object:
        with overriding(rows):
            return call()

    return timed
