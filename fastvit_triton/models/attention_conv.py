"""Attention as convolution — On the relationship between self-attention and convolutional layers (arXiv:1911.03584).

Cordonnier, Loukas and Jaggi; official: epfml/attention-cnn.

Differs from ViT:
  1. Patches of 2 x 2; no positions are added and there is no class token; the mean of the tokens goes to the head.
  2. Scores depend on the relative position alone, by a Gaussian per head; 9 heads can be any 3 x 3 convolution.
  3. There are no queries, keys and values: each head carries all channels, which two linear layers join.
  4. Each norm follows its residual, as in BERT.

Each head h has a centre Δ and a precision matrix Σ⁻¹ = S Sᵀ, or s² I. For a key at the offset δ = (rows, columns):

    score_h(δ) = −½ (δ − Δ)ᵀ Σ⁻¹ (δ − Δ)                                   (equation 9)
    y = [A_1 x, …, A_H x] W + b,   A_h = softmax over all keys              (equation 5; each head carries all channels)

As s grows, A_h x becomes x at the offset Δ; W then holds the slices of a kernel (theorem 1). Parameter names are the
authors'. Maps do not depend on the image and are computed in fp32 at least.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..checkpoints.renaming import CheckpointFormats, Fitted, Layout
from ..checkpoints.tensors import State
from ..layers import Blocks, Mlp, PatchEmbed, PostNormBlock, drop_path_rates
from ..layers.embed import sides
from ..layers.fusable import Fusable
from .config import Options, check_patches
from .tokens import TokenConfig, TokenModel

Grid = tuple[int, int]


class QuadraticAttention(Fusable):
    """Attention of the tokens of a grid by relative position, and an output projection.

    If `isotropic`, Σ⁻¹ is s² I, not a full matrix.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        isotropic: bool = True,
        bias: bool = True,
        proj_drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.grid = grid
        self.isotropic = isotropic
        self.attention_centers = nn.Parameter(torch.empty(num_heads, 2))
        self.attention_spreads = nn.Parameter(torch.empty(num_heads, *(() if isotropic else (2, 2))))
        self.value = nn.Linear(num_heads * dim, dim, bias=bias)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Centres are normal with deviation 2; precisions differ from 1 by 0.01 (the authors' settings)."""
        nn.init.normal_(self.attention_centers, std=2.0)
        nn.init.normal_(self.attention_spreads, std=0.01)
        self.attention_spreads.add_(1.0 if self.isotropic else torch.eye(2))

    @torch.no_grad()
    def set_convolution(self, weight: Tensor, bias: Tensor | None = None, spread: float = 200.0) -> None:
        """Makes the module, up to `proj`, a convolution with padding, where its window is inside the map (theorem 1).

        Args:
            weight: [D, D, K, K] with K² heads.
            bias: [D].
            spread: s; the weight of another pixel is exp(−s² / 2).
        """
        rows, columns = weight.shape[2:]
        if rows * columns != self.num_heads or weight.shape[:2] != self.proj.weight.shape or not self.isotropic:
            needed = f"{self.num_heads} taps, {self.proj.in_features} channels and isotropic heads"
            raise ValueError(f"weight has shape {list(weight.shape)}; the module needs one with {needed}")
        taps = torch.cartesian_prod(torch.arange(rows) - rows // 2, torch.arange(columns) - columns // 2)
        self.attention_centers.copy_(taps)
        self.attention_spreads.fill_(spread)
        self.value.weight.copy_(weight.flatten(2).transpose(1, 2).flatten(1))
        if self.value.bias is not None:
            self.value.bias.copy_(torch.zeros(len(weight)) if bias is None else bias)

    def maps(self) -> Tensor:
        """A [H, N, N]."""
        centers = self.attention_centers
        spreads = self.attention_spreads
        dtype = torch.promote_types(centers.dtype, torch.float32)
        rows, columns = (torch.arange(n, device=centers.device, dtype=dtype) for n in self.grid)
        y, x = ((at - at[:, None])[None] for at in (rows, columns))  # from query to key
        (dy, dx), s = (c.to(dtype)[:, None, None] for c in centers.unbind(1)), spreads.to(dtype)
        y, x = (y - dy)[:, :, None, :, None], (x - dx)[:, None, :, None, :]  # [H, rows, 1, rows, 1] and columns
        a, b, c = self.precisions(s)
        scores = -0.5 * (a * y * y + c * x * x + 2 * b * y * x)
        return scores.flatten(3).flatten(1, 2).softmax(-1)

    def precisions(self, spreads: Tensor) -> tuple[Tensor, ...]:
        """The entries (0, 0), (0, 1) and (1, 1) of each head's Σ⁻¹, [H, 1, 1, 1, 1]."""
        if self.isotropic:
            squares = spreads.square()
            return tuple(t[:, None, None, None, None] for t in (squares, torch.zeros_like(squares), squares))
        (p, q), (r, t) = (row.unbind(1) for row in spreads.unbind(1))
        return tuple(e[:, None, None, None, None] for e in (p * p + q * q, p * r + q * t, r * r + t * t))

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, D] → [B, N, D]."""
        return self.proj_drop(self.proj(self.value(self.attend(x, self.maps()))))

    def attend(self, x: Tensor, maps: Tensor) -> Tensor:
        """[B, N, D] → the means of all heads [B, N, H · D], by their maps [H, N, N]."""
        if x.shape[1] != maps.shape[1]:
            raise ValueError(f"x has {x.shape[1]} tokens; the grid {self.grid} has {maps.shape[1]}")
        return (maps.to(x.dtype).flatten(0, 1) @ x).unflatten(1, (self.num_heads, -1)).transpose(1, 2).flatten(2)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, grid={self.grid}, isotropic={self.isotropic}"


@dataclass(frozen=True, kw_only=True)
class AttentionConvConfig(TokenConfig):
    """Options of attention as convolution, in addition to those of `TokenConfig`; `qkv_bias` is that of the heads' sum.

    Attributes:
        isotropic: heads have one precision, not a matrix.
    """

    img_size: int | tuple[int, int] = 32
    num_classes: int = 10
    patch_size: int | tuple[int, int] = 2
    embed_dim: int = 400
    depth: int = 6
    num_heads: int = 9
    mlp_ratio: float = 1.28
    qkv_bias: bool = True
    isotropic: bool = True
    global_pool: str = "avg"
    final_norm: bool = False
    eps: ClassVar[float] = 1e-12
    pools = ("avg", "none")
    only: ClassVar = dict(final_norm=False, attn_drop_rate=0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_patches(self.img_size, self.patch_size)


class AttentionConv(TokenModel):
    """Attention as convolution; its features are tokens [B, N, D]."""

    layout = "attention_conv"
    stem_pattern = r"^patch_embed"
    num_prefix_tokens = 0

    def __init__(self, config: AttentionConvConfig) -> None:
        super().__init__(config)
        D = config.embed_dim
        drop = config.proj_drop_rate
        sizes = (sides(config.img_size), sides(config.patch_size))
        self.patch_embed = PatchEmbed(*sizes, config.in_chans, D)
        self.pos_drop = nn.Dropout(config.pos_drop_rate)
        grid = self.patch_embed.grid_size
        self.blocks = Blocks()
        for rate in drop_path_rates(config.drop_path_rate, config.depth):
            attn = QuadraticAttention(D, config.num_heads, grid, config.isotropic, config.qkv_bias, drop)
            mlp = Mlp(D, int(D * config.mlp_ratio), drop=drop)
            self.blocks.append(PostNormBlock(D, attn, mlp, config.eps, drop_path=rate))
        self.build_head()

    def outputs(self, image: Tensor) -> Iterator[Tensor]:
        """Yields the tokens [B, N, D] after each block."""
        self.grid_of(image)
        x = self.pos_drop(self.patch_embed(image))
        yield from self.blocks.outputs(x, (), self.recomputes)


CONFIG = AttentionConvConfig
MODEL = AttentionConv
VARIANTS: dict[str, Options] = {"attention_conv": {}}

# Names in checkpoints: the authors', models/bert.py and models/transformer.py; and ours.

POSITIONAL_LAYOUTS = (
    Layout(
        name="attention-cnn",
        mark="features_upscale.weight",
        beside="encoder.layer.0.attention.self.attention_centers",
        resize="linear",
        stem={"patch_embed.proj": "features_upscale", "head": "classifier"},
        blocks="encoder.layer.{}",
        block={
            "attn.attention_centers": "attention.self.attention_centers",
            "attn.attention_spreads": "attention.self.attention_spreads",
            "attn.value": "attention.self.value",
            "attn.proj": "attention.output.dense",
            "norm1": "attention.output.LayerNorm",
            "mlp.fc1": "intermediate.dense",
            "mlp.fc2": "output.dense",
            "norm2": "output.LayerNorm",
        },
    ),
    Layout(
        name="fastvit_triton", mark="patch_embed.proj.weight", beside="blocks.0.attn.attention_centers", resize="linear"
    ),
)


def fit_positional(model: Any, target: State, state: State, metadata: Mapping[str, str], mode: str) -> Fitted:
    """Makes the authors' tensors fit: a linear layer of concatenated pixels [D, p · p · C] becomes a convolution, and
    a table of positions and embeddings that their classifier does not read are dropped; see `fit.fit`."""
    names = ("attention_mask", "mask_embedding", "cls_embedding", "features_downscale.", "pixelizer.")
    useless = [key for key in state if key.endswith("attention.self.R") or key.startswith(names)]
    weight = state.get("patch_embed.proj.weight")
    size = model.config.patch_size
    if weight is not None and weight.dim() == 2 and weight.shape[1] % math.prod(size) == 0:
        state["patch_embed.proj.weight"] = weight.unflatten(1, (*size, -1)).permute(0, 3, 1, 2)
    return useless, ""


CHECKPOINTS = CheckpointFormats("attention as convolution", POSITIONAL_LAYOUTS, fit_positional)
