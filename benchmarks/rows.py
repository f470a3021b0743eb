"""Rows of measurements on a GPU: their keys, which of them exist, and in what order the others are measured.

A row is found by the GPU, its case, phase and arm, the kernels of ours that the arm launches, and the versions of torch
and Triton. A row that a committed file has is not measured again. Files without keys, of before, are never matched.
"""

import contextlib
import functools
import hashlib
import importlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime.jit import JITFunction

from fastvit_triton.expected.trace import tracing
from fastvit_triton.kernels import OPS, launch
from fastvit_triton.kernels.launch import targeting
from fastvit_triton.measure.machine import gpu_name, installed, provenance
from fastvit_triton.measure.variants import Case, step_of

from .fingerprint import code
from .launch_recorder import Launch, launch_of
from .result_file import ROOT, ResultFile

RESULTS = ROOT / "benchmarks" / "results"
KEY = ("gpu", "case", "phase", "arm", "kernels", "torch", "triton")
NOT_BUILT = "not built"  # reason of an arm whose kernel does not exist yet

Key = tuple[object, ...]


def key_of(row: dict) -> Key | None:
    """The key of a row; None if it was measured before rows had keys."""
    return tuple(row.get(name) for name in KEY) if "kernels" in row else None


def is_result(row: dict) -> bool:
    """True if a row says how fast or how correct an arm is; an error or a missing library is tried again."""
    return "error" not in row and "reason" not in row and "skipped" not in row


def done(rows: list[dict], errors: bool) -> set[Key]:
    """Keys of rows that are not measured again; of those with errors only if `errors`."""
    keys = {key_of(row) for row in rows if is_result(row) or (errors and "error" in row)}
    return {key for key in keys if key is not None}


def committed(folder: Path = RESULTS) -> list[dict]:
    """Rows of all result files of GPUs, oldest first; rows of before keys have the GPU, date, commit… of their file."""
    files = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    files = [held for held in files if isinstance(held, dict) and held.get("dry_run") is False and held.get("gpu")]
    files.sort(key=lambda held: held["date"])
    return [_facts(held) | row for held in files for row in held["rows"]]


def _facts(held: dict) -> dict:
    """Columns that rows without a key do not have."""
    versions = {name: held["packages"][name] for name in ("torch", "triton") if name in held["packages"]}
    return dict(gpu=held["gpu"], date=held["date"], commit=held["commit"]) | versions


def stamp(dry: bool) -> dict:
    """Columns of every row of a run: GPU, versions, date and commit."""
    facts = provenance()
    versions = {name: installed(name) for name in ("torch", "triton")}
    return dict(gpu="dry run" if dry else gpu_name(), **versions, date=facts["date"], commit=facts["commit"])


@dataclass(frozen=True)
class Traced:
    """What a call would launch."""

    kernels: str  # fingerprint of our kernels; "" if there are none
    flops: int  # of products going forward
    launches: tuple[Launch, ...] = ()  # of our kernels; none if the call cannot be traced


def traced(line: "Line", arch: str) -> dict[str, Traced]:
    """Traces each arm of a line on an architecture, the baseline first; nothing runs, and no GPU is needed."""
    assert line.build is not None  # a line with arms
    with targeting(arch):
        try:
            with tracing():  # without the time and memory of random weights
                case = line.build(torch.device("cpu"), False)
        except RuntimeError:  # buffers of known values cannot be copied there
            case = line.build(torch.device("cpu"), False)
        variants = {variant.name: variant for variant in case.variants}
        arms = (case.variants[0].name, *line.arms)
        calls = {arm: variants[arm].eager or variants[arm].call for arm in arms if variants[arm].reason is None}
        distinct = {id(call): call for call in calls.values()}
        phase = "training" if line.phase == "step" else line.phase  # the optimiser launches no kernel of ours
        found = {each: _traced(case, call, phase) for each, call in distinct.items()}
        return {arm: found[id(calls[arm])] if arm in calls else Traced("", 0) for arm in arms}


def _traced(case: Case, call: Callable, phase: str) -> Traced:
    """Traces a call. The fingerprint covers the code of the kernels, their compile-time arguments and launch options.

    That of code that cannot be traced covers all kernels.
    """
    with tracing() as events, _seeing() as found:
        try:
            inputs = [case.inputs(0)]
            step_of(case, call, inputs, "forward")(0)()
            flops = events.count.flops
            if phase != "forward":
                found.clear()
                step_of(case, call, inputs, phase)(0)()
        # Any error: code that reads values or is captured from an example, so that its kernels are not known.
        except Exception:
            return Traced(every_kernel(), 0)
    texts = {f"{code(each.kernel)} {each.config}" for each in found}
    return Traced(_digest(sorted(texts)) if texts else "", flops, tuple(found))


@contextlib.contextmanager
def _seeing() -> Iterator[list[Launch]]:
    """Context in which launches are also added to a list."""
    before, found = launch.run, list[Launch]()

    def run(*given: Any) -> None:
        found.append(launch_of(*given))
        before(*given)

    with patch.object(launch, "run", run):
        yield found


