"""Tests of every named model: parameter counts, keys, options; logits and gradients. Oracle: timm."""

import copy
import dataclasses
import inspect
import json
import pickle
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
import torch.nn.functional as F
from agreement import ROUNDINGS, distance, one_sentence
from catalogue import initial
from catalogue.ours import CASES
from catalogue.parameters import PARAMETERS, TIMM_NAMES
from sampling import sampled
from torch import nn
from torchvision.models import VisionTransformer

from fastvit_triton import ViTConfig, create_model, list_models, models
from fastvit_triton.models import CATALOGUE, FAMILIES, model_config
from fastvit_triton.models.config import CHOICES, BaseConfig
from fastvit_triton.models.weights.load import CHECKPOINT_FORMATS

TOLERANCE = ROUNDINGS * torch.finfo(torch.float32).eps


def plain(name: str) -> bool:
    """True for the models of which the fast tests compare keys, logits and gradients."""
    return name.endswith(("patch16_224", "dinov2")) and not name.startswith("tnt")


# Named models at full width; image size and depth are reduced so that each runs in about a second on two cores.
AGAINST_TIMM = {
    "vit_tiny_patch16_224": {},
    "vit_small_patch32_224": dict(depth=6),
    "vit_small_patch16_224": dict(img_size=96, depth=4),
    "vit_small_patch8_224": dict(img_size=(24, 40), depth=4),
    "vit_base_patch32_384": dict(img_size=96, depth=3),
    "vit_base_patch16_224": dict(img_size=64, depth=4),
    "vit_base_patch8_224": dict(img_size=32, depth=2),
    "vit_large_patch32_224": dict(img_size=96, depth=2, num_classes=10),
    "vit_large_patch16_384": dict(img_size=48, depth=2),
    "vit_huge_patch14_224": dict(img_size=42, depth=2, num_classes=10),
    "vit_giant_patch14_224": dict(img_size=28, depth=1),
    "vit_gigantic_patch14_224": dict(img_size=28, depth=1),
    "vit_tiny_r_s16_p8_224": dict(img_size=96, depth=2),
    "vit_small_r26_s32_224": dict(img_size=(64, 96), depth=1),
    "vit_base_r50_s16_224": dict(img_size=64, depth=1),
    "deit_tiny_patch16_224": dict(img_size=64, depth=6),
    "deit_tiny_distilled_patch16_224": dict(img_size=64, depth=6),
    "deit_small_distilled_patch16_224": dict(img_size=64, depth=4),
    "deit3_small_patch16_224": dict(img_size=64, depth=4),
    "deit3_medium_patch16_224": dict(img_size=64, depth=3),
    "deit3_base_patch16_384": dict(img_size=64, depth=2),
    "vit_small_patch14_dinov2": dict(img_size=56, depth=4),
    "vit_base_patch14_reg4_dinov2": dict(img_size=56, depth=2),
    "vit_giant_patch14_reg4_dinov2": dict(img_size=28, depth=1),
    "vit_xsmall_patch16_clip_224": dict(img_size=64, depth=4),
    "vit_base_patch32_clip_224": dict(img_size=96, depth=3),
    "vit_base_patch16_clip_quickgelu_224": dict(img_size=64, depth=2),
    "vit_base_patch16_siglip_224": dict(img_size=64, depth=2),
    "vit_base_patch32_siglip_256": dict(img_size=96, depth=2),
    "vit_base_patch16_siglip_gap_224": dict(img_size=64, depth=2, num_classes=5),
    "vit_so400m_patch14_siglip_224": dict(img_size=28, depth=1),
    "swin_tiny_patch4_window7_224": dict(img_size=(72, 100), depths=(2, 2, 2, 1)),
    "swin_base_patch4_window12_384": dict(img_size=112, depths=(2, 1, 1, 1)),
    "twins_svt_small": dict(img_size=(96, 160), depths=(2, 1, 2, 1)),
    "twins_pcpvt_small": dict(img_size=64, depths=(1, 2, 1, 1)),
}

# One small model of every family: its name, options, and the shape of an image.
SMALLEST = {"vit": ("vit_digits_patch2_8", dict(depth=2), (1, 8, 8))}
SMALLEST |= {
    family: (case.name, case.options | dict(img_size=case.sizes[1], num_classes=10), (3, *case.sizes[1]))
    for family, case in CASES.items()
}


def smallest(family: str, **more: object) -> tuple[nn.Module, torch.Tensor]:
    """A small model of the family with random weights, in evaluation mode, and two images."""
    name, options, shape = SMALLEST[family]
    return randomize(create_model(name, **options | more)).eval(), torch.randn(2, *shape)


