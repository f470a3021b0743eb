"""How torch sees the kernels: opcheck, one graph under torch.compile, autocast, checkpointing, whole models."""

import contextlib
import os
import subprocess
import sys

import pytest
import torch
from functorch.compile import make_boxed_func
from interpreter import interpreting
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

import fastvit_triton as f
from fastvit_triton import create_model
from fastvit_triton.kernels import OPS, attention, layer_norm, linear, mlp, patch_embed, rope
from fastvit_triton.kernels.linear import row_stats


def randn(*shape, dtype=torch.float32):
    """A leaf that requires gradients."""
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


OPCHECKS = {
    "layer_norm": lambda: (
        layer_norm._Fn and (layer_norm._fwd_op, (randn(3, 5), None, randn(5), randn(5), 1e-6, None, None, False))
    ),
    "layer_norm_add": lambda: (
        layer_norm._fwd_op,
        (randn(3, 5), randn(3, 5), randn(5), None, 1e-6, randn(5), None, False),
    ),
    "attention": lambda: (attention._fwd_op, (*(randn(2, 3, 7, 8) for _ in range(3)), None, None, None, 0, 0.3)),
    "fold": lambda: (linear._fold_op, (randn(6, 5), randn(6), randn(5), None, torch.float32)),
    "linear": lambda: (
        linear._fwd_op,
        (randn(3, 5), randn(6, 5), randn(6), None, None, 0.0, "gelu", None, None, randn(3, 6), True, True),
    ),
    "linear_bwd": lambda: (
        linear._bwd_op,
        (
            *(randn(3, 6), randn(3, 5), randn(6, 5), randn(6), randn(3, 6), randn(6), None, randn(3), randn(3)),
            *(randn(5), randn(5), "gelu", True, True),
        ),
    ),
    "rope": lambda: (
        rope._fwd_op,
        (randn(2, 5, 3, 2, 8), randn(8), None, randn(8), randn(8), randn(4, 8), randn(4, 8), True, 1, 1e-6, 1e-6),
    ),
    "rope_bwd": lambda: (
        rope._bwd_op,
        (*(randn(2, 5, 3, 2, 8) for _ in "dx"), randn(8), None, randn(2, 4, 8), randn(2, 4, 8), False, 1, 1e-6, 0.0),
    ),
    "mlp_activate": lambda: (mlp._activate_op, (randn(3, 8), "swiglu")),
    "patch_embed": lambda: (
        patch_embed._fwd_op,
        (randn(2, 3, 4, 4), randn(5, 3, 2, 2), randn(5), randn(1, 5, 5), randn(1, 1, 5), None, None),
    ),
}


@pytest.mark.parametrize("name", OPCHECKS)
def test_opcheck(name):
    """Oracle: torch.library.opcheck: schema, fake tensors, autograd registration, AOT dispatch with dynamic shapes."""
    op, arguments = OPCHECKS[name]()
    arguments = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in arguments)
    with interpreting():
        outcome = torch.library.opcheck(op, arguments)
    assert set(outcome.values()) == {"SUCCESS"}, outcome


def model_and_images() -> tuple[nn.Module, torch.Tensor]:
    """A small ViT that uses every kernel, with random weights."""
    model = create_model("vit_digits_patch2_8", depth=1, embed_dim=24, init_values=0.5, drop_path_rate=0.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model, torch.randn(2, 1, 8, 8)


def gradients(model: nn.Module, logits: torch.Tensor) -> list[torch.Tensor]:
    """Of a fixed function of the logits, by parameter."""
    weights = torch.linspace(-1, 1, logits.numel()).view_as(logits)
    return list(torch.autograd.grad((logits * weights).sum(), list(model.parameters())))


def worst(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """The largest distance, in units of the largest gradient."""
    scale = max(float(w.abs().max()) for w in want)
    return max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True)) / scale


# Sums of at most some hundred fp32 terms through two matrix products in another order.
TOLERANCE = 64 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("name", ["plain", "checkpointed", "post", "map", "qk_norm", "swiglu", "relative"])
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


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own
@pytest.mark.parametrize("dynamic", [False, True])
def test_kernels_are_nodes_of_one_graph(dynamic):
    """Oracle: eager, through the same kernels; fullgraph=True raises on a graph break, and the graph holds our ops."""
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
    for op in ("attention_fwd", "linear_fwd", "mlp_activate", "patch_embed_fwd", "layer_norm_fwd", "linear_bwd"):
        assert any(op in node for node in nodes), (op, sorted(set(nodes)))
    assert worst([got.detach()], [want.detach()]) <= TOLERANCE and worst(got_grads, want_grads) <= TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_eagers_dtypes(dtype):
    """Oracle: the PyTorch path under the same autocast: dtype of every op's and block's output, and values."""
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
        # the stream is a sum of a few dtype-rounded products
        error = float((got[name].detach().float() - tensor.detach().float()).abs().max())
        assert error <= 16 * torch.finfo(dtype).eps * float(tensor.detach().abs().max()), name


def test_double_backward_is_refused():
    """Oracle: PyTorch's own sentence for functions that are differentiable once."""
    x = randn(2, 3, 5)
    with interpreting():
        y = f.layer_norm(x, None, None, 1e-6)
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


def test_selective_checkpointing_recomputes_the_kernels():
    """Oracle: the same gradient without it."""
    qkv = randn(2, 5, 3 * 8)
    with interpreting():
        grads = []
        for function in (
            lambda x: f.attention_qkv(x, 2),
            lambda x: checkpoint(f.attention_qkv, x, 2, use_reentrant=False),
        ):
            grads.append(torch.autograd.grad(function(qkv).square().sum(), qkv)[0])
    assert torch.equal(*grads)


