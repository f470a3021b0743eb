"""Computes the attention maps of one layer from its recorded input.

Math      q, k, v = the layer's own projections, norms and rotations of its captured input      (1)
          A[m] = softmax(scale · q[m] kᵀ + bias[m])    for any subset of rows m                   (2)
          O = A v, one call of `attention`                                                       (3)
          dA = dO vᵀ, with dO the gradient of the heads' outputs                                 (4)
          Talking heads mix the scores, S'ₕ = Σⱼ wₕⱼ Sⱼ + bₕ, and likewise softmax(S')            (5)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from ..engine.leaves import Layer
from ..kernels.attention import attention
from .heads import Heads, Parts, heads_of

ROWS = 256  # queries that `blocks` yields at a time


@dataclass(eq=False)
class AttentionLayer:
    """Recorded input of one attention layer, and the attention maps computed from it.

    In the shapes below, G is the number of images, times that of windows if tokens attend within windows of the map.

    Attributes:
        path: the module's name in the model.
        x: input of the layer, [B, N, D], or a map [B, H, W, D].
        parts: its projections and settings, or a function from x to the heads.
        norm: norm between x and the projections; None if x is already normalised, or the layer has no norm.
        position: module that computes a bias from queries (our models only).
        images: number of images; None if it is that of x.
        output_grad: gradient of the layer's output; set by a backward pass with `gradients=True`.
    """

    path: str
    x: Tensor
    parts: Parts
    norm: nn.Module | None = None
    position: nn.Module | None = None
    images: int | None = None
    output_grad: Tensor | None = None

    @cached_property
    @torch.no_grad()
    def heads(self) -> Heads:
        """(1): queries and keys after norms and rotations, values, and bias."""
        return heads_of(self.parts, self.x, self.norm, self.position)

    @property
    def queries(self) -> int:
        """N, the number of queries of a map."""
        return self.heads.q.shape[2]

    @property
    def why_not_whole(self) -> str | None:
        """Why the maps are not over all tokens of an image and followed by one token for each query, or None."""
        G = len(self.heads.q)
        M = self.heads.k.shape[2]
        images = self.images or len(self.x)
        if G > images:
            return f"{self.path} attends within {G // images} windows of {M} tokens an image"
        if M == self.queries or self.heads.halves:
            return None
        return f"{self.path} has maps of queries × keys = {self.queries} × {M}"

    @cached_property
    @torch.no_grad()
    def attended(self) -> Tensor:
        """(3): outputs of the heads, [G, H, N, d]."""
        q, k, v, bias, scale, _, mixes, _ = self.heads
        if mixes is None:
            return attention(q, k, v, bias, scale)
        maps = self.map()
        return (maps @ v.to(maps.dtype)).to(v.dtype)

    @torch.no_grad()
    def rows(self, queries: Tensor | slice | int) -> Tensor:
        """(2), (5): attention probabilities of some queries over all keys.

        Args:
            queries: token indices; the class token, if any, is 0.

        Returns:
            [G, H, n, M], fp32 (or fp64); rows sum to 1, or to 0 if every key is masked, except with talking heads.
        """
        queries = slice(queries, queries + 1 or None) if isinstance(queries, int) else queries
        q, k, _, bias, scale, _, mixes, _ = self.heads
        q, k = (t if t.dtype == torch.float64 else t.float() for t in (q[:, :, queries], k))
        scores = scale * (q @ k.mT)
        if bias is not None:
            bias = bias if bias.shape[0] in (1, len(q)) else bias[torch.arange(len(q)) % bias.shape[0]]
            bias = bias.expand(*bias.shape[:2], self.queries, -1)[:, :, queries]
            scores = scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else scores + bias
        if mixes is not None:
            return _mixed(mixes[1], _mixed(mixes[0], scores).softmax(-1))
        masked = scores.amax(-1, keepdim=True) == -torch.inf
        return scores.softmax(-1).masked_fill(masked, 0.0)

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """All rows in chunks of at most `ROWS` queries: (queries [n], rows [G, H, n, M])."""
        for queries in torch.arange(self.queries, device=self.x.device).split(ROWS):
            yield queries, self.rows(queries)

    def map(self) -> Tensor:
        """The whole attention map, [G, H, N, M]."""
        return self.rows(slice(None))

    def map_grad(self) -> Tensor:
        """(4): gradient of the attention probabilities, [G, H, N, M].

        Raises:
            ValueError: no backward pass recorded `output_grad`.
        """
        if self.output_grad is None:
            raise ValueError(f"{self.path} has no gradient; capture with gradients=True and run a backward pass inside")
        v = self.heads.v
        o = self.attended
        with torch.enable_grad():
            o = o.detach().requires_grad_()
            y = self.heads.output(o)
        (grad,) = torch.autograd.grad(y, o, self.output_grad.to(y.dtype).reshape(y.shape))
        return (grad @ v.mT).to(torch.promote_types(v.dtype, torch.float32))


def _mixed(layer: Layer, maps: Tensor) -> Tensor:
    """(5): maps [G, H, N, M] after a linear map over the heads, in their dtype."""
    bias = None if layer.bias is None else layer.bias.to(maps.dtype)
    return nn.functional.linear(maps.movedim(1, -1), layer.weight.to(maps.dtype), bias).movedim(-1, 1)
