"""Stochastic depth: skips residual branches per image during training."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class DropPath(nn.Module):
    """Stochastic depth: skips a residual branch per image during training (Huang et al., arXiv:1603.09382).

    The branch of kept images is divided by 1 − p, so its expectation is unchanged.

    Args:
        p: probability of skipping, in [0, 1).
        skip: do not compute the branch for dropped images (DINOv2, arXiv:2304.07193, section 5). They are drawn on the
            host, which avoids a GPU synchronization. Compiled models have fixed shapes and ignore it.
    """

    def __init__(self, p: float = 0.0, skip: bool = False) -> None:
        super().__init__()
        self.p = p
        self.skip = skip

    def kept_images(self, x: Tensor) -> Tensor | None:
        """Indices [kept] of the images of x [B, ...] to compute; None to compute all, including dropped ones."""
        if not (self.skip and self.training and self.p) or torch.compiler.is_compiling():
            return None
        return (torch.rand(x.shape[0]) >= self.p).nonzero().flatten().to(x.device, non_blocking=True)

    def sample_scale(self, x: Tensor) -> Tensor | None:
        """One factor per image of x [B, ...]: [B] of 0 or 1 / (1 − p); None when nothing is dropped."""
        if not self.training or self.p == 0.0:
            return None
        return x.new_empty(x.shape[0]).bernoulli_(1 - self.p).div_(1 - self.p)

    def computed(self, kept: Tensor) -> tuple[Tensor, float]:
        """(indices of the images to compute, what their branch is multiplied by), for `kept_images`."""
        if len(kept):
            return kept, 1 / (1 - self.p)
        # one image times 0, so that every parameter has a gradient, as DDP and weight decay expect
        return torch.zeros(1, dtype=torch.long, device=kept.device), 0.0

    def forward(self, x: Tensor) -> Tensor:
        """[B, ...] → [B, ...]."""
        scale = self.sample_scale(x)
        return x if scale is None else x * scale.view(-1, *[1] * (x.dim() - 1))

    def extra_repr(self) -> str:
        return f"p={self.p:.3g}"


def add(x: Tensor, drop_path: nn.Module, branch: Callable[[Tensor], Tensor]) -> Tensor:
    """x + drop_path(branch(x)) for x [B, ...]; a `DropPath` that skips computes the branch for kept images only."""
    if not (drop_path.training and isinstance(drop_path, DropPath) and drop_path.skip):
        return x + drop_path(branch(x))
    kept = drop_path.kept_images(x)
    if kept is None:
        return x + drop_path(branch(x))
    kept, factor = drop_path.computed(kept)
    part = x[kept]
    return x.index_copy(0, kept, part + branch(part) * factor)


def drop_path_rates(last: float, depth: int) -> list[float]:
    """Rates that rise linearly from 0 in the first block to `last` in the last one."""
    return [last * i / max(depth - 1, 1) for i in range(depth)]
