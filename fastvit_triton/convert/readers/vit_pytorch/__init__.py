"""Fused forwards for vit-pytorch's models, which register on import."""

from . import maps, tokens  # noqa: F401
