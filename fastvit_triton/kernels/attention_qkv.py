"""Self-attention on a packed q, k, v projection, with optional LayerNorm and rotary positions on queries and keys.

Math      z = LN(x) or RMSNorm(x) over the D channels of a head, or z = x                       (1)
          y = z ∘ cos + J z ∘ sin        J: (a, b) → (−b, a) in each channel pair               (2)
          o = attention(y_q, y_k, v)                                                            (3)
Backward  dz = dy ∘ cos − J (dy ∘ sin)                                                          (4)
          dx = (g − mean(g) − ẑ·mean(g·ẑ)) / √(σ² + ε) with g = dz·γ, ẑ = (x − μ) / √(σ² + ε)   (5)
          RMSNorm: μ = 0, σ² = mean(x²), and dx has no term mean(g)
          dγ = Σ dz·ẑ    dβ = Σ dz, over tokens and heads                                       (6)
Kernels   One launch applies (1) and (2) before the attention kernel and one applies (4) to (6) after its backward pass.
          Inside the attention kernel, keys would be normalised and rotated again for every block of queries. The sums
          (6) are computed in two stages, within programs and then over programs: deterministic.
Cost      8 bytes·B·N·H·D in bf16 forward, 16 backward, in addition to attention's.
Saved     the tensors that attention saves, y for queries and keys [B, N, 2, H, D], and qkv.
Sources   Su et al., RoFormer, arXiv:2104.09864, eq. 34; Henry et al., Query-key normalization, arXiv:2010.04245, as
          Dehghani et al., ViT-22B, arXiv:2302.05442, section 2.1, use it; Zhang and Sennrich, Root mean square layer
          normalization, arXiv:1910.07467, eq. 4.
"""

from typing import Any

import torch
from torch import Tensor

from . import attention, check, rms_norm
from .argument import NormLike, Rope, Varlen, expect_number, group_of, kind_of
from .attention_launch import run
from .backend import kernels_available
from .launch import cdiv, power_of_2
from .op import Op, cast, distinct, make_randn, once_differentiable, register
from .tile import jit, tl

NO_NORM = (None, None, None)  # weight, bias and eps


def attention_qkv(
    qkv: Tensor,
    num_heads: int,
    scale: float | None = None,
    q_norm: NormLike | None = None,
    k_norm: NormLike | None = None,
    rope: Rope | None = None,
    prefix_tokens: int = 0,
    bias: Tensor | None = None,
    kv_lens: Tensor | None = None,
    return_lse: bool = False,
    varlen: Varlen | None = None,
    causal: bool = False,
) -> Tensor | Any:
    """Self-attention on the packed projection, as in every plain ViT.

    Args:
        qkv: [B, N, 3·H·D], ordered as [3, H, D]; with `varlen` [T, 3·H·D].
        num_heads: H.
        scale: softmax scale; None means D^-0.5.
        q_norm: (weight [D], bias [D], eps) or `Norm`, a LayerNorm or RMSNorm over the channels of each query; weight
            and bias may be None.
        k_norm: the same for keys.
        rope: (cos, sin, pairs) with tables [N − prefix_tokens, D], [H, N − prefix_tokens, D] or
            [B, H, N − prefix_tokens, D], where axes B and H may be 1. Rotates queries and keys in channel pairs
            (2i, 2i + 1) if `pairs` is True, (i, i + D/2) if False, and for an even number g (i, i + g/2) within each g
            channels, which rotations by rows and columns have.
        prefix_tokens: number of leading tokens that `rope` does not rotate.
        bias: as in `attention`.
        kv_lens: as in `attention`.
        return_lse: also return L [B, H, N].
        varlen: (cu_seqlens, max_seqlen) or `Varlen`: tokens attend to those of their own image. Tables of `rope` are
            [T, D] or [H, T, D]; prefix_tokens, bias, kv_lens and return_lse are not supported.
        causal: tokens see only themselves and earlier tokens, with `varlen` of their image.

    Returns:
        [B, N, H·D], heads merged; with `return_lse` also L [B, H, N], fp32; with `varlen` [T, H·D], which is 0 for
        tokens that belong to no image.

    Raises:
        ValueError: a size or device does not fit.
        TypeError: an argument is of another type or dtype.
    """
    if causal is not False:
        check.causal(causal)
    if varlen is not None:
        others = prefix_tokens, bias, kv_lens, return_lse
        return _varlen(qkv, num_heads, scale, q_norm, k_norm, rope, others, varlen, causal)
    D = check.packed(qkv, num_heads, q_norm, k_norm, rope, prefix_tokens)
    check.scores(qkv, (num_heads, qkv.shape[1], qkv.shape[1]), bias, kv_lens, scale, return_lse)
    bare = bias is kv_lens is q_norm is k_norm is rope is None
    if (
        kernels_available(qkv, D)
        and (rope is None or not (rope[0].requires_grad or rope[1].requires_grad))
        and (return_lse or attention.prefers_kernel(qkv, num_heads, (qkv.shape[1],) * 2, (D, D), bare, True, causal))
    ):
        o, lse = _apply(qkv, num_heads, scale, q_norm, k_norm, rope, prefix_tokens, bias, kv_lens, causal)
        return (o, attention.natural(lse)) if return_lse else o
    options = prefix_tokens, bias, kv_lens, return_lse, None, causal
    return reference(qkv, num_heads, scale, q_norm, k_norm, rope, *options)


