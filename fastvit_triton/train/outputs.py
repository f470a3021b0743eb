"""Files of a run's output folder: names, log, weights header, plots, and the summary at the end."""

import csv
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from shlex import quote

import filelock
from torch import nn

from ..files import replacing, write_failure
from .checkpoint import PREVIOUS, STATE, checksum, write_errors
from .data import Data
from .data.split import SPLIT
from .data.transform import join_names, save_image
from .loop import Progress, Score
from .plots import draw_curves, draw_detections, draw_predictions
from .recipes import Recipe

WEIGHTS = "model.safetensors"
BEST = "best.safetensors"
LOG = "log.csv"
CURVES = "curves.png"
PREDICTIONS = "predictions.png"
EXAMPLE = "example.png"
AP_NAMES = {"AP": "test_ap", "AP50": "test_ap50", "AP75": "test_ap75"}  # in the log
LOCK, LOCK_SECONDS = ".lock", 10.0  # the operating system unlocks the file when the process dies, at the latest then
FILES = {
    WEIGHTS: "the model, with its config, classes and normalisation",
    BEST: "the same, after the best tested epoch",
    LOG: "loss, accuracy and learning rate by epoch",
    CURVES: "plot of the log",
    PREDICTIONS: "test images with the model's predictions, errors first",
    EXAMPLE: "the first test image, for `predict`",
    SPLIT: "names of the test images, chosen by --val-split",
    STATE: "weights, optimiser, EMA, random state and position in the data, for --resume",
    PREVIOUS: "the previous state, used if the newest is damaged",
}
DETECTION_FILES = {
    LOG: "loss, average precision and learning rate by epoch",
    PREDICTIONS: "the first test images with the boxes that the model finds",
}


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Creates the output folder and holds its lock, so that no two runs write to it.

    Raises:
        ValueError: another process holds the lock, also after ten seconds.
        OSError: the folder cannot be created or written.
    """
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
            if created and [path.name for path in out.iterdir()] == [LOCK]:  # an error came before the first file
                (out / LOCK).unlink()
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
    """Accuracies, average precisions, or negative losses of the epochs that were evaluated."""
    tested = [row for row in history if row["test_loss"] is not None]
    marks = [row.get("test_ap", row["test_accuracy"]) for row in tested]
    return [-row["test_loss"] if mark is None else mark for row, mark in zip(tested, marks, strict=True)]


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
        "images_per_second": progress.images / progress.seconds,
        "seconds": progress.seconds,
        **{f"test_{name}": value for name, value in metrics.items()},
    }


def write_log(path: Path, history: list[dict]) -> None:
    """Writes the whole log as CSV, replacing the file, so that it always matches the training state."""
    with write_errors(path), replacing(path) as temporary, temporary.open("w", newline="") as file:
        table = csv.DictWriter(file, history[0].keys())
        table.writeheader()
        table.writerows(history)


def weights_metadata(
    data: Data, recipe: Recipe, model: nn.Module, accuracy: float | None, skip_bad_images: bool, recipe_name: str = ""
) -> dict[str, str]:
    """Metadata for the header of the weights file: the values that `predict` and `evaluate` need, and a checksum."""
    entries = {
        "data": data.name,
        "classes": data.classes,
        "transform": asdict(data.transform),
        "batch_size": recipe.batch_size,
        "skip_bad_images": skip_bad_images,
        "split": data.split and data.split.fingerprint(str(data.identity["test"])),
        "test_accuracy": accuracy,
        "recipe": recipe_name or None,
        "crc32": checksum(model),
    }
    return {"training": json.dumps(entries)}


def draw_results(out: Path, data: Data, history: list[dict], score: Score, warn: Callable[[str], None]) -> None:
    """Writes the plots of a finished run, and the first test image, to the folder `out`.

    A run whose weights and log are written has succeeded: `warn` gets one sentence for each file that cannot be drawn.
    """
    drawings: dict[str, Callable[[Path], None]] = {CURVES: partial(draw_curves, history)}
    drawings[EXAMPLE] = lambda path: save_image(data.test.display_image(0), path)
    if score.predictions is not None:
        drawings[PREDICTIONS] = partial(draw_predictions, data, score)
    if score.detections is not None:
        drawings[PREDICTIONS] = partial(draw_detections, data, score)
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
    """Text for the end of a run: the test score, the files in `out`, skipped images, and commands to try next.

    Args:
        out: the output folder.
        data: of the run.
        loss: that of the recipe.
        epochs: planned length of the run, which early stopping may have shortened.
        explained: the command `explain` takes the classifier.
        known: skipped images that were named before the run.
    """
    with (out / LOG).open(newline="") as file:
        *_, last = csv.DictReader(file)
    reached = f"loss {float(last['test_loss']):.4f}"
    if loss == "likelihood":
        reached += f", {float(last['test_loss']) / math.log(2):.4f} bits a dimension"
    if loss == "detection":
        reached = ", ".join(f"{name} {100 * float(last[key]):.1f} %" for name, key in AP_NAMES.items())
    if last["test_accuracy"]:
        reached = f"accuracy {100 * float(last['test_accuracy']):.2f} %"
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
    if loss == "likelihood":
        more = f"  fastvit-triton generate --checkpoint {folder} --out samples.png"
        return "\n".join([*lines, "\nnext commands:", more, f"  fastvit-triton evaluate --checkpoint {folder}"])
    if loss == "restoration":
        more = f"  fastvit-triton restore --checkpoint {folder} photo.jpg --out restored.png"
        return "\n".join([*lines, "\nnext commands:", more, f"  fastvit-triton evaluate --checkpoint {folder}"])
    if loss == "detection":
        lines += ["\nnext commands:", f"  fastvit-triton predict --checkpoint {folder} {example} --draw drawn"]
        lines += [f"  fastvit-triton evaluate --checkpoint {folder}"]
        return "\n".join([*lines, f"  fastvit-triton explain --checkpoint {folder} --image {example}"])
    if not last["test_accuracy"]:
        return "\n".join([*lines, "\nnext commands:", f"  fastvit-triton train --weights {folder} --data …"])
    lines += ["\nnext commands:", f"  fastvit-triton predict --checkpoint {folder} {example}"]
    lines += [f"  fastvit-triton evaluate --checkpoint {folder}"]
    lines += [f"  fastvit-triton explain --checkpoint {folder} --image {example}"] * explained
    model = quote(str(out / "model.onnx"))
    return "\n".join([*lines, f"  fastvit-triton export {folder} {model} --to onnx"])
