"""BiT's ResNet, the stem of hybrid ViTs (Kolesnikov et al., arXiv:1912.11370).

Convolutions are weight-standardised, norms are GroupNorm(32). Parameter names are timm's.
"""

import torch.nn.functional as F
from torch import Tensor, nn


class StdConv2d(nn.Conv2d):
    """Convolution with weights standardised per output channel (arXiv:1903.10520), padded as TensorFlow does."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] → [B, C', ceil(H / stride), ceil(W / stride)]."""
        flat = self.weight.flatten(1)  # [C', C·k·k]
        flat = F.layer_norm(flat, flat.shape[1:], eps=1e-8)
        return F.conv2d(pad_same(x, self.kernel_size[0], self.stride[0]), flat.view_as(self.weight), stride=self.stride)


def pad_same(x: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """Pads [B, C, H, W] so that the output is ceil(side / stride); the odd pixel goes below and right."""
    h, w = (max((-(-n // stride) - 1) * stride + kernel - n, 0) for n in x.shape[2:])
    return F.pad(x, (w // 2, w - w // 2, h // 2, h - h // 2), value=value)


class GroupNorm(nn.GroupNorm):
    """GroupNorm(32), by default followed by ReLU."""

    def __init__(self, channels: int, relu: bool = True) -> None:
        super().__init__(32, channels, eps=1e-5)
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] → [B, C, H, W]."""
        x = super().forward(x)
        return F.relu(x) if self.relu else x


class Root(nn.Module):
    """7x7 convolution and 3x3 max pooling, stride 2 each: [B, C, H, W] → [B, 64, H/4, W/4]."""

    def __init__(self, in_chans: int) -> None:
        super().__init__()
        self.conv = StdConv2d(in_chans, 64, 7, 2)
        self.norm = GroupNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(pad_same(self.norm(self.conv(x)), 3, 2, value=float("-inf")), 3, 2)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions with a residual: [B, C, H, W] → [B, C', H/stride, W/stride]."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        middle = outputs // 4
        self.downsample = None
        if inputs != outputs or stride > 1:
            self.downsample = nn.Sequential()
            self.downsample.add_module("conv", StdConv2d(inputs, outputs, 1, stride))
            self.downsample.add_module("norm", GroupNorm(outputs, relu=False))
        self.conv1 = StdConv2d(inputs, middle, 1)
        self.norm1 = GroupNorm(middle)
        self.conv2 = StdConv2d(middle, middle, 3, stride)
        self.norm2 = GroupNorm(middle)
        self.conv3 = StdConv2d(middle, outputs, 1)
        self.norm3 = GroupNorm(outputs, relu=False)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.norm2(self.conv2(self.norm1(self.conv1(x))))
        return F.relu(self.norm3(self.conv3(x)) + shortcut)


class ResNet(nn.Module):
    """Root and stages of 256, 512, 1024, 2048 channels; each stage after the first halves height and width."""

    def __init__(self, in_chans: int, layers: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = Root(in_chans)
        self.stages = nn.Sequential()
        inputs = 64
        for i, depth in enumerate(layers):
            outputs = 256 * 2**i
            blocks = nn.Sequential(
                *(Bottleneck(outputs if j else inputs, outputs, 1 if j or not i else 2) for j in range(depth))
            )
            self.stages.add_module(str(i), nn.Sequential())
            self.stages[i].add_module("blocks", blocks)
            inputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        return self.stages(self.stem(x))
