"""Tests of the conversion of timm's families beside those of test_converted.py. Oracle: the original model."""

import copy
import itertools
from importlib import import_module

import pytest
import torch
from catalogue import build, inputs
from catalogue.comparison import EXACT, SINGLE, distance
from catalogue.timm import MORE
from interpreter import interpreting
from test_fake_device import WAYS, findings

from fastvit_triton import optimize
from fastvit_triton.engine.freeze import kept_folds
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.settings import forcing


@pytest.mark.full
@pytest.mark.parametrize(  # not those that copy or wait, or run PyTorch in training
    "name", [n for n in MORE if not n.startswith(("timm_csat", "timm_gemma4", "timm_levit_conv"))]
)
def test_simulated_gpu(name):
    """Oracle: no finding, forward and backward, as in test_fake_device.py."""
    model, x = build(name, torch.float32), inputs(name, torch.float32)
    optimize(model)
    for dtype, way, training in itertools.product(("bf16", "autocast"), WAYS, (False, True)):
        assert findings(model, x, dtype, way, training) == [], (dtype, way, training)


@pytest.mark.parametrize("name", ["timm_relpos_post", "timm_sam", "timm_mvit", "timm_levit", "timm_tiny_vit"])
def test_frozen(name):
    """A frozen model keeps what it computes from parameters, and computes it again when they change."""
    model, x = build(name).eval(), inputs(name)
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


@pytest.mark.parametrize("path", ["proj.act", "mlp.act", "mlp.drop", "drop_path1", "drop_path"])
def test_modules_of_maps_are_called_with_maps(path):
    """Oracle: the original; a hook that scales axis 1 scales the channels of a map, not tokens."""
    model, x = build("timm_levit_conv").eval(), inputs("timm_levit_conv")
    for name, module in model.named_modules():
        if name.endswith(path):
            module.register_forward_hook(lambda module, given, y: y * torch.linspace(1, 2, y.shape[1])[:, None, None])
    original = copy.deepcopy(model)
    optimize(model, freeze=True)
    with using_backend("torch"), torch.no_grad():
        assert distance(model(x), original(x)) <= EXACT


def test_notes_are_not_repeated():
    """The report says once that layers with a BatchNorm are called, of which attention has two."""
    notes = [(row.why or "").split("; ") for row in optimize(build("timm_levit").eval()).rows]
    assert any("its BatchNorm is folded" in note for row in notes for note in row)
    assert all(len(set(row)) == len(row) for row in notes)


@pytest.mark.parametrize("name", ["timm_sam", "timm_mvit"])
def test_biases_of_rows_and_columns_are_not_summed(name, monkeypatch):
    """Oracle: the original's outputs and gradients; the function that sums the biases for every key is not called."""
    for place in ("kernels.attention", "convert.readers.timm.pooled"):
        monkeypatch.setattr(import_module(f"fastvit_triton.{place}"), "sum_of_axes", None)
    model, x = build(name).float().eval(), inputs(name).float()
    original = copy.deepcopy(model)
    optimize(model)
    wanted, tables = original(x), [p for n, p in original.named_parameters() if "rel_pos" in n]
    with interpreting(), forcing("fused"):
        found = model(x)
        grads = torch.autograd.grad(found.square().sum(), [p for n, p in model.named_parameters() if "rel_pos" in n])
    assert tables and distance(found, wanted) <= SINGLE
    for got, want in zip(grads, torch.autograd.grad(wanted.square().sum(), tables), strict=True):
        assert distance(got, want) <= 10 * SINGLE  # sums over all queries, of products of six matmuls
