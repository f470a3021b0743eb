"""Tests of what a user with a folder of photographs does: division, training, evaluation, prediction."""

import importlib.util
import json
import re
import runpy
import shlex
import sys
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import prints, refused
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from fastvit_triton import create_model, list_models, optimize, predict
from fastvit_triton.cli import build_parser, main
from fastvit_triton.cli.explain import _check_mistakes
from fastvit_triton.convert.flop_shares import flops, stated_input
from fastvit_triton.convert.reporting import Report
from fastvit_triton.models import model_config, nearest
from fastvit_triton.models.weights.load import load_model, save_weights
from fastvit_triton.models.weights.pretrained import figures, imagenet_classes
from fastvit_triton.models.weights.rebuild import skeleton
from fastvit_triton.train import load_state, plots
from fastvit_triton.train.data.folder import scan_folder
from fastvit_triton.train.data.sample import CLASSES as FRUIT
from fastvit_triton.train.data.sample import render, sample_pictures
from fastvit_triton.train.data.split import SPLIT, Split
from fastvit_triton.train.loop import Score
from fastvit_triton.train.outputs import BEST, WEIGHTS, summary
from fastvit_triton.train.recipes import FOLDER, PHOTOS
from fastvit_triton.train.settings import resolve_settings
from fastvit_triton.train.sources import load

CLASSES = {"Appenzeller Sennenhund": 20, "coffee cup": 10, "temple": 2}
SMALL = ["--model", "vit_digits_patch2_8", "--img-size", "8", "--batch-size", "8", "--workers", "0"]
RECIPE = replace(FOLDER, img_size=8, batch_size=4)


def photographs(root: Path, counts: dict[str, int] = CLASSES) -> Path:
    """A folder <class>/ of small noisy images; each class has a colour."""
    generator = np.random.default_rng(0)
    for channel, (name, count) in enumerate(counts.items()):
        (root / name).mkdir(parents=True)
        for i in range(count):
            pixels = generator.integers(0, 80, (14, 11, 3), dtype=np.uint8)
            pixels[..., channel % 3] += 150
            Image.fromarray(pixels).save(root / name / f"{i} a.{'JPG' if i % 2 else 'png'}")
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photographs(tmp_path_factory.mktemp("photographs") / "flat")


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run with a divided folder."""
    out = tmp_path_factory.mktemp("runs") / "flat"
    options = ["--val-split", "0.2", "--epochs", "2", "--out", str(out), *SMALL]
    assert main(["train", "--data", str(folder), *options]) == 0
    return out


@pytest.mark.fast
def test_a_folder_is_divided_by_class_and_seed(folder: Path):
    """Oracle: counts by hand; every image once; the same for any order of the files, another for another seed."""
    whole = scan_folder(folder, "")
    parts = {split: Split(0.2, 7).part(whole, folder, split) for split in ("train", "val")}
    assert sorted([*parts["train"].files, *parts["val"].files]) == sorted(whole.files)
    assert list(Counter(parts["val"].targets).values()) == [4, 2, 1]
    for part in parts.values():
        assert [path.parent.name for path in part.files] == [part.classes[target] for target in part.targets]
    backwards = whole._replace(files=whole.files[::-1], targets=whole.targets[::-1])
    assert Split(0.2, 7).part(backwards, folder, "val").files[::-1] == parts["val"].files
    assert Split(0.2, 8).part(whole, folder, "val").files != parts["val"].files
    assert list(Counter(Split(0.99, 0).part(whole, folder, "train").targets).values()) == [1, 1, 1]


@pytest.mark.fast
def test_photos_have_a_recipe_for_a_cpu(folder: Path):
    """Oracle: the choice by what was given; of the recipe's model, at most an eighth of the FLOPs of ViT-Ti at 224."""
    chosen = {(): "photos", ("model",): "folder", ("weights",): "folder"}
    for names, recipe in chosen.items():
        given = dict.fromkeys(names, "vit_tiny_patch16_224")
        assert resolve_settings({"data": str(folder)} | given)["recipe"] == recipe
    assert resolve_settings({"data": str(folder), "recipe": "folder"})["model"] == FOLDER.model
    counts = []
    for recipe in (PHOTOS, FOLDER):
        model = create_model(recipe.model, img_size=recipe.img_size).eval()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.zeros(1, 3, recipe.img_size, recipe.img_size))
        counts.append(counter.get_total_flops())
    assert 8 * counts[0] < counts[1]


