"""Tests of `torch.compile(backend="fastvit_triton")`: which calls it rewrites, and that results equal eager's."""

import copy
import logging
import os
import re
import runpy
import shutil
import sys
from functools import partial
from pathlib import Path

import captured
import pytest
import timm
import torch
import torch.nn.functional as F
from agreement import results, seeded
from budget import assert_within_budget
from catalogue import COMMON, PYRAMIDS, REPEATS, build, inputs, outputs, redraw
from commands import run_python
from functorch.compile import make_boxed_func
from interpreter import interpreting
from sampling import marked, sampled
from timm.models import convnext, densenet, metaformer, mlp_mixer, regnet, resnet
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.testing._internal.two_tensor import TwoTensor

from benchmarks.launch_recorder import recording
from fastvit_triton import convert, create_model
from fastvit_triton.convert import backend

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:.*The .grad attribute of a Tensor", "ignore:.*torch.jit"),  # of Dynamo
]
ROOT = Path(__file__).parent.parent
ATTENTION = ("scaled_dot_product_attention", "softmax", "multi_head_attention")


@pytest.fixture
def gpu(monkeypatch):
    """Makes the CPU count as a GPU while graphs are rewritten; the rewritten calls run the references."""
    captured.as_on_gpu(monkeypatch)


class Eager:
    """A backend that rewrites graphs like ours and runs AOTAutograd's graph node by node."""

    def __init__(self):
        self.graphs, self.nodes, self.rows = [], [], []

    def __call__(self, graph, given):
        self.graphs.append(graph)
        self.rows += backend.rewrite(graph).rows
        with backend.compiling():
            return aot_autograd(fw_compiler=self._keep)(graph, given)

    def _keep(self, graph, _):
        self.nodes += [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        return make_boxed_func(graph.forward)

    @property
    def became(self):
        """What each candidate was rewritten to."""
        return {row.became for row in self.rows if row.became is not None}


def cast(given, dtype):
    """Images, or a dictionary of tensors, with floating-point values in this dtype."""
    if isinstance(given, dict):
        return {k: cast(v, dtype) for k, v in given.items()}
    return given.to(dtype) if given.is_floating_point() else given


def check(model, given, run=lambda model, given: model(given), dynamic=None, fullgraph=True):
    """Compiles a float32 copy of a float64 model, checks it against its budget, and returns the stand-in compiler."""
    plain = copy.deepcopy(model).float()
    model.load_state_dict(cast(plain.state_dict(), torch.float64))
    single = cast(given, torch.float32)
    eager = Eager()
    compiled = torch.compile(run, backend=eager, dynamic=dynamic, fullgraph=fullgraph)
    got = results(compiled, copy.deepcopy(plain), single)
    assert_within_budget(got, results(run, plain, single), results(run, model, cast(single, torch.float64)))
    return eager


# Candidates that are not attention in our sense, by model: talking heads, masks of heads.
NOT_ATTENTION = {"timm_cait": 2, "hf_siglip2": 1}
HEAVY = [*REPEATS, *(n for n in PYRAMIDS if n not in ("timm_swin", "timm_tnt"))]


EACH = [pytest.param(n, marks=pytest.mark.full if n in HEAVY else ()) for n in COMMON]
EACH = marked(EACH, pytest.mark.fast, lambda name: name == "timm_vit")


@pytest.mark.full
@pytest.mark.parametrize("name", sampled(EACH, 6))
def test_models_equal_the_original(name, gpu):
    """Oracle: the unmodified model, every gradient; truth in float64. All of its attention must be rewritten."""
    whole = name not in ("timm_naflex", "hf_mae")  # these models have graph breaks
    eager = check(build(name).train(), inputs(name), outputs, fullgraph=whole)
    assert {"mlp", "linear"} & eager.became or name == "torch_multihead"
    left = [row for row in eager.rows if row.type in ATTENTION and row.became is None]
    assert len(left) == NOT_ATTENTION.get(name, 0), left


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [  # test_convert.py compiles them with kernels in more turns
        pytest.param(n, marks=() if n == "timm_swin" else pytest.mark.full(one_in=4))
        for n in PYRAMIDS
        if "hf_" not in n
    ],
)
def test_optimised_pyramids_of_any_batch_equal_the_original(name, gpu, references):
    """Oracle: the model that `optimize` converted, uncompiled; one graph serves every number of images."""
    model, images, eager = build(name, torch.float32).eval(), inputs(name, torch.float32), Eager()
    convert.optimize(model)
    compiled = torch.compile(outputs, backend=eager, fullgraph=True)
    torch._dynamo.mark_dynamic(images, 0)
    with torch.no_grad():
        for given in (images, torch.cat((images, images[:1]))):
            got, want = compiled(model, given), outputs(model, given)
            assert (got - want).norm() <= 84 * torch.finfo(torch.float32).eps * want.norm()  # as in test_models.py
    assert {"mlp", "linear"} & eager.became and len(eager.graphs) == 1


