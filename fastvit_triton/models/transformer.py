"""The plain Vision Transformer, which the other model files configure or extend.

Source: Dosovitskiy et al., An image is worth 16x16 words, arXiv:2010.11929, eq. 1-4 and figure 1. Parameter names are
timm's: patch_embed, cls_token, reg_token, pos_embed, norm_pre, blocks, norm, attn_pool, fc_norm, head.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.body import normalize
from ..layers import (
    Attention,
    AttentionPool,
    Block,
    Blocks,
    Learned2d,
    LinearPatchEmbed,
    Mlp,
    NormPatchEmbed,
    PatchDropout,
    PatchEmbed,
    PostNormBlock,
    RelativePosition,
    drop_path_rates,
    resize_pos_embed,
    sincos1d,
    sincos2d,
)
from ..layers.embed import sides
from .base import ImageModel
from .config import ViTConfig

STEMS = {"conv": PatchEmbed, "linear": LinearPatchEmbed, "norm_linear_norm": NormPatchEmbed}


class VisionTransformer(ImageModel):
    """Vision Transformer: patch embedding, positions, blocks, norm, pooling, head.

    Args:
        config: every option, see `ViTConfig`.
        patch_embed: a stem to use instead of the configured one: `stem(image, pos, prefix)` returns tokens, and it has
            `grid_size`, `num_patches` and `grid_of(image)` like `PatchEmbed`.
        attention: class of the blocks' attention, a subclass of `Attention` that overrides `attend`.
    """

    config: ViTConfig
    variant: str
    pos_embed: Tensor | Learned2d | None
    feature_formats: tuple[str, ...] = ("NCHW", "NLC")
    feature_indices = 3
    undecayed = r"^(pos_embed|cls_token|reg_token|dist_token)$|pos_embed\.|\.position\."
    stem_pattern = r"^cls_token|reg_token|dist_token|pos_embed|patch_embed|norm_pre"
    position_resize = "bicubic_antialias"  # interpolation mode of this family's code; see `resize_pos_embed`

    def __init__(
        self,
        config: ViTConfig,
        patch_embed: PatchEmbed | None = None,
        attention: type[Attention] = Attention,
    ) -> None:
        D = config.embed_dim
        super().__init__(config, D)
        self.embed_dim = D
        self.cls_token = nn.Parameter(torch.empty(1, 1, D)) if config.class_token else None
        self.reg_token = nn.Parameter(torch.empty(1, config.reg_tokens, D)) if config.reg_tokens else None
        self.add_tokens()
        self.num_prefix_tokens = sum(t.shape[1] for t in self.prefix())

        self.patch_embed = patch_embed or STEMS[config.patch_embed](
            sides(config.img_size),
            sides(config.patch_size),
            config.in_chans,
            D,
            bias=not config.pre_norm,
            strict_img_size=not config.dynamic_img_size,
        )
        self.build_positions()
        self.pos_drop = nn.Dropout(config.pos_drop_rate)
        self.patch_drop = PatchDropout(config.patch_drop_rate, self.num_prefix_tokens)
        self.norm_pre = nn.LayerNorm(D, eps=config.eps) if config.pre_norm else nn.Identity()
        rates = drop_path_rates(config.drop_path_rate, config.depth)
        self.blocks = Blocks(*(self.build_block(i, p, attention) for i, p in enumerate(rates)))

        final_norm = config.norm == "pre" if config.final_norm is None else config.final_norm
        after_pool = config.global_pool == "avg" if config.fc_norm is None else config.fc_norm
        self.norm = nn.LayerNorm(D, eps=config.eps) if final_norm and not after_pool else nn.Identity()
        self.attn_pool = (
            AttentionPool(D, config.num_heads, Mlp(D, int(D * config.mlp_ratio), config.act), config.eps)
            if config.global_pool == "map"
            else None
        )
        self.fc_norm = nn.LayerNorm(D, eps=config.eps) if final_norm and after_pool else nn.Identity()
        self.pre_logits = nn.Sequential()
        if config.pre_logits:
            self.pre_logits.add_module("fc", nn.Linear(D, D))
            self.pre_logits.add_module("act", nn.Tanh())
        self.head_drop = nn.Dropout(config.drop_rate)
        self.head = nn.Linear(D, config.num_classes) if config.num_classes else nn.Identity()
        self.init_weights(config.weight_init)

    def add_tokens(self) -> None:
        """Hook for subclasses to create further prefix tokens."""

    def prefix(self) -> list[Tensor]:
        """The prefix tokens in order, each [1, T, D]."""
        return [t for t in (self.cls_token, self.reg_token) if t is not None]

    def build_block(self, i: int, drop_path: float, attention: type[Attention]) -> Block:
        """Creates block i; a subclass may create another kind."""
        config = self.config
        D = config.embed_dim
        head_dim = config.head_dim or D // config.num_heads
        grid = config.grid_size
        attn = attention(
            D,
            config.num_heads,
            head_dim,
            config.qkv_bias,
            config.proj_bias,
            qk_norm=config.eps if config.qk_norm else None,
            attn_drop=config.attn_drop_rate,
            proj_drop=config.proj_drop_rate,
            position=RelativePosition(grid[0] * grid[1], head_dim, self.num_prefix_tokens)
            if config.pos_embed == "relative"
            else None,
        )
        act = "swiglu" if config.mlp == "swiglu" else config.act
        mlp = Mlp(D, int(D * config.mlp_ratio), act, config.proj_bias, config.proj_drop_rate)
        kind = Block if config.norm == "pre" else PostNormBlock
        return kind(D, attn, mlp, config.eps, config.init_values, drop_path)

    def build_positions(self) -> None:
        """Creates `pos_embed`: a parameter, a fixed buffer, a module or None."""
        config, N = self.config, self.patch_embed.num_patches
        rows = N if config.no_embed_class else N + self.num_prefix_tokens
        if config.pos_embed == "learned":
            self.pos_embed = nn.Parameter(torch.empty(1, rows, config.embed_dim))
        elif config.pos_embed == "learned2d":
            self.pos_embed = Learned2d(self.patch_embed.grid_size, config.embed_dim)
        elif config.pos_embed in ("sincos1d", "sincos2d"):
            one = config.pos_embed == "sincos1d"
            table = sincos1d(rows, config.embed_dim) if one else sincos2d(self.patch_embed.grid_size, config.embed_dim)
            self.register_buffer("pos_embed", table, persistent=False)
        else:
            self.pos_embed = None

    def positions(self, grid: tuple[int, int]) -> Tensor | None:
        """The position table for a grid of patches, [1, N, D] or [1, T + N, D]; resampled for another grid."""
        own_grid = self.patch_embed.grid_size
        if self.pos_embed is None:
            return None
        table = self.pos_embed() if isinstance(self.pos_embed, Learned2d) else self.pos_embed
        if self.config.pos_embed == "sincos2d" and grid != own_grid:
            return sincos2d(grid, self.embed_dim).to(table)
        return resize_pos_embed(table, own_grid, grid, table.shape[1] - own_grid[0] * own_grid[1], self.position_resize)

    def embed(self, image: Tensor) -> Tensor:
        """image [B, C, H, W] → tokens [B, T + N, D] before the first block."""
        prefix = self.prefix()
        positions = self.positions(self.patch_embed.grid_of(image))
        x = self.patch_embed(
            image, positions, torch.cat(prefix, 1) if len(prefix) > 1 else next(iter(prefix), None)
        )  # [B, T + N, D]
        return normalize(self.patch_drop(self.pos_drop(x)), self.norm_pre)

    def forward_features(self, image: Tensor) -> Tensor:
        """image [B, C, H, W] → tokens [B, T + N, D] after the final norm."""
        return normalize(self.blocks(self.embed(image), self.after(image), self.recomputes), self.norm)

    def after(self, image: Tensor) -> Sequence[Callable[[Tensor], Tensor]]:
        """Hook for subclasses: functions of the output of the first blocks, see `Blocks.outputs`."""
        return ()

    def outputs(self, image: Tensor) -> Iterator[Tensor]:
        """Yields the tokens [B, T + N, D] after each block."""
        yield from self.blocks.outputs(self.embed(image), self.after(image), self.recomputes)

    def grid_of(self, image: Tensor) -> tuple[int, int]:
        """(rows, columns) of the patch tokens of an image [B, C, H, W]; raises ValueError if some were dropped."""
        if self.training and self.config.patch_drop_rate:
            raise ValueError("output_fmt is 'NCHW', but training drops patches (patch_drop_rate); use 'NLC' or eval()")
        return self.patch_embed.grid_of(image)

    def prune(self, stages: int, norm: bool, head: bool) -> None:
        """Keeps the first `stages` blocks; removes the final norm if `norm`, and what follows the blocks if `head`."""
        self.blocks = self.blocks[:stages]
        if norm:
            self.norm = nn.Identity()
        if head:
            self.fc_norm = nn.Identity()
            self.reset_classifier(0, "none")
        self.keep_config(depth=stages, drop_path_rate=self.blocks[-1].drop_path1.p)

    def keep_config(self, **changes: Any) -> None:
        """Changes the config so that it still builds a model with these parts."""
        norms = [not isinstance(module, nn.Identity) for module in (self.norm, self.fc_norm)]
        self.config = self.config.replace(final_norm=any(norms), fc_norm=norms[1], **changes)

    def pool(self, x: Tensor) -> Tensor:
        """Tokens [B, T + N, D] → [B, D]; all tokens for global_pool="none"."""
        if self.config.global_pool == "token":
            return x[:, 0]
        if self.config.global_pool == "none":
            return x
        x = x[:, self.num_prefix_tokens :]
        return x.mean(1) if self.attn_pool is None else self.attn_pool(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens [B, T + N, D] → logits [B, num_classes], or the pooled features with `pre_logits`."""
        x = self.head_drop(self.pre_logits(normalize(self.pool(x), self.fc_norm)))
        return x if pre_logits else self.head(x)

    def poolings(self) -> list[str]:
        return [name for name in super().poolings() if name != "map" or self.attn_pool is not None]

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces the head as `ImageModel.reset_classifier` does; pre-logits are removed, and the norms stay."""
        if global_pool == "map" and self.attn_pool is None:
            raise ValueError("global_pool is 'map', but the model has no attention pooling; create it with that option")
        super().reset_classifier(num_classes, global_pool)
        self.pre_logits = nn.Sequential()
        if self.config.global_pool != "map":
            self.attn_pool = None
        self.keep_config(pre_logits=False)

    @torch.no_grad()
    def init_weights(self, scheme: str) -> None:
        """Reinitialises all weights: "timm" (truncated normal 0.02, zero biases) or "jax" (the ViT paper's code)."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                if scheme == "timm":
                    nn.init.trunc_normal_(module.weight, std=0.02)
                else:
                    zero = name.startswith("head")
                    nn.init.zeros_(module.weight) if zero else nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    mlp = scheme == "jax" and ".mlp." in name
                    nn.init.normal_(module.bias, std=1e-6) if mlp else nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Conv2d) and scheme == "jax":
                fan_in = module.weight[0].numel()
                nn.init.trunc_normal_(module.weight, std=fan_in**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()
        for token in self.prefix():
            nn.init.zeros_(token) if scheme == "jax" else nn.init.normal_(token, std=1e-6)
        if isinstance(self.pos_embed, nn.Parameter):
            nn.init.normal_(self.pos_embed, std=0.02) if scheme == "jax" else nn.init.trunc_normal_(
                self.pos_embed, std=0.02
            )
