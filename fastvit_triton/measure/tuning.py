"""Times candidate launch parameters on this GPU; the best are the fastest with correct results."""

import json
from collections.abc import Callable, Container
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from ..kernels import OPS
from ..kernels.compiling import Collector, Launch, compiling
from ..kernels.launch import architecture, overriding
from ..kernels.op import Op
from .candidates import CANDIDATES, Config, Target, candidates
from .compare import converted, leaves, named_leaves, outcome, verdict
from .model_parts import Call
from .timeout import Deadline, TimedOut, capturing
from .timing import Setup, Timing, alternate


def candidates_of(target: Target, arch: str, call: Callable[[], object]) -> tuple[str, list[Config]]:
    """(full name of the target's row, launch parameters to try, those in use first).

    Args:
        target: what is tuned.
        arch: architecture, such as "sm_90".
        call: runs the target there; its kernels then look up their rows.

    Raises:
        LookupError: the call does not use the target's row.
    """
    with overriding({}) as looked_up:
        call()
    used = {name.partition(" ")[0]: config for name, config in looked_up.items()}
    name = next((n for n in used if n == target.row or n.startswith(f"{target.row}.")), None)
    if name is None:
        raise LookupError(f"{target.op} at {target.shape} reads {sorted(used)}, not {target.row}")
    current = {k: v for k, v in used[name].items() if k != "enable_fp_fusion"}
    return name, [current, *(c for c in candidates(target.row, arch) if c != current)]


def arguments_of(target: Target, dtype: torch.dtype, device: torch.device) -> tuple[Op, dict]:
    """The op and random arguments of the target's shape."""
    op = next(op for op in OPS if op.name == target.op)
    return op, op.inputs(target.shape, dtype, device)


def launches_of(
    target: Target, dtype: torch.dtype, device: torch.device, context: Callable[[], AbstractContextManager]
) -> list[Launch]:
    """The launches of all candidates of a target, which `compiling` can then compile in threads.

    For the arguments see `time_candidates`. Candidates whose call raises an error have none.
    """
    op, arguments = arguments_of(target, dtype, device)
    learning = named_leaves(arguments) if target.backward else None
    launches: list[Launch] = []
    failed: dict[str, str] = {}

    def collect() -> None:
        with Collector() as collected:
            outcome(op.run, arguments, learning)
        launches.extend(collected.launches)

    with context():
        name, configs = candidates_of(target, architecture(device), collect)
        for config in configs[1:]:
            with capturing(failed, name), overriding({name: config}):
                collect()
    return launches


def time_candidates(
    target: Target,
    dtype: torch.dtype,
    device: torch.device,
    deadline: Deadline,
    context: Callable[[], AbstractContextManager],
    most: int | None = None,
) -> dict:
    """Times all candidates, or the first `most`, that spill no registers and whose result matches the reference.

    Args:
        target: what is tuned.
        dtype: of the arguments.
        device: where it runs.
        deadline: no round starts after it, except the first.
        context: creates the context in which our kernels run on the device.
        most: maximum number of candidates, or None.

    Returns:
        "row", "op", "shape"; "best": launch parameters, or None if none ran; "tried": for each candidate its "config",
        and "match", "within", "us", "q1", "q3" (microseconds) or "error". The parameters in use are the best unless
        another's third quartile lies below their first: a smaller difference is noise.

    Raises:
        LookupError: see `candidates_of`.
    """
    op, arguments = arguments_of(target, dtype, device)
    wide = converted(arguments, torch.float64)
    truth = outcome(op.reference, wide, named_leaves(wide) if target.backward else None)
    learning = named_leaves(arguments) if target.backward else None
    baseline = outcome(op.reference, arguments, learning)
    with context():
        name, configs = candidates_of(target, architecture(device), lambda: outcome(op.run, arguments, learning))
        tried: dict[str, dict] = {}
        steps: dict[str, Setup] = {}
        for config in configs[:most]:
            key = json.dumps(config)
            tried[key] = dict(config=config)
            failed: dict[str, str] = {}
            with capturing(failed, "error"), deadline, overriding({name: config}):
                with Collector() as collected:
                    outcome(op.run, arguments, learning)
                with compiling(collected.launches) as futures:
                    for future in futures:
                        refuse_spills(future.result())
                comparison = verdict(outcome(op.run, arguments, learning), truth, baseline, dtype)
                tried[key] |= comparison.columns()
                if comparison.match:
                    steps[key] = partial(_step, name, config, op.run, arguments, target.backward)
            tried[key] |= failed
        timings, errors = alternate(steps, device, deadline, seconds=1.0, rounds=(1, 1) if most else (3, 30))
    for key, timing in timings.items():
        tried[key] |= dict(us=timing.us, q1=timing.q1, q3=timing.q3)
    for key, text in errors.items():
        tried[key]["error"] = text
    best = fastest(timings, json.dumps(configs[0]), steps)
    return dict(row=name, op=target.op, shape=target.shape, best=best and json.loads(best), tried=list(tried.values()))


def fastest(timings: dict[str, Timing], current: str, right: Container[str]) -> str | None:
    """The fastest variant, or the one in use unless the third quartile of the fastest lies below its first quartile.

    None if there are no timings, or time ran out before the one in use, although `right`, was timed.
    """
    best = min(timings, key=lambda name: timings[name].us, default=None)
    if best is None or current not in timings:
        return None if current in right else best
    return current if timings[best].q3 >= timings[current].q1 else best


