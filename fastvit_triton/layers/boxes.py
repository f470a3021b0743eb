"""Boxes of tokens from another image (MixToken; LV-ViT, arXiv:2104.10858, section 3.2)."""

import math

import torch
from torch import Tensor


def draw_box(grid: tuple[int, int]) -> tuple[int, int, int, int]:
    """A random box (top, bottom, left, right) of a uniform fraction of the grid before it is cut at the border."""
    side = math.sqrt(1 - torch.rand(()).item())  # 1 − λ with λ ~ Beta(1, 1)
    found: list[int] = []
    for n in grid:
        half, centre = int(n * side) // 2, int(torch.randint(n, ()))
        found += [max(centre - half, 0), min(centre + half, n)]
    return found[0], found[1], found[2], found[3]


def mix_box(tokens: Tensor, box: tuple[int, int, int, int], grid: tuple[int, int]) -> Tensor:
    """Tokens [B, N, D], those in the box from the reversed batch; the same again takes them back."""
    top, bottom, left, right = box
    inside = torch.zeros(grid, dtype=torch.bool, device=tokens.device)
    inside[top:bottom, left:right] = True
    return torch.where(inside.flatten()[:, None], tokens.flip(0), tokens)
