"""Pictures of coloured shapes, with boxes: a data set for detectors in colour that needs no download.

A picture has one to five circles, squares and triangles, red or blue, of random sizes, places, turns and shades, on a
background of a few random colours that flow into each other, with noise. A class is a colour and a shape. The box of a
shape is the smallest around it; shapes may cover each other a little, and the later one is in front.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ranges import NonNegative, PositiveInt, Seed, checked
from .boxes import from_corners, intersection_over_union

COLOURS = {"red": 0, "blue": 2}  # the channel that is bright
EDGES = {"circle": 0, "square": 4, "triangle": 3}
CLASSES = tuple(f"{colour} {shape}" for colour in COLOURS for shape in EDGES)
KINDS = tuple((bright, edges) for bright in COLOURS.values() for edges in EDGES.values())  # in the same order
RADII = (0.08, 0.2)  # of the circle around a shape, in fractions of the side
BRIGHT, DARK, GROUND = (0.65, 1.0), (0.0, 0.4), (0.1, 0.9)  # values of channels: of a shape, and of the background
OVERLAP = 0.1  # largest intersection over union of two boxes
TRIES = 10  # places that are drawn for a shape before it is left out


@checked
def shapes(
    count: PositiveInt, seed: Seed = 0, *, side: PositiveInt = 192, most: PositiveInt = 5, noise: NonNegative = 0.05
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Draws pictures. Others with another seed; the same with the same, whatever their number."""
    if side < 16:
        raise ValueError(f"side is {side}; shapes need a side of at least 16 pixels")
    generator = torch.Generator().manual_seed(seed)
    images = torch.empty(count, 3, side, side, dtype=torch.uint8)
    targets = []
    for image in images:
        ground = _between(GROUND, torch.rand(1, 3, 3, 3, generator=generator))
        canvas = F.interpolate(ground, (side, side), mode="bilinear", align_corners=True)[0]
        boxes: list[Tensor] = []
        labels = []
        for _ in range(1 + int(torch.randint(most, (), generator=generator))):
            label = int(torch.randint(len(CLASSES), (), generator=generator))
            size, turn, *colour = torch.rand(5, generator=generator).tolist()
            radius = side * _between(RADII, size)
            bright, edges = KINDS[label]
            values = [_between(BRIGHT if i == bright else DARK, share) for i, share in enumerate(colour)]
            for place in torch.rand(TRIES, 2, generator=generator):
                centre = radius + place * (side - 2 * radius)
                box = _box(edges, centre, radius, turn)
                if not boxes or intersection_over_union(box, torch.stack(boxes)).max() < OVERLAP:
                    _draw(canvas, edges, centre, radius, turn, torch.tensor(values))
                    boxes.append(box)
                    labels.append(label)
                    break
        canvas += noise * torch.randn(canvas.shape, generator=generator)
        image.copy_((255 * canvas).round_().clamp_(0, 255))
        targets.append(dict(labels=torch.tensor(labels), boxes=from_corners(torch.stack(boxes)) / side))
    return images, targets


def _between(limits: tuple[float, float], share):
    """The value at a share of the way from the lower limit to the upper one."""
    return limits[0] + (limits[1] - limits[0]) * share


def _directions(edges: int, turn: float) -> Tensor:
    """Unit vectors (x, y) [K, 2] to the corners of a regular polygon; those to its edges have a half step more."""
    angles = (torch.arange(edges) + turn) * (2 * math.pi / edges)
    return torch.stack((angles.cos(), angles.sin()), 1)


def _box(edges: int, centre: Tensor, radius: float, turn: float) -> Tensor:
    """Corners of the smallest box around a shape, in pixels."""
    if edges:
        corners = centre + radius * _directions(edges, turn)
        return torch.cat((corners.amin(0), corners.amax(0)))
    return torch.cat((centre - radius, centre + radius))


def _draw(canvas: Tensor, edges: int, centre: Tensor, radius: float, turn: float, colour: Tensor) -> None:
    """Draws a shape on [3, S, S]; a pixel that its edge crosses is mixed by the distance of its centre to the edge."""
    low = (centre - radius - 1).floor().clamp(min=0).int().tolist()
    high = (centre + radius + 2).int().tolist()
    part = canvas[:, low[1] : high[1], low[0] : high[0]]
    y, x = (torch.arange(start, start + size) + 0.5 for start, size in zip(low[::-1], part.shape[1:], strict=True))
    place = torch.stack((x.expand(len(y), -1), y[:, None].expand(-1, len(x))), -1) - centre
    if edges:
        normals = _directions(edges, turn + 0.5)
        outside = (place @ normals.T).amax(-1) - radius * math.cos(math.pi / edges)
    else:
        outside = place.norm(dim=-1) - radius
    part.lerp_(colour[:, None, None].expand_as(part), (0.5 - outside).clamp(0, 1).expand_as(part))
