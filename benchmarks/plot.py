"""Writes the tables of the README and of docs/, between markers, and the plots, from result files alone.

    python -m benchmarks.plot [--results benchmarks/results]

Where there is no measurement, a table says so.
"""

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fastvit_triton.expected.blocks import block_us, host_us
from fastvit_triton.expected.gpus import gpus
from fastvit_triton.files import replacing
from fastvit_triton.kernels import choose, settings
from fastvit_triton.kernels.launch import targeting
from fastvit_triton.kernels.sizes import WAYS, Branch

from . import community, drop_in
from .backtest import ALWAYS, family
from .result_file import ROOT, table, write_text
from .rows import committed, is_result

RESULTS = ROOT / "benchmarks" / "results"
NOT_YET = "*not yet measured*"
ON_A_GPU = f"{NOT_YET}; `python -m benchmarks.gpu --out benchmarks/results` measures it on a GPU."
# variants of a table → titles of its columns
COLUMNS = {
    "eager": "eager",
    "torch.compile": "torch.compile",
    "ours eager": "ours",
    "ours compiled": "ours, compiled",
    "ours, CUDA graph": "ours, CUDA graph",
    "timm": "timm",
    "optimized by us": "timm, optimized",
    "timm AMP": "timm AMP",
    "transformers": "transformers",
}
OURS = ("ours eager", "ours compiled")
PLANNED = "as planned"  # the variant of an op that the plan chooses, ours or PyTorch's
# columns of `benchmarks.cpu` → their titles
CPU_COLUMNS = {
    "medium": '"medium"',
    "compile": "torch.compile",
    "compile freezing": "torch.compile, freezing",
    "compile max-autotune": "torch.compile, max-autotune",
    "onnx": "ONNX Runtime",
    "openvino": "OpenVINO",
    "ours": "ours",
    "frozen": "ours, frozen",
    "bf16": "ours, frozen, bf16",
    "int8": "ours, frozen, int8",
    "compiled": "ours, compiled",
}
SHOWN = "ViT-B/16"  # the model whose ops are listed
PICTURED = "vit_base_patch16_224"  # the model whose launches are plotted
SHEETS = {key: gpu.sheet for key, gpu in gpus().items()}
SHOWN_GPUS = dict(h200="H200", a100="A100", rtx4090="RTX 4090")
SHOWN_MODELS = (("ViT-S/16", 384, 6), ("ViT-B/16", 768, 12), ("ViT-L/16", 1024, 16))


class Results(NamedTuple):
    """Newest measurement of each part, result files by name, CPU files (oldest first), keyed rows, and users' files."""

    ops: dict | None
    models: dict | None
    ceilings: dict | None
    ways: dict | None
    host: dict | None
    launches: dict | None
    gains: dict | None
    backtest: dict | None
    measured: dict | None  # the backtest of measured models
    cpu: list[dict]
    rows: list[dict]
    users: dict[str, dict]


def load(folder: Path = RESULTS) -> Results:
    """Reads the folder, ignoring dry runs."""
    held = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    newest: dict[str, dict] = {}
    cpu = []
    for result in held.values():
        if isinstance(result, list):  # lists of releases or suites are not measurements
            continue
        if "benchmarks.cpu" in result.get("command", "") and "processor" in result:
            cpu.append(result)
        if "part" in result and result.get("dry_run") is False and result.get("gpu"):
            newest[result["part"]] = max(newest.get(result["part"], result), result, key=lambda r: r["date"])
    rows = committed(folder)
    parts = (_with_rows(newest.get(part), part, rows) for part in Results._fields[:4])
    files = map(held.get, ("host", "launches", "gains", "backtest", "backtest-measured"))
    cpu.sort(key=lambda result: result["date"])
    return Results(*parts, *files, cpu, rows, community.load(folder / "community"))


def _with_rows(part: dict | None, section: str, rows: Iterable[dict]) -> dict | None:
    """A part of a run and the rows with keys of the same section and GPU, which replace those of the same arm."""
    new = [row for row in rows if row.get("section") == section and is_result(row) and "kernels" in row]
    new = [row for row in new if row["gpu"] == (part or new[-1])["gpu"]]
    if not new:
        return part
    packages = {name: new[-1][name] for name in ("torch", "triton")}
    facts = part or dict(new[-1], packages=packages, command="python -m benchmarks.gpu")
    both = {(row["case"], row.get("phase"), row.get("arm")): row for row in [*facts.get("rows", ()), *new]}
    later = dict.fromkeys(f"{row['date']} (commit {row['commit']})" for row in new)
    return facts | dict(rows=[*both.values()], later=list(later) if part else [])


