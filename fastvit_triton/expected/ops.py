"""Predicts the launches of an op with our kernels and with PyTorch's operators, for tables of choices.

Rates and the cost of single launches are in `blocks`.
"""

import math
from collections.abc import Callable

from ..kernels.sizes import Branch, seen_pairs
from .blocks import NARROW, Launch, attention_launch, fc1_pair, in_one_kernel, norm_backward, one_pass, product

Pair = tuple[list[Launch], list[Launch]]  # (launches of our kernels, launches of PyTorch's operators)


def _linear(
    size: int,
    training: bool,
    M: int,
    K: int,
    F: int,
    norm: bool,
    fold: bool,
    passes: int,
    residual: bool,
    layer_scale: bool,
    sample_scale: bool,
    again: bool = False,
) -> Pair:
    """`linear` of x [M, K] by F rows of weights; PyTorch's activation takes 0, 1 or, if it is gated, 2 passes.

    In training x, the weight and a bias get gradients. PyTorch sums those of the bias in a pass, we in that of
    equation (7) of `linear_backward`, if there is one, which also computes the output `again`.
    """
    b = Branch("linear", 1, M, K, F, K, itemsize=size)
    small, fp32 = one_pass(b, 0), 4 / size
    y, z, weight = M * (F // 2 if passes == 2 else F), M * F, K * F  # values of output, product and weight
    pre = z * (training and passes > 0)
    ours = [one_pass(b, M * K)] * norm + [one_pass(b, 2 * weight)] * (norm and fold)
    ours += [product(b, M, F, K, True, y * (1 + residual) - z + pre)]
    theirs = [one_pass(b, 2 * M * K, "norm")] * norm + [product(b, M, F, K)]
    theirs += [one_pass(b, 2 * y), one_pass(b, 3 * y)][:passes]
    theirs += [one_pass(b, 2 * y)] * (layer_scale + sample_scale) + [one_pass(b, 3 * y)] * residual
    if not training:
        return ours, theirs
    dx, dw = product(b, M, K, F), product(b, F, K, M)
    partial = 2 * fp32 * K * min(M, 512)  # sums of gradients of the norm's parameters
    if layer_scale and not passes:  # equation (10)
        dw_fp32 = product(b, F, K, M, extra=(fp32 - 1) * weight)
        ours += [one_pass(b, 2 * weight), dx, dw_fp32, one_pass(b, (fp32 + 2) * weight), small, small]
    else:
        ours += [dx, dw] + [small] * (passes > 0 or sample_scale)
    ours += [small] * (passes > 0 and layer_scale)
    ours += [one_pass(b, y * (1 + again) + z + pre), small] if passes or sample_scale else [one_pass(b, z)]
    ours += [one_pass(b, 4 * M * K + partial), one_pass(b, partial)] * norm
    theirs += [dx, dw, one_pass(b, z)] + [one_pass(b, 2 * y)] * sample_scale
    theirs += [one_pass(b, 2 * y), one_pass(b, 3 * y), one_pass(b, y)] * layer_scale
    theirs += [one_pass(b, 3 * y)] * (0, 1, 3)[passes] + [one_pass(b, 2 * z)] * (passes == 2)
    theirs += norm_backward(b, M * K) * norm
    return ours, theirs


def _fc1(size: int, training: bool, M: int, K: int, F: int, passes: int) -> Pair:
    """fc1 [F, K] of a mixed MLP in inference, with its activation, which is gated if PyTorch's takes two passes."""
    return fc1_pair(Branch("mlp", 1, M, K, F, F // passes, itemsize=size))


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
    nbytes = attention_launch(b, False).nbytes
    ours, theirs = ([Launch(kind, flops, nbytes)] for kind in ("fused attention", "attention"))
    if training:
        back = ours[0]._replace(flops=2.5 * flops, nbytes=2 * nbytes, backward=True)
        q, small = images * heads * queries * D * size, one_pass(b, 0)
        again = 0 if in_one_kernel(D, keys, size) else nbytes
        ours += [back._replace(nbytes=2 * nbytes + again)] + [small] * (again > 0)
        sums = 6 * q if size == 2 else 0  # as in `attention_launch`
        theirs += [back._replace(kind="attention", nbytes=2 * nbytes + sums), small, small]
        theirs += [one_pass(b, 2 * images * keys * b.width)] * packed
    return ours, theirs


def _patch_embed(size: int, training: bool, M: int, K: int, D: int, prefix: bool, pos: bool) -> Pair:
    """`patch_embed` of M patches of K values, with a bias, which PyTorch adds and sums in passes of its own."""
    b = Branch("stem", 1, M, D, K, K, itemsize=size)
    small, summed = one_pass(b, 0), one_pass(b, M * D)
    ours = [product(b, M, D, K, True)]
    theirs = [product(b, M, D, K)._replace(kind="convolution"), one_pass(b, 2 * M * D)]
    theirs += [one_pass(b, 2 * M * D)] * prefix + [one_pass(b, 2 * M * D)] * pos
    if training:
        ours += [product(b, D, K, M, True, 8 / size * K * D * math.ceil(M / 4096)), small]  # fp32 sums
        ours += [summed] + [summed] * pos + [small] * prefix
        theirs += [product(b, D, K, M)._replace(kind="convolution"), summed] + [summed] * pos + [small] * prefix
    return ours, theirs


def _layer_norm(size: int, training: bool, M: int, D: int) -> Pair:
    """`layer_norm` of x [M, D]; the backward pass sums gradients of the parameters in two stages."""
    b = Branch("norm", 1, M, D, D, D, itemsize=size)
    ours = [one_pass(b, 2 * M * D)]
    theirs = [one_pass(b, 2 * M * D, "norm")]
    if training:
        sums = 8 / size * 2 * D * min(M, 512)  # fp32, written and read
        ours += [one_pass(b, 3 * M * D), one_pass(b, sums)]
        theirs += norm_backward(b, M * D)
    return ours, theirs


def _add_layer_norm(size: int, training: bool, M: int, D: int, layer_scale: bool, sample_scale: bool) -> Pair:
    """`add_layer_norm` of x and a residual [M, D], whose gradients are two tensors."""
    b = Branch("norm", 1, M, D, D, D, itemsize=size)
    y = M * D
    scales = layer_scale + sample_scale
    ours = [one_pass(b, 4 * y)]
    theirs = [one_pass(b, 2 * y)] * scales + [one_pass(b, 3 * y), one_pass(b, 2 * y, "norm")]
    if training:
        sums = 4 / size * (2 + layer_scale) * D * min(M, 512)
        ours += [one_pass(b, (5 + layer_scale) * y + sums), one_pass(b, sums)]
        theirs += [*norm_backward(b, y), one_pass(b, 3 * y)] + [one_pass(b, 2 * y)] * scales
        theirs += [one_pass(b, 3 * y), one_pass(b, y)] * layer_scale
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


def _mlp(
    size: int,
    training: bool,
    M: int,
    C: int,
    F: int,
    inner: int,
    norm: bool,
    fold: bool,
    passes: int,
    residual: bool,
    layer_scale: bool,
    sample_scale: bool,
) -> Pair:
    """`mlp` of x [M, C]: F outputs of the first layer, `inner` inputs of the second.

    Our backward pass computes the hidden layer again, where it reads the pre-activation.
    """
    first = _linear(size, training, M, C, F, norm, fold, passes, False, False, False, again=True)
    second = _linear(size, training, M, inner, C, False, False, 0, residual, layer_scale, sample_scale)
    ours, theirs = (a + b for a, b in zip(first, second, strict=True))
    if not training and size == 2 and C * size <= NARROW and passes == 1:
        b = Branch("mlp", 1, M, C, F, inner, itemsize=size)
        values = M * C * (2 + residual) + C * (F + inner)
        one = Launch("fused product", 2.0 * M * C * (F + inner), size * values, (M, F + inner, C))
        ours = [one_pass(b, 2 * C * F)] * (norm and fold) + [one]
    return ours, theirs


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
    linear=_linear, fc1=_fc1, attention=_attention_pair, patch_embed=_patch_embed, layer_norm=_layer_norm,
    add_layer_norm=_add_layer_norm, mlp=_mlp,
    depthwise=_depthwise, window_attention=_window_attention, deformable_attention=_deformable_attention,
    batch_norm_act=_batch_norm_act,
)  # fmt: skip
