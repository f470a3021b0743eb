"""CrossViT — Cross-attention multi-scale vision transformer. Chen et al., arXiv:2103.14899. Official: IBM/CrossViT.

Differs from ViT:
  1. Two branches, each a ViT with patches of its own size; the second reads the image at another size.
  2. Three times, after some blocks, the class token of each branch attends to the patches of the other.
  3. A head for each branch; their mean are the logits.
  4. `*_dagger_*`: three convolutions instead of one project the patches.
Adds the cross attention.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.layout import Layout, Spelling
from ..checkpoints.tensors import State
from ..layers import Attention, Block, Blocks, Mlp, drop_path_rates
from ..layers.cross import BranchEmbed, CrossAttention, CrossBlock, MultiScaleBlock, scaled_image
from .branches import BranchConfig, BranchModel, num_rates
from .config import Options
from .fit import fit_table


@dataclass(frozen=True, kw_only=True)
class CrossVitConfig(BranchConfig):
    """Options of CrossViT, in addition to those of `BranchConfig`.

    Attributes:
        multi_conv: project patches by three convolutions.
        crop_scale: cut out the middle of the image instead of interpolating it, where it is larger.
    """

    multi_conv: bool = False
    crop_scale: bool = False


class CrossVit(BranchModel):
    """CrossViT; its features are a list of the tokens [B, 1 + N, D] of both branches."""

    layout = "crossvit"

    def __init__(self, config: CrossVitConfig) -> None:
        super().__init__(config)
        self.sizes = config.sizes
        for i, (size, side, D) in enumerate(zip(self.sizes, config.patch_size, config.embed_dim, strict=True)):
            embed = BranchEmbed(size, (side, side), config.in_chans, D, multi_conv=config.multi_conv)
            self.patch_embed.append(embed)
            setattr(self, f"pos_embed_{i}", nn.Parameter(torch.empty(1, 1 + embed.num_patches, D)))
            setattr(self, f"cls_token_{i}", nn.Parameter(torch.empty(1, 1, D)))
        rates = drop_path_rates(config.drop_path_rate, num_rates(config.depth))
        for counts in config.depth:
            n = num_rates((counts,))
            self.blocks.append(build_block(config, counts, rates[:n]))
            rates = rates[n:]
        self.build_head()

    def stages(self, image: Tensor) -> Iterator[Any]:
        """Yields after each block the tokens [B, 1 + N, D] of both branches."""
        xs = []
        for i, (embed, size) in enumerate(zip(self.patch_embed, self.sizes, strict=True)):
            pos, token = getattr(self, f"pos_embed_{i}"), getattr(self, f"cls_token_{i}")
            xs.append(self.pos_drop(embed(scaled_image(image, size, self.config.crop_scale), pos, token)))
        for block in self.blocks:
            yield (xs := block(xs, self.recomputes))

    def no_weight_decay(self) -> set[str]:
        """Names of parameters to exclude from weight decay, as in timm."""
        return {f"{name}_{i}" for name in ("pos_embed", "cls_token") for i in range(2)}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Regular expressions that assign parameters to layers, for timm's layer-wise learning rates."""
        return dict(stem=r"^cls_token|pos_embed|patch_embed", blocks=[(r"^blocks\.(\d+)", None), (r"^norm", (99999,))])


def build_block(config: CrossVitConfig, counts: tuple[int, ...], rates: list[float]) -> MultiScaleBlock:
    """Builds the blocks of both branches with their cross attentions."""
    bias = config.qkv_bias
    drops = (config.attn_drop_rate, config.proj_drop_rate)
    branches = []
    fusion: list[nn.Module] = []
    for i, (D, heads) in enumerate(zip(config.embed_dim, config.num_heads, strict=True)):
        hidden = int(D * config.mlp_ratio[i])
        blocks = (
            Block(
                D,
                Attention(D, heads, qkv_bias=bias, attn_drop=drops[0], proj_drop=drops[1]),
                Mlp(D, hidden, drop=drops[1]),
                config.eps,
                drop_path=p,
            )
            for p in rates[: counts[i]]
        )
        branches.append(Blocks(*blocks))
        cross = [
            CrossBlock(D, CrossAttention(D, heads, bias, *drops), config.eps, rates[-1]) for _ in range(counts[-1] or 1)
        ]
        fusion.append(nn.Sequential(*cross) if counts[-1] else cross[0])
    return MultiScaleBlock(config.embed_dim, branches, fusion[1:] + fusion[:1], config.eps)


def of(D: int, heads: int, blocks: int, ratio: float, **options: Any) -> Options:
    """Options by channels and heads of the first branch, blocks of the second, and ratio of the MLP."""
    shape = dict(embed_dim=(D, 2 * D), num_heads=(heads, heads), depth=((1, blocks, 0),) * 3)
    return dict(**shape, mlp_ratio=(ratio, ratio, 1), **options)


SIZES = {"tiny": (96, 3, 4, 4), "small": (192, 6, 4, 4), "base": (384, 12, 4, 4)}
SIZES |= {"9": (128, 4, 3, 3), "15": (192, 6, 5, 3), "18": (224, 7, 6, 3)}
DAGGER = {f"{n}_dagger": SIZES[n] for n in ("9", "15", "18")}
LARGER: Any = dict(img_size=408, img_scale=(1.0, 384 / 408))

CONFIG = CrossVitConfig
MODEL = CrossVit
VARIANTS: dict[str, Options] = {f"crossvit_{n}_240": of(*size) for n, size in SIZES.items()}
VARIANTS |= {f"crossvit_{n}_240": of(*size, multi_conv=True) for n, size in DAGGER.items()}
VARIANTS |= {f"crossvit_{n}_408": of(*DAGGER[n], multi_conv=True, **LARGER) for n in ("15_dagger", "18_dagger")}
ORACLE = dict.fromkeys(VARIANTS, "timm")

# Counted by timm 1.0.31.
COUNTS: tuple[int, ...] = 7_014_800, 26_856_272, 105_025_232, 8_553_296, 27_528_464, 43_271_408
COUNTS += 8_776_592, 28_209_008, 44_266_976, 28_500_080, 44_606_560
PARAMS = dict(zip(VARIANTS, COUNTS, strict=True))

# Names in checkpoints, from timm 1.0.31 and the authors' models/crossvit.py (IBM/CrossViT).

CROSS: dict[str, Any] = dict(beside="blocks.0.revert_projs.0.0.weight", resize="bicubic_antialias")
TIMM_CROSS = Layout(name="timm", mark="pos_embed_0", **CROSS)
CROSS_LAYOUTS = (
    TIMM_CROSS,
    Layout(
        name="CrossViT",
        mark="pos_embed.0",
        number=lambda key: re.sub(r"^(pos_embed|cls_token)\.", r"\1_", key),
        **CROSS,
    ),
)


def fit_branches(
    model: Any, target: State, state: State, metadata: Mapping[str, str], mode: str
) -> tuple[list[str], str]:
    """Makes the positions of `state` fit the grids of a CrossViT; for the arguments see `fit.fit`."""
    grids = [embed.grid_size for embed in model.patch_embed]
    notes = [fit_table(state, target, f"pos_embed_{i}", grid, 1, mode) for i, grid in enumerate(grids)]
    return [], ", ".join(note for note in notes if note)


CHECKPOINTS = Spelling("CrossViT", CROSS_LAYOUTS, fit_branches, {"timm": (TIMM_CROSS,)})
