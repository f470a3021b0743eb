"""All measurements that need a GPU, in one command that is meant to end within nine minutes on an H200.

    python -m benchmarks.gpu --out DIR [--only ops,models=60] [--dry-run] [--seconds 530]

Each part has a time limit, which --only can set, and a file, <gpu>-<date>-<part>.json, which is rewritten after every
row, so that a kill loses at most one row. A row that fails has its error, and the next follows; if a fault in a kernel
makes the device unusable, the command restarts itself after that row. `--dry-run` runs all parts on a CPU with tiny
shapes, the kernels in Triton's interpreter. The parts hardware and latency run only if --only names them.
"""

import argparse
import faulthandler
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.measure.machine import provenance
from fastvit_triton.measure.timeout import Deadline, TimedOut, one_line
from fastvit_triton.measure.variants import compiling

from . import correctness, hardware, model_runs, op_cases, tune
from .result_file import DeviceLost, ResultFile, measure_case

SECONDS = 530.0


def environment(result: ResultFile, device: torch.device) -> None:
    """Adds a row with the machine's properties."""
    facts = dict(case="environment", **provenance())
    if device.type == "cuda":
        p = torch.cuda.get_device_properties(device)
        facts |= dict(units=p.multi_processor_count, l2_bytes=p.L2_cache_size, memory_bytes=p.total_memory)
    result.add(facts)


def run_ops(result: ResultFile, device: torch.device) -> None:
    """Ops of the five models in bfloat16 at batch 256; ViT-B comes first and is also compiled."""
    shapes, dtype = ((op_cases.TINY,), torch.float32) if result.dry else (op_cases.FULL, torch.bfloat16)
    names = ("attention", "layer_norm") if result.dry else op_cases.NAMES
    for shape in sorted(shapes, key=lambda s: s.name != "ViT-B/16"):
        for name in names:
            with result.row(f"{name} {shape.name} batch {shape.B}", op=name, model=shape.name) as wanted:
                if wanted:
                    case = op_cases.case(name, shape, dtype, device)
                    if shape.name not in ("ViT-B/16", "tiny"):
                        case = replace(case, variants=[v for v in case.variants if "compile" not in v.name])
                    measure_case(case, result, device, 0.02 if result.dry else 0.3)


def run_models(result: ResultFile, device: torch.device) -> None:
    """Inference and training of models: first all uncompiled, then all compiled.

    Compilation takes longer than everything else and would leave no time for later models.
    """
    for whole in (False, True):
        for run in model_runs.TINY if result.dry else model_runs.FULL:
            if run.modes and not whole:
                continue
            name = f"{run.name}, compiled" if whole else run.name
            with result.row(name, model=run.model, batch=run.batch) as wanted:
                if wanted:
                    case = model_runs.case(run, torch.bfloat16, device)
                    variants = [a for a in case.variants[1:] if ("compile" in a.name) == whole]
                    case = replace(case, variants=[case.variants[0], *variants])
                    measure_case(case, result, device, 0.02 if result.dry else 1.0, copies=2)


def run_latency(result: ResultFile, device: torch.device) -> None:
    """Latency of small batches, with and without CUDA graphs."""
    for run in model_runs.TINY[:1] if result.dry else model_runs.LATENCY:
        with result.row(run.name, model=run.model, batch=run.batch) as wanted:
            if wanted:
                case = model_runs.case(run, torch.bfloat16, device)
                measure_case(case, result, device, 0.02 if result.dry else 1.0, copies=1, latency=True)


def run_tuning(result: ResultFile, device: torch.device) -> None:
    """Launch parameters; `python -m benchmarks.tune --adopt FILE` writes them into kernels/tuned."""
    tune.run(result, device, partial(correctness.kernels_on, device))


def run_ways(result: ResultFile, device: torch.device) -> None:
    """Ways of blocks, with the launch parameters in kernels/tuned; `--adopt` writes them there too."""
    context = partial(using_backend, "auto") if device.type == "cuda" else partial(correctness.kernels_on, device)
    tune.measure_ways(result, device, context)


