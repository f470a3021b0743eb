"""Launch parameters for one architecture: candidates as data, the fastest right one goes to kernels/tuned/<arch>.json.

    python -m benchmarks.tune [--arch sm_90] [--seconds 300] [--check] [--choices] [--adopt FILE]

On a GPU the candidates run and are measured; elsewhere they are compiled and the compile report's bound is read. A row
keeps how it was found, "measured" or "predicted", and a measured row is never replaced by a predicted one. Then the
dispatcher's choice, `benchmarks.choose`; with --choices that alone.
"""

import argparse
import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from fastvit_triton.files import replacing
from fastvit_triton.kernels import dispatch, launch
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.op import Op
from fastvit_triton.measure.compare import converted, leaves, named_leaves, outcome, verdict
from fastvit_triton.measure.timeout import Deadline, noting, told
from fastvit_triton.measure.timing import alternate

from . import choose
from .candidates import CANDIDATES, Config, Target, targets
from .op_cases import BY_NAME
from .result_file import Part

CHOICES = 60.0  # seconds of the part that are kept for the choices


class _Asked(dict):
    """A table that remembers which rows were looked up, and their defaults."""

    def __init__(self, rows: dict) -> None:
        super().__init__(rows)
        self.seen: dict[str, Config] = {}

    def get(self, row: str, default: Config | None = None) -> Config | None:
        found = super().get(row, default)
        self.seen.setdefault(row, found)
        return found


@contextlib.contextmanager
def trying(rows: dict[str, Config]) -> Iterator[_Asked]:
    """Inside, these rows stand before the table's; yields what was looked up."""
    original, asked = launch.table, _Asked(rows)

    def table(architecture: str) -> _Asked:
        for name, row in original(architecture).items():
            asked.setdefault(name, row)
        return asked

    launch.table = table
    try:
        yield asked
    finally:
        launch.table = original


def candidates(target: Target, call: Callable[[], object]) -> tuple[str, list[Config]]:
    """The full name of the target's row, and what to try: the row in use first."""
    with trying({}) as asked:
        call()
    name = next((n for n in asked.seen if n == target.row or n.startswith(f"{target.row}.")), None)
    if name is None:
        raise LookupError(f"{target.op} at {target.shape} reads {sorted(asked.seen)}, not {target.row}")
    inuse = {k: v for k, v in asked.seen[name].items() if k != "enable_fp_fusion"}
    return name, [inuse, *(c for c in CANDIDATES[target.row] if c != inuse)]


def arguments_of(target: Target, dtype: torch.dtype, device: torch.device) -> tuple[Op, dict]:
    """The op and random arguments of the target's shape."""
    tuned = BY_NAME[target.op]
    return tuned, tuned.inputs(target.shape, dtype, device)


def measure(
    target: Target,
    dtype: torch.dtype,
    device: torch.device,
    deadline: Deadline,
    around: Callable,
    most: int | None = None,
) -> dict:
    """Times every candidate, or the first `most`, that computes what the reference computes; a row for a file."""
    tuned, arguments = arguments_of(target, dtype, device)
    wide = converted(arguments, torch.float64)
    truth = outcome(tuned.reference, wide, named_leaves(wide) if target.backward else None)
    asked = named_leaves(arguments) if target.backward else None
    baseline = outcome(tuned.reference, arguments, asked)
    with around():
        name, configs = candidates(target, lambda: outcome(tuned.run, arguments, asked))
        tried, steps = {}, {}
        for config in configs[:most]:
            key, failed = json.dumps(config), {}
            tried[key] = dict(config=config)
            with noting(failed, "error"), deadline, trying({name: config}):
                said = verdict(outcome(tuned.run, arguments, asked), truth, baseline, dtype)
                tried[key] |= said.columns()
                if said.match:
                    steps[key] = partial(_step, name, config, tuned.run, arguments, target.backward)
            tried[key] |= failed
        timings, errors = alternate(steps, device, deadline, seconds=1.0, rounds=(1, 1) if most else (3, 30))
    for key, timing in timings.items():
        tried[key] |= dict(us=timing.us, q1=timing.q1, q3=timing.q3)
    for key, text in errors.items():
        tried[key]["error"] = text
    best = min(timings, key=lambda key: timings[key].us, default=None)
    inuse = json.dumps(configs[0])
    # a difference within the quartiles is noise: what is in use stays
    if inuse in timings and best is not None and timings[best].q3 >= timings[inuse].q1:
        best = inuse
    return dict(row=name, op=target.op, shape=target.shape, best=best and json.loads(best), tried=list(tried.values()))


