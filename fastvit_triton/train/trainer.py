"""One run from seed to pictures: trains, and keeps an output folder that is complete after every epoch."""

import csv
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shlex import quote
from typing import Annotated, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from ..files import replacing, sweep
from .checkpoint import PREVIOUS, STATE, checksum, restore, save_state, state_of, writing
from .data import Data
from .image import listing, save_picture
from .loop import Diverged, Progress, Score, fit
from .parallel import World
from .plan import lr_for, objective_for, optimizer_for, product, score_for, step_for
from .plots import draw_curves, draw_predictions
from .published import PUBLISHED
from .ranges import Count, Seed, check, checked
from .recipes import DIGITS, FOLDER, Recipe, shorten
from .step import Step
from .together import Engine, engage, sound

WEIGHTS, BEST, LOG = "model.safetensors", "best.safetensors", "log.csv"
CURVES, PREDICTIONS, EXAMPLE = "curves.png", "predictions.png", "example.png"
FILES = {
    WEIGHTS: "the model, with its config, classes and normalisation",
    BEST: "the same, after the best tested epoch",
    LOG: "loss, accuracy and learning rate by epoch",
    CURVES: "the same, drawn",
    PREDICTIONS: "test images with what the model says, the wrong ones first",
    EXAMPLE: "the first test image, to try predict on",
    STATE: "weights, optimiser, average, random state and place in the data, for --resume",
    PREVIOUS: "the state before, should that one be damaged",
}
# What a run is besides its recipe.
SETTINGS = {
    "data": "digits",
    "seed": 0,
    "skip_bad_images": False,
    "weights": None,
    "parts": 1,
    "amp": "auto",
    "teacher": None,
    "distillation": "hard",
    "grad_checkpointing": False,
}
RECIPES = {"digits": DIGITS, "folder": FOLDER} | PUBLISHED


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is trained, on what and how: the parts of `fit` that a recipe decides.

    Attributes:
        model: on its device, with the weights to start from.
        data: from `load`.
        recipe: the record.
        step: what happens to a batch.
        optimizer: over the model's parameters.
        lr_at: step of the whole run, from 0, to learning rate.
        engine: around the model, on several processes.
    """

    model: nn.Module
    data: Data
    recipe: Recipe
    step: Step
    optimizer: Optimizer
    lr_at: Callable[[int], float]
    engine: Engine = field(default_factory=Engine)


@checked
def plan(
    model: nn.Module,
    data: Data,
    recipe: Recipe,
    *,
    parts: Count = 1,
    amp: torch.dtype | None = None,
    teacher: nn.Module | None = None,
    distillation: Literal["hard", "soft"] = "hard",
    parallel: str | None = None,
    world: World | None = None,
) -> Plan:
    """Everything that a recipe says about training this model on these images.

    Args:
        model: on its device; a masked model, for recipes of masked patches.
        data: from `load`.
        recipe: the record.
        parts: pieces in which a batch's gradient is taken.
        amp: autocast dtype.
        teacher: to learn from as well; in evaluation mode, on the same device.
        distillation: "hard" or "soft".
        parallel: "ddp" or "fsdp", see parallel.py; None is one process.
        world: from `join`, where there are several.
    """
    objective = objective_for(recipe, model, data.transform, teacher, distillation)
    step = step_for(recipe, model, objective, len(data.classes), parts, amp)
    called, engine = model, Engine()
    if parallel is not None:
        called, step, engine = engage(parallel, model, step, world, data.train.dealt)
    rest = {"optimizer": optimizer_for(recipe, model), "lr_at": lr_for(recipe, len(data.train)), "engine": engine}
    return Plan(model=called, data=data, recipe=recipe, step=step, **rest)


def follow(plan: Plan, start: Progress | None = None) -> Iterator[Progress]:
    """`fit` as the plan has it. Refuses nothing that `fit` accepts.

    Args:
        plan: from `plan`.
        start: how far an earlier run came.
    """
    return fit(
        plan.model,
        plan.data.train,
        plan.optimizer,
        plan.lr_at,
        epochs=plan.recipe.epochs_of(len(plan.data.train)),
        start=start,
        step=plan.step,
        test=score_for(plan.recipe, plan.step, plan.data.test),
        test_once=plan.data.test_once,
    )


@checked
def run(
    plan: Plan,
    out: Path,
    *,
    settings: dict,
    save: Callable[..., None],
    state: dict | None = None,
    save_every: Annotated[Count | None, "a state after each epoch only"] = None,
) -> Iterator[Progress]:
    """Trains as planned; `out` holds weights, states and log after each epoch, and pictures at the end.

    A generator like `fit`: close it, interrupt it or kill it, and the folder still holds what was saved last. A run
    that goes on from `state` ends with the same bits as one that never stopped. Neither weights nor a state are saved
    where one weight is not finite.

    Args:
        plan: from `plan`.
        out: an existing folder.
        settings: kept in the state for whoever resumes.
        save: `save(model, path, metadata=…)` writes the weights with a header of strings, such as `save_weights`.
        state: from `load_state`, to go on; None starts.
        save_every: steps between states within an epoch; None saves after epochs only.

    Raises:
        Diverged: as `fit` does; names the last good state.
    """
    world = plan.step.world
    if world.first:
        sweep(out, FILES)
    model, data, recipe, step = plan.model, plan.data, plan.recipe, plan.step
    history: list[dict] = [] if state is None else list(state["history"])
    start = None if state is None else restore(state, model, plan.optimizer, step, plan.engine.load)
    score = None
    try:
        for progress in follow(plan, start):
            due = progress.done or (save_every and progress.step % save_every == 0)
            fine = due and sound(model, world)
            if progress.done:
                score = progress.test
                history.append(row(progress))
                for batches in (data.train, data.test):
                    for bad in world.gather(batches.bad):
                        batches.bad.update(bad)
                whole = plan.engine.weights(step.weights(model))
                files = [out / WEIGHTS, out / BEST][: 1 + is_best(history)] if world.first and fine else ()
                for path in files:
                    kept = product(recipe, whole)
                    with writing(path):
                        save(kept, path, metadata=header(data, recipe, kept, score))
            if fine:
                parts = state_of(model, plan.optimizer, step, progress, history, settings)
                whole = plan.engine.state(parts, model, plan.optimizer, step)
                if world.first:
                    save_state(out, whole)
            if progress.done and world.first:
                write_log(out / LOG, history)
            yield progress
    except Diverged as error:
        kept = f"{out / STATE} holds the last good state" if (out / STATE).exists() else "no state was saved before"
        raise Diverged(f"{error}; {kept}") from error
    # a run that was resumed after its last epoch has no score yet
    score = score or score_for(recipe, step, data.test)(step.weights(model))
    if not world.first:
        return
    with writing(out / CURVES), replacing(out / CURVES) as temporary:
        draw_curves(history, temporary)
    if score.predictions is not None:
        with writing(out / PREDICTIONS), replacing(out / PREDICTIONS) as temporary:
            draw_predictions(data, score, temporary)
    with writing(out / EXAMPLE), replacing(out / EXAMPLE) as temporary:
        save_picture(data.test.picture(0), temporary)


def is_best(history: list[dict]) -> bool:
    """Whether the last epoch's test is better than all before: more right, or less loss where nothing is answered."""
    tested = [row for row in history if row["test_loss"] is not None]
    marks = [-row["test_loss"] if row["test_accuracy"] is None else row["test_accuracy"] for row in tested]
    return history[-1]["test_loss"] is not None and marks[-1] > max(marks[:-1], default=-math.inf)


