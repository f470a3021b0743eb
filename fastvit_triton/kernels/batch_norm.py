"""BatchNorm by stored statistics, then an addition and an activation: all that follows a convolution, in one pass.

Math      pre = γ_c·(x − μ_c) / √(σ²_c + ε) + β_c + residual    for channel c                               (1)
          y = act(pre)                                                                                      (2)
Backward  g = dy ∘ act'(pre),  dresidual = g,  dx = γ_c / √(σ²_c + ε) · g                                   (3)
          dβ_c = Σ g,  dγ_c = Σ g ∘ (x − μ_c) / √(σ²_c + ε)    over the pixels of all images                 (4)
Kernels   (2) and (3) are one kernel. A map is read as a matrix in the order of its memory: its rows are planes, or, if
          the channels are last, pixels. Equation (4), for parameters that are trained, is PyTorch's sums of g.
Cost      bytes = x + y (+ residual); the backward pass reads dy, x (and residual), and writes dx (and g).
Saved     x and residual; μ, σ², γ and β.
Limits    μ and σ² get no gradient: they are statistics that were gathered before.
Sources   Ioffe & Szegedy, Batch normalization, arXiv:1502.03167, algorithm 2; after a convolution and before the
          activation as in He et al., arXiv:1512.03385, section 3.4.
"""

from typing import no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

from . import check, choose
from .activation import ACTIVATIONS, GATED, activate, activate_grad
from .argument import expect_floating, expect_mixable, expect_number
from .backend import kernels_available
from .launch import cdiv, launch, power_of_2
from .op import Op, expect, make_randn, once_differentiable, register
from .tile import jit, tl

TILE = 2048  # values of a program
MAX_COLUMNS = 1024


