"""A linear layer with what stands before and after it in a Transformer: LayerNorm, activation, scales, residual.

Math      x̂ = LN(x) when `norm` is given, else x                                 [M, K]      (1)
          h = act(x̂ Wᵀ + b)                                                     [M, F]      (2)
          h = silu(x̂ W_gᵀ + b_g) ∘ (x̂ W_uᵀ + b_u)    for activation "swiglu"                (2')
          y = sample_scale · layer_scale · h + residual                                [M, F]      (3)
          stats = (Σ y, Σ (y − mean y)²) over each tile of columns           [M, tiles, 2]   (4)
Folded    W' = W·diag(γ), its column sums s and the constant c, as in `fold`                 (5)
          LN(x) Wᵀ + b = r·(x W'ᵀ) − r·μ·s + c,  r = 1/√(σ² + ε), μ and σ² of each row       (6)
Backward  equations (7) to (10) of `linear_backward`.
Kernels   The product with its epilogue, the row statistics, the folding and the elementwise halves of (7) and (9) are
          Triton; the three matrix products of the backward pass are torch.matmul. LN is folded when x already has the
          dtype of the product (not under autocast with a float32 stream); else it is a kernel of its own. On Hopper
          rows of x and W are taken in the order in which matrix instructions deal a tile out: `tile.dealt_rows`.
Saved     x, pre where an activation needs it, μ and r in fp32.
Cost      2·M·K·F flops; bytes = x + W + y (+ residual).
Sources   GELU: Hendrycks & Gimpel, arXiv:1606.08415, section 2 (erf and tanh forms, and x·sigmoid(1.702 x));
          SwiGLU: Shazeer, arXiv:2002.05202, eq. 6.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from . import check, dispatch, eager, fold, layer_norm
from .argument import flag
from .backend import kernels_available
from .check import Norm, Pair
from .eager import ACTIVATIONS
from .fold import Folded
from .launch import cdiv, config, power_of_2, precision
from .layer_norm import merged
from .linear_backward import bwd_op
from .op import Op, can_fold_norm, cast, make, once_differentiable, register
from .tile import (
    activate,
    add_stats,
    collected,
    columns,
    dealt_columns,
    dealt_rows,
    jit,
    no_stats,
    put_stats,
    tl,
)

# Launch parameters of the product that fit every architecture; tuned/ has better ones for some.
SPACE = {
    "half": dict(BLOCK_M=128, BLOCK_F=128, BLOCK_K=32, GROUP=8, PARTS=4, DEAL=0, num_warps=4, num_stages=3),
    "wide": dict(BLOCK_M=128, BLOCK_F=128, BLOCK_K=32, GROUP=8, PARTS=4, DEAL=0, num_warps=8, num_stages=3),
    "gated": dict(BLOCK_M=128, BLOCK_F=64, BLOCK_K=32, GROUP=8, PARTS=4, DEAL=0, num_warps=4, num_stages=3),
    "fp32": dict(BLOCK_M=64, BLOCK_F=64, BLOCK_K=32, GROUP=8, PARTS=2, DEAL=0, num_warps=8, num_stages=2),
    "odd": dict(BLOCK_M=64, BLOCK_F=64, BLOCK_K=32, GROUP=8, PARTS=4, DEAL=0, num_warps=4, num_stages=3),
}


def linear(
    x: Tensor,
    weight: Tensor | Pair | Folded,
    bias: Tensor | Pair | None = None,
    *,
    norm: Norm | None = None,
    stats: Tensor | None = None,
    activation: str | None = None,
    layer_scale: Tensor | None = None,
    sample_scale: Tensor | None = None,
    residual: Tensor | None = None,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """sample_scale · layer_scale · act(LN(x) Wᵀ + b) + residual.

    Args:
        x: [..., K].
        weight: [F, K]; for "swiglu" [2F, K] with the gate first, or the pair (gate, up). Or what `fold` made of it and
            its bias; then `norm` is (None, None, eps).
        bias: [F], or as weight; None for no bias.
        norm: (weight [K], bias [K], eps) of a LayerNorm on x.
        stats: [M, tiles, 2] fp32, row statistics of x left by the producer of x, so that LN needs no pass of its own.
        activation: "gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "swiglu" or None.
        layer_scale: [F], LayerScale.
        sample_scale: [B] with x [B, ..., K], drop-path factor of each image.
        residual: [..., F], added last; the output has the promoted dtype.
        return_stats: also return equation (4) for the output, which carries no gradient.

    Returns:
        [..., F]; with `return_stats` also [M, tiles, 2] fp32.

    Raises:
        ValueError: a size or device does not fit, or the activation is unknown.
        TypeError: an argument is of another type or dtype.
    """
    check.projection(x, weight, bias, activation)
    check.norm(x, norm, stats, weight)
    check.branch(x, outputs(weight, activation), layer_scale, sample_scale, residual)
    flag("return_stats", return_stats)
    if kernels_available(x) and x.shape[-1] <= layer_norm.MAX_D:
        operand, norm = before(x, norm, weight)
        around = residual is operand  # torch.compile wants each tensor passed once
        keep = torch.is_grad_enabled()  # inside the Function gradients are always off
        eps, residual = 0.0 if norm is None else norm[2], None if around else residual
        facts = activation, norm is not None, eps, around, keep, return_stats
        stats = None if norm is None else stats
        y, y_stats = _Fn.apply(
            operand, *operands(weight, bias, norm), stats, layer_scale, sample_scale, residual, facts
        )
        return (y, y_stats) if return_stats else y
    return reference(
        x,
        weight,
        bias,
        norm=norm,
        stats=stats,
        activation=activation,
        layer_scale=layer_scale,
        sample_scale=sample_scale,
        residual=residual,
        return_stats=return_stats,
    )


def reference(
    x: Tensor,
    weight: Tensor | Pair | Folded,
    bias: Tensor | Pair | None = None,
    *,
    norm: Norm | None = None,
    stats: Tensor | None = None,
    activation: str | None = None,
    layer_scale: Tensor | None = None,
    sample_scale: Tensor | None = None,
    residual: Tensor | None = None,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Equations (1) to (4); `stats` says nothing that x does not, so it is not read here."""
    if isinstance(weight, Folded) and weight.source is not None:
        (weight,), (bias,), *gains = weight.source
        norm = (*gains, norm[2])
    if norm is not None:
        x = layer_norm.reference(x, *norm)  # (1)
    if isinstance(weight, Folded):
        weight, bias = weight.weight, weight.const.to(x.dtype)
    y = F.linear(x, *operands(weight, bias, None)[:2])
    if activation == "swiglu":
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up  # (2')
    else:
        y = y if activation is None else ACTIVATIONS[activation](y)  # (2)
    y = layer_norm.scaled(y, layer_scale, sample_scale)
    y = y if residual is None else y + residual  # (3)
    return (y, layer_norm.row_stats(y)) if return_stats else y