def _varlen(qkv, num_heads, scale, q_norm, k_norm, rope, others, varlen, causal):
    """`attention_qkv` with `varlen`; `others` are arguments that it does not support."""
    cu_seqlens, max_seqlen = check.varlen(qkv, varlen, *others)
    D = check.packed(qkv[None], num_heads, q_norm, k_norm, rope, 0)
    if scale is not None:
        expect_number("scale", scale)
    if kernels_available(qkv, D) and (rope is None or not (rope[0].requires_grad or rope[1].requires_grad)):
        options = 0, None, None, causal, cu_seqlens, max_seqlen
        return _apply(qkv[None], num_heads, scale, q_norm, k_norm, rope, *options)[0][0]
    return reference(qkv, num_heads, scale, q_norm, k_norm, rope, varlen=varlen, causal=causal)


def learns_bias(x: Tensor, num_heads: int, D: int, causal: bool) -> bool:
    """True if the plan selects `run_with_bias` for the tokens x [B, N, ...], with heads of D channels."""
    lengths = (x.shape[1],) * 2
    return kernels_available(x, D) and attention.prefers_kernel(x, num_heads, lengths, (D, D), True, True, causal)


def run_with_bias(qkv: Tensor, num_heads: int, scale: float | None, causal: bool, qkv_bias: Tensor) -> Tensor:
    """`attention_qkv` by the kernels, without argument checks or plan, with the gradient of a bias that qkv includes.

    Args:
        qkv: [B, N, 3·H·D], from which no gradient flows to the bias.
        num_heads, scale, causal: as in `attention_qkv`.
        qkv_bias: [3·H·D], the bias; only its gradient is computed.
    """
    return _apply(qkv, num_heads, scale, None, None, None, 0, None, None, causal, qkv_bias=qkv_bias)[0]


def _apply(
    qkv, num_heads, scale, q_norm, k_norm, rope, prefix_tokens, bias, kv_lens, causal, cu_seqlens=None, max_seqlen=0,
    qkv_bias=None,
):  # fmt: skip
    """(o [B, N, H·D], L in base 2) by the kernels."""
    packed = cast(qkv)[0].unflatten(-1, (3, num_heads, -1))
    q_norm_weight, q_norm_bias, q_eps = NO_NORM if q_norm is None else q_norm[:3]
    k_norm_weight, k_norm_bias, k_eps = NO_NORM if k_norm is None else k_norm[:3]
    k_norm_weight = distinct(k_norm_weight, q_norm_weight)
    k_norm_bias = distinct(k_norm_bias, q_norm_bias)
    cos, sin, pairs = rope or (None, None, False)
    o, lse = _Fn.apply(
        packed, q_norm_weight, q_norm_bias, k_norm_weight, k_norm_bias, cos, sin, bias, kv_lens, cu_seqlens,
        group_of(pairs, packed.shape[-1]), prefix_tokens, q_eps, k_eps,
        q_norm is not None and kind_of(q_norm) == "rms_norm", k_norm is not None and kind_of(k_norm) == "rms_norm",
        packed.shape[-1] ** -0.5 if scale is None else scale, max_seqlen, causal,
        qkv_bias,
    )  # fmt: skip
    return o.transpose(1, 2).flatten(2), lse