def batch_norm_act(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """BatchNorm by these statistics, plus a residual, then the activation: equations (1) and (2).

    Args:
        x: [B, C, H, W], in PyTorch's order of axes or with channels last in memory; others are copied.
        mean: μ [C].
        variance: σ² [C].
        weight: γ [C], or None.
        bias: β [C], or None.
        eps: ε, added to the variance.
        activation: a name in `activation.ACTIVATIONS`, or None.
        residual: [B, C, H, W], added before the activation.

    Returns:
        [B, C, H, W] in the dtype and memory order of x.

    Raises:
        ValueError: a size or device does not fit, the activation is unknown, or eps is negative or not finite.
        TypeError: an argument is of another type or dtype.
    """
    expect("x", x, B=None, C=None, H=None, W=None)
    expect_floating("x", x)
    for name, t in dict(mean=mean, variance=variance).items():
        expect(name, t, x, C=x.shape[1])
        expect_mixable(name, t, x)
    for name, parameter in dict(weight=weight, bias=bias).items():
        if parameter is not None:
            expect(name, parameter, x, C=x.shape[1])
            expect_mixable(name, parameter, x)
    expect_number("eps", eps, 0.0)
    check.activation_name(activation)
    if activation in GATED:
        raise ValueError(f"activation is {activation!r}, which has a gate; use one of {', '.join(ACTIVATIONS)} or None")
    if residual is not None:
        B, C, H, W = x.shape
        expect("residual", residual, x, B=B, C=C, H=H, W=W)
        expect_floating("residual", residual, x)
    mean, variance = mean.detach(), variance.detach()
    if kernels_available(x) and _kernel_is_chosen(x, activation, residual):
        return _Fn.apply(x, residual, mean, variance, weight, bias, eps, activation)
    return reference(x, mean, variance, weight, bias, eps, activation=activation, residual=residual)


def _kernel_is_chosen(x, activation, residual):
    """True if the plan selects our kernel, not the reference."""
    B, C, H, W = x.shape
    return choose.prefers_kernel(
        x, "batch_norm_act", choose.rows_of(B * H * W), C, activation is not None, residual is not None
    )


def reference(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Equations (1) and (2)."""
    dtype = x.dtype
    for t in (mean, variance, weight, bias):
        dtype = dtype if t is None else torch.promote_types(dtype, t.dtype)
    weight, bias = (None if t is None else t.to(dtype).contiguous() for t in (weight, bias))
    mean, variance = (t.to(dtype).contiguous() for t in (mean, variance))  # its backward pass ignores their strides
    y = F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)  # takes float32 vectors for 16-bit maps
    y = y if residual is None else y + residual
    return y if activation is None else ACTIVATIONS[activation](y)


@jit
@no_type_check
def _vector(at, inside, ROWS: tl.constexpr):
    """Values of channels as fp32, [BLOCK, 1] if ROWS, else [1, BLOCK]."""
    values = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return values[:, None] if ROWS else values[None, :]


@jit(do_not_specialize=["rows"])
@no_type_check
def _kernel(
    x_ptr, residual_ptr, mean_ptr, variance_ptr, weight_ptr, bias_ptr, dy_ptr, y_ptr, dx_ptr, rows, columns, C, eps,
    ROWS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One program: a tile of a map as a matrix. Stores y of equation (2).

    If dy_ptr is not None, stores g of equation (3) instead if y_ptr is not None, and dx if dx_ptr is not None.
    ROWS: the rows are planes, whose channel is the row's number mod C; otherwise the columns are the channels.
    """
    tiles = tl.cdiv(columns, BLOCK_S)
    r = tl.program_id(0) // tiles * BLOCK_R + tl.arange(0, BLOCK_R)  # 32 bits are enough for the number of pixels
    s = tl.program_id(0) % tiles * BLOCK_S + tl.arange(0, BLOCK_S)
    inside = (r < rows)[:, None] & (s < columns)[None, :]
    at = r.to(tl.int64)[:, None] * columns + s[None, :]
    c, in_c = s, s < columns
    if ROWS:
        c, in_c = r % C, r < rows
    mean = _vector(mean_ptr + c, in_c, ROWS)
    factor = 1.0 / tl.sqrt(_vector(variance_ptr + c, in_c, ROWS) + eps)
    if weight_ptr is not None:
        factor *= _vector(weight_ptr + c, in_c, ROWS)
    pre = (tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) - mean) * factor
    if bias_ptr is not None:
        pre += _vector(bias_ptr + c, in_c, ROWS)
    if residual_ptr is not None:
        pre += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    if dy_ptr is not None:
        g = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32) * activate_grad(pre, ACTIVATION, EXACT)
        if dx_ptr is not None:
            tl.store(dx_ptr + at, (g * factor).to(dx_ptr.dtype.element_ty), mask=inside)
        if y_ptr is not None:
            tl.store(y_ptr + at, g.to(y_ptr.dtype.element_ty), mask=inside)
    else:
        y = activate(pre, ACTIVATION, EXACT)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


