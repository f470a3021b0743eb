"""Stems of convolutions before the patch projection. Parameter names are the authors'."""

import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.patch_embed import assemble
from .embed import PatchEmbed


class ConvStem(PatchEmbed):
    """Convolutions with BatchNorm and ReLU, 7 x 7 with stride 2 and then 3 x 3, and patches of their feature map.

    Sources: LV-ViT, arXiv:2104.10858, section 3.1; DeepViT and Refiner have it with other widths. The arguments are
    those of `PatchEmbed`, with an even patch size, and the channels of each convolution.
    """

    proj: nn.Conv2d

    def __init__(
        self,
        img_size: tuple[int, int],
        patch_size: tuple[int, int],
        in_chans: int,
        embed_dim: int,
        strict_img_size: bool,
        widths: tuple[int, ...],
    ) -> None:
        self.widths = widths
        super().__init__(img_size, patch_size, in_chans, embed_dim, strict_img_size=strict_img_size)

    def build(self, embed_dim: int, bias: bool) -> None:
        inputs = self.in_chans
        for i, width in enumerate(self.widths, 1):
            kernel, stride = (7, 2) if i == 1 else (3, 1)
            setattr(self, f"conv{i}", nn.Conv2d(inputs, width, kernel, stride, kernel // 2, bias=False))
            setattr(self, f"bn{i}", nn.BatchNorm2d(width))
            inputs = width
        patch = self.patch_size[0] // 2, self.patch_size[1] // 2
        self.proj = nn.Conv2d(inputs, embed_dim, patch, patch, bias=bias)

    def forward(self, image: Tensor, pos: Tensor | None = None, prefix: Tensor | None = None) -> Tensor:
        """image [B, C, H, W], pos [1, N, D] or [1, T + N, D], prefix [1, T, D] → tokens [B, T + N, D]."""
        self.grid_of(image)
        return assemble(self.proj(self.convolve(image)).flatten(2).transpose(1, 2), pos, prefix)

    def convolve(self, image: Tensor) -> Tensor:
        """image [B, C, H, W] → the map before the patches, [B, C', H / 2, W / 2]."""
        x = image
        for i in range(1, len(self.widths) + 1):
            x = F.relu(getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(x)))
        return x
