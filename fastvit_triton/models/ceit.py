"""CeiT — Incorporating convolution designs into visual transformers. Yuan et al., arXiv:2103.11816.

Differs from ViT:
  1. Patches of 4 x 4 are cut from a convolution's map after a BatchNorm and a maximum, a quarter of the image's side.
  2. The MLP of the patches has a depthwise convolution and three BatchNorms; the class token passes it unchanged.
  3. The class tokens of all blocks attend to each other at the end; the last of them goes to the head.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..checkpoints.renaming import CheckpointFormats, Layout
from ..engine.body import normalize
from ..layers import Attention, DropPath, Mlp, drop_path_rates
from ..layers.drop_path import add
from ..layers.embed import sides
from ..layers.fusable import Fusable
from ..layers.recompute import recomputed
from .base import BLOCKS, LAST
from .config import Options, check_multiple, check_patches
from .fit import fit_tables
from .tokens import TokenConfig, TokenModel

Grid = tuple[int, int]


class ImageToTokens(nn.Module):
    """A convolution, a BatchNorm and a maximum of the image, then patches, whose side is a multiple of 4 pixels."""

    def __init__(self, in_chans: int, dim: int, patch: int, width: int = 64) -> None:
        super().__init__()
        self.backbone: Any = nn.Module()
        self.backbone.conv = nn.Conv2d(in_chans, width, 7, 2, 3, bias=False)
        self.backbone.bn = nn.BatchNorm2d(width)
        self.backbone.maxpool = nn.MaxPool2d(3, 2, 1)
        self.proj = nn.Conv2d(width, dim, patch // 4, patch // 4)

    def forward(self, image: Tensor) -> Tensor:
        """[B, C, H, W] → [B, N, D]."""
        part = self.backbone
        x = self.proj(part.maxpool(part.bn(part.conv(image))))
        return x.flatten(2).transpose(1, 2)


class EnhancedFeedForward(Fusable):
    """Linear layer, 3 x 3 depthwise convolution and linear layer on the patches, each with a BatchNorm (eq. 4-9).

    The class token stays as it is.
    """

    def __init__(self, dim: int, hidden: int, grid: Grid) -> None:
        super().__init__()
        self.grid = grid
        self.conv1: Any = nn.Conv2d(dim, hidden, 1)
        self.conv2: Any = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.conv3: Any = nn.Conv2d(hidden, dim, 1)
        self.act = nn.GELU()
        self.bn1 = nn.BatchNorm2d(hidden)
        self.bn2 = nn.BatchNorm2d(hidden)
        self.bn3 = nn.BatchNorm2d(dim)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 1 + N, D] → [B, 1 + N, D]."""
        patches = self.convolve(x[:, 1:])
        return torch.cat((x[:, :1], patches), 1)

    def convolve(self, x: Tensor) -> Tensor:
        """Patches [B, N, D] → [B, N, D]."""
        y = x.unflatten(1, self.grid).permute(0, 3, 1, 2)
        y = self.act(self.bn1(self.conv1(y)))
        y = self.bn3(self.conv3(self.act(self.bn2(self.conv2(y)))))
        return y.flatten(2).transpose(1, 2)


