"""Tests of the kernels under torch's tracing: opcheck, torch.compile, autocast, transforms, export, whole models."""

import contextlib
import functools
import types

import pytest
import timm
import torch
from budget import leaves, results
from commands import run_python
from functorch.compile import make_boxed_func
from interpreter import interpreting
from recording import Recorder
from sampling import sampled
from test_interpreter import STATS
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fastvit_triton as f
from fastvit_triton import create_model
from fastvit_triton.kernels import OPS, attention_qkv, backend, fold, onednn, op
from fastvit_triton.kernels.argument import Norm
from fastvit_triton.kernels.layer_norm import row_stats

pytestmark = pytest.mark.usefixtures("always_folded")


def randn(*shape, dtype=torch.float32):
    """A random leaf tensor that requires gradients."""
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


@functools.cache
def recorded(only=None):
    """Calls of each of our ops, forward and backward, distinct in a switch or in which tensors are given.

    With `only`, the name of a public op, those of the first case of this op.
    """
    with interpreting(), Recorder() as calls:
        for op_ in (*OPS, STATS) if only is None else [op_ for op_ in OPS if op_.name == only]:
            for case in list(op_.cases.values())[: 1 if only else None]:
                results(op_.run, op_.inputs(case, torch.float16, "cpu"))  # float32 results stand out
        with torch.no_grad():
            for biases in ((None, None), (torch.randn(3).half(), None)):
                fold.packed((torch.randn(3, 4).half(), torch.randn(2, 4).half()), biases)
        if only is None:
            attention_qkv.run_with_bias(randn(2, 5, 24).half(), 2, None, False, randn(24)).sum().backward()
        onednn.product_in_graph(randn(2, 5, 4), randn(3, 4), randn(3)).square().sum().backward()

    def kind(a):
        return a if isinstance(a, (bool, str)) else a is None

    return {(str(op_), *map(kind, arguments)): (op_, arguments) for op_, arguments in calls.found}


def detached(argument):
    """A tensor, or each tensor of a list, copied and detached."""
    if isinstance(argument, list):
        return [detached(item) for item in argument]
    return argument.detach().clone() if isinstance(argument, torch.Tensor) else argument


FIRST = [("fastvit_triton::attention_fwd", "attention"), ("fastvit_triton::linear_bwd", "linear")]
DEFINED = [pytest.param(n, None, marks=pytest.mark.full) for n in sorted(op.LIBRARY._op_defs)]


@pytest.mark.parametrize("name, only", FIRST + DEFINED)
def test_opcheck(name, only):
    """Oracle: torch.library.opcheck: schema, fake tensors, autograd registration, AOT dispatch with dynamic shapes."""
    calls = [call for (op_, *_), call in recorded(only).items() if op_ == f"{name.replace('::', '.')}.default"]
    assert calls, "no case of any op calls it"
    for op_, arguments in calls:
        with interpreting():
            outcome = torch.library.opcheck(op_, tuple(map(detached, arguments)))
        assert set(outcome.values()) == {"SUCCESS"}, outcome


