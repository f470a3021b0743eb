"""Transformer blocks: attention and MLP as residual branches. Parameter names are timm's."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .drop_path import DropPath, add
from .fusable import Fusable, bound_as
from .layer_scale import LayerScale
from .recompute import recomputed


class Block(Fusable):
    """Pre-norm block: x + f(LN x) for f = attention, then MLP (ViT, arXiv:2010.11929, eq. 2-3).

    Args:
        dim: D, channels per token.
        attn: maps [B, N, D] to [B, N, D]; an `Attention`, for example.
        mlp: as attn.
        eps: LayerNorm epsilon.
        init_values: initial LayerScale; None for none.
        drop_path: probability of skipping each branch.
    """

    def __init__(
        self,
        dim: int,
        attn: nn.Module,
        mlp: nn.Module,
        eps: float = 1e-6,
        init_values: float | None = None,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.attn = attn
        self.ls1 = nn.Identity() if init_values is None else LayerScale(dim, init_values)
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = nn.LayerNorm(dim, eps=eps)
        self.mlp = mlp
        self.ls2 = nn.Identity() if init_values is None else LayerScale(dim, init_values)
        self.drop_path2 = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, D] → [B, N, D]."""
        x = add(x, self.drop_path1, lambda x: self.ls1(self.attn(self.norm1(x))))
        return add(x, self.drop_path2, lambda x: self.ls2(self.mlp(self.norm2(x))))


class PostNormBlock(Block):
    """Post-norm block: LN(x + f(x)), as in the original Transformer (arXiv:1706.03762, section 3.1)."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, D] → [B, N, D]."""
        x = self.norm1(add(x, self.drop_path1, lambda x: self.ls1(self.attn(x))))
        return self.norm2(add(x, self.drop_path2, lambda x: self.ls2(self.mlp(x))))


class Blocks(Fusable, nn.Sequential):
    """Sequence of blocks."""

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[Block]: ...

    def __getitem__(self, at: int | slice) -> Any:
        """A block or, for a slice, a sequence of blocks that passes statistics on if this one does."""
        item = super().__getitem__(at)
        return bound_as(item, self) if isinstance(at, slice) else item

    def forward(self, x: Tensor, after: Sequence[Callable[[Tensor], Tensor]] = (), recompute: bool = False) -> Tensor:
        """[B, N, D] → [B, N, D]; for the other arguments see `outputs`."""
        own = type(self.outputs) is partial and type(self).outputs is OUTPUTS  # the fused one, see `attach`
        for y in self.outputs(x, after, recompute, **dict(only_last=True) if own else {}):
            x = y
        return x

    def outputs(
        self, x: Tensor, after: Sequence[Callable[[Tensor], Tensor]] = (), recompute: bool = False
    ) -> Iterator[Tensor]:
        """Yields the output [B, N, D] of each block in turn.

        `after` has functions of the output of the first block, the second, and so on; with `recompute` each block is
        computed again in the backward pass instead of storing its activations.
        """
        for i, block in enumerate(self):
            x = recomputed(block, x) if recompute else block(x)
            x = after[i](x) if i < len(after) else x
            yield x


OUTPUTS = Blocks.outputs  # a user may patch it
