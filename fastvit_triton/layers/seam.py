"""A seam is where one module's output goes straight into the next, and one kernel can do both.

The helpers here read the weights of the modules on both sides of a seam. A module is read through only where that
changes nothing: its type is exact (a LoRA, quantised or parametrised layer has another), and nobody hooked it.
Otherwise it is called, as in any PyTorch model.
"""

from torch import Tensor, nn

from ..kernels.argument import Norm
from ..kernels.backend import kernels_available
from ..kernels.fold import Group
from ..kernels.layer_norm import layer_norm, scaled
from ..kernels.linear import ACTIVATIONS, linear
from .calls import all_watched, patched
from .freeze import Entry, FoldedNorm, operands


def hooked(module: nn.Module) -> bool:
    """A hook watches this module's calls, or another forward is in its place, its own or its class's."""
    facts = module.__dict__
    hooks = facts["_forward_hooks"] or facts["_forward_pre_hooks"]
    hooks = hooks or facts["_backward_hooks"] or facts["_backward_pre_hooks"] or all_watched()
    return bool(hooks) or "forward" in facts or patched(type(module))


def plain(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """The module and its parameters are exactly of these kinds, and its calls are as its class defines them."""
    own = all(p is None or type(p) in (nn.Parameter, Tensor) for p in module._parameters.values())
    return type(module) in kinds and own and not hooked(module)


def drops(dropout: nn.Dropout) -> bool:
    """The dropout would drop something now."""
    return dropout.training and dropout.p > 0


def norm_weights(norm: nn.Module) -> Norm:
    """(weight, bias, eps) of a LayerNorm, as the kernels take it."""
    return Norm(norm.weight, norm.bias, norm.eps)


def normalize(x: Tensor, norm: nn.Module) -> Tensor:
    """norm(x), by the LayerNorm kernel where that is the same; [..., D] → [..., D]."""
    fused = kernels_available(x) and plain(norm, nn.LayerNorm)
    return layer_norm(x, norm.weight, norm.bias, norm.eps) if fused else norm(x)


def entry(norm: nn.Module | None, layers: tuple[nn.Module, ...]) -> Entry | None:
    """A LayerNorm and the linear layers behind it, for `fold_norms`; None where one of them must be called."""
    if norm is None or not plain(norm, nn.LayerNorm) or not all(plain(layer, nn.Linear) for layer in layers):
        return None
    weights, biases = tuple(layer.weight for layer in layers), tuple(layer.bias for layer in layers)
    sources = tuple(t for t in (*weights, *biases, norm.weight, norm.bias) if t is not None)
    return Entry(norm, Group(weights, biases, norm.weight, norm.bias), norm.eps, sources)


def project(
    x: Tensor,
    fc: nn.Module,
    *,
    norm: FoldedNorm | None = None,
    activation: str | None = None,
    drop: nn.Dropout | None = None,
    layer_scale: Tensor | None = None,
    sample_scale: Tensor | None = None,
    residual: Tensor | None = None,
    stats: Tensor | None = None,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, Tensor | None]:
    """sample_scale · layer_scale · drop(act(fc(x))) + residual, in one call of `kernels.linear` where that is the same.

    Args:
        x: [B, ..., K].
        fc: an nn.Linear K → F, or any module that stands in its place.
        norm: LayerNorm applied to x first, folded into fc.
        activation: a name in `kernels.linear.ACTIVATIONS`, or None.
        drop: dropout after the activation.
        layer_scale: [F], LayerScale.
        sample_scale: [B], drop-path factor of each image.
        residual: [B, ..., F].
        stats: row statistics of x for `norm`, where the producer of x left them.
        return_stats: also return those of the output, or None.

    Returns:
        [B, ..., F]; with `return_stats` also [M, tiles, 2] fp32 or None.
    """
    fused = norm is not None or (kernels_available(x) and plain(fc, nn.Linear))
    whole = fused and (drop is None or not (drops(drop) or hooked(drop)))
    if fused:
        weight, bias, folded = operands(fc.weight, fc.bias, norm)
        end = dict(layer_scale=layer_scale, sample_scale=sample_scale, residual=residual, return_stats=return_stats)
        y = linear(x, weight, bias, norm=folded, stats=stats, activation=activation, **(end if whole else {}))
        if whole:
            return y
    else:
        y = fc(x)
        y = y if activation is None else ACTIVATIONS[activation](y)
    y = y if drop is None else drop(y)
    y = y if layer_scale is None and sample_scale is None else scaled(y, layer_scale, sample_scale)
    y = y if residual is None else y + residual
    return (y, None) if return_stats else y
