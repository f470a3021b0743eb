"""Tests of `train`, `evaluate` and `predict` with classifiers of timm and transformers; nothing is downloaded."""

import json
import re
from pathlib import Path

import pytest
import timm
import torch
import transformers
from commands import accuracy, refused
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_photos import photographs
from test_run import contents, log, train

from fastvit_triton.cli import main
from fastvit_triton.cli.loading import load_trained
from fastvit_triton.cli.other_models import ImageClassifier
from fastvit_triton.convert import revert
from fastvit_triton.models.weights.load import load_model
from fastvit_triton.train import newest_state
from fastvit_triton.train.outputs import WEIGHTS

COUNTS = {"ant": 8, "bee": 6, "cat": 4}
VIT = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, patch_size=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photographs(tmp_path_factory.mktemp("photographs") / "flat", COUNTS)


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of transformers: a classifier of five classes with its preprocessing."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("hf")
    config = transformers.ViTConfig(image_size=16, num_labels=5, **VIT)
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    facts = {"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}}
    facts |= {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.5, 0.5, 0.25], "do_resize": True, "do_normalize": True}
    (folder / "preprocessor_config.json").write_text(json.dumps(facts))
    return folder


def settings(folder: Path, model: str, **others) -> dict:
    given = {"data": str(folder), "val_split": 0.3, "model": model, "img_size": 16, "batch_size": 7, "epochs": 2}
    return given | {"ema_decay": 0.5, "warmup": 0.1} | others


def built(file: Path) -> torch.nn.Module:
    """The model that its own package makes of a file of weights, in evaluation mode."""
    with safe_open(file, "pt") as opened:
        origin = json.loads(opened.metadata()["origin"])
    package, _, name = origin["model"].partition(":")
    if package == "timm":
        options = {key: value for key, value in origin["options"].items() if key in ("num_classes", "in_chans")}
        size = {"img_size": 16} if "vit" in name else {}
        return timm.create_model(name, checkpoint_path=str(file), **options, **size).eval()
    config = transformers.ViTConfig.from_dict(origin["config"])
    model = transformers.ViTForImageClassification(config)
    model.load_state_dict(load_file(file))
    return ImageClassifier(model).eval()


