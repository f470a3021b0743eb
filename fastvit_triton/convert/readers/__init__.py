"""Readers: what the modules of each library consist of, and their fused forwards, which register on import."""

from . import ours, ours_maps, ours_tokens, timm, torch, torchvision, transformers, vit_pytorch  # noqa: F401