@dataclass
class Candidates:
    """The launch parameters to try for one row of a call.

    Attributes:
        call: runs the op.
        row: name with exact sizes.
        configs: launch parameters by their text, those in use first.
        compiled: futures of their compilation, by text.
        errors: why some cannot be tried, by text.
    """

    call: Call
    row: str
    configs: dict[str, Config]
    compiled: dict[str, list[Future]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def launches(self) -> dict[str, list[Launch]]:
        """Launches to compile for each candidate, by text."""
        by_text = {}
        for text, config in self.configs.items():
            with capturing(self.errors, text), overriding({self.row: config}), Collector() as collected:
                self.call()
                by_text[text] = collected.launches
        return by_text

    def time(self, deadline: Deadline) -> dict:
        """Times candidates that compile without register spills and whose results match those of the parameters in use.

        Args:
            deadline: candidates not compiled by then are skipped; no round starts after it, except the first.

        Returns:
            "row", "op", "count"; "best": launch parameters, or None if none ran; "us" and "us_before" of one call;
            "tried": for each candidate its "config", and "match", "within", "us", "q1", "q3" or "error".
        """
        current = next(iter(self.configs))
        errors = dict(self.errors)
        tried: dict[str, dict] = {text: dict(config=config) for text, config in self.configs.items()}
        steps: dict[str, Setup] = {}
        truth: dict[str, torch.Tensor] = {}
        for text, config in self.configs.items():
            if text in errors:
                continue
            with capturing(errors, text), overriding({self.row: config}):
                for future in self.compiled.get(text, ()):
                    refuse_spills(_result(future, None if text == current else deadline.left))
                outputs = {f"output {i}": t for i, t in enumerate(leaves(self.call())) if t.is_floating_point()}
                truth = truth or {name: t.double() for name, t in outputs.items()}
                dtype = next(iter(outputs.values())).dtype
                said = verdict(outputs, truth, {n: t.to(outputs[n].dtype) for n, t in truth.items()}, dtype)
                tried[text] |= said.columns()
                if said.match:
                    steps[text] = partial(_call_step, self.call, {self.row: config})
            if text == current and text in errors:
                break  # without those in use there is no reference
        timings, late = alternate(steps, next(leaves(self.call.arguments)).device, deadline, 0.1, (3, 30))
        for text, timing in timings.items():
            tried[text] |= asdict(timing)
        for text, why in (errors | late).items():
            tried[text]["error"] = why
        best = fastest(timings, current, steps)
        us = (
            {}
            if best is None
            else dict(us=timings[best].us, us_before=timings[current].us if current in timings else None)
        )
        return dict(row=self.row, op=self.call.op, count=self.call.count, best=best and self.configs[best],
                    tried=list(tried.values())) | us  # fmt: skip


def row_candidates(call: Call, arch: str) -> list[Candidates]:
    """Launch parameters to try on an architecture for each row that a call of an op reads."""
    choices = []
    for row, used in call.rows.items():
        current = {name: value for name, value in used.items() if name != "enable_fp_fusion"}
        others = [c for c in candidates_for(row, arch) if c != current and c.get("BLOCK_F") != 0]  # 0: another op
        if call.op == "linear_fwd" and call.arguments[-1]:  # the shape of row statistics is fixed
            others = [c for c in others if c["BLOCK_F"] == current["BLOCK_F"]]
        if others:
            choices.append(Candidates(call, row, {json.dumps(config): config for config in (current, *others)}))
    return choices


def candidates_for(row: str, arch: str) -> list[Config]:
    """The candidates for a row name that includes sizes and, for attention, the width."""
    name = row.partition(" ")[0]
    table_row = next((key for key in CANDIDATES if name == key or name.startswith(f"{key}.")), None)
    return [] if table_row is None else candidates(table_row, arch)


def _result(future: Future, seconds: float | None) -> Any:
    try:
        return future.result(seconds)
    except FutureTimeout:
        raise TimedOut("it was not compiled in time") from None


def refuse_spills(compiled: Any) -> None:
    """Raises RuntimeError if a kernel that Triton compiled spills registers; loads it onto the GPU."""
    if compiled is not None:
        compiled._init_handles()
        if compiled.n_spills:
            raise RuntimeError(f"spills {compiled.n_spills} registers")


def _call_step(call: Call, rows: dict[str, Config], copy: int) -> Callable[[], object]:
    def timed() -> object:
        with overriding(rows):
            return call()

    return timed


def _step(name: str, config: Config, run: Callable, arguments: dict, backward: bool, copy: int) -> Callable[[], object]:
    def forward() -> list[torch.Tensor]:
        with overriding({name: config}), torch.set_grad_enabled(backward):
            return [t for t in leaves(run(**arguments)) if t.is_floating_point()]

    if not backward:
        return forward
    outputs = [t for t in forward() if t.requires_grad]
    learn = list(named_leaves(arguments).values())
    ones = [torch.ones_like(t) for t in outputs]

    def timed() -> object:
        with overriding({name: config}):
            return torch.autograd.grad(outputs, learn, ones)

    return timed
