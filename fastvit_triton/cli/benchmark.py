"""`benchmark`: the speed of a model on this machine, against eager PyTorch, torch.compile and other libraries."""

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import add_shared, check_output, select_device
from .console import print_line
from .model_by_name import TIMM
from .results import write_json

if TYPE_CHECKING:
    import torch

    from ..measure.variants import Case

SECONDS = 600.0  # time limit after the imports, mostly for torch.compile; variants not ready by then are late
TIMING = 3.0  # seconds of measurement of each variant, beside the first
COPIES = 2  # sets of images, used in turn
WIDTH = 22  # characters of the first column of numbers
HELP = "measure the speed of a model on this machine"
EXAMPLES = (
    "fastvit-triton benchmark",
    "fastvit-triton benchmark --model vit_small_patch16_224 --batch 8",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `benchmark`."""
    add = parser.add_argument
    text = "a name that `models` lists, or of timm (default: ViT-B on a GPU, ViT-Ti elsewhere)"
    add("--model", check=_check_model, help=text)
    add_shared(parser, "--batch", default="64 on a GPU, 2 elsewhere")
    add_shared(parser, "--dtype")
    add("--train", action="store_true", help="forward and backward instead of inference")
    add("--out", type=Path, check=check_output, help="file for the rows as JSON")
    add_shared(parser, "--device")


def _check_model(option: str, name: str) -> None:
    """Raises ValueError if the model cannot be measured; the message has similar names."""
    from ..measure.model_cases import known
    from ..models import model_config

    if why := known(name):
        try:
            model_config(name)
        except ValueError as error:
            advice = f"; {TIMM}" if "cannot be imported" in why else ""
            raise ValueError(f"{error}; {why}{advice}") from error


def run(args: argparse.Namespace) -> int:
    """Measures a model on this machine: eager, compiled, ours, and other installed libraries.

    Without torch.compile it takes less than a minute; torch.compile is waited for.
    """
    from ..measure.machine import gpu_name, provenance
    from ..measure.timeout import Deadline, TimedOut
    from ..measure.variants import rows_of, without_times

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
    rows = []
    try:
        with hard:
            case = _case(name, batch, args.train, dtype, device)
            what = "one training step without optimiser" if args.train else "inference"
            print_line(f"{case.name.rsplit(' ', 1)[0]}, {what}, {dtype}, on {gpu_name()}")
            print_line(f"torch.compile comes last, and is waited for: at most {SECONDS / 60:g} minutes in all")
            width = max(len(variant.name) for variant in case.variants if variant.reason is None)
            print_line(_line(_titles(gpu, args.train), width))
            for row in rows_of(case, phase, device, deadline, TIMING, COPIES):
                rows.append(row)
                print_line(
                    _line(_cells(row, gpu, args.train), width) if "match" in row else f"{row['arm']}: {_why(row)}"
                )
    except TimedOut as error:
        raise ValueError(f"{name} at batch {batch} takes longer than {SECONDS:.0f} s; lower --batch") from error
    except RuntimeError as error:  # there is no OutOfMemoryError on a CPU
        if "allocate memory" not in str(error):
            raise
        raise ValueError(f"--batch {batch} does not fit into memory; lower it") from error
    _explain(rows, gpu)
    if args.out is not None:
        write_json(args.out, provenance() | dict(rows=rows if gpu else without_times(rows)))
        print_line(f"{args.out} holds these rows and the hardware and versions they were measured on")
    return 0


def _case(name: str, batch: int, training: bool, dtype: str, device: "torch.device") -> "Case":
    """The variants of a model: timm's eager model first if it is installed, compiled variants last."""
    import torch

    from ..measure.model_cases import CaseRun, case, least_bytes

    model_case = case(CaseRun(name, batch, training), getattr(torch, dtype), device)
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


def _explain(rows: list[dict], gpu: bool) -> None:
    """Prints what the columns are, and what would add rows."""
    for row in rows:
        if row.get("match") is False:
            print_line(f"{row['arm']}: no time, because the error of {row['worst']} is {row['within']} times the limit")
        elif "error" in row and "match" in row:
            print_line(f"{row['arm']}: {_why(row)}")
    if any("timm cannot be imported" in row.get("reason", "") for row in rows):
        print_line(f"To compare with timm: {TIMM}")
    print_line("Ratio: speed relative to the first row, median of pairs that alternate; quartiles in brackets.")
    print_line("Match: the error against float64 is at most twice that of eager PyTorch plus one rounding.")
    if not gpu:
        print_line(
            "No GPU is in use, and the Triton kernels need one: on a CPU our ops run PyTorch operators, so expect"
        )
        print_line("ratios near 1, unless linear layers run by oneDNN, which `fastvit-triton doctor` tells.")
        print_line("CPU clocks and load vary, so times are given as ratios only.")


def _why(row: dict) -> str:
    """Why a variant has no time."""
    why = row.get("reason") or row.get("error") or "it failed"
    return "not ready in time; compiled code is kept, so run this again" if why.startswith("TimedOut") else why


def _titles(gpu: bool, train: bool) -> list[str]:
    return ["", *["ms"] * gpu, "ratio", *["peak MiB"] * gpu, *["saved MiB"] * train, "match"]


def _cells(row: dict, gpu: bool, train: bool) -> list[str]:
    """The cells of a variant that was compared."""
    ratio = row.get("speedup_quartiles")
    time = "{:#.4g} ({:#.4g}-{:#.4g})".format(*(row[n] / 1e3 for n in ("us", "q1", "q3"))) if ratio else "-"
    spread = "" if gpu or not ratio else f" ({ratio[0]:.2f} to {ratio[1]:.2f})"
    cells = [row["arm"], *[time] * gpu, f"{row['speedup']:.2f}{spread}" if ratio else "-"]
    cells += [_mebibytes(row.get("peak_bytes"))] * gpu
    return [*cells, *[_mebibytes(row.get("saved_bytes"))] * train, "yes" if row["match"] else "NO"]


def _line(cells: list[str], width: int) -> str:
    """A line of the table, whose columns have fixed widths, because later rows are not known."""
    first, *rest = cells
    return f"{first:{width}}" + "".join(f" {cell:>{WIDTH if i == 0 else 9}}" for i, cell in enumerate(rest))


def _mebibytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:.1f}"
