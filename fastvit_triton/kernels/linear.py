"""Linear layer with fused LayerNorm prologue and activation, LayerScale, drop-path and residual epilogue.

Math      x̂ = LN(x) or RMSNorm(x) when `norm` is given, else x                   [M, K]      (1)
          h = act(x̂ Wᵀ + b)                                                     [M, F]      (2)
          h = act(x̂ W_gᵀ + b_g) ∘ (x̂ W_uᵀ + b_u)    for a gated activation                  (2')
          y = sample_scale · layer_scale · h + residual                          [M, F]      (3)
          stats = (Σ y, Σ (y − mean y)²) over each tile of columns           [M, tiles, 2]   (4)
Folded    W' = W·diag(γ), column sums s and bias c, as in `fold`                             (5)
          LN(x) Wᵀ + b = r·(x W'ᵀ) − r·μ·s + c,  r = 1/√(σ² + ε), μ and σ² of each row       (6)
          RMSNorm(x) Wᵀ + b = r·(x W'ᵀ) + c,  r = 1/√(mean(x²) + ε)                         (6')
Backward  equations (7) to (10) of `linear_backward`.
Kernels   The matmul with its epilogue, row statistics, folding, (7) and (9) are Triton; the matmuls of the backward
          pass are torch.matmul. LN is folded if x has the dtype of the matmul (not if autocast casts a float32 x) and
          `fold.pays`; otherwise it is a separate launch. On Hopper the rows of x and W are permuted to match the
          accumulator layout of WGMMA: `tile.wgmma_rows`. `mixed` uses cuBLAS and separate passes for the rest.
Saved     x, the pre-activation if there is an activation, μ and r in fp32.
Cost      2·M·K·F flops; bytes = x + W + y (+ residual).
Sources   GELU: Hendrycks & Gimpel, arXiv:1606.08415, section 2 (erf and tanh forms, and x·sigmoid(1.702 x));
          SwiGLU and GEGLU: Shazeer, arXiv:2002.05202, eq. 5 and 6.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import check, choose, cpu, fold, layer_norm, mixed, onednn, rms_norm
from .activation import GATED, activate, apply_activation, gate_of, passes_of
from .argument import NextNorm, Norm, Normalized, NormLike, Pair, Reader, expect_bool_or_reader, kind_of
from .backend import kernels_available
from .fold import Folded
from .launch import cdiv, config, launch, power_of_2, precision, product_dtype
from .layer_norm import merge_stats, output_dtype
from .linear_backward import bwd_op
from .op import Op, can_fold_norm, cast, make_randn, once_differentiable, register
from .tile import (
    add_stats,
    from_wgmma_order,
    jit,
    split_columns,
    store_stats,
    tl,
    wgmma_columns,
    wgmma_rows,
    zero_stats,
)

# Default launch parameters of the matmul, which fit every architecture; rows of tuned/ override them.
SPACE = {
    "half": dict(BLOCK_M=128, BLOCK_F=128, BLOCK_K=32, GROUP=8, PARTS=4, WGMMA_WARPS=0, num_warps=4, num_stages=3),
    "wide": dict(BLOCK_M=128, BLOCK_F=128, BLOCK_K=32, GROUP=8, PARTS=4, WGMMA_WARPS=0, num_warps=8, num_stages=3),
    "gated": dict(BLOCK_M=128, BLOCK_F=64, BLOCK_K=32, GROUP=8, PARTS=4, WGMMA_WARPS=0, num_warps=4, num_stages=3),
    "fp32": dict(BLOCK_M=64, BLOCK_F=64, BLOCK_K=32, GROUP=8, PARTS=2, WGMMA_WARPS=0, num_warps=8, num_stages=2),
    "odd": dict(BLOCK_M=64, BLOCK_F=64, BLOCK_K=32, GROUP=8, PARTS=4, WGMMA_WARPS=0, num_warps=4, num_stages=3),
}


def linear(
    x: Tensor,
    weight: Tensor | Pair | Folded,
    bias: Tensor | Pair | None = None,
    *,
    norm: NormLike | None = None,
    stats: Tensor | None = None,
    activation: str | None = None,
    layer_scale: Tensor | None = None,
    sample_scale: Tensor | None = None,
    residual: Tensor | None = None,
    return_stats: bool | Reader = False,
) -> Tensor | Any:
    """sample_scale · layer_scale · act(LN(x) Wᵀ + b) + residual.

    Args:
        x: [..., K].
        weight: [F, K]; for a gated activation [2F, K] with the gate first, or a pair (gate, up) of [F, K]. Or the
            result of `fold`, which includes bias and the norm's weight and bias; then `norm` is (None, None, eps), or
            `Norm(None, None, eps, "rms_norm")`.
        bias: [F]; for a gated activation [2F] or a pair; None for no bias.
        norm: (weight [K], bias [K], eps) or `Norm`, a LayerNorm or RMSNorm of x before the matmul.
        stats: [M, tiles, 2] fp32, row statistics of x from the call that produced x; saves a pass over x for the norm.
        activation: "gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "hardswish" or "relu6"; gated: "swiglu",
            "geglu" or "geglu_tanh"; None for none.
        layer_scale: [F], LayerScale.
        sample_scale: [B] for x [B, ..., K], drop-path factor of each image; it gets no gradient.
        residual: [..., F], added last; the output has the promoted dtype.
        return_stats: also return equation (4) for the output, which has no gradient; for a `Reader` None instead,
            unless both this call and the reader run by the kernels.

    Returns:
        [..., F]; with `return_stats` also [M, tiles, 2] fp32, or None.

    Raises:
        ValueError: a size or device does not fit, or the activation is unknown.
        TypeError: an argument is of another type or dtype.
    """
    check.projection(x, weight, bias, activation)
    check.norm(x, norm, stats, weight)
    check.branch(x, output_channels(weight, activation), layer_scale, sample_scale, residual)
    expect_bool_or_reader("return_stats", return_stats)
    ends = layer_scale, sample_scale, residual
    if kernels_available(x) and x.shape[-1] <= layer_norm.MAX_D:
        sizes = plan_sizes(x, weight, norm, activation, *ends)
        rows = choose.rows_of(math.prod(x.shape[:-1]))
        if not choose.copies(x, residual) and choose.prefers_kernel(x, "linear", rows, *sizes):
            wanted = reads_stats(return_stats, x, residual, output_channels(weight, activation))
            y = run(x, weight, bias, norm, stats, activation, *ends, return_stats=wanted)
            return (y, None) if return_stats and not wanted else y
    if cpu.takes(x, weight):
        y = cpu.linear(x, weight, bias, norm, activation, *ends)
        return with_stats(y, return_stats)
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


def run(
    x: Tensor,
    weight: Tensor | Pair | Folded | onednn.PackedWeight,
    bias: Tensor | Pair | None = None,
    norm: NormLike | None = None,
    stats: Any = None,
    activation: str | None = None,
    layer_scale: Tensor | None = None,
    sample_scale: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    return_stats: bool | NextNorm = False,
    passes_input: bool = False,
    way: str = "fused",
) -> Tensor | Any:
    """`linear` in a given way, without argument checks or plan; the kernels must be available.

    Args:
        x, weight, bias, norm, activation, layer_scale, sample_scale, residual: as in `linear`.
        stats: row statistics of x for "fused", or LN(x) for "mixed", from the call that produced x.
        return_stats: also return the next call's `stats`; for "mixed", the `NextNorm` to apply, or False.
        passes_input: return (y, x), with x for its other readers: the backward pass of a norm adds their gradient,
            where autograd would add it in another pass. Without `return_stats`, not for "onednn".
        way: "fused", "mixed" or "onednn", see `choose`; for "onednn" the weight may be packed, and there are no stats.
    """
    if way == "onednn":
        y = cpu.linear(x, weight, bias, norm, activation, layer_scale, sample_scale, residual)
        return (y, None) if return_stats else y
    assert not isinstance(weight, onednn.PackedWeight)
    grad = torch.is_grad_enabled()
    if way == "mixed":
        call = mixed_call(x, stats, return_stats)
        operand = x
        stats = None
        eps = 0.0 if norm is None else norm[2]
    else:
        call, (operand, norm) = None, apply_or_keep_norm(x, norm, weight)
        eps, stats = (0.0, None) if norm is None else (norm[2], stats)
    is_input = residual is operand
    kind = None if norm is None else kind_of(norm)
    passes = passes_input and grad and operand is x
    settings = Settings(activation, kind, eps, is_input, grad, bool(return_stats), call=call, passes_input=passes)
    y, *next_stats = _Fn.apply(
        operand,
        *operands(weight, bias, norm),
        stats,
        layer_scale,
        sample_scale,
        None if is_input else residual,
        settings,
    )
    if passes_input:
        return y, next_stats[-1] if passes else x
    return (y, handed_on(next_stats, call)) if return_stats else y


def mixed_call(x: Tensor, normed: Any, next_norm: bool | NextNorm) -> mixed.MixedCall:
    """Arguments of a mixed call of `linear` or `mlp`, from its `stats` and `return_stats`."""
    return mixed.MixedCall(normed, next_norm if isinstance(next_norm, NextNorm) else None, product_dtype(x), fwd_op)


def handed_on(next_stats: list[Any], call: mixed.MixedCall | None) -> Tensor | Normalized | None:
    """`stats` for the next call from a Function's outputs: row statistics, or `Normalized` from `mixed`."""
    return next_stats[0] if call is None or next_stats[0] is None else Normalized(*next_stats)


