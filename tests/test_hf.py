"""Tests of data sets of the library `datasets`, written here and read offline."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import accuracy, prints, refused
from PIL import Image
from test_data import write_folder

from fastvit_triton.cli import main
from fastvit_triton.train.data import hf
from fastvit_triton.train.data.split import Split
from fastvit_triton.train.data.transform import Transform
from fastvit_triton.train.recipes import FOLDER
from fastvit_triton.train.settings import resolve_settings
from fastvit_triton.train.sources import load, load_test

RECIPE = replace(FOLDER, img_size=8, batch_size=4)
CLASSES = ("blue", "red")
pytestmark = pytest.mark.filterwarnings("default")  # of the packages that the library uses


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the library's cache in the test's folder, and refuses the network."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def colours(count: int, seed: int = 0) -> list[Image.Image]:
    """Noisy blue and red images in turn."""
    pixels = np.random.default_rng(seed).integers(0, 80, (count, 12, 10, 3), dtype=np.uint8)
    for i, image in enumerate(pixels):
        image[..., 0 if i % 2 else 2] += 150
    return [Image.fromarray(image) for image in pixels]


def rows(count: int, seed: int = 0, **changed):
    """A data set with an index, labels and images."""
    import datasets

    features = {
        "id": datasets.Value("int32"),
        "kind": datasets.ClassLabel(names=list(CLASSES)),
        "photo": datasets.Image(),
    }
    columns = {"id": list(range(count)), "kind": [i % 2 for i in range(count)], "photo": colours(count, seed)}
    return datasets.Dataset.from_dict(columns | changed, datasets.Features(features))


def saved(folder: Path, **splits) -> str:
    """The name of a data set written by `save_to_disk`."""
    import datasets

    datasets.DatasetDict(splits).save_to_disk(str(folder))
    return f"hf:{folder}"


def test_saved_data_are_those_written(tmp_path: Path):
    """Oracle: images and labels in the order written; columns found by type; training images once each."""
    name = saved(tmp_path / "set", train=rows(10), test=rows(6, seed=1))
    data = load(name, RECIPE)
    assert data.classes == CLASSES and data.name == name
    assert sorted(torch.cat([targets for _, targets in data.train]).tolist()) == [0] * 5 + [1] * 5
    images, targets = (torch.cat(column) for column in zip(*data.test, strict=True))
    assert targets.tolist() == [0, 1] * 3
    assert torch.equal(images, torch.stack([data.transform(image) for image in colours(6, seed=1)]))


def test_image_folder_and_parquet(tmp_path: Path):
    """Oracle: the same names, labels and test images as the folder has without the library."""
    folder = write_folder(tmp_path / "images", per_class=3)
    plain, found = load(str(folder), RECIPE), load(f"hf:{folder}", RECIPE)
    assert found.classes == plain.classes == CLASSES
    for (a, b), (c, d) in zip(plain.test, found.test, strict=True):
        assert torch.equal(a, c) and torch.equal(b, d)
    (tmp_path / "parquet").mkdir()
    for split, count in (("train", 8), ("test", 4)):
        rows(count).to_parquet(tmp_path / "parquet" / f"{split}.parquet")
    data = load(f"hf:{tmp_path / 'parquet'}", RECIPE)
    assert [len(batches.files) for batches in (data.train, data.test)] == [8, 4]


def test_splits_are_chosen(tmp_path: Path):
    """Oracle: the counts of each split; validation comes before test; slices are the library's."""
    name = saved(tmp_path / "set", train=rows(8), small=rows(4), validation=rows(2), test=rows(6))
    for given, counts in (("", (8, 2)), (":test", (8, 6)), (":small,test", (4, 6))):
        data = load(name + given, RECIPE)
        assert (len(data.train.files), len(data.test.files)) == counts
    (tmp_path / "parquet").mkdir()
    rows(10).to_parquet(tmp_path / "parquet" / "train.parquet")
    data = load(f"hf:{tmp_path / 'parquet'}:train[:70%],train[70%:]", RECIPE)
    assert (len(data.train.files), len(data.test.files)) == (7, 3)


