"""Backward pass of `linear`, where the symbols and equations (1) to (6) are defined; `mlp` uses it for both layers.

Math      dpre = sample_scale·layer_scale·dy ∘ act'(pre)    g = r·dpre                           (7)
          G = gᵀ x − (gᵀ μ) 1ᵀ    dW = G·diag(γ) + db βᵀ    dγ = Σ_f G_f ∘ W_f    dβ = Wᵀ db     (8)
          t = g W'    dx = t − mean(t) − x̂·mean(t ∘ x̂)                                           (9)
          Without an activation dlayer_scale = Σ_k dW'_k ∘ W_k + db' ∘ b, with gradients dW' and db' without the
          factor layer_scale, so that pre need not be saved                                      (10)
          sample_scale is a random mask and gets no gradient.
Kernels   The elementwise parts of (7) and (9) and the sums of (8) and (10) are Triton; the three matrix products are
          torch.matmul.
Flags     HAS_NORM: a LayerNorm is folded in. HIDDEN: compute h = act(pre) again and store it. COPY: store dpre, which
          differs from dy. ADD: x is also the residual, so dy is added to dx. LATE: layer_scale is applied after the
          products, by (10). SUMMED: sums over rows of dpre are given.
"""

import math

import torch
from torch import Tensor

from . import fold
from .activation import activate, activate_grad
from .launch import cdiv, is_gpu, power_of_2, whole_row_blocks
from .op import register
from .tile import jit, tl


