"""A linear layer with what stands before and after it in a Transformer: LayerNorm, activation, scales, residual.

Math      x̂ = LN(x) when `norm` is given, else x                                 [M, K]      (1)
          h = act(x̂ Wᵀ + b)                                                     [M, F]      (2)
          h = silu(x̂ W_gᵀ + b_g) ∘ (x̂ W_uᵀ + b_u)    for activation "swiglu"                (2')
          y = sample_scale · gamma · h + residual                                [M, F]      (3)
          stats = (Σ y, Σ (y − mean y)²) over each tile of columns           [M, tiles, 2]   (4)
Folded    W' = W·diag(γ)    s_f = Σ_k W'_fk    c = W β + b                                   (5)
          LN(x) Wᵀ + b = r·(x W'ᵀ) − r·μ·s + c,  r = 1/√(σ² + ε), μ and σ² of each row       (6)
Backward  dpre = sample_scale·gamma·dy ∘ act'(pre)    g = r·dpre                    (7)
          G = gᵀ x − (gᵀ μ) 1ᵀ    dW = G·diag(γ) + db βᵀ    dγ = Σ_f G_f ∘ W_f    dβ = Wᵀ db   (8)
          t = g W'    dx = t − mean(t) − x̂·mean(t ∘ x̂)                              (9)
          gamma without activation: dgamma = Σ_k dW'_k ∘ W_k + db' ∘ b from the gradients dW', db'
          without gamma, so that pre need not be kept                                       (10)
          sample_scale is a draw, not a parameter: it gets no gradient.
Kernels   The product with its epilogue, the row statistics, the folding and the elementwise halves of (7) and (9) are
          Triton; the three matrix products of the backward pass are torch.matmul. LN is folded when x already has the
          dtype of the product (not under autocast with a float32 stream); else it is a kernel of its own.
Saved     x, pre where an activation needs it, μ and r in fp32.
Cost      2·M·K·F flops; bytes = x + W + y (+ residual).
Sources   GELU: Hendrycks & Gimpel, arXiv:1606.08415, section 2 (erf and tanh forms, and x·sigmoid(1.702 x));
          SwiGLU: Shazeer, arXiv:2002.05202, eq. 6.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import layer_norm
from .op import Op, cast, cdiv, expect, make, power_of_2, register, usable
from .tile import activate, activate_grad, jit, tl

Norm = tuple[Tensor | None, Tensor | None, float]  # weight [K], bias [K], eps
Pair = tuple[Tensor, Tensor]  # gate and up, [F, K] each, or their biases [F]


# Launch parameters of the product, for every architecture.
SPACE = {
    "half": dict(BLOCK_M=128, BLOCK_F=128, BLOCK_K=32, GROUP=8, num_warps=8, num_stages=3),
    "fp32": dict(BLOCK_M=64, BLOCK_F=64, BLOCK_K=32, GROUP=8, num_warps=8, num_stages=2),
}


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
}


def linear(
    x: Tensor,
    weight: Tensor | Pair,
    bias: Tensor | Pair | None = None,
    *,
    norm: Norm | None = None,
    stats: Tensor | None = None,
    activation: str | None = None,
    gamma: Tensor | None = None,
    sample_scale: Tensor | None = None,
    residual: Tensor | None = None,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """sample_scale · gamma · act(LN(x) Wᵀ + b) + residual.

    Args:
        x: [..., K].
        weight: [F, K]; for "swiglu" [2F, K] with the gate first, or the pair (gate, up).
        bias: [F], or as weight; None for no bias.
        norm: (weight [K], bias [K], eps) of a LayerNorm on x.
        stats: [M, tiles, 2] fp32, row statistics of x left by the producer of x, so that LN needs no pass of its own.
        activation: "gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "swiglu" or None.
        gamma: [F], LayerScale.
        sample_scale: [B] with x [B, ..., K], drop-path factor of each image.
        residual: [..., F], added last; the output has the promoted dtype.
        return_stats: also return equation (4) for the output, which carries no gradient.

    Returns:
        [..., F]; with `return_stats` also [M, tiles, 2] fp32.

    Raises:
        ValueError: a size does not fit, or the activation is unknown.
    """
    check(x, weight, bias, activation)
    check_norm(x, norm, stats)
    check_branch(x, outputs(weight, activation), gamma, sample_scale, residual)
    if usable(x) and x.shape[-1] <= layer_norm.MAX_D:
        if not isinstance(weight, Tensor):
            weight, bias = torch.cat(weight), None if bias is None else torch.cat(bias)
        operand = cast(x)[0]
        if norm is not None and operand.dtype != x.dtype:  # a float32 stream under autocast: LN keeps its precision
            operand, norm = cast(layer_norm.layer_norm(x, *norm))[0], None
        gain, shift, eps = (None, None, 0.0) if norm is None else norm
        around = residual is operand  # torch.compile wants each tensor passed once
        keep = torch.is_grad_enabled()  # inside the Function gradients are always off
        more, residual = (eps, around, keep, return_stats), None if around else residual
        y, out_stats = _Fn.apply(
            operand, weight, bias, norm is not None, gain, shift, stats, activation, gamma, sample_scale, residual, more
        )
        return (y, out_stats) if return_stats else y
    return reference(
        x,
        weight,
        bias,
        norm=norm,
        stats=stats,
        activation=activation,
        gamma=gamma,
        sample_scale=sample_scale,
        residual=residual,
        return_stats=return_stats,
    )


def reference(
    x: Tensor,
    weight: Tensor | Pair,
    bias: Tensor | Pair | None = None,
    *,
    norm: Norm | None = None,
    stats: Tensor | None = None,
    activation: str | None = None,
    gamma: Tensor | None = None,
    sample_scale: Tensor | None = None,
    residual: Tensor | None = None,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Equations (1) to (4); `stats` says nothing that x does not, so it is not read here."""
    if norm is not None:
        x = layer_norm.reference(x, *norm)  # (1)
    if activation == "swiglu":
        gate, up = _gate_and_up(x, weight, bias)
        y = F.silu(gate) * up  # (2')
    else:
        y = F.linear(x, weight, bias)
        y = y if activation is None else ACTIVATIONS[activation](y)  # (2)
    y = layer_norm.scaled(y, gamma, sample_scale)
    y = y if residual is None else y + residual  # (3)
    return (y, row_stats(y)) if return_stats else y


