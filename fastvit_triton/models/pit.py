"""PiT — Rethinking spatial dimensions of vision transformers. Heo et al., arXiv:2103.16302. Official: naver-ai/pit.

Differs from ViT:
  1. Patches overlap: the stride of their projection is half their side.
  2. Three stages; between them a depthwise convolution halves and widens the map, a linear layer the class token.
  3. Positions are added to the patches only, and the final norm is of the class token only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints.renaming import CheckpointFormats, Fitted, Layout
from ..checkpoints.tensors import State
from ..layers import Attention, Block, Blocks, Mlp
from ..layers.embed import INTERPOLATION, sides
from .base import NORM
from .config import Options
from .distilled import Distilled
from .pyramid import PyramidConfig, PyramidTransformer


class Tokens(NamedTuple):
    """Tokens x [B, T + N, D], of which the last N are those of a grid of (rows, columns)."""

    x: Tensor
    grid: tuple[int, int]

    def split(self) -> tuple[Tensor, Tensor]:
        """The prefix [B, T, D], and the map [B, rows, columns, D]."""
        T = self.x.shape[1] - self.grid[0] * self.grid[1]
        return self.x[:, :T], self.x[:, T:].unflatten(1, self.grid)


def joined(prefix: Tensor, patches: Tensor) -> Tokens:
    """Prefix [1 or B, T, D] and map [B, D, rows, columns] as tokens."""
    grid = (patches.shape[2], patches.shape[3])
    return Tokens(torch.cat((prefix.expand(patches.shape[0], -1, -1), patches.flatten(2).transpose(1, 2)), 1), grid)


class OverlapEmbed(nn.Module):
    """Projects overlapping patches, without padding (PiT, arXiv:2103.16302, section 3.2)."""

    def __init__(
        self, img_size: tuple[int, int], patch_size: tuple[int, int], stride: int, in_chans: int, dim: int
    ) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.stride = stride
        self.conv = nn.Conv2d(in_chans, dim, patch_size, stride)
        self.grid_size = self.grid_of(img_size)

    def grid_of(self, size: tuple[int, ...]) -> tuple[int, int]:
        """(rows, columns) of patches of an image of (height, width)."""
        (height, width), (h, w) = size, self.patch_size
        return (height - h) // self.stride + 1, (width - w) // self.stride + 1

    def forward(self, image: Tensor, pos: Tensor, mode: str) -> Tensor:
        """image [B, C, H, W], pos [1, D, h, w], which is resized in this mode → [B, D, rows, columns]."""
        x = self.conv(image)
        return x + resize_map(pos, (x.shape[2], x.shape[3]), mode)


class TokenPooling(nn.Module):
    """Halves the map and widens its tokens by a depthwise convolution, and those before it by a linear layer.

    Source: PiT, arXiv:2103.16302, section 3.2 and figure 4. Channels after it are a multiple of those before.
    """

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        if out % dim:
            raise ValueError(f"a stage has {out} channels, which is no multiple of the {dim} of the stage before")
        self.conv = nn.Conv2d(dim, out, 3, 2, 1, groups=dim)
        self.fc = nn.Linear(dim, out)

    def forward(self, tokens: Tokens) -> Tokens:
        """Tokens [B, T + N, D] → [B, T + N', D']."""
        prefix, patches = tokens.split()
        return joined(self.fc(prefix), self.conv(patches.permute(0, 3, 1, 2)))


class PooledStage(nn.Module):
    """A pooling, None in the first stage, and blocks."""

    def __init__(self, pool: TokenPooling | None, blocks: Blocks) -> None:
        super().__init__()
        self.pool = pool
        self.blocks = blocks

    def forward(self, tokens: Tokens, recompute: bool = False) -> Tokens:
        """Tokens [B, T + N, D] → [B, T + N', D']."""
        x, grid = tokens if self.pool is None else self.pool(tokens)
        return Tokens(self.blocks(x, recompute=recompute), grid)


def resize_map(pos: Tensor, grid: tuple[int, int], mode: str) -> Tensor:
    """Interpolates positions [1, D, h, w] to another grid; for the mode see `resize_pos_embed`."""
    if tuple(pos.shape[2:]) == grid:
        return pos
    return F.interpolate(pos.float(), grid, **INTERPOLATION[mode]).to(pos.dtype)


@dataclass(frozen=True, kw_only=True)
class PitConfig(PyramidConfig):
    """Options of PiT, in addition to those of `PyramidConfig`.

    Attributes:
        stride: pixels between patches, in both directions.
        base_dims: channels per head, one per stage.
    """

    patch_size: int | tuple[int, int] = 16
    stride: int = 8
    base_dims: tuple[int, ...] = (48, 48, 48)
    depths: tuple[int, ...] = (2, 6, 4)
    num_heads: tuple[int, ...] = (2, 4, 8)
    mlp_ratio: float = 4.0
    global_pool: str = "token"
    pos_drop_rate: float = 0.0
    attn_drop_rate: float = 0.0
    pools = ("token", "none")

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(D * heads for D, heads in zip(self.base_dims, self.num_heads, strict=True))

    @property
    def smallest(self) -> tuple[int, int]:
        return sides(self.patch_size)


class PoolingVisionTransformer(PyramidTransformer):
    """PiT; its features are the class token [B, 1, D]. Positions are resampled for images of another size."""

    config: PitConfig
    layout = "pit"
    num_prefix_tokens = 1
    info = "transformers.{}", 0
    parts = ("transformers",)
    undecayed = r"^(pos_embed|cls_token)$"
    stem_pattern = r"^patch_embed|pos_embed|cls_token"
    layer_patterns = ((r"^transformers\.(\d+)\.pool", (0,)), (r"^transformers\.(\d+)\.blocks\.(\d+)", None), NORM)
    coarse_patterns = ((r"^transformers\.(\d+)", None), NORM)
    position_resize = "bicubic_antialias"

    def __init__(self, config: PitConfig) -> None:
        super().__init__(config)
        D = config.widths[0]
        sizes = (sides(config.img_size), sides(config.patch_size))
        self.patch_embed = OverlapEmbed(*sizes, config.stride, config.in_chans, D)
        self.pos_embed = nn.Parameter(torch.empty(1, D, *self.patch_embed.grid_size))
        self.cls_token = nn.Parameter(torch.empty(1, self.num_prefix_tokens, D))
        self.pos_drop = nn.Dropout(config.pos_drop_rate)
        self.transformers = nn.ModuleList()
        for i, rates in enumerate(self.drop_path_rates()):
            pool = TokenPooling(*config.widths[i - 1 : i + 1]) if i else None
            self.transformers.append(PooledStage(pool, Blocks(*(build_block(config, i, p) for p in rates))))
        self.build_head()

    def stage(self, x: Any, i: int) -> Any:
        """Stage i: image [B, C, H, W] or tokens [B, T + N, D] → tokens [B, T + N', D']."""
        if not i:
            x = self.patch_embed(x, self.pos_embed, self.position_resize)
            x = joined(self.cls_token, self.pos_drop(x))
        return self.transformers[i](x, self.recomputes)

    def normalize_stage(self, x: Any, stage: int) -> Any:
        """The tokens as they are: the final norm is not that of patches."""
        return x

    def stage_features(self, x: Tokens, stage: int) -> Tensor:
        """A stage's class token [B, 1, D]; that of the last stage after the final norm."""
        return super().normalize_stage(x.split()[0], stage)

    def to_map(self, x: Any, image: Tensor, output_fmt: str) -> tuple[Tensor, Tensor | None]:
        """A stage's patches in another format, and its class token."""
        prefix, patches = x.split()
        return super().to_map(patches, image, output_fmt)[0], prefix

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """As in timm; a step of the first map is the stride of its patches."""
        return [stage | dict(reduction=self.config.stride << i) for i, stage in enumerate(super().feature_info)]

    @torch.no_grad()
    def init_weights(self) -> None:
        """Reinitialises positions and class token as in timm; other layers keep PyTorch's initial values."""
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        nn.init.trunc_normal_(self.cls_token, std=0.02)


