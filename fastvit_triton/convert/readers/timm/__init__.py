"""Fused forwards for timm's models, which register on import."""

from . import attention, blocks, channels, convnext, gated, levit, pooled, pyramids, relative  # noqa: F401
