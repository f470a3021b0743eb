"""Tests of families that are no plain ViT. Oracles: those of catalogue/equations.py, in float64 with random weights."""

import copy
import math
from collections import Counter

import pytest
import torch
from agreement import EPS64, ROUNDINGS, distance, normal, one_sentence, seeded
from budget import allowed, telling
from catalogue.ours import CASES, gradients, loss, pair
from interpreter import interpreting
from sampling import sampled
from timm.layers import resize_rel_pos_bias_table
from timm.models import swin_transformer
from timm.models._features import FeatureGetterNet as TimmGetter
from timm.models._manipulate import group_parameters
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from fastvit_triton import create_model, explain, freeze, optimize
from fastvit_triton.engine import ways
from fastvit_triton.engine.batch_norm import normed
from fastvit_triton.engine.replay import calls
from fastvit_triton.engine.values import without_weights
from fastvit_triton.expected.trace import tracing
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.launch import targeting
from fastvit_triton.kernels.settings import forcing
from fastvit_triton.layers import Attention, ReducedAttention, Window, WindowAttention, resize_pos_embed, resize_table
from fastvit_triton.layers.normed import LinearNorm
from fastvit_triton.models import FeatureGetterNet
from fastvit_triton.models.crossvit import CrossAttention
from fastvit_triton.models.cvt import ConvBlock
from fastvit_triton.models.levit import DistanceAttention, DistanceDownsample
from fastvit_triton.models.tnt import SplitAttention
from fastvit_triton.train.build import build_masked_model
from fastvit_triton.train.data import DIGITS_MEAN, DIGITS_STD, digits
from fastvit_triton.train.settings import RECIPES

HALF = [(torch.float32, "mixed"), (torch.bfloat16, "fused"), (torch.bfloat16, "mixed")]
ATTENTIONS = Attention, CrossAttention, DistanceAttention, DistanceDownsample, ReducedAttention, SplitAttention
ATTENTIONS += (WindowAttention,)
SIZES = [(name, size) for name, case in CASES.items() for size in case.sizes]


def assert_equal(found: object, wanted: object) -> None:
    """Asserts the same structure, and values within roundings of the largest."""
    (ours, form), (theirs, timms) = tree_flatten(found), tree_flatten(wanted)
    assert form == timms and all(distance(a, b) <= ROUNDINGS * EPS64 for a, b in zip(ours, theirs, strict=True))


def amplifies(module: nn.Module) -> bool:
    """True for a BatchNorm, here of few images or before a softmax, and for a LayerNorm of at most eight channels."""
    few = isinstance(module, nn.LayerNorm) and module.normalized_shape[0] <= 8
    return few or isinstance(module, nn.modules.batchnorm._BatchNorm)


def assert_same(case, ours: nn.Module, theirs: nn.Module, images: Tensor, seed: int = 0) -> None:
    """Asserts that logits and every gradient agree; both models draw the same random numbers.

    A norm of few values amplifies roundings (see `amplifies`); how much is seen from the oracle, with images that
    differ by a rounding.
    """
    runs = [(ours, type(ours).__call__, images), (theirs, case.logits, images)]
    if any(map(amplifies, theirs.modules())):
        runs.append((copy.deepcopy(theirs), case.logits, images * (1 + 2 * EPS64)))
    found, grads = [], []
    for model, logits, given in runs:
        torch.manual_seed(seed)
        model.zero_grad()
        found.append(logits(model, given))
        loss(found[-1]).backward()
        grads.append(gradients(model, dict if model is ours else case.convert))
    own, wanted, other = grads[0], grads[1], grads[-1]
    assert distance(*found[:2]) <= ROUNDINGS * max(EPS64, distance(found[1], found[-1]))
    total = max(float(g.norm()) for g in wanted.values())  # key biases have gradient 0 in exact arithmetic
    assert own.keys() == wanted.keys()
    for name, gradient in own.items():
        terms = wanted[name.replace(".wk.bias", ".wv.bias")]  # of a key bias alone, which cancel
        cancels = name.endswith(case.zero) or not wanted[name].any()  # a softmax of one key has no gradient
        size = total if cancels else max(1e-3 * total, float(terms.norm()))
        amplified = distance(other[name], wanted[name], size) if other is not wanted else 0.0
        assert distance(gradient, wanted[name], size) <= ROUNDINGS * max(EPS64, amplified), name


@pytest.mark.few(14)
@pytest.mark.parametrize("name, size", SIZES, ids=str)
def test_logits_and_gradients_equal_the_oracles(name, size):
    """Oracle: the family's, in evaluation mode and in training mode without stochastic depth."""
    case = CASES[name]
    ours, theirs = pair(case, size, drop_path_rate=0.0)
    for mode in (False, True):
        assert_same(case, ours.train(mode), theirs.train(mode), torch.randn(case.batch, 3, *size).double())
    buffers = dict(ours.named_buffers())
    statistics = case.convert(dict(theirs.named_buffers())) if buffers else {}  # of BatchNorm, after one step
    assert all(distance(t.double(), statistics[name].double()) <= ROUNDINGS * EPS64 for name, t in buffers.items())


