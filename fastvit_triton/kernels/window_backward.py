"""Backward pass of `window_attention`, where the symbols and equations (1) to (4) are defined.

Math      P = exp(S − L)                                    recomputed, never stored                       (5)
          In fp32 P is divided by its sum over keys, which differs from 1 by the rounding of L, 1e-6 at L = 16.
          Δ = Σ_n P ∘ (dO Vᵀ) = Σ_d dO ∘ O                  [N]                                            (6)
          dS = P ∘ (dO Vᵀ − Δ)                                                                             (7)
          dV = Pᵀ dO    dQ = scale · dS K    dK = scale · dSᵀ Q                                            (8)
          dbias = Σ dS over windows    dpad = Σ (0, dK, dV) over padded tokens                             (9)
          Cosine attention, with q̂ = q / ‖q‖:  dq = (dq̂ − q̂ (q̂·dq̂)) / ‖q‖, likewise dk,  dscale = Σ q̂·(dS K̂)   (10)
Kernels   If one tile holds a window, one program computes all gradients of a head in a run of windows, with five matrix
          products, and sums dbias in registers. For larger windows one kernel computes Δ and dQ, one dK and dV, and one
          dbias, with nine products; in fp32 with eleven, as Δ is the first sum of (6): O is rounded. Sums over windows
          are computed in two stages, within programs and then over programs: deterministic, without atomics. Sᵀ and dPᵀ
          are computed directly, so no computed tile is transposed before a product.
Cost      10·B·H·W·N·heads·D flops in one pass, 18 for larger windows, 22 in fp32; bytes = qkv + dO + dqkv, and the
          partial sums.
"""

import torch

from .attention_launch import prepare, prepared, start
from .launch import cdiv
from .layer_norm_backward import sum_programs
from .op import register
from .tile import jit, tl
from .window_inner import (
    arguments_of,
    blocks_of,
    exp_minus,
    load_bias,
    load_lse,
    load_tokens,
    lse_place,
    places,
    readable,
    runs_of,
    scores,
    store_tokens,
    unit,
    unit_grad,
)

WINDOWS = 16  # most windows of a program that sums over windows


