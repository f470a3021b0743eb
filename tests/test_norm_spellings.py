"""Tests of norms, gates and activations written out in captured graphs, composed from tables of spellings.

Oracle, unless a test says otherwise: the function as written, outputs and gradients in float64, which differ by the
rounding of sums of a few dozen terms in another order; and the calls that must be in the rewritten graph.
"""

import itertools
import math

import captured
import pytest
import torch
import torch.nn.functional as F
from sampling import sampled

from fastvit_triton.convert import backend

D, H, EPS = 8, 6, 1e-3


def rewritten(function, tensors, layers=False):
    """(the rewritten graph of a function, its calls by name, why its linear layers were left)."""
    graph = captured.captured(function, tensors)
    report = backend.rewrite(graph, anywhere=True, layers=layers)
    graph.recompile()
    named = [n.target if n.op == "call_method" else n.target.__name__ for n in captured.calls(graph)]
    return graph, named, {row.why or "" for row in report.rows if row.type == "linear"}


def results(function, tensors):
    """Outputs and all gradients of a fixed random projection of them."""
    given = [t.clone().requires_grad_() for t in tensors]
    found = function(*given)
    torch.manual_seed(1)
    sum((y * torch.randn_like(y)).sum() for y in (found if isinstance(found, tuple) else (found,))).backward()
    outputs = [y.detach() for y in (found if isinstance(found, tuple) else (found,))]
    return [*outputs, *(torch.zeros_like(t) if t.grad is None else t.grad for t in given)]


def check(function, tensors, layers=False):
    """Compares a function with its rewritten graph; returns the names of its calls and the reasons."""
    graph, named, why = rewritten(function, tensors, layers)
    assert captured.same(results(graph, tensors), results(function, tensors), torch.float64), named
    return named, why


def draw(*shapes):
    """Normally distributed tensors in float64."""
    return [t.double() for t in captured.make(shapes)]


def _mean(x):
    return x.mean(-1, keepdim=True)


# (x, what is divided by the root, mean square) → of LayerNorm and RMSNorm
CENTRED = {
    "var": lambda x: (x - _mean(x), x.var(-1, keepdim=True, unbiased=False)),
    "correction": lambda x: (x - _mean(x), torch.var(x, dim=-1, correction=0, keepdim=True)),
    "pow": lambda x: (x - _mean(x), (x - x.mean(dim=(-1,), keepdim=True)).pow(2).mean(-1, True)),
    "square": lambda x: _once(x - torch.mean(x, 2, keepdim=True), lambda y: y.square().mean(-1, keepdim=True)),
    "product": lambda x: _once(x - x.sum(-1, keepdim=True) / D, lambda y: (y * y).sum(-1, keepdim=True) / D),
    "operator": lambda x: _once(-_mean(x) + x, lambda y: (-y) ** 2, _mean),
    "centred var": lambda x: _once(x - _mean(x), lambda y: torch.var(y, -1, False, True)),
}
PLAIN = {
    "pow": lambda x: (x, x.pow(2).mean(-1, keepdim=True)),
    "square": lambda x: (x, torch.mean(torch.square(x), dim=-1, keepdim=True)),
    "product": lambda x: (x, (x * x).sum(-1, keepdim=True) * (1 / D)),
    "operator": lambda x: (x, (x**2).mean((-1,), keepdim=True)),
}


def _once(y, *functions):
    spread = y
    for function in functions:
        spread = function(spread)
    return y, spread


ROOTS = {
    "rsqrt": lambda y, v: y * torch.rsqrt(v + EPS),
    "inverse": lambda y, v: (1 / torch.sqrt(EPS + v)) * y,
    "quotient": lambda y, v: y / (v + EPS).sqrt(),
    "power": lambda y, v: y * (v + EPS) ** -0.5,
    "half": lambda y, v: torch.div(y, torch.pow(v.add(EPS), 0.5)),
    "reciprocal": lambda y, v: torch.mul((v + EPS).reciprocal().sqrt(), y),
}
AFFINE = {  # of a weight, and for LayerNorm a bias
    "none": lambda y, w, b: y,
    "weight": lambda y, w, b: y * w if b is None else y * w + b,
    "first": lambda y, w, b: w * y if b is None else b + w * y,
    "one": lambda y, w, b: y * (1 + w) if b is None else torch.add(y * (1.0 + w), b),
    "fused": lambda y, w, b: y.mul(w) if b is None else torch.addcmul(b, y, w),
}
NORMS = [
    (centred, *names)
    for centred, table in ((True, CENTRED), (False, PLAIN))
    for names in itertools.product(table, ROOTS, AFFINE)
]


