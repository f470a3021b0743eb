"""Pretrained weights, from the Hub and from folders. Oracle: timm and transformers, which load the same files.

The real client talks to tests/hub_server.py; models are small and random. `-m network` compares five real checkpoints.
"""

import json
import pickle
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import timm
import torch
import transformers
from agreement import distance
from checkpoints import SMALL, TOLERANCE, images, randomize
from commands import run_python
from hub_server import HubServer, serving
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.data import ImageNetInfo, create_transform, resolve_data_config
from torch import Tensor, nn
from transformers.activations import QuickGELUActivation

from fastvit_triton import (
    create_model,
    data_config,
    list_models,
    load_model,
    load_weights,
    predict,
    save_weights,
    transforms,
)
from fastvit_triton.checkpoints import WeightsError
from fastvit_triton.models import CATALOGUE, model_config
from fastvit_triton.models.deit import DistilledVisionTransformer
from fastvit_triton.models.transformer import VisionTransformer
from fastvit_triton.models.weights import pretrained
from fastvit_triton.models.weights.publish import save_pretrained
from fastvit_triton.train.data.model_input import transform_of

pytestmark = pytest.mark.fast

NAME, TAG = "vit_tiny_patch16_224", "vit_tiny_patch16_224.augreg_in21k_ft_in1k"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A Hub on this machine, and an empty cache."""
    with serving() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
        huggingface_hub.utils.disable_progress_bars()
        yield server
        huggingface_hub.utils.enable_progress_bars()


@torch.no_grad()
def assert_close(a: Tensor, b: Tensor) -> None:
    assert distance(a, b) <= TOLERANCE


def timm_folder(folder: Path, name: str = NAME, **options) -> nn.Module:
    """A small random timm model, and its snapshot in the form that timm pushes to the Hub."""
    model = randomize(timm.create_model(name, **{**SMALL, **options}))
    timm.models.save_for_hf(model, str(folder), safe_serialization=True)
    return model


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def failure(*words: object, of=load_model, **options) -> str:
    """The single line of the error that a call must raise."""
    with pytest.raises(WeightsError) as error:
        of(*words, **options)
    (line,) = str(error.value).splitlines()
    return line


# The table


def test_the_classes_are_timms():
    """Oracle: the installed timm; test_regenerate.py tests that both tables are those that it has."""
    info = ImageNetInfo()
    assert list(pretrained.imagenet_classes()) == [info.index_to_label_name(i) for i in range(1000)]
    assert len(set(pretrained.imagenet_classes().values())) == 1000


def test_names_with_tags_are_timms():
    """Oracle: timm's list of pretrained names, and its default tag and number of classes for each of our names."""
    ours = [name for name in list_models() if timm.is_model(name)]
    assert set(list_models(pretrained=True)) == {n for n in timm.list_pretrained() if n.split(".")[0] in ours}
    for name in ours:
        cfg = timm.get_pretrained_cfg(name)
        assert model_config(name).num_classes == cfg.num_classes, name
        assert pretrained.pretrained_cfg(name)["tag"] == cfg.tag
    assert list_models("vit_tiny_patch16_224", pretrained=True) == [TAG, f"{NAME}.augreg_in21k"]
    assert list_models("*.sam_in1k", pretrained=True) == [
        "vit_base_patch16_224.sam_in1k",
        "vit_base_patch32_224.sam_in1k",
    ]


def test_the_readme_counts_the_checkpoints():
    """Oracle: `list_models(pretrained=True)`."""
    text = (Path(__file__).parents[1] / "README.md").read_text()
    assert re.search(r"^(\d+) checkpoints of timm", text, re.MULTILINE)[1] == str(len(list_models(pretrained=True)))


def test_a_tag_sets_the_number_of_classes():
    """Oracle: timm's models of the same names; an option of the user's stays."""
    small = dict(depth=1, embed_dim=48, num_heads=3)
    for name in (NAME, TAG, "vit_base_patch16_224.augreg_in21k", "vit_base_patch16_224.mae", "vit_huge_patch14_224"):
        assert create_model(name, **small).num_classes == timm.create_model(name, **small).num_classes, name
    model = create_model("vit_base_patch16_224.augreg_in21k", num_classes=5, **small)
    assert model.num_classes == 5 and model.pretrained_cfg["tag"] == "augreg_in21k"
    assert "has no tag 'nothing'; the nearest are" in failure(f"{NAME}.nothing", of=create_model)
    giant = failure("vit_giant_patch14_224", True, of=create_model)
    assert (
        giant
        == "vit_giant_patch14_224 has no pretrained weights on the Hub; give checkpoint_path, or leave out pretrained"
    )


# timm's checkpoints


@pytest.mark.parametrize("source", [TAG, NAME, f"hf-hub:timm/{TAG}", "hf-hub:someone/tuned"])
def test_pretrained_names(source: str, hub: HubServer, tmp_path: Path):
    """Oracle: timm's model from the same repository."""
    tuned = source.endswith("tuned")
    theirs = timm_folder(tmp_path / "a", num_classes=7 if tuned else 1000)
    repository = "someone/tuned" if tuned else f"timm/{TAG}"
    hub.repositories[repository] = {"main": contents(tmp_path / "a")}
    ours = create_model(source, pretrained=True, **SMALL).eval()
    x = images(ours)
    assert_close(ours(x), theirs(x))
    assert_close(ours(x), timm.create_model(f"hf-hub:{repository}", pretrained=True).eval()(x))
    assert ours.variant == NAME and ours.pretrained_cfg["tag"] == TAG.partition(".")[2]
    random = create_model(source, **SMALL)
    assert random.num_classes == theirs.num_classes and not torch.equal(random(x), ours(x))
    assert create_model(source, pretrained=True, **SMALL, num_classes=3).head.weight.count_nonzero() == 0


