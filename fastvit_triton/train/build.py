"""Builds the components of a training run from a recipe: optimiser, schedule, objective, mixing, step, evaluation."""

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from .augment import random_erasing
from .augment.mix import mixtoken, mixup_or_cutmix
from .data.transform import Transform
from .detection import criterion_of, detected, evaluate_detector
from .distributed import World
from .drop_path import set_drop_path
from .ema import ema_model
from .generative import Likelihood, Restoration
from .loop import Score, evaluate, evaluate_objective
from .loss import (
    binary_cross_entropy,
    hard_distillation,
    smooth_labels,
    soft_distillation,
    weighted_cross_entropy,
)
from .masked import Encoder, MaskedAutoencoder, MaskedPatchPrediction
from .muon import muon_adamw
from .object_reference import resolve
from .objective import Objective, distilled, masked_colours, masked_pixels, mean_of_images, supervised
from .optim import Lamb, adamw, parameter_groups, reinit_pos_embed, warmup_cosine
from .ranges import PositiveInt, checked
from .recipes import Recipe
from .schedule import deit_schedule, mae_schedule, vit_schedule
from .step import Step

PER_IMAGE = ("likelihood", "restoration")  # losses that a module of generative.py computes of each image
SELF_SUPERVISED = ("pixels", "colours", *PER_IMAGE)  # losses of models around an encoder, which return no logits
UNMIXED = (*SELF_SUPERVISED, "detection")  # losses of images that cannot be blended
DISTILLATION = {"hard": hard_distillation, "soft": soft_distillation}


def build_optimizer(recipe: Recipe, model: nn.Module) -> Optimizer:
    """The recipe's optimiser over `parameter_groups` of the model.

    A class given as `module:Class` is called with the groups, `lr` and, if it accepts it, `weight_decay`; groups have
    their own weight decay and, with layer-wise decay, their `lr_scale`, which `set_lr` applies.
    """
    if recipe.optimizer in ("adamw", "muon"):
        build = adamw if recipe.optimizer == "adamw" else muon_adamw
        return build(model, recipe.lr, recipe.weight_decay, recipe.betas, recipe.layer_decay, recipe.lr_scales)
    groups = parameter_groups(model, recipe.weight_decay, recipe.layer_decay, lr_scales=recipe.lr_scales)
    if ":" in recipe.optimizer:
        return _construct(recipe.optimizer, groups, recipe)
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=recipe.lr, momentum=0.9)
    return Lamb(groups, lr=recipe.lr, betas=recipe.betas, eps=1e-8)


def optimizer_class(option: str, reference: str) -> type[Optimizer]:
    """The class that `module:Class` names; raises ValueError unless it is an optimiser."""
    cls = resolve(option, reference)
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        raise ValueError(f"{option} is {reference}, which is no optimiser; use a subclass of torch.optim.Optimizer")
    return cls


def _construct(reference: str, groups: list[dict], recipe: Recipe) -> Optimizer:
    cls: Any = optimizer_class("optimizer", reference)
    options: dict[str, Any] = {"lr": recipe.lr}
    if "weight_decay" in inspect.signature(cls).parameters:
        options["weight_decay"] = recipe.weight_decay
    try:
        return cls(groups, **options)
    except (TypeError, ValueError) as error:
        text = "it is called with parameter groups and lr"
        raise ValueError(f"optimizer {reference} cannot be constructed: {error}; {text}") from error


