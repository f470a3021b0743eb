"""T2T-ViT — Tokens-to-token ViT. Yuan et al., arXiv:2101.11986. Official: yitu-opensource/T2T-ViT.

Differs from ViT:
  1. Three soft splits into overlapping patches, of 4, 2 and 2 pixels a step; between them narrow tokens attend to each
     other, by random features (Performer, arXiv:2009.14794, eq. 5-9) or, in `t2t_vit_t_*`, exactly.
  2. Fixed sines and cosines as positions, stored as a parameter that is not trained; no bias in qkv.
  3. The released weights were trained with scores divided by the root of embed_dim: load them with
     `qk_scale=embed_dim ** -0.5`.
Adds the token layers.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints.renaming import CheckpointFormats, Fitted, Layout
from ..checkpoints.tensors import State
from ..layers import Attention, Block, Blocks, Mlp, drop_path_rates, sincos1d
from ..layers.embed import sides
from ..layers.fusable import Fusable
from .config import Options, check_multiple
from .tokens import TokenConfig, TokenModel

Grid = tuple[int, int]
SPLITS = ((7, 4, 2), (3, 2, 1), (3, 2, 1))  # kernel, stride, padding


class NarrowAttention(Fusable):
    """Self-attention of one head of D channels, narrower than its input; values are added to the result, not the input.

    Scores are divided by the root of the channels of the input, K.
    """

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.scale = dim**-0.5
        self.qkv = nn.Linear(dim, 3 * out, bias=False)
        self.proj = nn.Linear(out, out)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, K] → [B, N, D]."""
        q, k, v = self.qkv(x).chunk(3, -1)
        o = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], scale=self.scale)
        return v + self.proj(o[:, 0])


class TokenTransformer(Fusable):
    """Attention and MLP of one head, K → D channels; its rates are 0 in the authors' models."""

    def __init__(self, dim: int, out: int, drop: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = NarrowAttention(dim, out)
        self.norm2 = nn.LayerNorm(out)
        self.mlp = Mlp(out, out)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, K] → [B, N, D]."""
        x = self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TokenPerformer(Fusable):
    """As `TokenTransformer`, with linear attention by positive random features of keys and queries."""

    def __init__(self, dim: int, out: int, drop: float = 0.1) -> None:
        super().__init__()
        self.kqv = nn.Linear(dim, 3 * out)
        self.dp = nn.Dropout(drop)
        self.proj = nn.Linear(out, out)
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(out)
        self.mlp: Any = nn.Sequential(nn.Linear(out, out), nn.GELU(), nn.Linear(out, out), nn.Dropout(drop))
        m = out // 2
        self.w = nn.Parameter(torch.empty(m, out), requires_grad=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if not self.w.is_meta:
            nn.init.orthogonal_(self.w).mul_(math.sqrt(len(self.w)))

    def features(self, x: Tensor) -> Tensor:
        """exp(w · x − |x|² / 2) / √m of keys or queries [B, N, D], [B, N, m]."""
        return (x @ self.w.to(x.dtype).T - x.square().sum(-1, keepdim=True) / 2).exp() / math.sqrt(len(self.w))

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, K] → [B, N, D]."""
        y, v = self.attend(self.kqv(self.norm1(x)))
        y = v + self.dp(self.proj(y))
        return y + self.mlp(self.norm2(y))

    def attend(self, kqv: Tensor) -> tuple[Tensor, Tensor]:
        """Packed projections [B, N, 3 · D] → linear attention and values, [B, N, D]."""
        k, q, v = kqv.chunk(3, -1)
        wide = [t if t.dtype == torch.float64 else t.float() for t in (k, q, v)]
        with torch.autocast(kqv.device.type, enabled=False):
            keys, queries = self.features(wide[0]), self.features(wide[1])  # [B, N, m]
            total = queries @ keys.sum(1).unsqueeze(-1)  # [B, N, 1]
            return (queries @ (keys.mT @ wide[2]) / (total + 1e-8)).to(v.dtype), v


class TokensToToken(Fusable):
    """Three soft splits with two token layers between them, and a projection; [B, C, H, W] → [B, N, D]."""

    def __init__(self, kind: Any, in_chans: int, token_dim: int, dim: int, drop: float) -> None:
        super().__init__()
        self.attention1 = kind(in_chans * 49, token_dim, drop)
        self.attention2 = kind(token_dim * 9, token_dim, drop)
        self.project = nn.Linear(token_dim * 9, dim)

    def forward(self, image: Tensor) -> Tensor:
        """[B, C, H, W] → [B, N, D]."""
        return self.project(self.tokens(image))

    def tokens(self, image: Tensor) -> Tensor:
        """[B, C, H, W] → tokens of the last split [B, N, 9 · channels]."""
        x = image
        size = (image.shape[2], image.shape[3])
        for attention, split in zip((self.attention1, self.attention2), SPLITS, strict=False):
            size = split_size(size, split)
            x = attention(soft_split(x, split)).transpose(1, 2).unflatten(2, size)
        return soft_split(x, SPLITS[2])


def soft_split(x: Tensor, split: tuple[int, int, int]) -> Tensor:
    """Overlapping patches of a map [B, C, H, W] as tokens [B, N, C · K · K]."""
    kernel, stride, padding = split
    return F.unfold(x, kernel, 1, padding, stride).transpose(1, 2)