class EnhancedBlock(Fusable):
    """Pre-norm block with an `EnhancedFeedForward`."""

    def __init__(self, dim: int, attn: nn.Module, leff: nn.Module, eps: float = 1e-6, drop_path: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.attn = attn
        self.norm2 = nn.LayerNorm(dim, eps=eps)
        self.leff = leff
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 1 + N, D] → [B, 1 + N, D]."""
        x = add(x, self.drop_path, lambda x: self.attn(self.norm1(x)))
        return add(x, self.drop_path, lambda x: self.leff(self.norm2(x)))


class LayerAttention(Fusable):
    """Attention and MLP of the class tokens of all layers, of which the last is returned (eq. 10)."""

    def __init__(self, dim: int, attn: nn.Module, feedforward: nn.Module, eps: float = 1e-6) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.attn = attn
        self.norm2 = nn.LayerNorm(dim, eps=eps)
        self.feedforward = feedforward

    def forward(self, x: Tensor) -> Tensor:
        """[B, layers, D] → [B, 1, D]."""
        x = x + self.attn(self.norm1(x))
        return (x + self.feedforward(self.norm2(x)))[:, -1:]


@dataclass(frozen=True, kw_only=True)
class CeitConfig(TokenConfig):
    """Options of CeiT, in addition to those of `TokenConfig`; the final norm is that of the class token.

    Attributes:
        layer_attention: attention of the class tokens of all blocks; False returns that of the last block.
    """

    num_heads: int = 6
    layer_attention: bool = True
    qkv_bias: bool = True
    eps: ClassVar[float] = 1e-6
    pools = ("token", "none")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(sides(self.patch_size))) > 1 or sides(self.patch_size)[0] % 4:
            raise ValueError(f"patch_size is {self.patch_size}; use one side, a multiple of 4")
        check_patches(self.img_size, self.patch_size)
        check_multiple(self, "embed_dim", "num_heads")


class ConvolutionalTransformer(TokenModel):
    """CeiT; its features are the class token [B, 1, D] after the attention of all layers' class tokens."""

    config: CeitConfig
    layout = "ceit"
    undecayed = r"^(pos_embed|cls_token)$"
    stem_pattern = r"^cls_token|pos_embed|i2t"
    layer_patterns = (BLOCKS, (r"^norm|^lca|^pos_layer_embed", LAST))

    def __init__(self, config: CeitConfig) -> None:
        super().__init__(config)
        D = config.embed_dim
        grid = config.grid_size
        drop = config.proj_drop_rate
        hidden = int(D * config.mlp_ratio)
        options: Any = dict(qkv_bias=config.qkv_bias, attn_drop=config.attn_drop_rate, proj_drop=drop)
        attention = partial(Attention, D, config.num_heads, **options)
        self.i2t = ImageToTokens(config.in_chans, D, sides(config.patch_size)[0])
        self.cls_token = nn.Parameter(torch.empty(1, 1, D))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + grid[0] * grid[1], D))
        self.pos_drop = nn.Dropout(config.pos_drop_rate)
        for rate in drop_path_rates(config.drop_path_rate, config.depth):
            self.blocks.append(EnhancedBlock(D, attention(), EnhancedFeedForward(D, hidden, grid), config.eps, rate))
        if config.layer_attention:
            self.lca = LayerAttention(D, attention(), Mlp(D, hidden, drop=drop), config.eps)
            self.pos_layer_embed = nn.Parameter(torch.zeros(1, config.depth, D))
        self.build_head()

    def outputs(self, image: Tensor) -> Iterator[Any]:
        """Yields after each block (its tokens [B, 1 + N, D], the class tokens [B, 1, D] of all blocks so far)."""
        self.grid_of(image)
        x = torch.cat((self.cls_token.expand(image.shape[0], -1, -1), self.i2t(image)), 1)
        tokens: tuple[Tensor, ...] = ()
        x = self.pos_drop(x + self.pos_embed)
        for block in self.blocks:
            x = recomputed(block, x) if self.recomputes else block(x)
            tokens = (*tokens, x[:, :1])
            yield x, tokens

    def normalize_stage(self, x: Any, stage: int) -> Any:
        """The tokens as they are: the final norm is not that of patches."""
        return x

    def stage_features(self, x: Any, stage: int) -> Tensor:
        """The last class token [B, 1, D] after attending to those of the blocks before it."""
        tokens = torch.cat(x[1], 1)
        ends = self.config.layer_attention and tokens.shape[1] == self.config.depth
        return normalize(self.lca(tokens + self.pos_layer_embed) if ends else tokens[:, -1:], self.norm)

    def to_map(self, x: Any, image: Tensor, output_fmt: str) -> tuple[Tensor, Tensor | None]:
        """Patches of a block in another format, and its class token."""
        return super().to_map(x[0], image, output_fmt)

    def position_tables(self) -> dict[str, tuple[Any, int]]:
        return {"pos_embed": (self.config.grid_size, 1)}

    def prune(self, stages: int, norm: bool, head: bool) -> None:
        """See `TokenModel.prune`; the attention of layers goes with the classifier, and with a block."""
        if self.config.layer_attention and (head or stages < len(self.blocks)):
            del self.lca, self.pos_layer_embed
            self.config = self.config.replace(layer_attention=False)
        super().prune(stages, norm, head)


SIZES: dict[str, Options] = {
    "tiny": dict(embed_dim=192, num_heads=3),
    "small": {},
    "base": dict(embed_dim=768, num_heads=12),
}

CONFIG = CeitConfig
MODEL = ConvolutionalTransformer
VARIANTS: dict[str, Options] = {f"ceit_{n}_224": size for n, size in SIZES.items()}
VARIANTS |= {f"ceit_{n}_384": dict(SIZES[n], img_size=384) for n in ("tiny", "small")}


# Names in checkpoints: the authors', coeusguo/ceit, ceit_model.py.

CEIT = Layout(name="CeiT", mark="i2t.proj.weight", resize="bicubic")

CHECKPOINTS = CheckpointFormats("CeiT", (CEIT,), fit_tables)
