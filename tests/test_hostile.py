"""Damaged and hostile files: shards, images, weights. Each is refused in one sentence, at bounded time and memory."""

import dataclasses
import io
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import unicodedata
import warnings
import zipfile
import zlib
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest
import torch
from agreement import one_sentence
from commands import prints, refused
from PIL import EpsImagePlugin, Image
from safetensors.torch import save_file

from fastvit_triton import create_model, load_model, load_weights
from fastvit_triton.checkpoints import WeightsError, reading
from fastvit_triton.cli import build_parser, main
from fastvit_triton.cli.explain import _read_log
from fastvit_triton.models.weights import rebuild
from fastvit_triton.train.data import tar
from fastvit_triton.train.data.folder import list_images, scan_folder
from fastvit_triton.train.data.shards import pack, scan_shards
from fastvit_triton.train.data.transform import MAX_PIXELS, Transform, find_defect, read_image
from fastvit_triton.train.recipes import FOLDER, override_recipe
from fastvit_triton.train.sources import load, load_test

RECIPE = override_recipe(FOLDER, img_size=8, batch_size=4)


def encoded(size: tuple[int, int] = (5, 4), form: str = "PNG") -> bytes:
    stream = io.BytesIO()
    red = Image.new("RGB", size, "red")
    red.save(stream, form, **({"save_all": True, "append_images": [red]} if form == "MPO" else {}))
    return stream.getvalue()


PNG = encoded()


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def shard(root: Path, *members: tuple[str, bytes], form: int = tarfile.PAX_FORMAT) -> Path:
    """A data set of one training shard."""
    path = root / "train/0.tar"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as archive:
        for name, content in members:
            add(archive, name, content)
    return path


def header(name: str, size: bytes, kind: bytes = tarfile.REGTYPE) -> bytes:
    """A tar header whose field of the size is given, with a correct checksum."""
    block = bytearray(tarfile.TarInfo(name).tobuf())
    block[124:136], block[156:157], block[148:156] = size.rjust(11, b"0") + b"\0", kind, b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def refusal(root: Path) -> str:
    """The sentence with which the training shards of a folder are refused."""
    with one_sentence() as caught:
        scan_shards(root, "train")
    return str(caught.value)


# Shards


def test_every_cut_of_a_shard_is_noticed(tmp_path):
    """Oracle: the tar format, in which two blocks of zeros end an archive; the blocks after them are padding."""
    path = shard(
        tmp_path, *((f"{i}.{kind}", PNG if kind == "png" else b"0") for i in range(3) for kind in ("png", "cls"))
    )
    whole = path.read_bytes()
    end = len(whole.rstrip(b"\0")) // 512 * 512 + 512
    for cut in range(0, end + 1024, 512):
        path.write_bytes(whole[:cut])
        assert f"{path} is damaged or not a plain tar file: it is cut short" in refusal(tmp_path), cut
    for cut in range(end + 1024, len(whole) + 1, 512):
        path.write_bytes(whole[:cut])
        assert len(scan_shards(tmp_path, "train").files) == 3


def test_endless_padding(tmp_path):
    """Oracle: refused at once; reading 2^40 zeros of a sparse file, which takes no room, would take minutes."""
    path = shard(tmp_path, ("0.png", PNG), ("0.cls", b"0"))
    os.truncate(path, 2**40)
    assert "bytes follow its end, more than 67,108,864" in refusal(tmp_path)


def test_a_damaged_header_does_not_end_a_shard(tmp_path):
    """Oracle: tarfile's offsets; each header in turn is zeroed, and one of its bits flipped."""
    path = shard(
        tmp_path, *((f"{i}.{kind}", PNG if kind == "png" else b"0") for i in range(3) for kind in ("png", "cls"))
    )
    whole = path.read_bytes()
    with tarfile.open(path) as archive:
        starts = [member.offset for member in archive]
    assert len(starts) == 6
    for start in starts:
        path.write_bytes(whole[:start] + bytes(512) + whole[start + 512 :])
        assert f"data follows its end at byte {start:,}" in refusal(tmp_path)
        path.write_bytes(whole[: start + 3] + bytes([whole[start + 3] ^ 1]) + whole[start + 4 :])
        assert f"byte {start:,} is no header: bad checksum" in refusal(tmp_path)


