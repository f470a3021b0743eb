"""`restore`: enlarges or denoises an image file."""

import argparse
from pathlib import Path

from .arguments import add_checkpoint, add_shared, at_least
from .console import print_line
from .images import read_only, save_pixels
from .loading import load_for

HELP = "enlarge or denoise an image file"
EXAMPLES = (
    "fastvit-triton restore --checkpoint runs/noise photo.jpg --out clean.png",
    "fastvit-triton restore --checkpoint runs/x2 a.jpg --out large.png --task x2",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `restore`."""
    parser.add_argument("image", type=Path, help="image file, of at least the size of the model's tiles")
    add_checkpoint(parser)
    parser.add_argument("--out", type=Path, required=True, help="image file to write")
    parser.add_argument("--task", help="one of the model's tasks, such as x2 (default: its first)")
    text = "pixels that neighbouring tiles share (default: a quarter of a tile)"
    parser.add_argument("--overlap", type=int, check=at_least(0), help=text)
    add_shared(parser, "--device", "--levels", "--max-pixels")


def run(args: argparse.Namespace) -> int:
    """Restores an image file by a model of restoration."""
    import torch

    from ..train.data.transform import Transform

    trained = load_for(args, "restore")
    model, device = trained.model, trained.device
    image = read_only(args.image, "", args.max_pixels, trained.transform.levels)
    channels = model.config.in_chans
    pixels = Transform((image.height, image.width), (0.0,) * channels, (1.0,) * channels)(image)
    with torch.no_grad():
        restored = model.restore(255 * pixels.to(device), args.task, args.overlap)
    save_pixels((restored / 255).cpu(), args.out)
    task = args.task or model.config.tasks[0]
    print_line(f"{args.out}: {restored.shape[2]} x {restored.shape[1]} pixels, {task}")
    return 0
