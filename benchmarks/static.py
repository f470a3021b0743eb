"""The compile report: every launch of the public functions, compiled for GPUs that need not be present.

    python -m benchmarks.static --out DIR [--arch sm_80,sm_90] [--quick] [--all] [--report-only]

Writes DIR/static.json and DIR/static.md: registers, spills, shared memory, occupancy, instructions, and two times,
*predicted* from counts, not measured, without latency. The bound (predicted_us), which the choice of tiles uses, is the
time of the busiest pipe. The expected time (expected_us) makes two corrections based on published measurements: in
attention the tensor and exp pipes alternate, and L2 has a limited bandwidth (sass.FILL).
Exits with 1 if a kernel breaks a rule of lint.py.

Only changed launches are compiled: a launch whose key (see fingerprint.py) is in DIR/static.json keeps the figures of
that row if the report was made with the same Triton and ptxas, the same rules, reader of binaries and figures of the
GPU, and the row has no violation. The figures of the binary are kept, and what was computed from its instructions
(fill_bytes, predicted_us, bound, bounds_us), which cannot be recomputed because only one loop pass is stored; the rest
is recomputed every time. After a change of these computations --all recompiles everything.
"""

import argparse
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, fields, replace
from datetime import date
from itertools import groupby
from pathlib import Path

import torch
import triton
from rich.console import Console
from rich.progress import track
from triton.errors import TritonError

from fastvit_triton.expected.launched import heads_of, sequence, work
from fastvit_triton.kernels.sizes import seen_pairs

from .fingerprint import checks, key
from .launch_cases import Case, cases
from .launch_recorder import Launch, compiled, least_of_windows, record
from .lint import violations
from .result_file import as_json, write_text
from .sass import GPUS, TOOL, Binary, Gpu, Pipes, read
from .tables import kernel_table, markdown, operation_table, violation_lines

COMMAND = "python -m benchmarks.static --out benchmarks/results"
RESULTS = Path(__file__).parent / "results"
CALL = ("case", "op", "phase", "dtype", "arch")
LAUNCH = (  # columns that are equal in all rows of a key
    *("key", "kernel", "config", "programs", "violations", "registers", "spill_bytes", "shared_bytes"),
    *("tensor_columns", "ctas_per_sm", "stores", "wide", "narrow", "mma", "mix", "flops", "bytes", "fill_bytes"),
    *("predicted_us", "bound", "floor_us", "expected_us"),
)
PARTS = dict(loop=[field.name for field in fields(Pipes)], bounds_us=["tensor", "exp", "issue", "shared", "memory"])


def program_cost(launch: Launch, binary: Binary) -> tuple[Pipes, Pipes]:
    """Cost of one program, inside and outside its main loops."""
    todo, looped = work(launch), binary.loop.flops
    passes = (todo.padded - binary.once.flops) / looped if looped else todo.passes
    loop = Pipes().plus(binary.loop, max(passes, 0.0))
    if binary.mma and not loop.flops + binary.once.flops:  # instructions whose names do not state their size
        loop = replace(loop, flops=todo.padded)
    return loop, binary.once


def bounds(launch: Launch, binary: Binary, gpu: Gpu) -> dict[str, float]:
    """Lower bound of each pipe in microseconds, and "together", that of the busiest pipe.

    With one block per unit, its prologue and epilogue do not overlap with other blocks and are added.
    """
    phases = [_pipe_us(p, launch, gpu) for p in program_cost(launch, binary)]
    total = {name: phases[0][name] + phases[1][name] for name in phases[0]}
    total["memory"] = launch.nbytes / gpu.gbs / 1e3
    alone = sum(max(p.values()) for p in phases) if binary.ctas_per_sm == 1 else 0.0
    return total | {"together": max(*total.values(), alone)}


def expected(kernel: str, needed: dict[str, float], fill_bytes: float, gpu: Gpu) -> float:
    """Expected microseconds (see the module docstring), from `bounds` and the bytes that all programs load from L2."""
    in_turn = needed["tensor"] + needed["exp"] if kernel.startswith("attention.") else 0.0
    return max(*needed.values(), in_turn, fill_bytes / gpu.fill_gbs / 1e3)


