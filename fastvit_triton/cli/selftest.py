"""`selftest`: checks that the kernels are correct on this machine's GPU."""

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..files import replacing
from .checks import check_output
from .console import add_device_option, print_line, select_device

if TYPE_CHECKING:
    import torch

HELP = "check that the kernels are correct on this machine"
OUT = Path("fastvit-triton-selftest.json")
MOST = 86_400  # seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `selftest`."""
    add = parser.add_argument
    add("--seconds", type=float, default=60.0, check=_check_seconds, help="time limit (default: 60)")
    add("--out", type=Path, default=OUT, check=check_output, help=f"file for the results as JSON (default: {OUT})")
    parser.add_argument("--interpret", action="store_true", help="tiny shapes on the CPU, in Triton's interpreter")
    add_device_option(parser)


def run(args: argparse.Namespace) -> int:
    """Checks every op and its gradients against float64 on a GPU, repeatability, streams, CUDA graphs and memory."""
    from functools import partial

    from ..measure.selftest import planned
    from ..measure.timeout import Deadline
    from ..measure.workers import Run, Worker, count

    check_output("--out", args.out)
    device = _device(args)
    names, rows, notes, start = list(planned(device)), [], [], time.monotonic()
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        stage = bar.add_task("compiling and checking", total=len(names))

        def add(row: dict) -> None:
            rows.append(row)
            bar.update(stage, advance=1)

        work = Run(names, Deadline(args.seconds), add, partial(Worker, device))
        try:
            work.run(count(device))
        except ChildProcessError as error:  # a check made the device unusable for all processes
            if not rows:
                raise
            notes.append(str(error))
        finally:
            rows.sort(key=lambda row: names.index(row["case"]))
            took = time.monotonic() - start
            passed = [row for row in rows if not _why(row) and "skipped" not in row]
            _write(args.out, device, rows, len(passed), work.not_reached, took)
    said = _sentence(rows, passed, len(work.not_reached), f"{_place(device)} in {took:.0f} s")
    print_line("; ".join([said, *notes, f"{args.out} holds them"]))
    return int(any(map(_why, rows)) or not passed)


def _check_seconds(option: str, value: float) -> None:
    """Raises ValueError if it is no time limit."""
    if not 0 < value <= MOST:
        raise ValueError(f"{option} is {value:g}; give a number above 0, at most {MOST}")


def _device(args: argparse.Namespace) -> "torch.device":
    """The device to check.

    Raises:
        ValueError: the kernels do not run on it.
    """
    import torch

    from ..kernels.backend import using_backend, why_not

    if args.interpret and args.device not in ("auto", "cpu"):
        raise ValueError(f"--interpret runs on the CPU, --device is {args.device}; give one of them")
    device = torch.device("cpu") if args.interpret else select_device(args.device)
    if device.type == "cpu" and not args.interpret:
        raise ValueError("selftest needs a GPU, and there is none in use; --interpret checks tiny shapes on the CPU")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    with using_backend("triton"):
        why = why_not(device, torch.float16)
    if why is not None:
        raise ValueError(f"the kernels do not run on {device}: {why}")
    return device


def _place(device: "torch.device") -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU in Triton's interpreter"


def _why(row: dict) -> str | None:
    """The reason why a check failed; None if it did not fail."""
    if "error" in row:
        return f"{row['error']}{', and the device was lost' if 'lost' in row else ''}"
    if row.get("match") is False:
        times = "not finite" if row["within"] is None else f"{row['within']:g} times the limit"
        return f"{row['worst']}: {'error ' if row['within'] else ''}{times}"
    return "results of equal calls differ" if row.get("bitwise") is False else None


def _sentence(rows: list[dict], passed: list[dict], missed: int, where: str) -> str:
    """One sentence that summarises the results."""
    wrong = [(row["case"], why) for row in rows if (why := _why(row))]
    skipped = len(rows) - len(wrong) - len(passed)
    if wrong:
        name, why = wrong[0]
        said = f"{len(wrong)} of {len(rows) - skipped} checks failed on {where}: the first is {name} ({why})"
    else:
        ops = {row["op"] for row in passed}
        said = f"{len(passed)} checks of {len(ops)} ops passed on {where}"
    more = {f"{skipped} did not fit into its memory": skipped, f"{missed} were not reached in time": missed}
    return "; ".join([said, *(text for text, number in more.items() if number)])


def _write(
    path: Path, device: "torch.device", rows: list[dict], passed: int, not_reached: list[str], seconds: float
) -> None:
    """Writes rows with their provenance as JSON."""
    from ..measure.machine import provenance

    facts: dict[str, object] = dict(
        gpu=_place(device) if device.type == "cuda" else None, device=str(device), seconds=round(seconds, 1)
    )
    failed = [row["case"] for row in rows if _why(row)]
    facts |= dict(passed=passed, failed=failed, not_reached=not_reached, rows=rows)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(provenance() | facts, indent=1) + "\n")
