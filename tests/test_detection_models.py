"""Tests of detectors. Oracle: transformers' models with the same random weights in float64; torchvision's ResNet."""

import copy
import json
import math
import re

import pytest
import torch
import torch.nn.functional as F
import transformers
from agreement import ROUNDINGS, distance
from safetensors.torch import load_file
from torch import nn
from torchvision.models import resnet18, resnet50
from torchvision.ops.misc import FrozenBatchNorm2d

from fastvit_triton import create_model, load_model, load_weights, save_weights
from fastvit_triton.checkpoints import WeightsError
from fastvit_triton.checkpoints.reading import read
from fastvit_triton.checkpoints.writing import write_tensors
from fastvit_triton.layers.frozen_resnet import FrozenResNet
from fastvit_triton.layers.padded import pad_images, resize_mask, sine_positions
from fastvit_triton.layers.residual import ResidualBody
from fastvit_triton.models import deformable_detr, detr
from fastvit_triton.models.weights import transformers_config
from fastvit_triton.models.weights.publish import save_pretrained

TOLERANCE = ROUNDINGS * torch.finfo(torch.float64).eps
CLASSES, QUERIES, DIM = 5, 7, 64
SIZES = [(96, 50), (60, 91)]  # of images, in pixels: each has tokens that are padding
SMALL = dict(depths=(1, 2, 1, 1), stem_dim=4, hidden_dim=DIM, num_heads=4, encoder_layers=2, decoder_layers=2)
SMALL |= dict(mlp_dim=48, num_queries=QUERIES, num_classes=CLASSES, drop_rate=0.0)


def theirs_of(kind: str) -> nn.Module:
    """The small model of transformers, in float64, with random weights and statistics."""
    resnet = dict(embedding_size=4, hidden_sizes=[16, 32, 64, 128], depths=[1, 2, 1, 1])
    common = dict(use_timm_backbone=False, backbone=None, use_pretrained_backbone=False, d_model=DIM, dropout=0.0)
    common |= dict(encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4)
    common |= dict(encoder_ffn_dim=48, decoder_ffn_dim=48, num_queries=QUERIES, num_labels=CLASSES)
    if kind == "detr":
        backbone = transformers.ResNetConfig(**resnet, out_features=["stage4"])
        config = transformers.DetrConfig(**common, backbone_config=backbone)
        model = transformers.DetrForObjectDetection(config)
    else:
        single = kind == "single_scale"
        backbone = transformers.ResNetConfig(
            **resnet, out_features=[f"stage{i}" for i in ([4] if single else (2, 3, 4))]
        )
        stages = dict(with_box_refine=kind in ("refine", "two_stage"), two_stage=kind == "two_stage")
        stages |= dict(two_stage_num_proposals=QUERIES, num_feature_levels=1 if single else 4)
        config = transformers.DeformableDetrConfig(**common, **stages, backbone_config=backbone)
        model = transformers.DeformableDetrForObjectDetection(config)
        if stages["with_box_refine"]:
            untie(model)
        if kind == "two_stage":
            model.model.get_proposal_pos_embed = proposal_positions
    return redrawn(model).double().requires_grad_(True).eval()


def untie(model: nn.Module) -> None:
    """A class head for each layer, as in the authors' code; transformers 5.23 has one for all."""
    model.class_embed = nn.ModuleList(nn.Linear(DIM, CLASSES) for _ in model.class_embed)
    model.bbox_embed = copy.deepcopy(model.bbox_embed)
    model.model.decoder.bbox_embed = model.bbox_embed
    if model.config.two_stage:
        model.model.decoder.class_embed = model.class_embed