def test_snapshot_folders(tmp_path: Path):
    """Oracle: timm's model from the same folder; config.json gives name, size, options and classes."""
    theirs = timm_folder(tmp_path, "deit3_small_patch16_224", num_classes=7, in_chans=1)
    alone = tmp_path / "model.safetensors"
    x = torch.randn(2, 1, 32, 32)
    for source in (tmp_path, str(alone), f"local-dir:{tmp_path}"):
        ours, _ = load_model(source)
        assert_close(ours.eval()(x), theirs(x))
    assert ours.variant == "deit3_small_patch16_224" and ours.config.img_size == (32, 32)
    assert_close(create_model(f"local-dir:{tmp_path}", pretrained=True).eval()(x), theirs(x))
    bare = create_model("deit3_small_patch16_224", checkpoint_path=alone, **SMALL, num_classes=7, in_chans=1)
    assert_close(bare.eval()(x), theirs(x))
    assert "give one of them" in failure(NAME, True, checkpoint_path=alone, of=create_model)
    config = json.loads((tmp_path / "config.json").read_text())
    old = {"architecture": config["architecture"], **config["pretrained_cfg"], "num_classes": 7}
    (tmp_path / "config.json").write_text(json.dumps(old | {"input_size": [1, 32, 32]}))
    assert create_model(f"local-dir:{tmp_path}", depth=1).config.num_classes == 7


@pytest.mark.parametrize("channels", [1, 5])
def test_other_channels(channels: int, tmp_path: Path):
    """Oracle: timm's model of the same folder with other channels."""
    timm_folder(tmp_path, num_classes=7)
    options = dict(pretrained=True, in_chans=channels)
    ours = create_model(f"local-dir:{tmp_path}", **options).eval()
    theirs = timm.create_model(f"local-dir:{tmp_path}", **options).eval()
    x = torch.randn(2, channels, 32, 32)
    assert_close(ours(x), theirs(x))
    assert len(data_config(ours)["mean"]) == channels
    create_model("t2t_vit_7", img_size=32, depth=1).save_pretrained(tmp_path / "splits")  # which has no convolution
    with pytest.raises(WeightsError, match="cannot be converted; leave out in_chans"):
        create_model(f"local-dir:{tmp_path}/splits", **options)


def test_features_of_pretrained_models(tmp_path: Path):
    """Oracle: timm's feature maps from the same folder."""
    timm_folder(tmp_path, num_classes=7)
    options = dict(pretrained=True, features_only=True, out_indices=(0, 1))
    ours = create_model(f"local-dir:{tmp_path}", **options).eval()
    theirs = timm.create_model(f"local-dir:{tmp_path}", **options).eval()
    x = torch.randn(2, 3, 32, 32)
    for a, b in zip(ours(x), theirs(x), strict=True):
        assert_close(a, b)
    assert data_config(ours)["mean"] == (0.5,) * 3


# transformers' checkpoints

T = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=3, image_size=32, patch_size=8)
VIT = dict(T, intermediate_size=100)
TEXT = dict(hidden_size=48, intermediate_size=96, num_hidden_layers=1, num_attention_heads=3, vocab_size=10)
TEXT |= dict(max_position_embeddings=4, bos_token_id=1, eos_token_id=2)
WINDOWS = dict(embed_dim=12, depths=[2, 2], num_heads=[1, 2], mlp_ratio=2)
DISTANCES = dict(
    image_size=64, hidden_sizes=[16, 24, 32], key_dim=[8] * 3, depths=[2, 1, 1], num_attention_heads=[2] * 3
)
LABELS = {i: f"name {i}" for i in range(7)}
# class, its config, our name, how to read its output
FOREIGN = {
    "vit": ("ViTForImageClassification", transformers.ViTConfig(**VIT, id2label=LABELS), NAME, "logits"),
    "vit headless": ("ViTModel", transformers.ViTConfig(**VIT, hidden_act="relu"), NAME, "last_hidden_state"),
    "deit": (
        *("DeiTForImageClassificationWithTeacher", transformers.DeiTConfig(**VIT, num_labels=7)),
        *("deit_tiny_distilled_patch16_224", "logits"),
    ),
    "dinov2": ("Dinov2Model", transformers.Dinov2Config(**T), "vit_small_patch14_dinov2", "pooler_output"),
    "dinov2 swiglu": (
        *("Dinov2Model", transformers.Dinov2Config(**T, use_swiglu_ffn=True)),
        *("vit_giant_patch14_dinov2", "pooler_output"),
    ),
    "registers": (
        *("Dinov2WithRegistersModel", transformers.Dinov2WithRegistersConfig(**T, num_register_tokens=3)),
        *("vit_small_patch14_reg4_dinov2", "pooler_output"),
    ),
    "siglip": (
        *("SiglipVisionModel", transformers.SiglipVisionConfig(**VIT), "vit_base_patch16_siglip_224"),
        "pooler_output",
    ),
    "siglip classifier": (
        "SiglipForImageClassification",
        transformers.SiglipConfig(text_config=TEXT, vision_config={**VIT, "vision_use_head": False}, num_labels=7),
        *("vit_base_patch16_siglip_gap_224", "logits"),
    ),
    "swin": (
        "SwinForImageClassification",
        transformers.SwinConfig(**WINDOWS, image_size=32, patch_size=2, window_size=4, id2label=LABELS),
        *("swin_tiny_patch4_window7_224", "logits"),
    ),
    "pvt": (
        "PvtForImageClassification",
        transformers.PvtConfig(image_size=64, depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 40, 64], num_labels=7),
        *("pvt_tiny", "logits"),
    ),
    "levit": (
        *("LevitForImageClassificationWithTeacher", transformers.LevitConfig(**DISTANCES, num_labels=7)),
        *("levit_256", "logits"),
    ),
    "cvt": (
        "CvtForImageClassification",
        transformers.CvtConfig(embed_dim=[8, 12, 16], num_heads=[1, 3, 2], depth=[1, 2, 3], id2label=LABELS),
        *("cvt_21_224", "logits"),
    ),
    "clip": (
        *("CLIPVisionModelWithProjection", transformers.CLIPVisionConfig(**VIT, projection_dim=20)),
        *("vit_base_patch32_clip_224", "image_embeds"),
    ),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("case", FOREIGN)
