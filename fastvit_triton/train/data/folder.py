"""Image folders: `train/<class>/…` and `val/<class>/…`, decoded on the fly by worker processes."""

import atexit
import io
import os
import re
import unicodedata
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..distributed import World
from ..ranges import NonNegativeInt, PositiveInt, checked
from ..stopping import outlive
from .findings import Findings
from .sampler import Batches, SampleKey, SeededBatches
from .transform import (
    DECODE_ERRORS,
    MAX_PIXELS,
    SUFFIXES,
    Transform,
    find_defect,
    is_image,
    join_names,
    read_image,
    reason_of,
)

# By split the names of its folder, in the order in which they are chosen; names of one group mean the same.
SPLITS = {"train": (("train", "training"),), "val": (("val", "valid", "validation"), ("test", "testing"))}
SPLIT_NAMES = {name for groups in SPLITS.values() for group in groups for name in group}
# Folders of network storage, archive tools and operating systems, which hold thumbnails and deleted files.
SYSTEM = re.compile(
    r"@(eaDir|tmp|Recycle|Recently-Snapshot|__thumb|Syno\w*)|#(recycle|snapshot)|~snapshot|\$RECYCLE\.BIN|RECYCLER"
    r"|System Volume Information|__MACOSX|__pycache__|lost\+found|Network Trash Folder|Temporary Items",
    re.IGNORECASE,
)


class Content(NamedTuple):
    """The bytes of an encoded image: a file, open for reading, and the place of the image in it."""

    open: Callable[[], BinaryIO]
    start: int
    size: int


def file_content(path: Path) -> Content:
    """A whole file; nothing of one that cannot be read, which is reported elsewhere."""
    try:
        size = os.stat(path).st_size
    except (OSError, ValueError):
        size = 0
    return Content(lambda: path.open("rb"), 0, size)


class ImageFiles(NamedTuple):
    """One split of a data set on disk."""

    # one path per image; if the sequence has a method `order()`, it draws the random order of an epoch
    files: Sequence[Path]
    targets: list[Any]  # class numbers, one per file; for detectors dicts
    classes: tuple[str, ...]
    decode: Callable[..., Image.Image] = read_image
    # from a path to a defect of the file's header, or None; None skips the check
    check: Callable[[Path], str | None] | None = find_defect
    findings: Findings | None = None  # what was left out; None if nothing can be
    # from a path to the bytes of its image; None if they are read in another way
    content: Callable[[Path], Content] | None = file_content

    def with_levels(self, levels: float | None) -> "ImageFiles":
        """The same, decoded with this value of white, see `read_image`; None changes nothing."""
        return self if levels is None else self._replace(decode=partial(self.decode, levels=levels))


def array_files(arrays: dict[Path, np.ndarray], targets: list[int], classes: tuple[str, ...]) -> ImageFiles:
    """Images in memory, bytes [N, H, W] or [N, H, W, 3] by file, under names <file>/<number>, which do not exist."""

    def content(name: Path) -> Content:
        pixels = _pixels(arrays, name)
        return Content(lambda: io.BytesIO(pixels.tobytes()), 0, pixels.nbytes)

    names = [path / str(i) for path, array in arrays.items() for i in range(len(array))]
    return ImageFiles(names, targets, classes, partial(_decode_array, arrays), check=None, content=content)


def _pixels(arrays: dict[Path, np.ndarray], name: Path) -> np.ndarray:
    return arrays[name.parent][int(name.name)]


def _decode_array(arrays: dict[Path, np.ndarray], name: Path) -> Image.Image:
    return Image.fromarray(_pixels(arrays, name))