@functools.cache
def every_kernel(op: str | None = None) -> str:
    """Fingerprint of all kernels, or of those that an op can launch, with their tuned launch parameters."""
    homes = {each.run.__module__ for each in OPS if op in (None, each.name)}
    modules = _uses(homes)
    kernels = {f"{f.fn.__module__}.{n}": f for m in modules for n, f in vars(m).items() if isinstance(f, JITFunction)}
    codes = [f"{name} {code(f)}" for name, f in sorted(kernels.items()) if name.startswith("fastvit_triton.")]
    stems = {m.__name__.rpartition(".")[2] for m in modules}
    tables = [json.loads(path.read_text()) for path in sorted(launch.TUNED.glob("*.json"))]
    tuned = [f"{name} {row}" for table in tables for name, row in table.items() if name.partition(".")[0] in stems]
    return _digest(codes + tuned)


def _uses(names: set[str]) -> list[ModuleType]:
    """Modules of kernels that these use, by the functions and modules among their globals, in order of their names."""
    found: dict[str, ModuleType] = {}
    todo = list(names)
    while todo:
        module = importlib.import_module(name := todo.pop())
        found[name] = module
        used = {
            v.__name__ if isinstance(v, ModuleType) else getattr(v, "__module__", "") for v in vars(module).values()
        }
        new = {each for each in used if str(each).startswith("fastvit_triton.kernels.")} - found.keys()
        new |= {f"{name}_backward"} & set(_backward())  # imported when it is first called
        todo += [each for each in new - found.keys() if not hasattr(sys.modules.get(each), "__path__")]
    return [found[name] for name in sorted(found)]


def _backward() -> list[str]:
    """Modules of backward passes."""
    return [f"fastvit_triton.kernels.{path.stem}" for path in Path(launch.__file__).parent.glob("*_backward.py")]


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Line:
    """One entry of the list: arms of a case in one phase, which are measured together."""

    section: str  # of `SECTIONS`
    case: str  # name of the case; several lines may have arms of the same
    phase: str = ""  # of `Case`
    arms: tuple[str, ...] = ()  # names of the variants besides the first, the baseline
    # what the rows are worth; a line comes before those of its section that are worth less per second
    value: float = 1.0
    build: Callable[[torch.device, bool], Case] | None = None  # (device, dry) → the case
    # measures a line that has no arms and adds its rows; then there is no `build`
    run: Callable[[ResultFile, torch.device], None] | None = None
    seconds: float = 0.2  # about how long each arm is timed
    copies: int = 2  # sets of inputs
    latency: bool = False  # see `timing.Clock`
    # expected seconds of an arm that was never measured, by name; "" for all others
    default: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Unique name."""
        return " ".join(filter(None, (self.case, self.phase, " | ".join(self.arms))))


def remaining(line: Line, found: set[Key], facts: dict, arch: str) -> Line | None:
    """The line with the arms whose rows are not in `found`; None if it has all. `facts` are columns of new rows."""
    if line.run is not None or not any(key[1:3] == (line.case, line.phase) for key in found):
        return line
    base, *arms = traced(line, arch).items()

    def is_missing(arm: str, one: Traced) -> bool:
        row = dict(facts, case=line.case, phase=line.phase, arm=arm, kernels=one.kernels)
        return key_of(row) not in found

    left = tuple(arm for arm, one in arms if is_missing(arm, one))
    return replace(line, arms=left) if left or is_missing(*base) else None


COMPILED, AUTOTUNED, PLAIN = 8.0, 35.0, 0.7  # seconds of an arm that was never measured, by its name


def expected(line: Line, earlier: dict[tuple, float]) -> float:
    """Seconds that a line is expected to take: those of earlier rows of its arms, else `default` or by the names."""

    def of(arm: str) -> float:
        usual = AUTOTUNED if "max-autotune" in arm else COMPILED if "compile" in arm else PLAIN
        usual = line.default.get(arm, line.default.get("", usual))
        return earlier.get((line.case, line.phase, arm), usual)

    return sum(map(of, line.arms)) + (PLAIN if line.arms else of(""))


def seconds_of(rows: Iterable[dict]) -> dict[tuple, float]:
    """(case, phase, arm) → seconds that the newest row took."""
    return {(row["case"], row.get("phase", ""), row.get("arm", "")): row["seconds"] for row in rows if "seconds" in row}


def ordered(lines: Iterable[Line], earlier: dict[tuple, float], shares: dict[str, float]) -> list[tuple[Line, float]]:
    """The lines with their expected seconds, in the order in which they are measured.

    Sections come in the order of `shares`, and in each the most valuable line per second first. A section has a share
    of seconds, so that later ones are reached; what exceeds it follows after the last section.
    """
    first: list[tuple[Line, float]] = []
    later: list[tuple[Line, float]] = []
    by_section: dict[str, list[tuple[Line, float]]] = {section: [] for section in shares}
    for line in lines:
        by_section[line.section].append((line, expected(line, earlier)))
    for section, found in by_section.items():
        spent = 0.0
        for line, seconds in sorted(found, key=lambda pair: -pair[0].value / pair[1]):
            spent += seconds
            (first if spent <= shares[section] or spent == seconds else later).append((line, seconds))
    return first + later


def reached(order: list[tuple[Line, float]], seconds: float) -> list[tuple[Line, float, float | None]]:
    """Each line with its expected seconds and when it would start; None if the time left is too short for it."""
    found: list[tuple[Line, float, float | None]] = []
    spent = 0.0
    for line, takes in order:
        fits = spent + takes <= seconds
        found.append((line, takes, spent if fits else None))
        spent += takes * fits
    return found