def test_transformers(case: str, tmp_path: Path):
    """Oracle: transformers' model that wrote the folder: its output, and the class names."""
    cls, config, name, output = FOREIGN[case]
    theirs = randomize(getattr(transformers, cls)(config, **dict(add_pooling_layer=False) if cls == "ViTModel" else {}))
    for module in theirs.modules() if case == "cvt" else ():
        if hasattr(module, "activation"):
            module.activation = QuickGELUActivation()  # of the authors' code, which made the weights
    theirs.save_pretrained(tmp_path, max_shard_size="60KB" if case == "vit" else "5GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == (case == "vit")
    ours, _ = load_model(tmp_path)
    x = images(ours)
    y = getattr(theirs(x), output)
    assert_close(ours.eval()(x), y[:, 0] if output == "last_hidden_state" else y)
    assert CATALOGUE[ours.variant] is CATALOGUE[name] and ("_gap_" in ours.variant) == ("_gap_" in name)
    assert ours.pretrained_cfg.get("label_names") == (
        tuple(LABELS.values()) if case in ("vit", "swin", "cvt") else None
    )


def test_known_configurations_have_their_names(tmp_path: Path):
    """Oracle: our names; the fields are those of google/vit-base-patch16-224 and facebook/dinov2-base."""
    vit = dict(architectures=["ViTForImageClassification"], model_type="vit", hidden_size=768, layer_norm_eps=1e-12)
    vit |= dict(id2label={str(i): f"c{i}" for i in range(1000)}, num_hidden_layers=12, image_size=224, patch_size=16)
    half = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3)
    (tmp_path / "config.json").write_text(json.dumps(vit))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(dict(do_resize=True, size=224, resample=2, **half)))
    model = create_model(f"local-dir:{tmp_path}", depth=1)
    assert model.variant == "vit_base_patch16_224" and model.config.eps == 1e-12
    found = data_config(model)
    assert (found["crop_mode"], found["crop_pct"], found["interpolation"]) == ("squash", 1.0, "bilinear")
    assert found["mean"] == (0.5, 0.5, 0.5) and pretrained.class_names(model)[:2] == ("c0", "c1")

    dino = dict(architectures=["Dinov2Model"], model_type="dinov2", hidden_size=768, image_size=518, patch_size=14)
    size = dict(size={"shortest_edge": 256}, crop_size={"height": 224, "width": 224}, do_center_crop=True, resample=3)
    (tmp_path / "config.json").write_text(json.dumps(dino | dict(num_attention_heads=12, num_hidden_layers=12)))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(size))
    model = create_model(f"local-dir:{tmp_path}", depth=1)
    assert model.variant == "vit_base_patch14_dinov2" and model.num_classes == 0
    found = data_config(model)
    assert (found["crop_mode"], found["crop_pct"], found["input_size"]) == ("center", 0.875, (3, 518, 518))


PROCESSORS = {
    "levit": (transformers.LevitImageProcessorPil, {}, (3, 224, 224)),
    "cvt": (transformers.ConvNextImageProcessorPil, dict(size={"shortest_edge": 224}), (3, 224, 224)),
    "cvt at 384": (transformers.ConvNextImageProcessorPil, {}, (3, 384, 384)),
}


