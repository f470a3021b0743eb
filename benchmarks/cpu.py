"""The CPU paths against the eager models of timm, transformers and vit-pytorch, and against plain torch.compile.

    python -m benchmarks.cpu [--out FILE] [--resume] [--only vit_tiny,bfloat16] [--seconds 1400] [--rounds 40]

All models of a cell run in one process, in alternation. Cells named "compiled" compare timm's model under torch.compile
with backend="fastvit_triton" and with the default backend.

A ratio above 1 means that fastvit_triton is faster than the fastest other library in the same round. Shared processors
are noisy, so the table has medians and quartiles of ratios, and no absolute times. The file is written after each cell;
--resume keeps the cells that it has, and --only selects cells whose names contain all the words.
"""

import argparse
import copy
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import timm
import torch
import transformers
import vit_pytorch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

import fastvit_triton.convert  # noqa: F401  (registers the backend if the package is not installed)
from fastvit_triton import create_model
from fastvit_triton.files import replacing
from fastvit_triton.measure.compare import outcome, verdict
from fastvit_triton.measure.libraries import transformers_model
from fastvit_triton.measure.machine import provenance
from fastvit_triton.measure.timing import order

OURS, COMPILER = "fastvit_triton", "torch.compile"
MODELS = {"vit_tiny_patch16_224": (192, 3), "vit_small_patch16_224": (384, 6), "vit_base_patch16_224": (768, 12)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MIN_ROUNDS = 3  # rounds per cell, even when the time is up


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    model: str
    dtype: str
    batch: int
    step: str
    compiled: bool = False

    @property
    def name(self) -> str:
        """Unique name, which --only searches."""
        return f"{self.model} {self.dtype} batch {self.batch} {self.step}{' compiled' * self.compiled}"


WAYS = ("forward", "training_step")
CELLS = tuple(itertools.starmap(Cell, itertools.product(MODELS, DTYPES, (1, 8), WAYS)))
CELLS += tuple(Cell(model, "float32", 1, step, compiled=True) for model in MODELS for step in WAYS)


def forward(model: Callable, parameters: list[nn.Parameter], images: torch.Tensor) -> None:
    """Inference."""
    with torch.inference_mode():
        model(images)


def training_step(model: Callable, parameters: list[nn.Parameter], images: torch.Tensor) -> None:
    """Forward, backward and SGD step."""
    model(images).square().mean().backward()
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=1e-6)
                parameter.grad = None


STEPS = {"forward": forward, "training_step": training_step}


