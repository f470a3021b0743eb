"""Predicts the launches of an op with our kernels and with PyTorch's operators; `plan` compares their times.

Rates and the cost of single launches are in `cost`.
"""

import math
from collections.abc import Callable

from .cost import Branch, Launch, attention_launch, forward, one_pass, product, seen_pairs

Pair = tuple[list[Launch], list[Launch]]  # (launches of our kernels, launches of PyTorch's operators)


def _linear(size: int, training: bool, M: int, K: int, F: int, norm: bool, residual: bool, fold: bool) -> Pair:
    """`linear` of x [M, K] to F outputs."""
    b = Branch("linear", 1, M, K, F, K, itemsize=size)
    ours = [product(b, M, F, K, True, M * F * residual)]
    ours += [one_pass(b, M * K)] * norm + [one_pass(b, 2 * K * F)] * (norm and fold)
    theirs = [product(b, M, F, K)] + [one_pass(b, 2 * M * K, "norm")] * norm + [one_pass(b, 3 * M * F)] * residual
    return ours, theirs


def _attention_pair(
    size: int,
    training: bool,
    images: int,
    heads: int,
    queries: int,
    keys: int,
    D: int,
    packed: bool,
    causal: bool = False,
) -> Pair:
    """`attention`, or `attention_qkv` if packed; then the gradient of the projections is one tensor."""
    b = Branch("attention", images, keys, heads * D, (2 * keys + queries) * heads * D // max(keys, 1), heads * D, heads,
               itemsize=size)  # fmt: skip
    flops = 4.0 * images * heads * seen_pairs(queries, keys, causal) * D
    pair = [Launch(kind, flops, attention_launch(b, False).nbytes) for kind in ("fused attention", "attention")]
    ours, theirs = [[launch] for launch in pair]
    if training:
        for launches, launch in ((ours, pair[0]), (theirs, pair[1])):
            launches.append(launch._replace(flops=2.5 * flops, nbytes=2 * launch.nbytes, backward=True))
        small = one_pass(b, 0)
        theirs += [small, small] + [one_pass(b, 2 * images * keys * b.width)] * packed
    return ours, theirs


def _patch_embed(size: int, training: bool, M: int, K: int, D: int, prefix: bool, pos: bool) -> Pair:
    """`patch_embed` of M patches of K values."""
    b = Branch("stem", 1, M, D, K, K, itemsize=size)
    ours = [product(b, M, D, K, True)]
    theirs = [product(b, M, D, K)._replace(kind="convolution")]
    theirs += [one_pass(b, 2 * M * D)] * prefix + [one_pass(b, 2 * M * D)] * pos
    if training:
        ours += [product(b, D, K, M, True, 8 / size * K * D * math.ceil(M / 4096)), one_pass(b, 0)]  # fp32 sums
        theirs += [product(b, D, K, M)._replace(kind="convolution")]
    return ours, theirs


def _layer_norm(size: int, training: bool, M: int, D: int) -> Pair:
    """`layer_norm` of x [M, D]; the backward pass sums gradients of the parameters in two stages."""
    b = Branch("norm", 1, M, D, D, D, itemsize=size)
    ours = [one_pass(b, 2 * M * D)]
    theirs = [one_pass(b, 2 * M * D, "norm")]
    small = one_pass(b, 0)
    if training:
        sums = 8 / size * 2 * D * min(M, 512)  # fp32, written and read
        ours += [one_pass(b, 3 * M * D), one_pass(b, sums)]
        theirs += [one_pass(b, 3 * M * D, "norm backward"), small]
    return ours, theirs


def _depthwise(
    size: int,
    training: bool,
    M: int,
    C: int,
    K: int,
    stride: int,
    bias: bool,
    activation: bool,
    residual: bool,
    copied: bool,
) -> Pair:
    """`depthwise` with M outputs of C channels; PyTorch adds the bias, activation and residual in passes of their own.

    The weight is copied to [K², C], unless it is stored so (`copied` is False). cuDNN reads and writes x [B, H, W, C]
    as it is; copies that it makes for views of tokens are not counted.
    """
    b = Branch("depthwise", 1, M, C, C, C, itemsize=size)
    y = M * C
    x = M * C * stride**2
    small = one_pass(b, 2 * K * K * C)
    ours = [small] * copied + [one_pass(b, x + y)]
    theirs = [one_pass(b, x + y)] + [one_pass(b, 2 * y)] * (bias + activation) + [one_pass(b, 3 * y)] * residual
    if training:
        ours += [one_pass(b, x + 2 * y)] * activation + [one_pass(b, x + y * (1 + residual)), one_pass(b, x + y), small]
        theirs += [one_pass(b, 3 * y)] * (activation + residual) + [one_pass(b, x + y)] * 2 + [one_pass(b, y)] * bias
    return ours, theirs


