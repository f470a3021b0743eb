"""Tests of Swin, Twins, PVT and CPVT. Oracles: see pyramids.py; all weights are random, and in float64."""

import pytest
import torch
from pyramids import CASES, gradients, loss, pair
from timm.layers import resize_rel_pos_bias_table
from timm.models import swin_transformer
from torch import Tensor, nn

from fastvit_triton import create_model
from fastvit_triton.layers import Attention, ReducedAttention, Window, WindowAttention, resize_pos_embed, resize_table

EPS64 = torch.finfo(torch.float64).eps
ROUNDINGS = 84  # sums through the blocks in another order, as in test_models.py
SIZES = [(name, size) for name, case in CASES.items() for size in case.sizes]


def distance(a: Tensor, b: Tensor, least: float = 0.0) -> float:
    """‖a − b‖ / ‖b‖, with at least this norm of b."""
    assert a.shape == b.shape
    return float((a - b).detach().norm()) / max(float(b.detach().norm()), least, 1e-30)


def assert_same(case, ours: nn.Module, theirs: nn.Module, images: Tensor, seed: int = 0) -> None:
    """Asserts that logits and every gradient agree; both models draw the same random numbers."""
    found = []
    for model, logits in ((ours, type(ours).__call__), (theirs, case.logits)):
        torch.manual_seed(seed)
        model.zero_grad()
        found.append(logits(model, images))
        loss(found[-1]).backward()
    assert distance(*found) <= ROUNDINGS * EPS64
    own, wanted = gradients(ours), gradients(theirs, case.convert)
    least = 1e-3 * max(float(g.norm()) for g in wanted.values())  # key biases have gradient 0 in exact arithmetic
    assert own.keys() == wanted.keys()
    for name, gradient in own.items():
        assert distance(gradient, wanted[name], least) <= ROUNDINGS * EPS64, name


@pytest.mark.parametrize("name, size", SIZES, ids=str)
def test_logits_and_gradients_equal_the_oracles(name, size):
    """Oracle: the family's, in evaluation mode and in training mode without stochastic depth."""
    case = CASES[name]
    ours, theirs = pair(case, size, drop_path_rate=0.0)
    for mode in (False, True):
        assert_same(case, ours.train(mode), theirs.train(mode), torch.randn(2, 3, *size).double())


@pytest.mark.parametrize("name", [name for name in CASES if name != "pvt"])  # transformers draws other numbers
def test_stochastic_depth_equals_timms(name):
    """Oracle: the family's in training mode, with the same seed."""
    case = CASES[name]
    ours, theirs = pair(case, case.sizes[0], drop_path_rate=0.5)
    images = torch.randn(4, 3, *case.sizes[0]).double()
    assert_same(case, ours.train(), theirs.train(), images, seed=3)
    torch.manual_seed(4)
    assert distance(ours(images), ours(images)) > 0.01  # it drops


@pytest.mark.parametrize("name", CASES)
def test_twenty_steps_equal_the_oracles(name):
    """Oracle: the family's parameters after the same steps of SGD, to 1e-9."""
    case = CASES[name]
    models = pair(case, case.sizes[1], drop_path_rate=0.0)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in models]
    images = torch.randn(20, 2, 3, *case.sizes[1]).double()
    start = {name: parameter.clone() for name, parameter in models[0].state_dict().items()}
    for batch in images:
        for model, logits, optimizer in zip(models, (type(models[0]).__call__, case.logits), optimizers, strict=True):
            optimizer.zero_grad()
            loss(logits(model.train(), batch)).backward()
            optimizer.step()
    wanted = case.convert(models[1].state_dict())
    assert all(float((t - wanted[name]).abs().max()) <= 1e-9 for name, t in models[0].state_dict().items())
    assert max(float((t - start[name]).abs().max()) for name, t in models[0].state_dict().items()) > 1e-2


@pytest.mark.parametrize(
    "options, size",
    [
        (dict(img_size=(23, 30), window_size=4), (23, 30)),  # no multiple of the patch: the rest is cut, as by timm
        (dict(img_size=16, window_size=4, always_partition=True), (16, 16)),
        (dict(img_size=16, window_size=4, dynamic_img_size=True), (22, 26)),
        (dict(img_size=12, window_size=(7, 3), qkv_bias=False), (12, 12)),
    ],
    ids=str,
)
def test_swin_with_other_windows_equals_timms(options, size):
    """Oracle: timm's: windows on small, odd and other maps than those that the model is built for."""
    case = CASES["swin"]
    shared = case.options | options
    theirs = swin_transformer.SwinTransformer(**shared, num_classes=5, drop_path_rate=0.0).double()
    ours = create_model(case.name, **shared, num_classes=5, drop_path_rate=0.0).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.0, 0.3)
    ours.load_state_dict(theirs.state_dict())
    assert_same(case, ours, theirs, torch.randn(2, 3, *size).double())


def test_pvt_resamples_positions():
    """Oracle: the same model, built for that size, with tables resized before the call; the class token's row stays."""
    options = CASES["pvt"].options | dict(num_classes=5)
    model, larger = (create_model("pvt_tiny", img_size=size, **options) for size in (32, (40, 64)))
    state = model.state_dict()
    for key, old, new, T in (("pos_embed1", (8, 8), (10, 16), 0), ("pos_embed2", (4, 4), (5, 8), 1)):
        state[key] = resize_pos_embed(state[key], old, new, T, "bilinear")
        assert torch.equal(state[key][:, :T], model.state_dict()[key][:, :T])
    larger.load_state_dict(state)
    images = torch.randn(2, 3, 40, 64)
    assert torch.equal(model.eval()(images), larger.eval()(images))


