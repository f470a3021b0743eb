"""Tests of detectors after `optimize`: deformable sampling, frozen BatchNorms. Oracle: the same before, in float64."""

import copy
import importlib
from collections import Counter

import pytest
import torch
import transformers
from budget import assert_within_budget, telling
from interpreter import interpreting
from sampling import marked
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.detr import modeling_detr as detr

import benchmarks  # noqa: F401 (declares torchvision's operators)
from fastvit_triton import optimize, revert, using_backend
from fastvit_triton.engine import batch_norm
from fastvit_triton.kernels import deformable

SHAPES = [(3, 4), (2, 2), (1, 1)]
N = sum(h * w for h, w in SHAPES)
COPIES = """deformable_detr grounding_dino lw_detr mm_grounding_dino omdet_turbo pp_doclayout_v2 pp_doclayout_v3 rf_detr
rt_detr""".split()
NAMES = {name: f"{name}.MultiScaleDeformableAttention" for name in COPIES}
NAMES["mask2former"] = "mask2former.Mask2FormerPixelDecoderEncoderMultiscaleDeformableAttention"
NAMES["oneformer"] = "oneformer.OneFormerPixelDecoderEncoderMultiscaleDeformableAttention"


def module_of(name):
    """The module of a model of transformers, in a container, with random parameters."""
    folder, cls = NAMES[name].split(".")
    made = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), cls)
    model = nn.Sequential(made() if name in COPIES else made(16, 2, len(SHAPES), 4))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def given(name, dtype):
    """Keyword arguments of its call; all floating-point tensors require gradients."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    if name in COPIES:
        points = dict(sampling_locations=randn(2, 5, 2, 3, 4, 2), attention_weights=randn(2, 5, 2, 3, 4))
        places = dict(value_spatial_shapes=torch.tensor(SHAPES), value_spatial_shapes_list=SHAPES)
        return dict(value=randn(2, N, 2, 8), **points, **places, level_start_index=None, im2col_step=64)
    tokens = dict(hidden_states=randn(2, N, 16), encoder_hidden_states=randn(2, N, 16))
    tokens |= dict(
        position_embeddings=randn(2, N, 16), reference_points=randn(2, N, 3, 4 if name == "oneformer" else 2)
    )
    mask = torch.arange(N).expand(2, N) > N - 3
    shapes = dict(spatial_shapes=torch.tensor(SHAPES)) if name == "oneformer" else {}
    return dict(**tokens, attention_mask=mask, spatial_shapes_list=SHAPES, **shapes)


def outcome(model, arguments):
    """The output and the gradients of inputs and parameters, by name, in float64."""
    y = model[0](**arguments)
    y, more = y if isinstance(y, tuple) else (y, torch.zeros(()))
    learning = {n: t for n, t in arguments.items() if isinstance(t, torch.Tensor) and t.requires_grad}
    learning |= dict(model.named_parameters())
    along = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    grads = torch.autograd.grad((y * along).sum() + more.square().sum(), list(learning.values()))
    found = {"output": y, **dict(zip(learning, grads, strict=True))}
    return {n: t.detach().double() for n, t in found.items()}


@pytest.mark.fast
@pytest.mark.parametrize("name", NAMES)
def test_sampling_equals_the_originals(name, monkeypatch):
    """Oracle: the original; the converted module calls the op, whose result the test sees."""
    model = module_of(name).double()
    want = outcome(model, given(name, torch.float64))
    report = optimize(model)
    assert [row.became for row in report.rows] == [f"fused deformable {'sampling' if name in COPIES else 'attention'}"]
    calls = []
    monkeypatch.setattr(deformable, "_reference", lambda *a: calls.append(a) or deformable.reference(*a))
    with using_backend("torch"):
        got = outcome(model, given(name, torch.float64))
    assert len(calls) == 1 and got.keys() == want.keys()
    for key, truth in want.items():
        bound = 84 * torch.finfo(torch.float64).eps * telling(truth).abs().max()
        assert (got[key] - truth).abs().max() <= bound, key
    revert(model)
    assert all(torch.equal(a, want[key]) for key, a in outcome(model, given(name, torch.float64)).items())


@pytest.mark.parametrize("name", ["rt_detr", "mask2former", "oneformer"])
def test_kernels_are_as_exact_as_the_originals(name, monkeypatch):
    """Oracle: the original in float64; budget by its own error in float32."""
    model = module_of(name)
    truth = outcome(copy.deepcopy(model).double(), given(name, torch.float64))
    own = outcome(model, given(name, torch.float32))
    optimize(model)
    launched, launch = [], deformable.launch
    monkeypatch.setattr(
        deformable, "launch", lambda kernel, *a, **b: launched.append(kernel) or launch(kernel, *a, **b)
    )
    with interpreting():
        got = outcome(model, given(name, torch.float32))
    assert launched == [deformable._fwd_kernel, deformable._bwd_points_kernel, deformable._bwd_value_kernel]
    assert_within_budget(got, own, truth)


@pytest.mark.fast
@pytest.mark.parametrize("name", ["rt_detr", "mask2former"])
def test_dtypes_under_autocast_equal_the_originals(name):
    """Oracle: the dtypes of the original's results."""
    model = module_of(name)

    def dtypes():
        with torch.autocast("cpu", torch.bfloat16):
            arguments = given(name, torch.float32)
            if name == "rt_detr":
                arguments["value"] = arguments["value"].bfloat16()
            found = model[0](**arguments)
        return [t.dtype for t in (found if isinstance(found, tuple) else (found,))]

    want = dtypes()
    optimize(model)
    with interpreting():
        assert dtypes() == want