@torch.no_grad()
def row_stats(y: Tensor) -> Tensor:
    """Equation (4): y [..., F] to [M, 1, 2] fp32, sum and centred sum of squares of each row."""
    rows = y.flatten(0, -2).float()
    total = rows.sum(-1)
    centred = (rows - rows.mean(-1, keepdim=True)).square().sum(-1)
    return torch.stack((total, centred), -1)[:, None]


def _gate_and_up(x: Tensor, weight: Tensor | Pair, bias: Tensor | Pair | None) -> Pair:
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias).chunk(2, -1)
    bias = (None, None) if bias is None else bias
    return F.linear(x, weight[0], bias[0]), F.linear(x, weight[1], bias[1])


def outputs(weight: Tensor | Pair, activation: str | None) -> int:
    """F, the channels that come out."""
    if not isinstance(weight, Tensor):
        return weight[0].shape[0]
    return weight.shape[0] // 2 if activation == "swiglu" else weight.shape[0]


def check(x: Tensor, weight: Tensor | Pair, bias: Tensor | Pair | None, activation: str | None) -> None:
    """Raises ValueError when weight, bias and x do not fit, or the activation is unknown."""
    if activation is not None and activation != "swiglu" and activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; use one of {', '.join((*ACTIVATIONS, 'swiglu'))} or None")
    if not isinstance(weight, Tensor) and activation != "swiglu":
        raise ValueError("weight is a pair; only activation='swiglu' takes a (gate, up) pair")
    weights = (weight,) if isinstance(weight, Tensor) else weight
    biases = (bias,) if isinstance(weight, Tensor) else (None, None) if bias is None else bias
    for w, b in zip(weights, biases, strict=True):
        expect("weight", w, F=weights[0].shape[0], K=x.shape[-1])
        if b is not None:
            expect("bias", b, F=w.shape[0])