INFERRED = "timm_deit3 timm_beit hf_dinov3 vit_pytorch_vit torch_encoder_layer torch_encoder_layer_first".split()


@pytest.mark.full
@pytest.mark.parametrize("name", sampled(INFERRED, 3))
def test_inference_equals_the_original(name, gpu):
    """Oracle: the unmodified model in eval mode without gradients."""
    model, given = build(name).eval(), inputs(name)
    plain, eager = copy.deepcopy(model).float(), Eager()
    with torch.no_grad():
        compiled = torch.compile(outputs, backend=eager, fullgraph=True)
        found = [{"output": run(m, cast(given, next(m.parameters()).dtype)).double()} for run, m in (
            (compiled, plain), (outputs, plain), (outputs, copy.deepcopy(plain).double()))]  # fmt: skip
    assert_within_budget(*found)
    assert any("attention" in word for word in eager.became)


@pytest.mark.full
@pytest.mark.parametrize("fused", [pytest.param(True, marks=pytest.mark.full), False])
def test_timm_without_fused_attention(fused, gpu):
    """Oracle: the same model, in which timm then writes softmax out."""
    timm.layers.set_fused_attn(fused)
    try:
        eager = check(build("timm_vit").train(), inputs("timm_vit"))
    finally:
        timm.layers.set_fused_attn(True)
    assert eager.became == {"patch_embed", "linear", "attention_qkv", "mlp", "layer_norm"}
    assert [r.type for r in eager.rows if r.became is None] == ["linear"]  # the head


@pytest.mark.full
def test_our_models_are_rewritten(gpu):
    """Oracle: the model itself; its references are PyTorch calls and are rewritten like any other model's."""
    model = create_model("vit_digits_patch2_8", depth=2, embed_dim=24, init_values=0.1).double()
    eager = check(model.train(), torch.randn(2, 1, 8, 8, dtype=torch.float64))
    assert {"patch_embed", "attention_qkv", "mlp"} <= eager.became


@pytest.mark.fast
def test_drop_path_draws_are_unchanged(gpu):
    """Oracle: the original model in training mode with the same seed."""
    options = dict(img_size=32, patch_size=16, embed_dim=24, depth=2, num_heads=2, drop_path_rate=0.5, init_values=0.1)
    model = timm.models.VisionTransformer(**options).train()
    images, eager = torch.randn(8, 3, 32, 32), Eager()

    def seeded(run, model, images):
        torch.manual_seed(7)
        return run(images)

    want = results(partial(seeded, model), model, images)
    got = results(partial(seeded, torch.compile(model, backend=eager, fullgraph=True)), model, images)
    assert_within_budget(got, want, want)
    scaled = [n for g in eager.graphs for n in g.graph.nodes if n.kwargs.get("sample_scale") is not None]
    assert len(scaled) == 2  # both branches of the block with drop path


@pytest.mark.full
def test_checkpointed_blocks_are_rewritten(gpu):
    """Oracle: the model itself; each block is a separate graph."""
    model = build("timm_vit").train()
    model.set_grad_checkpointing(True)
    eager = check(model, inputs("timm_vit"))
    assert [row.became for row in eager.rows].count("mlp") == 2 * 4


@pytest.mark.full
@pytest.mark.parametrize("name, dtype", sampled([("timm_deit3", torch.bfloat16), ("hf_vit_eager", torch.float16)], 2))
def test_autocast(name, dtype, gpu):
    """Oracle: the model under the same autocast, dtypes and values; truth in float64."""

    def run(model, given):
        with torch.autocast("cpu", dtype, enabled=given.dtype != torch.float64):
            return outputs(model, given)

    plain = build(name, torch.float32).train()
    images, eager = inputs(name, torch.float32), Eager()

    def inside(model, given):  # autocast is on during capture, but not part of the graph
        with torch.autocast("cpu", dtype):
            return torch.compile(outputs, backend=eager, fullgraph=True)(model, given)

    baseline, truth = results(run, plain, images), results(run, copy.deepcopy(plain).double(), images.double())
    for compiled in (inside, torch.compile(run, backend=eager, fullgraph=True)):
        assert compiled(plain, images).dtype == run(plain, images).dtype
        assert_within_budget(results(compiled, plain, images), baseline, truth, dtype)
    assert {"patch_embed", "linear", "mlp"} <= eager.became


