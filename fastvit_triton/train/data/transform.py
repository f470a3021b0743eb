"""Decodes image files and transforms them to model input: crop, resize, augment, normalise."""

import os
import re
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple, cast

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, TiffImagePlugin, WebPImagePlugin  # noqa: F401  (the plugins register their formats)
from torch import Tensor

from ..augment.policy import Policy
from ..ranges import FractionAbove0, ImageSide, NonNegativeInt, Positive, Probability, check_fields, checked

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # of these suffixes; Pillow reads MPO as JPEG
MAX_PIXELS = 2**26  # 8192 x 8192
ORIENTATION = 0x0112  # the tag of EXIF

Source = str | os.PathLike | BinaryIO | Image.Image  # what `read_image` decodes

# Exceptions that Pillow raises on a file that is not an image or is damaged.
DECODE_ERRORS = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)


class TooLarge(ValueError):
    """An image has more pixels than may be decoded."""


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
        levels: value of white in images of more than 8 bits, for `read_image`; None takes the usual range.
    """

    size: tuple[ImageSide, ImageSide]
    mean: tuple[Probability, ...]
    std: tuple[FractionAbove0, ...]
    crop: FractionAbove0 = 1.0
    crop_mode: Literal["box", "center", "squash", "border"] = "box"
    interpolation: Literal["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"] = "bilinear"
    levels: Annotated[Positive | None, "the usual range"] = None

    def __post_init__(self) -> None:
        check_fields(self)
        for field in ("size", "mean", "std"):
            object.__setattr__(self, field, tuple(getattr(self, field)))
        if len(self.mean) not in (1, 3) or len(self.mean) != len(self.std):
            raise ValueError(f"mean has {len(self.mean)} channels and std {len(self.std)}; images have 1 or 3")

    @checked
    def __call__(
        self,
        image: Source,
        seed: Annotated[NonNegativeInt | None, "the centre crop"] = None,
        min_area: FractionAbove0 = 0.35,
        flip: bool = True,
        policy: Policy | None = None,
    ) -> Tensor:
        """Decodes, crops, resizes, augments and normalises an image of any size."""
        height, width = self.size
        try:
            image = read_image(image, levels=self.levels)
        except DECODE_ERRORS as error:
            raise ValueError(f"{image} cannot be read as an image: {reason_of(error)}") from error
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
        levels = [round(255 * value) if self.crop_mode == "border" else 0 for value in self.mean]
        fill: Any = tuple(levels) if len(levels) > 1 else levels[0]
        missing = max(columns - scaled[0], 0), max(rows - scaled[1], 0)
        if any(missing):
            canvas = Image.new(image.mode, (scaled[0] + missing[0], scaled[1] + missing[1]), fill)
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


def read_image(
    image: Source, max_pixels: int = MAX_PIXELS, levels: Annotated[Positive | None, "a usual range"] = None
) -> Image.Image:
    """Decodes an image: applies the EXIF orientation, converts to 8 bits per channel, puts transparency on white.

    Training, the commands, `transforms` and `predict` decode by this function. What it returned, it leaves unchanged.

    Values of more than 8 bits have one range for all images: 0 to 65535 for 16 bits without a sign (12 bits: 4095), 0
    to 1 for floats. 32 bits, and integers with a sign, have none; `levels` states it. No image is stretched to its own.

    Args:
        image: a path or an open file of one of `FORMATS`, whatever its suffix; or a PIL image, of any size.
        max_pixels: largest image of a file to decode; its size is read from the header.
        levels: value of white in images of more than 8 bits; None takes the usual range.

    Raises:
        One of `DECODE_ERRORS`: the file cannot be decoded, the image is larger, or a value is outside the range.
        TypeError: the image is something else.
    """
    if not isinstance(image, str | os.PathLike | Image.Image) and not hasattr(image, "read"):
        raise TypeError(f"image is of type {type(image).__name__}; give the path of a file, or a PIL image")
    source: Any = image
    if isinstance(image, str | os.PathLike):
        check_regular(Path(image))
        source = open(image, "rb")
    with nullcontext(source) if source is image else source as file:
        with _damaged_tags():
            stored: Any = file if isinstance(file, Image.Image) else _open_image(cast(BinaryIO, file), max_pixels)
            depth = _depth(stored)
            image = _upright(stored)
        if depth is not None and not depth.colour:
            return _eight_bits(image, depth, levels)
        if depth is not None and levels not in (None, depth.white):
            raise ValueError(f"has {depth.kind}, which are read in 0 … {depth.white:g} only; --levels is {levels:g}")
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            background = Image.new("RGBA", image.size, "white")
            background.alpha_composite(image.convert("RGBA"))
            return background.convert("RGB")
        image.load()
        return image


class _Depth(NamedTuple):
    """How a file stores pixels of more than 8 bits, or with a sign."""

    kind: str  # of the numbers
    white: float | None  # the usual value of white; None if there is none
    inverted: bool = False  # 0 is white
    own: bool = False  # the file states its range, by which Pillow has scaled the values
    colour: bool = False  # Pillow keeps the upper 8 of 16 bits
    dtype: Any = None  # of the numbers, where Pillow's array has another one of the same size


def _depth(image: Any) -> _Depth | None:
    """How an image that is not decoded yet stores its pixels; None for 8 bits without a sign."""
    tile: Any = getattr(image, "tile", ())  # an image that was not read from a file has none
    codec, _, _, layout = tile[0] if tile else ("", None, 0, "")
    form, bits, inverted = 1, 16, False
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        form = image.tag_v2.get(TiffImagePlugin.SAMPLEFORMAT, (1,))[0]
        bits = image.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE, (1,))[0]
        inverted = image.tag_v2.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0
    if image.mode == "F":
        return _Depth("floats", 1.0, inverted)
    if form == 2:
        return _Depth(f"{bits}-bit integers with a sign", None, inverted, dtype=np.int8 if bits == 8 else None)
    if image.mode.startswith("I"):
        own = codec.startswith("ppm")
        if bits > 16:
            return _Depth(f"{bits}-bit integers", None, inverted, dtype=np.uint32)
        return _Depth(f"{bits}-bit integers", 2.0**bits - 1, inverted, own)
    return _Depth("16-bit colours", 65535, colour=True) if ";16" in str(layout) else None


def _eight_bits(image: Image.Image, depth: _Depth, levels: float | None) -> Image.Image:
    """The image with 8 bits per channel; ValueError if its range is unknown or a value is outside it."""
    white = depth.white if levels is None or depth.own else levels
    values = np.asarray(image)
    values = (values if depth.dtype is None else values.view(depth.dtype)).astype(np.float64)
    low = values.min()
    high = values.max()
    if not (np.isfinite(low) and np.isfinite(high)):
        raise ValueError("damaged image: it has values that are not finite")
    found = f"has {depth.kind} from {low:.10g} to {high:.10g}"
    if white is None:
        raise ValueError(f"{found}, which have no usual range; pass --levels with the value of white")
    if low < -white / 510 or high > white + white / 510:  # by more than half a level of 8 bits
        advice = "convert negative values" if low < 0 else "pass --levels with the value of white"
        raise ValueError(f"{found}, which are read in 0 … {white:.10g}; {advice}")
    share = values / white
    return Image.fromarray((255 * (1 - share if depth.inverted else share)).round().clip(0, 255).astype(np.uint8))


def save_image(image: Tensor, path: Path, side: int = 128) -> None:
    """Writes an image [C, H, W] in [0, 1] as a PNG, repeating pixels until the height is at least `side`."""
    levels = (image * 255).round().to(torch.uint8).movedim(0, -1).squeeze(-1).numpy()
    repeat = -(-side // levels.shape[0])
    Image.fromarray(levels.repeat(repeat, 0).repeat(repeat, 1)).save(path, format="PNG")


def find_defect(
    path: Path, decode: bool = False, max_pixels: int = MAX_PIXELS, levels: float | None = None
) -> str | None:
    """Checks an image file; returns why it is unusable, in a few words, or None."""
    try:
        read_header(path, max_pixels)
        if decode:
            read_image(path, max_pixels, levels)
    except DECODE_ERRORS as error:
        return reason_of(error)
    return None


class Header(NamedTuple):
    """What the first bytes of an image file say."""

    stored: tuple[int, int]  # (width, height) of the pixels in the file
    orientation: int  # 1 to 8 of EXIF; what turns the stored image upright

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) of the upright image, as `read_image` returns it."""
        return self.stored[::-1] if self.orientation >= 5 else self.stored


