"""`predict`: classifies image files, or finds the objects in them."""

import argparse
from pathlib import Path

from .arguments import add_checkpoint, add_shared, at_least, check_folder_of, number
from .loading import load_for
from .results import add_out_option
from .tasks import task_of

HELP = "classify image files, or find objects in them"
EXAMPLES = (
    "fastvit-triton predict --checkpoint runs/photos holiday.jpg",
    "fastvit-triton predict --checkpoint runs/photos --out a.csv 'new/*.jpg'",
    "fastvit-triton predict --checkpoint hf-hub:google/vit-base-patch16-224 a.jpg",
    "fastvit-triton predict --checkpoint runs/scenes a.png --draw boxes  # detector",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `predict`."""
    text = "image files, folders, whose subfolders are searched, too, or quoted patterns such as 'photos/**/*.jpg'"
    parser.add_argument("images", nargs="+", type=Path, metavar="IMAGE", help=text)
    add_checkpoint(parser)
    parser.add_argument("--top", type=int, default=3, check=at_least(1), help="number of classes to print (default: 3)")
    add_out_option(parser, "classes and probabilities of each image, or its boxes, in place of printed lines")
    parser.add_argument("--invert", action="store_true", help="invert the colours: the digits are white on black")
    text = "folder for PNG files of the images with their boxes (detectors only, like the next)"
    parser.add_argument("--draw", type=Path, check=check_folder_of, metavar="FOLDER", help=text)
    text = "least score of a box, from 0 to 1 (default: 0.4)"
    share = number(lambda value: 0 <= value <= 1, "use a score from 0 to 1")
    parser.add_argument("--threshold", type=float, check=share, help=text)
    add_shared(parser, "--device", "--levels", "--max-pixels")


def run(args: argparse.Namespace) -> int:
    """Classifies image files, or finds objects; one line per skipped image, which cannot be read, and exit code 2."""
    trained = load_for(args)
    task = task_of(trained.model)
    for name in ("draw", "threshold") if not task.has_boxes else ():
        if getattr(args, name) is not None:
            raise ValueError(f"--{name} is for detectors, and {args.checkpoint} predicts no boxes; leave it out")
    return task.predict(trained, args)
