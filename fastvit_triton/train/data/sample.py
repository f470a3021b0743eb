"""A small folder of pictures to try commands on: fruit on tables, drawn here, so nothing is downloaded.

A fruit is a list of balls, of which each pixel shows the nearest; a curve of many balls is a smooth surface. Classes
share colours (bananas, lemons and pears are yellow; apples, grapes and pears green), so shapes have to be learnt.
"""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter

from ...files import replacing
from ..ranges import PositiveInt, Seed, checked

Array = np.ndarray
WIDTH, HEIGHT = 160, 120  # of a picture, in pixels
SCALE = 2  # pictures are drawn larger by this factor, and made smaller, which smooths edges
BROWN, LEAF = (96, 66, 40), (70, 125, 50)
YELLOW, GREEN, RED, PURPLE = (236, 196, 52), (140, 178, 62), (186, 36, 40), (92, 40, 92)
TABLES = (
    (150, 104, 66),
    (206, 190, 164),
    (96, 116, 134),
    (224, 224, 218),
    (70, 60, 56),
    (168, 70, 62),
    (120, 146, 120),
)


def chain(points: Array, radii: Array | float, colour: tuple, z: float = 0.0) -> Array:
    """Balls [K, 7] (x, y, z, radius, red, green, blue) along a curve of points [K, 2]; sizes in units of a fruit."""
    columns = np.broadcast_to(np.array(colour, float), (len(points), 3))
    return np.column_stack([points, np.full(len(points), z), np.broadcast_to(radii, len(points)), columns])


def bend(start: tuple, end: tuple, by: float, count: int = 60) -> Array:
    """Points [K, 2] of a curve between two points, whose middle lies `by` to the right."""
    t = np.linspace(0, 1, count)[:, None]
    return (1 - t) * np.array(start) + t * np.array(end) + 4 * by * t * (1 - t) * np.array([1.0, 0.0])


def stem(random: np.random.Generator, start: tuple, end: tuple, colour: tuple = BROWN, width: float = 0.05) -> Array:
    """Balls of a stem."""
    return chain(bend(start, end, random.uniform(-0.1, 0.1)), width, colour)


def leaf(random: np.random.Generator, start: tuple) -> Array:
    """Balls of a leaf."""
    end = start[0] + random.uniform(0.4, 0.6), start[1] - random.uniform(0.0, 0.25)
    t = np.linspace(0, 1, 20)
    return chain(bend(start, end, 0.05, len(t)), 0.02 + 0.13 * np.sin(np.pi * t), LEAF)


def apple(random: np.random.Generator) -> Array:
    """Balls of an apple: a ring, so that it has a hollow above and below."""
    angle = np.linspace(0, 2 * np.pi, 40)
    body = np.column_stack([0.13 * np.cos(angle), 0.08 * np.sin(angle)])
    parts = [chain(body, 0.64, mixed(random, RED, RED, YELLOW, GREEN))]
    parts += [stem(random, (0, -0.5), (0.08, -0.95))] + [leaf(random, (0.02, -0.75))] * (random.random() < 0.5)
    return np.concatenate(parts)


def banana(random: np.random.Generator) -> Array:
    """Balls of a banana: an arc."""
    t = np.linspace(-1, 1, 60)
    arc = np.column_stack([0.95 * np.sin(1.1 * t), 0.9 * (1 - np.cos(1.1 * t)) - 0.25])
    body = chain(arc, 0.05 + 0.2 * (1 - np.abs(t) ** 2.5), mixed(random, YELLOW, YELLOW, GREEN))
    body[np.abs(t) > 0.94, 4:] = BROWN
    return body


def cherries(random: np.random.Generator) -> Array:
    """Balls of two cherries with their stems."""
    colour, top = mixed(random, RED, RED, PURPLE), (random.uniform(-0.1, 0.3), -0.95)
    parts = []
    for x, y in ((-0.42, 0.4), (0.42, 0.5)):
        x, y = x + random.uniform(-0.08, 0.08), y + random.uniform(-0.12, 0.12)
        parts += [chain(np.array([[x, y]]), 0.38, colour), stem(random, (x, y - 0.3), top, LEAF, 0.035)]
    return np.concatenate(parts + [leaf(random, top)] * (random.random() < 0.5))


