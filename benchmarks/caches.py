"""What was compiled for a GPU: filled in processes before anything is timed, and carried from one machine to the next.

Triton's and Inductor's caches lie in caches/, which git ignores. `archive` packs them; archives that were copied into
caches/ are unpacked by `use`. `compile_ahead` fills the folder where there is no GPU.
"""

import contextlib
import json
import multiprocessing
import os
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from triton.errors import TritonError

from fastvit_triton.measure.timeout import Deadline, TimedOut
from fastvit_triton.measure.variants import compiling, step_of
from fastvit_triton.measure.workers import count

from .launch_recorder import Launch, compiled, specialization
from .result_file import ROOT
from .rows import Line, traced

CACHES = ROOT / "caches"
FOLDERS = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
ARCHIVE, ARCHIVES, ALL = 16 * 2**20, 7, 40 * 2**20  # bytes of an archive, archives, bytes of all of them
HEAD = 128  # bytes of a file in an archive besides its contents and twice its name, at most


def use(folder: Path = CACHES) -> list[Path]:
    """Makes Triton and Inductor keep their caches in a folder, after unpacking its archives; returns the archives."""
    for variable, name in FOLDERS.items():
        os.environ[variable] = str(folder / name)
    archives = sorted(folder.glob("caches-*.zip"))
    for path in archives:
        with zipfile.ZipFile(path) as held:
            held.extractall(folder)
    for group in (folder / "triton").glob("*/__grp__*"):  # lists the kernel's other files by absolute paths
        paths = json.loads(group.read_text())["child_paths"]
        here = {name: str(group.parent / Path(path).name) for name, path in paths.items()}
        group.write_text(json.dumps({"child_paths": here}))
    return archives


def archive(out: Path, folder: Path = CACHES, largest: int = ARCHIVE, most: int = ARCHIVES, together: int = ALL) -> str:
    """Packs the caches of a folder into out/caches-<n>.zip and returns a line that says how many files fit.

    Folders that hold one kernel or graph are kept whole, the smallest first. `largest` and `together` are bytes of an
    archive and of all of them, `most` their number.
    """
    for path in out.glob("caches-*.zip"):
        path.unlink()
    groups: dict[Path, list[Path]] = {}
    for name in FOLDERS.values():
        for path in sorted((folder / name).rglob("*")):
            if path.is_file() and not any(part.startswith("tmp.") for part in path.parts):
                groups.setdefault(path.parent, []).append(path)
    sized = sorted((sum(_packed(path, folder) for path in paths), parent) for parent, paths in groups.items())
    number, used, total, left, files = 0, 0, 0, 0, 0
    for size, parent in sized:
        if used + size > largest:
            number, used = number + 1, 0
        if size > largest or number >= most or total + size > together:
            left += len(groups[parent])
            continue
        with zipfile.ZipFile(out / f"caches-{number}.zip", "a", zipfile.ZIP_DEFLATED) as held:
            for path in groups[parent]:
                held.write(path, path.relative_to(folder))
        used, total, files = used + size, total + size, files + len(groups[parent])
    return f"{files} compiled files in archives of {total / 2**20:.1f} MiB; {left} do not fit"


def _packed(path: Path, folder: Path) -> int:
    """Bytes of a file in an archive, at most."""
    return len(zlib.compress(path.read_bytes())) + 2 * len(str(path.relative_to(folder))) + HEAD


def compile_ahead(lines: list[Line], arch: str, show: Callable) -> int:
    """Compiles the kernels of ours that the lines launch, without a GPU, into Triton's cache; returns how many.

    Code that cannot be traced is left out. A GPU finds them if its Triton is of the same wheel.
    """
    found: dict[tuple, Launch] = {}
    for line in lines:
        arms = traced(line, arch).values() if line.build is not None else ()
        for launch in (launch for arm in arms for launch in arm.launches):
            found.setdefault((launch.kernel, *specialization(launch, arch)), launch)
    for number, launch in enumerate(found.values(), 1):
        with contextlib.suppress(TritonError):  # the measurement has a row for it
            compiled(launch, arch)
        show(f"{number} of {len(found)}: {launch.name}")
    return len(found)


def prepare(lines: list[Line], device: torch.device, dry: bool, deadline: Deadline, show: Callable) -> int:
    """Runs each arm once in processes, so that what it compiles is in the caches; returns the number of lines done.

    Failures are left to the measurement, which has a row for them. What is not finished at the deadline is stopped.
    """
    todo = [(line, str(device), dry) for line in lines if line.build is not None]
    finished = 0
    with multiprocessing.get_context("spawn").Pool(1 if dry else count(device), _alone) as pool:
        results = pool.imap_unordered(_compile, todo)
        for _ in todo:
            try:
                line = results.next(deadline.left)
            except multiprocessing.TimeoutError:
                break
            finished += 1
            show(f"compiled {line}")
    show(f"{finished} of {len(todo)} lines are compiled")
    return finished


def _alone() -> None:
    """Leaves the other processors to the other processes."""
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def _compile(job: tuple[Line, str, bool]) -> str:
    """Runs each arm of a line once, and returns the line's name."""
    line, device, dry = job
    assert line.build is not None  # of the caller
    with contextlib.suppress(Exception, TimedOut), compiling("eager" if dry else "inductor"):
        case = line.build(torch.device(device), dry)
        inputs = [case.inputs(0)]
        for variant in case.variants:
            if variant.name in line.arms and variant.reason is None:
                with contextlib.suppress(Exception, TimedOut):
                    step_of(case, variant.call, inputs, line.phase)(0)()
    return line.name
