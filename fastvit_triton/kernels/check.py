"""Checks of arguments against each other, shared by several public functions.

They run before a path is chosen, so the kernels and PyTorch accept the same arguments. Shapes, dtypes and devices are
always checked.
"""

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from .activation import GATED, NAMES
from .argument import (
    NormLike,
    Pair,
    Rope,
    Varlen,
    can_read_values,
    expect_addable,
    expect_bool,
    expect_floating,
    expect_int,
    expect_integers,
    expect_nonempty,
    expect_norm,
    expect_number,
    expect_rows,
    expect_scales,
    is_like,
)
from .fold import Folded, Group
from .fold import check as check_group
from .launch import cdiv, power_of_2
from .op import expect

KINDS = "layer_norm", "rms_norm"


def projection(
    x: Tensor, weight: Tensor | Pair | Folded, bias: Tensor | Pair | None, activation: str | None, name: str = ""
) -> None:
    """Raises ValueError or TypeError unless x [..., K], weight and bias fit each other and the activation is known."""
    expect_rows("x", x, "K")
    activation_name(activation)
    if isinstance(weight, Tensor) and weight.dim() == 2 and activation not in GATED:
        rows = weight.shape[0]
        if rows and is_like(weight, x, rows, x.shape[-1]) and (bias is None or is_like(bias, x, rows)):
            return
    weights: tuple[Any, ...]
    biases: Any
    if isinstance(weight, Folded):
        if bias is not None:
            raise ValueError(f"{name}bias is given, but a folded weight includes its bias; pass None")
        weights = (weight.weight,)
        biases = (weight.bias,)
    elif isinstance(weight, Tensor):
        weights = (weight,)
        biases = (bias,)
    else:
        pair(f"{name}weight", weight, "a tensor or a tuple of two")
        if activation not in GATED:
            gated = " or ".join(f"activation={kind!r}" for kind in GATED)
            raise ValueError(f"{name}weight is a pair, which only {gated} takes, as (gate, up)")
        if bias is not None:
            pair(f"{name}bias", bias)
        weights = weight
        biases = bias or (None, None)
    F: Any = None
    for w, b in zip(weights, biases, strict=True):
        expect(f"{name}weight", w, x, F=F, K=x.shape[-1])
        expect_floating(f"{name}weight", w, x)
        F = w.shape[0]
        if b is not None or (len(biases) == 2 and bias is not None):
            expect(f"{name}bias", b, x, F=F)
            if not isinstance(weight, Folded):
                expect_floating(f"{name}bias", b, x)
    expect_nonempty(f"{name}weight", "F", F)
    if isinstance(weight, Folded):
        expect(f"the column sums of the folded {name}weight", weight.colsum, x, F=F)
        if weight.source is not None:
            sources(f"the source of the folded {name}weight", weight.source, x, F)
    if activation in GATED and len(weights) == 1 and F % 2:
        raise ValueError(f"axis F of {name}weight must be even, gate and up, for activation {activation!r}, got {F}")


def sources(argument: str, value: Group, x: Tensor, F: int) -> None:
    """Raises TypeError or ValueError unless the value is a `Group` of one projection of x [..., K] to F channels."""
    if not isinstance(value, Group) or len(value.weights) != 1:
        raise TypeError(f"{argument} must be a Group with one packed weight, or None, got {type(value).__name__}")
    check_group(*value)
    expect(argument, value.weights[0], x, F=F, K=x.shape[-1])