@pytest.mark.few(9)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.draws])
def test_stochastic_depth_equals_timms(name):
    """Oracle: the family's in training mode, with the same seed."""
    case = CASES[name]
    ours, theirs = pair(case, case.sizes[0], drop_path_rate=0.5)
    images = torch.randn(max(4, case.batch), 3, *case.sizes[0]).double()
    assert_same(case, ours.train(), theirs.train(), images, seed=3)
    torch.manual_seed(4)
    assert distance(ours(images), ours(images)) > 0.01  # it drops


@pytest.mark.parametrize("name", ["swin", "twins_svt", "twins_pcpvt", "cpvt", "pit", "tnt", "crossvit"])
def test_dropout_on_attention_equals_the_oracles(name):
    """Oracle: the family's in training mode, with the same seed: logits and gradients; without training, no dropout."""
    case = CASES[name]
    ours, theirs = pair(case, case.sizes[0], drop_path_rate=0.0, attn_drop_rate=0.4)
    for module in theirs.modules():
        if isinstance(module, nn.Dropout):
            module.inplace = False  # timm's TNT overwrites the probabilities, which their gradient needs
    images = torch.randn(max(2, case.batch), 3, *case.sizes[0]).double()
    assert_same(case, ours.train(), theirs.train(), images, seed=3)
    torch.manual_seed(4)
    assert distance(ours(images), ours(images)) > 0.01  # it drops
    assert_same(case, ours.eval(), theirs.eval(), images)


@pytest.mark.few(6)
@pytest.mark.parametrize("name", ["swin", "twins_svt", "pvt", "tnt", "crossvit", "cvt", "ceit", "t2t_transformer"])
def test_fused_blocks_drop_the_same(name):
    """Oracle: the plain way with the same seed; projections and MLPs run our kernels."""
    case = CASES[name]
    options, size = CASES[name].traced
    ours, _ = pair(case, size, drop_path_rate=0.0, **options)
    dropping = create_model(
        case.name, img_size=size, **case.options | options | dict(num_classes=5, attn_drop_rate=0.4, drop_path_rate=0.0)
    )
    dropping.load_state_dict(ours.state_dict())
    dropping, images = dropping.float().train(), torch.randn(1, 3, *size)
    wanted = seeded(dropping, images)
    with interpreting(), forcing("fused"):
        found = seeded(dropping, images)
    assert not torch.equal(found, wanted)  # the kernels ran
    assert distance(found, wanted) <= 84 * torch.finfo(torch.float32).eps
    assert distance(wanted, ours.float().eval()(images)) > 0.01


@pytest.mark.few(4)
@pytest.mark.parametrize("name", sampled(CASES, 3))
def test_twenty_steps_equal_the_oracles(name):
    """Oracle: the family's parameters after the same steps of SGD, to 1e-9."""
    case = CASES[name]
    models = pair(case, case.sizes[1], drop_path_rate=0.0)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in models]
    images = torch.randn(20, case.batch, 3, *case.sizes[1]).double()
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
    ours.load_state_dict(normal(theirs).state_dict())
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


@pytest.mark.parametrize("name", sampled(CASES, 3))
def test_optimize_leaves_our_models_alone(name):
    """Oracle: every forward and the output as before; the report has one row, also for a model that contains ours."""
    model, _ = pair(CASES[name], CASES[name].sizes[0])
    images, before = torch.randn(2, 3, *CASES[name].sizes[0]).double(), [dict(vars(m)) for m in model.modules()]
    wanted = model.eval()(images)
    for whole in (model, nn.Sequential(nn.Identity(), model)):
        report = optimize(whole)
        assert [(row.type, row.became, row.why) for row in report.rows] == [
            (type(model).__name__, None, "it calls the kernels itself")
        ]
    assert [vars(m) for m in model.train().modules()] == before and torch.equal(model.eval()(images), wanted)


EXPORTED = "swin", "levit"


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in EXPORTED else pytest.mark.full) for n in CASES])
def test_exported_programs_equal_the_model(name):
    """Oracle: the model, for another batch size than that of the export."""
    model, _ = pair(CASES[name], CASES[name].sizes[0])
    images = torch.randn(2, 3, *CASES[name].sizes[0]).double()
    sizes = ({0: torch.export.Dim("batch", min=2, max=64)},)
    program = torch.export.export(model.eval(), (images,), dynamic_shapes=sizes).module()
    assert distance(program(torch.cat((images, images))), torch.cat([model(images)] * 2)) <= ROUNDINGS * EPS64


@pytest.mark.full
@pytest.mark.parametrize("name", ["swin", pytest.param("pvt", marks=pytest.mark.full)])
def test_frozen_models_follow_their_weights(name, always_folded):
    """Oracle: the model that is not frozen, before and after its weights change."""
    model, _ = pair(CASES[name], CASES[name].traced[1], **CASES[name].traced[0])
    model, images = model.float().eval(), torch.randn(1, 3, *CASES[name].traced[1])
    frozen = copy.deepcopy(model)
    freeze(frozen)
    with interpreting(), forcing("fused"), torch.no_grad():
        for _ in range(2):
            assert torch.equal(frozen(images), model(images))
            for pair_of in zip(frozen.parameters(), model.parameters(), strict=True):
                for parameter in pair_of:
                    parameter.mul_(1.125)


