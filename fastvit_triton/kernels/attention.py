"""Attention for images: bidirectional, ragged, optionally biased.

Math      S = scale · Q Kᵀ + bias              [Nq, Nk]                          (1)
          O = softmax(S) V                     [Nq, Dv]                          (2)
          L = ln Σₙ exp(S)                     [Nq]      natural log, fp32       (3)
          A row whose keys are all masked gives O = 0 and no gradient, and L = −inf.
Backward  P = exp(S − L)                       recomputed, never stored          (4)
          Δ = Σ_d dO ∘ O                       [Nq]      fp32                    (5)
          dS = P ∘ (dO Vᵀ − Δ)                                                   (6)
          dV = Pᵀ dO    dQ = scale · dS K    dK = scale · dSᵀ Q                  (7)
          dbias[g] = Σ over images b ≡ g (mod G), in order, of dS                (8)
Kernels   work in base 2, S·log₂e and L·log₂e, because exp2 is one instruction. Backward, a program owns a whole head
          where two blocks of keys hold it (197 ≤ 2·128): five products. Elsewhere dQ (with Δ) and dK, dV are two
          kernels of seven, and dbias a third: no atomics, the same bits every run.
Cost      forward 2·B·H·Nq·Nk·(D + Dv) flops; bytes = q + k + v + o + 4·B·H·Nq.
          backward 2·B·H·Nq·Nk·(3·D + 2·Dv) flops by whole heads, (4·D + 3·Dv) otherwise.
Saved     q, k, v, bias, o in storage dtype and L in fp32.
Limits    D, Dv ≤ 256, held as two power-of-two tiles (80 = 64 + 16); the last axis is copied if not contiguous.
          L is fp32: where every key of a row has a finite bias below about −1e5, use −inf or kv_lens to mask, for
          gradients of such a row are lost in its rounding.
Sources   Dao, FlashAttention-2, arXiv:2307.08691, algorithms 1 and 2; Milakov & Gimelshein, arXiv:1805.02867, for the
          running maximum.
          Vaswani et al., Attention is all you need, arXiv:1706.03762, eq. 1.
          Dosovitskiy et al., ViT, arXiv:2010.11929, eq. 5-8.
          Dehghani et al., NaViT, arXiv:2307.06304, section 2.1, for packed images.
Differs   Any Nq, Nk (197 is the normal case), D ≠ Dv (LeViT), a free scale (T2T-ViT, CvT), grouped bias (Swin).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from . import check, dispatch, eager
from .argument import number, whole
from .eager import lead
from .head import (
    dkdv_step,
    dq_step,
    fwd_step,
    head,
    head_step,
    image_of,
    keys_of,
    no_head,
    p_and_dp,
    put_head,
    row_logs,
    start_of,
)
from .op import (
    Op,
    cast,
    cdiv,
    config,
    expect,
    make,
    once_differentiable,
    power_of_2,
    precision,
    register,
    split,
    usable,
)
from .tile import jit, tl

WIDTHS = (64, 128, 160, 192, 256, 320, 512, 1024)  # classes of heads in tuned/, bytes

# Launch parameters by kernel, apart with a bias and with "ieee" products: the first row whose limit holds the wider
# head, in bytes. Every row fits every architecture; none spills but those for fp32 heads of more than 64 channels.
SPACE = {
    "fwd": (
        (64, dict(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=1)),
        (192, dict(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2)),
        (256, dict(BLOCK_M=128, BLOCK_N=32, num_warps=8, num_stages=1)),
        (512, dict(BLOCK_M=32, BLOCK_N=32, num_warps=8, num_stages=1)),
        (1024, dict(BLOCK_M=16, BLOCK_N=32, num_warps=8, num_stages=1)),
    ),
    "fwd_bias": (
        (64, dict(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2)),
        (192, dict(BLOCK_M=64, BLOCK_N=64, num_warps=8, num_stages=2)),
        (256, dict(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=2)),
        (512, dict(BLOCK_M=16, BLOCK_N=32, num_warps=4, num_stages=1)),
        (1024, dict(BLOCK_M=16, BLOCK_N=32, num_warps=8, num_stages=1)),
    ),
    "fwd_ieee": (
        (256, dict(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=1)),
        (1024, dict(BLOCK_M=16, BLOCK_N=32, num_warps=8, num_stages=1)),
    ),
    "bwd_dq": (
        (128, dict(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=3)),
        (192, dict(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2)),
        (256, dict(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=2)),
        (320, dict(BLOCK_M=32, BLOCK_N=16, num_warps=8, num_stages=1)),
        (512, dict(BLOCK_M=16, BLOCK_N=16, num_warps=4, num_stages=1)),
        (1024, dict(BLOCK_M=16, BLOCK_N=16, num_warps=8, num_stages=1)),
    ),
    "bwd_dq_bias": (
        (64, dict(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=3)),
        (192, dict(BLOCK_M=64, BLOCK_N=32, num_warps=8, num_stages=2)),
        (256, dict(BLOCK_M=16, BLOCK_N=32, num_warps=4, num_stages=1)),
        (320, dict(BLOCK_M=32, BLOCK_N=16, num_warps=8, num_stages=1)),
        (512, dict(BLOCK_M=16, BLOCK_N=32, num_warps=8, num_stages=1)),
        (1024, dict(BLOCK_M=16, BLOCK_N=16, num_warps=8, num_stages=1)),
    ),
    "bwd_dq_ieee": (
        (128, dict(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=1)),
        (1024, dict(BLOCK_M=16, BLOCK_N=16, num_warps=8, num_stages=1)),
    ),
    "bwd_dq_bias_ieee": (
        (128, dict(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=1)),
        (256, dict(BLOCK_M=16, BLOCK_N=32, num_warps=8, num_stages=1)),
        (1024, dict(BLOCK_M=16, BLOCK_N=16, num_warps=8, num_stages=1)),
    ),
    "bwd_dkdv": (
        (128, dict(BLOCK_M=32, BLOCK_N=64, num_warps=4, num_stages=2)),
        (192, dict(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=2)),
        (256, dict(BLOCK_M=32, BLOCK_N=32, num_warps=8, num_stages=1)),
        (1024, dict(BLOCK_M=16, BLOCK_N=16, num_warps=8, num_stages=1)),
    ),
    "bwd_dkdv_bias": (
        (192, dict(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=1)),
        (256, dict(BLOCK_M=16, BLOCK_N=32, num_warps=8, num_stages=1)),
        (1024, dict(BLOCK_M=16, BLOCK_N=16, num_warps=8, num_stages=1)),
    ),
    "bwd_dkdv_ieee": (
        (128, dict(BLOCK_M=16, BLOCK_N=16, num_warps=4, num_stages=1)),
        (1024, dict(BLOCK_M=16, BLOCK_N=16, num_warps=8, num_stages=1)),
    ),
    "bwd": ((128, dict(BLOCK_M=16, BLOCK_N=128, num_warps=8, num_stages=1)),),
    "bwd_dbias": (
        (128, dict(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=1)),
        (512, dict(BLOCK_M=16, BLOCK_N=32, num_warps=4, num_stages=1)),
        (1024, dict(BLOCK_M=16, BLOCK_N=32, num_warps=8, num_stages=1)),
    ),
    "bwd_dbias_ieee": (
        (256, dict(BLOCK_M=16, BLOCK_N=32, num_warps=4, num_stages=1)),
        (1024, dict(BLOCK_M=16, BLOCK_N=16, num_warps=8, num_stages=1)),
    ),
}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    scale: float | None = None,
    kv_lens: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale · q kᵀ + bias) v, for any number of queries and keys.

    Args:
        q: [B, H, Nq, D]; views of a packed projection are welcome.
        k: [B, H, Nk, D].
        v: [B, H, Nk, Dv].
        bias: [G, H, Nq, Nk] added to the scores, or boolean with True for "attend"; batch row b uses group b mod G.
            Axes of size 1 broadcast. −inf masks a key.
        scale: multiplies q kᵀ; None means D^-0.5.
        kv_lens: [B] integers, valid keys per image; later keys are masked. Negative means none, more than Nk all.
        return_lse: also return L of equation (3), which carries no gradient.

    Returns:
        [B, H, Nq, Dv]; with `return_lse` also L [B, H, Nq], fp32.

    Raises:
        ValueError: a size or device does not fit.
        TypeError: an argument is of another type or dtype.
    """
    expect("q", q, B=None, H=None, Nq=None, D=None)
    B, H, _, D = q.shape
    expect("k", k, q, B=B, H=H, Nk=None, D=D)
    expect("v", v, q, B=B, H=H, Nk=k.shape[2], Dv=None)
    check.heads(q, k, v)
    check.scores(q, (H, q.shape[2], k.shape[2]), bias, kv_lens, scale, return_lse)
    if usable(q, max(D, v.shape[3])):
        o, lse = _Fn.apply(*cast(q, k, v), bias, kv_lens, None, 0, D**-0.5 if scale is None else scale)
        return (o, lse * math.log(2)) if return_lse else o
    return reference(q, k, v, bias, scale, kv_lens, return_lse)


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float | None = None
) -> Tensor:
    """Attention inside each image of a packed batch of differently sized images (NaFlex, NaViT).

    Args:
        q: [T, H, D], the tokens of all images one after another.
        k: [T, H, D].
        v: [T, H, Dv].
        cu_seqlens: [B + 1] integers from 0 to at most T: image b owns tokens cu_seqlens[b] to cu_seqlens[b + 1].
        max_seqlen: upper bound of one image's tokens; a size for the launch, never read from the device.
        scale: softmax scale; None means D^-0.5.

    Returns:
        [T, H, Dv]; 0 for tokens that belong to no image.

    Raises:
        ValueError: a size or device does not fit, or cu_seqlens does not cut T tokens into images of at most
            max_seqlen. What cu_seqlens holds is read on a CPU, and on a GPU only with FASTVIT_TRITON_CHECK=1;
            unread it is cut to T and max_seqlen, so that no memory outside of the tensors is touched.
        TypeError: an argument is of another type or dtype.
    """
    expect("q", q, T=None, H=None, D=None)
    T, H, D = q.shape
    expect("k", k, q, T=T, H=H, D=D)
    expect("v", v, q, T=T, H=H, Dv=None)
    check.heads(q, k, v)
    whole("max_seqlen", max_seqlen, 0)
    check.images(cu_seqlens, q, max_seqlen)
    if scale is not None:
        number("scale", scale)
    if usable(q, max(D, v.shape[2])):
        heads_first = (t.transpose(0, 1)[None] for t in cast(q, k, v))  # [1, H, T, D]
        o, _ = _Fn.apply(*heads_first, None, None, cu_seqlens, max_seqlen, D**-0.5 if scale is None else scale)
        return o[0].transpose(0, 1)
    return reference_varlen(q, k, v, cu_seqlens, max_seqlen, scale)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    scale: float | None = None,
    kv_lens: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Equations (1) and (2) by PyTorch's fused attention, which has neither L nor tangents; else written out."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    mask = _mask(q, k, bias, kv_lens)
    if not return_lse and torch.autograd.forward_ad._current_level < 0:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = scale * (q @ k.mT).float() if q.dtype != torch.float64 else scale * (q @ k.mT)  # (1) [B, H, Nq, Nk]
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    lse = scores.detach().logsumexp(-1)  # (3)
    empty = (lse == float("-inf"))[..., None]
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    o = weights.to(v.dtype) @ v  # (2)
    return (o, lse.float()) if return_lse else o


