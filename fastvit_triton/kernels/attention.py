"""Attention for any numbers of queries and keys, with an optional bias, causal mask, key lengths or packed images.

Math      S = scale · Q Kᵀ + bias              [Nq, Nk]                          (1)
          O = softmax(S) V                     [Nq, Dv]                          (2)
          L = ln Σₙ exp(S)                     [Nq]      natural log, fp32       (3)
          axis_bias: bias[:, i·w + j] = row[:, i] + column[:, j] for the key in row i and column j of a map.
          causal: query m sees key n only if n ≤ m + Nk − Nq, so the last query sees all keys.
          A row whose keys are all masked gives O = 0 and no gradient, and L = −inf.
Backward  equations (4) to (8) of `attention_backward`.
Kernels   Scores and L are kept in base 2, as S·log₂e and L·log₂e, because exp2 is one instruction.
          The forward pass has three forms. The loop: blocks of keys with a running maximum, for all calls. Whole
          rows: the scores with up to 256 keys are held in registers, and all loads are in flight at once; without a
          bias or mask, where a row "attention.fwd_whole" of tuned/ says so. With TMA = 1 in that row, on sm_90 and
          for heads of 16, 32 or 64 channels in 16 bits: persistent programs, whose next tile is copied by
          descriptors while this one is computed.
Cost      forward 2·B·H·Nq·Nk·(D + Dv) flops; bytes = q + k + v + o + 4·B·H·Nq. Causal attention skips blocks of
          keys that no query of a tile sees, half of all if Nq = Nk, and masks only those on the diagonal.
Saved     q, k, v, bias, o in storage dtype and L in fp32, with a bias as two numbers.
Limits    D, Dv ≤ 256, held as two power-of-two tiles (80 = 64 + 16). Tensors are copied if their last axis is not
          contiguous. Without a bias the backward pass computes the weights as exp(S − L) from L rounded to fp32, so
          their relative error, and that of the gradients of q, k and v, grows as 2⁻²⁴·|S|: 6e-3 for scores of 1e5,
          where PyTorch's unfused attention keeps the weights and loses nothing. With one, the maximum and the sum of
          a row are stored apart, so a row masked whole by finite numbers has PyTorch's weights; biases below −2e38
          count as equal.
Sources   Dao, FlashAttention-2, arXiv:2307.08691, algorithms 1 and 2; running maximum: Milakov & Gimelshein,
          arXiv:1805.02867.
          Vaswani et al., Attention is all you need, arXiv:1706.03762, eq. 1.
          Dosovitskiy et al., ViT, arXiv:2010.11929, eq. 5-8.
          Dehghani et al., NaViT, arXiv:2307.06304, section 2.1 (packed images).
          Li et al., MViTv2, arXiv:2112.01526, section 4.1 (biases of rows and columns).
Differs   From FlashAttention-2: any Nq and Nk (197 is the usual case), D ≠ Dv (LeViT), any softmax scale (T2T-ViT,
          CvT), a bias shared by groups of images (Swin).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import check, choose
from .argument import expect_number
from .attention_backward import bwd_op
from .attention_inner import (
    fwd_step,
    head_pointer,
    load_box,
    load_boxes,
    load_pieces,
    load_tiles,
    program_position,
    seen_keys,
    store_box,
    store_tiles,
    whole_rows,
    zero_tiles,
)
from .attention_launch import (
    ARGUMENTS,
    arguments_of,
    bias_kind,
    blocks_of,
    loads_tail_early,
    prepare,
    prepared,
    reads_boxes,
    sizes_of,
    start,
    tail_block,
    units,
    whole_blocks,
    whole_boxes,
)
from .backend import kernels_available
from .descriptor import aligned
from .launch import cdiv
from .op import Op, cast, expect, make_randn, once_differentiable, register
from .tile import jit, tl

MAX_AXES = 256  # rows and columns of keys up to which their biases are added within the kernels


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    scale: float | None = None,
    kv_lens: Tensor | None = None,
    return_lse: bool = False,
    axis_bias: tuple[Tensor, Tensor] | None = None,
    causal: bool = False,
) -> Tensor | Any:
    """softmax(scale · q kᵀ + bias) v, for any numbers of queries and keys.

    Args:
        q: [B, H, Nq, D]; strided views, as of a packed projection, are not copied.
        k: [B, H, Nk, D].
        v: [B, H, Nk, Dv].
        bias: [G, H, Nq, Nk], added to the scores (−inf masks a key), or boolean with True for "attend". Image b uses
            group b mod G. Axes of size 1 broadcast.
        scale: multiplies q kᵀ; None means D^-0.5.
        kv_lens: [B] integers, number of valid keys of each image; later keys are masked. Values are clamped to 0 … Nk.
        return_lse: also return L of equation (3), which has no gradient.
        axis_bias: (row [B, H, Nq, h], column [B, H, Nq, w]) for keys that are a map of h · w = Nk: the bias of a key is
            that of its row plus that of its column, as of decomposed relative positions. The kernels do not store the
            sum if h + w ≤ 256. Not with bias, kv_lens or causal.
        causal: query m sees key n only if n ≤ m + Nk − Nq: the last query sees all keys. PyTorch's `is_causal` is
            n ≤ m, the same if Nq = Nk.

    Returns:
        [B, H, Nq, Dv]; with `return_lse` also L [B, H, Nq], fp32.

    Raises:
        ValueError: a size or device does not fit.
        TypeError: an argument is of another type or dtype.
    """
    expect("q", q, B=None, H=None, Nq=None, D=None)
    B, H, _, D = q.shape
    expect("k", k, q, B=B, H=H, Nk=None, D=D)
    expect("v", v, q, B=B, H=H, Nk=k.shape[2], Dv=None)
    check.heads(q, k, v)
    check.scores(q, (H, q.shape[2], k.shape[2]), bias, kv_lens, scale, return_lse)
    columns = 0
    bare = bias is kv_lens is None
    if causal is not False:
        check.causal(causal, axis_bias)
    if axis_bias is not None:
        check.axis_bias(q, (H, q.shape[2], k.shape[2]), axis_bias, bare)
        columns = axis_bias[1].shape[3]
        bare = False
        if not columns or axis_bias[0].shape[3] + columns > MAX_AXES:
            bias = sum_of_axes(*axis_bias)
            axis_bias = None
            columns = 0
    if kernels_available(q, max(D, v.shape[3])) and (
        return_lse or prefers_kernel(q, H, (q.shape[2], k.shape[2]), (D, v.shape[3]), bare, False, causal)
    ):
        bias = bias if axis_bias is None else torch.cat(axis_bias, -1)
        scale = D**-0.5 if scale is None else scale
        o, lse = _Fn.apply(*cast(q, k, v), bias, kv_lens, None, 0, scale, columns, causal)
        return (o, natural(lse)) if return_lse else o
    return reference(q, k, v, bias, scale, kv_lens, return_lse, axis_bias, causal)


def sum_of_axes(row: Tensor, column: Tensor) -> Tensor:
    """Biases of rows [..., h] and of columns [..., w] → those of all keys [..., h · w]."""
    return (row[..., :, None] + column[..., None, :]).flatten(-2)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Attention within each image of a packed batch of images of different sizes (NaFlex, NaViT).

    Args:
        q: [T, H, D], the tokens of all images, concatenated.
        k: [T, H, D].
        v: [T, H, Dv].
        cu_seqlens: [B + 1] non-decreasing integers from 0 to at most T; image b is tokens cu_seqlens[b] to
            cu_seqlens[b + 1] − 1.
        max_seqlen: at least the number of tokens of the longest image; sets the size of the launch.
        scale: softmax scale; None means D^-0.5.
        causal: tokens see only themselves and earlier tokens of their image.

    Returns:
        [T, H, Dv]; 0 for tokens that belong to no image.

    Raises:
        ValueError: a size or device does not fit, or cu_seqlens does not divide T tokens into images of at most
            max_seqlen. The values of cu_seqlens are checked on a CPU, and on a GPU only with FASTVIT_TRITON_CHECK=1;
            the kernels clamp them to T and max_seqlen, and so never access memory outside the tensors.
        TypeError: an argument is of another type or dtype.
    """
    expect("q", q, T=None, H=None, D=None)
    T, H, D = q.shape
    expect("k", k, q, T=T, H=H, D=D)
    expect("v", v, q, T=T, H=H, Dv=None)
    check.heads(q, k, v)
    check.images(cu_seqlens, q, max_seqlen)
    if scale is not None:
        expect_number("scale", scale)
    if causal is not False:
        check.causal(causal)
    if kernels_available(q, max(D, v.shape[2])):
        heads_first = (t.transpose(0, 1)[None] for t in cast(q, k, v))  # [1, H, T, D]
        scale = D**-0.5 if scale is None else scale
        o, _ = _Fn.apply(*heads_first, None, None, cu_seqlens, max_seqlen, scale, 0, causal)
        return o[0].transpose(0, 1)
    return reference_varlen(q, k, v, cu_seqlens, max_seqlen, scale, causal)


