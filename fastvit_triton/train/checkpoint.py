"""The state of a run, in one file: enough to go on as if nothing had happened. The newest two are kept."""

import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from torch import nn
from torch.optim import Optimizer

from ..files import replacing

if TYPE_CHECKING:
    from .loop import Progress
    from .step import Step

STATE, PREVIOUS = "training_state.pt", "training_state.previous.pt"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns the several ways in which libraries report a failed write of `path` into one OSError with one sentence."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        cause = error.__cause__ or error
        why = getattr(cause, "strerror", None) or str(cause).splitlines()[0]
        raise OSError(f"cannot write {path}: {why}; what it held before is intact") from error


def state_of(
    model: nn.Module, optimizer: Optimizer, step: "Step", progress: "Progress", history: list[dict], settings: dict
) -> dict:
    """Everything that decides how a run goes on, as tensors, numbers, names and containers of them.

    Args:
        model: the module in training.
        optimizer: its optimiser.
        step: whose scaler and average have a state of their own.
        progress: the last report of `fit`.
        history: one row of numbers for each finished epoch.
        settings: what the run was asked to do.
    """
    seen = ("epoch", "step", "images", "loss_sum", "right", "lr", "seconds", "began", "done")
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "average": None if step.average is None else step.average.state_dict(),
        "scaler": step.scaler.state_dict(),
        "progress": {name: getattr(progress, name) for name in seen},
        "history": history,
        "settings": settings,
        "generators": generators(),
    }


def save_state(folder: Path, state: dict) -> None:
    """Writes a state to the folder, whole or not at all, and keeps the one before.

    Every record in the file has a CRC-32, which `load_state` checks. A failed write raises OSError and leaves both
    files as they were.

    Args:
        folder: an existing one.
        state: from `state_of`.
    """
    path = folder / STATE
    with writing(path), replacing(path, keep=folder / PREVIOUS) as temporary:
        torch.save(state, temporary)


def load_state(path: Path) -> dict:
    """Reads what `save_state` wrote, on the CPU. Refuses a damaged file, and one that wants to run code.

    Args:
        path: the file.

    Raises:
        ValueError: a checksum is wrong, something is missing, or the file is none of ours.
    """
    try:
        with zipfile.ZipFile(path) as records:  # PyTorch writes checksums but does not read them
            if bad := records.testzip():
                raise zipfile.BadZipFile(f"the checksum of {bad} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"there is no {path}") from None
    except (RuntimeError, EOFError, KeyError, ValueError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is damaged or no training state: {str(error).splitlines()[0]}") from error
    parts = {"model", "optimizer", "average", "scaler", "progress", "history", "settings", "generators"}
    if not isinstance(state, dict) or not parts <= state.keys():
        raise ValueError(f"{path} is no training state of ours; give the folder of a run")
    return state


def newest_state(folder: Path) -> tuple[dict, str]:
    """The newest whole state of a run, and a sentence about a newer one that is damaged, or "".

    Args:
        folder: of the run.

    Raises:
        ValueError: there is no state, or none is whole.
    """
    complaints = []
    for path in (folder / STATE, folder / PREVIOUS):
        try:
            state = load_state(path)
        except ValueError as error:
            complaints.append(error)
            continue
        place = state["progress"]
        where = f"epoch {place['epoch']}" + ("" if place["done"] else f", step {place['step']}")
        return state, f"{complaints[0]}; going on from {path}, {where}" if complaints else ""
    raise complaints[0]


def restore(state: dict, model: nn.Module, optimizer: Optimizer, step: "Step", load: Callable[..., None]) -> "Progress":
    """Puts weights, optimiser, average, scaler and random generators back; returns where the run stood.

    Args:
        state: from `load_state`.
        model: of the same shape, on its device.
        optimizer: over its parameters.
        step: with an average if the run kept one.
        load: puts back weights, optimiser and average, called with the four above, as an `Engine` does.
    """
    from .loop import Progress

    load(state, model, optimizer, step)
    step.scaler.load_state_dict(state["scaler"])
    set_generators(state["generators"])
    device = next(model.parameters()).device
    place = state["progress"]
    return Progress(**place | {name: torch.as_tensor(place[name], device=device) for name in ("loss_sum", "right")})


def checksum(model: nn.Module) -> int:
    """CRC-32 of all tensors of a model, in order: their bytes, not their names."""
    total = 0
    for tensor in model.state_dict().values():
        total = zlib.crc32(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy(), total)
    return total


def generators() -> dict:
    """The states of PyTorch's global random generators, on the CPU and on every GPU in use."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"cpu": torch.get_rng_state(), "cuda": gpus}


def set_generators(states: dict) -> None:
    """Puts back what `generators` returned; a GPU that was not there then is left alone."""
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
