"""Launch parameters for one architecture: candidates as data, the fastest right one goes to kernels/tuned/<arch>.json.

    python -m benchmarks.tune [--arch sm_90] [--seconds 120] [--check]

On a GPU the candidates run and are measured; elsewhere they are compiled and the compile report's bound is read. A row
keeps how it was found, "measured" or "predicted", and a measured row is never replaced by a predicted one.
"""

import argparse
import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from fastvit_triton.files import replacing
from fastvit_triton.kernels import op
from fastvit_triton.kernels.op import Op

from .match import converted, leaves, named_leaves, outcome, verdict
from .ops import BY_NAME
from .record import Deadline, Part, told
from .timing import alternate

Config = dict[str, int]


def _attention(*blocks: tuple[int, int, int, int]) -> tuple[Config, ...]:
    return tuple(dict(BLOCK_M=m, BLOCK_N=n, num_warps=w, num_stages=s) for m, n, w, s in blocks)


def _product(columns: str, *blocks: tuple[int, ...]) -> tuple[Config, ...]:
    names = ("BLOCK_M", columns, "BLOCK_K", "PARTS", "num_warps", "num_stages")
    extra = dict(GROUP=8) if columns == "BLOCK_F" else {}
    return tuple(dict(zip(names, block, strict=True)) | extra for block in blocks)