def prefers_kernel(
    x: Tensor,
    heads: int,
    lengths: tuple[int, int],
    widths: tuple[int, int],
    bare: bool,
    packed: bool,
    causal: bool = False,
) -> bool:
    """True if the plan selects our kernel for this attention, not the reference.

    Args:
        x: [B, ...], with the device and the dtype of the operands.
        heads: H.
        lengths: Nq and Nk.
        widths: D and Dv.
        bare: no bias, key lengths, norms or rotary positions; only our kernel gives 0 for a row without keys.
        packed: the gradients of q, k and v are one tensor.
        causal: queries see only earlier keys; PyTorch's kernels have this mask for Nq = Nk.
    """
    D, Dv = widths
    deterministic = torch.is_grad_enabled() and torch.are_deterministic_algorithms_enabled()
    empty = not torch.compiler.is_compiling() and 0 in (x.shape[0], *lengths)
    if not bare or D % 8 or D != Dv or deterministic or empty:  # SDPA pads odd widths, and its dq is not deterministic
        return True
    sizes = (*choose.lengths_of(x.shape[0], *lengths, int(heads)), int(D), packed)
    if causal:
        return lengths[0] != lengths[1] or choose.prefers_kernel(x, "attention", *sizes, True)
    return choose.prefers_kernel(x, "attention", *sizes)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    scale: float | None = None,
    kv_lens: Tensor | None = None,
    return_lse: bool = False,
    axis_bias: tuple[Tensor, Tensor] | None = None,
    causal: bool = False,
) -> Tensor | Any:
    """Equations (1) and (2) by PyTorch's fused attention; written out if L or forward-mode AD is needed."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    fused = not return_lse and _fits_sdpa(q, k)
    # PyTorch masks before it scales: a negative scale turns -inf into +inf, and the output into NaN
    if causal and fused and scale > 0 and bias is kv_lens is None and q.shape[2] == k.shape[2]:
        return F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=True)
    mask = _mask(q, k, bias if axis_bias is None else sum_of_axes(*axis_bias), kv_lens, causal)
    if fused:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = scale * (q @ k.mT).float() if q.dtype != torch.float64 else scale * (q @ k.mT)  # (1) [B, H, Nq, Nk]
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    lse = scores.detach().logsumexp(-1)  # (3)
    empty = (lse == float("-inf"))[..., None]
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    o = weights.to(v.dtype) @ v  # (2)
    return (o, lse.float()) if return_lse else o


def reference_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Attention on the images padded to max_seqlen tokens, so that no value of an image reaches another one."""
    T = len(q)
    images = len(cu_seqlens) - 1
    minimum = min if torch.compiler.is_dynamo_compiling() else torch.sym_min  # Dynamo of torch 2.11 traces the first
    length = minimum(max(max_seqlen, 1), T)
    ends = cu_seqlens.to(torch.int64).clamp(0, T)
    tokens = torch.arange(T, device=q.device)
    slots = torch.arange(length, device=q.device)
    at = ends[:-1, None] + slots  # [B, M]
    inside = (at < ends[1:, None])[:, :, None, None]
    q, k, v = (torch.where(inside, t[at.clamp(max=T - 1)], 0.0).transpose(1, 2) for t in (q, k, v))  # [B, H, M, D]
    o = reference(q, k, v, None, scale, kv_lens=ends.diff(), causal=causal).transpose(1, 2)  # [B, M, H, Dv]
    image = torch.searchsorted(ends[1:].contiguous(), tokens, right=True)  # [T]; B for tokens of no image
    slot = tokens - ends[image.clamp(max=images - 1)]
    belongs = ((image < images) & (slot < length))[:, None, None]
    return torch.where(belongs, o[image.clamp(max=images - 1), slot.clamp(max=length - 1)], 0.0)


