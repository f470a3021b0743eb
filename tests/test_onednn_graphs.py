"""Tests of oneDNN's products in graphs of torch.compile on a CPU: which layers they replace, and results."""

import contextlib
import copy
import math
import shutil
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from agreement import seeded
from budget import assert_within_budget, telling
from catalogue import build, inputs, outputs
from test_backend import Eager, cast, results
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

from fastvit_triton import convert, create_model, optimize
from fastvit_triton.convert import backend
from fastvit_triton.kernels import onednn, settings
from fastvit_triton.kernels.backend import using_backend

CPU = torch.device("cpu")
PRODUCT = "product by oneDNN"
NODE = "fastvit_triton.product.default"
EPS = torch.finfo(torch.float32).eps
EVERY = {"inference": 0.0, "training": 0.0}
X = (2, 5, 24)
W, W24 = (torch.randn(f, 24, generator=torch.Generator().manual_seed(f)) / 5 for f in (48, 24))

pytestmark = [
    pytest.mark.skipif(onednn.why_not(CPU, torch.float32) is not None, reason="PyTorch has no oneDNN here"),
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:.*torch.jit"),
]


class Products(Eager):
    """`Eager` on a CPU whose row, while graphs are rewritten, is this one; it counts the guards that rewriting adds."""

    def __init__(self, row=None):
        super().__init__()
        self.row = {"float32": EVERY} if row is None else row
        self.guards = 0

    def __call__(self, graph, given):
        guards = torch._guards.TracingContext.get().fake_mode.shape_env.guards
        before = len(guards)
        self.graphs.append(graph)
        with onednn.using_row(self.row):
            self.rows += backend.rewrite(graph).rows
        self.guards += len(guards) - before
        return aot_autograd(fw_compiler=self._keep)(graph, given)

    @property
    def products(self):
        """The number of linear layers that were replaced."""
        return sum(row.became == PRODUCT for row in self.rows)

    @property
    def layers(self):
        """The number of linear layers."""
        return sum(row.type == "linear" for row in self.rows)


def close(got, want):
    """True if results agree up to sums of a few dozen terms in another order."""
    return got.dtype == want.dtype and (got - telling(want)).norm() <= 64 * EPS * want.norm()


MODELS = ["timm_vit", "timm_swin", "hf_vit", "timm_eva02", "hf_swin", "vit_pytorch_vit", "timm_pvt_v2", "ours"]


def made(name):
    """A model in float64 with random parameters, and its inputs."""
    if name != "ours":
        return build(name).train(), inputs(name)
    model = create_model("vit_digits_patch2_8", depth=1, embed_dim=24, init_values=0.1).double().train()
    return model, torch.randn(2, 1, 8, 8, dtype=torch.float64)


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "ours" else pytest.mark.full) for n in MODELS])
def test_models_equal_the_original(name):
    """Oracle: the unmodified model, every gradient; truth in float64. Every linear layer must be replaced."""
    model, given = made(name)
    plain, eager = copy.deepcopy(model).float(), Products()
    model.load_state_dict(cast(plain.state_dict(), torch.float64))
    single = cast(given, torch.float32)
    got = results(torch.compile(outputs, backend=eager, fullgraph=True), copy.deepcopy(plain), single)
    assert_within_budget(got, results(outputs, plain, single), results(outputs, model, cast(single, torch.float64)))
    assert eager.products == eager.layers > 4 and {row.became for row in eager.rows} == {PRODUCT, None}
    assert eager.nodes.count(NODE) >= 3 * eager.products - 1  # images have no gradient
    assert not any("aten.addmm" in node for node in eager.nodes)


@pytest.mark.full
def test_converted_modules_are_traced_plain():
    """Oracle: the model in PyTorch; the switch is on while Dynamo traces, and the graph pass alone makes products."""
    model = build("timm_vit", torch.float32).eval()
    images, eager = inputs("timm_vit", torch.float32), Products()
    with torch.no_grad():
        want = model(images)
        optimize(model)
        with using_backend("onednn"):
            got = torch.compile(model, backend=eager, fullgraph=True)(images)
    assert close(got, want) and eager.products == eager.layers == 9 and eager.nodes.count(NODE) == 9