def plan_sizes(
    x: Tensor,
    weight: Tensor | Pair | Folded,
    norm: NormLike | None,
    activation: str | None,
    layer_scale: Tensor | None,
    sample_scale: Tensor | None,
    residual: Tensor | None,
) -> tuple[int, ...]:
    """Arguments of "linear" in `predicted.OPS` after the number of rows; of x only the dtype is used."""
    has_norm = norm is not None and can_fold_norm(x)
    fold = has_norm and not isinstance(weight, Folded)
    ends = residual is not None, layer_scale is not None, sample_scale is not None
    return *product_shape(weight), has_norm, fold, passes_of(activation), *ends


def reads_stats(asked: bool | Reader, x: Tensor, residual: Tensor | None, width: int) -> bool:
    """True if a `linear` or `mlp` that runs by the kernels should return row statistics of its output.

    Args:
        asked: `return_stats`.
        x: [..., K], its input.
        residual: [..., width], or None.
        width: channels of the output.
    """
    if isinstance(asked, bool):
        return asked
    if width > layer_norm.MAX_D or not can_fold_norm(x) or (residual is not None and residual.dtype != x.dtype):
        return False
    rows = choose.rows_of(math.prod(x.shape[:-1]))
    return fold.pays(x, asked.sizes[1]) and choose.prefers_kernel(x, asked.op, rows, *asked.sizes)