def _mask(q: Tensor, k: Tensor, bias: Tensor | None, kv_lens: Tensor | None, causal: bool) -> Tensor | None:
    """bias, kv_lens and causal as one mask, boolean or of q's dtype, that broadcasts to [B, H, Nq, Nk], or None."""
    B, _, Nq, _ = q.shape
    Nk = k.shape[2]
    if bias is not None:
        groups = bias.shape[0]
        if groups != 1 and groups != B:
            bias = bias[torch.arange(B, device=bias.device) % groups]
        bias = bias if bias.dtype == torch.bool else bias.to(q.dtype)
    valid = None
    if kv_lens is not None:
        valid = (torch.arange(Nk, device=k.device) < kv_lens[:, None])[:, None, None, :]  # [B, 1, 1, Nk]
    if causal:
        queries = torch.arange(Nq, device=q.device)[:, None]
        earlier = torch.arange(Nk, device=k.device) <= queries + (Nk - Nq)  # [Nq, Nk]
        valid = earlier if valid is None else valid & earlier
    if valid is None:
        return bias
    if bias is None:
        return valid
    return bias & valid if bias.dtype == torch.bool else bias.masked_fill(~valid, float("-inf"))


@jit(do_not_specialize=["T", "G", "tiles"])
def _fwd_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, kv_lens_ptr, cu_seqlens_ptr, o_ptr, l_ptr,
    q_strides, k_strides, v_strides, bias_strides, o_strides, l_strides, H, Nq, Nk, T, G, tiles, scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, Dv: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HAS_KV_LENS: tl.constexpr,
    HAS_CU_SEQLENS: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, SAFE: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head. Loops over the keys that they see. Equations (1) to (3)."""
    offset = Nk - Nq if CAUSAL and not HAS_CU_SEQLENS else 0  # of the tensors, not of kv_lens
    tile, b, h, start, Nq, Nk = program_position(
        tl.program_id(0), tiles, H, Nq, Nk, T, cu_seqlens_ptr, kv_lens_ptr, HAS_CU_SEQLENS, HAS_KV_LENS
    )
    if tile * BLOCK_M >= Nq:
        return
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q_ptr, q_stride = head_pointer(q_ptr, q_strides, b, h, start, UNIT)
    k_ptr, k_stride = head_pointer(k_ptr, k_strides, b, h, start, UNIT)
    v_ptr, v_stride = head_pointer(v_ptr, v_strides, b, h, start, UNIT)
    if BIAS > 0:
        bias_ptr += (b % G) * bias_strides[0] + h * bias_strides[1]
    q0, q1 = load_tiles(q_ptr, m, q_stride, Nq, D, D0, D1, True)  # [BLOCK_M, D0], [BLOCK_M, D1]
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    o0, o1 = zero_tiles(BLOCK_M, V0, V1)
    seen = seen_keys(tile * BLOCK_M, offset, Nk) if CAUSAL else Nk  # by all queries of the tile
    full = seen // BLOCK_N * BLOCK_N
    tail = None
    if EARLY:  # the tail's keys and values, together with the queries: after the loop nothing would hide the wait
        k0, k1 = load_tiles(k_ptr, full + tl.arange(0, TAIL), k_stride, Nk, D, D0, D1, True)
        v0, v1 = load_tiles(v_ptr, full + tl.arange(0, TAIL), v_stride, Nk, Dv, V0, V1, True)
        tail = k0, k1, v0, v1
    for first in range(0, full, BLOCK_N):
        row_max, row_sum, o0, o1 = fwd_step(
            q0, q1, k_ptr, v_ptr, None, bias_ptr, k_stride, v_stride, bias_strides,
            m, first + tl.arange(0, BLOCK_N), first, offset, Nq, Nk, row_max, row_sum, o0, o1, scale,
            D, D0, D1, Dv, V0, V1, BIAS, ROWS, COLUMNS, PRECISION, SAFE, False, False,
        )  # fmt: skip
    if CAUSAL:
        for first in range(full, seen_keys(tile * BLOCK_M + BLOCK_M - 1, offset, Nk), BLOCK_N):  # on the diagonal
            row_max, row_sum, o0, o1 = fwd_step(
                q0, q1, k_ptr, v_ptr, None, bias_ptr, k_stride, v_stride, bias_strides,
                m, first + tl.arange(0, BLOCK_N), first, offset, Nq, Nk, row_max, row_sum, o0, o1, scale,
                D, D0, D1, Dv, V0, V1, BIAS, ROWS, COLUMNS, PRECISION, SAFE, True, True,
            )  # fmt: skip
    elif TAIL > 0:  # 197 = 3·64 + 5: only the last block of keys is masked
        row_max, row_sum, o0, o1 = fwd_step(
            q0, q1, k_ptr, v_ptr, tail, bias_ptr, k_stride, v_stride, bias_strides,
            m, full + tl.arange(0, TAIL), full, offset, Nq, Nk, row_max, row_sum, o0, o1, scale,
            D, D0, D1, Dv, V0, V1, BIAS, ROWS, COLUMNS, PRECISION, SAFE, True, False,
        )  # fmt: skip
    nonzero_sum = row_sum
    if SAFE:
        nonzero_sum = tl.where(row_sum == 0, 1.0, row_sum)  # a row without keys; its o0 and o1 are 0
        row_max = tl.where(row_sum == 0, float("-inf"), row_max)
        scale = 1.0
    o_ptr, o_stride = head_pointer(o_ptr, o_strides, b, h, start, UNIT)
    inverse = 1.0 / nonzero_sum[:, None]
    store_tiles(o_ptr, o0 * inverse, o1 * inverse, m, o_stride, Nq, Dv, V0, V1)
    l_at = l_ptr + b * l_strides[0] + h * l_strides[1] + start + m
    if BIAS > 0:  # apart, because a sum of a maximum of -1e9 and a logarithm is that maximum
        tl.store(l_at, row_max, mask=m < Nq)
        tl.store(l_at + Nq, tl.log2(nonzero_sum), mask=m < Nq)
    else:
        tl.store(l_at, row_max * scale + tl.log2(nonzero_sum), mask=m < Nq)


@jit(do_not_specialize=["tiles"])
def _fwd_whole_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, l_ptr, q_strides, k_strides, v_strides, o_strides, l_strides, H, Nq, Nk, tiles, scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, Dv: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    PRECISION: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head, all keys at once. Equations (1) to (3)."""
    tile, b, h, start, Nq, Nk = program_position(tl.program_id(0), tiles, H, Nq, Nk, 0, None, None, False, False)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q_ptr, q_stride = head_pointer(q_ptr, q_strides, b, h, start, UNIT)
    k_ptr, k_stride = head_pointer(k_ptr, k_strides, b, h, start, UNIT)
    v_ptr, v_stride = head_pointer(v_ptr, v_strides, b, h, start, UNIT)
    q0, q1 = load_tiles(q_ptr, m, q_stride, Nq, D, D0, D1, True)  # all loads come first and are in flight together
    k0, k1, k2 = load_pieces(k_ptr, k_stride, Nk, D, D0, D1, N0, N1, N2, MASKED)
    v0, v1, v2 = load_pieces(v_ptr, v_stride, Nk, Dv, V0, V1, N0, N1, N2, MASKED)
    row_max, row_sum, o0, o1 = whole_rows(
        q0, q1, k0, k1, k2, v0, v1, v2, Nk, scale, D1, V0, V1, N0, N1, N2, MASKED, PRECISION
    )
    o_ptr, o_stride = head_pointer(o_ptr, o_strides, b, h, start, UNIT)
    inverse = 1.0 / row_sum[:, None]
    store_tiles(o_ptr, o0 * inverse, o1 * inverse, m, o_stride, Nq, Dv, V0, V1)
    l_at = l_ptr + b * l_strides[0] + h * l_strides[1] + m
    tl.store(l_at, row_max * scale + tl.log2(row_sum), mask=m < Nq)


