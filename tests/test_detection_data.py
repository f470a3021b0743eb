"""Tests of data with boxes: folders, augmentation, composed scenes. Oracles: by hand, torchvision, pixels."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2
from torchvision.tv_tensors import BoundingBoxes

from fastvit_triton.train.data import digits
from fastvit_triton.train.detection import augment, fractions, scan_detection, scenes, to_corners
from fastvit_triton.train.detection.augment import cut, mirror, scale, scaled_size

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
    assert len(found.skipped) == 1 and "b.png" in found.skipped[0] and "4, 4, 4, 6" in found.skipped[0]
    names = {number: found.classes[number] for number in target["labels"].tolist()}
    assert names == ({1: "cat?[31m", 0: "dog"} if ids == "compact" else {90: "cat?[31m", 2: "dog"})
    assert len(found.classes) == (2 if ids == "compact" else 91)


@pytest.mark.parametrize("layout", ["{}/images", "images/{}"])
def test_files_of_yolo(layout, tmp_path):
    """Oracle: the boxes by hand; an image without a file has no objects."""
    for names in ("names: ['cat', dog]\n", "names:\n  0: cat\n  1: dog\n", "train: x\nnames:\n- cat\n- dog\nnc: 2\n"):
        folder = tmp_path / str(len(names))
        write_images(folder / layout.format("val"))
        labels = folder / layout.format("val").replace("images", "labels")
        labels.mkdir(parents=True)
        (folder / "data.yaml").write_text(names)
        (labels / "a.txt").write_text("1 0.5 0.5 0.5 0.4\n")
        found = scan_detection(folder, "val")
        assert found.classes == ("cat", "dog") and [f.name for f in found.files] == ["a.png", "b.png"]
        torch.testing.assert_close(found.targets[0]["boxes"], torch.tensor([[5.0, 3, 15, 7]]))
        assert found.targets[0]["labels"].tolist() == [1] and len(found.targets[1]["labels"]) == 0


@pytest.mark.parametrize(
    "content, words",
    [
        ("{", "cannot be read as JSON"),
        (json.dumps([1]), "no annotation file"),
        (json.dumps(dict(images=[])), "lacks 'categories'"),
        (json.dumps(coco(categories=[dict(id=90, name="cat")])), "lacks 2"),
        (json.dumps(coco(images=[])), "lacks 7"),
    ],
)
def test_damaged_annotations_are_named(content, words, tmp_path):
    """Oracle: one sentence with the file and what it lacks."""
    (tmp_path / "val.json").write_text(content)
    with pytest.raises(ValueError, match=words) as raised:
        scan_detection(tmp_path, "val")
    assert "val.json" in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("line", ["0 0.5 0.5 0.5", "2 0.5 0.5 0.1 0.1", "0.5 0.5 0.5 0.1 0.1", "cat 0 0 0 0"])
def test_damaged_lines_of_yolo_are_named(line, tmp_path):
    """Oracle: the line's number, and the file."""
    write_images(tmp_path / "images" / "val")
    (tmp_path / "labels" / "val").mkdir(parents=True)
    (tmp_path / "data.yaml").write_text("names: [cat, dog]\n")
    (tmp_path / "labels" / "val" / "b.txt").write_text(f"0 0.5 0.5 0.1 0.1\n{line}\n")
    with pytest.raises(ValueError, match=r"line 2 of .*b\.txt"):
        scan_detection(tmp_path, "val")


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
