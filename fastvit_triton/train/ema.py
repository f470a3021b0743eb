"""A slow copy of the weights, which generalises better than the last step's: Polyak averaging."""

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from .ranges import Share, checked


@checked
def moving_average(model: nn.Module, decay: Share = 0.9999, warmup: bool = True) -> AveragedModel:
    """An exponential moving average of a model's weights and buffers, in PyTorch's own `AveragedModel`.

        avg ← d_n avg + (1 − d_n) w,   d_n = min(decay, (1 + n) / (10 + n)) with warm-up, else decay

    ViT takes 0.9999 (arXiv:2010.11929, section 4.1), DeiT 0.99996. Without warm-up the first, random weights still
    weigh half after 6,900 steps of 0.9999; with it (TensorFlow's `ExponentialMovingAverage(num_updates=)`) they are
    forgotten early. Call `average.update_parameters(model)` after each step, evaluate and save `average.module`, and
    keep `average.state_dict()`, which has the count n too, to go on.

    Args:
        model: on its device; it is copied.
        decay: in [0, 1).
        warmup: start with a short memory.

    Raises:
        ValueError: the decay is outside [0, 1).
    """

    @torch.no_grad()
    def update(averages: list[Tensor], weights: list[Tensor], count: Tensor | int) -> None:
        kept = warm_decay(int(count), decay) if warmup else decay
        for average, weight in zip(averages, weights, strict=True):
            if average.is_floating_point() or average.is_complex():
                average.lerp_(weight.to(average), 1 - kept)
            else:  # counters, such as a batch norm's
                average.copy_(weight)

    return AveragedModel(model, multi_avg_fn=update, use_buffers=True)


def warm_decay(count: int, decay: float) -> float:
    """d_n of the n-th update, from 1; the first update, n = 0, copies."""
    return min(decay, (1 + count) / (10 + count))
