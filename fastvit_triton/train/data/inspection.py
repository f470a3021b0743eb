"""The check of a data set before training: one short table, and what would make labels or scores wrong."""

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch

from ...files import printable
from .findings import CORNERS, UNLABELLED, Findings, Kind
from .folder import Content, file_content, list_images
from .transform import DECODE_ERRORS, join_names, reason_of, usual_white

ALLOW = {
    "lost-objects": "objects that cannot be used",
    "no-labels": "folders of images without any label file",
    "corners": "boxes that look like corners",
    "shared-images": "test images that are training images too",
    "two-classes": "images that stand in two classes",
    "one-class": "a classifier of one class",
}
SHARE = 0.01  # of objects or images; less than that is said only: no score changes by more than a point
DARK = 255 // 8  # white in images of 12 of 16 bits is 16
SAMPLE = 32  # images of a split that are decoded
COMPARED = 10_000  # images of a split that are compared with the others
PIECE, PIECES = 4096, 4  # bytes of a file that are compared first
CHUNK = 64  # files for a thread at a time
WHOLE = 2**30  # bytes of whole files that are read to confirm it
REPAIR = "repair or remove them, or pass --skip-bad-images"
ORPHANS = "label files without an image"
KINDS = ("training", "test")
SHOWN = 10  # classes with a row of their own


class UnfitData(ValueError):
    """A data set that would make labels or scores wrong; `text` is the table of its inspection."""

    def __init__(self, message: str, text: str) -> None:
        super().__init__(message)
        self.text = text


class Problem(NamedTuple):
    """What would make labels or scores wrong, and what to do about it."""

    what: str
    remedy: str


@dataclass
class Inspection:
    """What a data set holds."""

    name: str
    # of the table: label, number in training and test images (None leaves the cell empty), and a remark
    rows: list[tuple[str, int | None, int | None, str]] = field(default_factory=list)
    problems: dict[str, Problem] = field(default_factory=dict)  # by name, what would be wrong
    allowed: Collection[str] = ()  # names of `problems` that are said and not refused

    def add_problem(self, name: str, what: str, remedy: str) -> None:
        """Adds a problem, unless one of that name is known."""
        remedy += f", or pass --allow {name}" if name in ALLOW else ""
        self.problems.setdefault(name, Problem(what, remedy))

    @property
    def text(self) -> str:
        """The table, in lines; files are relative to the data set."""
        width = max(len(label) for label, *_ in self.rows)
        lines = [f"{'':{width}} {'training':>10} {'test':>10}"]
        for label, train, test, remark in self.rows:
            cells = [f"{'' if number is None else f'{number:,}':>10}" for number in (train, test)]
            lines.append(f"{label:{width}} {' '.join(cells)}  {remark}".rstrip())
        lines += [f"allowed: {problem.what}" for name, problem in self.problems.items() if name in self.allowed]
        lines = [self.name, *(line.replace(os.path.join(self.name, ""), "") for line in lines)]
        return printable("\n".join(lines))

    @property
    def refusal(self) -> str:
        """A sentence on the problems that are not allowed; empty if there are none."""
        wrong = [problem for name, problem in self.problems.items() if name not in self.allowed]
        return "; ".join(f"{problem.what}; {problem.remedy}" for problem in wrong)

    def refuse(self) -> None:
        """Raises `UnfitData` if there is a problem that is not allowed."""
        if self.refusal:
            raise UnfitData(f"data {self.name!r}: {self.refusal}", self.text)


def inspect(
    data: Any, loss: str, *, allow: Collection[str] = (), quick: bool = False, skip_bad_images: bool = False
) -> Inspection:
    """Counts what a data set holds and what its readers left out, and looks for what would be wrong."""
    found = Inspection(str(data.name), allowed=allow)
    parts = (data.train, data.test)
    _count(found, data.classes, parts, loss)
    findings = [part.findings for part in parts]
    if any(part.image_folders or part.label_folders for part in findings):
        _leftovers(findings, [path for part in parts for path in part.files])
    _list(found, findings)
    _check_labels(found, findings, parts)
    if quick or not all(getattr(part, "content", None) for part in parts):
        found.rows.append(("images in both", None, None, "not compared"))
    else:
        _compare(found, parts, data.classes)
    for part, kind in zip(parts, KINDS, strict=True):
        _check_pixels(found, part, kind, data.transform.levels)
    if skip_bad_images:
        found.problems.pop("unreadable", None)
    return found


