"""Benchmarks. Importing this package makes timm and torchvision importable with a CPU-only torch."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads that spin disturb measurements

import torch

from fastvit_triton.measure.variants import declare_torchvision_ops

if torch.version.cuda is None and torch.version.hip is None:
    declare_torchvision_ops()
