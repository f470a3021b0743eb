"""Shared by the commands: options for the device and for image files, and one-line messages."""

import argparse
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.progress import Progress, track

from ..files import printable
from .checks import at_least

if TYPE_CHECKING:
    import torch
    from torch import nn

Item = TypeVar("Item")
BENCH = "pip install 'fastvit_triton[bench]'"  # has timm


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """Adds --device, which `select_device` reads."""
    text = "cpu, cuda, …; auto means a GPU if there is one"
    parser.add_argument("--device", default="auto", check=check_device, help=text)


def add_workers_option(parser: argparse.ArgumentParser) -> None:
    """Adds --workers."""
    default = min(8, os.cpu_count() or 1)
    text = f"processes that decode images (default: {default})"
    parser.add_argument("--workers", type=int, default=default, check=at_least(0), help=text)


def add_skip_option(parser: argparse.ArgumentParser) -> None:
    """Adds --skip-bad-images, which defaults to None."""
    text = "skip images that cannot be read"
    parser.add_argument("--skip-bad-images", action="store_true", default=None, help=text)


def add_max_pixels_option(parser: argparse.ArgumentParser) -> None:
    """Adds --max-pixels; the default is `train.data.transform.MAX_PIXELS`, which would import PyTorch."""
    text = "images with more pixels are not decoded (default: 67,108,864, which is 8192 x 8192)"
    parser.add_argument("--max-pixels", type=int, default=2**26, check=at_least(1), help=text)


def check_device(option: str, name: str) -> None:
    """Raises ValueError if PyTorch cannot use this device."""
    if "RANK" not in os.environ:  # torchrun's processes allocate on their own GPU only, later
        select_device(name)


def select_device(name: str) -> "torch.device":
    """The device of that name, after a test allocation; "auto" prefers a GPU.

    Raises:
        ValueError: PyTorch cannot use this device here.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name} does not work here ({str(error).splitlines()[0]}); leave it out") from error


def show_warmup(model: "nn.Module", example: Any, train: bool, quiet: bool = False) -> None:
    """Compiles the kernels of a model, with `fastvit_triton.warmup`; shows a progress bar on a terminal."""
    from ..deploy.warm_up import warmup

    console = Console(stderr=True, quiet=quiet)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        stage = bar.add_task("compiling kernels", total=None)
        warmup(model, example, train, lambda done, total: bar.update(stage, completed=done, total=total))


def tracked(items: Iterable[Item], total: int, label: str) -> Iterator[Item]:
    """Yields the items; shows a progress bar on a terminal, on stderr."""
    console = Console(stderr=True)
    yield from track(items, label, total, console=console, transient=True, disable=not console.is_terminal)


def print_line(text: str) -> None:
    """Prints text on stdout without wrapping, colours or markup."""
    Console(soft_wrap=True).print(printable(text), markup=False, highlight=False)


def print_error(text: str, code: int) -> int:
    """Prints one line on stderr and returns the exit code."""
    _print_on_stderr(f"fastvit-triton: {'' if code == 130 else 'error: '}{text}")
    return code


def print_skipped(text: str) -> None:
    """Prints one line on stderr about an input that is left out, while the command goes on with the others."""
    _print_on_stderr(f"fastvit-triton: skipped: {text}")


def print_warning(text: str) -> None:
    """Prints one line on stderr, for what does not change the exit code."""
    _print_on_stderr(f"fastvit-triton: warning: {text}")


def _print_on_stderr(text: str) -> None:
    Console(stderr=True, soft_wrap=True).print(printable(text), markup=False, highlight=False)
