"""ViT — An image is worth 16x16 words. Dosovitskiy et al., arXiv:2010.11929.

Official: google-research/vision_transformer.
The plain Transformer itself (`VisionTransformer`), in the sizes of the paper's Table 1, of "How to train your ViT"
(arXiv:2106.10270: Ti, S) and of "Scaling vision transformers" (arXiv:2106.04560: g, G).
Differs from the JAX code: exact (erf) GELU, as in timm; act="gelu_tanh" and weight_init="jax" give the original.
`*_postnorm_*` normalises after the residual sum, LN(x + f(x)), and has no final norm.
Adds nothing.
"""

import re
from dataclasses import replace
from typing import Any

from ..checkpoints.renaming import Layout
from ..checkpoints.tensors import State
from .config import Options, ViTConfig
from .transformer import VisionTransformer

TINY: Options = dict(embed_dim=192, depth=12, num_heads=3)
SMALL: Options = dict(embed_dim=384, depth=12, num_heads=6)
BASE: Options = dict(embed_dim=768, depth=12, num_heads=12)
LARGE: Options = dict(embed_dim=1024, depth=24, num_heads=16)
HUGE: Options = dict(embed_dim=1280, depth=32, num_heads=16)
GIANT: Options = dict(embed_dim=1408, depth=40, num_heads=16, mlp_ratio=48 / 11)
GIGANTIC: Options = dict(embed_dim=1664, depth=48, num_heads=16, mlp_ratio=64 / 13)

CONFIG = ViTConfig
MODEL = VisionTransformer
VARIANTS: dict[str, Options] = {
    "vit_tiny_patch16_224": dict(TINY, patch_size=16),
    "vit_tiny_patch16_384": dict(TINY, patch_size=16, img_size=384),
    "vit_small_patch32_224": dict(SMALL, patch_size=32),
    "vit_small_patch32_384": dict(SMALL, patch_size=32, img_size=384),
    "vit_small_patch16_224": dict(SMALL, patch_size=16),
    "vit_small_patch16_384": dict(SMALL, patch_size=16, img_size=384),
    "vit_small_patch8_224": dict(SMALL, patch_size=8, num_classes=0),
    "vit_base_patch32_224": dict(BASE, patch_size=32),
    "vit_base_patch32_384": dict(BASE, patch_size=32, img_size=384),
    "vit_base_patch16_224": dict(BASE, patch_size=16),
    "vit_base_patch16_384": dict(BASE, patch_size=16, img_size=384),
    "vit_base_patch8_224": dict(BASE, patch_size=8),
    "vit_large_patch32_224": dict(LARGE, patch_size=32, num_classes=0),
    "vit_large_patch32_384": dict(LARGE, patch_size=32, img_size=384),
    "vit_large_patch16_224": dict(LARGE, patch_size=16),
    "vit_large_patch16_384": dict(LARGE, patch_size=16, img_size=384),
    "vit_large_patch14_224": dict(LARGE, patch_size=14),
    "vit_huge_patch14_224": dict(HUGE, patch_size=14, num_classes=0),
    "vit_giant_patch14_224": dict(GIANT, patch_size=14),
    "vit_gigantic_patch14_224": dict(GIGANTIC, patch_size=14),
    "vit_tiny_patch16_postnorm_224": dict(TINY, norm="post"),
    "vit_small_patch16_postnorm_224": dict(SMALL, norm="post"),
    "vit_base_patch16_postnorm_224": dict(BASE, norm="post"),
    "vit_digits_patch2_8": dict(
        embed_dim=64, depth=4, num_heads=2, patch_size=2, img_size=8, in_chans=1, num_classes=10
    ),
}


# Names in checkpoints, from state dicts of timm 1.0.31, transformers 4.56 and 5.23, torchvision 0.28; the authors'
# vit_jax/models_vit.py and checkpoint.py, google-research/big_vision (models/vit.py), facebookresearch/mae
# (util/pos_embed.py). `models/plain.py` lists the layouts of all plain ViTs.


def read_jax(tensors: State) -> State:
    """Converts JAX kernels [in, out], [D, H, d], [H, d, D] and [P, P, C, D] to weights, and unstacks blocks."""
    single = {}
    for key, tensor in _name_resnet(tensors).items():
        stacked = ".encoderblock." in key and tensor.numel()  # an empty tensor may have any number of rows
        for i, one in enumerate(tensor if stacked else [tensor]):
            single[key.replace(".encoderblock.", f".encoderblock_{i}.")] = one
    out: State = {}
    for key, tensor in single.items():
        module, _, leaf = key.rpartition(".")
        if module.endswith((".query", ".key", ".value")):
            tensor = tensor.flatten(tensor.dim() - 2)
        if leaf == "kernel":
            tensor = tensor.permute(3, 2, 0, 1) if tensor.dim() == 4 else tensor.flatten(0, -2).T
        elif tensor.dim() == 4 and module.startswith("patch_embed."):
            tensor = tensor.flatten()  # GroupNorm [1, 1, 1, C]
        out[f"{module}.weight" if leaf in ("kernel", "scale") else key] = tensor
    return out


