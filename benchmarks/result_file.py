"""Result files: measurements with their provenance, and the names of measurements that were not reached in time."""

import contextlib
import datetime
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fastvit_triton.files import replacing
from fastvit_triton.measure.machine import device_answers, driver, gpu_name, provenance
from fastvit_triton.measure.timeout import Deadline, TimedOut, one_line

ROOT = Path(__file__).parents[1]


def origin() -> dict:
    """Command, date, commit and packages of a result that does not depend on the machine."""
    return {k: v for k, v in provenance().items() if k in ("command", "date", "commit", "packages")}


def as_json(facts: Mapping[str, Any], **tables: Iterable[Any]) -> str:
    """JSON of facts, and of tables with one row on a line, so that a changed row is a changed line."""
    parts = [json.dumps(facts, indent=1, ensure_ascii=False)[2:-2]] if facts else []
    for name, rows in tables.items():
        lines = ",\n".join("  " + json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows)
        parts.append(f' "{name}": [\n{lines}\n ]')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def table(head: Iterable[str], rows: Iterable[Iterable[object]], kinds: str = "l", *after: str, pad: str = "") -> str:
    """A markdown table and paragraphs after it.

    `kinds` aligns columns left ("l") or right ("r"), the last one all that follow; `pad` is beside the rule's marks.
    """
    marks = [("---", "--:")[kind == "r"] for kind in kinds]
    head = list(head)
    rule = [f"{pad}{mark}{pad}" for mark in (marks + marks[-1:] * len(head))[: len(head)]]
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in rows]
    return "\n".join([f"| {' | '.join(head)} |", f"|{'|'.join(rule)}|", *lines, *(f"\n{each}" for each in after)])


def write_text(path: Path, text: str) -> None:
    """Replaces a file as a whole."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_pair(path: Path, markdown: Callable[[dict], str], facts: Mapping[str, Any], **tables: Iterable[Any]) -> None:
    """Writes path.json, and the page that `markdown` makes of its content to path.md."""
    text = as_json(facts, **tables)
    write_text(path.with_suffix(".json"), text)
    write_text(path.with_suffix(".md"), markdown(json.loads(text)))


class DeviceLost(BaseException):
    """The process can no longer use the device."""


class ResultFile:
    """One result file, which is rewritten after every row."""

    def __init__(
        self,
        name: str,
        folder: Path,
        deadline: Deadline,  # interrupts a running row; no row starts after it
        dry: bool = False,
        show: Callable = print,  # called with a line for each row
        resume: bool = False,  # keep the rows of the file if it exists, and do not measure those cases again
        stamp: Callable[[dict], dict] = lambda row: {},  # columns that a new row gets unless it has them
    ) -> None:
        self.name, self.deadline, self.dry, self._show = name, deadline, dry, show
        kind = "dry-run" if dry else re.sub(r"[^a-z0-9]+", "-", gpu_name().lower()).strip("-")
        self.path = folder / f"{kind}-{datetime.date.today()}-{name}.json"
        self.rows: list[dict] = []
        self._lines: list[str] = []  # rows as text; a row that was added does not change
        self.not_reached: list[str] = []
        self._facts = provenance() | dict(part=name, dry_run=dry)
        self._start = time.monotonic()
        self.done: set[str] = set()  # cases
        self.stamp = stamp
        if resume and self.path.exists():
            before = json.loads(self.path.read_text())
            self.rows, self._start = before["rows"], self._start - before["seconds"]
            self.done = {row["case"] for row in self.rows}

    def add(self, *rows: dict) -> None:
        """Adds rows and rewrites the file."""
        self.rows += [self.stamp(row) | row for row in rows]
        for row in rows:
            self._show(_line(row))
        self.write()

    def write(self) -> None:
        """Writes the file; it is replaced as a whole."""
        facts = self._facts | dict(seconds=round(time.monotonic() - self._start, 1), not_reached=self.not_reached)
        head = json.dumps(facts, indent=1)
        self._lines += [f"  {json.dumps(row)}" for row in self.rows[len(self._lines) :]]
        body = ",\n".join(self._lines)
        write_text(self.path, f'{head[:-2]},\n "rows": [\n{body}\n ]\n}}\n')

    def close(self) -> None:
        """Writes the file for the last time, with the driver's state after the measurements."""
        self._facts["driver_after"] = driver()
        self.write()

    @contextlib.contextmanager
    def row(self, name: str, seconds: float | None = None, **facts: object) -> Iterator[bool]:
        """Context that measures one or more rows; an exception inside becomes a row with "error" and these facts.

        It yields False if the row is already in the file or there is no time left for it. A lost device is a
        DeviceLost, after such a row.
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
            with self.deadline if seconds is None else self.deadline.sooner(seconds):
                yield True
        except TimedOut:
            self.not_reached.append(f"{name} (begun)")
            self.write()
        # Any error: a case that fails is a row with its error, and the cases after it are still measured.
        except Exception as error:
            self.add(dict(case=name, **facts, error=one_line(error)))
        if any("error" in row for row in self.rows[before:]) and not device_answers():
            raise DeviceLost(f"the device was lost at {name}")


def _line(row: dict) -> str:
    """A row as a line of text."""
    words = [f"{row[k]}" for k in ("part", "case", "phase", "dtype", "arm") if row.get(k) is not None]
    if row.get("us") is not None:
        words.append(f"{row['us']:.1f} µs")
    shown = ("match", "tflops", "tbs", "speedup", "within", "bitwise", "reason", "error")
    return " ".join(words + [f"{k}={row[k]}" for k in shown if row.get(k) is not None])
