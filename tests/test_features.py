"""Tests of intermediate features. Oracle: timm's model of the same name, with the same weights, in float64."""

import copy
import pickle
import re

import pytest
import timm
import torch
from agreement import ROUNDINGS, one_sentence
from budget import telling
from catalogue import parameters, redraw
from interpreter import interpreting
from sampling import marked
from timm.models._features import FeatureGetterNet as TimmGetter
from timm.models._manipulate import group_parameters
from torch import nn
from torch.utils._pytree import tree_flatten

from benchmarks.launch_recorder import recording
from fastvit_triton import ViTConfig, create_model, load_model, load_weights, save_weights
from fastvit_triton.kernels.settings import forcing
from fastvit_triton.models import CATALOGUE, FeatureGetterNet, model_config

TINY = dict(embed_dim=24, num_heads=2, depth=3)
PLAIN = [name for name in CATALOGUE if isinstance(model_config(name), ViTConfig)]  # see test_pyramids.py for others
PLAIN = [name for name in PLAIN if not name.startswith(("cait_", "setr_"))]  # class token after the blocks; pixels
TIMM_NAMES = [name for name in parameters.TIMM_NAMES if name in PLAIN]
OTHER_NAMES = [name for name in PLAIN if name not in TIMM_NAMES]
INTERMEDIATES = [
    dict(),
    dict(indices=2, norm=True, return_prefix_tokens=True),
    dict(indices=[-1, 0], output_fmt="NLC", return_prefix_tokens=True),
    dict(indices=[1, 1], norm=True, stop_early=True, intermediates_only=True),
    dict(indices=(0,), stop_early=True),
    dict(indices=1, output_dict=True, return_prefix_tokens=True, output_fmt="NLC"),
    dict(output_dict=True, intermediates_only=True),
]


def tiny(name: str, **options: object) -> dict[str, object]:
    """Options that make a model small: two patches by three, three narrow blocks."""
    height, width = model_config(name).patch_size
    return TINY | dict(img_size=(2 * height, 3 * width)) | options


def distinct(names: list[str]) -> list[str]:
    """One name for each model that `tiny` leaves; of hybrid models the one with the smallest stem."""
    firsts = {(str(CATALOGUE[n].__name__), "distilled" in n, model_config(n, **tiny(n))): n for n in reversed(names)}
    return [name for name in firsts.values() if not re.search("_r(26|50)_", name)]


