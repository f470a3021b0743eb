"""One picture: from a file of any size and mode to the tensor a model takes."""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from .policy import Policy
from .ranges import Number, Part, Probability, Side, check_fields, checked

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")

# What Pillow raises on a file that is not, or is no longer, a picture.
BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Transform:
    """How a picture becomes numbers; it travels with the weights, so that `predict` sees what training saw.

    Attributes:
        size: (height, width) in pixels.
        mean: per channel, of pixels in [0, 1]; its length, 1 or 3, is the number of channels.
        std: per channel.
        crop: the centre part of the shorter side that is kept; 1 keeps it all.
    """

    size: tuple[Side, Side]
    mean: tuple[Probability, ...]
    std: tuple[Part, ...]
    crop: Part = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        for field in ("size", "mean", "std"):
            object.__setattr__(self, field, tuple(getattr(self, field)))
        if len(self.mean) not in (1, 3) or len(self.mean) != len(self.std):
            raise ValueError(f"mean has {len(self.mean)} channels and std {len(self.std)}; pictures have 1 or 3")

    @checked
    def __call__(
        self,
        picture: Image.Image,
        seed: Annotated[Number | None, "the centre"] = None,
        min_area: Part = 0.35,
        flip: bool = True,
        policy: Policy | None = None,
    ) -> Tensor:
        """A picture of any size, as one normalised image.

        Args:
            picture: as `read` returns it.
            seed: None takes the centre; a number draws a random crop from it, for training.
            min_area: smallest part of the picture's area in a random crop (Szegedy et al., arXiv:1409.4842, section 6).
            flip: mirror half of the random crops.
            policy: changes a random crop further, such as `rand_augment`; None does not.

        Returns:
            [C, H, W], mean 0 and deviation 1 over the training images.
        """
        height, width = self.size
        picture = picture.convert("L" if len(self.mean) == 1 else "RGB")
        if seed is None:
            box, mirrored = _centre_box(picture.size, width / height, self.crop), False
        else:
            generator = torch.Generator().manual_seed(seed)
            box = _random_box(picture.size, width / height, min_area, generator)
            mirrored = flip and torch.rand((), generator=generator).item() < 0.5
        picture = picture.resize((width, height), Image.Resampling.BILINEAR, box=box)  # antialiased
        if mirrored:
            picture = ImageOps.mirror(picture)
        if seed is not None and policy is not None:
            picture = policy(picture, generator)
        pixels = torch.from_numpy(np.array(picture, dtype=np.float32) / 255).view(height, width, -1)
        return self.normalise(pixels.movedim(-1, 0))

    def normalise(self, images: Tensor) -> Tensor:
        """[…, C, H, W] in [0, 1] to mean 0 and deviation 1."""
        return (images - _column(self.mean, images)) / _column(self.std, images)

    def restore(self, images: Tensor) -> Tensor:
        """The inverse of `normalise`, for the eye."""
        return (images * _column(self.std, images) + _column(self.mean, images)).clamp(0, 1)


def read(path: Path | BinaryIO) -> Image.Image:
    """Decodes a picture, upright, 8 bits a channel, on white where it is transparent; raises one of `BROKEN`."""
    with Image.open(path) as picture:
        picture = ImageOps.exif_transpose(picture)
        if picture.mode.startswith("I") or picture.mode == "F":  # 16 or 32 bits a pixel: stretch to the range used
            levels = np.asarray(picture, dtype=np.float64)
            top = 65535 if picture.mode.startswith("I") else max(levels.max(), 1e-12)
            return Image.fromarray((levels / top * 255).clip(0, 255).astype(np.uint8))
        if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
            page = Image.new("RGBA", picture.size, "white")
            page.alpha_composite(picture.convert("RGBA"))
            return page.convert("RGB")
        picture.load()
        return picture


def save_picture(image: Tensor, path: Path, side: int = 128) -> None:
    """Writes an image [C, H, W] in [0, 1] as a PNG, each pixel repeated until the height reaches `side`."""
    levels = (image * 255).round().to(torch.uint8).movedim(0, -1).squeeze(-1).numpy()
    repeat = -(-side // levels.shape[0])
    Image.fromarray(levels.repeat(repeat, 0).repeat(repeat, 1)).save(path, format="PNG")


def defect(path: Path, decode: bool = False) -> str | None:
    """Why a file is no usable picture, in a few words, or None.

    Args:
        path: the file.
        decode: False looks at the header only, which finds empty and foreign files in about 0.1 ms.
    """
    try:
        if path.stat().st_size == 0:
            return "empty file"
        if decode:
            read(path)
        else:
            Image.open(path).close()
    except Image.UnidentifiedImageError:
        return "not an image"
    except BROKEN as error:
        return str(error) or type(error).__name__
    return None


def listing(names: list[str], most: int = 10) -> str:
    """At most ten names, then how many more."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _column(values: tuple[float, ...], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).view(-1, 1, 1)


def _centre_box(size: tuple[int, int], aspect: float, crop: float) -> tuple[float, float, float, float]:
    """(left, top, right, bottom) of the largest centred box of this aspect (width / height), times `crop`."""
    width = min(size[0], size[1] * aspect) * crop
    height = width / aspect
    left, top = (size[0] - width) / 2, (size[1] - height) / 2
    return left, top, left + width, top + height


def _random_box(
    size: tuple[int, int], aspect: float, min_area: float, generator: torch.Generator
) -> tuple[float, float, float, float]:
    """A box of random area, aspect within 3:4 … 4:3 of the wanted one, and place."""
    area, stretch, x, y = torch.rand(4, generator=generator).tolist()
    area = (min_area + (1 - min_area) * area) * size[0] * size[1]
    aspect *= (4 / 3) ** (2 * stretch - 1)
    width, height = min((area * aspect) ** 0.5, size[0]), min((area / aspect) ** 0.5, size[1])
    left, top = x * (size[0] - width), y * (size[1] - height)
    return left, top, left + width, top + height
