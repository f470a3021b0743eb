"""Training on blends of two images."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Beta


def mixup(images: Tensor, targets: Tensor, classes: int, alpha: float) -> tuple[Tensor, Tensor]:
    """Blends each image, and its label, with another of the batch (Zhang et al., arXiv:1710.09412, section 2).

        λ ~ Beta(alpha, alpha),   x' = λ x + (1 − λ) x[perm],   y' = λ y + (1 − λ) y[perm]

    A model that must answer in proportion cannot memorise. One λ serves the whole batch, as in timm. Refuses nothing.

    Args:
        images: [B, C, H, W].
        targets: [B] class numbers.
        classes: number of classes.
        alpha: 0 leaves the images as they are; 1 draws λ uniformly.

    Returns:
        Images [B, C, H, W] and target probabilities [B, classes].
    """
    soft = F.one_hot(targets, classes).to(images.dtype)  # [B, classes]
    if alpha == 0:
        return images, soft
    share = Beta(alpha, alpha).sample().item()
    order = torch.randperm(len(images), device=images.device)
    return images.lerp(images[order], 1 - share), soft.lerp(soft[order], 1 - share)
