"""Tests of data sets: the digits, image folders, transforms, and invalid folders and files."""

import gc
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fastvit_triton.train.augment import random_affine
from fastvit_triton.train.data import DIGITS_MEAN, DIGITS_STD, digits, load
from fastvit_triton.train.data.folder import FolderBatches, scan_folder
from fastvit_triton.train.data.transform import Transform, find_defect, read_image, save_image
from fastvit_triton.train.recipes import DIGITS, FOLDER

pytestmark = pytest.mark.fast

RECIPE = replace(FOLDER, img_size=16, batch_size=4)


def write_folder(root: Path, per_class: int = 5) -> Path:
    """Writes two classes, red and blue, of noisy images in several sizes, modes and formats."""
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        for name, channel in (("red", 0), ("blue", 2)):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(per_class):
                pixels = generator.integers(0, 80, (20 + 7 * i, 31 - 3 * i, 3), dtype=np.uint8)
                pixels[..., channel] += 150
                image = Image.fromarray(pixels)
                if i == 1:
                    image = image.convert("L")
                image.save(folder / f"{i}.{'png' if i % 2 else 'jpg'}")
    return root


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "images")


def truncate(path: Path) -> Path:
    """Cuts off the last fifth of a file, which holds only pixels."""
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 4 // 5])
    return path


def test_digits_split_is_fixed():
    """Oracle: the published count 1,797, disjoint splits, each class within one image of a fifth; fixed constants."""
    (train, train_targets), (test, test_targets) = digits("train"), digits("test")
    assert train.shape == (1437, 1, 8, 8) and test.shape == (360, 1, 8, 8)
    counts, share = torch.bincount(test_targets), torch.bincount(torch.cat([train_targets, test_targets])) / 5
    assert (counts - share).abs().max() <= 1
    assert 0 <= train.min() and train.max() == 1
    assert train_targets[:10].tolist() == digits("train")[1][:10].tolist()
    assert round(train.mean().item(), 4) == DIGITS_MEAN and abs(train.std().item() - DIGITS_STD) < 2e-4


def test_digits_in_another_size():
    """Oracle: enlarging keeps the mean grey level, because a pixel's weights sum to one away from borders."""
    images, _ = digits("test", (16, 16))
    assert images.shape == (360, 1, 16, 16)
    assert abs(images.mean() - digits("test")[0].mean()) < 0.01


