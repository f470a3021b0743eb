"""LayerScale: a learned factor per channel."""

import torch
from torch import Tensor, nn


class LayerScale(nn.Module):
    """A learned factor per channel on a residual branch (CaiT, arXiv:2103.17239, eq. 6), at first `init_values`."""

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