@pytest.mark.parametrize("name", ["tnt", "crossvit", "ceit", "t2t_performer", "pit", "levit", "cait", "cct"])
def test_a_seed_draws_the_same_weights_in_every_process(name, monkeypatch):
    """Oracle: the weights where the names of `no_weight_decay` come in another order; that of a set differs between
    processes, as hashes of strings do."""

    class Backwards(set):
        def __iter__(self):
            return iter(sorted(super().__iter__(), reverse=True))

    case, drawn = CASES[name], []
    family = type(create_model(case.name, **case.options))
    names = family.no_weight_decay
    for kind in (set, Backwards):
        monkeypatch.setattr(family, "no_weight_decay", lambda model, kind=kind: kind(names(model)))
        torch.manual_seed(0)
        drawn.append(create_model(case.name, **case.options).state_dict())
    assert all(torch.equal(drawn[0][key], value) for key, value in drawn[1].items())


@pytest.mark.parametrize("kind", ["t2t_vit_7", "t2t_vit_t_14"])
@torch.no_grad()
def test_t2t_keeps_bfloat16(kind):
    """Oracle: the same model in float64 with the rounded weights; what differs is at most a few roundings per layer,
    of which there are two splits of five and two blocks of ten; without kernels."""
    model = create_model(kind, depth=2, img_size=32, token_drop_rate=0.0).eval().bfloat16()
    images = torch.randn(2, 3, 32, 32).bfloat16()
    found, wanted = model(images), copy.deepcopy(model).double()(images.double())
    assert found.dtype == torch.bfloat16
    assert distance(found.double(), wanted) <= (2 * 5 + 2 * 10) * torch.finfo(torch.bfloat16).eps


@torch.no_grad()
def test_t2t_starts_with_its_fixed_tables():
    """Oracle: the formula of the sinusoids; random features are orthogonal, of norm √m."""
    case = CASES["t2t_performer"]
    options = case.options | dict(num_classes=5, img_size=(32, 48))
    model, truth = create_model(case.name, **options), case.build(**options)
    assert torch.allclose(model.pos_embed, truth.pos_embed, atol=torch.finfo(torch.float32).eps * 8)
    features = model.tokens_to_token.attention1.w
    assert torch.allclose(features @ features.T, len(features) * torch.eye(len(features)), atol=1e-5)
    assert not model.pos_embed.requires_grad and not features.requires_grad


@torch.no_grad()
def test_folded_norms_equal_the_layers():
    """Oracle: the layer and then its BatchNorm, in float64, of another ε too.

    None is folded before `freeze`, while it is training, or without the counter of its training forwards.
    """
    model, _ = pair(CASES["levit"], CASES["levit"].sizes[0])
    assert all(normed(module) is module for module in model.eval().modules())
    freeze(model)
    for module in (m for m in model.eval().modules() if isinstance(m, LinearNorm)):
        x = torch.randn(2, 3, module.linear.in_features).double()
        for module.bn.eps in (1e-5, 1.0):
            fold = normed(module)
            assert distance(nn.functional.linear(x, fold.weight, fold.bias), module(x)) <= ROUNDINGS * EPS64
        assert normed(module.train()) is module
        module.eval().bn.num_batches_tracked = None
        assert normed(module) is module


@pytest.mark.full
@pytest.mark.parametrize("name", ["levit", pytest.param("deepvit", marks=pytest.mark.full)])
@torch.no_grad()
def test_frozen_folds_follow_training(name):
    """Oracle: the model that is not frozen, after a training forward has changed running statistics, uncounted."""
    options, size = CASES[name].traced
    model, _ = pair(CASES[name], size, **options)
    model, images = model.float().eval(), torch.randn(4, 3, *size)
    frozen = copy.deepcopy(model)
    freeze(frozen)
    with interpreting(), forcing("fused"):
        for _ in range(2):
            assert distance(frozen(images[:1]), model(images[:1])) <= ROUNDINGS * torch.finfo(torch.float32).eps
            for twin in (frozen, model):
                twin.train()(images)
                twin.eval()


@pytest.mark.few(6)
@pytest.mark.parametrize("name", ["swin", "twins_svt", "cpvt", "pvt", "pit", "tnt", "crossvit", "levit"])
@torch.no_grad()
def test_maps_equal_those_of_the_oracle(name):
    """Oracle: the maps captured from the converted oracle, which are tested against its own softmax elsewhere."""
    case = CASES[name]
    ours, theirs = (model.eval() for model in pair(case, case.sizes[0], drop_path_rate=0.0))
    optimize(theirs)
    images, maps = torch.randn(2, 3, *case.sizes[0]).double(), []
    for model in (ours, theirs):
        with explain.capture(model) as seen:
            model(images)
        maps.append([layer.map() for layer in seen.layers])
        assert not seen.left
    assert len(maps[0]) == len(maps[1]) == sum(isinstance(m, ATTENTIONS) for m in ours.modules())
    assert all(distance(a, b) <= 1e-6 for a, b in zip(*maps, strict=True))  # maps are float32


@pytest.mark.fast
def test_attention_without_reduction_is_attention():
    """Oracle: `Attention` with the same projections."""
    ours, plain = ReducedAttention(12, 3, 1).double(), Attention(12, 3).double()
    with torch.no_grad():
        plain.qkv.weight.copy_(torch.cat((ours.q.weight, ours.kv.weight)))
        plain.qkv.bias.copy_(torch.cat((ours.q.bias, ours.kv.bias)))
    plain.proj.load_state_dict(ours.proj.state_dict())
    x = torch.randn(2, 4, 5, 12).double()
    assert distance(ours(x), plain(x.flatten(1, 2)).unflatten(1, (4, 5))) <= ROUNDINGS * EPS64


