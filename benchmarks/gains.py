"""Predicted speed of optimised models against torch.compile, by model and GPU: the first table of the README.

    python -m benchmarks.gains --out benchmarks/results/gains.json

Inference of whole models in bfloat16 without `freeze`, with 64 images, or 4 of the tower of packed images. Nothing is
measured: times are those of fastvit_triton/expected/, whose error for each family of models is in
benchmarks/results/backtest.json. The tower's family has no published row.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fastvit_triton
from fastvit_triton.cli.model_by_name import build_model
from fastvit_triton.expected.count import predict
from fastvit_triton.expected.gpus import gpus
from fastvit_triton.files import replacing
from fastvit_triton.measure.machine import provenance

from .backtest import family

COMMAND = "python -m benchmarks.gains --out benchmarks/results/gains.json"
MODELS = {  # title → (name, number of images)
    "ViT-S/16": ("timm:vit_small_patch16_224", 64),
    "ViT-B/16": ("timm:vit_base_patch16_224", 64),
    "ViT-L/16": ("timm:vit_large_patch16_224", 64),
    "DINOv3 ViT-B/16": ("timm:vit_base_patch16_dinov3", 64),
    "Swin-T": ("timm:swin_tiny_patch4_window7_224", 64),
    "Qwen2.5-VL tower": ("hf-config:Qwen2_5_VLVisionConfig", 4),
}
GPUS = ("h200", "a100", "rtx4090")


def rows(title: str, name: str, batch: int) -> list[dict[str, Any]]:
    """A model's predictions, one for each GPU."""
    built = build_model(name, None)
    model = built.model.to(torch.bfloat16)
    fastvit_triton.optimize(model)
    positional, named = built.inputs(batch, partial(torch.empty, dtype=torch.bfloat16, device="meta"))
    predictions = []
    for key in GPUS:
        one = predict(model, gpus()[key], False, *positional, **named)
        kind = family(name.removeprefix("timm:")) if name.startswith("timm:") else None
        facts = dict(model=title, name=name, family=kind, gpu=key, batch=batch)
        ms = dict(
            eager_ms=one.eager_us(), compile_ms=one.compiled_us(), autotune_ms=one.compiled_us("max-autotune")
        ) | dict(zip(("slow_ms", "ours_ms", "best_ms"), one.ours_us(), strict=True))
        ways = sorted({choice.way for choice in one.blocks})
        saved = round(one.saved_bytes("mixed") / one.saved_bytes("plain"), 2)  # fused saves the same
        predictions.append(facts | {k: round(us / 1e3, 3) for k, us in ms.items()} | dict(ways=ways, saved=saved))
    return predictions


def main() -> None:
    """Predicts the table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="file for the table")
    out = parser.parse_args().out
    lines = ",\n".join(
        "  " + json.dumps(row) for title, (name, batch) in MODELS.items() for row in rows(title, name, batch)
    )
    facts = provenance() | {"command": COMMAND, "note": "predicted; nothing was measured"}
    with replacing(out) as temporary:
        temporary.write_text(f'{json.dumps(facts, indent=1)[:-2]},\n "rows": [\n{lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()
