"""Attention whose maps are mixed across heads, composed from PyTorch operators between fused linear layers.

Parameter names are timm's and the authors'. The norm before, and LayerScale, stochastic depth and residual after, are
fused into the linear layers as for other attention; the maps [B, H, N, N] are formed.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..engine.attention import heads_of, merged_heads
from ..engine.batch_norm import is_constant, sources_of
from ..engine.body import Before, Body, Given, Output
from ..engine.freeze import derived
from ..engine.hooks import is_plain_module
from ..engine.leaves import CONVOLUTIONS, Layer, Packed, is_readable
from ..engine.parted import Parted
from ..kernels.cost import Branch as Sizes


class MixedAttention(Parted):
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

    def parts(self) -> Body:
        """Its submodules as `Body`."""
        drops = (self.proj_drop,)
        return Body("attention", (self.qkv,), self.attend, self.proj, self.num_heads, drops=drops)

    def entering(self) -> tuple[nn.Linear, ...]:
        """The linear layers applied to x."""
        return (self.qkv,)

    def plain(self, x: Tensor) -> Tensor:
        """x [B, N, D] → [B, N, D]."""
        return self.proj_drop(self.proj(self.attend(self.qkv(x))))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"


def mix_heads(layer: Layer, maps: Tensor) -> Tensor:
    """A linear layer H → H over the heads of maps [B, H, N, N]."""
    if type(layer) is not Packed and not is_readable(layer):
        return layer(maps.movedim(1, -1)).movedim(-1, 1)
    weight = layer.weight.expand(maps.shape[0], -1, -1)
    return torch.baddbmm(layer.bias[None, :, None], weight, maps.flatten(2)).view_as(maps)


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
        return self.attn_drop(mix_heads(self.proj_w, mix_heads(self.proj_l, scores).softmax(-1)))


class ReAttention(MixedAttention):
    """A linear map over the heads after the softmax, and a BatchNorm of the maps (DeepViT, arXiv:2103.11886, eq. 3).

        P' = s · BatchNorm(Θ softmax(q kᵀ / √d) + b),   one channel a head

    In evaluation mode Θ and the BatchNorm are one map, which is kept after `freeze`.

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
        if is_constant(norm) and is_plain_module(self.reatten_matrix, CONVOLUTIONS):
            return mix_heads(self.folded(), maps)
        return self.factor * norm(self.reatten_matrix(maps))

    def folded(self) -> Packed:
        """Θ, b, BatchNorm with its running statistics, and s as one map over the heads: weight [H, H], bias [H]."""
        norm = self.var_norm
        if (sources := sources_of(self, self.reatten_matrix, norm)) is None:
            return Packed(*self._fold())
        weight = derived(self, f"map {norm.eps}", sources, lambda: self._fold()[0])
        return Packed(weight, derived(self, f"map's bias {norm.eps}", sources, lambda: self._fold()[1]))

    def _fold(self) -> tuple[Tensor, Tensor]:
        norm, conv = self.var_norm, self.reatten_matrix
        mean, variance, bias = norm.running_mean, norm.running_var, conv.bias
        assert mean is not None and variance is not None and bias is not None
        gain = norm.weight * (variance + norm.eps).rsqrt()  # [H]
        weight = gain[:, None] * conv.weight[..., 0, 0]
        return self.factor * weight, self.factor * (gain * (bias - mean) + norm.bias)


