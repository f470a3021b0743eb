"""Tests of the command line: exit codes, messages, files, and real images."""

import argparse
import functools
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from catalogue.ours import CASES
from commands import accuracy, prints, refused, start
from patience import HANG
from PIL import Image
from safetensors.torch import load_file
from test_data import truncate, write_folder
from test_house import MODULES, find_cycle, imports, room_of

from benchmarks.launches import Setting, figures
from fastvit_triton import __version__, cli, create_model, list_models
from fastvit_triton.cli import benchmark, evaluate, main, parser
from fastvit_triton.cli.recipe_options import RECIPE_OPTIONS
from fastvit_triton.cli.tasks import TASKS
from fastvit_triton.expected import count
from fastvit_triton.expected.count import predict
from fastvit_triton.expected.gpus import gpus
from fastvit_triton.intervals import accuracy_text
from fastvit_triton.kernels import backend, choose, launch
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.settings import forcing
from fastvit_triton.kernels.sizes import WAYS, Branch
from fastvit_triton.measure import variants
from fastvit_triton.measure.variants import compiling
from fastvit_triton.models import family_of
from fastvit_triton.models.weights.load import load_model
from fastvit_triton.train.checkpoint import PREVIOUS, load_state
from fastvit_triton.train.data import digits, inspection
from fastvit_triton.train.data.split import SPLIT
from fastvit_triton.train.outputs import CURVES, EXAMPLE, FILES, LOCK, PREDICTIONS, STATE, WEIGHTS
from fastvit_triton.train.recipes import Recipe
from fastvit_triton.train.settings import RECIPES

EPOCHS = "3"
OF_DIGITS = [name for name in FILES if name != SPLIT]  # files of a run without --val-split


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a default run with few epochs."""
    out = tmp_path_factory.mktemp("runs") / "digits"
    assert main(["train", "--epochs", EPOCHS, "--out", str(out)]) == 0
    return out


def stopped(capsys: pytest.CaptureFixture, *argv: str) -> str:
    """What a command prints that ends in the parser, with code 0 and nothing on stderr."""
    with pytest.raises(SystemExit) as end:
        main(list(argv))
    captured = capsys.readouterr()
    assert end.value.code == 0 and not captured.err
    return captured.out


@pytest.mark.fast
def test_version_and_help(capsys: pytest.CaptureFixture):
    """Oracle: the package's version; a bare command is --help, which names every command."""
    assert stopped(capsys, "--version") == f"fastvit-triton {__version__}\n"
    text = stopped(capsys)
    assert text == stopped(capsys, "--help")
    names = {module.__name__.rpartition(".")[2] for module in cli.COMMANDS}
    assert "models" in names and names <= set(re.findall(r"^    (\w+)", text, re.MULTILINE))


@pytest.mark.fast
def test_models(capsys: pytest.CaptureFixture):
    """Oracle: list_models(); a word is a part of a name, a pattern is the whole name."""
    for words, pattern in (((), "*"), (("deit3",), "*deit3*"), (("vit_*_224",), "vit_*_224")):
        head, *rows = prints(capsys, "models", *words).splitlines()
        assert head.split()[0] == "name" and [row.split()[0] for row in rows] == list_models(pattern)
    config = create_model("vit_small_patch16_384").config
    assert main(["models", "vit_small_patch16_384"]) == 0
    sizes = ["384×384", *map(str, (config.embed_dim, config.depth, config.num_heads))]
    numbers = [*sizes, "22.2", "31.0", "83.8"]  # of the authors of timm, for the default weights
    assert capsys.readouterr().out.splitlines()[1].split()[1:] == numbers
    assert main(["models", "swin_tiny_patch4_window7_224"]) == 0
    sizes = ["224×224", "96-192-384-768", "2-2-6-2", "3-6-12-24", "28.3", "9.0", "81.4"]
    assert capsys.readouterr().out.splitlines()[1].split()[1:] == sizes
    assert "no model matches 'convnext'" in refused(capsys, "models", "convnext")


@pytest.mark.fast
def test_modules_of_the_command_line_have_no_cycle():
    """Oracle: a topological order of what they import of each other, also in functions."""
    room = {name: path for name, path in MODULES.items() if room_of(name) == "cli"}
    graph = {name: {target for target, _ in imports(path)} & room.keys() for name, path in room.items()}
    assert find_cycle(graph) == [] and "fastvit_triton.cli.parser" in graph["fastvit_triton.cli"]


@pytest.mark.fast
def test_each_kind_of_model_has_a_task():
    """Oracle: the tasks of all families, and the losses of recipes, of which each trains one."""
    models = [getattr(family_of(name), "MODEL", None) for name in list_models()]
    assert {model.task for model in models if model is not None} == TASKS.keys() and all(
        name == task.name for name, task in TASKS.items()
    )
    losses = [loss for task in TASKS.values() for loss in task.losses]
    assert sorted(losses) == sorted(get_args(Recipe.__annotations__["loss"]))


