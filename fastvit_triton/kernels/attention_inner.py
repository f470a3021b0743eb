"""Inner loops of the attention kernels, for one tile of queries and one tile of keys.

The channels of a head are held as two tiles, x0 and x1, whose widths are powers of two: 80 = 64 + 16. Equations (1) to
(3) are those of `attention`, (4) to (8) those of `attention_backward`.

Names     m and n are query and key indices; q_stride is the row stride of q, and likewise for other tensors.
Flags     MASKED: indices may lie past Nq or Nk, so loads are masked.
          SAFE: scores are scaled before the maximum is taken (there is a bias, or the scale may be negative), and a row
          may have no keys.
          BIAS: 0 without a bias, 1 for a bias that is added, 2 for a boolean mask.
          ROWS, COLUMNS: of the map of keys, if the bias is that of a key's row plus that of its column; else 0.
          CAUSAL: query m sees key n only if n ≤ m + offset; unused offsets are 0.
"""

from .tile import jit, load_rows, store_rows, tl


@jit
def program_position(
    pid, tiles, H, Nq, Nk, T, cu_seqlens_ptr, kv_lens_ptr, HAS_CU_SEQLENS: tl.constexpr, HAS_KV_LENS: tl.constexpr
):
    """(tile, image, head, first token, queries, keys) of a program.

    The values in cu_seqlens and kv_lens are clamped: an image is within T tokens, with at most Nq queries and Nk keys.
    """
    b = (pid // tiles // H).to(tl.int64)
    h = (pid // tiles % H).to(tl.int64)
    start = tl.zeros([], tl.int64)
    if HAS_CU_SEQLENS:
        start = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + b).to(tl.int64), 0), T)
        end = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + b + 1).to(tl.int64), start), T)
        Nq = tl.minimum(end - start, Nq).to(tl.int32)
        Nk = Nq
    if HAS_KV_LENS:
        Nk = num_keys(kv_lens_ptr + b, Nk)
    return pid % tiles, b, h, start, Nq, Nk


@jit
def num_keys(at, Nk):
    """Number of keys of an image: the length stored at `at`, clamped to 0 … Nk."""
    return tl.minimum(tl.maximum(tl.load(at).to(tl.int64), 0), Nk).to(tl.int32)


@jit
def seen_keys(m, offset, Nk):
    """Number of keys, of Nk, that query m sees: those with n ≤ m + offset."""
    return tl.minimum(tl.maximum(m + offset + 1, 0), Nk)


@jit
def first_query(n, offset):
    """The first query that sees key n ≤ m + offset."""
    return tl.maximum(n - offset, 0)


@jit
def head_pointer(ptr, strides, b, h, start, UNIT: tl.constexpr):
    """(pointer to a head's first row, row stride). Strides are given in units of UNIT elements.

    UNIT is 16 bytes if every stride is a multiple of that, so that the compiler may emit 16-byte loads.
    """
    return ptr + (b * strides[0] + h * strides[1] + start * strides[2]) * UNIT, strides[2] * UNIT


