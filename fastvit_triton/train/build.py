"""From a recipe to the parts of `fit`: optimiser, rate, objective, blend, step and test. Any module, any batches."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from .augment import random_erasing
from .average import moving_average
from .distill import hard_distillation, soft_distillation
from .drop_path import set_drop_path
from .image import Transform
from .lamb import Lamb
from .loop import Score, assess, evaluate
from .loss import binary_cross_entropy, smooth
from .masked import MaskedAutoencoder, MaskedPatchPrediction
from .mix import mixtoken, mixup_or_cutmix
from .objective import Objective, distilled, masked_colours, masked_pixels, supervised
from .optim import adamw, parameter_groups, redraw_positions, warmup_cosine
from .ranges import Count, checked
from .recipes import Recipe
from .schedule import deit_schedule, mae_schedule, vit_schedule
from .step import Step

MASKED = ("pixels", "colours")  # losses of models that look at pictures and answer nothing
DISTILLATION = {"hard": hard_distillation, "soft": soft_distillation}


def optimizer_for(recipe: Recipe, model: nn.Module) -> Optimizer:
    """The recipe's optimiser over the model's parameter groups."""
    if recipe.optimizer == "adamw":
        return adamw(model, recipe.lr, recipe.weight_decay, recipe.betas, recipe.layer_decay)
    groups = parameter_groups(model, recipe.weight_decay, recipe.layer_decay)
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=recipe.lr, momentum=0.9)
    return Lamb(groups, lr=recipe.lr, betas=recipe.betas, eps=1e-8)


@checked
def lr_for(recipe: Recipe, steps_per_epoch: Count) -> Callable[[int], float]:
    """Step of the whole run, from 0, to learning rate.

    DeiT changes its rate after each epoch; a run that `shorten` made shorter than the warm-up of a published one would
    never leave it, so such a run changes the rate at every step.

    Args:
        recipe: the record.
        steps_per_epoch: of the data at hand.
    """
    steps = recipe.steps or recipe.epochs * steps_per_epoch
    warmup = recipe.warmup * {"run": steps, "epochs": steps_per_epoch, "steps": 1}[recipe.warmup_unit]
    if recipe.schedule == "own":
        return partial(warmup_cosine, steps=steps, warmup=int(warmup), peak=recipe.lr, floor=recipe.floor)
    if warmup >= steps:
        raise ValueError(
            f"warmup is {warmup:.0f} of {steps} steps; take more epochs, smaller batches or a part of the run, like 0.1"
        )
    if recipe.schedule == "vit":
        return partial(
            vit_schedule, steps=steps, warmup=warmup, peak=recipe.lr, decay=recipe.decay, linear_end=recipe.floor
        )
    schedule = mae_schedule if recipe.schedule == "mae" else deit_schedule
    by_epoch = recipe.schedule == "deit" and recipe.warmup_unit == "epochs"

    def at(step: int) -> float:
        epoch = max(step // steps_per_epoch - 1, 0) if by_epoch else step / steps_per_epoch
        return schedule(epoch, steps / steps_per_epoch, warmup / steps_per_epoch, recipe.lr, recipe.floor)

    return at


def loss_for(recipe: Recipe) -> Callable[[Tensor, Tensor], Tensor]:
    """Of logits [B, K] and what `mix_for` makes of targets. Refuses masked patches, whose loss is another's."""
    if recipe.loss in MASKED:
        raise ValueError(f"this recipe predicts {recipe.loss}; its loss belongs to the masked model")
    if recipe.loss == "softmax":
        return partial(F.cross_entropy, label_smoothing=recipe.label_smoothing)
    bce = dict(threshold=0.0, reduction="mean") if recipe.loss == "bce" else dict(reduction="sum")
    return partial(binary_cross_entropy, **bce)