def before(x: Tensor, norm: Norm | None, weight: Tensor | Pair | Folded) -> tuple[Tensor, Norm | None]:
    """x as the operand of the product, and the LayerNorm still to be folded in."""
    if norm is not None and not (can_fold_norm(x) and (isinstance(weight, Folded) or fold.pays(x, _rows(weight)))):
        # few rows, or a float32 stream under autocast, where LN keeps its precision
        return cast(layer_norm.layer_norm(x, *norm))[0], None
    return cast(x)[0], norm


def _rows(weight: Tensor | Pair) -> int:
    """Outputs of the product itself, gates and values."""
    return len(weight) if isinstance(weight, Tensor) else sum(map(len, weight))


def operands(
    weight: Tensor | Pair | Folded, bias: Tensor | Pair | None, norm: Norm | None
) -> tuple[Tensor | None, ...]:
    """What the Function takes: weight, bias and the norm's, which get gradients; W', column sums and constant or None.

    What was folded without a source is itself weight and bias.
    """
    gain, shift, _ = norm or (None, None, 0.0)
    if isinstance(weight, Folded):
        folded, colsum, const, source = weight
        if source is None:
            return folded, const, gain, shift, None, colsum, None
        (weight,), (bias,), gain, shift = source
        return weight, bias, gain, shift, folded, colsum, const
    if not isinstance(weight, Tensor):
        weight, bias = torch.cat(weight), None if bias is None else torch.cat(bias)
    return weight, bias, gain, shift, None, None, None


