"""`explain`: a report on what a model attends to in images."""

import argparse
import csv
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..files import printable
from .arguments import add_checkpoint, add_shared, at_least
from .console import print_line
from .images import class_of, find_images, names_of, readable_images
from .loading import load_for
from .tasks import TrainedModel, task_of, test_images

if TYPE_CHECKING:
    import torch

    from ..train.loop import Score

HELP = "report what a model attends to in images"
EXAMPLES = (
    "fastvit-triton explain --checkpoint runs/photos --image holiday.jpg",
    "fastvit-triton explain --checkpoint runs/photos --image holidays --most 12",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `explain`."""
    add_checkpoint(parser)
    parser.add_argument("--image", type=Path, required=True, help="an image file, or a folder of them")
    text = "new or empty folder for report.html and its figures, or that of an earlier report (default: report)"
    parser.add_argument("--out", type=Path, default=Path("report"), metavar="FOLDER", help=text)
    text = "token whose attention is shown (default: the class token)"
    parser.add_argument("--query", type=int, check=at_least(0), help=text)
    text = "number of images of a folder to show (default: 8)"
    parser.add_argument("--most", type=int, default=8, check=at_least(1), help=text)
    text = "skip the confusion matrix, which needs all test images"
    parser.add_argument("--no-test", action="store_true", help=text)
    add_shared(parser, "--device", "--workers", "--levels", "--max-pixels")


def run(args: argparse.Namespace) -> int:
    """Writes a report on a checkpoint and image files: attention, tokens, positions, filters and costs."""
    import torch

    from ..explain import Absent, explain, explain_run, write_report
    from ..explain.page import holds_report, sentences
    from ..train.data.transform import read_image

    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("explain draws with matplotlib; pip install 'fastvit_triton[train]'")
    replaces = holds_report(args.out, "--out")
    trained = load_for(args)
    model, device = trained.model, trained.device
    files = find_images([args.image])
    chosen = files[: args.most]
    shown = list(readable_images(chosen, args.max_pixels, trained.transform.levels))
    code = 0 if len(shown) == len(chosen) else 2
    if not shown:
        return code
    classes = tuple(map(printable, trained.classes))
    title = f"Attention report of {Path(args.checkpoint).resolve().name}"
    if (own := task_of(model).panels(trained, shown, classes, args)) is not None:
        page = write_report(own, args.out, title)
        _print_page(page, replaces, len(shown), len(files))
        return code
    images = torch.stack(
        [trained.transform(read_image(file, args.max_pixels, trained.transform.levels)) for file in shown]
    )
    panels = explain(
        model,
        images.to(device),
        trained.transform.restore(images),
        names_of(shown, trained.classes),
        classes,
        args.query,
        [class_of(file, trained.classes) for file in shown],
    )

    absent = []

    def all_panels() -> Iterator:
        for panel in panels:
            if isinstance(panel, Absent):
                absent.append(panel)
            yield panel
        yield from explain_run(*_run_results(args, trained, device), classes)

    page = write_report(all_panels(), args.out, title)
    _print_page(page, replaces, len(shown), len(files))
    for line in sentences(absent):
        print_line(line)
    return code


def _print_page(page: Path, replaces: bool, shown: int, files: int) -> None:
    plural = "s" if files > 1 else ""
    end = " and replaces an earlier report" if replaces else ""
    print_line(f"{page} shows {shown} of {files} image{plural}{end}; its figures are in the same folder")


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


def _run_results(
    args: argparse.Namespace, trained: TrainedModel, device: "torch.device"
) -> tuple[list[dict] | None, "Score | None"]:
    """Log rows of a run and its score on the test images; None if not available."""
    from ..train.loop import evaluate
    from ..train.outputs import LOG
    from ..train.step import autocast_dtype

    source = Path(args.checkpoint)
    folder = source if source.is_dir() else source.parent
    history = _read_log(folder / LOG) if (folder / LOG).exists() else None
    data = trained.data
    if data is None or args.no_test or not (data == "digits" or data.startswith("hf:") or Path(data).is_dir()):
        return history, None
    options = {"workers": args.workers, "skip_bad_images": trained.skip_bad_images, "max_pixels": args.max_pixels}
    test = test_images(trained, None, options)
    return history, evaluate(trained.model, test, autocast_dtype(device))
