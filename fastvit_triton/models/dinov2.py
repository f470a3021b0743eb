"""DINOv2 — Learning robust visual features without supervision. Oquab et al., arXiv:2304.07193.

Registers: Darcet et al., arXiv:2309.16588. Official: facebookresearch/dinov2.

Differs from ViT:
  1. LayerScale 1e-5, patch 14, image 518, no head. 2. The giant's MLP is SwiGLU with 8/3 D hidden channels.
  3. `*_reg4_*`: four register tokens, and positions for patches only (as timm folds the official checkpoint).
Adds nothing.
"""

from .config import ViTConfig
from .transformer import VisionTransformer
from .vit import BASE, LARGE, SMALL

COMMON = dict(patch_size=14, img_size=518, init_values=1e-5, num_classes=0)
REG4 = dict(reg_tokens=4, no_embed_class=True)
GIANT = ViTConfig(embed_dim=1536, depth=40, num_heads=24, mlp="swiglu", mlp_ratio=2.66667 * 2)


class Dinov2(VisionTransformer):
    """ViT that interpolates positions as the official code does; with registers this is timm's method."""

    position_resize = "dinov2"


MODEL = Dinov2
VARIANTS = {
    "vit_small_patch14_dinov2": SMALL.replace(**COMMON),
    "vit_base_patch14_dinov2": BASE.replace(**COMMON),
    "vit_large_patch14_dinov2": LARGE.replace(**COMMON),
    "vit_giant_patch14_dinov2": GIANT.replace(**COMMON),
    "vit_small_patch14_reg4_dinov2": SMALL.replace(**COMMON, **REG4),
    "vit_base_patch14_reg4_dinov2": BASE.replace(**COMMON, **REG4),
    "vit_large_patch14_reg4_dinov2": LARGE.replace(**COMMON, **REG4),
    "vit_giant_patch14_reg4_dinov2": GIANT.replace(**COMMON, **REG4),
}
MODELS = {name: VisionTransformer for name in VARIANTS if "_reg4_" in name}
ORACLE = dict.fromkeys(VARIANTS, "timm")

# Counted by timm 1.0.31 with 1000 classes.
PARAMS = {
    "vit_small_patch14_dinov2": 22_441_192,
    "vit_base_patch14_dinov2": 87_348_712,
    "vit_large_patch14_reg4_dinov2": 305_395_688,
    "vit_giant_patch14_reg4_dinov2": 1_138_020_840,
}
