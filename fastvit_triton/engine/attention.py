"""Bodies of attention: among all tokens, in windows, or to a smaller map; what runs between the projections.

Windows and reduced keys are those of a feature map x [B, H, W, D]. With a `grid` (H, W) these bodies take and return
tokens [B, H·W, D], which are viewed as a map where that matters.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels import attention_qkv as attention_qkv_file
from ..kernels.argument import Norm, Varlen, Window
from ..kernels.attention import attention
from ..kernels.attention_qkv import Rope, attention_qkv, rotate
from ..kernels.fold import packed
from ..kernels.patch_embed import patch_embed, whole_patches
from ..kernels.sizes import Branch
from ..kernels.window import reference, window_attention
from .body import Body, fold_or_normalize, project
from .leaves import Foreign, Layer, Packed, is_patch_conv, is_readable, norm_of, width_of


@dataclass(frozen=True, eq=False)
class DenseHeads:
    """Self-attention among all tokens, from packed projections."""

    num_heads: int  # H
    scale: float | None  # softmax scale; None for 1 / √d
    bias: Tensor | None = None  # added to the scores, or boolean with True for "attend"; see `kernels.attention`
    # (cos, sin, pairs), tables that broadcast to [B, H, N − T, D]; the first T tokens are not rotated
    rope: Rope | None = None
    norms: tuple[nn.Module, nn.Module] | None = None  # norms of each head's queries and keys
    varlen: Varlen | None = None  # boundaries of images; all tokens are then one sequence
    causal: bool = False  # tokens see only themselves and earlier tokens

    def sizes(self, body: Body) -> Branch:
        """See `engine.body.Body`."""
        width, channels = width_of(body.projections)
        if self.varlen is not None:
            # a trace reads no lengths
            keys = 0 if torch.compiler.is_compiling() else self.varlen.max_seqlen or 0
            return Branch("window_attention", 0, 0, channels, width, width // 3, self.num_heads, keys=keys)
        return Branch("attention", 0, 0, channels, width, width // 3, self.num_heads)

    def learns_bias(self, x: Tensor, width: int) -> bool:
        """See `engine.body.Body`."""
        bare = self.bias is self.rope is self.norms is self.varlen is None
        return bare and attention_qkv_file.learns_bias(x, self.num_heads, width // (3 * self.num_heads), self.causal)

    def __call__(self, qkv: Tensor, qkv_bias: Tensor | None = None) -> Tensor:
        """Attention without projections: [B, N, 3·H·d] → [B, N, H·d]; of `qkv_bias` only the gradient is computed."""
        if qkv_bias is not None:
            return attention_qkv_file.run_with_bias(qkv, self.num_heads, self.scale, self.causal, qkv_bias)
        q_norm, k_norm = (None, None) if self.norms is None else map(norm_of, self.norms)
        if self.varlen is not None:
            return self._attend_packed(qkv.flatten(0, -2), q_norm, k_norm).view(*qkv.shape[:-1], -1)
        rope = None if self.rope is None else _of_all(self.rope, qkv.shape[1])
        prefix = 0 if rope is None else qkv.shape[1] - rope[0].shape[-2]
        if self.norms is None or (q_norm is not None and k_norm is not None):
            options = q_norm, k_norm, rope, prefix, self.bias
            return attention_qkv(qkv, self.num_heads, self.scale, *options, causal=self.causal)
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, N, d]
        q, k = (norm(t) for norm, t in zip(self.norms, (q, k), strict=True))
        if rope is not None:
            q, k = (rotate(t, rope, prefix).to(v.dtype) for t in (q, k))
        return attention(q, k, v, self.bias, self.scale, causal=self.causal).transpose(1, 2).flatten(2)

    def _attend_packed(self, qkv: Tensor, q_norm: Norm | None, k_norm: Norm | None) -> Tensor:
        """Attention within images: [T, 3·H·d] → [T, H·d]."""
        if self.norms is not None and (q_norm is None or k_norm is None):
            q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).unbind(1)  # [T, H, d]
            q, k = (norm(t) for norm, t in zip(self.norms, (q, k), strict=True))
            qkv = torch.stack((q, k, v), 1).flatten(1)
            q_norm = None
            k_norm = None
        options = q_norm, k_norm, self.rope
        return attention_qkv(qkv, self.num_heads, self.scale, *options, varlen=self.varlen, causal=self.causal)


def attention_body(
    projections: tuple[Layer, ...],
    proj: Layer | None,
    num_heads: int,
    scale: float | None,
    bias: Tensor | None = None,
    rope: Rope | None = None,
    norms: tuple[nn.Module, nn.Module] | None = None,
    first: nn.Module | None = None,
    last: nn.Module | None = None,
    drops: tuple[nn.Module | None] = (None,),
    varlen: Varlen | None = None,
    causal: bool = False,
) -> Body:
    """The body of a self-attention, whose `drops` follow the output projection; others as in `Body` and `DenseHeads`.

    `projections` are one, packed as [3, H, D], or those of queries, keys and values. With `varlen` x may be [T, D].
    """
    name = "attention" if varlen is None else "window attention"
    heads = DenseHeads(num_heads, scale, bias, rope, norms, varlen, causal)
    return Body(name, projections, heads, proj, num_heads, first=first, last=last, drops=drops)


def _of_all(rope: Rope, tokens: int) -> Rope:
    """The rotary tables; in a trace in which their size is a value, they are those of all tokens."""
    if not torch.compiler.is_compiling():
        return rope
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true  # imported by every trace

    cos, sin, pairs = rope
    same = cos.shape[-2] == tokens
    if guard_or_false(same) or not guard_or_true(same):
        return rope
    torch._check(same)
    cos, sin = (t.reshape(*t.shape[:-2], tokens, t.shape[-1]) for t in (cos, sin))
    return cos, sin, pairs


@dataclass(frozen=True, eq=False)
class WindowHeads:
    """Self-attention in windows, from packed projections."""

    projections: tuple[Layer, ...]  # those whose outputs are given, which say what a padded token gives
    num_heads: int  # heads
    scale: float | Tensor | None  # softmax scale, or a tensor [heads] for the cosine attention of Swin V2
    window: Window  # size and shift
    bias: Tensor | None = None  # [heads, n, n], added to the scores of the n tokens of every window
    grid: tuple[int, int] | None = None  # (H, W) if x is tokens [B, H·W, D]; None for a map
    takes_input: ClassVar[bool] = True

    def sizes(self, body: Body) -> Branch:
        """See `engine.body.Body`."""
        width, channels = width_of(body.projections)
        height, columns = self.window.size
        keys = index(height * columns)  # int leaves a size symbolic in a trace
        return Branch("window_attention", 0, 0, channels, width, width // 3, self.num_heads, keys=keys)

    def __call__(self, qkv: Tensor, x: Tensor, way: str) -> Tensor:
        """Projections [B, H, W, 3·heads·D] of x [B, H, W, C] → [B, H, W, heads·D]."""
        return as_tokens(self.attend(as_map(qkv, self.grid), x.shape[-1]), self.grid)

    def attend(self, qkv: Tensor, channels: int, fused: bool = True) -> Tensor:
        """Attention without projections, which have this number of input channels; in PyTorch unless `fused`.

        [B, H, W, 3·heads·D] → [B, H, W, heads·D].
        """
        size = self.window.size
        shift = self.window.shift_on(qkv.shape[1:3])
        pad = self.padded_token(qkv, channels) if qkv.shape[1] % size[0] or qkv.shape[2] % size[1] else None
        run = window_attention if fused else reference
        return run(qkv, self.num_heads, size, shift, self.bias, self.scale, pad, self.window.pad_first)

    def padded_token(self, qkv: Tensor, channels: int) -> Tensor | None:
        """The projections of a padded token, which is zero after the norm: [3·heads·D]."""
        if all(is_readable(layer) for layer in self.projections):
            return packed(*zip(*((layer.weight, layer.bias) for layer in self.projections), strict=True))[1]
        return project(qkv.new_zeros(1, channels), self.projections)[0]


def window_body(
    projections: tuple[Layer, ...],
    proj: Layer | None,
    num_heads: int,
    scale: float | Tensor | None,
    window: Window,
    bias: Tensor | None = None,
    drops: tuple[nn.Module | None] = (None,),
    grid: tuple[int, int] | None = None,
) -> Body:
    """The body of a self-attention in windows; for the arguments see `Body` and `WindowHeads`."""
    heads = WindowHeads(projections, num_heads, scale, window, bias, grid)
    return Body("window attention", projections, heads, proj, num_heads, drops=drops)


@dataclass(frozen=True, eq=False)
class ReducedHeads:
    """Attention whose keys and values come from a smaller feature map (PVT, Twins, SegFormer)."""

    q: Layer  # projection of the queries
    kv: tuple[Layer, ...]  # one projection packed as [2, heads, D], or those of keys and values
    num_heads: int  # heads
    scale: float | None  # softmax scale
    # convolution with stride equal to its kernel size, or a function of the normalised x [B, H, W, D] that returns
    # tokens [B, M, D]; None for keys and values of all tokens
    reduce: Foreign | None = None
    norm: nn.Module | None = None  # after the reduction
    ratio: int = 1  # side of x divided by that of the smaller map
    grid: tuple[int, int] | None = None  # (H, W) if x is tokens [B, H·W, D]; None for a map
    takes_input: ClassVar[bool] = True

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The projections of queries, keys and values."""
        return (self.q, *self.kv)

    def sizes(self, body: Body) -> Branch:
        """See `engine.body.Body`."""
        inner, channels = width_of((self.q,))
        if self.reduce is None:
            return Branch("attention", 0, 0, channels, 3 * inner, inner, self.num_heads)
        keys = max(self.ratio, 2) ** 2
        return Branch("reduced_attention", 0, 0, channels, inner + 2 * inner // keys, inner, self.num_heads, keys=keys)

    def __call__(self, qkv: Tensor, x: Tensor, way: str) -> Tensor:
        """Packed projections of x [B, H, W, D], or x itself if there is a reduction → [B, H, W, heads·D]."""
        if self.reduce is None:
            o = attention_qkv(qkv.flatten(1, -2), self.num_heads, self.scale)
        else:
            q = project(x, (self.q,), None, None, way).flatten(1, -2)
            small, before = fold_or_normalize(reduced_map(self.reduce, as_map(x, self.grid)), self.norm, self.kv, way)
            kv = project(small, self.kv, before, None, way)
            q, k, v = (
                t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, *kv.chunk(2, -1))
            )  # [B, heads, N or M, D]
            o = attention(q, k, v, scale=self.scale).transpose(1, 2).flatten(2)
        return o.unflatten(1, x.shape[1:-1])


