"""CrossViT — Cross-attention multi-scale vision transformer. Chen et al., arXiv:2103.14899. Official: IBM/CrossViT.

Differs from ViT:
  1. Two branches, each a ViT with patches of its own size; the second reads the image at another size.
  2. Three times, after some blocks, the class token of each branch attends to the patches of the other.
  3. A head for each branch; their mean are the logits.
  4. `*_dagger_*`: three convolutions instead of one project the patches.
Adds the cross attention.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints.renaming import CheckpointFormats, Layout
from ..engine.body import normalize
from ..layers import Attention, Block, Blocks, DropPath, Mlp, PatchEmbed, drop_path_rates
from ..layers.class_attention import ClassAttention
from ..layers.embed import sides
from ..layers.fusable import Fusable
from .base import ImageModel, init_linear
from .config import BaseConfig, Options
from .fit import fit_tables

STRIDES = {12: ((4, 7, 3), (3, 3, 0), (1, 3, 1)), 16: ((4, 7, 3), (2, 3, 1), (2, 3, 1))}  # stride, kernel, padding


class BranchEmbed(PatchEmbed):
    """Patch embedding by one convolution or, with `multi_conv`, by three (section 4.1)."""

    def __init__(self, *sizes: Any, multi_conv: bool) -> None:
        self.multi_conv = multi_conv
        super().__init__(*sizes)

    def build(self, embed_dim: int, bias: bool) -> None:
        if not self.multi_conv:
            return super().build(embed_dim, bias)
        if self.patch_size[0] not in STRIDES:
            raise ValueError(
                f"patch_size is {self.patch_size[0]}; multi_conv=True needs {' or '.join(map(str, STRIDES))}"
            )
        widths = (self.in_chans, embed_dim // 4, embed_dim // 2, embed_dim)
        layers: list[nn.Module] = []
        for i, (stride, kernel, padding) in enumerate(STRIDES[self.patch_size[0]]):
            layers += [nn.Conv2d(widths[i], widths[i + 1], kernel, stride, padding), nn.ReLU()]
        self.proj: Any = nn.Sequential(*layers[:-1])


class CrossAttention(ClassAttention):
    """The first token of a branch attends to the patches of another (eq. 3-4); the arguments are those of the base."""

    names = ("wq", "wk", "wv")


class CrossBlock(Fusable):
    """The first token plus its attention to all tokens; there is no MLP (eq. 5)."""

    def __init__(self, dim: int, attn: CrossAttention, eps: float = 1e-6, drop_path: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.attn = attn
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, D] → [B, 1, D]."""
        return x[:, :1] + self.drop_path(self.attn(self.norm1(x)))


