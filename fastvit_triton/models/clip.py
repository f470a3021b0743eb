"""CLIP's image towers — Learning transferable visual models from natural language supervision. Radford et al.,
arXiv:2103.00020. Official: openai/CLIP; also LAION's and MetaCLIP's, which use exact GELU.

Differs from ViT:
  1. A LayerNorm between embedding and blocks, no patch bias, epsilon 1e-5.
  2. `*_quickgelu_*`: x·sigmoid(1.702 x), as OpenAI trained it.
  3. The head is the projection into the shared embedding space (no softmax classes).
Adds nothing.
"""

from .config import ViTConfig
from .transformer import VisionTransformer
from .vit import BASE, GIANT, GIGANTIC, HUGE, LARGE

STEM = dict(pre_norm=True, eps=1e-5)
QUICK = dict(**STEM, act="quick_gelu")

MODEL = VisionTransformer
VARIANTS = {
    "vit_xsmall_patch16_clip_224": ViTConfig(embed_dim=256, depth=10, num_heads=4, **STEM, num_classes=512),
    "vit_medium_patch32_clip_224": ViTConfig(
        embed_dim=512, depth=12, num_heads=8, **STEM, patch_size=32, num_classes=512
    ),
    "vit_medium_patch16_clip_224": ViTConfig(embed_dim=512, depth=12, num_heads=8, **STEM, num_classes=512),
    "vit_base_patch32_clip_224": ViTConfig(**BASE, **STEM, patch_size=32),
    "vit_base_patch32_clip_256": ViTConfig(**BASE, **STEM, patch_size=32, img_size=256, num_classes=512),
    "vit_base_patch32_clip_384": ViTConfig(**BASE, **STEM, patch_size=32, img_size=384),
    "vit_base_patch32_clip_448": ViTConfig(**BASE, **STEM, patch_size=32, img_size=448),
    "vit_base_patch16_clip_224": ViTConfig(**BASE, **STEM),
    "vit_base_patch16_clip_384": ViTConfig(**BASE, **STEM, img_size=384),
    "vit_large_patch14_clip_224": ViTConfig(**LARGE, **STEM, patch_size=14),
    "vit_large_patch14_clip_336": ViTConfig(**LARGE, **STEM, patch_size=14, img_size=336),
    "vit_huge_patch14_clip_224": ViTConfig(**HUGE, **STEM, patch_size=14),
    "vit_huge_patch14_clip_336": ViTConfig(**HUGE, **STEM, patch_size=14, img_size=336),
    "vit_huge_patch14_clip_378": ViTConfig(**HUGE, **STEM, patch_size=14, img_size=378, num_classes=1024),
    "vit_giant_patch14_clip_224": ViTConfig(**GIANT, **STEM, patch_size=14, num_classes=1024),
    "vit_gigantic_patch14_clip_224": ViTConfig(**GIGANTIC, **STEM, patch_size=14, num_classes=1280),
    "vit_gigantic_patch14_clip_378": ViTConfig(**GIGANTIC, **STEM, patch_size=14, img_size=378, num_classes=1280),
    "vit_base_patch32_clip_quickgelu_224": ViTConfig(**BASE, **QUICK, patch_size=32, num_classes=512),
    "vit_base_patch16_clip_quickgelu_224": ViTConfig(**BASE, **QUICK, num_classes=512),
    "vit_large_patch14_clip_quickgelu_224": ViTConfig(**LARGE, **QUICK, patch_size=14, num_classes=768),
    "vit_large_patch14_clip_quickgelu_336": ViTConfig(**LARGE, **QUICK, patch_size=14, img_size=336, num_classes=768),
    "vit_huge_patch14_clip_quickgelu_224": ViTConfig(**HUGE, **QUICK, patch_size=14, num_classes=1024),
    "vit_huge_patch14_clip_quickgelu_378": ViTConfig(**HUGE, **QUICK, patch_size=14, img_size=378, num_classes=1024),
    "vit_gigantic_patch14_clip_quickgelu_224": ViTConfig(**GIGANTIC, **QUICK, patch_size=14, num_classes=1280),
}
ORACLE = dict.fromkeys(VARIANTS, "timm")

# Counted by timm 1.0.31 with 1000 classes.
PARAMS = {
    "vit_base_patch32_clip_224": 88_225_000,
    "vit_large_patch14_clip_224": 304_204_776,
}
