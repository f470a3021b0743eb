"""Image folders: `train/<class>/…` and `val/<class>/…`, decoded on the fly by worker processes."""

import os
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..distributed import World
from ..ranges import NonNegativeInt, PositiveInt, checked
from .sampler import SampleKey, SeededBatches
from .transform import DECODE_ERRORS, MAX_PIXELS, SUFFIXES, Transform, find_defect, join_names, read_image, reason_of


class ImageFiles(NamedTuple):
    """One split of a data set on disk.

    Attributes:
        files: one path per image; if the sequence has a method `order()`, it draws the random order of an epoch.
        targets: class numbers, one per file; for detectors dicts.
        classes: names.
        decode: function from a path to an image.
        check: function from a path to a defect of the file's header, or None; None skips the check.
    """

    files: Sequence[Path]
    targets: list[Any]
    classes: tuple[str, ...]
    decode: Callable[[Path], Image.Image] = read_image
    check: Callable[[Path], str | None] | None = find_defect


def scan_folder(
    root: Path, split: str, classes: tuple[str, ...] | None = None, max_pixels: int = MAX_PIXELS
) -> ImageFiles:
    """Lists one split of an image folder, in sorted order. Hidden files and other suffixes are ignored.

    Args:
        root: holds `train/` and `val/`, or the classes themselves.
        split: "train" or "val"; "" if the classes lie in `root`.
        classes: class names of the model; None accepts the folders found.
        max_pixels: larger images are unreadable.

    Raises:
        ValueError: a folder is missing or cannot be read, there are no classes, a class has no images or is not in
            `classes`.
    """
    if not root.is_dir():
        raise ValueError(
            f"data {str(root)!r} is not a folder; give one that holds <class>/, or train/<class>/ and val/<class>/"
        )
    if not (root / split).is_dir():
        why = f"data {str(root)!r} has no folder {split}/; put images into {split}/<class>/"
        raise ValueError(why if classes else f"{why}, or pass --val-split 0.1 to test on a tenth of each class")
    class_names = class_folders(root / split)
    if not class_names:
        where = f"{split}/<class>/" if split else "<class>/"
        raise ValueError(f"data {str(root / split)!r} holds no class folders; put images into {where}")
    unknown = [name for name in class_names if classes is not None and name not in classes]
    if classes is not None and unknown:
        raise ValueError(
            f"data {str(root / split)!r} has {join_names(unknown)}, not among the {len(classes)} classes of training "
            f"({join_names(list(classes))}); rename or remove them"
        )
    classes = classes or tuple(class_names)
    files = []
    targets = []
    for name in class_names:
        folder = root / split / name
        images = list_images(folder)
        if not images:
            raise ValueError(f"data {str(folder)!r} holds no images; add some ({', '.join(SUFFIXES)})")
        files += images
        targets += [classes.index(name)] * len(images)
    decode = partial(read_image, max_pixels=max_pixels)
    return ImageFiles(files, targets, classes, decode, partial(find_defect, max_pixels=max_pixels))


def class_folders(root: Path) -> list[str]:
    """The names of the folders in a folder that are not hidden, in sorted order; ValueError if it cannot be read."""
    return sorted(next(_walk(root))[1])


def is_divided(root: Path) -> bool:
    """True for a folder with train/<class>/ or val/<class>/; False if the classes lie in it, or if there is none."""
    return any((root / split).is_dir() and class_folders(root / split) for split in ("train", "val"))


def list_images(folder: Path) -> list[Path]:
    """The files in a folder and its subfolders that have an image suffix and are not hidden, in sorted order.

    Raises:
        ValueError: a folder cannot be read.
    """
    return sorted(Path(place, name) for place, _, names in _walk(folder) for name in names if _is_image(name))


def _walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """`os.walk` without hidden folders; raises ValueError at a folder that cannot be read, as `rglob` does not."""

    def refuse(error: OSError) -> None:
        raise ValueError(f"data {error.filename!r} cannot be read: {error.strerror}") from error

    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if name[0] != "."]
        yield place, folders, names


