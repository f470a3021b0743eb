"""Tests of IDX files, the format of MNIST: reading, refusals, and a run on Fashion-MNIST where its files lie."""

import gzip
import json
import math
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import accuracy, refused

from benchmarks import trainings
from fastvit_triton.cli import main
from fastvit_triton.train.data import idx
from fastvit_triton.train.recipes import FASHION_MNIST
from fastvit_triton.train.sources import load, load_test
from fastvit_triton.train.trainer import build_trainer

FASHION = Path("/usr/share/datasets/fashion-mnist")  # Debian's package dataset-fashion-mnist
PARTS = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")


def encode(array: np.ndarray) -> bytes:
    """An array of bytes in the format, written out by its definition."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(root: Path, count: int = 30, side: int = 28, suffix: str = ".gz") -> Path:
    """Writes three classes: a bright upper half, lower half, or bar, with noise."""
    root.mkdir()
    generator = np.random.default_rng(0)
    for split, images in (("train", count), ("t10k", count // 2)):
        labels = np.arange(images, dtype=np.uint8) % 3
        pixels = generator.integers(0, 60, (images, side, side), dtype=np.uint8)
        for image, label in zip(pixels, labels, strict=True):
            image[[slice(0, side // 2), slice(side // 2, side), slice(side // 3, 2 * side // 3)][label]] += 150
        for part, array in (("images-idx3", pixels), ("labels-idx1", labels)):
            content = encode(array)
            (root / f"{split}-{part}-ubyte{suffix}").write_bytes(gzip.compress(content) if suffix else content)
    return root


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_images_and_labels_are_those_of_the_file(tmp_path: Path, suffix: str):
    """Oracle: the arrays written; test images in order, and training images once each."""
    root = write_idx(tmp_path / "set", suffix=suffix)
    data = load(str(root), replace(FASHION_MNIST, batch_size=7))
    assert data.classes == ("0", "1", "2") and len(data.train) == math.ceil(30 / 7)
    assert sorted(torch.cat([targets for _, targets in data.train]).tolist()) == sorted([0, 1, 2] * 10)
    images, targets = (torch.cat(column) for column in zip(*data.test, strict=True))
    assert targets.tolist() == [0, 1, 2] * 5 and images.shape == (15, 1, 28, 28)
    pixels = idx.read_idx(root / f"t10k-images-idx3-ubyte{suffix}", 3)
    torch.testing.assert_close(data.transform.restore(images)[:, 0] * 255, torch.tensor(pixels).float())


def test_class_names_come_from_a_file(tmp_path: Path):
    """Oracle: classes.txt; a model with other classes is refused, and so is a label without a name."""
    root = write_idx(tmp_path / "set")
    (root / "classes.txt").write_text("upper\nlower\nbar\n")
    data = load(str(root), FASHION_MNIST)
    assert data.classes == ("upper", "lower", "bar")
    with pytest.raises(ValueError, match="has classes upper, lower, bar, the model cat, dog"):
        load_test(str(root), ("cat", "dog"), data.transform, 4)
    (root / "classes.txt").write_text("upper\nlower\n")
    with pytest.raises(ValueError, match="has class number 2, but there are only 2 classes"):
        load(str(root), FASHION_MNIST)


@pytest.mark.full
def test_trained_and_evaluated_by_command(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: three patterns that a narrow model learns; evaluate reads the same files and gives the same accuracy."""
    root, out = write_idx(tmp_path / "set", count=60), tmp_path / "run"
    options = ["--recipe", "fashion-mnist", "--epochs", "8", "--batch-size", "12", "--workers", "0"]
    assert main(["train", "--data", str(root), "--out", str(out), *options]) == 0
    assert accuracy(out) > 0.9
    capsys.readouterr()
    assert main(["evaluate", "--checkpoint", str(out), "--workers", "0"]) == 0
    assert f"{round(accuracy(out) * 30)} of 30 test images are correct" in capsys.readouterr().out


def small(*shape: int) -> bytes:
    return encode(np.zeros(shape, np.uint8))


