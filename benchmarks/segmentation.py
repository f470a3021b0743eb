"""Trains SETR to give each pixel of scenes of digits a class, and draws what it predicts.

    python -m benchmarks.segmentation [--epochs 12]     about 10 minutes of one core

Writes results/segmentation.json: the options, and after each epoch loss, mean intersection over union and share of
correct pixels on 400 test scenes, whose digits no training scene has; and results/segmentation.png, eight of them.
Nothing was searched: rate, decay and length are those of the first trial.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.digits import provenance
from fastvit_triton import create_model
from fastvit_triton.files import replacing
from fastvit_triton.train import Step, fit, warmup_cosine
from fastvit_triton.train.segmentation import BACKGROUND, evaluate_segmentation, scene_masks, segmented

RESULTS = Path(__file__).parent / "results"
MODEL = "setr_digits"
SCENES = 12_800
TEST_SCENES = 400
OPTIONS = dict(lr=1e-3, weight_decay=0.05, warmup=0.05, clip=1.0, batch_size=32)


def learn(epochs: int) -> tuple[nn.Module, dict[str, Any]]:
    """The trained model, and the row of the result."""
    torch.manual_seed(0)
    model: nn.Module = create_model(MODEL)
    train = scene_masks("train", SCENES, 0, batch_size=OPTIONS["batch_size"])
    test = scene_masks("test", TEST_SCENES, 1, batch_size=100)
    optimizer = torch.optim.AdamW(model.parameters(), OPTIONS["lr"], weight_decay=OPTIONS["weight_decay"], fused=True)
    steps = epochs * len(train)
    lr_at = partial(warmup_cosine, steps=steps, warmup=round(OPTIONS["warmup"] * steps), peak=OPTIONS["lr"])
    step = Step(objective=segmented(), clip=OPTIONS["clip"])
    score = partial(evaluate_segmentation, batches=test)
    rows = []
    began = time.process_time()
    for progress in fit(model, train, optimizer, lr_at, epochs=epochs, step=step, test=score):
        if progress.test is not None and progress.test.metrics is not None:
            found = dict(loss=progress.test.loss, **progress.test.metrics)
            rows.append(dict(epoch=progress.epoch) | {name: round(value, 5) for name, value in found.items()})
            print(*(f"{name}={value}" for name, value in rows[-1].items()), flush=True)
    parameters = sum(p.numel() for p in model.parameters())
    row = dict(model=MODEL, parameters=parameters, epochs=epochs, steps=steps, options=OPTIONS, log=rows)
    row |= dict(core_seconds=round(time.process_time() - began), trained_by="train.fit")
    return model.eval(), row | provenance()


def draw(model: nn.Module, path: Path, count: int = 8) -> None:
    """Draws test scenes: image, classes of the pixels, and the prediction."""
    from matplotlib.figure import Figure

    images, masks = next(iter(scene_masks("test", count, 1, batch_size=count)))
    with torch.no_grad():
        predictions = model(images).argmax(1)
    figure = Figure(figsize=(1.2 * count, 4.2), layout="constrained")
    axes = figure.subplots(3, count)
    for i in range(count):
        for row, (pixels, title) in enumerate(((images[i, 0], "image"), (masks[i], "true"), (predictions[i], "SETR"))):
            place = axes[row, i]
            place.set_axis_off()
            if i == 0:
                place.set_title(title, loc="left", fontsize=9)
            if row == 0:
                place.imshow(pixels, cmap="gray", vmin=0, vmax=1)
                continue
            classes = pixels.float().masked_fill(pixels == BACKGROUND, torch.nan)
            place.imshow(classes, cmap="tab10", vmin=0, vmax=9, interpolation="nearest")
            place.set_facecolor("black")
            for label in classes[classes.isfinite()].unique().tolist():
                rows, columns = (classes == label).nonzero().float().mean(0).tolist()
                place.text(
                    columns, rows, f"{label:.0f}", color="black", fontsize=8, ha="center", va="center", weight="bold"
                )
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)


def main() -> None:
    """Trains, and writes the result and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12, help="epochs of 400 steps (default: 12)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args()
    torch.set_num_threads(1)  # with others, sums have another order
    model, row = learn(args.epochs)
    with replacing(args.out / "segmentation.json") as temporary:
        temporary.write_text(json.dumps(dict(command="python -m benchmarks.segmentation") | row, indent=1) + "\n")
    draw(model, args.out / "segmentation.png")


if __name__ == "__main__":
    main()
