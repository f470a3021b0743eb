"""CvT — Introducing convolutions to vision transformers. Wu et al., arXiv:2103.15808. Official: microsoft/CvT.

Differs from ViT:
  1. Three stages; each begins with a convolution whose windows overlap, and a LayerNorm. There are no positions.
  2. Queries, keys and values are depthwise convolutions of the map; keys and values with a stride of 2.
  3. The class token joins in the last stage, and bypasses the convolutions.
  4. Scores are divided by the root of all channels, not of those of a head; the MLP has QuickGELU.
Adds the convolutional projections. No relation to the CVT of arXiv:2104.05704 (`compact_cvt_*`).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints.renaming import CheckpointFormats, Layout
from ..layers import Block, Blocks, Mlp, drop_path_rates
from ..layers.drop_path import add
from ..layers.embed import sides
from ..layers.fusable import Fusable
from ..layers.recompute import recomputed
from .base import NORM
from .config import Options
from .fit import fit_tables
from .pyramid import PyramidConfig, PyramidTransformer

Grid = tuple[int, int]


class ConvEmbed(nn.Module):
    """A convolution with overlapping windows of 2 · stride − 1 rows and columns, and a LayerNorm."""

    def __init__(self, in_chans: int, dim: int, stride: Grid, eps: float) -> None:
        super().__init__()
        rows, columns = stride
        kernel = (2 * rows - 1, 2 * columns - 1)
        padding = (rows // 2, columns // 2)
        self.proj = nn.Conv2d(in_chans, dim, kernel, stride, padding)
        self.norm = nn.LayerNorm(dim, eps=eps)

    def grid_of(self, size: Grid) -> Grid:
        """(H', W') of a map of this size."""
        (height, width), (rows, columns) = size, self.proj.stride
        return (height + 2 * (rows // 2) + 1) // rows - 1, (width + 2 * (columns // 2) + 1) // columns - 1

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] → [B, H', W', D]."""
        return self.norm(self.proj(x).permute(0, 2, 3, 1))


class ConvProjection(nn.Module):
    """A 3 x 3 depthwise convolution and a BatchNorm, which inference folds into it."""

    def __init__(self, dim: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, dim, 3, stride, 1, groups=dim, bias=False)
        self.bn = nn.BatchNorm2d(dim)

    def forward(self, x: Tensor) -> Tensor:
        """[B, H, W, D] → [B, ⌈H / stride⌉, ⌈W / stride⌉, D]."""
        return self.bn(self.conv(x.permute(0, 3, 1, 2))).permute(0, 2, 3, 1)


@dataclass(frozen=True, kw_only=True)
class CvtConfig(PyramidConfig):
    """Options of CvT, in addition to those of `PyramidConfig`; `patch_size` is the stride of the first convolution.

    Attributes:
        embed_dim: channels of each stage.
        class_token: prepend a learned token in the last stage.
    """

    embed_dim: tuple[int, ...] = (64, 192, 384)
    depths: tuple[int, ...] = (1, 2, 10)
    num_heads: tuple[int, ...] = (1, 3, 6)
    mlp_ratio: float = 4.0
    attn_drop_rate: float = 0.0
    class_token: bool = True
    global_pool: str = "token"
    eps: float = 1e-5
    pools = ("token", "avg", "none")


