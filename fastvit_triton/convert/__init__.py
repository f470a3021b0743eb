"""Models that are not ours: fused forwards for modules of timm, transformers, torchvision, vit-pytorch and torch."""

from .modules import optimize, revert
from .report import Report, Row

__all__ = ["Report", "Row", "optimize", "revert"]
