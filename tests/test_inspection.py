"""Tests of the check of data sets before training: the table, what is refused, and what is said only."""

import json
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import prints
from PIL import Image
from test_data import write_tiff
from test_detection_data import coco, write_images, yolo
from test_idx import encode

from fastvit_triton.cli import main, train_models
from fastvit_triton.train import Run, resolve_settings, run
from fastvit_triton.train.data import inspection
from fastvit_triton.train.data.findings import DataWarning
from fastvit_triton.train.data.inspection import ALLOW, UnfitData, equal_files, inspect
from fastvit_triton.train.data.shards import pack
from fastvit_triton.train.data.split import Split
from fastvit_triton.train.distributed import World
from fastvit_triton.train.recipes import BOXES, FOLDER
from fastvit_triton.train.sources import load

RECIPE = replace(FOLDER, img_size=16, batch_size=4)


def noise(path: Path, seed: int, size: tuple[int, int] = (6, 6)) -> Path:
    """Writes an image of noise, each seed another one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), np.uint8)
    Image.fromarray(pixels).save(path, format="PNG")
    return path


def differ(root: Path) -> Path:
    """Replaces each image of a folder by noise of its size."""
    for i, path in enumerate(sorted(root.rglob("*.png"))):
        with Image.open(path) as image:
            size = image.size
        noise(path, i, size)
    return root


def photos(root: Path, classes: tuple[str, ...] = ("cat", "dog"), count: int = 4) -> Path:
    """A folder with different images in each class and split."""
    for i, split in enumerate(("train", "val")):
        for j, name in enumerate(classes):
            for k in range(count):
                noise(root / split / name / f"{k}.png", 1000 * (2 * i + j) + k)
    return root


def run_data(root: Path, *words: str) -> int:
    return main(["data", str(root), *words])


def test_the_table_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: the files by hand. A file that cannot be read is refused, and left out with --skip-bad-images."""
    root = photos(tmp_path / "photos")
    for name in ("x.heic", "y.heic"):
        (root / "train" / "cat" / name).write_text("no image")
    noise(root / "val" / "@eaDir" / "thumb.png", 1)
    shutil.copy(root / "val" / "dog" / "0.png", root / "val" / "dog" / "again.png")
    (root / "train" / "cat" / "0.png").write_bytes(b"")
    assert run_data(root) == 2
    out, error = capsys.readouterr()
    assert out.splitlines() == [
        str(root),
        "                                training       test",
        "images                                 7          9",
        "  cannot be read                       1          0  the first: train/cat/0.png (empty file)",
        "classes: 2",
        "  cat                                  3          4",
        "  dog                                  4          5",
        "files left out                         2          1",
        "  no images: .heic                     2          0  the first: train/cat/x.heic",
        "  in hidden or system folders          0          1  the first: val/@eaDir",
        "images in both                                    0",
        "images that stand twice                0          1  the first: val/dog/again.png",
    ]
    assert ": 1 of 17 images cannot be read, the first: " in error and "or pass --skip-bad-images\n" in error
    assert run_data(root, "--skip-bad-images") == 0


