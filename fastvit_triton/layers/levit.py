"""Layers of LeViT: attention with keys narrower than values and a bias by distance. Parameter names are timm's.

Source: LeViT, arXiv:2104.01136, sections 4.2 to 4.5.
"""

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..engine.attention import merged_heads
from ..engine.body import Body, finish, project
from ..engine.branch import Branch, add_branches
from ..engine.freeze import derived
from ..engine.hooks import can_fuse, has_hooks
from ..engine.leaves import activation_of
from ..engine.mlp import MlpBody
from ..engine.parted import Parted
from ..engine.replay import call_block
from ..kernels.attention import attention
from ..kernels.cost import Branch as Sizes
from .block import Blocks
from .drop_path import DropPath
from .normed import ConvNorm, LinearNorm, normed
from .window import expand_table

Grid = tuple[int, int]


class DistanceAttention(Parted):
    """Self-attention of the tokens of a grid, with a learned bias per head, |Δrow| and |Δcolumn| (eq. 2).

    The projection holds the queries, keys and values of the first head, then those of the second.

    Args:
        dim: D, channels.
        key_dim: channels of a key.
        num_heads: H.
        ratio: channels of a value divided by those of a key.
        grid: (rows, columns) of tokens.
    """

    def __init__(self, dim: int, key_dim: int, num_heads: int, ratio: float, grid: Grid) -> None:
        super().__init__()
        self.num_heads, self.key_dim, self.val_dim = num_heads, key_dim, int(ratio * key_dim)
        self.scale, self.grid = key_dim**-0.5, grid
        self.qkv = LinearNorm(dim, num_heads * (2 * key_dim + self.val_dim))
        self.proj: Any = last_layer(num_heads * self.val_dim, dim, 0.0)
        self.attention_biases = nn.Parameter(torch.zeros(num_heads, grid[0] * grid[1]))

    def entering(self) -> tuple[LinearNorm]:
        """The layer applied to x."""
        return (self.qkv,)

    def sizes(self) -> Sizes:
        """See `engine.body.Body`."""
        weight = self.qkv.linear.weight
        return Sizes("attention", 0, 0, weight.shape[1], len(weight), self.num_heads * self.val_dim, self.num_heads)

    def parts(self) -> Body:
        """Its submodules as `Body`; a BatchNorm is folded into its layer as `normed` says."""
        if has_hooks(self.proj):
            return Body("attention", (normed(self.qkv),), self.attend, self.proj, self.num_heads)
        layers = (normed(self.qkv),), lambda qkv: self.proj.act(self.attend(qkv)), normed(self.proj.ln)
        return Body("attention", *layers, self.num_heads)

    def plain(self, x: Tensor) -> Tensor:
        """[B, N, D] → [B, N, D]."""
        return self.proj(self.attend(self.qkv(x)))

    def attend(self, qkv: Tensor) -> Tensor:
        """Projections [B, N, H · (2 · D + Dv)] → [B, N, H · Dv]."""
        sizes: list[int] = [self.key_dim, self.key_dim, self.val_dim]
        q, k, v = qkv.unflatten(-1, (self.num_heads, -1)).transpose(1, 2).split(sizes, -1)
        return merged_heads(attended(q, k, v, self.get_attention_biases()[None], self.scale), qkv.shape[1:-1])

    def get_attention_biases(self, device: torch.device | None = None) -> Tensor:
        """The bias of every pair of tokens [H, N, N]; cached if the model is frozen."""
        table = self.attention_biases
        return derived(self, "bias", (table,), lambda: distance_table(table, self.grid))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, key_dim={self.key_dim}, val_dim={self.val_dim}"


