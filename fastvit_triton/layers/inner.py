"""Layers of TNT: pixels attend within their patch, and are added to the patch's token. Parameter names are timm's."""

from typing import Any

import torch
from torch import Tensor, nn

from ..engine.attention import attend, attention_body, heads_of
from ..engine.body import Body, finish, normalize
from ..engine.branch import Branch, add_branches, runs_plain
from ..engine.hooks import can_fuse
from ..engine.parted import Parted
from ..engine.replay import call, call_branches
from ..engine.ways import known_way, state
from .drop_path import DropPath
from .embed import PatchEmbed
from .mlp import Mlp


class SplitAttention(Parted):
    """Multi-head self-attention whose queries and keys have one projection, and values another (TNT, arXiv:2103.00112).

    Args:
        dim: D, channels.
        num_heads: H.
        qkv_bias: biases on both projections.
        attn_drop: dropout on the attention probabilities; while it is active, PyTorch computes the attention.
        proj_drop: dropout after the output projection.
    """

    def __init__(
        self, dim: int, num_heads: int, qkv_bias: bool = False, attn_drop: float = 0.0, proj_drop: float = 0.0
    ) -> None:
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qk = nn.Linear(dim, 2 * dim, bias=qkv_bias)
        self.v = nn.Linear(dim, dim, bias=qkv_bias)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def parts(self) -> Body:
        """Its submodules as `Body`; as `Body` while probabilities are dropped."""
        layers, drops = (self.qk, self.v), (self.proj_drop,)
        if self.attn_drop.training and self.attn_drop.p > 0:
            return Body("attention", layers, self._attend, self.proj, self.num_heads, drops=drops)
        return attention_body(layers, self.proj, self.num_heads, self.scale, drops=drops)

    def plain(self, x: Tensor) -> Tensor:
        """x [B, N, D] → [B, N, D]."""
        (q, k), (v,) = heads_of(self.qk(x), self.num_heads, 2), heads_of(self.v(x), self.num_heads, 1)
        return self.proj_drop(self.proj(attend(q, k, v, self.scale, self.attn_drop)))

    def _attend(self, qkv: Tensor) -> Tensor:
        """Attention of projections [B, N, 3 · D] → [B, N, D]."""
        q, k, v = heads_of(qkv, self.num_heads)
        return attend(q, k, v, self.scale, self.attn_drop)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"


