"""Tests of CvT, BoTNet, VT-ResNet and attention as convolution beside those of test_pyramids.py.

Oracles: those of catalogue/equations.py, with the same random weights, in float64.
"""

import copy
import re

import pytest
import torch
from agreement import same
from budget import allowed, telling
from catalogue.ours import CASES, pair
from interpreter import interpreting
from test_explain_pyramids import recorded
from timm.models._manipulate import group_parameters

from fastvit_triton import create_model, explain, freeze, load_weights
from fastvit_triton.kernels.settings import forcing
from fastvit_triton.models.attention_conv import QuadraticAttention
from fastvit_triton.models.botnet import BottleneckAttention
from fastvit_triton.models.vt import VisualTransformer


@pytest.mark.parametrize("name", ["cvt", "botnet", "vt", "attention_conv", "attention_conv_full"])
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
        found = layer.map()
        maps = maps.view_as(found) if maps.numel() == found.numel() else maps.expand_as(found)  # one for all images
        assert same(found.double(), maps, torch.finfo(torch.float32).eps), layer.path


def test_gradients_of_a_map_for_all_images_are_each_images():
    """Oracle: autograd's gradient of the map, for one image at a time; the relevance of both."""
    case = CASES["attention_conv"]
    model = pair(case, case.sizes[0])[0].eval()
    images, wanted, classes = torch.randn(2, 3, *case.sizes[0]).double(), [], torch.tensor([1, 0])
    for image, k in zip(images, classes, strict=True):
        with recorded() as maps:
            logits = model(image[None])
        wanted.append(torch.autograd.grad(logits[0, k], maps))
    with explain.capture(model, gradients=True) as seen:
        model(images).gather(1, classes[:, None]).sum().backward()
    for layer, *grads in zip(seen.layers, *wanted, strict=True):
        assert same(layer.map_grad(), torch.stack(grads))
    assert explain.class_relevance(model, images).shape == (2, *seen.layers[0].shape[2:])


@pytest.mark.full
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
        most = allowed((own - want).abs().max(), telling(want).abs().max(), torch.float32)
        assert not torch.equal(folded, own)
        assert (folded - want).abs().max() <= most
        for twin in (model, truth, plain):
            twin.train()(images.to(next(twin.parameters()).dtype))
            twin.eval()


@torch.no_grad()
def test_botnet_has_timms_methods():
    """Oracle: timm's: intermediates of the stages, which follow the stem; layers of the parameters; other heads."""
    case = CASES["botnet"]
    ours, theirs = models = [model.eval() for model in pair(case, case.sizes[0])]
    images = torch.randn(2, 3, *case.sizes[0]).double()
    found, wanted = (model.forward_intermediates(images, intermediates_only=True) for model in models)
    assert all(same(*both) for both in zip(found, wanted[1:], strict=True))
    assert same(ours.forward_features(images), theirs.forward_features(images).permute(0, 2, 3, 1))
    assert same(ours.forward_head(ours.forward_features(images), True), theirs.forward_head(wanted[-1], True))
    for info, timms in zip(ours.feature_info, theirs.feature_info[1:], strict=True):
        assert (info["num_chs"], info["reduction"]) == (timms["num_chs"], timms["reduction"])
    for coarse in (False, True):
        grouped = [group_parameters(model, model.group_matcher(coarse)) for model in models]
        assert grouped[0] == grouped[1]
    assert type(ours.get_classifier()) is type(theirs.get_classifier()) and not ours.no_weight_decay()
    for classes in (7, 0):
        for model in models:
            model.reset_classifier(classes)
        ours.load_state_dict(theirs.state_dict())
        assert same(ours(images), theirs(images))


@torch.no_grad()
def test_checkpoints_of_botnet():
    """Oracle: timm's model; for another size, PyTorch's linear interpolation of the embeddings, as in SAM."""
    case = CASES["botnet"]
    ours, theirs = (model.eval() for model in pair(case, (24, 40)))
    for parameter in ours.parameters():
        parameter.zero_()
    report = load_weights(ours, {"state_dict": theirs.state_dict()})
    assert not report.dropped and not report.reinitialised and not report.positions
    images = torch.randn(2, 3, 24, 40).double()
    assert same(ours(images), theirs(images))
    larger = create_model(case.name, **case.options | dict(num_classes=5, img_size=(32, 40))).double()
    found = load_weights(larger, theirs.state_dict()).positions
    assert found.startswith("height_rel 11 resized to 15 (linear)") and "width" not in found
    table = theirs.stages[1][0].self_attn.pos_embed.height_rel
    wanted = torch.nn.functional.interpolate(table.mT[None], 15, mode="linear")[0].mT
    assert torch.equal(larger.stages[1][0].self_attn.pos_embed.height_rel, wanted)


@torch.no_grad()
def test_features_of_visual_transformers():
    """Oracle: the oracle's tokens, their mean as features of the head, and the map that its last module reads."""
    case = CASES["vt"]
    ours, theirs = (model.eval() for model in pair(case, case.sizes[0]))
    images, read = torch.randn(2, 3, *case.sizes[0]).double(), []
    theirs.stages[-1][-1].register_forward_hook(lambda _, given, found: read.append((given[0], found[1])))
    case.logits(theirs, images)
    ((X, T),) = read
    features, maps = ours.forward_intermediates(images, return_prefix_tokens=True)
    assert same(features, T) and same(ours.forward_head(features, pre_logits=True), T.mean(1))
    assert same(maps[-1][0].flatten(2).mT, X) and same(maps[-1][1], T) and maps[0][1] is None
    assert [info["reduction"] for info in create_model("vt_resnet18").feature_info] == [4, 8, 16, 16]
    ours.reset_classifier(3)
    assert ours(images).shape == (2, 3)
    before = ours.state_dict()
    report = load_weights(ours, before)
    assert report.family == "VT-ResNet" and not report.dropped and not report.reinitialised


