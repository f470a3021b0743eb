"""The attention maps of one layer, from what was recorded of it.

Math      A[m] = softmax(scale · q[m] kᵀ + mask[m])    for any subset of rows m, of `scaled_dot_product_attention`  (1)
          A    what the model itself multiplies its values by, of a softmax                                        (2)
          dA = dO vᵀ, with dO the gradient of the output, of (1)                                                   (3)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

ROWS = 256  # queries that `blocks` yields at a time


class LayerScores(NamedTuple):
    """Arguments of a call of `scaled_dot_product_attention`, whose maps are computed on request."""

    q: Tensor  # queries, [G, H, N, d]
    k: Tensor  # keys, [G, H, M, d]
    v: Tensor  # values, [G, H, M, e]
    mask: Tensor | None  # added to the scores, or boolean with True for "attend", [G, H, N, M]; or None
    scale: float  # softmax scale
    causal: bool = False  # query n sees key m only if m ≤ n


@dataclass(eq=False)
class AttentionLayer:
    """Recorded attention of one layer, and the maps computed from it.

    In the shapes below, G is the number of images, times that of windows if tokens attend within windows of the map.
    """

    path: str  # name in the model of the module that calls it
    weights: LayerScores | Tensor  # what the maps are computed from, or the maps [G, H, N, M]
    head_dim: int  # channels of a head
    images: int | None = None  # number of images; None if the model's input was no image
    # the output replaces the tokens, without a residual, by one for each query (LeViT, between stages)
    halves: bool = False
    # gradient of the output [G, H, N, e] or, if the model computes the maps, of these; set by a backward pass with
    # `gradients=True`
    grad: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(G, H, N, M) of the map."""
        if isinstance(self.weights, LayerScores):
            return *self.weights.q.shape[:3], self.weights.k.shape[2]
        G, H, N, M = self.weights.shape
        return G, H, N, M

    @property
    def why_not_whole(self) -> str | None:
        """Why the maps are not over all tokens of an image and followed by one token for each query, or None."""
        G, _, N, M = self.shape
        if self.images is not None and G > self.images:
            return f"{self.path} attends within {G // self.images} windows of {M} tokens an image"
        return None if N == M or self.halves else f"{self.path} has maps of queries × keys = {N} × {M}"

    @torch.no_grad()
    def rows(self, queries: Tensor | slice | int) -> Tensor:
        """(1), (2): attention of some queries over all keys.

        Args:
            queries: token indices; the class token, if any, is 0.

        Returns:
            [G, H, n, M], fp32 (or fp64); rows sum to 1, or to 0 if every key is masked, except where heads are mixed.
        """
        queries = slice(queries, queries + 1 or None) if isinstance(queries, int) else queries
        if isinstance(self.weights, Tensor):
            return _single(self.weights[:, :, queries])
        q, k, _, mask, scale, causal = self.weights
        scores = scale * (_single(q[:, :, queries]) @ _single(k).mT)
        if causal:
            n, m = (torch.arange(size, device=q.device) for size in self.shape[2:])
            scores = scores.masked_fill(n[queries, None] < m, -torch.inf)
        if mask is not None:
            mask = mask[:, :, queries]
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        masked = scores.amax(-1, keepdim=True) == -torch.inf
        return scores.softmax(-1).masked_fill(masked, 0.0)

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """All rows in chunks of at most `ROWS` queries: (queries [n], rows [G, H, n, M])."""
        at = self.weights.q if isinstance(self.weights, LayerScores) else self.weights
        for queries in torch.arange(at.shape[2], device=at.device).split(ROWS):
            yield queries, self.rows(queries)

    def map(self) -> Tensor:
        """The whole attention map, [G, H, N, M]."""
        return self.rows(slice(None))

    def map_grad(self) -> Tensor:
        """(3): gradient of the attention map, [G, H, N, M].

        Raises:
            ValueError: no backward pass recorded the gradient.
        """
        if self.grad is None:
            raise ValueError(f"{self.path} has no gradient; capture with gradients=True and run a backward pass inside")
        grad = _single(self.grad)
        return grad @ _single(self.weights.v).mT if isinstance(self.weights, LayerScores) else grad


def _single(t: Tensor) -> Tensor:
    """The tensor in fp32, or as it is in fp64."""
    return t if t.dtype == torch.float64 else t.float()
