"""Fused forwards for transformers' models, which register on import, and our attention as functions of transformers."""

from . import (  # noqa: F401
    attention_interface,
    beit,
    blocks,
    deformable,
    detr,
    imagegpt,
    packed,
    plain,
    pyramids,
    relative,
    rotary,
    swin,
    towers,
    vit,
)
