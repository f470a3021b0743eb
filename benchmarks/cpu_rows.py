"""Measures from which size on oneDNN's products are faster than PyTorch's on this CPU, for kernels/tuned/cpu.json.

    python -m benchmarks.cpu_rows [--seconds 300] [--threads 1,2] [--dtypes float32,bfloat16] [--write]

Each product of the shapes of ViT-Ti, ViT-S and ViT-B is timed with what follows it in a block, a GELU or a residual, in
three phases: inference with the weight as it is, inference with a packed weight (after `freeze`), and training with the
backward pass. Both variants alternate in one process. A row holds, for each phase, the fewest multiplications from
which on oneDNN is faster: in the median of the measured products, each with the number of threads at which it gains
less, and in none of them slower than `FLOOR`. A phase without such a number is left out, and PyTorch's product runs.
--write adds the row of this CPU to the table.
"""

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastvit_triton.kernels import onednn
from fastvit_triton.kernels.measured import cpu_name
from fastvit_triton.measure.machine import provenance

from .result_file import as_json, write_text

ROWS = (1, 16, 50, 197, 788, 1576)  # of x: images · tokens
SHAPES = tuple((d * a, d * b) for d in (192, 384, 768) for a, b in ((1, 1), (1, 3), (1, 4), (4, 1)))  # (K, F)
CELLS = tuple(itertools.product(ROWS, SHAPES))
MARGIN = 1.02  # by which oneDNN must be faster in the median
FLOOR = 0.96  # of every product; the spread of a ratio on a shared machine is about 0.03


def variants(phase: str, rows: int, K: int, F_: int, dtype: torch.dtype) -> tuple[Callable, Callable]:
    """(PyTorch's product, oneDNN's) of random operands: fc1 with GELU, fc2 and projections with a residual, or qkv."""
    x = torch.randn(rows, K, dtype=dtype)
    weight = torch.randn(F_, K, dtype=dtype)
    bias = torch.randn(F_, dtype=dtype)
    activation = "gelu" if F_ == 4 * K else None
    residual = torch.randn(rows, F_, dtype=dtype) if F_ <= K else None
    operand = onednn.pack(weight, bias, None, rows) if phase == "frozen" else weight

    def eager() -> Tensor:
        y = F.linear(x, weight, bias)
        y = y if activation is None else F.gelu(y)
        return y if residual is None else residual + y

    def ours() -> Tensor:
        return onednn.product(x, operand, bias, activation, residual)

    if phase != "training":
        return eager, ours
    learned = [t.requires_grad_() for t in (x, weight, bias)]
    grad = torch.randn(rows, F_, dtype=dtype)
    return lambda: torch.autograd.grad(eager(), learned, grad), lambda: torch.autograd.grad(ours(), learned, grad)


def ratio(pair: tuple[Callable, Callable], calls: int, rounds: int) -> float:
    """Median over rounds of the first call's time divided by that of the second; CPU time with one thread."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    ratios = []
    for turn in range(rounds + 1):
        seconds = [0.0, 0.0]
        for i in (0, 1) if turn % 2 else (1, 0):
            start = clock()
            for _ in range(calls):
                pair[i]()
            seconds[i] = clock() - start
        if turn:
            ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios)


def measured(phase: str, dtype: torch.dtype, threads: list[int], seconds: float) -> dict[str, dict[int, float]]:
    """ "M,K,F" → number of threads → ratio, for all products of a phase."""
    every = sum(rows * K * F_ for rows, (K, F_) in CELLS)
    ratios: dict[str, dict[int, float]] = {}
    for rows, (K, F_) in CELLS:
        pair = variants(phase, rows, K, F_, dtype)
        with torch.set_grad_enabled(phase == "training"):
            start = time.perf_counter()
            for call in pair:
                call()
            both = time.perf_counter() - start
            share = max(seconds * rows * K * F_ / every, seconds / len(CELLS) / 4) / len(threads)
            calls = max(1, int(share / both / 12))
            rounds = min(21, max(5, int(share / both / calls)))
            for count in threads:
                torch.set_num_threads(count)
                ratios.setdefault(f"{rows},{K},{F_}", {})[count] = round(ratio(pair, calls, rounds), 3)
    return ratios


def error_ratio(rows: int, K: int, F_: int, dtype: torch.dtype) -> float:
    """The error of oneDNN's product against float64, divided by that of PyTorch's."""
    x = torch.randn(rows, K, dtype=dtype)
    weight = torch.randn(F_, K, dtype=dtype)
    want = F.linear(x.double(), weight.double())
    own, ours = ((product(x, weight) - want).norm() for product in (F.linear, onednn.product))
    return round(float(ours / own), 2)


def fewest(ratios: dict[str, dict[int, float]]) -> float | None:
    """The fewest multiplications from which on oneDNN is faster, see above; None if there is no such number."""
    worst = sorted(
        (math.prod(map(int, name.split(","))), min(by_threads.values())) for name, by_threads in ratios.items()
    )
    for size in sorted({size for size, _ in worst}):
        above = [ratio for other, ratio in worst if other >= size]
        if min(above) >= FLOOR and statistics.median(above) >= MARGIN:
            return size
    return None


def main(words: list[str] | None = None) -> dict[str, Any]:
    """Measures, prints each phase's row, and writes the table if asked to; returns this CPU's entry."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0, help="approximate time for everything")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--write", action="store_true", help=f"write {onednn.TABLE.name}")
    arguments = parser.parse_args(words)
    torch.manual_seed(0)
    threads = [int(count) for count in arguments.threads.split(",")]
    dtypes = [d for d in arguments.dtypes.split(",") if onednn.why_not(torch.device("cpu"), getattr(torch, d)) is None]
    share = arguments.seconds / len(dtypes) / len(onednn.PHASES)
    entry: dict[str, Any] = {}
    for dtype in dtypes:
        ratios = {phase: measured(phase, getattr(torch, dtype), threads, share) for phase in onednn.PHASES}
        limits = {phase: least for phase, one in ratios.items() if (least := fewest(one)) is not None}
        errors = {f"{M},{K},{F_}": error_ratio(M, K, F_, getattr(torch, dtype)) for M, (K, F_) in CELLS}
        entry[dtype] = {"from": limits, "ratios": ratios, "errors": errors, "provenance": provenance()}
        print(f"{cpu_name()} {dtype}: errors {min(errors.values())} to {max(errors.values())} of PyTorch's")
        for phase, one in ratios.items():
            spread = [value for by_threads in one.values() for value in by_threads.values()]
            print(f"{cpu_name()} {dtype} {phase}: from {limits.get(phase)}, ratios {min(spread)} to {max(spread)}")
    if arguments.write:
        table = json.loads(onednn.TABLE.read_text(encoding="utf-8"))
        table["cpus"].setdefault(cpu_name(), {}).update(entry)
        write_text(onednn.TABLE, as_json(table))
    return entry


if __name__ == "__main__":
    main()
