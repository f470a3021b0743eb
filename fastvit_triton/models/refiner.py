"""Refiner — Refining self-attention for vision transformers. Zhou et al., arXiv:2106.03714.

Official: zhoudaquan/Refiner_ViT.
Differs from LV-ViT:
  1. Every other block has no queries and keys: it refines the attention maps of the block before, by convolutions over
     queries and keys. The others add those maps to their own.
  2. A branch f(LN x) is f(LN(x/2)) · 2, which is the factor 2, and 4 ε in the LayerNorm; the MLP has a LayerScale.
  3. The three convolutions of the stem have other widths; qkv has a bias.
Adds the refinement.
"""

from dataclasses import dataclass

from ..checkpoints.layout import Layout, Spelling
from ..layers import Attention, Block
from ..layers.mixing import RefinedAttention
from ..layers.scaled_block import RefinedBlock, RefinedBlocks, ScaledMlp
from .config import Options
from .fit import fit
from .lvvit import LvvitConfig, TokenLabelingTransformer


@dataclass(frozen=True, kw_only=True)
class RefinerConfig(LvvitConfig):
    """Options of Refiner, in addition to those of `LvvitConfig`; `skip_lam` is a in branches f(LN(a x)) / a.

    Attributes:
        expansion: channels of the convolutions of the maps divided by the heads.
    """

    embed_dim: int = 384
    depth: int = 16
    qkv_bias: bool = True
    eps: float = 1e-6
    skip_lam: float = 0.5
    stem_widths: tuple[int, ...] = (32, 64, 128)
    expansion: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.expansion < 1:
            raise ValueError(f"expansion is {self.expansion}; it must be at least 1")


class RefinedTransformer(TokenLabelingTransformer):
    """LV-ViT with refined attention maps."""

    config: RefinerConfig
    layout = "refiner"
    position_resize = "bilinear_align_corners"

    def __init__(self, config: RefinerConfig) -> None:
        super().__init__(config)
        self.blocks = RefinedBlocks(*self.blocks)

    def build_block(self, i: int, drop_path: float, attention: type[Attention]) -> Block:
        """Creates block i."""
        config = self.config
        D = config.embed_dim
        a = config.skip_lam
        drop = config.proj_drop_rate
        drops = config.attn_drop_rate, drop
        attn = RefinedAttention(D, config.num_heads, i % 2 == 1, config.expansion, config.qkv_bias, *drops)
        mlp = ScaledMlp(D, int(D * config.mlp_ratio), config.act, drop)
        return RefinedBlock(D, attn, mlp, config.eps / a**2, drop_path=drop_path, factor=1 / a)


CONFIG = RefinerConfig
MODEL = RefinedTransformer
VARIANTS: dict[str, Options] = {
    "refiner_vit_small": {},
    "refiner_vit_medium": dict(embed_dim=420, depth=32),
    "refiner_vit_large": dict(embed_dim=512, depth=32, num_heads=16),
}
ORACLE: dict[str, str] = {}  # see the equations in the tests

# Counted by the authors' code.
PARAMS = dict(zip(VARIANTS, (25_408_656, 55_450_932, 81_150_192), strict=True))

# Names in checkpoints: the authors', which are those of LV-ViT.

REFINER = Layout(name="Refiner", mark="patch_embed.proj.weight", beside="blocks.0.attn.qkv.weight", resize="bicubic")

CHECKPOINTS = Spelling("Refiner", (REFINER,), fit)
