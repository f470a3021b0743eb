"""CLIP's image towers — Learning transferable visual models from natural language supervision. Radford et al.,
arXiv:2103.00020. Official: openai/CLIP; also LAION's and MetaCLIP's, which use exact GELU.

Differs from ViT:
  1. A LayerNorm between embedding and blocks, no patch bias, epsilon 1e-5.
  2. `*_quickgelu_*`: x·sigmoid(1.702 x), as OpenAI trained it.
  3. The head is the projection into the shared embedding space (no softmax classes).
Adds nothing.
"""

from dataclasses import replace

from ..checkpoints.renaming import Layout
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


# Names in checkpoints, from transformers 4.56 and 5.23, openai/CLIP (clip/model.py) and open_clip 3.3 (transformer.py).


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


def read_open_clip(tensors: State) -> State:
    """The projection [D, E] of the class token as the weight of a linear layer [E, D]."""
    return {("proj.weight" if k == "proj" else k): t.mT if k == "proj" else t for k, t in tensors.items()}


def write_open_clip(tensors: State) -> State:
    """The inverse of `read_open_clip`, with positions [N, D] and class token [D]."""
    axes = {"positional_embedding": (0, 1), "class_embedding": (0, 2)}
    out = {key: tensor.flatten(*axes[key]) if key in axes else tensor for key, tensor in tensors.items()}
    out.pop("proj.bias", None)  # zero, see `needs`
    if (weight := out.pop("proj.weight", None)) is not None:
        out["proj"] = weight.mT
    return out


def write_whole(tensors: State) -> State:
    """`write_open_clip` under the names that the tower has in CLIP."""
    return {f"visual.{key}": tensor for key, tensor in write_open_clip(tensors).items()}


OPEN_CLIP = Layout(
    name="CLIP",
    mark="ln_pre.weight",
    beside="class_embedding",
    resize="bicubic_antialias",
    stem={
        "cls_token": "class_embedding",
        "pos_embed": "positional_embedding",
        "patch_embed.proj": "conv1",
        "norm_pre": "ln_pre",
        "norm": "ln_post",
        "head": "proj",
    },
    blocks="transformer.resblocks.{}",
    block={
        "norm{1,2}": "ln_{1,2}",
        "attn.qkv.{weight,bias}": "attn.in_proj_{weight,bias}",
        "attn.proj": "attn.out_proj",
        "mlp.fc1": "mlp.c_fc",
        "mlp.fc2": "mlp.c_proj",
    },
    read=read_open_clip,
    write=write_whole,
    packed=True,
    alone=True,
    needs=CLIP.needs,
)
OPEN_CLIP_TOWER = replace(OPEN_CLIP, write=write_open_clip)
