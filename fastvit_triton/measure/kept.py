"""Manages the files of `kernels.measured`: add, list, remove, export and import measurements."""

import contextlib
import datetime
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import filelock
import torch

from ..files import replacing
from ..kernels import choose, measured
from .machine import driver


def add(facts: dict, rows: dict[str, dict], ways: dict[str, dict], run: dict) -> Path:
    """Adds measurements to the file for these facts, and drops those of other source versions. Returns its path."""
    path = measured.path_of(facts)
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    with _locked(path):
        content = held_in(path)
        if content is None or measured.difference(content, facts) is not None:
            content = dict(format=measured.FORMAT, facts=facts, runs=[], rows={}, ways={})
        content["runs"].append(dict(date=date, **run, **driver()))
        content["rows"] |= rows
        content["ways"] |= ways
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    choose.forget()
    return path


def files() -> list[tuple[Path, dict | None]]:
    """All files of this machine with their contents; None for damaged files."""
    return [(path, held_in(path)) for path in sorted(measured.folder().glob("*.json"))]


def clear() -> list[Path]:
    """Removes all files of this machine and returns their paths."""
    paths = [path for path, _ in files()]
    for path in paths:
        with _locked(path):
            path.unlink(missing_ok=True)
    choose.forget()
    return paths


def export(target: Path, device: torch.device) -> None:
    """Copies the file of this GPU and software."""
    path = measured.path_of(measured.facts_of(device))
    if held_in(path) is None:
        raise ValueError(f"nothing was measured here: there is no file {path}; run `fastvit-triton tune` first")
    with replacing(target) as temporary:
        shutil.copyfile(path, temporary)


def import_from(source: Path, device: torch.device) -> Path:
    """Replaces this machine's file by one exported on a machine with the same GPU and software; returns its path."""
    facts = measured.facts_of(device)
    try:
        text = source.read_text(encoding="utf-8")
        content = measured.parse(text)
    except ValueError as error:  # also if it is not UTF-8
        raise ValueError(f"{source} cannot be imported: {error}") from error
    if (why := measured.difference(content, facts)) is not None:
        raise ValueError(f"{source} is of another GPU or software: {why}")
    path = measured.path_of(facts)
    with _locked(path), replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    choose.forget()
    return path


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Context that locks the file for changes by one process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path.with_suffix(".lock")):
        yield


def held_in(path: Path) -> dict | None:
    """The content of a file; None if it does not exist or is damaged."""
    try:
        return measured.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