@pytest.mark.fast
def test_a_hook_on_a_projection_is_called():
    """Oracle: the original with the same hook."""
    model, arguments = module_of("mask2former").double(), given("mask2former", torch.float64)
    model[0].value_proj.register_forward_hook(lambda module, inputs, y: 2 * y)
    want = model[0](**arguments)[0]
    optimize(model)
    with using_backend("torch"):
        got = model[0](**arguments)[0]
    assert (got - want).abs().max() <= 84 * torch.finfo(torch.float64).eps * telling(want).abs().max()


def with_statistics(model):
    """The model with random weights and statistics of its norms."""
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        if t.is_floating_point():
            t.data.uniform_(0.5, 2) if name.endswith("running_var") else t.data.normal_(std=0.5)
    return model


def norm_of(name):
    """A frozen BatchNorm of three channels, by its type's name."""
    module, cls = name.rsplit(".", 1)
    return with_statistics(nn.Sequential(getattr(importlib.import_module(module), cls)(3)))


@pytest.mark.parametrize("name", batch_norm.FROZEN_BATCH_NORMS)
def test_frozen_norms_are_one_operator(name):
    """Oracle: the original in float64, in evaluation and in training; dtypes where x and the statistics differ."""
    model = norm_of(name).double()
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)

    def outcome():
        y = model(x)
        return y.detach(), *torch.autograd.grad(y.square().sum(), x)

    want = outcome()
    dtypes = [(model.float()(x.to(dtype))).dtype for dtype in (torch.float32, torch.bfloat16)]
    (row,) = optimize(model.double()).rows
    assert row.became == "fused frozen BatchNorm" or row.why == "it calls the kernels itself"
    with using_backend("torch"):
        for training in (False, True):
            model.train(training)
            for got, truth in zip(outcome(), want, strict=True):
                assert (got - truth).abs().max() <= 84 * torch.finfo(torch.float64).eps * telling(truth).abs().max()
    with interpreting():
        assert [(model.float()(x.to(dtype))).dtype for dtype in (torch.float32, torch.bfloat16)] == dtypes
        with Operators() as operators:
            model(x.float())
        assert operators["aten::native_batch_norm"] == 1 and "aten::rsqrt" not in operators


class Operators(TorchDispatchMode, Counter):
    """Counts the operators that are called in its context, by name."""

    def __torch_dispatch__(self, function, kinds, arguments=(), named=None):
        self[function.name()] += 1
        return function(*arguments, **(named or {}))


