"""Measures on a GPU what no committed file has yet, the most valuable first, within nine minutes.

    python -m benchmarks.gpu --plan                            # prints the list; needs no GPU
    python -m benchmarks.gpu --compile-ahead --out DIR         # compiles our kernels for it; needs no GPU
    python -m benchmarks.gpu --prepare --out DIR [--only blocks,latency] [--seconds 530]
    python -m benchmarks.gpu --dry-run --out DIR               # all of it on a CPU with tiny shapes and invented times

Each arm is compared with float64 and then timed beside eager PyTorch; its row is written at once, so that a kill loses
at most one. A row that fails has its error, and the next follows; if a fault in a kernel makes the device unusable, the
command restarts itself after that row. The file is DIR/<gpu>-<date>-rows.json. --prepare compiles first, in processes,
and writes what was compiled to archives in DIR; archives that lie in caches/ are unpacked at the start.
"""

import argparse
import faulthandler
import gc
import os
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from fastvit_triton.kernels import launch
from fastvit_triton.measure.machine import device_answers
from fastvit_triton.measure.timeout import Deadline
from fastvit_triton.measure.timing import alternate, rate, repeated
from fastvit_triton.measure.variants import compiling, rows_of

from . import caches, op_cases
from .lines import SECTIONS, lines
from .result_file import DeviceLost, ResultFile
from .rows import (
    Key,
    Line,
    committed,
    done,
    every_kernel,
    key_of,
    ordered,
    reached,
    remaining,
    seconds_of,
    stamp,
    traced,
)

SECONDS = 530.0
PREPARING = 100.0  # of them, at most, with --prepare
LEAST = 20.0  # seconds of a line's time limit, at least; otherwise four times what is expected


def drift(device: torch.device, dry: bool) -> dict[str, float]:
    """How fast the card is now: TB/s of a copy, TFLOP/s of a product, microseconds of PyTorch's attention of ViT-B."""
    if dry:
        return dict(copy_tbs=1.0, matmul_tflops=1.0, attention_us=1.0)
    a = torch.randn(2**30, device=device, dtype=torch.bfloat16)
    b, c = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in "bc")
    q, k, v = torch.randn(3, 256, 12, 197, 64, device=device, dtype=torch.bfloat16)
    calls = dict(
        copy=partial(torch.empty_like(a).copy_, a),
        matmul=partial(torch.mm, b, c),
        attention=partial(torch.nn.functional.scaled_dot_product_attention, q, k, v),
    )
    timings, errors = alternate({name: repeated(call) for name, call in calls.items()}, device, Deadline(10), 0.6)
    if errors:
        raise RuntimeError(f"the card cannot be measured: {errors}")
    us = {name: timing.us for name, timing in timings.items()}
    copied, computed = rate(2 * a.nbytes, us["copy"]), rate(2 * 8192**3, us["matmul"])
    return dict(copy_tbs=round(copied, 3), matmul_tflops=round(computed, 1), attention_us=round(us["attention"], 1))


