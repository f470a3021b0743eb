"""`python -m benchmarks.figures [RESULTS.csv]`: adds the figures that `fastvit-triton models` shows beside new names.

FLOPs of one image are counted by PyTorch (`convert.flop_shares.flops`); a multiply-add counts as two. Top-1 accuracies
are those that the authors of timm publish: RESULTS.csv is results/results-imagenet.csv of
huggingface/pytorch-image-models (Apache-2.0); the committed file was made from commit aa4b5850.
"""

import csv
import json
import sys
from pathlib import Path

from fastvit_triton.convert.flop_shares import flops, stated_input
from fastvit_triton.models import list_models
from fastvit_triton.models.weights.pretrained import FIGURES, figures
from fastvit_triton.models.weights.pretrained import list_models as list_tagged
from fastvit_triton.models.weights.rebuild import skeleton

from .result_file import write_text


def size_of(name: str) -> list[float | None]:
    """Parameters, and FLOPs of one image of the model's own size, divided by 1e9; None if PyTorch cannot count them."""
    model = skeleton(name).eval()
    example = stated_input(model)
    counted = None if example is None else flops(model, example)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return [parameters, None if counted is None else float(f"{counted.total / 1e9:.4g}")]


def top1(path: Path) -> dict[str, float]:
    """Name with tag → top-1 accuracy on ImageNet in %, of the weights that we list, at their own image size."""
    with path.open(newline="", encoding="utf-8") as file:
        published = {row["model"]: float(row["top1"]) for row in csv.DictReader(file)}
    return {name: published[name] for name in list_tagged(pretrained=True) if name in published}


def main(path: str | None = None) -> None:
    """Counts models that the file lacks, and reads the accuracies again if a path is given."""
    known = figures()
    sizes = {name: known["sizes"].get(name) or size_of(name) for name in list_models()}
    parts = {"sizes": sizes, "top1": known["top1"] if path is None else top1(Path(path))}
    blocks = []
    for part, rows in parts.items():
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
        blocks.append(f" {json.dumps(part)}: {{\n{lines}\n }}")
    write_text(FIGURES, "{\n" + ",\n".join(blocks) + "\n}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
