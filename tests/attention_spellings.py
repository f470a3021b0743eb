"""Spellings of attention: tables of parts, from which `test_attention_spellings.py` composes functions of q, k and v.

A spelling is a product of queries and keys in some layout of axes, scores changed by scales and masks, a softmax, and a
product with the values. Parts see the scores as [B, H, Nq, Nk], through a view where the layout is another.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

SCALE = 0.3


class Product(NamedTuple):
    """A layout of scores.

    Attributes:
        scores: (q, k [B, H, N, D]) → scores.
        seen: scores → their view [B, H, Nq, Nk].
        back: (view, scores before) → the layout of the scores.
        axis: that of the keys.
        context: (probabilities, v) → [B, H, Nq, D].
    """

    scores: callable
    context: callable
    seen: callable = lambda s, q: s
    back: callable = lambda s, q: s
    axis: int = -1


def folded(t):
    """[B, H, N, D] → [B·H, N, D]."""
    return t.reshape(-1, *t.shape[2:])


def unfolded(t, q):
    """[B·H, …] → [B, H, …]."""
    return t.view(*q.shape[:2], *t.shape[1:])


def added_product(q, k):
    q, k = folded(q), folded(k)
    garbage = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype, device=q.device)
    return torch.baddbmm(garbage, q, k.transpose(1, 2), beta=0, alpha=SCALE)


PRODUCTS = {
    "matmul": Product(lambda q, k: q @ k.transpose(-2, -1), lambda p, v: p @ v),
    "torch.matmul": Product(lambda q, k: torch.matmul(q, k.mT), lambda p, v: p.matmul(v)),
    "einsum": Product(
        lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k), lambda p, v: torch.einsum("bhij,bhjd->bhid", p, v)
    ),
    "einsum, tokens first": Product(
        lambda q, k: torch.einsum("bihd,bjhd->bhij", q.transpose(1, 2), k.transpose(1, 2)),
        lambda p, v: torch.einsum("bhij,bjhd->bihd", p, v.transpose(1, 2)).transpose(1, 2),
    ),
    "einsum of scores, heads last": Product(
        lambda q, k: torch.einsum("bhid,bhjd->bijh", q, k),
        lambda p, v: torch.einsum("bijh,bhjd->bhid", p, v),
        seen=lambda s, q: s.permute(0, 3, 1, 2),
        back=lambda s, q: s.permute(0, 2, 3, 1),
        axis=2,
    ),
    "bmm": Product(
        lambda q, k: torch.bmm(folded(q), folded(k).transpose(1, 2)),
        lambda p, v: torch.bmm(p, folded(v)).view(*v.shape[:2], -1, v.shape[3]),
        seen=unfolded,
        back=lambda s, q: folded(s),
    ),
    "baddbmm": Product(
        added_product,
        lambda p, v: torch.bmm(p, folded(v)).view(*v.shape[:2], -1, v.shape[3]),
        seen=unfolded,
        back=lambda s, q: folded(s),
    ),
    "keys first": Product(
        lambda q, k: k @ q.mT,
        lambda p, v: p.transpose(2, 3) @ v,
        seen=lambda s, q: s.mT,
        back=lambda s, q: s.mT,
        axis=-2,
    ),
    "values first": Product(lambda q, k: (k @ q.mT).mT, lambda p, v: (v.mT @ p.mT).mT),
    "groups": Product(
        lambda q, k: q.unflatten(1, (2, -1)) @ k.unflatten(1, (2, -1)).mT,
        lambda p, v: (p @ v.unflatten(1, (2, -1))).flatten(1, 2),
        seen=lambda s, q: s.flatten(1, 2),
        back=lambda s, q: s.unflatten(1, (2, -1)),
    ),
}


class Tensors(nn.Module):
    """Parameters and buffers that parts read, for B images, H heads, Nq queries and Nk keys.

    With B = 2, Dynamo would take the number of pairs of windows, B // 2, for the constant 1.

    No query of `keep` is without keys; one of `drop` is.
    """

    def __init__(self, B=4, H=4, Nq=5, Nk=5):
        super().__init__()
        self.shift = 1.5  # a symbol in graphs of any size
        self.temperature = nn.Parameter(torch.rand(H, 1, 1) + 0.5)
        self.bias = nn.Parameter(torch.randn(H, Nq, Nk))
        self.shared = nn.Parameter(torch.randn(1, 1, Nq, Nk))
        self.register_buffer("mask", torch.randn(B, 1, Nq, Nk))
        self.register_buffer("padding", torch.arange(Nk) >= torch.tensor([[Nk], [Nk - 2]] * (B // 2)))
        keep = torch.rand(Nq, Nk) > 0.4
        keep[:, 0] = True
        self.register_buffer("keep", keep)
        self.register_buffer("drop", ~keep.roll(1, 0) | (torch.arange(Nq) == 1)[:, None])
        self.register_buffer("windows", torch.randn(2, 1, Nq, Nk))


def in_place(s, m):
    s *= SCALE
    s += m.bias
    return s


def filled_in_place(s, m):
    s.masked_fill_(m.drop, torch.finfo(s.dtype).min)
    return s


def by_window(s, m):
    _, H, N, M = s.shape
    return (s.view(-1, 2, H, N, M) + m.windows[None]).view(-1, H, N, M)


SCALES = {
    "none": lambda s, m, q: s,
    "number": lambda s, m, q: s * SCALE,
    "number first": lambda s, m, q: SCALE * s,
    "divided": lambda s, m, q: s / math.sqrt(8),
    "by the width": lambda s, m, q: s * q.shape[-1] ** -0.5,
    "by the root of a tensor": lambda s, m, q: s / torch.sqrt(torch.tensor(8.0, dtype=s.dtype)),
    "temperature": lambda s, m, q: s * m.temperature,
    "cosine": lambda s, m, q: s * m.temperature.clamp(max=4.6).exp(),
    "divided by a temperature": lambda s, m, q: s / m.temperature,
    "in place": lambda s, m, q: s.mul_(SCALE),
    "per query": lambda s, m, q: s * m.shared[..., :1],
    "per key": lambda s, m, q: s * m.shared[..., :1, :],
    "twice": lambda s, m, q: s * SCALE / m.temperature,
}
MASKS = {
    "none": lambda s, m: s,
    "bias": lambda s, m: s + m.bias,
    "bias first": lambda s, m: m.bias + s,
    "bias and mask": lambda s, m: s + m.bias + m.mask,
    "three": lambda s, m: (s + m.mask) - m.shared + m.bias,
    "scaled sum": lambda s, m: (s + m.bias) * SCALE,
    "sum by a temperature": lambda s, m: (s + m.bias) * m.temperature,
    "−inf": lambda s, m: s.masked_fill(~m.keep, float("-inf")),
    "−inf for a whole query": lambda s, m: s.masked_fill(m.drop, float("-inf")),
    "lowest": lambda s, m: s.masked_fill(m.drop, torch.finfo(s.dtype).min),
    "−1e9": lambda s, m: s.masked_fill(m.drop, -1e9),
    "where kept": lambda s, m: torch.where(m.keep, s, float("-inf")),
    "where dropped": lambda s, m: torch.where(m.drop, torch.tensor(-1e9, dtype=s.dtype), s),
    "where it is 0": lambda s, m: s.masked_fill(m.keep == 0, -1e9),
    "padding": lambda s, m: s.masked_fill(m.padding[:, None, None, :], -torch.finfo(s.dtype).max),
    "padding and bias": lambda s, m: (s + m.bias).masked_fill(m.padding[:, None, None], float("-inf")),
    "bias after a mask": lambda s, m: s.masked_fill(m.drop, -1e4) + m.bias,
    "bias after the lowest": lambda s, m: s.masked_fill(m.drop, torch.finfo(s.dtype).min) + m.bias,
    "two masks": lambda s, m: s.masked_fill(m.padding[:, None, None], -1e9).masked_fill(m.drop, -1e9),
    "windows": by_window,
    "windows and bias": lambda s, m: by_window(s + m.bias, m),
    "in place": in_place,
    "filled in place": filled_in_place,
    "a boolean": lambda s, m: s + m.keep,
    "a number": lambda s, m: s + 1.5,
    "a number of the module": lambda s, m: s + m.shift,
}


MODULES = {dim: nn.Softmax(dim) for dim in (-1, -2, 2)}


def with_maximum(s, dim):
    return (s - s.amax(dim, keepdim=True)).softmax(dim)


def written_out(s, dim):
    e = (s - s.max(dim, keepdim=True)[0].detach()).exp()
    return e / e.sum(dim, keepdim=True)


SOFTMAXES = {
    "method": lambda s, dim: s.softmax(dim),
    "function": lambda s, dim: F.softmax(s, dim=dim),
    "module": lambda s, dim: MODULES[dim](s),
    "with dropout": lambda s, dim: F.dropout(s.softmax(dim), 0.1, training=False),
    "maximum": with_maximum,
    "written out": written_out,
    "in its own dtype": lambda s, dim: F.softmax(s, dim, dtype=s.dtype).type_as(s),
}
OPERANDS = {
    "plain": lambda q, k, v: (q, k, v),
    "scaled q": lambda q, k, v: (q * SCALE, k, v),
    "scaled q and k": lambda q, k, v: (q * SCALE**0.5, SCALE**0.5 * k, v),
    "unit q and k": lambda q, k, v: (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v),
    "one head of k and v": lambda q, k, v: (q, k[:, :1].expand_as(k), v[:, :1].expand_as(v)),
    "contiguous": lambda q, k, v: (q.contiguous(), k.contiguous(), v.contiguous()),
}


class Spelling(NamedTuple):
    """Names of parts."""

    product: str
    scale: str
    mask: str
    softmax: str
    operands: str

    def __call__(self, q, k, v, tensors):
        """The attention of q, k and v, each [B, H, N, D]."""
        product = PRODUCTS[self.product]
        q, k, v = OPERANDS[self.operands](q, k, v)
        scores = product.scores(q, k)
        seen = product.seen(scores, q)
        seen = MASKS[self.mask](SCALES[self.scale](seen, tensors, q), tensors)
        return product.context(SOFTMAXES[self.softmax](product.back(seen, q), product.axis), v)