@jit(do_not_specialize=["windows", "runs", "tiles"])
def _bwd_kernel(
    qkv_ptr, bias_ptr, scales_ptr, pad_ptr, do_ptr, l_ptr, sums_ptr, delta_ptr, dqkv_ptr, dbias_ptr, dscales_ptr,
    dpad_ptr, qkv_strides, bias_strides, layout, windows, runs, tiles, heads, scale,
    h: tl.constexpr, w: tl.constexpr, N: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    SHIFTED: tl.constexpr, PADDED: tl.constexpr, PAD_FIRST: tl.constexpr, COSINE: tl.constexpr,
    PRECISION: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N keys of one head, in every n-th window, for n runs. Loops over queries.

    Writes dK and dV; if one tile holds a window also dQ, dbias and dscale. Equations (5) to (10).
    """
    head, tile, run = tl.program_id(0) % heads, tl.program_id(0) // heads % tiles, tl.program_id(0) // heads // tiles
    ONE: tl.constexpr = N <= BLOCK_M and N <= BLOCK_N
    C, H, W, d = heads * D, layout[0], layout[1], tl.arange(0, WIDTH)[None, :]
    n = tl.arange(0, BLOCK_N)
    if N > BLOCK_N:
        n += tile * BLOCK_N
    k_pad, v_pad = pad_ptr, pad_ptr
    if pad_ptr is not None:
        k_pad, v_pad = pad_ptr + C + head * D, pad_ptr + 2 * C + head * D
    if COSINE:
        scale = tl.load(scales_ptr + head).to(tl.float32)
    if ONE:  # stays in registers
        bias = load_bias(bias_ptr, bias_strides, head, tl.arange(0, BLOCK_M)[None, :], n[:, None], N)
    dbias = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    dscale = tl.zeros([BLOCK_M], tl.float32)
    dk_pad, dv_pad = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    for window in tl.range(run, windows, runs, disable_licm=True):  # hoisted addresses would spill registers
        b, y, x, real = places(n, window, layout, h, w, SHIFTED, PADDED, PAD_FIRST)
        q_ptr = qkv_ptr + b * qkv_strides[0] * UNIT + head * D
        at, padded = (y * qkv_strides[1] + x * qkv_strides[2]) * UNIT, (n < N) & ~real
        k = load_tokens(q_ptr + C, k_pad, at[:, None], real[:, None], padded[:, None], d, D, WIDTH)  # [BLOCK_N, WIDTH]
        v = load_tokens(q_ptr + 2 * C, v_pad, at[:, None], real[:, None], padded[:, None], d, D, WIDTH)
        if COSINE:
            k, k_norm = unit(k, 1)
        dk = tl.zeros([BLOCK_N, WIDTH], tl.float32)
        dv = tl.zeros([BLOCK_N, WIDTH], tl.float32)
        for first in tl.range(0, N, BLOCK_M, disable_licm=True):
            m = first + tl.arange(0, BLOCK_M)
            _, m_y, m_x, m_real = places(m, window, layout, h, w, SHIFTED, PADDED, PAD_FIRST)
            m_at = ((m_y * qkv_strides[1] + m_x * qkv_strides[2]) * UNIT)[:, None]
            token = (b * H + m_y) * W + m_x
            l_at = lse_place(b, head, m_y, m_x, heads, H, W, bias_ptr)
            q = load_tokens(q_ptr, None, m_at, m_real[:, None], None, d, D, WIDTH)  # [BLOCK_M, WIDTH]
            do = load_tokens(do_ptr + head * D, None, (token * C)[:, None], m_real[:, None], None, d, D, WIDTH)
            if COSINE:
                q, q_norm = unit(q, 1)
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
            if not ONE:
                bias = load_bias(bias_ptr, bias_strides, head, m[None, :], n[:, None], N)
            s = scores(s, scale, bias, m[None, :], n[:, None], window, layout, h, w, SHIFTED)
            lse, log_sum = load_lse(l_ptr, l_at, m_real, H, W, bias_ptr)
            p = exp_minus(s - lse[None, :], log_sum[None, :])  # (5)
            if PRECISION == "ieee":
                if ONE:
                    total = tl.sum(p, 0)
                    p /= tl.where(total == 0, 1.0, total)[None, :]
                else:
                    p /= tl.load(sums_ptr + l_at, mask=m_real, other=1.0)[None, :]
            dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
            if ONE:
                delta = tl.sum(p * dp, 0)  # (6)
            else:
                delta = tl.load(delta_ptr + l_at, mask=m_real, other=0.0)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
            ds = p * (dp - delta[None, :])  # (7)
            half = ds.to(q.dtype)
            dk = tl.dot(half, q, dk, input_precision=PRECISION)
            if ONE:
                if dbias_ptr is not None:
                    dbias += ds
                kt = load_tokens(
                    q_ptr + C,
                    k_pad,
                    at[None, :],
                    real[None, :],
                    padded[None, :],
                    tl.arange(0, WIDTH)[:, None],
                    D,
                    WIDTH,
                )  # [WIDTH, BLOCK_N]
                if COSINE:
                    kt, _ = unit(kt, 0)
                    dq = tl.trans(tl.dot(kt, half, input_precision=PRECISION))
                    dq, along = unit_grad(dq, q, q_norm)  # (10)
                    dscale += along
                    dq = (dq * scale).to(dqkv_ptr.dtype.element_ty)
                else:  # rounded before it is transposed: half the shared memory traffic
                    dq = tl.dot(kt, half, input_precision=PRECISION) * scale
                    dq = tl.trans(dq.to(dqkv_ptr.dtype.element_ty))
                store_tokens(dqkv_ptr + head * D, dq, token * (3 * C), m_real, D, WIDTH)
        if COSINE:
            dk, _ = unit_grad(dk, k, k_norm)
        dk *= scale
        token = ((b * H + y) * W + x) * (3 * C)
        store_tokens(dqkv_ptr + C + head * D, dk, token, real, D, WIDTH)
        store_tokens(dqkv_ptr + 2 * C + head * D, dv, token, real, D, WIDTH)
        if dpad_ptr is not None:
            dk_pad += tl.sum(tl.where(padded[:, None], dk, 0.0), 0)
            dv_pad += tl.sum(tl.where(padded[:, None], dv, 0.0), 0)
    program, c = run.to(tl.int64) * tiles + tile, tl.arange(0, WIDTH)
    if dpad_ptr is not None:
        dpad_ptr += program * 2 * C + head * D
        tl.store(dpad_ptr + c, dk_pad, mask=c < D)
        tl.store(dpad_ptr + C + c, dv_pad, mask=c < D)
    if ONE:
        if COSINE:
            tl.store(dscales_ptr + program * heads + head, tl.sum(dscale, 0))
        if dbias_ptr is not None:
            m, n = tl.arange(0, BLOCK_M)[None, :], n[:, None]
            at = (program * heads + head) * (N * N) + m.to(tl.int64) * N + n
            tl.store(dbias_ptr + at, dbias, mask=(m < N) & (n < N))


@jit
def _block(
    q, do, lse, log_sum, q_ptr, k_pad, v_pad, bias_ptr, qkv_strides, bias_strides, head, m, first, window, layout,
    scale,
    h: tl.constexpr, w: tl.constexpr, N: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, C,
    SHIFTED: tl.constexpr, PADDED: tl.constexpr, PAD_FIRST: tl.constexpr, COSINE: tl.constexpr,
    PRECISION: tl.constexpr, UNIT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(K of the block of keys from `first` on, P, dO Vᵀ) for queries m. Equation (5)."""
    n, d = first + tl.arange(0, BLOCK_N), tl.arange(0, WIDTH)[None, :]
    _, y, x, real = places(n, window, layout, h, w, SHIFTED, PADDED, PAD_FIRST)
    at = ((y * qkv_strides[1] + x * qkv_strides[2]) * UNIT)[:, None]
    padded = ((n < N) & ~real)[:, None]
    k = load_tokens(q_ptr + C, k_pad, at, real[:, None], padded, d, D, WIDTH)
    v = load_tokens(q_ptr + 2 * C, v_pad, at, real[:, None], padded, d, D, WIDTH)
    if COSINE:
        k, _ = unit(k, 1)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [queries, BLOCK_N]
    bias = load_bias(bias_ptr, bias_strides, head, m[:, None], n[None, :], N)
    s = scores(s, scale, bias, m[:, None], n[None, :], window, layout, h, w, SHIFTED)
    return k, exp_minus(s - lse[:, None], log_sum[:, None]), tl.dot(do, tl.trans(v), input_precision=PRECISION)


@jit(do_not_specialize=["tiles"])
def _bwd_dq_kernel(
    qkv_ptr, bias_ptr, scales_ptr, pad_ptr, do_ptr, o_ptr, l_ptr, sums_ptr, delta_ptr, dqkv_ptr, dscales_ptr,
    qkv_strides, bias_strides, layout, tiles, heads, scale,
    h: tl.constexpr, w: tl.constexpr, N: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    SHIFTED: tl.constexpr, PADDED: tl.constexpr, PAD_FIRST: tl.constexpr, COSINE: tl.constexpr,
    PRECISION: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head in one window. Loops over keys; writes Δ, dQ and a term of dscale."""
    head, tile, window = tl.program_id(0) % heads, tl.program_id(0) // heads % tiles, tl.program_id(0) // heads // tiles
    C, H, W, d = heads * D, layout[0], layout[1], tl.arange(0, WIDTH)[None, :]
    m = tl.arange(0, BLOCK_M)
    if N > BLOCK_M:
        m += tile * BLOCK_M
    k_pad, v_pad = pad_ptr, pad_ptr
    if pad_ptr is not None:
        k_pad, v_pad = pad_ptr + C + head * D, pad_ptr + 2 * C + head * D
    if COSINE:
        scale = tl.load(scales_ptr + head).to(tl.float32)
    b, y, x, real = places(m, window, layout, h, w, SHIFTED, PADDED, PAD_FIRST)
    q_ptr = qkv_ptr + b * qkv_strides[0] * UNIT + head * D
    at, token = (y * qkv_strides[1] + x * qkv_strides[2]) * UNIT, ((b * H + y) * W + x) * C
    q = load_tokens(q_ptr, None, at[:, None], real[:, None], None, d, D, WIDTH)  # [BLOCK_M, WIDTH]
    do = load_tokens(do_ptr + head * D, None, token[:, None], real[:, None], None, d, D, WIDTH)
    l_at = lse_place(b, head, y, x, heads, H, W, bias_ptr)
    lse, log_sum = load_lse(l_ptr, l_at, real, H, W, bias_ptr)
    if COSINE:
        q, q_norm = unit(q, 1)
    if PRECISION == "ieee":  # two passes: the errors of L and O, in all dS of a row, would exceed those of PyTorch
        total, delta = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
        for first in tl.range(0, N, BLOCK_N, disable_licm=True):
            _, p, dp = _block(
                q, do, lse, log_sum, q_ptr, k_pad, v_pad, bias_ptr, qkv_strides, bias_strides, head, m, first,
                window, layout, scale,
                h, w, N, D, WIDTH, C, SHIFTED, PADDED, PAD_FIRST, COSINE, PRECISION, UNIT, BLOCK_N,
            )  # fmt: skip
            total += tl.sum(p, 1)
            delta += tl.sum(p * dp, 1)
        total = tl.where(total == 0, 1.0, total)
        delta /= total
        tl.store(sums_ptr + l_at, total, mask=real)
    else:
        o = load_tokens(o_ptr + head * D, None, token[:, None], real[:, None], None, d, D, WIDTH)
        delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)  # (6)
    tl.store(delta_ptr + l_at, delta, mask=real)
    dq = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    for first in tl.range(0, N, BLOCK_N, disable_licm=True):
        k, p, dp = _block(
            q, do, lse, log_sum, q_ptr, k_pad, v_pad, bias_ptr, qkv_strides, bias_strides, head, m, first,
            window, layout, scale, h, w, N, D, WIDTH, C, SHIFTED, PADDED, PAD_FIRST, COSINE, PRECISION, UNIT, BLOCK_N,
        )  # fmt: skip
        ds = p * (dp - delta[:, None])  # (7)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    if PRECISION == "ieee":
        dq /= total[:, None]
    if COSINE:
        dq, along = unit_grad(dq, q, q_norm)
        program = window.to(tl.int64) * tiles + tile
        tl.store(dscales_ptr + program * heads + head, tl.sum(along, 0))
    store_tokens(dqkv_ptr + head * D, dq * scale, 3 * token, real, D, WIDTH)


@jit(do_not_specialize=["windows", "runs", "tiles_m", "tiles_n"])
def _bwd_dbias_kernel(
    qkv_ptr, bias_ptr, scales_ptr, pad_ptr, do_ptr, l_ptr, sums_ptr, delta_ptr, dbias_ptr,
    qkv_strides, bias_strides, layout, windows, runs, tiles_m, tiles_n, heads, scale,
    h: tl.constexpr, w: tl.constexpr, N: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    SHIFTED: tl.constexpr, PADDED: tl.constexpr, PAD_FIRST: tl.constexpr, COSINE: tl.constexpr,
    PRECISION: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: one tile of the bias of one head. Sums dS over every n-th window, for n runs. Equation (9)."""
    pid = tl.program_id(0)
    head, run = pid % heads, pid // heads // tiles_m // tiles_n
    m = pid // heads % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = pid // heads // tiles_m % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    C, H, W, d = heads * D, layout[0], layout[1], tl.arange(0, WIDTH)[None, :]
    k_pad, v_pad = pad_ptr, pad_ptr
    if pad_ptr is not None:
        k_pad, v_pad = pad_ptr + C + head * D, pad_ptr + 2 * C + head * D
    if COSINE:
        scale = tl.load(scales_ptr + head).to(tl.float32)
    bias = load_bias(bias_ptr, bias_strides, head, m[:, None], n[None, :], N)
    dbias = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for window in tl.range(run, windows, runs, disable_licm=True):  # hoisted addresses would spill registers
        b, y, x, real = places(m, window, layout, h, w, SHIFTED, PADDED, PAD_FIRST)
        _, n_y, n_x, n_real = places(n, window, layout, h, w, SHIFTED, PADDED, PAD_FIRST)
        q_ptr = qkv_ptr + b * qkv_strides[0] * UNIT + head * D
        at, token = (y * qkv_strides[1] + x * qkv_strides[2]) * UNIT, ((b * H + y) * W + x) * C
        n_at = ((n_y * qkv_strides[1] + n_x * qkv_strides[2]) * UNIT)[:, None]
        padded = ((n < N) & ~n_real)[:, None]
        q = load_tokens(q_ptr, None, at[:, None], real[:, None], None, d, D, WIDTH)
        k = load_tokens(q_ptr + C, k_pad, n_at, n_real[:, None], padded, d, D, WIDTH)
        v = load_tokens(q_ptr + 2 * C, v_pad, n_at, n_real[:, None], padded, d, D, WIDTH)
        do = load_tokens(do_ptr + head * D, None, token[:, None], real[:, None], None, d, D, WIDTH)
        l_at = lse_place(b, head, y, x, heads, H, W, bias_ptr)
        if COSINE:
            q, _ = unit(q, 1)
            k, _ = unit(k, 1)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        s = scores(s, scale, bias, m[:, None], n[None, :], window, layout, h, w, SHIFTED)
        lse, log_sum = load_lse(l_ptr, l_at, real, H, W, bias_ptr)
        p = exp_minus(s - lse[:, None], log_sum[:, None])
        if PRECISION == "ieee":
            p /= tl.load(sums_ptr + l_at, mask=real, other=1.0)[:, None]
        delta = tl.load(delta_ptr + l_at, mask=real, other=0.0)
        dbias += p * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])
    at = dbias_ptr + ((run.to(tl.int64) * heads + head) * N + m)[:, None] * N + n[None, :]
    tl.store(at, dbias, mask=(m < N)[:, None] & (n < N)[None, :])


