"""Tests of the command line with detectors: training, resuming, evaluation, boxes of files, and errors."""

import argparse
import csv
import json
import re
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import prints, refused
from matplotlib.colors import to_hex
from PIL import Image
from test_detection_data import coco, write_images
from test_run import contents, log, train
from torch import nn

from benchmarks.trainings import rows_of
from fastvit_triton import create_model
from fastvit_triton.cli import main, train_models
from fastvit_triton.cli import train as train_cli
from fastvit_triton.cli.recipe_options import RECIPE_OPTIONS
from fastvit_triton.cli.tasks import TASKS, TrainedModel
from fastvit_triton.intervals import percent
from fastvit_triton.train import Recipe, Run, Step, newest_state, parameter_groups, run
from fastvit_triton.train.batch import blank_target, divide, to_device
from fastvit_triton.train.data import Data
from fastvit_triton.train.data.transform import Transform
from fastvit_triton.train.detection import (
    average_precision,
    criterion_of,
    detected,
    evaluate_detector,
    load,
    scenes,
    shapes,
)
from fastvit_triton.train.detection.batches import SceneBatches, prepared
from fastvit_triton.train.detection.criterion import padding_mask
from fastvit_triton.train.detection.draw import COLOURS, draw_boxes
from fastvit_triton.train.detection.evaluate import DRAWS
from fastvit_triton.train.detection.shapes import CLASSES
from fastvit_triton.train.loop import Score
from fastvit_triton.train.outputs import BEST, LOG, PREDICTIONS, WEIGHTS, is_best, summary, write_log
from fastvit_triton.train.plots import BLUE, RED, curves, detections
from fastvit_triton.train.recipes import BOXES, SCENES, SCENES_DETR, SHAPES
from fastvit_triton.train.settings import check_used, resolve_settings
from fastvit_triton.train.sources import load as load_data

pytestmark = pytest.mark.filterwarnings("ignore::fastvit_triton.train.data.findings.DataWarning")  # of `coco()`
WHOLE = Transform((32, 32), (0.0,), (1.0,))


@pytest.fixture
def few_scenes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight composed images for training and six for testing."""
    monkeypatch.setattr(load, "TRAINING", (8, 0))
    monkeypatch.setattr(load, "TEST", (6, 1))
    monkeypatch.setattr(load, "SHAPES_TRAINING", (8, 0))
    monkeypatch.setattr(load, "SHAPES_TEST", (6, 1))


@pytest.fixture
def boxes_folder(tmp_path: Path) -> Path:
    """Two training images of different sizes and a test image, with boxes in COCO's format."""
    root = tmp_path / "boxes"
    for split in ("train", "val"):
        write_images(root / split)
        (root / split / "_annotations.coco.json").write_text(json.dumps(coco()))
    Image.new("RGB", (10, 16)).save(root / "train" / "a.png")
    images = [coco()["images"][0], dict(id=3, file_name="a.png", width=10, height=16)]
    (root / "train" / "_annotations.coco.json").write_text(json.dumps(coco(images=images)))
    return root


TRAIN = ("train", "--device", "cpu", "--workers", "0")


def train_command(out: Path, *words: str) -> int:
    return main([*TRAIN, "--out", str(out), *words])


def test_a_detector_learns_and_goes_on(few_scenes, tmp_path: Path):
    """Oracle: a run resumed after an epoch equals an uninterrupted one to the bit; the log has its AP."""
    given = {"data": "scenes", "model": "detr_digits", "epochs": 2, "batch_size": 4, "ema_decay": 0.5}
    train(tmp_path / "whole", given)
    train(tmp_path / "resumed", given, epochs=1)
    run = train(tmp_path / "resumed", {}, resume=True)
    for file in (WEIGHTS, BEST):
        assert contents(tmp_path / "whole" / file) == contents(tmp_path / "resumed" / file)
    assert log(tmp_path / "whole") == log(tmp_path / "resumed")
    assert (tmp_path / "whole" / PREDICTIONS).exists()
    score = run.trainer.test(run.trainer.step.eval_model(run.trainer.model))
    numbers = average_precision(score.detections, score.objects, DRAWS)
    last = log(tmp_path / "whole")[-1]
    assert last["test_accuracy"] == last["train_accuracy"] == "" and len(score.objects) == 6
    logged = {name: last[f"test_{name}"] for name in score.metrics}
    assert {name: float(value) if value else None for name, value in logged.items()} == score.metrics
    known = {name: numbers[name] for name in ("ap", "ap50", "ap75", "ap_low", "ap_high")}
    assert score.metrics == {name: value if value >= 0 else None for name, value in known.items()}
    assert last["test_images"] == "6"


