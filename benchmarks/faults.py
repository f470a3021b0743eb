"""Faults of machines and files, applied to runs and to files: how many were tried, survived, and lost something.

    python -m benchmarks.faults [--out benchmarks/results] [--minutes 20] [--seed 0]

A run survives a fault if it can be resumed and ends with bitwise the weights of an undisturbed run. A file survives if
it is read unchanged or refused in one sentence (`ValueError`). Everything else is lost, and is named. POSIX only.
"""

import argparse
import contextlib
import dataclasses
import io
import itertools
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from fastvit_triton import create_model, load_model, load_weights, save_weights
from fastvit_triton.cli import main as cli
from fastvit_triton.measure.machine import provenance
from fastvit_triton.train.checkpoint import PREVIOUS, STATE, load_state, newest_state
from fastvit_triton.train.data.shards import pack, scan_shards
from fastvit_triton.train.data.transform import DECODE_ERRORS, read_image
from fastvit_triton.train.outputs import LOG, WEIGHTS

from .result_file import ROOT, as_json, write_text

MODEL = "vit_tiny_patch16_224"
TINY = dict(img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=3)
RUN = ("--epochs", "2", "--batch-size", "512", "--save-every", "1", "--device", "cpu", "--seed", "3")
SECONDS = 60  # in which a hostile file must have been made and refused, on a busy machine
Trial = Callable[[Path], str | None]  # in an empty folder; returns what was lost, or None


# Damaged and hostile files, and readers that tell whether a file was read as if undamaged.


class Late(Exception):
    """A file was not refused in time."""