class ConvAttention(Fusable):
    """Self-attention of convolved queries, keys and values, scaled by D^-1/2 for all D channels.

    Prefix tokens bypass the convolutions, of which those of keys and values have a stride. While probabilities are
    dropped, PyTorch computes the attention.
    """

    stride = 2

    def __init__(self, config: CvtConfig, stage: int) -> None:
        super().__init__()
        dim = config.widths[stage]
        self.num_heads = config.num_heads[stage]
        self.scale = dim**-0.5
        for name in "qkv":
            self.add_module(f"conv_proj_{name}", ConvProjection(dim, 1 if name == "q" else self.stride))
        for name in "qkv":
            self.add_module(f"proj_{name}", nn.Linear(dim, dim))
        self.attn_drop = nn.Dropout(config.attn_drop_rate)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(config.proj_drop_rate)

    def forward(self, x: Tensor, size: Grid) -> Tensor:
        """Tokens [B, T + H · W, D] of a map of this size, of which T are prefix tokens → [B, T + H · W, D]."""
        q, k, v = self.heads(x, size)
        dropout = self.attn_drop.p if self.attn_drop.training else 0.0
        o = F.scaled_dot_product_attention(q, k, v, None, dropout, scale=self.scale)
        return self.proj_drop(self.proj(o.transpose(1, 2).flatten(2)))

    def heads(self, x: Tensor, grid: Grid) -> list[Tensor]:
        """Queries, keys and values [B, heads, N or M, d] of tokens."""
        projected = []
        T = x.shape[1] - grid[0] * grid[1]
        image = x[:, T:].unflatten(1, grid)
        for name in "qkv":
            tokens = self.get_submodule(f"conv_proj_{name}")(image).flatten(1, 2)
            tokens = torch.cat((x[:, :T], tokens), 1) if T else tokens
            tokens = self.get_submodule(f"proj_{name}")(tokens)
            projected.append(tokens.unflatten(-1, (self.num_heads, -1)).transpose(1, 2))
        return projected

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, stride={self.stride}"


class ConvBlock(Block):
    """A pre-norm block whose attention is a `ConvAttention`, called with the size of the map."""

    attn: ConvAttention

    def forward(self, x: Tensor, size: Grid) -> Tensor:  # type: ignore[override]  # the size of the map comes with x
        """Tokens [B, T + H · W, D] of a map of this size → [B, T + H · W, D]."""
        x = add(x, self.drop_path1, lambda x: self.attn(self.norm1(x), size))
        return add(x, self.drop_path2, lambda x: self.mlp(self.norm2(x)))


class ConvStage(nn.Module):
    """A convolution and blocks, with a class token in the last stage."""

    def __init__(self, patch_embed: ConvEmbed, blocks: Blocks, class_token: bool) -> None:
        super().__init__()
        self.patch_embed = patch_embed
        self.blocks = blocks
        width = patch_embed.norm.normalized_shape[0]
        self.cls_token = nn.Parameter(torch.empty(1, 1, width)) if class_token else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.cls_token is not None:
            nn.init.trunc_normal_(self.cls_token, std=0.02)

    def forward(self, x: Tensor, recompute: bool = False) -> Tensor:
        """[B, C, H, W] → [B, H', W', D], or [B, 1, 1 + H' · W', D] with a class token."""
        x = self.patch_embed(x)
        grid = (x.shape[1], x.shape[2])
        x = x.flatten(1, 2)
        token = self.cls_token
        x = x if token is None else torch.cat((token.expand(x.shape[0], -1, -1), x), 1)
        for block in self.blocks:
            x = recomputed(block, x, grid) if recompute else block(x, grid)
        return x.unflatten(1, grid) if token is None else x.unsqueeze(1)