def test_precision_without_objects_is_no_number(tmp_path: Path):
    """Oracle: None in the score, a dash in each text; an epoch without it is best only if no epoch has it."""
    images, targets = scenes("test", 2)
    nothing = [dict(labels=target["labels"][:0], boxes=target["boxes"][:0]) for target in targets]
    test = SceneBatches(images, nothing, WHOLE, 2, shuffled=False)
    score = evaluate_detector(create_model("detr_digits").eval(), test)
    assert set(score.metrics.values()) == {None} and score.mark is None
    history: list[dict] = []
    best = []
    for ap, loss in ((None, 2.0), (None, 1.0), (0.0, 3.0), (0.1, 2.0), (None, 0.5), (0.05, 0.1)):
        row = dict(epoch=len(history) + 1, lr=0.1, train_loss=1.0, train_accuracy=None, test_loss=loss)
        row |= dict(test_accuracy=None, test_ap=ap, test_ap50=ap, test_ap75=ap)
        history.append(row)
        best.append(is_best(history))
    assert best == [True, True, True, True, False, False]
    data = Data("x", (), WHOLE, test, test)
    for rows in (history, history[:2]):
        curves(rows).savefig(tmp_path / "curves.png")
        write_log(tmp_path / LOG, rows)
        text = "AP 5.0 %, AP50 5.0 %" if len(rows) > 2 else "AP -, AP50 -, AP75 - after 2 epochs"
        assert text in summary(tmp_path, data, "detection", len(rows))
    detections(data, score).savefig(tmp_path / "boxes.png")


@pytest.mark.fast
def test_labels_of_boxes_can_be_read():
    """Oracle: matplotlib's extents: three boxes in one place, whose labels lie inside the image and apart."""
    found = dict(boxes=torch.tensor([[60.0, 30.0, 90.0, 60.0]] * 3), labels=torch.tensor([5, 4, 5]))
    wanted = {name: values[:1] for name, values in found.items()}
    score = Score(0.1, metrics=dict(ap=0.5), detections=[found | dict(scores=torch.tensor([0.9, 0.8, 0.7]))] * 7,
        objects=[wanted] * 7)  # fmt: skip
    test = SimpleNamespace(display_image=lambda i: torch.zeros(3, 96, 96))
    page = detections(SimpleNamespace(test=test, classes=CLASSES), score)
    page.draw_without_rendering()
    for axes in page.axes:
        if not axes.texts:
            continue
        extents = [text.get_window_extent() for text in axes.texts]
        assert len(extents) == 3 and all(axes.bbox.contains(*corner) for box in extents for corner in (box.p0, box.p1))
        assert not any(one.overlaps(other) for one, other in combinations(extents, 2))
        colours = [to_hex(text.get_bbox_patch().get_facecolor()) for text in axes.texts]
        assert sorted(colours) == sorted([BLUE, RED, RED])
    around = torch.tensor([[-1.0, -1.0, 97.0, 97.0]] * 3)  # a network may predict sides outside the image
    score.detections[:] = [part | dict(boxes=around) for part in score.detections]
    detections(SimpleNamespace(test=test, classes=CLASSES), score).draw_without_rendering()


@pytest.mark.parametrize("name", ["detr_digits", "deformable_detr_digits"])
def test_score_does_not_depend_on_batches(name):
    """Oracle: the images one by one: the same detections, to float32's rounding of sums, and the loss of each batch."""
    model = create_model(name).eval()
    images, targets = scenes("test", 3)
    score = evaluate_detector(model, SceneBatches(images, targets, WHOLE, 2, shuffled=False))
    for image, target, found in zip(images, targets, score.detections, strict=True):
        with torch.no_grad():
            alone = model.detections(model(image[None]), [(32, 32)])[0]
        torch.testing.assert_close(found["scores"].sort().values, alone["scores"].sort().values)
        assert len(found["scores"]) == len(alone["scores"]) and len(target["labels"])
    objective = detected(criterion_of(model))
    with torch.no_grad():
        losses = [float(objective(model, images[part], [targets[i] for i in part])[0]) for part in ([0, 1], [2])]
    torch.testing.assert_close(score.loss, (2 * losses[0] + losses[1]) / 3)


