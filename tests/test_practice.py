"""Tests of class weights, early stopping, linear probes and models with BatchNorm."""

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from agreement import normal
from commands import prints, refused
from interpreter import interpreting
from PIL import Image
from sklearn.utils.class_weight import compute_class_weight
from test_data import write_folder
from test_photos import SMALL, photographs
from test_run import contents, log, train
from torch import nn

from fastvit_triton import optimize
from fastvit_triton.cli import main
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.train import evaluate, fit, newest_state
from fastvit_triton.train.class_weights import class_weights
from fastvit_triton.train.data import TensorBatches
from fastvit_triton.train.data.folder import FolderBatches, ImageFiles
from fastvit_triton.train.data.transform import Transform
from fastvit_triton.train.frozen import freeze_backbone, has_batch_norm
from fastvit_triton.train.loss import weighted_cross_entropy
from fastvit_triton.train.outputs import BEST, WEIGHTS

COUNTS = {"ant": 12, "bee": 6, "cat": 2}


@pytest.fixture
def given(tmp_path: Path) -> dict:
    """Settings of a short run on images of 8 x 8 pixels."""
    data = str(write_folder(tmp_path / "images", per_class=4))
    return {"data": data, "model": "vit_digits_patch2_8", "img_size": 8, "batch_size": 4, "epochs": 3, "warmup": 0.1}


@pytest.mark.fast
@pytest.mark.parametrize("soft", [False, True])
def test_weighted_cross_entropy(soft: bool):
    """Oracle: PyTorch's weighted terms, and the equation; micro-batches add up to the mean over the whole batch."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 5, dtype=torch.float64, generator=generator)
    weights = 0.1 + torch.rand(5, dtype=torch.float64, generator=generator)
    numbers = torch.randint(0, 5, (12,), generator=generator)
    blended = torch.rand(12, 5, dtype=torch.float64, generator=generator).softmax(1)
    targets = blended if soft else numbers
    whole = weighted_cross_entropy(logits, targets, weights)
    terms = F.cross_entropy(logits, targets, weights, reduction="none")
    torch.testing.assert_close(whole, terms.mean())
    probabilities = blended if soft else F.one_hot(numbers, 5)
    torch.testing.assert_close(whole, -(weights * probabilities * logits.log_softmax(1)).sum() / 12)
    parts = zip(logits.split(5), targets.split(5), strict=True)
    sums = [weighted_cross_entropy(z, y, weights) * len(z) for z, y in parts]
    torch.testing.assert_close(whole, torch.stack(sums).sum() / 12)
    assert not torch.isclose(whole, F.cross_entropy(logits, targets))


@pytest.mark.fast
def test_class_weights():
    """Oracle: scikit-learn's balanced weights; of any weights the mean over the images is 1 and ratios are kept."""
    targets = np.repeat([0, 1, 2], list(COUNTS.values()))
    balanced = class_weights("balanced", tuple(COUNTS), targets.tolist())
    expected = compute_class_weight("balanced", classes=np.arange(3), y=targets)
    assert torch.equal(balanced, torch.tensor(expected).float())
    chosen = class_weights({"cat": 8, "ant": 2}, tuple(COUNTS), targets.tolist())
    torch.testing.assert_close(chosen[targets].mean(), torch.tensor(1.0))
    torch.testing.assert_close(chosen / chosen[1], torch.tensor([2.0, 1.0, 8.0]))
    with pytest.raises(ValueError, match="class_weights names bear; the nearest classes are bee, "):
        class_weights({"bear": 2}, tuple(COUNTS), targets.tolist())


@pytest.mark.full
def test_a_run_keeps_its_class_weights(tmp_path: Path, capsys):
    """Oracle: the file's weights in the state, after the file was removed; a run with the weights that balance is the
    balanced run, bit by bit, and a resumed run is the whole one."""
    folder = photographs(tmp_path / "photographs", COUNTS)
    weights = tmp_path / "weights.json"
    weights.write_text('{"bee": 2, "cat": 6}')  # the training images are 6, 3 and 1
    common = ["train", "--data", str(folder), "--val-split", "0.5", "--epochs", "2", *SMALL]
    assert main([*common, "--out", str(tmp_path / "file"), "--class-weights", str(weights)]) == 0
    weights.unlink()
    settings = newest_state(tmp_path / "file")[0]["settings"]
    assert settings["class_weights"] == {"bee": 2, "cat": 6}
    for name in ("balanced", None):
        train(tmp_path / str(name), settings | {"class_weights": name}, epochs=2)
    train(tmp_path / "parts", settings, epochs=1)
    train(tmp_path / "parts", {}, resume=True, epochs=2)
    found = {name: contents(tmp_path / name / WEIGHTS)[1] for name in ("file", "balanced", "parts", "None")}
    assert found["file"] == found["balanced"] == found["parts"] != found["None"]
    for text, sentence in {
        '{"bee": 0}': "the weight of 'bee' is 0",
        "[1, 2]": "a dictionary",
        "{": "Expecting property name",
    }.items():
        weights.write_text(text)
        assert sentence in refused(capsys, *common, "--class-weights", weights)
    weights.write_text(json.dumps({"bear": 1}))
    words = ["--out", tmp_path / "refused", "--class-weights"]
    assert "the nearest classes are bee" in refused(capsys, *common, *words, weights)
    other = ["--loss", "bce", "--label-smoothing", "0"]
    assert "needs loss 'softmax'" in refused(capsys, *common, *words, "balanced", *other)
    assert "cannot be read: No such file" in refused(capsys, *common, *words, tmp_path / "none.json")


