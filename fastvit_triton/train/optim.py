"""AdamW's parameter groups and the learning rate of each step. Pure functions for any module."""

import math
import re

import torch
from torch import nn
from torch.optim import Optimizer

from .ranges import Count, NotNegative, Number, Part, Positive, Share, checked

# Positions and class, register, distillation and mask tokens, as timm, transformers, torchvision and vit-pytorch say.
_FREE = re.compile(
    r"(^|[._])((cls|class|reg|register|dist|distillation|mask)_tokens?|pos(ition)?_embed(ding)?s?|\w*bias_table)(\.|$)"
)
_STEM = re.compile(r"(^|\.)(patch_embed|to_patch_embedding|embeddings|conv_proj|norm_pre|stem)(\.|$)")
_PATCH = re.compile(r"(^|\.)(patch_embed\w*|to_patch_embedding|conv_proj)(\.|$)")
_BLOCK = re.compile(r"(^|\.)(blocks|layers?|encoder_layer)[._](\d+)\.")


@checked
def parameter_groups(
    model: nn.Module, weight_decay: NotNegative, layer_decay: Part = 1.0, patch_embed_scale: NotNegative = 1.0
) -> list[dict]:
    """Splits trainable parameters by weight decay, and by learning rate where it differs from layer to layer.

    Weight decay pulls weights towards zero; that regularises matrices but only distorts biases, norms, LayerScale,
    tokens and positions. So a parameter is exempt when it has fewer than two axes, when it is called a token or a
    position, or when `model.no_weight_decay()`, as in timm, names it. A shared parameter appears once.

    Layer-wise decay keeps early layers, which are already good, nearly still in fine-tuning (facebookresearch/mae,
    util/lr_decay.py): with L blocks, block i has rate d^(L − i), the stem (patches, tokens, positions) d^(L + 1), the
    rest 1. `lr_scale` of a group is that factor; whoever sets the rate multiplies by it, as `set_lr` does.

    Args:
        model: any module; `no_weight_decay` is optional. Blocks are numbered in names: blocks.3, layers.3, layer.3.
        weight_decay: decay of matrices, per unit of learning rate.
        layer_decay: d in (0, 1]; 1 gives all layers the same rate.
        patch_embed_scale: another factor for the patch projection (DINOv2: 0.2).

    Returns:
        Groups for any `torch.optim` optimiser, in the order of `model.named_parameters()`, those that decay first; at
        most two without the last two arguments. Empty groups are left out.

    Raises:
        ValueError: the layer decay is outside (0, 1], or the model has no numbered blocks for it.
    """
    exempt = model.no_weight_decay() if hasattr(model, "no_weight_decay") else set()
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    depth = 1 + max((int(found[3]) for name in names if (found := _BLOCK.search(name))), default=-1)
    if layer_decay < 1 and not depth:
        raise ValueError("layer_decay needs numbered blocks, such as blocks.0; this model has none, leave it at 1")
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            free = parameter.ndim < 2 or name in exempt or _FREE.search(name)
            scale = layer_decay ** (depth + 1 - layer_of(name, depth))
            scale *= patch_embed_scale if _PATCH.search(name) else 1
            groups.setdefault((0.0 if free else weight_decay, scale), []).append(parameter)
    groups = dict(sorted(groups.items(), key=lambda item: item[0][0] == 0.0))
    if {scale for _, scale in groups} <= {1.0}:
        return [{"params": found, "weight_decay": decay} for (decay, _), found in groups.items()]
    return [{"params": found, "weight_decay": decay, "lr_scale": scale} for (decay, scale), found in groups.items()]


def layer_of(name: str, depth: int) -> int:
    """Which layer a parameter belongs to: 0 for the stem, i + 1 for block i of `depth`, depth + 1 for the rest."""
    if found := _BLOCK.search(name):
        return int(found[3]) + 1
    return 0 if _FREE.search(name) or _STEM.search(name) else depth + 1


@checked
def set_lr(optimizer: Optimizer, lr: NotNegative) -> None:
    """Gives every group this learning rate, times its own `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


@checked
def adamw(
    model: nn.Module,
    lr: NotNegative,
    weight_decay: NotNegative,
    betas: tuple[Share, Share] = (0.9, 0.999),
    layer_decay: Part = 1.0,
) -> Optimizer:
    """AdamW over `parameter_groups`, with PyTorch's fused kernels, which exist on every device we train on."""
    groups = parameter_groups(model, weight_decay, layer_decay)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)


@checked
def warmup_cosine(step: Number, steps: Count, warmup: Number, peak: NotNegative, floor: NotNegative = 0.0) -> float:
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
    if not warmup < steps:
        raise ValueError(f"warmup is {warmup} of {steps} steps; it must be shorter than the run")
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


@checked
def redraw_positions(model: nn.Module, std: Positive) -> None:
    """Draws the learned position table anew from N(0, std²); a model without one is left alone.

    The usual 0.02 drowns beside tokens of deviation 0.5, and a short run on few images ends before it has grown.

    Args:
        model: any module; `pos_embed`, as in timm, is the table.
        std: in the units of the tokens.
    """
    if isinstance(getattr(model, "pos_embed", None), nn.Parameter):
        nn.init.normal_(model.pos_embed, std=std)
