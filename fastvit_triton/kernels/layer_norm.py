"""LayerNorm, alone or after a residual addition.

Math      μ = mean(x)    σ² = mean((x − μ)²)    x̂ = (x − μ) / √(σ² + ε)                  (1)
          y = γ·x̂ + β                                                                     (2)
          s = residual + sample_scale·layer_scale·x,  y = LN(s)        for add_layer_norm  (3)
Backward  g = dy·γ,  t = (g − mean(g) − x̂·mean(g·x̂)) / √(σ² + ε) + ds                     (4)
          dresidual = t    dx = sample_scale·layer_scale·t
          dlayer_scale = Σ_rows sample_scale·x·t                                           (5)
          dγ = Σ_rows dy·x̂    dβ = Σ_rows dy                                               (6)
          sample_scale is a random mask and gets no gradient.
Kernels   The sums over rows are taken in two stages, in fp32 within programs and then over them: same bits every run.
Cost      forward 8·M·D flops; bytes = x + y (+ residual + s). Backward reads dy, ds, s, x and writes dx, dresidual.
Saved     s (or x), and x if there is a layer_scale, in storage dtype; μ and 1/√(σ² + ε) in fp32.
Sources   Ba et al., Layer normalization, arXiv:1607.06450, eq. 4; LayerScale: Touvron et al., CaiT, arXiv:2103.17239,
          eq. 6; stochastic depth: Huang et al., arXiv:1603.09382.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .argument import expect_addable, expect_norm, expect_rows, expect_scales, is_autocast_on
from .backend import kernels_available
from .launch import cdiv, launch, whole_row_blocks
from .op import Op, make_randn, once_differentiable, register
from .tile import jit, tl

PROGRAMS = 512  # of the backward pass, at most; independent of the GPU, so that sums (5) and (6) have the same bits
MAX_D = 16384  # a program holds whole rows in registers


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm over the last axis, equations (1) and (2).

    Args:
        x: [..., D].
        weight: γ [D], or None.
        bias: β [D], or None.
        eps: ε, added to the variance.

    Returns:
        [..., D].

    Raises:
        ValueError: a size or device does not fit, or eps is negative or not finite.
        TypeError: an argument is of another type or dtype.
    """
    expect_rows("x", x, "D")
    expect_norm(x, x.dtype, (weight, bias, eps), D=x.shape[-1])
    if kernels_available(x) and x.shape[-1] <= MAX_D:
        return _Fn.apply(x, None, weight, bias, eps, None, None)[1]
    return reference(x, weight, bias, eps)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    layer_scale: Tensor | None = None,
    sample_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Adds a residual branch and normalises the sum: equation (3).

    Args:
        x: [B, ..., D], the branch.
        residual: [B, ..., D], the stream that the branch is added to.
        weight: γ [D], or None.
        bias: β [D], or None.
        eps: ε, added to the variance.
        layer_scale: [D], LayerScale of the branch.
        sample_scale: [B], drop-path factor of each image: 0 or 1 / (1 − p).

    Returns:
        (s, LN(s)), both [B, ..., D].

    Raises:
        ValueError: a size or device does not fit, or eps is negative or not finite.
        TypeError: an argument is of another type or dtype.
    """
    expect_rows("x", x, "D")
    expect_addable("residual", residual, x, x.shape)
    expect_scales(x, layer_scale, sample_scale, D=x.shape[-1])
    dtype = torch.promote_types(x.dtype, residual.dtype)
    dtype = dtype if layer_scale is None else torch.promote_types(dtype, layer_scale.dtype)
    expect_norm(x, dtype, (weight, bias, eps), D=x.shape[-1])
    if kernels_available(x) and kernels_available(residual) and x.shape[-1] <= MAX_D:
        return _Fn.apply(x, residual, weight, bias, eps, layer_scale, sample_scale)
    return reference_add(x, residual, weight, bias, eps, layer_scale, sample_scale)


def reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Equations (1) and (2)."""
    if all(p is None or p.dtype == x.dtype for p in (weight, bias)) or is_autocast_on(x):
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    weight, bias = (None if p is None else p.float() for p in (weight, bias))  # float32 parameters for a 16-bit x
    return F.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)


