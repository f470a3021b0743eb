"""Trains small models on the data that every machine has or installs, and states what they reach.

    python -m benchmarks.trainings                       lists the trainings and their rows
    python -m benchmarks.trainings shapes                trains, writes results/trainings.json and draws the pictures
    python -m benchmarks.trainings learn --only quick    rows whose names match; the others stay
    python -m benchmarks.trainings digits --missing      only rows that the file lacks; goes on where it was cut off
    python -m benchmarks.trainings fashion-mnist --plot  only draws the pictures again, from the run that is there

Everything runs with one thread, because sums of others have another order. No choice depends on the test data. The file
has one row for each model and seed, with recipe or options, what was reached, seconds of processor time, date, versions
and processor. A difference of half a percent between two means on the digits is noise.
"""

import argparse
import csv
import datetime
import hashlib
import json
import os
import platform
import re
import resource
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image
from timm.models import VisionTransformer
from torch import Tensor, nn

from fastvit_triton import create_model
from fastvit_triton.cli import main as command
from fastvit_triton.cli.loading import load_trained
from fastvit_triton.explain import query_panels
from fastvit_triton.files import replacing
from fastvit_triton.models.weights import load_weights
from fastvit_triton.train import (
    Step,
    extract_features,
    few_shot,
    newest_state,
    sample_per_class,
    sample_pictures,
    warmup_cosine,
)
from fastvit_triton.train import fit as fit_model
from fastvit_triton.train.build import build_masked_model, configure_model
from fastvit_triton.train.data import (
    DIGITS_MEAN,
    DIGITS_STD,
    Data,
    TensorBatches,
    affine_augmentation,
    digits,
    sample,
)
from fastvit_triton.train.data.idx import scan_idx
from fastvit_triton.train.data.split import SPLIT
from fastvit_triton.train.data.transform import Transform
from fastvit_triton.train.detection import evaluate_detector, scenes
from fastvit_triton.train.detection.load import SCENES as SCENES_DATA
from fastvit_triton.train.detection.load import SHAPES as SHAPES_DATA
from fastvit_triton.train.detection.load import TEST, load_detection_test
from fastvit_triton.train.loop import Score
from fastvit_triton.train.outputs import LOG, PREDICTIONS, WEIGHTS
from fastvit_triton.train.plots import BLUE, ORANGE, detections, dress, figure
from fastvit_triton.train.recipes import DIGITS, FASHION_MNIST, PHOTOS, RESTORATION, SCENES, SCENES_DETR, SHAPES, Recipe
from fastvit_triton.train.restoration import degrade, psnr, ssim
from fastvit_triton.train.segmentation import BACKGROUND, evaluate_segmentation, scene_masks, segmented
from fastvit_triton.train.sources import load
from fastvit_triton.train.trainer import build_trainer

from .result_file import as_json, write_text

RESULTS = Path(__file__).parent / "results"
RESULT = RESULTS / "trainings.json"
Row = dict[str, Any]


class Place(NamedTuple):
    """Folders of a training."""

    run: Path  # of a row; to draw, the folder of the folders of all rows, by name
    out: Path = RESULTS  # of the pictures
    data: Path = Path("/usr/share/datasets/fashion-mnist")  # of Fashion-MNIST


class Training(NamedTuple):
    """One training."""

    minutes: int  # of one core
    # name → what trains it, from a place and a seed, and returns what is stated
    rows: Mapping[str, Callable[[Place, int], Row]]
    # makes the pictures, from the rows and a place
    draw: Callable[[Sequence[Row], Place], None] = lambda rows, place: None
    seeds: int = 1  # of each row


def parameters(model: nn.Module) -> int:
    """Number of parameters."""
    return sum(p.numel() for p in model.parameters())