def reference(
    qkv: Tensor,
    num_heads: int,
    scale: float | None = None,
    q_norm: NormLike | None = None,
    k_norm: NormLike | None = None,
    rope: Rope | None = None,
    prefix_tokens: int = 0,
    bias: Tensor | None = None,
    kv_lens: Tensor | None = None,
    return_lse: bool = False,
    varlen: Varlen | None = None,
    causal: bool = False,
) -> Tensor | Any:
    """Equations (1) to (3): split, normalise, rotate, attend, merge heads."""
    if varlen is not None:
        qkv = qkv[None]
    # chunks, whose gradients are joined in one pass; those of an unbound axis take two
    q, k, v = (t.unflatten(-1, (num_heads, -1)).transpose(1, 2) for t in qkv.chunk(3, -1))  # [B, H, N, D] each
    if q_norm is not None:
        q = rms_norm.reference_either(q, q_norm)
    if k_norm is not None:
        k = rms_norm.reference_either(k, k_norm)
    if rope is not None:
        q = rotate(q, rope, prefix_tokens)
        k = rotate(k, rope, prefix_tokens)
    if varlen is not None:
        q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))  # [T, H, D] each
        cu_seqlens, longest = varlen
        longest = len(q) if longest is None else longest
        return attention.reference_varlen(q, k, v, cu_seqlens, longest, scale, causal).flatten(1)
    o = attention.reference(q, k, v, bias, scale, kv_lens, return_lse, causal=causal)
    return (o[0].transpose(1, 2).flatten(2), o[1]) if return_lse else o.transpose(1, 2).flatten(2)


def rotate(x: Tensor, rope: Rope, prefix_tokens: int) -> Tensor:
    """Equation (2) on x [B, H, N, D], except for the first `prefix_tokens` tokens."""
    cos, sin, pairs = rope
    prefix = x[:, :, :prefix_tokens]
    x = x[:, :, prefix_tokens:]
    first, second = x.unflatten(-1, (-1, group_of(pairs, x.shape[-1]))).chunk(2, -1)
    rotated = torch.cat((-second, first), -1).flatten(-2)
    return torch.cat((prefix, (x * cos + rotated * sin).to(prefix.dtype)), 2)


