"""Tests of the conversion of vit-pytorch's models. Oracle: the original model, in float64 with PyTorch."""

import copy
import pickle
import re
from importlib import import_module

import pytest
import torch
from foreign import redraw
from interpreter import interpreting
from test_convert import Recorder
from test_towers import EXACT, SINGLE, distance, joined, run
from test_towers_dense import dropping, hooked

from fastvit_triton import optimize, revert
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.plan import forcing

TINY = dict(image_size=32, patch_size=16, dim=24, depth=2, heads=2, mlp_dim=48, dim_head=12, num_classes=5)
CCT = dict(img_size=16, kernel_size=3, stride=2, padding=1, embedding_dim=24, num_layers=2, num_heads=2, mlp_ratio=2)
CCT |= dict(num_classes=5, positional_embedding="learnable", attention_dropout=0.0)
CROSS = dict(sm_dim=24, lg_dim=16, depth=1, image_size=32, sm_patch_size=8, lg_patch_size=16, num_classes=5)
CROSS |= {
    f"{which}_{name}": value
    for which in ("sm_enc", "lg_enc", "cross_attn")
    for name, value in dict(depth=1, heads=2, mlp_dim=32, dim_head=12).items()
    if (which, name) != ("cross_attn", "mlp_dim")
}


def made(path, **options):
    """The class "file.Class" of vit-pytorch with these options."""
    file, cls = path.split(".")
    return getattr(import_module(f"vit_pytorch.{file}"), cls)(**options)


def sizes(**changed):
    """The options TINY with these changes; None removes one."""
    return {key: value for key, value in (TINY | changed).items() if value is not None}


MODELS = {
    "cct": lambda: made("cct.CCT", **CCT, stochastic_depth_rate=0.3),
    "cait": lambda: made("cait.CaiT", **sizes(), cls_depth=1),
    "deepvit": lambda: made("deepvit.DeepViT", **sizes()),
    "crossvit": lambda: made("cross_vit.CrossViT", **CROSS, dropout=0.0, emb_dropout=0.0),
    "pit": lambda: made("pit.PiT", **sizes(patch_size=8, depth=(1, 1))),
    "t2t": lambda: made("t2t.T2TViT", **sizes(patch_size=None), t2t_layers=((7, 4), (3, 2))),
    "navit": lambda: made("na_vit.NaViT", **sizes(patch_size=8)),
    "parallel": lambda: made("parallel_vit.ViT", **sizes()),
    "registers": lambda: made("simple_vit_with_register_tokens.SimpleViT", **sizes()),
}


def model_of(name, dtype=torch.float64):
    """The model and its inputs."""
    torch.manual_seed(1)
    model = redraw(MODELS[name]()).to(dtype)
    sides = [[(32, 16), (8, 24)], [(16, 16)]] if name == "navit" else [(16, 16) if name == "cct" else (32, 32)]
    if name == "navit":
        return model, {"batched_images": [[torch.randn(3, *side, dtype=dtype) for side in row] for row in sides]}
    return model, {"x" if name == "cct" else "img": torch.randn(2, 3, *sides[0], dtype=dtype)}


def same(model, original, given):
    """Asserts that outputs and all gradients of both models are equal up to rounding."""
    want = run(original, given)
    with using_backend("torch"):
        got = run(model, given)
    assert [g is None for g in got[1]] == [g is None for g in want[1]]
    assert distance(got[0], want[0]) <= EXACT and distance(joined(got[1]), joined(want[1])) <= EXACT
    return got


@pytest.mark.parametrize("name", MODELS)
def test_model(name):
    """Outputs and gradients equal the original's, in training; nothing but norms is left."""
    model, given = model_of(name)
    original = copy.deepcopy(model.train())
    report = optimize(model)
    assert report.fused and all(re.search("LayerNorm|RMSNorm", row.type) for row in report.left), report
    got = same(model, original, given)
    with using_backend("torch"):
        again = run(pickle.loads(pickle.dumps(model)), given)
    assert torch.equal(again[0], got[0])
    revert(model)
    assert not any("forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("change", [hooked, dropping])
def test_changed(name, change):
    """A changed model equals the original, with the same random numbers; hooked layers are called."""
    model, given = model_of(name)
    change(model.train())
    original = copy.deepcopy(model)
    optimize(model)
    same(model, original, given)
    shapes = [[getattr(m, "shapes", None) for m in each.modules()] for each in (model, original)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("name", [n if n == "cct" else pytest.param(n, marks=pytest.mark.full) for n in MODELS])
def test_kernels(name):
    """Oracle: the original in float64, from which the kernels in the interpreter and PyTorch in float32 differ."""
    (truth, _), (plain, single) = model_of(name), model_of(name, torch.float32)
    model = copy.deepcopy(plain.eval())
    optimize(model)
    wide = {key: double(x) for key, x in single.items()}
    want, own = run(truth.eval(), wide), run(plain, single)
    with interpreting(), forcing("fused"), Recorder() as launched:
        got = run(model, single)
    assert launched.ours
    for exact, theirs, ours in zip(*((y, joined(gradients)) for y, gradients in (want, own, got)), strict=True):
        assert distance(ours, exact) <= SINGLE + 2 * distance(theirs, exact)


def double(x):
    """Images in float64."""
    return [double(part) for part in x] if isinstance(x, list) else x.double()


def test_reasons():
    """What runs its own forward says why: random layers in CaiT, another activation in CCT."""
    cait = made("cait.CaiT", **sizes(), cls_depth=1, layer_dropout=0.1)
    assert "layer dropout 0.1" in str(optimize(cait))
    cct = made("cct.CCT", **CCT)
    cct.classifier.blocks[0].activation = torch.nn.functional.relu
    assert "its activation is not GELU" in str(optimize(cct))
