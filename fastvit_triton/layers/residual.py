"""ResNet's stem and blocks, and a ResNet of them as the backbone of detectors. Parameter names are timm's.

Source: He et al., arXiv:1512.03385; names of `timm.models.byobnet`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .drop_path import DropPath
from .fusable import Fusable


class ConvNormAct(Fusable):
    """A convolution without bias that keeps the size, or divides it by the stride; a BatchNorm; by default ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, relu: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(outputs)
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] → [B, C', ⌈H / stride⌉, ⌈W / stride⌉]."""
        x = self.bn(self.conv(x))
        return F.relu(x) if self.relu else x


class ResidualStem(nn.Module):
    """A 7 x 7 convolution and a maximum of 3 x 3, each with stride 2."""

    def __init__(self, in_chans: int, dim: int) -> None:
        super().__init__()
        self.conv1 = ConvNormAct(in_chans, dim, 7, 2)
        self.pool = nn.MaxPool2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] → [B, D, ⌈H / 4⌉, ⌈W / 4⌉]."""
        return self.pool(self.conv1(x))


class Residual(nn.Module):
    """ReLU(shortcut(x) + body(x)), where the shortcut is x or, for another size, a 1 x 1 convolution."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, drop_path: float = 0.0) -> None:
        super().__init__()
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else ConvNormAct(inputs, outputs, 1, stride, relu=False)
        self.drop_path = DropPath(drop_path)

    def body(self, x: Tensor) -> Tensor:
        """[B, C, H, W] → [B, C', H', W'], which is added to the shortcut."""
        raise NotImplementedError

    def last(self) -> nn.BatchNorm2d:
        """The last BatchNorm of the body, whose weight is 0 at first."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] → [B, C', H', W']."""
        return F.relu(self.drop_path(self.body(x)) + self.shortcut(x))


class BasicBlock(Residual):
    """Two 3 x 3 convolutions."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, drop_path: float = 0.0) -> None:
        super().__init__(inputs, outputs, stride, drop_path)
        self.conv1_kxk = ConvNormAct(inputs, outputs, 3, stride)
        self.conv2_kxk = ConvNormAct(outputs, outputs, 3, relu=False)

    def body(self, x: Tensor) -> Tensor:
        return self.conv2_kxk(self.conv1_kxk(x))

    def last(self) -> nn.BatchNorm2d:
        return self.conv2_kxk.bn


class Bottleneck(Residual):
    """1 x 1, 3 x 3 and 1 x 1 convolutions, the middle one with a quarter of the channels."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, drop_path: float = 0.0) -> None:
        super().__init__(inputs, outputs, stride, drop_path)
        middle = outputs // 4
        self.conv1_1x1 = ConvNormAct(inputs, middle)
        self.conv2_kxk = ConvNormAct(middle, middle, 3, stride)
        self.conv3_1x1 = ConvNormAct(middle, outputs, relu=False)

    def body(self, x: Tensor) -> Tensor:
        return self.conv3_1x1(self.conv2_kxk(self.conv1_1x1(x)))

    def last(self) -> nn.BatchNorm2d:
        return self.conv3_1x1.bn


def init_residual(model: nn.Module) -> None:
    """Initial weights of a residual network, as in timm: Kaiming for convolutions; each block is its shortcut."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for block in model.modules():
        if isinstance(block, Residual):
            nn.init.zeros_(block.last().weight)


class ResidualBody(nn.Module):
    """Stem and four stages with trained BatchNorms, for random weights; else as `frozen_resnet.FrozenResNet`."""

    def __init__(self, in_chans: int, depths: tuple[int, ...], dim: int = 64, bottleneck: bool = True) -> None:
        super().__init__()
        block, expansion = (Bottleneck, 4) if bottleneck else (BasicBlock, 1)
        self.channels = tuple(dim * expansion * 2**i for i in range(len(depths)))
        self.reductions = tuple(4 << i for i in range(len(depths)))
        self.stem = ResidualStem(in_chans, dim)
        inputs = dim
        for i, (depth, outputs) in enumerate(zip(depths, self.channels, strict=True)):
            blocks = [block(outputs if j else inputs, outputs, 2 if i and not j else 1) for j in range(depth)]
            self.add_module(f"layer{i + 1}", nn.Sequential(*blocks))
            inputs = outputs
        init_residual(self)

    def forward(self, image: Tensor) -> list[Tensor]:
        """[B, C, H, W] → the map [B, D, h, w] of each stage."""
        x = self.stem(image.contiguous(memory_format=torch.channels_last))  # in which oneDNN is a third faster
        maps = []
        for i in range(len(self.channels)):
            x = self.get_submodule(f"layer{i + 1}")(x)
            maps.append(x)
        return maps
