"""How much of other packages' models `optimize` fuses, on the meta device: parameters, products, launches and bytes.

    python -m benchmarks.coverage [towers | detection] --out benchmarks/results [--package PACKAGE] [--only PATTERN]
    python -m benchmarks.coverage official --sources FOLDER --out benchmarks/results [--only PATTERN]
    python -m benchmarks.coverage capture --out benchmarks/results [--only PATTERN]

The models are those of coverage_models.txt, or with `towers` those of coverage_towers.txt: every vision model class of
transformers, of depth 2, and a model of each family of timm. Inference in bfloat16, a batch of 8, on sm_90: counted
from shapes by fastvit_triton.expected; nothing runs and nothing is measured. A model that fails becomes a row
with the error. coverage_excluded.txt names the classes that have no attention over image tokens, and why. `detection`
counts the detectors of coverage_detection.txt, whose blocks no list names: they are first captured on the CPU, with
zeros as weights, from two images of half the size. `official` captures blocks of research repositories and compares
them with the originals: see official.py. `capture` compares readers with captured blocks: see capture_only.py.
"""

import argparse
import importlib
import json
import re
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fastvit_triton import optimize
from fastvit_triton.convert.reporting import Report
from fastvit_triton.engine.hooks import type_name
from fastvit_triton.engine.leaves import LINEARS
from fastvit_triton.expected.count import traced, weightless
from fastvit_triton.expected.gpus import gpus
from fastvit_triton.expected.trace import assuming_true
from fastvit_triton.kernels.choose import Choice
from fastvit_triton.kernels.settings import forcing, observing
from fastvit_triton.measure.timeout import one_line

from .result_file import origin, write_pair
from .tables import coverage_markdown, towers_markdown

MODELS, TOWERS, DETECTION, EXCLUDED = (
    Path(__file__).with_name(f"coverage_{name}.txt") for name in ("models", "towers", "detection", "excluded")
)
BATCH, DTYPE, GPU = 8, torch.bfloat16, "h200"
NOTE = "inference in bfloat16, batch 8; counted from shapes on the meta device, not measured; the plan is predicted"


@dataclass(frozen=True)
class Entry:
    """A line of coverage_models.txt."""

    package: str  # "timm", "torchvision", "transformers" or "vit_pytorch"
    model: str  # timm's name, torchvision's function, or the class of transformers or vit-pytorch, also with its module
    inputs: tuple[tuple[str, str], ...] = ()  # input by name, as sizes or values; empty for images of timm's size
    options: str = "{}"  # of the configuration
    called: bool = True  # False to count parameters only, not a call
    dtype: torch.dtype = DTYPE  # of weights and images; float32 for models that cannot run in bfloat16

    @property
    def name(self) -> str:
        name = f"{self.package}:{self.model}"
        return name if self.dtype == DTYPE else f"{name}, {str(self.dtype).removeprefix('torch.')}"


def entries(text: str) -> list[Entry]:
    """The models listed in a text; ValueError for a line of one word."""
    listed = []
    for line in text.splitlines():
        words = line.partition("#")[0].split(None, 2)
        if not words:
            continue
        if len(words) < 2:
            raise ValueError(f"line {line!r} has one word; give a package, a model, its inputs and its options")
        inputs, brace, options = "".join(words[2:]).partition("{")
        items = shlex.split(inputs)
        pairs = tuple(tuple(word.split("=", 1)) for word in items if word not in ("-", "float32"))
        dtype = torch.float32 if "float32" in items else DTYPE
        listed.append(Entry(words[0], words[1], pairs, brace + options or "{}", "-" not in items, dtype))
    return listed


def excluded(text: str) -> dict[str, str]:
    """Why a model is not counted, by its name; lines of a text are "package:model: reason", else ValueError."""
    reasons = {}
    for line in filter(None, (line.partition("#")[0].strip() for line in text.splitlines())):
        name, colon, reason = line.partition(": ")
        if not (colon and reason.strip()):
            raise ValueError(f"line {line!r} has no reason; give package:model: reason")
        reasons[name] = reason.strip()
    return reasons


def build(entry: Entry) -> nn.Module:
    """The model of an entry in evaluation mode, on the meta device; if it is called, except for integer buffers."""
    options = json.loads(entry.options)
    package = importlib.import_module("torchvision.models" if entry.package == "torchvision" else entry.package)
    with weightless() if entry.called else torch.device("meta"):
        if entry.package == "timm":
            model = package.create_model(entry.model, **options)
        elif entry.package == "torchvision":
            model = getattr(package, entry.model)(**options)
        else:
            module, _, name = entry.model.rpartition(".")
            cls = getattr(importlib.import_module(f"{entry.package}.{module}" if module else entry.package), name)
            configured = entry.package == "transformers"  # vit-pytorch takes tuples only
            tuples = {name: tuple(v) if isinstance(v, list) else v for name, v in options.items()}
            model = cls._from_config(cls.config_class(**options)) if configured else cls(**tuples)
    model = model.to(entry.dtype).eval()
    return model._apply(lambda t: t.to("meta") if t.is_floating_point() else t)  # integer buffers keep their values