def grapes(random: np.random.Generator) -> Array:
    """Balls of a bunch of grapes."""
    rows = [
        (column - (count - 1) / 2, row) for row, count in enumerate((3, 4, 5, 4, 3, 2, 1)) for column in range(count)
    ]
    points = np.array(rows) * (0.27, 0.23) + (0, -0.6) + random.uniform(-0.05, 0.05, (len(rows), 2))
    colour = mixed(random, PURPLE, PURPLE, GREEN)
    parts = [chain(point[None], 0.2, colour, random.uniform(-0.1, 0.2)) for point in points]
    return np.concatenate([*parts, stem(random, (0, -0.7), (0.1, -1.05))])


def lemon(random: np.random.Generator) -> Array:
    """Balls of a lemon: an ellipse with a tip at either end."""
    t, colour = np.linspace(-1, 1, 50), mixed(random, *[YELLOW] * 3, GREEN)
    body = chain(np.column_stack([0.52 * t, 0 * t]), 0.56 * np.sqrt(1 - t * t) + 0.02, colour)
    tips = [
        chain(bend((side * 0.6, 0), (side * 0.86, 0), 0, 12), np.linspace(0.24, 0.07, 12), colour) for side in (-1, 1)
    ]
    return np.concatenate([body, *tips])


def pear(random: np.random.Generator) -> Array:
    """Balls of a pear: wide below, narrow above."""
    t = np.linspace(0, 1, 40)
    smooth = t * t * (3 - 2 * t)
    body = chain(np.column_stack([0 * t, 0.4 - 0.95 * t]), 0.56 - 0.31 * smooth, mixed(random, GREEN, YELLOW, GREEN))
    parts = [body, stem(random, (0, -0.7), (0.1, -1.1))] + [leaf(random, (0.03, -0.85))] * (random.random() < 0.3)
    return np.concatenate(parts)


CLASSES: dict[str, Callable[[np.random.Generator], Array]] = {
    "apple": apple,
    "banana": banana,
    "cherries": cherries,
    "grapes": grapes,
    "lemon": lemon,
    "pear": pear,
}


def mixed(random: np.random.Generator, *colours: tuple) -> tuple:
    """A colour near one of these."""
    first, second = random.permutation(len(colours))[:2]
    share = random.uniform(0, 0.25)
    colour = (1 - share) * np.array(colours[first]) + share * np.array(colours[second])
    return tuple(np.clip(colour + random.normal(0, 8, 3), 0, 255))


def picture(name: str, random: np.random.Generator) -> Image.Image:
    """A picture of a fruit of this class on a table, [HEIGHT, WIDTH] pixels in RGB."""
    height, width = HEIGHT * SCALE, WIDTH * SCALE
    balls = CLASSES[name](random)
    size = random.uniform(0.28, 0.44) * height
    angle = random.uniform(0, 2 * np.pi) if name in ("banana", "lemon") else random.normal(0, 0.3)
    turned = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    x, y = random.uniform(0.35, 0.65, 2) * (width, height)
    balls[:, :2] = balls[:, :2] @ turned * size + (x, y)
    balls[:, 2:4] *= size
    light = np.array([random.uniform(-0.6, 0.6), random.uniform(-0.9, -0.3), 1.0])
    colours, mask = render(balls, light / np.linalg.norm(light), height, width)
    shadow = Image.fromarray(np.uint8(255 * mask)).filter(ImageFilter.GaussianBlur(size / 8))
    shift = np.round(-0.25 * size * light[:2]).astype(int)[::-1]
    dark = np.roll(np.asarray(shadow) / 255, shift, (0, 1))
    pixels = np.where(mask[..., None], colours, table(random, height, width) * (1 - 0.55 * dark[..., None]))
    pixels = pixels * random.uniform(0.75, 1.15) * random.uniform(0.93, 1.07, 3)
    small = pixels.reshape(HEIGHT, SCALE, WIDTH, SCALE, 3).mean((1, 3))
    return Image.fromarray(np.uint8(np.clip(small + random.normal(0, 3, small.shape), 0, 255)))


