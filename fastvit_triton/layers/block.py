"""The Transformer block: two residual branches, each given as a module. Names are timm's."""

from torch import Tensor, nn

from .body import normalize
from .branch import Branch, add_branches
from .drop_path import DropPath
from .hooks import can_fuse, has_global_hooks, has_hooks
from .layer_scale import LayerScale


class Block(nn.Module):
    """Pre-norm block: x + f(LN x) for f = attention, then MLP (ViT, arXiv:2010.11929, eq. 2-3).

    Args:
        dim: D, channels per token.
        attn: maps [B, N, D] to [B, N, D]; fused with what stands around it if it is a `layers.body.Body`.
        mlp: the same.
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

    def forward(
        self, x: Tensor, stats: Tensor | None = None, return_stats: bool = False
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """[B, N, D] → [B, N, D]; a fused block takes row statistics of x from the block before and leaves its own."""
        if not (self.training or can_fuse(x)):  # what `add_branches` comes to
            x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
            x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
            return (x, None) if return_stats else x
        attn = Branch(self.attn, self.norm1, self.ls1, self.drop_path1)
        mlp = Branch(self.mlp, self.norm2, self.ls2, self.drop_path2)
        return add_branches(x, attn, mlp, stats=stats, return_stats=return_stats)


class PostNormBlock(Block):
    """Post-norm block: LN(x + f(x)), as in the original Transformer (arXiv:1706.03762, section 3.1)."""

    def forward(
        self, x: Tensor, stats: Tensor | None = None, return_stats: bool = False
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """[B, N, D] → [B, N, D]; its branches read x without a norm, so there are no statistics to hand on."""
        x = normalize(add_branches(x, Branch(self.attn, None, self.ls1, self.drop_path1)), self.norm1)
        x = normalize(add_branches(x, Branch(self.mlp, None, self.ls2, self.drop_path2)), self.norm2)
        return (x, None) if return_stats else x


class Blocks(nn.Sequential):
    """Blocks one after another, each taking the row statistics that the one before left."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, D] → [B, N, D]."""
        stats = None
        for block in self:
            if type(block) is Block and not has_hooks(block) and not has_global_hooks():  # a hook expects one tensor
                x, stats = block(x, stats, return_stats=True)
            else:
                x, stats = block(x), None
        return x
