"""Tests of SETR: against a transcription of the authors' decoders, checkpoints both ways, sizes, bad options."""

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fastvit_triton import create_model, load_model, load_weights, save_weights
from fastvit_triton.checkpoints import WeightsError
from fastvit_triton.checkpoints.reading import CHECKSUM
from fastvit_triton.models import model_config

SMALL = dict(embed_dim=32, depth=3, num_heads=2, img_size=(32, 48), num_classes=5, decoder_dim=8)
DECODERS = {"naive": dict(decoder="naive", aux_indices=(0, 2)), "pup": dict(decoder="pup", aux_indices=(1, 2))}


def made(**options):
    """A small SETR in float64 with random parameters and statistics of BatchNorms."""
    torch.manual_seed(0)
    model = create_model("setr_naive_base_768", **SMALL | options).double()
    for name, tensor in model.state_dict().items():
        if name.endswith("running_var"):
            tensor.uniform_(0.5, 2)
        elif tensor.is_floating_point():
            tensor.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.3)
    return model


def transcribed(state, tokens, grid, size, head, scales, kernel, norm, training):
    """The authors' VisionTransformerUpHead.forward on tokens [B, N, D] of a block, and its running statistics."""
    statistics = {}
    x = F.layer_norm(tokens, tokens.shape[-1:], state[f"{norm}.weight"], state[f"{norm}.bias"], 1e-6)
    x = x.transpose(1, 2).reshape(len(x), -1, *grid)
    for i, scale in enumerate(scales):
        weight = state[f"{head}.conv_{i}.weight"]
        assert weight.shape == (SMALL["decoder_dim"], x.shape[1], kernel, kernel)
        x = F.conv2d(x, weight, state[f"{head}.conv_{i}.bias"], padding=kernel // 2)
        bn = f"{head}.syncbn_fc_{i}"
        names = f"{bn}.running_mean", f"{bn}.running_var"
        statistics |= {name: state[name].clone() for name in names}
        running = (statistics[name] for name in names)
        x = F.relu(F.batch_norm(x, *running, state[f"{bn}.weight"], state[f"{bn}.bias"], training, momentum=0.1))
        if scale != 1:
            x = F.interpolate(x, [side * scale for side in x.shape[2:]], mode="bilinear", align_corners=False)
    x = F.conv2d(x, state[f"{head}.conv_{len(scales)}.weight"], state[f"{head}.conv_{len(scales)}.bias"])
    return F.interpolate(x, size, mode="bilinear", align_corners=False), statistics


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", DECODERS)
def test_logits_and_gradients_equal_the_authors_decoders(name, training):
    """Oracle: the decoders transcribed, on timm's ViT with the same weights, in float64; also running statistics."""
    model = made(**DECODERS[name]).train(training)
    options = {key: SMALL[key] for key in ("embed_dim", "depth", "num_heads", "img_size")}
    vit = timm.create_model("vit_base_patch16_224", num_classes=0, **options).double().train(training)
    state = model.state_dict()
    vit.load_state_dict({key: value for key, value in state.items() if key in vit.state_dict()})
    images = torch.randn(2, 3, 32, 48, dtype=torch.float64, requires_grad=True)
    twin = images.detach().clone().requires_grad_()
    blocks = vit.forward_intermediates(twin, intermediates_only=True, output_fmt="NLC")
    sizes = (2, 3), (32, 48)
    decoder = ((1,), 1) if name == "naive" else ((2, 2, 2, 1), 3)
    want = [transcribed(state, blocks[-1], *sizes, "decode_head", *decoder, "norm", training)]
    for i, index in enumerate(DECODERS[name]["aux_indices"] if training else ()):
        head = f"auxiliary_head.{i}"
        decoder = ((1,), 1) if name == "naive" else ((4,), 3)
        want.append(transcribed(state, blocks[index], *sizes, head, *decoder, f"{head}.norm", training))
    want, statistics = zip(*want, strict=True)
    got = model(images)
    got = got if training else [got]
    cotangents = [torch.randn_like(y) for y in want]
    gradient = torch.autograd.grad(got, images, cotangents)[0]
    expected = torch.autograd.grad(want, twin, cotangents)[0]
    for a, b in zip((*got, gradient), (*want, expected), strict=True):
        assert a.shape == b.shape and (a - b).norm() <= 1e4 * torch.finfo(torch.float64).eps * b.norm()
    for name, tensor in {name: value for part in statistics for name, value in part.items()}.items():
        torch.testing.assert_close(model.state_dict()[name], tensor)


def test_checkpoints_of_the_authors_load_and_are_written(tmp_path):
    """Oracle: the same tensors under the names of the authors' state dict."""
    model = made(**DECODERS["pup"], img_size=32)
    path = tmp_path / "authors.safetensors"
    save_weights(model, path, layout="fudan-zvg")
    written = load_file(path)
    assert {key.split(".")[0] for key in written} == {"backbone", "decode_head", "auxiliary_head"}
    assert torch.equal(written["decode_head.norm.weight"], model.norm.weight)
    assert torch.equal(written["backbone.blocks.1.attn.qkv.weight"], model.blocks[1].attn.qkv.weight)
    written["decode_head.conv_seg.weight"] = torch.ones(5, 512, 1, 1)
    torch.save({"state_dict": written}, tmp_path / "authors.pth")
    twin = made(**DECODERS["pup"], img_size=64)
    report = load_weights(twin, tmp_path / "authors.pth")
    assert report.dropped == ("decode_head.conv_seg.weight",) and "2x2 (assumed) resized to 4x4" in report.positions
    grid = model.pos_embed[:, 1:].mT.unflatten(2, (2, 2))
    torch.testing.assert_close(twin.pos_embed[:, 1:].mT, F.interpolate(grid, (4, 4), mode="bilinear").flatten(2))
    same = [key for key in twin.state_dict() if key != "pos_embed"]
    assert all(torch.equal(twin.state_dict()[key], model.state_dict()[key]) for key in same)
    alone = made(decoder="pup", aux_indices=(), img_size=32)
    unused = {key for key in written if key.startswith("auxiliary_head.") or "conv_seg" in key}
    assert set(load_weights(alone, tmp_path / "authors.pth").dropped) == unused
    with pytest.raises(
        WeightsError, match=r"decode_head\.conv_1\.weight is \[8, 8, 3, 3\] in the fudan-zvg checkpoint"
    ):
        load_weights(made(**DECODERS["pup"], img_size=32, decoder_dim=4), tmp_path / "authors.pth")


def test_a_plain_vit_is_a_start(tmp_path):
    """Oracle: timm's tensors; decoders keep their initial values, and the report says so."""
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=7)
    others = ("head_dist.weight", "fc_norm.weight", "pre_logits.fc.weight", "dist_token")
    torch.save(vit.state_dict() | {name: torch.ones(1, 1, 192) for name in others}, tmp_path / "vit.pth")
    options = dict(embed_dim=192, depth=12, num_heads=3, img_size=32)
    model = create_model("setr_naive_base_768", **options)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    report = load_weights(model, tmp_path / "vit.pth")
    theirs = vit.state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(value, theirs[key] if key in theirs and "head" not in key else before[key]), key
    assert (
        set(report.dropped) == {"head.weight", "head.bias", *others}
        and len(report.initial) == 8 + 3 * 10
        and "initial values" in str(report)
    )
    other = create_model("setr_naive_base_768", **options, num_classes=3)
    save_weights(model, tmp_path / "setr.safetensors")
    assert "decode_head.conv_1.weight" in load_weights(other, tmp_path / "setr.safetensors").dropped


