"""Restoration of images: degraded copies to learn from, and how near a restored image is. Pixels are 0 … 255."""

import math
import re

import torch
import torch.nn.functional as F
from torch import Tensor

NOISE = re.compile(r"denoise(\d+)")
SCALE = re.compile(r"x([234])")


def degrade(images: Tensor, task: str, generator: torch.Generator | None = None) -> Tensor:
    """What a model of a task has to restore."""
    if match := NOISE.fullmatch(task):
        noise = torch.randn(images.shape, generator=generator, device=images.device, dtype=images.dtype)
        return images + float(match[1]) * noise
    if task == "derain":
        return add_rain(images, generator)
    if not (match := SCALE.fullmatch(task)):
        raise ValueError(f"task is {task!r}; images are degraded for x2, x3, x4, derain and denoise with a number")
    scale = int(match[1])
    height, width = images.shape[2:]
    if height % scale or width % scale:
        raise ValueError(f"images have {height}x{width} pixels, which {scale} does not divide; crop them")
    size = (height // scale, width // scale)
    small = F.interpolate(images, size=size, mode="bicubic", align_corners=False, antialias=True)
    return small.round().clamp(0, 255)


def add_rain(
    images: Tensor, generator: torch.Generator | None = None, drops: float = 0.004, length: int = 15
) -> Tensor:
    """Images with streaks of rain of one direction each, whose light is added: y = min(x + streaks, 255).

    This imitates the light synthetic rain of Rain100L (Yang et al., CVPR 2017), on which IPT is evaluated. It is not
    that data set: the equation is the simplest of that kind, and results are not comparable with published ones.
    """
    if not 0 <= drops <= 1 or length < 1 or length % 2 == 0:
        raise ValueError(f"drops is {drops} and length {length}; use a share from 0 to 1, and an odd number of pixels")
    B, _, H, W = images.shape

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=images.device, dtype=images.dtype)

    angles = math.pi / 6 * (2 * uniform(B) - 1)  # from the vertical, at most 30 degrees
    brightness = 60 + 80 * uniform(B, H, W)  # of a streak's middle line
    seeds = torch.where(uniform(B, H, W) < drops, brightness, 0)
    at = torch.arange(length, device=images.device, dtype=images.dtype) - length // 2
    down, across = at.view(1, -1, 1), at.view(1, 1, -1)
    distance = (across * angles.cos().view(-1, 1, 1) - down * angles.sin().view(-1, 1, 1)).abs()
    inside = (across * angles.sin().view(-1, 1, 1) + down * angles.cos().view(-1, 1, 1)).abs() <= length / 2
    streaks = (1 - distance).clamp_min(0) * inside  # a line one pixel wide, [B, length, length]
    rain = F.conv2d(seeds[None], streaks[:, None], padding=length // 2, groups=B)[0]
    return (images + rain[:, None]).round().clamp(0, 255)


def psnr(images: Tensor, targets: Tensor, peak: float = 255.0) -> Tensor:
    """Peak signal-to-noise ratio of each image in dB, 10 log₁₀(peak² / mean squared error); equal ones have inf."""
    return 10 * torch.log10(peak**2 / (images - targets).square().flatten(1).mean(1))


def ssim(images: Tensor, targets: Tensor, peak: float = 255.0) -> Tensor:
    """Structural similarity of each image (Wang et al., IEEE TIP 2004, equation 13), a mean over windows and channels.

    Windows of 11 x 11 pixels have normal weights of standard deviation 1.5 and lie within the image.
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
    similarity = (2 * mx * my + c1) * (2 * both + c2) / ((mx * mx + my * my + c1) * (vx + vy + c2))
    return similarity.flatten(1).mean(1)