def each_seed(run: Callable[[int], Any], seeds: int) -> list[Any]:
    """Results of several seeds, one process on each core."""
    with ProcessPoolExecutor(initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return list(pool.map(run, range(seeds)))


# The digits: the recipe, chosen by cross-validation; and ways of training.

TRANSFORM = Transform((8, 8), (DIGITS_MEAN,), (DIGITS_STD,))
FOLDS, SEEDS, SHOTS = 5, 20, 10  # SHOTS: labelled images per class in the few-shot ways
BUDGET = 75  # seconds of one core for one fold; a run on all training images takes 5/4 of it, divided by the cores
BASE = replace(DIGITS, epochs=60, degrees=10, zoom=0.1, shear=0.0)
SMALL = {"embed_dim": 64, "depth": 4, "num_heads": 2}
WIDER = {"embed_dim": 96, "depth": 4, "num_heads": 3}
MORE = {"degrees": 15, "zoom": 0.15, "shear": 0.15}
# name: what differs from BASE, and from the base model; the last five combine what helped among the others
CANDIDATES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "base": ({}, SMALL),
    "positions of 0.02": ({"pos_std": None}, SMALL),
    "no augmentation": ({"degrees": 0, "zoom": 0, "shift": 0}, SMALL),
    "shift of a whole pixel": ({"shift": 1.0}, SMALL),
    "more augmentation": (MORE, SMALL),
    "no mixup": ({"mixup": 0.0}, SMALL),
    "no label smoothing": ({"label_smoothing": 0.0}, SMALL),
    "drop path": ({"drop_path_rate": 0.1}, SMALL),
    "half the rate": ({"lr": 1e-3}, SMALL),
    "twice the rate": ({"lr": 4e-3}, SMALL),
    "100 epochs": ({"epochs": 100}, SMALL),
    "wider": ({}, WIDER),
    "patch 1": ({"epochs": 30}, SMALL | {"patch_size": 1}),
    "100 epochs, half the rate": ({"epochs": 100, "lr": 1e-3}, SMALL),
    "100 epochs, more augmentation": ({"epochs": 100} | MORE, SMALL),
    "100 epochs, no label smoothing": ({"epochs": 100, "label_smoothing": 0.0}, SMALL),
    "150 epochs, more augmentation": ({"epochs": 150} | MORE, SMALL),
    "80 epochs, wider, more augmentation": ({"epochs": 80} | MORE, WIDER),
}


def fit(model: nn.Module, recipe: Recipe, images: Tensor, targets: Tensor, test: Any = None, **options: Any) -> Score:
    """Trains on these digits by the recipe and evaluates once, on the test split unless others are given."""
    batches = TensorBatches(images, targets, TRANSFORM, recipe.batch_size, affine_augmentation(recipe))
    judged = TensorBatches(*(test or digits("test")), TRANSFORM, 128)
    data = Data("digits", tuple("0123456789"), TRANSFORM, batches, judged, test_once=True)
    *_, last = build_trainer(model, data, recipe, **options).fit()
    return last.test


def fold(name: str, seed: int) -> tuple[float, float]:
    """Accuracy of a candidate on one of five parts of the training split, and seconds of processor time."""
    from sklearn.model_selection import StratifiedKFold

    changes, sizes = CANDIDATES[name]
    recipe, (images, targets) = replace(BASE, **changes), digits("train")
    train, test = list(StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(images, targets))[seed]
    torch.manual_seed(seed)
    model = create_model(recipe.model, drop_path_rate=recipe.drop_path_rate, **sizes)
    configure_model(recipe, model)
    began = time.process_time()
    found = fit(model, recipe, images[train], targets[train], (images[test], targets[test]))
    return found.accuracy, time.process_time() - began


def candidate(name: str, place: Place, seed: int) -> Row:
    """A candidate for the recipe of the digits, by five-fold cross-validation on the training split."""
    accuracies, seconds = zip(*each_seed(partial(fold, name), FOLDS), strict=True)
    changes, sizes = CANDIDATES[name]
    row = dict(changes=changes | sizes) | (dict(recipe=asdict(BASE)) if name == "base" else {})
    return row | {
        "validation_mean": round(statistics.mean(accuracies), 5),
        "validation_spread": round(statistics.stdev(accuracies), 5),
        "validation": [round(accuracy, 5) for accuracy in accuracies],
        "core_seconds": round(statistics.median(seconds), 1),
    }