def _count(found: Inspection, classes: Sequence[str], parts: Sequence[Any], loss: str) -> None:
    """Rows of images, objects, and both by class."""
    images = [len(part.targets) for part in parts]
    found.rows.append(("images", images[0], images[1], ""))
    bad = [part.bad for part in parts]
    if any(bad):
        path, why = next(item for part in bad for item in part.items())
        where = f"the first: {path} ({why})"
        found.rows.append(("  cannot be read", len(bad[0]), len(bad[1]), where))
        number = sum(map(len, bad))
        found.add_problem(
            "unreadable", f"{number:,} of {sum(images) + number:,} images cannot be read, {where}", REPAIR
        )
    detector = loss == "detection"
    labels = [[t["labels"] for t in part.targets] if detector else [torch.as_tensor(part.targets)] for part in parts]
    counts = [Counter(number for numbers in part for number in numbers.tolist()) for part in labels]
    if detector:
        found.rows.append(("objects", counts[0].total(), counts[1].total(), ""))
        empty = [sum(not len(target["labels"]) for target in part.targets) for part in parts]
        found.rows.append(("images without objects", empty[0], empty[1], ""))
    named = [i for i, name in enumerate(classes) if name]
    shown = named if len(named) <= SHOWN else sorted(named, key=lambda i: counts[0][i])[:3]
    found.rows.append((f"classes: {len(named):,}{'' if len(named) <= SHOWN else ', the smallest'}", None, None, ""))
    found.rows += [(f"  {classes[i]}", counts[0][i], counts[1][i], "") for i in shown]
    if missing := [classes[i] for i in named if not counts[0][i]]:
        found.rows.append(
            (f"  without training {'objects' if detector else 'images'}", len(missing), None, join_names(missing))
        )
    spellings = Counter(classes[i].casefold().strip() for i in named)
    if alike := [classes[i] for i in named if spellings[classes[i].casefold().strip()] > 1]:
        found.rows.append(("  that differ in case only", len(alike), None, join_names(alike)))
    if loss in ("softmax", "sigmoid", "bce") and len(named) == 1:
        what = f"it has one class, {classes[named[0]]}, of which any classifier is right"
        found.add_problem("one-class", what, "give a folder for each class")


def _leftovers(findings: Sequence[Findings], files: Iterable[Path]) -> None:
    """Counts files beside those of the data set that no split reads."""
    images = set(files)
    seen: set[Path] = set()
    for part in findings:
        for folder in sorted(part.image_folders - seen):
            for path in list_images(folder) if folder.is_dir() else ():
                if path not in images:
                    images.add(path)
                    part.add("files left out", "images that are not listed", str(path))
        for folder in sorted(part.label_folders.keys() - seen):
            stems = {path.stem for path in _entries(part.label_folders[folder]) if path.suffix.lower() != ".txt"}
            for path in _entries(folder):
                if path.suffix.lower() == ".txt" and path.name != "classes.txt" and path.stem not in stems:
                    part.add("files left out", ORPHANS, str(path))
        seen |= part.image_folders | part.label_folders.keys()


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _list(found: Inspection, findings: Sequence[Findings]) -> None:
    """Rows of what the readers found."""
    for kind in get_args(Kind):
        rows: dict[str, list[Any]] = {}
        for i, part in enumerate(findings):
            for row in part.of(kind):
                rows.setdefault(row.reason, [0, 0, row.first])[i] += row.count
        if rows:
            found.rows.append((kind, sum(row[0] for row in rows.values()), sum(row[1] for row in rows.values()), ""))
            found.rows += [
                (f"  {reason}", train, test, "" if reason == "equal" else f"the first: {first}")
                for reason, (train, test, first) in rows.items()
            ]


