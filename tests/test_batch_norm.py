"""Tests of the conversion of transformers' LeViT and CvT, which have BatchNorms. Oracle: the original, in float64."""

import copy
import pickle

import pytest
import torch

pytest.importorskip("transformers")
import transformers
from foreign import redraw
from interpreter import interpreting
from test_convert import Recorder
from test_towers import EXACT, SINGLE, distance, joined, run
from test_towers_dense import dropping
from test_towers_timm import BATCHED
from towers import outputs

from fastvit_triton import optimize, revert
from fastvit_triton.engine.freeze import kept_folds
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.plan import forcing

LEVIT = dict(image_size=128, hidden_sizes=[16, 24, 32], num_attention_heads=[2, 3, 4], depths=[1, 1, 1])
LEVIT |= dict(key_dim=[4, 4, 4])
CVT = dict(embed_dim=[8, 16], depth=[1, 2], num_heads=[1, 2], patch_sizes=[7, 3], patch_stride=[4, 2])
CVT |= dict(patch_padding=[2, 1], mlp_ratio=[2.0, 2.0], cls_token=[False, True], drop_path_rate=[0.0, 0.2])
CVT |= {
    key: [value] * 2 for key, value in dict(kernel_qkv=3, padding_kv=1, padding_q=1, stride_kv=2, stride_q=1).items()
}
CVT |= dict(attention_drop_rate=[0.0, 0.0], drop_rate=[0.0, 0.0], qkv_bias=[True, False])
CVT |= dict(qkv_projection_method=["dw_bn"] * 2)


def dropped_paths(model):
    """LeViT with stochastic depth, for which its configuration takes integers only."""
    for module in model.modules():
        if hasattr(module, "drop_rate"):
            module.drop_rate = 0.5
    return model


MODELS = {
    "levit": lambda: transformers.LevitModel(transformers.LevitConfig(**LEVIT)),
    "levit_drop": lambda: dropped_paths(transformers.LevitModel(transformers.LevitConfig(**LEVIT))),
    "cvt": lambda: transformers.CvtModel(transformers.CvtConfig(**CVT)),
}
SIDES = {"levit": (128, 128), "levit_drop": (128, 128), "cvt": (20, 28)}
HOOKED = {  # ends of paths
    "levit": ("queries_keys_values", "queries_keys_values.batch_norm", "projection.linear", "linear_up", "activation"),
    "cvt": (
        "convolution", "normalization", "linear_projection", "projection_key", "attention.attention", "layernorm_after",
        "output.dense", "intermediate", "convolution_projection_value",
    ),
}  # fmt: skip


def made(name, dtype=torch.float64):
    """The model with random parameters and statistics, and images."""
    torch.manual_seed(1)
    model = redraw(MODELS[name]())
    for key, buffer in model.named_buffers():
        if key.endswith(("running_mean", "running_var")):
            buffer.uniform_(2.0, 4.0)  # without norms between its blocks, smaller variances make LeViT's scores large
    return model.to(dtype), dict(pixel_values=torch.randn(2, 3, *SIDES[name], dtype=dtype))


def same(model, original, given, tolerance=EXACT):
    """Asserts that outputs, all gradients and the statistics after the call are equal up to rounding; the outputs."""
    want = run(original, given)
    with using_backend("torch"):
        got = run(model, given)
    assert [g is None for g in got[1]] == [g is None for g in want[1]]
    assert distance(got[0], want[0]) <= tolerance and distance(joined(got[1]), joined(want[1])) <= tolerance
    for ours, theirs in zip(model.buffers(), original.buffers(), strict=True):
        assert distance(ours.double(), theirs.double()) <= EXACT if theirs.any() else not ours.any()
    return got[0]


@pytest.mark.parametrize("train", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("name", MODELS)
def test_model(name, train):
    """Outputs, gradients and statistics equal the original's, which remain so pickled; nothing is left after revert."""
    model, given = made(name)
    original = copy.deepcopy(model.train(train))
    report = optimize(model)
    expected = {"LevitMLPLayer"} | ({"LevitResidualLayer"} if train and name == "levit_drop" else set())
    assert report.fused and {row.type for row in report.left} <= expected
    got = same(model, original, given, BATCHED if train else EXACT)
    if not train:
        with using_backend("torch"):
            assert torch.equal(run(pickle.loads(pickle.dumps(model)), given)[0], got)
    revert(model)
    assert not any("forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize("name", ["levit", "cvt"])
def test_statistics(name):
    """After `freeze` BatchNorms are folded, anew after a training forward, whose writes PyTorch does not count."""
    model, given = made(name)
    original = copy.deepcopy(model)
    report = optimize(model.eval(), freeze=True)
    assert not report.left
    with using_backend("torch"), torch.no_grad():
        for _ in range(2):
            for _ in range(2):
                assert distance(outputs(model.eval(), given), outputs(original.eval(), given)) <= EXACT
            assert kept_folds(model.modules())
            for m in (model, original):
                torch.manual_seed(2)
                outputs(m.train(), given)


@pytest.mark.parametrize("name, path", [(name, path) for name, paths in HOOKED.items() for path in paths])
def test_hooks(name, path):
    """A hook on a submodule runs as in the original, also after `freeze`."""
    model, given = made(name)
    hooked = next(m for p, m in model.named_modules() if p.endswith(path))
    hooked.register_forward_hook(lambda module, given, y: 1.5 * y)
    original = copy.deepcopy(model.eval())
    optimize(model, freeze=True)
    with using_backend("torch"), torch.no_grad():
        assert distance(outputs(model, given), outputs(original, given)) <= EXACT


@pytest.mark.parametrize("name", ["cvt"])
def test_dropout(name):
    """With dropout the model equals the original, with the same random numbers."""
    model, given = made(name)
    dropping(model.train())
    original = copy.deepcopy(model)
    assert "own forward while training: attention dropout 0.3" in str(optimize(model.eval()))
    same(model.train(), original, given, BATCHED)


def originals(name):
    """A model of that name in float32 and images, and the original and its images in float64."""
    (truth, _), (plain, given) = made(name), made(name, torch.float32)
    return plain.eval(), given, truth.eval(), {key: x.double() for key, x in given.items()}


@pytest.mark.full
@pytest.mark.parametrize("name", ["levit", "cvt"])
def test_kernels(name):
    """Oracle: the original in float64, from which the kernels in the interpreter and PyTorch in float32 differ."""
    plain, given, truth, wide = originals(name)
    model = copy.deepcopy(plain)
    optimize(model)
    with interpreting(), forcing("fused"), Recorder() as launched:
        got = run(model, given)
    assert launched.ours
    want, own = run(truth, wide), run(plain, given)
    for exact, theirs, ours in zip(*((y, joined(gradients)) for y, gradients in (want, own, got)), strict=True):
        assert distance(ours, exact) <= SINGLE + 2 * distance(theirs, exact)


@pytest.mark.parametrize("name", ["levit", "cvt"])
def test_frozen_kernels(name):
    """As `test_kernels`, with folded BatchNorms, which leave none to PyTorch outside LeViT's stem."""
    plain, given, truth, wide = originals(name)
    model = copy.deepcopy(plain)
    optimize(model, freeze=True)
    with interpreting(), forcing("fused"), torch.no_grad(), Recorder() as launched:
        got = outputs(model, given)
    assert launched.ours
    assert sum("batch_norm" in op for op in launched.ops) == (4 if name == "levit" else 0)
    with torch.no_grad():
        want, own = outputs(truth, wide), outputs(plain, given)
    assert distance(got, want) <= SINGLE + 2 * distance(own, want)