def randomize(model: nn.Module) -> nn.Module:
    """Sets every parameter to random values, so that no zero or 1e-5 hides an error; returns the model."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if parameter.dim() == 1 or parameter.dim() == 3 else parameter[0].numel() ** -0.5
            parameter.normal_(1.0 if name.endswith(("norm.weight", "norm1.weight", "norm2.weight")) else 0.0, spread)
    return model


def assert_same(ours: nn.Module, theirs: nn.Module, pairs: dict[str, torch.nn.Parameter], images: torch.Tensor, logits):
    """Asserts that logits and every parameter gradient agree to rounding; `pairs` maps our names to their tensors."""
    y, want = ours(images), logits(theirs(images))
    tolerance = ROUNDINGS * torch.finfo(y.dtype).eps
    assert distance(y, want) <= tolerance
    weights = torch.randn_like(y)
    (y * weights).sum().backward()
    (want * weights).sum().backward()
    wanted = {name: p.grad for name, p in pairs.items()}
    assert_same_gradients({name: p.grad for name, p in ours.named_parameters()}, wanted, tolerance)


def assert_same_gradients(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float):
    """Asserts that every gradient of `found` agrees with that of the same name to rounding."""
    total = max(float(g.norm()) for g in wanted.values())
    for name, gradient in found.items():
        # key biases have gradient 0 in exact arithmetic, so rounding is relative to the model's largest gradient,
        # and for a bias of keys alone to that of the values, whose terms do not cancel
        size = max(float(wanted[name.replace(".wk.bias", ".wv.bias")].norm()), 1e-3 * total)
        assert float((gradient - wanted[name]).norm()) <= tolerance * size, name


@pytest.fixture
def no_truncated_normals(monkeypatch):
    """Disables timm's truncated normals, which take most of a model's construction on the meta device."""
    monkeypatch.setattr("timm.layers.weight_init._trunc_normal_", lambda tensor, *_: tensor, raising=False)


def in_turn(names: Iterable[str], step: int) -> list:
    """The plain models, which are fast, and each step-th of the others; the rest is full."""
    fast = [pytest.param(name, marks=pytest.mark.fast) for name in names if plain(name)]
    return fast + sampled((name for name in names if not plain(name)), step)


@pytest.mark.few(8)
@pytest.mark.parametrize("name", in_turn(TIMM_NAMES, 3))
def test_state_dict_equals_timms(name, no_truncated_normals):
    """Oracle: keys and shapes of timm's model of the same name, built on the meta device."""
    with torch.device("meta"):
        ours, theirs = create_model(name, num_classes=1000), timm.create_model(name, num_classes=1000)
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}


NEW = {name: (name, options) for name, options in initial.MODELS.items()}
NEW |= {family: (name, options) for family, (name, options, _) in SMALLEST.items()}
WIDE = ("vit_small_r26_s32_224",)  # whose backbone has one width, and a second of CPU time
DRAWN_BY_TIMM = """deit_tiny_distilled_patch16_224 deit3_small_patch16_224 vit_base_patch16_clip_quickgelu_224
vit_base_patch16_siglip_224 swin twins_svt twins_pcpvt cait botnet pit pit_distilled tnt tnt_legacy crossvit
crossvit_dagger levit""".split()


def off(values: torch.Tensor, mean: object, spread: float) -> bool:
    """True if mean or standard deviation of some values differ by more than 6 of their standard errors."""
    n, rest = values.numel(), values.detach() - torch.as_tensor(mean)
    if not spread or n == 1:
        return not float(rest.abs().max()) <= 6 * spread
    error = abs(float(rest.square().mean().sqrt()) - spread)
    near = abs(float(rest.mean())) <= 6 * spread / n**0.5 and error <= 6 * spread / (2 * n) ** 0.5
    return not near or float(rest.min()) == float(rest.max())


def unlike(model: nn.Module, state: dict[str, torch.Tensor] | None = None) -> dict[str, object]:
    """The parameters, or values of them, that differ from `catalogue.initial`, and what they are there."""
    found = dict(model.named_parameters()) if state is None else state
    values = {name: initial.value(model, name) for name, _ in model.named_parameters()}
    return {name: value for name, value in values.items() if value is not None and off(found[name], *value)}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.full if case in WIDE else pytest.mark.fast) for case in NEW]
)
def test_initial_values(case):
    """Oracle: `catalogue.initial`: mean and standard deviation of each parameter, to 6 standard errors; constants to
    the bit; also after `init_weights` of a plain ViT, which leaves no parameter as it was."""
    name, options = NEW[case]
    model = create_model(name, **options)
    assert unlike(model) == {}
    if isinstance(model, models.transformer.VisionTransformer):
        for parameter in model.parameters():
            nn.init.constant_(parameter, float("nan"))
        model.init_weights(model.config.weight_init)
        assert unlike(model) == {}