def _step(name: str, config: Config, run: Callable, arguments: dict, backward: bool, copy: int) -> Callable[[], object]:
    def forward() -> list[torch.Tensor]:
        with trying({name: config}), torch.set_grad_enabled(backward):
            return [t for t in leaves(run(**arguments)) if t.is_floating_point()]

    if not backward:
        return forward
    outputs = [t for t in forward() if t.requires_grad]
    learn, given = list(named_leaves(arguments).values()), [torch.ones_like(t) for t in outputs]

    def timed() -> object:
        with trying({name: config}):
            return torch.autograd.grad(outputs, learn, given)

    return timed


def predict(target: Target, arch: str) -> dict:
    """The smallest bound of the compile report among candidates that it finds no fault with."""
    from .launches import compiled, record
    from .sass import PARTS, read
    from .static import bounds, violations

    tuned, arguments = arguments_of(target, torch.bfloat16, torch.device("cpu"))
    phase = "backward" if target.backward else "inference"
    name, configs = candidates(target, lambda: record(arch, tuned.run, **arguments))
    tried = []
    with ThreadPoolExecutor(2) as pool:
        for config in configs:
            with trying({name: config}):
                launches = [a for a in record(arch, tuned.run, **arguments)[phase] if _reads(a, name)]
            try:
                kernels = [compiled(launch, arch) for launch in launches]
            except Exception as error:
                tried.append(dict(config=config, error=told(error)))
                continue
            binaries = list(pool.map(read, kernels))
            faults = [
                f
                for a, b, k in zip(launches, binaries, kernels, strict=True)
                for f in violations(a, b, arch, k.asm["ttir"])
            ]
            us = sum(bounds(a, b, PARTS[arch])["together"] for a, b in zip(launches, binaries, strict=True))
            tried.append(dict(config=config, predicted_us=round(us, 2), faults=faults))
    right = [t for t in tried if not t.get("faults", ["error"])]
    best = min(right, key=lambda t: t["predicted_us"], default=None)
    # a bound that is 5 % lower is no reason to leave what is in use
    if right and tried[0] in right and best["predicted_us"] > 0.95 * tried[0]["predicted_us"]:
        best = tried[0]
    return dict(row=name, op=target.op, shape=target.shape, best=best and best["config"], tried=tried)


def _reads(launch: object, row: str) -> bool:
    """Whether a launch's kernel is the one that the row is for."""
    file, kernel = row.split(".")[:2]
    if row.startswith("attention.bwd."):  # it decides between one kernel and two
        return launch.name in ("attention._bwd_kernel", "attention._bwd_dq_kernel", "attention._bwd_dkdv_kernel")
    if row.startswith("mlp.fwd."):
        return launch.name in ("mlp._fwd_kernel", "linear._fwd_kernel", "layer_norm._stats_kernel")
    return launch.name == f"{file}._{'bwd_weight' if kernel == 'bwd' else kernel}_kernel"


def merged(table: dict, found: dict[str, Config], provenance: str, **facts: object) -> tuple[dict, list[str]]:
    """The table with these rows, and the names of those taken; a prediction replaces no measurement."""
    kept = {n for n, row in table.items() if provenance == "predicted" and row.get("provenance") == "measured"}
    taken = {n: dict(config=c, provenance=provenance, **facts) for n, c in found.items() if n not in kept}
    stays = {n: dict(choice=table[n]["choice"]) for n in taken if "choice" in table.get(n, {})}
    return table | {n: row | stays.get(n, {}) for n, row in taken.items()}, list(taken)