def assert_equal(found: object, wanted: object) -> None:
    """Asserts the same structure, and values within roundings of the largest."""
    (ours, form), (theirs, timms) = tree_flatten(found), tree_flatten(wanted)
    assert form == timms and [y.shape for y in ours] == [y.shape for y in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert float((a - b).detach().norm() / telling(b).detach().norm()) <= ROUNDINGS * torch.finfo(a.dtype).eps


PAIRS = {name: dict() for name in distinct(TIMM_NAMES)} | {"vit_tiny_patch16_384": dict(global_pool="avg")}


def tiny_vit(name: str) -> bool:
    """True for the models of the fast tests."""
    return name.startswith("vit_tiny_p")


@pytest.fixture(scope="module", params=marked(PAIRS, pytest.mark.fast, tiny_vit))
def twins(request) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """Our model, timm's with the same weights, and images."""
    torch.manual_seed(0)
    options = tiny(request.param, num_classes=5, **PAIRS[request.param])
    theirs = redraw(timm.create_model(request.param, **options)).double().eval()
    ours = create_model(request.param, **options).double().eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs, torch.randn(2, 3, *ours.config.img_size).double()


@pytest.mark.few(21)
@torch.no_grad()
def test_intermediates_equal_timms(twins):
    """Oracle: timm's methods, for all options."""
    ours, theirs, images = twins
    for options in INTERMEDIATES:
        assert_equal(ours.forward_intermediates(images, **options), theirs.forward_intermediates(images, **options))
    for options in (dict(), dict(n=[0, 2], reshape=True, return_prefix_tokens=True), dict(n=2, norm=True)):
        assert_equal(ours.get_intermediate_layers(images, **options), theirs.get_intermediate_layers(images, **options))


def test_information_and_groups_equal_timms(twins):
    """Oracle: timm's `feature_info`, and its layers of every parameter by each model's own matcher."""
    ours, theirs, _ = twins
    assert ours.feature_info == [{key: stage[key] for key in ours.feature_info[0]} for stage in theirs.feature_info]
    for coarse in (False, True):
        found, wanted = (
            group_parameters(model, model.group_matcher(coarse=coarse), reverse=True) for model in (ours, theirs)
        )
        assert found == wanted and len(set(found.values())) == TINY["depth"] + 2


@pytest.mark.few(7)
@torch.no_grad()
def test_pruned_and_reset_models_equal_timms(twins):
    """Oracle: timm's keys and outputs after the same calls; a head's values are its own, so ours replace them."""
    for indices, norm, head in ((1, False, True), ([0, 1], True, True), ([-2], True, False)):
        ours, theirs, images = map(copy.deepcopy, twins)
        kept = [m.prune_intermediate_layers(indices, prune_norm=norm, prune_head=head) for m in (ours, theirs)]
        assert kept[0] == kept[1] and ours.state_dict().keys() == theirs.state_dict().keys()
        assert_equal(ours(images), theirs(images))
        assert_equal(ours.forward_intermediates(images), theirs.forward_intermediates(images))
        again = create_model(ours.variant, **vars(ours.config))
        assert again.state_dict().keys() == ours.state_dict().keys()
    for classes, pool in ((7, None), (4, ""), (0, "token" if twins[0].config.class_token else "avg")):
        ours, theirs, images = map(copy.deepcopy, twins)
        for model in (ours, theirs):
            model.reset_classifier(classes, pool)
        assert ours.state_dict().keys() == theirs.state_dict().keys() and ours.num_classes == classes
        assert create_model(ours.variant, **vars(ours.config)).state_dict().keys() == ours.state_dict().keys()
        ours.load_state_dict(theirs.state_dict())
        assert_equal(ours(images), theirs(images))


@pytest.mark.few(16)
@torch.no_grad()
def test_backbones_equal_timms(twins):
    """Oracle: timm's FeatureGetterNet: keys, information and features, for its default and other stages."""
    for options in (dict(out_indices=3), dict(out_indices=(-3, -2)), dict(out_indices=[1], norm=True)):
        ours, theirs, images = map(copy.deepcopy, twins)
        ours, theirs = FeatureGetterNet(ours, **options), TimmGetter(theirs, **options)
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        assert list(ours.feature_info) == list(theirs.feature_info) and len(ours.feature_info) == TINY["depth"]
        for what in ("channels", "reduction", "module_name", "get_dicts"):
            found, wanted = getattr(ours.feature_info, what), getattr(theirs.feature_info, what)
            assert found() == wanted() and found(idx=1) == wanted(idx=1) and found(idx=[2, 0]) == wanted(idx=[2, 0])
        assert_equal(ours(images), theirs(images))


@pytest.mark.few(15)
@pytest.mark.parametrize("name", TIMM_NAMES)
@torch.no_grad()
def test_every_backbone_has_timms_form(name):
    """Oracle: timm's `features_only` model: keys, information, layers of the parameters, and shapes."""
    options = tiny(name, features_only=True, out_indices=(0, -2))
    ours, theirs = create_model(name, **options), timm.create_model(name, **options)
    assert ours.state_dict().keys() == theirs.state_dict().keys() and ours.out_indices == theirs.out_indices
    assert list(ours.feature_info) == list(theirs.feature_info)
    found, wanted = (group_parameters(m.model, m.model.group_matcher(), reverse=True) for m in (ours, theirs))
    assert found == wanted
    assert [y.shape for y in ours(torch.zeros(2, 3, *options["img_size"]))] == [(2, TINY["embed_dim"], 2, 3)] * 2


@pytest.mark.parametrize("name", marked(distinct(OTHER_NAMES), pytest.mark.fast, lambda name: "naflex" in name))
@torch.no_grad()
def test_models_without_timms_agree_with_themselves(name):
    """Oracle: the last intermediate with the final norm is what enters the pooling; pruned models give the same."""
    model = redraw(create_model(name, **tiny(name))).double().eval()
    config, images = model.config, torch.randn(2, model.config.in_chans, *model.config.img_size).double()
    if name.startswith("naflex"):
        images = patches(images, config.patch_size)
    features, found = model.forward_intermediates(images, [0, 2], True, norm=True, output_fmt="NLC")
    found = [torch.cat(pair[::-1], 1) if isinstance(pair, tuple) else pair for pair in found]
    assert_equal((features, found[-1]), (model.forward_features(images),) * 2)
    backbone = FeatureGetterNet(copy.deepcopy(model), (0, 2), norm=True, output_fmt="NLC")
    assert_equal(backbone(images), [y[:, model.num_prefix_tokens :] for y in found])
    groups = group_parameters(model, model.group_matcher(), reverse=True)
    assert {name.split(".")[1]: layer for name, layer in groups.items() if name.startswith("blocks.")} == {
        "0": 1, "1": 2, "2": 3
    }  # fmt: skip


def patches(images: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """NaFlex's input: patches with their places, and one of padding in the second image."""
    (P, Q), (rows, columns) = size, (images.shape[2] // size[0], images.shape[3] // size[1])
    pixels = images.unflatten(3, (columns, Q)).unflatten(2, (rows, P)).permute(0, 2, 4, 3, 5, 1)
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).to(images).expand(len(images), -1, -1)
    both = torch.cat((places, pixels.flatten(3).flatten(1, 2)), -1)
    both[1, -1, :2] = -1
    return both


def test_two_blocks_have_two_features():
    """Oracle: as many maps as blocks, where the usual number of features is 3."""
    assert len(create_model("cct_2_3x2_32", features_only=True)(torch.zeros(1, 3, 32, 32))) == 2


@pytest.mark.fast
@torch.no_grad()
def test_naflex_intermediates_equal_timms():
    """Oracle: timm's NaFlexVit on the same patches, in its input form; padding tokens are undefined."""
    name = "naflexvit_base_patch16_gap"
    theirs = redraw(timm.create_model(name, **TINY)).double().eval()
    ours = create_model(name, **TINY).double().eval()
    load_weights(ours, theirs.state_dict())
    given = patches(torch.randn(2, 3, 32, 48).double(), (16, 16))
    places, valid = given[..., :2].long(), given[..., 0] >= 0
    inputs = dict(patches=given[..., 2:], patch_coord=places.clamp(min=0), patch_valid=valid)
    options = dict(indices=2, norm=True, output_fmt="NLC", return_prefix_tokens=True)
    (_, found), (_, wanted) = (m.forward_intermediates(x, **options) for m, x in ((ours, given), (theirs, inputs)))
    for (y, prefix), (z, timms) in zip(found, wanted, strict=True):
        assert_equal((y[valid], prefix), (z[valid], timms))
    assert [stage["reduction"] for stage in ours.feature_info] == [s["reduction"] for s in theirs.feature_info]
    with pytest.raises(ValueError, match="output_fmt is 'NCHW'; this model's features have 'NLC'"):
        ours.forward_intermediates(given)


@torch.no_grad()
def test_other_image_sizes_have_other_maps():
    """Oracle: timm's model with dynamic_img_size."""
    options = tiny("vit_small_patch16_224", dynamic_img_size=True, num_classes=5)
    theirs = redraw(timm.create_model("vit_small_patch16_224", **options)).double().eval()
    ours = create_model("vit_small_patch16_224", **options).double().eval()
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 64, 32).double()
    assert_equal(ours.forward_intermediates(images, 1), theirs.forward_intermediates(images, 1))


DIGITS = dict(embed_dim=16, depth=4, num_heads=2, img_size=6)


def digits(**options: object) -> nn.Module:
    """A small model with random weights."""
    return redraw(create_model("vit_digits_patch2_8", **DIGITS | options)).eval()


@pytest.mark.parametrize("way", ["fused", "mixed"])
def test_kernels_equal_the_pytorch_path(way, always_folded):
    """Oracle: the same model on PyTorch; each intermediate is read after all blocks have run, also when replayed."""
    model, images = digits(depth=3, init_values=0.5), torch.randn(2, 1, 6, 6)
    with torch.no_grad():
        wanted = model.forward_intermediates(images, [0, 1], norm=True)
        with interpreting(), forcing(way):
            for _ in range(3):
                assert_equal(model.forward_intermediates(images, [0, 1], norm=True), wanted)


@pytest.mark.fast
def test_intermediates_cost_no_launch(always_folded):
    """Oracle: the launches of `forward_features`: row statistics travel past the outputs that are taken."""
    model, images = digits().bfloat16(), torch.randn(4, 1, 6, 6, dtype=torch.bfloat16)
    counts = []
    for call in (model.forward_features, lambda x: model.forward_intermediates(x, output_fmt="NLC")):
        with recording("sm_90") as found, torch.no_grad():
            call(images)
        counts.append([launch.name for launch in found])
    assert counts[0] == counts[1]


@pytest.mark.fast
def test_stopping_early_runs_no_later_block():
    """Oracle: the blocks that are called."""
    model, called = digits(), []
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, i=i: called.append(i))
    model.forward_intermediates(torch.randn(1, 1, 6, 6), [1], stop_early=True)
    assert called == [0, 1]


