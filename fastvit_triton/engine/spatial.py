"""Bodies over a feature map x [B, H, W, D]: attention in windows or with reduced keys, and MLPs with a convolution.

Like `AttentionParts` and `MlpParts`, they describe modules of any library by their submodules, see `engine.body.Body`.
With a `grid` (H, W) they take and return tokens [B, H·W, D], which are viewed as a map where that matters.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn

from ..kernels.activation import ACTIVATIONS
from ..kernels.attention import attention
from ..kernels.attention_qkv import attention_qkv
from ..kernels.cost import Branch
from ..kernels.depthwise import depthwise
from ..kernels.fold import packed
from ..kernels.patch_embed import patch_embed, whole_patches
from ..kernels.window import reference, window_attention
from .body import Before, Given, Output, activate, finish, fold_or_normalize, project
from .freeze import derived
from .leaves import Foreign, Layer, is_depthwise_conv, is_patch_conv, is_readable, width_of


class Window(NamedTuple):
    """Windows of a feature map; see `kernels.window`.

    Attributes:
        size: (height, width) in tokens.
        shift: rows and columns by which the map is rolled first.
        pad_first: pad to whole windows, then roll (torchvision, transformers); else roll, then pad (timm).
        still: do not shift along an axis with a single window (torchvision).
    """

    size: tuple[int, int]
    shift: tuple[int, int] = (0, 0)
    pad_first: bool = True
    still: bool = False

    def shift_on(self, grid: tuple[int, ...]) -> tuple[int, int]:
        """The shift on a map of (H, W) tokens."""
        rows, columns = self.shift
        if not self.still:
            return rows, columns
        return rows * (grid[0] > self.size[0]), columns * (grid[1] > self.size[1])


class WindowParts(NamedTuple):
    """Submodules and settings of self-attention in windows.

    Attributes:
        projections: one projection packed as [3, heads, D], or those of queries, keys and values.
        proj: output projection.
        num_heads: heads.
        scale: softmax scale, or a tensor [heads] for the cosine attention of Swin V2.
        window: size and shift.
        bias: [heads, n, n], added to the scores of the n tokens of every window.
        drops: dropout after the output projection.
        grid: (H, W) if x is tokens [B, H·W, D]; None for a map.
    """

    projections: tuple[Layer, ...]
    proj: nn.Module | None
    num_heads: int
    scale: float | Tensor | None
    window: Window
    bias: Tensor | None = None
    drops: tuple[nn.Module | None] = (None,)
    grid: tuple[int, int] | None = None

    def entering(self) -> tuple[Layer, ...]:
        """The linear layers that read x."""
        return self.projections

    def sizes(self) -> Branch:
        """See `Body`."""
        width, channels = width_of(self.projections)
        height, columns = self.window.size
        return Branch("window_attention", 0, 0, channels, width, width // 3, self.num_heads, keys=height * columns)

    def __call__(
        self,
        x: Tensor,
        norm: Before | None = None,
        stats: Given | None = None,
        way: str = "reference",
        **end: Any,
    ) -> Output:
        """Attention of x [B, H, W, D] within windows, see `Body`."""
        qkv = as_map(project(x, self.projections, norm, stats, way), self.grid)
        o = as_tokens(self.attend(qkv, x.shape[-1]), self.grid)
        return finish(o, self.proj, None, *self.drops, way=way, **end)

    def attend(self, qkv: Tensor, channels: int, fused: bool = True) -> Tensor:
        """Attention without projections, which have this number of input channels; in PyTorch unless `fused`.

        [B, H, W, 3·heads·D] → [B, H, W, heads·D].
        """
        size, shift = self.window.size, self.window.shift_on(qkv.shape[1:3])
        pad = self.padded_token(qkv, channels) if qkv.shape[1] % size[0] or qkv.shape[2] % size[1] else None
        run = window_attention if fused else reference
        return run(qkv, self.num_heads, size, shift, self.bias, self.scale, pad, self.window.pad_first)

    def padded_token(self, qkv: Tensor, channels: int) -> Tensor | None:
        """The projections of a padded token, which is zero after the norm: [3·heads·D]."""
        if all(is_readable(layer) for layer in self.projections):
            return packed(*zip(*((layer.weight, layer.bias) for layer in self.projections), strict=True))[1]
        return project(qkv.new_zeros(1, channels), self.projections)[0]


class ReducedParts(NamedTuple):
    """Submodules of attention whose keys and values come from a smaller feature map (PVT, Twins, SegFormer).

    Attributes:
        q: projection of the queries.
        kv: one projection packed as [2, heads, D], or those of keys and values.
        proj: output projection.
        num_heads: heads.
        scale: softmax scale.
        reduce: convolution with stride equal to its kernel size, or a function of the normalised x [B, H, W, D] that
            returns tokens [B, M, D]; None for keys and values of all tokens.
        norm: after the reduction.
        ratio: side of x divided by that of the smaller map.
        drops: dropout after the output projection.
        grid: (H, W) if x is tokens [B, H·W, D]; None for a map.
    """

    q: Layer
    kv: tuple[Layer, ...]
    proj: nn.Module | None
    num_heads: int
    scale: float | None
    reduce: Foreign | None = None
    norm: nn.Module | None = None
    ratio: int = 1
    drops: tuple[nn.Module | None] = (None,)
    grid: tuple[int, int] | None = None

    def entering(self) -> tuple[Layer, ...]:
        """The linear layers that read x; none if the reduction reads it, too."""
        return (self.q, *self.kv) if self.reduce is None else ()

    def sizes(self) -> Branch:
        """See `Body`."""
        inner, channels = width_of((self.q,))
        if self.reduce is None:
            return Branch("attention", 0, 0, channels, 3 * inner, inner, self.num_heads)
        keys = max(self.ratio, 2) ** 2
        return Branch("reduced_attention", 0, 0, channels, inner + 2 * inner // keys, inner, self.num_heads, keys=keys)

    def __call__(
        self,
        x: Tensor,
        norm: Before | None = None,
        stats: Given | None = None,
        way: str = "reference",
        **end: Any,
    ) -> Output:
        """Attention of x [B, H, W, D] to its reduced map, see `Body`."""
        if self.reduce is None:
            qkv = project(x, (self.q, *self.kv), norm, stats, way).flatten(1, -2)
            o = attention_qkv(qkv, self.num_heads, self.scale)
        else:
            q = project(x, (self.q,), None, None, way).flatten(1, -2)
            small, before = fold_or_normalize(reduced_map(self.reduce, as_map(x, self.grid)), self.norm, self.kv, way)
            kv = project(small, self.kv, before, None, way)
            q, k, v = (
                t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, *kv.chunk(2, -1))
            )  # [B, heads, N or M, D]
            o = attention(q, k, v, scale=self.scale).transpose(1, 2).flatten(2)
        return finish(o.unflatten(1, x.shape[1:-1]), self.proj, None, *self.drops, way=way, **end)


def reduced_map(reduce: Foreign, x: Tensor) -> Tensor:
    """The smaller map of x [B, H, W, D] as tokens [B, M, D]."""
    image = x.permute(0, 3, 1, 2)
    if is_patch_conv(reduce):
        return patch_embed(whole_patches(image, reduce.stride), reduce.weight, reduce.bias)
    return reduce(image).flatten(2).transpose(1, 2) if isinstance(reduce, nn.Module) else reduce(x)


class DepthwiseMlpParts(NamedTuple):
    """Submodules of an MLP with a depthwise convolution between its layers (PVT v2, SegFormer): fc2(act(conv(fc1 x))).

    Attributes:
        fc1: first layer.
        conv: depthwise convolution that keeps the size of the map.
        act: a name in `kernels.activation.ACTIVATIONS`, or a module to call.
        fc2: last layer.
        drops: dropouts after the activation and after fc2.
        relu: True for a ReLU after fc1, too (PVT v2 with linear attention).
        grid: (H, W) if x is tokens [B, H·W, D]; None for a map.
    """

    fc1: Layer
    conv: Foreign
    act: str | nn.Module
    fc2: Layer
    drops: tuple[nn.Module | None, nn.Module | None] = (None, None)
    relu: bool = False
    grid: tuple[int, int] | None = None

    def entering(self) -> tuple[Layer, ...]:
        """The linear layers that read x."""
        return (self.fc1,)

    def sizes(self) -> Branch:
        """See `Body`."""
        width, channels = width_of((self.fc1,))
        return Branch("depthwise_mlp", 0, 0, channels, width, width)

    def __call__(
        self,
        x: Tensor,
        norm: Before | None = None,
        stats: Given | None = None,
        way: str = "reference",
        **end: Any,
    ) -> Output:
        """MLP of x [B, H, W, D], see `Body`."""
        h = as_map(project(x, (self.fc1,), norm, stats, way), self.grid)
        h = h.relu() if self.relu else h
        name = self.act if isinstance(self.act, str) else None
        if is_depthwise_conv(self.conv):
            h = depthwise(h, taps_of(self.conv), self.conv.bias, activation=name)
        else:
            h = self.conv(h.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
            h = h if name is None else ACTIVATIONS[name](h)
        h = as_tokens(h, self.grid)
        h = h if name is not None else activate(h, self.act)
        inner, outer = self.drops
        return finish(h if inner is None else inner(h), self.fc2, None, outer, way=way, **end)


def taps_of(conv: Foreign) -> Tensor:
    """Weight [C, 1, K, K] of a depthwise convolution, in the memory layout that `depthwise` reads without a copy."""
    weight = conv.weight
    taps = derived(conv, "taps", (weight,), lambda: weight.flatten(1).t().contiguous())
    return taps.t().unflatten(1, weight.shape[2:]).unsqueeze(1)


def as_map(x: Tensor, grid: tuple[int, int] | None) -> Tensor:
    """Tokens x [B, H·W, D] of a grid as a map [B, H, W, D]; x itself without a grid."""
    return x if grid is None else x.unflatten(1, tuple(grid))


def as_tokens(x: Tensor, grid: tuple[int, int] | None) -> Tensor:
    """The reverse of `as_map`."""
    return x if grid is None else x.flatten(1, 2)
