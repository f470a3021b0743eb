"""Attention by relative position alone: K² heads of it are a K x K convolution (Cordonnier et al., arXiv:1911.03584).

Each head h has a centre Δ and a precision matrix Σ⁻¹ = S Sᵀ, or s² I. For a key at the offset δ = (rows, columns):

    score_h(δ) = −½ (δ − Δ)ᵀ Σ⁻¹ (δ − Δ)                                   (equation 9)
    y = [A_1 x, …, A_H x] W + b,   A_h = softmax over all keys              (equation 5; each head carries all channels)

As s grows, A_h x becomes x at the offset Δ; W then holds the slices of a kernel (theorem 1). Parameter names are the
authors'. Maps do not depend on the image and are computed in fp32 at least.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..engine.body import Before, Given, Output, finish
from ..engine.freeze import derived
from ..engine.parted import Parted
from ..kernels.cost import Branch as Sizes

Grid = tuple[int, int]


class QuadraticAttention(Parted):
    """Attention of the tokens of a grid by relative position, and an output projection.

    Args:
        dim: D, channels.
        num_heads: H.
        grid: (rows, columns) of tokens.
        isotropic: Σ⁻¹ is s² I, not a full matrix.
        bias: b.
        proj_drop: dropout after the output projection.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        isotropic: bool = True,
        bias: bool = True,
        proj_drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_heads, self.grid, self.isotropic = num_heads, grid, isotropic
        self.attention_centers = nn.Parameter(torch.empty(num_heads, 2))
        self.attention_spreads = nn.Parameter(torch.empty(num_heads, *(() if isotropic else (2, 2))))
        self.value = nn.Linear(num_heads * dim, dim, bias=bias)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Centres are normal with deviation 2; precisions differ from 1 by 0.01 (the authors' settings)."""
        nn.init.normal_(self.attention_centers, std=2.0)
        nn.init.normal_(self.attention_spreads, std=0.01)
        self.attention_spreads.add_(1.0 if self.isotropic else torch.eye(2))

    @torch.no_grad()
    def set_convolution(self, weight: Tensor, bias: Tensor | None = None, spread: float = 200.0) -> None:
        """Makes the module, up to `proj`, a convolution with padding, where its window is inside the map (theorem 1).

        Args:
            weight: [D, D, K, K] with K² heads.
            bias: [D].
            spread: s; the weight of another pixel is exp(−s² / 2).
        """
        rows, columns = weight.shape[2:]
        if rows * columns != self.num_heads or weight.shape[:2] != self.proj.weight.shape or not self.isotropic:
            needed = f"{self.num_heads} taps, {self.proj.in_features} channels and isotropic heads"
            raise ValueError(f"weight has shape {list(weight.shape)}; the module needs one with {needed}")
        taps = torch.cartesian_prod(torch.arange(rows) - rows // 2, torch.arange(columns) - columns // 2)
        self.attention_centers.copy_(taps)
        self.attention_spreads.fill_(spread)
        self.value.weight.copy_(weight.flatten(2).transpose(1, 2).flatten(1))
        if self.value.bias is not None:
            self.value.bias.copy_(torch.zeros(len(weight)) if bias is None else bias)

    def maps(self) -> Tensor:
        """A [H, N, N]; cached if the model is frozen."""
        centers, spreads = self.attention_centers, self.attention_spreads

        def make() -> Tensor:
            dtype = torch.promote_types(centers.dtype, torch.float32)
            rows, columns = (torch.arange(n, device=centers.device, dtype=dtype) for n in self.grid)
            y, x = ((at - at[:, None])[None] for at in (rows, columns))  # from query to key
            (dy, dx), s = (c.to(dtype)[:, None, None] for c in centers.unbind(1)), spreads.to(dtype)
            y, x = (y - dy)[:, :, None, :, None], (x - dx)[:, None, :, None, :]  # [H, rows, 1, rows, 1] and columns
            a, b, c = self.precisions(s)
            scores = -0.5 * (a * y * y + c * x * x + 2 * b * y * x)
            return scores.flatten(3).flatten(1, 2).softmax(-1)

        return derived(self, "maps", (centers, spreads), make)

    def precisions(self, spreads: Tensor) -> tuple[Tensor, ...]:
        """The entries (0, 0), (0, 1) and (1, 1) of each head's Σ⁻¹, [H, 1, 1, 1, 1]."""
        if self.isotropic:
            squares = spreads.square()
            return tuple(t[:, None, None, None, None] for t in (squares, torch.zeros_like(squares), squares))
        (p, q), (r, t) = (row.unbind(1) for row in spreads.unbind(1))
        return tuple(e[:, None, None, None, None] for e in (p * p + q * q, p * r + q * t, r * r + t * t))

    def attend(self, x: Tensor) -> Tensor:
        """[B, N, D] → the means of all heads [B, N, H · D]."""
        maps = self.maps().to(x.dtype)
        if x.shape[1] != maps.shape[1]:
            raise ValueError(f"x has {x.shape[1]} tokens; the grid {self.grid} has {maps.shape[1]}")
        return (maps.flatten(0, 1) @ x).unflatten(1, (self.num_heads, -1)).transpose(1, 2).flatten(2)

    def entering(self) -> tuple[nn.Linear, ...]:
        """None: the maps read x."""
        return ()

    def sizes(self) -> Sizes:
        """See `engine.body.Body`."""
        inner, channels = self.value.in_features, self.proj.out_features
        return Sizes("mlp", 0, 0, channels, inner, inner)

    def parts(self) -> "QuadraticParts":
        """The module as a `engine.body.Body`."""
        return QuadraticParts(self)

    def plain(self, x: Tensor) -> Tensor:
        """[B, N, D] → [B, N, D]."""
        return self.proj_drop(self.proj(self.value(self.attend(x))))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, grid={self.grid}, isotropic={self.isotropic}"


class QuadraticParts(NamedTuple):
    """A `QuadraticAttention` as a `engine.body.Body`, for one call.

    Attributes:
        attention: the module.
    """

    attention: QuadraticAttention

    def __call__(
        self,
        x: Tensor,
        *,
        norm: Before | None = None,
        stats: Given | None = None,
        way: str = "reference",
        **end: Any,
    ) -> Output:
        """Tokens [B, N, D] → [B, N, D], see `engine.body.Body`."""
        layers = self.attention
        o = finish(layers.attend(x), layers.value, way=way)
        return finish(o, layers.proj, None, layers.proj_drop, way=way, **end)
