"""Tests of what a user with a folder of photographs does: division, training, evaluation, prediction."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_cli import refused

from fastvit_triton.cli import main
from fastvit_triton.train.data import load
from fastvit_triton.train.data.folder import scan_folder
from fastvit_triton.train.data.split import SPLIT, Split
from fastvit_triton.train.outputs import WEIGHTS
from fastvit_triton.train.recipes import FOLDER

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
    assert "or pass --val-split 0.1 to test on a tenth" in refused(capsys, *train, flat)
    assert "--val-split is 1.5; use a number in (0, 1)" in refused(capsys, *train, flat, "--val-split", "1.5")
    both = tmp_path / "both"
    photographs(both / "train", {"cat": 2, "dog": 2, "temple": 2})
    photographs(both / "val", {"dog": 2})
    text = "has no test images of 2 of its 3 classes, cat, temple; add some, or remove the class"
    assert text in refused(capsys, *train, both)
    assert "has test images of its own; leave --val-split out" in refused(capsys, *train, both, "--val-split", "0.1")
    assert "has test images of its own" in refused(capsys, "train", "--val-split", "0.1", "--out", tmp_path / "out")


def test_a_run_keeps_its_test_images(folder: Path, trained: Path, tmp_path: Path, capsys):
    """Oracle: the names in split.json; images added later are for training, also when the run resumes; a copy of the
    weights alone finds the same images, and is refused when they have changed; other data are evaluated whole."""
    evaluate = ("evaluate", "--workers", "0", "--checkpoint")
    names = json.loads((trained / SPLIT).read_text())["test"]
    assert len(names) == 7 and all((folder / name).is_file() for name in names)
    (tmp_path / "alone").mkdir()
    alone = tmp_path / "alone" / WEIGHTS
    alone.write_bytes((trained / WEIGHTS).read_bytes())
    for source in (trained, alone):
        assert main([*evaluate, str(source)]) == 0
        assert "of 7 images)" in capsys.readouterr().out
    assert main([*evaluate, str(trained), "--data", str(photographs(tmp_path / "other", {"temple": 3}))]) == 0
    assert "of 3 images)" in capsys.readouterr().out
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
        assert "of 6 images)" in captured.out and "have changed since training (7 images, " in captured.err
        (tmp_path / "away").rename(folder / names[0])
    finally:
        for path in added:
            path.unlink()


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
