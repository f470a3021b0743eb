"""Result files: what was measured, on what, by which command, and what there was no time for."""

import contextlib
import datetime
import importlib.util
import json
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from fastvit_triton.files import replacing

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "triton", "timm", "transformers", "torchvision", "vit-pytorch", "flash-attn", "xformers")


class Late(BaseException):
    """The deadline came in the middle of something; no library that swallows errors swallows this one."""


class Dead(BaseException):
    """The device does not answer this process any more."""


class Deadline:
    """A moment. As a context it also interrupts, in the main thread, what has not ended by then."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self._outer: list[tuple | None] = []  # what was set before each entry: a deadline may hold itself

    @property
    def left(self) -> float:
        """Seconds until then, never negative."""
        return max(self.end - time.monotonic(), 0.0)

    @property
    def over(self) -> bool:
        """Whether it has passed."""
        return not self.left

    def sooner(self, seconds: float) -> "Deadline":
        """The earlier of this one and so many seconds from now."""
        return Deadline(min(self.left, seconds))

    def __enter__(self) -> "Deadline":
        before = None
        if hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread():
            left = signal.getitimer(signal.ITIMER_REAL)[0]
            before = signal.signal(signal.SIGALRM, _late), left, time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, max(min(self.left, left or self.left), 1e-3))
        self._outer.append(before)
        return self

    def __exit__(self, *_: object) -> None:
        before = self._outer.pop()
        if before is not None:
            handler, left, since = before
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
            if left:  # somebody outside waits too
                signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - since), 1e-3))


def _late(*_: object) -> None:
    raise Late("the time for this ended")


def told(error: BaseException) -> str:
    """An error as one short line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no text'}"[:300]


def alive() -> bool:
    """Whether the device still answers; an illegal access in a kernel ends that for the whole process."""
    if not torch.cuda.is_available():
        return True
    try:
        return torch.ones(1, device="cuda").item() == 1
    except RuntimeError:
        return False


def gpu_name() -> str:
    """The device's name, or the processor's kind where there is no GPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"


def provenance() -> dict:
    """GPU, driver, clocks, versions, commit, date, command."""
    facts: dict = dict(
        command=" ".join(["python -m benchmarks.gpu", *sys.argv[1:]])
        if "gpu" in Path(sys.argv[0]).name
        else sys.argv[0],
        date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        cpu=platform.processor() or platform.machine(),
        python=platform.python_version(),
        commit=_commit(),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        threads=torch.get_num_threads(),
    )
    facts["packages"] = {name: found for name in PACKAGES if (found := installed(name))}
    return facts | _driver()


def _commit() -> str | None:
    """Of the working tree, with a mark where files differ from it; None outside git."""
    found = _output("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    return found.strip() or None


def _driver() -> dict:
    """Driver and clocks as nvidia-smi tells them, MHz."""
    fields = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"
    row = _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits").split("\n")[0]
    return dict(zip(fields.split(","), row.split(", "), strict=True)) if row.count(",") == fields.count(",") else {}


def _output(tool: str, *arguments: str) -> str:
    """What a program prints; nothing where it is absent or fails."""
    if shutil.which(tool) is None:
        return ""
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=20)
    return done.stdout if done.returncode == 0 else ""


def installed(package: str) -> str | None:
    """A package's version; None where it is absent."""
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None


def missing(module: str, package: str | None = None) -> str | None:
    """Why an arm that needs this module is absent; None where it can be imported."""
    return None if importlib.util.find_spec(module) else f"{package or module} is not installed"


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
        self._facts["driver_after"] = _driver()
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


def _line(row: dict) -> str:
    """A row for a reader who waits."""
    words = [f"{row[k]}" for k in ("part", "case", "phase", "dtype", "arm") if row.get(k) is not None]
    if row.get("us") is not None:
        words.append(f"{row['us']:.1f} µs")
    shown = ("match", "tflops", "tbs", "speedup", "within", "bitwise", "reason", "error")
    return " ".join(words + [f"{k}={row[k]}" for k in shown if row.get(k) is not None])
