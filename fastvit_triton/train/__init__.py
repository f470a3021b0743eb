"""Training utilities in plain PyTorch, for any `nn.Module`; `fastvit-triton train` combines them.

A model, a recipe and the name of a data set go in; a folder with weights, logs and states to resume from comes out.
`sources` opens data by name, `data` and `detection` give batches, `loss` has the losses, which `objective` applies to a
model and a batch and `build` finds for a recipe, `step` an optimiser's step, `checkpoint` and `distributed` what is
saved and shared.

Begin with `run`, which goes from settings to a run, then `loop`.
"""

import types as _types

from .augment import random_affine as random_affine
from .augment import random_erasing as random_erasing
from .augment.mix import cut_box as cut_box
from .augment.mix import cutmix as cutmix
from .augment.mix import mix_by_area as mix_by_area
from .augment.mix import mix_tokens as mix_tokens
from .augment.mix import mixtoken as mixtoken
from .augment.mix import mixup as mixup
from .augment.mix import mixup_or_cutmix as mixup_or_cutmix
from .augment.policy import big_vision_augment as big_vision_augment
from .augment.policy import rand_augment as rand_augment
from .augment.policy import three_augment as three_augment
from .checkpoint import load_state as load_state
from .checkpoint import make_state as make_state
from .checkpoint import newest_state as newest_state
from .checkpoint import restore as restore
from .checkpoint import save_state as save_state
from .data import Data as Data
from .data import TensorBatches as TensorBatches
from .data.naflex import TokenBudgetBatches as TokenBudgetBatches
from .data.sample import sample_pictures as sample_pictures
from .data.sampler import RepeatedAugmentation as RepeatedAugmentation
from .data.shards import pack as pack
from .data.transform import Transform as Transform
from .distributed import World as World
from .distributed import process_group as process_group
from .distributed.checkpoint import consolidate as consolidate
from .distributed.checkpoint import full_state as full_state
from .distributed.checkpoint import load_full_state as load_full_state
from .distributed.checkpoint import load_sharded as load_sharded
from .distributed.checkpoint import newest_sharded as newest_sharded
from .distributed.checkpoint import save_sharded as save_sharded
from .distributed.parallel import checkpoint_blocks as checkpoint_blocks
from .distributed.parallel import ddp as ddp
from .distributed.parallel import find_blocks as find_blocks
from .distributed.parallel import fsdp as fsdp
from .drop_path import set_drop_path as set_drop_path
from .ema import ema_model as ema_model
from .fewshot import extract_features as extract_features
from .fewshot import few_shot as few_shot
from .fewshot import nearest_neighbours as nearest_neighbours
from .fewshot import ridge as ridge
from .fewshot import sample_per_class as sample_per_class
from .loop import Diverged as Diverged
from .loop import Progress as Progress
from .loop import Score as Score
from .loop import evaluate as evaluate
from .loop import evaluate_objective as evaluate_objective
from .loop import fit as fit
from .loss import binary_cross_entropy as binary_cross_entropy
from .loss import hard_distillation as hard_distillation
from .loss import patch_contrastive_loss as patch_contrastive_loss
from .loss import patch_mixing_loss as patch_mixing_loss
from .loss import similarity_loss as similarity_loss
from .loss import smooth_labels as smooth_labels
from .loss import soft_cross_entropy as soft_cross_entropy
from .loss import soft_distillation as soft_distillation
from .loss import token_label_loss as token_label_loss
from .masked import MaskedAutoencoder as MaskedAutoencoder
from .masked import MaskedPatchPrediction as MaskedPatchPrediction
from .masked import colour_loss as colour_loss
from .masked import mean_colours as mean_colours
from .masked import pixel_loss as pixel_loss
from .muon import MuonAdamW as MuonAdamW
from .muon import muon_adamw as muon_adamw
from .objective import distilled as distilled
from .objective import masked_colours as masked_colours
from .objective import masked_pixels as masked_pixels
from .objective import supervised as supervised
from .optim import Lamb as Lamb
from .optim import adamw as adamw
from .optim import parameter_groups as parameter_groups
from .optim import set_lr as set_lr
from .optim import warmup_cosine as warmup_cosine
from .recipes import DIGITS as DIGITS
from .recipes import FOLDER as FOLDER
from .recipes import Recipe as Recipe
from .recipes import override_recipe as override_recipe
from .recipes.published import PUBLISHED as PUBLISHED
from .run import Models as Models
from .run import Run as Run
from .schedule import constant as constant
from .schedule import deit_schedule as deit_schedule
from .schedule import mae_schedule as mae_schedule
from .schedule import vit_schedule as vit_schedule
from .settings import resolve_settings as resolve_settings
from .sources import load as load
from .step import Step as Step
from .step import StepResult as StepResult
from .step import accumulate_gradients as accumulate_gradients
from .stopping import Stopped as Stopped
from .stopping import listening as listening
from .trainer import Trainer as Trainer
from .trainer import build_trainer as build_trainer

# The imports are the list of public names; modules that they bring are no part of it.
__all__ = sorted(n for n, value in globals().items() if n[0] != "_" and not isinstance(value, _types.ModuleType))
