"""Tests of every recipe on the command line; LAMB, big_vision's policy, CIFAR-10, distillation, drop path."""

import json
import math
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from commands import accuracy, prints, refused
from PIL import Image, ImageEnhance, ImageOps
from sampling import sampled
from test_data import write_folder
from timm.optim import Lamb as TimmLamb
from torch import nn

from fastvit_triton.cli import main
from fastvit_triton.layers import DropPath
from fastvit_triton.models import create_model
from fastvit_triton.models.weights import load_model
from fastvit_triton.train.augment import policy
from fastvit_triton.train.augment.mix import mixup
from fastvit_triton.train.build import DISTILLATION
from fastvit_triton.train.checkpoint import load_state
from fastvit_triton.train.data.cifar import FILES, META, is_cifar, scan_cifar
from fastvit_triton.train.drop_path import set_drop_path
from fastvit_triton.train.objective import distilled, supervised
from fastvit_triton.train.optim import Lamb
from fastvit_triton.train.outputs import BEST, LOG, STATE, WEIGHTS
from fastvit_triton.train.settings import RECIPES
from fastvit_triton.train.step import Step

CLOSE = torch.testing.assert_close
SMALL = ("--model", "vit_digits_patch2_8", "--img-size", "8", "--batch-size", "8", "--workers", "0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("data") / "images", per_class=8)


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the plots at the end of a run, tested in tests/test_train.py, by empty files."""
    blank = SimpleNamespace(savefig=lambda path, **_: path.touch())
    for name in ("curves", "predictions"):
        monkeypatch.setattr(f"fastvit_triton.train.outputs.{name}", lambda *_: blank)


# Tested elsewhere.
ELSEWHERE = ("digits", "fashion-mnist", "mae-pretrain", "mae-finetune", "pixels", "restoration")
ELSEWHERE += ("scenes", "scenes-detr", "shapes", "boxes", "boxes-tiny")


@pytest.mark.parametrize("name", sampled((name for name in RECIPES if name not in ELSEWHERE), 3))
def test_recipes_run_on_an_image_folder(folder: Path, tmp_path: Path, name: str):
    """Oracle: a narrow model of another size trains for two epochs; its saved settings name the recipe."""
    out = tmp_path / "run"
    assert main(["train", "--recipe", name, "--data", str(folder), "--out", str(out), "--epochs", "2", *SMALL]) == 0
    state = load_state(out / STATE)
    recipe = RECIPES[name]
    assert state["settings"]["recipe"] == name and len(state["history"]) == 2
    assert (state["ema"] is not None) == (recipe.ema_decay is not None)
    assert state["settings"]["policy"] == recipe.policy and state["settings"]["repeats"] == recipe.repeats
    assert all(math.isfinite(row["train_loss"]) for row in state["history"])


@pytest.mark.full
def test_masked_pretraining_then_fine_tuning(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: the loss on hidden pixels decreases; fine-tuning starts from the encoder's blocks."""
    first, second = tmp_path / "pretrained", tmp_path / "tuned"
    options = ["--data", str(folder), *SMALL]
    text = prints(capsys, "train", "--recipe", "mae-pretrain", "--out", first, "--epochs", "3", *options)
    assert "test loss" in text and f"fastvit-triton train --weights {first}" in text
    history = load_state(first / STATE)["history"]
    assert history[2]["test_loss"] < history[0]["test_loss"] and history[0]["test_accuracy"] is None
    encoder, _ = load_model(first / BEST)
    command = ["train", "--recipe", "mae-finetune", "--weights", str(first), "--out", str(second), *options]
    assert main([*command, "--epochs", "1", "--lr", "1e-30"]) == 0
    tuned, _ = load_model(second / WEIGHTS)
    for name, parameter in tuned.blocks.named_parameters():
        CLOSE(parameter, encoder.blocks.get_parameter(name), msg=name)


@pytest.mark.full
def test_distillation_by_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: a student with a distillation token learns from the teacher's file; other students raise."""
    teacher, out = tmp_path / "teacher", tmp_path / "student"
    options = ["--data", str(folder), "--epochs", "1", "--batch-size", "8", "--workers", "0", "--img-size", "16"]
    plain = ["train", *options, "--model", "vit_tiny_patch16_224"]
    assert main([*plain, "--out", str(teacher)]) == 0
    assert "needs a --model with a distillation token" in refused(capsys, *plain, "--out", out, "--teacher", teacher)
    student = ["train", *options, "--model", "deit_tiny_distilled_patch16_224", "--out", out, "--teacher", teacher]
    assert main([str(word) for word in [*student, "--distillation", "soft"]]) == 0
    assert load_state(out / STATE)["settings"]["distillation"] == "soft"
    assert main(["evaluate", "--checkpoint", str(out), "--workers", "0"]) == 0
    for recipe in ("deit3", "augreg"):
        argv = [*student[:-4], "--out", tmp_path / recipe, "--teacher", teacher, "--recipe", recipe]
        assert "distillation needs loss 'softmax'" in refused(capsys, *argv)


@pytest.mark.parametrize("amp", ["float16", "bfloat16"])
def test_half_precision_ema_and_accumulation(folder: Path, tmp_path: Path, amp: str):
    """Oracle: the state has a gradient scaler only for float16; the file contains the EMA."""
    out = tmp_path / "run"
    options = [
        "--amp",
        amp,
        "--ema-decay",
        "0.9",
        "--grad-accum-steps",
        "3",
        "--grad-checkpointing",
        "--save-every",
        "1",
    ]
    assert main(["train", "--data", str(folder), "--out", str(out), "--epochs", "2", *SMALL, *options]) == 0
    state = load_state(out / STATE)
    assert bool(state["scaler"]) == (amp == "float16")
    kept, _ = load_model(out)
    for name, parameter in kept.named_parameters():
        assert torch.equal(parameter, state["ema"][f"module.{name}"]), name
        assert not torch.equal(parameter, state["model"][name]), name


def test_every_option_can_be_set(folder: Path, tmp_path: Path):
    """Oracle: the settings in the state, and two epochs with finite losses, of a recipe without any default value."""
    out = tmp_path / "run"
    chosen = {
        "optimizer": "lamb", "schedule": "vit", "loss": "bce", "weight_decay": 0.02, "layer_decay": 0.8, "clip": 0.5,
        "mixup": 0.0, "mixtoken": 0.7, "erasing": 0.5, "policy": "three", "repeats": 2, "min_area": 0.5,
        "drop_path_rate": 0.3, "label_smoothing": 0.0, "ema_decay": 0.9, "warmup": 0.2,
    }  # fmt: skip
    options = [word for name, value in chosen.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["train", "--data", str(folder), "--out", str(out), "--epochs", "2", *SMALL, *options]) == 0
    state = load_state(out / STATE)
    assert {name: state["settings"][name] for name in chosen} == chosen
    assert all(math.isfinite(row["train_loss"]) for row in state["history"])
    assert len({group["lr"] for group in state["optimizer"]["param_groups"]}) == 6  # blocks, stem, head


@pytest.mark.full
def test_invalid_settings(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: one sentence each, and no folder."""
    train = ("train", "--out", tmp_path / "out")
    assert "recipe is 'vit'; use one of digits, photos, folder" in refused(capsys, *train, "--recipe", "vit")
    assert "--save-every is 0; use an integer of at least 1" in refused(capsys, *train, "--save-every", "0")
    assert "--grad-accum-steps is 0; use an integer of at least 1" in refused(capsys, *train, "--grad-accum-steps", "0")
    assert "the recipe's policy needs image files" in refused(capsys, *train, "--recipe", "deit")
    assert "--ema-decay is 1.5; use a number in [0, 1)" in refused(capsys, *train, "--ema-decay", "1.5")
    on_folder = (*train, "--data", folder, "--recipe", "vit-i1k", "--workers", "0")
    assert "warmup is 10000 of 300 steps" in refused(capsys, *on_folder, "--img-size", "16")
    assert "beside mixup or cutmix" in refused(capsys, *train, "--mixtoken", "1")
    assert "mask_ratio 0.0; hide some patches" in refused(capsys, *train, "--loss", "pixels")
    assert "loss 'bce' takes none, set it to 0" in refused(capsys, *train, "--loss", "bce")
    assert "optimizer is 'adam'; use 'adamw'" in refused(capsys, *train, "--optimizer", "adam")
    assert "schedule is 'step'; use 'own'" in refused(capsys, *train, "--schedule", "step")
    assert "loss is 'mse'; use 'softmax'" in refused(capsys, *train, "--loss", "mse")
    assert "--drop-path-rate is 1.0; use a number in [0, 1)" in refused(capsys, *train, "--drop-path-rate", "1")
    assert not (tmp_path / "out").exists()


@pytest.mark.fast
def test_lamb_equals_its_equations():
    """Oracle: the docstring's equations in float64, for three steps with a clipped and an unclipped gradient, two
    groups and a zero matrix; and timm's Lamb."""
    start = [torch.randn(3, 4).double(), torch.zeros(2, 2).double(), torch.randn(3).double()]
    decays, lr, eps, (b1, b2) = (0.1, 0.1, 0.0), 0.01, 1e-8, (0.9, 0.999)
    ours, theirs = ([nn.Parameter(w.clone()) for w in start] for _ in range(2))
    groups = lambda w: [{"params": w[:2], "weight_decay": 0.1}, {"params": w[2:], "weight_decay": 0.0}]  # noqa: E731
    optimizers = Lamb(groups(ours), lr, eps=eps), TimmLamb(groups(theirs), lr, eps=eps)
    want, m, v = start, [0.0] * 3, [0.0] * 3
    for t, size in enumerate((5.0, 0.01, 1.0), 1):
        grads = [size * torch.randn_like(w) for w in start]
        shrink = max(1.0, math.sqrt(sum(g.square().sum().item() for g in grads)))
        for i, g in enumerate(grads):
            g = g / shrink
            m[i], v[i] = b1 * m[i] + (1 - b1) * g, b2 * v[i] + (1 - b2) * g**2
            u = (m[i] / (1 - b1**t)) / ((v[i] / (1 - b2**t)).sqrt() + eps) + decays[i] * want[i]
            r = want[i].norm() / u.norm() if decays[i] and want[i].norm() > 0 else 1.0
            want[i] = want[i] - lr * r * u
        for weights, optimizer in zip((ours, theirs), optimizers, strict=True):
            for weight, grad in zip(weights, grads, strict=True):
                weight.grad = grad.clone()
            optimizer.step()
    for weight, timms, expected in zip(ours, theirs, want, strict=True):
        CLOSE(weight.detach(), expected)
        CLOSE(weight, timms)


def noise(mode: str = "RGB", size: tuple[int, int] = (40, 30)) -> Image.Image:
    shape = (size[1], size[0], 3) if mode == "RGB" else size[::-1]
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))


