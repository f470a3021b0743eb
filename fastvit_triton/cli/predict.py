"""`predict`: classifies image files, or finds the objects in them."""

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from . import detect
from .checks import at_least
from .console import add_device_option, add_max_pixels_option, print_line, select_device, tracked
from .loading import TrainedModel, add_checkpoint_option, decoded, find_images, load_trained, trained_for
from .results import add_out_option, cell, write_rows

if TYPE_CHECKING:
    from torch import Tensor

BATCH = 32  # images that the model gets at a time
HELP = "classify image files, or find objects in them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `predict`."""
    text = "image files, folders, whose subfolders are searched, too, or quoted patterns such as 'photos/**/*.jpg'"
    parser.add_argument("images", nargs="+", type=Path, help=text)
    add_checkpoint_option(parser)
    parser.add_argument("--top", type=int, default=3, check=at_least(1), help="number of classes to print (default: 3)")
    add_out_option(parser, "classes and probabilities of each image, or its boxes, in place of printed lines")
    parser.add_argument("--invert", action="store_true", help="invert the colours: the digits are white on black")
    detect.add_predict_options(parser)
    add_device_option(parser)
    add_max_pixels_option(parser)


def run(args: argparse.Namespace) -> int:
    """Classifies image files, or finds objects; one line per skipped image, which cannot be read, and exit code 2."""
    import torch

    trained = load_trained(args.checkpoint, args.mean, args.std)
    if getattr(trained.model, "task", "classify") == "detect":
        return detect.predict(trained, args)
    trained_for("classify", trained, args.checkpoint)
    detect.refuse_options(args)
    device = select_device(args.device)
    model = trained.model.to(device).eval()
    files = find_images(args.images)
    top = min(args.top, len(trained.classes))
    rows = []
    read = partial(_read, trained, args)
    for batch, images in decoded(_shown(files, args.out), read, BATCH, args.max_pixels):
        with torch.no_grad():
            best = model(images.to(device)).softmax(1).topk(top)
        for file, shares, numbers in zip(batch, best.values.tolist(), best.indices.tolist(), strict=True):
            pairs = [(trained.classes[i], share) for i, share in zip(numbers, shares, strict=True)]
            rows.append({"file": cell(file)})
            for rank, (name, share) in enumerate(pairs, 1):
                rows[-1] |= {f"class_{rank}": name, f"probability_{rank}": share}
            if args.out is None:
                print_line(f"{file}: " + ", ".join(f"{name} ({100 * share:.1f} %)" for name, share in pairs))
    if args.out is not None and rows:
        write_rows(args.out, rows)
        print_line(f"{args.out} holds the classes of {len(rows):,} images")
    return 0 if len(rows) == len(files) else 2


def _shown(files: list[Path], out: Path | None) -> Iterator[Path]:
    """The files, with a progress bar where no lines are printed on the terminal."""
    return iter(files) if out is None and sys.stdout.isatty() else tracked(files, len(files), "classifying")


def _read(trained: TrainedModel, args: argparse.Namespace, file: Path) -> "Tensor":
    """An image file as the model's input [C, H, W]."""
    from PIL import ImageOps

    from ..train.data.transform import read_image

    image = read_image(file, args.max_pixels)
    return trained.transform(ImageOps.invert(image.convert("RGB")) if args.invert else image)
