"""Depthwise convolution of tokens on a grid, with bias, activation and residual; channels are the last axis.

Math      pre[i, j] = Σ_uv w[u, v] ∘ x[s·i + u − P, s·j + v − P] + b         x is 0 outside the grid      (1)
          y = act(pre) (+ x)                     for kernel side K, P = (K − 1) / 2, stride s             (2)
Backward  g = dy ∘ act'(pre)                                                                              (3)
          dx[i, j] = Σ_uv w[u, v] ∘ g[(i + P − u) / s, (j + P − v) / s] (+ dy)    where s divides both    (4)
          dw and db by equation (5) of `depthwise_backward`
Kernels   (2), (3) and (4) are one kernel: a program computes several rows of the output below each other and loads
          each value of x that they share once. (4) reads g as if s − 1 zeros stood between its values. The weight is
          read as [K², C].
Cost      2·K²·M·C flops; bytes = x + y, in the backward pass x + dy + g, g + dx and x + g.
Saved     x and the weight as [K², C].
Sources   Howard et al., MobileNets, arXiv:1704.04861, section 3.1. As a positional encoding: Chu et al., CPVT,
          arXiv:2102.10882, section 4; in an MLP: Wang et al., PVT v2, arXiv:2106.13797, section 3.3.
"""

import math
from typing import no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

from . import check, choose
from .activation import ACTIVATIONS, GATED, activate, activate_grad
from .argument import expect_bool, expect_floating, expect_int, expect_nonempty
from .backend import kernels_available
from .depthwise_backward import parameter_sums
from .launch import cdiv, config, launch, power_of_2, product_dtype
from .layer_norm_backward import grads_dtype
from .op import Op, expect, make_randn, once_differentiable, register
from .tile import jit, tl

# Default launch parameters, which fit every architecture; rows of tuned/ override them.
SPACE = {
    "fwd.half": dict(ROWS=4, BLOCK_M=16, BLOCK_C=64, num_warps=4, num_stages=1),
    "fwd.fp32": dict(ROWS=4, BLOCK_M=16, BLOCK_C=32, num_warps=4, num_stages=1),
    "bwd.half": dict(ROWS=2, BLOCK_M=16, BLOCK_C=64, num_warps=4, num_stages=1),
    "bwd.fp32": dict(ROWS=2, BLOCK_M=16, BLOCK_C=32, num_warps=4, num_stages=1),
}
MAX_K = 5  # the kernels are unrolled over the K² taps, and spill with more of them
PROGRAMS = (
    512  # maximum in the sums (5) for one tile of channels; the same on all GPUs, so that they have the same bits
)


def depthwise(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int = 1,
    activation: str | None = None,
    residual: bool = False,
) -> Tensor:
    """Depthwise convolution with zero padding K // 2: act(conv(x) + bias) + x.

    Args:
        x: [B, H, W, C]. Tokens [B, N, C] are viewed as such by `x.unflatten(1, (H, W))`, also without their prefix
            tokens; only the last axis must be contiguous to avoid a copy.
        weight: [C, 1, K, K] for an odd K, as in a convolution with C groups.
        bias: [C], or None.
        stride: 1 or 2.
        activation: a name in `activation.ACTIVATIONS`, or None.
        residual: add x at the end; with a stride of 1 only.

    Returns:
        [B, ⌈H / stride⌉, ⌈W / stride⌉, C], contiguous.

    Raises:
        ValueError: a size or device does not fit, the activation is unknown, or a residual has a stride of 2.
        TypeError: an argument is of another type or dtype.
    """
    expect("x", x, B=None, H=None, W=None, C=None)
    expect_floating("x", x)
    for axis, size in zip("HWC", x.shape[1:], strict=True):
        expect_nonempty("x", axis, size)
    expect("weight", weight, x, C=x.shape[-1], **{"1": 1}, K=None, **{"K'": None})
    expect_floating("weight", weight, x)
    if weight.shape[2] != weight.shape[3] or not weight.shape[2] % 2:
        raise ValueError(f"weight must have a square kernel with an odd side, got shape {list(weight.shape)}")
    if bias is not None:
        expect("bias", bias, x, C=x.shape[-1])
        expect_floating("bias", bias, x)
    expect_int("stride", stride, 1, 2)
    check.activation_name(activation)
    if activation in GATED:
        raise ValueError(f"activation is {activation!r}, which has a gate; use one of {', '.join(ACTIVATIONS)} or None")
    expect_bool("residual", residual)
    if residual and stride != 1:
        raise ValueError(f"residual is True with a stride of {stride}; only a stride of 1 keeps the shape of x")
    ends = stride, activation, residual
    if kernels_available(x) and weight.shape[-1] <= MAX_K and _kernel_is_chosen(x, weight, bias, *ends):
        return _Fn.apply(x, weight, bias, *ends)
    return reference(x, weight, bias, stride=stride, activation=activation, residual=residual)