def reference_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    layer_scale: Tensor | None = None,
    sample_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Equation (3)."""
    s = residual + scaled(x, layer_scale, sample_scale)
    return s, reference(s, weight, bias, eps)


def scaled(x: Tensor, layer_scale: Tensor | None, sample_scale: Tensor | None) -> Tensor:
    """sample_scale · layer_scale · x for x [B, ..., D], as at the end of a residual branch."""
    if layer_scale is not None:
        x = x * layer_scale
    if sample_scale is not None:
        x = x * sample_scale.detach().to(x.dtype).view(-1, *[1] * (x.dim() - 1))
    return x


@torch.no_grad()
def row_stats(y: Tensor) -> Tensor:
    """Row statistics [M, 1, 2] fp32 of y [..., F]: sum and centred sum of squares of each row."""
    rows = y.reshape(-1, y.shape[-1]).float()
    m2 = (rows - rows.mean(-1, keepdim=True)).square().sum(-1)
    return torch.stack((rows.sum(-1), m2), -1)[:, None]


@jit(do_not_specialize=["M"])
def _stats_kernel(x_ptr, mean_ptr, rstd_ptr, M, eps, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """One program: BLOCK_M rows. Stores μ and 1/√(σ² + ε)."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    inside = (m < M)[:, None] & (k < K)[None, :]
    x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=inside, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_K]
    mean = tl.sum(x, 1) / K
    centred = tl.where(inside, x - mean[:, None], 0.0)
    tl.store(mean_ptr + m, mean, mask=m < M)
    tl.store(rstd_ptr + m, 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / K + eps), mask=m < M)


@jit
def merge_stats(
    stats_ptr, m, in_m, eps, K: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr, BLOCK_T: tl.constexpr
):  # fmt: skip
    """μ and 1/√(σ² + ε) of rows m, from statistics of TILES tiles of WIDTH columns (Chan et al., 1979)."""
    t = tl.arange(0, BLOCK_T)
    inside = in_m[:, None] & (t < TILES)[None, :]
    at = stats_ptr + (m[:, None] * TILES + t[None, :]) * 2
    row_sum = tl.load(at, mask=inside, other=0.0)  # [BLOCK_M, BLOCK_T]
    m2 = tl.load(at + 1, mask=inside, other=0.0)
    count = tl.minimum(WIDTH, K - t * WIDTH).to(tl.float32)[None, :]
    mean = tl.sum(row_sum, 1) / K
    between = row_sum / count - mean[:, None]
    m2 += tl.where(inside, count * between * between, 0.0)
    return mean, 1.0 / tl.sqrt(tl.sum(m2, 1) / K + eps)


