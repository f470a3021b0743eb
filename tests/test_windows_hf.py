"""Tests of transformers' pyramids and BEiT after `optimize`. Oracle: the untouched model, or its forward."""

import copy
import sys

import pytest
import torch
import transformers
from agreement import seeded
from catalogue import build, inputs, outputs, redraw
from catalogue.transformers import DROPLESS, HF, STAGES, WINDOWS
from interpreter import interpreting
from recording import Recorder
from test_convert import same
from torch.utils._pytree import tree_leaves

from fastvit_triton import optimize
from fastvit_triton.convert import forwards
from fastvit_triton.convert.readers import transformers as from_transformers
from fastvit_triton.expected.count import predict
from fastvit_triton.expected.gpus import gpus
from fastvit_triton.kernels.settings import forcing

FILES = forwards, from_transformers.swin
SWINS = ["hf_swin", "hf_swinv2", "hf_donut_swin", "hf_maskformer_swin"]
NAMES = [*SWINS, "hf_segformer", "hf_glpn", "hf_pvt", "hf_pvt_v2", "hf_pvt_v2_linear", "hf_beit", "hf_data2vec"]
LAYERS = {name: "encoder.layers.0.blocks.1" for name in (*SWINS, "hf_pvt_v2")}
LAYERS |= {"hf_segformer": "stages.0.blocks.1", "hf_glpn": "encoder.block.0.1", "hf_pvt": "encoder.block.0.1"}
LAYERS |= {"hf_pvt_v2_linear": "encoder.layers.0.blocks.1", "hf_data2vec": "encoder.layer.1", "hf_beit": "layers.1"}


@pytest.fixture
def originals(monkeypatch):
    """The modules that run their own forward."""
    kept = []
    for file in FILES:
        own = file.original
        monkeypatch.setattr(file, "original", lambda m, *x, own=own, **more: kept.append(m) or own(m, *x, **more))
    return kept


def twins(model):
    """The model converted, and a copy that is not."""
    plain = copy.deepcopy(model)
    report = optimize(model)
    assert not report.left
    return model, plain


def leaves(y):
    """All tensors of a model's output, nested ones too; the number of other leaves."""
    found = tree_leaves(dict(y) if hasattr(y, "items") else y)
    return [t for t in found if isinstance(t, torch.Tensor)], sum(not isinstance(t, torch.Tensor) for t in found)


def equal(got, want, dtype=None):
    """True if the same tensors are in both outputs, but for rounding."""
    (a, m), (b, n) = leaves(got), leaves(want)
    return (
        len(a) == len(b) and m == n and all(s.shape == t.shape and same(s, t, dtype) for s, t in zip(a, b, strict=True))
    )


def swin(version="", **more):
    sizes = WINDOWS | dict(depths=[2], num_heads=[2]) | more
    package = sys.modules["transformers"]
    return redraw(getattr(package, f"Swin{version}Model")(getattr(package, f"Swin{version}Config")(**sizes))).double()


@pytest.mark.parametrize("version", ["", "v2"])
def test_grids_of_all_sizes_equal_the_original(version, references, originals):
    """A grid no larger than the window changes a Swin layer for good; so the order of the calls matters."""
    model, plain = twins(swin(version).eval())
    for height, width in ((32, 32), (28, 36), (20, 44), (16, 24), (32, 32), (36, 20)):
        x = torch.randn(2, 3, height, width, dtype=torch.float64)
        assert equal(model(x), plain(x)), (height, width)
        state = [[(m.shift_size, m.window_size) for m in owner.encoder.layers[0].blocks] for owner in (model, plain)]
        assert state[0] == state[1]
    assert not originals


@pytest.mark.full
def test_a_grid_smaller_than_the_window_runs_the_original(references):
    """transformers adds a bias of the configured window and fails; so does the converted model."""
    model, plain = twins(swin().eval())
    for owner in (plain, model):
        with pytest.raises(RuntimeError):
            owner(torch.randn(1, 3, 8, 24, dtype=torch.float64))


def test_partition_despite_a_small_grid(references, originals):
    """Oracle: the encoder with `always_partition`, which keeps the shift."""
    model, plain = twins(swin().eval())
    x = torch.randn(2, 16, 16, dtype=torch.float64)
    got, want = (owner.encoder(x, (4, 4), always_partition=True) for owner in (model, plain))
    assert equal(got, want) and not originals and model.encoder.layers[0].blocks[1].shift_size == 2


