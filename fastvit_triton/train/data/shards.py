"""Webdataset shards: plain tar files of `<key>.jpg` and `<key>.cls`, read by byte range.

    data/classes.txt            class names, one per line
    data/train/000000.tar …     key.jpg (or another image format) and key.cls, the class number as text
    data/val/000000.tar …

The format is that of github.com/webdataset/webdataset, which `pack` writes with. Streaming cannot assign each sample to
exactly one worker for every number of ranks and workers. An index of byte ranges can, and allows random access as in a
folder. The tar headers are read once, at the start of a run.
"""

import io
import os
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from ..distributed import World
from ..ranges import NonNegativeInt, PositiveInt, checked
from .folder import ImageFiles, scan_folder
from .transform import SUFFIXES, read_image

CLASSES = "classes.txt"


class Samples(Sequence):
    """The images of some shards as paths `shard.tar/<offset>+<size>/<key>.jpg`, created on access.

    A path contains the byte range of its image; the sequence itself stores only tensors and one bytes object.

    Args:
        shards: the files.
        numbers: index of each image's shard [N].
        ranges: offset and size of each image in bytes [N, 2].
        keys: names inside the shards.
    """

    def __init__(self, shards: list[Path], numbers: Tensor, ranges: Tensor, keys: list[str]) -> None:
        self.shards, self.numbers, self.ranges, self.keys = shards, numbers, ranges, "\n".join(keys).encode()
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


def is_shards(root: Path) -> bool:
    """True if the folder has training shards."""
    return (root / "train").is_dir() and any((root / "train").glob("*.tar"))


def scan_shards(
    root: Path, split: str, classes: tuple[str, ...] | None = None, world: World | None = None
) -> ImageFiles:
    """Indexes the images of one split. Collective: each rank reads some of the shards.

    Args:
        root: holds `train/` and `val/` with shards, and `classes.txt`; without it the class names are the numbers.
        split: "train" or "val".
        classes: class names of the model; None accepts those of the file.
        world: processes among which the shards are divided.

    Raises:
        ValueError: there are no shards, a shard is damaged, an image has no class number, or the classes differ.
    """
    world, files = world or World(), sorted((root / split).glob("*.tar"))
    if not files:
        raise ValueError(f"data {str(root / split)!r} holds no shards; put .tar files there")
    local = {number: _members(files[number]) for number in range(world.rank, len(files), world.world_size)}
    tables = {number: table for part in world.all_gather(local) for number, table in part.items()}
    rows = [(number, member) for number in range(len(files)) for member in tables[number]]
    targets = [member.target for _, member in rows]
    found = _class_names(root, max(targets) + 1)
    if classes is not None and classes != found[: len(classes)]:
        raise ValueError(f"data {str(root)!r} has classes {', '.join(found[:10])}, the model {', '.join(classes[:10])}")
    classes = classes or found
    if max(targets) >= len(classes):
        raise ValueError(f"data {str(root)!r} has class number {max(targets)}, but only {len(classes)} class names")
    ranges = torch.tensor([(member.offset, member.size) for _, member in rows])
    samples = Samples(files, torch.tensor([number for number, _ in rows]), ranges, [member.name for _, member in rows])
    return ImageFiles(samples, targets, classes, decode=read_sample, check=None)


def read_sample(path: Path) -> Image.Image:
    """Decodes the image at a path from `Samples`; raises one of `DECODE_ERRORS`."""
    offset, size = map(int, path.parent.name.split("+"))
    with open(path.parent.parent, "rb") as shard:
        shard.seek(offset)
        return read_image(io.BytesIO(shard.read(size)))


def windowed(counts: list[int], window: int = 64) -> Tensor:
    """A random order of samples that reads few shards at a time, drawn from PyTorch's global generator.

    Shuffles the shards, then all samples within each group of `window` shards. With at most `window` shards the order
    is uniformly random.

    Args:
        counts: samples in each shard.
        window: shards in a group.

    Returns:
        A permutation of 0 … Σ counts − 1.
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
        raise ValueError("shards are written by webdataset; pip install webdataset") from error
    if out.exists():
        raise ValueError(f"{out} exists; give a new folder")
    staging, classes = out.with_name(f".{out.name}.parts"), None
    shutil.rmtree(staging, ignore_errors=True)
    try:
        for split in ("train", "val"):
            images = scan_folder(root, split, classes)
            files, targets, classes = images.files, images.targets, images.classes
            (staging / split).mkdir(parents=True)
            order = torch.randperm(len(files), generator=torch.Generator().manual_seed(seed)).tolist()
            pattern = str(staging / split / "%06d.tar").replace("%", "%%").replace("%%06d", "%06d")
            with ShardWriter(pattern, maxcount=per_shard, verbose=0, mtime=0.0) as writer:
                for number, i in enumerate(order):
                    suffix = files[i].suffix.lower().removeprefix(".")
                    writer.write({"__key__": f"{number:09d}", suffix: files[i].read_bytes(), "cls": str(targets[i])})
        (staging / CLASSES).write_text("\n".join(images.classes) + "\n", encoding="utf-8")
        os.replace(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


class _Member(NamedTuple):
    """An image inside a shard: its name, byte range and class number."""

    name: str
    offset: int
    size: int
    target: int


def _members(shard: Path) -> list[_Member]:
    """The images of a shard."""
    images: dict[str, tarfile.TarInfo] = {}
    targets: dict[str, int] = {}
    try:
        with tarfile.open(shard, "r:") as archive:
            for member in archive:
                folder, _, name = member.name.rpartition("/")
                stem, _, suffix = name.partition(".")
                if not member.isreg() or not suffix:
                    continue
                key = f"{folder}/{stem}"
                if f".{suffix.lower()}" in SUFFIXES:
                    images[key] = member
                elif suffix.lower() == "cls" and (label := archive.extractfile(member)) is not None:
                    targets[key] = int(label.read())
    except (tarfile.TarError, OSError, ValueError) as error:
        raise ValueError(f"{shard} is damaged or not a plain tar file: {error}") from error
    if unlabelled := [key for key in images if targets.get(key, -1) < 0]:
        key = unlabelled[0]
        raise ValueError(f"{shard} has {images[key].name} without a class number; add {key}.cls".strip("/"))
    if not images:
        raise ValueError(f"{shard} holds no images; add some ({', '.join(SUFFIXES)})")
    return [_Member(image.name, image.offset_data, image.size, targets[key]) for key, image in images.items()]


def _class_names(root: Path, count: int) -> tuple[str, ...]:
    path = root / CLASSES
    if not path.exists():
        return tuple(map(str, range(count)))
    return tuple(path.read_text(encoding="utf-8").split("\n")[:-1])
