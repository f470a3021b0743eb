"""Attention is recognised by what it computes. Oracle: the function as it is spelled, in float64, with gradients."""

import random

import pytest
import torch
import torch.nn.functional as F
from attention_spellings import MASKS, OPERANDS, PRODUCTS, SCALES, SOFTMAXES, Spelling, Tensors
from interpreter import interpreting
from torch import nn

from fastvit_triton.convert import backend
from fastvit_triton.kernels.attention import attention
from fastvit_triton.kernels.attention_qkv import attention_qkv

TABLES = PRODUCTS, SCALES, MASKS, SOFTMAXES, OPERANDS
BATCH = 12  # spellings in one graph
ENDLESS = "−inf for a whole query"  # gives NaN, whose gradients of keys differ


def drawn(seed):
    """`BATCH` different spellings."""
    rng = random.Random(seed)
    return [Spelling(*(rng.choice([*table]) for table in TABLES)) for _ in range(BATCH)]


class Spelled(nn.Module):
    """Attention in several spellings, each on the same packed projection or on queries of another tensor."""

    def __init__(self, spellings, crossed):
        super().__init__()
        self.spellings, self.crossed = spellings, crossed
        self.tensors = Tensors(Nq=3 if crossed else 5)
        self.qkv = nn.Linear(32, 96)

    def forward(self, x, memory):
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        if self.crossed:
            q = memory.unflatten(-1, (4, 8)).transpose(1, 2)
        return [each(q, k, v, self.tensors) for each in self.spellings]


def rewritten(model, inputs, dynamic=None):
    """(outputs of the rewritten graph, the graph, its report)."""
    found = []

    def look(graph, _):
        found.append((backend.rewrite(graph, anywhere=True), graph))
        return graph.forward

    torch._dynamo.reset()
    outputs = torch.compile(model, backend=look, fullgraph=True, dynamic=dynamic)(*inputs)
    return outputs, found[0][1], found[0][0]


def calls(graph, *functions):
    return [node for node in graph.graph.nodes if node.target in functions]


def compared(model, inputs, got, spellings):
    """Compares outputs and gradients of each spelling with those of the model as written."""
    leaves = [*inputs, *model.parameters()]
    for spelling, mine, want in zip(spellings, got, model(*inputs), strict=True):
        name = " | ".join(spelling)
        near = dict(equal_nan=True, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(mine, want, **near, msg=lambda m, n=name: f"{n}: {m}")
        assert want.isnan().any() == (spelling.mask == ENDLESS), name
        if spelling.mask == ENDLESS:
            continue
        weights = torch.linspace(-1, 1, want.numel(), dtype=want.dtype).view(want.shape)
        grads = [
            torch.autograd.grad(y, leaves, weights, retain_graph=True, allow_unused=True, materialize_grads=True)
            for y in (mine, want)
        ]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}, gradient: {m}")


@pytest.fixture(autouse=True)
def double():
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.few(1)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("seed", range(30))
def test_all_are_fused(seed, dynamic):
    """Also: each becomes one call of the kernels, whatever sizes are symbols."""
    spellings = drawn(seed)
    model = Spelled(spellings, crossed=seed % 3 == 2)
    inputs = torch.randn(4, 5, 32, requires_grad=True), torch.randn(4, 3, 32, requires_grad=True)
    got, graph, report = rewritten(model, inputs, dynamic)
    missing = [row.why for row in report.rows if row.why is not None and row.type != "linear"]
    assert len(calls(graph, attention, attention_qkv)) == BATCH, missing
    compared(model, inputs, got, spellings)


def on_heads(q, k, v, m):
    """Talking heads."""
    return torch.einsum("bhij,hg->bgij", (q @ k.mT).softmax(-1), m.bias[:, :4, 0]) @ v


def dropped(q, k, v, m):
    return F.dropout((q @ k.mT).softmax(-1), 0.5) @ v


def summed_over_queries(q, k, v, m):
    return (q @ k.mT).softmax(-1).mT @ v


def gated(q, k, v, m):
    return ((q @ k.mT) * m.bias).softmax(-1) @ v


def filled(value):
    return lambda q, k, v, m: (q @ k.mT).masked_fill(m.drop, value).softmax(-1) @ v


def filled_then_scaled(q, k, v, m):
    return ((q @ k.mT).masked_fill(m.drop, -1e9) * -m.temperature).softmax(-1) @ v


def filled_with_a_tensor(q, k, v, m):
    return torch.where(m.drop, m.mask, q @ k.mT).softmax(-1) @ v


def read_twice(q, k, v, m):
    p = (q @ k.mT).softmax(-1)
    return p @ v + p.sum()


def another_maximum(q, k, v, m):
    s = q @ k.mT
    return (s - s.amax(-2, keepdim=True)).softmax(-1) @ v


def written_to_between(q, k, v, m):
    """The view of the scores is read after they have changed, and before."""
    s = q @ k.mT
    seen = s.flatten()
    s *= 2
    return s.softmax(-1) @ v + seen[0]


