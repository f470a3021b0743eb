"""The MLP half of a Transformer block: LayerNorm, two linear layers with an activation between, scales, residual.

Math      h = act(LN(x) W₁ᵀ + b₁)                                   [M, F]      (1)
          y = sample_scale · layer_scale · (h W₂ᵀ + b₂) + residual        [M, D]      (2)
Backward  that of `linear` twice, with h = act(pre₁) again              (3)
Kernels   Those of `linear`: two products forward; with a norm one launch that folds it into W₁ unless that was done
          before, and one for row statistics unless they are given. Backward, h is written where pre₁ is read.
          Rows of at most 192 values in 16 bits, where pre₁ need not be kept: one launch, a program holds whole rows of
          x and of y, takes the statistics from them, and h never leaves the chip.
Cost      4·M·D·F flops; bytes = x + W₁ + W₂ + y (+ residual) + 2·h, or without h in one launch.
Saved     x and pre₁ = LN(x) W₁ᵀ + b₁, not h: with x, qkv and o of the attention half 10·D values a token for F = 4·D,
          where eager PyTorch keeps 16·D. With `recompute` only x: 6·D.
Sources   Vaswani et al., arXiv:1706.03762, eq. 2; Dosovitskiy et al., ViT, arXiv:2010.11929, eq. 3.
"""

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from . import check, layer_norm, linear
from .argument import filled, fits, flag, floating
from .attention_inner import head, no_head, scores
from .backend import kernels_available
from .check import Norm, Pair
from .fold import Folded
from .launch import cdiv, config, split
from .linear import finish, with_norm
from .linear_backward import input_grad, product_grad, weight_grad, weight_grad_like
from .op import Op, expect, make, once_differentiable, register
from .tile import activate, jit, no_stats, put_stats, tl

# Launch parameters of the one launch, by the width of a row as its two tiles have it, in bytes.
SPACE = (
    (256, dict(BLOCK_M=64, BLOCK_F=32, num_warps=4, num_stages=1)),
    (384, dict(BLOCK_M=64, BLOCK_F=32, num_warps=8, num_stages=1)),
)

Layer = tuple[Tensor | Pair | Folded, Tensor | Pair | None]  # weight and bias


