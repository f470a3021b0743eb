"""Training utilities in plain PyTorch, for any `nn.Module`: use one of them, or all through `fastvit-triton train`."""

from .accumulate import accumulate
from .augment import random_affine, random_erasing
from .average import moving_average
from .checkpoint import load_state, newest_state, restore, save_state, state_of
from .data import Data, TensorBatches, load
from .distill import hard_distillation, soft_distillation
from .drop_path import set_drop_path
from .fewshot import extract, few, few_shot, nearest_neighbours, ridge
from .image import Transform
from .lamb import Lamb
from .loop import Diverged, Progress, Score, assess, evaluate, fit
from .loss import (
    binary_cross_entropy,
    patch_contrastive_loss,
    patch_mixing_loss,
    similarity_loss,
    smooth,
    soft_cross_entropy,
    token_label_loss,
)
from .masked import MaskedAutoencoder, MaskedPatchPrediction, colour_loss, mean_colours, pixel_loss
from .mix import cut_box, cutmix, mix_by_area, mix_tokens, mixtoken, mixup, mixup_or_cutmix
from .naflex import TokenBudgetBatches
from .objective import distilled, masked_colours, masked_pixels, supervised
from .optim import adamw, parameter_groups, set_lr, warmup_cosine
from .parallel import World, checkpoint_blocks, ddp, find_blocks, fsdp, join
from .policy import big_vision_augment, rand_augment, three_augment
from .published import PUBLISHED
from .recipes import DIGITS, FOLDER, Recipe, shorten
from .sampler import RepeatedAugmentation
from .schedule import constant, deit_schedule, mae_schedule, vit_schedule
from .sharded import consolidate, full_state, load_full_state, load_sharded, newest_sharded, save_sharded
from .shards import pack
from .step import Step

__all__ = [
    "DIGITS",
    "FOLDER",
    "PUBLISHED",
    "Data",
    "Diverged",
    "Lamb",
    "MaskedAutoencoder",
    "MaskedPatchPrediction",
    "Progress",
    "Recipe",
    "RepeatedAugmentation",
    "Score",
    "Step",
    "TensorBatches",
    "TokenBudgetBatches",
    "Transform",
    "World",
    "accumulate",
    "adamw",
    "assess",
    "big_vision_augment",
    "binary_cross_entropy",
    "checkpoint_blocks",
    "colour_loss",
    "consolidate",
    "constant",
    "cut_box",
    "cutmix",
    "ddp",
    "deit_schedule",
    "distilled",
    "evaluate",
    "extract",
    "few",
    "few_shot",
    "find_blocks",
    "fit",
    "fsdp",
    "full_state",
    "hard_distillation",
    "join",
    "load",
    "load_full_state",
    "load_sharded",
    "load_state",
    "mae_schedule",
    "masked_colours",
    "masked_pixels",
    "mean_colours",
    "mix_by_area",
    "mix_tokens",
    "mixtoken",
    "mixup",
    "mixup_or_cutmix",
    "moving_average",
    "nearest_neighbours",
    "newest_sharded",
    "newest_state",
    "pack",
    "parameter_groups",
    "patch_contrastive_loss",
    "patch_mixing_loss",
    "pixel_loss",
    "rand_augment",
    "random_affine",
    "random_erasing",
    "restore",
    "ridge",
    "save_sharded",
    "save_state",
    "set_drop_path",
    "set_lr",
    "shorten",
    "similarity_loss",
    "smooth",
    "soft_cross_entropy",
    "soft_distillation",
    "state_of",
    "supervised",
    "three_augment",
    "token_label_loss",
    "vit_schedule",
    "warmup_cosine",
]
