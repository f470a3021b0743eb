"""`restore`: enlarges or denoises an image file."""

import argparse
from pathlib import Path
from typing import Any

from .checks import at_least
from .console import add_device_option, add_max_pixels_option, print_line, select_device
from .loading import add_checkpoint_option, load_trained, save_pixels, trained_for

HELP = "enlarge or denoise an image file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `restore`."""
    parser.add_argument("image", type=Path, help="image file, of at least the size of the model's tiles")
    add_checkpoint_option(parser)
    parser.add_argument("--out", type=Path, required=True, help="image file to write")
    parser.add_argument("--task", help="one of the model's tasks, such as x2 (default: its first)")
    text = "pixels that neighbouring tiles share (default: a quarter of a tile)"
    parser.add_argument("--overlap", type=int, check=at_least(0), help=text)
    add_device_option(parser)
    add_max_pixels_option(parser)


def run(args: argparse.Namespace) -> int:
    """Restores an image file by a model of restoration."""
    import torch

    from ..train.data.transform import Transform, find_defect, read_image

    trained = trained_for("restore", load_trained(args.checkpoint, args.mean, args.std), args.checkpoint)
    device = select_device(args.device)
    model: Any = trained.model.to(device).eval()
    if defect := find_defect(args.image, True, args.max_pixels):
        raise ValueError(f"{args.image} cannot be read as an image: {defect}")
    image = read_image(args.image, args.max_pixels)
    channels = model.config.in_chans
    pixels = Transform((image.height, image.width), (0.0,) * channels, (1.0,) * channels)(image)
    with torch.no_grad():
        restored = model.restore(255 * pixels.to(device), args.task, args.overlap)
    save_pixels((restored / 255).cpu(), args.out)
    task = args.task or model.config.tasks[0]
    print_line(f"{args.out}: {restored.shape[2]} x {restored.shape[1]} pixels, {task}")
    return 0