def with_stats(y: Tensor, asked: bool | Reader) -> Tensor | Any:
    """What PyTorch's operators return for `return_stats`: y alone, with row statistics, or for a reader with None."""
    if isinstance(asked, Reader):
        return y, None
    return (y, layer_norm.row_stats(y)) if asked else y


def reference(
    x: Tensor,
    weight: Tensor | Pair | Folded,
    bias: Tensor | Pair | None = None,
    *,
    norm: NormLike | None = None,
    stats: Tensor | None = None,
    activation: str | None = None,
    layer_scale: Tensor | None = None,
    sample_scale: Tensor | None = None,
    residual: Tensor | None = None,
    return_stats: bool | Reader = False,
) -> Tensor | Any:
    """Equations (1) to (4); `stats` is ignored, because it can be computed from x."""
    if isinstance(weight, Folded) and weight.source is not None:
        assert norm is not None  # `check.norm`
        (weight,), (bias,), norm_weight, norm_bias = weight.source
        norm = Norm(norm_weight, norm_bias, norm[2], kind_of(norm))
    if norm is not None:
        x = rms_norm.reference_either(x, norm)  # (1)
    if isinstance(weight, Folded):
        bias = weight.bias.to(x.dtype)
        weight = weight.weight
    y = F.linear(x, *_concatenated(weight, bias))
    y = y if activation is None else apply_activation(y, activation)  # (2)
    y = layer_norm.scaled(y, layer_scale, sample_scale)
    y = y if residual is None else y + residual  # (3)
    return with_stats(y, return_stats)


class Settings(NamedTuple):
    """Non-tensor arguments of the autograd Functions of `linear` and `mlp`."""

    activation: str | None  # name, or None
    norm: str | None  # kind of the norm that is folded into the (first) matmul, "layer_norm" or "rms_norm"; or None
    eps: float  # of that norm; 0.0 without one
    residual_is_input: bool  # True if the residual is x, which the Function must not receive twice
    grad_enabled: bool  # grad mode of the caller; inside the Function it is always off
    return_stats: bool  # also return the row statistics of the output
    save: str = "pre"  # what `mlp` saves for the backward pass, see there
    call: mixed.MixedCall | None = None  # further arguments of a mixed call; None for a fused one
    passes_input: bool = False  # the last output is x; the gradient of x includes that of this output

    def without_normed(self) -> "Settings":
        """A copy without LN(x), which is recomputed in the backward pass instead of saved."""
        return self if self.call is None else self._replace(call=self.call._replace(normed=None))

    def dtype(self, x: Tensor) -> torch.dtype:
        """Dtype of the matmuls."""
        return x.dtype if self.call is None else self.call.dtype


