"""Tests of detectors after `optimize`: sampling, BatchNorms, layers, positions. Oracle: the same before, in float64."""

import copy
import importlib
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import timm
import torch
import transformers
from agreement import normal
from budget import assert_within_budget, telling
from interpreter import interpreting
from sampling import marked
from timm.models import resnet as timm_resnet
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.models import resnet as torchvision_resnet
from transformers.models.detr import modeling_detr as detr
from transformers.models.mask2former import modeling_mask2former as mask2former
from transformers.models.rf_detr import modeling_rf_detr as rf_detr
from transformers.models.rt_detr import modeling_rt_detr as rt_detr

import benchmarks  # noqa: F401 (declares torchvision's operators)
from fastvit_triton import freeze, optimize, revert, using_backend
from fastvit_triton.engine import batch_norm
from fastvit_triton.kernels import batch_norm as kernel_file
from fastvit_triton.kernels import deformable
from fastvit_triton.layers.frozen_resnet import FrozenResNet

SHAPES = [(3, 4), (2, 2), (1, 1)]
N = sum(h * w for h, w in SHAPES)
COPIES = """deformable_detr grounding_dino lw_detr mm_grounding_dino omdet_turbo pp_doclayout_v2 pp_doclayout_v3 rf_detr
rt_detr""".split()
NAMES = {name: f"{name}.MultiScaleDeformableAttention" for name in COPIES}
NAMES["mask2former"] = "mask2former.Mask2FormerPixelDecoderEncoderMultiscaleDeformableAttention"
NAMES["oneformer"] = "oneformer.OneFormerPixelDecoderEncoderMultiscaleDeformableAttention"
AROUND = dict(
    lw="lw_detr.LwDetr",
    deformable="deformable_detr.DeformableDetr",
    doc_v2="pp_doclayout_v2.PPDocLayoutV2",
    doc_v3="pp_doclayout_v3.PPDocLayoutV3",
    doc_v4="pp_doclayout_v4.PPDocLayoutV4",
    rf="rf_detr.RfDetr",
    rt="rt_detr.RTDetr",
)
SCALED = dict(rt_v2="rt_detr_v2.RTDetrV2", d_fine="d_fine.DFine", deim="deimv2.Deimv2")
NAMES |= {name: f"{prefix}MultiscaleDeformableAttention" for name, prefix in (AROUND | SCALED).items()}
OPTIONS = dict(d_model=16, num_feature_levels=len(SHAPES), disable_custom_kernels=True, decoder_attention_heads=2)
OPTIONS |= dict(decoder_n_points=4, decoder_n_levels=len(SHAPES), decoder_offset_scale=0.5, decoder_method="default")


def module_of(name, **options):
    """The module of a model of transformers, in a container, with random parameters."""
    folder, cls = NAMES[name].split(".")
    made = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), cls)
    if name in (AROUND | SCALED):
        counts = dict(num_heads=2, n_points=4) if name in AROUND else {}
        model = nn.Sequential(made(SimpleNamespace(**OPTIONS | options), **counts))
    else:
        model = nn.Sequential(made() if name in COPIES else made(16, 2, len(SHAPES), 4))
    return normal(model)


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
    levels = 1 if name in SCALED else 3
    tokens["reference_points"] = randn(2, N, levels, 4 if name in ("oneformer", "rf", *SCALED) else 2)
    if name not in ("d_fine", "deim"):
        tokens |= dict(position_embeddings=randn(2, N, 16), attention_mask=torch.arange(N).expand(2, N) > N - 3)
    shapes = {} if name == "mask2former" else dict(spatial_shapes=torch.tensor(SHAPES))
    return dict(**tokens, spatial_shapes_list=SHAPES, **shapes)


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
    assert report.rows[0].became == f"fused deformable {'sampling' if name in COPIES else 'attention'}"
    assert all(row.became and (row.within is not None) == (i > 0) for i, row in enumerate(report.rows))
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


@pytest.mark.few(1)
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


HOOKED = [("mask2former", "value_proj"), ("rt", "attn"), ("rt_v2", "output_proj"), ("d_fine", "attention_weights")]


