"""Checks of values, for `check=` of an option: functions of (option, value) that raise ValueError."""

import os
from collections.abc import Callable
from pathlib import Path


def at_least(least: int) -> Callable[[str, int], None]:
    """A check that an integer is `least` or more."""

    def check(option: str, value: int) -> None:
        if value < least:
            raise ValueError(f"{option} is {value}; use an integer of at least {least}")

    return check


def check_model(option: str, name: str) -> None:
    """Raises ValueError if `create_model` knows no such name."""
    from ..models import model_config

    model_config(name)


def check_checkpoint(option: str, path: str | Path) -> None:
    """Raises ValueError if there is no file, and no folder of a run, at `path`."""
    file = Path(path)
    file = file / "model.safetensors" if file.is_dir() else file
    if not file.is_file():
        raise ValueError(f"there is no checkpoint {file}; give {option} the output folder of a run, or a file")


def check_data(option: str, name: str) -> None:
    """Raises ValueError if `name` is neither "digits" nor a folder."""
    if name != "digits" and not Path(name).is_dir():
        raise ValueError(f"{option} {name} is not a folder; give one that holds train/<class>/ and val/<class>/")


def check_output(option: str, path: Path) -> None:
    """Raises ValueError if a file cannot be written at `path`."""
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder; give a file")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path} is in a folder that does not exist; create {path.parent} first")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{option} {path} is in a folder that cannot be written; give a file elsewhere")
