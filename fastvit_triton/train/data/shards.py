"""Webdataset shards: plain tar files of `<key>.jpg` and `<key>.cls`, read by byte range.

    data/classes.txt            class names, one per line
    data/index.json             size in bytes and number of images of each shard
    data/train/000000.tar …     key.jpg (or another image format) and key.cls, the class number as text
    data/val/000000.tar …

The format is that of github.com/webdataset/webdataset, which `pack` writes with. Streaming cannot assign each sample to
exactly one worker for every number of ranks and workers. An index of byte ranges can, and allows random access as in a
folder. The tar headers are read once, at the start of a run. Shards of others have no index.json; where there is one,
shards that are missing, incomplete or from elsewhere are found.
"""

import io
import json
import os
import shutil
from collections.abc import Sequence
from functools import partial
from operator import index
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from ..distributed import World
from ..ranges import NonNegativeInt, PositiveInt, checked
from .folder import Content, ImageFiles, nfc, scan_folder
from .tar import Member, read_members
from .transform import MAX_PIXELS, SUFFIXES, join_names, read_image

CLASSES, INDEX = "classes.txt", "index.json"
MAX_CLASSES, MAX_CLS_BYTES = 1_000_000, 20  # classes of a data set; bytes of a .cls file


class Samples(Sequence):
    """The images of some shards as paths `shard.tar/<offset>+<size>/<key>.jpg`, created on access.

    A path contains the byte range of its image; the sequence itself stores only tensors and one bytes object.
    """

    def __init__(self, shards: list[Path], numbers: Tensor, ranges: Tensor, keys: list[str]) -> None:
        self.shards = shards
        self.numbers = numbers
        self.ranges = ranges
        self.keys = "\n".join(keys).encode()
        lengths = torch.tensor([len(key.encode()) + 1 for key in keys])
        self.ends = lengths.cumsum(0)

    def __len__(self) -> int:
        return self.numbers.shape[0]

    def __getitem__(self, i: int) -> Path:  # type: ignore[override]  # takes no slices
        offset, size = self.ranges[i].tolist()
        key = self.keys[self.ends[i - 1] if i else 0 : self.ends[i] - 1].decode()
        return self.shards[self.numbers[i]] / f"{offset}+{size}" / key.replace("/", "_")

    def order(self) -> Tensor:
        """A random order [N] from `windowed`, which reads few shards at a time."""
        return windowed(self.numbers.bincount(minlength=len(self.shards)).tolist())


def is_shards(root: Path | str) -> bool:
    """True if the folder has training shards."""
    return (folder := Path(root, "train")).is_dir() and any(folder.glob("*.tar"))


def scan_shards(
    root: Path | str,
    split: str,
    classes: tuple[str, ...] | None = None,
    max_pixels: int = MAX_PIXELS,
    world: World | None = None,
) -> ImageFiles:
    """Indexes the images of one split. Collective: each rank reads some of the shards."""
    root = Path(root)
    world = world or World()
    files = sorted((root / split).glob("*.tar"))
    if not files:
        raise ValueError(f"data {str(root / split)!r} holds no shards; put .tar files there")
    listed = _read_index(root, split, files)
    local = {number: _labelled_images(files[number]) for number in range(world.rank, len(files), world.world_size)}
    tables = {number: table for part in world.all_gather(local) for number, table in part.items()}
    for number, file in enumerate(files):
        if listed and listed[file] != len(tables[number]):
            raise ValueError(f"{file} has {len(tables[number])} images, but {listed[file]} by {INDEX}; copy it again")
    rows = [(number, member) for number in range(len(files)) for member in tables[number]]
    targets = [member.target for _, member in rows]
    classes = class_names(root, max(targets) + 1, classes)
    if max(targets) >= len(classes):
        raise ValueError(f"data {str(root)!r} has class number {max(targets)}, but only {len(classes)} class names")
    ranges = torch.tensor([(member.offset, member.size) for _, member in rows])
    samples = Samples(files, torch.tensor([number for number, _ in rows]), ranges, [member.name for _, member in rows])
    decode = partial(read_sample, max_pixels=max_pixels)
    return ImageFiles(samples, targets, classes, decode, check=None, content=sample_content)


def sample_content(path: Path) -> Content:
    """The bytes of the image at a path from `Samples`."""
    offset, size = map(int, path.parent.name.split("+"))
    return Content(lambda: path.parent.parent.open("rb"), offset, size)


def read_sample(path: Path, max_pixels: int = MAX_PIXELS, levels: float | None = None) -> Image.Image:
    """Decodes the image at a path from `Samples`, as `read_image` does; raises one of `DECODE_ERRORS`."""
    content = sample_content(path)
    with content.open() as shard:
        shard.seek(content.start)
        return read_image(io.BytesIO(shard.read(content.size)), max_pixels, levels)


def windowed(counts: list[int], window: int = 64) -> Tensor:
    """A random permutation of samples that reads from few shards at a time; uses PyTorch's global generator.

    Shuffles the shards, then all samples within each group of `window` shards. With at most `window` shards the order
    is uniformly random.
    """
    starts = torch.tensor([0, *counts]).cumsum(0).tolist()
    samples = [torch.arange(starts[i], starts[i + 1]) for i in torch.randperm(len(counts)).tolist()]
    groups = [torch.cat(samples[i : i + window]) for i in range(0, len(samples), window)]
    return torch.cat([group[torch.randperm(group.shape[0])] for group in groups])


