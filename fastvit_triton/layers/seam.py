"""A seam is where one module's output goes straight into the next, and one kernel can do both.

The helpers here read the weights of the modules on both sides of a seam. A module is read through only where that
changes nothing: its type is exact (a LoRA, quantised or parametrised layer has another), and nobody hooked it.
Otherwise it is called, as in any PyTorch model.
"""

import weakref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..kernels.fold import Folded, fold
from ..kernels.layer_norm import layer_norm, scaled
from ..kernels.linear import ACTIVATIONS, linear
from ..kernels.op import usable
from .calls import all_watched, patched

Norm = tuple[Tensor | None, Tensor | None, float]  # weight [K], bias [K], eps
_folds = WeakTensorKeyDictionary()  # first weight → what its fold was made from, how that stood, and the fold


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


def norm_weights(norm: nn.Module) -> tuple[Tensor | None, Tensor | None, float]:
    """(weight, bias, eps) of a LayerNorm, as the kernels take it."""
    return norm.weight, norm.bias, norm.eps


def normalize(x: Tensor, norm: nn.Module) -> Tensor:
    """norm(x), by the LayerNorm kernel where that is the same; [..., D] → [..., D]."""
    return layer_norm(x, *norm_weights(norm)) if usable(x) and plain(norm, nn.LayerNorm) else norm(x)


def folded(x: Tensor, norm: Norm, weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...]) -> Folded | None:
    """`fold` of a norm and the projections behind it, kept from call to call; None where nothing may be kept.

    Kept in eager inference alone, beside the weights: no state, no copy, no pickle holds it. It is made anew when a
    parameter is another tensor, lies elsewhere, or was written to. Writes through `.data` leave no trace in PyTorch.
    """
    if torch.compiler.is_compiling():
        return None
    if torch.is_grad_enabled() or not usable(x):
        _folds.pop(weights[0], None)
        return None
    sources = [t for t in (*weights, *biases, *norm[:2]) if t is not None]
    if torch.is_autocast_enabled(x.device.type) or any(t.is_inference() for t in sources):
        return None
    state = (x.dtype, *((t.data_ptr(), t._version, t.dtype, t.device) for t in sources))
    known, found, made = _folds.get(weights[0], ((), None, None))
    if found != state or any(ref() is not t for ref, t in zip(known, sources, strict=True)):
        made = fold(weights, biases, *norm[:2], x.dtype)
        _folds[weights[0]] = tuple(map(weakref.ref, sources)), state, made  # a new tensor may have a dead one's address
    return made


def project(
    x: Tensor,
    fc: nn.Module,
    *,
    norm: nn.Module | None = None,
    activation: str | None = None,
    drop: nn.Dropout | None = None,
    gamma: Tensor | None = None,
    sample_scale: Tensor | None = None,
    residual: Tensor | None = None,
    stats: Tensor | None = None,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, Tensor | None]:
    """sample_scale · gamma · drop(act(fc(norm(x)))) + residual, in one call of `kernels.linear` where that is the same.

    Args:
        x: [B, ..., K].
        fc: an nn.Linear K → F, or any module that stands in its place.
        norm: module applied to x first; an nn.LayerNorm is folded in.
        activation: a name in `kernels.linear.ACTIVATIONS`, or None.
        drop: dropout after the activation.
        gamma: [F], LayerScale.
        sample_scale: [B], drop-path factor of each image.
        residual: [B, ..., F].
        stats: row statistics of x, where its producer left them.
        return_stats: also return those of the output, or None.

    Returns:
        [B, ..., F]; with `return_stats` also [M, tiles, 2] fp32 or None.
    """
    fused = usable(x)
    if norm is not None and not (fused and plain(norm, nn.LayerNorm)):
        x, norm = norm(x), None
    if fused and plain(fc, nn.Linear) and not (drop is not None and (drops(drop) or hooked(drop))):
        weight, bias, norm = before(x, norm, fc)
        return linear(
            x,
            weight,
            bias,
            norm=norm,
            stats=stats,
            activation=activation,
            gamma=gamma,
            sample_scale=sample_scale,
            residual=residual,
            return_stats=return_stats,
        )
    y = fc(x if norm is None else norm(x))
    y = y if activation is None else ACTIVATIONS[activation](y)
    y = y if drop is None else drop(y)
    y = y if gamma is None and sample_scale is None else scaled(y, gamma, sample_scale)
    y = y if residual is None else y + residual
    return (y, None) if return_stats else y


def before(x: Tensor, norm: nn.LayerNorm | None, fc: nn.Linear) -> tuple[Tensor | Folded, Tensor | None, tuple | None]:
    """(weight, bias, norm) of a linear layer behind a norm, as the kernels take them."""
    if norm is None:
        return fc.weight, fc.bias, None
    made = folded(x, norm_weights(norm), (fc.weight,), (fc.bias,))
    return (fc.weight, fc.bias, norm_weights(norm)) if made is None else (made, None, (None, None, norm.eps))