def _mlp(size: int, training: bool, M: int, C: int, F: int, inner: int, norm: bool, residual: bool, fold: bool) -> Pair:
    """`mlp` of x [M, C]: F outputs of the first layer, `inner` inputs of the second."""
    b = Branch("mlp", 1, M, C, F, inner, itemsize=size)
    ours, theirs = (forward(None, b, way, norm, True, training, not fold) for way in ("fused", "plain"))
    theirs = theirs[not norm :]
    return ours, theirs if residual else theirs[:-1]


def _window_attention(size: int, training: bool, M: int, C: int, N: int, shifted: bool, padded: bool) -> Pair:
    """`window_attention` of M tokens of C channels, in windows of N; PyTorch pads, rolls and partitions in passes."""
    b = Branch("attention", 1, M, C, 3 * C, C, itemsize=size)
    ours, core = (Launch(kind, 4.0 * M * N * C, size * 4 * M * C) for kind in ("fused attention", "attention"))
    theirs = [one_pass(b, 6 * M * C)] * (1 + shifted + padded) + [core] + [one_pass(b, 2 * M * C)] * (1 + shifted)
    if not training:
        return [ours], theirs
    more = 2.5 if N <= 64 else 4.5  # products of the backward pass, over those of the forward pass
    backward = ours._replace(flops=more * ours.flops, nbytes=2 * ours.nbytes, backward=True)
    return [ours, backward, one_pass(b, 0)], theirs * 2 + [
        core._replace(flops=2.5 * core.flops, nbytes=2 * core.nbytes, backward=True)
    ]


def _deformable_attention(size: int, training: bool, M: int, C: int, heads: int, L: int, P: int, N: int) -> Pair:
    """`deformable_attention` of M queries, L·P points of a head, from N cells of C channels.

    Of each level PyTorch copies the map and the grid, samples, multiplies and sums; our backward pass sorts the points.
    """
    b = Branch("deformable", 1, M, C, C, C, itemsize=size)
    points = 3 * M * heads * L * P * 4 / size  # fp32
    samples = M * C * P
    ours = [one_pass(b, N * C + points + M * C)]
    theirs = [one_pass(b, 2 * points)] * 2
    theirs += [one_pass(b, 2 * N * C / L), one_pass(b, N * C / L + samples), one_pass(b, 2 * samples)] * L
    theirs += [one_pass(b, samples + M * C)] * L
    if not training:
        return ours, theirs
    sort = [one_pass(b, points)] * 8
    ours += [one_pass(b, N * C + 3 * points + M * C), *sort, one_pass(b, N * C + 4 * (points + M * C))]
    return ours, theirs * 3


def _batch_norm_act(size: int, training: bool, M: int, C: int, activation: bool, residual: bool) -> Pair:
    """`batch_norm_act` of M pixels of C channels; PyTorch normalises, adds and activates in passes of their own."""
    b = Branch("norm", 1, M, C, C, C, itemsize=size)
    y = M * C
    ours = [one_pass(b, (2 + residual) * y)]
    theirs = [one_pass(b, 2 * y)] + [one_pass(b, 3 * y)] * residual + [one_pass(b, 2 * y)] * activation
    if training:
        ours += [one_pass(b, (3 + 2 * residual) * y)]
        theirs += [one_pass(b, 3 * y)] * (1 + activation)
    return ours, theirs


OPS: dict[str, Callable[..., Pair]] = dict(
    linear=_linear, attention=_attention_pair, patch_embed=_patch_embed, layer_norm=_layer_norm, mlp=_mlp,
    depthwise=_depthwise, window_attention=_window_attention, deformable_attention=_deformable_attention,
    batch_norm_act=_batch_norm_act,
)  # fmt: skip
