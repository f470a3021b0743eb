"""Stochastic depth: residual branches that skip whole images while training."""

import torch
from torch import Tensor, nn


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

    def kept_images(self, x: Tensor) -> Tensor | None:
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


class ConstantScale(nn.Module):
    """One factor for every image: what `DropPath` multiplies the images by that it keeps.

    Args:
        factor: for every image.
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