@checked
def pack(root: Path, out: Path, per_shard: PositiveInt = 1000, seed: NonNegativeInt = 0) -> None:
    """Writes an image folder as shards, each split in a random order. Image files are copied unchanged.

    Args:
        root: holds `train/<class>/` and `val/<class>/`.
        out: a new folder.
        per_shard: images per shard; the last has fewer.
        seed: seed of the order.

    Raises:
        ValueError: `out` exists, webdataset is not installed, `root` is not an image folder, or `per_shard` is 0.
    """
    try:
        from webdataset import ShardWriter
    except ImportError as error:
        raise ValueError("shards are written by webdataset; pip install 'fastvit_triton[shards]'") from error
    if out.exists():
        raise ValueError(f"{out} exists; give a new folder")
    staging = out.with_name(f".{out.name}.parts")
    classes = None
    shutil.rmtree(staging, ignore_errors=True)
    try:
        for split in ("train", "val"):
            images = scan_folder(root, split, classes)
            files = images.files
            targets = images.targets
            classes = images.classes
            (staging / split).mkdir(parents=True)
            order = torch.randperm(len(files), generator=torch.Generator().manual_seed(seed)).tolist()
            pattern = str(staging / split / "%06d.tar").replace("%", "%%").replace("%%06d", "%06d")
            with ShardWriter(pattern, maxcount=per_shard, verbose=0, mtime=0.0) as writer:
                for number, i in enumerate(order):
                    suffix = files[i].suffix.lower().removeprefix(".")
                    writer.write({"__key__": f"{number:09d}", suffix: files[i].read_bytes(), "cls": str(targets[i])})
        (staging / CLASSES).write_text("\n".join(images.classes) + "\n", encoding="utf-8")
        (staging / INDEX).write_text(json.dumps(_make_index(staging), indent=1))
        os.replace(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


class _Labelled(NamedTuple):
    """An image inside a shard: its name, byte range and class number."""

    name: str
    offset: int
    size: int
    target: int


def _labelled_images(shard: Path) -> list[_Labelled]:
    """The images of a shard."""
    if not shard.is_file():  # opening a named pipe would wait for a writer
        raise ValueError(f"{shard} is not a regular file; remove it")
    images: dict[str, Member] = {}
    labels: dict[str, bytes] = {}
    try:
        with open(shard, "rb") as file:
            for member in read_members(shard):
                _, _, suffix = member.name.rpartition("/")[2].partition(".")
                key = member.name.removesuffix(f".{suffix}")
                if f".{suffix.lower()}" in SUFFIXES:
                    images[key] = member
                elif suffix.lower() == "cls":
                    file.seek(member.offset)
                    labels[key] = file.read(min(member.size, MAX_CLS_BYTES + 1))
    except (OSError, ValueError) as error:
        raise ValueError(f"{shard} is damaged or not a plain tar file: {error}") from error
    for key, text in labels.items():
        if len(text) > MAX_CLS_BYTES or not text.strip().isdigit() or int(text) >= MAX_CLASSES:
            shown = text.decode(errors="backslashreplace")
            raise ValueError(f"{shard} has {shown!r} in {key}.cls; expected a class number below {MAX_CLASSES:,}")
    if unlabelled := [key for key in images if key not in labels]:
        key = unlabelled[0]
        raise ValueError(f"{shard} has {images[key].name} without a class number; add {key}.cls")
    if not images:
        raise ValueError(f"{shard} holds no images; add some ({', '.join(SUFFIXES)})")
    return [_Labelled(*member, int(labels[key])) for key, member in images.items()]


def class_names(root: Path, count: int, known: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """The classes of a model if `known`, and if those of the data begin so; else those of the data.

    They are the lines of `classes.txt`, or the numbers below `count` if there is no such file.
    """
    path = root / CLASSES
    names = tuple(map(str, range(count)))
    if path.exists():
        try:
            text = path.read_text(encoding="utf-8-sig")
        except ValueError as error:
            raise ValueError(f"{path} is not UTF-8 text: {error}") from error
        names = tuple(nfc(text).removesuffix("\n").split("\n")) if text else ()
    if known is not None and known != names[: len(known)]:
        raise ValueError(f"data {str(root)!r} has classes {', '.join(names[:10])}, the model {', '.join(known[:10])}")
    return known or names


def _make_index(root: Path) -> dict[str, dict[str, int]]:
    """Size in bytes and number of images of each shard, by path."""
    shards = {f"{path.parent.name}/{path.name}": path for path in sorted(root.glob("*/*.tar"))}
    return {
        name: {"bytes": path.stat().st_size, "images": len(_labelled_images(path))} for name, path in shards.items()
    }


def _read_index(root: Path, split: str, shards: list[Path]) -> dict[Path, int] | None:
    """Number of images of each shard of a split by the index, if there is one, after comparing names and sizes."""
    path = root / INDEX
    if not path.exists():
        return None
    try:
        rows = {
            root / name: (index(row["bytes"]), index(row["images"]))
            for name, row in json.loads(path.read_bytes()).items()
        }
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}; delete it to use the shards as they are") from error
    listed = {shard: row for shard, row in rows.items() if shard.parent == root / split}
    if missing := sorted(listed.keys() - set(shards)):
        raise ValueError(f"{path} lists {_names(missing)}, which {root} lacks; copy what is missing, or pack again")
    if foreign := sorted(set(shards) - listed.keys()):
        raise ValueError(
            f"{path} does not list {_names(foreign)}; remove what is not part of the data, or delete {path}"
        )
    for shard in shards:
        if (size := shard.stat().st_size) != listed[shard][0]:
            raise ValueError(f"{shard} has {size:,} bytes, but {listed[shard][0]:,} by {path}; copy it again")
    return {shard: images for shard, (_, images) in listed.items()}


def _names(paths: list[Path]) -> str:
    return join_names([f"{path.parent.name}/{path.name}" for path in paths])
