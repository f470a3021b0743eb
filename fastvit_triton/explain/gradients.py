"""Contribution of each token to a logit, by the gradient, for models whose layers attend to different tokens.

Math      cₙ = Σ_d x[n, d] · ∂logit/∂x[n, d]    for the tokens x that a block returns

cₙ is the derivative of the logit with respect to the size of token n. If what follows the block is linear, as the
mean over tokens and the head of Swin are but for a norm, the sum over tokens is the logit without its bias.

Source    Draelos & Carin, Use HiResCAM instead of Grad-CAM, arXiv:2011.08891. Grad-CAM (arXiv:1610.02391)
          takes the mean of the gradient over tokens first.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .maps import logits_of
from .readers import reader
from .recording import block_of
from .tokens import Geometry, channels_first, grid_of


class Contribution(NamedTuple):
    """Contributions of the patches that a block returns.

    Attributes:
        path: the block's name in the model.
        values: [B, h, w]; positive for the class, negative against it.
        x: the tokens [B, N, D], those without a place first.
        where: layout of the tokens.
    """

    path: str
    values: Tensor
    x: Tensor
    where: Geometry


def contributions(model: nn.Module, images: Tensor, classes: Tensor | None = None) -> list[Contribution]:
    """Contributions to a logit, from one forward and backward pass; parameters get no gradient.

    Blocks are the modules around attention layers that return tokens or a map of patches. Those whose patches do not
    reach the logit, such as the last block before a class token is read, are left out.

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
    modules = dict(model.named_modules())
    blocks = {block_of(path, modules)[0] for path, module in modules.items() if path and reader(module) is not None}
    returned: dict[str, list[Tensor]] = {}
    handles = [modules[path].register_forward_hook(partial(_keep, returned, path)) for path in sorted(blocks - {""})]
    try:
        with torch.enable_grad():
            logits = logits_of(model(images))
            classes = logits.argmax(1) if classes is None else classes
            fitting = {
                path: [t for t in ts if t.requires_grad and len(t) == len(images)] for path, ts in returned.items()
            }
            maps = {path: tensors[0] for path, tensors in fitting.items() if len(tensors) == 1}
            chosen = logits.gather(1, classes[:, None]).sum()
            grads = torch.autograd.grad(chosen, list(maps.values()), allow_unused=True) if maps else ()
    finally:
        for handle in handles:
            handle.remove()
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


def by_grid(found: list[Contribution]) -> list[Contribution]:
    """The last block of each grid of patches; the first, middle and last one if all have the same."""
    last = {c.where.grid: c for c in found}
    if len(last) > 1:
        return list(last.values())
    return [found[i] for i in dict.fromkeys((0, (len(found) - 1) // 2, len(found) - 1))]


def _keep(returned: dict, path: str, module: nn.Module, inputs: tuple, output: object) -> None:
    """Forward hook of a block: stores the tokens that it returns."""
    parts = output if isinstance(output, (tuple, list)) else (output,)
    returned.pop(path, None)  # a repeated call moves to the end
    returned[path] = [part for part in parts if isinstance(part, Tensor) and part.dim() in (3, 4)]
