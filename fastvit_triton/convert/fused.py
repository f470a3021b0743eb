"""The fused forwards that foreign modules share: attention, MLP, LayerNorm, and the residual branch around a body.

A body is an attention or an MLP. Its family's reader says where the body keeps its parts, or in one sentence why it
must run its own forward now. Whatever part cannot be read is called instead, so its hooks fire and a replaced layer
does its work.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.argument import Norm
from ..kernels.attention import attention
from ..kernels.attention_qkv import attention_qkv, rotate
from ..kernels.fold import Group, packed
from ..kernels.layer_norm import layer_norm, scaled
from ..kernels.linear import ACTIVATIONS, linear
from ..kernels.mlp import mlp
from ..layers.freeze import Entry, FoldedNorm, fold_norms, of_dtype, operands
from .forwards import Forward, Reader, declare, original, whole
from .parts import (
    IDENTITY,
    LAYER_NORMS,
    LINEARS,
    Attention,
    Layer,
    Mlp,
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


def normalized(x: Tensor, weights: Norm) -> Tensor:
    """layer_norm in the dtype that autocast gives it: float32 on a GPU."""
    device = x.device.type
    wide = device != "cpu" and torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return layer_norm(x.float() if wide else x, *weights[:3])


def run(x: Tensor, parts: Attention | Mlp, norm: FoldedNorm | None = None, **end: object) -> Tensor:
    """The body of x, behind a LayerNorm folded into the layers that read x; `end` are the arguments of `finish`."""
    return (attend if isinstance(parts, Attention) else feed)(x, parts, norm, **end)


def entry(norm: nn.Module | None, layers: tuple[Layer, ...]) -> Entry | None:
    """A LayerNorm and the layers behind it, for `fold_norms`; None where one of them must be called."""
    weights = None if norm is None else norm_weights(norm)
    if weights is None or not all(readable(layer, LINEARS) for layer in layers):
        return None
    group = Group(tuple(layer.weight for layer in layers), tuple(layer.bias for layer in layers), *weights[:2])
    read = (getattr(layer, "sources", None) or (layer.weight, layer.bias) for layer in layers)
    sources = tuple(t for t in (*itertools.chain(*read), *weights[:2]) if t is not None)
    return Entry(norm, group, weights[2], sources)


def enter(x: Tensor, norm: nn.Module | None, layers: tuple[Layer, ...]) -> tuple[Tensor, FoldedNorm | None]:
    """(x, norm folded into the layers) or (norm(x), None) in front of these layers."""
    if norm is None:
        return x, None
    (folded,) = fold_norms(x, entry(norm, layers))
    return (norm(x), None) if folded is None else (x, folded)


def attend(
    x: Tensor, parts: Attention, norm: FoldedNorm | None = None, stats: Tensor | None = None, **end: object
) -> Tensor:
    """Self-attention of x [B, N, D]."""
    if parts.first is not None and norm is None:
        x, norm = enter(x, parts.first, parts.projections)
    qkv = product(x, parts.projections, norm, stats)
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


def feed(x: Tensor, parts: Mlp, norm: FoldedNorm | None = None, stats: Tensor | None = None, **end: object) -> Tensor:
    """MLP of x [..., D]."""
    if parts.first is not None and norm is None:
        x, norm = enter(x, parts.first, parts.fc1)
    if not (isinstance(parts.act, str) and all(readable(fc, LINEARS) for fc in parts.fc1)):
        h = [product(x, (fc,)) for fc in parts.fc1] if norm is None else [product(x, parts.fc1, norm, stats)]
        h = nn.functional.silu(h[0]) * h[1] if len(h) == 2 else activated(h[0], parts.act)
    else:
        weight, bias, folded = operands(*_pair(parts.fc1), norm)
        bare = parts.last is None or readable(parts.last, IDENTITY)
        if bare and readable(parts.fc2, LINEARS) and all(idle(d) for d in parts.drops):
            fc2 = parts.fc2.weight, parts.fc2.bias
            return mlp(x, (weight, bias), fc2, norm=folded, stats=stats, activation=parts.act, **end)
        h = linear(x, weight, bias, norm=folded, stats=stats, activation=parts.act)
    inner, outer = parts.drops
    return finish(h if inner is None else inner(h), parts.fc2, parts.last, outer, **end)


def _pair(layers: tuple[Layer, ...]) -> tuple:
    """Weights and biases of one layer, or of the gate and value of a SwiGLU."""
    if len(layers) == 1:
        return layers[0].weight, layers[0].bias
    biases = tuple(layer.bias for layer in layers)
    return tuple(layer.weight for layer in layers), None if all(b is None for b in biases) else biases


def activated(h: Tensor, act: str | nn.Module) -> Tensor:
    """The activation by name or by module."""
    if act == "swiglu":
        gate, value = h.chunk(2, -1)
        return nn.functional.silu(gate) * value
    return ACTIVATIONS[act](h) if isinstance(act, str) else act(h)


def project(x: Tensor, layers: tuple[Layer, ...], norm: nn.Module | None = None) -> Tensor:
    """The layers' outputs for norm(x) side by side, [..., K] → [..., F]."""
    x, folded = enter(x, norm, layers)
    return product(x, layers, folded)


