"""Backward pass of `linear`, where the symbols and equations (1) to (6) are defined; `mlp` uses it for both layers.

Math      dpre = sample_scale·layer_scale·dy ∘ act'(pre)                                          (7)
          dW = dpreᵀ x̂    db = Σ_rows dpre    dx̂ = dpre W                                         (8)
          With a norm x̂ is recomputed, and dx̂ gives dx, dγ and dβ by equations (4) and (6) of
          `layer_norm_backward`; else x̂ = x                                                       (9)
          Without an activation dlayer_scale = Σ_k dW'_k ∘ W_k + db' ∘ b, with gradients dW' and db' without the
          factor layer_scale, so that pre need not be saved                                      (10)
          sample_scale is a random mask and gets no gradient.
Kernels   Equations (7) and (9) and the sums of (10) are one Triton pass each; the matmuls are torch.matmul.
Flags     HIDDEN: recompute h = act(pre) and store it.
"""

from typing import Any

import torch
from torch import Tensor

from . import fold, layer_norm_backward
from .activation import GATED, activate, activate_grad, gate_of
from .launch import cdiv, hint, launch, power_of_2
from .layer_norm_backward import grads_dtype
from .op import register
from .tile import jit, tl


@jit(do_not_specialize=["M", "rows_per_image"])
def _bwd_kernel(
    dy_ptr, pre_ptr, layer_scale_ptr, scale_ptr, dpre_ptr, h_ptr, partial_ptr, M, rows_per_image, F,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, HAS_LAYER_SCALE: tl.constexpr, HAS_SCALE: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows of BLOCK_F outputs. Stores dpre of equation (7) and sums over rows.

    The sums are [programs, 1 or 2, outputs]: of dpre, and of layer_scale's gradient in the first F outputs.
    """
    f = tl.program_id(1).to(tl.int64) * BLOCK_F + tl.arange(0, BLOCK_F)
    in_f = f < F
    start = tl.program_id(0).to(tl.int64) * ROWS
    W = 2 * F if GATED else F
    EXACT: tl.constexpr = dpre_ptr.dtype.element_ty == tl.float32
    layer_scale = tl.full([BLOCK_F], 1.0, tl.float32)
    if HAS_LAYER_SCALE:
        layer_scale = tl.load(layer_scale_ptr + f, mask=in_f, other=0.0).to(tl.float32)
    dbias = tl.zeros([BLOCK_F], tl.float32)
    dbias_up = tl.zeros([BLOCK_F], tl.float32)
    dlayer_scale = tl.zeros([BLOCK_F], tl.float32)
    for step in range(0, ROWS, BLOCK_M):
        m = start + step + tl.arange(0, BLOCK_M)
        in_m = m < M
        inside = in_m[:, None] & in_f[None, :]
        g = tl.load(dy_ptr + m[:, None] * F + f[None, :], mask=inside, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_F]
        if HAS_SCALE:
            g *= tl.load(scale_ptr + m // rows_per_image, mask=in_m, other=0.0).to(tl.float32)[:, None]
        at = m[:, None] * W + f[None, :]
        if ACTIVATION is not None:
            pre = tl.load(pre_ptr + at, mask=inside, other=0.0).to(tl.float32)
            act = activate(pre, ACTIVATION, EXACT)
            up = tl.full([BLOCK_M, BLOCK_F], 1.0, tl.float32)
            if GATED:
                up = tl.load(pre_ptr + at + F, mask=inside, other=0.0).to(tl.float32)
            if HIDDEN:
                tl.store(h_ptr + m[:, None] * F + f[None, :], (act * up).to(h_ptr.dtype.element_ty), mask=inside)
            if HAS_LAYER_SCALE:
                dlayer_scale += tl.sum(g * act * up, 0)
                g *= layer_scale[None, :]
            if GATED:
                dup = g * act
                dbias_up += tl.sum(dup, 0)
                tl.store(dpre_ptr + at + F, dup.to(dpre_ptr.dtype.element_ty), mask=inside)
            g *= up * activate_grad(pre, ACTIVATION, EXACT)
        dbias += tl.sum(g, 0)
        tl.store(dpre_ptr + at, g.to(dpre_ptr.dtype.element_ty), mask=inside)
    at = partial_ptr + tl.program_id(0).to(tl.int64) * (2 if HAS_LAYER_SCALE else 1) * W + f
    tl.store(at, dbias, mask=in_f)
    if HAS_LAYER_SCALE:
        tl.store(at + W, dlayer_scale, mask=in_f)
    if GATED:
        tl.store(at + F, dbias_up, mask=in_f)


@jit
def _bwd_scaled_weight_kernel(
    g_ptr, w_ptr, bias_ptr, sums_ptr, layer_scale_ptr, dw_ptr, dbias_ptr, dlayer_scale_ptr, F, K,
    BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_F outputs. Equation (10) from dW' = g and db' = sums; stores dW, dbias, dlayer_scale.

    dbias must not overwrite db', which the compiler may load once for each use, in different warps.
    """
    f = tl.program_id(0).to(tl.int64) * BLOCK_F + tl.arange(0, BLOCK_F)
    in_f = f < F
    layer_scale = tl.load(layer_scale_ptr + f, mask=in_f, other=0.0).to(tl.float32)
    dlayer_scale = tl.zeros([BLOCK_F], tl.float32)
    if bias_ptr is not None:
        sums = tl.load(sums_ptr + f, mask=in_f, other=0.0)
        dlayer_scale += sums * tl.load(bias_ptr + f, mask=in_f, other=0.0).to(tl.float32)
        tl.store(dbias_ptr + f, layer_scale * sums, mask=in_f)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = in_f[:, None] & (k < K)[None, :]
        at = f[:, None] * K + k[None, :]
        g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_F, BLOCK_K]
        dlayer_scale += tl.sum(g * tl.load(w_ptr + at, mask=inside, other=0.0).to(tl.float32), 1)
        tl.store(dw_ptr + at, (layer_scale[:, None] * g).to(dw_ptr.dtype.element_ty), mask=inside)
    tl.store(dlayer_scale_ptr + f, dlayer_scale, mask=in_f)


