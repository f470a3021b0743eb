"""Backward pass of `layer_norm` and of matmuls after a LayerNorm; equations (1) to (3) are those of `layer_norm`.

Math      g = dy·γ,  t = (g − mean(g) − x̂·mean(g·x̂)) / √(σ² + ε) + ds                     (4)
          dresidual = t    dx = sample_scale·layer_scale·t
          dlayer_scale = Σ_rows sample_scale·x·t                                           (5)
          dγ = Σ_rows dy·x̂    dβ = Σ_rows dy                                               (6)
          sample_scale is a random mask and gets no gradient.
Kernels   Sums over rows are computed in two stages, in fp32 within programs and then over programs: deterministic.
"""

import torch
from torch import Tensor

from .launch import cdiv, launch, whole_row_blocks
from .op import register
from .tile import jit, tl

PROGRAMS = 512  # maximum in the backward pass; the same on all GPUs, so that sums (5) and (6) have the same bits


@jit(do_not_specialize=["M", "rows_per_image"])
def _bwd_kernel(
    dy_ptr, dsum_ptr, s_ptr, x_ptr, layer_scale_ptr, scale_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr,
    dx_ptr, dresidual_ptr, normed_ptr, partial_ptr,
    M, rows_per_image, D: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_LAYER_SCALE: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_WEIGHT: tl.constexpr, RMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: every n-th block of rows, for n programs, and their terms of the sums. Equations (4) to (6).

    Also stores the recomputed LN(s) of equation (2) if normed_ptr is not None. RMS: RMSNorm, without mean(g) in (4).
    """
    program = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    in_d = d < D
    weight = tl.full([BLOCK_D], 1.0, tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + d, mask=in_d, other=0.0).to(tl.float32)
    layer_scale = tl.full([BLOCK_D], 1.0, tl.float32)
    if HAS_LAYER_SCALE:
        layer_scale = tl.load(layer_scale_ptr + d, mask=in_d, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK_D], tl.float32)
    dbias = tl.zeros([BLOCK_D], tl.float32)
    dlayer_scale = tl.zeros([BLOCK_D], tl.float32)
    for first in range(program * BLOCK_M, M, tl.num_programs(0) * BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        in_m = m < M
        inside = in_m[:, None] & in_d[None, :]
        at = m[:, None] * D + d[None, :]
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_D]
        s = tl.load(s_ptr + at, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + m, mask=in_m, other=0.0)
        rstd = tl.load(rstd_ptr + m, mask=in_m, other=0.0)
        normed = tl.where(inside, (s - mean[:, None]) * rstd[:, None], 0.0)
        g = dy * weight[None, :]
        t = g
        if not RMS:
            t -= (tl.sum(g, 1) / D)[:, None]
        t -= normed * (tl.sum(g * normed, 1) / D)[:, None]
        t = t * rstd[:, None]
        dweight += tl.sum(dy * normed, 0)
        dbias += tl.sum(dy, 0)
        if normed_ptr is not None:
            normed *= weight[None, :]
            if bias_ptr is not None:
                normed += tl.load(bias_ptr + d, mask=in_d, other=0.0).to(tl.float32)[None, :]
            tl.store(normed_ptr + at, normed.to(normed_ptr.dtype.element_ty), mask=inside)
        if HAS_RESIDUAL:
            t += tl.load(dsum_ptr + at, mask=inside, other=0.0).to(tl.float32)
            if dresidual_ptr is not None:
                tl.store(dresidual_ptr + at, t.to(dresidual_ptr.dtype.element_ty), mask=inside)
            if HAS_SCALE:
                t *= tl.load(scale_ptr + m // rows_per_image, mask=in_m, other=0.0).to(tl.float32)[:, None]
            if HAS_LAYER_SCALE:
                x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
                dlayer_scale += tl.sum(tl.where(inside, t * x, 0.0), 0)
                t *= layer_scale[None, :]
        if dx_ptr is not None:
            tl.store(dx_ptr + at, t.to(dx_ptr.dtype.element_ty), mask=inside)
    at = partial_ptr + program * (3 if HAS_LAYER_SCALE else 2) * D + d
    tl.store(at, dweight, mask=in_d)
    tl.store(at + D, dbias, mask=in_d)
    if HAS_LAYER_SCALE:
        tl.store(at + 2 * D, dlayer_scale, mask=in_d)


@jit(do_not_specialize=["programs"])
def _sum_kernel(partial_ptr, sum_ptr, programs, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    """One program: BLOCK_N columns of partial sums [programs, N], summed over programs."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, programs, BLOCK_P):
        p = first + tl.arange(0, BLOCK_P)
        inside = (p < programs)[:, None] & (n < N)[None, :]
        at = partial_ptr + p.to(tl.int64)[:, None] * N + n[None, :]
        total += tl.sum(tl.load(at, mask=inside, other=0.0), 0)
    tl.store(sum_ptr + n, total.to(sum_ptr.dtype.element_ty), mask=n < N)


def sum_programs(partial: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Sums partial results [programs, ...] in fp32 over programs, in one launch that also rounds to `dtype`: [...]."""
    sums = partial.new_empty(partial.shape[1:], dtype=dtype)
    programs = partial.shape[0]
    N = sums.numel()
    if N:
        fixed = dict(BLOCK_P=128, BLOCK_N=16, num_warps=4, enable_fp_fusion=True)
        launch(_sum_kernel, (cdiv(N, 16),), partial, sums, programs, N, **fixed)
    return sums


def grads_dtype(*parameters: Tensor | None) -> torch.dtype:
    """Dtype for the sums that become gradients of these parameters: their common dtype, else fp32."""
    return common_dtype(*(None if t is None else t.dtype for t in parameters))


def common_dtype(*dtypes: torch.dtype | None) -> torch.dtype:
    """The dtype if all of these but None are one, else fp32."""
    found = {dtype for dtype in dtypes if dtype is not None}
    return found.pop() if len(found) == 1 else torch.float32


def row_blocks(D: int) -> dict[str, int]:
    """Launch parameters of kernels whose programs hold whole rows of D values."""
    rows, block, options = whole_row_blocks(D)
    return dict(BLOCK_M=rows, BLOCK_D=block, num_stages=1, **options)


def _bwd(dy, dsum, s, x, weight, layer_scale, sample_scale, mean, rstd, dx_dtype, sums_dtype, rms):
    """(dx, dresidual, sums [3, D] of dweight, dbias, dlayer_scale); dresidual is empty without `dsum`."""
    dx, dresidual, sums = _bwd_fake(
        dy, dsum, s, x, weight, layer_scale, sample_scale, mean, rstd, dx_dtype, sums_dtype, rms
    )
    dy = dy.contiguous()
    s = s.contiguous()
    dsum, x = (None if t is None else t.contiguous() for t in (dsum, x))
    M = mean.numel()
    D = s.shape[-1]
    blocks = row_blocks(s.shape[-1])
    if not M:
        return dx, dresidual, sums.zero_()
    programs = torch.sym_min(PROGRAMS, cdiv(M, blocks["BLOCK_M"]))
    partial = sums.new_empty(programs, *sums.shape, dtype=torch.float32)
    launch(
        _bwd_kernel, (programs,),
        dy, dsum, s, x, layer_scale, sample_scale, weight, None, mean, rstd,
        dx, None if dsum is None else dresidual, None, partial, M, cdiv(M, s.shape[0]),
        D=D, HAS_RESIDUAL=dsum is not None, HAS_LAYER_SCALE=layer_scale is not None, HAS_SCALE=sample_scale is not None,
        HAS_WEIGHT=weight is not None, RMS=rms, **blocks,
    )  # fmt: skip
    return dx, dresidual, sum_programs(partial, sums_dtype)


def _bwd_fake(dy, dsum, s, x, weight, layer_scale, sample_scale, mean, rstd, dx_dtype, sums_dtype, rms):
    dresidual = s.new_empty(0 if dsum is None else s.shape)
    sums = s.new_empty(2 if layer_scale is None else 3, s.shape[-1], dtype=sums_dtype)
    return s.new_empty(s.shape, dtype=dx_dtype), dresidual, sums


def input_grads(
    dy: Tensor,
    x: Tensor,
    norm: tuple[Tensor, Tensor, Tensor | None, Tensor | None, str],
    dsum: Tensor | None,
    need_x: bool,
    dtype: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Equations (4) and (6) in one launch and a sum; also recomputes LN(x), so that it need not be saved.

    Args:
        dy: [M, D], gradient of LN(x).
        x: [M, D].
        norm: mean [M], rstd [M], weight [D] or None, bias [D] or None, and "layer_norm" or "rms_norm".
        dsum: [M, D], another gradient of x to add, or None.
        need_x: dx is needed.
        dtype: of LN(x); None if it is not needed.

    Returns:
        (dx [M, D] or None, LN(x) [M, D] or None, dweight and dbias [2, D] in their dtype).
    """
    dy = dy.contiguous()
    x = x.contiguous()
    dsum = None if dsum is None else dsum.contiguous()
    (M, D), blocks, (mean, rstd, weight, bias, kind) = x.shape, row_blocks(x.shape[1]), norm
    blocks["num_warps"] *= 2 if blocks["BLOCK_M"] == 1 else 1  # LN(x) is in registers, too
    dx = torch.empty_like(x) if need_x else None
    normed = None if dtype is None else torch.empty_like(x, dtype=dtype)
    programs = torch.sym_min(PROGRAMS, cdiv(M, blocks["BLOCK_M"]))
    partial = torch.empty(programs, 2, D, dtype=torch.float32, device=x.device)
    if M:
        launch(
            _bwd_kernel, (programs,),
            dy, dsum, x, None, None, None, weight, bias, mean, rstd, dx, None, normed, partial, M, 1,
            D=D, HAS_RESIDUAL=dsum is not None, HAS_LAYER_SCALE=False, HAS_SCALE=False, HAS_WEIGHT=weight is not None,
            RMS=kind == "rms_norm", **blocks,
        )  # fmt: skip
    return dx, normed, sum_programs(partial, grads_dtype(weight, bias))


bwd_op = register(
    "layer_norm_bwd",
    "(Tensor dy, Tensor? dsum, Tensor s, Tensor? x, Tensor? weight, Tensor? layer_scale, Tensor? sample_scale, "
    "Tensor mean, Tensor rstd, ScalarType dx_dtype, ScalarType sums_dtype, bool rms) -> (Tensor, Tensor, Tensor)",
    _bwd,
    _bwd_fake,
)