def test_tensor_subclasses_are_not_rewritten(gpu):
    """Oracle: eager PyTorch; quantised and sharded weights are subclasses that define their own operators."""
    weight, x, eager = TwoTensor(W24, W24.clone()), torch.randn(X), Eager()
    got = torch.compile(lambda x, w: F.gelu(F.linear(norm(x), w)), backend=eager, fullgraph=True)(x, weight)
    assert not eager.became and torch.equal(got.a, F.gelu(layer(x, W24)))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_transforms_inside_a_graph(gpu):
    """Oracle: torch.func in eager."""

    def loss(x):
        return F.gelu(layer(x, W)).square().sum()

    x, eager = torch.randn(X), Eager()
    for transform in (torch.func.grad(loss), torch.func.vmap(loss)):
        got, want = torch.compile(transform, backend=eager, fullgraph=True)(x), transform(x)
        assert (got - want).norm() <= 64 * torch.finfo(torch.float32).eps * want.norm()


FOREIGN = {
    "resnet": lambda: resnet.ResNet(resnet.BasicBlock, (1, 1, 1, 1), num_classes=4),
    "regnet": lambda: regnet.RegNet(regnet.RegNetCfg(depth=4, w0=8, wa=8.0, wm=1.3, group_size=8), num_classes=4),
    "densenet": lambda: densenet.DenseNet(8, (1, 1), num_classes=4),
    "poolformer": lambda: metaformer.MetaFormer(
        depths=(1, 1), dims=(8, 16), token_mixers=metaformer.Pooling, num_classes=4
    ),
    "convnext_conv": lambda: convnext.ConvNeXt(depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), conv_mlp=True, num_classes=4),
    "convnext": lambda: convnext.ConvNeXt(depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), num_classes=4),
    "mixer": lambda: mlp_mixer.MlpMixer(img_size=32, patch_size=16, embed_dim=16, num_blocks=1, num_classes=4),
    "gmlp": lambda: mlp_mixer.MlpMixer(
        img_size=32, patch_size=16, embed_dim=16, num_blocks=1, num_classes=4,
        mlp_ratio=2, mlp_layer=timm.layers.GatedMlp, block_layer=mlp_mixer.SpatialGatingBlock,
    ),
}  # fmt: skip
EXPECTED = {
    "poolformer": {"layer_norm", "linear"},  # of its classification head
    "convnext": {"layer_norm", "mlp"},
    "mixer": {"patch_embed", "mlp", "layer_norm"},
    "gmlp": {"patch_embed", "linear", "layer_norm"},
}


@pytest.mark.full
@pytest.mark.parametrize("name", sampled(FOREIGN, 3))
def test_other_architectures_equal_the_original(name, gpu):
    """Oracle: the model itself. Convolutional models stay unchanged, node for node; others are rewritten in part."""
    model, images = redraw(FOREIGN[name]()).eval(), torch.randn(2, 3, 32, 32)
    eager, before = Eager(), []
    with torch.no_grad():
        want = model(images)

        def compiler(graph, given):
            before.extend(str(n) for n in graph.graph.nodes)
            return eager(graph, given)

        got = torch.compile(model, backend=compiler, fullgraph=True)(images)
        truth = copy.deepcopy(model).double()(images.double())
    assert eager.became == EXPECTED.get(name, set())
    if not eager.became:
        assert [str(n) for n in eager.graphs[0].graph.nodes] == before and torch.equal(got, want)
    assert_within_budget(*({"output": t.double()} for t in (got, want, truth)))


@pytest.mark.full
@pytest.mark.parametrize("name", ["timm_deit3", pytest.param("hf_vit_eager", marks=pytest.mark.full)])
def test_kernels_run_forward_and_backward(name):
    """Oracle: the unmodified model, every gradient; the kernels run in the interpreter."""
    with interpreting():
        eager = check(build(name).train(), inputs(name), outputs)
    names = ("patch_embed_fwd", "fold", "linear_fwd", "attention_fwd", "layer_norm_fwd", "layer_norm_bwd")
    for op in (*names, "mlp_bwd", "attention_bwd", "linear_bwd", "patch_embed_bwd"):
        assert f"fastvit_triton.{op}.default" in eager.nodes


@pytest.mark.full
def test_a_dynamic_batch_compiles_once(gpu):
    """Oracle: number of graphs after two batch sizes; mark_dynamic raises if a size is specialised."""
    model, eager, graphs = build("timm_vit", torch.float32).eval(), Eager(), 0
    compiled = torch.compile(model, backend=eager, fullgraph=True, dynamic=True)
    for batch in (3, 5):
        images = torch.randn(batch, 3, 32, 32)
        torch._dynamo.mark_dynamic(images, 0)
        with torch.no_grad():
            got, want = (outputs(run, images) for run in (compiled, model))
        assert (got - want).norm() <= 64 * torch.finfo(torch.float32).eps * want.norm()  # as test_kernel_graphs
        graphs = graphs or len(eager.graphs)
    assert len(eager.graphs) == graphs and {"patch_embed", "attention_qkv", "mlp"} <= eager.became