def norm(centred, statistics, root, affine):
    """A norm as a function (x, weight, bias)."""

    def function(x, w, b):
        y, v = (CENTRED if centred else PLAIN)[statistics](x)
        return AFFINE[affine](ROOTS[root](y, v), w, b if centred else None)

    return function


@pytest.mark.few(10)
@pytest.mark.parametrize("centred, statistics, root, affine", sampled(NORMS, 17))
def test_norms(centred, statistics, root, affine):
    """They become the norm of a linear layer, and without one a norm of their own; a compiler keeps the operators."""
    written = norm(centred, statistics, root, affine)
    tensors = draw((2, 3, D), (D,), (D,), (H, D))
    named, _ = check(lambda x, w, b, m: F.linear(written(x, w, b), m), tensors)
    assert named[-1] == "linear" and set(named) <= {"linear", "add"}  # 1 + w
    named, _ = check(lambda x, w, b, m: (F.linear(x, m), written(x, w, b)), tensors, layers=True)
    assert named[-1] == ("layer_norm" if centred else "rms_norm") and set(named[:-1]) <= {"linear", "add"}
    named, _ = check(lambda x, w, b, m: F.gelu(F.linear(x, m)).sum() * written(x, w, b), tensors)
    assert not {"layer_norm", "rms_norm"}.intersection(named)


def length(x, scale=1):
    return x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) * scale)


@pytest.mark.parametrize(
    "written",
    [
        lambda x, w: length(x, D**-0.5) * w,
        lambda x, w: w * (x / x.norm(dim=-1, keepdim=True)) * D**0.5,
        lambda x, w: x / (x.norm(2, -1, keepdim=True) / math.sqrt(D)) * w,
        lambda x, w: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS) * D**0.5 * w,
        lambda x, w: F.rms_norm(x, (D,), w, EPS),
        lambda x, w: torch.nn.functional.rms_norm(x, [D], w),
    ],
)
def test_rms_norms(written):
    """By lengths, of which an RMSNorm is √D times a unit vector, and by PyTorch's function."""
    named, _ = check(lambda x, w, m: F.linear(written(x, w), m), draw((2, 3, D), (D,), (H, D)))
    assert named == ["linear"]


def other_axis(x, w, m):
    u = x.mean(1, keepdim=True)
    return F.linear((x - u) * torch.rsqrt((x - u).square().mean(1, keepdim=True) + EPS), m)


def maps(x, w, m):
    """LayerNorm2d of SAM and ConvNeXt."""
    x = x.unflatten(1, (1, 3)).transpose(1, 3)
    u = x.mean(1, keepdim=True)
    y = (x - u) / torch.sqrt((x - u).pow(2).mean(1, keepdim=True) + EPS) * w[:, None, None]
    return F.linear(y.transpose(1, 3).flatten(1, 2), m)


def eps_outside(x, w, m):
    return F.linear(w * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + EPS), m)


def eps_beside_length(x, w, m):
    return F.linear(x / (x.norm(dim=-1, keepdim=True) * D**-0.5 + EPS), m)


def sample_variance(x, w, m):
    return F.linear(w * (x - _mean(x)) / torch.sqrt(x.var(-1, keepdim=True) + EPS), m)


def difference_of_means(x, w, m):
    v = x.square().mean(-1, keepdim=True) - _mean(x) ** 2
    return F.linear((x - _mean(x)) * torch.rsqrt(v + EPS), m)


def not_centred(x, w, m):
    return F.linear(x * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + EPS), m)


def other_weight(x, w, m):
    return F.linear(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * w[:3, None], m)


def twice(x, w, m):
    return F.linear(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * 2, m)


def read_elsewhere(x, w, m):
    v = x.square().mean(-1, keepdim=True)
    return F.linear(x * torch.rsqrt(v + EPS), m), v


def detached(x, w, m):
    return F.linear(x * torch.rsqrt(x.square().mean(-1, keepdim=True).detach() + EPS), m)


def root_of_square(x, w, m):
    return F.linear(x.square().sqrt() * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS), m)


def narrowed(x, w, m):
    y = x.to(torch.float32).to(torch.float64)
    return F.linear(y * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS), m)


def shifted(x, w, m):
    """An RMSNorm with a bias."""
    return F.linear(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) + w, m)


def scaled_norm(x, w, m):
    """What is multiplied by a factor for each token is not the result of the norm."""
    return F.linear(F.layer_norm(x, (D,)) * x.mean(-1, keepdim=True), m)


