"""Tests of `evaluate --out` and `predict --out`: scores, probabilities, formats, and which images are read."""

import csv
import importlib.util
import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import prints, refused
from PIL import Image
from pyarrow import parquet
from scipy.stats import binomtest
from sklearn.metrics import confusion_matrix, f1_score, precision_recall_fscore_support, top_k_accuracy_score
from test_photos import SMALL, photographs

from fastvit_triton.cli import loading, main
from fastvit_triton.cli.images import find_images
from fastvit_triton.cli.loading import load_trained
from fastvit_triton.cli.results import write_rows
from fastvit_triton.cli.tasks import classify
from fastvit_triton.cli.tasks import test_images as images_to_test
from fastvit_triton.train import evaluate, metrics
from fastvit_triton.train.data.transform import read_image
from fastvit_triton.train.loop import Score

EPS = torch.finfo(torch.float64).eps
COUNTS = {"a, ä": 9, 'c"d': 8, "e": 7, "f": 6, "g": 5, "h": 4, "i": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photographs(tmp_path_factory.mktemp("photographs") / "flat", COUNTS)


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run of seven classes, whose scores differ."""
    out = tmp_path_factory.mktemp("runs") / "flat"
    options = ["--val-split", "0.5", "--epochs", "3", "--out", str(out), *SMALL]
    assert main(["train", "--data", str(folder), *options]) == 0
    return out


def of_sklearn(targets: torch.Tensor, predictions: torch.Tensor, classes: int) -> list[list[float]]:
    """Precision, recall and F1 of each class, [3][K]; NaN where it is undefined."""
    given = targets.numpy(), predictions.numpy()
    options: dict[str, Any] = dict(labels=range(classes), zero_division=float("nan"))
    return [column.tolist() for column in precision_recall_fscore_support(*given, **options)[:3]]


@pytest.mark.fast
def test_scores_of_classes():
    """Oracle: scikit-learn, to two roundings; classes without images, without predictions, and without both."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 5, (200,), generator=generator)
    predictions = torch.randint(1, 6, (200,), generator=generator)
    assert metrics.confusion_matrix(targets, predictions, 7).tolist() == (
        confusion_matrix(targets, predictions, labels=range(7)).tolist()
    )
    scores = metrics.class_scores(targets, predictions, 7)
    expected = of_sklearn(targets, predictions, 7)
    assert [score.images for score in scores] == torch.bincount(targets, minlength=7).tolist()
    assert scores[6] == (0, 0, None, None, None)
    for name, column in zip(("precision", "recall", "f1"), expected, strict=True):
        for score, value in zip(scores, column, strict=True):
            found = getattr(score, name)
            assert (found is None) == (value != value) and (found is None or abs(found - value) <= 2 * EPS)
    whole = f1_score(targets, predictions, average="macro")
    assert len({score.f1 for score in scores}) > 3 and abs(metrics.macro_f1(scores) - whole) <= len(scores) * EPS
    with pytest.raises(ValueError, match="no test images"):
        metrics.macro_f1(scores[6:])


@pytest.mark.fast
@pytest.mark.parametrize("classes", [3, 9])
def test_top_five(classes: int):
    """Oracle: scikit-learn, over batches of different lengths."""
    generator = torch.Generator().manual_seed(classes)
    logits = torch.randn(50, classes, generator=generator)
    targets = torch.randint(0, classes, (50,), generator=generator)
    model = torch.nn.Linear(classes, classes, bias=False)
    torch.nn.init.eye_(model.weight)
    score = evaluate(model, list(zip(logits.split(16), targets.split(16), strict=True)))
    if classes > 5:
        expected = top_k_accuracy_score(targets, logits, k=5, labels=range(classes))
        assert score.top5 == expected and score.accuracy < score.top5 < 1
    else:
        assert score.top5 == 1


def test_evaluate_writes_what_it_prints(trained: Path, tmp_path: Path, capsys):
    """Oracle: scikit-learn on the predictions of the loaded model; CSV holds the rows of the JSON."""
    run = load_trained(str(trained))
    options = {"workers": 0, "skip_bad_images": False, "max_pixels": 2**26}
    score = evaluate(run.model, images_to_test(run, None, options))
    found = {}
    for suffix in ("json", "CSV"):
        out = tmp_path / f"scores.{suffix}"
        assert main(["evaluate", "--checkpoint", str(trained), "--workers", "0", "--out", str(out)]) == 0
        found[suffix] = out.read_text(encoding="utf-8")
    whole = json.loads(found["json"])
    assert [row["class"] for row in whole["classes"]] == list(COUNTS)
    assert whole["confusion"] == confusion_matrix(score.targets, score.predictions, labels=range(7)).tolist()
    totals = {"images": len(score.targets), "loss": score.loss, "top1": score.accuracy, "top5": score.top5}
    assert {name: whole[name] for name in totals} == totals and 0 < score.accuracy < score.top5
    correct = int((score.predictions == score.targets).sum())
    for low, high, count, images in [
        (whole["top1_low"], whole["top1_high"], correct, 21),
        *((row["recall_low"], row["recall_high"], row["correct"], row["images"]) for row in whole["classes"]),
    ]:
        assert [low, high] == pytest.approx(binomtest(count, images).proportion_ci(method="wilson"), abs=1e-12)
    for name, column in zip(
        ("precision", "recall", "f1"), of_sklearn(score.targets, score.predictions, 7), strict=True
    ):
        for row, value in zip(whole["classes"], column, strict=True):
            assert row[name] is None if value != value else abs(row[name] - value) <= 2 * EPS
    assert abs(whole["macro_f1"] - f1_score(score.targets, score.predictions, average="macro")) <= 7 * EPS
    printed = capsys.readouterr().out
    bounds = f"{100 * whole['top5_low']:.0f} to {100 * whole['top5_high']:.0f} %"
    rows = {
        "accuracy": [f"{100 * score.accuracy:.0f} %"],
        "top-5 accuracy": [f"{100 * score.top5:.0f} %", bounds],
        "macro-F1": [f"{whole['macro_f1']:.3f}", "-"],
    }
    for name, cells in rows.items():
        assert re.search(rf"^│ {name} +│ {' +│ '.join(cells)} +│", printed, re.MULTILINE), (name, printed)
    assert f"{correct} of {len(score.targets)} test images are correct" in printed

    rows = list(csv.DictReader(found["CSV"].splitlines()))
    for row, same, counts in zip(rows, whole["classes"], whole["confusion"], strict=True):
        assert {name: row[name] for name in same} == {name: "" if v is None else str(v) for name, v in same.items()}
        assert [row[f"predicted as {name}"] for name in COUNTS] == list(map(str, counts))


def test_classes_without_test_images_are_named(capsys):
    """Oracle: by hand."""
    predictions, targets = torch.tensor([0, 1, 2]), torch.tensor([0, 0, 2])
    score = Score(loss=0.7, accuracy=2 / 3, predictions=predictions, targets=targets, top5=1.0)
    classify._report(SimpleNamespace(classes=("a", "b", "c", "d")), score, None)
    assert "no test image is of b, d; macro-F1 counts each of these that is predicted as 0" in capsys.readouterr().err


def test_predict_writes_probabilities(folder: Path, trained: Path, tmp_path: Path, capsys):
    """Oracle: softmax of the loaded model, image by image; unreadable images are named and left out."""
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"")
    out = tmp_path / "classes.json"
    assert main(["predict", "--checkpoint", str(trained), "--out", str(out), "--top", "2", str(bad), str(folder)]) == 2
    captured = capsys.readouterr()
    assert captured.out == f"{out} holds the classes of 42 images\n"
    assert captured.err == f"fastvit-triton: skipped: {bad} cannot be read as an image: empty file\n"
    run = load_trained(str(trained))
    model = run.model.eval()
    rows = json.loads(out.read_text(encoding="utf-8"))
    assert [row["file"] for row in rows] == [str(file) for file in sorted(folder.rglob("*.*"))]
    for row in rows:
        with torch.no_grad():
            probabilities = model(run.transform(read_image(Path(row["file"])))[None])[0].softmax(0)
        best = probabilities.topk(2)
        assert [row["class_1"], row["class_2"]] == [run.classes[i] for i in best.indices]
        written = torch.tensor([row["probability_1"], row["probability_2"]])
        torch.testing.assert_close(written, best.values)  # of a batch, whose sums are rounded in another order


