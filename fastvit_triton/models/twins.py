"""Twins — Revisiting the design of spatial attention in vision transformers. Chu et al., arXiv:2104.13840.

Official: Meituan-AutoML/Twins.
Differs from ViT:
  1. `*_pcpvt_*`: PVT's four stages, whose attention is to a smaller map; `*_svt_*`: every other block, from the first,
     attends within windows instead (no shift, no bias).
  2. A positional encoding generator after the first block of each stage instead of positions; any image size.
  3. A LayerNorm after each patch projection; the mean of the last tokens goes to the head.
Adds nothing: attention is PVT's and Swin's, the generator is CPVT's.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.renaming import CheckpointFormats, Layout
from ..layers import Block, Blocks, Mlp, Peg, ReducedAttention, Window, WindowAttention
from .base import NORM
from .config import Options
from .fit import fit_tables
from .pyramid import PyramidTransformer, ReducedConfig, patch_embeds


@dataclass(frozen=True, kw_only=True)
class TwinsConfig(ReducedConfig):
    """Options of Twins, in addition to those of `ReducedConfig`.

    Attributes:
        wss: window sides of every other block, one per stage; None for no windows.
    """

    wss: tuple[int, ...] | None = None


class Twins(PyramidTransformer):
    """Twins-PCPVT or Twins-SVT; its features are tokens [B, N, D]."""

    layout = "twins"
    flattens = True
    info = "block.{}", 0
    parts = ("patch_embeds", "pos_drops", "blocks", "pos_block")
    undecayed = r"^pos_block\."
    stem_pattern = r"^patch_embeds.0"
    layer_patterns = ((r"^blocks\.(\d+)\.(\d+)", None), (r"^(?:patch_embeds|pos_block)\.(\d+)", (0,)), NORM)
    coarse_patterns = ((r"^(?:blocks|patch_embeds|pos_block)\.(\d+)", None), NORM)

    def __init__(self, config: TwinsConfig) -> None:
        super().__init__(config)
        self.patch_embeds = nn.ModuleList()
        self.pos_drops = nn.ModuleList()
        self.blocks = nn.ModuleList()
        self.pos_block = nn.ModuleList()
        for i, (embed, rates) in enumerate(zip(patch_embeds(config), self.drop_path_rates(), strict=True)):
            self.patch_embeds.append(embed)
            self.pos_drops.append(nn.Dropout(config.pos_drop_rate))
            self.blocks.append(Blocks(*(build_block(config, i, j, p) for j, p in enumerate(rates))))
            self.pos_block.append(Peg(config.widths[i]))
        self.build_head()

    def stage(self, x: Tensor, i: int) -> Tensor:
        """Stage i: image [B, C, H, W] or map [B, H, W, D] → map [B, H', W', D']."""
        embed: Any = self.patch_embeds[i]
        image = x.permute(0, 3, 1, 2) if i else x
        x = self.pos_drops[i](embed(image).unflatten(1, embed.grid_of(image)))
        return self.blocks[i](x, (self.pos_block[i],), self.recomputes)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Reinitialises the weights as in timm: convolutions as in MobileNet V2."""
        super().init_weights()
        for conv in (module for module in self.modules() if isinstance(module, nn.Conv2d)):
            outputs = conv.weight[0, 0].numel() * len(conv.weight) // conv.groups
            nn.init.normal_(conv.weight, std=math.sqrt(2 / outputs))
            if conv.bias is not None:
                nn.init.zeros_(conv.bias)


def build_block(config: TwinsConfig, stage: int, block: int, drop_path: float) -> Block:
    """Builds one block of a stage."""
    D = config.widths[stage]
    heads = config.num_heads[stage]
    drop = config.proj_drop_rate
    drops: Any = dict(proj_drop=drop, attn_drop=config.attn_drop_rate)
    if config.wss is None or block % 2:
        attn: nn.Module = ReducedAttention(D, heads, config.sr_ratios[stage], **drops)
    else:
        window = Window((config.wss[stage], config.wss[stage]))
        attn = WindowAttention(D, heads, window, relative_bias=False, **drops)
    return Block(D, attn, Mlp(D, int(D * config.mlp_ratios[stage]), drop=drop), config.eps, drop_path=drop_path)


PCPVT: Options = dict(depths=(3, 4, 6, 3))
SVT: Options = dict(mlp_ratios=(4, 4, 4, 4), wss=(7, 7, 7, 7), depths=(2, 2, 18, 2))

CONFIG = TwinsConfig
MODEL = Twins
VARIANTS: dict[str, Options] = {
    "twins_pcpvt_small": PCPVT,
    "twins_pcpvt_base": dict(PCPVT, depths=(3, 4, 18, 3)),
    "twins_pcpvt_large": dict(PCPVT, depths=(3, 8, 27, 3)),
    "twins_svt_small": dict(SVT, embed_dims=(64, 128, 256, 512), num_heads=(2, 4, 8, 16), depths=(2, 2, 10, 4)),
    "twins_svt_base": dict(SVT, embed_dims=(96, 192, 384, 768), num_heads=(3, 6, 12, 24)),
    "twins_svt_large": dict(SVT, embed_dims=(128, 256, 512, 1024), num_heads=(4, 8, 16, 32)),
}


# Names in checkpoints, from timm 1.0.31.

TIMM_TWINS = Layout(
    name="timm", mark="pos_block.0.proj.0.weight", resize="bilinear", home="blocks.{}.{}", blocks="blocks.{}.{}"
)

CHECKPOINTS = CheckpointFormats("Twins", (TIMM_TWINS,), fit_tables, {"timm": (TIMM_TWINS,)})