NEAR: dict = {
    other_axis: "normalises other axes",
    maps: "",
    eps_outside: "eps is outside of the root",
    eps_beside_length: "eps is outside of the root",
    sample_variance: "that of a sample",
    shifted: "RMSNorm with a bias",
    **dict.fromkeys((difference_of_means, not_centred, other_weight, twice, read_elsewhere), ""),
    **dict.fromkeys((detached, root_of_square, narrowed, scaled_norm), ""),
}


@pytest.mark.parametrize("function", NEAR, ids=lambda function: function.__name__)
def test_near_misses(function):
    """Other functions stay as they are; the report tells why, where it is known."""
    tensors = draw((2, 3, D), (D,), (H, D))
    graph, _, why = rewritten(function, tensors)
    assert captured.same(results(graph, tensors), results(function, tensors), torch.float64)
    assert "norm=(" not in str(graph.code).replace(" ", "") and any(NEAR[function] in reason for reason in why)
    check(function, tensors, layers=True)


def test_writes_in_between():
    """x changes between the two times that it is read."""

    def function(x, w, m):
        r = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
        return F.linear(x.add_(1) * r, m), F.linear(x * r, m)

    tensors = draw((2, 3, D), (D,), (H, D))
    graph, named, _ = rewritten(function, tensors)
    assert "rsqrt" in named and captured.same(
        captured.outputs(graph, tensors), captured.outputs(function, tensors), torch.float64
    )


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("centred", [False, True])
def test_casts(narrow, late, centred):
    """Statistics in float32, the weight before or after the cast: dtype, and at most twice the rounding as written."""

    def function(x, w, m):
        y = x.float()
        y = y - _mean(y) if centred else y
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)
        return F.linear((w * y).to(narrow) if late else w * y.to(narrow), m)

    wide = [t.to(narrow).double() for t in draw((2, 3, D), (D,), (H, D))]
    tensors = [t.to(narrow) for t in wide]
    graph, named, _ = rewritten(function, tensors)
    assert named == ["linear"]
    x, w, m = wide
    y = x - _mean(x) if centred else x
    exact = F.linear(w * y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS), m)
    got, plain = graph(*tensors), function(*tensors)
    assert got.dtype == plain.dtype
    rounding = torch.finfo(narrow).eps * exact.norm()
    assert (got.double() - exact).norm() <= 2 * (plain.double() - exact).norm() + rounding


def test_one_norm_for_queries_keys_and_values():
    """Three layers become one that normalises; a norm of queries and keys does not keep attention from a kernel."""
    written = norm(True, "square", "rsqrt", "weight")

    def function(x, w, b, q, k, v):
        y = written(x, w, b)
        q, k, v = (F.linear(y, m).unflatten(-1, (2, 4)).transpose(1, 2) for m in (q, k, v))
        q = F.normalize(q, dim=-1)
        k = k / k.norm(dim=-1, keepdim=True).clamp_min(1e-6)
        return F.scaled_dot_product_attention(q, k, v)

    named, _ = check(function, draw((2, 3, D), (D,), (D,), *[(D, D)] * 3))
    assert named.count("linear") == named.count("attention") == 1 and "rsqrt" not in named


def test_symbolic_sizes():
    """One graph for every number of images and tokens; also of one channel, where a LayerNorm is 0."""
    seen = []

    def function(x, w, b, m):
        return F.linear(norm(True, "var", "quotient", "weight")(x, w, b), m)

    def rewrite(graph, _):
        seen.append({row.became for row in backend.rewrite(graph, anywhere=True).rows})
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=rewrite, fullgraph=True)
    for width, calls in ((D, 1), (1, 2)):
        for batch, tokens in ((2, 3), (4, 5)):
            tensors = draw((batch, tokens, width), (width,), (width,), (H, width))
            torch._dynamo.mark_dynamic(tensors[0], (0, 1))
            torch.testing.assert_close(compiled(*tensors), function(*tensors))
        assert len(seen) == calls and seen[0] == {"linear"}
    torch._dynamo.reset()


GATES = {
    "silu": F.silu,
    "silu formula": lambda x: x * torch.sigmoid(x),
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "erf": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "cdf": lambda x: x * (0.5 * (1.0 + (x * 2**-0.5).erf())),
    "tanh": lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3)))),
    "tanh factored": lambda x: x * 0.5 * (torch.tanh(0.7978845608028654 * x * (1 + 0.044715 * x * x)) + 1),
    "tanh by sigmoid": lambda x: (1.5957691216057308 * (x + 0.044715 * x**3)).sigmoid() * x,
}
PACKINGS = {  # a packed projection → its halves
    "chunk": lambda h: h.chunk(2, dim=-1),
    "split": lambda h: torch.split(h, H, dim=-1),
    "sizes": lambda h: h.split([H, H], -1),
    "slices": lambda h: (h[..., :H], h[..., H:]),
    "all axes": lambda h: (h[:, :, :H], h[:, :, H : 2 * H]),
    "unbind": lambda h: h.unflatten(-1, (2, H)).unbind(-2),
    "reshape": lambda h: h.reshape(2, -1, 2, H).unbind(2),
}
ENDS = {  # (branch, x, LayerScale)
    "none": lambda y, x, g: y,
    "residual": lambda y, x, g: torch.add(y, x),
    "scale": lambda y, x, g: x + y * g,
    "scale first": lambda y, x, g: g * y + x,
    "methods": lambda y, x, g: y.mul(g).add(x),
    "addcmul": lambda y, x, g: torch.addcmul(x, g, y),
    "addcmul swapped": lambda y, x, g: x.addcmul(y, g),
}


