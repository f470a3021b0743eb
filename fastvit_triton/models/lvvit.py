"""LV-ViT — All tokens matter: token labeling for training better vision transformers. Jiang et al., arXiv:2104.10858.
Official: zihangJiang/TokenLabeling.
Differs from ViT:
  1. Tokens come from three convolutions and patches of 8 x 8 of their map; qkv has no bias.
  2. Branches are divided by a constant, which is 2 or 3 in all but the smallest.
  3. A second head reads every patch: the logits are those of the class token, plus half the patches' largest.
  4. In training, after `set_dense_training(True)`, a box of tokens is taken from another image (MixToken).
Adds the stem, the factor, the head and the mixing.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..checkpoints.renaming import CheckpointFormats, Layout
from ..engine.body import normalize
from ..kernels.patch_embed import assemble
from ..layers import Attention, Block
from ..layers.scaled_block import ScaledBlock
from .config import Options, ViTConfig
from .deepvit import DeepvitConfig, build_stem, check_parts
from .fit import fit
from .transformer import VisionTransformer


@dataclass(frozen=True, kw_only=True)
class LvvitConfig(ViTConfig):
    """Options of LV-ViT, in addition to those of `ViTConfig`.

    Attributes:
        skip_lam: λ, by which every branch is divided.
        stem_widths: channels of the convolutions before the patch projection.
        mix_token: mix tokens of two images in dense training.
    """

    mlp_ratio: float = 3.0
    qkv_bias: bool = False
    eps: float = 1e-5
    skip_lam: float = 2.0
    stem_widths: tuple[int, ...] = (64, 64, 64)
    mix_token: bool = True
    only: ClassVar = DeepvitConfig.only | dict(reg_tokens=0, class_token=True, pre_logits=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_parts(self)
        if self.skip_lam <= 0:
            raise ValueError(f"skip_lam is {self.skip_lam}; use a number above 0")
        if self.fc_norm:
            raise ValueError("fc_norm is True; the heads of this model read all tokens: use False, or final_norm=False")
        if self.global_pool not in ("token", "none"):
            raise ValueError(f"global_pool is {self.global_pool!r}; the heads of this model need 'token' or 'none'")


def draw_box(grid: tuple[int, int]) -> tuple[int, int, int, int]:
    """A random box (top, bottom, left, right) of a uniform fraction of the grid before it is cut at the border."""
    side = math.sqrt(1 - torch.rand(()).item())  # 1 − λ with λ ~ Beta(1, 1)
    ends: list[int] = []
    for n in grid:
        half = int(n * side) // 2
        centre = int(torch.randint(n, ()))
        ends += [max(centre - half, 0), min(centre + half, n)]
    return ends[0], ends[1], ends[2], ends[3]


def mix_box(tokens: Tensor, box: tuple[int, int, int, int], grid: tuple[int, int]) -> Tensor:
    """Tokens [B, N, D], those in the box from the reversed batch; the same again takes them back."""
    top, bottom, left, right = box
    inside = torch.zeros(grid, dtype=torch.bool, device=tokens.device)
    inside[top:bottom, left:right] = True
    return torch.where(inside.flatten()[:, None], tokens.flip(0), tokens)


class TokenLabelingTransformer(VisionTransformer):
    """ViT with a head on every patch. Training returns the logits of evaluation mode, until `set_dense_training(True)`:
    then it returns class logits [B, K], patch logits [B, N, K], and the box for `train.mix_by_area`."""

    config: LvvitConfig
    layout = "lvvit"
    head_names = ("head", "aux_head")
    position_resize = "bicubic"
    dense_training = False

    def __init__(self, config: LvvitConfig) -> None:
        super().__init__(config, patch_embed=build_stem(config, config.stem_widths))
        self.aux_head = nn.Linear(self.embed_dim, config.num_classes) if config.num_classes else nn.Identity()
        self.init_weights(config.weight_init)

    def build_block(self, i: int, drop_path: float, attention: type[Attention]) -> Block:
        """Creates block i."""
        config = self.config
        block = super().build_block(i, drop_path, attention)
        if config.skip_lam == 1.0:
            return block
        factor = 1 / config.skip_lam
        return ScaledBlock(self.embed_dim, block.attn, block.mlp, config.eps, drop_path=drop_path, factor=factor)

    def set_dense_training(self, enable: bool = True) -> None:
        """Sets whether training returns the logits of all tokens, and mixes tokens if the config says so."""
        if enable and self.config.patch_drop_rate:
            raise ValueError(
                f"patch_drop_rate is {self.config.patch_drop_rate}; dense training needs all patches: use 0"
            )
        self.dense_training = enable

    def forward(self, image: Tensor) -> Any:
        """image [B, C, H, W] → logits [B, num_classes], or what dense training returns."""
        if not (self.dense_training and self.training):
            return super().forward(image)
        grid = self.patch_embed.grid_of(image)
        prefix = torch.cat(self.prefix(), 1)
        box = draw_box(grid) if self.config.mix_token else (0, 0, 0, 0)
        x = assemble(mix_box(self.patch_embed(image), box, grid), self.positions(grid), prefix)
        x = normalize(self.blocks(normalize(self.pos_drop(x), self.norm_pre), recompute=self.recomputes), self.norm)
        cls = self.head_drop(x[:, 0])
        patches = self.head_drop(x[:, 1:])
        return self.head(cls), mix_box(self.aux_head(patches), box, grid), box

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens [B, 1 + N, D] → logits [B, num_classes], or the class token with `pre_logits`."""
        x = self.head_drop(x)
        cls = x[:, 0]
        patches = x[:, 1:]
        if self.config.global_pool == "none":
            return x if pre_logits else torch.cat((self.head(x[:, :1]), self.aux_head(patches)), 1)
        return cls if pre_logits or not self.num_classes else self.head(cls) + 0.5 * self.aux_head(patches).max(1)[0]


CONFIG = LvvitConfig
MODEL = TokenLabelingTransformer
VARIANTS: dict[str, Options] = {
    "lvvit_tiny": dict(embed_dim=240, depth=12, num_heads=4, skip_lam=1.0),
    "lvvit_small": dict(embed_dim=384, depth=16, num_heads=6),
    "lvvit_medium": dict(embed_dim=512, depth=20, num_heads=8),
    "lvvit_large": dict(embed_dim=768, depth=24, skip_lam=3.0, stem_widths=(128, 128, 128)),
}


# Names in checkpoints: the authors', tlt/models/lvvit.py and tlt/utils/utils.py.

LVVIT = Layout(name="LV-ViT", mark="patch_embed.proj.weight", beside="blocks.0.attn.qkv.weight", resize="bicubic")

CHECKPOINTS = CheckpointFormats("LV-ViT", (LVVIT,), fit)