@pytest.mark.parametrize(
    "given, recipe",
    [
        ({}, "boxes-tiny"),
        ({"model": "deformable_detr_tiny"}, "boxes-tiny"),
        ({"model": "detr_resnet50"}, "boxes"),
        ({"weights": "x"}, "boxes"),
        ({"data": "shapes"}, "shapes"),
        ({"data": "shapes", "model": "deformable_detr_tiny"}, "shapes"),
        ({"data": "shapes", "model": "detr_resnet50"}, "shapes"),
        ({"data": "scenes"}, "scenes"),
        ({"data": "scenes", "model": "detr_digits"}, "scenes-detr"),
    ],
    ids=str,
)
def test_recipe_of_data_with_boxes(given, recipe, boxes_folder: Path):
    """Oracle: by hand: a small model in colour, unless the model, weights or composed data say more."""
    assert resolve_settings({"data": str(boxes_folder)} | given)["recipe"] == recipe


@pytest.mark.parametrize(
    "model, said",
    [
        ("deformable_detr_tiny", {"for few images"}),
        ("deformable_detr_digits", {"for few images", "in grey"}),
        ("detr_resnet50", {"for few images", "stay random"}),
    ],
)
def test_what_is_said_before_training(model, said, boxes_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: by hand; of composed data and of grey images nothing is said."""
    Image.new("RGB", (10, 16), "red").save(boxes_folder / "train" / "a.png")
    given = dict(data=str(boxes_folder), model=model, img_size=32, allow=["lost-objects", "shared-images"])
    if model == "detr_resnet50":
        given |= dict(options=dict(depths=(1, 1, 1, 1), stem_dim=4, hidden_dim=32, encoder_layers=1, decoder_layers=1))
    run = Run.from_settings(resolve_settings(given), tmp_path, train_models)
    capsys.readouterr()
    train_cli._print_task(run, None)
    out = capsys.readouterr().out
    assert {text for text in ("for few images", "in grey", "stay random") if text in out} == said
    if model == "deformable_detr_digits":
        Image.new("RGB", (10, 16), "grey").save(boxes_folder / "train" / "a.png")
        assert not run.trainer.data.loses_colours()


def test_shapes_become_batches(few_scenes):
    """Oracle: `shapes` with the seeds of the splits, as ImageNet's mean and deviation normalise them."""
    data = load_data("shapes", SHAPES)
    (images, targets) = next(iter(data.test))
    wanted, boxes = shapes(6, 1)
    mean, std = (torch.tensor(values)[:, None, None] for values in (SHAPES.mean, SHAPES.std))
    torch.testing.assert_close(images, (wanted / 255 - mean) / std)
    assert torch.equal(targets[5]["boxes"], boxes[5]["boxes"]) and targets[5]["original"] == (192, 192)
    assert torch.equal(data.test.display_image(2), wanted[2] / 255) and data.train.digest() != data.test.digest()
    assert len(data.classes) == 6 and not data.loses_colours()


def test_folders_become_padded_batches(boxes_folder: Path):
    """Oracle: by hand: sizes, boxes in fractions of each image, and the mask of what is no padding."""
    recipe = Recipe(model="detr_resnet50", img_size=20, batch_size=2, epochs=1, lr=1e-3, loss="detection")
    data = load_data(str(boxes_folder), recipe)
    assert data.classes == ("dog", "cat?[31m")
    ((images, (empty, target)),) = data.test
    assert images.shape == (2, 3, 16, 32)  # the longer side is at most 5/3 of the shorter one
    assert target["size"] == empty["size"] == (16, 32) and target["original"] == (10, 20)
    assert target["labels"].tolist() == [1] and target["truth"]["labels"].tolist() == [1, 0]  # a crowd is not learned
    torch.testing.assert_close(target["boxes"], torch.tensor([[2.5 / 20, 4 / 10, 3 / 20, 4 / 10]]))
    assert padding_mask(images, [empty, target]) is None
    mask = padding_mask(images, [empty, {"size": (10, 32)}])
    assert mask.sum((1, 2)).tolist() == [16 * 32, 10 * 32] and mask[1, :10].all()
    ((images, targets),) = data.train
    assert images.shape[2:] == tuple(max(t["size"][axis] for t in targets) for axis in (0, 1))
    before = data.train.digest()
    data.train.targets[1]["boxes"] += 1
    assert data.train.digest() != before


@pytest.mark.full
def test_a_folder_is_trained_and_evaluated(boxes_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: a row of the table for each class, with its number of objects that are no crowd; the recipe's rates."""
    words = ["--data", str(boxes_folder), "--img-size", "32", "--batch-size", "2", "--epochs", "1"]
    words += ["--allow", "lost-objects,shared-images"]
    out = tmp_path / "run"
    assert train_command(out, "--recipe", "boxes", "--model", "deformable_detr_digits", *words) == 0
    settings = newest_state(out)[0]["settings"]
    assert settings["recipe"] == "boxes" and settings["lr_scales"] == BOXES.lr_scales
    table = prints(capsys, "evaluate", "--checkpoint", out, "--data", boxes_folder, "--device", "cpu")
    assert "cat?[31m" in table and "dog" in table and "2 test images. " in table
    assert main(["evaluate", "--checkpoint", str(out), "--data", "digits", "--device", "cpu"]) == 2
    assert "data 'digits' has no boxes, which" in capsys.readouterr().err


@pytest.mark.parametrize("cat, dog", [(5, 2), (90, 7), (1, 0)], ids=["same", "other", "none"])
def test_a_model_with_unused_class_numbers_is_evaluated(cat: int, dog: int, boxes_folder: Path, tmp_path: Path, capsys):
    """Oracle: by hand: the model's numbers for the names of the file, whose numbers have the same gaps, others or none,
    and a row for each class that has a name."""
    rows = [row | {"category_id": {90: cat, 2: dog}[row["category_id"]]} for row in coco()["annotations"]]
    content = coco(annotations=rows, categories=[dict(id=cat, name="cat"), dict(id=dog, name="dog")])
    (boxes_folder / "val" / "_annotations.coco.json").write_text(json.dumps(content))
    model = create_model("detr_digits", num_classes=7, in_chans=3).eval()
    classes, transform = ("", "", "dog", "", "", "cat", "bird"), Transform((16, 16), (0.5,) * 3, (0.5,) * 3)
    test = load.load_detection_test(str(boxes_folder), classes, transform, 2, workers=0)
    assert [target["labels"].tolist() for target in test.targets] == [[], [5, 2]]
    trained = TrainedModel(model, classes, transform, str(boxes_folder), batch_size=2, skip_bad_images=False)
    given = dict(data=None, checkpoint="run", out=tmp_path / "ap.json", device="cpu", max_pixels=200)
    assert TASKS["detect"].evaluate(trained, argparse.Namespace(**given, workers=0, skip_bad_images=False)) == 0
    lost = f"{boxes_folder}, left out or missing: objects without area: 1, the first: annotations[2] in "
    assert lost in capsys.readouterr().out
    found = json.loads((tmp_path / "ap.json").read_text())["classes"]
    assert [(row["class"], row["objects"]) for row in found] == [("dog", 0), ("cat", 1), ("bird", 0)]  # no crowds


def test_an_image_that_changes_after_its_header_was_read_is_named(boxes_folder: Path):
    """Oracle: the file and both sizes; the run stops, or the image is left out."""
    recipe = Recipe(model="detr_resnet50", img_size=20, batch_size=2, epochs=1, lr=1e-3, loss="detection")
    strict, lenient = (load_data(str(boxes_folder), recipe, skip_bad_images=skip) for skip in (False, True))
    Image.new("RGB", (10, 10)).save(boxes_folder / "train" / "b.png")  # its boxes are for 20 x 10 pixels
    with pytest.raises(ValueError, match=r"b\.png \(has 10 x 10 pixels, and its header said 20 x 10, for which"):
        list(strict.train)
    ((images, targets),) = lenient.train
    assert len(images) == len(targets) == len(lenient.train.bad) == 1


def test_targets_of_any_kind_are_divided():
    """Oracle: by hand."""
    targets = [dict(labels=torch.tensor([i]), size=(i, i)) for i in range(5)]
    assert [[t["size"][0] for t in part] for part in divide(targets, 2)] == [[0, 1, 2], [3, 4]]
    assert [part.tolist() for part in divide(torch.arange(5), 2)] == [[0, 1, 2], [3, 4]]
    moved = to_device(targets, torch.device("meta"))
    assert moved[4]["labels"].device.type == "meta" and moved[4]["size"] == (4, 4)
    assert blank_target(torch.ones(0, 3)).tolist() == [[0, 0, 0]] and len(blank_target([])[0]["boxes"]) == 0


def test_a_step_accumulates_over_parts_of_a_list():
    """Oracle: the mean of the losses of both halves, weighted by images."""
    model = create_model("detr_digits").train()
    images, targets = scenes("train", 4)
    objective = detected(criterion_of(model))
    model.eval()  # BatchNorm of a part would differ
    wanted = sum(objective(model, images[i : i + 2], targets[i : i + 2])[0] for i in (0, 2)) / 2
    step = Step(objective=objective, grad_accum_steps=2)
    loss, correct, count = step(model, torch.optim.SGD(model.parameters(), lr=0.0), images, targets)
    assert loss == wanted and count == 4 and correct.isnan()


def test_rates_by_name():
    """Oracle: by hand; a parameter that two expressions match has both factors."""
    model = nn.ModuleDict(dict(backbone=nn.Linear(2, 2), head=nn.Linear(2, 2)))
    groups = parameter_groups(model, 0.1, lr_scales={"^backbone": 0.1, "weight": 0.5})
    found = {tuple(p.shape): group["lr_scale"] for group in groups for p in group["params"] if group["lr_scale"] < 0.1}
    scales = sorted((group["weight_decay"], group["lr_scale"], len(group["params"])) for group in groups)
    assert scales == [(0.0, 0.1, 1), (0.0, 1.0, 1), (0.1, 0.05, 1), (0.1, 0.5, 1)] and found == {(2, 2): 0.05}
    with pytest.raises(ValueError, match=r"the factor of '\^a' has to be a number from 0"):
        Recipe(model="x", batch_size=1, epochs=1, lr=1.0, lr_scales={"^a": -1.0})


@pytest.mark.full
def test_commands_of_a_detector(few_scenes, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: `model.detections` on the file; the table's figures are those of the log."""
    run = tmp_path / "run"
    assert train_command(run, "--data", "scenes", "--model", "detr_digits", "--epochs", "1") == 0
    out = capsys.readouterr().out
    assert "scenes: 10 classes" in out and "test AP" in out and "--draw drawn" in out
    with (run / LOG).open() as file:
        (row,) = csv.DictReader(file)
    printed = prints(capsys, "evaluate", "--checkpoint", run, "--device", "cpu", "--out", tmp_path / "ap.json")
    assert f"│ {percent(float(row['test_ap']), 6)} " in printed and "bootstrap over the images" in printed
    whole = json.loads((tmp_path / "ap.json").read_text())
    assert whole["ap"] == float(row["test_ap"]) and len(whole["classes"]) == 10 and whole["images"] == 6
    files = [tmp_path / "a.png", tmp_path / "b" / "a.png"]
    files[1].parent.mkdir()
    for file, image in zip(files, scenes("test", 2)[0], strict=True):
        Image.fromarray((255 * image[0].clamp(0, 1)).byte().numpy()).save(file)
    words = ["predict", *map(str, files), "--checkpoint", str(run), "--device", "cpu", "--threshold", "0"]
    lines = prints(capsys, *words, "--draw", tmp_path / "drawn").splitlines()
    for name in ("boxes.json", "boxes.csv"):
        assert "holds 16 objects of 2 images" in prints(capsys, *words, "--out", tmp_path / name)
    records = json.loads((tmp_path / "boxes.json").read_text())
    with (tmp_path / "boxes.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [record["file"] for record in records] == list(map(str, files)) and len(lines) == len(rows) == 16
    assert {path.name for path in (tmp_path / "drawn").iterdir()} == {"a.png", "a-2.png"}
    with torch.no_grad():
        from fastvit_triton.cli.loading import load_trained

        model = load_trained(str(run)).model.eval()
        (found,) = model.detections(model(prepared(Image.open(files[0]), WHOLE)[None]), [(32, 32)])
    best = found["scores"].argmax()
    first = records[0]["objects"][0]
    assert first["score"] == float(found["scores"][best]) and first["box"] == found["boxes"][best].tolist()
    assert [float(rows[0][side]) for side in ("left", "top", "right", "bottom")] == first["box"]
    assert f"{first['label']} {100 * first['score']:.1f} % at" in lines[0]
    assert main([*words, "--threshold", "1"]) == 0 and "no object has a score of 1" in capsys.readouterr().out
    assert main([*words, "--threshold", "1", "--out", str(tmp_path / "none.csv")]) == 0
    assert (tmp_path / "none.csv").read_text().split() == ["file,label,score,left,top,right,bottom"]


def test_boxes_are_drawn_on_their_pixels():
    """Oracle: the colour of the class on all four sides of the box, in an image eight times as large."""
    found = dict(boxes=torch.tensor([[8.0, 16, 24, 30]]), labels=torch.tensor([1]), scores=torch.tensor([0.5]))
    drawn = np.asarray(draw_boxes(Image.new("L", (32, 32)), found, ("a", "b")))
    colour = tuple(int(COLOURS[1][i : i + 2], 16) for i in (1, 3, 5))
    assert drawn.shape == (256, 256, 3) and not drawn[:90].any() and not drawn[245:].any()
    for y, x in ((128, 150), (240, 100), (200, 64), (200, 192)):
        assert tuple(drawn[y, x]) == colour


ERRORS = {
    "--model vit_digits_patch2_8 --data scenes": "data 'scenes' has boxes, which vit_digits_patch2_8 does not predict",
    "--model detr_digits": "data 'digits' has no boxes, which detr_digits learns; give --data shapes",
    "--model detr_digits --data scenes --recipe folder": "is not trained by loss 'softmax'; pass --recipe scenes",
    "--data scenes --freeze backbone": "freeze trains the head of a classifier, and loss 'detection' has none",
    "--data scenes --class-weights balanced": "class_weights cannot be combined with loss 'detection'; leave it out",
    "--data scenes --val-split 0.1": "data 'scenes' has test images of its own; leave --val-split out",
    "--data shapes --levels 4095": "data 'shapes' are composed in [0, 1]; leave --levels out",
    "--data shapes --mean 0.5,0.5,0.5": "mean is (0.5, 0.5, 0.5), which the training of a detector does not use; leave",
    "--data shapes --img-size 8": "side is 8; shapes need a side of at least 16 pixels",
    "--data scenes --transform os.path:join": "would not move the boxes of data 'scenes'; leave --transform out",
}


OPTIONS = {
    "model": "detr_digits", "epochs": "2", "batch-size": "3", "lr": "3e-4", "warmup": "0.9", "img-size": "32",
    "ema-decay": "0.5", "optimizer": "sgd", "schedule": "vit", "weight-decay": "5", "layer-decay": "0.5",
    "clip": "1e-3", "loss": "softmax", "label-smoothing": "0.2", "mixup": "0.5", "cutmix": "0.5", "mixtoken": "0.5",
    "erasing": "0.9", "policy": "three", "repeats": "2", "min-area": "0.1", "drop-path-rate": "0.5", "mean": "0.5",
    "std": "0.5", "amp": "bfloat16", "grad-accum-steps": "2", "distillation": "soft", "seed": "3",
}  # fmt: skip


@pytest.fixture(scope="module")
def detector_run(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights after two steps."""
    return _weights_of(tmp_path_factory.mktemp("detector"))


def _weights_of(out: Path, *words: str) -> bytes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "TRAINING", (4, 0))
        patch.setattr(load, "TEST", (1, 1))
        patch.setattr(run, "draw_results", lambda *given: None)
        usual = {"--epochs": "1", "--batch-size": "2", "--img-size": "16"}
        usual |= dict(zip(words[::2], words[1::2], strict=True))
        if train_command(out / "run", "--data", "scenes", *(word for pair in usual.items() for word in pair)):
            return b""
    return b"".join(contents(out / "run" / WEIGHTS)[1].values())


def test_no_option_is_left_out_of_the_test():
    """Oracle: the options of a recipe, of which each is in `OPTIONS`."""
    assert {*RECIPE_OPTIONS, "mean", "std"} <= OPTIONS.keys()


@pytest.mark.few(11)
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_changes_a_detector_or_is_refused(option, detector_run, tmp_path, capsys):
    """Oracle: other weights, or one sentence that names the option."""
    weights = _weights_of(tmp_path, f"--{option}", OPTIONS[option])
    if weights:
        assert weights != detector_run
    else:
        error = capsys.readouterr().err
        assert re.search(rf"(--|\b){option.replace('-', '[-_]')}\b", error) and error.count("\n") == 1


def test_options_of_classifiers_are_refused_by_models_of_pixels(tmp_path, capsys):
    """Oracle: the sentence; a value that is the recipe's own is no conflict."""
    for option in ("mixup", "cutmix", "mixtoken", "erasing", "label-smoothing"):
        words = ("--out", tmp_path / "out", "--model", "igpt_digits", "--data", "digits", f"--{option}", "0.5")
        text = f"{option.replace('-', '_')} is 0.5, which training by loss 'likelihood' does not use; leave it out"
        assert text in refused(capsys, *TRAIN, *words)
    check_used(resolve_settings({"model": "igpt_digits", "mixup": 0.0}))


@pytest.mark.parametrize("words", ERRORS)
def test_conflicts_are_one_sentence(words, few_scenes, tmp_path, capsys):
    """Oracle: argument, what was given, and a remedy, in one line."""
    assert ERRORS[words] in refused(capsys, *TRAIN, "--out", tmp_path / "out", *words.split())


@pytest.mark.parametrize(
    "split, changes, text",
    [
        ("val", dict(categories=[dict(id=90, name="bird"), dict(id=2, name="dog")]), "has bird among its test images"),
        ("train", dict(annotations=[]), "has no objects in its training images; annotate some"),
        ("train", dict(categories=[]), "has category 90, which `categories` does not list"),
        ("val", dict(annotations=coco()["annotations"][1:2]), "has no objects in its test images; annotate some"),
    ],
)
def test_damaged_folders_are_one_sentence(split, changes, text, boxes_folder, tmp_path, capsys):
    """Oracle: the file or the folder, and what is wrong."""
    path = boxes_folder / split / "_annotations.coco.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    words = ("--out", tmp_path / "out", "--data", boxes_folder, "--model", "detr_digits")
    assert text in refused(capsys, *TRAIN, *words)


def test_options_of_detectors_are_refused_by_classifiers(tmp_path, capsys):
    """Oracle: the sentence."""
    from fastvit_triton.models.weights.load import save_weights

    save_weights(create_model("vit_digits_patch2_8", num_classes=10, in_chans=1), tmp_path / "x.safetensors")
    Image.new("L", (8, 8)).save(tmp_path / "x.png")
    words = ["predict", str(tmp_path / "x.png"), "--checkpoint", str(tmp_path / "x.safetensors"), "--threshold", "0.5"]
    assert main(words) == 2 and "--threshold is for detectors" in capsys.readouterr().err


@pytest.mark.parametrize(
    "recipe, steps, ap, ap50", [(SCENES, 1700, 0.65, 0.88), (SCENES_DETR, 5000, 0.60, 0.88)], ids=lambda r: ""
)
def test_committed_runs_are_those_of_the_recipes(recipe, steps, ap, ap50):
    """Oracle: the recipe, the model's parameters, a row for each epoch, and the aims: largest length and least AP."""
    (row,) = (row for row in rows_of("scenes") if row["name"] == recipe.model)
    assert row["recipe"] == json.loads(json.dumps(asdict(recipe)))
    assert row["parameters"] == sum(p.numel() for p in create_model(recipe.model).parameters())
    assert [part["epoch"] for part in row["log"]] == list(range(1, recipe.epochs + 1))
    assert row["steps"] == recipe.epochs * load.TRAINING[0] // recipe.batch_size <= steps
    assert row["log"][-1]["test_ap"] >= ap and row["log"][-1]["test_ap50"] >= ap50
    assert (row.get("core_seconds") or row["core_seconds_per_step"]) > 0


def test_the_committed_run_on_shapes_is_that_of_the_recipe():
    """Oracle: the recipe, a row for each epoch, and the aims: at most ten minutes of one core, and least AP."""
    (row,) = rows_of("shapes")
    assert row["recipe"] == json.loads(json.dumps(asdict(SHAPES)))
    assert (
        row["parameters"] == sum(p.numel() for p in create_model(SHAPES.model, num_classes=6).parameters()) < 10_000_000
    )
    assert [part["epoch"] for part in row["log"]] == list(range(1, SHAPES.epochs + 1))
    assert row["log"][-1]["test_ap"] >= 0.5 and 0 < row["core_seconds"] <= 600