def rank(rows: Sequence[Row], place: Place) -> None:
    """Prints the candidates, best first; the first one within the budget is what is shipped."""
    known = [row for row in rows if row["name"] in CANDIDATES]
    for row in sorted(known, key=lambda row: -row["validation_mean"]):
        over = "" if row["core_seconds"] <= BUDGET else ", over the budget"
        print(f"{100 * row['validation_mean']:.2f} ± {100 * row['validation_spread']:.2f} %  {row['name']}{over}")


def build(name: str, **options: Any) -> nn.Module:
    """A model for the digits, initialised as in the default recipe."""
    size = dict(SMALL, patch_size=2, img_size=8, in_chans=1, num_classes=10)
    model: nn.Module = create_model(name, **size | options)
    configure_model(DIGITS, model)
    return model


def vit(epochs: int, model: str = DIGITS.model) -> Row:
    """The default recipe."""
    return {"accuracy": fit(build(model), replace(DIGITS, epochs=epochs), *digits("train")).accuracy}


def distilled_deit(epochs: int) -> Row:
    """Hard distillation of a ViT into a DeiT of the same size."""
    recipe = replace(DIGITS, epochs=epochs)
    teacher, student = build(DIGITS.model), build("deit_tiny_distilled_patch16_224")
    taught = fit(teacher, recipe, *digits("train")).accuracy
    student.set_distilled_training()
    options = dict(teacher=teacher.eval().requires_grad_(False), distillation="hard")
    return {"accuracy": fit(student, recipe, *digits("train"), **options).accuracy, "teacher_accuracy": taught}


def simplevit(epochs: int) -> Row:
    """SimpleViT: no class token, fixed positions, mean over tokens."""
    return vit(epochs, "simplevit_small_patch16_224")


def pretrained(epochs: int) -> tuple[nn.Module, float]:
    """A ViT after masked patch prediction on all training images without labels, and the last loss."""
    recipe = replace(DIGITS, loss="colours", mask_ratio=0.5, label_smoothing=0.0, mixup=0.0, epochs=epochs)
    encoder = build(DIGITS.model)
    return encoder, fit(build_masked_model(recipe, encoder), recipe, *digits("train")).loss


def masked(epochs: int) -> Row:
    """Masked patch prediction, then fine-tuning with ten labels per class."""
    images, targets = digits("train")
    chosen = sample_per_class(targets, SHOTS)
    encoder, loss = pretrained(epochs)
    tuned, scratch = build(DIGITS.model), build(DIGITS.model)
    load_weights(tuned, {k: v for k, v in encoder.state_dict().items() if not k.startswith("head")})
    recipe = replace(DIGITS, epochs=epochs, batch_size=32)
    start = {"accuracy": fit(tuned, recipe, images[chosen], targets[chosen]).accuracy}
    plain = {"scratch_accuracy": fit(scratch, recipe, images[chosen], targets[chosen]).accuracy}
    return start | plain | {"masked_loss": loss, "labels": len(chosen)}


def ridge(epochs: int) -> Row:
    """Ridge regression with ten labels per class, on the patch tokens of a model pre-trained by masking.

    Using all tokens as features, instead of their mean, was chosen on part of the training split.
    """
    images, targets = digits("train")
    encoder, _ = pretrained(epochs)
    chosen = sample_per_class(targets, SHOTS)
    parts = (images[chosen], targets[chosen]), digits("test")

    def accuracy(features: Callable[[Tensor], Tensor]) -> float:
        (some, answers), (others, expected) = (
            extract_features(encoder, TensorBatches(*part, TRANSFORM, 128), features) for part in parts
        )
        return (few_shot(some, answers, others, 10).argmax(1) == expected).double().mean().item()

    tokens = accuracy(lambda x: encoder.forward_features(x)[:, 1:].flatten(1))
    return {"accuracy": tokens, "pixels_accuracy": accuracy(lambda x: x.flatten(1)), "labels": len(chosen)}


WAYS = {way.__name__: way for way in (vit, distilled_deit, simplevit, masked, ridge)}