def times(result: dict | None, model: str | None = None) -> dict[tuple[str, str], dict[str, float]]:
    """(case, phase) → microseconds by variant, for variants whose results matched; optionally of one model only."""
    by_case: dict[tuple[str, str], dict[str, float]] = {}
    for row in result["rows"] if result else ():
        if row.get("us") is not None and row.get("match") and model in (None, row["model"]):
            by_case.setdefault((row["case"], row["phase"]), {})[row["arm"]] = row["us"]
    return {key: by_variant for key, by_variant in by_case.items() if "eager" in by_variant}


def origin(result: dict) -> str:
    """Provenance of a result in one line."""
    versions = ", ".join(f"{name} {v}" for name, v in result["packages"].items() if name in ("torch", "triton", "timm"))
    driver = f", driver {result['driver_version']}" if "driver_version" in result else ""
    later = f" Rows of {', '.join(result['later'])} replace older ones." if result.get("later") else ""
    run = f"commit {result['commit']}, {result['date']}: `{result['command']}`"
    return f"{result['gpu']}{driver}, {versions}, {run}.{later}"


def models_table(results: Results) -> str:
    """Table of milliseconds per batch by variant; the fastest is bold."""
    measured = times(results.models)
    if not measured:
        return ON_A_GPU
    variants = [variant for variant in COLUMNS if any(variant in by_variant for by_variant in measured.values())]
    rows = [[case, *_cells(by_variant, variants)] for (case, _), by_variant in measured.items()]
    return table(["ms", *map(COLUMNS.get, variants)], rows, "l", origin(results.models))


def _cells(us: dict[str, float | None], names: Iterable[str]) -> list[str]:
    """Milliseconds of these variants, those of the fastest one bold; "" for those that were not measured."""
    found = [us.get(name) for name in names]
    best = min(one for one in found if one is not None)
    texts = ["" if one is None else f"{one / 1e3:.3g}" if one < 1e5 else f"{one / 1e3:.0f}" for one in found]
    return [f"**{text}**" if one == best else text for one, text in zip(found, texts, strict=True)]


def ops_table(results: Results) -> str:
    """Table of speedups over eager and over the fastest other variant, including those below 1."""
    measured = times(results.ops, SHOWN)
    if not measured:
        return ON_A_GPU
    rows = []
    for (case, phase), by_variant in measured.items():
        ours = [by_variant[variant] for variant in OURS if variant in by_variant]
        others = [us for variant, us in by_variant.items() if variant not in (*OURS, PLANNED)]
        if ours:
            speeds = (f"{other / min(ours):.2f}" for other in (by_variant["eager"], min(others)))
            rows.append([case, phase, f"{min(ours):.1f}", *speeds])
    return table(["op", "phase", "ours µs", "× eager", "× best other"], rows, "llr", origin(results.ops))


def cpu_table(results: Results, shown: str = "") -> str:
    """Table of eager's time over that of each column, with quartiles, for each processor; of cells named by `shown`."""
    newest = _newest_cells(results, shown)
    if not newest:
        return f"{NOT_YET}; `python -m benchmarks.cpu --out FILE` measures it."
    tables = []
    for processor, cells in newest.items():
        names = [n for n in CPU_COLUMNS if any("ratio" in row["columns"].get(n, {}) for row, _ in cells)]
        rows = []
        for row, _ in cells:
            threads = f"{row['threads']} thread{'s' * (row['threads'] > 1)}"
            title = f"{row['model']}, {row['dtype']}, batch {row['batch']}, {row['phase']}, {threads}"
            rows.append([title, *(_ratio(row["columns"].get(name)) for name in names)])
        sources = [
            f"torch {file['packages']['torch']}, commit {file['commit']}, {file['date']}: `{file['command']}`."
            for file in {id(file): file for _, file in cells}.values()
        ]
        head = [f"times as fast as eager, {processor}", *(CPU_COLUMNS[name] for name in names)]
        tables.append(table(head, rows, "lr", *sources))
    return "\n\n".join(tables)