@torch.no_grad()
def test_tokens_need_no_projection_of_their_own_width():
    """Oracle: the paper's equations with one width; the second tokenizer and the projector have no values either."""
    layer = VisualTransformer(6, 4, 6, 6, recurrent=True).double()
    X, T = torch.randn(2, 20, 6).double(), torch.randn(2, 4, 6).double()
    x, t = layer(X, T)
    K, Q, F1, F2 = (m.weight.T for m in (layer.attn.key, layer.attn.query, layer.mlp.fc1, layer.mlp.fc2))
    T = (X @ (T @ layer.tokenizer.recur.weight.T).mT).softmax(1).mT @ X
    T = T + ((T @ K) @ (T @ Q).mT).softmax(2) @ T
    T = T + (T @ F1).relu() @ F2
    X = X + ((X @ layer.projector.query.weight.T) @ (T @ layer.projector.key.weight.T).mT).softmax(2) @ T
    assert same(t, T) and same(x, X) and len(list(layer.parameters())) == 7


@pytest.mark.parametrize("kernel", [(3, 3), (1, 3), (5, 5)], ids=str)
@torch.no_grad()
def test_heads_are_a_convolution(kernel):
    """Oracle: `conv2d`, where its window is inside the map: theorem 1 of arXiv:1911.03584, in float64."""
    (rows, columns), D, grid = kernel, 6, (8, 9)
    heads, (y, x) = rows * columns, (rows // 2, columns // 2)
    layer = QuadraticAttention(D, heads, grid).double()
    torch.nn.init.eye_(layer.proj.weight)
    torch.nn.init.zeros_(layer.proj.bias)
    weight, bias, image = (torch.randn(shape).double() for shape in ((D, D, *kernel), (D,), (2, D, *grid)))
    layer.set_convolution(weight, bias)
    found = layer(image.flatten(2).mT).mT.unflatten(2, grid)
    assert same(found[:, :, y : grid[0] - y, x : grid[1] - x], torch.nn.functional.conv2d(image, weight, bias))
    with pytest.raises(ValueError, match=f"the module needs one with {heads} taps, 6 channels and isotropic heads"):
        layer.set_convolution(weight[..., :1, :2])


@torch.no_grad()
def test_checkpoints_of_attention_as_convolution():
    """Oracle: the equations with the authors' names, their linear layer of concatenated pixels, and what is unused."""
    case = CASES["attention_conv"]
    ours, theirs = (model.eval() for model in pair(case, (10, 14)))
    images, wanted = torch.randn(2, 3, 10, 14).double(), theirs.state_dict()
    rows = [(r"^blocks\.(\d+)\.", r"encoder.layer.\1."), (r"\.attn\.(attention_\w+|value)", r".attention.self.\1")]
    rows += [(r"\.attn\.proj", ".attention.output.dense"), (r"\.norm1", ".attention.output.LayerNorm")]
    rows += [(r"mlp\.fc1", "intermediate.dense"), (r"mlp\.fc2", "output.dense"), (r"\.norm2", ".output.LayerNorm")]
    rows += [(r"^patch_embed\.proj", "features_upscale"), (r"^head", "classifier")]
    state = {"mask_embedding": torch.zeros(12), "encoder.layer.0.attention.self.R": torch.zeros(2, 2, 2, 2, 5)}
    for key, tensor in wanted.items():
        for ours_name, theirs_name in rows:
            key = re.sub(ours_name, theirs_name, key)
        state[key] = tensor.permute(0, 2, 3, 1).flatten(1) if key == "features_upscale.weight" else tensor
    for parameter in ours.parameters():
        parameter.zero_()
    report = load_weights(ours, state)
    assert report.family == "attention-cnn" and not report.reinitialised and len(report.dropped) == 2
    assert same(ours(images), case.logits(theirs, images))
    larger = create_model(case.name, **case.options | dict(img_size=(12, 8), num_classes=5)).double()
    assert not load_weights(larger, ours.state_dict()).reinitialised  # nothing depends on the image's size


@torch.no_grad()
def test_frozen_maps_follow_their_parameters():
    """Oracle: the model that is not frozen, before and after its centres move."""
    case = CASES["attention_conv"]
    model = pair(case, (8, 12))[0].float().eval()
    frozen, images = copy.deepcopy(model), torch.randn(2, 3, 8, 12)
    freeze(frozen)
    for _ in range(2):
        for _ in range(2):
            assert torch.equal(frozen(images), model(images))
        for twin in (frozen, model):
            twin.blocks[0].attn.attention_centers.add_(0.5)


def test_attention_refuses_other_maps():
    """Oracle: the sentence."""
    with pytest.raises(ValueError, match=r"the map is \(3, 4\); the embeddings of distances are for \(4, 3\)"):
        BottleneckAttention(8, 2, (4, 3))(torch.zeros(1, 8, 3, 4))
    with pytest.raises(ValueError, match=r"x has 6 tokens; the grid \(4, 3\) has 12"):
        QuadraticAttention(8, 2, (4, 3))(torch.zeros(1, 6, 8))
