"""Tests of the conversion of more of timm's families. Oracle: the original model, in float64 with PyTorch."""

import copy
import itertools
from importlib import import_module

import pytest
import torch
from interpreter import interpreting
from test_convert import Recorder
from test_fake_device import WAYS, findings
from test_towers import EXACT, SINGLE, distance, joined
from torch import Tensor, nn
from towers_timm import MODELS, build, images

from fastvit_triton import optimize, revert
from fastvit_triton.convert.forwards import FORWARDS
from fastvit_triton.engine.freeze import kept_folds
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.plan import forcing

READ = {name.rpartition(".")[2] for name in FORWARDS if name.startswith("timm.")} - {"PatchEmbed"}
BATCHED = 1e-12  # the statistics of few rows in BatchNorm's backward pass amplify the roundings before it
FORMS = ("vitamin",)  # the kernels of the others run in the full test
OWN = {  # what runs its own forward, in training, where it is not frozen, or at all
    "levit": {"LevitMlp"},
    "levit_conv": {"Attention", "AttentionDownsample", "LevitMlp", "LevitBlock", "LevitDownsample"},
    "gemma4_grouped": {"Gemma4GatedMlp"},
}


def run(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    """Outputs and the gradients of every parameter and of the images; random numbers are the same in every call."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(2)
    y = model(x)
    torch.manual_seed(3)
    (y * torch.randn_like(y)).sum().backward()
    return y.detach(), [x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("train", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("name", MODELS)
def test_family(name, train):
    """Outputs and gradients equal the original's up to rounding; no attention or MLP of the original is left."""
    model, x = build(name).train(train), images(name)
    original = copy.deepcopy(model)
    report = optimize(model)
    left = {row.type for row in report.left if row.type in READ}
    assert (report.fused or name == "levit_conv") and not left - OWN.get(name, set())
    want = run(original, x)
    with using_backend("torch"):
        got = run(model, x)
    assert [g is None for g in got[1]] == [g is None for g in want[1]]
    tolerance = BATCHED if train and "levit" in name else EXACT
    assert distance(got[0], want[0]) <= tolerance and distance(joined(got[1]), joined(want[1])) <= tolerance
    for ours, theirs in zip(model.buffers(), original.buffers(), strict=True):  # statistics of BatchNorms
        assert ours.dtype == torch.long or distance(ours, theirs) <= EXACT
    revert(model)
    assert not any("forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FORMS else pytest.mark.full) for n in MODELS])
def test_kernels(name):
    """Oracle: the original in float64, from which the kernels in the interpreter and PyTorch in float32 differ."""
    truth, x = build(name).eval(), images(name, torch.float32)
    plain, model = (copy.deepcopy(truth).float() for _ in range(2))
    optimize(model)
    want, own = run(truth, x.double()), run(plain, x)
    with interpreting(), Recorder() as recorded:
        got = run(model, x)
        with torch.no_grad():
            frozen = optimize(model, freeze=True) and model(x)
    assert recorded.ours and distance(frozen, want[0]) <= SINGLE + 2 * distance(own[0], want[0])
    for exact, theirs, ours in zip(*((y, joined(gradients)) for y, gradients in (want, own, got)), strict=True):
        assert distance(ours, exact) <= SINGLE + 2 * distance(theirs, exact)


@pytest.mark.full
@pytest.mark.parametrize(  # not those that copy or wait, or run PyTorch in training
    "name", [n for n in MODELS if not n.startswith(("csat", "gemma4", "levit_conv"))]
)
def test_simulated_gpu(name):
    """Oracle: no finding, forward and backward, as in test_fake_device.py."""
    model, x = build(name, torch.float32), images(name, torch.float32)
    optimize(model)
    for dtype, way, training in itertools.product(("bf16", "autocast"), WAYS, (False, True)):
        assert findings(model, x, dtype, way, training) == [], (dtype, way, training)


@pytest.mark.parametrize("name", ["levit", "levit_conv"])
def test_statistics(name):
    """Oracle: the original, after a training forward, whose writes to running statistics PyTorch does not count."""
    model, x = build(name), images(name)
    original = copy.deepcopy(model)
    assert not optimize(model.eval(), freeze=True).left
    with using_backend("torch"), torch.no_grad():
        for _ in range(2):
            assert distance(model.eval()(x), original.eval()(x)) <= EXACT
            assert kept_folds(model.modules())
            assert distance(model.train()(x), original.train()(x)) <= BATCHED


@pytest.mark.parametrize("name", ["relpos_post", "sam", "mvit", "levit", "tiny_vit"])
def test_frozen(name):
    """A frozen model keeps what it computes from parameters, and computes it again when they change."""
    model, x = build(name).eval(), images(name)
    original = copy.deepcopy(model)
    optimize(model, freeze=True)
    with using_backend("torch"), torch.no_grad():
        for _ in range(2):
            for _ in range(2):
                assert distance(model(x), original(x)) <= EXACT
            assert kept_folds(model.modules())
            for m in (model, original.train().eval()):  # timm's own caches are cleared by `train`
                for t in (*m.parameters(), *(b for b in m.buffers() if b.is_floating_point())):
                    t.mul_(1.1)


@pytest.mark.parametrize("name", ["relpos", "maxvit", "gcvit", "levit", "levit_conv", "davit", "gemma4"])
def test_hooks(name):
    """A hook on a submodule runs, as in the original."""
    path, rate = (
        dict(
            relpos="attn.qkv",
            maxvit="attn.proj",
            gcvit="rel_pos",
            levit="proj.ln",
            levit_conv="mlp.ln1",
            davit="softmax",
        ).get(name, "q_proj"),
        1.5,
    )
    model, x = build(name).eval(), images(name)
    hooked = next(m for p, m in model.named_modules() if p.endswith(path))
    hooked.register_forward_hook(lambda module, given, y: rate * y)
    original = copy.deepcopy(model)
    optimize(model)
    with using_backend("torch"), torch.no_grad():
        assert distance(model(x), original(x)) <= EXACT


@pytest.mark.parametrize("path", ["proj.act", "mlp.act", "mlp.drop", "drop_path1", "drop_path"])
def test_modules_of_maps_are_called_with_maps(path):
    """Oracle: the original; a hook that scales axis 1 scales the channels of a map, not tokens."""
    model, x = build("levit_conv").eval(), images("levit_conv")
    for name, module in model.named_modules():
        if name.endswith(path):
            module.register_forward_hook(lambda module, given, y: y * torch.linspace(1, 2, y.shape[1])[:, None, None])
    original = copy.deepcopy(model)
    optimize(model, freeze=True)
    with using_backend("torch"), torch.no_grad():
        assert distance(model(x), original(x)) <= EXACT


def test_notes_are_not_repeated():
    """The report says once that layers with a BatchNorm are called, of which attention has two."""
    notes = [(row.why or "").split("; ") for row in optimize(build("levit").eval()).rows]
    assert any("its BatchNorm is folded" in note for row in notes for note in row)
    assert all(len(set(row)) == len(row) for row in notes)


@pytest.mark.parametrize("name", ["sam", "mvit"])
def test_biases_of_rows_and_columns_are_not_summed(name, monkeypatch):
    """Oracle: the original's outputs and gradients; the function that sums the biases for every key is not called."""
    for place in ("kernels.attention", "convert.readers.timm.pooled"):
        monkeypatch.setattr(import_module(f"fastvit_triton.{place}"), "sum_of_axes", None)
    model, x = build(name).float().eval(), images(name).float()
    original = copy.deepcopy(model)
    optimize(model)
    wanted, tables = original(x), [p for n, p in original.named_parameters() if "rel_pos" in n]
    with interpreting(), forcing("fused"):
        found = model(x)
        grads = torch.autograd.grad(found.square().sum(), [p for n, p in model.named_parameters() if "rel_pos" in n])
    assert tables and distance(found, wanted) <= SINGLE
    for got, want in zip(grads, torch.autograd.grad(wanted.square().sum(), tables), strict=True):
        assert distance(got, want) <= 10 * SINGLE  # sums over all queries, of products of six matmuls