@pytest.mark.fast
@pytest.mark.parametrize("name, part", HOOKED)
def test_a_hook_inside_is_called(name, part):
    """Oracle: the original with the same hook."""
    model, arguments = module_of(name).double(), given(name, torch.float64)
    getattr(model[0], part).register_forward_hook(lambda module, inputs, y: 2 * y)
    want = model[0](**arguments)[0]
    optimize(model)
    with using_backend("torch"):
        got = model[0](**arguments)[0]
    assert (got - want).abs().max() <= 84 * torch.finfo(torch.float64).eps * telling(want).abs().max()


@pytest.mark.fast
@pytest.mark.parametrize(
    "name, options, fused",
    [
        ("d_fine", dict(decoder_n_points=[3, 6, 3]), True),
        ("deim", dict(decoder_n_points=[1, 2, 5]), True),
        ("d_fine", dict(decoder_offset_scale=0.3), True),
        ("d_fine", dict(decoder_method="discrete"), False),
    ],
)
def test_other_options_of_scaled_offsets(name, options, fused, monkeypatch):
    """Oracle: the original, which runs with another method, but not for other numbers of points of a level or scales.

    The values of the first cells are large: points that are added to a level must not read them.
    """
    model, arguments = module_of(name, **options).double(), given(name, torch.float64)
    with torch.no_grad():
        arguments["encoder_hidden_states"][:, :4] *= 1e3

    def found():  # discrete places have no gradients
        return outcome(model, arguments) if fused else {"output": model[0](**arguments)[0].detach()}

    want = found()
    optimize(model)
    calls = []
    monkeypatch.setattr(deformable, "_reference", lambda *a: calls.append(a) or deformable.reference(*a))
    with using_backend("torch"):
        got = found()
    assert len(calls) == fused
    for key, truth in want.items():
        assert (got[key] - truth).abs().max() <= 84 * torch.finfo(torch.float64).eps * telling(truth).abs().max(), key


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
    """A small ResNet with frozen BatchNorms."""
    if name.startswith("timm"):
        options = dict(block_args=dict(attn_layer="se"), avg_down=True) if name == "timm_se" else {}
        block = timm_resnet.Bottleneck if name == "timm_deep" else timm_resnet.BasicBlock
        model = timm_resnet.ResNet(block, (1, 1, 1, 1), num_classes=0, channels=(4, 8, 8, 8), **options)
    elif name == "torchvision":
        model = torchvision_resnet.ResNet(torchvision_resnet.Bottleneck, (1, 1, 1, 1), num_classes=4)
        model.maxpool = model.fc = nn.Identity()
    elif name == "ours":
        model = FrozenResNet(3, (1, 2), 8, bottleneck=True)
    if name in OTHERS:
        with torch.no_grad():
            detr.replace_batch_norm(model)
        return with_statistics(model).eval()
    sizes = dict(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic")
    if name == "resnet":
        model = transformers.ResNetModel(transformers.ResNetConfig(**sizes))
    else:
        model = transformers.RTDetrResNetBackbone(transformers.RTDetrResNetConfig(**sizes))
    with torch.no_grad():
        detr.replace_batch_norm(model)
    return with_statistics(model).eval()


OTHERS = ["timm", "timm_se", "timm_deep", "torchvision", "ours"]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["resnet", "rt_detr", *OTHERS])
def test_frozen_norms_are_folded_into_convolutions(name):
    """Oracle: the original in float64, also after statistics were written and with a hook; no norm is left before."""
    model = resnet(name)
    other, x = copy.deepcopy(model), torch.randn(2, 3, 64, 64)
    optimize(model, freeze=True)

    def result(each, x):
        y = each(x)
        if name in OTHERS:
            return {"output": y[-1] if name == "ours" else y}
        return {"output": y.last_hidden_state if name == "resnet" else y.feature_maps[-1]}

    def check():
        truth = result(copy.deepcopy(other).double(), x.double())
        with interpreting(), Operators() as operators:
            got = result(model, x)
        assert_within_budget(got, result(other, x), truth)
        return operators["aten::native_batch_norm"], operators["aten::convolution"]

    stems = int(name in OTHERS)  # whose layers the model itself calls
    convolutions = sum(isinstance(m, nn.Conv2d) for m in other.modules())
    norms = [
        [m for m in each.modules() if type(m).__name__.endswith("FrozenBatchNorm2d")][stems:] for each in (model, other)
    ]
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        own = result(other, x)["output"].dtype
        with interpreting():
            assert result(model, x)["output"].dtype == own == torch.float32
    with torch.no_grad():
        assert check() == (stems, convolutions)
        for first, *_ in norms:
            first.running_mean.add_(1)
        assert check() == (stems, convolutions)
        for each in (model, other):
            last = [m for m in each.modules() if type(m) is nn.Conv2d and m.kernel_size == (3, 3)][-1]
            last.padding_mode = "reflect"
        check()
        for each in (model, other):
            last = [m for m in each.modules() if type(m) is nn.Conv2d and m.kernel_size == (3, 3)][-1]
            last.padding_mode = "zeros"
        for first, *_ in norms:
            first.register_forward_hook(lambda module, inputs, y: 2 * y)
        unfolded, ran = check()  # the hooked norm runs the operators of its own forward, or its block does
        assert ran == convolutions and (unfolded == 0 or name in OTHERS)


