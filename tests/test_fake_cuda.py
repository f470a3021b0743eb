"""torch.compile's tracing with fake tensors on "cuda", which runs what no other test without a GPU reaches."""

import ast
import contextlib
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from catalogue import COMMON, inputs, outputs
from torch import nn
from torch._dynamo.utils import warn_once_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

import fastvit_triton
from fastvit_triton.convert import backend as own
from fastvit_triton.kernels import OPS, backend, choose, launch, layer_norm, rms_norm
from fastvit_triton.kernels.backend import using_backend

GPU = SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="NVIDIA H100 80GB HBM3", gcnArchName="")
# autograd's nodes and some views ask for the device itself, which ends the process in builds for CPUs
NEEDS_CUDA_BUILD = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="PyTorch is built without CUDA")
OTHERS = (("auto", True), ("triton", False))
PHASES = ["inference", pytest.param("training", marks=NEEDS_CUDA_BUILD)]


def forget():
    """Clears what was read of the device."""
    choose.forget()
    backend._too_old.cache_clear()
    launch._architecture.cache_clear()


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """The properties of every "cuda" device are those of an H100."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: GPU)
    forget()
    yield
    forget()


def operators(call, arguments, switch, phase, rewritten=False, dynamic=False):
    """Names of the operators in the only graph of a call on "cuda", with arguments on "meta", without a warning."""
    kept = []

    def keep(graph, _):
        kept.append(graph)
        return graph.forward

    arguments = tree_map_only(torch.Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), arguments)
    compiler = partial(own.backend, inner=keep) if rewritten else keep
    warn_once_cache.clear()
    torch._dynamo.reset()
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(using_backend(switch))
        stack.enter_context(torch.set_grad_enabled(phase == "training"))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        call = call.to_empty(device="cuda") if isinstance(call, nn.Module) else call
        on_cuda = partial(torch.empty_like, device="cuda")
        arguments = tree_map_only(torch.Tensor, lambda t: on_cuda(t, requires_grad=t.requires_grad), arguments)
        try:
            torch.compile(call, backend=compiler, dynamic=dynamic, fullgraph=True)(**arguments)
        except torch._dynamo.exc.TorchRuntimeError as error:
            if "not linked with support for cuda" not in str(error):
                raise
            pytest.skip("PyTorch is built without CUDA, and refuses a view")
    (graph,) = kept
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    kinds = (torch.Tensor, int, torch.SymInt) if dynamic else torch.Tensor
    for node in nodes:
        values = tree_leaves(node.meta.get("example_value"))
        assert all(value is None or isinstance(value, kinds) for value in values), node.target
    return {str(node.target) for node in nodes} | {getattr(node.target, "__name__", "") for node in nodes}


class Called(nn.Module):
    """A model that is called by a function: models of the catalogue as their tests call them."""

    def __init__(self, model, call):
        super().__init__()
        self.model, self.call = model, call

    def forward(self, given):
        """What the function returns of the model and its input."""
        return self.call(self.model, given)


@pytest.mark.full
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    "switch, rewritten",
    [("auto", False), ("triton", True), *(pytest.param(*p, marks=pytest.mark.full) for p in OTHERS)],
)
def test_models(switch, rewritten, phase):
    """Oracle: one graph, whose calls return tensors; our operators are in that of "triton"."""

    def features(model, image):  # all but the head, which no build for CPUs can trace
        return model.forward_features(image)

    with torch.device("meta"):
        model = fastvit_triton.create_model("vit_tiny_patch16_224", depth=1).to(torch.bfloat16)
        image = torch.empty(2, 3, 224, 224, dtype=torch.bfloat16)
    found = operators(Called(model.train(phase == "training"), features), {"given": image}, switch, phase, rewritten)
    names = ("autograd_function_apply",) if phase == "training" else ("attention_fwd", "mlp_fwd")
    assert switch == "auto" or all(any(name in one for one in found) for name in names)


@pytest.mark.few(3)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("switch", ["triton", pytest.param("auto", marks=pytest.mark.full)])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_public_functions(op, switch, phase):
    """Oracle: one graph, whose calls return tensors, of the first case in float32 and bfloat16."""
    for dtype in (torch.float32, torch.bfloat16):
        operators(op.run, op.inputs(next(iter(op.cases.values())), dtype, "meta"), switch, phase)


@pytest.mark.parametrize("file", [layer_norm, rms_norm], ids=lambda file: file.OP.name)
def test_norms_of_any_width(file):
    """Oracle: as above, where the width is symbolic, as it is after a rearrangement of images into patches."""
    case = next(iter(file.OP.cases.values()))
    operators(file.OP.run, file.OP.inputs(case, torch.float32, "meta"), "triton", "inference", dynamic=True)


@NEEDS_CUDA_BUILD
@pytest.mark.parametrize(
    "name, dynamic", [("hf_dinov2_swiglu", False), ("timm_pvt_v2", False), ("vit_pytorch_vit", True), ("hf_swin", True)]
)
def test_converted_models(name, dynamic):
    """Oracle: as above."""
    model, given = COMMON[name].make().eval(), inputs(name, torch.float32)
    fastvit_triton.optimize(model)
    found = operators(Called(model, outputs), {"given": given}, "triton", "inference", dynamic=dynamic)
    assert any("attention_fwd" in one for one in found)


def test_constants_are_functions_of_constants():
    """Oracle: what Dynamo of the oldest PyTorch takes for a constant, which no module and no tensor is."""
    for path in sorted(Path(fastvit_triton.__file__).parent.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "constant\ndef " in text else ():
            marks = {ast.unparse(mark) for mark in getattr(node, "decorator_list", ())}
            if marks & {"constant", "backend.constant"}:
                kinds = {ast.unparse(argument.annotation) for argument in node.args.args}
                assert not kinds & {"nn.Module", "Tensor", "torch.Tensor"}, (path.name, node.name)
