"""Linear layers and convolutions with a BatchNorm. Parameter names are timm's."""

from torch import Tensor, nn

from .fusable import Fusable


class LinearNorm(nn.Module):
    """A linear layer without bias, and a BatchNorm over all tokens (LeViT, arXiv:2104.01136, section 4.2).

    `scale` is the initial weight of the norm, 0 for the last layer of a residual branch.
    """

    def __init__(self, inputs: int, outputs: int, scale: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self.bn = nn.BatchNorm1d(outputs)
        nn.init.constant_(self.bn.weight, scale)

    def forward(self, x: Tensor) -> Tensor:
        """[B, ..., K] → [B, ..., F]."""
        x = self.linear(x)
        return self.bn(x.flatten(0, -2)).view_as(x)


class ConvNorm(Fusable):
    """A convolution without bias, and a BatchNorm."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, padding: int = 0) -> None:
        super().__init__()
        self.linear = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] → [B, C', H', W']."""
        return self.bn(self.linear(x))


class NormLinear(nn.Module):
    """A BatchNorm, dropout and a linear layer: the head of LeViT."""

    def __init__(self, inputs: int, outputs: int, drop: float = 0.0) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(inputs)
        self.drop = nn.Dropout(drop)
        self.linear = nn.Linear(inputs, outputs)
        nn.init.trunc_normal_(self.linear.weight, std=0.02)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, K] → [B, F]; [B, N, K] → [B, N, F]."""
        return self.linear(self.drop(self.bn(x.flatten(0, -2)).view_as(x)))
