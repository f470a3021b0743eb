"""Tests of data with boxes: folders, augmentation, composed scenes. Oracles: by hand, torchvision, pixels."""

import json
import math
import os
import shutil
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2
from torchvision.tv_tensors import BoundingBoxes

from fastvit_triton.train.data import digits
from fastvit_triton.train.data.transform import Header, read_image
from fastvit_triton.train.detection import augment, fractions, scan_detection, scenes, shapes, to_corners
from fastvit_triton.train.detection import coco as coco_reader
from fastvit_triton.train.detection.augment import cut, mirror, scale, scaled_size
from fastvit_triton.train.detection.boxes import intersection_over_union
from fastvit_triton.train.detection.load import COMPOSED

SIZE = (20, 10)  # width, height


def coco(**changes) -> dict:
    """Two images, three boxes, category numbers with gaps, and a name with an escape sequence."""
    images = [dict(id=7, file_name="b.png", width=20, height=10), dict(id=3, file_name="a.png", width=20, height=10)]
    rows = [
        dict(image_id=7, category_id=90, bbox=[1, 2, 3, 4], area=5.0),
        dict(image_id=7, category_id=2, bbox=[15, 5, 10, 3], iscrowd=1),  # reaches beyond the image
        dict(image_id=7, category_id=2, bbox=[4, 4, 0, 2]),  # has no area
    ]
    categories = [dict(id=90, name="cat\x1b[31m"), dict(id=2, name="dog")]
    return dict(images=images, annotations=rows, categories=categories) | changes


def write_images(folder):
    folder.mkdir(parents=True)
    for name in ("a.png", "b.png"):
        Image.new("RGB", SIZE).save(folder / name)


LAYOUTS = {
    "coco": ("annotations/instances_val2017.json", "val2017"),
    "roboflow": ("valid/_annotations.coco.json", "valid"),
    "plain": ("val.json", "images"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ids", ["compact", "kept"])
def test_annotations_of_coco(layout, ids, tmp_path):
    """Oracle: the boxes by hand; class numbers without gaps, or those of the file; files in sorted order."""
    annotations, folder = (tmp_path / name for name in LAYOUTS[layout])
    write_images(folder)
    annotations.parent.mkdir(exist_ok=True)
    annotations.write_text(json.dumps(coco()))
    found = scan_detection(tmp_path, "val", ids)
    assert found.files == [folder / "a.png", folder / "b.png"] and found.ids == ids
    empty, target = found.targets
    assert empty["boxes"].shape == (0, 4) and empty["labels"].shape == (0,)
    assert target["boxes"].tolist() == [[1, 2, 4, 6], [15, 5, 20, 8]]
    assert target["areas"].tolist() == [5, 15] and target["crowd"].tolist() == [False, True]
    ((_, reason, count, first),) = [row for row in found.findings if row.kind == "objects left out"]
    assert reason == "without area" and count == 1 and "b.png" in first and "4, 4, 4, 6" in first
    names = {number: found.classes[number] for number in target["labels"].tolist()}
    assert names == ({1: "cat?[31m", 0: "dog"} if ids == "compact" else {90: "cat?[31m", 2: "dog"})
    assert len(found.classes) == (2 if ids == "compact" else 91)


ORIENTED = {  # EXIF orientation → the stored image as an array that the viewer turns upright
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a, -1),
}


def framed(root, images: list[tuple[int, tuple[int, int], float]], suffix=".jpg"):
    """Writes images of 40 x 24 upright pixels, white in a box, annotated in their stored frame or listed otherwise.

    Args:
        images: EXIF orientation, listed (width, height), and what the box of the stored pixels is multiplied by.
    """
    listed, rows = [], []
    folder = root / "valid"
    folder.mkdir(parents=True)
    for i, (orientation, size, factor) in enumerate(images):
        upright = np.zeros((24, 40), np.uint8)
        upright[4:12, 24:40] = 255
        stored = np.ascontiguousarray(ORIENTED[orientation](upright))
        exif = Image.Exif()
        exif[0x0112] = orientation
        Image.fromarray(stored).save(folder / f"{i}{suffix}", quality=100, exif=exif)
        left, top, right, bottom = (factor * float(side) for side in white(Image.fromarray(stored)))
        listed.append(dict(id=i, file_name=f"{i}{suffix}", width=size[0], height=size[1]))
        box = [left, top, right - left, bottom - top]
        rows.append(dict(id=i, image_id=i, category_id=1, bbox=box, area=box[2] * box[3]))
    content = dict(images=listed, annotations=rows, categories=[dict(id=1, name="cat")])
    (folder / "_annotations.coco.json").write_text(json.dumps(content))
    return root


def on_pixels(found) -> bool:
    """True if each box lies on the white pixels of the image as it is decoded, to within a pixel."""
    pairs = zip(found.files, found.targets, strict=True)
    return all(
        max(abs(a - b) for a, b in zip(t["boxes"][0].tolist(), white(read_image(f).convert("L")), strict=True)) <= 1
        for f, t in pairs
    )


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".tif", ".webp"])
def test_boxes_of_stored_pixels_follow_exif(suffix, tmp_path):
    """Oracle: the white pixels of the decoded image. Images on their side tell the frame of those turned by 180."""
    stored = {o: (40, 24) if o < 5 else (24, 40) for o in ORIENTED}
    found = scan_detection(framed(tmp_path, [(o, stored[o], 1.0) for o in ORIENTED], suffix), "val")
    assert on_pixels(found) and len(found.files) == 8
    reasons = {row.reason: row.count for row in found.findings}
    assert reasons["boxes turned as EXIF turns the image"] == 7 and reasons["equal"] == 1
    assert reasons["EXIF turns the image, boxes are taken as stored"] == 3