def _kernel_is_chosen(x, weight, bias, stride, activation, residual):
    """True if the plan selects our kernels, not the reference."""
    rows = choose.rows_of(math.prod(_output_shape(x, stride)[:-1]))
    C = int(weight.shape[0])
    K = int(weight.shape[3])
    copied = (weight.stride(0), *weight.stride()[2:]) != (1, K * C, C)
    sizes = rows, C, K, stride, bias is not None, activation is not None, residual, copied
    return choose.prefers_kernel(x, "depthwise", *sizes)


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int = 1,
    activation: str | None = None,
    residual: bool = False,
) -> Tensor:
    """Equations (1) and (2)."""
    image = x.permute(0, 3, 1, 2)
    padding = weight.shape[-1] // 2
    y = F.conv2d(image, weight, bias, stride, padding, groups=x.shape[-1]).permute(0, 2, 3, 1)  # (1)
    y = y if activation is None else ACTIVATIONS[activation](y)
    return (y + x if residual else y).contiguous()  # (2)


@jit
@no_type_check
def _load_column(w_ptr, v, c, C, K: tl.constexpr, FLIP: tl.constexpr):
    """Loads column v of the kernel from the weight [K², C]: K rows [1, len(c)] fp32; FLIP: rotated by 180°."""
    w = ()
    for u in tl.static_range(K):
        tap = K * K - 1 - (u * K + v) if FLIP else u * K + v
        w += (tl.load(w_ptr + tap * C + c, mask=c < C, other=0.0).to(tl.float32)[None, :],)
    return w


@jit
@no_type_check
def _add_products(acc, w, x, p: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr):
    """Adds row p of the input, times its weight, to each of the ROWS output rows that it contributes to."""
    sums = ()
    for r in tl.static_range(ROWS):
        if p - r * STRIDE >= 0 and p - r * STRIDE < K:
            sums += (acc[r] + w[p - r * STRIDE] * x,)
        else:
            sums += (acc[r],)
    return sums


