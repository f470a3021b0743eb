"""LeViT — a vision transformer in ConvNet's clothing. Graham et al., arXiv:2104.01136 (facebookresearch/LeViT).

Differs from ViT:
  1. Four convolutions with stride 2 project the image; three stages, between which attention halves the map.
  2. Every linear layer has a BatchNorm instead of a bias, folded in inference after `freeze`; there is no LayerNorm.
  3. Keys are narrower than values; a learned bias per head, |Δrow| and |Δcolumn| instead of positions; no class token.
  4. An activation (hard swish) also between attention and its last layer.
  5. Two heads on the mean of the tokens; the second learns from a teacher.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from ..layers import Blocks
from ..layers import levit as layers
from ..layers.embed import sides
from .config import check_patches
from .distilled import Distilled, NormedHead
from .pyramid import PyramidConfig


@dataclass(frozen=True, kw_only=True)
class LevitConfig(PyramidConfig):
    """Options of LeViT, in addition to those of `PyramidConfig`; `patch_size` is the stride of the stem, 16 or 8.

    Attributes:
        embed_dim: channels of each stage.
        key_dim: channels of a key; between stages there are as many heads as fit in the channels.
        attn_ratio: channels of a value divided by those of a key; 4 between stages.
        mlp_ratio: hidden channels of the MLP divided by the channels; 2 between stages.
    """

    patch_size: int | tuple[int, int] = 16
    embed_dim: tuple[int, ...] = (128, 256, 384)
    key_dim: int = 16
    depths: tuple[int, ...] = (4, 4, 4)
    num_heads: tuple[int, ...] = (4, 8, 12)
    attn_ratio: float = 2.0
    mlp_ratio: float = 2.0
    final_norm: bool = False
    dynamic_img_size: bool = False
    only: ClassVar[dict[str, Any]] = dict(final_norm=False, dynamic_img_size=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patch_size not in ((8, 8), (16, 16)):
            raise ValueError(f"patch_size is {self.patch_size}; use 8 or 16, the strides of LeViT's stems")
        check_patches(self)

    @property
    def widths(self) -> tuple[int, ...]:
        return self.embed_dim

    def check_heads(self) -> None:
        """Heads have `key_dim` channels each, whatever the width of the stage."""


class Levit(NormedHead):
    """LeViT with one head; its features are tokens [B, N, D]."""

    layout = "levit"
    undecayed = r"attention_biases$"

    def __init__(self, config: LevitConfig) -> None:
        super().__init__(config)
        (height, width), (stride, _), D = sides(config.img_size), sides(config.patch_size), config.widths[0]
        grid, stages = (height // stride, width // stride), nn.ModuleList()
        self.stem = layers.stem(config.in_chans, D, stride)
        for i, (D, rates) in enumerate(zip(config.widths, self.drop_path_rates(), strict=True)):
            down: nn.Module = nn.Identity()
            if i:
                attn = layers.DistanceDownsample(config.widths[i - 1], D, config.key_dim, grid)
                down = layers.LevitDownsample(attn, layers.NormedMlp(D, 2 * D), config.drop_path_rate)
                grid = (-(-grid[0] // 2), -(-grid[1] // 2))
            stages.append(layers.LevitStage(down, Blocks(*(build_block(config, i, grid, p) for p in rates)), grid))
        self._modules["stages"] = stages
        self.build_head()

    def drop_path_rates(self) -> list[list[float]]:
        """Rates of the blocks of each stage, which are all the same."""
        return [[self.config.drop_path_rate] * depth for depth in self.config.depths]

    def stage(self, x: Tensor, i: int) -> Tensor:
        """Stage i: image [B, C, H, W] or map [B, H, W, D] → map [B, H', W', D']."""
        return self.stages[i](x if i else self.stem(x).permute(0, 2, 3, 1), self.recomputes)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Regular expressions that assign parameters to layers, for timm's layer-wise learning rates."""
        fine = [(r"^stages\.(\d+)\.downsample", (0,)), (r"^stages\.(\d+)\.blocks\.(\d+)", None)]
        return dict(stem=r"^stem", blocks=r"^stages\.(\d+)" if coarse else fine)


class LevitDistilled(Distilled, Levit):
    """LeViT with a second head, which reads the same features."""

    head_names = ("head.linear", "head_dist.linear")


def build_block(config: LevitConfig, stage: int, grid: tuple[int, int], drop_path: float) -> layers.NormedBlock:
    """Builds one block of a stage."""
    D, heads = config.widths[stage], config.num_heads[stage]
    attn = layers.DistanceAttention(D, config.key_dim, heads, config.attn_ratio, grid)
    return layers.NormedBlock(attn, layers.NormedMlp(D, int(D * config.mlp_ratio), config.proj_drop_rate), drop_path)


MODEL = LevitDistilled
VARIANTS = {
    "levit_128s": LevitConfig(num_heads=(4, 6, 8), depths=(2, 3, 4)),
    "levit_128": LevitConfig(),
    "levit_192": LevitConfig(embed_dim=(192, 288, 384), key_dim=32, num_heads=(3, 5, 6)),
    "levit_256": LevitConfig(embed_dim=(256, 384, 512), key_dim=32, num_heads=(4, 6, 8)),
    "levit_384": LevitConfig(embed_dim=(384, 512, 768), key_dim=32, num_heads=(6, 9, 12)),
}
ORACLE = dict.fromkeys(VARIANTS, "timm")

# Counted by timm 1.0.31.
PARAMS = dict(zip(VARIANTS, (7_777_058, 9_213_936, 10_947_069, 18_893_876, 39_128_836), strict=True))
