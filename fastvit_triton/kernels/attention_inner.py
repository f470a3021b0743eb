"""A head on the device: what the kernels of attention do with one tile of queries and one of keys.

A head is two tiles of channels, x0 and x1, with widths that are powers of two: 80 = 64 + 16. The equations are those of
attention.py.
"""

from .tile import jit, put_rows, rows, tl

LOG2_E = tl.constexpr(1.4426950408889634)  # log₂ e


@jit
def image_of(pid, tiles, H, Nq, Nk, T, cu_ptr, lens_ptr, HAS_CU: tl.constexpr, HAS_LENS: tl.constexpr):
    """Which tile, image and head a program owns, where the image starts and how many queries and keys it has.

    Whatever cu_seqlens and kv_lens hold, an image lies inside T tokens and has at most Nq queries and Nk keys.
    """
    b = (pid // tiles // H).to(tl.int64)
    h = (pid // tiles % H).to(tl.int64)
    start = tl.zeros([], tl.int64)
    if HAS_CU:
        start = tl.minimum(tl.maximum(tl.load(cu_ptr + b).to(tl.int64), 0), T)
        end = tl.minimum(tl.maximum(tl.load(cu_ptr + b + 1).to(tl.int64), start), T)
        Nq = tl.minimum(end - start, Nq).to(tl.int32)
        Nk = Nq
    if HAS_LENS:
        Nk = keys_of(lens_ptr + b, Nk)
    return pid % tiles, b, h, start, Nq, Nk


@jit
def keys_of(at, Nk):
    """How many of Nk keys an image has by its length at `at`: none to all of them, whatever stands there."""
    return tl.minimum(tl.maximum(tl.load(at).to(tl.int64), 0), Nk).to(tl.int32)


@jit
def start_of(ptr, strides, b, h, start, UNIT: tl.constexpr):
    """A head's first row and the step to the next; strides come in units of 16 bytes, where all fit, for wide loads."""
    return ptr + (b * strides[0] + h * strides[1] + start * strides[2]) * UNIT, strides[2] * UNIT


@jit
def head(
    ptr, n, stride, N, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Rows n of a head as its two tiles, [len(n), D0] and [len(n), D1]; the first twice where there is no second."""
    x0 = rows(ptr, n, stride, N, 0, D, D0, MASKED)
    x1 = rows(ptr, n, stride, N, D0, D, D1, MASKED) if D1 > 0 else x0
    return x0, x1


@jit
def put_head(ptr, x0, x1, n, stride, N, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    """Stores what `head` would load."""
    put_rows(ptr, x0, n, stride, N, 0, D, D0)
    if D1 > 0:
        put_rows(ptr, x1, n, stride, N, D0, D, D1)


@jit
def no_head(LENGTH: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    """Two accumulators, fp32."""
    return tl.zeros([LENGTH, D0], tl.float32), tl.zeros([LENGTH, D1 if D1 > 0 else 16], tl.float32)


@jit
def scores(a0, a1, b0, b1, D1: tl.constexpr, PRECISION: tl.constexpr):
    """A Bᵀ over both tiles: [rows of A, rows of B]."""
    s = tl.dot(a0, tl.trans(b0), input_precision=PRECISION)
    return tl.dot(a1, tl.trans(b1), s, input_precision=PRECISION) if D1 > 0 else s


@jit
def mix(p, x0, x1, sum0, sum1, D1: tl.constexpr, PRECISION: tl.constexpr):
    """P X over both tiles, added to the accumulators."""
    p = p.to(x0.dtype)
    sum0 = tl.dot(p, x0, sum0, input_precision=PRECISION)
    sum1 = tl.dot(p, x1, sum1, input_precision=PRECISION) if D1 > 0 else sum1
    return sum0, sum1


@jit
def _biased(s, bias_ptr, m, n, inside, bias_strides, BIAS: tl.constexpr):
    """Scores in base 2 plus the bias at queries m and keys n; the three index vectors broadcast to s."""
    at = bias_ptr + m.to(tl.int64) * bias_strides[2] + n.to(tl.int64) * bias_strides[3]
    if BIAS == 2:  # boolean: True attends
        return tl.where(tl.load(at, mask=inside, other=0) != 0, s, float("-inf"))
    return s + tl.load(at, mask=inside, other=0.0).to(tl.float32) * LOG2_E


@jit
def row_logs(l_ptr, m, Nq):
    """L of queries m; +inf, so that P = 0, past the end and in rows without keys."""
    lse = tl.load(l_ptr + m, mask=m < Nq, other=float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse)


@jit
def fwd_step(
    q0, q1, k_ptr, v_ptr, bias_ptr, k_n, v_n, bias_strides, m, n, Nq, Nk, top, total, o0, o1, scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, Dv: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr, SAFE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of keys: equations (1) and (2) with a running maximum `top` and sum `total`."""
    k0, k1 = head(k_ptr, n, k_n, Nk, D, D0, D1, MASKED)
    s = scores(q0, q1, k0, k1, D1, PRECISION)  # [BLOCK_M, BLOCK_N]
    if SAFE:  # scores are scaled first: a bias is added to them, or the scale may be negative
        s *= scale
        if BIAS > 0:
            inside = (m < Nq)[:, None] & (n < Nk)[None, :] if MASKED else (m < Nq)[:, None]
            s = _biased(s, bias_ptr, m[:, None], n[None, :], inside, bias_strides, BIAS)
        scale = 1.0
    if MASKED:
        s = tl.where((n < Nk)[None, :], s, float("-inf"))
    new_top = tl.maximum(top, tl.max(s, 1))
    shift = new_top * scale
    if SAFE:
        shift = tl.where(new_top == float("-inf"), 0.0, shift)  # no key so far
    p = tl.exp2(s * scale - shift[:, None])
    decay = tl.exp2(top * scale - shift)
    v0, v1 = head(v_ptr, n, v_n, Nk, Dv, V0, V1, MASKED)
    o0, o1 = mix(p, v0, v1, o0 * decay[:, None], o1 * decay[:, None], V1, PRECISION)
    return new_top, total * decay + tl.sum(p, 1), o0, o1


@jit
def p_and_dp(
    q0, q1, do0, do1, k0, k1, v_ptr, bias_ptr, v_n, bias_strides, m, n, Nq, Nk, lse, scale,
    D1: tl.constexpr, Dv: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """P of equation (4) and dO Vᵀ, queries on rows and keys on columns."""
    s = scores(q0, q1, k0, k1, D1, PRECISION) * scale  # [BLOCK_M, BLOCK_N]
    if BIAS > 0:
        inside = (m < Nq)[:, None] & (n < Nk)[None, :] if MASKED else (m < Nq)[:, None]
        s = _biased(s, bias_ptr, m[:, None], n[None, :], inside, bias_strides, BIAS)
    p = tl.exp2(s - lse[:, None])
    if MASKED:
        p = tl.where((n < Nk)[None, :], p, 0.0)
    v0, v1 = head(v_ptr, n, v_n, Nk, Dv, V0, V1, MASKED)
    return p, scores(do0, do1, v0, v1, V1, PRECISION)


@jit
def dq_step(
    q0, q1, do0, do1, k_ptr, v_ptr, bias_ptr, k_n, v_n, bias_strides, m, n, Nq, Nk, lse, delta, dq0, dq1, scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, Dv: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of keys: equation (6), and its part of dQ."""
    k0, k1 = head(k_ptr, n, k_n, Nk, D, D0, D1, MASKED)
    p, dp = p_and_dp(
        q0, q1, do0, do1, k0, k1, v_ptr, bias_ptr, v_n, bias_strides, m, n, Nq, Nk, lse, scale,
        D1, Dv, V0, V1, BIAS, PRECISION, MASKED,
    )  # fmt: skip
    return mix(p * (dp - delta[:, None]), k0, k1, dq0, dq1, D1, PRECISION)


@jit
def dkdv_step(
    k0, k1, v0, v1, q_ptr, do_ptr, l_ptr, delta_ptr, bias_ptr, q_m, do_m, bias_strides,
    m, n, Nq, Nk, dk0, dk1, dv0, dv1, scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, Dv: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of queries: Sᵀ and dPᵀ with keys on rows, so that neither P nor dS is ever transposed."""
    q0, q1 = head(q_ptr, m, q_m, Nq, D, D0, D1, MASKED)
    do0, do1 = head(do_ptr, m, do_m, Nq, Dv, V0, V1, MASKED)
    lse = row_logs(l_ptr, m, Nq)
    delta = tl.load(delta_ptr + m, mask=m < Nq, other=0.0)
    s = scores(k0, k1, q0, q1, D1, PRECISION) * scale  # [BLOCK_N, BLOCK_M]
    if BIAS > 0:
        inside = (m < Nq)[None, :] & (n < Nk)[:, None] if MASKED else (n < Nk)[:, None]
        s = _biased(s, bias_ptr, m[None, :], n[:, None], inside, bias_strides, BIAS)
    p = tl.exp2(s - lse[None, :])  # (4); keys past the end give rows that nobody reads
    dv0, dv1 = mix(p, do0, do1, dv0, dv1, V1, PRECISION)
    ds = p * (scores(v0, v1, do0, do1, V1, PRECISION) - delta[None, :])  # (6)
    dk0, dk1 = mix(ds, q0, q1, dk0, dk1, D1, PRECISION)
    return dk0, dk1, dv0, dv1


@jit
def _add_rows(
    ptr, x, m, stride, N, again, first: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Stores xᵀ where `rows` would load it, or adds it to what is there."""
    x = tl.trans(x.to(ptr.dtype.element_ty))  # rounded first: half the way through shared memory
    if again:
        x = x.to(tl.float32) + rows(ptr, m, stride, N, first, D, WIDTH, MASKED).to(tl.float32)
        x = x.to(ptr.dtype.element_ty)
    put_rows(ptr, x, m, stride, N, first, D, WIDTH)


@jit
def head_step(
    k0, k1, v0, v1, q_ptr, o_ptr, do_ptr, l_ptr, dq_ptr, q_m, o_m, do_m, dq_m, m, n, again, Nq, Nk,
    dk0, dk1, dv0, dv1, scale, softmax_scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, Dv: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    HAS_LENS: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of queries: as `dkdv_step`, and its dQᵀ = Kᵀ dSᵀ, added to what earlier keys left."""
    q0, q1 = head(q_ptr, m, q_m, Nq, D, D0, D1, MASKED)
    do0, do1 = head(do_ptr, m, do_m, Nq, Dv, V0, V1, MASKED)
    o0, o1 = head(o_ptr, m, o_m, Nq, Dv, V0, V1, MASKED)
    delta = tl.sum(do0.to(tl.float32) * o0.to(tl.float32), 1)  # (5)
    if V1 > 0:
        delta += tl.sum(do1.to(tl.float32) * o1.to(tl.float32), 1)
    if HAS_LENS or MASKED:
        lse = row_logs(l_ptr, m, Nq)
    else:
        lse = tl.load(l_ptr + m)
    p = tl.exp2(scores(k0, k1, q0, q1, D1, PRECISION) * scale - lse[None, :])  # [BLOCK_N, BLOCK_M], (4)
    p = tl.where((n < Nk)[:, None], p, 0.0)
    dv0, dv1 = mix(p, do0, do1, dv0, dv1, V1, PRECISION)
    ds = (p * (scores(v0, v1, do0, do1, V1, PRECISION) - delta[None, :])).to(q0.dtype)  # (6)
    dk0, dk1 = mix(ds, q0, q1, dk0, dk1, D1, PRECISION)
    dq = tl.dot(tl.trans(k0), ds, input_precision=PRECISION) * softmax_scale  # [D0, BLOCK_M]
    _add_rows(dq_ptr, dq, m, dq_m, Nq, again, 0, D, D0, MASKED)
    if D1 > 0:
        dq1 = tl.dot(tl.trans(k1), ds, input_precision=PRECISION) * softmax_scale
        _add_rows(dq_ptr, dq1, m, dq_m, Nq, again, D0, D, D1, MASKED)
    return dk0, dk1, dv0, dv1