def read_before_the_write(q, k, v, m):
    s = q @ k.mT
    before = s + 1
    s *= 2
    return s.softmax(-1) @ v + before.sum()


def channels(q, k, v, m):
    """Attention among channels."""
    return ((q.mT @ k).softmax(-1) @ v.mT).mT


NEAR = {  # what is not attention as the kernels compute it, and the reason in the report; None for what is
    on_heads: "its probabilities are summed over another axis than that of the softmax",
    dropped: "it drops attention probabilities",
    summed_over_queries: "its probabilities are summed over another axis than that of the softmax",
    gated: "it multiplies its scores by a tensor with the axes of queries and keys",
    filled(0): "it fills its scores with 0, which is not negligible",
    filled(-100.0): "it fills its scores with -100.0, which is not negligible",
    filled(float("inf")): "it fills its scores with inf, which is not negligible",
    filled_then_scaled: "it fills its scores with -1000000000.0, which is not negligible",
    filled_with_a_tensor: "it fills its scores with what is not a constant",
    read_twice: "is also read by other operators",
    another_maximum: "is also read by other operators",
    written_to_between: "its scores are not a product of two tensors",
    read_before_the_write: "is also read by other operators",
    channels: None,
}


@pytest.mark.parametrize("function", NEAR, ids=lambda f: f.__name__)
def test_others_are_not(function):
    """Also: the report has the true reason."""
    model = Spelled([function], crossed=False)
    inputs = torch.randn(4, 5, 32, requires_grad=True), torch.randn(4, 3, 32)
    (got,), graph, report = rewritten(model, inputs)
    if NEAR[function] is None:
        assert len(calls(graph, attention)) == 1
    else:
        (row,) = (row for row in report.rows if row.type == "softmax")
        assert row.became is None and NEAR[function] in row.why
    if function is not dropped:
        torch.testing.assert_close(got, model(*inputs)[0], equal_nan=True)


def test_symbolic_numbers_are_added():
    """Which leaves the softmax as it is."""
    spelling = Spelling("matmul", "number", "a number of the module", "method", "plain")
    model = Spelled([spelling], crossed=False)
    inputs = torch.randn(4, 5, 32, requires_grad=True), torch.randn(4, 3, 32, requires_grad=True)
    got, graph, _ = rewritten(model, inputs, dynamic=True)
    assert len(calls(graph, attention, attention_qkv)) == 1
    compared(model, inputs, got, [spelling])


def test_autocast_that_is_off_already_is_no_border():
    """As around rotations, which many write in float32."""

    def without_autocast(q, k, v, m):
        with torch.autocast("cpu", enabled=False):
            scores = q @ k.mT
        return scores.softmax(-1) @ v

    model = Spelled([without_autocast], crossed=False).float()
    inputs = torch.randn(4, 5, 32).float(), torch.randn(4, 3, 32)
    (got,), graph, _ = rewritten(model, inputs)
    assert len(calls(graph, attention_qkv)) == 1
    torch.testing.assert_close(got, model(*inputs)[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, graph, _ = rewritten(model, inputs)
    assert not calls(graph, attention, attention_qkv)


IN_KERNELS = (
    Spelling("bmm", "temperature", "padding and bias", "method", "unit q and k"),
    Spelling("einsum, tokens first", "per key", "−1e9", "function", "plain"),
    Spelling("keys first", "number", "bias after the lowest", "maximum", "plain"),
    Spelling("matmul", "in place", ENDLESS, "method", "scaled q"),
    Spelling("groups", "none", "windows and bias", "written out", "one head of k and v"),
)


@pytest.mark.full
@pytest.mark.parametrize("spelling", IN_KERNELS, ids=lambda s: s.mask)
def test_kernels(spelling):
    """In the interpreter in float32: outputs and gradients within twice the error of PyTorch, against float64."""
    wide = Spelled([spelling], crossed=False)
    model = Spelled([spelling], crossed=False).float()
    model.load_state_dict(wide.state_dict())
    x = torch.randn(4, 5, 32)
    found = []
    with interpreting():
        for each, of in ((wide, x), (model, x.float())):
            of = of.clone().requires_grad_()
            (y,) = each(of, of[:, :3])
            found.append([y, *torch.autograd.grad(y.nansum(), [of, each.qkv.weight])])
        of = x.float().requires_grad_()
        (y,), graph, _ = rewritten(model, (of, of[:, :3]))
        assert len(calls(graph, attention, attention_qkv)) == 1
        found.append([y, *torch.autograd.grad(y.nansum(), [of, model.qkv.weight])])
    for exact, theirs, ours in zip(*found, strict=True):
        assert torch.equal(ours.isnan(), exact.isnan()) or spelling.mask == ENDLESS
        if not exact.isnan().any():
            error = (theirs - exact).abs().max() + torch.finfo(torch.float32).eps * exact.abs().max()
            assert (ours - exact).abs().max() <= 2 * error
