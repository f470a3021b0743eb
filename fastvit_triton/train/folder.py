"""Image folders: `train/<class>/…` and `val/<class>/…`, decoded by worker processes, never held in memory at once."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from .image import BROKEN, SUFFIXES, Transform, defect, listing, read


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
    are the same for any number of workers. Headers are read now; the rest of a file when its turn comes. Refuses
    unreadable pictures unless `skip_bad_images`, then `bad` maps each to the reason.

    Args:
        root: the folder that holds `train/` and `val/`; for messages.
        files: pictures.
        targets: their class numbers.
        transform: to tensors.
        batch_size: pictures per batch; fewer where some are skipped.
        crop: keyword arguments of a random crop, for training in random order; None takes centres, in order.
        workers: 0 decodes in this process.
        skip_bad_images: leave unreadable pictures out.
    """

    def __init__(
        self,
        root: Path,
        files: list[Path],
        targets: list[int],
        transform: Transform,
        *,
        batch_size: int,
        crop: dict | None = None,
        workers: int = 0,
        skip_bad_images: bool = False,
    ) -> None:
        self.root, self.total, self.skip = root, len(files), skip_bad_images
        with ThreadPoolExecutor() as pool:
            self.bad = {path: why for path, why in zip(files, pool.map(defect, files), strict=True) if why}
        self._refuse()
        kept = [(path, target) for path, target in zip(files, targets, strict=True) if path not in self.bad]
        self.files = [path for path, _ in kept]
        self.transform = transform
        self.loader = DataLoader(
            _Pictures(kept, transform, crop),
            batch_size=batch_size,
            sampler=_Keys(len(kept), random=crop is not None),
            num_workers=workers,
            collate_fn=_collate,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=workers > 0,
            generator=torch.Generator(),  # the loader's own draws depend on its workers; ours must not
        )

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, targets, bad in self.loader:
            self.bad.update(bad)
            self._refuse()
            if len(targets):
                yield images, targets

    def picture(self, i: int) -> Tensor:
        """The i-th readable picture as it is shown, [C, H, W] in [0, 1]. Count after a pass over all batches."""
        readable = [path for path in self.files if path not in self.bad]
        return self.transform.restore(self.transform(read(readable[i])))

    def _refuse(self) -> None:
        if self.bad and not self.skip:
            raise ValueError(complaint(self.bad, self.total, self.root) + "; mend or remove, or pass --skip-bad-images")


class _Keys(Sampler):
    """(index, seed) of each picture: in order with no seed, or shuffled, all drawn when the epoch starts."""

    def __init__(self, count: int, random: bool) -> None:
        self.count, self.random = count, random

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[int, int | None]]:
        if not self.random:
            return iter([(i, None) for i in range(self.count)])
        order, seeds = torch.randperm(self.count), torch.randint(2**62, (self.count,))
        return iter(list(zip(order.tolist(), seeds.tolist(), strict=True)))


class _Pictures(Dataset):
    """(image or None, class number, path, why there is none)."""

    def __init__(self, files: list[tuple[Path, int]], transform: Transform, crop: dict | None) -> None:
        self.files, self.transform, self.crop = files, transform, crop or {}

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, key: tuple[int, int | None]) -> tuple[Tensor | None, int, Path, str]:
        index, seed = key
        path, target = self.files[index]
        try:
            return self.transform(read(path), seed, **self.crop), target, path, ""
        except BROKEN as error:
            return None, target, path, str(error) or type(error).__name__


def _collate(rows: list[tuple[Tensor | None, int, Path, str]]) -> tuple[Tensor, Tensor, dict[Path, str]]:
    good = [(image, target) for image, target, _, _ in rows if image is not None]
    images = torch.stack([image for image, _ in good]) if good else torch.empty(0)
    bad = {path: why for image, _, path, why in rows if image is None}
    return images, torch.tensor([target for _, target in good], dtype=torch.long), bad
