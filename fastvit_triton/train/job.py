"""One run from seed to pictures: trains, and keeps an output folder that is complete after every epoch."""

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from shlex import quote

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from ..files import replacing
from .checkpoint import restore, save_state, writing
from .data import Data
from .image import listing, save_picture
from .loop import Progress, Score, evaluate, fit
from .mix import mixup
from .optim import adamw, warmup_cosine
from .plots import draw_curves, draw_predictions
from .recipes import DIGITS, FOLDER, Recipe

WEIGHTS, STATE, LOG = "model.safetensors", "training_state.pt", "log.csv"
CURVES, PREDICTIONS, EXAMPLE = "curves.png", "predictions.png", "example.png"
FILES = {
    WEIGHTS: "the model, with its config, classes and normalisation",
    LOG: "loss, accuracy and learning rate by epoch",
    CURVES: "the same, drawn",
    PREDICTIONS: "test images with what the model says, the wrong ones first",
    EXAMPLE: "the first test image, to try predict on",
    STATE: "optimiser and random state, for --resume",
}


def run(
    model: nn.Module,
    data: Data,
    recipe: Recipe,
    out: Path,
    *,
    settings: dict,
    save: Callable[..., None],
    state: dict | None = None,
) -> Iterator[Progress]:
    """Trains a model by a recipe; `out` holds weights, state and log after each epoch, and pictures at the end.

    A generator like `fit`: close it, or interrupt it, and the folder still holds the last complete epoch. A run that
    goes on from `state` ends with the same bits as one that never stopped. Refuses nothing that its parts accept.

    Args:
        model: on its device, with the weights to start from.
        data: from `load`.
        recipe: how.
        out: an existing folder.
        settings: kept in the state for whoever resumes.
        save: `save(model, path, metadata=…)` writes the weights with a header of strings, such as `save_weights`.
        state: from `load_state`, to go on; None starts.
    """
    optimizer = adamw(model, recipe.lr, recipe.weight_decay)
    history: list[dict] = []
    if state is not None:
        restore(state, model, optimizer)
        history = list(state["history"])
    score = None
    for progress in follow(recipe, model, data, optimizer, len(history)):
        if progress.done:
            score = progress.test
            history.append(row(progress))
            with writing(out / WEIGHTS):
                save(model, out / WEIGHTS, metadata=header(data, recipe, score))
            save_state(out / STATE, model, optimizer, history, settings)
            write_log(out / LOG, history)
        yield progress
    score = score or evaluate(model, data.test, half(next(model.parameters()).device))  # resumed after the last epoch
    with writing(out / CURVES), replacing(out / CURVES) as temporary:
        draw_curves(history, temporary)
    with writing(out / PREDICTIONS), replacing(out / PREDICTIONS) as temporary:
        draw_predictions(data, score, temporary)
    with writing(out / EXAMPLE), replacing(out / EXAMPLE) as temporary:
        save_picture(data.test.picture(0), temporary)


def follow(recipe: Recipe, model: nn.Module, data: Data, optimizer: Optimizer, start: int = 0) -> Iterator[Progress]:
    """`fit` as the recipe has it. Refuses nothing that `fit` accepts.

    Args:
        recipe: how.
        model: on its device.
        data: from `load`.
        optimizer: over the model's parameters.
        start: epochs already done.
    """
    steps = recipe.epochs * len(data.train)
    return fit(
        model,
        data.train,
        data.test,
        optimizer,
        partial(warmup_cosine, steps=steps, warmup=int(recipe.warmup * steps), peak=recipe.lr),
        epochs=recipe.epochs,
        start=start,
        loss=partial(F.cross_entropy, label_smoothing=recipe.label_smoothing),
        mix=partial(mixup, classes=len(data.classes), alpha=recipe.mixup) if recipe.mixup else None,
        clip=recipe.clip,
        amp=half(next(model.parameters()).device),
        test_once=data.test_once,
    )


def settle(given: dict, saved: dict | None) -> dict:
    """What a run is: the saved settings of a resumed one, else a recipe with what was given in its place.

    Kept in the state, so that a run goes on as it began. Refuses to resume with a setting that differs.

    Args:
        given: any of data, weights, seed, skip_bad_images and the fields of `Recipe`.
        saved: settings from the state; None starts a new run.
    """
    given = dict(given)
    for name in ("data", "weights"):
        if name in given and given[name] != "digits":
            given[name] = str(Path(given[name]).resolve())
    if not 0 <= given.get("seed", 0) < 2**63:
        raise ValueError(f"seed is {given['seed']}; it must be at least 0 and below 2^63")
    if saved is None:
        recipe = DIGITS if given.get("data", "digits") == "digits" else FOLDER
        return {"data": "digits", "seed": 0, "skip_bad_images": False, "weights": None, **asdict(recipe), **given}
    for name, value in given.items():
        if value != saved[name]:
            raise ValueError(f"{name} is {value}, but the run to resume has {saved[name]}; leave it out")
    return saved


def summary(out: Path, data: Data) -> str:
    """What a finished run has reached, where everything is, and what to try next."""
    with (out / LOG).open(newline="") as file:
        *_, last = csv.DictReader(file)
    lines = [f"\ntest accuracy {100 * float(last['test_accuracy']):.2f} % after {last['epoch']} epochs\n"]
    width = max(len(str(out / name)) for name in FILES)
    lines += [f"  {out / name!s:{width}}  {about}" for name, about in FILES.items()]
    if bad := data.train.bad | data.test.bad:
        lines += [f"\nskipped {len(bad)} images that cannot be read: {listing([str(path) for path in sorted(bad)])}"]
    example, folder = quote(str(out / EXAMPLE)), quote(str(out))
    lines += ["\ntry next:", f"  fastvit-triton predict --checkpoint {folder} {example}"]
    return "\n".join([*lines, f"  fastvit-triton evaluate --checkpoint {folder}"])


def half(device: torch.device) -> torch.dtype | None:
    """The autocast dtype of training and evaluation: bfloat16 where a GPU has it, none elsewhere."""
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else None


def row(progress: Progress) -> dict:
    """One line of the log: losses in nats, accuracies in [0, 1], time in seconds; None where there was no test."""
    return {
        "epoch": progress.epoch,
        "lr": progress.lr,
        "train_loss": progress.loss.item(),
        "train_accuracy": progress.accuracy.item(),
        "test_loss": progress.test and progress.test.loss,
        "test_accuracy": progress.test and progress.test.accuracy,
        "images_per_second": progress.images / progress.seconds,
        "seconds": progress.seconds,
    }


def write_log(path: Path, history: list[dict]) -> None:
    """The whole log anew, so that it always agrees with the state."""
    with writing(path), replacing(path) as temporary, temporary.open("w", newline="") as file:
        table = csv.DictWriter(file, history[0].keys())
        table.writeheader()
        table.writerows(history)


def header(data: Data, recipe: Recipe, score: Score | None) -> dict[str, str]:
    """What the weights' file says about itself: enough to classify a picture and to repeat the accuracy."""
    entries = {
        "data": data.name,
        "classes": data.classes,
        "transform": asdict(data.transform),
        "batch_size": recipe.batch_size,
        "skip_bad_images": bool(data.train.bad or data.test.bad),
        "test_accuracy": score and score.accuracy,
    }
    return {"training": json.dumps(entries)}
