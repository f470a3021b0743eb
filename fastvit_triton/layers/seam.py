"""A seam is where one module's output goes straight into the next, and one kernel can do both.

The helpers here read the weights of the modules on both sides of a seam. A module is read through only where that
changes nothing: its type is exact (a LoRA, quantised or parametrised layer has another), and nobody hooked it.
Otherwise it is called, as in any PyTorch model.
"""

from torch import Tensor, nn

from ..kernels.layer_norm import layer_norm, scaled
from ..kernels.linear import ACTIVATIONS, linear


def hooked(module: nn.Module) -> bool:
    """Somebody watches this module's calls, or has put another forward in its place."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or "forward" in module.__dict__


def plain(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """The module and its parameters are exactly of these kinds, and nobody watches its calls."""
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
    return layer_norm(x, *norm_weights(norm)) if plain(norm, nn.LayerNorm) else norm(x)


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
) -> Tensor:
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

    Returns:
        [B, ..., F].
    """
    if norm is not None and not plain(norm, nn.LayerNorm):
        x, norm = norm(x), None
    if plain(fc, nn.Linear) and not (drop is not None and (drops(drop) or hooked(drop))):
        return linear(
            x,
            fc.weight,
            fc.bias,
            norm=None if norm is None else norm_weights(norm),
            activation=activation,
            gamma=gamma,
            sample_scale=sample_scale,
            residual=residual,
        )
    y = fc(x if norm is None else norm(x))
    y = y if activation is None else ACTIVATIONS[activation](y)
    y = y if drop is None else drop(y)
    y = scaled(y, gamma, sample_scale)
    return y if residual is None else y + residual