@pytest.mark.parametrize("orientation", ORIENTED)
def test_boxes_of_resized_images_are_scaled(orientation, tmp_path):
    """Oracle: the white pixels; the listed size is that of the stored image times 2.5, or a third of it, rounded."""
    for i, factor in enumerate((2.5, 1 / 3)):
        sides = (40, 24) if orientation < 5 else (24, 40)
        size = (round(sides[0] * factor), round(sides[1] * factor))
        turned = orientation in (2, 3, 4)  # of which the sizes do not tell the frame; 6 does
        images = [(orientation, size, factor)] + [(6, (24, 40), 1.0)] * turned
        found = scan_detection(framed(tmp_path / str(i), images), "val")
        assert on_pixels(found) and abs(found.targets[0]["areas"].item() - 16 * 8) < 8
        scaled = [row for row in found.findings if "scaled" in row.reason]
        assert scaled[0].count == 1 and f"{size[0]} x {size[1]}" in scaled[0].first


@pytest.mark.parametrize(
    "size, fits", [((40, 39), ["stored"]), ((39, 40), ["upright"]), ((80, 79), ["upright", "stored"])]
)
def test_an_equal_size_is_preferred_to_a_scaled_one(size, fits):
    """Oracle: by hand; of 40 x 39 pixels on their side both frames are within a pixel of one ratio."""
    assert coco_reader._fits(size, Header((40, 39), 6)) == fits


@pytest.mark.parametrize("bbox", [[0, 0, 1, 1], [10, 10, 200, 200]], ids=["inside", "beyond"])
@pytest.mark.parametrize("size", [(24, 40), (40, 30), (80, 40), (1000, 1000)])
def test_other_sizes_are_refused_wherever_a_box_lies(size, bbox, tmp_path):
    """Oracle: no ratio makes the listed sides those of 40 x 24 pixels; the sentence has both."""
    root = framed(tmp_path, [(1, size, 1.0)])
    path = root / "valid" / "_annotations.coco.json"
    content = json.loads(path.read_text())
    content["annotations"][0]["bbox"] = bbox
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"lists 0\.jpg as {size[0]} x {size[1]} pixels, and the file has 40 x 24"):
        scan_detection(root, "val")


def test_frames_that_contradict_each_other_are_refused(tmp_path):
    """Oracle: one image on its side has stored boxes, one upright ones; of a third, upside down, sizes tell nothing."""
    root = framed(tmp_path, [(6, (24, 40), 1.0), (8, (40, 24), 1.0), (3, (40, 24), 1.0)])
    with pytest.raises(ValueError, match=r"the size of 2\.jpg does not say"):
        scan_detection(root, "val")


def changed(table: str, i: int, **values) -> dict:
    """The annotations of `coco` with other values in one row; an ellipsis removes the field."""
    content = coco()
    content[table][i] = {key: value for key, value in (content[table][i] | values).items() if value is not ...}
    return content


