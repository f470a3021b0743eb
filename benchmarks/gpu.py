"""Everything a GPU is needed for, in one command that ends inside nine minutes on an H200.

    python -m benchmarks.gpu --out DIR [--only ops,models] [--dry-run] [--seconds 530]

Each part has its own deadline and its own file, <gpu>-<date>-<part>.json, written anew after every row: a kill loses
at most the row under way. A row that fails says why and stops nothing; where a kernel's fault takes the device with it,
the command starts itself again after that row. `--dry-run` executes all parts on a CPU with tiny shapes, the kernels in
Triton's interpreter. Parts behind `--only` alone: hardware (the measurements that can move the goals), latency.
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

from fastvit_triton.measure.machine import provenance
from fastvit_triton.measure.timeout import Deadline, Late, told
from fastvit_triton.measure.variants import compiling

from . import correctness, hardware, model_runs, op_cases, tune
from .result_file import Dead, Part, compete

SECONDS = 530.0


def environment(part: Part, device: torch.device) -> None:
    """What the machine is."""
    facts = dict(case="environment", **provenance())
    if device.type == "cuda":
        p = torch.cuda.get_device_properties(device)
        facts |= dict(units=p.multi_processor_count, l2_bytes=p.L2_cache_size, memory_bytes=p.total_memory)
    part.add(facts)


def run_ops(part: Part, device: torch.device) -> None:
    """Ops of the five models in bfloat16 at batch 256, ViT-B first and compiled too."""
    shapes, dtype = ((op_cases.TINY,), torch.float32) if part.dry else (op_cases.FULL, torch.bfloat16)
    names = ("attention", "layer_norm") if part.dry else op_cases.NAMES
    for shape in sorted(shapes, key=lambda s: s.name != "ViT-B/16"):
        for name in names:
            with part.row(f"{name} {shape.name} batch {shape.B}", op=name, model=shape.name) as go:
                if go:
                    case = op_cases.case(name, shape, dtype, device)
                    if shape.name not in ("ViT-B/16", "tiny"):
                        case = replace(case, arms=[arm for arm in case.arms if "compile" not in arm.name])
                    compete(case, part, device, 0.02 if part.dry else 0.3)


def run_models(part: Part, device: torch.device) -> None:
    """Inference and training of whole models: all of them eager first, then compiled beside eager.

    Compiling takes longer than everything else, and would leave no time for the later models.
    """
    for whole in (False, True):
        for run in model_runs.TINY if part.dry else model_runs.FULL:
            if run.modes and not whole:
                continue
            name = f"{run.name}, compiled" if whole else run.name
            with part.row(name, model=run.model, batch=run.batch) as go:
                if go:
                    case = model_runs.case(run, torch.bfloat16, device)
                    arms = [a for a in case.arms[1:] if ("compile" in a.name) == whole]
                    case = replace(case, arms=[case.arms[0], *arms])
                    compete(case, part, device, 0.02 if part.dry else 1.0, copies=2)


def run_latency(part: Part, device: torch.device) -> None:
    """Small batches as a user waits for them, also with CUDA graphs."""
    for run in model_runs.TINY[:1] if part.dry else model_runs.LATENCY:
        with part.row(run.name, model=run.model, batch=run.batch) as go:
            if go:
                case = model_runs.case(run, torch.bfloat16, device)
                compete(case, part, device, 0.02 if part.dry else 1.0, copies=1, latency=True)


def run_tuning(part: Part, device: torch.device) -> None:
    """The sweep; `python -m benchmarks.tune --adopt FILE` takes its result into kernels/tuned."""
    tune.run(part, device, partial(correctness.kernels_on, device))


# part → what it does, and its seconds; those without seconds run only when asked for
PARTS: dict[str, tuple[Callable, float | None]] = {
    "environment": (environment, 10),
    "correctness": (correctness.run, 90),
    "ceilings": (hardware.ceilings, 20),
    "ops": (run_ops, 130),
    "models": (run_models, 180),
    "tuning": (run_tuning, 300),
    "latency": (run_latency, None),
    "hardware": (hardware.run, None),
}
DRY = 120  # seconds of a part in a dry run: the interpreter is slow


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the result files")
    default = [name for name, (_, seconds) in PARTS.items() if seconds]
    parser.add_argument("--only", default=",".join(default), help=f"parts, of {','.join(PARTS)}")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all parts together")
    parser.add_argument("--resume", action="store_true", help="keep the rows of today's files and go on after them")
    parser.add_argument("--quiet", action="store_true", help="no line per row")
    arguments = parser.parse_args(words)
    unknown = set(arguments.only.split(",")) - PARTS.keys()
    if unknown:
        parser.error(f"--only names {', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}")
    if not arguments.dry_run and not torch.cuda.is_available():
        parser.error("there is no GPU here; --dry-run executes everything on the CPU")
    return arguments


def main(words: list[str] | None = None) -> list[Path]:
    """Runs the parts in their order and returns their files."""
    arguments = parse(words)
    arguments.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cpu") if arguments.dry_run else torch.device("cuda", torch.cuda.current_device())
    end, files = Deadline(arguments.seconds), []
    if not arguments.dry_run:  # a kernel that hangs hears no alarm: then say where, and leave what is on disk
        faulthandler.dump_traceback_later(arguments.seconds + 20, exit=True)
    wanted = [name for name in PARTS if name in arguments.only.split(",")]
    for i, name in enumerate(wanted):
        work, seconds = PARTS[name]
        if arguments.dry_run:
            seconds = DRY
        deadline = end.sooner(seconds or arguments.seconds)
        show = (lambda line: None) if arguments.quiet else partial(print, flush=True)
        part = Part(name, arguments.out, deadline, arguments.dry_run, show, resume=arguments.resume)
        files.append(part.path)
        start = time.monotonic()
        try:
            with compiling("aot_eager" if arguments.dry_run else "inductor"):
                work(part, device)
        except Dead as error:
            part.close()
            again(wanted[i:], arguments, end.left, str(error))
        except (Exception, Late) as error:  # outside every row: the other parts still have their turn
            part.add(dict(case=name, error=told(error)))
        part.close()
        show(f"{name}: {len(part.rows)} rows in {time.monotonic() - start:.0f} s, {len(part.not_reached)} not reached")
        torch.cuda.empty_cache()
    faulthandler.cancel_dump_traceback_later()
    return files


def again(parts: list[str], arguments: argparse.Namespace, left: float, why: str) -> None:
    """Starts the command anew for the parts that are left: a device that faulted is dead to this process."""
    print(f"{why}; starting again for {', '.join(parts)} with {left:.0f} s left", flush=True)
    words = ["--out", str(arguments.out), "--only", ",".join(parts), "--seconds", f"{left:.0f}", "--resume"]
    os.closerange(3, 2**16)  # open device files would keep the memory of the context that died
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu", *words])


if __name__ == "__main__":
    main()