@pytest.mark.fast
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


@pytest.mark.fast
@pytest.mark.filterwarnings("ignore:torch.searchsorted", "ignore:Using a non-tuple sequence")  # in timm
@pytest.mark.parametrize("old, new", [((7, 7), (12, 12)), ((7, 7), (4, 4)), ((4, 4), (5, 3)), ((2, 2), (7, 7))])
def test_resized_tables_equal_timms(old, new):
    """Oracle: timm's function, in float32."""
    table = torch.randn((2 * old[0] - 1) * (2 * old[1] - 1), 3)
    want = resize_rel_pos_bias_table(table, new, ((2 * new[0] - 1) * (2 * new[1] - 1), 3), old)
    assert distance(resize_table(table, old, new), want) <= 4 * torch.finfo(torch.float32).eps  # four terms each
    assert torch.equal(resize_table(table, old, old), table)


DRAWS = 4  # of PyTorch's error: a single one is small by chance for one of a hundred tensors


def within_budget(
    model: nn.Module, images: Tensor, dtype: torch.dtype, way: str, zero: tuple[str, ...] = ()
) -> list[str]:
    """Names of results whose error exceeds twice the sum of PyTorch's own in this dtype and one rounding.

    PyTorch's error is the largest of DRAWS: for the model and images, and with a rounding added to each value of them.
    """

    def results(dtype: torch.dtype, draw: int = 0) -> dict[str, Tensor]:
        twin, random = copy.deepcopy(model).to(dtype), torch.Generator().manual_seed(draw)

        def rounded(t: Tensor) -> Tensor:
            noise = torch.randn(t.shape, generator=random, dtype=torch.float64)
            return (t.double() * (1 + torch.finfo(dtype).eps * noise)).to(dtype)

        given = images.to(dtype)
        if draw:
            given = rounded(given)
            with torch.no_grad():
                for p in twin.parameters():
                    p.copy_(rounded(p))
        logits = twin(given)
        (logits.double() * weights).sum().backward()
        found = {name: p.grad for name, p in twin.named_parameters() if p.requires_grad} | {"logits": logits.detach()}
        return {name: tensor.double() for name, tensor in found.items()}

    weights = torch.randn(len(images), 5).double()
    truth, plain = results(torch.float64), [results(dtype, k) for k in range(DRAWS)]
    with interpreting(), forcing(way):
        fused = results(dtype)
    telling(truth["logits"])
    total = max(float(t.abs().max()) for t in truth.values())
    assert any(not torch.equal(fused[name], plain[0][name]) for name in truth)  # the kernels ran
    found = []
    for name, want in truth.items():
        cancels = name.endswith(zero) or not want.any()  # a softmax of one key has no gradient
        least = total if cancels else 1e-3 * total
        own = max((each[name] - want).abs().max() for each in plain)
        if not (fused[name] - want).abs().max() <= allowed(own, max(float(want.abs().max()), least), dtype):
            found.append(name)
    return found


IN_HALF = "twins_pcpvt", "cpvt_gap", "pit_distilled", "tnt_legacy", "crossvit_dagger", "levit", "ceit"
NAMES = [name for name in CASES if name not in IN_HALF and not name.startswith("t2t")]
INTERPRETED = [(name, torch.float32, "fused") for name in NAMES]
INTERPRETED += [pytest.param(n, d, w, marks=pytest.mark.full) for n in CASES for d, w in HALF]


@pytest.mark.full
@pytest.mark.parametrize("name, dtype, way", INTERPRETED, ids=str)
def test_kernels_give_the_same(name, dtype, way, always_folded):
    """Oracle: float64; the kernels' error in logits and every gradient is at most twice PyTorch's own."""
    options, size = CASES[name].traced
    model, _ = pair(CASES[name], size, drop_path_rate=0.0, **options)
    assert within_budget(model.eval(), torch.randn(1, 3, *size), dtype, way, CASES[name].zero) == []


NO_BLOCKS = "botnet", "attention_conv", "attention_conv_full", "vt"  # attention within convolutional networks
SHOWN = "tnt", "cait", "cct", "refiner", "cvt"
REPLAYED = [n if n in SHOWN else pytest.param(n, marks=pytest.mark.full) for n in CASES if n not in NO_BLOCKS]


@pytest.mark.full
@pytest.mark.parametrize("name", sampled(REPLAYED, 3))
def test_blocks_are_replayed(name, always_folded, monkeypatch):
    """Oracle: the same calls without replays, bit by bit, of other images and weights each time."""
    options, size = CASES[name].traced
    model = pair(CASES[name], size, **options)[0].float().eval()
    learned = [p for p in model.parameters() if p.requires_grad]
    with interpreting(), forcing("fused"):
        for i in range(4):
            learn = i > 1
            images, found = torch.randn(2, 3, *size), []
            for enabled in (False, True):
                monkeypatch.setattr(ways, "REPLAYS", enabled)
                with torch.set_grad_enabled(learn):
                    found.append([y := model(images)])
                if learn:
                    found[-1] += torch.autograd.grad(y.square().sum(), learned)
            assert all(torch.equal(*both) for both in zip(*found, strict=True))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9375)  # LeViT grows without bound
            if i == 1:
                check_recorded(model)


