"""The gradient of a batch that does not fit in memory."""

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from .objective import Objective
from .parallel import reducing
from .ranges import Count, checked


@checked
def accumulate(
    model: nn.Module,
    objective: Objective,
    images: Tensor,
    targets: Tensor,
    parts: Count = 1,
    amp: torch.dtype | None = None,
    scaler: GradScaler | None = None,
    weight: Tensor | float = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """Adds a batch's gradient to the parameters' `.grad`, part by part, equal to the whole batch's to rounding.

        ∇ L(batch) = Σ_p (B_p / B) ∇ L(part p)

    which holds for every loss that is a mean over images, whatever the sizes of the parts. Only one part's activations
    live at a time. Clip and step afterwards. A model whose images see each other (batch norm) is another matter: its
    statistics are those of a part. Blend before, so that parts do not change what is blended with what.

    Args:
        model: any module from images [B, C, H, W] to what the objective judges, such as logits [B, classes].
        objective: the loss, a mean over images; see objective.py.
        images: [B, C, H, W].
        targets: [B] or [B, classes].
        parts: how many; the last ones may be smaller.
        amp: autocast dtype; None computes in the weights' dtype.
        scaler: multiplies the loss, so that float16 gradients do not vanish; None does not.
        weight: of this batch among those of other processes, on whose average it then depends; see parallel.py.

    Returns:
        The loss of the whole batch, a scalar, and its logits [B, classes] or None; neither has a gradient.

    Raises:
        ValueError: there are no parts, or more than images.
    """
    count = images.shape[0]
    if parts > count:
        raise ValueError(f"parts is {parts} for {count} images; it must be at most the images")
    total, answers = torch.zeros((), device=images.device), []
    pairs = zip(images.tensor_split(parts), targets.tensor_split(parts), strict=True)
    for number, (some_images, some_targets) in enumerate(pairs, 1):
        with reducing(model, number == parts):
            with torch.autocast(images.device.type, amp, enabled=amp is not None):
                value, logits = objective(model, some_images, some_targets)
            value = value * (some_images.shape[0] / count)
            (value * weight if scaler is None else scaler.scale(value * weight)).backward()
        total = total + value.detach()
        answers.append(None if logits is None else logits.detach())
    return total, None if None in answers else torch.cat(answers)
