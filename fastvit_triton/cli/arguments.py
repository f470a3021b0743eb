"""Options that several commands have, and checks of values: functions of (option, value) that raise ValueError."""

import importlib.util
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .parser import Options

if TYPE_CHECKING:
    import torch

WORKERS = min(8, os.cpu_count() or 1)  # by default
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # short names, which options take, too


def check_device(option: str, name: str) -> None:
    """Raises ValueError if PyTorch cannot use this device."""
    if "RANK" not in os.environ:  # torchrun's processes allocate on their own GPU only, later
        select_device(name)


def select_device(name: str) -> "torch.device":
    """The device of that name, after a test allocation; "auto" prefers a GPU."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name} does not work here ({str(error).splitlines()[0]}); leave it out") from error


def dtype_name(text: str) -> str:
    """PyTorch's name of a dtype; other text as it is, for `choices`."""
    return DTYPES.get(text, text)


def at_least(least: int) -> Callable[[str, int], None]:
    """A check that an integer is `least` or more."""

    def check(option: str, value: int) -> None:
        if value < least:
            raise ValueError(f"{option} is {value}; use an integer of at least {least}")

    return check


def number(holds: Callable[[float], bool], use: str) -> Callable[[str, float], None]:
    """A check of a number; `use` says in an error which to use."""

    def check(option: str, value: float) -> None:
        if not holds(value):
            raise ValueError(f"{option} is {value:g}; {use}")

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
    """Raises ValueError if `name` is no data set that needs no files, such as "digits", no folder and no hf:NAME."""
    if name.startswith("hf:"):
        from ..train.data.hf import source_of

        source_of(name)
        if importlib.util.find_spec("datasets") is None:
            raise ValueError(f"{option} {name} needs the package datasets; pip install 'fastvit_triton[datasets]'")
    elif name not in ("digits", "scenes", "shapes"):
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
    check_folder_of(option, path)
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{option} {path} is in a folder that cannot be written; give a file elsewhere")


def _check_allow(option: str, text: str) -> None:
    from ..train.data.inspection import ALLOW

    if unknown := [name for name in text.split(",") if name not in ALLOW]:
        raise ValueError(f"{option} has {unknown[0]!r}; use names of {', '.join(ALLOW)}")


SHARED: dict[str, dict[str, Any]] = {
    "--checkpoint": dict(
        required=True,
        metavar="RUN",
        check=check_checkpoint,
        help="output folder of a run, a file, timm/NAME or hf-hub:ORG/NAME of the Hub, or NAME.TAG",
    ),
    "--mean": dict(check=check_channels, metavar="X,…", help="mean of each channel, such as 0.5,0.5,0.5"),
    "--std": dict(check=check_channels, metavar="X,…", help="std of each channel, such as 0.5,0.5,0.5"),
    "--license": dict(
        metavar="NAME",
        help="licence of the weights, as the Hub names it, such as mit, apache-2.0 or cc-by-4.0 (default: unknown)",
    ),
    "--allow": dict(
        check=_check_allow,
        metavar="NAME,…",
        help="what is said of the data and not refused, separated by commas; errors name it",
    ),
    "--quick": dict(
        action="store_true", help="do not look for images that stand twice, in both splits or in two classes"
    ),
    "--levels": dict(
        type=float,
        check=number(lambda value: 0 < value < math.inf, "use a number above 0, that of white"),
        help="value of white in images of more than 8 bits, such as 4095 (default: 65535 for 16 bits, 1 for floats)",
    ),
    "--skip-bad-images": dict(action="store_true", default=None, help="skip images that cannot be read"),
    "--max-pixels": dict(
        type=int,
        default=2**26,  # `train.data.transform.MAX_PIXELS`, which would import PyTorch
        check=at_least(1),
        help="images with more pixels are not decoded (default: 67,108,864, which is 8192 x 8192)",
    ),
    "--device": dict(default="auto", check=check_device, help="cpu, cuda, …; auto means a GPU if there is one"),
    "--workers": dict(
        type=int,
        default=WORKERS,
        check=at_least(0),
        help=f"processes that decode images (default: {WORKERS})",
    ),
    "--batch": dict(type=int, check=at_least(1), help="images per batch"),
    "--img-size": dict(
        also=("--image-size",),
        type=image_size,
        check=check_size,
        metavar="SIZE",
        help="image side in pixels, or HEIGHTxWIDTH (default: the model's)",
    ),
    "--dtype": dict(
        type=dtype_name,
        choices=tuple(DTYPES.values()),
        help="of weights and images (default: bfloat16 on a GPU, float32 elsewhere)",
    ),
}


def add_shared(parser: Options, *names: str, default: str = "") -> None:
    """Adds options of `SHARED`; `default` is named in their help."""
    for name in names:
        options = dict(SHARED[name])
        options["help"] += f" (default: {default})" if default else ""
        parser.add_argument(name, *options.pop("also", ()), **options)


def add_checkpoint(parser: Options) -> None:
    """Adds the required --checkpoint, and --mean and --std, which `load_trained` reads."""
    add_shared(parser, "--checkpoint")
    add_shared(parser, "--mean", "--std", default="that of the checkpoint")
