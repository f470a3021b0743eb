"""Measures a model's kernels and blocks on this machine's GPU and stores the fastest choices; see `kernels.measured`.

1. Launch parameters of each distinct launch: a candidate's result must match that of the parameters in use to within
   two roundings.
2. Each distinct block in each way, including host time; results are compared with a wider dtype.
3. The whole model before and after tuning, in eager PyTorch and with torch.compile.

Variants alternate; see `timing`.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..convert import optimize
from ..deploy.warm_up import given, run, unchanged, warmup
from ..kernels import launch, measured, plan
from ..kernels.compiling import Collector, compiling
from ..kernels.measured import Measured
from .kept import add, held_in
from .model_parts import Part, calls_of, parts_of
from .model_times import time_attention, time_model
from .timeout import Deadline
from .timing import Timing, samples_of, timing_columns
from .tuning import Candidates, fastest, row_candidates

SHARES = 0.45, 0.75  # fractions of the time at which steps 1 and 2 end
REPEATS = 4  # calls of a block per sample, so that the host can run ahead of the GPU as in a model


@dataclass
class Tuned:
    """Result of tuning.

    Attributes:
        name: class of the model.
        train: True if training steps were measured.
        facts: GPU and software.
        launches: for each distinct launch its "row", "op", "count", "best" and the candidates that were "tried".
        parts: for each distinct block or stem its "name", "count", "shapes", "rule", "way", and columns by way.
        attention: for each distinct attention its "sizes", and columns by kernel: ours and PyTorch's, for information.
        model: rows by variant: "eager", "before", "after", "after, CUDA graph", "torch.compile".
        path: file that was written.
    """

    name: str
    train: bool
    facts: dict[str, object]
    launches: list[dict] = field(default_factory=list)
    parts: list[dict] = field(default_factory=list)
    attention: list[dict] = field(default_factory=list)
    model: dict[str, dict] = field(default_factory=dict)
    path: Path | None = None

    def rows(self) -> dict[str, dict]:
        """File entries for launch parameters, by row name with exact sizes and with their size class."""
        entries: dict[str, dict] = {}
        for one in reversed(self.launches):  # of entries with the same name, the most frequent call is written last
            if one["best"] is not None:
                entry = dict(config=one["best"], us=one["us"], us_before=one["us_before"])
                entries |= dict.fromkeys(_class_first(one["row"]), entry)
        return entries

    def ways(self) -> dict[str, dict]:
        """File entries for the ways of blocks, by shape."""
        return {shape: entry for one in reversed(self.parts) for shape, entry in one["entries"].items()}

    def is_kept(self) -> bool:
        """True if this machine's file contains all entries."""
        content = held_in(measured.path_of(self.facts)) or dict(rows={}, ways={})
        pairs = ((self.rows(), content["rows"]), (self.ways(), content["ways"]))
        return all(there.get(name) == entry for here, there in pairs for name, entry in here.items())

    def keep(self) -> None:
        """Adds all entries to the file of this GPU and software."""
        run_of = dict(model=self.name, train=self.train, result=self.model)
        self.path = add(self.facts, self.rows(), self.ways(), run_of)


