"""Training utilities in plain PyTorch, for any `nn.Module`; `fastvit-triton train` combines them.

A model, a recipe and the name of a data set go in; a folder with weights, logs and states to resume from comes out.
`sources` opens data by name, `data` and `detection` give batches, `objective` has the loss, `step` an optimiser's step,
`checkpoint` and `distributed` what is saved and shared.

Begin with `run`, which goes from settings to a run, then `loop`.
"""

from .augment import random_affine, random_erasing
from .augment.mix import cut_box, cutmix, mix_by_area, mix_tokens, mixtoken, mixup, mixup_or_cutmix
from .augment.policy import big_vision_augment, rand_augment, three_augment
from .checkpoint import load_state, make_state, newest_state, restore, save_state
from .data import Data, TensorBatches
from .data.naflex import TokenBudgetBatches
from .data.sample import sample_pictures
from .data.sampler import RepeatedAugmentation
from .data.shards import pack
from .data.transform import Transform
from .distributed import World, process_group
from .distributed.checkpoint import (
    consolidate,
    full_state,
    load_full_state,
    load_sharded,
    newest_sharded,
    save_sharded,
)
from .distributed.parallel import checkpoint_blocks, ddp, find_blocks, fsdp
from .drop_path import set_drop_path
from .ema import ema_model
from .fewshot import extract_features, few_shot, nearest_neighbours, ridge, sample_per_class
from .loop import Diverged, Progress, Score, evaluate, evaluate_objective, fit
from .loss import (
    binary_cross_entropy,
    hard_distillation,
    patch_contrastive_loss,
    patch_mixing_loss,
    similarity_loss,
    smooth_labels,
    soft_cross_entropy,
    soft_distillation,
    token_label_loss,
)
from .masked import MaskedAutoencoder, MaskedPatchPrediction, colour_loss, mean_colours, pixel_loss
from .muon import MuonAdamW, muon_adamw
from .objective import distilled, masked_colours, masked_pixels, supervised
from .optim import Lamb, adamw, parameter_groups, set_lr, warmup_cosine
from .recipes import DIGITS, FOLDER, Recipe, override_recipe
from .recipes.published import PUBLISHED
from .run import Models, Run
from .schedule import constant, deit_schedule, mae_schedule, vit_schedule
from .settings import resolve_settings
from .sources import load
from .step import Step, StepResult, accumulate_gradients
from .stopping import Stopped, listening
from .trainer import Trainer, build_trainer

__all__ = [
    "DIGITS",
    "FOLDER",
    "PUBLISHED",
    "Data",
    "Diverged",
    "Lamb",
    "MaskedAutoencoder",
    "MaskedPatchPrediction",
    "Models",
    "MuonAdamW",
    "Progress",
    "Recipe",
    "RepeatedAugmentation",
    "Run",
    "Score",
    "Step",
    "StepResult",
    "Stopped",
    "TensorBatches",
    "TokenBudgetBatches",
    "Trainer",
    "Transform",
    "World",
    "accumulate_gradients",
    "adamw",
    "big_vision_augment",
    "binary_cross_entropy",
    "build_trainer",
    "checkpoint_blocks",
    "colour_loss",
    "consolidate",
    "constant",
    "cut_box",
    "cutmix",
    "ddp",
    "deit_schedule",
    "distilled",
    "ema_model",
    "evaluate",
    "evaluate_objective",
    "extract_features",
    "few_shot",
    "find_blocks",
    "fit",
    "fsdp",
    "full_state",
    "hard_distillation",
    "listening",
    "load",
    "load_full_state",
    "load_sharded",
    "load_state",
    "mae_schedule",
    "make_state",
    "masked_colours",
    "masked_pixels",
    "mean_colours",
    "mix_by_area",
    "mix_tokens",
    "mixtoken",
    "mixup",
    "mixup_or_cutmix",
    "muon_adamw",
    "nearest_neighbours",
    "newest_sharded",
    "newest_state",
    "override_recipe",
    "pack",
    "parameter_groups",
    "patch_contrastive_loss",
    "patch_mixing_loss",
    "pixel_loss",
    "process_group",
    "rand_augment",
    "random_affine",
    "random_erasing",
    "resolve_settings",
    "restore",
    "ridge",
    "sample_per_class",
    "sample_pictures",
    "save_sharded",
    "save_state",
    "set_drop_path",
    "set_lr",
    "similarity_loss",
    "smooth_labels",
    "soft_cross_entropy",
    "soft_distillation",
    "supervised",
    "three_augment",
    "token_label_loss",
    "vit_schedule",
    "warmup_cosine",
]
