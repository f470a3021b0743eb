"""Attention for images: bidirectional, ragged, optionally biased.

Math      S = scale · Q Kᵀ + bias              [Nq, Nk]                          (1)
          O = softmax(S) V                     [Nq, Dv]                          (2)
          L = ln Σₙ exp(S)                     [Nq]      natural log, fp32       (3)
          A row whose keys are all masked gives O = 0 and no gradient, and L = −inf.
Cost      2·B·H·Nq·Nk·(D + Dv) flops; bytes = q + k + v + o.
Sources   Vaswani et al., Attention is all you need, arXiv:1706.03762, eq. 1.
          Dosovitskiy et al., ViT, arXiv:2010.11929, eq. 5-8.
          Su et al., RoFormer, arXiv:2104.09864, eq. 34, for the rotation; Dehghani et al., NaViT, arXiv:2307.06304,
          section 2.1, for packed images.
Differs   Any Nq, Nk (197 is the normal case), D ≠ Dv (LeViT), a free scale (T2T-ViT, CvT), grouped bias (Swin).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .op import Op, expect, make

Norm = tuple[Tensor, Tensor | None, float]  # weight [D], bias [D], eps
Rope = tuple[Tensor, Tensor, bool]  # cos and sin [N - prefix, D] or [H, N - prefix, D]; True when pairs interleave


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
        kv_lens: [B] valid keys per image; later keys are masked.
        return_lse: also return L of equation (3), which carries no gradient.

    Returns:
        [B, H, Nq, Dv]; with `return_lse` also L [B, H, Nq], fp32.

    Raises:
        ValueError: an axis does not fit.
    """
    B, H, _, D = q.shape if q.dim() == 4 else (None,) * 4
    expect("q", q, B=B, H=H, Nq=None, D=D)
    expect("k", k, B=B, H=H, Nk=None, D=D)
    expect("v", v, B=B, H=H, Nk=k.shape[2], Dv=None)
    return reference(q, k, v, bias, scale, kv_lens, return_lse)


