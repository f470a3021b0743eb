"""What readers of data sets leave out or change: counted by kind and reason, with the first place of each."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

Kind = Literal[
    "files left out",
    "objects left out",
    "images without labels",
    "boxes changed",
    "sizes against the annotations",
    "odd",
]

UNLABELLED = "in a folder without any label file"
CORNERS = "boxes that look like corners"


class DataWarning(UserWarning):
    """A data set was read, and labels of it were left out."""


class Finding(NamedTuple):
    """One row of what a reader found."""

    kind: Kind  # what was left out or changed
    reason: str  # why, in a few words
    count: int  # type: ignore[assignment]  # hides tuple.count
    first: str  # the first of them: a file, and the line or number in it


class Findings:
    """What the reader of one split leaves out or changes, in the order in which it was found."""

    def __init__(self) -> None:
        self.image_folders: set[Path] = set()  # hold the listed images, and may hold others
        # hold the text files of the images in another folder, and may hold others
        self.label_folders: dict[Path, Path] = {}
        self.labels = 0  # number of text files that were read
        self._rows: dict[tuple[Kind, str], Finding] = {}

    def add(self, kind: Kind, reason: str, where: str, count: int = 1) -> None:
        """Counts `count` more of a kind; `where` is kept if it is the first."""
        known = self._rows.get((kind, reason), Finding(kind, reason, 0, where))
        self._rows[kind, reason] = known._replace(count=known.count + count)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._rows.values())

    def of(self, kind: Kind) -> list[Finding]:
        """The rows of a kind."""
        return [row for row in self if row.kind == kind]

    def total(self, kind: Kind) -> int:
        """How many of a kind."""
        return sum(row.count for row in self.of(kind))

    def sentence(self, kind: Kind) -> str:
        """The reasons of a kind with their numbers and the first place of each."""
        return "; ".join(f"{row.count:,} {row.reason}, the first: {row.first}" for row in self.of(kind))

    def lost_labels(self) -> str:
        """A sentence on objects and labels that are missing or look wrong; empty if there are none.

        An image without a label file has no objects, which is usual; a folder without any has lost them.
        """
        rows = [row for row in self if row.kind == "objects left out" or row.reason in (UNLABELLED, CORNERS)]
        return "; ".join(f"{row.kind.split()[0]} {row.reason}: {row.count:,}, the first: {row.first}" for row in rows)


def warn_of(name: str, findings: Findings) -> None:
    """Warns of labels that the reader of a data set left out; `Run` and the commands print a table instead."""
    if text := findings.lost_labels():
        warnings.warn(f"data {name!r}, left out or missing: {text}", DataWarning, stacklevel=3)


@contextmanager
def quiet() -> Iterator[None]:
    """Context without these warnings, for callers that say the same by other means."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataWarning)
        yield
