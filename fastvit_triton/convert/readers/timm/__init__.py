"""Fused forwards for timm's models, which register on import."""

from . import attention, blocks, channels, class_attention, convnext, gated, levit, pooled, pyramids, relative, tnt  # noqa: F401