@pytest.mark.full
def test_a_block_is_five_launches(always_folded):
    """Oracle: launches of three blocks minus those of two, in bfloat16 inference; only views lie between them."""

    def launches(depth):
        options = dict(img_size=32, patch_size=16, embed_dim=256, num_heads=2, depth=depth)
        model = timm.models.VisionTransformer(**options).to(torch.bfloat16).eval()
        kept = []

        def keep(graph, _):
            kept.append(graph)
            return lambda *given: kept.append(given) or graph(*given)

        with torch.no_grad(), interpreting():
            rewriting = partial(backend.backend, inner=keep)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.fx.GraphModule, "__call__", lambda self, *a: (torch.zeros(2, 1000),))
                torch.compile(model, backend=rewriting)(torch.randn(2, 3, 32, 32, dtype=torch.bfloat16))
        graph, given = kept
        calls = [n.target.__name__ for n in graph.graph.nodes if n.op == "call_function"]
        with torch.no_grad(), recording("sm_90") as found:
            graph.forward(*given)
        return [launch.name for launch in found], calls

    (three, calls), (two, fewer) = launches(3), launches(2)
    read_images = [name for name in three if "fold" not in name]
    assert len(read_images) - sum("fold" not in name for name in two) == 5
    assert len(three) - len(two) == 5 + 2  # two more fold weights
    assert {c for c in calls if calls.count(c) != fewer.count(c)} == {"linear", "attention_qkv", "mlp", "getitem"}


X = (2, 5, 24)


def norm(x):
    """A LayerNorm without weights."""
    return F.layer_norm(x, (24,))


def layer(x, w):
    """A linear layer after a LayerNorm."""
    return F.linear(norm(x), w)


def written(x):
    """LN(x), modified in place before the linear layer reads it."""
    h = norm(x)
    h.add_(1.0)
    return F.gelu(F.linear(h, W))


def writes_source(x):
    """The layer's input is modified in place before it is added, so it becomes another tensor."""
    x = x + 0
    h = F.linear(x, W24)
    x.mul_(2.0)
    return h + x


def writes_scale(x):
    """The drop-path mask is modified in place after it was read, before the residual is added, which stays apart."""
    draw = x.new_empty(2, 1, 1).fill_(0.5)
    h = F.linear(x.detach(), W24) * draw
    draw.mul_(3.0)
    return h + x


def wide_values(x):
    """Scores in bfloat16 and values in float32, which no single kernel supports."""
    q = heads(x).bfloat16()
    return (q @ q.transpose(2, 3)).softmax(-1, torch.float32) @ heads(x)


def other_mode(x):
    """The LayerNorm runs under no_grad, the linear layer does not."""
    with torch.no_grad():
        h = norm(x)
    return F.linear(h, W24) + x


def other_autocast(x):
    """The LayerNorm runs in float32, the linear layer under autocast."""
    h = norm(x)
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(h, W24) + 0.0


def in_autocast(x):
    """Both linear layers run under autocast, where the kernel casts like PyTorch."""
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(F.gelu(F.linear(x, W)), W48) + x


def heads(x):
    """[B, N, D] to [B, H, N, D]."""
    return x.unflatten(-1, (3, 8)).transpose(1, 2)


def other_axes(x):
    """Queries times keys, with heads and tokens exchanged."""
    q = k = v = x[:, :4, :16].reshape(2, 4, 4, 4)
    return (q @ k.permute(0, 2, 1, 3)).softmax(-1) @ v


def mixed(x, which):
    """q, k and v from the thirds of one projection, in the given order."""
    parts = x.unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
    return [parts[i] for i in which]


def merged(q, k, v, **options):
    """Attention with its heads merged."""
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2)


def by_hand(x, bias=None, dim=-1, with_keys=True, as_scores=False):
    """softmax(0.3 · q kᵀ + bias) v."""
    q = k = v = heads(x)
    scores = (0.3 * q) @ (k.transpose(2, 3) if with_keys else torch.ones(8, 5))
    bias = bias.type_as(scores) if as_scores else bias
    return (scores if bias is None else scores + bias).softmax(dim).type_as(x) @ v


