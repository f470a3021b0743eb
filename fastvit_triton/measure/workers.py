"""Runs checks in worker processes, so that a kernel fault ends only one of them and all cores compile kernels.

`result_of` runs a longer measurement in a process of its own, with a time limit that also ends a kernel that hangs.
`python -m fastvit_triton.measure.workers DEVICE` is a worker: it reads names and writes rows, one per line.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ..kernels.tile import repair_interpreter
from .machine import device_answers
from .selftest import Check, planned
from .timeout import Deadline, TimedOut, capturing

COMMAND = (sys.executable, "-m", __name__)  # of a worker, without the device
MARK = "row: "  # prefix of output lines that are rows
MOST = 12  # maximum number of processes
GIBIBYTES = 8  # GPU memory per process


class Worker:
    """A process that runs checks on a device, one at a time; on a CPU kernels run in Triton's interpreter."""

    def __init__(self, device: torch.device) -> None:
        variables = _same_package() | dict(OMP_NUM_THREADS="1")
        variables["TRITON_INTERPRET"] = "0" if device.type == "cuda" else "1"
        process = subprocess.Popen(
            [*COMMAND, str(device)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | variables,
            start_new_session=True,  # only the parent handles Ctrl-C
        )
        assert process.stdin is not None and process.stdout is not None  # pipes
        self._process = process
        self._input = process.stdin
        self._output = process.stdout

    def ready(self) -> bool:
        """Waits until the process can run checks; False if it ended."""
        return self._read() is not None

    def answer(self, name: str) -> dict | None:
        """Runs a check and returns its row; None if the process ended."""
        with contextlib.suppress(BrokenPipeError):
            self._input.write(f"{name}\n")
            self._input.flush()
        return self._read()

    def _read(self) -> dict | None:
        line = next((line for line in self._output if line.startswith(MARK)), None)
        return None if line is None else json.loads(line.removeprefix(MARK))

    def kill(self) -> None:
        """Kills the process."""
        self._process.kill()

    def end(self) -> int:
        """Waits for the process to end and returns its exit code."""
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        self._output.close()
        return self._process.wait()


class WorkerRun:
    """Distributes checks to workers, in order; `add` is called with each row, one at a time, until the deadline."""

    def __init__(
        self, names: list[str], deadline: Deadline, add: Callable[[dict], None], start: Callable[[], Worker]
    ) -> None:
        self._todo = deque(names)
        self._deadline = deadline
        self._add = add
        self._start = start
        self._begun: list[str] = []
        self._workers: set[Worker] = set()
        self._lock = threading.Lock()
        self._stopped = False

    @property
    def not_reached(self) -> list[str]:
        """Names of checks without a row; started ones come first."""
        return [*(f"{name} (begun)" for name in self._begun), *self._todo]

    def run(self, workers: int) -> None:
        """Runs the checks in that many processes; an OSError if one does not start."""
        alarm = threading.Timer(self._deadline.left, self._stop)
        alarm.start()
        try:
            with ThreadPoolExecutor(workers) as pool:
                try:
                    for done in [pool.submit(self._supervise) for _ in range(min(workers, len(self._todo)))]:
                        done.result()
                except BaseException:
                    self._stop()
                    raise
        finally:
            alarm.cancel()

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            for worker in self._workers:
                worker.kill()

    def _supervise(self) -> None:
        """Feeds checks to a worker, and replaces it when it ends."""
        while self._todo:
            with self._lock:
                if self._stopped or self._deadline.over:
                    return
                worker = self._start()
                self._workers.add(worker)
            try:
                self._feed(worker)
            finally:
                with self._lock:
                    self._workers.remove(worker)
                worker.end()

    def _feed(self, worker: Worker) -> None:
        """Runs checks in a worker until it ends or no checks are left."""
        if not worker.ready():
            if self._stopped:
                return
            raise ChildProcessError(f"a process for the checks ended with code {worker.end()} before the first one")
        while (name := self._take()) is not None:
            row = worker.answer(name)
            if row is None and self._stopped:
                return
            ended = row is None or "lost" in row
            if row is None:
                row = dict(case=name, error=f"the process ended with code {worker.end()}")
            with self._lock:
                self._begun.remove(name)
                self._add(row)
            if ended:
                return

    def _take(self) -> str | None:
        with self._lock:
            if self._stopped or not self._todo:
                return None
            self._begun.append(self._todo.popleft())
            return self._begun[-1]


def _same_package() -> dict[str, str]:
    """Environment variables by which another Python imports the same package."""
    return dict(PYTHONPATH=os.pathsep.join(folder or os.getcwd() for folder in sys.path), PYTHONSAFEPATH="1")


def result_of(command: Sequence[str], seconds: float, variables: dict[str, str] | None = None) -> dict:
    """Runs a program that writes a JSON object to the file named by its last argument, and returns that object."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        log = Path(folder) / "log"
        with open(log, "wb") as output:
            process = subprocess.Popen(
                [*command, str(path)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | dict(PYTHONUNBUFFERED="1") | _same_package() | (variables or {}),  # lines in order
                start_new_session=True,  # only the parent handles Ctrl-C; makes it the leader of a process group
            )
        late = False
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            _kill_group(process)
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8"))
        if late:
            raise TimedOut(f"it did not finish in {seconds:.0f} s")
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        raise ChildProcessError(f"its process ended with code {process.returncode}: {last}"[:300])


def _kill_group(process: subprocess.Popen) -> None:
    """Kills a process that leads a process group, with the group, and waits for it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it and all others have ended
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()


def count(device: torch.device) -> int:
    """Number of worker processes, limited by processors and device memory."""
    cores = min(os.cpu_count() or 1, MOST)
    if device.type != "cuda":
        return cores
    return max(1, min(cores, torch.cuda.mem_get_info(device)[0] // (GIBIBYTES * 2**30)))


def row_of(name: str, check: Check, device: torch.device) -> dict:
    """Runs a check and returns its row, with "error" if it raised and "lost" if the device is no longer usable."""
    row: dict[str, object] = dict(case=name)
    with capturing(row, "error"):
        try:
            row |= check()
        except torch.OutOfMemoryError:
            row["skipped"] = "it does not fit into the memory of the device"
    if "error" in row and not device_answers(device):
        row["lost"] = True
    elif device.type == "cuda":
        torch.cuda.empty_cache()  # for the other processes
    return row


def main() -> None:
    """Runs the checks named on standard input until it ends or the device is lost."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # exit without a traceback if the parent was killed
    device = torch.device(sys.argv[1])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        repair_interpreter()
    torch.backends.cudnn.allow_tf32 = False  # float32 convolutions are part of the error budget
    checks = planned(device)

    def write(row: dict) -> None:
        sys.stdout.write(f"{MARK}{json.dumps(row)}\n")
        sys.stdout.flush()

    write({})
    for line in sys.stdin:
        row = row_of(line.rstrip("\n"), checks[line.rstrip("\n")], device)
        write(row)
        if "lost" in row:
            return


if __name__ == "__main__":
    main()