def pair(argument: str, value: object, words: str = "a tuple of two") -> None:
    """Raises TypeError unless the value is a tuple or list of two."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        actual = f"a tuple of {len(value)}" if isinstance(value, (tuple, list)) else type(value).__name__
        raise TypeError(f"{argument} must be {words}, got {actual}")


def activation_name(activation: str | None) -> None:
    """Raises ValueError unless the activation is None or one of `activation.NAMES`."""
    if activation is not None and (not isinstance(activation, str) or activation not in NAMES):
        raise ValueError(f"activation is {activation!r}; use one of {', '.join(NAMES)} or None")


def norm_parameters(argument: str, value: NormLike, x: Tensor, **axis: int) -> None:
    """Raises ValueError or TypeError unless the value is a `Norm` or (weight, bias, eps) that fits x."""
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"{argument} must be a Norm or a tuple (weight, bias, eps), got {type(value).__name__}")
    if len(value) != 3:
        if len(value) != 4:
            raise ValueError(f"{argument} must be a Norm or a tuple (weight, bias, eps), got {len(value)} values")
        if value[3] not in KINDS:
            raise ValueError(f"kind of {argument} is {value[3]!r}; use {' or '.join(map(repr, KINDS))}")
        if value[3] == "rms_norm" and value[1] is not None:
            raise ValueError(f"{argument} is an RMSNorm with a bias; give None")
    expect_norm(x, x.dtype, value, f"{argument} ", **axis)


def norm(x: Tensor, value: NormLike | None, stats: Tensor | None, weight: Tensor | Pair | Folded) -> None:
    """Raises ValueError or TypeError unless the norm, the row statistics and a folded weight fit x [..., K]."""
    if value is not None:
        norm_parameters("norm", value, x, K=x.shape[-1])
    if stats is not None:
        expect("stats", stats, x, M=math.prod(x.shape[:-1]), tiles=None, **{"2": 2})
        if stats.dtype != torch.float32:
            raise TypeError(f"stats must be float32, got {stats.dtype}")
        tiles = stats.shape[1]
        K = x.shape[-1]
        if not 1 <= tiles <= K or not _covers(tiles, K):
            raise ValueError(f"axis tiles of stats must be ⌈{K} / w⌉ for a power of two w, got {tiles}")
    if isinstance(weight, Folded):
        if value is None or value[0] is not None or value[1] is not None:
            raise ValueError("a folded weight includes the LayerNorm's weight and bias; pass norm=(None, None, eps)")
        if weight.weight.dtype != x.dtype:
            raise ValueError(f"weight was folded for {weight.weight.dtype}, x is {x.dtype}; fold it for x")


def _covers(tiles: int, K: int) -> bool:
    """True if K columns form that many tiles for some power-of-two tile width; not checked under torch.compile."""
    return torch.compiler.is_compiling() or tiles == cdiv(K, power_of_2(cdiv(K, tiles)))


def branch(
    x: Tensor, channels: int, layer_scale: Tensor | None, sample_scale: Tensor | None, residual: Tensor | None
) -> None:
    """Raises ValueError or TypeError unless scales and residual fit the output [..., channels] of a branch on x."""
    expect_scales(x, layer_scale, sample_scale, F=channels)
    if residual is not None and residual is not x:
        expect_addable("residual", residual, x, (*x.shape[:-1], channels))


def heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises ValueError or TypeError unless heads have channels and q, k and v have the same dtype."""
    expect_floating("q", q)
    expect_floating("k", k, q)
    expect_floating("v", v, q)
    expect_nonempty("q", "D", q.shape[-1])
    expect_nonempty("v", "Dv", v.shape[-1])


def scores(
    x: Tensor,
    sizes: tuple[int, int, int],
    bias: Tensor | None,
    kv_lens: Tensor | None,
    scale: float | None,
    return_lse: bool,
) -> None:
    """Raises ValueError or TypeError unless bias, kv_lens and scale fit x [B, ...] and sizes H, Nq, Nk."""
    if bias is not None:
        if isinstance(bias, Tensor) and bias.dim() == 4:
            axes = zip(("G", "H", "Nq", "Nk"), (None, *sizes), bias.shape, strict=True)
            expect("bias", bias, x, **{axis: None if length == 1 else size for axis, size, length in axes})
            expect_nonempty("bias", "G", bias.shape[0])
        else:
            expect("bias", bias, x, G=None, H=None, Nq=None, Nk=None)
        if bias.dtype != torch.bool:
            expect_floating("bias", bias)
    if kv_lens is not None:
        expect("kv_lens", kv_lens, x, B=x.shape[0])
        expect_integers("kv_lens", kv_lens)
    if scale is not None:
        expect_number("scale", scale)
    expect_bool("return_lse", return_lse)


def causal(value: bool, axis_bias: object = None) -> None:
    """Raises TypeError unless the value is True or False, ValueError if it is True and axis_bias is given."""
    expect_bool("causal", value)
    if axis_bias is not None and value:
        raise ValueError("causal is True, and axis_bias is given; give their sum as bias instead")


def axis_bias(x: Tensor, sizes: tuple[int, int, int], value: object, bare: bool) -> None:
    """Raises ValueError or TypeError unless the biases of rows and columns fit x [B, ...] and sizes H, Nq, Nk."""
    H, Nq, Nk = sizes
    pair("axis_bias", value, "a tuple of two tensors, the biases of rows and columns")
    row, column = list(value)  # type: ignore[call-overload]
    for name, tensor in (("row", row), ("column", column)):
        expect(f"the {name} of axis_bias", tensor, x, B=x.shape[0], H=H, Nq=Nq, length=None)
        expect_floating(f"the {name} of axis_bias", tensor)
    if row.shape[3] * column.shape[3] != Nk:
        raise ValueError(f"axis_bias has {row.shape[3]} rows and {column.shape[3]} columns, and k has {Nk} keys")
    if not bare:
        raise ValueError("axis_bias is given with bias or kv_lens; add one to the other, or leave it out")


