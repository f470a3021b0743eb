"""Trains our ViT and timm's of the same size on Fashion-MNIST, three seeds each, on one core.

    python -m benchmarks.fashion_mnist /usr/share/datasets/fashion-mnist     about half an hour
    python -m benchmarks.fashion_mnist --plot                                draws the picture of the results again

Both models are trained by the recipe `fashion-mnist` with the same schedule, batches and augmentation; each library
draws its own initial weights, by the same rule (truncated normal, 0.02), and positions as the recipe says. All 60,000
training images are used. The test split is evaluated after each epoch for the curves; no choice depends on it.
Without a GPU our model takes the PyTorch path, so equal accuracy within the spread of the seeds is expected.
The first command writes results/fashion-mnist.json after every run, goes on where it was stopped, and draws
results/fashion-mnist.png.
"""

import argparse
import hashlib
import json
import statistics
import time
from dataclasses import asdict
from pathlib import Path

import torch
from timm.models import VisionTransformer
from torch import nn

from benchmarks.digits import provenance
from fastvit_triton.files import replacing
from fastvit_triton.models import create_model
from fastvit_triton.train.build import configure_model
from fastvit_triton.train.data import load
from fastvit_triton.train.data.idx import scan_idx
from fastvit_triton.train.plots import BLUE, ORANGE, dress, figure
from fastvit_triton.train.recipes import FASHION_MNIST, Recipe
from fastvit_triton.train.trainer import build_trainer

RESULT = Path(__file__).parent / "results" / "fashion-mnist.json"
PICTURE = RESULT.with_suffix(".png")
SEEDS = range(3)
CLASSES = 10


def ours(recipe: Recipe) -> nn.Module:
    """Our model."""
    options = recipe.options | dict(img_size=recipe.img_size, in_chans=1, num_classes=CLASSES)
    return create_model(recipe.model, **options)


def timms(recipe: Recipe) -> nn.Module:
    """timm's model of the same size."""
    return VisionTransformer(img_size=recipe.img_size, in_chans=1, num_classes=CLASSES, **recipe.options)


ARMS = {"fastvit_triton": ours, "timm": timms}


def train(arm: str, path: Path, recipe: Recipe, seed: int) -> dict:
    """One run; the batches depend on the seed only."""
    torch.manual_seed(seed)
    model = ARMS[arm](recipe)
    configure_model(recipe, model)
    data = load(str(path), recipe)
    torch.manual_seed(seed)
    began, rows = time.process_time(), []
    for progress in build_trainer(model, data, recipe).fit():
        if progress.done:
            rows.append((progress.loss.item(), progress.test.loss, progress.test.accuracy))
    losses, test_losses, accuracies = ([round(value, 5) for value in column] for column in zip(*rows, strict=True))
    return {
        "seed": seed,
        "accuracy": accuracies[-1],
        "train_loss": losses,
        "test_loss": test_losses,
        "test_accuracy": accuracies,
        "core_seconds": round(time.process_time() - began, 1),
    }


def facts(path: Path, recipe: Recipe) -> dict:
    """What must be equal for the rows of two commands to stand in one file."""
    parts = {split: scan_idx(path, split) for split in ("train", "val")}
    digests = {}
    for split, part in parts.items():
        (pixels,) = part.decode.args
        digests[split] = hashlib.sha256(pixels.tobytes() + bytes(part.targets)).hexdigest()
    return {"recipe": json.loads(json.dumps(asdict(recipe))), "sha256": digests}


def summary(runs: dict[str, list[dict]]) -> dict:
    """Mean and standard deviation of the last accuracies of each model, and their difference in standard errors."""
    columns = {arm: [row["accuracy"] for row in rows] for arm, rows in runs.items()}
    if min(map(len, columns.values())) < 2:
        return {}
    accuracies = {
        arm: {"mean": round(statistics.mean(column), 5), "deviation": round(statistics.stdev(column), 5)}
        for arm, column in columns.items()
    }
    first, second = columns.values()
    error = sum(statistics.variance(column) / len(column) for column in (first, second)) ** 0.5
    difference = statistics.mean(first) - statistics.mean(second)
    return accuracies | {"difference": round(difference, 5), "standard_error": round(error, 5)}


def draw(result: dict) -> None:
    """Draws loss and accuracy of all runs by epoch."""
    page = figure(9.0, 3.6)
    loss, accuracy = page.subplots(1, 2)
    for (arm, rows), colour in zip(result["runs"].items(), (BLUE, ORANGE), strict=True):
        for number, row in enumerate(rows):
            epochs = range(1, len(row["test_accuracy"]) + 1)
            style = dict(color=colour, lw=1.5, marker="o", markersize=3.5, label="" if number else arm)
            style |= dict(linestyle="-" if arm == "fastvit_triton" else "--", alpha=0.8)
            loss.plot(epochs, row["test_loss"], **style)
            accuracy.plot(epochs, [100 * value for value in row["test_accuracy"]], **style)
    seeds = len(result["runs"]["timm"])
    for axes, title, unit in ((loss, "Test loss", "nats"), (accuracy, f"Test accuracy, {seeds} seeds each", "%")):
        dress(axes, title, unit)
    accuracy.legend(frameon=False, loc="lower right")
    with replacing(PICTURE) as temporary:
        page.savefig(temporary, format="png", dpi=150)


def main() -> None:
    """Runs what is missing in the result file, and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, nargs="?", help="folder of the four IDX files")
    parser.add_argument("--plot", action="store_true", help="only draw the picture again")
    args = parser.parse_args()
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if args.plot:
        return draw(result)
    if args.path is None:
        parser.error("give the folder of the four IDX files, or --plot")
    torch.set_num_threads(1)
    dataset = facts(args.path, FASHION_MNIST)
    if any(result.get(name) != value for name, value in dataset.items()):
        result = provenance() | {"threads": 1, "images": 60_000} | dataset | {"runs": {arm: [] for arm in ARMS}}
    for seed in SEEDS:
        for arm, rows in result["runs"].items():
            if seed not in (row["seed"] for row in rows):
                rows.append(train(arm, args.path, FASHION_MNIST, seed))
                print(arm, rows[-1], flush=True)
                result["summary"] = summary(result["runs"])
                with replacing(RESULT) as temporary:
                    temporary.write_text(json.dumps(result, indent=2) + "\n")
    draw(result)


if __name__ == "__main__":
    main()
