"""Whole models on this CPU: eager PyTorch and its public alternatives against ours, each as a ratio to eager.

    python -m benchmarks.cpu [--out FILE] [--resume] [--only vit_small,float32] [--seconds 3600] [--rounds 15]
                             [--columns eager,medium,ours,frozen]

All columns of a cell run in one process and alternate; a ratio above 1 is faster than eager in the same round. In each
round a column is called for at least 10 ms before the call that is timed, as in a loop, because its first calls find
caches that other columns filled. Median and quartiles over the rounds are kept, and no absolute times, as processors
are shared. The columns are

    eager      the model of timm, float32 products by MKL
    medium     the same after torch.set_float32_matmul_precision("medium"), which sends them to oneDNN
    compile    torch.compile; "compile freezing" with Inductor's freezing, "compile max-autotune" in that mode
    onnx       ONNX Runtime, exported by torch.onnx; "openvino" the same graph in OpenVINO, if it is installed
    ours       after fastvit_triton.optimize; "frozen" after freeze, too; "bf16" and "int8" after freeze with that
               precision; "compiled" with backend="fastvit_triton"

The error of each column is relative to the model in float64. Peak memory is that of the allocations that PyTorch's
profiler sees in one call. --resume keeps the cells and columns that FILE has.
"""

import argparse
import contextlib
import copy
import itertools
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fastvit_triton.convert  # noqa: F401  (registers the backend if the package is not installed)
from fastvit_triton import freeze, optimize
from fastvit_triton.kernels.measured import cpu_name
from fastvit_triton.measure.libraries import medium
from fastvit_triton.measure.machine import provenance
from fastvit_triton.measure.timeout import one_line
from fastvit_triton.measure.timing import order

from .result_file import as_json, write_text