LONG = "folder/" * 30 + "ünïcode " * 12


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_those_of_tarfile(form, tmp_path):
    """Oracle: Python's tarfile, for short names and, where the format has them, for long ones; links are no files."""
    long = LONG if form != tarfile.USTAR_FORMAT else "a" * 80 + "/" + "b" * 90
    path = shard(tmp_path, ("x.png", PNG), (f"{long}.png", PNG), (f"{long}.cls", b"1"), ("empty", b""), form=form)
    with tarfile.open(path, "a", format=form) as archive:
        for kind in (tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE):
            entry = tarfile.TarInfo(f"{kind!r}")
            entry.type, entry.linkname = kind, "elsewhere"
            archive.addfile(entry)
        add(archive, "y.png", PNG)
    with tarfile.open(path) as archive:
        theirs = [(member.name, member.offset_data, member.size) for member in archive if member.isreg()]
    assert list(map(tuple, tar.read_members(path))) == theirs and len(theirs) == 5


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs tar")
@pytest.mark.parametrize("form", ["gnu", "pax", "ustar", "v7"])
def test_members_of_the_tar_command(form, tmp_path):
    """Oracle: the files that were archived; the command writes the end marker too."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x.png").write_bytes(PNG)
    (tmp_path / "a/x.cls").write_bytes(b"2\n")
    (tmp_path / "train").mkdir()
    subprocess.run(["tar", f"--format={form}", "-cf", "train/0.tar", "a"], cwd=tmp_path, check=True)
    found = scan_shards(tmp_path, "train")
    assert [path.name for path in found.files] == ["a_x.png"] and found.targets == [2]
    assert found.decode(found.files[0]).size == (5, 4)


HOSTILE_HEADERS = {
    "negative": (header("x.png", b"-0000001000"), "'x.png' has a negative size, -512"),
    "negative_pax": (header("h", b"13", b"x") + b"11 size=-5\n".ljust(512, b"\0"), "a size that is no number"),
    "huge": (header("x.png", b"77777777777"), "cut short: 'x.png' has 8,589,934,591 bytes"),
    "huge_pax": (header("h", b"77777777777", b"x"), "cut short: 'h' has 8,589,934,591 bytes"),
    "huge_name": (header("h", b"77777777777", b"L"), "cut short: 'h' has 8,589,934,591 bytes"),
    "long_pax": (header("h", b"40001", b"x") + bytes(17000), "extended header 'h' has 16,385 bytes, more than 16,384"),
    "damaged_pax": (header("h", b"5", b"x") + b"9 a=b".ljust(512, b"\0"), "an extended header is damaged"),
    "sparse": (header("x.png", b"0", b"S"), "'x.png' is sparse"),
}


@pytest.mark.parametrize("kind", HOSTILE_HEADERS)
def test_hostile_headers(kind, tmp_path):
    """Oracle: the sentence; Python 3.11's tarfile reads the negative size without end."""
    content, words = HOSTILE_HEADERS[kind]
    path = shard(tmp_path, ("0.png", PNG), ("0.cls", b"0"))
    path.write_bytes(path.read_bytes()[: 4 * 512] + content + bytes(20480))
    assert words in refusal(tmp_path)


def test_chained_headers_take_no_memory(tmp_path):
    """Oracle: peak memory of this process; 20,000 chained headers, which tarfile follows by recursion."""
    path = shard(tmp_path, ("0.png", PNG), ("0.cls", b"0"))
    block = header("h", b"3", b"L") + b"abc".ljust(512, b"\0")
    path.write_bytes(block * 20_000 + path.read_bytes())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    members = list(tar.read_members(path))
    assert [member.name for member in members] == ["abc", "0.cls"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 * 1024  # KiB; the file has 20 MiB


def test_numbers_beyond_the_limits(tmp_path, monkeypatch):
    """Oracle: the sentence; the limits themselves are accepted."""
    for text in (b"1000000", b"99999999999", b"-1", b"", b"1_0", b"0" * 21, b"1" * 5000, "\u0661".encode()):
        shard(tmp_path, ("a/0.png", PNG), ("a/0.cls", text))
        assert "in a/0.cls; expected a class number below 1,000,000" in refusal(tmp_path)
    shard(tmp_path, ("0.png", PNG), ("0.cls", b" 000000000000999999\n"))
    found = scan_shards(tmp_path, "train")
    assert found.targets == [999_999] and len(found.classes) == 1_000_000
    monkeypatch.setattr(tar, "MAX_MEMBERS", 2)
    assert scan_shards(tmp_path, "train").targets == [999_999]
    monkeypatch.setattr(tar, "MAX_MEMBERS", 1)
    assert "it has more than 1 members" in refusal(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "folder", "nothing"])
def test_shards_that_are_no_files(kind, tmp_path):
    """Oracle: the sentence; opening a named pipe would wait for ever."""
    path = shard(tmp_path, ("0.png", PNG), ("0.cls", b"0")).with_name("1.tar")
    {"pipe": os.mkfifo, "folder": os.mkdir, "nothing": lambda path: os.symlink("nowhere", path)}[kind](path)
    assert f"{path} is not a regular file; remove it" in refusal(tmp_path)