def launches(monkeypatch):
    """A list that receives the launches of `batch_norm_act`."""
    found, launch = [], kernel_file.launch
    monkeypatch.setattr(kernel_file, "launch", lambda *a, **b: found.append(a[0]) or launch(*a, **b))
    return found


def learning(model, x):
    """The output and all gradients, by name."""
    x = x.clone().requires_grad_()
    y = model(x)
    y = y[-1] if isinstance(y, list) else y.last_hidden_state if hasattr(y, "last_hidden_state") else y
    y = y.feature_maps[-1] if hasattr(y, "feature_maps") else y
    named = {"input": x, **{n: p for n, p in model.named_parameters() if p.requires_grad}}
    grads = torch.autograd.grad(y.square().sum(), list(named.values()), allow_unused=True)
    return {"output": y.detach(), **{n: g for n, g in zip(named, grads, strict=True) if g is not None}}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["resnet", "rt_detr", "timm", "timm_deep", "torchvision", "ours"])
def test_what_follows_a_convolution_is_one_launch(name, monkeypatch):
    """Oracle: the original in float64, output and gradients; a launch for each convolution but those of shortcuts."""
    model, x = resnet(name), torch.randn(2, 3, 32, 32)
    other, found = copy.deepcopy(model), launches(monkeypatch)
    optimize(model)
    with interpreting(), Operators() as operators:
        got = learning(model, x)
    assert_within_budget(got, learning(other, x), learning(copy.deepcopy(other).double(), x.double()))
    stems = int(name in OTHERS)
    paths = [n for n, m in other.named_modules() if isinstance(m, nn.Conv2d)][stems:]
    read = sum("downsample" not in n and "shortcut" not in n for n in paths)
    assert (len(found), operators["aten::relu"] + operators["aten::relu_"]) == (2 * read, stems)  # forward, backward


def rep_vgg():
    """A block of two convolutions of the same map, with random statistics of its norms."""
    config = transformers.RTDetrConfig(encoder_hidden_dim=8)
    return with_statistics(nn.Sequential(nn.Conv2d(3, 8, 1), rt_detr.RTDetrRepVggBlock(config))).eval()


