"""Divides one list of labelled images into training and test images, by class and seed."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...files import replacing
from .folder import ImageFiles
from .transform import join_names

SPLIT = "split.json"  # in the output folder of a run


@dataclass(frozen=True)
class Split:
    """How the images of a data set without a test split are divided.

    Of each class, a fraction of the images is for testing: those whose name has the smallest hash with the seed, so the
    division depends neither on the platform nor on the order of the files.
    """

    fraction: float  # of each class, in (0, 1); at least one image is for testing, and at least one for training
    seed: int  # of the hash
    # names of the test images, as an earlier run stored them; images that it does not name are for training. None
    # divides anew
    test: frozenset[str] | None = None

    def part(self, images: ImageFiles, root: Path, split: str) -> ImageFiles:
        """The training or the test images."""
        names = [path.relative_to(root).as_posix() for path in images.files]
        test = self._test_names(names, images) if self.test is None else self.test
        kept = [i for i, name in enumerate(names) if (name in test) == (split == "val")]
        return images._replace(files=[images.files[i] for i in kept], targets=[images.targets[i] for i in kept])

    def fingerprint(self, digest: str) -> dict[str, object]:
        """What a weights file says of the split; `digest` is that of the test images, see `FolderBatches.digest`."""
        return {"val_split": self.fraction, "seed": self.seed, "test": digest}

    def _test_names(self, names: list[str], images: ImageFiles) -> set[str]:
        members: dict[int, list[str]] = {}
        for name, target in zip(names, images.targets, strict=True):
            members.setdefault(target, []).append(name)
        if small := [images.classes[target] for target, group in sorted(members.items()) if len(group) < 2]:
            text = "add images, or remove the class"
            raise ValueError(f"--val-split needs two images of each class, and {join_names(small)} has one; {text}")
        test: set[str] = set()
        for group in members.values():
            count = min(max(round(len(group) * self.fraction), 1), len(group) - 1)
            test.update(sorted(group, key=self._hash)[:count])
        return test

    def _hash(self, name: str) -> bytes:
        return hashlib.blake2b(f"{self.seed}/{name}".encode("utf-8", "surrogateescape")).digest()


def write_split(path: Path, split: Split, test: Any) -> None:
    """Writes a split with the names of its test images, atomically."""
    names = [file.relative_to(test.root).as_posix() for file in test.files]
    entries = {"val_split": split.fraction, "seed": split.seed, "test": names}
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(entries, indent=1), encoding="utf-8")


def read_split(path: Path, split: Split) -> Split:
    """The split with the test images that a run stored at `path`; `split` itself if there is no such file."""
    if not path.exists():
        return split
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        fraction, seed, names = (entries[name] for name in ("val_split", "seed", "test"))
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged; restore it, or delete it to divide the images anew") from error
    if (fraction, seed) != (split.fraction, split.seed) or not isinstance(names, list):
        raise ValueError(f"{path} is not of this run; restore it, or delete it to divide the images anew")
    return Split(split.fraction, split.seed, frozenset(map(str, names)))
