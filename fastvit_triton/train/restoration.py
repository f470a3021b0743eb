"""Restoration of images: degraded copies to learn from, and how near a restored image is. Pixels are 0 … 255."""

import re

import torch
import torch.nn.functional as F
from torch import Tensor

NOISE = re.compile(r"denoise(\d+)")
SCALE = re.compile(r"x([234])")


def degrade(images: Tensor, task: str, generator: torch.Generator | None = None) -> Tensor:
    """What a model of a task has to restore.

    Args:
        images: [B, C, H, W].
        task: "x2", "x3" or "x4": reduced by bicubic interpolation with antialiasing, rounded; "denoise30": with normal
            noise of that standard deviation, neither rounded nor clipped (IPT, section 4.1).
        generator: of the noise.

    Returns:
        [B, C, H, W], or smaller by the scale.

    Raises:
        ValueError: the task is another one, or the scale does not divide the sides.
    """
    if found := NOISE.fullmatch(task):
        noise = torch.randn(images.shape, generator=generator, device=images.device, dtype=images.dtype)
        return images + float(found[1]) * noise
    if not (found := SCALE.fullmatch(task)):
        raise ValueError(f"task is {task!r}; images are degraded for x2, x3, x4 and denoise with a number")
    scale = int(found[1])
    height, width = images.shape[2:]
    if height % scale or width % scale:
        raise ValueError(f"images have {height}x{width} pixels, which {scale} does not divide; crop them")
    size = (height // scale, width // scale)
    small = F.interpolate(images, size=size, mode="bicubic", align_corners=False, antialias=True)
    return small.round().clamp(0, 255)


def psnr(images: Tensor, targets: Tensor, peak: float = 255.0) -> Tensor:
    """Peak signal-to-noise ratio of each image in dB, 10 log₁₀(peak² / mean squared error); equal ones have inf.

    Args:
        images, targets: [B, C, H, W].
        peak: largest value of a pixel.

    Returns:
        [B].
    """
    return 10 * torch.log10(peak**2 / (images - targets).square().flatten(1).mean(1))


def ssim(images: Tensor, targets: Tensor, peak: float = 255.0) -> Tensor:
    """Structural similarity of each image (Wang et al., IEEE TIP 2004, equation 13), a mean over windows and channels.

    Windows of 11 x 11 pixels have normal weights of standard deviation 1.5 and lie within the image.

    Args:
        images, targets: [B, C, H, W], at least 11 pixels a side.
        peak: largest value of a pixel.

    Returns:
        [B].

    Raises:
        ValueError: the images are smaller than a window.
    """
    if min(images.shape[2:]) < 11:
        raise ValueError(f"images have {images.shape[2]}x{images.shape[3]} pixels; SSIM needs at least 11 a side")
    at = torch.arange(-5, 6, device=images.device, dtype=images.dtype)
    line = (-at.square() / (2 * 1.5**2)).exp()
    line = line / line.sum()

    def local(x: Tensor) -> Tensor:  # weighted means of all windows
        x = x.flatten(0, 1)[:, None]
        return F.conv2d(F.conv2d(x, line.view(1, 1, 11, 1)), line.view(1, 1, 1, 11)).unflatten(0, images.shape[:2])

    x = images
    y = targets
    mx = local(x)
    my = local(y)
    vx = local(x * x) - mx * mx
    vy = local(y * y) - my * my
    both = local(x * y) - mx * my
    c1 = (0.01 * peak) ** 2
    c2 = (0.03 * peak) ** 2
    found = (2 * mx * my + c1) * (2 * both + c2) / ((mx * mx + my * my + c1) * (vx + vy + c2))
    return found.flatten(1).mean(1)
