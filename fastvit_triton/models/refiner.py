"""Refiner — Refining self-attention for vision transformers. Zhou et al., arXiv:2106.03714.

Official: zhoudaquan/Refiner_ViT.
Differs from LV-ViT:
  1. Every other block has no queries and keys: it refines the attention maps of the block before, by convolutions over
     queries and keys. The others add those maps to their own.
  2. A branch f(LN x) is f(LN(x/2)) · 2, which is the factor 2, and 4 ε in the LayerNorm; the MLP has a LayerScale.
  3. The three convolutions of the stem have other widths; qkv has a bias.
Adds the refinement.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints.renaming import CheckpointFormats, Layout
from ..layers import Attention, Block, Blocks, Mlp
from ..layers.drop_path import add
from ..layers.head_mixing import MixedAttention
from ..layers.recompute import recomputed
from ..layers.scaled_block import ScaledBlock, times
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
    least: ClassVar = LvvitConfig.least | dict(expansion=1)


class RefinedAttention(MixedAttention):
    """Attention that adds the map before it, or refines that map instead of computing its own.

    Section 3, in the order of the authors' models, with s = 1 / √d:

        own:      A = softmax(s q kᵀ) + s A'      A' = the map that the block before passed on, 0 in the first block
                  y = A v                         passes on A
        refined:  y = s · BatchNorm(DLA(A')) v    passes on A', and has no queries and keys
    """

    def __init__(self, config: RefinerConfig, refines: bool) -> None:
        D = config.embed_dim
        H = config.num_heads
        super().__init__(D, H, config.qkv_bias, config.attn_drop_rate, config.proj_drop_rate)
        self.refines = refines
        if refines:
            self.qkv = nn.Linear(D, D, bias=config.qkv_bias)
            self.DLA = LocalAttention(H, config.expansion)
            self.adapt_bn = nn.BatchNorm2d(H)

    def forward(self, x: Tensor, previous: Tensor | None = None, passed: list[Tensor] | None = None) -> Tensor:
        """x [B, N, D] → [B, N, D]; the map that is passed on is appended to the list."""
        passed = [] if passed is None else passed
        return self.proj_drop(self.proj(self.attend_with(previous, passed, self.qkv(x))))

    def attend_with(self, previous: Tensor | None, passed: list[Tensor], qkv: Tensor) -> Tensor:
        """Projections [B, N, 3·H·d], or values [B, N, H·d] → the heads' outputs; appends the map that is passed on."""
        parts = 1 if self.refines else 3
        *qk, v = qkv.unflatten(-1, (parts, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, N, d]
        if self.refines:
            assert previous is not None
            maps = self.scale * self.adapt_bn(self.DLA(previous))
            attention = previous
        else:
            q, k = qk
            attention = ((q * self.scale) @ k.mT).softmax(-1)
            maps = attention = self.attn_drop(attention if previous is None else attention + self.scale * previous)
        passed.append(attention)
        return (maps @ v).transpose(1, 2).flatten(2)


class LocalAttention(nn.Module):
    """Distributed local attention: a convolution of maps over queries and keys (section 3.2).

    DLA(A) = A + BN(W₂ f(W₁ A)),   f = ReLU6 BN, a depthwise 3 x 3 convolution of `expansion` · H channels, ReLU6 BN
    """

    def __init__(self, num_heads: int, expansion: int) -> None:
        super().__init__()
        width = expansion * num_heads
        self.conv_exp = nn.Conv2d(num_heads, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.depth_sep_conv = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv_pro = nn.Conv2d(width, num_heads, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(num_heads)

    def forward(self, maps: Tensor) -> Tensor:
        """[B, H, N, N] → [B, H, N, N]."""
        x = F.relu6(self.bn1(self.conv_exp(maps)))
        x = F.relu6(self.bn2(self.depth_sep_conv(x)))
        return maps + self.bn3(self.conv_pro(x))


class ScaledMlp(Mlp):
    """An MLP with LayerScale as its own parameter, which the block multiplies its output by (`RefinedBlock`)."""

    def __init__(self, dim: int, hidden: int, act: str, drop: float, init_values: float = 1e-5) -> None:
        super().__init__(dim, hidden, act, drop=drop)
        self.init_values = init_values
        self.scale_channel = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale_channel, self.init_values)


class RefinedBlock(ScaledBlock):
    """A `ScaledBlock` whose attention takes the map of the block before, and passes one on (`RefinedAttention`).

    The arguments are those of `ScaledBlock`; the MLP is a `ScaledMlp`.
    """

    attn: RefinedAttention
    mlp: ScaledMlp

    def forward(self, x: Tensor, previous: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """[B, N, D] and the map [B, H, N, N] of the block before, or None → [B, N, D], map."""
        passed: list[Tensor] = []
        scale = self.scale(x, None)
        channels = self.scale(x, self.mlp.scale_channel)
        x = add(x, self.drop_path1, lambda x: times(scale, self.attn(self.norm1(x), previous=previous, passed=passed)))
        return add(x, self.drop_path2, lambda x: times(channels, self.mlp(self.norm2(x)))), passed[-1]


class RefinedBlocks(Blocks):
    """A sequence of `RefinedBlock`."""

    def outputs(
        self, x: Tensor, after: Sequence[Callable[[Tensor], Tensor]] = (), recompute: bool = False
    ) -> Iterator[Tensor]:
        """Yields the output [B, N, D] of each block in turn; `after` is not supported."""
        maps = None
        for block in self:
            x, maps = recomputed(block, x, maps) if recompute else block(x, maps)
            yield x


class RefinedTransformer(TokenLabelingTransformer):
    """LV-ViT with refined attention maps."""

    config: RefinerConfig
    layout = "refiner"
    position_resize = "bilinear_align_corners"

    def __init__(self, config: RefinerConfig) -> None:
        super().__init__(config)
        self.blocks = RefinedBlocks(*self.blocks)

    def build_block(self, i: int, drop_path: float, attention: type[Attention]) -> Block:
        config = self.config
        D = config.embed_dim
        a = config.skip_lam
        attn = RefinedAttention(config, i % 2 == 1)
        mlp = ScaledMlp(D, int(D * config.mlp_ratio), config.act, config.proj_drop_rate)
        return RefinedBlock(D, attn, mlp, config.eps / a**2, drop_path=drop_path, factor=1 / a)


CONFIG = RefinerConfig
MODEL = RefinedTransformer
VARIANTS: dict[str, Options] = {
    "refiner_vit_small": {},
    "refiner_vit_medium": dict(embed_dim=420, depth=32),
    "refiner_vit_large": dict(embed_dim=512, depth=32, num_heads=16),
}


# Names in checkpoints: the authors', which are those of LV-ViT.

REFINER = Layout(name="Refiner", mark="patch_embed.proj.weight", beside="blocks.0.attn.qkv.weight", resize="bicubic")

CHECKPOINTS = CheckpointFormats("Refiner", (REFINER,), fit)
