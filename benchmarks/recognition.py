"""Writes fastvit_triton/convert/known.json: fingerprints of the classes whose forwards `optimize` replaces.

    python -m benchmarks.recognition

Reads the installed timm, transformers and vit-pytorch, and adds their fingerprints to those of other releases in the
file. A row names a registered class, the classes with the same code, and the releases in which they were seen; see
fastvit_triton.convert.recognition. `python -m benchmarks.recognition --list` shows, for the installed transformers, the
classes of vision models that are recognised, by registered class; it imports every model and takes minutes.
`python -m benchmarks.recognition --gain FILE` counts the weights of linear layers in fused modules of each vision tower
of transformers (coverage_towers.txt) twice, with recognition and with registered names alone, and writes both.
"""

import argparse
import importlib
import json
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from unittest.mock import patch

from torch import nn

from fastvit_triton import optimize
from fastvit_triton.convert import conversion, forwards, third_party  # registers the forwards
from fastvit_triton.convert.forwards import FORWARDS, INNER
from fastvit_triton.convert.recognition import KNOWN, Unreadable, fingerprint, recognised

from . import coverage
from .result_file import as_json, origin, write_text

PACKAGES = ("timm", "transformers", "vit_pytorch")
assert conversion.LEFT is not None


def main() -> None:
    """Command line; see the module's documentation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="show the recognised classes instead of writing the file")
    parser.add_argument("--gain", type=Path, help="write what recognition gains to this file instead")
    warnings.simplefilter("ignore")
    arguments = parser.parse_args()
    if arguments.gain:
        rows = dict(gains())
        write_text(arguments.gain, as_json(origin() | dict(rows=rows)))
        print(f"{sum(named < share for share, named in rows.values())} of {len(rows)} classes gain")
        return
    if arguments.list:
        for name, classes in recognised_classes().items():
            print(f"{name}: {', '.join(classes)}")
        return
    rows = merged(json.loads(KNOWN.read_text()) if KNOWN.exists() else {}, fingerprints(portable()))
    write_text(KNOWN, as_json(rows))
    print(f"{KNOWN}: {len(rows)} fingerprints")


def portable() -> list[str]:
    """The registered classes of PACKAGES whose code may be recognised under other names."""
    by_code = [name for name, forwards in FORWARDS.items() if not any(forward.by_name for forward in forwards)]
    return sorted(name for name in (*by_code, *INNER) if name.partition(".")[0] in PACKAGES)


def fingerprints(names: Iterable[str]) -> dict[str, dict]:
    """Rows of the file for these classes of the installed packages."""
    rows: dict[str, dict] = {}
    for name in sorted(names):
        package, cls = name.partition(".")[0], _class(name)
        if cls is None:
            continue
        try:
            row = rows.setdefault(fingerprint(cls), {"as": name, "classes": [], "releases": []})
        except Unreadable as error:
            print(f"{name}: {error}")
            continue
        row["classes"].append(name)
        release = f"{package} {metadata.version(package)}"
        row["releases"] += [] if release in row["releases"] else [release]
    return rows


def merged(old: dict[str, dict], new: dict[str, dict]) -> dict[str, dict]:
    """Rows of both, sorted by registered class; releases and classes are united."""
    rows = {digest: dict(row) for digest, row in old.items()}
    for digest, row in new.items():
        before = rows.get(digest, row)
        rows[digest] = {
            "as": min(before["as"], row["as"]),
            "classes": sorted({*before["classes"], *row["classes"]}),
            "releases": sorted({*before["releases"], *row["releases"]}, key=_order),
        }
    return dict(sorted(rows.items(), key=lambda item: (item[1]["as"], item[0])))


def recognised_classes() -> dict[str, list[str]]:
    """Classes of the installed transformers' vision models by the registered class whose code they run."""
    registered = {digest: row["as"] for digest, row in json.loads(KNOWN.read_text()).items()}
    classes: dict[str, list[str]] = defaultdict(list)
    for cls in vision_classes():
        name = f"{cls.__module__}.{cls.__name__}"
        try:
            same = registered.get(fingerprint(cls))
        except Unreadable:
            same = None
        if same is not None and name not in FORWARDS:
            classes[same].append(name)
    return dict(sorted(classes.items()))


def gains() -> Iterator[tuple[str, list[float]]]:
    """Yields each vision tower of transformers with its shares."""
    for entry in towers():
        print(entry.model, *(found := shares(entry)), flush=True)
        yield entry.model, found


def towers() -> list[coverage.Entry]:
    """The vision towers of transformers."""
    excluded = coverage.excluded(coverage.EXCLUDED.read_text())
    listed = coverage.entries(coverage.TOWERS.read_text())
    return [entry for entry in listed if entry.package == "transformers" and entry.name not in excluded]


def shares(entry: coverage.Entry) -> list[float]:
    """A tower's fused share with recognition, and by registered names alone."""
    names = {name for row in json.loads(KNOWN.read_text()).values() for name in row["classes"]}

    def by_name(cls: type[nn.Module]) -> str | None:
        return recognised(cls) if f"{cls.__module__}.{cls.__qualname__}" in names else None

    found = []
    for function in (recognised, by_name):
        with patch.object(forwards, "recognised", function), patch.object(third_party, "recognised", function):
            third_party._has_fused_forward.cache_clear()
            model = coverage.build(replace(entry, called=False))
            found.append(round(coverage.inside(model, optimize(model)), 4))
    third_party._has_fused_forward.cache_clear()
    return found


def vision_classes() -> Iterator[type[nn.Module]]:
    """Every module class with a forward of its own, in files of transformers that mention patches."""
    root = Path(importlib.import_module("transformers").__file__ or "").parent / "models"
    for path in sorted(root.glob("*/modeling_*.py")):
        if "patch" not in path.read_text(encoding="utf-8").lower():
            continue
        name = f"transformers.models.{path.parent.name}.{path.stem}"
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            print(f"{name}: {error}")
            continue
        for value in vars(module).values():
            mine = isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == name
            if mine and "forward" in vars(value):
                yield value


def _class(name: str) -> type[nn.Module] | None:
    """The class of that full name; None if the installed release has none."""
    path, _, attribute = name.rpartition(".")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old paths are deprecated
            cls = getattr(importlib.import_module(path), attribute, None)
    except ImportError:
        return None
    return cls if isinstance(cls, type) and f"{cls.__module__}.{cls.__qualname__}" == name else None


def _order(release: str) -> tuple:
    package, version = release.split()
    return package, [int(n) for n in version.split(".")]


if __name__ == "__main__":
    main()
