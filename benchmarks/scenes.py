"""Trains the detectors for scenes of digits by their recipes, and draws what one of them finds.

    python -m benchmarks.scenes --runs runs/scenes      12 minutes of one core; a run that was cut off goes on

Writes results/scenes-recipe.json: recipe, log, and seconds of processor time of a step, the median of twenty;
results/scenes.png, twelve test scenes; and results/queries.png, what the queries of one of them read. No choice depends
on the test scenes, which hold other digits than the training.
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.digits import provenance
from fastvit_triton import create_model
from fastvit_triton.cli import main as command
from fastvit_triton.cli.loading import load_trained
from fastvit_triton.explain import query_panels
from fastvit_triton.files import replacing
from fastvit_triton.train import newest_state
from fastvit_triton.train.data import Data
from fastvit_triton.train.detection import criterion_of, detected, evaluate_detector, scenes
from fastvit_triton.train.detection.load import SCENES as NAME
from fastvit_triton.train.detection.load import TEST, TRAINING, load_detection_test
from fastvit_triton.train.outputs import WEIGHTS
from fastvit_triton.train.plots import detections
from fastvit_triton.train.recipes import SCENES, SCENES_DETR, Recipe

RESULTS = Path(__file__).parent / "results"
RECIPES = {recipe.model: recipe for recipe in (SCENES, SCENES_DETR)}
COLUMNS = ("epoch", "train_loss", "test_loss", "test_ap", "test_ap50", "test_ap75")
STEPS = 20


def steps_of(recipe: Recipe) -> int:
    """Length of a run in steps."""
    per_epoch = -(-TRAINING[0] // recipe.batch_size)
    return recipe.epochs_of(per_epoch) * per_epoch


def seconds_per_step(recipe: Recipe) -> float:
    """Median processor time of a step, with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model: nn.Module = create_model(recipe.model)
    images, targets = scenes("train", recipe.batch_size)
    objective = detected(criterion_of(model))
    optimizer = torch.optim.AdamW(model.parameters(), recipe.lr, fused=True)
    times = []
    for _ in range(STEPS):
        began = time.process_time()
        objective(model, images, targets)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.process_time() - began)
    torch.set_num_threads(threads)
    return round(statistics.median(times), 4)


def trained(recipe: Recipe, out: Path) -> dict[str, Any]:
    """Trains a recipe, or reads the run that is there; its row of the result."""
    words = ["train", "--data", NAME, "--model", recipe.model, "--out", str(out), "--resume", "auto", "--workers", "0"]
    if command(words):
        raise SystemExit(1)
    state, _ = newest_state(out)
    rows = [{name: round(row[name], 5) for name in COLUMNS} for row in state["history"]]
    parameters = sum(p.numel() for p in create_model(recipe.model).parameters())
    found = dict(recipe=asdict(recipe), parameters=parameters, steps=steps_of(recipe), log=rows)
    return found | dict(core_seconds_per_step=seconds_per_step(recipe)) | provenance()


def draw(out: Path, path: Path) -> None:
    """Draws twelve test scenes with the boxes that the model of a run finds."""
    model = load_trained(str(out / WEIGHTS))
    test = load_detection_test(NAME, model.classes, model.transform, model.batch_size)
    score = evaluate_detector(model.model, test)
    data = Data(NAME, model.classes, model.transform, test, test)
    with replacing(path) as temporary:
        detections(data, score).savefig(temporary, format="png", dpi=150)


def draw_points(out: Path, path: Path, scene: int = 6) -> None:
    """Draws the points that the queries of a test scene's objects read, by the model of a run."""
    model = load_trained(str(out / WEIGHTS))
    images, _ = scenes("test", scene + 1, TEST[1])
    image = images[scene]
    (panel,) = query_panels(model.model.eval(), [image], [image.clamp(0, 1)], [f"test scene {scene}"], model.classes)
    with replacing(path) as temporary:
        panel.figure.savefig(temporary, format="png", dpi=150)


def main() -> None:
    """Trains both, and writes the result and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/scenes"), help="folder of both runs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args()
    rows = {name: trained(recipe, args.runs / name) for name, recipe in RECIPES.items()}
    with replacing(args.out / "scenes-recipe.json") as temporary:
        temporary.write_text(json.dumps(dict(command="python -m benchmarks.scenes", models=rows), indent=1) + "\n")
    draw(args.runs / SCENES.model, args.out / "scenes.png")
    draw_points(args.runs / SCENES.model, args.out / "queries.png")


if __name__ == "__main__":
    main()
