"""Measures a model's kernels and blocks on this machine and stores the fastest choices; see `kernels.measured`.

1. On a GPU, launch parameters of each distinct launch: a candidate's result must match that of the parameters in use
   to within two roundings; see `tuning`.
2. Each distinct block in each way, including host time; results are compared with a wider dtype.
3. The whole model before and after tuning, in eager PyTorch and with torch.compile.

Variants alternate; see `timing`.
"""

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..convert import optimize
from ..convert.example import unchanged
from ..deploy.warm_up import given, run, warmup
from ..kernels import choose, launch, measured, onednn, settings
from ..kernels.backend import backend, using_backend
from ..kernels.compiling import Collector
from ..kernels.measured import Measured
from .kept import add, held_in
from .model_parts import Part, calls_of, calls_of_variants, parts_of
from .model_times import time_attention, time_model
from .timeout import Deadline
from .timing import Timing, add_times, repeated, samples_of
from .tuning import fastest, rows_of, tune_launches

SHARES = 0.45, 0.75  # fractions of the time at which steps 1 and 2 end
WAYS = {"GPU": ("mixed", "fused"), "CPU": ("onednn",)}  # besides plain
# calls of a block per sample, so that the host can run ahead of a GPU as in a model; about how many seconds to sample
SAMPLES = {"GPU": (4, 0.5), "CPU": (1, 4.0)}


@dataclass
class Tuned:
    """Result of tuning."""

    name: str  # class of the model
    train: bool  # True if training steps were measured
    facts: dict[str, object]  # GPU or CPU, and software
    # for each distinct launch its "row", "op", "count", "best" and the candidates that were "tried"
    launches: list[dict] = field(default_factory=list)
    # for each distinct block or stem its "name", "count", "shapes", "rule", "way", and columns by way
    parts: list[dict] = field(default_factory=list)
    # for each distinct attention its "sizes", and columns by kernel: ours and PyTorch's, for information
    attention: list[dict] = field(default_factory=list)
    # rows by variant: "eager", "before", "after", "after, CUDA graph", "torch.compile"
    model: dict[str, dict] = field(default_factory=dict)
    path: Path | None = None  # file that was written

    def rows(self) -> dict[str, dict]:
        """File entries for launch parameters, by row name with exact sizes and with their size class."""
        return rows_of(self.launches)

    def ways(self) -> dict[str, dict]:
        """File entries for the ways of blocks, by shape."""
        return {shape: entry for part in reversed(self.parts) for shape, entry in part["entries"].items()}

    def is_kept(self) -> bool:
        """True if this machine's file contains all entries."""
        stored = held_in(measured.path_of(self.facts)) or dict(rows={}, ways={})
        pairs = ((self.rows(), stored["rows"]), (self.ways(), stored["ways"]))
        return all(
            stored_entries.get(name) == entry
            for measured_entries, stored_entries in pairs
            for name, entry in measured_entries.items()
        )

    def keep(self) -> None:
        """Adds all entries to the file of this processor and software."""
        run_of = dict(model=self.name, train=self.train, result=self.model)
        self.path = add(self.facts, self.rows(), self.ways(), run_of)


def tune(
    model: nn.Module,
    example: Tensor | tuple | dict,
    train: bool = False,
    seconds: float = 60.0,
    on_progress: Callable[[str, float], None] = lambda stage, done: None,
) -> Tuned:
    """Measures how this model runs fastest on this machine's GPU or CPU, and stores the result for later processes.

    Only this function and `fastvit-triton tune` time anything. The result applies to every model with the same sizes,
    on this processor with this software, and affects only speed. On a CPU it is whether the linear layers of a block
    run by oneDNN; a frozen model is measured frozen, and blocks without such a measurement take that of inference. In a
    process group, call it on all ranks with the module that DDP or FSDP wraps: rank 0 measures, the others wait and use
    its result. The group's timeout must be longer than the measurement.

    Args:
        model: one of ours, or one that `optimize` supports, converted or not, but not compiled; it is not changed.
        example: its input, a tuple of its inputs, or a dict of them by name, on the model's device.
        train: measure training steps instead of inference.
        seconds: about how long to measure; compiling the last candidate may take longer.
        on_progress: called with the current stage and the fraction done.

    Raises:
        TypeError: model is not an nn.Module or compiled, or the example is of another type.
        ValueError: the seconds are not positive, or the model runs neither our kernels nor products by oneDNN.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}; give an nn.Module")
    if hasattr(model, "_orig_mod"):
        raise TypeError("model is compiled; give the model that torch.compile was given")
    if not seconds > 0:
        raise ValueError(f"seconds is {seconds}; give a positive number")
    with using_backend("auto" if backend() == "onednn" else backend()):  # "onednn" leaves no choice
        return _on_rank_0(partial(_tune, model, example, train, Deadline(seconds), on_progress))


def _on_rank_0(measure: Callable[[], Tuned]) -> Tuned:
    """What `measure` returns; in a process group rank 0 measures, and each machine keeps its result."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return measure()
    shared: list[Tuned | None] = [None]
    try:
        if torch.distributed.get_rank() == 0:
            shared[0] = measure()
    finally:
        torch.distributed.broadcast_object_list(shared)  # None after an error
    tuned = shared[0]
    if tuned is None:
        raise RuntimeError("tuning failed on rank 0; see its error")
    if torch.distributed.get_node_local_rank(fallback_rank=0) == 0 and not tuned.is_kept():  # on another machine
        tuned.keep()
    choose.forget()
    return tuned