def _newest_cells(results: Results, shown: str = "") -> dict[str, list[tuple[dict, dict]]]:
    """The newest row of each cell whose name contains `shown`, with its file, by processor."""
    newest: dict[str, dict[str, tuple[dict, dict]]] = {}
    for file in results.cpu:  # sorted by date
        rows = {row["cell"]: (row, file) for row in file["rows"] if shown in row["cell"]}
        newest[file["processor"]] = newest.get(file["processor"], {}) | rows
    return {processor: list(rows.values()) for processor, rows in newest.items() if rows}


def _ratio(column: dict | None) -> str:
    """Median and quartiles of a column; for reduced precisions also the error."""
    if column is None or "ratio" not in column:
        return ""
    text = f"{column['ratio']:.2f} ({column['q1']:.2f} to {column['q3']:.2f})"
    return f"{text}, error {column['error']:.0e}" if column["error"] > 1e-3 else text


def host_table(results: Results) -> str:
    """Table of a block's host time relative to timm's, with quartiles, by way and phase."""
    if results.host is None:
        return f"{NOT_YET}; `python -m benchmarks.host --out benchmarks/results/host.json` measures it."
    texts: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for row in results.host["rows"]:
        spread = " to ".join(f"{quartile:.2f}" for quartile in row["quartiles"])
        texts[row["block"], row["way"]][row["phase"]] = f"{row['ratio']:.2f} ({spread})"
    phases, source = ("inference", "training"), results.host["provenance"]
    rows = [[*key, *(by_phase.get(phase, "") for phase in phases)] for key, by_phase in texts.items()]
    said = f"torch {source['packages']['torch']}, {source['date']}: `{source['command']}`."
    return table(["block", "way", *phases], rows, "llr", said)


def ways_table(results: Results) -> str:
    """Table of the measured milliseconds of two blocks in each way, in inference and training; the fastest is bold."""
    if results.ways is None:
        return ON_A_GPU
    ways = ("plain", "mixed", "fused")
    rows = []
    for row in results.ways["rows"]:
        if "way" in row:
            cells = _cells({way: row.get(f"{way}_us") for way in ways}, ways)
            rows.append([row["case"].removeprefix("ways of "), *cells, row["rule"]])
    return table(["ms of two blocks", *ways, "by the rule"], rows, "lrrrl", origin(results.ways))


def training_table(results: Results) -> str:
    """Table of expected speedups of ViT blocks in training, by the rule that chooses their way; * is measured."""
    measured = {row["shape"]: row for row in results.ways["rows"] if "shape" in row} if results.ways else {}
    rows = []
    for name, C, heads in SHOWN_MODELS:
        size = dict(images=64, tokens=197, channels=C)
        block = (
            Branch("attention", **size, width=3 * C, inner=C, heads=heads),
            Branch("mlp", **size, width=4 * C, inner=4 * C),
        )
        cells = []
        for key in SHOWN_GPUS:
            gpu = gpus()[key]
            with targeting(gpu.architecture), settings.assuming(key):
                choice = choose.choose(torch.device("cpu"), block, torch.bfloat16, True, False, True, None, "auto")
            row = next((measured[shape] for shape in choice.shapes if shape in measured), None)
            if row is not None and SHOWN_GPUS[key] in results.ways["gpu"]:
                cells.append(f"{row['plain_us'] / row[f'{choice.way}_us']:.2f}* ({choice.way})")
                continue
            times = {way: max(block_us(gpu, block, way, True, False, 1), host_us(way, 2, True, True)) for way in WAYS}
            cells.append(f"{times['plain'] / times[choice.way]:.2f} ({choice.way})")
        rows.append([f"{name}, batch 64", *cells])
    return table(["expected speed of the blocks in training against eager", *SHOWN_GPUS.values()], rows)


def gains_table(results: Results) -> str:
    """Table of predicted speedups over torch.compile, and the error of such predictions; nothing is measured."""
    if results.gains is None or results.backtest is None:
        return NOT_YET
    tested, by_call = results.backtest["by"]["gain by family"], defaultdict(list)
    for row in results.gains["rows"]:
        by_call[row["model"], row["phase"], row["batch"]].append(row)
    rows = []
    for (model, phase, batch), of_gpus in by_call.items():
        speeds = []
        for row in of_gpus:
            autotune = f" ({row['autotune_ms'] / row['ours_ms']:.2f})" if "autotune_ms" in row else ""
            speeds.append(f"{row['compile_ms'] / row['ours_ms']:.2f}{autotune}")
        error = tested.get(of_gpus[0]["family"]) if phase == "inference" else None
        error = "not tested" if error is None else f"± {100 * error['p90']:.0f} %"
        saved = f"{of_gpus[0]['saved']:.2f}" if phase == "training" else ""
        what = "" if phase == "inference" else ", training"
        rows.append([f"{model}{what}, {batch} images", *speeds, error, saved])
    return table(["against torch.compile, predicted", *SHOWN_GPUS.values(), "error", "saved activations"], rows)