@pytest.mark.fast
def test_checkpointed_gradients_are_bitwise_equal():
    """Oracle: the same backbone without checkpointing."""
    backbone, images, gradients = FeatureGetterNet(digits(), (0, 2)), torch.randn(2, 1, 6, 6), []
    for enable in (False, True):
        backbone.set_grad_checkpointing(enable)
        backbone.zero_grad()
        sum(y.square().sum() for y in backbone(images)).backward()
        gradients.append([p.grad.clone() for p in backbone.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert len(gradients[0]) == len(list(backbone.parameters()))


@pytest.mark.full
def test_backbones_compile_as_one_graph():
    """Oracle: the eager backbone; fullgraph=True raises on any graph break."""
    backbone, images = FeatureGetterNet(digits(), (0, -1), return_dict=True), torch.randn(2, 1, 6, 6)
    compiled = torch.compile(backbone, backend="aot_eager", fullgraph=True)
    found = compiled(images)
    torch._dynamo.reset()
    assert list(found) == ["blocks.0", "blocks.3"]
    assert_equal(found, backbone(images))


def test_backbones_are_copied_saved_and_loaded(tmp_path):
    """Oracle: the features of the whole model, from a copy, a pickle, and checkpoints whole and pruned."""
    model, images, file = digits(), torch.randn(2, 1, 6, 6), tmp_path / "whole.safetensors"
    save_weights(model, file)
    wanted = model.forward_intermediates(images, [0, 2], intermediates_only=True)
    backbone = create_model("vit_digits_patch2_8", features_only=True, out_indices=[0, 2], **DIGITS).eval()
    report = load_weights(backbone, file)
    assert {"blocks.3.mlp.fc2.bias", "norm.weight", "head.bias"} <= set(report.dropped)
    assert len(backbone.model.blocks) == 3 and all(map(torch.equal, backbone(images), wanted))
    for twin in (copy.deepcopy(backbone), pickle.loads(pickle.dumps(backbone))):
        assert all(map(torch.equal, twin(images), wanted))
    save_weights(backbone, file)
    again, _ = load_model(file)
    assert all(map(torch.equal, again.eval().forward_intermediates(images, [0, 2], intermediates_only=True), wanted))
    fresh = create_model("vit_digits_patch2_8", features_only=True, out_indices=[0, 2], **DIGITS).eval()
    assert load_weights(fresh, file).dropped == () and all(map(torch.equal, fresh(images), wanted))
    redraw(fresh).load_state_dict(backbone.state_dict())
    assert all(map(torch.equal, fresh(images), wanted))


def test_pruning_keeps_drop_path_rates():
    """Oracle: the rates of the blocks before, and of a model built from the config after."""
    model = digits(drop_path_rate=0.3)
    before = [block.drop_path1.p for block in model.blocks]
    model.prune_intermediate_layers([1])
    rebuilt = create_model(model.variant, **vars(model.config))
    assert [block.drop_path1.p for block in rebuilt.blocks] == pytest.approx(before[:2])


def test_features_take_part_in_training_options():
    """Oracle: timm's error cases: dropped patches have no map, and their tokens are returned."""
    model = digits(patch_drop_rate=0.5).train()
    with pytest.raises(ValueError, match="training drops patches"):
        model.forward_intermediates(torch.randn(1, 1, 6, 6))
    (tokens,) = model.get_intermediate_layers(torch.randn(1, 1, 6, 6))
    assert tokens.shape == (1, 4, 16)


@pytest.mark.fast
@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda m, x: m.forward_intermediates(x, 5), ValueError, "indices is 5; the model has 4 stages, so use 1 to 4"),
        (lambda m, x: m.forward_intermediates(x, 0), ValueError, "indices is 0"),
        (lambda m, x: m.forward_intermediates(x, [4]), ValueError, r"indices is \[4\]; .* give some of -4 to 3"),
        (lambda m, x: m.forward_intermediates(x, []), ValueError, r"indices is \[\]"),
        (lambda m, x: m.get_intermediate_layers(x, [-5]), ValueError, r"n is \[-5\]"),
        (lambda m, x: m.forward_intermediates(x, output_fmt="NHWC"), ValueError, "output_fmt is 'NHWC'; .* 'NLC'"),
        (lambda m, x: FeatureGetterNet(m, 9), ValueError, "out_indices is 9"),
        (lambda m, x: FeatureGetterNet(m, output_fmt="CHW"), ValueError, "output_fmt is 'CHW'"),
        (lambda m, x: m.prune_intermediate_layers([7]), ValueError, r"indices is \[7\]"),
        (lambda m, x: m.reset_classifier(3, "map"), ValueError, "global_pool is 'map', but the model has no attention"),
        (lambda m, x: m.reset_classifier(3, "max"), ValueError, "global_pool is 'max'; use one of"),
        (lambda m, x: create_model("vit_digits_patch2_8", out_indices=2), TypeError, "add features_only=True"),
    ],
)
def test_mistakes_raise_one_sentence_and_change_nothing(call, error, words):
    """Oracle: what was given and what would do, on one line; the model is as before."""
    model, images = digits(), torch.randn(1, 1, 6, 6)
    wanted, config = model(images), model.config
    with one_sentence(words, error):
        call(model, images)
    assert model.config == config and torch.equal(model(images), wanted)