def matmul_fp32(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for a [M, K] and b [K, N], accumulated and returned in fp32."""
    if a.dtype != torch.float32 and a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=torch.float32) if torch.version.hip is None else (a @ b).float()
    return a.float() @ b.float()


def product_grad(
    dy: Tensor,
    dtype: torch.dtype,
    images: int,
    pre: Tensor | None,
    layer_scale: Tensor | None,
    sample_scale: Tensor | None,
    activation: str | None,
    hidden: bool = False,
    has_bias: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Equation (7): the gradient of a matmul's output.

    Args:
        dy: [..., F].
        dtype: of the matmul.
        images: B.
        pre: [M, F], or [M, 2F] for a gated activation, the pre-activation; None without an activation.
        layer_scale: [F], or None. Without an activation it is applied later, in equation (10).
        sample_scale: [B], or None.
        activation: name, or None.
        hidden: recompute h = act(pre).
        has_bias: sum over rows where dy is only cast, too.

    Returns:
        (dpre [M, F or 2F]; h [M, F] or None; its sums over rows and, with an activation, those of dlayer_scale,
        [1 or 2, F or 2F] fp32, or None if no pass was needed). dpre is a view of dy if the two are equal.
    """
    F = dy.shape[-1]
    dy = dy.contiguous()
    M = dy.numel() // F
    width = F if activation is None or pre is None else pre.shape[-1]
    if activation is None and sample_scale is None and not (has_bias and dy.dtype != dtype):
        return dy.view(M, F).to(dtype), None, None
    dpre = dy.new_empty(M, width, dtype=dtype)
    h = dy.new_empty(M, F, dtype=dtype) if hidden else None
    rows_per_program = max(64, power_of_2(cdiv(hint(M), 256)))
    programs = cdiv(M, rows_per_program)
    scaled = layer_scale is not None and activation is not None
    partial = torch.empty(programs, 2 if scaled else 1, width, dtype=torch.float32, device=dy.device)
    if M:
        launch(
            _bwd_kernel, (programs, cdiv(F, 64)),
            dy, pre, layer_scale, sample_scale, dpre, h, partial, M, cdiv(M, images), F,
            ACTIVATION=gate_of(activation), GATED=activation in GATED, HAS_LAYER_SCALE=scaled,
            HAS_SCALE=sample_scale is not None, HIDDEN=hidden,
            ROWS=rows_per_program, BLOCK_M=32, BLOCK_F=64, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return dpre, h, layer_norm_backward.sum_programs(partial)


def input_grad(dpre: Tensor, weight: Tensor, layer_scale: Tensor | None) -> Tensor:
    """dx̂ of equation (8).

    Args:
        dpre: [M, outputs].
        weight: [outputs, K].
        layer_scale: [outputs] if dpre does not include it, as for equation (10), else None.

    Returns:
        [M, K] in dpre's dtype.
    """
    if layer_scale is None:
        return dpre @ weight.to(dpre.dtype)
    scale = None
    if dpre.dtype == torch.float16:  # a power of two, so that 1e-6 · W does not underflow
        scale = layer_scale.float().abs().amax().clamp_min(1e-30).log2().floor().exp2()
        layer_scale = layer_scale.float() / scale
    matrix = weight.new_empty(weight.shape, dtype=dpre.dtype)
    fold.launch((weight,), (None,), (None,), (None,), (layer_scale,), (matrix,), (None,), (None,))
    return dpre @ matrix if scale is None else (dpre @ matrix) * scale


def parameter_grads(
    dpre: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layer_scale: Tensor | None,
    sums: Tensor | None,
    needs: tuple[bool, bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Equations (8) and (10).

    Args:
        dpre: [M, outputs].
        x: x̂ [M, K].
        weight: [outputs, K].
        bias: [outputs], or None.
        layer_scale: [outputs] if dpre does not include it, else None.
        sums: from `product_grad`, or None.
        needs: whether (dweight and dlayer_scale, dbias) are needed.

    Returns:
        (dweight [outputs, K], dbias in fp32 or dpre's dtype, dlayer_scale in fp32), each or None.
    """
    need_w, need_b = needs
    dbias = None  # with a layer_scale db' of equation (10) until it is multiplied
    if bias is not None and (need_b or (need_w and layer_scale is not None)):
        exact = layer_scale is not None or bias.dtype != dpre.dtype
        dbias = dpre.sum(0, dtype=torch.float32 if exact else None) if sums is None else sums[0]
    if not need_w:
        return None, dbias if layer_scale is None or dbias is None else layer_scale * dbias, None
    if layer_scale is None:
        same = weight.dtype == dpre.dtype
        return dpre.T @ x if same else matmul_fp32(dpre.T, x).to(weight.dtype), dbias, None
    g, (F, K) = matmul_fp32(dpre.T, x), weight.shape
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    dlayer_scale = g.new_empty(F)
    scaled = None if dbias is None else torch.empty_like(dbias)
    launch(
        _bwd_scaled_weight_kernel, (cdiv(F, 16),),
        g, weight.contiguous(), bias, dbias, layer_scale, dweight, scaled, dlayer_scale, F, K,
        BLOCK_F=16, BLOCK_K=64, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return dweight, scaled, dlayer_scale


def all_grads(
    dpre: Tensor,
    x: Tensor,
    weight: Tensor,
    cast: Tensor | None,
    bias: Tensor | None,
    layer_scale: Tensor | None,
    sums: Tensor | None,
    norm: tuple[Tensor, Tensor, Tensor | None, Tensor | None, str] | None,
    dsum: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, ...]:
    """Equations (8) to (10).

    Args:
        dpre: [M, outputs].
        x: [..., K].
        weight: [outputs, K].
        cast: the weight in dpre's dtype if it was cast before and there is no layer_scale, else None.
        bias: [outputs], or None.
        layer_scale: [outputs] if dpre does not include it, else None.
        sums: from `product_grad`, or None.
        norm: (mean [M], rstd [M], weight [K] or None, bias [K] or None, kind) of the norm, or None for no norm.
        dsum: [..., K], another gradient of x to add, or None.
        needs: whether gradients of (x, any parameter but the bias, the bias) are needed.

    Returns:
        (dx like x, dweight, dbias, dlayer_scale, dnorm [2, K]); None if not needed or absent.
    """
    need_x, need_w, need_b = needs
    inputs = x.reshape(-1, x.shape[-1])
    operand = weight if cast is None else cast
    dx = None
    dnorm = None
    dsum = None if dsum is None else dsum.reshape(inputs.shape)
    rows: Any = inputs
    if norm is not None and (need_x or need_w):
        dx, rows, dnorm = layer_norm_backward.input_grads(
            input_grad(dpre, operand, layer_scale), inputs, norm, dsum, need_x, dpre.dtype if need_w else None
        )
    elif norm is None:
        rows = inputs.to(dpre.dtype)
        if need_x:
            dx = input_grad(dpre, operand, layer_scale)
            dx = dx.to(x.dtype) if dsum is None else (dx + dsum).to(x.dtype)
    dx = None if dx is None else dx.view(x.shape)
    grads = parameter_grads(dpre, rows, weight, bias, layer_scale, sums, (need_w, need_b))
    return dx, *grads, dnorm if need_w else None


def _bwd(
    dy, x, weight, cast, bias, pre, layer_scale, sample_scale, mean, rstd, norm_weight, norm_bias, dsum, activation,
    norm, dtype, needs,
):  # fmt: skip
    """(dx + dsum, dweight, dbias, dlayer_scale, dnorm [2, K]); `needs`: of x, of any parameter but bias, of bias."""
    dpre, _, sums = product_grad(dy, dtype, x.shape[0], pre, layer_scale, sample_scale, activation, False, needs[2])
    late = layer_scale if activation is None else None
    statistics = (mean, rstd, norm_weight, norm_bias, norm) if norm else None
    grads = list(all_grads(dpre, x, weight, cast, bias, late, sums, statistics, dsum, tuple(needs)))
    if layer_scale is not None and activation is not None and needs[1]:
        grads[3] = sums[1, : len(layer_scale)]
    return tuple(x.new_empty(0) if t is None else t.contiguous() for t in grads)


def _bwd_fake(
    dy, x, weight, cast, bias, pre, layer_scale, sample_scale, mean, rstd, norm_weight, norm_bias, dsum, activation,
    norm, dtype, needs,
):  # fmt: skip
    need_x, need_w, need_b = needs
    grads = (
        torch.empty_like(x) if need_x else None,
        *weight_grad_like(
            x,
            weight,
            bias,
            layer_scale,
            (norm_weight, norm_bias) if norm else None,
            (need_w, need_b),
            activation is not None or sample_scale is not None or dy.dtype != dtype,
            dtype,
        ),
    )
    return tuple(x.new_empty(0) if t is None else t.contiguous() for t in grads)


def weight_grad_like(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layer_scale: Tensor | None,
    norm: tuple[Tensor | None, ...] | None,
    needs: tuple[bool, bool],
    summed: bool,
    dtype: torch.dtype,
) -> tuple[Tensor | None, ...]:
    """Empty tensors like the results of `all_grads` except dx; None for results that are not needed.

    Args:
        x: [..., K].
        weight: [outputs, K].
        bias: [outputs], or None.
        layer_scale: [F], or None.
        norm: weight and bias of the LayerNorm, or None for no norm.
        needs: whether gradients of (any parameter but the bias, the bias) are needed.
        summed: True if `product_grad` sums over rows.
        dtype: of the matmul.
    """
    (need_w, need_b), fp32 = needs, torch.float32
    exact = summed or layer_scale is not None or (bias is not None and bias.dtype != dtype)
    learns_bias = bias is not None and (need_b or (need_w and layer_scale is not None))
    return (
        weight.new_empty(weight.shape) if need_w else None,
        x.new_empty(weight.shape[:1], dtype=fp32 if exact else dtype) if learns_bias else None,
        x.new_empty(layer_scale.shape, dtype=fp32) if layer_scale is not None and need_w else None,
        x.new_empty((2, x.shape[-1]), dtype=grads_dtype(*norm)) if norm is not None and need_w else None,
    )


bwd_op = register(
    "linear_bwd",
    "(Tensor dy, Tensor x, Tensor weight, Tensor? cast, Tensor? bias, Tensor pre, Tensor? layer_scale, "
    "Tensor? sample_scale, Tensor mean, Tensor rstd, Tensor? norm_weight, Tensor? norm_bias, Tensor? dsum, "
    "str? activation, str? norm, ScalarType dtype, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _bwd,
    _bwd_fake,
)
