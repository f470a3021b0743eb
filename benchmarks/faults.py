"""Faults of machines and files, applied to runs and to files: how many were tried, survived, and lost something.

    python -m benchmarks.faults [--out benchmarks/results] [--minutes 20] [--seed 0]

A run survives a fault if it can be resumed and ends with bitwise the weights of an undisturbed run. A file survives if
it is read unchanged or refused in one sentence (`ValueError`). Everything else is lost, and is named. POSIX only.
"""

import argparse
import contextlib
import itertools
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import torch

from fastvit_triton import create_model, load_model
from fastvit_triton.cli import main as cli
from fastvit_triton.measure.machine import provenance
from fastvit_triton.train.checkpoint import STATE, load_state
from fastvit_triton.train.outputs import LOG, WEIGHTS

from .damaged_files import (
    HOSTILE,
    MODEL,
    RUN,
    TINY,
    cut,
    damaged,
    flip,
    hostile,
    reads_image,
    reads_shard,
    reads_state,
    reads_weights,
    samples,
)
from .result_file import ROOT, as_json, write_text

Trial = Callable[[Path], str | None]  # in an empty folder; returns what was lost, or None


def start(log: Path, *words: str, limit: int | None = None) -> int:
    """Starts a command in a forked process, which may write no file larger than `limit` bytes; returns its number."""
    child = os.fork()
    if child:
        return child
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    code = 70  # an exception
    try:
        code = cli(list(words))
    finally:
        os._exit(code)


def finish(child: int) -> int:
    """The exit code of a process; negative if a signal ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def train(out: Path, **options: int) -> int:
    """Starts a run in `out`, or resumes it."""
    return start(out.with_suffix(".log"), "train", "--out", str(out), "--resume", "auto", *RUN, **options)


@cache
def undisturbed() -> tuple[dict, float]:
    """The weights of a run without faults, and its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        if finish(train(Path(folder) / "run")):
            raise RuntimeError("the run without faults failed")
        return load_state(Path(folder) / "run" / STATE)["model"], time.monotonic() - began


def ends_equal(out: Path) -> str | None:
    """Resumes a run; returns how its end differs from that of an undisturbed run."""
    if code := finish(train(out)):
        return f"resuming ends with {code}: {out.with_suffix('.log').read_text()[-300:]}"
    expected, resumed = undisturbed()[0], load_state(out / STATE)["model"]
    if not all(torch.equal(tensor, resumed[name]) for name, tensor in expected.items()):
        return "the weights differ"
    if leftovers := [path.name for path in out.iterdir() if path.name.startswith(".") and path.name != ".lock"]:
        return f"{leftovers[0]} is left"
    model, _ = load_model(out)
    return None if all(torch.equal(t, expected[n]) for n, t in model.state_dict().items()) else f"{WEIGHTS} differs"


def interrupted(number: signal.Signals, delay: float, folder: Path) -> str | None:
    """A signal after a fraction of the run's time."""
    child = train(folder / "run")
    time.sleep(delay * undisturbed()[1])
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, number)
    finish(child)
    return ends_equal(folder / "run")


def full_disk(limit: int, folder: Path) -> str | None:
    """No file may grow beyond `limit` bytes, as on a full disk: one sentence and exit code 1, or success."""
    code, log = finish(train(folder / "run", limit=limit)), (folder / "run.log").read_text()
    if code not in (0, 1) or "Traceback" in log:
        return f"ends with {code}: {log[-300:]}"
    return ends_equal(folder / "run")


def two_at_once(delay: float, folder: Path) -> str | None:
    """A second run in the same folder: one of them ends with 0, the other is refused."""
    first = train(folder / "run")
    time.sleep(delay * undisturbed()[1])
    words = ("train", "--out", str(folder / "run"), *RUN, "--seed", "4")
    codes = finish(start(folder / "second.log", *words)), finish(first)
    return None if sorted(codes) == [0, 2] else f"exit codes {codes}"


