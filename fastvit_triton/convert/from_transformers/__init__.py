"""Fused forwards for transformers' models, which register on import, and our attention as functions of transformers."""

from . import attention_interface, beit, blocks, plain, pyramids, relative, rotary, swin, towers, vit  # noqa: F401