def test_the_table_of_boxes(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: the annotations by hand; an image that no annotation lists is counted once for two splits."""
    write_images(tmp_path / "images")
    noise(tmp_path / "images" / "c.png", 1)
    for split in ("train", "val"):
        (tmp_path / f"{split}.json").write_text(json.dumps(coco()))
    assert run_data(tmp_path, "--quick", "--allow", "lost-objects") == 0
    out = capsys.readouterr().out.replace("  ", "")
    for row in (
        "objects 2 2",
        "images without objects 1 1",
        "files left out 1 0",
        "images that are not listed 1 0the first: images/c.png",
        "without area 1 1the first: annotations[2] in train.json, image b.png: corners 4, 4, 4, 6 in 20 x 10 pixels",
        "cut at the border of the image 1 1the first: annotations[1] in train.json, image b.png",
        "equal 2 2\n",
        "images in bothnot compared",
        "allowed: 1 of 3 objects in its training images cannot be used",
    ):
        assert row.replace(" ", "") in out.replace(" ", "")


def shared(root: Path) -> Path:
    shutil.copy(photos(root) / "train" / "cat" / "1.png", root / "val" / "cat" / "other-name.jpg")
    return root


def twice(root: Path) -> Path:
    shutil.copy(photos(root) / "train" / "cat" / "1.png", root / "train" / "dog" / "x.png")
    return root


def linked(root: Path) -> Path:
    shutil.rmtree(photos(root) / "val")
    (root / "val").symlink_to(root / "train")
    return root


def lost(root: Path) -> Path:
    rows = [dict(id=i, image_id=7, category_id=2, bbox=[1 + 30 * i, 1, 4, 4]) for i in range(2)]
    for split in ("train", "val"):
        write_images(root / split)
        (root / split / "_annotations.coco.json").write_text(json.dumps(coco(annotations=rows)))
    return differ(root)


def orphans(root: Path) -> Path:
    yolo(root)
    (root / "labels" / "train" / "misnamed.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    return differ(root)


def lists(root: Path) -> Path:
    """A test list with a training image; labels of images that no list names belong to images still."""
    yolo(root, "names: [cat, dog]\ntrain: train.txt\nval: val.txt\n")
    (root / "train.txt").write_text("images/train/a.png\n")
    (root / "val.txt").write_text("images/val/a.png\nimages/train/a.png\n")
    return differ(root)


def unlabelled(root: Path) -> Path:
    yolo(root, "names: [cat, dog]\ntrain: [images/train, images/more]\n")
    noise(root / "images" / "more" / "a.png", 1)
    return differ(root)


def dark(root: Path) -> Path:
    for i, path in enumerate(sorted(photos(root).rglob("*.png"))):
        path.unlink()
        write_tiff(path.with_suffix(".tif"), np.random.default_rng(i).integers(0, 4096, (8, 8), np.uint16))
    return root


def cut(root: Path) -> Path:
    path = photos(root) / "train" / "dog" / "2.png"
    path.write_bytes(path.read_bytes()[:-60])
    return root


PROBLEMS: dict[str, tuple[Callable[[Path], Path], str, str]] = {  # how it is made, in which words, and the way out
    "shared": (shared, "1 of 9 test images are training images too, the first: ", "--allow shared-images"),
    "twice": (twice, "2 images stand in two classes, the first: ", "--allow two-classes"),
    "linked": (linked, "8 of 8 test images are training images too, the first: ", "--allow shared-images"),
    "one class": (lambda root: photos(root, ("cat",)), "it has one class, cat, of which any", "--allow one-class"),
    "lost": (lost, r"1 of 2 objects in its training images cannot be used \(1 outside", "--allow lost-objects"),
    "orphans": (
        orphans,
        "1 label files of its training images belong to no image",
        "--allow lost-objects",
    ),
    "lists": (lists, "1 of 2 test images are training images too, the first: .*train/a.png", "--allow shared-images"),
    "unlabelled": (unlabelled, "1 of its training images are in folders without any label", "--allow no-labels"),
    "dark": (
        dark,
        "its training images of more than 8 bits reach about .* of 65,535 only; pass --levels",
        "--levels 4095",
    ),
    "cut": (cut, "1 of 8 training images cannot be decoded, the first: ", "--skip-bad-images"),
}


@pytest.mark.parametrize("kind", PROBLEMS)
def test_what_would_be_wrong_is_refused(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: the sentence of `data` and `train`, which names the way out, and that it is one."""
    make, words, way_out = PROBLEMS[kind]
    root = make(tmp_path / "data")
    assert run_data(root) == 2
    table, error = capsys.readouterr()
    assert re.search(words, error) and f"pass {way_out.split()[0]}" in error and error.count("\n") == 1
    boxes = kind in ("lost", "orphans", "lists", "unlabelled")
    model = ["--model", "detr_digits"] if boxes else ["--model", "vit_digits_patch2_8", "--img-size", "8"]
    out = tmp_path / "run"
    assert main(["train", "--data", str(root), "--out", str(out), "--device", "cpu", *model]) == 2
    printed, error = capsys.readouterr()
    assert re.search(words, error) and printed == table and not out.exists()
    assert run_data(root, *way_out.split()) == 0


def test_all_ranks_refuse_what_rank_0_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Oracle: ranks that run in turn: rank 0 alone inspects, each makes one collective call and then raises."""
    settings = resolve_settings(
        {"data": str(shared(tmp_path / "data")), "model": "vit_digits_patch2_8", "img_size": 8, "batch_size": 4}
    )
    sent, inspected = [], []
    monkeypatch.setattr(run, "inspect", lambda *args, **options: inspected.append(1) or inspect(*args, **options))

    class Turn(World):
        def all_gather(self, value: object) -> list:
            sent.append(value)
            return [*sent, None][:2]

    raised = []
    for rank in (0, 1):
        with pytest.raises(UnfitData, match="1 of 9 test images are training images too") as error:
            Run.from_settings(settings, tmp_path, train_models, world=Turn(rank, 2))
        raised.append((str(error.value), error.value.text))
    assert raised[0] == raised[1] and len(sent) == 2 and sent[1] is None and inspected == [1]


def test_a_run_begins_with_the_table(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: what `data` prints: the first lines of the log, and a file of the run."""
    root = photos(tmp_path / "photos")
    assert run_data(root) == 0
    table = capsys.readouterr().out
    out = tmp_path / "run"
    words = ["--data", str(root), "--model", "vit_digits_patch2_8", "--img-size", "8", "--batch-size", "4"]
    words += ["--out", str(out), "--epochs", "1", "--device", "cpu", "--workers", "0"]
    assert prints(capsys, "train", *words).startswith(table) and (out / "data.txt").read_text() == table


CORNERS = [[1, 1, 6, 4], [11, 2, 18, 8], [9, 5, 19, 9.5], [2, 3, 20, 10]]  # in 20 x 10 pixels
LOOK: dict[str, tuple[list, list, bool]] = {  # boxes written as corners, boxes written rightly; do they look like it?
    "corners": (CORNERS, [], True),
    "one": ([[11, 1, 18, 9]], [], True),
    "one line among many": ([*CORNERS * 30, [4, 4, 4, 9]], [], True),
    "one line among few": ([*CORNERS * 3, [4, 4, 4, 9]], [], False),
    "inside in any form": ([[7, 4, 9, 5]], [], False),
    "mixed": (CORNERS, CORNERS, False),
    "right": ([], CORNERS, False),
    "right, whole images": ([], [[0, 0, 20, 10], [1, 0.5, 21, 10.5]], False),
    "right, cut by the border": ([], [*CORNERS, [15, 5, 30, 14]], False),
}


@pytest.mark.parametrize("kind", LOOK)
@pytest.mark.parametrize("layout", ["coco", "yolo"])
def test_boxes_that_look_like_corners_are_refused(layout: str, kind: str, tmp_path: Path, capsys):
    """Oracle: boxes by hand, which say how they were meant, in two images."""
    wrong, right, refused = LOOK[kind]
    root = tmp_path / "data"
    if layout == "coco":
        boxes = [*wrong, *([x, y, right - x, bottom - y] for x, y, right, bottom in right)]
        rows = [dict(id=i, image_id=(7, 3)[i % 2], category_id=2, bbox=box) for i, box in enumerate(boxes)]
        for split in ("train", "val"):
            write_images(root / split)
            (root / split / "_annotations.coco.json").write_text(json.dumps(coco(annotations=rows)))
    else:
        boxes = [*wrong, *([(x + r) / 2, (y + b) / 2, r - x, b - y] for x, y, r, b in right)]
        lines = [f"0 {x / 20} {y / 10} {w / 20} {h / 10}\n" for x, y, w, h in boxes]
        yolo(root, label="".join(lines[::2]))
        for split in ("train", "val"):
            (root / "labels" / split / "b.txt").write_text("".join(lines[1::2]))
    differ(root)
    assert run_data(root, "--quick", "--allow", "lost-objects") == (2 if refused else 0)
    words = "the boxes of its training images look like corners: "
    error = capsys.readouterr().err
    if refused:
        assert words in error and "as x1, y1, x2, y2" in error and error.count("\n") == 1
        assert run_data(root, "--quick", "--allow", "lost-objects,corners") == 0
        assert "allowed: " + words in capsys.readouterr().out
        with pytest.warns(DataWarning, match="missing: odd boxes that look like corners: "):
            load(str(root), replace(BOXES, img_size=32, batch_size=2))


def shards(root: Path) -> Path:
    pack(shared(root.with_name("folder")), root, per_shard=3)
    return root


def arrays() -> tuple[np.ndarray, np.ndarray]:
    """Eight different images of two classes, and a training image of another class among the test images."""
    train, test = np.random.default_rng(0).integers(0, 256, (2, 8, 32, 32, 3), np.uint8)
    test[5] = train[2]
    return train, test


def idx(root: Path) -> Path:
    root.mkdir()
    for split, pixels in zip(("train", "t10k"), arrays(), strict=True):
        (root / f"{split}-images-idx3-ubyte").write_bytes(encode(pixels[..., 0]))
        (root / f"{split}-labels-idx1-ubyte").write_bytes(encode(np.arange(8, dtype=np.uint8) % 2))
    return root


def cifar(root: Path) -> Path:
    root.mkdir()
    (root / "batches.meta").write_bytes(pickle.dumps({b"label_names": [b"cat", b"dog"]}))
    train, test = (pixels.transpose(0, 3, 1, 2).reshape(-1, 3072) for pixels in arrays())
    parts = {f"data_batch_{i + 1}": slice(i, i + 1 if i < 4 else 8) for i in range(5)}
    for pixels, files in ((train, parts), (test, {"test_batch": slice(0, 8)})):
        for name, part in files.items():
            content = {b"data": pixels[part], b"labels": [i % 2 for i in range(8)[part]]}
            (root / name).write_bytes(pickle.dumps(content))
    return root


PACKED: dict[str, tuple[Callable[[Path], Path], str]] = {  # how it is made, and the second test image that is shared
    "shards": (shards, r"1 of 9 test images are training images too, the first: val/\d+.tar/.*jpg is train/\d+.tar/"),
    "idx": (idx, "1 of 8 .*, the first: t10k-images-idx3-ubyte/5 is train-images-idx3-ubyte/2; .*in two classes"),
    "cifar": (cifar, "1 of 8 .*, the first: test_batch/5 is data_batch_3/0; .*test_batch/5 .dog."),
}


@pytest.mark.parametrize("kind", PACKED)
def test_images_inside_files_are_compared(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: the image that was copied, by its place."""
    make, words = PACKED[kind]
    root = make(tmp_path / "data")
    assert run_data(root) == 2
    error = capsys.readouterr().err
    assert re.search(words, error.replace(f"{root}/", "")) and error.count("\n") == 1
    assert run_data(root, "--quick") == 0
    assert "not compared" in capsys.readouterr().out


def test_small_shares_are_said_only(tmp_path: Path):
    """Oracle: one of 101 test images is below a hundredth, and one of 99 is not."""
    for count, problems in ((101, set()), (99, {"shared-images"})):
        root = tmp_path / str(count)
        for i in range(count):
            noise(root / "val" / ("cat" if i % 2 else "dog") / f"{i}.png", i)
        for name, i in (("cat", 1), ("dog", 1000)):
            noise(root / "train" / name / "a.png", i)
        found = inspect(load(str(root), RECIPE), "softmax")
        assert found.problems.keys() == problems
        assert ("images in both", None, 1) in [row[:3] for row in found.rows]


def test_many_classes_and_missing_ones_are_summarised(tmp_path: Path):
    """Oracle: the three smallest of twelve; a folder divided by --val-split counts what is left out once."""
    for i in range(12):
        for k in range(2 + (i + 5) % 12):
            noise(tmp_path / f"class{i:02}" / f"{k}.png", 100 * i + k)
    (tmp_path / "class00" / "notes.txt").touch()
    (tmp_path / "class01").rename(tmp_path / "Class02")
    found = inspect(load(str(tmp_path), RECIPE, split=Split(0.1, 0)), "softmax")
    rows = {row[0]: row[1:3] for row in found.rows}
    assert [name for name in rows if "class0" in name] == ["  class07", "  class08", "  class09"]
    assert rows["  class07"] == (1, 1) and rows["  no images: .txt"] == (1, 0)
    assert "classes: 12, the smallest" in rows and rows["  that differ in case only"] == (2, None)


def test_equal_files_are_found_by_all_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Oracle: groups by hand; two files that differ in one byte between the pieces, and a limit on both counts."""
    size = 100_000
    contents = {
        "a": bytes(size),
        "b": bytes(size),
        "c": bytes(30_000) + b"x" + bytes(size - 30_001),
        "d": b"",
        "e": b"",
    }
    paths = {}
    for name, content in contents.items():
        paths[name] = tmp_path / name
        paths[name].write_bytes(content)
    train, test = [paths["a"], paths["c"], paths["d"]], [paths["b"], paths["e"], tmp_path / "gone"]
    assert equal_files(train, test) == ([([paths["a"]], [paths["b"]])], 3)
    monkeypatch.setattr(inspection, "WHOLE", size)
    assert equal_files(train, test) == ([], 3)
    monkeypatch.setattr(inspection, "COMPARED", 1)
    assert equal_files(train, test)[1] == 1


def test_python_warns_of_lost_labels(tmp_path: Path):
    """Oracle: the kind, the number and the first of the objects left out, by `load` in Python."""
    for split in ("train", "val"):
        write_images(tmp_path / split)
        (tmp_path / split / "_annotations.coco.json").write_text(json.dumps(coco()))
    with pytest.warns(
        DataWarning, match=r"left out or missing: objects without area: 1, the first: annotations\[2\] in .*b\.png"
    ):
        load(str(tmp_path), replace(BOXES, img_size=32, batch_size=2))


def test_allowances_are_names(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: the sentence with the names that there are."""
    assert run_data(photos(tmp_path / "x"), "--allow", "everything") == 2
    assert f"--allow has 'everything'; use names of {', '.join(ALLOW)}" in capsys.readouterr().err
    with pytest.raises(ValueError, match="allow has all; use names of"):
        resolve_settings({"allow": ["all"]})
