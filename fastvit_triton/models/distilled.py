"""Hierarchical models whose list of stages has the name of a method here, or with a second head."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from .pyramid import PyramidTransformer


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
