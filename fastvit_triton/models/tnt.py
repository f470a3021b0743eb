"""TNT — Transformer in transformer. Han et al., arXiv:2103.00112. Official: huawei-noah/Efficient-AI-Backbones.

Differs from ViT:
  1. A patch also has 4 x 4 pixels of few channels, projections of 7 x 7 pixels. In each block the pixels attend to each
     other within their patch, and are then added to the token of the patch by a linear layer between two norms.
  2. Queries and keys have one projection and values another, without biases.
  3. `*_legacy_*`: the first norm is that of each pixel, and patches see their neighbours in the projection.
Adds the inner blocks.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints.renaming import CheckpointFormats, Layout
from ..checkpoints.tensors import State
from ..layers import DropPath, Mlp, PatchEmbed, drop_path_rates
from ..layers.drop_path import add
from ..layers.embed import sides
from ..layers.fusable import Fusable
from ..layers.recompute import recomputed
from .config import Options, check_multiple, check_patches
from .fit import fit_tables
from .tokens import TokenConfig, TokenModel


class SplitAttention(Fusable):
    """Multi-head self-attention whose queries and keys have one projection, and values another (section 3.1)."""

    def __init__(
        self, dim: int, num_heads: int, qkv_bias: bool = False, attn_drop: float = 0.0, proj_drop: float = 0.0
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qk = nn.Linear(dim, 2 * dim, bias=qkv_bias)
        self.v = nn.Linear(dim, dim, bias=qkv_bias)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, N, D] → [B, N, D]."""
        q, k = self.qk(x).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, N, d]
        v = self.v(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        dropout = self.attn_drop.p if self.attn_drop.training else 0.0
        o = F.scaled_dot_product_attention(q, k, v, None, dropout, scale=self.scale)
        return self.proj_drop(self.proj(o.transpose(1, 2).flatten(2)))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"


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
        check_patches(self.img_size, self.patch_size)
        check_multiple(self, "inner_dim", "num_heads_inner")
        check_multiple(self, "embed_dim", "num_heads_outer")
        if self.legacy and any(side % self.first_stride for side in sides(self.patch_size)):
            raise ValueError(f"first_stride is {self.first_stride}; use one that divides patch_size {self.patch_size}")

    @property
    def num_heads(self) -> int:
        """Heads of the patches' attention."""
        return self.num_heads_outer


class PixelEmbed(PatchEmbed):
    """Projects 7 x 7 pixels at each `stride` within a patch (section 3.1).

    A `legacy` model convolves the whole image, whose patches then see each other; others each patch with zeros around.
    """

    def __init__(self, config: TntConfig) -> None:
        self.stride = stride = config.first_stride
        self.legacy = config.legacy
        super().__init__(sides(config.img_size), sides(config.patch_size), config.in_chans, config.inner_dim)
        self.pixels = (-(-self.patch_size[0] // stride), -(-self.patch_size[1] // stride))

    def build(self, embed_dim: int, bias: bool) -> None:
        self.proj = nn.Conv2d(self.in_chans, embed_dim, 7, self.stride, 3)

    def forward(self, image: Tensor, pos: Tensor, prefix: None = None) -> Tensor:  # type: ignore[override]
        """image [B, C, H, W], pos [1, c, h, w] → pixels [B · N, h · w, c]."""
        grid = self.grid_of(image)
        x = self.proj(image) if self.legacy else image
        h, w = self.pixels if self.legacy else self.patch_size
        x = x.unflatten(3, (grid[1], w)).unflatten(2, (grid[0], h)).permute(0, 2, 4, 1, 3, 5).flatten(0, 2)
        x = x if self.legacy else self.proj(x)
        return (x + pos).flatten(2).transpose(1, 2)


class InnerBlock(Fusable):
    """Attention and MLP of the n pixels of each patch, then of the patches, to which the pixels are added (eq. 3-6).

    In a `legacy` model the pixels' norm is that of each pixel, not of all together.
    """

    def __init__(self, config: TntConfig, pixels: int, drop_path: float = 0.0) -> None:
        super().__init__()
        inner = config.inner_dim
        dim = config.embed_dim
        legacy = config.legacy
        drop = config.proj_drop_rate
        options = (config.qkv_bias, config.attn_drop_rate, drop)
        self.norm_in = nn.LayerNorm(inner)
        self.attn_in = SplitAttention(inner, config.num_heads_inner, *options)
        self.norm_mlp_in = nn.LayerNorm(inner)
        self.mlp_in = Mlp(inner, 4 * inner, drop=drop)
        self.norm1_proj = nn.LayerNorm(inner if legacy else inner * pixels)
        self.proj = nn.Linear(inner * pixels, dim, bias=legacy)
        self.norm2_proj = None if legacy else nn.LayerNorm(dim)
        self.norm_out = nn.LayerNorm(dim)
        self.attn_out = SplitAttention(dim, config.num_heads_outer, *options)
        self.drop_path = DropPath(drop_path)
        self.norm_mlp = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, int(dim * config.mlp_ratio), drop=drop)

    def forward(self, pixels: Tensor, patches: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels [B · N, n, c] and tokens [B, 1 + N, D] → the same."""
        pixels = add(pixels, self.drop_path, lambda x: self.attn_in(self.norm_in(x)))
        pixels = add(pixels, self.drop_path, lambda x: self.mlp_in(self.norm_mlp_in(x)))
        merged = merged_pixels(pixels, patches.shape[1] - 1, self.norm1_proj, self.proj, self.norm2_proj)
        patches = torch.cat((patches[:, :1], patches[:, 1:] + merged), 1)
        patches = add(patches, self.drop_path, lambda x: self.attn_out(self.norm_out(x)))
        return pixels, add(patches, self.drop_path, lambda x: self.mlp(self.norm_mlp(x)))


def merged_pixels(x: Tensor, patches: int, before: nn.Module, proj: nn.Module, after: nn.Module | None) -> Tensor:
    """Pixels x [B · N, n, c] of N patches → [B, N, D]: a norm, of a pixel or of all together, a projection, a norm."""
    x = before(x) if after is None else x
    x = x.reshape(-1, patches, x.shape[1] * x.shape[2])
    return proj(x) if after is None else after(proj(before(x)))


class TransformerInTransformer(TokenModel):
    """TNT; its features are tokens [B, 1 + N, D]."""

    layout = "tnt"
    undecayed = r"^(patch_pos|pixel_pos|cls_token)$"
    stem_pattern = r"^cls_token|patch_pos|pixel_pos|pixel_embed|norm[12]_proj|proj"

    def __init__(self, config: TntConfig) -> None:
        super().__init__(config)
        c = config.inner_dim
        D = config.embed_dim
        self.pixel_embed = PixelEmbed(config)
        pixels = self.pixel_embed.pixels
        n = pixels[0] * pixels[1]
        self.norm1_proj = nn.LayerNorm(n * c)
        self.proj = nn.Linear(n * c, D)
        self.norm2_proj = nn.LayerNorm(D)
        self.cls_token = nn.Parameter(torch.empty(1, 1, D))
        self.patch_pos = nn.Parameter(torch.empty(1, 1 + self.pixel_embed.num_patches, D))
        self.pixel_pos = nn.Parameter(torch.empty(1, c, *pixels))
        self.pos_drop = nn.Dropout(config.pos_drop_rate)
        for rate in drop_path_rates(config.drop_path_rate, config.depth):
            self.blocks.append(InnerBlock(config, n, rate))
        self.build_head()

    def outputs(self, image: Tensor) -> Iterator[Tensor]:
        """Yields the tokens [B, 1 + N, D] after each block."""
        self.grid_of(image)
        pixels = self.pixel_embed(image, self.pixel_pos)
        patches = self.merge(pixels)
        tokens = torch.cat((self.cls_token.expand(image.shape[0], -1, -1), patches), 1)
        tokens = self.pos_drop(tokens + self.patch_pos)
        for block in self.blocks:
            run = (lambda *x, b=block: recomputed(b, *x)) if self.recomputes else block
            pixels, tokens = run(pixels, tokens)
            yield tokens

    def position_tables(self) -> dict[str, tuple[tuple[int, int], int]]:
        return {"patch_pos": (self.pixel_embed.grid_size, 1)}

    def merge(self, pixels: Tensor) -> Tensor:
        """Pixels [B · N, n, c] → patches [B, N, D]."""
        return merged_pixels(pixels, self.pixel_embed.num_patches, self.norm1_proj, self.proj, self.norm2_proj)


CONFIG = TntConfig
MODEL = TransformerInTransformer
VARIANTS: dict[str, Options] = {
    "tnt_s_legacy_patch16_224": dict(legacy=True),
    "tnt_s_patch16_224": {},
    "tnt_b_patch16_224": dict(embed_dim=640, inner_dim=40, num_heads_outer=10),
}


# Names in checkpoints, from timm 1.0.31 and the authors' tnt_pytorch/tnt.py (huawei-noah/Efficient-AI-Backbones).


def _read_tnt(state: State) -> State:
    """The authors' positions of pixels [1, h · w, c], which are square, as [1, c, h, w]."""
    pos = state["inner_pos"]
    return {**state, "inner_pos": pos.transpose(1, 2).unflatten(2, (math.isqrt(pos.shape[1]), -1))}


TIMM_TNT = Layout(name="timm", mark="patch_pos", resize="bicubic_antialias")
TNT_LAYOUTS = (
    Layout(
        name="TNT",
        mark="inner_pos",
        resize="bicubic",
        stem={
            "{patch,pixel}_pos": "{outer,inner}_pos",
            "pixel_embed": "patch_embed",
            "norm{1,2}_proj": "proj_norm{1,2}",
        },
        block={
            "{norm,attn,norm_mlp,mlp}_in": "inner_{norm1,attn,norm2,mlp}",
            "norm{1,2}_proj": "proj_norm{1,2}",
            "{norm_out,attn_out,norm_mlp,mlp}": "outer_{norm1,attn,norm2,mlp}",
        },
        read=_read_tnt,
    ),
    TIMM_TNT,
)

CHECKPOINTS = CheckpointFormats("TNT", TNT_LAYOUTS, fit_tables, {"timm": (TIMM_TNT,)})