@pytest.mark.fast
def test_a_dynamic_batch_compiles_once():
    """Oracle: eager PyTorch; the number of graphs, and no guard by the rewriting; mark_dynamic raises on others."""
    model, eager = build("timm_vit", torch.float32).eval(), Products()
    compiled = torch.compile(outputs, backend=eager, fullgraph=True)
    for batch in (3, 5, 2):
        images = torch.randn(batch, 3, 32, 32)
        torch._dynamo.mark_dynamic(images, 0)
        with torch.no_grad():
            assert close(compiled(model, images), outputs(model, images))
    assert len(eager.graphs) == 1 and eager.products == 9 and not eager.guards


def test_symbolic_rows_count_as_traced_sizes():
    """Oracle: the rows for which the products of a static and of a dynamic graph pay."""
    static, traced = math.prod(X) * 48, math.prod(settings.TRACED) * 24 * 48
    for fewest, dynamic, count in (
        *((static, False, 1), (static + 1, False, 0), (static + 1, True, 1)),
        *((traced, True, 1), (traced + 1, True, 0)),
    ):
        torch._dynamo.reset()
        x, eager = torch.randn(X), Products({"float32": {"inference": fewest}})
        if dynamic:
            torch._dynamo.mark_dynamic(x, 0)
        torch.compile(partial(F.linear, weight=W), backend=eager, fullgraph=True)(x)
        assert (eager.products, eager.guards) == (count, 0)


@pytest.mark.full
def test_checkpointed_blocks_are_rewritten():
    """Oracle: the model itself, every gradient; each block is a separate graph, whose products run again backwards."""
    model, images = build("timm_vit", torch.float32).train(), inputs("timm_vit", torch.float32)
    model.set_grad_checkpointing(True)
    eager = Products()
    got = results(torch.compile(outputs, backend=eager, fullgraph=True), model, images)
    wide = copy.deepcopy(model).double()
    assert_within_budget(got, results(outputs, model, images), results(outputs, wide, images.double()))
    assert eager.products == 9


ROWS = {
    "every product": (contextlib.nullcontext, {"float32": EVERY}, 3),
    "unknown CPU": (contextlib.nullcontext, {}, 0),
    "another dtype": (contextlib.nullcontext, {"bfloat16": EVERY}, 0),
    "larger products": (contextlib.nullcontext, {"float32": {"training": math.prod(X) * 48}}, 2),
    "inference only": (contextlib.nullcontext, {"float32": {"inference": 0.0}}, 0),
    "switch": (lambda: using_backend("onednn"), {}, 3),
    "other switch": (lambda: using_backend("torch"), {"float32": EVERY}, 0),
    "forced": (lambda: settings.forcing("onednn"), {}, 3),
    "forced plain": (lambda: settings.forcing("plain"), {"float32": EVERY}, 0),
    "forced fused": (lambda: settings.forcing("fused"), {"float32": EVERY}, 0),
}


def three_layers(x):
    """Layers of 24 → 24 and twice 24 → 48 channels."""
    return torch.cat((F.linear(F.linear(x, W24), W), F.linear(x, weight=W, bias=W[:, 0])), -1)


@pytest.mark.few(8)
@pytest.mark.parametrize("name", ROWS)
def test_the_plan_decides(name):
    """Oracle: the number of products, results of PyTorch, and a reason for each layer that stays."""
    context, row, count = ROWS[name]
    x, eager = torch.randn(X, requires_grad=True), Products(row)
    with context():
        got = torch.compile(three_layers, backend=eager, fullgraph=True)(x)
    assert eager.products == count and eager.layers == 3
    assert all(row.why for row in eager.rows if row.became is None)
    assert torch.equal(got, three_layers(x)) if not count else close(got, three_layers(x))


W72 = torch.cat((W, W24))


def multi_head(x, memory=None, values=None, ends=(None, None, False, 0.0), **options):
    """`F.multi_head_attention_forward` on [N, B, D] with three heads."""
    q = x.transpose(0, 1)
    k = q if memory is None else memory.transpose(0, 1)
    v = k if values is None else values.transpose(0, 1)
    options = dict(need_weights=False) | options
    y, weights = F.multi_head_attention_forward(q, k, v, 24, 3, W72, W72[:, 0], *ends, W24, W24[0], **options)
    return y.transpose(0, 1) * (weights[..., :1] if options.get("average_attn_weights") else 1)


