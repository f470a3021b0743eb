"""PVT — Pyramid vision transformer. Wang et al., arXiv:2102.12122. Official: whai362/PVT, classification/pvt.py.

Differs from ViT:
  1. Four stages; each cuts the map before it into patches of 2 x 2 tokens, with a LayerNorm and positions of its own.
  2. Keys and values come from a map that a convolution reduces by 8, 4, 2 and 1.
  3. The class token joins in the last stage.
Adds the reduced attention.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..layers import Block, Blocks, Mlp, NormedPatchEmbed, ReducedAttention, resize_pos_embed
from ..layers.embed import sides
from .pyramid import PyramidTransformer, ReducedConfig


@dataclass(frozen=True, kw_only=True)
class PvtConfig(ReducedConfig):
    """Options of PVT, in addition to those of `ReducedConfig`.

    Attributes:
        class_token: prepend a learned token in the last stage, whose `sr_ratios` must be 1.
        qkv_bias: bias on the query, key and value projections.
        attn_drop_rate: dropout on attention probabilities.
    """

    class_token: bool = True
    qkv_bias: bool = True
    attn_drop_rate: float = 0.0
    global_pool: str = "token"
    pools = ("token", "avg", "none")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.class_token and self.sr_ratios[-1] != 1:
            raise ValueError(f"sr_ratios is {self.sr_ratios}; the class token is in the last stage, which must have 1")
        if self.global_pool == "token" and not self.class_token:
            raise ValueError("global_pool 'token' needs class_token=True; use global_pool='avg' without a class token")


PARTS = ("patch_embed", "pos_embed", "pos_drop", "block")  # of a stage; its number, from 1, follows


class PyramidVisionTransformer(PyramidTransformer):
    """PVT; its features are tokens [B, 1 + N, D]. Positions are resampled for images of another size."""

    layout = "pvt"
    flattens = True
    info = "block{}", 1
    undecayed = r"^cls_token$"

    def __init__(self, config: PvtConfig) -> None:
        super().__init__(config)
        size, patch, channels = sides(config.img_size), sides(config.patch_size), config.in_chans
        self.cls_token = nn.Parameter(torch.empty(1, 1, self.num_features)) if config.class_token else None
        self.prefix_tokens = [0] * (self.num_stages - 1) + [int(config.class_token)]
        for i, (D, rates) in enumerate(zip(config.widths, self.drop_path_rates(), strict=True), 1):
            embed = NormedPatchEmbed(size, patch, channels, D, strict_img_size=False)
            size, patch, channels = embed.grid_size, (2, 2), D
            pos = nn.Parameter(torch.empty(1, embed.num_patches + self.prefix_tokens[i - 1], D))
            blocks = Blocks(*(build_block(config, i - 1, p) for p in rates))
            for name, part in zip(PARTS, (embed, pos, nn.Dropout(config.pos_drop_rate), blocks), strict=True):
                setattr(self, f"{name}{i}", part)
        self.build_head()

    def stage(self, x: Tensor, i: int) -> Tensor:
        """Stage i: image [B, C, H, W] or map [B, H, W, D] → map [B, H', W', D']; [B, 1, 1 + N, D] for the last one."""
        image, T = x.permute(0, 3, 1, 2) if i else x, self.prefix_tokens[i]
        embed, pos, drop, blocks = (getattr(self, f"{name}{i + 1}") for name in PARTS)
        grid = embed.grid_of(image)
        pos = resize_pos_embed(pos, embed.grid_size, grid, T, self.position_resize)
        x = drop(embed(image, pos, self.cls_token if T else None))
        return blocks(x.unsqueeze(1) if T else x.unflatten(1, grid), recompute=self.recomputes)

    def drop_stages(self, kept: int) -> None:
        """Removes the modules of all but the first `kept` stages, and the class token."""
        for name in (f"{part}{i + 1}" for part in PARTS for i in range(kept, self.num_stages)):
            delattr(self, name)
        self.cls_token, self.prefix_tokens = None, [0] * kept
        self.config = self.config.replace(class_token=False, global_pool="none")

    def pool(self, x: Tensor) -> Tensor:
        """Tokens [B, 1 + N, D] → [B, D]; all tokens for global_pool="none"."""
        pool = self.config.global_pool
        return x[:, 0] if pool == "token" else super().pool(x[:, self.prefix_tokens[-1] :] if pool == "avg" else x)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Regular expressions that assign parameters to layers, as in timm's Twins."""
        fine = [(r"^block(\d+)\.(\d+)", None), (r"^(?:patch|pos)_embed(\d+)", (0,))]
        blocks = [(r"^(?:block|patch_embed|pos_embed)(\d+)", None)] if coarse else fine
        return dict(stem=r"^patch_embed1", blocks=[*blocks, (r"^norm|^cls_token", (99999,))])

    @torch.no_grad()
    def init_weights(self) -> None:
        """Reinitialises the weights as the authors do."""
        super().init_weights()
        for table in (t for name, t in self.named_parameters() if re.match("cls_token|pos_embed", name)):
            nn.init.trunc_normal_(table, std=0.02)


def build_block(config: PvtConfig, stage: int, drop_path: float) -> Block:
    """Builds one block of a stage."""
    D, drop = config.widths[stage], config.proj_drop_rate
    sizes = D, config.num_heads[stage], config.sr_ratios[stage]
    attn = ReducedAttention(*sizes, config.qkv_bias, drop, config.attn_drop_rate)
    return Block(D, attn, Mlp(D, int(D * config.mlp_ratios[stage]), drop=drop), config.eps, drop_path=drop_path)


MODEL = PyramidVisionTransformer
DEPTHS = dict(tiny=(2, 2, 2, 2), small=(3, 4, 6, 3), medium=(3, 4, 18, 3), large=(3, 8, 27, 3))
VARIANTS = {f"pvt_{size}": PvtConfig(depths=depths) for size, depths in DEPTHS.items()}
ORACLE: dict[str, str] = {}  # transformers has the model, with other parameter names

# Counted by the authors' code.
PARAMS = dict(zip(VARIANTS, (13_229_288, 24_485_864, 44_208_104, 61_369_320), strict=True))
