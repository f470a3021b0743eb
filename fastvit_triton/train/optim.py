"""AdamW's parameter groups and the learning rate of each step. Pure functions for any module."""

import math

import torch
from torch import nn
from torch.optim import Optimizer


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Splits trainable parameters into a group that decays and one that does not.

    Weight decay pulls weights towards zero; that regularises matrices but only distorts biases, norms, tokens and
    positions. So a parameter is exempt when it has fewer than two axes or when `model.no_weight_decay()`, as in timm,
    names it. A shared parameter appears once. Refuses nothing; an empty group is left out.

    Args:
        model: any module; `no_weight_decay` is optional.
        weight_decay: decay of the first group, per unit of learning rate.

    Returns:
        Groups for any `torch.optim` optimiser, in the order of `model.named_parameters()`.
    """
    exempt = model.no_weight_decay() if hasattr(model, "no_weight_decay") else set()
    decayed, free = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (free if parameter.ndim < 2 or name in exempt else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def adamw(model: nn.Module, lr: float, weight_decay: float, betas: tuple[float, float] = (0.9, 0.999)) -> Optimizer:
    """AdamW over `parameter_groups`, with PyTorch's fused kernels, which exist on every device we train on."""
    return torch.optim.AdamW(parameter_groups(model, weight_decay), lr=lr, betas=betas, fused=True)


def warmup_cosine(step: int, steps: int, warmup: int, peak: float, floor: float = 0.0) -> float:
    """The learning rate of one step: a straight line up, then half a cosine down.

        step < warmup    peak · (step + 1) / (warmup + 1)
        otherwise        floor + (peak − floor) · ½ (1 + cos(π · (step − warmup) / (steps − warmup)))

    Warm-up keeps Adam's first, noisy steps small; the cosine ends where averaging would. The peak is reached at
    `step == warmup`, and `step == steps`, one past the last, gives the floor. Refuses a warm-up as long as the run.

    Args:
        step: 0 … steps.
        steps: length of the run.
        warmup: steps before the peak.
        peak: largest rate.
        floor: rate at the end.
    """
    if not 0 <= warmup < steps:
        raise ValueError(f"warmup is {warmup} of {steps} steps; it must be at least 0 and shorter than the run")
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def redraw_positions(model: nn.Module, std: float) -> None:
    """Draws the learned position table anew from N(0, std²); a model without one is left alone.

    The usual 0.02 drowns beside tokens of deviation 0.5, and a short run on few images ends before it has grown.

    Args:
        model: any module; `pos_embed`, as in timm, is the table.
        std: in the units of the tokens.
    """
    if isinstance(getattr(model, "pos_embed", None), nn.Parameter):
        nn.init.normal_(model.pos_embed, std=std)
