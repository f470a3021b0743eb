"""`generate`: draws images from a model of pixels."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import add_checkpoint, add_shared, at_least
from .console import print_line
from .images import read_only, save_pixels
from .loading import load_for

if TYPE_CHECKING:
    from torch import Tensor

HELP = "draw images from a model of pixels"
EXAMPLES = (
    "fastvit-triton generate --checkpoint runs/pixels --out samples.png",
    "fastvit-triton generate --checkpoint runs/pixels --out 7.png --class 7",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `generate`."""
    add_checkpoint(parser)
    parser.add_argument("--out", type=Path, required=True, help="image file to write: a sheet of all images")
    parser.add_argument("--count", type=int, default=16, check=at_least(1), help="number of images (default: 16)")
    text = "name or number of the class of all images (default: the classes in turn, if the model has any)"
    parser.add_argument("--class", dest="label", help=text)
    text = "image file whose upper rows are kept (default: nothing is given)"
    parser.add_argument("--prefix", type=Path, help=text)
    parser.add_argument("--rows", type=int, check=at_least(1), help="number of rows kept of --prefix (default: half)")
    parser.add_argument("--temperature", type=float, default=1.0, help="divides the logits (default: 1)")
    parser.add_argument("--top-k", type=int, check=at_least(1), help="draw from the most likely values only")
    parser.add_argument("--scale", type=int, default=4, check=at_least(1), help="enlarges the sheet (default: 4)")
    parser.add_argument("--seed", type=int, default=0, check=at_least(0), help="seed of the draws (default: 0)")
    add_shared(parser, "--device", "--levels", "--max-pixels")


def run(args: argparse.Namespace) -> int:
    """Draws images from a model of pixels, and writes a sheet of them."""
    import torch

    trained = load_for(args, "generate")
    model, device = trained.model, trained.device
    classes = _classes(args.label, trained.classes, model.num_classes, args.count)
    prefix = None if args.prefix is None else _prefix(args, model, trained.transform.levels)
    codes = model.generate(
        args.count,
        prefix=None if prefix is None else prefix.to(device),
        classes=None if classes is None else classes.to(device),
        temperature=args.temperature,
        top_k=args.top_k,
        generator=torch.Generator(device).manual_seed(args.seed),
    )
    images = ((model.decode(codes) + 1) / 2).clamp(0, 1).float().cpu()
    save_pixels(sheet(images, args.scale), args.out)
    print_line(f"{args.out}: {args.count} images of {images.shape[2]} x {images.shape[3]} pixels")
    return 0


def _classes(label: str | None, names: tuple[str, ...], count: int, images: int) -> "Tensor | None":
    """Class numbers [images] of a model with `count` classes; None if it has none."""
    import torch

    if not count:
        if label is not None:
            raise ValueError(f"--class is {label}, but the model does not depend on a class; leave it out")
        return None
    if label is None:
        return torch.arange(images) % count
    if label not in names and not (label.isdecimal() and int(label) < count):
        raise ValueError(f"--class is {label!r}; use one of {', '.join(names[:10])}, or a number below {count}")
    return torch.full((images,), names.index(label) if label in names else int(label))


def _prefix(args: argparse.Namespace, model: Any, levels: float | None) -> "Tensor":
    """The codes [1, n] of the upper rows of an image file, resized to the model's images."""
    from ..models.config import sides
    from ..train.data.transform import Transform

    prefix = read_only(args.prefix, "--prefix: ", args.max_pixels, levels)
    height, width = sides(model.config.img_size)
    rows = args.rows or height // 2
    if rows > height:
        raise ValueError(f"--rows is {rows}; an image of this model has {height} rows")
    half = (0.5,) * model.config.in_chans
    image = Transform((height, width), half, half)(prefix)
    return model.encode(image[None].to(next(model.parameters())))[:, : rows * model.grid[1]]


def sheet(images: "Tensor", scale: int) -> "Tensor":
    """Images [N, C, H, W] → one [C, rows, columns] with as many in a row as fit a square, enlarged."""
    import torch.nn.functional as F

    wide = max(1, round(len(images) ** 0.5))
    missing = -len(images) % wide
    images = F.pad(images, (0, 1, 0, 1, 0, 0, 0, missing), value=1.0)  # a white line between them
    rows = images.unflatten(0, (-1, wide)).permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)
    return rows.repeat_interleave(scale, 1).repeat_interleave(scale, 2)
