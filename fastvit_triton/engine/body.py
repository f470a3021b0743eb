"""Bodies of residual branches: linear layers, what runs between them, and a last linear layer.

A reader describes a module of any library so, by its submodules: as a `Body`, or an MLP, which has a kernel of its
own, as an `engine.mlp.MlpBody`. A submodule whose weights can be read is fused into a kernel call; any other is called
as a module.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels import linear as linear_file
from ..kernels.activation import apply_activation
from ..kernels.argument import Lent, NextNorm, Norm, Normalized
from ..kernels.fold import packed
from ..kernels.launch import product_dtype
from ..kernels.layer_norm import MAX_D, layer_norm, scaled
from ..kernels.linear import linear
from ..kernels.rms_norm import rms_norm, run_either
from ..kernels.sizes import Branch
from .freeze import Entry, FoldedNorm, fold_norms, operands, packed_weight
from .hooks import can_fuse, has_hooks
from .leaves import Layer, entry_of, is_inactive, is_readable, norm_of, width_of

Before = FoldedNorm | Norm
Given = Tensor | Normalized | Lent
Drop = Callable[[Tensor], Tensor]  # a dropout
Output = tuple[Tensor, Given | None]  # the result, and what the norm of the next branch reads instead of it


class Body(NamedTuple):
    """A body: proj(last(between(projections(first(x))))), such as an attention."""

    name: str  # what it is, in reports
    projections: tuple[Layer, ...]  # the linear layers that read x; none if `between` reads x itself
    # maps their concatenated outputs [B, ..., F] to the inputs of `proj`, [B, ..., K]; a function of these outputs
    # alone or, if it has a true attribute `takes_input`, also of x and the way. If it has a method `sizes`, a function
    # of the body, that gives the sizes for the cost model. If it has a method `learns_bias`, a function of x and F,
    # which is true, it can be given the bias of the projections to compute its gradient
    between: Callable[..., Tensor]
    proj: Layer | None  # last linear layer; None for none
    num_heads: int = 0  # heads of attention; 0 for an MLP
    keys: int = 0  # keys of each query; 0 if these are all tokens
    first: nn.Module | None = None  # norm inside the module, before the projections
    last: nn.Module | None = None  # norm before the last layer
    # all its dropouts, which follow the random numbers of the module; the last follows the last layer
    drops: tuple[Drop | None, ...] = (None,)
    decomposed: bool = False  # scores have a bias by row plus one by column, see `Branch`

    def having(self, **settings: object) -> "Body":
        """The body with other settings of `between`, such as a bias or a window."""
        between: Any = self.between
        return self._replace(between=replace(between, **settings))

    def entering(self) -> tuple[Layer, ...]:
        """The linear layers applied to x, into which a norm may be folded; empty if x has other readers."""
        return self.projections

    @property
    def drop(self) -> Drop | None:
        """Dropout after the last layer."""
        return self.drops[-1] if self.drops else None

    def layers(self) -> tuple[Layer | None, ...]:
        """All linear layers."""
        return (*(self.projections or getattr(self.between, "layers", ())), self.proj)

    def norms(self) -> tuple[nn.Module | None, ...]:
        """The norms before linear layers."""
        return self.first, self.last, getattr(self.between, "norm", None)

    def sizes(self) -> Branch:
        """Sizes for the cost model; the numbers of images and tokens are 0."""
        if hasattr(self.between, "sizes"):
            return self.between.sizes(self)
        outer, inner = width_of((self.proj,))
        width, channels = width_of(self.projections) if self.projections else (3 * inner, outer)
        kind = "attention" if self.num_heads else "mlp"
        sizes = (channels, width, inner, self.num_heads)
        return Branch(kind, 0, 0, *sizes, keys=self.keys, decomposed=int(self.decomposed))

    def __call__(self, x: Tensor, way: str = "reference", *, residual: Tensor | None = None) -> Tensor:
        """The body of x [B, ..., D] plus the residual; for `way` see `run`."""
        return self.run(x, way=way, residual=residual)[0]

    def run(
        self,
        x: Tensor,
        norm: Before | None = None,
        stats: Given | None = None,
        way: str = "reference",
        **end: Any,
    ) -> Output:
        """(the body of x after the norm, its statistics), see `finish_with_stats`.

        Args:
            x: [B, ..., D].
            norm: the norm folded into the projections; for "mixed" its parameters; None for no norm.
            stats: from the previous branch: row statistics of x; for "mixed" the normalized x.
            way: "fused" or "mixed" where the kernels run, "onednn" on a CPU, else "reference".
            **end: see `finish_with_stats`.
        """
        if self.first is not None and norm is None:
            x, norm = fold_or_normalize(x, self.first, self.projections, way)
        residual = end.get("residual")
        bias = None
        if residual is x and norm is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            h, end["residual"], bias = project_and_pass(x, self.projections, norm, stats, way, self.between)
        else:
            h = project(x, self.projections, norm, stats, way) if self.projections else x
        if bias is not None:
            h = self.between(h, bias)
        else:
            h = self.between(h, x, way) if getattr(self.between, "takes_input", False) else self.between(h)
        return finish_with_stats(h, self.proj, self.last, self.drop, way=way, **end)


def called(op: Callable, run: Callable, way: str, *operands: object, **named: Any) -> Output:
    """(result, statistics or None) of `linear` or `mlp`.

    Args:
        op: the public function, called for "reference".
        run: launches its kernels, called for every other way.
        way: as in `Body`.
        *operands: of both functions.
        **named: of both functions, and `next_norm` of `finish_with_stats`.
    """
    next_norm = named.pop("next_norm", None)
    if way == "reference":
        result = op(*operands, **named)
    elif next_norm is not None:
        return run(*operands, **named | {"return_stats": next_norm}, way=way)
    else:
        result = run(*operands, **named, way=way)
    return result if named.get("return_stats") else (result, None)


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
    if way == "onednn":
        return _project_on_cpu(x, layers)
    weight, bias = packed(tuple(layer.weight for layer in layers), tuple(layer.bias for layer in layers))
    if way is None or (way == "mixed" and norm is None):
        return linear(x, weight, bias) if way is None else nn.functional.linear(x, weight, bias)
    return called(linear, linear_file.run, way, x, weight, bias, norm=norm, stats=stats)[0]


def project_and_pass(
    x: Tensor, layers: tuple[Layer, ...], norm: Before, stats: Given | None, way: str, reader: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(`project`, x for the residual, bias or None): the backward pass of the norm adds the gradient of this x.

    The gradient of a bias that is returned is left to the reader of the result, which computes it with its own.
    """
    if isinstance(norm, FoldedNorm):
        h, passed = linear_file.run(x, norm.folded, None, norm.bare, stats, passes_input=True)
        return h, passed, None
    if way == "onednn" or not all(is_readable(layer) for layer in layers):
        return project(x, layers, norm, stats, way), x, None
    weight, bias = packed(tuple(layer.weight for layer in layers), tuple(layer.bias for layer in layers))
    learns = bias is not None and bias.requires_grad and hasattr(reader, "learns_bias")
    left = bias if learns and reader.learns_bias(x, len(weight)) else None
    bias = bias if left is None else left.detach()
    h, passed = linear_file.run(x, weight, bias, norm, stats, way=way, passes_input=True)
    return h, passed, left