def invented(steps: Mapping[str, Callable], *_: object, **__: object) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Takes the place of `samples_of` in a dry run: times that depend on the names alone."""
    return {name: [100.0 + zlib.crc32(name.encode()) % 100] * 5 for name in steps}, {}


def measure(line: Line, result: ResultFile, device: torch.device, found: set[Key], arch: str, limit: float) -> None:
    """Measures the arms of a line whose rows are not in `found`, and adds their rows."""
    with result.row(line.name, limit, section=line.section, kernels="") as wanted:
        if not wanted:
            return
        if line.run is not None:
            measure_checks(line, result, device, found)
            return
        assert line.build is not None  # a line has one of both
        held = traced(line, arch)
        facts = dict(section=line.section, case=line.case, phase=line.phase)
        rows = {arm: facts | dict(arm=arm, kernels=one.kernels) for arm, one in held.items()}
        missing = [arm for arm, row in rows.items() if key_of(result.stamp(row) | row) not in found]
        if not missing:
            return
        case = line.build(device, result.dry)
        base = case.variants[0].name
        case = replace(case, variants=[v for v in case.variants if v.name in (base, *missing)])
        flops, sampler = held[base].flops, dict(sampler=invented) if result.dry else {}
        how = (line.phase, device, result.deadline, line.seconds, 1 if result.dry else line.copies, line.latency)
        began = time.monotonic()
        for row in rows_of(case, *how, **sampler):
            took, began = round(time.monotonic() - began, 2), time.monotonic()
            if row["arm"] in missing:
                result.add(rows[row["arm"]] | row | dict(flops=flops, seconds=took))
            if "error" in row and not device_answers():
                break  # the other arms are measured after the restart


def measure_checks(line: Line, result: ResultFile, device: torch.device, found: set[Key]) -> None:
    """Measures a line whose cases are its own, each found by its name and the kernels that its op can launch."""
    assert line.run is not None  # of the caller

    def with_kernels(row: dict) -> dict:
        op = next((name for name in op_cases.BY_NAME if row["case"].startswith(f"{name} ")), None)
        return before(row) | dict(section=line.section, kernels=every_kernel(op))

    before, rows, began = result.stamp, len(result.rows), time.monotonic()
    cases = {str(key[1]) for key in found}
    result.done = {case for case in cases if key_of(with_kernels(dict(case=case)) | dict(case=case)) in found}
    result.stamp = with_kernels
    try:
        line.run(result, device)
    finally:
        result.stamp = before
        took = round(time.monotonic() - began, 1)
        facts = dict(case=line.case, section=line.section, kernels="", rows=len(result.rows) - rows, seconds=took)
        if facts["rows"]:
            result.add(facts)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for the result file and the archives")
    parser.add_argument("--plan", action="store_true", help="print the list with what would be reached; needs no GPU")
    parser.add_argument(
        "--compile-ahead", action="store_true", help="compile our kernels for sm_90 and archive them; needs no GPU"
    )
    parser.add_argument("--gpu", default="NVIDIA H200", help="without a GPU: whose rows exist (default: %(default)s)")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"sections, of {','.join(SECTIONS)}")
    parser.add_argument("--prepare", action="store_true", help="compile first, in processes, and archive the caches")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes and invented times on the CPU")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything")
    parser.add_argument("--again", action="store_true", help="also measure rows that a committed file has")
    parser.add_argument("--resume", action="store_true", help="do not repeat rows with errors of today's file in --out")
    parser.add_argument("--quiet", action="store_true", help="no line per row")
    arguments = parser.parse_args(words)
    unknown = set(arguments.only.split(",")) - SECTIONS.keys()
    if unknown:
        parser.error(f"--only names {', '.join(sorted(unknown))}; the sections are {', '.join(SECTIONS)}")
    if not arguments.plan and arguments.out is None:
        parser.error("--out is missing; it needs the folder for the result file and the archives")
    if not (arguments.plan or arguments.compile_ahead or arguments.dry_run) and not torch.cuda.is_available():
        parser.error("no GPU was found; --dry-run executes everything on the CPU, and --plan prints the list")
    return arguments


def planned(sections: list[str], rows: list[dict], found: set[Key], facts: dict, arch: str) -> list[tuple[Line, float]]:
    """The lines of the sections without the arms in `found`, in their order, with their expected seconds."""
    shares = {name: SECTIONS[name] for name in SECTIONS if name in sections}
    left = (remaining(line, found, facts, arch) for line in lines() if line.section in sections)
    return ordered([line for line in left if line is not None], seconds_of(rows), shares)


def print_plan(order: list[tuple[Line, float]], seconds: float) -> None:
    """Prints the list: when each line starts, what it is expected to take, and its value."""
    print(f"{'start':>6} {'takes':>6} {'value':>5}  line: arms")
    for line, takes, start in reached(order, seconds):
        when = f"{start:6.0f}" if start is not None else "     -"
        arms = f": {' | '.join(line.arms)}" if line.arms else ""
        print(f"{when} {takes:6.1f} {line.value:5.0f}  [{line.section}] {line.case} {line.phase}{arms}")
    starts = [start for *_, start in reached(order, seconds)]
    print(f"{sum(start is not None for start in starts)} of {len(starts)} lines are reached in {seconds:.0f} s")


def main(words: list[str] | None = None) -> Path | None:
    """Measures, and returns the file; with --plan prints the list."""
    arguments = parse(words)
    earlier = committed()
    found = done([] if arguments.again else earlier, False)
    sections = arguments.only.split(",")
    if arguments.plan or arguments.compile_ahead:
        of_gpu = [row for row in earlier if row["gpu"] == arguments.gpu and "kernels" in row]
        order = planned(sections, earlier, found, of_gpu[-1] if of_gpu else {}, "sm_90")
        if arguments.plan:
            print_plan(order, arguments.seconds)
        if arguments.compile_ahead:
            arguments.out.mkdir(parents=True, exist_ok=True)
            caches.use()
            caches.compile_ahead([line for line, *_ in order], "sm_90", print)
            print(caches.archive(arguments.out))
        return None
    dry, end = arguments.dry_run, Deadline(arguments.seconds)
    arguments.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cpu") if dry else torch.device("cuda", torch.cuda.current_device())
    show = (lambda line: None) if arguments.quiet else partial(print, flush=True)
    if not dry:  # a hanging kernel cannot be interrupted: print the stack and exit
        faulthandler.dump_traceback_later(arguments.seconds + 20, exit=True)
        caches.use()
    facts = stamp(dry)
    result = ResultFile("rows", arguments.out, end, dry, show, resume=True, stamp=lambda row: facts)
    found |= done(result.rows, arguments.resume)
    arch = "sm_90" if dry else launch.architecture(device)
    order = planned(sections, earlier, found, facts, arch)
    lost = {row["case"] for row in result.rows if arguments.resume and "error" in row and "arm" not in row}
    try:
        if arguments.prepare:
            caches.prepare([line for line, *_ in order], device, dry, end.sooner(PREPARING), show)
            show(caches.archive(arguments.out))
        facts["drift"] = drift(device, dry)
        with compiling("eager" if dry else "inductor"):
            for line, seconds in order:
                if line.name in lost:
                    continue
                if end.left < seconds and not dry:
                    result.not_reached.append(line.name)
                    continue
                result.done = set()
                measure(line, result, device, found, arch, max(LEAST, 4 * seconds))
                if not dry:
                    gc.collect()  # models hold themselves by their forwards
                    torch.cuda.empty_cache()
    except DeviceLost as error:
        result.close()
        restart(arguments, end.left, str(error))
    result.close()
    if arguments.prepare:
        show(caches.archive(arguments.out))
    show(f"{len(result.rows)} rows, {len(result.not_reached)} lines not reached")
    faulthandler.cancel_dump_traceback_later()
    return result.path


def restart(arguments: argparse.Namespace, left: float, why: str) -> None:
    """Restarts the command, because a process cannot use a device after a fault."""
    print(f"{why}; restarting with {left:.0f} s left", flush=True)
    words = ["--out", str(arguments.out), "--only", arguments.only, "--seconds", f"{left:.0f}", "--resume"]
    words += ["--again"] * arguments.again
    os.closerange(3, 2**16)  # open device files would keep the memory of the lost context allocated
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu", *words])


if __name__ == "__main__":
    main()