class PixelEmbed(PatchEmbed):
    """Projects 7 x 7 pixels at each `stride` within a patch (TNT, arXiv:2103.00112, section 3.1).

    Args:
        stride: pixels between the projections.
        legacy: convolve the whole image, whose patches then see each other; else each patch with zeros around it.
        sizes: those of the image and of a patch, (height, width) in pixels.
        in_chans: C.
        dim: c, channels of a pixel.
    """

    def __init__(
        self, stride: int, legacy: bool, sizes: tuple[tuple[int, int], tuple[int, int]], in_chans: int, dim: int
    ) -> None:
        self.stride, self.legacy = stride, legacy
        super().__init__(*sizes, in_chans, dim)
        self.pixels = (-(-self.patch_size[0] // stride), -(-self.patch_size[1] // stride))

    def build(self, embed_dim: int, bias: bool) -> None:
        self.proj = nn.Conv2d(self.in_chans, embed_dim, 7, self.stride, 3)

    def forward(self, image: Tensor, pos: Tensor, prefix: None = None) -> Tensor:  # type: ignore[override]
        """image [B, C, H, W], pos [1, c, h, w] → pixels [B · N, h · w, c]."""
        grid = self.grid_of(image)
        x = self.proj(image) if self.legacy else image
        h, w = self.pixels if self.legacy else self.patch_size
        x = x.unflatten(3, (grid[1], w)).unflatten(2, (grid[0], h)).permute(0, 2, 4, 1, 3, 5).flatten(0, 2)
        x = x if self.legacy else self.proj(x)
        return (x + pos).flatten(2).transpose(1, 2)


class InnerBlock(nn.Module):
    """Attention and MLP of the pixels of each patch, then of the patches, to which the pixels are added (eq. 3-6).

    Args:
        inner: c, channels of a pixel.
        dim: D, channels of a patch.
        pixels: n, number of pixels of a patch.
        num_heads: heads of the pixels' attention, and of the patches'.
        mlp_ratio: hidden channels of the patches' MLP divided by D.
        qkv_bias: biases on the projections of queries, keys and values.
        proj_drop: dropout after the attention projection and inside the MLP.
        drop_path: probability of skipping each branch.
        legacy: the pixels' norm is that of each pixel, not of all together.
        attn_drop: dropout on the attention probabilities.
    """

    def __init__(
        self,
        inner: int,
        dim: int,
        pixels: int,
        num_heads: tuple[int, int],
        mlp_ratio: float = 4.0,
        qkv_bias: bool = False,
        proj_drop: float = 0.0,
        drop_path: float = 0.0,
        legacy: bool = False,
        attn_drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm_in = nn.LayerNorm(inner)
        self.attn_in = SplitAttention(inner, num_heads[0], qkv_bias, attn_drop, proj_drop)
        self.norm_mlp_in = nn.LayerNorm(inner)
        self.mlp_in = Mlp(inner, 4 * inner, drop=proj_drop)
        self.norm1_proj = nn.LayerNorm(inner if legacy else inner * pixels)
        self.proj = nn.Linear(inner * pixels, dim, bias=legacy)
        self.norm2_proj = None if legacy else nn.LayerNorm(dim)
        self.norm_out = nn.LayerNorm(dim)
        self.attn_out = SplitAttention(dim, num_heads[1], qkv_bias, attn_drop, proj_drop)
        self.drop_path = DropPath(drop_path)
        self.norm_mlp = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), drop=proj_drop)

    def forward(self, pixels: Tensor, patches: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels [B · N, n, c] and tokens [B, 1 + N, D] → the same."""
        return add_inner_outer(self, pixels, patches)


def inner_outer(block: Any) -> tuple[tuple, tuple]:
    """(attention, its norm, MLP, its norm, stochastic depth) of the pixels and of the patches of a TNT block."""
    inner = block.attn_in, block.norm_in, block.mlp_in, block.norm_mlp_in, block.drop_path
    return inner, (block.attn_out, block.norm_out, block.mlp, block.norm_mlp, block.drop_path)


def inner_outer_plain(block: Any, pixels: Tensor, patches: Tensor) -> bool:
    """True if the branches of the pixels and those of the patches are both plain."""
    return all(
        runs_plain(x, *_branches(attn, *others), block=attn)
        for (attn, *others), x in zip(inner_outer(block), (pixels, patches), strict=True)
    )


def add_inner_outer(block: Any, pixels: Tensor, patches: Tensor) -> tuple[Tensor, Tensor]:
    """A TNT block with the attributes of `InnerBlock`, see `InnerBlock.forward`.

    Without gradients it is replayed as a whole; two outputs with gradients are not replayed, but each pair of branches.
    """
    known = [known_way(attn, x) for (attn, *_), x in zip(inner_outer(block), (pixels, patches), strict=True)]
    plain = any(way is None for way, _ in known) or all(way == "plain" for way, _ in known)
    if torch.is_grad_enabled() or state.inside_plain or plain:
        return _add_both(block, pixels, patches)
    return call(tuple(settings for _, settings in known), _add_both, block, pixels, patches)


def _add_both(block: Any, pixels: Tensor, patches: Tensor) -> tuple[Tensor, Tensor]:
    inner, outer = inner_outer(block)
    pixels = call_branches(_add, inner[0], pixels, *inner[1:])
    added = merged_pixels(pixels, patches.shape[1] - 1, block.norm1_proj, block.proj, block.norm2_proj)
    return pixels, call_branches(_add, outer[0], torch.cat((patches[:, :1], patches[:, 1:] + added), 1), *outer[1:])


def _add(attn: nn.Module, x: Tensor, *others: nn.Module) -> Tensor:
    return add_branches(x, *_branches(attn, *others), block=attn)


def _branches(attn: nn.Module, norm1: Any, mlp: Any, norm2: Any, drop_path: Any) -> tuple[Branch, Branch]:
    return Branch(attn, norm1, None, drop_path), Branch(mlp, norm2, None, drop_path)


def merged_pixels(x: Tensor, patches: int, before: nn.Module, proj: nn.Module, after: nn.Module | None) -> Tensor:
    """Pixels x [B · N, n, c] of N patches → [B, N, D]: a norm, of a pixel or of all together, a projection, a norm."""
    if not can_fuse(x):
        x = before(x) if after is None else x
        x = x.reshape(-1, patches, x.shape[1] * x.shape[2])
        return proj(x) if after is None else after(proj(before(x)))
    x = normalize(x, before) if after is None else x
    x = finish(x.reshape(-1, patches, x.shape[1] * x.shape[2]), proj, None if after is None else before)
    return x if after is None else normalize(x, after)