def reference_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float | None = None
) -> Tensor:
    """One attention over all tokens in which a token sees its own image only; `max_seqlen` is not needed here."""
    tokens = torch.arange(len(q), device=q.device)
    image = torch.searchsorted(cu_seqlens[1:].contiguous().to(tokens.dtype), tokens, right=True)  # [T]
    same = (image[:, None] == image[None, :]) & (image < len(cu_seqlens) - 1)[:, None]
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))  # [1, H, T, D]
    return reference(q, k, v, same[None, None], scale)[0].transpose(0, 1)


def _mask(q: Tensor, k: Tensor, bias: Tensor | None, kv_lens: Tensor | None) -> Tensor | None:
    """Bias groups and valid lengths as one mask that broadcasts to [B, H, Nq, Nk]; boolean or of q's dtype."""
    B, Nk = q.shape[0], k.shape[2]
    if bias is not None:
        groups = bias.shape[0]
        if groups != 1 and groups != B:
            bias = bias[torch.arange(B, device=bias.device) % groups]
        bias = bias if bias.dtype == torch.bool else bias.to(q.dtype)
    if kv_lens is None:
        return bias
    valid = (torch.arange(Nk, device=k.device) < kv_lens[:, None])[:, None, None, :]  # [B, 1, 1, Nk]
    if bias is None:
        return valid
    return bias & valid if bias.dtype == torch.bool else bias.masked_fill(~valid, float("-inf"))


