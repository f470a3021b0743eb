"""Tests of data sets: the digits, image folders, transforms, and invalid folders and files."""

import gc
import os
import struct
import zlib
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from agreement import one_sentence
from commands import refused
from PIL import Image

from fastvit_triton.train import sources
from fastvit_triton.train.augment import random_affine
from fastvit_triton.train.data import DIGITS_MEAN, DIGITS_STD, digits
from fastvit_triton.train.data.folder import FolderBatches, ImageFiles, scan_folder
from fastvit_triton.train.data.split import Split
from fastvit_triton.train.data.transform import Transform, find_defect, read_image, save_image
from fastvit_triton.train.recipes import DIGITS, FOLDER
from fastvit_triton.train.sources import DataSource, load

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


def test_a_further_kind_of_data_is_one_row(monkeypatch: pytest.MonkeyPatch):
    """Oracle: arrays of a kind that only a row of `SOURCES` knows: trained on, tested, divided, and refused by name."""
    arrays = {"train": np.arange(12, dtype=np.uint8), "val": np.arange(100, 104, dtype=np.uint8)}

    def scan(name: str, split: str, classes: tuple[str, ...] | None = None, max_pixels: int = 0) -> ImageFiles:
        files = [Path(name) / str(i) for i in arrays[split or "train"]]
        return ImageFiles(files, [i % 2 for i in range(len(files))], ("a", "b"), decode, check=None, content=None)

    def decode(path: Path) -> Image.Image:
        return Image.new("RGB", (20, 20), (int(path.name),) * 3)

    kind = DataSource(lambda name: name.startswith("mine"), scan, lambda name: name == "mine:both", deep=False)
    monkeypatch.setattr(sources, "SOURCES", (kind, *sources.SOURCES))
    data = load("mine:both", RECIPE)
    assert data.classes == ("a", "b") and (len(data.train.targets), len(data.test.targets)) == (12, 4)
    levels = {round(float(data.transform.restore(image).mean() * 255)) for images, _ in data.test for image in images}
    assert levels == set(arrays["val"].tolist())
    with pytest.raises(ValueError, match="has test images of its own; leave --val-split out"):
        load("mine:both", RECIPE, split=Split(0.25, 0))
    with pytest.raises(ValueError, match="has pixels of 8 bits; leave --levels out"):
        load("mine:both", RECIPE, levels=4095.0)
    divided = load("mine:one", RECIPE, split=Split(0.25, 0))
    assert (len(divided.train.targets), len(divided.test.targets)) == (8, 4)
    assert not {*divided.train.files} & {*divided.test.files}


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
        image = Image.fromarray(levels.astype(np.float32) / 255)
    else:
        image = image.convert(mode)
    path = tmp_path / "image.tif"
    image.save(path)
    image = Transform((4, 4), (0.0,) * 3, (1.0,) * 3)(read_image(path, levels=65535 if mode == "I" else None))
    assert image.shape == (3, 4, 4)
    torch.testing.assert_close(image[:, :, 0], torch.zeros(3, 4), atol=0.02, rtol=0)
    torch.testing.assert_close(image[:, :, 3], torch.ones(3, 4), atol=0.02, rtol=0)


