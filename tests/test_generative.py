"""Tests of training models of pixels and of restoration, and of their commands. Oracles: by hand, and the log."""

import copy
import csv
import math
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import prints, refused
from PIL import Image
from test_data import write_tiff
from torch import Tensor

from fastvit_triton import create_model, freeze, load_model, transforms
from fastvit_triton.cli import main, train_models
from fastvit_triton.cli.generate import sheet
from fastvit_triton.models.igpt import nearest, uniform_colours
from fastvit_triton.train import Run, resolve_settings
from fastvit_triton.train.generative import Likelihood, Restoration, crop, scaled
from fastvit_triton.train.outputs import LOG, WEIGHTS, locked

pytestmark = pytest.mark.fast


def trained(out: Path, **settings: object) -> list[dict[str, str]]:
    """Trains in a folder; returns the rows of its log."""
    with locked(out):
        run = Run.from_settings(resolve_settings(settings), out, train_models)
        with run.training() as steps:
            for _ in steps:
                pass
    with (out / LOG).open(newline="") as file:
        return list(csv.DictReader(file))


TINY = dict(model="igpt_digits", options=dict(embed_dim=16, depth=1, num_heads=2), img_size=8, batch_size=240)


@pytest.fixture(scope="module")
def pixels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str]]]:
    """A folder of a small iGPT that has seen the digits twice, and the rows of its log."""
    out = tmp_path_factory.mktemp("pixels") / "run"
    return out, trained(out, **TINY, epochs=2, lr=3e-2)


def test_a_model_of_pixels_learns_and_is_evaluated(pixels, capsys):
    """Oracle: fewer bits than the first epoch, and than equally likely greys; `evaluate` gives those of the log."""
    out, rows = pixels
    losses = [float(row["test_loss"]) for row in rows if row["test_loss"]]
    assert float(rows[1]["train_loss"]) < float(rows[0]["train_loss"]) and losses[-1] < math.log(16)
    assert f"{losses[-1] / math.log(2):.4f} ± " in prints(capsys, "evaluate", "--checkpoint", out)
    text = prints(capsys, "train", "--out", out, "--resume")
    assert f"{losses[-1] / math.log(2):.4f} bits a dimension after 2 epochs" in text
    commands = re.findall(r"^  fastvit-triton (\w+)", text, re.MULTILINE)
    assert commands == ["generate", "evaluate"]


def test_generate_writes_a_sheet(pixels, tmp_path, capsys):
    """Oracle: the size of the sheet; the same seed draws the same; the rows of a prefix are those of its image."""
    out, _ = pixels
    words = ["generate", "--checkpoint", str(out), "--count", "5", "--class", "3", "--scale", "2", "--seed", "4"]
    for name in ("a.png", "b.png"):
        assert main([*words, "--out", str(tmp_path / name)]) == 0
    first, second = (np.asarray(Image.open(tmp_path / name)) for name in ("a.png", "b.png"))
    assert first.shape == (3 * 9 * 2, 2 * 9 * 2) and np.array_equal(first, second) and len(np.unique(first)) > 5
    given = np.repeat(np.arange(8, dtype=np.uint8)[:, None] * 34, 8, 1)  # one grey a row, each of the 16
    Image.fromarray(given).save(tmp_path / "given.png")
    for rows in (4, 8):
        prefix = ["--prefix", str(tmp_path / "given.png"), "--rows", str(rows), "--out", str(tmp_path / "c.png")]
        assert main(["generate", "--checkpoint", str(out), "--count", "1", "--scale", "1", *prefix]) == 0
        drawn = np.asarray(Image.open(tmp_path / "c.png"))[:8, :8]
        assert np.array_equal(drawn[:rows], given[:rows])
    deep = write_tiff(tmp_path / "deep.tif", given.astype(np.uint16) * 16)
    assert main([*words[:3], *prefix, "--count", "1", "--scale", "1", "--prefix", str(deep), "--levels", "4080"]) == 0
    assert np.array_equal(np.asarray(Image.open(tmp_path / "c.png"))[:8, :8], given)
    assert sheet(torch.zeros(5, 3, 4, 6), 1).shape == (3, 15, 14)
    assert "which is no image file; use a name such as e.png" in refused(
        capsys, "generate", "--checkpoint", out, "--count", 1, "--out", tmp_path / "e.text"
    )
    save = ("--out", tmp_path / "d.png", "--checkpoint", out)
    assert "--class is '11'; use one of 0, 1, 2" in refused(capsys, "generate", *save, "--class", "11")
    prefix = (*save, "--prefix", tmp_path / "given.png")
    assert "--rows is 9; an image of this model has 8 rows" in refused(capsys, "generate", *prefix, "--rows", 9)
    assert "none.png does not exist" in refused(capsys, "generate", *save, "--prefix", tmp_path / "none.png")
    assert "whose task is to generate; use fastvit-triton generate" in refused(
        capsys, "predict", "--checkpoint", out, tmp_path / "a.png"
    )
    assert "whose task is to generate" in refused(capsys, "restore", *save, tmp_path / "a.png")


