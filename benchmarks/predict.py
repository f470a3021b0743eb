"""Predicts launch parameters for an architecture that is not present, by compiling for it."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from fastvit_triton.kernels.launch import overriding
from fastvit_triton.measure.candidates import Config
from fastvit_triton.measure.timeout import capturing

from .launch_recorder import Launch, compiled, record
from .sass import GPUS
from .static import bounds, examined
from .targets import Target, arguments_of, candidates_of


def predict_candidates(target: Target, arch: str) -> dict:
    """Compiles all candidates; the best has the smallest bound of the compile report among those without violations.

    The parameters in use stay the best unless another bound is 5 % lower. The result has the form of
    `tune.time_target`, with "predicted_us" and "faults" instead of measured times.
    """
    name, tried = compile_candidates(target, arch)
    right = [t for t in tried if not t.get("faults", ["error"])]
    best = min(right, key=lambda t: t["predicted_us"], default=None)
    if right and tried[0] in right and best["predicted_us"] > 0.95 * tried[0]["predicted_us"]:
        best = tried[0]
    return dict(row=name, op=target.op, shape=target.shape, best=best and best["config"], tried=tried)


def compile_candidates(target: Target, arch: str, start: int = 0, stop: int | None = None) -> tuple[str, list[dict]]:
    """Compiles candidates; returns the name of the target's row, and one dictionary per candidate.

    Each has "config", and "predicted_us" and "faults", or "error". Faults cover inference and training; times cover
    inference, or the backward pass for its own kernels. For the arguments see `record_candidates`.
    """
    name, recorded = record_candidates(target, arch, start, stop)
    phase_of_time = "backward" if target.backward else "inference"
    tried, known = [], {}
    with ThreadPoolExecutor(2) as pool:
        for config, launches in recorded:
            errors: dict[str, str] = {}
            with capturing(errors, "error"):
                kernels = [compiled(a, arch) for _, a in launches]
            if errors:
                tried.append(dict(config=config) | errors)
                continue
            new = {k: a for k, (_, a) in zip(kernels, launches, strict=True) if k not in known}
            known.update(zip(new, pool.map(partial(examined, arch=arch), new.values(), new), strict=True))
            built = [(phase, a, *known[k]) for (phase, a), k in zip(launches, kernels, strict=True)]
            faults = [fault for *_, found in built for fault in found]
            us = sum(bounds(a, b, GPUS[arch])["together"] for phase, a, b, _ in built if phase == phase_of_time)
            tried.append(dict(config=config, predicted_us=round(us, 2), faults=faults))
    return name, tried


def record_candidates(
    target: Target, arch: str, start: int = 0, stop: int | None = None
) -> tuple[str, list[tuple[Config, list[tuple[str, Launch]]]]]:
    """(name of the target's row, for each candidate its launch parameters and the (phase, launch) that use them).

    The first candidate is the parameters in use.

    Args:
        target: kernel and shape to tune.
        arch: architecture, such as "sm_90".
        start: index of the first candidate to record.
        stop: index after the last one.
    """
    op, arguments = arguments_of(target, torch.bfloat16, torch.device("cpu"))
    phases = ("backward",) if target.backward else ("inference", "forward")
    name, configs = candidates_of(target, arch, lambda: record(arch, op.run, **arguments))
    recorded = []
    for config in configs[start:stop]:
        with overriding({name: config}):
            launches = record(arch, op.run, **arguments)
        recorded.append((config, [(phase, a) for phase in phases for a in launches[phase] if _uses(a, name)]))
    return name, recorded


def _uses(launch: Launch, row: str) -> bool:
    """True if this launch's kernel takes its launch parameters from the row."""
    file, kernel = row.split(".")[:2]
    if row.startswith("attention.bwd."):  # this row chooses between one kernel and two
        return launch.name in ("attention._bwd_kernel", "attention._bwd_dq_kernel", "attention._bwd_dkdv_kernel")
    # the parameters in use of these rows launch another kernel: they count 0, and no bound beats that
    if row.startswith("attention.fwd_whole."):
        return launch.name in ("attention._fwd_whole_kernel", "attention._fwd_tma_kernel")
    if row.startswith("attention.bwd_whole."):
        return launch.name == "attention._bwd_tma_kernel"
    if row.startswith("mlp.fwd."):
        return launch.name in ("mlp._fwd_kernel", "linear._fwd_kernel", "layer_norm._stats_kernel")
    return launch.name == f"{file}._{'bwd_weight' if kernel == 'bwd' else kernel}_kernel"
