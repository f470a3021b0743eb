"""Losses that learn from a teacher (DeiT, Touvron et al., arXiv:2012.12877, section 3)."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from .ranges import Positive, Probability, checked


def hard_distillation(student: Tensor, distilled: Tensor, teacher: Tensor, target: Tensor) -> Tensor:
    """½ CE(student, target) + ½ CE(distilled, argmax teacher), equation 3.

    Args:
        student: class-token logits [B, K].
        distilled: distillation-token logits [B, K].
        teacher: the teacher's logits [B, K]; they get no gradient.
        target: classes [B].

    Returns:
        A scalar.
    """
    return (F.cross_entropy(student, target) + F.cross_entropy(distilled, teacher.argmax(-1))) / 2


@checked
def soft_distillation(
    student: Tensor,
    distilled: Tensor,
    teacher: Tensor,
    target: Tensor,
    weight: Probability = 0.1,
    tau: Positive = 3.0,
    reduction: Literal["batchmean", "official"] = "batchmean",
) -> Tensor:
    """(1 − λ) CE(student, target) + λ τ² KL(softmax(teacher / τ) ‖ softmax(distilled / τ)), equation 2.

    Args:
        student: class-token logits [B, K].
        distilled: distillation-token logits [B, K].
        teacher: the teacher's logits [B, K]; they get no gradient.
        target: classes [B].
        weight: λ.
        tau: τ, the temperature.
        reduction: "batchmean" (the paper: mean over images) or "official" (the released code divides by B·K).

    Returns:
        A scalar.

    Raises:
        ValueError: the reduction is unknown.
    """
    targets = F.log_softmax(teacher.detach() / tau, -1)
    divergence = F.kl_div(F.log_softmax(distilled / tau, -1), targets, reduction="batchmean", log_target=True)
    if reduction == "official":
        divergence = divergence / student.shape[-1]
    return (1 - weight) * F.cross_entropy(student, target) + weight * tau**2 * divergence