DAMAGED = {
    "no JSON": ("{", "cannot be read as JSON"),
    "a list": ([1], "lacks a list 'images'"),
    "no categories": (dict(images=[], annotations=[]), "lacks a list 'categories'"),
    "unlisted category": (coco(categories=[dict(id=90, name="cat")]), "has category 2, which `categories`"),
    "unlisted image": (coco(images=[]), "is of image 7, which `images` does not list"),
    "image id twice": (changed("images", 0, id=3), "has image id 3 twice"),
    "file twice": (changed("images", 0, file_name="./a.png"), 'has image file "a.png" twice'),
    "category id twice": (changed("categories", 0, id=2), "has category id 2 twice"),
    "name twice": (changed("categories", 0, name="dog"), 'has category name "dog" twice'),
    "huge category": (changed("categories", 0, id=10**9), r"categories\[0\] in .* has id 1000000000"),
    "negative category": (changed("categories", 0, id=-3), r"categories\[0\] in .* has id -3"),
    "text as category": (changed("categories", 0, id="90"), r'has id "90"'),
    "text in a box": (changed("annotations", 0, id=5, bbox=[1, "2", 3, 4]), 'annotation 5 in .* has bbox "2"'),
    "text as width": (changed("images", 0, width="20"), 'image 7 in .* has width "20"'),
    "infinite width": (changed("images", 0, width=float("inf")), "image 7 in .* has width Infinity"),
    "no height": (changed("images", 0, height=...), "image 7 in .* lacks 'height'"),
    "null as box": (changed("annotations", 0, id=5, bbox=None), "annotation 5 in .* has bbox null"),
    "empty box": (changed("annotations", 0, id=5, bbox=[]), r"annotation 5 in .* has bbox \[\]"),
    "infinite box": (changed("annotations", 0, id=5, bbox=[0, 0, 1e400, 1]), "annotation 5 in .* is infinite"),
    "huge box": (changed("annotations", 0, id=5, bbox=[0, 0, 10**400, 1]), "annotation 5 in .* is infinite"),
    "text as crowd": (changed("annotations", 0, id=5, iscrowd="0"), 'annotation 5 in .* has iscrowd "0"'),
    "absolute name": (changed("images", 0, file_name="/etc/passwd"), "image 7 in .* is outside"),
    "name outside": (changed("images", 0, file_name="x/../../y.png"), "image 7 in .* is outside"),
    "number as name": (changed("images", 0, file_name=3), "image 7 in .* has file_name 3"),
}


@pytest.mark.parametrize("kind", DAMAGED)
@pytest.mark.parametrize("ids", ["compact", "kept"])
def test_damaged_annotations_are_named(kind, ids, tmp_path):
    """Oracle: one sentence with the file, the id and what is wrong."""
    content, words = DAMAGED[kind]
    write_images(tmp_path / "images")
    (tmp_path / "val.json").write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=words) as raised:
        scan_detection(tmp_path, "val", ids)
    assert "val.json" in str(raised.value) and "\n" not in str(raised.value) and len(str(raised.value)) < 400


def test_numbers_of_tables_are_read(tmp_path):
    """Oracle: the same as without a decimal point, which tables with empty cells write."""
    write_images(tmp_path / "images")
    rows = [
        row | {"image_id": float(row["image_id"]), "category_id": float(row["category_id"])}
        for row in coco()["annotations"]
    ]
    (tmp_path / "val.json").write_text(json.dumps(coco(annotations=rows)))
    assert scan_detection(tmp_path, "val").targets[1]["labels"].tolist() == [1, 0]


def test_objects_left_out_are_counted_with_the_first(tmp_path):
    """Oracle: the reasons by hand."""
    write_images(tmp_path / "images")
    boxes = [[100, 100, 5, 5], [5, 5, -3, 4], [float("nan"), 1, 2, 2], [5, 5, 0, 3], [-9, 1, 9, 2], [1, 1, 2, 2]]
    rows = [dict(id=i, image_id=7, category_id=2, bbox=box) for i, box in enumerate(boxes)]
    (tmp_path / "val.json").write_text(json.dumps(coco(annotations=[*rows, rows[-1]])))
    found = scan_detection(tmp_path, "val")
    assert [len(target["labels"]) for target in found.targets] == [0, 2]
    lost = {row.reason: (row.count, row.first.split(" in ")[0]) for row in found.findings.of("objects left out")}
    assert lost == {
        "outside the image": (2, "annotation 0"),
        "of negative width or height": (1, "annotation 1"),
        "not finite": (1, "annotation 2"),
        "without area": (1, "annotation 3"),
    }
    said = {row.reason: row.count for row in found.findings.of("odd")}
    assert said == {"annotation ids that stand twice": 1, "objects that stand twice": 1}


