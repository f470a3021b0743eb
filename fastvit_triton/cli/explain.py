"""`explain`: a report on what a model attends to in images, and in its own mistakes."""

import argparse
import csv
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..files import printable
from .arguments import add_checkpoint, add_shared, at_least
from .console import print_line
from .images import class_of, find_images, names_of, readable_images
from .loading import load_for
from .tasks import TrainedModel, task_of, test_images

if TYPE_CHECKING:
    from torch import Tensor

    from ..train.loop import Score

HELP = "report what a model attends to in images"
EXAMPLES = (
    "fastvit-triton explain --checkpoint runs/photos  # its worst mistakes",
    "fastvit-triton explain --checkpoint runs/photos holiday.jpg",
    "fastvit-triton explain --checkpoint runs/photos holidays --most 12",
)


class Explained(NamedTuple):
    """Images of a report."""

    images: "Tensor"  # [B, C, H, W], normalised
    names: list[str]
    targets: list[int | None]  # numbers of the true classes, None where it is not known
    said: str  # which they are, of how many


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `explain`."""
    text = "image files, folders or quoted patterns (default: test images of the run, its worst mistakes first)"
    parser.add_argument("images", nargs="*", type=Path, metavar="IMAGE", help=text)
    add_checkpoint(parser)
    text = "new or empty folder for report.html and its figures, or that of an earlier report (default: report)"
    parser.add_argument("--out", type=Path, default=Path("report"), metavar="FOLDER", help=text)
    text = "token whose attention is shown (default: the class token)"
    parser.add_argument("--query", type=int, check=at_least(0), help=text)
    parser.add_argument("--most", type=int, default=8, check=at_least(1), help="images to show at most (default: 8)")
    text = "skip the confusion matrix, which needs all test images"
    parser.add_argument("--no-test", action="store_true", help=text)
    add_shared(parser, "--device", "--workers", "--levels", "--max-pixels")


def run(args: argparse.Namespace) -> int:
    """Writes a report on a checkpoint and images: attention, tokens, positions, filters and costs."""
    from ..explain import Absent, explain, explain_run, write_report
    from ..explain.page import holds_report, sentences
    from ..train.loop import evaluate
    from ..train.outputs import LOG, skipped
    from ..train.step import autocast_dtype

    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("explain draws with matplotlib; pip install 'fastvit_triton[train]'")
    replaces = holds_report(args.out, "--out")
    trained = load_for(args)
    task = task_of(trained.model)
    classes = tuple(map(printable, trained.classes))
    title = f"Attention report of {Path(args.checkpoint).resolve().name}"
    paths = args.images
    source = Path(args.checkpoint)
    log = (source if source.is_dir() else source.parent) / LOG
    history = _read_log(log) if log.exists() else None
    if not paths:
        _check_mistakes(args, trained, history)
    files = find_images(paths) if paths else []
    chosen = files[: args.most]
    shown = list(readable_images(chosen, args.max_pixels, trained.transform.levels))
    code = 0 if len(shown) == len(chosen) else 2
    if paths and not shown:
        return code

    def print_page(page: Path, said: str) -> None:
        end = " and replaces an earlier report" if replaces else ""
        print_line(f"{page} shows {said}{end}; its figures are in the same folder")

    count = f"{len(shown)} of {len(files)} image{'s' * (len(files) > 1)}"
    if (own := task.panels(trained, shown, classes, args)) is not None:
        print_page(write_report(own, args.out, title), count)
        return code

    test = None
    if not args.no_test and _has_test(trained):
        options = {"workers": args.workers, "skip_bad_images": trained.skip_bad_images, "max_pixels": args.max_pixels}
        test = test_images(trained, None, options)

    @cache
    def score() -> "Score | None":
        return None if test is None else evaluate(trained.model, test, autocast_dtype(trained.device))

    given = _of_files(shown, args, trained, count) if paths else _mistaken(test, score(), args.most, trained)
    pictures = trained.transform.restore(given.images)
    images = given.images.to(trained.device)
    panels = explain(trained.model, images, pictures, given.names, classes, args.query, given.targets)
    absent = []

    def all_panels() -> Iterator:
        for panel in panels:
            if isinstance(panel, Absent):
                absent.append(panel)
            yield panel
        yield from explain_run(history, score(), classes, others=bool(paths))

    print_page(write_report(all_panels(), args.out, title), given.said)
    for line in sentences(absent):
        print_line(line)
    if not paths and test is not None and test.bad:
        print_line(skipped(test.bad))
    return code


def _check_mistakes(args: argparse.Namespace, trained: TrainedModel, history: list | None) -> None:
    """Raises ValueError if the mistakes of a checkpoint are not known."""
    why = None
    if args.no_test:
        why = "--no-test is given"
    elif task_of(trained.model).name != "classify":
        why = f"{args.checkpoint} is no classifier"
    elif not trained.classes or (history and all(row["test_accuracy"] is None for row in history)):
        why = f"{args.checkpoint} was not trained to classify"
    elif not _has_test(trained):
        why = f"the test images of {args.checkpoint} are not here"
    if why is not None:
        raise ValueError(f"no image is given, and {why}, so there are no mistakes to explain; give image files")


def _of_files(files: list[Path], args: argparse.Namespace, trained: TrainedModel, said: str) -> Explained:
    """Image files; the true class of one is that of its folder's name."""
    import torch

    from ..train.data.transform import read_image

    images = [trained.transform(read_image(file, args.max_pixels, trained.transform.levels)) for file in files]
    targets = [class_of(file, trained.classes) for file in files]
    return Explained(torch.stack(images), names_of(files, trained.classes), targets, said)


def _mistaken(test: Any, score: Any, most: int, trained: TrainedModel) -> Explained:
    """Test images, the most confident mistakes first, then the least confident successes."""
    import torch

    from ..train.plots import mistakes_first

    order = mistakes_first(score)[:most]
    files = [file for file in getattr(test, "files", ()) if file not in test.bad]
    files = [files[i] for i in order] if files else []
    has_files = files and all(file.exists() for file in files)  # those in shards do not
    names = names_of(files) if has_files else [f"test image {i}" for i in order]
    mistakes = int((score.predictions != score.targets).sum())
    images = torch.stack([trained.transform.normalise(test.display_image(i)) for i in order])
    counts = {"mistake": mistakes, "correct prediction": score.images - mistakes}
    drawn = min(mistakes, len(order))
    parts = zip((drawn, len(order) - drawn), counts.items(), strict=True)
    words = [f"{some} of {all_:,} {what}{'s' * (all_ != 1)}" for some, (what, all_) in parts if some]
    said = " and ".join(words) + " on test images"
    return Explained(images, names, score.targets[order].tolist(), said)


def _read_log(path: Path) -> list[dict[str, float | None]]:
    """The rows of a log; only the columns that are drawn."""
    try:
        with path.open(newline="") as file:
            lines = list(csv.DictReader(file))
        measured = ("epoch", "lr", "train_loss")
        columns = (*measured, "train_accuracy", "test_loss", "test_accuracy")
        return [
            {name: float(line[name]) if line[name] or name in measured else None for name in columns} for line in lines
        ]
    except (ValueError, LookupError, TypeError, csv.Error) as error:
        raise ValueError(f"{path} is damaged: {error}; without this file the report has no curves") from error


def _has_test(trained: TrainedModel) -> bool:
    """True if the data of a run are here."""
    data = trained.data
    return data is not None and (data == "digits" or data.startswith("hf:") or Path(data).is_dir())
