"""BoTNet — Bottleneck transformers for visual recognition. Srinivas et al., arXiv:2101.11605.

Differs from ViT:
  1. A ResNet-50; in the three blocks of its last stage self-attention replaces the 3 x 3 convolution.
  2. Scores have a bias that depends on the query and on the distance in rows and in columns; there is no class token.
  3. Attention has no output projection; a BatchNorm and ReLU follow it. Means of 2 x 2 halve the last map.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints.renaming import CheckpointFormats, Fitted, Layout
from ..checkpoints.tensors import State
from ..engine.attention import axis_bias
from ..kernels.attention import sum_of_axes
from ..layers.embed import sides
from ..layers.fusable import Fusable
from ..layers.residual import Bottleneck, ConvNormAct, Residual
from .config import Options
from .residual import ResidualConfig, ResidualNetwork

Grid = tuple[int, int]


class Rel2d(nn.Module):
    """Embeddings of the distances between the rows, and the columns, of two positions of a map."""

    def __init__(self, grid: Grid, dim: int) -> None:
        super().__init__()
        self.grid, (rows, columns) = grid, grid
        self.height_rel = nn.Parameter(torch.empty(2 * rows - 1, dim))
        self.width_rel = nn.Parameter(torch.empty(2 * columns - 1, dim))

    def forward(self, q: Tensor) -> Tensor:
        """Queries [B, H, N, d] → their products with the embeddings of every key's distance, [B, H, N, N]."""
        return sum_of_axes(*self.axes(q))

    def axes(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [B, H, N, d] → their products with the embeddings of every row's, and every column's, distance."""
        tables = (pairs(t, n) for t, n in zip((self.height_rel, self.width_rel), self.grid, strict=True))
        return axis_bias(q, tables, self.grid)


class BottleneckAttention(Fusable):
    """Self-attention on a map: softmax(q kᵀ / √d + q (r_row + r_column)ᵀ / √d) v, without an output projection.

    With a stride of 2 it takes means of 2 x 2 of the result.
    """

    def __init__(self, dim: int, num_heads: int, grid: Grid, stride: int = 1) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.grid = grid
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Conv2d(dim, 3 * dim, 1, bias=False)
        self.pos_embed = Rel2d(grid, dim // num_heads)
        self.pool = nn.AvgPool2d(2, 2) if stride == 2 else nn.Identity()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.qkv.weight, std=self.qkv.in_channels**-0.5)
        for table in self.pos_embed.parameters():
            nn.init.trunc_normal_(table, std=self.scale)

    def forward(self, x: Tensor) -> Tensor:
        """[B, D, H, W] → [B, D, H', W']."""
        q, k, v = self.heads(x)
        o = F.scaled_dot_product_attention(q, k, v, self.scale * self.pos_embed(q), scale=self.scale)
        return self.merge(o)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map [B, D, H, W] → queries, keys and values [B, H, N, d]."""
        if tuple(x.shape[2:]) != self.grid:
            raise ValueError(f"the map is {tuple(x.shape[2:])}; the embeddings of distances are for {self.grid}")
        q, k, v = self.qkv(x).flatten(2).mT.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v

    def merge(self, o: Tensor) -> Tensor:
        """Outputs of the heads [B, H, N, d] → [B, D, H', W']."""
        return self.pool(o.mT.flatten(1, 2).unflatten(2, self.grid))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"


def pairs(table: Tensor, n: int) -> Tensor:
    """Embeddings [2n − 1, d] of the distances 1 − n to n − 1 from query to key → those of all pairs [n, n, d]."""
    at = torch.arange(n, device=table.device)
    return table[at - at[:, None] + n - 1]


class AttentionBottleneck(Residual):
    """A bottleneck with attention, a mean of 2 x 2 for stride 2, BatchNorm and ReLU instead of the 3 x 3 convolution.

    Source: BoTNet, arXiv:2101.11605, figure 1. `grid` has the rows and columns of the map that comes in, `drop` is the
    dropout after the attention.
    """

    def __init__(
        self, inputs: int, outputs: int, stride: int, drop_path: float, num_heads: int, grid: Grid, drop: float = 0.0
    ) -> None:
        super().__init__(inputs, outputs, stride, drop_path)
        middle = outputs // 4
        self.conv1_1x1 = ConvNormAct(inputs, middle)
        self.self_attn = BottleneckAttention(middle, num_heads, grid, stride)
        self.post_attn = nn.BatchNorm2d(middle)
        self.drop = nn.Dropout(drop)
        self.conv3_1x1 = ConvNormAct(middle, outputs, relu=False)

    def body(self, x: Tensor) -> Tensor:
        return self.conv3_1x1(self.drop(F.relu(self.post_attn(self.self_attn(self.conv1_1x1(x))))))

    def last(self) -> nn.BatchNorm2d:
        return self.conv3_1x1.bn


@dataclass(frozen=True, kw_only=True)
class BotnetConfig(ResidualConfig):
    """Options of BoTNet, which are those of `ResidualConfig`; images have sides that 32 divides."""

    only: ClassVar = ResidualConfig.only | dict(dynamic_img_size=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        step = self.reductions[-1]
        if any(side % step for side in sides(self.img_size)):
            raise ValueError(f"img_size is {self.img_size}; use multiples of {step}")


class BottleneckTransformer(ResidualNetwork):
    """BoTNet; its features are a map [B, H, W, D]."""

    layout = "botnet"

    def build_block(
        self, stage: int, index: int, inputs: int, outputs: int, stride: int, drop_path: float, grid: Grid
    ) -> nn.Module:
        """A bottleneck, with attention in the stages that have heads."""
        heads = self.config.num_heads[stage]
        drop = self.config.proj_drop_rate
        if heads:
            return AttentionBottleneck(inputs, outputs, stride, drop_path, heads, grid, drop)
        return Bottleneck(inputs, outputs, stride, drop_path)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Reinitialises the weights as in timm."""
        super().init_weights()
        for module in self.modules():
            if isinstance(module, BottleneckAttention):
                module.reset_parameters()


CONFIG = BotnetConfig
MODEL = BottleneckTransformer
VARIANTS: dict[str, Options] = {"botnet50": {}}

# Names in checkpoints, from timm 1.0.31.

BOTNET = Layout(name="timm", mark="stem.conv1.conv.weight", beside="head.fc.weight", resize="linear")


def fit_distances(model: Any, target: State, state: State, metadata: Mapping[str, str], mode: str) -> Fitted:
    """Interpolates embeddings of distances for the grids of a BoTNet, as SAM does; for the arguments see `fit.fit`."""
    notes = []
    for key in (key for key in state if key.endswith(("pos_embed.height_rel", "pos_embed.width_rel"))):
        old = state[key]
        new = target[key].shape if key in target else state[key].shape
        if old.shape != new and old.shape[1:] == new[1:]:
            state[key] = F.interpolate(old.mT[None], new[0], mode=mode)[0].mT.contiguous()
            notes.append(f"{key.split('.')[-1]} {len(old)} resized to {new[0]} ({mode})")
    return [], ", ".join(dict.fromkeys(notes))


CHECKPOINTS = CheckpointFormats("BoTNet", (BOTNET,), fit_distances)
