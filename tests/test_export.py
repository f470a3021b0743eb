"""Tests of deployment: PyTorch's own backends, torch.export, AOTInductor and ONNX, on our models and optimised ones."""

import copy
import shutil
from functools import partial

import pytest
import torch
from agreement import normal
from budget import allowed, telling
from catalogue import build
from functorch.compile import make_boxed_func
from interpreter import interpreting
from sampling import sampled
from torch._dynamo.backends.common import aot_autograd

from fastvit_triton import create_model, optimize, revert
from fastvit_triton.convert.backend import backend
from fastvit_triton.deploy.export import Exported

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:.*`isinstance.treespec, LeafSpec"),  # PyTorch's warnings
]
needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None, reason="Inductor needs a C++ compiler"
)
OURS = "ours"
BATCH = {0: torch.export.Dim.DYNAMIC}


def made(name):
    """(model in float32, optimised unless it is ours; the untouched model in float64), with random parameters."""
    if name != OURS:
        truth = build(name).eval()
    else:
        tiny = dict(img_size=32, embed_dim=24, num_heads=2, depth=2, num_classes=5)
        truth = normal(create_model("vit_tiny_patch16_224", **tiny, init_values=0.5).double().eval())
    model = copy.deepcopy(truth).float()
    truth.load_state_dict({key: value.double() for key, value in model.state_dict().items()})
    if name != OURS:
        assert optimize(model).fused
    return model, truth


def first(y):
    """The first tensor of a model's output."""
    return y if isinstance(y, torch.Tensor) else next(iter(y.values()) if isinstance(y, dict) else iter(y))


def assert_close(got, own, truth):
    """Asserts error ≤ 2 · (the eager model's own error in float32 + one rounding), where `truth` is float64."""
    got, own = (t.detach().double() for t in (got, own))
    most = allowed((own - truth).norm(), telling(truth).norm(), torch.float32)
    assert got.shape == truth.shape and (got - truth).norm() <= most


def gradients(run, model, images):
    """Output and gradients of a training step, in one vector each, where cancelling gradients weigh little."""
    y = first(run(images))
    grads = torch.autograd.grad(y.square().sum(), list(model.parameters()), allow_unused=True)
    return y, torch.cat([g.flatten() for g in grads if g is not None])


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["timm_deit3", *(pytest.param(n, marks=pytest.mark.full) for n in (OURS, "torchvision_vit"))]
)
def test_our_backend_after_optimize(name):
    """Oracle: the untouched model, output and gradients; the kernels that conversion chose are in the graph."""
    model, truth = made(name)
    images, seen = torch.randn(2, 3, 32, 32), []
    own = gradients(model, model, images)

    def keep(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    with interpreting():
        compiler = partial(backend, inner=aot_autograd(fw_compiler=keep))
        got = gradients(torch.compile(model, backend=compiler, fullgraph=True), model, images)
    kernels = ("patch_embed_fwd", "linear_fwd", "attention_fwd", "attention_bwd", "mlp_bwd")
    assert {f"fastvit_triton.{kernel}.default" for kernel in kernels} <= set(seen)
    for one, plain, want in zip(got, own, gradients(truth, truth, images.double()), strict=True):
        assert_close(one, plain, want.detach())


@pytest.mark.full  # by default, test_backend.py compiles a graph with Inductor
@needs_compiler
@pytest.mark.parametrize("compiler", ["fastvit_triton", "inductor"])
@pytest.mark.parametrize("name", [OURS, "timm_deit3"])
def test_inductor(name, compiler):
    """Oracle: the untouched model; one graph, compiled to C++."""
    model, truth = made(name)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        got = torch.compile(model, backend=compiler, fullgraph=True)(images)
        assert_close(got, model(images), truth(images.double()))


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch 2.11, reading a file
@pytest.mark.parametrize(
    "name", sampled([OURS, "timm_deit3", "timm_eva02", "hf_vit", "torchvision_vit", "vit_pytorch_simple"], 3)
)
def test_exported_programs_save_and_load(name, tmp_path):
    """Oracle: the untouched model, for another batch size; the loaded program contains none of our operators."""
    model, truth = made(name)
    program = torch.export.export(model, (torch.randn(2, 3, 32, 32),), dynamic_shapes=(BATCH,), strict=False)
    torch.export.save(program, tmp_path / "model.pt2")
    program, images = torch.export.load(tmp_path / "model.pt2"), torch.randn(3, 3, 32, 32)
    assert not any("fastvit_triton" in str(node.target) for node in program.graph.nodes)
    with torch.no_grad():
        got, own = (first(run(images)) for run in (program.module(), model))
        assert_close(got, own, first(truth(images.double())))


@needs_compiler
@pytest.mark.full
def test_aotinductor(tmp_path):
    """Oracle: the untouched model; a program of the optimised model runs without its Python code."""
    model, truth = made("timm_deit3")
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        program = torch.export.export(model, (images,))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        got = torch._inductor.aoti_load_package(path)(images)
        assert_close(got, model(images), truth(images.double()))


@pytest.mark.full
def test_onnx_after_revert(tmp_path):
    """Oracle: the untouched model of transformers, whose output is a dict, in onnxruntime, for another batch."""
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    model, truth = made("hf_vit")
    revert(model)
    path, images = tmp_path / "model.onnx", torch.randn(3, 3, 32, 32)
    given = torch.randn(2, 3, 32, 32)
    torch.onnx.export(model, (given,), path, dynamo=True, verbose=False, dynamic_shapes=(BATCH,))
    session = onnxruntime.InferenceSession(path)
    (got, *_) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    with torch.no_grad():
        assert_close(torch.from_numpy(got), first(model(images)), first(truth(images.double())))


@pytest.mark.fast
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_jit_trace_records_only_pytorch():
    """Oracle: the operators in the graph of our model, traced where the kernels would run, and the model's output."""
    model, truth = made(OURS)
    images = torch.randn(2, 3, 32, 32)
    with interpreting():
        traced = torch.jit.trace(model, images, check_trace=False)
    assert "fastvit_triton::" not in str(traced.inlined_graph)
    with torch.no_grad():
        want, exact = model(images), truth(images.double())
        assert (traced(images) - want).norm() <= 2 * (want - exact).norm()


def test_what_was_exported_prints_as_one_line():
    """Oracle: by hand."""
    assert str(Exported(dict(model="M", classes=["a"]), None, 1e-5)) == "M, not compared with PyTorch"
    assert "M, largest difference from PyTorch 2.0e-06 (rounding" in str(Exported(dict(model="M"), 2e-6, 1e-5))
