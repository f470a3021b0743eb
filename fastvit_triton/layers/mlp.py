"""The MLP of a block. Parameter names are timm's: fc1, fc2."""

from torch import Tensor, nn

from ..kernels.backend import kernels_available
from ..kernels.linear import ACTIVATIONS
from ..kernels.mlp import mlp
from .freeze import FoldedNorm, operands
from .seam import drops, hooked, plain, project


class Mlp(nn.Module):
    """fc1, activation, fc2 (ViT, arXiv:2010.11929, eq. 3); for "swiglu" fc1 holds gate and value (arXiv:2002.05202).

    Args:
        dim: D, channels per token.
        hidden: outputs of fc1; for "swiglu" gate and value together, so that fc2 reads half of them.
        act: "gelu", "gelu_tanh", "quick_gelu", "relu", "silu" or "swiglu".
        bias: biases on both layers.
        drop: dropout after the activation and after fc2.
    """

    def __init__(self, dim: int, hidden: int, act: str = "gelu", bias: bool = True, drop: float = 0.0) -> None:
        super().__init__()
        if act != "swiglu" and act not in ACTIVATIONS:
            raise ValueError(f"act is {act!r}; use one of {', '.join((*ACTIVATIONS, 'swiglu'))}")
        self.act = act
        self.fc1 = nn.Linear(dim, hidden, bias=bias)
        self.drop1 = nn.Dropout(drop)
        self.fc2 = nn.Linear(hidden // 2 if act == "swiglu" else hidden, dim, bias=bias)
        self.drop2 = nn.Dropout(drop)

    def entering(self) -> tuple[nn.Linear, ...]:
        """The linear layers that read x."""
        return (self.fc1,)

    def forward(
        self, x: Tensor, *, norm: FoldedNorm | None = None, stats: Tensor | None = None, **branch: Tensor | bool | None
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """x [B, N, D] → [B, N, D]; `norm`, folded into `entering` layers and with the `stats` of x, comes first.

        `branch` (layer_scale, sample_scale, residual, return_stats) comes last.
        """
        if kernels_available(x) and self._fusable():
            weight, bias, folded = operands(self.fc1.weight, self.fc1.bias, norm)
            fc2 = self.fc2.weight, self.fc2.bias
            return mlp(x, (weight, bias), fc2, norm=folded, stats=stats, activation=self.act, **branch)
        if self.act == "swiglu":
            gate, value = project(x, self.fc1, norm=norm, stats=stats).chunk(2, -1)
            h = self.drop1(nn.functional.silu(gate) * value)
        else:
            h = project(x, self.fc1, norm=norm, stats=stats, activation=self.act, drop=self.drop1)
        return project(h, self.fc2, drop=self.drop2, **branch)

    def _fusable(self) -> bool:
        linears = plain(self.fc1, nn.Linear) and plain(self.fc2, nn.Linear)
        return linears and not any(drops(d) or hooked(d) for d in (self.drop1, self.drop2))

    def extra_repr(self) -> str:
        return f"act={self.act}"