def _is_image(name: str) -> bool:
    return Path(name).suffix.lower() in SUFFIXES and name[0] != "."


@contextmanager
def worker_errors() -> Iterator[None]:
    """Converts the error of a dead DataLoader worker to OSError; PyTorch's signal handler raises it anywhere."""
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        text = "a worker process that decodes images died, perhaps out of memory; lower --workers and pass --resume"
        raise OSError(text) from error


class UnreadableImages(ValueError):
    """Images that cannot be read: one sentence with their number and at most ten of their names.

    Args:
        bad: file → reason.
        total: number of images, also of those that can be read.
        root: the folder of the data.
    """

    def __init__(self, bad: dict[Path, str], total: int, root: Path) -> None:
        names = [f"{path.relative_to(root)} ({why})" for path, why in sorted(bad.items())]
        text = f"{len(bad)} of {total} images in {root} cannot be read: {join_names(names)}"
        super().__init__(f"{text}; repair or remove them, or pass --skip-bad-images")
        self.bad = bad
        self.total = total
        self.root = root


class FolderBatches:
    """Batches of image files, decoded by worker processes.

    The order, and one seed per random crop, are drawn from PyTorch's global generator, so batches do not depend on the
    number of workers or ranks. Each rank decodes its part of a batch. Headers are checked at construction, pixels when
    an image is decoded. Iterating raises ValueError at an unreadable image unless bad images are skipped, and
    OSError if a worker dies.

    Args:
        root: the folder; used in messages only.
        images: from `scan_folder`, `scan_cifar` or `scan_shards`.
        transform: preprocessing from image to tensor.
        batch_size: images per batch, over all ranks; fewer if some are skipped.
        crop: keyword arguments of a random crop, or a `CustomTransform` as "custom", for training in random order; None
            takes centre crops, in order.
        workers: decoding processes; 0 decodes in this process.
        skip_bad_images: leave out unreadable images; `bad` maps each to the reason.
        repeats: copies of each image in repeated augmentation; 1 disables it.
        world: processes among which each batch is divided; a rank without images gets [0, C, H, W].

    Raises:
        ValueError: a file is unreadable and `skip_bad_images` is False.
    """

    per_rank = True

    @checked
    def __init__(
        self,
        root: Path,
        images: ImageFiles,
        transform: Transform,
        *,
        batch_size: PositiveInt,
        crop: dict | None = None,
        workers: NonNegativeInt = 0,
        skip_bad_images: bool = False,
        repeats: PositiveInt = 1,
        world: World | None = None,
    ) -> None:
        files = images.files
        targets = images.targets
        self.decode = images.decode
        self.root = root
        self.total = len(files)
        self.skip_bad = skip_bad_images
        self.transform = transform
        self.bad: dict[Path, str] = {}
        if images.check is not None:
            with ThreadPoolExecutor() as pool:
                defects = zip(files, pool.map(images.check, files), strict=True)
                self.bad = {path: defect for path, defect in defects if defect}
        self._raise_if_bad()
        if self.bad:
            kept = [(path, target) for path, target in zip(files, targets, strict=True) if path not in self.bad]
            files = [path for path, _ in kept]
            targets = [target for _, target in kept]
        self.indices: list[int] = []
        self.files = files
        self.targets = targets
        self.world = world or World()
        self._kept: weakref.finalize | None = None
        order = getattr(files, "order", partial(torch.randperm, len(files)))
        self.sampler = SeededBatches(len(files), order if crop is not None else None, repeats, batch_size, self.world)
        self.loader = DataLoader(
            self.dataset(crop),
            batch_sampler=self.sampler,
            num_workers=workers,
            collate_fn=self.collate,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=workers > 0,
            generator=torch.Generator(),  # the loader's own draws depend on the number of workers
        )

    def dataset(self, crop: dict | None) -> Dataset:
        """From a `SampleKey` to a `Sample`; `crop` is the argument of the class."""
        return _ImageDataset(self.files, self.targets, self.transform, crop, self.decode)

    @staticmethod
    def collate(samples: list["Sample"]) -> "Batch":
        """The samples that can be read, as a batch."""
        good = [sample for sample in samples if sample.image is not None]
        decoded = [sample.image for sample in samples if sample.image is not None]
        images = torch.stack(decoded) if decoded else torch.empty(0)
        targets = torch.tensor([sample.target for sample in good], dtype=torch.long)
        return Batch(images, targets, [sample.index for sample in good], unreadable(samples))

    def leave_out_single(self) -> None:
        """Leaves a last batch of one image out of each epoch: BatchNorm has no statistics of it."""
        self.sampler.fewest = 2

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.iter_from(0)

    def iter_from(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterates over an epoch without its first `count` batches, which are not decoded."""
        self.sampler.start_epoch(count)
        loaded = iter(self.loader)  # the same in every epoch, with its workers
        if self.loader.num_workers and self._kept is None:
            # Arguments of a finaliser are no cyclic garbage, in which the collector closes the pipes of workers while
            # their threads close them, and with them files that were opened between, and waits 5 s for the workers.
            self._kept = weakref.finalize(self, id, loaded)
            self._kept.atexit = False
        return self._stream(loaded)

    def _stream(self, loaded: Iterator) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            with worker_errors():
                batch = next(loaded, None)
            if batch is None:
                return
            self.bad.update(batch.bad)
            self._raise_if_bad()
            self.indices = batch.indices
            if len(batch.targets) or self.world.world_size > 1:
                shape = (len(self.transform.mean), *self.transform.size)
                yield batch.images if len(batch.targets) else batch.images.new_empty(0, *shape), batch.targets

    def display_image(self, i: int) -> Tensor:
        """Readable image i after the centre crop, [C, H, W] in [0, 1]. Valid after a pass over all batches."""
        readable = [path for path in self.files if path not in self.bad]
        return self.transform.restore(self.transform(self.decode(readable[i])))

    def digest(self) -> str:
        """The number of images, and a CRC-32 of their names, sizes in bytes and class numbers."""
        total = 0
        root = os.path.join(self.root, "")
        for path, target in zip(map(os.fspath, self.files), self.targets, strict=True):
            try:
                size = os.stat(path).st_size
            except (OSError, ValueError):  # an image in a shard has its size in its name
                size = 0
            total = zlib.crc32(b"%s\0%d\0%d\0" % (os.fsencode(path.removeprefix(root)), size, target), total)
        return f"{len(self.files)} images, {total:08x}"

    def _raise_if_bad(self) -> None:
        if self.bad and not self.skip_bad:
            raise UnreadableImages(self.bad, self.total, self.root)


class Sample(NamedTuple):
    """One decoded image; if it cannot be read, `image` is None and `error` is the reason."""

    image: Tensor | None
    target: Any
    index: int  # type: ignore[assignment]  # hides tuple.index
    path: Path
    error: str


class Batch(NamedTuple):
    """Decoded images and their targets, indices of the images, and the files that cannot be read, with the reason."""

    images: Tensor
    targets: Any
    indices: list[int]
    bad: dict[Path, str]


def unreadable(samples: list[Sample]) -> dict[Path, str]:
    """The files that cannot be read, with the reason."""
    return {sample.path: sample.error for sample in samples if sample.image is None}


class _ImageDataset(Dataset):
    """Maps a `SampleKey` to a `Sample`."""

    def __init__(
        self,
        files: Sequence[Path],
        targets: list[int],
        transform: Transform,
        crop: dict | None,
        decode: Callable[[Path], Image.Image],
    ) -> None:
        self.files = files
        self.targets = targets
        self.decode = decode
        self.transform = transform
        self.crop = dict(crop or {})
        self.custom = self.crop.pop("custom", None)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, key: SampleKey) -> Sample:
        path = self.files[key.index]
        target = self.targets[key.index]
        try:
            image = self.decode(path)
            if self.custom is None:
                return Sample(self.transform(image, key.seed, **self.crop), target, key.index, path, "")
            image.load()
        except DECODE_ERRORS as error:
            return Sample(None, target, key.index, path, reason_of(error))
        return Sample(self.custom(image, key.seed, self.transform), target, key.index, path, "")