@pytest.mark.fast
def test_train_alone_is_divided(tmp_path: Path):
    """Oracle: a folder train/<class>/ without val/ has the counts of the classes themselves."""
    photographs(tmp_path / "train")
    data = load(str(tmp_path), RECIPE, split=Split(0.2, 0))
    assert Counter(data.train.targets) + Counter(data.test.targets) == dict(enumerate(CLASSES.values()))


@pytest.mark.fast
def test_classes_without_images_are_refused_by_name(tmp_path: Path, capsys):
    """Oracle: the sentences."""
    train = ("train", "--out", tmp_path / "out", *SMALL, "--data")
    flat = photographs(tmp_path / "flat", {"cat": 3, "temple": 1})
    assert "needs two images of each class, and temple has one" in refused(capsys, *train, flat, "--val-split", "0.5")
    assert "or pass --val-split 0.2 to test on a fifth" in refused(capsys, *train, flat)
    found = "no class folders, and 3 images lie directly in it; put images into <class>/"
    assert found in refused(capsys, "data", flat / "cat")
    assert "--val-split is 1.5; use a number in (0, 1)" in refused(capsys, *train, flat, "--val-split", "1.5")
    both = tmp_path / "both"
    photographs(both / "train", {"cat": 2, "dog": 2, "temple": 2})
    photographs(both / "val", {"dog": 2})
    text = "has no test images of 2 of its 3 classes, cat, temple; add some, or remove the class"
    assert text in refused(capsys, *train, both)
    assert "has test images of its own; leave --val-split out" in refused(capsys, *train, both, "--val-split", "0.1")
    assert "has test images of its own" in refused(capsys, "train", "--val-split", "0.1", "--out", tmp_path / "out")


def test_a_run_keeps_its_test_images(folder: Path, trained: Path, tmp_path: Path, undrawn, capsys):
    """Oracle: the names in split.json; images added later are for training, also when the run resumes; a copy of the
    weights alone finds the same images, and is refused when they have changed; other data are evaluated whole."""
    evaluate = ("evaluate", "--workers", "0", "--checkpoint")
    names = json.loads((trained / SPLIT).read_text())["test"]
    assert len(names) == 7 and all((folder / name).is_file() for name in names)
    (tmp_path / "alone").mkdir()
    alone = tmp_path / "alone" / WEIGHTS
    alone.write_bytes((trained / WEIGHTS).read_bytes())
    for source in (trained, alone):
        assert "of 7 test images" in prints(capsys, *evaluate, source)
    assert main([*evaluate, str(trained), "--data", str(photographs(tmp_path / "other", {"temple": 3}))]) == 0
    assert "of 3 test images" in capsys.readouterr().out
    added = [folder / "temple" / f"new {i}.png" for i in range(20)]
    for path in added:
        Image.new("RGB", (9, 9)).save(path)
    try:
        resume = ("train", "--out", trained, "--resume", "--workers", "0", "--epochs", "3")
        assert "the training images of data" in refused(capsys, *resume)
        assert "val_split is 0.5, but the run to resume has 0.2; leave it out" in refused(
            capsys, *resume, "--val-split", "0.5", "--accept-changes"
        )
        assert "have changed since training divided them" in refused(capsys, *evaluate, alone)
        assert main([*map(str, resume), "--accept-changes"]) == 0
        assert json.loads((trained / SPLIT).read_text())["test"] == names
        (folder / names[0]).rename(tmp_path / "away")
        assert main([*evaluate, str(trained)]) == 0
        captured = capsys.readouterr()
        assert "of 6 test images" in captured.out and "have changed since training (7 images, " in captured.err
        (tmp_path / "away").rename(folder / names[0])
    finally:
        for path in added:
            path.unlink()