@jit
def _fwd_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, lens_ptr, cu_ptr, o_ptr, l_ptr,
    q_strides, k_strides, v_strides, bias_strides, o_strides, l_strides, H, Nq, Nk, T, G, tiles, scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, Dv: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BIAS: tl.constexpr, HAS_LENS: tl.constexpr, HAS_CU: tl.constexpr, PRECISION: tl.constexpr, SAFE: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head; streams all keys. Equations (1) to (3)."""
    tile, b, h, start, Nq, Nk = image_of(tl.program_id(0), tiles, H, Nq, Nk, T, cu_ptr, lens_ptr, HAS_CU, HAS_LENS)
    if tile * BLOCK_M >= Nq:
        return
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q_ptr, q_row = start_of(q_ptr, q_strides, b, h, start, UNIT)
    k_ptr, k_row = start_of(k_ptr, k_strides, b, h, start, UNIT)
    v_ptr, v_row = start_of(v_ptr, v_strides, b, h, start, UNIT)
    if BIAS > 0:
        bias_ptr += (b % G) * bias_strides[0] + h * bias_strides[1]
    q0, q1 = head(q_ptr, m, q_row, Nq, D, D0, D1, True)  # [BLOCK_M, D0], [BLOCK_M, D1]
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    o0, o1 = no_head(BLOCK_M, V0, V1)
    full = Nk // BLOCK_N * BLOCK_N
    for first in range(0, full, BLOCK_N):
        top, total, o0, o1 = fwd_step(
            q0, q1, k_ptr, v_ptr, bias_ptr, k_row, v_row, bias_strides,
            m, first + tl.arange(0, BLOCK_N), Nq, Nk, top, total, o0, o1, scale,
            D, D0, D1, Dv, V0, V1, BIAS, PRECISION, SAFE, False,
        )  # fmt: skip
    if TAIL > 0:  # 197 = 3·64 + 5: only the last keys are masked
        top, total, o0, o1 = fwd_step(
            q0, q1, k_ptr, v_ptr, bias_ptr, k_row, v_row, bias_strides,
            m, full + tl.arange(0, TAIL), Nq, Nk, top, total, o0, o1, scale,
            D, D0, D1, Dv, V0, V1, BIAS, PRECISION, SAFE, True,
        )  # fmt: skip
    some = total
    if SAFE:
        some = tl.where(total == 0, 1.0, total)  # a row without keys: o0 is 0 already
        top = tl.where(total == 0, float("-inf"), top)
        scale = 1.0
    o_ptr, o_row = start_of(o_ptr, o_strides, b, h, start, UNIT)
    inverse = 1.0 / some[:, None]
    put_head(o_ptr, o0 * inverse, o1 * inverse, m, o_row, Nq, Dv, V0, V1)
    tl.store(l_ptr + b * l_strides[0] + h * l_strides[1] + start + m, top * scale + tl.log2(some), mask=m < Nq)


@jit
def _bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, lens_ptr, cu_ptr, o_ptr, do_ptr, l_ptr, delta_ptr, dq_ptr,
    q_strides, k_strides, v_strides, bias_strides, o_strides, do_strides, l_strides, dq_strides,
    H, Nq, Nk, T, G, tiles, scale, softmax_scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, Dv: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BIAS: tl.constexpr, HAS_LENS: tl.constexpr, HAS_CU: tl.constexpr, PRECISION: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries; streams keys; writes Δ of equation (5) and dQ of (7)."""
    tile, b, h, start, Nq, Nk = image_of(tl.program_id(0), tiles, H, Nq, Nk, T, cu_ptr, lens_ptr, HAS_CU, HAS_LENS)
    if tile * BLOCK_M >= Nq:
        return
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q_ptr, q_row = start_of(q_ptr, q_strides, b, h, start, UNIT)
    k_ptr, k_row = start_of(k_ptr, k_strides, b, h, start, UNIT)
    v_ptr, v_row = start_of(v_ptr, v_strides, b, h, start, UNIT)
    o_ptr, o_row = start_of(o_ptr, o_strides, b, h, start, UNIT)
    do_ptr, do_row = start_of(do_ptr, do_strides, b, h, start, UNIT)
    dq_ptr, dq_row = start_of(dq_ptr, dq_strides, b, h, start, UNIT)
    l_at = b * l_strides[0] + h * l_strides[1] + start
    if BIAS > 0:
        bias_ptr += (b % G) * bias_strides[0] + h * bias_strides[1]
    q0, q1 = head(q_ptr, m, q_row, Nq, D, D0, D1, True)  # [BLOCK_M, D0], [BLOCK_M, D1]
    do0, do1 = head(do_ptr, m, do_row, Nq, Dv, V0, V1, True)  # [BLOCK_M, V0], [BLOCK_M, V1]
    o0, o1 = head(o_ptr, m, o_row, Nq, Dv, V0, V1, True)
    delta = tl.sum(do0.to(tl.float32) * o0.to(tl.float32), 1)  # (5)
    if V1 > 0:
        delta += tl.sum(do1.to(tl.float32) * o1.to(tl.float32), 1)
    tl.store(delta_ptr + l_at + m, delta, mask=m < Nq)
    lse = row_logs(l_ptr + l_at, m, Nq)
    dq0, dq1 = no_head(BLOCK_M, D0, D1)
    full = Nk // BLOCK_N * BLOCK_N
    for first in range(0, full, BLOCK_N):
        dq0, dq1 = dq_step(
            q0, q1, do0, do1, k_ptr, v_ptr, bias_ptr, k_row, v_row, bias_strides,
            m, first + tl.arange(0, BLOCK_N), Nq, Nk, lse, delta, dq0, dq1, scale,
            D, D0, D1, Dv, V0, V1, BIAS, PRECISION, False,
        )  # fmt: skip
    if TAIL > 0:
        dq0, dq1 = dq_step(
            q0, q1, do0, do1, k_ptr, v_ptr, bias_ptr, k_row, v_row, bias_strides,
            m, full + tl.arange(0, TAIL), Nq, Nk, lse, delta, dq0, dq1, scale,
            D, D0, D1, Dv, V0, V1, BIAS, PRECISION, True,
        )  # fmt: skip
    put_head(dq_ptr, dq0 * softmax_scale, dq1 * softmax_scale, m, dq_row, Nq, D, D0, D1)


