"""Backward pass of attention. Symbols and equations (1) to (3) are those of `attention`.

Math      P = exp(S − L)                       recomputed, never stored          (4)
          Δ = Σ_d dO ∘ O                       [Nq]      fp32                    (5)
          dS = P ∘ (dO Vᵀ − Δ)                                                   (6)
          dV = Pᵀ dO    dQ = scale · dS K    dK = scale · dSᵀ Q                  (7)
          dbias[g] = Σ over images b ≡ g (mod G), in order, of dS                (8)
Kernels   A program owns a whole head where two blocks of keys hold it (197 ≤ 2·128): five products. Elsewhere dQ (with
          Δ) and dK, dV are two kernels of seven, and dbias is a third: no atomics, the same bits every run.
Cost      2·B·H·Nq·Nk·(3·D + 2·Dv) flops by whole heads, 2·B·H·Nq·Nk·(4·D + 3·Dv) otherwise.
Source    Dao, FlashAttention-2, arXiv:2307.08691, algorithm 2.
"""

import math

import torch

from . import dispatch, eager
from .attention_inner import (
    dkdv_step,
    dq_step,
    head,
    head_step,
    image_of,
    keys_of,
    no_head,
    p_and_dp,
    put_head,
    row_logs,
    start_of,
)
from .attention_launch import ARGUMENTS, arguments_of, blocks_of, run, sizes_of, tail_block, tuned_row, whole_head
from .eager import lead
from .launch import cdiv
from .op import register
from .tile import jit, tl