@pytest.mark.full
def test_patience_stops_a_run(given: dict, tmp_path: Path, capsys):
    """Oracle: with a rate that changes nothing, the first evaluation is the best, so epoch 1 + patience is the last;
    also of a run that was interrupted in between, and a stopped run goes on only with more patience."""
    given |= {"lr": 1e-30, "epochs": 6, "patience": 2}
    train(tmp_path / "whole", given)
    train(tmp_path / "parts", given, epochs=2)
    assert len(log(tmp_path / "parts")) == 2
    train(tmp_path / "parts", {}, resume=True)
    train(tmp_path / "parts", {}, resume=True)
    assert log(tmp_path / "parts") == log(tmp_path / "whole") and len(log(tmp_path / "whole")) == 3
    assert contents(tmp_path / "parts" / WEIGHTS) == contents(tmp_path / "whole" / WEIGHTS)
    assert (tmp_path / "whole" / BEST).exists()
    assert main(["train", "--out", str(tmp_path / "parts"), "--resume", "--patience", "4", "--workers", "0"]) == 0
    assert "stopped 1 epochs early; best.safetensors" in capsys.readouterr().out and len(log(tmp_path / "parts")) == 5
    assert "digits has one after the last" in refused(capsys, "train", "--patience", "2", "--out", tmp_path / "digits")