def test_images_of_the_training_are_counted(folder: Path, trained: Path, tmp_path: Path, capsys):
    """Oracle: two training images, copied under other names; no others, and none where the data are gone."""
    names = set(json.loads((trained / SPLIT).read_text())["test"])
    inside = {str(file.relative_to(folder).as_posix()) for file in folder.rglob("*.*")}
    copied = [*sorted(inside - names)[:2], *sorted(names)[:1]]
    for i, name in enumerate(copied):
        target = tmp_path / "other" / Path(name).parent / f"copy {i}{Path(name).suffix}"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((folder / name).read_bytes())
    Image.effect_noise((32, 32), 60).save(target.parent / "new.png")
    evaluate = ["evaluate", "--workers", "0", "--checkpoint", str(trained)]
    sentence = "of these images are among those that the run was trained on"
    assert f"\nat least 2 {sentence}\n" in prints(capsys, *evaluate, "--data", tmp_path / "other")
    assert main(evaluate) == 0 and sentence not in capsys.readouterr().out
    folder.rename(tmp_path / "gone")
    try:
        assert main([*evaluate, "--data", str(tmp_path / "other")]) == 0 and sentence not in capsys.readouterr().out
    finally:
        (tmp_path / "gone").rename(folder)


def test_evaluate_says_whose_weights_it_takes(trained: Path, tmp_path: Path, capsys):
    """Oracle: the file with other weights beside those that are evaluated; nothing where they are the same or alone."""
    last, best = tmp_path / WEIGHTS, tmp_path / BEST
    for name in (WEIGHTS, SPLIT):
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    words = ["evaluate", "--workers", "0", "--checkpoint"]
    sentence = f"\nthese are the weights of the last epoch; {best} holds those of the best\n"
    for content, source, wanted in ((None, tmp_path, False), (b"", tmp_path, False), (b"other", tmp_path, True)):
        if content is not None:
            best.write_bytes(content or last.read_bytes())
        assert (sentence in prints(capsys, *words, source)) is wanted
    assert main([*words, str(last)]) == 0 and sentence not in capsys.readouterr().out


def test_test_images_are_explained(folder: Path, trained: Path, tmp_path: Path, undrawn, capsys):
    """Oracle: `predict` of the images that split.json names, sorted by hand; without test images a sentence."""
    files = [folder / name for name in json.loads((trained / SPLIT).read_text())["test"]]
    found = predict(load_model(trained)[0], files)
    assert all(pairs[0][0] == file.parent.name for file, pairs in zip(files, found, strict=True))
    order = sorted(range(7), key=lambda i: found[i][0][1])[:3]
    words = ["explain", "--checkpoint", str(trained), "--workers", "0", "--out", str(tmp_path / "report")]
    assert "report.html shows 3 of 7 correct predictions on test images; its" in prints(capsys, *words, "--most", "3")
    page = (tmp_path / "report" / "report.html").read_text()
    assert re.findall(r"<li>([^<]*?): <a", page) == [f"{files[i].parent.name}/{files[i].name}" for i in order]
    pretrained = SimpleNamespace(model=None, classes=("a",), data=str(folder))
    given = SimpleNamespace(no_test=False, checkpoint="encoder")
    with pytest.raises(ValueError, match="encoder was not trained to classify, so there are no mistakes to explain"):
        _check_mistakes(given, pretrained, [{"test_accuracy": None}])
    sentence = "no image is given, and --no-test is given, so there are no mistakes to explain; give image files"
    assert sentence in refused(capsys, *words, "--no-test")


@pytest.mark.fast
def test_damaged_splits_are_refused(trained: Path, tmp_path: Path, capsys):
    """Oracle: the sentence names the file."""
    text = (trained / SPLIT).read_text()
    for bad in ("{", "[]", '{"val_split": 0.5, "seed": 0, "test": []}'):
        (tmp_path / SPLIT).write_text(bad)
        (tmp_path / WEIGHTS).write_bytes((trained / WEIGHTS).read_bytes())
        sentence = refused(capsys, "evaluate", "--workers", "0", "--checkpoint", tmp_path)
        assert str(tmp_path / SPLIT) in sentence and re.search("is damaged|is not of this run", sentence)
    assert (trained / SPLIT).read_text() == text