def read_header(path: Path, max_pixels: int = MAX_PIXELS) -> Header:
    """Reads the header of an image file, in about 0.1 ms."""
    check_regular(path)
    if path.stat().st_size == 0:
        raise ValueError("empty file")
    with open(path, "rb") as file:
        image = _open_image(file, max_pixels)
        with _damaged_tags():
            # A PNG would be decoded to look for EXIF behind its pixels.
            exif = Image.Image.getexif(image) if image.format == "PNG" else image.getexif()
            orientation = exif.get(ORIENTATION, 1)
            size = image.size
            if isinstance(image, TiffImagePlugin.TiffImageFile):  # of which Pillow may give that of the upright image
                size = image.tag_v2[TiffImagePlugin.IMAGEWIDTH], image.tag_v2[TiffImagePlugin.IMAGELENGTH]
        return Header(size, int(orientation) if orientation in range(1, 9) else 1)


def is_image(path: Path) -> bool:
    """True if the first bytes of a file are those of an image, whatever its name."""
    try:
        read_header(path)
    except TooLarge:
        return True
    except DECODE_ERRORS:
        return False
    return True


def usual_white(path: Path) -> float | None:
    """The value of white in an image file of more than 8 bits, see `read_image`; None for others and without a file."""
    if not path.is_file():
        return None
    with open(path, "rb") as file, _damaged_tags():
        depth = _depth(_open_image(file, MAX_PIXELS))
    return None if depth is None else depth.white


