"""Fused forwards for transformers' models, which register on import, and our attention as functions of transformers."""

from . import (  # noqa: F401
    attention_interface,
    beit,
    blocks,
    cvt,
    deformable,
    detr,
    hierarchical,
    imagegpt,
    levit,
    mask2former,
    packed,
    plain,
    positions,
    pyramids,
    qformer,
    relative,
    rotary,
    swin,
    towers,
    vit,
)
