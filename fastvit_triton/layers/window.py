"""Layers of Swin: attention in windows, and the merging of patches. Parameter names are timm's."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels import window as window_file
from ..kernels.argument import Window
from .fusable import Fusable


class WindowAttention(Fusable):
    """Self-attention within the windows of a feature map (Swin, arXiv:2103.14030, section 3.2).

    `relative_bias` adds a learned bias per head and offset between two tokens (eq. 4). While probabilities are dropped,
    PyTorch computes the attention.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window: Window,
        qkv_bias: bool = True,
        relative_bias: bool = True,
        proj_drop: float = 0.0,
        attn_drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.window = window
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)
        self.relative_position_bias_table = None
        if relative_bias:
            rows, columns = (2 * side - 1 for side in window.size)
            self.relative_position_bias_table = nn.Parameter(torch.empty(rows * columns, num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.relative_position_bias_table is not None:
            nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, H, W, D] → [B, H, W, D]."""
        return self.proj_drop(self.proj(self.attend(self.qkv(x))))

    def attend(self, qkv: Tensor) -> Tensor:
        """Packed projections [B, H, W, 3·heads·d] → the heads' outputs [B, H, W, heads·d]."""
        (h, w), shift = self.window.size, self.window.shift_on(qkv.shape[1:3])
        pad = self.padded_token(qkv) if qkv.shape[1] % h or qkv.shape[2] % w else None
        if self.attn_drop.training and self.attn_drop.p > 0:
            return self._attend_with_dropout(qkv, shift, pad)
        window = self.num_heads, self.window.size, shift, self.bias(), self.scale, pad, self.window.pad_first
        return window_file.reference(qkv, *window)

    def padded_token(self, qkv: Tensor) -> Tensor | None:
        """The projections of a padded token, which is zero: [3·heads·d]."""
        layer = self.qkv
        if type(layer) is nn.Linear and not (layer._forward_hooks or layer._forward_pre_hooks):
            return layer.bias
        return layer(qkv.new_zeros(1, self.proj.out_features))[0]

    def bias(self) -> Tensor | None:
        """The bias of every pair of tokens, [heads, n, n]."""
        table = self.relative_position_bias_table
        return None if table is None else expand_table(table, self.window.size)

    def _attend_with_dropout(self, qkv: Tensor, shift: tuple[int, int], pad: Tensor | None) -> Tensor:
        """`attend`, with dropout on the probabilities; rolls, then pads, as timm."""
        (B, H, W, _), (h, w), (sy, sx) = qkv.shape, self.window.size, shift
        x = window_file._padded(qkv.roll((-sy, -sx), (1, 2)), -H % h, -W % w, pad)
        rows = x.shape[1] // h
        columns = x.shape[2] // w
        split = x.unflatten(2, (columns, w)).unflatten(1, (rows, h)).unflatten(-1, (3, self.num_heads, -1))
        split = split.permute(5, 0, 1, 3, 6, 2, 4, 7).flatten(5, 6).flatten(1, 3)
        q, k, v = split.unbind()  # [B·windows, heads, h·w, d]
        mask = self.bias()
        if sy or sx:
            apart = window_file._apart(x, (h, w), shift).repeat(B, 1, 1).unsqueeze(1)
            mask = apart if mask is None else mask + apart
        mask = None if mask is None else mask.to(q.dtype)
        o = F.scaled_dot_product_attention(q, k, v, mask, self.attn_drop.p, scale=self.scale)
        o = o.unflatten(2, (h, w)).unflatten(0, (B, rows, columns)).permute(0, 1, 4, 2, 5, 3, 6)
        return o.flatten(5).flatten(3, 4).flatten(1, 2)[:, :H, :W].roll((sy, sx), (1, 2))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, size={self.window.size}, shift={self.window.shift}"


class PatchMerging(Fusable):
    """Concatenates 2 x 2 tokens and projects them to 2·D channels (Swin, arXiv:2103.14030, section 3.1)."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim, eps=eps)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, H, W, D] → [B, ⌈H / 2⌉, ⌈W / 2⌉, 2·D]; a missing row or column is zero."""
        height, width = x.shape[1:3]
        if height % 2 or width % 2:
            x = F.pad(x, (0, 0, 0, width % 2, 0, height % 2))
        x = x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))  # [B, H / 2, 2, W / 2, 2, D]
        x = x.permute(0, 1, 3, 4, 2, 5).flatten(3)  # columns before rows, as in the authors' code
        return self.reduction(self.norm(x))


def expand_table(table: Tensor, size: tuple[int, int]) -> Tensor:
    """Biases of all offsets within a window of (h, w) tokens [(2·h − 1)·(2·w − 1), heads] → [heads, h·w, h·w].

    The middle row is that of a token with itself; queries come before keys in the result. Views and a copy, not an
    index, because the gradient of indexing is not the same in every run on a CPU.
    """
    h, w = size
    pairs = table.unflatten(0, (2 * h - 1, 2 * w - 1)).unfold(0, h, 1).unfold(1, w, 1)  # [h, w, heads, h, w]
    return pairs.flip(-2, -1).permute(2, 0, 1, 3, 4).reshape(-1, h * w, h * w)


def resize_table(table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Interpolates the biases of all offsets [(2·h − 1)·(2·w − 1), heads] from a window (h, w) to another.

    As timm's `resize_rel_pos_bias_table`: offsets of the old window are placed at distances that grow geometrically, so
    that both tables span the same range and near offsets keep their bias (microsoft/unilm,
    beit/run_class_finetuning.py); between them it is bilinear.
    """
    if old == new:
        return table
    rows, columns = (_weights(2 * a - 1, 2 * b - 1).to(table.device) for a, b in zip(old, new, strict=True))
    grid = table.float().unflatten(0, (2 * old[0] - 1, 2 * old[1] - 1))
    return torch.einsum("ra,cb,abh->rch", rows, columns, grid).flatten(0, 1).to(table)


def _weights(old: int, new: int) -> Tensor:
    """Weights [new, old] of linear interpolation from one axis of a table to another."""
    if old == 1:
        return torch.ones(new, 1)
    half = old // 2
    ratio = _ratio(half, new // 2)
    steps = [sum(ratio**i for i in range(n + 1)) for n in range(half)]
    at = torch.tensor([-d for d in reversed(steps)] + [0.0] + steps)
    to = torch.arange(new) - float(new // 2)
    right = torch.bucketize(to, at).clamp(1, old - 1)
    share = ((to - at[right - 1]) / (at[right] - at[right - 1])).clamp(0, 1)[:, None]
    one = torch.eye(old)
    return (1 - share) * one[right - 1] + share * one[right]


def _ratio(terms: int, total: int) -> float:
    """The ratio in (1.01, 1.5) of a geometric series of that many terms with this total, by bisection as in timm."""
    low = 1.01
    high = 1.5
    ratio = 1.5
    while high - low > 1e-6:
        ratio = (low + high) / 2
        if (1 - ratio**terms) / (1 - ratio) > total:
            high = ratio
        else:
            low = ratio
    return ratio
