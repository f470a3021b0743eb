"""Models that are not a `VisionTransformer`, but also a stem and blocks of tokens [B, T + N, D] of one width."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..layers.embed import sides
from .base import ImageModel, init_linear
from .config import BaseConfig


@dataclass(frozen=True, kw_only=True)
class TokenConfig(BaseConfig):
    """Options of every such model, in addition to those of `BaseConfig`; they are as in `ViTConfig`."""

    patch_size: int | tuple[int, int] = 16
    embed_dim: int = 384
    depth: int = 12
    mlp_ratio: float = 4.0
    qkv_bias: bool = False
    global_pool: str = "token"
    final_norm: bool = True
    drop_rate: float = 0.0
    pos_drop_rate: float = 0.0
    proj_drop_rate: float = 0.0
    attn_drop_rate: float = 0.0

    pools: ClassVar[tuple[str, ...]] = ("token", "avg", "none")
    zeros: ClassVar[tuple[str, ...]] = ("num_classes",)
    eps: ClassVar[float] = 1e-5  # of every LayerNorm

    @property
    def grid_size(self) -> tuple[int, int]:
        """(rows, columns) of patches."""
        (height, width), (rows, columns) = sides(self.img_size), sides(self.patch_size)
        return height // rows, width // columns


class TokenModel(ImageModel):
    """An image classifier whose blocks all have tokens [B, T + N, D].

    A family creates `blocks`, calls `build_head`, and implements `outputs`, which yields the tokens after each block.
    """

    config: TokenConfig
    feature_formats = ("NCHW", "NLC")
    feature_indices = 3
    num_prefix_tokens = 1
    position_resize = "bicubic_antialias"

    def __init__(self, config: TokenConfig) -> None:
        super().__init__(config, config.embed_dim)
        self.embed_dim = config.embed_dim
        self.blocks: Any = nn.ModuleList()

    def build_head(self) -> None:
        """Creates the final norm, the dropout and the classifier, and initialises all weights."""
        D, config = self.embed_dim, self.config
        self.norm = nn.LayerNorm(D, eps=config.eps) if config.final_norm else nn.Identity()
        self.head_drop = nn.Dropout(config.drop_rate)
        self.head = nn.Linear(D, self.num_classes) if self.num_classes else nn.Identity()
        self.init_weights()

    def grid_of(self, image: Tensor) -> tuple[int, int]:
        """(rows, columns) of patches of image [B, C, H, W]; raises ValueError unless it has the model's size."""
        config = self.config
        height, width = sides(config.img_size)
        if tuple(image.shape[1:]) != (config.in_chans, height, width):
            size = f"[B, {config.in_chans}, {height}, {width}]"
            fits = image.dim() == 4
            option = "in_chans" if fits and image.shape[1] != config.in_chans else "img_size"
            fix = f"; build it with {option}=" if fits else ""
            raise ValueError(f"image has shape {list(image.shape)}, the model takes {size}{fix}")
        return config.grid_size

    def prune(self, stages: int, norm: bool, head: bool) -> None:
        """Keeps the first `stages` blocks; removes the final norm if `norm`, the classifier if `head`."""
        rate = self.config.drop_path_rate * (stages - 1) / max(len(self.blocks) - 1, 1)
        self.blocks = self.blocks[:stages]
        if norm:
            self.norm = nn.Identity()
        if head:
            self.reset_classifier(0, "none")
        final_norm = isinstance(self.norm, nn.LayerNorm)
        self.config = self.config.replace(depth=stages, drop_path_rate=rate, final_norm=final_norm)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Reinitialises the weights as in timm: truncated normal 0.02, zero biases in linear layers."""
        init_linear(self)
        for name in sorted(self.no_weight_decay()):  # the order of a set differs between processes
            nn.init.trunc_normal_(self.get_parameter(name), std=0.02)
