"""Files of a run's output folder: names, log, weights header, plots, and the summary at the end."""

import csv
import importlib.util
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Any

import filelock
from torch import nn

from ..files import replacing, write_failure
from ..intervals import accuracy_text, precision_text
from .checkpoint import PREVIOUS, STATE, checksum, write_errors
from .data import Data
from .data.split import SPLIT
from .data.transform import join_names, save_image
from .loop import Progress, Score
from .plots import curves, detections, predictions
from .recipes import Recipe

WEIGHTS = "model.safetensors"
BEST = "best.safetensors"
LOG = "log.csv"
TABLE = "data.txt"
CURVES = "curves.png"
PREDICTIONS = "predictions.png"
EXAMPLE = "example.png"
LOCK, LOCK_SECONDS = ".lock", 10.0  # the operating system unlocks the file when the process dies, at the latest then
FILES = {
    WEIGHTS: "the model, with its config, classes and normalisation",
    BEST: "the same, after the best tested epoch",
    TABLE: "the table of the data: images by class, and what was left out",
    LOG: "loss, accuracy and learning rate by epoch",
    CURVES: "plot of the log",
    PREDICTIONS: "test images with the model's predictions, the most confident errors first",
    EXAMPLE: "the first test image, for `predict`",
    SPLIT: "names of the test images, chosen by --val-split",
    STATE: "weights, optimiser, EMA, random state and position in the data, for --resume",
    PREVIOUS: "the previous state, used if the newest is damaged",
}
DETECTION_FILES = {
    LOG: "loss, average precision and learning rate by epoch",
    PREDICTIONS: "test images with the boxes that the model finds, the most confident errors first",
}


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Creates the output folder and holds its lock, so that no two runs write to it."""
    created = not out.exists()
    lock = filelock.FileLock(out / LOCK)
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=LOCK_SECONDS)
    except filelock.Timeout:
        raise ValueError(f"another process trains in {out}; wait until it ends, or give another --out") from None
    except OSError as error:
        raise OSError(f"--out {out} cannot be written: {write_failure(error)}; give another folder") from error
    try:
        yield
    finally:
        with suppress(OSError):  # Windows deletes no open file; the folder may be gone, or another run waits in it
            left = list(out.iterdir()) if created else []
            if left and {path.name for path in left} <= {LOCK, TABLE}:  # an error came before training
                for path in left:
                    path.unlink()
                out.rmdir()
        lock.release()


def remove_run(out: Path) -> None:
    """Removes the files of an earlier run from the output folder."""
    for name in FILES:
        (out / name).unlink(missing_ok=True)


def is_best(history: list[dict]) -> bool:
    """True if the last epoch was evaluated and has the best accuracy or precision, or the lowest loss without them."""
    marks = _marks(history)
    return history[-1]["test_loss"] is not None and marks[-1] > max(marks[:-1], default=-math.inf)


def evaluations_since_best(history: list[dict]) -> int:
    """Number of evaluations after the first with the best accuracy, or the lowest loss if there is no accuracy."""
    marks = _marks(history)
    return len(marks) - 1 - marks.index(max(marks)) if marks else 0


def _marks(history: list[dict]) -> list[float]:
    """Accuracies or average precisions of the evaluated epochs, undefined ones below all; else negative losses."""
    tested = [row for row in history if row["test_loss"] is not None]
    marks = [row.get("test_ap", row["test_accuracy"]) for row in tested]
    if all(mark is None for mark in marks):
        return [-row["test_loss"] for row in tested]
    return [-math.inf if mark is None else mark for mark in marks]


def log_row(progress: Progress) -> dict:
    """One row of the log: losses in nats, accuracies in [0, 1], time in seconds; test values may be None.

    Of detectors it has a column for each of the score's metrics.
    """
    metrics = (progress.test and progress.test.metrics) or {}
    return {
        "epoch": progress.epoch,
        "lr": progress.lr,
        "train_loss": progress.loss.item(),
        "train_accuracy": None if progress.accuracy.isnan() else progress.accuracy.item(),
        "test_loss": progress.test and progress.test.loss,
        "test_accuracy": progress.test and progress.test.accuracy,
        "test_images": progress.test and progress.test.images,
        "images_per_second": progress.images / progress.seconds,
        "seconds": progress.seconds,
        **{f"test_{name}": value for name, value in metrics.items()},
    }


def write_log(path: Path, history: list[dict]) -> None:
    """Writes the whole log as CSV, replacing the file, so that it always matches the training state."""
    with write_errors(path), replacing(path) as temporary, temporary.open("w", newline="") as file:
        table = csv.DictWriter(file, history[-1].keys())
        table.writeheader()
        table.writerows(history)


def weights_metadata(
    data: Data, recipe: Recipe, model: nn.Module, row: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, str]:
    """Metadata for the header of the weights file: what `predict`, `evaluate` and model cards need, and a checksum."""
    entries = {
        "data": data.name,
        "classes": data.classes,
        "transform": asdict(data.transform),
        "batch_size": recipe.batch_size,
        "skip_bad_images": bool(settings.get("skip_bad_images")),  # a resumed run does not yet know which are bad
        "split": data.split and data.split.fingerprint(str(data.identity["test"])),
        "train_images": len(data.train.targets),
        **{name: value for name, value in row.items() if name.startswith("test_")},
        "recipe": settings.get("recipe") or None,
        "weights": settings.get("weights"),
        "crc32": checksum(model),
    }
    return {"training": json.dumps(entries)}


def draw_results(out: Path, data: Data, history: list[dict], score: Score, warn: Callable[[str], None]) -> None:
    """Writes the plots of a finished run, and the first test image, to the folder `out`.

    A run whose weights and log are written has succeeded: `warn` gets one sentence for each file that cannot be drawn.
    """
    png: dict[str, Any] = {"format": "png", "dpi": 150}
    drawings: dict[str, Callable[[Path], None]] = {CURVES: lambda path: curves(history).savefig(path, **png)}
    drawings[EXAMPLE] = lambda path: save_image(data.test.display_image(0), path)
    if score.predictions is not None:
        drawings[PREDICTIONS] = lambda path: predictions(data, score).savefig(path, **png)
    if score.detections is not None:
        drawings[PREDICTIONS] = lambda path: detections(data, score).savefig(path, **png)
    for name, draw in drawings.items():
        try:
            with write_errors(out / name), replacing(out / name) as temporary:
                draw(temporary)
        except OSError as error:
            warn(str(error))


def skipped(bad: Iterable[Path], more: str = "") -> str:
    """A line with the number of images that were skipped, and at most ten of their names; `more` follows the number."""
    names = sorted(map(str, bad))
    what = "image that" if len(names) == 1 else "images that"
    return f"skipped {len(names):,} {more}{what} cannot be read: {join_names(names)}"


def summary(
    out: Path, data: Data, loss: str = "", epochs: int = 0, explained: bool = True, known: Collection[Path] = ()
) -> str:
    """Text for the end of a run: the test score, the files in `out`, skipped images, and commands to try next."""
    with (out / LOG).open(newline="") as file:
        *_, last = csv.DictReader(file)
    images = int(last["test_images"]) if last.get("test_images") else None  # runs of earlier versions have none
    reached = f"loss {float(last['test_loss']):.4f}"
    if loss == "likelihood":
        reached += f", {float(last['test_loss']) / math.log(2):.4f} bits a dimension"
    if loss == "detection":
        columns = {name.removeprefix("test_"): value for name, value in last.items() if name.startswith("test_ap")}
        reached = precision_text({name: float(value) if value else None for name, value in columns.items()}, images)
    if last["test_accuracy"]:
        reached = f"accuracy {accuracy_text(float(last['test_accuracy']), images)}"
    lines = [f"\ntest {reached} after {last['epoch']} {'epoch' if last['epoch'] == '1' else 'epochs'}\n"]
    if int(last["epoch"]) < epochs:
        lines[0] += f"stopped {epochs - int(last['epoch'])} epochs early; {BEST} holds the best weights\n"
    width = max(len(str(out / name)) for name in FILES)
    files = FILES | (DETECTION_FILES if loss == "detection" else {})
    lines += [f"  {out / name!s:{width}}  {about}" for name, about in files.items() if (out / name).exists()]
    if bad := (data.train.bad | data.test.bad).keys() - set(known):
        lines += ["\n" + skipped(bad, "more " if known else "")]
    example = quote(str(out / EXAMPLE))
    folder = quote(str(out))

    def command(name: str, more: str = "") -> str:
        return f"  fastvit-triton {name} --checkpoint {folder}{more}"

    common = [command("evaluate"), command("explain", f" {example}" if loss == "detection" else "")]
    if loss == "likelihood":
        commands = [command("generate", " --out samples.png"), common[0]]
    elif loss == "restoration":
        commands = [command("restore", " photo.jpg --out restored.png"), common[0]]
    elif loss == "detection":
        commands = [command("predict", f" {example} --draw drawn"), *common]
    elif not last["test_accuracy"]:
        commands = [f"  fastvit-triton train --weights {folder} --data …"]
    else:
        commands = [command("predict", f" {example}"), *common[: 1 + explained]]
        needs = "" if importlib.util.find_spec("onnxscript") else "  # after pip install 'fastvit_triton[export]'"
        commands += [f"  fastvit-triton export {folder} {quote(str(out / 'model.onnx'))} --to onnx{needs}"]
    return "\n".join([*lines, "\nnext commands:", *commands])