@jit(do_not_specialize=["B"])
@no_type_check
def _conv_kernel(
    x_ptr, w_ptr, bias_ptr, dy_ptr, residual_ptr, y_ptr, x_strides, residual_strides, B, H, W, OUT_H, OUT_W, C,
    K: tl.constexpr, STRIDE: tl.constexpr, TRANSPOSED: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_C channels of ROWS · BLOCK_M values, in ROWS rows below each other. Equations (1) and (2).

    If dy_ptr is not None, stores g of equation (3). If TRANSPOSED, computes equation (4) from x = g and residual = dy.
    H, W: grid of x; OUT_H, OUT_W: grid of y.
    """
    STEP: tl.constexpr = 1 if TRANSPOSED else STRIDE  # distance of the inputs of two outputs
    GAP: tl.constexpr = STRIDE if TRANSPOSED else 1  # distance of two values of x, with zeros between them
    tiles, groups = tl.cdiv(C, BLOCK_C), tl.cdiv(OUT_H, ROWS)
    m = tl.program_id(0) // tiles * BLOCK_M + tl.arange(0, BLOCK_M)  # 32 bits are enough for the number of tokens
    c = tl.program_id(0) % tiles * BLOCK_C + tl.arange(0, BLOCK_C)
    image, group, column = m // (groups * OUT_W), m // OUT_W % groups, m % OUT_W
    in_b, in_c = image < B, (c < C)[None, :]
    top, left = group * (ROWS * STEP) - K // 2, column * STEP - K // 2
    b, first, j = image.to(tl.int64), group.to(tl.int64) * ROWS, column.to(tl.int64)
    image_at = x_ptr + (b * x_strides[0])[:, None] + c[None, :]
    x_at = image_at + ((first * STEP - K // 2) * x_strides[1] + (j * STEP - K // 2) * x_strides[2])[:, None]
    bias = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    if bias_ptr is not None:
        bias += tl.load(bias_ptr + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    acc = ()
    for _ in tl.static_range(ROWS):
        acc += (bias,)
    for v in tl.static_range(K):
        w = _load_column(w_ptr, v, c, C, K, TRANSPOSED)
        in_column = (left + v >= 0) & (left + v < W * GAP) & ((left + v) % GAP == 0) & in_b
        for p in tl.static_range((ROWS - 1) * STEP + K):
            inside = (top + p >= 0) & (top + p < H * GAP) & ((top + p) % GAP == 0) & in_column
            if GAP == 1:
                at = x_at + (tl.full([], p, tl.int64) * x_strides[1] + tl.full([], v, tl.int64) * x_strides[2])
            else:
                row, place = (top + p) // GAP, (left + v) // GAP
                at = image_at + (row.to(tl.int64) * x_strides[1] + place.to(tl.int64) * x_strides[2])[:, None]
            x = tl.load(at, mask=inside[:, None] & in_c, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_C]
            acc = _add_products(acc, w, x, p, K, STEP, ROWS)
    EXACT: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    y_at = ((b * OUT_H + first) * OUT_W + j)[:, None] * C + c[None, :]
    residual_at = b * residual_strides[0] + first * residual_strides[1] + j * residual_strides[2]
    residual_at = residual_at[:, None] + c[None, :]
    for r in tl.static_range(ROWS):
        y, i = acc[r], tl.full([], r, tl.int64)
        inside = ((group * ROWS + r < OUT_H) & in_b)[:, None] & in_c
        at = y_at + i * OUT_W * C
        if dy_ptr is not None:
            y = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32) * activate_grad(y, ACTIVATION, EXACT)
        else:
            y = activate(y, ACTIVATION, EXACT)
        if residual_ptr is not None:
            y += tl.load(residual_ptr + residual_at + i * residual_strides[1], mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


def _output_shape(x: Tensor, stride: int) -> tuple[int, int, int, int]:
    """[B, H', W', C]."""
    B, H, W, C = x.shape
    return B, (H + stride - 1) // stride, (W + stride - 1) // stride, C


def _blocks(kernel: str, x: Tensor, outputs: Tensor, K: int) -> tuple[dict[str, int], int, int]:
    """(launch parameters of a kernel, "fwd" or "bwd"; blocks of outputs, tiles of channels)."""
    B, H, W, C = outputs.shape
    row = f"{kernel}.{'fp32' if x.dtype == torch.float32 else 'half'}"
    blocks = config(f"depthwise.{row}", SPACE[row], x.device, B * H * W, C, K)
    blocks["ROWS"] = min(blocks["ROWS"], 4 if K <= 3 else 2)  # more weights leave fewer registers
    blocks["BLOCK_C"] = min(blocks["BLOCK_C"], power_of_2(max(C, 16)))
    return blocks, cdiv(B * cdiv(H, blocks["ROWS"]) * W, blocks["BLOCK_M"]), cdiv(C, blocks["BLOCK_C"])


def _readable(x: Tensor) -> Tensor:
    """The tensor if its last axis is contiguous, else a contiguous copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _convolve(x, taps, y, bias=None, dy=None, residual=None, stride=1, activation=None, transposed=False):
    """Launches the kernel of equations (1) to (4); writes y."""
    (B, H, W, _), K = x.shape, math.isqrt(len(taps))
    blocks, programs, tiles = _blocks("fwd", x, y, K)
    strides = (0, 0, 0) if residual is None else residual.stride()[:3]
    if B:
        launch(
            _conv_kernel, (programs * tiles,),
            x, taps, bias, dy, residual, y, x.stride()[:3], strides, B, H, W, *y.shape[1:],
            K=K, STRIDE=stride, TRANSPOSED=transposed, ACTIVATION=activation, **blocks,
        )  # fmt: skip


def _fwd(x, taps, bias, stride, activation, residual, dtype):
    """y [B, H', W', C]; taps is the weight as [K², C]."""
    y = _fwd_fake(x, taps, bias, stride, activation, residual, dtype)
    x = _readable(x)
    _convolve(x, taps, y, bias, None, x if residual else None, stride, activation)
    return y


def _fwd_fake(x, taps, bias, stride, activation, residual, dtype):
    dtype = torch.promote_types(dtype, x.dtype) if residual else dtype
    return x.new_empty(_output_shape(x, stride), dtype=dtype)


def _bwd(dy, x, taps, bias, stride, activation, residual, dtype, needs):
    """(dx, sums of dweight as [C, K²] and dbias, in one vector); `needs`: of x, of a parameter."""
    dx, sums = _bwd_fake(dy, x, taps, bias, stride, activation, residual, dtype, needs)
    x = _readable(x)
    g = dy.contiguous()
    dy = g
    if activation is not None:
        g = torch.empty_like(dy, dtype=dtype)
        _convolve(x, taps, g, bias, dy, None, stride, activation)  # (3)
    if needs[0]:
        _convolve(g, taps, dx, None, None, dy if residual else None, stride, None, True)  # (4)
    if not needs[1] or not len(x):
        return dx, sums.zero_()
    K = math.isqrt(len(taps))
    return dx, parameter_sums(x, g, sums, K, stride, *_blocks("bwd", x, dy, K))  # (5)


def _bwd_fake(dy, x, taps, bias, stride, activation, residual, dtype, needs):
    values = taps.numel() + (0 if bias is None else len(bias))
    sums = x.new_empty(values if needs[1] else 0, dtype=grads_dtype(taps, bias))
    return x.new_empty(x.shape if needs[0] else 0), sums


_fwd_op = register(
    "depthwise_fwd",
    "(Tensor x, Tensor taps, Tensor? bias, int stride, str? activation, bool residual, ScalarType dtype) -> Tensor",
    _fwd,
    _fwd_fake,
)
_bwd_op = register(
    "depthwise_bwd",
    "(Tensor dy, Tensor x, Tensor taps, Tensor? bias, int stride, str? activation, bool residual, ScalarType dtype, "
    "bool[] needs) -> (Tensor, Tensor)",
    _bwd,
    _bwd_fake,
)


class _Fn(torch.autograd.Function):
    """Autograd of depthwise_fwd by depthwise_bwd."""

    @staticmethod
    def forward(ctx, x, weight, bias, stride, activation, residual):
        taps = weight.flatten(1).t().contiguous()
        dtype = product_dtype(x)
        ctx.save_for_backward(x, taps, bias)
        ctx.settings = (stride, activation, residual, dtype)
        ctx.shape = weight.shape
        return _fwd_op(x, taps, bias, *ctx.settings)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x, taps, bias), (need_x, need_w, need_b, *_) = ctx.saved_tensors, ctx.needs_input_grad
        dx, sums = _bwd_op(dy, x, taps, bias, *ctx.settings, [need_x, need_w or need_b])
        dweight = sums[: taps.numel()].view(ctx.shape).to(taps.dtype) if need_w else None
        dbias = sums[taps.numel() :].to(bias.dtype) if need_b else None
        return dx if need_x else None, dweight, dbias, None, None, None


