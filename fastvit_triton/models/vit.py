"""ViT — An image is worth 16x16 words. Dosovitskiy et al., arXiv:2010.11929.

Official: google-research/vision_transformer.
The plain Transformer itself (`VisionTransformer`), in the sizes of the paper's Table 1, of "How to train your ViT"
(arXiv:2106.10270: Ti, S) and of "Scaling vision transformers" (arXiv:2106.04560: g, G).
Differs from the JAX code: exact (erf) GELU, as in timm; act="gelu_tanh" and weight_init="jax" give the original.
`*_postnorm_*` normalises after the residual sum, LN(x + f(x)), and has no final norm.
Adds nothing.
"""

from .config import ViTConfig
from .transformer import VisionTransformer

TINY = ViTConfig(embed_dim=192, depth=12, num_heads=3)
SMALL = ViTConfig(embed_dim=384, depth=12, num_heads=6)
BASE = ViTConfig(embed_dim=768, depth=12, num_heads=12)
LARGE = ViTConfig(embed_dim=1024, depth=24, num_heads=16)
HUGE = ViTConfig(embed_dim=1280, depth=32, num_heads=16)
GIANT = ViTConfig(embed_dim=1408, depth=40, num_heads=16, mlp_ratio=48 / 11)
GIGANTIC = ViTConfig(embed_dim=1664, depth=48, num_heads=16, mlp_ratio=64 / 13)

MODEL = VisionTransformer
VARIANTS = {
    "vit_tiny_patch16_224": TINY.replace(patch_size=16),
    "vit_tiny_patch16_384": TINY.replace(patch_size=16, img_size=384),
    "vit_small_patch32_224": SMALL.replace(patch_size=32),
    "vit_small_patch32_384": SMALL.replace(patch_size=32, img_size=384),
    "vit_small_patch16_224": SMALL.replace(patch_size=16),
    "vit_small_patch16_384": SMALL.replace(patch_size=16, img_size=384),
    "vit_small_patch8_224": SMALL.replace(patch_size=8, num_classes=0),
    "vit_base_patch32_224": BASE.replace(patch_size=32),
    "vit_base_patch32_384": BASE.replace(patch_size=32, img_size=384),
    "vit_base_patch16_224": BASE.replace(patch_size=16),
    "vit_base_patch16_384": BASE.replace(patch_size=16, img_size=384),
    "vit_base_patch8_224": BASE.replace(patch_size=8),
    "vit_large_patch32_224": LARGE.replace(patch_size=32, num_classes=0),
    "vit_large_patch32_384": LARGE.replace(patch_size=32, img_size=384),
    "vit_large_patch16_224": LARGE.replace(patch_size=16),
    "vit_large_patch16_384": LARGE.replace(patch_size=16, img_size=384),
    "vit_large_patch14_224": LARGE.replace(patch_size=14),
    "vit_huge_patch14_224": HUGE.replace(patch_size=14, num_classes=0),
    "vit_giant_patch14_224": GIANT.replace(patch_size=14),
    "vit_gigantic_patch14_224": GIGANTIC.replace(patch_size=14),
    "vit_tiny_patch16_postnorm_224": TINY.replace(norm="post"),
    "vit_small_patch16_postnorm_224": SMALL.replace(norm="post"),
    "vit_base_patch16_postnorm_224": BASE.replace(norm="post"),
    "vit_digits_patch2_8": ViTConfig(
        embed_dim=64, depth=4, num_heads=2, patch_size=2, img_size=8, in_chans=1, num_classes=10
    ),
}
ORACLE = {name: "timm" for name in VARIANTS if "_postnorm_" not in name and "_digits_" not in name}

# Counted by timm 1.0.31 with 1000 classes.
PARAMS = {
    "vit_tiny_patch16_224": 5_717_416,
    "vit_small_patch32_224": 22_878_952,
    "vit_small_patch16_224": 22_050_664,
    "vit_base_patch32_224": 88_224_232,
    "vit_base_patch16_224": 86_567_656,
    "vit_base_patch16_384": 86_859_496,
    "vit_base_patch8_224": 86_576_872,
    "vit_large_patch32_224": 306_535_400,
    "vit_large_patch16_224": 304_326_632,
    "vit_large_patch14_224": 304_203_752,
    "vit_huge_patch14_224": 632_045_800,
    "vit_giant_patch14_224": 1_012_611_432,
    "vit_gigantic_patch14_224": 1_844_440_680,
}
