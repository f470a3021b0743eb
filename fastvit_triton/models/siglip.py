"""SigLIP's image towers — Sigmoid loss for language image pre-training. Zhai et al., arXiv:2303.15343.

Official: google-research/big_vision.

Differs from ViT:
  1. No class token: one learned query attends to all tokens ("map" pooling); `*_gap_*` takes their mean instead.
  2. No head: the pooled features are the embedding. Some sizes use tanh-GELU, as their checkpoints do.
Adds nothing. "so400m" is the shape-optimised size of arXiv:2305.13035, Table 2.
"""

from typing import Any

from ..checkpoints.renaming import Layout
from ..checkpoints.tensors import State
from .config import Options, ViTConfig
from .transformer import VisionTransformer
from .vit import BASE, LARGE, PLAIN

SO400M: Options = dict(embed_dim=1152, depth=27, num_heads=16, mlp_ratio=3.7362)
GIANTOPT: Options = dict(embed_dim=1536, depth=40, num_heads=16)

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

CONFIG = ViTConfig
MODEL = VisionTransformer
VARIANTS: dict[str, Options] = {
    f"vit_{size}_siglip_{gap}{side}": dict(
        shape, **pool, act=act, patch_size=patch, img_size=side, class_token=False, num_classes=0
    )
    for size, shape, patch, sides, act in TOWERS
    for side in sides
    for gap, pool in POOLS.items()
}


# Names in checkpoints, from transformers 4.56 and 5.23.


def write_tower(tensors: State) -> State:
    """Removes leading axes of length 1 from positions, to [N, D], and class token, to [D]."""
    keep = {"embeddings.position_embedding.weight": (0, 1), "embeddings.class_embedding": (0, 2)}
    return {key: tensor.flatten(*keep[key]) if key in keep else tensor for key, tensor in tensors.items()}


SIGLIP = Layout(
    name="transformers SigLIP",
    mark="embeddings.patch_embedding.weight",
    resize="bicubic",
    stem={
        "pos_embed": "embeddings.position_embedding.weight",
        "patch_embed.proj": "embeddings.patch_embedding",
        "norm": "post_layernorm",
        "head": "classifier",
        "attn_pool.latent": "head.probe",
        "attn_pool.qkv.{weight,bias}": "head.attention.in_proj_{weight,bias}",
        "attn_pool.proj": "head.attention.out_proj",
        "attn_pool.norm": "head.layernorm",
        "attn_pool.mlp.fc{1,2}": "head.mlp.fc{1,2}",
    },
    blocks="encoder.layers.{}",
    block={"norm{1,2}": "layer_norm{1,2}", "attn.{q,k,v}": "self_attn.{q,k,v}_proj", "attn.proj": "self_attn.out_proj"},
    write=write_tower,
    base="vision_model.",
    needs=dict(
        PLAIN, class_token=False, global_pool=("avg", "map"), pre_norm=False, qkv_bias=True, head_after_map=False
    ),
)
