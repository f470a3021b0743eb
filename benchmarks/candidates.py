"""The record of candidate launch parameters: which of their launches compile without a fault, by architecture.

    python -m benchmarks.candidates [--arch sm_80,sm_90] [--all]

Also predicts launch parameters for an architecture that is not present, by compiling for it; see `benchmarks.tune`.

Writes results/candidates.json: for each architecture the versions of Triton and ptxas, a hash of the rules (see
`fingerprint.checks`), and the faults of every launch by its key (see fingerprint.py). Only launches that are not in the
record with the same versions and rules are compiled. Launch parameters in use are in the compile report instead.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import triton
from rich.progress import track
from triton.errors import TritonError

from fastvit_triton.kernels.launch import overriding
from fastvit_triton.measure.candidates import Config
from fastvit_triton.measure.timeout import capturing

from . import launch_recorder
from .fingerprint import checks, key
from .launch_recorder import Launch, compiled
from .result_file import as_json, write_text
from .sass import GPUS
from .static import RESULTS, bounds, examined, ptxas_versions
from .targets import Target, arguments_of, candidates_of, targets

FILE = RESULTS / "candidates.json"
TARGETS = [replace(target, shape=target.shape | dict(B=16)) for target in targets()]  # binaries as for larger batches


def faults(arch: str, known: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """The faults of every launch of a candidate by its key; launches whose key is not in `known` are compiled."""
    found: dict[str, list[str]] = {}
    for launch in launches(arch):
        name = key(launch, arch)
        if name not in found:
            found[name] = known[name] if name in known else compile_launch(launch, arch)
    return found


def launches(arch: str) -> Iterator[Launch]:
    """Launches of all candidates, in inference and training."""
    for target in track(TARGETS, arch, transient=True):
        for _, recorded in record_candidates(target, arch, start=1)[1]:
            yield from (launch for _, launch in recorded)


def compile_launch(launch: Launch, arch: str) -> list[str]:
    """The faults of one launch."""
    try:
        return examined(launch, compiled(launch, arch), arch)[1]
    except (TritonError, RuntimeError) as error:
        return [f"does not compile: {str(error)[:200]}"]


def made_by(arch: str) -> dict:
    """What a record of an architecture depends on besides its keys."""
    return dict(triton=triton.__version__, ptxas=ptxas_versions(), checks=checks(arch))


def record(arch: str, path: Path = FILE) -> dict[str, list[str]]:
    """The faults in the file by key; empty if it was made with another Triton, ptxas or other rules."""
    held = json.loads(path.read_text()).get(arch, {}) if path.exists() else {}
    return held["faults"] if made_by(arch).items() <= held.items() else {}


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

    The first candidate is the parameters in use; those from `start` to `stop` are recorded.
    """
    op, arguments = arguments_of(target, torch.bfloat16, torch.device("cpu"))
    phases = ("backward",) if target.backward else ("inference", "forward")
    name, configs = candidates_of(target, arch, lambda: launch_recorder.record(arch, op.run, **arguments))
    recorded = []
    for config in configs[start:stop]:
        with overriding({name: config}):
            launches = launch_recorder.record(arch, op.run, **arguments)
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


def main() -> None:
    """Writes the record and prints the faults."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default=",".join(GPUS), help="comma-separated architectures; others stay as they are")
    parser.add_argument("--all", action="store_true", help="also compile launches that are in the record")
    arguments = parser.parse_args()
    for arch in arguments.arch.split(","):
        found = faults(arch, {} if arguments.all else record(arch))
        held = json.loads(FILE.read_text()) if FILE.exists() else {}
        held[arch] = made_by(arch) | dict(faults=dict(sorted(found.items())))
        write_text(FILE, as_json(held))
        wrong = {name: said for name, said in found.items() if said}
        print(
            f"{arch}: {len(found)} launches", *(f"{name}: {', '.join(said)}" for name, said in wrong.items()), sep="\n"
        )


if __name__ == "__main__":
    main()