class DistanceDownsample(nn.Module):
    """Attention whose queries are every other row and column of the grid; it has no residual.

    Args:
        dim: D, channels.
        out: D', channels of the result.
        key_dim: channels of a key; values have 4 times as many.
        grid: (rows, columns) of tokens.
    """

    def __init__(self, dim: int, out: int, key_dim: int, grid: Grid) -> None:
        super().__init__()
        self.num_heads, self.key_dim, self.val_dim = dim // key_dim, key_dim, 4 * key_dim
        self.scale, self.grid = key_dim**-0.5, grid
        inner = self.num_heads * key_dim
        self.kv = LinearNorm(dim, inner + self.num_heads * self.val_dim)
        self.q: Any = nn.Sequential(OrderedDict(down=Subsample(grid), ln=LinearNorm(dim, inner)))
        self.proj: Any = last_layer(self.num_heads * self.val_dim, out, 1.0)
        self.attention_biases = nn.Parameter(torch.zeros(self.num_heads, grid[0] * grid[1]))

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, D] → [B, N', D']."""
        if not can_fuse(x) or has_hooks(self.q) or has_hooks(self.proj):
            return self.proj(self.attend(self.q(x), self.kv(x)))
        q, kv = project(self.q.down(x), (normed(self.q.ln),)), project(x, (normed(self.kv),))
        return finish(self.proj.act(self.attend(q, kv)), normed(self.proj.ln))

    def attend(self, q: Tensor, kv: Tensor) -> Tensor:
        """Queries [B, N', H · D], keys and values [B, N, H · (D + Dv)] → [B, N', H · Dv]."""
        q, kv = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, kv))
        k, v = kv.split([self.key_dim, self.val_dim], -1)
        o = attended(q, k, v, self.get_attention_biases()[None], self.scale)
        return o.transpose(1, 2).flatten(2)

    def get_attention_biases(self, device: torch.device | None = None) -> Tensor:
        """The bias of every query and key [H, N', N]; cached if the model is frozen."""
        table, (rows, columns) = self.attention_biases, self.grid

        def every_other() -> Tensor:
            pairs = distance_table(table, self.grid).unflatten(1, (rows, columns))
            return pairs[:, ::2, ::2].flatten(1, 2)

        return derived(self, "bias", (table,), every_other)


class Subsample(nn.Module):
    """Every other row and column of a grid."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.grid = grid

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, D] → [B, N', D]."""
        return x.unflatten(1, self.grid)[:, ::2, ::2].flatten(1, 2)


class NormedMlp(Parted):
    """Two linear layers with a BatchNorm each, and an activation between them.

    Args:
        dim: D, channels.
        hidden: inner channels.
        drop: dropout after the activation.
    """

    def __init__(self, dim: int, hidden: int, drop: float = 0.0) -> None:
        super().__init__()
        self.ln1, self.act, self.drop = LinearNorm(dim, hidden), nn.Hardswish(), nn.Dropout(drop)
        self.ln2 = LinearNorm(hidden, dim, 0.0)

    def entering(self) -> tuple[LinearNorm]:
        """The layer applied to x."""
        return (self.ln1,)

    def sizes(self) -> Sizes:
        """See `engine.body.Body`."""
        hidden, channels = self.ln1.linear.weight.shape
        return Sizes("mlp", 0, 0, channels, hidden, hidden)

    def parts(self) -> MlpBody:
        """Its submodules as `MlpBody`; a BatchNorm is folded into its layer as `normed` says."""
        fc1, fc2 = normed(self.ln1), normed(self.ln2)
        return MlpBody((fc1,), activation_of(self.act), fc2, (self.drop, None))

    def plain(self, x: Tensor) -> Tensor:
        """[B, N, D] → [B, N, D]."""
        return self.ln2(self.drop(self.act(self.ln1(x))))


class NormedBlock(nn.Module):
    """x + f(x) for f = attention, then MLP, whose norms are within them.

    Args:
        attn: maps [B, N, D] to [B, N, D].
        mlp: as attn.
        drop_path: probability of skipping each branch.
    """

    def __init__(self, attn: nn.Module, mlp: nn.Module, drop_path: float = 0.0) -> None:
        super().__init__()
        self.attn, self.drop_path1, self.mlp, self.drop_path2 = attn, DropPath(drop_path), mlp, DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, D] → [B, N, D]."""
        return call_block(NormedBlock._run, self, x)

    def _run(self, x: Tensor) -> Tensor:
        attn = Branch(self.attn, None, None, self.drop_path1)
        return add_branches(x, attn, Branch(self.mlp, None, None, self.drop_path2), block=self)


class LevitDownsample(nn.Module):
    """Attention that halves the grid, then an MLP with a residual."""

    def __init__(self, attn: DistanceDownsample, mlp: NormedMlp, drop_path: float = 0.0) -> None:
        super().__init__()
        self.attn_downsample, self.mlp, self.drop_path = attn, mlp, DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, D] → [B, N', D']."""
        return call_block(LevitDownsample._run, self, self.attn_downsample(x))

    def _run(self, x: Tensor) -> Tensor:
        return add_branches(x, Branch(self.mlp, None, None, self.drop_path), block=self)


class LevitStage(nn.Module):
    """A downsampling, an Identity in the first stage, and blocks; the map that it returns has the size `grid`."""

    def __init__(self, downsample: nn.Module, blocks: Blocks, grid: Grid) -> None:
        super().__init__()
        self.downsample, self.blocks, self.grid = downsample, blocks, grid

    def forward(self, x: Tensor, recompute: bool = False) -> Tensor:
        """[B, H, W, D] → [B, H', W', D']."""
        return self.blocks(self.downsample(x.flatten(1, 2)), recompute=recompute).unflatten(1, self.grid)


def stem(in_chans: int, dim: int, stride: int) -> nn.Sequential:
    """Convolutions with stride 2, 4 for a total stride of 16, whose channels double up to D; [B, C, H, W] → map."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    count = stride.bit_length() - 1
    widths = [in_chans, *(dim >> i for i in reversed(range(count)))]
    for i in range(count):
        layers[f"conv{i + 1}"] = ConvNorm(widths[i], widths[i + 1], 3, 2, 1)
        if i + 1 < count:
            layers[f"act{i + 1}"] = nn.Hardswish()
    return nn.Sequential(layers)


def last_layer(inputs: int, outputs: int, scale: float) -> nn.Sequential:
    """The activation and the layer after attention."""
    return nn.Sequential(OrderedDict(act=nn.Hardswish(), ln=LinearNorm(inputs, outputs, scale)))


def attended(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Attention with the bias added to the scores, [B, H, N', Dv]."""
    if can_fuse(q):
        return attention(q, k, v, bias, scale)
    return F.scaled_dot_product_attention(q, k, v, bias.to(q.dtype), scale=scale)


def distance_table(table: Tensor, grid: Grid) -> Tensor:
    """Biases of all distances [H, rows · columns] → those of all pairs of tokens [H, N, N]."""
    table = table.unflatten(1, grid)
    table = torch.cat((table[:, 1:].flip(1), table), 1)
    table = torch.cat((table[:, :, 1:].flip(2), table), 2)  # of all offsets, [H, 2 · rows − 1, 2 · columns − 1]
    return expand_table(table.permute(1, 2, 0).flatten(0, 1), grid)