@jit
def _load_pairs(ptr, at, inside, other, D: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr):
    """Loads rows at offsets `at` [M] as two fp32 tiles [M, HALF]: the first and the second channel of every pair."""
    if GROUP == 2:
        d = tl.arange(0, 2 * HALF)
        x = tl.load(ptr + at[:, None] + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=other)
        a, b = tl.split(tl.reshape(x.to(tl.float32), [at.shape[0], HALF, 2]))
        return a, b
    i = tl.arange(0, HALF)
    FIRST: tl.constexpr = (GROUP + 1) // 2
    at = ptr + at[:, None] + _firsts(i, FIRST, GROUP, D)[None, :]
    a = tl.load(at, mask=inside[:, None] & (i < (D + 1) // 2)[None, :], other=other)
    b = tl.load(at + FIRST, mask=inside[:, None] & (i < D // 2)[None, :], other=other)
    return a.to(tl.float32), b.to(tl.float32)


@jit
def _firsts(i, FIRST: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr):
    """The first channels of pairs i, of which a group has FIRST."""
    return i if GROUP == D else i // FIRST * GROUP + i % FIRST


@jit
def _store_pairs(ptr, at, inside, a, b, D: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr):
    """Stores a and b where `_load_pairs` reads them."""
    kind = ptr.dtype.element_ty
    if GROUP == 2:
        d = tl.arange(0, 2 * HALF)
        x = tl.reshape(tl.join(a, b), [at.shape[0], 2 * HALF])
        tl.store(ptr + at[:, None] + d[None, :], x.to(kind), mask=inside[:, None] & (d < D)[None, :])
    else:
        i = tl.arange(0, HALF)
        FIRST: tl.constexpr = (GROUP + 1) // 2
        at = ptr + at[:, None] + _firsts(i, FIRST, GROUP, D)[None, :]
        tl.store(at, a.to(kind), mask=inside[:, None] & (i < (D + 1) // 2)[None, :])
        tl.store(at + FIRST, b.to(kind), mask=inside[:, None] & (i < D // 2)[None, :])


@jit
def _normalize(a, b, eps, NORM: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr):
    """x̂ = (x − μ) / √(σ² + ε) of rows x = (a, b) as two tiles, and 1 / √(σ² + ε) [M]. NORM > 2: RMSNorm, μ = 0."""
    if NORM <= 2:
        i = tl.arange(0, HALF)
        mean = (tl.sum(a, 1) + tl.sum(b, 1)) / D
        a = tl.where((i < (D + 1) // 2)[None, :], a - mean[:, None], 0.0)
        b = tl.where((i < D // 2)[None, :], b - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)
    return a * rstd[:, None], b * rstd[:, None], rstd


@jit
def _apply_norm(
    a, b, weight_ptr, bias_ptr, eps, NORM: tl.constexpr, BIAS: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Equation (1) of rows (a, b). NORM: 1 without a weight, 2 with one; RMSNorm 3 and 4."""
    a, b, _ = _normalize(a, b, eps, NORM, D, HALF)
    start = tl.zeros([1], tl.int32)
    if NORM % 2 == 0:
        weight_a, weight_b = _load_pairs(weight_ptr, start, start == 0, 0.0, D, HALF, GROUP)
        a, b = a * weight_a, b * weight_b
    if BIAS:
        bias_a, bias_b = _load_pairs(bias_ptr, start, start == 0, 0.0, D, HALF, GROUP)
        a, b = a + bias_a, b + bias_b
    return a, b


@jit
def _norm_grad(
    a, b, x_ptr, at, inside, w_ptr, eps, sums,
    NORM: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """dx of equation (5) for dz = (a, b), as two tiles, and `sums` plus this tile's terms of (6).

    sums: dγ of the first and of the second channels of the pairs, then dβ likewise, [HALF] each.
    """
    x_a, x_b = _load_pairs(x_ptr, at, inside, 0.0, D, HALF, GROUP)
    x_a, x_b, rstd = _normalize(x_a, x_b, eps, NORM, D, HALF)
    sums = (sums[0] + tl.sum(a * x_a, 0), sums[1] + tl.sum(b * x_b, 0), sums[2] + tl.sum(a, 0), sums[3] + tl.sum(b, 0))
    if NORM % 2 == 0:
        start = tl.zeros([1], tl.int32)
        weight_a, weight_b = _load_pairs(w_ptr, start, start == 0, 0.0, D, HALF, GROUP)
        a, b = a * weight_a, b * weight_b
    mean = 0.0
    if NORM <= 2:
        mean = ((tl.sum(a, 1) + tl.sum(b, 1)) / D)[:, None]
    slope = ((tl.sum(a * x_a, 1) + tl.sum(b * x_b, 1)) / D)[:, None]
    return (a - mean - x_a * slope) * rstd[:, None], (b - mean - x_b * slope) * rstd[:, None], sums


@jit
def _load_cos_sin(cos_ptr, sin_ptr, at, inside, D: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr):
    """cos and sin of both channels of every pair, rows at offsets `at` of the tables; 1 and 0 where not `inside`."""
    cos_a, cos_b = _load_pairs(cos_ptr, at, inside, 1.0, D, HALF, GROUP)
    sin_a, sin_b = _load_pairs(sin_ptr, at, inside, 0.0, D, HALF, GROUP)
    return cos_a, cos_b, sin_a, sin_b


@jit(do_not_specialize=["M"])
def _fwd_kernel(
    x_ptr, y_ptr, q_norm_weight_ptr, q_norm_bias_ptr, k_norm_weight_ptr, k_norm_bias_ptr, cos_ptr, sin_ptr, x_strides,
    M, N, H, prefix, table_strides, q_eps, k_eps,
    Q_NORM: tl.constexpr, Q_BIAS: tl.constexpr, K_NORM: tl.constexpr, K_BIAS: tl.constexpr, ROPE: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M tokens of one head's queries or keys. Equations (1) and (2)."""
    head = tl.program_id(0) % (2 * H)  # the H heads of queries, then those of keys
    m = (tl.program_id(0) // (2 * H)).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n, inside = m % N, m < M
    at = m // N * x_strides[0] + n * x_strides[1] + head * D
    a, b = _load_pairs(x_ptr, at, inside, 0.0, D, HALF, GROUP)
    if Q_NORM > 0:
        if head < H:
            a, b = _apply_norm(a, b, q_norm_weight_ptr, q_norm_bias_ptr, q_eps, Q_NORM, Q_BIAS, D, HALF, GROUP)
    if K_NORM > 0:
        if head >= H:
            a, b = _apply_norm(a, b, k_norm_weight_ptr, k_norm_bias_ptr, k_eps, K_NORM, K_BIAS, D, HALF, GROUP)
    if ROPE:
        rotates = inside & (n >= prefix)
        at = m // N * table_strides[0] + (head % H).to(tl.int64) * table_strides[1] + (n - prefix) * D
        cos_a, cos_b, sin_a, sin_b = _load_cos_sin(cos_ptr, sin_ptr, at, rotates, D, HALF, GROUP)
        a, b = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    _store_pairs(y_ptr, (m * 2 * H + head) * D, inside, a, b, D, HALF, GROUP)


@jit(do_not_specialize=["M"])
def _bwd_kernel(
    dy_ptr, x_ptr, dx_ptr, partial_ptr, q_norm_weight_ptr, k_norm_weight_ptr, cos_ptr, sin_ptr, x_strides,
    M, N, H, prefix, table_strides, q_eps, k_eps,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, ROPE: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M tokens of all heads, of queries, keys or values (copied). Equations (4) to (6)."""
    part = tl.program_id(0) % 3
    block = (tl.program_id(0) // 3).to(tl.int64)
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    n, inside = m % N, m < M
    rotates = inside & (n >= prefix)
    zero = tl.zeros([HALF], tl.float32)
    sums = (zero, zero, zero, zero)
    for h in range(0, H):
        head = part.to(tl.int64) * H + h
        at = (m * 3 * H + head) * D
        x_at = m // N * x_strides[0] + n * x_strides[1] + head * D
        a, b = _load_pairs(dy_ptr, at, inside, 0.0, D, HALF, GROUP)
        if ROPE:
            if part < 2:
                row = m // N * table_strides[0] + tl.cast(h, tl.int64) * table_strides[1] + (n - prefix) * D
                cos_a, cos_b, sin_a, sin_b = _load_cos_sin(cos_ptr, sin_ptr, row, rotates, D, HALF, GROUP)
                a, b = a * cos_a + b * sin_b, b * cos_b - a * sin_a
        if Q_NORM > 0:
            if part == 0:
                a, b, sums = _norm_grad(
                    a, b, x_ptr, x_at, inside, q_norm_weight_ptr, q_eps, sums, Q_NORM, D, HALF, GROUP
                )
        if K_NORM > 0:
            if part == 1:
                a, b, sums = _norm_grad(
                    a, b, x_ptr, x_at, inside, k_norm_weight_ptr, k_eps, sums, K_NORM, D, HALF, GROUP
                )
        _store_pairs(dx_ptr, at, inside, a, b, D, HALF, GROUP)
    if Q_NORM + K_NORM > 0:
        if part < 2:
            at = (block * 4 + part * 2 + tl.zeros([1], tl.int32)) * D  # [program, query or key, weight or bias, D]
            stored = at >= 0  # the one row
            _store_pairs(partial_ptr, at, stored, sums[0][None, :], sums[1][None, :], D, HALF, GROUP)
            _store_pairs(partial_ptr, at + D, stored, sums[2][None, :], sums[3][None, :], D, HALF, GROUP)


def _blocks(D: int) -> dict[str, int]:
    """Launch parameters: a tile has 2048 elements."""
    half = power_of_2(cdiv(D, 2))
    return dict(HALF=half, BLOCK_M=max(1, 1024 // half), num_warps=4, num_stages=1, enable_fp_fusion=True)


def _arguments(qkv, q_norm_weight, k_norm_weight, cos, sin, group, prefix, q_eps, k_eps, q_rms, k_rms):
    """Arguments of both kernels by name.

    Q_NORM and K_NORM: 0 without a norm, LayerNorm 1 without a weight and 2 with one, RMSNorm 3 and 4.
    """
    (B, N, _, H, D), (cos, sin) = qkv.shape, [t if t is None else t.contiguous() for t in (cos, sin)]
    if qkv.stride()[2:] != (H * D, D, 1):
        qkv = qkv.contiguous()
    return dict(
        x_ptr=qkv, x_strides=qkv.stride()[:2], q_norm_weight_ptr=q_norm_weight, k_norm_weight_ptr=k_norm_weight,
        cos_ptr=cos, sin_ptr=sin, M=B * N, N=N, H=H, D=D, prefix=prefix, q_eps=q_eps or 0.0, k_eps=k_eps or 0.0,
        table_strides=(0, 0) if cos is None else cos.expand(B, H, N - prefix, D).stride()[:2],
        Q_NORM=0 if q_eps is None else 1 + (q_norm_weight is not None) + 2 * q_rms,
        K_NORM=0 if k_eps is None else 1 + (k_norm_weight is not None) + 2 * k_rms,
        ROPE=cos is not None, GROUP=group,
    )  # fmt: skip


def _fwd(qkv, q_norm_weight, q_norm_bias, k_norm_weight, k_norm_bias, cos, sin, *settings):
    """y of (2) for queries and keys, [B, N, 2, H, D]."""
    y = _fwd_fake(qkv)
    blocks = _blocks(qkv.shape[-1])
    arguments = _arguments(qkv, q_norm_weight, k_norm_weight, cos, sin, *settings)
    if y.numel():
        run(
            _fwd_kernel, cdiv(arguments["M"], blocks["BLOCK_M"]) * 2 * arguments["H"], blocks, **arguments, y_ptr=y,
            q_norm_bias_ptr=q_norm_bias, k_norm_bias_ptr=k_norm_bias,
            Q_BIAS=q_norm_bias is not None, K_BIAS=k_norm_bias is not None,
        )  # fmt: skip
    return y


def _fwd_fake(qkv, *_):
    B, N, _, H, D = qkv.shape
    return qkv.new_empty(B, N, 2, H, D)


def _bwd(dy, qkv, q_norm_weight, k_norm_weight, cos, sin, *settings):
    """(dqkv [B, N, 3, H, D], fp32 gradients of the norms [query or key, weight or bias, D]) from attention's dqkv.

    Without norms the second is not written.
    """
    (dx, sums), blocks = _bwd_fake(dy), _blocks(qkv.shape[-1])
    arguments = _arguments(qkv, q_norm_weight, k_norm_weight, cos, sin, *settings)
    programs = cdiv(arguments["M"], blocks["BLOCK_M"])
    normed = arguments["Q_NORM"] + arguments["K_NORM"] > 0
    partial = sums.new_zeros(programs, *sums.shape) if normed else None
    if dx.numel():
        run(
            _bwd_kernel, programs * 3, blocks, **arguments, dy_ptr=dy.contiguous(), dx_ptr=dx, partial_ptr=partial
        )  # fmt: skip
    return dx, partial.sum(0) if normed else sums


def _bwd_fake(dy, *_):
    return dy.new_empty(dy.shape), dy.new_empty(2, 2, dy.shape[-1], dtype=torch.float32)


TABLES = "Tensor? cos, Tensor? sin, int group, SymInt prefix, float? q_eps, float? k_eps, "
TABLES += "bool q_rms, bool k_rms"
NORMS = "Tensor? q_norm_weight, Tensor? q_norm_bias, Tensor? k_norm_weight, Tensor? k_norm_bias"
WEIGHTS = "Tensor? q_norm_weight, Tensor? k_norm_weight"
_fwd_op = register("qk_norm_rope_fwd", f"(Tensor qkv, {NORMS}, {TABLES}) -> Tensor", _fwd, _fwd_fake)
_bwd_op = register(
    "qk_norm_rope_bwd", f"(Tensor dy, Tensor qkv, {WEIGHTS}, {TABLES}) -> (Tensor, Tensor)", _bwd, _bwd_fake
)


class _Fn(torch.autograd.Function):
    """Autograd of norms, rotation and attention, for qkv [B, N, 3, H, D]; saves the tensors listed in the header."""

    @staticmethod
    def forward(
        ctx, qkv, q_norm_weight, q_norm_bias, k_norm_weight, k_norm_bias, cos, sin, bias, kv_lens, cu_seqlens,
        group, prefix, q_eps, k_eps, q_rms, k_rms, scale, max_seqlen, causal, qkv_bias,
    ):  # fmt: skip
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        ctx.settings = (group, prefix, q_eps, k_eps, q_rms, k_rms)
        ctx.sizes = (max_seqlen, scale)
        ctx.causal = causal
        ctx.sum_dtype = None if qkv_bias is None else qkv_bias.dtype
        qk = None
        if q_eps is not None or k_eps is not None or cos is not None:
            qk = _fwd_op(qkv, q_norm_weight, q_norm_bias, k_norm_weight, k_norm_bias, cos, sin, *ctx.settings)
            q, k = qk.permute(2, 0, 3, 1, 4).unbind(0)
        o, lse = attention.fwd_op(q, k, v, bias, kv_lens, cu_seqlens, max_seqlen, scale, 0, causal)
        ctx.save_for_backward(
            qkv, q_norm_weight, q_norm_bias, k_norm_weight, k_norm_bias, cos, sin, qk, bias, kv_lens, cu_seqlens, o, lse
        )
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, do, _):
        if do is None:
            return (None,) * 20
        qkv, q_norm_weight, q_norm_bias, k_norm_weight, k_norm_bias, cos, sin, qk, *masks, o, lse = ctx.saved_tensors
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if qk is not None:
            q, k = qk.permute(2, 0, 3, 1, 4).unbind(0)
        learn_bias = ctx.needs_input_grad[7]
        sum_dtype = ctx.sum_dtype if ctx.needs_input_grad[19] else None
        dnorms = [None] * 4
        dqkv, _, _, dbias, dqkv_bias = attention.bwd_op(
            do, q, k, v, *masks, *ctx.sizes, o, lse, True, learn_bias, 0, ctx.causal, sum_dtype
        )  # fmt: skip
        if qk is not None:
            dqkv, sums = _bwd_op(dqkv, qkv, q_norm_weight, k_norm_weight, cos, sin, *ctx.settings)
            norms = zip(
                (q_norm_weight, q_norm_bias, k_norm_weight, k_norm_bias), sums.flatten(0, 1).unbind(0), strict=True
            )
            dnorms = [None if t is None else dt.to(t.dtype) for t, dt in norms]
        dbias = dbias if learn_bias else None
        return dqkv, *dnorms, None, None, dbias, *[None] * 11, None if sum_dtype is None else dqkv_bias


# norms of queries and of keys: weight (w), bias (b), RMSNorm (r), or None for no norm; cases use the index
KINDS = ((None, None), ("wb", "wb"), ("", ""), ("b", "w"), ("w", None), (None, "b"), ("rw", "rw"), ("r", "wb"))


def _inputs(case: dict[str, int], dtype: torch.dtype, device: torch.device | str) -> dict:
    randn, (B, H, N, D) = make_randn(device, dtype), (case[a] for a in ("B", "H", "N", "D"))
    qkv = randn(B, N, 3 * H * D)
    arguments = {"qkv": qkv, "num_heads": H}
    if "prefix" in case:
        leading = (B, 1) if "images" in case else (H,) * case.get("halves", 0)
        angle = make_randn(device, torch.float64, seed=1)(*leading, N - case["prefix"], D // 2).detach()
        if "halves" in case:
            angle = angle.unflatten(-1, (-1, case.get("group", D) // 2)).repeat(*[1] * angle.dim(), 2).flatten(-2)
        else:
            angle = angle.repeat_interleave(2, -1)
        rope = angle.cos().to(dtype), angle.sin().to(dtype), case.get("group", "halves" not in case)
        arguments |= {"rope": rope, "prefix_tokens": case["prefix"]}
    for name, kind in zip(("q_norm", "k_norm"), KINDS[case.get("norms", 0)], strict=True):
        if kind is not None:
            weight = randn(D, shift=1.0, scale=0.1)
            bias = randn(D)
            norm = weight if "w" in kind else None, bias if "b" in kind else None, 1e-6
            arguments[name] = (*norm, "rms_norm") if "r" in kind else norm
    if "gap" in case:  # tokens of no image at the end
        ends = torch.tensor([0, N // 3, N // 3, N - case["gap"]], dtype=torch.int32, device=device)
        arguments |= {"qkv": qkv[0].detach().requires_grad_(), "varlen": (ends, N)}
        arguments.pop("prefix_tokens", None)
    if "causal" in case:
        arguments["causal"] = True
    return arguments


OP = Op(
    name="attention_qkv",
    run=attention_qkv,
    reference=reference,
    cases={
        "rope": dict(B=2, H=2, N=7, D=4, prefix=2, norms=1),
        "plain": dict(B=2, H=3, N=17, D=6),
        "varlen": dict(B=1, H=2, N=9, D=4, prefix=0, halves=1, norms=6, gap=0),
        "causal": dict(B=2, H=1, N=5, D=4, norms=1, causal=1),
    },
    inputs=_inputs,
    ragged={
        "vit": dict(B=2, H=3, N=197, D=64),
        "gap": dict(B=2, H=2, N=16, D=80),
        "rope": dict(B=1, H=2, N=50, D=32, prefix=1, norms=1),
        "halves": dict(B=2, H=3, N=21, D=72, prefix=5, halves=1),
        "normed": dict(B=2, H=1, N=9, D=33, norms=1),
        "bare_norms": dict(B=2, H=2, N=9, D=33, norms=2),
        "half_norms": dict(B=1, H=2, N=17, D=16, prefix=1, norms=3),
        "queries_normed": dict(B=2, H=1, N=9, D=24, norms=4),
        "keys_normed": dict(B=2, H=1, N=9, D=24, prefix=2, halves=1, norms=5),
        "rms_norms": dict(B=1, H=2, N=9, D=33, norms=7),
        "varlen": dict(B=1, H=2, N=70, D=80, prefix=0, halves=1, gap=1),
        "varlen_plain": dict(B=1, H=2, N=19, D=16, norms=6, gap=3),
        "images": dict(B=3, H=2, N=9, D=16, prefix=1, images=1),
        "groups": dict(B=2, H=2, N=9, D=24, prefix=1, halves=1, group=12, norms=1),
        "causal": dict(B=1, H=3, N=77, D=64, causal=1),
        "causal_varlen": dict(B=1, H=2, N=70, D=16, gap=1, causal=1),
        "empty": dict(B=0, H=2, N=5, D=8, prefix=1, norms=1),
    },
)