def test_two_convolutions_of_a_map_are_merged(monkeypatch):
    """Oracle: the original in float64; also after writes, with a hook, with groups, and where weights are trained."""
    model, x = rep_vgg(), torch.randn(2, 3, 6, 5)
    other, found = copy.deepcopy(model), launches(monkeypatch)
    optimize(model, freeze=True)

    def check():
        found.clear()
        with interpreting(), Operators() as operators:
            got = {"output": model(x).detach()}
        truth = copy.deepcopy(other).double()(x.double())
        assert_within_budget(got, {"output": other(x).detach()}, {"output": truth.detach()})
        return operators["aten::convolution"], len(found)

    with torch.no_grad():
        assert check() == check() == (2, 1)
        for each in (model, other):
            each[1].conv2.norm.running_mean.add_(1)
            each[1].conv1.conv.weight.mul_(1.5)
        assert check() == (2, 1)
        handles = [each[1].conv2.register_forward_hook(lambda module, inputs, y: 2 * y) for each in (model, other)]
        assert check() == (3, 0)  # the block runs its own forward
        for handle in handles:
            handle.remove()
        for each in (model, other):
            each[1].conv2.conv = nn.Conv2d(8, 8, 1, groups=2, bias=False)
        other[1].conv2.conv.load_state_dict(model[1].conv2.conv.state_dict())
        assert check() == (3, 1)
    assert check() == (3, 1)  # gradients of the weights


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
    if name in OTHER:
        kind, options = OTHER[name]
        return redrawn(getattr(transformers, name + kind)(getattr(transformers, f"{name}Config")(**options)))
    kind = "rt_detr_resnet" if name == "RTDetr" else "resnet"
    maps = MAPS if name in ("DeformableDetr", "RTDetr") else MAPS[-1:]
    backbone = dict(RESNET, model_type=kind, out_features=maps)
    library = {} if name == "RTDetr" else dict(use_timm_backbone=False, use_pretrained_backbone=False, backbone=None)
    config = getattr(transformers, f"{name}Config")(backbone_config=backbone, **library, **WHOLE[name])
    return redrawn(getattr(transformers, f"{name}ForObjectDetection")(config))


def redrawn(model):
    """The model in float64, with other weights than zeros, and random statistics of its norms."""
    model = model.double().eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)  # some heads start with zeros
    for buffer, t in model.named_buffers():
        if buffer.endswith(("running_mean", "running_var")):
            t.uniform_(0.5, 2)
    return model


TINY = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_windows=2)
OTHER = {  # detectors and segmenters with backbones of their own: class, options of the configuration
    "RfDetr": (
        "ForObjectDetection",
        dict(
            backbone_config=dict(
                TINY, model_type="rf_detr_dinov2", patch_size=8, image_size=64, out_features=["stage1", "stage2"]
            )
            | dict(window_block_indexes=[0], layerscale_value=0.5),
            **(dict(d_model=32, num_feature_levels=1, decoder_layers=1, num_queries=5, group_detr=1) | HEADS),
        ),
    ),
    "Mask2Former": (
        "ForUniversalSegmentation",
        dict(
            backbone_config=dict(
                model_type="swin",
                image_size=64,
                embed_dim=8,
                depths=[1, 1, 1, 1],
                num_heads=[1, 2, 2, 2],
                window_size=4,
                drop_path_rate=0.0,
                out_features=["stage1", "stage2", "stage3", "stage4"],
            ),
            **dict(feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=24),
            **dict(dim_feedforward=24, encoder_layers=1, decoder_layers=3, num_attention_heads=2, num_queries=5),
            **dict(use_pretrained_backbone=False, backbone=None),
        ),
    ),
}
RESULTS = {"Mask2Former": ("class_queries_logits", "masks_queries_logits")}
LAYER = re.compile("((En|De)coder|Dinov2)Layer$")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", marked([*WHOLE, *OTHER], pytest.mark.full, lambda name: name in ("RTDetr", "ConditionalDetr"))
)
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_layers_of_detectors_are_read(name, mode):
    """Oracle: the original in float64, logits, boxes or masks and all gradients, with padding; no example is given.

    Of Conditional DETR and RF-DETR the decoder is not read; with an example layers of the former are captured.
    """
    model = detector(name).train(mode == "train")
    for module in model.modules():
        for dropout in ("dropout", "activation_dropout", "attention_dropout"):
            if isinstance(getattr(module, dropout, None), float):
                setattr(module, dropout, 0.0)
    other, x = copy.deepcopy(model), torch.randn(2, 3, 64, 64, dtype=torch.float64)
    mask = torch.ones(2, 64, 64, dtype=torch.long)
    mask[1, 40:] = 0
    masks = {} if name == "RTDetr" else dict(pixel_mask=mask)

    def outcome(each):
        y = each(x, **masks)
        parameters = {n: p for n, p in each.named_parameters() if p.requires_grad}
        classes, places = RESULTS.get(name, ("logits", "pred_boxes"))
        loss = y[classes].square().sum() + y[places].square().sum()
        grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        return y[classes], y[places], torch.cat([g.flatten() for g in grads if g is not None])

    with using_backend("torch"):
        example = dict(pixel_values=x, **masks) if name == "ConditionalDetr" and mode == "eval" else None
        report = optimize(model, example=example)
        got = outcome(model)
    layers = [type(m).__name__ for m in other.modules() if LAYER.search(type(m).__name__)]
    became = [row.type for row in report.fused if LAYER.search(row.type)]
    assert became == layers[: len(became)] and (len(became) == len(layers) or name in ("ConditionalDetr", "RfDetr"))
    assert len(got[2]) and len(became) > 0
    for result, truth in zip(got, outcome(other), strict=True):
        assert (result - truth).abs().max() <= 840 * torch.finfo(torch.float64).eps * telling(truth).abs().max()


