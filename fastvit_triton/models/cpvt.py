"""CPVT — Conditional positional encodings for vision transformers. Chu et al., arXiv:2102.10882.

Differs from ViT:
  1. No positions: after the first block, a depthwise convolution of the patch tokens encodes where they are, from the
     zeros beyond the border (`Peg`). The class token is unchanged. Images of any size without resampling.
  2. `*_gap`: no class token; the mean of the tokens goes to the head. `*_5peg`: convolutions after the first 5 blocks.
Adds the convolutions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..layers import Peg
from .base import NORM
from .config import CHOICES, Options, ViTConfig
from .transformer import VisionTransformer
from .vit import BASE, SMALL, TINY


@dataclass(frozen=True, kw_only=True)
class CpvtConfig(ViTConfig):
    """Options of CPVT, in addition to those of `ViTConfig`.

    Attributes:
        pegs: blocks, from the first, that are followed by a positional encoding generator; at most `depth`.
        peg_padding: what lies beyond the border, a `padding_mode` of nn.Conv2d; "circular" has no positions.
    """

    pegs: int = 1
    peg_padding: str = "zeros"
    pos_embed: str = "none"
    dynamic_img_size: bool = True
    choices: ClassVar = CHOICES | dict(peg_padding=("zeros", "circular", "reflect", "replicate"))
    least: ClassVar = ViTConfig.least | dict(pegs=0)


class ConditionalVisionTransformer(VisionTransformer):
    """ViT with positional encoding generators after its first blocks."""

    config: CpvtConfig
    undecayed = rf"{VisionTransformer.undecayed}|^pos_block\."  # as in the authors' Twins
    layer_patterns = ((r"^(?:blocks|pos_block)\.(\d+)", None), NORM)

    def __init__(self, config: CpvtConfig) -> None:
        super().__init__(config)
        pegs = (Peg(config.embed_dim, config.peg_padding) for _ in range(min(config.pegs, config.depth)))
        self.pos_block = nn.ModuleList(pegs)

    def after(self, image: Tensor) -> list[Callable[[Tensor], Tensor]]:
        """The functions of tokens [B, T + N, D] that follow the first blocks."""
        return [partial(self.encode, peg, self.patch_embed.grid_of(image)) for peg in self.pos_block]

    def encode(self, peg: nn.Module, grid: tuple[int, int], x: Tensor) -> Tensor:
        """Tokens [B, T + N, D], of which the last N form a grid → the same with positions."""
        T = self.num_prefix_tokens
        patches = peg(x[:, T:].unflatten(1, grid)).flatten(1, 2)
        return torch.cat((x[:, :T], patches), 1) if T else patches

    def prune(self, stages: int, norm: bool, head: bool) -> None:
        """Keeps the first `stages` blocks and their generators; for the others see `VisionTransformer.prune`."""
        self.pos_block = self.pos_block[:stages]
        super().prune(stages, norm, head)


GAP = dict(class_token=False, global_pool="avg", fc_norm=False)

CONFIG = CpvtConfig
MODEL = ConditionalVisionTransformer
VARIANTS: dict[str, Options] = {
    "cpvt_tiny": TINY,
    "cpvt_small": SMALL,
    "cpvt_base": BASE,
    "cpvt_small_gap": dict(SMALL, **GAP),
    "cpvt_tiny_5peg": dict(TINY, pegs=5),
}
