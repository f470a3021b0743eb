"""Figures of the survey's systems: parameters, launches of a block, and accuracy of small models on the digits.

    python -m benchmarks.survey --out benchmarks/results [--only PATTERN] [--missing] [--counts] [--plot]

Launches: inference in bfloat16, batch 8, counted from shapes on the meta device as in benchmarks.coverage; models with
four blocks (per stage with attention) minus models with two, divided by the difference. "Fused" has every kernel, and
frozen weights.
Digits: one core, three seeds, eight epochs of AdamW without augmentation, the same for all systems; nothing was tuned.
The result file keeps the rows of other systems, and is written after each row; systems without a model are left out. A
run that was cut off goes on with `--missing`.
"""

import argparse
import json
import re
import time
from dataclasses import fields
from fnmatch import filter as filter_names
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.data import made
from benchmarks.result_file import as_json, write_text
from benchmarks.trainings import provenance
from fastvit_triton import create_model
from fastvit_triton.expected.count import traced, weightless
from fastvit_triton.expected.gpus import gpus
from fastvit_triton.files import replacing
from fastvit_triton.kernels.settings import forcing
from fastvit_triton.models import CATALOGUE, model_config
from fastvit_triton.train import Step, adamw, evaluate, fit, similarity_loss, warmup_cosine
from fastvit_triton.train.data import DIGITS_MEAN, DIGITS_STD, TensorBatches, digits
from fastvit_triton.train.data.transform import Transform
from fastvit_triton.train.plots import BLUE, dress, figure

LIST, RESULTS = Path(__file__).with_name("survey_systems.txt"), Path(__file__).parent / "results"
BATCH, DTYPE, GPU = 8, torch.bfloat16, "h200"
EPOCHS, SEEDS, IMAGES, LR, WARMUP, DECAY, SMOOTHING = 8, 3, 32, 2e-3, 30, 0.05, 0.1
WIDE = 5.4  # points of a character of a label
Box = tuple[float, float, float, float]  # left, bottom, right, top
NOTE = "launches are counted, not measured; accuracy of 360 test images, by seed, after each epoch"


class System(NamedTuple):
    """A line of survey_systems.txt; "-" is an empty field."""

    name: str  # of the system
    paper: str  # its number on arXiv, or a link
    idea: str  # one sentence
    names: str  # shell patterns of our names
    model: str  # the name whose parameters and launches are counted, or why there is none
    oracle: str  # what our model, or our layer, is compared with in the tests
    differs: str  # what differs from the paper or from the oracle
    # pixels of the enlarged digits; 0 for systems that do not classify, whose figures are in docs/pixels.md or
    # docs/detect.md
    side: int
    # options for the digits; "model" is the name of another model of the family, and with "similarity_loss" the loss
    # includes `train.similarity_loss`
    tiny: dict[str, Any]

    @property
    def built(self) -> bool:
        """Whether `create_model` knows the model."""
        return self.model in CATALOGUE

    @property
    def ours(self) -> list[str]:
        """Our names: those of the model's family that match a pattern."""
        family = [name for name, module in CATALOGUE.items() if self.built and module is CATALOGUE[self.model]]
        return [name for pattern in self.names.split() for name in filter_names(family, pattern)]


def read(text: str) -> list[System]:
    """The systems listed in a text; ValueError for a line with too few or too many fields."""
    systems = []
    for line in text.splitlines():
        words = ["" if word == "-" else word for word in line.split(" | ")]
        if not line or line.startswith("#"):
            continue
        if len(words) != len(System._fields):
            raise ValueError(f"line {line!r} has {len(words)} fields; give {', '.join(System._fields)}")
        systems.append(System(*words[:-2], int(words[-2] or 0), made(json.loads(words[-1] or "{}"))))
    return systems


SYSTEMS = read(LIST.read_text(encoding="utf-8"))


def blocks(depth: Any) -> int:
    """Number of blocks of a config's depth, a number or nested tuples of numbers."""
    return sum(map(blocks, depth)) if isinstance(depth, tuple) else depth


def filled(depth: Any, n: int, heads: Any = ()) -> Any:
    """The same with n in place of every number but 0; 1 for stages of convolutions, which have 0 heads."""
    if isinstance(heads, tuple) and 0 in heads:
        return tuple(n if number else 1 for number in heads)
    return tuple(filled(part, n) for part in depth) if isinstance(depth, tuple) else n * (depth > 0)


