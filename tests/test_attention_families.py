"""Tests of compact transformers, CaiT, DeepViT, LV-ViT and Refiner beside those of test_pyramids.py.

Oracles: those of catalogue/equations.py, with the same random weights, in float64.
"""

import copy

import pytest
import torch
from agreement import same
from budget import allowed, telling
from catalogue.ours import CASES, pair
from interpreter import interpreting
from torch import nn

from fastvit_triton import create_model, explain, load_weights
from fastvit_triton.checkpoints import WeightsError
from fastvit_triton.convert.readers import ours_tokens
from fastvit_triton.models.cct import sequence_pool
from fastvit_triton.models.deepvit import ReAttention
from fastvit_triton.models.lvvit import draw_box, mix_box
from fastvit_triton.train import mix_tokens

DENSE = ["lvvit", "refiner"]


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("mixes", [True, False])
def test_dense_training_mixes_tokens_and_takes_logits_back(name, mixes):
    """Oracle: the family's equations with the box that was drawn, in training mode; values and every gradient."""
    case = CASES[name]
    ours, theirs = (model.train() for model in pair(case, case.sizes[0], mix_token=mixes))
    images = torch.randn(3, 3, *case.sizes[0]).double()
    ours.set_dense_training()
    for seed in range(8):  # until the box is neither empty nor everything
        torch.manual_seed(seed)
        *found, box = ours(images)
        if (box[0] < box[1] < 3 and box[2] < box[3] < 5) or not mixes:
            break
    assert mixes == (box != (0, 0, 0, 0))
    ours.load_state_dict(theirs.state_dict())  # the BatchNorms' statistics as before
    ours.zero_grad()
    torch.manual_seed(seed)
    *found, box = ours(images)
    wanted = theirs(images, box)
    assert all(same(*both) for both in zip(found, wanted, strict=True))
    for logits, patches in (found, wanted):
        (logits.square().mean() + patches.square().mean()).backward()
    for (key, parameter), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert same(parameter.grad, other.grad), key
    assert torch.is_tensor(ours.eval()(images))


def test_boxes_are_those_of_mix_token():
    """Oracle: `train.mix_tokens`; a box lies in the grid, and the same mixing twice changes nothing."""
    tokens, areas = torch.randn(4, 15, 2), []
    for _ in range(200):
        top, bottom, left, right = box = draw_box((3, 5))
        assert 0 <= top <= bottom <= 3 and 0 <= left <= right <= 5
        assert torch.equal(mix_box(tokens, box, (3, 5)), mix_tokens(tokens, box, (3, 5)))
        assert torch.equal(mix_box(mix_box(tokens, box, (3, 5)), box, (3, 5)), tokens)
        areas.append((bottom - top) * (right - left))
    assert len(set(areas)) > 3


def test_class_blocks_leave_the_patches_unchanged():
    """Oracle: the patches before the class blocks, after the same norm."""
    case = CASES["cait"]
    model, _ = pair(case, case.sizes[0])
    images = torch.randn(2, 3, *case.sizes[0]).double()
    features, maps = model.forward_intermediates(images, 1, norm=True, output_fmt="NLC")
    assert torch.equal(features[:, 1:], maps[0]) and features.shape[1] == maps[0].shape[1] + 1


def test_folded_batch_norms_equal_the_modules():
    """Oracle: the convolution and the BatchNorm as modules, which hooks require; their statistics change the fold.
    Modules in their place are called."""
    layer = ReAttention(12, 3, 0.5).double().eval()
    nn.init.normal_(layer.reatten_matrix.bias)
    x = torch.randn(2, 7, 12).double()
    for _ in range(2):
        folded = layer(x)
        handle = layer.var_norm.register_forward_hook(lambda *_: None)
        assert same(folded, layer(x))
        handle.remove()
        layer.train()(x)  # moves the running statistics
        assert not torch.equal(layer.eval()(x), folded)
    conv, norm = layer.reatten_matrix, layer.var_norm
    for owner, other in (("var_norm", nn.GroupNorm(3, 3)), ("reatten_matrix", nn.Sequential(conv, nn.Softplus()))):
        layer.reatten_matrix, layer.var_norm = conv, norm
        setattr(layer, owner, other.double().eval())
        q, k, v = layer.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        maps = layer.var_norm(layer.reatten_matrix((q @ k.mT * 4**-0.5).softmax(-1)))
        assert same(layer(x), layer.proj((0.5 * maps @ v).transpose(1, 2).flatten(2)))


