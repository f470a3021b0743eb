"""Fused forwards for timm's models, which register on import."""

from . import attention, blocks, channels, class_attention, levit, pooled, pyramids, relative, tnt  # noqa: F401