# part → (function, seconds); a part without seconds runs only if --only names it
PARTS: dict[str, tuple[Callable, float | None]] = {
    "environment": (environment, 10),
    "correctness": (correctness.run, 90),
    "ceilings": (hardware.ceilings, 20),
    "ops": (run_ops, 130),
    "models": (run_models, 180),
    "tuning": (run_tuning, 200),
    "ways": (run_ways, 60),
    "latency": (run_latency, None),
    "hardware": (hardware.run, None),
}
DRY = 120  # seconds of a part in a dry run; the interpreter is slow


def limits_of(only: str) -> dict[str, float | None]:
    """Part → its limit in seconds, or None, from the text of --only, such as "ops,models=60"."""
    named = (part.partition("=") for part in only.split(","))
    return {name: float(seconds) if equals else None for name, equals, seconds in named}


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the result files")
    default = [name for name, (_, seconds) in PARTS.items() if seconds]
    parser.add_argument(
        "--only", default=",".join(default), help=f"parts, of {','.join(PARTS)}; models=60 sets a limit in seconds"
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all parts together")
    parser.add_argument("--resume", action="store_true", help="keep the rows of today's files and go on after them")
    parser.add_argument("--quiet", action="store_true", help="no line per row")
    arguments = parser.parse_args(words)
    try:
        limits = limits_of(arguments.only)
    except ValueError:
        parser.error(f"--only is {arguments.only}; after = it needs seconds, as in models=60")
    unknown = limits.keys() - PARTS.keys()
    if unknown:
        parser.error(f"--only names {', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}")
    if not arguments.dry_run and not torch.cuda.is_available():
        parser.error("no GPU was found; --dry-run executes everything on the CPU")
    return arguments


def main(words: list[str] | None = None) -> list[Path]:
    """Runs the parts in order and returns their files."""
    arguments = parse(words)
    arguments.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cpu") if arguments.dry_run else torch.device("cuda", torch.cuda.current_device())
    end, files = Deadline(arguments.seconds), []
    if not arguments.dry_run:  # a hanging kernel cannot be interrupted: print the stack and exit
        faulthandler.dump_traceback_later(arguments.seconds + 20, exit=True)
    limits = limits_of(arguments.only)
    wanted = [name for name in PARTS if name in limits]
    for i, name in enumerate(wanted):
        work, seconds = PARTS[name]
        deadline = end.sooner(limits[name] or (DRY if arguments.dry_run else seconds) or arguments.seconds)
        show = (lambda line: None) if arguments.quiet else partial(print, flush=True)
        result = ResultFile(name, arguments.out, deadline, arguments.dry_run, show, resume=arguments.resume)
        files.append(result.path)
        start = time.monotonic()
        try:
            with compiling("aot_eager" if arguments.dry_run else "inductor"):
                work(result, device)
        except DeviceLost as error:
            result.close()
            remaining = [part if limits[part] is None else f"{part}={limits[part]:g}" for part in wanted[i:]]
            restart(remaining, arguments, end.left, str(error))
        except (Exception, TimedOut) as error:  # outside of rows; the remaining parts still run
            result.add(dict(case=name, error=one_line(error)))
        result.close()
        took = time.monotonic() - start
        show(f"{name}: {len(result.rows)} rows in {took:.0f} s, {len(result.not_reached)} not reached")
        torch.cuda.empty_cache()
    faulthandler.cancel_dump_traceback_later()
    return files


def restart(parts: list[str], arguments: argparse.Namespace, left: float, why: str) -> None:
    """Restarts the command for the remaining parts, because a process cannot use a device after a fault."""
    print(f"{why}; restarting for {', '.join(parts)} with {left:.0f} s left", flush=True)
    words = ["--out", str(arguments.out), "--only", ",".join(parts), "--seconds", f"{left:.0f}", "--resume"]
    os.closerange(3, 2**16)  # open device files would keep the memory of the lost context allocated
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu", *words])


if __name__ == "__main__":
    main()