DIGITS = "vit_digits_patch2_8"  # of this package; here timm's ViT of the same sizes
MODELS: dict[str, dict[str, int]] = {
    "vit_small_patch16_224": {},
    "vit_base_patch16_224": {},
    "deit_small_patch16_224": {},
    "vit_tiny_patch16_224": {},
    "vit_small_patch14_dinov2": {"img_size": 518},
    "swin_tiny_patch4_window7_224": {},
    "vit_base_patch16_siglip_224": {},
    DIGITS: dict(img_size=8, patch_size=2, embed_dim=64, depth=4, num_heads=2, num_classes=10),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PHASES = {
    "inference": (
        *("eager", "medium", "ours", "frozen", "bf16", "int8", "compiled"),
        *("compile", "compile freezing", "compile max-autotune", "onnx", "openvino"),
    ),
    "training": ("eager", "medium", "ours", "compiled", "compile"),
}
OURS = ("ours", "frozen", "bf16", "int8")
MIN_ROUNDS = 3
WARM = 0.01  # seconds of calls before each one that is timed


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    model: str  # of timm
    dtype: str  # of weights and images
    batch: int  # images
    phase: str  # "inference" or "training"
    threads: int  # of PyTorch

    @property
    def name(self) -> str:
        """Unique name, which --only searches."""
        return f"{self.model} {self.dtype} batch {self.batch} {self.phase} threads {self.threads}"


CELLS = tuple(
    Cell(model, dtype, batch, phase, threads)
    for threads, dtype, phase, batch, model in itertools.product((1, 2), DTYPES, PHASES, (1, 8), MODELS)
)


class Missing(Exception):
    """A column that cannot be measured here, with the reason."""


def inference(model: Callable, images: Tensor) -> Tensor:
    """One call without gradients."""
    with torch.inference_mode():
        return model(images)


def seeded(model: Callable, images: Tensor) -> Tensor:
    """One call without gradients that drops the same paths for every model."""
    torch.manual_seed(1)
    return inference(model, images)


def training(model: Callable, images: Tensor) -> Tensor:
    """Forward and backward pass; gradients are dropped."""
    y = model(images)
    y.square().mean().backward()
    for parameter in model.parameters():
        parameter.grad = None
    return y.detach()


STEPS: dict[str, Callable] = {"inference": inference, "training": training}


def column(name: str, model: nn.Module, images: Tensor) -> Callable:
    """The model as this column runs it, on a copy of its own; raises Missing if it cannot run here."""
    if name in ("eager", "medium"):
        return model
    if name in ("onnx", "openvino"):
        return _exported(name, model, images)
    twin = copy.deepcopy(model)
    if name in OURS:
        optimize(twin)
        if name != "ours":
            freeze(twin, precision="float32" if name == "frozen" else name)
        return twin
    torch._dynamo.reset()
    if name == "compiled":
        return torch.compile(twin, backend="fastvit_triton")
    if name == "compile freezing":
        return torch.compile(twin, options={"freezing": True})
    return torch.compile(twin, mode="max-autotune-no-cudagraphs" if name.endswith("autotune") else "default")


def _exported(name: str, model: nn.Module, images: Tensor) -> Callable:
    """The model in ONNX Runtime or OpenVINO, with as many threads as PyTorch has."""
    if images.dtype != torch.float32:
        raise Missing("measured in float32 only")
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.onnx")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(model, (images,), path, dynamo=True, verbose=False)
        if name == "openvino":
            try:
                import openvino
            except ImportError as error:
                raise Missing("openvino is not installed") from error
            settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
            compiled = openvino.Core().compile_model(path, "CPU", settings)
            return lambda images: torch.from_numpy(compiled(images.numpy())[0])
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    key = session.get_inputs()[0].name
    return lambda images: torch.from_numpy(session.run(None, {key: images.numpy()})[0])


def peak_mib(step: Callable, call: Callable, images: Tensor) -> float:
    """The most memory that PyTorch's allocator holds during one step, beyond what it held before, in MiB."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(call, images)
    allocated = 0
    most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            allocated += event.nbytes()
            most = max(most, allocated)
    return most / 2**20


def clock() -> float:
    """Seconds: with one thread the process's CPU time, which other processes on the machine disturb less."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def measured(cell: Cell, names: list[str], seconds: float, most: int, **sizes: int) -> dict[str, Any]:
    """The row of a cell: by column the ratio to eager, the error and the peak memory, or why it is missing.

    The rounds take about so many seconds, and are at most `most`. `sizes` replace those in `MODELS`.
    """
    torch.manual_seed(0)
    torch.set_num_threads(cell.threads)
    dtype, step = DTYPES[cell.dtype], STEPS[cell.phase]
    name = "vit_tiny_patch16_224" if cell.model == DIGITS else cell.model
    model = timm.create_model(name, **MODELS[cell.model] | sizes).train(cell.phase == "training").to(dtype)
    model.requires_grad_(model.training)
    side = model.patch_embed.img_size[0]
    images = torch.randn(cell.batch, 3, side, side).to(dtype)
    truth = seeded(copy.deepcopy(model).double(), images.double())
    calls: dict[str, Callable] = {}
    columns: dict[str, dict[str, Any]] = {}
    for name in ("eager", *names):
        try:
            call = column(name, model, images)
            with medium() if name == "medium" else contextlib.nullcontext():
                step(call, images)
                error = (seeded(call, images).double() - truth).norm() / truth.norm()
                columns[name] = {"error": float(f"{error:.2e}")}
            calls[name] = call
        # Any error: compilers, exporters and runtimes have their own classes; the other columns are still measured.
        except Exception as error:
            columns[name] = {"missing": one_line(error)}
    taken = timed(step, calls, images, seconds, most)
    for name, times in taken.items():
        columns[name] |= quartiles(taken["eager"], times)
    for name in {"eager", *OURS} & calls.keys():
        columns[name]["peak_mib"] = round(peak_mib(step, calls[name], images), 1)  # when calls are replayed
    return asdict(cell) | {"cell": cell.name, "rounds": len(taken["eager"]), "columns": columns}


def timed(
    step: Callable, calls: dict[str, Callable], images: Tensor, seconds: float, most: int
) -> dict[str, list[float]]:
    """Seconds of a call of each column in each round; the order alternates, and the first round is not timed."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    for turn in range(most + 1):
        for name in order(list(calls), turn):
            with medium() if name == "medium" else contextlib.nullcontext():
                first = time.perf_counter()
                while time.perf_counter() < first + WARM:
                    step(calls[name], images)
                start = clock()
                step(calls[name], images)
                if turn:
                    taken[name].append(clock() - start)
        if turn >= MIN_ROUNDS and time.perf_counter() > end:
            break
    return taken


def quartiles(eager: list[float], times: list[float]) -> dict[str, float]:
    """Median and quartiles of eager's time divided by a column's, round by round."""
    low, median, high = statistics.quantiles([a / b for a, b in zip(eager, times, strict=True)], n=4)
    return {"ratio": round(median, 3), "q1": round(low, 3), "q3": round(high, 3)}


def write(path: Path, rows: list[dict]) -> None:
    """Writes the rows with their provenance."""
    write_text(path, as_json(provenance() | {"processor": cpu_name()}, rows=rows))


def table(rows: list[dict]) -> Table:
    """A line per cell and column."""
    listing = Table("cell", "column", "eager / it", "quartiles", "error", "peak MiB", width=150)
    for row in rows:
        for name, one in row["columns"].items():
            numbers = (f"{one['ratio']:.2f}", f"{one['q1']:.2f} to {one['q3']:.2f}") if "ratio" in one else ("", "")
            rest = one.get("error", one.get("missing")), one.get("peak_mib", "")
            listing.add_row(row["cell"], name, *numbers, *map(str, rest))
    return listing


def main(words: list[str] | None = None, **sizes: int) -> list[dict]:
    """Measures the cells, prints the table and returns its rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", action="store_true", help="keep the cells that are already in --out")
    parser.add_argument("--only", default="", help="comma-separated words that a cell's name must contain")
    parser.add_argument("--columns", default="", help="comma-separated columns (default: all)")
    parser.add_argument("--seconds", type=float, default=3600.0, help="approximate time for all cells")
    parser.add_argument("--rounds", type=int, default=15, help="maximum number of rounds per cell")
    arguments = parser.parse_args(words)
    kept = arguments.resume and arguments.out is not None and arguments.out.exists()
    rows = json.loads(arguments.out.read_text())["rows"] if kept else []
    done = {row["cell"] for row in rows}
    asked = arguments.columns.split(",") if arguments.columns else None
    cells = [cell for cell in CELLS if all(word in cell.name for word in arguments.only.split(","))]
    cells = [cell for cell in cells if cell.name not in done]
    end = time.perf_counter() + arguments.seconds
    console = Console(width=160)
    for i, cell in enumerate(cells):
        remaining = end - time.perf_counter()
        if remaining <= 0 and i:
            console.print(f"{len(cells) - i} cells were not reached in time; --resume measures them")
            break
        names = [n for n in PHASES[cell.phase] if n != "eager" and (asked is None or n in asked)]
        rows.append(measured(cell, names, max(remaining, 0) / (len(cells) - i), arguments.rounds, **sizes))
        if arguments.out is not None:
            write(arguments.out, rows)
        console.print(table(rows[-1:]))
    return rows


if __name__ == "__main__":
    main()