@pytest.mark.parametrize("padding, invariant", [("circular", True), ("zeros", False)])
def test_cpvt_knows_positions_from_the_zeros_beyond_the_border(padding, invariant):
    """Oracle: shifting the image by whole patches, around its borders, changes no logit of a mean over tokens, unless
    the border can be seen."""
    options = CASES["cpvt_gap"].options | dict(img_size=(16, 24), num_classes=5, peg_padding=padding)
    model = create_model("cpvt_small_gap", **options).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    images = torch.randn(2, 3, 16, 24).double()
    change = distance(model(images.roll((4, 8), (2, 3))), model(images))
    assert change <= ROUNDINGS * EPS64 if invariant else change > 1e-3


def test_attention_without_reduction_is_attention():
    """Oracle: `Attention` with the same projections."""
    ours, plain = ReducedAttention(12, 3, 1).double(), Attention(12, 3).double()
    with torch.no_grad():
        plain.qkv.weight.copy_(torch.cat((ours.q.weight, ours.kv.weight)))
        plain.qkv.bias.copy_(torch.cat((ours.q.bias, ours.kv.bias)))
    plain.proj.load_state_dict(ours.proj.state_dict())
    x = torch.randn(2, 4, 5, 12).double()
    assert distance(ours(x), plain(x.flatten(1, 2)).unflatten(1, (4, 5))) <= ROUNDINGS * EPS64


@pytest.mark.parametrize("size", [(4, 4), (2, 5), (1, 3)])
def test_bias_of_every_pair_equals_timms(size):
    """Oracle: timm's indices of a table, values and gradient."""
    ours = WindowAttention(6, 2, Window(size)).double()
    theirs = swin_transformer.WindowAttention(6, 2, window_size=size).double()
    theirs.relative_position_bias_table = ours.relative_position_bias_table
    found = [ours.bias(), theirs._get_rel_pos_bias()[0]]
    assert torch.equal(*found)
    weights = torch.randn_like(found[0])
    grads = [torch.autograd.grad((t * weights).sum(), ours.relative_position_bias_table)[0] for t in found]
    assert distance(*grads) <= ROUNDINGS * EPS64


@pytest.mark.filterwarnings("ignore:torch.searchsorted", "ignore:Using a non-tuple sequence")  # in timm
@pytest.mark.parametrize("old, new", [((7, 7), (12, 12)), ((7, 7), (4, 4)), ((4, 4), (5, 3)), ((2, 2), (7, 7))])
def test_resized_tables_equal_timms(old, new):
    """Oracle: timm's function, in float32."""
    table = torch.randn((2 * old[0] - 1) * (2 * old[1] - 1), 3)
    want = resize_rel_pos_bias_table(table, new, ((2 * new[0] - 1) * (2 * new[1] - 1), 3), old)
    assert distance(resize_table(table, old, new), want) <= 4 * torch.finfo(torch.float32).eps  # four terms each
    assert torch.equal(resize_table(table, old, old), table)


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("swin_tiny_patch4_window7_224", dict(depths=(2, 2)), "num_heads has 4 values, and depths has 2"),
        ("swin_tiny_patch4_window7_224", dict(embed_dim=100), "100 channels, which is no multiple of its 3 heads"),
        ("swin_tiny_patch4_window7_224", dict(window_size=0), "window_size is 0; use numbers above 0"),
        ("swin_tiny_patch4_window7_224", dict(window_size=(7, 7, 7)), "its type is int or tuple"),
        ("swin_tiny_patch4_window7_224", dict(depths=(2, 2.5, 6, 2)), "its type is tuple"),
        ("swin_tiny_patch4_window7_224", dict(global_pool="token"), "global_pool is 'token'; use one of avg, none"),
        ("twins_svt_small", dict(img_size=24), "img_size height is 24; this model needs at least 32"),
        ("pvt_tiny", dict(sr_ratios=(8, 4, 2, 2)), "the class token is in the last stage"),
        ("pvt_tiny", dict(class_token=False), "use global_pool='avg' without a class token"),
        ("cpvt_tiny", dict(pegs=13), "pegs is 13; the model has 12 blocks"),
        ("cpvt_tiny", dict(peg_padding="ones"), "peg_padding is 'ones'; use one of zeros, "),
    ],
)
def test_bad_options_raise_one_sentence(name, options, words):
    """Oracle: what was given and what would do, on one line."""
    with pytest.raises(ValueError, match=words) as raised:
        create_model(name, **options)
    assert "\n" not in str(raised.value)


def test_wrong_images_raise_one_sentence():
    """Oracle: channels and size, both given."""
    model = create_model(CASES["swin"].name, **CASES["swin"].options, img_size=16)
    with pytest.raises(ValueError, match=r"axes \[B, 3, H, W\], got shape \[1, 1, 16, 16\]"):
        model(torch.zeros(1, 1, 16, 16))
    with pytest.raises(ValueError, match=r"image is 16x18 pixels, the model takes 16x16; .* dynamic_img_size=True"):
        model(torch.zeros(1, 3, 16, 18))
    with pytest.raises(ValueError, match="image is 31x64 pixels; the model needs at least 32x32"):
        create_model("pvt_tiny", depths=(1, 1, 1, 1))(torch.zeros(1, 3, 31, 64))
