"""Mixup, CutMix and MixToken. Random numbers come from PyTorch's global generator."""

import math

import torch
from torch import Tensor
from torch.distributions import Beta

from ..loss import smooth_labels
from ..ranges import FractionBelow1, NonNegative, NonNegativeInt, Positive, PositiveInt, Probability, checked

# top, bottom, left, right; bottom and right are exclusive
Box = tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt, NonNegativeInt]


@checked
def mixup(images: Tensor, targets: Tensor, classes: PositiveInt, alpha: NonNegative) -> tuple[Tensor, Tensor]:
    """Mixup: blends each image and its label with another of the batch (Zhang et al., arXiv:1710.09412, section 2).

        λ ~ Beta(alpha, alpha),   x' = λ x + (1 − λ) x[perm],   y' = λ y + (1 − λ) y[perm]

    One λ for the whole batch, as in timm. big_vision uses max(λ, 1 − λ), which gives the same distribution of blends
    under a random permutation.

    Args:
        images: [B, C, H, W].
        targets: [B] class numbers.
        classes: number of classes.
        alpha: parameter of the Beta distribution; 0 disables mixing, 1 draws λ uniformly.

    Returns:
        Images [B, C, H, W] and target probabilities [B, classes].
    """
    soft = smooth_labels(targets, classes).to(images.dtype)  # [B, classes]
    if alpha == 0:
        return images, soft
    lam = Beta(alpha, alpha).sample().item()
    order = torch.randperm(len(images), device=images.device)
    return images.lerp(images[order], 1 - lam), soft.lerp(soft[order], 1 - lam)


@checked
def cutmix(images: Tensor, targets: Tensor, classes: PositiveInt, alpha: NonNegative) -> tuple[Tensor, Tensor]:
    """CutMix: pastes a box of another image of the batch into each (Yun et al., arXiv:1905.04899, equations 1 and 2).

        λ ~ Beta(alpha, alpha),   box of area (1 − λ) H W,   y' = λ' y + (1 − λ') y[perm]

    λ' is the remaining fraction of the image after the box is clipped at the border.

    Args:
        images: [B, C, H, W].
        targets: [B] class numbers.
        classes: number of classes.
        alpha: parameter of the Beta distribution; 0 disables mixing, 1 draws λ uniformly.

    Returns:
        Images [B, C, H, W] and target probabilities [B, classes].
    """
    soft = smooth_labels(targets, classes).to(images.dtype)  # [B, classes]
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
    classes: PositiveInt,
    *,
    mixup_alpha: NonNegative = 0.8,
    cutmix_alpha: NonNegative = 1.0,
    switch: Probability = 0.5,
    smoothing: FractionBelow1 = 0.1,
) -> tuple[Tensor, Tensor]:
    """Mixup or CutMix, chosen per batch, with label smoothing: the DeiT recipe (arXiv:2012.12877, table 9).

    Args:
        images: [B, C, H, W].
        targets: [B] class numbers.
        classes: number of classes.
        mixup_alpha: alpha of `mixup`; 0 disables it.
        cutmix_alpha: alpha of `cutmix`; 0 disables it.
        switch: probability of CutMix if both are enabled.
        smoothing: probability spread evenly over all classes.

    Returns:
        Images [B, C, H, W] and target probabilities [B, classes].
    """
    if mixup_alpha and cutmix_alpha:
        use_cutmix = torch.rand(()).item() < switch
    else:
        use_cutmix = cutmix_alpha > 0
    mix, alpha = (cutmix, cutmix_alpha) if use_cutmix else (mixup, mixup_alpha)
    images, soft = mix(images, targets, classes, alpha)
    return images, smooth_labels(soft, classes, smoothing)


@checked
def mixtoken(
    images: Tensor, targets: Tensor, classes: PositiveInt, alpha: Positive, patch_size: tuple[PositiveInt, PositiveInt]
) -> tuple[Tensor, Tensor]:
    """MixToken on pixels: pastes a box of whole patches of the reversed batch (Jiang et al., arXiv:2104.10858).

    If each token depends on its own patch only (no overlapping or convolutional stem), this equals `mix_tokens` between
    projection and positions, without changes to the model.

    Args:
        images: [B, C, H, W], H and W divisible by the patch size.
        targets: [B] class numbers.
        classes: number of classes.
        alpha: parameter of the Beta distribution.
        patch_size: (height, width).

    Returns:
        Images [B, C, H, W] and target probabilities [B, classes].
    """
    (P, Q), soft = patch_size, smooth_labels(targets, classes).to(images.dtype)
    grid = (images.shape[2] // P, images.shape[3] // Q)
    top, bottom, left, right = box = cut_box(grid, Beta(alpha, alpha).sample().item())
    rows = slice(top * P, bottom * P)
    columns = slice(left * Q, right * Q)
    images, others = images.clone(), images.flip(0)
    images[:, :, rows, columns] = others[:, :, rows, columns]
    return images, mix_by_area(soft, box, grid)


@checked
def mix_tokens(tokens: Tensor, box: Box, grid: tuple[PositiveInt, PositiveInt]) -> Tensor:
    """MixToken: pastes a box of patch tokens from the reversed batch (Jiang et al., arXiv:2104.10858).

    Apply it between patch projection and positions. Applied with the same box to the network's token outputs, it moves
    each token back to its own image. Class targets: `mix_by_area`.

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
def mix_by_area(targets: Tensor, box: Box, grid: tuple[PositiveInt, PositiveInt]) -> Tensor:
    """Class targets [B, K] after `mix_tokens`: λ y + (1 − λ) y[reversed], 1 − λ = the box's fraction of the grid."""
    return targets.lerp(targets.flip(0), area(box) / math.prod(grid))


@checked
def cut_box(size: tuple[PositiveInt, PositiveInt], lam: Probability) -> Box:
    """A random box of area (1 − λ) H W, clipped at the border (CutMix, arXiv:1905.04899, equation 2).

    Args:
        size: (height, width), in pixels or patches.
        lam: λ in [0, 1].
    """
    edges: list[int] = []
    for side in size:
        cut = int(side * math.sqrt(1 - lam))
        centre = int(torch.randint(side, ()).item())
        edges += [max(centre - cut // 2, 0), min(centre + (cut + 1) // 2, side)]
    return edges[0], edges[1], edges[2], edges[3]


def area(box: Box) -> int:
    """Area of a box, in its own units."""
    return (box[1] - box[0]) * (box[3] - box[2])
