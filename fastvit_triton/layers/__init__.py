"""Layers: modules that call the kernels; parameters have timm's names."""

from .attention import Attention, AttentionPool, RelativePosition
from .block import Block, Blocks, PostNormBlock
from .body import normalize
from .drop_path import DropPath, drop_path_rates
from .embed import (
    Learned2d,
    LinearPatchEmbed,
    NormPatchEmbed,
    PatchDropout,
    PatchEmbed,
    resize_pos_embed,
    sincos1d,
    sincos2d,
)
from .layer_scale import LayerScale
from .mlp import Mlp
from .resnet import ResNet, Root

__all__ = [
    "Attention",
    "AttentionPool",
    "Block",
    "Blocks",
    "DropPath",
    "LayerScale",
    "Learned2d",
    "LinearPatchEmbed",
    "Mlp",
    "NormPatchEmbed",
    "PatchDropout",
    "PatchEmbed",
    "PostNormBlock",
    "RelativePosition",
    "ResNet",
    "Root",
    "drop_path_rates",
    "normalize",
    "resize_pos_embed",
    "sincos1d",
    "sincos2d",
]
