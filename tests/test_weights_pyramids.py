"""Tests of checkpoints of the hierarchical models and of the survey's. Oracle: the libraries that write them."""

import re
from collections import OrderedDict

import pytest
import timm
import torch
import torchvision
import transformers
from agreement import distance
from catalogue.ours import CASES
from checkpoints import TOLERANCE, assert_agree, assert_equal, build, images, randomize
from safetensors.torch import load_file
from torch import Tensor, nn

from fastvit_triton import create_model, load_model, load_weights, save_weights
from fastvit_triton.checkpoints import WeightsError
from fastvit_triton.layers import resize_pos_embed
from fastvit_triton.models import tnt

pytestmark = pytest.mark.fast

# Hierarchical models


def pyramid(family: str, **options) -> nn.Module:
    """A small random model of a family."""
    case = CASES[family]
    return randomize(create_model(case.name, **case.options | dict(img_size=case.sizes[1], num_classes=7) | options))


@pytest.mark.few(21)
@pytest.mark.parametrize("family", CASES)
def test_our_files_rebuild_hierarchical_models(family, tmp_path):
    """Oracle: the model itself: names, options and every bit."""
    model = pyramid(family)
    save_weights(model, tmp_path / "a.safetensors")
    again, _ = load_model(tmp_path / "a.safetensors")
    assert_equal(again, model)
    assert (again.variant, again.config) == (model.variant, model.config)
    x = images(model)
    with torch.no_grad():
        assert torch.equal(again.eval()(x), model(x))


OF_TIMM = ["swin", "twins_svt", "twins_pcpvt", "cait", "pit", "pit_distilled", "tnt", "crossvit", "levit"]


@pytest.mark.parametrize("family", OF_TIMM)
def test_hierarchical_models_of_timm(family, tmp_path):
    """Oracle: timm's model: its weights give its logits here, and ours, saved in its layout, give ours there."""
    case, ours = CASES[family], pyramid(family).eval()
    theirs = randomize(case.build(img_size=case.sizes[1], **case.options, num_classes=7)).eval()
    assert load_weights(ours, {"state_dict": theirs.state_dict()}).family == "timm (state_dict)"
    x = images(ours)
    with torch.no_grad():
        assert distance(ours(x), theirs(x)) <= TOLERANCE
        save_weights(randomize(ours), tmp_path / "a.safetensors", layout="timm")
        theirs.load_state_dict(load_file(tmp_path / "a.safetensors"), strict=True)
        theirs.train().eval()  # timm's LeViT keeps its biases until then
        assert distance(theirs(x), ours(x)) <= TOLERANCE


def named_by_levit(config: transformers.LevitConfig) -> nn.Module:
    """Modules with the names, in the order, of facebookresearch/LeViT (levit.py), without their sizes."""

    def normed() -> nn.Sequential:
        return nn.Sequential(OrderedDict(c=nn.Linear(1, 1, bias=False), bn=nn.BatchNorm1d(1)))

    def attention(**layers: nn.Module) -> nn.Module:
        module = nn.Module()
        module.attention_biases = nn.Parameter(torch.zeros(1))
        for name, layer in layers.items():
            module.add_module(name, layer)
        module.register_buffer("attention_bias_idxs", torch.zeros(1).long())
        return module

    def residual(inside: nn.Module) -> nn.ModuleDict:
        return nn.ModuleDict(dict(m=inside))

    def last() -> nn.Sequential:
        return nn.Sequential(nn.Identity(), normed())

    def mlp() -> nn.Module:
        return residual(nn.Sequential(normed(), nn.Identity(), normed()))

    blocks: list[nn.Module] = []
    for i, depth in enumerate(config.depths):
        blocks += [layer for _ in range(depth) for layer in (residual(attention(qkv=normed(), proj=last())), mlp())]
        if i + 1 < len(config.depths):
            blocks += [attention(kv=normed(), q=last(), proj=last()), mlp()]
    stem = [normed(), nn.Identity()] * 3 + [normed()]
    head = OrderedDict(bn=nn.BatchNorm1d(1), l=nn.Linear(1, 1))
    parts = dict(patch_embed=nn.Sequential(*stem), blocks=nn.Sequential(*blocks))
    return nn.ModuleDict(parts | dict(head=nn.Sequential(head), head_dist=nn.Sequential(head)))