def test_recipes_and_models_belong_together(tmp_path, capsys):
    """Oracle: the sentences; small models of ours have their recipe without being asked for."""
    assert resolve_settings({"model": "igpt_digits"})["recipe"] == "pixels"
    assert resolve_settings({"model": "ipt_digits", "data": str(tmp_path)})["recipe"] == "restoration"
    assert resolve_settings({})["recipe"] == "digits"
    words = ("train", "--out", tmp_path / "out")
    assert "pass --recipe pixels" in refused(capsys, *words, "--model", "igpt_small")
    assert "pass --recipe restoration" in refused(capsys, *words, "--model", "ipt_x2")
    assert "has no boxes, which detr_resnet50 learns" in refused(capsys, *words, "--model", "detr_resnet50")
    digits = ("--recipe", "pixels", "--model", "vit_digits_patch2_8", "--img-size", 8)
    assert "vit_digits_patch2_8 is not trained by loss 'likelihood'" in refused(capsys, *words, *digits)


def test_losses_of_each_image():
    """Oracle: the likelihood of images between −1 and 1; for restoration, a model that returns what it is given."""
    model = create_model("igpt_digits", img_size=4, embed_dim=16, depth=1, num_heads=2)
    images = torch.rand(3, 1, 4, 4)
    classes = torch.tensor([1, 0, 9])
    module = Likelihood(model, lambda images: images / 2)
    assert torch.equal(module(images, classes), model.nats(images - 1, classes))

    class Same(torch.nn.Module):
        config = type("Config", (), dict(tasks=("denoise10",), img_size=(6, 8)))

        def forward(self, images: Tensor, task: str) -> Tensor:
            return images

    found = Restoration(Same(), lambda images: images)(torch.rand(500, 3, 12, 12))
    expected = 10 * math.sqrt(2 / math.pi) / 255  # the mean of a normal number's absolute value
    assert found.shape == (500,) and abs(float(found.mean()) / expected - 1) <= 5 * 0.76 / math.sqrt(500 * 144)
    assert scaled((6, 8), "x3") == (18, 24) and scaled((6, 8), "derain") == (6, 8)
    with pytest.raises(ValueError, match="images have 4x4 pixels, and the task needs 6x8; raise --img-size"):
        crop(torch.zeros(1, 3, 4, 4), (6, 8))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """An image folder of ten smooth colour images of 48 x 48 pixels."""
    at = np.linspace(0, 6, 48)
    for split, count in (("train", 6), ("val", 4)):
        (tmp_path / split / "photos").mkdir(parents=True)
        for i in range(count):
            pace = (i + 1 + 6 * (split == "val")) / 3
            waves = 127 + 90 * np.sin(at[:, None, None] * pace + at[None, :, None] + np.arange(3))
            Image.fromarray(waves.astype(np.uint8)).save(tmp_path / split / "photos" / f"{i}.png")
    return tmp_path


def test_colours_of_the_data_are_found(photos):
    """Oracle: each colour is in the range of the images, and nearer to their pixels than evenly spaced ones."""
    out = photos / "run"
    options = dict(embed_dim=16, depth=1, num_heads=2, n_colors=8)
    colours = dict(mean=(0.5,) * 3, std=(0.5,) * 3, img_size=8, batch_size=6, epochs=1)
    trained(out, model="igpt_digits", data=str(photos), options=options, **colours)
    model, metadata = load_model(out / WEIGHTS)
    usual = uniform_colours(8, 3)
    assert model.config.num_classes == 1 and float(model.clusters.abs().max()) <= 90 / 127 + 1 / 255
    assert model.pretrained_cfg["mean"] == (0.5, 0.5, 0.5) and "training" in metadata
    files = sorted((photos / "train" / "photos").iterdir())
    pixels = torch.from_numpy(np.stack([np.asarray(Image.open(f)) for f in files])).float().view(-1, 3) / 127.5 - 1
    errors = [(pixels - table[nearest(pixels, table)]).square().sum() for table in (model.clusters, usual)]
    assert float(errors[0]) < float(errors[1])


