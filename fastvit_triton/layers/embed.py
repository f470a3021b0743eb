"""Image to tokens: patch embeddings, position embeddings, patch dropout. Parameter names are timm's."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..engine.hooks import has_global_hooks, is_plain_module
from ..engine.leaves import CONVOLUTIONS
from ..kernels.patch_embed import assemble, patch_embed, whole_patches
from .fusable import Fusable


def sides(size: int | tuple[int, int]) -> tuple[int, int]:
    """(height, width) of an image or a patch, given as one side or both."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


class PatchEmbed(Fusable):
    """Cuts the image into patches and projects each to D channels (ViT, arXiv:2010.11929, eq. 1).

    Sizes are (height, width) in pixels; without `strict_img_size` images may have any multiple of the patch size.
    """

    proj: nn.Conv2d | nn.Linear

    def __init__(
        self,
        img_size: tuple[int, int],
        patch_size: tuple[int, int],
        in_chans: int = 3,
        embed_dim: int = 768,
        bias: bool = True,
        strict_img_size: bool = True,
    ) -> None:
        super().__init__()
        self.img_size = (*img_size,)
        self.patch_size = (*patch_size,)
        self.in_chans = in_chans
        self.strict_img_size = strict_img_size
        self.grid_size = (img_size[0] // patch_size[0], img_size[1] // patch_size[1])
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self.build(embed_dim, bias)

    def build(self, embed_dim: int, bias: bool) -> None:
        """Creates the projection."""
        self.proj = nn.Conv2d(self.in_chans, embed_dim, self.patch_size, self.patch_size, bias=bias)

    def grid_of(self, image: Tensor) -> tuple[int, int]:
        """(rows, columns) of patches of image [B, C, H, W]; ValueError for wrong channels or a wrong size."""
        if image.dim() != 4 or image.shape[1] != self.in_chans:
            raise ValueError(f"image must have axes [B, {self.in_chans}, H, W], got shape {list(image.shape)}")
        size = tuple(image.shape[2:])
        if self.strict_img_size and size != self.img_size:
            expected = "x".join(map(str, self.img_size))
            raise ValueError(
                f"image is {size[0]}x{size[1]} pixels, the model takes {expected}; "
                "resize it, or build the model with img_size= or dynamic_img_size=True"
            )
        if size[0] % self.patch_size[0] or size[1] % self.patch_size[1]:
            raise ValueError(f"image is {size[0]}x{size[1]} pixels, not a multiple of the patch {self.patch_size}")
        return size[0] // self.patch_size[0], size[1] // self.patch_size[1]

    def forward(self, image: Tensor, pos: Tensor | None = None, prefix: Tensor | None = None) -> Tensor:
        """image [B, C, H, W], pos [1, N, D] or [1, T + N, D], prefix [1, T, D] → tokens [B, T + N, D]."""
        self.grid_of(image)
        if is_plain_module(self.proj, CONVOLUTIONS) and not has_global_hooks():
            return patch_embed(image, self.proj.weight, self.proj.bias, pos, prefix)
        return assemble(self.proj(image).flatten(2).transpose(1, 2), pos, prefix)


class LinearPatchEmbed(PatchEmbed):
    """Patch embedding by a linear layer on patches flattened as (row, column, channel), as in the ViT paper."""

    proj: nn.Linear
    norm_in: nn.Module
    norm_out: nn.Module

    def build(self, embed_dim: int, bias: bool) -> None:
        self.norm_in = nn.Identity()
        self.norm_out = nn.Identity()
        self.proj = nn.Linear(self.in_chans * self.patch_size[0] * self.patch_size[1], embed_dim, bias=bias)

    def forward(self, image: Tensor, pos: Tensor | None = None, prefix: Tensor | None = None) -> Tensor:
        """image [B, C, H, W], pos [1, N, D] or [1, T + N, D], prefix [1, T, D] → tokens [B, T + N, D]."""
        (h, w), (ph, pw) = self.grid_of(image), self.patch_size
        patches = image.unflatten(3, (w, pw)).unflatten(2, (h, ph))  # [B, C, h, P, w, P]
        patches = patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)  # [B, N, P·P·C]
        return assemble(self.norm_out(self.proj(self.norm_in(patches))), pos, prefix)


class NormPatchEmbed(LinearPatchEmbed):
    """LayerNorm, linear, LayerNorm on flattened patches (vit-pytorch's stem; epsilon 1e-5 as there)."""

    def build(self, embed_dim: int, bias: bool) -> None:
        super().build(embed_dim, bias)
        self.norm_in = nn.LayerNorm(self.proj.in_features)
        self.norm_out = nn.LayerNorm(embed_dim)