@pytest.mark.fast
@pytest.mark.parametrize("case", DRAWN_BY_TIMM)
def test_initial_values_are_timms(case):
    """Oracle: a model of timm with the same options: `catalogue.initial` has its values, too."""
    name, options = NEW[case]
    if case in CASES:
        assert (
            unlike(create_model(name, **options), CASES[case].convert(CASES[case].build(**options).state_dict())) == {}
        )
    else:
        assert unlike(create_model(name, **options), timm.create_model(name, **options).state_dict()) == {}


def test_every_family_has_initial_values():
    """Oracle: the list of families."""
    assert {CATALOGUE[name] for name, _ in NEW.values()} == {*FAMILIES}


def test_catalogue_holds_timms_plain_sizes():
    """Oracle: every Ti, S, B, L, H, g, G name of timm's supervised ViT at patches 8 to 32, and all of DeiT."""
    wanted = [
        n
        for n in timm.list_models(["vit_*_patch*_224", "vit_*_patch*_384", "deit*"])
        if n.split("_patch")[1].count("_") == 1 or n.startswith("deit")
    ]
    sizes = ("vit_tiny", "vit_small", "vit_base", "vit_large", "vit_huge", "vit_giant", "vit_gigantic", "deit")
    assert set(n for n in wanted if n.startswith(sizes)) - set(list_models()) == set()


@pytest.mark.few(18)
@pytest.mark.fast
@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_count(name):
    """Oracle: counts by the authors' code or by hand: of classifiers and detectors for 1000 classes."""
    task = getattr(getattr(CATALOGUE[name], "MODEL", None), "task", "classify")
    classes = {} if task in ("generate", "restore") else dict(num_classes=1000)
    with torch.device("meta"):
        model = create_model(name, **classes)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.few(3)
@pytest.mark.parametrize("name", in_turn(AGAINST_TIMM, 2))
def test_logits_and_gradients_equal_timms(name, no_truncated_normals):
    """Oracle: timm's model with the same random weights."""
    overrides = {"num_classes": 20} | AGAINST_TIMM[name]
    with torch.device("meta"):  # skips initialisation, whose values are overwritten
        ours, theirs = create_model(name, **overrides), timm.create_model(name, **overrides)
    ours, theirs = ours.to_empty(device="cpu").eval(), randomize(theirs.to_empty(device="cpu")).eval()
    ours.load_state_dict(theirs.state_dict())
    for module in theirs.modules():  # tables that timm does not save
        getattr(module, "init_non_persistent_buffers", lambda: None)()
    images = torch.randn(2, 3, *ours.config.img_size)
    if any(
        stem in name for stem in ("_r_", "_r26_", "_r50_")
    ):  # near 0, a ReLU turns one float32 rounding into a different gradient
        ours, theirs, images = ours.double(), theirs.double(), images.double()
    assert_same(ours, theirs, dict(theirs.named_parameters()), images, lambda y: y)


SMALL = dict(embed_dim=48, depth=2, num_heads=3, img_size=32, patch_size=16, num_classes=7)
TIMM_OPTIONS = [
    dict(class_token=False, global_pool="avg"),
    dict(class_token=False, global_pool="avg", fc_norm=False, qkv_bias=False),
    dict(qk_norm=True, proj_bias=False),
    dict(reg_tokens=2),
    dict(reg_tokens=2, global_pool="avg"),
    dict(reg_tokens=2, no_embed_class=True, class_token=False, global_pool="map"),
    dict(final_norm=False),
    dict(pos_embed="none", init_values=0.1),
    dict(mlp_ratio=2.5, depth=1, in_chans=1),
    dict(dynamic_img_size=True, img_size=48),
]


@pytest.mark.fast
@pytest.mark.parametrize("options", TIMM_OPTIONS, ids=str)
def test_options_equal_timms(options):
    """Oracle: timm's VisionTransformer with the option of the same name."""
    shared = SMALL | options
    theirs = randomize(timm.models.VisionTransformer(**shared)).eval()
    ours = create_model("vit_tiny_patch16_224", **shared).eval()
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, shared.get("in_chans", 3), 32, 64 if options.get("dynamic_img_size") else 32)
    assert_same(ours, theirs, dict(theirs.named_parameters()), images, lambda y: y)


