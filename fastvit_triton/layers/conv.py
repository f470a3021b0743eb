"""Convolutions of feature maps [B, H, W, D]. Parameter names are timm's."""

from typing import Any

from torch import Tensor, nn

from .fusable import Fusable


class Peg(Fusable):
    """Positional encoding generator: x + a 3 x 3 depthwise convolution of x (CPVT, arXiv:2102.10882, section 4.1).

    Zeros beyond the borders are what tells the position; with another `padding_mode` of nn.Conv2d there is none.
    """

    def __init__(self, dim: int, padding_mode: str = "zeros") -> None:
        super().__init__()
        mode: Any = padding_mode
        self.proj = nn.Sequential(nn.Conv2d(dim, dim, 3, padding=1, groups=dim, padding_mode=mode))

    def forward(self, x: Tensor) -> Tensor:
        """[B, H, W, D] → [B, H, W, D]."""
        return x + self.proj(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