def windowed(x, mask, bias=None, windows=2):
    """`by_hand` in windows, each with its own mask, for two images of two windows."""
    q = k = v = heads(torch.cat((x, 2 * x)))  # [4, 3, 5, 8]
    scores = q @ k.transpose(2, 3)
    scores = scores if bias is None else scores + bias
    return (scores.view(-1, windows, *scores.shape[1:]) + mask).view(scores.shape).softmax(-1) @ v


def without_heads(x, bias=None, axes=None):
    """softmax(q kᵀ + bias) v on [B, N, D]; `axes` adds (row, column) to the scores [B, 2, 3, 2, 3]."""
    q = k = v = x[:, torch.tensor([0, 1, 2, 3, 4, 0])]
    scores = q @ k.transpose(1, 2)
    if axes is not None:
        row, column = axes(q.view(2, 2, 3, 24))
        scores = (scores.view(2, 2, 3, 2, 3) + row + column).view(2, 6, 6)
    return (scores if bias is None else scores + bias).softmax(-1) @ v


def axes_of(maps):
    """Values of a key's row [B, 2, 3, 2, 1] and of its column [B, 2, 3, 1, 3], from queries [B, 2, 3, D]."""
    return maps[..., :2, None], maps[..., None, :3]


def in_units(x, mask=None):
    """Attention on five axes [B, H, W, N, D]."""
    q = k = v = x[:, :4].reshape(2, 2, 3, 4, 4)
    return F.scaled_dot_product_attention(q, k, v, mask)


def multi_head(x, memory=None, values=None, **options):
    """`F.multi_head_attention_forward` on [N, B, D] with three heads."""
    q = x.transpose(0, 1)
    k = q if memory is None or memory is x else memory.transpose(0, 1)
    v = k if values is None else q if values is x else values.transpose(0, 1)
    ends = (None, None, False, 0.0, W24, None)
    return F.multi_head_attention_forward(q, k, v, 24, 3, W72, None, *ends, need_weights=False, **options)[0]


def keys_in_place(x):
    """Queries and keys of one norm, whose keys are then written in place."""
    h = norm(x)
    q, k = F.linear(h, W24), F.linear(h, W24)
    k[:, :2] = 2 * k[:, :2]
    return q + k


def single_norm(x, first=torch.float32, last=torch.bfloat16):
    """A linear layer after a LayerNorm that computes in another dtype."""
    h = x.bfloat16()
    h = F.layer_norm(h.to(first), (24,), W24[0].to(first)).to(last)
    return F.linear(h, W24.to(last)).float()