@pytest.mark.parametrize("layout", ["transformers LeViT", "LeViT"])
@pytest.mark.parametrize("headless", [False, True])
def test_levit(layout, headless):
    """Oracle: transformers' logits, with its names and with those of the authors, whose tensors have the same order."""
    sizes = dict(hidden_sizes=[16, 24, 32], key_dim=[8] * 3, depths=[2, 1, 3], num_attention_heads=[2, 3, 1])
    config = transformers.LevitConfig(image_size=96, **sizes, num_labels=7)
    theirs = randomize(transformers.LevitForImageClassificationWithTeacher(config)).eval()
    state = (theirs.levit if headless and layout != "LeViT" else theirs).state_dict()
    if layout == "LeViT":
        names = [key for key in named_by_levit(config).state_dict() if not key.endswith("_idxs")]
        state = dict(zip(names, state.values(), strict=True)) | {
            "blocks.0.m.attention_bias_idxs": torch.zeros(1).long()
        }
        state = {key: tensor for key, tensor in state.items() if not (headless and key.startswith("head"))}
    options = dict(img_size=96, embed_dim=(16, 24, 32), key_dim=8, depths=(2, 1, 3), num_heads=(2, 3, 1))
    ours = randomize(create_model("levit_128", **options, num_classes=0 if headless else 7)).eval()
    report = load_weights(ours, state)
    assert report.family == layout and not report.reinitialised and len(report.dropped) == (layout == "LeViT")
    x = images(ours)
    with torch.no_grad():
        if headless:
            assert distance(ours(x), theirs.levit(x).pooler_output) <= TOLERANCE
        else:
            assert distance(ours(x), theirs(x).logits) <= TOLERANCE


SWIN = dict(img_size=16, patch_size=2, embed_dim=12, depths=(1, 2), num_heads=(2, 3), window_size=4, num_classes=7)


def swin_of_microsoft() -> tuple[nn.Module, dict[str, Tensor]]:
    """timm's Swin, and its weights under the names of microsoft/Swin-Transformer, with the buffers of its files."""
    theirs = randomize(timm.models.swin_transformer.SwinTransformer(**SWIN))
    state = {
        key.replace("layers.1.downsample", "layers.0.downsample").replace("head.fc", "head"): tensor
        for key, tensor in theirs.state_dict().items()
    }
    buffers = {"layers.0.blocks.0.attn.relative_position_index": torch.zeros(16, 16, dtype=torch.long)}
    return theirs, state | buffers | {"layers.1.blocks.1.attn_mask": torch.zeros(4, 16, 16)}


def test_official_swin():
    """Oracle: timm's converter of Microsoft's files, which merge patches at the end of a stage."""
    theirs, state = swin_of_microsoft()
    ours = randomize(create_model("swin_tiny_patch4_window7_224", **SWIN))
    report = load_weights(ours, {"model": state})
    assert report.family == "Swin (model)" and len(report.dropped) == 2
    converted = timm.models.swin_transformer.checkpoint_filter_fn({"model": dict(state)}, theirs)
    for key, tensor in ours.state_dict().items():
        assert torch.equal(tensor, converted[key]), key


OLD_SWIN = [
    (r"attention\.([qkv])_proj", lambda m: "attention.self." + dict(q="query", k="key", v="value")[m[1]]),
    (r"attention\.relative_position_bias\.", "attention.self."),
    (r"attention\.o_proj", "attention.output.dense"),
    (r"mlp\.fc1", "intermediate.dense"),
    (r"mlp\.fc2", "output.dense"),
]


@pytest.mark.parametrize("old", [False, True], ids=["5", "4"])
def test_transformers_swin(old):
    """Oracle: transformers' logits; also with the names in files of 4.x, which hold indices."""
    config = transformers.SwinConfig(
        image_size=16, patch_size=2, embed_dim=12, depths=[1, 2], num_heads=[2, 3], window_size=4, num_labels=7
    )
    theirs = randomize(transformers.SwinForImageClassification(config))
    state = theirs.state_dict()
    if old:
        for pattern, replacement in OLD_SWIN:
            state = {re.sub(pattern, replacement, key): tensor for key, tensor in state.items()}
        state["swin.encoder.layers.0.blocks.0.attention.self.relative_position_index"] = torch.zeros(16, 16).long()
    ours = randomize(create_model("swin_tiny_patch4_window7_224", **SWIN))
    report = load_weights(ours, state)
    assert report.family == "transformers Swin" and not report.reinitialised and len(report.dropped) == old
    x = images(ours)
    with torch.no_grad():
        assert distance(ours(x), theirs(x).logits) <= TOLERANCE


def test_torchvision_swin():
    """Oracle: torchvision's logits."""
    theirs = randomize(torchvision.models.SwinTransformer([2, 2], 12, [1, 2], [2, 3], [4, 4], num_classes=7))
    ours = randomize(create_model("swin_tiny_patch4_window7_224", **SWIN))
    report = load_weights(ours, theirs.state_dict())
    assert report.family == "torchvision Swin" and not report.reinitialised
    x = images(ours)
    with torch.no_grad():
        assert distance(ours(x), theirs(x)) <= TOLERANCE


