"""Four convolutions with trained BatchNorms, the backbone of detectors for small images."""

import torch.nn.functional as F
from torch import Tensor, nn

from .normed import ConvNorm

WIDTHS = (1, 2, 4, 4)  # channels, in units of the first convolution's
STRIDES = (2, 1, 2, 1)


class ConvBody(nn.Module):
    """Four 3 x 3 convolutions, each with BatchNorm and ReLU; the sides of the map are 1/4 of the image's, rounded up.

    Args:
        in_chans: C, image channels.
        dim: channels of the first convolution; the last has four times as many.

    Attributes:
        channels: of the map, as a tuple of one number.
        reductions: pixels of the image for each step of the map, likewise.
    """

    def __init__(self, in_chans: int, dim: int) -> None:
        super().__init__()
        self.channels = (dim * WIDTHS[-1],)
        self.reductions = (4,)
        outputs = [dim * width for width in WIDTHS]
        sizes = zip([in_chans, *outputs[:-1]], outputs, STRIDES, strict=True)
        self.layers = nn.ModuleList(ConvNorm(before, after, 3, stride, 1) for before, after, stride in sizes)

    def forward(self, image: Tensor) -> list[Tensor]:
        """[B, C, H, W] → the map [B, D, h, w], in a list."""
        x = image
        for layer in self.layers:
            x = F.relu(layer(x))
        return [x]