# YOLO

TWO = "names: [cat, dog]\n"


def yolo(root, text: str = TWO, label: str = "1 0.5 0.5 0.5 0.4\n", layout: str = "images/{}"):
    """Two images of 20 x 10 pixels in each split; a.png has labels, b.png none."""
    for split in ("train", "val"):
        write_images(root / layout.format(split))
        labels = root / layout.format(split).replace("images", "labels")
        labels.mkdir(parents=True, exist_ok=True)
        (labels / "a.txt").write_bytes(label if isinstance(label, bytes) else label.encode())
    (root / "data.yaml").write_text(text, encoding="utf-8")
    return root


NAMES = {
    "names: ['cat', dog]\n": ("cat", "dog"),
    "names:\n  1: dog\n  0: cat\n": ("cat", "dog"),
    "train: images/train\nnames:\n- cat\n- dog\nnc: 2\n": ("cat", "dog"),
    "names: {0: 'a, b', 1: \"it's: #1\"}  # two\n": ("a, b", "it's: #1"),
    "names: [no, 1]\n": ("no", "1"),  # words that YAML takes for other types
    "names:\n  - >\n    folded\n    name\n  - x\n": ("folded name", "x"),
    "\ufeffnames: &n [cat, dog]\nother: *n\n": ("cat", "dog"),
    "names: {0: cat, 3: e\u0301}\n": ("cat", "", "", "é"),
}


@pytest.mark.parametrize("text", NAMES)
def test_names_of_yolo(text, tmp_path):
    """Oracle: the names as YAML defines them, by number, as texts in Unicode's composed form."""
    found = scan_detection(yolo(tmp_path, text, "0 0.5 0.5 0.5 0.4\n"), "val")
    assert found.classes == NAMES[text] and [f.name for f in found.files] == ["a.png", "b.png"]


BAD_NAMES = {
    "names: [cat, cat]": "two classes named cat",
    "names: {0: cat, 0: dog}": "'0' a second time",
    "names: [cat]\nnames: [dog]": "'names' a second time",
    "names: {cat: 0}": "a name for class 'cat'",
    "names: {1000000000: cat}": "a name for class '1000000000'",
    "names: {-1: cat}": "a name for class '-1'",
    "names: [cat, ]\nnc: 2": "has nc '2', but names 1",
    "names: [[cat]]": "no text as name of class 0",
    "names: [cat, '']": "no text as name of class 1",
    "nc: 2": "has no names",
    "[cat]": "holds no names",
    "names: [cat": "cannot be read as YAML",
    "names: [cat]\nval: nowhere": "has val: nowhere, which does not exist",
}


@pytest.mark.parametrize("text", BAD_NAMES)
def test_damaged_descriptions_are_named(text, tmp_path):
    """Oracle: one sentence with the file."""
    with pytest.raises(ValueError, match=BAD_NAMES[text]) as raised:
        scan_detection(yolo(tmp_path, text), "val")
    assert "data.yaml" in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("layout", ["{}/images", "images/{}", "other/images/{}", "{}"])
def test_folders_of_yolo(layout, tmp_path):
    """Oracle: the box by hand; the usual folders, and those that data.yaml names, also as Roboflow writes them."""
    usual = layout in ("{}/images", "images/{}")
    places = [""] if usual else [f"train: {layout.format('train')}\nval: {layout.format('val')}\n"]
    places += [
        f"path: old/place\ntrain: null\nval: [{layout.format('val')}]\n",
        f"val: ../{layout.format('val')}\n",
        "val: list.txt\n",
    ]
    for i, place in enumerate(places):
        root = yolo(tmp_path / str(i) / "x", TWO + place, layout=layout)
        (root / "list.txt").write_text(f"\n./{layout.format('val')}/b.png\n{layout.format('val')}/a.png\n")
        found = scan_detection(root, "val")
        assert [f.name for f in found.files] == ["a.png", "b.png"]
        torch.testing.assert_close(found.targets[0]["boxes"], torch.tensor([[5.0, 3, 15, 7]]))
        assert found.targets[0]["labels"].tolist() == [1] and len(found.targets[1]["labels"]) == 0
        assert found.findings.total("images without labels") == 1