def _bwd(do, qkv, bias, scales, pad, heads, window_size, shift_size, scale, pad_first, o, lse, learn_bias, learn_pad):
    """(dqkv, dbias, dscales, dpad); those that are not needed are empty."""
    settings = int(heads), tuple(window_size), tuple(shift_size), scale, pad_first
    outputs = _bwd_fake(do, qkv, bias, scales, pad, *settings, o, lse, learn_bias, learn_pad)
    if not qkv.numel():
        return tuple(t.zero_() for t in outputs)
    do, (qkv, bias) = do.contiguous(), readable(qkv, bias, window_size)
    tensors = dict(qkv=qkv, bias=bias, scales=scales, pad=pad, do=do, o=o, l=lse, dqkv=outputs[0])
    partial = dict.fromkeys(("sums", "delta", "dbias", "dscales", "dpad"))
    for prepared_launch, shapes in prepared(_prepare, tensors, *settings, learn_bias, learn_pad):
        partial |= {name: torch.empty(shape, dtype=torch.float32, device=qkv.device) for name, shape in shapes.items()}
        start(prepared_launch, tensors | partial)
    outputs[3].zero_()  # dpad of queries
    for name, total in zip(("dbias", "dscales", "dpad"), outputs[1:], strict=True):
        if partial[name] is not None:
            total.view(-1)[-partial[name][0].numel() :].copy_(sum_programs(partial[name], total.dtype).view(-1))
    return outputs