def backtest_table(results: Results) -> str:
    """Table of the errors of predictions against published throughput."""
    if results.backtest is None:
        return NOT_YET
    titles = {"eager": "eager", "compile": "torch.compile", "gain": "torch.compile ÷ eager"}
    errors, rows = results.backtest["by"], []
    for key, every in errors["gpu, mode, fitted, with excluded"].items():
        gpu, mode, part = key.split(" ", 2)
        cells = (cell for one in (errors["gpu, mode, fitted"][key], every) for cell in _errors(one))
        rows.append([f"{SHEETS[gpu].name}, {titles[mode]}, {part}", *cells])
    columns = ("rows", "median error", "nine of ten within")
    head = ["predicted against published", *columns, f"with what is excluded: {columns[0]}", *columns[1:]]
    return table(head, rows, "lr")


def _errors(one: dict) -> list[str]:
    """Number of rows, median error and the one that nine of ten do not exceed."""
    return [str(one["predicted"]), *(f"{100 * one[name]:.1f} %" for name in ("median", "p90"))]


def measured_backtest_table(results: Results) -> str:
    """Table of measured and predicted throughput of whole models."""
    if results.measured is None:
        return NOT_YET
    rows = []
    for gpu, mode, model, _, batch, have, value, excluded in results.measured["predictions"]:
        if (value := value or excluded) is not None:
            name = f"{SHEETS[gpu].name}, {model}, {'torch.compile' if mode == 'compile' else mode}, {batch} images"
            rows.append([name, f"{have:.0f}", f"{value:.0f}", f"{value / have:.2f}"])
    head = ["whole models, images per second", "measured", "predicted", "predicted ÷ measured"]
    return table(head, rows, "lr")


def families_table(results: Results) -> str:
    """Table of the errors of the families that are always predicted, and of those that are not predicted."""
    if results.backtest is None:
        return NOT_YET
    errors, outside = results.backtest["by"]["family"], results.backtest["excluded families"]
    models, rows = defaultdict(list), []
    for name, why in results.backtest["excluded models"].items():
        model, mode = name.split(", ")
        models[family(model)].append(f"{mode}: {why}")
    for kind, one in sorted(errors.items(), key=lambda pair: (pair[0] not in ALWAYS, pair[0])):
        if kind in ALWAYS:
            shown = "predicted"
        elif kind in outside:
            _, median, most = _errors(outside[kind])
            shown = f"not predicted: fitted rows {median}, nine of ten {most}"
        elif kind in models:
            shown = f"not predicted in {', '.join(sorted(set(models[kind])))}"
        else:
            continue
        rows.append([kind, *_errors(one), shown])
    return table(["family", "rows", "median error", "nine of ten within", "shown as"], rows, "lrrrl")


