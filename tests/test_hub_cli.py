"""Commands on pretrained weights. Oracle: timm's model and transform on the same images."""

import json
import re
import shutil
from pathlib import Path

import pytest
import timm
import torch
from test_data import write_folder
from test_hub import NAME, SMALL, TAG, contents, hub, picture, timm_folder  # noqa: F401  (hub is a fixture)
from timm.data import create_transform, resolve_data_config

from fastvit_triton import create_model, data_config, list_models, load_model
from fastvit_triton.cli import main
from fastvit_triton.models.weights.pretrained import imagenet_classes
from fastvit_triton.train.checkpoint import load_state
from fastvit_triton.train.outputs import STATE


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A small timm model of 1000 classes with the configuration of its tag."""
    theirs = timm_folder(tmp_path / "timm", TAG)
    picture(90, 60).save(tmp_path / "photo.png")
    assert theirs.pretrained_cfg["mean"] == (0.5, 0.5, 0.5)
    return tmp_path / "timm"


@torch.no_grad()
def best(folder: Path, image: Path, **changes) -> tuple[str, float]:
    """timm's name of the best class, and its probability."""
    from PIL import Image

    theirs = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    config = resolve_data_config(model=theirs) | changes
    config["input_size"] = (3, 32, 32)
    share, place = theirs(create_transform(**config)(Image.open(image))[None])[0].softmax(0).max(0)
    return list(imagenet_classes().values())[place], float(share)


def said(text: str) -> tuple[str, float]:
    """The first class of a line of predict, and its probability."""
    name, _, share = text.splitlines()[-1].partition(": ")[2].partition(" %")[0].rpartition(" (")
    return name, float(share) / 100