@checked
def mix_for(
    recipe: Recipe, classes: Count, patch_size: tuple[Count, Count] = (16, 16)
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """Of images and class numbers: erases boxes, blends, and makes soft targets where they are needed; None for none.

    Args:
        recipe: the record.
        classes: K.
        patch_size: of the model, for MixToken.
    """
    blend = None
    if recipe.mixtoken:
        blend = partial(mixtoken, classes=classes, alpha=recipe.mixtoken, patch_size=patch_size)
    elif recipe.mixup or recipe.cutmix:
        alphas = dict(mixup_alpha=recipe.mixup, cutmix_alpha=recipe.cutmix, smoothing=0.0)
        blend = partial(mixup_or_cutmix, classes=classes, **alphas)
    elif recipe.loss in ("bce", "sigmoid"):
        blend = partial(_soften, classes=classes)
    if not recipe.erasing:
        return blend
    return partial(_erase, probability=recipe.erasing, blend=blend)


def _soften(images: Tensor, targets: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    return images, smooth(targets, classes)


def _erase(images: Tensor, targets: Tensor, probability: float, blend: Callable | None) -> tuple[Tensor, Tensor]:
    images = random_erasing(images, probability)
    return (images, targets) if blend is None else blend(images, targets)


@checked
def objective_for(
    recipe: Recipe,
    model: nn.Module,
    transform: Transform,
    teacher: nn.Module | None = None,
    kind: Literal["hard", "soft"] = "hard",
) -> Objective:
    """What the recipe makes small.

    Args:
        recipe: the record.
        model: classifies; or a masked model, for recipes of pixels and colours.
        transform: of the images; gives colours back.
        teacher: to learn from as well.
        kind: "hard" or "soft" distillation.
    """
    if recipe.loss == "pixels":
        return masked_pixels(model.encoder.patch_embed.patch_size, recipe.norm_pixels)
    if recipe.loss == "colours":
        return masked_colours(model.encoder.patch_embed.patch_size, transform.restore)
    if teacher is None:
        return supervised(loss_for(recipe))
    if recipe.loss != "softmax":
        raise ValueError(f"distillation is defined for a softmax; this recipe's loss is {recipe.loss!r}")
    loss = DISTILLATION[kind]
    if not recipe.label_smoothing:
        return distilled(teacher, loss)

    def smoothed(student: Tensor, pupil: Tensor, judgement: Tensor, targets: Tensor) -> Tensor:
        return loss(student, pupil, judgement, smooth(targets, student.shape[1], recipe.label_smoothing))

    return distilled(teacher, smoothed)


@checked
def step_for(
    recipe: Recipe,
    model: nn.Module,
    objective: Objective,
    classes: Count,
    parts: Count = 1,
    amp: torch.dtype | None = None,
) -> Step:
    """The recipe's update of one batch.

    Args:
        recipe: the record.
        model: on its device.
        objective: from `objective_for`.
        classes: K.
        parts: pieces in which a batch's gradient is taken.
        amp: autocast dtype.
    """
    device = next(model.parameters()).device.type
    return Step(
        objective=objective,
        mix=None if recipe.loss in MASKED else mix_for(recipe, classes, *_patch_of(model)),
        parts=parts,
        amp=amp,
        scaler=GradScaler(device, enabled=amp is torch.float16),
        clip=recipe.clip,
        average=None if recipe.average is None else moving_average(model, recipe.average),
    )


def _patch_of(model: nn.Module) -> list[tuple[int, int]]:
    """The patch size of a ViT, or nothing."""
    size = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    return [] if size is None else [tuple(size)]


def score_for(recipe: Recipe, step: Step, batches: Iterable) -> Callable[[nn.Module], Score]:
    """The score of a model on test batches: accuracy, or the objective where nothing is answered."""
    options = {"batches": batches, "amp": step.amp, "world": step.world, "dealt": step.dealt}
    if recipe.loss in MASKED:
        return partial(assess, objective=step.objective, **options)
    return partial(evaluate, **options)


def prepare(recipe: Recipe, model: nn.Module, fresh: bool = True) -> None:
    """What the recipe sets in a model: rates of stochastic depth and, where it is new, positions and the head's bias.

    Args:
        recipe: the record.
        model: with the parts it is about.
        fresh: its weights are not from a checkpoint.
    """
    if recipe.drop_path_rate:
        set_drop_path(model, recipe.drop_path_rate, recipe.drop_path_constant, skip=True)
    if fresh and recipe.pos_std:
        redraw_positions(model, recipe.pos_std)
    if fresh and recipe.head_bias:
        nn.init.constant_(model.head.bias, recipe.head_bias)


def masked_for(recipe: Recipe, encoder: nn.Module, decoder: nn.Module | None = None) -> nn.Module:
    """The model that a recipe of masked patches trains around an encoder.

    Args:
        recipe: its `loss` is "pixels" or "colours".
        encoder: see masked.py.
        decoder: of a masked autoencoder, blocks of the width that `recipe.decoder` says.
    """
    if recipe.loss == "pixels":
        return MaskedAutoencoder(encoder, decoder, recipe.decoder["embed_dim"], recipe.mask_ratio)
    return MaskedPatchPrediction(encoder, 8**encoder.patch_embed.in_chans, recipe.mask_ratio)


def product(recipe: Recipe, model: nn.Module) -> nn.Module:
    """What is worth keeping of a trained model: all of it, or the encoder of a masked one."""
    return model.encoder if recipe.loss in MASKED else model
