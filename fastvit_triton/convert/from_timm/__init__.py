"""Fused forwards for timm's models, which register on import."""

from . import attention, blocks, pyramids  # noqa: F401