LABELS = {
    "1 0.5 0.5 0.5 0.4\n\n  \n": [5, 3, 15, 7],
    "\ufeff1 0.5 0.5 0.5 0.4": [5, 3, 15, 7],
    "1 0.25 0.3 0.75 0.3 0.75 0.7 0.25 0.7\r\n": [5, 3, 15, 7],
    "1 0.5 0.3 0.75 0.5 0.25 0.7\n": [5, 3, 15, 7],
}


@pytest.mark.parametrize("label", LABELS)
def test_lines_of_yolo(label, tmp_path):
    """Oracle: by hand; a polygon becomes the box around it."""
    (target, _) = scan_detection(yolo(tmp_path, label=label), "val").targets
    torch.testing.assert_close(target["boxes"], torch.tensor([LABELS[label]]).float())


def test_key_points_are_no_polygon(tmp_path):
    """Oracle: the four numbers of the box."""
    root = yolo(tmp_path, TWO + "kpt_shape: [3, 2]\n", "1 0.5 0.5 0.5 0.4 0.1 0.1 0.2 0.2 0.3 0.3\n")
    torch.testing.assert_close(scan_detection(root, "val").targets[0]["boxes"], torch.tensor([[5.0, 3, 15, 7]]))


def test_boxes_of_yolo_are_of_the_upright_image(tmp_path):
    """Oracle: the shares of a photograph on its side, times its upright sides."""
    exif = Image.Exif()
    exif[0x0112] = 6
    root = yolo(tmp_path)
    Image.new("RGB", SIZE).save(root / "images" / "val" / "a.png", exif=exif)
    (target, _) = scan_detection(root, "val").targets
    torch.testing.assert_close(target["boxes"], torch.tensor([[2.5, 6, 7.5, 14]]))


BAD_LINES = {
    "0 0.5 0.5 0.5": "expected five numbers",
    "0 0.1 0.1 0.2 0.2 0.3": "expected five numbers",
    "2 0.5 0.5 0.1 0.1": "has class 2",
    "0.5 0.5 0.5 0.1 0.1": "has class 0.5",
    "nan 0.5 0.5 0.1 0.1": "has class nan",
    "cat 0 0 0 0": "expected numbers",
    "0 10 5 4 4": "has 10, which is no fraction of the image; divide pixels",
    "0 10 5 14 5 14 9": "has 14, which is no fraction of the image; divide pixels",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_damaged_lines_of_yolo_are_named(line, tmp_path):
    """Oracle: the line's number, and the file."""
    root = yolo(tmp_path, label=f"0 0.5 0.5 0.1 0.1\n{line}\n")
    with pytest.raises(ValueError, match=rf"line 2 of .*a\.txt .*{BAD_LINES[line]}"):
        scan_detection(root, "val")
    (root / "labels" / "val" / "a.txt").write_bytes(b"\xff\xfe0 1")
    with pytest.raises(ValueError, match=r"a\.txt cannot be read as text"):
        scan_detection(root, "val")


def test_splits_without_labels_are_refused(tmp_path):
    """Oracle: the sentence; one of two folders without labels is counted."""
    root = yolo(tmp_path)
    (root / "labels" / "val" / "a.txt").rename(root / "labels" / "val" / "c.txt")
    with pytest.raises(ValueError, match=r"no label file for any of its 2 test images, .*a\.txt"):
        scan_detection(root, "val")
    (root / "data.yaml").write_text(TWO + "val: [images/train, images/val]\n")
    lost = {row.reason: row.count for row in scan_detection(root, "val").findings.of("images without labels")}
    assert lost == {"without a label file": 1, "in a folder without any label file": 2}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("place", ["labels/val/a.txt", "images/val/a.png", "data.yaml"])
def test_pipes_are_not_waited_for(place, tmp_path):
    """Oracle: the sentence, or the image among those that cannot be read."""
    root = yolo(tmp_path)
    (root / place).unlink()
    os.mkfifo(root / place)
    if "images" in place:
        assert scan_detection(root, "val").defects == {root / place: "not a regular file"}
        return
    with pytest.raises(ValueError, match="is not a regular file"):
        scan_detection(root, "val")


def test_a_description_needs_its_package(tmp_path, monkeypatch):
    """Oracle: the command that installs it."""
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ValueError, match=r"pip install 'fastvit_triton\[detect\]'"):
        scan_detection(yolo(tmp_path), "val")


