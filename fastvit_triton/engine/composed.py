"""A body with any function between its linear layers, such as attention whose bias depends on the queries.

Like `AttentionParts` and `MlpParts`, it describes modules of any library by their submodules, see `engine.body.Body`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.activation import GATED
from ..kernels.attention import attention
from ..kernels.attention_qkv import attention_qkv
from ..kernels.cost import Branch
from .body import Before, Given, MlpParts, Output, activate, finish, fold_or_normalize, project
from .leaves import Layer, activation_of, width_of


class ComposedParts(NamedTuple):
    """Submodules and settings of such a body, and what runs between them.

    Attributes:
        name: what it is, in reports.
        projections: the linear layers that read x; none if `between` reads x itself.
        between: maps their concatenated outputs [B, ..., F] to the inputs of `proj`, [B, ..., K].
        proj: last linear layer; None for none.
        num_heads: heads of attention; 0 for an MLP.
        keys: keys of each query; 0 if these are all tokens.
        first: norm inside the module, before the projections.
        last: norm before the last layer.
        drops: dropout after the last layer.
        decomposed: scores have a bias by row plus one by column, see `cost.Branch`.
    """

    name: str
    projections: tuple[Layer, ...]
    between: Callable[[Tensor], Tensor]
    proj: Layer | None
    num_heads: int = 0
    keys: int = 0
    first: nn.Module | None = None
    last: nn.Module | None = None
    drops: tuple[nn.Module | None] = (None,)
    decomposed: bool = False

    def entering(self) -> tuple[Layer, ...]:
        """The linear layers that read x."""
        return self.projections

    def sizes(self) -> Branch:
        """See `engine.body.Body`."""
        outer, inner = width_of((self.proj,))
        width, channels = width_of(self.projections) if self.projections else (3 * inner, outer)
        kind = "attention" if self.num_heads else "mlp"
        sizes = (channels, width, inner, self.num_heads)
        return Branch(kind, 0, 0, *sizes, keys=self.keys, decomposed=int(self.decomposed))

    def __call__(
        self,
        x: Tensor,
        norm: Before | None = None,
        stats: Given | None = None,
        way: str = "reference",
        **end: Any,
    ) -> Output:
        """The body of x [B, ..., D], see `engine.body.Body`."""
        if self.first is not None and norm is None:
            x, norm = fold_or_normalize(x, self.first, self.projections, way)
        h = self.between(project(x, self.projections, norm, stats, way) if self.projections else x)
        return finish(h, self.proj, self.last, *self.drops, way=way, **end)


def gated(
    layers: tuple[Layer, ...],
    act: nn.Module,
    last: Layer,
    drops: tuple[nn.Module | None, nn.Module | None] = (None, None),
    first: nn.Module | None = None,
    last_norm: nn.Module | None = None,
) -> MlpParts | ComposedParts:
    """Parts of a gated MLP, last(last_norm(drop(act(gate) · value))), where (gate, value) = layers(first(x)).

    Args:
        layers: gate and value, or one layer with both, gate first.
        act: activation of the gate; if the kernels lack it, PyTorch multiplies gate and value.
        last: last layer.
        drops: dropouts after the product and after the last layer.
        first: norm before the first layers.
        last_norm: norm before the last layer.
    """
    known = activation_of(act)
    name = next((name for name, gate in GATED.items() if gate == known), None)
    if name is not None:
        return MlpParts(layers, name, last, drops, first, last_norm)

    def between(h: Tensor) -> Tensor:
        gate, value = h.chunk(2, -1)
        h = activate(gate, known) * value
        return h if drops[0] is None else drops[0](h)

    return ComposedParts("gated MLP", layers, between, last, first=first, last=last_norm, drops=drops[1:])


def heads_of(x: Tensor, num_heads: int, parts: int = 3) -> tuple[Tensor, ...]:
    """Packed projections [B, ..., parts · H · D] as tensors [B, H, N, D], views where N is one axis."""
    return x.flatten(1, -2).unflatten(-1, (parts, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def merged_heads(o: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Outputs of heads [B, H, N, D] → [B, *shape, H · D], where the shape has N tokens."""
    return o.transpose(1, 2).flatten(2).unflatten(1, shape)


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, drop: nn.Dropout, fused: bool = False, bias: Tensor | None = None
) -> Tensor:
    """Attention of the heads [B, H, N or M, D] → [B, N, H · D]; PyTorch's while probabilities are dropped."""
    dropout = drop.p if drop.training else 0.0
    if fused and dropout == 0.0:
        o = attention(q, k, v, bias, scale)
    else:
        o = F.scaled_dot_product_attention(q, k, v, bias, dropout, scale=scale)
    return o.transpose(1, 2).flatten(2)


def attend_all(qkv: Tensor, num_heads: int, scale: float | None) -> Tensor:
    """Attention among all tokens of packed projections, [B, ..., 3 · H · D] → [B, ..., H · D]."""
    return attention_qkv(qkv.flatten(1, -2), num_heads, scale).unflatten(1, qkv.shape[1:-1])
