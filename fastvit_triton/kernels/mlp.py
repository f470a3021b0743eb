"""MLP of a Transformer block: LayerNorm, two linear layers with an activation between them, scales, residual.

Math      h = act(norm(x) W₁ᵀ + b₁)                                  [M, F]      (1)
          y = sample_scale · layer_scale · (h W₂ᵀ + b₂) + residual  [M, D]      (2)
Backward  equation (3) of `mlp_backward`
Kernels   Those of `linear`: two matmuls forward; with a norm also one launch that folds it into W₁, unless that was
          done beforehand, and one for row statistics, unless they are given. For 16-bit rows of at most 192 values, if
          pre₁ is not saved, one launch: a program holds whole rows of x and y, and h is not written.
Cost      4·M·D·F flops; bytes = x + W₁ + W₂ + y (+ residual) + 2·h, or without h in one launch.
Saved     x and pre₁ = LN(x) W₁ᵀ + b₁, but not h. With x, qkv and o of the attention that is 10·D values per token for a
          block with F = 4·D; eager PyTorch saves 16·D. With save="input" only x is saved: 6·D. With "hidden" h is saved
          as well, 14·D, and the backward pass writes M·F values less.
Sources   Vaswani et al., arXiv:1706.03762, eq. 2; Dosovitskiy et al., ViT, arXiv:2010.11929, eq. 3.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from . import check, choose, cpu, layer_norm, linear, mixed
from .activation import GATED, activate
from .argument import (
    NextNorm,
    Norm,
    NormLike,
    Pair,
    Reader,
    expect_bool_or_reader,
    expect_floating,
    expect_nonempty,
    is_like,
    kind_of,
)
from .attention_inner import dot_transposed, load_tiles, zero_tiles
from .backend import constant, kernels_available
from .fold import Folded
from .launch import cdiv, config, launch, split_tiles
from .linear import apply_epilogue, apply_norm_and_bias
from .mlp_backward import bwd_op
from .op import Op, expect, make_randn, once_differentiable, register
from .tile import jit, store_stats, tl, zero_stats

# Default parameters of the single launch: (maximum width of x in bytes, counting whole tiles; parameters).
SPACE = (
    (256, dict(BLOCK_M=64, BLOCK_F=32, num_warps=4, num_stages=1)),
    (384, dict(BLOCK_M=64, BLOCK_F=32, num_warps=8, num_stages=1)),
)

SAVES = ("pre", "input", "hidden")  # what `mlp` may save
Layer = tuple[Tensor | Pair | Folded, Tensor | Pair | None]  # weight and bias, as in `linear`


def mlp(
    x: Tensor,
    fc1: Layer,
    fc2: tuple[Tensor, Tensor | None],
    *,
    norm: NormLike | None = None,
    stats: Tensor | None = None,
    activation: str = "gelu",
    layer_scale: Tensor | None = None,
    sample_scale: Tensor | None = None,
    residual: Tensor | None = None,
    save: str = "pre",
    return_stats: bool | Reader = False,
) -> Tensor | Any:
    """sample_scale · layer_scale · fc2(act(fc1(LN(x)))) + residual.

    Args:
        x: [..., D].
        fc1: (weight [F, D], bias [F]); pairs for gated activations and folded weights as in `linear`.
        fc2: (weight [D, F], bias [D]).
        norm: (weight [D], bias [D], eps) or `Norm`, a LayerNorm or RMSNorm of x before fc1.
        stats: [M, tiles, 2] fp32, row statistics of x; see `linear`.
        activation: as in `linear`.
        layer_scale: [D], LayerScale.
        sample_scale: [B], drop-path factor of each image; it gets no gradient.
        residual: [..., D], added last.
        save: for the backward pass, besides x: "pre", pre₁; "hidden", h as well, which is then not written again; or
            "input", nothing, and the hidden layer is recomputed.
        return_stats: also return the row statistics of the output; see `linear`.

    Returns:
        [..., D]; with `return_stats` also [M, tiles, 2] fp32, or None.

    Raises:
        ValueError: a size or device does not fit, or the activation is unknown.
        TypeError: an argument is of another type or dtype.
    """
    check.pair("fc1", fc1)
    check.pair("fc2", fc2)
    if activation is None:
        raise ValueError("activation is None; an mlp needs one")
    check.projection(x, *fc1, activation, "fc1 ")
    check.norm(x, norm, stats, fc1[0])
    weight, bias = fc2
    expect("fc2 weight", weight, x, D=None, F=linear.output_channels(fc1[0], activation))
    expect_floating("fc2 weight", weight, x)
    expect_nonempty("fc2 weight", "D", weight.shape[0])
    if bias is not None and not is_like(bias, x, weight.shape[0]):
        expect("fc2 bias", bias, x, D=weight.shape[0])
        expect_floating("fc2 bias", bias, x)
    check.branch(x, weight.shape[0], layer_scale, sample_scale, residual)
    if save not in SAVES:
        raise ValueError(f"save is {save!r}; give {', '.join(map(repr, SAVES[:-1]))} or {SAVES[-1]!r}")
    expect_bool_or_reader("return_stats", return_stats)
    ends = layer_scale, sample_scale, residual
    if kernels_available(x) and max(x.shape[-1], weight.shape[1]) <= layer_norm.MAX_D:
        sizes = plan_sizes(x, fc1[0], weight, norm, activation, *ends)
        rows = choose.rows_of(math.prod(x.shape[:-1]))
        if not choose.copies(x, residual) and choose.prefers_kernel(x, "mlp", rows, *sizes):
            wanted = linear.reads_stats(return_stats, x, residual, weight.shape[0])
            y = run(x, fc1, fc2, norm, stats, activation, *ends, save, return_stats=wanted)
            return (y, None) if return_stats and not wanted else y
    if cpu.takes(x, fc1[0]):
        y = cpu.mlp(x, fc1, fc2, norm, activation, *ends, save == "input")
        return linear.with_stats(y, return_stats)
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
        save=save,
        return_stats=return_stats,
    )


def run(
    x: Tensor,
    fc1: Layer,
    fc2: tuple[Tensor, Tensor | None],
    norm: NormLike | None = None,
    stats: Any = None,
    activation: str = "gelu",
    layer_scale: Tensor | None = None,
    sample_scale: Tensor | None = None,
    residual: Tensor | None = None,
    save: str = "pre",
    *,
    return_stats: bool | NextNorm = False,
    way: str = "fused",
) -> Tensor | Any:
    """`mlp` in a given way, without argument checks or plan; see `linear.run`."""
    if way == "onednn":
        y = cpu.mlp(x, fc1, fc2, norm, activation, layer_scale, sample_scale, residual, save == "input")
        return (y, None) if return_stats else y
    if way == "mixed":
        call = linear.mixed_call(x, stats, return_stats)
        operand = x
        stats = None
        eps = 0.0 if norm is None else norm[2]
    else:
        call, (operand, norm) = None, linear.apply_or_keep_norm(x, norm, fc1[0])
        eps, stats = (0.0, None) if norm is None else (norm[2], stats)
    is_input = residual is operand
    grad = torch.is_grad_enabled()
    kind = None if norm is None else kind_of(norm)
    settings = linear.Settings(activation, kind, eps, is_input, grad, bool(return_stats), save, call)
    tensors = stats, layer_scale, sample_scale, None if is_input else residual
    y, *next_stats = _Fn.apply(operand, *fc2, *linear.operands(*fc1, norm), *tensors, settings)
    return (y, linear.handed_on(next_stats, call)) if return_stats else y


def plan_sizes(
    x: Tensor,
    fc1_weight: Tensor | Pair | Folded,
    fc2_weight: Tensor,
    norm: NormLike | None,
    activation: str,
    layer_scale: Tensor | None,
    sample_scale: Tensor | None,
    residual: Tensor | None,
) -> tuple[int, ...]:
    """Arguments of "mlp" in `predicted.OPS` after the number of rows; of x only the dtype is used."""
    first = linear.plan_sizes(x, fc1_weight, norm, activation, layer_scale, sample_scale, residual)
    return *first[:2], fc2_weight.shape[1], *first[2:]


def reference(
    x: Tensor,
    fc1: Layer,
    fc2: tuple[Tensor, Tensor | None],
    *,
    norm: NormLike | None = None,
    stats: Tensor | None = None,
    activation: str = "gelu",
    layer_scale: Tensor | None = None,
    sample_scale: Tensor | None = None,
    residual: Tensor | None = None,
    save: str = "pre",
    return_stats: bool | Reader = False,
) -> Tensor | Any:
    """Equations (1) and (2); autograd saves the hidden layer unless it is recomputed."""

    def hidden_to_out(x: Tensor) -> Tensor:
        h = linear.reference(x, *fc1, norm=norm, activation=activation)  # (1)
        return linear.reference(h, *fc2, layer_scale=layer_scale, sample_scale=sample_scale, residual=residual)  # (2)

    y = checkpoint(hidden_to_out, x, use_reentrant=False) if save == "input" else hidden_to_out(x)
    return linear.with_stats(y, return_stats)


@jit(do_not_specialize=["M", "rows_per_image"])
def _fwd_kernel(
    x_ptr, w1_ptr, b1_ptr, colsum_ptr, w2_ptr, b2_ptr, layer_scale_ptr, scale_ptr, residual_ptr, y_ptr, y_stats_ptr,
    M, F, x_stride, rows_per_image, eps,
    ACTIVATION: tl.constexpr, NORM: tl.constexpr, HAS_B1: tl.constexpr, HAS_B2: tl.constexpr,
    HAS_LAYER_SCALE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, STATS: tl.constexpr,
    EVEN: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M whole rows. Loops over BLOCK_F hidden channels at a time. Equations (1) and (2)."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_m = m < M
    x0, x1 = load_tiles(x_ptr, m, x_stride, M, D, D0, D1, True)  # [BLOCK_M, D0], [BLOCK_M, D1]
    mean = m
    rstd = m
    if NORM is not None:
        a, b = x0.to(tl.float32), x1.to(tl.float32)
        if NORM == "layer_norm":
            mean = tl.sum(a, 1) / D
            if D1 > 0:
                mean += tl.sum(b, 1) / D
            a = tl.where((tl.arange(0, D0) < D)[None, :], a - mean[:, None], 0.0)
        m2 = tl.sum(a * a, 1)
        if D1 > 0:
            if NORM == "layer_norm":
                b = tl.where((D0 + tl.arange(0, D1) < D)[None, :], b - mean[:, None], 0.0)
            m2 += tl.sum(b * b, 1)
        rstd = tl.rsqrt(m2 / D + eps)
    y0, y1 = zero_tiles(BLOCK_M, D0, D1)
    for first in range(0, F, BLOCK_F):
        f = first + tl.arange(0, BLOCK_F)
        a0, a1 = load_tiles(w1_ptr, f, D, F, D, D0, D1, not EVEN)  # [BLOCK_F, D0], [BLOCK_F, D1]
        h = dot_transposed(x0, x1, a0, a1, D1, "tf32")  # [BLOCK_M, BLOCK_F]
        h = activate(apply_norm_and_bias(h, colsum_ptr, b1_ptr, mean, rstd, f, F, NORM, HAS_B1), ACTIVATION, False)
        h = h.to(x0.dtype)
        y0 = tl.dot(h, _load_w2(w2_ptr, f, F, 0, D, D0, EVEN), y0)
        if D1 > 0:
            y1 = tl.dot(h, _load_w2(w2_ptr, f, F, D0, D, D1, EVEN), y1)
    scale = rstd
    if HAS_SCALE:
        scale = tl.load(scale_ptr + m.to(tl.int32) // rows_per_image, mask=in_m, other=0.0).to(tl.float32)
    count, row_sum, m2 = zero_stats(BLOCK_M, (D1 if D1 > 0 else D0) // 8)
    count, row_sum, m2 = apply_epilogue(
        y0, y0, b2_ptr, None, layer_scale_ptr, residual_ptr, y_ptr, None, mean, rstd, scale, count, row_sum, m2,
        m, tl.arange(0, D0), M, D, None, False, None, HAS_B2, HAS_LAYER_SCALE, HAS_SCALE, HAS_RESIDUAL, False, STATS,
    )  # fmt: skip
    if D1 > 0:
        count, row_sum, m2 = apply_epilogue(
            y1, y1, b2_ptr, None, layer_scale_ptr, residual_ptr, y_ptr, None, mean, rstd, scale, count, row_sum, m2,
            m, D0 + tl.arange(0, D1), M, D, None, False, None, HAS_B2, HAS_LAYER_SCALE, HAS_SCALE, HAS_RESIDUAL, False,
            STATS,
        )  # fmt: skip
    if STATS:
        store_stats(y_stats_ptr + m * 2, in_m, count, row_sum, m2)


@jit
def _load_w2(w_ptr, f, F, first: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """Loads columns f of W₂ [D, F], transposed: [len(f), WIDTH], for WIDTH outputs from `first` on."""
    d = first + tl.arange(0, WIDTH)
    at = w_ptr + d.to(tl.int64)[None, :] * F + f[:, None]
    if EVEN and first + WIDTH <= D:
        return tl.load(at)
    return tl.load(at, mask=(f < F)[:, None] & (d < D)[None, :], other=0.0)


def _fwd(x, w1, b1, colsum, w2, b2, layer_scale, sample_scale, residual, norm, eps, activation, return_stats):
    """(y, stats [M, 1, 2]) in one launch; `norm`: the kind of the norm that is folded into w1 and b1."""
    y, y_stats = outputs = _fwd_fake(
        x, w1, b1, colsum, w2, b2, layer_scale, sample_scale, residual, norm, eps, activation, return_stats
    )
    D = x.shape[-1]
    F = len(w1)
    rows = x.reshape(-1, D)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    residual = None if residual is None else residual.reshape(-1, D).contiguous()
    blocks, (D0, D1) = one_launch_blocks(x.device, x.dtype, D, F), split_tiles(D)
    M = rows.shape[0]
    if M:
        launch(
            _fwd_kernel, (cdiv(M, blocks["BLOCK_M"]),),
            rows, w1.contiguous(), b1, colsum, w2.contiguous(), b2, layer_scale, sample_scale, residual, y, y_stats,
            M, F, rows.stride(0), cdiv(M, x.shape[0]), eps, ACTIVATION=activation,
            NORM=norm, HAS_B1=b1 is not None, HAS_B2=b2 is not None,
            HAS_LAYER_SCALE=layer_scale is not None, HAS_SCALE=sample_scale is not None,
            HAS_RESIDUAL=residual is not None, STATS=return_stats, EVEN=F % blocks["BLOCK_F"] == 0, D=D, D0=D0, D1=D1,
            **blocks,
        )  # fmt: skip
    return outputs


def _fwd_fake(x, w1, b1, colsum, w2, b2, layer_scale, sample_scale, residual, norm, eps, activation, return_stats):
    M = math.prod(x.shape[:-1])
    y = x.new_empty(x.shape, dtype=layer_norm.output_dtype(x, layer_scale, residual))
    return y, x.new_empty((M, 1, 2) if return_stats else (0,), dtype=torch.float32)


def runs_in_one_launch(x: Tensor, w2: Tensor, activation: str) -> bool:
    """True if the single launch supports x [..., D] and w2 [D, F] and is not excluded by a row whose BLOCK_F is 0."""
    return len(w2) == x.shape[-1] and _has_one_launch(x.device, x.dtype, len(w2), w2.shape[1], activation)


@constant
def _has_one_launch(device: torch.device, dtype: torch.dtype, D: int, F: int, activation: str) -> bool:
    size = sum(split_tiles(D)) * dtype.itemsize
    if dtype == torch.float32 or activation in GATED or size > SPACE[-1][0]:
        return False
    return one_launch_blocks(device, dtype, D, F)["BLOCK_F"] > 0


def one_launch_blocks(device: torch.device, dtype: torch.dtype, D: int, F: int) -> dict[str, int]:
    """Launch parameters of the single launch for D channels and F hidden channels."""
    size = sum(split_tiles(D)) * dtype.itemsize
    limit, default = next(row for row in SPACE if size <= row[0])
    return config(f"mlp.fwd.{limit}", default, device, D, F)


_fwd_op = register(
    "mlp_fwd",
    "(Tensor x, Tensor w1, Tensor? b1, Tensor? colsum, Tensor w2, Tensor? b2, Tensor? layer_scale, "
    "Tensor? sample_scale, Tensor? residual, str? norm, float eps, str activation, bool return_stats) "
    "-> (Tensor, Tensor)",
    _fwd,
    _fwd_fake,
)


class _Fn(torch.autograd.Function):
    """Autograd of two linear_fwd, of one mlp_fwd or of `mixed.forward`, by mlp_bwd; see `SAVES`."""

    @staticmethod
    def forward(
        ctx, x, w2, b2, w1, b1, norm_weight, norm_bias, folded_weight, colsum, folded_bias,
        stats, layer_scale, sample_scale, residual, settings,
    ):  # fmt: skip
        learns = settings.grad_enabled and any(ctx.needs_input_grad)
        save = learns and settings.save != "input"
        ends = layer_scale, sample_scale, x if settings.residual_is_input else residual
        layer = linear.Operands(w1, b1, norm_weight, norm_bias, folded_weight, colsum, folded_bias)
        (layer, cast1), dtype = layer.cast(x, settings), settings.dtype(x)
        product2 = w2.to(dtype)
        h = pre = mean = rstd = None
        if settings.call is not None:
            h, pre, mean, rstd = _hidden(x, layer, stats, settings, save)
            second = settings.call  # its norm is that of fc1, its late bias that of fc2
            y, _, _, _, *next_stats = mixed.forward(h, product2, b2, None, None, *ends, second, learns)
        elif not save and runs_in_one_launch(x, w2, settings.activation):
            ends += settings.norm, settings.eps, settings.activation, settings.return_stats
            folded = linear.fold_operands(x, layer, settings.norm is not None)
            y, *next_stats = _fwd_op(x, *folded, product2, b2, *ends)
        else:
            h, pre, mean, rstd = _hidden(x, layer, stats, settings, save)
            ends += False, settings.return_stats
            y, _, _, _, *next_stats = linear.fwd_op(h, product2, b2, None, None, None, 0.0, None, *ends)
        colsum = colsum if folded_weight is None else None  # with a source, recomputing folds again
        cast2 = None if product2 is w2 or layer_scale is not None else product2  # with layer_scale the weight is scaled
        ctx.save_for_backward(
            x, w2, b2, w1, b1, norm_weight, norm_bias, colsum, layer_scale, sample_scale, pre, mean, rstd, cast1, cast2,
            h if save and settings.save == "hidden" and any(ctx.needs_input_grad[i] for i in (1, 2, 11)) else None,
        )  # fmt: skip
        ctx.settings = settings.without_normed()
        ctx.residual_dtype = None if residual is None else residual.dtype
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in next_stats if t is not None))
        return y, *next_stats

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, *_):
        if dy is None:
            return (None,) * 15
        x, w2, b2, w1, b1, norm_weight, norm_bias, colsum, layer_scale, sample_scale, *saved = ctx.saved_tensors
        (pre, mean, rstd, cast1, cast2, h), settings = saved, ctx.settings
        need_x, need_w2, need_b2, *need_1, _, _, _, _, need_layer_scale, _, _, _ = need = ctx.needs_input_grad
        needs = [need_x, any(need_1), need_w2 or need_b2 or need_layer_scale]
        dresidual = None if ctx.residual_dtype is None else dy.to(ctx.residual_dtype)
        if not any(needs):  # only the residual gets a gradient
            return *[None] * 13, dresidual, None
        if settings.save == "input":
            layer = linear.Operands(w1, b1, norm_weight, norm_bias, None, colsum, None)
            h, pre, mean, rstd = _hidden(x, layer, None, settings, True)
        dx, dw1, db1, dnorm, dw2, db2, dlayer_scale = bwd_op(
            dy, x, w1, cast1, b1, w2, cast2, b2, pre, h, layer_scale, sample_scale, mean, rstd, norm_weight, norm_bias,
            settings.activation, settings.norm, settings.residual_is_input, settings.dtype(x), needs,
        )  # fmt: skip
        none = [None] * 4  # W', colsum and bias of a fold, and stats
        grads = dx, dw2, db2, dw1, db1, dnorm[:1], dnorm[1:], *none, dlayer_scale
        parameters = x, w2, b2, w1, b1, norm_weight, norm_bias, *none, layer_scale
        triples = zip(grads, parameters, need, strict=False)
        return *(g.view(p.shape).to(p.dtype) if n else None for g, p, n in triples), None, dresidual, None


def _hidden(x, layer, stats, settings, save):
    """Equation (1): (h, pre, mean, rstd)."""
    if settings.call is not None:
        norm = settings.norm and Norm(layer.norm_weight, layer.norm_bias, settings.eps, settings.norm)
        call = settings.call._replace(next_norm=None)
        first = (layer.weight, layer.bias, norm, settings.activation)
        ends = (None, None, None, call, save)
        return mixed.forward(x, *first, *ends)[:4]
    first = linear.fold_operands(x, layer, settings.norm is not None)
    ends = (None, None, None, save, False)
    return linear.fwd_op(x, *first, stats, settings.norm, settings.eps, settings.activation, *ends)[:4]


def _inputs(case: dict[str, int], dtype: torch.dtype, device: torch.device | str) -> dict:
    randn, (B, N, D, F) = make_randn(device, dtype), (case[a] for a in ("B", "N", "D", "F"))
    keep = torch.tensor([b % 2 / 0.5 for b in range(B)], dtype=dtype, device=device)
    activation = tuple(GATED)[case["gated"]] if "gated" in case else "gelu"
    width = 2 * F if "gated" in case else F
    return {
        "x": randn(B, N, D),
        "fc1": (randn(width, D, scale=D**-0.5), randn(width)),
        "activation": activation,
        "fc2": (randn(D, F, scale=F**-0.5), randn(D)),
        "norm": (randn(D), None, 1e-6, "rms_norm") if "rms" in case else (randn(D), randn(D), 1e-6),
        "layer_scale": randn(D),
        "sample_scale": keep,
        "residual": randn(B, N, D),
        "save": SAVES[case.get("save", 0)],
    }


OP = Op(
    name="mlp",
    run=mlp,
    reference=reference,
    cases={"ragged": dict(B=2, N=3, D=5, F=9), "recompute": dict(B=2, N=2, D=3, F=4, save=1)},
    inputs=_inputs,
    ragged={
        "vit": dict(B=2, N=50, D=48, F=192),
        "small": dict(B=3, N=23, D=192, F=96, save=1),
        "odd_recompute": dict(B=3, N=5, D=33, F=70, save=1),
        "swiglu": dict(B=2, N=10, D=32, F=24, gated=0),
        "rms": dict(B=2, N=23, D=80, F=96, rms=1, save=1),
        "rms_geglu": dict(B=2, N=10, D=32, F=24, rms=1, gated=1, save=1),
        "saved_hidden": dict(B=2, N=5, D=24, F=70, save=2),
        "saved_gated": dict(B=2, N=5, D=32, F=24, gated=0, save=2),
        "empty": dict(B=0, N=3, D=8, F=16),
        "empty_recompute": dict(B=2, N=0, D=8, F=16, save=1),
    },
)