@pytest.mark.parametrize("name", ["DeformableDetr", "RTDetr"])
def test_weights_of_deformable_attention_are_returned(name):
    """Oracle: the shapes that the original returns with output_attentions; without them the output is the same."""
    model = detector(name)
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)

    def shapes(outputs):
        return {key: [t.shape for t in value] for key, value in outputs.items() if key.endswith("_attentions")}

    with using_backend("torch"), torch.no_grad():
        want = shapes(model(x, output_attentions=True))
        optimize(model)
        assert shapes(model(x, output_attentions=True)) == want and any(want.values())
        assert torch.isfinite(model(x)["pred_boxes"]).all()


PARTS = dict.fromkeys(("Detr", "DeformableDetr", "TableTransformer"), "encoder_attn") | {"Mask2Former": "self_attn"}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("change", ["hook", "forward", "inner"])
def test_changed_parts_of_a_layer_are_called(name, change):
    """Oracle: the original with the same change to an attention, an output projection, or the MLP's activation."""
    model = detector(name)
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    with using_backend("torch"), torch.no_grad():
        optimized = copy.deepcopy(model)
        optimize(optimized)
        classes, _ = RESULTS.get(name, ("logits", ""))
        before = optimized(x)[classes]
        for each in (model, optimized):
            layer = (each.model.transformer_module if name == "Mask2Former" else each.model).decoder.layers[0]
            attn = getattr(layer, PARTS[name])
            proj = next(m for n, m in attn.named_children() if n in ("o_proj", "out_proj", "output_proj"))
            if change == "hook":
                attn.register_forward_hook(lambda module, inputs, y: (2 * y[0], *y[1:]))
            elif change == "forward":
                proj.forward = lambda t, proj=proj: 2 * nn.Linear.forward(proj, t)
            else:
                (layer.mlp if hasattr(layer, "mlp") else layer).activation_fn = nn.Tanh()
        got, truth = optimized(x)[classes], model(x)[classes]
    assert (got - truth).abs().max() <= 840 * torch.finfo(torch.float64).eps * truth.abs().max()
    assert (got - before).abs().max() > 1e-6


@pytest.mark.parametrize("act", [nn.functional.relu, nn.functional.gelu, nn.Tanh()], ids=["relu", "gelu", "module"])
def test_activations_of_pixel_decoders_may_be_functions(act):
    """Oracle: the original layer in float64, with padding."""
    sizes = dict(feature_size=16, encoder_feedforward_dim=24, num_attention_heads=2, dropout=0.0)
    layer = redrawn(mask2former.Mask2FormerPixelDecoderEncoderLayer(SimpleNamespace(**sizes)))
    layer.activation_fn = act
    x = torch.randn(2, N, 16, dtype=torch.float64)
    given = dict(reference_points=torch.rand(2, N, 3, 2, dtype=x.dtype), spatial_shapes_list=SHAPES)
    given |= dict(attention_mask=torch.arange(N).expand(2, N) > N - 3, position_embeddings=torch.randn_like(x))
    truth = layer(x, **given)[0]
    with using_backend("torch"):
        assert type(layer).__name__ in [row.type for row in optimize(layer).fused]
        got = layer(x, **given)[0]
    assert (got - truth).abs().max() <= 84 * torch.finfo(torch.float64).eps * truth.abs().max()


