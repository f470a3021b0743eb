"""The MLP of a block. Parameter names are timm's: fc1, fc2."""

from torch import Tensor, nn

from ..kernels.activation import ACTIVATIONS, apply_activation
from .fusable import Fusable


class Mlp(Fusable):
    """fc1, activation, fc2 (ViT, arXiv:2010.11929, eq. 3); for "swiglu" fc1 packs gate and value (arXiv:2002.05202).

    Args:
        dim: D, channels per token.
        hidden: output features of fc1; for "swiglu" gate and value together, so fc2 has half as many inputs.
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

    def forward(self, x: Tensor) -> Tensor:
        """x [B, ..., D] → [B, ..., D]."""
        h = self.fc1(x)
        h = apply_activation(h, self.act) if isinstance(self.act, str) else self.act(h)  # a module that replaced it
        return self.drop2(self.fc2(self.drop1(h)))

    def extra_repr(self) -> str:
        return f"act={self.act}"