def reduced_body(
    q: Layer,
    kv: tuple[Layer, ...],
    proj: Layer | None,
    num_heads: int,
    scale: float | None,
    reduce: Foreign | None = None,
    norm: nn.Module | None = None,
    ratio: int = 1,
    drops: tuple[nn.Module | None] = (None,),
    grid: tuple[int, int] | None = None,
) -> Body:
    """The body of an attention to a smaller feature map; for the arguments see `Body` and `ReducedHeads`."""
    heads = ReducedHeads(q, kv, num_heads, scale, reduce, norm, ratio, grid)
    name = "attention" if reduce is None else "reduced attention"
    return Body(name, heads.layers if reduce is None else (), heads, proj, num_heads, drops=drops)


def reduced_map(reduce: Foreign, x: Tensor) -> Tensor:
    """The smaller map of x [B, H, W, D] as tokens [B, M, D]."""
    image = x.permute(0, 3, 1, 2)
    if is_patch_conv(reduce):
        return patch_embed(whole_patches(image, reduce.stride), reduce.weight, reduce.bias)
    return reduce(image).flatten(2).transpose(1, 2) if isinstance(reduce, nn.Module) else reduce(x)


def axis_bias(q: Tensor, tables: Iterable[Tensor], grid: Sequence[int]) -> tuple[Tensor, Tensor]:
    """q · embeddings of the distances in rows and of those in columns, also SAM's and MViT v2's bias.

    Args:
        q: [B, H, h · w, D].
        tables: embeddings of the rows of queries and keys [h, h', D], and of the columns [w, w', D].
        grid: (h, w).

    Returns:
        `axis_bias` of `kernels.attention`: [B, H, h · w, h'] and [B, H, h · w, w'].
    """
    q, (rows, columns) = q.unflatten(2, tuple(grid)), tables
    row = torch.einsum("bnhwc,hkc->bnhwk", q, rows)
    column = torch.einsum("bnhwc,wkc->bnhwk", q, columns)
    return row.flatten(2, 3), column.flatten(2, 3)


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


def as_map(x: Tensor, grid: tuple[int, int] | None) -> Tensor:
    """Tokens x [B, H·W, D] of a grid as a map [B, H, W, D]; x itself without a grid."""
    return x if grid is None else x.unflatten(1, tuple(grid))


def as_tokens(x: Tensor, grid: tuple[int, int] | None) -> Tensor:
    """The reverse of `as_map`."""
    return x if grid is None else x.flatten(1, 2)


def mix_heads(layer: Layer, maps: Tensor) -> Tensor:
    """A linear layer H → H over the heads of maps [B, H, N, N]."""
    if (type(layer) is not Packed and not is_readable(layer)) or layer.bias is None:
        return layer(maps.movedim(1, -1)).movedim(-1, 1)
    weight = layer.weight.expand(maps.shape[0], -1, -1)
    return torch.baddbmm(layer.bias[None, :, None], weight, maps.flatten(2)).view_as(maps)