def render(balls: Array, light: Array, height: int, width: int) -> tuple[Array, Array]:
    """Colours [H, W, 3] of balls [K, 7] in pixels, lit from a direction [3], and where there are any [H, W]."""
    depth, owner = np.full((height, width), -np.inf), np.zeros((height, width), int)
    rows, columns = np.ogrid[:height, :width]
    for i, (x, y, z, radius) in enumerate(balls[:, :4]):
        down, across = (slice(max(0, int(at - radius)), max(0, int(at + radius) + 2)) for at in (y, x))
        squared = radius**2 - (columns[:, across] - x) ** 2 - (rows[down] - y) ** 2
        ahead = np.where(squared > 0, z + np.sqrt(np.clip(squared, 0, None)), -np.inf)
        seen = ahead > depth[down, across]
        depth[down, across][seen] = ahead[seen]
        owner[down, across][seen] = i
    mask = np.isfinite(depth)
    x, y, z, radius, *colours = balls[owner[mask]].T
    down, across = mask.nonzero()
    normal = np.stack([across - x, down - y, depth[mask] - z], -1) / radius[:, None]
    half = light + np.array([0, 0, 1])
    shade, gloss = (np.clip(normal @ (to / np.linalg.norm(to)), 0, None)[:, None] for to in (light, half))
    shown = np.zeros((height, width, 3))
    shown[mask] = (0.4 + 0.65 * shade) * np.stack(colours, -1) + 110 * gloss**40
    return shown, mask


def table(random: np.random.Generator, height: int, width: int) -> Array:
    """Colours [H, W, 3] of a table: plain, striped or checked, with grain, lighter at one side."""
    rows, columns = np.mgrid[:height, :width] / height
    colour = np.array(TABLES[random.integers(len(TABLES))]) + random.normal(0, 10, 3)
    angle, period = random.uniform(0, np.pi), random.uniform(0.1, 0.4)
    waves = [np.sin(2 * np.pi * (columns * np.cos(a) + rows * np.sin(a)) / period) for a in (angle, angle + np.pi / 2)]
    pattern = (0.0, np.sign(waves[0]), np.sign(waves[0]) + np.sign(waves[1]))[random.integers(3)]
    grain = np.asarray(Image.fromarray(random.normal(0, 1, (height // 4, 4)).astype("f")).resize((width, height)))
    side = random.normal(0, 0.12, 2)
    light = 1 + 0.07 * pattern + 0.05 * grain + side[0] * (columns - 0.5) + side[1] * (rows - 0.5)
    return colour * np.asarray(light)[..., None]


@checked
def sample_pictures(folder: str | os.PathLike, per_class: PositiveInt = 40, seed: Seed = 0) -> Path:
    """Writes a folder of drawn pictures of fruit, for `fastvit-triton train --data FOLDER --val-split 0.2`.

    The classes are apple, banana, cherries, grapes, lemon and pear: `folder/<class>/<number>.jpg`, of 160 × 120 pixels.

    Args:
        folder: to be created; it may exist if it is empty.
        per_class: pictures of each class.
        seed: of all random numbers; the first pictures are the same for any `per_class`.

    Returns:
        The folder.

    Raises:
        ValueError: there is something in the folder.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"folder {folder} exists and is not empty; give the name of a new one")
    for number, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True, exist_ok=True)
        random = np.random.default_rng([seed, number])
        for i in range(per_class):
            with replacing(folder / name / f"{i:02d}.jpg") as temporary:
                picture(name, random).save(temporary, format="JPEG", quality=92)
    return folder
