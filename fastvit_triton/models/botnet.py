"""BoTNet — Bottleneck transformers for visual recognition. Srinivas et al., arXiv:2101.11605.

Differs from ViT:
  1. A ResNet-50; in the three blocks of its last stage self-attention replaces the 3 x 3 convolution.
  2. Scores have a bias that depends on the query and on the distance in rows and in columns; there is no class token.
  3. Attention has no output projection; a BatchNorm and ReLU follow it. Means of 2 x 2 halve the last map.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import nn

from ..checkpoints.layout import Layout, Spelling
from ..checkpoints.tensors import State
from ..layers.embed import sides
from ..layers.rel2d import Grid
from ..layers.residual import AttentionBottleneck, Bottleneck
from .config import Options
from .residual import ResidualConfig, ResidualNetwork


@dataclass(frozen=True, kw_only=True)
class BotnetConfig(ResidualConfig):
    """Options of BoTNet, which are those of `ResidualConfig`; images have sides that 32 divides."""

    only: ClassVar[dict[str, Any]] = ResidualConfig.only | dict(dynamic_img_size=False)

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


CONFIG = BotnetConfig
MODEL = BottleneckTransformer
VARIANTS: dict[str, Options] = {"botnet50": {}}
ORACLE: dict[str, str] = {}  # timm's ByobNet builds it, under no name; see the tests
PARAMS = {"botnet50": 20_852_008}  # by timm 1.0.31

# Names in checkpoints, from timm 1.0.31.

BOTNET = Layout(name="timm", mark="stem.conv1.conv.weight", beside="head.fc.weight", resize="linear")


def fit_distances(
    model: Any, target: State, state: State, metadata: Mapping[str, str], mode: str
) -> tuple[list[str], str]:
    """Interpolates embeddings of distances for the grids of a BoTNet, as SAM does; for the arguments see `fit.fit`."""
    notes = []
    for key in (key for key in state if key.endswith(("pos_embed.height_rel", "pos_embed.width_rel"))):
        old = state[key]
        new = target[key].shape if key in target else state[key].shape
        if old.shape != new and old.shape[1:] == new[1:]:
            state[key] = F.interpolate(old.mT[None], new[0], mode=mode)[0].mT.contiguous()
            notes.append(f"{key.split('.')[-1]} {len(old)} resized to {new[0]} ({mode})")
    return [], ", ".join(dict.fromkeys(notes))


CHECKPOINTS = Spelling("BoTNet", (BOTNET,), fit_distances)
