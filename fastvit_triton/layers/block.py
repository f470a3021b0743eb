"""Transformer blocks: attention and MLP as residual branches. Parameter names are timm's."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..engine import replay
from ..engine.body import Given, Output, normalize
from ..engine.branch import Branch, add_branches
from ..engine.hooks import can_fuse, has_global_hooks, has_hooks
from ..engine.ways import known_way, plainly
from .drop_path import DropPath
from .layer_scale import LayerScale
from .recompute import recomputed


class Block(nn.Module):
    """Pre-norm block: x + f(LN x) for f = attention, then MLP (ViT, arXiv:2010.11929, eq. 2-3).

    Args:
        dim: D, channels per token.
        attn: maps [B, N, D] to [B, N, D]; fused with its norm, LayerScale and residual if it is a `engine.body.Body`.
        mlp: as attn.
        eps: LayerNorm epsilon.
        init_values: initial LayerScale; None for none.
        drop_path: probability of skipping each branch.

    Attributes:
        chains: the class, not one that inherits from it, takes row statistics of x and returns those of its output.
    """

    chains = True

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

    def forward(self, x: Tensor, stats: Given | None = None, next_norm: nn.Module | None = None) -> Output:
        """[B, N, D] → [B, N, D]; for `stats` and `next_norm` see `add_branches`."""
        way, settings = known_way(self, x)
        if way is not None and way != "plain":
            return replay.call(settings, Block._fused, self, x, stats, next_norm)
        return self._fused(x, stats, next_norm, way)

    def _fused(self, x: Tensor, stats: Given | None, next_norm: nn.Module | None, way: str | None = None) -> Output:
        if way == "plain" or not can_fuse(x):
            x = plainly(self._plain, x)
            return x if next_norm is None else (x, None)
        return add_branches(x, *self.branches(x), block=self, stats=stats, next_norm=next_norm)

    def branches(self, x: Tensor) -> tuple[Branch, Branch]:
        """Attention and MLP with their norms and factors, for x [B, N, D]."""
        attn = Branch(self.attn, self.norm1, self.ls1, self.drop_path1)
        return attn, Branch(self.mlp, self.norm2, self.ls2, self.drop_path2)

    def _plain(self, x: Tensor) -> Tensor:
        if self.training:  # stochastic depth may compute a branch for a subset of the images
            return add_branches(x, *self.branches(x))
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class PostNormBlock(Block):
    """Post-norm block: LN(x + f(x)), as in the original Transformer (arXiv:1706.03762, section 3.1)."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # no norm reads `stats`
        """[B, N, D] → [B, N, D]; no norm precedes the branches, so no row statistics are passed between them."""
        x = normalize(add_branches(x, Branch(self.attn, None, self.ls1, self.drop_path1)), self.norm1)
        return normalize(add_branches(x, Branch(self.mlp, None, self.ls2, self.drop_path2)), self.norm2)


class Blocks(nn.Sequential):
    """Sequence of blocks; each passes the row statistics of its output to the next block's norm."""

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[Block]: ...

        def __getitem__(self, at: int | slice) -> Any: ...  # a Block, or Blocks

    def forward(self, x: Tensor, after: Sequence[Callable[[Tensor], Tensor]] = (), recompute: bool = False) -> Tensor:
        """[B, N, D] → [B, N, D]; for the other arguments see `outputs`."""
        for y in self.outputs(x, after, recompute):
            x = y
        return x

    def outputs(
        self, x: Tensor, after: Sequence[Callable[[Tensor], Tensor]] = (), recompute: bool = False
    ) -> Iterator[Tensor]:
        """Yields the output [B, N, D] of each block in turn.

        Args:
            x: [B, N, D].
            after: functions of the output of the first block, the second, and so on.
            recompute: compute each block again in the backward pass instead of storing its activations.
        """
        stats, blocks, changed = None, list(self), len(after)
        # a subclass need not take statistics, and a hook expects one tensor
        chained = ["chains" in vars(type(block)) and not has_hooks(block) for block in blocks]
        if has_global_hooks() or recompute:
            chained = [False] * len(blocks)
        chained.append(False)  # after the last block
        for i, block in enumerate(blocks):
            if recompute:
                x = recomputed(block, x)
            elif chained[i] and chained[i + 1] and i >= changed:
                x, stats = block(x, stats, blocks[i + 1].norm1)
            else:
                x, stats = block(x, stats) if chained[i] else block(x), None
            x = after[i](x) if i < changed else x
            yield x
