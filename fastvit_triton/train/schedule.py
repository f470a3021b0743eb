"""The learning rate of each step, exactly as four codebases compute it. `optim.warmup_cosine` is our own.

Each is a pure function of time. Bind all but the first argument and pass it to `fit`; those in epochs take fractions:
`lambda step: mae_schedule(step / steps_per_epoch, …)`.
"""

import math
from typing import Literal

from .ranges import NotNegative, Positive, checked


@checked
def constant(step: NotNegative, warmup: NotNegative, peak: NotNegative) -> float:
    """peak · min(1, step / warmup).

    Args:
        step: 0 …
        warmup: steps; 0 starts at the peak.
        peak: largest rate.
    """
    return peak * min(1.0, step / warmup) if warmup else peak


@checked
def vit_schedule(
    step: NotNegative,
    steps: Positive,
    warmup: NotNegative,
    peak: NotNegative,
    decay: Literal["cosine", "linear"] = "cosine",
    linear_end: NotNegative = 1e-5,
) -> float:
    """ViT (vision_transformer, vit_jax/utils.py) and big_vision (big_vision/utils.py), `create_learning_rate_schedule`.

        p = clip((step − warmup) / (steps − warmup), 0, 1)
        cosine   peak · ½ (1 + cos π p) · min(1, step / warmup)
        linear   (end + (peak − end)(1 − p)) · min(1, step / warmup)

    Step 0 has rate 0.

    Args:
        step: 0 … steps.
        steps: length of the run.
        warmup: steps before the peak.
        peak: largest rate.
        decay: "cosine" or "linear".
        linear_end: rate at the end of a linear decay; 1e-5 in ViT's code, 0 in big_vision's.

    Raises:
        ValueError: the warm-up is as long as the run, or the decay is unknown.
    """
    _check(warmup, steps)
    progress = min(max((step - warmup) / (steps - warmup), 0.0), 1.0)
    if decay == "linear":
        return constant(step, warmup, linear_end + (peak - linear_end) * (1 - progress))
    return constant(step, warmup, peak * 0.5 * (1 + math.cos(math.pi * progress)))


@checked
def deit_schedule(
    epoch: NotNegative,
    epochs: Positive,
    warmup: NotNegative,
    peak: NotNegative,
    floor: NotNegative = 1e-5,
    start: NotNegative = 1e-6,
) -> float:
    """DeiT (facebookresearch/deit, main.py: timm's CosineLRScheduler without `warmup_prefix`).

        epoch < warmup   start + (peak − start) · epoch / warmup
        epoch < epochs   floor + (peak − floor) · ½ (1 + cos(π · epoch / epochs))
        later            floor: the cooldown

    The cosine counts from epoch 0, so the peak itself is never reached. DeiT changes the rate once an epoch, after it,
    by `step(epoch)`: epochs 0 and 1 both have `start`, and epoch e > 0 has the rate of e − 1. To repeat that, pass
    max(epoch − 1, 0).

    Args:
        epoch: 0 …, may be a fraction.
        epochs: length of the cosine.
        warmup: epochs.
        peak: largest rate, already scaled: 5e-4 · batch / 512.
        floor: rate at the end.
        start: rate at epoch 0.

    Raises:
        ValueError: the warm-up is as long as the run.
    """
    _check(warmup, epochs)
    if epoch < warmup:
        return start + (peak - start) * epoch / warmup
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(epoch / epochs, 1.0)))


@checked
def mae_schedule(
    epoch: NotNegative, epochs: Positive, warmup: NotNegative, peak: NotNegative, floor: NotNegative = 0.0
) -> float:
    """MAE (facebookresearch/mae, util/lr_sched.py), set before every step with a fraction of an epoch.

        epoch < warmup   peak · epoch / warmup
        otherwise        floor + (peak − floor) · ½ (1 + cos(π (epoch − warmup) / (epochs − warmup)))

    Args:
        epoch: 0 … epochs, may be a fraction.
        epochs: length of the run.
        warmup: epochs.
        peak: largest rate, already scaled: base · batch / 256.
        floor: rate at the end.

    Raises:
        ValueError: the warm-up is as long as the run.
    """
    _check(warmup, epochs)
    if epoch < warmup:
        return peak * epoch / warmup
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * (epoch - warmup) / (epochs - warmup)))


def _check(warmup: float, length: float) -> None:
    if not warmup < length:
        raise ValueError(f"warmup is {warmup} of {length}; it must be shorter than the run")