@jit
def load_tiles(
    ptr, n, stride, N, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Loads rows n of a head as two tiles, [len(n), D0] and [len(n), D1]; the first one twice if D1 is 0."""
    x0 = load_rows(ptr, n, stride, N, 0, D, D0, MASKED)
    x1 = load_rows(ptr, n, stride, N, D0, D, D1, MASKED) if D1 > 0 else x0
    return x0, x1


@jit
def store_tiles(ptr, x0, x1, n, stride, N, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    """Stores the two tiles of rows n where `load_tiles` reads them."""
    store_rows(ptr, x0, n, stride, N, 0, D, D0)
    if D1 > 0:
        store_rows(ptr, x1, n, stride, N, D0, D, D1)


@jit
def zero_tiles(LENGTH: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    """Two fp32 accumulators of zeros, [LENGTH, D0] and [LENGTH, D1]."""
    return tl.zeros([LENGTH, D0], tl.float32), tl.zeros([LENGTH, D1 if D1 > 0 else 16], tl.float32)


@jit
def dot_transposed(a0, a1, b0, b1, D1: tl.constexpr, PRECISION: tl.constexpr):
    """A Bᵀ, summed over both channel tiles: [rows of A, rows of B]."""
    s = tl.dot(a0, tl.trans(b0), input_precision=PRECISION)
    return tl.dot(a1, tl.trans(b1), s, input_precision=PRECISION) if D1 > 0 else s


@jit
def add_product(p, x0, x1, sum0, sum1, D1: tl.constexpr, PRECISION: tl.constexpr):
    """Adds P X to the accumulators, tile by tile."""
    p = p.to(x0.dtype)
    sum0 = tl.dot(p, x0, sum0, input_precision=PRECISION)
    sum1 = tl.dot(p, x1, sum1, input_precision=PRECISION) if D1 > 0 else sum1
    return sum0, sum1


@jit
def _in_base_2(bias):
    """bias · log₂e; finite unless the bias is −inf, since a row that finite numbers mask whole has weights.

    The least, -2.9e38, leaves room for the score that is added.
    """
    least = tl.where(bias > float("-inf"), -2.9e38, float("-inf"))
    return tl.maximum(bias * 1.4426950408889634, least, propagate_nan=tl.PropagateNan.ALL)


@jit
def _load_bias(
    bias_ptr, m, n, first, inside, Nq, bias_strides, BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """The bias of queries m and keys n = first, … in base 2; m, n and inside broadcast to the shape of the scores."""
    at = bias_ptr + m.to(tl.int64) * bias_strides[2]
    if COLUMNS > 0:  # the biases of all rows, then of all columns
        if tl.constexpr(COLUMNS) % n.numel == 0:  # all keys are in one row
            row = tl.load(at + first // COLUMNS, mask=m < Nq, other=0.0)
        else:
            row = tl.load(at + n // COLUMNS, mask=inside, other=0.0)
        column = tl.load(at + ROWS + n % COLUMNS, mask=inside, other=0.0)
        return _in_base_2(row.to(tl.float32) + column.to(tl.float32))
    at += n.to(tl.int64) * bias_strides[3]
    if BIAS == 2:  # boolean: True means attend
        return tl.where(tl.load(at, mask=inside, other=0) != 0, 0.0, float("-inf"))
    return _in_base_2(tl.load(at, mask=inside, other=0.0).to(tl.float32))


@jit
def load_lse(l_ptr, m, Nq):
    """Loads L of queries m; gives +inf, so that P = 0, past the end and for rows without keys."""
    lse = tl.load(l_ptr + m, mask=m < Nq, other=float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse)


@jit
def load_log_sum(l_ptr, m, Nq, BIAS: tl.constexpr):
    """Loads log₂ of the row sums, which are stored apart from the row maxima if there is a bias, else 0."""
    return tl.load(l_ptr + Nq + m, mask=m < Nq, other=0.0) if BIAS > 0 else tl.zeros(m.shape, tl.float32)


@jit
def fwd_step(
    q0, q1, k_ptr, v_ptr, loaded, bias_ptr, k_stride, v_stride, bias_strides, m, n, first, offset, Nq, Nk,
    row_max, row_sum, o0, o1, scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, Dv: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, SAFE: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Forward step over one block of keys: equations (1) and (2) with a running row maximum and row sum.

    loaded: the two tiles of the keys and the two of the values, or None to load them.
    """
    if BIAS > 0:  # before Q Kᵀ, whose layout Triton then takes for row_max: else it computes each exponential twice
        inside = (m < Nq)[:, None] & (n < Nk)[None, :] if MASKED else (m < Nq)[:, None]
        bias = _load_bias(bias_ptr, m[:, None], n[None, :], first, inside, Nq, bias_strides, BIAS, ROWS, COLUMNS)
    if loaded is None:
        k0, k1 = load_tiles(k_ptr, n, k_stride, Nk, D, D0, D1, MASKED)
    else:
        k0, k1, v0, v1 = loaded
    s = dot_transposed(q0, q1, k0, k1, D1, PRECISION)  # [BLOCK_M, BLOCK_N]
    if SAFE:  # scores are scaled first: a bias is added to them, or the scale may be negative
        s *= scale
        if BIAS > 0:
            s += bias
        scale = 1.0
    if MASKED:
        s = tl.where((n < Nk)[None, :], s, float("-inf"))
    if CAUSAL:
        s = tl.where(n[None, :] <= m[:, None] + offset, s, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(s, 1))
    shift = new_max * scale
    if SAFE:
        shift = tl.where(new_max == float("-inf"), 0.0, shift)  # no unmasked key yet
    p = tl.exp2(s * scale - shift[:, None])
    decay = tl.exp2(row_max * scale - shift)
    if loaded is None:
        v0, v1 = load_tiles(v_ptr, n, v_stride, Nk, Dv, V0, V1, MASKED)
    o0, o1 = add_product(p, v0, v1, o0 * decay[:, None], o1 * decay[:, None], V1, PRECISION)
    return new_max, row_sum * decay + tl.sum(p, 1), o0, o1


@jit
def load_pieces(
    ptr, stride, N, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """All N rows of a head in pieces of N0, N1 and N2 rows, each as two tiles; the first piece again for one of 0."""
    x0 = load_tiles(ptr, tl.arange(0, N0), stride, N, D, D0, D1, MASKED and N1 == 0)
    x1 = x0
    x2 = x0
    if N1 > 0:
        x1 = load_tiles(ptr, N0 + tl.arange(0, N1), stride, N, D, D0, D1, MASKED and N2 == 0)
    if N2 > 0:
        x2 = load_tiles(ptr, N0 + N1 + tl.arange(0, N2), stride, N, D, D0, D1, MASKED)
    return x0, x1, x2


@jit
def _scores(q0, q1, k, first: tl.constexpr, Nk, D1: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr):
    """Q Kᵀ of one piece of keys, -inf from key Nk on."""
    s = dot_transposed(q0, q1, k[0], k[1], D1, PRECISION)
    if MASKED:
        s = tl.where((first + tl.arange(0, s.shape[1]) < Nk)[None, :], s, float("-inf"))
    return s


@jit
def _add_piece(s, v, scale, shift, row_sum, o0, o1, V1: tl.constexpr, PRECISION: tl.constexpr):
    """Adds the weights of one piece of keys to the row sum, and their products with its values to the output."""
    p = tl.exp2(s * scale - shift[:, None])
    row_sum += tl.sum(p, 1)  # before the product, so that the weights leave the registers: 34 less on sm_90
    o0, o1 = add_product(p, v[0], v[1], o0, o1, V1, PRECISION)
    return row_sum, o0, o1


@jit
def whole_rows(
    q0, q1, k0, k1, k2, v0, v1, v2, Nk, scale,
    D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(row maximum, row sum, two tiles of the output before division by that sum): (1) and (2), all keys at once.

    The scores with all keys are held in registers, so there is one maximum and nothing is rescaled.
    """
    s0 = _scores(q0, q1, k0, 0, Nk, D1, PRECISION, MASKED and N1 == 0)
    row_max = tl.max(s0, 1)
    if N1 > 0:
        s1 = _scores(q0, q1, k1, N0, Nk, D1, PRECISION, MASKED and N2 == 0)
        row_max = tl.maximum(row_max, tl.max(s1, 1))
    if N2 > 0:
        s2 = _scores(q0, q1, k2, N0 + N1, Nk, D1, PRECISION, MASKED)
        row_max = tl.maximum(row_max, tl.max(s2, 1))
    shift = row_max * scale
    o0, o1 = zero_tiles(q0.shape[0], V0, V1)
    row_sum = tl.zeros([q0.shape[0]], tl.float32)
    row_sum, o0, o1 = _add_piece(s0, v0, scale, shift, row_sum, o0, o1, V1, PRECISION)
    if N1 > 0:
        row_sum, o0, o1 = _add_piece(s1, v1, scale, shift, row_sum, o0, o1, V1, PRECISION)
    if N2 > 0:
        row_sum, o0, o1 = _add_piece(s2, v2, scale, shift, row_sum, o0, o1, V1, PRECISION)
    return row_max, row_sum, o0, o1


@jit
def load_box(desc, b, h, H, first, LENGTH: tl.constexpr, D: tl.constexpr, FIRST: tl.constexpr):
    """LENGTH rows of a head from `first` on, [LENGTH, D]; zeros past the last row.

    desc: of [B·H, N, D] if the heads come FIRST, else of [B, N, H·D].
    """
    x = desc.load([b * H + h, first, 0]) if FIRST else desc.load([b, first, h * D])
    return tl.reshape(x, [LENGTH, D])


@jit
def store_box(desc, x, b, h, H, first, FIRST: tl.constexpr):
    """Stores x [LENGTH, D] where `load_box` reads it; rows past the last one are not written."""
    box = tl.reshape(x.to(desc.dtype), [1, x.shape[0], x.shape[1]])
    if FIRST:
        desc.store([b * H + h, first, 0], box)
    else:
        desc.store([b, first, h * x.shape[1]], box)


@jit
def load_boxes(
    desc0, desc1, desc2, b, h, H, D: tl.constexpr, FIRST: tl.constexpr,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr,
):  # fmt: skip
    """All rows of a head in pieces, as `load_pieces`, each by its descriptor."""
    x0 = load_box(desc0, b, h, H, 0, N0, D, FIRST)
    x1 = x0
    x2 = x0
    if N1 > 0:
        x1 = load_box(desc1, b, h, H, N0, N1, D, FIRST)
    if N2 > 0:
        x2 = load_box(desc2, b, h, H, N0 + N1, N2, D, FIRST)
    return (x0, x0), (x1, x1), (x2, x2)


@jit
def p_and_dp(
    q0, q1, do0, do1, k0, k1, v_ptr, bias_ptr, v_stride, bias_strides, m, n, first, offset, Nq, Nk,
    lse, log_sum, scale,
    D1: tl.constexpr, Dv: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """(P of equation (4), dO Vᵀ), both [queries, keys]."""
    s = dot_transposed(q0, q1, k0, k1, D1, PRECISION) * scale  # [BLOCK_M, BLOCK_N]
    if BIAS > 0:
        inside = (m < Nq)[:, None] & (n < Nk)[None, :] if MASKED else (m < Nq)[:, None]
        s += _load_bias(bias_ptr, m[:, None], n[None, :], first, inside, Nq, bias_strides, BIAS, ROWS, COLUMNS)
    s -= lse[:, None]
    p = tl.exp2(s - log_sum[:, None] if BIAS > 0 else s)
    if MASKED:
        p = tl.where((n < Nk)[None, :], p, 0.0)
    if CAUSAL:
        p = tl.where(n[None, :] <= m[:, None] + offset, p, 0.0)
    v0, v1 = load_tiles(v_ptr, n, v_stride, Nk, Dv, V0, V1, MASKED)
    return p, dot_transposed(do0, do1, v0, v1, V1, PRECISION)


@jit
def dq_step(
    q0, q1, do0, do1, k_ptr, v_ptr, bias_ptr, k_stride, v_stride, bias_strides, m, n, first, offset, Nq, Nk,
    lse, log_sum, delta, dq0, dq1, scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, Dv: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """dQ step over one block of keys: dS of equation (6), and dS K added to dQ."""
    k0, k1 = load_tiles(k_ptr, n, k_stride, Nk, D, D0, D1, MASKED)
    p, dp = p_and_dp(
        q0, q1, do0, do1, k0, k1, v_ptr, bias_ptr, v_stride, bias_strides, m, n, first, offset, Nq, Nk,
        lse, log_sum, scale, D1, Dv, V0, V1, BIAS, ROWS, COLUMNS, PRECISION, MASKED, CAUSAL,
    )  # fmt: skip
    return add_product(p * (dp - delta[:, None]), k0, k1, dq0, dq1, D1, PRECISION)


@jit
def dkdv_step(
    k0, k1, v0, v1, q_ptr, do_ptr, l_ptr, delta_ptr, bias_ptr, q_stride, do_stride, bias_strides,
    m, n, first, offset, Nq, Nk, dk0, dk1, dv0, dv1, scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, Dv: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """dK, dV step over one block of queries. Sᵀ and dPᵀ are computed directly, so P and dS are never transposed."""
    q0, q1 = load_tiles(q_ptr, m, q_stride, Nq, D, D0, D1, MASKED)
    do0, do1 = load_tiles(do_ptr, m, do_stride, Nq, Dv, V0, V1, MASKED)
    lse = load_lse(l_ptr, m, Nq)
    delta = tl.load(delta_ptr + m, mask=m < Nq, other=0.0)
    s = dot_transposed(k0, k1, q0, q1, D1, PRECISION) * scale  # [BLOCK_N, BLOCK_M]
    if BIAS > 0:
        inside = (m < Nq)[None, :] & (n < Nk)[:, None] if MASKED else (n < Nk)[:, None]
        s += _load_bias(bias_ptr, m[None, :], n[:, None], first, inside, Nq, bias_strides, BIAS, ROWS, COLUMNS)
    s -= lse[None, :]
    if BIAS > 0:
        s -= load_log_sum(l_ptr, m, Nq, BIAS)[None, :]
    p = tl.exp2(s)  # (4); rows of keys past the end are not stored
    if CAUSAL:
        p = tl.where(n[:, None] <= m[None, :] + offset, p, 0.0)
    dv0, dv1 = add_product(p, do0, do1, dv0, dv1, V1, PRECISION)
    ds = p * (dot_transposed(v0, v1, do0, do1, V1, PRECISION) - delta[None, :])  # (6)
    dk0, dk1 = add_product(ds, q0, q1, dk0, dk1, D1, PRECISION)
    return dk0, dk1, dv0, dv1


@jit
def _add_rows(
    ptr, x, m, stride, N, again, first: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Stores xᵀ where `load_rows` reads it; if `again`, adds it to the values already stored there."""
    x = tl.trans(x.to(ptr.dtype.element_ty))  # rounded first: half the shared memory traffic
    if again:
        x = x.to(tl.float32) + load_rows(ptr, m, stride, N, first, D, WIDTH, MASKED).to(tl.float32)
        x = x.to(ptr.dtype.element_ty)
    store_rows(ptr, x, m, stride, N, first, D, WIDTH)


@jit
def dqkv_step(
    k0, k1, v0, v1, q_ptr, o_ptr, do_ptr, l_ptr, dq_ptr, q_stride, o_stride, do_stride, dq_stride, m, n, again, offset,
    Nq, Nk, dk0, dk1, dv0, dv1, dq_sum, scale, softmax_scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, Dv: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    HAS_KV_LENS: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """`dkdv_step`, plus dQᵀ = Kᵀ dSᵀ of this block of queries, added to dQ of earlier blocks of keys if `again`.

    SUMS: its sum over queries is added to dq_sum; for D1 = 0.
    """
    q0, q1 = load_tiles(q_ptr, m, q_stride, Nq, D, D0, D1, MASKED)
    do0, do1 = load_tiles(do_ptr, m, do_stride, Nq, Dv, V0, V1, MASKED)
    o0, o1 = load_tiles(o_ptr, m, o_stride, Nq, Dv, V0, V1, MASKED)
    delta = tl.sum(do0.to(tl.float32) * o0.to(tl.float32), 1)  # (5)
    if V1 > 0:
        delta += tl.sum(do1.to(tl.float32) * o1.to(tl.float32), 1)
    if HAS_KV_LENS or MASKED:
        lse = load_lse(l_ptr, m, Nq)
    else:
        lse = tl.load(l_ptr + m)
    p = tl.exp2(dot_transposed(k0, k1, q0, q1, D1, PRECISION) * scale - lse[None, :])  # [BLOCK_N, BLOCK_M], (4)
    p = tl.where((n < Nk)[:, None], p, 0.0)
    if CAUSAL:
        p = tl.where(n[:, None] <= m[None, :] + offset, p, 0.0)
    dv0, dv1 = add_product(p, do0, do1, dv0, dv1, V1, PRECISION)
    ds = (p * (dot_transposed(v0, v1, do0, do1, V1, PRECISION) - delta[None, :])).to(q0.dtype)  # (6)
    dk0, dk1 = add_product(ds, q0, q1, dk0, dk1, D1, PRECISION)
    dq = tl.dot(tl.trans(k0), ds, input_precision=PRECISION) * softmax_scale  # [D0, BLOCK_M]
    if SUMS:
        dq_sum += tl.sum(dq, 1)
    _add_rows(dq_ptr, dq, m, dq_stride, Nq, again, 0, D, D0, MASKED)
    if D1 > 0:
        dq1 = tl.dot(tl.trans(k1), ds, input_precision=PRECISION) * softmax_scale
        _add_rows(dq_ptr, dq1, m, dq_stride, Nq, again, D0, D, D1, MASKED)
    return dk0, dk1, dv0, dv1, dq_sum
