"""Attention whose queries, keys and values are depthwise convolutions of the map. Parameter names are the authors'.

Source: CvT, arXiv:2103.15808, section 3.2.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..engine.attention import attend
from ..engine.batch_norm import folded
from ..engine.body import Before, Given, Output, finish, project
from ..engine.branch import Branch, add_branches
from ..engine.hooks import can_fuse, has_hooks
from ..engine.leaves import CONVOLUTIONS, Foreign, is_plain_module
from ..engine.mlp import taps_of
from ..engine.replay import call_block
from ..engine.ways import plainly
from ..kernels.cost import Branch as Sizes
from ..kernels.depthwise import depthwise
from .block import Block, Blocks
from .recompute import recomputed

Grid = tuple[int, int]


class ConvEmbed(nn.Module):
    """A convolution with overlapping windows, and a LayerNorm: [B, C, H, W] → [B, H', W', D].

    Args:
        in_chans: C.
        dim: D.
        stride: (rows, columns) that a window moves; it has 2 · stride − 1 rows and columns.
        eps: LayerNorm epsilon.
    """

    def __init__(self, in_chans: int, dim: int, stride: Grid, eps: float) -> None:
        super().__init__()
        rows, columns = stride
        kernel, padding = (2 * rows - 1, 2 * columns - 1), (rows // 2, columns // 2)
        self.proj = nn.Conv2d(in_chans, dim, kernel, stride, padding)
        self.norm = nn.LayerNorm(dim, eps=eps)

    def grid_of(self, size: Grid) -> Grid:
        """(H', W') of a map of this size."""
        (height, width), (rows, columns) = size, self.proj.stride
        return (height + 2 * (rows // 2) + 1) // rows - 1, (width + 2 * (columns // 2) + 1) // columns - 1

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] → [B, H', W', D]."""
        return self.norm(self.proj(x).permute(0, 2, 3, 1))


