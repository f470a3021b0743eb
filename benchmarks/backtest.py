"""Compares the model of expected time with published throughput of timm's models: eager PyTorch and torch.compile.

    python -m benchmarks.backtest                          the table of benchmarks/published/timm.csv
    python -m benchmarks.backtest --table FILE.csv --json  another table with the same columns
    python -m benchmarks.backtest --measured               whole models that this project measured
    python -m benchmarks.backtest --counts FILE            keep the work of the models in FILE, and read it from there

Work is counted from shapes (fastvit_triton/expected/), which takes a second or two for a model, and times come from
rates.json, whose constants were fitted to the rows of the models that `is_fitted` names, and to no others. Errors are
|predicted ÷ published − 1| of images per second; the gain is that of torch.compile over eager.

Not predicted are models that cannot be counted, families whose fitted rows are outside BAND, except the eleven of
ALWAYS, and eager rows of models with an operator whose time is not modelled (`expected.work.UNMODELLED`). Held-out rows
decide nothing here. Errors are printed with and without what is excluded by the last two rules.
"""

import argparse
import csv
import hashlib
import json
import os
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastvit_triton import optimize
from fastvit_triton.expected.count import traced, weightless
from fastvit_triton.expected.gpus import Device, devices, gpus
from fastvit_triton.expected.times import call_us, family, with_ours
from fastvit_triton.expected.work import UNMODELLED, GpuWork, ours, work_of, work_of_events
from fastvit_triton.files import replacing
from fastvit_triton.kernels.settings import forcing
from fastvit_triton.measure.machine import provenance

from . import drop_in
from .result_file import as_json, write_text
from .rows import committed

COMMAND = "python -m benchmarks.backtest --out benchmarks/results/backtest.json"
COMMAND_MEASURED = "python -m benchmarks.backtest --measured --out benchmarks/results/backtest-measured.json"
TABLE = Path(__file__).with_name("published") / "timm.csv"
ALWAYS = ("vit", "deit", "dinov3", "rope", "eva", "beit", "swin", "cait", "siglip", "flexivit", "samvit")
FITTED = ("vit", "dinov3", "rope", "eva", "swin")  # of the models of other families half
BAND = (0.1, 0.25)  # median and 90th percentile of the errors of a family's fitted rows, up to which it is predicted
# GPU whose eager runs used timm's fast norm: its LayerNorms take no longer in eager than their bytes in 16 bits
FAST_NORM = ("rtx4090",)
MODES = ("eager", "compile", "eager training", "compile training")
OURS = ("optimize", "optimize training", "fused")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class Row(NamedTuple):
    """A published row and its prediction."""

    gpu: str  # short name, such as rtx4090
    # "eager", "compile" or "optimize", of inference or with " training" of a forward and backward pass; or "fused": an
    # engine of hand-tuned kernels, compared with ours at expected rates
    mode: str
    dtype: str  # "amp fp16", "bf16", …
    model: str  # timm's name
    img_size: int  # side in pixels
    batch: int  # number of images
    published: float  # images per second
    predicted: float | None = None  # images per second, or None
    why: str | None = None  # why there is no prediction, or why it is excluded; or None

    @property
    def key(self) -> str:
        """Name of its counts."""
        more = " fast norm" * (self.mode == "eager" and self.gpu in FAST_NORM)
        more = f" on {self.gpu} {self.batch} {self.mode}" if self.mode not in ("eager", "compile") else more
        return f"{self.model} {self.img_size} {self.dtype}{more}"

    @property
    def error(self) -> float:
        """|predicted ÷ published − 1|."""
        assert self.predicted is not None
        return abs(self.predicted / self.published - 1)


def is_fitted(name: str) -> bool:
    """True if the constants may be fitted to this model: those of FITTED, and half of the others, by their names."""
    return family(name) in FITTED or _is_even(name)


def is_family_fitted(name: str) -> bool:
    """As `is_fitted`, but half of the other families, by their names: the others are held out with all their models."""
    return family(name) in FITTED or _is_even(family(name))