def folded(x: Tensor, operands: tuple[Tensor | None, ...], norm: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(weight in x's dtype, constant, column sums or None) of the product, from `operands`; equation (5) if need be."""
    weight, bias, gain, shift, folded, colsum, const = operands
    if folded is not None:
        return folded, const, colsum if norm else None
    if norm and colsum is None:
        (made,) = fold.run([fold.Group((weight,), (bias,), gain, shift)], x.dtype)
        return made.weight, made.const, made.colsum
    return weight.to(x.dtype), bias, colsum if norm else None


def outputs(weight: Tensor | Pair | Folded, activation: str | None) -> int:
    """F, the channels that come out."""
    if isinstance(weight, Folded):
        weight = weight.weight
    if not isinstance(weight, Tensor):
        return weight[0].shape[0]
    return weight.shape[0] // 2 if activation == "swiglu" else weight.shape[0]


@jit
def _products(x_ptr, w_ptr, m, f, M, F, x_stride, K, PAIR: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
              BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """x Wᵀ for rows m and outputs f, [BLOCK_M, BLOCK_F] fp32, and with PAIR for the outputs F rows below.

    Rows and outputs past the end repeat the last one.
    """
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + tl.minimum(m, M - 1)[:, None] * x_stride + k[None, :]
    w_at = w_ptr + tl.minimum(f, F - 1)[None, :] * K + k[:, None]
    first_sum = tl.zeros([BLOCK_M, BLOCK_F], tl.float32)
    second_sum = tl.zeros([BLOCK_M, BLOCK_F if PAIR else 1], tl.float32)
    below = tl.cast(F, tl.int64) * K
    for first in range(0, K, BLOCK_K):
        if EVEN:
            x, w = tl.load(x_at), tl.load(w_at)
        else:
            x = tl.load(x_at, mask=(first + k < K)[None, :], other=0.0)
            w = tl.load(w_at, mask=(first + k < K)[:, None], other=0.0)
        first_sum = tl.dot(x.to(w.dtype), w, first_sum, input_precision=PRECISION)
        if PAIR:
            if EVEN:
                w = tl.load(w_at + below)
            else:
                w = tl.load(w_at + below, mask=(first + k < K)[:, None], other=0.0)
            second_sum = tl.dot(x.to(w.dtype), w, second_sum, input_precision=PRECISION)
        x_at += BLOCK_K
        w_at += BLOCK_K
    return first_sum, second_sum


@jit
def with_norm(acc, colsum_ptr, const_ptr, mean, rstd, f, F, HAS_NORM: tl.constexpr, HAS_CONST: tl.constexpr):
    """Equation (6), or the plain bias; outputs past the end repeat the last one."""
    f = tl.minimum(f, F - 1)
    if HAS_NORM:
        acc = rstd[:, None] * (acc - mean[:, None] * tl.load(colsum_ptr + f)[None, :])
    if HAS_CONST:
        acc += tl.load(const_ptr + f).to(tl.float32)[None, :]
    return acc


@jit
def finish(
    y, up, const_ptr, colsum_ptr, layer_scale_ptr, residual_ptr, y_ptr, pre_ptr, mean, rstd, scale, count, total,
    spread, m, f, M, F,
    ACTIVATION: tl.constexpr, HAS_NORM: tl.constexpr, HAS_CONST: tl.constexpr, HAS_LAYER_SCALE: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SAVE: tl.constexpr, STATS: tl.constexpr,
):  # fmt: skip
    """Everything after the product for columns f of a tile; adds them to the statistics of the columns before."""
    in_m, in_f = m < M, f < F
    inside = in_m[:, None] & in_f[None, :]
    EXACT: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    y = with_norm(y, colsum_ptr, const_ptr, mean, rstd, f, F, HAS_NORM, HAS_CONST)
    if ACTIVATION == "swiglu":  # the value's weights lie F rows below the gate's
        up = with_norm(up, colsum_ptr, const_ptr, mean, rstd, F + f, 2 * F, HAS_NORM, HAS_CONST)
        if SAVE:
            tl.store(pre_ptr + m[:, None] * 2 * F + f[None, :], y.to(pre_ptr.dtype.element_ty), mask=inside)
            tl.store(pre_ptr + m[:, None] * 2 * F + F + f[None, :], up.to(pre_ptr.dtype.element_ty), mask=inside)
        y = activate(y, ACTIVATION, EXACT) * up
    else:
        if SAVE:
            tl.store(pre_ptr + m[:, None] * F + f[None, :], y.to(pre_ptr.dtype.element_ty), mask=inside)
        y = activate(y, ACTIVATION, EXACT)
    if HAS_LAYER_SCALE:
        y *= tl.load(layer_scale_ptr + f, mask=in_f, other=0.0).to(tl.float32)[None, :]
    if HAS_SCALE:
        y *= scale[:, None]
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + m[:, None] * F + f[None, :], mask=inside, other=0.0).to(tl.float32)
    rounded = y.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + m[:, None] * F + f[None, :], rounded, mask=inside)
    if STATS:
        count, total, spread = add_stats(rounded.to(tl.float32), f, F, count, total, spread)
    return count, total, spread


@jit
def _fwd_kernel(
    x_ptr, w_ptr, const_ptr, colsum_ptr, stats_ptr, mean_ptr, rstd_ptr, layer_scale_ptr, scale_ptr, residual_ptr,
    y_ptr, pre_ptr, y_stats_ptr, M, F, K, x_stride, rows_per_image, tiles_m, tiles_f, eps,
    ACTIVATION: tl.constexpr, HAS_NORM: tl.constexpr, HAS_CONST: tl.constexpr, HAS_LAYER_SCALE: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SAVE: tl.constexpr, STATS: tl.constexpr,
    PRECISION: tl.constexpr, EVEN: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr, DEAL: tl.constexpr,
):  # fmt: skip
    """One program: one tile of y, [BLOCK_M, BLOCK_F], ended in PARTS column parts. Equations (2) to (4) and (6)."""
    pid = tl.program_id(0)
    wide = GROUP * tiles_f  # GROUP row tiles share their columns of W in L2
    first = pid // wide * GROUP
    size = tl.minimum(tiles_m - first, GROUP)
    tile_f = pid % wide // size
    first_m = (first + pid % wide % size).to(tl.int64) * BLOCK_M
    first_f = tile_f.to(tl.int64) * BLOCK_F
    m = first_m + tl.arange(0, BLOCK_M)
    in_m = m < M
    mean = m
    rstd = m
    if HAS_NORM and TILES > 0:
        mean, rstd = merged(stats_ptr, m, in_m, eps, K, WIDTH, TILES, BLOCK_T)
        if SAVE:
            once = m < tl.where(tile_f == 0, M, 0)
            tl.store(mean_ptr + m, mean, mask=once)
            tl.store(rstd_ptr + m, rstd, mask=once)
    elif HAS_NORM:
        mean = tl.load(mean_ptr + m, mask=in_m, other=0.0)
        rstd = tl.load(rstd_ptr + m, mask=in_m, other=0.0)
    PAIR: tl.constexpr = ACTIVATION == "swiglu"
    y, up = _products(
        x_ptr, w_ptr, first_m + dealt_rows(BLOCK_M, DEAL), first_f + dealt_columns(BLOCK_F, DEAL), M, F, x_stride, K,
        PAIR, PRECISION, EVEN, BLOCK_M, BLOCK_F, BLOCK_K,
    )  # fmt: skip
    parts = columns(collected(y, DEAL), PARTS)
    ups = columns(collected(up, DEAL), PARTS) if PAIR else parts
    scale = rstd
    if HAS_SCALE:
        scale = tl.load(scale_ptr + m.to(tl.int32) // rows_per_image, mask=in_m, other=0.0).to(tl.float32)
    count, total, spread = no_stats(BLOCK_M, BLOCK_F // PARTS // 8)
    for part in tl.static_range(PARTS):
        here = first_f + part * (BLOCK_F // PARTS) + tl.arange(0, BLOCK_F // PARTS)
        count, total, spread = finish(
            parts[part], ups[part], const_ptr, colsum_ptr, layer_scale_ptr, residual_ptr, y_ptr, pre_ptr,
            mean, rstd, scale, count, total, spread, m, here, M, F,
            ACTIVATION, HAS_NORM, HAS_CONST, HAS_LAYER_SCALE, HAS_SCALE, HAS_RESIDUAL, SAVE and ACTIVATION is not None,
            STATS,
        )  # fmt: skip
    if STATS:
        put_stats(y_stats_ptr + (m * tiles_f + tile_f) * 2, in_m, count, total, spread)


def tuned_row(x: Tensor, F: int, activation: str | None, layer_scale: Tensor | None, residual: Tensor | None) -> str:
    """Name in tuned/ of the product's launch parameters.

    A 16-bit product that ends in float32 needs registers; so do outputs whose rows are not 32-byte aligned.
    """
    kind = "half" if output_dtype(x, layer_scale, residual) == x.dtype else "wide"
    kind = "odd" if F % 16 else "gated" if activation == "swiglu" else kind
    return f"linear.fwd.{'fp32' if x.dtype == torch.float32 else kind}"


def _blocks(x, F, activation, layer_scale, residual):
    """Launch parameters of the product."""
    row = tuned_row(x, F, activation, layer_scale, residual)
    return config(row, SPACE[row.removeprefix("linear.fwd.")], x.device)


def _fwd(x, weight, const, colsum, stats, eps, activation, layer_scale, sample_scale, residual, save, return_stats):
    """(y, pre, mean, rstd, stats): LN is folded when `colsum` is given; what is not asked for is empty."""
    outputs = _fwd_fake(
        x, weight, const, colsum, stats, eps, activation, layer_scale, sample_scale, residual, save, return_stats
    )
    around = activation, layer_scale, sample_scale, residual
    if not dispatch.linear(tuned_row, x, weight, colsum, stats, (*around, return_stats), save):
        return eager.linear(x, weight, const, colsum, eps, around, save, outputs)
    y, pre, mean, rstd, y_stats = outputs
    F_, K, weight = y.shape[-1], x.shape[-1], weight.contiguous()
    rows = x.reshape(-1, K)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    residual = None if residual is None else residual.contiguous()
    M, blocks, tiles = len(rows), _blocks(x, F_, activation, layer_scale, residual), 0
    if not M:
        return outputs
    if colsum is not None and stats is None:
        rows = rows.contiguous()
        layer_norm.write_stats(rows, mean, rstd, eps)
    elif colsum is not None:
        stats, tiles = stats.contiguous(), stats.shape[1]
    tiles_m, tiles_f = cdiv(M, blocks["BLOCK_M"]), cdiv(F_, blocks["BLOCK_F"])
    _fwd_kernel[(tiles_m * tiles_f,)](
        rows, weight, const, colsum, stats, mean, rstd, layer_scale, sample_scale, residual,
        y, pre, y_stats, M, F_, K, rows.stride(0), cdiv(M, x.shape[0]), tiles_m, tiles_f, eps,
        ACTIVATION=activation, HAS_NORM=colsum is not None, HAS_CONST=const is not None,
        HAS_LAYER_SCALE=layer_scale is not None, HAS_SCALE=sample_scale is not None, HAS_RESIDUAL=residual is not None,
        SAVE=save, STATS=return_stats, PRECISION=precision(x), EVEN=K % blocks["BLOCK_K"] == 0,
        WIDTH=power_of_2(cdiv(K, max(tiles, 1))), TILES=tiles, BLOCK_T=power_of_2(tiles), **blocks,
    )  # fmt: skip
    return outputs


def _fwd_fake(
    x, weight, const, colsum, stats, eps, activation, layer_scale, sample_scale, residual, save, return_stats
):
    F_ = len(weight) // 2 if activation == "swiglu" else len(weight)
    M = math.prod(x.shape[:-1])
    kept = colsum is not None and (save or stats is None)
    mean, rstd = (x.new_empty(M if kept else 0, dtype=torch.float32) for _ in range(2))
    shape = (M, cdiv(F_, _blocks(x, F_, activation, layer_scale, residual)["BLOCK_F"]), 2) if return_stats else (0,)
    pre = x.new_empty((M, len(weight)) if save and activation is not None else (0,))
    return (
        x.new_empty(*x.shape[:-1], F_, dtype=output_dtype(x, layer_scale, residual)),
        pre,
        mean,
        rstd,
        x.new_empty(shape, dtype=torch.float32),
    )


def output_dtype(x: Tensor, layer_scale: Tensor | None, residual: Tensor | None) -> torch.dtype:
    """The dtype of a branch's end, as PyTorch promotes it."""
    dtype = x.dtype
    for t in (layer_scale, residual):
        dtype = dtype if t is None else torch.promote_types(dtype, t.dtype)
    return dtype


fwd_op = register(
    "linear_fwd",
    "(Tensor x, Tensor weight, Tensor? const, Tensor? colsum, Tensor? stats, float eps, str? activation, "
    "Tensor? layer_scale, Tensor? sample_scale, Tensor? residual, bool save, bool return_stats) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fwd,
    _fwd_fake,
)


class _Fn(torch.autograd.Function):
    """Ties linear_fwd to linear_bwd; saves x, the pre-activation where one is needed, and row statistics."""

    @staticmethod
    def forward(
        ctx, x, weight, bias, norm_weight, norm_bias, made, colsum, const, stats, layer_scale, scale, residual, facts
    ):
        activation, norm, eps, around, keep, return_stats = facts
        w, const, colsum = folded(x, (weight, bias, norm_weight, norm_bias, made, colsum, const), norm)
        save = keep and any(ctx.needs_input_grad)
        y, pre, mean, rstd, y_stats = fwd_op(
            x,
            w,
            const,
            colsum,
            stats,
            eps,
            activation,
            layer_scale,
            scale,
            x if around else residual,
            save,
            return_stats,
        )
        ctx.save_for_backward(x, weight, bias, pre, layer_scale, scale, mean, rstd, norm_weight, norm_bias)
        ctx.facts, ctx.residual_dtype = (activation, norm, around), None if residual is None else residual.dtype
        ctx.mark_non_differentiable(y_stats)
        return y, y_stats

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, _):
        need_x, need_weight, need_b, need_gain, need_shift, *_, need_layer_scale, _, _, _ = ctx.needs_input_grad
        x, weight, bias, *saved, norm_weight, norm_bias = ctx.saved_tensors
        layer_scale = saved[1]
        needs = [need_x, need_weight or need_gain or need_shift or need_layer_scale, need_b]
        dresidual = None if ctx.residual_dtype is None else dy.to(ctx.residual_dtype)
        if not any(needs):  # only the residual learns
            return *[None] * 11, dresidual, None
        dx, dw, db, dlayer_scale, dnorm = bwd_op(dy, x, weight, bias, *saved, norm_weight, norm_bias, *ctx.facts, needs)
        return (
            dx if need_x else None,
            dw if need_weight else None,
            db.to(bias.dtype) if need_b else None,
            dnorm[0].to(norm_weight.dtype) if need_gain else None,
            dnorm[1].to(norm_bias.dtype) if need_shift else None,
            *[None] * 4,
            dlayer_scale.to(layer_scale.dtype) if need_layer_scale else None,
            None,
            dresidual,
            None,
        )


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
        arguments |= {"layer_scale": randn(F_), "sample_scale": keep, "residual": randn(B, N, F_)}
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
        "empty_norm": dict(B=0, N=3, K=8, F=4, norm=1),
        "empty_branch": dict(B=2, N=0, K=8, F=4, branch=1),
    },
)