@pytest.mark.fast
@pytest.mark.parametrize("act", [None, "gelu_tanh", "quick_gelu", "relu", "silu"])
def test_activations_equal_timms(act):
    """Oracle: timm's activation of the same name; None for that of both where none is chosen."""
    chosen = {} if act is None else dict(act=act)
    theirs = randomize(timm.models.VisionTransformer(**SMALL, act_layer=act)).eval()
    ours = create_model("vit_tiny_patch16_224", **SMALL, **chosen).eval()
    ours.load_state_dict(theirs.state_dict())
    assert_same(ours, theirs, dict(theirs.named_parameters()), torch.randn(2, 3, 32, 32), lambda y: y)


@pytest.mark.fast
def test_config_matches_timms_drop_rates():
    """Oracle: by hand: each rate is that of its own module; drop-path rates equal timm's."""
    rates = dict(drop_rate=0.1, pos_drop_rate=0.2, patch_drop_rate=0.3, proj_drop_rate=0.4, attn_drop_rate=0.5)
    model = create_model("vit_digits_patch2_8", **rates, drop_path_rate=0.6)
    block = model.blocks[-1]
    found = (model.head_drop, model.pos_drop, model.patch_drop, block.attn.proj_drop, block.attn.attn_drop)
    assert [m.p for m in found] == list(rates.values())
    assert (block.mlp.drop1.p, block.mlp.drop2.p, block.drop_path1.p) == (0.4, 0.4, 0.6)
    theirs = timm.models.VisionTransformer(depth=model.config.depth, drop_path_rate=0.6)
    assert [b.drop_path1.p for b in model.blocks] == pytest.approx(
        [getattr(b.drop_path1, "drop_prob", 0.0) for b in theirs.blocks]
    )


DROPS = [
    (family, rate)
    for family, (name, _, _) in SMALLEST.items()
    for rate in ("drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate")
    if hasattr(model_config(name), rate)
    and (family, rate) != ("cpvt", "patch_drop_rate")
    and (family, rate) != ("cpvt_gap", "patch_drop_rate")  # the convolution needs the whole grid
    and not (family.startswith("attention_conv") and rate == "attn_drop_rate")  # refused: maps are not of an image
]


@pytest.mark.few(32)
@pytest.mark.fast
@pytest.mark.parametrize("family, rate", DROPS)
def test_every_drop_acts_in_training_only(family, rate):
    """Oracle: two training passes differ, two eval passes do not, and every parameter still gets a gradient."""
    name, options, shape = SMALLEST[family]
    model, images = randomize(create_model(name, **options | {rate: 0.5})), torch.randn(8, *shape)
    assert not torch.equal(model(images), model(images))
    model(images).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    model.eval()
    assert torch.equal(model(images), model(images))


def test_drop_path_equals_timms_with_the_same_mask():
    """Oracle: x + keep/(1 − p) · f(x), with the mask drawn again from the same seed."""
    from fastvit_triton.layers import Attention, Block, Mlp

    block = randomize(Block(12, Attention(12, 3), Mlp(12, 24), drop_path=0.4)).train()
    x = torch.randn(6, 5, 12)
    torch.manual_seed(1)
    got = block(x)
    torch.manual_seed(1)
    want = x
    for norm, body in ((block.norm1, block.attn), (block.norm2, block.mlp)):
        keep = torch.empty(6).bernoulli_(0.6) / 0.6
        want = want + keep[:, None, None] * body(norm(want))
    assert distance(got, want) <= TOLERANCE