class DistilledPooling(Distilled, PoolingVisionTransformer):
    """PiT with a distillation token after the class token, and a second head on it, as DeiT."""

    num_prefix_tokens = 2


def build_block(config: PitConfig, stage: int, drop_path: float) -> Block:
    """Builds one block of a stage."""
    D = config.widths[stage]
    heads = config.num_heads[stage]
    drop = config.proj_drop_rate
    attn = Attention(D, heads, attn_drop=config.attn_drop_rate, proj_drop=drop)
    return Block(D, attn, Mlp(D, int(D * config.mlp_ratio), drop=drop), config.eps, drop_path=drop_path)


SIZES: dict[str, Options] = {
    "ti": dict(base_dims=(32, 32, 32)),
    "xs": {},
    "s": dict(num_heads=(3, 6, 12)),
    "b": dict(patch_size=14, stride=7, base_dims=(64, 64, 64), depths=(3, 6, 4), num_heads=(4, 8, 16)),
}

CONFIG = PitConfig
MODEL = PoolingVisionTransformer
VARIANTS: dict[str, Options] = {f"pit_{n}{kind}_224": size for kind in ("", "_distilled") for n, size in SIZES.items()}
MODELS = {name: DistilledPooling for name in VARIANTS if "_distilled_" in name}


# Names in checkpoints, from timm 1.0.31 and the authors' pit.py.


PIT: dict[str, Any] = dict(mark="patch_embed.conv.weight", resize="bicubic_antialias")
TIMM_PIT = Layout(name="timm", beside="transformers.0.blocks.0.attn.qkv.weight", **PIT)
POOLS = {"transformers.{}.pool": "pools.{-1}"}  # the authors' lie beside the stages; in timm they begin the next one
PIT_LAYOUTS = (Layout(name="PiT", stem=POOLS, **PIT | dict(mark="pools.0.conv.weight")), TIMM_PIT)


def fit_map(model: Any, target: State, state: State, metadata: Mapping[str, str], mode: str) -> Fitted:
    """Makes the positions [1, D, h, w] of `state` fit the grid of a PiT; for the arguments see `fit.fit`."""
    new = model.patch_embed.grid_size
    pos = state.get("pos_embed")
    if pos is None or pos.dim() != 4 or tuple(pos.shape[2:]) == new:
        return [], ""
    state["pos_embed"] = resize_map(pos, new, mode)
    return [], f"{pos.shape[2]}x{pos.shape[3]} resized to {new[0]}x{new[1]} ({mode})"


CHECKPOINTS = CheckpointFormats("PiT", PIT_LAYOUTS, fit_map, {"timm": (TIMM_PIT,)})