W, W24, W48 = (
    torch.randn(f, k, generator=torch.Generator().manual_seed(f)) / 5 for f, k in ((48, 24), (24, 24), (24, 48))
)
W72 = torch.cat((W24, W24 / 2, -W24))
EARLIER = torch.ones(5, 5, dtype=torch.bool).triu(1)  # True masks a key
MASK = torch.randn(5, 5, generator=torch.Generator().manual_seed(1))
WINDOWS = torch.randn(1, 2, 1, 5, 5, generator=torch.Generator().manual_seed(2))
LEFT: set[str] = set()
CASES = {
    "hidden is returned": (lambda x: ((h := F.linear(x, W)), F.linear(F.gelu(h), W48) + x), {"linear"}),
    "norm is returned": (lambda x: ((h := norm(x)), F.gelu(F.linear(h, W))), {"linear", "layer_norm"}),
    "dropout inside": (lambda x: F.linear(F.dropout(F.gelu(layer(x, W)), 0.5), W48), {"linear"}),
    "dropout in eval mode": (lambda x: F.linear(F.dropout(F.gelu(layer(x, W)), 0.5, False), W48), {"mlp"}),
    "norm over two axes": (lambda x: F.gelu(F.linear(F.layer_norm(x, (5, 24)), W)), {"linear"}),
    "written norm": (written, {"linear", "layer_norm"}),
    "written source": (writes_source, {"linear"}),
    "written scale": (writes_scale, {"linear"}),
    "wide values": (wide_values, LEFT),
    "another mode": (other_mode, {"linear", "layer_norm"}),
    "another autocast": (other_autocast, LEFT),
    "inside autocast": (in_autocast, {"mlp"}),
    "post norm": (
        lambda x: (h := norm(x)) + F.linear(F.relu(F.linear(h, W)), W48),
        {"mlp", "layer_norm"},
    ),
    "quick gelu": (lambda x: (h := layer(x, W)) * torch.sigmoid(1.702 * h), {"linear"}),
    "sigmoid gelu with 1.7": (lambda x: (h := F.linear(x, W)) * torch.sigmoid(h * 1.7), LEFT),
    "swiglu": (lambda x: F.silu((h := layer(x, W).chunk(2, -1))[0]) * h[1], {"linear"}),
    "swiglu, same half twice": (lambda x: F.silu((h := F.linear(x, W).chunk(2, -1))[0]) * h[0], LEFT),
    "swiglu, gate last": (lambda x: F.silu((h := F.linear(x, W).chunk(2, -1))[1]) * h[0], LEFT),
    "residual broadcast": (lambda x: F.linear(x, W24) + x[:1], LEFT),
    "residual scaled": (lambda x: torch.add(x, F.linear(x, W24), alpha=2), LEFT),
    "layer_scale": (lambda x: x + W24[0] * F.linear(x, W24), {"linear"}),
    "scale per token": (lambda x: x + x[..., :1] * F.linear(x, W24), LEFT),
    "scale with gradient": (lambda x: x + x[:, :1, :1] * F.linear(x, W24), LEFT),
    "linear alone": (lambda x: F.linear(x, W24), LEFT),
    "causal": (lambda x: F.scaled_dot_product_attention(*[heads(x)] * 3, is_causal=True), {"attention"}),
    "causal, packed": (lambda x: merged(*mixed(x, (0, 1, 2)), is_causal=True), {"attention_qkv"}),
    "causal, no heads": (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), {"attention"}),
    "causal, fewer keys": (lambda x: F.scaled_dot_product_attention(x, *[x[:, :3]] * 2, is_causal=True), LEFT),
    "multi-head, causal": (lambda x: multi_head(x, attn_mask=EARLIER, is_causal=True), {"attention_qkv"}),
    "attention dropout": (lambda x: F.scaled_dot_product_attention(*[heads(x)] * 3, None, 0.5), LEFT),
    "mask": (lambda x: F.scaled_dot_product_attention(*[heads(x)] * 3, MASK), {"attention"}),
    "mask of keys": (lambda x: F.scaled_dot_product_attention(*[heads(x)] * 3, MASK[:1] > 0), {"attention"}),
    "permuted q, k, v": (lambda x: merged(*mixed(x, (1, 0, 2))), {"attention"}),
    "ordered q, k, v": (lambda x: merged(*mixed(x, (0, 1, 2))), {"attention_qkv"}),
    "no heads": (lambda x: F.scaled_dot_product_attention(x, x, x), {"attention"}),
    "no heads, with a mask": (lambda x: F.scaled_dot_product_attention(x, x, x, MASK), {"attention"}),
    "no heads, by hand": (without_heads, {"attention"}),
    "no heads, by hand with a mask": (lambda x: without_heads(x, MASK[:1, :1]), {"attention"}),
    "rows and columns": (lambda x: without_heads(x, axes=axes_of), {"attention"}),
    "columns and rows": (lambda x: without_heads(x, axes=lambda maps: axes_of(maps)[::-1]), {"attention"}),
    "two rows": (lambda x: without_heads(x, axes=lambda maps: axes_of(maps)[:1] * 2), {"attention"}),
    "rows of queries": (
        lambda x: without_heads(x, axes=lambda maps: (maps[..., :1, None], axes_of(maps)[1])),
        {"attention"},
    ),
    "five axes": (in_units, {"attention"}),
    "five axes with a mask": (lambda x: in_units(x, MASK[:4, :4]), {"attention"}),
    "multi-head": (multi_head, {"attention_qkv"}),
    "multi-head with a mask": (lambda x: multi_head(x, attn_mask=MASK), {"attention_qkv"}),
    "multi-head with a mask of True": (lambda x: multi_head(x, attn_mask=MASK > 0.9), {"attention_qkv"}),
    "multi-head with masks of heads": (lambda x: multi_head(x, attn_mask=MASK.expand(6, 5, 5)), LEFT),
    "multi-head with masked keys": (lambda x: multi_head(x, key_padding_mask=MASK[:2] > 0.9), {"attention_qkv"}),
    "multi-head with values added for keys": (
        lambda x: multi_head(x, attn_mask=MASK, key_padding_mask=MASK[:2]),
        {"attention_qkv"},
    ),
    "multi-head on other values": (lambda x: multi_head(x, x, 2 * x.sin()), {"attention"}),
    "multi-head of three tensors": (lambda x: multi_head(x, x[:, :3].cos(), x[:, 1:4].sin()), {"attention"}),
    "multi-head, queries and values of one tensor": (lambda x: multi_head(x, x.cos(), x), {"attention"}),
    "multi-head on a memory": (lambda x: multi_head(x, x[:, :3] * 2), {"attention"}),
    "keys written in place": (keys_in_place, {"layer_norm", "linear"}),
    "norm in float32": (single_norm, {"linear"}),
    "norm in float32, another dtype after it": (lambda x: single_norm(x, last=torch.float16), LEFT),
    "norm in float64": (lambda x: single_norm(x, first=torch.float64), LEFT),
    "by hand": (by_hand, {"attention"}),
    "by hand with a mask": (lambda x: by_hand(x, MASK), {"attention"}),
    "by hand with a mask in the dtype of the scores": (lambda x: by_hand(x, MASK, as_scores=True), {"attention"}),
    "by hand, softmax over queries": (lambda x: by_hand(x, dim=2), LEFT),
    "windows": (lambda x: windowed(x, WINDOWS), {"attention"}),
    "windows with a bias": (lambda x: windowed(x, WINDOWS, MASK), {"attention"}),
    "windows, mask per head": (lambda x: windowed(x, WINDOWS.expand(1, 2, 3, 5, 5)), {"attention"}),
    "one mask for all windows": (lambda x: windowed(x, WINDOWS[:, :1]), {"attention"}),
    "windows, mask per image": (lambda x: windowed(x, WINDOWS.mT.reshape(2, 1, 1, 5, 5)), {"attention"}),
    "windows, mask of keys": (lambda x: windowed(x, WINDOWS[..., :1, :]), {"attention"}),
    "by hand, scores without keys": (lambda x: by_hand(x, with_keys=False), {"attention"}),
    "by hand, reshaped": (lambda x: by_hand(x).view(6, 5, 8), {"attention"}),
    "by hand, other axes": (other_axes, {"attention"}),
    "weights returned": (lambda x: ((p := (heads(x) @ heads(x).mT).softmax(-1)), p @ heads(x)), LEFT),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("case", CASES)