def scan_folder(
    root: Path | str, split: str, classes: tuple[str, ...] | None = None, max_pixels: int = MAX_PIXELS
) -> ImageFiles:
    """Lists one split of an image folder, in sorted order. What is no image is left out and counted.

    The test images of a folder without splits are all of it. The split "" is all of it, too, or of train/ in it.
    """
    root = Path(root)
    if not root.is_dir():
        raise ValueError(
            f"data {str(root)!r} is not a folder; give one that holds <class>/, or train/<class>/ and val/<class>/"
        )
    if not split and find_classes(root, "train") is not None:
        split = "train"
    elif split == "val" and not is_divided(root) and class_folders(root):
        split = ""
    place = _split_place(root, split, classes is not None)
    findings = Findings()
    folders: dict[str, list[str]] = {}
    for name in class_folders(place, findings):
        folders.setdefault(nfc(name), []).append(name)
    class_names = sorted(folders)
    if not class_names:
        where = f"{place.name}/<class>/" if split else "<class>/"
        other = ", or divide the training images by train --val-split 0.2" if split == "val" else ""
        loose = sum((place / name).is_file() and is_image(place / name) for name in os.listdir(place))
        lie = "image lies" if loose == 1 else "images lie"
        found = f", and {loose:,} {lie} directly in it" if loose else ""
        raise ValueError(f"data {str(place)!r} holds no class folders{found}; put images into {where}{other}")
    if not split:
        _refuse_split_names(root, class_names)
    numbers = {nfc(name): i for i, name in enumerate(class_names if classes is None else classes)}
    if unknown := [name for name in class_names if name not in numbers]:
        raise ValueError(
            f"data {str(place)!r} has {join_names(unknown)}, not among the {len(numbers)} classes of training "
            f"({join_names(list(classes or ()))}); rename or remove them"
        )
    files = []
    targets = []
    for name in class_names:
        images = []
        for folder in (place / spelled for spelled in folders[name]):
            _refuse_nested_splits(folder)
            images += list_images(folder, findings)
        if not images:
            raise ValueError(f"data {str(folder)!r} holds no images; add some ({', '.join(SUFFIXES)})")
        files += images
        targets += [numbers[name]] * len(images)
    for name in sorted(os.listdir(place)):
        if (place / name).is_file() and is_image(place / name):
            findings.add("files left out", "outside the folders of classes", str(place / name))
    if split == "train":
        _count_beside(root, findings)
    names = tuple(class_names) if classes is None else classes
    decode = partial(read_image, max_pixels=max_pixels)
    return ImageFiles(files, targets, names, decode, partial(find_defect, max_pixels=max_pixels), findings)


def nfc(name: str) -> str:
    """The name in Unicode's composed form; macOS stores another one than other systems type."""
    return unicodedata.normalize("NFC", name)


def find_split(root: Path, split: str, holds: Callable[[Path], bool] = Path.is_dir) -> Path | None:
    """The folder of a split in a folder, see `SPLITS`, of those for which `holds` is true; None if there is none."""
    names = class_folders(root)
    for group in SPLITS[split]:
        found = [root / name for name in names if name.casefold() in group and holds(root / name)]
        if len(found) > 1:
            raise ValueError(
                f"data {str(root)!r} has {join_names([folder.name for folder in found])} for one split; merge them, or "
                "move one away"
            )
        if found:
            return found[0]
    return None


def class_folders(root: Path, findings: Findings | None = None) -> list[str]:
    """The names of the folders in a folder, in sorted order, without those that are hidden or of a system."""
    place, folders, _ = next(os.walk(root, onerror=_refuse))
    return sorted(name for name in folders if not _is_system(place, name, findings or Findings()))


def find_classes(root: Path, split: str) -> Path | None:
    """The folder of a split that holds folders of classes; None if there is none."""
    return find_split(root, split, lambda folder: bool(class_folders(folder)))


def is_divided(root: Path) -> bool:
    """True for a folder with train/<class>/ or val/<class>/; False if the classes lie in it, or if there is none."""
    return any(find_classes(root, split) is not None for split in SPLITS)


def has_test_classes(name: str) -> bool:
    """True for a folder with val/<class>/, or another name of this split."""
    return os.path.isdir(name) and find_classes(Path(name), "val") is not None


