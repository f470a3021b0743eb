"""CCT, CVT, ViT-Lite — Escaping the big data paradigm with compact transformers. Hassani et al., arXiv:2104.05704.

Official: SHI-Labs/Compact-Transformers.
Differs from ViT:
  1. The residual is normalised after each attention, and the MLP has no norm of its own; qkv has no bias.
  2. `compact_cvt_*`, `cct_*`: no class token; the head reads a weighted mean of the tokens (sequence pooling).
  3. `cct_*`: tokens come from convolutions with max pooling; cct_7_3x1 has 7 blocks and one convolution of 3 x 3.
Adds the block, the pooling and the tokenizer. `compact_cvt_*` is the authors' CVT, and not CvT (arXiv:2103.15808).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints.renaming import CheckpointFormats, Fitted, Layout
from ..checkpoints.tensors import State, WeightsError
from ..engine.body import normalize
from ..kernels.patch_embed import assemble
from ..layers import Attention, Blocks, DropPath, drop_path_rates, resize_pos_embed, sincos1d
from ..layers.drop_path import add
from ..layers.embed import sides
from ..layers.fusable import Fusable
from .base import LAST, ImageModel, init_linear
from .config import BaseConfig, Options


class CompactBlock(Fusable):
    """y = LN(x + attention(LN x)), then y + MLP(y): the residual is normalised after the attention, not before fc1."""

    def __init__(self, dim: int, self_attn: Attention, hidden: int, eps: float, drop: float, drop_path: float) -> None:
        super().__init__()
        self.pre_norm = nn.LayerNorm(dim, eps=eps)
        self.self_attn = self_attn
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.linear1 = nn.Linear(dim, hidden)
        self.dropout1 = nn.Dropout(drop)
        self.linear2 = nn.Linear(hidden, dim)
        self.dropout2 = nn.Dropout(drop)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, D] → [B, N, D]."""
        x = self.norm1(add(x, self.drop_path, lambda x: self.self_attn(self.pre_norm(x))))
        h = self.dropout1(F.gelu(self.linear1(x)))
        return x + self.drop_path(self.dropout2(self.linear2(h)))


