"""ResNet with frozen BatchNorms, the backbone of detectors. Parameter names are torchvision's.

Source: He et al., arXiv:1512.03385, with the stride in the 3 x 3 convolution as in torchvision 0.28.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .fusable import Fusable


class FrozenBatchNorm2d(Fusable):
    """BatchNorm by stored statistics and affine parameters, all of them buffers, also in training."""

    eps = 1e-5

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(channels))
        self.register_buffer("bias", torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] → [B, C, H, W]."""
        weight, bias, mean, var = (t[:, None, None] for t in self.buffers())
        scale = weight * (var + self.eps).rsqrt()
        return x * scale + (bias - mean * scale)

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        state_dict.pop(f"{prefix}num_batches_tracked", None)  # files of trainable norms have it
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class _Block(Fusable):
    """ReLU(shortcut + body), where the shortcut is x or, for another size, a 1 x 1 convolution."""

    expansion = 1

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.downsample = None
        if stride > 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(convolution, FrozenBatchNorm2d(outputs))

    def body(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] → [B, C', H', W']."""
        shortcut = x if self.downsample is None else self.downsample(x)
        return F.relu(self.body(x) + shortcut)


class FrozenBasicBlock(_Block):
    """Two 3 x 3 convolutions, which are not dilated: `dilation` has to be 1."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__(inputs, outputs, stride)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, dilation, dilation, bias=False)
        self.bn1 = FrozenBatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = FrozenBatchNorm2d(outputs)

    def body(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))


class FrozenBottleneck(_Block):
    """1 x 1, 3 x 3 and 1 x 1 convolutions, the middle one with a quarter of the channels."""

    expansion = 4

    def __init__(self, inputs: int, outputs: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__(inputs, outputs, stride)
        middle = outputs // 4
        self.conv1 = nn.Conv2d(inputs, middle, 1, bias=False)
        self.bn1 = FrozenBatchNorm2d(middle)
        self.conv2 = nn.Conv2d(middle, middle, 3, stride, dilation, dilation, bias=False)
        self.bn2 = FrozenBatchNorm2d(middle)
        self.conv3 = nn.Conv2d(middle, outputs, 1, bias=False)
        self.bn3 = FrozenBatchNorm2d(outputs)

    def body(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.bn3(self.conv3(x))


class FrozenResNet(nn.Module):
    """Stem and four stages; the sides of their maps are 1/4, 1/8, 1/16 and 1/32 of the image's, rounded up.

    Stem and first stage are not trained, as in DETR. Blocks are bottlenecks from ResNet-50 on. With `dilation` the last
    stage keeps the size of its map and dilates its windows instead (DETR-DC5). `channels` are those of the map of each
    stage, `reductions` the pixels of the image for each of its steps.
    """

    def __init__(
        self, in_chans: int, depths: tuple[int, ...], dim: int = 64, bottleneck: bool = True, dilation: bool = False
    ) -> None:
        super().__init__()
        block = FrozenBottleneck if bottleneck else FrozenBasicBlock
        self.channels = tuple(dim * block.expansion * 2**i for i in range(len(depths)))
        self.reductions = tuple(min(4 << i, 16) if dilation else 4 << i for i in range(len(depths)))
        self.conv1 = nn.Conv2d(in_chans, dim, 7, 2, 3, bias=False)
        self.bn1 = FrozenBatchNorm2d(dim)
        inputs = dim
        for i, (depth, outputs) in enumerate(zip(depths, self.channels, strict=True)):
            dilated = dilation and i == len(depths) - 1
            stride = 1 if i == 0 or dilated else 2
            blocks = [block(inputs, outputs, stride)]
            blocks += [block(outputs, outputs, 1, 2 if dilated else 1) for _ in range(depth - 1)]
            self.add_module(f"layer{i + 1}", nn.Sequential(*blocks))
            inputs = outputs
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith(("conv1.", "layer1.")))

    def forward(self, image: Tensor) -> list[Tensor]:
        """[B, C, H, W] → the map [B, D, h, w] of each stage."""
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(image))), 3, 2, 1)
        maps = []
        for i in range(len(self.channels)):
            x = self.get_submodule(f"layer{i + 1}")(x)
            maps.append(x)
        return maps
