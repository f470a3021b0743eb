"""Residual branches: x + drop_path(layer_scale · dropout(body(norm(x)))), in as few launches as the modules allow.

A body is an attention or an MLP: one of our modules, or what a reader found of another (`Body`, `MlpBody`).
The LayerNorm before it is folded into its first matmul; LayerScale, stochastic depth and the residual addition are
fused into the epilogue of its last one. A module whose weights cannot be read is called instead, so hooks fire and
replaced layers run.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels import choose, mixed, settings
from ..kernels.argument import Lent, NextNorm, Normalized
from ..kernels.layer_norm import scaled
from . import body as body_file
from . import ways
from .body import Before, Given, Output, normalize, normalize_for
from .freeze import Entry, fold_norms, of_dtype
from .hooks import are_plain_tensors, has_hooks
from .leaves import (
    ConstantScale,
    entry_of,
    has_sample_scale,
    is_identity,
    is_inactive,
    is_readable,
    kept_images,
    layer_scale_of,
    norm_of,
    sample_scale_of,
)
from .mlp import MlpBody
from .ways import choose_way, plainly

Body = body_file.Body | MlpBody


class Branch(NamedTuple):
    """A residual branch: drop_path(layer_scale · scale(drop(post_norm(body(norm(x), **call)))))."""

    body: nn.Module | Body  # attention or MLP, or its parts
    norm: nn.Module | None = None  # module applied to x first
    scale: nn.Module | None = None  # LayerScale as a module
    drop_path: nn.Module | None = None  # stochastic depth
    layer_scale: Tensor | None = None  # LayerScale as a parameter [D] of the block
    drop: nn.Module | None = None  # dropout that belongs to the block, not the body
    call: dict[str, Any] | None = None  # further arguments of the body
    post_norm: nn.Module | None = None  # module applied to the body's output (Swin V2)


def add_branches(x: Tensor, *branches: Branch, block: nn.Module | None = None) -> Tensor:
    """x [B, ..., D] plus each branch in turn; for the arguments see `add_branches_with_stats`."""
    return add_branches_with_stats(x, *branches, block=block)[0]


def add_branches_with_stats(
    x: Tensor,
    *branches: Branch,
    block: nn.Module | None = None,
    stats: Given | None = None,
    next_norm: nn.Module | None = None,
    lends: bool = False,
) -> Output:
    """Adds each branch to x [B, ..., D] in turn.

    Args:
        x: [B, ..., D]; overwritten if `stats` says that it was lent.
        *branches: attention and MLP of each block in order; the two LayerNorms of a block are folded in one launch.
        block: the module that they belong to; it caches their sizes for `choose_way`.
        stats: from the previous block, see `engine.body.Body.run`.
        next_norm: the norm of the next block; None for no statistics.
        lends: only the next block, which gets `stats`, reads the result: it may be lent.

    Returns:
        [B, ..., D], and the next block's `stats` or None.
    """
    if ways.state.inside_plain:
        return _add_plainly(completed(x, stats), *branches), None
    for i in range(0, len(branches), 2):
        pair = branches[i : i + 2]
        bodies = [_body(branch, x) for branch in pair]
        way = _way(block if len(branches) < 3 else None, x, pair, bodies)
        if way == "plain":
            x = plainly(_add_plainly, completed(x, stats), *pair)
            stats = None
            continue
        if way in ("fused", "mixed") and x.stride(-1) != 1:
            x = x.contiguous()  # once, since the norm, the residual and the backward pass read it
        entries = [_entry(branch, body) for branch, body in zip(pair, bodies, strict=True)]
        norms: Sequence[Before | NextNorm | None]
        after: Before | NextNorm | None
        if way == "mixed":
            parameters = [None if entry is None else entry.parameters for entry in entries]
            last = None if next_norm is None else norm_of(next_norm)
            late = _late_bias(pair[-1], bodies[-1], x) if len(pair) == 2 else None
            lent = stats if isinstance(stats, Lent) else None
            if lent is not None and (late is None or None in parameters or not _accumulates(pair[0], bodies[0], x)):
                x = lent.complete(x)
                stats = None
                lent = None
            lends &= len(branches) == 2 and mixed.may_lend(x)
            ends = late, lent, lends
            norms = [norm if norm is None else NextNorm(norm, *ends if i else ()) for i, norm in enumerate(parameters)]
            after = None if last is None else NextNorm(last)
        else:
            x = completed(x, stats)
            norms = fold_norms(x, *entries)
            after = (norms[0] or norms[-1]) if next_norm is not None or i + 2 < len(branches) else None
        readers = [*norms[1:], after]  # the norm that reads each branch's output
        for branch, body, entry, norm, reader in zip(pair, bodies, entries, norms, readers, strict=True):
            before = stats
            x, stats = _add(x, branch, body, norm, stats, reader, way, entry)
        if lends and isinstance(before, Normalized) and before.late_bias is not None:
            return x, Lent(before.pending)  # x is a sum that this block made
    return x, None if next_norm is None else stats


def completed(x: Tensor, stats: Given | None) -> Tensor:
    """x with all biases, if it was lent without them."""
    return stats.complete(x) if isinstance(stats, Lent) else x


def runs_plain(x: Tensor, *branches: Branch, block: nn.Module | None = None) -> bool:
    """True if `add_branches` would run these branches of x in the plain way; for `block` see there."""
    if ways.state.inside_plain:
        return True
    with contextlib.nullcontext() if torch.compiler.is_compiling() else settings.unobserved():
        if block is not None and (way := ways.known_way(block, x)[0]) is not None:
            return way == "plain"
        return _way(block, x, branches, [_body(branch, x) for branch in branches]) == "plain"


def _way(block: nn.Module | None, x: Tensor, branches: tuple[Branch, ...], bodies: list[Body | None]) -> str:
    if not choose.has_ways(x) or not any(bodies):
        return "reference"
    sizes = []
    for branch, body in zip(branches, bodies, strict=True):
        if body is not None:
            layer_scales, drops = _scales(branch)
            sizes.append(body.sizes()._replace(scales=layer_scales + drops, layer_scale=min(layer_scales, 1)))
    return choose_way(block, x, tuple(sizes), replays=True)


def _scales(branch: Branch) -> tuple[int, int]:
    """Numbers of factors that scale the branch in this call: of LayerScale, and of stochastic depth."""
    readable, factors = layer_scale_of(branch.scale)
    depth = branch.drop_path
    drops = depth is not None and depth.training and (getattr(depth, "p", None) or getattr(depth, "drop_prob", None))
    return (not readable or factors is not None) + (branch.layer_scale is not None), int(bool(drops))


def _late_bias(branch: Branch, body: Body | None, x: Tensor) -> Tensor | None:
    """Bias of fc2 that the previous branch adds in advance, so that fc2 can accumulate in place; else None."""
    if not isinstance(body, MlpBody) or not isinstance(body.act, str) or not _accumulates(branch, body, x):
        return None
    bias = body.fc2.bias if body.fc2.weight.dtype == body.fc1[0].weight.dtype else None
    return None if bias is None else bias.detach()  # a Function returns it, which would end its need of a gradient


def _accumulates(branch: Branch, body: Body | None, x: Tensor) -> bool:
    """True if the last matmul of a mixed branch of x may write to the residual, as nothing but a bias follows it."""
    if body is None or torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
        return False
    if branch.post_norm is not None or any(_scales(branch)):
        return False
    bare = is_inactive(branch.drop) and has_sample_scale(branch.drop_path)  # draws no random numbers
    if not bare or not (body.last is None or is_identity(body.last)) or not all(map(is_inactive, body.drops)):
        return False
    between = getattr(body, "between", None)  # of an attention, which may read x
    return not getattr(between, "takes_input", False) and all(is_readable(layer) for layer in body.layers())


def _add_plainly(x: Tensor, *branches: Branch) -> Tensor:
    for branch in branches:
        x, _ = _add(x, branch, None, None, None, None, "plain")
    return x


def _body(branch: Branch, x: Tensor) -> Body | None:
    """The body in a form that supports fusion; None where the module must be called."""
    if not isinstance(branch.body, nn.Module):
        return branch.body
    body = branch.body
    forward = body.__dict__.get("forward")
    if forward is None or has_hooks(body):
        return None
    reader = getattr(forward.func, "read", None)  # bound by `optimize`
    parts = None if reader is None else reader(body, **branch.call or {})
    return None if isinstance(parts, str) else parts


def _entry(branch: Branch, body: Body | None) -> Entry | None:
    """The LayerNorm of a branch and the linear layers after it; None if there is nothing to fold."""
    inside = getattr(body, "first", None)
    if body is None or (branch.norm is not None and inside is not None):
        return None
    return entry_of(branch.norm if inside is None else inside, body.entering())


def _add(
    x: Tensor,
    branch: Branch,
    body: Body | None,
    before: Before | NextNorm | None,
    stats: Given | None,
    reader: Before | NextNorm | None,
    way: str,
    entry: Entry | None = None,
) -> Output:
    """(x + branch, its statistics for `reader`, the norm of the next branch, or None)."""
    module, norm, scale, drop_path, layer_scale, drop, call, post_norm = branch
    if drop_path is not None and (images := kept_images(drop_path, x)) is not None:
        skipping: Any = drop_path
        images, factor = skipping.computed(images)
        branch = branch._replace(drop_path=ConstantScale(factor))
        part, _ = _add(x[images], branch, body, before, None, None, way, entry)
        return x.index_copy(0, images, part), None
    before = of_dtype(before.norm if isinstance(before, NextNorm) else before, x)
    if before is None:
        entering, stats = x, None
        if norm is not None:
            entering = norm(x) if way == "plain" else normalize(x, norm) if entry is None else normalize_for(entry, x)
    else:
        entering = x
        stats = stats if isinstance(stats, (Normalized, Lent)) == (way == "mixed") else None
    if body is None:
        y = module(entering, **call or {})
        y = y[0] if isinstance(y, tuple) else y
    else:
        readable, factors = layer_scale_of(scale)
        drops = (*getattr(body, "drops", ()), drop)  # active dropout draws random numbers before stochastic depth
        ends = readable and are_plain_tensors(layer_scale) and has_sample_scale(drop_path)
        if ends and post_norm is None and all(is_inactive(d) for d in drops):
            return body.run(
                entering,
                norm=before,
                stats=stats,
                layer_scale=layer_scale if factors is None else factors,
                sample_scale=sample_scale_of(drop_path, x),
                residual=x,
                return_stats=reader is not None,
                next_norm=reader if isinstance(reader, NextNorm) else None,
                way=way,
            )
        y, _ = body.run(entering, norm=before, stats=stats, way=way)
    if post_norm is not None:
        y = post_norm(y) if way == "plain" else normalize(y, post_norm)
    y = y if drop is None else drop(y)
    y = scaled(y if scale is None else scale(y), layer_scale, None)
    return x + (y if drop_path is None else drop_path(y)), None
