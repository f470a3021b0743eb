"""Tests of norms and rotary positions that graphs have between a packed projection and attention.

Oracle: the function itself in float64, outputs and gradients, up to the roundings of sums of a few dozen terms.
"""

import itertools
from typing import NamedTuple

import captured
import pytest
import torch
import torch.nn.functional as F
from interpreter import interpreting
from sampling import sampled

from fastvit_triton.convert import backend
from fastvit_triton.convert.graph import rewrite
from fastvit_triton.kernels.attention_qkv import attention_qkv

B, N, H, D = 2, 5, 3, 8
E = H * D


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Makes the CPU count as a GPU while graphs are rewritten, for float64, too; calls run the references."""
    for module in (backend, rewrite):
        monkeypatch.setattr(module, "why_not", lambda *_: None)


def half_turned(x):
    """J x of channels (i, i + D/2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)


def half_sliced(x):
    """The same by slices."""
    return torch.cat((-x[..., D // 2 :], x[..., : D // 2]), -1)


def half_split(x):
    """The same by split."""
    a, b = torch.split(x, D // 2, dim=-1)
    return torch.cat((b.neg(), a), dim=3)


def half_unbound(x):
    """The same by an axis of halves."""
    a, b = x.unflatten(-1, (2, D // 2)).unbind(-2)
    return torch.stack((-b, a), dim=-2).flatten(-2)


def pairs_stacked(x):
    """J x of channels (2i, 2i + 1)."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(3)


def pairs_unbound(x):
    """The same by an axis of pairs, as einops rearranges it."""
    a, b = x.unflatten(-1, (D // 2, 2)).unbind(dim=-1)
    return torch.stack((torch.neg(b), a), dim=-1).flatten(-2)


def pairs_joined(x):
    """The same by columns."""
    y = x.unflatten(3, (-1, 2))
    return torch.cat((y[..., 1:2] * -1, y[..., 0:1]), -1).flatten(start_dim=3)


TURNS = {t.__name__: t for t in (half_turned, half_sliced, half_split, half_unbound)}
TURNS |= {t.__name__: t for t in (pairs_stacked, pairs_unbound, pairs_joined)}
SUMS = {
    "plain": lambda x, turned, cos, sin: (x * cos) + (turned * sin),
    "scaled": lambda x, turned, cos, sin: sin * turned * 1.0 + cos * x / 1.0,
    "sub": lambda x, turned, cos, sin: x * cos - (-turned) * sin,
    "reshaped": lambda x, turned, cos, sin: torch.add(torch.mul(x, cos), torch.mul(turned, sin)),
}


def whole(name):
    """Rotations by tables of all D channels: (function, tables, pairs of `attention_qkv`)."""
    turn, total = name.split("-")
    return lambda x, cos, sin: SUMS[total](x, TURNS[turn](x), cos, sin), "full", turn.startswith("pairs")


def halves_apart(x, cos, sin):
    """Both halves by tables of D/2 channels."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def pairs_apart(x, cos, sin):
    """Channels of pairs by tables of D/2 channels."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


def by_complex(x, cos, sin):
    """Pairs as complex numbers."""
    turn = torch.complex(cos, sin)
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn).flatten(-2)


def axial(x, cos, sin):
    """Two parts of the channels by tables of their own, and channels without rotation, as in V-JEPA 2."""
    parts = []
    for first in (0, 2):
        part = x[..., first : first + 2]
        turned = torch.stack((-part[..., 1::2], part[..., ::2]), -1).flatten(-2)
        parts.append(part * cos[..., first : first + 2] + turned * sin[..., first : first + 2])
    return torch.cat((*parts, x[..., 4:]), -1)


def axial_halves(x, cos, sin):
    """Rows and columns, each in a half of the channels that is rotated in its own halves, as in CroCo."""
    parts = []
    for first in (0, D // 2):
        part, place = x[..., first : first + D // 2], slice(first, first + D // 2)
        a, b = part.chunk(2, -1)
        parts.append(part * cos[..., place] + torch.cat((-b, a), -1) * sin[..., place])
    return torch.cat(parts, -1)


ROTATIONS = {name: whole(name) for name in map("-".join, zip(TURNS, itertools.cycle(SUMS), strict=False))}
ROTATIONS |= {
    "halves_apart": (halves_apart, "half", False),
    "pairs_apart": (pairs_apart, "half", True),
    "by_complex": (by_complex, "half", True),
    "axial": (axial, "full", True),
    "axial_halves": (axial_halves, "full", D // 2),
    "none": (lambda x, cos, sin: x, "full", False),
}


def permuted(qkv):
    """[B, H, N, D] each, of the packed projection."""
    return qkv.reshape(B, N, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)


def unbound(qkv):
    """As in DINOv3."""
    q, k, v = torch.unbind(qkv.reshape([B, N, 3, H, D]), 2)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def chunked(qkv):
    """By thirds."""
    q, k, v = qkv.chunk(3, dim=-1)
    return tuple(t.view(B, N, H, D).transpose(1, 2) for t in (q, k, v))


def sliced(qkv):
    """By slices and one more axis, as in `nn.MultiheadAttention`."""
    qkv = qkv.unflatten(-1, (3, E)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
    return tuple(qkv[i].unflatten(-1, (H, D)).permute(0, 2, 1, 3) for i in range(3))


def tokens_first(qkv):
    """[B, N, H, D] each."""
    q, k, v = qkv.split(E, -1)
    return tuple(t.view(B, N, H, D) for t in (q, k, v))


SPLITS = (permuted, unbound, chunked, sliced, tokens_first)
TABLES = ("n", "11n", "b1n", "1hn", "hn")
NORMS = (None, "layer", "bare", "rms")


class Case(NamedTuple):
    """A spelling; `prefix` tokens come first and are not rotated."""

    rotation: str
    table: str
    norm: str | None
    split: object
    prefix: int


def tables(case, dtype):
    """(cos, sin): any numbers, since no identity between them is needed."""
    rows = N - case.prefix
    width = D // 2 if ROTATIONS[case.rotation][1] == "half" else D
    leading = tuple({"1": 1, "b": B, "h": H}[a] for a in case.table if a != "n")
    shape = (*leading, rows, width)
    if case.split is tokens_first:
        shape = (*leading[:-1], rows, leading[-1] if leading else 1, width)
    return [t.to(dtype) for t in captured.make((shape, shape), 1)]


def normed(x, kind, weight, bias):
    """The norm of a head."""
    if kind == "layer":
        return F.layer_norm(x, (D,), weight, bias, 1e-6)
    if kind == "bare":
        return F.layer_norm(x, (D,))
    return x if kind is None else F.rms_norm(x, (D,), weight, eps=1e-5)


def function_of(case, turn_k=None):
    """The attention of a case; with another rotation of keys if given."""
    rotate, _, _ = ROTATIONS[case.rotation]
    first = case.split is tokens_first
    axis = 1 if first else 2

    def turned(x, function, cos, sin):
        if not case.prefix:
            return function(x, cos, sin)
        before = (slice(None),) * axis
        kept, rest = x[(*before, slice(None, case.prefix))], x[(*before, slice(case.prefix, None))]
        return torch.cat((kept, function(rest, cos, sin)), dim=axis)

    def attention(x, w, c, cos, sin, weight, bias):
        q, k, v = case.split(F.linear(x, w, c))
        q, k = normed(q, case.norm, weight, bias), normed(k, case.norm, bias, None)
        q, k = turned(q, rotate, cos, sin), turned(k, turn_k or rotate, cos, sin)
        if first:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, E)

    return attention


def inputs(case, dtype=torch.float64):
    """x, weights of the projection, tables, weights of norms."""
    x, w, c, weight, bias = (t.to(dtype) for t in captured.make(((B, N, E), (3 * E, E), (3 * E,), (D,), (D,))))
    return [x, w / E**0.5, c, *tables(case, dtype), weight, bias]


def results(run, tensors):
    """Outputs, and gradients of all tensors but the tables."""
    leaves = [t.detach().clone().requires_grad_(i not in (3, 4)) for i, t in enumerate(tensors)]
    y = run(*leaves)
    wanted = [t for t in leaves if t.requires_grad]
    grads = torch.autograd.grad(y.square().sum(), wanted, allow_unused=True)
    return [y.detach(), *(torch.zeros(1, dtype=y.dtype) if g is None else g for g in grads)]


def rewritten(function, tensors):
    """(rewritten graph, its calls of attention_qkv, report)."""
    twin = captured.captured(function, tensors)
    rows = backend.rewrite(twin).rows
    return twin, [n for n in captured.calls(twin) if n.target is attention_qkv], rows


PLACES = itertools.product(ROTATIONS, SPLITS, (0, 2))
OTHERS = itertools.cycle(itertools.product(TABLES, NORMS))
ALL = [Case(rotation, *next(OTHERS), split, prefix) for rotation, split, prefix in PLACES]
ALL = [case for case in ALL if case.rotation != "none" or (case.norm is not None and not case.prefix)]


@pytest.mark.parametrize(Case._fields, sampled(ALL, 10), ids=lambda t: str(getattr(t, "__name__", t)))
def test_every_spelling_is_one_call(rotation, table, norm, split, prefix):
    """Also the arguments of the call."""
    case = Case(rotation, table, norm, split, prefix)
    function, tensors = function_of(case), inputs(case)
    twin, calls, rows = rewritten(function, tensors)
    (call,) = calls
    assert call.args[1] == H and len(rows) > 0
    turns = case.rotation != "none"
    assert call.kwargs.keys() & {"rope", "prefix_tokens"} == ({"rope", "prefix_tokens"} if turns else set())
    if turns:
        assert call.kwargs["rope"][2] is ROTATIONS[case.rotation][2]
        assert call.kwargs["prefix_tokens"] == case.prefix
    assert ("q_norm" in call.kwargs) == ("k_norm" in call.kwargs) == (case.norm is not None)
    if case.norm is not None:
        assert call.kwargs["q_norm"][2:] == {"layer": (1e-6,), "bare": (1e-5,), "rms": (1e-5, "rms_norm")}[case.norm]
    assert captured.same(results(twin, tensors), results(function, tensors), torch.float64)


def apart(change_q=lambda x, *_: x, change_k=None, change_v=lambda x, *_: x, after=lambda o, q: o):
    """Attention whose queries, keys and values are changed by functions of (tensor, cos, sin)."""

    def attention(x, w, c, cos, sin, weight, bias):
        q, k, v = permuted(F.linear(x, w, c))
        first = q
        q, k = change_q(q, cos, sin), (change_k or change_q)(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, change_v(v, cos, sin)).transpose(1, 2).reshape(B, N, E)
        return after(y, first) + 0 * (weight + bias).sum()

    return attention


def rotated(x, cos, sin):
    """What every near miss is near to."""
    return x * cos + half_turned(x) * sin


def prefixed(x, cos, sin, prefix=1):
    """The same after some tokens."""
    return torch.cat((x[:, :, :prefix], rotated(x[:, :, prefix:], cos[prefix:], sin[prefix:])), 2)


def written(x, cos, sin):
    """A rotation in place."""
    y = rotated(x, cos, sin)
    y.mul_(2.0)
    return y


def narrow(x, cos, sin):
    """A rotation in another precision."""
    return rotated(x.float(), cos.float(), sin.float()).double()


def turned_by(turn, sign=1):
    """Rotations by another J."""
    return lambda x, cos, sin: x * cos + sign * turn(x) * sin


def pieces(*places):
    """Pairs of channels of x in this order, negative where the number is."""
    return lambda x: torch.cat([x[..., abs(i) : abs(i) + 2] * (1 - 2 * (str(i)[0] == "-")) for i in places], -1)


def in_order(dim, *order):
    """A rotation of images, heads or tokens in another order."""
    return lambda x, cos, sin: rotated(torch.cat([x.narrow(dim, i, 1) for i in order], dim), cos, sin)


MISSES = {
    "tables_of_keys_swapped": apart(rotated, lambda x, cos, sin: rotated(x, sin, cos)),
    "other_tables_of_keys": apart(rotated, lambda x, cos, sin: rotated(x, cos, sin * 0.5)),
    "queries_only": apart(rotated, lambda x, *_: x * 1.0),
    "keys_only": apart(lambda x, *_: x * 1.0, rotated),
    "other_pairs_of_keys": apart(rotated, turned_by(pairs_stacked)),
    "quarters": apart(turned_by(pieces(2, 0, 6, 4))),
    "sign": apart(turned_by(half_turned, -1)),
    "no_sign": apart(turned_by(pieces(4, 6, 0, 2))),
    "half_a_sign": apart(turned_by(pieces(-4, 6, 0, 2))),
    "order_of_halves": apart(turned_by(pieces(-6, -4, 0, 2))),
    "no_turn": apart(turned_by(lambda x: x)),
    "twice": apart(lambda x, cos, sin: rotated(rotated(x, cos, sin), cos, sin)),
    "square": apart(lambda x, cos, sin: rotated(x * cos, cos, sin)),
    "factor": apart(lambda x, cos, sin: 2.0 * rotated(x, cos, sin)),
    "three_terms": apart(lambda x, cos, sin: rotated(x, cos, sin) + x * sin),
    "own_table": apart(lambda x, cos, sin: rotated(x, x, sin)),
    "one_table_for_tokens": apart(lambda x, cos, sin: rotated(x, cos[0], sin[0])),
    "images": apart(in_order(0, 1, 0)),
    "heads": apart(in_order(1, 1, 0, 2)),
    "tokens": apart(in_order(2, 0, 1, 2, 4, 3)),
    "channels": apart(in_order(3, 1, 0, *range(2, D))),
    "prefix_of_keys": apart(prefixed, lambda x, cos, sin: prefixed(x, cos, sin, 2)),
    "other_prefix": apart(lambda x, cos, sin: torch.cat((x[:, :, 1:2], prefixed(x, cos, sin)[:, :, 1:]), 2)),
    "values_too": apart(rotated, None, rotated),
    "detached": apart(lambda x, cos, sin: rotated(x.detach(), cos, sin)),
    "written": apart(written),
    "narrow": apart(narrow),
    "read_elsewhere": apart(rotated, after=lambda y, q: y + q.sum()),
    "norm_after": apart(lambda x, cos, sin: F.layer_norm(rotated(x, cos, sin), (D,))),
    "norm_twice": apart(lambda x, *_: F.rms_norm(F.layer_norm(x, (D,)), (D,), eps=1e-5)),
    "norm_of_half": apart(lambda x, *_: F.layer_norm(x.unflatten(-1, (2, 4)), (4,)).flatten(-2)),
    "norm_of_two_axes": apart(lambda x, cos, sin: rotated(F.layer_norm(x, (N, D)), cos, sin)),
    "norm_of_some_tokens": apart(lambda x, *_: torch.cat((x[:, :, :2], F.layer_norm(x[:, :, 2:], (D,))), 2)),
}
NEAR = Case("half_turned-plain", "n", None, permuted, 0)


@pytest.mark.few(17)
@pytest.mark.parametrize("miss", MISSES)
def test_near_misses_are_left_alone(miss):
    """The attention itself may still be fused."""
    tensors = inputs(NEAR)
    twin, calls, _ = rewritten(MISSES[miss], tensors)
    assert not calls
    assert captured.same(results(twin, tensors), results(MISSES[miss], tensors), torch.float64)


def reasons(function, tensors):
    """Why nodes are not rewritten, or not to more than they are."""
    rewriter = rewrite.Rewriter(captured.captured(function, tensors).graph, lambda *_: None)
    rewriter.run()
    return set(rewriter.why.values())


def changed_later(x, cos, sin):
    """Keys are rotated by the table of queries, changed in place."""
    y = rotated(x, cos, sin)
    cos.mul_(0.5)
    return y


def changed_before(x, cos, sin):
    """A rotation by a table of its own, changed in place."""
    table = cos.cos()
    table.mul_(0.5)
    return rotated(x, table, sin)


WRITES = (
    apart(changed_later),
    apart(lambda x, cos, sin: rotated(x, cos.cos(), sin), changed_before),
    apart(changed_before, lambda x, cos, sin: rotated(x, cos.cos(), sin)),
)


@pytest.mark.parametrize("function", WRITES)
def test_tables_that_are_written(function):
    """Oracle: the function, without gradients, which PyTorch refuses."""
    tensors = inputs(NEAR)
    twin, calls, _ = rewritten(function, tensors)
    assert not calls
    assert captured.same(captured.outputs(twin, tensors), captured.outputs(function, tensors), torch.float64)


@pytest.mark.parametrize(
    "miss, reason", [("other_tables_of_keys", "rotated by different tables"), ("read_elsewhere", "also read by other")]
)
def test_reasons(miss, reason):
    """Oracle: what the function does."""
    assert any(reason in why for why in reasons(MISSES[miss], inputs(NEAR)))


def test_learned_tables():
    """They stay with the original, which has gradients for them."""
    tensors = [t.requires_grad_(i == 3) for i, t in enumerate(inputs(NEAR))]
    _, calls, _ = rewritten(function_of(NEAR), tensors)
    assert not calls and "its rotary positions are learned" in reasons(function_of(NEAR), tensors)


def separate(x, g, b, wq, wk, wv, cos, sin):
    """Layers for queries, keys and values that read one norm."""
    y = F.layer_norm(x, (E,), g, b)
    q, k, v = (F.linear(y, w).view(B, N, H, D).transpose(1, 2) for w in (wq, wk, wv))
    return F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v).transpose(1, 2).flatten(2)


def products(x, w, cos, sin):
    """Attention written out."""
    q, k, v = permuted(F.linear(x, w))
    scores = (rotated(q, cos, sin) * 0.3) @ rotated(k, cos, sin).transpose(-2, -1)
    return (scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(B, N, E)


def with_registers(x, w, angles, places):
    """Tables computed once for queries and once for keys; the first token and registers at the end, as in ViT-5."""

    def turned(x, rows):
        phase = torch.einsum("n, d -> n d", places[:rows] / 3, angles)
        phase = phase.unsqueeze(-1).expand(-1, -1, 2).reshape(rows, 1, D)
        return x * phase.cos() + pairs_stacked(x) * phase.sin()

    def all_turned(x):
        x = torch.cat((x[:, :1], turned(x[:, 1:3], 2), x[:, 3:]), dim=1)
        return torch.cat((x[:, :1], x[:, 1:3], turned(x[:, 3:], 2)), dim=1)

    q, k, v = tokens_first(F.linear(x, w))
    q, k, v = (t.transpose(1, 2) for t in (all_turned(q), all_turned(k), v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, E)


def tail(x, w, cos, sin):
    """The last tokens are not rotated."""

    def turned(x):
        return torch.cat((x[:, :, :1], rotated(x[:, :, 1:3], cos, sin), x[:, :, 3:]), dim=2)

    q, k, v = permuted(F.linear(x, w))
    return F.scaled_dot_product_attention(turned(q), turned(k), v).transpose(1, 2).reshape(B, N, E)


def in_double(x, w, cos, sin):
    """A rotation in another precision than the rest."""
    q, k, v = permuted(F.linear(x, w))
    q, k = (rotated(t.double(), cos, sin).to(x.dtype) for t in (q, k))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, E)


GRAPHS = {
    separate: ((B, N, E), (E,), (E,), (E, E), (E, E), (E, E), (N, D), (N, D)),
    products: ((B, N, E), (3 * E, E), (N, D), (N, D)),
    with_registers: ((B, N, E), (3 * E, E), (D // 2,), (3,)),
    tail: ((B, N, E), (3 * E, E), (2, D), (2, D)),
}


@pytest.mark.parametrize("function", GRAPHS, ids=lambda f: f.__name__)
def test_graphs(function):
    """Nothing is left of the rotation but tables."""
    tensors = [t.double() for t in captured.make(GRAPHS[function])]
    twin, (call,), _ = rewritten(function, tensors)
    assert call.kwargs["prefix_tokens"] == (function in (with_registers, tail))
    assert not any(n.target in (F.scaled_dot_product_attention, torch.stack, "softmax") for n in captured.calls(twin))
    assert sum(n.target == "cos" for n in captured.calls(twin)) == 2 * (function is with_registers)  # not 4
    assert captured.same([twin(*tensors)], [function(*tensors)], torch.float64)


def test_tables_of_another_dtype():
    """In float64, of a model in float32: one call, whose result is in float32."""
    tensors = captured.make(GRAPHS[products])
    tensors = [t.double() if i > 1 else t for i, t in enumerate(tensors)]
    twin, calls, _ = rewritten(in_double, tensors)
    assert len(calls) == 1
    assert captured.same([twin(*tensors)], [in_double(*tensors)], torch.float32)


class Symbolic(torch.nn.Module):
    """DINOv3's attention: the number of tokens that come first follows from sizes."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(E, 3 * E, dtype=torch.float64)

    def forward(self, x, cos, sin):
        """[B, N, E] → [B, N, E]."""
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, H, D).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        q, k = (prefixed_by(t, cos, sin, t.shape[-2] - cos.shape[0]) for t in (q, k))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, E)


def prefixed_by(x, cos, sin, prefix):
    """A rotation after these tokens, of tables for the others."""
    return torch.cat((x[:, :, :prefix], rotated(x[:, :, prefix:], cos, sin)), dim=-2)


@pytest.mark.full
def test_symbolic_sizes():
    """One graph, with one call, serves other numbers of images and tokens."""
    module, graphs = Symbolic(), []

    def rewriting(graph, _):
        backend.rewrite(graph)
        graphs.append([n.target for n in captured.calls(graph)].count(attention_qkv))
        return graph.forward

    compiled = torch.compile(module, backend=rewriting, dynamic=True)
    for batch, tokens, rows in ((2, 7, 5), (3, 9, 6), (4, 5, 3)):
        x, cos, sin = (t.double() for t in captured.make(((batch, tokens, E), (rows, D), (rows, D))))
        torch.testing.assert_close(compiled(x, cos, sin), module(x, cos, sin))
    assert graphs == [1]
    torch._dynamo.reset()


@pytest.mark.parametrize("rotation", sampled(("half_turned-plain", "by_complex", "axial"), 3))
def test_kernels(rotation):
    """In float32, in the interpreter: at most twice the error of PyTorch's operators, and a rounding."""
    case = Case(rotation, "n", "rms", unbound, 2)
    function, tensors = function_of(case), inputs(case, torch.float32)
    twin, calls, _ = rewritten(function, tensors)
    assert len(calls) == 1
    want, plain = results(function, [t.double() for t in tensors]), results(function, tensors)
    with interpreting():
        got = results(twin, tensors)
    for t, wide, eager in zip(got, want, plain, strict=True):
        rounding = torch.finfo(torch.float32).eps * wide.norm()
        assert (t - wide).norm() <= 2 * ((eager - wide).norm() + rounding)
