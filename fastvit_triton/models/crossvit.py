"""CrossViT — Cross-attention multi-scale vision transformer. Chen et al., arXiv:2103.14899. Official: IBM/CrossViT.

Differs from ViT:
  1. Two branches, each a ViT with patches of its own size; the second reads the image at another size.
  2. Three times, after some blocks, the class token of each branch attends to the patches of the other.
  3. A head for each branch; their mean are the logits.
  4. `*_dagger_*`: three convolutions instead of one project the patches.
Adds the cross attention.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints.renaming import CheckpointFormats, Fitted, Layout
from ..checkpoints.tensors import State
from ..layers import Attention, Block, Blocks, DropPath, Mlp, PatchEmbed, drop_path_rates
from ..layers.class_attention import ClassAttention
from ..layers.fusable import Fusable
from .branches import BranchConfig, BranchModel, num_rates
from .config import Options
from .fit import fit_table

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
class CrossVitConfig(BranchConfig):
    """Options of CrossViT, in addition to those of `BranchConfig`.

    Attributes:
        multi_conv: project patches by three convolutions.
        crop_scale: cut out the middle of the image instead of interpolating it, where it is larger.
    """

    multi_conv: bool = False
    crop_scale: bool = False


class MultiScaleBlock(nn.Module):
    """Blocks of each branch, then the class token of each attends to the patches of the other (figure 4).

    Args:
        config: of the model.
        counts: blocks of each branch, and cross attentions.
        rates: of stochastic depth.
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


class CrossVit(BranchModel):
    """CrossViT; its features are a list of the tokens [B, 1 + N, D] of both branches."""

    config: CrossVitConfig
    layout = "crossvit"
    undecayed = r"^(pos_embed|cls_token)_\d$"
    stem_pattern = r"^cls_token|pos_embed|patch_embed"

    def __init__(self, config: CrossVitConfig) -> None:
        super().__init__(config)
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
        self.build_head()

    def stages(self, image: Tensor) -> Iterator[Any]:
        """Yields after each block the tokens [B, 1 + N, D] of both branches."""
        xs = []
        for i, (embed, size) in enumerate(zip(self.patch_embed, self.sizes, strict=True)):
            pos = getattr(self, f"pos_embed_{i}")
            token = getattr(self, f"cls_token_{i}")
            xs.append(self.pos_drop(embed(scaled_image(image, size, self.config.crop_scale), pos, token)))
        for block in self.blocks:
            yield (xs := block(xs, self.recomputes))


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
ORACLE = dict.fromkeys(VARIANTS, "timm")

# Counted by timm 1.0.31.
COUNTS: tuple[int, ...] = 7_014_800, 26_856_272, 105_025_232, 8_553_296, 27_528_464, 43_271_408
COUNTS += 8_776_592, 28_209_008, 44_266_976, 28_500_080, 44_606_560
PARAMS = dict(zip(VARIANTS, COUNTS, strict=True))

# Names in checkpoints, from timm 1.0.31 and the authors' models/crossvit.py (IBM/CrossViT).

CROSS: dict[str, Any] = dict(beside="blocks.0.revert_projs.0.0.weight", resize="bicubic_antialias")
TIMM_CROSS = Layout(name="timm", mark="pos_embed_0", **CROSS)
CROSS_LAYOUTS = (
    TIMM_CROSS,
    Layout(
        name="CrossViT",
        mark="pos_embed.0",
        number=lambda key: re.sub(r"^(pos_embed|cls_token)\.", r"\1_", key),
        **CROSS,
    ),
)


def fit_branches(model: Any, target: State, state: State, metadata: Mapping[str, str], mode: str) -> Fitted:
    """Makes the positions of `state` fit the grids of a CrossViT; for the arguments see `fit.fit`."""
    tables = {f"pos_embed_{i}": (embed.grid_size, 1) for i, embed in enumerate(model.patch_embed)}
    return [], fit_table(model, target, state, metadata, mode, tables)


CHECKPOINTS = CheckpointFormats("CrossViT", CROSS_LAYOUTS, fit_branches, {"timm": (TIMM_CROSS,)})
