"""Tunes launch parameters and choices for one architecture and writes them to kernels/tuned/<arch>.json.

    python -m benchmarks.tune [--arch sm_90] [--seconds 300] [--check] [--choices] [--adopt FILE]

If the architecture is that of the GPU here, candidates and choices are timed on it ("measured"). Otherwise candidates
are compiled and the bound of the compile report decides, and choices follow the dispatcher's rule ("predicted"). A
measured row is never replaced by a predicted one. --choices tunes choices alone.
"""

import argparse
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import torch

from fastvit_triton.kernels import launch
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.launch import overriding
from fastvit_triton.measure.candidates import targets
from fastvit_triton.measure.choices import MODELS, Calls, calls_of, time_choice
from fastvit_triton.measure.timeout import Deadline
from fastvit_triton.measure.tuned_tables import adopt, best_rows, write
from fastvit_triton.measure.tuning import time_candidates

from .result_file import ResultFile

CHOICES = 60.0  # seconds that are kept for the choices


def measure_choices(
    result: ResultFile, arch: str, device: torch.device, context: Callable[[], AbstractContextManager]
) -> None:
    """Times the choices of all models and adds a row for each; of equal shapes the first is timed."""
    seen: set[tuple[str, str]] = set()
    tiny = dict(img_size=32, embed_dim=32, num_heads=2)
    for name, batch in MODELS[:1] if result.dry else MODELS:
        calls: Calls = {}
        with result.row(f"choices of {name} batch {batch}") as wanted:
            if wanted:
                calls = calls_of(name, 2 if result.dry else batch, device, context, **tiny if result.dry else {})
        for (row, shape), call in calls.items():
            if (row, shape) in seen:
                continue
            seen.add((row, shape))
            with result.row(f"{row} {shape}") as wanted, context():
                if wanted:
                    columns = time_choice(call, device, result.deadline, result.dry)
                    result.add(dict(case=f"{row} {shape}", arch=arch, row=row, shape_class=shape, **columns))


def run(result: ResultFile, device: torch.device, context: Callable[[], AbstractContextManager]) -> None:
    """Times all candidates, and then the choices with the best of them; `--adopt` takes the file."""
    arch = launch.architecture(device)
    for target in targets(result.dry):
        name = f"{target.row} {' '.join(f'{k}={v}' for k, v in target.shape.items())}"
        if result.deadline.left < CHOICES and not result.dry:
            result.not_reached.append(name)
            continue
        with result.row(name) as wanted:
            if wanted:
                most = 2 if result.dry else None
                row = time_candidates(target, torch.bfloat16, device, result.deadline, context, most)
                result.add(dict(case=name, arch=arch, **row))
    with overriding(best_rows(result.rows)):
        measure_choices(result, arch, device, context)


def main() -> None:
    """Tunes, prints what was found, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = launch.architecture(torch.device("cuda", 0)) if torch.cuda.is_available() else "sm_90"
    parser.add_argument("--arch", default=here, help="whose table is written; predicted unless it is that of this GPU")
    parser.add_argument("--seconds", type=float, default=300.0, help="no new row is begun after this time")
    parser.add_argument("--check", action="store_true", help="print what was found and write nothing")
    parser.add_argument("--choices", action="store_true", help="tune choices alone")
    parser.add_argument("--adopt", type=Path, metavar="FILE", help="take a tuning result of benchmarks.gpu instead")
    arguments = parser.parse_args()
    if arguments.adopt:
        print("taken:", *adopt(arguments.adopt))
        return
    deadline, rows, here = Deadline(arguments.seconds), [], torch.cuda.is_available() and arguments.arch == here
    kernels = partial(using_backend, "triton")
    if not here:
        from . import predict  # which needs the compile report's packages
    for target in () if arguments.choices else targets():
        if deadline.over:
            break
        if here:
            row = time_candidates(target, torch.bfloat16, torch.device("cuda", 0), deadline, kernels)
        else:
            row = predict.predict_candidates(target, arguments.arch)
        print(row["row"], row["best"], *row["tried"], sep="\n  ")
        rows.append(row)
    if here:
        with tempfile.TemporaryDirectory() as folder:
            result = ResultFile("choices", Path(folder), deadline)
            measure_choices(result, arguments.arch, torch.device("cuda", 0), kernels)
        choices = [row for row in result.rows if "who" in row]
    else:
        choices = predict.predict_choices(arguments.arch)
        print(*(f"{row['who']:5} {row['row']} {row['shape_class']}" for row in choices), sep="\n")
    found, provenance = best_rows(rows), "measured" if here else "predicted"
    if arguments.check:
        print("found:", *found)
    else:
        print("taken:", *write(arguments.arch, found, provenance, choices=choices), f"and {len(choices)} choices")


if __name__ == "__main__":
    main()