def test_trained_and_evaluated_by_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """Oracle: red and blue are told apart; the run resumes from another folder and with a worker; evaluate agrees."""
    saved(tmp_path / "set", train=rows(24), test=rows(10, seed=1))
    monkeypatch.chdir(tmp_path)
    model = ["--model", "vit_digits_patch2_8", "--img-size", "8", "--batch-size", "8", "--lr", "0.003"]
    assert main(["train", "--data", "hf:set", "--epochs", "6", "--workers", "0", *model]) == 0
    out = tmp_path / "runs" / "set"
    monkeypatch.chdir("/")
    assert main(["train", "--out", str(out), "--resume", "--epochs", "8", "--workers", "1"]) == 0
    assert accuracy(out) == 1
    capsys.readouterr()
    assert "(10 of 10 images)" in prints(capsys, "evaluate", "--checkpoint", out, "--workers", "0")


def test_bad_images_are_skipped_or_named(tmp_path: Path):
    """Oracle: an image that is no image, one without content, and one over the limit of pixels."""
    good = io.BytesIO()
    colours(1)[0].save(good, "PNG")
    photos = [{"bytes": good.getvalue(), "path": None}] * 3
    photos[1] = {"bytes": b"GIF89a", "path": None}
    name = saved(tmp_path / "set", train=rows(3), test=rows(3, photo=[*photos[:2], None]))
    data = load(name, RECIPE, skip_bad_images=True)
    assert sum(len(targets) for _, targets in data.test) == 1 and len(data.test.bad) == 2
    with pytest.raises(ValueError, match=r"of 3 images in .* cannot be read: 1"):
        list(load(name, RECIPE).test)
    with pytest.raises(ValueError, match="has 120 pixels, more than --max-pixels 119"):
        list(load(name, RECIPE, max_pixels=119).train)


def test_unusable_data_are_refused_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: the sentences."""
    train = ("train", "--out", tmp_path / "out", "--workers", "0", "--data")
    for name in ("hf:", "hf:x:", "hf:x:a,b,c", "hf:x:,a"):
        assert "use hf:NAME, hf:NAME:TEST_SPLIT or" in refused(capsys, *train, name)
    only = saved(tmp_path / "only", train=rows(4))
    assert "it has the splits train; name the test split" in refused(capsys, *train, only)
    assert "it has the splits train; name the test split" in refused(capsys, *train, only + ":test")
    rows(4).save_to_disk(str(tmp_path / "single"))
    assert "it has one split; pass --val-split 0.2, or save" in refused(capsys, *train, f"hf:{tmp_path / 'single'}")
    bare = saved(tmp_path / "bare", train=rows(4).remove_columns("kind"), test=rows(4))
    assert "has no column of type ClassLabel, but id, photo" in refused(capsys, *train, bare)
    hidden = saved(tmp_path / "hidden", train=rows(4), test=rows(4, kind=[0, 1, -1, 0]))
    assert "has no label for image 2 of its val split" in refused(capsys, *train, hidden)
    assert "cannot be loaded: " in refused(capsys, *train, "hf:nobody/has-this-0")
    with pytest.raises(ValueError, match="has classes blue, red, the model cat"):
        load_test(f"{only}:train", ("cat",), Transform((8, 8), (0.5,) * 3, (0.5,) * 3), 4)
    assert not (tmp_path / "out").exists()


def test_names_are_absolute_for_resuming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Oracle: a folder has its whole path in the settings; a name on the Hub stays."""
    (tmp_path / "set").mkdir()
    monkeypatch.chdir(tmp_path)
    for given, kept in (("hf:set:train,test", f"hf:{tmp_path.resolve() / 'set'}:train,test"), ("hf:a/b:c", "hf:a/b:c")):
        assert resolve_settings({"data": given})["data"] == kept
    assert hf.source_of("hf:a/b:c") == ("a/b", "train", "c")


def test_one_split_is_divided_by_class(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: counts by hand; of data sorted by class, slices that leave a class out are refused by its name."""
    (tmp_path / "sorted").mkdir()
    rows(20, kind=[0] * 10 + [1] * 10).to_parquet(tmp_path / "sorted" / "train.parquet")
    rows(20).save_to_disk(str(tmp_path / "single"))
    for name in ("sorted", "single"):
        data = load(f"hf:{tmp_path / name}", RECIPE, split=Split(0.1, 0))
        assert sorted(data.test.targets) == [0, 1] and sorted(data.train.targets) == [0] * 9 + [1] * 9
    train = ("train", "--out", tmp_path / "out", "--workers", "0", "--data")
    sliced = f"hf:{tmp_path / 'sorted'}:train[:90%],train[90%:]"
    assert "has no test images of 1 of its 2 classes, blue; if its images are sorted" in refused(capsys, *train, sliced)
    assert "names its test images; leave --val-split out" in refused(capsys, *train, sliced, "--val-split", "0.1")
