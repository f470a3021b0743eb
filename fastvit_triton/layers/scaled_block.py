"""Blocks whose branches are multiplied by a constant, or by factors that are parameters of the block."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.branch import Branch, add_branches
from ..engine.hooks import can_fuse, has_hooks
from ..engine.replay import call_block
from ..engine.ways import plainly
from .block import Block, Blocks
from .drop_path import add
from .mixing import RefinedAttention, RefinedParts
from .mlp import Mlp
from .recompute import recomputed


class ScaledBlock(Block):
    """x + c γ f(LN x) for f = attention, then MLP; γ is LayerScale with CaiT's names gamma_1 and gamma_2.

    Sources: γ: CaiT, arXiv:2103.17239, equation 6; c = 1/λ: LV-ViT, arXiv:2104.10858, section 3.1. In DeepViT and
    Refiner a branch is f(LN(a x)) / a with a = 1/2: that is c = 1/a, and ε/a² in the LayerNorm.

    Args:
        dim: D, channels per token.
        attn: as for `Block`.
        mlp: as for `Block`.
        eps: LayerNorm epsilon.
        init_values: initial γ; None for none.
        drop_path: probability of skipping each branch.
        factor: c.
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
        self.factor, self.init_values = factor, init_values
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


class ScaledMlp(Mlp):
    """An MLP with LayerScale as its own parameter, which the block multiplies its output by (`RefinedBlock`).

    Args:
        dim: D, channels per token.
        hidden: output features of fc1.
        act: as for `Mlp`.
        drop: dropout after the activation and after fc2.
        init_values: initial factor.
    """

    def __init__(self, dim: int, hidden: int, act: str, drop: float, init_values: float = 1e-5) -> None:
        super().__init__(dim, hidden, act, drop=drop)
        self.init_values = init_values
        self.scale_channel = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale_channel, self.init_values)


class RefinedBlock(ScaledBlock):
    """A `ScaledBlock` whose attention takes the map of the block before, and passes one on (`RefinedAttention`).

    The arguments are those of `ScaledBlock`; the MLP is a `ScaledMlp`.
    """

    attn: RefinedAttention
    mlp: ScaledMlp

    def forward(self, x: Tensor, previous: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """[B, N, D] and the map [B, H, N, N] of the block before, or None → [B, N, D], map."""
        return call_block(RefinedBlock._run, self, x, previous)

    def _run(self, x: Tensor, previous: Tensor | None) -> tuple[Tensor, Tensor]:
        passed: list[Tensor] = []
        parts, call = RefinedParts(self.attn, previous, passed), None
        attn: Any = parts
        if has_hooks(self.attn):
            attn, call = self.attn, parts._asdict()
            del call["attention"]
        scale = self.scale(x, None)
        branches = (
            Branch(attn, self.norm1, drop_path=self.drop_path1, layer_scale=scale, call=call),
            Branch(self.mlp, self.norm2, drop_path=self.drop_path2, layer_scale=self.scale(x, self.mlp.scale_channel)),
        )
        x = add_branches(x, *branches, block=self) if can_fuse(x) else plainly(add_branches, x, *branches)
        return x, passed[-1]


class RefinedBlocks(Blocks):
    """A sequence of `RefinedBlock`."""

    def outputs(
        self, x: Tensor, after: Sequence[Callable[[Tensor], Tensor]] = (), recompute: bool = False
    ) -> Iterator[Tensor]:
        """Yields the output [B, N, D] of each block in turn; `after` is not supported."""
        maps = None
        for block in self:
            x, maps = recomputed(block, x, maps) if recompute else block(x, maps)
            yield x
