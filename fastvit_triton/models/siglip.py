"""SigLIP's image towers — Sigmoid loss for language image pre-training. Zhai et al., arXiv:2303.15343.

Official: google-research/big_vision.

Differs from ViT:
  1. No class token: one learned query attends to all tokens ("map" pooling); `*_gap_*` takes their mean instead.
  2. No head: the pooled features are the embedding. Some sizes use tanh-GELU, as their checkpoints do.
Adds nothing. "so400m" is the shape-optimised size of arXiv:2305.13035, Table 2.
"""

from typing import Any

from .config import ViTConfig
from .transformer import VisionTransformer
from .vit import BASE, LARGE

SO400M = ViTConfig(embed_dim=1152, depth=27, num_heads=16, mlp_ratio=3.7362)
GIANTOPT = ViTConfig(embed_dim=1536, depth=40, num_heads=16)

# size name → (shape, patch, image sides, activation)
TOWERS = (
    ("base_patch32", BASE, 32, (256,), "gelu_tanh"),
    ("base_patch16", BASE, 16, (224, 256, 384, 512), "gelu"),
    ("large_patch16", LARGE, 16, (256, 384), "gelu"),
    ("large_patch16", LARGE, 16, (512,), "gelu_tanh"),
    ("so400m_patch14", SO400M, 14, (224, 378), "gelu"),
    ("so400m_patch16", SO400M, 16, (256, 384, 512), "gelu_tanh"),
    ("giantopt_patch16", GIANTOPT, 16, (256, 384), "gelu_tanh"),
)
POOLS: dict[str, dict[str, Any]] = {"": dict(global_pool="map"), "gap_": dict(global_pool="avg", fc_norm=False)}

MODEL = VisionTransformer
VARIANTS = {
    f"vit_{size}_siglip_{gap}{side}": shape.replace(
        **pool, act=act, patch_size=patch, img_size=side, class_token=False, num_classes=0
    )
    for size, shape, patch, sides, act in TOWERS
    for side in sides
    for gap, pool in POOLS.items()
}
ORACLE = dict.fromkeys(VARIANTS, "timm")

# Counted by timm 1.0.31 with 1000 classes.
PARAMS = {
    "vit_base_patch16_siglip_224": 93_653_224,
    "vit_so400m_patch14_siglip_gap_224": 413_595_352,
}