def run(capsys: pytest.CaptureFixture, *words: object, code: int = 0) -> str:
    capsys.readouterr()
    assert main([str(word) for word in words]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def test_predict_answers_as_timm(snapshot: Path, capsys: pytest.CaptureFixture):
    """Oracle: timm, for a snapshot, its file, and conversions of it; before, the answer was a number with 0.2 %."""
    image, out = snapshot.parent / "photo.png", snapshot.parent / "out.safetensors"
    wanted = best(snapshot, image)
    run(capsys, "convert", snapshot, out, "--to", "fastvit_triton")
    run(capsys, "convert", snapshot, out.with_suffix(""), "--to", "timm")
    for source in (snapshot, snapshot / "model.safetensors", out, out.with_suffix("")):
        name, share = said(run(capsys, "predict", image, "--checkpoint", source))
        assert name == wanted[0] and share == pytest.approx(wanted[1], abs=0.0006), source
    name, share = said(run(capsys, "predict", image, "--checkpoint", out, "--mean", "0.4,0.5,0.6", "--std", "0.5"))
    changed = best(snapshot, image, mean=(0.4, 0.5, 0.6))
    assert name == changed[0] and share == pytest.approx(changed[1], abs=0.0006) and changed != wanted
    main(["predict", str(image), "--checkpoint", str(out), "--mean", "0.4,0.5,0.6"])
    warning = "--mean is 0.4,0.5,0.6, but the weights were trained with 0.5,0.5,0.5; 0.4,0.5,0.6 is used"
    assert capsys.readouterr().err == f"fastvit-triton: warning: {warning}\n"
    for text in ("red", "1,2,3", "0.1,0.2"):
        assert f"--mean is {text}; use one number" in run(capsys, "predict", image, "--mean", text, code=2)
    assert "--std is 0; use" in run(capsys, "predict", image, "--std", "0", code=2)


def test_what_commands_refuse(snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: one sentence that names the option or the word as it was typed."""
    assert "no pretrained weights match 'nothing';" in run(capsys, "models", "--pretrained", "nothing", code=2)
    written = run(capsys, "convert", snapshot, tmp_path / "x.pt", "--to", "timm", code=2)
    assert "x.pt; name a file that ends in .safetensors, or a folder" in written and not (tmp_path / "x.pt").exists()
    (tmp_path / "file").write_text("")
    refused = run(capsys, "train", "--out", tmp_path / "file", "--epochs", 1, code=1)
    assert f"--out {tmp_path / 'file'} cannot be written: File exists; give another folder" in refused


def test_models_with_tags(capsys: pytest.CaptureFixture):
    """Oracle: list_models(pretrained=True), and timm's classes and licences."""
    for words, pattern in (((), "*"), (("dinov2",), "*dinov2*")):
        head, *rows = run(capsys, "models", "--pretrained", *words).splitlines()
        assert head.split() == ["name", "image", "classes", "licence", "top-1"]
        assert [row.split()[0] for row in rows] == list_models(pattern, pretrained=True)
    cfg = timm.get_pretrained_cfg(rows[0].split()[0])
    assert rows[0].split()[1:] == ["518×518", str(cfg.num_classes), cfg.license]
    assert "no pretrained weights match" in run(capsys, "models", "--pretrained", "resnet", code=2)


def test_bare_weights_need_a_name(snapshot: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """Oracle: the tag's configuration, which --model names; a head of another size is named, not dropped; and predict
    takes the file after the command that its error names."""
    alone, out = snapshot.parent / "alone.safetensors", snapshot.parent / "out"
    shutil.copy(snapshot / "model.safetensors", alone)
    small = timm_folder(snapshot.parent / "whole", depth=12, num_classes=7, embed_dim=192, img_size=224, patch_size=16)
    whole = snapshot.parent / "whole" / "model.safetensors"
    (snapshot.parent / "whole" / "config.json").unlink()
    assert "does not say which model it holds" in run(capsys, "predict", "a.png", "--checkpoint", alone, code=2)
    advice = re.search("fastvit-triton (.*) NAME", run(capsys, "predict", "a.png", "--checkpoint", whole, code=2))
    monkeypatch.chdir(snapshot.parent)
    run(capsys, *advice[1].split(), NAME, "--num-classes", 7)
    assert "photo.png: " in run(capsys, "predict", "photo.png", "--checkpoint", "new.safetensors")
    wrong = run(capsys, "convert", whole, out, "--to", "timm", "--model", NAME, code=2)
    assert "has no head.weight for 1,000 classes; give --num-classes" in wrong and not out.exists()
    words = ("--to", "timm", "--model", f"{NAME}.augreg_in21k", "--num-classes", 7)
    assert "mean 0.5,0.5,0.5" in run(capsys, "convert", whole, out, *words)
    theirs = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    x = torch.randn(1, 3, 224, 224)
    assert torch.equal(theirs(x), small(x)) and theirs.pretrained_cfg["mean"] == [0.5, 0.5, 0.5]


def test_convert_to_transformers_keeps_images_and_names(snapshot: Path, capsys: pytest.CaptureFixture):
    """Oracle: transformers' own classes read the folder; pixels differ by their resampling only."""
    import transformers
    from PIL import Image

    out = snapshot.parent / "out"
    run(capsys, "convert", snapshot, out, "--to", "transformers")
    theirs = transformers.AutoModelForImageClassification.from_pretrained(out).eval()
    assert list(theirs.config.id2label.values()) == list(imagenet_classes().values())
    ours, _ = load_model(out)
    assert data_config(ours) == data_config(load_model(snapshot)[0])
    processor = transformers.AutoImageProcessor.from_pretrained(out)
    pixels = processor(Image.open(snapshot.parent / "photo.png"), return_tensors="pt")["pixel_values"]
    assert torch.equal(ours.eval()(pixels), theirs(pixels).logits) and pixels.shape == (1, 3, 32, 32)


@pytest.mark.full
def test_evaluate_and_explain(snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: folders named by synset are the classes of ImageNet; the accuracy counts timm's answers."""
    names = list(imagenet_classes())
    answer = best(snapshot, snapshot.parent / "photo.png")[0]
    right = names[list(imagenet_classes().values()).index(answer)]
    for synset in (right, "n15075141"):
        (tmp_path / "data" / "val" / synset).mkdir(parents=True)
        shutil.copy(tmp_path / "photo.png", tmp_path / "data" / "val" / synset / "a.png")
    text = run(capsys, "evaluate", "--checkpoint", snapshot, "--data", tmp_path / "data", "--workers", 0)
    assert "1 of 2 test images are correct" in text and answer in text
    pytest.importorskip("matplotlib")
    words = (tmp_path / "photo.png", "--out", tmp_path / "report", "--no-test", "--workers", 0)
    run(capsys, "explain", "--checkpoint", snapshot, *words)
    assert answer in (tmp_path / "report" / "report.html").read_text()


@pytest.mark.full
def test_train_follows_its_weights(hub, tmp_path: Path, capsys: pytest.CaptureFixture):  # noqa: F811
    """Oracle: the configuration of the tag, in the settings, the transform and the files of the run."""
    timm_folder(tmp_path / "timm", TAG)
    hub.repositories["me/vit"] = {"main": contents(tmp_path / "timm")}
    write_folder(tmp_path / "photos")
    words = ["--data", tmp_path / "photos", "--epochs", 1, "--batch-size", 4, "--workers", 0, "--device", "cpu"]
    out = tmp_path / "run"
    text = run(capsys, "train", *words, "--weights", "hf-hub:me/vit", "--out", out, "--std", "0.25")
    assert f"{NAME} at 32 x 32 pixels, " in text and "recipe folder, from hf-hub:me/vit\n" in text
    settings = load_state(out / STATE)["settings"]
    assert (settings["model"], settings["img_size"], settings["weights"]) == (NAME, 32, "hf-hub:me/vit")
    assert (settings["mean"], settings["std"]) == ((0.5,) * 3, (0.25,) * 3)
    assert (settings["eval_crop"], settings["crop_mode"], settings["interpolation"]) == (0.9, "center", "bicubic")
    model, header = load_model(out)
    assert data_config(model)["std"] == (0.25,) * 3 and data_config(model)["crop_mode"] == "center"
    assert tuple(json.loads(header["training"])["classes"]) == model.pretrained_cfg["label_names"]
    run(capsys, "train", "--out", out, "--resume")
    run(capsys, "convert", out, tmp_path / "folder", "--to", "timm")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True)
    assert theirs.pretrained_cfg["std"] == [0.25] * 3 and theirs.num_classes == model.num_classes
    assert "| accuracy | " in (tmp_path / "folder" / "README.md").read_text()
    refused = run(capsys, "train", *words, "--model", TAG, code=2)
    assert f"use --weights {TAG} for pretrained weights, or --model {NAME}" in refused
    assert create_model(f"local-dir:{tmp_path / 'folder'}").config.depth == SMALL["depth"]


@pytest.mark.full
def test_train_starts_from_a_tag(hub, tmp_path: Path, capsys: pytest.CaptureFixture):  # noqa: F811
    """Oracle: a run without progress, at a rate of 1e-30, has timm's weights but a new head; an own transform and
    layer decay go with them."""
    theirs = timm_folder(tmp_path / "timm", TAG, img_size=224, patch_size=16, embed_dim=192, depth=12)
    hub.repositories[f"timm/{TAG}"] = {"main": contents(tmp_path / "timm")}
    words = ["--data", write_folder(tmp_path / "photos", per_class=1), "--epochs", 1, "--batch-size", 2, "--workers", 0]
    words += ["--device", "cpu", "--lr", "1e-30", "--layer-decay", 0.75]
    words += ["--transform", "torchvision.transforms.v2:RandomHorizontalFlip"]
    text = run(capsys, "train", *words, "--weights", TAG, "--out", tmp_path / "run", code=2)
    assert "RandomHorizontalFlip fails on" in text and "the model needs 224x224" in text
    run(capsys, "train", *words[:-2], "--weights", TAG, "--out", tmp_path / "run")
    model, _ = load_model(tmp_path / "run")
    for name, tensor in theirs.state_dict().items():
        if not name.startswith("head."):
            torch.testing.assert_close(model.state_dict()[name], tensor, msg=name)
    assert model.head.weight.shape == (2, 192)