class ConvProjection(nn.Module):
    """A 3 x 3 depthwise convolution and a BatchNorm, which inference folds into it.

    Args:
        dim: D, channels.
        stride: 1, or 2 for every other row and column.
    """

    def __init__(self, dim: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, dim, 3, stride, 1, groups=dim, bias=False)
        self.bn = nn.BatchNorm2d(dim)

    def forward(self, x: Tensor) -> Tensor:
        """[B, H, W, D] → [B, ⌈H / stride⌉, ⌈W / stride⌉, D]."""
        return self.bn(self.conv(x.permute(0, 3, 1, 2))).permute(0, 2, 3, 1)

    def fused(self, x: Tensor) -> Tensor:
        """The same by one kernel; in training BatchNorm follows it."""
        conv: Foreign = self.conv
        if has_hooks(self) or not is_plain_module(conv, CONVOLUTIONS):
            return self(x)
        if (fold := folded(self, conv, self.bn)) is not None:
            return depthwise(x, fold.weight, fold.bias, stride=conv.stride[0])
        x = depthwise(x, taps_of(conv), conv.bias, stride=conv.stride[0])
        return self.bn(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class ConvAttention(nn.Module):
    """Self-attention of convolved queries, keys and values, scaled by D^-1/2 for all D channels.

    Prefix tokens bypass the convolutions.

    Args:
        dim: D, channels.
        num_heads: H.
        stride: of the convolutions of keys and values.
        qkv_bias: biases on the projections of queries, keys and values.
        attn_drop: dropout on the attention probabilities; while it is active, PyTorch computes the attention.
        proj_drop: dropout after the output projection.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        stride: int = 2,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_heads, self.stride, self.scale = num_heads, stride, dim**-0.5
        for name in "qkv":
            self.add_module(f"conv_proj_{name}", ConvProjection(dim, 1 if name == "q" else stride))
        for name in "qkv":
            self.add_module(f"proj_{name}", nn.Linear(dim, dim, bias=qkv_bias))
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Tokens [B, T + H · W, D] of a grid (H, W), of which T are prefix tokens → [B, T + H · W, D]."""
        q, k, v = self.heads(x, grid, nn.Module.__call__, lambda x, layer: layer(x))
        return self.proj_drop(self.proj(attend(q, k, v, self.scale, self.attn_drop)))

    def heads(
        self, x: Tensor, grid: Grid, convolve: Callable[[Any, Tensor], Tensor], apply: Callable[[Tensor, Any], Tensor]
    ) -> list[Tensor]:
        """Queries, keys and values [B, heads, N or M, d] of tokens; the functions run the modules."""
        found, T = [], x.shape[1] - grid[0] * grid[1]
        image = x[:, T:].unflatten(1, grid)
        for name in "qkv":
            tokens = convolve(self.get_submodule(f"conv_proj_{name}"), image).flatten(1, 2)
            tokens = torch.cat((x[:, :T], tokens), 1) if T else tokens
            tokens = apply(tokens, self.get_submodule(f"proj_{name}"))
            found.append(tokens.unflatten(-1, (self.num_heads, -1)).transpose(1, 2))
        return found

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, stride={self.stride}"


class ConvAttentionParts(NamedTuple):
    """A `ConvAttention` as a `engine.body.Body`, for one call.

    Attributes:
        attention: the module.
        grid: (H, W) of the tokens.
    """

    attention: ConvAttention
    grid: Grid

    @property
    def drops(self) -> tuple[nn.Module]:
        """Dropout after the output projection."""
        return (self.attention.proj_drop,)

    def entering(self) -> tuple[nn.Linear, ...]:
        """None: the convolutions read x."""
        return ()

    def sizes(self) -> Sizes:
        """See `engine.body.Body`."""
        C, keys = self.attention.proj.in_features, max(self.attention.stride, 1) ** 2
        return Sizes("reduced_attention", 0, 0, C, C + 2 * C // keys, C, self.attention.num_heads, keys=keys)

    def __call__(
        self,
        x: Tensor,
        *,
        norm: Before | None = None,
        stats: Given | None = None,
        way: str = "plain",
        **end: Any,
    ) -> Output:
        """Tokens [B, T + H · W, D] → [B, T + H · W, D], see `engine.body.Body`."""
        if way == "plain":
            return self.attention(x, self.grid)
        layers = self.attention

        def apply(x: Tensor, layer: Any) -> Tensor:
            return project(x, (layer,), None, None, way)

        q, k, v = layers.heads(x, self.grid, ConvProjection.fused, apply)
        o = attend(q, k, v, layers.scale, layers.attn_drop, fused=True)
        return finish(o, layers.proj, None, layers.proj_drop, way=way, **end)


class ConvBlock(Block):
    """A pre-norm block whose attention is a `ConvAttention`, called with the size of the map."""

    attn: ConvAttention

    def forward(self, x: Tensor, grid: Grid) -> Tensor:  # type: ignore[override]  # the size of the map comes with x
        """Tokens [B, T + H · W, D] of a grid (H, W) → [B, T + H · W, D]."""
        return call_block(ConvBlock._run, self, x, grid)

    def _run(self, x: Tensor, grid: Grid) -> Tensor:
        hooked = has_hooks(self.attn)
        attn: Any = self.attn if hooked else ConvAttentionParts(self.attn, grid)
        branches = (
            Branch(attn, self.norm1, drop_path=self.drop_path1, call=dict(grid=grid) if hooked else None),
            Branch(self.mlp, self.norm2, drop_path=self.drop_path2),
        )
        return add_branches(x, *branches, block=self) if can_fuse(x) else plainly(add_branches, x, *branches)


class ConvStage(nn.Module):
    """A convolution and blocks, with a class token in the last stage."""

    def __init__(self, patch_embed: ConvEmbed, blocks: Blocks, class_token: bool) -> None:
        super().__init__()
        self.patch_embed, self.blocks = patch_embed, blocks
        width = patch_embed.norm.normalized_shape[0]
        self.cls_token = nn.Parameter(torch.empty(1, 1, width)) if class_token else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.cls_token is not None:
            nn.init.trunc_normal_(self.cls_token, std=0.02)

    def forward(self, x: Tensor, recompute: bool = False) -> Tensor:
        """[B, C, H, W] → [B, H', W', D], or [B, 1, 1 + H' · W', D] with a class token."""
        x = self.patch_embed(x)
        grid, x, token = (x.shape[1], x.shape[2]), x.flatten(1, 2), self.cls_token
        x = x if token is None else torch.cat((token.expand(x.shape[0], -1, -1), x), 1)
        for block in self.blocks:
            x = recomputed(block, x, grid) if recompute else block(x, grid)
        return x.unflatten(1, grid) if token is None else x.unsqueeze(1)
