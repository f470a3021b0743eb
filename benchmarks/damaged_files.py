"""Damaged and hostile files, and readers that tell whether a file was read as if undamaged."""

import contextlib
import dataclasses
import io
import itertools
import json
import shutil
import signal
import struct
import tarfile
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from fastvit_triton import create_model, load_model, load_weights, save_weights
from fastvit_triton.cli import main as cli
from fastvit_triton.train.checkpoint import PREVIOUS, STATE, load_state, newest_state
from fastvit_triton.train.data.shards import pack, scan_shards
from fastvit_triton.train.data.transform import DECODE_ERRORS, read_image

MODEL = "vit_tiny_patch16_224"
TINY = dict(img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=3)
RUN = ("--epochs", "2", "--batch-size", "512", "--save-every", "1", "--device", "cpu", "--seed", "3")
SECONDS = 60  # in which a hostile file must have been made and refused, on a busy machine


class Late(Exception):
    """A file was not refused in time."""


@cache
def samples() -> Path:
    """A folder with a finished run, weights in two formats, shards, and images; it lives as long as the process."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    with contextlib.redirect_stdout(io.StringIO()):
        cli(["train", "--out", str(folder / "run"), *RUN])
    torch.manual_seed(0)
    model = create_model(MODEL, **TINY)
    save_weights(model, folder / "tiny.safetensors")
    torch.save(model.state_dict(), folder / "tiny.pt")
    for split, name, i in itertools.product(("train", "val"), ("cat", "dog"), range(12)):
        place = folder / "images" / split / name
        place.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((24, 20), 60).convert("RGB").save(place / f"{i}.{('jpg', 'png', 'webp', 'tif')[i % 4]}")
    pack(folder / "images", folder / "shards")
    return folder


def reads_state(path: Path) -> bool:
    """True if the state is whole, or is refused in favour of the previous one."""
    previous = load_state(samples() / "run" / PREVIOUS)
    shutil.copy(samples() / "run" / PREVIOUS, path.parent / PREVIOUS)
    state, sentence = newest_state(path.parent)
    expected = previous if sentence else load_state(samples() / "run" / STATE)
    return all(torch.equal(tensor, state["model"][name]) for name, tensor in expected["model"].items())


def reads_weights(path: Path) -> bool:
    """True if the weights are those of the undamaged file."""
    expected = load_model(samples() / "tiny.safetensors")[0].state_dict()
    if path.suffix == ".pt":
        model = create_model(MODEL, **TINY)
        load_weights(model, path)
    else:
        model, _ = load_model(path)
    return all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def reads_shard(path: Path) -> bool:
    """True if all images of the shard are found."""
    root = path.parent / "shards"
    shutil.copytree(samples() / "shards", root)
    (root / "index.json").unlink()  # would find any change of size
    shutil.copy(path, root / "train" / "000000.tar")
    return len(scan_shards(root, "train").files) == 24


def reads_image(path: Path) -> bool:
    """True if an image is decoded, to whatever pixels, or is refused as Pillow refuses images."""
    try:
        read_image(path)
    except DECODE_ERRORS:
        pass
    return True


def damaged(source: Path, change: Callable[[bytes], bytes], reads: Callable[[Path], bool], folder: Path) -> str | None:
    """A changed copy of a file is read as if unchanged, or is refused."""
    path = folder / source.name
    path.write_bytes(change(source.read_bytes()))
    try:
        return None if reads(path) else f"{source.name} is read with other contents"
    except ValueError as error:
        return None if "\n" not in str(error) else f"several lines: {error}"


def cut(share: float, content: bytes) -> bytes:
    """The first part of a file."""
    return content[: int(len(content) * share)]


def flip(where: float, bit: int, content: bytes) -> bytes:
    """A file with one bit changed."""
    changed = bytearray(content)
    changed[int(where * len(content))] ^= 1 << bit
    return bytes(changed)


def hostile(kind: str, folder: Path) -> str | None:
    """A file made to exhaust memory or time, or to start a program, is refused in time."""

    def late(*_: object) -> None:
        raise Late(f"{kind}: not refused within {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        HOSTILE[kind](folder)
    except ValueError as error:
        return None if "\n" not in str(error) else f"several lines: {error}"
    except DECODE_ERRORS:  # of images
        return None
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return f"{kind}: accepted"


def _config(folder: Path, **fields: object) -> None:
    model = create_model(MODEL, **TINY)
    header = {"layout": "fastvit_triton", "variant": MODEL}
    header["config"] = json.dumps(dataclasses.asdict(model.config) | fields)
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "a.safetensors", header
    )
    load_model(folder / "a.safetensors")


def _keys(folder: Path) -> None:
    entries = {f"k{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(10**6)}
    header = json.dumps(entries).encode()
    (folder / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    load_weights(create_model(MODEL, **TINY), folder / "a.safetensors")


def _npz(folder: Path) -> None:
    np.savez_compressed(folder / "a.npz", kernel=np.zeros((2**14, 2**14), np.float32))
    load_weights(create_model(MODEL, **TINY), folder / "a.npz")


def _shard(folder: Path, label: bytes = b"0", size: int | None = None, members: int = 1) -> None:
    place = folder / "train" / "000000.tar"
    place.parent.mkdir()
    image = io.BytesIO()
    Image.new("RGB", (8, 8)).save(image, "PNG")
    with tarfile.open(place, "w") as archive:
        for name, content in (("0.png", image.getvalue()), ("0.cls", label)):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    if size is not None:  # in the header of the second member, with its checksum
        content = bytearray(place.read_bytes())
        at = 512 + -(-len(image.getvalue()) // 512) * 512
        content[at + 124 : at + 136] = b"%011d\0" % size
        content[at + 148 : at + 156] = b" " * 8
        content[at + 148 : at + 156] = b"%06o\0 " % sum(content[at : at + 512])
        place.write_bytes(content)
    scan_shards(folder, "train")


def _postscript(folder: Path) -> None:
    (folder / "a.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    read_image(folder / "a.jpg")


def _pixels(folder: Path) -> None:
    Image.new("1", (13_000, 13_000)).save(folder / "a.png")
    read_image(folder / "a.png")


HOSTILE: dict[str, Callable[[Path], None]] = {
    **{
        f"config with {name} {value}": lambda folder, given={name: value}: _config(folder, **given)
        for name, value in (
            ("depth", 10**6),
            ("embed_dim", 2**40),
            ("num_classes", 10**18),
            ("mlp_ratio", float("inf")),
            ("mlp_ratio", -1),
            ("reg_tokens", -1),
            ("head_dim", -4),
            ("head_dim", 0),
            ("eps", "x"),
        )
    },
    "safetensors with a million keys": _keys,
    "npz that expands to 1 GB": _npz,
    "class number 99999999999": lambda folder: _shard(folder, b"99999999999"),
    "member of negative size": lambda folder: _shard(folder, size=-1000),
    "member larger than its shard": lambda folder: _shard(folder, size=10**10),
    "PostScript in a .jpg": _postscript,
    "image of 169 million pixels": _pixels,
}
