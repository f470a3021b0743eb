"""Data sets of the Hugging Face library `datasets`: from the Hub, or from a local folder."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from .folder import ImageFiles
from .transform import MAX_PIXELS, join_names, read_image

PREFIX = "hf:"
COLUMNS = ("Image", "ClassLabel")  # types of features
TEST_SPLITS = ("validation", "valid", "val", "test")


class Source(NamedTuple):
    """What `hf:NAME[:TEST]` or `hf:NAME[:TRAIN,TEST]` names."""

    name: str  # of a data set on the Hub, or a local folder
    train: str = "train"  # training split
    test: str = ""  # test split; "" takes the first of `TEST_SPLITS` that exists


def is_hf(data: str) -> bool:
    """True if the name of a data set starts with hf:."""
    return data.startswith(PREFIX)


def source_of(data: str) -> Source:
    """The parts of a name; raises ValueError if it has another form."""
    name, colon, splits = data.removeprefix(PREFIX).partition(":")
    *train, test = splits.split(",")
    if not name or (colon and not test) or len(train) > 1 or not all(train):
        raise ValueError(f"data is {data!r}; use hf:NAME, hf:NAME:TEST_SPLIT or hf:NAME:TRAIN_SPLIT,TEST_SPLIT")
    return Source(name, train[0] if train else "train", test)


def absolute(data: str) -> str:
    """The name of a data set with an absolute path, if it is a local folder."""
    name, colon, splits = data.removeprefix(PREFIX).partition(":")
    return f"{PREFIX}{Path(name).resolve()}{colon}{splits}" if Path(name).is_dir() else data


def scan_hf(data: str, split: str, classes: tuple[str, ...] | None = None, max_pixels: int = MAX_PIXELS) -> ImageFiles:
    """Opens one split, or for "" the training split; images stay in memory-mapped files until they are decoded.

    Images are in the first column of type Image and labels in the first of type ClassLabel, whose names are the
    classes. A local folder is one written by `save_to_disk`, or any that `load_dataset` reads, such as an imagefolder
    or parquet files.
    """
    source = source_of(data)
    split = split or "train"
    rows = _open(data, source, split)
    columns = {kind: [name for name, feature in rows.features.items() if _is(feature, kind)] for kind in COLUMNS}
    for kind, names in columns.items():
        if not names:
            raise ValueError(f"data {data!r} has no column of type {kind}, but {join_names(list(rows.features))}")
    image = columns["Image"][0]
    label = columns["ClassLabel"][0]
    data_classes = tuple(rows.features[label].names)
    if classes is not None and classes != data_classes:
        raise ValueError(
            f"data {data!r} has classes {', '.join(data_classes[:10])}, the model {', '.join(classes[:10])}"
        )
    targets = list(rows[label])
    if not targets:
        raise ValueError(f"data {data!r} has no images in its {split} split")
    if unlabelled := [i for i, target in enumerate(targets) if target is None or not 0 <= target < len(data_classes)]:
        raise ValueError(f"data {data!r} has no label for image {unlabelled[0]} of its {split} split; choose another")
    encoded = rows.select_columns([image]).cast_column(image, type(rows.features[image])(decode=False))
    names = [Path(data) / str(i) for i in range(len(targets))]
    decode = partial(_decode, encoded, image, max_pixels)
    return ImageFiles(names, targets, data_classes, decode, check=None, content=None)


def _is(feature: Any, kind: str) -> bool:
    return type(feature).__name__ == kind and type(feature).__module__.startswith("datasets.")


def _decode(rows: Any, column: str, max_pixels: int, name: Path, levels: float | None = None) -> Image.Image:
    value = rows[int(name.name)][column]
    if value is None:
        raise ValueError("no image")
    if value["bytes"] is None:
        return read_image(Path(value["path"]), max_pixels, levels)
    return read_image(io.BytesIO(value["bytes"]), max_pixels, levels)


def _open(data: str, source: Source, split: str) -> Any:
    """The rows of a split, as a `datasets.Dataset`."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"data {data!r} needs the package datasets; pip install 'fastvit_triton[datasets]'") from error
    folder = Path(source.name)
    with _one_sentence(data):
        if any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
            splits = datasets.load_from_disk(str(folder))
            if not isinstance(splits, dict) and split == "train":
                return splits
            if not isinstance(splits, dict):
                raise ValueError("it has one split; pass --val-split 0.2, or save a DatasetDict with two")
            return splits[_choose(source, split, list(splits))]
        if split == "train":
            return datasets.load_dataset(source.name, split=source.train)
        chosen = source.test or _choose(source, split, datasets.get_dataset_split_names(source.name))
        return datasets.load_dataset(source.name, split=chosen)


def _choose(source: Source, split: str, names: list[str]) -> str:
    """The name of the training or test split among those that exist."""
    wanted = (source.train,) if split == "train" else (source.test,) if source.test else TEST_SPLITS
    if (chosen := next((name for name in wanted if name in names), None)) is None:
        kind = "training" if split == "train" else "test"
        advice = "" if split == "train" else ", or pass --val-split 0.2"
        raise ValueError(f"it has the splits {', '.join(names)}; name the {kind} split, as hf:NAME:TRAIN,TEST{advice}")
    return chosen


@contextmanager
def _one_sentence(data: str) -> Iterator[None]:
    """Converts the errors with which the library refuses a name, a split or a file to ValueError."""
    try:
        yield
    except (OSError, LookupError, ValueError, RuntimeError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"data {data!r} cannot be loaded: {first}") from error
