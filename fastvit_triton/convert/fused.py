"""The fused forwards that foreign modules share: attention, MLP, LayerNorm, and the residual branch around a body.

A body is an attention or an MLP. Its family's reader says where the body keeps its parts, or in one sentence why it
must run its own forward now. Whatever part cannot be read is called instead, so its hooks fire and a replaced layer
does its work.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.attention import attention
from ..kernels.fold import Folded, packed
from ..kernels.layer_norm import layer_norm, scaled
from ..kernels.linear import ACTIVATIONS, linear
from ..kernels.mlp import mlp
from ..kernels.op import folds, usable
from ..kernels.rope import attention_qkv, rotate
from ..layers.seam import folded
from .forwards import Forward, Reader, declare, original, whole
from .parts import (
    IDENTITY,
    LAYER_NORMS,
    LINEARS,
    Attention,
    Layer,
    Mlp,
    Norm,
    draws,
    fuses,
    gain,
    idle,
    last_axis_norm,
    norm_weights,
    ours,
    own,
    readable,
    sample_scale,
    watched,
)


def body(
    *kinds: str,
    needs: str = "",
    takes: str | None = None,
    call: Callable[[nn.Module], dict[str, object]] | None = None,
    weights: bool = False,
) -> Callable[[Reader], Reader]:
    """Declares a reader of these types, see `Forward`; `weights` for bodies that return (y, weights or None)."""

    def decorate(read: Reader) -> Reader:
        run = partial(_forward_weights if weights else _forward, read)
        declare(kinds, Forward(run, needs, takes, read, call=call))
        return read

    return decorate


def _forward(read: Reader, self: nn.Module, *inputs: object, **named: object) -> Tensor:
    if inputs and fuses(self, inputs[0]):
        parts = read(self, *inputs[1:], **named)
        if not isinstance(parts, str):
            return run(inputs[0], parts)
    return original(self, *inputs, **named)


def _forward_weights(read: Reader, self: nn.Module, *inputs: object, **named: object) -> tuple[Tensor, None]:
    x, *rest = inputs or (named.get("hidden_states"),)
    if isinstance(x, Tensor) and fuses(self, x):
        parts = read(self, *rest, **{n: v for n, v in named.items() if n != "hidden_states"})
        if not isinstance(parts, str):
            return run(x, parts), None
    return original(self, *inputs, **named)


def reader(body: nn.Module) -> Reader | None:
    """The reader that `optimize` gave this body; None where it gave none, or somebody watches its calls."""
    forward = body.__dict__.get("forward")
    bound = ours(forward) and forward.func in (_forward, _forward_weights)
    return forward.args[0] if bound and not watched(body) else None


def _norm_reason(self: nn.Module) -> str | None:
    known = last_axis_norm(self) is not None
    return None if known else "several axes, fast norm, or parameters of a class of their own"


@whole("LayerNorm", *LAYER_NORMS, reason=_norm_reason)
def norm_forward(self: nn.Module, input: Tensor) -> Tensor:
    """LayerNorm over the last axis; [..., D] → [..., D]."""
    weights = last_axis_norm(self) if fuses(self, input) else None
    return original(self, input) if weights is None else normalized(input, weights)


def normalized(x: Tensor, weights: tuple[Tensor | None, Tensor | None, float]) -> Tensor:
    """layer_norm in the dtype that autocast gives it: float32 on a GPU."""
    device = x.device.type
    wide = device != "cpu" and torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return layer_norm(x.float() if wide else x, *weights)


def run(x: Tensor, parts: Attention | Mlp, norm: nn.Module | None = None, **end: object) -> Tensor:
    """norm first, cheaper with row statistics of x, then the body; `end`, the arguments of `finish`, comes last."""
    return (attend if isinstance(parts, Attention) else feed)(x, parts, norm, **end)


def attend(
    x: Tensor, parts: Attention, norm: nn.Module | None = None, stats: Tensor | None = None, **end: object
) -> Tensor:
    """Self-attention of x [B, N, D]."""
    qkv = project(x, parts.projections, norm if parts.first is None else parts.first, stats)
    plain = parts.norms is None
    q_norm, k_norm = (None, None) if plain else (norm_weights(n) for n in parts.norms)
    prefix = 0 if parts.rope is None else qkv.shape[1] - parts.rope[0].shape[-2]
    if plain or (q_norm is not None and k_norm is not None):
        o = attention_qkv(qkv, parts.num_heads, parts.scale, q_norm, k_norm, parts.rope, prefix, parts.bias)
    else:
        q, k, v = qkv.unflatten(-1, (3, parts.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, N, d]
        q, k = (n(t) for n, t in zip(parts.norms, (q, k), strict=True))
        if parts.rope is not None:
            q, k = (rotate(t, parts.rope, prefix).to(v.dtype) for t in (q, k))
        o = attention(q, k, v, parts.bias, parts.scale).transpose(1, 2).flatten(2)
    return finish(o, parts.proj, parts.last, *parts.drops, **end)


def feed(x: Tensor, parts: Mlp, norm: nn.Module | None = None, stats: Tensor | None = None, **end: object) -> Tensor:
    """MLP of x [..., D]."""
    norm = norm if parts.first is None else parts.first
    known = isinstance(parts.act, str) and all(readable(fc, LINEARS) for fc in parts.fc1)
    if not known:
        x = _normed(x, norm)
        h = [fc(x) for fc in parts.fc1]
        h = nn.functional.silu(h[0]) * h[1] if len(h) == 2 else activated(h[0], parts.act)
    else:
        x, weights = _read(x, norm)
        fc1, weights = _folded(x, weights, parts.fc1)
        bare = parts.last is None or readable(parts.last, IDENTITY)
        if bare and readable(parts.fc2, LINEARS) and all(idle(d) for d in parts.drops):
            fc2 = parts.fc2.weight, parts.fc2.bias
            return mlp(x, fc1, fc2, norm=weights, stats=stats, activation=parts.act, **end)
        h = linear(x, *fc1, norm=weights, stats=stats, activation=parts.act)
    inner, outer = parts.drops
    return finish(h if inner is None else inner(h), parts.fc2, parts.last, outer, **end)


def activated(h: Tensor, act: str | nn.Module) -> Tensor:
    """The activation by name or by module."""
    if act == "swiglu":
        gate, value = h.chunk(2, -1)
        return nn.functional.silu(gate) * value
    return ACTIVATIONS[act](h) if isinstance(act, str) else act(h)


def project(x: Tensor, layers: tuple[Layer, ...], norm: nn.Module | None = None, stats: Tensor | None = None) -> Tensor:
    """The layers' outputs side by side, [..., K] → [..., F], as one product where all of them can be read."""
    if not all(readable(layer, LINEARS) for layer in layers):
        x = _normed(x, norm)
        outputs = [layer(x) for layer in layers]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
    x, weights = _read(x, norm)
    (weight, bias), weights = _folded(x, weights, layers)
    if isinstance(weight, tuple) and not isinstance(weight, Folded):
        weight, bias = packed(weight, (None,) * len(weight) if bias is None else bias)
    return linear(x, weight, bias, norm=weights, stats=stats)


