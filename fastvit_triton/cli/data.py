"""`data`: what a data set holds, as `train` reads it, and what is wrong with it."""

import argparse

from .arguments import add_shared, check_data
from .console import print_line
from .parser import Parser

HELP = "print what a data set holds, and what train would refuse"
EXAMPLES = (
    "fastvit-triton data photos",
    "fastvit-triton data photos --val-split 0.2 --skip-bad-images",
)
FRACTION = 0.2  # of a folder without a test split


def add_arguments(parser: Parser) -> None:
    """Adds the arguments of `data`."""
    add = parser.add_argument
    add("data", metavar="FOLDER", help="a data set, as for `train --data`")
    text = "first write a sample there, to try commands on: 240 drawn pictures of six kinds of fruit"
    add("--sample", action="store_true", help=text)
    text = f"fraction of each class that is for testing (default: {FRACTION} where there are no test images)"
    add("--val-split", type=float, help=text)
    add_shared(parser, "--levels", "--allow", "--quick", "--skip-bad-images", "--max-pixels")


def run(args: argparse.Namespace) -> int:
    """Prints the images of a data set by split and class, and what is left out, twice or wrong; trains nothing."""
    from ..train.data.findings import quiet
    from ..train.data.hf import is_hf
    from ..train.data.inspection import inspect
    from ..train.data.sample import sample_pictures
    from ..train.data.split import Split
    from ..train.detection import has_boxes
    from ..train.detection.load import COMPOSED
    from ..train.ranges import OpenFraction, check
    from ..train.settings import RECIPES
    from ..train.sources import has_test_images, load

    if args.sample:
        if is_hf(args.data) or args.data in ("digits", "scenes"):
            raise ValueError(f"--sample writes a folder, and {args.data} is the name of a data set; give another name")
        sample_pictures(args.data)
    check_data("FOLDER", args.data)
    boxes = has_boxes(args.data)
    fraction = args.val_split
    if fraction is None and not boxes and not is_hf(args.data) and not has_test_images(args.data):
        fraction = FRACTION
        print_line(f"{args.data} has no test images; divided as by train --val-split {FRACTION}")
    if fraction is not None:
        check("--val-split", fraction, OpenFraction)
    recipe = RECIPES[args.data if args.data in ("digits", *COMPOSED) else "boxes" if boxes else "folder"]
    with quiet():
        found = load(
            args.data,
            recipe,
            skip_bad_images=True,
            max_pixels=args.max_pixels,
            split=None if fraction is None else Split(fraction, 0),
            levels=args.levels,
        )
    allow = (args.allow or "").split(",")
    options = {"allow": allow, "quick": args.quick, "skip_bad_images": bool(args.skip_bad_images)}
    inspection = inspect(found, recipe.loss, **options)
    print_line(inspection.text)
    inspection.refuse()
    return 0