def test_only_equivalent_calls_are_rewritten(case, gpu):
    """Oracle: the function itself (value, dtype and gradient), and the set of ops that it may be rewritten to."""
    function, expected = CASES[case]
    x, eager, found = torch.randn(X), Eager(), []
    compiled = torch.compile(function, backend=eager, fullgraph=True)
    for run in (compiled, function):
        leaf = x.clone().requires_grad_()
        torch.manual_seed(5)
        y = run(leaf)
        y = y if isinstance(y, tuple) else (y,)
        found.append([*y, *torch.autograd.grad(sum(t.float().square().sum() for t in y), leaf)])
    assert eager.became == expected, eager.rows
    assert all(row.became or row.why for row in eager.rows)
    half = "autocast" in case or "norm in float" in case or case == "wide values"
    eps = torch.finfo(torch.bfloat16 if half else torch.float32).eps
    for got, want in zip(*found, strict=True):
        # sums of at most a few dozen terms, in another order
        assert got.dtype == want.dtype and (got - want).norm() <= 64 * eps * want.norm()


def test_dtypes_are_kept():
    """Oracle: eager PyTorch's dtype; the kernel would return that of the queries."""
    x, eager = torch.randn(X), Eager()
    with interpreting():
        got = torch.compile(wide_values, backend=eager, fullgraph=True)(x)
    assert not eager.became and got.dtype == torch.float32 and torch.equal(got, wide_values(x))


def patches(**options):
    """Patch tokens from a convolution."""
    weight = torch.randn(6, 3 // options.get("groups", 1), 4, 4)
    return lambda x: F.conv2d(x, weight, None, **{"stride": 4, **options}).flatten(2).transpose(1, 2)


PREFIX, POSITIONS = torch.randn(1, 2, 6), torch.randn(1, 6, 6)


@pytest.mark.parametrize(
    "function, expected",
    [
        (patches(), {"patch_embed"}),
        (patches(stride=2), set()),
        (patches(padding=1), set()),
        (patches(dilation=2), set()),
        (patches(groups=3), set()),
        (lambda x: patches()(x[..., :6]), set()),
        (lambda x: torch.cat((PREFIX.expand(len(x), -1, -1), patches()(x)), 1) + POSITIONS, {"patch_embed"}),
        (lambda x: torch.cat((PREFIX.expand(len(x), -1, -1), patches()(x) + POSITIONS[:, 2:]), 1), {"patch_embed"}),
        (lambda x: torch.cat((patches()(x), PREFIX.expand(len(x), -1, -1)), 1), {"patch_embed"}),
    ],
    ids="plain overlapping padded dilated grouped ragged prefix positions suffix".split(),
)
def test_patch_projections_are_rewritten(function, expected, gpu):
    """Oracle: the function itself, and the op that it may be rewritten to."""
    x, eager = torch.randn(2, 3, 8, 8), Eager()
    want, got = seeded(function, x), seeded(torch.compile(function, backend=eager, fullgraph=True), x)
    assert eager.became == expected and (got - want).norm() <= 64 * torch.finfo(torch.float32).eps * want.norm()


def test_cpu_graphs_are_passed_on_unchanged(monkeypatch):
    """Oracle: the graph that is passed on, node for node, with its mode and options."""
    seen = []

    class Wrapper:
        def __init__(self, mode, options, dynamic):
            seen.append((mode, options))

        def __call__(self, graph, given):
            seen.append(graph.code)
            return graph.forward

    monkeypatch.setattr(torch, "_TorchCompileInductorWrapper", Wrapper)
    model, x = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()), torch.randn(2, 3, 8)
    codes = []
    torch.compile(model, backend=lambda graph, _: codes.append(graph.code) or graph.forward)(x)
    torch._dynamo.reset()
    torch.compile(model, backend="fastvit_triton", mode="reduce-overhead")(x)
    torch._dynamo.reset()
    torch.compile(model, backend="fastvit_triton", options={"max_autotune": True})(x)
    assert seen == [("reduce-overhead", None), *codes, (None, {"max_autotune": True}), *codes]