@pytest.mark.parametrize("names", [("Train", "VALID"), ("training", "Testing"), ("train", "test")])
def test_splits_have_several_names(names, tmp_path):
    """Oracle: the annotations of both folders; two names for one split are refused."""
    for name in names:
        write_images(tmp_path / name)
        (tmp_path / name / "_annotations.coco.json").write_text(json.dumps(coco()))
    for split, name in zip(("train", "val"), names, strict=True):
        assert scan_detection(tmp_path, split).files[0] == tmp_path / name / "a.png"
    shutil.copytree(tmp_path / names[0], tmp_path / ("training" if names[0] != "training" else "train"))
    with pytest.raises(ValueError, match="for one split; merge them, or move one away"):
        scan_detection(tmp_path, "train")


def test_folders_without_boxes_are_refused(tmp_path):
    """Oracle: the layouts."""
    with pytest.raises(ValueError, match=r"instances_train2017\.json"):
        scan_detection(tmp_path, "train")


# Augmentation


def marked(box: tuple[int, int, int, int], size: tuple[int, int] = (50, 40)) -> tuple[Image.Image, dict]:
    """An image that is white within a box and black elsewhere."""
    pixels = np.zeros((size[1], size[0]), np.uint8)
    pixels[box[1] : box[3], box[0] : box[2]] = 255
    target = dict(boxes=torch.tensor([box]).float(), labels=torch.tensor([3]))
    return Image.fromarray(pixels), target


def white(image: Image.Image) -> list[float]:
    """Corners of the box around the white pixels."""
    rows, columns = np.nonzero(np.asarray(image) > 127)
    return [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]


def test_boxes_follow_the_pixels():
    """Oracle: the white pixels of an image, after mirroring, cutting and doubling."""
    image, target = marked((10, 8, 30, 22))
    for moved, boxes in (mirror(image, target), cut(image, target, (12, 0, 40, 20)), scale(image, target, 80, 1000)):
        assert boxes["boxes"][0].tolist() == white(moved) and boxes["labels"].tolist() == [3]
    _, nothing = cut(image, target, (31, 0, 40, 20))
    assert nothing["boxes"].shape == (0, 4) and len(nothing["labels"]) == 0


def test_augmentation_keeps_boxes_on_the_pixels():
    """Oracle: the white pixels, to within two pixels of interpolation; the same numbers give the same image."""
    image, target = marked((8, 6, 44, 36))
    sides = set()
    for seed in range(12):
        moved, boxes = augment(
            image, target, torch.Generator().manual_seed(seed), (64, 80), 90, before_crop=(48,), crop=(40, 60)
        )
        again, _ = augment(
            image, target, torch.Generator().manual_seed(seed), (64, 80), 90, before_crop=(48,), crop=(40, 60)
        )
        assert np.array_equal(moved, again) and max(moved.size) <= 90
        assert max(abs(a - b) for a, b in zip(boxes["boxes"][0].tolist(), white(moved), strict=True)) <= 2
        sides.add(moved.size)
    assert len(sides) > 3


@pytest.mark.parametrize("size", [(640, 480), (480, 640), (1000, 300), (333, 333)])
def test_scaled_size_equals_torchvision(size):
    """Oracle: torchvision's Resize with max_size, to the pixel that the authors round and torchvision cuts."""
    width, height = scaled_size(size, 800, 1333)
    boxes = BoundingBoxes(torch.zeros(1, 4), format="XYXY", canvas_size=size[::-1])
    wanted = v2.Resize(800, max_size=1333)(boxes).canvas_size[::-1]
    assert max(width, height) <= 1333 and max(abs(width - wanted[0]), abs(height - wanted[1])) <= 1