def learn(way: str, epochs: int, place: Place, seed: int) -> Row:
    """Trains on the digits in one way."""
    torch.manual_seed(seed)
    began = time.process_time()
    result = {key: round(value, 5) for key, value in WAYS[way](epochs).items()}
    return result | {"epochs": epochs, "core_seconds": round(time.process_time() - began, 1)}


def spread(place: Place, seed: int) -> Row:
    """The default recipe from twenty seeds."""
    rows = each_seed(partial(learn, "vit", DIGITS.epochs, place), SEEDS)
    reached = [row["accuracy"] for row in rows]
    seconds = round(statistics.median(row["core_seconds"] for row in rows), 1)
    return mean_and_deviation(reached) | dict(accuracy=reached, epochs=DIGITS.epochs, core_seconds=seconds)


def mean_and_deviation(values: Sequence[float]) -> dict[str, float]:
    """Both, to five digits."""
    return {"mean": round(statistics.mean(values), 5), "deviation": round(statistics.stdev(values), 5)}


# Fashion-MNIST: our ViT and timm's of the same size, with the same schedule, batches and augmentation; each library
# draws its own initial weights, by the same rule (truncated normal, 0.02), and positions as the recipe says. All 60,000
# training images are used. Without a GPU our model takes the PyTorch path, so equal accuracy within the spread of the
# seeds is expected.

GREY = dict(in_chans=1, num_classes=10)
ARMS: dict[str, Callable[[Recipe], nn.Module]] = {
    "fastvit_triton": lambda recipe: create_model(recipe.model, **recipe.options, img_size=recipe.img_size, **GREY),
    "timm": lambda recipe: VisionTransformer(**recipe.options, img_size=recipe.img_size, **GREY),
}


def fashion(arm: str, place: Place, seed: int) -> Row:
    """One run on Fashion-MNIST; the batches depend on the seed only."""
    torch.manual_seed(seed)
    model = ARMS[arm](FASHION_MNIST)
    configure_model(FASHION_MNIST, model)
    data = load(str(place.data), FASHION_MNIST)
    torch.manual_seed(seed)
    began, rows = time.process_time(), []
    for progress in build_trainer(model, data, FASHION_MNIST).fit():
        if progress.done:
            rows.append((progress.loss.item(), progress.test.loss, progress.test.accuracy))
    losses, test_losses, accuracies = ([round(value, 5) for value in column] for column in zip(*rows, strict=True))
    row = dict(accuracy=accuracies[-1], train_loss=losses, test_loss=test_losses, test_accuracy=accuracies)
    row |= dict(core_seconds=round(time.process_time() - began, 1), recipe=asdict(FASHION_MNIST), sha256={})
    for split in ("train", "val"):
        part = scan_idx(place.data, split)
        (pixels,) = part.decode.args
        row["sha256"][split] = hashlib.sha256(pixels.tobytes() + bytes(part.targets)).hexdigest()
    return row


def compared(rows: Sequence[Row]) -> dict[str, Any]:
    """Mean and standard deviation of the last accuracies of each model, and their difference in standard errors."""
    columns = [[row["accuracy"] for row in rows if row["name"] == arm] for arm in ARMS]
    error = sum(statistics.variance(column) / len(column) for column in columns) ** 0.5
    ours, theirs = map(statistics.mean, columns)
    found = dict(zip(ARMS, map(mean_and_deviation, columns), strict=True))
    return found | {"difference": round(ours - theirs, 5), "standard_error": round(error, 5)}


