"""Hierarchical models: a few stages of blocks, whose feature maps get smaller and wider.

A stage is a downsampling, blocks, and for the last one a LayerNorm. Maps are [B, H, W, D] throughout. Each family names
its modules as timm or the authors do, and builds them; what is common to the families is here.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..engine.body import normalize
from ..layers import Blocks, NormedPatchEmbed, drop_path_rates
from ..layers.embed import sides
from .base import ImageModel, Patterns, init_linear
from .config import BaseConfig


@dataclass(frozen=True, kw_only=True)
class PyramidConfig(BaseConfig):
    """Options of every hierarchical model, in addition to those of `BaseConfig`; a tuple has one value per stage.

    Attributes:
        patch_size: patch side of the first stage in pixels, or (height, width); the others halve the map.
        depths: blocks.
        global_pool: "avg" (mean of the last map), "token" (class token, PVT) or "none" (no pooling, timm's "").
        dynamic_img_size: accept images of other sizes than `img_size`.
    """

    patch_size: int | tuple[int, int] = 4
    depths: tuple[int, ...] = (2, 2, 6, 2)
    num_heads: tuple[int, ...] = (1, 2, 4, 8)
    global_pool: str = "avg"
    drop_rate: float = 0.0
    proj_drop_rate: float = 0.0
    eps: float = 1e-6
    final_norm: bool = True
    dynamic_img_size: bool = True

    pools: ClassVar[tuple[str, ...]] = ("avg", "none")
    zeros: ClassVar[tuple[str, ...]] = ("num_classes",)

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if per_stage(self, field) and len(value) != len(self.depths):
                raise ValueError(f"{field.name} has {len(value)} values, and depths has {len(self.depths)}")
        for axis, side, least in zip(("height", "width"), sides(self.img_size), self.smallest, strict=True):
            if side < least:
                raise ValueError(f"img_size {axis} is {side}; this model needs at least {least}")
        self.check_heads()

    def check_heads(self) -> None:
        """Raises ValueError unless the channels of each stage are a multiple of its heads."""
        for width, heads in zip(self.widths, self.num_heads, strict=True):
            if width % heads:
                raise ValueError(f"a stage has {width} channels, which is no multiple of its {heads} heads")

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of each stage."""
        return vars(self)["embed_dim"]

    @property
    def smallest(self) -> tuple[int, int]:
        """Sides of the smallest image: the last map has one token."""
        rows, columns = sides(self.patch_size)
        return rows << len(self.depths) - 1, columns << len(self.depths) - 1


def per_stage(config: PyramidConfig, field: dataclasses.Field) -> bool:
    """True if the field has a value per stage."""
    value = getattr(config, field.name)
    return isinstance(value, tuple) and field.type in (tuple[int, ...], tuple[float, ...], tuple[int, ...] | None)


@dataclass(frozen=True, kw_only=True)
class ReducedConfig(PyramidConfig):
    """Options of PVT and Twins, in addition to those of `PyramidConfig`; a tuple has one value per stage.

    Attributes:
        embed_dims: channels.
        mlp_ratios: hidden channels of the MLP divided by the channels.
        sr_ratios: side of the map divided by that of the smaller one to which it attends.
        pos_drop_rate: dropout after each patch projection, and positions if there are any.
    """

    embed_dims: tuple[int, ...] = (64, 128, 320, 512)
    num_heads: tuple[int, ...] = (1, 2, 5, 8)
    mlp_ratios: tuple[float, ...] = (8, 8, 4, 4)
    sr_ratios: tuple[int, ...] = (8, 4, 2, 1)
    pos_drop_rate: float = 0.0
    attn_drop_rate: float = 0.0

    @property
    def widths(self) -> tuple[int, ...]:
        return self.embed_dims


def patch_embeds(config: ReducedConfig) -> Iterator[NormedPatchEmbed]:
    """Yields the patch projection of each stage; after the first one, patches are 2 x 2 tokens of the map before."""
    size, patch, channels = sides(config.img_size), sides(config.patch_size), config.in_chans
    for D in config.widths:
        embed = NormedPatchEmbed(size, patch, channels, D, strict_img_size=False)
        yield embed
        size, patch, channels = embed.grid_size, (2, 2), D


class Stage(nn.Module):
    """A downsampling, an Identity in the first stage, and blocks."""

    def __init__(self, downsample: nn.Module, blocks: Blocks) -> None:
        super().__init__()
        self.downsample = downsample
        self.blocks = blocks

    def forward(self, x: Tensor, recompute: bool = False) -> Tensor:
        """[B, H, W, D] → [B, H', W', D']."""
        return self.blocks(self.downsample(x), recompute=recompute)


class PyramidTransformer(ImageModel):
    """A hierarchical image classifier.

    A family creates its modules, calls `build_head`, and implements `stage`; stage i reads the map of stage i − 1, the
    first one the image.
    """

    config: PyramidConfig
    feature_formats = ("NCHW", "NHWC", "NLC")
    parts: tuple[str, ...] = ("stages",)  # attributes that are lists with an entry per stage
    info: tuple[str, int] = "stages.{}", 0  # name of a stage in `feature_info`, and the number of the first one
    stem_pattern = r"^stem"
    coarse_patterns: Patterns | None = ((r"^stages\.(\d+)", None),)
    stages: Any
    flattens = False  # forward_features returns tokens [B, N, D], not the map
    position_resize = "bilinear"

    def __init__(self, config: PyramidConfig) -> None:
        super().__init__(config, config.widths[-1])
        self.num_stages = len(config.depths)

    def drop_path_rates(self) -> list[list[float]]:
        """Rates of the blocks of each stage."""
        depths = self.config.depths
        rates = iter(drop_path_rates(self.config.drop_path_rate, sum(depths)))
        return [[next(rates) for _ in range(depth)] for depth in depths]

    def build_head(self) -> None:
        """Creates the final norm, the dropout and the classifier, and initialises all weights."""
        config = self.config
        self.norm = nn.LayerNorm(self.num_features, eps=config.eps) if config.final_norm else nn.Identity()
        self.head_drop = nn.Dropout(config.drop_rate)
        for name in self.head_names:
            setattr(self, name.partition(".")[0], self.make_head())
        self.init_weights()

    def make_head(self) -> nn.Module:
        """A classifier, an Identity for no classes."""
        return nn.Linear(self.num_features, self.num_classes) if self.num_classes else nn.Identity()

    def stage(self, x: Tensor, i: int) -> Tensor:
        """Stage i: image [B, C, H, W] or map [B, H, W, D] → map [B, H', W', D']."""
        raise NotImplementedError

    def check_image(self, image: Tensor) -> None:
        """Raises ValueError if the image has the wrong number of channels or the wrong size."""
        config = self.config
        size = tuple(image.shape[2:])
        if image.dim() != 4 or image.shape[1] != config.in_chans:
            raise ValueError(f"image must have axes [B, {config.in_chans}, H, W], got shape {list(image.shape)}")
        if size != config.img_size and not config.dynamic_img_size:
            expected = "x".join(map(str, sides(config.img_size)))
            way = "img_size=" if "dynamic_img_size" in config.only else "img_size= or dynamic_img_size=True"
            raise ValueError(
                f"image is {size[0]}x{size[1]} pixels, the model takes {expected}; "
                f"resize it, or build the model with {way}"
            )
        if size[0] < config.smallest[0] or size[1] < config.smallest[1]:
            least = "x".join(map(str, config.smallest))
            raise ValueError(f"image is {size[0]}x{size[1]} pixels; the model needs at least {least}")

    def outputs(self, image: Tensor) -> Iterator[Tensor]:
        """Yields the map [B, H, W, D] of each stage in turn, before the final norm; see `flattens` for the last one."""
        self.check_image(image)
        x = image
        for i in range(self.num_stages):
            x = self.stage(x, i)
            yield x.flatten(1, 2) if self.flattens and i == self.num_stages - 1 else x

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """For each stage: `num_chs`, its channels; `reduction`, pixels a token; `module`, its name (as in timm)."""
        widths = self.config.widths[: self.num_stages]
        patch = max(sides(self.config.patch_size))
        name, first = self.info
        return [dict(num_chs=D, reduction=patch << i, module=name.format(first + i)) for i, D in enumerate(widths)]

    def normalize_stage(self, x: Tensor, stage: int) -> Tensor:
        """The output of a stage; that of the last one after the final norm."""
        return normalize(x, self.norm) if stage == self.num_stages - 1 else x

    def to_map(self, x: Tensor, image: Tensor, output_fmt: str) -> tuple[Tensor, Tensor | None]:
        """A stage's map [B, H, W, D], or its tokens [B, T + N, D], in another format, and prefix tokens or None."""
        prefix = None
        if x.dim() == 3:
            height, width = image.shape[2:]
            p, q = (side << self.num_stages - 1 for side in sides(self.config.patch_size))
            rows = height // p
            columns = width // q
            prefix, x = x.split((x.shape[1] - rows * columns, rows * columns), 1)
            prefix = prefix if prefix.shape[1] else None
            x = x.unflatten(1, (rows, columns))
        if output_fmt == "NCHW":
            return x.permute(0, 3, 1, 2).contiguous(), prefix
        return x.flatten(1, 2) if output_fmt == "NLC" else x, prefix

    def drop_stages(self, kept: int) -> None:
        """Removes the modules of all but the first `kept` stages."""
        for name in self.parts:
            setattr(self, name, getattr(self, name)[:kept])

    def prune(self, stages: int, norm: bool, head: bool) -> None:
        """Keeps the first `stages` stages; removes the final norm if `norm`, the classifier if `head`.

        If a stage is removed, norm and classifier are, too: they have the width of the last one.
        """
        ends = stages < self.num_stages
        config = self.config
        changes = {f.name: getattr(config, f.name)[:stages] for f in dataclasses.fields(config) if per_stage(config, f)}
        changes["drop_path_rate"] = self.drop_path_rates()[stages - 1][-1]
        if ends:
            self.drop_stages(stages)
        self.num_stages = stages
        self.num_features = config.widths[stages - 1]
        if norm or ends:
            self.norm = nn.Identity()
        if head or ends:
            self.reset_classifier(0, "none")
        self.config = self.config.replace(**changes, final_norm=isinstance(self.norm, nn.LayerNorm))

    @torch.no_grad()
    def init_weights(self) -> None:
        """Reinitialises the weights as in timm: truncated normal 0.02 and zero biases in linear layers."""
        init_linear(self)