def test_fractions_leave_out_crowds():
    """Oracle: by hand."""
    boxes = torch.tensor([[2.0, 1, 6, 3], [0, 0, 9, 9]])
    target = dict(boxes=boxes, labels=torch.tensor([4, 5]), crowd=torch.tensor([False, True]))
    found = fractions(target, SIZE)
    torch.testing.assert_close(found["boxes"], torch.tensor([[0.2, 0.2, 0.2, 0.2]]))
    assert found["labels"].tolist() == [4]


# Scenes


def test_scenes_hold_whole_digits_in_their_boxes():
    """Oracle: without noise, what is brighter than the threshold of ink lies within the boxes and touches each side."""
    images, targets = scenes("test", 40, seed=1, noise=0.0)
    again, _ = scenes("test", 40, seed=1, noise=0.0)
    assert torch.equal(images, again) and images.shape == (40, 1, 32, 32)
    assert {len(t["labels"]) for t in targets} == {1, 2, 3}
    for image, target in zip(images[:, 0], targets, strict=True):
        inside = torch.zeros(32, 32, dtype=torch.bool)
        for left, top, right, bottom in (to_corners(target["boxes"]) * 32).round().int().tolist():
            ink = image[top:bottom, left:right] > 0.2
            assert ink[0].any() and ink[-1].any() and ink[:, 0].any() and ink[:, -1].any()
            inside[top:bottom, left:right] = True
        assert not (image > 0.2)[~inside].any()


def test_scenes_of_the_test_hold_no_training_digit():
    """Oracle: digits at their own size, 8 x 8 pixels: each scene is one image of its split."""
    images, targets = scenes("test", 20, side=8, sizes=(8, 8), most=1, noise=0.0)
    pool, labels = digits("test")
    for image, target in zip(images, targets, strict=True):
        same = (pool == image).flatten(1).all(1)
        assert same.any() and int(target["labels"]) in labels[same].tolist()
    with pytest.raises(ValueError, match="sizes"):
        scenes("test", 1, side=10)


def test_shapes_are_what_their_labels_and_boxes_say(monkeypatch):
    """Oracle: on grey, pixels of another colour: where they are, their mean colour, and area / (largest radius)², which
    is π of a circle, 2 of a square and 3√3 / 4 of a triangle."""
    monkeypatch.setattr(sys.modules[shapes.__module__], "GROUND", (0.6, 0.6))  # 153 of 255
    images, targets = shapes(24, seed=1, most=1, noise=0.0)
    ratios = {"circle": math.pi, "square": 2.0, "triangle": 27**0.5 / 4}
    found = set()
    for image, target in zip(images, targets, strict=True):
        drawn = (image != 153).any(0)
        rows, columns = drawn.any(1).nonzero(), drawn.any(0).nonzero()
        box = torch.stack((columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)).flatten()
        # centres of mixed pixels are at most 1/2 beyond an edge, 1 beyond a corner of 60 degrees; half a pixel more
        assert (to_corners(target["boxes"])[0] * 192 - box).abs().max() < 1.5
        places = drawn.nonzero().float()
        radius = (places - places.mean(0)).norm(dim=1).max()
        form = min(ratios, key=lambda name: abs(float(len(places) / radius**2) - ratios[name]))
        red, _, blue = image[:, drawn].float().mean(1)
        label = COMPOSED["shapes"][int(target["labels"])]
        assert label == f"{'red' if red > blue else 'blue'} {form}"
        found.add(label)
    assert found == {*COMPOSED["shapes"]}


def test_pictures_of_shapes_are_the_same_for_a_seed():
    """Oracle: fewer of the same seed, and another seed; boxes lie in the picture and hardly overlap."""
    images, targets = shapes(6, seed=3, side=32)
    again, _ = shapes(4, seed=3, side=32)
    assert torch.equal(images[:4], again) and not torch.equal(shapes(4, seed=4, side=32)[0], again)
    assert max(len(target["labels"]) for target in targets) > 1
    for target in targets:
        corners = to_corners(target["boxes"])
        overlaps = intersection_over_union(corners[:, None], corners).fill_diagonal_(0)
        assert corners.min() >= 0 and corners.max() <= 1 and overlaps.max() < 0.1
    with pytest.raises(ValueError, match="side is 8; shapes need a side of at least 16"):
        shapes(1, side=8)
