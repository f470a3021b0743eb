"""Image folders: `train/<class>/…` and `val/<class>/…`, decoded by worker processes, never held in memory at once."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from .image import BROKEN, SUFFIXES, Transform, defect, listing, read
from .parallel import World
from .ranges import Count, Number, checked
from .sampler import RepeatedAugmentation


def scan(
    root: Path, split: str, classes: tuple[str, ...] | None = None
) -> tuple[list[Path], list[int], tuple[str, ...]]:
    """Lists one split of an image folder, in sorted order.

    Hidden files and files with other suffixes are passed over. Refuses a missing folder, a split without classes, a
    class without images, and a class that is not among `classes`.

    Args:
        root: holds `train/` and `val/`.
        split: "train" or "val".
        classes: the names that the model knows; None takes the folders found.

    Returns:
        Files, their class numbers, and the class names.
    """
    if not root.is_dir():
        raise ValueError(
            f"data {str(root)!r} is no folder; give one that holds train/<class>/ and val/<class>/ with images"
        )
    if not (root / split).is_dir():
        raise ValueError(f"data {str(root)!r} has no folder {split}/; put images into {split}/<class>/")
    found = sorted(entry.name for entry in (root / split).iterdir() if entry.is_dir() and entry.name[0] != ".")
    if not found:
        raise ValueError(f"data {str(root / split)!r} holds no class folders; put images into {split}/<class>/")
    strangers = [name for name in found if classes is not None and name not in classes]
    if strangers:
        raise ValueError(
            f"data {str(root / split)!r} has {listing(strangers)}, not among the {len(classes)} classes of training "
            f"({listing(list(classes))}); rename or remove"
        )
    classes = classes or tuple(found)
    files, targets = [], []
    for name in found:
        folder = root / split / name
        found_images = (path for path in folder.rglob("*") if is_image(path))
        images = sorted(p for p in found_images if not any(part[0] == "." for part in p.relative_to(folder).parts))
        if not images:
            raise ValueError(f"data {str(root / split / name)!r} holds no images; add some ({', '.join(SUFFIXES)})")
        files += images
        targets += [classes.index(name)] * len(images)
    return files, targets, classes


def is_image(path: Path) -> bool:
    """Judged by its name."""
    return path.suffix.lower() in SUFFIXES and path.name[0] != "."


def complaint(bad: dict[Path, str], total: int, root: Path) -> str:
    """One sentence that counts and names pictures which cannot be read: ten names at most."""
    names = [f"{path.relative_to(root)} ({why})" for path, why in sorted(bad.items())]
    return f"{len(bad)} of {total} images in {root} cannot be read: {listing(names)}"


class FolderBatches:
    """Batches of pictures from files, decoded by worker processes.

    Each picture's random crop has its own seed, drawn with the order from PyTorch's global generator, so the batches
    are the same for any number of workers, and a process decodes its own part of each. Headers are read now; the rest
    of a file when its turn comes. Refuses unreadable pictures unless `skip_bad_images`, then `bad` maps each to the
    reason. `indices` says which pictures the last batch held.

    Args:
        root: the folder that holds them; for messages.
        files: pictures; `files.order()`, if there is one, draws their random order.
        targets: their class numbers.
        transform: to tensors.
        batch_size: pictures per batch, all processes together; fewer where some are skipped.
        crop: keyword arguments of a random crop, for training in random order; None takes centres, in order.
        workers: 0 decodes in this process.
        skip_bad_images: leave unreadable pictures out.
        repeats: looks at each picture in an epoch of repeated augmentation; 1 is off.
        decode: from a file's path to a picture.
        check: from a file's path to what is wrong with its header, or None.
        world: processes that share each batch; one without a picture gets [0, C, H, W].
    """

    dealt = True

    @checked
    def __init__(
        self,
        root: Path,
        files: Sequence[Path],
        targets: list[int],
        transform: Transform,
        *,
        batch_size: Count,
        crop: dict | None = None,
        workers: Number = 0,
        skip_bad_images: bool = False,
        repeats: Count = 1,
        decode: Callable[[Path], Image.Image] = read,
        check: Callable[[Path], str | None] | None = defect,
        world: World | None = None,
    ) -> None:
        self.root, self.total, self.skip, self.decode = root, len(files), skip_bad_images, decode
        self.bad: dict[Path, str] = {}
        if check is not None:
            with ThreadPoolExecutor() as pool:
                self.bad = {path: why for path, why in zip(files, pool.map(check, files), strict=True) if why}
        self._refuse()
        if self.bad:
            kept = [(path, target) for path, target in zip(files, targets, strict=True) if path not in self.bad]
            files, targets = [path for path, _ in kept], [target for _, target in kept]
        self.files, self.indices, self.world = files, [], world or World()
        self.transform = transform
        order = getattr(files, "order", partial(torch.randperm, len(files)))
        self.keys = _Keys(len(files), order if crop is not None else None, repeats, batch_size, self.world)
        self.loader = DataLoader(
            _Pictures(files, targets, transform, crop, decode),
            batch_sampler=self.keys,
            num_workers=workers,
            collate_fn=_collate,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=workers > 0,
            generator=torch.Generator(),  # the loader's own draws depend on its workers; ours must not
        )

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.after(0)

    def after(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """An epoch without its first `count` batches, which are not decoded."""
        self.keys.draw(count)
        return self._stream(iter(self.loader))

    def _stream(self, loaded: Iterator) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            try:
                images, targets, indices, bad = next(loaded)
            except StopIteration:
                return
            except RuntimeError as error:
                if "DataLoader worker" not in str(error):
                    raise
                raise OSError(
                    "a process that decodes images died, perhaps for want of memory; lower --workers and --resume"
                ) from error
            self.bad.update(bad)
            self._refuse()
            self.indices = indices
            if len(targets) or self.world.size > 1:
                shape = (len(self.transform.mean), *self.transform.size)
                yield images if len(targets) else images.new_empty(0, *shape), targets

    def picture(self, i: int) -> Tensor:
        """The i-th readable picture as it is shown, [C, H, W] in [0, 1]. Count after a pass over all batches."""
        readable = [path for path in self.files if path not in self.bad]
        return self.transform.restore(self.transform(self.decode(readable[i])))

    def _refuse(self) -> None:
        if self.bad and not self.skip:
            raise ValueError(complaint(self.bad, self.total, self.root) + "; mend or remove, or pass --skip-bad-images")


class _Keys(Sampler):
    """(index, seed) of each picture, batch by batch: in order with no seed, or shuffled, all drawn as an epoch starts.

    All processes draw the same, and each takes its part of every batch.
    """

    def __init__(
        self, count: int, order: Callable[[], Tensor] | None, repeats: int, batch_size: int, world: World
    ) -> None:
        self.count, self.order, self.batch_size, self.world, self.keys = count, order, batch_size, world, []
        self.looks = RepeatedAugmentation(count, repeats) if repeats > 1 else None

    def __len__(self) -> int:
        return -(-(self.count if self.looks is None else len(self.looks)) // self.batch_size)

    def draw(self, skip: int) -> None:
        """A new epoch, less its first batches."""
        if self.order is None:
            self.keys = [(i, None) for i in range(self.count)]
        else:
            if self.looks is None:
                order = self.order().tolist()
            else:
                self.looks.epoch = torch.randint(2**62, ()).item()
                order = list(self.looks)
            seeds = torch.randint(2**62, (len(order),)).tolist()
            self.keys = list(zip(order, seeds, strict=True))
        self.keys = self.keys[skip * self.batch_size :]

    def __iter__(self) -> Iterator[list[tuple[int, int | None]]]:
        for start in range(0, len(self.keys), self.batch_size):
            batch = self.keys[start : start + self.batch_size]
            yield [batch[i] for i in self.world.part(torch.arange(len(batch))).tolist()]


class _Pictures(Dataset):
    """(image or None, class number, index, path, why there is none)."""

    def __init__(
        self,
        files: Sequence[Path],
        targets: list[int],
        transform: Transform,
        crop: dict | None,
        decode: Callable[[Path], Image.Image],
    ) -> None:
        self.files, self.targets, self.decode = files, targets, decode
        self.transform, self.crop = transform, crop or {}

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, key: tuple[int, int | None]) -> tuple[Tensor | None, int, int, Path, str]:
        index, seed = key
        path, target = self.files[index], self.targets[index]
        try:
            return self.transform(self.decode(path), seed, **self.crop), target, index, path, ""
        except BROKEN as error:
            return None, target, index, path, getattr(error, "strerror", None) or str(error) or type(error).__name__


def _collate(
    rows: list[tuple[Tensor | None, int, int, Path, str]],
) -> tuple[Tensor, Tensor, list[int], dict[Path, str]]:
    good = [(image, target, index) for image, target, index, _, _ in rows if image is not None]
    images = torch.stack([image for image, _, _ in good]) if good else torch.empty(0)
    bad = {path: why for image, _, _, path, why in rows if image is None}
    targets = torch.tensor([target for _, target, _ in good], dtype=torch.long)
    return images, targets, [index for _, _, index in good], bad
