"""LayerNorm, alone or after a residual addition.

Math      μ = mean(x)    σ² = mean((x − μ)²)    x̂ = (x − μ) / √(σ² + ε)                  (1)
          y = γ·x̂ + β                                                                     (2)
          s = residual + sample_scale·layer_scale·x,  y = LN(s)        for add_layer_norm  (3)
Backward  equations (4) to (6) of `layer_norm_backward`.
Cost      forward 8·M·D flops; bytes = x + y (+ residual + s). Backward reads dy, ds, s, x and writes dx, dresidual.
Saved     s (or x), and x if there is a layer_scale, in storage dtype; μ and 1/√(σ² + ε) in fp32.
Sources   Ba et al., Layer normalization, arXiv:1607.06450, eq. 4; LayerScale: Touvron et al., CaiT, arXiv:2103.17239,
          eq. 6; stochastic depth: Huang et al., arXiv:1603.09382.
"""

import math
from operator import index

import torch
import torch.nn.functional as F
from torch import Tensor

from . import choose
from .argument import (
    Lent,
    NextNorm,
    Norm,
    Normalized,
    expect_addable,
    expect_norm,
    expect_rows,
    expect_scales,
    is_autocast_on,
)
from .backend import kernels_available
from .launch import cdiv, launch, whole_row_blocks
from .layer_norm_backward import bwd_op, common_dtype, row_blocks
from .op import Op, make_randn, once_differentiable, register
from .tile import jit, tl

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
        mixable = weight is None or weight.dtype == x.dtype  # otherwise PyTorch casts x
        rows = choose.rows_of(math.prod(x.shape[:-1]))
        width = index(x.shape[-1])  # int leaves a size symbolic in a trace
        if not mixable or choose.prefers_kernel(x, "layer_norm", rows, width):
            return run(x, weight, bias, eps)
    return reference(x, weight, bias, eps)


def run(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`layer_norm`, or `rms_norm`, by our kernel, without argument checks or plan; the kernels must be available.

    The result has the given dtype; without one that of PyTorch's.
    """
    return _Fn.apply(x, None, weight, bias, eps, None, None, rms, dtype)[1]


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
        residual: [B, ..., D], the residual stream.
        weight: γ [D], or None.
        bias: β [D], or None.
        eps: ε, added to the variance.
        layer_scale: [D], LayerScale of the branch.
        sample_scale: [B], drop-path factor of each image, 0 or 1 / (1 − p); it gets no gradient.

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
        mixable = weight is None or weight.dtype == dtype  # otherwise PyTorch casts the sum
        rows, scales = choose.rows_of(math.prod(x.shape[:-1])), (layer_scale is not None, sample_scale is not None)
        if mixable and not choose.prefers_kernel(x, "add_layer_norm", rows, index(x.shape[-1]), *scales):
            return reference_add(x, residual, weight, bias, eps, layer_scale, sample_scale)
        return _Fn.apply(x, residual, weight, bias, eps, layer_scale, sample_scale, False)
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
def _stats_kernel(
    x_ptr, mean_ptr, rstd_ptr, M, eps, K: tl.constexpr, RMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """One program: BLOCK_M rows. Stores μ and 1/√(σ² + ε); with RMS 0 and 1/√(mean(x²) + ε)."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    inside = (m < M)[:, None] & (k < K)[None, :]
    x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=inside, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_K]
    mean = tl.zeros([BLOCK_M], tl.float32)
    centred = x
    if not RMS:
        mean = tl.sum(x, 1) / K
        centred = tl.where(inside, x - mean[:, None], 0.0)
    tl.store(mean_ptr + m, mean, mask=m < M)
    tl.store(rstd_ptr + m, 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / K + eps), mask=m < M)