def test_a_file_without_a_part_of_the_decoder(tmp_path):
    """Oracle: an error names the part; a model into which the file is loaded keeps its initial values there."""
    model = made(**DECODERS["naive"]).float()
    whole, lacking = tmp_path / "whole.safetensors", tmp_path / "lacking.safetensors"
    save_weights(model, whole, layout="fudan-zvg")
    with safe_open(whole, "pt") as file:
        metadata = {key: value for key, value in file.metadata().items() if key != CHECKSUM}
    state = {key: value for key, value in load_file(whole).items() if not key.startswith("decode_head.conv_1.")}
    save_file(state, lacking, metadata)
    with pytest.raises(WeightsError, match=r"has no decode_head\.conv_1\.weight, which its configuration needs"):
        load_model(lacking)
    assert load_weights(model, lacking).initial == ("decode_head.conv_1.weight", "decode_head.conv_1.bias")
    assert model.decode_head.conv_1.weight.all()


def test_images_of_any_size_and_new_classes():
    """Oracle: shapes, and the map of normalised tokens without a decoder."""
    model = made(decoder="pup", aux_indices=(1,)).eval()
    images = torch.randn(1, 3, 64, 32, dtype=torch.float64)
    assert model(images).shape == (1, 5, 64, 32) and model.num_classes == 5
    model.reset_classifier(9)
    assert model.num_classes == model.config.num_classes == 9 and not any(m.training for m in model.modules())
    assert model(images).shape == (1, 9, 64, 32) and not model(images).any()
    assert [y.shape[1] for y in model.train()(images)] == [9, 9]
    assert model.get_classifier() == (model.decode_head, model.auxiliary_head)
    model.reset_classifier(0)
    tokens = model.eval().forward_features(images)[:, 1:]
    assert torch.equal(model(images), tokens.transpose(1, 2).reshape(1, 32, 4, 2))
    assert model.train()(images).shape == (1, 32, 4, 2) and model.get_classifier() == ()
    with pytest.raises(ValueError, match="no decoder; create a new one"):
        model.reset_classifier(3)