class Classifier(nn.Module):
    """A backbone with dropout and statistics, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.5))
        self.fc = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.body(x))


@pytest.mark.fast
def test_a_frozen_backbone_gives_fixed_features():
    """Oracle: the same head, trained alone on the features that the backbone computes in evaluation mode."""
    model = Classifier()
    with torch.no_grad():
        model(3 + torch.randn(50, 6))  # statistics of their own
    before = {name: t.clone() for name, t in model.state_dict().items()}
    batches = [(torch.randn(8, 6), torch.randint(0, 3, (8,))) for _ in range(3)]
    with torch.no_grad():
        features = [(model.eval().body(images), targets) for images, targets in batches]
    head = nn.Linear(8, 3)
    head.load_state_dict(model.fc.state_dict())

    def run(module: nn.Module, data: list, **options) -> None:
        trained = [p for p in module.parameters() if p.requires_grad]
        test = partial(evaluate, batches=data)
        list(fit(module, data, torch.optim.SGD(trained), lambda step: 0.1, epochs=2, test=test, **options))

    run(model, batches, frozen=freeze_backbone(model))
    run(head, features)
    for name, t in model.state_dict().items():
        assert torch.equal(t, before[name]) != name.startswith("fc."), name
    assert torch.equal(model.fc.weight, head.weight) and model.fc.training and not model.body[1].training
    with pytest.raises(ValueError, match="Linear has no head"):
        freeze_backbone(nn.Linear(2, 2))


@pytest.mark.full
def test_a_run_trains_the_head_alone(given: dict, tmp_path: Path, capsys):
    """Oracle: of the weights before and after, only those of the head differ; a resumed run equals the whole one."""
    given |= {"freeze": "backbone", "drop_path_rate": 0.3, "mixup": 0.2, "layer_decay": 0.7}
    run = train(tmp_path / "whole", given, epochs=3)
    train(tmp_path / "one", given, epochs=1)
    train(tmp_path / "parts", given, epochs=1)
    train(tmp_path / "parts", {}, resume=True, epochs=3)
    weights = {name: contents(tmp_path / name / WEIGHTS)[1] for name in ("whole", "one", "parts")}
    assert weights["whole"] == weights["parts"]
    changed = {name for name, bits in weights["one"].items() if bits != weights["whole"][name]}
    assert changed == {name for name, p in run.trainer.model.named_parameters() if p.requires_grad}
    assert changed == {"head.weight", "head.bias"}
    words = ["--recipe", "mae-pretrain", "--data", given["data"], "--freeze", "backbone", "--out", tmp_path / "mae"]
    assert "freeze trains the head of a classifier" in refused(capsys, "train", *words, "--workers", "0")
    words = ["--data", given["data"], "--model", "vit_digits_patch2_8", "--img-size", "8", "--epochs", "1"]
    words += ["--freeze", "backbone", "--workers", "0"]
    for name, weights in (("a", []), ("b", ["--weights", str(tmp_path / "a")])):
        assert main(["train", *words, *weights, "--out", str(tmp_path / name)]) == 0
        assert ("the rest stays random; give pretrained --weights" in capsys.readouterr().out) == (not weights)


def test_a_converted_backbone_can_be_frozen():
    """Oracle: float64; the error of head gradients by the kernels is at most twice eager's, and one rounding."""
    options = dict(img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5)
    model = normal(timm.models.vision_transformer.VisionTransformer(**options), 0.2)
    images, targets = torch.randn(3, 3, 16, 16), torch.tensor([0, 1, 4])

    def gradients(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        module.train()
        for part in freeze_backbone(module):
            part.training = False
        module.zero_grad()
        F.cross_entropy(module(x), targets).backward()
        assert {name for name, p in module.named_parameters() if p.grad is not None} == {"head.weight", "head.bias"}
        return [p.grad.double() for p in module.head.parameters()]

    eager = gradients(model, images)
    exact = [g.clone() for g in gradients(model.double(), images.double())]
    optimize(model.float())
    with interpreting(), using_backend("triton"):
        ours = gradients(model, images)
    for got, plain, want in zip(ours, eager, exact, strict=True):
        allowed = 2 * (plain - want).abs().max() + torch.finfo(torch.float32).eps * want.abs().max()
        assert 0 < want.abs().max() and (got - want).abs().max() <= allowed


@pytest.mark.fast
@pytest.mark.parametrize("kind", ["files", "tensors"])
def test_a_last_batch_of_one_image_is_left_out(kind: str, tmp_path: Path):
    """Oracle: counts by hand: batches of four; one of two images stays, and one image alone; the rest of an epoch is
    the same from any batch on."""

    def batches(count: int) -> TensorBatches | FolderBatches:
        transform = Transform((8, 8), (0.5,), (0.5,))
        if kind == "tensors":
            return TensorBatches(torch.rand(count, 1, 8, 8), torch.zeros(count), transform, 4, augment=torch.clone)
        files = [tmp_path / f"{i}.png" for i in range(count)]
        for file in files:
            Image.new("L", (8, 8)).save(file)
        return FolderBatches(tmp_path, ImageFiles(files, [0] * count, ("a",)), transform, batch_size=4, crop={})

    for count, sizes in {9: [4, 4], 10: [4, 4, 2], 8: [4, 4], 1: [1], 5: [4]}.items():
        made = batches(count)
        assert [len(images) for images, _ in made] == [4] * (count // 4) + [count % 4] * (count % 4 > 0)
        made.leave_out_single()
        assert [len(images) for images, _ in made] == sizes and len(made) == len(sizes)
    left = set()
    for seed in range(20):
        orders = []
        for start in (0, 1):
            torch.manual_seed(seed)
            made = batches(5)
            made.leave_out_single()
            orders.append([made.indices for _ in made.iter_from(start)])
        assert orders[1] == orders[0][1:]
        left |= {*range(5)} - set(orders[0][0])
    assert left == {*range(5)}  # another in each epoch


@pytest.mark.full
def test_batchnorm_trains_without_a_batch_of_one_image(tmp_path: Path, capsys):
    """Oracle: five images in batches of four, of a model whose head has BatchNorm, are one step; of one image each, a
    sentence; a frozen BatchNorm takes one image."""
    for i in range(6):
        (tmp_path / "data" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 64), (i, 40 * i, 9)).save(tmp_path / "data" / "ab"[i % 2] / f"{i}.png")
    for part in ("train", "val"):
        shutil.copytree(tmp_path / "data", tmp_path / "divided" / part)
    (tmp_path / "divided" / "train" / "a" / "0.png").unlink()
    given = ["train", "--data", str(tmp_path / "divided"), "--model", "levit_128s", "--img-size", "64"]
    given += ["--allow", "shared-images", "--epochs", "1", "--workers", "0", "--device", "cpu", "--out"]
    text = prints(capsys, *given, tmp_path / "out", "--batch-size", "4")
    assert "1 epoch of 1 step\n" in text
    assert "fastvit-triton export" in text and "fastvit-triton explain" in text
    sentence = refused(capsys, *given, tmp_path / "one", "--batch-size", "1")
    assert "BatchNorm needs two images or more at a time, and got 1; raise batch_size" in sentence
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    assert has_batch_norm(model) and not has_batch_norm(model, [model[0]]) and not has_batch_norm(model[1])