def test_missing_class_numbers_name_the_member(tmp_path):
    """Oracle: the exact names, from the shard's whole path on."""
    for name, label in (("x.png", "x.cls"), ("a/b.c/x.y.png", None), ("/x.png", "/x.cls"), (".png", ".cls")):
        path = shard(tmp_path, ("w.png", PNG), ("w.cls", b"0"), (name, PNG))
        if label is None:
            assert len(scan_shards(tmp_path, "train").files) == 1  # by the first dot, as webdataset splits names
        else:
            assert refusal(tmp_path) == f"{path} has {name} without a class number; add {label}"


@pytest.mark.parametrize(
    "text",
    [b"one\ntwo\n", b"one\ntwo", b"one\r\ntwo\r\n", b"\xef\xbb\xbfone\r\ntwo"],
    ids=["unix", "no_end", "dos", "bom"],
)
def test_class_names(text, tmp_path):
    """Oracle: two names, however lines end."""
    shard(tmp_path, ("x.png", PNG), ("x.cls", b"1"))
    (tmp_path / "classes.txt").write_bytes(text)
    assert scan_shards(tmp_path, "train").classes == ("one", "two")


def test_class_names_that_are_no_text(tmp_path):
    """Oracle: the sentence names the file."""
    shard(tmp_path, ("x.png", PNG), ("x.cls", b"1"))
    (tmp_path / "classes.txt").write_bytes(b"one\n\xff\n")
    assert refusal(tmp_path).startswith(f"{tmp_path / 'classes.txt'} is not UTF-8 text: ")
    (tmp_path / "classes.txt").write_bytes(b"")
    assert "class number 1, but only 0 class names" in refusal(tmp_path)


@pytest.fixture
def packed(tmp_path) -> Path:
    for split in ("train", "val"):
        for i in range(6):
            place = tmp_path / "folder" / split / f"class {i % 2}"
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{i}.png").write_bytes(PNG)
    pack(tmp_path / "folder", tmp_path / "packed", per_shard=2)
    return tmp_path / "packed"


def test_pack_writes_an_index(packed):
    """Oracle: the files themselves, and webdataset's end marker is one that we accept."""
    index = json.loads((packed / "index.json").read_text())
    assert sorted(index) == sorted(str(path.relative_to(packed)) for path in packed.rglob("*.tar")) and len(index) == 6
    assert all(row == {"bytes": (packed / name).stat().st_size, "images": 2} for name, row in index.items())
    assert len(scan_shards(packed, "train").files) == 6
    (packed / "index.json").unlink()
    assert len(scan_shards(packed, "train").files) == 6


def test_shards_are_those_of_the_index(packed):
    """Oracle: one sentence that names the shard and says what to do; the other split does not matter."""
    first = packed / "train/000000.tar"
    whole = first.read_bytes()

    first.rename(packed / "away")
    assert "lists train/000000.tar, which" in refusal(packed) and "copy what is missing" in refusal(packed)
    assert len(scan_shards(packed, "val").files) == 6
    (packed / "away").rename(first)

    shutil.copy(first, packed / "train/more.tar")
    assert "does not list train/more.tar; remove what is not part of the data" in refusal(packed)
    (packed / "train/more.tar").unlink()

    first.write_bytes(whole + bytes(512))
    assert f"{first} has {len(whole) + 512:,} bytes, but {len(whole):,} by" in refusal(packed)
    with tarfile.open(first, "w") as archive:
        add(archive, "0.png", PNG)
        add(archive, "0.cls", b"0")
    first.write_bytes(first.read_bytes().ljust(len(whole), b"\0"))
    assert f"{first} has 1 images, but 2 by index.json; copy it again" == refusal(packed)
    first.write_bytes(whole)
    assert scan_shards(packed, "train").classes == ("class 0", "class 1")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[1]",
        b'{"train/000000.tar": 3}',
        b'{"train/0.tar": {}}',
        b'{"train/0.tar": {"bytes": "9", "images": 2}}',
        b"\xff",
        b"[" * 10**5,
    ],
)
def test_damaged_indices(text, packed):
    """Oracle: the sentence names the file and what to do."""
    (packed / "index.json").write_bytes(text)
    assert f"{packed / 'index.json'} is damaged: " in refusal(packed) and "delete it to use" in refusal(packed)


def test_a_shard_with_something_else_for_an_image(tmp_path):
    """Oracle: the reason is in words; no address of an object in memory."""
    for split in ("train", "val"):
        path = shard(tmp_path, ("0.png", PNG), ("0.cls", b"0"), ("1.png", b"no image at all"), ("1.cls", b"1"))
        path.parent.rename(tmp_path / f".{split}")
    for split in ("train", "val"):
        (tmp_path / f".{split}").rename(tmp_path / split)
    data = load(str(tmp_path), RECIPE)
    with pytest.raises(ValueError, match=r"1 of 2 images in .*1\.png \(not an image\); repair"):
        list(data.test)