@pytest.mark.full
def test_a_model_of_restoration_is_trained_evaluated_and_used(photos, capsys):
    """Oracle: the files and sizes; the table has a row of each task, and its input's PSNR is that of the noise."""
    out = photos / "run"
    options = dict(features=4, depth=1, num_heads=3)
    rows = trained(out, model="ipt_digits", data=str(photos), options=options, epochs=1, batch_size=3)
    assert float(rows[-1]["test_loss"]) > 0 and not rows[-1]["test_accuracy"]
    assert "fastvit-triton restore --checkpoint" in prints(capsys, "train", "--out", out, "--resume")
    assert main(["evaluate", "--checkpoint", str(out)]) == 0
    found = dict(re.findall(r"│ (x2|denoise30) +│ +[\d.]+ ± \S+ +│ +([\d.]+) ± \S+ +│", capsys.readouterr().out))
    noise = 20 * math.log10(255 / 30)
    assert found.keys() == {"x2", "denoise30"} and abs(float(found["denoise30"]) - noise) < 1  # clipped to 0 … 255
    photo = photos / "val" / "photos" / "1.png"
    for task, size in (("x2", 96), ("denoise30", 48)):
        save = ["--task", task, "--out", str(photos / "o.png")]
        assert main(["restore", "--checkpoint", str(out), str(photo), *save]) == 0
        assert np.asarray(Image.open(photos / "o.png")).shape == (size, size, 3)
    bytes_of = {}
    for levels in (255, 4080):
        values = np.arange(48 * 48, dtype=np.uint16).reshape(48, 48) % 256
        values = values.astype(np.uint8) if levels == 255 else values * 16
        file = write_tiff(photos / f"{levels}.tif", values)
        assert main(["restore", "--checkpoint", str(out), str(file), *save, "--levels", str(levels)]) == 0
        bytes_of[levels] = (photos / "o.png").read_bytes()
    assert bytes_of[255] == bytes_of[4080]
    Image.new("RGB", (30, 20)).save(photos / "small.png")
    words = ("restore", "--checkpoint", out, "--out", photos / "o.png")
    assert "image is 20x30 pixels, smaller than a tile of 24x24" in refused(capsys, *words, photos / "small.png")
    assert "task is 'x3'; this model has x2, denoise30" in refused(capsys, *words, photo, "--task", "x3")
    assert "none.png does not exist" in refused(capsys, *words, photos / "none.png")
    assert "whose task is to restore" in refused(capsys, "generate", "--checkpoint", out, "--out", photos / "o.png")


SMALLEST = {
    "igpt_digits": dict(img_size=4, embed_dim=16, depth=2, num_heads=2),
    "image_transformer_cifar10": dict(img_size=4, embed_dim=16, depth=2, num_heads=2, mlp_dim=32, drop_rate=0.0),
    "ipt_digits": dict(img_size=6, features=4, depth=2, num_heads=3),
}


@pytest.mark.parametrize("name", SMALLEST)
def test_recomputed_and_copied_models_are_the_same(name):
    """Oracle: the gradients without recomputation, to the bit, of new models; outputs of copies, and of frozen ones."""
    model = create_model(name, **SMALLEST[name])
    copied = copy.deepcopy(model)
    again = pickle.loads(pickle.dumps(model))
    images = torch.rand(2, model.config.in_chans, *model.config.img_size)
    found = []
    for one, recompute in ((model, False), (copied, True)):
        one.set_grad_checkpointing(recompute)
        torch.manual_seed(1)
        one(images).square().mean().backward()
        found.append([p.grad for p in one.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) > 10
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    with torch.no_grad():
        wanted = model.eval()(images)
        assert torch.equal(again.eval()(images), wanted) and float(wanted.std()) > 0
        freeze(model)
        error = float((model(images) - wanted).norm() / wanted.norm())
    assert error <= 84 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    "name, values", [("igpt_digits", 1.0), ("image_transformer_cifar10", 1.0), ("ipt_digits", 255.0)]
)
def test_images_are_prepared_for_the_model(name, values):
    """Oracle: white is 1 for models of pixels, whose images are between −1 and 1, and 255 for restoration."""
    white = Image.new("RGB", (20, 30), (255, 255, 255))
    assert (
        float((transforms(create_model(name))(white) - values).abs().max())
        <= 4 * torch.finfo(torch.float32).eps * values
    )
