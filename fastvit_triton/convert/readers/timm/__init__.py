"""Fused forwards for timm's models, which register on import.

`attention` has those of ViT, DINOv2, EVA and Swin, and their scale, and MLPs; `blocks` blocks and stems.
"""

from . import attention, blocks, channels, class_attention, levit, pooled, pyramids, relative, tnt  # noqa: F401
