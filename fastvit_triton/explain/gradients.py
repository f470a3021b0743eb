"""Contribution of each token to a logit, by the gradient, for any model whose blocks return tokens or maps.

Math      cₙ = Σ_d x[n, d] · ∂logit/∂x[n, d]    for the tokens x that a block returns

cₙ is the derivative of the logit with respect to the size of token n. If what follows the block is linear, as the
mean over tokens and the head of Swin are but for a norm, the sum over tokens is the logit without its bias.

Source    Draelos & Carin, Use HiResCAM instead of Grad-CAM, arXiv:2011.08891. Grad-CAM (arXiv:1610.02391)
          takes the mean of the gradient over tokens first.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .maps import logits_of
from .recording import record
from .tokens import Geometry, channels_first, grid_of

ENOUGH = 7  # patches on a side, as Grad-CAM shows of a ResNet at 224 pixels


class Contribution(NamedTuple):
    """Contributions of the patches that a block returns."""

    path: str  # the block's name in the model
    values: Tensor  # [B, h, w]; positive for the class, negative against it
    x: Tensor  # the tokens [B, N, D], those without a place first
    where: Geometry  # layout of the tokens


def contributions(model: nn.Module, images: Tensor, classes: Tensor | None = None) -> list[Contribution]:
    """Contributions to a logit, from one forward and backward pass; parameters get no gradient.

    Blocks are the modules around attention layers that return tokens or a map of patches; without attention, modules
    with parts that return a map of the shape that they take. Those whose patches do not reach the logit, such as the
    last block before a class token is read, are left out.

    Args:
        model: from images to logits [B, K], or to an object with `logits`; in eval mode.
        images: [B, C, H, W], normalised.
        classes: [B] class numbers; None takes the largest logit.

    Returns:
        One for each block, in the order of their calls.

    Raises:
        ValueError: the model returns no logits.
    """
    images = images.detach().clone().requires_grad_()
    with torch.enable_grad(), record(model) as seen:
        logits = logits_of(model(images))
        classes = logits.argmax(1) if classes is None else classes
        returned = {path: ys for path, (_, ys) in seen.blocks.items()} if seen.layers else seen.maps
        fitting = {path: [y for y in ys if y.requires_grad and len(y) == len(images)] for path, ys in returned.items()}
        maps = {path: ys[0] for path, ys in fitting.items() if len(ys) == 1}
        chosen = logits.gather(1, classes[:, None]).sum()
        grads = torch.autograd.grad(chosen, list(maps.values()), allow_unused=True) if maps else ()
    found = []
    for (path, y), grad in zip(maps.items(), grads, strict=True):
        if grad is None:
            continue
        if channels_first(images, y):
            y, grad = y.movedim(1, -1), grad.movedim(1, -1)
        where = grid_of(images, y)
        if where.count < 2:
            continue
        values = (y * grad).detach().flatten(1, -2).sum(-1)[:, where.prefix :]
        if bool(values.any()):
            found.append(Contribution(path, values.unflatten(1, where.grid), y.detach().flatten(1, -2), where))
    return found


def finest(found: list[Contribution]) -> Contribution:
    """The last block with at least ENOUGH rows and columns of patches, else the last of those with most patches."""
    enough = [c for c in found if min(c.where.grid) >= ENOUGH]
    return enough[-1] if enough else max(reversed(found), key=lambda c: c.where.count)


def by_grid(found: list[Contribution]) -> list[Contribution]:
    """The last block of each grid of patches; the first, middle and last one if all have the same."""
    last = {c.where.grid: c for c in found}
    if len(last) > 1:
        return list(last.values())
    return [found[i] for i in dict.fromkeys((0, (len(found) - 1) // 2, len(found) - 1))]
