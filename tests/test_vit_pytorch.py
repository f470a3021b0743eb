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
from test_towers_timm import BATCHED
from towers import outputs

from fastvit_triton import optimize, revert
from fastvit_triton.engine import ways
from fastvit_triton.engine.freeze import kept_folds
from fastvit_triton.engine.replay import calls
from fastvit_triton.kernels import plan
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
STAGES = dict(emb_dim=(16, 24, 32), emb_stride=(2, 2, 1), depth=(1, 1, 1), heads=(1, 1, 2), kv_proj_stride=(2, 1, 2))
CVT = {f"s{i + 1}_{name}": values[i] for name, values in STAGES.items() for i in range(3)}
STAGES = dict(emb_dim=(8, 16, 16, 8), patch_size=(2, 1, 1, 2), local_patch_size=(2, 2, 2, 1), global_k=(2, 2, 1, 1))
TWINS = {f"s{i + 1}_{name}": values[i] for name, values in STAGES.items() for i in range(4)}
LEVIT = dict(image_size=80, dim=(16, 24, 32), depth=(1, 2, 1), heads=(2, 2, 3), mlp_mult=2, dim_key=4, dim_value=8)
MAPS = {  # models of maps → paths of modules to which a hook is attached, one after another
    "levit": "0.layers.0.0.to_q 0.layers.0.0.to_v.0 0.layers.0.0.to_k.1 0.layers.0.0.attend 0.layers.0.0.pos_bias "
    "1.layers.0.0.to_out 1.layers.0.0.to_out.0 1.layers.0.0.to_out.1 1.layers.0.0.to_out.2 2.layers.1.1 "
    "2.layers.1.1.net 2.layers.1.1.net.1 2.layers.1.1.net.3 2",
    "cvt": "1.2.layers.0.0 1.2.layers.0.0.norm 1.2.layers.0.0.attend 1.2.layers.0.0.to_q 1.2.layers.0.0.to_kv.net "
    "1.2.layers.0.0.to_kv.net.0 1.2.layers.0.0.to_q.net.1 1.2.layers.0.0.to_q.net.2 1.2.layers.0.0.to_out.0 "
    "2.2.layers.0.1.net.0 2.2.layers.0.1.net.4 2.1",
    "twins": "0.0.proj.0 0.1.layers.0.0 0.1.layers.0.0.fn 0.1.layers.0.0.fn.norm 0.1.layers.0.0.fn.to_kv "
    "1.1.layers.0.0.fn.to_out.0 1.1.layers.0.2.fn.to_q 1.1.layers.0.2.fn.to_kv 1.1.layers.0.3.fn.net.2 1.2.proj "
    "1.2.proj.fn 3.1.layers.0.0",
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
    "levit": lambda: made("levit.LeViT", **LEVIT, num_classes=5, num_distill_classes=3),
    "cvt": lambda: made("cvt.CvT", **CVT, num_classes=5),
    "twins": lambda: made("twins_svt.TwinsSVT", **TWINS, num_classes=5, s3_depth=1, s4_depth=1),
    "parallel": lambda: made("parallel_vit.ViT", **sizes()),
    "registers": lambda: made("simple_vit_with_register_tokens.SimpleViT", **sizes()),
}


def model_of(name, dtype=torch.float64):
    """The model and its inputs."""
    torch.manual_seed(1)
    model = redraw(MODELS[name]()).to(dtype)
    for key, buffer in model.named_buffers():
        if key.endswith(("running_mean", "running_var")):
            buffer.uniform_(0.5, 2.0)
    if name == "navit":
        sides = [[(32, 16), (8, 24)], [(16, 16)]]
        return model, {"batched_images": [[torch.randn(3, *side, dtype=dtype) for side in row] for row in sides]}
    side = {"cct": (16, 16), "levit": (80, 80), "cvt": (20, 28), "twins": (8, 12)}.get(name, (32, 32))
    return model, {"x" if name in ("cct", "cvt", "twins") else "img": torch.randn(2, 3, *side, dtype=dtype)}


def same(model, original, given, tolerance=EXACT):
    """Asserts that outputs and all gradients of both models are equal up to rounding."""
    want = run(original, given)
    with using_backend("torch"):
        got = run(model, given)
    assert [g is None for g in got[1]] == [g is None for g in want[1]]
    assert distance(got[0], want[0]) <= tolerance and distance(joined(got[1]), joined(want[1])) <= tolerance
    return got