@jit(do_not_specialize=["heads", "tiles"])
def _fwd_tma_kernel(
    q_desc, k0_desc, k1_desc, k2_desc, v0_desc, v1_desc, v2_desc, o_desc, l_ptr, l_strides,
    H, Nq, Nk, heads, tiles, scale,
    D: tl.constexpr, Q_FIRST: tl.constexpr, K_FIRST: tl.constexpr, V_FIRST: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One program: tiles p, p + P, … of BLOCK_M queries of one head, all keys at once. Equations (1) to (3).

    With three stages the loads of the next tile are in flight during this one; with two they start after it.
    """
    for i in tl.range(tl.program_id(0), heads * tiles, tl.num_programs(0)):
        first = i % tiles * BLOCK_M
        b, h = i // tiles // H, i // tiles % H
        k0, k1, k2 = load_boxes(k0_desc, k1_desc, k2_desc, b, h, H, D, K_FIRST, N0, N1, N2)
        v0, v1, v2 = load_boxes(v0_desc, v1_desc, v2_desc, b, h, H, D, V_FIRST, N0, N1, N2)
        q = load_box(q_desc, b, h, H, first, BLOCK_M, D, Q_FIRST)
        row_max, row_sum, o, _ = whole_rows(
            q, q, k0, k1, k2, v0, v1, v2, Nk, scale, 0, D, 0, N0, N1, N2, MASKED, PRECISION
        )
        store_box(o_desc, o * (1.0 / row_sum)[:, None], b, h, H, first, False)
        m = first + tl.arange(0, BLOCK_M)
        l_at = l_ptr + tl.cast(b, tl.int64) * l_strides[0] + tl.cast(h, tl.int64) * l_strides[1] + m
        tl.store(l_at, row_max * scale + tl.log2(row_sum), mask=m < Nq)


def _fwd(q, k, v, bias, kv_lens, cu_seqlens, max_seqlen, scale, columns=0, causal=False):
    """(o [B, H, Nq, Dv] stored as [B, Nq, H, Dv], L in base 2: see `natural`)."""
    o, lse = _fwd_fake(q, k, v, bias, kv_lens, cu_seqlens, max_seqlen, scale)
    if cu_seqlens is not None:
        max_seqlen = min(max_seqlen, q.shape[2])
        o.zero_()  # for tokens that belong to no image, whose L is not read
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    if o.numel():
        tensors = dict(q=q, k=k, v=v, bias=bias, kv_lens=kv_lens, cu_seqlens=cu_seqlens, o=o, l=lse)
        (found,) = prepared(_prepare, tensors, max_seqlen, scale, columns, causal)
        if found.kernel is _fwd_tma_kernel and not aligned(q, k, v):
            (found,) = prepared(_prepare, tensors, max_seqlen, scale, columns, causal, False)
        start(found, tensors)
    return o, lse


def _prepare(tensors, max_seqlen, scale, columns, causal, may_box=True):
    """The launch of the forward pass; if it `may_box`, and a row says so, by descriptors."""
    q, k, v, bias, kv_lens, cu_seqlens, *_ = tensors.values()
    images, Nq, Nk, width = sizes_of(q, k, v, cu_seqlens, max_seqlen)
    bare = bias is kv_lens is cu_seqlens is None and not causal and scale > 0
    if bare and (blocks := whole_blocks(q, images, Nq, Nk, width)) is not None:
        arguments = arguments_of(tensors, max_seqlen, scale)
        if not blocks.pop("TMA", 0):
            tiles = cdiv(Nq, blocks["BLOCK_M"])
            return [prepare(_fwd_whole_kernel, tiles * images * q.shape[1], blocks, **arguments, tiles=tiles)]
        if may_box and reads_boxes(tensors):
            arguments |= whole_boxes(tensors, blocks)
            programs = min(units(q.device), arguments["heads"] * arguments["tiles"])
            return [prepare(_fwd_tma_kernel, programs, blocks, **arguments)]
    blocks = blocks_of("fwd", q, bias_kind(bias, columns, causal), images, Nq, Nk, width)
    tiles = cdiv(Nq, blocks["BLOCK_M"])
    safe = bias is not None or kv_lens is not None or scale <= 0 or not Nk or (causal and Nq > Nk)
    tail = tail_block(Nk, blocks["BLOCK_N"], kv_lens is not None or cu_seqlens is not None)
    early = tail > 0 and bias is None and not causal and loads_tail_early(blocks, width * q.element_size())
    arguments = arguments_of(tensors, max_seqlen, scale, columns, causal)
    arguments |= dict(tiles=tiles, SAFE=safe, TAIL=tail, EARLY=early)
    return [prepare(_fwd_kernel, tiles * images * q.shape[1], blocks, **arguments)]


def _fwd_fake(q, k, v, bias, kv_lens, cu_seqlens, max_seqlen, scale, columns=0, causal=False):
    B, H, Nq, _ = q.shape
    o = q.new_empty(B, Nq, H, v.shape[3]).transpose(1, 2)
    return o, q.new_empty((B, H, Nq) if bias is None else (B, H, 2, Nq), dtype=torch.float32)


def natural(lse: Tensor) -> Tensor:
    """L [B, H, Nq] from that in base 2, of which those with a bias are maxima and logarithms of sums, [B, H, 2, Nq]."""
    return (lse if lse.dim() == 3 else lse.sum(2)) * math.log(2)


SCHEMA = f"({ARGUMENTS}, SymInt columns=0, bool causal=False) -> (Tensor, Tensor)"
fwd_op = register("attention_fwd", SCHEMA, _fwd, _fwd_fake)


def _fits_sdpa(q: Tensor, k: Tensor) -> bool:
    """False in forward-mode AD, and without any value, for which cuDNN's attention returns None (torch 2.11)."""
    has_values = torch.compiler.is_compiling() or (q.numel() > 0 and k.numel() > 0)
    return has_values and torch.autograd.forward_ad._current_level < 0


class _Fn(torch.autograd.Function):
    """Autograd of attention_fwd by attention_bwd, for q, k, v [B, H, N, D]; saves the tensors listed in the header."""

    @staticmethod
    def forward(ctx, q, k, v, bias, kv_lens, cu_seqlens, max_seqlen, scale, columns=0, causal=False):
        o, lse = fwd_op(q, k, v, bias, kv_lens, cu_seqlens, max_seqlen, scale, columns, causal)
        ctx.save_for_backward(q, k, v, bias, kv_lens, cu_seqlens, o, lse)
        ctx.sizes = (max_seqlen, scale)
        ctx.columns = columns
        ctx.causal = causal
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, do, _):
        if do is None:
            return (None,) * 10
        *inputs, o, lse = ctx.saved_tensors
        learn_bias = ctx.needs_input_grad[3]
        dq, dk, dv, dbias, _ = bwd_op(do, *inputs, *ctx.sizes, o, lse, False, learn_bias, ctx.columns, ctx.causal)
        return dq, dk, dv, dbias if learn_bias else None, *[None] * 6