@pytest.mark.fast
def test_big_vision_operations():
    """Oracle: the arithmetic of big_vision/pp/autoaugment.py on pixels, at its magnitude 15, which is level 1.5."""
    image, moved = noise(), dict(fillcolor=(128,) * 3, at=(0.5, 0.5))
    pixels = np.asarray(image).astype(float)
    apply = lambda name, level=1.5, sign=1: np.asarray(policy.BIG_VISION[name](image, level, sign, moved))  # noqa: E731
    factor = 1.5 * 1.8 + 0.1
    assert np.array_equal(apply("brightness"), np.clip(factor * pixels, 0, 255).astype(np.uint8))
    mean = int(40 * 30 / 256)
    assert np.abs(apply("contrast") - np.clip(mean + factor * (pixels - mean), 0, 255)).max() <= 1
    assert np.array_equal(apply("posterize"), (pixels.astype(np.uint8) >> 2) << 2)
    assert np.array_equal(apply("solarize", 0.5), np.where(pixels < 128, pixels, 255 - pixels))
    assert np.array_equal(apply("solarize"), pixels)
    assert np.array_equal(apply("solarize_add"), np.where(pixels < 128, np.minimum(pixels + 165, 255), pixels))
    assert np.array_equal(apply("invert"), 255 - pixels)
    moved_right = apply("translate_x", 0.1, -1)  # 10 pixels
    assert np.array_equal(moved_right[:, 10:], pixels[:, :-10]) and (moved_right[:, :10] == 128).all()
    assert np.array_equal(apply("translate_y", 0.1)[:-10], pixels[10:])
    hole = apply("cutout", 0.2)  # 16 x 16 around the middle
    assert (hole[7:23, 12:28] == 128).all() and np.array_equal(hole[:7], pixels[:7])
    assert np.array_equal(apply("color"), np.asarray(ImageEnhance.Color(image).enhance(factor)))
    assert np.array_equal(apply("auto_contrast"), np.asarray(ImageOps.autocontrast(image)))
    assert len(policy.BIG_VISION) == 16