def _pipe_us(pipes: Pipes, launch: Launch, gpu: Gpu) -> dict[str, float]:
    rate = gpu.tflops / (2 if launch.tensors[0].dtype == torch.float32 else 1)
    cycles = launch.programs / gpu.units / gpu.ghz / 1e3
    named = dict(exp=pipes.exp, issue=pipes.issue, shared=pipes.shared)
    return {"tensor": pipes.flops * launch.programs / rate / 1e6} | {n: c * cycles for n, c in named.items()}


def floor(launch: Launch, phase: str, gpu: Gpu) -> float:
    """Lower bound of the operation in microseconds: its flops at the GPU's peak, or one transfer of each byte.

    Attention pads queries to 64 and keys to 16, and causal attention counts the pairs that it needs. Its backward pass,
    whose floor is listed with the dq kernel, reads and writes all eight tensors once; so does that of window attention,
    not padded. Row statistics and folded weights are overhead, so their floor is 0.
    """
    a, name = launch.values, launch.name
    forward = ("attention._fwd_kernel", "attention._fwd_whole_kernel", "attention._fwd_tma_kernel")
    backward = ("attention._bwd_dq_kernel", "attention._bwd_kernel", "attention._bwd_tma_kernel")
    if name in forward or name in backward:
        heads, passes = heads_of(launch), 2 if name in backward else 1
        Nq, Nk = sequence(launch)
        seen = seen_pairs(Nq, Nk, a.get("CAUSAL", False)) / max(Nq * Nk, 1)
        pairs = heads * math.ceil(Nq / 64) * 64 * math.ceil(Nk / 16) * 16 * seen
        values = heads * (Nq + Nk) * (a["D"] + a.get("Dv", a["D"])) * passes
        flops = pairs * (2 * a["D"] + 2 * a.get("Dv", a["D"])) * (2.5 if name in backward else 1)
        itemsize = launch.tensors[0].dtype.itemsize
        exp = pairs / (16 * gpu.units * gpu.ghz * 1e3)
        return max(values * itemsize / gpu.gbs / 1e3, flops / gpu.tflops / 1e6, exp)
    if name.startswith("window."):
        nbytes, flops = least_of_windows(launch)
        return max(nbytes / gpu.gbs / 1e3, flops / gpu.tflops / 1e6)
    if name in (
        "linear._fwd_kernel",
        "mlp._fwd_kernel",
        "patch_embed._fwd_kernel",
        "layer_norm._fwd_kernel",
        "layer_norm._bwd_kernel",
        "depthwise._conv_kernel",
        "depthwise._bwd_weight_kernel",
        "batch_norm._kernel",
    ):
        unused = a["pre_ptr"].nbytes if phase == "inference" and "pre_ptr" in a else 0
        return max((launch.nbytes - unused) / gpu.gbs / 1e3, work(launch).flops / gpu.tflops / 1e6)
    return 0.0


def recorded(case: Case, arch: str) -> list[tuple[str, Launch]]:
    """(phase, launch) of a case; the forward phase is omitted if it launches the same as inference."""
    function, arguments, options = case.build()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(case.precision)
    try:
        phases = record(arch, function, *arguments, **options)
    finally:
        torch.set_float32_matmul_precision(before)
    seen = {phase: [(a.name, a.config, a.grid, a.nbytes) for a in launches] for phase, launches in phases.items()}
    if seen["forward"] == seen["inference"]:
        del phases["forward"]
    return [(phase, launch) for phase, launches in phases.items() for launch in launches]


def rows_of(case: Case, archs: Iterable[str], pool: ThreadPoolExecutor, known: dict[str, object]) -> list[dict]:
    """One row per launch and architecture.

    `known` has, by key, a row of an earlier report or a result of `_compile`; newly compiled kernels are added.
    """
    rows = []
    for arch in archs:
        for phase, launch in recorded(case, arch):
            facts = dict(key=key(launch, arch), kernel=launch.name, case=case.name, op=case.op, phase=phase)
            facts |= dict(dtype=case.dtype, config=launch.config, arch=arch, programs=launch.programs)
            if facts["key"] not in known:
                known[facts["key"]] = _compile(launch, arch, pool)
            rows.append((launch, facts, known[facts["key"]]))
    return [_row(*parts) for parts in rows]


