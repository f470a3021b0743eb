"""Training on blends of two images. Randomness comes from PyTorch's global generator."""

import math

import torch
from torch import Tensor
from torch.distributions import Beta

from .loss import smooth
from .ranges import Count, NotNegative, Number, Positive, Probability, Share, checked

Box = tuple[Number, Number, Number, Number]  # top, bottom, left, right; bottom and right are one past the last


@checked
def mixup(images: Tensor, targets: Tensor, classes: Count, alpha: NotNegative) -> tuple[Tensor, Tensor]:
    """Blends each image, and its label, with another of the batch (Zhang et al., arXiv:1710.09412, section 2).

        λ ~ Beta(alpha, alpha),   x' = λ x + (1 − λ) x[perm],   y' = λ y + (1 − λ) y[perm]

    A model that must answer in proportion cannot memorise. One λ serves the whole batch, as in timm. big_vision takes
    max(λ, 1 − λ), which under a random permutation draws the same blends.

    Args:
        images: [B, C, H, W].
        targets: [B] class numbers.
        classes: number of classes.
        alpha: 0 leaves the images as they are; 1 draws λ uniformly.

    Returns:
        Images [B, C, H, W] and target probabilities [B, classes].
    """
    soft = smooth(targets, classes).to(images.dtype)  # [B, classes]
    if alpha == 0:
        return images, soft
    share = Beta(alpha, alpha).sample().item()
    order = torch.randperm(len(images), device=images.device)
    return images.lerp(images[order], 1 - share), soft.lerp(soft[order], 1 - share)


@checked
def cutmix(images: Tensor, targets: Tensor, classes: Count, alpha: NotNegative) -> tuple[Tensor, Tensor]:
    """Pastes a box of another image of the batch into each (Yun et al., arXiv:1905.04899, equations 1 and 2).

        λ ~ Beta(alpha, alpha),   box of area (1 − λ) H W,   y' = λ' y + (1 − λ') y[perm]

    λ' is the part of the image that is left, counted after the box is clipped at the border.

    Args:
        images: [B, C, H, W].
        targets: [B] class numbers.
        classes: number of classes.
        alpha: 0 leaves the images as they are; 1 draws λ uniformly.

    Returns:
        Images [B, C, H, W] and target probabilities [B, classes].
    """
    soft = smooth(targets, classes).to(images.dtype)  # [B, classes]
    if alpha == 0:
        return images, soft
    size = (images.shape[2], images.shape[3])
    top, bottom, left, right = box = cut_box(size, Beta(alpha, alpha).sample().item())
    order = torch.randperm(len(images), device=images.device)
    images = images.clone()
    images[:, :, top:bottom, left:right] = images[order, :, top:bottom, left:right]
    return images, soft.lerp(soft[order], area(box) / math.prod(size))


@checked
def mixup_or_cutmix(
    images: Tensor,
    targets: Tensor,
    classes: Count,
    *,
    mixup_alpha: NotNegative = 0.8,
    cutmix_alpha: NotNegative = 1.0,
    switch: Probability = 0.5,
    smoothing: Share = 0.1,
) -> tuple[Tensor, Tensor]:
    """One of the two for each batch, with smoothed labels: the DeiT recipe (arXiv:2012.12877, table 9).

    Args:
        images: [B, C, H, W].
        targets: [B] class numbers.
        classes: number of classes.
        mixup_alpha: 0 never blends.
        cutmix_alpha: 0 never pastes.
        switch: probability of pasting where both are on.
        smoothing: probability spread evenly over all classes.

    Returns:
        Images [B, C, H, W] and target probabilities [B, classes].
    """
    if mixup_alpha and cutmix_alpha:
        paste = torch.rand(()).item() < switch
    else:
        paste = cutmix_alpha > 0
    images, soft = (cutmix if paste else mixup)(images, targets, classes, cutmix_alpha if paste else mixup_alpha)
    return images, smooth(soft, classes, smoothing)


@checked
def mixtoken(
    images: Tensor, targets: Tensor, classes: Count, alpha: Positive, patch_size: tuple[Count, Count]
) -> tuple[Tensor, Tensor]:
    """MixToken on pixels: a box of whole patches from the batch in reverse order (Jiang et al., arXiv:2104.10858).

    Where each token is projected from its own patch alone, which excludes overlapping and convolutional stems, this is
    `mix_tokens` between projection and positions, and needs nothing of the model.

    Args:
        images: [B, C, H, W], H and W divisible by the patch.
        targets: [B] class numbers.
        classes: number of classes.
        alpha: of the Beta distribution of the part that stays.
        patch_size: (height, width).

    Returns:
        Images [B, C, H, W] and target probabilities [B, classes].
    """
    (P, Q), soft = patch_size, smooth(targets, classes).to(images.dtype)
    grid = (images.shape[2] // P, images.shape[3] // Q)
    top, bottom, left, right = box = cut_box(grid, Beta(alpha, alpha).sample().item())
    rows, columns = slice(top * P, bottom * P), slice(left * Q, right * Q)
    images, others = images.clone(), images.flip(0)
    images[:, :, rows, columns] = others[:, :, rows, columns]
    return images, mix_by_area(soft, box, grid)


@checked
def mix_tokens(tokens: Tensor, box: Box, grid: tuple[Count, Count]) -> Tensor:
    """MixToken: pastes a box of patch tokens from the batch in reverse order (Jiang et al., arXiv:2104.10858).

    Between patch projection and positions, so that every token comes from one image. The same call on what the network
    made of them puts each token's logits back to its own image. Class targets are `mix_by_area`.

    Args:
        tokens: [B, N, ...], N = rows · columns of patches, in row order.
        box: from `cut_box(grid, …)`, in patches.
        grid: (rows, columns).

    Returns:
        [B, N, ...].
    """
    top, bottom, left, right = box
    patches = tokens.unflatten(1, grid).clone()
    patches[:, top:bottom, left:right] = tokens.flip(0).unflatten(1, grid)[:, top:bottom, left:right]
    return patches.flatten(1, 2)


@checked
def mix_by_area(targets: Tensor, box: Box, grid: tuple[Count, Count]) -> Tensor:
    """Class targets [B, K] after `mix_tokens`: λ y + (1 − λ) y[reversed], 1 − λ the box's part of the grid."""
    return targets.lerp(targets.flip(0), area(box) / math.prod(grid))


@checked
def cut_box(size: tuple[Count, Count], share: Probability) -> Box:
    """A random box that leaves `share` of an area, less where the border clips it (arXiv:1905.04899, equation 2).

    Args:
        size: (height, width), in pixels or patches.
        share: λ in [0, 1].
    """
    edges: list[int] = []
    for side in size:
        cut, centre = int(side * math.sqrt(1 - share)), int(torch.randint(side, ()).item())
        edges += [max(centre - cut // 2, 0), min(centre + (cut + 1) // 2, side)]
    return edges[0], edges[1], edges[2], edges[3]


def area(box: Box) -> int:
    """What a box covers, in its own units squared."""
    return (box[1] - box[0]) * (box[3] - box[2])
