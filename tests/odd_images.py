"""One picture in the formats of other people's files: turned, 16 bits, transparent, with a palette, for printing …"""

from pathlib import Path

import numpy as np
from PIL import Image

TURNED = {  # EXIF orientation → what a camera stores, from an upright picture [h, w, C]
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, 1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a, -1),
}


def odd_images(folder: Path) -> dict[Path, np.ndarray | None]:
    """Writes the files; returns what each shows, [28, 40] or [28, 40, 3], None where it is stored with losses.

    The picture has few colours and no symmetry.
    """
    folder.mkdir()
    levels = np.random.default_rng(1).integers(0, 8, (7, 10, 3)) * 36
    picture = levels.astype(np.uint8).repeat(4, 0).repeat(4, 1)
    grey = np.asarray(Image.fromarray(picture).convert("L"))
    clear = np.where((np.arange(40) < 20)[None, :, None], 255, picture).astype(np.uint8)  # its left half on white
    shown: dict[Path, np.ndarray | None] = {}

    def save(name: str, image: Image.Image, what: np.ndarray | None, **options: object) -> None:
        image.save(folder / name, **options)
        shown[folder / name] = what

    rgb = Image.fromarray(picture)
    for orientation, turn in TURNED.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        stored = Image.fromarray(np.ascontiguousarray(turn(picture)))
        save(f"turned{orientation}.png", stored, picture, exif=exif)
        save(f"turned{orientation}.jpg", stored, None, exif=exif)
    alpha = np.dstack([picture, np.where(np.arange(40) < 20, 0, 255)[None].repeat(28, 0)]).astype(np.uint8)
    colours = rgb.quantize(255)
    save("plain.png", rgb, picture)
    save("bitmap.bmp", rgb, picture)
    save("sixteen.png", Image.fromarray(grey.astype(np.uint16) * 257), grey)
    save("sixteen.tif", Image.fromarray(grey.astype(np.uint16) * 257), grey)
    save("alpha.png", Image.fromarray(alpha), clear)
    save("alpha.webp", Image.fromarray(alpha), clear, lossless=True, exact=True)
    save("grey_alpha.png", Image.fromarray(np.dstack([grey, alpha[..., 3]])), np.where(np.arange(40) < 20, 255, grey))
    save("palette.png", colours, np.asarray(colours.convert("RGB")))
    save("clear.gif", colours, None, transparency=colours.getpixel((0, 0)))
    save("print.tif", rgb.convert("CMYK"), picture)
    save("print.jpg", rgb.convert("CMYK"), None)
    save("grey.jpg", Image.fromarray(grey), None)
    save("black_and_white.png", Image.fromarray(grey > 127), np.where(grey > 127, 255, 0).astype(np.uint8))
    return shown