@pytest.mark.parametrize("name", MODELS)
def test_model(name):
    """Outputs and gradients equal the original's, in training; nothing but norms is left."""
    model, given = model_of(name)
    original = copy.deepcopy(model.train())
    report = optimize(model)
    assert report.fused and all(re.search("LayerNorm|RMSNorm", row.type) for row in report.left), report
    got = same(model, original, given, BATCHED if name in MAPS else EXACT)
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
    same(model, original, given, BATCHED if name in MAPS else EXACT)
    shapes = [[getattr(m, "shapes", None) for m in each.modules()] for each in (model, original)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("name", MAPS)
def test_maps(name):
    """In evaluation, outputs and gradients equal the original's; outputs of a frozen model also after training."""
    model, given = model_of(name)
    original = copy.deepcopy(model.eval())
    optimize(model, freeze=True)
    same(model, original, given)
    with using_backend("torch"), torch.no_grad():
        for _ in range(2):
            assert distance(outputs(model.eval(), given), outputs(original.eval(), given)) <= EXACT
            assert name == "twins" or kept_folds(model.modules())
            assert distance(outputs(model.train(), given), outputs(original.train(), given)) <= BATCHED


@pytest.mark.parametrize("name", MAPS)
def test_hooks(name):
    """A hook on any submodule runs as in the original, of frozen models also."""
    model, given = model_of(name)
    original = copy.deepcopy(model.eval())
    optimize(model, freeze=True)
    for path in MAPS[name].split():
        handles = [
            m.get_submodule(path).register_forward_hook(lambda m, x, y: 1.5 * y) for m in parts_of(model, original)
        ]
        with using_backend("torch"), torch.no_grad():
            assert distance(outputs(model, given), want := outputs(original, given)) <= EXACT, path
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            assert distance(outputs(original, given), want) > EXACT, path


def parts_of(*models):
    """The module of each model that contains its blocks."""
    return [getattr(m, "backbone" if hasattr(m, "backbone") else "layers") for m in models]


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
    """What runs its own forward says why: random layers in CaiT, another LayerScale or activation, a map not square."""
    cait = made("cait.CaiT", **sizes(), cls_depth=1, layer_dropout=0.1)
    assert "layer dropout 0.1" in str(optimize(cait))
    cct = made("cct.CCT", **CCT)
    cct.classifier.blocks[0].activation = torch.nn.functional.relu
    assert "its activation is not GELU" in str(optimize(cct))
    xcit = made("xcit.XCiT", **sizes(), cls_depth=1)
    assert "a LayerScale is of another type or has a hook" in str(optimize(xcit))
    levit, images = made("levit.LeViT", **LEVIT, num_classes=5), torch.randn(1, 3, 40, 160)
    optimize(levit.eval())
    with pytest.raises(RuntimeError), using_backend("torch"):  # as the original
        levit(images)


@pytest.mark.parametrize("name", ["cvt", pytest.param("levit", marks=pytest.mark.full)])
def test_frozen_kernels(name):
    """As `test_kernels`, for outputs with folded BatchNorms, of which none is left to PyTorch."""
    (truth, _), (plain, single) = model_of(name), model_of(name, torch.float32)
    model = copy.deepcopy(plain.eval())
    optimize(model, freeze=True)
    with interpreting(), forcing("fused"), torch.no_grad(), Recorder() as launched:
        got = outputs(model, single)
    assert launched.ours and not any("batch_norm" in op for op in launched.ops)
    with torch.no_grad():
        want, own = outputs(truth.eval(), {key: double(x) for key, x in single.items()}), outputs(plain, single)
    assert distance(got, want) <= SINGLE + 2 * distance(own, want)


REPLAYED = "vit", "cait", "deepvit", "cvt", "pit", "navit", "twins"


@pytest.mark.parametrize(
    "name", [n if n in REPLAYED[:3] else pytest.param(n, marks=pytest.mark.full) for n in REPLAYED]
)
def test_replayed_blocks(name, monkeypatch):
    """Oracle: as in `test_kernels`. Each block is replayed if replays alone are expected to be faster than PyTorch."""
    monkeypatch.setattr(plan, "way_of", lambda *args: "fused" if args[-1] else "plain")
    monkeypatch.setattr(ways, "_ways", {})
    monkeypatch.setitem(MODELS, "vit", lambda: made("vit.ViT", **sizes(depth=1)))
    (truth, _), (plain, given) = model_of(name), model_of(name, torch.float32)
    model, truth, call = copy.deepcopy(plain.eval()), truth.eval(), run
    if name == "twins":  # whose heads are wide: no gradients, which take half a minute
        call = lambda model, given: (outputs(model.requires_grad_(False), given), [torch.ones(1)])  # noqa: E731
    optimize(model)
    for _ in range(3):
        given = {key: again(x) for key, x in given.items()}
        want, own = call(truth, {key: double(x) for key, x in given.items()}), call(plain, given)
        with interpreting():
            got = call(model, given)
        for exact, theirs, ours in zip(*((y, joined(gradients)) for y, gradients in (want, own, got)), strict=True):
            assert distance(ours, exact) <= SINGLE + 2 * distance(theirs, exact)
    blocks = [block for m in model.modules() if type(m).__name__ == "Transformer" for block in m.layers]
    for block in blocks:
        held = [vars(m)[calls.PROGRAMS] for m in block.modules() if calls.PROGRAMS in vars(m)]
        assert held and all(type(found) is calls.Recorded for programs in held for found in programs.found.values())


def again(x):
    """Other images of the same sizes."""
    return [again(part) for part in x] if isinstance(x, list) else torch.randn_like(x)


def test_mae():
    """All blocks of MAE, whose loss needs PyTorch's default dtype, are those of ViT."""
    model = made("mae.MAE", encoder=made("vit.ViT", **sizes(pool="mean")), decoder_dim=16, decoder_heads=2)
    report = optimize(model)
    assert {"encoder.transformer", "decoder"} <= {row.path for row in report.fused} and not report.left