@pytest.mark.fast
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_big_vision_policy(mode: str):
    """Oracle: the seed determines the result; every operation occurs and keeps mode and size; some are combined."""
    drawn, results = set(), []
    for seed in range(200):
        make = lambda: torch.Generator().manual_seed(seed)  # noqa: B023, E731
        result = policy.big_vision_augment(noise(mode), make())
        assert result.mode == mode and result.size == (40, 30)
        assert np.array_equal(np.asarray(result), np.asarray(policy.big_vision_augment(noise(mode), make())))
        drawn.add(int(torch.randint(16, (), generator=make())))
        results.append(np.asarray(result).tobytes())
    assert drawn == set(range(16)) and len(set(results)) > 2 * 16  # each has two signs


def write_cifar(root: Path, count: int = 8) -> np.ndarray:
    """Writes files in the layout of cifar-10-batches-py: rows of 1024 red, green and blue levels each."""
    root.mkdir()
    generator, pixels = np.random.default_rng(0), []
    for name in (*FILES["train"], *FILES["val"]):
        rows = generator.integers(0, 90, (count, 3, 1024), dtype=np.uint8)
        labels = [i % 2 for i in range(count)]
        rows[np.arange(count), labels] += 150  # red, or green
        pixels.append(rows.reshape(count, -1))
        (root / name).write_bytes(pickle.dumps({b"data": pixels[-1], b"labels": labels}))
    names = [b"airplane", b"automobile"]  # a class without images is refused
    (root / META).write_bytes(pickle.dumps({b"label_names": names}))
    return np.concatenate(pixels[:5])


