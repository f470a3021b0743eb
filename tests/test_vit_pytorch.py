"""Tests of the conversion of vit-pytorch's models beside those of test_converted.py. Oracle: the original model."""

import copy

import pytest
import torch
from catalogue import MODELS, build, inputs, joined, outputs
from catalogue.comparison import SINGLE, distance, run
from catalogue.entry import Entry
from catalogue.others import CCT, LEVIT, sized, vit_pytorch
from interpreter import interpreting
from torch.utils._pytree import tree_map_only

from fastvit_triton import optimize
from fastvit_triton.engine import ways
from fastvit_triton.engine.replay import calls
from fastvit_triton.kernels import choose
from fastvit_triton.kernels.backend import using_backend


def test_reasons():
    """What runs its own forward says why: random layers in CaiT, another LayerScale or activation, a map not square."""
    cait = sized("cait.CaiT", cls_depth=1, layer_dropout=0.1)()
    assert "layer dropout 0.1" in str(optimize(cait))
    cct = vit_pytorch("cct.CCT", **CCT)
    cct.classifier.blocks[0].activation = torch.nn.functional.relu
    assert "its activation is not GELU" in str(optimize(cct))
    xcit = sized("xcit.XCiT", cls_depth=1)()
    assert "a LayerScale is of another type or has a hook" in str(optimize(xcit))
    levit, images = vit_pytorch("levit.LeViT", **LEVIT), torch.randn(1, 3, 40, 160)
    optimize(levit.eval())
    with pytest.raises(RuntimeError), using_backend("torch"):  # as the original
        levit(images)


REPLAYED = [f"vit_pytorch_{name}" for name in ("short", "cait", "deepvit", "cvt", "pit", "navit", "twins")]


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [n if n in REPLAYED[:3] else pytest.param(n, marks=pytest.mark.full) for n in REPLAYED]
)
def test_replayed_blocks(name, monkeypatch):
    """Oracle: as for kernels. Each block is replayed if replays alone are expected to be faster than PyTorch."""
    monkeypatch.setattr(choose, "way_of", lambda x, branches, training, replayed, *_: "fused" if replayed else "plain")
    monkeypatch.setattr(ways, "_ways", {})
    monkeypatch.setitem(MODELS, "vit_pytorch_short", Entry(sized("vit.ViT", depth=1), 6))
    torch.manual_seed(1)
    truth, call = build(name).eval(), run
    plain, model = (copy.deepcopy(truth).float() for _ in range(2))
    if name == "vit_pytorch_twins":  # whose heads are wide: no gradients, which take half a minute
        call = lambda model, given: (outputs(model.requires_grad_(False), given), [torch.ones(1)])  # noqa: E731
    optimize(model)
    for _ in range(3):
        given = inputs(name, torch.float32)
        want, own = call(truth, tree_map_only(torch.Tensor, torch.Tensor.double, given)), call(plain, given)
        with interpreting():
            got = call(model, given)
        for exact, theirs, ours in zip(*((y, joined(gradients)) for y, gradients in (want, own, got)), strict=True):
            assert distance(ours, exact) <= SINGLE + 2 * distance(theirs, exact)
    blocks = [block for m in model.modules() if type(m).__name__ == "Transformer" for block in m.layers]
    for block in blocks:
        held = [vars(m)[calls.PROGRAMS] for m in block.modules() if calls.PROGRAMS in vars(m)]
        assert held and all(type(found) is calls.Recorded for programs in held for found in programs.found.values())


def test_mae():
    """All blocks of MAE, whose loss needs PyTorch's default dtype, are those of ViT."""
    model = vit_pytorch("mae.MAE", encoder=sized("vit.ViT", pool="mean")(), decoder_dim=16, decoder_heads=2)
    report = optimize(model)
    assert {"encoder.transformer", "decoder"} <= {row.path for row in report.fused} and not report.left
