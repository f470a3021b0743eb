"""Tests of what users name as module:attribute, transforms and optimisers, and of Muon."""

import copy
import pickle
import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import test_train
import timm
import torch
from commands import refused
from PIL import Image
from test_data import write_folder
from torch import nn
from torchvision.transforms import v2

from fastvit_triton.cli import main
from fastvit_triton.models.weights import load_model
from fastvit_triton.train import checkpoint
from fastvit_triton.train.build import build_optimizer
from fastvit_triton.train.data.custom import CustomTransform
from fastvit_triton.train.data.transform import Transform
from fastvit_triton.train.muon import MuonAdamW, muon_adamw
from fastvit_triton.train.object_reference import resolve
from fastvit_triton.train.optim import set_lr
from fastvit_triton.train.outputs import STATE, WEIGHTS
from fastvit_triton.train.recipes import FOLDER
from fastvit_triton.train.sources import load

RECIPE = replace(FOLDER, img_size=8, batch_size=4)
TRANSFORM = Transform((8, 8), (0.5,) * 3, (0.25,) * 3)

# Named below as test_own_objects:crop and so on.
crop = v2.Compose([v2.RandomResizedCrop((8, 8)), v2.RandomHorizontalFlip(), v2.ColorJitter(0.5)])
floats = v2.Compose([crop, v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
normalised = v2.Compose([floats, v2.Normalize((0.5,) * 3, (0.25,) * 3)])
number = 3


def noisy(image: Image.Image) -> torch.Tensor:
    """Draws from each of the three generators."""
    pixels = torch.rand(3, 8, 8) / 4 + random.random() / 4 + np.random.rand() / 4
    return pixels + image.getpixel((0, 0))[0] / 1024


def broken(image: Image.Image) -> None:
    """Fails."""
    raise KeyError("mask")


@pytest.mark.parametrize(
    "code, words",
    [
        ("x = 1\nraise RuntimeError('no\\nyes')", "RuntimeError: no (broken_module.py, line 2)"),
        ("def f(:", "invalid syntax (broken_module.py, line 1)"),
        ("import nowhere", "No module named 'nowhere'"),
        ("1 / 0", "ZeroDivisionError: division by zero (broken_module.py, line 1)"),
    ],
)
def test_modules_that_fail_are_named_in_one_sentence(code, words, tmp_path, monkeypatch):
    """Oracle: the error of the module's code and where it is; before, most of them were tracebacks of a command."""
    (tmp_path / "broken_module.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError) as error:
        resolve("--transform", "broken_module:f")
    assert str(error.value) == f"--transform is broken_module:f, and broken_module cannot be imported: {words}"


class Halved(torch.optim.SGD):
    """An optimiser without weight decay, with half the rate."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr / 2)


class Strict(torch.optim.SGD):
    """An optimiser that needs another argument."""

    def __init__(self, params, lr, rank):
        super().__init__(params, lr=lr)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "images", per_class=4)


def test_a_reference_is_an_object():
    """Oracle: the objects; a nested attribute; modules of the working directory; the sentences."""
    assert resolve("x", "torch.optim:SGD") is torch.optim.SGD
    assert resolve("x", "torch.nn:Linear.forward") is nn.Linear.forward
    for given, sentence in (
        ("torch", "x is 'torch'; use module:attribute"),
        (":a", "x is ':a'; use module:attribute"),
        ("torch:", "x is 'torch:'; use module:attribute"),
        ("../a:b", "use module:attribute"),
        ("no.such:a", "x is no.such:a, and no.such cannot be imported: No module named 'no'"),
        ("torch:no.such", "x is torch:no.such, but torch has no attribute no.such"),
    ):
        with pytest.raises(ValueError) as error:
            resolve("x", given)
        assert sentence in str(error.value) and "\n" not in str(error.value)


def test_modules_of_the_working_directory_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Oracle: a file written there."""
    (tmp_path / "their_own_module.py").write_text("value = 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert resolve("x", "their_own_module:value") == 7


@pytest.mark.parametrize("name", ["crop", "floats"])
def test_a_transform_equals_itself_with_the_seed(name: str):
    """Oracle: the transform called by hand with torch's generator at the seed, and normalised; the states are kept."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8))
    custom = CustomTransform(f"test_own_objects:{name}")
    before = torch.get_rng_state()
    found = custom(image, 5, TRANSFORM)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    pixels = v2.functional.to_dtype(v2.functional.to_image(globals()[name](image)), torch.float32, scale=True)
    torch.testing.assert_close(found, (torch.as_tensor(pixels) - 0.5) / 0.25)
    assert type(found) is torch.Tensor and not torch.equal(found, custom(image, 6, TRANSFORM))


def test_a_class_is_constructed_and_grey_images_stay_grey():
    """Oracle: a transform of torchvision by name, and the shape of one channel."""
    custom = CustomTransform("torchvision.transforms.v2:Grayscale")
    grey = Transform((9, 9), (0.5,), (0.25,))
    assert custom(Image.new("RGB", (9, 9), "red"), 0, grey).shape == (1, 9, 9)


def test_batches_do_not_depend_on_workers(folder: Path):
    """Oracle: the same run without a worker and with two; the transform's draws are seeded by image."""
    epochs = []
    for workers in (0, 2):
        torch.manual_seed(3)
        data = load(str(folder), RECIPE, workers=workers, custom="test_own_objects:noisy")
        random.seed(workers)
        np.random.seed(workers)
        epochs.append(torch.cat([images for images, _ in data.train]))
        assert all(torch.equal(a, b) for (a, _), (b, _) in zip(data.test, load(str(folder), RECIPE).test, strict=True))
    assert torch.equal(*epochs)
    custom = CustomTransform("test_own_objects:noisy")
    assert pickle.loads(pickle.dumps(custom)).name == custom.name


@pytest.mark.full
def test_a_run_keeps_its_transform(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: an uninterrupted run, bit for bit, of random crops; a state alone imports nothing."""
    options = ["--data", str(folder), "--model", "vit_digits_patch2_8", "--img-size", "8", "--batch-size", "4"]
    options += ["--workers", "0", "--device", "cpu", "--transform", "test_own_objects:crop", "--optimizer", "muon"]
    # two epochs of a schedule for two, in one go, and stopped within the second
    assert main(["train", "--out", str(tmp_path / "whole"), "--epochs", "2", *options]) == 0
    assert main(["train", "--out", str(tmp_path / "parts"), "--epochs", "2", "--save-every", "1", *options]) == 0
    (tmp_path / "parts" / STATE).unlink()
    resumed = ["train", "--out", str(tmp_path / "parts"), "--resume"]
    assert "imports test_own_objects:crop; give --transform test_own_objects:crop again" in refused(capsys, *resumed)
    assert main([*resumed, "--transform", "test_own_objects:crop"]) == 0
    states = [checkpoint.load_state(tmp_path / name / STATE) for name in ("whole", "parts")]
    assert all(torch.equal(tensor, states[1]["model"][name]) for name, tensor in states[0]["model"].items())
    assert states[1]["settings"]["transform"] == "test_own_objects:crop"
    model, _ = load_model(tmp_path / "parts" / WEIGHTS)
    assert all(torch.equal(tensor, states[0]["model"][name]) for name, tensor in model.state_dict().items())


@pytest.mark.full
def test_unusable_transforms_are_refused_in_one_sentence(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: the sentences, before training."""
    train = ["train", "--data", folder, "--out", tmp_path / "out", "--img-size", "8", "--workers", "0"]
    train += ["--model", "vit_digits_patch2_8", "--transform"]
    for name, sentence in (
        ("test_own_objects:number", "--transform is test_own_objects:number, of type int, which cannot be called"),
        ("test_own_objects:nothing", "--transform is test_own_objects:nothing, but test_own_objects has no attribute"),
        ("no_module:crop", "--transform is no_module:crop, and no_module cannot be imported"),
        ("torchvision.transforms.v2:CenterCrop", "CenterCrop needs arguments"),
        ("test_own_objects:broken", "0.jpg: KeyError: 'mask'"),
        ("test_own_objects:normalised", "without normalisation, which follows"),
        ("torchvision.transforms.v2:RGB", "the model needs 8x8"),
        ("builtins:repr", "it returns str; return an image or a tensor"),
    ):
        assert sentence in refused(capsys, *train, name)
    assert "needs image files, and the digits are arrays" in refused(
        capsys, "train", "--out", tmp_path / "out", "--transform", "test_own_objects:crop"
    )
    assert not (tmp_path / "out").exists()


def test_an_optimiser_of_ones_own():
    """Oracle: the groups, rates and decay of AdamW by the same recipe; a constructor without weight decay."""
    model = test_train.tiny()
    recipe = replace(RECIPE, optimizer="torch.optim:NAdam", layer_decay=0.8, weight_decay=0.3)
    ours, theirs = build_optimizer(recipe, model), build_optimizer(replace(recipe, optimizer="adamw"), model)
    assert type(ours) is torch.optim.NAdam
    for optimizer in (ours, theirs):
        set_lr(optimizer, 0.5)
    rows = [[(g["lr"], g["weight_decay"], len(g["params"])) for g in o.param_groups] for o in (ours, theirs)]
    assert rows[0] == rows[1] and len({lr for lr, _, _ in rows[0]}) > 2
    halved = build_optimizer(replace(recipe, optimizer="test_own_objects:Halved"), model)
    assert halved.defaults["lr"] == recipe.lr / 2 and halved.param_groups[0]["lr_scale"] < 1
    assert halved.param_groups[0]["weight_decay"] == 0.3


def test_unusable_optimisers_are_refused_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: the sentences."""
    train = ["train", "--out", tmp_path / "out", "--optimizer"]
    for name, sentence in (
        ("test_own_objects:crop", "use a subclass of torch.optim.Optimizer"),
        ("torch.nn:Linear", "use a subclass of torch.optim.Optimizer"),
        ("torch.optim:Adan", "--optimizer is torch.optim:Adan, but torch.optim has no attribute Adan"),
        ("no_module:Adan", "--optimizer is no_module:Adan, and no_module cannot be imported"),
        ("test_own_objects:Strict", "Strict cannot be constructed: "),
        ("torch.optim:LBFGS", "LBFGS cannot be constructed: LBFGS doesn't support per-parameter options"),
        ("adan", "--optimizer is 'adan'; use 'adamw', 'sgd', 'lamb', 'muon', or module:Class"),
    ):
        assert sentence in refused(capsys, *train, name)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layer_decay", [1.0, 0.75])
def test_muon_has_the_matrices_of_blocks(layer_decay: float):
    """Oracle: four weights a block by name, in ours and timm's; AdamW has the other parameters, each once, with the
    decay and the rate that it has without Muon."""
    sizes = dict(embed_dim=16, depth=2, num_heads=2)
    for model in (test_train.tiny(depth=2), timm.models.VisionTransformer(img_size=16, num_classes=3, **sizes)):
        optimizer = muon_adamw(model, 0.1, 0.3, layer_decay=layer_decay)
        set_lr(optimizer, 0.1)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        parts = {True: [], False: []}
        for group in optimizer.param_groups:
            parts["ns_steps" in group] += [(names[id(p)], group["lr"], group["weight_decay"]) for p in group["params"]]
        weights = [f"{part}.weight" for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]
        assert sorted(name for name, _, _ in parts[True]) == sorted(f"blocks.{i}.{w}" for i in (0, 1) for w in weights)
        assert sorted(name for part in parts.values() for name, _, _ in part) == sorted(names.values())
        plain = build_optimizer(replace(RECIPE, weight_decay=0.3, layer_decay=layer_decay), model)
        set_lr(plain, 0.1)
        rows = [(names[id(p)], g["lr"], g["weight_decay"]) for g in plain.param_groups for p in g["params"]]
        assert sorted(rows) == sorted(parts[True] + parts[False])
    with pytest.raises(ValueError, match="needs matrices in numbered blocks"):
        muon_adamw(nn.Linear(2, 2), 0.1, 0.3)


def test_muon_equals_two_optimisers():
    """Oracle: torch.optim.Muon and AdamW stepped by hand, as PyTorch documents, bit for bit; also after reloading."""
    model = test_train.tiny(depth=2)
    twin = copy.deepcopy(model)
    optimizer = muon_adamw(model, 0.02, 0.3)
    chosen = [p for name, p in twin.named_parameters() if name.startswith("blocks") and p.ndim == 2]
    rest = {True: [], False: []}
    for name, p in twin.named_parameters():
        if not any(p is one for one in chosen):
            rest[p.ndim > 1 and "pos" not in name and "token" not in name].append(p)
    muon = torch.optim.Muon(chosen, lr=0.02, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": rest[True], "weight_decay": 0.3}, {"params": rest[False], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.02, fused=True)
    images, targets = test_train.stripes()
    for step in range(4):
        for one in (model, twin):
            one.zero_grad()
            nn.functional.cross_entropy(one(images), targets).backward()
        if step == 2:  # a new optimiser with the state of the first
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = muon_adamw(model, 0.5, 0.1)
            optimizer.load_state_dict(state)
        for one in (optimizer, muon, adamw):
            one.step()
        for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(a, b), (step, name)
    assert isinstance(optimizer, MuonAdamW)


@pytest.mark.full
@pytest.mark.parametrize("name", ["muon", pytest.param("torch.optim:NAdam", marks=pytest.mark.full)])
def test_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    """Oracle: three uninterrupted epochs, bit by bit: weights, EMA and optimiser, with clipping and layer decay."""
    monkeypatch.setattr(test_train, "RECIPE", replace(test_train.RECIPE, optimizer=name, layer_decay=0.9))
    test_train.train(tmp_path / "whole")
    test_train.train(tmp_path / "parts", epochs=1)
    torch.rand(7)  # another process has another random state
    test_train.train(tmp_path / "parts", resume=True)
    a, b = (checkpoint.load_state(tmp_path / folder / STATE) for folder in ("whole", "parts"))
    for part in ("model", "ema"):
        assert all(torch.equal(tensor, b[part][key]) for key, tensor in a[part].items())
    for key, values in a["optimizer"]["state"].items():
        for entry, value in values.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(b["optimizer"]["state"][key][entry])), entry
    assert a["optimizer"]["param_groups"] == b["optimizer"]["param_groups"]