@pytest.mark.parametrize("installed", [True, False])
def test_next_commands_can_be_run(folder: Path, trained: Path, installed: bool, monkeypatch: pytest.MonkeyPatch):
    """Oracle: the parser, which checks values and files, takes each command of the summary; four of them are named. The
    last says what to install if, and only if, ONNX's package is missing."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed if name == "onnxscript" else found(name))
    data = load(str(folder), RECIPE, split=Split(0.2, 0))
    lines = [line for line in summary(trained, data).splitlines() if "fastvit-triton" in line]
    assert lines[-1].endswith("  # after pip install 'fastvit_triton[export]'") is not installed
    commands = [shlex.split(line, comments=True) for line in lines]
    assert [words[1] for words in commands] == ["predict", "evaluate", "explain", "export"]
    for words in commands:
        assert str(trained) in words
        build_parser().parse_args(words[1:])


@pytest.mark.fast
def test_typing_errors_are_answered_with_the_nearest(tmp_path: Path, capsys):
    """Oracle: the sentences; an underscore is a dash only where no option has it."""
    assert "COMMAND is 'trian'; the nearest is train; see" in refused(capsys, "trian")
    assert "no option --bath-size; the nearest is --batch-size; see" in refused(capsys, "train", "--bath-size", "4")
    assert "no option --epoch; the nearest is --epochs; see" in refused(capsys, "train", "--epoch", "4")
    assert "no option --checkpoin; the nearest is --checkpoint" in refused(capsys, "predict", "--checkpoin", "x", "a")
    assert "there is no option --zzz; see fastvit-triton train --help" in refused(capsys, "train", "--zzz")
    assert "--batch-size is 0; use an integer" in refused(capsys, "train", "--batch_size", "0")
    assert "--batch-size is -1; use an integer" in refused(capsys, "train", "--batch_size=-1")


@pytest.mark.fast
def test_the_package_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys):
    """Oracle: the exit code and the sentence of an unknown command."""
    monkeypatch.setattr(sys, "argv", ["fastvit_triton", "trian"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("fastvit_triton", run_name="__main__")
    assert end.value.code == 2 and "the nearest is train" in capsys.readouterr().err


@pytest.mark.few(1)
@pytest.mark.parametrize("count", [3, 60])
def test_captions_of_predictions_do_not_overlap(count: int):
    """Oracle: matplotlib's boxes of all texts, with ImageNet's names, the longest first, all wrong or all right."""
    names = sorted(imagenet_classes().values(), key=len, reverse=True)
    assert len(names) == 1000 and len(names[0]) > 25
    data = SimpleNamespace(classes=names, test=SimpleNamespace(display_image=lambda i: torch.zeros(3, 8, 8)))
    targets = torch.arange(count)
    for found in (targets.flip(0) + 60, targets):
        page = plots.predictions(data, Score(0.1, 0.0, found, targets, confidences=targets / count))
        page.canvas.draw()
        texts = [page._suptitle, *(axes.title for axes in page.axes if axes.get_title())]
        assert len(texts) == count + 1
        boxes = [text.get_window_extent() for text in texts]
        assert all(page.bbox.x0 <= box.x0 and box.x1 <= page.bbox.x1 and box.y1 <= page.bbox.y1 for box in boxes)
        assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    wide = plots._shorten("Appenzeller Sennenhund", 0.9 * 2.2)
    assert wide == "Appenzeller Sennenhund" and plots._shorten(f"not {wide}", 0.9 * 2.2) == f"not {wide}"


@pytest.mark.fast
@pytest.mark.parametrize(
    "name, first",
    {
        "cvt_21": "cvt_21_224",
        "microsoft/cvt-21": "cvt_21_224",
        "ViT-B/16": "vit_base_patch16_224",
        "google/vit-large-patch16-224": "vit_large_patch16_224",
        "vit_b_16": "vit_base_patch16_224",
        "Swin-T": "swin_tiny_patch4_window7_224",
        "CaiT-S24": "cait_s24_224",
        "vit_bas_patch16": "vit_base_patch16_224",
    }.items(),
)
def test_names_of_papers_and_other_libraries_are_near(name: str, first: str):
    """Oracle: the same model by hand."""
    assert nearest(name)[0] == first
    with pytest.raises(ValueError, match=f"the nearest are {first}, "):
        model_config(name)


@pytest.mark.full
def test_figures_of_models():
    """Oracle: names of models; parameters of the models that are built; FLOPs of ViT-B by hand, to four digits."""
    sizes = figures()["sizes"]
    assert sizes.keys() <= set(list_models())
    for name in list(sizes)[::12]:
        assert sizes[name][0] == sum(p.numel() for p in skeleton(name).parameters()), name
    tokens, width = 197, 768
    block = 12 * tokens * width**2 + 2 * tokens**2 * width
    by_hand = 2 * (12 * block + (tokens - 1) * width * width + width * 1000)
    assert sizes["vit_base_patch16_224"][1] == float(f"{by_hand / 1e9:.4g}")
    (image,) = stated_input(skeleton("vit_digits_patch2_8"))
    counted = flops(create_model("vit_digits_patch2_8"), (image,))
    assert sizes["vit_digits_patch2_8"][1] == float(f"{counted.total / 1e9:.4g}")
    top1 = figures()["top1"]
    assert top1.keys() <= set(list_models(pretrained=True)) and all(50 < value < 100 for value in top1.values())


@pytest.mark.fast
def test_equal_weights_have_equal_bytes(tmp_path: Path):
    """Oracle: the bytes of eight files of one model with the same header, whose order of keys is sorted."""
    model = create_model("vit_digits_patch2_8")
    header = {name: f"ü \n{name}" for name in "hgfedcba"}
    for i in range(8):
        save_weights(model, tmp_path / f"{i}.safetensors", metadata=header)
    files = {path.read_bytes() for path in tmp_path.iterdir()}
    (content,) = files
    found = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    assert list(found) == sorted(found) and found.items() >= header.items()
    again, metadata = load_model(tmp_path / "0.safetensors")
    assert metadata == found and all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )


@pytest.mark.fast
@pytest.mark.parametrize("content", [b"hello", b"", b"x" * 100, b"\x80\x02e."])
def test_errors_have_words(content: bytes, tmp_path: Path):
    """Oracle: no sentence ends in what a KeyError holds, such as 101."""
    for name, read in (("bad.pth", load_model), ("bad.pt", load_state)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError) as caught:
            read(tmp_path / name)
        sentence = str(caught.value)
        assert re.search(r"damaged|no checkpoint|empty|say", sentence)
        assert not re.search(r": ['\"]?\W*\d*['\"]?(;|$)", sentence), sentence


@pytest.mark.fast
def test_an_input_that_the_model_does_not_take_is_named():
    """Oracle: the argument's name, and what the model says."""
    model = create_model("vit_digits_patch2_8")
    with pytest.raises(ValueError, match="verify: the model does not run on this input: image is 9x9 pixels"):
        optimize(model, verify=torch.zeros(1, 1, 9, 9))


