"""`benchmark`: the speed of a model on this machine, against eager PyTorch, torch.compile and other libraries."""

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..files import replacing
from .checks import at_least, check_output
from .console import BENCH, add_device_option, print_line, select_device

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from ..measure.variants import Case

SECONDS = 100.0  # time limit after the imports; variants not ready by then are reported as late
COPIES = 2  # sets of images, used in turn
DTYPES = ("float32", "bfloat16", "float16")
HELP = "measure the speed of a model on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `benchmark`."""
    add = parser.add_argument
    text = "a name that `models` lists, or of timm (default: ViT-B on a GPU, ViT-Ti elsewhere)"
    add("--model", check=_check_model, help=text)
    add("--batch", type=int, check=at_least(1), help="images per batch (default: 64 on a GPU, 2 elsewhere)")
    add("--dtype", choices=DTYPES, help="of weights and images (default: bfloat16 on a GPU, float32 elsewhere)")
    add("--train", action="store_true", help="forward and backward instead of inference")
    add("--out", type=Path, check=check_output, help="file for the rows as JSON")
    add_device_option(parser)


def _check_model(option: str, name: str) -> None:
    """Raises ValueError if the model cannot be measured; the message has similar names."""
    from ..measure.model_cases import known
    from ..models import model_config

    if why := known(name):
        try:
            model_config(name)
        except ValueError as error:
            advice = f"; {BENCH}" if "cannot be imported" in why else ""
            raise ValueError(f"{error}; {why}{advice}") from error


def run(args: argparse.Namespace) -> int:
    """Measures a model on this machine in under two minutes: eager, compiled, ours, and other installed libraries."""
    from ..measure.timeout import Deadline, TimedOut
    from ..measure.variants import measure

    device = select_device(args.device)
    gpu = device.type == "cuda"
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {device} has no float64 to compare with; use cpu or cuda")
    name = args.model or ("vit_base_patch16_224" if gpu else "vit_tiny_patch16_224")
    batch = (64 if gpu else 2) if args.batch is None else args.batch
    dtype = args.dtype or ("bfloat16" if gpu else "float32")
    phase = "training" if args.train else "forward"
    deadline = Deadline(SECONDS)
    hard = Deadline(SECONDS + 15)
    console = Console(stderr=True)
    columns = TextColumn("{task.description:26}"), BarColumn(), TimeElapsedColumn()
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar, hard:
            stage = bar.add_task("building the models", total=None)
            case = _case(name, batch, args.train, dtype, device)
            bar.update(stage, total=sum(variant.reason is None for variant in case.variants) + 3 + gpu)

            def on_progress(what: str) -> None:
                bar.update(stage, advance=1, description=what)

            measured = measure(case, phase, device, deadline, 0.15 * SECONDS, COPIES, on_progress=on_progress)
    except TimedOut as error:
        raise ValueError(f"{name} at batch {batch} takes longer than {SECONDS:.0f} s; lower --batch") from error
    except RuntimeError as error:  # there is no OutOfMemoryError on a CPU
        if "allocate memory" not in str(error):
            raise
        raise ValueError(f"--batch {batch} does not fit into memory; lower it") from error
    _report(case, phase, list(measured.rows.values()), gpu)
    if args.out is not None:
        _write(args, list(measured.rows.values()), gpu)
        print_line(f"{args.out} holds these rows and the hardware and versions they were measured on")
    return 0


def _case(name: str, batch: int, training: bool, dtype: str, device: "torch.device") -> "Case":
    """The variants of a model: timm's eager model first if it is installed, compiled variants last."""
    import torch

    from ..measure.model_cases import Run, case, least_bytes

    model_case = case(Run(name, batch, training), getattr(torch, dtype), device)
    needed = least_bytes(model_case, COPIES)
    there = memory_of(device)
    if needed > there:
        fits = max(int(batch * there / needed), 1)
        raise ValueError(
            f"--batch {batch} needs more than {needed / 2**30:.0f} GiB for {name}, and {device} has "
            f"{there / 2**30:.0f} GiB; at most {fits} can fit"
        )
    eager = model_case.variants[0]
    timm = next((variant for variant in model_case.variants if variant.name == "timm" and variant.reason is None), None)
    others = [variant for variant in model_case.variants if variant not in (eager, timm)]
    others.sort(key=lambda variant: "compile" in variant.name)
    first = replace(timm, name="eager (timm)") if timm else eager
    return replace(model_case, variants=[first, *others])


def memory_of(device: "torch.device") -> int:
    """Memory of the device in bytes."""
    import torch

    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 2**63


def _report(case: "Case", phase: str, rows: list[dict], gpu: bool) -> None:
    """Prints the table, an explanation of it, and the reasons for missing rows."""
    from ..measure.machine import gpu_name

    console = Console()
    what = "one training step without optimiser" if phase == "training" else "inference"
    print_line(f"{case.name.rsplit(' ', 1)[0]}, {what}, {rows[0]['dtype']}, on {gpu_name()}")
    console.print(_table(rows, gpu))
    for row in rows:
        why = row.get("reason") or row.get("error")
        if why == "needs a GPU":  # printed once below
            continue
        if why is not None:
            late = why.startswith("TimedOut")
            print_line(
                f"{row['arm']}: {'not ready in time; compiled code is kept, so run this again' if late else why}"
            )
        elif not row["match"]:
            print_line(f"{row['arm']}: no time, because the error of {row['worst']} is {row['within']} times the limit")
    if any("timm cannot be imported" in row.get("reason", "") for row in rows):
        print_line(f"To compare with timm: {BENCH}")
    print_line("Ratio: speed relative to the first row, median of alternating pairs; quartiles in brackets.")
    print_line("Match: the error against float64 is at most twice that of eager PyTorch plus one rounding.")
    if not gpu:
        print_line(
            "No GPU is in use, and the Triton kernels need one: on a CPU our ops run PyTorch operators, so expect"
        )
        print_line("ratios near 1, unless linear layers run by oneDNN, which `fastvit-triton doctor` tells.")
        print_line("CPU clocks and load vary, so times are given as ratios only.")


def _table(rows: list[dict], gpu: bool) -> "Table":
    """One row per variant that was measured or gave wrong results."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    titles = ["", *["ms"] * gpu, "ratio", *["peak MiB"] * gpu, *["saved MiB"] * ("saved_bytes" in rows[0])]
    table = Table(*titles, "match", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))  # fits 80 columns
    for row in rows:
        if "match" not in row:
            continue
        ratio = row.get("speedup_quartiles")
        time = "{:#.4g} ({:#.4g}-{:#.4g})".format(*(row[n] / 1e3 for n in ("us", "q1", "q3"))) if ratio else "-"
        cells = [time] * gpu
        spread = "" if gpu or not ratio else f" ({ratio[0]:.2f} to {ratio[1]:.2f})"
        cells.append(f"{row['speedup']:.2f}{spread}" if ratio else "-")
        cells += [_mebibytes(row.get("peak_bytes"))] * gpu
        cells += [_mebibytes(row.get("saved_bytes"))] * ("saved_bytes" in rows[0])
        table.add_row(row["arm"], *cells, "yes" if row["match"] else "NO")
    return table


def _mebibytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:.1f}"


def _write(args: argparse.Namespace, rows: list[dict], gpu: bool) -> None:
    """Writes rows with their provenance as JSON; absolute times are left out on a CPU."""
    from ..measure.machine import provenance
    from ..measure.variants import without_times

    kept = rows if gpu else without_times(rows)
    with replacing(args.out) as temporary:
        temporary.write_text(json.dumps(provenance() | dict(rows=kept), indent=1) + "\n")
