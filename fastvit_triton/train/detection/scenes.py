"""Scenes composed of real digits, with boxes: a data set for detectors that needs no download.

A scene is a black canvas with one to three handwritten digits of scikit-learn at random sizes and places, and faint
noise. The box of a digit is that of its ink. Test scenes consist of digits that no training scene contains.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data import digits
from ..ranges import NonNegative, PositiveInt, Seed, checked
from .boxes import from_corners, intersection_over_union

CLASSES = tuple("0123456789")
INK = 0.2  # least value of a pixel of a digit
OVERLAP = 0.1  # largest intersection over union of two boxes
TRIES = 10  # places that are drawn for a digit before it is left out


@checked
def scenes(
    split: str,
    count: PositiveInt,
    seed: Seed = 0,
    *,
    side: PositiveInt = 32,
    sizes: tuple[PositiveInt, PositiveInt] = (8, 14),
    most: PositiveInt = 3,
    noise: NonNegative = 0.05,
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Composes scenes."""
    low, high = sizes
    if not low <= high <= side:
        raise ValueError(f"sizes is {sizes}, and the canvas has a side of {side}; use least, largest up to {side}")
    generator = torch.Generator().manual_seed(seed)
    images, numbers = digits(split)

    def draw(below: int) -> int:
        return int(torch.randint(below, (), generator=generator))

    canvas = torch.zeros(count, 1, side, side)
    targets = []
    for scene in canvas[:, 0]:
        boxes: list[Tensor] = []
        labels = []
        for _ in range(1 + draw(most)):
            chosen = draw(len(images))
            size = low + draw(high - low + 1)
            digit = F.interpolate(images[chosen][None], (size, size), mode="bilinear", align_corners=False)[0, 0]
            for _ in range(TRIES):
                top = draw(side - size + 1)
                left = draw(side - size + 1)
                box = _ink(digit) + torch.tensor([left, top, left, top])
                if not boxes or intersection_over_union(box, torch.stack(boxes)).max() < OVERLAP:
                    part = scene[top : top + size, left : left + size]
                    part.copy_(torch.maximum(part, digit))
                    boxes.append(box)
                    labels.append(int(numbers[chosen]))
                    break
        targets.append(dict(labels=torch.tensor(labels), boxes=from_corners(torch.stack(boxes)) / side))
    return canvas + noise * torch.randn(canvas.shape, generator=generator), targets


def _ink(digit: Tensor) -> Tensor:
    """Corners of the box around the pixels that are brighter than `INK`."""
    rows = (digit > INK).any(1).nonzero()
    columns = (digit > INK).any(0).nonzero()
    return torch.stack((columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)).flatten().float()