@pytest.mark.parametrize("layout", ["PVT", "transformers PVT", "CvT", "transformers CvT"])
def test_pvt_and_cvt(layout):
    """Oracle: transformers' model, of CvT with the authors' activation; its names and those of the authors."""
    name = layout.split()[-1]
    ours, case = pyramid(name.lower()).eval(), CASES[name.lower()]
    theirs = randomize(case.build(img_size=case.sizes[1], **case.options, num_classes=7))
    state = theirs.state_dict() if layout != name else case.convert(theirs.state_dict())
    report = load_weights(ours, state)
    assert report.family == layout and not report.reinitialised and not report.dropped
    assert_agree(ours, lambda x: case.logits(theirs, x))


@pytest.mark.filterwarnings("ignore:torch.searchsorted", "ignore:Using a non-tuple sequence")  # in timm
def test_windows_are_resized_as_by_timm():
    """Oracle: timm's converter for another window; a window that is not square is not guessed."""
    _, state = swin_of_microsoft()
    options = SWIN | dict(img_size=24, window_size=(6, 5))
    ours = randomize(create_model("swin_tiny_patch4_window7_224", **options))
    report = load_weights(ours, state)
    assert report.positions == "windows of 4x4 resized to 6x5"
    theirs = timm.models.swin_transformer.SwinTransformer(**options)
    converted = timm.models.swin_transformer.checkpoint_filter_fn(dict(state), theirs)
    for key, tensor in ours.state_dict().items():
        assert torch.allclose(tensor, converted[key], atol=1e-6), key
    with pytest.raises(WeightsError, match="no square window; create the model with its window_size"):
        load_weights(create_model("swin_tiny_patch4_window7_224", **SWIN), ours.state_dict())


def test_positions_of_every_stage_are_resized():
    """Oracle: bilinear interpolation as in the authors' code; the class token's row stays."""
    ours, larger = pyramid("pvt", img_size=(16, 64)), pyramid("pvt", img_size=(48, 32))
    save = ours.state_dict()
    with pytest.raises(WeightsError, match="create the model with the checkpoint's img_size"):
        load_weights(larger, {key: t[:, 1:] if key == "pos_embed1" else t for key, t in save.items()})
    report = load_weights(larger, pyramid("pvt").state_dict())
    assert report.positions == "8x8 (assumed) resized to 12x8 (bilinear), 4x4 (assumed) resized to 6x4 (bilinear)"


def test_files_of_ours_say_the_grid(tmp_path):
    """Oracle: the model itself, resampled to another image size."""
    ours, larger = pyramid("pvt", img_size=(16, 32)), pyramid("pvt", img_size=(48, 32))
    save_weights(ours, tmp_path / "a.safetensors")
    assert "4x8 resized to 12x8 (bilinear)" in load_weights(larger, tmp_path / "a.safetensors").positions
    assert_agree(larger, ours)


def renamed(state: dict[str, Tensor], *rows: tuple[str, str]) -> dict[str, Tensor]:
    """The tensors under names in which each pattern is replaced."""
    for old, new in rows:
        state = {re.sub(old, new, key): tensor for key, tensor in state.items()}
    return state


def test_official_pit_at_another_size():
    """Oracle: timm's converter of the authors' names, and antialiased interpolation of positions."""
    ours, larger = pyramid("pit"), pyramid("pit", img_size=(27, 33))
    state = renamed(ours.state_dict(), (r"^transformers\.1\.pool", "pools.0"))
    converted = timm.models.pit.checkpoint_filter_fn(state, None)
    report = load_weights(larger, state)
    assert report.family == "PiT" and report.positions == "7x5 resized to 8x10 (bicubic_antialias)"
    for key, tensor in larger.state_dict().items():
        assert key == "pos_embed" or torch.equal(tensor, converted[key]), key
    assert_agree(larger, ours)


def test_official_tnt_at_another_size():
    """Oracle: timm's converter of the authors' names, which also resizes positions, antialiased."""
    case, larger = CASES["tnt"], pyramid("tnt", img_size=(24, 32))
    theirs = randomize(case.build(img_size=(16, 16), **case.options, num_classes=7))
    state = {tnt.TNT_LAYOUTS[0].theirs(key): tensor for key, tensor in theirs.state_dict().items()}
    state["inner_pos"] = state["inner_pos"].flatten(2).transpose(1, 2)
    state["outer_tokens"] = torch.zeros(1, 4, 12)
    report = load_weights(larger, state, resize="bicubic_antialias")
    assert report.family == "TNT" and report.positions == "2x2 (assumed) resized to 3x4 (bicubic_antialias)"
    assert report.dropped == ("outer_tokens",)
    built = case.build(img_size=(24, 32), **case.options, num_classes=7)
    built.load_state_dict(timm.models.tnt.checkpoint_filter_fn(state, built))
    assert_agree(larger, built.eval())


