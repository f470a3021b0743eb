"""Classifiers of images."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...files import printable
from ...intervals import percent, span, wilson
from ..console import print_line, print_warning, tracked
from ..images import decoded, find_images
from ..results import cell, write_rows
from .task import Task, TrainedModel, opened, reading, test_images, trained_on

if TYPE_CHECKING:
    from torch import Tensor

    from ...train.loop import Score

BATCH = 32  # images that the model gets at a time
INTERVAL = "95 % interval"


class Classify(Task):
    """Gives an image a class."""

    name = "classify"
    command = "predict"
    labelled = ("softmax", "sigmoid", "bce")
    losses = (*labelled, "pixels", "colours")  # those of masked patches pre-train it
    recipes = "digits or folder"

    def predict(self, trained: TrainedModel, args: argparse.Namespace) -> int:
        """Prints or writes the most likely classes of image files."""
        from ...deploy.predict import best_classes

        files = find_images(args.images)
        rows: list[dict[str, object]] = []

        def read(file: Path) -> "Tensor":
            return trained.transform(opened(file, trained, args))

        prints = args.out is None and sys.stdout.isatty()  # lines on the terminal, in place of a progress bar
        shown = files if prints else tracked(files, len(files), "classifying")
        for batch, images in decoded(shown, read, BATCH, args.max_pixels):
            found = best_classes(trained.model, images.to(trained.device), trained.classes, args.top)
            for file, pairs in zip(batch, found, strict=True):
                rows.append({"file": cell(file)})
                for rank, (name, share) in enumerate(pairs, 1):
                    rows[-1] |= {f"class_{rank}": name, f"probability_{rank}": share}
                if args.out is None:
                    print_line(f"{file}: " + ", ".join(f"{name} ({100 * share:.1f} %)" for name, share in pairs))
        if args.out is not None and rows:
            write_rows(args.out, rows)
            print_line(f"{args.out} holds the classes of {len(rows):,} images")
        return 0 if len(rows) == len(files) else 2

    def evaluate(self, trained: TrainedModel, args: argparse.Namespace) -> int:
        """Prints and writes the accuracy, in total and by class."""
        from ...train.loop import evaluate
        from ...train.outputs import skipped
        from ...train.step import autocast_dtype

        test = test_images(trained, args.data, reading(trained, args))
        batches = tracked(test, len(test), "evaluating")
        score = evaluate(trained.model, batches, autocast_dtype(trained.device))
        _report(trained, score, args.out)
        if test.bad:
            print_line(skipped(test.bad))
        with Console().status("comparing with the images of the training"):  # seen on a terminal
            seen = 0 if args.data is None else trained_on(trained, test)
        if seen:
            print_line(f"at least {seen:,} of these images are among those that the run was trained on")
        return 0


def _report(trained: TrainedModel, score: "Score", out: Path | None) -> None:
    """Prints the scores of each class and of all, with intervals, and writes them to the file `out`."""
    from ...train.data.transform import join_names
    from ...train.metrics import class_scores, confusion_matrix, macro_f1

    assert score.targets is not None and score.predictions is not None  # of a classifier
    arguments = score.targets, score.predictions, len(trained.classes)
    scores = class_scores(*arguments)
    bounds = [wilson(row.correct, row.images) if row.images else (None, None) for row in scores]
    table = Table("class", "images", "correct", "accuracy", INTERVAL, "precision", "F1")
    for name, row, (low, high) in zip(trained.classes, scores, bounds, strict=True):
        shares = [percent(row.recall, row.images), span(low, high, row.images), percent(row.precision, row.images)]
        f1 = "-" if row.f1 is None else f"{row.f1:.3f}"
        table.add_row(Text(printable(name)), f"{row.images:,}", f"{row.correct:,}", *shares, f1)
    Console().print(table)
    correct = sum(row.correct for row in scores)
    images = len(score.targets)
    assert score.accuracy is not None and score.top5 is not None
    shown = {"accuracy": score.accuracy} | ({"top-5 accuracy": score.top5} if len(scores) > 5 else {})
    table = Table("metric", "value", INTERVAL)
    for name, share in shown.items():
        table.add_row(name, percent(share, images), span(*wilson(round(share * images), images), images))
    table.add_row("macro-F1", f"{macro_f1(scores):.3f}", "-")
    table.add_row("loss", f"{score.loss:.4f}", "-")
    Console().print(table)
    print_line(
        f"{correct:,} of {images:,} test images are correct. Intervals are Wilson's, of shares of images; macro-F1 and "
        "loss have none."
    )
    if absent := [name for name, row in zip(trained.classes, scores, strict=True) if not row.images]:
        print_warning(f"no test image is of {join_names(absent)}; macro-F1 counts each of these that is predicted as 0")
    if out is None:
        return
    confusion = confusion_matrix(*arguments).tolist()
    rows: list[dict[str, Any]] = [
        {"class": name, **row._asdict(), "recall_low": low, "recall_high": high}
        for name, row, (low, high) in zip(trained.classes, scores, bounds, strict=True)
    ]
    totals: dict[str, Any] = {"images": images, "loss": score.loss}
    for name, share in {"top1": score.accuracy, "top5": score.top5}.items():
        low, high = wilson(round(share * images), images)
        totals |= {name: share, f"{name}_low": low, f"{name}_high": high}
    totals |= {"macro_f1": macro_f1(scores), "classes": rows, "confusion": confusion}
    columns = [f"predicted as {name}" for name in trained.classes]
    write_rows(
        out, [row | dict(zip(columns, line, strict=True)) for row, line in zip(rows, confusion, strict=True)], totals
    )
    print_line(f"{out} holds the scores of {len(rows):,} classes and the confusion matrix")