@pytest.mark.fast
def test_patterns_name_images(tmp_path: Path):
    """Oracle: the files in sorted order; a file whose name looks like a pattern is that file."""
    for name in ("a.png", "b/c.png", "b/d/e.png", "b/d/note.txt", ".hidden.png", "x[1].png", "x1.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8)).save(tmp_path / name) if name.endswith("png") else (tmp_path / name).touch()
    for patterns, names in {
        ("**/*.png",): ["a.png", "b/c.png", "b/d/e.png", "x1.png", "x[1].png"],
        ("?.png", "b"): ["a.png", "b/c.png", "b/d/e.png"],
        ("b/*",): ["b/c.png", "b/d/e.png"],
        ("x[1].png",): ["x[1].png"],
        ("b", "a.png"): ["b/c.png", "b/d/e.png", "a.png"],
    }.items():
        found = find_images([tmp_path / pattern for pattern in patterns])
        assert [str(file.relative_to(tmp_path)) for file in found] == names, patterns
    assert find_images([tmp_path / "z*"]) == [tmp_path / "z*"]  # which `predict` cannot read, and names


def test_images_are_classified_in_batches_in_order(trained: Path, tmp_path: Path, monkeypatch, capsys):
    """Oracle: each image alone, to float32's rounding of the logits, in the order of the files, which have many sizes;
    at most three images at a time; broken files are named in between, and left out."""
    held = load_trained(str(trained))
    sizes: list[int] = []
    held.model.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    monkeypatch.setattr(loading, "load_trained", lambda *words: held)
    monkeypatch.setattr(classify, "BATCH", 3)
    generator = torch.Generator().manual_seed(0)
    files = [tmp_path / f"{i}.png" for i in range(9)]
    for i, file in enumerate(files):
        pixels = torch.randint(256, (9 + 3 * i, 30 - 2 * i, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(file)
    for i in (3, 4, 5, 7):
        files[i].write_bytes(files[i].read_bytes()[:70] if i % 2 else b"")
    order = files[::-1]
    out = tmp_path / "rows.json"
    words = ["predict", "--checkpoint", str(trained), *map(str, order), "--top", "7", "--device", "cpu"]
    assert main([*words, "--out", str(out)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [line.split(" cannot be read as an image: ")[0] for line in errors] == [
        f"fastvit-triton: skipped: {files[i]}" for i in (7, 5, 4, 3)
    ]
    assert sizes == [3, 2]
    rows = json.loads(out.read_text())
    assert [row["file"] for row in rows] == [str(file) for file in order if files.index(file) not in (3, 4, 5, 7)]
    for row in rows:
        with torch.no_grad():
            logits = held.model(held.transform(read_image(Path(row["file"])))[None])[0]
        found = torch.tensor([row[f"probability_{i}"] for i in range(1, 8)])
        torch.testing.assert_close(found, logits.softmax(0).sort(descending=True).values)
    printed = prints(capsys, *words, code=2).splitlines()
    assert [line.split(": ")[0] for line in printed] == [row["file"] for row in rows]


@pytest.mark.fast
@pytest.mark.parametrize("suffix", ["csv", "json", "parquet"])
def test_tables_are_replaced_atomically(suffix: str, tmp_path: Path):
    """Oracle: the rows, read back; after a failure the earlier bytes, and no other file."""
    out = tmp_path / f"rows.{suffix}"
    rows = [{"file": 'ä,"b"\n', "share": 0.1, "n": 2}, {"file": "c", "share": None, "n": 3}]
    if suffix == "parquet":
        write_rows(out, rows)
        assert parquet.read_table(out).to_pylist() == rows
    else:
        write_rows(out, rows)
        text = out.read_bytes().decode("utf-8")
        texts = [{name: "" if v is None else str(v) for name, v in row.items()} for row in rows]
        read = json.loads if suffix == "json" else lambda text: list(csv.DictReader(text.splitlines(keepends=True)))
        assert read(text) == (rows if suffix == "json" else texts)
    before = out.read_bytes()
    with pytest.raises((TypeError, ValueError)):
        write_rows(out, [{"a": object()}, {"b": 1}])
    assert out.read_bytes() == before and list(tmp_path.iterdir()) == [out]


@pytest.mark.full
def test_files_that_cannot_be_written_are_refused_at_once(tmp_path: Path, monkeypatch, capsys):
    """Oracle: one sentence before the checkpoint is read; it names the suffixes, the package or the folder."""
    monkeypatch.setattr(loading, "load_trained", partial(pytest.fail, "the checkpoint was read"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    checkpoint = tmp_path / "model.safetensors"
    checkpoint.touch()
    for name, sentence in {
        "rows.txt": "ends in .csv, .json or .parquet",
        "rows.parquet": "needs the package pyarrow; pip install 'fastvit_triton[parquet]'",
        "none/rows.csv": "folder that does not exist",
    }.items():
        for command in (["predict", tmp_path], ["evaluate"]):
            words = [*command, "--out", tmp_path / name, "--checkpoint", checkpoint]
            assert sentence in refused(capsys, *words)