def launches(model: nn.Module, fused: bool) -> int:
    """Launches of one call."""
    size = model.config.img_size
    images = torch.empty(BATCH, 3, *(size if isinstance(size, tuple) else (size, size)), dtype=DTYPE, device="meta")
    if not fused:
        return traced(model, None, False, (images,), {}).count.launches
    with forcing("fused"):
        return traced(model, gpus()[GPU], False, (images,), {}, frozen=True).count.launches


def build(name: str, **options: Any) -> nn.Module:
    """A model in evaluation mode on the meta device, of classifiers with 1000 classes."""
    task = getattr(getattr(CATALOGUE[name], "MODEL", None), "task", "classify")
    options |= dict(num_classes=1000) if task == "classify" else {}
    with weightless():
        model = create_model(name, **options).to(DTYPE).eval()
    return model._apply(lambda t: t.to("meta") if t.is_floating_point() else t)


def counted(system: System) -> dict[str, Any]:
    """Parameters with 1000 classes, and launches of a block: [eager PyTorch, fused]."""
    config = model_config(system.model)
    names = [field.name for field in fields(config)]
    name = next(name for name in ("encoder_layers", "depth", "depths") if name in names)
    depths = [filled(getattr(config, name), n, getattr(config, "num_heads", ())) for n in (2, 4)]
    models = [build(system.model, **{name: depth}) for depth in depths]
    added = blocks(depths[1]) - blocks(depths[0])
    per_block = [(launches(models[1], fused) - launches(models[0], fused)) / added for fused in (False, True)]
    return dict(model=system.model, parameters=parameters(system), launches=[round(n, 2) for n in per_block])


def parameters(system: System) -> int:
    """Those of the named model, of classifiers with 1000 classes."""
    with torch.device("meta"):
        model = create_model(system.model, **(dict(num_classes=1000) if system.side else {}))
    return sum(p.numel() for p in model.parameters())


def small(system: System) -> nn.Module:
    """The model for the digits."""
    options = dict(img_size=system.side, in_chans=1, num_classes=10) | system.tiny
    options.pop("similarity_loss", None)
    return create_model(options.pop("model", system.model), **options)


def part(split: str, side: int, shuffled: bool) -> TensorBatches:
    """The digits, enlarged."""
    images, targets = digits(split)
    images = F.interpolate(images, (side, side), mode="bilinear")
    transform = Transform((side, side), (DIGITS_MEAN,), (DIGITS_STD,))
    return TensorBatches(images, targets, transform, IMAGES, torch.clone if shuffled else None)


def objective(model: nn.Module, images: Tensor, targets: Tensor, smooth: bool) -> tuple[Tensor, Tensor]:
    """Cross-entropy with label smoothing, with `smooth` also the similarity of patch tokens; and logits."""
    tokens = model.forward_features(images) if smooth else None
    logits = model(images) if tokens is None else model.forward_head(tokens)
    loss = F.cross_entropy(logits, targets, label_smoothing=SMOOTHING)
    return loss if tokens is None else loss + similarity_loss(tokens[:, 1:]), logits


def learned(system: System, epochs: int = EPOCHS, seeds: int = SEEDS) -> dict[str, Any]:
    """Trains the small model from each seed; its test accuracy after each epoch."""
    loss, began, accuracy = (
        partial(objective, smooth=system.tiny.get("similarity_loss", False)),
        time.process_time(),
        [],
    )
    for seed in range(seeds):
        torch.manual_seed(seed)
        model, train = small(system), part("train", system.side, True)
        test = partial(evaluate, batches=part("test", system.side, False))
        lr_at = partial(warmup_cosine, steps=epochs * len(train), warmup=min(WARMUP, len(train)), peak=LR)
        settings = dict(epochs=epochs, step=Step(objective=loss, clip=1.0), test=test)
        run = fit(model, train, adamw(model, LR, DECAY), lr_at, **settings)
        accuracy.append([round(progress.test.accuracy, 4) for progress in run if progress.done])
    seconds = round((time.process_time() - began) / seeds, 1)
    results = dict(parameters=sum(p.numel() for p in model.parameters()), accuracy=accuracy, core_seconds=seconds)
    return dict(side=system.side, tiny=system.tiny) | results | provenance()


def has_run(run: dict[str, Any] | None, system: System) -> bool:
    """Whether a row's run is of the system's small model, and there only if the system classifies."""
    if run is None or not system.side:
        return run is None and not system.side
    with torch.device("meta"):
        count = sum(p.numel() for p in small(system).parameters())
    return (run["side"], made(run["tiny"]), run["parameters"]) == (system.side, system.tiny, count)


