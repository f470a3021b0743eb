"""Chooses the recipe for the digits by cross-validation and reports its accuracy on the test split.

    python -m benchmarks.digits           cross-validates every candidate; minutes on two cores
    python -m benchmarks.digits --test    trains the shipped recipe, seed 0, and reads the test split

Seed s trains on four of five folds of the training split and is evaluated on fold s. No choice depends on the test
split.
The best mean among the candidates that fit the time budget is shipped; the last five candidates combine what helped
among the others. A difference of half a percent between two means is noise. Both commands write
results/digits-recipe.json.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import torch
from sklearn.model_selection import StratifiedKFold

from fastvit_triton.files import replacing
from fastvit_triton.models import create_model
from fastvit_triton.train.build import configure_model
from fastvit_triton.train.data import DIGITS_MEAN, DIGITS_STD, Data, TensorBatches, affine_augmentation, digits
from fastvit_triton.train.data.transform import Transform
from fastvit_triton.train.recipes import DIGITS, Recipe
from fastvit_triton.train.trainer import build_trainer

RESULT = Path(__file__).parent / "results" / "digits-recipe.json"
SEEDS = range(5)
BUDGET = 75  # seconds of one core for one fold; a run on all training images takes 5/4 of it, divided by the cores

BASE = Recipe(
    model="vit_digits_patch2_8",
    img_size=8,
    epochs=60,
    batch_size=64,
    lr=2e-3,
    pos_std=0.5,
    label_smoothing=0.1,
    mixup=0.4,
    clip=1.0,
    degrees=10,
    zoom=0.1,
    shift=0.5,
)
SMALL = {"embed_dim": 64, "depth": 4, "num_heads": 2}

# name: what differs from BASE, and from the base model
CANDIDATES = {
    "base": ({}, SMALL),
    "positions of 0.02": ({"pos_std": None}, SMALL),
    "no augmentation": ({"degrees": 0, "zoom": 0, "shift": 0}, SMALL),
    "shift of a whole pixel": ({"shift": 1.0}, SMALL),
    "more augmentation": ({"degrees": 15, "zoom": 0.15, "shear": 0.15}, SMALL),
    "no mixup": ({"mixup": 0.0}, SMALL),
    "no label smoothing": ({"label_smoothing": 0.0}, SMALL),
    "drop path": ({"drop_path_rate": 0.1}, SMALL),
    "half the rate": ({"lr": 1e-3}, SMALL),
    "twice the rate": ({"lr": 4e-3}, SMALL),
    "100 epochs": ({"epochs": 100}, SMALL),
    "wider": ({}, {"embed_dim": 96, "depth": 4, "num_heads": 3}),
    "patch 1": ({"epochs": 30}, {"embed_dim": 64, "depth": 4, "num_heads": 2, "patch_size": 1}),
    "100 epochs, half the rate": ({"epochs": 100, "lr": 1e-3}, SMALL),
    "100 epochs, more augmentation": ({"epochs": 100, "degrees": 15, "zoom": 0.15, "shear": 0.15}, SMALL),
    "100 epochs, no label smoothing": ({"epochs": 100, "label_smoothing": 0.0}, SMALL),
    "150 epochs, more augmentation": ({"epochs": 150, "degrees": 15, "zoom": 0.15, "shear": 0.15}, SMALL),
    "80 epochs, wider, more augmentation": (
        {"epochs": 80, "degrees": 15, "zoom": 0.15, "shear": 0.15},
        {"embed_dim": 96, "depth": 4, "num_heads": 3},
    ),
}


def train_and_evaluate(
    recipe: Recipe, sizes: dict, fit_part: tuple, test_part: tuple, seed: int
) -> tuple[float, float]:
    """Accuracy on `test_part` after the last epoch, and seconds of processor time."""
    torch.manual_seed(seed)
    transform = Transform((8, 8), (DIGITS_MEAN,), (DIGITS_STD,))
    batches = TensorBatches(*fit_part, transform, recipe.batch_size, affine_augmentation(recipe))
    judged = TensorBatches(*test_part, transform, 128)
    data = Data("digits", tuple("0123456789"), transform, batches, judged, test_once=True)
    model = create_model(recipe.model, drop_path_rate=recipe.drop_path_rate, **sizes)
    configure_model(recipe, model)
    began = time.process_time()
    *_, last = build_trainer(model, data, recipe).fit()
    return last.test.accuracy, time.process_time() - began


def fold(name: str, seed: int) -> tuple[float, float]:
    """One candidate on one fold."""
    changes, sizes = CANDIDATES[name]
    images, targets = digits("train")
    folds = StratifiedKFold(len(SEEDS), shuffle=True, random_state=0).split(images, targets)
    parts = [(images[rows], targets[rows]) for rows in list(folds)[seed]]
    return train_and_evaluate(replace(BASE, **changes), sizes, *parts, seed)


def choose(known: dict) -> dict:
    """All candidates on all folds, best first; known rows are kept."""
    rows = known.get("candidates", {}) if known.get("base") == asdict(BASE) else {}
    rows = {name: row for name, row in rows.items() if name in CANDIDATES and row["changes"] == changes(name)}
    with ProcessPoolExecutor(initializer=torch.set_num_threads, initargs=(1,)) as pool:
        running = {name: pool.map(fold, [name] * len(SEEDS), SEEDS) for name in CANDIDATES if name not in rows}
        for name, results in running.items():
            accuracies, seconds = zip(*results, strict=True)
            rows[name] = {
                "changes": changes(name),
                "validation_mean": round(statistics.mean(accuracies), 5),
                "validation_spread": round(statistics.stdev(accuracies), 5),
                "validation": [round(accuracy, 5) for accuracy in accuracies],
                "core_seconds": round(statistics.median(seconds), 1),
            }
            print(name, rows[name], flush=True)
    ranked = dict(sorted(rows.items(), key=lambda item: -item[1]["validation_mean"]))
    chosen = next(name for name, row in ranked.items() if row["core_seconds"] <= BUDGET)
    return {"base": asdict(BASE), "budget_core_seconds": BUDGET, "chosen": chosen, "candidates": ranked}


def changes(name: str) -> dict:
    """Changes of a candidate, in the recipe and in the model."""
    recipe, sizes = CANDIDATES[name]
    return recipe | sizes


def final() -> dict:
    """The shipped recipe, seed 0, trained on all training images and evaluated on the test split."""
    began = time.perf_counter()
    accuracy, seconds = train_and_evaluate(DIGITS, {}, digits("train"), digits("test"), seed=0)
    return {
        "recipe": asdict(DIGITS),
        "test_accuracy": round(accuracy, 5),
        "seconds": round(time.perf_counter() - began, 1),
        "core_seconds": round(seconds, 1),
        "threads": torch.get_num_threads(),
    }


def provenance() -> dict:
    """Date, versions and processor."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor(),
        "cores": os.cpu_count(),
    }


def processor() -> str:
    """Name of the processor, from /proc/cpuinfo if it exists."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def main() -> None:
    """Runs one of the two commands and writes its part of the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--test", action="store_true", help="evaluate the shipped recipe on the test split")
    part = "test" if parser.parse_args().test else "validation"
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    result[part] = provenance() | (final() if part == "test" else choose(result.get(part, {})))
    with replacing(RESULT) as temporary:
        temporary.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result[part], indent=2))


if __name__ == "__main__":
    main()