def _project_on_cpu(x: Tensor, layers: tuple[Layer, ...]) -> Tensor:
    """`project` by oneDNN: one product if packed weights are cached, else one for each layer, without a copy."""
    if (weight := packed_weight(layers, x)) is not None:
        return linear_file.run(x, weight, way="onednn")
    outputs = [linear_file.run(x, layer.weight, layer.bias, way="onednn") for layer in layers]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


def finish(
    x: Tensor,
    layer: Layer | None,
    norm: nn.Module | None = None,
    drop: Drop | None = None,
    *,
    sample_scale: Tensor | None = None,
    residual: Tensor | None = None,
    way: str = "reference",
) -> Tensor:
    """sample_scale · drop(layer(norm(x))) + residual; for the arguments see `finish_with_stats`."""
    return finish_with_stats(x, layer, norm, drop, sample_scale=sample_scale, residual=residual, way=way)[0]


def finish_with_stats(
    x: Tensor,
    layer: Layer | None,
    norm: nn.Module | None = None,
    drop: Drop | None = None,
    *,
    layer_scale: Tensor | None = None,
    sample_scale: Tensor | None = None,
    residual: Tensor | None = None,
    return_stats: bool = False,
    next_norm: NextNorm | None = None,
    way: str = "reference",
) -> Output:
    """(sample_scale · layer_scale · drop(layer(norm(x))) + residual, its row statistics).

    Args:
        x: [B, ..., K].
        layer: linear layer K → D; None for none.
        norm: applied to x before the layer.
        drop: dropout after the layer.
        layer_scale: [D].
        sample_scale: [B], drop-path factor of each image.
        residual: [B, ..., D].
        return_stats: compute row statistics of the result, [M, tiles, 2] fp32, or for "mixed" the normalized result;
            else, and where that takes another pass over the result, they are None.
        next_norm: for "mixed", the norm of the next branch.
        way: as in `Body`.
    """
    end: dict[str, Any] = dict(layer_scale=layer_scale, sample_scale=sample_scale, residual=residual)
    end |= dict(return_stats=return_stats, next_norm=next_norm)
    if layer is not None and is_readable(layer):
        x, folded = fold_or_normalize(x, norm, (layer,), way)
        inactive = is_inactive(drop)
        weight, bias, before = operands_of((layer,), x, folded, way, layer_scale if inactive else None)
        if inactive:
            return called(linear, linear_file.run, way, x, weight, bias, norm=before, **end)
        y, _ = called(linear, linear_file.run, way, x, weight, bias, norm=before)
    else:
        x = x if norm is None else norm(x)
        y = x if layer is None else layer(x)
    y = scaled(y if drop is None else drop(y), layer_scale, sample_scale)
    return (y if residual is None else y + residual), None