def _inputs(case: dict, dtype: torch.dtype, device: torch.device | str) -> dict:
    randn, (B, H, W, C, K) = make_randn(device, dtype), (case[a] for a in ("B", "H", "W", "C", "K"))
    inputs = {"x": randn(B, H, W, C), "weight": randn(C, 1, K, K, scale=1 / K), "bias": randn(C)}
    stride = case.get("stride", 1)
    activation = next((name for name in ACTIVATIONS if name in case), None)
    return inputs | {"stride": stride, "activation": activation, "residual": bool(case.get("residual"))}


OP = Op(
    name="depthwise",
    run=depthwise,
    reference=reference,
    cases={
        "residual": dict(B=2, H=3, W=4, C=5, K=3, residual=1),
        "silu": dict(B=1, H=5, W=2, C=3, K=3, silu=1),
        "stride": dict(B=2, H=5, W=4, C=2, K=3, stride=2, silu=1),
        "wide_kernel": dict(B=1, H=2, W=3, C=2, K=5),
    },
    inputs=_inputs,
    ragged={
        "mlp": dict(B=2, H=5, W=7, C=96, K=3, gelu=1),
        "position": dict(B=3, H=7, W=7, C=70, K=3, residual=1),
        "one_row": dict(B=2, H=1, W=19, C=16, K=3, gelu=1, residual=1),
        "stride": dict(B=2, H=9, W=6, C=24, K=3, stride=2),
        "stride_gelu": dict(B=1, H=6, W=11, C=17, K=3, stride=2, gelu=1),
        "kernel_beyond_grid": dict(B=2, H=2, W=3, C=20, K=5, gelu=1, residual=1),
        "side_5": dict(B=1, H=6, W=5, C=12, K=5, stride=2),
        "many_blocks": dict(B=9, H=33, W=30, C=2, K=3),
        "empty": dict(B=0, H=3, W=3, C=8, K=3, gelu=1),
    },
)