@pytest.mark.parametrize("old", [False, True], ids=["5", "4"])
@pytest.mark.parametrize("case", PROCESSORS)
def test_images_of_processors(case: str, old: bool, tmp_path: Path):
    """Oracle: transformers' processor on a smooth image. Crops are cut before resizing here and after it there: pixels
    may be rounded to neighbouring levels of 255, which three operations in float32 scale and shift. Files of 4.x have
    one number as the size, and other class names."""
    cls, options, size = PROCESSORS[case]
    processor = cls(**options)
    processor.save_pretrained(tmp_path)
    held = json.loads((tmp_path / "preprocessor_config.json").read_text())
    if old:
        kind = held.pop("image_processor_type").removesuffix("Pil").replace("ImageProcessor", "FeatureExtractor")
        held |= dict(size=held["size"]["shortest_edge"], feature_extractor_type=kind)
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(held))
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type=case.partition(" ")[0])))
    found = data_config(create_model(f"local-dir:{tmp_path}"))
    assert found["input_size"] == size
    rows, columns = torch.meshgrid(torch.arange(500), torch.arange(640), indexing="ij")
    image = Image.fromarray(torch.stack((rows // 2, columns // 3, (rows + columns) // 5), -1).byte().numpy())
    want = processor(image, return_tensors="pt")["pixel_values"]
    got = transform_of(found)(image)[None]
    level = (1 / 255 + 8 * torch.finfo(torch.float32).eps) / min(found["std"])
    assert got.shape == want.shape and (got - want).abs().max() <= level


def test_unknown_configurations_are_refused(tmp_path: Path):
    """Oracle: one sentence that says what is wrong."""
    for config, words in (
        ({"model_type": "bert"}, "model_type is 'bert'; known are"),
        ({"architecture": "resnet50"}, "its architecture 'resnet50' is none of ours"),
        ({}, 'it has neither "architecture"'),
        ({"model_type": "vit", "hidden_act": "mish"}, "hidden_act is 'mish'"),
        ({"model_type": "vit", "hidden_size": "wide"}, "describes no model of ours"),
        ({"model_type": "cvt", "kernel_qkv": [3, 5, 3]}, "kernel_qkv is [3, 5, 3]; our cvt_13_224 has [3, 3, 3]"),
        ({"model_type": "levit", "key_dim": [16, 32, 16]}, "key_dim is [16, 32, 16]; our levit_128 has one value for"),
        (
            {"model_type": "levit", "architectures": ["LevitForImageClassification"]},
            "has one head; our levit_128 has those of LevitForImageClassificationWithTeacher",
        ),
        ([], "holds a list; expected a JSON object"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert words in failure(tmp_path), config
    (tmp_path / "config.json").write_text("{")
    assert "is not readable as JSON" in failure(tmp_path)


def test_configurations_that_ask_for_too_much_are_refused(tmp_path: Path):
    """Oracle: no model is built, and no memory taken, for a config.json that the weights beside it cannot fill."""
    timm_folder(tmp_path, num_classes=7)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, words in ((dict(depth=1000), "has depth 1,000, and the file"), (dict(embed_dim=2**15 * 3), "asks for")):
        (tmp_path / "config.json").write_text(json.dumps(config | {"model_args": config["model_args"] | change}))
        assert words in failure(tmp_path)
        assert words in failure(f"local-dir:{tmp_path}", pretrained=True, of=create_model)


# The client


def test_cache_offline_and_revisions(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Oracle: the server's log, and the bytes of each revision."""
    first, second = (timm_folder(tmp_path / branch, num_classes=7) for branch in ("main", "v2"))
    hub.repositories["me/vit"] = {branch: contents(tmp_path / branch) for branch in ("main", "v2")}
    model, _ = load_model("hf-hub:me/vit")
    x = images(model)
    assert_close(model.eval()(x), first(x))
    assert sorted(line.rpartition("/")[2] for line in hub.requests if re.match("GET.*/resolve/", line)) == sorted(
        contents(tmp_path / "main")
    )
    hub.requests.clear()
    assert_close(load_model("hf-hub:me/vit@main")[0].eval()(x), first(x))
    assert hub.requests and not any(re.match("GET.*/resolve/", line) for line in hub.requests)
    assert_close(load_model("hf-hub:me/vit@v2")[0].eval()(x), second(x))
    assert_close(VisionTransformer.from_pretrained("me/vit", revision="v2")(x), second(x))
    assert "there is no hf-hub:me/vit@v3; me/vit has no such branch" in failure("hf-hub:me/vit@v3")
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        hub.requests.clear()
        assert_close(load_model("hf-hub:me/vit")[0].eval()(x), first(x))
        assert "hf-hub:me/other is not in the cache and cannot be downloaded" in failure("hf-hub:me/other")
        assert not hub.requests
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:1/{repo_id}/{revision}/{filename}")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between the client's attempts
    assert_close(load_model("hf-hub:me/vit")[0].eval()(x), first(x))
    tried: list[str] = []
    download = huggingface_hub.hf_hub_download

    def track(*words: str, **options) -> str:
        tried.append(options.get("local_files_only"))
        return download(*words, **options)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", track)
    sentence = failure("hf-hub:me/other")
    assert re.search("is not in the cache and cannot be downloaded: .*Connection refused", sentence)
    assert sentence.endswith("; without network, give the path of a copy")
    assert tried[0] is None and all(tried[1:])  # one file is tried, for as long as the client wants


def test_one_load_reads_one_commit(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Oracle: the weights of the commit whose config.json was read, although the branch moves on in between."""
    first, _ = (timm_folder(tmp_path / name, num_classes=7) for name in "ab")
    hub.repositories["me/vit"] = {branch: contents(tmp_path / "a") for branch in ("main", "kept")}
    download = huggingface_hub.hf_hub_download

    def move_on(*words: str, **options) -> str:
        path = download(*words, **options)
        hub.repositories["me/vit"]["main"] = contents(tmp_path / "b")
        return path

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", move_on)
    model, _ = load_model("hf-hub:me/vit")
    x = images(model)
    assert_close(model.eval()(x), first(x))


def test_gated_and_missing_repositories(hub: HubServer, tmp_path: Path):
    """Oracle: one sentence with a remedy; with a token the model loads."""
    timm_folder(tmp_path / "a", num_classes=7)
    hub.repositories["me/vit"], hub.gated = {"main": contents(tmp_path / "a")}, {"me/vit"}
    assert "is gated; accept its terms at https://huggingface.co/me/vit" in failure("hf-hub:me/vit")
    assert "is gated" in failure("me/vit", of=VisionTransformer.from_pretrained, token="hf_bad")
    assert VisionTransformer.from_pretrained("me/vit", token="hf_good").num_classes == 7
    assert "there is no hf-hub:me/nothing; check the name" in failure("hf-hub:me/nothing")
    assert "is gated" not in failure("hf-hub:me/vit@x y")
    hub.repositories["me/empty"] = {"main": {"README.md": b"hello"}}
    assert "there is no checkpoint in hf-hub:me/empty: it has no model.safetensors or" in failure("hf-hub:me/empty")
    missing = failure("hf-hub:me/empty", of=create_model)
    assert "hf-hub:me/empty: it has no config.json, which names the model" in missing
    hub.repositories["me/text"] = {"main": {"config.json": b"<html>"}}
    assert "is not readable as JSON" in failure("hf-hub:me/text")


def test_broken_downloads(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Oracle: a download that breaks is resumed; one that ends early is one sentence, and no file is kept."""
    theirs = timm_folder(tmp_path / "a", num_classes=7)
    hub.repositories["me/vit"], hub.short = {"main": contents(tmp_path / "a")}, {"model.safetensors"}
    assert "model.safetensors of hf-hub:me/vit was not downloaded: Consistency check failed" in failure("hf-hub:me/vit")
    hub.short, hub.cut = set(), {"model.safetensors": 1000}
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    model, _ = load_model("hf-hub:me/vit")
    x = images(model)
    assert_close(model.eval()(x), theirs(x)) or not hub.cut
    assert not hub.cut


def test_shards(hub: HubServer, tmp_path: Path):
    """Oracle: the whole model; an index that names other files than its neighbours is refused."""
    theirs = timm_folder(tmp_path, num_classes=7)
    state = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = {key: f"part-{i % 3}.safetensors" for i, key in enumerate(state)}
    for part in set(names.values()):
        save_file({key: state[key] for key in state if names[key] == part}, tmp_path / part)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    hub.repositories["me/vit"] = {"main": contents(tmp_path)}
    x = torch.randn(2, 3, 32, 32)
    for source in ("hf-hub:me/vit", tmp_path, index):
        assert_close(load_model(source)[0].eval()(x), theirs(x))
    secret = tmp_path.parent / "secret.safetensors"
    save_file(state, secret)
    for bad in ("../secret.safetensors", str(secret), "..\\secret.safetensors", "sub/a.safetensors", "a.py", 3):
        index.write_text(json.dumps({"weight_map": {**names, "head.bias": bad}}))
        assert "was refused: it names the file" in failure(tmp_path)
        hub.repositories["me/vit"]["main"] = contents(tmp_path)
        assert "was refused: it names the file" in failure("hf-hub:me/vit")
    index.write_text(json.dumps({"weight_map": {**names, "head.bias": "part-9.safetensors"}}))
    assert "has no part-9.safetensors, which its model.safetensors.index.json lists" in failure(tmp_path)
    index.write_text("{}")
    assert "is no index of a checkpoint" in failure(tmp_path)


def test_wrong_files(hub: HubServer, tmp_path: Path):
    """Oracle: one sentence that names the keys; the model is unchanged."""
    timm_folder(tmp_path, num_classes=7)
    state = load_file(tmp_path / "model.safetensors")
    model = randomize(create_model(NAME, **SMALL, num_classes=7))
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    save_file({key.replace("attn.qkv", "attn.all"): t for key, t in state.items()}, tmp_path / "model.safetensors")
    hub.repositories["me/vit"] = {"main": contents(tmp_path)}
    assert "it lacks blocks.0.attn.qkv.weight" in failure(model, "hf-hub:me/vit", of=load_weights)
    save_file({f"x.{i}": tensor for i, tensor in enumerate(state.values())}, tmp_path / "model.safetensors")
    assert "this is not a checkpoint of a plain ViT" in failure(tmp_path)
    save_file({key: t for key, t in state.items() if "head" not in key}, tmp_path / "model.safetensors")
    assert "has no head.weight, which its configuration needs" in failure(tmp_path)
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())


def test_what_names_no_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Oracle: one sentence each, without a request; a URL is shown as it was typed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: pytest.fail("downloaded"))
    url = f"https://huggingface.co/timm/{TAG}/resolve/main/model.safetensors"
    assert failure(url) == f"{url} is a URL, and checkpoints are not loaded from URLs; use hf-hub:timm/{TAG}"
    assert "download the file, or give" in failure("https://example.org/a.safetensors")
    assert failure("run/photos") == (
        "there is no folder or file run/photos; for a repository of the Hub write hf-hub:run/photos"
    )
    for text in ("none.pt", "runs/photos", "timm/none.safetensors", "nothing"):
        assert f"there is no checkpoint {text}; give a file, a folder, hf-hub:org/name" in failure(text)
    assert f"use hf-hub:timm/{TAG} for the Hub" in failure(f"timm/{TAG}", of=create_model)
    assert "names no repository" in failure("hf-hub:timm")
    assert "there is no folder nowhere" in failure("local-dir:nowhere")


def test_arguments_of_another_type(tmp_path: Path):
    """Oracle: TypeError of one sentence with the argument's name."""
    model = create_model(NAME, **SMALL)
    image = images(model)
    for call, words in (
        (lambda: create_model(3), "name is of type int; give text"),
        (lambda: create_model(tmp_path), "'local-dir:PATH' of a folder"),
        (lambda: create_model(NAME, pretrained="augreg_in21k"), f"give a tag as {NAME}.TAG"),
        (lambda: create_model(NAME, checkpoint_path=3), "the checkpoint is of type int; give a file"),
        (lambda: load_model(None), "the checkpoint is of type NoneType"),
        (lambda: data_config(3), "model is of type int; give a model"),
        (lambda: transforms(None), "model is of type NoneType"),
        (lambda: transforms(model)(image), "image is of type Tensor; give the path of a file, or a PIL image"),
        (lambda: predict(model, [3]), "image is of type int; give the path"),
        (lambda: predict(torch.nn.Linear(1, 1), []), "model is Linear, which does not say how its images are prepared"),
        (lambda: model.forward_intermediates(image, indices="last"), "indices is 'last'; give an integer, or"),
        (lambda: create_model(NAME, features_only=True, out_indices=(0.5,)), "out_indices is (0.5,); give an integer"),
        (lambda: create_model(NAME, features_only=True, out_indices=1.0), "out_indices is 1.0; give an integer"),
    ):
        with pytest.raises(TypeError) as error:
            call()
        assert words in str(error.value) and "\n" not in str(error.value)
    model.forward_intermediates(image, indices=list(np.array([0, -1])))


def test_remedies(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Oracle: the cause and what would help; before, the reason of the second file replaced that of the first."""
    model = create_model(NAME, **SMALL)
    assert failure("").startswith("the checkpoint's name is empty; give a file")
    wide = {
        key: tensor.clone() for key, tensor in create_model(NAME, **SMALL | dict(embed_dim=96)).state_dict().items()
    }
    assert "create the model with embed_dim=96, or of another name" in failure(model, wide, of=load_weights)
    deep = create_model(NAME, **SMALL | dict(depth=3)).state_dict()
    assert failure(model, deep, of=load_weights).endswith(
        "; create the model of the checkpoint, or give its sizes as options"
    )
    message = failure(model, tmp_path / "none" / "a.safetensors", of=save_weights)
    assert message.endswith(f"is in a folder that does not exist; create {tmp_path / 'none'} first")
    assert "repo_id is 'a/b/c'; use 'org/name'" in failure("a/b/c", of=model.push_to_hub)
    assert "metadata's training is no JSON" in failure(
        tmp_path / "b", of=model.save_pretrained, metadata={"training": "{"}
    )
    hub.repositories["me/cut"] = {"main": {"model.safetensors": b"0123456789"}}
    assert re.search(r"; delete \S+models--me--cut and load it again$", failure("hf-hub:me/cut"))
    (tmp_path / "cut.safetensors").write_bytes(b"0123456789")
    assert failure(tmp_path / "cut.safetensors").endswith("; copy or download it again")
    asked = "hf-hub:me/other is not in the cache and cannot be downloaded: "
    assert failure("hf-hub:me/other", hub=dict(local_files_only=True)) == asked + "local_files_only is True"
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert failure("hf-hub:me/other") == asked + "HF_HUB_OFFLINE is set"


def test_a_missing_client_is_named(monkeypatch: pytest.MonkeyPatch):
    """Oracle: setup.py's extra."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert failure(TAG) == "models of the Hub need huggingface_hub; pip install 'fastvit_triton[hub]'"


# Images


def picture(width: int, height: int) -> Image.Image:
    noise = np.random.default_rng(0).integers(0, 255, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("mode", ["center", "squash", "border"])
def test_transforms_are_timms(mode: str):
    """Oracle: timm's create_transform on the same images, bit for bit; two random crops differ."""
    model = create_model(NAME, depth=1)
    for side in ((224, 224), (96, 160)):
        model.pretrained_cfg = {**model.pretrained_cfg, "crop_mode": mode, "input_size": (3, *side)}
        model.pretrained_cfg |= {"fixed_input_size": False}
        config = data_config(model)
        for size in ((300, 200), (150, 260), (224, 224), (31, 500)):
            image = picture(*size)
            wanted = create_transform(**config)(image)
            assert torch.equal(transforms(model)(image), wanted)
    crops = pickle.loads(pickle.dumps(transforms(model, train=True)))  # as a DataLoader sends it
    assert crops(picture(300, 200)).shape == (3, 96, 160)
    torch.manual_seed(0)
    assert not torch.equal(crops(image), crops(image))


def test_data_configurations_are_timms():
    """Oracle: timm's resolve_data_config for every tag; a model's own size and channels stay, as in timm's export."""
    for name in list_models(pretrained=True):
        cfg = pretrained.pretrained_cfg(name)
        model = nn.Module()
        model.pretrained_cfg = cfg
        assert data_config(model) == resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(name).to_dict()), name
    small = create_model(TAG, **SMALL, in_chans=1)
    assert data_config(small)["input_size"] == (1, 32, 32) and data_config(small)["mean"] == (0.5,)
    unknown = data_config(create_model("vit_digits_patch2_8"))
    assert unknown["input_size"] == (1, 8, 8) and unknown["crop_pct"] == 0.875
    assert data_config(timm.create_model(NAME, depth=1)) == data_config(create_model(NAME, depth=1))


def test_files_keep_the_configuration(tmp_path: Path):
    """Oracle: the configuration of the model that was saved."""
    name = next(n for n in list_models(pretrained=True) if pretrained.pretrained_cfg(n)["crop_mode"] == "squash")
    model = randomize(create_model(name, **SMALL))
    save_weights(model, tmp_path / "a.safetensors")
    again, _ = load_model(tmp_path / "a.safetensors")
    assert again.pretrained_cfg == model.pretrained_cfg and data_config(again)["crop_mode"] == "squash"
    other = create_model(name.split(".")[0], **SMALL, num_classes=model.num_classes)
    other.pretrained_cfg = {}
    load_weights(other, tmp_path / "a.safetensors")
    assert data_config(other) == data_config(model)


# Models of ours on the Hub, and folders for other libraries

OURS = {
    TAG: dict(num_classes=7),
    "deit_tiny_distilled_patch16_224": dict(num_classes=7),
    "deit3_small_patch16_224": dict(num_classes=7),
    "vit_giant_patch14_reg4_dinov2": dict(mlp_ratio=16 / 3),
    "vit_base_patch16_siglip_gap_224": dict(num_classes=7, act="gelu_tanh"),
    "vit_tiny_r_s16_p8_224": dict(num_classes=7, img_size=64, patch_size=32),
    "vit_digits_patch2_8": dict(embed_dim=48),
    "simplevit_tiny_patch16_224": dict(num_classes=7, patch_embed="linear"),
}


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("layout", ["timm", "transformers", "fastvit_triton"])
def test_folders_load_elsewhere(name: str, layout: str, tmp_path: Path):
    """Oracle: timm's and transformers' models from the folder, and ours; all give the same output."""
    ours = randomize(create_model(name, **{**SMALL, **OURS[name]}))
    if layout == "transformers" and "_r_" in name:
        assert "transformers ViT needs hybrid=False" in failure(ours, tmp_path, layout=layout, of=save_pretrained)
        return
    save_pretrained(ours, tmp_path, layout=layout)
    x = images(ours)
    if layout == "transformers":
        auto = transformers.AutoModelForImageClassification if ours.num_classes else transformers.AutoModel
        theirs, info = auto.from_pretrained(tmp_path, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert_close(getattr(theirs.eval()(x), "logits" if ours.num_classes else "pooler_output"), ours(x))
    elif layout == "timm" or not name.startswith("simplevit"):  # timm stores its positions
        theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
        assert_close(theirs(x), ours(x))
        assert json.dumps(resolve_data_config(model=theirs)) == json.dumps(data_config(ours))
    again, _ = load_model(tmp_path)
    assert_close(again.eval()(x), ours(x))
    assert data_config(again) == data_config(ours)
    card = (tmp_path / "README.md").read_text()
    assert card.startswith(f"---\nlibrary_name: {layout}\n") and " parameters and takes images of " in card
    assert huggingface_hub.ModelCard(card).data.library_name == layout


WINDOWED = dict(img_size=32, patch_size=2, embed_dim=12, depths=(2, 2), num_heads=(1, 2), window_size=4)
OBLONG = dict(num_classes=7, img_size=(64, 32), depths=(2,), num_heads=(2,))
REDUCED = dict(img_size=64, depths=(1, 2), embed_dims=(12, 24), num_heads=(2, 3), mlp_ratios=(2, 3), sr_ratios=(2, 1))
PYRAMIDS = {
    "swin": ("swin_tiny_patch4_window7_224", WINDOWED | dict(num_classes=7)),
    "swin headless": ("swin_tiny_patch4_window7_224", WINDOWED | dict(num_classes=0, qkv_bias=False)),
    "swin, oblong": ("swin_tiny_patch4_window7_224", WINDOWED | OBLONG),
    "pvt": ("pvt_tiny", REDUCED | dict(num_classes=7)),
    "pvt headless": ("pvt_tiny", REDUCED | dict(num_classes=0, in_chans=1, qkv_bias=False)),
}


@pytest.mark.parametrize("case", PYRAMIDS)
def test_folders_of_pyramids_load_in_transformers(case: str, tmp_path: Path):
    """Oracle: transformers' model from the folder, which has every tensor and no other; its output, and names."""
    name, options = PYRAMIDS[case]
    ours = randomize(create_model(name, **options))
    ours.pretrained_cfg = {"label_names": tuple(LABELS.values()), "num_classes": 7, "mean": (0.5,) * 3}
    save_pretrained(ours, tmp_path, layout="transformers")
    auto = transformers.AutoModelForImageClassification if ours.num_classes else transformers.AutoModel
    theirs, info = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    x = images(ours)
    y = theirs.eval()(x)
    if ours.num_classes:
        assert_close(y.logits, ours(x))
        assert theirs.config.id2label == LABELS
    else:
        assert_close(y.pooler_output if "swin" in case else y.last_hidden_state[:, 0], ours(x))
    again, _ = load_model(tmp_path)
    assert again.config == ours.config and data_config(again)["mean"] == data_config(ours)["mean"]
    for key, tensor in again.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[key]), key


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "name, options, words",
    [
        ("swin_tiny_patch4_window7_224", dict(img_size=256), "other windows of 7x7 on a map of 64x64"),
        ("swin_tiny_patch4_window7_224", dict(img_size=(224, 448)), "other windows of 7x7 on a map of 7x14"),
        ("swin_tiny_patch4_window7_224", dict(window_size=(7, 14)), "other windows of 7x14"),
        ("swin_tiny_patch4_window7_224", dict(eps=1e-6), "transformers Swin needs eps=1e-05, not 1e-06"),
        ("pvt_tiny", dict(img_size=(64, 32)), "transformers PVT needs square images, not 64x32"),
        ("pvt_tiny", dict(patch_size=8), "transformers PVT needs patch_size=(4, 4), not (8, 8)"),
        ("pvt_tiny", dict(mlp_ratios=(8, 8, 4, 2.5)), "needs whole numbers"),
        ("twins_svt_small", {}, "layout is 'transformers'; for Twins use one of fastvit_triton, timm"),
    ],
)
def test_pyramids_that_transformers_cannot_hold_are_refused(name: str, options: dict, words: str, tmp_path: Path):
    """Oracle: one sentence that says what differs; nothing is written."""
    model = create_model(name, **options)
    assert words in failure(model, tmp_path / "a", layout="transformers", of=save_pretrained)
    assert not (tmp_path / "a").exists()


def test_timm_is_refused_what_it_cannot_build(tmp_path: Path):
    """Oracle: an epsilon that no config.json of timm can hold; nothing is written."""
    model = create_model(NAME, **SMALL, eps=1e-12)
    message = failure(model, tmp_path / "a", layout="timm", of=save_pretrained)
    assert "has eps=1e-06, not 1e-12; use --to fastvit_triton" in message and not (tmp_path / "a").exists()


SHALLOW: dict = dict(img_size=32, num_classes=7)
OF_TIMM: dict[str, tuple[str, dict]] = {
    "levit": ("levit_128s", SHALLOW | dict(img_size=64, depths=(1, 1, 1), num_heads=(2, 3, 4), key_dim=8)),
    "pit": ("pit_s_224", SHALLOW | dict(depths=(1, 1, 1), num_heads=(1, 2, 4), base_dims=(8, 8, 8))),
    "twins": ("twins_svt_small", SHALLOW | dict(patch_size=2, depths=(1, 1, 1, 1))),
    "cait": ("cait_xxs24_224", SHALLOW | dict(depth=1, depth_token_only=1, global_pool="avg")),
    "tnt": ("tnt_s_patch16_224", SHALLOW | dict(depth=1, inner_dim=12)),
    "crossvit": ("crossvit_9_240", dict(img_size=120, num_classes=7, depth=((1, 1, 0),))),
    "swin": ("swin_tiny_patch4_window7_224", SHALLOW | dict(depths=(1, 1), embed_dim=12, num_heads=(1, 2))),
}


@pytest.mark.parametrize("case", OF_TIMM)
def test_folders_of_other_models_load_in_timm(case: str, tmp_path: Path):
    """Oracle: timm's model from the folder, and ours; both give the same output."""
    name, options = OF_TIMM[case]
    ours = randomize(create_model(name, **options)).eval()
    save_pretrained(ours, tmp_path, layout="timm")
    theirs, x = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval(), images(ours)
    assert_close(theirs(x), ours(x))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "fastvit_triton"}))
    assert load_model(tmp_path)[0].config == ours.config  # from timm's names of options


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("cpvt_tiny", {}, "has no option pegs"),
        ("cait_xxs24_224", dict(act="relu"), "timm's cait_xxs24_224 has no option act"),
        ("cait_xxs24_224", dict(global_pool="map"), "has no global_pool 'map'"),
        ("levit_128s", dict(patch_size=8), "has no option patch_size"),
    ],
)
def test_options_that_timm_has_not_are_refused(name: str, options: dict, words: str, tmp_path: Path):
    """Oracle: one sentence that names the option; nothing is written."""
    message = failure(create_model(name, **options), tmp_path / "a", layout="timm", of=save_pretrained)
    assert words in message and not (tmp_path / "a").exists()