def mlp(
    x: Tensor,
    fc1: Layer,
    fc2: Layer,
    *,
    norm: Norm | None = None,
    stats: Tensor | None = None,
    activation: str = "gelu",
    layer_scale: Tensor | None = None,
    sample_scale: Tensor | None = None,
    residual: Tensor | None = None,
    recompute: bool = False,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """sample_scale · layer_scale · fc2(act(fc1(LN(x)))) + residual.

    Args:
        x: [..., D].
        fc1: (weight [F, D], bias [F]); for "swiglu", or folded, as in `linear`.
        fc2: (weight [D, F], bias [D]).
        norm: (weight [D], bias [D], eps) of a LayerNorm on x.
        stats: [M, tiles, 2] fp32, row statistics of x; see `linear`.
        activation: as in `linear`.
        layer_scale: [D], LayerScale.
        sample_scale: [B], drop-path factor of each image.
        residual: [..., D], added last.
        recompute: do not keep the hidden layer for the backward pass, compute it again there.
        return_stats: also return the output's row statistics.

    Returns:
        [..., D]; with `return_stats` also [M, tiles, 2] fp32.

    Raises:
        ValueError: a size or device does not fit, or the activation is unknown.
        TypeError: an argument is of another type or dtype.
    """
    check.pair("fc1", fc1)
    check.pair("fc2", fc2)
    if activation is None:
        raise ValueError("activation is None; an mlp without one is a linear layer")
    check.projection(x, *fc1, activation, "fc1 ")
    check.norm(x, norm, stats, fc1[0])
    weight, bias = fc2
    expect("fc2 weight", weight, x, D=None, F=linear.outputs(fc1[0], activation))
    floating("fc2 weight", weight, x)
    filled("fc2 weight", "D", weight.shape[0])
    if bias is not None and not fits(bias, x, weight.shape[0]):
        expect("fc2 bias", bias, x, D=weight.shape[0])
        floating("fc2 bias", bias, x)
    check.branch(x, weight.shape[0], layer_scale, sample_scale, residual)
    flag("recompute", recompute)
    flag("return_stats", return_stats)
    if kernels_available(x) and max(x.shape[-1], fc2[0].shape[1]) <= layer_norm.MAX_D:
        operand, norm = linear.before(x, norm, fc1[0])
        around = residual is operand  # the usual case; torch.compile wants each tensor passed once
        keep = torch.is_grad_enabled() and not recompute  # inside the Function gradients are always off
        facts = activation, norm is not None, norm[2] if norm else 0.0, around, recompute, keep, return_stats
        stats, residual = None if norm is None else stats, None if around else residual
        first = linear.operands(*fc1, norm)
        y, y_stats = _Fn.apply(operand, *fc2, *first, stats, layer_scale, sample_scale, residual, facts)
        return (y, y_stats) if return_stats else y
    return reference(
        x,
        fc1,
        fc2,
        norm=norm,
        stats=stats,
        activation=activation,
        layer_scale=layer_scale,
        sample_scale=sample_scale,
        residual=residual,
        recompute=recompute,
        return_stats=return_stats,
    )


def reference(
    x: Tensor,
    fc1: Layer,
    fc2: Layer,
    *,
    norm: Norm | None = None,
    stats: Tensor | None = None,
    activation: str = "gelu",
    layer_scale: Tensor | None = None,
    sample_scale: Tensor | None = None,
    residual: Tensor | None = None,
    recompute: bool = False,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Equations (1) and (2)."""

    def hidden_to_out(x: Tensor) -> Tensor:
        h = linear.reference(x, *fc1, norm=norm, activation=activation)  # (1)
        return linear.reference(h, *fc2, layer_scale=layer_scale, sample_scale=sample_scale, residual=residual)  # (2)

    y = checkpoint(hidden_to_out, x, use_reentrant=False) if recompute else hidden_to_out(x)
    return (y, layer_norm.row_stats(y)) if return_stats else y


@jit
def _fwd_kernel(
    x_ptr, w1_ptr, const_ptr, colsum_ptr, w2_ptr, b2_ptr, layer_scale_ptr, scale_ptr, residual_ptr, y_ptr, y_stats_ptr,
    M, F, x_stride, rows_per_image, eps,
    ACTIVATION: tl.constexpr, HAS_NORM: tl.constexpr, HAS_CONST: tl.constexpr, HAS_B2: tl.constexpr,
    HAS_LAYER_SCALE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, STATS: tl.constexpr,
    EVEN: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M whole rows; streams the hidden layer, BLOCK_F values at a time. Equations (1) and (2)."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_m = m < M
    x0, x1 = head(x_ptr, m, x_stride, M, D, D0, D1, True)  # [BLOCK_M, D0], [BLOCK_M, D1]
    mean = m
    rstd = m
    if HAS_NORM:
        a, b = x0.to(tl.float32), x1.to(tl.float32)
        mean = tl.sum(a, 1) / D
        if D1 > 0:
            mean += tl.sum(b, 1) / D
        a = tl.where((tl.arange(0, D0) < D)[None, :], a - mean[:, None], 0.0)
        spread = tl.sum(a * a, 1)
        if D1 > 0:
            b = tl.where((D0 + tl.arange(0, D1) < D)[None, :], b - mean[:, None], 0.0)
            spread += tl.sum(b * b, 1)
        rstd = tl.rsqrt(spread / D + eps)
    y0, y1 = no_head(BLOCK_M, D0, D1)
    for first in range(0, F, BLOCK_F):
        f = first + tl.arange(0, BLOCK_F)
        a0, a1 = head(w1_ptr, f, D, F, D, D0, D1, not EVEN)  # [BLOCK_F, D0], [BLOCK_F, D1]
        h = scores(x0, x1, a0, a1, D1, "tf32")  # [BLOCK_M, BLOCK_F]
        h = activate(with_norm(h, colsum_ptr, const_ptr, mean, rstd, f, F, HAS_NORM, HAS_CONST), ACTIVATION, False)
        h = h.to(x0.dtype)
        y0 = tl.dot(h, _columns(w2_ptr, f, F, 0, D, D0, EVEN), y0)
        if D1 > 0:
            y1 = tl.dot(h, _columns(w2_ptr, f, F, D0, D, D1, EVEN), y1)
    scale = rstd
    if HAS_SCALE:
        scale = tl.load(scale_ptr + m.to(tl.int32) // rows_per_image, mask=in_m, other=0.0).to(tl.float32)
    count, total, spread = no_stats(BLOCK_M, (D1 if D1 > 0 else D0) // 8)
    count, total, spread = finish(
        y0, y0, b2_ptr, None, layer_scale_ptr, residual_ptr, y_ptr, None, mean, rstd, scale, count, total, spread,
        m, tl.arange(0, D0), M, D, None, False, HAS_B2, HAS_LAYER_SCALE, HAS_SCALE, HAS_RESIDUAL, False, STATS,
    )  # fmt: skip
    if D1 > 0:
        count, total, spread = finish(
            y1, y1, b2_ptr, None, layer_scale_ptr, residual_ptr, y_ptr, None, mean, rstd, scale, count, total, spread,
            m, D0 + tl.arange(0, D1), M, D, None, False, HAS_B2, HAS_LAYER_SCALE, HAS_SCALE, HAS_RESIDUAL, False, STATS,
        )  # fmt: skip
    if STATS:
        put_stats(y_stats_ptr + m * 2, in_m, count, total, spread)


@jit
def _columns(w_ptr, f, F, first: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """Columns f of W₂ [D, F], transposed: [len(f), WIDTH], for the outputs first … first + WIDTH."""
    d = first + tl.arange(0, WIDTH)
    at = w_ptr + d.to(tl.int64)[None, :] * F + f[:, None]
    if EVEN and first + WIDTH <= D:
        return tl.load(at)
    return tl.load(at, mask=(f < F)[:, None] & (d < D)[None, :], other=0.0)


def _fwd(x, w1, const, colsum, w2, b2, layer_scale, sample_scale, residual, eps, activation, return_stats):
    """(y, stats [M, 1, 2]) in one launch: LN is folded when `colsum` is given."""
    y, y_stats = outputs = _fwd_fake(
        x, w1, const, colsum, w2, b2, layer_scale, sample_scale, residual, eps, activation, return_stats
    )
    D, F = x.shape[-1], len(w1)
    flat = x.reshape(-1, D)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    residual = None if residual is None else residual.reshape(-1, D).contiguous()
    blocks, (D0, D1) = _whole(x, w2, activation), split(D)
    if len(flat):
        _fwd_kernel[(cdiv(len(flat), blocks["BLOCK_M"]),)](
            flat, w1.contiguous(), const, colsum, w2.contiguous(), b2, layer_scale, sample_scale, residual, y, y_stats,
            len(flat), F, flat.stride(0), cdiv(len(flat), x.shape[0]), eps, ACTIVATION=activation,
            HAS_NORM=colsum is not None, HAS_CONST=const is not None, HAS_B2=b2 is not None,
            HAS_LAYER_SCALE=layer_scale is not None, HAS_SCALE=sample_scale is not None,
            HAS_RESIDUAL=residual is not None, STATS=return_stats, EVEN=F % blocks["BLOCK_F"] == 0, D=D, D0=D0, D1=D1,
            **blocks,
        )  # fmt: skip
    return outputs


def _fwd_fake(x, w1, const, colsum, w2, b2, layer_scale, sample_scale, residual, eps, activation, return_stats):
    M = math.prod(x.shape[:-1])
    y = x.new_empty(x.shape, dtype=linear.output_dtype(x, layer_scale, residual))
    return y, x.new_empty((M, 1, 2) if return_stats else (0,), dtype=torch.float32)


def _whole(x, w2, activation):
    """Launch parameters of the one launch; None, as by a row with BLOCK_F = 0, where h goes through memory."""
    D, size = x.shape[-1], sum(split(x.shape[-1])) * x.element_size()
    if x.dtype == torch.float32 or activation == "swiglu" or len(w2) != D or size > SPACE[-1][0]:
        return None
    limit, default = next(row for row in SPACE if size <= row[0])
    blocks = config(f"mlp.fwd.{limit}", default, x.device)
    return blocks if blocks["BLOCK_F"] else None


def _bwd(
    dy, x, w1, b1, w2, b2, pre, h, layer_scale, sample_scale, mean, rstd, norm_weight, norm_bias, activation, norm,
    around, needs,
):  # fmt: skip
    """(dx, dw1, db1, dnorm [2, D], dw2, db2, dlayer_scale); `needs` are x and the parameters of fc1 and of fc2."""
    need_x, need_1, need_2 = needs
    dpre2, _, sums = product_grad(
        dy, x, len(w2), None, layer_scale, sample_scale, None, None, None, False, b2 is not None and need_2
    )
    hidden = x.new_empty(len(dpre2), w2.shape[1])  # for its shape and dtype
    dh = input_grad(dpre2, hidden, w2, layer_scale, None, None, None, False)
    again = h is None and need_2
    dpre1, made, sums1 = product_grad(
        dh.view(*x.shape[:-1], w2.shape[1]), x, len(w1), pre, None, None, mean, rstd, activation, norm, True, again
    )  # (3)
    outputs = [None] * 7
    if need_x:
        outputs[0] = input_grad(dpre1, x, w1, None, norm_weight, mean, rstd, norm, dy if around else None)
    if need_1:
        outputs[1], outputs[2], _, outputs[3] = weight_grad(
            dpre1, x, w1, b1, None, norm_weight, norm_bias, sums1, activation, norm
        )
    if need_2:
        outputs[4], outputs[5], outputs[6], _ = weight_grad(
            dpre2, made if again else h, w2, b2, layer_scale, None, None, sums, None, False
        )
    return tuple(x.new_empty(0) if t is None else t for t in outputs)


def _bwd_fake(
    dy, x, w1, b1, w2, b2, pre, h, layer_scale, sample_scale, mean, rstd, norm_weight, norm_bias, activation, norm,
    around, needs,
):  # fmt: skip
    need_x, need_1, need_2 = needs
    dw1, db1, _, dnorm = weight_grad_like(x, w1, b1, None, norm, need_1, need_1)
    dw2, db2, dlayer_scale, _ = weight_grad_like(x, w2, b2, layer_scale, False, need_2, need_2)
    grads = torch.empty_like(x) if need_x else None, dw1, db1, dnorm, dw2, db2, dlayer_scale
    return tuple(x.new_empty(0) if t is None else t.contiguous() for t in grads)


_fwd_op = register(
    "mlp_fwd",
    "(Tensor x, Tensor w1, Tensor? const, Tensor? colsum, Tensor w2, Tensor? b2, Tensor? layer_scale, "
    "Tensor? sample_scale, Tensor? residual, float eps, str activation, bool return_stats) -> (Tensor, Tensor)",
    _fwd,
    _fwd_fake,
)
_bwd_op = register(
    "mlp_bwd",
    "(Tensor dy, Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, Tensor pre, Tensor? h, Tensor? layer_scale, "
    "Tensor? sample_scale, Tensor mean, Tensor rstd, Tensor? norm_weight, Tensor? norm_bias, str activation, "
    "bool norm, bool around, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _bwd,
    _bwd_fake,
)


class _Fn(torch.autograd.Function):
    """Two linear_fwd or one mlp_fwd, one mlp_bwd; keeps the pre-activation, or nothing but x with `recompute`."""

    @staticmethod
    def forward(
        ctx, x, w2, b2, w1, b1, norm_weight, norm_bias, made, colsum, const, stats, layer_scale, scale, residual, facts
    ):
        activation, norm, eps, around, _, keep, return_stats = facts
        keep = keep and any(ctx.needs_input_grad)
        added = x if around else residual
        first = linear.folded(x, (w1, b1, norm_weight, norm_bias, made, colsum, const), norm)
        if not keep and _whole(x, w2, activation):
            y, y_stats = _fwd_op(
                x, *first, w2.to(x.dtype), b2, layer_scale, scale, added, eps, activation, return_stats
            )
            pre = mean = rstd = None
        else:
            h, pre, mean, rstd = _hidden(x, first, stats, facts, keep)
            y, *_, y_stats = linear.fwd_op(
                h, w2.to(x.dtype), b2, None, None, 0.0, None, layer_scale, scale, added, False, return_stats
            )
        colsum = colsum if made is None else None  # with a source, `recompute` folds again
        ctx.save_for_backward(x, w2, b2, w1, b1, norm_weight, norm_bias, colsum, layer_scale, scale, pre, mean, rstd)
        ctx.facts, ctx.residual_dtype = facts, None if residual is None else residual.dtype
        ctx.mark_non_differentiable(y_stats)
        return y, y_stats

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, _):
        x, w2, b2, w1, b1, norm_weight, norm_bias, colsum, layer_scale, scale, pre, mean, rstd = ctx.saved_tensors
        activation, norm, _, around, recompute, *_ = ctx.facts
        need_x, need_w2, need_b2, *need_1, _, _, _, _, need_layer_scale, _, _, _ = need = ctx.needs_input_grad
        needs = [need_x, any(need_1), need_w2 or need_b2 or need_layer_scale]
        dresidual = None if ctx.residual_dtype is None else dy.to(ctx.residual_dtype)
        if not any(needs):  # only the residual learns
            return *[None] * 13, dresidual, None
        h = None
        if recompute:
            first = linear.folded(x, (w1, b1, norm_weight, norm_bias, None, colsum, None), norm)
            h, pre, mean, rstd = _hidden(x, first, None, ctx.facts, True)
        dx, dw1, db1, dnorm, dw2, db2, dlayer_scale = _bwd_op(
            dy, x, w1, b1, w2, b2, pre, h, layer_scale, scale, mean, rstd, norm_weight, norm_bias, activation, norm,
            around, needs,
        )  # fmt: skip
        none = [None] * 4  # of W', its column sums, its constant and the statistics
        grads = dx, dw2, db2, dw1, db1, dnorm[:1], dnorm[1:], *none, dlayer_scale
        parameters = x, w2, b2, w1, b1, norm_weight, norm_bias, *none, layer_scale
        wanted = zip(grads, parameters, need, strict=False)
        return *(g.view(p.shape).to(p.dtype) if n else None for g, p, n in wanted), None, dresidual, None


def _hidden(x, first, stats, facts, save):
    """Equation (1): (h, pre, mean, rstd), from what `linear.folded` gives for fc1."""
    w, const, colsum = first
    activation, _, eps, *_ = facts
    h, pre, mean, rstd, _ = linear.fwd_op(x, w, const, colsum, stats, eps, activation, None, None, None, save, False)
    return h, pre, mean, rstd


def _inputs(case: dict[str, int], dtype: torch.dtype, device: torch.device | str) -> dict:
    randn, (B, N, D, F) = make(device, dtype), (case[a] for a in ("B", "N", "D", "F"))
    keep = torch.tensor([b % 2 / 0.5 for b in range(B)], dtype=dtype, device=device)
    swiglu = "swiglu" in case
    return {
        "x": randn(B, N, D),
        "fc1": (randn(2 * F if swiglu else F, D, scale=D**-0.5), randn(2 * F if swiglu else F)),
        "activation": "swiglu" if swiglu else "gelu",
        "fc2": (randn(D, F, scale=F**-0.5), randn(D)),
        "norm": (randn(D), randn(D), 1e-6),
        "layer_scale": randn(D),
        "sample_scale": keep,
        "residual": randn(B, N, D),
        "recompute": bool(case.get("recompute")),
    }


OP = Op(
    name="mlp",
    run=mlp,
    reference=reference,
    cases={"ragged": dict(B=2, N=3, D=5, F=9), "recompute": dict(B=2, N=2, D=3, F=4, recompute=1)},
    inputs=_inputs,
    ragged={
        "vit": dict(B=2, N=50, D=48, F=192),
        "small": dict(B=3, N=23, D=192, F=96, recompute=1),
        "odd_recompute": dict(B=3, N=5, D=33, F=70, recompute=1),
        "swiglu": dict(B=2, N=10, D=32, F=24, swiglu=1),
        "empty": dict(B=0, N=3, D=8, F=16),
        "empty_recompute": dict(B=2, N=0, D=8, F=16, recompute=1),
    },
)