def tune(
    model: nn.Module,
    example: Tensor | tuple | dict,
    train: bool = False,
    seconds: float = 60.0,
    on_progress: Callable[[str, float], None] = lambda stage, done: None,
) -> Tuned:
    """Measures how this model runs fastest on this machine's GPU, and stores the result for later processes.

    Only this function and `fastvit-triton tune` time anything. The result applies to every model with the same sizes,
    on this GPU with this software, and affects only speed. In a process group, call it on all ranks with the module
    that DDP or FSDP wraps: rank 0 measures, the others wait and use its result. The group's timeout must be longer than
    the measurement.

    Args:
        model: one of ours, or one that `optimize` supports, converted or not, but not compiled; it is not changed.
        example: its input, a tuple of its inputs, or a dict of them by name, on the model's device.
        train: measure training steps instead of inference.
        seconds: about how long to measure; compiling the last candidate may take longer.
        on_progress: called with the current stage and the fraction done.

    Raises:
        TypeError: model is not an nn.Module or compiled, or the example is of another type.
        ValueError: the seconds are not positive, or the model runs none of our kernels, such as on a CPU.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}; give an nn.Module")
    if hasattr(model, "_orig_mod"):
        raise TypeError("model is compiled; give the model that torch.compile was given")
    if not seconds > 0:
        raise ValueError(f"seconds is {seconds}; give a positive number")
    group = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not group:
        return _tune(model, example, train, Deadline(seconds), on_progress)
    shared: list[Tuned | None] = [None]
    try:
        if torch.distributed.get_rank() == 0:
            shared[0] = _tune(model, example, train, Deadline(seconds), on_progress)
    finally:
        torch.distributed.broadcast_object_list(shared)  # None after an error
    tuned = shared[0]
    if tuned is None:
        raise RuntimeError("tuning failed on rank 0; see its error")
    if torch.distributed.get_node_local_rank(fallback_rank=0) == 0 and not tuned.is_kept():  # on another machine
        tuned.keep()
    plan.forget()
    return tuned


def _tune(
    model: nn.Module, example: Tensor | tuple | dict, train: bool, deadline: Deadline, on_progress: Callable
) -> Tuned:
    inputs, named = given(example)
    device = next((t.device for t in tree_leaves((list(model.parameters()), example)) if isinstance(t, Tensor)), None)
    if device is None:
        raise ValueError("neither the model nor the example has a tensor, so there is nothing to tune")
    measured.folder().mkdir(parents=True, exist_ok=True)  # fail early if it cannot be created
    before = measured.of(device, launch.target is not None)
    total = deadline.left
    tuned = Tuned(type(model).__name__, train, measured.facts_of(device))
    on_progress("compiling", 0.0)
    with unchanged(model), measured.using(before):
        ours = _with_our_kernels(model, inputs, named, train, device)
        warmup(ours, example, train)
        run(ours, inputs, named, train)
        parts = parts_of(ours, inputs, named, train, before)
        with plan.forcing("fused"):
            calls = calls_of(partial(run, ours, inputs, named, train))
    first, second = (deadline.sooner(max(deadline.left - total * (1 - share), 0)) for share in SHARES)
    with unchanged(model):
        arch = launch.architecture(device)
        tuned.launches = _time_launches([one for c in calls for one in row_candidates(c, arch)], first, on_progress)
        after = _checked(tuned, parts, before, train)
        for i, part in enumerate(parts):
            on_progress(f"ways of {part.name}", SHARES[0] + (SHARES[1] - SHARES[0]) * i / len(parts))
            row = _time_part(part, before, after, device, train, second.sooner(second.left / (len(parts) - i)))
            tuned.parts.append(row)
            after = Measured(after.rows, after.ways | {shape: entry["way"] for shape, entry in row["entries"].items()})
        on_progress("the whole model", SHARES[1])
        tuned.attention = time_attention(calls, after, device, deadline.sooner(0.2 * deadline.left))
        try:
            tuned.model = time_model((ours, model), inputs, named, train, (before, after), device, deadline)
        finally:
            tuned.keep()
    return tuned


def _with_our_kernels(model: nn.Module, inputs: tuple, named: dict, train: bool, device: torch.device) -> nn.Module:
    """The model if it runs our kernels, else a copy converted by `optimize`.

    Raises:
        ValueError: the copy runs none either.
    """
    for convert in (False, True):
        ours = model
        if convert:
            optimize(ours := copy.deepcopy(model))
        with plan.forcing("fused"), Collector() as collector:
            run(ours, inputs, named, train)
        if collector.launches:
            return ours
    raise ValueError(f"the model runs none of our kernels on {device}, so there is nothing to tune")


def _time_launches(choices: list[Candidates], deadline: Deadline, on_progress: Callable) -> list[dict]:
    """Times the candidates of all distinct launches while others compile; returns rows."""
    every = [(one, text, launch) for one in choices for text, launches in one.launches().items() for launch in launches]
    rows = []
    with compiling([launch for *_, launch in every]) as futures:
        for (one, text, _), future in zip(every, futures, strict=True):
            one.compiled.setdefault(text, []).append(future)
        for i, one in enumerate(choices):
            on_progress(f"launches of {one.call.op}", SHARES[0] * i / len(choices))
            rows.append(one.time(deadline.sooner(deadline.left / (len(choices) - i))))
    return rows


def _checked(tuned: Tuned, parts: list[Part], before: Measured, train: bool) -> Measured:
    """`before` with the new launch parameters, or unchanged if these make the results of a part wrong."""
    after = Measured(before.rows | {name: entry["config"] for name, entry in tuned.rows().items()}, before.ways)
    for part in parts:
        ways = {name: ways for name, ways in part.variants().items() if not name.startswith("mixed")}
        old, new = (
            part.compare({name: Measured(table.rows, table.ways | more) for name, more in ways.items()}, train)[0]
            for table in (before, after)
        )
        if any(said.match and not (name in new and new[name].match) for name, said in old.items()):
            for row in tuned.launches:
                row |= dict(best=None, rejected=f"{part.name} is incorrect with the new launch parameters")
            return before
    return after


def _time_part(
    part: Part, before: Measured, after: Measured, device: torch.device, train: bool, deadline: Deadline
) -> dict:
    """Times a block or stem; returns its row. The best variant is the fastest correct one; ties keep the one in use."""
    tables = {name: Measured(after.rows, after.ways | ways) for name, ways in part.variants().items()}
    row: dict[str, Any] = dict(name=part.name, count=part.count, shapes=part.shapes, rule=part.rule(before, train))
    verdicts, errors = part.compare(tables, train)
    steps = {name: partial(_step, part, tables[name], train) for name, said in verdicts.items() if said.match}
    samples, late = samples_of(steps, device, deadline, seconds=0.5, rounds=(3, 30), latency=True)
    row["variants"] = {name: said.columns() for name, said in verdicts.items()}
    for name, taken in samples.items():
        row["variants"][name] |= timing_columns(taken, samples.get("plain"), REPEATS)
    for name, text in (errors | late).items():
        row["variants"].setdefault(name, {})["error"] = text
    timings = {name: Timing.of([us / REPEATS for us in taken]) for name, taken in samples.items()}
    row["way"] = best = fastest(timings, row["rule"], steps)
    us = {name: timing.us for name, timing in timings.items()}
    row["entries"] = {} if best is None else {s: dict(way=w, us=us) for s, w in part.variants()[best].items()}
    return row


def _step(part: Part, table: Measured, train: bool, index: int) -> Callable[[], object]:
    def timed() -> None:
        with measured.using(table):
            for _ in range(REPEATS):
                part.step(train)

    return timed


def _class_first(name: str) -> tuple[str, ...]:
    """(row name with its size class, row name with exact sizes); exact ones are written last."""
    row, _, sizes = name.partition(" ")
    exact, near, _ = measured.names(row, tuple(map(int, sizes.split(","))))
    return near, exact