class Operands(NamedTuple):
    """Tensor arguments of the autograd Function: those of a matmul and of the LayerNorm before it."""

    weight: Tensor  # [F, K], gets a gradient
    bias: Tensor | None  # [F] or None, gets a gradient
    norm_weight: Tensor | None  # [K] or None, gets a gradient
    norm_bias: Tensor | None  # [K] or None, gets a gradient
    # W' [F, K] if `weight` was folded beforehand and `source` gets the gradients, else None
    folded_weight: Tensor | None
    colsum: Tensor | None  # column sums [F] of a weight that was folded beforehand, else None
    folded_bias: Tensor | None  # c [F], given with folded_weight

    def cast(self, x: Tensor, settings: Settings) -> tuple["Operands", Tensor | None]:
        """(the operands with the weight in the dtype of the matmul, which both passes use; this weight if it was cast).

        A weight that is folded stays as it is.
        """
        folds = settings.call is None and (settings.norm is not None or self.folded_weight is not None)
        dtype = settings.dtype(x)
        if folds or self.weight.dtype == dtype:
            return self, None
        weight = self.weight.to(dtype)
        return self._replace(weight=weight), weight


def apply_or_keep_norm(
    x: Tensor, norm: NormLike | None, weight: Tensor | Pair | Folded
) -> tuple[Tensor, NormLike | None]:
    """(operand of the matmul [..., K], norm to fold into it): (x, norm), or (norm(x), None).

    The norm is applied to x if there are few rows, or if autocast casts x, so that LayerNorm keeps its precision.
    """
    if norm is not None and not (
        can_fold_norm(x) and (isinstance(weight, Folded) or fold.pays(x, product_shape(weight)[1]))
    ):
        return rms_norm.run_either(x, norm, product_dtype(x)), None
    return cast(x)[0], norm


def product_shape(weight: Tensor | Pair | Folded) -> tuple[int, int]:
    """(K, outputs) of the matmul; outputs are F, or 2F for a gate and an up projection."""
    if isinstance(weight, Tensor):
        return weight.shape[1], weight.shape[0]
    parts = (weight.weight,) if isinstance(weight, Folded) else weight
    return parts[0].shape[1], sum(map(len, parts))


def operands(weight: Tensor | Pair | Folded, bias: Tensor | Pair | None, norm: NormLike | None) -> Operands:
    """Builds the operands from a weight [F, K], a pair or a folded one, and a norm that is not yet folded."""
    norm_weight, norm_bias = (None, None) if norm is None else norm[:2]
    if isinstance(weight, Folded):
        folded_weight, colsum, folded_bias, source = weight
        if source is None:  # gradients flow through W' and c
            return Operands(folded_weight, folded_bias, norm_weight, norm_bias, None, colsum, None)
        (weight,), (bias,), norm_weight, norm_bias = source
        return Operands(weight, bias, norm_weight, norm_bias, folded_weight, colsum, folded_bias)
    return Operands(*_concatenated(weight, bias), norm_weight, norm_bias, None, None, None)


def _concatenated(weight: Tensor | Pair, bias: Any) -> tuple[Tensor, Tensor | None]:
    """(weight, bias) of one matmul; those of a gate and an up projection are packed."""
    return (weight, bias) if isinstance(weight, Tensor) else fold.packed(weight, bias or (None, None))


