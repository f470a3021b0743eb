"""Blocks whose branches are multiplied by a constant, or by factors that are parameters of the block."""

import torch
from torch import Tensor, nn

from .block import Block
from .drop_path import add


class ScaledBlock(Block):
    """x + c γ f(LN x) for f = attention, then MLP; γ is LayerScale with CaiT's names gamma_1 and gamma_2.

    Sources: γ: CaiT, arXiv:2103.17239, equation 6; c = 1/λ: LV-ViT, arXiv:2104.10858, section 3.1. In DeepViT and
    Refiner a branch is f(LN(a x)) / a with a = 1/2: that is c = 1/a, and ε/a² in the LayerNorm. The arguments are those
    of `Block`, where `init_values` is the initial γ, and c, `factor`.
    """

    gamma_1: nn.Parameter | None
    gamma_2: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        attn: nn.Module,
        mlp: nn.Module,
        eps: float = 1e-6,
        init_values: float | None = None,
        drop_path: float = 0.0,
        factor: float = 1.0,
    ) -> None:
        super().__init__(dim, attn, mlp, eps, drop_path=drop_path)
        self.factor = factor
        self.init_values = init_values
        for name in ("gamma_1", "gamma_2"):
            self.register_parameter(name, None if init_values is None else nn.Parameter(torch.empty(dim)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for gamma in (self.gamma_1, self.gamma_2):
            if gamma is not None and self.init_values is not None:
                nn.init.constant_(gamma, self.init_values)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, D] → [B, N, D]."""
        first, second = self.factors(x)
        x = add(x, self.drop_path1, lambda x: times(first, self.attn(self.norm1(x))))
        return add(x, self.drop_path2, lambda x: times(second, self.mlp(self.norm2(x))))

    def factors(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """What both branches of x [B, N, D] are multiplied by, [D]; None for 1."""
        first = self.scale(x, self.gamma_1)
        return first, first if self.gamma_2 is None else self.scale(x, self.gamma_2)

    def scale(self, x: Tensor, gamma: Tensor | None) -> Tensor | None:
        """c γ, or c for every channel, [D]; None for 1."""
        if gamma is None:
            return None if self.factor == 1.0 else x.new_full(x.shape[-1:], self.factor)
        return gamma if self.factor == 1.0 else self.factor * gamma


def times(factors: Tensor | None, y: Tensor) -> Tensor:
    """y [B, N, D] times the factors [D], if there are any."""
    return y if factors is None else y * factors