@torch.no_grad()
def test_sequence_pooling_is_attention_of_one_query():
    """Oracle: softmax(x w + b)ᵀ x in float64; the kernel's error is at most twice PyTorch's and one rounding."""
    score, x = nn.Linear(24, 1), torch.randn(3, 17, 24)
    plain, truth = sequence_pool(x, score), sequence_pool(x.double(), copy.deepcopy(score).double())
    with interpreting():
        fused = ours_tokens.attend_to_all(x, score)
    most = allowed((plain - truth).abs().max(), telling(truth).abs().max(), torch.float32)
    assert not torch.equal(fused, plain)
    assert (fused - truth).abs().max() <= most


def softmaxes(model: nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    """The maps by which the oracle multiplies its values, in the order of its layers."""
    found, handles = [], []
    for module in model.modules():
        name = type(module).__name__
        if name in ("Attention", "TalkingHeadAttn"):
            handles.append(module.attn_drop.register_forward_pre_hook(lambda _, given: found.append(given[0])))
        elif name == "ClassAttn":
            module.fused_attn = False
            handles.append(module.attn_drop.register_forward_pre_hook(lambda _, given: found.append(given[0])))
        elif name in ("Probabilities", "Mixed"):
            own = module.change
            module.change = lambda maps, own=own: (found.append(own(maps)), found[-1])[1]
    model(images)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("name", ["cct", "compact_cvt", "vit_lite", "cait", "deepvit", "deepvit_stem", "lvvit"])
@torch.no_grad()
def test_captured_maps_are_the_oracles(name):
    """Oracle: what the oracle multiplies its values by."""
    case = CASES[name]
    ours, theirs = (model.eval() for model in pair(case, case.sizes[0]))
    images = torch.randn(2, 3, *case.sizes[0]).double()
    wanted, before = softmaxes(theirs, images), ours(images)
    with explain.capture(ours) as seen:
        assert same(ours(images), before)
    assert not seen.left and len(seen.layers) == len(wanted) > 1
    for layer, maps in zip(seen.layers, wanted, strict=True):
        assert same(layer.map().double(), maps, torch.finfo(torch.float32).eps), layer.path


@torch.no_grad()
def test_captured_maps_are_refined():
    """Oracle: what the BatchNorm of the refined maps returns, times the scale; rows of the others sum to 1, and more
    where they add the map before them."""
    case = CASES["refiner"]
    model, _ = pair(case, case.sizes[0])
    model.eval()
    wanted = {}
    for path, module in model.named_modules():
        if path.endswith(".adapt_bn"):
            module.register_forward_hook(lambda module, x, y, path=path: wanted.update({path[:-9]: y}))
    with explain.capture(model) as seen:
        model(torch.randn(2, 3, *case.sizes[0]).double())
    refined = [layer for layer in seen.layers if layer.path in wanted]
    assert not seen.left and len(refined) == len(wanted) and 0 < len(wanted) < len(seen.layers)
    for layer in refined:
        assert same(layer.map(), model.get_submodule(layer.path).scale * wanted[layer.path])
    sums = [layer.map().sum(-1) for layer in seen.layers if layer.path not in wanted]
    assert same(sums[0], torch.ones_like(sums[0])) if len(sums) == 1 else all((s > 1 - 1e-9).all() for s in sums)


@pytest.mark.parametrize("name", ["deepvit", "deepvit_stem", "lvvit", "refiner"])
@torch.no_grad()
def test_checkpoints_of_the_authors(name):
    """Oracle: the family's logits after its tensors, with counters of its BatchNorms, are read; resized positions."""
    case = CASES[name]
    ours, theirs = (model.eval() for model in pair(case, (16, 16)))
    for parameter in ours.parameters():
        parameter.zero_()
    state = {key: t for key, t in theirs.state_dict().items() if "num_batches" not in key}  # as some files have it
    report = load_weights(ours, {"state_dict": state})
    assert not report.dropped and not report.reinitialised and not report.positions
    images = torch.randn(2, 3, 16, 16).double()
    assert same(ours(images), theirs(images))
    larger = create_model(case.name, **case.options | dict(num_classes=5, img_size=(24, 16))).double()
    assert load_weights(larger, theirs.state_dict()).positions.startswith("4x4 (assumed) resized to 6x4 (bi")
    with pytest.raises(WeightsError, match="does not fit"):
        load_weights(ours, create_model("vit_digits_patch2_8").state_dict())


def test_dense_training_needs_every_patch():
    """Oracle: the sentence."""
    model = create_model("lvvit_tiny", img_size=32, depth=1, patch_drop_rate=0.5)
    with pytest.raises(ValueError, match=r"patch_drop_rate is 0.5; dense training needs all patches: use 0"):
        model.set_dense_training()