def _name_resnet(tensors: State) -> State:
    """Renames the tensors of a hybrid model's ResNet; block1.unit1 becomes our stages.0.blocks.0."""
    deep = any(key.startswith("block1.") for key in tensors)
    root = "patch_embed.backbone.stem." if deep else "patch_embed.backbone."
    out: State = {}
    for key, tensor in tensors.items():
        if match := re.fullmatch(r"(conv|gn)_root\.(\w+)", key):
            key = f"{root}{match[1]}.{match[2]}"
        elif match := re.fullmatch(r"block(\d+)\.unit(\d+)\.(conv|gn)(\d|_proj)\.(\w+)", key):
            stage = int(match[1]) - 1
            unit = int(match[2]) - 1
            module = f"downsample.{match[3]}" if match[4] == "_proj" else match[3] + match[4]
            key = f"patch_embed.backbone.stages.{stage}.blocks.{unit}.{module}.{match[5]}"
        out[re.sub(r"\bgn", "norm", key)] = tensor
    return out


# What a layout needs of a model, see `plain.choose`.
BASIC: dict[str, Any] = dict(norm="pre", head_dim=None, pre_logits=False, patch_embed=("conv", "linear"))
TOWER = dict(BASIC, final_norm=True, fc_norm=False, qk_norm=False, proj_bias=True, distilled=False)
TOWER |= dict(pos_embed=("learned", "sincos1d", "sincos2d"), hybrid=False)
PLAIN = dict(TOWER, registers=False, layer_scale=False, mlp="mlp")
TOKEN = dict(class_token=True, global_pool="token", pre_norm=False)

TIMM = Layout(
    name="timm",
    mark="patch_embed.proj.weight",
    beside="blocks.0.norm1.weight",
    resize="bicubic_antialias",
    block={"ls{1,2}.gamma": "ls{1,2}.gamma gamma_{1,2}"},  # gamma_1 in the official DeiT III
    needs=dict(BASIC, pos_embed=("learned", "sincos1d", "sincos2d", "none")),
)
MAE = replace(TIMM, name="MAE", mark="decoder_embed.weight", beside="", resize="bicubic")
JAX = Layout(
    name="JAX",
    mark="embedding.kernel",
    resize="bilinear_align_corners",
    stem={
        "cls_token": "cls",
        "pos_embed": "Transformer.posembed_input.pos_embedding Transformer.pos_embedding pos_embedding",
        "patch_embed.proj": "embedding",
        "norm": "Transformer.encoder_norm",
        "pre_logits.fc": "pre_logits",
        "attn_pool.latent": "MAPHead_0.probe",
        "attn_pool.{q,k,v,proj}": "MAPHead_0.MultiHeadDotProductAttention_0.{query,key,value,out}",
        "attn_pool.norm": "MAPHead_0.LayerNorm_0",
        "attn_pool.mlp.fc{1,2}": "MAPHead_0.MlpBlock_0.Dense_{0,1}",
    },
    blocks="Transformer.encoderblock_{}",
    block={
        "norm{1,2}": "LayerNorm_{0,2} LayerNorm_{0,1}",
        "attn.{q,k,v,proj}": "MultiHeadDotProductAttention_1.{query,key,value,out} "
        "MultiHeadDotProductAttention_0.{query,key,value,out}",
        "mlp.fc{1,2}": "MlpBlock_3.Dense_{0,1} MlpBlock_0.Dense_{0,1}",
    },
    read=read_jax,
)
TORCHVISION = Layout(
    name="torchvision",
    mark="encoder.pos_embedding",
    resize="bicubic_align_corners",
    stem={
        "cls_token": "class_token",
        "pos_embed": "encoder.pos_embedding",
        "patch_embed.proj": "conv_proj",
        "norm": "encoder.ln",
        "pre_logits.fc": "heads.pre_logits",
        "head": "heads.head",
    },
    blocks="encoder.layers.encoder_layer_{}",
    block={
        "norm{1,2}": "ln_{1,2}",
        "attn.qkv.{weight,bias}": "self_attention.in_proj_{weight,bias}",
        "attn.proj": "self_attention.out_proj",
        "mlp.fc{1,2}": "mlp.{0,3} mlp.linear_{1,2}",
    },
)
VIT = Layout(
    name="transformers ViT",
    mark="embeddings.patch_embeddings.projection.weight",
    resize="bicubic",
    stem={
        "cls_token": "embeddings.cls_token",
        "pos_embed": "embeddings.position_embeddings",
        "patch_embed.proj": "embeddings.patch_embeddings.projection",
        "norm": "layernorm",
        "head": "classifier",
    },
    blocks="layers.{} encoder.layer.{}",
    block={
        "norm{1,2}": "layernorm_{before,after}",
        "attn.{q,k,v}": "attention.{q,k,v}_proj attention.attention.{query,key,value}",
        "attn.proj": "attention.o_proj attention.output.dense",
        "mlp.fc{1,2}": "mlp.fc{1,2} {intermediate,output}.dense",
    },
    base="vit.",
    needs=PLAIN | TOKEN,
)