def write(
    arch: str,
    found: dict[str, Config],
    provenance: str,
    folder: Path = launch.TUNED,
    choices: Sequence[dict] = (),
    **facts: object,
) -> list[str]:
    """Puts rows and choices into the architecture's table; returns the names of the rows taken; see `merged`."""
    path = folder / f"{arch}.json"
    table, taken = merged(json.loads(path.read_text()) if path.exists() else {}, found, provenance, **facts)
    table = choose.merged(table, list(choices), provenance)
    lines = ",\n".join(f' "{name}": {json.dumps(row)}' for name, row in sorted(table.items()))
    with replacing(path) as temporary:
        temporary.write_text("{\n" + lines + "\n}\n")
    launch.table.cache_clear()
    dispatch.forget()
    return taken


def chosen(rows: list[dict]) -> dict[str, Config]:
    """Row → its best configuration; where several shapes read one row the first, which ViTs spend most time in."""
    found: dict[str, Config] = {}
    for row in rows:
        if row.get("best"):  # rows of choices have none
            found.setdefault(row["row"], row["best"])
    return found


def adopt(path: Path, folder: Path = launch.TUNED) -> list[str]:
    """Takes what a result file of `benchmarks.gpu` measured into the table of its architecture.

    Raises:
        ValueError: the file holds no measurement of a GPU.
    """
    held = json.loads(path.read_text())
    if held.get("part") != "tuning" or held.get("dry_run") or not held.get("gpu"):
        raise ValueError(f"{path} is no tuning result of a GPU; python -m benchmarks.gpu --only tuning makes one")
    rows = [row for row in held["rows"] if "arch" in row]
    choices = [row for row in rows if "who" in row]
    return write(rows[0]["arch"], chosen(rows), "measured", folder, choices, source=path.name) if rows else []


def run(part: Part, device: torch.device, around: Callable) -> None:
    """The sweep as a part of the GPU script, then the choices with what it found; `--adopt` takes its file."""
    arch = launch.architecture(device)
    for target in targets(part.dry):
        name = f"{target.row} {' '.join(f'{k}={v}' for k, v in target.shape.items())}"
        if part.deadline.left < CHOICES and not part.dry:
            part.not_reached.append(name)
            continue
        with part.row(name) as go:
            if go:
                row = measure(target, torch.bfloat16, device, part.deadline, around, 2 if part.dry else None)
                part.add(dict(case=name, arch=arch, **row))
    with trying(chosen(part.rows)):
        choose.run(part, arch, device, around)


def main() -> None:
    """Tunes and rewrites the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = launch.architecture(torch.device("cuda", 0)) if torch.cuda.is_available() else "sm_90"
    parser.add_argument("--arch", default=here, help="whose table is rewritten; predicted unless it is here")
    parser.add_argument("--seconds", type=float, default=300.0, help="no new row after so long")
    parser.add_argument("--check", action="store_true", help="print what would be written, and write nothing")
    parser.add_argument("--choices", action="store_true", help="the dispatcher's choice alone")
    parser.add_argument("--adopt", type=Path, metavar="FILE", help="take a tuning result of benchmarks.gpu instead")
    arguments = parser.parse_args()
    if arguments.adopt:
        print("taken:", *adopt(arguments.adopt))
        return
    deadline, rows, here = Deadline(arguments.seconds), [], torch.cuda.is_available() and arguments.arch == here
    for target in () if arguments.choices else targets():
        if deadline.over:
            break
        if here:
            kernels = partial(using_backend, "triton")
            row = measure(target, torch.bfloat16, torch.device("cuda", 0), deadline, kernels)
        else:
            row = predict(target, arguments.arch)
        print(row["row"], row["best"], *row["tried"], sep="\n  ")
        rows.append(row)
    if here:
        with tempfile.TemporaryDirectory() as folder:
            part = Part("choices", Path(folder), deadline)
            choose.run(part, arguments.arch, torch.device("cuda", 0), partial(using_backend, "triton"))
        choices = [row for row in part.rows if "who" in row]
    else:
        choices = choose.predicted(arguments.arch)
        print(*(f"{row['who']:5} {row['row']} {row['shape_class']}" for row in choices), sep="\n")
    found, provenance = chosen(rows), "measured" if here else "predicted"
    if arguments.check:
        print("found:", *found)
    else:
        print("taken:", *write(arguments.arch, found, provenance, choices=choices), f"and {len(choices)} choices")


if __name__ == "__main__":
    main()
