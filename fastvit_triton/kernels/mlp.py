"""The MLP half of a Transformer block: LayerNorm, two linear layers with an activation between, scales, residual.

Math      h = act(LN(x) W₁ᵀ + b₁)                                   [M, F]      (1)
          y = sample_scale · gamma · (h W₂ᵀ + b₂) + residual        [M, D]      (2)
Backward  h = act(pre₁) again, then the backward of `linear` twice           (3)
Kernels   Two launches of `linear`'s product forward; with a norm one that folds it into W₁, and one for row statistics
          unless they are given.
Cost      4·M·D·F flops; bytes = x + W₁ + W₂ + y (+ residual) + 2·h.
Saved     x and pre₁ = LN(x) W₁ᵀ + b₁, not h: with x, qkv and o of the attention half 10·D values a token for F = 4·D,
          where eager PyTorch keeps 16·D. With `recompute` only x: 6·D.
Sources   Vaswani et al., arXiv:1706.03762, eq. 2; Dosovitskiy et al., ViT, arXiv:2010.11929, eq. 3.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from . import layer_norm, linear
from .linear import Norm, Pair
from .op import Op, cast, cdiv, expect, make, register, usable
from .tile import activate, jit, tl

Layer = tuple[Tensor | Pair, Tensor | Pair | None]  # weight and bias


def mlp(
    x: Tensor,
    fc1: Layer,
    fc2: Layer,
    *,
    norm: Norm | None = None,
    stats: Tensor | None = None,
    activation: str = "gelu",
    gamma: Tensor | None = None,
    sample_scale: Tensor | None = None,
    residual: Tensor | None = None,
    recompute: bool = False,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """sample_scale · gamma · fc2(act(fc1(LN(x)))) + residual.

    Args:
        x: [..., D].
        fc1: (weight [F, D], bias [F]); for "swiglu" as in `linear`.
        fc2: (weight [D, F], bias [D]).
        norm: (weight [D], bias [D], eps) of a LayerNorm on x.
        stats: [M, tiles, 2] fp32, row statistics of x; see `linear`.
        activation: as in `linear`.
        gamma: [D], LayerScale.
        sample_scale: [B], drop-path factor of each image.
        residual: [..., D], added last.
        recompute: do not keep the hidden layer for the backward pass, compute it again there.
        return_stats: also return the output's row statistics.

    Returns:
        [..., D]; with `return_stats` also [M, tiles, 2] fp32.

    Raises:
        ValueError: a size does not fit, or the activation is unknown.
    """
    linear.check(x, *fc1, activation)
    linear.check_norm(x, norm, stats)
    expect("fc2 weight", fc2[0], D=None, F=linear.outputs(fc1[0], activation))
    if fc2[1] is not None:
        expect("fc2 bias", fc2[1], D=fc2[0].shape[0])
    linear.check_branch(x, fc2[0].shape[0], gamma, sample_scale, residual)
    if usable(x) and max(x.shape[-1], fc2[0].shape[1]) <= layer_norm.MAX_D:
        if not isinstance(fc1[0], Tensor):
            fc1 = torch.cat(fc1[0]), None if fc1[1] is None else torch.cat(fc1[1])
        operand = cast(x)[0]
        if norm is not None and operand.dtype != x.dtype:  # a float32 stream under autocast: LN keeps its precision
            operand, norm = cast(layer_norm.layer_norm(x, *norm))[0], None
        gain, shift, eps = (None, None, 0.0) if norm is None else norm
        around = residual is operand  # the usual case; torch.compile wants each tensor passed once
        keep = torch.is_grad_enabled() and not recompute  # inside the Function gradients are always off
        facts = norm is not None, eps, activation, around, recompute, keep, return_stats
        residual = None if around else residual
        y, out_stats = _Fn.apply(operand, *fc1, *fc2, gain, shift, stats, gamma, sample_scale, residual, facts)
        return (y, out_stats) if return_stats else y
    return reference(
        x,
        fc1,
        fc2,
        norm=norm,
        stats=stats,
        activation=activation,
        gamma=gamma,
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
    gamma: Tensor | None = None,
    sample_scale: Tensor | None = None,
    residual: Tensor | None = None,
    recompute: bool = False,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Equations (1) and (2)."""

    def hidden_to_out(x: Tensor) -> Tensor:
        h = linear.reference(x, *fc1, norm=norm, activation=activation)  # (1)
        return linear.reference(h, *fc2, gamma=gamma, sample_scale=sample_scale, residual=residual)  # (2)

    y = checkpoint(hidden_to_out, x, use_reentrant=False) if recompute else hidden_to_out(x)
    return (y, linear.row_stats(y)) if return_stats else y