# Images


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(touch /tmp/x) system\n%%EOF\n"


def test_postscript_never_runs(tmp_path, monkeypatch):
    """Oracle: Ghostscript is not called; `Image.open` calls it for this file, whatever its suffix."""
    path = tmp_path / "x.jpg"
    path.write_bytes(EPS)
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_: pytest.fail("Ghostscript was called"))
    with pytest.raises(pytest.fail.Exception, match="was called"), Image.open(path) as image:
        image.load()
    assert find_defect(path) == find_defect(path, decode=True) == "not an image"
    with pytest.raises(Image.UnidentifiedImageError, match=r"^not an image$"):
        read_image(io.BytesIO(EPS))


@pytest.mark.parametrize("form", ["BMP", "GIF", "JPEG", "MPO", "PNG", "PPM", "TIFF", "WEBP"])
def test_formats_are_told_by_their_content(form, tmp_path):
    """Oracle: red, up to the loss of JPEG and WEBP, under the suffix of another format; other formats are no images."""
    path = tmp_path / "x.bmp"
    path.write_bytes(encoded(form=form))
    assert find_defect(path) is None
    red, green, blue = read_image(path).convert("RGB").getpixel((2, 2))
    assert red > 245 and green < 10 and blue < 10
    for other in ("ICO", "JPEG2000", "TGA", "SGI"):
        path.write_bytes(encoded((16, 16), other))
        assert find_defect(path) == find_defect(path, decode=True) == "not an image"


