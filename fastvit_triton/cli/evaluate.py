"""`evaluate`: how good a checkpoint is on test images: accuracy by class, AP, bits a dimension, or PSNR and SSIM."""

import argparse
import filecmp
from pathlib import Path

from .arguments import add_checkpoint, add_shared, check_data
from .console import print_line
from .loading import load_for
from .results import add_out_option
from .tasks import task_of

HELP = "compute the test accuracy of a checkpoint"
EXAMPLES = (
    "fastvit-triton evaluate --checkpoint runs/photos",
    "fastvit-triton evaluate --checkpoint runs/photos --data other --out table.csv",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `evaluate`."""
    add_checkpoint(parser)
    text = "data set whose val/ is evaluated, or all of <class>/ (default: test images of the training data set)"
    parser.add_argument("--data", check=check_data, metavar="DATA", help=text)
    text = (
        "the scores of each class, of detectors and classifiers, and their confusion matrix; JSON also has the totals"
    )
    add_out_option(parser, text)
    add_shared(parser, "--device", "--workers", "--levels", "--skip-bad-images", "--max-pixels")


def run(args: argparse.Namespace) -> int:
    """Computes the test accuracy of a checkpoint, in total and by class; of models of pixels bits a dimension."""
    from ..train.outputs import BEST, WEIGHTS

    trained = load_for(args)
    if args.data is None and trained.data is None:
        raise ValueError(f"{args.checkpoint} does not say what it was trained on; give --data")
    code = task_of(trained.model).evaluate(trained, args)
    last, best = (Path(args.checkpoint) / name for name in (WEIGHTS, BEST))
    if last.is_file() and best.is_file() and not filecmp.cmp(last, best, shallow=False):
        print_line(f"these are the weights of the last epoch; {best} holds those of the best")
    return code
