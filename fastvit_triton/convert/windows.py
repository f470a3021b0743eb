"""What the pyramids of several packages share: tables of positions, Swin V2's bias and scale, merging of patches.

What is computed from weights alone is kept while the model is frozen, see `engine.freeze.derived`.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from ..engine.attention import attend_all, axis_bias, merged_heads
from ..engine.body import finish, normalize
from ..engine.freeze import derived
from ..engine.hooks import has_hooks, type_name
from ..engine.leaves import LAYER_NORMS, Foreign, Layer, has_sample_scale
from ..kernels.attention import attention


def hooked(modules: Iterable[nn.Module], but: nn.Module | None = None) -> str | None:
    """Why a module around these must run its own forward: one of them has a hook; None if none has."""
    module = next((m for m in modules if m is not but and has_hooks(m)), None)
    return None if module is None else f"{type(module).__name__} has a hook"


def unusual_norm(norm: nn.Module, drop_path: nn.Module) -> str | None:
    """Why a block must run its own forward, which calls these two on a map instead of tokens; or None."""
    if type_name(norm) not in LAYER_NORMS or has_hooks(norm):
        return f"{type(norm).__name__} was replaced or has a hook"
    return None if has_sample_scale(drop_path) else f"{type(drop_path).__name__} was replaced or has a hook"


def table_bias(attn: Foreign) -> Tensor:
    """The bias [heads, n, n] from a table of relative positions [offsets, heads] and an index of n·n pairs."""
    table = attn.relative_position_bias_table
    index = attn.relative_position_index
    return derived(attn, "bias", (table, index), lambda: expanded(table, index))


def continuous_bias(attn: Foreign) -> Tensor:
    """Swin V2's bias [heads, n, n]: 16 · sigmoid of an MLP of the relative coordinates."""
    coordinates = attn.relative_coords_table
    index = attn.relative_position_index
    mlp = attn.cpb_mlp if hasattr(attn, "cpb_mlp") else attn.continuous_position_bias_mlp

    def make() -> Tensor:
        kind = coordinates.device.type
        exact = nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)  # what is kept outlives it
        with exact:
            return expanded(16 * torch.sigmoid(mlp(coordinates).flatten(0, -2)), index)

    return derived(attn, "bias", (coordinates, index, *mlp.parameters()), make)


def expanded(table: Tensor, index: Tensor) -> Tensor:
    """table[index] as [heads, n, n], contiguous."""
    n = math.isqrt(index.numel())
    return table.permute(1, 0)[:, index.view(-1)].view(-1, n, n)


def bias_by_axis(attn: Foreign, q: Tensor, grid: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The bias of queries [B, H, N, D] and keys of a grid by `rel_pos_h` and `rel_pos_w`, as `attention` takes it."""
    tables = (_distances(attn, f"rel_pos_{axis}", n) for axis, n in zip("hw", grid, strict=True))
    return axis_bias(q, tables, grid)


def _distances(attn: Foreign, name: str, n: int) -> Tensor:
    """The embedding of each pair of n positions, [n, n, D], from a table that may be interpolated.

    Views and a flip, not an index, whose gradient is not the same in every run on a CPU.
    """
    table = getattr(attn, name)

    def make() -> Tensor:
        rows = table
        if len(table) != 2 * n - 1:
            rows = nn.functional.interpolate(table.mT[None], size=2 * n - 1, mode="linear")[0].mT
        return rows.unfold(0, n, 1).flip(-1).mT

    return derived(attn, f"{name} {n}", (table,), make)


def cosine_scale(attn: Foreign) -> Tensor:
    """Swin V2's scale [heads], at most 100."""
    logits = attn.logit_scale
    return derived(attn, "scale", (logits,), lambda: logits.clamp(max=math.log(100.0)).exp().flatten())


def attend_pooled(qkv: Tensor, heads: int, scale: float | None, pool: Callable[[Tensor], Tensor] | None) -> Tensor:
    """SAM 2's attention of pooled queries among the tokens of a map [B, h, w, 3 · H · D] → [B, h', w', H · D]."""
    if pool is None:
        return attend_all(qkv, heads, scale)
    q, k, v = qkv.chunk(3, -1)
    q = pool(q.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    grid = q.shape[1:3]
    q, k, v = (t.flatten(1, 2).unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    return merged_heads(attention(q, k, v, scale=scale), grid)


def pooled(x: Tensor, pool: nn.Module, conv: nn.Module, norm: nn.Module, act: nn.Module) -> Tensor:
    """PVT v2's pooled map for linear attention as tokens, act(norm(conv(pool(x)))); [B, H, W, D] → [B, M, D]."""
    return act(normalize(conv(pool(x.permute(0, 3, 1, 2))).flatten(2).transpose(1, 2), norm))


def merged(x: Tensor) -> Tensor:
    """Concatenates the channels of 2 × 2 tokens, padded with zeros: [B, H, W, C] → [B, ⌈H/2⌉, ⌈W/2⌉, 4·C]."""
    bottom = x.shape[1] % 2
    right = x.shape[2] % 2
    x = nn.functional.pad(x, (0, 0, 0, right, 0, bottom)) if bottom or right else x
    return x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).permute(0, 1, 3, 4, 2, 5).flatten(3)


def merge(x: Tensor, norm: nn.Module, reduction: Layer) -> Tensor:
    """Swin's patch merging: reduction(norm(merged(x))), with the norm folded into the reduction."""
    return finish(merged(x), reduction, norm)