@checked
def build_lr(recipe: Recipe, steps_per_epoch: PositiveInt) -> Callable[[int], float]:
    """The learning-rate schedule: a function from the global step, starting at 0, to the learning rate.

    DeiT updates its rate once per epoch. With per-epoch updates, a run shorter than the published warm-up would never
    leave the warm-up, so runs that `override_recipe` shortened update the rate at every step.
    """
    steps = recipe.steps or recipe.epochs_of(steps_per_epoch) * steps_per_epoch
    warmup = recipe.warmup * {"run": steps, "epochs": steps_per_epoch, "steps": 1}[recipe.warmup_unit]
    if recipe.schedule == "own":
        return partial(warmup_cosine, steps=steps, warmup=int(warmup), peak=recipe.lr, floor=recipe.floor)
    if warmup >= steps:
        raise ValueError(
            f"warmup is {warmup:.0f} of {steps} steps; take more epochs, "
            "smaller batches or a fraction of the run, such as 0.1"
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


def build_loss(recipe: Recipe, class_weights: Tensor | None = None) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss function of logits [B, K] and targets [B] or [B, K]."""
    if recipe.loss in UNMIXED:
        raise ValueError(f"this recipe predicts {recipe.loss}; its loss is part of the model's objective")
    if class_weights is not None:
        if recipe.loss != "softmax":
            raise ValueError(f"class_weights needs loss 'softmax'; this recipe's loss is {recipe.loss!r}")
        return partial(weighted_cross_entropy, weights=class_weights, smoothing=recipe.label_smoothing)
    losses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "softmax": partial(F.cross_entropy, label_smoothing=recipe.label_smoothing),
        "sigmoid": partial(binary_cross_entropy, reduction="sum"),
        "bce": partial(binary_cross_entropy, threshold=0.0, reduction="mean"),
    }
    return losses[recipe.loss]


@checked
def build_mix(
    recipe: Recipe, classes: PositiveInt, patch_size: tuple[PositiveInt, PositiveInt] = (16, 16)
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """The batch augmentation: random erasing, then mixing, which makes soft targets; None if the recipe has neither."""
    soft = recipe.loss in ("bce", "sigmoid")  # which need targets for each class

    def mix(images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if recipe.erasing:
            images = random_erasing(images, recipe.erasing)
        if recipe.mixtoken:
            return mixtoken(images, targets, classes, recipe.mixtoken, patch_size)
        if recipe.mixup or recipe.cutmix:
            alphas = {"mixup_alpha": recipe.mixup, "cutmix_alpha": recipe.cutmix}
            return mixup_or_cutmix(images, targets, classes, **alphas, smoothing=0.0)
        return images, smooth_labels(targets, classes) if soft else targets

    return mix if recipe.erasing or recipe.mixtoken or recipe.mixup or recipe.cutmix or soft else None


@checked
def build_objective(
    recipe: Recipe,
    model: nn.Module,
    transform: Transform,
    teacher: nn.Module | None = None,
    kind: Literal["hard", "soft"] = "hard",
    class_weights: Tensor | None = None,
    world: World | None = None,
) -> Objective:
    """The training objective, see objective.py."""
    if class_weights is not None and (teacher is not None or recipe.loss in UNMIXED):
        what = "a teacher" if teacher is not None else f"loss {recipe.loss!r}"
        raise ValueError(f"class_weights cannot be combined with {what}; leave it out")
    encoder: Any = getattr(model, "encoder", None)
    if recipe.loss == "pixels":
        return masked_pixels(encoder.patch_embed.patch_size, recipe.norm_pixels)
    if recipe.loss == "colours":
        return masked_colours(encoder.patch_embed.patch_size, transform.restore)
    if recipe.loss in PER_IMAGE:
        return mean_of_images
    if recipe.loss == "detection":
        return detected(criterion_of(model, world))
    if teacher is None:
        return supervised(build_loss(recipe, class_weights))
    if recipe.loss != "softmax":
        raise ValueError(f"distillation needs loss 'softmax'; this recipe's loss is {recipe.loss!r}")
    loss = DISTILLATION[kind]
    if not recipe.label_smoothing:
        return distilled(teacher, loss)

    def smoothed(logits: Tensor, distillation_logits: Tensor, teacher_logits: Tensor, targets: Tensor) -> Tensor:
        soft = smooth_labels(targets, logits.shape[1], recipe.label_smoothing)
        return loss(logits, distillation_logits, teacher_logits, soft)

    return distilled(teacher, smoothed)


@checked
def build_step(
    recipe: Recipe,
    model: nn.Module,
    objective: Objective,
    classes: PositiveInt,
    grad_accum_steps: PositiveInt = 1,
    amp: torch.dtype | None = None,
) -> Step:
    """One optimiser step of the recipe."""
    device = next(model.parameters()).device.type
    size = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    patches = [] if size is None else [tuple(size)]
    return Step(
        objective=objective,
        mix=None if recipe.loss in UNMIXED else build_mix(recipe, classes, *patches),
        grad_accum_steps=grad_accum_steps,
        amp=amp,
        scaler=GradScaler(device, enabled=amp is torch.float16),
        clip=recipe.clip,
        ema=None if recipe.ema_decay is None else ema_model(model, recipe.ema_decay),
    )


def build_test(recipe: Recipe, step: Step, batches: Iterable) -> Callable[[nn.Module], Score]:
    """A function that scores a model on test batches: accuracy, or the mean objective for self-supervised recipes."""
    options: Any = dict(batches=batches, amp=step.amp, world=step.world, per_rank_batches=step.per_rank_batches)
    if recipe.loss == "detection":
        return partial(evaluate_detector, **options)
    if recipe.loss in SELF_SUPERVISED:
        return partial(evaluate_objective, objective=step.objective, **options)
    return partial(evaluate, **options)


def configure_model(recipe: Recipe, model: nn.Module, fresh: bool = True) -> None:
    """Applies the recipe's model settings in place: drop-path rates and, for a new model, positions and head bias."""
    if recipe.drop_path_rate:
        set_drop_path(model, recipe.drop_path_rate, recipe.drop_path_constant, skip=True)
    if fresh and recipe.pos_std:
        reinit_pos_embed(model, recipe.pos_std)
    if fresh and recipe.head_bias:
        nn.init.constant_(model.get_parameter("head.bias"), recipe.head_bias)


def build_masked_model(recipe: Recipe, encoder: Encoder, decoder: nn.Module | None = None) -> nn.Module:
    """The self-supervised model that the recipe trains around an encoder."""
    plain = hasattr(encoder, "positions") and getattr(encoder, "layout", "vit") == "vit"
    if not plain or hasattr(encoder, "pos_block"):  # convolutions need the whole grid
        raise ValueError(f"masked pre-training needs a plain ViT as encoder, not {type(encoder).__name__}")
    if recipe.loss == "pixels":
        assert decoder is not None, "a masked autoencoder needs decoder blocks"
        return MaskedAutoencoder(encoder, decoder, recipe.decoder["embed_dim"], recipe.mask_ratio)
    return MaskedPatchPrediction(encoder, 8**encoder.patch_embed.in_chans, recipe.mask_ratio)


def build_generative_model(recipe: Recipe, encoder: nn.Module, transform: Transform) -> nn.Module:
    """The module that computes the loss of each image, which the recipe trains."""
    task = {"likelihood": "generate", "restoration": "restore"}[recipe.loss]
    if getattr(encoder, "task", "classify") != task:
        models = "igpt_* and image_transformer_*" if task == "generate" else "ipt_*"
        raise ValueError(f"loss {recipe.loss!r} trains {models}, not {recipe.model}")
    return (Likelihood if task == "generate" else Restoration)(encoder, transform.restore)