def check_recorded(model: nn.Module) -> None:
    """Asserts that all calls which might be recorded were, or those of a module around them."""
    held = {path: m.__dict__[calls.PROGRAMS] for path, m in model.named_modules() if calls.PROGRAMS in m.__dict__}
    called = {path for path, programs in held.items() if any(type(one) is int for one in programs.found.values())}
    around = tuple(f"{path}." for path in held.keys() - called)
    assert around and all(path.startswith(around) for path in called)


@pytest.mark.full
@pytest.mark.parametrize(
    "name, path", sampled([("cct", "self_attn"), ("tnt", "mlp"), ("tnt", "attn_in"), ("cct", "linear1")], 4)
)
def test_hooks_of_branches_run_in_every_call(name, path):
    """Oracle: the number of calls, of modules that keep the record of their pair of branches, or belong to one."""
    options, size = CASES[name].traced
    model, seen = pair(CASES[name], size, **options)[0].float().eval(), []
    block = model.classifier.blocks[0] if name == "cct" else model.blocks[0]
    images = torch.randn(2, 3, *size)
    with interpreting(), forcing("fused"):
        for gradients in (False, True):
            with torch.set_grad_enabled(gradients):
                for i in range(6):
                    if i == 3:
                        handle = block.get_submodule(path).register_forward_hook(lambda *_: seen.append(1))
                    model(images)
                handle.remove()
    assert len(seen) == 6


@pytest.mark.full
def test_blocks_that_update_statistics_are_not_replayed(monkeypatch):
    """Oracle: the statistics without replays; in evaluation the same blocks are replayed, and expected to be."""
    options, size = CASES["cvt"].traced
    model = pair(CASES["cvt"], size, **options)[0].float().train()
    models, images = [model, copy.deepcopy(model)], torch.randn(2, 3, *size)
    with interpreting(), forcing("fused"):
        for _ in range(4):
            for enabled, each in zip((True, False), models, strict=True):
                monkeypatch.setattr(ways, "REPLAYS", enabled)
                each(images)
        monkeypatch.setattr(ways, "REPLAYS", True)
        blocks = [m for m in model.modules() if isinstance(m, ConvBlock)]
        assert not any(type(one) is calls.Recorded for m in blocks for one in vars(m)[calls.PROGRAMS].found.values())
        assert blocks and not any(vars(m)[ways.SIZES].replayed for m in blocks)
        model.eval()
        for _ in range(3):
            model(images)
        assert all(vars(m)[ways.SIZES].replayed for m in blocks)
        assert all(calls.Recorded in map(type, vars(m)[calls.PROGRAMS].found.values()) for m in blocks)
    for one, other in zip(*(m.buffers() for m in models), strict=True):
        assert torch.equal(one, other)


INSIDE = [("levit", f"stages.0.blocks.0.{part}") for part in ("attn.qkv", "attn.proj", "attn.proj.act", "mlp.act")]
INSIDE += [
    ("t2t_performer", "tokens_to_token.attention1.mlp.1"),
    ("ceit", "blocks.0.leff.act"),
    ("tnt", "blocks.0.proj"),
]


@pytest.mark.few(3)
@pytest.mark.parametrize("name, part", INSIDE)
@torch.no_grad()
def test_hooks_inside_fused_blocks_fire(name, part):
    """Oracle: the frozen model, whose output is doubled by the hook, where the kernels do not run."""
    options, size = CASES[name].traced
    options = options | dict.fromkeys(options.keys() & {"depth"}, 2)  # the last block's patches go nowhere
    model, images = pair(CASES[name], size, **options)[0].float().eval(), torch.randn(1, 3, *size)
    freeze(model)
    before = model(images)
    model.get_submodule(part).register_forward_hook(lambda module, given, y: 2 * y)
    wanted = model(images)
    with interpreting(), forcing("fused"):
        assert distance(model(images), wanted) <= ROUNDINGS * torch.finfo(torch.float32).eps
    assert not torch.equal(wanted, before)


# family → options of two models that differ in one block, and what that block launches in a frozen model
BLOCKS = {
    "swin": (dict(depths=(2, 2)), dict(depths=(3, 2)), "window"),
    "swin shifted": (dict(depths=(3, 2)), dict(depths=(4, 2)), "window"),
    "twins_svt": (dict(depths=(2, 2)), dict(depths=(3, 2)), "window"),
    "twins_svt reduced": (dict(depths=(3, 2)), dict(depths=(4, 2)), "attention"),
    "pvt": (dict(depths=(2, 2)), dict(depths=(2, 3)), "attention"),
    "cpvt": (dict(depth=2), dict(depth=3), "attention"),
    "cct": (dict(depth=2), dict(depth=3), "attention"),
    "pit": (dict(depths=(2, 1)), dict(depths=(3, 1)), "attention"),
}