@dataclass(frozen=True, kw_only=True)
class CrossVitConfig(BaseConfig):
    """Options of CrossViT, in addition to those of `BaseConfig`; a tuple has one value per branch.

    Attributes:
        img_scale: side of the branch's image, divided by that of the image given.
        depth: for each fusion, the blocks of each branch before it, and the number of cross attentions (0 means 1).
        mlp_ratio: as in `ViTConfig`; a third value has no effect.
        multi_conv: project patches by three convolutions.
        crop_scale: cut out the middle of the image instead of interpolating it, where it is larger.
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
    multi_conv: bool = False
    crop_scale: bool = False
    eps: ClassVar[float] = 1e-6  # of every LayerNorm
    pools = ("token", "avg")
    zeros = ("num_classes", "depth")

    def __post_init__(self) -> None:
        super().__post_init__()
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


class MultiScaleBlock(nn.Module):
    """Blocks of each branch, then the class token of each attends to the patches of the other (figure 4).

    `counts` are the blocks of each branch and the cross attentions, `rates` those of stochastic depth.
    """

    def __init__(self, config: CrossVitConfig, counts: tuple[int, ...], rates: list[float]) -> None:
        super().__init__()
        dims = config.embed_dim
        eps = config.eps
        drop = config.proj_drop_rate
        bias = config.qkv_bias
        branches = []
        fusion: list[nn.Module] = []
        for i, (D, heads) in enumerate(zip(dims, config.num_heads, strict=True)):
            blocks = Blocks()
            for rate in rates[: counts[i]]:
                attn = Attention(D, heads, qkv_bias=bias, attn_drop=config.attn_drop_rate, proj_drop=drop)
                mlp = Mlp(D, int(D * config.mlp_ratio[i]), drop=drop)
                blocks.append(Block(D, attn, mlp, eps, drop_path=rate))
            branches.append(blocks)
            cross = []
            for _ in range(counts[-1] or 1):
                reads = CrossAttention(D, heads, bias, config.attn_drop_rate, drop)
                cross.append(CrossBlock(D, reads, eps, rates[-1]))
            fusion.append(nn.Sequential(*cross) if counts[-1] else cross[0])
        others = dims[1:] + dims[:1]
        self.blocks = nn.ModuleList(branches)
        self.projs = nn.ModuleList(projection(a, b, eps) for a, b in zip(dims, others, strict=True))
        self.fusion = nn.ModuleList(fusion[1:] + fusion[:1])  # in the width of the branch whose patches they read
        self.revert_projs = nn.ModuleList(projection(b, a, eps) for a, b in zip(dims, others, strict=True))

    def forward(self, xs: list[Tensor], recompute: bool = False) -> list[Tensor]:
        """Tokens [B, 1 + N, D] of each branch → the same."""
        xs = [blocks(x, recompute=recompute) for blocks, x in zip(self.blocks, xs, strict=True)]
        fused = []
        for i, (proj, fusion, revert) in enumerate(zip(self.projs, self.fusion, self.revert_projs, strict=True)):
            other = xs[(i + 1) % len(xs)]
            token = fusion(torch.cat((proj(xs[i][:, :1]), other[:, 1:]), 1))
            fused.append(torch.cat((revert(token), xs[i][:, 1:]), 1))
        return fused


def projection(dim: int, out: int, eps: float) -> nn.Sequential:
    """LayerNorm, GELU and a linear layer D → D'."""
    return nn.Sequential(nn.LayerNorm(dim, eps=eps), nn.GELU(), nn.Linear(dim, out))


def scaled_image(image: Tensor, size: tuple[int, int], crop: bool) -> Tensor:
    """image [B, C, H, W] at another size: its middle with `crop` if it is large enough, else interpolated."""
    if image.dim() != 4:
        raise ValueError(f"image must have axes [B, C, H, W], got shape {list(image.shape)}")
    height, width = image.shape[2:]
    if (height, width) == size:
        return image
    if crop and size[0] <= height and size[1] <= width:
        top = round((height - size[0]) / 2)
        left = round((width - size[1]) / 2)
        return image[:, :, top : top + size[0], left : left + size[1]]
    return F.interpolate(image, size, mode="bicubic", align_corners=False)