def _order(x: Tensor) -> torch.memory_format:
    """The order in memory in which a map is read and written."""
    last = not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def _run(x, residual, mean, variance, weight, bias, eps, activation, dy, y, dx):
    """Launches the kernel, which writes y or g, and dx."""
    order = _order(x)
    x, residual, dy = (None if t is None else t.contiguous(memory_format=order) for t in (x, residual, dy))
    B, C, H, W = x.shape
    planes = order is torch.contiguous_format
    rows, columns = (B * C, H * W) if planes else (B * H * W, C)
    block = min(power_of_2(max(columns, 16)), MAX_COLUMNS)
    height = TILE // block
    if x.numel():
        launch(
            _kernel, (cdiv(rows, height) * cdiv(columns, block),),
            x, residual, mean, variance, weight, bias, dy, y, dx, rows, columns, C, float(eps),
            ROWS=planes, ACTIVATION=activation, BLOCK_R=height, BLOCK_S=block,
            num_warps=4, num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip


def _fwd(x, residual, mean, variance, weight, bias, eps, activation):
    """y [B, C, H, W]."""
    y = _like(x)
    _run(x, residual, mean, variance, weight, bias, eps, activation, None, y, None)
    return y


def _fwd_fake(x, residual, mean, variance, weight, bias, eps, activation):
    return _like(x)


def _bwd(dy, x, residual, mean, variance, weight, bias, eps, activation, needs):
    """(dx, g); `needs`: each of them."""
    dx, g = _bwd_fake(dy, x, residual, mean, variance, weight, bias, eps, activation, needs)
    given = x, residual, mean, variance, weight, bias, eps, activation, dy
    _run(*given, g if needs[1] else None, dx if needs[0] else None)
    return dx, g


def _bwd_fake(dy, x, residual, mean, variance, weight, bias, eps, activation, needs):
    dx, g = (_like(x) if need else x.new_empty(0) for need in needs)
    return dx, g


def _like(x: Tensor) -> Tensor:
    """A map without values, in the order of x."""
    return torch.empty_like(x, memory_format=_order(x))


ARGUMENTS = (
    "Tensor x, Tensor? residual, Tensor mean, Tensor variance, Tensor? weight, Tensor? bias, float eps, str? activation"
)
_fwd_op = register("batch_norm_act_fwd", f"({ARGUMENTS}) -> Tensor", _fwd, _fwd_fake)
_bwd_op = register("batch_norm_act_bwd", f"(Tensor dy, {ARGUMENTS}, bool[] needs) -> (Tensor, Tensor)", _bwd, _bwd_fake)


class _Fn(torch.autograd.Function):
    """Autograd of batch_norm_act_fwd by batch_norm_act_bwd; saves the tensors listed in the header."""

    @staticmethod
    def forward(ctx, x, residual, mean, variance, weight, bias, eps, activation):
        ctx.save_for_backward(x, residual, mean, variance, weight, bias)
        ctx.settings = eps, activation
        return _fwd_op(x, residual, mean, variance, weight, bias, *ctx.settings)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x, residual, mean, variance, weight, bias), (eps, _) = ctx.saved_tensors, ctx.settings
        need_x, need_residual, _, _, need_weight, need_bias, *_ = ctx.needs_input_grad
        needs = [need_x, need_residual or need_weight or need_bias]
        dx, g = _bwd_op(dy, x, residual, mean, variance, weight, bias, *ctx.settings, needs)
        dweight = dbias = None
        if need_bias:  # (4)
            dbias = g.sum((0, 2, 3), dtype=torch.float32).to(bias.dtype)
        if need_weight:
            mean, variance = (t.float()[:, None, None] for t in (mean, variance))
            dweight = (g.float() * (x.float() - mean)).sum((0, 2, 3)) * (variance + eps).rsqrt().flatten()
            dweight = dweight.to(weight.dtype)
        return (
            dx if need_x else None, g if need_residual else None, None, None, dweight, dbias, None, None,
        )  # fmt: skip


def _inputs(case: dict, dtype: torch.dtype, device: torch.device | str) -> dict:
    randn, (B, C, H, W) = make_randn(device, dtype), (case[a] for a in ("B", "C", "H", "W"))
    order = torch.channels_last if case.get("last") else torch.contiguous_format
    x = randn(B, C, H, W).detach().contiguous(memory_format=order).requires_grad_()
    mean, variance = randn(C).detach(), (1 + randn(C, scale=0.2).detach()).abs()
    inputs = {"x": x, "mean": mean, "variance": variance, "weight": randn(C), "bias": randn(C), "eps": 1e-5}
    if case.get("residual"):
        inputs["residual"] = randn(B, C, H, W)
    return inputs | {"activation": next((name for name in ACTIVATIONS if name in case), None)}


OP = Op(
    name="batch_norm_act",
    run=batch_norm_act,
    reference=reference,
    cases={
        "silu": dict(B=2, C=3, H=4, W=3, silu=1),
        "residual": dict(B=2, C=4, H=2, W=3, relu=1, residual=1),
        "channels_last": dict(B=2, C=3, H=3, W=2, silu=1, residual=1, last=1),
        "norm": dict(B=1, C=5, H=2, W=2),
    },
    inputs=_inputs,
    ragged={
        "gelu": dict(B=2, C=7, H=19, W=23, gelu=1),
        "relu_residual": dict(B=2, C=24, H=9, W=11, relu=1, residual=1),
        "channels_last": dict(B=3, C=70, H=5, W=9, relu=1, residual=1, last=1),
        "wide_map": dict(B=1, C=3, H=40, W=41, silu=1),
        "one_pixel": dict(B=3, C=33, H=1, W=1, hardswish=1, residual=1),
        "empty": dict(B=0, C=4, H=3, W=3, relu=1),
    },
)
