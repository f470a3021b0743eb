"""Webdataset shards: plain tar files of `<key>.jpg` beside `<key>.cls`, read where each picture lies.

    data/classes.txt            names of the classes, one a line
    data/train/000000.tar …     key.jpg (or another image format) and key.cls, the class number as text
    data/val/000000.tar …

The layout is that of github.com/webdataset/webdataset, which also writes it (`pack`). A stream of shards cannot give
each of its samples to exactly one of any number of processes and workers; an index of byte ranges can, because then a
shard is a folder. The headers are read once, when a run begins.
"""

import io
import os
import shutil
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from .folder import scan
from .image import SUFFIXES, read
from .parallel import World
from .ranges import Count, Number, checked

CLASSES = "classes.txt"


class Samples(Sequence):
    """The pictures of some shards, as names `shard.tar/<first byte>+<bytes>/<key>.jpg`, made when they are asked for.

    A name says where its picture lies, so processes and workers hold no more than its place and key.

    Args:
        shards: the files.
        numbers: [N] which shard.
        places: [N, 2] first byte and bytes.
        keys: names inside the shards.
    """

    def __init__(self, shards: list[Path], numbers: Tensor, places: Tensor, keys: list[str]) -> None:
        self.shards, self.numbers, self.places, self.keys = shards, numbers, places, "\n".join(keys).encode()
        lengths = torch.tensor([len(key.encode()) + 1 for key in keys])
        self.ends = lengths.cumsum(0)

    def __len__(self) -> int:
        return self.numbers.shape[0]

    def __getitem__(self, i: int) -> Path:
        first, count = self.places[i].tolist()
        key = self.keys[self.ends[i - 1] if i else 0 : self.ends[i] - 1].decode()
        return self.shards[self.numbers[i]] / f"{first}+{count}" / key.replace("/", "_")

    def order(self) -> Tensor:
        """A random order that opens few shards at a time; see `windowed`."""
        return windowed(self.numbers.bincount(minlength=len(self.shards)).tolist())


def is_shards(root: Path) -> bool:
    """Whether a folder holds shards to learn from."""
    return (root / "train").is_dir() and any((root / "train").glob("*.tar"))


def shards(
    root: Path, split: str, classes: tuple[str, ...] | None = None, world: World | None = None
) -> tuple[Samples, list[int], tuple[str, ...], Callable[[Path], Image.Image]]:
    """The index of one split.

    Args:
        root: holds `train/` and `val/` with shards, and `classes.txt`; without it classes are called by their numbers.
        split: "train" or "val".
        classes: the names that the model knows; None takes the file's.
        world: processes that share the reading.

    Returns:
        A name for each picture, its class number, the class names, and what gives the picture of a name.

    Raises:
        ValueError: there are no shards, one is damaged, a picture has no class number or none that has a name.
    """
    world, files = world or World(), sorted((root / split).glob("*.tar"))
    if not files:
        raise ValueError(f"data {str(root / split)!r} holds no shards; put .tar files there")
    mine = {number: _members(files[number]) for number in range(world.rank, len(files), world.size)}
    tables = {number: table for part in world.gather(mine) for number, table in part.items()}
    rows = [(number, *row) for number in range(len(files)) for row in tables[number]]
    targets = [target for *_, target in rows]
    found = _names(root, max(targets) + 1)
    if classes is not None and classes != found[: len(classes)]:
        raise ValueError(f"data {str(root)!r} has classes {', '.join(found[:10])}, the model {', '.join(classes[:10])}")
    classes = classes or found
    if max(targets) >= len(classes):
        raise ValueError(f"data {str(root)!r} has class number {max(targets)}, and there are {len(classes)} names")
    places = torch.tensor([(first, count) for _, _, first, count, _ in rows])
    samples = Samples(files, torch.tensor([row[0] for row in rows]), places, [row[1] for row in rows])
    return samples, targets, classes, picture


def picture(name: Path) -> Image.Image:
    """The picture of a name from `Samples`; raises one of `BROKEN`."""
    first, count = map(int, name.parent.name.split("+"))
    with open(name.parent.parent, "rb") as shard:
        shard.seek(first)
        return read(io.BytesIO(shard.read(count)))