def gate(name, packing, order, ends):
    """A gated MLP (x, w1, w2, bias, w3, LayerScale); without a packing of two linear layers."""

    def function(x, w1, w2, b, w3, g):
        n = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
        if packing is None:
            first, second = F.linear(n, w1, b), F.linear(n, w2)
        else:
            first, second = PACKINGS[packing](F.linear(n, torch.cat((w1, w2)), torch.cat((b, b))))
        first, second = (second, first) if order == 1 else (first, second)
        y = second * GATES[name](first) if order == 2 else GATES[name](first) * second
        return ENDS[ends](F.linear(y, w3), x, g)

    return function


@pytest.mark.parametrize(
    "name, packing, order, ends",
    sampled(itertools.islice(itertools.product(GATES, (*PACKINGS, None), (0, 1, 2), ENDS), 0, None, 11), 5),
)
def test_gated_mlps(name, packing, order, ends):
    """They become one call, with the norm before and what follows."""
    tensors = draw((2, 5, D), (H, D), (H, D), (H,), (D, H), (D,))
    named, _ = check(gate(name, packing, order, ends), tensors)
    assert named[-1] == "mlp" and set(named) <= {"cat", "roll", "zeros_for", "mlp"}


def test_few_rows_do_not_pay_for_a_copy_of_the_weights():
    """Nor does a graph that is not compiled, without a norm before the gate."""
    for rows, layers, merged in ((3, False, False), (5, False, True), (5, True, False)):
        tensors = draw((2, rows, D), (H, D), (H, D), (D, H))
        named, _ = check(lambda x, a, b, c: F.linear(F.silu(F.linear(x, a)) * F.linear(x, b), c), tensors, layers)
        assert ("mlp" in named) == merged


@pytest.mark.parametrize("name", GATES)
def test_activations(name):
    """Without a gate, in float64 and narrower, where the formula may be computed in float32."""
    named, _ = check(lambda x, w1, w2: F.linear(GATES[name](F.linear(x, w1)), w2), draw((2, 3, D), (H, D), (D, H)))
    assert named == ["mlp"]
    tensors = [t.bfloat16() for t in draw((2, 3, D), (H, D), (D, H))]
    _, named, _ = rewritten(lambda x, w1, w2: F.linear(GATES[name](F.linear(x, w1).float()).bfloat16(), w2), tensors)
    assert named == ["mlp"]


def other_gate(h, g):
    return torch.sigmoid(h) * g


def other_constant(h, g):
    return 0.5 * h * (1 + torch.tanh(0.8 * (h + 0.044715 * h**3))) * g


def other_erf(h, g):
    return 0.5 * h * (1 + torch.erf(h / 2)) * g


def other_polynomial(h, g):
    return 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**2))) * g


def other_input(h, g):
    return h * torch.sigmoid(g) * g


def uneven(h, g):
    a, b = torch.cat((h, g), -1)[..., 1 : H + 1], torch.cat((h, g), -1)[..., :H]
    return F.silu(a) * b


def same_half(h, g):
    return F.silu(h) * h


@pytest.mark.parametrize(
    "function", [other_gate, other_constant, other_erf, other_polynomial, other_input, uneven, same_half]
)
def test_near_gates(function):
    """Other functions are not called activations, whether their parts are packed or not."""

    def packed(x, w1, w2, w3):
        h, g = F.linear(x, torch.cat((w1, w2))).chunk(2, -1)
        return F.linear(function(h, g), w3)

    def separate(x, w1, w2, w3):
        return F.linear(function(F.linear(x, w1), F.linear(x, w2)), w3)

    def sliced(x, w1, w2, w3):
        h = F.linear(x, torch.cat((w1, w2)))
        return F.linear(F.silu(h[..., :H]) * h[..., :H], w3)

    for run in (packed, separate, sliced):
        named, _ = check(run, draw((2, 5, D), (H, D), (H, D), (D, H)))
        assert "mlp" not in named