@jit
def _bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, lens_ptr, cu_ptr, o_ptr, do_ptr, l_ptr, delta_ptr, dq_ptr,
    q_strides, k_strides, v_strides, bias_strides, o_strides, do_strides, l_strides, dq_strides,
    H, Nq, Nk, T, G, tiles, scale, softmax_scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, Dv: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BIAS: tl.constexpr, HAS_LENS: tl.constexpr, HAS_CU: tl.constexpr, PRECISION: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries; streams keys; writes Δ of equation (5) and dQ of (7)."""
    tile, b, h, start, Nq, Nk = image_of(tl.program_id(0), tiles, H, Nq, Nk, T, cu_ptr, lens_ptr, HAS_CU, HAS_LENS)
    if tile * BLOCK_M >= Nq:
        return
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q_ptr, q_row = start_of(q_ptr, q_strides, b, h, start, UNIT)
    k_ptr, k_row = start_of(k_ptr, k_strides, b, h, start, UNIT)
    v_ptr, v_row = start_of(v_ptr, v_strides, b, h, start, UNIT)
    o_ptr, o_row = start_of(o_ptr, o_strides, b, h, start, UNIT)
    do_ptr, do_row = start_of(do_ptr, do_strides, b, h, start, UNIT)
    dq_ptr, dq_row = start_of(dq_ptr, dq_strides, b, h, start, UNIT)
    l_at = b * l_strides[0] + h * l_strides[1] + start
    if BIAS > 0:
        bias_ptr += (b % G) * bias_strides[0] + h * bias_strides[1]
    q0, q1 = head(q_ptr, m, q_row, Nq, D, D0, D1, True)  # [BLOCK_M, D0], [BLOCK_M, D1]
    do0, do1 = head(do_ptr, m, do_row, Nq, Dv, V0, V1, True)  # [BLOCK_M, V0], [BLOCK_M, V1]
    o0, o1 = head(o_ptr, m, o_row, Nq, Dv, V0, V1, True)
    delta = tl.sum(do0.to(tl.float32) * o0.to(tl.float32), 1)  # (5)
    if V1 > 0:
        delta += tl.sum(do1.to(tl.float32) * o1.to(tl.float32), 1)
    tl.store(delta_ptr + l_at + m, delta, mask=m < Nq)
    lse = row_logs(l_ptr + l_at, m, Nq)
    dq0, dq1 = no_head(BLOCK_M, D0, D1)
    full = Nk // BLOCK_N * BLOCK_N
    for first in range(0, full, BLOCK_N):
        dq0, dq1 = dq_step(
            q0, q1, do0, do1, k_ptr, v_ptr, bias_ptr, k_row, v_row, bias_strides,
            m, first + tl.arange(0, BLOCK_N), Nq, Nk, lse, delta, dq0, dq1, scale,
            D, D0, D1, Dv, V0, V1, BIAS, PRECISION, False,
        )  # fmt: skip
    if TAIL > 0:
        dq0, dq1 = dq_step(
            q0, q1, do0, do1, k_ptr, v_ptr, bias_ptr, k_row, v_row, bias_strides,
            m, full + tl.arange(0, TAIL), Nq, Nk, lse, delta, dq0, dq1, scale,
            D, D0, D1, Dv, V0, V1, BIAS, PRECISION, True,
        )  # fmt: skip
    put_head(dq_ptr, dq0 * softmax_scale, dq1 * softmax_scale, m, dq_row, Nq, D, D0, D1)


@jit
def _bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, lens_ptr, cu_ptr, do_ptr, l_ptr, delta_ptr, dk_ptr, dv_ptr,
    q_strides, k_strides, v_strides, bias_strides, do_strides, l_strides, dk_strides, dv_strides,
    H, Nq, Nk, T, G, tiles, scale, softmax_scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, Dv: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BIAS: tl.constexpr, HAS_LENS: tl.constexpr, HAS_CU: tl.constexpr, PRECISION: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N keys of one head; streams queries; writes dK and dV of equation (7)."""
    keys = Nk  # rows to write, masked ones too
    tile, b, h, start, Nq, Nk = image_of(tl.program_id(0), tiles, H, Nq, Nk, T, cu_ptr, lens_ptr, HAS_CU, HAS_LENS)
    if not HAS_LENS:
        keys = Nk
    if tile * BLOCK_N >= keys:
        return
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    q_ptr, q_row = start_of(q_ptr, q_strides, b, h, start, UNIT)
    k_ptr, k_row = start_of(k_ptr, k_strides, b, h, start, UNIT)
    v_ptr, v_row = start_of(v_ptr, v_strides, b, h, start, UNIT)
    do_ptr, do_row = start_of(do_ptr, do_strides, b, h, start, UNIT)
    dk_ptr, dk_row = start_of(dk_ptr, dk_strides, b, h, start, UNIT)
    dv_ptr, dv_row = start_of(dv_ptr, dv_strides, b, h, start, UNIT)
    l_ptr += b * l_strides[0] + h * l_strides[1] + start
    delta_ptr += b * l_strides[0] + h * l_strides[1] + start
    if BIAS > 0:
        bias_ptr += (b % G) * bias_strides[0] + h * bias_strides[1]
    k0, k1 = head(k_ptr, n, k_row, Nk, D, D0, D1, True)  # [BLOCK_N, D0], [BLOCK_N, D1]
    v0, v1 = head(v_ptr, n, v_row, Nk, Dv, V0, V1, True)  # [BLOCK_N, V0], [BLOCK_N, V1]
    dk0, dk1 = no_head(BLOCK_N, D0, D1)
    dv0, dv1 = no_head(BLOCK_N, V0, V1)
    full = Nq // BLOCK_M * BLOCK_M
    for first in range(0, full, BLOCK_M):
        dk0, dk1, dv0, dv1 = dkdv_step(
            k0, k1, v0, v1, q_ptr, do_ptr, l_ptr, delta_ptr, bias_ptr, q_row, do_row, bias_strides,
            first + tl.arange(0, BLOCK_M), n, Nq, Nk, dk0, dk1, dv0, dv1, scale,
            D, D0, D1, Dv, V0, V1, BIAS, PRECISION, False,
        )  # fmt: skip
    if full < Nq:
        dk0, dk1, dv0, dv1 = dkdv_step(
            k0, k1, v0, v1, q_ptr, do_ptr, l_ptr, delta_ptr, bias_ptr, q_row, do_row, bias_strides,
            full + tl.arange(0, BLOCK_M), n, Nq, Nk, dk0, dk1, dv0, dv1, scale,
            D, D0, D1, Dv, V0, V1, BIAS, PRECISION, True,
        )  # fmt: skip
    if HAS_LENS:
        seen = (n < Nk)[:, None]
        dk0, dk1 = tl.where(seen, dk0, 0.0), tl.where(seen, dk1, 0.0)
        dv0, dv1 = tl.where(seen, dv0, 0.0), tl.where(seen, dv1, 0.0)
    put_head(dk_ptr, dk0 * softmax_scale, dk1 * softmax_scale, n, dk_row, keys, D, D0, D1)
    put_head(dv_ptr, dv0, dv1, n, dv_row, keys, Dv, V0, V1)