def test_the_mask_of_shifted_windows_lets_large_scores_through(references):
    """The regions of a shifted window are 100 apart; no score is −∞."""
    model = swin().eval()
    with torch.no_grad():
        for block in model.encoder.layers[0].blocks:
            block.attention.q_proj.weight.mul_(100)
    model, plain = twins(model)
    x = torch.randn(2, 3, 28, 36, dtype=torch.float64)
    assert equal(model(x), plain(x))


EAGER = "hf_swin", "hf_segformer", "hf_beit"  # others return weights with every attn_implementation, or never


@pytest.mark.few(4)
@pytest.mark.parametrize("name", NAMES)
def test_requested_states_and_weights_equal_the_original(name, references, originals):
    """Oracle: every output of the original, whose eager softmax is float32; afterwards the layers are fused again."""
    model = build(name).eval()
    if name in EAGER:
        model.set_attn_implementation("eager")
    model, plain = twins(model)
    x, rough = inputs(name), torch.float32 if name in EAGER else None
    layers = {id(m) for m in model.modules() if type(m).__name__.endswith("Layer")}
    states = {} if name == "hf_maskformer_swin" else dict(output_hidden_states=True)  # a copy that cannot return them
    assert equal(model(x, **states), plain(x, **states), rough)
    assert not layers & set(map(id, originals))
    if name != "hf_maskformer_swin":
        named = dict(output_attentions=True) | states
        got, want = model(x, **named), plain(x, **named)
        assert equal(got, want, rough)
        assert (got.attentions[0] is None) == (name == "hf_data2vec")  # it warns
    originals.clear()
    assert equal(model(x), plain(x), rough)
    assert not layers & set(map(id, originals))


DROPS = dict(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.0)
RATES = {
    "depth": dict(DROPLESS, drop_path_rate=0.5),
    "hidden": dict(DROPS, drop_path_rate=0.0),
    "attention": dict(DROPLESS, drop_path_rate=0.0, attention_probs_dropout_prob=0.3),
}


def dropped(family, rates):
    """A model of the family with these rates; the last layer of PVT v2 is deepest."""
    package = transformers
    options = {
        "Swin": WINDOWS,
        "Swinv2": WINDOWS,
        "DonutSwin": WINDOWS,
        "Segformer": STAGES | dict(patch_sizes=[7, 3]),
        "GLPN": STAGES | dict(patch_sizes=[7, 3]),
        "Pvt": STAGES | dict(patch_sizes=[4, 2], sequence_reduction_ratios=[2, 1], image_size=32),
        "PvtV2": STAGES | dict(patch_sizes=[7, 3], image_size=32),
        "Beit": HF,
        "Data2VecVision": HF,
    }[family]
    return redraw(getattr(package, f"{family}Model")(getattr(package, f"{family}Config")(**options | rates)))


@pytest.mark.few(6)
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize(
    "family", ["Swin", "Swinv2", "DonutSwin", "Segformer", "GLPN", "Pvt", "PvtV2", "Beit", "Data2VecVision"]
)
def test_random_draws_equal_the_original(family, rate, references, originals):
    """Oracle: the original with the same seed. What drops attention or windows runs its own forward; depth does not."""
    model = dropped(family, RATES[rate]).double().train()
    plain = copy.deepcopy(model)
    report = optimize(model)
    x = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    assert equal(*(seeded(owner, x) for owner in (model, plain)))
    assert all("dropout" in row.why for row in report.left)
    assert bool(report.left) == (rate == "attention" or (rate == "hidden" and family == "Swin"))
    assert bool(originals) == bool(report.left)


def test_a_converted_model_can_be_saved(tmp_path, references):
    """Oracle: the original's outputs, from the saved files."""
    model, plain = twins(swin().eval())
    model.save_pretrained(tmp_path)
    x = torch.randn(1, 3, 28, 36, dtype=torch.float64)
    assert equal(transformers.SwinModel.from_pretrained(tmp_path).double().eval()(x), plain(x))


