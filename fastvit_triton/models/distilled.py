"""Models with a second head, which learns from a teacher."""

from typing import Any

from torch import Tensor, nn

from .base import ImageModel


class Distilled(ImageModel):
    """Mixin of models with a second head, `head_dist`, on the second token, or on the same features as the first.

    Source: DeiT, arXiv:2012.12877, section 4.
    Inference returns the mean of both heads. Training returns it too, as in timm, until
    `set_distilled_training(True)`: then both logits come as a tuple, as in the official code.
    """

    head: Any
    head_dist: nn.Module
    head_names = ("head", "head_dist")
    distilled_training = False

    def set_distilled_training(self, enable: bool = True) -> None:
        """Sets whether training returns (class logits, distillation logits)."""
        self.distilled_training = enable

    def head_inputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features [B, 2, D] or [B, N, D] → what each head reads."""
        if vars(self.config)["global_pool"] == "token":
            return x[:, 0], x[:, 1]
        return (pooled := self.pool(x)), pooled

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor | Any:
        """Features → logits [B, num_classes], or a pair of them in distilled training."""
        x, other = map(self.head_drop, self.head_inputs(x))
        if not pre_logits:
            x = self.head(x)
            other = self.head_dist(other)
        return (x, other) if self.distilled_training and self.training and not pre_logits else (x + other) / 2