def png_header(width: int, height: int) -> bytes:
    """A PNG of this size whose pixels are missing."""
    whole = bytearray(PNG)
    whole[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    whole[29:33] = zlib.crc32(whole[12:29]).to_bytes(4, "big")
    return bytes(whole)


def gif_frame(side: int) -> bytes:
    """A GIF of 1 x 1 pixels whose first frame is larger."""
    whole = bytearray(encoded((1, 1), "GIF"))
    start = whole.index(b",", 13 + 3 * 2 ** ((whole[10] & 7) + 1)) + 5
    whole[start : start + 4] = side.to_bytes(2, "little") * 2
    return bytes(whole)


def webp_header(side: int) -> bytes:
    """A WEBP with a canvas of this size."""
    canvas = (side - 1).to_bytes(3, "little") * 2
    body = b"WEBPVP8X" + (10).to_bytes(4, "little") + bytes(4) + canvas
    return b"RIFF" + len(body).to_bytes(4, "little") + body


LARGE = {
    "png": (png_header(13_000, 13_000), 169_000_000),
    "png beyond Pillow's error": (png_header(10**5, 10**5), 10**10),
    "gif frame": (gif_frame(9_600), 9_600**2),
    "gif frame beyond Pillow's error": (gif_frame(65_535), 65_535**2),
    "webp beyond Pillow's error": (webp_header(16_000), 16_000**2),
}


@pytest.mark.parametrize("kind", LARGE)
def test_large_images_are_not_decoded(kind, tmp_path):
    """Oracle: the size in the header, such as 13,000² = 169 million pixels; no warning of Pillow's."""
    content, pixels = LARGE[kind]
    path = tmp_path / "x.png"
    path.write_bytes(content)
    words = f"has {pixels:,} pixels, more than --max-pixels 67,108,864"
    assert MAX_PIXELS == 67_108_864
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("error")
        assert find_defect(path) == find_defect(path, decode=True) == words
    assert caught == []


def test_the_limit_is_exact(tmp_path):
    """Oracle: 5 x 4 pixels; shards and folders obey the same number."""
    path = tmp_path / "x.png"
    path.write_bytes(PNG)
    assert read_image(path, 20).size == (5, 4) and find_defect(path, True, 20) is None
    assert find_defect(path, True, 19) == find_defect(path, False, 19) == "has 20 pixels, more than --max-pixels 19"
    for split in ("train", "val"):
        for name in ("a", "b"):
            (tmp_path / "folder" / split / name).mkdir(parents=True)
            (tmp_path / "folder" / split / name / "x.png").write_bytes(PNG)
    pack(tmp_path / "folder", tmp_path / "shards")
    for root, count in ((tmp_path / "folder", 4), (tmp_path / "shards", 2)):  # headers in shards are not read before
        assert len(list(load(str(root), RECIPE, max_pixels=20).train)) == 1
        refused = rf"{count} of {count} images in .*\(has 20 pixels, more than --max-pixels 19\)"
        with pytest.raises(ValueError, match=refused):
            list(load(str(root), RECIPE, max_pixels=19).train)
        with pytest.raises(ValueError, match=r"2 of 2 images in .*\(has 20 pixels, more than --max-pixels 19\)"):
            list(load_test(str(root), ("a", "b"), Transform((8, 8), (0.5,), (1.0,)), 4, max_pixels=19))
    with pytest.raises(ValueError, match="max_pixels is 0; use an integer of at least 1"):
        load(str(tmp_path / "folder"), RECIPE, max_pixels=0)


@pytest.mark.parametrize("form", ["PNG", "TIFF", "WEBP", "GIF"])
def test_a_limit_above_pillows(form, tmp_path, monkeypatch):
    """Oracle: the pixel in the corner; Pillow's own limit is lowered to a twentieth, as if the image were larger."""
    path = tmp_path / "x.png"
    path.write_bytes(encoded((60, 50), form))
    for module in ("PIL.Image", "fastvit_triton.train.data.transform"):
        monkeypatch.setattr(f"{module}.{'MAX_IMAGE_PIXELS' if 'PIL' in module else 'MAX_PIXELS'}", 150)
    assert find_defect(path, True, 2999) == "has 3,000 pixels, more than --max-pixels 2,999"
    assert find_defect(path, True, 3000) is None and read_image(path, 3000).size == (60, 50)


def test_the_usual_limit_leaves_pillows_alone(tmp_path, monkeypatch):
    """Oracle: the module's constant, as Pillow or the user set it."""
    (tmp_path / "x.png").write_bytes(PNG)
    for limit in (Image.MAX_IMAGE_PIXELS, 10**6, None):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        read_image(tmp_path / "x.png")
        assert Image.MAX_IMAGE_PIXELS == limit


def test_commands_take_the_limit(tmp_path, capsys):
    """Oracle: the constant of the library is the default of each command that reads image files."""
    parser, weights = build_parser(), str(tmp_path / "x.safetensors")
    Path(weights).touch()
    words = {
        "train": ["train"],
        "evaluate": ["evaluate", "--checkpoint", weights],
        "predict": ["predict", "--checkpoint", weights, "y"],
        "explain": ["explain", "--checkpoint", weights, "y"],
    }
    for command in words.values():
        assert parser.parse_args(command).max_pixels == MAX_PIXELS
        assert parser.parse_args([*command, "--max-pixels", "7"]).max_pixels == 7
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        (tmp_path / split / "a/x.png").write_bytes(PNG)
    assert main(["train", "--data", str(tmp_path), "--out", str(tmp_path / "out"), "--max-pixels", "19"]) == 2
    why = "(has 20 pixels, more than --max-pixels 19)"
    assert f": train/a/x.png {why}, val/a/x.png {why}; repair or remove them" in capsys.readouterr().err


def test_folders_that_cannot_be_read(tmp_path, monkeypatch):
    """Oracle: the operating system's reason and the folder's name; `rglob` would list the rest without a word."""
    for name in ("a", "b/locked", "b/.hidden", "c.png"):
        (tmp_path / "train" / name).mkdir(parents=True)
        (tmp_path / "train" / name / "x.png").write_bytes(PNG)
    (tmp_path / "train/b/y.PNG").write_bytes(PNG)
    found = scan_folder(tmp_path, "train")
    assert found.classes == ("a", "b", "c.png")
    assert [str(path.relative_to(tmp_path / "train")) for path in found.files] == [
        *("a/x.png", "b/locked/x.png", "b/y.PNG", "c.png/x.png")
    ]
    scandir = os.scandir

    def refuse(path):
        if Path(path).name == locked:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    for folder in ("train", "train/a", "train/b/locked"):
        locked = Path(folder).name
        with pytest.raises(ValueError, match=f"{tmp_path / folder}' cannot be read: Permission denied$"):
            scan_folder(tmp_path, "train")
    with pytest.raises(ValueError, match="Permission denied"):
        list_images(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_images_that_are_no_files(kind, tmp_path):
    """Oracle: the reason; opening a named pipe would wait for ever, and a device may have no end."""
    path = tmp_path / "x.png"
    {"pipe": os.mkfifo, "device": lambda path: os.symlink("/dev/zero", path), "folder": os.mkdir}[kind](path)
    assert find_defect(path) == find_defect(path, decode=True) == "not a regular file"


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, about tags that it skips
def test_damaged_images_raise_what_is_caught(tmp_path):
    """Oracle: each of 400 damaged files is decoded or has a defect in words; nothing else is raised."""
    generator = torch.Generator().manual_seed(0)
    path = tmp_path / "x"
    for form in ("BMP", "GIF", "JPEG", "MPO", "PNG", "PPM", "TIFF", "WEBP"):
        whole = encoded((40, 30), form)
        for _ in range(50):
            place, bit, cut = (int(torch.randint(n, (), generator=generator)) for n in (len(whole), 8, len(whole)))
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            path.write_bytes(bytes(damaged[: cut + 1] if bit == 0 else damaged))
            assert find_defect(path, decode=True) != ""


# Weights


SMALL = dict(img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=3)


@pytest.fixture(scope="module")
def small() -> torch.nn.Module:
    return create_model("vit_tiny_patch16_224", **SMALL)


def rewrite(model: torch.nn.Module, path: Path, tensors: dict | None = None, training: str = "", **config) -> Path:
    """A file of `save_weights` without checksum, with another config, other tensors, or an entry of training."""
    state = {**model.state_dict(), **(tensors or {})}
    header = {"layout": "fastvit_triton", "variant": model.variant} | ({"training": training} if training else {})
    header["config"] = json.dumps({**dataclasses.asdict(model.config), **config})
    save_file({key: tensor.contiguous() for key, tensor in state.items() if tensor is not None}, path, header)
    return path


CONFIGS = {
    "depth": (10**6, "its config has depth 1,000,000, and the file 32 tensors"),
    "depth ": (3, "it lacks blocks.2.norm1.weight"),
    "embed_dim": (2**40, "overflow"),
    "num_classes": (10**18, "overflow"),
    "num_classes ": (4, r"head.weight is \[3, 16\]"),
    "num_classes  ": (0, "it has head.bias and 1 more"),
    "img_size": (2**30, r"pos_embed is \[1, 5, 16\]"),
    "img_size ": (10**400, "unpack|overflow|too large"),
    "img_size  ": ([16], "img_size is"),
    "img_size   ": ("16", "img_size is '16'"),
    "patch_size": (1, "pos_embed"),
    "mlp_ratio": (float("inf"), "mlp_ratio is inf"),
    "mlp_ratio ": (-1, "mlp_ratio is -1"),
    "mlp_ratio  ": (1e30, "Overflow when unpacking"),
    "mlp_ratio   ": (1e-9, "at least 1 hidden channel"),
    "reg_tokens": (-1, "reg_tokens is -1"),
    "reg_tokens ": (10**15, "reg_token"),
    "head_dim": (-4, "head_dim is -4"),
    "head_dim ": (0, "head_dim is 0"),
    "num_heads": (True, "num_heads is True"),
    "in_chans": ("3", "in_chans is '3'"),
    "eps": ("x", "eps is 'x'; its type is float"),
    "eps ": (-1.0, "eps is -1.0"),
    "eps  ": (None, "eps is None"),
    "class_token": (1, "class_token is 1; its type is bool"),
    "act": (["gelu"], "act is"),
    "drop_path_rate": (float("nan"), "drop_path_rate is nan"),
    "": (1, "no option ''"),
    "x" * 70_000: (1, "characters, over 65,536"),
}


@pytest.mark.parametrize("option", CONFIGS, ids=lambda option: option[:30] or "empty")
def test_configs_are_compared_with_the_tensors(option, small, tmp_path, monkeypatch):
    """Oracle: one sentence that names the option; a model is only built on a device if its tensors are there."""
    value, words = CONFIGS[option]
    path = rewrite(small, tmp_path / "x.safetensors", **{option.strip(): value})

    def build(name: str, **config) -> torch.nn.Module:
        assert torch.empty(0).is_meta, "memory was allocated"
        return create_model(name, **config)

    monkeypatch.setattr(rebuild, "create_model", build)
    with pytest.raises(WeightsError, match=words) as caught:
        load_model(path)
    assert str(caught.value).startswith(f"{path} holds a model that this version cannot build: ")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_tables_that_no_tensor_holds_are_limited(tmp_path):
    """Oracle: (2^15)² positions of 16 channels are 2^34 numbers, and no tensor of the file depends on them."""
    model = create_model("vit_tiny_patch16_224", **SMALL, pos_embed="sincos2d")
    assert "pos_embed" not in model.state_dict()
    path = rewrite(model, tmp_path / "x.safetensors", img_size=2**18)
    with pytest.raises(WeightsError, match=r"asks for 17,179,8\d\d,\d\d\d numbers, and the file holds 9,\d\d\d$"):
        load_model(path)
    assert load_model(rewrite(model, path))[0].config == model.config


@pytest.mark.parametrize("text", ["[1]", "3", "null", "{", "[" * 10**5, '{"depth": ' + "9" * 5000 + "}"])
def test_configs_that_are_none(text, small, tmp_path):
    """Oracle: the sentence."""
    path = tmp_path / "x.safetensors"
    save_file(small.state_dict(), path, {"variant": small.variant, "config": text})
    with pytest.raises(WeightsError, match="holds a model that this version cannot build"):
        load_model(path)


@pytest.mark.full
@pytest.mark.skipif(
    not entry_points(group="torch_dynamo_backends", name="fastvit_triton"),
    reason="a package that is not installed registers its backend when it is imported",
)
def test_loading_does_not_import_dynamo(small, tmp_path):
    """Oracle: the modules of a fresh interpreter; `normal_` on the meta device imports it, in 2 seconds."""
    path = rewrite(small, tmp_path / "x.safetensors")
    code = (
        "import sys, fastvit_triton; fastvit_triton.load_model(sys.argv[1]); assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, path], check=True)


def test_long_headers_and_many_tensors(small, tmp_path, monkeypatch):
    """Oracle: the limits, counted by hand; `verify=False` loads the file."""
    path = rewrite(small, tmp_path / "x.safetensors")
    length = int.from_bytes(path.read_bytes()[:8], "little")
    monkeypatch.setattr(reading, "MAX_HEADER", length)
    monkeypatch.setattr(reading, "MAX_KEYS", 33)  # with __metadata__
    load_model(path)
    monkeypatch.setattr(reading, "MAX_KEYS", 32)
    with pytest.raises(WeightsError, match=r"x.safetensors has 33 tensors, over 32; verify=False loads it$"):
        load_model(path)
    monkeypatch.setattr(reading, "MAX_HEADER", length - 1)
    with pytest.raises(
        WeightsError, match=f"has a header of {length:,} bytes, over {length - 1:,}; verify=False loads it$"
    ):
        load_model(path)
    load_model(path, verify=False)
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(WeightsError, match=r"is damaged, cut short or no \.safetensors file"):
        load_model(path)


@pytest.mark.parametrize("suffix", ["npz", "pt"])
def test_archives_that_expand(suffix, small, tmp_path, monkeypatch):
    """Oracle: 40 MB of zeros, compressed about a thousandfold; what is small or incompressible is loaded."""
    path = tmp_path / f"x.{suffix}"
    state = {**small.state_dict(), "zeros": torch.zeros(10**7)}
    if suffix == "npz":
        np.savez_compressed(path, **{key: tensor.numpy() for key, tensor in state.items()})
    else:
        stored = io.BytesIO()
        torch.save(state, stored)
        with zipfile.ZipFile(stored) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
            for name in source.namelist():
                target.writestr(name, source.read(name))
    assert len(reading.read(path, True)[0]) == 33  # less than 256 MiB
    monkeypatch.setattr(reading, "SMALL", 2**20)
    with pytest.raises(WeightsError, match=rf"x.{suffix} expands from 0 MB to 40 MB; verify=False loads it$"):
        reading.read(path, True)
    assert len(reading.read(path, False)[0]) == 33
    monkeypatch.setattr(reading, "MAX_EXPANSION", 10**4)
    assert len(reading.read(path, True)[0]) == 33


def test_tensors_of_few_bytes_and_many_values(small):
    """Oracle: the sentence; concatenating q, k and v would allocate what they pretend to hold."""
    state = dict(small.state_dict())
    for part in "qkv":
        state[f"blocks.0.attn.{part}.weight"] = torch.zeros(1, 1).expand(2**20, 2**20)
    with pytest.raises(WeightsError, match=r"blocks\.0\.attn\.q\.weight repeats its values"):
        load_weights(small, state)
    empty = {"embedding/kernel": torch.zeros(8, 8, 3, 16), "Transformer/encoderblock/x": torch.zeros(10**12, 0)}
    with pytest.raises(WeightsError, match="lacks"):
        load_weights(small, empty)


TRAINING = {
    "list": ([1], "training is [1]"),
    "text": ("x", "training is 'x'"),
    "classes": ({"classes": [1, 2, 3]}, "classes is [1, 2, 3]"),
    "classes_text": ({"classes": "abc"}, "classes is 'abc'"),
    "too few classes": ({"classes": ["a", "b"]}, "it names 2 classes, and the head has 3"),
    "data": ({"data": 3}, "data is 3"),
    "batch": ({"batch_size": 0}, "batch_size is 0"),
    "batch_text": ({"batch_size": "4"}, "batch_size is '4'"),
    "skip": ({"skip_bad_images": 1}, "skip_bad_images is 1"),
    "transform": ({"transform": [1]}, "transform is [1]"),
    "transform_option": ({"transform": {"x": 1}}, "unexpected keyword argument 'x'"),
    "transform_missing": ({"transform": {}}, "missing 3 required"),
    "size": ({"transform": dict(size=[10**6, 10**6], mean=[0.5] * 3, std=[1.0] * 3)}, "size is [1000000, 1000000]"),
    "other size": ({"transform": dict(size=[8, 8], mean=[0.5] * 3, std=[1.0] * 3)}, "its images have size (8, 8)"),
    "channels": (
        {"transform": dict(size=[16, 16], mean=[0.5], std=[1.0])},
        "and 1 channels, the model's (16, 16) and 3",
    ),
    "std": ({"transform": dict(size=[16, 16], mean=[0.5] * 3, std=[0.0] * 3)}, "std is [0.0, 0.0, 0.0]"),
    "nan": ({"transform": dict(size=[16, 16], mean=[math.nan] * 3, std=[1.0] * 3)}, "mean is [nan, nan, nan]"),
    "checksum": ({"crc32": "x"}, "checksum of its tensors is wrong"),
}


@pytest.mark.parametrize("kind", TRAINING)
def test_headers_that_train_did_not_write(kind, small, tmp_path, capsys):
    """Oracle: one line that names the file and the entry, and exit code 2."""
    entries, words = TRAINING[kind]
    path = rewrite(small, tmp_path / "x.safetensors", training=json.dumps(entries))
    (tmp_path / "x.png").write_bytes(PNG)
    said = refused(capsys, "predict", "--checkpoint", path, tmp_path / "x.png")
    assert said.startswith(f"fastvit-triton: error: {path} ") and words in said


def test_terminals_are_not_controlled(small, tmp_path, capsys, monkeypatch):
    """Oracle: no control characters; names of classes and files may have them, and brackets are no markup."""
    monkeypatch.setenv("COLUMNS", "120")  # so that no cell is wrapped
    classes = ["\x1b[2J\x1b]0;owned\x07", "[/red]", "c\x9b\udcff"]
    path = rewrite(small, tmp_path / "x.safetensors", training=json.dumps({"classes": classes}))
    name = tmp_path / "\x1b[31m.png"
    name.write_bytes(PNG)
    assert main(["predict", "--checkpoint", str(path), str(name), str(name) + "x"]) == 2
    said = capsys.readouterr()
    assert r"\x1b[2J\x1b]0;owned\x07 (" in said.out and "[/red] (" in said.out and r"c\x9b\udcff (" in said.out
    assert "no file matches " in said.err and said.err.endswith("\\x1b[31m.pngx\n")  # a bracket begins a pattern
    for folder in ("x", "[bold]"):
        (tmp_path / "data/val" / folder).mkdir(parents=True)
        (tmp_path / "data/val" / folder / "x.png").write_bytes(PNG)
    path = rewrite(small, path, training=json.dumps({"classes": ["[bold]", "x", "[/red]\x1b[2J"]}))
    table = prints(capsys, "evaluate", "--checkpoint", path, "--data", tmp_path / "data", "--workers", "0")
    assert "[bold]" in table and "[/red]" in table and r"\x1b[2J" in table
    assert not {c for c in said.out + said.err + table if c != "\n" and unicodedata.category(c) == "Cc"}


@pytest.mark.parametrize("text", ["", "epoch\n1\n", "epoch,lr\n1,2,3\n", "\xff\n", "epoch,lr,train_loss\n1,,2\n"])
def test_damaged_logs(text, tmp_path):
    """Oracle: one sentence; an empty file has no rows."""
    path = tmp_path / "log.csv"
    path.write_text(text, encoding="latin1")
    if not text:
        assert _read_log(path) == []
    else:
        with pytest.raises(ValueError, match=rf"{path} is damaged: .*; without this file the report has no curves$"):
            _read_log(path)


def test_eight_bit_weights(small, tmp_path):
    """Oracle: the values themselves, which are exact in float32; NaN is refused as in other types."""
    narrow = small.state_dict()["head.weight"].to(torch.float8_e4m3fn)
    model, _ = load_model(rewrite(small, tmp_path / "x.safetensors", {"head.weight": narrow}))
    assert torch.equal(model.head.weight, narrow.float())
    broken = torch.full((3, 16), math.nan).to(torch.float8_e4m3fn)
    with pytest.raises(WeightsError, match=r"head\.weight has non-finite values"):
        load_model(rewrite(small, tmp_path / "x.safetensors", {"head.weight": broken}))


def test_damaged_tags_raise_what_is_caught(tmp_path):
    """Oracle: the offsets of a TIFF's strips as text, at which Pillow raises TypeError."""
    path, whole = tmp_path / "x.tif", encoded(form="TIFF")
    entry = (0x111).to_bytes(2, "little") + (4).to_bytes(2, "little")
    assert whole.count(entry) == 1
    path.write_bytes(whole.replace(entry, entry[:2] + (2).to_bytes(2, "little")))
    with pytest.raises(TypeError), Image.open(path) as image:
        image.load()
    assert find_defect(path, decode=True).startswith("damaged image: ")