def _inputs(case: dict[str, int], dtype: torch.dtype, device: torch.device | str) -> dict:
    randn, (B, H, Nq, Nk, D, Dv) = make_randn(device, dtype), (case[a] for a in ("B", "H", "Nq", "Nk", "D", "Dv"))
    arguments: dict[str, Any] = {
        "q": randn(B, Nq, H, D).transpose(1, 2),
        "k": randn(B, H, Nk, D),
        "v": randn(B, H, Nk, Dv),
    }
    if "G" in case:
        arguments["bias"] = randn(case["G"], H, Nq, Nk)
    if "rows" in case:
        arguments["axis_bias"] = tuple(randn(B, H, Nq, n) for n in (case["rows"], Nk // case["rows"]))
    if "short" in case:
        lens = [Nk - case["short"] * (b % 2) for b in range(B)]
        arguments["kv_lens"] = torch.tensor(lens, dtype=torch.int64, device=device)
    if "causal" in case:
        arguments["causal"] = True
    return arguments


def _inputs_varlen(case: dict[str, int], dtype: torch.dtype, device: torch.device | str) -> dict:
    randn = make_randn(device, dtype)
    H = case["H"]
    D = case["D"]
    lengths = [case["a"], case["b"], case["c"]]
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    q, k, v = (randn(sum(lengths), H, D) for _ in range(3))
    causal = {"causal": True} if "causal" in case else {}
    return {"q": q, "k": k, "v": v, "cu_seqlens": ends, "max_seqlen": max(lengths), **causal}


OP = Op(
    name="attention",
    run=attention,
    reference=reference,
    cases={
        "bias": dict(B=4, H=1, Nq=3, Nk=5, D=3, Dv=2, G=2),
        "padded": dict(B=2, H=1, Nq=3, Nk=9, D=4, Dv=4, short=4),
        "class_token": dict(B=2, H=3, Nq=1, Nk=17, D=8, Dv=8),
        "axes": dict(B=2, H=2, Nq=3, Nk=6, D=4, Dv=4, rows=2),
        "causal": dict(B=2, H=1, Nq=5, Nk=5, D=3, Dv=2, causal=1),
        "causal_later": dict(B=2, H=1, Nq=3, Nk=5, D=2, Dv=3, G=1, causal=1),
    },
    inputs=_inputs,
    ragged={
        "vit": dict(B=1, H=2, Nq=197, Nk=197, D=64, Dv=64),
        "class_token": dict(B=2, H=3, Nq=1, Nk=50, D=48, Dv=48),
        "levit": dict(B=2, H=2, Nq=16, Nk=49, D=16, Dv=32),
        "windows": dict(B=4, H=2, Nq=49, Nk=49, D=32, Dv=32, G=2),
        "bias_wide": dict(B=2, H=1, Nq=70, Nk=65, D=80, Dv=72, G=1),
        "padded": dict(B=2, H=2, Nq=50, Nk=130, D=33, Dv=6, short=130),
        "so400m": dict(B=1, H=1, Nq=65, Nk=65, D=72, Dv=72),
        "giant": dict(B=1, H=1, Nq=17, Nk=33, D=88, Dv=88),
        "widest": dict(B=1, H=1, Nq=20, Nk=20, D=256, Dv=192),
        "axes": dict(B=1, H=2, Nq=70, Nk=70, D=32, Dv=32, rows=5),
        "axes_pooled": dict(B=2, H=1, Nq=33, Nk=18, D=24, Dv=40, rows=6),
        "axes_aligned": dict(B=1, H=1, Nq=17, Nk=128, D=16, Dv=16, rows=2),
        "causal": dict(B=1, H=2, Nq=70, Nk=70, D=32, Dv=32, causal=1),
        "causal_text": dict(B=1, H=1, Nq=150, Nk=150, D=64, Dv=64, causal=1),
        "causal_long": dict(B=1, H=1, Nq=290, Nk=290, D=16, Dv=16, causal=1),
        "causal_prefix": dict(B=1, H=2, Nq=33, Nk=140, D=48, Dv=48, causal=1),
        "causal_late_keys": dict(B=1, H=2, Nq=140, Nk=40, D=32, Dv=32, causal=1),
        "causal_step": dict(B=2, H=2, Nq=1, Nk=50, D=16, Dv=16, causal=1),
        "causal_bias": dict(B=2, H=1, Nq=70, Nk=65, D=80, Dv=72, G=1, causal=1),
        "causal_padded": dict(B=2, H=2, Nq=50, Nk=130, D=33, Dv=6, short=120, causal=1),
        "no_images": dict(B=0, H=2, Nq=4, Nk=4, D=8, Dv=8),
        "no_padded": dict(B=0, H=2, Nq=4, Nk=4, D=8, Dv=8, short=1),
        "no_queries": dict(B=2, H=2, Nq=0, Nk=4, D=8, Dv=8),
        "no_keys": dict(B=2, H=2, Nq=4, Nk=0, D=8, Dv=8),
    },
)
OP_VARLEN = Op(
    name="varlen_attention",
    run=varlen_attention,
    reference=reference_varlen,
    cases={"three_images": dict(H=2, D=4, a=3, b=1, c=5), "causal": dict(H=1, D=3, a=3, b=0, c=4, causal=1)},
    inputs=_inputs_varlen,
    ragged={
        "naflex": dict(H=2, D=32, a=70, b=1, c=129),
        "gap": dict(H=1, D=16, a=5, b=0, c=3),
        "causal": dict(H=2, D=32, a=70, b=1, c=129, causal=1),
        "empty": dict(H=2, D=8, a=0, b=0, c=0),
    },
)
