"""Augmentation of whole batches: affine maps and random erasing, drawn from PyTorch's global generator."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ranges import Degrees, FractionAbove0, FractionBelow1, NonNegative, Probability, checked


@checked
def random_affine(
    images: Tensor,
    degrees: Degrees = 0.0,
    zoom: FractionBelow1 = 0.0,
    shear: Probability = 0.0,
    shift: NonNegative = 0.0,
) -> Tensor:
    """Rotates, zooms, shears and shifts each image by independent random amounts, in one `grid_sample`.

    Pixels from outside the image are 0, so call this before normalisation, on images with background 0.

        x' = R(a) · H · Z · x + t,   a, zoom, shear, t uniform in ± their limits

    Args:
        images: [B, C, H, W].
        degrees: largest rotation, in degrees.
        zoom: largest relative change of size, drawn independently for width and height.
        shear: largest horizontal shear, as a fraction of the height.
        shift: largest shift, in pixels.

    Returns:
        [B, C, H, W], resampled bilinearly.
    """
    batch, _, height, width = images.shape
    uniform = torch.rand(6, batch) * 2 - 1  # [6, B]
    angle = uniform[0] * (degrees * torch.pi / 180)
    zoom_x = 1 + uniform[1] * zoom
    zoom_y = 1 + uniform[2] * zoom
    slant = uniform[3] * shear
    # affine_grid coordinates span [-1, 1]: one pixel is 2 / side.
    move_x = uniform[4] * shift * 2 / width
    move_y = uniform[5] * shift * 2 / height
    cos = angle.cos()
    sin = angle.sin()
    theta = torch.stack(
        [cos * zoom_x, (cos * slant - sin) * zoom_y, move_x, sin * zoom_x, (sin * slant + cos) * zoom_y, move_y], dim=1
    ).view(batch, 2, 3)
    grid = F.affine_grid(theta.to(images), list(images.shape), align_corners=False)  # [B, H, W, 2]
    return F.grid_sample(images, grid, align_corners=False)


@checked
def random_erasing(
    images: Tensor,
    probability: Probability = 0.25,
    min_area: FractionAbove0 = 0.02,
    max_area: FractionAbove0 = 1 / 3,
    min_aspect: FractionAbove0 = 0.3,
) -> Tensor:
    """Fills a random box of some images with noise (Zhong et al., arXiv:1708.04896, algorithm 1).

    The defaults are DeiT's: timm's RandomErasing, mode "pixel", N(0, 1) per pixel; call it after normalisation. The
    area is uniform, the aspect ratio log-uniform; up to ten boxes are drawn until one fits.

    Args:
        images: [B, C, H, W], normalised; not modified.
        probability: probability of erasing, per image.
        min_area: smallest area, as a fraction of the image.
        max_area: largest area, as a fraction of the image.
        min_aspect: smallest height / width; the largest is its inverse.

    Returns:
        [B, C, H, W].
    """
    channels, height, width = images.shape[1:]
    images, chosen = images.clone(), torch.rand(images.shape[0]) < probability
    for i in chosen.nonzero().flatten().tolist():
        for fraction, stretch, y, x in torch.rand(10, 4).tolist():
            area = (min_area + (max_area - min_area) * fraction) * height * width
            aspect = min_aspect ** (1 - 2 * stretch)
            h = round(math.sqrt(area * aspect))
            w = round(math.sqrt(area / aspect))
            if h < height and w < width:
                top = int(y * (height - h + 1))
                left = int(x * (width - w + 1))
                noise = torch.randn(channels, h, w, dtype=images.dtype, device=images.device)
                images[i, :, top : top + h, left : left + w] = noise
                break
    return images
