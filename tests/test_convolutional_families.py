"""Tests of CvT beside those of test_pyramids.py.

Oracles: those of convolutional_families.py, with the same random weights, in float64.
"""

import copy

import pytest
import torch
from interpreter import interpreting
from pyramids import CASES, pair
from test_explain_pyramids import recorded

from fastvit_triton import create_model, explain, freeze
from fastvit_triton.kernels.plan import forcing

ROUNDINGS = 84  # as in test_models.py
EPS64 = torch.finfo(torch.float64).eps


def same(a: torch.Tensor, b: torch.Tensor, eps: float = EPS64) -> bool:
    """True if ‖a − b‖ is at most the roundings of ‖b‖."""
    return a.shape == b.shape and float((a - b).detach().norm()) <= ROUNDINGS * eps * float(b.detach().norm())


@pytest.mark.parametrize("name", ["cvt"])
@torch.no_grad()
def test_captured_maps_are_the_oracles(name):
    """Oracle: every softmax of the oracle; the output is as without capture."""
    case = CASES[name]
    ours, theirs = (model.eval() for model in pair(case, case.sizes[0]))
    images = torch.randn(2, 3, *case.sizes[0]).double()
    before = ours(images)
    with recorded() as wanted:
        case.logits(theirs, images)
    with explain.capture(ours) as seen:
        assert same(ours(images), before)
    assert not seen.left and len(seen.layers) == len(wanted) > 1
    for layer, maps in zip(seen.layers, wanted, strict=True):
        assert same(layer.map().double(), maps.view_as(layer.map()), torch.finfo(torch.float32).eps), layer.path


def test_maps_of_training_models_have_a_reason():
    """Oracle: the sentence."""
    case = CASES["cvt"]
    model = create_model(case.name, **case.options, img_size=case.sizes[0]).train()
    with pytest.raises(ValueError, match="BatchNorm of its projections is in training mode"), explain.capture(model):
        model(torch.randn(2, 3, *case.sizes[0]))


@torch.no_grad()
def test_folded_projections_follow_their_statistics():
    """Oracle: the model whose BatchNorms are called, which hooks on them require; frozen or not, after a training
    forward, which changes running statistics uncounted. The difference is that of the kernels and of the fold."""
    model, _ = pair(CASES["cvt"], (16, 28))
    truth, plain = copy.deepcopy(model).eval(), copy.deepcopy(model).float().eval()
    model, images = model.float().eval(), torch.randn(4, 3, 16, 28)
    freeze(model)
    for _ in range(2):
        with interpreting(), forcing("fused"):
            for _ in range(2):
                folded = model(images[:1])
        want, own = truth(images[:1].double()), plain(images[:1])
        rounding = torch.finfo(torch.float32).eps * want.abs().max()
        assert not torch.equal(folded, own)
        assert (folded - want).abs().max() <= 2 * ((own - want).abs().max() + rounding)
        for twin in (model, truth, plain):
            twin.train()(images.to(next(twin.parameters()).dtype))
            twin.eval()


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("cvt_13_224", dict(class_token=False), "use global_pool='avg' without a class token"),
        ("cvt_13_224", dict(img_size=15), "img_size height is 15; this model needs at least 16"),
        ("cvt_13_224", dict(num_heads=(1, 2, 5)), "384 channels, which is no multiple of its 5 heads"),
    ],
)
def test_bad_options_raise_one_sentence(name, options, words):
    """Oracle: what was given and what would do, on one line."""
    with pytest.raises(ValueError, match=words) as raised:
        create_model(name, **options)
    assert "\n" not in str(raised.value)