@jit
def _stats_kernel(x_ptr, mean_ptr, rstd_ptr, M, eps, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """One program: BLOCK_M rows. μ and 1/√(σ² + ε) of x."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    inside = (m < M)[:, None] & (k < K)[None, :]
    x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=inside, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_K]
    mean = tl.sum(x, 1) / K
    centred = tl.where(inside, x - mean[:, None], 0.0)
    tl.store(mean_ptr + m, mean, mask=m < M)
    tl.store(rstd_ptr + m, 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / K + eps), mask=m < M)


@jit
def _merge_kernel(
    stats_ptr, mean_ptr, rstd_ptr, M, eps, K: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows. The same from partial statistics over WIDTH columns each (Chan et al., 1979)."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    t = tl.arange(0, BLOCK_T)
    inside = (m < M)[:, None] & (t < TILES)[None, :]
    at = stats_ptr + (m[:, None] * TILES + t[None, :]) * 2
    total = tl.load(at, mask=inside, other=0.0)  # [BLOCK_M, BLOCK_T]
    spread = tl.load(at + 1, mask=inside, other=0.0)
    count = tl.minimum(WIDTH, K - t * WIDTH).to(tl.float32)[None, :]
    mean = tl.sum(total, 1) / K
    between = total / count - mean[:, None]
    spread += tl.where(inside, count * between * between, 0.0)
    tl.store(mean_ptr + m, mean, mask=m < M)
    tl.store(rstd_ptr + m, 1.0 / tl.sqrt(tl.sum(spread, 1) / K + eps), mask=m < M)


@jit
def _fold_kernel(
    w_ptr, bias_ptr, norm_weight_ptr, norm_bias_ptr, folded_ptr, colsum_ptr, const_ptr, F, K: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_SHIFT: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_F outputs. Equation (5); sums see the rounded W', so that a constant in x cancels exactly."""
    f = tl.program_id(0).to(tl.int64) * BLOCK_F + tl.arange(0, BLOCK_F)
    k = tl.arange(0, BLOCK_K)
    in_f, in_k = f < F, k < K
    inside = in_f[:, None] & in_k[None, :]
    w = tl.load(w_ptr + f[:, None] * K + k[None, :], mask=inside, other=0.0).to(tl.float32)  # [BLOCK_F, BLOCK_K]
    const = tl.zeros([BLOCK_F], tl.float32)
    if HAS_BIAS:
        const += tl.load(bias_ptr + f, mask=in_f, other=0.0).to(tl.float32)
    if HAS_SHIFT:
        const += tl.sum(w * tl.load(norm_bias_ptr + k, mask=in_k, other=0.0).to(tl.float32)[None, :], 1)
    if HAS_WEIGHT:
        w *= tl.load(norm_weight_ptr + k, mask=in_k, other=0.0).to(tl.float32)[None, :]
    folded = w.to(folded_ptr.dtype.element_ty)
    tl.store(folded_ptr + f[:, None] * K + k[None, :], folded, mask=inside)
    tl.store(colsum_ptr + f, tl.sum(folded.to(tl.float32), 1), mask=in_f)
    tl.store(const_ptr + f, const, mask=in_f)


@jit
def _product(x_ptr, w_ptr, m, f, M, F, x_stride, K, PRECISION: tl.constexpr, EVEN: tl.constexpr,
             BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """x Wᵀ for rows m and outputs f, [BLOCK_M, BLOCK_F] fp32; rows and outputs past the end repeat the last one."""
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + tl.minimum(m, M - 1)[:, None] * x_stride + k[None, :]
    w_at = w_ptr + tl.minimum(f, F - 1)[None, :] * K + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_F], tl.float32)
    for first in range(0, K, BLOCK_K):
        if EVEN:
            x, w = tl.load(x_at), tl.load(w_at)
        else:
            x = tl.load(x_at, mask=(first + k < K)[None, :], other=0.0)
            w = tl.load(w_at, mask=(first + k < K)[:, None], other=0.0)
        acc = tl.dot(x.to(w.dtype), w, acc, input_precision=PRECISION)
        x_at += BLOCK_K
        w_at += BLOCK_K
    return acc


@jit
def _with_norm(acc, colsum_ptr, const_ptr, mean, rstd, f, F, HAS_NORM: tl.constexpr, HAS_CONST: tl.constexpr):
    """Equation (6), or the plain bias."""
    if HAS_NORM:
        acc = rstd[:, None] * (acc - mean[:, None] * tl.load(colsum_ptr + f, mask=f < F, other=0.0)[None, :])
    if HAS_CONST:
        acc += tl.load(const_ptr + f, mask=f < F, other=0.0).to(tl.float32)[None, :]
    return acc


