"""Times candidate launch parameters on this GPU; the best are the fastest whose result matches the reference."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch

from ..kernels import OPS
from ..kernels.launch import overriding
from ..kernels.op import Op
from .candidates import CANDIDATES, Config, Target
from .compare import converted, leaves, named_leaves, outcome, verdict
from .timeout import Deadline, capturing
from .timing import alternate


def candidates_of(target: Target, call: Callable[[], object]) -> tuple[str, list[Config]]:
    """The full name of the target's row, and the launch parameters to try, those in use first.

    Args:
        target: what is tuned.
        call: runs it, so that its kernels look up their rows.

    Raises:
        LookupError: the call does not use the target's row.
    """
    with overriding({}) as looked_up:
        call()
    name = next((n for n in looked_up if n == target.row or n.startswith(f"{target.row}.")), None)
    if name is None:
        raise LookupError(f"{target.op} at {target.shape} reads {sorted(looked_up)}, not {target.row}")
    current = {k: v for k, v in looked_up[name].items() if k != "enable_fp_fusion"}
    return name, [current, *(c for c in CANDIDATES[target.row] if c != current)]


def arguments_of(target: Target, dtype: torch.dtype, device: torch.device) -> tuple[Op, dict]:
    """The op and random arguments of the target's shape."""
    op = next(op for op in OPS if op.name == target.op)
    return op, op.inputs(target.shape, dtype, device)


def time_candidates(
    target: Target,
    dtype: torch.dtype,
    device: torch.device,
    deadline: Deadline,
    context: Callable[[], AbstractContextManager],
    most: int | None = None,
) -> dict:
    """Times all candidates, or the first `most`, whose result matches the reference.

    Args:
        target: what is tuned.
        dtype: of the arguments.
        device: where it runs.
        deadline: no round starts after it, except the first.
        context: makes the context in which our kernels run on the device.
        most: number of candidates.

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
        name, configs = candidates_of(target, lambda: outcome(op.run, arguments, learning))
        tried, steps = {}, {}
        for config in configs[:most]:
            key, failed = json.dumps(config), {}
            tried[key] = dict(config=config)
            with capturing(failed, "error"), deadline, overriding({name: config}):
                found = verdict(outcome(op.run, arguments, learning), truth, baseline, dtype)
                tried[key] |= found.columns()
                if found.match:
                    steps[key] = partial(_step, name, config, op.run, arguments, target.backward)
            tried[key] |= failed
        timings, errors = alternate(steps, device, deadline, seconds=1.0, rounds=(1, 1) if most else (3, 30))
    for key, timing in timings.items():
        tried[key] |= dict(us=timing.us, q1=timing.q1, q3=timing.q3)
    for key, text in errors.items():
        tried[key]["error"] = text
    best = min(timings, key=lambda key: timings[key].us, default=None)
    current = json.dumps(configs[0])
    if current in timings and best is not None and timings[best].q3 >= timings[current].q1:
        best = current
    return dict(row=name, op=target.op, shape=target.shape, best=best and json.loads(best), tried=list(tried.values()))


def _step(name: str, config: Config, run: Callable, arguments: dict, backward: bool, copy: int) -> Callable[[], object]:
    def forward() -> list[torch.Tensor]:
        with overriding({name: config}), torch.set_grad_enabled(backward):
            return [t for t in leaves(run(**arguments)) if t.is_floating_point()]

    if not backward:
        return forward
    outputs = [t for t in forward() if t.requires_grad]
    learn, given = list(named_leaves(arguments).values()), [torch.ones_like(t) for t in outputs]

    def timed() -> object:
        with overriding({name: config}):
            return torch.autograd.grad(outputs, learn, given)

    return timed