@jit
def _bwd_kernel(
    q_ptr, k_ptr, v_ptr, lens_ptr, cu_ptr, o_ptr, do_ptr, l_ptr, dq_ptr, dk_ptr, dv_ptr,
    q_strides, k_strides, v_strides, o_strides, do_strides, l_strides, dq_strides, dk_strides, dv_strides,
    H, Nq, Nk, T, tiles, scale, softmax_scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, Dv: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    HAS_LENS: tl.constexpr, HAS_CU: tl.constexpr, PRECISION: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """One program: one whole head, in five products for the two kernels' seven; streams queries for each block of keys.

    dQ of the first keys waits in its final place, read back by the threads that wrote it.
    """
    keys = Nk  # rows to write, masked ones too
    _, b, h, start, Nq, Nk = image_of(tl.program_id(0), tiles, H, Nq, Nk, T, cu_ptr, lens_ptr, HAS_CU, HAS_LENS)
    if not HAS_LENS:
        keys = Nk
    q_ptr, q_row = start_of(q_ptr, q_strides, b, h, start, UNIT)
    k_ptr, k_row = start_of(k_ptr, k_strides, b, h, start, UNIT)
    v_ptr, v_row = start_of(v_ptr, v_strides, b, h, start, UNIT)
    o_ptr, o_row = start_of(o_ptr, o_strides, b, h, start, UNIT)
    do_ptr, do_row = start_of(do_ptr, do_strides, b, h, start, UNIT)
    dq_ptr, dq_row = start_of(dq_ptr, dq_strides, b, h, start, UNIT)
    dk_ptr, dk_row = start_of(dk_ptr, dk_strides, b, h, start, UNIT)
    dv_ptr, dv_row = start_of(dv_ptr, dv_strides, b, h, start, UNIT)
    l_ptr += b * l_strides[0] + h * l_strides[1] + start
    full = Nq // BLOCK_M * BLOCK_M
    for block in tl.range(0, keys, BLOCK_N, disable_licm=True):  # what is hoisted out of these loops is spilled
        n = block + tl.arange(0, BLOCK_N)
        k0, k1 = head(k_ptr, n, k_row, Nk, D, D0, D1, True)  # [BLOCK_N, D0], [BLOCK_N, D1]
        v0, v1 = head(v_ptr, n, v_row, Nk, Dv, V0, V1, True)  # [BLOCK_N, V0], [BLOCK_N, V1]
        dk0, dk1 = no_head(BLOCK_N, D0, D1)
        dv0, dv1 = no_head(BLOCK_N, V0, V1)
        for first in tl.range(0, full, BLOCK_M, disable_licm=True):
            dk0, dk1, dv0, dv1 = head_step(
                k0, k1, v0, v1, q_ptr, o_ptr, do_ptr, l_ptr, dq_ptr, q_row, o_row, do_row, dq_row,
                first + tl.arange(0, BLOCK_M), n, block > 0, Nq, Nk, dk0, dk1, dv0, dv1, scale, softmax_scale,
                D, D0, D1, Dv, V0, V1, HAS_LENS, PRECISION, False,
            )  # fmt: skip
        if TAIL > 0:
            dk0, dk1, dv0, dv1 = head_step(
                k0, k1, v0, v1, q_ptr, o_ptr, do_ptr, l_ptr, dq_ptr, q_row, o_row, do_row, dq_row,
                full + tl.arange(0, TAIL), n, block > 0, Nq, Nk, dk0, dk1, dv0, dv1, scale, softmax_scale,
                D, D0, D1, Dv, V0, V1, HAS_LENS, PRECISION, True,
            )  # fmt: skip
        put_head(dk_ptr, dk0 * softmax_scale, dk1 * softmax_scale, n, dk_row, keys, D, D0, D1)
        put_head(dv_ptr, dv0, dv1, n, dv_row, keys, Dv, V0, V1)
        tl.debug_barrier()


@jit
def _bwd_dbias_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, lens_ptr, do_ptr, l_ptr, delta_ptr, dbias_ptr,
    q_strides, k_strides, v_strides, bias_strides, do_strides, l_strides, B, H, Nq, Nk, G, tiles_m, tiles_n, scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, Dv: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BIAS: tl.constexpr, HAS_LENS: tl.constexpr, PRECISION: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: one tile of one head's bias in one group; sums dS over the group's images in order. Equation (8)."""
    pid = tl.program_id(0)
    n = pid % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m = pid // tiles_n % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    h = (pid // tiles_n // tiles_m % H).to(tl.int64)
    g = (pid // tiles_n // tiles_m // H).to(tl.int64)
    bias_ptr += g * bias_strides[0] + h * bias_strides[1]
    dbias = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for image in range(g, B, G):
        b, keys = tl.cast(image, tl.int64), Nk
        if HAS_LENS:
            keys = keys_of(lens_ptr + b, Nk)
        at = b * l_strides[0] + h * l_strides[1]
        q_at, q_row = start_of(q_ptr, q_strides, b, h, 0, UNIT)
        k_at, k_row = start_of(k_ptr, k_strides, b, h, 0, UNIT)
        v_at, v_row = start_of(v_ptr, v_strides, b, h, 0, UNIT)
        do_at, do_row = start_of(do_ptr, do_strides, b, h, 0, UNIT)
        q0, q1 = head(q_at, m, q_row, Nq, D, D0, D1, True)
        k0, k1 = head(k_at, n, k_row, keys, D, D0, D1, True)
        do0, do1 = head(do_at, m, do_row, Nq, Dv, V0, V1, True)
        p, dp = p_and_dp(
            q0, q1, do0, do1, k0, k1, v_at, bias_ptr, v_row, bias_strides, m, n, Nq, keys, row_logs(l_ptr + at, m, Nq),
            scale, D1, Dv, V0, V1, BIAS, PRECISION, True,
        )  # fmt: skip
        dbias += p * (dp - tl.load(delta_ptr + at + m, mask=m < Nq, other=0.0)[:, None])
    at = dbias_ptr + ((g * H + h) * Nq + m)[:, None] * Nk + n[None, :]
    tl.store(at, dbias, mask=(m < Nq)[:, None] & (n < Nk)[None, :])


def _bwd(do, q, k, v, bias, kv_lens, cu, max_seqlen, scale, o, lse, packed, learn_bias):
    """(dq, dk, dv, dbias); `packed` gives dqkv [B, N, 3, H, D] in place of dq. What is not asked for is empty."""
    if bias is kv_lens is cu is None and not dispatch.attention(tuned_row, "bwd_dq", q, k, v, packed):
        return *eager.attention_grads(do, q, k, v, o, lse, scale, packed), q.new_empty(0)
    outputs = _bwd_fake(do, q, k, v, bias, kv_lens, cu, max_seqlen, scale, o, lse, packed, learn_bias)
    dq, dk, dv, dbias = outputs
    if cu is not None:
        max_seqlen = min(max_seqlen, q.shape[2])
        for grad in (dq, dk, dv):
            grad.zero_()
    if packed:
        dq, dk, dv = dq.permute(2, 0, 3, 1, 4).unbind(0)
    do, q, k, v = lead(do, q, k, v)
    images, Nq, Nk, width = sizes_of(q, k, v, cu, max_seqlen)
    heads, ragged = images * q.shape[1], kv_lens is not None or cu is not None
    arguments = arguments_of(q, k, v, bias, kv_lens, cu, max_seqlen, scale, lse, do=do, o=o, dq=dq, dk=dk, dv=dv)
    whole = whole_head(q, bias, ragged, Nk, width)
    if whole and q.numel() and k.numel():
        tail = tail_block(Nq, whole["BLOCK_M"], cu is not None)
        run(_bwd_kernel, heads, whole, **arguments, tiles=1, TAIL=tail)
        return outputs
    arguments["delta_ptr"] = torch.empty_like(lse)
    if q.numel():
        blocks = blocks_of("bwd_dq", q, bias, Nq, width)
        tiles, tail = cdiv(Nq, blocks["BLOCK_M"]), tail_block(Nk, blocks["BLOCK_N"], ragged)
        run(_bwd_dq_kernel, tiles * heads, blocks, **arguments, tiles=tiles, TAIL=tail)
    if k.numel():
        blocks = blocks_of("bwd_dkdv", q, bias, Nq, width)
        tiles = cdiv(Nk, blocks["BLOCK_N"])
        run(_bwd_dkdv_kernel, tiles * heads, blocks, **arguments, tiles=tiles)
    if learn_bias:
        blocks = blocks_of("bwd_dbias", q, bias, Nq, width)
        full = torch.zeros(bias.shape[0], q.shape[1], Nq, Nk, dtype=torch.float32, device=q.device)
        if q.numel() and k.numel():
            tiles = dict(tiles_m=cdiv(Nq, blocks["BLOCK_M"]), tiles_n=cdiv(Nk, blocks["BLOCK_N"]))
            programs = math.prod(tiles.values()) * q.shape[1] * bias.shape[0]
            run(_bwd_dbias_kernel, programs, blocks, **arguments, **tiles, dbias_ptr=full, B=images)
        dbias.copy_(full.sum_to_size(bias.shape))
    return outputs


def _bwd_fake(do, q, k, v, bias, kv_lens, cu, max_seqlen, scale, o, lse, packed, learn_bias):
    B, H, N, D = q.shape
    dbias = q.new_empty(bias.shape, dtype=bias.dtype) if learn_bias else q.new_empty(0)
    if packed:
        return q.new_empty(B, N, 3, H, D), q.new_empty(0), q.new_empty(0), dbias
    return (*(t.new_empty(t.shape) for t in (q, k, v)), dbias)


bwd_op = register(
    "attention_bwd",
    f"(Tensor do, {ARGUMENTS}, Tensor o, Tensor lse, bool packed, bool learn_bias) -> (Tensor, Tensor, Tensor, Tensor)",
    _bwd,
    _bwd_fake,
)