def pages() -> list[Path]:
    """Files that contain tables between markers."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


TABLES: dict[str, Callable[[Results], str]] = {
    "drop in": lambda results: drop_in.table(results.rows) or NOT_YET,
    "models": models_table,
    "ops": ops_table,
    "cpu": cpu_table,
    "host": host_table,
    "ways": ways_table,
    "users": lambda results: community.table(results.users),
    "measured backtest": measured_backtest_table,
    "gains": gains_table,
    "training": training_table,
    "backtest": backtest_table,
    "families": families_table,
}


def fill(readme: str, results: Results) -> str:
    """Replaces each table between `<!-- measured: NAME -->` and `<!-- end -->`, and the words for the first picture.

    A marker that is not closed, or names an unknown table, is a ValueError.
    """
    parts = readme.split("<!-- measured: ")
    for i, part in enumerate(parts[1:], 1):
        name, closing, rest = part.partition(" -->")
        if not closing or name not in TABLES or "<!-- end -->" not in rest:
            raise ValueError(
                f"the marker <!-- measured: {name[:40]} needs a table ({', '.join(TABLES)}) and <!-- end -->"
            )
        parts[i] = f"{name} -->\n{TABLES[name](results)}\n<!-- end -->" + rest.split("<!-- end -->", 1)[1]
    words = drop_in.described(_bars(results))
    return re.sub(r"!\[[^\]]*\](?=\([^)]*\bspeedup\.png\))", f"![{words}]", "<!-- measured: ".join(parts))


def bars(results: Results, path: Path) -> bool:
    """Plots what `optimize` gives models of other authors, measured and predicted; False if nothing was measured."""
    if not (found := _bars(results)):
        return False
    gpu = drop_in.measured(results.rows)[0].facts["gpu"].removeprefix("NVIDIA ")
    figure, axis = _figure(7, 0.6 + 0.29 * len(found))
    drop_in.draw(found, f"Speed relative to eager PyTorch on an {gpu}, bfloat16", axis)
    return _saved(figure, path)


def _bars(results: Results) -> list[drop_in.Bars]:
    """What the first picture shows."""
    return drop_in.bars(results.rows, results.gains["rows"] if results.gains else ())


def roofline(results: Results, path: Path) -> bool:
    """Plots throughput against arithmetic intensity of our forward ops, and the measured limits; False without both."""
    ceilings = {row["case"]: row for row in results.ceilings["rows"]} if results.ceilings else {}
    rows = [r for r in (results.ops or {"rows": ()})["rows"] if r.get("flops") and r.get("us") and r["arm"] in OURS]
    if not rows or "tbs" not in ceilings.get("copy", {}) or "tflops" not in ceilings.get("bf16 matmul", {}):
        return False
    bandwidth, peak = ceilings["copy"]["tbs"], ceilings["bf16 matmul"]["tflops"]
    figure, axis = _figure(7, 4.5)
    axis.loglog([1, peak / bandwidth, 1e4], [bandwidth, peak, peak], color="black")
    for op in dict.fromkeys(r["op"] for r in rows):
        points = [(r["flops"] / r["bytes"], r["tflops"]) for r in rows if r["op"] == op and r.get("match")]
        axis.scatter(*zip(*points, strict=True), s=14, label=op) if points else None
    axis.set_xlabel("flops per byte")
    axis.set_ylabel("TFLOP/s")
    axis.set_title(f"{results.ceilings['gpu']}: {bandwidth:.2f} TB/s copied, {peak:.0f} TFLOP/s multiplied", fontsize=9)
    axis.legend(fontsize=8)
    return _saved(figure, path)


def launch_bars(results: Results, path: Path) -> bool:
    """Plots the counted launches of a ViT-B block by way (eager, torch.compile, ours); False if there is no table."""
    if results.launches is None:
        return False
    rows = [r for r in results.launches["rows"] if r["model"].endswith(PICTURED) and r["phase"] == "inference"]
    fused = next(r for r in rows if r["ways"]["mlp"] == "fused" and not r["frozen"] and not r["ours"])
    mixed = next(r for r in rows if r["ways"]["mlp"] == "mixed" and not r["ours"])
    frozen = next(r for r in rows if r["ways"]["mlp"] == "fused" and r["frozen"] and r["ours"])
    bars = {
        "eager PyTorch": fused["eager_launches"],
        "torch.compile (estimated)": fused["inductor_launches"],
        "mixed": mixed["launches"],
        "fused": fused["launches"],
        "our model, fused, frozen": frozen["launches"],
    }
    figure, axis = _figure(7, 2.2)
    colors = ["#8d8d8d"] * 2 + ["#4c72b0"] * 3
    axis.bar_label(axis.barh(list(bars), list(bars.values()), 0.6, color=colors), padding=3, fontsize=8)
    axis.invert_yaxis()
    axis.tick_params(labelsize=8)
    axis.set_xlabel("launches of a ViT-B block, bfloat16 inference; counted, not timed", fontsize=8)
    return _saved(figure, path)


def backtest_points(results: Results, path: Path) -> bool:
    """Plots predicted against published throughput, eager and compiled, of two GPUs; False without predictions."""
    if results.backtest is None:
        return False
    rows = [row for row in results.backtest["predictions"] if row[6] or row[7]]
    figure, axes = _figure(8, 4.2, 2)
    for axis, gpu in zip(axes, dict.fromkeys(row[0] for row in rows), strict=True):
        ends = [min(r[5] for r in rows if r[0] == gpu) / 1.3, max(r[5] for r in rows if r[0] == gpu) * 1.3]
        for factor, style in ((1.0, "-"), (1.1, ":"), (1 / 1.1, ":")):
            axis.plot(ends, [end * factor for end in ends], color="black", linewidth=0.7, linestyle=style)
        for mode, color in (("eager", "#8d8d8d"), ("compile", "#4c72b0")):
            points = [(r[5], r[6]) for r in rows if r[:2] == [gpu, mode] and r[6]]
            axis.scatter(*zip(*points, strict=True), s=5, color=color, alpha=0.6, linewidths=0, label=mode)
        points = [(r[5], r[7]) for r in rows if r[0] == gpu and r[7]]
        if points:
            label = "not predicted: excluded"
            axis.scatter(*zip(*points, strict=True), s=9, color="#c44e52", marker="x", linewidths=0.6, label=label)
        axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        axis.set_title(f"{SHEETS[gpu].name}, autocast to float16", fontsize=9)
        axis.set_xlabel("published images per second", fontsize=8)
        axis.tick_params(labelsize=8)
    axes[0].set_ylabel("predicted; dotted: ± 10 %", fontsize=8)
    axes[0].legend(fontsize=8)
    return _saved(figure, path)


def cpu_bars(results: Results, path: Path) -> bool:
    """Plots speedups over eager on CPUs by cell and column, for each processor; False if there is no file."""
    newest = _newest_cells(results)
    if not newest:
        return False
    single = [[row for row, _ in rows if (row["dtype"], row["threads"]) == ("float32", 1)] for rows in newest.values()]
    panels = [[row for row in rows if row["phase"] == "inference"] for rows in single]
    figure, axes = _figure(8 * len(panels), 0.8 + 0.85 * max(map(len, panels)), len(panels))
    for axis, (processor, rows), shown in zip(np.ravel(axes), newest.items(), panels, strict=True):
        _cpu_panel(axis, shown)
        versions = ", ".join(dict.fromkeys(file["packages"]["torch"] for _, file in rows))
        axis.set_title(f"{processor}, torch {versions}", fontsize=9)
    return _saved(figure, path)


def _cpu_panel(axis: Any, rows: list[dict]) -> None:
    """Bars of one processor: a group for each cell, a bar for each column."""
    names = ("medium", "compile", "onnx", "ours", "frozen", "bf16", "int8")
    shades = ("#8d8d8d", "#b0b0b0", "#d0d0d0", "#4c72b0", "#8da9cf", "#dd8452", "#c44e52")
    for i, (name, color) in enumerate(zip(names, shades, strict=True)):
        points = [(y, row["columns"][name]) for y, row in enumerate(rows) if "ratio" in row["columns"].get(name, {})]
        at = [y + (i - 3) * 0.12 for y, _ in points]
        values = [one["ratio"] for _, one in points]
        axis.barh(at, values, 0.12, color=color, label=CPU_COLUMNS[name])
        for y, value in zip(at, values, strict=True):
            axis.text(value, y, f" {value:.2f}", va="center", fontsize=6)
    axis.set_yticks(range(len(rows)), [f"{r['model']}\nbatch {r['batch']}, {r['phase']}" for r in rows], fontsize=7)
    axis.invert_yaxis()
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_xlabel("times faster than eager PyTorch, float32 model, one thread", fontsize=8)
    axis.legend(fontsize=7, loc="lower right")


def _figure(width: float, height: float, columns: int = 1) -> tuple:
    """A figure that needs no display, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure((width, height), layout="constrained")
    return figure, figure.subplots(1, columns)


def _saved(figure: object, path: Path) -> bool:
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=160, format="png")
    return True


PICTURES = {
    "speedup": bars,
    "roofline": roofline,
    "launches": launch_bars,
    "backtest": backtest_points,
    "cpu": cpu_bars,
}


def main(words: Iterable[str] | None = None) -> None:
    """Draws the plots and fills the tables of the README and docs/."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args(words)
    results = load(arguments.results)
    for name, draw in PICTURES.items():
        path = arguments.results / f"{name}.png"
        print(f"{path}: {'drawn' if draw(results, path) else 'nothing measured yet'}")
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := fill(text, results)) != text:
            write_text(page, new)


if __name__ == "__main__":
    main()