OPTIONS = [
    # the class token has no relative position, so the last block's table learns only from patch tokens
    *(dict(pos_embed=p, global_pool="avg" if p == "relative" else "token") for p in CHOICES["pos_embed"]),
    *(dict(pos_embed=p, no_embed_class=True, global_pool="avg") for p in CHOICES["pos_embed"]),
    *(dict(global_pool=p) for p in (*CHOICES["global_pool"], "gap")),
    *(dict(patch_embed=p) for p in CHOICES["patch_embed"]),
    dict(norm="post"),
    dict(norm="post", final_norm=True),
    dict(pre_logits=True),
    dict(mlp="swiglu"),
    dict(head_dim=5),
    dict(weight_init="jax"),
    dict(pre_norm=True, eps=1e-5),
    dict(grad_checkpointing=True),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_runs_and_every_parameter_learns(options):
    """Oracle: finite logits of the right shape, and for each parameter a gradient that is not all zero."""
    model = randomize(create_model("vit_digits_patch2_8", depth=2, **options))
    logits = model(torch.randn(3, 1, 8, 8))
    tokens = (3, 17, 10) if options.get("global_pool") == "none" else (3, 10)
    assert logits.shape == tokens and logits.isfinite().all()
    logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.abs().sum() > 0, name


@pytest.mark.fast
def test_torchvision_vit_with_copied_weights():
    """Oracle: torchvision's VisionTransformer (eps 1e-6, exact GELU), weights copied key by key."""
    theirs = randomize(VisionTransformer(32, 16, 2, 3, 48, 96, num_classes=7)).eval()
    ours = create_model("vit_tiny_patch16_224", **SMALL, mlp_ratio=2).eval()
    renames = {
        "class_token": "cls_token",
        "conv_proj": "patch_embed.proj",
        "encoder.pos_embedding": "pos_embed",
        "encoder.layers.encoder_layer_": "blocks.",
        "ln_1": "norm1",
        "ln_2": "norm2",
        "self_attention.in_proj_": "attn.qkv.",
        "self_attention.out_proj": "attn.proj",
        "mlp.0": "mlp.fc1",
        "mlp.3": "mlp.fc2",
        "encoder.ln": "norm",
        "heads.head": "head",
    }

    def rename(key: str) -> str:
        for old, new in renames.items():
            key = key.replace(old, new)
        return key

    ours.load_state_dict({rename(k): v for k, v in theirs.state_dict().items()})
    pairs = {rename(k): p for k, p in theirs.named_parameters()}
    assert_same(ours, theirs, pairs, torch.randn(2, 3, 32, 32), lambda y: y)


@pytest.mark.parametrize("family", SMALLEST)
def test_checkpointing_is_bitwise_equal(family):
    """Oracle: the same model without checkpointing, with dropout and the same seed; also statistics of BatchNorms."""
    grads = []
    for enable in (False, True):
        torch.manual_seed(0)
        model, images = smallest(family, drop_path_rate=0.3, proj_drop_rate=0.1)
        model.train().set_grad_checkpointing(enable)
        model(images).sum().backward()
        grads.append([p.grad for p in model.parameters() if p.requires_grad] + list(model.buffers()))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


RICH = dict(qk_norm=True, init_values=0.1, drop_path_rate=0.1)
COMPILED = [("vit", {}, False), ("vit", {}, True), ("vit", RICH, False), ("vit", RICH, True)]
COMPILED += [pytest.param(family, {}, True, marks=pytest.mark.full) for family in CASES]


@pytest.mark.full
@pytest.mark.parametrize("family, options, dynamic", COMPILED, ids=str)
def test_compiles_as_one_graph(family, options, dynamic):
    """Oracle: the eager model, outputs and gradients; fullgraph=True raises on any graph break.

    With `dynamic`, one graph serves every number of images.
    """
    model, images = smallest(family, **options)
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for batch in (3, 5) if dynamic else (3,):
        images = torch.randn(batch, *images.shape[1:])
        if dynamic:
            torch._dynamo.mark_dynamic(images, 0)
        got, want = compiled(images), model(images)
        assert distance(got, want) <= TOLERANCE
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        gradients = (torch.autograd.grad(y.square().sum(), list(parameters.values())) for y in (got, want))
        assert_same_gradients(*(dict(zip(parameters, g, strict=True)) for g in gradients), TOLERANCE)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


@pytest.mark.full
@pytest.mark.parametrize("family", sampled(CASES, 6, one_in=4))
def test_is_traced_as_one_graph(family):
    """Oracle: the eager model; fullgraph=True raises on any graph break. Gradients are compared by the test above."""
    model, images = smallest(family)
    with torch.no_grad():
        got = torch.compile(model, backend="eager", fullgraph=True)(images)
        assert distance(got, model(images)) <= TOLERANCE
    torch._dynamo.reset()


@pytest.mark.full
def test_models_compile_one_after_the_other_in_a_new_thread():
    """Oracle: shapes; the thread has run no model eagerly before."""

    def compiled() -> list[torch.Size]:
        shapes = []
        for family in ("cvt", "ceit"):
            model, images = smallest(family)
            shapes.append(torch.compile(model, backend="eager", fullgraph=True)(images).shape)
            torch._dynamo.reset()
        return shapes

    with ThreadPoolExecutor() as pool:
        assert pool.submit(compiled).result() == [(2, 10), (2, 10)]


def test_dynamic_size_resamples_positions():
    """Oracle: the same table, resized before the call."""
    model = randomize(create_model("vit_digits_patch2_8", dynamic_img_size=True)).eval()
    larger = create_model("vit_digits_patch2_8", img_size=(12, 16)).eval()
    state = model.state_dict()
    from fastvit_triton.layers import resize_pos_embed

    state["pos_embed"] = resize_pos_embed(state["pos_embed"], (4, 4), (6, 8), 1)
    larger.load_state_dict(state)
    images = torch.randn(2, 1, 12, 16)
    assert torch.equal(model(images), larger(images))


def test_distilled_returns_both_logits_when_asked():
    """Oracle: timm's convention: both logits after `set_distilled_training`, in evaluation mode their mean."""
    model = randomize(create_model("deit_tiny_distilled_patch16_224", img_size=32, depth=1, num_classes=4))
    images = torch.randn(2, 3, 32, 32)
    mean = model(images)
    model.set_distilled_training(True)
    cls, dist = model(images)
    assert torch.equal((cls + dist) / 2, mean) and not torch.equal(cls, dist)
    assert torch.equal(model.eval()(images), mean)


PARTS = ("norm1", "attn", "attn.qkv", "attn.proj", "ls1", "drop_path1", "norm2")
PARTS += ("mlp", "mlp.fc1", "mlp.drop1", "mlp.fc2")
REDUCED = ("attn.q", "attn.kv", "attn.proj", "mlp.fc1")
HOOKED = [("vit", f"blocks.0.{part}") for part in PARTS]
HOOKED += [("swin", "layers.1"), ("swin", "layers.1.downsample"), *(("swin", f"layers.0.blocks.1.{p}") for p in PARTS)]
HOOKED += [("twins_svt", "pos_block.0"), *(("twins_svt", f"blocks.0.1.{p}") for p in (*REDUCED, "attn.sr"))]
HOOKED += [("pvt", "patch_embed2"), *(("pvt", f"block2.0.{p}") for p in REDUCED), ("cpvt", "pos_block.0")]
HOOKED += [("cct", f"classifier.blocks.0.{p}") for p in ("pre_norm", "self_attn.qkv", "norm1", "linear1", "linear2")]
HOOKED += [("cct", "classifier.attention_pool"), ("cct", "tokenizer.conv_layers.0.0"), ("compact_cvt", "tokenizer")]
HOOKED += [("cait", f"blocks.0.attn.{p}") for p in ("qkv", "proj_l", "proj_w", "proj")] + [("cait", "blocks.0.attn")]
HOOKED += [("cait", f"blocks_token_only.0.{p}") for p in ("norm1", "attn", "attn.k", "mlp", "mlp.fc2")]
HOOKED += [("deepvit", f"blocks.0.attn.{p}") for p in ("qkv", "reatten_matrix", "var_norm", "proj")]
HOOKED += [("lvvit", p) for p in ("patch_embed.bn1", "patch_embed.proj", "blocks.0.attn", "blocks.0.mlp", "aux_head")]
HOOKED += [("refiner", f"blocks.1.{p}") for p in ("norm1", "attn.DLA", "attn.adapt_bn", "attn.proj", "mlp.fc1")]


@pytest.mark.parametrize("family, part", HOOKED)
def test_hooks_on_any_part_fire_and_see_that_part_alone(family, part):
    """Oracle: a hook's input and output belong together: calling the module on the input gives the output."""
    model, images = smallest(family, **dict(depth=1, init_values=0.5) if family == "vit" else {})
    want, seen = model(images), []
    module = model.get_submodule(part)
    handle = module.register_forward_hook(lambda m, args, kwargs, y: seen.append((args, kwargs, y)), with_kwargs=True)
    got = model(images)
    handle.remove()
    ((args, kwargs, y),) = seen
    assert distance(got, want) <= TOLERANCE
    assert "residual" not in kwargs and distance(module(*args, **kwargs), y) <= TOLERANCE


def test_a_patched_forward_is_called():
    """Oracle: a forward set on an instance, as offloading tools do, is called."""
    model, calls = create_model("vit_digits_patch2_8", depth=1), []
    for part in ("norm1", "attn.qkv", "mlp.fc1"):
        module = model.blocks[0].get_submodule(part)
        module.forward = lambda x, own=module.forward, part=part: (calls.append(part), own(x))[1]
    model(torch.randn(1, 1, 8, 8))
    assert calls == ["norm1", "attn.qkv", "mlp.fc1"]


def test_a_replaced_linear_is_called():
    """Oracle: a low-rank adapter in place of a linear layer changes the output as it should."""

    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.weight, self.bias = base, base.weight, base.bias

        def forward(self, x):
            return self.base(x) + 1

    model = randomize(create_model("vit_digits_patch2_8", depth=1)).eval()
    images, block = torch.randn(2, 1, 8, 8), model.blocks[0]
    for owner, name in ((block.attn, "qkv"), (block.attn, "proj"), (block.mlp, "fc1"), (block.mlp, "fc2")):
        base = getattr(owner, name)
        with torch.no_grad():
            base.bias += 1
            want = model(images)
            base.bias -= 1
        setattr(owner, name, Adapter(base))
        assert distance(model(images), want) <= TOLERANCE
        setattr(owner, name, base)


@pytest.mark.few(6)
@pytest.mark.parametrize("family", SMALLEST)
def test_copies_pickles_and_meta(family):
    """Oracle: the original's logits from a deep copy, after torch.save of the state, and after to_empty and load."""
    model, images = smallest(family)
    name, options, _ = SMALLEST[family]
    twin = copy.deepcopy(model)
    with torch.no_grad():
        next(twin.parameters()).add_(1)
    with torch.device("meta"):
        empty = create_model(name, **options)
    empty = empty.to_empty(device="cpu").eval()
    empty.load_state_dict(model.state_dict())
    assert torch.equal(empty(images), model(images)) and not torch.equal(twin(images), model(images))
    assert torch.equal(pickle.loads(pickle.dumps(model))(images), model(images))


@pytest.mark.few(18)
@pytest.mark.parametrize("family", [*SMALLEST, "distilled"])
def test_reset_classifier_is_a_zero_head(family):
    """Oracle: logits 0 and cross-entropy ln K at step 0 (ViT paper, section 3.2); a new pooling is the option's."""
    model = create_model("deit_tiny_distilled_patch16_224", img_size=32, depth=1)
    model, images = (model, torch.randn(2, 3, 32, 32)) if family == "distilled" else smallest(family)
    model.reset_classifier(7)
    logits = model(images)
    assert torch.equal(logits, torch.zeros(2, 7))
    loss = F.cross_entropy(logits, torch.tensor([0, 6]))
    assert float(loss.detach()) == pytest.approx(torch.tensor(7.0).log().item())
    model.reset_classifier(0)
    assert model(images).shape == (2, model.num_features)
    with pytest.raises(ValueError, match="global_pool is 'median'") as refused:
        model.reset_classifier(4, "median")
    named = str(refused.value).rpartition("use one of ")[2].split(", ") if "use one of" in str(refused.value) else []
    assert named or family == "distilled"
    for pooling in named:  # those that the message names are taken
        copy.deepcopy(model).reset_classifier(4, pooling)
    if family != "distilled":
        name, options, _ = SMALLEST[family]
        pool = "gap" if family.startswith("crossvit") else ""
        model.reset_classifier(4, pool)
        built = create_model(name, **options | dict(num_classes=4, global_pool=pool))
        assert model.config.global_pool == built.config.global_pool
        assert model(images).shape == built.eval()(images).shape


@pytest.mark.parametrize("family", [*SMALLEST, "distilled"])
def test_variants_rebuild_from_name_and_config(family):
    """Oracle: the same state_dict shapes from `create_model(variant, **config)`, also of a config in JSON."""
    model = create_model("deit_tiny_distilled_patch16_224", img_size=32, depth=1, num_classes=3)
    model = model if family == "distilled" else smallest(family)[0]
    again = create_model(model.variant, **json.loads(json.dumps(dataclasses.asdict(model.config))))
    assert again.config == model.config and type(again) is type(model)
    assert again.state_dict().keys() == model.state_dict().keys()


def test_list_models_takes_patterns():
    """Oracle: shell patterns on the catalogue."""
    assert list_models("deit3_*_384") == [
        "deit3_base_patch16_384",
        "deit3_large_patch16_384",
        "deit3_small_patch16_384",
    ]
    assert list_models("nothing*") == [] and len(list_models()) == len(CATALOGUE)


def test_checkpoints_of_every_family_can_be_read():
    """Oracle: a layout of its own for each family that has names of its own, else that of plain ViTs."""
    families = [family for family in FAMILIES if hasattr(family, "MODEL")]
    assert {family.MODEL.layout for family in families} == CHECKPOINT_FORMATS.keys()
    assert all(hasattr(family, "CHECKPOINTS") == (family.MODEL.layout != "vit") for family in families)
    assert [spelling.name for spelling in CHECKPOINT_FORMATS.values() if "transformers" in spelling.saved] == [
        "a plain ViT",
        "Swin",
        "PVT",
        "iGPT",
        "DETR",
        "Deformable DETR",
    ]


@pytest.mark.full
def test_every_variant_is_valid_and_one_is_built():
    """Oracle: a config of each name has the values of its variant; a process that creates a model checks one config."""
    for name, family in CATALOGUE.items():
        config, options = model_config(name), family.VARIANTS[name]
        assert type(config) is family.CONFIG and isinstance(config, BaseConfig)
        for key, value in options.items():
            size = key in ("img_size", "patch_size") and isinstance(value, int)
            assert getattr(config, key) == ((value, value) if size else value), (name, key)
        assert model_config(name, num_classes=None, in_chans=1) == config.replace(in_chans=1)
    code = """
import fastvit_triton
from fastvit_triton.models.config import BaseConfig
check, checked = BaseConfig.__post_init__, []
BaseConfig.__post_init__ = lambda self: (checked.append(self), check(self))
fastvit_triton.create_model("vit_digits_patch2_8")
fastvit_triton.create_model("swin_tiny_patch4_window7_224", img_size=56, depths=(1, 1, 1, 1))
assert [config.num_classes for config in checked] == [10, 1000]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "name, options, error, words",
    [
        ("vit_tiny_patch16_22", {}, ValueError, "nearest are vit_tiny_patch16_224, "),
        (
            "vit_tiny_patch16_224",
            dict(img_size=225),
            ValueError,
            "height 225 is not a multiple of .* 16; use 224 or 240",
        ),
        ("vit_tiny_patch16_224", dict(img_size=(224, 8)), ValueError, "width 8 is not a multiple .* use 16"),
        ("vit_tiny_patch16_224", dict(pool="gap"), TypeError, "no option 'pool'; the nearest are global_pool"),
        ("vit_tiny_patch16_224", dict(pos_embed="rope"), ValueError, "pos_embed is 'rope'; use one of learned"),
        ("vit_tiny_patch16_224", dict(num_heads=5), ValueError, "192 is not a multiple of num_heads 5"),
        ("vit_tiny_patch16_224", dict(class_token=False), ValueError, "global_pool 'token' needs class_token=True"),
        (
            "vit_tiny_patch16_224",
            dict(drop_path_rate=1.5),
            ValueError,
            r"drop_path_rate is 1.5; use a rate in \[0, 1\)",
        ),
        ("vit_tiny_patch16_224", dict(attn_drop_rate=-0.1), ValueError, "attn_drop_rate is -0.1"),
        ("vit_tiny_patch16_224", dict(in_chans=0), ValueError, "in_chans is 0; it must be at least 1"),
        ("vit_tiny_patch16_224", dict(num_classes=-1), ValueError, "num_classes is -1; use 0 for no head"),
        ("vit_tiny_patch16_224", dict(embed_dim=6, num_heads=1, pos_embed="sincos2d"), ValueError, "divisible by 4"),
    ],
)
def test_bad_options_raise_one_sentence(name, options, error, words):
    """Oracle: what was given and what would do, on one line."""
    with one_sentence(words, error):
        create_model(name, **options)


def test_none_leaves_what_cannot_be_none():
    """Oracle: timm, which drops options that are None."""
    given = dict(num_classes=None, drop_rate=None, img_size=None, depth=1)
    assert model_config("vit_tiny_patch16_224", **given) == model_config("vit_tiny_patch16_224", depth=1)
    assert (
        model_config("deit3_small_patch16_224", init_values=None).init_values is None
    )  # which switches LayerScale off


def test_tokens_say_which_option_an_image_needs():
    """Oracle: the option that makes the model take the image."""
    for shape, words in (([1, 1, 32, 32], "with in_chans="), ([1, 3, 48, 32], "with img_size="), ([3, 32, 32], "32]$")):
        with pytest.raises(ValueError, match=words):
            create_model("ceit_tiny_224", img_size=32, depth=1)(torch.randn(shape))


def test_wrong_images_raise_one_sentence():
    """Oracle: channels and size, both given."""
    model = create_model("vit_tiny_patch16_224", depth=1)
    with pytest.raises(ValueError, match=r"axes \[B, 3, H, W\], got shape \[1, 1, 224, 224\]"):
        model(torch.zeros(1, 1, 224, 224))
    with pytest.raises(ValueError, match="image is 192x224 pixels, the model takes 224x224"):
        model(torch.zeros(1, 3, 192, 224))
    with pytest.raises(ValueError, match="not a multiple of the patch"):
        create_model("vit_tiny_patch16_224", depth=1, dynamic_img_size=True)(torch.zeros(1, 3, 100, 224))


@pytest.mark.parametrize(
    "config", sorted({type(model_config(n)) for n in CATALOGUE}, key=str), ids=lambda c: c.__name__
)
def test_configs_document_every_field(config):
    """Oracle: the docstrings' Attributes, of the class, its bases and ViTConfig, whose names mean the same everywhere.

    A family has at most 16 options of its own.
    """
    text = "".join(inspect.getdoc(base) for base in (*config.__mro__, ViTConfig) if issubclass(base, BaseConfig))
    names = [f.name for f in dataclasses.fields(config)]
    assert [name for name in names if f"\n    {name}:" not in text] == []
    assert len(names) - len(dataclasses.fields(BaseConfig)) <= 16 or issubclass(config, ViTConfig)