@jit(do_not_specialize=["M", "rows_per_image"])
def _fwd_kernel(
    x_ptr, residual_ptr, layer_scale_ptr, scale_ptr, weight_ptr, bias_ptr, sum_ptr, y_ptr, mean_ptr, rstd_ptr,
    M, rows_per_image, eps, D: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_LAYER_SCALE: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M whole rows. Equations (1) to (3)."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_m, in_d = m < M, d < D
    inside = in_m[:, None] & in_d[None, :]
    at = m[:, None] * D + d[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_D]
    if HAS_RESIDUAL:
        if HAS_LAYER_SCALE:
            x *= tl.load(layer_scale_ptr + d, mask=in_d, other=0.0).to(tl.float32)[None, :]
        if HAS_SCALE:
            x *= tl.load(scale_ptr + m // rows_per_image, mask=in_m, other=0.0).to(tl.float32)[:, None]
        x += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, rounded, mask=inside)
        x = rounded.to(tl.float32)  # LN reads the rounded sum, as in PyTorch
    mean = tl.sum(x, 1) / D  # [BLOCK_M]
    centred = tl.where(inside, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / D + eps)
    y = centred * rstd[:, None]
    if HAS_WEIGHT:
        y *= tl.load(weight_ptr + d, mask=in_d, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + d, mask=in_d, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(mean_ptr + m, mean, mask=in_m)
    tl.store(rstd_ptr + m, rstd, mask=in_m)


@jit(do_not_specialize=["M", "rows_per_image"])
def _bwd_kernel(
    dy_ptr, dsum_ptr, s_ptr, x_ptr, layer_scale_ptr, scale_ptr, weight_ptr, mean_ptr, rstd_ptr,
    dx_ptr, dresidual_ptr, partial_ptr,
    M, rows_per_image, D: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_LAYER_SCALE: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: every n-th block of rows, for n programs, and their terms of the sums. Equations (4) to (6)."""
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
        t = g - (tl.sum(g, 1) / D)[:, None] - normed * (tl.sum(g * normed, 1) / D)[:, None]
        t = t * rstd[:, None]
        dweight += tl.sum(dy * normed, 0)
        dbias += tl.sum(dy, 0)
        if HAS_RESIDUAL:
            t += tl.load(dsum_ptr + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(dresidual_ptr + at, t.to(dresidual_ptr.dtype.element_ty), mask=inside)
            if HAS_SCALE:
                t *= tl.load(scale_ptr + m // rows_per_image, mask=in_m, other=0.0).to(tl.float32)[:, None]
            if HAS_LAYER_SCALE:
                x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
                dlayer_scale += tl.sum(tl.where(inside, t * x, 0.0), 0)
                t *= layer_scale[None, :]
        tl.store(dx_ptr + at, t.to(dx_ptr.dtype.element_ty), mask=inside)
    at = partial_ptr + program * 3 * D + d
    tl.store(at, dweight, mask=in_d)
    tl.store(at + D, dbias, mask=in_d)
    if HAS_LAYER_SCALE:
        tl.store(at + 2 * D, dlayer_scale, mask=in_d)


def write_stats(x: Tensor, mean: Tensor, rstd: Tensor, eps: float) -> None:
    """Writes μ and 1/√(σ² + ε) of every row of x [M, K] to mean and rstd [M]."""
    rows, block, options = whole_row_blocks(x.shape[1])
    fixed = dict(K=x.shape[1], BLOCK_M=rows, BLOCK_K=block, **options)
    launch(_stats_kernel, (cdiv(len(x), rows),), x, mean, rstd, len(x), eps, **fixed)


def _blocks(D: int) -> dict[str, int]:
    """Launch parameters: a program holds whole rows."""
    rows, block, options = whole_row_blocks(D)
    return dict(BLOCK_M=rows, BLOCK_D=block, num_stages=1, **options)


def _fwd(x, residual, weight, bias, eps, layer_scale, sample_scale, fp32_out):
    """(s, y, mean, rstd); s is empty without a residual. mean and rstd are [M] fp32."""
    s, y, mean, rstd = _fwd_fake(x, residual, weight, bias, eps, layer_scale, sample_scale, fp32_out)
    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    M, D, blocks = mean.numel(), x.shape[-1], _blocks(x.shape[-1])
    if M:
        launch(
            _fwd_kernel, (cdiv(M, blocks["BLOCK_M"]),),
            x, residual, layer_scale, sample_scale, weight, bias, s, y, mean, rstd, M, cdiv(M, x.shape[0]), eps,
            D=D, HAS_RESIDUAL=residual is not None, HAS_LAYER_SCALE=layer_scale is not None,
            HAS_SCALE=sample_scale is not None, HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, **blocks,
        )  # fmt: skip
    return s, y, mean, rstd


def _fwd_fake(x, residual, weight, bias, eps, layer_scale, sample_scale, fp32_out):
    dtype = x.dtype
    for t in (residual, layer_scale if residual is not None else None):
        dtype = dtype if t is None else torch.promote_types(dtype, t.dtype)
    s = x.new_empty(0 if residual is None else x.shape, dtype=dtype)
    rows = math.prod(x.shape[:-1])
    mean, rstd = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    return s, x.new_empty(x.shape, dtype=torch.float32 if fp32_out else dtype), mean, rstd


def _bwd(dy, dsum, s, x, weight, layer_scale, sample_scale, mean, rstd, dx_dtype):
    """(dx, dresidual, sums [3, D] fp32 of dweight, dbias, dlayer_scale); dresidual is empty without `dsum`."""
    dx, dresidual, sums = _bwd_fake(dy, dsum, s, x, weight, layer_scale, sample_scale, mean, rstd, dx_dtype)
    dy, s = dy.contiguous(), s.contiguous()
    dsum, x = (None if t is None else t.contiguous() for t in (dsum, x))
    M, D, blocks = mean.numel(), s.shape[-1], _blocks(s.shape[-1])
    if not M:
        return dx, dresidual, sums.zero_()
    programs = min(PROGRAMS, cdiv(M, blocks["BLOCK_M"]))
    partial = torch.zeros(programs, 3, D, dtype=torch.float32, device=s.device)
    launch(
        _bwd_kernel, (programs,),
        dy, dsum, s, x, layer_scale, sample_scale, weight, mean, rstd, dx, dresidual, partial, M, cdiv(M, s.shape[0]),
        D=D, HAS_RESIDUAL=dsum is not None, HAS_LAYER_SCALE=layer_scale is not None, HAS_SCALE=sample_scale is not None,
        HAS_WEIGHT=weight is not None, **blocks,
    )  # fmt: skip
    return dx, dresidual, torch.sum(partial, 0, out=sums)


def _bwd_fake(dy, dsum, s, x, weight, layer_scale, sample_scale, mean, rstd, dx_dtype):
    dresidual = s.new_empty(0 if dsum is None else s.shape)
    return s.new_empty(s.shape, dtype=dx_dtype), dresidual, s.new_empty(3, s.shape[-1], dtype=torch.float32)


_fwd_op = register(
    "layer_norm_fwd",
    "(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, Tensor? layer_scale, "
    "Tensor? sample_scale, bool fp32_out) -> (Tensor, Tensor, Tensor, Tensor)",
    _fwd,
    _fwd_fake,
)
_bwd_op = register(
    "layer_norm_bwd",
    "(Tensor dy, Tensor? dsum, Tensor s, Tensor? x, Tensor? weight, Tensor? layer_scale, Tensor? sample_scale, "
    "Tensor mean, Tensor rstd, ScalarType dx_dtype) -> (Tensor, Tensor, Tensor)",
    _bwd,
    _bwd_fake,
)


class _Fn(torch.autograd.Function):
    """Autograd of layer_norm_fwd by layer_norm_bwd; without a residual the first output is empty."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps, layer_scale, sample_scale):
        autocast = torch.is_autocast_enabled(x.device.type)  # then PyTorch's layer_norm returns float32
        s, y, mean, rstd = _fwd_op(x, residual, weight, bias, eps, layer_scale, sample_scale, autocast)
        branch = x if layer_scale is not None else None
        ctx.save_for_backward(x if residual is None else s, branch, weight, layer_scale, sample_scale, mean, rstd)
        ctx.has_residual = residual is not None
        ctx.dtypes = tuple(None if t is None else t.dtype for t in (x, residual, bias))
        return s, y

    @staticmethod
    @once_differentiable
    def backward(ctx, dsum, dy):
        s, x, weight, layer_scale, sample_scale, mean, rstd = ctx.saved_tensors
        x_dtype, residual_dtype, bias_dtype = ctx.dtypes
        dsum = dsum if ctx.has_residual else None
        dx, dresidual, sums = _bwd_op(dy, dsum, s, x, weight, layer_scale, sample_scale, mean, rstd, x_dtype)
        return (
            dx,
            dresidual.to(residual_dtype) if ctx.has_residual else None,
            None if weight is None else sums[0].to(weight.dtype),
            None if bias_dtype is None else sums[1].to(bias_dtype),
            None,
            None if layer_scale is None else sums[2].to(layer_scale.dtype),
            None,
        )


def _inputs(case: dict[str, int], dtype: torch.dtype, device: torch.device | str) -> dict:
    randn, D = make_randn(device, dtype), case["D"]
    x = randn(case["B"], case["N"], D, shift=case.get("shift", 0))
    return {"x": x, "weight": randn(D), "bias": randn(D), "eps": 1e-6}


def _inputs_add(case: dict[str, int], dtype: torch.dtype, device: torch.device | str) -> dict:
    randn, B, D = make_randn(device, dtype, seed=1), case["B"], case["D"]
    keep = torch.tensor([b % 2 / 0.5 for b in range(B)], dtype=dtype, device=device)
    return _inputs(case, dtype, device) | {
        "residual": randn(B, case["N"], D),
        "layer_scale": randn(D),
        "sample_scale": keep,
    }


OP = Op(
    name="layer_norm",
    run=layer_norm,
    reference=reference,
    cases={"ragged": dict(B=2, N=3, D=5), "shifted": dict(B=2, N=3, D=9, shift=30)},
    inputs=_inputs,
    ragged={
        "vit_tiny": dict(B=2, N=49, D=192),
        "odd": dict(B=3, N=17, D=33),
        "outlier": dict(B=1, N=50, D=65, shift=1e4),
        "wide": dict(B=2, N=3, D=1100),
        "empty": dict(B=0, N=3, D=8),
    },
)
OP_ADD = Op(
    name="add_layer_norm",
    run=add_layer_norm,
    reference=reference_add,
    cases={"ragged": dict(B=3, N=2, D=5)},
    inputs=_inputs_add,
    ragged={"vit_tiny": dict(B=2, N=49, D=192), "odd": dict(B=5, N=17, D=33), "empty": dict(B=0, N=3, D=8)},
)
