"""Exponential moving average (EMA) of the weights."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from .ranges import FractionBelow1, checked


@checked
def ema_model(model: nn.Module, decay: FractionBelow1 = 0.9999, warmup: bool = True) -> AveragedModel:
    """Exponential moving average of a model's weights and buffers, as PyTorch's `AveragedModel`.

        avg ← d_n avg + (1 − d_n) w,   d_n = min(decay, (1 + n) / (10 + n)) with warm-up, else decay

    ViT uses 0.9999 (arXiv:2010.11929, section 4.1), DeiT 0.99996. With 0.9999 and no warm-up, the initial random
    weights still contribute 1/2 of the average after 6,900 steps; warm-up (TensorFlow's
    `ExponentialMovingAverage(num_updates=)`) removes them early. Call `ema.update_parameters(model)` after each step,
    evaluate and save `ema.module`, and store `ema.state_dict()`, which includes the count n, to resume.

    Args:
        model: the model, on its device; it is copied.
        decay: in [0, 1).
        warmup: use the smaller decays of d_n at the start.

    Raises:
        ValueError: the decay is outside [0, 1).
    """

    @torch.no_grad()
    def update(averages: Sequence[Tensor], weights: Sequence[Tensor], count: Tensor | int) -> None:
        current = ema_decay_at(int(count), decay) if warmup else decay
        for average, weight in zip(averages, weights, strict=True):
            if average.is_floating_point() or average.is_complex():
                average.lerp_(weight.to(average), 1 - current)
            else:  # integer buffers, such as BatchNorm's num_batches_tracked
                average.copy_(weight)

    return AveragedModel(model, multi_avg_fn=update, use_buffers=True)


def ema_decay_at(count: int, decay: float) -> float:
    """d_n of update n = `count`, from 1; update 0 copies the weights."""
    return min(decay, (1 + count) / (10 + count))
