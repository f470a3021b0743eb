"""Computes the queries, keys, values and bias of an attention layer's heads from its input.

For attention in windows, each window is a row of the batch: with W windows and B images, q, k and v have B·W rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..engine.attention import DenseHeads, WindowHeads, as_map, reduced_map
from ..engine.body import Body, finish, fold_or_normalize, project
from ..engine.leaves import Layer
from ..kernels.argument import Window
from ..kernels.attention_qkv import rotate
from ..kernels.window import APART


class Heads(NamedTuple):
    """What the maps of an attention layer are computed from.

    Attributes:
        q: queries after norms and rotations, [G, H, N, d].
        k: keys, [G, H, M, d].
        v: values, [G, H, M, e].
        bias: added to the scores, or boolean with True for "attend"; [g, H, N or 1, M] with g a divisor of G, or None.
        scale: softmax scale.
        output: from the heads' outputs [G, H, N, e] to the layer's output.
        mixes: linear maps over the heads, of scores and of probabilities (talking heads).
        halves: the output replaces the tokens, without a residual, by one for each query (between stages).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    scale: float
    output: Callable[[Tensor], Tensor]
    mixes: tuple[Layer, Layer] | None = None
    halves: bool = False


Parts = Body | Callable[[Tensor], Heads]


def heads_of(parts: Parts, x: Tensor, norm: nn.Module | None = None, position: nn.Module | None = None) -> Heads:
    """The heads of a layer.

    Args:
        parts: its submodules and settings, or a function from x to the heads.
        x: its input, [B, N, D] or [B, H, W, D].
        norm: norm between x and the projections.
        position: module that computes a bias from queries.
    """
    if not isinstance(parts, Body):
        return parts(x)
    if isinstance(parts.between, DenseHeads):
        return plain(parts, x, norm if parts.first is None else parts.first, position)
    return (_windows if isinstance(parts.between, WindowHeads) else _reduced)(parts, x, norm)


def split(x: Tensor, heads: int) -> Tensor:
    """[B, N, H·d] → [B, H, N, d]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _scale(scale: float | None, q: Tensor) -> float:
    """The softmax scale of queries [G, H, N, d]; by default 1 / √d."""
    return q.shape[-1] ** -0.5 if scale is None else scale


def plain(parts: Body, x: Tensor, norm: nn.Module | None, position: nn.Module | None) -> Heads:
    """Heads of an attention over all tokens, see `heads_of`."""
    heads: Any = parts.between
    x, folded = fold_or_normalize(x, norm, parts.projections)
    q, k, v = (split(t, heads.num_heads) for t in project(x, parts.projections, folded).chunk(3, -1))
    if heads.norms is not None:
        q, k = (norm(t) for norm, t in zip(heads.norms, (q, k), strict=True))
    if heads.rope is not None:
        prefix = q.shape[2] - heads.rope[0].shape[-2]
        q, k = (rotate(t, heads.rope, prefix).to(v.dtype) for t in (q, k))
    scale = _scale(heads.scale, q)
    bias = heads.bias if position is None else scale * position(q)
    if heads.causal:
        earlier = torch.ones(1, 1, q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        if bias is None or bias.dtype == torch.bool:
            bias = earlier if bias is None else bias & earlier
        else:
            bias = bias.masked_fill(~earlier, -torch.inf)

    def output(o: Tensor) -> Tensor:
        return finish(o.transpose(1, 2).flatten(2), parts.proj, parts.last, parts.drop)

    return Heads(q, k, v, bias, scale, output)


def _reduced(parts: Body, x: Tensor, norm: nn.Module | None) -> Heads:
    heads: Any = parts.between
    x = x if norm is None else norm(x)
    small = x if heads.reduce is None else reduced_map(heads.reduce, as_map(x, heads.grid))
    small, folded = fold_or_normalize(small, heads.norm, heads.kv)
    tokens = (t.flatten(1, -2) for t in (project(x, (heads.q,)), *project(small, heads.kv, folded).chunk(2, -1)))
    q, k, v = (split(t, heads.num_heads) for t in tokens)

    def output(o: Tensor) -> Tensor:
        return finish(o.transpose(1, 2).reshape(*x.shape[:-1], -1), parts.proj, None, parts.drop)

    return Heads(q, k, v, None, _scale(heads.scale, q), output)


def _windows(parts: Body, x: Tensor, norm: nn.Module | None) -> Heads:
    heads: Any = parts.between
    grid = x.shape[1:3] if heads.grid is None else heads.grid
    y, folded = fold_or_normalize(x, norm, parts.projections)
    qkv = project(y, parts.projections, folded).flatten(1, -2)
    places, apart = (t.to(x.device) for t in window_places(grid, heads.window))
    nothing = project(x.new_zeros(len(x), 1, x.shape[-1]), parts.projections)  # a padded token, at index −1
    qkv = torch.cat((qkv, nothing.to(qkv.dtype)), 1)[:, places].flatten(0, 1)  # [B·windows, n, 3·heads·d]
    q, k, v = (split(t, heads.num_heads) for t in qkv.chunk(3, -1))
    bias = heads.bias
    if isinstance(heads.scale, Tensor):  # cosine attention
        q = F.normalize(q, dim=-1) * heads.scale.to(q.dtype)[:, None, None]
        k = F.normalize(k, dim=-1)
        scale = 1.0
    else:
        scale = _scale(heads.scale, q)
    if apart.any():
        mask = (apart * APART).to(q.dtype)[:, None]
        bias = mask.expand(-1, heads.num_heads, -1, -1) if bias is None else bias + mask
    bias = bias if bias is None or bias.dim() == 4 else bias[None]

    def output(o: Tensor) -> Tensor:
        rows = o.transpose(1, 2).flatten(2).reshape(len(x), places.numel(), -1)
        at = places.flatten()
        merged = o.new_zeros(len(x), grid[0] * grid[1], rows.shape[-1]).index_copy(1, at[at >= 0], rows[:, at >= 0])
        return finish(merged.reshape(*x.shape[:-1], -1), parts.proj, None, parts.drop)

    return Heads(q, k, v, bias, scale, output)


def window_places(grid: tuple[int, ...], window: Window) -> tuple[Tensor, Tensor]:
    """The tokens of each window, and which pairs of them must not attend to each other; see `kernels.window`.

    Args:
        grid: (H, W).
        window: size and shift.

    Returns:
        Token numbers [windows, n], −1 for padded tokens, and True for pairs in different regions [windows, n, n].
    """
    (H, W), (h, w), (sy, sx) = grid, window.size, window.shift_on(grid)
    places = torch.arange(H * W).view(H, W)
    places = places if window.pad_first else places.roll((-sy, -sx), (0, 1))
    places = F.pad(places, (0, -W % w, 0, -H % h), value=-1)
    places = places.roll((-sy, -sx), (0, 1)) if window.pad_first else places
    rows, columns = (torch.arange(n) >= n - shift for n, shift in zip(places.shape, (sy, sx), strict=True))
    region = rows[:, None] * 2 + columns
    places, region = (
        t.unflatten(1, (-1, w)).unflatten(0, (-1, h)).transpose(1, 2).reshape(-1, h * w) for t in (places, region)
    )
    return places, region[:, :, None] != region[:, None]
