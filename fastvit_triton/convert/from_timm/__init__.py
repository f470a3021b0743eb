"""Fused forwards for timm's models, which register on import."""

from . import attention, blocks, channels, gated, levit, pooled, pyramids, relative  # noqa: F401