class ConvolutionalVisionTransformer(PyramidTransformer):
    """CvT; its features are tokens [B, 1 + N, D]."""

    config: CvtConfig
    layout = "cvt"
    flattens = True
    info = "stage{}", 0
    undecayed = r"cls_token$"
    stem_pattern = r"^stage0\.patch_embed"
    layer_patterns = ((r"^stage(\d+)\.blocks\.(\d+)", None), (r"^stage(\d+)\.(?:patch_embed|cls_token)", (0,)), NORM)
    coarse_patterns = ((r"^stage(\d+)", None), NORM)

    def __init__(self, config: CvtConfig) -> None:
        super().__init__(config)
        stride = sides(config.patch_size)
        widths = (config.in_chans, *config.widths)
        last = self.num_stages - 1
        self.num_prefix_tokens = int(config.class_token)
        for i, (D, rates) in enumerate(zip(config.widths, self.drop_path_rates(), strict=True)):
            blocks = Blocks(*(build_block(config, i, p) for p in rates))
            embed = ConvEmbed(widths[i], D, (2, 2) if i else stride, config.eps)
            self.add_module(f"stage{i}", ConvStage(embed, blocks, config.class_token and i == last))
        self.build_head()

    def drop_path_rates(self) -> list[list[float]]:
        """Rates of the blocks of each stage; only those of the last one are above 0."""
        *first, last = self.config.depths
        return [[0.0] * depth for depth in first] + [drop_path_rates(self.config.drop_path_rate, last)]

    def stage(self, x: Tensor, i: int) -> Tensor:
        """Stage i: image [B, C, H, W] or map [B, H, W, D] → map [B, H', W', D']; [B, 1, 1 + N, D] for the last one."""
        return self.get_submodule(f"stage{i}")(x.permute(0, 3, 1, 2) if i else x, self.recomputes)

    def to_map(self, x: Tensor, image: Tensor, output_fmt: str) -> tuple[Tensor, Tensor | None]:
        """A stage's map [B, H, W, D], or its tokens [B, 1 + N, D], in another format, and the class token or None."""
        if x.dim() == 4:
            return super().to_map(x, image, output_fmt)
        T = self.num_prefix_tokens
        grid = image.shape[2:]
        for i in range(self.num_stages):
            grid = getattr(self, f"stage{i}").patch_embed.grid_of(grid)
        return super().to_map(x[:, T:].unflatten(1, grid), image, output_fmt)[0], x[:, :T] if T else None

    def drop_stages(self, kept: int) -> None:
        """Removes all but the first `kept` stages, and so the class token."""
        for i in range(kept, self.num_stages):
            delattr(self, f"stage{i}")
        self.num_prefix_tokens = 0
        self.config = self.config.replace(class_token=False, global_pool="none")


def build_block(config: CvtConfig, stage: int, drop_path: float) -> ConvBlock:
    """Builds one block of a stage."""
    D = config.widths[stage]
    attn = ConvAttention(config, stage)
    mlp = Mlp(D, int(D * config.mlp_ratio), "quick_gelu", drop=config.proj_drop_rate)
    return ConvBlock(D, attn, mlp, config.eps, drop_path=drop_path)


CONFIG = CvtConfig
MODEL = ConvolutionalVisionTransformer
SIZES: dict[str, Options] = {"13": {}, "21": dict(depths=(1, 4, 16))}
VARIANTS: dict[str, Options] = {
    f"cvt_{name}_{side}": dict(size, img_size=side) for side in (224, 384) for name, size in SIZES.items()
}
VARIANTS["cvt_w24_384"] = dict(img_size=384, embed_dim=(192, 768, 1024), depths=(2, 2, 20), num_heads=(3, 12, 16))

# Names in checkpoints, from transformers 5.23 and the authors' lib/models/cls_cvt.py (microsoft/CvT).


CONVOLVED = "attention.attention.convolution_projection_{{query,key,value}}.convolution_projection.{}"
CVT_LAYOUTS = (
    Layout(
        name="transformers CvT",
        mark="encoder.stages.0.embedding.convolution_embeddings.projection.weight",
        resize="bilinear",
        stem={
            "norm": "layernorm",
            "head": "classifier",
            "stage{}": "encoder.stages.{}",
            "stage{}.patch_embed.proj": "encoder.stages.{}.embedding.convolution_embeddings.projection",
            "stage{}.patch_embed.norm": "encoder.stages.{}.embedding.convolution_embeddings.normalization",
        },
        home="stage{}.blocks.{}",
        blocks="encoder.stages.{}.layers.{}",
        block={
            "norm{1,2}": "layernorm_{before,after}",
            "attn.conv_proj_{q,k,v}.conv": CONVOLVED.format("convolution"),
            "attn.conv_proj_{q,k,v}.bn": CONVOLVED.format("normalization"),
            "attn.proj_{q,k,v}": "attention.attention.projection_{query,key,value}",
            "attn.proj": "attention.output.dense",
            "mlp.fc{1,2}": "{intermediate,output}.dense",
        },
        base="cvt.",
    ),
    Layout(
        name="CvT",
        mark="stage0.patch_embed.proj.weight",
        resize="bilinear",
        home="stage{}.blocks.{}",
        blocks="stage{}.blocks.{}",
    ),
)

CHECKPOINTS = CheckpointFormats("CvT", CVT_LAYOUTS, fit_tables)
