"""Models of two branches of tokens, each with its own width, norm and head."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..engine.body import normalize
from ..layers.embed import sides
from .base import ImageModel, feature_take_indices, init_linear
from .config import BaseConfig, check_positive


@dataclass(frozen=True, kw_only=True)
class BranchConfig(BaseConfig):
    """Options of such a model, in addition to those of `BaseConfig`; a tuple has one value per branch.

    Attributes:
        img_scale: side of the branch's image, divided by that of the image given.
        patch_size: patch side in pixels.
        embed_dim: D, channels.
        depth: for each fusion, the blocks of each branch before it, and the number of cross attentions (0 means 1).
        num_heads: heads.
        mlp_ratio: hidden channels of the MLP divided by D; a third value has no effect.
        qkv_bias: bias on the projections of queries, keys and values.
        global_pool: "token" (class token) or "avg" (mean of patch tokens).
        final_norm: LayerNorm after the last block.
        drop_rate: dropout before the head.
        pos_drop_rate: dropout after the positions.
        proj_drop_rate: dropout after the attention projection and inside the MLP.
        attn_drop_rate: dropout on attention probabilities.
    """

    img_size: int | tuple[int, int] = 240
    img_scale: tuple[float, ...] = (1.0, 224 / 240)
    patch_size: tuple[int, ...] = (12, 16)
    embed_dim: tuple[int, ...] = (192, 384)
    depth: tuple[tuple[int, ...], ...] = ((1, 4, 0),) * 3
    num_heads: tuple[int, ...] = (6, 6)
    mlp_ratio: tuple[float, ...] = (4, 4, 1)
    qkv_bias: bool = True
    global_pool: str = "token"
    final_norm: bool = True
    drop_rate: float = 0.0
    pos_drop_rate: float = 0.0
    proj_drop_rate: float = 0.0
    attn_drop_rate: float = 0.0
    eps: ClassVar[float] = 1e-6  # of every LayerNorm
    pools = ("token", "avg")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, ("num_classes", "depth"))
        for field in ("img_scale", "patch_size", "embed_dim", "num_heads", "mlp_ratio"):
            if len(getattr(self, field)) != 2 and (field, len(getattr(self, field))) != ("mlp_ratio", 3):
                raise ValueError(f"{field} is {getattr(self, field)}; it must have 2 values, one per branch")
        if not self.depth or any(len(counts) != 3 or max(counts[:2]) < 1 for counts in self.depth):
            raise ValueError(f"depth is {self.depth}; each fusion has blocks of 2 branches, and cross attentions")
        if any(D % heads for D, heads in zip(self.embed_dim, self.num_heads, strict=True)):
            raise ValueError(f"embed_dim is {self.embed_dim}, no multiples of num_heads {self.num_heads}")
        for size, side in zip(self.sizes, self.patch_size, strict=True):
            if any(length < side or length % side for length in size):
                wrong = f"a branch has images of {size[0]}x{size[1]}; patch_size {side} must divide both"
                near = [self._nearest(length) for length in sides(self.img_size)]
                raise ValueError(wrong + ("" if None in near else f"; the nearest img_size is {near[0]}x{near[1]}"))

    def _nearest(self, length: int) -> int | None:
        """The side of an image nearest to `length` that the patches of both branches divide; None if it is far."""
        pairs = list(zip(self.img_scale, self.patch_size, strict=True))
        near = sorted(range(max(1, length - 480), length + 480), key=lambda n: abs(n - length))
        return next((n for n in near if all(int(s * n) >= P and int(s * n) % P == 0 for s, P in pairs)), None)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(height, width) of each branch's image."""
        height, width = sides(self.img_size)
        return [(int(scale * height), int(scale * width)) for scale in self.img_scale]