@pytest.mark.fast
@pytest.mark.parametrize("block", BLOCKS)
def test_launches_of_a_frozen_block(block):
    """Oracle: one more block launches attention once, one product before and one after, and its MLP, in at most 5
    launches: nothing rolls, pads, indexes or adds. A reduction adds its norms, convolution and projection."""
    *both, attention = BLOCKS[block]
    counts = []
    for options in both:
        case = CASES[block.partition(" ")[0]]
        with torch.device("meta"):
            model = create_model(case.name, **case.options | options, img_size=case.sizes[0])
        model = without_weights(model.bfloat16()).eval()
        freeze(model)
        images = torch.empty(8, 3, *case.sizes[0], dtype=torch.bfloat16)
        with forcing("fused"), using_backend("triton"), targeting("sm_90"), torch.no_grad():
            for _ in range(2):  # the first call folds
                with tracing() as found:
                    model(images)
        kernels = [event.name for event in found.events if "." in event.name]
        others = [event.name for event in found.events if "." not in event.name and not event.name.endswith("_fwd")]
        counts.append((Counter(kernels), Counter(others)))
    added, others = counts[1][0] - counts[0][0], counts[1][1] - counts[0][1]
    assert added[f"{attention}._fwd_kernel"] == 1 and not others
    if "reduced" in block:
        assert added.total() <= 9 and added["patch_embed._fwd_kernel"] == 1
    elif block == "cct":  # a LayerNorm of the residual; and the row statistics of the input
        assert added.total() <= 6 and added["layer_norm._fwd_kernel"] == added["layer_norm._stats_kernel"] == 1
    else:
        assert added.total() <= 5 and added["linear._fwd_kernel"] in (2, 4) and not added["layer_norm._stats_kernel"]


@pytest.mark.fast
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
        ("levit_128s", dict(patch_size=4), r"patch_size is \(4, 4\); use 8 or 16"),
        ("levit_128s", dict(img_size=225), "height 225 is not a multiple of patch_size 16; use 224 or 240"),
        ("levit_128s", dict(dynamic_img_size=True), "this model has dynamic_img_size=False only"),
        ("tnt_s_patch16_224", dict(depth=0), "depth is 0; use numbers above 0"),
        ("tnt_s_patch16_224", dict(img_size=225), "height 225 is not a multiple of patch_size 16"),
        ("tnt_s_patch16_224", dict(num_heads_inner=5), "inner_dim 24 is not a multiple of num_heads_inner 5; change"),
        ("tnt_s_patch16_224", dict(num_heads_outer=5), "embed_dim 384 is not a multiple of num_heads_outer 5"),
        ("tnt_s_legacy_patch16_224", dict(first_stride=5), "first_stride is 5; use one that divides patch_size"),
        ("t2t_vit_7", dict(num_heads=0), "num_heads is 0; use numbers above 0"),
        ("t2t_vit_7", dict(num_heads=3), "embed_dim 256 is not a multiple of num_heads 3"),
        ("t2t_vit_7", dict(embed_dim=9, num_heads=3), "embed_dim is 9 and token_dim 64; use even numbers"),
        ("t2t_vit_7", dict(img_size=2), "the splits need at least 3 pixels"),
        ("ceit_tiny_224", dict(patch_size=6), r"patch_size is \(6, 6\); use one side, a multiple of 4"),
        ("ceit_tiny_224", dict(img_size=220), "height 220 is not a multiple of patch_size 16"),
        ("ceit_tiny_224", dict(num_heads=5), "embed_dim 192 is not a multiple of num_heads 5"),
        ("crossvit_tiny_240", dict(num_heads=(0, 3)), r"num_heads is \(0, 3\); use numbers above 0"),
        ("crossvit_tiny_240", dict(mlp_ratio=(4.0,)), r"mlp_ratio is \(4.0,\); it must have 2 values"),
        ("crossvit_tiny_240", dict(depth=((1,),)), "each fusion has blocks of 2 branches, and cross attentions"),
        (
            "crossvit_tiny_240",
            dict(img_size=256),
            "a branch has images of 256x256; patch_size 12 must divide both; the nearest img_size is 240x240",
        ),
        ("cpvt_tiny", dict(pegs=-1), "pegs is -1; it must be at least 0"),
        ("cpvt_tiny", dict(peg_padding="ones"), "peg_padding is 'ones'; use one of zeros, "),
        ("cct_7_3x1_32", dict(global_pool="avg"), "global_pool is 'avg'; use one of seq, token, none"),
        ("cct_7_3x1_32", dict(global_pool="token"), "needs class_token=True; use 'seq' without a class token"),
        ("cct_7_3x1_32", dict(num_heads=3), "embed_dim 256 is not a multiple of num_heads 3"),
        ("cct_7_3x1_32", dict(conv_layers=-1), "conv_layers is -1; it must be at least 0"),
        ("compact_cvt_7_4_32", dict(img_size=3), "image is 3x3 pixels, too small for a token"),
        ("cait_xxs24_224", dict(reg_tokens=2), "reg_tokens is 2; this model has reg_tokens=0 only"),
        ("cait_xxs24_224", dict(mlp="swiglu"), "mlp is 'swiglu'; this model has mlp='mlp' only"),
        ("cait_xxs24_224", dict(img_size=224, patch_size=0), r"patch_size is \(0, 0\); it must be at least 1"),
        ("cait_xxs24_224", dict(mlp_ratio_token_only=-1.0), "mlp_ratio_token_only is -1.0; use numbers above 0"),
        ("cct_7_3x1_32", dict(mlp_ratio=-1.0), "mlp_ratio is -1.0; it must be at least 0"),
        ("deepvit_16b", dict(proj_bias=False), "proj_bias is False; this model has proj_bias=True only"),
        ("deepvit_16b", dict(pos_embed="relative"), "this model adds positions to its tokens: use 'learned'"),
        ("deepvit_s", dict(patch_embed="linear"), "patch_embed is 'linear'; this model has patch_embed='conv' only"),
        ("lvvit_small", dict(fc_norm=True), "fc_norm is True; the heads of this model read all tokens"),
        ("lvvit_small", dict(pre_logits=True), "pre_logits is True; this model has pre_logits=False only"),
        (
            "deepvit_s",
            dict(img_size=224, patch_size=7),
            r"patch_size is \(7, 7\); convolutions before it need an even one",
        ),
        ("deepvit_16b", dict(adjust=0.0), "adjust is 0.0; use a number above 0"),
        ("deepvit_16b", dict(plain_depth=-1), "plain_depth is -1; it must be at least 0"),
        ("lvvit_small", dict(global_pool="avg"), "the heads of this model need 'token' or 'none'"),
        ("lvvit_small", dict(skip_lam=0.0), "skip_lam is 0.0; use a number above 0"),
        ("refiner_vit_small", dict(expansion=0), "expansion is 0; it must be at least 1"),
        ("cvt_13_224", dict(class_token=False), "use global_pool='avg' without a class token"),
        ("cvt_13_224", dict(img_size=15), "img_size height is 15; this model needs at least 16"),
        ("botnet50", dict(img_size=240), r"img_size is \(240, 240\); use multiples of 32"),
        ("botnet50", dict(num_heads=(0, 0, 0, 3)), "attention has 512 channels, which is no multiple of its 3 heads"),
        ("botnet50", dict(patch_size=8), r"this model has patch_size=\(4, 4\) only"),
        ("botnet50", dict(dynamic_img_size=True), "this model has dynamic_img_size=False only"),
        ("botnet50", dict(num_heads=(0, 0, 0, -4)), "num_heads is .0, 0, 0, -4.; use numbers of at least 0"),
        ("botnet50", dict(depths=(3, 4, 6, 0)), "use numbers above 0"),
        ("botnet50", dict(strides=(1, 2, 2, 4)), "use 1 or 2 for each stage"),
        ("vt_resnet18", dict(num_heads=(0, 0, 1, 1)), "use 0, and 1 for the last stage only"),
        ("vt_resnet18", dict(strides=(1, 2, 2, 2)), "use stride 1 and 256 channels in the last stage"),
        ("attention_conv", dict(img_size=31), "height 31 is not a multiple of patch_size 2; use 30 or 32"),
        ("attention_conv", dict(patch_size=0), "patch_size is .0, 0.; use numbers above 0"),
        ("attention_conv", dict(final_norm=True), "final_norm is True; this model has final_norm=False only"),
        ("attention_conv", dict(num_heads=0), "num_heads is 0; use numbers above 0"),
        ("attention_conv", dict(global_pool="token"), "use one of avg, none"),
        ("vt_resnet18", dict(tokens=0), "tokens is 0; use numbers above 0"),
        ("cvt_13_224", dict(num_heads=(1, 2, 5)), "384 channels, which is no multiple of its 5 heads"),
    ],
)
def test_bad_options_raise_one_sentence(name, options, words):
    """Oracle: what was given and what would do, on one line."""
    with one_sentence(words):
        create_model(name, **options)