def _tune(
    model: nn.Module, example: Tensor | tuple | dict, train: bool, deadline: Deadline, on_progress: Callable
) -> Tuned:
    inputs, named = given(example)
    tensors = [t for t in tree_leaves((list(model.parameters()), example)) if isinstance(t, Tensor)]
    if not tensors:
        raise ValueError("neither the model nor the example has a tensor, so there is nothing to tune")
    device = tensors[0].device
    pretended = launch.target is not None
    measured.folder().mkdir(parents=True, exist_ok=True)  # fail early if it cannot be created
    before = measured.of(device, pretended)
    total = deadline.left
    tuned = Tuned(type(model).__name__, train, measured.facts_of(device, pretended))
    on_progress("compiling", 0.0)
    with unchanged(model), measured.using(before):
        ours, ways = _with_ways(model, inputs, named, train, tensors[0])
        warmup(ours, example, train)
        run(ours, inputs, named, train)
        parts = parts_of(ours, inputs, named, train, before, ways)
        calls = []
        if ways == WAYS["GPU"]:
            with settings.forcing("fused"):
                calls = calls_of(partial(run, ours, inputs, named, train))
            calls += calls_of_variants(parts, before, train, calls)
    first, second = (deadline.sooner(max(deadline.left - total * (1 - share), 0)) for share in SHARES)
    with unchanged(model):
        after = before
        if calls:
            tuned.launches, after = tune_launches(
                calls, parts, before, train, device, first, lambda stage, done: on_progress(stage, SHARES[0] * done)
            )
        for i, part in enumerate(parts):
            on_progress(f"ways of {part.name}", SHARES[0] + (SHARES[1] - SHARES[0]) * i / len(parts))
            row = time_part(part, before, after, device, train, second.sooner(second.left / (len(parts) - i)))
            tuned.parts.append(row)
            after = after.with_ways({shape: entry["way"] for shape, entry in row["entries"].items()})
        on_progress("the whole model", SHARES[1])
        tuned.attention = time_attention(calls, after, device, deadline.sooner(0.2 * deadline.left))
        try:
            tuned.model = time_model((ours, model), inputs, named, train, (before, after), device, deadline)
        finally:
            tuned.keep()
    return tuned


def _with_ways(
    model: nn.Module, inputs: tuple, named: dict, train: bool, tensor: Tensor
) -> tuple[nn.Module, tuple[str, ...]]:
    """(the model if our kernels or oneDNN run in it, else a copy converted by `optimize`; its ways in `WAYS`)."""
    for convert in (False, True):
        ours = model
        if convert:
            optimize(ours := copy.deepcopy(model))
        with settings.forcing("fused"), Collector() as collector:
            run(ours, inputs, named, train)
        if collector.launches:
            return ours, WAYS["GPU"]
        choices: list[choose.Choice] = []
        with settings.forcing("onednn"), settings.observing(choices.append):
            run(ours, inputs, named, train)
        if any(choice.way == "onednn" for choice in choices):
            return ours, WAYS["CPU"]
    why = f"the model runs none of our kernels on {tensor.device}"
    if tensor.device.type == "cpu":
        torch_only = "FASTVIT_TRITON_BACKEND is torch" if backend() == "torch" else None
        reason = torch_only or onednn.why_not(tensor.device, launch.product_dtype(tensor))
        why += ", and no product by oneDNN" + ("" if reason is None else f" ({reason})")
    raise ValueError(f"{why}, so there is nothing to tune")


def time_part(
    part: Part,
    before: Measured,
    after: Measured,
    device: torch.device,
    train: bool,
    deadline: Deadline,
    rounds: tuple[int, int] = (3, 30),
) -> dict:
    """Times a block or stem; returns its row. The best variant is the fastest correct one; ties keep the one in use."""
    kind = "CPU" if part.ways == WAYS["CPU"] else "GPU"
    repeats, seconds = SAMPLES[kind]
    tables = {name: after.with_ways(ways) for name, ways in part.variants().items()}
    row: dict[str, Any] = dict(name=part.name, count=part.count, shapes=part.shapes, rule=part.rule(before, train))
    verdicts, errors = part.compare(tables, train)
    row["variants"] = variants = {name: verdict.columns() for name, verdict in verdicts.items()}
    using = {name: partial(measured.using, tables[name]) for name, verdict in verdicts.items() if verdict.match}
    steps = {name: repeated(part.step(train), table, repeats) for name, table in using.items()}
    samples, late = samples_of(steps, device, deadline, seconds, rounds, latency=True)
    add_times(variants, (samples, errors | late), "plain", repeats)
    medians = {name: columns["us"] for name, columns in variants.items() if "us" in columns}
    # the clock and load of a CPU vary more than variants differ, so these are compared by round
    if kind == "CPU" and (reference := samples.get(row["rule"])) is not None:
        pairs = {name: zip(times, reference, strict=True) for name, times in samples.items()}
        ratios = {name: Timing.of([us / before for us, before in pair]) for name, pair in pairs.items()}
        variants = variants | {name: asdict(ratio) for name, ratio in ratios.items()}
    row["way"] = best = fastest(variants, row["rule"])
    row["entries"] = {} if best is None else {s: dict(way=w, us=medians) for s, w in part.variants()[best].items()}
    return row