def settle(given: dict, saved: dict | None) -> dict:
    """What a run is: the saved settings of a resumed one, else a recipe with what was given in its place.

    Kept in the state, so that a run goes on as it began. Refuses to resume with a setting that differs.

    Args:
        given: any of recipe (a name), the other keys of `SETTINGS`, and the fields of `Recipe`.
        saved: settings from the state; None starts a new run.
    """
    given = dict(given)
    for name in ("data", "weights", "teacher"):
        if given.get(name) is not None and given[name] != "digits":
            given[name] = str(Path(given[name]).resolve())
    check("seed", given.get("seed", 0), Seed)
    check("parts", given.get("parts", 1), Count)
    if saved is not None:
        for name, value in given.items():
            if value != saved[name]:
                raise ValueError(f"{name} is {value}, but the run to resume has {saved[name]}; leave it out")
        return saved
    name = given.get("recipe") or ("digits" if given.get("data", "digits") == "digits" else "folder")
    if name not in RECIPES:
        raise ValueError(f"recipe is {name!r}; use one of {', '.join(RECIPES)}")
    known = Recipe.__dataclass_fields__
    recipe = shorten(RECIPES[name], **{field: value for field, value in given.items() if field in known})
    others = {key: value for key, value in given.items() if key not in known}
    return SETTINGS | asdict(recipe) | others | {"recipe": name}


def summary(out: Path, data: Data) -> str:
    """What a finished run has reached, where everything is, and what to try next."""
    with (out / LOG).open(newline="") as file:
        *_, last = csv.DictReader(file)
    reached = f"loss {float(last['test_loss']):.4f}"
    if last["test_accuracy"]:
        reached = f"accuracy {100 * float(last['test_accuracy']):.2f} %"
    lines = [f"\ntest {reached} after {last['epoch']} epochs\n"]
    width = max(len(str(out / name)) for name in FILES)
    lines += [f"  {out / name!s:{width}}  {about}" for name, about in FILES.items() if (out / name).exists()]
    if bad := data.train.bad | data.test.bad:
        lines += [f"\nskipped {len(bad)} images that cannot be read: {listing([str(path) for path in sorted(bad)])}"]
    example, folder = quote(str(out / EXAMPLE)), quote(str(out))
    if not last["test_accuracy"]:
        return "\n".join([*lines, "\ntry next:", f"  fastvit-triton train --weights {folder} --data …"])
    lines += ["\ntry next:", f"  fastvit-triton predict --checkpoint {folder} {example}"]
    return "\n".join([*lines, f"  fastvit-triton evaluate --checkpoint {folder}"])


def row(progress: Progress) -> dict:
    """One line of the log: losses in nats, accuracies in [0, 1], time in seconds; None where there was no test."""
    return {
        "epoch": progress.epoch,
        "lr": progress.lr,
        "train_loss": progress.loss.item(),
        "train_accuracy": None if progress.accuracy.isnan() else progress.accuracy.item(),
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


def header(data: Data, recipe: Recipe, model: nn.Module, score: Score | None) -> dict[str, str]:
    """What the weights' file says about itself: enough to classify a picture and to repeat the accuracy."""
    entries = {
        "data": data.name,
        "classes": data.classes,
        "transform": asdict(data.transform),
        "batch_size": recipe.batch_size,
        "skip_bad_images": bool(data.train.bad or data.test.bad),
        "test_accuracy": score and score.accuracy,
        "crc32": checksum(model),
    }
    return {"training": json.dumps(entries)}