@pytest.mark.parametrize("name", sampled(CASES, 4))
def test_masked_pre_training_is_refused(name):
    """Oracle: the kind of model that it needs: it drops tokens, which leaves no grid."""
    case = CASES[name]
    model = create_model(case.name, **case.options, img_size=case.sizes[1])
    for recipe in (r for r in RECIPES.values() if r.mask_ratio):
        with pytest.raises(ValueError, match="needs a plain ViT as encoder"):
            build_masked_model(recipe, model, nn.Identity())


@pytest.mark.fast
def test_wrong_images_raise_one_sentence():
    """Oracle: channels and size, both given."""
    model = create_model(CASES["swin"].name, **CASES["swin"].options, img_size=16)
    with pytest.raises(ValueError, match=r"axes \[B, 3, H, W\], got shape \[1, 1, 16, 16\]"):
        model(torch.zeros(1, 1, 16, 16))
    with pytest.raises(ValueError, match=r"image is 16x18 pixels, the model takes 16x16; .* dynamic_img_size=True"):
        model(torch.zeros(1, 3, 16, 18))
    with pytest.raises(ValueError, match="image is 31x64 pixels; the model needs at least 32x32"):
        create_model("pvt_tiny", depths=(1, 1, 1, 1))(torch.zeros(1, 3, 31, 64))
    for name in ("tnt", "levit", "botnet"):  # these have one size only
        model = create_model(CASES[name].name, **CASES[name].options, img_size=32)
        with pytest.raises(ValueError, match=r"img_size=$"):
            model(torch.zeros(1, 3, 32, 64))
    with pytest.raises(ValueError, match=r"axes \[B, C, H, W\], got shape \[3, 24, 24\]"):
        create_model(CASES["crossvit"].name, **CASES["crossvit"].options, img_size=24)(torch.zeros(3, 24, 24))


INTERMEDIATES = [
    dict(),
    dict(indices=1, norm=True),
    dict(indices=[-1, 0], intermediates_only=True),
    dict(indices=[0], stop_early=True, intermediates_only=True),
]


LIKE_TIMM = ["swin", "twins_svt", "twins_pcpvt", "cait", "pit", "pit_distilled", "tnt", "tnt_legacy"]
LIKE_TIMM += ["crossvit", "crossvit_dagger"]


