"""CLIP's image towers — Learning transferable visual models from natural language supervision. Radford et al.,
arXiv:2103.00020. Official: openai/CLIP; also LAION's and MetaCLIP's, which use exact GELU.

Differs from ViT:
  1. A LayerNorm between embedding and blocks, no patch bias, epsilon 1e-5.
  2. `*_quickgelu_*`: x·sigmoid(1.702 x), as OpenAI trained it.
  3. The head is the projection into the shared embedding space (no softmax classes).
Adds nothing.
"""

from dataclasses import replace

from ..checkpoints.tensors import State
from .config import Options, ViTConfig
from .siglip import SIGLIP, write_tower
from .transformer import VisionTransformer
from .vit import BASE, GIANT, GIGANTIC, HUGE, LARGE, PLAIN, TOKEN

XSMALL: Options = dict(embed_dim=256, depth=10, num_heads=4)
MEDIUM: Options = dict(embed_dim=512, depth=12, num_heads=8)
STEM = dict(pre_norm=True, eps=1e-5)
QUICK = dict(**STEM, act="quick_gelu")

CONFIG = ViTConfig
MODEL = VisionTransformer
VARIANTS: dict[str, Options] = {
    "vit_xsmall_patch16_clip_224": dict(XSMALL, **STEM, num_classes=512),
    "vit_medium_patch32_clip_224": dict(MEDIUM, **STEM, patch_size=32, num_classes=512),
    "vit_medium_patch16_clip_224": dict(MEDIUM, **STEM, num_classes=512),
    "vit_base_patch32_clip_224": dict(BASE, **STEM, patch_size=32),
    "vit_base_patch32_clip_256": dict(BASE, **STEM, patch_size=32, img_size=256, num_classes=512),
    "vit_base_patch32_clip_384": dict(BASE, **STEM, patch_size=32, img_size=384),
    "vit_base_patch32_clip_448": dict(BASE, **STEM, patch_size=32, img_size=448),
    "vit_base_patch16_clip_224": dict(BASE, **STEM),
    "vit_base_patch16_clip_384": dict(BASE, **STEM, img_size=384),
    "vit_large_patch14_clip_224": dict(LARGE, **STEM, patch_size=14),
    "vit_large_patch14_clip_336": dict(LARGE, **STEM, patch_size=14, img_size=336),
    "vit_huge_patch14_clip_224": dict(HUGE, **STEM, patch_size=14),
    "vit_huge_patch14_clip_336": dict(HUGE, **STEM, patch_size=14, img_size=336),
    "vit_huge_patch14_clip_378": dict(HUGE, **STEM, patch_size=14, img_size=378, num_classes=1024),
    "vit_giant_patch14_clip_224": dict(GIANT, **STEM, patch_size=14, num_classes=1024),
    "vit_gigantic_patch14_clip_224": dict(GIGANTIC, **STEM, patch_size=14, num_classes=1280),
    "vit_gigantic_patch14_clip_378": dict(GIGANTIC, **STEM, patch_size=14, img_size=378, num_classes=1280),
    "vit_base_patch32_clip_quickgelu_224": dict(BASE, **QUICK, patch_size=32, num_classes=512),
    "vit_base_patch16_clip_quickgelu_224": dict(BASE, **QUICK, num_classes=512),
    "vit_large_patch14_clip_quickgelu_224": dict(LARGE, **QUICK, patch_size=14, num_classes=768),
    "vit_large_patch14_clip_quickgelu_336": dict(LARGE, **QUICK, patch_size=14, img_size=336, num_classes=768),
    "vit_huge_patch14_clip_quickgelu_224": dict(HUGE, **QUICK, patch_size=14, num_classes=1024),
    "vit_huge_patch14_clip_quickgelu_378": dict(HUGE, **QUICK, patch_size=14, img_size=378, num_classes=1024),
    "vit_gigantic_patch14_clip_quickgelu_224": dict(GIGANTIC, **QUICK, patch_size=14, num_classes=1280),
}
ORACLE = dict.fromkeys(VARIANTS, "timm")

# Counted by timm 1.0.31 with 1000 classes.
PARAMS = {
    "vit_base_patch32_clip_224": 88_225_000,
    "vit_large_patch14_clip_224": 304_204_776,
}

# Names in checkpoints, from transformers 4.56 and 5.23.


def write_clip(tensors: State) -> State:
    """`write_tower` without the bias of the projection, which CLIP lacks; ours is zero, see `CLIP.needs`."""
    return {key: tensor for key, tensor in write_tower(tensors).items() if key != "visual_projection.bias"}


CLIP = replace(
    SIGLIP,
    name="transformers CLIP",
    mark="embeddings.class_embedding",
    stem={
        **{our: SIGLIP.stem[our] for our in ("pos_embed", "patch_embed.proj", "norm")},
        "cls_token": "embeddings.class_embedding",
        "norm_pre": "pre_layrnorm",
        "head": "visual_projection",
    },
    write=write_clip,
    needs=dict(PLAIN | TOKEN, pre_norm=True, qkv_bias=True, head_bias=False),
)