def finish(
    x: Tensor,
    layer: nn.Module | None,
    norm: nn.Module | None = None,
    drop: nn.Module | None = None,
    gamma: Tensor | None = None,
    sample_scale: Tensor | None = None,
    residual: Tensor | None = None,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, Tensor | None]:
    """sample_scale · gamma · drop(layer(norm(x))) + residual; with `return_stats` also its row statistics, or None."""
    if layer is not None and readable(layer, LINEARS) and idle(drop):
        x, weights = _read(x, norm)
        fc, weights = _folded(x, weights, (layer,))
        end = dict(gamma=gamma, sample_scale=sample_scale, residual=residual, return_stats=return_stats)
        return linear(x, *fc, norm=weights, **end)
    x = _normed(x, norm)
    x = x if layer is None else layer(x)
    y = scaled(x if drop is None else drop(x), gamma, sample_scale)
    y = y if residual is None else y + residual
    return (y, None) if return_stats else y


class Branch(NamedTuple):
    """What a block adds to its stream: drop_path(gamma · scale(drop(body(norm(x), **call)))).

    Attributes:
        body: attention or MLP, or its parts.
        norm: module applied to x first.
        scale: LayerScale, as a module.
        drop_path: stochastic depth.
        gamma: LayerScale, as the block's own parameter [D].
        drop: dropout of the branch that the block, not the body, holds.
        call: the rest of the body's arguments.
    """

    body: nn.Module | Attention | Mlp
    norm: nn.Module | None = None
    scale: nn.Module | None = None
    drop_path: nn.Module | None = None
    gamma: Tensor | None = None
    drop: nn.Module | None = None
    call: dict[str, object] | None = None


def add(x: Tensor, *branches: Branch) -> Tensor:
    """x [B, ..., D] plus each branch in turn, ended inside its body where nobody watches the parts."""
    stats = None
    for i, branch in enumerate(branches):
        x, stats = _add(x, branch, stats, i + 1 < len(branches) and usable(x) and folds(x))
    return x


def _add(x: Tensor, branch: Branch, stats: Tensor | None, return_stats: bool) -> tuple[Tensor, Tensor | None]:
    """The sum, and its row statistics where they are asked for and cheap."""
    body, norm, scale, drop_path, gamma, drop, call = branch._replace(call=branch.call or {})
    parts = body
    if isinstance(body, nn.Module):
        read = reader(body)
        parts = "called" if read is None else read(body, **call)
    if isinstance(parts, str):
        y = body(_normed(x, norm), **call)
        y = y[0] if isinstance(y, tuple) else y
    else:
        known, learned = gain(scale)
        if known and own(gamma) and draws(drop_path) and all(idle(d) for d in (*parts.drops, drop)):
            end = dict(gamma=gamma if learned is None else learned, sample_scale=sample_scale(drop_path, x))
            y = run(x, parts, norm, stats=stats, residual=x, return_stats=return_stats, **end)
            return y if return_stats else (y, None)
        y = run(x, parts, norm, stats=stats)
    y = y if drop is None else drop(y)
    y = scaled(y if scale is None else scale(y), gamma, None)
    return x + (y if drop_path is None else drop_path(y)), None


def _read(x: Tensor, norm: nn.Module | None):
    """(x, norm weights to fold), or (norm(x), None) where the norm must be called."""
    weights = None if norm is None else norm_weights(norm)
    return (x, weights) if norm is None or weights is not None else (norm(x), None)


def _folded(x: Tensor, norm: Norm | None, layers: tuple[Layer, ...]):
    """((weight, bias), norm) of layers side by side: folded with the norm where that is kept, else one or a tuple."""
    weights, biases = tuple(layer.weight for layer in layers), tuple(layer.bias for layer in layers)
    made = None if norm is None else folded(x, norm, weights, biases)
    if made is not None:
        return (made, None), (None, None, norm[2])
    if len(layers) == 1:
        return (weights[0], biases[0]), norm
    return (weights, None if all(b is None for b in biases) else biases), norm


def _normed(x: Tensor, norm: nn.Module | None) -> Tensor:
    return x if norm is None else norm(x)