@pytest.mark.few(5)
@pytest.mark.parametrize("name", LIKE_TIMM)
@torch.no_grad()
def test_features_equal_timms(name):
    """Oracle: timm's methods: intermediates, information, layers of the parameters, backbones, other heads."""
    case = CASES[name]
    models = pair(case, case.sizes[0], drop_path_rate=0.0)
    images = torch.randn(2, 3, *case.sizes[0]).double()
    for options in INTERMEDIATES:
        assert_equal(*(model.forward_intermediates(images, **options) for model in models))
    ours, theirs = models
    assert ours.feature_info == [
        {key: stage[key] for key in ours.feature_info[0]} | (dict(reduction=2 << i) if "twins" in name else {})
        for i, stage in enumerate(theirs.feature_info)  # timm's Twins takes 4 for the patch side
    ]
    undecayed = ours.no_weight_decay() & dict(ours.named_parameters()).keys()
    assert undecayed == set(theirs.no_weight_decay())
    assert type(ours.get_classifier()) is type(theirs.get_classifier())
    grouped = hasattr(theirs, "group_matcher") and name != "cait"  # timm counts class blocks with the last blocks
    for coarse in (False, True) if grouped else ():
        found, wanted = (group_parameters(model, model.group_matcher(coarse)) for model in models)
        assert found == wanted
    for indices in ((0,), (0, len(ours.feature_info) - 1)):
        found = FeatureGetterNet(copy.deepcopy(ours), out_indices=indices)
        wanted = TimmGetter(copy.deepcopy(theirs), out_indices=indices)
        assert found.state_dict().keys() == wanted.state_dict().keys()
        assert found.feature_info.channels() == wanted.feature_info.channels()
        assert_equal(found(images), wanted(images))
        again = create_model(ours.variant, **vars(found.model.config))
        assert again.state_dict().keys() == found.model.state_dict().keys()
    for classes, pool in (
        (7, None),
        (4, None if name.startswith(("pit_d", "cross")) else ""),
        (0, getattr(ours.config, "pools", ["avg"])[0]),
    ):
        for model in models:
            model.reset_classifier(classes, pool)
        ours.load_state_dict(theirs.state_dict())
        assert_equal(ours(images), theirs(images))


@pytest.mark.parametrize("name", sampled(CASES, 2))
@torch.no_grad()
def test_backbones_agree_with_their_models(name):
    """Oracle: the model's own stages; the last one with the final norm is what enters the pooling."""
    case = CASES[name]
    model, _ = pair(case, case.sizes[0], drop_path_rate=0.0)
    images = torch.randn(2, 3, *case.sizes[0]).double()
    features, maps = model.forward_intermediates(images, norm=True)
    assert_equal(features, model.forward_features(images))
    if not name.startswith(("pit", "crossvit", "ceit", "vt")):  # whose features are the class token, or lists
        tokens = maps[-1].flatten(2).transpose(1, 2)
        last = features.flatten(1, -2)
        assert torch.equal(tokens, last[:, last.shape[1] - tokens.shape[1] :])
    for indices in ((0,), (0, len(maps) - 1)):
        options = case.options | dict(img_size=case.sizes[0], drop_path_rate=0.0)
        backbone = create_model(case.name, **options, features_only=True, out_indices=indices).double()
        missing = backbone.model.load_state_dict(model.state_dict(), strict=False)
        assert not missing.missing_keys
        for y, i in zip(backbone(images), indices, strict=True):
            assert torch.equal(y, model.forward_intermediates(images, [i], intermediates_only=True)[0])
            assert y.shape[1] == model.feature_info[i]["num_chs"]
    assert group_parameters(model, model.group_matcher())  # every parameter is in a group


@pytest.mark.full
@pytest.mark.parametrize("family", [name for name, case in CASES.items() if case.digits])
def test_digits_are_learned_as_by_timms(family):
    """Oracle: timm's model, from the same initial weights on the same batches, less three points."""
    side, options, mark = CASES[family].digits
    options = options | dict(img_size=(side, side), num_classes=10, in_chans=1)
    (images, targets), (tests, answers) = (prepared(split, side) for split in ("train", "test"))
    theirs, ours = CASES[family].build(**options), create_model(CASES[family].name, **options)
    ours.load_state_dict(CASES[family].convert(theirs.state_dict()))
    optimizer = torch.optim.AdamW(ours.parameters(), lr=2e-3, weight_decay=0.05)
    steps, step = 8 * (len(images) // 32), 0
    for _ in range(2):
        for rows in torch.randperm(len(images))[: len(images) // 32 * 32].view(-1, 32):
            rate = 2e-3 * min(1, (step + 1) / 30) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
            optimizer.param_groups[0]["lr"], step = rate, step + 1
            value = nn.functional.cross_entropy(ours.train()(images[rows]), targets[rows], label_smoothing=0.1)
            optimizer.zero_grad()
            value.backward()
            nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
            optimizer.step()
    with torch.no_grad():
        assert float((ours.eval()(tests).argmax(1) == answers).float().mean()) >= mark - 0.03


def prepared(split: str, side: int) -> tuple[Tensor, Tensor]:
    """Normalised digits at another size, and their classes."""
    images, targets = digits(split)
    return nn.functional.interpolate((images - DIGITS_MEAN) / DIGITS_STD, (side, side), mode="bilinear"), targets
