"""Backward pass of `attention`, where the symbols and equations (1) to (3) are defined.

Math      P = exp(S − L)                       recomputed, never stored          (4)
          Δ = Σ_d dO ∘ O                       [Nq]      fp32                    (5)
          dS = P ∘ (dO Vᵀ − Δ)                                                   (6)
          dV = Pᵀ dO    dQ = scale · dS K    dK = scale · dSᵀ Q                  (7)
          causal: P = 0 for the keys that a query does not see.
          dbias[g] = Σ dS over images b ≡ g (mod G), in order                    (8)
          d_row[:, i] = Σ dS over the keys in row i, d_column[:, j] likewise     (9)
          dqkv_bias = (Σ dQ, 0, Σ dV), over images and tokens                    (10)
          0 since a bias of keys adds the same number to all scores of a query.
Kernels   If two blocks of keys cover all keys (197 ≤ 2·128), one program computes all gradients of a head, with five
          matrix products. Otherwise one kernel computes Δ and dQ and another dK and dV, with seven products. A third
          kernel computes dbias, or the sums of (9) as a product of dS with zeros and ones. No atomics: every run gives
          the same bits. A second form with one program per head has all of up to 256 keys at once, so that dQ is
          complete in registers, and copies by descriptors, the next queries while these are computed: on sm_90, for
          heads of 16, 32 or 64 channels in 16 bits, without a bias or mask, where a row "attention.bwd_whole" of
          tuned/ says so. The first kernel can also sum (10) within each block of keys; for other launches a pass over
          dqkv does, where that of keys is rounding errors.
Cost      2·B·H·Nq·Nk·(3·D + 2·Dv) flops with one program per head, 2·B·H·Nq·Nk·(4·D + 3·Dv) otherwise.
Source    Dao, FlashAttention-2, arXiv:2307.08691, algorithm 2.
"""

import math

import torch

from .attention_inner import (
    dkdv_step,
    dq_step,
    dqkv_step,
    first_query,
    head_pointer,
    load_box,
    load_log_sum,
    load_lse,
    load_tiles,
    num_keys,
    p_and_dp,
    program_position,
    seen_keys,
    store_box,
    store_tiles,
    zero_tiles,
)
from .attention_launch import (
    ARGUMENTS,
    arguments_of,
    bias_kind,
    blocks_of,
    prepare,
    prepared,
    sizes_of,
    start,
    tail_block,
    whole_head_blocks,
    whole_head_boxes,
)
from .descriptor import aligned
from .launch import cdiv
from .layer_norm_backward import sum_programs
from .op import register
from .tile import jit, tl


