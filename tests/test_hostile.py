"""Damaged and hostile files: shards, images, weights. Each is refused in one sentence, at bounded time and memory."""

import io
import json
import os
import resource
import shutil
import subprocess
import tarfile
import warnings
import zlib
from pathlib import Path

import pytest
import torch
from PIL import EpsImagePlugin, Image

from fastvit_triton.cli import build_parser, main
from fastvit_triton.train.data import load, load_test, tar
from fastvit_triton.train.data.folder import list_images, scan_folder
from fastvit_triton.train.data.shards import pack, scan_shards
from fastvit_triton.train.data.transform import MAX_PIXELS, Transform, find_defect, read_image
from fastvit_triton.train.recipes import FOLDER, override_recipe

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
    with pytest.raises(ValueError) as caught:
        scan_shards(root, "train")
    assert "\n" not in str(caught.value)
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
    assert f"{first} has {len(whole) + 512:,} bytes, but {len(whole)} by" in refusal(packed)
    with tarfile.open(first, "w") as archive:
        add(archive, "0.png", PNG)
        add(archive, "0.cls", b"0")
    first.write_bytes(first.read_bytes().ljust(len(whole), b"\0"))
    assert f"{first} has 1 images, but 2 by index.json; copy it again" == refusal(packed)
    first.write_bytes(whole)
    assert scan_shards(packed, "train").classes == ("class 0", "class 1")


@pytest.mark.parametrize(
    "text", [b"", b"[1]", b'{"train/000000.tar": 3}', b'{"train/000000.tar": {}}', b"\xff", b"[" * 10**5]
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
    for root in (tmp_path / "folder", tmp_path / "shards"):
        assert len(list(load(str(root), RECIPE, max_pixels=20).train)) == 1
        with pytest.raises(ValueError, match=r"2 of 2 images in .*\(has 20 pixels, more than --max-pixels 19\)"):
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
    parser = build_parser()
    words = {
        "train": ["train"],
        "evaluate": ["evaluate", "--checkpoint", "x"],
        "predict": ["predict", "--checkpoint", "x", "y"],
        "explain": ["explain", "--checkpoint", "x", "--image", "y"],
    }
    for command in words.values():
        assert parser.parse_args(command).max_pixels == MAX_PIXELS
        assert parser.parse_args([*command, "--max-pixels", "7"]).max_pixels == 7
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        (tmp_path / split / "a/x.png").write_bytes(PNG)
    assert main(["train", "--data", str(tmp_path), "--out", str(tmp_path / "out"), "--max-pixels", "19"]) == 2
    assert "train/a/x.png (has 20 pixels, more than --max-pixels 19); repair or remove" in capsys.readouterr().err


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
