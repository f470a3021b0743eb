"""Result files: what was measured, on what, by which command, and what there was no time for."""

import contextlib
import datetime
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from fastvit_triton.files import replacing
from fastvit_triton.measure.machine import driver, gpu_name, provenance
from fastvit_triton.measure.timeout import Deadline, Late, told
from fastvit_triton.measure.variants import Case, measure

ROOT = Path(__file__).parents[1]


class Dead(BaseException):
    """The device does not answer this process any more."""


def alive() -> bool:
    """Whether the device still answers; an illegal access in a kernel ends that for the whole process."""
    if not torch.cuda.is_available():
        return True
    try:
        return torch.ones(1, device="cuda").item() == 1
    except RuntimeError:
        return False


class Part:
    """One result file: rows are added one by one, each at once on disk; a kill loses at most the row under way."""

    def __init__(
        self,
        name: str,
        folder: Path,
        deadline: Deadline,
        dry: bool = False,
        show: Callable = print,
        resume: bool = False,
    ) -> None:
        self.name, self.deadline, self.dry, self._show = name, deadline, dry, show
        kind = "dry-run" if dry else re.sub(r"[^a-z0-9]+", "-", gpu_name().lower()).strip("-")
        self.path = folder / f"{kind}-{datetime.date.today()}-{name}.json"
        self.rows: list[dict] = []
        self.not_reached: list[str] = []
        self._facts = provenance() | dict(part=name, dry_run=dry)
        self._start = time.monotonic()
        self.done: set[str] = set()
        if resume and self.path.exists():
            before = json.loads(self.path.read_text())
            self.rows, self._start = before["rows"], self._start - before["seconds"]
            self.deadline = deadline.sooner(deadline.left - before["seconds"])
            self.done = {row["case"] for row in self.rows}

    def add(self, *rows: dict) -> None:
        """Keeps rows and writes the file anew."""
        self.rows += rows
        for row in rows:
            self._show(_line(row))
        self.write()

    def write(self) -> None:
        """The file as it stands, whole: beside it first, then renamed."""
        facts = self._facts | dict(seconds=round(time.monotonic() - self._start, 1), not_reached=self.not_reached)
        head = json.dumps(facts, indent=1)
        body = ",\n".join("  " + json.dumps(row) for row in self.rows)
        with replacing(self.path) as temporary:
            temporary.write_text(f'{head[:-2]},\n "rows": [\n{body}\n ]\n}}\n')

    def close(self) -> None:
        """The last write, with the clocks as the work left them."""
        self._facts["driver_after"] = driver()
        self.write()

    @contextlib.contextmanager
    def row(self, name: str, **facts: object) -> Iterator[bool]:
        """One row's work: yields whether it is to be done and there is time; an error becomes a row that says so.

        Raises:
            Dead: the device stopped answering; the row says so already.
        """
        if name in self.done:
            yield False
            return
        if self.deadline.over:
            self.not_reached.append(name)
            yield False
            return
        before = len(self.rows)
        try:
            with self.deadline:
                yield True
        except Late:
            self.not_reached.append(f"{name} (begun)")
            self.write()
        except Exception as error:
            self.add(dict(case=name, **facts, error=told(error)))
        if any("error" in row for row in self.rows[before:]) and not alive():
            raise Dead(f"the device was lost at {name}")


def compete(
    case: Case, part: Part, device: torch.device, seconds: float, copies: int = 3, latency: bool = False
) -> None:
    """Measures a case and adds one row per phase and arm to the part's file."""
    for phase in case.phases:
        part.add(*measure(case, phase, device, part.deadline, seconds, copies, latency).rows.values())


def _line(row: dict) -> str:
    """A row for a reader who waits."""
    words = [f"{row[k]}" for k in ("part", "case", "phase", "dtype", "arm") if row.get(k) is not None]
    if row.get("us") is not None:
        words.append(f"{row['us']:.1f} µs")
    shown = ("match", "tflops", "tbs", "speedup", "within", "bitwise", "reason", "error")
    return " ".join(words + [f"{k}={row[k]}" for k in shown if row.get(k) is not None])