def draw_fashion(rows: Sequence[Row], place: Place) -> None:
    """Draws loss and accuracy of all runs by epoch."""
    page = figure(9.0, 3.6)
    loss, accuracy = page.subplots(1, 2)
    colours = dict(zip(ARMS, (BLUE, ORANGE), strict=True))
    for row in sorted(rows, key=lambda row: list(ARMS).index(row["name"])):
        epochs = range(1, len(row["test_accuracy"]) + 1)
        style: dict[str, Any] = dict(color=colours[row["name"]], lw=1.5, marker="o", markersize=3.5, alpha=0.8)
        style |= dict(linestyle="--" if row["name"] == "timm" else "-", label="" if row["seed"] else row["name"])
        loss.plot(epochs, row["test_loss"], **style)
        accuracy.plot(epochs, [100 * value for value in row["test_accuracy"]], **style)
    seeds = len(rows) // len(ARMS)
    for axes, title, unit in ((loss, "Test loss", "nats"), (accuracy, f"Test accuracy, {seeds} seeds each", "%")):
        dress(axes, title, unit)
    accuracy.legend(frameon=False, loc="lower right")
    write_page(page, place.out / "fashion-mnist.png")


# Trained by the command `train`.


def run(*words: str | Path) -> float:
    """CPU seconds of a command of `fastvit-triton`, and of the processes that it waited for; it must not fail."""

    def used() -> float:
        both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in both)

    before = used()
    if code := command([*map(str, words), "--workers", "0"] if words[0] == "train" else [*map(str, words)]):
        raise SystemExit(code)
    return used() - before


def detector(recipe: Recipe, data: str, classes: int, place: Place, seed: int) -> Row:
    """A detector for composed images; a run that was cut off goes on, without its CPU seconds."""
    known = place.run.exists()
    seconds = run("train", "--data", data, "--model", recipe.model, "--out", place.run, "--resume", "auto")
    columns = ("epoch", "train_loss", "test_loss", "test_ap", "test_ap50", "test_ap75")
    state, _ = newest_state(place.run)
    rows = [{name: round(row[name], 5) for name in columns} for row in state["history"]]
    model: nn.Module = create_model(recipe.model, num_classes=classes)
    steps = state["progress"]["epoch"] * state["progress"]["step"]
    row = dict(recipe=asdict(recipe), parameters=parameters(model), steps=steps, log=rows)
    return row if known else row | dict(core_seconds=round(seconds))


def draw_detections(recipe: Recipe, data: str, dpi: int, rows: Sequence[Row], place: Place) -> None:
    """Draws twelve test images with the boxes that the model of a run finds."""
    model = load_trained(str(place.run / recipe.model / WEIGHTS))
    test = load_detection_test(data, model.classes, model.transform, model.batch_size)
    score = evaluate_detector(model.model, test)
    shown = detections(Data(data, model.classes, model.transform, test, test), score)
    write_page(shown, place.out / f"{data}.png", dpi)


def draw_scenes(rows: Sequence[Row], place: Place, scene: int = 6) -> None:
    """Draws test scenes with boxes, and the points that the queries of a scene's objects read."""
    draw_detections(SCENES, SCENES_DATA, 150, rows, place)
    model = load_trained(str(place.run / SCENES.model / WEIGHTS))
    image = scenes("test", scene + 1, TEST[1])[0][scene]
    (panel,) = query_panels(model.model.eval(), [image], [image.clamp(0, 1)], [f"test scene {scene}"], model.classes)
    write_page(panel.figure, place.out / "queries.png")


SIDE, STRIDE = 48, 12  # of tiles of photographs
PHOTOGRAPHS = dict(train="china.jpg", val="flower.jpg")