def test_official_crossvit_at_another_size():
    """Oracle: the same model built for another size, with tables resized by hand."""
    ours, larger = pyramid("crossvit", img_size=(24, 24)), pyramid("crossvit", img_size=(36, 24))
    state = renamed(ours.state_dict(), (r"^(pos_embed|cls_token)_", r"\1."))
    report = load_weights(larger, state)
    sizes = "4x4 (assumed) resized to 6x4 (bicubic_antialias)"
    assert report.family == "CrossViT" and report.positions == f"{sizes}, {sizes}"
    for key, tensor in larger.state_dict().items():
        want = ours.state_dict()[key]
        want = resize_pos_embed(want, (4, 4), (6, 4), 1) if key.startswith("pos_embed") else want
        assert torch.equal(tensor, want), key


def test_official_t2t_at_another_size():
    """Oracle: the weights themselves; fixed positions are those of the model."""
    ours, larger = pyramid("t2t_performer"), pyramid("t2t_performer", img_size=(48, 32))
    positions = larger.pos_embed.clone()
    report = load_weights(larger, {"state_dict_ema": ours.state_dict()})
    assert report.family == "T2T-ViT (state_dict_ema)"
    assert report.positions == "sinusoids for 4 tokens replaced by those for 7"
    for key, tensor in larger.state_dict().items():
        assert torch.equal(tensor, positions if key == "pos_embed" else ours.state_dict()[key]), key


def test_official_ceit_at_another_size():
    """Oracle: the weights themselves, with positions resized by hand."""
    ours, larger = pyramid("ceit", img_size=16), pyramid("ceit", img_size=(24, 32))
    report = load_weights(larger, {"model": ours.state_dict()})
    assert report.family == "CeiT (model)" and report.positions == "2x2 (assumed) resized to 3x4 (bicubic)"
    for key, tensor in larger.state_dict().items():
        want = ours.state_dict()[key]
        want = resize_pos_embed(want, (2, 2), (3, 4), 1, "bicubic") if key == "pos_embed" else want
        assert torch.equal(tensor, want), key


def test_checkpoints_of_another_architecture_are_refused():
    """Oracle: both architectures in one sentence; the layouts where no architecture has such keys."""
    with pytest.raises(WeightsError, match=r"this is not a checkpoint of Swin: .*\) are like those of PVT; create the"):
        load_weights(pyramid("swin"), pyramid("pvt").state_dict())
    with pytest.raises(WeightsError, match=r"a checkpoint of LeViT: .*\) are like those of a plain ViT, .*by --model$"):
        load_weights(pyramid("levit"), build("vit_tiny_patch16_224").state_dict())
    with pytest.raises(WeightsError, match=r"this is not a checkpoint of Swin: .* known are torchvision Swin"):
        load_weights(pyramid("swin"), {"weight": torch.zeros(1)})
    with pytest.raises(WeightsError, match="of a plain ViT"):
        load_weights(build("vit_tiny_patch16_224"), pyramid("swin").state_dict())


# Other models with one scale


@pytest.mark.parametrize("family", ["cct", "compact_cvt", "vit_lite"])
def test_compact_transformers_of_the_authors(family):
    """Oracle: vit-pytorch's logits, whose names are the authors'; positions are resized bilinearly, as by them."""
    ours, case = pyramid(family, img_size=(16, 16)), CASES[family]
    theirs = randomize(case.build(img_size=(16, 16), **case.options, num_classes=7)).eval()
    report = load_weights(ours, {"state_dict": theirs.state_dict()})
    assert report.family == "CCT (state_dict)" and not report.reinitialised and not report.dropped
    x = images(ours)
    with torch.no_grad():
        assert distance(ours.eval()(x), theirs(x)) <= TOLERANCE
    larger = pyramid(family, img_size=(24, 32))
    assert "4x4 resized to 6x8 (bilinear)" == load_weights(larger, ours.state_dict()).positions
    with torch.no_grad():
        x = images(larger)
        assert distance(larger.eval()(x), ours(x)) <= TOLERANCE
    with pytest.raises(WeightsError, match="no square grid; create the model with its img_size"):
        load_weights(ours, pyramid(family, img_size=(16, 24)).state_dict())