def _is_even(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % 2 == 0


def read(path: Path) -> list[Row]:
    """The rows of a table; ValueError if a column is missing or a value is no number."""
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    columns = ("gpu", "mode", "dtype", "model", "img_size", "batch", "images_per_second")
    missing = [name for name in columns if not lines or name not in lines[0]]
    if missing:
        raise ValueError(f"{path} lacks the columns {', '.join(missing)}; use those of {TABLE.name}")
    rows = []
    for line, r in enumerate(lines, 2):
        try:
            sizes = int(r["img_size"]), int(r["batch"]), float(r[columns[-1]])
        except ValueError as error:
            raise ValueError(f"line {line} of {path}: {error}") from error
        rows.append(Row(r["gpu"], r["mode"], r["dtype"], r["model"], *sizes))
    return rows


def measured(rows: Iterable[dict]) -> list[Row]:
    """Whole models of timm among rows of result files, without steps of an optimiser."""
    modes = {"eager": "eager", "torch.compile": "compile", "optimize": "optimize"}
    return [
        Row(one.gpu, modes[arm] + one.training * " training", "bf16", one.name, 224, one.batch, one.batch / us * 1e6)
        for one in drop_in.models(rows)
        if one.whole and one.name and one.gpu and one.facts["phase"] != "step"
        for arm, us in one.us.items()
        if arm in modes
    ]


def counted(key: str) -> dict[str, Any]:
    """What a model has a GPU do, as data: {"eager": [[times, *kernel], …], "compiled": …}, or {"why": sentence}."""
    import timm
    from timm.layers import set_fast_norm

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    key, _, run = key.partition(" on ")
    name, size, dtype = key.removesuffix(" fast norm").split(" ", 2)
    amp, _, precision = dtype.rpartition(" ")
    set_fast_norm(key.endswith("fast norm"))
    try:
        try:
            with weightless():
                model = _built(timm, name, int(size))
        except RuntimeError:  # its constructor computes with random numbers
            model = _built(timm, name, int(size))
        shape = (model.pretrained_cfg["input_size"][0], int(size), int(size))
        weights = torch.float32 if amp else DTYPES[precision]
        if run:
            gpu, batch, mode = run.split(maxsplit=2)
            images = torch.empty(int(batch), *shape, dtype=weights, device="meta")
            return {mode: [[times, *kernel] for kernel, times in _at_batch(model.to(weights), images, gpu, mode)]}
        call = work_of(model, shape, weights, DTYPES[precision] if amp else None)
    # Any error: hundreds of models run timm's code, and one that cannot be counted is recorded with its reason.
    except Exception as error:
        return {"why": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    finally:
        set_fast_norm(False)
    return {mode: [[times, *kernel] for kernel, times in getattr(call, mode)] for mode in ("eager", "compiled")}


def _at_batch(model: torch.nn.Module, images: torch.Tensor, gpu: str, mode: str) -> tuple[tuple[GpuWork, int], ...]:
    kind, _, training = mode.partition(" ")
    if kind in ("eager", "compile"):
        call = work_of_events(traced(model, None, True, (images,), {}).events)
        return call.eager if kind == "eager" else call.compiled
    optimize(model.eval())
    if kind == "optimize":
        return ours(traced(model, gpus()[gpu], bool(training), (images,), {}).events)
    with forcing("fused"):
        return ours(traced(model, gpus()[gpu], False, (images,), {}, frozen=True).events)


def _built(timm: Any, name: str, size: int) -> torch.nn.Module:
    model = timm.create_model(name)
    if model.pretrained_cfg["input_size"][-1] == size:
        return model
    try:
        return timm.create_model(name, img_size=size)
    except TypeError:  # a convolutional model takes any size
        return model


def counts(rows: Iterable[Row], known: dict[str, Any], jobs: int, kept: Path | None) -> dict[str, Any]:
    """The counts of all rows; those that `known` lacks are added to it and written to `kept`."""
    missing = sorted({row.key for row in rows} - set(known))
    if missing:
        with ProcessPoolExecutor(jobs, mp_context=torch.multiprocessing.get_context("spawn")) as pool:
            for n, (key, count) in enumerate(zip(missing, pool.map(counted, missing, chunksize=4), strict=True), 1):
                known[key] = count
                if kept is not None and (n % 100 == 0 or n == len(missing)):
                    with replacing(kept) as temporary:
                        temporary.write_text(json.dumps(known))
    return known


def work(found: Mapping[str, Any], mode: str) -> list[tuple[GpuWork, int]]:
    """The kernels of a mode in the counts of a model."""
    kernels = found["compiled" if mode == "compile" else mode]
    return [
        (GpuWork(kind, nbytes, flops, tuple(size), tuple(step)), n) for n, kind, nbytes, flops, size, step in kernels
    ]


def predicted(
    rows: Iterable[Row],
    known: Mapping[str, Any],
    fitted: Mapping[str, float] | None = None,
    sheets: Mapping[str, Device] | None = None,
) -> list[Row]:
    """The rows with their predictions, from these constants and GPUs, or those of rates.json."""
    predictions, sheets = [], devices() if sheets is None else sheets
    for row in rows:
        count = known[row.key]
        if row.gpu not in sheets:
            predictions.append(row._replace(why=f"no rates of {row.gpu}"))
        elif row.mode not in (*MODES, *OURS):
            predictions.append(row._replace(why=f"no model of {row.mode}"))
        elif "why" in count:
            predictions.append(row._replace(why=count["why"]))
        else:
            host = row.mode.removesuffix(" training") if row.mode in MODES else None
            rates = fitted if row.mode in ("eager", "compile") else with_ours(gpus()[row.gpu], 1)
            kernels = work(count, row.mode)
            us = call_us(kernels, sheets[row.gpu], row.batch, host, rates)
            unknown = sorted({kernel.kind for kernel, _ in kernels} & set(UNMODELLED))
            why = f"no model of the time of {', '.join(unknown)}" if unknown else None
            predictions.append(row._replace(predicted=row.batch / us * 1e6, why=why))
    return predictions


def excluded(rows: Iterable[Row]) -> dict[str, dict[str, float | int]]:
    """Families that are not predicted: errors of their fitted rows, which are outside BAND."""
    groups = defaultdict(list)
    for row in rows:
        if row.predicted is not None and row.why is None and is_fitted(row.model) and family(row.model) not in ALWAYS:
            groups[family(row.model)].append(row)
    by_family = {kind: errors(group) for kind, group in sorted(groups.items())}
    return {kind: one for kind, one in by_family.items() if one["median"] > BAND[0] or one["p90"] > BAND[1]}


def without_excluded(rows: Iterable[Row]) -> list[Row]:
    """The rows without the predictions that are excluded, which gives them a reason."""
    rows = list(rows)
    outside = excluded(rows)
    why = {kind: f"fitted rows of {kind}: median error {one['median']:.0%}, 90th percentile {one['p90']:.0%}"
           for kind, one in outside.items()}  # fmt: skip
    rows = [row._replace(why=row.why or why.get(family(row.model))) for row in rows]
    return [row if row.why is None else row._replace(predicted=None) for row in rows]


def gains(rows: Iterable[Row]) -> list[Row]:
    """Rows of the gain of torch.compile over eager, published and predicted, of models with both."""
    pairs = defaultdict(dict)
    for row in rows:
        if row.predicted is not None:
            pairs[row.gpu, row.dtype, row.model, row.img_size][row.mode] = row
    return [
        two["compile"]._replace(
            mode="gain",
            published=two["compile"].published / two["eager"].published,
            predicted=two["compile"].predicted / two["eager"].predicted,
        )
        for two in pairs.values()
        if {"eager", "compile"} <= set(two)
    ]


def errors(rows: Iterable[Row]) -> dict[str, float | int]:
    """Number of rows, median, 90th percentile and largest error."""
    ordered = sorted(row.error for row in rows if row.predicted is not None)
    if not ordered:
        return {"predicted": 0}
    last = len(ordered) - 1
    figures = {"median": ordered[last // 2], "p90": ordered[round(0.9 * last)], "worst": ordered[-1]}
    return {"predicted": len(ordered)} | {name: round(value, 4) for name, value in figures.items()}


def summary(rows: list[Row]) -> dict[str, Any]:
    """Errors by GPU, mode, family, and whether the constants were fitted to them; with and without what is excluded."""
    kept = without_excluded(rows)
    every = [*rows, *gains(rows)]
    inside = [*kept, *gains(kept)]
    measured = [row for row in inside if row.mode != "gain"]

    def by(of: Any, some: Iterable[Row]) -> dict[str, dict]:
        groups = defaultdict(list)
        for row in some:
            groups[of(row)].append(row)
        return {key: errors(group) for key, group in sorted(groups.items())}

    return {
        "rows": len(rows),
        **errors(measured),
        "excluded families": excluded(rows),
        "excluded models": {f"{row.model}, {row.mode}": row.why for row in rows if row.why and row.predicted},
        "with excluded": errors(row for row in every if row.mode != "gain"),
        "not counted": {row.model: row.why for row in rows if row.predicted is None},
        "by": {
            "gpu": by(lambda row: row.gpu, measured),
            "mode": by(lambda row: row.mode, inside),
            "mode, with excluded": by(lambda row: row.mode, every),
            "fitted": by(_part, measured),
            "fitted, with excluded": by(_part, [row for row in every if row.mode != "gain"]),
            "gpu, mode, fitted": by(lambda row: f"{row.gpu} {row.mode} {_part(row)}", inside),
            "gpu, mode, fitted, with excluded": by(lambda row: f"{row.gpu} {row.mode} {_part(row)}", every),
            "family": by(lambda row: family(row.model), [row for row in every if row.mode != "gain"]),
            "gain by family": by(lambda row: family(row.model), [row for row in every if row.mode == "gain"]),
        },
    }


def _part(row: Row) -> str:
    return "fitted" if is_fitted(row.model) else "held out"


def main() -> None:
    """Prints the errors of a table, or writes them with all rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--table", type=Path, default=TABLE, help="published rows (default: benchmarks/published)")
    parser.add_argument("--measured", action="store_true", help="rows that this project measured, not a table")
    parser.add_argument("--counts", type=Path, help="file that keeps what models have a GPU do")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that count (default: all cores)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", type=Path, help="file for errors and rows")
    args = parser.parse_args()
    try:
        rows = measured(committed()) if args.measured else read(args.table)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    model_counts = json.loads(args.counts.read_text()) if args.counts and args.counts.exists() else {}
    rows = predicted(rows, counts(rows, model_counts, args.jobs, args.counts))
    result = summary(rows)
    if args.out:
        write_text(args.out, to_json(result, rows, COMMAND_MEASURED if args.measured else COMMAND))
    if args.json:
        print(json.dumps(result, indent=1))
        return
    for row in without_excluded(rows):
        shown = f"{row.predicted:10.0f} {row.predicted / row.published:6.2f}" if row.predicted else "  not predicted: "
        shown += "" if row.predicted else str(row.why)
        print(f"{row.gpu:15} {row.mode:8} {row.model:50} {row.img_size:4} {row.published:10.0f}{shown}")
    for name, groups in result["by"].items():
        print(f"\nby {name}: rows, median, 90th percentile, largest error")
        for key, one in groups.items():
            print(f"{key:36}" + "".join(f"{value:10.3f}" for value in one.values()))
    total = {name: result.get(name) for name in ("rows", "predicted", "median", "p90", "with excluded")}
    total |= {"excluded": [*result["excluded families"], *result["excluded models"]]}
    print("\n" + json.dumps(total))


def to_json(found: Mapping[str, Any], rows: Iterable[Row], command: str = COMMAND) -> str:
    """JSON with one row per line; an excluded prediction has a column of its own."""
    rows, names = list(rows), ("gpu", "mode", "model", "img_size", "batch", "published")
    lines = []
    for row, shown in zip(rows, without_excluded(rows), strict=True):
        value = None if row.predicted is None else round(row.predicted, 1)
        pair = [value, None] if shown.predicted else [None, value]
        lines.append([*(getattr(row, name) for name in names), *pair])
    facts = provenance() | {"command": command} | dict(found) | {"columns": [*names, "predicted", "excluded"]}
    return as_json(facts, predictions=lines)


if __name__ == "__main__":
    main()
