"""Layers of CrossViT: two branches of tokens that exchange their class tokens. Parameter names are timm's."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..engine.attention import attend
from ..engine.body import finish, fold_or_normalize, normalize, project
from ..engine.hooks import can_fuse, has_hooks
from ..engine.leaves import has_sample_scale, is_inactive, is_readable, sample_scale_of
from .block import Blocks
from .drop_path import DropPath
from .embed import PatchEmbed

STRIDES = {12: ((4, 7, 3), (3, 3, 0), (1, 3, 1)), 16: ((4, 7, 3), (2, 3, 1), (2, 3, 1))}  # stride, kernel, padding


class BranchEmbed(PatchEmbed):
    """Patch embedding by one convolution or, with `multi_conv`, by three (CrossViT, arXiv:2103.14899, section 4.1)."""

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


class CrossAttention(nn.Module):
    """The first token attends to all tokens (CrossViT, arXiv:2103.14899, eq. 3-4).

    Args:
        dim: D, channels.
        num_heads: H.
        qkv_bias: biases on the projections of queries, keys and values.
        attn_drop: dropout on the attention probabilities; while it is active, PyTorch computes the attention.
        proj_drop: dropout after the output projection.
    """

    def __init__(
        self, dim: int, num_heads: int, qkv_bias: bool = True, attn_drop: float = 0.0, proj_drop: float = 0.0
    ) -> None:
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.wq, self.wk, self.wv = (nn.Linear(dim, dim, bias=qkv_bias) for _ in range(3))
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, D] → [B, 1, D]."""
        return self.proj_drop(self.proj(self.attend(self.wq(x[:, :1]), self.wk(x), self.wv(x))))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of q [B, 1, D] to k and v [B, N, D], [B, 1, D]."""
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
        return attend(q, k, v, self.scale, self.attn_drop, can_fuse(q))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"


class CrossBlock(nn.Module):
    """The first token plus its attention to all tokens; there is no MLP (arXiv:2103.14899, eq. 5).

    All three projections are one matmul of all tokens, into which the norm is folded.

    Args:
        dim: D.
        attn: its attention.
        eps: LayerNorm epsilon.
        drop_path: probability of skipping the attention.
    """

    def __init__(self, dim: int, attn: CrossAttention, eps: float = 1e-6, drop_path: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.attn, self.drop_path = nn.LayerNorm(dim, eps=eps), attn, DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, D] → [B, 1, D]."""
        attn: Any = self.attn
        first = x[:, :1]
        if not can_fuse(x) or has_hooks(attn) or not all(map(is_readable, (attn.wq, attn.wk, attn.wv))):
            return first + self.drop_path(attn(normalize(x, self.norm1)))
        layers = attn.wq, attn.wk, attn.wv
        x, norm = fold_or_normalize(x, self.norm1, layers)
        q, k, v = project(x, layers, norm).chunk(3, -1)
        o = attn.attend(q[:, :1], k, v)
        if is_inactive(attn.proj_drop) and has_sample_scale(self.drop_path):
            return finish(o, attn.proj, sample_scale=sample_scale_of(self.drop_path, first), residual=first)
        return first + self.drop_path(finish(o, attn.proj, drop=attn.proj_drop))


class MultiScaleBlock(nn.Module):
    """Blocks of each branch, then the class token of each attends to the patches of the other (figure 4).

    Args:
        dims: D of each branch.
        blocks: of each branch.
        fusion: for each branch the module that attends to the patches of the next one, in whose width.
        eps: LayerNorm epsilon.
    """

    def __init__(self, dims: tuple[int, ...], blocks: list[Blocks], fusion: list[nn.Module], eps: float = 1e-6) -> None:
        super().__init__()
        others = dims[1:] + dims[:1]
        self.blocks = nn.ModuleList(blocks)
        self.projs = nn.ModuleList(projection(a, b, eps) for a, b in zip(dims, others, strict=True))
        self.fusion = nn.ModuleList(fusion)
        self.revert_projs = nn.ModuleList(projection(b, a, eps) for a, b in zip(dims, others, strict=True))

    def forward(self, xs: list[Tensor], recompute: bool = False) -> list[Tensor]:
        """Tokens [B, 1 + N, D] of each branch → the same."""
        xs = [blocks(x, recompute=recompute) for blocks, x in zip(self.blocks, xs, strict=True)]
        found = []
        for i, (proj, fusion, revert) in enumerate(zip(self.projs, self.fusion, self.revert_projs, strict=True)):
            other = xs[(i + 1) % len(xs)]
            token = fusion(torch.cat((proj(xs[i][:, :1]), other[:, 1:]), 1))
            found.append(torch.cat((revert(token), xs[i][:, 1:]), 1))
        return found


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
        top, left = round((height - size[0]) / 2), round((width - size[1]) / 2)
        return image[:, :, top : top + size[0], left : left + size[1]]
    return F.interpolate(image, size, mode="bicubic", align_corners=False)
