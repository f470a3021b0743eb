"""Measurements. Importing this package makes timm and torchvision importable beside a CPU-only torch."""

import torch

from fastvit_triton.measure.arms import declare

if torch.version.cuda is None and torch.version.hip is None:
    declare()