def test_digit_batches():
    """Oracle: training batches differ by epoch and hold each target once; test batches are ordered and normalised."""
    data = load("digits", DIGITS)
    first, second = (torch.cat([targets for _, targets in data.train]) for _ in range(2))
    assert not torch.equal(first, second) and torch.equal(first.sort()[0], second.sort()[0])
    images, targets = zip(*data.test, strict=True)
    assert len(data.test) == len(images) == -(-360 // DIGITS.batch_size)
    assert torch.equal(torch.cat(targets), digits("test")[1])
    assert torch.equal(data.transform.restore(images[0]).round(decimals=4), digits("test")[0][:64].round(decimals=4))


def test_random_affine_identity_and_shift():
    """Oracle: no motion is the identity up to rounding; a whole-pixel shift of an inner dot keeps its intensity."""
    images = torch.rand(5, 2, 8, 6)
    torch.testing.assert_close(random_affine(images), images)
    dot = torch.zeros(64, 1, 9, 9)
    dot[:, :, 4, 4] = 1
    moved = random_affine(dot, shift=2)
    torch.testing.assert_close(moved.sum((1, 2, 3)), torch.ones(64))
    column = (moved.sum((1, 2)) * torch.arange(9)).sum(1) - 4
    assert column.abs().max() <= 2 + 1e-5 and column.std() > 0.5
    turned = random_affine(dot, degrees=180)
    torch.testing.assert_close(turned[:, 0, 4, 4], torch.ones(64))


def test_random_affine_draws_its_numbers_independently(monkeypatch: pytest.MonkeyPatch):
    """Oracle: the equation of the docstring solved for angle, zooms, slant and moves of 2,000 images: each fills its
    range, and no two are correlated by 5 or more standard deviations, 1/√2,000 each."""
    found = []

    def affine_grid(theta: torch.Tensor, size: list[int], **options: bool) -> torch.Tensor:
        found.append(theta)
        return torch.zeros(size[0], *size[2:], 2)

    monkeypatch.setattr(torch.nn.functional, "affine_grid", affine_grid)
    count, (height, width) = 2_000, (8, 6)
    random_affine(torch.rand(count, 1, height, width), degrees=30, zoom=0.2, shear=0.1, shift=2)
    (theta,) = found
    first, second, move = torch.complex(theta[:, 0], theta[:, 1]).unbind(1)
    second = second * first.conj() / first.abs()  # without the rotation
    zooms = [(first.abs() - 1) / 0.2, (second.imag - 1) / 0.2]
    moves = [move.real * width / 2 / 2, move.imag * height / 2 / 2]
    drawn = torch.stack([first.angle().rad2deg() / 30, *zooms, second.real / second.imag / 0.1, *moves])
    assert (drawn.amax(1) > 0.99).all() and (drawn.amin(1) < -0.99).all() and drawn.abs().max() <= 1 + 1e-5
    assert (torch.corrcoef(drawn) - torch.eye(6)).abs().max() < 5 / count**0.5


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I", "F"])
def test_every_mode_becomes_three_channels(tmp_path: Path, mode: str):
    """Oracle: an image that is black on the left and white on the right is the same in every mode."""
    levels = np.zeros((12, 20), np.uint8)
    levels[:, 10:] = 255
    image = Image.fromarray(levels)
    if mode == "I;16":
        image = Image.fromarray(levels.astype(np.uint16) * 257)
    elif mode == "I":
        image = Image.fromarray(levels.astype(np.int32) * 257)
    elif mode == "F":
        image = Image.fromarray(levels.astype(np.float32))
    else:
        image = image.convert(mode)
    path = tmp_path / "image.tif"
    image.save(path)
    image = Transform((4, 4), (0.0,) * 3, (1.0,) * 3)(read_image(path))
    assert image.shape == (3, 4, 4)
    torch.testing.assert_close(image[:, :, 0], torch.zeros(3, 4), atol=0.02, rtol=0)
    torch.testing.assert_close(image[:, :, 3], torch.ones(3, 4), atol=0.02, rtol=0)


def test_transparency_becomes_white_and_exif_orientation_is_applied(tmp_path: Path):
    """Oracle: a fully transparent image is white; EXIF orientation 6 turns the image's left edge to its top."""
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(tmp_path / "empty.png")
    assert read_image(tmp_path / "empty.png").convert("L").getextrema() == (255, 255)
    rotated = Image.new("L", (16, 8))
    rotated.paste(255, (0, 0, 8, 8))
    exif = Image.Exif()
    exif[0x0112] = 6
    rotated.save(tmp_path / "rotated.png", exif=exif)
    upright = np.asarray(read_image(tmp_path / "rotated.png"))
    assert upright.shape == (16, 8) and upright[:8].min() == 255 and upright[8:].max() == 0


def test_transform_takes_the_centre_or_a_seeded_crop():
    """Oracle: the centre of a wide image; the same seed gives the same crop, another seed another."""
    wide = Image.new("RGB", (30, 10))
    wide.paste((255, 255, 255), (10, 0, 20, 10))
    transform = Transform((10, 10), (0.0,) * 3, (1.0,) * 3)
    torch.testing.assert_close(transform(wide), torch.ones(3, 10, 10))
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (30, 40, 3), dtype=np.uint8))
    assert torch.equal(transform(noise, seed=1), transform(noise, seed=1))
    assert not torch.equal(transform(noise, seed=1), transform(noise, seed=2))
    with pytest.raises(ValueError, match="mean has 2 channels and std 2; images have 1 or 3"):
        Transform((8, 8), (0.0, 0.0), (1.0, 1.0))


def test_saved_image_reads_back(tmp_path: Path):
    """Oracle: eight bits per channel, so half a level of error before any resampling, none after repetition."""
    image = torch.rand(3, 8, 8)
    save_image(image, tmp_path / "x.png", side=8)
    torch.testing.assert_close(
        Transform((8, 8), (0.0,) * 3, (1.0,) * 3)(read_image(tmp_path / "x.png")), image, atol=0.5 / 255 + 1e-6, rtol=0
    )