class NormedPatchEmbed(PatchEmbed):
    """Patch embedding with a LayerNorm of the tokens, of images or feature maps of any size (Swin, PVT, Twins).

    Rows and columns that fill no patch are left out, as by a convolution with a stride. The arguments are those of
    `PatchEmbed`.
    """

    def build(self, embed_dim: int, bias: bool) -> None:
        super().build(embed_dim, bias)
        self.norm = nn.LayerNorm(embed_dim)

    def grid_of(self, image: Tensor) -> tuple[int, int]:
        """(rows, columns) of whole patches of image [B, C, H, W]."""
        return super().grid_of(whole_patches(image, self.patch_size))

    def forward(self, image: Tensor, pos: Tensor | None = None, prefix: Tensor | None = None) -> Tensor:
        """image [B, C, H, W], pos [1, N, D] or [1, T + N, D], prefix [1, T, D] → tokens [B, T + N, D]."""
        x = self.norm(super().forward(whole_patches(image, self.patch_size)))
        return x if pos is None and prefix is None else assemble(x, pos, prefix)


class Learned2d(nn.Module):
    """Learned position embeddings: a row table and a column table of D/2 channels each (ViT paper, appendix D.4)."""

    def __init__(self, grid_size: tuple[int, int], dim: int) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.empty(grid_size[0], dim // 2))
        self.column = nn.Parameter(torch.empty(grid_size[1], dim // 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.row, std=0.02)
        nn.init.trunc_normal_(self.column, std=0.02)

    def forward(self) -> Tensor:
        """[1, rows · columns, D]; the first D/2 channels are the column's."""
        rows = len(self.row)
        columns = len(self.column)
        column = self.column[None].expand(rows, -1, -1)
        row = self.row[:, None].expand(-1, columns, -1)
        return torch.cat((column, row), -1).flatten(0, 1)[None]


def sincos1d(length: int, dim: int) -> Tensor:
    """[1, length, D]: sin(n / 10000^(2i/D)) in channel 2i, the cosine in 2i + 1 (arXiv:1706.03762, section 3.5)."""
    omega = 10000.0 ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * omega
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1)[None].float()


def sincos2d(grid_size: tuple[int, int], dim: int) -> Tensor:
    """[1, h·w, D]: [sin xω, cos xω, sin yω, cos yω] with ω = 10000^(−k/(D/4 − 1)) (SimpleViT, arXiv:2205.01580)."""
    quarter = dim // 4
    omega = 10000.0 ** -(torch.arange(quarter, dtype=torch.float64) / max(quarter - 1, 1))
    y, x = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in grid_size), indexing="ij")
    x = x.flatten()[:, None] * omega
    y = y.flatten()[:, None] * omega
    return torch.cat((x.sin(), x.cos(), y.sin(), y.cos()), 1)[None].float()


# Interpolation in each family's code; DINOv2 passes a scale factor, (new + 0.1) / old, instead of the new size.
INTERPOLATION: dict[str, dict[str, Any]] = {
    "bilinear": dict(mode="bilinear", align_corners=False),
    "bilinear_align_corners": dict(mode="bilinear", align_corners=True),
    "bicubic": dict(mode="bicubic", align_corners=False),
    "bicubic_align_corners": dict(mode="bicubic", align_corners=True),
    "bicubic_antialias": dict(mode="bicubic", align_corners=False, antialias=True),
    "dinov2": dict(mode="bicubic", align_corners=False),
}


def resize_pos_embed(
    pos: Tensor, old: tuple[int, int], new: tuple[int, int], prefix_tokens: int = 0, mode: str = "bicubic_antialias"
) -> Tensor:
    """Interpolates a position table [1, T + h·w, D] from a grid (h, w) to another; the T prefix rows are copied.

    The mode is a name in `INTERPOLATION`: the ViT paper's code is "bilinear_align_corners", timm and DeiT are
    "bicubic_antialias" (DINOv2 with registers too), torchvision is "bicubic_align_corners", transformers is "bicubic",
    DINOv2 without registers is "dinov2".
    """
    # a symbolic size, of torch.export, is resampled also where it equals the table's, which changes nothing
    if (mode == "dinov2" or all(isinstance(side, int) for side in new)) and old == new:
        return pos
    prefix = pos[:, :prefix_tokens]
    grid = pos[:, prefix_tokens:]
    grid = grid.unflatten(1, old).permute(0, 3, 1, 2)  # [1, D, h, w]
    scale = [(n + 0.1) / o for n, o in zip(new, old, strict=True)] if mode == "dinov2" else None
    size = new if scale is None else None
    grid = F.interpolate(grid.float(), size, scale, **INTERPOLATION[mode]).to(pos.dtype)
    return torch.cat((prefix, grid.flatten(2).transpose(1, 2)), 1)


class PatchDropout(nn.Module):
    """Drops a random fraction p of the patch tokens during training (arXiv:2212.00794), and no prefix tokens."""

    def __init__(self, p: float, prefix_tokens: int) -> None:
        super().__init__()
        self.p = p
        self.prefix_tokens = prefix_tokens

    def forward(self, x: Tensor) -> Tensor:
        """[B, T + N, D] → [B, T + kept, D]."""
        if not self.training or self.p == 0.0:
            return x
        prefix = x[:, : self.prefix_tokens]
        patches = x[:, self.prefix_tokens :]
        B, N, D = patches.shape
        kept = torch.randn(B, N, device=x.device).argsort(1)[:, : max(1, int(N * (1 - self.p)))]
        return torch.cat((prefix, patches.gather(1, kept[..., None].expand(-1, -1, D))), 1)