def packed(
    qkv: Tensor, num_heads: int, q_norm: NormLike | None, k_norm: NormLike | None, rope: Rope | None, prefix_tokens: int
) -> int:
    """Returns D, the channels of a head; raises ValueError or TypeError unless qkv [B, N, 3·H·D], norms, rope fit."""
    expect("qkv", qkv, B=None, N=None, **{"3·H·D": None})
    expect_floating("qkv", qkv)
    expect_int("num_heads", num_heads, 1)
    B, N, width = qkv.shape
    if width % (3 * num_heads) or not width:
        raise ValueError(f"axis 3·H·D of qkv must be a multiple of 3·num_heads = {3 * num_heads}, got {width}")
    D = width // (3 * num_heads)
    if q_norm is not None:
        norm_parameters("q_norm", q_norm, qkv, D=D)
    if k_norm is not None:
        norm_parameters("k_norm", k_norm, qkv, D=D)
    expect_int("prefix_tokens", prefix_tokens, 0, N)
    if rope is not None:
        rotation(rope, qkv, B, num_heads, N - prefix_tokens, D)
    return D


def varlen(
    qkv: Tensor,
    value: Varlen | tuple[Tensor, int],
    prefix_tokens: int,
    bias: Tensor | None,
    kv_lens: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, int]:
    """Returns (cu_seqlens, max_seqlen); raises ValueError or TypeError unless they fit qkv [T, 3·H·D] of `varlen`."""
    pair("varlen", value, "a Varlen or a tuple (cu_seqlens, max_seqlen)")
    if prefix_tokens or return_lse or bias is not None or kv_lens is not None:
        raise ValueError("prefix_tokens, bias, kv_lens and return_lse are not supported with varlen; leave them out")
    expect("qkv", qkv, T=None, **{"3·H·D": None})
    longest = qkv.shape[0] if value[1] is None else value[1]
    images(value[0], qkv, longest)
    return value[0], longest


def rotation(rope: Rope, x: Tensor, B: int, H: int, T: int, D: int) -> None:
    """Raises ValueError or TypeError unless rotary tables fit B images, H heads, T tokens and D channels of x."""
    if not isinstance(rope, (tuple, list)) or len(rope) != 3:
        raise TypeError("rope must be a tuple (cos, sin, pairs)")
    cos, sin, pairs = rope
    rank = cos.dim() if isinstance(cos, Tensor) else 2
    axes = dict([("B", B), ("H", H), ("N - prefix_tokens", T), ("D", D)][4 - min(max(rank, 2), 4) :])
    shape = cos.shape if isinstance(cos, Tensor) else ()
    shared = {a: None for a, size in zip(axes, shape, strict=False) if size == 1 and a in ("B", "H")}
    expect("cos", cos, x, **axes | shared)
    expect("sin", sin, x, **dict(zip(axes, cos.shape, strict=True)))
    expect_floating("cos", cos)
    expect_floating("sin", sin)
    if D % 2:
        raise ValueError(f"rope rotates pairs of channels, but a head has D = {D} of them; D must be even")
    if not isinstance(pairs, bool):
        expect_int("pairs of rope", pairs, 2, D)
        if pairs % 2 or D % pairs:
            raise ValueError(f"pairs of rope is {pairs}; give True, False or an even number that divides D = {D}")


def images(cu_seqlens: Tensor, x: Tensor, max_seqlen: int) -> None:
    """Raises ValueError or TypeError unless cu_seqlens divides x [T, ...] into images of at most max_seqlen tokens.

    Its values are checked only if `can_read_values`.
    """
    expect_int("max_seqlen", max_seqlen, 0, 2**31 - 1)
    expect("cu_seqlens", cu_seqlens, x, **{"B+1": None})
    expect_integers("cu_seqlens", cu_seqlens)
    if cu_seqlens.shape[0] < 2:
        raise ValueError(f"axis B+1 of cu_seqlens must be at least 2, for one image, got {cu_seqlens.shape[0]}")
    if not can_read_values(cu_seqlens):
        return
    ends = cu_seqlens.tolist()
    sizes = [b - a for a, b in itertools.pairwise(ends)]
    if ends[0] != 0:
        raise ValueError(f"cu_seqlens must begin with 0, got {ends[0]}")
    if min(sizes) < 0:
        raise ValueError(f"cu_seqlens must not decrease, got {ends[sizes.index(min(sizes)) :][:2]}")
    if ends[-1] > x.shape[0]:
        raise ValueError(f"cu_seqlens must end with at most T = {x.shape[0]}, got {ends[-1]}")
    if max(sizes) > max_seqlen:
        raise ValueError(f"max_seqlen must be at least {max(sizes)}, the longest image, got {max_seqlen}")