def resnet(name):
    """A small ResNet of transformers with frozen BatchNorms."""
    sizes = dict(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic")
    if name == "resnet":
        model = transformers.ResNetModel(transformers.ResNetConfig(**sizes))
    else:
        model = transformers.RTDetrResNetBackbone(transformers.RTDetrResNetConfig(**sizes))
    with torch.no_grad():
        detr.replace_batch_norm(model)
    return with_statistics(model).eval()


@pytest.mark.parametrize("name", ["resnet", "rt_detr"])
def test_frozen_norms_are_folded_into_convolutions(name):
    """Oracle: the original in float64, also after statistics were written and with a hook; no norm is left before."""
    model = resnet(name)
    other, x = copy.deepcopy(model), torch.randn(2, 3, 32, 32)
    optimize(model, freeze=True)

    def result(each, x):
        y = each(x)
        return {"output": y.last_hidden_state if name == "resnet" else y.feature_maps[-1]}

    def check():
        truth = result(copy.deepcopy(other).double(), x.double())
        with interpreting(), Operators() as operators:
            got = result(model, x)
        assert_within_budget(got, result(other, x), truth)
        return operators["aten::native_batch_norm"], operators["aten::convolution"]

    norms = [[m for m in each.modules() if type(m) is detr.DetrFrozenBatchNorm2d] for each in (model, other)]
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        own = result(other, x)["output"].dtype
        with interpreting():
            assert result(model, x)["output"].dtype == own == torch.float32
    with torch.no_grad():
        assert check() == (0, len(norms[0]))
        for first, *_ in norms:
            first.running_mean.add_(1)
        assert check() == (0, len(norms[0]))
        for each in (model, other):
            last = [m for m in each.modules() if type(m) is nn.Conv2d and m.kernel_size == (3, 3)][-1]
            last.padding_mode = "reflect"
        check()
        for each in (model, other):
            last = [m for m in each.modules() if type(m) is nn.Conv2d and m.kernel_size == (3, 3)][-1]
            last.padding_mode = "zeros"
        for first, *_ in norms:
            first.register_forward_hook(lambda module, inputs, y: 2 * y)
        assert check() == (0, len(norms[0]))  # the hooked norm runs the operators of its own forward


RESNET = dict(embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], layer_type="basic")
HEADS = dict(encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16)
LAYERS = dict(encoder_layers=1, decoder_layers=2, num_queries=5)
MAPS = ["stage2", "stage3", "stage4"]
WHOLE = {  # detectors of transformers: options of their configurations
    "Detr": dict(d_model=16, **LAYERS, **HEADS),
    "ConditionalDetr": dict(d_model=16, **LAYERS, **HEADS),
    "TableTransformer": dict(d_model=16, **LAYERS, **HEADS),
    "DeformableDetr": dict(d_model=32, num_feature_levels=4, **LAYERS, **HEADS),
    "RTDetr": dict(
        d_model=16,
        encoder_hidden_dim=16,
        encoder_in_channels=[16, 16, 16],
        decoder_in_channels=[16, 16, 16],
        decoder_layers=1,
        num_queries=5,
        num_denoising=0,
        **HEADS,
    ),
}


def detector(name):
    """A small detector of transformers in float64, with random statistics of its norms."""
    kind = "rt_detr_resnet" if name == "RTDetr" else "resnet"
    maps = MAPS if name in ("DeformableDetr", "RTDetr") else MAPS[-1:]
    backbone = dict(RESNET, model_type=kind, out_features=maps)
    library = {} if name == "RTDetr" else dict(use_timm_backbone=False, use_pretrained_backbone=False, backbone=None)
    config = getattr(transformers, f"{name}Config")(backbone_config=backbone, **library, **WHOLE[name])
    model = getattr(transformers, f"{name}ForObjectDetection")(config).double().eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)  # some heads start with zeros
    for buffer, t in model.named_buffers():
        if buffer.endswith(("running_mean", "running_var")):
            t.uniform_(0.5, 2)
    return model


@pytest.mark.parametrize("name", marked(WHOLE, pytest.mark.full, lambda name: name != "Detr"))
def test_detectors_are_fused_by_an_example(name):
    """Oracle: the original in float64, logits, boxes and all gradients; every layer is captured.

    Those with deformable attention run as written, as their graph leaves its softmax, and what they hold is fused.
    """
    torch.manual_seed(0)
    model = detector(name)
    other, x = copy.deepcopy(model), torch.randn(2, 3, 64, 64, dtype=torch.float64)

    def outcome(each):
        y = each(x)
        parameters = {n: p for n, p in each.named_parameters() if p.requires_grad}
        loss = y.logits.square().sum() + y.pred_boxes.square().sum()
        grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        return y.logits, y.pred_boxes, torch.cat([g.flatten() for g in grads if g is not None])

    with using_backend("torch"):
        report = optimize(model, example=x)
        got = outcome(model)
    assert all(row.why == "what it holds is fused instead, as its graph leaves softmax" for row in report.left)
    assert not report.left or name in ("DeformableDetr", "RTDetr")
    for result, truth in zip(got, outcome(other), strict=True):
        assert (result - truth).abs().max() <= 840 * torch.finfo(torch.float64).eps * telling(truth).abs().max()