def model_and_images() -> tuple[nn.Module, torch.Tensor]:
    """A small ViT with random weights that uses every kernel."""
    model = create_model("vit_digits_patch2_8", depth=1, embed_dim=24, init_values=0.5, drop_path_rate=0.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model, torch.randn(2, 1, 8, 8)


def gradients(model: nn.Module, logits: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of a fixed function of the logits, by parameter."""
    weights = torch.linspace(-1, 1, logits.numel()).view_as(logits)
    return list(torch.autograd.grad((logits * weights).sum(), list(model.parameters())))


def worst(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """The largest difference, relative to the largest gradient."""
    scale = max(float(w.abs().max()) for w in want)
    return max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True)) / scale


# Tolerance for sums of some hundred float32 terms through two matrix products, in another order.
TOLERANCE = 64 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("name", sampled("plain checkpointed post map qk_norm swiglu relative".split(), 3))
def test_models_run_on_the_kernels(name):
    """Oracle: the same model on the PyTorch path, logits and every gradient."""
    options = {
        "plain": {},
        "checkpointed": dict(grad_checkpointing=True),
        "post": dict(norm="post"),
        "map": dict(global_pool="map", reg_tokens=2),
        "qk_norm": dict(qk_norm=True),
        "swiglu": dict(mlp="swiglu"),
        "relative": dict(pos_embed="relative", global_pool="avg"),
    }[name]
    model = create_model("vit_digits_patch2_8", depth=1, embed_dim=24, **options)
    images = torch.randn(2, 1, 8, 8)
    want = model(images)
    want_grads = gradients(model, want)
    with interpreting():
        got = model(images)
        got_grads = gradients(model, got)
    assert worst([got.detach()], [want.detach()]) <= TOLERANCE and worst(got_grads, want_grads) <= TOLERANCE


@pytest.mark.parametrize("whose", ["ours", "timm"])
def test_qk_norms_without_weights_are_applied(whose):
    """Oracle: the untouched model on PyTorch; without the norms its logits differ by over 10⁴ tolerances."""
    bare = functools.partial(nn.LayerNorm, elementwise_affine=False)
    if whose == "timm":
        model = timm.models.vision_transformer.VisionTransformer(
            8, 2, 3, 5, embed_dim=24, depth=1, num_heads=2, qk_norm=True, norm_layer=bare
        ).eval()
        images = torch.randn(2, 3, 8, 8)
    else:
        model, images = model_and_images()
        attn = model.blocks[0].attn
        attn.q_norm, attn.k_norm = bare(attn.head_dim, eps=1e-6), bare(attn.head_dim, eps=1e-6)
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight.mul_(20)
        want = model(images)
        if whose == "timm":
            f.optimize(model)
        with interpreting():
            got = model(images)
        f.revert(model)
        model.blocks[0].attn.q_norm = model.blocks[0].attn.k_norm = nn.Identity()
        assert worst([model(images)], [want]) > 1e4 * TOLERANCE
    assert worst([got], [want]) <= TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.fast), True])
def test_kernels_are_nodes_of_one_graph(dynamic):
    """Oracle: eager mode with the same kernels; fullgraph=True raises on a graph break; the graph has our ops."""
    model, images = model_and_images()
    nodes = []

    def backend(graph, inputs):
        nodes.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return make_boxed_func(graph.forward)

    with interpreting():
        want = model(images)
        want_grads = gradients(model, want)
        compiled = torch.compile(model, backend=aot_autograd(fw_compiler=backend), fullgraph=True, dynamic=dynamic)
        got = compiled(images)
        got_grads = gradients(model, got)
    torch._dynamo.reset()
    for name in ("attention_fwd", "linear_fwd", "mlp_bwd", "patch_embed_fwd", "layer_norm_fwd", "linear_bwd"):
        assert any(name in node for node in nodes), (name, sorted(set(nodes)))
    assert worst([got.detach()], [want.detach()]) <= TOLERANCE and worst(got_grads, want_grads) <= TOLERANCE


@pytest.mark.full
def test_a_norm_passes_through_dynamo():
    """Oracle: the same kernels called with plain tuples; fullgraph=True raises on a graph break."""
    x, (w1, b1), (w2, b2), gamma, beta = (
        randn(2, 3, 6),
        (randn(8, 6), randn(8)),
        (randn(6, 8), randn(6)),
        randn(6),
        randn(6),
    )

    def call(x, norm):
        y = f.mlp(x, (w1, b1), (w2, b2), norm=norm(gamma, beta, 1e-6), residual=x)
        y = f.linear(y, w1, b1, norm=norm(gamma, beta, 1e-6))
        return f.attention_qkv(y[..., :6], 1, q_norm=norm(gamma[:2], None, 1e-6), k_norm=norm(None, None, 1e-6))

    with interpreting():
        want = call(x, lambda *parameters: parameters)
        got = torch.compile(call, backend="aot_eager", fullgraph=True)(x, Norm)
        grads = [torch.autograd.grad(y.square().sum(), (x, w1, w2, gamma)) for y in (got, want)]
    torch._dynamo.reset()
    assert worst([got.detach()], [want.detach()]) <= TOLERANCE and worst(*grads) <= TOLERANCE


@pytest.mark.full
def test_depthwise_under_dynamo():
    """Oracle: the same kernels in eager mode, for two batches and grids; fullgraph=True raises on a graph break."""
    weight, bias = nn.Parameter(randn(8, 1, 3, 3)), nn.Parameter(randn(8))  # whose sizes are constant

    def call(tokens, H, W):
        x = tokens[:, 1:].unflatten(1, (H, W))
        return f.depthwise(f.depthwise(x, weight, bias, residual=True), weight, stride=2, activation="gelu")

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for B, H, W in ((2, 3, 5), (3, 4, 6)):
        tokens = randn(B, 1 + H * W, 8)
        with interpreting():
            ys = [function(tokens, H, W) for function in (call, compiled)]
            grads = [torch.autograd.grad(y.square().sum(), (tokens, weight, bias)) for y in ys]
        assert worst([ys[1].detach()], [ys[0].detach()]) <= TOLERANCE and worst(*grads) <= TOLERANCE
    torch._dynamo.reset()


@pytest.mark.fast
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_eagers_dtypes(dtype):
    """Oracle: the PyTorch path under the same autocast: values, and the dtype of every op's and block's output."""
    model, images = model_and_images()

    def run(into):
        hooks = [m.register_forward_hook(lambda _, __, y, n=n: into.update({n: y})) for n, m in watched.items()]
        with torch.autocast("cpu", dtype):
            into["logits"] = model(images)
        for hook in hooks:
            hook.remove()

    watched = {"patch_embed": model.patch_embed, "block": model.blocks[0], "norm": model.norm}
    want, got = {}, {}
    run(want)
    with interpreting():
        run(got)
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        # the residual stream is a sum of a few rounded products
        error = float((got[name].detach().float() - tensor.detach().float()).abs().max())
        assert error <= 16 * torch.finfo(dtype).eps * float(tensor.detach().abs().max()), name


@pytest.mark.parametrize("op_", OPS, ids=lambda op_: op_.name)
def test_double_backward_raises(op_):
    """Oracle: one sentence, where PyTorch's decorator would treat the gradient as constant."""
    arguments = op_.inputs(next(iter(op_.cases.values())), torch.float32, "cpu")
    learning = [t for value in arguments.values() for t in leaves(value) if t.requires_grad]
    with interpreting():
        sums = [t.sum() for t in leaves(op_.run(**arguments)) if t.requires_grad]
        grads = torch.autograd.grad(sums, learning, create_graph=True)
        assert all(grad.requires_grad for grad in grads)
        with pytest.raises(RuntimeError, match=r"once; FASTVIT_TRITON_BACKEND=torch under .*\(SDPBackend.MATH\) gives"):
            sum(grad.square().sum() for grad in grads).backward()


BACKWARD_ONLY = {"deformable_attention": "PyTorch has no forward mode of grid_sample"}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # forward_ad's warning
@pytest.mark.parametrize("op_", [op_ for op_ in OPS if op_.name not in BACKWARD_ONLY], ids=lambda op_: op_.name)
def test_forward_mode_runs_pytorch(op_):
    """Oracle: the same dual tensors on PyTorch; outside of forward mode the kernels run again."""
    arguments = op_.inputs(next(iter(op_.cases.values())), torch.float32, "cpu")

    def tangents():
        def dual(value):
            if isinstance(value, torch.Tensor):
                value = value.detach()
                return forward_ad.make_dual(value, value.cos()) if value.is_floating_point() else value
            return tuple(dual(v) for v in value) if isinstance(value, tuple) else value

        with forward_ad.dual_level():
            outputs = leaves(op_.run(**{name: dual(value) for name, value in arguments.items()}))
            return [forward_ad.unpack_dual(t).tangent for t in outputs]

    want = tangents()
    with interpreting(), Recorder() as calls:
        got = tangents()
        assert not calls.found
        op_.run(**arguments)
    assert calls.found and all(t is not None for t in want[:1])
    for a, b in zip(got, want, strict=True):
        assert a is b is None or (a - b).abs().max() <= TOLERANCE * b.abs().max()


@pytest.mark.fast
@pytest.mark.parametrize("op_", OPS, ids=lambda op_: op_.name)
@pytest.mark.parametrize("name", backend.BACKENDS)
def test_meta_tensors_give_shapes_under_every_switch(op_, name):
    """Oracle: shapes and dtypes of the same call on a CPU."""
    arguments = op_.inputs(next(iter(op_.cases.values())), torch.float32, "cpu")

    def meta(value):
        if isinstance(value, torch.Tensor):
            return value.to("meta")
        return tuple(meta(v) for v in value) if isinstance(value, tuple) else value

    want = [(t.shape, t.dtype) for t in leaves(op_.run(**arguments))]
    with backend.using_backend(name):
        made = list(leaves(op_.run(**{name: meta(value) for name, value in arguments.items()})))
    assert [(t.shape, t.dtype) for t in made] == want and all(t.is_meta for t in made)


@pytest.mark.fast
@pytest.mark.parametrize("name", backend.BACKENDS)
def test_a_model_on_meta_gives_shapes_under_every_switch(name):
    """Oracle: the number of classes."""
    with backend.using_backend(name):
        with torch.device("meta"):
            model, images = model_and_images()
        assert model(images).shape == (2, 10) and model(images).is_meta


@pytest.mark.fast
@pytest.mark.parametrize("F", [64, 200])
def test_statistics_are_passed_on(F):
    """Oracle: row statistics of the output, merged over tiles; and the next LayerNorm computed from x alone."""
    x, weight = randn(2, 5, 33), randn(F, 33)
    with interpreting():
        y, stats = f.linear(x, weight, return_stats=True)
        norm = (torch.rand(F) + 0.5, torch.randn(F), 1e-5)
        w2 = torch.randn(7, F)
        with_stats, without = (f.linear(y, w2, norm=norm, stats=s) for s in (stats, None))
    want = row_stats(y)[:, 0]
    total = stats[..., 0].sum(1)
    assert (total - want[:, 0]).abs().max() <= TOLERANCE * y.detach().abs().sum(-1).max()
    assert worst([with_stats.detach()], [without.detach()]) <= TOLERANCE


def column(size):
    """A vector with a stride of two."""
    return torch.randn(size, 2)[:, 0]


STRIDED = {
    "weight": lambda x: f.linear(x, torch.randn(7, 6).t()),
    "fc1": lambda x: f.mlp(x, (torch.randn(7, 7).t(), None), (torch.randn(7, 7).t(), column(7))),
    "bias and layer scale": lambda x: f.linear(x, torch.randn(6, 7), column(6), layer_scale=column(6)),
    "sample_scale": lambda x: f.linear(x, torch.randn(6, 7), sample_scale=torch.tensor(2.0).expand(2)),
    "norm": lambda x: f.layer_norm(x, column(7), column(7), 1e-6),
    "folded norm": lambda x: f.linear(x, torch.randn(6, 7), norm=(column(7), column(7), 1e-6)),
    "kv_lens": lambda x: f.attention(*[x.view(2, 1, 3, 7)] * 3, kv_lens=torch.tensor([[1, 9], [3, 9]])[:, 0]),
    "patch bias": lambda x: f.patch_embed(x.view(2, 1, 3, 7), torch.randn(5, 1, 3, 7), column(5)),
    "fp32 layer scale": lambda x: f.linear(x.bfloat16(), torch.randn(6, 7).bfloat16(), layer_scale=torch.randn(6)),
    "fp32 prefix": lambda x: f.patch_embed(
        x.bfloat16().view(2, 1, 3, 7), torch.randn(5, 1, 3, 7).bfloat16(), prefix=torch.randn(1, 2, 5)
    ),
}


@pytest.mark.fast
@pytest.mark.parametrize("name", STRIDED)
def test_operands_of_any_stride_and_dtype(name):
    """Oracle: the PyTorch path on the same tensors, values and dtypes."""
    x, results = torch.randn(2, 3, 7), []
    for context in (contextlib.nullcontext(), interpreting()):
        torch.manual_seed(1)
        with context:
            results.append(STRIDED[name](x))
    want, got = results
    # bfloat16 rounds the branch once more in PyTorch than in the kernel
    eps = torch.finfo(torch.bfloat16 if "fp32" in name else torch.float32).eps
    assert got.dtype == want.dtype and worst([got.float()], [want.float()]) <= 16 * eps


@pytest.mark.fast
@pytest.mark.parametrize("size", [1e-4, 1e-6])
def test_small_layer_scale_keeps_fp16_gradients(size):
    """Oracle: float64, within ten roundings of fp16; the product of layer_scale and a weight would underflow."""
    layer_scale = torch.full((8,), size).half()
    tensors = [torch.randn(2, 3, 8), torch.randn(16, 8) * 0.05, torch.randn(8, 16) * 0.05]
    grads = []
    for dtype, context in ((torch.float64, contextlib.nullcontext()), (torch.float16, interpreting())):
        x, w1, w2 = (t.to(torch.float16).to(dtype).requires_grad_() for t in tensors)
        with context:
            y = f.mlp(x, (w1, None), (w2, None), layer_scale=layer_scale.to(dtype))
            grads.append(torch.autograd.grad(y, w1, torch.full_like(y, 1024.0)))
    assert worst([grads[1][0].double()], [grads[0][0]]) <= 10 * torch.finfo(torch.float16).eps


@pytest.mark.fast
def test_only_the_residual_learns():
    """Oracle: the residual's gradient equals the output's."""
    x, weight, residual = torch.randn(2, 7), torch.randn(6, 7), randn(2, 6)
    with interpreting():
        y = f.linear(x, weight, activation="gelu", residual=residual)
        (grad,) = torch.autograd.grad(y.sum(), residual)
    assert torch.equal(grad, torch.ones(2, 6))


@pytest.mark.full
def test_a_dynamic_batch_compiles_once():
    """Oracle: the number of graphs; mark_dynamic raises if a size is specialised."""
    model, _ = model_and_images()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with interpreting():
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for batch in (3, 5):
            images = torch.randn(batch, 1, 8, 8)
            torch._dynamo.mark_dynamic(images, 0)
            assert worst([compiled(images).detach()], [model(images).detach()]) <= TOLERANCE
    torch._dynamo.reset()
    assert len(graphs) == 1


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch.func's warning
def test_torch_func_runs_pytorch():
    """Oracle: the same transforms on PyTorch; outside of them the kernel runs again."""
    x, weight = torch.randn(3, 4, 6), torch.randn(5, 6)

    def loss(x):
        return f.linear(f.layer_norm(x, None, None, 1e-6), weight, activation="gelu").square().sum()

    transforms = (torch.func.grad(loss), torch.func.vmap(loss), torch.func.hessian(loss))
    want = [transform(x) for transform in transforms]
    with interpreting(), Recorder() as calls:
        assert all(torch.equal(t(x), w) for t, w in zip(transforms, want, strict=True)) and not calls.found
        loss(x)
    assert calls.found


def test_selective_checkpointing_keeps_attention():
    """Oracle: the gradient without checkpointing; a policy that saves the op's outputs makes it run once."""
    qkv, saved = torch.randn(2, 5, 3 * 8, requires_grad=True), torch.ops.fastvit_triton.attention_fwd.default

    def policy(context, function, *arguments, **options):
        return CheckpointPolicy.MUST_SAVE if function is saved else CheckpointPolicy.PREFER_RECOMPUTE

    def block(x):
        return f.layer_norm(f.attention_qkv(x, 2), None, None, 1e-6)

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    runs = []
    for options in (None, {}, {"context_fn": contexts}):
        with interpreting(), Recorder() as calls:
            y = block(qkv) if options is None else checkpoint(block, qkv, use_reentrant=False, **options)
            (grad,) = torch.autograd.grad(y.square().sum(), qkv)
        runs.append((grad, sum(function is saved for function, _ in calls.found)))
    assert all(torch.equal(grad, runs[0][0]) for grad, _ in runs)
    assert [count for _, count in runs] == [1, 2, 1]


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # PyTorch's own, in torch 2.11
@pytest.mark.parametrize("pool", ["token", "map"])
def test_export_holds_pytorch_only(tmp_path, pool):
    """Oracle: the model itself, at another batch size, after saving and loading."""
    model = f.create_model("vit_digits_patch2_8", depth=1, embed_dim=24, global_pool=pool).eval()
    program = torch.export.export(model, (torch.randn(2, 1, 8, 8),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    torch.export.save(program, tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2")
    called = {str(n.target) for n in program.graph.nodes if n.op == "call_function"}
    assert any("aten" in name for name in called) and not any("fastvit" in name for name in called)
    images = torch.randn(5, 1, 8, 8)
    assert torch.equal(program.module()(images), model(images))


def test_launches_enter_their_tensors_device(monkeypatch):
    """Oracle: torch.cuda.device is entered with the first tensor's device while the launcher runs."""
    seen, library = [], types.SimpleNamespace(define=lambda schema: None, impl=lambda name, run, key: seen.append(run))
    monkeypatch.setattr(op, "LIBRARY", library)
    monkeypatch.setattr(op, "REGISTERED", {})
    monkeypatch.setattr(torch.library, "register_fake", lambda *a, **k: None)

    @contextlib.contextmanager
    def device(which):
        seen.append(which)
        yield
        seen.append("left")

    monkeypatch.setattr(torch.cuda, "device", device)
    op.register("fold", "", lambda scale, tensor: seen.append("launched"), None)
    run, seen[:] = seen[0], []
    with FakeTensorMode():
        run(1.0, torch.empty(3, device="cuda:1"))
    assert seen == [torch.device("cuda:1"), "launched", "left"]


VARIABLES = """
import torch, fastvit_triton as f
from fastvit_triton.kernels.backend import set_backend
x, weight = torch.randn(2, 5, 3 * 8), torch.randn(6, 24)
def run():
    o = f.attention_qkv(x, 2)
    return o, f.layer_norm(o, None, None, 1e-6), f.linear(x, weight, activation="gelu")
got = run()
set_backend("torch")
for a, b in zip(got, run()):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
print("kernels ran:", not torch.equal(got[0], run()[0]))
"""


@pytest.mark.full  # by default test_kernels.py reads the variables in this process
def test_environment_variables_run_the_kernels():
    """Oracle: the PyTorch path in the same process; results that differ in some bits show that the kernels ran."""
    printed = run_python("-c", VARIABLES, TRITON_INTERPRET="1", FASTVIT_TRITON_BACKEND="triton")
    assert "kernels ran: True" in printed
