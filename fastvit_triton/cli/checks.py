"""Checks of values, for `check=` of an option: functions of (option, value) that raise ValueError."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path


def at_least(least: int) -> Callable[[str, int], None]:
    """A check that an integer is `least` or more."""

    def check(option: str, value: int) -> None:
        if value < least:
            raise ValueError(f"{option} is {value}; use an integer of at least {least}")

    return check


def image_size(text: str) -> tuple[int, int] | str:
    """Height and width, from a side or "HEIGHTxWIDTH"; the text itself if it is neither, for `check_size`."""
    words = text.lower().replace("×", "x").split("x")
    if len(words) > 2 or not all(word.isdecimal() for word in words):
        return text
    return int(words[0]), int(words[-1])


def check_size(option: str, size: tuple[int, int] | str) -> None:
    """Raises ValueError unless the size is two positive integers."""
    if isinstance(size, str) or min(size) < 1:
        text = size if isinstance(size, str) else "x".join(map(str, dict.fromkeys(size)))
        raise ValueError(f"{option} is {text}; use a side of at least 1 pixel, or HEIGHTxWIDTH")


def check_model(option: str, name: str) -> None:
    """Raises ValueError if `create_model` knows no such name, or if the name has a tag."""
    from ..models import model_config
    from ..models.weights.pretrained import split_tag

    base, tag = split_tag(name)
    model_config(base)
    if tag:
        raise ValueError(f"{option} is {name}; use --weights {name} for pretrained weights, or {option} {base}")


def is_other(name: str | None) -> bool:
    """True for a model of timm or transformers: timm:NAME, hf:FOLDER and hf:NAME."""
    return bool(name) and str(name).startswith(("timm:", "hf:"))


def check_other(option: str, name: str) -> None:
    """Raises ValueError if there is no such model, or its package is not installed; downloads nothing."""
    from ..checkpoints.locations import REPOSITORY
    from .model_by_name import check_name, package

    kind, _, rest = name.partition(":")
    if kind == "timm":
        check_name(option, name)
        return
    package("transformers")
    folder = Path(rest)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"{option} {name} is a folder without config.json; give one that transformers saved")
    if not folder.is_dir() and (folder.parent.is_dir() or not REPOSITORY.fullmatch(rest)):
        raise ValueError(f"{option} {name} is no folder, and no name on the Hub such as hf:google/vit-base-patch16-224")


def absolute_other(name: str) -> str:
    """The name with an absolute path, if it is that of a folder."""
    folder = Path(name.removeprefix("hf:"))
    return f"hf:{folder.resolve()}" if name.startswith("hf:") and folder.is_dir() else name


def check_weights(option: str, source: str) -> None:
    """As `check_checkpoint`; weights may also be those of a model of timm or transformers, by its name."""
    (check_other if is_other(source) else check_checkpoint)(option, source)


def check_tagged_model(option: str, name: str) -> None:
    """Raises ValueError if `create_model` knows no such name, or if the name has no such tag."""
    from ..models import model_config
    from ..models.weights.pretrained import pretrained_cfg, split_tag

    model_config(split_tag(name)[0])
    pretrained_cfg(name)


def check_checkpoint(option: str, source: str) -> None:
    """Raises ValueError if there is no file and no folder of a run at `source`, and it names nothing on the Hub."""
    from ..models.weights.pretrained import find_location

    try:
        place = find_location(source)
        if place.is_local:
            place.weights()
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error


def check_channels(option: str, text: str) -> None:
    """Raises ValueError unless the text is one number in [0, 1] for each channel, such as 0.5,0.5,0.5."""
    try:
        values = channels(text)
    except ValueError:
        values = ()
    if len(values) not in (1, 3) or not all(0 <= value <= 1 for value in values) or ("std" in option and 0 in values):
        raise ValueError(f"{option} is {text}; use one number in [0, 1], or three separated by commas")


def channels(text: str) -> tuple[float, ...]:
    """The numbers in a text such as 0.5,0.5,0.5."""
    return tuple(map(float, text.split(",")))


def check_data(option: str, name: str) -> None:
    """Raises ValueError if `name` is neither "digits" nor "scenes" nor a folder nor hf:NAME."""
    if name.startswith("hf:"):
        from ..train.data.hf import source_of

        source_of(name)
        if importlib.util.find_spec("datasets") is None:
            raise ValueError(f"{option} {name} needs the package datasets; pip install 'fastvit_triton[datasets]'")
    elif name not in ("digits", "scenes"):
        check_folder(option, Path(name))


def check_folder(option: str, path: Path) -> None:
    """Raises ValueError if there is no folder at `path`."""
    if not path.is_dir():
        raise ValueError(
            f"{option} {path} is not a folder; give one that holds <class>/, or train/<class>/ and val/<class>/"
        )


def data_name(data: str) -> str:
    """The name of a data set for its output folder: the last part of a path, or of a name on the Hub."""
    if data.startswith("hf:"):
        from ..train.data.hf import source_of

        data = source_of(data).name
    return Path(data).resolve().name


def check_transform(option: str, name: str) -> None:
    """Raises ValueError unless `name` names a callable as module:attribute."""
    from ..train.data.custom import CustomTransform

    try:
        CustomTransform(name)
    except ValueError as error:
        raise ValueError(f"{option}{str(error).removeprefix('transform')}") from error


def check_folder_of(option: str, path: Path) -> None:
    """Raises ValueError if the folder that shall hold a file or a folder does not exist."""
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path} is in a folder that does not exist; create {path.parent} first")


def check_output(option: str, path: Path) -> None:
    """Raises ValueError if a file cannot be written at `path`."""
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder; give a file")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path} is in a folder that does not exist; create {path.parent} first")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{option} {path} is in a folder that cannot be written; give a file elsewhere")