def variants(cell: Cell, **options: int) -> dict[str, Callable]:
    """Calls by package, ours first. All share weights, except vit-pytorch, whose qkv has no bias."""
    dtype, (D, H) = DTYPES[cell.dtype], MODELS[cell.model]
    ours, theirs = create_model(cell.model, **options), timm.create_model(cell.model, **options)
    if cell.compiled:
        torch._dynamo.reset()
        rewritten, plain = copy.deepcopy(theirs).to(dtype), theirs.to(dtype)
        return {OURS: torch.compile(rewritten, backend="fastvit_triton"), COMPILER: torch.compile(plain)}
    ours.load_state_dict(theirs.state_dict())
    depth, side, D = len(ours.blocks), ours.config.img_size, options.get("embed_dim", D)
    sizes = dict(image_size=side, patch_size=16, num_classes=1000, dim=D, depth=depth, heads=H, dim_head=D // H)
    found = {OURS: ours.to(dtype), "timm": theirs.to(dtype), "transformers": transformers_model(ours, dtype)}
    return found | {"vit-pytorch": vit_pytorch.ViT(**sizes, mlp_dim=4 * D).to(dtype)}


def module_of(call: Callable) -> nn.Module:
    """The module of a variant."""
    module = call if isinstance(call, nn.Module) else call.module
    return getattr(module, "_orig_mod", module)


def timm_model(calls: dict[str, Callable]) -> nn.Module:
    """timm's model among the variants, uncompiled."""
    return module_of(calls[COMPILER] if COMPILER in calls else calls["timm"])


def matches(calls: dict[str, Callable], images: torch.Tensor) -> bool:
    """True if our output differs from timm's in float64 by at most twice timm's own error plus one rounding."""
    theirs, given = timm_model(calls), dict(images=images)
    baseline = outcome(lambda images: theirs(images), given, None)
    got = outcome(lambda images: calls[OURS](images), given, None)
    wide = timm.create_model(theirs.pretrained_cfg["architecture"], **_sizes(theirs)).eval().double()
    wide.load_state_dict(theirs.state_dict())
    truth = outcome(lambda images: wide(images.double()), given, None)
    return verdict(got, truth, baseline, images.dtype).match


def _sizes(model: nn.Module) -> dict[str, int]:
    return dict(depth=len(model.blocks), img_size=model.patch_embed.img_size[0])


def time_rounds(
    step: Callable, calls: dict[str, Callable], images: torch.Tensor, seconds: float, most: int
) -> dict[str, list[float]]:
    """Seconds of each variant in each round; the order alternates, and the first round is not timed."""
    parameters = {name: list(module_of(call).parameters()) for name, call in calls.items()}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    for turn in range(most + 1):
        for name in order(list(calls), turn):
            start = time.perf_counter()
            step(calls[name], parameters[name], images)
            if turn:
                taken[name].append(time.perf_counter() - start)
        if turn >= MIN_ROUNDS and time.perf_counter() > end:
            break
    return taken


def measured(cell: Cell, seconds: float, most: int, **options: int) -> dict:
    """The row of a cell: ratios to the fastest other library and to each."""
    calls = variants(cell, **options)
    for call in calls.values():
        module_of(call).eval()
    images = torch.randn(cell.batch, 3, *timm_model(calls).patch_embed.img_size).to(DTYPES[cell.dtype])
    match = matches(calls, images)
    for call in calls.values():
        module_of(call).train(cell.step == "training_step")
    taken = time_rounds(STEPS[cell.step], calls, images, seconds, most)
    ours = taken.pop(OURS)
    best = min(taken, key=lambda name: statistics.median(taken[name]))
    row = asdict(cell) | dict(cell=cell.name, best=best)
    row |= _ratios(taken[best], ours) | dict(match=match, turns=len(ours))
    return row | dict(peers={name: _ratios(theirs, ours) for name, theirs in taken.items()})


def _ratios(theirs: list[float], ours: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles([a / b for a, b in zip(theirs, ours, strict=True)], n=4)
    return dict(median=round(median, 4), q1=round(low, 4), q3=round(high, 4))


def wanted(only: str) -> Iterator[Cell]:
    """Cells whose names contain all these words."""
    yield from (cell for cell in CELLS if all(word in cell.name for word in only.split(",")))


def write(path: Path, rows: list[dict]) -> None:
    """Writes the rows with their provenance."""
    libraries = dict(timm=timm.__version__, transformers=transformers.__version__)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(provenance() | dict(libraries=libraries, rows=rows), indent=1) + "\n")


def table(rows: list[dict]) -> Table:
    """A row per cell."""
    made = Table("cell", "fastest library", "theirs / ours, median", "quartiles", "others", "match", width=140)
    for row in rows:
        others = ", ".join(f"{n} {r['median']:.2f}" for n, r in row["peers"].items() if n != row["best"])
        numbers = f"{row['median']:.3f}", f"{row['q1']:.3f} to {row['q3']:.3f}"
        made.add_row(row["cell"], row["best"], *numbers, others, "yes" if row["match"] else "NO")
    return made


def main(words: list[str] | None = None, **options: int) -> list[dict]:
    """Measures the cells, small models first, prints the table and returns its rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", action="store_true", help="keep the cells that are already in --out")
    parser.add_argument("--only", default="", help="comma-separated words that a cell's name must contain")
    parser.add_argument("--seconds", type=float, default=1400.0, help="approximate time for all cells")
    parser.add_argument("--rounds", type=int, default=40, help="maximum number of rounds per cell")
    arguments = parser.parse_args(words)
    kept = arguments.resume and arguments.out is not None and arguments.out.exists()
    rows = json.loads(arguments.out.read_text())["rows"] if kept else []
    held, end = {row["cell"] for row in rows}, time.perf_counter() + arguments.seconds
    cells = [cell for cell in wanted(arguments.only) if cell.name not in held]
    for i, cell in enumerate(track(cells, "measuring", console=Console(stderr=True), transient=True)):
        share = (end - time.perf_counter()) / (len(cells) - i)  # time left over by small models goes to larger ones
        rows.append(measured(cell, share, max(arguments.rounds, MIN_ROUNDS), **options))
        if arguments.out is not None:
            write(arguments.out, rows)
    Console(width=150).print(table(rows))
    return rows


if __name__ == "__main__":
    main()
