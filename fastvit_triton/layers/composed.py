"""A body with any function between its linear layers, such as attention whose bias depends on the queries.

Like `AttentionParts` and `MlpParts`, it describes modules of any library by their submodules, see `layers.body.Body`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..kernels.cost import Branch
from .body import Before, Given, Output, finish, project, width_of
from .module_parts import Layer


class ComposedParts(NamedTuple):
    """Submodules of an attention or a gated MLP, and what runs between them.

    Attributes:
        kind: "attention" or "mlp".
        projections: one projection, or those of queries, keys and values, or of gate and value.
        between: maps their outputs, concatenated [B, ..., F], to the input of `proj`.
        proj: last layer; None for none.
        num_heads: H of attention, else 0.
        drops: dropout after the last layer.
    """

    kind: str
    projections: tuple[Layer, ...]
    between: Callable[[Tensor], Tensor]
    proj: nn.Module | None
    num_heads: int = 0
    drops: tuple[nn.Module | None] = (None,)

    def entering(self) -> tuple[Layer, ...]:
        """The linear layers that read x."""
        return self.projections

    def sizes(self) -> Branch:
        """See `layers.body.Body`."""
        width, channels = width_of(self.projections)
        return Branch(self.kind, 0, 0, channels, width, width // (3 if self.num_heads else 2), self.num_heads)

    def __call__(
        self,
        x: Tensor,
        norm: Before | None = None,
        stats: Given | None = None,
        way: str = "reference",
        **end: Any,
    ) -> Output:
        """The body of x [B, ..., D], see `layers.body.Body`."""
        h = self.between(project(x, self.projections, norm, stats, way))
        return finish(h, self.proj, None, *self.drops, way=way, **end)


def heads_of(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [B, H, N, d] each, of a packed projection [B, ..., 3·H·d], ordered as [3, H, d]."""
    return qkv.flatten(1, -2).unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def merged_like(o: Tensor, x: Tensor) -> Tensor:
    """The heads' outputs [B, H, N, d] as [B, ..., H·d], with the axes of x [B, ..., F]."""
    return o.transpose(1, 2).flatten(2).unflatten(1, x.shape[1:-1])