@jit
def _fwd_kernel(
    x_ptr, w_ptr, const_ptr, colsum_ptr, mean_ptr, rstd_ptr, gamma_ptr, scale_ptr, residual_ptr,
    y_ptr, pre_ptr, stats_ptr, M, F, K, x_stride, rows_per_image, tiles_m, tiles_f,
    ACTIVATION: tl.constexpr, HAS_NORM: tl.constexpr, HAS_CONST: tl.constexpr, HAS_GAMMA: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SAVE: tl.constexpr, STATS: tl.constexpr,
    PRECISION: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One program: one tile of y, [BLOCK_M, BLOCK_F]. Equations (2) to (4) and (6)."""
    pid = tl.program_id(0)
    wide = GROUP * tiles_f  # GROUP row tiles share their columns of W in L2
    first = pid // wide * GROUP
    size = tl.minimum(tiles_m - first, GROUP)
    tile_f = pid % wide // size
    m = (first + pid % wide % size).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    f = tile_f.to(tl.int64) * BLOCK_F + tl.arange(0, BLOCK_F)
    in_m, in_f = m < M, f < F
    inside = in_m[:, None] & in_f[None, :]
    mean = tl.load(mean_ptr + m, mask=in_m, other=0.0) if HAS_NORM else m
    rstd = tl.load(rstd_ptr + m, mask=in_m, other=0.0) if HAS_NORM else m
    y = _product(x_ptr, w_ptr, m, f, M, F, x_stride, K, PRECISION, EVEN, BLOCK_M, BLOCK_F, BLOCK_K)
    y = _with_norm(y, colsum_ptr, const_ptr, mean, rstd, f, F, HAS_NORM, HAS_CONST)
    if ACTIVATION == "swiglu":  # the value's weights lie F rows below the gate's
        up_ptr = w_ptr + tl.cast(F, tl.int64) * K
        up = _product(x_ptr, up_ptr, m, f, M, F, x_stride, K, PRECISION, EVEN, BLOCK_M, BLOCK_F, BLOCK_K)
        up = _with_norm(up, colsum_ptr, const_ptr, mean, rstd, F + f, 2 * F, HAS_NORM, HAS_CONST)
        if SAVE:
            tl.store(pre_ptr + m[:, None] * 2 * F + f[None, :], y.to(pre_ptr.dtype.element_ty), mask=inside)
            tl.store(pre_ptr + m[:, None] * 2 * F + F + f[None, :], up.to(pre_ptr.dtype.element_ty), mask=inside)
        y = activate(y, ACTIVATION) * up
    else:
        if SAVE:
            tl.store(pre_ptr + m[:, None] * F + f[None, :], y.to(pre_ptr.dtype.element_ty), mask=inside)
        y = activate(y, ACTIVATION)
    if HAS_GAMMA:
        y *= tl.load(gamma_ptr + f, mask=in_f, other=0.0).to(tl.float32)[None, :]
    if HAS_SCALE:
        y *= tl.load(scale_ptr + m // rows_per_image, mask=in_m, other=0.0).to(tl.float32)[:, None]
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + m[:, None] * F + f[None, :], mask=inside, other=0.0).to(tl.float32)
    rounded = y.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + m[:, None] * F + f[None, :], rounded, mask=inside)
    if STATS:
        y = tl.where(inside, rounded.to(tl.float32), 0.0)
        total = tl.sum(y, 1)
        count = tl.minimum(BLOCK_F, F - tile_f * BLOCK_F)
        centred = tl.where(inside, y - (total / count)[:, None], 0.0)
        at = stats_ptr + (m * tiles_f + tile_f) * 2
        tl.store(at, total, mask=in_m)
        tl.store(at + 1, tl.sum(centred * centred, 1), mask=in_m)


@jit
def _bwd_kernel(
    dy_ptr, pre_ptr, gamma_ptr, scale_ptr, mean_ptr, rstd_ptr, dpre_ptr, partial_ptr, M, rows_per_image, F,
    ACTIVATION: tl.constexpr, HAS_NORM: tl.constexpr, HAS_GAMMA: tl.constexpr, HAS_SCALE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows of BLOCK_F outputs. dpre of equation (7), and its share of the sums over rows."""
    f = tl.program_id(1).to(tl.int64) * BLOCK_F + tl.arange(0, BLOCK_F)
    in_f = f < F
    start = tl.program_id(0).to(tl.int64) * ROWS
    gamma = tl.full([BLOCK_F], 1.0, tl.float32)
    if HAS_GAMMA:
        gamma = tl.load(gamma_ptr + f, mask=in_f, other=0.0).to(tl.float32)
    dbias = tl.zeros([BLOCK_F], tl.float32)
    dbias_up = tl.zeros([BLOCK_F], tl.float32)
    dgamma = tl.zeros([BLOCK_F], tl.float32)
    weighted = tl.zeros([BLOCK_F], tl.float32)
    weighted_up = tl.zeros([BLOCK_F], tl.float32)
    for step in range(0, ROWS, BLOCK_M):
        m = start + step + tl.arange(0, BLOCK_M)
        in_m = m < M
        inside = in_m[:, None] & in_f[None, :]
        g = tl.load(dy_ptr + m[:, None] * F + f[None, :], mask=inside, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_F]
        if HAS_SCALE:
            g *= tl.load(scale_ptr + m // rows_per_image, mask=in_m, other=0.0).to(tl.float32)[:, None]
        mean = tl.load(mean_ptr + m, mask=in_m, other=0.0) if HAS_NORM else tl.zeros([BLOCK_M], tl.float32)
        rstd = tl.load(rstd_ptr + m, mask=in_m, other=0.0) if HAS_NORM else tl.zeros([BLOCK_M], tl.float32)
        if ACTIVATION == "swiglu":
            at = m[:, None] * 2 * F + f[None, :]
            pre = tl.load(pre_ptr + at, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(pre_ptr + at + F, mask=inside, other=0.0).to(tl.float32)
            gate = activate(pre, ACTIVATION)
            dgamma += tl.sum(g * gate * up, 0)
            g *= gamma[None, :]
            dup = g * gate
            g = g * up * activate_grad(pre, ACTIVATION)
            dbias_up += tl.sum(dup, 0)
            if HAS_NORM:
                dup = (dup * rstd[:, None]).to(dpre_ptr.dtype.element_ty).to(tl.float32)
                weighted_up += tl.sum(dup * mean[:, None], 0)
            tl.store(dpre_ptr + at + F, dup.to(dpre_ptr.dtype.element_ty), mask=inside)
        else:
            at = m[:, None] * F + f[None, :]
            if ACTIVATION is not None:
                pre = tl.load(pre_ptr + at, mask=inside, other=0.0).to(tl.float32)
                dgamma += tl.sum(g * activate(pre, ACTIVATION), 0)
                g = g * gamma[None, :] * activate_grad(pre, ACTIVATION)
        dbias += tl.sum(g, 0)
        if HAS_NORM:  # g = rstd·dpre, rounded before it is summed against μ, so that a constant in x cancels
            g = (g * rstd[:, None]).to(dpre_ptr.dtype.element_ty).to(tl.float32)
            weighted += tl.sum(g * mean[:, None], 0)
        tl.store(dpre_ptr + at, g.to(dpre_ptr.dtype.element_ty), mask=inside)
    at = partial_ptr + tl.program_id(0).to(tl.int64) * 5 * F + f
    tl.store(at, dbias, mask=in_f)
    tl.store(at + F, dbias_up, mask=in_f)
    tl.store(at + 2 * F, dgamma, mask=in_f)
    tl.store(at + 3 * F, weighted, mask=in_f)
    tl.store(at + 4 * F, weighted_up, mask=in_f)


@jit
def _bwd_norm_kernel(
    t_ptr, x_ptr, mean_ptr, rstd_ptr, dx_ptr, M, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):
    """One program: BLOCK_M rows. dx of equation (9) from t = g W'."""
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
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)


def _whole_rows(K):
    """Launch parameters of the kernels that hold whole rows of K values."""
    block = power_of_2(K)
    return max(1, 1024 // block), block, dict(num_warps=min(max(block // 1024, 1), 16), enable_fp_fusion=True)


def _blocks(x):
    """Launch parameters of the product."""
    return dict(SPACE["fp32" if x.dtype == torch.float32 else "half"], enable_fp_fusion=True)


def _mm32(a, b):
    """a b, summed and returned in fp32."""
    if a.dtype != torch.float32 and a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _precision(x):
    """float32 dot products follow torch.set_float32_matmul_precision."""
    return "ieee" if x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest" else "tf32"


def _fold(weight, bias, norm_weight, norm_bias, dtype):
    """Equation (5): (W' [F, K] in `dtype`, its column sums [F] and the constant [F], fp32)."""
    folded, colsum, const = _fold_fake(weight, bias, norm_weight, norm_bias, dtype)
    rows, block, options = _whole_rows(weight.shape[1])
    _fold_kernel[(cdiv(len(weight), rows),)](
        weight.contiguous(), bias, norm_weight, norm_bias, folded, colsum, const, len(weight), K=weight.shape[1],
        HAS_BIAS=bias is not None, HAS_WEIGHT=norm_weight is not None, HAS_SHIFT=norm_bias is not None,
        BLOCK_F=rows, BLOCK_K=block, **options,
    )  # fmt: skip
    return folded, colsum, const


def _fold_fake(weight, bias, norm_weight, norm_bias, dtype):
    colsum, const = (weight.new_empty(len(weight), dtype=torch.float32) for _ in range(2))
    return weight.new_empty(weight.shape, dtype=dtype), colsum, const


def _fwd(x, weight, const, colsum, stats, eps, activation, gamma, sample_scale, residual, save, return_stats):
    """(y, pre, mean, rstd, stats): LN is folded when `colsum` is given; what is not asked for is empty."""
    outputs = _fwd_fake(
        x, weight, const, colsum, stats, eps, activation, gamma, sample_scale, residual, save, return_stats
    )
    y, pre, mean, rstd, out_stats = outputs
    F_, K, weight = y.shape[-1], x.shape[-1], weight.contiguous()
    rows = x.reshape(-1, K)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    residual = None if residual is None else residual.contiguous()
    M, blocks = len(rows), _blocks(x)
    if not M:
        return outputs
    if colsum is not None and stats is None:
        rows = rows.contiguous()
        per, block, options = _whole_rows(K)
        _stats_kernel[(cdiv(M, per),)](rows, mean, rstd, M, eps, K=K, BLOCK_M=per, BLOCK_K=block, **options)
    elif colsum is not None:
        tiles = stats.shape[1]
        per, block, options = _whole_rows(tiles)
        width = power_of_2(cdiv(K, tiles))
        _merge_kernel[(cdiv(M, per),)](
            stats, mean, rstd, M, eps, K=K, WIDTH=width, TILES=tiles, BLOCK_M=per, BLOCK_T=block, **options
        )
    tiles_m, tiles_f = cdiv(M, blocks["BLOCK_M"]), cdiv(F_, blocks["BLOCK_F"])
    _fwd_kernel[(tiles_m * tiles_f,)](
        rows, weight, const, colsum, mean, rstd, gamma, sample_scale, residual,
        y, pre, out_stats, M, F_, K, rows.stride(0), cdiv(M, x.shape[0]), tiles_m, tiles_f,
        ACTIVATION=activation, HAS_NORM=colsum is not None, HAS_CONST=const is not None, HAS_GAMMA=gamma is not None,
        HAS_SCALE=sample_scale is not None, HAS_RESIDUAL=residual is not None, SAVE=pre.numel() > 0,
        STATS=return_stats, PRECISION=_precision(x), EVEN=K % blocks["BLOCK_K"] == 0, **blocks,
    )  # fmt: skip
    return outputs


def _fwd_fake(x, weight, const, colsum, stats, eps, activation, gamma, sample_scale, residual, save, return_stats):
    F_ = len(weight) // 2 if activation == "swiglu" else len(weight)
    M = math.prod(x.shape[:-1])
    dtype = _widest(x, gamma, residual)
    mean, rstd = (x.new_empty(0 if colsum is None else M, dtype=torch.float32) for _ in range(2))
    shape = (M, cdiv(F_, _blocks(x)["BLOCK_F"]), 2) if return_stats else (0,)
    pre = x.new_empty((M, len(weight)) if save else (0,))
    return x.new_empty(*x.shape[:-1], F_, dtype=dtype), pre, mean, rstd, x.new_empty(shape, dtype=torch.float32)


def _widest(x, gamma, residual):
    """The dtype of a branch's end, as PyTorch promotes it."""
    for t in (gamma, residual):
        x = x if t is None or torch.promote_types(x.dtype, t.dtype) == x.dtype else t
    return x.dtype


def _bwd(dy, x, weight, bias, pre, gamma, sample_scale, mean, rstd, norm_weight, norm_bias, activation, norm, need_x):
    """(dx, dweight, dbias, dgamma, dnorm_weight, dnorm_bias) by equations (7) to (10); unused ones are empty."""
    F_, K = dy.shape[-1], x.shape[-1]
    rows, M = x.reshape(-1, K).contiguous(), math.prod(dy.shape[:-1])
    late = gamma is not None and activation is None  # gamma after a linear map: equation (10)
    dpre = torch.empty(M, len(weight), dtype=x.dtype, device=x.device)
    per = max(64, power_of_2(cdiv(M, 256)))
    programs = max(cdiv(M, per), 1)
    partial = torch.zeros(programs, 5, F_, dtype=torch.float32, device=x.device)
    if M:
        _bwd_kernel[(programs, cdiv(F_, 64))](
            dy.contiguous(), pre, gamma, sample_scale, mean, rstd, dpre, partial, M, cdiv(M, x.shape[0]), F_,
            ACTIVATION=activation, HAS_NORM=norm, HAS_GAMMA=gamma is not None and not late,
            HAS_SCALE=sample_scale is not None, ROWS=per, BLOCK_M=32, BLOCK_F=64, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    dbias, dbias_up, dgamma, weighted, weighted_up = (row.clone() for row in partial.sum(0))
    if activation == "swiglu":
        dbias, weighted = torch.cat((dbias, dbias_up)), torch.cat((weighted, weighted_up))
    wide, dx = weight.float(), x.new_empty(0)
    scaled = wide if norm_weight is None else wide * norm_weight.float()
    size = 1.0  # of gamma, a power of two: 1e-6 times a weight would underflow in fp16
    if late:
        size = gamma.float().abs().amax().clamp_min(1e-30).log2().floor().exp2()
        scaled = scaled * (gamma.float() / size)[:, None]
    if need_x and norm:
        t, dx = (dpre @ scaled.to(x.dtype)) * size, torch.empty_like(rows)
        per, block, options = _whole_rows(K)
        if M:
            _bwd_norm_kernel[(cdiv(M, per),)](t, rows, mean, rstd, dx, M, K=K, BLOCK_M=per, BLOCK_K=block, **options)
    elif need_x:
        dx = (dpre @ scaled.to(x.dtype)) * size
    g = _mm32(dpre.T, rows)
    if norm:
        g = g - weighted[:, None]  # (8): g becomes dpreᵀ x̂
    dnorm_weight, dnorm_bias = dbias.new_empty(0), dbias.new_empty(0)
    dweight = g if norm_weight is None else g * norm_weight.float()
    if norm_bias is not None:
        dweight = dweight + dbias[:, None] * norm_bias.float()
    if late:
        dgamma = (dweight * wide).sum(1) + (0 if bias is None else dbias * bias.float())
        dweight, dbias, g = (t * gamma.float().view(-1, *[1] * (t.dim() - 1)) for t in (dweight, dbias, g))
    if norm:
        dnorm_weight, dnorm_bias = (g * wide).sum(0), (dbias[:, None] * wide).sum(0)
    return dx.view(x.shape if need_x else 0), dweight.to(weight.dtype), dbias, dgamma, dnorm_weight, dnorm_bias


def _bwd_fake(
    dy, x, weight, bias, pre, gamma, sample_scale, mean, rstd, norm_weight, norm_bias, activation, norm, need_x
):
    F_, K = dy.shape[-1], x.shape[-1]
    fp32 = dict(dtype=torch.float32)
    return (
        x.new_empty(x.shape if need_x else (0,)),
        weight.new_empty(weight.shape),
        x.new_empty(len(weight), **fp32),
        x.new_empty(F_, **fp32),
        x.new_empty(K if norm else 0, **fp32),
        x.new_empty(K if norm else 0, **fp32),
    )


_fold_op = register(
    "fold",
    "(Tensor weight, Tensor? bias, Tensor? norm_weight, Tensor? norm_bias, ScalarType dtype) "
    "-> (Tensor, Tensor, Tensor)",
    _fold,
    _fold_fake,
)
_fwd_op = register(
    "linear_fwd",
    "(Tensor x, Tensor weight, Tensor? const, Tensor? colsum, Tensor? stats, float eps, str? activation, "
    "Tensor? gamma, Tensor? sample_scale, Tensor? residual, bool save, bool return_stats) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fwd,
    _fwd_fake,
)
_bwd_op = register(
    "linear_bwd",
    "(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor pre, Tensor? gamma, Tensor? sample_scale, Tensor mean, "
    "Tensor rstd, Tensor? norm_weight, Tensor? norm_bias, str? activation, bool norm, bool need_x) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _bwd,
    _bwd_fake,
)


class _Fn(torch.autograd.Function):
    """Ties linear_fwd to linear_bwd; saves x, the pre-activation where one is needed, and row statistics."""

    @staticmethod
    def forward(ctx, x, weight, bias, norm, norm_weight, norm_bias, stats, activation, gamma, scale, residual, more):
        eps, around, keep, return_stats = more
        w, const, colsum = weight.to(x.dtype), bias, None
        if norm:
            w, colsum, const = _fold_op(weight, bias, norm_weight, norm_bias, x.dtype)
        save = keep and activation is not None and any(ctx.needs_input_grad)
        y, pre, mean, rstd, out_stats = _fwd_op(
            x, w, const, colsum, stats, eps, activation, gamma, scale, x if around else residual, save, return_stats
        )
        ctx.save_for_backward(x, weight, bias, pre, gamma, scale, mean, rstd, norm_weight, norm_bias)
        ctx.facts = activation, norm, around, None if residual is None else residual.dtype
        ctx.mark_non_differentiable(out_stats)
        return y, out_stats

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, _):
        x, weight, bias, pre, gamma, scale, mean, rstd, norm_weight, norm_bias = ctx.saved_tensors
        activation, norm, around, residual_dtype = ctx.facts
        need_x = ctx.needs_input_grad[0]
        if not any(ctx.needs_input_grad[:10]):  # only the residual learns
            return (*[None] * 10, dy.to(residual_dtype), None)
        dx, dw, db, dgamma, dnorm_weight, dnorm_bias = _bwd_op(
            dy, x, weight, bias, pre, gamma, scale, mean, rstd, norm_weight, norm_bias, activation, norm, need_x
        )
        return (
            (dx + dy if around else dx) if need_x else None,
            dw,
            None if bias is None else db.to(bias.dtype),
            None,
            None if norm_weight is None else dnorm_weight.to(norm_weight.dtype),
            None if norm_bias is None else dnorm_bias.to(norm_bias.dtype),
            None,
            None,
            None if gamma is None else dgamma.to(gamma.dtype),
            None,
            None if residual_dtype is None else dy.to(residual_dtype),
            None,
        )


def check_norm(x: Tensor, norm: Norm | None, stats: Tensor | None) -> None:
    """Raises ValueError when the LayerNorm's parameters or the row statistics do not fit x."""
    for name, parameter in zip(("norm weight", "norm bias"), norm[:2] if norm else (), strict=False):
        if parameter is not None:
            expect(name, parameter, K=x.shape[-1])
    if stats is not None:
        expect("stats", stats, M=math.prod(x.shape[:-1]), tiles=None, **{"2": 2})


def check_branch(
    x: Tensor, channels: int, gamma: Tensor | None, sample_scale: Tensor | None, residual: Tensor | None
) -> None:
    """Raises ValueError when what ends a residual branch does not fit an output of that many channels."""
    if gamma is not None:
        expect("gamma", gamma, F=channels)
    if sample_scale is not None:
        expect("sample_scale", sample_scale, B=x.shape[0])
    if residual is not None and residual.shape != (expected := (*x.shape[:-1], channels)):
        raise ValueError(f"residual must have shape {list(expected)}, got {list(residual.shape)}")


def _inputs(case: dict[str, int], dtype: torch.dtype, device: torch.device | str) -> dict:
    randn, (B, N, K, F_) = make(device, dtype), (case[a] for a in ("B", "N", "K", "F"))
    arguments = {"x": randn(B, N, K), "weight": randn(F_, K, scale=K**-0.5), "bias": randn(F_)}
    if "swiglu" in case:
        arguments["weight"] = (arguments["weight"], randn(F_, K, scale=K**-0.5))
        arguments["bias"] = (arguments["bias"], randn(F_))
        arguments["activation"] = "swiglu"
    if "norm" in case:
        arguments |= {"norm": (randn(K), randn(K), 1e-6), "activation": "gelu"}
    if "branch" in case:
        keep = torch.tensor([b % 2 / 0.5 for b in range(B)], dtype=dtype, device=device)
        arguments |= {"gamma": randn(F_), "sample_scale": keep, "residual": randn(B, N, F_)}
    return arguments


OP = Op(
    name="linear",
    run=linear,
    reference=reference,
    cases={
        "norm_gelu": dict(B=2, N=3, K=5, F=7, norm=1),
        "branch": dict(B=2, N=3, K=5, F=4, branch=1),
        "swiglu": dict(B=2, N=3, K=5, F=4, swiglu=1),
    },
    inputs=_inputs,
    ragged={
        "norm_gelu": dict(B=2, N=49, K=48, F=96, norm=1),
        "odd": dict(B=3, N=5, K=33, F=70, norm=1),
        "branch": dict(B=4, N=17, K=40, F=64, branch=1),
        "swiglu": dict(B=2, N=10, K=32, F=24, swiglu=1),
        "plain": dict(B=1, N=197, K=64, F=130),
        "empty": dict(B=0, N=3, K=8, F=4),
    },
)