def reached(row: dict[str, Any], epoch: int = EPOCHS) -> tuple[float, float, float]:
    """Mean, smallest and largest accuracy of the seeds after an epoch, in percent."""
    percents = [100 * accuracy[epoch - 1] for accuracy in row["digits"]["accuracy"]]
    return sum(percents) / len(percents), min(percents), max(percents)


def write(rows: list[dict[str, Any]], folder: Path) -> None:
    """Writes survey.json, one row on a line, in the order of SYSTEMS."""
    order = [system.name for system in SYSTEMS]
    rows = sorted((row for row in rows if row["system"] in order), key=lambda row: order.index(row["system"]))
    facts = {"note": NOTE, "command": "python -m benchmarks.survey"}
    write_text(folder / "survey.json", as_json(facts, rows=rows))


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws accuracy against parameters; a label takes the first free place around its point."""
    from matplotlib.ticker import LogLocator, ScalarFormatter

    rows = [row for row in rows if "digits" in row]
    sizes = [row["digits"]["parameters"] / 1e3 for row in rows]
    means, least, most = zip(*map(reached, rows), strict=True)
    page = figure(10.0, 7.0)
    axes = page.subplots()
    axes.vlines(sizes, least, most, color=BLUE, alpha=0.35)
    axes.scatter(sizes, means, s=28, color=BLUE, zorder=3)
    title = f"Small models of each system, {EPOCHS} epochs on 1,437 digits: mean and range of {SEEDS} seeds"
    dress(axes, title, "test accuracy, %", "parameters, thousands")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.minorticks_off()
    axes.margins(x=0.12, y=0.08)
    page.draw_without_rendering()  # places the axes
    scale, to_page = 72 / page.dpi, axes.transData.transform
    dots, low, high = ([scale * to_page(xy) for xy in zip(sizes, ys, strict=True)] for ys in (means, least, most))
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in dots]
    taken += [(x - 2, bottom, x + 2, top) for (x, bottom), (_, top) in zip(low, high, strict=True)]
    left, right = axes.bbox.x0 * scale, axes.bbox.x1 * scale
    for i in sorted(range(len(rows)), key=lambda i: -dots[i][1]):
        (x, y), name = dots[i], rows[i]["system"].partition(",")[0]
        box = free_place(x, y, WIDE * len(name), taken, left, right)
        taken.append(box)
        shift = box[0] - x, box[1] + 6 - y
        style = dict(textcoords="offset points", va="center", fontsize=9)
        line = dict(arrowstyle="-", lw=0.6, alpha=0.5, shrinkB=4) if min(map(abs, shift)) > 10 else None
        axes.annotate(name, (sizes[i], means[i]), shift, arrowprops=line, **style)
    with replacing(path) as temporary:
        page.savefig(temporary, format="png", dpi=150)


def free_place(x: float, y: float, width: float, taken: list[Box], left: float, right: float) -> Box:
    """The nearest box for a label beside a point that overlaps no other box; if there is none, the one at its right."""
    places = [
        (dx, dy) for far in (7, 15, 24, 34, 46) for dy in (0, far, -far) for dx in (far, -far - width, -width / 2)
    ]
    boxes = [(x + dx, y + dy - 6, x + dx + width, y + dy + 6) for dx, dy in places if dy or dx != -width / 2]
    inside = [box for box in boxes if left < box[0] and box[2] < right]
    return next((box for box in inside if not any(overlap(box, other) for other in taken)), boxes[0])


def overlap(a: Box, b: Box) -> bool:
    """True if two boxes (left, bottom, right, top) share a point."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def main() -> None:
    """Counts and trains the chosen systems, and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--only", default="", metavar="PATTERN", help="regular expression for the system")
    parser.add_argument("--missing", action="store_true", help="only systems without a row")
    parser.add_argument("--counts", action="store_true", help="count, and keep the runs of the file")
    parser.add_argument("--plot", action="store_true", help="only draw the picture again")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = args.out / "survey.json"
    rows = {row["system"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}
    for system in SYSTEMS:
        wanted = re.search(args.only, system.name) and not (args.missing and system.name in rows)
        if system.built and wanted and not args.plot:
            earlier = rows.get(system.name, {}).get("digits")
            run = earlier if not system.side or (args.counts and has_run(earlier, system)) else learned(system)
            rows[system.name] = dict(system=system.name, **counted(system)) | (dict(digits=run) if run else {})
            print(json.dumps(rows[system.name]), flush=True)
            write(list(rows.values()), args.out)
    draw(list(rows.values()), path.with_suffix(".png"))


if __name__ == "__main__":
    main()
