"""Predicted speed of optimised models against torch.compile, by model and GPU: the first table of the README.

    python -m benchmarks.gains --out benchmarks/results/gains.json

Inference in bfloat16 without `freeze`, and forward and backward passes, of whole models. Nothing is measured: times are
those of fastvit_triton/expected/, whose error for inference of each family of models is in
benchmarks/results/backtest.json. The tower's family has no published row.
"""

import argparse
import itertools
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fastvit_triton
from fastvit_triton.cli.model_by_name import build_model
from fastvit_triton.expected.count import predict
from fastvit_triton.expected.gpus import gpus
from fastvit_triton.measure.machine import provenance

from .backtest import family
from .result_file import as_json, write_text

COMMAND = "python -m benchmarks.gains --out benchmarks/results/gains.json"
INFERENCE = [("inference", 64), ("inference", 256)]
MODELS = {  # title → name, and phases with numbers of images
    "ViT-S/16": ("timm:vit_small_patch16_224", [*INFERENCE, ("training", 64)]),
    "ViT-B/16": ("timm:vit_base_patch16_224", [*INFERENCE, ("training", 64)]),
    "ViT-L/16": ("timm:vit_large_patch16_224", [*INFERENCE, ("training", 64)]),
    "DINOv3 ViT-B/16": ("timm:vit_base_patch16_dinov3", INFERENCE[:1]),
    "Swin-T": ("timm:swin_tiny_patch4_window7_224", INFERENCE[:1]),
    "Qwen2.5-VL tower": ("hf-config:Qwen2_5_VLVisionConfig", [("inference", 4)]),
}
GPUS = ("h200", "a100", "rtx4090")


def rows(title: str, name: str, calls: Iterable[tuple[str, int]]) -> Iterator[dict[str, Any]]:
    """A model's predictions, for each phase, number of images and GPU."""
    built = build_model(name, None)
    model = built.model.to(torch.bfloat16)
    fastvit_triton.optimize(model)
    for (phase, batch), key in itertools.product(calls, GPUS):
        positional, named = built.inputs(batch, partial(torch.empty, dtype=torch.bfloat16, device="meta"))
        model.train(phase == "training")
        one = predict(model, gpus()[key], phase == "training", *positional, **named)
        kind = family(name.removeprefix("timm:")) if name.startswith("timm:") else None
        facts = dict(model=title, name=name, family=kind, gpu=key, phase=phase, batch=batch)
        ms = dict(eager_ms=one.eager_us(), compile_ms=one.compiled_us())
        ms |= dict(autotune_ms=one.compiled_us("max-autotune")) if phase == "inference" else {}
        ms |= dict(zip(("slow_ms", "ours_ms", "best_ms"), one.ours_us(), strict=True))
        ways = sorted({choice.way for choice in one.blocks})
        saved = round(one.saved_bytes("mixed") / one.saved_bytes("plain"), 2)  # fused saves the same
        yield facts | {k: round(us / 1e3, 3) for k, us in ms.items()} | dict(ways=ways, saved=saved)


def main() -> None:
    """Predicts the table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="file for the table")
    out = parser.parse_args().out
    found = [row for title, (name, calls) in MODELS.items() for row in rows(title, name, calls)]
    facts = provenance() | {"command": COMMAND, "note": "predicted; nothing was measured"}
    write_text(out, as_json(facts, rows=found))


if __name__ == "__main__":
    main()