def killed_rank(number: signal.Signals, folder: Path) -> str | None:
    """A signal to one of two ranks under torchrun, which restarts them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "fastvit_triton.cli", "train"]
    command += ["--out", str(folder / "run"), "--resume", "auto", *RUN, "--parallel", "ddp", "--timeout", "0.5"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with open(folder / "log", "w") as log:
        agent = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        while not (folder / "run" / STATE).exists() and agent.poll() is None:
            time.sleep(0.05)
        ranks = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(int(ranks[-1]), number)
        code = agent.wait(timeout=300)
    done = code == 0 and load_state(folder / "run" / STATE)["progress"]["epoch"] == 2
    return None if done else f"ends with {code}: {(folder / 'log').read_text()[-300:]}"


def lost_log(damage: str, folder: Path) -> str | None:
    """A log or weights file that is missing or damaged after the last epoch is written again."""
    shutil.copytree(samples() / "run", folder / "run")
    name, kind = damage.split()
    if kind == "missing":
        (folder / "run" / name).unlink()
    else:
        (folder / "run" / name).write_bytes(b"\xff\x00" if kind == "overwritten" else b"")
    return ends_equal(folder / "run")


def trials(draw: random.Random) -> Iterator[tuple[str, Trial]]:
    """All faults, by the name under which they are counted."""
    run, tiny, shard = "run/training_state.pt", "tiny.safetensors", "shards/train/000000.tar"
    readers = {run: reads_state, tiny: reads_weights, "tiny.pt": reads_weights, shard: reads_shard}
    for i in range(40):
        number = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)[i % 4]
        yield f"run: {number.name}", partial(interrupted, number, draw.random())
    for _ in range(20):
        yield "run: full disk", partial(full_disk, int(10 ** draw.uniform(2, 6.3)))
    for name, kind in itertools.product((LOG, WEIGHTS), ("missing", "empty", "overwritten")):
        yield "run: lost or damaged log and weights", partial(lost_log, f"{name} {kind}")
    for _ in range(4):
        yield "run: a second run in the same folder", partial(two_at_once, draw.uniform(0.1, 0.8))
    for number in (signal.SIGKILL, signal.SIGSTOP) * 2:
        yield f"run: {number.name} to a rank", partial(killed_rank, number)
    for name, reads in readers.items():
        for i in range(64):
            change = partial(cut, i / 64)
            yield f"{Path(name).name}: cut", lambda f, n=name, c=change, r=reads: damaged(samples() / n, c, r, f)
    images = [f"images/train/cat/{i}.{kind}" for i, kind in enumerate(("jpg", "png", "webp", "tif"))]
    for name, reads in {run: reads_state, tiny: reads_weights, "tiny.pt": reads_weights}.items():
        for _ in range(200):
            change = partial(flip, draw.random(), draw.randrange(8))
            yield f"{Path(name).name}: one bit", lambda f, n=name, c=change, r=reads: damaged(samples() / n, c, r, f)
    for kind in HOSTILE:
        yield "files made to exhaust memory or time", partial(hostile, kind)
    for i in range(200):
        change = partial(flip, draw.random(), draw.randrange(8))
        yield "images: one bit", lambda f, n=images[i % 4], c=change: damaged(samples() / n, c, reads_image, f)


def memory(steps: int) -> float:
    """MiB by which the process grows over the second half of many training steps."""
    from fastvit_triton.train import Step, adamw

    model = create_model(MODEL, **TINY)
    optimizer, step = adamw(model, 1e-4, 0.05), Step()
    images, targets, sizes = torch.randn(2, 3, 16, 16), torch.tensor([0, 1]), []
    for number in range(steps):
        step(model, optimizer, images, targets, number)
        if number in (steps // 2 - 1, steps - 1):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            sizes.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
    return sizes[1] - sizes[0]


def campaign(seed: int, minutes: float, steps: int = 10_000, show: Callable[[str], None] = print) -> dict:
    """Tries the faults in a random order; returns rows of tried, survived and lost, and the growth of memory."""
    draw, end, rows = random.Random(seed), time.monotonic() + 60 * minutes, {}
    every = list(trials(draw))
    draw.shuffle(every)
    for name, trial in every:
        row = rows.setdefault(name, dict(fault=name, planned=0, tried=0, survived=0, lost=[]))
        row["planned"] += 1
        if time.monotonic() > end:
            continue
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                loss = trial(Path(folder))
            except (Exception, SystemExit) as error:  # the finding itself
                loss = f"{type(error).__name__}: {error}"
        row["tried"] += 1
        row["survived"] += loss is None
        if loss is not None:
            row["lost"].append(loss)
            show(f"{name}: {loss}")
    return dict(rows=[rows[name] for name in sorted(rows)], memory=dict(steps=steps, mib=round(memory(steps), 1)))


def main(words: list[str] | None = None) -> int:
    """Runs the campaign and writes faults.json; exit code 1 if something was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(words)
    torch.set_num_threads(1)  # forked processes cannot use the threads of this one
    began = time.monotonic()
    results = campaign(args.seed, args.minutes)
    facts = provenance() | dict(seed=args.seed, seconds=round(time.monotonic() - began)) | results
    write_text(args.out / "faults.json", as_json(facts))
    for row in results["rows"]:
        print(f"{row['fault']:45} {row['tried']:5} tried {row['survived']:5} survived {len(row['lost']):3} lost")
    print(f"memory: {results['memory']['mib']} MiB over the second half of {results['memory']['steps']:,} steps")
    return int(any(row["lost"] for row in results["rows"]))


if __name__ == "__main__":
    sys.exit(main())