def _check_labels(found: Inspection, findings: Sequence[Findings], parts: Sequence[Any]) -> None:
    """Problems of objects and labels."""
    for part, batches, kind in zip(findings, parts, KINDS, strict=True):
        lost = part.total("objects left out")
        corners = [row for row in part if row.reason == CORNERS]
        count = lost + sum(len(target["labels"]) for target in batches.targets) if lost or corners else 0
        if lost > SHARE * count:
            what = f"{lost:,} of {count:,} objects in its {kind} images cannot be used"
            found.add_problem("lost-objects", f"{what} ({part.sentence('objects left out')})", "correct them")
        for row in corners:
            what = f"{row.count:,} of {count:,} reach far beyond the image as x, y, width, height, and lie in it as"
            what = f"the boxes of its {kind} images look like corners: {what} x1, y1, x2, y2, the first: {row.first}"
            found.add_problem("corners", what, "write them as x, y, width, height")
        for row in part:
            if row.reason == ORPHANS and row.count > SHARE * (row.count + part.labels):
                what = f"{row.count:,} label files of its {kind} images belong to no image"
                found.add_problem("lost-objects", f"{what}, the first: {row.first}", "rename or remove them")
            if row.reason == UNLABELLED:
                what = f"{row.count:,} of its {kind} images are in folders without any label file"
                remedy = "add the files, empty ones for images without objects"
                found.add_problem("no-labels", f"{what}, the first: {row.first}", remedy)


def _compare(found: Inspection, parts: Sequence[Any], classes: Sequence[str]) -> None:
    """Rows and problems of images that stand twice."""
    files = [list(part.files) for part in parts]
    targets = [list(part.targets) for part in parts]
    groups, compared = equal_files(files[0], files[1], [part.content for part in parts])
    labels = [dict(zip(part, numbers, strict=True)) for part, numbers in zip(files, targets, strict=True)]
    both = [group for group in groups if group[0] and group[1]]
    shared = [path for group in both for path in group[1]]
    where = f"the first: {shared[0]} is {both[0][0][0]}" if shared else ""
    if compared < len(files[1]):
        where = f"of {compared:,} that were compared; {where}".rstrip("; ")
    found.rows.append(("images in both", None, len(shared), where))
    if len(shared) > SHARE * compared:
        what = f"{len(shared):,} of {compared:,} test images are training images too, {where}"
        found.add_problem("shared-images", what, "remove them from one side")
    twice = [sum(max(len(group[i]) - 1, 0) for group in groups) for i in (0, 1)]
    if any(twice):
        path = next(group[i][1] for group in groups for i in (0, 1) if len(group[i]) > 1)
        found.rows.append(("images that stand twice", twice[0], twice[1], f"the first: {path}"))
    if isinstance(targets[0][0], dict):  # of a detector
        return
    unlike = []
    for group in groups:
        members = [(path, classes[int(labels[i][path])]) for i in (0, 1) for path in group[i]]
        if len({name for _, name in members}) > 1:
            unlike.append(members)
    if unlike:
        (one, name), *rest = unlike[0]
        other, another = next(member for member in rest if member[1] != name)
        number = sum(map(len, unlike))
        where = f"the first: {one} ({name}) is {other} ({another})"
        found.rows.append(("images in two classes", number, None, where))
        if number > SHARE * sum(map(len, files)):
            what = f"{number:,} images stand in two classes, {where}"
            found.add_problem("two-classes", what, "remove them from one")


