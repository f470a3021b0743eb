"""`predict`: classifies image files."""

import argparse
from pathlib import Path

from .checks import at_least
from .console import add_device_option, add_max_pixels_option, print_line, select_device
from .loading import add_checkpoint_option, find_images, load_trained, readable_images, trained_for

HELP = "classify image files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `predict`."""
    parser.add_argument("images", nargs="+", type=Path, help="image files, or folders of them")
    add_checkpoint_option(parser)
    parser.add_argument("--top", type=int, default=3, check=at_least(1), help="number of classes to print (default: 3)")
    parser.add_argument("--invert", action="store_true", help="invert the colours: the digits are white on black")
    add_device_option(parser)
    add_max_pixels_option(parser)


def run(args: argparse.Namespace) -> int:
    """Classifies image files. Prints one error line per image that cannot be read; the exit code is then 2."""
    import torch
    from PIL import ImageOps

    from ..train.data.transform import read_image

    trained = trained_for("classify", load_trained(args.checkpoint, args.mean, args.std), args.checkpoint)
    device = select_device(args.device)
    model = trained.model.to(device).eval()
    files = find_images(args.images)
    count = 0
    for file in readable_images(files, args.max_pixels):
        count += 1
        image = read_image(file, args.max_pixels)
        image = ImageOps.invert(image.convert("RGB")) if args.invert else image
        with torch.no_grad():
            probabilities = model(trained.transform(image)[None].to(device))[0].softmax(0)
        best = probabilities.topk(min(args.top, len(probabilities)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        print_line(f"{file}: " + ", ".join(f"{trained.classes[i]} ({100 * share:.1f} %)" for i, share in pairs))
    return 0 if count == len(files) else 2