@pytest.mark.parametrize("change", ["hook in the MLP", "stochastic depth"])
def test_windows_are_seen_where_they_matter(change):
    """Oracle: the original; a hook inside the MLP sees windows, and each window is dropped by itself."""
    layer = detector("RfDetr").model.backbone.backbone.encoder.layer[1]
    assert layer.global_attention
    x, seen = torch.randn(8, 5, 16, dtype=torch.float64), []
    if change == "stochastic depth":
        layer.drop_path = rf_detr.RfDetrDinov2DropPath(0.5)
        layer.train()
    else:
        layer.mlp.fc2.register_forward_hook(lambda module, inputs, y: seen.append(inputs[0].shape) or 2 * y)
    results = []
    with using_backend("torch"):
        for _ in range(2):
            torch.manual_seed(1)
            results.append(layer(x))
            optimize(layer)
    assert (results[0] - results[1]).abs().max() <= 84 * torch.finfo(torch.float64).eps * results[0].abs().max()
    assert seen in ([], [(8, 5, 64)] * 2)


@pytest.mark.few(2)
@pytest.mark.parametrize("out_indices", [(2, 4), (0, 1)])
@pytest.mark.parametrize("frozen", [False, True])
def test_stems_of_timms_features_are_one_launch(out_indices, frozen):
    """Oracle: timm's model in float64; norms that are operators are those of shortcuts. The stem may be a feature."""
    model = redrawn(timm.create_model("resnet18", features_only=True, out_indices=out_indices))
    other, x = copy.deepcopy(model), torch.randn(2, 3, 32, 64, dtype=torch.float64)
    with using_backend("torch"), torch.no_grad():
        optimize(model, freeze=frozen)
        for got, truth in zip(model(x), other(x), strict=True):
            assert (got - truth).abs().max() <= 840 * torch.finfo(torch.float64).eps * truth.abs().max()
    model, other, x = model.float(), other.float(), x.float()
    with interpreting(), torch.no_grad(), Operators() as operators:
        model(x)
    shortcuts = sum(name.endswith("downsample.1") for name, _ in model.named_modules())
    assert operators["aten::native_batch_norm"] == (0 if frozen else shortcuts)


@pytest.mark.parametrize("name", ["detr.Detr", "deformable_detr.DeformableDetr", "table_transformer.TableTransformer"])
@pytest.mark.parametrize("normalize", [True, False])
def test_sine_positions_have_the_same_bits(name, normalize):
    """Oracle: the original, with padding, in two dtypes; half of its operators run."""
    folder, prefix = name.split(".")
    home = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    cls = getattr(home, f"{prefix}SinePositionEmbedding")
    model = nn.Sequential(cls(6, normalize=normalize))
    mask = torch.ones(2, 5, 7, dtype=torch.bool)
    mask[1, 3:], mask[1, :, 5:] = False, False
    for dtype in (torch.float32, torch.bfloat16):
        shape = torch.Size((2, 3, 5, 7))
        given = (torch.zeros(shape), mask) if folder == "table_transformer" else (shape, mask.device, dtype, mask)
        with Operators() as operators:
            truth = model[0](*given)
        optimize(model)
        with interpreting(), Operators() as fewer:
            got = model[0](*given)
        assert got.dtype == truth.dtype and torch.equal(got, truth)
        assert (operators["aten::sin"], fewer["aten::sin"], fewer["aten::cos"]) == (2, 1, 1)
        freeze(model.eval())
        with interpreting():
            model[0](*given)
            with Operators() as frozen:
                assert torch.equal(model[0](*given), truth)
        assert fewer["aten::pow.Scalar"] > frozen["aten::pow.Scalar"] == 0
        revert(model)


@pytest.mark.parametrize("sides", [(64, 96), (70, 61)])
def test_masks_of_maps_are_the_nearest_values(sides):
    """Oracle: the original, for maps whose sides divide those of the image, and others."""
    model = detector("Detr").float()
    encoder, image = nn.Sequential(model.model.backbone), torch.randn(2, 3, *sides)
    mask = torch.rand(2, *sides).round().long()
    truth = encoder[0](image, mask)
    optimize(encoder)
    with using_backend("torch"), Operators() as operators:
        got = encoder[0](image, mask)
    assert all(torch.equal(a[1], b[1]) for a, b in zip(got, truth, strict=True)) and len(got) == len(truth) > 0
    assert operators["aten::upsample_nearest2d"] == (0 if sides == (64, 96) else len(got))