class CrossVit(ImageModel):
    """CrossViT; its features are a list of the tokens [B, 1 + N, D] of both branches.

    Intermediate features are numbered by branch, then by block, as in timm: with n blocks, 0 to n − 1 are the first
    branch's. A pruned model keeps these numbers.
    """

    config: CrossVitConfig
    norm: Any  # a ModuleList
    layout = "crossvit"
    feature_formats = ("NCHW", "NLC")
    position_resize = "bicubic_antialias"
    head_names = ("head.0", "head.1")
    undecayed = r"^(pos_embed|cls_token)_\d$"
    stem_pattern = r"^cls_token|pos_embed|patch_embed"

    def __init__(self, config: CrossVitConfig) -> None:
        super().__init__(config, sum(config.embed_dim))
        self.num_blocks = len(config.depth)
        self.patch_embed = nn.ModuleList()
        self.blocks = nn.ModuleList()
        self.pos_drop = nn.Dropout(config.pos_drop_rate)
        self.sizes = config.sizes
        for i, (size, side, D) in enumerate(zip(self.sizes, config.patch_size, config.embed_dim, strict=True)):
            embed = BranchEmbed(size, (side, side), config.in_chans, D, multi_conv=config.multi_conv)
            self.patch_embed.append(embed)
            setattr(self, f"pos_embed_{i}", nn.Parameter(torch.empty(1, 1 + embed.num_patches, D)))
            setattr(self, f"cls_token_{i}", nn.Parameter(torch.empty(1, 1, D)))
        rates = drop_path_rates(config.drop_path_rate, num_rates(config.depth))
        for counts in config.depth:
            n = num_rates((counts,))
            self.blocks.append(MultiScaleBlock(config, counts, rates[:n]))
            rates = rates[n:]
        norms = (nn.LayerNorm(D, eps=config.eps) for D in config.embed_dim)
        self.norm = nn.ModuleList(norms if config.final_norm else (nn.Identity() for _ in config.embed_dim))
        self.head_drop = nn.Dropout(config.drop_rate)
        self.head = nn.ModuleList(self.make_heads())
        self.init_weights()

    def outputs(self, image: Tensor) -> Iterator[Any]:
        """Yields after each block the tokens [B, 1 + N, D] of both branches."""
        xs = []
        for i, (embed, size) in enumerate(zip(self.patch_embed, self.sizes, strict=True)):
            pos = getattr(self, f"pos_embed_{i}")
            token = getattr(self, f"cls_token_{i}")
            xs.append(self.pos_drop(embed(scaled_image(image, size, self.config.crop_scale), pos, token)))
        for block in self.blocks:
            yield (xs := block(xs, self.recomputes))

    @property
    def feature_indices(self) -> tuple[int, ...]:  # type: ignore[override]
        """The features of the last block."""
        return tuple(range(self.num_blocks - 1, len(self.feature_info), self.num_blocks))

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

    def collect(self, image: Tensor, take: list[int], norm: bool, stop_early: bool) -> tuple[list[Any], Any, int]:
        """See `ImageModel.collect`; an output is (tokens, branch)."""
        outputs = {}
        xs = None
        i = 0
        for i, xs in enumerate(self.outputs(image)):
            for branch, x in enumerate(self.stage_features(xs, i) if norm else xs):
                if (index := branch * self.num_blocks + i) in take:
                    outputs[index] = x, branch
            if stop_early and i == max(map(self.stage_of, take)):
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

    def position_tables(self) -> dict[str, tuple[Any, int]]:
        return {f"pos_embed_{i}": (embed.grid_size, 1) for i, embed in enumerate(self.patch_embed)}

    def stage_of(self, index: int) -> int:
        return index % self.num_blocks

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


def of(D: int, heads: int, blocks: int, ratio: float, **options: Any) -> Options:
    """Options by channels and heads of the first branch, blocks of the second, and ratio of the MLP."""
    shape = dict(embed_dim=(D, 2 * D), num_heads=(heads, heads), depth=((1, blocks, 0),) * 3)
    return dict(**shape, mlp_ratio=(ratio, ratio, 1), **options)


SIZES = {"tiny": (96, 3, 4, 4), "small": (192, 6, 4, 4), "base": (384, 12, 4, 4)}
SIZES |= {"9": (128, 4, 3, 3), "15": (192, 6, 5, 3), "18": (224, 7, 6, 3)}
DAGGER = {f"{n}_dagger": SIZES[n] for n in ("9", "15", "18")}
LARGER: Any = dict(img_size=408, img_scale=(1.0, 384 / 408))

CONFIG = CrossVitConfig
MODEL = CrossVit
VARIANTS: dict[str, Options] = {f"crossvit_{n}_240": of(*size) for n, size in SIZES.items()}
VARIANTS |= {f"crossvit_{n}_240": of(*size, multi_conv=True) for n, size in DAGGER.items()}
VARIANTS |= {f"crossvit_{n}_408": of(*DAGGER[n], multi_conv=True, **LARGER) for n in ("15_dagger", "18_dagger")}


# Names in checkpoints, from timm 1.0.31 and the authors' models/crossvit.py (IBM/CrossViT).

CROSS: dict[str, Any] = dict(beside="blocks.0.revert_projs.0.0.weight", resize="bicubic_antialias")
TIMM_CROSS = Layout(name="timm", mark="pos_embed_0", **CROSS)
CROSS_LAYOUTS = (
    TIMM_CROSS,
    Layout(name="CrossViT", mark="pos_embed.0", stem={"{pos_embed,cls_token}_{}": "{pos_embed,cls_token}.{}"}, **CROSS),
)

CHECKPOINTS = CheckpointFormats("CrossViT", CROSS_LAYOUTS, fit_tables, {"timm": (TIMM_CROSS,)})