def _prepare(tensors, *settings):
    """Launches of the backward pass, each with the shapes of what it makes for later launches and sums, by name."""
    *settings, learn_bias, learn_pad = settings
    arguments = arguments_of(tensors, *settings)
    qkv = tensors["qkv"]
    L = tensors["l"]
    windows, heads, N, D = (arguments[name] for name in ("windows", "heads", "N", "D"))
    blocks = blocks_of("bwd", qkv, arguments)
    launches = []
    one_tile = N <= min(blocks["BLOCK_M"], blocks["BLOCK_N"])
    tiles = cdiv(N, blocks["BLOCK_N"])
    runs = runs_of(windows, heads * tiles, WINDOWS if one_tile else 1)
    shapes = dict(dpad=(runs * tiles, 2, heads * D)) if learn_pad else {}
    if one_tile:
        shapes |= dict(dbias=(runs, heads, N, N)) if learn_bias else {}
        shapes |= dict(dscales=(runs, heads)) if arguments["COSINE"] else {}
    else:
        dq_blocks = blocks_of("bwd_dq", qkv, arguments)
        rows = windows * cdiv(N, dq_blocks["BLOCK_M"])
        dq_shapes = dict(delta=L.shape) | (dict(sums=L.shape) if arguments["PRECISION"] == "ieee" else {})
        dq_shapes |= dict(dscales=(rows, heads)) if arguments["COSINE"] else {}
        launches += [(prepare(_bwd_dq_kernel, heads * rows, dq_blocks, **arguments, tiles=rows // windows), dq_shapes)]
    launches += [(prepare(_bwd_kernel, heads * tiles * runs, blocks, **arguments, tiles=tiles, runs=runs), shapes)]
    if learn_bias and not one_tile:
        blocks = blocks_of("bwd_dbias", qkv, arguments)
        sizes = dict(tiles_m=cdiv(N, blocks["BLOCK_M"]), tiles_n=cdiv(N, blocks["BLOCK_N"]))
        programs = heads * sizes["tiles_m"] * sizes["tiles_n"]
        runs = runs_of(windows, programs, WINDOWS)
        one_more = prepare(_bwd_dbias_kernel, programs * runs, blocks, **arguments, **sizes, runs=runs)
        launches += [(one_more, dict(dbias=(runs, heads, N, N)))]
    return launches


def _bwd_fake(do, qkv, bias, scales, pad, heads, window, shift, scale, pad_first, o, lse, learn_bias, learn_pad):
    needed = bias if learn_bias else None, scales, pad if learn_pad else None
    sums = (qkv.new_empty(0) if t is None else t.new_empty(t.shape, dtype=t.dtype) for t in needed)
    return qkv.new_empty(qkv.shape), *sums


ARGUMENTS = (
    "Tensor qkv, Tensor? bias, Tensor? scales, Tensor? pad, SymInt heads, int[2] window_size, int[2] shift_size, "
    "float scale, bool pad_first"
)
bwd_op = register(
    "window_attention_bwd",
    f"(Tensor do, {ARGUMENTS}, Tensor o, Tensor lse, bool learn_bias, bool learn_pad) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _bwd,
    _bwd_fake,
)