def list_images(folder: Path, findings: Findings | None = None) -> list[Path]:
    """The image files in a folder and its subfolders, also those behind links, in sorted order.

    A file with one of `SUFFIXES` is an image; of others the first bytes decide.
    """
    images = []
    findings = findings or Findings()
    for place, _, names in _walk(folder, findings):
        for path in (Path(place, name) for name in names):
            suffix = path.suffix.lower()
            if path.name[0] == ".":
                findings.add("files left out", "hidden", str(path))
            elif suffix in SUFFIXES or is_image(path):
                images.append(path)
            else:
                findings.add("files left out", f"no images: {suffix or 'without suffix'}", str(path))
    return sorted(images)


def _walk(folder: Path, findings: Findings) -> Iterator[tuple[str, list[str], list[str]]]:
    """`os.walk` that follows links, each folder once, without folders that are hidden or of a system."""

    seen = {_identity(above) for above in (folder, *folder.absolute().parents)}
    for place, folders, names in os.walk(folder, onerror=_refuse, followlinks=True):
        kept = []
        for name in sorted(folders, key=lambda name: (os.path.islink(os.path.join(place, name)), name)):
            path = os.path.join(place, name)
            if _is_system(place, name, findings):
                continue
            if (identity := _identity(path)) in seen:
                findings.add("files left out", "folders that a link reaches again", path)
                continue
            seen.add(identity)
            kept.append(name)
        folders[:] = kept
        yield place, folders, sorted(names)


def _refuse(error: OSError) -> None:
    raise ValueError(f"data {error.filename!r} cannot be read: {error.strerror}") from error


def _is_system(place: str, name: str, findings: Findings) -> bool:
    """True for a folder that is hidden or of a system, whose files are counted."""
    if name[0] != "." and not SYSTEM.fullmatch(name):
        return False
    path = os.path.join(place, name)
    count = sum(len(names) for _, _, names in os.walk(path))
    findings.add("files left out", "in hidden or system folders", path, count)
    return True


def _identity(folder: str | Path) -> tuple[int, int] | str:
    """What is the same for a folder and a link to it."""
    status = os.stat(folder)
    return (status.st_dev, status.st_ino) if status.st_ino else os.path.realpath(folder)


def _split_place(root: Path, split: str, tested: bool) -> Path:
    """The folder that holds the classes of a split; `tested` if a model has the classes already."""
    if not split:
        return root
    if (place := find_classes(root, split) or find_split(root, split)) is None:
        why = f"data {str(root)!r} has no folder {split}/; put images into {split}/<class>/"
        raise ValueError(why if tested else f"{why}, or pass --val-split 0.2 to test on a fifth of each class")
    return place


def _refuse_split_names(root: Path, names: list[str]) -> None:
    """Raises ValueError if a folder among classes has the name of a split."""
    if wrong := [name for name in names if name.casefold() in SPLIT_NAMES]:
        raise ValueError(
            f"data {str(root)!r} has {join_names(wrong)} among its folders, which is the name of a split and not of a "
            f"class; put its images into {wrong[0]}/<class>/, or rename or move it"
        )


def _refuse_nested_splits(folder: Path) -> None:
    """Raises ValueError if what would be a class is a data set with splits."""
    inside = [find_split(folder, split) for split in SPLITS]
    if names := [place.name for place in inside if place is not None][len(SPLITS) - 1 :]:
        raise ValueError(
            f"data {str(folder)!r} holds train and test images, the latter in {names[0]}/, which would be one class; "
            "give a folder with train/<class>/ and val/<class>/"
        )


def _count_beside(root: Path, findings: Findings) -> None:
    """Counts the folders beside those of the splits, which are not read."""
    read = {find_classes(root, split) for split in SPLITS}
    for name in class_folders(root):
        if root / name not in read:
            findings.add("files left out", "folders beside those of the splits", str(root / name))


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


def _end_workers(loaded: weakref.ref) -> None:
    """Ends the workers of a loader that is in use when Python ends, which sends SIGTERM and waits; see `outlive`."""
    if (iterator := loaded()) is not None:
        iterator._shutdown_workers()