@jit(do_not_specialize=["T", "G", "tiles"])
def _bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, kv_lens_ptr, cu_seqlens_ptr, o_ptr, do_ptr, l_ptr, delta_ptr, dq_ptr,
    q_strides, k_strides, v_strides, bias_strides, o_strides, do_strides, l_strides, dq_strides,
    H, Nq, Nk, T, G, tiles, scale, softmax_scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, Dv: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HAS_KV_LENS: tl.constexpr,
    HAS_CU_SEQLENS: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head. Loops over keys; writes Δ of equation (5) and dQ of (7)."""
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
    o_ptr, o_stride = head_pointer(o_ptr, o_strides, b, h, start, UNIT)
    do_ptr, do_stride = head_pointer(do_ptr, do_strides, b, h, start, UNIT)
    dq_ptr, dq_stride = head_pointer(dq_ptr, dq_strides, b, h, start, UNIT)
    l_at = b * l_strides[0] + h * l_strides[1] + start
    if BIAS > 0:
        bias_ptr += (b % G) * bias_strides[0] + h * bias_strides[1]
    q0, q1 = load_tiles(q_ptr, m, q_stride, Nq, D, D0, D1, True)  # [BLOCK_M, D0], [BLOCK_M, D1]
    do0, do1 = load_tiles(do_ptr, m, do_stride, Nq, Dv, V0, V1, True)  # [BLOCK_M, V0], [BLOCK_M, V1]
    o0, o1 = load_tiles(o_ptr, m, o_stride, Nq, Dv, V0, V1, True)
    delta = tl.sum(do0.to(tl.float32) * o0.to(tl.float32), 1)  # (5)
    if V1 > 0:
        delta += tl.sum(do1.to(tl.float32) * o1.to(tl.float32), 1)
    tl.store(delta_ptr + l_at + m, delta, mask=m < Nq)
    lse, log_sum = load_lse(l_ptr + l_at, m, Nq), load_log_sum(l_ptr + l_at, m, Nq, BIAS)
    dq0, dq1 = zero_tiles(BLOCK_M, D0, D1)
    seen = seen_keys(tile * BLOCK_M, offset, Nk) if CAUSAL else Nk  # by all queries of the tile
    full = seen // BLOCK_N * BLOCK_N
    for first in range(0, full, BLOCK_N):
        dq0, dq1 = dq_step(
            q0, q1, do0, do1, k_ptr, v_ptr, bias_ptr, k_stride, v_stride, bias_strides,
            m, first + tl.arange(0, BLOCK_N), first, offset, Nq, Nk, lse, log_sum, delta, dq0, dq1, scale,
            D, D0, D1, Dv, V0, V1, BIAS, ROWS, COLUMNS, PRECISION, False, False,
        )  # fmt: skip
    if CAUSAL:
        for first in range(full, seen_keys(tile * BLOCK_M + BLOCK_M - 1, offset, Nk), BLOCK_N):  # on the diagonal
            dq0, dq1 = dq_step(
                q0, q1, do0, do1, k_ptr, v_ptr, bias_ptr, k_stride, v_stride, bias_strides,
                m, first + tl.arange(0, BLOCK_N), first, offset, Nq, Nk, lse, log_sum, delta, dq0, dq1, scale,
                D, D0, D1, Dv, V0, V1, BIAS, ROWS, COLUMNS, PRECISION, True, True,
            )  # fmt: skip
    elif TAIL > 0:
        dq0, dq1 = dq_step(
            q0, q1, do0, do1, k_ptr, v_ptr, bias_ptr, k_stride, v_stride, bias_strides,
            m, full + tl.arange(0, TAIL), full, offset, Nq, Nk, lse, log_sum, delta, dq0, dq1, scale,
            D, D0, D1, Dv, V0, V1, BIAS, ROWS, COLUMNS, PRECISION, True, False,
        )  # fmt: skip
    store_tiles(dq_ptr, dq0 * softmax_scale, dq1 * softmax_scale, m, dq_stride, Nq, D, D0, D1)


@jit(do_not_specialize=["T", "G", "tiles"])
def _bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, kv_lens_ptr, cu_seqlens_ptr, do_ptr, l_ptr, delta_ptr, dk_ptr, dv_ptr,
    q_strides, k_strides, v_strides, bias_strides, do_strides, l_strides, dk_strides, dv_strides,
    H, Nq, Nk, T, G, tiles, scale, softmax_scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, Dv: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HAS_KV_LENS: tl.constexpr,
    HAS_CU_SEQLENS: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N keys of one head. Loops over queries; writes dK and dV of equation (7)."""
    keys = Nk  # rows to write, including those of masked keys
    offset = Nk - Nq if CAUSAL and not HAS_CU_SEQLENS else 0  # of the tensors, not of kv_lens
    tile, b, h, start, Nq, Nk = program_position(
        tl.program_id(0), tiles, H, Nq, Nk, T, cu_seqlens_ptr, kv_lens_ptr, HAS_CU_SEQLENS, HAS_KV_LENS
    )
    if not HAS_KV_LENS:
        keys = Nk
    if tile * BLOCK_N >= keys:
        return
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    q_ptr, q_stride = head_pointer(q_ptr, q_strides, b, h, start, UNIT)
    k_ptr, k_stride = head_pointer(k_ptr, k_strides, b, h, start, UNIT)
    v_ptr, v_stride = head_pointer(v_ptr, v_strides, b, h, start, UNIT)
    do_ptr, do_stride = head_pointer(do_ptr, do_strides, b, h, start, UNIT)
    dk_ptr, dk_stride = head_pointer(dk_ptr, dk_strides, b, h, start, UNIT)
    dv_ptr, dv_stride = head_pointer(dv_ptr, dv_strides, b, h, start, UNIT)
    l_ptr += b * l_strides[0] + h * l_strides[1] + start
    delta_ptr += b * l_strides[0] + h * l_strides[1] + start
    if BIAS > 0:
        bias_ptr += (b % G) * bias_strides[0] + h * bias_strides[1]
    k0, k1 = load_tiles(k_ptr, n, k_stride, Nk, D, D0, D1, True)  # [BLOCK_N, D0], [BLOCK_N, D1]
    v0, v1 = load_tiles(v_ptr, n, v_stride, Nk, Dv, V0, V1, True)  # [BLOCK_N, V0], [BLOCK_N, V1]
    dk0, dk1 = zero_tiles(BLOCK_N, D0, D1)
    dv0, dv1 = zero_tiles(BLOCK_N, V0, V1)
    full = Nq // BLOCK_M * BLOCK_M
    begin = 0
    if CAUSAL:  # a second loop, without the mask where all keys are seen, would spill registers
        begin = first_query(tile * BLOCK_N, offset) // BLOCK_M * BLOCK_M
    for first in range(begin, full, BLOCK_M):
        dk0, dk1, dv0, dv1 = dkdv_step(
            k0, k1, v0, v1, q_ptr, do_ptr, l_ptr, delta_ptr, bias_ptr, q_stride, do_stride, bias_strides,
            first + tl.arange(0, BLOCK_M), n, tile * BLOCK_N, offset, Nq, Nk, dk0, dk1, dv0, dv1, scale,
            D, D0, D1, Dv, V0, V1, BIAS, ROWS, COLUMNS, PRECISION, False, CAUSAL,
        )  # fmt: skip
    if full < Nq:
        dk0, dk1, dv0, dv1 = dkdv_step(
            k0, k1, v0, v1, q_ptr, do_ptr, l_ptr, delta_ptr, bias_ptr, q_stride, do_stride, bias_strides,
            full + tl.arange(0, BLOCK_M), n, tile * BLOCK_N, offset, Nq, Nk, dk0, dk1, dv0, dv1, scale,
            D, D0, D1, Dv, V0, V1, BIAS, ROWS, COLUMNS, PRECISION, True, CAUSAL,
        )  # fmt: skip
    if HAS_KV_LENS:
        valid = (n < Nk)[:, None]
        dk0, dk1 = tl.where(valid, dk0, 0.0), tl.where(valid, dk1, 0.0)
        dv0, dv1 = tl.where(valid, dv0, 0.0), tl.where(valid, dv1, 0.0)
    store_tiles(dk_ptr, dk0 * softmax_scale, dk1 * softmax_scale, n, dk_stride, keys, D, D0, D1)
    store_tiles(dv_ptr, dv0, dv1, n, dv_stride, keys, Dv, V0, V1)