@cache
def samples() -> Path:
    """A folder with a finished run, weights in two formats, shards, and images; it lives as long as the process."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    with contextlib.redirect_stdout(io.StringIO()):
        cli(["train", "--out", str(folder / "run"), *RUN])
    torch.manual_seed(0)
    model = create_model(MODEL, **TINY)
    save_weights(model, folder / "tiny.safetensors")
    torch.save(model.state_dict(), folder / "tiny.pt")
    for split, name, i in itertools.product(("train", "val"), ("cat", "dog"), range(12)):
        place = folder / "images" / split / name
        place.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((24, 20), 60).convert("RGB").save(place / f"{i}.{('jpg', 'png', 'webp', 'tif')[i % 4]}")
    pack(folder / "images", folder / "shards")
    return folder


def reads_state(path: Path) -> bool:
    """True if the state is whole, or is refused in favour of the previous one."""
    previous = load_state(samples() / "run" / PREVIOUS)
    shutil.copy(samples() / "run" / PREVIOUS, path.parent / PREVIOUS)
    state, sentence = newest_state(path.parent)
    expected = previous if sentence else load_state(samples() / "run" / STATE)
    return all(torch.equal(tensor, state["model"][name]) for name, tensor in expected["model"].items())


def reads_weights(path: Path) -> bool:
    """True if the weights are those of the undamaged file."""
    expected = load_model(samples() / "tiny.safetensors")[0].state_dict()
    if path.suffix == ".pt":
        model = create_model(MODEL, **TINY)
        load_weights(model, path)
    else:
        model, _ = load_model(path)
    return all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def reads_shard(path: Path) -> bool:
    """True if all images of the shard are found."""
    root = path.parent / "shards"
    shutil.copytree(samples() / "shards", root)
    (root / "index.json").unlink()  # would find any change of size
    shutil.copy(path, root / "train" / "000000.tar")
    return len(scan_shards(root, "train").files) == 24


def reads_image(path: Path) -> bool:
    """True if an image is decoded, to whatever pixels, or is refused as Pillow refuses images."""
    try:
        read_image(path)
    except DECODE_ERRORS:
        pass
    return True


def damaged(source: Path, change: Callable[[bytes], bytes], reads: Callable[[Path], bool], folder: Path) -> str | None:
    """A changed copy of a file is read as if unchanged, or is refused."""
    path = folder / source.name
    path.write_bytes(change(source.read_bytes()))
    try:
        return None if reads(path) else f"{source.name} is read with other contents"
    except ValueError as error:
        return None if "\n" not in str(error) else f"several lines: {error}"


def cut(share: float, content: bytes) -> bytes:
    """The first part of a file."""
    return content[: int(len(content) * share)]


def flip(where: float, bit: int, content: bytes) -> bytes:
    """A file with one bit changed."""
    changed = bytearray(content)
    changed[int(where * len(content))] ^= 1 << bit
    return bytes(changed)


def hostile(kind: str, folder: Path) -> str | None:
    """A file made to exhaust memory or time, or to start a program, is refused in time."""

    def late(*_: object) -> None:
        raise Late(f"{kind}: not refused within {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        HOSTILE[kind](folder)
    except ValueError as error:
        return None if "\n" not in str(error) else f"several lines: {error}"
    except DECODE_ERRORS:  # of images
        return None
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return f"{kind}: accepted"


def _config(folder: Path, **fields: object) -> None:
    model = create_model(MODEL, **TINY)
    header = {"layout": "fastvit_triton", "variant": MODEL}
    header["config"] = json.dumps(dataclasses.asdict(model.config) | fields)
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "a.safetensors", header
    )
    load_model(folder / "a.safetensors")


def _keys(folder: Path) -> None:
    entries = {f"k{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(10**6)}
    header = json.dumps(entries).encode()
    (folder / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    load_weights(create_model(MODEL, **TINY), folder / "a.safetensors")


def _npz(folder: Path) -> None:
    np.savez_compressed(folder / "a.npz", kernel=np.zeros((2**14, 2**14), np.float32))
    load_weights(create_model(MODEL, **TINY), folder / "a.npz")


def _shard(folder: Path, label: bytes = b"0", size: int | None = None, members: int = 1) -> None:
    place = folder / "train" / "000000.tar"
    place.parent.mkdir()
    image = io.BytesIO()
    Image.new("RGB", (8, 8)).save(image, "PNG")
    with tarfile.open(place, "w") as archive:
        for name, content in (("0.png", image.getvalue()), ("0.cls", label)):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    if size is not None:  # in the header of the second member, with its checksum
        content = bytearray(place.read_bytes())
        at = 512 + -(-len(image.getvalue()) // 512) * 512
        content[at + 124 : at + 136] = b"%011d\0" % size
        content[at + 148 : at + 156] = b" " * 8
        content[at + 148 : at + 156] = b"%06o\0 " % sum(content[at : at + 512])
        place.write_bytes(content)
    scan_shards(folder, "train")


def _postscript(folder: Path) -> None:
    (folder / "a.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    read_image(folder / "a.jpg")


def _pixels(folder: Path) -> None:
    Image.new("1", (13_000, 13_000)).save(folder / "a.png")
    read_image(folder / "a.png")


HOSTILE: dict[str, Callable[[Path], None]] = {
    **{
        f"config with {name} {value}": lambda folder, given={name: value}: _config(folder, **given)
        for name, value in (
            ("depth", 10**6),
            ("embed_dim", 2**40),
            ("num_classes", 10**18),
            ("mlp_ratio", float("inf")),
            ("mlp_ratio", -1),
            ("reg_tokens", -1),
            ("head_dim", -4),
            ("head_dim", 0),
            ("eps", "x"),
        )
    },
    "safetensors with a million keys": _keys,
    "npz that expands to 1 GB": _npz,
    "class number 99999999999": lambda folder: _shard(folder, b"99999999999"),
    "member of negative size": lambda folder: _shard(folder, size=-1000),
    "member larger than its shard": lambda folder: _shard(folder, size=10**10),
    "PostScript in a .jpg": _postscript,
    "image of 169 million pixels": _pixels,
}


# Runs that are interrupted.


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
