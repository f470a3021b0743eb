"""What commands share: a checkpoint, a device, and one line to say it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    import torch
    from torch import nn


def trained(path: Path) -> tuple["nn.Module", dict]:
    """A model and what its file says of its training; what it does not say takes the usual values."""
    from ..train.checkpoint import checksum
    from ..train.image import IMAGENET_MEAN, IMAGENET_STD, Transform
    from ..weights import load_model

    model, header = load_model(path)
    about = {"data": None, "batch_size": 64, "skip_bad_images": False} | json.loads(header.get("training", "{}"))
    if "crc32" in about and about["crc32"] != checksum(model):
        raise ValueError(f"{path} is damaged: its tensors are not those that were written")
    channels = model.config.in_chans
    usual = {"size": model.config.img_size, "mean": IMAGENET_MEAN[:channels], "std": IMAGENET_STD[:channels]}
    about["transform"] = Transform(**about.get("transform", usual))
    about["classes"] = tuple(about.get("classes", map(str, range(model.config.num_classes))))
    return model, about


def choose(name: str) -> "torch.device":
    """The device of that name, once it has been seen to work."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name} does not work here ({str(error).splitlines()[0]}); leave it out") from error


def say(text: str) -> None:
    """One line on stdout, never folded, coloured or parsed."""
    Console(soft_wrap=True).print(text, markup=False, highlight=False)


def complain(text: str, code: int) -> int:
    """One line on stderr; returns the exit code."""
    text = f"fastvit-triton: {'' if code == 130 else 'error: '}{text}"
    Console(stderr=True, soft_wrap=True).print(text, markup=False, highlight=False)
    return code