@pytest.mark.full
@pytest.mark.parametrize("name", ["timm:test_vit", "timm:test_resnet", "hf"])
def test_models_of_other_packages_are_trained(name: str, folder: Path, hf: Path, tmp_path: Path, capsys):
    """Oracle: the package that loads the file itself; a resumed run is the whole one, bit by bit; the log."""
    given = settings(folder, name if ":" in name else f"hf:{hf}")
    train(tmp_path / "whole", given)
    train(tmp_path / "parts", given, epochs=1)
    train(tmp_path / "parts", {}, resume=True, epochs=2)
    assert contents(tmp_path / "parts" / WEIGHTS)[1] == contents(tmp_path / "whole" / WEIGHTS)[1]
    run = load_trained(str(tmp_path / "whole"))
    assert run.classes == tuple(COUNTS) and run.data == str(folder)
    images = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        ours = run.model.eval()(images)
        assert torch.equal(built(tmp_path / "whole" / WEIGHTS)(images), ours) and ours.shape == (3, 3)
        assert ours.std() > 0
    revert(run.model)
    assert run.model.origin["model"] == given["model"]
    assert main(["evaluate", "--checkpoint", str(tmp_path / "whole"), "--workers", "0"]) == 0
    found = re.search(r"(\d+) of 5 test images are correct", capsys.readouterr().out)
    assert int(found[1]) / 5 == accuracy(tmp_path / "whole") and len(log(tmp_path / "whole")) == 2
    assert main(["predict", "--checkpoint", str(tmp_path / "whole"), str(folder / "ant")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == COUNTS["ant"]
    with pytest.raises(ValueError, match="holds a model of another package"):
        load_model(tmp_path / "whole")


@pytest.mark.full
def test_pretrained_weights_of_another_package(folder: Path, hf: Path, tmp_path: Path, monkeypatch):
    """Oracle: its package's own tensors, size, mean and deviation; a new head has as many classes as the data."""
    options = ["--val-split", "0.3", "--batch-size", "6", "--workers", "0", "--freeze", "backbone", "--epochs", "1"]
    common = ["train", "--data", str(folder), *options]
    assert main([*common, "--weights", f"hf:{hf}", "--out", str(tmp_path / "hf")]) == 0
    found = load_file(tmp_path / "hf" / WEIGHTS)
    saved = transformers.ViTForImageClassification.from_pretrained(hf).state_dict()
    kept = [key for key in found if not key.startswith("classifier.")]
    assert len(kept) == len(saved) - 2 and all(torch.equal(found[key], saved[key]) for key in kept)
    assert found["classifier.weight"].shape == (3, 32)
    transform = load_trained(str(tmp_path / "hf")).transform
    assert transform.size == (16, 16) and transform.mean == (0.4, 0.5, 0.6) and transform.std == (0.5, 0.5, 0.25)

    asked = []
    create = timm.create_model
    monkeypatch.setattr(
        timm, "create_model", lambda name, pretrained, **kept: asked.append((name, pretrained)) or create(name, **kept)
    )
    assert main([*common, "--weights", "timm:test_vit", "--out", str(tmp_path / "timm")]) == 0
    assert asked == [("test_vit", True), ("test_vit", False)]  # then the run is read, to see what else takes it
    state = newest_state(tmp_path / "timm")[0]["settings"]
    cfg = timm.get_pretrained_cfg("test_vit").to_dict()
    assert state["model"] == "timm:test_vit" and state["img_size"] == cfg["input_size"][1]
    assert state["mean"] == cfg["mean"] and state["eval_crop"] == cfg["crop_pct"]
    train(tmp_path / "timm", {}, resume=True, epochs=1)
    assert asked[2:] == [("test_vit", False)]

    again = ["--weights", str(tmp_path / "timm"), "--out", str(tmp_path / "again")]
    assert main([*common, *again]) == 0
    first, second = (contents(tmp_path / name / WEIGHTS)[1] for name in ("timm", "again"))
    assert {key for key in first if first[key] != second[key]} == {"head.weight", "head.bias"}
    assert newest_state(tmp_path / "again")[0]["settings"]["model"] == "timm:test_vit"


def test_what_is_refused(folder: Path, hf: Path, tmp_path: Path, capsys):
    """Oracle: one sentence that names the option, the model or the package."""
    common = ["train", "--data", folder, "--val-split", "0.3", "--workers", "0", "--out", tmp_path / "out"]
    (tmp_path / "empty").mkdir()
    for words, sentence in {
        ("--model", "timm:test_vt"): "timm has no model called 'test_vt'; the nearest are test_vit",
        ("--model", f"hf:{tmp_path}/none"): "is no folder, and no name on the Hub",
        ("--model", f"hf:{tmp_path}/empty"): "is a folder without config.json",
        ("--model", "timm:test_vit", "--weights", "timm:test_vit2"): "are not those of --model timm:test_vit",
        ("--model", "timm:test_vit", "--weights", f"hf:{hf}"): "are not those of --model timm:test_vit",
        (
            "--model",
            "timm:test_vit",
            "--recipe",
            "mae-pretrain",
        ): "is trained as a classifier, and not by loss 'pixels'",
        ("--model", "timm:test_vit", "--mixup", "0", "--cutmix", "0", "--mixtoken", "1"): "use --mixup or --cutmix",
        ("--model", "timm:test_vit", "--img-size", "8"): "cannot be built so: Input height (8) should be divisible",
    }.items():
        assert sentence in refused(capsys, *common, *words), words
    text = transformers.BertConfig(num_hidden_layers=1)
    text.save_pretrained(tmp_path / "text")
    sentence = refused(capsys, *common, "--model", f"hf:{tmp_path / 'text'}")
    assert "is a bert, which transformers has no image classifier for" in sentence


def test_damaged_origins_are_refused(folder: Path, tmp_path: Path):
    """Oracle: a sentence for each change of the header; a name in it never leads to the Hub."""
    train(tmp_path, settings(folder, "timm:test_vit", epochs=1), epochs=1)
    header, tensors = contents(tmp_path / WEIGHTS)[0], load_file(tmp_path / WEIGHTS)
    origin = json.loads(header["origin"])
    for change, sentence in {
        "timm:hf-hub:someone/model": "timm has no model called 'hf-hub:someone/model'",
        "timm:test_vit2": "does not fit the timm:test_vit2 that timm builds here",
        "os:system": "a header that train did not write",
    }.items():
        changed = header | {"origin": json.dumps(origin | {"model": change})}
        save_file(tensors, tmp_path / WEIGHTS, {key: value for key, value in changed.items() if key != "checksum"})
        with pytest.raises(ValueError, match=re.escape(sentence)):
            load_trained(str(tmp_path))
