"""Hierarchical models with a class token in every stage, with a BatchNorm in the head, or with a second head."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..layers.normed import NormLinear
from .pyramid import PyramidTransformer


class Tokens(NamedTuple):
    """Tokens x [B, T + N, D], of which the last N are those of a grid of (rows, columns)."""

    x: Tensor
    grid: tuple[int, int]

    def split(self) -> tuple[Tensor, Tensor]:
        """The prefix [B, T, D], and the map [B, rows, columns, D]."""
        T = self.x.shape[1] - self.grid[0] * self.grid[1]
        return self.x[:, :T], self.x[:, T:].unflatten(1, self.grid)


class TokenPyramid(PyramidTransformer):
    """A hierarchical model whose stages return `Tokens`; its features are the prefix tokens [B, T, D]."""

    num_prefix_tokens = 1

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


class NamedStages(PyramidTransformer):
    """A hierarchical model without final norm, whose list of stages has the name `stages` in timm.

    That is the name of a method here; see `collect`.
    """

    parts = ("stages",)
    info = "stages.{}", 0
    stem_pattern = r"^stem"
    coarse_patterns = ((r"^stages\.(\d+)", None),)

    @property
    def stages(self) -> Any:
        """The modules of the stages, with timm's name; see `collect`."""
        return self._modules["stages"]

    def collect(
        self, image: Tensor, take: list[int], norm: bool, stop_early: bool, stages: Iterator[Any] | None = None
    ) -> tuple[list[Any], Any, int]:
        return super().collect(image, take, norm, stop_early, super().stages(image))

    def normalize_stage(self, x: Tensor, stage: int) -> Tensor:
        """The map as it is: there is no final norm."""
        return x


class NormedHead(NamedStages):
    """A hierarchical model whose heads have a BatchNorm; its features are tokens [B, N, D]."""

    head_names: tuple[str, ...] = ("head.linear",)

    def build_head(self) -> None:
        """Creates the classifier, which has the dropout within it, and initialises all weights."""
        super().build_head()
        self.head_drop = nn.Dropout(0.0)

    def stage_features(self, x: Tensor, stage: int) -> Tensor:
        """A map [B, H, W, D] as tokens."""
        return x.flatten(1, 2)

    def get_classifier(self) -> Any:
        heads = tuple(getattr(self, name.partition(".")[0]) for name in self.head_names)
        return heads[0] if len(heads) == 1 else heads

    def make_head(self) -> nn.Module:
        """A classifier with its BatchNorm, an Identity for no classes."""
        classes = self.num_classes
        return NormLinear(self.num_features, classes, self.config.drop_rate) if classes else nn.Identity()

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces the heads by new ones, whose linear layers are zero; 0 removes them."""
        like = next(self.parameters())
        names = [name.partition(".")[0] for name in self.head_names]
        self.config = self.config.replace(num_classes=num_classes, global_pool=global_pool)
        self.num_classes = num_classes
        for name in names:
            setattr(self, name, self.make_head().to(like).train(self.training))
            for parameter in getattr(getattr(self, name), "linear", nn.Identity()).parameters():
                nn.init.zeros_(parameter)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Features → logits [B, num_classes], or the pooled features with `pre_logits`."""
        x = self.pool(x)
        return x if pre_logits else self.head(x)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Keeps the layers' own initial values, as in timm."""


class Distilled(PyramidTransformer):
    """Mixin of models with a second head, `head_dist`, on the second token, or on the same features as the first.

    Source: DeiT, arXiv:2012.12877, section 4.
    Inference returns the mean of both heads. Training returns it too, as in timm, until
    `set_distilled_training(True)`: then both logits come as a tuple.
    """

    head_names = ("head", "head_dist")
    distilled_training = False

    def build_head(self) -> None:
        """Creates the final norm, the dropout and both classifiers, and initialises all weights."""
        super().build_head()
        self.head_dist = self.make_head()

    def set_distilled_training(self, enable: bool = True) -> None:
        """Sets whether training returns (class logits, distillation logits)."""
        self.distilled_training = enable

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor | Any:
        """Features [B, 2, D] or [B, N, D] → logits [B, num_classes], or a pair of them in distilled training."""
        pool = self.config.global_pool
        x = self.head_drop(x if pool == "token" else self.pool(x))
        x, other = x.unbind(1) if pool == "token" else (x, x)
        if not pre_logits:
            x = self.head(x)
            other = self.head_dist(other)
        return (x, other) if self.distilled_training and self.training and not pre_logits else (x + other) / 2