def windowed(counts: list[int], window: int = 64) -> Tensor:
    """A random order of samples that opens few shards at a time, drawn from PyTorch's global generator.

    Shards in random order; of every `window` of them, all samples in random order. With as many shards as `window`, or
    fewer, any order is as likely as any other.

    Args:
        counts: samples in each shard.
        window: shards that are open at a time.

    Returns:
        A permutation of 0 … Σ counts − 1.
    """
    starts = torch.tensor([0, *counts]).cumsum(0)
    samples = [torch.arange(starts[i], starts[i + 1]) for i in torch.randperm(len(counts)).tolist()]
    groups = [torch.cat(samples[i : i + window]) for i in range(0, len(samples), window)]
    return torch.cat([group[torch.randperm(group.shape[0])] for group in groups])


@checked
def pack(root: Path, out: Path, per_shard: Count = 1000, seed: Number = 0) -> None:
    """Writes an image folder as shards, each split in a random order, byte for byte.

    Args:
        root: holds `train/<class>/` and `val/<class>/`.
        out: a new folder.
        per_shard: pictures in a shard; the last has fewer.
        seed: of the order.

    Raises:
        ValueError: `out` exists, webdataset is not installed, `root` is no image folder, or shards would be empty.
    """
    try:
        from webdataset import ShardWriter
    except ImportError as error:
        raise ValueError("shards are written by webdataset; pip install webdataset") from error
    if out.exists():
        raise ValueError(f"{out} exists; give a new folder")
    parts, classes = out.with_name(f".{out.name}.parts"), None
    shutil.rmtree(parts, ignore_errors=True)
    try:
        for split in ("train", "val"):
            files, targets, classes = scan(root, split, classes)
            (parts / split).mkdir(parents=True)
            order = torch.randperm(len(files), generator=torch.Generator().manual_seed(seed)).tolist()
            pattern = str(parts / split / "%06d.tar").replace("%", "%%").replace("%%06d", "%06d")
            with ShardWriter(pattern, maxcount=per_shard, verbose=0, mtime=0.0) as writer:
                for number, i in enumerate(order):
                    suffix = files[i].suffix.lower().removeprefix(".")
                    writer.write({"__key__": f"{number:09d}", suffix: files[i].read_bytes(), "cls": str(targets[i])})
        (parts / CLASSES).write_text("\n".join(classes) + "\n", encoding="utf-8")
        os.replace(parts, out)
    finally:
        shutil.rmtree(parts, ignore_errors=True)


def _members(shard: Path) -> list[tuple[str, int, int, int]]:
    """(name, first byte, bytes, class number) of each picture in a shard."""
    pictures: dict[str, tuple[str, int, int]] = {}
    numbers: dict[str, int] = {}
    try:
        with tarfile.open(shard, "r:") as archive:
            for member in archive:
                folder, _, name = member.name.rpartition("/")
                stem, _, suffix = name.partition(".")
                if not member.isreg() or not suffix:
                    continue
                key = f"{folder}/{stem}"
                if f".{suffix.lower()}" in SUFFIXES:
                    pictures[key] = (member.name, member.offset_data, member.size)
                elif suffix.lower() == "cls":
                    numbers[key] = int(archive.extractfile(member).read())
    except (tarfile.TarError, OSError, ValueError) as error:
        raise ValueError(f"{shard} is damaged or no plain tar file: {error}") from error
    if lonely := [key for key in pictures if numbers.get(key, -1) < 0]:
        raise ValueError(f"{shard} has {pictures[lonely[0]][0]} without a class number; add {lonely[0]}.cls".strip("/"))
    if not pictures:
        raise ValueError(f"{shard} holds no pictures; add some ({', '.join(SUFFIXES)})")
    return [(*place, numbers[key]) for key, place in pictures.items()]


def _names(root: Path, count: int) -> tuple[str, ...]:
    path = root / CLASSES
    if not path.exists():
        return tuple(map(str, range(count)))
    return tuple(path.read_text(encoding="utf-8").split("\n")[:-1])