def equal_files(
    train: Sequence[Path],
    test: Sequence[Path],
    contents: Sequence[Callable[[Path], Content]] = (file_content, file_content),
) -> tuple[list[tuple[list[Path], list[Path]]], int]:
    """Groups of images with the same bytes, as (training, test) files, and how many test files were compared.

    At most `COMPARED` test files are, evenly spaced; more training files than that are compared with these only. Sizes
    choose the candidates, pieces of `PIECE` bytes most of the pairs, and whole files confirm them.
    """
    paths = [*train, *test[:: -(-len(test) // COMPARED)]]

    def content(i: int) -> Content:
        return contents[i >= len(train)](paths[i])

    with ThreadPoolExecutor() as pool:
        sizes = list(_map(pool, lambda i: content(i).size, range(len(paths))))
        wanted = {size for size, count in Counter(sizes).items() if count > 1 and size > 0}
        if len(train) > COMPARED:
            wanted &= set(sizes[len(train) :])
        candidates = [i for i, size in enumerate(sizes) if size in wanted]
        pieces = _map(pool, lambda i: _hash(content(i), PIECES), candidates)
        alike: defaultdict[tuple[int, bytes], list[int]] = defaultdict(list)
        for i, digest in zip(candidates, pieces, strict=True):
            alike[sizes[i], digest].append(i)
        budget = WHOLE
        groups: defaultdict[bytes, tuple[list[Path], list[Path]]] = defaultdict(lambda: ([], []))
        for (size, _), members in alike.items():
            if len(members) < 2 or (budget := budget - size * len(members)) < 0:
                continue
            for i, digest in zip(members, pool.map(lambda i: _hash(content(i)), members), strict=True):
                groups[digest][i >= len(train)].append(paths[i])
    return [group for group in groups.values() if sum(map(len, group)) > 1], len(paths) - len(train)


def _map(pool: Executor, function: Callable[[int], Any], values: Sequence[int]) -> Iterator[Any]:
    """`pool.map` in tasks of `CHUNK` values, as one costs more than a small read."""
    chunks = (values[i : i + CHUNK] for i in range(0, len(values), CHUNK))
    return chain.from_iterable(pool.map(lambda chunk: [function(i) for i in chunk], chunks))


def _hash(content: Content, pieces: int | None = None) -> bytes:
    """A hash of the bytes of an image, or of as many pieces of them, evenly spaced."""
    open_file, first, size = content
    starts = range(0, size, 2**20) if pieces is None else [size * i // pieces for i in range(pieces)]
    total = hashlib.blake2b(digest_size=16)
    try:
        with open_file() as file:
            for start in starts:
                file.seek(first + start)
                total.update(file.read(min(2**20 if pieces is None else PIECE, size - start)))
    except OSError:
        return os.urandom(16)  # equal to none
    return total.digest()


def _check_pixels(found: Inspection, batches: Any, kind: str, levels: float | None) -> None:
    """Rows and problems of a sample of images: files that cannot be decoded, and images without bright pixels."""
    files: Any = getattr(batches, "files", ())
    chosen = [files[i] for i in range(0, len(files), -(-len(files) // SAMPLE))] if len(files) else []

    def brightest(path: Path) -> tuple[float | None, int] | str:
        try:
            return usual_white(path), batches.decode(path).convert("L").getextrema()[1]
        except DECODE_ERRORS as error:
            return reason_of(error)

    with ThreadPoolExecutor() as pool:
        results = list(zip(chosen, pool.map(brightest, chosen), strict=True))
    if bad := [(path, why) for path, why in results if isinstance(why, str) and path not in batches.bad]:
        path, why = bad[0]
        what = f"{len(bad)} of {len(chosen)} {kind} images cannot be decoded, the first: {path} ({why})"
        found.rows.append(("pixels", None, None, what))
        found.add_problem("unreadable", what, REPAIR)
    peaks: defaultdict[float | None, int] = defaultdict(int)  # by depth: one photograph may be dark, but not all
    for _, result in results:
        if not isinstance(result, str):
            peaks[result[0]] = max(peaks[result[0]], result[1])
    for white, peak in peaks.items():
        if peak > DARK:
            continue
        values = f"about {peak / 255 * white:,.4g} of {white:,g}" if white else f"{peak} of 255"
        found.rows.append(("brightest pixel", None, None, f"{values}, in {len(chosen)} {kind} images"))
        if white and levels is None:
            remedy = f"pass --levels with the value of white, such as 4095 for 12 bits, or --levels {white:g}"
            found.add_problem("levels", f"its {kind} images of more than 8 bits reach {values} only", remedy)
