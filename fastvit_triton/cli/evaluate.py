"""`evaluate`: accuracy of a checkpoint on test images, in total and by class."""

import argparse

from rich.console import Console
from rich.text import Text

from ..files import printable
from .checks import check_data
from .console import (
    add_device_option,
    add_max_pixels_option,
    add_skip_option,
    add_workers_option,
    print_line,
    select_device,
)
from .loading import add_checkpoint_option, load_trained, test_images

HELP = "compute the test accuracy of a checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `evaluate`."""
    add_checkpoint_option(parser)
    text = "data set whose val/ is evaluated, or all of <class>/ (default: test images of the training data set)"
    parser.add_argument("--data", check=check_data, help=text)
    add_device_option(parser)
    add_workers_option(parser)
    add_skip_option(parser)
    add_max_pixels_option(parser)


def run(args: argparse.Namespace) -> int:
    """Computes the test accuracy of a checkpoint, in total and by class."""
    from rich.table import Table

    from ..train.data.transform import join_names
    from ..train.loop import evaluate
    from ..train.step import autocast_dtype

    trained = load_trained(args.checkpoint, args.mean, args.std)
    if args.data is None and trained.data is None:
        raise ValueError(f"{args.checkpoint} does not say what it was trained on; give --data")
    skip = args.skip_bad_images or trained.skip_bad_images
    options = {"workers": args.workers, "skip_bad_images": skip, "max_pixels": args.max_pixels}
    test = test_images(trained, args.data, options)
    device = select_device(args.device)
    score = evaluate(trained.model.to(device), test, autocast_dtype(device))
    targets = score.targets
    predictions = score.predictions
    accuracy = score.accuracy
    assert targets is not None and predictions is not None and accuracy is not None  # of a classifier
    table = Table("class", "images", "correct", "accuracy")
    for number, label in enumerate(trained.classes):
        mask = targets == number
        images = int(mask.sum())
        correct = int((predictions[mask] == number).sum())
        share = f"{100 * correct / images:.1f} %" if images else "-"
        table.add_row(Text(printable(label)), f"{images:,}", f"{correct:,}", share)
    Console().print(table)
    correct = int((predictions == targets).sum())
    images = len(targets)
    print_line(f"test accuracy {100 * accuracy:.2f} % ({correct:,} of {images:,} images), loss {score.loss:.4f}")
    if test.bad:
        names = join_names([str(path) for path in sorted(test.bad)])
        print_line(f"skipped {len(test.bad)} images that cannot be read: {names}")
    return 0