class UnreadableImages(ValueError):
    """Images that cannot be read: one sentence with their number and at most ten of their names."""

    def __init__(self, bad: dict[Path, str], total: int, root: Path) -> None:
        names = [
            f"{path.relative_to(root) if path.is_relative_to(root) else path} ({why})"
            for path, why in sorted(bad.items())
        ]
        text = f"{len(bad)} of {total} images in {root} cannot be read: {join_names(names)}"
        super().__init__(f"{text}; repair or remove them, or pass --skip-bad-images")
        self.bad = bad
        self.total = total
        self.root = root


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


class ImageDataset(Dataset):
    """Maps a `SampleKey` to a `Sample` of some batches."""

    def __init__(self, batches: "FolderBatches", crop: dict | None) -> None:
        self.files = batches.files
        self.targets = batches.targets
        self.decode = batches.decode
        self.transform = batches.transform
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


class FolderBatches(Batches):
    """Batches of image files, decoded by worker processes.

    The order, and one seed per random crop, are drawn from PyTorch's global generator, so batches do not depend on the
    number of workers or ranks. Each rank decodes its part of a batch. Headers are checked at construction, pixels when
    an image is decoded. Iterating raises ValueError at an unreadable image unless bad images are skipped, and
    OSError if a worker dies.
    """

    per_rank = True
    dataset = ImageDataset
    stack: Callable[[list[Any]], Tensor] = staticmethod(torch.stack)
    join: Callable[[list[Any]], Any] = staticmethod(partial(torch.tensor, dtype=torch.long))

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
        self.files = files = images.files
        self.targets = images.targets
        super().__init__(images.findings)
        self.decode = images.decode
        self.content = images.content
        self.root = root
        self.total = len(files)
        self.skip_bad = skip_bad_images
        self.transform = transform
        self.world = world or World()
        if images.check is not None:
            with ThreadPoolExecutor() as pool:
                defects = zip(files, pool.map(images.check, files), strict=True)
                self.bad = {path: defect for path, defect in defects if defect}
        self._raise_if_bad()
        if self.bad:
            kept = [i for i, path in enumerate(files) if path not in self.bad]
            self.files = files = [files[i] for i in kept]
            self.targets = [self.targets[i] for i in kept]
        self._kept: weakref.finalize | None = None
        order = getattr(files, "order", partial(torch.randperm, len(files)))
        self.sampler = SeededBatches(len(files), order if crop is not None else None, repeats, batch_size, self.world)
        self.loader = DataLoader(
            self.dataset(self, crop),
            batch_sampler=self.sampler,
            num_workers=workers,
            collate_fn=self.collate,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=workers > 0,
            worker_init_fn=outlive,
            generator=torch.Generator(),  # the loader's own draws depend on the number of workers
        )

    @classmethod
    def collate(cls, samples: list[Sample]) -> Batch:
        """The samples that can be read, as a batch."""
        good = [sample for sample in samples if sample.image is not None]
        images = cls.stack([sample.image for sample in good]) if good else torch.empty(0)
        bad = {sample.path: sample.error for sample in samples if sample.image is None}
        return Batch(images, cls.join([sample.target for sample in good]), [sample.index for sample in good], bad)

    def leave_out_single(self) -> None:
        """Leaves a last batch of one image out of each epoch: BatchNorm has no statistics of it."""
        self.sampler.fewest = 2

    def __len__(self) -> int:
        return len(self.sampler)

    def iter_from(self, count: int) -> Iterator[tuple[Tensor, Any]]:
        """Iterates over an epoch without its first `count` batches, which are not decoded."""
        self.sampler.start_epoch(count)
        loaded = iter(self.loader)  # the same in every epoch, with its workers
        if self.loader.num_workers and self._kept is None:
            # Arguments of a finaliser are no cyclic garbage, in which the collector closes the pipes of workers while
            # their threads close them, and with them files that were opened between, and waits 5 s for the workers.
            self._kept = weakref.finalize(self, id, loaded)
            self._kept.atexit = False
            atexit.register(_end_workers, weakref.ref(loaded))
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
