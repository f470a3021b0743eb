"""Fused forwards for timm's models, which register on import."""

from . import attention, blocks, channels, convnext, crossvit, gated, levit, pooled, pyramids, relative, tnt  # noqa: F401