def test_cifar_files(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: the pixels written; two colours are classified; a pickle that would execute code raises."""
    root = tmp_path / "cifar-10-batches-py"
    pixels = write_cifar(root)
    assert is_cifar(root) and not is_cifar(tmp_path)
    files, targets, classes, decode = scan_cifar(root, "train")[:4]
    assert len(files) == len(targets) == 40 and classes[:2] == ("airplane", "automobile")
    assert np.array_equal(np.asarray(decode(files[17]))[3, 5], pixels[17].reshape(3, 32, 32)[:, 3, 5])
    out = tmp_path / "run"
    options = ["--recipe", "cifar10", "--data", str(root), "--out", str(out), "--epochs", "8", "--lr", "0.1"]
    assert main(["train", *options, *SMALL]) == 0
    assert accuracy(out) == 1.0
    assert main(["evaluate", "--checkpoint", str(out), "--workers", "0"]) == 0
    with pytest.raises(ValueError, match="has the classes of CIFAR-10, but the model has cat"):
        scan_cifar(root, "val", ("cat",))
    (root / "test_batch").write_bytes(pickle.dumps(print))
    with pytest.raises(
        ValueError, match=r"test_batch is damaged or not a batch of CIFAR-10: it would import builtins.print"
    ):
        scan_cifar(root, "val")


@pytest.mark.fast
@pytest.mark.parametrize("steps", [1, 3])
def test_accumulated_steps_equal_full_batch_steps(steps: int):
    """Oracle: the same mixed batch in one step in float64, clipped, with AdamW."""
    models = [create_model("vit_digits_patch2_8", embed_dim=16, depth=1, num_heads=2).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    images, targets = torch.randn(8, 1, 8, 8).double(), torch.arange(8) % 10
    for model, count in zip(models, (1, steps), strict=True):
        torch.manual_seed(3)
        step = Step(mix=lambda x, y: mixup(x, y, 10, 0.5), grad_accum_steps=count, clip=0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            step(model, optimizer, images, targets)
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        CLOSE(a, b, msg=name)


@pytest.mark.fast
@pytest.mark.parametrize("kind", DISTILLATION)
def test_distillation_equals_its_loss(kind: str):
    """Oracle: the loss of the student's two logits, with a teacher that gets no gradient."""
    student = create_model("deit_tiny_distilled_patch16_224", embed_dim=16, depth=1, num_heads=2, img_size=16)
    student.set_distilled_training()
    teacher = create_model("vit_tiny_patch16_224", embed_dim=16, depth=1, num_heads=2, img_size=16).eval()
    images, targets = torch.randn(2, 3, 16, 16), torch.tensor([3, 5])
    value, logits = distilled(teacher, DISTILLATION[kind])(student, images, targets)
    a, b = student(images)
    assert torch.equal(value, DISTILLATION[kind](a, b, teacher(images), targets)) and torch.equal(logits, (a + b) / 2)
    value.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    with pytest.raises(ValueError, match="the student returns one set of logits"):
        distilled(teacher, DISTILLATION[kind])(teacher, images, targets)
    assert torch.equal(
        supervised(F.cross_entropy)(teacher, images, targets)[0], F.cross_entropy(teacher(images), targets)
    )


@pytest.mark.full
def test_log_and_headers_are_complete(folder: Path, tmp_path: Path):
    """Oracle: the best file is that of the log's row with the highest accuracy."""
    out = tmp_path / "run"
    assert main(["train", "--data", str(folder), "--out", str(out), "--epochs", "4", *SMALL]) == 0
    header, *rows = (row.split(",") for row in (out / LOG).read_text().splitlines())
    reached = [float(row[header.index("test_accuracy")]) for row in rows]
    best = json.loads(load_model(out / BEST)[1]["training"])
    assert best["test_accuracy"] == max(reached) and best["crc32"]


@pytest.mark.fast
@pytest.mark.parametrize("init_values", [None, 0.1])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_dropped_images_are_not_computed(init_values: float | None, norm: str):
    """Oracle: branches multiplied by the same mask in float64, output and gradients; the number of rows in the MLP."""
    options = dict(embed_dim=16, depth=3, num_heads=2, init_values=init_values, norm=norm, drop_path_rate=0.5)
    skipping, scaling = (create_model("vit_digits_patch2_8", **options).double() for _ in range(2))
    skipping.load_state_dict(scaling.state_dict())
    set_drop_path(skipping, 0.5, constant=True, skip=True)
    set_drop_path(scaling, 0.5, constant=True)
    images, rows, draws = torch.randn(12, 1, 8, 8).double(), [], []
    for block in skipping.blocks:
        mlp, forward = block.mlp, block.mlp.forward
        mlp.forward = lambda x, forward=forward, **branch: (rows.append(x.shape[0]), forward(x, **branch))[1]
    draw = DropPath.kept_images
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DropPath, "kept_images", lambda self, x: (draws.append(draw(self, x)), draws[-1])[1])
        ours = skipping(images)
    kept = iter([torch.zeros(12).index_fill(0, chosen, 2.0).double() for chosen in draws])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DropPath, "sample_scale", lambda self, x: next(kept))
        theirs = scaling(images)
    CLOSE(ours, theirs)
    assert rows == [len(chosen) for chosen in draws[1::2]] and sum(rows) < 3 * 12
    for value in (ours, theirs):
        value.square().sum().backward()
    for (name, a), b in zip(skipping.named_parameters(), scaling.parameters(), strict=True):
        CLOSE(a.grad, b.grad, msg=name)
    assert torch.equal(skipping.eval()(images), scaling.eval()(images))
    skipping.train().zero_grad()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DropPath, "kept_images", lambda self, x: torch.empty(0, dtype=torch.long))
        skipping(images).sum().backward()
    assert all(parameter.grad is not None for parameter in skipping.parameters())