@jit
def _activate_kernel(pre_ptr, h_ptr, M, F, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr):
    """One program: one tile of h = act(pre), [BLOCK_M, BLOCK_F]; a SwiGLU's gate and value stand side by side."""
    tiles = tl.cdiv(F, BLOCK_F)
    m = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    f = tl.program_id(0) % tiles * BLOCK_F + tl.arange(0, BLOCK_F)
    inside = (m < M)[:, None] & (f < F)[None, :]
    if ACTIVATION == "swiglu":
        at = m[:, None] * 2 * F + f[None, :]
        h = activate(tl.load(pre_ptr + at, mask=inside, other=0.0).to(tl.float32), ACTIVATION)
        h *= tl.load(pre_ptr + at + F, mask=inside, other=0.0).to(tl.float32)
    else:
        at = m[:, None] * F + f[None, :]
        h = activate(tl.load(pre_ptr + at, mask=inside, other=0.0).to(tl.float32), ACTIVATION)
    tl.store(h_ptr + m[:, None] * F + f[None, :], h.to(h_ptr.dtype.element_ty), mask=inside)


def _activate(pre, activation):
    """h [M, F] = act(pre)."""
    h = _activate_fake(pre, activation)
    M, F = h.shape
    if M:
        _activate_kernel[(cdiv(M, 16) * cdiv(F, 128),)](
            pre, h, M, F, ACTIVATION=activation, BLOCK_M=16, BLOCK_F=128, num_warps=4, enable_fp_fusion=True
        )
    return h


def _activate_fake(pre, activation):
    return pre.new_empty(pre.shape[0], pre.shape[1] // 2 if activation == "swiglu" else pre.shape[1])


_activate_op = register("mlp_activate", "(Tensor pre, str activation) -> Tensor", _activate, _activate_fake)


class _Fn(torch.autograd.Function):
    """Two linear_fwd, two linear_bwd; keeps the pre-activation, or nothing but x with `recompute`."""

    @staticmethod
    def forward(ctx, x, w1, b1, w2, b2, norm_weight, norm_bias, stats, gamma, scale, residual, facts):
        *_, around, _, keep, return_stats = facts
        keep = keep and any(ctx.needs_input_grad)
        h, pre, mean, rstd = _hidden(x, w1, b1, norm_weight, norm_bias, stats, facts, keep)
        added = x if around else residual
        y, *_, out_stats = linear._fwd_op(
            h, w2.to(x.dtype), b2, None, None, 0.0, None, gamma, scale, added, False, return_stats
        )
        ctx.save_for_backward(x, w1, b1, w2, b2, norm_weight, norm_bias, gamma, scale, pre, mean, rstd)
        ctx.facts, ctx.residual_dtype = facts, None if residual is None else residual.dtype
        ctx.mark_non_differentiable(out_stats)
        return y, out_stats

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, _):
        x, w1, b1, w2, b2, norm_weight, norm_bias, gamma, scale, pre, mean, rstd = ctx.saved_tensors
        norm, _, activation, around, recompute, *_ = ctx.facts
        if recompute:
            h, pre, mean, rstd = _hidden(x, w1, b1, norm_weight, norm_bias, None, ctx.facts, True)
        else:
            h = _activate_op(pre, activation).view(*x.shape[:-1], w2.shape[1])  # (3)
        nothing = mean.new_empty(0)
        dh, dw2, db2, dgamma, _, _ = linear._bwd_op(
            dy, h, w2, b2, nothing, gamma, scale, nothing, nothing, None, None, None, False, True
        )
        dx, dw1, db1, _, dnorm_weight, dnorm_bias = linear._bwd_op(
            dh,
            x,
            w1,
            b1,
            pre,
            None,
            None,
            mean,
            rstd,
            norm_weight,
            norm_bias,
            activation,
            norm,
            ctx.needs_input_grad[0],
        )
        learned = zip(
            (b1, b2, norm_weight, norm_bias, gamma), (db1, db2, dnorm_weight, dnorm_bias, dgamma), strict=True
        )
        db1, db2, dnorm_weight, dnorm_bias, dgamma = (None if p is None else g.to(p.dtype) for p, g in learned)
        dx = (dx + dy if around else dx) if ctx.needs_input_grad[0] else None
        dresidual = None if ctx.residual_dtype is None else dy.to(ctx.residual_dtype)
        return dx, dw1, db1, dw2, db2, dnorm_weight, dnorm_bias, None, dgamma, None, dresidual, None


def _hidden(x, w1, b1, norm_weight, norm_bias, stats, facts, save):
    """Equation (1): (h, pre, mean, rstd)."""
    norm, eps, activation, *_ = facts
    w, const, colsum = w1.to(x.dtype), b1, None
    if norm:
        w, colsum, const = linear._fold_op(w1, b1, norm_weight, norm_bias, x.dtype)
    h, pre, mean, rstd, _ = linear._fwd_op(x, w, const, colsum, stats, eps, activation, None, None, None, save, False)
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
        "gamma": randn(D),
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
        "odd_recompute": dict(B=3, N=5, D=33, F=70, recompute=1),
        "swiglu": dict(B=2, N=10, D=32, F=24, swiglu=1),
    },
)