class ConvTokenizer(Fusable):
    """Image to tokens by convolutions, each with ReLU and max pooling, or by one patch projection."""

    WIDTH = 64  # channels between the convolutions

    def __init__(self, in_chans: int, embed_dim: int, kernel_size: int, layers: int) -> None:
        super().__init__()
        self.in_chans = in_chans
        stride = max(1, kernel_size // 2 - 1) if layers else kernel_size
        self.reduction = (2 * stride) ** layers if layers else stride
        padding = max(1, kernel_size // 2) if layers else 0
        widths = [in_chans, *[self.WIDTH] * (layers - 1), embed_dim]
        self.conv_layers: Any = nn.Sequential()
        for i, (inputs, outputs) in enumerate(pairwise(widths)):
            conv = nn.Conv2d(inputs, outputs, kernel_size, stride, padding, bias=not layers)
            rest = (nn.ReLU(), nn.MaxPool2d(3, 2, 1)) if layers else (nn.Identity(), nn.Identity())
            self.conv_layers.add_module(str(i), nn.Sequential(conv, *rest))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in self.conv_layers:
            nn.init.kaiming_normal_(layer[0].weight)

    def grid_of(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """(rows, columns) of tokens of an image of (height, width); 0 where it is too small."""
        for layer in self.conv_layers:
            conv = layer[0]
            steps = [(conv.kernel_size[0], conv.stride[0], conv.padding[0])]
            steps += [(3, 2, 1)] if isinstance(layer[2], nn.MaxPool2d) else []
            for kernel, stride, padding in steps:
                size = tuple(max(0, (n + 2 * padding - kernel) // stride + 1) for n in size)
        return size

    def forward(self, image: Tensor, pos: Tensor | None = None, prefix: Tensor | None = None) -> Tensor:
        """image [B, C, H, W], pos [1, T + N, D], prefix [1, T, D] → tokens [B, T + N, D]."""
        return assemble(self.conv_layers(image).flatten(2).transpose(1, 2), pos, prefix)


def sequence_pool(x: Tensor, score: nn.Linear) -> Tensor:
    """Sequence pooling: softmax(x w + b)ᵀ x over the tokens (equation 5), [B, N, D] → [B, D]."""
    return (score(x).softmax(1).mT @ x)[:, 0]


@dataclass(frozen=True, kw_only=True)
class CctConfig(BaseConfig):
    """Options of compact transformers, in addition to those of `BaseConfig`.

    Attributes:
        kernel_size: side of the tokenizer's convolutions, or of the patches.
        conv_layers: convolutions of the tokenizer; 0 for patches.
        pos_embed: "learned", "sincos1d" (a fixed parameter) or "none".
        global_pool: "seq" (sequence pooling), "token" (class token) or "none" (all tokens go to the head).
    """

    img_size: int | tuple[int, int] = 32
    num_classes: int = 10
    kernel_size: int = 3
    conv_layers: int = 1
    embed_dim: int = 256
    depth: int = 7
    num_heads: int = 4
    mlp_ratio: float = 2.0
    pos_embed: str = "learned"
    class_token: bool = False
    global_pool: str = "seq"
    eps: float = 1e-5
    pos_drop_rate: float = 0.0
    proj_drop_rate: float = 0.0
    attn_drop_rate: float = 0.1  # this and the next as in the authors' code
    drop_path_rate: float = 0.1
    final_norm: bool = True
    pools = ("seq", "token", "none")
    choices: ClassVar = dict(pos_embed=("learned", "sincos1d", "none"))
    least: ClassVar = dict(in_chans=1, kernel_size=1, conv_layers=0, embed_dim=1, depth=1, num_heads=1, mlp_ratio=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.embed_dim % self.num_heads:
            raise ValueError(f"embed_dim {self.embed_dim} is not a multiple of num_heads {self.num_heads}; change one")


class CompactClassifier(nn.Module):
    """The modules after the tokenizer, under the authors' names, for this number of positions; the model calls them."""

    class_emb: nn.Parameter | None
    positional_emb: nn.Parameter | None

    def __init__(self, config: CctConfig, rows: int) -> None:
        super().__init__()
        D = config.embed_dim
        drop = config.proj_drop_rate
        self.class_emb = nn.Parameter(torch.zeros(1, 1, D)) if config.class_token else None
        self.attention_pool = nn.Linear(D, 1) if config.global_pool == "seq" else None
        learned = config.pos_embed == "learned"
        table = torch.empty(1, rows, D) if learned else sincos1d(rows, D) if config.pos_embed == "sincos1d" else None
        self.positional_emb = None if table is None else nn.Parameter(table, requires_grad=learned)
        self.dropout = nn.Dropout(config.pos_drop_rate)
        self.blocks: Any = Blocks()
        for rate in drop_path_rates(config.drop_path_rate, config.depth):
            attn = Attention(D, config.num_heads, None, False, attn_drop=config.attn_drop_rate, proj_drop=drop)
            self.blocks.append(CompactBlock(D, attn, int(D * config.mlp_ratio), config.eps, drop, rate))
        self.norm = nn.LayerNorm(D, eps=config.eps) if config.final_norm else nn.Identity()
        self.fc = nn.Linear(D, config.num_classes) if config.num_classes else nn.Identity()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reinitialises all weights as the authors do."""
        init_linear(self)
        if self.class_emb is not None:
            nn.init.zeros_(self.class_emb)
        if self.positional_emb is not None and self.positional_emb.requires_grad:
            nn.init.trunc_normal_(self.positional_emb, std=0.2)


class CompactTransformer(ImageModel):
    """CCT, CVT or ViT-Lite. Positions are resampled for images of another size than `img_size`."""

    config: CctConfig
    layout = "cct"
    head_names = ("classifier.fc",)
    feature_formats = ("NCHW", "NLC")
    feature_indices = 3
    blocks_path = "classifier.blocks"
    undecayed = r"^classifier\.(positional|class)_emb$"  # as in ViT
    stem_pattern = r"^tokenizer|^classifier\.(?:class|positional)_emb"
    layer_patterns = ((r"^classifier\.blocks\.(\d+)", None), (r"^classifier\.norm", LAST))
    position_resize = "bilinear"

    def __init__(self, config: CctConfig) -> None:
        D = config.embed_dim
        super().__init__(config, D)
        self.num_prefix_tokens = int(config.class_token)
        self.tokenizer = ConvTokenizer(config.in_chans, D, config.kernel_size, config.conv_layers)
        self.grid_size = self.grid_at(sides(config.img_size))
        rows = self.grid_size[0] * self.grid_size[1] + self.num_prefix_tokens
        self.classifier: Any = CompactClassifier(config, rows)
        self.classifier.reset_parameters()

    def grid_of(self, image: Tensor) -> tuple[int, int]:
        """(rows, columns) of tokens of an image [B, C, H, W]."""
        return self.grid_at(image.shape[2:])

    def grid_at(self, size: tuple[int, ...]) -> tuple[int, int]:
        """(rows, columns) of tokens of an image of (height, width); raises ValueError if there are none."""
        rows, columns = self.tokenizer.grid_of(size)
        if not rows * columns:
            raise ValueError(f"image is {size[0]}x{size[1]} pixels, too small for a token of this model")
        return rows, columns

    def outputs(self, image: Tensor) -> Iterator[Tensor]:
        """Yields the tokens [B, T + N, D] after each block."""
        if image.dim() != 4 or image.shape[1] != self.config.in_chans:
            raise ValueError(f"image must have axes [B, {self.config.in_chans}, H, W], got shape {list(image.shape)}")
        parts = self.classifier
        grid = self.grid_of(image)
        pos = self.classifier.positional_emb
        if pos is not None and grid != self.grid_size:
            pos = resize_pos_embed(pos, self.grid_size, grid, self.num_prefix_tokens, self.position_resize)
        x = parts.dropout(self.tokenizer(image, pos, parts.class_emb))
        yield from parts.blocks.outputs(x, recompute=self.recomputes)

    def pool(self, x: Tensor) -> Tensor:
        """Tokens [B, T + N, D] → [B, D]; all tokens for global_pool="none"."""
        return self.sequence_pool(x) if self.config.global_pool == "seq" else super().pool(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens [B, T + N, D] → logits [B, num_classes], or the pooled features with `pre_logits`."""
        x = self.pool(x)
        return x if pre_logits else self.classifier.fc(x)

    def sequence_pool(self, x: Tensor) -> Tensor:
        """Tokens [B, N, D] → [B, D]."""
        return sequence_pool(x, self.classifier.attention_pool)

    @property
    def reduction(self) -> int:
        """Pixels of the image for each token."""
        return self.tokenizer.reduction

    def normalize_stage(self, x: Tensor, stage: int) -> Tensor:
        """The final norm of a block's output."""
        return normalize(x, self.classifier.norm)

    def prune(self, stages: int, norm: bool, head: bool) -> None:
        """Keeps the first `stages` blocks; removes the final norm if `norm`, pooling and classifier if `head`."""
        self.classifier.blocks = self.classifier.blocks[:stages]
        if norm:
            self.classifier.norm = nn.Identity()
        if head:
            self.reset_classifier(0, "none")
        kept = dict(depth=stages, drop_path_rate=self.classifier.blocks[-1].drop_path.p)
        self.config = self.config.replace(**kept, final_norm=isinstance(self.classifier.norm, nn.LayerNorm))

    def poolings(self) -> list[str]:
        return [name for name in super().poolings() if name != "seq" or self.classifier.attention_pool is not None]

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces the head, as `ImageModel` does; without global_pool="seq" the pooling is removed."""
        if global_pool == "seq" and self.classifier.attention_pool is None:
            raise ValueError("global_pool is 'seq', but the model has no sequence pooling; create it with that option")
        super().reset_classifier(num_classes, global_pool)
        if self.config.global_pool != "seq":
            self.classifier.attention_pool = None


# number of blocks → heads, MLP ratio, D
SIZES = {2: (2, 1.0, 128), 4: (2, 1.0, 128), 6: (4, 2.0, 256), 7: (4, 2.0, 256), 14: (6, 3.0, 384)}


def of(depth: int, kernel_size: int, conv_layers: int = 0, img_size: int = 32, num_classes: int = 10) -> Options:
    """The authors' options of a model of this depth."""
    heads, ratio, D = SIZES[depth]
    stem = dict(kernel_size=kernel_size, conv_layers=conv_layers, img_size=img_size, num_classes=num_classes)
    return dict(stem, depth=depth, num_heads=heads, mlp_ratio=ratio, embed_dim=D)


TOKEN = dict(class_token=True, global_pool="token")

CONFIG = CctConfig
MODEL = CompactTransformer
VARIANTS: dict[str, Options] = {
    "cct_2_3x2_32": of(2, 3, 2),
    "cct_4_3x2_32": of(4, 3, 2),
    "cct_6_3x1_32": of(6, 3, 1),
    "cct_6_3x2_32": of(6, 3, 2),
    "cct_7_3x1_32": of(7, 3, 1),
    "cct_7_3x2_32": of(7, 3, 2),
    "cct_7_7x2_224": of(7, 7, 2, 224, 102),
    "cct_14_7x2_224": of(14, 7, 2, 224, 1000),
    "cct_14_7x2_384": of(14, 7, 2, 384, 1000),
}
VARIANTS |= {f"compact_cvt_{depth}_4_32": of(depth, 4) for depth in (2, 4, 6, 7)}
VARIANTS |= {f"vit_lite_{depth}_4_32": dict(of(depth, 4), **TOKEN) for depth in (2, 4, 6, 7)}


# Names in checkpoints: the authors', src/utils/transformers.py and helpers.py.

CCT = Layout(
    name="CCT",
    mark="classifier.blocks.0.pre_norm.weight",
    beside="tokenizer.conv_layers.0.0.weight",
    resize="bilinear",
    home="classifier.blocks.{}",
    blocks="classifier.blocks.{}",
)


def fit_cct(model: Any, target: State, state: State, metadata: Mapping[str, str], mode: str) -> Fitted:
    """Makes the positions of `state` fit the grid of a compact transformer; for the arguments see `fit.fit`."""
    key = "classifier.positional_emb"
    T = model.num_prefix_tokens
    grid = model.grid_size
    if key not in target or key not in state or state[key].shape == target[key].shape or state[key].dim() != 3:
        return [], ""
    rows = state[key].shape[1]
    side = math.isqrt(max(rows - T, 0))
    if not side or side * side != rows - T:
        raise WeightsError(f"{key} has {rows} rows, no square grid; create the model with its img_size")
    state[key] = resize_pos_embed(state[key], (side, side), grid, T, mode)
    return [], f"{side}x{side} resized to {grid[0]}x{grid[1]} ({mode})"


CHECKPOINTS = CheckpointFormats("a compact transformer", (CCT,), fit_cct)