def inputs_of(entry: Entry, model: nn.Module) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Positional and named inputs: images without memory, and integers with their values."""

    def tensor(text: str) -> Tensor:
        if text.startswith("["):
            return torch.tensor(json.loads(text))
        if text.startswith("B*"):
            return torch.tensor([json.loads(text[2:])] * BATCH)
        return torch.empty([BATCH if n == "B" else int(n) for n in text.split("x")], dtype=entry.dtype, device="meta")

    if not entry.inputs:
        return (tensor(f"Bx{'x'.join(map(str, model.pretrained_cfg['input_size']))}"),), {}
    tensors = {name: tensor(text) for name, text in entry.inputs}
    return ((), tensors) if entry.package == "transformers" else (tuple(tensors.values()), {})


def example_of(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """The first two of these inputs on the CPU; images as zeros, of half the height and width."""
    return {
        name: torch.zeros(2, t.shape[1], *(n // 2 for n in t.shape[2:]), dtype=t.dtype) if t.is_meta else t[:2]
        for name, t in named.items()
    }


def inside(model: nn.Module, report: Report) -> float:
    """Share of the linear layers' parameters in a fused module; the innermost candidate around a layer decides."""
    rows = {row.path: row for row in report.rows if not row.bare}
    total = fused = 0
    for path, module in model.named_modules():
        if type_name(module) not in LINEARS:
            continue
        size = sum(p.numel() for p in module.parameters())
        names = path.split(".")
        above = (".".join(names[:n]) for n in range(len(names), -1, -1))
        row = next((rows[place] for place in above if place in rows), None)
        total, fused = total + size, fused + size * (row is not None and row.became is not None)
    return fused / max(total, 1)


def row_of(entry: Entry, capturing: bool = False) -> dict[str, object]:
    """The figures of one model, whose blocks are captured from an example if `capturing`."""
    model = build(entry)
    example = None
    if capturing:
        model = model._apply(lambda t: torch.zeros_like(t, device="cpu") if t.is_meta else t)
        example = example_of(inputs_of(entry, model)[1])
    report = optimize(model, freeze=True, example=example)
    unfused = Counter((r.type, r.why) for r in report.rows if r.became is None).most_common()
    return dict(
        model=entry.name,
        parameters=sum(p.numel() for p in model.parameters()),
        inside=round(inside(model, report), 4),
        candidates=[len(report.fused), len(report.fused) + len(report.left), len(report.norms)],
        **(call_of(entry, model) if entry.called else {}),
        left=[[n, f"{kind}: {why}"] for (kind, why), n in unfused],
    )


def call_of(entry: Entry, model: nn.Module) -> dict[str, object]:
    """The figures of one call of an optimised model."""
    gpu, (positional, named) = gpus()[GPU], inputs_of(entry, model)
    choices: list[Choice] = []
    with assuming_true():
        eager = traced(model, None, False, positional, named)
        with forcing("fused"):
            ours = traced(model, gpu, False, positional, named, frozen=True)
        with observing(choices.append):
            default = traced(model, gpu, False, positional, named, frozen=True).count
    products = sum(event.flops for event in ours.events)
    plan = Counter(choice.way for choice in choices[len(choices) // 2 :] for _ in choice.branches)  # of the second call
    return dict(
        products=round(sum(event.flops for event in ours.events if event.ours) / max(products, 1), 4),
        eager=[eager.count.launches, eager.count.nbytes],
        fused=[ours.count.launches, ours.count.nbytes],
        default=[default.launches, default.nbytes],
        plan=dict(sorted(plan.items())),
    )


def guarded(entry: Entry, capturing: bool = False) -> dict[str, object]:
    """`row_of`, or a row with the error."""
    try:
        return row_of(entry, capturing)
    # Any error: the model is built and run by its own package; one that fails is a row with its error.
    except Exception as error:
        return dict(model=entry.name, error=one_line(error))


def write(rows: list[dict[str, object]], folder: Path, listed: str = "models") -> None:
    """Writes coverage.json, one row on a line, and coverage.md; for another list, coverage-LIST.json and .md."""
    facts: dict[str, object] = {"note": NOTE} | origin()
    if listed == "towers":
        facts["excluded"] = excluded(EXCLUDED.read_text(encoding="utf-8"))
    markdown = towers_markdown if listed == "towers" else coverage_markdown
    write_pair(folder / ("coverage" if listed == "models" else f"coverage-{listed}"), markdown, facts, rows=rows)


def main() -> None:
    """Counts the models, prints a line for each, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    lists = ("models", "towers", "detection", "official", "capture")
    parser.add_argument("list", nargs="?", choices=lists, default="models", help="which list of models")
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--only", default="", metavar="PATTERN", help="regular expression for package:model")
    parser.add_argument("--sources", type=Path, help="of official code: folder with a checkout of each repository")
    parser.add_argument("--package", default="", help="only the models of this package")
    args = parser.parse_args()
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    if args.list == "official":
        from . import official  # here, as it sets the backend

        if args.sources is None:
            parser.error("official needs --sources FOLDER, with a checkout of each repository")
        official.main(args.sources, args.only, args.out)
        return
    if args.list == "capture":
        from . import capture_only  # as above

        capture_only.main(args.only, args.out)
        return
    path = {"models": MODELS, "towers": TOWERS, "detection": DETECTION}[args.list]
    chosen = [e for e in entries(path.read_text(encoding="utf-8")) if args.package in ("", e.package)]
    chosen = [e for e in chosen if re.search(args.only, e.name)]
    if not chosen:
        parser.error(f"--only {args.only} matches no model of {path.name}")
    rows = []
    for entry in chosen:
        rows.append(guarded(entry, args.list == "detection"))
        print(
            *(f"{name}={value}" for name, value in rows[-1].items() if name not in ("left", "parameters")), flush=True
        )
    if args.out:
        write(rows, args.out, args.list)


if __name__ == "__main__":
    main()