# row of a table, without the width that ends attention's → candidates beside the row in use and the kernel's default
CANDIDATES: dict[str, tuple[Config, ...]] = {
    "attention.fwd": _attention(
        (64, 64, 4, 1), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 4, 2), (128, 128, 8, 2),
        (64, 128, 4, 2), (256, 64, 8, 2), (64, 32, 4, 3), (128, 32, 8, 2),
    ),
    "attention.bwd_dq": _attention((64, 64, 4, 1), (64, 64, 4, 2), (64, 32, 4, 2), (128, 64, 8, 1), (128, 32, 8, 2)),
    "attention.bwd_dkdv": _attention((32, 64, 4, 1), (64, 64, 4, 1), (32, 128, 8, 1), (64, 128, 8, 1), (32, 64, 4, 2)),
    "linear.fwd.half": _product(
        "BLOCK_F", (128, 128, 64, 4, 8, 3), (128, 128, 64, 4, 4, 3), (128, 128, 64, 2, 8, 3), (128, 128, 32, 4, 4, 4),
        (128, 256, 64, 4, 8, 3), (256, 128, 64, 4, 8, 3), (64, 128, 64, 4, 4, 3), (128, 64, 64, 2, 4, 4),
        (64, 64, 64, 2, 4, 4), (128, 128, 64, 4, 8, 4),
    ),
    "linear.fwd.gated": _product(
        "BLOCK_F", (128, 128, 64, 4, 8, 3), (128, 64, 64, 4, 4, 3), (128, 64, 64, 4, 8, 3), (64, 128, 64, 4, 8, 3)
    ),
    "patch_embed.fwd.half": _product(
        "BLOCK_D", (128, 128, 64, 4, 4, 3), (128, 128, 64, 4, 8, 3), (128, 64, 64, 2, 4, 3), (64, 128, 64, 4, 4, 3)
    ),
    "patch_embed.bwd.half": tuple(
        dict(BLOCK_M=m, BLOCK_D=d, BLOCK_K=k, num_warps=w, num_stages=s)
        for m, d, k, w, s in ((64, 128, 128, 8, 2), (64, 128, 128, 8, 3), (32, 128, 128, 8, 3), (64, 64, 128, 4, 3))
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A call whose launches read the rows to be tuned; `backward` rows are timed in its backward pass."""

    op: str
    shape: dict[str, int]
    row: str
    backward: bool = False


def targets(dry: bool = False) -> list[Target]:
    """What most ViT time goes to, first."""
    B = 64 if not dry else 1
    shrink = (lambda n: n) if not dry else (lambda n: max(n // 48, 8))
    D, N, F = shrink(768), shrink(197), shrink(3072)
    found = [Target("linear", dict(B=B, N=N, K=D, F=F, norm=1), "linear.fwd.half")]
    for width in (64, 80) if not dry else (16,):
        case = dict(B=B, H=12 if not dry else 1, Nq=N, Nk=N, D=width, Dv=width)
        for kernel in ("fwd", "bwd_dq", "bwd_dkdv"):
            found.append(Target("attention", case, f"attention.{kernel}", kernel != "fwd"))
    patches = dict(
        B=B, C=3, H=shrink(224) // 8 * 8, W=shrink(224) // 8 * 8, P=16 if not dry else 8, D=D, T=1, pos_prefix=1
    )
    found.append(Target("mlp", dict(B=B, N=N, D=D, F=shrink(2048), swiglu=1), "linear.fwd.gated"))
    found.append(Target("patch_embed", patches, "patch_embed.fwd.half"))
    return [*found, Target("patch_embed", patches, "patch_embed.bwd.half", True)]


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
    original, asked = op._table, _Asked(rows)

    def table(architecture: str) -> _Asked:
        for name, row in original(architecture).items():
            asked.setdefault(name, row)
        return asked

    op._table = table
    try:
        yield asked
    finally:
        op._table = original


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
            key = json.dumps(config)
            try:
                with deadline, trying({name: config}):
                    said = verdict(outcome(tuned.run, arguments, asked), truth, baseline, dtype)
                tried[key] = dict(config=config, **said.columns())
                if said.match:
                    steps[key] = partial(_step, name, config, tuned.run, arguments, target.backward)
            except Exception as error:
                tried[key] = dict(config=config, error=told(error))
        timings, errors = alternate(steps, device, deadline, seconds=0.0 if most else 1.0, rounds=(3, 30))
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
    endings = {
        "fwd": "_fwd_kernel",
        "bwd_dq": "_bwd_dq_kernel",
        "bwd_dkdv": "_bwd_dkdv_kernel",
        "bwd": "_bwd_weight_kernel",
    }
    return launch.name == f"{file}.{endings[kernel]}"


def write(arch: str, found: dict[str, Config], provenance: str, folder: Path = op.TUNED, **facts: object) -> list[str]:
    """Puts rows into the architecture's table and returns their names; a prediction replaces no measurement."""
    path = folder / f"{arch}.json"
    table = json.loads(path.read_text()) if path.exists() else {}
    changed = []
    for name, config in found.items():
        row = table.get(name, {})
        if provenance == "predicted" and row.get("provenance") == "measured":
            continue
        table[name] = dict(config=config, provenance=provenance, **facts)
        changed.append(name)
    lines = ",\n".join(f' "{name}": {json.dumps(row)}' for name, row in sorted(table.items()))
    with replacing(path) as temporary:
        temporary.write_text("{\n" + lines + "\n}\n")
    op._table.cache_clear()
    return changed


def run(part: Part, device: torch.device, around: Callable, folder: Path) -> None:
    """The sweep as a part of the GPU script: results to its file, the table to `folder` for a person to look at."""
    arch, found = op._architecture(device.type, device.index), {}
    for target in targets(part.dry):
        name = f"{target.row} {' '.join(f'{k}={v}' for k, v in target.shape.items())}"
        with part.row(name) as go:
            if go:
                row = measure(target, torch.bfloat16, device, part.deadline, around, 2 if part.dry else None)
                part.add(dict(case=name, arch=arch, **row))
                found.setdefault(row["row"], row["best"])
    best = {name: config for name, config in found.items() if config}
    if best and device.type == "cuda":
        write(arch, best, "measured", folder)


def main() -> None:
    """Tunes and rewrites the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = op._architecture("cuda", 0) if torch.cuda.is_available() else "sm_90"
    parser.add_argument(
        "--arch", default=here, help="architecture whose table is rewritten; predicted unless it is here"
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="no new row after so long")
    parser.add_argument("--check", action="store_true", help="print what would be written, and write nothing")
    arguments = parser.parse_args()
    deadline, found = Deadline(arguments.seconds), {}
    measured = torch.cuda.is_available() and arguments.arch == here
    for target in targets():
        if deadline.over:
            break
        if measured:
            row = measure(target, torch.bfloat16, torch.device("cuda", 0), deadline, contextlib.nullcontext)
        else:
            row = predict(target, arguments.arch)
        print(row["row"], row["best"], *row["tried"], sep="\n  ")
        if row["best"]:
            found.setdefault(row["row"], row["best"])
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if arguments.check else op.TUNED
        print("changed:", *write(arguments.arch, found, "measured" if measured else "predicted", folder))


if __name__ == "__main__":
    main()