def test_folder_of_any_size_and_mode(folder: Path):
    """Oracle: sorted class names, targets by folder, shapes by recipe, test order by file name."""
    data = load(str(folder), RECIPE)
    assert data.classes == ("blue", "red") and data.transform.size == (16, 16)
    images, targets = zip(*data.test, strict=True)
    assert torch.cat(targets).tolist() == [0] * 5 + [1] * 5
    assert torch.cat(images).shape == (10, 3, 16, 16)
    shown = data.test.display_image(9)  # red/4.jpg
    assert shown.shape == (3, 16, 16) and shown[0].mean() > shown[2].mean() + 0.3
    assert sorted(torch.cat([targets for _, targets in data.train]).tolist()) == [0] * 5 + [1] * 5


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_do_not_change_the_batches(folder: Path):
    """Oracle: two epochs decoded in this process with the same seed."""

    def epochs(workers: int) -> list[torch.Tensor]:
        torch.manual_seed(3)
        data = load(str(folder), RECIPE, workers=workers)
        return [images for _ in range(2) for images, _ in data.train]

    here, there = epochs(0), epochs(2)
    assert len(here) == len(there) == 6
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
    assert not torch.equal(here[0], here[3])


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_pipes_of_workers_are_no_cyclic_garbage(folder: Path):
    """Oracle: the collector's list of garbage, of which it finalises all objects in any order."""
    batches = load(str(folder), RECIPE, workers=2).train
    list(batches)
    batches.cycle = batches
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)  # keeps what it would free
    try:
        del batches
        gc.collect()
        found = [value for value in gc.garbage if isinstance(value, FolderBatches | Connection)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    (batches,) = found
    del batches.cycle


def test_invalid_folders_raise(tmp_path: Path):
    """Oracle: the sentence names the folder and the remedy."""
    root = tmp_path / "data"

    def refusal(split: str = "train", classes: tuple[str, ...] | None = None) -> str:
        with pytest.raises(ValueError) as caught:
            scan_folder(root, split, classes)
        assert "\n" not in str(caught.value) and str(root) in str(caught.value)
        return str(caught.value)

    assert "is not a folder; give one that holds <class>/, or train/<class>/ and val/<class>/" in refusal()
    root.mkdir()
    assert "has no folder train/; put images into train/<class>/" in refusal()
    (root / "train").mkdir()
    assert "holds no class folders" in refusal()
    (root / "train" / "cat").mkdir()
    (root / "train" / "cat" / "notes.txt").touch()
    (root / "train" / "cat" / "._hidden.png").touch()
    assert "cat' holds no images; add some (.bmp" in refusal()
    (root / "val" / "dog").mkdir(parents=True)
    (root / "val" / "cot").mkdir()
    assert "has cot, dog, not among the 1 classes of training (cat)" in refusal("val", ("cat",))


def test_bad_images_are_named_counted_and_skipped(folder: Path):
    """Oracle: headers reveal an empty and a foreign file; only decoding reveals a truncated one."""
    (folder / "train" / "red" / "1.png").write_bytes(b"")
    (folder / "train" / "blue" / "3.png").write_text("not an image")
    cut = truncate(folder / "val" / "red" / "0.jpg")
    with pytest.raises(ValueError) as caught:
        load(str(folder), RECIPE)
    assert str(caught.value).startswith(f"2 of 20 images in {folder} cannot be read: train/blue/3.png (not an image), ")
    assert str(caught.value).endswith("train/red/1.png (empty file); repair or remove them, or pass --skip-bad-images")

    late = folder / "val" / "blue" / "4.jpg"
    good = late.read_bytes()
    late.write_bytes(b"")
    with pytest.raises(ValueError, match=r"^3 of 20 images .* val/blue/4.jpg \(empty file\); repair"):
        load(str(folder), RECIPE)
    late.write_bytes(good)

    data = load(str(folder), RECIPE, skip_bad_images=True)
    assert len(data.train.bad) == 2 and not data.test.bad
    assert sum(len(targets) for _, targets in data.train) == 8
    assert sum(len(targets) for _, targets in data.test) == 9
    assert list(data.test.bad) == [cut] and "truncated" in data.test.bad[cut]
    # only readable images are counted, so the sixth is now red/1.png
    expected = data.transform.restore(data.transform(read_image(folder / "val" / "red" / "1.png")))
    assert torch.equal(data.test.display_image(5), expected)


def test_truncated_image_is_fatal_unless_skipped(folder: Path):
    """Oracle: the sentence names the file and the option."""
    truncate(folder / "train" / "red" / "0.jpg")
    data = load(str(folder), RECIPE)
    with pytest.raises(ValueError, match=r"1 of 10 images .* train/red/0.jpg \(.*truncated.*--skip-bad-images"):
        list(data.train)


def test_many_bad_images_are_listed_as_ten_names_and_a_count(tmp_path: Path):
    """Oracle: the sentence about 12 empty files."""
    folder = write_folder(tmp_path / "many", per_class=7)
    for path in (folder / "train").rglob("*.*g"):
        if path.stem != "0":
            path.write_bytes(b"")
    with pytest.raises(ValueError) as caught:
        load(str(folder), RECIPE)
    assert str(caught.value).startswith("12 of 28 images") and "and 2 more;" in str(caught.value)
    assert str(caught.value).count("empty file") == 10


def test_find_defect_reads_the_header_or_the_whole_file(folder: Path):
    """Oracle: a truncated file has a valid header."""
    path = truncate(folder / "train" / "red" / "2.jpg")
    assert find_defect(path) is None and "truncated" in find_defect(path, decode=True)
    assert "No such file" in find_defect(folder / "nowhere.png")