def write_tiff(path: Path, values: np.ndarray, inverted: bool = False) -> Path:
    """Writes an array of any type as TIFF, from black to white or `inverted`, in the byte order of its type."""
    order = ">" if values.dtype.byteorder == ">" else "<"
    height, width = values.shape
    form = {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    data = values.tobytes()
    tags = [(256, 3, width), (257, 3, height), (258, 3, 8 * values.itemsize), (259, 3, 1), (262, 3, int(not inverted))]
    tags += [(273, 4, 8), (277, 3, 1), (278, 3, height), (279, 4, len(data)), (339, 3, form)]
    entries = (
        struct.pack(f"{order}HHI", tag, kind, 1)
        + struct.pack(f"{order}HH" if kind == 3 else f"{order}I", value, *[0] * (kind == 3))
        for tag, kind, value in tags
    )
    table = struct.pack(f"{order}H", len(tags)) + b"".join(entries) + struct.pack(f"{order}I", 0)
    head = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HI", 42, 8 + len(data))
    path.write_bytes(head + data + table)
    return path


RAMP = np.linspace(0, 1, 64 * 64).reshape(64, 64)
DEPTHS = {  # type → largest value, whether 0 is white, and --levels
    "<u2": (65535, False, None),
    ">u2": (65535, False, None),
    "<u2 inverted": (65535, True, None),
    "<u2 of 12 bits": (4095, False, 4095),
    "<u2 of 12 bits, inverted": (4095, True, 4095),
    "<u2 dark": (4095, False, None),
    "<i2": (1000, False, 1000),
    ">i2": (32767, False, 32767),
    "<u4": (2**32 - 1, False, 2**32 - 1),
    "<i4": (2**31 - 1, False, 2**31 - 1),
    "|i1": (127, False, 127),
    "<f4": (1, False, None),
    ">f4": (1, False, None),
    "<f4 inverted": (1, True, None),
    "<f4 dark": (0.25, False, None),
    "<f4 of 255": (255, False, 255),
}


@pytest.mark.parametrize("kind", DEPTHS)
def test_deep_pixels_have_one_range(kind: str, tmp_path: Path):
    """Oracle: the values over that of white, times 255, rounded; an image is never stretched to its own range."""
    top, inverted, levels = DEPTHS[kind]
    dtype = np.dtype(kind.split()[0])
    values = (RAMP * top).astype(dtype)
    white = levels or {"u": 65535, "f": 1}[dtype.kind]
    share = values.astype(np.float64) / white
    wanted = (255 * (1 - share if inverted else share)).round()
    path = write_tiff(tmp_path / "a.tif", values, inverted)
    found = np.asarray(read_image(path, levels=levels)).astype(int)
    assert np.array_equal(found, wanted) and len(np.unique(found)) == len(np.unique(wanted)) >= 17
    assert find_defect(path, decode=True) is None or levels


REFUSED = {  # values, --levels, words
    "signed": (np.int16([[0, 5]]), None, "16-bit integers with a sign from 0 to 5, which have no usual range"),
    "signed bytes": (np.int8([[0, 5]]), None, "8-bit integers with a sign from 0 to 5"),
    "negative": (np.int16([[-9, 5]]), 100, "from -9 to 5, which are read in 0 … 100; convert negative values"),
    "32 bits": (np.uint32([[0, 4e9]]), None, "32-bit integers from 0 to 4000000000, which have no usual range"),
    "negative floats": (np.float32([[-1, 1]]), None, "floats from -1 to 1, which are read in 0 … 1; convert negative"),
    "large floats": (np.float32([[0, 255]]), None, "floats from 0 to 255, .* pass --levels"),
    "beyond levels": (np.uint16([[0, 5000]]), 4095, "from 0 to 5000, which are read in 0 … 4095; pass --levels"),
    "NaN": (np.float32([[0, np.nan]]), None, "damaged image: it has values that are not finite"),
    "infinity": (np.float32([[0, np.inf]]), 9, "damaged image: it has values that are not finite"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_pixels_without_a_range_are_refused(kind: str, tmp_path: Path):
    """Oracle: the values and the way out in one sentence."""
    values, levels, words = REFUSED[kind]
    with pytest.raises(ValueError, match=words):
        read_image(write_tiff(tmp_path / "a.tif", values), levels=levels)


def test_levels_are_of_images_that_do_not_state_their_own(tmp_path: Path):
    """Oracle: a PGM states its white, and 8 bits have one; of 16-bit colours Pillow keeps the upper 8 bits only."""
    (tmp_path / "a.pgm").write_bytes(b"P5 2 1 1000\n" + np.array([500, 1000], ">u2").tobytes())
    Image.fromarray(np.uint8([[128, 255]])).save(tmp_path / "b.png")
    for name in ("a.pgm", "b.png"):
        for levels in (None, 4095):
            assert np.asarray(read_image(tmp_path / name, levels=levels)).tolist() == [[128, 255]]
    Image.fromarray(np.uint16([[2048, 4095]])).save(tmp_path / "c.png")
    assert np.asarray(read_image(tmp_path / "c.png", levels=4095)).tolist() == [[128, 255]]
    colours = np.array([[0, 32768, 65535]], ">u2").tobytes()
    chunk = [
        (b"IHDR", struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"\0" + colours)),
        (b"IEND", b""),
    ]
    parts = (struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunk)
    (tmp_path / "d.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    assert read_image(tmp_path / "d.png").getpixel((0, 0)) == (0, 128, 255)
    with pytest.raises(ValueError, match=r"16-bit colours, which are read in 0 … 65535 only; --levels is 4095"):
        read_image(tmp_path / "d.png", levels=4095)


def test_levels_are_kept_with_the_transform(folder: Path, capsys):
    """Oracle: white of 12 bits in training and test images; data without such pixels refuse it."""
    for path in folder.rglob("*.*g"):
        path.unlink()
        write_tiff(path.with_suffix(".tif"), np.full((16, 16), 4095, np.uint16))
    data = load(str(folder), RECIPE, levels=4095)
    restored = [data.transform.restore(images) for images, _ in data.test]
    assert data.transform.levels == 4095 and all((images == 1).all() for images in restored)
    with pytest.raises(ValueError, match="leave --levels out"):
        load("digits", DIGITS, levels=4095)
    assert "--levels is 0; use a number above 0" in refused(capsys, "train", "--levels", "0", "--out", folder / "run")


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
        with one_sentence() as caught:
            scan_folder(root, split, classes)
        assert str(root) in str(caught.value)
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


def picture(path: Path, form: str = "PNG") -> None:
    """Writes a small image, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (4, 4)).save(path, format=form)


@pytest.mark.parametrize("train", ["train", "Train", "TRAINING"])
@pytest.mark.parametrize("test", ["val", "Valid", "validation", "TEST", "Testing"])
def test_splits_have_several_names(train: str, test: str, tmp_path: Path):
    """Oracle: the classes in the folders of both splits, which are never classes themselves."""
    for split, count in ((train, 2), (test, 1)):
        for name in ("cat", "dog"):
            for i in range(count):
                picture(tmp_path / split / name / f"{i}.png")
    data = load(str(tmp_path), RECIPE)
    assert data.classes == ("cat", "dog") and len(data.train.files) == 4 and len(data.test.files) == 2
    with pytest.raises(ValueError, match="has test images of its own; leave --val-split out"):
        load(str(tmp_path), RECIPE, split=Split(0.5, 0))


def test_of_validation_and_test_images_the_first_are_read(tmp_path: Path):
    """Oracle: those of valid/; the folder test/ is counted as left out; two names for one split are refused."""
    for split in ("train", "valid", "test"):
        picture(tmp_path / split / "cat" / f"{split}.png")
        picture(tmp_path / split / "dog" / f"{split}.png")
    assert {path.name for path in load(str(tmp_path), RECIPE).test.files} == {"valid.png"}
    (found,) = scan_folder(tmp_path, "train").findings
    assert found.reason == "folders beside those of the splits" and found.first == str(tmp_path / "test")
    picture(tmp_path / "Val" / "cat" / "a.png")
    with pytest.raises(ValueError, match=r"has Val, valid for one split; merge them, or move one away"):
        load(str(tmp_path), RECIPE)


def test_test_images_without_classes_are_no_test_split(tmp_path: Path):
    """Oracle: the sentence with both ways out, and that --val-split divides the others."""
    for name in ("cat", "dog"):
        for i in range(2):
            picture(tmp_path / "train" / name / f"{i}.png")
        picture(tmp_path / "test" / f"{name}.png")
    found = "test' holds no class folders, and 2 images lie directly in it; put images into test/<class>/"
    with pytest.raises(ValueError, match=rf"{found}, .*--val-split"):
        load(str(tmp_path), RECIPE)
    data = load(str(tmp_path), RECIPE, split=Split(0.5, 0))
    assert len(data.train.files) == len(data.test.files) == 2


@pytest.mark.parametrize("names", [("Train", "Val"), ("car", "train"), ("cat", "dog", "Test")])
def test_names_of_splits_are_no_classes(names: tuple[str, ...], tmp_path: Path):
    """Oracle: the sentence names the folder and a way out."""
    for name in names:
        for i in range(4):
            picture(tmp_path / name / f"{i}.png")
    with pytest.raises(
        ValueError, match=rf"has .*{names[-1]} among its folders, .* {names[-1]}/<class>/|Train/<class>"
    ):
        load(str(tmp_path), RECIPE, split=Split(0.5, 0))


@pytest.mark.parametrize("inner", ["train/{}", "{}/train"])
def test_a_data_set_is_no_class(inner: str, tmp_path: Path):
    """Oracle: a folder above the data set, or with the splits of each class inside it, is refused."""
    for split in ("train", "Test"):
        for name in ("cat", "dog"):
            picture(tmp_path / "photos" / inner.replace("train", split).format(name) / "a.png")
    root = tmp_path / "photos" if inner[0] == "{" else tmp_path
    with pytest.raises(ValueError, match="holds train and test images, the latter in Test/, which would be one class"):
        load(str(root), RECIPE, split=Split(0.5, 0))


def test_contents_decide_what_is_an_image(tmp_path: Path):
    """Oracle: the files by hand; what is left out is counted by suffix, with the first."""
    cat = tmp_path / "cat"
    kinds = {"a.jfif": "JPEG", "b.JPE": "JPEG", "c": "PNG", "d.png.part": "WEBP", "e.jpg": "GIF", "f.dat": "TIFF"}
    for name, form in kinds.items():
        picture(cat / name, form)
    for name in ("x.heic", "y.heic", "notes.txt", "P5", "BMW"):
        (cat / name).write_text(f"{name} is no image")
    (cat / "z.txt").touch()
    (cat / ".hidden.png").touch()
    picture(tmp_path / "outside.jfif", "JPEG")
    found = scan_folder(tmp_path, "")
    assert [path.name for path in found.files] == sorted(kinds)
    assert {row.reason: (row.count, Path(row.first).name) for row in found.findings} == {
        "no images: .heic": (2, "x.heic"),
        "no images: .txt": (2, "notes.txt"),
        "no images: without suffix": (2, "BMW"),
        "hidden": (1, ".hidden.png"),
        "outside the folders of classes": (1, "outside.jfif"),
    }


@pytest.mark.parametrize(
    "name",
    ["@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information", "__macosx", ".Trash-1000", "@SynoResource"],
)
def test_folders_of_systems_are_left_out_and_counted(name: str, tmp_path: Path):
    """Oracle: two images, and the number of files in the folders of the system, above and inside a class."""
    picture(tmp_path / "cat" / "a.png")
    picture(tmp_path / "dog" / "a.png")
    picture(tmp_path / name / "b.png")
    picture(tmp_path / "cat" / name / "deep" / "c.png")
    found = scan_folder(tmp_path, "")
    assert found.classes == ("cat", "dog") and len(found.files) == 2
    assert [(row.reason, row.count) for row in found.findings] == [("in hidden or system folders", 2)]


@pytest.mark.skipif(not hasattr(os, "symlink") or os.name == "nt", reason="needs links")
def test_links_are_followed_once(tmp_path: Path):
    """Oracle: each image once: through a class that is a link, a folder that is one, and loops in two ways."""
    root, store = tmp_path / "data", tmp_path / "store"
    picture(root / "cat" / "a.png")
    picture(root / "cat" / "deep" / "b.png")
    picture(store / "c.png")
    picture(store / "more" / "d.png")
    (root / "dog").symlink_to(store)
    (root / "cat" / "all").symlink_to(root / "cat")
    (root / "cat" / "aaa").symlink_to(root / "cat" / "deep")
    (store / "up").symlink_to(root)
    (root / "cat" / "gone").symlink_to(root / "nowhere")
    picture(tmp_path / "other" / "e.png")
    (root / "cat" / "linked").symlink_to(tmp_path / "other")
    found = scan_folder(root, "")
    assert found.classes == ("cat", "dog")
    names = [path.relative_to(root).as_posix() for path in found.files]
    assert names == ["cat/a.png", "cat/deep/b.png", "cat/linked/e.png", "dog/c.png", "dog/more/d.png"]
    rows = {row.reason: row.count for row in found.findings}
    assert rows["folders that a link reaches again"] == 3 and rows["no images: without suffix"] == 1


def test_class_names_are_compared_in_one_form(tmp_path: Path):
    """Oracle: "é" as one character, from folders that spell it with one and with two."""
    one, two = "caf\u00e9", "cafe\u0301"
    for place in (f"train/{one}", f"val/{two}", "train/tea", "val/tea"):
        picture(tmp_path / place / "a.png")
    data = load(str(tmp_path), RECIPE)
    assert data.classes == (one, "tea") and data.test.targets == [0, 1]
    picture(tmp_path / "train" / two / "b.png")
    assert scan_folder(tmp_path, "train").targets == [0, 0, 1]
    assert scan_folder(tmp_path, "val", (two, "tea")).targets == [0, 1]


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