THREE = dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight"), W24)
ADDED = W24[0].view(1, 1, 24)
LATER = torch.ones(5, 5, dtype=torch.bool).triu(1)
PADDED = torch.tensor([[False] * 5, [False, True, False, False, True]])  # with LATER each query keeps a key
ADDEND = torch.linspace(-1, 1, 25).view(5, 5)
KEYS = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(0))  # [B·H, N, d]


INNER = {
    "attention": (multi_head, X, 2),
    "cross-attention": (lambda x: multi_head(x, x[:1].expand_as(x).sin()), X, 3),
    "attention with a mask": (lambda x: multi_head(x, attn_mask=LATER), X, 2),
    "causal attention, which reads no mask": (lambda x: multi_head(x, attn_mask=LATER.mT, is_causal=True), X, 2),
    "causal attention with weights": (
        lambda x: multi_head(x, attn_mask=LATER.mT, is_causal=True, need_weights=True),
        X,
        2,
    ),
    "attention with dropout": (lambda x: multi_head(x, ends=(None, None, False, 0.5)), X, 0),
    "attention with a key of zeros": (lambda x: multi_head(x, ends=(None, None, True, 0.0)), X, 0),
    "attention with three projections": (lambda x: multi_head(x, use_separate_proj_weight=True, **THREE), X, 0),
    "attention to other values": (lambda x: multi_head(x, x, x.cos()), X, 3),
    "attention of three tensors": (lambda x: multi_head(x, x.sin(), x.cos()), X, 4),
    "attention whose weights are used": (
        lambda x: multi_head(x, need_weights=True, average_attn_weights=True),
        X,
        0,
    ),
    "attention with a mask for each head": (lambda x: multi_head(x, attn_mask=LATER.expand(6, 5, 5)), X, 0),
    "attention with keys of its own": (lambda x: multi_head(x, static_k=KEYS, static_v=KEYS), X, 0),
    "attention with an added key": (lambda x: multi_head(x, ends=(ADDED, ADDED, False, 0.0)), X, 0),
    "attention with padded keys": (lambda x: multi_head(x, key_padding_mask=PADDED), X, 2),
    "attention with a mask and padded keys": (
        lambda x: multi_head(x, attn_mask=LATER, key_padding_mask=PADDED),
        X,
        2,
    ),
    "causal attention with padded keys": (
        lambda x: multi_head(x, attn_mask=LATER, is_causal=True, key_padding_mask=PADDED),
        X,
        2,
    ),
    "attention with values added to scores": (
        lambda x: multi_head(x, attn_mask=ADDEND, key_padding_mask=ADDEND[:2]),
        X,
        2,
    ),
    "addmm": (lambda x: torch.addmm(W[:, 0], x, W.t()), (10, 24), 1),
    "addmm of weights as GPT-2 keeps them": (lambda x: torch.addmm(W24[0], x, W24, beta=1, alpha=1), (10, 24), 1),
    "scaled addmm": (lambda x: torch.addmm(W[:, 0], x, W.t(), alpha=0.5), (10, 24), 0),
    "addmm of a scaled bias": (lambda x: torch.addmm(W[:, 0], x, W.t(), beta=0.5), (10, 24), 0),
    "addmm of one number": (lambda x: torch.addmm(W[:1, 0], x, W.t()), (10, 24), 0),
    "addmm of a matrix": (lambda x: torch.addmm(x, x, W24), (10, 24), 0),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("name", INNER)
def test_products_inside_other_operators_are_replaced(name):
    """Oracle: PyTorch's operator, output and gradient; the number of products, or a reason why it stays."""
    call, size, count = INNER[name]
    x = torch.randn(size, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    eager = Products()
    got = seeded(torch.compile(call, backend=eager, fullgraph=True), x)
    want = seeded(call, twin)
    cotangent = torch.randn_like(want)
    got.backward(cotangent)
    want.backward(cotangent)
    assert close(got, want) and close(x.grad, twin.grad)
    calls = sum(node.target is onednn.product_in_graph for graph in eager.graphs for node in graph.graph.nodes)
    assert calls == count and bool(count) == any(row.became for row in eager.rows)
    assert count or all(row.why for row in eager.rows)


@pytest.mark.parametrize("training", [False, True])
def test_attention_is_of_the_phase_of_its_output(training):
    """Oracle: the number of products, where only those of inference pay."""
    eager = Products({"float32": {"inference": 0.0}})
    torch.compile(multi_head, backend=eager, fullgraph=True)(torch.randn(X, requires_grad=training))
    calls = sum(node.target is onednn.product_in_graph for graph in eager.graphs for node in graph.graph.nodes)
    assert calls == (0 if training else 2)


def test_the_products_of_encoder_layers_are_replaced():
    """Oracle: PyTorch's layer, and the operator that it is in inference without padding."""
    layer = nn.TransformerEncoderLayer(24, 3, 48, batch_first=True).eval()
    parts = layer.self_attn, layer.linear1, layer.linear2
    weights = [p for part in parts for p in part.parameters()]
    norms = [p for norm in (layer.norm1, layer.norm2) for p in norm.parameters()]

    def operator(x, *mask):
        ends = *norms, *weights[4:], *mask
        return torch._transformer_encoder_layer_fwd(x, 24, 3, *weights[:4], False, False, layer.norm1.eps, *ends)

    x = torch.randn(X)
    with torch.no_grad():
        want = layer(x)
        for call in (layer, operator):
            torch._dynamo.reset()
            eager = Products()
            assert close(torch.compile(call, backend=eager, fullgraph=True)(x), want)
            assert "products by oneDNN" in [row.became for row in eager.rows] and eager.nodes.count(NODE) == 4
        torch._dynamo.reset()
        eager = Products()
        masked = partial(operator, x, LATER, 0)
        assert close(torch.compile(masked, backend=eager, fullgraph=True)(), masked())
        assert NODE not in eager.nodes and "it has a mask, or no axes [B, N, D]" in [row.why for row in eager.rows]


def test_a_graph_in_float64_or_without_onednn_is_unchanged(monkeypatch):
    """Oracle: no product, and the reason; a graph that outlives the setting runs PyTorch's product, bit for bit."""
    model, x = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)), torch.randn(X)
    torch._C._set_mkldnn_enabled(False)  # as torch.backends.mkldnn.flags, which warns on a CPU
    try:
        eager = Products()
        want = telling(torch.compile(model, backend=eager, fullgraph=True)(x))
        assert not eager.products and "torch.backends.mkldnn is disabled" in eager.rows[0].why
    finally:
        torch._C._set_mkldnn_enabled(True)
    torch._dynamo.reset()
    eager = Products()
    compiled = torch.compile(model, backend=eager, fullgraph=True)
    assert close(compiled(x), want) and eager.products == 2
    torch._C._set_mkldnn_enabled(False)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(onednn, "_call", None)
            assert torch.equal(compiled(x), want)
    finally:
        torch._C._set_mkldnn_enabled(True)
    torch._dynamo.reset()
    eager = Products({"float32": EVERY, "float64": EVERY})
    torch.compile(model.double(), backend=eager, fullgraph=True)(x.double())
    assert not eager.products and "float64 always runs on PyTorch" in eager.rows[0].why


