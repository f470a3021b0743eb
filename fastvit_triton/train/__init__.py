"""Training utilities in plain PyTorch, for any `nn.Module`: use one of them, or all through `fastvit-triton train`."""

from .augment import random_affine
from .checkpoint import load_state, restore, save_state
from .data import Data, TensorBatches, load
from .distill import hard_distillation, soft_distillation
from .image import Transform
from .loop import Progress, Score, evaluate, fit
from .mix import mixup
from .optim import adamw, parameter_groups, warmup_cosine
from .recipes import DIGITS, FOLDER, Recipe

__all__ = [
    "DIGITS",
    "FOLDER",
    "Data",
    "Progress",
    "Recipe",
    "Score",
    "TensorBatches",
    "Transform",
    "adamw",
    "evaluate",
    "fit",
    "hard_distillation",
    "load",
    "load_state",
    "mixup",
    "parameter_groups",
    "random_affine",
    "restore",
    "save_state",
    "soft_distillation",
    "warmup_cosine",
]