@jit
def merge_stats(
    stats_ptr, m, in_m, eps, K: tl.constexpr, RMS: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """μ and 1/√(σ² + ε) of rows m, from statistics of TILES tiles of WIDTH columns (Chan et al., 1979).

    RMS: 0 and 1/√(mean(x²) + ε) instead.
    """
    t = tl.arange(0, BLOCK_T)
    inside = in_m[:, None] & (t < TILES)[None, :]
    at = stats_ptr + (m[:, None] * TILES + t[None, :]) * 2
    row_sum = tl.load(at, mask=inside, other=0.0)  # [BLOCK_M, BLOCK_T]
    m2 = tl.load(at + 1, mask=inside, other=0.0)
    count = tl.minimum(WIDTH, K - t * WIDTH).to(tl.float32)[None, :]
    mean = tl.sum(row_sum, 1) / K
    if RMS:
        mean *= 0.0
    between = row_sum / count - mean[:, None]
    m2 += tl.where(inside, count * between * between, 0.0)
    return mean, 1.0 / tl.sqrt(tl.sum(m2, 1) / K + eps)


@jit(do_not_specialize=["M", "rows_per_image"])
def _fwd_kernel(
    x_ptr, residual_ptr, layer_scale_ptr, scale_ptr, pending_ptr, branch_bias_ptr, weight_ptr, bias_ptr, late_bias_ptr,
    sum_ptr, next_pending_ptr, y_ptr, mean_ptr, rstd_ptr,
    M, rows_per_image, eps, D: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_LAYER_SCALE: tl.constexpr,
    HAS_SCALE: tl.constexpr, STREAM: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, RMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M whole rows. Equations (1) to (3), or only the sum of (3) where y_ptr is None.

    STREAM: s = x + pending + branch_bias without a residual, see `argument.Lent`; s + late_bias is stored, or
        what x lacks of it.
    RMS: RMSNorm instead, with μ = 0.
    """
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
        x = x.to(sum_ptr.dtype.element_ty).to(tl.float32)  # LN reads the rounded sum, as in PyTorch
    pending = tl.zeros([BLOCK_D], tl.float32)
    if STREAM:
        if pending_ptr is not None:
            pending += tl.load(pending_ptr + d, mask=in_d, other=0.0)
        if branch_bias_ptr is not None:
            pending += tl.load(branch_bias_ptr + d, mask=in_d, other=0.0).to(tl.float32)
        x += pending[None, :]
    stored = x
    if late_bias_ptr is not None:
        late_bias = tl.load(late_bias_ptr + d, mask=in_d, other=0.0).to(tl.float32)
        stored += late_bias[None, :]
        pending += late_bias
    if next_pending_ptr is not None:
        tl.store(next_pending_ptr + d, pending, mask=d < tl.where(tl.program_id(0) == 0, D, 0))
    elif sum_ptr is not None:
        tl.store(sum_ptr + at, stored.to(sum_ptr.dtype.element_ty), mask=inside)
    if y_ptr is not None:
        mean = tl.zeros([BLOCK_M], tl.float32)
        centred = x
        if not RMS:
            mean = tl.sum(x, 1) / D  # [BLOCK_M]
            centred = tl.where(inside, x - mean[:, None], 0.0)
        rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / D + eps)
        y = centred * rstd[:, None]
        if HAS_WEIGHT:
            y *= tl.load(weight_ptr + d, mask=in_d, other=0.0).to(tl.float32)[None, :]
        if HAS_BIAS:
            y += tl.load(bias_ptr + d, mask=in_d, other=0.0).to(tl.float32)[None, :]
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)
        if mean_ptr is not None:
            tl.store(mean_ptr + m, mean, mask=in_m)
            tl.store(rstd_ptr + m, rstd, mask=in_m)


def write_stats(x: Tensor, mean: Tensor, rstd: Tensor, eps: float, rms: bool) -> None:
    """Writes μ and 1/√(σ² + ε), or for an RMSNorm 0 and 1/√(mean(x²) + ε), of each row of x [M, K] to [M] each."""
    rows, block, options = whole_row_blocks(x.shape[1])
    fixed = dict(K=x.shape[1], RMS=rms, BLOCK_M=rows, BLOCK_K=block, **options)
    M = x.shape[0]
    launch(_stats_kernel, (cdiv(M, rows),), x, mean, rstd, M, eps, **fixed)


def _fwd(x, residual, weight, bias, eps, layer_scale, sample_scale, normed_dtype, rms):
    """(s, y, mean, rstd); s is empty without a residual. mean and rstd are [M] fp32."""
    s, y, mean, rstd = _fwd_fake(x, residual, weight, bias, eps, layer_scale, sample_scale, normed_dtype, rms)
    norm = Norm(weight, bias, eps, "rms_norm" if rms else "layer_norm")
    residual = None if residual is None else residual.contiguous()
    scales = dict(layer_scale=layer_scale, sample_scale=sample_scale)
    added = None if residual is None else s
    _launch(x.contiguous(), norm, y, residual=residual, **scales, s=added, mean=mean, rstd=rstd)
    return s, y, mean, rstd


def output_dtype(x: Tensor, layer_scale: Tensor | None, residual: Tensor | None) -> torch.dtype:
    """Dtype of layer_scale·x + residual, by type promotion."""
    dtype = x.dtype
    for t in (layer_scale, residual):
        dtype = dtype if t is None else torch.promote_types(dtype, t.dtype)
    return dtype


def _fwd_fake(x, residual, weight, bias, eps, layer_scale, sample_scale, normed_dtype, rms):
    dtype = x.dtype if residual is None else output_dtype(x, layer_scale, residual)
    s = x.new_empty(0 if residual is None else x.shape, dtype=dtype)
    rows = math.prod(x.shape[:-1])
    mean, rstd = x.new_empty(rows, dtype=torch.float32), x.new_empty(rows, dtype=torch.float32)
    return s, x.new_empty(x.shape, dtype=normed_dtype or dtype), mean, rstd


def add_and_normalize(
    x: Tensor,
    residual: Tensor | None,
    layer_scale: Tensor | None,
    sample_scale: Tensor | None,
    norm: Norm | None,
    dtype: torch.dtype,
    save: bool,
    late_bias: Tensor | None = None,
) -> tuple[Tensor, Normalized | None]:
    """Equation (3) in one launch, without gradients: (s + late_bias, norm(s)), or (s, None) without a norm.

    Args:
        x: [B, ..., D], the branch; without a residual, the input of the norm.
        residual: [B, ..., D], or None.
        layer_scale: [D], or None.
        sample_scale: [B], or None.
        norm: the LayerNorm or RMSNorm, or None.
        dtype: of norm(s).
        save: return row statistics for a backward pass.
        late_bias: [D], see `Normalized`; or None.
    """
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    s = None
    normed = None
    mean = None
    rstd = None
    if residual is not None:
        s = torch.empty_like(x, dtype=output_dtype(x, layer_scale, residual))
    if norm is not None:
        normed = torch.empty_like(x, dtype=dtype)
        if save:
            mean, rstd = (x.new_empty(math.prod(x.shape[:-1]), dtype=torch.float32) for _ in range(2))
    scales = dict(layer_scale=layer_scale, sample_scale=sample_scale)
    _launch(x, norm, normed, residual=residual, **scales, late_bias=late_bias, s=s, mean=mean, rstd=rstd)
    return x if s is None else s, None if normed is None else Normalized(normed, mean, rstd, late_bias)


def normalize_lent(x: Tensor, lent: Lent, branch_bias: Tensor | None, next_norm: NextNorm) -> tuple[Tensor, Normalized]:
    """Norm of a stream [B, ..., D] into which a branch accumulated without its bias [D], in one launch, in inference.

    The late bias is added to a new sum, which is returned; if x is lent on, to `pending` instead.
    """
    normed = torch.empty_like(x)
    late_bias = next_norm.late_bias
    pending = x.new_empty(x.shape[-1:], dtype=torch.float32) if next_norm.lends else None
    s = torch.empty_like(x) if pending is None and late_bias is not None else None
    added = dict(pending=lent.pending, branch_bias=branch_bias, late_bias=late_bias)
    _launch(x, next_norm.norm, normed, **added, s=s, next_pending=pending)
    return x if s is None else s, Normalized(normed, None, None, late_bias, pending)


def _launch(
    x, norm, y, *, residual=None, layer_scale=None, sample_scale=None, pending=None, branch_bias=None, late_bias=None,
    s=None, next_pending=None, mean=None, rstd=None,
):  # fmt: skip
    """Launches `_fwd_kernel` on contiguous tensors, named as its arguments; the sum of (3) is written to s."""
    D = x.shape[-1]
    blocks = row_blocks(D)
    weight, bias, eps = (None, None, 0.0) if norm is None else norm[:3]
    if M := math.prod(x.shape[:-1]):
        launch(
            _fwd_kernel, (cdiv(M, blocks["BLOCK_M"]),),
            x, residual, layer_scale, sample_scale, pending, branch_bias, weight, bias, late_bias,
            s, next_pending, y, mean, rstd, M, cdiv(M, x.shape[0]), eps,
            D=D, HAS_RESIDUAL=residual is not None, HAS_LAYER_SCALE=layer_scale is not None,
            HAS_SCALE=sample_scale is not None, STREAM=pending is not None or branch_bias is not None,
            HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None,
            RMS=norm is not None and norm.kind == "rms_norm", **blocks,
        )  # fmt: skip


_fwd_op = register(
    "layer_norm_fwd",
    "(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, Tensor? layer_scale, "
    "Tensor? sample_scale, ScalarType? normed_dtype, bool rms) -> (Tensor, Tensor, Tensor, Tensor)",
    _fwd,
    _fwd_fake,
)


class _Fn(torch.autograd.Function):
    """Autograd of layer_norm_fwd by layer_norm_bwd; without a residual the first output is empty."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps, layer_scale, sample_scale, rms, dtype=None):
        if dtype is None and torch.is_autocast_enabled(x.device.type):
            dtype = torch.float32  # as PyTorch's layer_norm then
        s, y, mean, rstd = _fwd_op(x, residual, weight, bias, eps, layer_scale, sample_scale, dtype, rms)
        branch = x if layer_scale is not None else None
        ctx.save_for_backward(x if residual is None else s, branch, weight, layer_scale, sample_scale, mean, rstd)
        ctx.has_residual = residual is not None
        ctx.dtype = y.dtype
        ctx.rms = rms
        ctx.set_materialize_grads(False)
        ctx.dtypes = tuple(None if t is None else t.dtype for t in (x, residual, bias))
        return s, y

    @staticmethod
    @once_differentiable
    def backward(ctx, dsum, dy):
        s, x, weight, layer_scale, sample_scale, mean, rstd = ctx.saved_tensors
        x_dtype, residual_dtype, bias_dtype = ctx.dtypes
        sums_dtype = common_dtype(bias_dtype, *(None if t is None else t.dtype for t in (weight, layer_scale)))
        if dy is None and dsum is None:
            return (None,) * 9
        dy = torch.zeros_like(s, dtype=ctx.dtype) if dy is None else dy
        if not ctx.has_residual:
            dsum = None
        elif dsum is None:
            dsum = torch.zeros_like(s)
        scales = layer_scale, sample_scale
        dx, dresidual, sums = bwd_op(dy, dsum, s, x, weight, *scales, mean, rstd, x_dtype, sums_dtype, ctx.rms)
        return (
            dx,
            dresidual.to(residual_dtype) if ctx.has_residual else None,
            None if weight is None else sums[0].to(weight.dtype),
            None if bias_dtype is None else sums[1].to(bias_dtype),
            None,
            None if layer_scale is None else sums[2].to(layer_scale.dtype),
            None,
            None,
            None,
        )


def _inputs(case: dict[str, int], dtype: torch.dtype, device: torch.device | str) -> dict:
    randn = make_randn(device, dtype)
    D = case["D"]
    x = randn(case["B"], case["N"], D, shift=case.get("shift", 0))
    return {"x": x, "weight": randn(D), "bias": randn(D), "eps": 1e-6}


def _inputs_add(case: dict[str, int], dtype: torch.dtype, device: torch.device | str) -> dict:
    randn = make_randn(device, dtype, seed=1)
    B = case["B"]
    D = case["D"]
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
        "outlier": dict(B=1, N=50, D=65, shift=10_000),
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