@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.full
def test_inductor_compiles_the_rest_of_the_graph():
    """Oracle: eager PyTorch with the same kernels; Inductor compiles the rest of the graph, with gradients."""
    fc, x = nn.Linear(8, 8), torch.randn(2, 3, 8)

    def function(x):
        return layer(x.repeat(1, 1, 3), fc.weight.repeat(1, 3)).sigmoid().cos() + 1.0

    with interpreting():
        compiled = torch.compile(function, backend="fastvit_triton", fullgraph=True)
        got, want = (torch.autograd.grad(run(x).sum(), fc.weight)[0] for run in (compiled, function))
    assert (got - want).norm() <= 64 * torch.finfo(torch.float32).eps * want.norm()


@pytest.mark.fast
def test_decisions_are_logged_and_reported(caplog):
    """Oracle: the expected sentences; twelve reports of a model fill no compile cache."""
    model, images = build("timm_vit", torch.float32), inputs("timm_vit", torch.float32)
    small = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    for _ in range(12):
        assert len(convert.report(small, torch.randn(2, 3, 8)).left) == 2
    with interpreting():
        found = convert.report(model, images)
    assert [row.path for row in found.rows[:3]] == ["patch_embed.proj", "blocks.0.norm1", "blocks.0.attn.qkv"]
    assert [row.became for row in found.rows[:4]] == ["patch_embed", "linear", "linear", "attention_qkv"]
    assert str(found).startswith("18 of 19 calls are converted.\n")
    assert re.search(r"^head \(linear\) +left to the compiler  ", str(found), re.MULTILINE)
    assert (found.left[0].path, found.left[0].type) == ("head", "linear")
    assert not convert.report(model, images).fused  # the kernels cannot run on this CPU
    with caplog.at_level(logging.INFO, "fastvit_triton.convert.backend"):
        torch.compile(model, backend=partial(backend.backend, inner=lambda graph, _: graph.forward))(images)
    assert "Triton kernels need a CUDA or ROCm GPU, this is cpu" in caplog.text


PROBE = """
import importlib.metadata, sys
entry_points = importlib.metadata.entry_points
if not INSTALLED:  # here it may be
    importlib.metadata.entry_points = lambda **asked: entry_points(**asked).select(value="none of ours")
import torch, fastvit_triton
assert "torch._dynamo" not in sys.modules or LOGGED
if INSTALLED:
    assert "fastvit_triton.convert.backend" not in sys.modules
else:
    import fastvit_triton.convert
fn = torch._dynamo.lookup_backend("fastvit_triton")
import fastvit_triton.convert.backend as module
assert fn is module.backend and "fastvit_triton" in torch._dynamo.list_backends()
"""


@pytest.mark.full
@pytest.mark.parametrize("installed, logged", sampled([(True, False), (False, False), (False, True)], 3))
def test_the_backend_is_found_by_name(tmp_path, installed, logged):
    """Oracle: Dynamo's own lookup, for an installed package with setup.py's entry point and for a source tree.

    With TORCH_LOGS, PyTorch imports the package before torch itself is fully imported.
    """
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("setuptools.setup", lambda **options: made.update(options))
        patch.chdir(ROOT)
        runpy.run_path("setup.py")
    (line,) = made["entry_points"]["torch_dynamo_backends"]
    if installed:
        folder = tmp_path / "probe-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: probe\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[torch_dynamo_backends]\n{line}\n")
    variables = {"TORCH_LOGS": "fastvit_triton.convert.backend"} if logged else {}
    code = PROBE.replace("INSTALLED", str(installed)).replace("LOGGED", str(logged))
    run_python("-c", code, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]), **variables)