@pytest.mark.parametrize("dtype, count", [("float32", 0), ("bfloat16", 2)])
def test_autocast(dtype, count):
    """Oracle: the model under the same autocast, in float64, and its dtype; only the listed dtype is replaced."""
    if onednn.why_not(CPU, torch.bfloat16) is not None:
        pytest.skip("this CPU has no bfloat16 products")
    plain, eager = build("mlp_sequential", torch.float32).train(), Products({dtype: EVERY})
    x = inputs("mlp_sequential", torch.float32)

    def run(model, given):
        with torch.autocast("cpu", torch.bfloat16, enabled=given.dtype != torch.float64):
            return model(given)

    baseline, truth = results(run, plain, x), results(run, copy.deepcopy(plain).double(), x.double())
    got = results(torch.compile(run, backend=eager, fullgraph=True), plain, x)
    assert_within_budget(got, baseline, truth, torch.bfloat16)
    assert eager.products == count and torch.compile(run, backend=eager)(plain, x).dtype == run(plain, x).dtype


def test_changes_of_weights_are_seen():
    """Oracle: eager PyTorch after each change of weights, which the graph does not hold."""
    model, x, eager = build("mlp_sequential", torch.float32).eval(), torch.randn(X), Products()
    compiled = torch.compile(model, backend=eager, fullgraph=True)
    with torch.no_grad():
        compiled(x)
        model[1].weight.mul_(2)
        assert close(compiled(x), model(x))
        model[3].weight.data = torch.randn_like(model[3].weight)
        assert close(compiled(x), model(x))
    assert len(eager.graphs) == 1