def photograph(name: str) -> Tensor:
    """Pixels 0 … 255 of a photograph of scikit-learn, [3, H, W]; sides are even."""
    from sklearn.datasets import load_sample_image

    pixels = torch.tensor(load_sample_image(name)).permute(2, 0, 1).float()
    return pixels[:, : pixels.shape[1] // 2 * 2, : pixels.shape[2] // 2 * 2]


def write_tiles(folder: Path) -> int:
    """Writes the tiles of the training photograph, and some of the other as test images; returns their number."""
    for split, stride in (("train", STRIDE), ("val", SIDE)):
        target = folder / split / "photo"
        target.mkdir(parents=True, exist_ok=True)
        pixels = photograph(PHOTOGRAPHS[split]).permute(1, 2, 0).byte().numpy()
        for y in range(0, pixels.shape[0] - SIDE + 1, stride):
            for x in range(0, pixels.shape[1] - SIDE + 1, stride):
                Image.fromarray(pixels[y : y + SIDE, x : x + SIDE]).save(target / f"{y:04d}-{x:04d}.png")
    return len(list((folder / "train" / "photo").iterdir()))


def restored(folder: Path) -> dict[str, dict[str, Tensor]]:
    """For each task the test photograph, what IPT is given, and what it makes of it, of the size of the photograph."""
    model: Any = load_trained(str(folder / "run" / WEIGHTS)).model.eval()
    truth, found = photograph(PHOTOGRAPHS["val"]), {}
    for task in model.config.tasks:
        torch.manual_seed(0)
        given = degrade(truth[None], task)[0]
        with torch.no_grad():
            output = model.restore(given, task)
        shown = given if given.shape == truth.shape else F.interpolate(given[None], truth.shape[1:], mode="bicubic")[0]
        found[task] = dict(given=shown.clamp(0, 255).round(), restored=output.round(), truth=truth)
    return found


def restoration(place: Place, seed: int) -> Row:
    """IPT on tiles of one photograph; scores of the whole other one, as given (x2: bicubically) and restored."""
    tiles = write_tiles(place.run / "tiles")
    words = ("train", "--model", RESTORATION.model, "--data", place.run / "tiles", "--out", place.run / "run")
    run(*words, "--resume", "auto")
    tasks = {
        task: {
            f"{name}_{measure.__name__}": round(measure(images[name][None], images["truth"][None]).item(), 4)
            for name in ("given", "restored")
            for measure in (psnr, ssim)
        }
        for task, images in restored(place.run).items()
    }
    steps = RESTORATION.epochs * -(-tiles // RESTORATION.batch_size)
    return dict(photographs=PHOTOGRAPHS, tiles=tiles, steps=steps, tasks=tasks, recipe=asdict(RESTORATION))


def draw_restored(rows: Sequence[Row], place: Place) -> None:
    """Draws a part of the photograph for each task: given, restored, original."""
    titles = {"x2": "half the size, enlarged bicubically", "denoise30": "noise of standard deviation 30"}
    pictures = restored(place.run / RESTORATION.model)
    page = figure(9.3, 3.3 * len(pictures))
    for axes, (task, images) in zip(page.subplots(len(pictures), 3), pictures.items(), strict=True):
        for place_of, (name, image) in zip(axes, images.items(), strict=True):
            title = {"given": titles[task], "restored": "restored by IPT", "truth": "original"}[name]
            if name != "truth":
                title += f", {psnr(image[None], images['truth'][None]).item():.2f} dB"
            place_of.imshow(image[:, 150:310, 230:390].byte().permute(1, 2, 0), interpolation="nearest")
            place_of.set_title(title, fontsize=9)
            place_of.set_axis_off()
    write_page(page, place.out / "photographs.png", dpi=130)


def drawn_pictures(place: Place, seed: int) -> Row:
    """The default model on the sample of drawn pictures; a fifth of each class is for testing."""
    photos, out, shown = (place.run / name for name in ("photos", "run", "shown"))
    sample_pictures(photos)
    spent = run("train", "--data", photos, "--val-split", "0.2", "--out", out)
    shown.mkdir()
    test = json.loads((out / SPLIT).read_text())["test"]
    for name in sample.CLASSES:
        first = next(path for path in test if path.startswith(f"{name}/"))
        shutil.copy(photos / first, shown / first.replace("/", "-"))
    run("explain", "--checkpoint", out, shown, "--out", place.run / "report", "--no-test")
    with (out / LOG).open(newline="") as file:
        *_, last = csv.DictReader(file)
    accuracy = float(last["test_accuracy"])
    return dict(epochs=int(last["epoch"]), test=len(test), accuracy=accuracy, core_seconds=round(spent))


def draw_sample(rows: Sequence[Row], place: Place, columns: int = 4, wide: int = 900) -> None:
    """Some of the sample, the test images with their predictions, and where six predicted classes come from."""
    folder = place.run / PHOTOS.model
    sheet = Image.new("RGB", (columns * sample.WIDTH, len(sample.CLASSES) * sample.HEIGHT))
    for row, name in enumerate(sample.CLASSES):
        for column, path in enumerate(sorted((folder / "photos" / name).iterdir())[:columns]):
            sheet.paste(Image.open(path), (column * sample.WIDTH, row * sample.HEIGHT))
    made = {"predictions": folder / "run" / PREDICTIONS, "why": folder / "report" / "why.png"}
    for name, image in {"pictures": sheet, **{name: Image.open(path) for name, path in made.items()}}.items():
        image = image.convert("RGB")
        if image.width > wide:
            image = image.resize((wide, round(image.height * wide / image.width)), Image.Resampling.LANCZOS)
        with replacing(place.out / f"sample-{name}.jpg") as temporary:
            image.save(temporary, format="JPEG", quality=85, optimize=True)


# A class for each pixel of scenes of digits, by train.fit; rate, decay and length are those of the first trial.

SETR, SETR_EPOCHS, SETR_SCENES = "setr_digits", 12, 12_800
SETR_OPTIONS = dict(lr=1e-3, weight_decay=0.05, warmup=0.05, clip=1.0, batch_size=32)


def segmentation(place: Place, seed: int) -> Row:
    """SETR; loss, mean intersection over union and share of correct pixels on 400 test scenes after each epoch."""
    torch.manual_seed(seed)
    model: nn.Module = create_model(SETR)
    train = scene_masks("train", SETR_SCENES, 0, batch_size=SETR_OPTIONS["batch_size"])
    score = partial(evaluate_segmentation, batches=scene_masks("test", 400, 1, batch_size=100))
    lr, decay = SETR_OPTIONS["lr"], SETR_OPTIONS["weight_decay"]
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=decay, fused=True)
    steps = SETR_EPOCHS * len(train)
    lr_at = partial(warmup_cosine, steps=steps, warmup=round(SETR_OPTIONS["warmup"] * steps), peak=lr)
    step = Step(objective=segmented(), clip=SETR_OPTIONS["clip"])
    rows, began = [], time.process_time()
    for progress in fit_model(model, train, optimizer, lr_at, epochs=SETR_EPOCHS, step=step, test=score):
        if progress.test is not None and progress.test.metrics is not None:
            found = dict(loss=progress.test.loss, **progress.test.metrics)
            rows.append(dict(epoch=progress.epoch) | {name: round(value, 5) for name, value in found.items()})
            print(*(f"{name}={value}" for name, value in rows[-1].items()), flush=True)
    row = dict(parameters=parameters(model), epochs=SETR_EPOCHS, steps=steps, options=SETR_OPTIONS, log=rows)
    row |= dict(core_seconds=round(time.process_time() - began), trained_by="train.fit")
    place.run.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), place.run / "weights.pt")
    return row


