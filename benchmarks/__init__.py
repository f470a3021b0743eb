"""Measurements. Importing this package makes timm and torchvision importable beside a CPU-only torch."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin make noise of each other's work

import torch

from fastvit_triton.measure.variants import declare

if torch.version.cuda is None and torch.version.hip is None:
    declare()
