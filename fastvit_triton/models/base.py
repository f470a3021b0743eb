"""Base classes of all models: common config fields, and timm's model methods."""

import dataclasses
import difflib
from typing import Any, TypeVar

from torch import Tensor, nn

from ..layers.embed import sides
from .hub import HubMethods

Config = TypeVar("Config", bound="BaseConfig")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseConfig:
    """Options of every model; a family's config adds its own.

    Attributes:
        img_size: image side in pixels, or (height, width).
        in_chans: C, image channels.
        num_classes: outputs of the head; 0 returns the pooled features.
        drop_path_rate: stochastic depth of the last block; rises linearly from 0 (arXiv:1603.09382).
        grad_checkpointing: recompute each block in the backward pass instead of storing it.
    """

    img_size: int | tuple[int, int] = 224
    in_chans: int = 3
    num_classes: int = 1000
    drop_path_rate: float = 0.0
    grad_checkpointing: bool = False

    def __post_init__(self) -> None:
        """Normalises and checks the fields.

        Raises:
            ValueError: a value is outside its range.
        """
        object.__setattr__(self, "img_size", sides(self.img_size))
        if self.in_chans < 1:
            raise ValueError(f"in_chans is {self.in_chans}; it must be at least 1")
        if self.num_classes < 0:
            raise ValueError(f"num_classes is {self.num_classes}; use 0 for no head, or the number of classes")
        for field in (f.name for f in dataclasses.fields(self) if f.name.endswith(("drop_rate", "drop_path_rate"))):
            if not 0.0 <= getattr(self, field) < 1.0:
                raise ValueError(f"{field} is {getattr(self, field)}; use a rate in [0, 1)")

    def replace(self: Config, **overrides: Any) -> Config:
        """Returns a copy with some fields changed.

        Raises:
            TypeError: a field is unknown; the message suggests names.
            ValueError: a value is outside its range.
        """
        names = [field.name for field in dataclasses.fields(self)]
        for name in overrides:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=3, cutoff=0.3) or names
                raise TypeError(f"{type(self).__name__} has no option {name!r}; the nearest are {', '.join(near)}")
        return dataclasses.replace(self, **overrides)


class ImageModel(HubMethods, nn.Module):
    """An image classifier, with timm's methods.

    Attributes:
        config: every option.
        variant: the name passed to `create_model`.
        num_classes, num_features: outputs of the head, and its inputs.
        layout: parameter naming of its published checkpoints, a key of `weights.SPELLINGS`.
        head_names: classifier modules, as prefixes of their keys in the state dict.
    """

    layout = "vit"
    head_names: tuple[str, ...] = ("head",)
    config: BaseConfig
    num_classes: int
    num_features: int

    def forward_features(self, image: Tensor) -> Tensor:
        """image [B, C, H, W] → features before the pooling."""
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Features → logits [B, num_classes], or the pooled features with `pre_logits`."""
        raise NotImplementedError

    def forward(self, image: Tensor) -> Tensor:
        """image [B, C, H, W] → logits [B, num_classes]."""
        return self.forward_head(self.forward_features(image))

    def no_weight_decay(self) -> set[str]:
        """Names of parameters to exclude from weight decay, as in timm."""
        return set()

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Enables recomputing every block in the backward pass instead of storing its activations."""
        self.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module | tuple[nn.Module, ...]:
        """Returns the head, or a tuple of heads."""
        heads = tuple(self.get_submodule(name) for name in self.head_names)
        return heads[0] if len(heads) == 1 else heads

    def reset_classifier(self, num_classes: int) -> None:
        """Replaces the heads by zero-initialised ones (ViT paper, section 3.2); 0 removes them."""
        self.config = self.config.replace(num_classes=num_classes)
        self.num_classes = num_classes
        for name in self.head_names:
            setattr(self, name, self.zero_head())

    def zero_head(self) -> nn.Module:
        """A zero-initialised linear layer num_features → num_classes on the model's device, or Identity."""
        if not self.num_classes:
            return nn.Identity()
        like = next(self.parameters())
        head = nn.Linear(self.num_features, self.num_classes, device=like.device, dtype=like.dtype)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        return head.train(self.training)
