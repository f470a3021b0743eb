"""`selftest`: checks that the kernels are correct on this machine's GPU."""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from .arguments import add_shared, check_output, number, select_device
from .console import print_line, progress
from .results import write_json

if TYPE_CHECKING:
    import torch

HELP = "check that the kernels are correct on this machine"
EXAMPLES = (
    "fastvit-triton selftest",
    "fastvit-triton selftest --interpret       # without a GPU",
)
OUT = Path("fastvit-triton-selftest.json")
MOST = 86_400  # seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `selftest`."""
    add = parser.add_argument
    limit = number(lambda value: 0 < value <= MOST, f"give a number above 0, at most {MOST}")
    add("--seconds", type=float, default=60.0, check=limit, help="time limit (default: 60)")
    add("--out", type=Path, default=OUT, check=check_output, help=f"file for the results as JSON (default: {OUT})")
    parser.add_argument("--interpret", action="store_true", help="tiny shapes on the CPU, in Triton's interpreter")
    add_shared(parser, "--device")


def run(args: argparse.Namespace) -> int:
    """Checks every op and its gradients against float64 on a GPU, repeatability, streams, CUDA graphs and memory."""
    from ..measure.machine import provenance

    check_output("--out", args.out)
    checks = Checks(_device(args))
    with progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()) as bar:
        stage = bar.add_task("compiling and checking", total=len(checks.names))
        try:
            checks.run(args.seconds, lambda: bar.update(stage, advance=1))
        finally:
            write_json(args.out, provenance() | checks.facts() | dict(rows=checks.rows))
    where = f"{place_of(checks.device)} in {checks.seconds:.0f} s"
    print_line(f"{checks.sentence(where)}; {args.out} holds them")
    return int(not checks.are_passed())


@dataclass
class Checks:
    """The checks of a device, and their results so far."""

    device: "torch.device"  # where the kernels run; on a CPU in Triton's interpreter
    names: list[str] = field(default_factory=list)  # of the checks to run, most important first; empty means all
    rows: list[dict] = field(default_factory=list)  # one for each finished check, in the order of the names
    notes: list[str] = field(default_factory=list)  # why the run ended early, if it did
    not_reached: list[str] = field(default_factory=list)  # names of checks without a row
    seconds: float = 0.0  # how long it took

    def __post_init__(self) -> None:
        from ..measure.selftest import planned

        self.names = self.names or list(planned(self.device))

    def run(self, seconds: float, on_row: Callable[[], object] = lambda: None) -> None:
        """Runs the checks in processes of their own; those not finished after `seconds` are stopped."""
        from functools import partial

        from ..measure.timeout import Deadline
        from ..measure.workers import Worker, WorkerRun, count

        def add(row: dict) -> None:
            self.rows.append(row)
            on_row()

        start = time.monotonic()
        work = WorkerRun(self.names, Deadline(seconds), add, partial(Worker, self.device))
        try:
            work.run(count(self.device))
        except ChildProcessError as error:  # a check made the device unusable for all processes
            if not self.rows:
                raise
            self.notes.append(str(error))
        finally:
            self.rows.sort(key=lambda row: self.names.index(row["case"]))
            self.not_reached = work.not_reached
            self.seconds = time.monotonic() - start

    def passed(self) -> list[dict]:
        """Rows of the checks that passed."""
        return [row for row in self.rows if not _why(row) and "skipped" not in row]

    def are_passed(self) -> bool:
        """True if a check passed and none failed."""
        return bool(self.passed()) and not any(map(_why, self.rows))

    def facts(self) -> dict:
        """Numbers and names of a result file: what passed, failed and was not reached."""
        gpu = place_of(self.device) if self.device.type == "cuda" else None
        failed = [row["case"] for row in self.rows if _why(row)]
        facts = dict(gpu=gpu, device=str(self.device), seconds=round(self.seconds, 1), passed=len(self.passed()))
        return facts | dict(failed=failed, not_reached=self.not_reached)

    def sentence(self, where: str) -> str:
        """One sentence that summarises the results; `where` follows "passed on"."""
        return "; ".join([_sentence(self.rows, self.passed(), len(self.not_reached), where), *self.notes])


def _device(args: argparse.Namespace) -> "torch.device":
    """The device to check."""
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


def place_of(device: "torch.device") -> str:
    """Where the kernels run: the GPU's name, or the interpreter."""
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
