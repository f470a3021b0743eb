"""Attention whose maps are mixed across heads, composed from PyTorch operators between fused linear layers.

Parameter names are timm's and the authors'. The norm before, and LayerScale, stochastic depth and residual after, are
fused into the linear layers as for other attention; the maps [B, H, N, N] are formed.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.cost import Branch as Sizes
from .body import Before, Given, Output
from .composed import ComposedParts, heads_of, merged_heads
from .hooks import has_hooks
from .module_parts import Packed
from .ways import way_alone


class MixedAttention(nn.Module):
    """Self-attention with a packed qkv projection, whose maps a subclass computes.

    Args:
        dim: D, channels per token.
        num_heads: H.
        qkv_bias: bias on the packed projection.
        attn_drop: dropout on the attention probabilities.
        proj_drop: dropout after the output projection.
    """

    def __init__(
        self, dim: int, num_heads: int, qkv_bias: bool = True, attn_drop: float = 0.0, proj_drop: float = 0.0
    ) -> None:
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def maps(self, scores: Tensor) -> Tensor:
        """Scaled scores [B, H, N, N] → what the values are multiplied by, [B, H, N, N]."""
        raise NotImplementedError

    def attend(self, qkv: Tensor) -> Tensor:
        """Packed projections [B, N, 3·H·d] → the heads' outputs [B, N, H·d]."""
        q, k, v = heads_of(qkv, self.num_heads)
        return merged_heads(self.maps((q * self.scale) @ k.mT) @ v, qkv.shape[1:-1])

    def parts(self) -> ComposedParts:
        """Its submodules as `ComposedParts`."""
        drops = (self.proj_drop,)
        return ComposedParts("attention", (self.qkv,), self.attend, self.proj, self.num_heads, drops=drops)

    def entering(self) -> tuple[nn.Linear, ...]:
        """The linear layers applied to x."""
        return (self.qkv,)

    def sizes(self) -> Sizes:
        """See `layers.body.Body`."""
        return self.parts().sizes()

    def forward(
        self,
        x: Tensor,
        *,
        norm: Before | None = None,
        stats: Given | None = None,
        way: str | None = None,
        **end: Any,
    ) -> Output:
        """x [B, N, D] → [B, N, D]; for the arguments see `layers.body.Body`."""
        if way is None:
            way = way_alone(self, x)
        if way == "plain":
            return self.proj_drop(self.proj(self.attend(self.qkv(x))))
        return self.parts()(x, norm, stats, way, **end)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"


class TalkingHeads(MixedAttention):
    """Linear maps over the heads before and after the softmax (arXiv:2003.02436; CaiT, arXiv:2103.17239, section 5.1).

        P = W' softmax(W S + b) + b',   S = q kᵀ / √d;   the softmax cancels b

    The arguments are those of `MixedAttention`.
    """

    def __init__(self, dim: int, num_heads: int, *options: Any) -> None:
        super().__init__(dim, num_heads, *options)
        self.proj_l = nn.Linear(num_heads, num_heads)
        self.proj_w = nn.Linear(num_heads, num_heads)

    def maps(self, scores: Tensor) -> Tensor:
        maps = self.proj_l(scores.movedim(1, -1)).movedim(-1, 1).softmax(-1)
        return self.attn_drop(self.proj_w(maps.movedim(1, -1)).movedim(-1, 1))


class ReAttention(MixedAttention):
    """A linear map over the heads after the softmax, and a BatchNorm of the maps (DeepViT, arXiv:2103.11886, eq. 3).

        P' = s · BatchNorm(Θ softmax(q kᵀ / √d) + b),   one channel a head

    In evaluation mode Θ and the BatchNorm are one map.

    Args:
        dim: D, channels per token.
        num_heads: H.
        factor: s.
        options: the further arguments of `MixedAttention`, in their order.
    """

    def __init__(self, dim: int, num_heads: int, factor: float = 1.0, *options: Any) -> None:
        super().__init__(dim, num_heads, *options)
        self.factor = factor
        self.reatten_matrix = nn.Conv2d(num_heads, num_heads, 1)
        self.var_norm = nn.BatchNorm2d(num_heads)

    def maps(self, scores: Tensor) -> Tensor:
        maps, norm = self.attn_drop(scores.softmax(-1)), self.var_norm
        if norm.training or has_hooks(norm) or has_hooks(self.reatten_matrix):
            return self.factor * norm(self.reatten_matrix(maps))
        weight, bias, _ = self.folded()
        return F.conv2d(maps, weight[:, :, None, None], bias)

    def folded(self) -> Packed:
        """Θ, b, BatchNorm with its running statistics, and s as one map over the heads: weight [H, H], bias [H]."""
        norm, conv = self.var_norm, self.reatten_matrix
        mean, variance, bias = norm.running_mean, norm.running_var, conv.bias
        assert mean is not None and variance is not None and bias is not None
        gain = norm.weight * (variance + norm.eps).rsqrt()  # [H]
        weight = gain[:, None] * conv.weight[..., 0, 0]
        return Packed(self.factor * weight, self.factor * (gain * (bias - mean) + norm.bias))