def product(
    x: Tensor, layers: tuple[Layer, ...], norm: FoldedNorm | None = None, stats: Tensor | None = None
) -> Tensor:
    """The layers' outputs side by side, [..., K] → [..., F], as one product where all of them can be read."""
    if norm is not None:
        return linear(x, norm.folded, norm=(None, None, norm.eps), stats=stats)
    if not all(readable(layer, LINEARS) for layer in layers):
        outputs = [layer(x) for layer in layers]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
    return linear(x, *packed(tuple(layer.weight for layer in layers), tuple(layer.bias for layer in layers)))


def finish(
    x: Tensor,
    layer: nn.Module | None,
    norm: nn.Module | None = None,
    drop: nn.Module | None = None,
    layer_scale: Tensor | None = None,
    sample_scale: Tensor | None = None,
    residual: Tensor | None = None,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, Tensor | None]:
    """sample_scale · layer_scale · drop(layer(norm(x))) + residual; with `return_stats` also row statistics or None."""
    if layer is not None and readable(layer, LINEARS) and idle(drop):
        x, folded = enter(x, norm, (layer,))
        weight, bias, folded = operands(layer.weight, layer.bias, folded)
        end = dict(layer_scale=layer_scale, sample_scale=sample_scale, residual=residual, return_stats=return_stats)
        return linear(x, weight, bias, norm=folded, **end)
    x = x if norm is None else norm(x)
    x = x if layer is None else layer(x)
    y = scaled(x if drop is None else drop(x), layer_scale, sample_scale)
    y = y if residual is None else y + residual
    return (y, None) if return_stats else y


class Branch(NamedTuple):
    """What a block adds to its stream: drop_path(layer_scale · scale(drop(body(norm(x), **call)))).

    Attributes:
        body: attention or MLP, or its parts.
        norm: module applied to x first.
        scale: LayerScale, as a module.
        drop_path: stochastic depth.
        layer_scale: LayerScale, as the block's own parameter [D].
        drop: dropout of the branch that the block, not the body, holds.
        call: the rest of the body's arguments.
    """

    body: nn.Module | Attention | Mlp
    norm: nn.Module | None = None
    scale: nn.Module | None = None
    drop_path: nn.Module | None = None
    layer_scale: Tensor | None = None
    drop: nn.Module | None = None
    call: dict[str, object] | None = None


def add(x: Tensor, *branches: Branch) -> Tensor:
    """x [B, ..., D] plus each branch in turn, ended inside its body where nobody watches the parts."""
    stats, last = None, len(branches) - 1
    for i in range(0, len(branches), 2):  # the two LayerNorms of a block are folded in one launch
        pair = [_parts(branch) for branch in branches[i : i + 2]]
        norms = fold_norms(x, *(_entry(b, parts) for b, parts in zip(branches[i : i + 2], pair, strict=True)))
        for j, (parts, norm) in enumerate(zip(pair, norms, strict=True), i):
            x, stats = _add(x, branches[j], parts, norm, stats, norm is not None and j < last)
    return x


def _parts(branch: Branch) -> Attention | Mlp | str:
    """The parts of a branch's body; in a word that it is called, or why it runs its own forward."""
    if not isinstance(branch.body, nn.Module):
        return branch.body
    found = reader(branch.body)
    return "called" if found is None else found(branch.body, **branch.call or {})


def _entry(branch: Branch, parts: Attention | Mlp | str) -> Entry | None:
    """The LayerNorm of a branch and the layers behind it; None where there is none to fold."""
    if isinstance(parts, str) or (branch.norm is not None and parts.first is not None):
        return None
    layers = parts.projections if isinstance(parts, Attention) else parts.fc1
    return entry(branch.norm if parts.first is None else parts.first, layers)


def _add(
    x: Tensor,
    branch: Branch,
    parts: Attention | Mlp | str,
    folded: FoldedNorm | None,
    stats: Tensor | None,
    return_stats: bool,
) -> tuple[Tensor, Tensor | None]:
    """The sum, and its row statistics where they are asked for and cheap."""
    body, norm, scale, drop_path, layer_scale, drop, call = branch
    folded = of_dtype(folded, x)
    entering, stats = (x, stats) if folded is not None else (x if norm is None else norm(x), None)
    if isinstance(parts, str):
        y = body(entering, **call or {})
        y = y[0] if isinstance(y, tuple) else y
    else:
        known, learned = gain(scale)
        if known and own(layer_scale) and draws(drop_path) and all(idle(d) for d in (*parts.drops, drop)):
            end = dict(layer_scale=layer_scale if learned is None else learned, sample_scale=sample_scale(drop_path, x))
            y = run(entering, parts, folded, stats=stats, residual=x, return_stats=return_stats, **end)
            return y if return_stats else (y, None)
        y = run(entering, parts, folded, stats=stats)
    y = y if drop is None else drop(y)
    y = scaled(y if scale is None else scale(y), layer_scale, None)
    return x + (y if drop_path is None else drop_path(y)), None
