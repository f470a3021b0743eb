"""Random changes of a whole batch that leave its meaning alone. Randomness comes from PyTorch's global generator."""

import torch
import torch.nn.functional as F
from torch import Tensor


def random_affine(
    images: Tensor, degrees: float = 0.0, zoom: float = 0.0, shear: float = 0.0, shift: float = 0.0
) -> Tensor:
    """Rotates, zooms, shears and shifts each image by its own random amount, in one `grid_sample`.

    A small data set runs out of poses long before the model runs out of capacity. Pixels from outside the image are
    zero, so call this before normalisation, on images whose background is zero. Refuses nothing.

        x' = R(a) · Z · H · x + t,   a, zoom, shear, t uniform in ± their limit

    Args:
        images: [B, C, H, W].
        degrees: largest rotation, in degrees.
        zoom: largest relative change of width and of height, drawn apart.
        shear: largest horizontal shear, in heights.
        shift: largest shift, in pixels.

    Returns:
        [B, C, H, W], resampled bilinearly.
    """
    batch, _, height, width = images.shape
    uniform = torch.rand(6, batch) * 2 - 1  # [6, B]
    angle = uniform[0] * (degrees * torch.pi / 180)
    zoom_x, zoom_y, slant = 1 + uniform[1] * zoom, 1 + uniform[2] * zoom, uniform[3] * shear
    # affine_grid counts in half images: one pixel is 2 / side.
    move_x, move_y = uniform[4] * shift * 2 / width, uniform[5] * shift * 2 / height
    cos, sin = angle.cos(), angle.sin()
    theta = torch.stack(
        [cos * zoom_x, (cos * slant - sin) * zoom_y, move_x, sin * zoom_x, (sin * slant + cos) * zoom_y, move_y], dim=1
    ).view(batch, 2, 3)
    grid = F.affine_grid(theta.to(images), images.shape, align_corners=False)  # [B, H, W, 2]
    return F.grid_sample(images, grid, align_corners=False)
