"""TNT — Transformer in transformer. Han et al., arXiv:2103.00112. Official: huawei-noah/Efficient-AI-Backbones.

Differs from ViT:
  1. A patch also has 4 x 4 pixels of few channels, projections of 7 x 7 pixels. In each block the pixels attend to each
     other within their patch, and are then added to the token of the patch by a linear layer between two norms.
  2. Queries and keys have one projection and values another, without biases.
  3. `*_legacy_*`: the first norm is that of each pixel, and patches see their neighbours in the projection.
Adds the inner blocks.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.layout import Layout, Spelling
from ..checkpoints.tensors import State
from ..layers import drop_path_rates
from ..layers.embed import sides
from ..layers.inner import InnerBlock, PixelEmbed, merged_pixels
from ..layers.recompute import recomputed
from .config import Options, check_multiple, check_patches
from .fit import fit_table
from .tokens import TokenConfig, TokenModel


@dataclass(frozen=True, kw_only=True)
class TntConfig(TokenConfig):
    """Options of TNT, in addition to those of `TokenConfig`.

    Attributes:
        inner_dim: c, channels per pixel.
        num_heads_inner: heads of the pixels' attention.
        num_heads_outer: heads of the patches' attention.
        first_stride: pixels of the image between two pixels of a patch, in both directions.
        legacy: the norm and the projection of older models.
    """

    inner_dim: int = 24
    num_heads_inner: int = 4
    num_heads_outer: int = 6
    first_stride: int = 4
    legacy: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_patches(self)
        check_multiple(self, "inner_dim", "num_heads_inner")
        check_multiple(self, "embed_dim", "num_heads_outer")
        if self.legacy and any(side % self.first_stride for side in sides(self.patch_size)):
            raise ValueError(f"first_stride is {self.first_stride}; use one that divides patch_size {self.patch_size}")

    @property
    def num_heads(self) -> int:
        """Heads of the patches' attention."""
        return self.num_heads_outer


class TransformerInTransformer(TokenModel):
    """TNT; its features are tokens [B, 1 + N, D]."""

    layout = "tnt"

    def __init__(self, config: TntConfig) -> None:
        super().__init__(config)
        sizes = (sides(config.img_size), sides(config.patch_size))
        c = config.inner_dim
        D = config.embed_dim
        self.pixel_embed = PixelEmbed(config.first_stride, config.legacy, sizes, config.in_chans, c)
        pixels = self.pixel_embed.pixels
        n = pixels[0] * pixels[1]
        self.norm1_proj = nn.LayerNorm(n * c)
        self.proj = nn.Linear(n * c, D)
        self.norm2_proj = nn.LayerNorm(D)
        self.cls_token = nn.Parameter(torch.empty(1, 1, D))
        self.patch_pos = nn.Parameter(torch.empty(1, 1 + self.pixel_embed.num_patches, D))
        self.pixel_pos = nn.Parameter(torch.empty(1, c, *pixels))
        self.pos_drop = nn.Dropout(config.pos_drop_rate)
        heads = (config.num_heads_inner, config.num_heads_outer)
        options = config.mlp_ratio, config.qkv_bias, config.proj_drop_rate
        for rate in drop_path_rates(config.drop_path_rate, config.depth):
            self.blocks.append(InnerBlock(c, D, n, heads, *options, rate, config.legacy, config.attn_drop_rate))
        self.build_head()

    def stages(self, image: Tensor) -> Iterator[Tensor]:
        """Yields the tokens [B, 1 + N, D] after each block."""
        self.grid_of(image)
        pixels = self.pixel_embed(image, self.pixel_pos)
        patches = merged_pixels(pixels, self.pixel_embed.num_patches, self.norm1_proj, self.proj, self.norm2_proj)
        tokens = torch.cat((self.cls_token.expand(image.shape[0], -1, -1), patches), 1)
        tokens = self.pos_drop(tokens + self.patch_pos)
        for block in self.blocks:
            run = (lambda *x, b=block: recomputed(b, *x)) if self.recomputes else block
            pixels, tokens = run(pixels, tokens)
            yield tokens

    def no_weight_decay(self) -> set[str]:
        """Names of parameters to exclude from weight decay, as in timm."""
        return {"patch_pos", "pixel_pos", "cls_token"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Regular expressions that assign parameters to layers, for timm's layer-wise learning rates."""
        stem = r"^cls_token|patch_pos|pixel_pos|pixel_embed|norm[12]_proj|proj"
        return dict(stem=stem, blocks=[(r"^blocks\.(\d+)", None), (r"^norm", (99999,))])


CONFIG = TntConfig
MODEL = TransformerInTransformer
VARIANTS: dict[str, Options] = {
    "tnt_s_legacy_patch16_224": dict(legacy=True),
    "tnt_s_patch16_224": {},
    "tnt_b_patch16_224": dict(embed_dim=640, inner_dim=40, num_heads_outer=10),
}
ORACLE = dict.fromkeys(VARIANTS, "timm")

# Counted by timm 1.0.31.
PARAMS = dict(zip(VARIANTS, (23_755_336, 23_768_584, 65_428_680), strict=True))

# Names in checkpoints, from timm 1.0.31 and the authors' tnt_pytorch/tnt.py (huawei-noah/Efficient-AI-Backbones).


def _from_tnt(key: str) -> str:
    for theirs, ours in TNT_NAMES.items():
        key = key.replace(theirs, ours)
    return key


def _read_tnt(state: State) -> State:
    """The authors' positions of pixels [1, h · w, c], which are square, as [1, c, h, w]."""
    pos = state["inner_pos"]
    return {**state, "inner_pos": pos.transpose(1, 2).unflatten(2, (math.isqrt(pos.shape[1]), -1))}


TNT_NAMES = {  # the authors' → timm's
    "outer_pos": "patch_pos",
    "inner_pos": "pixel_pos",
    "patch_embed": "pixel_embed",
    "proj_norm1": "norm1_proj",
    "proj_norm2": "norm2_proj",
    "inner_norm1": "norm_in",
    "inner_attn": "attn_in",
    "inner_norm2": "norm_mlp_in",
    "inner_mlp": "mlp_in",
    "outer_norm1": "norm_out",
    "outer_attn": "attn_out",
    "outer_norm2": "norm_mlp",
    "outer_mlp": "mlp",
}
TIMM_TNT = Layout(name="timm", mark="patch_pos", resize="bicubic_antialias")
TNT_LAYOUTS = Layout(name="TNT", mark="inner_pos", resize="bicubic", number=_from_tnt, read=_read_tnt), TIMM_TNT


def fit_tnt(model: Any, target: State, state: State, metadata: Mapping[str, str], mode: str) -> tuple[list[str], str]:
    """Makes the positions of `state` fit the grid of a TNT; for the arguments see `fit.fit`."""
    useless = ["outer_tokens"] * ("outer_tokens" in state)
    for key in useless:  # zeros, which the authors' code does not train
        del state[key]
    return useless, fit_table(state, target, "patch_pos", model.pixel_embed.grid_size, 1, mode)


CHECKPOINTS = Spelling("TNT", TNT_LAYOUTS, fit_tnt, {"timm": (TIMM_TNT,)})