class RefinedAttention(MixedAttention):
    """Attention that adds the map before it, or refines that map instead of computing its own.

    Source: Refiner, arXiv:2106.03714, section 3, in the order of the authors' models, with s = 1 / √d:

        own:      A = softmax(s q kᵀ) + s A'      A' = the map that the block before passed on, 0 in the first block
                  y = A v                         passes on A
        refined:  y = s · BatchNorm(DLA(A')) v    passes on A'

    Args:
        dim: D, channels per token.
        num_heads: H.
        refines: has no queries and keys, and refines A'.
        expansion: see `LocalAttention`.
        options: the further arguments of `MixedAttention`, in their order.
    """

    def __init__(self, dim: int, num_heads: int, refines: bool, expansion: int, qkv_bias: bool, *options: Any) -> None:
        super().__init__(dim, num_heads, qkv_bias, *options)
        self.refines = refines
        if refines:
            self.qkv = nn.Linear(dim, dim, bias=qkv_bias)
            self.DLA = LocalAttention(num_heads, expansion)
            self.adapt_bn = nn.BatchNorm2d(num_heads)

    def attend_with(self, previous: Tensor | None, passed: list[Tensor], qkv: Tensor) -> Tensor:
        """Projections [B, N, 3·H·d], or values [B, N, H·d] → the heads' outputs; appends the map that is passed on."""
        if self.refines:
            assert previous is not None
            (v,) = heads_of(qkv, self.num_heads, 1)
            maps, own = self.scale * self.adapt_bn(self.DLA(previous)), previous
        else:
            q, k, v = heads_of(qkv, self.num_heads)
            own = ((q * self.scale) @ k.mT).softmax(-1)
            maps = own = self.attn_drop(own if previous is None else own + self.scale * previous)
        passed.append(own)
        return merged_heads(maps @ v, qkv.shape[1:-1])

    def forward(  # type: ignore[override]  # a map comes with x
        self, x: Tensor, previous: Tensor | None = None, passed: list[Tensor] | None = None
    ) -> Tensor:
        """x [B, N, D] → [B, N, D]; the map that is passed on is appended to the list."""
        passed = [] if passed is None else passed
        return self.proj_drop(self.proj(self.attend_with(previous, passed, self.qkv(x))))


class LocalAttention(nn.Module):
    """Distributed local attention: a convolution of maps over queries and keys (Refiner, arXiv:2106.03714, sec. 3.2).

        DLA(A) = A + BN(W₂ f(W₁ A)),   f = ReLU6 BN, a depthwise 3 x 3 convolution, ReLU6 BN

    Args:
        num_heads: H.
        expansion: channels of the convolution divided by H.
    """

    def __init__(self, num_heads: int, expansion: int) -> None:
        super().__init__()
        width = expansion * num_heads
        self.conv_exp, self.bn1 = nn.Conv2d(num_heads, width, 1, bias=False), nn.BatchNorm2d(width)
        self.depth_sep_conv = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv_pro, self.bn3 = nn.Conv2d(width, num_heads, 1, bias=False), nn.BatchNorm2d(num_heads)

    def forward(self, maps: Tensor) -> Tensor:
        """[B, H, N, N] → [B, H, N, N]."""
        x = F.relu6(self.bn1(self.conv_exp(maps)))
        x = F.relu6(self.bn2(self.depth_sep_conv(x)))
        return maps + self.bn3(self.conv_pro(x))


class RefinedParts(NamedTuple):
    """A `RefinedAttention` as a `engine.body.Body`, for one call.

    Attributes:
        attention: the module.
        previous: the map that the block before passed on.
        passed: takes the map that this one passes on.
    """

    attention: RefinedAttention
    previous: Tensor | None
    passed: list[Tensor]

    def entering(self) -> tuple[nn.Linear, ...]:
        """The linear layers applied to x."""
        return self.attention.entering()

    def sizes(self) -> Sizes:
        """See `engine.body.Body`."""
        return self.attention.sizes()

    def __call__(
        self,
        x: Tensor,
        *,
        norm: Before | None = None,
        stats: Given | None = None,
        way: str = "plain",
        **end: Any,
    ) -> Output:
        """x [B, N, D] → [B, N, D], see `engine.body.Body`."""
        if way == "plain":
            return self.attention(x, self.previous, self.passed)
        between = partial(self.attention.attend_with, self.previous, self.passed)
        return self.attention.parts()._replace(between=between)(x, norm, stats, way, **end)