def _compile(launch: Launch, arch: str, pool: ThreadPoolExecutor) -> Future[tuple[Binary, list[str]]] | str:
    """The future figures of a binary and its violations; or, if it does not compile, the error as a sentence."""
    try:
        kernel = compiled(launch, arch)
    except (TritonError, RuntimeError) as error:
        return f"does not compile: {str(error)[:200]}"
    return pool.submit(examined, launch, kernel, arch)


def examined(launch: Launch, kernel: "triton.compiler.CompiledKernel", arch: str) -> tuple[Binary, list[str]]:
    """The figures of a compiled launch and its violations."""
    binary = read(kernel)
    return binary, violations(launch, binary, arch, kernel.asm)


def _row(launch: Launch, facts: dict, known: dict | Future[tuple[Binary, list[str]]] | str) -> dict:
    if isinstance(known, str):
        return facts | dict(violations=[known])
    gpu = GPUS[facts["arch"]]
    least = round(floor(launch, facts["phase"], gpu), 2)
    computed = dict(flops=work(launch).flops, bytes=launch.nbytes, floor_us=least)
    if isinstance(known, dict):
        needed = known["bounds_us"] | {"together": known["predicted_us"]}
        computed["expected_us"] = round(expected(launch.name, needed, known["fill_bytes"], gpu), 2)
        return facts | {name: value for name, value in known.items() if name not in facts} | computed
    binary, found = known.result()
    figures = asdict(binary)
    figures["loop"] = {name: round(count, 1) for name, count in figures["loop"].items()}
    needed, fill = bounds(launch, binary, gpu), sum(p.fill for p in program_cost(launch, binary)) * launch.programs
    figures.pop("once")
    likely = expected(launch.name, needed, fill, gpu)
    together = needed.pop("together")
    row = facts | figures | dict(flops=computed["flops"], bytes=computed["bytes"], fill_bytes=fill)
    row |= dict(predicted_us=round(together, 2), bound=max(needed, key=needed.get))
    row |= dict(bounds_us={n: round(t, 2) for n, t in needed.items()}, floor_us=least, expected_us=round(likely, 2))
    return row | dict(violations=found)


def reusable(earlier: dict) -> dict[str, dict]:
    """Rows of an earlier report, by key, that need not be compiled again; the module docstring states when."""
    if (earlier["triton"], earlier["ptxas"]) != (triton.__version__, ptxas_versions()):
        return {}
    same = {arch for arch in GPUS if earlier.get("checks", {}).get(arch) == checks(arch)}
    return {row["key"]: row for row in earlier["rows"] if row["arch"] in same and not row["violations"]}


def operations(rows: list[dict]) -> list[dict]:
    """Bound and expected time of each operation, and the ratio of the bound to its floor.

    The backward pass of a block is omitted, because PyTorch computes most of its products.
    """
    sums: dict[tuple, list[float]] = {}
    for row in rows:
        if "predicted_us" in row:
            at = sums.setdefault((row["case"], row["op"], row["phase"], row["dtype"], row["arch"]), [0.0] * 3)
            at[:] = [total + row[f"{n}_us"] for total, n in zip(at, ("predicted", "expected", "floor"), strict=True)]
    return [
        dict(case=c, op=o, phase=p, dtype=d, arch=a)
        | dict(predicted_us=round(t, 2), expected_us=round(e, 2), floor_us=f, ratio=round(t / f, 2))
        for (c, o, p, d, a), (t, e, f) in sums.items()
        if f and (o, p) != ("blocks", "backward")
    ]