def draw_segmentation(rows: Sequence[Row], place: Place, count: int = 8) -> None:
    """Draws test scenes: image, classes of the pixels, and the prediction."""
    model: nn.Module = create_model(SETR)
    model.load_state_dict(torch.load(place.run / SETR / "weights.pt"))
    images, masks = next(iter(scene_masks("test", count, 1, batch_size=count)))
    with torch.no_grad():
        predictions = model.eval()(images).argmax(1)
    page = figure(1.2 * count, 4.2)
    axes = page.subplots(3, count)
    for i in range(count):
        for row, (pixels, title) in enumerate(((images[i, 0], "image"), (masks[i], "true"), (predictions[i], "SETR"))):
            axis = axes[row, i]
            axis.set_axis_off()
            if i == 0:
                axis.set_title(title, loc="left", fontsize=9)
            if row == 0:
                axis.imshow(pixels, cmap="gray", vmin=0, vmax=1)
                continue
            classes = pixels.float().masked_fill(pixels == BACKGROUND, torch.nan)
            axis.imshow(classes, cmap="tab10", vmin=0, vmax=9, interpolation="nearest")
            axis.set_facecolor("black")
            for label in classes[classes.isfinite()].unique().tolist():
                y, x = (classes == label).nonzero().float().mean(0).tolist()
                axis.text(x, y, f"{label:.0f}", color="black", fontsize=8, ha="center", va="center", weight="bold")
    write_page(page, place.out / "segmentation.png")