def test_a_readme_of_the_user_stays(tmp_path: Path):
    """Oracle: huggingface_hub's mixin, which writes a model card only where there is none."""
    (tmp_path / "README.md").write_text("mine")
    create_model(NAME, **SMALL).save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine" and (tmp_path / "model.safetensors").exists()


def test_push_and_pull(hub: HubServer, tmp_path: Path):
    """Oracle: the pushed model; the mixin of huggingface_hub has the same arguments."""
    model = randomize(create_model(TAG, **SMALL, num_classes=7))
    training = {"classes": list("abcdefg"), "data": "/home/me/photos", "test_accuracy": 0.912, "recipe": "deit3"}
    header = {"training": json.dumps(training)}
    assert "was not published: " in failure("me/vit", of=model.push_to_hub, token="hf_bad")
    url = model.push_to_hub("me/vit", token="hf_good", metadata=header)
    assert url.startswith(f"{hub.url}/me/vit/commit/")
    files = hub.repositories["me/vit"]["main"]
    assert set(files) >= {"README.md", "config.json", "model.safetensors"}
    card = files["README.md"].decode()
    assert all(words in card for words in ("Data set: photos", "91.2 %", "Recipe: deit3", "hf-hub:me/vit"))
    assert "/home/me" not in card
    again = VisionTransformer.from_pretrained("me/vit")
    x = images(model)
    assert torch.equal(again(x), model(x)) and not again.training and again.config == model.config
    assert VisionTransformer.from_pretrained("me/vit", num_classes=3).num_classes == 3
    assert "holds a VisionTransformer, not a Distilled" in failure(
        "me/vit", of=DistilledVisionTransformer.from_pretrained
    )
    assert model.save_pretrained(tmp_path / "vit", push_to_hub=True, token="hf_good").startswith(hub.url)
    assert set(contents(tmp_path / "vit")) == {"README.md", "config.json", "model.safetensors"}
    for name in ("from_pretrained", "save_pretrained", "push_to_hub"):
        theirs = getattr(huggingface_hub.PyTorchModelHubMixin, name)
        assert hasattr(model, name) and callable(theirs)