def report(archs: Iterable[str], quick: bool = False, known: dict[str, dict] | None = None) -> dict:
    """Compiles and reads every launch whose key is not in `known`; returns the content of static.json."""
    known = dict(known or {})
    with ThreadPoolExecutor(2) as pool:
        chosen = cases(quick)
        rows = [row for case in track(chosen, "compiling", transient=True) for row in rows_of(case, archs, pool, known)]
    return dict(
        command=COMMAND,
        note="predicted from instruction counts; nothing here was measured",
        date=str(date.today()),
        triton=triton.__version__,
        ptxas=ptxas_versions(),
        parts={arch: asdict(GPUS[arch]) for arch in archs},
        checks={arch: checks(arch) for arch in archs},
        operations=operations(rows),
        rows=rows,
    )


def ptxas_versions() -> dict[str, str]:
    """Versions of Triton's assemblers for NVIDIA GPUs."""
    versions = {}
    for name in ("ptxas", "ptxas-blackwell"):
        if (tool := TOOL.parent / name).exists():
            text = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
            versions[name] = re.search(r"V([\d.]+)", text)[1]
    return versions


def to_json(result: dict) -> str:
    """JSON of two tables, one row per line: launches by key, of which a changed kernel changes a line, and calls.

    A call states what it launches: case, operation, phase, dtype, architecture, and the keys, separated by spaces. Two
    rows of a key with other figures are a ValueError.
    """
    launches: dict[str, list] = {}
    for row in result["rows"]:
        values = [row[name] for name in LAUNCH if name in row]
        for name, parts in PARTS.items():
            values += [[row[name][part] for part in parts]] if name in row else []
        if launches.setdefault(row["key"], values) != values:
            raise ValueError(f"launch {row['key']} of {row['kernel']} has two rows with other figures")
    of_call = groupby(result["rows"], lambda row: [row[name] for name in CALL])
    calls = [[*call, " ".join(row["key"] for row in rows)] for call, rows in of_call]
    facts = {name: value for name, value in result.items() if name not in ("operations", "rows")}
    facts["columns"] = dict(launches=[*LAUNCH, *PARTS], **PARTS, calls=[*CALL, "keys"])
    return as_json(facts, launches=launches.values(), calls=calls)


def load(path: Path) -> dict:
    """The content of a static.json as `report` returns it, with one row for each launch of each call."""
    result = json.loads(path.read_text())
    columns, launches = result.pop("columns"), {}
    for values in result.pop("launches"):
        row = dict(zip(columns["launches"], values, strict=False))  # one that did not compile has no figures
        row |= {name: dict(zip(columns[name], row[name], strict=True)) for name in PARTS if name in row}
        launches[row["key"]] = row
    calls = ((dict(zip(CALL, call, strict=True)), keys.split()) for *call, keys in result.pop("calls"))
    rows = [launches[key] | call for call, keys in calls for key in keys]
    return result | dict(operations=operations(rows), rows=rows)


def main() -> None:
    """Prints the tables, writes the report and exits with 1 on a violation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for static.json and static.md")
    parser.add_argument("--arch", default=",".join(GPUS), help="comma-separated architectures")
    parser.add_argument("--quick", action="store_true", help="ViT-B in bfloat16 only")
    parser.add_argument("--all", action="store_true", help="also compile launches unchanged since the report in --out")
    parser.add_argument("--report-only", action="store_true", help="exit with 0 even if there are violations")
    arguments = parser.parse_args()
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
    earlier, reused = arguments.out and arguments.out / "static.json", {}
    if earlier and earlier.exists() and not arguments.all:
        reused = reusable(load(earlier))
    result, console = report(arguments.arch.split(","), arguments.quick, reused), Console(width=180)
    for arch in result["parts"]:
        console.print(kernel_table(result, arch))
    console.print(operation_table(result, "sm_90" if "sm_90" in result["parts"] else next(iter(result["parts"]))))
    lines = violation_lines(result)
    kept = sum(row["key"] in reused for row in result["rows"])
    summary = f"{len(result['rows'])} launches, {kept} of them unchanged and not compiled, {len(lines)} violations"
    console.print(summary, *lines, sep="\n", markup=False)
    if arguments.out:
        write_text(arguments.out / "static.json", to_json(result))
        write_text(arguments.out / "static.md", markdown(result))
    sys.exit(bool(lines) and not arguments.report_only)


if __name__ == "__main__":
    main()
