"""Residual networks with attention: a stem, and stages of blocks. Names of parameters are those of timm's ByobNet."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..layers.embed import sides
from ..layers.recompute import recomputed
from ..layers.residual import ResidualStem, init_residual
from .pyramid import PyramidConfig, PyramidTransformer


@dataclass(frozen=True, kw_only=True)
class ResidualConfig(PyramidConfig):
    """Options of residual networks, in addition to those of `PyramidConfig`; `patch_size` is that of the stem, 4.

    Attributes:
        stem_dim: channels of the stem.
        embed_dim: channels of each stage.
        num_heads: heads of attention; 0 for a stage of convolutions.
        strides: what the sides of the map are divided by in each stage, 1 or 2.
        proj_drop_rate: dropout after the attention.
    """

    stem_dim: int = 64
    embed_dim: tuple[int, ...] = (256, 512, 1024, 2048)
    depths: tuple[int, ...] = (3, 4, 6, 3)
    num_heads: tuple[int, ...] = (0, 0, 0, 4)
    strides: tuple[int, ...] = (1, 2, 2, 2)
    proj_drop_rate: float = 0.0
    final_norm: bool = False
    dynamic_img_size: bool = False
    zeros = ("num_classes", "num_heads")
    only: ClassVar = dict(patch_size=(4, 4), final_norm=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if set(self.strides) - {1, 2}:
            raise ValueError(f"strides is {self.strides}; use 1 or 2 for each stage")

    @property
    def reductions(self) -> tuple[int, ...]:
        """Pixels of the image for each step of the map of each stage."""
        return tuple(4 * math.prod(self.strides[: i + 1]) for i in range(len(self.strides)))

    @property
    def smallest(self) -> tuple[int, int]:
        return self.reductions[-1], self.reductions[-1]

    def check_heads(self) -> None:
        """Raises ValueError unless a quarter of the channels of a stage with attention are a multiple of its heads."""
        for width, heads in zip(self.widths, self.num_heads, strict=True):
            if heads and width // 4 % heads:
                raise ValueError(f"attention has {width // 4} channels, which is no multiple of its {heads} heads")


class ResidualNetwork(PyramidTransformer):
    """A residual network; its features are a map [B, H, W, D]. A family implements `build_block`."""

    config: ResidualConfig
    head_names = ("head.fc",)
    layer_patterns = ((r"^stages\.(\d+)\.(\d+)", None),)

    def __init__(self, config: ResidualConfig) -> None:
        super().__init__(config)
        inputs = config.stem_dim
        rows, columns = (-(-side // 4) for side in sides(config.img_size))
        self.stem = ResidualStem(config.in_chans, inputs)
        self.stages = nn.Sequential()
        for i, (outputs, rates) in enumerate(zip(config.widths, self.drop_path_rates(), strict=True)):
            blocks = nn.Sequential()
            for j, rate in enumerate(rates):
                stride = 1 if j else config.strides[i]
                blocks.append(self.build_block(i, j, inputs, outputs, stride, rate, (rows, columns)))
                inputs = outputs
                rows = -(-rows // stride)
                columns = -(-columns // stride)
            self.stages.append(blocks)
        self.build_head()

    def build_block(
        self, stage: int, index: int, inputs: int, outputs: int, stride: int, drop_path: float, grid: tuple[int, int]
    ) -> nn.Module:
        """Builds a block [B, C, H, W] → [B, C', H', W'] for a map of this size (rows, columns)."""
        raise NotImplementedError

    def stage(self, x: Tensor, i: int) -> Tensor:
        """Stage i: image [B, C, H, W] or map [B, H, W, D] → map [B, H', W', D']."""
        x = x.permute(0, 3, 1, 2) if i else self.stem(x)
        for block in self.stages[i]:
            x = recomputed(block, x) if self.recomputes else block(x)
        return x.permute(0, 2, 3, 1)

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        reductions = self.config.reductions
        return [stage | dict(reduction=side) for stage, side in zip(super().feature_info, reductions, strict=True)]

    def make_head(self) -> nn.Module:
        return nn.ModuleDict(dict(fc=super().make_head()))

    @torch.no_grad()
    def init_weights(self) -> None:
        """Reinitialises the weights as in timm, see `layers.residual.init_residual`."""
        init_residual(self)
