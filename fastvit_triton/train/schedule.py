"""Learning-rate schedules that exactly match four codebases. Our own schedule is `optim.warmup_cosine`.

Each is a pure function of time, in steps or in (fractional) epochs. Bind the other arguments and pass it to `fit`:
`lambda step: mae_schedule(step / steps_per_epoch, …)`.
"""

import math
from typing import Literal

from .ranges import NonNegative, Positive, checked


@checked
def constant(step: NonNegative, warmup: NonNegative, peak: NonNegative) -> float:
    """Linear warm-up, then constant: peak · min(1, step / warmup).

    Args:
        step: 0 …
        warmup: in steps; 0 starts at the peak.
        peak: largest rate.
    """
    return peak * min(1.0, step / warmup) if warmup else peak


@checked
def vit_schedule(
    step: NonNegative,
    steps: Positive,
    warmup: NonNegative,
    peak: NonNegative,
    decay: Literal["cosine", "linear"] = "cosine",
    linear_end: NonNegative = 1e-5,
) -> float:
    """ViT (vision_transformer, vit_jax/utils.py) and big_vision (big_vision/utils.py), `create_learning_rate_schedule`.

        p = clip((step − warmup) / (steps − warmup), 0, 1)
        cosine   peak · ½ (1 + cos π p) · min(1, step / warmup)
        linear   (end + (peak − end)(1 − p)) · min(1, step / warmup)

    The rate of step 0 is 0.

    Args:
        step: 0 … steps.
        steps: length of the run.
        warmup: steps before the peak.
        peak: largest rate.
        decay: "cosine" or "linear".
        linear_end: rate at the end of a linear decay; 1e-5 in ViT's code, 0 in big_vision's.

    Raises:
        ValueError: the warm-up is not shorter than the run, or the decay is unknown.
    """
    _check(warmup, steps)
    progress = min(max((step - warmup) / (steps - warmup), 0.0), 1.0)
    if decay == "linear":
        return constant(step, warmup, linear_end + (peak - linear_end) * (1 - progress))
    return constant(step, warmup, peak * 0.5 * (1 + math.cos(math.pi * progress)))


@checked
def deit_schedule(
    epoch: NonNegative,
    epochs: Positive,
    warmup: NonNegative,
    peak: NonNegative,
    floor: NonNegative = 1e-5,
    start: NonNegative = 1e-6,
) -> float:
    """DeiT (facebookresearch/deit, main.py: timm's CosineLRScheduler without `warmup_prefix`).

        epoch < warmup   start + (peak − start) · epoch / warmup
        epoch < epochs   floor + (peak − floor) · ½ (1 + cos(π · epoch / epochs))
        later            floor (cooldown)

    The cosine starts at epoch 0, so the peak is never reached. DeiT calls `step(epoch)` after each epoch, so epochs 0
    and 1 both have rate `start`, and epoch e > 0 has the rate of e − 1: pass max(epoch − 1, 0) to reproduce that.

    Args:
        epoch: 0 …, may be fractional.
        epochs: length of the cosine.
        warmup: in epochs.
        peak: largest rate, already scaled: 5e-4 · batch / 512.
        floor: rate at the end.
        start: rate at epoch 0.

    Raises:
        ValueError: the warm-up is not shorter than the run.
    """
    _check(warmup, epochs)
    if epoch < warmup:
        return start + (peak - start) * epoch / warmup
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(epoch / epochs, 1.0)))


@checked
def mae_schedule(
    epoch: NonNegative, epochs: Positive, warmup: NonNegative, peak: NonNegative, floor: NonNegative = 0.0
) -> float:
    """MAE (facebookresearch/mae, util/lr_sched.py); MAE calls it before every step with a fractional epoch.

        epoch < warmup   peak · epoch / warmup
        otherwise        floor + (peak − floor) · ½ (1 + cos(π (epoch − warmup) / (epochs − warmup)))

    Args:
        epoch: 0 … epochs, may be fractional.
        epochs: length of the run.
        warmup: in epochs.
        peak: largest rate, already scaled: base · batch / 256.
        floor: rate at the end.

    Raises:
        ValueError: the warm-up is not shorter than the run.
    """
    _check(warmup, epochs)
    if epoch < warmup:
        return peak * epoch / warmup
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * (epoch - warmup) / (epochs - warmup)))


def _check(warmup: float, length: float) -> None:
    if not warmup < length:
        raise ValueError(f"warmup is {warmup} of {length}; it must be shorter than the run")