HOSTILE = {
    "empty": (b"", "unpack requires"),
    "text": (b"train images and labels", "does not start as an IDX file"),
    "floats": (b"\0\0\x0d\x03" + small(2, 4, 4)[4:], "does not start as an IDX file"),
    "axes": (small(2, 16), "does not start as an IDX file"),
    "short": (small(30, 4, 4)[:-1], "promises 480 bytes, and it holds 479"),
    "long": (small(30, 4, 4) + b"\0", "promises 480 bytes, and it holds more"),
    "nothing": (small(0, 4, 4), "promises 0 bytes"),
    "huge": (struct.pack(">BBBB3I", 0, 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1), "promises 79,228,162,458,924,105"),
    "fewer": (small(29, 4, 4), "has 29 images, and .* 30 labels"),
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_hostile_files_are_refused_in_one_sentence(tmp_path: Path, case: str, suffix: str):
    """Oracle: the sentences; the same content compressed gives the same one."""
    root = write_idx(tmp_path / "set", suffix=suffix)
    content, sentence = HOSTILE[case]
    path = root / f"train-images-idx3-ubyte{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    with pytest.raises(ValueError, match=sentence) as error:
        load(str(root), FASHION_MNIST)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_damaged_compression_and_missing_files(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: one sentence each; a compressed file that expands to more than its header says is not expanded."""
    root = write_idx(tmp_path / "set")
    whole = (root / "t10k-images-idx3-ubyte.gz").read_bytes()
    train = ("train", "--recipe", "fashion-mnist", "--data", root, "--out", tmp_path / "out")
    for content in (whole[:50], b"\x1f\x8b" + whole[2:30], whole[:40] + bytes(40), whole[:-4] + b"\0\0\0\0"):
        (root / "t10k-images-idx3-ubyte.gz").write_bytes(content)
        assert "t10k-images-idx3-ubyte.gz is damaged or not an IDX file" in refused(capsys, *train)
    (root / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(small(1, 4, 4) + bytes(2**26)))
    assert "promises 16 bytes, and it holds more" in refused(capsys, *train)
    (root / "t10k-images-idx3-ubyte.gz").unlink()
    assert "has no t10k-images-idx3-ubyte or t10k-images-idx3-ubyte.gz" in refused(capsys, *train)
    assert "16 pixels; --max-pixels is 15" in limited(root)


def limited(root: Path) -> str:
    """The sentence about images over a limit."""
    for split, count in (("train", 30), ("t10k", 15)):
        (root / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(small(count, 4, 4)))
    with pytest.raises(ValueError) as error:
        load(str(root), FASHION_MNIST, max_pixels=15)
    return str(error.value)


def test_committed_results_are_those_of_the_recipe():
    """Oracle: results/trainings.json: the recipe, and three seeds of each model; the difference is within three
    standard errors."""
    rows = trainings.rows_of("fashion-mnist")
    recipe = json.loads(json.dumps(trainings.asdict(FASHION_MNIST)))
    assert all(recipe | row["recipe"] == recipe for row in rows)  # newer fields have the values of then
    assert [(row["seed"], row["name"]) for row in rows] == [(n, arm) for n in range(3) for arm in trainings.ARMS]
    assert all(len(row["test_accuracy"]) == FASHION_MNIST.epochs for row in rows)
    found = trainings.compared(rows)
    assert abs(found["difference"]) <= 3 * found["standard_error"]
    assert (trainings.RESULTS / "fashion-mnist.png").exists()


@pytest.mark.full
@pytest.mark.skipif(not FASHION.is_dir(), reason="the files of Fashion-MNIST are not here")
def test_an_epoch_of_fashion_mnist():
    """Oracle: the counts of its paper (arXiv:1708.07747), and the committed accuracy after one epoch, by three standard
    deviations of its seeds and of 10,000 test images; the shorter schedule of one epoch learns no less by then."""
    first = torch.tensor([row["test_accuracy"][0] for row in trainings.rows_of("fashion-mnist")])
    recipe = replace(FASHION_MNIST, epochs=1)
    data = load(str(FASHION), recipe)
    assert len(data.train.files) == 60_000 and len(data.test.files) == 10_000
    assert torch.tensor(data.train.targets).bincount().tolist() == [6000] * 10
    torch.manual_seed(0)
    model = trainings.ARMS["fastvit_triton"](recipe)
    trainings.configure_model(recipe, model)
    *_, last = build_trainer(model, data, recipe).fit()
    noise = (first.var() + first.mean() * (1 - first.mean()) / 10_000).sqrt()
    assert last.test.accuracy >= first.mean() - 3 * noise > 0.1