@pytest.mark.fast
@pytest.mark.parametrize("command", ["check", "tune", "benchmark", "doctor --amp", "train --amp"])
def test_dtypes_have_the_same_names_in_every_command(command: str):
    """Oracle: short and long names by hand."""
    name, _, option = command.partition(" ")
    for short, long in {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.items():
        for text in (short, long) if (name, long) != ("doctor", "float32") else ():  # which has no such autocast
            words = [name, option or "--dtype", text]
            assert long in vars(cli.build_parser().parse_args(words)).values()


@pytest.mark.full
@pytest.mark.parametrize("family", ["swin", "twins_svt", "pvt", "cpvt"])
def test_hierarchical_models_are_trained_and_evaluated(family: str, tmp_path: Path, monkeypatch, capsys):
    """Oracle: a tenth of the images, which a constant answer would give."""
    case = CASES[family]
    small = replace(RECIPES["digits"], model=case.name, options=case.options, img_size=16, epochs=4)
    monkeypatch.setitem(RECIPES, "small", small)
    prints(capsys, "train", "--recipe", "small", "--out", tmp_path)
    assert float(re.search(r"accuracy +│ ([\d.]+) %", prints(capsys, "evaluate", "--checkpoint", tmp_path))[1]) > 15


@pytest.mark.fast
@pytest.mark.parametrize("command", ["", *(module.__name__.rpartition(".")[2] for module in cli.COMMANDS)])
def test_help(command: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """Oracle: 80 columns, placeholders of at most 8 letters, and examples that the parser takes."""
    text = stopped(capsys, *([command] if command else []), "--help")
    assert max(map(len, text.splitlines())) <= 80, max(text.splitlines(), key=len)
    assert text.startswith(f"usage: fastvit-triton {command} [OPTIONS]".replace("  ", " "))
    words = re.findall(r"^  (?:-\w, )?--[\w-]+ \[?([A-Z,…]+)\b", text, re.MULTILINE)
    assert max(map(len, words), default=0) <= 8
    _, _, examples = text.partition("\nexamples:\n")
    lines = [line.strip() for line in examples.splitlines() if line.strip().startswith("fastvit-triton ")]
    assert len(lines) >= 2
    monkeypatch.setattr(parser._Checked, "__call__", argparse._StoreAction.__call__)  # the files do not exist
    for line in lines:
        _, *arguments = shlex.split(line, comments=True)
        if "--help" not in arguments:
            assert callable(cli.build_parser().parse_args(arguments).run)


@pytest.mark.fast
def test_list_of_recipes_shows_their_values(capsys: pytest.CaptureFixture):
    """Oracle: each recipe's fields, read back from its options and from those of every recipe."""
    text = prints(capsys, "train", "--list-recipes")
    assert max(map(len, text.splitlines())) < 80
    blocks = re.findall(r"^  (\w.*)\n((?:    .*\n)+)", text, re.MULTILINE)
    (_, common), *found = [(name, shlex.split(options)) for name, options in blocks]
    assert [name for name, _ in found] == list(RECIPES)
    for name, words in found:
        shown = {option: value for option, value in pairwise([*common, *words]) if option.startswith("--")}
        recipe = RECIPES[name]
        for option, (kind, _) in RECIPE_OPTIONS.items():
            value = getattr(recipe, option.replace("-", "_"))
            if option == "epochs" and value is None:
                assert f"{recipe.steps:,} steps in all" in " ".join(words)
            elif option == "warmup" and recipe.warmup_unit != "run":
                assert f"warm-up of {value:,} {recipe.warmup_unit}" in " ".join(words)
            else:
                assert kind(shown.get(f"--{option}", kind())) == (kind() if value is None else pytest.approx(value))


@pytest.mark.fast
def test_errors_of_options_do_not_offer_none(capsys: pytest.CaptureFixture):
    """Oracle: the word; NaN and negative lengths are in no range of a recipe."""
    values = {name: "nan" if kind is float else "-1" for name, (kind, _) in RECIPE_OPTIONS.items() if kind is not str}
    assert len(values) > 10
    for name, value in values.items():
        assert "None" not in refused(capsys, "train", f"--{name}", value)


WRONG = {
    "train": {
        "--data": ("nowhere", "--data nowhere is not a folder"),
        "--model": ("vit_nothing", "no model is called 'vit_nothing'"),
        "--epochs": ("many", "--epochs is 'many'; use an integer"),
        "--lr": ("fast", "--lr is 'fast'; use a number"),
        "--recipe": ("none", "--recipe is 'none'"),
        "--weights": ("none.pt", "there is no checkpoint none.pt"),
        "--device": ("warp", "--device warp does not work here"),
        "--workers": ("-1", "--workers is -1"),
    },
    "benchmark": {
        "--batch": ("0", "--batch is 0; use an integer of at least 1"),
        "--dtype": ("int8", "--dtype: invalid choice: 'int8'"),
        "--model": ("vit_bas_patch16", "the nearest are vit_base_patch16"),
        "--device": ("warp", "--device warp"),
        "--out": ("nowhere/rows.json", "nowhere/rows.json is in a folder"),
    },
    "check": {
        "--model": ("vit_nothing", "no model is called 'vit_nothing'"),
        "--batch": ("0", "--batch is 0; use an integer of at least 1"),
        "--img-size": ("big", "--img-size is big"),
        "--dtype": ("int8", "--dtype: invalid choice: 'int8'"),
        "--out": ("nowhere/x.json", "--out nowhere/x.json is in a folder that does not exist"),
    },
    "doctor": {
        "--gpu": ("gtx970", "--gpu is gtx970"),
        "--batch": ("-1", "--batch is -1"),
        "--model": ("timm:nothing", "timm has no model"),
    },
    "explain": {
        "--most": ("0", "--most is 0"),
        "--checkpoint": ("none", "there is no checkpoint none"),
        "--query": ("-1", "--query is -1"),
    },
    "tune": {
        "--seconds": ("nan", "--seconds is nan"),
        "--model": ("keras:vit", "'keras'"),
        "--batch": ("0", "--batch is 0"),
    },
}


@pytest.mark.fast
@pytest.mark.filterwarnings("default")  # timm's own
@pytest.mark.parametrize("command", WRONG)
def test_errors_come_in_the_order_typed(command: str, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture):
    """Oracle: of all options with wrong values, the first is named, in either order, and the command does not start."""
    monkeypatch.chdir(tmp_path)
    module = next(module for module in cli.COMMANDS if module.__name__.endswith(f".{command}"))
    monkeypatch.setattr(module, "run", lambda args: pytest.fail("started"))
    words = [(option, value) for option, (value, _) in WRONG[command].items()]
    for order in (words, words[::-1], words[1:] + words[:1]):
        sentence = refused(capsys, command, *(word for pair in order for word in pair))
        assert WRONG[command][order[0][0]][1] in sentence, sentence


@pytest.mark.fast
def test_models_are_refused_before_images_are_listed(digits_run: Path, tmp_path: Path, monkeypatch, capsys):
    """Oracle: a scan of the folder, which takes minutes for ImageNet, that fails the test."""
    monkeypatch.setattr("fastvit_triton.train.run.load", lambda *words, **options: pytest.fail("listed"))
    words = ("train", "--data", tmp_path, "--out", tmp_path, "--model", "vit_tiny_patch16_224", "--img-size", 97)
    assert "img_size height 97 is not a multiple of patch_size 16" in refused(capsys, *words)
    assert "--distillation soft needs a --teacher" in refused(capsys, *words[:-2], "--distillation", "soft")
    assert "needs a --model with a distillation token" in refused(capsys, *words[:-2], "--teacher", digits_run)


def test_missing_libraries_are_named_with_their_extra(digits_run: Path, tmp_path, monkeypatch, capsys):
    """Oracle: the extra that setup.py gives; the digits need what a folder needs, and scikit-learn."""
    train = ("train", "--out", tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        assert "matplotlib; pip install 'fastvit_triton[demo]'" in refused(capsys, *train)
        assert "matplotlib; pip install 'fastvit_triton[train]'" in refused(capsys, *train, "--data", tmp_path)
        words = ("explain", "--checkpoint", digits_run, digits_run / EXAMPLE)
        assert "matplotlib; pip install 'fastvit_triton[train]'" in refused(capsys, *words)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "timm", None)
        assert "fastvit_triton[timm]" in refused(capsys, "benchmark", "--model", "resnet18")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pycocotools.coco", None)
        patch.setattr("fastvit_triton.train.run.load", lambda *words, **options: pytest.fail("listed"))
        assert "pycocotools; pip install 'fastvit_triton[detect]'" in refused(capsys, *train, "--data", "scenes")
    for name in [name for name in sys.modules if name.split(".")[0] == "sklearn"] + ["sklearn", "sklearn.datasets"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert "scikit-learn; pip install 'fastvit_triton[demo]', or give a folder" in refused(capsys, *train)


def test_default_run_writes_its_files(digits_run: Path):
    """Oracle: the documented files; better than a guess, one in ten, by three standard deviations of 360 images."""
    assert accuracy(digits_run) > 0.1 + 3 * (0.1 * 0.9 / 360) ** 0.5
    assert sorted(path.name for path in digits_run.iterdir()) == sorted([*OF_DIGITS, LOCK])


@pytest.mark.full
def test_default_run_learns_the_digits(tmp_path: Path):
    """Oracle: 94.8 % of the test digits (mean of four seeds) minus three standard deviations; nothing on stderr."""
    child = start("train", "--epochs", "16", "--out", str(tmp_path / "run"))
    _, errors = child.communicate()
    assert child.returncode == 0 and not errors, errors
    assert accuracy(tmp_path / "run") >= 0.92


@pytest.mark.full
def test_summary_lists_the_files_and_next_commands(digits_run: Path, capsys: pytest.CaptureFixture):
    """Oracle: resuming a finished run trains nothing and prints the same summary; the suggested commands work."""
    text = prints(capsys, "train", "--out", digits_run, "--resume")
    assert f"test accuracy {accuracy_text(accuracy(digits_run), 360)} after {EPOCHS} epochs" in text
    assert "1,437 training and 360 test images" in text
    assert all(str(digits_run / name) in text for name in OF_DIGITS)
    commands = re.findall(r"^  fastvit-triton (.*)$", text, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["predict", "evaluate", "explain", "export"]
    assert all(main(command.split()) == 0 for command in commands)


def test_mistakes_are_explained_first(digits_run: Path, tmp_path: Path, undrawn, capsys):
    """Oracle: the test digits through the model by hand, errors sorted by their confidence."""
    images, targets = digits("test")
    model, header = load_model(digits_run)
    transform = json.loads(header["training"])["transform"]
    mean, std = transform["mean"][0], transform["std"][0]
    with torch.no_grad():
        chances, numbers = model.eval()((images - mean) / std).softmax(-1).max(-1)
    wrong = (numbers != targets).nonzero()[:, 0].tolist()
    order = sorted(wrong, key=lambda i: -float(chances[i]))[:2]
    words = ["explain", "--checkpoint", str(digits_run), "--most", "2", "--out", str(tmp_path / "report")]
    assert main(words) == 0
    said = f"report.html shows 2 of {len(wrong)} mistakes on test images; its"
    assert said in capsys.readouterr().out
    page = (tmp_path / "report" / "report.html").read_text()
    assert re.findall(r"<li>([^<]*?): <a", page) == [f"test image {i}" for i in order]


def test_evaluate_reproduces_the_logged_accuracy(digits_run: Path, capsys: pytest.CaptureFixture):
    """Oracle: the last row of the log; the counts of all classes add up."""
    text = prints(capsys, "evaluate", "--checkpoint", digits_run)
    correct = round(accuracy(digits_run) * 360)
    assert correct / 360 == accuracy(digits_run)
    assert f"{correct} of 360 test images are correct" in text
    counts = re.findall(r"│ \d +│ (\d+) +│ (\d+) +│", text)
    assert len(counts) == 10 and sum(int(images) for images, _ in counts) == 360
    assert sum(int(count) for _, count in counts) == correct


def test_predict_reads_real_images(digits_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: the share of the log for 20 digits, minus three deviations; inverted images give the same class."""
    images, targets = digits("test")
    pages = tmp_path / "pages"
    pages.mkdir()
    for i, image in enumerate(images[:20]):
        page = Image.fromarray((image[0] * 255).byte().numpy()).resize((96, 96), Image.Resampling.BICUBIC)
        page.convert("RGB").save(pages / f"{i:02d}.jpg")
    lines = prints(capsys, "predict", "--checkpoint", digits_run / WEIGHTS, pages, "--top", "1").splitlines()
    said = [re.fullmatch(rf"{re.escape(str(pages))}/(\d+)\.jpg: (\d) \([\d.]+ %\)", line).groups() for line in lines]
    assert [int(name) for name, _ in said] == list(range(20))
    correct = sum(int(answer) == target for (_, answer), target in zip(said, targets.tolist(), strict=False))
    share = accuracy(digits_run)
    assert correct >= 20 * share - 3 * (20 * share * (1 - share)) ** 0.5 > 2  # by guessing

    dark = Image.open(pages / "00.jpg").convert("L").point(lambda level: 255 - level)
    dark.save(tmp_path / "dark.png")
    (line,) = prints(capsys, "predict", "--checkpoint", digits_run, tmp_path / "dark.png", "--invert").splitlines()
    assert line.count("%") == 3 and f": {said[0][1]} (" in line


def test_predict_with_bad_images(digits_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: one sentence for the bad image, a prediction for the good one, exit code 2; errors if none is good."""
    good, bad = digits_run / EXAMPLE, tmp_path / "bad.png"
    bad.write_bytes(b"")
    assert main(["predict", "--checkpoint", str(digits_run), str(bad), str(good)]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"fastvit-triton: skipped: {bad} cannot be read as an image: empty file\n"
    assert captured.out.startswith(f"{good}: ")
    sentence = f"fastvit-triton: error: no file matches {tmp_path}/*.jpg"
    assert refused(capsys, "predict", "--checkpoint", digits_run, tmp_path / "*.jpg") == sentence
    missing = refused(capsys, "predict", "--checkpoint", digits_run, tmp_path / "a.jpg")
    assert missing == f"fastvit-triton: error: {tmp_path}/a.jpg does not exist"
    assert main(["predict", "--checkpoint", str(digits_run), *map(str, (bad, tmp_path / "a.jpg", good, bad))]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == 3 * ["skipped:"] and lines[1].endswith("a.jpg does not exist")
    (tmp_path / "void").mkdir()
    assert "there is no image in" in refused(capsys, "predict", "--checkpoint", digits_run, tmp_path / "void")


@pytest.mark.full
def test_a_run_that_failed_before_training_can_be_repeated(tmp_path: Path, monkeypatch, capsys):
    """Oracle: the advice of the first error, followed, trains; the folder of the first try holds no run."""
    photos, out = tmp_path / "photos", tmp_path / "run"
    for name in ("a", "b"):
        (photos / name).mkdir(parents=True)
        for i in range(4):
            Image.effect_noise((32, 32), 60).save(photos / name / f"{i}.png")
    for i in range(4):  # the header is whole, so only decoding finds out
        file = photos / "a" / f"{i}.png"
        file.write_bytes(file.read_bytes()[:300])
    for i in (4, 5):
        Image.effect_noise((32, 32), 60).save(photos / "a" / f"{i}.png")
    monkeypatch.setattr(inspection, "_check_pixels", lambda *given: None)  # of a sample, as of many images
    words = ["train", "--data", photos, "--val-split", "0.4", "--model", "vit_digits_patch2_8", "--img-size", "8"]
    words += ["--epochs", "1", "--batch-size", "4", "--out", out]
    assert "or pass --skip-bad-images" in refused(capsys, *words) and (out / "split.json").exists()
    assert "leave it out to start a run there" in refused(capsys, *words, "--skip-bad-images", "--resume")
    assert main([str(word) for word in (*words, "--skip-bad-images")]) == 0
    assert "already holds a run" in refused(capsys, *words, "--skip-bad-images")


def test_an_existing_run_is_not_overwritten(digits_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: the bytes of the files after each attempt."""
    before = {path.name: path.read_bytes() for path in digits_run.iterdir()}
    train = ("train", "--out", digits_run)
    assert "already holds a run; pass --resume, --overwrite or another --out" in refused(capsys, *train)
    wrong = ("--distillation", "soft")  # told before the folder, which another option cannot mend
    assert "--distillation soft needs a --teacher" in refused(capsys, *train, *wrong)
    assert "pass one of them" in refused(capsys, *train, "--resume", "--overwrite")
    assert "lr is 1.0, but the run to resume has" in refused(capsys, *train, "--resume", "--lr", "1")
    assert "is not a folder" in refused(capsys, *train, "--overwrite", "--data", tmp_path / "nowhere")
    assert "epochs is 0" in refused(capsys, *train, "--overwrite", "--epochs", "0")
    assert {path.name: path.read_bytes() for path in digits_run.iterdir()} == before


def test_invalid_input(digits_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: one sentence that suggests a remedy; nothing is written."""
    out = tmp_path / "out"
    train = ("train", "--out", out)
    assert "leave it out to start a run there" in refused(capsys, *train, "--resume")
    assert "vit_tiny_patch16_224" in refused(capsys, *train, "--model", "vit_tiny_patch16_225")
    assert "img_size height 9 is not a multiple of patch_size 2; use 8 or 10" in refused(
        capsys, *train, "--img-size", 9
    )
    assert not out.exists()
    assert "there is no checkpoint" in refused(capsys, "evaluate", "--checkpoint", tmp_path)
    named = refused(capsys, "evaluate", "--checkpoint", tmp_path / "none")
    assert named.endswith("a folder, hf-hub:org/name, or a name that `fastvit-triton models --pretrained` lists")
    assert "exists already" in refused(capsys, "convert", digits_run, digits_run / WEIGHTS, "--to", "timm")
    bare = tmp_path / "bare.safetensors"
    assert main(["convert", str(digits_run), str(bare), "--to", "timm"]) == 0


@pytest.mark.full
def test_overwrite_and_weights(digits_run: Path, tmp_path: Path):
    """Oracle: the epoch in the state; one epoch from trained weights beats one from random weights."""
    out = tmp_path / "run"
    assert main(["train", "--out", str(out), "--epochs", "1"]) == 0
    fresh = accuracy(out)
    weights = ["--weights", str(digits_run / WEIGHTS)]
    assert main(["train", "--out", str(out), "--epochs", "1", "--overwrite", "--seed", "3", *weights]) == 0
    state = load_state(out / STATE)
    assert len(state["history"]) == 1 and state["settings"]["seed"] == 3
    assert accuracy(out) > fresh


def test_image_folder(tmp_path: Path, undrawn, capsys: pytest.CaptureFixture):
    """Oracle: red and blue are classified; the files are the same; two bad images raise, or are skipped and listed."""
    folder = write_folder(tmp_path / "my images", per_class=8)
    (folder / "train" / "red" / "1.png").write_bytes(b"")
    cut = truncate(folder / "val" / "blue" / "2.jpg")
    out = tmp_path / "my run"
    options = ["--data", str(folder), "--out", str(out), "--model", "vit_digits_patch2_8", "--img-size", "8"]
    options += ["--epochs", "12", "--batch-size", "8", "--lr", "0.003", "--workers", "0"]
    assert "1 of 32 images" in refused(capsys, "train", *options)
    assert not out.exists()
    text = prints(capsys, "train", *options, "--skip-bad-images")
    before, after = text.split("epoch 1/12")  # what the header shows is said first, the rest when it is decoded
    assert before.endswith(f"\nskipped 1 image that cannot be read: {folder / 'train' / 'red' / '1.png'}\n")
    assert f"\nskipped 1 more image that cannot be read: {cut}\n" in after and after.count("skipped") == 1
    assert accuracy(out) >= 13 / 15  # the two grey images can only be guessed
    assert (out / CURVES).exists() and (out / PREDICTIONS).exists()
    assert f"--checkpoint '{out}'" in text

    assert main(["evaluate", "--checkpoint", str(out), "--workers", "0"]) == 0
    assert f"{round(accuracy(out) * 15)} of 15 test images are correct" in capsys.readouterr().out
    assert main(["predict", "--checkpoint", str(out), str(folder / "val" / "blue" / "4.jpg"), "--top", "1"]) == 0
    assert "4.jpg: blue (" in capsys.readouterr().out
    (folder / "val" / "green").mkdir()
    assert "has green, not among the 2 classes" in refused(capsys, "evaluate", "--checkpoint", out, "--workers", "0")


@pytest.mark.full
def test_resuming_a_finished_run_keeps_skipping_bad_images(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: the evaluation before; the bad image has a good header, so a resumed run finds it after its weights."""
    folder, out = write_folder(tmp_path / "images", per_class=2), str(tmp_path / "run")
    truncate(folder / "val" / "blue" / "0.jpg")
    options = ["--data", str(folder), "--model", "vit_digits_patch2_8", "--img-size", "8", "--epochs", "1"]
    assert main(["train", "--out", out, "--workers", "0", *options, "--skip-bad-images"]) == 0
    printed = []
    for _ in range(2):
        capsys.readouterr()
        printed.append(prints(capsys, "evaluate", "--checkpoint", out, "--workers", "0"))
        assert main(["train", "--out", out, "--workers", "0", "--resume"]) == 0
    assert printed[0] == printed[1] and "skipped 1 image that" in printed[0]


@pytest.mark.full
@pytest.mark.skipif(os.name == "nt", reason="Windows sends no SIGINT to a child alone")
def test_ctrl_c_keeps_the_last_epoch(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: exit code 130, one sentence, and a state and weights that load and evaluate."""
    out = tmp_path / "run"
    # processes started in the background ignore Ctrl-C, and children inherit that
    listen = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    child = start("train", "--out", str(out), "--epochs", "5000", preexec_fn=listen)
    try:
        for line in child.stdout:
            if line.startswith("epoch 2/"):
                break
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=HANG)
    finally:
        child.kill()
    assert child.returncode == 130
    (sentence,) = errors.splitlines()
    assert sentence.startswith("fastvit-triton: stopped;") and f"train --out {out} --resume" in sentence
    assert len(load_state(out / STATE)["history"]) >= 2
    assert "of 360 test images are correct" in prints(capsys, "evaluate", "--checkpoint", out)
    assert not [path.name for path in out.iterdir() if path.name not in (*FILES, LOCK)]


@pytest.mark.full
def test_full_disk(tmp_path: Path):
    """Oracle: exit code 1 and one sentence if no file may grow beyond 100 kB."""
    resource = pytest.importorskip("resource")
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # noqa: E731
    child = start("train", "--out", str(tmp_path / "run"), "--epochs", "1", preexec_fn=limit)
    _, errors = child.communicate(timeout=HANG)
    assert child.returncode == 1
    (sentence,) = errors.splitlines()
    assert sentence.startswith(f"fastvit-triton: error: cannot write {tmp_path / 'run' / STATE}: File too large;")
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_resume_auto_and_more_epochs(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: the number of epochs in the state; a run that is started, resumed, changed and extended."""
    out = tmp_path / "run"
    command = ["train", "--out", str(out), "--device", "cpu", "--resume", "auto"]

    def epochs() -> int:
        return len(load_state(out / STATE)["history"])

    first = [*command, "--epochs", "1", "--batch-size", "512"]
    assert main(first) == 0 and epochs() == 1
    assert main(first) == 0 and epochs() == 1
    assert main([*command, "--epochs", "2"]) == 0 and epochs() == 2
    assert "after 2 epochs" in capsys.readouterr().out
    assert "lr is 0.5, but the run to resume has" in refused(capsys, *command, "--lr", "0.5")
    assert main([*command, "--lr", "0.5", "--accept-changes"]) == 0
    assert "the state does not fit this run" in refused(capsys, *command, "--ema-decay", "0.9", "--accept-changes")
    assert load_state(out / STATE)["settings"]["epochs"] == 2


@pytest.mark.full
@pytest.mark.skipif(os.name == "nt", reason="Windows has no such file names")
def test_ctrl_c_between_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Oracle: the sentence says how to resume; resuming succeeds from either state, as both are complete."""
    out, real = tmp_path / "run", os.replace

    def interrupted(source: Path, target: Path) -> None:
        real(source, target)
        if Path(target).name == PREVIOUS:
            raise KeyboardInterrupt

    words = ["train", "--out", str(out), "--device", "cpu"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        assert main([*words, "--epochs", "3", "--batch-size", "512"]) == 130
    assert (out / STATE).exists() and "resume with: " in capsys.readouterr().err
    (out / STATE).unlink()
    assert main([*words, "--resume"]) == 0


@pytest.mark.full
def test_names_that_the_encoding_lacks_are_escaped(digits_run: Path, tmp_path: Path):
    """Oracle: the escapes of a file name, on a stdout that is ASCII, as in a pipe on Windows."""
    picture = tmp_path / "日.png"
    shutil.copy(digits_run / "example.png", picture)
    child = start("predict", "--checkpoint", str(digits_run), str(picture), variables={"PYTHONIOENCODING": "ascii"})
    printed, _ = child.communicate(timeout=HANG)
    assert child.returncode == 0 and r"\u65e5.png: " in printed


@pytest.mark.full
def test_class_names_are_data(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: names that are formulas, markup, terminal commands and no UTF-8 are printed as they are, or escaped."""
    names = {"$\\frac$": "$\\frac$", "[red]x": "[red]x", "esc\x1b[2J": r"esc\x1b[2J", "bad\udcff": r"bad\udcff"}
    for split in ("train", "val"):
        for name in names:
            (tmp_path / split / name).mkdir(parents=True)
            Image.effect_noise((9, 9), 50).save(tmp_path / split / name / "0.png")
    out = str(tmp_path / "run")
    options = ["--model", "vit_tiny_patch16_224", "--epochs", "1", "--batch-size", "4", "--img-size", "16"]
    options += ["--workers", "0", "--device", "cpu"]
    assert main(["train", "--data", str(tmp_path), "--out", out, *options]) == 0
    assert main(["evaluate", "--checkpoint", out, "--workers", "0"]) == 0
    assert main(["predict", "--checkpoint", out, "--top", "4", f"{out}/example.png"]) == 0
    report = ["--out", str(tmp_path / "report"), "--device", "cpu", "--workers", "0"]
    assert main(["explain", "--checkpoint", out, str(tmp_path / "val"), *report]) == 0
    printed, errors = capsys.readouterr()
    assert all(printed.count(name) == 3 for name in names.values()) and not errors and "\x1b" not in printed
    assert "\x1b" not in (tmp_path / "report" / "report.html").read_text()


@pytest.mark.parametrize(
    ("error", "sentence", "code"),
    [
        ("DataLoader worker (pid 7) is killed by signal: Killed. ", "a worker process that decodes images died", 1),
        (
            "foo_cuda does not have a deterministic implementation, but\nyou set",
            "--deterministic: foo_cuda does not",
            2,
        ),
    ],
)
def test_errors_of_pytorch_are_one_sentence(error, sentence, code, monkeypatch, capsys: pytest.CaptureFixture):
    """Oracle: a command that raises PyTorch's own errors."""

    def run(_: object) -> int:
        raise RuntimeError(error)

    monkeypatch.setattr(evaluate, "run", run)
    assert sentence in refused(capsys, "evaluate", "--checkpoint", __file__, code=code)


@pytest.mark.full
def test_deterministic(tmp_path: Path):
    """Oracle: the same bits with one and with two threads, of weights that two threads sum in another order."""
    weights = []
    options = ["--epochs", "1", "--batch-size", "512", "--device", "cpu", "--deterministic"]
    for threads in ("1", "2"):
        out = tmp_path / threads
        child = start("train", "--out", str(out), *options, variables={"OMP_NUM_THREADS": threads})
        _, errors = child.communicate(timeout=HANG)
        assert child.returncode == 0, errors
        weights.append(load_file(out / WEIGHTS))
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


@pytest.mark.full
@pytest.mark.filterwarnings("default")  # warnings of other libraries
@pytest.mark.parametrize("words", [(), pytest.param(("--train", "--dtype", "bfloat16"), marks=pytest.mark.full)])
def test_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture, words: tuple[str, ...]):
    """Oracle: the verdicts; every variant is correct, a CPU gets no absolute times, and the file has its provenance.

    The table has the ratios of the file.
    """
    with compiling("aot_eager"):  # captures the same graphs without a compiler
        command = ["benchmark", "--device", "cpu", "--model", "vit_digits_patch2_8", "--batch", "2", *words]
        assert main([*command, "--out", str(tmp_path / "rows.json")]) == 0
    text, held = capsys.readouterr().out, json.loads((tmp_path / "rows.json").read_text())
    variants = {row["arm"]: row for row in held["rows"]}
    assert {"eager", "ours eager", "torch.compile", "ours compiled", "timm"} <= variants.keys()
    assert "need one" in text and "ratios only" in text and " ms" not in text
    for name in ("eager", "ours eager", "torch.compile", "ours compiled"):
        assert variants[name]["match"] and variants[name]["speedup"] > 0 and "us" not in variants[name], variants[name]
        assert ("saved_bytes" in variants[name]) == bool(words)
        low, high = variants[name]["speedup_quartiles"]
        said = f"{variants[name]['speedup']:.2f} ({low:.2f} to {high:.2f})"
        assert re.search(rf"^{name} +{re.escape(said)} ", text, re.MULTILINE)
    assert (
        re.search(r"^timm: timm has no such model", text, re.MULTILINE)
        and held["command"]
        and held["packages"]["torch"]
    )


def test_benchmark_on_a_gpu_reports_times_and_memory(capsys: pytest.CaptureFixture):
    """Oracle: rows by hand: milliseconds with quartiles and memory for correct variants, the reason for the others."""
    eager = dict(arm="eager (timm)", dtype="bfloat16", match=True, us=2000.0, q1=1900.0, q3=2100.0, peak_bytes=2**21)
    eager |= dict(speedup=1.0, speedup_quartiles=[1.0, 1.0], saved_bytes=2**20)
    ours = eager | dict(arm="ours", us=1000.0, speedup=2.0, speedup_quartiles=[1.9, 2.1], saved_bytes=2**19)
    wrong = dict(arm="wrong", match=False, worst="output 0", within=3.5, peak_bytes=None)
    late, absent = dict(arm="slow", error="TimedOut: x"), dict(arm="timm", reason="timm cannot be imported (x)")
    lines = [benchmark._line(benchmark._cells(row, True, True), 12) for row in (eager, ours, wrong)]
    assert "2.000 (1.900-2.100)" in lines[0] and len(set(map(len, lines))) == 1
    assert re.fullmatch(r"ours +1.000 \(1.900-2.100\) +2.00 +2.0 +0.5 +yes", lines[1])
    assert re.fullmatch(r"wrong +- +- +- +- +NO", lines[2])
    assert len(benchmark._line(benchmark._titles(True, True), 12)) == len(lines[0])
    benchmark._explain([eager, ours, wrong, late, absent], gpu=True)
    text = capsys.readouterr().out
    assert "the error of output 0 is 3.5 times the limit" in text and "fastvit_triton[timm]" in text
    assert benchmark._why(late).startswith("not ready in time") and benchmark._why(absent) == absent["reason"]
    assert "No GPU" not in text


@pytest.mark.full
@pytest.mark.filterwarnings("default")
def test_benchmark_rejects_batches_that_do_not_fit(capsys: pytest.CaptureFixture):
    """Oracle: the sentence names the model and says what would fit."""
    sentence = refused(capsys, "benchmark", "--device", "cpu", "--batch", "1000000000")
    assert "GiB for vit_tiny_patch16_224" in sentence and "can fit" in sentence


@pytest.mark.full
@pytest.mark.filterwarnings("default")
def test_benchmark_ends_in_time(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """Oracle: CPU seconds, of one or two in which the model is not built; it ends with a sentence."""
    monkeypatch.setattr(benchmark, "SECONDS", -14.0)  # plus 15 seconds
    start = time.process_time()
    sentence = refused(capsys, "benchmark", "--device", "cpu", "--model", "vit_huge_patch14_224")
    assert "vit_huge_patch14_224 at batch 2 takes longer than" in sentence and time.process_time() - start < 30


@pytest.mark.fast
def test_doctor_gives_one_reason(capsys: pytest.CaptureFixture):
    """Oracle: versions and the switch; why the kernels do not run, once, or that they do."""
    text = prints(capsys, "doctor")
    assert torch.__version__ in text and "FASTVIT_TRITON_BACKEND" in text
    assert re.search(rf"^fastvit_triton +{re.escape(__version__)}$", text, re.MULTILINE)
    reason = "run here" if torch.cuda.is_available() else "Triton kernels need a CUDA or ROCm GPU"
    assert text.count(reason) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU is described")
def test_doctor_names_a_torchvision_of_another_torch(capsys: pytest.CaptureFixture, monkeypatch):
    """Oracle: the first line of the error; without torchvision nothing is said."""

    load = importlib.import_module

    def failing(error):
        def imported(name, package=None):
            if name == "torchvision":
                raise error
            return load(name, package)

        monkeypatch.setattr(importlib, "import_module", imported)
        return [line for line in prints(capsys, "doctor").splitlines() if line.startswith("torchvision ")]

    (line,) = failing(RuntimeError("operator torchvision::nms does not exist\nmore"))
    assert "cannot be imported (operator torchvision::nms does not exist), nor can timm" in line
    assert "(RuntimeError)" in failing(RuntimeError())[0] and "(no extension)" in failing(OSError("no extension"))[0]
    assert failing(ModuleNotFoundError("No module named 'torchvision'")) == []


def test_doctor_says_which_products_run_by_onednn(capsys: pytest.CaptureFixture, monkeypatch):
    """Oracle: the CPU's name, and the row, measurements, switch and refusals that are given."""
    from fastvit_triton.kernels import measured, onednn

    def said(row=None, ways=None, switch="auto"):
        with onednn.using_row(row or {}), measured.using(measured.Measured(ways=ways or {})), using_backend(switch):
            assert main(["doctor"]) == 0
        lines = capsys.readouterr().out.splitlines()
        (first,) = (i for i, line in enumerate(lines) if line.startswith("oneDNN "))
        assert f" on {measured.cpu_name()}, " in lines[first]
        return [" ".join(line.split()) for line in lines[first + 1 :] if line.startswith("  ")]

    monkeypatch.setattr(onednn, "why_not", lambda device, dtype: None if dtype == torch.float32 else "no such products")
    monkeypatch.setattr(onednn, "refusal", lambda dtype, operation: "gelu is wrong" if operation == "gelu" else None)
    none = "float16, bfloat16 not used, no such products"
    assert said() == [f"float32 not used, there is no row for this CPU: {onednn.REMEDY}; gelu is wrong", none]
    row = {"float32": dict(inference=3 * 197 * 384**2, frozen=0.0)}
    used = "float32 used in inference for ViT-S and larger, frozen for ViT-Ti and larger; gelu is wrong"
    assert said(row) == [used, none]
    assert said({"float32": dict(training=1e12)})[0].startswith("float32 not used up to ViT-B")
    assert "tune` measured that it is faster" in said(ways={"a": "onednn", "b": "plain"})[0]
    tuned = "; blocks that `fastvit-triton tune` measured run as it found"
    assert said(row, {"a": "onednn"})[0] == used.replace("; gelu", f"{tuned}; gelu")
    assert "because FASTVIT_TRITON_BACKEND is onednn" in said(switch="onednn")[0]
    assert "not used, FASTVIT_TRITON_BACKEND is torch" in said(switch="torch")[0]


@pytest.mark.full
@pytest.mark.parametrize(
    "name, side, size, blocks, launches",
    [
        ("timm:vit_tiny_patch16_224", 0, 224, 12, (126, 77, 65)),
        ("torchvision:vit_b_16", 96, 96, 12, (186, 89, 77)),
        ("hf-config:Dinov2Model", 0, 224, 12, (173, 88, 76)),
        ("hf-config:CLIPConfig", 64, 64, 12, (175, 103, 79)),
        ("FOLDER", 0, 28, 2, (36, 23, 19)),
        ("FOLDER/config.json", 42, 42, 2, (36, 23, 19)),
        ("vit_digits_patch2_8", 0, 8, 4, None),
    ],
)
def test_doctor_examines_a_model(name, side, size, blocks, launches, tmp_path, capsys: pytest.CaptureFixture):
    """Oracle: operators counted by hand, modules of twelve blocks, all fused; the output says that kernels need a GPU.

    A block that is not frozen needs one more launch to fold its LayerNorms, or to run both when there are few rows, and
    one more to pack separate queries, keys and values. The bias of an eager convolution is one launch, and so is the
    copy of CLIP's class token for the following LayerNorm. torchvision's tokens are transposed, and both
    LayerNorms of a block copy them.
    """
    config = dict(
        model_type="dinov2", num_hidden_layers=2, image_size=28, architectures=["Dinov2ForImageClassification"]
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    name = name.replace("FOLDER", f"hf-config:{tmp_path}")
    with forcing("fused"):
        assert main(["doctor", "--model", name, "--batch", "64", *(["--img-size", str(side)] if side else [])]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{name}: ") and f" × {size} × {size}, bfloat16, inference" in text
    assert "need a CUDA or ROCm GPU, this is cpu" in text or torch.cuda.is_available()
    assert "Nothing here was measured." in text and "--gpu takes h200, " in text
    assert re.search(rf"^{blocks} of {blocks} blocks run fused, (over )?\d+ % of the FLOPs", text, re.MULTILINE)
    if launches is not None:
        (before, compiled, *ours) = values(text, "launches")
        assert (before, *ours) == launches and compiled < before
    assert len(values(text, "MB per image")) == 4
    assert len(values(text, "expected ms")) == 5
    error = r"± \d+ %" if "timm:" in name else "not tested against measurements"  # names of published models
    assert re.search(
        rf"batch 64: expected \d\.\d\d × torch\.compile \({error}\), \d\.\d\d × its mode max-autotune", text
    )


def test_doctor_examines_a_tower_of_packed_images(tmp_path, capsys: pytest.CaptureFixture):
    """Oracle: launches of a block counted by hand: statistics, qkv, rotation, zeros, attention, proj, fc1 and fc2."""
    tower = dict(hidden_size=64, num_heads=4, intermediate_size=128, out_hidden_size=64)
    counts = []
    for depth in (1, 2):
        held = dict(model_type="qwen2_5_vl", vision_config=tower | dict(depth=depth, fullatt_block_indexes=[0, 1]))
        (tmp_path / "config.json").write_text(json.dumps(held))
        with forcing("fused"):
            words = "--image-size", "57x84", "--batch", "2"
            assert main(["doctor", "--model", f"hf-config:{tmp_path}", *words]) == 0
        text = capsys.readouterr().out
        counts.append(values(text, "launches"))
    assert "batch 2: images of 3 × 56 × 84, bfloat16, inference" in text  # rounded to tokens of 28 × 28 pixels
    assert "\n2 of 2 blocks run fused, " in text and "share of FLOPs" in text
    assert counts[1][-1] - counts[0][-1] == 8


@pytest.mark.parametrize("name", ["timm:resnet18", "torchvision:vgg11"])
def test_doctor_on_a_model_without_blocks(name: str, capsys: pytest.CaptureFixture):
    """Oracle: one sentence, and no table of what does not change."""
    (sentence,) = prints(capsys, "doctor", "--model", name).splitlines()
    assert sentence.startswith(f"{name}: ") and "has no Transformer blocks" in sentence


def values(text: str, label: str) -> tuple[float, ...]:
    """The numbers of the first row with this label in `doctor`'s tables, without their ranges."""
    row = re.search(rf"^{label}  +(.*)$", text, re.MULTILINE)
    return () if row is None else tuple(map(float, re.sub(r"\(.*?\)|-", "", row[1]).split()))


@pytest.mark.full
@pytest.mark.parametrize(
    "gpu, architecture, batch, training",
    [("rtx4090", "sm_89", 256, False), ("h200", "sm_90", 1, False), ("h200", "sm_90", 256, True)],
)
@pytest.mark.parametrize("model", ["timm:vit_small_patch16_224", "vit_small_patch16_224"])
def test_doctor_predicts_the_default(gpu, architecture, batch, training, model, monkeypatch, capsys):
    """Oracle: `benchmarks.launches` and `predict`; by hand, 16 or 10 saved values per token."""
    nothing = functools.cache(lambda architecture: {})  # so that predicted rows decide
    monkeypatch.setattr(choose, "measured_ways", nothing)
    seen = []
    monkeypatch.setattr(count, "predict", lambda *given: seen.append(predict(*given)) or seen[0])
    words = ["--gpu", gpu, "--batch", str(batch), *(["--train"] if training else [])]
    text = prints(capsys, "doctor", "--model", model, *words)
    phase = "training" if training else "inference"
    setting = Setting(model, batch, phase, architecture)
    want = [figures(replace(setting, frozen=frozen)) for frozen in (False, True)[: 2 - training]]
    launches = want[0]["eager_launches"], want[0]["inductor_launches"], *(found["launches"] for found in want)
    assert values(text, "launches") == launches
    way = want[0]["ways"]["mlp"]
    nbytes = want[0]["eager_bytes"], want[0]["inductor_bytes"], *(found["bytes"] for found in want)
    assert values(text, "MB per image") == tuple(round(n / 1e6 / batch, 1) for n in nbytes)
    C, N = 384, 197
    sizes = Branch("attention", batch, N, C, 3 * C, C, 6), Branch("mlp", batch, N, C, 4 * C, 4 * C)
    assert tuple(b._replace(scales=0) for b in seen[0].blocks[0].branches) == sizes
    assert re.search(
        rf"^blocks\.\* ×12 \(Block\) +{way} +9\d\.\d %  .*predicted: attention \+ mlp; {phase}", text, re.MULTILINE
    )
    (one,) = seen
    eager, compiled, tuned, ours = one.eager_us(), one.compiled_us(), one.compiled_us("max-autotune"), one.ours_us()[1]
    times = (eager, compiled, ours) if training else (eager, compiled, tuned, ours, one.ours_us(True)[1])
    assert values(text, "expected ms") == pytest.approx([us / 1e3 for us in times], abs=5e-4)
    if not training:
        assert f"expected {compiled / ours:.2f} × torch.compile" in text
        return
    saved = tuple(round(12 * n * C * N * 2 / 1e6, 1) for n in (16, 16 if way == "plain" else 10))
    assert values(text, "MB per image saved") == saved


@pytest.mark.full
def test_doctor_has_default_batches_and_gpus(capsys: pytest.CaptureFixture):
    """Oracle: the table of rates, and the default batch sizes."""
    text = prints(capsys, "doctor", "--model", "vit_digits_patch2_8", "--gpu", "l40s")
    assert re.findall(r"^batch (\d+):", text, re.MULTILINE) == ["1", "8", "64", "256"]
    assert "here for L40S, sm_89." in text and gpus()["l40s"].source in text


@pytest.mark.full
def test_doctor_uses_the_local_gpu(monkeypatch, capsys: pytest.CaptureFixture):
    """Oracle: a fake driver. Rates are found by name; an architecture without rates uses another GPU's."""
    monkeypatch.setattr(backend, "why_not", lambda *given: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for name, capability, want in (("NVIDIA L40S", (8, 9), "L40S, sm_89."), ("Other", (12, 1), "H200, sm_121.")):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index, name=name: name)
        properties = SimpleNamespace(major=capability[0], minor=capability[1])
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index, found=properties: found)
        choose.forget()
        launch._architecture.cache_clear()
        text = prints(capsys, "doctor", "--model", "vit_digits_patch2_8", "--batch", "1")
        assert f"here for {want}\n" in text and "--gpu takes" not in text
    choose.forget()
    launch._architecture.cache_clear()


@pytest.mark.full
@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize(
    "words", ["--gpu 4090 --batch 8", "--train --batch 8", "--amp float16 --batch 8", "--batch 8 --amp"]
)
def test_doctor_assumes_vit_b(words, installed, monkeypatch, capsys: pytest.CaptureFixture):
    """Oracle: timm's ViT-B/16 if timm is installed, else ours; both have 86.6 million parameters."""
    monkeypatch.setattr(variants, "absent", lambda name: None if installed else f"{name} cannot be imported")
    assert main(["doctor", *words.split()]) == 0
    text, name = capsys.readouterr().out, "timm:vit_base_patch16_224" if installed else "vit_base_patch16_224"
    assert text.startswith(f"{name}: VisionTransformer, 86.6 M parameters\n")
    assert re.search(r"^12 of 12 blocks run (fused|mixed|plain), (over )?99 % of the FLOPs", text, re.MULTILINE)


@pytest.mark.full
@pytest.mark.parametrize("model", ["timm:vit_tiny_patch16_224", "vit_tiny_patch16_224"])
def test_doctor_predicts_autocast(model: str, capsys: pytest.CaptureFixture):
    """Oracle: launches of the casts that autocast adds in eager PyTorch: at least one for each product of a block."""
    counts = {}
    for amp in ("", "bfloat16", "float16"):
        text = prints(capsys, "doctor", "--model", model, "--batch", "64", *(["--amp", amp] if amp else []))
        assert f" {f'autocast to {amp}' if amp else 'bfloat16'}, inference\n" in text
        counts[amp] = values(text, "launches")
    assert counts["bfloat16"] == counts["float16"] and counts["float16"][0] >= counts[""][0] + 12 * 4


@pytest.mark.full
def test_doctor_names_the_way_of_each_module(capsys: pytest.CaptureFixture):
    """Oracle: the way that is forced, for blocks and what is inside them."""
    for way in WAYS:
        with forcing(way):
            assert main(["doctor", "--model", "timm:vit_tiny_patch16_224", "--batch", "8", "--gpu", "h100"]) == 0
        text = capsys.readouterr().out
        table = text[text.index("\nmodule ") : text.index("\n\n ")].strip().splitlines()[1:]
        found = {line.split("(")[0].strip(): re.search(r"\)  +(.*?)  ", line) for line in table}
        shown = {name: way[1] for name, way in found.items() if way is not None}  # rows of norms share lines
        others = shown.keys() ^ {"patch_embed", "blocks.* ×12", "blocks.*.attn ×12", "blocks.*.mlp ×12"}
        assert all("norm" in name for name in others)
        assert {found for name, found in shown.items() if "blocks" in name} == {way}
        assert f"12 of 12 blocks run {way}, 98 % of the FLOPs" in text


@pytest.mark.fast
@pytest.mark.parametrize(
    "words, sentence",
    [
        ("timm:vit_tinny_patch16_224", "nearest are vit_tiny_patch16_224"),
        ("torchvision:nothing", "torchvision has no model called 'nothing'"),
        ("keras:vit", "begins with 'keras'; use timm:NAME, torchvision:NAME, hf-config:PATH_OR_CLASS"),
        ("vit_nothing", "no model is called 'vit_nothing'"),
        ("hf-config:Nothing", "not a file, a folder with config.json, or a class"),
        ("hf-config:AutoConfig", "or a class of transformers"),
        ("hf-config:BertConfig", "BertModel takes input_ids, not images"),
        ("hf-config:VitPoseConfig", "name the class of a model"),
        ("hf-config:Siglip2VisionConfig", "missing 2 required positional arguments"),
        ("hf-config:{nonsense", "Expecting property name"),
        ('hf-config:{"a": 1}', "'model_type' is missing or unknown"),
        ("hf-config:[1]", "not a configuration of transformers"),
        ('hf-config:{"model_type": "vit", "hidden_size": "many"}', "hidden_size"),
        ("vit_tiny_patch16_224 --img-size 97", "not a multiple of patch_size 16"),
        ("torchvision:vit_b_16 --img-size 97", "--img-size 97 does not fit"),
        ("timm:resnet18 --img-size 0", "--img-size is 0"),
        ("timm:resnet18 --img-size 9x", "--img-size is 9x; use a side of at least 1 pixel, or HEIGHTxWIDTH"),
        ("torchvision:vit_b_16 --img-size 64x32", "--img-size is 64x32, and torchvision's ViTs take square images"),
        ("hf-config:CLIPConfig --img-size 64x32", "--img-size is 64x32, and CLIPVisionModel takes square images"),
        ("timm:resnet18 --gpu gtx970", "--gpu is gtx970; use one of h200, "),
        ("timm:resnet18 --gpu 200", "--gpu is 200; use one of h200, b200"),
        ("timm:resnet18 --amp float64", "--amp: invalid choice: 'float64'"),
    ],
)
def test_doctor_rejects_bad_models(words, sentence, tmp_path, capsys: pytest.CaptureFixture):
    """Oracle: one sentence that states the problem."""
    name, *options = words.split(" --") if "{" not in words else [words]
    if name.startswith(("hf-config:{", "hf-config:[")):
        path = tmp_path / "made.json"
        path.write_text(name.removeprefix("hf-config:"))
        name = f"hf-config:{path}"
    options = [word for option in options for word in f"--{option}".split()]
    assert sentence in refused(capsys, "doctor", *(["--model", name] if name else []), *options)


@pytest.mark.parametrize("name", ["timm:vit_tiny_patch16_224", "torchvision:vit_b_16", "hf-config:ViTConfig"])
def test_doctor_reports_a_missing_package(name, monkeypatch, capsys: pytest.CaptureFixture):
    """Oracle: the sentence names the package."""
    package = {"hf-config": "transformers"}.get(name.split(":")[0], name.split(":")[0])
    monkeypatch.setitem(sys.modules, package, None)
    sentence = refused(capsys, "doctor", "--model", name)
    assert f"{package} cannot be imported" in sentence
    assert ("fastvit_triton[timm]" in sentence) == (package == "timm")


@pytest.mark.fast
def test_convert_round_trip_keeps_every_tensor(digits_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: every tensor of the original model."""

    there, back = tmp_path / "timm.safetensors", tmp_path / "back.safetensors"
    assert main(["convert", str(digits_run), str(there), "--to", "timm"]) == 0
    assert main(["convert", str(there), str(back), "--to", "fastvit_triton", "--model", "vit_digits_patch2_8"]) == 0
    assert f"{back} holds vit_digits_patch2_8" in capsys.readouterr().out
    (first, _), (second, _) = load_model(digits_run), load_model(back)
    for (name, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert main(["predict", "--checkpoint", str(back), str(digits_run / EXAMPLE)]) == 0