def fold_operands(x: Tensor, layer: Operands, has_norm: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(weight in x's dtype, bias, column sums or None) of the matmul; folds by equation (5) if not yet folded."""
    if layer.folded_weight is not None:
        return layer.folded_weight, layer.folded_bias, layer.colsum if has_norm else None
    if has_norm and layer.colsum is None:
        group = fold.Group((layer.weight,), (layer.bias,), layer.norm_weight, layer.norm_bias)
        (folded,) = fold.run([group], x.dtype)
        return folded.weight, folded.bias, folded.colsum
    return layer.weight.to(x.dtype), layer.bias, layer.colsum if has_norm else None


def output_channels(weight: Tensor | Pair | Folded, activation: str | None) -> int:
    """F, the channels of the output."""
    if isinstance(weight, Folded):
        weight = weight.weight
    if not isinstance(weight, Tensor):
        return weight[0].shape[0]
    return weight.shape[0] // 2 if activation in GATED else weight.shape[0]


@jit
def _products(x_ptr, w_ptr, m, f, M, F, x_stride, K, PAIR: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
              BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """x Wᵀ for rows m and outputs f, [BLOCK_M, BLOCK_F] fp32, and with PAIR also for outputs F + f.

    Indices past the end are clamped to the last row or output. EVEN: K is a multiple of BLOCK_K.
    """
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + tl.minimum(m, M - 1)[:, None] * x_stride + k[None, :]
    w_at = w_ptr + tl.minimum(f, F - 1)[None, :] * K + k[:, None]
    first_sum = tl.zeros([BLOCK_M, BLOCK_F], tl.float32)
    second_sum = tl.zeros([BLOCK_M, BLOCK_F if PAIR else 1], tl.float32)
    pair_offset = tl.cast(F, tl.int64) * K
    for first in range(0, K, BLOCK_K):
        if EVEN:
            x, w = tl.load(x_at), tl.load(w_at)
        else:
            x = tl.load(x_at, mask=(first + k < K)[None, :], other=0.0)
            w = tl.load(w_at, mask=(first + k < K)[:, None], other=0.0)
        first_sum = tl.dot(x.to(w.dtype), w, first_sum, input_precision=PRECISION)
        if PAIR:
            if EVEN:
                w = tl.load(w_at + pair_offset)
            else:
                w = tl.load(w_at + pair_offset, mask=(first + k < K)[:, None], other=0.0)
            second_sum = tl.dot(x.to(w.dtype), w, second_sum, input_precision=PRECISION)
        x_at += BLOCK_K
        w_at += BLOCK_K
    return first_sum, second_sum


@jit
def apply_norm_and_bias(acc, colsum_ptr, bias_ptr, mean, rstd, f, F, NORM: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Equation (6) or (6') for acc = x W'ᵀ with a NORM, else acc plus bias; outputs f past the end are clamped."""
    f = tl.minimum(f, F - 1)
    if NORM == "layer_norm":
        acc = rstd[:, None] * (acc - mean[:, None] * tl.load(colsum_ptr + f)[None, :])
    if NORM == "rms_norm":
        acc = rstd[:, None] * acc
    if HAS_BIAS:
        acc += tl.load(bias_ptr + f).to(tl.float32)[None, :]
    return acc


@jit
def apply_epilogue(
    y, up, bias_ptr, colsum_ptr, layer_scale_ptr, residual_ptr, y_ptr, pre_ptr, mean, rstd, scale, count, row_sum,
    m2, m, f, M, F,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, NORM: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_LAYER_SCALE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SAVE: tl.constexpr,
    STATS: tl.constexpr,
):  # fmt: skip
    """Epilogue of columns f of a tile, equations (2) to (4) and (6). Stores y; returns the updated row statistics."""
    in_m, in_f = m < M, f < F
    inside = in_m[:, None] & in_f[None, :]
    EXACT: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    y = apply_norm_and_bias(y, colsum_ptr, bias_ptr, mean, rstd, f, F, NORM, HAS_BIAS)
    if GATED:  # y is the gate; outputs F + f are the up projection
        up = apply_norm_and_bias(up, colsum_ptr, bias_ptr, mean, rstd, F + f, 2 * F, NORM, HAS_BIAS)
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
        count, row_sum, m2 = add_stats(rounded.to(tl.float32), f, F, count, row_sum, m2)
    return count, row_sum, m2


@jit(do_not_specialize=["M", "rows_per_image", "tiles_m"])
def _fwd_kernel(
    x_ptr, w_ptr, bias_ptr, colsum_ptr, stats_ptr, mean_ptr, rstd_ptr, layer_scale_ptr, scale_ptr, residual_ptr,
    y_ptr, pre_ptr, y_stats_ptr, M, F, K, x_stride, rows_per_image, tiles_m, tiles_f, eps,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, NORM: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_LAYER_SCALE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SAVE: tl.constexpr,
    STATS: tl.constexpr,
    PRECISION: tl.constexpr, EVEN: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr, WGMMA_WARPS: tl.constexpr,
):  # fmt: skip
    """One program: one tile of y, [BLOCK_M, BLOCK_F]; the epilogue in PARTS column parts. Equations (2) to (4), (6).

    Programs of GROUP row tiles run at the same time and share columns of W in L2. SAVE: save for a backward pass.
    STATS: write equation (4). TILES: tiles of the given statistics; 0 if mean and rstd are given.
    """
    pid = tl.program_id(0)
    group_tiles = GROUP * tiles_f
    first = pid // group_tiles * GROUP
    size = tl.minimum(tiles_m - first, GROUP)
    tile_f = pid % group_tiles // size
    first_m = (first + pid % group_tiles % size).to(tl.int64) * BLOCK_M
    first_f = tile_f.to(tl.int64) * BLOCK_F
    m = first_m + tl.arange(0, BLOCK_M)
    in_m = m < M
    mean = m
    rstd = m
    if NORM is not None and TILES > 0:
        mean, rstd = merge_stats(stats_ptr, m, in_m, eps, K, NORM == "rms_norm", WIDTH, TILES, BLOCK_T)
        if SAVE:
            first_tile = m < tl.where(tile_f == 0, M, 0)
            tl.store(mean_ptr + m, mean, mask=first_tile)
            tl.store(rstd_ptr + m, rstd, mask=first_tile)
    elif NORM is not None:
        mean = tl.load(mean_ptr + m, mask=in_m, other=0.0)
        rstd = tl.load(rstd_ptr + m, mask=in_m, other=0.0)
    y, up = _products(
        x_ptr, w_ptr, first_m + wgmma_rows(BLOCK_M, WGMMA_WARPS), first_f + wgmma_columns(BLOCK_F, WGMMA_WARPS),
        M, F, x_stride, K, GATED, PRECISION, EVEN, BLOCK_M, BLOCK_F, BLOCK_K,
    )  # fmt: skip
    parts = split_columns(from_wgmma_order(y, WGMMA_WARPS), PARTS)
    ups = split_columns(from_wgmma_order(up, WGMMA_WARPS), PARTS) if GATED else parts
    scale = rstd
    if HAS_SCALE:
        scale = tl.load(scale_ptr + m.to(tl.int32) // rows_per_image, mask=in_m, other=0.0).to(tl.float32)
    count, row_sum, m2 = zero_stats(BLOCK_M, BLOCK_F // PARTS // 8)
    for part in tl.static_range(PARTS):
        f = first_f + part * (BLOCK_F // PARTS) + tl.arange(0, BLOCK_F // PARTS)
        count, row_sum, m2 = apply_epilogue(
            parts[part], ups[part], bias_ptr, colsum_ptr, layer_scale_ptr, residual_ptr, y_ptr, pre_ptr,
            mean, rstd, scale, count, row_sum, m2, m, f, M, F,
            ACTIVATION, GATED, NORM, HAS_BIAS, HAS_LAYER_SCALE, HAS_SCALE, HAS_RESIDUAL,
            SAVE and ACTIVATION is not None, STATS,
        )  # fmt: skip
    if STATS:
        store_stats(y_stats_ptr + (m * tiles_f + tile_f) * 2, in_m, count, row_sum, m2)


def tuned_row(x: Tensor, F: int, activation: str | None, layer_scale: Tensor | None, residual: Tensor | None) -> str:
    """Row name in tuned/ for a matmul of x with output [..., F].

    16-bit matmuls with float32 outputs ("wide") and outputs whose rows are not 32-byte aligned ("odd") have separate
    rows, because both need more registers.
    """
    kind = "half" if output_dtype(x, layer_scale, residual) == x.dtype else "wide"
    kind = "odd" if F % 16 else "gated" if activation in GATED else kind
    return f"linear.fwd.{'fp32' if x.dtype == torch.float32 else kind}"


def _blocks(x, F, activation, layer_scale, residual, return_stats):
    """Launch parameters of the matmul.

    Row statistics have one entry per BLOCK_F columns. Compiled graphs contain their shape, so measurements must not
    change it.
    """
    row = tuned_row(x, F, activation, layer_scale, residual)
    K = x.shape[-1]
    default = SPACE[row.removeprefix("linear.fwd.")]
    blocks = config(row, default, x.device, x.numel() // K, F, K)
    if not return_stats:
        return blocks
    base = config(row, default, x.device)
    return blocks if blocks["BLOCK_F"] == base["BLOCK_F"] else base


def _stats_tiles(x, F, activation, layer_scale, residual):
    """Number of entries of the row statistics, see `_blocks`."""
    row = tuned_row(x, F, activation, layer_scale, residual)
    return cdiv(F, config(row, SPACE[row.removeprefix("linear.fwd.")], x.device)["BLOCK_F"])


def _fwd(
    x, weight, bias, colsum, stats, norm, eps, activation, layer_scale, sample_scale, residual, save, return_stats
):
    """(y, pre, mean, rstd, stats); `norm`: the kind of the norm folded into the weight. Unneeded outputs are empty."""
    y, pre, mean, rstd, y_stats = outputs = _fwd_fake(
        x, weight, bias, colsum, stats, norm, eps, activation, layer_scale, sample_scale, residual, save, return_stats
    )
    F_ = y.shape[-1]
    K = x.shape[-1]
    weight = weight.contiguous()
    rows = x.reshape(-1, K)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    residual = None if residual is None else residual.contiguous()
    M = rows.shape[0]  # len would fix a symbolic size
    blocks = _blocks(x, F_, activation, layer_scale, residual, return_stats)
    tiles = 0
    if not M:
        return outputs
    if norm is not None and stats is None:
        rows = rows.contiguous()
        layer_norm.write_stats(rows, mean, rstd, eps, norm == "rms_norm")
    elif norm is not None:
        stats, tiles = stats.contiguous(), stats.shape[1]
    tiles_m = cdiv(M, blocks["BLOCK_M"])
    tiles_f = cdiv(F_, blocks["BLOCK_F"])
    launch(
        _fwd_kernel, (tiles_m * tiles_f,),
        rows, weight, bias, colsum, stats, mean, rstd, layer_scale, sample_scale, residual,
        y, pre, y_stats, M, F_, K, rows.stride(0), cdiv(M, x.shape[0]), tiles_m, tiles_f, eps,
        ACTIVATION=gate_of(activation), GATED=activation in GATED, NORM=norm, HAS_BIAS=bias is not None,
        HAS_LAYER_SCALE=layer_scale is not None, HAS_SCALE=sample_scale is not None, HAS_RESIDUAL=residual is not None,
        SAVE=save, STATS=return_stats, PRECISION=precision(x), EVEN=K % blocks["BLOCK_K"] == 0,
        WIDTH=power_of_2(cdiv(K, tiles)) if tiles else 0, TILES=tiles, BLOCK_T=power_of_2(tiles), **blocks,
    )  # fmt: skip
    return outputs


def _fwd_fake(
    x, weight, bias, colsum, stats, norm, eps, activation, layer_scale, sample_scale, residual, save, return_stats
):
    F_ = len(weight) // 2 if activation in GATED else len(weight)
    M = math.prod(x.shape[:-1])
    has_stats = norm is not None and (save or stats is None)
    mean, rstd = (x.new_empty(M if has_stats else 0, dtype=torch.float32) for _ in range(2))
    shape = (0,)
    if return_stats:
        shape = M, _stats_tiles(x, F_, activation, layer_scale, residual), 2
    pre = x.new_empty((M, len(weight)) if save and activation is not None else (0,))
    return (
        x.new_empty(*x.shape[:-1], F_, dtype=output_dtype(x, layer_scale, residual)),
        pre,
        mean,
        rstd,
        x.new_empty(shape, dtype=torch.float32),
    )


fwd_op = register(
    "linear_fwd",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? colsum, Tensor? stats, str? norm, float eps, str? activation, "
    "Tensor? layer_scale, Tensor? sample_scale, Tensor? residual, bool save, bool return_stats) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fwd,
    _fwd_fake,
)


class _Fn(torch.autograd.Function):
    """Autograd of linear_fwd or `mixed.forward` by linear_bwd; saves x, the pre-activation, and row statistics."""

    @staticmethod
    def forward(
        ctx, x, weight, bias, norm_weight, norm_bias, folded_weight, colsum, folded_bias,
        stats, layer_scale, sample_scale, residual, settings,
    ):  # fmt: skip
        layer = Operands(weight, bias, norm_weight, norm_bias, folded_weight, colsum, folded_bias)
        layer, cast = layer.cast(x, settings)
        save = settings.grad_enabled and any(ctx.needs_input_grad)
        ends = layer_scale, sample_scale, x if settings.residual_is_input else residual
        if settings.call is None:
            y, pre, mean, rstd, *next_stats = fwd_op(
                x, *fold_operands(x, layer, settings.norm is not None), stats, settings.norm, settings.eps,
                settings.activation, *ends, save, settings.return_stats,
            )  # fmt: skip
        else:
            norm = settings.norm and Norm(norm_weight, norm_bias, settings.eps, settings.norm)
            y, pre, mean, rstd, *next_stats = mixed.forward(
                x, layer.weight, bias, norm, settings.activation, *ends, settings.call, save
            )
        cast = cast if layer_scale is None or settings.activation is not None else None  # else the weight is scaled
        ctx.save_for_backward(x, weight, cast, bias, pre, layer_scale, sample_scale, mean, rstd, norm_weight, norm_bias)
        ctx.settings = settings.without_normed()
        ctx.residual_dtype = None if residual is None else residual.dtype
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in next_stats if t is not None))
        return y, *next_stats, *([x] if settings.passes_input else [])

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, *others):
        dsum = others[-1] if ctx.settings.passes_input else dy if ctx.settings.residual_is_input else None
        if dy is None:
            return dsum, *[None] * 12
        need_x, need_weight, need_bias, need_norm_weight, need_norm_bias, *_ = ctx.needs_input_grad
        *_, need_layer_scale, _, _, _ = ctx.needs_input_grad
        x, weight, cast, bias, *saved, norm_weight, norm_bias = ctx.saved_tensors
        layer_scale = saved[1]
        settings = ctx.settings
        needs = [need_x, need_weight or need_norm_weight or need_norm_bias or need_layer_scale, need_bias]
        dresidual = None if ctx.residual_dtype is None else dy.to(ctx.residual_dtype)
        if not any(needs):  # only the residual gets a gradient
            return *[None] * 11, dresidual, None
        dx, dw, db, dlayer_scale, dnorm = bwd_op(
            dy, x, weight, cast, bias, *saved, norm_weight, norm_bias, dsum,
            settings.activation, settings.norm, settings.dtype(x), needs,
        )  # fmt: skip
        return (
            dx if need_x else None,
            dw if need_weight else None,
            db.to(bias.dtype) if need_bias else None,
            dnorm[0].to(norm_weight.dtype) if need_norm_weight else None,
            dnorm[1].to(norm_bias.dtype) if need_norm_bias else None,
            *[None] * 4,  # W', colsum and bias of a fold, and stats
            dlayer_scale.to(layer_scale.dtype) if need_layer_scale else None,
            None,
            dresidual,
            None,
        )


def _inputs(case: dict[str, int], dtype: torch.dtype, device: torch.device | str) -> dict:
    randn, (B, N, K, F_) = make_randn(device, dtype), (case[a] for a in ("B", "N", "K", "F"))
    arguments: dict[str, Any] = {"x": randn(B, N, K), "weight": randn(F_, K, scale=K**-0.5), "bias": randn(F_)}
    if "gated" in case:
        arguments["weight"] = (arguments["weight"], randn(F_, K, scale=K**-0.5))
        arguments["bias"] = (arguments["bias"], randn(F_))
        arguments["activation"] = tuple(GATED)[case["gated"]]
    if "norm" in case:
        arguments |= {"norm": (randn(K), randn(K), 1e-6), "activation": "gelu"}
    if "rms" in case:
        arguments["norm"] = (randn(K), None, 1e-6, "rms_norm")
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
        "swiglu": dict(B=2, N=3, K=5, F=4, gated=0),
        "rms_geglu": dict(B=2, N=3, K=5, F=4, rms=1, gated=1),
    },
    inputs=_inputs,
    ragged={
        "norm_gelu": dict(B=2, N=49, K=48, F=96, norm=1),
        "odd": dict(B=3, N=5, K=33, F=70, norm=1),
        "branch": dict(B=4, N=17, K=40, F=64, branch=1),
        "swiglu": dict(B=2, N=10, K=32, F=24, gated=0),
        "geglu_tanh": dict(B=2, N=10, K=32, F=24, gated=2),
        "rms": dict(B=2, N=49, K=48, F=96, rms=1),
        "plain": dict(B=1, N=197, K=64, F=130),
        "empty": dict(B=0, N=3, K=8, F=4),
        "empty_norm": dict(B=0, N=3, K=8, F=4, norm=1),
        "empty_branch": dict(B=2, N=0, K=8, F=4, branch=1),
    },
)