# The table, the file and the command.

TRAININGS = {
    "digits": Training(
        60,
        {name: partial(candidate, name) for name in CANDIDATES} | {"shipped": partial(learn, "vit", DIGITS.epochs)},
        rank,
    ),
    "learn": Training(
        40,
        {f"{way}{kind}": partial(learn, way, n) for kind, n in (("", DIGITS.epochs), (" quick", 8)) for way in WAYS}
        | {"vit seeds": spread},
    ),
    "fashion-mnist": Training(30, {arm: partial(fashion, arm) for arm in ARMS}, draw_fashion, seeds=3),
    "scenes": Training(
        12, {one.model: partial(detector, one, SCENES_DATA, 10) for one in (SCENES, SCENES_DETR)}, draw_scenes
    ),
    "shapes": Training(
        10,
        {SHAPES.model: partial(detector, SHAPES, SHAPES_DATA, 6)},
        partial(draw_detections, SHAPES, SHAPES_DATA, 80),  # noise is not compressed
    ),
    "segmentation": Training(10, {SETR: segmentation}, draw_segmentation),
    "photographs": Training(6, {RESTORATION.model: restoration}, draw_restored),
    "sample-run": Training(2, {PHOTOS.model: drawn_pictures}, draw_sample),
}


def rows_of(training: str, path: Path = RESULT) -> list[Row]:
    """The rows of a training."""
    return [row for row in stored(path) if row["training"] == training]


def stored(path: Path) -> list[Row]:
    """All rows of a file, none if there is no file."""
    return json.loads(path.read_text())["rows"] if path.exists() else []


def store(new: Row, path: Path) -> None:
    """Writes a row, one on a line, in the order of the table; the row of the same model and seed is replaced."""

    def key(row: Row) -> tuple[int, int, int]:
        names = list(TRAININGS[row["training"]].rows)
        return list(TRAININGS).index(row["training"]), row["seed"], names.index(row["name"])

    rows = sorted([*(row for row in stored(path) if key(row) != key(new)), new], key=key)
    write_text(path, as_json(dict(command="python -m benchmarks.trainings"), rows=rows))


def provenance() -> Row:
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


def write_page(page: Any, path: Path, dpi: int = 150) -> None:
    """Writes a figure as a PNG."""
    with replacing(path) as temporary:
        page.savefig(temporary, format="png", dpi=dpi)


def main() -> None:
    """Trains and draws, or lists."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("training", nargs="?", choices=TRAININGS)
    parser.add_argument("--only", default="", metavar="PATTERN", help="regular expression for the names of rows")
    parser.add_argument("--missing", action="store_true", help="only rows that the file lacks")
    parser.add_argument("--plot", action="store_true", help="only draw the pictures again")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs (default: runs)")
    parser.add_argument("--data", type=Path, default=Place._field_defaults["data"], help="folder of Fashion-MNIST")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.training is None:
        for name, training in TRAININGS.items():
            print(f"{name}, {training.minutes} minutes of one core: {'; '.join(training.rows)}")
        return
    training, path = TRAININGS[args.training], args.out / RESULT.name
    folder = args.runs / args.training
    have = {(row["name"], row["seed"]) for row in rows_of(args.training, path)} if args.missing else set()
    for seed in range(0 if args.plot else training.seeds):
        for name, train in training.rows.items():
            if (name, seed) not in have and re.search(args.only, name):
                place = Place(folder / name, args.out, args.data)
                if not args.missing:
                    shutil.rmtree(place.run, ignore_errors=True)
                row = dict(training=args.training, name=name, seed=seed, **train(place, seed)) | provenance()
                print(json.dumps(row), flush=True)
                store(row, path)
    training.draw(rows_of(args.training, path), Place(folder, args.out))


if __name__ == "__main__":
    main()