@pytest.mark.fast
def test_a_report_is_no_model():
    """Oracle: the sentence, with any arguments."""
    for arguments in ((), (torch.zeros(1),)):
        with pytest.raises(TypeError, match="changed the model in place; call the model itself"):
            Report()(*arguments)


def test_sample_pictures(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: the table of the data; the same bytes for a seed and any number of pictures; nothing is replaced."""
    more, fewer = (sample_pictures(tmp_path / str(count), count, seed=3) for count in (2, 1))
    names = sorted(path.relative_to(fewer) for path in fewer.rglob("*.jpg"))
    assert names == sorted(Path(name, "00.jpg") for name in FRUIT)
    assert all((more / name).read_bytes() == (fewer / name).read_bytes() for name in names)
    assert len({(more / name).read_bytes() for name in names}) == len(names)
    with Image.open(fewer / names[0]) as image:
        assert image.size == (160, 120) and image.mode == "RGB"
    assert main(["data", str(more), "--val-split", "0.5"]) == 0
    assert re.search(r"classes: 6\n  apple +1 +1\n  banana +1 +1\n", capsys.readouterr().out)
    for name, error in ((str(more), "is not empty"), ("digits", "is the name of a data set")):
        assert error in refused(capsys, "data", name, "--sample")


def test_balls_of_sample_pictures():
    """Oracle: Lambert's and Blinn's equations for light from the front: z of the normal is 1 in the middle of a ball,
    and √(11/36) five sixths of the radius away; the ball in front is seen, though the other is drawn later, and a
    ball outside of the picture is not."""
    front, behind = [9.0, 7, 6, 4, 100, 50, 0], [9.0, 9, 0, 6, 0, 0, 80]
    balls = np.array([front, behind, [-41.0, *front[1:]]])
    colours, mask = render(balls, np.array([0.0, 0, 1]), 20, 30)
    across, down = np.arange(30), np.arange(20)[:, None]
    circles = [(across - x) ** 2 + (down - y) ** 2 < radius**2 for x, y, radius in ((9, 7, 4), (9, 9, 6))]
    assert np.array_equal(mask, circles[0] | circles[1])
    np.testing.assert_allclose(colours[7, 9], np.array([100, 50, 0]) * 1.05 + 110)
    z = (11 / 36) ** 0.5
    np.testing.assert_allclose(colours[14, 9], np.array([0, 0, 80]) * (0.4 + 0.65 * z) + 110 * z**40)