def test_kernels_repeat_bit_by_bit():
    """Oracle: the first run; no sum depends on the order in which programs end."""
    for op in OPS:
        case = next(iter(op.ragged.values()))
        runs = []
        for _ in range(2):
            arguments = op.inputs(case, torch.float32, "cpu")
            with interpreting():
                y = op.run(**arguments)
                y = y[0] if isinstance(y, tuple) else y
                leaf = next(a for a in arguments.values() if isinstance(a, torch.Tensor) and a.requires_grad)
                runs.append((y, *torch.autograd.grad(y.sum(), leaf)))
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True)), op.name


@pytest.mark.parametrize("F", [64, 200])
def test_statistics_travel(F):
    """Oracle: row statistics of the output, merged over tiles; and the next LN computed from x alone."""
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
    """A vector whose entries lie two apart."""
    return torch.randn(size, 2)[:, 0]


STRIDED = {
    "weight": lambda x: f.linear(x, torch.randn(7, 6).t()),
    "fc1": lambda x: f.mlp(x, (torch.randn(7, 7).t(), None), (torch.randn(7, 7).t(), column(7))),
    "bias and gamma": lambda x: f.linear(x, torch.randn(6, 7), column(6), gamma=column(6)),
    "sample_scale": lambda x: f.linear(x, torch.randn(6, 7), sample_scale=torch.tensor(2.0).expand(2)),
    "norm": lambda x: f.layer_norm(x, column(7), column(7), 1e-6),
    "folded norm": lambda x: f.linear(x, torch.randn(6, 7), norm=(column(7), column(7), 1e-6)),
    "kv_lens": lambda x: f.attention(*[x.view(2, 1, 3, 7)] * 3, kv_lens=torch.tensor([[1, 9], [3, 9]])[:, 0]),
    "patch bias": lambda x: f.patch_embed(x.view(2, 1, 3, 7), torch.randn(5, 1, 3, 7), column(5)),
    "fp32 gamma": lambda x: f.linear(x.bfloat16(), torch.randn(6, 7).bfloat16(), gamma=torch.randn(6)),
    "fp32 prefix": lambda x: f.patch_embed(
        x.bfloat16().view(2, 1, 3, 7), torch.randn(5, 1, 3, 7).bfloat16(), prefix=torch.randn(1, 2, 5)
    ),
}


@pytest.mark.parametrize("name", STRIDED)
def test_operands_of_any_stride_and_dtype(name):
    """Oracle: the PyTorch path on the same tensors, in value and dtype."""
    x, results = torch.randn(2, 3, 7), []
    for context in (contextlib.nullcontext(), interpreting()):
        torch.manual_seed(1)
        with context:
            results.append(STRIDED[name](x))
    want, got = results
    # bfloat16 rounds the branch once more in PyTorch than in the kernel
    eps = torch.finfo(torch.bfloat16 if "fp32" in name else torch.float32).eps
    assert got.dtype == want.dtype and worst([got.float()], [want.float()]) <= 16 * eps


@pytest.mark.parametrize("size", [1e-4, 1e-6])
def test_small_layer_scale_keeps_fp16_gradients(size):
    """Oracle: float64. Budget: ten roundings of fp16; gamma times a weight alone would underflow."""
    gamma = torch.full((8,), size).half()
    tensors = [torch.randn(2, 3, 8), torch.randn(16, 8) * 0.05, torch.randn(8, 16) * 0.05]
    grads = []
    for dtype, context in ((torch.float64, contextlib.nullcontext()), (torch.float16, interpreting())):
        x, w1, w2 = (t.to(torch.float16).to(dtype).requires_grad_() for t in tensors)
        with context:
            y = f.mlp(x, (w1, None), (w2, None), gamma=gamma.to(dtype))
            grads.append(torch.autograd.grad(y, w1, torch.full_like(y, 1024.0)))
    assert worst([grads[1][0].double()], [grads[0][0]]) <= 10 * torch.finfo(torch.float16).eps


def test_only_the_residual_learns():
    """Oracle: its gradient is the output's."""
    x, weight, residual = torch.randn(2, 7), torch.randn(6, 7), randn(2, 6)
    with interpreting():
        y = f.linear(x, weight, activation="gelu", residual=residual)
        (grad,) = torch.autograd.grad(y.sum(), residual)
    assert torch.equal(grad, torch.ones(2, 6))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own
def test_a_dynamic_batch_compiles_once():
    """Oracle: the number of graphs; mark_dynamic raises where a size is specialised."""
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


def test_strided_and_broadcast_inputs():
    """Oracle: the same values stored contiguously; an expanded cotangent has stride 0."""
    base = torch.randn(4, 6, 2, 10)
    views = [base[1:3, :, :, 1:9].transpose(1, 2), base.permute(0, 2, 3, 1)[:2, :, :8].mT.contiguous().mT[:, :, :, :8]]
    for view in views:
        view = view.requires_grad_()
        results = []
        for q in (view, view.detach().clone(memory_format=torch.contiguous_format).requires_grad_()):
            with interpreting():
                o = f.attention(q, q, q)
                (grad,) = torch.autograd.grad(o.sum(), q)
            results.append((o.detach(), grad))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


VARIABLES = """
import torch, fastvit_triton as f
from fastvit_triton.kernels.op import set_backend
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


def test_environment_variables_run_the_kernels():
    """Oracle: the PyTorch path in the same process; other bits show that the kernels really ran."""
    variables = os.environ | {"TRITON_INTERPRET": "1", "FASTVIT_TRITON_BACKEND": "triton"}
    done = subprocess.run([sys.executable, "-c", VARIABLES], capture_output=True, text=True, env=variables)
    assert done.returncode == 0 and "kernels ran: True" in done.stdout, done.stderr