def test_new_classes_stay_on_the_device():
    """Oracle: the device of all parameters; one decoder is the classifier itself."""
    model = made(decoder="pup", aux_indices=()).to("meta")
    model.reset_classifier(3)
    assert {p.device.type for p in model.parameters()} == {"meta"} and model.get_classifier() is model.decode_head


def test_a_pruned_model_keeps_the_decoders_of_its_blocks():
    """Oracle: the whole model's logits of the decoder that is kept; without the head, no decoder."""
    model = made(**DECODERS["naive"]).train()
    images = torch.randn(2, 3, 32, 48, dtype=torch.float64)
    _, want, _ = model(images)
    model.prune(2, norm=False, head=False)
    logits, kept = model(images)
    assert torch.equal(kept, want) and model.config.aux_indices == (0,) and model.config.depth == len(model.blocks) == 2
    *_, x = model.outputs(images)
    assert torch.equal(logits, model.decode_head(model.norm(x)[:, 1:], (2, 3), (32, 48)))
    model.prune(1, norm=False, head=True)
    assert model.get_classifier() == () and model(images).shape == (2, 32, 2, 3)


@pytest.mark.parametrize("patch, count", [(1, 1), (4, 2), (8, 3), (16, 4), ((4, 16), 4)])
def test_maps_are_doubled_up_to_the_patch(patch, count):
    """Oracle: log2 of the patch's longer side: so many convolutions, each but the last before an enlargement by 2."""
    options = dict(embed_dim=8, depth=1, num_heads=1, img_size=16, patch_size=patch, num_classes=2, decoder_dim=4)
    head = create_model("setr_pup_large_768", **options, aux_indices=()).decode_head
    assert head.scales == (*(2,) * (count - 1), 1) and len([*head.children()]) == 2 * count + 2


AUTHORS = {  # configs/SETR in fudan-zvg/SETR: img_size, num_classes, in_index of the auxiliary heads, num_conv
    "setr_naive_base_768": ((768, 768), 19, (2, 5, 8), 2),  # SETR_Naive_Base_768x768_40k_cityscapes_bs_8.py
    "setr_naive_large_768": ((768, 768), 19, (9, 14, 19), 2),  # SETR_Naive_768x768_40k_cityscapes_bs_8.py
    "setr_pup_large_768": ((768, 768), 19, (9, 14, 19, 23), 4),  # SETR_PUP_768x768_40k_cityscapes_bs_8.py
    "setr_naive_large_512": ((512, 512), 150, (9, 14, 19), 2),  # SETR_Naive_512x512_160k_ade20k_bs_16.py
    "setr_pup_large_512": ((512, 512), 150, (9, 14, 19, 23), 4),  # SETR_PUP_512x512_160k_ade20k_bs_16.py
}


@pytest.mark.parametrize("name", AUTHORS)
def test_options_are_those_of_the_authors(name):
    """Oracle: the authors' configurations."""
    config = model_config(name)
    num_conv = {"naive": 2, "pup": 4}[config.decoder]
    assert (config.img_size, config.num_classes, config.aux_indices, num_conv) == AUTHORS[name]
    assert config.decoder_dim == 256


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(decoder="mla"), "decoder is 'mla'; use one of naive, pup"),
        (dict(decoder_dim=0), "decoder_dim is 0"),
        (dict(aux_indices=(3,)), "the model has blocks 0 to 2"),
        (dict(global_pool="avg"), "global_pool is 'avg'"),
    ],
)
def test_wrong_options(options, words):
    """Oracle: one sentence that names the option."""
    with pytest.raises(ValueError, match=words):
        create_model("setr_pup_large_768", **SMALL | options)