@jit(do_not_specialize=["T"])
def _bwd_kernel(
    q_ptr, k_ptr, v_ptr, kv_lens_ptr, cu_seqlens_ptr, o_ptr, do_ptr, l_ptr, dq_ptr, dk_ptr, dv_ptr, sums_ptr,
    q_strides, k_strides, v_strides, o_strides, do_strides, l_strides, dq_strides, dk_strides, dv_strides,
    H, Nq, Nk, T, tiles, scale, softmax_scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, Dv: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    HAS_KV_LENS: tl.constexpr, HAS_CU_SEQLENS: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """One program: all gradients of one head, in five products. Loops over blocks of keys, and over queries in each.

    dQ of the first block of keys is stored in its final place and read back. Barriers stand wherever the layout of its
    rows changes, so that it is read by the threads that wrote it. Each block of keys writes its terms of equation (10)
    if sums_ptr is not None; then D1 = 0 and D is a power of two.
    """
    keys = Nk  # rows to write, including those of masked keys
    offset = Nk - Nq if CAUSAL and not HAS_CU_SEQLENS else 0  # of the tensors, not of kv_lens
    _, b, h, start, Nq, Nk = program_position(
        tl.program_id(0), tiles, H, Nq, Nk, T, cu_seqlens_ptr, kv_lens_ptr, HAS_CU_SEQLENS, HAS_KV_LENS
    )
    if not HAS_KV_LENS:
        keys = Nk
    q_ptr, q_stride = head_pointer(q_ptr, q_strides, b, h, start, UNIT)
    k_ptr, k_stride = head_pointer(k_ptr, k_strides, b, h, start, UNIT)
    v_ptr, v_stride = head_pointer(v_ptr, v_strides, b, h, start, UNIT)
    o_ptr, o_stride = head_pointer(o_ptr, o_strides, b, h, start, UNIT)
    do_ptr, do_stride = head_pointer(do_ptr, do_strides, b, h, start, UNIT)
    dq_ptr, dq_stride = head_pointer(dq_ptr, dq_strides, b, h, start, UNIT)
    dk_ptr, dk_stride = head_pointer(dk_ptr, dk_strides, b, h, start, UNIT)
    dv_ptr, dv_stride = head_pointer(dv_ptr, dv_strides, b, h, start, UNIT)
    l_ptr += b * l_strides[0] + h * l_strides[1] + start
    if sums_ptr is not None:
        sums_ptr += (b * tl.cdiv(keys, BLOCK_N) * 3 * H + h) * D
    full = Nq // BLOCK_M * BLOCK_M
    for block in tl.range(0, keys, BLOCK_N, disable_licm=True):  # loop-invariant code motion would spill registers
        n = block + tl.arange(0, BLOCK_N)
        k0, k1 = load_tiles(k_ptr, n, k_stride, Nk, D, D0, D1, True)  # [BLOCK_N, D0], [BLOCK_N, D1]
        v0, v1 = load_tiles(v_ptr, n, v_stride, Nk, Dv, V0, V1, True)  # [BLOCK_N, V0], [BLOCK_N, V1]
        dk0, dk1 = zero_tiles(BLOCK_N, D0, D1)
        dv0, dv1 = zero_tiles(BLOCK_N, V0, V1)
        dq_sum = tl.zeros([D0], tl.float32)
        begin = 0
        if CAUSAL:  # the first block of keys stores dQ of all queries
            begin = tl.where(block > 0, first_query(block, offset) // BLOCK_M * BLOCK_M, 0)
        for first in tl.range(begin, full, BLOCK_M, disable_licm=True):
            dk0, dk1, dv0, dv1, dq_sum = dqkv_step(
                k0, k1, v0, v1, q_ptr, o_ptr, do_ptr, l_ptr, dq_ptr, q_stride, o_stride, do_stride, dq_stride,
                first + tl.arange(0, BLOCK_M), n, block > 0, offset, Nq, Nk, dk0, dk1, dv0, dv1, dq_sum, scale,
                softmax_scale, D, D0, D1, Dv, V0, V1, HAS_KV_LENS, PRECISION, False, CAUSAL, sums_ptr is not None,
            )  # fmt: skip
        if TAIL > 0:
            tl.debug_barrier()
            dk0, dk1, dv0, dv1, dq_sum = dqkv_step(
                k0, k1, v0, v1, q_ptr, o_ptr, do_ptr, l_ptr, dq_ptr, q_stride, o_stride, do_stride, dq_stride,
                full + tl.arange(0, TAIL), n, block > 0, offset, Nq, Nk, dk0, dk1, dv0, dv1, dq_sum, scale,
                softmax_scale, D, D0, D1, Dv, V0, V1, HAS_KV_LENS, PRECISION, True, CAUSAL, sums_ptr is not None,
            )  # fmt: skip
        store_tiles(dk_ptr, dk0 * softmax_scale, dk1 * softmax_scale, n, dk_stride, keys, D, D0, D1)
        store_tiles(dv_ptr, dv0, dv1, n, dv_stride, keys, Dv, V0, V1)
        if sums_ptr is not None:
            at = sums_ptr + tl.arange(0, D)
            tl.store(at, dq_sum)
            tl.store(at + H * D, tl.zeros([D], tl.float32))
            tl.store(at + 2 * H * D, tl.sum(dv0, 0))
            sums_ptr += 3 * H * D
        tl.debug_barrier()


@jit
def _bwd_tma_kernel(
    q_desc, k_desc, v_desc, o_desc, do_desc, dq_desc, dk_desc, dv_desc, l_ptr, l_strides,
    H, Nq, Nk, scale, softmax_scale,
    D: tl.constexpr, Q_FIRST: tl.constexpr, K_FIRST: tl.constexpr, V_FIRST: tl.constexpr, DO_FIRST: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One program: all gradients of one head, with all keys at once. Loops over queries."""
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    k = load_box(k_desc, b, h, H, 0, BLOCK_N, D, K_FIRST)
    v = load_box(v_desc, b, h, H, 0, BLOCK_N, D, V_FIRST)
    dk, dv = zero_tiles(BLOCK_N, D, D)
    l_ptr += tl.cast(b, tl.int64) * l_strides[0] + tl.cast(h, tl.int64) * l_strides[1]
    for first in tl.range(0, Nq, BLOCK_M, disable_licm=True):  # loop-invariant code motion would spill registers
        m = first + tl.arange(0, BLOCK_M)
        q = load_box(q_desc, b, h, H, first, BLOCK_M, D, Q_FIRST)
        do = load_box(do_desc, b, h, H, first, BLOCK_M, D, DO_FIRST)
        o = load_box(o_desc, b, h, H, first, BLOCK_M, D, False)
        delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)  # (5)
        lse = tl.load(l_ptr + m, mask=m < Nq, other=float("inf"))  # P = 0 past the last query
        p = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale - lse[None, :])  # [BLOCK_N, BLOCK_M], (4)
        if MASKED:  # rows past the last key are not stored, but dQ multiplies them by the zeros of K
            p = tl.where((tl.arange(0, BLOCK_N) < Nk)[:, None], p, 0.0)
        dv = tl.dot(p.to(q.dtype), do, dv, input_precision=PRECISION)
        ds = (p * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - delta[None, :])).to(q.dtype)  # (6)
        dk = tl.dot(ds, q, dk, input_precision=PRECISION)
        dq = tl.dot(tl.trans(k), ds, input_precision=PRECISION) * softmax_scale  # [D, BLOCK_M]
        store_box(dq_desc, tl.trans(dq.to(q.dtype)), b, h, H, first, Q_FIRST)
    store_box(dk_desc, dk * softmax_scale, b, h, H, 0, K_FIRST)
    store_box(dv_desc, dv, b, h, H, 0, V_FIRST)


@jit(do_not_specialize=["B", "G", "tiles_m", "tiles_n"])
def _bwd_dbias_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, kv_lens_ptr, do_ptr, l_ptr, delta_ptr, dbias_ptr,
    q_strides, k_strides, v_strides, bias_strides, do_strides, l_strides, B, H, Nq, Nk, G, tiles_m, tiles_n, scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, Dv: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BIAS: tl.constexpr, HAS_KV_LENS: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: one tile of the bias of one head and group. Sums dS over the images of the group. Equation (8)."""
    pid = tl.program_id(0)
    n = pid % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m = pid // tiles_n % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    h = (pid // tiles_n // tiles_m % H).to(tl.int64)
    g = (pid // tiles_n // tiles_m // H).to(tl.int64)
    bias_ptr += g * bias_strides[0] + h * bias_strides[1]
    dbias = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for image in range(g, B, G):
        b, keys = tl.cast(image, tl.int64), Nk
        if HAS_KV_LENS:
            keys = num_keys(kv_lens_ptr + b, Nk)
        at = b * l_strides[0] + h * l_strides[1]
        q_at, q_stride = head_pointer(q_ptr, q_strides, b, h, 0, UNIT)
        k_at, k_stride = head_pointer(k_ptr, k_strides, b, h, 0, UNIT)
        v_at, v_stride = head_pointer(v_ptr, v_strides, b, h, 0, UNIT)
        do_at, do_stride = head_pointer(do_ptr, do_strides, b, h, 0, UNIT)
        q0, q1 = load_tiles(q_at, m, q_stride, Nq, D, D0, D1, True)
        k0, k1 = load_tiles(k_at, n, k_stride, keys, D, D0, D1, True)
        do0, do1 = load_tiles(do_at, m, do_stride, Nq, Dv, V0, V1, True)
        p, dp = p_and_dp(
            q0, q1, do0, do1, k0, k1, v_at, bias_ptr, v_stride, bias_strides, m, n, 0, Nk - Nq, Nq, keys,
            load_lse(l_ptr + at, m, Nq), load_log_sum(l_ptr + at, m, Nq, BIAS), scale,
            D1, Dv, V0, V1, BIAS, 0, 0, PRECISION, True, CAUSAL,
        )  # fmt: skip
        dbias += p * (dp - tl.load(delta_ptr + at + m, mask=m < Nq, other=0.0)[:, None])
    at = dbias_ptr + ((g * H + h) * Nq + m)[:, None] * Nk + n[None, :]
    tl.store(at, dbias, mask=(m < Nq)[:, None] & (n < Nk)[None, :])


@jit(do_not_specialize=["tiles"])
def _bwd_axes_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, do_ptr, l_ptr, delta_ptr, dbias_ptr,
    q_strides, k_strides, v_strides, bias_strides, do_strides, l_strides, H, Nq, Nk, tiles, scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, Dv: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head. Loops over keys; writes the sums of equation (9)."""
    m = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    b = (tl.program_id(0) // tiles // H).to(tl.int64)
    h = (tl.program_id(0) // tiles % H).to(tl.int64)
    q_ptr, q_stride = head_pointer(q_ptr, q_strides, b, h, 0, UNIT)
    k_ptr, k_stride = head_pointer(k_ptr, k_strides, b, h, 0, UNIT)
    v_ptr, v_stride = head_pointer(v_ptr, v_strides, b, h, 0, UNIT)
    do_ptr, do_stride = head_pointer(do_ptr, do_strides, b, h, 0, UNIT)
    bias_ptr += b * bias_strides[0] + h * bias_strides[1]
    l_at = b * l_strides[0] + h * l_strides[1]
    q0, q1 = load_tiles(q_ptr, m, q_stride, Nq, D, D0, D1, True)  # [BLOCK_M, D0], [BLOCK_M, D1]
    do0, do1 = load_tiles(do_ptr, m, do_stride, Nq, Dv, V0, V1, True)  # [BLOCK_M, V0], [BLOCK_M, V1]
    lse, log_sum = load_lse(l_ptr + l_at, m, Nq), load_log_sum(l_ptr + l_at, m, Nq, BIAS)
    delta = tl.load(delta_ptr + l_at + m, mask=m < Nq, other=0.0)
    axis = tl.arange(0, WIDTH)[None, :]  # all rows, then all columns
    sums = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    for first in range(0, Nk, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        k0, k1 = load_tiles(k_ptr, n, k_stride, Nk, D, D0, D1, True)
        p, dp = p_and_dp(
            q0, q1, do0, do1, k0, k1, v_ptr, bias_ptr, v_stride, bias_strides, m, n, first, 0, Nq, Nk,
            lse, log_sum, scale, D1, Dv, V0, V1, BIAS, ROWS, COLUMNS, PRECISION, True, False,
        )  # fmt: skip
        ds = (p * (dp - delta[:, None])).to(q0.dtype)  # (6)
        here = ((n // COLUMNS)[:, None] == axis) | ((ROWS + n % COLUMNS)[:, None] == axis)  # [BLOCK_N, WIDTH]
        place = tl.where(here, 1.0, 0.0).to(q0.dtype)  # Triton's interpreter converts no bool to bfloat16
        sums = tl.dot(ds, place, sums, input_precision=PRECISION)  # (9)
    at = dbias_ptr + ((b * H + h) * Nq + m)[:, None] * (ROWS + COLUMNS) + axis
    tl.store(at, sums, mask=(m < Nq)[:, None] & (axis < ROWS + COLUMNS))


def _bwd(
    do, q, k, v, bias, kv_lens, cu_seqlens, max_seqlen, scale, o, lse, packed, learn_bias, columns=0, causal=False,
    sum_dtype=None,
):  # fmt: skip
    """(dq, dk, dv, dbias, sums of equation (10) [3·H·D]); outputs that are not needed are empty.

    With `packed`, dq is dqkv [B, N, 3, H, D], whose sums are computed in `sum_dtype` unless it is None.
    """
    outputs = _bwd_fake(do, q, k, v, bias, kv_lens, cu_seqlens, max_seqlen, scale, o, lse, packed, learn_bias)
    dqkv, dk, dv, dbias, sums = outputs
    dq = dqkv
    if cu_seqlens is not None:
        max_seqlen = min(max_seqlen, q.shape[2])
        for grad in (dq, dk, dv):
            grad.zero_()
    if packed:
        dq, dk, dv = dq.permute(2, 0, 3, 1, 4).unbind(0)
    do, q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (do, q, k, v))
    tensors = dict(q=q, k=k, v=v, bias=bias, kv_lens=kv_lens, cu_seqlens=cu_seqlens, do=do, o=o, l=lse)
    tensors |= dict(dq=dq, dk=dk, dv=dv)
    if learn_bias and columns:
        tensors["dbias"] = dbias
    elif learn_bias:  # dbias is not broadcast over heads, queries and keys
        shape = (bias.shape[0], *q.shape[1:3], k.shape[2])
        tensors["dbias"] = torch.zeros(shape, dtype=torch.float32, device=q.device)
    launches = prepared(_prepare, tensors, max_seqlen, scale, columns, causal)
    if launches and launches[0].kernel is _bwd_tma_kernel and not aligned(q, k, v, o, do):
        launches = prepared(_prepare, tensors, max_seqlen, scale, columns, causal, False)
    if any("delta" in prepared_launch.tensors for prepared_launch in launches):
        tensors["delta"] = torch.empty_like(lse)
    tensors["sums"] = None
    if sum_dtype is not None and (blocks := _summed_blocks(launches, *k.shape[2:])):
        tensors["sums"] = torch.empty(len(q) * blocks, *dqkv.shape[2:], dtype=torch.float32, device=q.device)
    for prepared_launch in launches:
        start(prepared_launch, tensors)
    if learn_bias and not columns:
        dbias.copy_(tensors["dbias"].sum_to_size(bias.shape))
    if tensors["sums"] is not None:
        sums = sum_programs(tensors["sums"], sum_dtype).flatten()
    elif sum_dtype is not None:
        sums = dqkv.flatten(2).flatten(0, 1).sum(0, dtype=sum_dtype)
    return *outputs[:4], sums


def _prepare(tensors, max_seqlen, scale, columns, causal, may_box=True):
    """Launches of the backward pass: one if a program can hold a whole head, else one each for dq, dk/dv and dbias.

    may_box: one by descriptors, too, if a row says so.
    """
    q, k, v, bias, kv_lens, cu_seqlens, *_ = tensors.values()
    images, Nq, Nk, width = sizes_of(q, k, v, cu_seqlens, max_seqlen)
    heads = images * q.shape[1]
    ragged = kv_lens is not None or cu_seqlens is not None
    arguments = arguments_of(tensors, max_seqlen, scale, columns, causal)
    launches = []
    kind = bias_kind(bias, columns, causal)
    bare = bias is None and not ragged and not causal
    if may_box and bare and q.numel() and k.numel() and (found := whole_head_boxes(tensors, images, Nk, width)):
        return [prepare(_bwd_tma_kernel, heads, found[0], **arguments | found[1])]
    blocks = whole_head_blocks(q, bias, ragged, causal, images, Nq, Nk, width)
    if blocks and q.numel() and k.numel():
        tail = tail_block(Nq, blocks["BLOCK_M"], cu_seqlens is not None)
        return [prepare(_bwd_kernel, heads, blocks, **arguments, tiles=1, TAIL=tail)]
    if q.numel():
        blocks = blocks_of("bwd_dq", q, kind, images, Nq, Nk, width)
        tiles = cdiv(Nq, blocks["BLOCK_M"])
        tail = tail_block(Nk, blocks["BLOCK_N"], ragged)
        launches += [prepare(_bwd_dq_kernel, tiles * heads, blocks, **arguments, tiles=tiles, TAIL=tail)]
    if k.numel():
        masked = "_bias" if causal and bias is None else kind  # the mask, too, takes registers
        blocks = blocks_of("bwd_dkdv", q, masked, images, Nq, Nk, width)
        tiles = cdiv(Nk, blocks["BLOCK_N"])
        launches += [prepare(_bwd_dkdv_kernel, tiles * heads, blocks, **arguments, tiles=tiles)]
    if "dbias" in tensors and columns and q.numel() and k.numel():
        blocks = blocks_of("bwd_axes", q, "", images, Nq, Nk, max(width, arguments["WIDTH"]))
        tiles = cdiv(Nq, blocks["BLOCK_M"])
        launches += [prepare(_bwd_axes_kernel, tiles * heads, blocks, **arguments, tiles=tiles)]
    elif "dbias" in tensors and q.numel() and k.numel():
        blocks = blocks_of("bwd_dbias", q, kind, images, Nq, Nk, width)
        tiles = dict(tiles_m=cdiv(Nq, blocks["BLOCK_M"]), tiles_n=cdiv(Nk, blocks["BLOCK_N"]))
        programs = math.prod(tiles.values()) * q.shape[1] * bias.shape[0]
        launches += [prepare(_bwd_dbias_kernel, programs, blocks, **arguments, **tiles, B=images)]
    return launches


def _summed_blocks(launches, Nk, D):
    """Blocks of keys whose terms of (10) these launches write; 0 if they write none, as sums would spill registers."""
    if D != 64 or not launches or launches[0].kernel is not _bwd_kernel or launches[0].fixed["TAIL"] > 32:
        return 0
    return cdiv(Nk, launches[0].fixed["BLOCK_N"])


def _bwd_fake(
    do, q, k, v, bias, kv_lens, cu_seqlens, max_seqlen, scale, o, lse, packed, learn_bias, columns=0, causal=False,
    sum_dtype=None,
):  # fmt: skip
    B, H, N, D = q.shape
    sums = q.new_empty(0) if sum_dtype is None else q.new_empty(3 * H * D, dtype=sum_dtype)
    dbias = q.new_empty(bias.shape, dtype=bias.dtype) if learn_bias else q.new_empty(0)
    if packed:
        return q.new_empty(B, N, 3, H, D), q.new_empty(0), q.new_empty(0), dbias, sums
    # in the order of the operand's axes, so that the gradient of a projection [B, N, H, D] is a view
    return (*(torch.empty_like(t) if t.stride(-1) == 1 else t.new_empty(t.shape) for t in (q, k, v)), dbias, sums)


bwd_op = register(
    "attention_bwd",
    f"(Tensor do, {ARGUMENTS}, Tensor o, Tensor lse, bool packed, bool learn_bias, SymInt columns=0, "
    "bool causal=False, ScalarType? sum_dtype=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _bwd,
    _bwd_fake,
)