def proposal_positions(proposals: torch.Tensor) -> torch.Tensor:
    """`get_proposal_pos_embed` of transformers, which computes in float32, in the dtype of the proposals."""
    steps = torch.arange(DIM // 2, dtype=proposals.dtype)
    steps = 10000 ** (2 * torch.div(steps, 2, rounding_mode="floor") / (DIM // 2))
    angles = (proposals.sigmoid() * 2 * math.pi)[..., None] / steps
    return torch.stack((angles[..., 0::2].sin(), angles[..., 1::2].cos()), 4).flatten(2)


def redrawn(model: nn.Module) -> nn.Module:
    """The model with random parameters and buffers; what scales or divides is around 1."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 2)
            elif tensor.is_floating_point():
                near_one = tensor.dim() == 1 and name.endswith("weight")
                spread = 0.3 if tensor.dim() == 1 else tensor[0].numel() ** -0.5
                spread = 1.0 if "query" in name else spread  # else all queries nearly agree, and gradients cancel
                tensor.normal_(1.0 if near_one else 0.0, spread)
    return model


def ours_of(kind: str, theirs: nn.Module, **options) -> nn.Module:
    """Our model of the same sizes, with their weights, all of which are trained."""
    ours = create_model(NAMES[kind], **SMALL | options).double()
    report = load_weights(ours, theirs.state_dict())
    assert report.family == "transformers" and not report.reinitialised
    return ours.requires_grad_(True).eval()


DEFORMABLE = ("plain", "refine", "two_stage", "single_scale")
NAMES = {"detr": "detr_resnet50", "plain": "deformable_detr_resnet50"}
NAMES |= {kind: f"deformable_detr_resnet50_{kind}" for kind in DEFORMABLE[1:]}


def drawn_images(sizes=SIZES) -> list[torch.Tensor]:
    return [torch.randn(3, *size, dtype=torch.float64) for size in sizes]


def batches() -> dict[str, list[torch.Tensor]]:
    """Lists of images: of one size, of one odd size, and of two sizes."""
    return dict(same=drawn_images([SIZES[0]] * 2), odd=drawn_images([(97, 70)]), padded=drawn_images())


@pytest.mark.few(6)
@pytest.mark.parametrize("batch", ["same", "odd", "padded"])
@pytest.mark.parametrize("kind", NAMES)
def test_outputs_and_gradients_equal_transformers(kind, batch):
    """Oracle: transformers: logits, boxes, and the gradient of every parameter and of the images."""
    theirs = theirs_of(kind)
    ours = ours_of(kind, theirs)
    images = [image.requires_grad_() for image in batches()[batch]]
    padded, mask = pad_images(images)
    assert (mask is None) == (batch != "padded")
    pixel_mask = torch.ones(len(images), *padded.shape[2:]) if mask is None else mask
    found = ours(images)
    wanted = theirs(padded, pixel_mask.long())
    assert distance(found["logits"], wanted.logits) <= TOLERANCE
    assert distance(found["boxes"], wanted.pred_boxes) <= TOLERANCE
    if kind == "two_stage":
        assert distance(found["proposals"]["logits"], wanted.enc_outputs_class) <= TOLERANCE
        assert distance(found["proposals"]["boxes"], wanted.enc_outputs_coord_logits.sigmoid()) <= TOLERANCE
    for_logits, for_boxes = torch.randn_like(found["logits"]), torch.randn_like(found["boxes"])

    def gradients(model: nn.Module, logits: torch.Tensor, boxes: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = (logits * for_logits).sum() + (boxes * for_boxes).sum()
        names, values = zip(*model.named_parameters(), strict=True)
        *parameters, first = torch.autograd.grad(loss, (*values, images[0]), allow_unused=True)
        zeros = {name: torch.zeros_like(v) for name, v in zip(names, values, strict=True)}
        grads = {n: zeros[n] if g is None else g for n, g in zip(names, parameters, strict=True)}
        return grads | {"image": first}

    mine = gradients(ours, found["logits"], found["boxes"])
    other = gradients(theirs, wanted.logits, wanted.pred_boxes)
    image = other.pop("image")
    assert distance(mine.pop("image"), image) <= TOLERANCE
    other = renamed(kind, other)
    assert mine.keys() <= other.keys()
    total = max(float(g.norm()) for g in other.values())
    for name, gradient in mine.items():
        # 0 in exact arithmetic: biases of keys, and in DETR the first self-attention of the decoder, of equal values
        size = max(float(other[name].norm()), 1e-2 * total)
        assert float((gradient - other[name]).norm()) <= TOLERANCE * size, name


def renamed(kind: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of transformers under our names."""
    layout = LAYOUTS[kind]
    ours = {layout.ours(key): tensor for key, tensor in layout.read(tensors).items()}
    return {re.sub(r"^transformer\.decoder\.(?=class_embed|bbox_embed)", "", key): t for key, t in ours.items()}


LAYOUTS = {"detr": detr.TRANSFORMERS} | dict.fromkeys(DEFORMABLE, deformable_detr.TRANSFORMERS)


def test_auxiliary_outputs_equal_equations():
    """Oracle: transformers' heads on the norm of what each of its decoder layers returns."""
    theirs = theirs_of("detr")
    ours = ours_of("detr", theirs).train()
    layers = []
    for layer in theirs.model.decoder.layers:
        layer.register_forward_hook(lambda module, inputs, output: layers.append(output))
    image = torch.stack(drawn_images([SIZES[0]] * 2))
    theirs(image)
    found = ours(image)
    assert len(found["aux"]) == len(layers) - 1 == 1
    x = theirs.model.decoder.layernorm(layers[0])
    assert distance(found["aux"][0]["logits"], theirs.class_labels_classifier(x)) <= TOLERANCE
    assert distance(found["aux"][0]["boxes"], theirs.bbox_predictor(x).sigmoid()) <= TOLERANCE


@pytest.mark.parametrize("kind", DEFORMABLE)
def test_auxiliary_outputs_equal_transformers(kind):
    """Oracle: transformers, which returns them if there are labels."""
    theirs = theirs_of(kind)
    theirs.config.auxiliary_loss = True
    image = torch.stack(drawn_images([SIZES[0]] * 2))
    label = dict(class_labels=torch.tensor([1]), boxes=torch.tensor([[0.5, 0.5, 0.2, 0.2]]).double())
    wanted = theirs(image, labels=[label, label]).auxiliary_outputs
    found = ours_of(kind, theirs).train()(image)["aux"]
    assert len(found) == len(wanted) == 1
    assert distance(found[0]["logits"], wanted[0]["logits"]) <= TOLERANCE
    assert distance(found[0]["boxes"], wanted[0]["pred_boxes"]) <= TOLERANCE


def test_six_heads_are_one():
    """Oracle: without refinement one head serves all layers; a file in which they differ is refused."""
    theirs = theirs_of("plain")
    ours = ours_of("plain", theirs)
    assert {key.split(".")[1] for key in ours.state_dict() if key.startswith(("class_embed", "bbox_embed"))} == {"0"}
    state = {key: tensor.clone() for key, tensor in theirs.state_dict().items()}
    state["class_embed.1.bias"] += 1
    with pytest.raises(WeightsError, match=r"class_embed\.1\.bias .* differs from class_embed\.0\.bias"):
        load_weights(ours, state)
    for options, words in (
        (dict(num_levels=2), "num_levels"),
        (dict(two_stage=True), "refine"),
        (dict(hidden_dim=48), "32"),
    ):
        with pytest.raises(ValueError, match=words):
            create_model(NAMES["plain"], **SMALL | options)


def test_first_values_are_the_authors():
    """Oracle: by hand: points in eight directions, classes of probability 1 %, boxes around the reference points."""
    model = create_model("deformable_detr_resnet50", **SMALL | dict(num_heads=8)).eval()
    attention = model.transformer.encoder["layers"][0].self_attn
    offsets = attention.sampling_offsets.bias.view(8, 4, 4, 2)
    expected = [[1, 0], [1, 1], [0, 1], [-1, 1], [-1, 0], [-1, -1], [0, -1], [1, -1]]
    for point in range(4):
        want = (point + 1) * torch.tensor(expected).float()
        error = float((offsets[:, :, point] - want[:, None]).detach().abs().max())
        assert error <= ROUNDINGS * torch.finfo(torch.float32).eps
    image = torch.randn(1, 3, 64, 64)
    outputs = model(image)
    x = model.query_embed.weight.chunk(2, 1)[0]
    places = model.transformer.reference_points(x).sigmoid()
    torch.testing.assert_close(outputs["boxes"][0, :, :2], places)
    torch.testing.assert_close(outputs["boxes"][0, :, 2:], torch.full((QUERIES, 2), 1 / (1 + math.exp(2))))


@pytest.mark.few(1)
@pytest.mark.parametrize("options, build", [(dict(b=0), resnet18), ({}, resnet50), (dict(dilation=True), resnet50)])
def test_frozen_resnet_equals_torchvision(options, build):
    """Oracle: torchvision's ResNet with frozen norms: keys, and the map of every stage."""
    dilated = [False, False, bool(options.get("dilation"))]
    more = dict(replace_stride_with_dilation=dilated) if dilated[2] else {}
    theirs = redrawn(build(norm_layer=FrozenBatchNorm2d, **more)).double()
    depths = (3, 4, 6, 3) if build is resnet50 else (2, 2, 2, 2)
    ours = FrozenResNet(3, depths, bottleneck=build is resnet50, dilation=dilated[2]).double()
    state = {key: tensor for key, tensor in theirs.state_dict().items() if not key.startswith("fc.")}
    ours.load_state_dict(state | {"bn1.num_batches_tracked": torch.tensor(1)})
    x = image = torch.randn(1, 3, 40, 33, dtype=torch.float64)
    with torch.no_grad():
        maps = ours(image)
        x = theirs.maxpool(theirs.relu(theirs.bn1(theirs.conv1(x))))
        for i, found in enumerate(maps):
            x = theirs.get_submodule(f"layer{i + 1}")(x)
            assert distance(found, x) <= TOLERANCE
            assert found.shape[1] == ours.channels[i] and -(-40 // ours.reductions[i]) == found.shape[2]
    names = {name.split(".")[0] for name, p in ours.named_parameters() if not p.requires_grad}
    assert names == {"conv1", "layer1"} and not any("bn" in name for name, _ in ours.named_parameters())


@pytest.mark.parametrize("bottleneck", [False, True])
def test_trained_backbone_equals_the_frozen_one(bottleneck):
    """Oracle: `FrozenResNet`, which equals torchvision's: the map of every stage; all weights are trained."""
    frozen = redrawn(FrozenResNet(3, (1, 2, 1, 1), 4, bottleneck)).double()
    ours = ResidualBody(3, (1, 2, 1, 1), 4, bottleneck).double().eval()
    assert all(parameter.requires_grad for parameter in ours.parameters())
    parts = {"stem.": "", "shortcut.conv": "downsample.0", "shortcut.bn": "downsample.1"}
    parts |= {f"conv{i}{kind}.": f"conv{i}." for i in (1, 2, 3) for kind in ("_1x1", "_kxk")}

    def name(key: str) -> str:
        for mine, other in parts.items():
            key = key.replace(mine, other)
        return re.sub(r"conv(\d?)\.(conv|bn)\.", r"\2\1.", key)

    state = frozen.state_dict()
    ours.load_state_dict({key: state.get(name(key), tensor) for key, tensor in ours.state_dict().items()})
    assert {name(key) for key, _ in [*ours.named_parameters(), *ours.named_buffers()] if "tracked" not in key} == {
        *state
    }
    image = torch.randn(1, 3, 40, 33, dtype=torch.float64)
    with torch.no_grad():
        for i, (found, wanted) in enumerate(zip(ours(image), frozen(image), strict=True)):
            assert distance(found, wanted) <= TOLERANCE
            assert found.shape[1] == ours.channels[i] and -(-40 // ours.reductions[i]) == found.shape[2]
    with pytest.raises(ValueError, match="dilation is True and block 'bottleneck'; only"):
        create_model("detr_resnet50", dilation=True, block="bottleneck")


def test_small_backbone_equals_equations():
    """Oracle: convolutions and BatchNorms written out; the maps of two levels have 1/4 and 1/8 of the image's sides."""
    model = create_model("deformable_detr_digits").double().eval()
    for name, buffer in model.body.named_buffers():
        if "running" in name:
            buffer.uniform_(0.5, 1.5).sub_(float("mean" in name))
    x = image = torch.randn(2, 1, 30, 33, dtype=torch.float64)
    for layer, stride in zip(model.body.layers, (2, 1, 2, 1), strict=True):
        x = F.conv2d(x, layer.linear.weight, stride=stride, padding=1)
        mean, var, weight, bias = (
            t[:, None, None] for t in (layer.bn.running_mean, layer.bn.running_var, layer.bn.weight, layer.bn.bias)
        )
        x = ((x - mean) / (var + layer.bn.eps).sqrt() * weight + bias).relu()
    (found,) = model.body(image)
    assert found.shape == (2, 64, 8, 9) and distance(found, x) <= TOLERANCE
    assert [tuple(m.shape[2:]) for m in model.maps(image)] == [(8, 9), (4, 5)]
    with pytest.raises(ValueError, match="depths has 3 values"):
        create_model("detr_digits", depths=(1, 1, 1))


def test_positions_are_float32():
    """Oracle: positions in float64: bfloat16 ones are those, rounded once."""
    mask = torch.ones(1, 40, 30, dtype=torch.bool)
    exact = sine_positions(mask, DIM, dtype=torch.float64)
    half = sine_positions(mask, DIM, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert float((half.double() - exact).abs().max()) <= torch.finfo(torch.bfloat16).eps / 2 * (1 + TOLERANCE) + 1e-6


def test_padding_does_not_change_an_image():
    """Oracle: the image alone, where the map has no convolutions, which would see the border."""
    model = ours_of("detr", theirs_of("detr"))
    channels = model.body.channels[-1]
    model.body.forward = lambda image: [F.avg_pool2d(image, 32).repeat(1, channels, 1, 1)[:, :channels]]
    small, large = drawn_images([(64, 64), (96, 128)])
    with torch.no_grad():
        alone, together = model([small]), model([small, large])
    assert distance(together["logits"][:1], alone["logits"]) <= TOLERANCE
    assert distance(together["boxes"][:1], alone["boxes"]) <= TOLERANCE
    assert not torch.equal(together["logits"][1], together["logits"][0])


def test_fully_padded_image_is_finite():
    """Oracle: attention to no token is 0: outputs and gradients are finite."""
    model = ours_of("detr", theirs_of("detr"))
    image, mask = torch.randn(2, 3, 64, 64).double(), torch.ones(2, 64, 64, dtype=torch.bool)
    mask[1] = False
    outputs = model(image, mask)
    outputs["logits"].sum().backward()
    assert outputs["logits"].isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_list_of_images():
    """Oracle: padding by hand; the mask at the nearest pixels."""
    a, b = torch.ones(3, 4, 2), torch.ones(3, 2, 5)
    batch, mask = pad_images([a, b])
    assert batch.shape == (2, 3, 4, 5) and float(batch.sum()) == a.numel() + b.numel()
    assert mask[0].sum() == 8 and mask[1, :2].all() and not mask[1, 2:].any()
    assert resize_mask(mask, (2, 5)).tolist() == mask[:, ::2].tolist()
    with pytest.raises(ValueError, match="empty"):
        pad_images([])
    model = create_model("detr_resnet50", **SMALL)
    for images, given, words in (([a, b], mask, "mask"), (batch, mask.float(), "torch.bool"), (batch[0], None, "axes")):
        with pytest.raises(ValueError, match=words):
            model(images, given)


@pytest.mark.parametrize("kind", NAMES)
def test_detections_equal_transformers(kind):
    """Oracle: the image processor's post_process_object_detection, with a threshold, on images of two sizes."""
    theirs = theirs_of(kind).float()
    model = ours_of(kind, theirs_of(kind)).float()
    processor = getattr(transformers, PROCESSORS[kind])()
    with torch.no_grad():
        outputs = model(torch.randn(2, 3, 64, 64) * 3)
    outputs["logits"][:, :2, -1] += 20  # the last class, which in DETR is "no object"
    sizes = [(480, 640), (37, 91)]

    class Theirs:
        logits, pred_boxes = outputs["logits"], outputs["boxes"]

    threshold = float(model.class_scores(outputs["logits"])[0].flatten().sort().values[3])
    wanted = processor.post_process_object_detection(Theirs, threshold=threshold, target_sizes=sizes)
    found = model.detections(outputs, sizes, threshold)
    for mine, other in zip(found, wanted, strict=True):
        mine = {key: values[mine["scores"] > threshold] for key, values in mine.items()}
        assert len(other["scores"]) > 0
        for key in ("scores", "labels", "boxes"):
            torch.testing.assert_close(
                mine[key], other[key], rtol=0, atol=ROUNDINGS * torch.finfo(torch.float32).eps * 640
            )
    assert theirs.training is False
    with pytest.raises(ValueError, match="sizes"):
        model.detections(outputs, sizes[:1])


PROCESSORS = {"detr": "DetrImageProcessor"} | dict.fromkeys(DEFORMABLE, "DeformableDetrImageProcessor")


@pytest.mark.parametrize("kind", NAMES)
def test_layouts_are_read_and_written(kind, tmp_path):
    """Oracle: transformers loads what we write strictly, and gives our outputs; our own file rebuilds the model."""
    theirs = theirs_of(kind)
    ours = redrawn(ours_of(kind, theirs))
    image = torch.randn(1, 3, 64, 64).double()
    save_weights(ours, tmp_path / "a.safetensors", layout="transformers")
    theirs.load_state_dict(load_file(tmp_path / "a.safetensors"), strict=True)
    with torch.no_grad():
        wanted = ours(image)
        assert distance(theirs(image).logits, wanted["logits"]) <= TOLERANCE
    save_weights(ours, tmp_path / "b.safetensors")
    again, _ = load_model(tmp_path / "b.safetensors")
    assert (again.variant, again.config) == (ours.variant, ours.config)
    pairs = zip(again.state_dict().values(), ours.float().state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    ours.double()
    authors = authors_layout(kind)
    save_weights(ours, tmp_path / "c.safetensors", layout=authors)
    fresh = create_model(NAMES[kind], **SMALL).double()
    norms = {
        f"{key.rpartition('.')[0]}.num_batches_tracked": torch.tensor(3) for key in ours.state_dict() if ".bn" in key
    }
    report = load_weights(fresh, {"model": load_file(tmp_path / "c.safetensors") | norms})
    assert report.family == f"{authors} (model)" and set(report.dropped) == set(norms)
    assert all(torch.equal(a, b) for a, b in zip(fresh.state_dict().values(), ours.state_dict().values(), strict=True))


@pytest.mark.parametrize("kind", NAMES)
def test_folders_of_transformers_are_models(kind, tmp_path):
    """Oracle: transformers, for a folder that it saved; names of classes, and size and mean of its image processor."""
    theirs = theirs_of(kind).float()
    theirs.config.id2label = {i: f"thing {i}" for i in range(CLASSES)}
    theirs.config.tie_word_embeddings = False
    theirs.save_pretrained(tmp_path)
    sizes = dict(shortest_edge=96, longest_edge=160)
    processor = dict(size=sizes, image_mean=[0.1, 0.2, 0.3], image_std=[0.5, 0.5, 0.5])
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    ours, _ = load_model(str(tmp_path))
    assert ours.pretrained_cfg["label_names"][4] == "thing 4" and ours.pretrained_cfg["mean"] == (0.1, 0.2, 0.3)
    assert ours.config.img_size == (96, 96) and ours.variant == NAMES[kind]
    image = torch.randn(1, 3, 64, 64).double()
    with torch.no_grad():
        wanted = theirs.double().eval()(image)
        found = ours.double().eval()(image)
    assert distance(found["logits"], wanted.logits) <= TOLERANCE
    assert distance(found["boxes"], wanted.pred_boxes) <= TOLERANCE


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(backbone="resnest50"), "backbone is 'resnest50'; known are resnet18"),
        (dict(activation_function="gelu"), "activation_function is 'gelu'; our detectors have 'relu'"),
        (dict(encoder_ffn_dim=8, decoder_ffn_dim=16), "decoder_ffn_dim is 16 and encoder_ffn_dim 8"),
        (dict(backbone_config=dict(model_type="resnet", hidden_sizes=[8])), r"hidden_sizes is \[8\]; our ResNets have"),
    ],
)
def test_other_detectors_of_transformers_are_refused(change, text):
    """Oracle: the field, its value, and what our models have; the files of facebook/detr-resnet-50 name our model."""
    files = dict(model_type="detr", backbone="resnet50", num_queries=100, d_model=256, dilation=False)
    files |= dict(id2label={str(i): f"thing {i}" for i in range(91)})
    assert transformers_config.read(files, dict(size=800, max_size=1333))[:2] == ("detr_resnet50", {})
    assert transformers_config.read(files | dict(dilation=True), {})[:2] == ("detr_resnet50_dc5", {})
    with pytest.raises(ValueError, match=text):
        transformers_config.read(files | change, {})


@pytest.mark.parametrize("name, block", [("detr_digits", "'convolutions'"), ("deformable_detr_tiny", "'basic'")])
def test_layouts_of_others_need_their_backbone(name, block, tmp_path):
    """Oracle: transformers' own keys, which have no names for these backbones; no file is written."""
    model = create_model(name)
    authors = authors_layout("detr" if name.startswith("detr") else "plain")
    for layout in ("transformers", authors):
        with pytest.raises(
            WeightsError, match=f"{layout} needs block='frozen_bottleneck' or 'frozen_basic', not {block}"
        ):
            save_weights(model, tmp_path / "a.safetensors", layout=layout)
    assert not list(tmp_path.iterdir())


def test_folders_for_transformers_are_refused(tmp_path):
    """Oracle: the sentence; the file of the weights alone is written, see `test_layouts_are_read_and_written`."""
    with pytest.raises(WeightsError, match="of transformers is written for detr_resnet50; use a"):
        save_pretrained(create_model(NAMES["detr"], **SMALL), tmp_path, layout="transformers")


def test_files_with_options_that_no_release_had_are_refused(tmp_path):
    """Oracle: the sentence, which names the file and the option."""
    model = create_model(NAMES["detr"], **SMALL)
    save_weights(model, tmp_path / "a.safetensors")
    state, header = read(tmp_path / "a.safetensors", True)
    config = json.loads(header["config"])
    config |= dict(frozen=True, bottleneck=config.pop("block") == "frozen_bottleneck")
    write_tensors(state, tmp_path / "b.safetensors", {**header, "config": json.dumps(config)})
    with pytest.raises(WeightsError, match=r"b\..* that this version .*: DetectorConfig has no option 'frozen'"):
        load_model(tmp_path / "b.safetensors", verify=False)


def authors_layout(kind: str) -> str:
    return "facebookresearch" if kind == "detr" else "fundamentalvision"


# 5.23 → 4.x on the Hub, with the ResNet of timm inside
OLD = [(".mlp.fc", ".fc"), (".o_proj", ".out_proj"), ("model.backbone.model.", "model.backbone.conv_encoder.model.")]


@pytest.mark.parametrize("kind", ["detr", "plain"])
def test_files_of_transformers_4_are_read(kind):
    """Oracle: the tensors; keys as in facebook/detr-resnet-50 on the Hub, whose backbone has torchvision's names."""
    theirs = theirs_of(kind)
    ours = ours_of(kind, theirs)
    names = LAYOUTS[kind].ours
    state = {}
    for key, tensor in theirs.state_dict().items():
        for new, old in OLD:
            key = key.replace(new, old)
        if "conv_encoder" in key:
            key = names(key).replace("backbone.0.body.", "model.backbone.conv_encoder.model.")
        state[key] = tensor
    assert any(key.endswith("conv_encoder.model.layer2.1.bn3.running_mean") for key in state)
    fresh = create_model(NAMES[kind], **SMALL).double()
    load_weights(fresh, state)
    assert all(torch.equal(a, b) for a, b in zip(fresh.state_dict().values(), ours.state_dict().values(), strict=True))


@pytest.mark.parametrize("kind", NAMES)
def test_new_classes_leave_the_boxes(kind):
    """Oracle: the state dict: only class heads change; a file of other classes loads without them."""
    model = ours_of(kind, theirs_of(kind))
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    model.reset_classifier(3)
    after = model.state_dict()
    assert before.keys() == after.keys() and model.config.num_classes == model.num_classes == 3
    assert {key for key in before if before[key].shape != after[key].shape} == {k for k in before if "class_embed" in k}
    assert all(torch.equal(before[key], after[key]) for key in before if "class_embed" not in key)
    assert model(torch.stack(drawn_images([SIZES[0]])))["logits"].shape[-1] == 3 + (kind == "detr")
    report = load_weights(model, before)
    assert report.reinitialised and all("class_embed" in key for key in report.reinitialised)
    for options, words in (
        (dict(num_classes=0), "num_classes"),
        (dict(hidden_dim=30), "num_heads"),
        (dict(depths=(1,)), "4"),
    ):
        with pytest.raises(ValueError, match=words):
            create_model(NAMES[kind], **SMALL | options)


@pytest.mark.parametrize("kind", NAMES)
def test_dropout_and_recomputation(kind):
    """Oracle: dropout acts in training only; recomputed layers give the same gradients; frozen norms stay frozen."""
    model = create_model(NAMES[kind], **SMALL | dict(drop_rate=0.5))
    redrawn(model)  # at first, deformable models return the same boxes for all images
    image = torch.randn(2, 3, 64, 64)
    assert not torch.equal(model(image)["boxes"], model(image)["boxes"])
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    gradients = []
    for recompute in (False, True):
        model.set_grad_checkpointing(recompute)
        torch.manual_seed(0)
        model.zero_grad()
        outputs = model(image)
        heads = [outputs, *outputs["aux"], *filter(None, [outputs.get("proposals")])]
        sum(part["logits"].square().sum() + part["boxes"].square().sum() for part in heads).backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(g, gradients[1][n]) for n, g in gradients[0].items())
    unlearned = {n for n, p in model.named_parameters() if n not in gradients[0]}
    assert unlearned == {n for n, p in model.named_parameters() if not p.requires_grad}
    assert all(torch.equal(b, buffers[n]) for n, b in model.named_buffers())
    model.eval()
    assert torch.equal(model(image)["boxes"], model(image)["boxes"]) and "aux" not in model(image)


@pytest.mark.fast
@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("options", [{}, dict(two_stage=True)], ids=["queries", "two-stage"])
def test_maps_that_are_all_padding_give_numbers(options, rows):
    """Oracle: finite outputs and gradients; an image of few rows has none on the coarser map, or none at all."""
    model = create_model("deformable_detr_digits", **options).double().train()
    images = torch.rand(2, 1, 32, 32, dtype=torch.float64)
    mask = torch.ones(2, 32, 32, dtype=torch.bool)
    mask[1, rows:] = False
    outputs = model(images, mask)
    logits = outputs["logits"]
    assert logits.isfinite().all() and outputs["boxes"].isfinite().all()
    (logits.sum() + outputs["boxes"].sum()).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
