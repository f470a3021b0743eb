"""Bodies of residual branches: attention and MLP, described by their submodules (`AttentionParts`, `MlpParts`).

A submodule whose weights can be read is fused into a kernel call; any other is called as a module.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..kernels import linear as linear_file
from ..kernels import mlp as mlp_file
from ..kernels.activation import GATED, apply_activation
from ..kernels.argument import NextNorm, Norm, Normalized, Varlen
from ..kernels.attention import attention
from ..kernels.attention_qkv import Rope, attention_qkv, rotate
from ..kernels.cost import Branch
from ..kernels.fold import packed
from ..kernels.layer_norm import layer_norm, scaled
from ..kernels.linear import linear
from ..kernels.mlp import mlp
from ..kernels.rms_norm import rms_norm
from .freeze import FoldedNorm, fold_norms, operands
from .hooks import can_fuse, has_hooks
from .leaves import Layer, entry_of, is_identity, is_inactive, is_readable, norm_of, width_of

Before = FoldedNorm | Norm
Given = Tensor | Normalized
Output = Any  # a tensor; with `return_stats` or `next_norm` the tuple (tensor, Given | None)


class Body(Protocol):
    """A body that supports fusion: `AttentionParts`, `MlpParts`, and our modules with a method `entering`."""

    def entering(self) -> tuple[Layer, ...]:
        """The linear layers applied to x, into which a norm may be folded; empty if x has other readers."""

    def sizes(self) -> Branch:
        """Sizes for the cost model; the numbers of images and tokens are 0."""

    def __call__(
        self,
        x: Tensor,
        *,
        norm: Before | None = None,
        stats: Given | None = None,
        way: str = "reference",
        **end: Any,
    ) -> Output:
        """Applies the body to x [B, ..., D], after the norm.

        Args:
            x: [B, ..., D].
            norm: the norm folded into the projections; for "mixed" its parameters; None for no norm.
            stats: from the previous branch: row statistics of x; for "mixed" the normalized x.
            way: "fused" or "mixed" where the kernels run, else "reference".
            end: see `finish`.
        """


class AttentionParts(NamedTuple):
    """Submodules and settings of a self-attention.

    Attributes:
        projections: one projection packed as [3, H, D], or those of queries, keys and values.
        proj: output projection; None for none.
        num_heads: H.
        scale: softmax scale; None for 1 / √d.
        bias: added to the scores, or boolean with True for "attend"; see `kernels.attention`.
        rope: (cos, sin, interleaved), tables that broadcast to [B, H, N − T, D]; the first T tokens are not rotated.
        norms: norms of each head's queries and keys.
        first: norm inside the module, before the projections.
        last: norm before the output projection.
        drops: dropout after the output projection.
        varlen: boundaries of images; all tokens of x are then one sequence.
    """

    projections: tuple[Layer, ...]
    proj: nn.Module | None
    num_heads: int
    scale: float | None
    bias: Tensor | None = None
    rope: tuple[Tensor, Tensor, bool] | None = None
    norms: tuple[nn.Module, nn.Module] | None = None
    first: nn.Module | None = None
    last: nn.Module | None = None
    drops: tuple[nn.Module | None] = (None,)
    varlen: Varlen | None = None

    def entering(self) -> tuple[Layer, ...]:
        """The linear layers that read x."""
        return self.projections

    def sizes(self) -> Branch:
        """See `Body`."""
        width, channels = width_of(self.projections)
        if self.varlen is not None:
            # a trace reads no lengths
            keys = 0 if torch.compiler.is_compiling() else self.varlen.max_seqlen or 0
            return Branch("window_attention", 0, 0, channels, width, width // 3, self.num_heads, keys=keys)
        return Branch("attention", 0, 0, channels, width, width // 3, self.num_heads)

    def __call__(
        self,
        x: Tensor,
        norm: Before | None = None,
        stats: Given | None = None,
        way: str = "reference",
        **end: Any,
    ) -> Output:
        """Self-attention of x [B, N, D], see `Body`; with `varlen` x may be [T, D]."""
        if self.first is not None and norm is None:
            x, norm = fold_or_normalize(x, self.first, self.projections, way)
        o = self._attend(project(x, self.projections, norm, stats, way))
        return finish(o, self.proj, self.last, *self.drops, way=way, **end)

    def _attend(self, qkv: Tensor) -> Tensor:
        """Attention without projections: [B, N, 3·H·d] → [B, N, H·d]."""
        q_norm, k_norm = (None, None) if self.norms is None else map(norm_of, self.norms)
        if self.varlen is not None:
            return self._attend_packed(qkv.flatten(0, -2), q_norm, k_norm).view(*qkv.shape[:-1], -1)
        rope = None if self.rope is None else _of_all(self.rope, qkv.shape[1])
        prefix = 0 if rope is None else qkv.shape[1] - rope[0].shape[-2]
        if self.norms is None or (q_norm is not None and k_norm is not None):
            return attention_qkv(qkv, self.num_heads, self.scale, q_norm, k_norm, rope, prefix, self.bias)
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, N, d]
        q, k = (norm(t) for norm, t in zip(self.norms, (q, k), strict=True))
        if rope is not None:
            q, k = (rotate(t, rope, prefix).to(v.dtype) for t in (q, k))
        return attention(q, k, v, self.bias, self.scale).transpose(1, 2).flatten(2)

    def _attend_packed(self, qkv: Tensor, q_norm: Norm | None, k_norm: Norm | None) -> Tensor:
        """Attention within images: [T, 3·H·d] → [T, H·d]."""
        if self.norms is not None and (q_norm is None or k_norm is None):
            q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).unbind(1)  # [T, H, d]
            q, k = (norm(t) for norm, t in zip(self.norms, (q, k), strict=True))
            qkv, q_norm, k_norm = torch.stack((q, k, v), 1).flatten(1), None, None
        return attention_qkv(qkv, self.num_heads, self.scale, q_norm, k_norm, self.rope, varlen=self.varlen)


def _of_all(rope: Rope, tokens: int) -> Rope:
    """The rotary tables; in a trace in which their size is a value, they are those of all tokens."""
    if not torch.compiler.is_compiling():
        return rope
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true  # imported by every trace

    cos, sin, interleaved = rope
    same = cos.shape[-2] == tokens
    if guard_or_false(same) or not guard_or_true(same):
        return rope
    torch._check(same)
    cos, sin = (t.reshape(*t.shape[:-2], tokens, t.shape[-1]) for t in (cos, sin))
    return cos, sin, interleaved


class MlpParts(NamedTuple):
    """Submodules of an MLP.

    Attributes:
        fc1: one layer, or the gate and value layers of a SwiGLU.
        act: a name in `kernels.activation.NAMES`, or a module to call.
        fc2: last layer.
        drops: dropouts after the activation and after fc2.
        first: norm inside the module, before fc1.
        last: norm before fc2.
    """

    fc1: tuple[Layer, ...]
    act: str | nn.Module
    fc2: Layer
    drops: tuple[nn.Module | None, nn.Module | None] = (None, None)
    first: nn.Module | None = None
    last: nn.Module | None = None

    def entering(self) -> tuple[Layer, ...]:
        """The linear layers that read x."""
        return self.fc1

    def sizes(self) -> Branch:
        """See `Body`."""
        width, channels = width_of(self.fc1)
        return Branch("mlp", 0, 0, channels, width, width // 2 if self.act in GATED else width)

    def __call__(
        self,
        x: Tensor,
        norm: Before | None = None,
        stats: Given | None = None,
        way: str = "reference",
        **end: Any,
    ) -> Output:
        """MLP of x [..., D], see `Body`."""
        if self.first is not None and norm is None:
            x, norm = fold_or_normalize(x, self.first, self.fc1, way)
        inner, outer = self.drops
        if not (isinstance(self.act, str) and all(is_readable(fc) for fc in self.fc1)):
            hs = [project(x, (fc,)) for fc in self.fc1] if norm is None else [project(x, self.fc1, norm, stats, way)]
            h = activate(hs[0], self.act, *hs[1:])
        else:
            weight, bias, before = operands(*_pair(self.fc1), norm)
            bare = self.last is None or is_identity(self.last)
            call = dict(norm=before, stats=stats, activation=self.act)
            if bare and is_readable(self.fc2) and is_inactive(inner) and is_inactive(outer):
                fc2 = self.fc2.weight, self.fc2.bias
                return _called(mlp, mlp_file.run, way, x, (weight, bias), fc2, **call, **end)
            h = _called(linear, linear_file.run, way, x, weight, bias, **call)
        return finish(h if inner is None else inner(h), self.fc2, self.last, outer, way=way, **end)


def _called(op: Callable, run: Callable, way: str, *operands: object, **named: object) -> Any:
    """Calls `linear` or `mlp`: `op`, the public function, for "reference", else `run`, which launches the kernels."""
    next_norm = named.pop("next_norm", None)
    if way == "reference":
        return op(*operands, **named)
    if next_norm is not None:
        named["return_stats"] = next_norm
    return run(*operands, **named, way=way)


def _pair(layers: tuple[Layer, ...]) -> tuple[Any, Any]:
    """Weights and biases of one layer, or of the gate and value of a SwiGLU."""
    if len(layers) == 1:
        return layers[0].weight, layers[0].bias
    biases = tuple(layer.bias for layer in layers)
    return tuple(layer.weight for layer in layers), None if all(b is None for b in biases) else biases


def activate(h: Tensor, act: str | nn.Module, up: Tensor | None = None) -> Tensor:
    """Applies an activation given by name, see `apply_activation`, or as a module."""
    return apply_activation(h, act, up) if isinstance(act, str) else act(h)


def project(
    x: Tensor,
    layers: tuple[Layer, ...],
    norm: Before | None = None,
    stats: Given | None = None,
    way: str | None = None,
) -> Tensor:
    """Concatenated outputs of linear layers, [..., K] → [..., F]; one matmul if all their weights can be read."""
    if isinstance(norm, FoldedNorm):
        return linear_file.run(x, norm.folded, None, norm.bare, stats)
    if not all(is_readable(layer) for layer in layers):
        outputs = [layer(x) for layer in layers]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
    weight, bias = packed(tuple(layer.weight for layer in layers), tuple(layer.bias for layer in layers))
    if way is None or (way == "mixed" and norm is None):
        return linear(x, weight, bias) if way is None else nn.functional.linear(x, weight, bias)
    return _called(linear, linear_file.run, way, x, weight, bias, norm=norm, stats=stats)


def finish(
    x: Tensor,
    layer: Layer | None,
    norm: nn.Module | None = None,
    drop: nn.Module | None = None,
    layer_scale: Tensor | None = None,
    sample_scale: Tensor | None = None,
    residual: Tensor | None = None,
    return_stats: bool = False,
    next_norm: NextNorm | None = None,
    way: str = "reference",
) -> Output:
    """sample_scale · layer_scale · drop(layer(norm(x))) + residual; with `return_stats` also its row statistics.

    Args:
        x: [B, ..., K].
        layer: linear layer K → D; None for none.
        norm: applied to x before the layer.
        drop: dropout after the layer.
        layer_scale: [D].
        sample_scale: [B], drop-path factor of each image.
        residual: [B, ..., D].
        return_stats: also return row statistics of the result, [M, tiles, 2] fp32, or for "mixed" the normalized
            result; None if that takes another pass over it.
        next_norm: for "mixed", the norm of the next branch.
        way: "fused" or "mixed" where the kernels run, else "reference".
    """
    end: dict[str, Any] = dict(layer_scale=layer_scale, sample_scale=sample_scale, residual=residual)
    end |= dict(return_stats=return_stats, next_norm=next_norm)
    if layer is not None and is_readable(layer):
        x, folded = fold_or_normalize(x, norm, (layer,), way)
        weight, bias, before = operands(layer.weight, layer.bias, folded)
        if is_inactive(drop):
            return _called(linear, linear_file.run, way, x, weight, bias, norm=before, **end)
        y = _called(linear, linear_file.run, way, x, weight, bias, norm=before)
    else:
        x = x if norm is None else norm(x)
        y = x if layer is None else layer(x)
    y = scaled(y if drop is None else drop(y), layer_scale, sample_scale)
    y = y if residual is None else y + residual
    return (y, None) if return_stats else y


def fold_or_normalize(
    x: Tensor, norm: nn.Module | None, layers: tuple[Layer, ...], way: str = "fused"
) -> tuple[Tensor, Before | None]:
    """(x, norm to fuse into these layers), or (norm(x), None) if it cannot be fused."""
    entry = None if norm is None else entry_of(norm, layers)
    if entry is None:
        return x if norm is None else norm(x), None
    if way == "mixed":
        return x, entry.parameters
    (folded,) = fold_norms(x, entry)
    return (entry.norm(x), None) if folded is None else (x, folded)


def normalize(x: Tensor, norm: nn.Module) -> Tensor:
    """norm(x), with the kernel of LayerNorm or RMSNorm where it gives the same result; [..., D] → [..., D]."""
    bound = "forward" in norm.__dict__
    # a trace that calls what is bound to one instance holds for no other block
    traced = bound and torch.compiler.is_compiling() and not has_hooks(norm)
    weights = norm_of(norm) if can_fuse(x) and (traced or not bound) else None
    if weights is None:
        return type(norm).forward(norm, x) if traced else norm(x)
    return layer_norm(x, *weights[:3]) if weights.kind == "layer_norm" else rms_norm(x, weights.weight, weights.eps)