def test_clap_runs_the_code_of_swin(references, originals):
    """Oracle: the original, on a spectrogram; CLAP's audio tower is a copy of Swin."""
    sizes = dict(spec_size=32, num_mel_bins=8, patch_size=4, patch_stride=[4, 4], window_size=4, hidden_size=32)
    sizes |= dict(patch_embeds_hidden_size=16, depths=[2, 1], num_attention_heads=[2, 4], enable_fusion=False)
    config = transformers.ClapAudioConfig(**sizes, hidden_dropout_prob=0.0, drop_path_rate=0.0)
    model, plain = twins(redraw(transformers.ClapAudioModel(config)).double().eval())
    x = torch.randn(2, 1, 128, 8, dtype=torch.float64)
    assert equal(model(x), plain(x)) and not originals
    assert {"ClapAudioLayer", "ClapAudioAttention", "ClapAudioPatchMerging"} <= {m.type for m in optimize(model).fused}


# our operators in one layer, without folds
OPERATORS = {
    "hf_swin": ["window_attention_fwd", *["linear_fwd"] * 4],
    "hf_swinv2": ["window_attention_fwd", *["linear_fwd"] * 4],
    "hf_segformer": ["attention_fwd", "patch_embed_fwd", "depthwise_fwd", *["linear_fwd"] * 5],
    "hf_pvt_v2": ["attention_fwd", "patch_embed_fwd", "depthwise_fwd", *["linear_fwd"] * 5],
    "hf_pvt": ["attention_fwd", "patch_embed_fwd", *["linear_fwd"] * 5],
    "hf_beit": ["attention_fwd", *["linear_fwd"] * 4],
}
FORBIDDEN = "roll", "_softmax", "bmm", "constant_pad_nd", "convolution", "index.Tensor", "upsample", "native_layer_norm"


@pytest.mark.full
@pytest.mark.parametrize("name", OPERATORS)
def test_a_frozen_layer_runs_our_operators_alone(name):
    """Oracle: the operators of the equations: nothing rolls, pads, convolves or reads a table."""
    model = build(name, torch.float32).eval()
    optimize(model, freeze=True)
    layer = model.get_submodule(LAYERS[name])
    x, given = inputs(name, torch.float32), []
    handle = layer.register_forward_pre_hook(lambda m, x, more: given.append((x, more)), with_kwargs=True)
    with torch.no_grad(), interpreting(), forcing("fused"):
        outputs(model, x)
        handle.remove()
        ((positional, named),) = given
        with Recorder() as run:
            layer(*positional, **named)
    found = [op for op in run.ours if not op.startswith(("layer_norm", "row_stat", "fold", "pack"))]
    assert sorted(found) == sorted(OPERATORS[name])
    assert not [op for op in run.ops if any(word in op for word in FORBIDDEN)]


# model → (class, configuration, most launches of a frozen model, least ratio of bytes to the original's)
LIMITS = {
    "Swin": ("ForImageClassification", {}, 87, 2.4),
    "Swinv2": ("ForImageClassification", {}, 131, 2.6),
    "DonutSwin": ("Model", {}, 81, 3.3),
    "Segformer": ("ForImageClassification", {}, 100, 1.38),
    "GLPN": ("Model", {}, 98, 1.7),
    "Pvt": ("ForImageClassification", {}, 85, 2.9),
    "PvtV2": ("ForImageClassification", {}, 100, 1.65),
    "Beit": ("ForImageClassification", dict(use_relative_position_bias=True), 77, 1.7),
    "Data2VecVision": ("ForImageClassification", dict(use_relative_position_bias=True), 77, 1.7),
}


@pytest.mark.full
@pytest.mark.parametrize("family", [f if f == "Pvt" else pytest.param(f, marks=pytest.mark.full) for f in LIMITS])
def test_launches_and_bytes_of_whole_models(family):
    """Oracle: counts of the default configuration, bfloat16, 8 images; everything but bare LayerNorms is fused."""
    kind, options, launches, ratio = LIMITS[family]
    with torch.device("meta"):
        config = getattr(transformers, f"{family}Config")(**options)
        model = getattr(transformers, f"{family}{kind}")(config).to(torch.bfloat16).eval()
    assert not optimize(model).left
    with forcing("fused"):
        x = torch.empty(8, 3, 224, 224, device="meta", dtype=torch.bfloat16)
        found = predict(model, gpus()["h200"], False, x)
    assert found.frozen.launches <= launches and found.eager.nbytes >= ratio * found.frozen.nbytes