@pytest.mark.full
def test_the_environment_of_the_client(hub: HubServer, tmp_path: Path):
    """Oracle: a fresh process with HF_ENDPOINT and HF_HOME loads the model and imports no timm."""
    timm_folder(tmp_path / "a")
    hub.repositories["me/vit"] = {"main": contents(tmp_path / "a")}
    code = (
        "import sys, fastvit_triton as f; m, _ = f.load_model('hf-hub:me/vit'); print(m.variant, 'timm' in sys.modules)"
    )
    variables = dict(HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "home"), PYTHONPATH=str(Path(__file__).parents[1]))
    assert run_python("-c", code, **variables) == f"{NAME} False\n"
    assert (tmp_path / "home" / "hub" / "models--me--vit").is_dir()


REAL = [TAG, "deit3_small_patch16_224.fb_in22k_ft_in1k", "vit_small_patch14_dinov2.lvd142m"]
REAL += ["vit_base_patch16_siglip_224.webli", "vit_base_patch32_clip_224.openai"]


@pytest.mark.network
@pytest.mark.parametrize("name", REAL)
def test_real_checkpoints(name: str):
    """Oracle: timm's logits of a picture, from the same checkpoint on the Hub."""
    ours, theirs = create_model(name, pretrained=True).eval(), timm.create_model(name, pretrained=True).eval()
    image = picture(300, 200)
    wanted = create_transform(**resolve_data_config(model=theirs))(image)[None]
    assert_close(ours(transforms(ours)(image)[None]), theirs(wanted))