FORMS = {
    "vector": lambda x: F.linear(x[0, 0], W),
    "empty": lambda x: F.linear(x[:0], W),
    "permuted": lambda x: F.linear(x.transpose(0, 1), W),
    "sliced": lambda x: F.linear(torch.cat((x, x), -1)[..., ::2], W),
    "weight transposed": lambda x: F.linear(x, W24.t()),
    "tensor twice": lambda x: F.linear(x[0, :, :5], x[0, :, :5]),
    "four axes": lambda x: F.linear(x[:, None], W).flatten(1, 2),
    "written": lambda x: F.linear(x, W24).mul_(2.0).sigmoid_(),
    "no gradients": lambda x: F.linear(x.detach(), W24) + x,
    "vmap": torch.func.vmap(lambda x: F.linear(x, W)),
    "gradient": torch.func.grad(lambda x: F.linear(x, W).square().sum()),
    "jvp": lambda x: (
        torch.func.jvp(lambda x: F.linear(x, W).square(), (x.detach(),), (x.detach(),))[1] + x.square().sum()
    ),
}
SLOW = ("gradient", "jvp")
PLAIN = ("vector", "vmap", "gradient", "jvp")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full if n in SLOW else ()) for n in FORMS])
def test_operands_of_any_form(name):
    """Oracle: eager PyTorch, results and gradients; vectors and transforms are left."""
    function, found = FORMS[name], []
    x, eager = torch.randn(X), Products()
    for run in (torch.compile(function, backend=eager, fullgraph=True), function):
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        found.append((y.detach(), torch.autograd.grad(y.square().sum(), leaf)[0]))
    assert eager.products == (name not in PLAIN)
    for got, want in zip(*found, strict=True):
        assert got.shape == want.shape and (got - telling(want, name == "empty")).norm() <= 64 * EPS * want.norm()


def test_the_op_on_fake_tensors():
    """Oracle: sizes and dtypes of PyTorch's product and its gradients, with float16, which some CPUs lack."""
    with FakeTensorMode():
        x, weight, bias = (torch.empty(*s, dtype=torch.float16, requires_grad=True) for s in (X, (48, 24), (48,)))
        y = onednn.product_in_graph(x, weight, bias)
        grads = torch.autograd.grad(y.sum(), (x, weight, bias))
        assert y.shape == (2, 5, 48) and y.dtype == torch.float16 and y.is_contiguous()
        assert [g.shape for g in grads] == [t.shape for t in (x, weight, bias)]


def test_a_failing_rewriting_changes_nothing(monkeypatch):
    """Oracle: the graph's code before."""
    seen = []

    def fails(*_):
        raise KeyError("gone")

    def compiler(graph, _):
        before = graph.code
        with using_backend("onednn"), pytest.raises(KeyError):
            backend.rewrite(graph)
        seen.append(graph.code == before)
        return graph.forward

    monkeypatch.setattr(onednn, "product_refusal", fails)
    torch.compile(three_layers, backend=compiler, fullgraph=True)(torch.randn(X))
    assert seen == [True]


def test_decisions_are_reported():
    """Oracle: the expected sentences."""
    model, x = build("mlp_sequential", torch.float32), torch.randn(X)
    with onednn.using_row({"float32": {"training": math.prod(X) * 48, "inference": math.prod(X) * 48 + 1}}):
        found = convert.report(model, x)
        with torch.no_grad():
            left = convert.report(model, x)
    assert str(found).startswith("2 of 4 calls are converted.\n")
    assert [(row.path, row.became) for row in found.rows if row.type == "linear"] == [("1", PRODUCT), ("3", PRODUCT)]
    assert not left.fused and "oneDNN's product of this size is faster" in left.rows[1].why


@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.full
@pytest.mark.parametrize("name", ["timm_vit", "mlp_sequential"])
def test_inductor_compiles_the_rest_of_the_graph(name):
    """Oracle: the model itself in float64, with gradients; a second batch size makes one graph for all others."""
    model = build(name, torch.float32).train()
    given = inputs(name, torch.float32)
    wide = copy.deepcopy(model).double()
    with using_backend("onednn"):
        compiled = torch.compile(outputs, backend="fastvit_triton", fullgraph=True)
        for x in (given, torch.cat((given, given))):
            got = results(compiled, model, x)
            assert_within_budget(got, results(outputs, model, x), results(outputs, wide, x.double()))