class BranchModel(ImageModel):
    """An image classifier with branches; stage i yields a list of the tokens [B, 1 + N, D] of each.

    Features are numbered by branch, then by block, as in timm: with n blocks, 0 to n − 1 are the first branch's. A
    pruned model keeps these numbers. A family creates `patch_embed`, `blocks` and `pos_drop`, calls `build_head`, and
    implements `stages`.
    """

    config: BranchConfig
    norm: Any  # a ModuleList
    feature_formats = ("NCHW", "NLC")
    position_resize = "bicubic_antialias"
    head_names = ("head.0", "head.1")

    def __init__(self, config: BranchConfig) -> None:
        super().__init__(config, sum(config.embed_dim))
        self.num_blocks = len(config.depth)
        self.patch_embed = nn.ModuleList()
        self.blocks = nn.ModuleList()
        self.pos_drop = nn.Dropout(config.pos_drop_rate)

    @property
    def feature_indices(self) -> tuple[int, ...]:  # type: ignore[override]
        """The features of the last block."""
        return tuple(range(self.num_blocks - 1, len(self.feature_info), self.num_blocks))

    def build_head(self) -> None:
        """Creates norms, dropout and classifiers, and initialises all weights."""
        norms = (nn.LayerNorm(D, eps=self.config.eps) for D in self.config.embed_dim)
        self.norm = nn.ModuleList(norms if self.config.final_norm else (nn.Identity() for _ in self.config.embed_dim))
        self.head_drop = nn.Dropout(self.config.drop_rate)
        self.head = nn.ModuleList(self.make_heads())
        self.init_weights()

    def make_heads(self) -> list[nn.Module]:
        """A classifier for each branch, an Identity for no classes."""
        return [nn.Linear(D, self.num_classes) if self.num_classes else nn.Identity() for D in self.config.embed_dim]

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """For each branch and block: `num_chs`, its channels; `reduction`, pixels a token; `module`, its name."""
        config = self.config
        reductions = (round(patch / scale) for patch, scale in zip(config.patch_size, config.img_scale, strict=True))
        branches = zip(config.embed_dim, reductions, strict=True)
        blocks = range(self.num_blocks)
        return [dict(num_chs=D, reduction=r, module=f"blocks.{i}") for D, r in branches for i in blocks]

    def stage_features(self, x: Any, stage: int) -> Any:
        """Tokens of each branch after their norms."""
        return [normalize(tokens, norm) for tokens, norm in zip(x, self.norm, strict=True)]

    def collect(
        self, image: Tensor, take: list[int], norm: bool, stop_early: bool, stages: Iterator[Any] | None = None
    ) -> tuple[list[Any], Any, int]:
        """See `ImageModel.collect`; an output is (tokens, branch)."""
        outputs = {}
        xs = None
        i = 0
        for i, xs in enumerate(self.stages(image) if stages is None else stages):
            for branch, x in enumerate(self.stage_features(xs, i) if norm else xs):
                if (index := branch * self.num_blocks + i) in take:
                    outputs[index] = x, branch
            if stop_early and i == max(index % self.num_blocks for index in take):
                break
        return [outputs[index] for index in sorted(set(take))], xs, i

    def to_map(self, x: Any, image: Tensor, output_fmt: str) -> tuple[Tensor, Tensor | None]:
        """(tokens, branch) → patch tokens, as [B, D, h, w] or [B, N, D], and the class token [B, 1, D]."""
        tokens, branch = x
        prefix = tokens[:, :1]
        patches = tokens[:, 1:]
        if output_fmt == "NLC":
            return patches, prefix
        embed: Any = self.patch_embed[branch]
        return patches.transpose(1, 2).unflatten(2, embed.grid_size).contiguous(), prefix

    def prune_intermediate_layers(
        self, indices: Any = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """As in timm: removes the blocks after the last one that has a feature of `indices`."""
        take, _ = feature_take_indices(len(self.feature_info), indices)
        last = max(index % self.num_blocks for index in take)
        before = self.state_dict().keys()
        self.prune(last + 1, prune_norm, prune_head)
        self.pruned |= before - self.state_dict().keys()
        return take

    def prune(self, stages: int, norm: bool, head: bool) -> None:
        """Keeps the first `stages` blocks; removes the final norms if `norm`, the classifiers if `head`."""
        self.blocks = self.blocks[:stages]
        if norm:
            self.norm = nn.ModuleList(nn.Identity() for _ in self.config.embed_dim)
        if head:
            self.reset_classifier(0)
        depth = self.config.depth
        final_norm = isinstance(self.norm[0], nn.LayerNorm)
        rate = self.config.drop_path_rate * max(num_rates(depth[:stages]) - 1, 0) / max(num_rates(depth) - 1, 1)
        self.config = self.config.replace(depth=depth[:stages], drop_path_rate=rate, final_norm=final_norm)

    def get_classifier(self) -> Any:
        """Returns the list of heads, as timm."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces the heads by zero-initialised ones; 0 removes them. For the arguments see `ImageModel`."""
        self.config = self.config.replace(num_classes=num_classes, global_pool=global_pool)
        self.num_classes, like = num_classes, next(self.parameters())
        self.head = nn.ModuleList(self.make_heads()).to(like).train(self.training)
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)

    def forward_head(self, x: Any, pre_logits: bool = False) -> Tensor:
        """Tokens of each branch → logits [B, num_classes], or the pooled features with `pre_logits`."""
        avg = self.config.global_pool == "avg"
        pooled = [self.head_drop(tokens[:, 1:].mean(1) if avg else tokens[:, 0]) for tokens in x]
        if pre_logits or not self.num_classes:
            return torch.cat(pooled, 1)
        return torch.stack([head(tokens) for head, tokens in zip(self.head, pooled, strict=True)]).mean(0)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Reinitialises the weights as in timm: truncated normal 0.02, zero biases in linear layers."""
        init_linear(self)
        for name in sorted(self.no_weight_decay()):  # the order of a set differs between processes
            nn.init.trunc_normal_(self.get_parameter(name), std=0.02)


def num_rates(depth: tuple[tuple[int, ...], ...]) -> int:
    """Number of rates of stochastic depth: in each block, those of the longest branch and of its cross attentions."""
    return sum(max(counts[:-1]) + counts[-1] for counts in depth)
