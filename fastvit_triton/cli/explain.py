"""`explain`: a report on what a model attends to in images."""

import argparse
import csv
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..files import printable
from .checks import at_least
from .console import add_device_option, add_max_pixels_option, add_workers_option, print_line, select_device
from .loading import TrainedModel, add_checkpoint_option, find_images, load_trained, readable_images, test_images

if TYPE_CHECKING:
    import torch

    from ..explain import Panel
    from ..train.loop import Score

HELP = "report what a model attends to in images"
PARTS = {  # panel of a part that a model may lack → its figures
    "positions": "similarity of position embeddings",
    "filters": "filters of the patch projection and cost by image size",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `explain`."""
    add_checkpoint_option(parser)
    parser.add_argument("--image", type=Path, required=True, help="an image file, or a folder of them")
    text = "folder for report.html and its figures (default: report)"
    parser.add_argument("--out", type=Path, default=Path("report"), help=text)
    text = "token whose attention is shown (default: the class token)"
    parser.add_argument("--query", type=int, check=at_least(0), help=text)
    text = "number of images of a folder to show (default: 8)"
    parser.add_argument("--most", type=int, default=8, check=at_least(1), help=text)
    text = "skip the confusion matrix, which needs all test images"
    parser.add_argument("--no-test", action="store_true", help=text)
    add_device_option(parser)
    add_workers_option(parser)
    add_max_pixels_option(parser)


def run(args: argparse.Namespace) -> int:
    """Writes a report on a checkpoint and image files: attention, tokens, positions, filters and costs."""
    import torch

    from ..explain import explain, explain_run, write_report
    from ..explain.report import CONTRIBUTIONS
    from ..train.data.transform import read_image

    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("explain draws with matplotlib; pip install 'fastvit_triton[train]'")
    trained = load_trained(args.checkpoint, args.mean, args.std)
    device = select_device(args.device)
    model = trained.model.to(device).eval()
    files = find_images([args.image])
    chosen = files[: args.most]
    shown = list(readable_images(chosen, args.max_pixels))
    code = 0 if len(shown) == len(chosen) else 2
    if not shown:
        return code
    classes = tuple(map(printable, trained.classes))
    title = f"Attention report of {Path(args.checkpoint).resolve().name}"
    if getattr(model, "task", "classify") == "detect":
        page = write_report(_queries(trained, model, shown, classes, args), args.out, title)
        return _print_page(page, len(shown), len(files), code)
    images = torch.stack([trained.transform(read_image(file, args.max_pixels)) for file in shown])
    panels = explain(
        model,
        images.to(device),
        trained.transform.restore(images),
        [printable(file.name) for file in shown],
        classes,
        args.query,
    )

    names = []

    def all_panels() -> Iterator:
        for panel in panels:
            names.append(panel.name)
            yield panel
        yield from explain_run(*_run_results(args, trained, device), classes)

    page = write_report(all_panels(), args.out, title)
    if any(name.endswith(CONTRIBUTIONS) for name in names):
        print_line(
            "left out, because layers attend to different tokens: attention by head, rollout, attention distance, "
            "similarity by depth, positions and cost by image size; explain.capture has the maps in Python"
        )
    elif absent := [figures for name, figures in PARTS.items() if name not in names]:
        print_line(f"left out, because the model has no such part: {'; '.join(absent)}")
    return _print_page(page, len(shown), len(files), code)


def _print_page(page: Path, shown: int, files: int, code: int) -> int:
    plural = "s" if files > 1 else ""
    print_line(f"{page} shows {shown} of {files} image{plural}; its figures are in the same folder")
    return code


def _queries(
    trained: TrainedModel, model: Any, files: list[Path], classes: tuple[str, ...], args: argparse.Namespace
) -> Iterator["Panel"]:
    """Panels of a detector."""
    from ..explain import query_panels
    from ..train.data.transform import read_image
    from ..train.detection.batches import prepared

    if args.query is not None:
        raise ValueError(f"--query {args.query} is for classifiers; a detector shows the queries of its objects")
    images = [prepared(read_image(file, args.max_pixels), trained.transform) for file in files]
    device = next(model.parameters()).device
    pictures = [trained.transform.restore(image) for image in images]
    names = [printable(file.name) for file in files]
    yield from query_panels(model, [image.to(device) for image in images], pictures, names, classes)


class _RunResults(NamedTuple):
    """Log rows of a run and its score on the test images; None if not available."""

    history: list[dict] | None
    score: "Score | None"


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


def _run_results(args: argparse.Namespace, trained: TrainedModel, device: "torch.device") -> _RunResults:
    from ..train.loop import evaluate
    from ..train.outputs import LOG
    from ..train.step import autocast_dtype

    source = Path(args.checkpoint)
    folder = source if source.is_dir() else source.parent
    history = _read_log(folder / LOG) if (folder / LOG).exists() else None
    data = trained.data
    if data is None or args.no_test or not (data == "digits" or data.startswith("hf:") or Path(data).is_dir()):
        return _RunResults(history, None)
    options = {"workers": args.workers, "skip_bad_images": trained.skip_bad_images, "max_pixels": args.max_pixels}
    test = test_images(trained, None, options)
    return _RunResults(history, evaluate(trained.model, test, autocast_dtype(device)))
