"""Fused forwards for transformers' models, which register on import, and our attention as functions of transformers.

`vit` has attention of ViT, DeiT, DINOv2, DINOv3, CLIP and SigLIP, `blocks` their blocks, and their attention in
transformers 4; `plain`, `towers`, `rotary` and `packed` have vision towers of multimodal models; the others are named
after what they hold.
"""

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
