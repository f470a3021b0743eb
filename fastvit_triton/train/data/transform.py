"""Decodes image files and transforms them to model input: crop, resize, augment, normalise."""

import re
import stat
import struct
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import numpy as np
import torch
from PIL import Image, ImageOps, TiffImagePlugin, WebPImagePlugin  # noqa: F401  (the plugins register their formats)
from torch import Tensor

from ..augment.policy import Policy
from ..ranges import FractionAbove0, ImageSide, NonNegativeInt, Probability, check_fields, checked

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # of these suffixes; Pillow reads MPO as JPEG
MAX_PIXELS = 2**26  # 8192 x 8192

# Exceptions that Pillow raises on a file that is not an image or is damaged.
DECODE_ERRORS = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)


@dataclass(frozen=True)
class Transform:
    """Preprocessing from an image to model input. It is saved with the weights, so `predict` applies the same.

    Attributes:
        size: (height, width) in pixels.
        mean: per channel, of pixels in [0, 1]; its length, 1 or 3, is the number of channels.
        std: per channel.
        crop: fraction of the shorter side that a centre crop keeps; timm's crop_pct.
        crop_mode: "box" resamples the exact box in one step; timm's "center", "squash" and "border" first resize the
            shorter side, both sides or the longer side to `size` / `crop`; the border has the mean colour.
        interpolation: of the resizing, with antialiasing.
    """

    size: tuple[ImageSide, ImageSide]
    mean: tuple[Probability, ...]
    std: tuple[FractionAbove0, ...]
    crop: FractionAbove0 = 1.0
    crop_mode: Literal["box", "center", "squash", "border"] = "box"
    interpolation: Literal["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"] = "bilinear"

    def __post_init__(self) -> None:
        check_fields(self)
        for field in ("size", "mean", "std"):
            object.__setattr__(self, field, tuple(getattr(self, field)))
        if len(self.mean) not in (1, 3) or len(self.mean) != len(self.std):
            raise ValueError(f"mean has {len(self.mean)} channels and std {len(self.std)}; images have 1 or 3")

    @checked
    def __call__(
        self,
        image: Image.Image,
        seed: Annotated[NonNegativeInt | None, "the centre crop"] = None,
        min_area: FractionAbove0 = 0.35,
        flip: bool = True,
        policy: Policy | None = None,
    ) -> Tensor:
        """Crops, resizes, augments and normalises an image of any size.

        Args:
            image: as `read_image` returns it.
            seed: seed of a random crop, for training; None takes the centre crop without augmentation.
            min_area: smallest fraction of the area in a random crop (Szegedy et al., arXiv:1409.4842, section 6).
            flip: mirror each random crop with probability 1/2.
            policy: augmentation of a random crop, such as `rand_augment`.

        Returns:
            [C, H, W], normalised by mean and std.
        """
        height, width = self.size
        image = image.convert("L" if len(self.mean) == 1 else "RGB")
        resampling = Image.Resampling[self.interpolation.upper()]
        if seed is None and self.crop_mode != "box":
            return self.tensor(self._crop(image, resampling))
        if seed is None:
            box = _centre_box(image.size, width / height, self.crop)
            mirrored = False
        else:
            generator = torch.Generator().manual_seed(seed)
            box = _random_box(image.size, width / height, min_area, generator)
            mirrored = flip and torch.rand((), generator=generator).item() < 0.5
        image = image.resize((width, height), resampling, box=box)  # antialiased
        if mirrored:
            image = ImageOps.mirror(image)
        if seed is not None and policy is not None:
            image = policy(image, generator)
        return self.tensor(image)

    def _crop(self, image: Image.Image, resampling: Image.Resampling) -> Image.Image:
        """Resizes, then crops or pads around the centre, with timm's roundings (timm/data/transforms_factory.py)."""
        (width, height), (rows, columns) = image.size, self.size
        tall = int(rows / self.crop)
        wide = int(columns / self.crop)
        ratios = height / tall, width / wide
        if self.crop_mode == "squash":
            scaled = wide, tall
        elif self.crop_mode == "center" and tall == wide:
            short = min(width, height)
            scaled = (wide, int(tall * height / short)) if width <= height else (int(wide * width / short), tall)
        else:
            ratio = max(ratios) if self.crop_mode == "border" else min(ratios)
            scaled = round(width / ratio), round(height / ratio)
        image = image if scaled == image.size else image.resize(scaled, resampling)
        fill = tuple(round(255 * value) for value in self.mean) if self.crop_mode == "border" else None
        missing = max(columns - scaled[0], 0), max(rows - scaled[1], 0)
        if any(missing):
            canvas = Image.new(image.mode, (scaled[0] + missing[0], scaled[1] + missing[1]), _colour(fill))
            canvas.paste(image, (missing[0] // 2, missing[1] // 2))
            image = canvas
        left = round((image.width - columns) / 2)
        top = round((image.height - rows) / 2)
        return image.crop((left, top, left + columns, top + rows))

    def tensor(self, image: Image.Image) -> Tensor:
        """An image as [C, H, W], normalised by mean and std."""
        pixels = torch.from_numpy(np.array(image, dtype=np.float32) / 255).view(image.height, image.width, -1)
        return self.normalise(pixels.movedim(-1, 0))

    def normalise(self, images: Tensor) -> Tensor:
        """[..., C, H, W] in [0, 1] → (x − mean) / std."""
        return (images - _column(self.mean, images)) / _column(self.std, images)

    def restore(self, images: Tensor) -> Tensor:
        """The inverse of `normalise`, clamped to [0, 1]."""
        return (images * _column(self.std, images) + _column(self.mean, images)).clamp(0, 1)


def read_image(path: Path | BinaryIO, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decodes an image: applies the EXIF orientation, converts to 8 bits per channel, puts transparency on white.

    Args:
        path: a file of one of `FORMATS`, whatever its suffix.
        max_pixels: largest image to decode; its size is read from the header.

    Raises:
        One of `DECODE_ERRORS`: the file cannot be decoded, or the image is larger.
    """
    with open(path, "rb") if isinstance(path, Path) else nullcontext(path) as file:
        try:
            image = ImageOps.exif_transpose(_open_image(file, max_pixels))
        except (TypeError, LookupError, ArithmeticError, AttributeError) as error:  # Pillow's, at damaged tags
            raise ValueError(f"damaged image: {error}") from error
        if image.mode.startswith("I") or image.mode == "F":  # 16 or 32 bits per pixel
            levels = np.asarray(image, dtype=np.float64)
            maximum = 65535 if image.mode.startswith("I") else max(levels.max(), 1e-12)
            return Image.fromarray((levels / maximum * 255).clip(0, 255).astype(np.uint8))
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            background = Image.new("RGBA", image.size, "white")
            background.alpha_composite(image.convert("RGBA"))
            return background.convert("RGB")
        image.load()
        return image


def save_image(image: Tensor, path: Path, side: int = 128) -> None:
    """Writes an image [C, H, W] in [0, 1] as a PNG, repeating pixels until the height is at least `side`."""
    levels = (image * 255).round().to(torch.uint8).movedim(0, -1).squeeze(-1).numpy()
    repeat = -(-side // levels.shape[0])
    Image.fromarray(levels.repeat(repeat, 0).repeat(repeat, 1)).save(path, format="PNG")


def find_defect(path: Path, decode: bool = False, max_pixels: int = MAX_PIXELS) -> str | None:
    """Checks an image file; returns why it is unusable, in a few words, or None.

    Args:
        path: the file.
        decode: decode all pixels; False reads the header only, which detects empty and non-image files in about 0.1 ms.
        max_pixels: largest usable image.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return "not a regular file"  # opening a named pipe would wait for a writer
        if status.st_size == 0:
            return "empty file"
        if decode:
            read_image(path, max_pixels)
        else:
            with open(path, "rb") as file:
                _open_image(file, max_pixels)
    except DECODE_ERRORS as error:
        return reason_of(error)
    return None


def reason_of(error: Exception) -> str:
    """Why an image cannot be read, in a few words, from one of `DECODE_ERRORS`."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def join_names(names: list[str], limit: int = 10) -> str:
    """The first `limit` names, comma-separated, then "and … more"."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _open_image(file: BinaryIO, max_pixels: int) -> Image.Image:
    """Reads the header of an image. Decoding, later, needs the open file.

    Not by `Image.open`: it would try all formats, among them EPS, which runs Ghostscript; and it compares the size with
    a limit of the whole process, beyond which it warns or raises before the size can be seen.
    """
    if Image.MAX_IMAGE_PIXELS is not None and max_pixels > max(Image.MAX_IMAGE_PIXELS, MAX_PIXELS):
        # TIFF and WEBP compare with it once more. Setting it back would not be safe with threads.
        Image.MAX_IMAGE_PIXELS = max_pixels
    Image.preinit()
    prefix = file.read(16)
    image: Image.Image | None = None
    try:
        for factory, accepts in (Image.OPEN[name] for name in FORMATS):
            if accepts is not None and accepts(prefix) is True:
                file.seek(0)
                image = factory(file, "")
                break
        pixels = 0 if image is None else image.width * image.height
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:  # Pillow's limit, which is larger
        pixels = int("".join(re.findall(r"\d+", str(error))[:1]))
    except (SyntaxError, IndexError, TypeError, struct.error):  # as in `Image.open`
        image, pixels = None, 0
    if pixels > max_pixels:
        raise ValueError(f"has {pixels:,} pixels, more than --max-pixels {max_pixels:,}")
    if image is None:
        raise Image.UnidentifiedImageError("not an image")
    return image


def _colour(values: tuple[int, ...] | None) -> Any:
    """A colour in Pillow's form: a number for one channel; black for None."""
    return values if values is not None and len(values) > 1 else (values or (0,))[0]


def _column(values: tuple[float, ...], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).view(-1, 1, 1)


def _centre_box(size: tuple[int, int], aspect: float, crop: float) -> tuple[float, float, float, float]:
    """(left, top, right, bottom) of the largest centred box of this aspect (width / height), times `crop`."""
    width = min(size[0], size[1] * aspect) * crop
    height = width / aspect
    left = (size[0] - width) / 2
    top = (size[1] - height) / 2
    return left, top, left + width, top + height


def _random_box(
    size: tuple[int, int], aspect: float, min_area: float, generator: torch.Generator
) -> tuple[float, float, float, float]:
    """(left, top, right, bottom) of a box of random area and position, its aspect within 3:4 … 4:3 of `aspect`.

    With a `min_area` of 1 it is the largest box of this aspect.
    """
    area, stretch, x, y = torch.rand(4, generator=generator).tolist()
    stretch = stretch if min_area < 1 else 0.5
    area = (min_area + (1 - min_area) * area) * size[0] * size[1]
    aspect *= (4 / 3) ** (2 * stretch - 1)
    width = min((area * aspect) ** 0.5, size[0])
    height = min((area / aspect) ** 0.5, size[1])
    left = x * (size[0] - width)
    top = y * (size[1] - height)
    return left, top, left + width, top + height