def operands_of(
    layers: tuple[Layer, ...], x: Tensor, norm: Before | None, way: str, layer_scale: Tensor | None = None
) -> tuple:
    """(weight, bias, norm) of `linear` and `mlp` for one linear layer, or for the gate and value of a SwiGLU.

    Args:
        layers: one or two linear layers that read x.
        x: [..., K].
        norm: the norm before them; None for no norm.
        way: as in `Body`.
        layer_scale: multiplied into weights that are packed for oneDNN; or None.
    """
    if way == "onednn":
        packed_weights = [packed_weight((layer,), x, layer_scale) for layer in layers]
        if all(weight is not None for weight in packed_weights):
            return (packed_weights[0] if len(packed_weights) == 1 else tuple(packed_weights)), None, norm
    if len(layers) == 1:
        return operands(layers[0].weight, layers[0].bias, norm)
    biases = tuple(layer.bias for layer in layers)
    weights = tuple(layer.weight for layer in layers)
    return operands(weights, None if all(b is None for b in biases) else biases, norm)


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
    return (normalize_for(entry, x), None) if folded is None else (x, folded)


def normalize_for(entry: Entry, x: Tensor) -> Tensor:
    """The norm of an entry, of x [..., D], for its linear layers alone: our kernel writes what autocast casts it to."""
    if x.shape[-1] <= MAX_D and can_fuse(x):
        if torch.is_autocast_enabled(x.device.type):
            return run_either(x, entry.parameters, product_dtype(x))
        if entry.parameters.kind == "layer_norm":  # an RMSNorm's forward also compares dtypes
            return layer_norm(x, *entry.parameters[:3])
    return normalize(x, entry.norm)


def normalize(x: Tensor, norm: nn.Module) -> Tensor:
    """norm(x), with the kernel of LayerNorm or RMSNorm where it gives the same result; [..., D] → [..., D]."""
    bound = "forward" in norm.__dict__
    # a trace that calls what is bound to one instance holds for no other block
    traced = bound and torch.compiler.is_compiling() and not has_hooks(norm)
    weights = norm_of(norm) if (traced or not bound) and can_fuse(x) else None
    if weights is None:
        return type(norm).forward(norm, x) if traced else norm(x)
    return layer_norm(x, *weights[:3]) if weights.kind == "layer_norm" else rms_norm(x, weights.weight, weights.eps)
