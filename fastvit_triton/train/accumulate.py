"""The gradient of a batch that does not fit in memory."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def accumulate(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    images: Tensor,
    targets: Tensor,
    parts: int,
    amp: torch.dtype | None = None,
) -> Tensor:
    """Adds a batch's gradient to the parameters' `.grad`, part by part, equal to the whole batch's to rounding.

        ∇ L(batch) = Σ_p (B_p / B) ∇ L(part p)

    which holds for every loss that is a mean over images, whatever the sizes of the parts. Only one part's activations
    live at a time. Clip and step afterwards. A model whose images see each other (batch norm) is another matter: its
    statistics are those of a part. Blend before, so that parts do not change what is blended with what.

    Args:
        model: any module from images [B, C, H, W] to logits [B, classes].
        loss: of logits and targets, a mean over images.
        images: [B, C, H, W].
        targets: [B] or [B, classes].
        parts: how many; the last ones may be smaller.
        amp: autocast dtype; None computes in the weights' dtype.

    Returns:
        The loss of the whole batch, a scalar without gradient.

    Raises:
        ValueError: there are no parts, or more than images.
    """
    count = images.shape[0]
    if not 1 <= parts <= count:
        raise ValueError(f"parts is {parts} for {count} images; it must be at least 1 and at most the images")
    total = torch.zeros((), device=images.device)
    pairs = zip(images.tensor_split(parts), targets.tensor_split(parts), strict=True)
    for some_images, some_targets in pairs:
        with torch.autocast(images.device.type, amp, enabled=amp is not None):
            logits = model(some_images)
        value = loss(logits if amp is None else logits.float(), some_targets) * (some_images.shape[0] / count)
        value.backward()
        total = total + value.detach()
    return total