def attention_qkv(
    qkv: Tensor,
    num_heads: int,
    scale: float | None = None,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    rope: Rope | None = None,
    prefix_tokens: int = 0,
    bias: Tensor | None = None,
    kv_lens: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Self-attention on the packed projection: the hot path of every plain ViT.

    Args:
        qkv: [B, N, 3·H·D], ordered as [3, H, D].
        num_heads: H.
        scale: softmax scale; None means D^-0.5.
        q_norm: (weight [D], bias [D], eps) of a LayerNorm over each query's channels.
        k_norm: the same for keys.
        rope: (cos, sin, interleaved), tables [N − prefix_tokens, D] or with a leading H; rotates queries and keys in
            channel pairs (2i, 2i+1) when interleaved, else (i, i + D/2).
        prefix_tokens: leading tokens that `rope` leaves alone.
        bias: as in `attention`.
        kv_lens: [B] valid tokens per image.
        return_lse: also return L [B, H, N].

    Returns:
        [B, N, H·D], heads merged; with `return_lse` also L [B, H, N], fp32.

    Raises:
        ValueError: an axis does not fit.
    """
    expect("qkv", qkv, B=None, N=None, **{"3·H·D": None})
    if qkv.shape[2] % (3 * num_heads):
        raise ValueError(f"axis 3·H·D of qkv must be a multiple of 3·num_heads = {3 * num_heads}, got {qkv.shape[2]}")
    return reference_qkv(qkv, num_heads, scale, q_norm, k_norm, rope, prefix_tokens, bias, kv_lens, return_lse)


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float | None = None
) -> Tensor:
    """Attention inside each image of a packed batch of differently sized images (NaFlex, NaViT).

    Args:
        q: [T, H, D], the tokens of all images one after another.
        k: [T, H, D].
        v: [T, H, Dv].
        cu_seqlens: [B + 1] integers, 0 first and T last: image b owns tokens cu_seqlens[b] to cu_seqlens[b + 1].
        max_seqlen: upper bound of one image's tokens; a size for the launch, never read from the device.
        scale: softmax scale; None means D^-0.5.

    Returns:
        [T, H, Dv].

    Raises:
        ValueError: an axis does not fit.
    """
    T, H, D = q.shape if q.dim() == 3 else (None,) * 3
    expect("q", q, T=T, H=H, D=D)
    expect("k", k, T=T, H=H, D=D)
    expect("v", v, T=T, H=H, Dv=None)
    expect("cu_seqlens", cu_seqlens, **{"B+1": None})
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
    """Equations (1) and (2) by PyTorch's fused attention; written out when L is asked for."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    mask = _mask(q, k, bias, kv_lens)
    if not return_lse:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = scale * (q @ k.mT).float() if q.dtype != torch.float64 else scale * (q @ k.mT)  # (1) [B, H, Nq, Nk]
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    lse = scores.detach().logsumexp(-1)  # (3)
    empty = (lse == float("-inf"))[..., None]
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return weights.to(v.dtype) @ v, lse.float()  # (2)


def reference_qkv(
    qkv: Tensor,
    num_heads: int,
    scale: float | None = None,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    rope: Rope | None = None,
    prefix_tokens: int = 0,
    bias: Tensor | None = None,
    kv_lens: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Split, norm, rotate, attend, merge."""
    q, k, v = qkv.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, N, D] each
    if q_norm is not None:
        q = F.layer_norm(q, q.shape[-1:], *q_norm)
    if k_norm is not None:
        k = F.layer_norm(k, k.shape[-1:], *k_norm)
    if rope is not None:
        q, k = rotate(q, rope, prefix_tokens), rotate(k, rope, prefix_tokens)
    o = reference(q, k, v, bias, scale, kv_lens, return_lse)
    if return_lse:
        return o[0].transpose(1, 2).flatten(2), o[1]
    return o.transpose(1, 2).flatten(2)


def reference_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float | None = None
) -> Tensor:
    """One attention over all tokens in which a token sees its own image only; `max_seqlen` is not needed here."""
    image = torch.searchsorted(cu_seqlens[1:], torch.arange(len(q), device=q.device), right=True)  # [T]
    same = image[:, None] == image[None, :]
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))  # [1, H, T, D]
    return reference(q, k, v, same[None, None], scale)[0].transpose(0, 1)


def rotate(x: Tensor, rope: Rope, prefix_tokens: int) -> Tensor:
    """Rotary positions on x [B, H, N, D], leaving the first `prefix_tokens` alone."""
    cos, sin, interleaved = rope
    prefix, x = x[:, :, :prefix_tokens], x[:, :, prefix_tokens:]
    if interleaved:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    else:
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    return torch.cat((prefix, (x * cos + turned * sin).to(prefix.dtype)), 2)


def _mask(q: Tensor, k: Tensor, bias: Tensor | None, kv_lens: Tensor | None) -> Tensor | None:
    """Bias groups and valid lengths as one mask that broadcasts to [B, H, Nq, Nk]; boolean or of q's dtype."""
    B, H, Nq, Nk = *q.shape[:3], k.shape[2]
    if bias is not None:
        sizes = {"G": bias.shape[0], "H": H, "Nq": Nq, "Nk": Nk}
        if bias.dim() != 4:
            raise ValueError(f"bias must have axes [G, H, Nq, Nk], got shape {list(bias.shape)}")
        expect("bias", bias, **{a: None if bias.shape[i] == 1 else n for i, (a, n) in enumerate(sizes.items())})
        groups = bias.shape[0]
        if groups not in (1, B):
            bias = bias[torch.arange(B, device=bias.device) % groups]
        bias = bias if bias.dtype == torch.bool else bias.to(q.dtype)
    if kv_lens is None:
        return bias
    expect("kv_lens", kv_lens, B=B)
    valid = (torch.arange(Nk, device=k.device) < kv_lens[:, None])[:, None, None, :]  # [B, 1, 1, Nk]
    if bias is None:
        return valid
    return bias & valid if bias.dtype == torch.bool else bias.masked_fill(~valid, float("-inf"))


def _inputs(case: dict[str, int], dtype: torch.dtype, device: torch.device | str) -> dict:
    randn, (B, H, Nq, Nk, D, Dv) = make(device, dtype), (case[a] for a in ("B", "H", "Nq", "Nk", "D", "Dv"))
    arguments = {"q": randn(B, Nq, H, D).transpose(1, 2), "k": randn(B, H, Nk, D), "v": randn(B, H, Nk, Dv)}
    if "G" in case:
        arguments["bias"] = randn(case["G"], H, Nq, Nk)
    if "short" in case:
        arguments["kv_lens"] = torch.tensor([Nk - case["short"] * (b % 2) for b in range(B)], device=device)
    return arguments


def _inputs_qkv(case: dict[str, int], dtype: torch.dtype, device: torch.device | str) -> dict:
    randn, (B, H, N, D) = make(device, dtype), (case[a] for a in ("B", "H", "N", "D"))
    arguments = {"qkv": randn(B, N, 3 * H * D), "num_heads": H}
    if "prefix" in case:
        angle = make(device, torch.float64, seed=1)(N - case["prefix"], D // 2).detach().repeat_interleave(2, -1)
        arguments |= {"rope": (angle.cos().to(dtype), angle.sin().to(dtype), True), "prefix_tokens": case["prefix"]}
        arguments |= {name: (randn(D, shift=1.0, scale=0.1), randn(D), 1e-6) for name in ("q_norm", "k_norm")}
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
)
OP_QKV = Op(
    name="attention_qkv",
    run=attention_qkv,
    reference=reference_qkv,
    cases={"rope": dict(B=2, H=2, N=7, D=4, prefix=2), "plain": dict(B=2, H=3, N=17, D=6)},
    inputs=_inputs_qkv,
)
OP_VARLEN = Op(
    name="varlen_attention",
    run=varlen_attention,
    reference=reference_varlen,
    cases={"three_images": dict(H=2, D=4, a=3, b=1, c=5)},
    inputs=_inputs_varlen,
)