def check_regular(path: Path) -> None:
    """Raises ValueError unless there is a regular file: a named pipe would wait for a writer, a device may not end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("not a regular file")


def reason_of(error: Exception) -> str:
    """Why an image cannot be read, in a few words, from one of `DECODE_ERRORS`."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def join_names(names: list[str], limit: int = 10) -> str:
    """The first `limit` names, comma-separated, then "and … more"."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


@contextmanager
def _damaged_tags() -> Iterator[None]:
    """Converts the errors that Pillow raises at damaged tags to ValueError."""
    try:
        yield
    except (TypeError, LookupError, ArithmeticError, AttributeError) as error:
        raise ValueError(f"damaged image: {error}") from error


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
        raise TooLarge(f"has {pixels:,} pixels, more than --max-pixels {max_pixels:,}")
    if image is None:
        raise Image.UnidentifiedImageError("not an image")
    return image


def _upright(image: Image.Image) -> Image.Image:
    """The image turned as its EXIF orientation says; it is not copied if it has none."""
    image.load()  # a PNG may have its EXIF data after its pixels
    return ImageOps.exif_transpose(image) if image.getexif().get(ExifTags.Base.Orientation, 1) != 1 else image


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
    """(left, top, right, bottom) of a box of random area and position, its aspect within 3:4 … 4:3 of `aspect`."""
    area, stretch, x, y = torch.rand(4, generator=generator).tolist()
    stretch = stretch if min_area < 1 else 0.5  # the largest box of this aspect
    area = (min_area + (1 - min_area) * area) * size[0] * size[1]
    aspect *= (4 / 3) ** (2 * stretch - 1)
    width = min((area * aspect) ** 0.5, size[0])
    height = min((area / aspect) ** 0.5, size[1])
    left = x * (size[0] - width)
    top = y * (size[1] - height)
    return left, top, left + width, top + height
