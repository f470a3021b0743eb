"""Hierarchical models with a class token in every stage, or with a second head that learns from a teacher."""

from typing import Any

from torch import Tensor

from ..layers.pooling import Tokens
from .pyramid import PyramidTransformer


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

    def pool(self, x: Tensor) -> Tensor:
        """Class token [B, 1, D] → [B, D]; as it is for global_pool="none"."""
        return x if self.config.global_pool == "none" else x[:, 0]


class Distilled(PyramidTransformer):
    """Mixin of models with a second head, `head_dist`, on the second token, or on the same features as the first.

    Source: DeiT, arXiv:2012.12877, section 4.
    Inference returns the mean of both heads. Training returns it too, as in timm, until
    `set_distilled_training(True)`: then both logits come as a tuple.
    """

    head_names = ("head", "head_dist")
    num_prefix_tokens = 2
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
            x, other = self.head(x), self.head_dist(other)
        return (x, other) if self.distilled_training and self.training and not pre_logits else (x + other) / 2
