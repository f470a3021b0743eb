"""The Transformer block: two residual branches, each given as a module. Names are timm's."""

import torch
from torch import Tensor, nn

from ..kernels.backend import kernels_available
from .freeze import Entry, FoldedNorm, fold_norms, of_dtype
from .seam import entry, hooked, normalize, plain


class LayerScale(nn.Module):
    """A learned factor per channel on a residual branch (CaiT, arXiv:2103.17239, eq. 6).

    Args:
        dim: D, channels per token.
        init_values: initial factor.
    """

    def __init__(self, dim: int, init_values: float = 1e-5) -> None:
        super().__init__()
        self.init_values = init_values
        self.gamma = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gamma, self.init_values)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → [..., D]."""
        return x * self.gamma


class DropPath(nn.Module):
    """Stochastic depth: skips a residual branch for whole images while training (Huang et al., arXiv:1603.09382).

    Kept images are divided by 1 − p, so the expectation is unchanged.

    Args:
        p: probability of skipping, in [0, 1).
        skip: leave dropped images out of the branch's work, not only out of its sum (DINOv2, arXiv:2304.07193,
            section 5). Drawn on the host, so that nothing waits for a GPU; a compiled model, of fixed shapes, ignores
            it.
    """

    def __init__(self, p: float = 0.0, skip: bool = False) -> None:
        super().__init__()
        self.p, self.skip = p, skip

    def kept(self, x: Tensor) -> Tensor | None:
        """Which images of x [B, ...] are worked on, [kept]; None for all, those that are dropped among them."""
        if not (self.skip and self.training and self.p) or torch.compiler.is_compiling():
            return None
        return (torch.rand(x.shape[0]) >= self.p).nonzero().flatten().to(x.device, non_blocking=True)

    def sample_scale(self, x: Tensor) -> Tensor | None:
        """One factor per image of x [B, ...]: [B] of 0 or 1 / (1 − p); None when nothing is dropped."""
        if not self.training or self.p == 0.0:
            return None
        return x.new_empty(x.shape[0]).bernoulli_(1 - self.p).div_(1 - self.p)

    def forward(self, x: Tensor) -> Tensor:
        """[B, ...] → [B, ...]."""
        scale = self.sample_scale(x)
        return x if scale is None else x * scale.view(-1, *[1] * (x.dim() - 1))

    def extra_repr(self) -> str:
        return f"p={self.p:.3g}"


class Constant(nn.Module):
    """One factor for all images: what `DropPath` does to those that it kept.

    Args:
        factor: of every image.
    """

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def sample_scale(self, x: Tensor) -> Tensor:
        """The factor of each image of x [B, ...]: [B]."""
        return x.new_full((x.shape[0],), self.factor)

    def forward(self, x: Tensor) -> Tensor:
        """[B, ...] → [B, ...]."""
        return x * self.factor


def drop_path_rates(last: float, depth: int) -> list[float]:
    """Rates that rise linearly from 0 in the first block to `last` in the last one."""
    return [last * i / max(depth - 1, 1) for i in range(depth)]


class Block(nn.Module):
    """Pre-norm block: x + f(LN x) for f = attention, then MLP (ViT, arXiv:2010.11929, eq. 2-3).

    Args:
        dim: D, channels per token.
        attn: called as `attn(x, norm=, stats=, layer_scale=, sample_scale=, residual=,
        return_stats=)` where it is fused;
            `norm` is None unless it has a method `entering`. See `Attention`.
        mlp: called in the same way; see `Mlp`.
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
        fused = kernels_available(x)
        if not (fused or self.training):  # what `add_branch` comes to
            x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
            x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
            return (x, None) if return_stats else x
        attn = self.attn, self.norm1, self.ls1, self.drop_path1
        mlp = self.mlp, self.norm2, self.ls2, self.drop_path2
        first, second = fold_norms(x, _entry(*attn), _entry(*mlp)) if fused else (None, None)
        x, stats = add_branch(x, *attn, first, stats, second is not None)
        x, stats = add_branch(x, *mlp, second, stats, return_stats and first is not None)
        return (x, stats) if return_stats else x


class PostNormBlock(Block):
    """Post-norm block: LN(x + f(x)), as in the original Transformer (arXiv:1706.03762, section 3.1)."""

    def forward(
        self, x: Tensor, stats: Tensor | None = None, return_stats: bool = False
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """[B, N, D] → [B, N, D]; its branches read x without a norm, so there are no statistics to hand on."""
        x = normalize(add_branch(x, self.attn, None, self.ls1, self.drop_path1)[0], self.norm1)
        x = normalize(add_branch(x, self.mlp, None, self.ls2, self.drop_path2)[0], self.norm2)
        return (x, None) if return_stats else x


class Blocks(nn.Sequential):
    """Blocks one after another, each taking the row statistics that the one before left."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, D] → [B, N, D]."""
        stats = None
        for block in self:
            if type(block) is Block and not hooked(block):  # a hook expects one tensor
                x, stats = block(x, stats, return_stats=True)
            else:
                x, stats = block(x), None
        return x


def add_branch(
    x: Tensor,
    body: nn.Module,
    norm: nn.Module | None,
    scale: nn.Module,
    drop_path: nn.Module,
    folded: FoldedNorm | None = None,
    stats: Tensor | None = None,
    return_stats: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """x + drop_path(scale(body(norm(x)))) on x [B, N, D], ended inside `body` where nobody watches the parts.

    `folded` is the norm, folded into the body; row statistics of x make it cheaper. Those of the sum are returned if
    asked for and cheap, else None.
    """
    if type(drop_path) is DropPath and (kept := drop_path.kept(x)) is not None:
        factor = 1 / (1 - drop_path.p)
        if not len(kept):  # one image, times 0: every parameter has a gradient, as DDP and weight decay expect
            kept, factor = torch.zeros(1, dtype=torch.long, device=x.device), 0.0
        part, _ = add_branch(x[kept], body, norm, scale, Constant(factor), folded)
        return x.index_copy(0, kept, part), None
    folded = of_dtype(folded, x)
    if folded is None and norm is not None:
        entering, stats = normalize(x, norm), None
    else:
        entering = x
    if folded is not None or (kernels_available(x) and _ends_inside(body, scale, drop_path)):
        layer_scale = scale.gamma if type(scale) is LayerScale else None
        sample_scale = None if type(drop_path) is nn.Identity else drop_path.sample_scale(x)
        y = body(
            entering,
            norm=folded,
            stats=stats,
            layer_scale=layer_scale,
            sample_scale=sample_scale,
            residual=x,
            return_stats=return_stats,
        )
        return y if return_stats else (y, None)
    return x + drop_path(scale(body(entering))), None


def _entry(body: nn.Module, norm: nn.Module, scale: nn.Module, drop_path: nn.Module) -> Entry | None:
    """The norm of a branch and the layers behind it; None where one of the branch's modules must be called."""
    layers = body.entering() if hasattr(body, "entering") and _ends_inside(body, scale, drop_path) else ()
    return entry(norm, layers) if layers else None


def _ends_inside(body: nn.Module, scale: nn.Module, drop_path: nn.Module) -> bool:
    """The body may add the branch to its residual: no hook or replacement needs one of the three to be called."""
    ends = plain(scale, LayerScale, nn.Identity) and plain(drop_path, DropPath, Constant, nn.Identity)
    return ends and not hooked(body)