@jit
def _bwd_kernel(
    dy_ptr, pre_ptr, layer_scale_ptr, scale_ptr, mean_ptr, rstd_ptr, dpre_ptr, h_ptr, partial_ptr, M, rows_per_image, F,
    ACTIVATION: tl.constexpr, HAS_NORM: tl.constexpr, HAS_LAYER_SCALE: tl.constexpr, HAS_SCALE: tl.constexpr,
    COPY: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows of BLOCK_F outputs. Stores dpre of equation (7), or g with HAS_NORM, and sums over rows.

    The sums are [programs, 3, outputs]: of dpre, of g·μ, and of layer_scale's gradient in the first F outputs.
    """
    f = tl.program_id(1).to(tl.int64) * BLOCK_F + tl.arange(0, BLOCK_F)
    in_f = f < F
    start = tl.program_id(0).to(tl.int64) * ROWS
    W = 2 * F if ACTIVATION == "swiglu" else F
    EXACT: tl.constexpr = dpre_ptr.dtype.element_ty == tl.float32
    layer_scale = tl.full([BLOCK_F], 1.0, tl.float32)
    if HAS_LAYER_SCALE:
        layer_scale = tl.load(layer_scale_ptr + f, mask=in_f, other=0.0).to(tl.float32)
    dbias = tl.zeros([BLOCK_F], tl.float32)
    dbias_up = tl.zeros([BLOCK_F], tl.float32)
    dlayer_scale = tl.zeros([BLOCK_F], tl.float32)
    g_mean = tl.zeros([BLOCK_F], tl.float32)
    g_mean_up = tl.zeros([BLOCK_F], tl.float32)
    for step in range(0, ROWS, BLOCK_M):
        m = start + step + tl.arange(0, BLOCK_M)
        in_m = m < M
        inside = in_m[:, None] & in_f[None, :]
        g = tl.load(dy_ptr + m[:, None] * F + f[None, :], mask=inside, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_F]
        if HAS_SCALE:
            g *= tl.load(scale_ptr + m // rows_per_image, mask=in_m, other=0.0).to(tl.float32)[:, None]
        mean = tl.load(mean_ptr + m, mask=in_m, other=0.0) if HAS_NORM else tl.zeros([BLOCK_M], tl.float32)
        rstd = tl.load(rstd_ptr + m, mask=in_m, other=0.0) if HAS_NORM else tl.zeros([BLOCK_M], tl.float32)
        at = m[:, None] * W + f[None, :]
        if ACTIVATION is not None:
            pre = tl.load(pre_ptr + at, mask=inside, other=0.0).to(tl.float32)
            act = activate(pre, ACTIVATION, EXACT)
            up = tl.full([BLOCK_M, BLOCK_F], 1.0, tl.float32)
            if ACTIVATION == "swiglu":
                up = tl.load(pre_ptr + at + F, mask=inside, other=0.0).to(tl.float32)
            if HIDDEN:
                tl.store(h_ptr + m[:, None] * F + f[None, :], (act * up).to(h_ptr.dtype.element_ty), mask=inside)
            if HAS_LAYER_SCALE:
                dlayer_scale += tl.sum(g * act * up, 0)
                g *= layer_scale[None, :]
            if ACTIVATION == "swiglu":
                dup = g * act
                dbias_up += tl.sum(dup, 0)
                if HAS_NORM:
                    dup = (dup * rstd[:, None]).to(dpre_ptr.dtype.element_ty).to(tl.float32)
                    g_mean_up += tl.sum(dup * mean[:, None], 0)
                tl.store(dpre_ptr + at + F, dup.to(dpre_ptr.dtype.element_ty), mask=inside)
            g *= up * activate_grad(pre, ACTIVATION, EXACT)
        dbias += tl.sum(g, 0)
        if HAS_NORM:  # g = rstd·dpre is rounded before it is summed with μ, so that a constant in x cancels
            g = (g * rstd[:, None]).to(dpre_ptr.dtype.element_ty).to(tl.float32)
            g_mean += tl.sum(g * mean[:, None], 0)
        if COPY:
            tl.store(dpre_ptr + at, g.to(dpre_ptr.dtype.element_ty), mask=inside)
    at = partial_ptr + tl.program_id(0).to(tl.int64) * 3 * W + f
    tl.store(at, dbias, mask=in_f)
    if HAS_NORM:
        tl.store(at + W, g_mean, mask=in_f)
    if HAS_LAYER_SCALE:
        tl.store(at + 2 * W, dlayer_scale, mask=in_f)
    if ACTIVATION == "swiglu":
        tl.store(at + F, dbias_up, mask=in_f)
        if HAS_NORM:
            tl.store(at + W + F, g_mean_up, mask=in_f)


@jit
def _bwd_norm_kernel(
    t_ptr, x_ptr, mean_ptr, rstd_ptr, dy_ptr, dx_ptr, M,
    K: tl.constexpr, ADD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows. dx of equation (9) from t = g W', plus dy with ADD."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    inside = (m < M)[:, None] & (k < K)[None, :]
    at = m[:, None] * K + k[None, :]
    t = tl.load(t_ptr + at, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_K]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(mean_ptr + m, mask=m < M, other=0.0)
    rstd = tl.load(rstd_ptr + m, mask=m < M, other=0.0)
    normed = tl.where(inside, (x - mean[:, None]) * rstd[:, None], 0.0)
    dx = t - (tl.sum(t, 1) / K)[:, None] - normed * (tl.sum(t * normed, 1) / K)[:, None]
    if ADD:
        dx += tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@jit
def _bwd_weight_kernel(
    g_ptr, w_ptr, bias_ptr, partial_ptr, norm_weight_ptr, norm_bias_ptr, layer_scale_ptr,
    dw_ptr, dbias_ptr, dlayer_scale_ptr, dnorm_ptr, F, K, layer_scales, programs,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_NORM_WEIGHT: tl.constexpr, HAS_NORM_BIAS: tl.constexpr,
    HAS_LAYER_SCALE: tl.constexpr, LATE: tl.constexpr, SUMMED: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_F outputs. dW, db and dlayer_scale by equations (8) and (10), and their terms of dγ and dβ."""
    f = tl.program_id(0).to(tl.int64) * BLOCK_F + tl.arange(0, BLOCK_F)
    in_f = f < F
    dbias = tl.zeros([BLOCK_F], tl.float32)
    g_mean = tl.zeros([BLOCK_F], tl.float32)
    dlayer_scale = tl.zeros([BLOCK_F], tl.float32)
    if SUMMED:
        for start in range(0, programs, BLOCK_P):
            p = start + tl.arange(0, BLOCK_P)
            inside = (p < programs)[:, None] & in_f[None, :]
            at = partial_ptr + p.to(tl.int64)[:, None] * 3 * F + f[None, :]
            dbias += tl.sum(tl.load(at, mask=inside, other=0.0), 0)
            if HAS_NORM:
                g_mean += tl.sum(tl.load(at + F, mask=inside, other=0.0), 0)
            if HAS_LAYER_SCALE and not LATE:
                dlayer_scale += tl.sum(tl.load(at + 2 * F, mask=inside & (f < layer_scales)[None, :], other=0.0), 0)
    layer_scale = tl.full([BLOCK_F], 1.0, tl.float32)
    if LATE:
        layer_scale = tl.load(layer_scale_ptr + f, mask=in_f, other=0.0).to(tl.float32)
        if HAS_BIAS:
            dlayer_scale = dbias * tl.load(bias_ptr + f, mask=in_f, other=0.0).to(tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        in_k = k < K
        inside = in_f[:, None] & in_k[None, :]
        at = f[:, None] * K + k[None, :]
        g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_F, BLOCK_K]
        w = tl.load(w_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM:  # (8): g is dpreᵀ x̂
            g = tl.where(inside, g - g_mean[:, None], 0.0)
        dw = g
        if HAS_NORM_WEIGHT:
            dw *= tl.load(norm_weight_ptr + k, mask=in_k, other=0.0).to(tl.float32)[None, :]
        if HAS_NORM_BIAS:
            dw += dbias[:, None] * tl.load(norm_bias_ptr + k, mask=in_k, other=0.0).to(tl.float32)[None, :]
        if LATE:
            dlayer_scale += tl.sum(dw * w, 1)
        tl.store(dw_ptr + at, (layer_scale[:, None] * dw).to(dw_ptr.dtype.element_ty), mask=inside)
        if HAS_NORM:
            at = dnorm_ptr + tl.program_id(0).to(tl.int64) * 2 * K + k
            tl.store(at, tl.sum(layer_scale[:, None] * g * w, 0), mask=in_k)
            tl.store(at + K, tl.sum((layer_scale * dbias)[:, None] * w, 0), mask=in_k)
    tl.store(dbias_ptr + f, layer_scale * dbias, mask=in_f)
    if HAS_LAYER_SCALE:
        tl.store(dlayer_scale_ptr + f, dlayer_scale, mask=f < layer_scales)


def _matmul_fp32(a, b):
    """a @ b, accumulated and returned in fp32."""
    if a.dtype != torch.float32 and is_gpu(a.device):
        return torch.mm(a, b, out_dtype=torch.float32) if torch.version.hip is None else (a @ b).float()
    return a.float() @ b.float()


def product_grad(
    dy: Tensor,
    x: Tensor,
    width: int,
    pre: Tensor | None,
    layer_scale: Tensor | None,
    sample_scale: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    activation: str | None,
    norm: bool,
    summed: bool,
    hidden: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Equation (7): the gradient of a product, with the sums over rows that (8) and (10) need.

    Args:
        dy: [..., F].
        x: [..., K], for its dtype, device and number of images.
        width: outputs of the product, F or 2F for "swiglu".
        pre: [M, width], the pre-activation; not needed without an activation.
        layer_scale: [F], or None. Without an activation it is left to equation (10).
        sample_scale: [B], or None.
        mean: [M] fp32, with `norm`.
        rstd: [M] fp32, with `norm`.
        activation: its name, or None.
        norm: a LayerNorm was folded into the product.
        summed: the sums are needed.
        hidden: compute h = act(pre) again.

    Returns:
        (dpre [M, width], or g with `norm`; h [M, F] or None; sums [programs, 3, width] fp32, valid if `summed`). dpre
        is a view of dy if the two are equal.
    """
    F_, dy = dy.shape[-1], dy.contiguous()
    M = math.prod(dy.shape[:-1])
    late = activation is None
    copy = not late or norm or sample_scale is not None or dy.dtype != x.dtype
    if not M or not (copy or summed):
        empty = torch.zeros(1, 3, width, dtype=torch.float32, device=x.device) if summed else None
        return dy.view(M, F_).to(x.dtype) if late else x.new_empty(M, width), x.new_empty(M, F_), empty
    dpre = x.new_empty(M, width) if copy else dy.view(M, F_)
    h = x.new_empty(M, F_) if hidden else None
    rows_per_program = max(64, power_of_2(cdiv(M, 256)))
    programs = cdiv(M, rows_per_program)
    partial = torch.empty(programs, 3, width, dtype=torch.float32, device=x.device)
    _bwd_kernel[(programs, cdiv(F_, 64))](
        dy, pre, layer_scale, sample_scale, mean, rstd, dpre, h, partial, M, cdiv(M, x.shape[0]), F_,
        ACTIVATION=activation, HAS_NORM=norm, HAS_LAYER_SCALE=layer_scale is not None and not late,
        HAS_SCALE=sample_scale is not None, COPY=copy, HIDDEN=hidden, ROWS=rows_per_program, BLOCK_M=32, BLOCK_F=64,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return dpre, h, partial


def input_grad(
    dpre: Tensor,
    x: Tensor,
    weight: Tensor,
    layer_scale: Tensor | None,
    norm_weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    norm: bool,
    dy: Tensor | None = None,
) -> Tensor:
    """dx of equation (9), or dpre W without a norm; plus dy if given.

    Args:
        dpre: [M, outputs], or g with `norm`.
        x: [..., K]; only its shape and dtype are used without `norm`.
        weight: [outputs, K].
        layer_scale: [outputs] if dpre leaves it out, as for equation (10), else None.
        norm_weight: [K], or None.
        mean: [M] fp32, with `norm`.
        rstd: [M] fp32, with `norm`.
        norm: a LayerNorm was folded into the product.
        dy: [..., K], the gradient of a residual that is x, or None.

    Returns:
        [..., K] in x's dtype.
    """
    scale = 1.0
    if layer_scale is not None and x.dtype == torch.float16:  # a power of two, without which 1e-6 · W would underflow
        scale = layer_scale.float().abs().amax().clamp_min(1e-30).log2().floor().exp2()
        layer_scale = layer_scale.float() / scale
    if layer_scale is None and norm_weight is None:
        matrix = weight.to(x.dtype)
    else:
        matrix = weight.new_empty(weight.shape, dtype=x.dtype)
        fold.launch((weight,), (None,), (norm_weight,), (None,), (layer_scale,), (matrix,), (None,), (None,))
    t = dpre @ matrix
    t = t if isinstance(scale, float) else t * scale
    if not norm:
        return (t if dy is None else t + dy.reshape(t.shape)).view(x.shape).to(x.dtype)
    rows, dx = x.reshape(t.shape).contiguous(), torch.empty_like(t)
    rows_per_program, block, options = whole_row_blocks(x.shape[-1])
    if len(t):
        _bwd_norm_kernel[(cdiv(len(t), rows_per_program),)](
            t, rows, mean, rstd, dy if dy is None else dy.contiguous(), dx, len(t),
            K=x.shape[-1], ADD=dy is not None, BLOCK_M=rows_per_program, BLOCK_K=block, **options,
        )  # fmt: skip
    return dx.view(x.shape)


def weight_grad(
    dpre: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layer_scale: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    partial: Tensor | None,
    activation: str | None,
    norm: bool,
) -> tuple[Tensor | None, ...]:
    """Equations (8) and (10).

    Args:
        dpre: [M, outputs], or g with `norm`.
        x: [..., K].
        weight: [outputs, K].
        bias: [outputs], or None.
        layer_scale: [F], or None.
        norm_weight: [K], or None.
        norm_bias: [K], or None.
        partial: the sums of `product_grad`.
        activation: its name, or None.
        norm: a LayerNorm was folded into the product.

    Returns:
        (dweight [outputs, K], dbias, dlayer_scale, dγ and dβ [2, K]); None for parameters that do not exist.
    """
    rows = x.reshape(-1, x.shape[-1])
    late = layer_scale is not None and activation is None
    if not norm and not late:
        dweight = dpre.T @ rows if weight.dtype == x.dtype else _matmul_fp32(dpre.T, rows).to(weight.dtype)
        return dweight, *_row_sums(partial, bias, layer_scale), None
    g, (F_, K) = _matmul_fp32(dpre.T, rows), weight.shape
    layer_scales, programs = 0 if layer_scale is None else len(layer_scale), cdiv(F_, 16)
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    dbias, dlayer_scale = g.new_empty(F_), g.new_empty(layer_scales)
    dnorm = g.new_empty(programs if norm else 0, 2, K)
    _bwd_weight_kernel[(programs,)](
        g, weight.contiguous(), bias, partial, norm_weight, norm_bias, layer_scale, dweight, dbias, dlayer_scale, dnorm,
        F_, K, layer_scales, 0 if partial is None else len(partial), HAS_BIAS=bias is not None, HAS_NORM=norm,
        HAS_NORM_WEIGHT=norm_weight is not None, HAS_NORM_BIAS=norm_bias is not None,
        HAS_LAYER_SCALE=layer_scale is not None, LATE=late, SUMMED=partial is not None,
        BLOCK_F=16, BLOCK_K=64, BLOCK_P=32, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    dbias, dlayer_scale = None if bias is None else dbias, dlayer_scale if layer_scales else None
    return dweight, dbias, dlayer_scale, dnorm.sum(0) if norm else None


def _row_sums(partial, bias, layer_scale):
    """(dbias, dlayer_scale) from the sums of `product_grad`; None for parameters that do not exist."""
    return (
        None if bias is None else partial[:, 0].sum(0),
        None if layer_scale is None else partial[:, 2, : len(layer_scale)].sum(0),
    )


def _bwd(
    dy, x, weight, bias, pre, layer_scale, sample_scale, mean, rstd, norm_weight, norm_bias, activation, norm,
    residual_is_input, needs,
):  # fmt: skip
    """(dx, dweight, dbias, dlayer_scale, dnorm [2, K]); `needs`: of x, of any parameter but bias, of bias."""
    need_x, need_w, need_b = needs
    summed = (need_w or need_b) and (norm or bias is not None or layer_scale is not None)
    dpre, _, partial = product_grad(
        dy, x, len(weight), pre, layer_scale, sample_scale, mean, rstd, activation, norm, summed
    )
    late_scale = layer_scale if activation is None else None
    dx, dweight, dbias, dlayer_scale, dnorm = (None,) * 5
    if need_x:
        dx = input_grad(dpre, x, weight, late_scale, norm_weight, mean, rstd, norm, dy if residual_is_input else None)
    if need_w:
        dweight, dbias, dlayer_scale, dnorm = weight_grad(
            dpre, x, weight, bias, layer_scale, norm_weight, norm_bias, partial, activation, norm
        )
    elif need_b:
        dbias, _ = _row_sums(partial, bias, None)
    return tuple(x.new_empty(0) if t is None else t for t in (dx, dweight, dbias, dlayer_scale, dnorm))


def _bwd_fake(
    dy, x, weight, bias, pre, layer_scale, sample_scale, mean, rstd, norm_weight, norm_bias, activation, norm,
    residual_is_input, needs,
):  # fmt: skip
    need_x, need_w, need_b = needs
    grads = (
        torch.empty_like(x) if need_x else None,
        *weight_grad_like(x, weight, bias, layer_scale, norm, need_w, need_b),
    )
    return tuple(x.new_empty(0) if t is None else t.contiguous() for t in grads)


def weight_grad_like(
    x: Tensor, weight: Tensor, bias: Tensor | None, layer_scale: Tensor | None, norm: bool, need_w: bool, need_b: bool
) -> tuple[Tensor | None, ...]:
    """Empty tensors like the results of `weight_grad`; None for results that are not needed."""
    sums = dict(dtype=torch.float32)
    return (
        weight.new_empty(weight.shape) if need_w else None,
        x.new_empty(weight.shape[:1], **sums) if bias is not None and (need_w or need_b) else None,
        x.new_empty(layer_scale.shape, **sums) if layer_scale is not None and need_w else None,
        x.new_empty((2, x.shape[-1]), **sums) if norm and need_w else None,
    )


bwd_op = register(
    "linear_bwd",
    "(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor pre, Tensor? layer_scale, Tensor? sample_scale, "
    "Tensor mean, Tensor rstd, Tensor? norm_weight, Tensor? norm_bias, str? activation, bool norm, "
    "bool residual_is_input, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _bwd,
    _bwd_fake,
)