@jit
def _bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, lens_ptr, cu_ptr, do_ptr, l_ptr, delta_ptr, dk_ptr, dv_ptr,
    q_strides, k_strides, v_strides, bias_strides, do_strides, l_strides, dk_strides, dv_strides,
    H, Nq, Nk, T, G, tiles, scale, softmax_scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, Dv: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BIAS: tl.constexpr, HAS_LENS: tl.constexpr, HAS_CU: tl.constexpr, PRECISION: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N keys of one head; streams queries; writes dK and dV of equation (7)."""
    keys = Nk  # rows to write, masked ones too
    tile, b, h, start, Nq, Nk = image_of(tl.program_id(0), tiles, H, Nq, Nk, T, cu_ptr, lens_ptr, HAS_CU, HAS_LENS)
    if not HAS_LENS:
        keys = Nk
    if tile * BLOCK_N >= keys:
        return
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    q_ptr, q_row = start_of(q_ptr, q_strides, b, h, start, UNIT)
    k_ptr, k_row = start_of(k_ptr, k_strides, b, h, start, UNIT)
    v_ptr, v_row = start_of(v_ptr, v_strides, b, h, start, UNIT)
    do_ptr, do_row = start_of(do_ptr, do_strides, b, h, start, UNIT)
    dk_ptr, dk_row = start_of(dk_ptr, dk_strides, b, h, start, UNIT)
    dv_ptr, dv_row = start_of(dv_ptr, dv_strides, b, h, start, UNIT)
    l_ptr += b * l_strides[0] + h * l_strides[1] + start
    delta_ptr += b * l_strides[0] + h * l_strides[1] + start
    if BIAS > 0:
        bias_ptr += (b % G) * bias_strides[0] + h * bias_strides[1]
    k0, k1 = head(k_ptr, n, k_row, Nk, D, D0, D1, True)  # [BLOCK_N, D0], [BLOCK_N, D1]
    v0, v1 = head(v_ptr, n, v_row, Nk, Dv, V0, V1, True)  # [BLOCK_N, V0], [BLOCK_N, V1]
    dk0, dk1 = no_head(BLOCK_N, D0, D1)
    dv0, dv1 = no_head(BLOCK_N, V0, V1)
    full = Nq // BLOCK_M * BLOCK_M
    for first in range(0, full, BLOCK_M):
        dk0, dk1, dv0, dv1 = dkdv_step(
            k0, k1, v0, v1, q_ptr, do_ptr, l_ptr, delta_ptr, bias_ptr, q_row, do_row, bias_strides,
            first + tl.arange(0, BLOCK_M), n, Nq, Nk, dk0, dk1, dv0, dv1, scale,
            D, D0, D1, Dv, V0, V1, BIAS, PRECISION, False,
        )  # fmt: skip
    if full < Nq:
        dk0, dk1, dv0, dv1 = dkdv_step(
            k0, k1, v0, v1, q_ptr, do_ptr, l_ptr, delta_ptr, bias_ptr, q_row, do_row, bias_strides,
            full + tl.arange(0, BLOCK_M), n, Nq, Nk, dk0, dk1, dv0, dv1, scale,
            D, D0, D1, Dv, V0, V1, BIAS, PRECISION, True,
        )  # fmt: skip
    if HAS_LENS:
        seen = (n < Nk)[:, None]
        dk0, dk1 = tl.where(seen, dk0, 0.0), tl.where(seen, dk1, 0.0)
        dv0, dv1 = tl.where(seen, dv0, 0.0), tl.where(seen, dv1, 0.0)
    put_head(dk_ptr, dk0 * softmax_scale, dk1 * softmax_scale, n, dk_row, keys, D, D0, D1)
    put_head(dv_ptr, dv0, dv1, n, dv_row, keys, Dv, V0, V1)


@jit
def _bwd_kernel(
    q_ptr, k_ptr, v_ptr, lens_ptr, cu_ptr, o_ptr, do_ptr, l_ptr, dq_ptr, dk_ptr, dv_ptr,
    q_strides, k_strides, v_strides, o_strides, do_strides, l_strides, dq_strides, dk_strides, dv_strides,
    H, Nq, Nk, T, tiles, scale, softmax_scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, Dv: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    HAS_LENS: tl.constexpr, HAS_CU: tl.constexpr, PRECISION: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """One program: one whole head, in five products for the two kernels' seven; streams queries for each block of keys.

    dQ of the first keys waits in its final place, read back by the threads that wrote it.
    """
    keys = Nk  # rows to write, masked ones too
    _, b, h, start, Nq, Nk = image_of(tl.program_id(0), tiles, H, Nq, Nk, T, cu_ptr, lens_ptr, HAS_CU, HAS_LENS)
    if not HAS_LENS:
        keys = Nk
    q_ptr, q_row = start_of(q_ptr, q_strides, b, h, start, UNIT)
    k_ptr, k_row = start_of(k_ptr, k_strides, b, h, start, UNIT)
    v_ptr, v_row = start_of(v_ptr, v_strides, b, h, start, UNIT)
    o_ptr, o_row = start_of(o_ptr, o_strides, b, h, start, UNIT)
    do_ptr, do_row = start_of(do_ptr, do_strides, b, h, start, UNIT)
    dq_ptr, dq_row = start_of(dq_ptr, dq_strides, b, h, start, UNIT)
    dk_ptr, dk_row = start_of(dk_ptr, dk_strides, b, h, start, UNIT)
    dv_ptr, dv_row = start_of(dv_ptr, dv_strides, b, h, start, UNIT)
    l_ptr += b * l_strides[0] + h * l_strides[1] + start
    full = Nq // BLOCK_M * BLOCK_M
    for block in tl.range(0, keys, BLOCK_N, disable_licm=True):  # what is hoisted out of these loops is spilled
        n = block + tl.arange(0, BLOCK_N)
        k0, k1 = head(k_ptr, n, k_row, Nk, D, D0, D1, True)  # [BLOCK_N, D0], [BLOCK_N, D1]
        v0, v1 = head(v_ptr, n, v_row, Nk, Dv, V0, V1, True)  # [BLOCK_N, V0], [BLOCK_N, V1]
        dk0, dk1 = no_head(BLOCK_N, D0, D1)
        dv0, dv1 = no_head(BLOCK_N, V0, V1)
        for first in tl.range(0, full, BLOCK_M, disable_licm=True):
            dk0, dk1, dv0, dv1 = head_step(
                k0, k1, v0, v1, q_ptr, o_ptr, do_ptr, l_ptr, dq_ptr, q_row, o_row, do_row, dq_row,
                first + tl.arange(0, BLOCK_M), n, block > 0, Nq, Nk, dk0, dk1, dv0, dv1, scale, softmax_scale,
                D, D0, D1, Dv, V0, V1, HAS_LENS, PRECISION, False,
            )  # fmt: skip
        if TAIL > 0:
            dk0, dk1, dv0, dv1 = head_step(
                k0, k1, v0, v1, q_ptr, o_ptr, do_ptr, l_ptr, dq_ptr, q_row, o_row, do_row, dq_row,
                full + tl.arange(0, TAIL), n, block > 0, Nq, Nk, dk0, dk1, dv0, dv1, scale, softmax_scale,
                D, D0, D1, Dv, V0, V1, HAS_LENS, PRECISION, True,
            )  # fmt: skip
        put_head(dk_ptr, dk0 * softmax_scale, dk1 * softmax_scale, n, dk_row, keys, D, D0, D1)
        put_head(dv_ptr, dv0, dv1, n, dv_row, keys, Dv, V0, V1)
        tl.debug_barrier()


@jit
def _bwd_dbias_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, lens_ptr, do_ptr, l_ptr, delta_ptr, dbias_ptr,
    q_strides, k_strides, v_strides, bias_strides, do_strides, l_strides, B, H, Nq, Nk, G, tiles_m, tiles_n, scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, Dv: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BIAS: tl.constexpr, HAS_LENS: tl.constexpr, PRECISION: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: one tile of one head's bias in one group; sums dS over the group's images in order. Equation (8)."""
    pid = tl.program_id(0)
    n = pid % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m = pid // tiles_n % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    h = (pid // tiles_n // tiles_m % H).to(tl.int64)
    g = (pid // tiles_n // tiles_m // H).to(tl.int64)
    bias_ptr += g * bias_strides[0] + h * bias_strides[1]
    dbias = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for image in range(g, B, G):
        b, keys = tl.cast(image, tl.int64), Nk
        if HAS_LENS:
            keys = keys_of(lens_ptr + b, Nk)
        at = b * l_strides[0] + h * l_strides[1]
        q_at, q_row = start_of(q_ptr, q_strides, b, h, 0, UNIT)
        k_at, k_row = start_of(k_ptr, k_strides, b, h, 0, UNIT)
        v_at, v_row = start_of(v_ptr, v_strides, b, h, 0, UNIT)
        do_at, do_row = start_of(do_ptr, do_strides, b, h, 0, UNIT)
        q0, q1 = head(q_at, m, q_row, Nq, D, D0, D1, True)
        k0, k1 = head(k_at, n, k_row, keys, D, D0, D1, True)
        do0, do1 = head(do_at, m, do_row, Nq, Dv, V0, V1, True)
        p, dp = p_and_dp(
            q0, q1, do0, do1, k0, k1, v_at, bias_ptr, v_row, bias_strides, m, n, Nq, keys, row_logs(l_ptr + at, m, Nq),
            scale, D1, Dv, V0, V1, BIAS, PRECISION, True,
        )  # fmt: skip
        dbias += p * (dp - tl.load(delta_ptr + at + m, mask=m < Nq, other=0.0)[:, None])
    at = dbias_ptr + ((g * H + h) * Nq + m)[:, None] * Nk + n[None, :]
    tl.store(at, dbias, mask=(m < Nq)[:, None] & (n < Nk)[None, :])


def _row(kernel: str, q: Tensor, bias: Tensor | None, width: int) -> tuple[str, dict[str, int]]:
    """Name in tuned/ and default of the launch parameters for a head of this width (D or Dv, in whole tiles)."""
    ieee, biased = "_ieee" if precision(q) == "ieee" else "", "" if bias is None else "_bias"
    name = next(name for name in (kernel + biased + ieee, kernel + ieee, kernel) if name in SPACE)
    size, kind = width * q.element_size(), "fp32." if q.dtype == torch.float32 else ""
    default = next(row for limit, row in SPACE[name] if size <= limit)
    return f"attention.{name}.{kind}{next(w for w in WIDTHS if size <= w)}", default


def _blocks(kernel: str, q: Tensor, bias: Tensor | None, Nq: int, width: int) -> dict[str, int]:
    """Launch parameters: the row of SPACE, or of tuned/."""
    block = config(*_row(kernel, q, bias, width), q.device)
    if kernel == "fwd":
        block["BLOCK_M"] = min(block["BLOCK_M"], power_of_2(max(Nq, 16)))
    return block


def _whole(q: Tensor, bias: Tensor | None, ragged: bool, Nk: int, width: int) -> dict[str, int] | None:
    """Launch parameters where one program takes all gradients of a head; None for the two kernels.

    More than two blocks of keys would round dQ too often. A row with BLOCK_N = 0 always means the two kernels.
    """
    (limit, default), size = SPACE["bwd"][-1], width * q.element_size()
    if bias is not None or q.dtype == torch.float32 or size > limit or width != power_of_2(width):
        return None
    blocks = config(f"attention.bwd.{'ragged.' if ragged else ''}{size}", default, q.device)
    return blocks if Nk <= 2 * blocks["BLOCK_N"] else None


def _tail(N: int, block: int, ragged: bool) -> int:
    """Width of the masked block after the full ones: 0 if none, a whole block where only the device knows N."""
    rest = N % block
    return block if ragged else (power_of_2(max(rest, 16)) if rest else 0)


def _arguments(q, k, v, bias, kv_lens, cu, max_seqlen, scale, lse, **others):
    """What the kernels take, by name: pointers, strides and sizes."""
    (_, H, Nq, D), Nk, Dv = q.shape, k.shape[2], v.shape[3]
    (D0, D1), (V0, V1) = split(D), split(Dv)
    if bias is not None:
        bias = bias.expand(bias.shape[0], H, Nq, Nk)
    tensors = dict(q=q, k=k, v=v, **others)
    strides = {name: _strides(t, cu) for name, t in tensors.items()}
    unit = 16 // q.element_size()
    unit = unit if all(stride % unit == 0 for each in strides.values() for stride in each) else 1
    pointers = {f"{name}_ptr": t for name, t in tensors.items()}
    strides = {f"{name}_strides": tuple(stride // unit for stride in each) for name, each in strides.items()}
    return pointers | strides | dict(
        bias_ptr=bias, bias_strides=(0, 0, 0, 0) if bias is None else bias.stride(), G=1 if bias is None else len(bias),
        l_ptr=lse, l_strides=_strides(lse, cu)[:2], lens_ptr=kv_lens, cu_ptr=cu,
        H=H, Nq=Nq if cu is None else max_seqlen, Nk=Nk, T=Nq, scale=scale * math.log2(math.e), softmax_scale=scale,
        D=D, D0=D0, D1=D1, Dv=Dv, V0=V0, V1=V1, BIAS=0 if bias is None else 2 if bias.dtype == torch.bool else 1,
        HAS_LENS=kv_lens is not None, HAS_CU=cu is not None, PRECISION=precision(q), UNIT=unit,
    )  # fmt: skip


def _launch(kernel, programs, blocks, **arguments):
    """Runs a kernel with those of the arguments that it takes."""
    kernel[(programs,)](**{name: arguments[name] for name in kernel.arg_names if name in arguments}, **blocks)


def _strides(t, cu):
    """Of batch, head and token; packed images [1, H, T, D] have no batch."""
    return (0 if cu is not None else t.stride(0), t.stride(1), t.stride(2))


def _sizes(q, k, v, cu, max_seqlen):
    """Images, queries and keys of the longest image, and the wider head in whole tiles."""
    images, Nq, Nk = (q.shape[0], q.shape[2], k.shape[2]) if cu is None else (len(cu) - 1, max_seqlen, max_seqlen)
    return images, Nq, Nk, max(sum(split(q.shape[3])), sum(split(v.shape[3])))


def _fwd(q, k, v, bias, kv_lens, cu, max_seqlen, scale):
    """(o [B, H, Nq, Dv] stored as [B, Nq, H, Dv], L [B, H, Nq] in base 2)."""
    if bias is kv_lens is cu is None and not dispatch.attention(_row, "fwd", q, k, v):
        return eager.attention(q, k, v, scale)
    o, lse = _fwd_fake(q, k, v, bias, kv_lens, cu, max_seqlen, scale)
    if cu is not None:  # tokens of no image
        o.zero_()
        lse.fill_(-math.inf)
    q, k, v = lead(q, k, v)
    images, Nq, Nk, width = _sizes(q, k, v, cu, max_seqlen)
    blocks = _blocks("fwd", q, bias, Nq, width)
    tiles = cdiv(Nq, blocks["BLOCK_M"])
    if o.numel():
        safe = bias is not None or kv_lens is not None or scale <= 0 or not Nk
        arguments = _arguments(q, k, v, bias, kv_lens, cu, max_seqlen, scale, lse, o=o)
        tail = _tail(Nk, blocks["BLOCK_N"], kv_lens is not None or cu is not None)
        _launch(_fwd_kernel, tiles * images * q.shape[1], blocks, **arguments, tiles=tiles, SAFE=safe, TAIL=tail)
    return o, lse


def _fwd_fake(q, k, v, bias, kv_lens, cu, max_seqlen, scale):
    B, H, Nq, _ = q.shape
    o = q.new_empty(B, Nq, H, v.shape[3]).transpose(1, 2)
    return o, q.new_empty(B, H, Nq, dtype=torch.float32)


def _bwd(do, q, k, v, bias, kv_lens, cu, max_seqlen, scale, o, lse, packed, learn_bias):
    """(dq, dk, dv, dbias); `packed` gives dqkv [B, N, 3, H, D] in place of dq. What is not asked for is empty."""
    if bias is kv_lens is cu is None and not dispatch.attention(_row, "bwd_dq", q, k, v, packed):
        return *eager.attention_grads(do, q, k, v, o, lse, scale, packed), q.new_empty(0)
    outputs = _bwd_fake(do, q, k, v, bias, kv_lens, cu, max_seqlen, scale, o, lse, packed, learn_bias)
    dq, dk, dv, dbias = outputs
    for grad in () if cu is None else (dq, dk, dv):  # tokens of no image
        grad.zero_()
    if packed:
        dq, dk, dv = dq.permute(2, 0, 3, 1, 4).unbind(0)
    do, q, k, v = lead(do, q, k, v)
    images, Nq, Nk, width = _sizes(q, k, v, cu, max_seqlen)
    heads, ragged = images * q.shape[1], kv_lens is not None or cu is not None
    arguments = _arguments(q, k, v, bias, kv_lens, cu, max_seqlen, scale, lse, do=do, o=o, dq=dq, dk=dk, dv=dv)
    whole = _whole(q, bias, ragged, Nk, width)
    if whole and q.numel() and k.numel():
        tail = _tail(Nq, whole["BLOCK_M"], cu is not None)
        _launch(_bwd_kernel, heads, whole, **arguments, tiles=1, TAIL=tail)
        return outputs
    arguments["delta_ptr"] = torch.empty_like(lse)
    if q.numel():
        blocks = _blocks("bwd_dq", q, bias, Nq, width)
        tiles, tail = cdiv(Nq, blocks["BLOCK_M"]), _tail(Nk, blocks["BLOCK_N"], ragged)
        _launch(_bwd_dq_kernel, tiles * heads, blocks, **arguments, tiles=tiles, TAIL=tail)
    if k.numel():
        blocks = _blocks("bwd_dkdv", q, bias, Nq, width)
        tiles = cdiv(Nk, blocks["BLOCK_N"])
        _launch(_bwd_dkdv_kernel, tiles * heads, blocks, **arguments, tiles=tiles)
    if learn_bias:
        blocks = _blocks("bwd_dbias", q, bias, Nq, width)
        full = torch.zeros(bias.shape[0], q.shape[1], Nq, Nk, dtype=torch.float32, device=q.device)
        if q.numel() and k.numel():
            tiles = dict(tiles_m=cdiv(Nq, blocks["BLOCK_M"]), tiles_n=cdiv(Nk, blocks["BLOCK_N"]))
            programs = math.prod(tiles.values()) * q.shape[1] * bias.shape[0]
            _launch(_bwd_dbias_kernel, programs, blocks, **arguments, **tiles, dbias_ptr=full, B=images)
        dbias.copy_(full.sum_to_size(bias.shape))
    return outputs


def _bwd_fake(do, q, k, v, bias, kv_lens, cu, max_seqlen, scale, o, lse, packed, learn_bias):
    B, H, N, D = q.shape
    dbias = q.new_empty(bias.shape, dtype=bias.dtype) if learn_bias else q.new_empty(0)
    if packed:
        return q.new_empty(B, N, 3, H, D), q.new_empty(0), q.new_empty(0), dbias
    return (*(t.new_empty(t.shape) for t in (q, k, v)), dbias)


ARGUMENTS = "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? kv_lens, Tensor? cu, SymInt max_seqlen, float scale"
_fwd_op = register("attention_fwd", f"({ARGUMENTS}) -> (Tensor, Tensor)", _fwd, _fwd_fake)
_bwd_op = register(
    "attention_bwd",
    f"(Tensor do, {ARGUMENTS}, Tensor o, Tensor lse, bool packed, bool learn_bias) -> (Tensor, Tensor, Tensor, Tensor)",
    _bwd,
    _bwd_fake,
)


class _Fn(torch.autograd.Function):
    """Ties attention_fwd to attention_bwd for q, k, v [B, H, N, D]; saves what the header lists."""

    @staticmethod
    def forward(ctx, q, k, v, bias, kv_lens, cu, max_seqlen, scale):
        o, lse = _fwd_op(q, k, v, bias, kv_lens, cu, max_seqlen, scale)
        ctx.save_for_backward(q, k, v, bias, kv_lens, cu, o, lse)
        ctx.sizes = max_seqlen, scale
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, do, _):
        *inputs, o, lse = ctx.saved_tensors
        dq, dk, dv, dbias = _bwd_op(do, *inputs, *ctx.sizes, o, lse, False, ctx.needs_input_grad[3])
        return dq, dk, dv, dbias if ctx.needs_input_grad[3] else None, None, None, None, None


def _inputs(case: dict[str, int], dtype: torch.dtype, device: torch.device | str) -> dict:
    randn, (B, H, Nq, Nk, D, Dv) = make(device, dtype), (case[a] for a in ("B", "H", "Nq", "Nk", "D", "Dv"))
    arguments = {"q": randn(B, Nq, H, D).transpose(1, 2), "k": randn(B, H, Nk, D), "v": randn(B, H, Nk, Dv)}
    if "G" in case:
        arguments["bias"] = randn(case["G"], H, Nq, Nk)
    if "short" in case:
        lens = [Nk - case["short"] * (b % 2) for b in range(B)]
        arguments["kv_lens"] = torch.tensor(lens, dtype=torch.int64, device=device)
    return arguments


def _inputs_varlen(case: dict[str, int], dtype: torch.dtype, device: torch.device | str) -> dict:
    randn, H, D = make(device, dtype), case["H"], case["D"]
    lengths = [case["a"], case["b"], case["c"]]
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    q, k, v = (randn(sum(lengths), H, D) for _ in range(3))
    return {"q": q, "k": k, "v": v, "cu_seqlens": ends, "max_seqlen": max(lengths)}


OP = Op(
    name="attention",
    run=attention,
    reference=reference,
    cases={
        "bias": dict(B=4, H=1, Nq=3, Nk=5, D=3, Dv=2, G=2),
        "padded": dict(B=2, H=1, Nq=3, Nk=9, D=4, Dv=4, short=4),
        "class_token": dict(B=2, H=3, Nq=1, Nk=17, D=8, Dv=8),
    },
    inputs=_inputs,
    ragged={
        "vit": dict(B=1, H=2, Nq=197, Nk=197, D=64, Dv=64),
        "class_token": dict(B=2, H=3, Nq=1, Nk=50, D=48, Dv=48),
        "levit": dict(B=2, H=2, Nq=16, Nk=49, D=16, Dv=32),
        "windows": dict(B=4, H=2, Nq=49, Nk=49, D=32, Dv=32, G=2),
        "bias_wide": dict(B=2, H=1, Nq=70, Nk=65, D=80, Dv=72, G=1),
        "padded": dict(B=2, H=2, Nq=50, Nk=130, D=33, Dv=6, short=130),
        "so400m": dict(B=1, H=1, Nq=65, Nk=65, D=72, Dv=72),
        "giant": dict(B=1, H=1, Nq=17, Nk=33, D=88, Dv=88),
        "widest": dict(B=1, H=1, Nq=20, Nk=20, D=256, Dv=192),
        "no_images": dict(B=0, H=2, Nq=4, Nk=4, D=8, Dv=8),
        "no_padded": dict(B=0, H=2, Nq=4, Nk=4, D=8, Dv=8, short=1),
        "no_queries": dict(B=2, H=2, Nq=0, Nk=4, D=8, Dv=8),
        "no_keys": dict(B=2, H=2, Nq=4, Nk=0, D=8, Dv=8),
    },
)
OP_VARLEN = Op(
    name="varlen_attention",
    run=varlen_attention,
    reference=reference_varlen,
    cases={"three_images": dict(H=2, D=4, a=3, b=1, c=5)},
    inputs=_inputs_varlen,
    ragged={
        "naflex": dict(H=2, D=32, a=70, b=1, c=129),
        "gap": dict(H=1, D=16, a=5, b=0, c=3),
        "empty": dict(H=2, D=8, a=0, b=0, c=0),
    },
)