def split_size(size: Grid, *splits: tuple[int, int, int]) -> Grid:
    """(rows, columns) of patches after these splits of a map of (height, width)."""
    for kernel, stride, padding in splits:
        size = ((size[0] + 2 * padding - kernel) // stride + 1, (size[1] + 2 * padding - kernel) // stride + 1)
    return size


KINDS = {"performer": TokenPerformer, "transformer": TokenTransformer}


@dataclass(frozen=True, kw_only=True)
class T2tConfig(TokenConfig):
    """Options of T2T-ViT, in addition to those of `TokenConfig`.

    Attributes:
        qk_scale: factor of the scores; None means head_dim^-0.5.
        tokens_type: "performer" or "transformer".
        token_dim: channels of the tokens between the splits.
        token_drop_rate: dropout in a performer; 0.1 in the authors' code.
    """

    num_heads: int = 6
    mlp_ratio: float = 3.0
    qk_scale: float | None = None
    tokens_type: str = "performer"
    token_dim: int = 64
    token_drop_rate: float = 0.1
    choices: ClassVar = dict(tokens_type=tuple(KINDS))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patch_size != (16, 16):
            raise ValueError(f"patch_size is {self.patch_size}; the splits of a T2T-ViT make it 16")
        check_multiple(self, "embed_dim", "num_heads")
        if self.embed_dim % 2 or self.token_dim % 2:
            raise ValueError(f"embed_dim is {self.embed_dim} and token_dim {self.token_dim}; use even numbers")
        if min(split_size(sides(self.img_size), *SPLITS)) < 1:
            raise ValueError(f"img_size is {self.img_size}; the splits need at least 3 pixels")


class TokensToTokenViT(TokenModel):
    """T2T-ViT; its features are tokens [B, 1 + N, D]."""

    layout = "t2t"
    undecayed = r"^cls_token$"  # frozen ones have no gradient
    stem_pattern = r"^cls_token|pos_embed|tokens_to_token"

    def __init__(self, config: T2tConfig) -> None:
        super().__init__(config)
        D = config.embed_dim
        kind = KINDS[config.tokens_type]
        self.tokens_to_token = TokensToToken(kind, config.in_chans, config.token_dim, D, config.token_drop_rate)
        rows, columns = split_size(sides(config.img_size), *SPLITS)
        self.cls_token = nn.Parameter(torch.empty(1, 1, D))
        self.pos_embed = nn.Parameter(sincos1d(1 + rows * columns, D), requires_grad=False)
        self.pos_drop = nn.Dropout(config.pos_drop_rate)
        rates = drop_path_rates(config.drop_path_rate, config.depth)
        self.blocks = Blocks(*(build_block(config, rate) for rate in rates))
        self.build_head()

    def grid_of(self, image: Tensor) -> tuple[int, int]:
        """(rows, columns) of tokens of image [B, C, H, W], which must have the model's size."""
        super().grid_of(image)
        return split_size(sides(self.config.img_size), *SPLITS)

    def outputs(self, image: Tensor) -> Iterator[Tensor]:
        """Yields the tokens [B, 1 + N, D] after each block."""
        self.grid_of(image)
        x = torch.cat((self.cls_token.expand(image.shape[0], -1, -1), self.tokens_to_token(image)), 1)
        yield from self.blocks.outputs(self.pos_drop(x + self.pos_embed), (), self.recomputes)


def build_block(config: T2tConfig, drop_path: float) -> Block:
    """Builds one block."""
    D, drop = config.embed_dim, config.proj_drop_rate
    options: Any = dict(qkv_bias=config.qkv_bias, attn_drop=config.attn_drop_rate, proj_drop=drop)
    attn = Attention(D, config.num_heads, scale=config.qk_scale, **options)
    return Block(D, attn, Mlp(D, int(D * config.mlp_ratio), drop=drop), config.eps, drop_path=drop_path)


SMALL: Options = dict(embed_dim=256, num_heads=4, mlp_ratio=2)
SIZES: dict[str, Options] = {
    "7": dict(SMALL, depth=7),
    "10": dict(SMALL, depth=10),
    "12": SMALL,
    "14": dict(depth=14),
    "19": dict(embed_dim=448, num_heads=7, depth=19),
    "24": dict(embed_dim=512, num_heads=8, depth=24),
}
SIZES |= {f"t_{n}": dict(SIZES[n], tokens_type="transformer") for n in ("14", "19", "24")}
SIZES |= {"14_resnext": dict(SIZES["14"], num_heads=32), "14_wide": dict(embed_dim=768, num_heads=12, depth=4)}

CONFIG = T2tConfig
MODEL = TokensToTokenViT
VARIANTS: dict[str, Options] = {f"t2t_vit_{n}": size for n, size in SIZES.items()}


# Names in checkpoints: the authors', models/t2t_vit.py.

T2T = Layout(name="T2T-ViT", mark="tokens_to_token.project.weight", resize="bicubic")


def fit_t2t(model: Any, target: State, state: State, metadata: Mapping[str, str], mode: str) -> Fitted:
    """Takes the model's fixed positions where those of `state` are for another size; see `fit.fit`."""
    pos = state.get("pos_embed")
    if pos is None or pos.shape == target["pos_embed"].shape or pos.shape[2:] != target["pos_embed"].shape[2:]:
        return [], ""
    state["pos_embed"] = target["pos_embed"]
    return [], f"sinusoids for {pos.shape[1]} tokens replaced by those for {target['pos_embed'].shape[1]}"


CHECKPOINTS = CheckpointFormats("T2T-ViT", (T2T,), fit_t2t)
