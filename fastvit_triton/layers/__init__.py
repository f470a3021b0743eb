"""Layers that several families of models share: plain modules whose forwards are the equations of their papers.

Parameters have timm's names. The forwards call the kernels' public functions; `convert` attaches fused forwards to
blocks. A layer of one family stands with its model, in `models`.

Begin with `block`, `attention` and `mlp`.
"""

from ..kernels.argument import Window
from .attention import Attention, AttentionPool, RelativePosition
from .block import Block, Blocks, PostNormBlock
from .conv import Peg
from .drop_path import DropPath, drop_path_rates
from .embed import (
    Learned2d,
    LinearPatchEmbed,
    NormedPatchEmbed,
    NormPatchEmbed,
    PatchDropout,
    PatchEmbed,
    resize_pos_embed,
    sincos1d,
    sincos2d,
)
from .layer_scale import LayerScale
from .mlp import Mlp
from .reduced import ReducedAttention
from .resnet import ResNet, Root
from .window import PatchMerging, WindowAttention, resize_table

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
    "NormedPatchEmbed",
    "PatchDropout",
    "PatchEmbed",
    "PatchMerging",
    "Peg",
    "PostNormBlock",
    "ReducedAttention",
    "RelativePosition",
    "ResNet",
    "Root",
    "Window",
    "WindowAttention",
    "drop_path_rates",
    "resize_pos_embed",
    "resize_table",
    "sincos1d",
    "sincos2d",
]
